"""The loops of docs/mesh.md do what the page says, and its table of bytes is right."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import ModelParallelStrategy
from tests.ranks import run_in_ranks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mesh.md"
CODE_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGE_CODE = "\n".join(CODE_BLOCK.findall(PAGE.read_text()))
# The batch size of a process on a mesh, and under strategies whose ranks all have other batches.
BATCH_SIZES = {
    '4 // fabric.device_mesh["data_parallel"].size()': "4 // fabric.world_size",
    "batch_size=8": "batch_size=8 // fabric.world_size",
}


def execute_page(code: str = PAGE_CODE) -> SimpleNamespace:
    """Execute the code of the page and return its functions."""
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(code, namespace)
    return SimpleNamespace(**namespace)


def full_parameters(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def train(fabric: Fabric, loop: str) -> list[Tensor]:
    loop_of_page = getattr(execute_page(), loop)
    return full_parameters(loop_of_page(fabric))


def train_without_mesh(fabric: Fabric, loop: str) -> list[Tensor]:
    """Run a loop of the page with the batch size of a strategy that has no mesh."""
    code = PAGE_CODE
    for on_mesh, without_mesh in BATCH_SIZES.items():
        assert on_mesh in code
        code = code.replace(on_mesh, without_mesh)
    loop_of_page = getattr(execute_page(code), loop)
    return full_parameters(loop_of_page(fabric))


@pytest.mark.parametrize(("strategy", "ranks"), [("planned", 4), ("by_function", 2)])
def test_the_loop_ends_with_the_parameters_of_the_plain_loop(strategy: str, ranks: int) -> None:
    page = execute_page()
    expected = full_parameters(page.plain())
    make_strategy = getattr(page, strategy)
    for actual in run_in_ranks(train, "on_mesh", ranks=ranks, strategy=make_strategy()):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_loop_over_split_sequences_is_that_of_one_process() -> None:
    [expected] = run_in_ranks(train, "in_parts", ranks=1, strategy="auto")
    strategy = ModelParallelStrategy(sequence_parallel_size=2)
    for actual in run_in_ranks(train, "in_parts", strategy=strategy):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2)])
def test_without_a_mesh_the_loops_end_with_the_same_parameters(strategy: str, ranks: int) -> None:
    expected = full_parameters(execute_page().plain())
    results = run_in_ranks(train_without_mesh, "on_mesh", ranks=ranks, strategy=strategy)
    for actual in results:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    (expected,) = run_in_ranks(train, "in_parts", ranks=1, strategy="auto")
    results = run_in_ranks(train_without_mesh, "in_parts", ranks=ranks, strategy=strategy)
    for actual in results:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_step_hands_as_many_bytes_to_collectives_as_the_table_says() -> None:
    layers = 2
    width = 16
    batch = 4
    length = 8
    sizes = [str(layers), str(width), str(batch), str(length)]
    command = [sys.executable, "-m", "tests.scripts.mesh_bytes", *sizes]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True
    )

    vocabulary = 96
    positions = 32
    bytes_of_number = 4
    activation = batch * length * width
    logits = batch * length * vocabulary
    split = (4 * width * width + 4 * width * width + 4 * width + 4 * width * width) // 2
    blocks = layers * (split + width + 4 * width)
    root = vocabulary * width + positions * width + 2 * width + vocabulary * width // 2
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "tensor_parallel": bytes_of_number * ((6 * layers + 1) * activation + logits),
        "data_parallel": bytes_of_number * (3 * blocks + 2 * root),
        "replicate": bytes_of_number * (blocks + root) // 2,
    }
