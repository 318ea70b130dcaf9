"""``train.py LAUNCHER``: train on two ranks, print the addresses that they use, and fail.

Rank 0 prints the addresses of all processes of the job, then rank 1 raises.
"""

import json
import os
import sys

import psutil
import torch

from fabric import Fabric


def addresses() -> dict[str, list[tuple[str, int]]]:
    """Return the addresses by process, from the command of the test down to the ranks."""
    tester = int(os.environ["TESTER"])
    command = next(process for process in psutil.Process().parents() if process.ppid() == tester)
    addresses_by_process = {}
    for process in [command, *command.children(recursive=True)]:
        addresses_by_process[str(process.pid)] = addresses_of(process)
    return addresses_by_process


def addresses_of(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        connections = process.net_connections("inet")
    except psutil.NoSuchProcess:
        # The process has ended since the list was made.
        return []
    return [(connection.laddr.ip, connection.laddr.port) for connection in connections]


def train(fabric: Fabric) -> None:
    model = fabric.setup(torch.nn.Linear(2, 1))
    fabric.backward(model(torch.ones(1, 2)).sum())
    ranks = fabric.gather(os.getpid())
    if ranks is not None:
        report = {"ranks": ranks, "used": addresses()}
        print("ADDRESSES", json.dumps(report), flush=True)
    fabric.barrier()
    if fabric.global_rank == 1:
        raise ValueError("the cause")
    fabric.barrier()


if __name__ == "__main__":
    launcher = None
    if len(sys.argv) > 1:
        launcher = sys.argv[1]
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy="ddp", launcher=launcher, check_collectives=True
    )
    if launcher in (None, "popen"):
        fabric.launch()
        train(fabric)
    else:
        fabric.launch(train)
