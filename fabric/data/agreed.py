"""Whether another batch follows: known while one is out, without a change of what the user's loader yields when."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from fabric.data.state import EpochState, LoaderSpec, length_of
from fabric.errors import UsageError

__all__ = ["Upcoming", "looked_ahead", "number_of_batches"]

_END = object()


def number_of_batches(spec: LoaderSpec, state: EpochState, loader: DataLoader[Any]) -> int | None:
    """How many batches an iteration of this rank has; None when that is not known."""
    entries = spec.shard_length(state)
    if entries is None:
        # As torchdata's, which may go on inside an epoch.
        goes_on = isinstance(spec.dataset, IterableDataset) or spec.indices is not None
        return None if goes_on or getattr(loader, "next_iter_state", loader) is not None else length_of(loader)
    full, rest = divmod(entries, spec.entries_per_batch)
    return full + (rest > 0 and not loader.drop_last)


class Upcoming:
    """The batches that this rank still has. Where their number is not known, one is fetched ahead.

    Args:
        batches: as the loader yields them.
        left: how many there are; None when that is not known.
        state: of the iteration.
        own_state: returns the own state of the loader or dataset, which is kept when it gets ahead of the user.
    """

    def __init__(
        self, batches: Iterator[Any], left: int | None, state: EpochState, own_state: Callable[[], Any]
    ) -> None:
        self.left, self._batches = left, batches
        self._state, self._own_state = state, own_state
        self._fetched: list[Any] = []

    def has_next(self) -> bool:
        """Whether there is another one."""
        if self.left is not None:
            return self.left > 0
        if not self._fetched:
            self._state.ahead = None
            self._state.ahead = copy.deepcopy(self._own_state())
            self._fetched.append(next(self._batches, _END))
        return self._fetched[0] is not _END

    def take(self) -> Any:
        """The next one."""
        if self.left is None:
            return self._fetched.pop()
        self.left -= 1
        return self._checked(next(self._batches, _END), is_end=False)

    def close(self) -> None:
        """Ask the loader once more, as a plain loop does, which ends its workers."""
        if self.left is not None:
            self._checked(next(self._batches, _END), is_end=True)

    def _checked(self, batch: Any, is_end: bool) -> Any:
        if (batch is _END) is is_end:
            return batch
        problem = f"its sampler has yielded {'more' if is_end else 'fewer'} batches than its length says"
        raise UsageError(
            "a loop over a loader that agrees on its end", problem, "a sampler with the right length, or none"
        )


def looked_ahead(upcoming: Upcoming, state: EpochState) -> Iterator[Any]:
    """All batches; while one is out, ``state.is_final`` says whether it is the last one."""
    while upcoming.has_next():
        batch = upcoming.take()
        state.is_final = not upcoming.has_next()
        yield batch
    upcoming.close()
