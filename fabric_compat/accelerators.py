"""Fabric's accelerators under Lightning's names."""

from functools import partial
from typing import Any

import torch

from fabric import accelerators
from fabric.accelerators import Accelerator
from fabric_compat.missing import INSTEAD, Missing, missing
from fabric_compat.registry import Registry

is_cuda_available = torch.cuda.is_available


def num_cuda_devices() -> int:
    """Return the number of visible GPUs. Tests replace this function to pretend that GPUs exist."""
    return torch.cuda.device_count()


__getattr__ = partial(missing, __name__)


def _clear_cuda_memory() -> None:
    CUDAAccelerator().release()


def _parse_cpu_cores(cpu_cores: int | str) -> int:
    """Return a number of processes on the CPU, given as a number or in digits.

    Raises:
        TypeError: it is not a number above 0.
    """
    text = str(cpu_cores).strip()
    if not text.isdigit() or int(text) == 0:
        raise TypeError(f"devices={cpu_cores!r} on the CPU: should be an int > 0, or its spelling")
    return int(text)


class _LightningAccelerator(Accelerator):
    """The methods of an accelerator that Lightning has. Scripts call them on the class."""

    @classmethod
    def is_available(cls) -> bool:  # type: ignore[override]
        return cls().device_count() > 0

    @classmethod
    def auto_device_count(cls) -> int:
        return len(cls().parse_devices("auto")) if cls.is_available() else 0

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> list[torch.device]:
        """Return devices, given as their number, as a string such as ``"auto"``, or as indices."""
        if isinstance(devices, int | str):
            return list(cls().parse_devices(devices))
        return [torch.device(cls.name, index) for index in devices]

    @classmethod
    def setup_device(cls, device: torch.device) -> None:
        """Make a device the current device of this process.

        Raises:
            ValueError: The device is of another kind of hardware.
        """
        if device.type != cls.name:
            raise ValueError(f"setup_device({device!r}): expected a device of type {cls.name!r}")
        cls().activate(device)

    def teardown(self) -> None:
        self.release()


# Fabric's classes are final for users. The classes below add no state and change no decision, and
# their class methods can be called like the methods of fabric.
class CPUAccelerator(  # pyright: ignore[reportIncompatibleMethodOverride]
    _LightningAccelerator,
    accelerators.CPUAccelerator,  # pyright: ignore[reportGeneralTypeIssues]
):
    """The CPU."""


class CUDAAccelerator(  # pyright: ignore[reportIncompatibleMethodOverride]
    _LightningAccelerator,
    accelerators.CUDAAccelerator,  # pyright: ignore[reportGeneralTypeIssues]
):
    """The GPUs of NVIDIA and AMD."""

    def device_count(self) -> int:
        return num_cuda_devices()


class MPSAccelerator(  # pyright: ignore[reportIncompatibleMethodOverride]
    _LightningAccelerator,
    accelerators.MPSAccelerator,  # pyright: ignore[reportGeneralTypeIssues]
):
    """The GPU of a Mac."""


class XLAAccelerator(Missing):
    """The TPU, which is never available here. Scripts ask for a TPU before they choose hardware."""

    instead = INSTEAD["XLA"]

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def auto_device_count() -> int:
        return 0


class _AcceleratorRegistry(Registry):
    """The accelerators of this process."""

    _kind = "accelerator"

    def available_accelerators(self) -> list[str]:
        """Return the names in alphabetical order. This machine may lack the hardware."""
        return sorted(self)


ACCELERATOR_REGISTRY = _AcceleratorRegistry(
    {
        "cpu": CPUAccelerator,
        "cuda": CUDAAccelerator,
        "mps": MPSAccelerator,
        "tpu": XLAAccelerator,
    }
)


def with_lightning_methods(accelerator: Accelerator) -> Accelerator:
    """Return an accelerator of the same hardware that has Lightning's methods.

    An accelerator of hardware that is not registered is returned unchanged.
    """
    if isinstance(accelerator, _LightningAccelerator):
        return accelerator
    return ACCELERATOR_REGISTRY.get(accelerator.name, accelerator)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of the first CUDA devices on which a tensor can be allocated.

    Args:
        num_devices: The number of devices. The default, -1, stands for all usable devices.

    Raises:
        ValueError: The machine has fewer than ``num_devices`` devices, or none.
        RuntimeError: Other processes use so many devices that fewer than ``num_devices`` are left.
    """
    if num_devices == 0:
        return []
    count = num_cuda_devices()
    if count == 0 or num_devices > count:
        raise ValueError(
            f"find_usable_cuda_devices({num_devices}): this process sees {count} CUDA devices"
        )
    usable: list[int] = []
    occupied: list[int] = []
    for index in range(count):
        if len(usable) == num_devices:
            break
        # torch raises if another process uses the device exclusively.
        try:
            torch.tensor(0, device=torch.device("cuda", index))
        except RuntimeError:
            occupied.append(index)
        else:
            usable.append(index)
    if num_devices not in (-1, len(usable)):
        raise RuntimeError(
            f"find_usable_cuda_devices({num_devices}): only the CUDA devices {usable} can be used. "
            f"Other processes use the devices {occupied}"
        )
    return usable
