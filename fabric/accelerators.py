"""The kinds of hardware that a job runs on, and what ``devices`` means on each.

========================  ==============================  =============================
value                     devices with an index           a number of processes (CPU)
========================  ==============================  =============================
``2`` or ``"2"``          the first two: 0 and 1          two
``-1`` or ``"-1"``        all of them                     one per core
``"auto"``                all of them                     one
``[0, 2]`` or ``"0,2"``   those with index 0 and 2        an error
``[2]`` or ``"2,"``       the one with index 2            an error
========================  ==============================  =============================
"""

import ctypes
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NewType, final

import torch

from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.world import available_cores

__all__ = [
    "ACCELERATORS", "Accelerator", "AcceleratorName", "CPUAccelerator", "CUDAAccelerator", "EntryPoint",
    "MPSAccelerator",
]  # fmt: skip

EntryPoint = NewType("EntryPoint", str)
"""The name of an entry point of another package, which type checkers do not know: ``strategy=EntryPoint("theirs")``."""

AcceleratorName = Literal["auto", "cpu", "cuda", "gpu", "mps"] | EntryPoint

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3), with our values in bytes. Smaller blocks stay with the process:
# each page that the system hands out anew is a fault (from 1 MiB on, ten times glibc's own number in a step of
# `python -m benchmarks gpt-fsdp`; from 4 MiB on, a third of it).
_MALLOPT = ((-1, 32 * 2**20), (-3, 4 * 2**20))


class Accelerator(ABC):
    """A kind of hardware: whether it is available, how many devices it has, and how a process selects one.

    Stateless: two instances are interchangeable, and none remembers a device. :meth:`is_available`,
    :meth:`device_count` and :meth:`parse_devices` run in a process that may still fork, so they leave the hardware
    uninitialized; :meth:`activate` is the first call that may touch it.

    Attributes:
        name: the ``type`` of the :class:`torch.device` of this hardware, such as ``"cuda"``.
    """

    name: ClassVar[str]

    def is_available(self) -> bool:
        """Whether this process could use at least one such device."""
        return self.device_count() > 0

    @abstractmethod
    def device_count(self) -> int:
        """Number of such devices that this process may use; 0 when there is none."""

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """The devices of this node that ``devices`` selects, one per process.

        Args:
            devices: a number, a list of indices, their spelling as a string, or ``"auto"``; see the table above.

        Returns:
            The devices in the order of the local ranks, at least one.

        Raises:
            ConfigurationError: there are not so many devices, an index is out of range or repeated, or none is named.
            ArgumentTypeError: the value is neither an integer, a string nor a sequence of integers.
        """
        count = self.device_count()
        expected = f'a number from 1 to {count}, a list of distinct indices below {count}, or "auto" for all'
        value = _parse(devices, expected)
        if value in ("auto", -1):
            value = count
        # One index too many is enough for the error below.
        indices = tuple(range(min(value, count + 1))) if isinstance(value, int) else value
        if not indices or not set(indices) <= set(range(count)) or len(set(indices)) < len(indices):
            problem = f"this process sees {count} devices of type {self.name!r}"
            suggestion = 'devices="auto"' if count else 'accelerator="cpu"'
            raise ConfigurationError(f"devices={devices!r}", problem, expected, suggestion)
        return tuple(torch.device(self.name, index) for index in indices)

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process; nothing to do where torch has no current device."""

    def return_freed_memory(self) -> None:
        """From now on, return freed large blocks to the system; does nothing where that is the default.

        For strategies that allocate and free whole parameters in every step. It lasts as long as the process.
        """

    def release(self) -> None:
        """Give cached memory back to the system; live tensors keep theirs."""

    @property
    def default_backend(self) -> str:
        """Name of the process-group backend that torch uses for this hardware, such as ``"gloo"`` or ``"nccl"``.

        Raises:
            ValueError: torch has no backend for it; ``DDPStrategy(process_group_backend=...)`` names one.
        """
        return torch.distributed.get_default_backend_for_device(self.name)


@final
class CPUAccelerator(Accelerator):
    """The CPU: always available; its devices are processes, which share the cores."""

    name = "cpu"

    def device_count(self) -> int:
        """Number of cores that this process may use, at least 1; fewer than the machine has under an affinity mask."""
        return available_cores()

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """The CPU once per process; there may be more processes than cores. See :meth:`Accelerator.parse_devices`."""
        expected = 'a number of processes >= 1, -1 for one process per core, or "auto" for one'
        value = _parse(devices, expected)
        value = {"auto": 1, -1: self.device_count()}.get(value, value)
        if not isinstance(value, int) or value < 1:
            problem = "it is not a number of processes, and CPU cores have no index"
            raise ConfigurationError(f"devices={devices!r}", problem, expected, 'devices="auto"')
        return (torch.device(self.name),) * value

    def return_freed_memory(self) -> None:
        """From now on, blocks of 4 MiB or more go back to the system when they are freed, under glibc.

        glibc does so at first, but with each such block it raises the size from which it does, up to 32 MiB, so that
        what a strategy gathers and frees would stay with the process. A user's setting in the environment
        (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``) wins.
        """
        # Other C libraries have no such function, and give large blocks back at once.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        is_set = any(
            name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
        )
        if (
            mallopt is not None
            and not is_set
            and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", "")
        ):
            for parameter, value in _MALLOPT:
                mallopt(parameter, value)


@final
class CUDAAccelerator(Accelerator):
    """NVIDIA GPUs, and AMD GPUs through ROCm; those hidden by ``CUDA_VISIBLE_DEVICES`` do not count."""

    name = "cuda"

    def device_count(self) -> int:
        """Number of visible GPUs, 0 without a driver or in a torch that was built without CUDA."""
        # We rely on torch asking NVML (amdsmi under ROCm), which leaves the driver uninitialized and honors
        # CUDA_VISIBLE_DEVICES. Only where NVML itself is missing or fails does torch ask the CUDA runtime, and then a
        # process that is forked later cannot use CUDA. torch.cuda.is_available() asks the runtime in any case, unless
        # PYTORCH_NVML_BASED_CUDA_CHECK=1 is set.
        return torch.cuda.device_count()

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current GPU of this process, where ``"cuda"`` without an index then points."""
        torch.cuda.set_device(device)

    def release(self) -> None:
        """Return the caching allocator's free blocks to the driver; nothing happens when CUDA was never used."""
        torch.cuda.empty_cache()


