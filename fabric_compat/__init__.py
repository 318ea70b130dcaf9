"""Lightning Fabric's names, with Lightning's behavior, on torch-fabric.

``python -m fabric_compat script.py`` runs a script that imports ``lightning.fabric`` or
``lightning_fabric``. ``pytest -p fabric_compat.installed`` runs the tests of the script. In a new
script, import ``fabric_compat`` instead. Nothing in ``fabric`` imports this package.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric_compat import wrappers
    from fabric_compat.fabric import Fabric
    from fabric_compat.utilities import seed_everything
    from fabric_compat.wrappers import is_wrapped

__all__ = ["Fabric", "is_wrapped", "seed_everything", "wrappers"]


def __getattr__(name: str) -> Any:
    """Import a name or a module of this package when it is used.

    Python calls this function for names that are not defined here. So the import of this package
    alone is cheap: ``python -m fabric_compat run`` imports no more than ``fabric run``.
    """
    modules = {
        "Fabric": "fabric_compat.fabric",
        "is_wrapped": "fabric_compat.wrappers",
        "seed_everything": "fabric_compat.utilities",
    }
    if name in modules:
        return getattr(import_module(modules[name]), name)
    is_module = not name.startswith("_") and find_spec(f"fabric_compat.{name}") is not None
    if not is_module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"fabric_compat.{name}")


def __dir__() -> list[str]:
    return __all__
