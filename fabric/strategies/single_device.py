"""One process, one device."""

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from fabric.accelerators import Accelerator
from fabric.errors import ConfigurationError
from fabric.precision import Precision
from fabric.strategies.base import Strategy

__all__ = ["SingleDeviceStrategy"]


class SingleDeviceStrategy(Strategy):
    """One process on one device; the prepared module is the user's own.

    Args:
        device: the device, such as ``"cpu"`` or ``"cuda:1"``; None for the one that ``Fabric`` resolves.
        accelerator: as for :class:`fabric.strategies.Strategy`, and so are the rest.
        checkpoint_io: format of ``save`` and ``load``.
        precision: precision.
    """

    name = "single_device"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: Any = None,
        precision: Precision | str | int | None = None,
    ) -> None:
        devices = None if device is None else (torch.device(device),)
        super().__init__(
            accelerator=accelerator, parallel_devices=devices, checkpoint_io=checkpoint_io, precision=precision
        )

    @override
    def check(self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int) -> None:
        if len(devices) * num_nodes != 1:
            raise ConfigurationError(
                f'strategy="single_device" on {num_nodes} node(s) with {len(devices)} device(s) each',
                "it drives one device",
                'strategy="ddp" for several devices, or devices=1',
                'Fabric(devices=..., strategy="ddp")',
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        return module
