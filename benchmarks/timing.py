"""Measurements: seconds by torch's timer, and Python calls by the interpreter's profiling hook."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.benchmark import Timer

__all__ = ["count_calls", "seconds", "times"]


def seconds(action: Callable[[], Any], number: int) -> float:
    """Return the mean seconds of ``number`` calls, after a few calls to warm up.

    The number of calls is the same on every rank.
    """
    return Timer("action()", globals={"action": action}).timeit(number).mean


def times(
    row: str, action: Callable[[], Any], number: int, scale: float = 1e6
) -> Callable[[], dict[str, float]]:
    """Return a function that measures one row, by default in microseconds."""
    return lambda: {row: scale * seconds(action, number)}


# torch compares layouts of sharded tensors whose hashes collide, and hashes depend on addresses.
_BY_CHANCE = ("__eq__", "_check_equals")


def count_calls(action: Callable[[], Any], number: int = 1) -> int:
    """Count the calls of Python functions in this thread during one call of ``action``.

    The call of ``action`` and comparisons are not counted. The result is the lowest count of
    ``number`` runs, because garbage collection may call Python functions at any time.
    """
    return min(_calls(action) for _ in range(number))


def _calls(action: Callable[[], Any]) -> int:
    calls = -1

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name not in _BY_CHANCE

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls
