"""``many.py NUMBER TIMES``: launch again and again beside others that do so too; each has numbers of its own."""

import sys

import torch

from fabric import Fabric


def total(fabric: Fabric, value: int) -> float:
    return fabric.all_reduce(torch.tensor([float(value)])).item()


if __name__ == "__main__":
    number, times = map(int, sys.argv[1:])
    for time in range(times):
        mine = 1000 * number + time
        assert Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(total, mine) == mine
    print("all mine")
