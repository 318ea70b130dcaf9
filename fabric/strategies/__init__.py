"""Strategies: how a module is prepared to train on the devices of a job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fabric.strategies.base import Strategy
from fabric.strategies.data_parallel import DataParallelStrategy, SingleDeviceStrategy
from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.parallel import ParallelStrategy

if TYPE_CHECKING:
    from fabric.strategies.fsdp import FSDPStrategy
    from fabric.strategies.model_parallel import ModelParallelStrategy

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]


def __getattr__(name: str) -> Any:
    files = {"FSDPStrategy": "fsdp", "ModelParallelStrategy": "model_parallel"}
    if name not in files:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # With what they need they take a second.
    return getattr(import_module(f"fabric.strategies.{files[name]}"), name)


def __dir__() -> list[str]:
    return __all__
