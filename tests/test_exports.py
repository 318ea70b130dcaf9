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
    names = [module.name for module in found if not any(part.startswith("_") for part in module.name.split("."))]
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


@pytest.mark.parametrize("package", ["fabric", "fabric.checkpoint", "fabric.communicators", "fabric.strategies"])
def test_a_package_that_imports_names_late_lists_them_and_has_no_others(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nothing'"):
        _ = module.Nothing
    assert set(module.__all__) <= set(dir(module))


def test_import_brings_in_nothing_heavy() -> None:
    code = "import sys, fabric; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(result.stdout.split())
    heavy = {
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.run",
        "torch.distributed.tensor",
        "torch.utils.tensorboard",
        "fabric.loggers",
        "fabric.cli",
        "cloudpickle",
        "hypothesis",
    }
    assert not heavy & loaded


def test_import_changes_nothing_in_the_process() -> None:
    code = (
        "import os, sys, signal, threading, torch; before = dict(os.environ), sys.excepthook, torch.get_rng_state();"
        "import fabric; assert before[0] == dict(os.environ) and before[1] is sys.excepthook;"
        "assert torch.equal(before[2], torch.get_rng_state()) and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
