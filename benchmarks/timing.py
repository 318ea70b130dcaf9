"""How a contestant measures: seconds by torch's own timer, and Python calls by the interpreter's hook."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.benchmark import Timer

__all__ = ["count_calls", "seconds", "times"]


def seconds(action: Callable[[], Any], number: int) -> float:
    """Seconds that one call takes, as the mean of ``number``, after a few to warm up: the same count on every rank."""
    return Timer("action()", globals={"action": action}).timeit(number).mean


def times(
    row: str, action: Callable[[], Any], number: int, scale: float = 1e6
) -> Callable[[], dict[str, float]]:
    """A function that measures one row, by default in microseconds."""
    return lambda: {row: scale * seconds(action, number)}


# torch compares layouts of sharded tensors where their hashes fall together, which depends on addresses.
_BY_CHANCE = ("__eq__", "_check_equals")


def count_calls(action: Callable[[], Any], number: int = 1) -> int:
    """Calls of Python functions in one call of ``action``, which is not counted itself; this thread's only.

    Comparisons are left out. The least of ``number`` runs: the collector of garbage may call into Python at any time.
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
