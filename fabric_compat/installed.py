"""Importing this module makes ``lightning.fabric`` and ``lightning_fabric`` names of :mod:`fabric_compat`.

It is a plugin of pytest, ``-p fabric_compat.installed``, and what ``python -m fabric_compat`` has every rank import.
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
    """The module that has the names of Lightning's ``name``: its part of the package, whatever the depth below that."""
    root = max((root for root in _ROOTS if f"{name}.".startswith(f"{root}.")), key=len)
    below = name[len(root) :].split(".")[:2]
    return _ROOTS[root] + ".".join(below)


class _Finder(MetaPathFinder, Loader):
    """Finds Lightning Fabric's modules; each is a module of ours, not a copy."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.startswith(_TRAINERS):
            raise ImportError(
                f"{fullname} is Lightning's Trainer, which cannot use lightning.fabric of fabric_compat: run "
                "the script without python -m fabric_compat, or without the Trainer"
            )
        if fullname.partition(".")[0] not in _ROOTS:
            return None
        if not fullname.startswith(tuple(_ROOTS)[1:]) and fullname != "lightning":
            raise ImportError(
                f"{fullname} is not part of Lightning Fabric, and fabric_compat has nothing else of Lightning"
            )
        return (
            None
            if find_spec(_counterpart(fullname)) is None
            else ModuleSpec(fullname, self, is_package=True)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_counterpart(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has set that of the other name.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _Entry(str):
    """An entry of ``sys.path``, which what ``multiprocessing`` spawns unpickles before it imports the script."""

    def __reduce__(self) -> Any:
        return _Entry, (str(self),)


sys.path[1] = _Entry(sys.path[1])  # neither the first nor the last, which come and go

if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    for _name in (*_ROOTS, *_TRAINERS):
        if _name in sys.modules:
            raise ImportError(
                f"{_name} has been imported already: fabric_compat has to be installed before it"
            )
    sys.meta_path.insert(0, _Finder())
