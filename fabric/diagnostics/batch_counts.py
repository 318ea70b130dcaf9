"""The number of batches of each iteration over a loader, which neighboring ranks compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["BatchCount", "BatchCounts", "DividedOrder"]


class DividedOrder(NamedTuple):
    """The order of a loader, as far as it is divided over the ranks. It is then the same on all.

    Attributes:
        shuffles: whether the loader draws a new order in each iteration, as with ``shuffle=True``.
            False if the order is not divided.
        length: the number of samples or batches that fabric divides. None if it is unknown, or if
            fabric does not divide the order.
    """

    shuffles: bool
    length: int | None


class _PublishedCount(NamedTuple):
    """What a rank publishes about an iteration over a loader, as a JSON list of these fields.

    Attributes:
        iteration: how many times the rank has begun to iterate over the loader.
        batches: the number of batches. None if unknown.
        shuffles: as in :class:`DividedOrder`.
        length: as in :class:`DividedOrder`.
    """

    iteration: int
    batches: int | None
    shuffles: bool
    length: int | None


@dataclass(eq=False)
class BatchCount:
    """The number of batches in one iteration over a loader on this rank.

    Attributes:
        loader: the name of the loader, the same on all ranks.
        iteration: how many times this rank has begun to iterate over the loader.
        batches: the number of batches. None if unknown.
        order: the order that is divided over the ranks.
        uncompared_neighbors: the neighbors whose number of batches was not compared yet.
    """

    loader: str
    iteration: int
    batches: int | None
    order: DividedOrder
    uncompared_neighbors: list[int]


class BatchCounts:
    """The batch counts of this rank, compared with those of its neighbors.

    The neighbors are the ranks before and after this one in a ring. It is enough to compare
    neighbors: if any two ranks differ, two neighbors differ.

    Args:
        store: the store in which the ranks publish their counts.
        neighbors: the neighboring ranks.

    Attributes:
        may_differ: whether a neighbor has, or may have, another number of batches than this rank in
            any iteration that :meth:`compare` was called for.
    """

    def __init__(self, store: JobStore, neighbors: Sequence[int]) -> None:
        self.may_differ = False
        self._store = store
        self._neighbors = neighbors
        # How many iterations this rank has begun, by the name of the loader.
        self._iterations: dict[str, int] = {}

    @property
    def iterations(self) -> int:
        """Number of iterations that this rank has begun, over all loaders."""
        return sum(self._iterations.values())

    def publish(self, loader: str, batches: int | None, order: DividedOrder) -> BatchCount:
        """Publish the batch count of an iteration that begins, and return it.

        Args:
            loader: the name of the loader, the same on all ranks.
            batches: the number of batches in the iteration. None if unknown.
            order: the order that is divided over the ranks.

        Raises:
            UsageError: the order of a neighbor is a different one.
        """
        iteration = self._iterations.get(loader, 0) + 1
        self._iterations[loader] = iteration
        # This overwrites the count of the iteration before. The counts of a long job would fill the
        # store, which is in the memory of one node.
        count = _PublishedCount(iteration, batches, order.shuffles, order.length)
        self._store.publish(_topic(loader), count)
        # One comparison is enough: a loader that shuffles does so in every iteration.
        if iteration == 1:
            self._check_order(loader, order)
        return BatchCount(
            loader=loader,
            iteration=iteration,
            batches=batches,
            order=order,
            uncompared_neighbors=list(self._neighbors),
        )

    def compare(self, count: BatchCount) -> bool:
        """Set ``may_differ`` if a neighbor has, or may have, another number of batches.

        The neighbors are the ranks before and after this one. Those that have not begun the
        iteration stay in ``count.uncompared_neighbors``, for the next call.

        Args:
            count: the count of an iteration on this rank.

        Returns:
            ``may_differ``, or True if a neighbor has not begun the iteration: it may have more
            batches.
        """
        if count.batches is None:
            # An unknown number may differ from any other.
            self.may_differ = True
        published_counts = self._published_counts(count.loader, count.uncompared_neighbors)
        for neighbor, published in published_counts.items():
            has_begun = published.iteration >= count.iteration
            if not has_begun:
                continue
            count.uncompared_neighbors.remove(neighbor)
            # The neighbor may be in a later iteration already. Its count of this iteration is then
            # overwritten, and unknown.
            is_overwritten = published.iteration > count.iteration
            if is_overwritten or published.batches != count.batches:
                self.may_differ = True
        return self.may_differ or len(count.uncompared_neighbors) > 0

    def _published_counts(self, loader: str, ranks: Iterable[int]) -> dict[int, _PublishedCount]:
        """Return the latest counts of some ranks for a loader, by rank. Does not wait for ranks.

        Ranks that have not published a count for the loader are left out.
        """
        counts = self._store.read(_topic(loader), ranks)
        return {rank: _PublishedCount(*count) for rank, count in counts.items()}

    def _check_order(self, loader: str, order: DividedOrder) -> None:
        """Raise if a neighbor has a different order of the loader than this rank.

        The two ranks would take their batches from different orders, so that samples are seen twice
        or never. This rank has published its count before. A neighbor that has not published yet
        will read that count, and raise itself.

        Args:
            loader: the name of the loader.
            order: the order on this rank, in the first iteration.
        """
        request = f"iteration over loader {loader} on rank {self._store.rank}"
        for neighbor, published in self._published_counts(loader, self._neighbors).items():
            if published.shuffles != order.shuffles:
                shuffling_rank = self._store.rank
                ordered_rank = neighbor
                if published.shuffles:
                    shuffling_rank = neighbor
                    ordered_rank = self._store.rank
                raise UsageError(
                    request,
                    problem=f"rank {shuffling_rank} draws its order anew in each iteration, as "
                    f"with shuffle=True, and rank {ordered_rank} does not",
                    expected="the same loader",
                )
            # The data of a later iteration may have another length.
            has_lengths = order.length is not None and published.length is not None
            is_first = published.iteration == 1
            if is_first and has_lengths and published.length != order.length:
                raise UsageError(
                    request,
                    problem=f"setup_dataloaders divides the data over the processes, but it has "
                    f"the length {order.length} on rank {self._store.rank} and "
                    f"{published.length} on rank {neighbor}",
                    expected="the whole data on every rank",
                    suggestion="setup_dataloaders(loader, use_distributed_sampler=False) if each "
                    'rank has its own part of the data, with uneven="shortest" or "longest" if '
                    "the parts differ in length",
                )


def _topic(loader: str) -> str:
    """Return the topic in the store under which the ranks publish their counts for a loader."""
    return f"batches/{loader}"
