"""Prints the bytes that a step of examples/mesh hands to collectives, by dimension of a mesh of 2 x 2 x 2.

One process poses as rank 0 of eight, with torch's `fake` backend, which answers every collective at once.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "mesh"))
from gpt import GPT, PLAN  # pyright: ignore[reportMissingImports]  # beside the example

RANKS = 8


class BytesByGroup(TorchDispatchMode):
    """Adds up, for each process group, the larger of what goes into a collective and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again as operations on its shard
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                [leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)]
                for argument in (*args, result)
            ]
            for name in filter(None, map(_group, args)):
                self.totals[name] = self.totals.get(name, 0) + max(
                    sum(each.nbytes for each in some) for some in tensors
                )
        return result


def _group(argument: Any) -> str:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument).group_name
        except RuntimeError:
            return ""  # an operation of a reduction
    return argument if isinstance(argument, str) and argument not in ("sum", "avg") else ""


def main(layers: int, width: int, batch: int, length: int) -> None:
    place = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "GROUP_RANK": 0,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )  # nothing listens there, and nothing connects
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    strategy = ModelParallelStrategy(replicate_size=2, tensor_parallel_size=2, tp_plan=PLAN)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model = GPT(layers=layers, width=width)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    mesh = fabric.device_mesh
    names = {mesh[name].get_group().group_name: name for name in mesh.mesh_dim_names}
    found = BytesByGroup()
    for _ in range(4):  # an optimizer is watched in its first steps
        found.totals.clear()
        with found:
            fabric.backward(model(torch.ones(batch, length, dtype=torch.int64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    print(json.dumps({names.get(group, group): total for group, total in found.totals.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
