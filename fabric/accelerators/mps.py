"""The GPU of a Mac with Apple silicon."""

from typing import ClassVar, final

import torch

from fabric.accelerators.base import Accelerator

__all__ = ["MPSAccelerator"]


@final
class MPSAccelerator(Accelerator):
    """The GPU of a Mac: there is exactly one, with index 0."""

    name: ClassVar[str] = "mps"

    def is_available(self) -> bool:
        """Whether this Mac and this torch can use it."""
        return torch.backends.mps.is_available()

    def device_count(self) -> int:
        """1, or 0 where it is not available."""
        return int(self.is_available())

    def release(self) -> None:
        """Return the allocator's free blocks to the system."""
        # Without the guard torch raises on a machine that has no such device.
        if self.is_available():
            torch.mps.empty_cache()
