"""How long the calls of a pool may take, and how long hypothesis may shrink a failing example."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["CallTimes", "ShrinkingBudget"]

# A call counts as hanging if its ranks are idle for this many times the slowest call that passed.
_IDLE_TIMEOUT_FACTOR = 20
_SHORTEST_IDLE_TIMEOUT = 0.2  # seconds


class CallTimes:
    """How long the calls of each function have taken, and which functions have hung."""

    def __init__(self) -> None:
        # The seconds of the slowest call of each function that has passed.
        self._slowest_passed_call: dict[_FunctionKey, float] = {}
        self._hung_functions: set[_FunctionKey] = set()

    def idle_timeout(self, fn: Callable[..., Any], timeout: float) -> float:
        """Return for how many seconds the ranks of a call may be idle before it counts as hanging.

        Args:
            fn: the function of the call.
            timeout: the timeout of the call, which is returned if the function has never hung.
        """
        key = _key_of(fn)
        if key not in self._hung_functions:
            return timeout
        idle_timeout = _IDLE_TIMEOUT_FACTOR * self._slowest_passed_call.get(key, 0.0)
        return min(timeout, max(idle_timeout, _SHORTEST_IDLE_TIMEOUT))

    def record_pass(self, fn: Callable[..., Any], seconds: float) -> None:
        """Record that a call has passed, and the seconds that it has taken."""
        key = _key_of(fn)
        self._slowest_passed_call[key] = max(seconds, self._slowest_passed_call.get(key, 0.0))

    def record_hang(self, fn: Callable[..., Any]) -> None:
        """Record that a call did not return in time."""
        self._hung_functions.add(_key_of(fn))


class _FunctionKey(NamedTuple):
    """The file and the name of a function.

    A test may make a new lambda in each example. All these lambdas have the same key.
    """

    file: str
    name: str


def _key_of(fn: Callable[..., Any]) -> _FunctionKey:
    """Return the key of a function. A callable object has the name of its class, and no file."""
    function = getattr(fn, "func", fn)  # the function of a functools.partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    file = code.co_filename if code is not None else ""
    return _FunctionKey(file, name)


@dataclass
class _TestRun:
    """The calls in one run of a hypothesis test, or the calls outside of any test.

    Attributes:
        frame: the outermost frame of hypothesis, which tells the runs apart. None outside of tests.
        failures: how many calls have failed.
        seconds_used: how long the failing calls but the first have taken.
        known_calls: hashes of the calls that were admitted.
    """

    frame: FrameType | None
    failures: int = 0
    seconds_used: float = 0.0
    known_calls: set[bytes] = field(default_factory=set)


# [Note: Shrinking a hang]
# To shrink an example, hypothesis runs some hundred smaller ones, and many of them fail in the same
# way. If a rank hangs, each of them would take the whole timeout. So once a function has hung, a
# later call of it ends as soon as its ranks have been idle for much longer than its slowest call
# that passed. Ranks that use the processor have the whole timeout, also on a busy machine. And when
# failing examples have taken long enough, the pool rejects new ones, as `assume` does, so that
# hypothesis reports the smallest example so far.
class ShrinkingBudget:
    """The time that failing calls may take in one run of a hypothesis test.

    Args:
        seconds: the time that all failing calls but the first may take together.
    """

    def __init__(self, seconds: float) -> None:
        self._max_seconds = seconds
        self._run = _TestRun(frame=None)

    def reject_if_exceeded(self, pickled_call: bytes) -> None:
        """Reject a call of a new example if the failing calls of this test have taken too long.

        The pool calls this method before each call. Two calls are never rejected: one that was
        made before, since hypothesis repeats examples, and a call of the example that hypothesis
        reports in the end.

        Args:
            pickled_call: the function and its arguments.

        Raises:
            UnsatisfiedAssumption: the call is rejected. Hypothesis takes the example for invalid.
        """
        # A test of hypothesis has imported hypothesis, which is an optional dependency.
        hypothesis = sys.modules.get("hypothesis")
        frame_of_run = None
        if hypothesis is not None and hypothesis.currently_in_test_context():
            frame_of_run = _outermost_frame_of_hypothesis()
        if frame_of_run is not self._run.frame:
            # Another run of a test has begun, or a test has ended. Its budget is new.
            self._run = _TestRun(frame_of_run)
        if hypothesis is None or frame_of_run is None:
            return  # not in a test of hypothesis
        call_hash = hashlib.sha256(pickled_call).digest()
        if self._run.seconds_used > self._max_seconds:
            from hypothesis.control import current_build_context

            if current_build_context().is_final:
                hypothesis.note(
                    "This may not be the smallest example: failing examples took longer than "
                    f"max_shrinking_time={self._max_seconds:g} seconds of the RankPool."
                )
            elif call_hash not in self._run.known_calls:
                hypothesis.reject()  # raises
        self._run.known_calls.add(call_hash)

    def record_failure(self, seconds: float) -> None:
        """Record that a call has failed after some seconds, which include the start of its ranks.

        The first failure is free, since it may have taken a whole timeout.
        """
        self._run.failures += 1
        if self._run.failures > 1:
            self._run.seconds_used += seconds


def _outermost_frame_of_hypothesis() -> FrameType | None:
    """Return the outermost frame of hypothesis on the stack.

    The frame lives as long as the run of a test, and so identifies the run.
    """
    outermost: FrameType | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("hypothesis."):
            outermost = frame
        frame = frame.f_back
    return outermost
