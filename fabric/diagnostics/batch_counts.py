"""The number of batches of each iteration over a loader, which every rank publishes once."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["BatchCount", "BatchCounts"]


class BatchCount(NamedTuple):
    """The number of batches in one iteration over a loader on one rank."""

    iteration: int
    """How many times the rank has begun to iterate over the loader."""
    batches: int | None
    """None if unknown."""
    shuffles: bool
    """Whether the ranks share an order that is drawn anew in each iteration."""


class BatchCounts:
    """The batch counts of this rank and of its neighbors.

    Two neighbors in a ring are enough: if any two ranks differ, so do two neighbors.

    Args:
        store: where the ranks publish their counts.
        neighbors: the neighboring ranks.
    """

    def __init__(self, store: JobStore, neighbors: Sequence[int]) -> None:
        self._store = store
        self._neighbors = neighbors
        self._iterations: dict[str, int] = {}

    @property
    def iterations(self) -> int:
        """Number of iterations that this rank has begun, over all loaders."""
        return sum(self._iterations.values())

    def publish(self, loader: str, batches: int | None, shuffles: bool) -> BatchCount:
        """Publish the count of an iteration that begins.

        Args:
            loader: name of the loader, the same on all ranks.
            batches: number of batches in the iteration. None if unknown.
            shuffles: whether the ranks share an order that is drawn anew in each iteration.

        Raises:
            UsageError: a neighbor shuffles the loader, and this rank does not, or the other way
                round.
        """
        iteration = self._iterations.get(loader, 0) + 1
        self._iterations[loader] = iteration
        count = BatchCount(iteration, batches, shuffles)
        # One key for all iterations over a loader: jobs are long, and the store is in one node's
        # memory.
        self._store.publish(_topic(loader), count)
        if iteration == 1:  # it does not change later
            self._check_shuffles(loader, shuffles)
        return count

    def read(self, loader: str, ranks: Iterable[int]) -> dict[int, BatchCount]:
        """Return the latest counts of these ranks. Ranks that have not published are left out."""
        published = self._store.read(_topic(loader), ranks)
        return {rank: BatchCount(*count) for rank, count in published.items()}

    def _check_shuffles(self, loader: str, shuffles: bool) -> None:
        for neighbor, count in self.read(loader, self._neighbors).items():
            if count.shuffles == shuffles:
                continue
            shuffling_rank = self._store.rank
            ordered_rank = neighbor
            if count.shuffles:
                shuffling_rank = neighbor
                ordered_rank = self._store.rank
            raise UsageError(
                f"iteration over loader {loader} on rank {self._store.rank}",
                problem=f"rank {shuffling_rank} draws its order anew in each iteration, as with "
                f"shuffle=True, and rank {ordered_rank} does not",
                expected="the same loader",
            )


def _topic(loader: str) -> str:
    return f"batches/{loader}"
