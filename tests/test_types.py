"""What a type checker, and so an editor, says of the examples, the pages and wrong names."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, TypeGuard, get_args

import pytest

from fabric import Fabric
from fabric._plan import STRATEGIES
from fabric.accelerators import ACCELERATORS, AcceleratorName
from fabric.communicators import Reduce
from fabric.communicators.base import ReduceName
from fabric.launchers import LAUNCHERS, StartMethod
from fabric.precision import PRECISION_ALIASES, PRECISIONS, PrecisionName
from fabric.strategies import StrategyName
from tests.test_docs import script

ROOT = Path(__file__).parents[1]
# The methods of Fabric whose calls in examples and on pages must have types.
TYPED_METHODS = ("setup", "setup_module", "setup_dataloaders", "all_reduce")
# Pages whose loops have no error in pyright's strict mode, except for gaps in torch's annotations.
STRICT_PAGES = ("README.py", "docs_tutorial.py")
STRICT = """
# pyright: strict, reportUnknownMemberType=false, reportPossiblyUnboundVariable=false
"""
PROGRAM = """
from collections.abc import Iterator
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from fabric import Fabric, FabricModule

class TokenLoader(DataLoader[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:  # type: ignore
        return super().__iter__()

class Net(nn.Linear):
    def score(self, batch: Tensor) -> Tensor:
        return self(batch)

def count(fabric: Fabric, net: Net) -> int:
    return fabric.world_size

def train(fabric: Fabric, net: Net, name: str, data: Dataset[Tensor]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    reveal_type(fabric.setup(net))
    reveal_type(fabric.setup_module(net))
    reveal_type(fabric.setup(net, optimizer))
    reveal_type(fabric.setup(net, optimizer, scheduler=scheduler))
    reveal_type(fabric.setup(torch.compile(net)))
    reveal_type(fabric.setup(torch.compile(net), optimizer))
    reveal_type(fabric.setup_optimizers(optimizer))
    reveal_type(fabric.setup_optimizers(optimizer, optimizer, scheduler=scheduler))
    reveal_type(fabric.all_reduce({"loss": torch.ones(1)}, reduce_op="sum"))
    reveal_type(fabric.all_gather(torch.ones(1), concat=True))
    reveal_type(fabric.all_gather(torch.ones(1), ragged=True))
    reveal_type(fabric.all_gather({"loss": torch.ones(1)}))
    reveal_type(fabric.all_gather((torch.ones(1), torch.ones(2)), concat=True))
    reveal_type(fabric.all_gather(1.5))
    reveal_type(fabric.all_reduce([3], reduce_op=torch.distributed.ReduceOp.SUM))
    reveal_type(fabric.broadcast(3))
    reveal_type(fabric.broadcast({"path": "out"}))
    reveal_type(fabric.gather_for_metrics({"loss": torch.ones(1)}))
    reveal_type(fabric.unwrap(net))
    reveal_type(fabric.gather("text"))
    net, _ = fabric.setup(net, optimizer)
    reveal_type(net.score)
    with fabric.no_backward_sync(net):
        fabric.clip_gradients(torch.compile(net), optimizer, max_norm=1.0)
    FabricModule.mark_forward_method(net, "score")
    Fabric(strategy=name, accelerator=name, precision=name)
    reveal_type(fabric.launch(count, net))
    reveal_type(fabric.launch(count, net, return_all=True))
    loader = fabric.setup_dataloaders(TokenLoader(data))
    reveal_type(loader)
    for batch, last in fabric.accumulate(loader, steps=2):
        reveal_type(batch)
    Fabric(strategy=3)  # wrong
    Fabric(precision=8)  # wrong
    Fabric(launcher="spwan")  # wrong
    fabric.all_reduce(1.0, reduce_op="maen")  # wrong
    fabric.setup(optimizer)  # wrong
    fabric.setup_dataloaders(net)  # wrong
"""
TYPES = [
    "Net",
    "Net",
    "tuple[Net, SGD]",
    "tuple[Net, SGD, StepLR]",
    "FabricModule",
    "tuple[FabricModule, SGD]",
    "SGD",
    "tuple[SGD, SGD, StepLR]",
    "dict[str, Tensor]",
    "Tensor",
    "list[Tensor]",
    "dict[str, Tensor]",
    "tuple[Tensor, Tensor]",
    "list[float]",
    "list[int]",
    "int",
    "dict[str, str]",
    "dict[str, Tensor]",
    "Net",
    "list[str] | None",
    "(batch: Tensor) -> Tensor",
    "int",
    "list[int]",
    "FabricDataLoader[Tensor]",
    "Tensor",
]


class Remark(NamedTuple):
    """A remark of pyright: its severity, the line and columns it is about, and its text."""

    severity: str
    line: int
    first_column: int
    last_column: int
    text: str

    @property
    def is_unknown(self) -> bool:
        # torch does not declare the type of the batches of its loaders.
        if re.search(r'is "(list\[)?FabricDataLoader\[Any\]', self.text):
            return False
        return re.search(r'is ".*\b(Any|Unknown)\b', self.text) is not None

    @property
    def is_of_fabric(self) -> bool:
        return self.text.startswith(('Type of "fabric.', 'Type of "reveal_type(fabric).'))

    def contains(self, remark: "Remark") -> bool:
        if remark is self or remark.line != self.line:
            return False
        return self.first_column <= remark.first_column and remark.last_column <= self.last_column


class Insertion(NamedTuple):
    """A text to insert in a program. Insertions at the same column apply in the order of `rank`."""

    line: int
    column: int
    rank: int
    text: str


def check(folder: Path) -> dict[str, list[Remark]]:
    """Return by file the remarks of pyright on the files in a folder."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."]
    # The tree of these tests, whichever one is installed.
    config = {
        "typeCheckingMode": "standard",
        "reportPrivateImportUsage": False,
        "extraPaths": [str(ROOT)],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    remarks: dict[str, list[Remark]] = {}
    for diagnostic in json.loads(done.stdout)["generalDiagnostics"]:
        if diagnostic.get("rule") == "reportMissingImports":
            continue
        start = diagnostic["range"]["start"]
        end = diagnostic["range"]["end"]
        last_column = sys.maxsize
        if end["line"] == start["line"]:
            last_column = end["character"]
        remark = Remark(
            diagnostic["severity"],
            start["line"] + 1,
            start["character"],
            last_column,
            diagnostic["message"],
        )
        name = str(Path(diagnostic["file"]).relative_to(folder))
        remarks.setdefault(name, []).append(remark)
    return remarks


def is_typed_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Say whether a node calls a method of a Fabric whose result must have a type."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return ast.unparse(node.func.value) == "fabric" and node.func.attr in TYPED_METHODS


def revealed_expressions(source: str) -> list[ast.expr]:
    """Return the calls of a Fabric's typed methods, with the Fabric and the arguments of each."""
    expressions: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if not is_typed_call(node):
            continue
        assert isinstance(node.func, ast.Attribute)
        expressions += [node, node.func.value]
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                argument = argument.value
            expressions.append(argument)
    return expressions


def reveal(source: str) -> str:
    """Return a program that reveals the types of calls of a Fabric and of their arguments."""
    insertions = []
    for node in revealed_expressions(source):
        end_line = node.end_lineno or 0
        end_column = node.end_col_offset or 0
        # Texts that begin at the same column go from the outside inwards.
        insertions.append(Insertion(node.lineno, node.col_offset, -end_column, "reveal_type("))
        insertions.append(Insertion(end_line, end_column, -sys.maxsize, ")"))
    lines = source.splitlines()
    # Insert from the end, so that the columns of the insertions before stay right.
    for insertion in sorted(insertions, reverse=True):
        line = lines[insertion.line - 1]
        before = line[: insertion.column]
        after = line[insertion.column :]
        lines[insertion.line - 1] = f"{before}{insertion.text}{after}"
    return "\n".join(lines)


def lines_marked_wrong() -> set[int]:
    """Return the numbers of the lines of the program that must be errors."""
    lines = enumerate(PROGRAM.splitlines(), 1)
    return {number for number, line in lines if line.endswith("# wrong")}


@pytest.fixture(scope="module")
def remarks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Remark]]:
    folder = tmp_path_factory.mktemp("types")
    (folder / "program.py").write_text(PROGRAM)
    for path in (ROOT / "examples").rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(reveal(path.read_text()))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        name = "_".join(page.relative_to(ROOT).with_suffix(".py").parts)
        source = reveal(script(page))
        if name in STRICT_PAGES:
            source += STRICT
        (folder / name).write_text(source)
    return check(folder)


@pytest.mark.slow
def test_a_program_has_the_types_of_its_own_objects_and_wrong_names_are_errors(remarks) -> None:
    types = []
    wrong_lines = set()
    for remark in remarks["program.py"]:
        if remark.severity == "information":
            types.append(re.sub(r'Type of ".*" is "(.*)"', r"\1", remark.text, flags=re.DOTALL))
        elif remark.severity == "error":
            wrong_lines.add(remark.line)
    assert types == TYPES
    assert wrong_lines == lines_marked_wrong()


@pytest.mark.slow
def test_the_examples_have_no_errors(remarks) -> None:
    examples = [name for name in remarks if name.startswith("examples")]
    assert len(examples) > 3
    for name in examples:
        for remark in remarks[name]:
            assert remark.severity == "information", (name, remark)


@pytest.mark.slow
def test_the_loops_of_the_readme_and_the_tutorial_have_no_errors_in_strict_mode(remarks) -> None:
    for name in STRICT_PAGES:
        assert remarks[name]
        for remark in remarks[name]:
            # torch takes a list as a dataset, and its annotations do not say so.
            if "DataLoader[Unknown]" in remark.text or "@DataLoader" in remark.text:
                continue
            assert remark.severity == "information", (name, remark)


@pytest.mark.slow
def test_mypy_sees_the_same_types_and_errors_and_accepts_the_loops(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "readme.py").write_text(script(ROOT / "README.md"))
    (tmp_path / "tutorial.py").write_text(script(ROOT / "docs" / "tutorial.md"))
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--follow-imports=silent", "."]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment
    )
    types = re.findall(r'Revealed type is "(?:def )?(.*)"', done.stdout)
    assert [re.sub(r"\b(?:\w+\.)+", "", text) for text in types] == TYPES
    wrong_lines = set()
    for name, line, text in re.findall(r"(\w+)\.py:(\d+): error: (.*)", done.stdout):
        # torch takes a list as a dataset, and its annotations do not say so.
        if '"DataLoader" has incompatible type "list' in text:
            continue
        assert name == "program", (name, line, text)
        wrong_lines.add(int(line))
    assert wrong_lines == lines_marked_wrong()


