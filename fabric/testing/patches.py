"""Attributes of modules that a test replaces for a while, in the ranks of a pool.

A rank imports its own copy of each module. So an attribute that is replaced in the process of the
test, as by pytest's ``monkeypatch``, has its original value on the ranks.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fabric.launchers.serialize import Call, load

__all__ = ["Patch", "applied", "find_test_module", "is_test_module", "replaced_attributes"]


class Patch(NamedTuple):
    """An attribute of a module and the value that replaces its value.

    Attributes:
        module_name: the name of the module.
        attribute: the name of the attribute.
        pickled_value: a pickled :class:`Call`, whose function is the new value.
    """

    module_name: str
    attribute: str
    pickled_value: bytes


@contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace attributes of modules in this process during the block.

    Args:
        patches: the attributes. A later patch of the same attribute wins.
    """
    # All values are loaded before the first attribute is replaced. A value may refer to an original
    # by name: for example, a function that wraps the original.
    modules: list[ModuleType] = []
    values: list[Any] = []
    for patch in patches:
        modules.append(importlib.import_module(patch.module_name))
        call: Call = load(patch.pickled_value)
        values.append(call.fn)
    with ExitStack() as stack:
        for patch, module, value in zip(patches, modules, values, strict=True):
            original = getattr(module, patch.attribute)
            stack.callback(setattr, module, patch.attribute, original)
            setattr(module, patch.attribute, value)
        yield


def find_test_module(value: object) -> ModuleType | None:
    """Return the test module that defines a function or the class of an instance, or None.

    A ``functools.partial`` stands for its function.
    """
    function = value
    # The type is checked first, since a Mock also has an attribute `func`, as it has every one.
    if type(value).__module__ == "functools":
        function = getattr(value, "func", value)
    name = getattr(function, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and is_test_module(module):
        return module
    return None


def is_test_module(module: ModuleType) -> bool:
    """Return whether pytest has loaded a module itself, such as a test module or conftest.py."""
    spec = getattr(module, "__spec__", None)
    loader = getattr(spec, "loader", None)
    # pytest rewrites the assertions of test modules, and so has a loader of its own.
    return type(loader).__module__.startswith("_pytest.")


def replaced_attributes(fn: Callable[..., Any]) -> list[tuple[str, str]]:
    """Return attributes of modules that were replaced in this process, as (module, attribute).

    A warning tells the user that the ranks still have the originals. An attribute counts as
    replaced if its value is a mock, or a function of a test module. Other values, such as numbers,
    do not show where they come from.

    Args:
        fn: the function whose modules are searched; see :func:`_modules_used_by`.
    """
    replaced: list[tuple[str, str]] = []
    for module in _modules_used_by(fn):
        for attribute, value in list(vars(module).items()):
            if _is_replacement(value, module.__name__):
                replaced.append((module.__name__, attribute))
    return replaced


def _is_replacement(value: object, module_name: str) -> bool:
    """Return whether a value of a module is a mock, or a function of a test module.

    For values of unknown type only ``type(value)`` is read. isinstance() reads an attribute, for
    which some objects warn.
    """
    if type(value) is FunctionType:
        # Most functions are in their own package, which is quick to find out.
        is_of_same_package = _package_of(value.__module__) == _package_of(module_name)
        if is_of_same_package:
            return False
        # pytest also loads plugins itself, such as hypothesis. They are installed packages.
        is_installed = "site-packages" in value.__code__.co_filename
        return not is_installed and find_test_module(value) is not None
    # Nothing is a mock if unittest.mock was not imported.
    mock = sys.modules.get("unittest.mock")
    return mock is not None and issubclass(type(value), mock.NonCallableMock)


def _modules_used_by(fn: Callable[..., Any]) -> list[ModuleType]:
    """Return the modules in which a replaced attribute may change what a function does.

    - ``torch.distributed``.
    - The function's own module, the modules that it names, and the modules that define the
      functions and classes that it names. Test modules are left out: their functions are sent by
      value.
    - The modules of the same package that these modules name. Other packages are left out for
      speed.

    Args:
        fn: a function, or a ``functools.partial`` of a function. Other objects name no modules.
    """
    function = getattr(fn, "func", fn)
    if type(function) is not FunctionType:
        return []
    module_names = {function.__module__, "torch.distributed"}
    for name in function.__code__.co_names:
        module_names.add(_name_of_module(function.__globals__.get(name)))
    modules: dict[str, ModuleType] = {}
    for name in module_names:
        module = sys.modules.get(name)
        if module is None or is_test_module(module):
            continue
        modules[name] = module
        if _package_of(name) == "torch":
            continue  # for speed, since torch has many modules
        for value in list(vars(module).values()):
            is_module = issubclass(type(value), ModuleType)
            if is_module and _package_of(value.__name__) == _package_of(name):
                modules[value.__name__] = value
    return list(modules.values())


def _name_of_module(value: object) -> str:
    """Return the name of a module, or of the module that defines a function or class, or ""."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType | type):
        return value.__module__
    return ""


def _package_of(module_name: str | None) -> str:
    """Return the name of the top-level package, or "" for None.

    The name is None for a function that was made without a module.
    """
    package, _, _ = (module_name or "").partition(".")
    return package
