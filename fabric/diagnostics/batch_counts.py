"""The number of batches of each iteration over a loader, which each rank publishes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["BatchCount", "BatchCounts"]


class BatchCount(NamedTuple):
    """The number of batches in one iteration over a loader on one rank.

    Attributes:
        iteration: how many times the rank has begun to iterate over the loader.
        batches: the number of batches. None if unknown.
        shuffles: whether the ranks share an order that is drawn anew in each iteration.
    """

    iteration: int
    batches: int | None
    shuffles: bool


class BatchCounts:
    """The batch counts of this rank and of its neighbors.

    The neighbors are the ranks before and after this one in a ring. It is enough to compare
    neighbors: if any two ranks differ, two neighbors differ.

    Args:
        store: the store in which the ranks publish their counts.
        neighbors: the neighboring ranks.
    """

    def __init__(self, store: JobStore, neighbors: Sequence[int]) -> None:
        self._store = store
        self._neighbors = neighbors
        # How many iterations this rank has begun, by the name of the loader.
        self._iterations: dict[str, int] = {}

    @property
    def iterations(self) -> int:
        """Number of iterations that this rank has begun, over all loaders."""
        return sum(self._iterations.values())

    def publish(self, loader: str, batches: int | None, shuffles: bool) -> BatchCount:
        """Publish the batch count of an iteration that begins, and return it.

        Args:
            loader: the name of the loader, the same on all ranks.
            batches: the number of batches in the iteration. None if unknown.
            shuffles: whether the ranks share an order that is drawn anew in each iteration.

        Raises:
            UsageError: a neighbor shuffles the loader, and this rank does not, or the other way
                round.
        """
        iteration = self._iterations.get(loader, 0) + 1
        self._iterations[loader] = iteration
        count = BatchCount(iteration, batches, shuffles)
        # Each iteration overwrites the count of the one before it, since the store is in the memory
        # of one node and jobs may be long.
        self._store.publish(_topic(loader), count)
        # Whether a loader shuffles does not change after its first iteration.
        if iteration == 1:
            self._check_shuffles(loader, shuffles)
        return count

    def read(self, loader: str, ranks: Iterable[int]) -> dict[int, BatchCount]:
        """Return the latest counts of some ranks for a loader, by rank.

        Ranks that have not published a count for the loader are left out.
        """
        published = self._store.read(_topic(loader), ranks)
        return {rank: BatchCount(*count) for rank, count in published.items()}

    def _check_shuffles(self, loader: str, shuffles: bool) -> None:
        """Raise if a neighbor shuffles the loader and this rank does not, or the other way round.

        The batches of the two ranks would be shares of different orders, so that samples would be
        seen twice or never. A neighbor that has not begun its first iteration compares later.

        Args:
            loader: the name of the loader.
            shuffles: whether this rank shuffles it.
        """
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
