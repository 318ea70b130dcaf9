"""Where metrics go; any object with the methods of :class:`Logger` is a logger."""

from typing import TYPE_CHECKING, Any

from fabric.loggers.base import Logger

if TYPE_CHECKING:
    from fabric.loggers.csv import CSVLogger
    from fabric.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


def __getattr__(name: str) -> Any:
    # Late: `import fabric` needs this package, but no logger.
    if name == "CSVLogger":
        from fabric.loggers.csv import CSVLogger

        return CSVLogger
    if name == "TensorBoardLogger":
        from fabric.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger
    raise AttributeError(f"module 'fabric.loggers' has no attribute {name!r}")
