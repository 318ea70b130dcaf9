"""Data whose order or position is its own affair."""

from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, Sampler


class ResumableStream(IterableDataset[int]):
    """An iterable dataset that knows where it is."""

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
    """Draws its order when it is asked for an iterator, not at the first item."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())
