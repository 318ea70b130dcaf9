"""The loss scale has settings, and says when it skipped a step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import ConfigurationError, UsageError
from fabric.precision import PRECISIONS, LossScale
from tests.ranks import run_in_ranks

SMALL = replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**4, growth_interval=2))


def single(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none", **options)


def set_up(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    net = nn.Linear(2, 1, bias=False)
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def scale_of(fabric: Fabric) -> float:
    fabric.barrier()  # connects, where nothing did yet
    return float(fabric.describe().rpartition("loss scale")[2])


def train(fabric: Fabric, bad_rank: int = 0) -> list[tuple[bool, float, int]]:
    """Five steps, the second of which overflows; after each, whether it was skipped, the rate and the scale."""
    model, optimizer = set_up(fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = [(fabric.step_was_skipped(optimizer), optimizer.param_groups[0]["lr"], scale_of(fabric))]
    for step in range(5):
        is_bad = step == 1 and fabric.global_rank == bad_rank
        fabric.backward(model(torch.full((1, 2), float("inf") if is_bad else 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if not fabric.step_was_skipped(optimizer):
            scheduler.step()
        seen.append(
            (fabric.step_was_skipped(optimizer), optimizer.param_groups[0]["lr"], scale_of(fabric))
        )
    return seen


EXPECTED = [
    (False, 0.1, 16.0),
    (False, 0.05, 16.0),
    (True, 0.05, 16.0),  # the scale changes at the start of the next backward pass
    (False, 0.025, 8.0),
    (False, 0.0125, 8.0),
    (False, 0.00625, 16.0),
]


def test_a_scheduler_leaves_out_the_steps_that_were_skipped() -> None:
    with single(precision=SMALL) as fabric:
        assert train(fabric) == EXPECTED


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_know_of_an_overflow_on_one_of_them(strategy: str) -> None:
    assert run_in_ranks(train, 1, strategy=strategy, precision=SMALL) == [EXPECTED, EXPECTED]


def test_other_precisions_skip_no_step() -> None:
    with single() as fabric:
        model, optimizer = set_up(fabric)
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        assert not fabric.step_was_skipped(optimizer)


def test_each_of_two_optimizers_has_its_own_answer() -> None:
    with single(precision=SMALL) as fabric:
        (good, first), (bad, second) = set_up(fabric), set_up(fabric)
        fabric.backward(good(torch.ones(1, 2)).sum() + bad(torch.full((1, 2), float("inf"))).sum())
        first.step()
        second.step()
        assert [fabric.step_was_skipped(each) for each in (first, second)] == [False, True]


@pytest.mark.parametrize("precision", [SMALL, "32-true"])
def test_an_optimizer_that_is_not_set_up_has_no_answer(precision: Any) -> None:
    with single(precision=precision) as fabric:
        stranger = torch.optim.SGD(set_up(fabric)[0].parameters(), lr=0.1)
        with pytest.raises(UsageError, match=r"step_was_skipped\(SGD\)"):
            fabric.step_was_skipped(stranger)


def test_a_checkpoint_brings_its_own_scale(tmp_path: Any) -> None:
    with single(precision="16-mixed") as fabric:
        fabric.save(tmp_path / "file.pt", {"n": 1})
    with single(precision=SMALL) as fabric:
        assert scale_of(fabric) == 2.0**4
        fabric.load(tmp_path / "file.pt", {"n": 0})
        assert scale_of(fabric) == 2.0**16


@pytest.mark.parametrize("value", [0, -2.0, 3.0, float("inf"), float("nan"), 2.0**-127, 2.0**128])
def test_a_first_scale_is_a_power_of_two_in_the_range_of_float32(value: float) -> None:
    with pytest.raises(ConfigurationError, match="power of two"):
        LossScale(init_scale=value)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, 2**31])
def test_a_growth_interval_is_a_number_of_steps(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="number of steps"):
        LossScale(growth_interval=value)


@pytest.mark.parametrize("value", [1, 2.0**-126, 2.0**127])
def test_the_limits_themselves_are_valid(value: float) -> None:
    with single(
        precision=replace(SMALL, loss_scale=LossScale(init_scale=value, growth_interval=1))
    ) as fabric:
        assert scale_of(fabric) == pytest.approx(value, rel=1e-5)  # as it is printed
