"""The error for uneven numbers of batches, which would hang the job.

[Note: Uneven inputs] A *step* is a forward pass after which ranks synchronize gradients, or a
forward pass of a sharded model, which gathers parameters. All ranks must take the same steps and,
between them, the same collectives. A rank that has run out of batches continues with a collective,
the end of the job or, under a sharded strategy, a loop of other steps, while another rank takes one
more step and waits. Each of the two publishes its progress and then reads the other's, so whichever
reads last sees the mismatch. None of this is a collective.

Under ``HYBRID_SHARD`` a forward pass without synchronization is a step only of the ranks that
gather together, the *peers*. So steps are counted twice: all of them, for neighbors that are peers,
and those of all ranks, for the other neighbors.

The check runs only where it can matter: after the end of an iteration over a prepared loader, if
the loaders of neighboring ranks have different or unknown lengths.
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
from fabric.diagnostics.bypass import BypassChecks, BypassGuard
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["UnevenInputDetector"]


class _Position(Protocol):
    """The position of an iteration over a loader."""

    received_batches: int
    is_finished: bool


@dataclass(eq=False)
class _Iteration:
    """An iteration over a loader on this rank.

    Attributes:
        loader: name of the loader.
        count: what this rank has published about the iteration.
        position: the position of the iteration.
        unread_ranks: neighbors whose count is not known yet.
        is_checked: whether the end of the iteration was checked.
    """

    loader: str
    count: BatchCount
    position: _Position
    unread_ranks: list[int]
    is_checked: bool = False


_NOT_TAKEN = -1  # in place of the number of a step


# The next four are published as JSON lists.


class _PerNeighbor(NamedTuple):
    """A number for the neighbors that gather with this rank, and one for the other neighbors."""

    peers: int
    non_peers: int

    def of(self, is_peer: bool) -> int:
        """Return the number for one of these neighbors."""
        return self.peers if is_peer else self.non_peers


class _Loop(NamedTuple):
    """The loop in which a rank takes a step."""

    loader: str
    iteration: int
    kind: str
    """What is run, under a sharded strategy: the module's class, with or without gradients."""
    iterations: int
    """Number of iterations that the rank has begun, over all loaders."""
    previous_batches: int
    """Number of batches in the iteration before this one."""


class _Step(NamedTuple):
    """A step that a rank is about to take."""

    steps: _PerNeighbor
    """Number of the step, or ``_NOT_TAKEN`` for neighbors that do not take it."""
    collectives: _PerNeighbor
    """Number of collectives of the job since the step before."""
    loop: _Loop


class _End(NamedTuple):
    """The first collective of a rank after an iteration, or the end of the job."""

    steps: _PerNeighbor
    """Number of steps that the rank has taken."""
    collectives: _PerNeighbor
    """Number of collectives of the job since the latest step, with this one."""
    batches: int
    """Number of batches in the iteration."""


