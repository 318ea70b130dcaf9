"""The flight recorder: records what this process is doing, for checks and hang reports."""

import contextlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from fabric.communicators import Collective, Operation
from fabric.communicators.call_site import user_call
from fabric.communicators.checked import PendingSignatures
from fabric.errors import UsageError
from fabric.hooks import Hooks

__all__ = ["HEADING", "JOB", "Entry", "FlightRecorder", "Reporter", "ranks_in_words"]

JOB = "job"  # the name of the group of all ranks
RANK0 = "rank 0"  # the group under which the waits for values of rank 0 are counted
STEP = "optimizer step"  # the name of the phase of a step
HEADING = "where each rank is:"  # a line of every hang report
# The error of a collective that timed out has one of these texts, depending on the backend.
_TIMEOUT_TEXTS = ("timed out", "timeout", "did not call")
# The error of a collective whose other rank has ended has one of these texts.
_LOST_TEXTS = ("closed by peer", "reset by peer")
_LOST_HEADING = "this rank has lost its connection to another rank:"
_MAX_LISTED_RANKS = 8


class Entry(NamedTuple):
    """The record of a collective that this rank has started.

    Attributes:
        group: the name of the group. For a message, ``"{group} {source}>{destination}"``, so that
            the messages of each pair of ranks are counted separately.
        members: the global ranks that must make the call, in group order.
        number: the number of this collective in its group, from 1.
        operation: the name of the operation, as the user called it.
        name: the name of a barrier, else empty.
        call_site: where the user made the call. Its ``str()`` is the text for errors.
        kind: the kind of collective by which the operation transfers data. For example, an
            operation on objects makes an all-gather of their bytes.
        peer: the source or destination as a rank of the group. None if the collective has none.
    """

    group: str
    members: Sequence[int]
    number: int
    operation: str
    name: str
    call_site: object
    kind: Operation = Operation.BARRIER
    peer: int | None = None

    @property
    def title(self) -> str:
        """The operation, with the name of a barrier."""
        if self.name:
            return f"{self.operation}({self.name!r})"
        return self.operation

    @property
    def is_message(self) -> bool:
        """Whether the call is a send or a recv."""
        return self.kind in (Operation.SEND, Operation.RECV)

    @property
    def awaited_ranks(self) -> Sequence[int]:
        """The global ranks without which this call cannot end. Empty if unknown."""
        if self.kind in (Operation.BROADCAST, Operation.SCATTER) and self.peer is not None:
            # All members wait for the source. The source does not wait for them.
            return [self.members[self.peer]]
        if self.kind is Operation.GATHER:
            # The destination waits for all members. The other members wait for nobody.
            return []
        return self.members

    @property
    def activity(self) -> str:
        """What a rank is doing in this call, as text that follows "rank 1"."""
        # An entry of record_wait_for_rank0() is no collective.
        if self.group == RANK0:
            return f"waits for {self}"
        return f"in {self}"

    @property
    def public_title(self) -> str:
        """The function of fabric that the user called, with the title: ``"save (barrier)"``.

        Only the title if the user called the operation itself, or if the function is unknown.
        """
        function = getattr(self.call_site, "function", "")
        is_public = function != "" and not function.startswith("_")
        if is_public and function != self.operation:
            return f"{function} ({self.title})"
        return self.title

    def __str__(self) -> str:
        return f"{self.title} at {self.call_site}"


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ``rank 1``, or ``ranks 1, 2``. A list of more than eight is cut in the middle."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _MAX_LISTED_RANKS:
        first_names = names[: _MAX_LISTED_RANKS // 2]
        names = [*first_names, f"... ({len(names)} of them)", names[-1]]
    noun = "ranks" if len(names) > 1 else "rank"
    return f"{noun} {', '.join(names)}"


class Reporter(Protocol):
    """The part of a ``HangReporter`` that explains failed collectives."""

    def wait_for_report(self) -> str:
        """Return what each rank is doing, for the error of a collective that timed out."""
        ...

    def explain_lost_rank(self) -> str:
        """Return why other ranks have ended, for the error of a collective that lost one."""
        ...


def _ignore_param_groups(optimizer: torch.optim.Optimizer) -> None:
    """Do nothing. The default of ``FlightRecorder.on_param_groups_changed``."""


class FlightRecorder:
    """Records which collective or phase this process is in, for error messages and hang reports.

    A *phase* is a part of the user's program in which torch issues collectives by itself: a forward
    or backward pass, an optimizer step.

    The thread that makes hang reports reads the attributes without a lock. So each attribute is
    changed by one assignment or one dict operation, which the thread sees completely or not at all.

    Args:
        reporter: explains collectives that timed out or lost another rank. None, the default,
            leaves their errors as they are.

    Attributes:
        process: the id of the process that created the recorder. Only this process is connected to
            the other ranks.
        thread: the id of the thread that created the recorder. Hang reports show its stack.
        phase: the name of the current phase. None outside of all phases.
        counts: the number of collectives started in each group, by the name of the group, and the
            number of phases started, by the name of the phase.
        latest_key: the group or phase that was counted last, a key of ``counts``. Empty before the
            first one.
        open_collectives: the collective that each thread is in, by the id of the thread.
        latest_collective: the collective that started last. It may have ended.
        signatures: the checksums of calls that the ranks have exchanged and not compared yet.
        phases_need_all_ranks: whether torch's collectives in a phase need all ranks of the job. The
            runtime sets it to false if the job has a mesh of several dimensions.
        checks: functions that are called in order before each collective sends data. A check raises
            if the collective must not run. Checked mode and other diagnostics add checks.
        phase_checks: functions that are called in order with the phase's name, before each phase
            that all ranks must start. A check raises if the phase must not run. Empty except in
            checked mode.
        wait_checks: functions that are called in order before each wait for a value of rank 0. A
            check raises if the value cannot come. Empty except in checked mode.
        param_group_counts: the number of parameter groups of each optimizer at its setup or latest
            step, by the ``id()`` of the optimizer. The session adds each optimizer at its setup.
        on_param_groups_changed: called before the step of an optimizer to which the user has added
            parameter groups. By default nothing is called. The session sets it.
        collective_context: returns a context manager, in which one collective runs. None, the
            default, if no tool, such as a timeline, has set it.
    """

    def __init__(self, reporter: Reporter | None = None) -> None:
        """Make an empty recorder, in the thread whose stack hang reports show."""
        self._reporter = reporter
        self.process = os.getpid()
        self.thread = threading.get_ident()
        self.signatures = PendingSignatures()

        # The record, which only this class and RecordedCommunicator change.
        self.phase: str | None = None
        # For each open phase, the phase to return to at its end. Phases nest.
        self._outer_phases: list[str | None] = []
        # How many collectives or phases have started, by the name of the group or of the phase.
        self.counts: dict[str, int] = defaultdict(int)
        self.latest_key = ""  # the key of counts that was counted last
        # By the id of the thread that is in the collective.
        self.open_collectives: dict[int, Entry] = {}
        self.latest_collective: Entry | None = None

        # What other parts of fabric set. The class docstring says which part sets which attribute.
        self.phases_need_all_ranks = True
        # Called before each collective, before each phase that all ranks must start, and before
        # each wait for rank 0. A function raises if this rank must not go on.
        self.checks: tuple[Callable[[Entry, Collective], None], ...] = ()
        self.phase_checks: tuple[Callable[[str], None], ...] = ()
        self.wait_checks: tuple[Callable[[Entry], None], ...] = ()
        # By the id() of the optimizer. enter_step() compares the present number of groups with it.
        self.param_group_counts: dict[int, int] = {}
        self.on_param_groups_changed: Callable[[torch.optim.Optimizer], object] = (
            _ignore_param_groups
        )
        self.collective_context: (
            Callable[[Entry], contextlib.AbstractContextManager[object]] | None
        ) = None

    def phase_hooks(self, phase: str) -> Hooks:
        """Return hooks for a forward or backward pass, which record the pass as a phase."""
        return Hooks(before=[partial(self.enter_phase, phase)], after=[self.exit_phase])

    def enter_phase(self, phase: str) -> None:
        """Record the start of a phase. Each call is followed by one call of :meth:`exit_phase`."""
        self.counts[phase] += 1
        outer_phase = self.phase
        if outer_phase == STEP:
            # Either the step has raised, and torch has not called exit_step(). Or the step runs
            # this phase in its closure, after which a step issues no collectives. So the phase of
            # the step ends now.
            outer_phase = None
        self._outer_phases.append(outer_phase)
        self.phase = phase
        self.latest_key = phase

    def exit_phase(self, result: object = None, error: BaseException | None = None) -> None:
        """Record the end of the innermost phase. The parameters are those of ``Hooks.after``.

        Args:
            result: not used.
            error: the error that ended the phase. If a collective timed out, the error gets a note
                with what each rank is doing.
        """
        if error is not None:
            # The note says in which phase this rank is, so it is added before the phase ends.
            self.annotate(error)
        self.phase = self._outer_phases.pop()

    @property
    def step(self) -> int:
        """The number of the current optimizer step, from 1. Outside of steps, of the next one."""
        started_steps = self.counts.get(STEP, 0)
        if self.phase == STEP:
            return started_steps
        return started_steps + 1

    def enter_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the start of an optimizer's step. Called by torch as a pre-hook of the step.

        If the user has added parameter groups since the latest step, ``on_param_groups_changed``
        checks the optimizer.
        """
        self.phase = STEP
        self.latest_key = STEP
        self.counts[STEP] += 1
        group_count = len(optimizer.param_groups)
        if group_count != self.param_group_counts.get(id(optimizer)):
            self.on_param_groups_changed(optimizer)
            # The count is set after the call. If the call raises, the next step calls again.
            self.param_group_counts[id(optimizer)] = group_count

    def exit_step(self, *_: object) -> None:
        """Record the end of an optimizer's step. Called by torch as a post-hook of the step."""
        self.phase = None

    @contextlib.contextmanager
    def record_phase(self, phase: str, needs_all_ranks: bool = False) -> Iterator[None]:
        """Record a block, which waits for the device, as a phase.

        Args:
            phase: the name of the phase.
            needs_all_ranks: whether every rank must start the phase. If so, checked mode waits for
                all ranks before the block runs. Default: False.

        Raises:
            CollectiveMismatchError: the ranks made different calls before the block, or in checked
                mode, a rank does not start the phase.
        """
        # The block waits for the device anyway, so reading the signatures costs nothing here.
        self.check_signatures()
        self.enter_phase(phase)
        try:
            if needs_all_ranks:
                self.check_phase(phase)
            yield
        except BaseException as error:
            self.exit_phase(error=error)
            raise
        self.exit_phase()

    def check_phase(self, phase: str) -> None:
        """Run the phase checks before a phase that all ranks must start.

        Raises:
            CollectiveMismatchError: in checked mode, a rank does not start the phase.
        """
        for check in self.phase_checks:
            check(phase)

    @contextlib.contextmanager
    def record_wait_for_rank0(self, title: str, size: int) -> Iterator[None]:
        """Record a block in which rank 0 stores a value, for which the other ranks wait.

        Every rank runs these blocks in the same order. If this rank waits in its block number n and
        rank 0 has started fewer than n blocks, rank 0 has not stored the value. A hang report
        compares these numbers.

        Args:
            title: the value, as text that follows "waits for".
            size: the number of ranks.

        Raises:
            CollectiveMismatchError: in checked mode, rank 0 does not store the value.
        """
        self.counts[RANK0] += 1
        entry = Entry(
            group=RANK0,
            members=range(size),
            number=self.counts[RANK0],
            operation=title,
            name="",
            call_site=user_call(sys._getframe(1)),
            # A hang report treats the wait like a broadcast from rank 0, which does not wait.
            kind=Operation.BROADCAST,
            peer=0,
        )
        thread = threading.get_ident()
        self.open_collectives[thread] = entry
        try:
            for check in self.wait_checks:
                check(entry)
            yield
        except UsageError as error:
            # JobStore.from_rank0() raises it if the value does not come within the timeout.
            self._add_report(error)
            raise
        finally:
            del self.open_collectives[thread]

    def check_signatures(self) -> None:
        """Compare the latest calls of the ranks by their signatures, which are on the device.

        This waits for the device. Call it only where the program waits for the device anyway.

        Raises:
            CollectiveMismatchError: the ranks made different calls.
        """
        self.signatures.check()

    def annotate(self, error: BaseException) -> None:
        """Add a note to the error of a collective that timed out or has lost another rank.

        The note is a hang report, or says why another rank has ended. Several functions call this
        method as an error passes through them. Only the first call adds a note.
        """
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        has_note = HEADING in text or _LOST_HEADING in text
        # torch's errors of collectives are RuntimeErrors.
        if self._reporter is None or not isinstance(error, RuntimeError) or has_note:
            return
        lowered_text = text.lower()
        if any(timeout_text in lowered_text for timeout_text in _TIMEOUT_TEXTS):
            self._add_report(error)
        elif any(lost_text in lowered_text for lost_text in _LOST_TEXTS):
            explanation = self._reporter.explain_lost_rank()
            if explanation:
                error.add_note(f"{_LOST_HEADING}\n{explanation}")

    def _add_report(self, error: BaseException) -> None:
        """Add a note to an error: a hang report, and what to do about it."""
        report = ""
        if self._reporter is not None:
            report = self._reporter.wait_for_report()
        if not report:
            return
        remedy = (
            "look at the stack of the missing rank first; Fabric(timeout=7200), in seconds, if a "
            "collective may take longer"
        )
        error.add_note(f"{report}\n  {remedy}")


def __getattr__(name: str) -> Any:
    """Return ``RecordedCommunicator``, whose documented path was in this file."""
    if name != "RecordedCommunicator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("fabric.communicators.recorded").RecordedCommunicator
