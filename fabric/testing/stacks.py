"""Where a rank that does not return is, read from its stack."""

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Frame", "frames_of_faulthandler", "frames_of_traceback", "is_waiting", "position"]

# Parts of the file name of the innermost frame of a rank that waits for other ranks. The checker
# waits for the calls of other ranks.
_WHERE_RANKS_WAIT = ("torch/distributed/", "fabric/communicators/", "fabric/diagnostics/checker")
_FABRIC = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FRAME = re.compile(r'^  File "(?P<file>.+?)", line (?P<line>\d+) in (?P<function>.+)$', re.M)


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str


def frames_of_faulthandler(text: str) -> list[Frame]:
    """Return the frames of a stack that ``faulthandler`` has written, the innermost first."""
    frames: list[Frame] = []
    for match in _FRAME.finditer(text):
        frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return frames


def frames_of_traceback(stack: traceback.StackSummary) -> list[Frame]:
    """Return the frames of a stack, the innermost first."""
    frames: list[Frame] = []
    for summary in reversed(stack):
        frames.append(Frame(summary.filename, summary.lineno or 0, summary.name))
    return frames


def is_waiting(frames: Sequence[Frame]) -> bool:
    """Return whether a rank waits for other ranks.

    Args:
        frames: the stack of the rank, the innermost frame first.
    """
    if not frames:
        return False
    innermost = frames[0]
    # work.wait() of an asynchronous collective is in C++. The innermost frame is the line of Python
    # that calls it, in any file.
    is_wait_for_work = ".wait(" in _source_line(innermost)
    return is_wait_for_work or any(path in innermost.file for path in _WHERE_RANKS_WAIT)


def position(frames: Sequence[Frame]) -> str:
    """Return in which collective a rank is, and the line of the user's code that called it.

    Args:
        frames: the stack of the rank, the innermost frame first.

    Returns:
        For example ``"in torch.distributed.all_reduce, at ring.py:22: dist.all_reduce(x)"``. The
        collective is left out if the rank is in none. Empty if the stack has no frame of the user.
    """
    collective = ""
    for frame in frames:
        if _is_of_user(frame):
            user_line = f"at {frame.file}:{frame.line}: {_source_line(frame)}"
            return f"in {collective}, {user_line}" if collective else user_line
        # A later frame is further out, and replaces the earlier ones: the outermost one is the
        # function that the user has called. torch wraps this function in one that logs, whose frame
        # does not count.
        is_wrapper = frame.file.endswith("c10d_logger.py")
        if "torch/distributed/" in frame.file and not is_wrapper:
            collective = _qualified_name(frame)
    return ""


def _is_of_user(frame: Frame) -> bool:
    """Return whether a frame belongs to neither torch, fabric, nor the standard library."""
    if frame.file.startswith(_FABRIC):
        return False
    # site-packages and dist-packages are inside of the standard library's folder, so they are
    # checked first. Any installed package but torch counts as the user's.
    is_installed = "-packages/" in frame.file
    if is_installed:
        return "-packages/torch/" not in frame.file
    return not frame.file.startswith(_STANDARD_LIBRARY)


def _qualified_name(frame: Frame) -> str:
    """Return the name of a function of ``torch.distributed``, with the module that users import."""
    _, _, path = frame.file.rpartition("torch/distributed/")
    module = path.removesuffix(".py").replace("/", ".")
    # torch.distributed exports the functions of these files.
    if module in ("distributed_c10d", "__init__"):
        return f"torch.distributed.{frame.function}"
    return f"torch.distributed.{module}.{frame.function}"


def _source_line(frame: Frame) -> str:
    """Return the line of code that a frame runs, or "" if the file cannot be read."""
    return linecache.getline(frame.file, frame.line).strip()
