"""Accelerators: ours, under Lightning's names."""

from typing import Any

import torch

from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from fabric_compat.missing import refuse

__all__ = ["Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "find_usable_cuda_devices"]


def __getattr__(name: str) -> Any:
    refuse(__name__, name)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """The first ``num_devices`` CUDA devices on which memory can be had; all of them for -1.

    Raises:
        ValueError: there are fewer.
        RuntimeError: fewer of them can be used.
    """
    if num_devices > torch.cuda.device_count():
        raise ValueError(f"num_devices={num_devices}: this machine has {torch.cuda.device_count()} CUDA devices")
    usable = []
    for index in range(torch.cuda.device_count()):
        try:
            torch.ones(1, device=torch.device("cuda", index))
        except RuntimeError:  # in use by a process that has it to itself
            continue
        usable.append(index)
        if len(usable) == num_devices:
            return usable
    if num_devices != -1:
        raise RuntimeError(f"num_devices={num_devices}: of the CUDA devices only {usable} can be used")
    return usable


def num_cuda_devices() -> int:
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    return torch.cuda.is_available()
