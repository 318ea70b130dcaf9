"""The flight recorder: what this process is doing, as notes that checks and hang reports read."""

import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from fabric.communicators import Collective, Communicator, Operation
from fabric.diagnostics.contract import Hooks
from fabric.errors import FabricError, UsageError

__all__ = [
    "CLOSURE",
    "HEADING",
    "JOB",
    "STEP",
    "Check",
    "Entry",
    "FlightRecorder",
    "RecordedCommunicator",
    "in_words",
    "location",
    "user_frame",
]

JOB = "job"
STEP, CLOSURE = "optimizer step", "optimizer step with a closure"
HEADING = "where each rank is:"
_WORDS_OF_A_TIMEOUT = ("timed out", "timeout", "did not call")
_NAMED = 8  # ranks that are named one by one
# Frames of these are not where the user called.
_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)


class Entry(NamedTuple):
    """A collective that was begun.

    Attributes:
        group: names the group; of a message the group and its two ranks.
        members: the ranks of the job that have to make the call, in the order of the group.
        number: of this collective among those of the group, from 1.
        operation: its name, as the user called it.
        name: of a barrier, else empty.
        code: the user's code that made the call; None in a backward pass, whose threads are autograd's.
        offset: of the instruction in it. A file and line are made of the two only when somebody asks.
    """

    group: str
    members: Sequence[int]
    number: int
    operation: str
    name: str
    code: CodeType | None
    offset: int

    @property
    def location(self) -> str:
        """File and line of the user's call."""
        return location(self.code, self.offset)

    def __str__(self) -> str:
        return f"{self.operation}{f'({self.name!r})' if self.name else ''} at {self.location}"


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


def in_words(ranks: Collection[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _NAMED:
        names[_NAMED // 2 : -1] = [f"... ({len(names)} of them)"]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


Check = Callable[[Entry, Collective], None]
"""Called with each collective before it moves anything; raises if it must not."""


class FlightRecorder:
    """What this process is doing. One thread writes plain attributes; that of the hang reports reads them as they are.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward or backward pass,
    an optimizer step.

    Args:
        explain: the report of what each rank is doing, for the error of a collective that timed out.

    Attributes:
        thread: the thread that made this, whose stack is of interest.
        phase: the one that this process is in.
        counts: how many collectives of each group, and how many phases of each name, have been begun.
        newest: the key in ``counts`` of the latest one.
        calls: the collective that each thread is in.
        latest: the latest collective that was begun.
        checks: called in this order before each collective.
    """

    __slots__ = ("_explain", "_outer", "calls", "checks", "counts", "latest", "newest", "phase", "thread")

    def __init__(self, explain: Callable[[], str] = str) -> None:
        self._explain = explain
        self.thread = threading.get_ident()
        self.phase: str | None = None
        # The phases that this one is a part of.
        self._outer: list[str | None] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.newest = ""
        self.calls: dict[int, Entry] = {}
        self.latest: Entry | None = None
        self.checks: tuple[Check, ...] = ()

    def hooks(self, title: str = "") -> Hooks:
        """The layer that notes phases: forward passes of the module ``title``, and backward passes."""
        return Hooks(
            before_forward=partial(self.enter, f"forward of {title}"),
            after_forward=self.leave,
            before_backward=partial(self.enter, "backward"),
            after_backward=self.leave,
        )

    def enter(self, phase: str) -> None:
        """Note that a phase begins."""
        self.counts[phase] += 1
        # Nothing is a part of a step without a closure: one that is still noted was left by an error.
        self._outer.append(None if self.phase is STEP else self.phase)
        self.phase = self.newest = phase

    def leave(self, result: object = None, error: BaseException | None = None) -> None:
        """Note that the phase is over, and add the report to the error that ended it."""
        if isinstance(error, RuntimeError):
            self.annotate(error)
        self.phase = self._outer.pop()

    def enter_step(self, _: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that an optimizer begins a step; a hook before it."""
        self.counts[STEP] += 1
        self.phase = self.newest = STEP
        if len(args) > 1 or kwargs:
            self.counts[CLOSURE] += 1
            self.phase = self.newest = CLOSURE

    def leave_step(self, *_: object) -> None:
        """Note that it is over; a hook after it."""
        self.phase = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context that is a phase."""
        self.enter(phase)
        try:
            yield
        except BaseException as error:
            self.leave(None, error)
            raise
        self.leave()

    def annotate(self, error: BaseException) -> None:
        """Add the report to an error that ended a phase, where :meth:`explain` has one."""
        if report := self.explain(error):
            error.add_note(report)

    def explain(self, error: BaseException) -> str:
        """The report, if this is the error of a collective that timed out and does not hold it yet; else empty."""
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        late = isinstance(error, RuntimeError) and any(words in text.lower() for words in _WORDS_OF_A_TIMEOUT)
        return self._explain() if late and HEADING not in text else ""


class RecordedCommunicator(Communicator):
    """Any communicator, with a note of each collective in the flight recorder, and checks before each.

    A collective that times out raises a :class:`fabric.errors.UsageError` that holds the report; an error of fabric's
    own gets it as a note.

    Args:
        inner: what carries the data.
        recorder: of this process; its checks are made before each collective.
        name: the same on all members, and different for each group.
        ranks: the members by their rank in the job, in the order of the group; None for all.
    """

    def __init__(
        self,
        inner: Communicator,
        recorder: FlightRecorder,
        name: str = JOB,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner, self._recorder, self._name = inner, recorder, name
        # A range, as large in a job of thousands as in one of two.
        self._ranks = range(inner.size) if ranks is None else tuple(ranks)
        self._groups = 0

    @override
    def run(self, collective: Collective) -> Any:
        if collective.operation is not Operation.NEW_GROUP:
            return self._record(collective)
        self._groups += 1
        name, ranks = f"{self._name}/{self._groups}", [self._ranks[rank] for rank in collective.buffer]
        group = self._record(collective)
        return None if group is None else RecordedCommunicator(group, self._recorder, name, ranks)

    @override
    def close(self) -> None:
        self._inner.close()

    def _record(self, collective: Collective) -> Any:
        recorder, group, members = self._recorder, self._name, self._ranks
        if collective.operation is Operation.SEND or collective.operation is Operation.RECV:
            pair = collective.message(self.rank)
            group, members = f"{group} {pair[0]}>{pair[1]}", (self._ranks[pair[0]], self._ranks[pair[1]])
        recorder.counts[group] += 1
        frame = user_frame(sys._getframe(1))
        code, offset = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        operation = collective.operation.value if collective.call is None else collective.call.operation
        entry = Entry(group, members, recorder.counts[group], operation, collective.name, code, offset)
        thread = threading.get_ident()
        recorder.latest = recorder.calls[thread] = entry
        recorder.newest = group
        try:
            for check in recorder.checks:
                check(entry, collective)
            return self._inner.run(collective)
        except RuntimeError as error:
            self._explain(entry, error)
            raise
        finally:
            del recorder.calls[thread]

    def _explain(self, entry: Entry, error: RuntimeError) -> None:
        if isinstance(error, FabricError):
            self._recorder.annotate(error)
        elif report := self._recorder.explain(error):
            raise UsageError(
                f"{entry} (rank {self.rank} of {self.size})",
                f"it timed out: {error}\n  {report}",
                "a call that every rank of the group makes within the timeout",
                "see what keeps the ranks named here; Fabric(timeout=7200) if it may take longer, in seconds",
            ) from error
