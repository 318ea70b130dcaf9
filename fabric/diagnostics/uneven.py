"""Uneven inputs: ranks with different numbers of batches end in an error and not in a hang.

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
from typing import NoReturn, Protocol

import torch.distributed as dist

from fabric.communicators import Collective
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["Progress", "UnevenInputDetector"]


class Progress(Protocol):
    """One iteration over a loader: how many batches it has handed out, and whether it is over."""

    received: int
    finished: bool


@dataclass(eq=False)
class _Iteration:
    loader: str
    number: int
    progress: Progress
    length: int | None
    unseen: list[int]
    """Neighbors whose length is not known yet."""
    ended: bool = False
    """Whether its end has been checked."""


class UnevenInputDetector:
    """Compares the order of steps and collectives of this rank with its neighbors'; see ``[Note: Uneven inputs]``.

    Args:
        recorder: of this process, which counts the collectives.
        store: where the ranks publish how far they are.
        neighbors: the ranks that this one compares with.

    Attributes:
        is_active: whether :meth:`on_step` has to be called, since an iteration over a loader has begun.
    """

    def __init__(self, recorder: FlightRecorder, store: JobStore, neighbors: Sequence[int]) -> None:
        self.is_active = False
        self._joined, self._generation = "", 0
        self._recorder, self._store, self._rank, self._neighbors = recorder, store, store.rank, neighbors
        self._steps = self._counted = 0  # steps taken, and collectives of the job before the latest one
        self._suspects = False
        # The iteration that began last, and the one whose batches the last step was for.
        self._latest: _Iteration | None = None
        self._trained: _Iteration | None = None

    def on_epoch(self, key: str, progress: Progress, length: int | None) -> None:
        """Note that an iteration over a loader begins.

        Args:
            key: identifies it, as ``"loader/number"``, numbers counting up; the same on all ranks.
            progress: its progress.
            length: number of batches that it will have; None when that is not known.
        """
        loader, _, number = key.rpartition("/")
        # In one place for all iterations over a loader: jobs are long, and the store is in the memory of one node.
        self._store.publish(f"batches/{loader}", [int(number), length])
        self._latest = _Iteration(loader, int(number), progress, length, list(self._neighbors))
        self.is_active = not self._joined
        self._set_checked(True)

    def on_step(self) -> None:
        """Note that a step begins, before anything waits for other ranks.

        Raises:
            UsageError: another rank has run out of batches, and will not take it.
        """
        between, self._counted = self._recorder.counts[JOB] - self._counted, self._recorder.counts[JOB]
        self._steps += 1
        latest = self._latest
        if latest is None or self._joined:
            return
        is_first = latest is not self._trained and latest.progress.received > 0 and not latest.progress.finished
        if is_first:
            self._trained = latest
        if self._trained is not None and self._trained.unseen:
            self._compare(self._trained)
        if not is_first and not self._suspects:
            return
        self._store.publish(f"step/{self._generation}", [self._steps, between])
        ends = self._store.read(f"end/{self._generation}", self._neighbors)
        for other, (steps, collectives, batches) in ends.items():
            if steps == self._steps - 1 and between < collectives:
                self._refuse(f"step {self._steps} of rank {self._rank}", other, batches, self._rank)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Compare before a collective over all ranks; a check of the flight recorder, while an iteration is going on.

        Raises:
            UsageError: this rank has run out of batches while another takes one more step; or ranks go on without each
                other.
        """
        if entry.group == JOB:
            if self._joined:
                self._refuse_in_join()
            self._check_ends(self._recorder.counts[JOB] - self._counted)

    def finish(self) -> None:
        """Compare at the end of the job, as :meth:`check` does."""
        # The rank that hosts the store may have finished before.
        with suppress(dist.DistError):
            self._check_ends(self._recorder.counts[JOB] - self._counted + 1)

    @contextmanager
    def suspended(self, request: str) -> Iterator[None]:
        """Within, ranks take different numbers of steps, and no collectives; afterward they start to count anew.

        Args:
            request: what the user called.

        Raises:
            UsageError: inside of another one.
        """
        if self._joined:
            raise UsageError(
                f"{request} inside of {self._joined} on rank {self._rank}",
                "a rank that has run out of batches can answer for one of them only",
                "one at a time",
                "with fabric.join([first, second]): for several modules",
            )
        self._joined, self.is_active = request, False
        self._set_checked(True)
        try:
            yield
        finally:
            self._joined, self._generation = "", self._generation + 1
            self._steps, self._counted = 0, self._recorder.counts[JOB]
            self._latest = self._trained = None
            self._set_checked(False)

    def _check_ends(self, collectives: int) -> None:
        """Compare for the iterations that have ended since; ``collectives`` is how many followed the latest step."""
        iterations = [each for each in (self._latest, self._trained) if each is not None and not each.ended]
        for iteration in iterations:
            if iteration.progress.finished and not iteration.ended:
                iteration.ended = True
                self._compare(iteration)
                # A neighbor that has published nothing yet may find that it has more.
                if self._suspects or iteration.unseen:
                    self._publish_end(iteration.progress.received, collectives)
        self._set_checked(not all(each.ended for each in iterations))

    def _publish_end(self, batches: int, collectives: int) -> None:
        self._store.publish(f"end/{self._generation}", [self._steps, collectives, batches])
        for other, (steps, between) in self._store.read(f"step/{self._generation}", self._neighbors).items():
            if steps == self._steps + 1 and between < collectives:
                request = f"a collective, or the end of the job, after step {self._steps} of rank {self._rank}"
                self._refuse(request, self._rank, batches, other)

    def _compare(self, iteration: _Iteration) -> None:
        if iteration.length is None:
            self._suspects = True
        for other, (number, length) in self._store.read(f"batches/{iteration.loader}", iteration.unseen).items():
            if number >= iteration.number:
                iteration.unseen.remove(other)
                # One that is further ended this iteration earlier, after nobody knows how many batches.
                self._suspects |= number > iteration.number or length != iteration.length

    def _set_checked(self, checked: bool) -> None:
        others = tuple(check for check in self._recorder.checks if check != self.check)
        self._recorder.checks = (self.check, *others) if checked else others

    def _refuse(self, request: str, early: int, batches: int, late: int) -> NoReturn:
        step = self._steps if early != self._rank else self._steps + 1
        raise UsageError(
            request,
            f"rank {early} ran out of batches: its loader ended after {batches}, and it takes no part in step {step}, "
            f"for which rank {late} has a batch and would wait",
            "equally many batches on all ranks, or a loop within fabric.join, which goes on with the others",
            'fabric.setup_dataloaders(loader, uneven="drop") or "pad", which shards them; or '
            "with fabric.join(model): for batch in loader: ...",
        )

    def _refuse_in_join(self) -> NoReturn:
        raise UsageError(
            f"a collective over all ranks inside of {self._joined} on rank {self._rank}",
            "a rank that has run out of batches takes no part in it",
            "forward and backward passes of the joined modules, and steps of their optimizers",
            "the collective, be it a checkpoint or a metric, after the with block",
        )
