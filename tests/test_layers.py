"""A file imports only from lower layers, and inside a package only from the files before it."""

import ast
import re
from pathlib import Path

import fabric

PACKAGE = Path(fabric.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The layers from the lowest to the highest. The entries of one layer do not import each other. A
# file of a package is in the layer of its package, unless the file has its own entry.
LAYERS = [
    ["errors", "_torch", "diagnostics.tested_versions", "migration"],
    [
        "tree",
        "world",
        "hooks",
        "communicators.call_site",
        "diagnostics.stacks",
        "diagnostics.report_signal",
        "contract",
    ],
    ["store", "accelerators", "environments"],
    ["seed", "precision"],
    ["communicators", "launchers"],
    [
        "diagnostics.recorder",
        "diagnostics.rank_state",
        "diagnostics.deadlocks",
        "diagnostics.checker",
        "diagnostics.hang_report",
        "diagnostics.published_states",
        "diagnostics.rank_observer",
        "diagnostics.hang_reporter",
    ],
    [
        "communicators.recorded",
        "collectives",
        "optim.gradients",
        "optim.gradient_watch",
        "optim.loss_scaler",
        "optim.clipping",
    ],
    ["diagnostics", "optim.closures"],
    ["runtime", "data"],
    ["strategies", "checkpoint", "loggers", "launchers.preemption"],
    ["_plan", "checkpoint.keeper"],
    [
        "optim.parameter_lists",
        "module",
        "strategies.sequence_parallel",
        "optim.weight_sums",
        "optim.loss_weights",
    ],
    ["_session", "optim.ema", "optim.step_guard"],
    ["tools._torch"],
    ["tools.records"],
    ["tools.timeline", "tools.digest", "tools.fingerprint"],
    ["_fabric"],
    ["tools"],
    ["legacy", "testing", "plotting", "__init__"],
    ["cli"],
    ["__main__"],
]
# The files of each package, from the lowest to the highest. An __init__ comes after all files of
# its package.
ORDER = {
    "checkpoint": (
        "encoding full_tensors state storage atomic agreement file async_save safetensors "
        "sharded_reader sharded adapters pretrained save_pretrained consolidate restore health "
        "save_load keeper"
    ),
    "collectives": "buckets objects ops batch_norm",
    "communicators": "call_site base process_group checked recorded",
    "data": (
        "metrics position sharding spec saved_position copies lockstep loader gather accumulate "
        "join"
    ),
    "diagnostics": (
        "tested_versions digest stacks report_signal recorder rank_state deadlocks checker "
        "pass_checks hang_report published_states rank_observer hang_reporter drift bypass "
        "pass_order replicas batch_counts step_comparison uneven_inputs gradient_reads "
        "clipping_check evaluation_mode_check unscaled_loss_check training_checks equal_draws "
        "loss_reduction loss_checks hand_steps"
    ),
    "launchers": (
        "serialize base private_file terminal rank preemption supervisor global_state calling_rank "
        "logs fork_server function script agent trained_weights"
    ),
    "loggers": "loggers kubeflow progress",
    "optim": (
        "gradients gradient_watch loss_scaler clipping closures parameter_lists weight_sums "
        "loss_weights ema step_guard"
    ),
    "strategies": (
        "init_module base standalone parallel data_parallel ddp "
        "fsdp.wrapping fsdp.state fsdp.lent_gradients fsdp.unreduced "
        "fsdp.sharding fsdp.parameters fsdp.forward fsdp.operators fsdp.api fsdp expert_styles "
        "tp_plan agreement split_comparison model_parallel sequence_parallel"
    ),
    "testing": (
        "oracles stacks rank_warnings base generators threads patches state time_limits pool "
        "conformance contracts plugin"
    ),
    "tools": (
        "_torch records digest fingerprint timeline throughput plotting doctor dry_run run_diff"
    ),
}

# The facade has methods that call tools, and imports the tools inside of these methods.
LAZY_FACADE = {"_fabric"}
MAY_IMPORT_TOOLS = LAZY_FACADE | {
    "tools",
    "loggers",
    "cli",
    "plotting",
    "legacy",
    "testing",
    "__init__",
    "__main__",
}


def layer_numbers() -> dict[str, int]:
    numbers = {}
    for number, names in enumerate(LAYERS):
        for name in names:
            numbers[name] = number
    return numbers


def file_positions() -> dict[str, int]:
    positions = {}
    for package, names in ORDER.items():
        for position, name in enumerate(names.split()):
            positions[f"{package}.{name}"] = position
    return positions


LAYER = layer_numbers()
POSITION = file_positions()


def module_name(path: Path) -> str:
    """Return the name of a file without ``fabric.``.

    The name of an ``__init__`` is the name of its package.
    """
    names = path.relative_to(PACKAGE).with_suffix("").parts
    if names[-1] == "__init__" and len(names) > 1:
        names = names[:-1]
    return ".".join(names)


def package_of(name: str) -> str:
    return name.split(".")[0]


def layer_of(name: str) -> int:
    if name in LAYER:
        return LAYER[name]
    return LAYER[package_of(name)]


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules_of_import(node: ast.Import) -> set[str]:
    """Return the modules of fabric of an ``import fabric.module``."""
    modules = set()
    for alias in node.names:
        if alias.name.startswith("fabric."):
            modules.add(alias.name.removeprefix("fabric."))
    return modules


def modules_of_import_from(node: ast.ImportFrom) -> set[str]:
    """Return the modules of fabric of a ``from fabric.module import name``.

    The name may be a submodule, or an object of the module.
    """
    module = node.module or ""
    if module != "fabric" and not module.startswith("fabric."):
        return set()
    modules = set()
    for alias in node.names:
        submodule = f"{module}.{alias.name}".removeprefix("fabric.")
        if is_module(submodule):
            modules.add(submodule)
        elif module == "fabric":
            modules.add("__init__")
        else:
            modules.add(module.removeprefix("fabric."))
    return modules


def imported_modules(path: Path) -> set[str]:
    """Return the modules of fabric that a file imports, at its top or inside a function."""
    modules = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            modules |= modules_of_import(node)
        elif isinstance(node, ast.ImportFrom):
            modules |= modules_of_import_from(node)
    return modules


def imports_from_above(path: Path) -> set[str]:
    """Return the imports of a file from its layer or a higher layer, except from its package."""
    importer = module_name(path)
    names = set()
    for name in imported_modules(path):
        is_elsewhere = package_of(name) != package_of(importer)
        if is_elsewhere and layer_of(name) >= layer_of(importer):
            names.add(name)
    return names


def imports_from_behind(path: Path) -> set[str]:
    """Return the imports of a file from files of its package that do not come before it."""
    importer = module_name(path)
    last = len(POSITION)
    position_of_importer = POSITION.get(importer, last)
    names = set()
    for name in imported_modules(path):
        is_sibling = package_of(name) == package_of(importer) and name != importer
        if is_sibling and POSITION.get(name, last) >= position_of_importer:
            names.add(name)
    return names


def test_a_file_imports_only_from_lower_layers() -> None:
    for path in FILES:
        assert imports_from_above(path) == set(), module_name(path)


def test_the_core_imports_no_tool() -> None:
    for path in FILES:
        importer = module_name(path)
        if package_of(importer) in MAY_IMPORT_TOOLS:
            continue
        for name in imported_modules(path):
            assert package_of(name) != "tools", f"{importer} imports {name}"


def test_the_facade_imports_tools_only_inside_functions() -> None:
    for name in LAZY_FACADE:
        tree = syntax_tree(PACKAGE / f"{name}.py")
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                assert not module.startswith("fabric.tools"), name


def test_every_file_of_a_package_has_a_position() -> None:
    names = set()
    for path in FILES:
        is_in_package = path.parent != PACKAGE
        is_nested = path.parent.parent != PACKAGE
        if is_in_package and (is_nested or path.name != "__init__.py"):
            names.add(module_name(path))
    assert set(POSITION) == names


def test_a_file_imports_only_from_files_before_it_in_its_package() -> None:
    for path in FILES:
        assert imports_from_behind(path) == set(), module_name(path)


def test_no_file_imports_relatively() -> None:
    for path in FILES:
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, module_name(path)


def contributing() -> str:
    return (PACKAGE.parent / "CONTRIBUTING.md").read_text()


def test_contributing_names_only_files_that_exist() -> None:
    folders = [PACKAGE.parent, PACKAGE, PACKAGE / "diagnostics"]
    for name in re.findall(r"`([\w./-]+(?:\.py|\.toml|\.txt|/|/run))`", contributing()):
        exists = [(folder / name).exists() for folder in folders]
        assert any(exists), name
