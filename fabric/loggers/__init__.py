"""Loggers of metrics."""

from fabric.loggers.kubeflow import KubeflowLogger
from fabric.loggers.loggers import (
    CSVLogger,
    Logger,
    Loggers,
    TensorBoardLogger,
    metrics_as_floats,
)

__all__ = [
    "CSVLogger",
    "KubeflowLogger",
    "Logger",
    "Loggers",
    "TensorBoardLogger",
    "metrics_as_floats",
]
