"""Ranks with different numbers of batches: an error and not a hang, and the order of modules in ``fabric.join``.

[Note: Uneven inputs] A *step* is a forward pass after which the ranks synchronize gradients; all ranks have to take the
same steps and, in between, the same collectives. A rank that has run out of batches goes on to a collective or to the
end of the job, while another takes one more step and waits. Each of the two publishes how far it is and then reads how
far the other is: whoever is second sees that the orders differ. Nothing of this is a collective.

It is done where it can matter: after the end of an iteration over a prepared loader, if the loaders of neighboring
ranks have different lengths, or lengths that nobody knows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fabric.communicators import Collective
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
    """Whether each iteration has its own order, of which the ranks have shares."""
    is_checked: bool = False
    """Whether its end has been."""


class UnevenInputDetector:
    """Compares the order of steps and collectives of this rank with its neighbors'; see ``[Note: Uneven inputs]``.

    Args:
        recorder: of this process, which counts the collectives.
        store: where the ranks publish how far they are.
        bypass: calls :meth:`on_forward`, once that may matter.

    Attributes:
        passes: forward passes of joined modules, in the latest ``fabric.join``.
    """

    def __init__(self, recorder: FlightRecorder, store: JobStore, bypass: BypassChecks) -> None:
        self._recorder, self._store, self._rank = recorder, store, store.rank
        self._bypass, self._neighbors = bypass, bypass.world.neighbours
        self._joined: list[BypassGuard] = []
        self._begun: dict[str, int] = {}  # iterations over each loader
        self.passes = 0
        self._steps = self._counted = 0  # steps taken, and collectives of the job before the latest one
        self._lengths_differ = False
        # The iteration that began last, and the one whose batches the last step was for.
        self._latest: _Iteration | None = None
        self._trained: _Iteration | None = None

    def on_epoch(self, loader: str, progress: Any, length: int | None, has_orders: bool = False) -> None:
        """Note that an iteration over a loader begins.

        Args:
            loader: its name, the same on all ranks.
            progress: of the iteration; counts the batches that it has ``received``, and says when it has ``finished``.
            length: number of batches that it will have; None when that is not known.
            has_orders: whether the ranks share an order that is another one in each iteration.
        """
        self._begun[loader] = number = self._begun.get(loader, 0) + 1
        # In one place for all iterations over a loader: jobs are long, and the store is in the memory of one node.
        self._store.publish(f"batches/{loader}", [number, length])
        self._latest = _Iteration(loader, number, progress, length, list(self._neighbors), has_orders)
        self._watch()

    def on_forward(self, guard: BypassGuard) -> None:
        """Note that a wrapped forward begins: that of a step, if it prepares a synchronization.

        Raises:
            UsageError: another rank has run out of batches, and will not take it; or it is another joined module's
                turn.
        """
        if guard in self._joined:
            self._check_order(guard)
        if self._joined or not guard.prepares_sync:
            return
        between, self._counted = self._recorder.counts[JOB] - self._counted, self._recorder.counts[JOB]
        self._steps += 1
        latest = self._latest
        if latest is None:
            return
        is_first = latest is not self._trained and latest.progress.received > 0 and not latest.progress.finished
        # Else the ranks may well be in different iterations.
        same_iteration = is_first and latest.has_orders and not self._lengths_differ
        if is_first:
            self._trained = latest
        if self._trained is not None and self._trained.unseen:
            self._compare_lengths(self._trained)
        if not is_first and not self._lengths_differ:
            return
        self._store.publish("step", [self._steps, between, latest.loader, latest.number])
        if same_iteration:
            self._check_numbers(latest)
        for other, (steps, collectives, batches) in self._store.read("end", self._neighbors).items():
            if steps == self._steps - 1 and between < collectives:
                self._refuse(f"step {self._steps} of rank {self._rank}", other, batches, self._rank)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Compare before a collective over all ranks; a check of the flight recorder.

        Raises:
            UsageError: this rank has run out of batches while another takes one more step; or ranks go on without each
                other.
        """
        if entry.group != JOB:
            return
        if self._joined:
            request = f"a collective over all ranks inside of fabric.join on rank {self._rank}"
            raise UsageError(request, "a rank without batches takes no part", suggestion="it after the with block")
        self._check_ends()

    def finish(self) -> None:
        """Compare at the end of the job, as :meth:`check` does."""
        # The rank that hosts the store may have finished before.
        with suppress(dist.DistError):
            self._check_ends(is_end=True)

    @contextmanager
    def joined(self, guards: Sequence[BypassGuard]) -> Iterator[None]:
        """Within, ranks take different numbers of steps, which are not counted, and no collectives.

        Args:
            guards: those of the joined modules, in order.

        Raises:
            UsageError: inside of another one.
        """
        if self._joined:
            raise UsageError("fabric.join inside of fabric.join", suggestion="with fabric.join([first, second]):")
        self._joined, self.passes = [*guards], 0
        self._watch()
        checks, self._recorder.phase_checks = self._recorder.phase_checks, ()
        try:
            yield
        finally:
            self._recorder.phase_checks = checks
            self._joined = []
            self._latest = self._trained = None

    def _watch(self) -> None:
        if not self._bypass.on_forward:
            self._bypass.on_forward.append(self.on_forward)
            self._recorder.checks = (self.check, *self._recorder.checks)

    def _check_order(self, guard: BypassGuard) -> None:
        """Raise unless joined modules run in the order in which ranks without batches shadow them.

        Those ranks make, module by module, the collectives of one forward pass and of the backward pass after it. In
        another order the collectives of different modules would meet.
        """
        turn = self.passes % len(self._joined)
        previous, expected = self._joined[turn - 1], self._joined[turn]
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

    def _check_numbers(self, own: _Iteration) -> None:
        for other, (steps, _, loader, number) in self._store.read("step", self._neighbors).items():
            if steps == self._steps and loader == own.loader and number != own.number:
                raise UsageError(
                    f"step {steps} of rank {self._rank}",
                    f"it is in iteration {own.number} over its loader and rank {other} in iteration {number}: their "
                    "batches are shares of different orders, so that samples are seen twice or never",
                    "iter(loader) equally often on all ranks",
                    "next(iter(loader.original)) for a look at a batch on one rank",
                )

    def _check_ends(self, is_end: bool = False) -> None:
        """Compare for the iterations that have ended since; the end of the job counts as one more collective."""
        collectives = self._recorder.counts[JOB] - self._counted + is_end
        for iteration in (self._latest, self._trained):
            if iteration is None or iteration.is_checked or not iteration.progress.finished:
                continue
            iteration.is_checked = True
            self._compare_lengths(iteration)
            # A neighbor that has published nothing yet may find that it has more.
            if not self._lengths_differ and not iteration.unseen:
                continue
            batches = iteration.progress.received
            self._store.publish("end", [self._steps, collectives, batches])
            for other, (steps, between, *_) in self._store.read("step", self._neighbors).items():
                if steps == self._steps + 1 and between < collectives:
                    request = f"a collective, or the end of the job, after step {self._steps} of rank {self._rank}"
                    self._refuse(request, self._rank, batches, other)

    def _compare_lengths(self, iteration: _Iteration) -> None:
        self._lengths_differ |= iteration.length is None
        for other, (number, length) in self._store.read(f"batches/{iteration.loader}", iteration.unseen).items():
            if number >= iteration.number:
                iteration.unseen.remove(other)
                # One that is further ended this iteration earlier, after nobody knows how many batches.
                self._lengths_differ |= number > iteration.number or length != iteration.length

    def _refuse(self, request: str, early: int, batches: int, late: int) -> NoReturn:
        step = self._steps + (early == self._rank)
        raise UsageError(
            request,
            f"rank {early} ran out of batches: its loader ended after {batches}, and it takes no part in step {step}, "
            f"for which rank {late} has a batch and would wait",
            "equally many batches on all ranks, or a loop within fabric.join, which goes on with the others",
            'setup_dataloaders(loader, uneven="drop") or "pad"; or with fabric.join(model): for batch in loader: ...',
        )
