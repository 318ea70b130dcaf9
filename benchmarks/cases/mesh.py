"""Throughput of the GPT of the mesh example on meshes of 2 x 2 and 1 x 2 ranks, also compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cases import gpt
from benchmarks.cases.gpt import Prepared, adamw
from benchmarks.framework import Case, Row
from benchmarks.memory import example

RANKS = 4
PARTS = 2


def build(quick: bool) -> nn.Module:
    torch.manual_seed(0)
    layers, width = (2, 32) if quick else (4, 256)
    return example("mesh/gpt.py").GPT(layers=layers, width=width)


def split_layers(model: Any, mesh: Any) -> Any:
    """Split the layers of the model along ``mesh["tensor_parallel"]``, by hand."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    # Each access makes a new object, and torch compares the objects in each step.
    parts = mesh["tensor_parallel"]
    columns = ("attention.query", "attention.key", "attention.value", "up")
    plan: Any = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "down")}
    for block in model.blocks:
        block.attention.num_heads //= PARTS
        parallelize_module(block, parts, plan)
    head: Any = {"head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, parts, head)


def split(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    split_layers(model, mesh)
    shards = mesh["data_parallel"]
    for block in model.blocks:
        fully_shard(block, mesh=shards)
    return fully_shard(model, mesh=shards)


def raw(model: nn.Module) -> Prepared:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh(
        "cpu", (RANKS // PARTS, PARTS), mesh_dim_names=("data_parallel", "tensor_parallel")
    )
    split(model, mesh)
    return model, adamw(model), torch.Tensor.backward


def raw_parts(model: nn.Module) -> Prepared:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (PARTS,), mesh_dim_names=("tensor_parallel",))
    split_layers(model, mesh)
    return model, adamw(model), torch.Tensor.backward


def ours(model: nn.Module, ranks: int = RANKS) -> Prepared:
    from fabric import Fabric
    from fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        tensor_parallel_size=PARTS, tp_plan=example("mesh/gpt.py").PLAN
    )
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    return (*fabric.setup(model, adamw(model)), fabric.backward)


def compiled(set_up: Callable[[nn.Module], Prepared]) -> Callable[[nn.Module], Prepared]:
    """Return a function that sets up a model with ``set_up``, and compiles the result."""

    def set_up_and_compile(model: nn.Module) -> Prepared:
        model_of_loop, optimizer, backward = set_up(model)
        return torch.compile(model_of_loop), optimizer, backward

    return set_up_and_compile


def lightning(
    model: nn.Module, split: Callable[[Any, Any], Any] = split, ranks: int = RANKS
) -> Prepared:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra
    from lightning_fabric.strategies import ModelParallelStrategy  # pyright: ignore[reportMissingImports]  # an extra

    strategy = ModelParallelStrategy(
        split, data_parallel_size=ranks // PARTS, tensor_parallel_size=PARTS
    )
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    module = fabric.setup_module(model)
    return module, fabric.setup_optimizers(adamw(module)), fabric.backward


preparing = partial(gpt.preparing, build=build, batches=RANKS // PARTS, shape=(16, 32), number=3)
preparing_parts = partial(gpt.preparing, build=build, batches=1, shape=(16, 32), number=3)
ours_in_parts = partial(ours, ranks=PARTS)
lightning_in_parts = partial(lightning, split=split_layers, ranks=PARTS)
NOTES = {
    "accelerate": "its tensor parallelism is for models that transformers has loaded on a mesh"
}
CASES = [
    Case(
        name="gpt-mesh",
        title="A small GPT on 2 x 2 ranks, FSDP and tensor parallelism",
        rows={
            "throughput": Row("tokens/s", "ratio", 0.98),
            "peak memory": Row("MB", "ratio", 1.05),
        },
        contestants={
            "raw": preparing(raw),
            "fabric": preparing(ours),
            "lightning-fabric": preparing(lightning),
        },
        ranks=RANKS,
        rounds=12,
        notes=NOTES,
    ),
    Case(
        name="gpt-tensor",
        title="A small GPT on 2 ranks, tensor parallelism alone",
        rows={"throughput": Row("tokens/s", "ratio", 0.95)},
        contestants={
            "raw": preparing_parts(raw_parts),
            "fabric": preparing_parts(ours_in_parts),
            "lightning-fabric": preparing_parts(lightning_in_parts),
        },
        ranks=PARTS,
        rounds=12,
        notes=NOTES,
    ),
    Case(
        name="gpt-tensor-compiled",
        title="A small GPT on 2 ranks, tensor parallelism alone, compiled",
        rows={"throughput": Row("tokens/s", "ratio", 0.95)},
        contestants={
            "raw": preparing_parts(compiled(raw_parts)),
            "fabric": preparing_parts(compiled(ours_in_parts)),
        },
        ranks=PARTS,
        rounds=12,
        cpp=True,
        notes={**NOTES, "lightning-fabric": "compared without torch.compile, in gpt-tensor"},
    ),
    Case(
        name="gpt-tensor-compiling",
        title="A small GPT on 2 ranks, tensor parallelism alone, compiled; raw: fabric uncompiled",
        rows={"throughput": Row("tokens/s", "ratio", 1.0)},
        contestants={
            "raw": preparing_parts(ours_in_parts),
            "fabric": preparing_parts(compiled(ours_in_parts)),
        },
        ranks=PARTS,
        rounds=12,
        cpp=True,
        notes=dict.fromkeys(
            ("lightning-fabric", "accelerate"), "a comparison of fabric with itself"
        ),
    ),
]
