"""Strategies, which prepare modules to train on the devices of a job."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from fabric.strategies.data_parallel import DataParallelStrategy, SingleDeviceStrategy
from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.standalone import Strategy

if TYPE_CHECKING:
    from fabric.strategies.fsdp.api import FSDPStrategy
    from fabric.strategies.model_parallel import ModelParallelStrategy

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyName",
]

# Editors complete the names. Another text may come from a file, or name an entry point.
StrategyName = (
    Literal[
        "auto",
        "single_device",
        "dp",
        "ddp",
        "ddp_spawn",
        "ddp_fork",
        "ddp_forkserver",
        "ddp_notebook",
        "ddp_find_unused_parameters_true",
        "ddp_spawn_find_unused_parameters_true",
        "ddp_fork_find_unused_parameters_true",
        "ddp_forkserver_find_unused_parameters_true",
        "ddp_notebook_find_unused_parameters_true",
        "fsdp",
        "fsdp_cpu_offload",
        "model_parallel",
    ]
    | str
)

# Imported when they are first used, because these modules and their imports take a second.
_LAZY_IMPORTS = {
    "FSDPStrategy": "fabric.strategies.fsdp",
    "ModelParallelStrategy": "fabric.strategies.model_parallel",
}


def __getattr__(name: str) -> Any:
    """Return a strategy class that is imported lazily. Python calls it for unknown names."""
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
