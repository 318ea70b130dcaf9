"""The public names of Accelerate and Lightning Fabric, and their rows in docs/migrate.

``python -m tests.compat.peers FOLDER ...`` reads the names in the packages in these folders and
stores them beside this file. It does not import the packages.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "docs" / "migrate"
PAGES = {
    "accelerate": FOLDER / "accelerate.md",
    "lightning_fabric": FOLDER / "lightning-fabric.md",
}
LIGHTNING_MODULES = (
    "accelerators",
    "loggers",
    "plugins",
    "plugins/collectives",
    "plugins/environments",
    "strategies",
)


class PublicName(NamedTuple):
    """A public name of a package.

    Attributes:
        kind: what the name is the name of, such as "keyword" or "method".
        name: the name.
    """

    kind: str
    name: str


class Row(NamedTuple):
    """A row of a table of the page.

    Attributes:
        names: the names in the first cell.
        text: the second cell, which says what to write instead.
        codes: the pieces of code in the second cell.
    """

    names: list[str]
    text: str
    codes: list[str]


def stored_names(package: str) -> set[PublicName]:
    names: set[PublicName] = set()
    for line in (HERE / f"{package}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        kind, *words = line.split()
        names.update(PublicName(kind, word) for word in words)
    return names


def names_in_source(package: Path) -> set[PublicName]:
    if package.name == "accelerate":
        return set(names_of_accelerate(package))
    assert package.name == "lightning_fabric"
    return set(names_of_lightning(package))


def names_of_accelerate(package: Path) -> Iterator[PublicName]:
    yield from names_of_class(package / "accelerator.py", "Accelerator")
    for path in sorted(package.glob("commands/**/*.py")):
        yield from of_kind("command", first_arguments(path, "add_parser"))


def names_of_lightning(package: Path) -> Iterator[PublicName]:
    yield from names_of_class(package / "fabric.py", "Fabric")
    yield from of_kind("function", ["seed_everything", "is_wrapped"])
    for module in LIGHTNING_MODULES:
        yield from imported_names(package / module / "__init__.py")
    for path in sorted((package / "strategies").glob("*.py")):
        yield from of_kind("strategy", first_arguments(path, "register"))
        yield from of_kind("strategy", strategy_entries(path))
    cli = package / "cli.py"
    yield from of_kind("command", first_arguments(cli, "command"))
    yield from of_kind("option", first_arguments(cli, "option"))


def of_kind(kind: str, names: Iterator[str] | list[str]) -> Iterator[PublicName]:
    for name in names:
        yield PublicName(kind, name)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(path: Path) -> Iterator[PublicName]:
    """Yield the public names that a module imports from other modules."""
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if alias.name[0].isupper():
                yield PublicName("class", alias.name)
            elif not alias.name.startswith("_"):
                yield PublicName("function", alias.name)


def strategy_entries(path: Path) -> Iterator[str]:
    """Yield the names in the literal that a module assigns to ``entries``."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "entries":
            for name, _ in ast.literal_eval(node.value):
                yield name


def names_of_class(path: Path, class_name: str) -> Iterator[PublicName]:
    """Yield the arguments of a class's constructor, and its public properties and methods."""
    for node in class_definition(path, class_name).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name == "__init__":
            arguments = [*node.args.args[1:], *node.args.kwonlyargs]
            yield from of_kind("keyword", [argument.arg for argument in arguments])
        elif not node.name.startswith("_"):
            kind = "property" if is_property(node) else "method"
            yield PublicName(kind, node.name)


def class_definition(path: Path, class_name: str) -> ast.ClassDef:
    [definition] = [
        node
        for node in parse(path).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    return definition


def is_property(function: ast.FunctionDef) -> bool:
    for decorator in function.decorator_list:
        if re.match(r"property|\w+\.setter", ast.unparse(decorator)):
            return True
    return False


def first_arguments(path: Path, method: str) -> Iterator[str]:
    """Yield the literal first argument of each call of ``something.method("name", ...)``."""
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == method and node.args and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value


def rows(package: str) -> Iterator[Row]:
    """Yield the rows of the tables on the page of a package."""
    for line in PAGES[package].read_text().splitlines():
        if not line.startswith("| ") or line.count(" | ") < 2:
            continue
        first, second, _ = line.split(" | ", 2)
        text = second.strip("| ")
        yield Row(names_in_cell(first), text, codes_in_cell(text))


def codes_in_cell(cell: str) -> list[str]:
    return re.findall("`(.+?)`", cell)


def names_in_cell(cell: str) -> list[str]:
    """Return the names that the pieces of code in a cell begin with."""
    names = []
    for code in codes_in_cell(cell):
        match = re.match(r"(?:with |accelerate |fabric )?(?P<name>[\w-]*)", code)
        if match:
            names.append(match["name"])
    return names


def version_of(package: Path) -> str:
    metadata = next(package.parent.glob(f"{package.name}-*.dist-info"))
    return metadata.name.split("-")[1].removesuffix(".dist")


def main() -> None:
    """Store the names of the packages in the folders on the command line."""
    for folder in sys.argv[1:]:
        package = Path(folder)
        names_of_kinds: dict[str, list[str]] = {}
        for kind, name in sorted(names_in_source(package)):
            names_of_kinds.setdefault(kind, []).append(name)
        title = f"{package.name.replace('_', '-')} {version_of(package)}"
        lines = [f"# Public names of {title}, by python -m tests.compat.peers."]
        for kind, names in names_of_kinds.items():
            lines.append(" ".join([kind, *names]))
        (HERE / f"{package.name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
