"""The GPU of a Mac with Apple silicon."""

from collections.abc import Sequence
from typing import ClassVar, final

import torch

from fabric.accelerators.base import Accelerator
from fabric.accelerators.devices import parse_indices

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

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """The one device: ``1``, ``-1``, ``"auto"`` and ``[0]`` all name it.

        Raises:
            ConfigurationError: more than one is asked for, or there is none.
            ArgumentTypeError: the value is neither an integer, a string nor a sequence of integers.
        """
        indices = parse_indices(devices, self.device_count(), self.name)
        return tuple(torch.device(self.name, index) for index in indices)

    def release(self) -> None:
        """Return the allocator's free blocks to the system."""
        # Without the guard torch raises on a machine that has no such device.
        if self.is_available():
            torch.mps.empty_cache()
