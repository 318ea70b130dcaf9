"""The error for uneven numbers of batches, which would hang the job."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fabric.communicators import Collective
from fabric.contract import GradientContract
from fabric.diagnostics.batch_counts import BatchCount, BatchCounts, DividedOrder
from fabric.diagnostics.bypass import BypassChecks
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.diagnostics.step_comparison import End, Progress, Step, StepComparison
from fabric.store import JobStore

__all__ = ["UnevenInputDetector"]


class _Position(Protocol):
    """The position of an iteration over a loader, which the loader updates.

    Attributes:
        received_batches: the number of batches that the user has received.
        is_finished: whether the iteration has ended.
    """

    received_batches: int
    is_finished: bool


@dataclass(eq=False)
class _Iteration:
    """An iteration over a loader on this rank.

    Attributes:
        batch_count: the number of batches, as it is compared with the neighbors.
        position: the position of the iteration.
        number: the number of the iteration among those over all loaders, from 1.
        batches_of_previous_iteration: the number of batches in the iteration before, over any
            loader.
        is_end_noticed: whether :meth:`_Iterations.take_ended` has returned the iteration.
    """

    batch_count: BatchCount
    position: _Position
    number: int
    batches_of_previous_iteration: int
    is_end_noticed: bool = False


class _Iterations:
    """The iterations of this rank to which its steps may belong.

    Attributes:
        latest: the iteration that began last. None before the first one.
        iteration_of_latest_step: the iteration with the latest step. Not ``latest`` before the
            first batch of ``latest``, and after a ``latest`` without steps, such as a validation.
            None before the first step.
    """

    def __init__(self) -> None:
        self.latest: _Iteration | None = None
        self.iteration_of_latest_step: _Iteration | None = None

    def enter_step(self) -> bool:
        """Record a step. Return whether it is the first step in its iteration.

        The step is in the iteration that began last, if the user is between its first batch and its
        end. Otherwise, the step is still in the iteration before.
        """
        latest = self.latest
        if latest is None or latest is self.iteration_of_latest_step:
            return False
        position = latest.position
        is_running = position.received_batches > 0 and not position.is_finished
        if not is_running:
            return False
        self.iteration_of_latest_step = latest
        return True

    def take_ended(self) -> list[_Iteration]:
        """Return the iterations that have ended since the latest call, the latest one first."""
        ended_iterations: list[_Iteration] = []
        # Both attributes may hold one iteration. It is added only once.
        for iteration in (self.latest, self.iteration_of_latest_step):
            if iteration is None or iteration.is_end_noticed or not iteration.position.is_finished:
                continue
            iteration.is_end_noticed = True
            ended_iterations.append(iteration)
        return ended_iterations


class _StepCounter:
    """Counts the steps of this rank that neighbors compare.

    ``bypass`` counts all steps of the process. This object remembers those that do not count:
    *early* steps before the first iteration, and steps in :meth:`excluded`.

    Args:
        bypass: counts all steps of the process.

    Attributes:
        early_steps: the number of steps before the first iteration.
    """

    def __init__(self, bypass: BypassChecks) -> None:
        self.early_steps = 0
        self._bypass = bypass
        # The number of steps that do not count.
        self._excluded_steps = 0
        # The number of counted steps that only peers take.
        self._unshared_steps = 0

    def start_counting(self) -> None:
        """Count from now on. Called at the start of the first iteration."""
        self.early_steps = self._bypass.step_count - self._excluded_steps
        self._excluded_steps = self._bypass.step_count

    def add_unshared_step(self) -> None:
        """Record that only peers take the current step, which ``bypass`` has counted already."""
        self._unshared_steps += 1

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do not count the steps in the block."""
        steps_before = self._bypass.step_count
        try:
            yield
        finally:
            self._excluded_steps += self._bypass.step_count - steps_before

    def progress(self, collectives: int, is_shared: bool = True) -> Progress:
        """Return how far this rank has come.

        Args:
            collectives: the number of collectives over all ranks so far.
            is_shared: whether all ranks take what this rank is about to do.
        """
        steps = self._bypass.step_count - self._excluded_steps
        shared_steps = None
        if is_shared:
            shared_steps = steps - self._unshared_steps
        return Progress(
            steps=steps,
            shared_steps=shared_steps,
            early_steps=self.early_steps,
            collectives=collectives,
        )


