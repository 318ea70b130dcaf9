"""A batch through the loader."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.framework import Case, Measure, Row
from benchmarks.timing import times

BATCHES = 400


def loader(quick: bool) -> DataLoader[Any]:
    count = 4 * (20 if quick else BATCHES)
    return DataLoader(TensorDataset(torch.zeros(count, 4), torch.zeros(count)), batch_size=4)


def ours(plain: DataLoader[Any]) -> Iterable[Any]:
    from fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(plain)


def lightning(plain: DataLoader[Any]) -> Iterable[Any]:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(plain)


def accelerate(plain: DataLoader[Any]) -> Iterable[Any]:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    return Accelerator(cpu=True).prepare(plain)


def preparing(build: Callable[[DataLoader[Any]], Iterable[Any]]) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        plain = loader(quick)
        prepared = build(plain)
        return times(
            "time",
            lambda: deque(prepared, maxlen=0),
            number=1 if quick else 3,
            scale=1e6 / len(plain),
        )

    return prepare


CASES = [
    Case(
        name="batch",
        title="A batch through the loader, on a CPU",
        rows={"time": Row("us", "difference", 2)},
        contestants={
            "raw": preparing(lambda plain: plain),
            "fabric": preparing(ours),
            "lightning-fabric": preparing(lightning),
            "accelerate": preparing(accelerate),
        },
        rounds=5,
        starts=4,
    )
]