@final
class MPSAccelerator(Accelerator):
    """The GPU of a Mac with Apple silicon: there is exactly one, with index 0."""

    name = "mps"

    def device_count(self) -> int:
        """1, or 0 where this Mac or this torch cannot use it."""
        return int(torch.backends.mps.is_available())

    def release(self) -> None:
        """Return the allocator's free blocks to the system."""
        # Without the guard torch raises on a machine that has no such device.
        if self.is_available():
            torch.mps.empty_cache()


# In the order in which "auto" asks for them; the CPU is always there.
ACCELERATORS = {
    "cuda": CUDAAccelerator,
    "gpu": CUDAAccelerator,
    "mps": MPSAccelerator,
    "cpu": CPUAccelerator,
}


def _parse(devices: Any, expected: str) -> Any:
    """``"auto"``, a number, or a tuple of indices, from any of their spellings; the numbers are not checked."""
    try:
        if not isinstance(devices, str):
            return (
                tuple(map(operator.index, devices))
                if isinstance(devices, Sequence)
                else operator.index(devices)
            )
        text = devices.strip()
        if text == "auto":
            return text
        # "2" is a number of devices; the comma in "2," says that it is a list, as it does in Python.
        numbers = tuple(map(int, text.removesuffix(",").split(",")))
        return numbers if "," in text else numbers[0]
    except (TypeError, ValueError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ConfigurationError
        raise kind(f"devices={devices!r}", str(error), expected, 'devices="auto"') from error
