"""Every public name of Accelerate and Lightning Fabric has a row that says what to write here."""

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
from tests.compat.peers import PAGES, Row, names_in_source, rows, stored_names

CLASSES = {
    "Fabric": Fabric,
    "LossScale": LossScale,
    "DDPStrategy": DDPStrategy,
    "FSDPStrategy": FSDPStrategy,
    "ModelParallelStrategy": ModelParallelStrategy,
}


@pytest.mark.parametrize("package", PAGES)
def test_every_name_has_a_row(package: str) -> None:
    names_with_rows: set[str] = set()
    for row in rows(package):
        names_with_rows.update(row.names)
    public_names = {public_name.name for public_name in stored_names(package)}
    assert public_names - names_with_rows == set()


@pytest.mark.parametrize("package", PAGES)
def test_the_names_are_those_of_the_package(package: str) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: make bench installs it")
    assert names_in_source(Path(spec.origin).parent) == stored_names(package)


@pytest.mark.parametrize("package", PAGES)
def test_what_a_row_says_to_write_exists(package: str) -> None:
    for row in rows(package):
        for code in row.codes:
            for name in re.findall(r"(?<![\w.])fabric\.([\w.]+\w)", code):
                attribute, _, _ = name.partition(".")
                assert hasattr(Fabric, attribute) or resolve_name(f"fabric.{name}")
            for node in ast.walk(parse(code)):
                if isinstance(node, ast.Call):
                    assert_keywords_are_arguments(node)


def parse(code: str) -> ast.AST:
    """Return the tree of a piece of code, which may be the head of a block; empty if it is text."""
    for text in (code, f"{code} pass"):
        try:
            return ast.parse(text)
        except SyntaxError:
            continue
    return ast.Module([], [])


def assert_keywords_are_arguments(call: ast.Call) -> None:
    """Check the keywords of a call of fabric. Other calls are not checked."""
    name = ast.unparse(call.func)
    called: Any
    if name in CLASSES:
        called = CLASSES[name]
    elif name.startswith("fabric."):
        called = getattr(Fabric, name.removeprefix("fabric."), None)
    else:
        called = None
    if called is None:
        return
    parameters = inspect.signature(called).parameters
    for keyword in call.keywords:
        assert keyword.arg in parameters, f"{name}({keyword.arg}=...)"


def exists_in_fabric(kind: str, name: str) -> bool:
    if kind == "keyword":
        return name in inspect.signature(Fabric).parameters
    if kind == "strategy":
        return name in _plan.STRATEGIES
    if kind == "class":
        modules = (strategies, accelerators, loggers)
        return any(hasattr(module, name) for module in modules)
    if kind == "function":
        return hasattr(fabric, name)
    if kind == "option":
        # `fabric run` has the options: see test_the_commands_exist.
        return name.startswith("--")
    return hasattr(Fabric, name)


def test_what_is_called_the_same_exists() -> None:
    kinds: dict[str, set[str]] = {}
    for kind, name in stored_names("lightning_fabric"):
        kinds.setdefault(name, set()).add(kind)
    for row in rows("lightning_fabric"):
        if not row.text.startswith("the same"):
            continue
        for name in row.names:
            for kind in kinds.get(name, ()):
                assert exists_in_fabric(kind, name), (kind, name)


def commands_of(row: Row) -> list[list[str]]:
    """Return the words of the commands of fabric in a row, without ``fabric``."""
    commands = []
    for code in row.codes:
        if code.startswith("fabric "):
            commands.append(code.split()[1:])
    if row.text == "the same" and "--accelerator" in row.names:
        options = [name for name in row.names if name.startswith("--")]
        commands.append(["run", *options])
    return commands


@pytest.mark.parametrize("package", PAGES)
def test_the_commands_exist(package: str, capsys: Any) -> None:
    for row in rows(package):
        for command, *words in commands_of(row):
            with pytest.raises(SystemExit):
                main([command, "--help"])
            help_text = capsys.readouterr().out
            for word in words:
                if word.startswith("-"):
                    assert word in help_text
