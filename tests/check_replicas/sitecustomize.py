"""Gives ``--check-replicas`` to every process of a test: to ranks, and to scripts and their ranks.

tests/conftest.py puts this folder in PYTHONPATH if the option is passed. Python imports this module
when it starts. The module must not import fabric, since many processes never do.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class FabricFinder(MetaPathFinder):
    """Finds the module of ``Fabric``, and changes a default of the class after the import.

    Args:
        interval: the default of ``check_replicas``.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the usual spec of ``fabric._fabric`` with another loader; None for the others."""
        if fullname != "fabric._fabric":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        import_module = spec.loader.exec_module

        def import_and_change(module: ModuleType) -> None:
            import_module(module)
            module.Fabric.__init__.__kwdefaults__["check_replicas"] = self.interval

        spec.loader.exec_module = import_and_change
        return spec


sys.meta_path.insert(0, FabricFinder(int(os.environ["FABRIC_TESTS_CHECK_REPLICAS"])))
