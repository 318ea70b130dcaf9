"""The loops of docs/exactness.md do what the page says."""

import re
from functools import partial
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
CODE = "\n".join(
    re.findall(r"^```python\n((?:import|def) .*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
RIGHT = "fabric.backward(loss, weight=tokens)"
WRONG = re.findall(r"^\| `(fabric\.backward\(.*\))` \|.*\| (\d+)% \|$", PAGE, re.MULTILINE)


def loops(line: str = RIGHT) -> SimpleNamespace:
    """The functions of the page, with ``line`` in the place of the right one."""
    assert CODE.count(RIGHT) == 1
    names: dict[str, Any] = {"__name__": "page"}
    exec(CODE.replace(RIGHT, line), names)
    return SimpleNamespace(**names)


def whole(model: nn.Module) -> Tensor:
    return torch.cat(
        [full_tensor(parameter.detach()).flatten() for parameter in model.parameters()]
    )


def trained(fabric: Fabric, exact: Any) -> Tensor:
    return whole(exact(fabric))


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp")])
def test_the_loop_ends_with_the_parameters_of_the_plain_one(ranks: int, strategy: str) -> None:
    page = loops()
    expected = whole(page.plain())
    for actual in run_in_ranks(
        trained, page.exact, ranks=ranks, strategy=strategy, precision="64-true"
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_wrong_loops_are_off_by_what_the_page_says() -> None:
    page = loops()
    expected = whole(page.plain())
    start = whole(page.make()[0])
    assert len(WRONG) == 3
    for line, share in WRONG:
        actual = run_in_ranks(trained, loops(line).exact, precision="64-true")[0]
        assert (actual - expected).norm() / (expected - start).norm() == pytest.approx(
            int(share) / 100, abs=0.005
        ), line


def logged(fabric: Fabric, page: SimpleNamespace) -> float:
    own = page.SEQUENCES[fabric.global_rank : 5 : fabric.world_size]
    return float(page.mean_loss(fabric, *page.sum_of_losses(page.make()[0], page.collate(own))))


def test_the_mean_loss_of_a_log_is_over_all_terms() -> None:
    page = loops()
    alone, together = (run_in_ranks(partial(logged, page=page), ranks=ranks) for ranks in (1, 2))
    assert together == [pytest.approx(alone[0], abs=1e-12)] * 2
