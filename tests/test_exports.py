"""The names that public modules export, and what an import does."""

import importlib
import inspect
import pkgutil
import pydoc
import subprocess
import sys
from types import ModuleType

import pytest

import fabric


def public_modules() -> list[str]:
    names = ["fabric"]
    for module in pkgutil.walk_packages(fabric.__path__, "fabric."):
        if "._" not in module.name:
            names.append(module.name)
    return names


@pytest.fixture(params=public_modules())
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def constants_then_classes_then_functions(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


def test_all_is_sorted_and_exists(module: ModuleType) -> None:
    assert module.__all__ == sorted(set(module.__all__), key=constants_then_classes_then_functions)
    for name in module.__all__:
        assert hasattr(module, name)


def test_all_is_complete(module: ModuleType) -> None:
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        is_definition = inspect.isclass(value) or inspect.isfunction(value)
        if is_definition and value.__module__ == module.__name__:
            assert name in module.__all__


def test_everything_public_is_documented(module: ModuleType) -> None:
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module.__name__}.{name} has no docstring"


def test_help_has_no_markers_of_notes_in_comments(module: ModuleType) -> None:
    assert "[Note:" not in pydoc.plain(pydoc.render_doc(module))


@pytest.mark.parametrize(
    "package", ["fabric", "fabric.checkpoint", "fabric.communicators", "fabric.strategies"]
)
def test_a_package_that_imports_names_late_lists_them_and_has_no_other_names(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nothing'"):
        _ = module.Nothing
    assert set(module.__all__) <= set(dir(module))


IMPORT = """
import os, signal, sys, threading, torch
modules = set(sys.modules)
variables = dict(os.environ)
hook = sys.excepthook
state = torch.get_rng_state()
from fabric import Fabric
assert dict(os.environ) == variables
assert sys.excepthook is hook
assert threading.active_count() == 1
assert torch.equal(torch.get_rng_state(), state)
print(*sorted(set(sys.modules) - modules))
import fabric.testing
print("hypothesis" in sys.modules)
sys.modules["hypothesis"] = None
import fabric.testing.generators
"""


def test_an_import_changes_nothing_in_the_process_and_loads_only_fabric() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=150
    )
    imported, hypothesis = done.stdout.splitlines()
    modules = imported.split()
    late = ("torch.", "fabric.cli.", "fabric.strategies.fs", "fabric.checkpoint.sh")
    for name in modules:
        package, _, _ = name.partition(".")
        assert package in {"fabric", *sys.stdlib_module_names}
        assert not f"{name}.".startswith(late)
    assert hypothesis == "False", "only the generators of the test kit need hypothesis"
    assert 'pip install "torch-fabric[testing]"' in done.stderr


@pytest.mark.parametrize("module", ["fabric", "fabric_compat.__main__"])
def test_a_package_or_a_command_alone_does_not_import_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=150).returncode == 0