# [Note: Uneven inputs]
# A *step* is a forward pass after which ranks synchronize gradients, or a forward pass of a sharded
# model, which gathers parameters. All ranks must take the same steps and, between two steps, make
# the same collectives. A rank that has run out of batches continues with a collective, the end of
# the job or, under a sharded strategy, a loop of other steps. Meanwhile another rank takes one more
# step and waits. Each of the two ranks first publishes its own progress in the store and then reads
# the progress of the other rank. So the rank that reads last sees the mismatch. None of these
# messages is a collective.
#
# Each rank reads only the progress of its two *neighbors* in a ring of all ranks. If any two ranks
# differ, two neighbors differ.
#
# Under `HYBRID_SHARD` a forward pass without synchronization is a step only of the ranks that
# gather together, the *peers*. The other steps are *shared steps*, which all ranks take. Neighbors
# that are peers compare the number of all steps, other neighbors the number of shared steps.
#
# The check runs only where it can matter: after the end of an iteration over a prepared loader, if
# neighboring ranks have different or unknown *batch counts* in it. As long as all batch counts are
# known and equal, only the first steps of an iteration call the detector: one to compare the loops,
# and those before the neighbors have published their counts. Other steps are only counted, so that
# later numbers are comparable. `HYBRID_SHARD` is the exception: each step calls the detector, which
# has to record whether the step is shared.
#
# Steps before a rank's first iteration are not counted: one rank may call its model alone there,
# such as for a summary. But a rank may also take a step with the others before it begins its first
# iteration, and they within theirs. Ranks with different numbers of these *early steps* are not
# compared, since the numbers of their later steps do not tell which steps are the same.
class UnevenInputDetector:
    """Raises if a rank has run out of batches and another takes one more step.

    A *step* is a forward pass after which ranks synchronize gradients, or a forward pass of a
    sharded model. The detector compares the order of steps and collectives of this rank with those
    of its *neighbors*, the ranks before and after it. Under ``HYBRID_SHARD`` some steps are taken
    only by the *peers*, which gather parameters together.

    Args:
        recorder: this process's recorder, which counts collectives.
        store: the store in which the ranks publish their progress.
        bypass: the checks that count steps and call :meth:`on_step`, from the first iteration on.

    Attributes:
        is_paused: whether a block of :meth:`paused` is open.
    """

    def __init__(self, recorder: FlightRecorder, store: JobStore, bypass: BypassChecks) -> None:
        """Start without hooks, which :meth:`on_iteration` installs in the first iteration."""
        self.is_paused = False
        self._recorder = recorder
        self._bypass = bypass
        self._batch_counts = BatchCounts(store, bypass.world.neighbours)
        self._comparison = StepComparison(store, bypass)
        self._steps = _StepCounter(bypass)
        self._iterations = _Iterations()

    def on_iteration(
        self, loader: str, position: _Position, batches: int | None, order: DividedOrder
    ) -> None:
        """Record the start of an iteration over a prepared loader. The loader calls this.

        The first iteration installs the hooks that check forward passes and collectives: without
        loaders, no rank can run out of batches.

        Args:
            loader: the name of the loader, the same on all ranks.
            position: the position of the iteration, which the loader updates later.
            batches: the number of batches in the iteration. None if unknown.
            order: the order that is divided over the ranks.

        Raises:
            UsageError: a neighbor, which is the rank before or after this one, has a different
                order of the loader.
        """
        batch_count = self._batch_counts.publish(loader, batches, order)
        # An error may name the loop that ended before this one, and its number of batches.
        batches_of_previous_iteration = 0
        previous = self._iterations.latest
        if previous is not None:
            batches_of_previous_iteration = previous.position.received_batches
        self._iterations.latest = _Iteration(
            batch_count=batch_count,
            position=position,
            number=self._batch_counts.iterations,
            batches_of_previous_iteration=batches_of_previous_iteration,
        )
        is_watching = self.check in self._recorder.checks
        if not is_watching:
            self._steps.start_counting()
            # This check comes first. If a rank has run out of batches, the other checks would
            # report only that its collectives differ.
            self._recorder.checks = (self.check, *self._recorder.checks)
        # on_step() may have unregistered itself in an earlier iteration.
        self._bypass.call_at_steps(self.on_step)

    def on_step(self, contract: GradientContract) -> None:
        """Raise if a neighbor will not take the step that this rank is about to take.

        ``bypass`` calls this method at the start of a step. Once nothing has to be compared before
        the next iteration, the method unregisters itself. :meth:`on_iteration` registers it again.

        Args:
            contract: the contract of the module that takes the step.

        Raises:
            UsageError: another rank has run out of batches and will not take this step.
        """
        if self.is_paused:  # in a block of paused(), ranks may take different steps
            return
        # Whether the step counts as one that all ranks take. Otherwise, only the ranks that gather
        # together take it.
        is_shared = self._is_shared_step(contract)
        if not is_shared:
            # Counted even if this step is not compared: in later comparisons, progress() subtracts
            # all of these steps.
            self._steps.add_unshared_step()
        latest = self._iterations.latest
        if latest is None:  # no iteration has begun since the latest paused() block
            return
        is_first_step = self._iterations.enter_step()
        # Read before compare() is called below: until then, may_differ is about the numbers of
        # batches in earlier iterations. If these differed, ranks may be in different iterations.
        had_equal_counts = not self._batch_counts.may_differ
        # A shuffling loader divides a new order over the ranks in each iteration. Ranks in
        # different iterations would see some samples twice, and some never.
        must_match_iteration = (
            is_first_step and latest.batch_count.order.shuffles and had_equal_counts
        )
        iteration_of_step = self._iterations.iteration_of_latest_step
        if iteration_of_step is not None and iteration_of_step.batch_count.uncompared_neighbors:
            self._batch_counts.compare(iteration_of_step.batch_count)
        # The first step of an iteration shows whether a neighbor takes the step in another loop.
        # Later steps have to be compared only if the numbers of batches differ.
        if is_first_step or self._batch_counts.may_differ:
            step = self._describe_step(contract, latest, is_shared)
            self._comparison.check_step(step, must_match_iteration)
        if self._can_skip_steps(contract):
            self._bypass.call_at_steps(None)  # ends the calls of this method

    def _describe_step(
        self, contract: GradientContract, latest: _Iteration, is_shared: bool
    ) -> Step:
        """Return the step that this rank is about to take, as neighbors compare it.

        Args:
            contract: the contract of the module that takes the step.
            latest: the iteration that began last.
            is_shared: whether all ranks take the step.
        """
        return Step(
            progress=self._steps.progress(self._recorder.counts[JOB], is_shared),
            kind=_kind_of_step(contract),
            loader=latest.batch_count.loader,
            iteration=latest.batch_count.iteration,
            iterations=latest.number,
            batches_of_previous_iteration=latest.batches_of_previous_iteration,
        )

    def check(self, entry: Entry, collective: Collective) -> None:
        """Compare progress before a collective over all ranks. A check of the flight recorder.

        Args:
            entry: the entry of the collective. Collectives of other groups are not checked.
            collective: not used.

        Raises:
            UsageError: this rank has run out of batches, and a neighbor takes one more step.
        """
        if entry.group == JOB and not self.is_paused:
            self._check_ends(collectives=self._recorder.counts[JOB])

    def finish(self) -> None:
        """Raise at the end of the job if a neighbor takes one more step."""
        # The rank that hosts the store may have ended. Then nothing can be compared.
        with suppress(dist.DistError):
            # The end of the job counts as one more collective.
            self._check_ends(collectives=self._recorder.counts[JOB] + 1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow ranks to take different numbers of steps in the block.

        Steps in the block do not count. After the block, nothing is compared until the next
        iteration begins.
        """
        self.is_paused = True
        try:
            with self._steps.excluded():
                yield
        finally:
            self.is_paused = False
            self._iterations = _Iterations()

    def _is_shared_step(self, contract: GradientContract) -> bool:
        """Return whether all ranks take a step, and not only the peers.

        If all neighbors are peers, neighbors compare all steps. The result is then always True.

        Args:
            contract: the contract of the module that takes the step.
        """
        if not contract.is_sharded or self._comparison.compares_only_peers:
            return True
        # Only the peers gather parameters. All ranks take the step if it synchronizes gradients.
        return torch.is_grad_enabled() and contract.synchronizes()

    def _can_skip_steps(self, contract: GradientContract) -> bool:
        """Return whether :meth:`on_step` has nothing to do until the next iteration begins.

        If so, :meth:`on_step` unregisters itself, and :meth:`on_iteration` registers it again.

        Args:
            contract: the contract of the module that takes the current step.
        """
        # For each step, on_step() has to record whether all ranks take it.
        records_each_step = contract.is_sharded and not self._comparison.compares_only_peers
        # Once a number of batches may differ, a neighbor may lack any of the later steps.
        if records_each_step or self._batch_counts.may_differ:
            return False
        latest = self._iterations.latest
        iteration_of_step = self._iterations.iteration_of_latest_step
        if latest is None or iteration_of_step is None:
            return False  # the first step in an iteration is still to come
        # These neighbors have not published their number of batches yet.
        if iteration_of_step.batch_count.uncompared_neighbors:
            return False
        # on_step() has to compare the first step of the latest iteration.
        had_first_step = latest is iteration_of_step
        cannot_have_steps = latest.position.is_finished
        return had_first_step or cannot_have_steps

    def _check_ends(self, collectives: int) -> None:
        """Raise if an iteration of this rank has ended, and a neighbor takes one more step.

        Only the iterations that have ended since the latest call are looked at.

        Args:
            collectives: the number of collectives over all ranks, including the one that is about
                to be made.
        """
        iterations = self._iterations.take_ended()
        may_differ = False
        for iteration in iterations:
            if self._batch_counts.compare(iteration.batch_count):
                may_differ = True
        if not may_differ:
            return
        # The error names the batches of one loader: the loader whose iteration began last. It is
        # the first one in the list.
        end = End(
            progress=self._steps.progress(collectives),
            batches=iterations[0].position.received_batches,
        )
        self._comparison.check_end(end)


def _kind_of_step(contract: GradientContract) -> str:
    """Return what a step runs, as neighbors compare it. Empty for a module that is not sharded.

    Args:
        contract: the contract of the module that takes the step.
    """
    if not contract.is_sharded:
        return ""
    if torch.is_grad_enabled():
        return contract.title
    return f"{contract.title} without gradients"
