"""A file imports only from lower layers, and inside a package there are no cycles."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fabric

PACKAGE = Path(fabric.__file__).parent
# From the ground up; what stands on one line may not import each other.
LAYERS = [
    ["errors", "_torch", "_late"],
    ["tree", "seed", "world", "_stacks"],
    ["precision", "initialization", "accelerators", "environments"],
    ["communicators", "launchers"],
    ["collectives", "scaling", "clipping", "data", "deferred", "pace", "watchdog"],
    ["runtime", "_evaluation"],
    ["strategies", "checkpoint", "loggers"],
    ["_names"],
    ["_plan"],
    ["forward_guard"],
    ["module"],
    ["first_steps", "joining"],
    ["_checks", "_session"],
    ["_fabric"],
    ["cli", "legacy", "testing", "__init__"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__" or len(parts) == 1)


def imports(path: Path) -> set[str]:
    """Modules of fabric that a file imports, at its top or inside a function, as ``layer`` or ``layer.part``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fabric":
            found |= {alias.name if alias.name in LEVEL else "__init__" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fabric."):
            found.add((node.module or "").removeprefix("fabric."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("fabric.") for alias in node.names if alias.name.startswith("fabric.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_from_lower_layers(path: Path) -> None:
    own = module_name(path).split(".")[0]
    above = {name for name in imports(path) if (layer := name.split(".")[0]) != own and LEVEL[layer] >= LEVEL[own]}
    assert not above, f"{path.name} is in layer {LEVEL[own]} and imports {above} from there or above"


def test_no_package_has_a_cycle_inside() -> None:
    graph = {module_name(path): imports(path) - {module_name(path)} for path in FILES}
    assert list(TopologicalSorter(graph).static_order())


def test_no_file_imports_relatively() -> None:
    relative = [
        path
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not relative
