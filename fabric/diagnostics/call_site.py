"""The line of the user's program that made a call."""

import contextlib
import os
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["CallSite", "user_call"]

# Frames in these files are not user code: fabric, torch, and context managers around a call.
_INTERNAL_PATHS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)


class CallSite(NamedTuple):
    """The file and line of a call. The text is made only when somebody reads it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


def user_call(frame: FrameType | None) -> CallSite | None:
    """Return the innermost call in code outside of fabric and torch, from ``frame`` outwards.

    Returns:
        The place of the call. None if no frame is user code, as in autograd's own threads.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL_PATHS):
        frame = frame.f_back
    if frame is None:
        return None
    return CallSite(frame.f_code.co_filename, frame.f_lineno)
