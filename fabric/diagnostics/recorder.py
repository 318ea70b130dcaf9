"""The flight recorder: records what this process is doing, for checks and hang reports; signatures of calls.

[Note: Hooks] Each diagnostic adds functions that are called before and after every forward pass of a module and every
backward pass, in the order in which they were added. The flight recorder's are first, so that it records the end of a
phase even if a later one raises. Around an optimizer's step, torch's own hooks are used, in the same order.

[Note: Signatures] The first message of a call carries a checksum of what must be the same on every rank: operation,
reduction, names, shapes, dtypes. It is an all-gather of rows of one fixed length, since the backends abort or hang if
lengths differ between ranks. If the data of a reduction or gather fits into the row after the checksum, it is sent
there, and each rank reduces the rows in rank order; otherwise the call follows. In large groups, where rows would take
much memory, a max-reduction of the checksum and its negative precedes each call. Every rank sees whether all checksums
agree, so either all ranks raise or none. A rank that cannot make its call sends a checksum that matches no other.
"""

import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from fabric._torch import FakeTensor, real_tensors
from fabric.communicators import Collective, Communicator, Operation, Reduce, fold
from fabric.errors import CollectiveMismatchError, UsageError

__all__ = [
    "CallSite", "Entry", "FlightRecorder", "Hooks", "RecordedCommunicator", "agree", "in_words",
    "sign", "user_call",
]  # fmt: skip

JOB = "job"
STEP = "optimizer step"
HEADING = "where each rank is:"
_WORDS_OF_A_TIMEOUT = ("timed out", "timeout", "did not call")
_NAMED = 8  # ranks named one by one
# Frames in these are not user code.
_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    contextlib.__file__,
)

_CPU = torch.device("cpu")
_SHOWN = 200  # characters of a call in an error
_MOST_UNREAD = 256  # most signatures left on the device
_FAILED = 1 << 32  # the checksum of a rank that cannot make its call
# bytes of a row, and of its checksum
_ROW = 8192
_HEAD = 16
_FEW = 16  # largest group whose rows are gathered


class CallSite(NamedTuple):
    """The place of a call, formatted only when needed."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


class Entry(NamedTuple):
    """A collective that has started.

    Attributes:
        group: the name of the group; for a message, of the group and its two ranks.
        members: the global ranks that must make the call, in group order.
        number: the number of this collective in its group, from 1.
        operation: its name, as the user called it.
        name: the name of a barrier, else empty.
        place: the place of the user's call; ``str()`` of it is the text.
    """

    group: str
    members: Sequence[int]
    number: int
    operation: str
    name: str
    place: object

    def __str__(self) -> str:
        return f"{self.operation}{f'({self.name!r})' if self.name else ''} at {self.place}"


def user_call(frame: FrameType | None) -> CallSite | None:
    """The innermost call, from ``frame`` outwards, in code outside of fabric and torch; None if there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return None if frame is None else CallSite(frame.f_code.co_filename, frame.f_lineno)


