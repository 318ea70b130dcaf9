"""The flight recorder: what this process is doing, as notes that checks and hang reports read; signatures of calls.

[Note: Hooks] Each diagnostic adds functions to those that are called before and after each forward pass of a module and
each backward pass. They are called in the order in which they were added. The flight recorder is first, so that it
notes the end of a phase even if a later one raises. Around an optimizer's step they are torch's own hooks, in the same
order.

[Note: Signatures] The first message of a call carries a checksum of what has to be the same on every rank: operation,
reduction, names, shapes, dtypes. It is a gather of rows, as long for every call, since the backends abort or hang where
lengths differ between ranks. What a rank reduces or gathers stands in its row behind the checksum if there is room, and
each rank reduces the rows in the order of ranks; else the call follows. In a group of many ranks, where rows would take
much room, a maximum of the checksum and of its negative goes before each call. All ranks look at the checksums of all,
so that all raise or none. A rank that cannot make its call sends one that agrees with none.
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
    "CallSite", "Entry", "FlightRecorder", "Hooks", "RecordedCommunicator", "agree", "hook_place", "in_words",
    "sign", "user_call",
]  # fmt: skip

JOB = "job"
STEP = "optimizer step"
HEADING = "where each rank is:"
_WORDS_OF_A_TIMEOUT = ("timed out", "timeout", "did not call")
_NAMED = 8  # ranks that are named one by one
# Frames of these are not where the user called.
_NOT_USERS = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)

_CPU = torch.device("cpu")
_SHOWN = 200  # characters of a call in an error
_MOST_UNREAD = 256  # signatures that stay on the device at most
_FAILED = 1 << 32  # the checksum of a rank that cannot make its call
_ROW, _HEAD = 8192, 16  # bytes of a row, and of what its checksum takes of it
_FEW = 16  # ranks at most whose rows are gathered


class CallSite(NamedTuple):
    """The place of a call; its text is made only when it is needed."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.line}"


