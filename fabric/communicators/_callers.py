"""Where the user called, and why a rank makes no further calls."""

import contextlib
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["call_site", "location", "reason_to_leave", "user_frame"]

# Frames of these are not where the user called.
_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from here outwards that is neither fabric's nor torch's; None when there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return frame


def location(code: CodeType | None, offset: int) -> str:
    """File and line of an instruction; of none, as autograd's own threads have no frame of the user."""
    if code is None:
        return "a backward pass"
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return f"{code.co_filename.removeprefix(os.getcwd() + os.sep)}:{next(lines, None) or code.co_firstlineno}"


def call_site() -> str:
    """File and line of the user's call that is under way in this thread."""
    frame = user_frame(sys._getframe(1))
    return location(None, 0) if frame is None else location(frame.f_code, frame.f_lasti)


def reason_to_leave() -> str:
    """Why this process makes no further calls, asked when it closes its communicator."""
    error = sys.exception() or getattr(sys, "last_value", None)
    return "it has finished" if error is None else f"it raised {type(error).__name__}: {error}"