def in_words(ranks: Collection[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _NAMED:
        names[_NAMED // 2 : -1] = [f"... ({len(names)} of them)"]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


@dataclass(frozen=True, eq=False)
class Hooks:
    """Functions called around a part of the program; see ``[Note: Hooks]``.

    Attributes:
        before: called without arguments.
        after: called as ``after(result, error)``, even if the part raised. The result is the output of a forward
            pass, None after an error, or the loss of a backward pass.
    """

    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[Any, BaseException | None], object]] = field(default_factory=list)


class FlightRecorder:
    """Records what this process is doing, in plain attributes that the hang reports' thread reads without a lock.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward or backward pass,
    an optimizer step.

    Args:
        report: returns what each rank is doing, for the error of a collective that timed out.

    Attributes:
        process: the process that created this; the other ranks are connected to it alone.
        thread: the thread that created this, whose stack is reported.
        phase: the current phase.
        counts: number of collectives started per group, and of phases per name.
        newest: the key in ``counts`` of the latest one.
        calls: the collective that each thread is in.
        latest: the collective started last.
        checks: called in order before each collective sends data; each raises if it must not run.
        phase_checks: likewise, with the phase's name, before each phase that all ranks must start.
        param_groups: number of each optimizer's groups, by its id.
        on_param_group: called before the step of an optimizer whose number of groups is new.
        unread: signatures still on the device, with their calls.
        around: returns the context in which a collective runs.
    """

    def __init__(self, report: Callable[[], str] = str) -> None:
        self._report = report
        self.process = os.getpid()
        self.thread = threading.get_ident()
        self.phase: str | None = None
        # The phases around the current one.
        self._outer: list[str | None] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.newest = ""
        self.calls: dict[int, Entry] = {}
        self.latest: Entry | None = None
        self.checks: tuple[Callable[[Entry, Collective], None], ...] = ()
        self.phase_checks: tuple[Callable[[str], None], ...] = ()
        self._awaits_backward = False
        self.param_groups: dict[int, int] = {}
        self.on_param_group: Callable[[Any], object] = bool
        self.unread: list[tuple[Tensor, str]] = []
        self.around: Callable[[Entry], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
        )

    def hooks(self, phase: str) -> Hooks:
        """Hooks that record a phase."""
        return Hooks([partial(self.enter, phase)], [self.exit])

    def enter(self, phase: str) -> None:
        """Record a phase's start."""
        self.counts[phase] += 1
        # A step still recorded has raised, or continues after its closure, where torch issues no collectives.
        self._outer.append(None if self.phase is STEP else self.phase)
        self.phase = self.newest = phase

    def exit(self, result: object = None, error: BaseException | None = None) -> None:
        """Record the end of the phase, and add the report to an error that ended it."""
        if error is not None:
            self.annotate(error)
        self.phase = self._outer.pop()

    @property
    def step(self) -> int:
        """The number of the current optimizer step, or of the next one, from 1."""
        return self.counts.get(STEP, 0) + (self.phase is not STEP)

    def enter_step(self, optimizer: Any, *_: object) -> None:
        """Record an optimizer step's start; its pre-hook."""
        self.phase = self.newest = STEP
        self.counts[STEP] += 1
        if len(optimizer.param_groups) != self.param_groups.get(id(optimizer)):
            self.on_param_group(optimizer)
            self.param_groups[id(optimizer)] = len(optimizer.param_groups)

    def exit_step(self, *_: object) -> None:
        """Record the step's end; its post-hook."""
        self.phase = None

    @contextlib.contextmanager
    def during(self, phase: str, needs_all_ranks: bool = False) -> Iterator[None]:
        """A context recorded as a phase that waits for the device."""
        self.check_agreed()
        self.enter(phase)
        try:
            for check in self.phase_checks if needs_all_ranks else ():
                check(phase)
            yield
        except BaseException as error:
            self.exit(None, error)
            raise
        self.exit()

    def check_forward(self, title: str, is_sharded: bool, synchronizes: Callable[[], bool]) -> None:
        """Check a starting forward pass, and the next backward pass, if all ranks must run them."""
        trains = torch.is_grad_enabled()
        if is_sharded or (trains and synchronizes()):
            self._awaits_backward |= trains
            for check in self.phase_checks:
                check(f"forward of {title}")

    def check_backward(self) -> None:
        """Check a starting backward pass, if it is the first after such a forward pass."""
        is_awaited = self._awaits_backward
        self._awaits_backward = False
        for check in self.phase_checks if is_awaited else ():
            check("backward")

    def check_agreed(self) -> None:
        """Read the signatures still on the device; called where the device is waited for anyway.

        Raises:
            CollectiveMismatchError: the ranks made different calls; every rank raises when it reads this.
        """
        unread = self.unread
        self.unread = []
        for front, call in unread:
            if not agree(front):
                ragged = "all_gather(x, ragged=True) or concat=True, where only first dimensions differ; "
                raise CollectiveMismatchError(
                    call,
                    "another rank of the group makes another call, or could not make its own",
                    "the same operation and reduction on every rank, over the same names, shapes and dtypes",
                    f"{ragged * call.startswith('all_gather')}FABRIC_CHECK=1 python ... to see what the others call",
                )

    def annotate(self, error: BaseException) -> None:
        """Add the report as a note to the error of a collective that timed out, if it has none yet."""
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        late = isinstance(error, RuntimeError) and any(
            words in text.lower() for words in _WORDS_OF_A_TIMEOUT
        )
        if late and HEADING not in text and (report := self._report()):
            error.add_note(
                f"{report}\n  Fabric(timeout=7200), in seconds, if a collective may take longer"
            )


class RecordedCommunicator(Communicator):
    """A wrapper of any communicator: records each collective and runs the checks before it.

    The error of a collective that times out gets the report as a note.

    Args:
        inner: the communicator that transfers the data.
        recorder: this process's recorder; its checks run before each collective.
        name: the same on all members, and unique to the group.
        ranks: the members' global ranks, in group order; None for all.
    """

    def __init__(
        self,
        inner: Communicator,
        recorder: FlightRecorder,
        name: str = JOB,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._inner = inner
        self._recorder = recorder
        self._name = name
        # A range, as large in a job of thousands as in one of two.
        self._ranks = range(inner.size) if ranks is None else ranks
        self._groups = 0

    @override
    def run(self, collective: Collective) -> Any:
        if collective.operation is not Operation.NEW_GROUP:
            return self._record(collective)
        self._groups += 1
        name = f"{self._name}/{self._groups}"
        ranks = [self._ranks[rank] for rank in collective.buffer]
        group = self._record(collective)
        return None if group is None else RecordedCommunicator(group, self._recorder, name, ranks)

    @override
    def close(self) -> None:
        self._inner.close()

    def _record(self, collective: Collective) -> Any:
        recorder = self._recorder
        group = self._name
        members = self._ranks
        operation = (
            collective.operation.value if collective.call is None else collective.call.operation
        )
        if os.getpid() != recorder.process:
            raise UsageError(
                f"{operation} in process {os.getpid()}, which rank {self.rank} (process {recorder.process}) has forked",
                "the other ranks are connected to the rank alone, and it would wait for them for ever",
                "collectives in the process of the rank; none in the workers of a DataLoader, nor in other children",
                "the collective in the training loop, on what the worker returns",
            )
        if collective.operation in (Operation.SEND, Operation.RECV):
            pair = collective.message(self.rank)
            group = f"{group} {pair[0]}>{pair[1]}"
            members = [self._ranks[rank] for rank in pair]
        recorder.counts[group] += 1
        place = collective.call and collective.call.place
        place = (
            place or user_call(sys._getframe(1)) or "a backward pass"
        )  # in autograd's own threads
        entry = Entry(group, members, recorder.counts[group], operation, collective.name, place)
        thread = threading.get_ident()
        recorder.latest = recorder.calls[thread] = entry
        recorder.newest = group
        try:
            for check in recorder.checks:
                check(entry, collective)
            with recorder.around(entry):
                return self._run_signed(collective, entry)
        except RuntimeError as error:
            recorder.annotate(error)
            raise
        finally:
            del recorder.calls[thread]

    def _run_signed(self, collective: Collective, entry: Entry) -> Any:
        """Make a call, and raise on all ranks if their calls differ; see ``[Note: Signatures]``."""
        call = collective.call
        recorder = self._recorder
        if call is None or call.text is None:
            return self._inner.run(collective)
        signed, fits = sign(collective, call.text, self.size)
        result = self._inner.run(signed)
        on_cpu = self.device == _CPU
        front = result[:, 0] if result.dim() > 1 else result
        if not isinstance(front, FakeTensor) and (not on_cpu or not agree(front)):  # no dry run
            text = f"{call.text[:_SHOWN]} at {entry.place} (rank {self.rank} of {self.size})"
            recorder.unread.append((front.clone(), text))
            if on_cpu or call.reads or len(recorder.unread) > _MOST_UNREAD:
                recorder.check_agreed()
        if not fits:
            return self._inner.run(collective)
        buffer = collective.buffer
        op = collective.reduce
        rows = result.view(torch.uint8)[:, _HEAD : _HEAD + buffer.nbytes].view(buffer.dtype)
        return rows.clone() if op is None else fold(op, rows.unbind())


def sign(collective: Collective, text: str, size: int) -> tuple[Collective, bool]:
    """The first message of a call, and whether it holds the call's data, so that no second message is needed.

    ``text`` describes the call; empty if it failed. See ``[Note: Signatures]``.
    """
    operation = collective.operation
    buffer = collective.buffer
    row = _row(
        crc32(text.encode(errors="surrogatepass")) if text else _FAILED, buffer.device
    ).clone()
    if size > _FEW:
        front = torch.stack([row[0], -row[0]])
        return Collective(Operation.ALL_REDUCE, front, Reduce.MAX, call=collective.call), False
    fits = buffer.nbytes <= _ROW - _HEAD and operation in (
        Operation.ALL_REDUCE,
        Operation.ALL_GATHER,
    )
    if fits:
        row.view(torch.uint8)[_HEAD : _HEAD + buffer.nbytes] = buffer.view(torch.uint8)
    return Collective(Operation.ALL_GATHER, row, call=collective.call), fits


def agree(front: Tensor) -> bool:
    """Whether all ranks sent one checksum, given all of them, or the largest and the negative of the least."""
    return len(set(map(abs, front.tolist()))) == 1


@lru_cache(maxsize=64)
def _row(checksum: int, device: torch.device) -> Tensor:
    with real_tensors():  # for later calls, too
        return pad(torch.tensor([checksum], device=device), (0, _ROW // 8 - 1))
