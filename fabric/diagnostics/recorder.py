"""The flight recorder: what this process is doing, as notes that checks and hang reports read.

[Note: Hooks] Each diagnostic is a layer: functions that are called around forward and backward passes. Setup lists the
layers once, and before and after each part they are called in the order of that list. The flight recorder is first, so
that what another layer raises cannot leave a phase open. Around an optimizer's step they are torch's own hooks, in the
same order.
"""

import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fabric.communicators import Collective, Communicator, Operation

__all__ = [
    "CLOSURE",
    "HEADING",
    "JOB",
    "STEP",
    "Entry",
    "FlightRecorder",
    "Hooks",
    "RecordedCommunicator",
    "in_words",
    "location",
    "user_call",
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

CodePlace = tuple[CodeType, int]
"""An instruction: the code that has it, and its offset there."""


class Entry(NamedTuple):
    """A collective that was begun.

    Attributes:
        group: names the group; of a message the group and its two ranks.
        members: the ranks of the job that have to make the call, in the order of the group.
        number: of this collective among those of the group, from 1.
        operation: its name, as the user called it.
        name: of a barrier, else empty.
        place: the user's call. A file and line are made of it only when somebody asks.
    """

    group: str
    members: Sequence[int]
    number: int
    operation: str
    name: str
    place: CodePlace | None

    def __str__(self) -> str:
        return f"{self.operation}{f'({self.name!r})' if self.name else ''} at {location(self.place)}"


def user_call(frame: FrameType | None) -> CodePlace | None:
    """The innermost call from here outwards in code that is neither fabric's nor torch's; None when there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def location(place: CodePlace | None) -> str:
    """File and line of an instruction; None is in a backward pass, whose threads are autograd's own."""
    if place is None:
        return "a backward pass"
    code, offset = place
    lines = (line for start, end, line in code.co_lines() if start <= offset < end)
    return f"{code.co_filename.removeprefix(os.getcwd() + os.sep)}:{next(lines, None) or code.co_firstlineno}"


def in_words(ranks: Collection[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _NAMED:
        names[_NAMED // 2 : -1] = [f"... ({len(names)} of them)"]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Hooks:
    """One layer of ``[Note: Hooks]``. A function after a part is also called when the part raised.

    Attributes:
        before_forward: called as ``before_forward()``.
        after_forward: called as ``after_forward(output, error)``, one of which is None.
        before_backward: called as ``before_backward()``.
        after_backward: called as ``after_backward(loss, error)``; the error is None if there was none.
    """

    before_forward: Callable[[], object] | None = None
    after_forward: Callable[[Any, BaseException | None], object] | None = None
    before_backward: Callable[[], object] | None = None
    after_backward: Callable[[Tensor, BaseException | None], object] | None = None


class FlightRecorder:
    """What this process is doing. One thread writes plain attributes; that of the hang reports reads them as they are.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward or backward pass,
    an optimizer step.

    Args:
        report: what each rank is doing, for the error of a collective that timed out.

    Attributes:
        thread: the thread that made this, whose stack is of interest.
        phase: the one that this process is in.
        counts: how many collectives of each group, and how many phases of each name, have been begun.
        newest: the key in ``counts`` of the latest one.
        calls: the collective that each thread is in.
        latest: the latest collective that was begun.
        checks: called in this order before each collective moves anything; each raises if it must not.
    """

    __slots__ = ("_outer", "_report", "calls", "checks", "counts", "latest", "newest", "phase", "thread")

    def __init__(self, report: Callable[[], str] = str) -> None:
        self._report = report
        self.thread = threading.get_ident()
        self.phase: str | None = None
        # The phases that this one is a part of.
        self._outer: list[str | None] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.newest = ""
        self.calls: dict[int, Entry] = {}
        self.latest: Entry | None = None
        self.checks: tuple[Callable[[Entry, Collective], None], ...] = ()

    def hooks(self, title: str = "") -> Hooks:
        """The layer that notes phases: forward passes of the module ``title``, and backward passes."""
        return Hooks(
            before_forward=partial(self.enter, f"forward of {title}"),
            after_forward=self.exit,
            before_backward=partial(self.enter, "backward"),
            after_backward=self.exit,
        )

    def enter(self, phase: str) -> None:
        """Note that a phase begins."""
        self.counts[phase] += 1
        # Nothing is a part of a step without a closure: one that is still noted ended in an error.
        self._outer.append(None if self.phase is STEP else self.phase)
        self.phase = self.newest = phase

    def exit(self, result: object = None, error: BaseException | None = None) -> None:
        """Note that the phase is over, and add the report to the error that ended it."""
        if error is not None:
            self.annotate(error)
        self.phase = self._outer.pop()

    def enter_step(self, _: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that an optimizer begins a step; a hook before it."""
        self.phase = self.newest = CLOSURE if len(args) > 1 or kwargs else STEP
        self.counts[self.newest] += 1

    def exit_step(self, *_: object) -> None:
        """Note that it is over; a hook after it."""
        self.phase = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context that is a phase."""
        self.enter(phase)
        try:
            yield
        except BaseException as error:
            self.exit(None, error)
            raise
        self.exit()

    def annotate(self, error: BaseException) -> None:
        """Add the report as a note, if this is the error of a collective that timed out and has none yet."""
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        late = isinstance(error, RuntimeError) and any(words in text.lower() for words in _WORDS_OF_A_TIMEOUT)
        if late and HEADING not in text and (report := self._report()):
            error.add_note(f"{report}\n  Fabric(timeout=7200), in seconds, if a collective may take longer")


class RecordedCommunicator(Communicator):
    """Any communicator, with a note of each collective in the flight recorder, and checks before each.

    The error of a collective that times out gets the report as a note.

    Args:
        inner: what carries the data.
        recorder: of this process; its checks are made before each collective.
        name: the same on all members, and different for each group.
        ranks: the members by their rank in the job, in the order of the group; None for all.
    """

    def __init__(
        self, inner: Communicator, recorder: FlightRecorder, name: str = JOB, ranks: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner, self._recorder, self._name = inner, recorder, name
        # A range, as large in a job of thousands as in one of two.
        self._ranks = range(inner.size) if ranks is None else ranks
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
        if collective.operation in (Operation.SEND, Operation.RECV):
            pair = collective.message(self.rank)
            group, members = f"{group} {pair[0]}>{pair[1]}", [self._ranks[rank] for rank in pair]
        recorder.counts[group] += 1
        operation = collective.operation.value if collective.call is None else collective.call.operation
        place = user_call(sys._getframe(1))
        entry = Entry(group, members, recorder.counts[group], operation, collective.name, place)
        thread = threading.get_ident()
        recorder.latest = recorder.calls[thread] = entry
        recorder.newest = group
        try:
            for check in recorder.checks:
                check(entry, collective)
            return self._inner.run(collective)
        except RuntimeError as error:
            recorder.annotate(error)
            raise
        finally:
            del recorder.calls[thread]
