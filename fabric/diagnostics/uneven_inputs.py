"""The error for uneven numbers of batches, which would hang the job.

[Note: Uneven inputs] A *step* is a forward pass after which ranks synchronize gradients, or a
forward pass of a sharded model, which gathers parameters. All ranks must take the same steps and,
between two steps, make the same collectives. A rank that has run out of batches continues with a
collective, the end of the job or, under a sharded strategy, a loop of other steps. Meanwhile
another rank takes one more step and waits. Each of the two ranks first publishes its own progress
in the store and then reads the progress of the other rank. So the rank that reads last sees the
mismatch. None of these messages is a collective.

Each rank reads only the progress of its two *neighbors* in a ring of all ranks. If any two ranks
differ, two neighbors differ.

Under ``HYBRID_SHARD`` a forward pass without synchronization is a step only of the ranks that
gather together, the *peers*. So each rank has two counts of steps. Neighbors that are peers compare
the number of all steps, other neighbors the number of the steps that all ranks take.

The check runs only where it can matter: after the end of an iteration over a prepared loader, if
the loaders of neighboring ranks have different or unknown lengths. As long as all iterations have
known and equal lengths, only the first steps of an iteration call the detector: one to compare the
loops, and those before the neighbors have published their lengths. Other steps are only counted,
so that later numbers are comparable. ``HYBRID_SHARD`` is the exception: the kind of each step has
to be counted.

Steps before a rank's first iteration are not counted: one rank may call its model alone there, such
as for a summary. But a rank may also take a step with the others before it begins its first
iteration, and they within theirs. Ranks with different numbers of these *early steps* are not
compared, since the numbers of their later steps do not tell which steps are the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from fabric.communicators import Collective
from fabric.contract import GradientContract
from fabric.diagnostics.batch_counts import BatchCount, BatchCounts
from fabric.diagnostics.bypass import BypassChecks
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.errors import UsageError
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
        loader: the name of the loader.
        count: what this rank has published about the iteration.
        position: the position of the iteration.
        unread_ranks: the neighbors whose batch count of this iteration was not read yet.
        is_checked: whether the end of the iteration was noticed.
    """

    loader: str
    count: BatchCount
    position: _Position
    unread_ranks: list[int]
    is_checked: bool = False


# In place of the number of a step, for neighbors that do not take it.
_NOT_TAKEN = -1


# The next four classes are published as JSON lists, in the order of their fields.


class _PerNeighbor(NamedTuple):
    """A number that depends on whether a neighbor gathers with this rank. See :meth:`of`."""

    peers: int
    non_peers: int

    def number_for(self, is_peer: bool) -> int:
        """Return the number for a neighbor.

        Args:
            is_peer: whether the neighbor is a peer, which gathers with this rank.
        """
        return self.peers if is_peer else self.non_peers


class _Loop(NamedTuple):
    """The loop over a loader in which a rank takes a step.

    Attributes:
        loader: the name of the loader.
        iteration: the number of the iteration over this loader, from 1.
        kind: under a sharded strategy, what is run: the module's class, with or without gradients.
            Empty under other strategies.
        iterations: the number of iterations that the rank has begun, over all loaders.
        previous_batches: the number of batches in the iteration before this one.
    """

    loader: str
    iteration: int
    kind: str
    iterations: int
    previous_batches: int


class _Step(NamedTuple):
    """A step that a rank is about to take.

    Attributes:
        steps: the number of the step, from 1, or ``_NOT_TAKEN`` for neighbors that do not take it.
        collectives: the number of collectives over all ranks so far.
        loop: the loop in which the rank takes the step.
        early_steps: the number of steps before the first iteration of the rank.
    """

    steps: _PerNeighbor
    collectives: int
    loop: _Loop
    early_steps: int


class _End(NamedTuple):
    """The first collective of a rank after an iteration, or the end of the job.

    Attributes:
        steps: the number of steps that the rank has taken.
        collectives: the number of collectives over all ranks so far, with this one.
        batches: the number of batches in the iteration.
        early_steps: the number of steps before the first iteration of the rank.
    """

    steps: _PerNeighbor
    collectives: int
    batches: int
    early_steps: int


