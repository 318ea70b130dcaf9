"""What every kind of hardware answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from fabric.accelerators.devices import parse_indices
from fabric.errors import ConfigurationError

__all__ = ["Accelerator"]


class Accelerator(ABC):
    """A kind of hardware: whether it is there, how many devices of it there are, and how a process takes one.

    Stateless: two instances are interchangeable, and none remembers a device. :meth:`is_available`,
    :meth:`device_count` and :meth:`parse_devices` run in a process that may still fork, so they leave the hardware
    uninitialised; :meth:`activate` is the first call that may touch it.

    Attributes:
        name: the ``type`` of the :class:`torch.device` that this accelerator hands out, such as ``"cuda"``.
    """

    name: ClassVar[str]

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process could use at least one such device."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of such devices that this process may use; 0 when there is none."""

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[torch.device, ...]:
        """Turn what the user wrote as ``devices`` into the devices of this node, one per process.

        Unless a subclass says otherwise a number n is the first n, and ``"auto"`` and -1 are all.

        Args:
            devices: a number, a list of indices, or their spelling as a string.

        Returns:
            The devices in the order of the local ranks, at least one.

        Raises:
            ConfigurationError: there are not so many devices, an index is out of range or twice, or none is named.
            ArgumentTypeError: the value is neither an integer, a string nor a sequence of integers.
        """
        indices = parse_indices(devices, self.device_count(), self.name)
        return tuple(torch.device(self.name, index) for index in indices)

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process; nothing to do where torch has no current device."""

    def return_freed_memory(self) -> None:
        """From now on, have large blocks go back to the system when they are freed; nothing to do where they do.

        For strategies that allocate and free whole parameters in every step. It lasts as long as the process.
        """

    def release(self) -> None:
        """Give cached memory back to the system; live tensors keep theirs."""

    @property
    def default_backend(self) -> str:
        """Name of the process-group backend that torch uses for this hardware, such as ``"gloo"`` or ``"nccl"``.

        Raises:
            ConfigurationError: torch has no backend for it.
        """
        try:
            return torch.distributed.get_default_backend_for_device(self.name)
        except ValueError as error:
            raise ConfigurationError(
                f"the process-group backend of accelerator {self.name!r}",
                f"torch knows none for devices of this type ({error})",
                "a backend that is registered with torch.distributed.Backend.register_backend",
                'strategy=DDPStrategy(process_group_backend="...")',
            ) from error
