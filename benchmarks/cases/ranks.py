"""The overhead of a training step on two ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.framework import Case, Measure, Row
from benchmarks.models import step_of, tiny
from benchmarks.timing import count_calls, seconds

RANKS = 2


def raw_ddp(width: int = 16) -> Callable[[], None]:
    dist.init_process_group("gloo")
    model, optimizer, inputs, targets = tiny(width=width)
    return step_of(
        nn.parallel.DistributedDataParallel(model),
        optimizer,
        torch.Tensor.backward,
        inputs,
        targets,
    )


def raw_fsdp() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, _, inputs, targets = tiny()
    sharded: Any = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return step_of(sharded, optimizer, torch.Tensor.backward, inputs, targets)


def ours(strategy: Any, width: int = 16, timings: bool = False) -> Callable[[], None]:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, timings=timings)
    fabric.launch()
    model, optimizer, inputs, targets = tiny(width=width)
    prepared = fabric.setup(model, optimizer)
    return step_of(*prepared, fabric.backward, inputs, targets)


def lightning(strategy: Any) -> Callable[[], None]:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    model, _, inputs, targets = tiny()
    module = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.01))
    return step_of(module, optimizer, fabric.backward, inputs, targets)


def lightning_fsdp() -> Callable[[], None]:
    # Its FSDPStrategy is FSDP1, which does not run on a CPU; this one runs what it is handed.
    from lightning_fabric.strategies import ModelParallelStrategy  # pyright: ignore[reportMissingImports]  # an extra
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(module, mesh=mesh["data_parallel"])
        return module

    return lightning(ModelParallelStrategy(shard, data_parallel_size=RANKS, tensor_parallel_size=1))


def accelerate() -> Callable[[], None]:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(cpu=True)
    model, optimizer, inputs, targets = tiny()
    model, optimizer = accelerator.prepare(model, optimizer)
    return step_of(model, optimizer, accelerator.backward, inputs, targets)


def preparing(build: Callable[[], Callable[[], None]], number: int) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        step = build()
        for _ in range(3):
            step()
        calls = count_calls(step, number=12)  # fabric watches the first steps
        return lambda: {"time": 1e6 * seconds(step, 20 if quick else number), "calls": calls}

    return prepare


ROWS = {"time": Row("us", "ratio", 1.01), "calls": Row("calls", "difference")}
NO_FSDP = "on a CPU its FSDP plugin is ignored without a word, and DDP runs instead"
CASES = [
    Case(
        name="step-ddp",
        title="A step of a tiny model on two ranks, DDP",
        rows=ROWS,
        contestants={
            "raw": preparing(raw_ddp, 150),
            "fabric": preparing(lambda: ours("ddp"), 150),
            "lightning-fabric": preparing(lambda: lightning("ddp"), 150),
            "accelerate": preparing(accelerate, 150),
        },
        ranks=RANKS,
        rounds=8,
        starts=3,
    ),
    Case(
        name="step-fsdp",
        title="A step of a tiny model on two ranks, FSDP",
        rows=ROWS,
        contestants={
            "raw": preparing(raw_fsdp, 50),
            "fabric": preparing(lambda: ours("fsdp"), 50),
            "lightning-fabric": preparing(lightning_fsdp, 50),
        },
        ranks=RANKS,
        rounds=20,
        notes={"accelerate": NO_FSDP},
    ),
    Case(
        name="step-timings",
        title="A step of two layers of width 1024 on two ranks, DDP, with Fabric(timings=True)",
        rows={"time": Row("us", "ratio", 1.02)},
        contestants={
            "raw": preparing(lambda: raw_ddp(1024), 20),
            "fabric": preparing(lambda: ours("ddp", 1024, timings=True), 20),
        },
        ranks=RANKS,
        rounds=20,
        notes={"lightning-fabric": "has no such table", "accelerate": "has no such table"},
    ),
]