@pytest.mark.slow
def test_calls_in_examples_and_on_pages_have_a_type_where_their_arguments_have_one(
    remarks,
) -> None:
    count = 0
    for name, remarks_of_file in remarks.items():
        types = [remark for remark in remarks_of_file if remark.severity == "information"]
        for call in types:
            if call.is_of_fabric and has_typed_arguments(call, types):
                count += 1
                assert not call.is_unknown, (name, call)
    assert count > 40


def has_typed_arguments(call: Remark, types: list[Remark]) -> bool:
    """Say whether every expression that is revealed inside of a call has a type."""
    arguments = filter(call.contains, types)
    return not any(argument.is_unknown for argument in arguments)


def names_of(alias: object) -> set[str]:
    """Return the names in the literals of a union."""
    names = set()
    for member in get_args(alias):
        if member is str:
            continue  # any other name
        # A literal that stands alone has no arguments but its names.
        for name in get_args(member) or (member,):
            if isinstance(name, str | int):
                names.add(str(name))
    return names


def test_the_names_that_editors_complete_are_those_of_the_tables() -> None:
    assert names_of(StrategyName) == {"auto", *STRATEGIES}
    assert names_of(AcceleratorName) == {"auto", *ACCELERATORS}
    assert names_of(PrecisionName) == {*PRECISIONS, *PRECISION_ALIASES}
    assert names_of(StartMethod) == {*LAUNCHERS}
    assert names_of(ReduceName) == {"avg", *(op.value for op in Reduce)}


def test_dir_of_a_fabric_shows_public_names_only() -> None:
    with Fabric(accelerator="cpu") as fabric:
        names = dir(fabric)
    for name in names:
        assert not name.startswith("_")
    assert {"setup", "all_reduce", "device"} <= set(names)
