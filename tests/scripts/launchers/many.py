"""``many.py NUMBER TIMES``: launch again and again, beside other processes of this script.

Each process has a different number, and every launch reduces a different value.
"""

import sys

import torch

from fabric import Fabric


def total(fabric: Fabric, value: int) -> float:
    return fabric.all_reduce(torch.tensor([float(value)])).item()


if __name__ == "__main__":
    number, times = map(int, sys.argv[1:])
    for time in range(times):
        value = 1000 * number + time
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
        result = fabric.launch(total, value)
        assert result == value
    print("all mine")
