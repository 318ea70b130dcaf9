"""The kinds of hardware that a job runs on, and what ``devices`` means on each.

========================  ==============================  =============================
value                     devices with an index           a number of processes (CPU)
========================  ==============================  =============================
``2`` or ``"2"``          the first two: 0 and 1          two
``-1`` or ``"-1"``        all devices                     one per core
``"auto"``                all devices                     one
``[0, 2]`` or ``"0,2"``   the devices 0 and 2             an error
``[2]`` or ``"2,"``       the device 2                    an error
========================  ==============================  =============================
"""

import ctypes
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import torch

from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.world import available_cores

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "AcceleratorName",
    "CPUAccelerator",
    "CUDAAccelerator",
    "DeviceModule",
    "MPSAccelerator",
    "TorchAccelerator",
    "device_module",
    "initialized_device_module",
]

# Editors complete the names. Another text may come from a file, or name an entry point.
AcceleratorName = Literal["auto", "cpu", "cuda", "gpu", "mps"] | str

# Parameters of mallopt(3), and fabric's values for them in bytes. Freed blocks that are smaller
# than _MMAP_THRESHOLD stay with the process, since each page that the system hands out again costs
# a page fault. In a step of `python -m benchmarks gpt-fsdp`, a threshold of 1 MiB causes ten times
# as many page faults as glibc's default, and a threshold of 4 MiB a third as many.
_M_TRIM_THRESHOLD = -1
_TRIM_THRESHOLD = 32 * 2**20
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD = 4 * 2**20

# A number of devices, the indices of devices, or "auto".
_Devices = int | tuple[int, ...] | Literal["auto"]


class Accelerator(ABC):
    """A kind of hardware: its devices, and how a process selects one.

    An accelerator has no state: two instances are interchangeable, and none remembers a device.
    :meth:`is_available`, :meth:`device_count` and :meth:`parse_devices` run in a process that may
    still fork, so they must not initialize the hardware. :meth:`activate` is the first call that
    may initialize the hardware.

    Attributes:
        name: the ``type`` of the :class:`torch.device` of this hardware, such as ``"cuda"``.
    """

    name: str

    def is_available(self) -> bool:
        """Return whether this process can use at least one device of this hardware."""
        return self.device_count() > 0

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices that this process may use. 0 if there is none."""

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """Return the devices of this node that ``devices`` selects, one for each process.

        Args:
            devices: a number of devices, a list of indices, the spelling of either as a string, or
                ``"auto"``. The table at the top of :mod:`fabric.accelerators` explains each.

        Returns:
            The devices in the order of the local ranks, at least one.

        Raises:
            ConfigurationError: ``devices`` selects more devices than there are, an index twice or
                out of range, or no device.
            ArgumentTypeError: the value is neither an integer, a string nor a sequence of integers.
        """
        count = self.device_count()
        expected = (
            f"a number from 1 to {count}, a list of distinct indices below {count}, or "
            '"auto" for all'
        )
        parsed = _parse_devices(devices, expected)
        if isinstance(parsed, tuple):
            indices = parsed
        elif parsed in ("auto", -1):
            indices = tuple(range(count))
        else:
            # The first devices. A number that is too large gives one index that does not exist, and
            # a number below 1 gives no index. Both are refused below.
            indices = tuple(range(min(parsed, count + 1)))
        distinct_indices = set(indices)
        has_duplicates = len(distinct_indices) < len(indices)
        all_exist = distinct_indices.issubset(range(count))
        if not indices or has_duplicates or not all_exist:
            suggestion = 'devices="auto"' if count > 0 else 'accelerator="cpu"'
            raise ConfigurationError(
                f"devices={devices!r}",
                problem=f"this process sees {count} devices of type {self.name!r}",
                expected=expected,
                suggestion=suggestion,
            )
        return tuple(torch.device(self.name, index) for index in indices)

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current device of this process.

        The default does nothing, which suits hardware without a current device in torch.
        """

    def return_freed_memory(self) -> None:
        """Return large blocks to the system when they are freed, until the process ends.

        Strategies that allocate and free whole parameters in every step call this method. The
        default does nothing, which suits hardware whose allocator returns blocks anyway.
        """

    def release(self) -> None:
        """Return cached memory to the system. The memory of live tensors is kept.

        The method is called when a job ends. The default does nothing.
        """

    @property
    def default_backend(self) -> str:
        """The process-group backend that torch uses for this hardware, such as ``"nccl"``.

        Raises:
            ValueError: torch has no backend for this hardware. Name one with
                ``DDPStrategy(process_group_backend=...)``.
        """
        return torch.distributed.get_default_backend_for_device(self.name)


