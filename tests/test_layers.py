"""A file imports only from what lies below it: between the parts of the package, and inside each of them."""

import ast
import re
from pathlib import Path

import fabric

PACKAGE = Path(fabric.__file__).parent
# From the ground up; what stands on one line may not import each other. A file of a package may have its own place.
LAYERS = [
    ["errors", "_torch"],
    ["tree", "seed", "world", "diagnostics.stacks", "contract"],
    ["store"],
    ["precision", "accelerators", "environments"],
    ["communicators", "launchers"],
    ["diagnostics.recorder", "diagnostics.checker", "diagnostics.hang_report"],
    ["collectives", "loss_scaler", "clipping"],
    ["diagnostics"],
    ["runtime", "data", "metrics"],
    ["strategies", "checkpoint", "loggers", "preemption"],
    ["_plan", "plotting", "checkpoint.rotation"],
    ["bare", "module", "sequence_parallel", "weights"],
    ["_session", "ema"],
    ["timeline"],
    ["reporting"],
    ["_fabric"],
    ["doctor", "dry_run", "throughput"],
    ["cli", "legacy", "testing", "__init__"],
    ["__main__"],
]
# The files of each package: a file imports only from those before it. Its __init__ comes last.
ORDER = {
    "checkpoint": "state storage file async_save stored sharded restore save_load rotation",
    "collectives": "buckets objects ops",
    "communicators": "base process_group",
    "data": "state sharding copies agreed loader",
    "diagnostics": "stacks recorder checker hang_report bypass uneven training_checks",
    "launchers": "serialize base rank supervisor logs function script",
    "strategies": (
        "init_module fsdp_state fsdp_options base standalone parallel data_parallel ddp fsdp tp_plan model_parallel"
    ),
    "testing": "oracles base generators threads pool conformance plugin",
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
POSITION = {
    f"{package}.{name}": position
    for package, names in ORDER.items()
    for position, name in enumerate(names.split())
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__" or len(parts) == 1)


def package_of(name: str) -> str:
    return name.split(".")[0]


def level(name: str) -> int:
    return LEVEL.get(name, LEVEL[package_of(name)])


def imports(path: Path) -> set[str]:
    """Modules of fabric that a file imports, at its top or inside a function, as ``layer`` or ``layer.part``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fabric":
            found |= {alias.name if alias.name in LEVEL else "__init__" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fabric."):
            package = (node.module or "").removeprefix("fabric.")
            parts = {f"{package}.{alias.name}" for alias in node.names}
            found |= {part if part in POSITION else package for part in parts}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("fabric.")
                for alias in node.names
                if alias.name.startswith("fabric.")
            }
    return found


def above(path: Path) -> set[str]:
    """What a file imports from its own layer, but for its own package, or from one above."""
    own = module_name(path)
    return {
        name
        for name in imports(path)
        if package_of(name) != package_of(own) and level(name) >= level(own)
    }


def after(path: Path) -> set[str]:
    """What a file imports that comes after it in its package; an __init__ comes last."""
    own = module_name(path)
    siblings = {
        name for name in imports(path) if package_of(name) == package_of(own) and name != own
    }
    last = len(POSITION)
    return {name for name in siblings if POSITION.get(name, last) >= POSITION.get(own, last)}


def test_a_file_imports_only_from_lower_layers() -> None:
    assert {module_name(path): found for path in FILES if (found := above(path))} == {}


def test_every_file_of_a_package_has_its_place() -> None:
    inside = {
        module_name(path) for path in FILES if path.parent != PACKAGE and path.name != "__init__.py"
    }
    assert set(POSITION) == inside


def test_a_file_imports_only_from_files_before_it_in_its_package() -> None:
    assert {module_name(path): found for path in FILES if (found := after(path))} == {}


def test_no_file_imports_relatively() -> None:
    relative = [
        path
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not relative


def test_contributing_names_what_is_there_and_all_of_it() -> None:
    root = PACKAGE.parent
    named = set(
        re.findall(
            r"`([\w./-]+(?:\.py|\.toml|\.txt|/|/run))`", (root / "CONTRIBUTING.md").read_text()
        )
    )
    places = (root, PACKAGE, PACKAGE / "diagnostics")
    assert [
        name for name in sorted(named) if not any((place / name).exists() for place in places)
    ] == []
    parts = {f"{part.name}/" if part.is_dir() else part.name for part in PACKAGE.glob("*")}
    assert sorted(parts - named - {"py.typed", "__init__.py", "__pycache__/"}) == []
