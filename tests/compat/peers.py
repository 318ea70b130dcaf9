"""Public names of Accelerate and Lightning Fabric, each of which has a row in docs/coming-from.md.

``python -m tests.compat.peers FOLDER ...`` stores those of the packages in these folders; nothing
of them is imported.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "coming-from.md"
SECTIONS = {
    "accelerate": "From Hugging Face Accelerate",
    "lightning_fabric": "From Lightning Fabric",
}
Names = set[tuple[str, str]]  # of a kind, such as "keyword", and the name


def stored(package: str) -> Names:
    lines = [
        line.split()
        for line in (HERE / f"{package}.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    return {(kind, name) for kind, *names in lines for name in names}


def read(package: Path) -> Names:
    """The names in the source of a package."""
    return set({"accelerate": accelerate, "lightning_fabric": lightning}[package.name](package))


def accelerate(package: Path) -> Iterator[tuple[str, str]]:
    yield from members(package / "accelerator.py", "Accelerator")
    for path in sorted(package.glob("commands/**/*.py")):
        yield from (("command", name) for name in calls(path, "add_parser"))


def lightning(package: Path) -> Iterator[tuple[str, str]]:
    yield from members(package / "fabric.py", "Fabric")
    yield from (("function", name) for name in ("seed_everything", "is_wrapped"))
    for part in (
        "accelerators",
        "loggers",
        "plugins",
        "plugins/collectives",
        "plugins/environments",
        "strategies",
    ):
        for node in ast.walk(parsed(package / part / "__init__.py")):
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if not alias.name.startswith("_")]
                yield from (("class" if name[0].isupper() else "function", name) for name in names)
    for path in sorted((package / "strategies").glob("*.py")):
        yield from (("strategy", name) for name in calls(path, "register"))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "entries":
                yield from (("strategy", name) for name, _ in ast.literal_eval(node.value))
    yield from (("command", name) for name in calls(package / "cli.py", "command"))
    yield from (("option", name) for name in calls(package / "cli.py", "option"))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def members(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """Arguments of a class's constructor, its public properties and methods."""
    [found] = [
        node for node in parsed(path).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (
                ("keyword", each.arg) for each in (*node.args.args[1:], *node.args.kwonlyargs)
            )
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            is_property = any(
                re.match(r"property|\w+\.setter", ast.unparse(each)) for each in node.decorator_list
            )
            yield "property" if is_property else "method", node.name


def calls(path: Path, function: str) -> Iterator[str]:
    """The names that calls of ``something.function("name", ...)`` begin with."""
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == function
        ):
            yield from (
                argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
            )


def rows(package: str) -> Iterator[tuple[list[str], str, list[str]]]:
    """Of each row of the tables of a section: the names in its first cell, its second one, and the code in that."""
    section = PAGE.read_text().partition(f"## {SECTIONS[package]}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| ") and line.count(" | ") >= 2:
            first, second, _ = (cell.strip("| ") for cell in line.split(" | ", 2))
            codes = (
                re.match(r"(?:with |accelerate |fabric )?([\w-]*)", code)
                for code in re.findall("`(.+?)`", first)
            )
            yield [code[1] for code in codes if code], second, re.findall("`(.+?)`", second)


def main() -> None:
    for package in map(Path, sys.argv[1:]):
        names = read(package)
        version = (
            next(package.parent.glob(f"{package.name}-*.dist-info"))
            .name.split("-")[1]
            .removesuffix(".dist")
        )
        lines = [
            f"# Public names of {package.name.replace('_', '-')} {version}, by python -m tests.compat.peers."
        ]
        for kind in sorted({kind for kind, _ in names}):
            lines.append(" ".join([kind, *sorted(name for each, name in names if each == kind)]))
        (HERE / f"{package.name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
