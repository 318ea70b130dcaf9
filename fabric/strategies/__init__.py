"""Strategies: how a module is prepared to train on the devices of a job."""

from typing import TYPE_CHECKING

from fabric._late import late
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

__getattr__, __dir__ = late(__name__, {"DataParallelStrategy": "data_parallel", "FSDPStrategy": "fsdp"})
