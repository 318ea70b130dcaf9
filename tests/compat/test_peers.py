"""Each public name of Accelerate and of Lightning Fabric has a row that says what to write here, which is there."""

import ast
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import fabric
from fabric import Fabric, _plan, accelerators, loggers, strategies
from fabric.cli import main
from fabric.precision import LossScale
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.compat.peers import SECTIONS, read, rows, stored

CLASSES = {
    each.__name__: each
    for each in (Fabric, LossScale, DDPStrategy, FSDPStrategy, ModelParallelStrategy)
}


@pytest.mark.parametrize("package", SECTIONS)
def test_each_name_has_a_row(package: str) -> None:
    named = {name for names, *_ in rows(package) for name in names}
    assert {name for _, name in stored(package)} - named == set()


@pytest.mark.parametrize("package", SECTIONS)
def test_the_names_are_those_of_the_package(package: str) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: make bench installs it")
    assert read(Path(spec.origin).parent) == stored(package)


@pytest.mark.parametrize("package", SECTIONS)
def test_what_a_row_says_to_write_is_there(package: str) -> None:
    for _, _, codes in rows(package):
        for code in codes:
            for name in re.findall(r"(?<![\w.])fabric\.([\w.]+\w)", code):
                assert hasattr(Fabric, name.split(".")[0]) or resolve_name(f"fabric.{name}")
            for node in ast.walk(parsed(code)):
                if isinstance(node, ast.Call):
                    check_arguments(node)


def parsed(code: str) -> ast.AST:
    for text in (code, f"{code} pass"):
        try:
            return ast.parse(text)
        except SyntaxError:
            continue
    return ast.Module([], [])


def check_arguments(call: ast.Call) -> None:
    """Whether the keywords of a call of ours are arguments of it."""
    name = ast.unparse(call.func)
    called: Any = CLASSES.get(name) or getattr(Fabric, name.removeprefix("fabric."), None)
    if called is None or not (name in CLASSES or name.startswith("fabric.")):
        return
    parameters = inspect.signature(called).parameters
    for keyword in call.keywords:
        assert keyword.arg in parameters, f"{name}({keyword.arg}=...)"


def test_what_is_the_same_is_there() -> None:
    found = stored("lightning_fabric")
    kinds = {name: {kind for kind, each in found if each == name} for _, name in found}
    options = inspect.signature(Fabric).parameters
    modules = [strategies, accelerators, loggers]
    there = {
        "keyword": options.__contains__,
        "strategy": _plan.STRATEGIES.__contains__,
        "class": lambda name: any(hasattr(module, name) for module in modules),
        "function": lambda name: hasattr(fabric, name),
        "option": lambda name: name.startswith("--"),  # of `fabric run`, below
    }
    for names, text, _ in rows("lightning_fabric"):
        for name in names if text.startswith("the same") else ():
            for kind in kinds.get(name, ()):
                assert there.get(kind, lambda name: hasattr(Fabric, name))(name), (kind, name)


@pytest.mark.parametrize("package", SECTIONS)
def test_the_commands_are_there(package: str, capsys: Any) -> None:
    for names, text, codes in rows(package):
        words = [code.split() for code in codes if code.startswith("fabric ")]
        if text == "the same" and "--accelerator" in names:
            words += [["fabric", "run", *(name for name in names if name.startswith("--"))]]
        for _, command, *options in words:
            with pytest.raises(SystemExit):
                main([command, "--help"])
            shown = capsys.readouterr().out
            assert [
                option for option in options if option.startswith("-") and option not in shown
            ] == []
