"""How far this rank is, so that ranks with different numbers of batches end in an error and not in a hang.

[Note: Pace] A *step* is a forward pass after which the ranks synchronise gradients; all ranks have to take the same
steps and, in between, the same collectives. A rank that has run out of batches goes on to a collective or to the end of
the job, while another takes one more step and waits. Each of the two leaves its place in the store first and then looks
for the other's: whoever comes second sees that the orders differ. Nothing of this is a collective.

It is done where it can matter: after the end of an iteration over a prepared loader, if the loaders of neighbouring
ranks have different lengths, or lengths that nobody knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

from fabric.communicators import Collective
from fabric.diagnostics.recorder import JOB, Entry
from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["Pace", "Progress"]


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
    """Neighbours whose length is not there yet."""
    ended: bool = False
    """Whether its end has been dealt with."""


class Pace:
    """The place of this rank in the order of steps and collectives; see ``[Note: Pace]``.

    Args:
        rank: of this process.
        neighbours: ranks whose place is looked at.
        store: where the ranks leave their places for each other.

    Attributes:
        watches: whether steps have to be told, since an iteration over a loader has begun.
    """

    def __init__(self, rank: int, neighbours: tuple[int, ...], store: JobStore) -> None:
        self.watches = False
        self._joined, self._generation = "", 0
        self._rank, self._neighbours, self._store = rank, neighbours, store
        self._steps = self._collectives = 0
        self._suspects = False
        # The iteration that began last, and the one whose batches the last step was for.
        self._latest: _Iteration | None = None
        self._trained: _Iteration | None = None

    def began(self, key: str, progress: Progress, length: int | None) -> None:
        """Note that an iteration over a loader has begun.

        Args:
            key: tells it apart, as ``"loader/number"``, numbers counting up; the same on all ranks.
            progress: its progress.
            length: number of batches that it will have; None when that is not known.
        """
        if self._neighbours:
            loader, _, number = key.rpartition("/")
            # In one place for all iterations over a loader: jobs are long, and the store is in the memory of one node.
            self._store.set(f"batches/{loader}/{self._rank}", f"{number} {length}".encode())
            self.watches = not self._joined
            self._latest = _Iteration(loader, int(number), progress, length, list(self._neighbours))

    def step(self) -> None:
        """Note that a step begins, before anything waits for other ranks.

        Raises:
            UsageError: another rank has run out of batches, and will not take it.
        """
        between, self._collectives = self._collectives, 0
        self._steps += 1
        latest = self._latest
        if latest is None or self._joined:
            return
        first = latest is not self._trained and latest.progress.received > 0 and not latest.progress.finished
        if first:
            self._trained = latest
        if self._trained is not None and self._trained.unseen:
            self._compare(self._trained)
        if not first and not self._suspects:
            return
        self._store.set(self._key("step", self._rank), f"{self._steps} {between}".encode())
        for other in self._neighbours:
            steps, collectives, batches = self._numbers(self._key("left", other), 3)
            if steps == self._steps - 1 and between < collectives:
                self._refuse(f"step {self._steps} of rank {self._rank}", other, batches, self._rank)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Note that a collective begins; see :meth:`meet`."""
        if entry.group == JOB:
            self.meet()

    def meet(self) -> None:
        """Note that a collective over all ranks begins, or that this rank leaves.

        Raises:
            UsageError: this rank has run out of batches while another takes one more step; or ranks go on without each
                other.
        """
        if self._joined:
            self._refuse_in_join()
        self._collectives += 1
        for iteration in (self._latest, self._trained):
            if iteration is not None and iteration.progress.finished and not iteration.ended:
                iteration.ended = True
                self._compare(iteration)
                # A neighbour that is not there yet may find that it has more.
                if self._suspects or iteration.unseen:
                    self._leave(iteration.progress.received)

    @contextmanager
    def apart(self, asked: str) -> Iterator[None]:
        """Within, ranks take different numbers of steps, and no collectives; afterwards they start to count anew.

        Args:
            asked: what was asked for, in the words of the caller.

        Raises:
            UsageError: inside of another one.
        """
        if self._joined:
            raise UsageError(
                f"{asked} inside of {self._joined} on rank {self._rank}",
                "a rank that has run out of batches can answer for one of them only",
                "one at a time",
                "with fabric.join([first, second]): for several modules",
            )
        self._joined, self.watches = asked, False
        try:
            yield
        finally:
            self._joined, self._generation = "", self._generation + 1
            self._steps = self._collectives = 0
            self._latest = self._trained = None

    def _key(self, what: str, rank: int) -> str:
        return f"{what}/{self._generation}/{rank}"

    def _leave(self, batches: int) -> None:
        self._store.set(self._key("left", self._rank), f"{self._steps} {self._collectives} {batches}".encode())
        for other in self._neighbours:
            steps, collectives = self._numbers(self._key("step", other), 2)
            if steps == self._steps + 1 and collectives < self._collectives:
                asked = f"a collective, or the end of the job, after step {self._steps} of rank {self._rank}"
                self._refuse(asked, self._rank, batches, other)

    def _compare(self, iteration: _Iteration) -> None:
        if iteration.length is None:
            self._suspects = True
        for other in list(iteration.unseen):
            theirs = self._store.get_nowait(f"batches/{iteration.loader}/{other}")
            number, length = (b"-1", b"") if theirs is None else theirs.split()
            if int(number) >= iteration.number:
                iteration.unseen.remove(other)
                # One that is further ended this iteration earlier, after nobody knows how many batches.
                self._suspects |= int(number) > iteration.number or length.decode() != str(iteration.length)

    def _numbers(self, key: str, count: int) -> list[int]:
        found = self._store.get_nowait(key)
        return [-1] * count if found is None else [int(number) for number in found.split()]

    def _refuse(self, asked: str, early: int, batches: int, late: int) -> NoReturn:
        step = self._steps if early != self._rank else self._steps + 1
        raise UsageError(
            asked,
            f"rank {early} ran out of batches: its loader ended after {batches}, and it takes no part in step {step}, "
            f"for which rank {late} has a batch and would wait",
            "equally many batches on all ranks, or a loop within fabric.join, which goes on with the others",
            'fabric.setup_dataloaders(loader, uneven="drop") or "pad", which deals them; or '
            "with fabric.join(model): for batch in loader: ...",
        )

    def _refuse_in_join(self) -> NoReturn:
        raise UsageError(
            f"a collective over all ranks inside of {self._joined} on rank {self._rank}",
            "a rank that has run out of batches takes no part in it",
            "forward and backward passes of the joined modules, and steps of their optimizers",
            "the collective, be it a checkpoint or a metric, after the with block",
        )
