"""Grow a hand-written PyTorch loop from one device to many, with a handful of changed lines."""

from typing import TYPE_CHECKING

from fabric._late import late

if TYPE_CHECKING:
    from fabric._fabric import Fabric
    from fabric.module import FabricModule

__all__ = ["Fabric", "FabricModule", "__version__"]

__version__ = "0.1.0.dev0"

# The command line and the launchers, which need no torch, start without waiting for it.
__getattr__, __dir__ = late(__name__, {"Fabric": "_fabric", "FabricModule": "module"})
