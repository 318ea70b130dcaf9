"""Throughput and peak memory of the GPT of the text example."""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.framework import Case, Measure, Row
from benchmarks.memory import gpt, peak, reset_peak
from benchmarks.timing import seconds

RANKS = 2
VOCABULARY = 96
LENGTH = 64
BATCH = 8

Prepared = tuple[Callable[[Tensor], Tensor], Any, Callable[[Tensor], Any]]


def build(quick: bool) -> nn.Module:
    torch.manual_seed(0)
    layers, width = (2, 32) if quick else (4, 256)
    return gpt()(VOCABULARY, LENGTH, layers=layers, width=width)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def raw_ddp(model: nn.Module) -> Prepared:
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model), adamw(model), torch.Tensor.backward


def raw_fsdp(model: Any) -> Prepared:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), adamw(model), torch.Tensor.backward


def ours(model: nn.Module, strategy: Any) -> Prepared:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    return (*fabric.setup(model, adamw(model)), fabric.backward)


def lightning(model: nn.Module, strategy: Any) -> Prepared:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    module = fabric.setup_module(model)
    return module, fabric.setup_optimizers(adamw(module)), fabric.backward


def lightning_fsdp(model: nn.Module) -> Prepared:
    from lightning_fabric.strategies import ModelParallelStrategy  # pyright: ignore[reportMissingImports]  # an extra
    from torch.distributed.fsdp import fully_shard

    def shard(module: Any, mesh: Any) -> nn.Module:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(module, mesh=mesh["data_parallel"])

    return lightning(
        model, ModelParallelStrategy(shard, data_parallel_size=RANKS, tensor_parallel_size=1)
    )


def accelerate(model: nn.Module) -> Prepared:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(cpu=True)
    return (*accelerator.prepare(model, adamw(model)), accelerator.backward)


def stepping(
    model: Any,
    optimizer: Any,
    backward: Callable[[Tensor], Any],
    batches: Iterator[Tensor],
    reduction: str = "mean",
) -> Callable[[], None]:
    """Train for three steps, and return a function that trains on the next batch of tokens."""

    def step() -> None:
        tokens = next(batches)
        loss = cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction
        )
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    for _ in range(3):
        step()
    return step


def preparing(
    set_up: Callable[[nn.Module], Prepared],
    build: Callable[[bool], nn.Module] = build,
    batches: int = RANKS,
    shape: tuple[int, int] = (BATCH, LENGTH),
    number: int = 5,
) -> Callable[[bool], Measure]:
    """Return a contestant that trains a model.

    Args:
        set_up: Sets up the model.
        build: Builds the model.
        batches: The number of batches of a step, over all ranks.
        shape: The shape of a batch.
        number: The number of steps of a measurement.
    """

    def prepare(quick: bool) -> Measure:
        baseline = reset_peak()
        model, optimizer, backward = set_up(build(quick))
        torch.manual_seed(dist.get_rank() * batches // dist.get_world_size())
        tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1))
        step = stepping(model, optimizer, backward, repeat(tokens))
        memory = (peak() - baseline) / 1e6
        trained = batches * shape[0] * shape[1]
        return lambda: {
            "throughput": trained / seconds(step, 1 if quick else number),
            "peak memory": memory,
        }

    return prepare


ROWS = {"throughput": Row("tokens/s", "ratio", 0.99), "peak memory": Row("MB")}
CASES = [
    Case(
        name="gpt-ddp",
        title="A small GPT on two ranks, DDP",
        rows=ROWS,
        contestants={
            "raw": preparing(raw_ddp),
            "fabric": preparing(lambda model: ours(model, "ddp")),
            "lightning-fabric": preparing(lambda model: lightning(model, "ddp")),
            "accelerate": preparing(accelerate),
        },
        ranks=RANKS,
        rounds=6,
    ),
    Case(
        name="gpt-fsdp",
        title="A small GPT on two ranks, FSDP",
        rows=ROWS,
        contestants={
            "raw": preparing(raw_fsdp),
            "fabric": preparing(lambda model: ours(model, "fsdp")),
            "lightning-fabric": preparing(lightning_fsdp),
        },
        ranks=RANKS,
        rounds=6,
        notes={
            "accelerate": "on a CPU its FSDP plugin is ignored without a word, and DDP runs instead"
        },
    ),
]
