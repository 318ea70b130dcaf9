"""A save of NaN or infinite values replaces no checkpoint, and is not restored."""

import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric._torch import local_tensor
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.strategies import SingleDeviceStrategy
from tests.ranks import outcome, run_in_ranks

FORMATS = {"file": FullCheckpoint(), "shards": ShardedCheckpoint()}


def single(io: Any = None) -> Fabric:
    return Fabric(
        strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none"
    )


def names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder without their numbers."""
    names_without_numbers = []
    for name in sorted(os.listdir(folder)):
        if name[0].isdigit() and not name.endswith(".json"):
            names_without_numbers.append(name.partition("-")[2])
    return names_without_numbers


class WithMask(nn.Linear):
    """A layer with an attention mask, a count and packed numbers among its buffers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.full((4, 4), -math.inf))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        # Two numbers in each byte, for which torch has no arithmetic.
        packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        self.register_buffer("packed", packed)
        self.scale = nn.Parameter(torch.full((2,), math.inf), requires_grad=False)


def prepared_state(fabric: Fabric) -> dict[str, Any]:
    """Return a state whose model and optimizer have taken a step."""
    model = WithMask()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    averages = fabric.ema(model)
    averages.update()
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "ema": averages}


def spoil_weight(state: dict[str, Any], value: float) -> None:
    with torch.no_grad():
        local_tensor(state["model"].weight).fill_(value)


def spoil_moment(state: dict[str, Any], value: float) -> None:
    moment = state["optimizer"].state[state["model"].bias]["exp_avg"]
    local_tensor(moment).fill_(value)


def spoil_average(state: dict[str, Any], value: float) -> None:
    local_tensor(dict(state["ema"].named_buffers())["weight"]).fill_(value)


def spoil_mask(state: dict[str, Any], value: float) -> None:
    state["model"].mask[0, 0] = value


Spoil = Callable[[dict[str, Any], float], None]
# What is spoiled, with which value, and the words of the warning.
SPOILED: dict[str, tuple[Spoil, float, str]] = {
    "weight": (spoil_weight, math.inf, "model['weight'] has the value inf"),
    "moment": (spoil_moment, math.nan, "['exp_avg'] has the value nan"),
    "average": (spoil_average, math.nan, "ema['weight'] has the value nan"),
    "buffer": (spoil_mask, math.nan, "model['mask'] has the value nan"),
}


