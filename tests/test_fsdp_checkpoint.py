"""FSDP saves full values under the names of the user's module, and any strategy loads them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.errors import CheckpointError
from fabric.strategies import FSDPStrategy
from tests.loops import Transformer, batches, make_model, plain_loop
from tests.ranks import SharedRanks, outcome
from tests.test_fsdp import full_parameters, in_ranks
from tests.test_fsdp_models import Buffers


def state_dicts(fabric: Fabric) -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(3)
    module = Buffers()
    model = fabric.setup(module)
    state = copy.deepcopy(fabric.strategy.get_module_state_dict(model._fabric_prepared))
    changed = copy.deepcopy(state)
    for value in changed.values():
        value.add_(1)
    fabric.strategy.load_module_state_dict(model._fabric_prepared, changed)
    return state, full_parameters(model)


@pytest.mark.parametrize(
    "options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"activation_checkpointing": Buffers}]
)
def test_a_state_dict_is_full_on_every_rank_and_loads_again(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    module = Buffers()
    expected = dict(module.state_dict())
    changed = [torch.add(parameter, 1).detach() for parameter in module.parameters()]
    for state, changed_parameters in in_ranks(state_dicts, ranks=3, **options):
        assert list(state) == list(expected)
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        torch.testing.assert_close(changed_parameters, changed, rtol=0, atol=0)


def save(fabric: Fabric, path: Path) -> list[Tensor]:
    torch.manual_seed(5)
    module = Transformer()
    model = fabric.setup(module)
    with torch.no_grad():
        model(torch.ones(1, 5, 4))
    fabric.save(path, {"model": model, "step": 3})
    return [value.clone() for value in full_parameters(model)]


def load(fabric: Fabric, path: Path) -> tuple[list[Tensor], int]:
    module = Transformer()
    model = fabric.setup(module)
    state = {"model": model, "step": 0}
    fabric.load(path, state)
    return full_parameters(model), state["step"]


SINGLE = {"strategy": "single_device", "devices": 1}
DDP = {"strategy": "ddp", "devices": 2}


def sharded(ranks: int) -> dict[str, Any]:
    return {"strategy": FSDPStrategy(), "devices": ranks}


@pytest.mark.parametrize(
    ("before", "after"),
    [(sharded(2), SINGLE), (sharded(2), sharded(3)), (DDP, sharded(2)), (sharded(3), DDP)],
)
def test_a_module_goes_from_any_strategy_to_any(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    expected = Fabric(accelerator="cpu", launcher=SharedRanks(), **before).launch(save, path)
    with Fabric(accelerator="cpu", launcher=SharedRanks(), **after) as fabric:
        for parameters, step in fabric.launch(load, path, return_all=True):
            torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
            assert step == 3


def load_another(fabric: Fabric, path: Path) -> tuple[str, bool]:
    module = Buffers()
    model = fabric.setup(module)
    before = full_parameters(model)
    text = outcome(lambda: fabric.load(path, {"model": model}))
    return text, all(map(torch.equal, before, full_parameters(model)))


def test_the_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    in_ranks(save, path)
    for text, unchanged in in_ranks(load_another, path):
        assert text.startswith(CheckpointError.__name__)
        assert "norm.weight" in text
        assert unchanged


def train_two_steps_or_the_third(fabric: Fabric, path: Path, load: bool) -> list[Tensor]:
    """Save after two of three steps, or load and take the third; return the parameters."""
    plain, plain_optimizer = make_model(torch.float64)
    model, optimizer = fabric.setup(plain, plain_optimizer)
    state = {"model": model, "optimizer": optimizer}
    first, second, third = batches(torch.float64)
    if load:
        fabric.load(path, state)
        batches_to_train = [third]
    else:
        batches_to_train = [first, second]
    rows_of_rank = slice(fabric.global_rank, None, fabric.world_size)
    for x, y in batches_to_train:
        output = model(x[rows_of_rank])
        loss = nn.functional.mse_loss(output, y[rows_of_rank])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        fabric.save(path, state)
    return [value.clone() for value in full_parameters(model)]


# test_resharding.py has more pairs of jobs.
SOAK = [pytest.mark.slow, pytest.mark.soak]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sharded(2), sharded(3)),
        (sharded(3), DDP),
        pytest.param(sharded(2), SINGLE, marks=SOAK),
        pytest.param(SINGLE, sharded(3), marks=SOAK),
    ],
)
def test_an_optimizer_goes_on_under_any_strategy(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    expected = plain_loop(torch.float64, None, False, 1).parameters
    path = tmp_path / "checkpoint.pt"
    with Fabric(accelerator="cpu", launcher=SharedRanks(), precision=64, **before) as fabric:
        fabric.launch(train_two_steps_or_the_third, path, False)
    with Fabric(accelerator="cpu", launcher=SharedRanks(), precision=64, **after) as fabric:
        results = fabric.launch(train_two_steps_or_the_third, path, True, return_all=True)
    for parameters in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-10)