class UnevenInputDetector:
    """Compares the order of steps and collectives of this rank with its neighbors'.

    See ``[Note: Uneven inputs]``.

    Args:
        recorder: this process's recorder, which counts collectives.
        store: where the ranks publish their progress.
        bypass: calls :meth:`on_forward` from the first iteration on.
    """

    def __init__(self, recorder: FlightRecorder, store: JobStore, bypass: BypassChecks) -> None:
        self._recorder = recorder
        self._store = store
        self._rank = store.rank
        self._bypass = bypass
        self._neighbors = bypass.world.neighbours
        self._counts = BatchCounts(store, self._neighbors)
        self._is_watching = False
        self._is_paused = False
        # Steps taken, for neighbors that gather with this rank and for the others, and the
        # collectives of the job before the latest such step.
        self._steps_of_peers = 0
        self._steps_of_all = 0
        self._collectives_of_peers = 0
        self._collectives_of_all = 0
        self._counts_differ = False
        # The iteration that began last, the one whose batches the last step was for, and the
        # number of batches of the iteration before the latest.
        self._latest: _Iteration | None = None
        self._trained: _Iteration | None = None
        self._previous_batches = 0

    def on_iteration(
        self, loader: str, position: _Position, batches: int | None, shuffles: bool = False
    ) -> None:
        """Record the start of an iteration over a loader.

        Args:
            loader: name of the loader, the same on all ranks.
            position: the position of the iteration.
            batches: number of batches in the iteration. None if unknown.
            shuffles: whether the ranks share an order that is drawn anew in each iteration.

        Raises:
            UsageError: a neighbor shuffles the loader and this rank does not, or the other way
                round.
        """
        count = self._counts.publish(loader, batches, shuffles)
        self._previous_batches = 0
        if self._latest is not None:
            self._previous_batches = self._latest.position.received_batches
        self._latest = _Iteration(
            loader=loader, count=count, position=position, unread_ranks=list(self._neighbors)
        )
        if not self._is_watching:
            self._is_watching = True
            self._bypass.on_forward.append(self.on_forward)
            # Modules that are set up later call on_forward without this.
            for structure in self._bypass.structures.values():
                structure.report_forward_passes()
            # This check is the first: where ranks have run out of batches, its error says so.
            self._recorder.checks = (self.check, *self._recorder.checks)

    def on_forward(self, contract: GradientContract, guard: BypassGuard | None = None) -> None:
        """Record the start of a forward pass of a sharded or guarded module. It may be a step.

        Args:
            contract: the module's contract.
            guard: the module's guard. None if the module is sharded.

        Raises:
            UsageError: another rank has run out of batches and will not take this step.
        """
        if self._is_paused:
            return
        # This method runs in every step, so most of it calls nothing.
        if guard is None:
            kind = contract.title
            is_of_all = self._is_step_of_all(contract)
            if not torch.is_grad_enabled():
                kind = f"{kind} without gradients"
        elif guard.prepares_sync:
            kind = ""
            is_of_all = True
        else:
            return
        collectives = self._recorder.counts[JOB]
        since_peers = collectives - self._collectives_of_peers
        since_all = collectives - self._collectives_of_all
        self._steps_of_peers += 1
        self._collectives_of_peers = collectives
        if is_of_all:
            self._steps_of_all += 1
            self._collectives_of_all = collectives

        latest = self._latest
        if latest is None:
            return
        is_first = (
            latest is not self._trained
            and latest.position.received_batches > 0
            and not latest.position.is_finished
        )
        # Ranks whose counts differ may be in different iterations.
        is_same_iteration = is_first and latest.count.shuffles and not self._counts_differ
        if is_first:
            self._trained = latest
        if self._trained is not None and self._trained.unread_ranks:
            self._compare_counts(self._trained)
        if is_first or self._counts_differ:
            steps_of_all = self._steps_of_all if is_of_all else _NOT_TAKEN
            step = _Step(
                steps=_PerNeighbor(self._steps_of_peers, steps_of_all),
                collectives=_PerNeighbor(since_peers, since_all),
                loop=self._loop(latest, kind),
            )
            self._check_step(step, is_same_iteration)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Compare progress before a collective over all ranks; the flight recorder calls it.

        Raises:
            UsageError: this rank has run out of batches while another takes one more step.
        """
        if entry.group == JOB and not self._is_paused:
            self._check_ends()

    def finish(self) -> None:
        """Compare progress at the end of the job, like :meth:`check`."""
        # The rank that hosts the store may have finished before.
        with suppress(dist.DistError):
            # The end of the job counts as one more collective.
            self._check_ends(later_collectives=1)

    @property
    def is_paused(self) -> bool:
        """Whether a block of :meth:`paused` is open."""
        return self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow ranks to take different numbers of steps in the block. The steps do not count."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._latest = None
            self._trained = None

    def _is_step_of_all(self, contract: GradientContract) -> bool:
        """Return whether all ranks take this step of a sharded module, and not only the peers."""
        if torch.is_grad_enabled() and contract.synchronizes():
            return True
        return self._bypass.peers.issuperset(self._neighbors)

    def _loop(self, iteration: _Iteration, kind: str) -> _Loop:
        return _Loop(
            loader=iteration.loader,
            iteration=iteration.count.iteration,
            kind=kind,
            iterations=self._counts.iterations,
            previous_batches=self._previous_batches,
        )

    def _is_peer(self, rank: int) -> bool:
        return rank in self._bypass.peers

    def _check_step(self, step: _Step, is_same_iteration: bool) -> None:
        """Publish a step, and raise unless the neighbors will take it too.

        Args:
            step: the step that this rank is about to take.
            is_same_iteration: whether neighbors must be in the same iteration over the loader.
        """
        self._store.publish("step", step)
        neighbors: Sequence[int] = self._neighbors
        if step.steps.non_peers == _NOT_TAKEN:
            neighbors = [neighbor for neighbor in neighbors if self._is_peer(neighbor)]
        if is_same_iteration or step.loop.kind:
            self._check_loops(step, neighbors, is_same_iteration)
        for neighbor, end in self._read_ends(neighbors).items():
            is_peer = self._is_peer(neighbor)
            if _would_wait(step, end, is_peer):
                number = step.steps.of(is_peer)
                request = f"step {number} of rank {self._rank}"
                self._refuse(request, number, neighbor, end.batches, self._rank)

    def _check_loops(self, step: _Step, neighbors: Sequence[int], is_same_iteration: bool) -> None:
        """Raise if a neighbor takes the same step in another loop, of a different kind or order."""
        loop = step.loop
        for neighbor, neighbor_step in self._read_steps(neighbors).items():
            is_peer = self._is_peer(neighbor)
            number = step.steps.of(is_peer)
            neighbor_loop = neighbor_step.loop
            is_same_loop = (
                neighbor_loop.loader == loop.loader and neighbor_loop.iteration == loop.iteration
            )
            if neighbor_step.steps.of(is_peer) != number or is_same_loop:
                continue
            request = f"step {number} of rank {self._rank}"
            if neighbor_loop.kind != loop.kind:
                self._refuse_kinds(request, number, loop, neighbor_loop, neighbor)
            if is_same_iteration and neighbor_loop.loader == loop.loader:
                raise UsageError(
                    request,
                    problem=f"it is in iteration {loop.iteration} over its loader and rank "
                    f"{neighbor} in iteration {neighbor_loop.iteration}: their batches are shares "
                    "of different orders, so that samples are seen twice or never",
                    expected="iter(loader) equally often on all ranks",
                    suggestion="next(iter(loader.original)) for a look at a batch on one rank",
                )

    def _refuse_kinds(
        self, request: str, step: int, loop: _Loop, neighbor_loop: _Loop, neighbor: int
    ) -> NoReturn:
        """Raise a UsageError for a step that two ranks take in loops of different kinds.

        The rank that has begun more iterations is in the later loop: it ran out of batches.
        """
        progress = (loop.iterations, loop.previous_batches, self._rank)
        neighbor_progress = (neighbor_loop.iterations, neighbor_loop.previous_batches, neighbor)
        if progress > neighbor_progress:
            self._refuse(request, step, self._rank, loop.previous_batches, neighbor)
        self._refuse(request, step, neighbor, neighbor_loop.previous_batches, self._rank)

    def _check_ends(self, later_collectives: int = 0) -> None:
        """Raise if an iteration has ended newly and a neighbor takes one more step.

        Args:
            later_collectives: number of collectives that the recorder has not counted.
        """
        iterations = self._take_ended_iterations()
        if not iterations:
            return
        has_unread = any(iteration.unread_ranks for iteration in iterations)
        # A neighbor that has not published yet may still have more batches.
        if not self._counts_differ and not has_unread:
            return
        collectives = self._recorder.counts[JOB] + later_collectives
        end = _End(
            steps=_PerNeighbor(self._steps_of_peers, self._steps_of_all),
            collectives=_PerNeighbor(
                collectives - self._collectives_of_peers, collectives - self._collectives_of_all
            ),
            batches=iterations[0].position.received_batches,
        )
        self._store.publish("end", end)
        for neighbor, step in self._read_steps(self._neighbors).items():
            is_peer = self._is_peer(neighbor)
            if _would_wait(step, end, is_peer):
                number = end.steps.of(is_peer)
                request = (
                    f"a collective, or the end of the job, after step {number} of rank {self._rank}"
                )
                self._refuse(request, number + 1, self._rank, end.batches, neighbor)

    def _take_ended_iterations(self) -> list[_Iteration]:
        """Return the iterations that have ended since the latest call. Compare their counts."""
        ended: list[_Iteration] = []
        for iteration in (self._latest, self._trained):
            if iteration is None or iteration.is_checked or not iteration.position.is_finished:
                continue
            iteration.is_checked = True
            self._compare_counts(iteration)
            ended.append(iteration)
        return ended

    def _compare_counts(self, iteration: _Iteration) -> None:
        """Note whether a neighbor has another number of batches in this iteration."""
        if iteration.count.batches is None:
            self._counts_differ = True
        counts = self._counts.read(iteration.loader, iteration.unread_ranks)
        for neighbor, count in counts.items():
            if count.iteration < iteration.count.iteration:
                continue
            iteration.unread_ranks.remove(neighbor)
            # A neighbor in a later iteration ended this one after an unknown number of batches.
            is_later = count.iteration > iteration.count.iteration
            if is_later or count.batches != iteration.count.batches:
                self._counts_differ = True

    def _read_steps(self, ranks: Sequence[int]) -> dict[int, _Step]:
        steps: dict[int, _Step] = {}
        for rank, (numbers, collectives, loop) in self._store.read("step", ranks).items():
            steps[rank] = _Step(_PerNeighbor(*numbers), _PerNeighbor(*collectives), _Loop(*loop))
        return steps

    def _read_ends(self, ranks: Sequence[int]) -> dict[int, _End]:
        ends: dict[int, _End] = {}
        for rank, (steps, collectives, batches) in self._store.read("end", ranks).items():
            ends[rank] = _End(_PerNeighbor(*steps), _PerNeighbor(*collectives), batches)
        return ends

    def _refuse(self, request: str, step: int, early: int, batches: int, late: int) -> NoReturn:
        """Raise a UsageError for a rank that ran out of batches.

        Args:
            request: what this rank was about to do.
            step: number of the step.
            early: the rank that ran out of batches.
            batches: how many batches it had.
            late: the rank that has a batch for the step.
        """
        suggestion = (
            'setup_dataloaders(loader, uneven="drop") or "pad"; "shortest" or "longest" for other '
            "data"
        )
        if not self._bypass.is_sharded:
            suggestion += "; or with fabric.join(model): for batch in loader: ..."
        raise UsageError(
            request,
            problem=f"rank {early} ran out of batches: its loader ended after {batches}, and it "
            f"takes no part in step {step}, for which rank {late} has a batch and would wait",
            expected="equally many batches on all ranks, or a loop in which the others go on",
            suggestion=suggestion,
        )


def _would_wait(step: _Step, end: _End, is_peer: bool) -> bool:
    """Return whether the rank that takes ``step`` would wait for the rank that is at ``end``.

    Args:
        step: the step of one rank.
        end: the end of an iteration of its neighbor.
        is_peer: whether these two ranks gather together.
    """
    is_next_step = step.steps.of(is_peer) == end.steps.of(is_peer) + 1
    return is_next_step and step.collectives.of(is_peer) < end.collectives.of(is_peer)
