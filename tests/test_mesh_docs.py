"""The loops of docs/mesh.md do what the page says, and so does its table of bytes."""

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
CODE = "\n".join(
    re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "mesh.md").read_text(), re.DOTALL | re.MULTILINE
    )
)


def page() -> SimpleNamespace:
    names: dict[str, Any] = {"__name__": "page"}
    exec(CODE, names)
    return SimpleNamespace(**names)


def whole(model: nn.Module) -> Tensor:
    return torch.cat(
        [full_tensor(parameter.detach()).flatten() for parameter in model.parameters()]
    )


def trained(fabric: Fabric, loop: str = "on_mesh") -> Tensor:
    return whole(getattr(page(), loop)(fabric))


@pytest.mark.parametrize(("way", "ranks"), [("planned", 4), ("by_function", 2)])
def test_the_loop_ends_with_the_parameters_of_the_plain_one(way: str, ranks: int) -> None:
    here = page()
    expected = whole(here.plain())
    for actual in run_in_ranks(trained, ranks=ranks, strategy=getattr(here, way)()):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_loop_over_sequences_in_parts_is_that_of_one_process() -> None:
    [expected] = run_in_ranks(trained, "in_parts", ranks=1, strategy="auto")
    for actual in run_in_ranks(
        trained, "in_parts", strategy=ModelParallelStrategy(sequence_parallel_size=2)
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_step_hands_as_many_bytes_to_collectives_as_the_table_says() -> None:
    layers = 2
    width = 16
    batch = 4
    length = 8
    command = [
        sys.executable,
        "-m",
        "tests.scripts.mesh_bytes",
        *map(str, (layers, width, batch, length)),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )

    vocabulary = 96
    positions = 32
    number = 4
    x = batch * length * width
    split = (4 * width * width + 4 * width * width + 4 * width + 4 * width * width) // 2
    blocks = layers * (split + width + 4 * width)
    rest = vocabulary * width + positions * width + 2 * width + vocabulary * width // 2
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "tensor_parallel": number * ((6 * layers + 1) * x + batch * length * vocabulary),
        "data_parallel": number * (3 * blocks + 2 * rest),
        "replicate": number * (blocks + rest) // 2,
    }
