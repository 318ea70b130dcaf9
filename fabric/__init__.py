"""Grow a hand-written PyTorch loop from one device to many, with a handful of changed lines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric._fabric import Fabric
    from fabric.module import FabricModule
    from fabric.seed import seed_everything
    from fabric.tools.dry_run import plan
    from fabric.tools.throughput import Throughput

__all__ = [
    "Fabric",
    "FabricModule",
    "Throughput",
    "__version__",
    "plan",
    "seed_everything",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is used. Python calls this function for names not defined here.

    An import of ``fabric`` itself does not import torch, so that the command line and the
    launchers, which do not need torch, start at once.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {
        "Throughput": "fabric.tools.throughput",
        "plan": "fabric.tools.dry_run",
    }
    # fabric._fabric has the other names.
    module = import_module(modules.get(name, "fabric._fabric"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
