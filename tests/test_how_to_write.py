"""The parts that the pages docs/how-to/write-*.md build pass the suites that the pages name."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fabric import Fabric
from fabric.testing import check_checkpoint_io, check_launcher, check_precision

PAGES = Path(__file__).parents[1] / "docs" / "how-to"


def definitions(page: str) -> str:
    """Return the blocks of a page up to the last that defines a class."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE
    )
    with_class = [block for block in blocks if re.search(r"^class ", block, re.MULTILINE)]
    return "\n".join(blocks[: blocks.index(with_class[-1]) + 1])


@pytest.fixture
def page_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import the definitions of a page, as ranks do that unpickle an object of its classes."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def load(page: str) -> ModuleType:
        name = page.removesuffix(".md").replace("-", "_")
        (folder / f"{name}.py").write_text(definitions(page))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_the_precision_conforms(page_module: Callable[[str], Any]) -> None:
    check_precision(page_module("write-a-precision.md").GridPrecision(name="grid"))


def test_the_checkpoint_format_conforms(page_module: Callable[[str], Any], tmp_path: Path) -> None:
    checkpoint_io = page_module("write-a-checkpoint-format.md").CompressedCheckpoint()
    check_checkpoint_io(checkpoint_io, tmp_path)


def test_the_launcher_conforms(page_module: Callable[[str], Any]) -> None:
    check_launcher(page_module("write-a-launcher.md").PoolLauncher())


def test_the_environment_is_found(
    page_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = page_module("write-a-launcher.md").FarmEnvironment()
    for name, value in (
        ("FARM_TASK", "0"),
        ("FARM_TASKS", "1"),
        ("FARM_TASKS_PER_NODE", "1"),
        ("FARM_HEAD", "node-0"),
    ):
        monkeypatch.setenv(name, value)
    with Fabric(accelerator="cpu", environment=environment) as fabric:
        fabric.launch()
        assert fabric.world_size == 1
        assert "farm" in fabric.describe()
