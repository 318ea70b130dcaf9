"""The line of the user's program that made a call."""

import contextlib
import os
import re
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["CallSite", "is_user_code", "user_call", "user_frames", "user_line"]

# Frames in these files are not user code: fabric, torch, and context managers around a call.
_FABRIC = str(Path(__file__).parents[1]) + os.sep
_INTERNAL_PATHS = (
    _FABRIC,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent) + os.sep
_FRAME_OF_STACK = re.compile(r'File "(?P<file>[^"]*)"')  # the beginning of a line of faulthandler


class CallSite(NamedTuple):
    """The file and line of a call. Its ``str()`` is the text for an error.

    Every collective makes a call site and few are shown, so the text is made only by ``str()``.

    Attributes:
        file: the path of the file.
        line: the number of the line.
        function: the name of the function of fabric that the line calls. Empty if the line calls
            torch, or if it is unknown.
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        # A file below the current folder is shown with its relative path.
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame runs code of the user, and not of fabric or torch."""
    return not frame.f_code.co_filename.startswith(_INTERNAL_PATHS)


def user_call(frame: FrameType | None) -> CallSite | None:
    """Return the line of the user's code from which a frame was called.

    Args:
        frame: a frame of fabric, of torch, or of the user.

    Returns:
        The line of ``frame`` if it is user code, or else of the nearest caller that is. None if no
        caller is user code, as in autograd's own threads, or if ``frame`` is None.
    """
    called_code = None
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL_PATHS):
        called_code = frame.f_code
        frame = frame.f_back
    if frame is None:
        return None
    function = ""
    if called_code is not None and called_code.co_filename.startswith(_FABRIC):
        function = called_code.co_name
    return CallSite(frame.f_code.co_filename, frame.f_lineno, function)


def _is_user_file(file: str) -> bool:
    """Return whether a file is not part of fabric, torch or Python itself."""
    if file.startswith(("<frozen", *_INTERNAL_PATHS)):
        return False
    is_installed = "-packages" + os.sep in file  # a folder of packages in that of the library
    return is_installed or not file.startswith(_STANDARD_LIBRARY)


def user_line(frame: FrameType | None) -> CallSite | None:
    """Return the innermost line of the user's code on a stack, for a report.

    Unlike :func:`user_call`, this function skips Python's own modules, too, in which a rank may
    wait. It is slower. Without a line of the user, it returns what :func:`user_call` returns.

    Args:
        frame: the innermost frame of the stack.
    """
    inner_frame = frame
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return user_call(inner_frame)
    return CallSite(frame.f_code.co_filename, frame.f_lineno)


def user_frames(stack: str) -> str:
    """Return the lines of a stack that are frames of the user's code.

    Args:
        stack: the stack as faulthandler writes it, with one frame on each line.
    """
    lines: list[str] = []
    for line in stack.splitlines():
        frame = _FRAME_OF_STACK.match(line)
        if frame is None or _is_user_file(frame["file"]):
            lines.append(line)
    return "\n".join(lines)
