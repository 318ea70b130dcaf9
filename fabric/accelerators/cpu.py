"""The processor, where ``devices`` is a number of processes."""

import os
from collections.abc import Sequence
from typing import ClassVar, final

import torch

from fabric.accelerators.base import Accelerator
from fabric.accelerators.devices import parse_count

__all__ = ["CPUAccelerator"]


@final
class CPUAccelerator(Accelerator):
    """The processor: always there; its devices are processes, which share the cores."""

    name: ClassVar[str] = "cpu"

    def is_available(self) -> bool:
        """True on every machine."""
        return True

    def device_count(self) -> int:
        """Number of cores that this process may use, at least 1; fewer than the machine has under an affinity mask."""
        # macOS has no affinity masks, and so no such function.
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """The CPU once per process: ``"auto"`` is one, -1 one per core, and any number >= 1 is allowed.

        Raises:
            ConfigurationError: a list of indices, 0, or a negative number other than -1.
            ArgumentTypeError: the value is neither an integer, a string nor a sequence of integers.
        """
        return (torch.device(self.name),) * parse_count(devices, self.device_count())
