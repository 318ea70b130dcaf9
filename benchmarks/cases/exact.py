"""The cost of exact updates of the GPT of the text example.

The updates have weights, or the ranks agree on each batch. Both contestants are fabric. "raw" is
the step without weights and agreement.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.cases.gpt import BATCH, LENGTH, RANKS, VOCABULARY, adamw, build, stepping
from benchmarks.framework import Case, Measure, Row
from benchmarks.timing import seconds


class Tokens(IterableDataset[Tensor]):
    """An endless dataset of one batch. Its length is unknown, as that of any iterable dataset."""

    def __iter__(self) -> Iterator[Tensor]:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        while True:
            yield tokens


def preparing(weighted: bool, **options: Any) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        from fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
        fabric.launch()
        built = build(quick)
        model, optimizer = fabric.setup(built, adamw(built))
        loader = fabric.setup_dataloaders(
            DataLoader(Tokens(), None), use_distributed_sampler=False, **options
        )
        backward: Callable[[Tensor], Any] = fabric.backward
        reduction = "mean"
        if weighted:
            backward = partial(fabric.backward, weight=BATCH * LENGTH)
            reduction = "sum"
        step = stepping(model, optimizer, backward, iter(loader), reduction)
        trained = RANKS * BATCH * LENGTH
        return lambda: {"throughput": trained / seconds(step, 1 if quick else 3)}

    return prepare


def case(name: str, title: str, ours: Callable[[bool], Measure], budget: float) -> Case:
    rows = {"throughput": Row("tokens/s", "ratio", budget)}
    contestants = {"raw": preparing(weighted=False), "fabric": ours}
    notes: dict[str, str] = dict.fromkeys(
        ("lightning-fabric", "accelerate"), "a comparison of fabric with itself"
    )
    return Case(name, title, rows, contestants, RANKS, rounds=20, starts=2, notes=notes)


CASES = [
    case(
        "weighted",
        "Weighted losses of a small GPT on two ranks; raw: fabric without weights",
        preparing(True),
        0.99,
    ),
    case(
        "shortest",
        'Batches under uneven="shortest" for a small GPT on two ranks; raw: fabric without it',
        preparing(False, uneven="shortest"),
        0.97,
    ),
]