class UnevenInputDetector:
    """Raises if a rank has run out of batches and another takes one more step.

    A *step* is a forward pass after which ranks synchronize gradients, or a forward pass of a
    sharded model. The detector compares the order of steps and collectives of this rank with those
    of its *neighbors*, the ranks before and after it. Under ``HYBRID_SHARD`` some steps are taken
    only by the *peers*, which gather parameters together. See ``[Note: Uneven inputs]``.

    Args:
        recorder: this process's recorder, which counts collectives.
        store: the store in which the ranks publish their progress.
        bypass: the checks that count steps and call :meth:`on_step`, from the first iteration on.
    """

    def __init__(self, recorder: FlightRecorder, store: JobStore, bypass: BypassChecks) -> None:
        """Start without hooks, which :meth:`on_iteration` installs in the first iteration."""
        self._recorder = recorder
        self._store = store
        self._rank = store.rank
        self._bypass = bypass
        self._neighbors = bypass.world.neighbours
        self._counts = BatchCounts(store, self._neighbors)
        # Whether an iteration has begun. It installs the hooks that call on_step() and check().
        self._is_watching = False
        self._is_paused = False
        # The number of steps before the first iteration, and while the detector was paused.
        self._uncounted_steps = 0
        # The number of steps before the first iteration alone.
        self._early_steps = 0
        # The number of steps that only the peers take.
        self._steps_of_peers_alone = 0
        # Whether a neighbor has, or may have, another number of batches in any iteration so far.
        self._counts_differ = False
        # The iteration that began last.
        self._latest_iteration: _Iteration | None = None
        # The iteration in which this rank has taken its latest step.
        self._iteration_of_step: _Iteration | None = None
        # The number of batches in the iteration before the latest one.
        self._previous_batches = 0

    def on_iteration(
        self, loader: str, position: _Position, batches: int | None, shuffles: bool = False
    ) -> None:
        """Record the start of an iteration over a prepared loader. The loader calls this.

        The first iteration installs the hooks that check forward passes and collectives: without
        loaders, no rank can run out of batches.

        Args:
            loader: the name of the loader, the same on all ranks.
            position: the position of the iteration, which the loader updates later.
            batches: the number of batches in the iteration. None if unknown.
            shuffles: whether the ranks share an order that is drawn anew in each iteration.

        Raises:
            UsageError: a neighbor, which is the rank before or after this one, shuffles the loader
                and this rank does not, or the other way round.
        """
        count = self._counts.publish(loader, batches, shuffles)
        self._previous_batches = 0
        if self._latest_iteration is not None:
            self._previous_batches = self._latest_iteration.position.received_batches
        self._latest_iteration = _Iteration(
            loader=loader, count=count, position=position, unread_ranks=list(self._neighbors)
        )
        if not self._is_watching:
            self._is_watching = True
            # Steps before this first iteration are not counted, but have to match, too.
            self._early_steps = self._bypass.step_count - self._uncounted_steps
            self._uncounted_steps = self._bypass.step_count
            # Placed before the other checks: if ranks have run out of batches, its error names that
            # cause, and the errors of other checks would name a consequence.
            self._recorder.checks = (self.check, *self._recorder.checks)
        # Again in each iteration, since on_step() ends its own calls.
        self._bypass.report_steps(self.on_step)

    def on_step(self, contract: GradientContract) -> None:
        """Raise if another rank lacks the step that this rank is about to take.

        Called at the start of a step, until nothing has to be compared before the next iteration.

        Args:
            contract: the contract of the module that takes the step.

        Raises:
            UsageError: another rank has run out of batches and will not take this step.
        """
        if self._is_paused:
            return
        is_step_of_all = self._is_step_of_all(contract)
        if not is_step_of_all:
            self._steps_of_peers_alone += 1

        iteration = self._latest_iteration
        if iteration is None:
            return
        # The step is in the iteration that began last, if the user is between its first batch and
        # its end. Otherwise, the step is still in the iteration before.
        is_first_step = (
            iteration is not self._iteration_of_step
            and iteration.position.received_batches > 0
            and not iteration.position.is_finished
        )
        # Ranks whose counts differ may be in different iterations.
        must_be_same_iteration = (
            is_first_step and iteration.count.shuffles and not self._counts_differ
        )
        if is_first_step:
            self._iteration_of_step = iteration
        iteration_of_step = self._iteration_of_step
        if iteration_of_step is not None and iteration_of_step.unread_ranks:
            self._compare_counts(iteration_of_step)
        # The first step of an iteration is always compared, since it shows whether a neighbor takes
        # the step in another loop. Other steps need it only if the numbers of batches differ.
        if is_first_step or self._counts_differ:
            steps = self._step_numbers()
            if not is_step_of_all:
                steps = _PerNeighbor(steps.peers, _NOT_TAKEN)
            step = _Step(
                steps=steps,
                collectives=self._recorder.counts[JOB],
                loop=self._loop(contract, iteration),
                early_steps=self._early_steps,
            )
            self._check_step(step, must_be_same_iteration)
        if self._can_rest(contract):
            self._bypass.report_steps(None)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Compare progress before a collective over all ranks. A check of the flight recorder.

        Args:
            entry: the entry of the collective. Collectives of other groups are not checked.
            collective: not used.

        Raises:
            UsageError: this rank has run out of batches while another takes one more step.
        """
        if entry.group == JOB and not self._is_paused:
            self._check_ends()

    def finish(self) -> None:
        """Compare progress at the end of the job, like :meth:`check`."""
        # If the rank that hosts the store has finished before, nothing can be compared.
        with suppress(dist.DistError):
            # The end of the job counts as one more collective.
            self._check_ends(later_collectives=1)

    @property
    def is_paused(self) -> bool:
        """Whether a block of :meth:`paused` is open."""
        return self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow ranks to take different numbers of steps in the block.

        Steps in the block do not count. After the block, nothing is compared until the next
        iteration begins.
        """
        self._is_paused = True
        steps_before = self._bypass.step_count
        try:
            yield
        finally:
            self._is_paused = False
            self._uncounted_steps += self._bypass.step_count - steps_before
            self._latest_iteration = None
            self._iteration_of_step = None

    def _is_step_of_all(self, contract: GradientContract) -> bool:
        """Return whether all ranks take a step, and not only the peers.

        Args:
            contract: the contract of the module that takes the step.
        """
        # If all neighbors are peers, the difference does not matter.
        if not contract.is_sharded or self._all_neighbors_are_peers():
            return True
        # Without synchronization, only the peers take the step.
        return torch.is_grad_enabled() and contract.synchronizes()

    def _all_neighbors_are_peers(self) -> bool:
        return self._bypass.peers.issuperset(self._neighbors)

    def _can_rest(self, contract: GradientContract) -> bool:
        """Return whether the next steps need not call :meth:`on_step` until an iteration begins.

        Args:
            contract: the contract of the module that takes the current step.
        """
        latest = self._latest_iteration
        iteration = self._iteration_of_step
        if self._counts_differ or latest is None or iteration is None:
            return False
        if iteration.unread_ranks:
            return False
        # The kind of each step has to be counted.
        if contract.is_sharded and not self._all_neighbors_are_peers():
            return False
        # Otherwise, the first step of the latest iteration is still to come.
        return latest is iteration or latest.position.is_finished

    def _step_numbers(self) -> _PerNeighbor:
        """Return how many steps this rank has taken."""
        steps = self._bypass.step_count - self._uncounted_steps
        return _PerNeighbor(peers=steps, non_peers=steps - self._steps_of_peers_alone)

    def _loop(self, contract: GradientContract, iteration: _Iteration) -> _Loop:
        """Return what is published about the loop in which this rank takes a step."""
        kind = ""
        if contract.is_sharded:
            kind = contract.title
            if not torch.is_grad_enabled():
                kind = f"{kind} without gradients"
        return _Loop(
            loader=iteration.loader,
            iteration=iteration.count.iteration,
            kind=kind,
            iterations=self._counts.iterations,
            previous_batches=self._previous_batches,
        )

    def _is_peer(self, rank: int) -> bool:
        """Return whether a neighbor gathers the parameters of sharded modules with this rank."""
        return rank in self._bypass.peers

    def _check_step(self, step: _Step, must_be_same_iteration: bool) -> None:
        """Publish a step, and raise unless the neighbors will take the step too.

        Neighbors that are peers, which gather parameters with this rank, count more steps than
        other neighbors. So ``step`` has two numbers.

        Args:
            step: the step that this rank is about to take.
            must_be_same_iteration: whether neighbors must be in the same iteration over the loader,
                since their batches are shares of one order.
        """
        # Published before the neighbors are read. In the other order, each of two ranks could miss
        # the other one.
        self._store.publish("step", step)
        neighbors: Sequence[int] = self._neighbors
        if step.steps.non_peers == _NOT_TAKEN:
            neighbors = [neighbor for neighbor in neighbors if self._is_peer(neighbor)]
        has_kind = step.loop.kind != ""  # of a sharded module
        if must_be_same_iteration or has_kind:
            self._check_loops(step, neighbors, must_be_same_iteration)
        for neighbor, end in self._read_ends(neighbors).items():
            is_peer = self._is_peer(neighbor)
            if _would_wait(step, end, is_peer):
                number = step.steps.number_for(is_peer)
                self._raise_uneven_inputs(
                    f"step {number} of rank {self._rank}",
                    step=number,
                    early_rank=neighbor,
                    batches=end.batches,
                    late_rank=self._rank,
                )

    def _check_loops(
        self, step: _Step, neighbors: Sequence[int], must_be_same_iteration: bool
    ) -> None:
        """Raise if a neighbor takes the same step in another loop that does not match.

        The loops do not match if they run different kinds of passes, or if they are different
        iterations over one shuffled loader.

        Args:
            step: the step that this rank is about to take, with one number for neighbors that are
                peers and one for the others.
            neighbors: the neighbors that have to take the step.
            must_be_same_iteration: whether neighbors must be in the same iteration over the loader,
                since their batches are shares of one order.
        """
        loop = step.loop
        for neighbor, neighbor_step in self._read_steps(neighbors).items():
            is_peer = self._is_peer(neighbor)
            number = step.steps.number_for(is_peer)
            is_same_step = (
                neighbor_step.steps.number_for(is_peer) == number
                and neighbor_step.early_steps == step.early_steps
            )
            neighbor_loop = neighbor_step.loop
            is_same_loop = (
                neighbor_loop.loader == loop.loader and neighbor_loop.iteration == loop.iteration
            )
            if not is_same_step or is_same_loop:
                continue
            request = f"step {number} of rank {self._rank}"
            if neighbor_loop.kind != loop.kind:
                self._raise_different_kinds(
                    request,
                    step=number,
                    loop=loop,
                    neighbor_loop=neighbor_loop,
                    neighbor=neighbor,
                )
            if must_be_same_iteration and neighbor_loop.loader == loop.loader:
                raise UsageError(
                    request,
                    problem=f"it is in iteration {loop.iteration} over its loader and rank "
                    f"{neighbor} in iteration {neighbor_loop.iteration}: their batches are shares "
                    "of different orders, so that samples are seen twice or never",
                    expected="iter(loader) equally often on all ranks",
                    suggestion="next(iter(loader.original)) for a look at a batch on one rank",
                )

    def _raise_different_kinds(
        self, request: str, *, step: int, loop: _Loop, neighbor_loop: _Loop, neighbor: int
    ) -> NoReturn:
        """Raise a UsageError for a step that two ranks take in loops of different kinds.

        The rank that has begun more iterations is in the later loop, so it ran out of batches in
        the loop before. In a tie, the number of batches in the iteration before decides, and then
        the rank, so that both ranks blame the same one.

        Args:
            request: what this rank was about to do.
            step: the number of the step.
            loop: the loop of this rank.
            neighbor_loop: the loop of the neighbor.
            neighbor: the neighbor.
        """
        progress = (loop.iterations, loop.previous_batches, self._rank)
        neighbor_progress = (neighbor_loop.iterations, neighbor_loop.previous_batches, neighbor)
        early_rank = neighbor
        late_rank = self._rank
        batches = neighbor_loop.previous_batches
        if progress > neighbor_progress:
            early_rank = self._rank
            late_rank = neighbor
            batches = loop.previous_batches
        self._raise_uneven_inputs(
            request, step=step, early_rank=early_rank, batches=batches, late_rank=late_rank
        )

    def _check_ends(self, later_collectives: int = 0) -> None:
        """Raise if an iteration has ended and a neighbor takes one more step.

        Considers only the iterations that have ended since the latest call. For a peer, which is a
        neighbor that gathers parameters with this rank, the number of all steps is compared. For
        another neighbor, the number of the steps that all ranks take is compared.

        Args:
            later_collectives: the number of collectives that the recorder has not counted yet.
        """
        iterations = self._take_ended_iterations()
        if not iterations:
            return
        # A neighbor that has not published its count may have more batches.
        has_unread_count = any(iteration.unread_ranks for iteration in iterations)
        if not self._counts_differ and not has_unread_count:
            return
        # The error names the batches of one loader: the loader whose iteration began last.
        latest_iteration = iterations[0]
        end = _End(
            steps=self._step_numbers(),
            collectives=self._recorder.counts[JOB] + later_collectives,
            batches=latest_iteration.position.received_batches,
            early_steps=self._early_steps,
        )
        # Published before the neighbors are read. In the other order, each of two ranks could miss
        # the other one.
        self._store.publish("end", end)
        for neighbor, step in self._read_steps(self._neighbors).items():
            is_peer = self._is_peer(neighbor)
            if _would_wait(step, end, is_peer):
                number = end.steps.number_for(is_peer)
                self._raise_uneven_inputs(
                    f"a collective, or the end of the job, after step {number} of rank "
                    f"{self._rank}",
                    step=number + 1,
                    early_rank=self._rank,
                    batches=end.batches,
                    late_rank=neighbor,
                )

    def _take_ended_iterations(self) -> list[_Iteration]:
        """Return the iterations that have ended since the latest call.

        The batch counts of these iterations are compared with those of the neighboring ranks.
        """
        ended_iterations: list[_Iteration] = []
        # The iteration of the latest step may be an earlier one than the latest, or the same.
        for iteration in (self._latest_iteration, self._iteration_of_step):
            if iteration is None or iteration.is_checked or not iteration.position.is_finished:
                continue
            iteration.is_checked = True
            self._compare_counts(iteration)
            ended_iterations.append(iteration)
        return ended_iterations

    def _compare_counts(self, iteration: _Iteration) -> None:
        """Set ``_counts_differ`` if a neighbor may have another number of batches.

        Reads the counts of those neighbors that were not read for this iteration yet.
        """
        if iteration.count.batches is None:
            self._counts_differ = True
        counts = self._counts.read(iteration.loader, iteration.unread_ranks)
        for neighbor, count in counts.items():
            has_begun = count.iteration >= iteration.count.iteration
            if not has_begun:
                continue
            iteration.unread_ranks.remove(neighbor)
            # A neighbor publishes only its latest count. If it is in a later iteration, its number
            # of batches in this one is unknown.
            is_later = count.iteration > iteration.count.iteration
            if is_later or count.batches != iteration.count.batches:
                self._counts_differ = True

    def _read_steps(self, ranks: Sequence[int]) -> dict[int, _Step]:
        """Return the steps that some ranks have published last. Ranks without one are left out."""
        steps: dict[int, _Step] = {}
        for rank, published in self._store.read("step", ranks).items():
            # JSON made lists of the named tuples.
            numbers, collectives, loop, early_steps = published
            steps[rank] = _Step(_PerNeighbor(*numbers), collectives, _Loop(*loop), early_steps)
        return steps

    def _read_ends(self, ranks: Sequence[int]) -> dict[int, _End]:
        """Return the ends that some ranks have published last. Ranks without one are left out."""
        ends: dict[int, _End] = {}
        for rank, published in self._store.read("end", ranks).items():
            # JSON made lists of the named tuples.
            steps, collectives, batches, early_steps = published
            ends[rank] = _End(_PerNeighbor(*steps), collectives, batches, early_steps)
        return ends

    def _raise_uneven_inputs(
        self, request: str, *, step: int, early_rank: int, batches: int, late_rank: int
    ) -> NoReturn:
        """Raise a UsageError for a rank that ran out of batches.

        Args:
            request: what this rank was about to do.
            step: the number of the step that only one rank takes.
            early_rank: the rank that ran out of batches.
            batches: how many batches it had.
            late_rank: the rank that has a batch for the step.
        """
        suggestion = (
            'setup_dataloaders(loader, uneven="drop") or "pad"; "shortest" or "longest" for other '
            "data"
        )
        # Sharded modules do not support fabric.join.
        if not self._bypass.is_sharded:
            suggestion += "; or with fabric.join(model): for batch in loader: ..."
        raise UsageError(
            request,
            problem=f"rank {early_rank} ran out of batches: its loader ended after {batches}, and "
            f"it takes no part in step {step}, for which rank {late_rank} has a batch and would "
            "wait",
            expected="equally many batches on all ranks, or a loop in which the others go on",
            suggestion=suggestion,
        )


def _would_wait(step: _Step, end: _End, is_peer: bool) -> bool:
    """Return whether a rank that takes a step would wait for a rank that has run out of batches.

    Args:
        step: the step of one rank.
        end: the end of an iteration on its neighbor.
        is_peer: whether these two ranks gather together.
    """
    if step.early_steps != end.early_steps:
        return False
    is_next_step = step.steps.number_for(is_peer) == end.steps.number_for(is_peer) + 1
    # Otherwise, the first rank has made the collective of the other one before its step.
    return is_next_step and step.collectives < end.collectives
