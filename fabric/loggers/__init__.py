"""Where metrics go; any object with the methods of :class:`Logger` is a logger."""

from fabric.loggers.base import Logger
from fabric.loggers.csv import CSVLogger
from fabric.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
