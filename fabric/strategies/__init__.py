"""What is done to a module so that it trains on the devices of a job."""

from fabric.strategies.base import ParallelStrategy, Strategy
from fabric.strategies.data_parallel import DataParallelStrategy
from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.fsdp import FSDPStrategy
from fabric.strategies.single_device import SingleDeviceStrategy

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
]
