"""The time and the memory of building a model of 200 MB and sharding it over two ranks."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.framework import Case, Measure, Row
from benchmarks.memory import BLOCK_SIZE, SIZE, VOCABULARY, WARM_UP, Size, gpt, peak, reset_peak

RANKS = 2

SetUp = Callable[[Callable[[], nn.Module]], Any]


def raw() -> SetUp:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")

    def set_up(build: Callable[[], nn.Module]) -> Any:
        model: Any = build()
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    return set_up


def ours() -> SetUp:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="fsdp")
    fabric.launch()

    def set_up(build: Callable[[], nn.Module]) -> Any:
        with fabric.init_module():
            model = build()
        return fabric.setup(model)

    return set_up


def preparing(contestant: Callable[[], SetUp]) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        set_up = contestant()
        model = gpt()

        def once(size: Size) -> dict[str, float]:
            gc.collect()
            before = reset_peak()
            began = time.perf_counter()
            torch.manual_seed(0)
            sharded = set_up(
                lambda: model(VOCABULARY, BLOCK_SIZE, layers=size.layers, width=size.width)
            )
            results = {"time": time.perf_counter() - began, "memory": (peak() - before) / 1e6}
            del sharded
            return results

        once(WARM_UP)
        return lambda: once(WARM_UP if quick else SIZE)

    return prepare


CASES = [
    Case(
        name="init-fsdp",
        title=(
            "A model of 227 MB, built and sharded over two ranks; raw builds the whole on every "
            "rank"
        ),
        rows={"time": Row("s", "ratio"), "memory": Row("MB", "ratio", 0.75)},
        contestants={"raw": preparing(raw), "fabric": preparing(ours)},
        ranks=RANKS,
        rounds=6,
        notes={
            "lightning-fabric": "its strategies for a CPU do not shard",
            "accelerate": "likewise",
        },
    )
]
