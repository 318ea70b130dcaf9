"""``train.py LAUNCHER``: two ranks train; rank 0 tells all addresses that their processes use, then rank 1 fails."""

import json
import os
import sys

import psutil
import torch

from fabric import Fabric


def addresses() -> dict[str, list[tuple[str, int]]]:
    """By process, from the command that the test started down to the ranks."""
    tester = int(os.environ["TESTER"])
    command = next(process for process in psutil.Process().parents() if process.ppid() == tester)
    processes = [command, *command.children(recursive=True)]
    return {
        str(process.pid): [(c.laddr.ip, c.laddr.port) for c in connections(process)]
        for process in processes
    }


def connections(process: psutil.Process) -> list:
    try:
        return process.net_connections("inet")
    except psutil.NoSuchProcess:
        return []  # it has ended since the list was made


def train(fabric: Fabric) -> None:
    model = fabric.setup(torch.nn.Linear(2, 1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    ranks = fabric.gather(os.getpid())
    if ranks is not None:
        print("ADDRESSES", json.dumps({"ranks": ranks, "used": addresses()}), flush=True)
    fabric.barrier()
    if fabric.global_rank == 1:
        raise ValueError("the cause")
    fabric.barrier()


if __name__ == "__main__":
    launcher = sys.argv[1] if len(sys.argv) > 1 else None
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy="ddp", launcher=launcher, check_collectives=True
    )
    if launcher in (None, "popen"):
        fabric.launch()
        train(fabric)
    else:
        fabric.launch(train)
