"""An import hook that finds the modules of Lightning in :mod:`fabric_compat`.

Importing this module installs the hook. pytest loads this module with
``-p fabric_compat.installed``, and ``python -m fabric_compat`` makes every rank import this module.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fabric_compat.modules import COUNTERPARTS, modules_below

_ROOTS = ("lightning", "lightning_fabric", "pytorch_lightning")


class _Finder(MetaPathFinder, Loader):
    """A finder that returns modules of ``fabric_compat``, not copies, for Lightning's modules."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in COUNTERPARTS:
            return None
        # The import system looks for submodules only below a package.
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(COUNTERPARTS[spec.name])
        # Kept for exec_module(), which restores it.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module, and import the modules below a top module.

        ``create_module`` has imported the module, so there is no code to run.
        """
        # The import system has replaced the module's own spec by Lightning's spec.
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state
        if spec.name in _ROOTS:
            # Scripts use submodules without importing them, such as lightning.fabric.utilities. An
            # import makes a submodule an attribute of its parent.
            for name in modules_below(spec.name):
                import_module(name)


class _Entry(str):
    """An entry of ``sys.path`` whose unpickling installs the import hook.

    A process that ``multiprocessing`` spawns unpickles ``sys.path`` before it imports the script.
    """

    def __reduce__(self) -> Any:
        return _Entry, (str(self),)


# Programs replace the first and the last entry, so the second entry carries the hook.
sys.path[1] = _Entry(sys.path[1])

if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    for _name in _ROOTS:
        if _name in sys.modules:
            raise ImportError(
                f"{_name} has been imported already: fabric_compat has to be installed before it"
            )
    sys.meta_path.insert(0, _Finder())
