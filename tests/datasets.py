"""Datasets, samplers and loaders of tests, and the batches and samples that they yield."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler


class ResumableStream(IterableDataset[int]):
    """An iterable dataset that saves and loads its position."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Eager(Sampler[int]):
    """A sampler that draws its order when an iterator is made, not at the first item."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())


def batches_of(loader: Iterable[Any]) -> list[Any]:
    """Read a loader, and return its batches as plain lists."""
    batches = []
    for batch in loader:
        if isinstance(batch, Tensor):
            batch = batch.tolist()
        batches.append(batch)
    return batches


def samples_of(loader: Iterable[Any]) -> list[Any]:
    """Read a loader of batches, and return its samples in their order."""
    return list(chain.from_iterable(batches_of(loader)))
