"""The flight recorder: records what this process is doing, for checks and hang reports."""

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from fabric.communicators import Collective, Communicator, Operation
from fabric.communicators.checked import CheckedCommunicator, PendingSignatures, call_site
from fabric.errors import UsageError
from fabric.hooks import Hooks

__all__ = ["HEADING", "JOB", "Entry", "FlightRecorder", "RecordedCommunicator", "ranks_in_words"]

JOB = "job"
STEP = "optimizer step"
HEADING = "where each rank is:"
_WORDS_OF_A_TIMEOUT = ("timed out", "timeout", "did not call")
_MOST_RANKS = 8  # that are listed in a text


class Entry(NamedTuple):
    """A collective that has started.

    Attributes:
        group: the name of the group. For a message, the group and its two ranks.
        members: the global ranks that must make the call, in group order.
        number: the number of this collective in its group, from 1.
        operation: the name of the operation, as the user called it.
        name: the name of a barrier, else empty.
        call_site: where the user made the call; ``str()`` of it is the text.
    """

    group: str
    members: Sequence[int]
    number: int
    operation: str
    name: str
    call_site: object

    def __str__(self) -> str:
        arguments = f"({self.name!r})" if self.name else ""
        return f"{self.operation}{arguments} at {self.call_site}"


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ``rank 1``, or ``ranks 1, 2``. A long list is cut in the middle."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _MOST_RANKS:
        names[_MOST_RANKS // 2 : -1] = [f"... ({len(names)} of them)"]
    noun = "ranks" if len(names) > 1 else "rank"
    return f"{noun} {', '.join(names)}"


def _no_report() -> str:
    return ""


def _ignore_param_groups(optimizer: torch.optim.Optimizer) -> None:
    pass


class FlightRecorder:
    """Records what this process is doing.

    The attributes are plain values, so that the thread of the hang reports reads them without a
    lock.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward
    or backward pass, an optimizer step.

    Args:
        report: returns what each rank is doing, for the error of a collective that timed out. By
            default such an error gets no report.

    Attributes:
        process: the process that created the recorder. The other ranks are connected to this
            process alone.
        thread: the thread that created the recorder, whose stack is reported.
        phase: the current phase.
        counts: the number of collectives started per group, and of phases started per name.
        latest_key: the key in ``counts`` that was counted last.
        calls: the collective that each thread is in.
        latest: the collective that started last.
        checks: called in order before each collective sends data. A check raises if the collective
            must not run.
        phase_checks: called in order with the phase's name, before each phase that all ranks must
            start. A check raises if the phase must not run.
        param_groups: the number of each optimizer's parameter groups, by its id.
        on_param_group: called before the step of an optimizer whose number of groups has changed.
        signatures: the signatures of calls that have not been read yet.
        collective_context: returns the context in which a collective runs.
    """

    def __init__(self, report: Callable[[], str] = _no_report) -> None:
        self._report = report
        self.process = os.getpid()
        self.thread = threading.get_ident()
        self.phase: str | None = None
        self._outer_phases: list[str | None] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.latest_key = ""
        self.calls: dict[int, Entry] = {}
        self.latest: Entry | None = None
        self.checks: tuple[Callable[[Entry, Collective], None], ...] = ()
        self.phase_checks: tuple[Callable[[str], None], ...] = ()
        self._checks_next_backward = False
        self.param_groups: dict[int, int] = {}
        self.on_param_group: Callable[[torch.optim.Optimizer], object] = _ignore_param_groups
        self.signatures = PendingSignatures()
        self.collective_context: Callable[[Entry], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
        )

    def phase_hooks(self, phase: str) -> Hooks:
        """Return hooks that record a phase."""
        return Hooks([partial(self.enter_phase, phase)], [self.exit_phase])

    def enter_phase(self, phase: str) -> None:
        """Record the start of a phase."""
        self.counts[phase] += 1
        # A step that is still recorded has raised, or continues after its closure. Neither issues
        # collectives of torch.
        outer_phase = None if self.phase is STEP else self.phase
        self._outer_phases.append(outer_phase)
        self.phase = phase
        self.latest_key = phase

    def exit_phase(self, result: object = None, error: BaseException | None = None) -> None:
        """Record the end of the phase, and add the report to an error that ended it."""
        if error is not None:
            self.annotate(error)
        self.phase = self._outer_phases.pop()

    @property
    def step(self) -> int:
        """The number of the current optimizer step, or of the next one, from 1."""
        started = self.counts.get(STEP, 0)
        if self.phase is STEP:
            return started
        return started + 1

    def enter_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the start of an optimizer's step; a pre-hook of the step."""
        self.phase = STEP
        self.latest_key = STEP
        self.counts[STEP] += 1
        if len(optimizer.param_groups) != self.param_groups.get(id(optimizer)):
            self.on_param_group(optimizer)
            self.param_groups[id(optimizer)] = len(optimizer.param_groups)

    def exit_step(self, *_: object) -> None:
        """Record the end of an optimizer's step; a post-hook of the step."""
        self.phase = None

    @contextlib.contextmanager
    def record_phase(self, phase: str, needs_all_ranks: bool = False) -> Iterator[None]:
        """Record the block as a phase that waits for the device.

        Args:
            phase: the name of the phase.
            needs_all_ranks: whether every rank must start the phase. Checked mode compares the
                ranks then. Default: False.
        """
        self.check_signatures()
        self.enter_phase(phase)
        try:
            if needs_all_ranks:
                self._check_phase(phase)
            yield
        except BaseException as error:
            self.exit_phase(None, error)
            raise
        self.exit_phase()

    def check_forward(self, title: str, is_sharded: bool, synchronizes: Callable[[], bool]) -> None:
        """Check a starting forward pass, and the next backward pass, if all ranks must run them."""
        is_training = torch.is_grad_enabled()
        if is_sharded or (is_training and synchronizes()):
            self._checks_next_backward |= is_training
            self._check_phase(f"forward of {title}")

    def check_backward(self) -> None:
        """Check a starting backward pass, if it is the first after a checked forward pass."""
        should_check = self._checks_next_backward
        self._checks_next_backward = False
        if should_check:
            self._check_phase("backward")

    def check_signatures(self) -> None:
        """Read the signatures still on the device. Call this where the device is waited for anyway.

        Raises:
            CollectiveMismatchError: the ranks made different calls.
        """
        self.signatures.check()

    def annotate(self, error: BaseException) -> None:
        """Add the report as a note to the error of a collective that timed out, if it has none."""
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        if not isinstance(error, RuntimeError) or HEADING in text:
            return
        is_timeout = any(words in text.lower() for words in _WORDS_OF_A_TIMEOUT)
        if not is_timeout:
            return
        report = self._report()
        if report:
            remedy = "Fabric(timeout=7200), in seconds, if a collective may take longer"
            error.add_note(f"{report}\n  {remedy}")

    def _check_phase(self, phase: str) -> None:
        for check in self.phase_checks:
            check(phase)


class RecordedCommunicator(Communicator):
    """A wrapper of any communicator that records each collective and runs the checks before it.

    The error of a collective that times out gets the report as a note. The signatures of calls are
    compared, too; see ``[Note: Signatures]`` in ``communicators/checked.py``.

    Args:
        inner: the communicator that transfers the data.
        recorder: the recorder of this process. Its checks run before each collective.
        name: the name of the group, the same on all members and unique to the group.
        ranks: the members' global ranks, in group order. None, the default, means all ranks.
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
        self._checked = CheckedCommunicator(inner, recorder.signatures)
        self._recorder = recorder
        self._name = name
        # A range takes as little memory in a job of thousands of ranks as in one of two.
        self._ranks = range(inner.size) if ranks is None else ranks
        self._subgroup_count = 0

    @override
    def run(self, collective: Collective) -> Any:
        if collective.operation is Operation.NEW_GROUP:
            return self._new_group(collective)
        return self._record(collective)

    @override
    def close(self) -> None:
        self._checked.close()

    def _new_group(self, collective: Collective) -> "RecordedCommunicator | None":
        self._subgroup_count += 1
        name = f"{self._name}/{self._subgroup_count}"
        ranks = [self._ranks[rank] for rank in collective.buffer]
        group = self._record(collective)
        if group is None:
            return None
        return RecordedCommunicator(group, self._recorder, name, ranks)

    def _record(self, collective: Collective) -> Any:
        recorder = self._recorder
        self._check_process(collective)
        entry = self._new_entry(collective)
        thread = threading.get_ident()
        recorder.latest = entry
        recorder.calls[thread] = entry
        recorder.latest_key = entry.group
        try:
            for check in recorder.checks:
                check(entry, collective)
            with recorder.collective_context(entry):
                return self._checked.run(collective)
        except RuntimeError as error:
            recorder.annotate(error)
            raise
        finally:
            del recorder.calls[thread]

    def _check_process(self, collective: Collective) -> None:
        process = self._recorder.process
        if os.getpid() == process:
            return
        operation = collective.user_operation
        raise UsageError(
            f"{operation} in process {os.getpid()}, which rank {self.rank} (process {process}) has "
            "forked",
            problem="the other ranks are connected to the rank alone, and it would wait for them "
            "for ever",
            expected="collectives in the process of the rank; none in the workers of a DataLoader, "
            "nor in other children",
            suggestion="the collective in the training loop, on what the worker returns",
        )

    def _new_entry(self, collective: Collective) -> Entry:
        """Count a starting collective, and return its entry."""
        group = self._name
        members = self._ranks
        if collective.operation in (Operation.SEND, Operation.RECV):
            message = collective.message(self.rank)
            group = f"{group} {message.source}>{message.destination}"
            members = [self._ranks[message.source], self._ranks[message.destination]]
        counts = self._recorder.counts
        counts[group] += 1
        return Entry(
            group=group,
            members=members,
            number=counts[group],
            operation=collective.user_operation,
            name=collective.name,
            call_site=call_site(collective),
        )
