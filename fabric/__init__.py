"""Grow a hand-written PyTorch loop from one device to many, with a handful of changed lines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric._fabric import Fabric
    from fabric.accelerators import EntryPoint
    from fabric.module import FabricModule
    from fabric.seed import seed_everything
    from fabric.tools.dry_run import plan
    from fabric.tools.throughput import Throughput

__all__ = [
    "EntryPoint",
    "Fabric",
    "FabricModule",
    "Throughput",
    "__version__",
    "plan",
    "seed_everything",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The command line and the launchers, which need no torch, start without waiting for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {
        "EntryPoint": "fabric.accelerators",
        "Throughput": "fabric.tools.throughput",
        "plan": "fabric.tools.dry_run",
    }
    return getattr(import_module(homes.get(name, "fabric._fabric")), name)


def __dir__() -> list[str]:
    return __all__
