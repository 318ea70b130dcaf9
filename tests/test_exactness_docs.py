"""The loops of docs/exactness.md do what the page says."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from tests.ranks import run_in_ranks

PAGE = (Path(__file__).parents[1] / "docs" / "exactness.md").read_text()
EXAMPLES = re.findall(r"^```python\n((?:import|def) .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
RIGHT_LINE = "fabric.backward(loss, weight=tokens)"
# The wrong lines of the page's table, and by how many percent their updates are off.
WRONG_LINES = re.findall(r"^\| `(fabric\.backward\(.*\))` \|.*\| (\d+)% \|$", PAGE, re.MULTILINE)


def load_page(line: str = RIGHT_LINE) -> SimpleNamespace:
    """Return the functions of the page, with ``line`` in place of the right backward pass."""
    code = "\n".join(EXAMPLES)
    assert code.count(RIGHT_LINE) == 1
    names: dict[str, Any] = {"__name__": "page"}
    exec(code.replace(RIGHT_LINE, line), names)
    return SimpleNamespace(**names)


def flat_parameters(model: nn.Module) -> Tensor:
    parameters = [full_tensor(parameter.detach()) for parameter in model.parameters()]
    return torch.cat([parameter.flatten() for parameter in parameters])


def train(fabric: Fabric, loop: Callable[[Fabric], nn.Module]) -> Tensor:
    return flat_parameters(loop(fabric))


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "ddp"),
        (2, "ddp"),
        (4, "ddp"),
        (2, "fsdp"),
    ],
)
def test_the_loop_ends_with_the_parameters_of_the_plain_one(ranks: int, strategy: str) -> None:
    page = load_page()
    expected = flat_parameters(page.plain())
    results = run_in_ranks(train, page.exact, ranks=ranks, strategy=strategy, precision="64-true")
    for actual in results:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_wrong_loops_are_off_by_what_the_page_says() -> None:
    page = load_page()
    expected = flat_parameters(page.plain())
    model, _ = page.make()
    start = flat_parameters(model)
    assert len(WRONG_LINES) == 3
    for line, percent in WRONG_LINES:
        wrong_page = load_page(line)
        actual, _ = run_in_ranks(train, wrong_page.exact, precision="64-true")
        update = expected - start
        error = (actual - expected).norm() / update.norm()
        expected_error = int(percent) / 100
        assert error == pytest.approx(expected_error, abs=0.005), line


def logged_loss(fabric: Fabric, page: SimpleNamespace) -> float:
    sequences = page.SEQUENCES[fabric.global_rank : 5 : fabric.world_size]
    model, _ = page.make()
    batch = page.collate(sequences)
    loss, tokens = page.sum_of_losses(model, batch)
    mean = page.mean_loss(fabric, loss, tokens)
    return float(mean)


def test_the_mean_loss_of_a_log_is_over_all_terms() -> None:
    page = load_page()
    (expected,) = run_in_ranks(logged_loss, page, ranks=1)
    losses = run_in_ranks(logged_loss, page, ranks=2)
    assert len(losses) == 2
    for loss in losses:
        assert loss == pytest.approx(expected, abs=1e-12)
