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
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from fabric import Fabric
from fabric.precision import PRECISIONS, LossScale
from fabric.testing import check_checkpoint_io, check_launcher, check_precision
from tests.ranks import run_in_ranks

PAGES = Path(__file__).parents[1] / "docs" / "how-to"


def definitions(page: str) -> str:
    """Return the blocks of a page up to the last block that defines a class."""
    text = (PAGES / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    while not re.search(r"^class ", blocks[-1], re.MULTILINE):
        blocks.pop()
    return "\n".join(blocks)


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


# The ranks of each launch are new processes that import torch.
@pytest.mark.slow
def test_the_launcher_conforms(page_module: Callable[[str], Any]) -> None:
    check_launcher(page_module("write-a-launcher.md").PoolLauncher())


def test_the_environment_is_found(
    page_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = page_module("write-a-launcher.md").FarmEnvironment()
    monkeypatch.setenv("FARM_TASK", "0")
    monkeypatch.setenv("FARM_TASKS", "1")
    monkeypatch.setenv("FARM_TASKS_PER_NODE", "1")
    monkeypatch.setenv("FARM_HEAD", "node-0")
    with Fabric(accelerator="cpu", environment=environment) as fabric:
        fabric.launch()
        assert fabric.world_size == 1
        assert "farm" in fabric.describe()


# -- the precision of the page against its definition ---------------------------------------------

INIT_SCALE = 2.0**10


def make_layer() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def global_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(4):
        inputs = torch.randn(8, 4, generator=generator)
        targets = torch.randn(8, 2, generator=generator)
        batches.append((inputs, targets))
    return batches


def train_on_grid(job: Fabric, is_mixed: bool) -> dict[str, Tensor]:
    """Return weight and bias of this rank after training with the precision of the page."""
    job.teardown()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(definitions("write-a-precision.md"), names)
    fields: dict[str, Any] = {}
    if is_mixed:
        mixed = PRECISIONS["16-mixed"]
        fields["compute_dtype"] = mixed.compute_dtype
        fields["output_dtype"] = mixed.output_dtype
        fields["loss_scale"] = LossScale(init_scale=INIT_SCALE)
    precision = names["GridPrecision"](name="grid", **fields)
    with Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision) as fabric:
        fabric.launch()
        layer = make_layer()
        model = fabric.setup_module(layer)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, targets in global_batches():
            rank_inputs = inputs.chunk(2)[fabric.global_rank]
            rank_targets = targets.chunk(2)[fabric.global_rank]
            loss = mse_loss(model(rank_inputs), rank_targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        weight = layer.parametrizations["weight"].original
        return {"weight": weight.detach().clone(), "bias": layer.bias.detach().clone()}


def grid_by_definition(is_mixed: bool) -> dict[str, Tensor]:
    """Return weight and bias after training on whole batches in one process."""
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scale = INIT_SCALE if is_mixed else 1.0
    for inputs, targets in global_batches():
        step = layer.weight.detach().abs().max() / 127
        on_grid = torch.round(layer.weight.detach() / step) * step
        weight = on_grid.requires_grad_()  # its gradient goes to the weight unchanged
        with torch.autocast("cpu", torch.float16, enabled=is_mixed):
            output = linear(inputs, weight, layer.bias)
        (mse_loss(output.float(), targets) * scale).backward()
        layer.weight.grad = weight.grad
        for parameter in layer.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        optimizer.zero_grad()
    return {"weight": layer.weight.detach(), "bias": layer.bias.detach()}


@pytest.mark.parametrize(("is_mixed", "tolerance"), [(False, 1e-6), (True, 2e-4)])
def test_the_precision_equals_its_definition_on_two_processes(
    is_mixed: bool, tolerance: float
) -> None:
    expected = grid_by_definition(is_mixed)
    for actual in run_in_ranks(train_on_grid, is_mixed):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
