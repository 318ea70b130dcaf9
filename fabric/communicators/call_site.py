"""The line of the user's program that made a call."""

import contextlib
import inspect
import os
import re
import sys
import warnings
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

__all__ = [
    "CallSite",
    "fold_frames",
    "frame_locals",
    "is_user_code",
    "is_user_file",
    "user_call",
    "user_frames",
    "user_line",
    "warn_user",
]

# Frames in these files are not user code: fabric, torch, and context managers around a call.
_FABRIC = str(Path(__file__).parents[1]) + os.sep
_INTERNAL_PATHS = (
    _FABRIC,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent) + os.sep
_FRAME_OF_STACK = re.compile(r'File "(?P<file>[^"]*)"')  # the beginning of a line of faulthandler
# The references to a dict of locals within frame_locals(): those of the frame, of the variable and
# of the argument of sys.getrefcount().
_REFERENCES_TO_LOCALS = 3


class CallSite(NamedTuple):
    """The file and line of a call. Its ``str()`` is the text for an error.

    The text is made only by ``str()``, since every collective makes a call site and few are shown.

    Attributes:
        file: the path of the file.
        line: the number of the line.
        function: the name of fabric's function that the line calls, such as ``"all_reduce"``. Empty
            if the line calls torch, or if the function is unknown.
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        # A file below the current folder is shown with its relative path.
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame runs code of the user, and not of fabric or torch."""
    return is_user_file(frame.f_code.co_filename)


def is_user_file(file: str) -> bool:
    """Return whether a file has code of the user, and not of fabric or torch."""
    return not file.startswith(_INTERNAL_PATHS)


def user_call(frame: FrameType | None) -> CallSite | None:
    """Return the line of the user's code from which a frame was called.

    Args:
        frame: a frame of fabric, of torch, or of the user.

    Returns:
        The line of ``frame`` if it is user code, or else of the nearest caller that is. None if no
        caller is user code, as in autograd's own threads, or if ``frame`` is None.
    """
    # The code that the line of the user calls, if it is code of fabric or torch.
    called_code: CodeType | None = None
    # Like is_user_code(). A call would cost time in every collective.
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL_PATHS):
        called_code = frame.f_code
        frame = frame.f_back
    if frame is None:
        return None
    function = ""
    if called_code is not None and called_code.co_filename.startswith(_FABRIC):
        function = called_code.co_name
    return CallSite(frame.f_code.co_filename, frame.f_lineno, function)


def frame_locals(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame, which the frame does not keep alive.

    Before Python 3.13, the frame of a function keeps the dict that ``frame.f_locals`` returns, a
    copy, until the function returns. ``del model`` in the function would then free nothing.
    """
    f_locals = frame.f_locals
    values = dict(f_locals)
    # The locals of a module or a class are its namespace, and no copy.
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if sys.version_info < (3, 13) and is_function:
        # ``locals()`` returns the same dict, which the user may have kept. Then the dict has more
        # references than the three that it has here anyway.
        is_kept_by_user = sys.getrefcount(f_locals) > _REFERENCES_TO_LOCALS
        if not is_kept_by_user:
            f_locals.clear()
    return values


def warn_user(message: str) -> None:
    """Warn at the nearest line of the user's code that calls fabric, directly or through torch.

    A fixed ``stacklevel`` would not do in a hook of an optimizer: each learning rate scheduler of
    torch adds a frame to ``optimizer.step()``.
    """
    stacklevel = 1  # this function
    frame = sys._getframe()
    while frame is not None and not is_user_code(frame):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, stacklevel=stacklevel)


def _is_program_file(file: str) -> bool:
    """Return whether a file is not part of fabric, torch or Python itself.

    Unlike :func:`is_user_file`, this function takes Python's own modules for internal, too.
    """
    if file.startswith(("<frozen", *_INTERNAL_PATHS)):
        return False
    # Installed packages count as the user's. Their folder, site-packages or dist-packages, is
    # inside of the folder of the standard library.
    is_installed_package = f"-packages{os.sep}" in file
    return is_installed_package or not file.startswith(_STANDARD_LIBRARY)


def user_line(frame: FrameType | None) -> CallSite | None:
    """Return the innermost line of the user's code on a stack, for a hang report.

    Unlike :func:`user_call`, this function also skips Python's own modules, since a rank may wait
    in one of them, such as ``threading``. If all lines are in such modules, the result is that of
    :func:`user_call`.

    Args:
        frame: the innermost frame of the stack.
    """
    inner_frame = frame
    while frame is not None and not _is_program_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return user_call(inner_frame)
    return CallSite(frame.f_code.co_filename, frame.f_lineno)


def user_frames(stack: str) -> str:
    """Return the lines of a stack without the frames of fabric, torch and Python itself.

    Args:
        stack: the stack as faulthandler writes it, with one frame on each line.
    """
    lines: list[str] = []
    for line in stack.splitlines():
        frame = _FRAME_OF_STACK.match(line)
        # A line that is no frame, such as "...", stays.
        if frame is None or _is_program_file(frame["file"]):
            lines.append(line)
    return "\n".join(lines)


def fold_frames(stack: str) -> str:
    """Return the lines of a stack with one line for consecutive frames of fabric and torch.

    The innermost frame stays: it shows in which call of torch or fabric the thread is.

    Args:
        stack: the stack as faulthandler writes it, innermost frame first, one frame on each line.
    """
    lines: list[str] = []
    folded_count = 0  # the number of frames that have been left out since the latest line
    # The empty line at the end is no frame, so it ends the last frames that are folded. It is not a
    # part of the result.
    for line in [*stack.splitlines(), ""]:
        frame = _FRAME_OF_STACK.match(line)
        is_internal = frame is not None and frame["file"].startswith(_INTERNAL_PATHS)
        if is_internal and lines:
            folded_count += 1
            continue
        if folded_count > 0:
            noun = "frame" if folded_count == 1 else "frames"
            lines.append(f"... {folded_count} {noun} of fabric and torch")
            folded_count = 0
        lines.append(line)
    return "\n".join(lines[:-1])
