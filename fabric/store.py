"""Values that ranks leave for each other in the store of the job: no collectives, nobody waits but for rank 0's."""

import torch.distributed as dist

from fabric.errors import UsageError

__all__ = ["JobStore"]


class JobStore:
    """What the ranks of a job leave for each other. Each key can be used for one of the four ways to write it.

    Args:
        store: shared by the ranks; one of this process where there are no others.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def from_rank0(self, key: str, value: bytes) -> bytes:
        """Rank 0's value for ``key``, on every rank; waits for it there. Each key can be used once.

        Raises:
            UsageError: rank 0 wrote no value within the timeout.
        """
        if self._size == 1:
            return value
        if self._rank == 0:
            self.set(key, value)
            return value
        try:
            return self._store.get(key)
        except dist.DistStoreError as error:
            raise UsageError(
                f"rank {self._rank} waits for rank 0's {key!r}",
                f"rank 0 has written none within the timeout: {error}",
                "every rank iterates over the same loaders in the same order",
                "check for a branch on the rank around the loop over the loader",
            ) from error

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """The value of the first rank that called this with ``key``: ``value`` if it is this one."""
        return self._store.compare_set(key, "", value)  # pyright: ignore[reportArgumentType] - as in set()

    def set(self, key: str, value: bytes) -> None:
        """Write a value, over one that is there."""
        self._store.set(key, value)  # pyright: ignore[reportArgumentType] - bytes pass; the stub says str only

    def get_nowait(self, key: str) -> bytes | None:
        """The value that some rank wrote; None when there is none yet."""
        return self._store.get(key) if self._store.check([key]) else None
