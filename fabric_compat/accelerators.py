"""Accelerators: ours, under Lightning's names."""

from contextlib import suppress
from functools import partial

import torch

from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from fabric_compat.missing import missing

num_cuda_devices = torch.cuda.device_count
is_cuda_available = torch.cuda.is_available


__getattr__ = partial(missing, __name__)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """The first ``num_devices`` CUDA devices on which memory can be had; all of them for -1.

    Raises:
        ValueError: there are fewer, or fewer of them can be used.
    """
    usable: list[int] = []
    for index in range(torch.cuda.device_count()):
        if len(usable) != num_devices:
            with suppress(RuntimeError):  # in use by a process that has it to itself
                torch.ones(1, device=torch.device("cuda", index))
                usable.append(index)
    if num_devices not in (-1, len(usable)):
        raise ValueError(f"num_devices={num_devices}: of the CUDA devices {usable} can be used")
    return usable
