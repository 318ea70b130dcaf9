"""What a type checker, and so an editor, says of programs that use fabric: the examples, the pages, and wrong names."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, get_args

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
SHOWN = ("setup", "setup_module", "setup_dataloaders", "all_reduce")
PROGRAM = """
import torch
from torch import Tensor, nn
from fabric import EntryPoint, Fabric, FabricModule

class Net(nn.Linear):
    def score(self, batch: Tensor) -> Tensor: ...

def train(fabric: Fabric, net: Net, name: str) -> None:
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
    reveal_type(fabric.all_reduce([3], reduce_op=torch.distributed.ReduceOp.SUM))
    reveal_type(fabric.broadcast(3))
    reveal_type(fabric.unwrap(net))
    reveal_type(fabric.gather("text"))
    net, _ = fabric.setup(net, optimizer)
    reveal_type(net.score)
    with fabric.no_backward_sync(net):
        fabric.clip_gradients(torch.compile(net), optimizer, max_norm=1.0)
    FabricModule.mark_forward_method(net, "score")
    Fabric(strategy=EntryPoint(name), accelerator=EntryPoint("tpu"), precision="bf16-mixed")
    Fabric(strategy="ddpp")  # wrong
    Fabric(accelerator="cdua")  # wrong
    Fabric(precision="bf16-mixd")  # wrong
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
    "list[int]",
    "int",
    "Net",
    "list[str] | None",
    "(batch: Tensor) -> Tensor",
]


class Remark(NamedTuple):
    """What pyright says of a place in a file: a severity, the line, the columns in it, and a text."""

    severity: str
    line: int
    columns: tuple[int, int]
    text: str

    @property
    def is_unknown(self) -> bool:
        return re.search(r'is ".*\b(Any|Unknown)\b', self.text) is not None


def check(folder: Path) -> dict[str, list[Remark]]:
    """What pyright says of the files in a folder."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "."]
    # pyright does not follow the import hook of an editable installation.
    config = {
        "typeCheckingMode": "standard",
        "reportPrivateImportUsage": False,
        "extraPaths": [str(ROOT)],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    found: dict[str, list[Remark]] = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        start = each["range"]["start"]
        end = each["range"]["end"]
        name = str(Path(each["file"]).relative_to(folder))
        columns = (
            start["character"],
            end["character"] if end["line"] == start["line"] else sys.maxsize,
        )
        if each.get("rule") != "reportMissingImports":
            found.setdefault(name, []).append(
                Remark(each["severity"], start["line"] + 1, columns, each["message"])
            )
    return found


def reveal(source: str) -> str:
    """A program that shows the types of what the named methods of a Fabric return, and of what they are given."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "fabric" and node.func.attr in SHOWN
    ]  # fmt: skip
    shown = [node for call in calls for node in (call, call.func.value, *call.args)]
    shown = [node.value if isinstance(node, ast.Starred) else node for node in shown]
    # Texts that begin at one place go from the outside inwards.
    places = [
        (node.lineno, node.col_offset, -(node.end_col_offset or 0), "reveal_type(")
        for node in shown
    ]
    places += [
        (node.end_lineno or 0, node.end_col_offset or 0, -sys.maxsize, ")") for node in shown
    ]
    lines = source.splitlines()
    for line, column, _, text in sorted(places, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Remark]]:
    folder = tmp_path_factory.mktemp("types")
    (folder / "program.py").write_text(PROGRAM)
    for path in (ROOT / "examples").rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(reveal(path.read_text()))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        name = "_".join(page.relative_to(ROOT).with_suffix(".py").parts)
        (folder / name).write_text(reveal(script(page)))
    return check(folder)


@pytest.mark.slow
def test_a_program_has_the_types_of_its_own_objects_and_wrong_names_are_errors(said) -> None:
    types = [each.text for each in said["program.py"] if each.severity == "information"]
    assert [
        re.sub(r'Type of ".*" is "(.*)"', r"\1", text, flags=re.DOTALL) for text in types
    ] == TYPES
    wrong = [
        number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")
    ]
    assert sorted({each.line for each in said["program.py"] if each.severity == "error"}) == wrong


@pytest.mark.slow
def test_the_examples_have_no_errors(said) -> None:
    examples = {name: remarks for name, remarks in said.items() if name.startswith("examples")}
    assert len(examples) > 3
    assert [
        (name, *each) for name in examples for each in said[name] if each.severity != "information"
    ] == []


@pytest.mark.slow
def test_what_is_set_up_and_reduced_in_examples_and_on_pages_has_a_type_where_what_is_given_has_one(
    said,
) -> None:
    count = 0
    untyped = []
    for name, remarks in said.items():
        types = [remark for remark in remarks if remark.severity == "information"]
        for call in (
            each
            for each in types
            if each.text.startswith(('Type of "fabric.', 'Type of "reveal_type(fabric).'))
        ):
            inside = [
                each
                for each in types
                if each is not call and each.line == call.line
                and call.columns[0] <= each.columns[0] and each.columns[1] <= call.columns[1]
            ]  # fmt: skip
            if not any(each.is_unknown for each in inside):
                count += 1
                untyped += [(name, call)] * call.is_unknown
    assert untyped == []
    assert count > 40


def test_the_names_that_editors_complete_are_those_of_the_tables() -> None:
    def names(alias: object) -> set:
        return {
            name
            for part in get_args(alias)
            for name in get_args(part) or {part}
            if isinstance(name, str | int)
        }

    assert names(StrategyName) == {"auto", *STRATEGIES}
    assert names(AcceleratorName) == {"auto", *ACCELERATORS}
    assert {str(name) for name in names(PrecisionName)} == {*PRECISIONS, *PRECISION_ALIASES}
    assert names(StartMethod) == {*LAUNCHERS}
    assert names(ReduceName) == {"avg", *(op.value for op in Reduce)}


def test_dir_of_a_fabric_shows_public_names_only() -> None:
    with Fabric(accelerator="cpu") as fabric:
        assert not [name for name in dir(fabric) if name.startswith("_")]
        assert {"setup", "all_reduce", "device"} <= set(dir(fabric))
