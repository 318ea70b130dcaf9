"""Fabric's accelerators under Lightning's names."""

from contextlib import suppress
from functools import partial

import torch

from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from fabric_compat.missing import missing

num_cuda_devices = torch.cuda.device_count
is_cuda_available = torch.cuda.is_available


__getattr__ = partial(missing, __name__)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of the first CUDA devices on which a tensor can be allocated.

    Args:
        num_devices: The number of devices. The default, -1, stands for all usable devices.

    Raises:
        ValueError: Fewer than ``num_devices`` devices can be used.
    """
    usable: list[int] = []
    for index in range(torch.cuda.device_count()):
        if len(usable) == num_devices:
            break
        with suppress(RuntimeError):  # another process uses the device exclusively
            torch.ones(1, device=torch.device("cuda", index))
            usable.append(index)
    if num_devices not in (-1, len(usable)):
        raise ValueError(f"num_devices={num_devices}: of the CUDA devices {usable} can be used")
    return usable
