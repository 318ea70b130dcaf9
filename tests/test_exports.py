"""Every public module says what it offers: sorted, complete and documented. Importing it costs little."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import fabric


def public_modules() -> list[str]:
    found = pkgutil.walk_packages(fabric.__path__, "fabric.")
    names = [
        module.name
        for module in found
        if not any(part.startswith("_") for part in module.name.split("."))
    ]
    return ["fabric", *names]


@pytest.fixture(params=public_modules())
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def constants_then_classes_then_functions(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


def test_all_is_sorted_and_exists(module: ModuleType) -> None:
    assert module.__all__ == sorted(set(module.__all__), key=constants_then_classes_then_functions)
    assert all(hasattr(module, name) for name in module.__all__)


def test_all_is_complete(module: ModuleType) -> None:
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }
    assert own <= set(module.__all__)


def test_everything_public_is_documented(module: ModuleType) -> None:
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize(
    "package", ["fabric", "fabric.checkpoint", "fabric.communicators", "fabric.strategies"]
)
def test_a_package_that_imports_names_late_lists_them_and_has_no_others(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nothing'"):
        _ = module.Nothing
    assert set(module.__all__) <= set(dir(module))


IMPORT = """
import os, signal, sys, threading, torch
modules, variables, hook, state = set(sys.modules), dict(os.environ), sys.excepthook, torch.get_rng_state()
from fabric import Fabric
assert (dict(os.environ), sys.excepthook, threading.active_count()) == (variables, hook, 1)
assert torch.equal(torch.get_rng_state(), state)
print(*sorted(set(sys.modules) - modules))
import fabric.testing
print("hypothesis" in sys.modules)
sys.modules["hypothesis"] = None
import fabric.testing.generators
"""


def test_an_import_changes_nothing_in_the_process_and_brings_only_what_torch_has_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60
    )
    imported, hypothesis = done.stdout.splitlines()
    modules = imported.split()
    assert {name.partition(".")[0] for name in modules} <= {"fabric", *sys.stdlib_module_names}
    late = ("torch.", "fabric.cli.", "fabric.strategies.fs", "fabric.checkpoint.sh")
    assert not [name for name in modules if f"{name}.".startswith(late)]
    assert hypothesis == "False", "the test kit needs it for the generators alone"
    assert 'pip install "torch-fabric[testing]"' in done.stderr


def test_the_package_alone_does_not_import_torch() -> None:
    script = "import sys, fabric; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