def saved_with_warnings(checkpoints: Any, step: int, *args: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints.save(step, *args, **options)
    return [str(warning.message) for warning in caught]


def restored_with_warnings(checkpoints: Any, state: dict[str, Any]) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = checkpoints.restore(state)
    return step, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_run_of_nan_leaves_the_last_healthy_checkpoints(
    spoiled: str, form: str, tmp_path: Path
) -> None:
    spoil, value, problem = SPOILED[spoiled]
    with single(FORMATS[form]) as fabric:
        state = prepared_state(fabric)
        checkpoints = fabric.checkpoints(tmp_path, keep=3, best=("loss", "min"))
        for step in range(1, 9):
            if step == 4:
                spoil(state, value)
            # The loss of a step may look best although the state is bad.
            arguments = (step, state, {"loss": -step})
            messages = saved_with_warnings(checkpoints, *arguments, async_=step % 2 == 0)
            if step < 4:
                assert messages == []
            else:
                [message] = messages
                assert f"checkpoints.save({step}, ...) on rank 0: " in message
                assert f"{problem} on rank 0" in message
        assert str(checkpoints.latest).endswith("00000003-step-3")
        assert str(checkpoints.best).endswith("00000003-step-3")
    assert names(tmp_path) == ["step-1", "step-2", "step-3", "step-8-unhealthy"]
    assert (tmp_path / "latest").read_text() == "00000003-step-3\n"

    with single(FORMATS[form]) as fabric:
        state = prepared_state(fabric)
        checkpoints = fabric.checkpoints(tmp_path, keep=1, best=("loss", "min"))
        step, [message] = restored_with_warnings(checkpoints, state)
        assert step == 3
        assert "00000008-step-8-unhealthy is passed over" in message
        assert f"{problem} on rank 0" in message
        assert state["model"].weight.isfinite().all()
        assert saved_with_warnings(checkpoints, 4, state, {"loss": 1.0}) == []
        # For a look at it.
        fabric.load(tmp_path / "00000008-step-8-unhealthy", state)
        assert "unhealthy" in saved_with_warnings(checkpoints, 5, state)[0]
        step, [message] = restored_with_warnings(checkpoints, state)
        assert step == 4
        assert "step-8" not in message
    assert names(tmp_path) == ["step-3", "step-4", "step-5-unhealthy"]


def test_values_that_no_step_spreads_are_healthy(tmp_path: Path) -> None:
    with single() as fabric:
        state = prepared_state(fabric)
        with torch.no_grad():
            # The norm of the weights is infinite, although the weights are not.
            state["model"].weight.fill_(1e30)
        state["notes"] = torch.tensor([math.nan])
        state["scores"] = {"best": math.inf}
        checkpoints = fabric.checkpoints(tmp_path)
        assert saved_with_warnings(checkpoints, 1, state, async_=False) == []
    assert names(tmp_path) == ["step-1"]


def test_without_healthy_any_values_are_saved_alike(tmp_path: Path) -> None:
    with single() as fabric:
        state = prepared_state(fabric)
        spoil_weight(state, math.nan)
        checkpoints = fabric.checkpoints(tmp_path, healthy=False)
        assert saved_with_warnings(checkpoints, 1, state) == []
        assert checkpoints.restore(state) == 1


def test_a_folder_with_unhealthy_saves_alone_does_not_start_the_run_again(tmp_path: Path) -> None:
    with single() as fabric:
        state = prepared_state(fabric)
        spoil_weight(state, math.nan)
        checkpoints = fabric.checkpoints(tmp_path)
        assert len(saved_with_warnings(checkpoints, 1, state)) == 1
        assert checkpoints.latest is None
    # The clause about the tensor is lost, and nothing else.
    [reason] = tmp_path.glob("*.json")
    assert json.loads(reason.read_text())["name"] == "model['weight']"
    reason.write_text("{")
    with single() as fabric:
        state = prepared_state(fabric)
        text = outcome(lambda: fabric.checkpoints(tmp_path).restore(state))
        assert "00000001-step-1-unhealthy is passed over: its values are NaN or infinite" in text
        assert state["model"].weight.isfinite().all()


def spoil_on_rank_1(fabric: Fabric, folder: Path, spoiled: str, async_: bool) -> dict[str, Any]:
    """Save a healthy state and one that is bad on rank 1, and restore. Return what happened."""
    spoil, value, _ = SPOILED[spoiled]
    state = prepared_state(fabric)
    checkpoints = fabric.checkpoints(folder, keep=1)
    checkpoints.save(1, state)
    if fabric.global_rank == 1:
        spoil(state, value)
    saved = saved_with_warnings(checkpoints, 2, state, async_=async_)
    step, restored = restored_with_warnings(checkpoints, state)
    weight = local_tensor(state["model"].weight)
    is_finite = bool(weight.isfinite().all())
    return {"saved": saved, "restored": restored, "step": step, "is finite": is_finite}


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
@pytest.mark.parametrize("spoiled", ["weight", "moment"])
def test_one_bad_shard_makes_the_save_of_all_ranks_unhealthy(
    spoiled: str, state_dict_type: str, tmp_path: Path
) -> None:
    from fabric.strategies import FSDPStrategy

    strategy = FSDPStrategy(state_dict_type=state_dict_type)
    is_async = state_dict_type == "sharded"
    reports = run_in_ranks(spoil_on_rank_1, tmp_path, spoiled, is_async, strategy=strategy)
    problem = f"{SPOILED[spoiled][2]} on rank 1"
    for report in reports:
        assert report["step"] == 1
        assert report["is finite"]
    first, second = reports
    [saved] = first["saved"]
    [restored] = first["restored"]
    assert problem in saved
    assert problem in restored
    assert second["saved"] == []
    assert second["restored"] == []
    assert names(tmp_path) == ["step-1", "step-2-unhealthy"]
