"""Strategies: how a module is prepared to train on the devices of a job."""

from typing import TYPE_CHECKING, Any

from fabric.strategies.base import SingleDeviceStrategy, Strategy
from fabric.strategies.data_parallel import DataParallelStrategy
from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.parallel import ParallelStrategy

if TYPE_CHECKING:
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
    if name != "FSDPStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fabric.strategies.fsdp import FSDPStrategy  # with what it needs it takes a second

    return FSDPStrategy


def __dir__() -> list[str]:
    return __all__
