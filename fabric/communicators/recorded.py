"""A communicator that leaves a note of what it is doing, for those who ask why nothing goes on."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from fabric.communicators._callers import location, user_frame
from fabric.communicators.base import Announcement, Communicator, Reduce
from fabric.errors import FabricError, UsageError

__all__ = ["CLOSURE", "HEADING", "STEP", "Occurrence", "Record", "RecordedCommunicator"]

STEP, CLOSURE = "optimizer step", "optimizer step with a closure"
HEADING = "where each rank is:"
_WORDS_OF_LATENESS = ("timed out", "timeout", "did not come")


class Occurrence(NamedTuple):
    """A collective that was begun.

    Attributes:
        group: names the group, and of a message its two ranks too.
        number: of this one among those of the group, from 1.
        operation: its name, as the user called it.
        name: of a barrier.
        code: the user's code that called.
        offset: of the instruction in it. A file and line are made of the two only when somebody asks.
    """

    group: str
    number: int
    operation: str
    name: str | None
    code: CodeType | None
    offset: int

    def __str__(self) -> str:
        name = "" if self.name is None else f"({self.name!r})"
        return f"{self.operation}{name} at {location(self.code, self.offset)}"


class Record:
    """What this process is doing. One thread writes plain attributes; the watchdog's reads them as they are.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward or backward pass,
    an optimizer step.

    Args:
        explain: the report of who has come and who has not, for the error of a collective that timed out.

    Attributes:
        thread: the thread that made this, whose stack is of interest.
        phase: the one that this process is in.
        counts: how many collectives of each group, and how many phases of each name, have been begun.
        newest: the key in ``counts`` of the latest one.
        calls: the collective that each thread is in.
        latest: the latest collective that was begun.
        members: the ranks of each group but that of the whole job.
    """

    __slots__ = ("_explain", "calls", "counts", "latest", "members", "newest", "phase", "thread")

    def __init__(self, explain: Callable[[], str]) -> None:
        self._explain = explain
        self.thread = threading.get_ident()
        self.phase: str | None = None
        self.counts: dict[str, int] = defaultdict(int)
        self.newest = ""
        self.calls: dict[int, Occurrence] = {}
        self.latest: Occurrence | None = None
        self.members: dict[str, tuple[int, ...]] = {}

    def enter(self, phase: str) -> str | None:
        """Note that a phase begins; the one that it is a part of, to be put back at its end."""
        self.counts[phase] += 1
        # Nothing is a part of a step without a closure: one that is still noted was left by an error.
        before = None if self.phase is STEP else self.phase
        self.phase = self.newest = phase
        return before

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
        """A context that is a phase; of those in every step, the few lines are written where they are needed."""
        before = self.enter(phase)
        try:
            yield
        except RuntimeError as error:
            self.annotate(error)
            raise
        finally:
            self.phase = before

    def annotate(self, error: BaseException) -> None:
        """Add the report to an error that left a phase, where :meth:`explain` has one."""
        if report := self.explain(error):
            error.add_note(report)

    def explain(self, error: BaseException) -> str:
        """The report, if this is the error of a collective that timed out and does not hold it yet; else empty."""
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        late = isinstance(error, RuntimeError) and any(words in text.lower() for words in _WORDS_OF_LATENESS)
        return self._explain() if late and HEADING not in text else ""


class RecordedCommunicator(Communicator):
    """Any communicator, with a note of each collective in the record of this process.

    A collective that times out raises a :class:`fabric.errors.UsageError` that holds the report; an error of fabric's
    own gets it as a note.

    Args:
        inner: what carries the data.
        record: of this process.
        name: the same on all members, and different for each group.
        ranks: the members by their rank in the job, in the order of the group; None for all.
    """

    def __init__(
        self, inner: Communicator, record: Record, name: str = "job", ranks: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner, self._record, self._name = inner, record, name
        # A range, as large in a job of thousands as in one of two.
        self._ranks = range(inner.size) if ranks is None else tuple(ranks)
        self._groups = 0
        self._announced = ""
        if ranks is not None:
            record.members[name] = tuple(ranks)

    @override
    def announce(self, call: Announcement) -> None:
        self._announced = call.operation
        self._inner.announce(call)

    @override
    def over(self, inner: Communicator, name: str, ranks: Sequence[int]) -> "RecordedCommunicator":
        members = [self._ranks[rank] for rank in ranks]
        return RecordedCommunicator(self._inner.over(inner, name, ranks), self._record, name, members)

    @override
    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        return self._run("all_reduce", self._inner.all_reduce, buffer, op)

    @override
    def all_gather(self, buffer: Tensor) -> Tensor:
        return self._run("all_gather", self._inner.all_gather, buffer)

    @override
    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        return self._run("reduce_scatter", self._inner.reduce_scatter, buffer, op)

    @override
    def all_to_all(self, buffer: Tensor) -> Tensor:
        return self._run("all_to_all", self._inner.all_to_all, buffer)

    @override
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        return self._run("broadcast", self._inner.broadcast, buffer, src)

    @override
    def scatter(self, rows: Tensor | None, output: Tensor, src: int) -> Tensor:
        return self._run("scatter", self._inner.scatter, rows, output, src)

    @override
    def gather(self, buffer: Tensor, dst: int) -> Tensor | None:
        return self._run("gather", self._inner.gather, buffer, dst)

    @override
    def send(self, buffer: Tensor, dst: int) -> None:
        self.check_peer(dst, "send", "dst")
        self._run("send", self._inner.send, buffer, dst, group=self._pair(self.rank, dst))

    @override
    def recv(self, buffer: Tensor, src: int) -> Tensor:
        self.check_peer(src, "recv", "src")
        return self._run("recv", self._inner.recv, buffer, src, group=self._pair(src, self.rank))

    @override
    def barrier(self, name: str) -> None:
        self._run("barrier", self._inner.barrier, name, called=name)

    @override
    def broadcast_object(self, value: Any, src: int) -> Any:
        return self._run("broadcast_object", self._inner.broadcast_object, value, src)

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        return self._run("gather_objects", self._inner.gather_objects, value)

    @override
    def new_group(self, ranks: Sequence[int]) -> "RecordedCommunicator | None":
        self.check_members(ranks)
        members, self._groups = sorted(ranks), self._groups + 1
        inner = self._run("new_group", self._inner.new_group, members)
        if inner is None:
            return None
        name = f"{self._name}/{self._groups}"
        return RecordedCommunicator(inner, self._record, name, [self._ranks[rank] for rank in members])

    @override
    def close(self) -> None:
        self._inner.close()

    def _pair(self, src: int, dst: int) -> str:
        group = f"{self._name} {src}>{dst}"
        self._record.members[group] = (self._ranks[src], self._ranks[dst])
        return group

    def _run(
        self,
        operation: str,
        function: Callable[..., Any],
        *arguments: Any,
        group: str | None = None,
        called: str | None = None,
    ) -> Any:
        record, group = self._record, group or self._name
        if self._announced:
            # What a user's operation consists of says less; a barrier is not announced, and never a part of another.
            operation, self._announced = (self._announced if called is None else operation), ""
        record.counts[group] += 1
        frame = user_frame(sys._getframe(1))
        code, offset = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        occurrence = Occurrence(group, record.counts[group], operation, called, code, offset)
        thread = threading.get_ident()
        record.latest = record.calls[thread] = occurrence
        record.newest = group
        try:
            return function(*arguments)
        except RuntimeError as error:
            self._explain(occurrence, error)
            raise
        finally:
            del record.calls[thread]

    def _explain(self, occurrence: Occurrence, error: RuntimeError) -> None:
        if isinstance(error, FabricError):
            self._record.annotate(error)
        elif report := self._record.explain(error):
            raise UsageError(
                f"{occurrence} (rank {self.rank} of {self.size})",
                f"it timed out: {error}\n  {report}",
                "a call that every rank of the group reaches within the timeout",
                "see what keeps the ranks named here; Fabric(timeout=7200) if it may take longer, in seconds",
            ) from error