@final
class CPUAccelerator(Accelerator):
    """The CPU. It is always available, and its devices are processes, which share the cores."""

    name = "cpu"

    def device_count(self) -> int:
        """Return the number of cores that this process may use, at least 1.

        A process with an affinity mask may use fewer cores than the machine has.
        """
        return available_cores()

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """Return the CPU once for each process. See :meth:`Accelerator.parse_devices`.

        Here ``devices`` is a number of processes, which may be larger than the number of cores.
        """
        expected = 'a number of processes >= 1, -1 for one process per core, or "auto" for one'
        num_processes = _parse_devices(devices, expected)
        if num_processes == "auto":
            num_processes = 1
        elif num_processes == -1:
            num_processes = self.device_count()
        # The parsed value may also be a tuple of indices.
        if not isinstance(num_processes, int) or num_processes < 1:
            raise ConfigurationError(
                f"devices={devices!r}",
                problem="it is not a number of processes, and CPU cores have no index",
                expected=expected,
                suggestion='devices="auto"',
            )
        return (torch.device(self.name),) * num_processes

    def return_freed_memory(self) -> None:
        """Return blocks of 4 MiB or more to the system when they are freed, under glibc.

        At first glibc returns blocks of 128 KiB or more. But a freed block raises this threshold to
        its own size, up to 32 MiB, so that glibc would keep the memory of freed parameters. A fixed
        threshold turns this adjustment off. Thresholds that the user has set by an environment
        variable are kept.
        """
        if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
            return
        if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
            return
        # CDLL(None) contains the functions of the C library of this process. Libraries other than
        # glibc lack this function, and return large blocks at once.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
            mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


@final
class CUDAAccelerator(Accelerator):
    """The GPUs of NVIDIA, and those of AMD under ROCm, that ``CUDA_VISIBLE_DEVICES`` shows."""

    name = "cuda"

    def device_count(self) -> int:
        """Return the number of visible GPUs.

        The number is 0 without a driver, or if torch was built without CUDA.
        """
        # Unlike torch.cuda.is_available(), this function asks NVML (amdsmi under ROCm) and not the
        # CUDA runtime, unless NVML is missing or fails. A process that has used the runtime cannot
        # fork processes that use CUDA.
        return torch.cuda.device_count()

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current GPU of this process: the device called ``"cuda"``."""
        torch.cuda.set_device(device)

    def release(self) -> None:
        """Return the caching allocator's free blocks to the driver.

        Does nothing if CUDA was never used.
        """
        torch.cuda.empty_cache()


@final
class MPSAccelerator(Accelerator):
    """The GPU of a Mac with Apple silicon. There is exactly one, with index 0."""

    name = "mps"

    def device_count(self) -> int:
        """Return 1, or 0 if this machine or this torch cannot use MPS."""
        return int(torch.backends.mps.is_available())

    def release(self) -> None:
        """Return the allocator's free blocks to the system."""
        # empty_cache() raises on a machine without a device of this type.
        if self.is_available():
            torch.mps.empty_cache()


