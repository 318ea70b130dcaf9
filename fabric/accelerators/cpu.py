"""The processor, where ``devices`` is a number of processes."""

import ctypes
import os
from collections.abc import Sequence
from typing import ClassVar, final

import torch

from fabric.accelerators.base import Accelerator
from fabric.accelerators.devices import parse_count

__all__ = ["CPUAccelerator"]

# Parameters of mallopt(3), and our values in bytes. Smaller blocks stay with the process: each page that the system
# hands out anew is a fault (from 1 MiB on, ten times glibc's own number in a step of `python -m benchmarks gpt-fsdp`;
# from 4 MiB on, a third of it).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 32 * 2**20), (-3, 4 * 2**20)


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

    def return_freed_memory(self) -> None:
        """From now on, blocks of 4 MiB or more go back to the system when they are freed, under glibc.

        glibc does so at first, but with each such block it raises the size from which it does, up to 32 MiB, so that
        what a strategy gathers and frees would stay with the process. A setting of the user's in the environment
        (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) wins.
        """
        # Other C libraries have no such function, and give large blocks back at once.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        is_set = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"))
        if mallopt is not None and not is_set and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
            for parameter, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
                mallopt(parameter, value)
