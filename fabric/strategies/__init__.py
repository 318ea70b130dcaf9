"""Strategies: how a module is prepared to train on the devices of a job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fabric.strategies.base import ParallelStrategy, SingleDeviceStrategy, Strategy
from fabric.strategies.ddp import DDPStrategy

if TYPE_CHECKING:
    from fabric.strategies.data_parallel import DataParallelStrategy
    from fabric.strategies.fsdp import FSDPStrategy

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported when first used: FSDP takes a second.
    return getattr(import_module(f"{__name__}.{'fsdp' if name == 'FSDPStrategy' else 'data_parallel'}"), name)


def __dir__() -> list[str]:
    return __all__
