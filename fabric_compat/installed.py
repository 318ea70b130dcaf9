"""An import hook that finds ``lightning.fabric`` and ``lightning_fabric`` in :mod:`fabric_compat`.

Importing this module installs the hook. pytest loads this module with
``-p fabric_compat.installed``, and ``python -m fabric_compat`` makes every rank import this module.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_ROOTS = {
    "lightning": "fabric_compat.lightning",
    "lightning.fabric": "fabric_compat",
    "lightning_fabric": "fabric_compat",
    **dict.fromkeys(
        ("lightning.fabric.connector", "lightning_fabric.connector"), "fabric_compat.plugins"
    ),
}
_TRAINERS = ("lightning.pytorch", "pytorch_lightning")


def _counterpart(name: str) -> str:
    """Return the name of the module that has the names of Lightning's module ``name``.

    One module of ``fabric_compat`` has the names of a whole subpackage of Lightning.
    """
    roots = [root for root in _ROOTS if f"{name}.".startswith(f"{root}.")]
    longest_root = max(roots, key=len)
    # The first item is the empty string before the dot.
    subpackage = name.removeprefix(longest_root).split(".")[:2]
    return _ROOTS[longest_root] + ".".join(subpackage)


class _Finder(MetaPathFinder, Loader):
    """A finder that returns modules of ``fabric_compat``, not copies, for Lightning Fabric's."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.startswith(_TRAINERS):
            raise ImportError(
                f"{fullname} is Lightning's Trainer, which cannot use lightning.fabric of "
                "fabric_compat: run the script without python -m fabric_compat, or without the "
                "Trainer"
            )
        if fullname.partition(".")[0] not in _ROOTS:
            return None
        if not fullname.startswith(tuple(_ROOTS)[1:]) and fullname != "lightning":
            raise ImportError(
                f"{fullname} is not part of Lightning Fabric, and fabric_compat has nothing else "
                "of Lightning"
            )
        if find_spec(_counterpart(fullname)) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_counterpart(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's own spec by Lightning's spec.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _Entry(str):
    """An entry of ``sys.path`` whose unpickling installs the import hook.

    A process that ``multiprocessing`` spawns unpickles ``sys.path`` before it imports the script.
    """

    def __reduce__(self) -> Any:
        return _Entry, (str(self),)


# Programs replace the first and the last entry, so the second entry carries the hook.
sys.path[1] = _Entry(sys.path[1])

if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    for _name in (*_ROOTS, *_TRAINERS):
        if _name in sys.modules:
            raise ImportError(
                f"{_name} has been imported already: fabric_compat has to be installed before it"
            )
    sys.meta_path.insert(0, _Finder())
