"""NVIDIA GPUs, and AMD GPUs through ROCm, which torch calls by the same name."""

from typing import ClassVar, final

import torch

from fabric.accelerators.base import Accelerator

__all__ = ["CUDAAccelerator"]


@final
class CUDAAccelerator(Accelerator):
    """GPUs that torch reaches as ``cuda``; those hidden by ``CUDA_VISIBLE_DEVICES`` do not count."""

    name: ClassVar[str] = "cuda"

    def is_available(self) -> bool:
        """Whether at least one GPU is visible; CUDA stays uninitialised, as in :meth:`device_count`."""
        # torch.cuda.is_available() initialises the driver, and with that forbids a later fork, unless the user has set
        # PYTORCH_NVML_BASED_CUDA_CHECK=1. Counting asks NVML first whatever that variable says.
        return self.device_count() > 0

    def device_count(self) -> int:
        """Number of visible GPUs, 0 without a driver or in a torch that was built without CUDA."""
        # We rely on torch asking NVML (amdsmi under ROCm), which leaves the driver uninitialised and honours
        # CUDA_VISIBLE_DEVICES. Only where NVML itself is missing or fails does torch ask the CUDA runtime, and then a
        # process that is forked later cannot use CUDA.
        return torch.cuda.device_count()

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current GPU of this process, where ``"cuda"`` without an index then points."""
        torch.cuda.set_device(device)

    def release(self) -> None:
        """Return the caching allocator's free blocks to the driver; nothing happens when CUDA was never used."""
        torch.cuda.empty_cache()