class Entry(NamedTuple):
    """A collective that was begun.

    Attributes:
        group: names the group; of a message the group and its two ranks.
        members: the ranks of the job that have to make the call, in the order of the group.
        number: of this collective among those of the group, from 1.
        operation: its name, as the user called it.
        name: of a barrier, else empty.
        place: of the user's call, as text or what becomes one.
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
    """The innermost call from here outwards in code that is neither fabric's nor torch's; None when there is none."""
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
    """What is called around a part of the program; see ``[Note: Hooks]``.

    Attributes:
        before: called without arguments.
        after: called as ``after(result, error)``, also when the part raised. The result is the output of a forward
            pass, None after an error, or the loss of a backward pass.
    """

    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[Any, BaseException | None], object]] = field(default_factory=list)


def hook_place(handle: Any) -> tuple[Any, int, Any]:
    """The dict that has a hook of torch, its key there, and the hook, so that it can be removed and put back."""
    hooks = handle.hooks_dict_ref()
    return hooks, handle.id, hooks[handle.id]


class FlightRecorder:
    """What this process is doing. One thread writes plain attributes; that of the hang reports reads them as they are.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward or backward pass,
    an optimizer step.

    Args:
        report: what each rank is doing, for the error of a collective that timed out.

    Attributes:
        process: the process that made this, the only one that the other ranks know.
        thread: the thread that made this, whose stack is of interest.
        phase: the one that this process is in.
        counts: how many collectives of each group, and how many phases of each name, have been begun.
        newest: the key in ``counts`` of the latest one.
        calls: the collective that each thread is in.
        latest: the latest collective that was begun.
        checks: called in this order before each collective moves anything; each raises if it must not.
        phase_checks: likewise, with its name, before each phase that all ranks have to begin.
        param_groups: how many each optimizer has, by its id.
        on_param_group: called before the step of an optimizer that has got another one.
        unread: the signatures that calls have left on the device, and the call.
        around: returns a context for each collective, which is made in it.
    """

    def __init__(self, report: Callable[[], str] = str) -> None:
        self._report = report
        self.process, self.thread = os.getpid(), threading.get_ident()
        self.phase: str | None = None
        # The phases that this one is a part of.
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
        self.around: Callable[[Entry], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def hooks(self, phase: str) -> Hooks:
        """Hooks that note a phase."""
        return Hooks([partial(self.enter, phase)], [self.exit])

    def enter(self, phase: str) -> None:
        """Note that a phase begins."""
        self.counts[phase] += 1
        # A step that is still noted ended in an error, or goes on after its closure, where torch issues no collectives.
        self._outer.append(None if self.phase is STEP else self.phase)
        self.phase = self.newest = phase

    def exit(self, result: object = None, error: BaseException | None = None) -> None:
        """Note that the phase is over, and add the report to the error that ended it."""
        if error is not None:
            self.annotate(error)
        self.phase = self._outer.pop()

    @property
    def step(self) -> int:
        """The number of the present step of an optimizer, or of the next one, from 1."""
        return self.counts.get(STEP, 0) + (self.phase is not STEP)

    def enter_step(self, optimizer: Any, *_: object) -> None:
        """Note that an optimizer begins a step; a hook before it."""
        self.phase = self.newest = STEP
        self.counts[STEP] += 1
        if len(optimizer.param_groups) != self.param_groups.get(id(optimizer)):
            self.on_param_group(optimizer)
            self.param_groups[id(optimizer)] = len(optimizer.param_groups)

    def exit_step(self, *_: object) -> None:
        """Note that it is over; a hook after it."""
        self.phase = None

    @contextlib.contextmanager
    def during(self, phase: str, needs_all_ranks: bool = False) -> Iterator[None]:
        """A context that is a phase, of those that wait for the device."""
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
        """Check a forward pass that begins, and the next backward pass, if all ranks have to make them."""
        trains = torch.is_grad_enabled()
        if is_sharded or (trains and synchronizes()):
            self._awaits_backward |= trains
            for check in self.phase_checks:
                check(f"forward of {title}")

    def check_backward(self) -> None:
        """Check a backward pass that begins, if it is the first one after such a forward pass."""
        is_awaited, self._awaits_backward = self._awaits_backward, False
        for check in self.phase_checks if is_awaited else ():
            check("backward")

    def check_agreed(self) -> None:
        """Read the signatures that are still on the device; where it is waited for anyway.

        Raises:
            CollectiveMismatchError: the ranks made different calls; every rank raises it where it reads that.
        """
        unread, self.unread = self.unread, []
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
        operation = collective.operation.value if collective.call is None else collective.call.operation
        if os.getpid() != recorder.process:
            raise UsageError(
                f"{operation} in process {os.getpid()}, which rank {self.rank} (process {recorder.process}) has forked",
                "the other ranks are connected to the rank alone, and it would wait for them for ever",
                "collectives in the process of the rank; none in the workers of a DataLoader, nor in other children",
                "the collective in the training loop, on what the worker returns",
            )
        if collective.operation in (Operation.SEND, Operation.RECV):
            pair = collective.message(self.rank)
            group, members = f"{group} {pair[0]}>{pair[1]}", [self._ranks[rank] for rank in pair]
        recorder.counts[group] += 1
        place = collective.call and collective.call.place
        place = place or user_call(sys._getframe(1)) or "a backward pass"  # whose threads are autograd's own
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
        """Make a call, and raise on all ranks if they do not make the same one; see ``[Note: Signatures]``."""
        call, recorder = collective.call, self._recorder
        if call is None or call.text is None:
            return self._inner.run(collective)
        signed, fits = sign(collective, call.text, self.size)
        result, on_cpu = self._inner.run(signed), self.device == _CPU
        front = result[:, 0] if result.dim() > 1 else result
        if not isinstance(front, FakeTensor) and (not on_cpu or not agree(front)):  # in no dry run
            text = f"{call.text[:_SHOWN]} at {entry.place} (rank {self.rank} of {self.size})"
            recorder.unread.append((front.clone(), text))
            if on_cpu or call.reads or len(recorder.unread) > _MOST_UNREAD:
                recorder.check_agreed()
        if not fits:
            return self._inner.run(collective)
        buffer, op = collective.buffer, collective.reduce
        rows = result.view(torch.uint8)[:, _HEAD : _HEAD + buffer.nbytes].view(buffer.dtype)
        return rows.clone() if op is None else fold(op, rows.unbind())


def sign(collective: Collective, text: str, size: int) -> tuple[Collective, bool]:
    """The first message of a call that ``text`` describes, empty for one that failed; see ``[Note: Signatures]``.

    And whether it holds what the call passes, which is not made then.
    """
    operation, buffer = collective.operation, collective.buffer
    row = _row(crc32(text.encode(errors="surrogatepass")) if text else _FAILED, buffer.device).clone()
    if size > _FEW:
        front = torch.stack([row[0], -row[0]])
        return Collective(Operation.ALL_REDUCE, front, Reduce.MAX, call=collective.call), False
    fits = buffer.nbytes <= _ROW - _HEAD and operation in (Operation.ALL_REDUCE, Operation.ALL_GATHER)
    if fits:
        row.view(torch.uint8)[_HEAD : _HEAD + buffer.nbytes] = buffer.view(torch.uint8)
    return Collective(Operation.ALL_GATHER, row, call=collective.call), fits


def agree(front: Tensor) -> bool:
    """Whether all ranks passed one checksum: of the checksums of all, or the largest and the negative of the least."""
    return len(set(map(abs, front.tolist()))) == 1


@lru_cache(maxsize=64)
def _row(checksum: int, device: torch.device) -> Tensor:
    with real_tensors():  # for later calls, too
        return pad(torch.tensor([checksum], device=device), (0, _ROW // 8 - 1))