@final
class TorchAccelerator(Accelerator):
    """Any other hardware that torch or an extension of torch supports, such as ``"xpu"``.

    torch has a module for each kind of hardware, which is named for it: ``torch.xpu`` for the GPUs
    of Intel. Extensions such as ``torch_npu`` add a module when they are imported.

    Args:
        name: the ``type`` of the :class:`torch.device` of this hardware.
    """

    def __init__(self, name: str) -> None:
        """Keep the name. Whether torch supports the hardware is not checked."""
        self.name = name

    @staticmethod
    def is_supported(name: str) -> bool:
        """Return whether torch has a module for this hardware, with a function ``device_count``."""
        return hasattr(device_module(name), "device_count")

    def device_count(self) -> int:
        """Return the number of devices, or 0 if torch does not support the hardware."""
        if not self.is_supported(self.name):
            return 0
        return device_module(self.name).device_count()

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current device of this process."""
        torch.accelerator.set_device_index(device)

    def release(self) -> None:
        """Return cached memory to the system, if torch can do so for this hardware."""
        empty_cache = getattr(device_module(self.name), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


# The accelerators by name, in the order in which "auto" tries them. The CPU is always available.
ACCELERATORS = {
    "cuda": CUDAAccelerator,
    "gpu": CUDAAccelerator,
    "mps": MPSAccelerator,
    "cpu": CPUAccelerator,
}


def device_module(name: str) -> Any:
    """Return torch's module of a kind of hardware, or None if torch has none.

    Extensions of torch, such as ``torch_npu``, add their module when they are imported.

    Args:
        name: the ``type`` of a :class:`torch.device`, such as ``"xpu"``. Any other text is allowed.
    """
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows no such type
        return None
    if device.index is not None:  # "cuda:0" is a device, and no type
        return None
    return getattr(torch, name, None)


class DeviceModule(NamedTuple):
    """The hardware that a process uses beside the CPU.

    Attributes:
        name: the ``type`` of its devices, such as ``"cuda"``.
        module: torch's module for it, such as ``torch.cuda``.
    """

    name: str
    module: Any


def initialized_device_module() -> DeviceModule | None:
    """Return the hardware that this process has used beside the CPU, or None.

    Hardware that was not used stays uninitialized.
    """
    device = torch.accelerator.current_accelerator()  # None if torch was built for CPUs alone
    if device is None:
        return None
    module = device_module(device.type)
    # torch.mps has neither is_initialized() nor the functions for which callers ask, such as
    # get_rng_state_all(). So MPS counts as not initialized.
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return DeviceModule(device.type, module)


def _parse_devices(devices: Any, expected: str) -> _Devices:
    """Convert the argument ``devices`` to a number of devices, a tuple of indices or ``"auto"``.

    Whether the devices exist is not checked.

    Args:
        devices: the user's value.
        expected: the valid values, for errors.

    Raises:
        ConfigurationError: a string is neither a number, a list of numbers nor ``"auto"``.
        ArgumentTypeError: the value has another type.
    """
    try:
        if isinstance(devices, str):
            return _parse_devices_text(devices.strip())
        if isinstance(devices, Sequence):
            return tuple(map(operator.index, devices))
        return operator.index(devices)  # unlike int(), refuses a float
    except (TypeError, ValueError) as error:
        # A ValueError is from _parse_devices_text(), for a text that is not a number. A TypeError
        # is from operator.index(), for an object that is not an integer.
        error_class = ArgumentTypeError if isinstance(error, TypeError) else ConfigurationError
        raise error_class(
            f"devices={devices!r}",
            problem=str(error),
            expected=expected,
            suggestion='devices="auto"',
        ) from error


def _parse_devices_text(text: str) -> _Devices:
    """Convert a text such as ``"2"``, ``"0,2"``, ``"2,"`` or ``"auto"``.

    Raises:
        ValueError: a part of the text is not a number.
    """
    if text == "auto":
        return "auto"
    # "2" is a number of devices. The comma in "2," makes a list of indices, as in Python.
    if "," not in text:
        return int(text)
    indices = text.removesuffix(",").split(",")
    return tuple(map(int, indices))
