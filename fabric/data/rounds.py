"""Dealing an iterable dataset, sample by sample, in complete rounds."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ["Rounds"]


class Rounds(IterableDataset[Any]):
    """One rank's samples out of an iterable dataset that every rank iterates.

    The samples come in rounds of ``num_replicas``; this rank keeps its own of each and drops the others unseen. Only
    complete rounds count, so that all ranks get equally many: filling the last one would need samples from ahead. With
    worker processes each worker deals what it iterates itself, so up to ``num_replicas - 1`` samples are left out per
    worker. Every rank has to iterate the same samples in the same order: shuffle by epoch (``set_epoch``), or with a
    generator of the dataset's own.

    Attributes are read from and written to the dataset inside, so that a ``worker_init_fn`` that configures the copy
    in its worker (``get_worker_info().dataset.start = ...``) reaches it.

    Args:
        dataset: the user's dataset.
        rank: ``0 <= rank < num_replicas``.
        num_replicas: number of ranks that the samples are dealt to.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, num_replicas: int) -> None:
        vars(self).update(_dealt=dataset, _rank=rank, _num_replicas=num_replicas)

    def __iter__(self) -> Iterator[Any]:
        # The dataset is asked for its iterator when torch asks: some draw their order there.
        return self._own(iter(self._dealt))

    def _own(self, samples: Iterator[Any]) -> Iterator[Any]:
        while len(complete := tuple(islice(samples, self._num_replicas))) == self._num_replicas:
            yield complete[self._rank]

    def __len__(self) -> int:
        return len(self._dealt) // self._num_replicas

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods: ours count. While being unpickled there is no dataset yet.
        if name.startswith("__") or "_dealt" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_dealt"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_dealt"], name, value)
