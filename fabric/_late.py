"""Names that a package offers but imports only when they are asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["late"]


def late(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, for names of it that most programs do without.

    Args:
        package: its ``__name__``.
        homes: each name with the module of the package that defines it.
    """

    def find(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
