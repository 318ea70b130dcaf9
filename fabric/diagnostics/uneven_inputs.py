"""Detection of uneven numbers of batches, which would hang the job, and of the module order in ``fabric.join``.

[Note: Uneven inputs] A *step* is a forward pass after which ranks synchronize gradients, or a forward pass of a sharded
model, which gathers parameters. All ranks must take the same steps and, between them, the same collectives. A rank that
has run out of batches continues with a collective, the end of the job or, under a sharded strategy, a loop of other
steps, while another rank takes one more step and waits. Each of the two publishes its progress and then reads the
other's, so whichever reads last sees the mismatch. None of this is a collective.

Under ``HYBRID_SHARD`` a forward pass without synchronization is a step only of the ranks that gather together. So each
count is kept twice: of all steps, for neighbors that gather with this rank, and another for the other neighbors.

The check runs only where it can matter: after the end of an iteration over a prepared loader, if the loaders of
neighboring ranks have different or unknown lengths.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fabric.communicators import Collective
from fabric.contract import GradientContract
from fabric.diagnostics.bypass import BypassChecks, BypassGuard
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["UnevenInputDetector"]


@dataclass(eq=False)
class _Iteration:
    loader: str
    number: int
    progress: Any
    length: int | None
    unseen: list[int]
    """Neighbors whose length is not known yet."""
    has_orders: bool = False
    """Whether ranks share an order that is drawn anew in each iteration."""
    is_checked: bool = False
    """Whether its end was checked."""


class UnevenInputDetector:
    """Compares the order of steps and collectives of this rank with its neighbors'; see ``[Note: Uneven inputs]``.

    Args:
        recorder: this process's recorder, which counts collectives.
        store: where the ranks publish their progress.
        bypass: calls :meth:`on_forward` once it may matter.

    Attributes:
        passes: forward passes of joined modules in the latest ``fabric.join``.
    """

    def __init__(self, recorder: FlightRecorder, store: JobStore, bypass: BypassChecks) -> None:
        self._recorder = recorder
        self._store = store
        self._rank = store.rank
        self._bypass = bypass
        self._neighbors = bypass.world.neighbours
        self._joined: list[BypassGuard] = []
        self._begun: dict[str, int] = {}  # iterations over each loader
        # the latter: batches of the iteration before the latest
        self.passes = 0
        self._ended = 0
        # Steps taken, and collectives of the job before the latest one; for neighbors that gather with us, and others.
        self._steps = [0, 0]
        self._counted = [0, 0]
        self._lengths_differ = False
        # The iteration that began last, and the one whose batches the last step was for.
        self._latest: _Iteration | None = None
        self._trained: _Iteration | None = None

    def on_epoch(
        self, loader: str, progress: Any, length: int | None, has_orders: bool = False
    ) -> None:
        """Record the start of an iteration over a loader.

        Args:
            loader: its name, the same on all ranks.
            progress: of the iteration: the number of batches ``received``, and whether it has ``finished``.
            length: number of batches in the iteration; None if unknown.
            has_orders: whether the ranks share an order that is drawn anew in each iteration.
        """
        self._begun[loader] = number = self._begun.get(loader, 0) + 1
        # One key for all iterations over a loader: jobs are long, and the store is in one node's memory.
        self._store.publish(topic := f"batches/{loader}", [number, length, has_orders])
        published = self._store.read(topic, self._neighbors if number == 1 else ())
        for other, (*_, theirs) in published.items():
            if theirs != has_orders:
                problem = f"only one of it and rank {other} draws an order anew in each iteration, as with shuffle=True"
                raise UsageError(
                    f"iteration over loader {loader} on rank {self._rank}",
                    problem,
                    "the same loader",
                )
        self._ended = self._latest.progress.received if self._latest is not None else 0
        self._latest = _Iteration(
            loader, number, progress, length, list(self._neighbors), has_orders
        )
        self._watch()

    def on_forward(self, contract: GradientContract, guard: BypassGuard | None = None) -> None:
        """Record the start of a forward pass, which may be a step, of a sharded or guarded module.

        Raises:
            UsageError: another rank has run out of batches and will not take this step; or another joined module
                comes first.
        """
        if guard in self._joined:
            self._check_order(guard)
        if self._joined or not (guard is None or guard.prepares_sync):
            return
        kind = ""
        neighbors = self._neighbors
        collectives = self._recorder.counts[JOB]
        if guard is None:
            trains = torch.is_grad_enabled()
            kind = contract.title + " without gradients" * (not trains)
            if not (trains and contract.synchronizes()):
                neighbors = tuple(filter(self._bypass.peers.__contains__, neighbors))
        is_of_all = neighbors == self._neighbors
        between = collectives - self._counted[0], collectives - self._counted[1]
        for scope in (0, 1)[: 1 + is_of_all]:
            self._steps[scope] += 1
            self._counted[scope] = collectives
        latest = self._latest
        if latest is None:
            return
        is_first = (
            latest is not self._trained
            and latest.progress.received > 0
            and not latest.progress.finished
        )
        # Otherwise ranks may be in different iterations.
        same_iteration = is_first and latest.has_orders and not self._lengths_differ
        if is_first:
            self._trained = latest
        if self._trained is not None and self._trained.unseen:
            self._compare_lengths(self._trained)
        if not is_first and not self._lengths_differ:
            return
        loop = [latest.loader, latest.number, kind, sum(self._begun.values()), self._ended]
        self._store.publish(
            "step", [self._steps if is_of_all else [self._steps[0], None], between, loop]
        )
        if same_iteration or kind:
            self._check_loops(neighbors, loop, same_iteration)
        for other, (taken, others, batches) in self._store.read("end", neighbors).items():
            step = self._steps[scope := other not in self._bypass.peers]
            if taken[scope] == step - 1 and between[scope] < others[scope]:
                self._refuse(f"step {step} of rank {self._rank}", step, other, batches, self._rank)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Compare progress before a collective over all ranks; called by the flight recorder.

        Raises:
            UsageError: this rank has run out of batches while another takes one more step; or it is called inside of
                ``fabric.join``.
        """
        if entry.group != JOB:
            return
        if self._joined:
            request = f"a collective over all ranks inside of fabric.join on rank {self._rank}"
            raise UsageError(
                request,
                "a rank without batches takes no part",
                'it after the block; or uneven="longest"',
            )
        self._check_ends()

    def finish(self) -> None:
        """Compare progress at the end of the job, like :meth:`check`."""
        # The rank that hosts the store may have finished before.
        with suppress(dist.DistError):
            self._check_ends(is_end=True)

    @contextmanager
    def joined(self, guards: Sequence[BypassGuard]) -> Iterator[None]:
        """A context in which ranks may take different numbers of steps (not counted) but no collectives.

        Args:
            guards: the guards of the joined modules, in order.

        Raises:
            UsageError: already inside of one.
        """
        if self._joined:
            raise UsageError(
                "fabric.join inside of fabric.join", suggestion="with fabric.join([first, second]):"
            )
        self._joined = [*guards]
        self.passes = 0
        self._watch()
        checks = self._recorder.phase_checks
        self._recorder.phase_checks = ()
        try:
            yield
        finally:
            self._recorder.phase_checks = checks
            self._joined = []
            self._latest = None
            self._trained = None

    def _watch(self) -> None:
        if not self._bypass.on_forward:
            self._bypass.on_forward.append(self.on_forward)
            for structure in self._bypass.structures.values():
                structure.follow()
            self._recorder.checks = (self.check, *self._recorder.checks)

    def _check_order(self, guard: BypassGuard) -> None:
        """Raise unless joined modules run in the order in which ranks without batches shadow them.

        Those ranks issue, module by module, the collectives of a forward and a backward pass. In another order,
        collectives of different modules would be matched.
        """
        turn = self.passes % len(self._joined)
        previous = self._joined[turn - 1]
        expected = self._joined[turn]
        if not torch.is_grad_enabled():
            problem = "it is without gradients, and ranks that have no batches would wait for them"
        elif previous.awaits_backward:
            problem = f"the backward pass of {previous.contract.title} has not been made"
        elif guard is not expected:
            problem = f"the next one is {expected.contract.title}"
        else:
            self.passes += 1
            return
        raise UsageError(
            f"a forward pass of {guard.contract.title} in fabric.join on rank {self._rank}",
            problem,
            "for each batch a forward and a backward pass of each joined module, in the order of fabric.join",
            "model.module(x), or the end of the with block, for a pass without gradients",
        )

    def _check_loops(self, neighbors: Sequence[int], own: Any, same_iteration: bool) -> None:
        """Raise if a neighbor takes the same step in another loop, of a different kind or order."""
        for other, (steps, _, theirs) in self._store.read("step", neighbors).items():
            step = self._steps[scope := other not in self._bypass.peers]
            if steps[scope] != step or theirs[:2] == own[:2]:
                continue
            request = f"step {step} of rank {self._rank}"
            if theirs[2] != own[2]:
                # The rank that began more iterations is in the later loop.
                (_, ended, early), (*_, late) = sorted(
                    [[*own[3:], self._rank], [*theirs[3:], other]], reverse=True
                )
                self._refuse(request, step, early, ended, late)
            if same_iteration and theirs[0] == own[0]:
                raise UsageError(
                    request,
                    f"it is in iteration {own[1]} over its loader and rank {other} in iteration {theirs[1]}: their "
                    "batches are shares of different orders, so that samples are seen twice or never",
                    "iter(loader) equally often on all ranks",
                    "next(iter(loader.original)) for a look at a batch on one rank",
                )

    def _check_ends(self, is_end: bool = False) -> None:
        """Compare for newly ended iterations; the end of the job counts as one more collective."""
        collectives = [self._recorder.counts[JOB] - before + is_end for before in self._counted]
        found = [
            one
            for one in (self._latest, self._trained)
            if one and not one.is_checked and one.progress.finished
        ]
        for iteration in found:
            iteration.is_checked = True
            self._compare_lengths(iteration)
        # A neighbor that has not published yet may still have more batches.
        if not found or not (self._lengths_differ or any(iteration.unseen for iteration in found)):
            return
        batches = found[0].progress.received
        self._store.publish("end", [self._steps, collectives, batches])
        for other, (steps, between, _) in self._store.read("step", self._neighbors).items():
            step = self._steps[scope := other not in self._bypass.peers] + 1
            if steps[scope] == step and between[scope] < collectives[scope]:
                request = f"a collective, or the end of the job, after step {step - 1} of rank {self._rank}"
                self._refuse(request, step, self._rank, batches, other)

    def _compare_lengths(self, iteration: _Iteration) -> None:
        self._lengths_differ |= iteration.length is None
        for other, (number, length, _) in self._store.read(
            f"batches/{iteration.loader}", iteration.unseen
        ).items():
            if number >= iteration.number:
                iteration.unseen.remove(other)
                # A neighbor in a later iteration ended this one after an unknown number of batches.
                self._lengths_differ |= number > iteration.number or length != iteration.length

    def _refuse(self, request: str, step: int, early: int, batches: int, late: int) -> NoReturn:
        joined = (
            ""
            if self._bypass.is_sharded
            else "; or with fabric.join(model): for batch in loader: ..."
        )
        raise UsageError(
            request,
            f"rank {early} ran out of batches: its loader ended after {batches}, and it takes no part in step {step}, "
            f"for which rank {late} has a batch and would wait",
            "equally many batches on all ranks, or a loop in which the others go on",
            f'setup_dataloaders(loader, uneven="drop") or "pad"; "shortest" or "longest" for other data{joined}',
        )
