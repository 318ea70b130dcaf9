"""Print the bytes that a step of examples/mesh passes to collectives, by dimension of the mesh.

The mesh is 2 x 2 x 2. One process poses as rank 0 of eight ranks, with torch's `fake` backend,
which completes every collective at once.
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
    """Bytes of the inputs or of the larger outputs of collectives, by process group."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            # torch dispatches again, with operations on the shard.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            nbytes = max(map(_nbytes, (*args, result)))
            for argument in args:
                name = _group_name(argument)
                if name is not None:
                    self.totals[name] = self.totals.get(name, 0) + nbytes
        return result


def _nbytes(argument: Any) -> int:
    nbytes = 0
    for leaf in tree_leaves(argument):
        if isinstance(leaf, Tensor):
            nbytes += leaf.nbytes
    return nbytes


def _group_name(argument: Any) -> str | None:
    """Return the name of a process group, or None for another argument of a collective."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument).group_name
        except RuntimeError:
            return None  # the argument is a reduction
    if isinstance(argument, str) and argument not in ("sum", "avg", ""):
        return argument
    return None


def pose_as_rank_0() -> None:
    """Initialize the fake process group, with the environment variables of rank 0."""
    os.environ["RANK"] = "0"
    os.environ["LOCAL_RANK"] = "0"
    os.environ["GROUP_RANK"] = "0"
    os.environ["WORLD_SIZE"] = str(RANKS)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    # Nothing listens at this address, and nothing connects to it.
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)


def main(layers: int, width: int, batch: int, length: int) -> None:
    """Take steps and print the bytes of the last step."""
    pose_as_rank_0()
    strategy = ModelParallelStrategy(replicate_size=2, tensor_parallel_size=2, tp_plan=PLAN)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    model = GPT(layers=layers, width=width)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    mesh = fabric.device_mesh
    mode = BytesByGroup()
    for _ in range(4):  # fabric checks an optimizer in its first steps
        mode.totals.clear()
        with mode:
            outputs = model(torch.ones(batch, length, dtype=torch.int64))
            fabric.backward(outputs.square().mean())
            optimizer.step()
            optimizer.zero_grad()
    totals = dict(mode.totals)
    for dimension in mesh.mesh_dim_names:
        group_name = mesh[dimension].get_group().group_name
        if group_name in totals:
            totals[dimension] = totals.pop(group_name)
    print(json.dumps(totals))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
