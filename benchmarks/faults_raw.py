"""The job of ``tests/faults/train.py`` in plain torch.

The command is ``faults_raw.py spawn FAULT``, or, under torchrun, ``faults_raw.py env FAULT``.
"""

import os
import sys
import tempfile
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fabric import Fabric
from tests.faults.train import job

__all__ = ["COMMANDS"]

COMMANDS = {
    "torch.multiprocessing": [sys.executable, __file__, "spawn"],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        "env",
    ],
}


class Rank:
    """The methods of Fabric that the job needs, implemented with torch."""

    def __init__(self, rank: int) -> None:
        self.global_rank = rank

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> None:
        dist.all_reduce(tensor)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def barrier(self) -> None:
        dist.barrier()


def spawned(rank: int, store: str, fault: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    job(cast(Fabric, Rank(rank)), fault)


def main() -> None:
    how, fault = sys.argv[1:]
    if how == "spawn":
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(spawned, (os.path.join(directory, "store"), fault), nprocs=2)
    else:
        dist.init_process_group("gloo")
        job(cast(Fabric, Rank(dist.get_rank())), fault)


if __name__ == "__main__":
    main()
