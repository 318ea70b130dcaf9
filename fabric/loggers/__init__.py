"""Loggers of metrics."""

from fabric.loggers.loggers import (
    CSVLogger,
    Logger,
    Loggers,
    TensorBoardLogger,
    metrics_as_floats,
)

__all__ = ["CSVLogger", "Logger", "Loggers", "TensorBoardLogger", "metrics_as_floats"]
