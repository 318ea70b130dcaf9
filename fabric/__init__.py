"""Grow a hand-written PyTorch loop from one device to many, with a handful of changed lines."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric._fabric import Fabric
    from fabric.module import FabricModule

__all__ = ["Fabric", "FabricModule", "__version__"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # Late, so that the command line and the launchers, which need no torch, start without waiting for it.
    if name == "Fabric":
        from fabric._fabric import Fabric

        return Fabric
    if name == "FabricModule":
        from fabric.module import FabricModule

        return FabricModule
    raise AttributeError(f"module 'fabric' has no attribute {name!r}")
