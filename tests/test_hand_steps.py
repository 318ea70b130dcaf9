"""Loops that change parameters without an optimizer get the gradients of the loss, or an error."""

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.errors import RankFailedError, UsageError
from tests.ranks import run_in_ranks

LR = 0.1


class Model(nn.Module):
    """A small model with the same values in each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def set_up(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    model = Model()
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=LR))


def batch_of_rank(fabric: Fabric, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(8, 4, generator=generator)
    return batch[fabric.global_rank :: fabric.world_size]


def mean_loss(fabric: Fabric, model: nn.Module, number: int, factor: float = 0.01) -> Tensor:
    """Return a loss whose scaled gradients are finite, for a factor that is not large."""
    batch = batch_of_rank(fabric, number)
    outputs = model(batch)
    return factor * outputs.square().mean()


@torch.no_grad()
def change_by_hand(parameters: Iterable[nn.Parameter], lr: float = LR) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter -= lr * parameter.grad
        parameter.grad = None


def full_values(parameters: Iterable[Any]) -> list[Tensor]:
    """Return copies of the unsharded parameters. Collective if they are sharded."""
    values: list[Tensor] = []
    for parameter in parameters:
        tensor = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        values.append(tensor.clone())
    return values


# -- changes by completed gradients ----------------------------------------------------------------


def train_with_a_list(fabric: Fabric) -> list[Tensor]:
    model = fabric.setup(Model())
    scales = fabric.setup(nn.ParameterList([nn.Parameter(torch.ones(1))]))
    parameters = [*model.parameters(), *scales.parameters()]
    for number in range(4):
        loss = mean_loss(fabric, model, number) * scales[0]
        fabric.backward(loss)
        fabric.clip_gradients([model, scales], max_norm=math.inf)
        change_by_hand(parameters)
    return full_values(parameters)


def train_with_weights(fabric: Fabric) -> list[Tensor]:
    """Change parameters by the gradients of two weighted losses."""
    model, optimizer = set_up(fabric)
    for number in range(4):
        batch = batch_of_rank(fabric, number)
        for micro_batch in batch.split(3):
            outputs = model(micro_batch)
            loss = outputs.square().sum()
            fabric.backward(loss, weight=len(micro_batch))
        fabric.clip_gradients(model, optimizer, max_norm=math.inf)
        change_by_hand(model.parameters())
    return full_values(model.parameters())


def train_with_a_loss_scale(fabric: Fabric) -> list[Tensor]:
    """Change parameters by gradients of which the first overflow."""
    model, optimizer = set_up(fabric)
    changes = 0
    overflows = 0
    while changes < 4:
        loss = mean_loss(fabric, model, changes, factor=100)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf)
        if norm.isfinite():
            change_by_hand(model.parameters(), lr=LR / 100)
            changes += 1
        else:
            optimizer.zero_grad()
            overflows += 1
    assert overflows > 0
    return full_values(model.parameters())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("train", "precision", "tolerance"),
    [
        (train_with_a_list, "32-true", 1e-6),
        (train_with_weights, "32-true", 1e-6),
        (train_with_a_loss_scale, "16-mixed", 1e-3),
    ],
)
def test_changes_by_completed_gradients_are_those_of_one_process(
    train: Callable[[Fabric], list[Tensor]], precision: str, tolerance: float, strategy: str
) -> None:
    [expected] = run_in_ranks(train, ranks=1, strategy="single_device", precision=precision)
    for values in run_in_ranks(train, strategy=strategy, precision=precision):
        torch.testing.assert_close(values, expected, rtol=0, atol=tolerance)


# -- changes by gradients that are not complete ----------------------------------------------------


def change_by_weighted_gradients(fabric: Fabric) -> None:
    model, _ = set_up(fabric)
    for number in range(2):
        outputs = model(batch_of_rank(fabric, number))
        loss = outputs.square().sum()
        fabric.backward(loss, weight=8)
        change_by_hand(model.parameters())


def change_by_scaled_gradients(fabric: Fabric, factor: float = 0.01) -> None:
    model, _ = set_up(fabric)
    for number in range(2):
        loss = mean_loss(fabric, model, number, factor)
        fabric.backward(loss)
        change_by_hand(model.parameters())


def change_without_an_optimizer(fabric: Fabric) -> None:
    model = fabric.setup(Model())
    for number in range(2):
        loss = mean_loss(fabric, model, number)
        fabric.backward(loss)
        change_by_hand(model.parameters())


def step_of_an_optimizer_that_was_not_set_up(fabric: Fabric) -> None:
    first_model, _ = set_up(fabric)
    model = fabric.setup(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batch = batch_of_rank(fabric, 0)
    outputs = model(batch) + first_model(batch)
    loss = outputs.sum()
    fabric.backward(loss, weight=8)
    optimizer.step()


def step_within_the_backward_pass(fabric: Fabric, *, sets_up_optimizers: bool) -> list[Tensor]:
    """Step with an optimizer for each parameter as soon as the gradient has been computed."""
    model = fabric.setup(Model())
    optimizers: dict[Tensor, torch.optim.Optimizer] = {}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.SGD([parameter], lr=LR)
        if sets_up_optimizers:
            fabric.setup_optimizers(optimizers[parameter])
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(4):
        loss = mean_loss(fabric, model, number, factor=1)
        fabric.backward(loss)
    return full_values(model.parameters())


@pytest.mark.parametrize(
    ("train", "precision", "problem"),
    [
        (change_by_weighted_gradients, "32-true", "not divided by the loss weights yet"),
        (change_by_scaled_gradients, "16-mixed", "still multiplied by the loss scale"),
        (
            partial(change_by_scaled_gradients, factor=1e6),
            "16-mixed",
            "still multiplied by the loss scale",
        ),
        (change_without_an_optimizer, "16-mixed", "still multiplied by the loss scale"),
        (step_of_an_optimizer_that_was_not_set_up, "32-true", "has not been set up, and steps"),
        (
            partial(step_within_the_backward_pass, sets_up_optimizers=False),
            "16-mixed",
            "within the backward pass, with gradients that are still multiplied by the loss scale",
        ),
    ],
)
def test_changes_by_gradients_that_are_not_complete_are_refused(
    train: Callable[[Fabric], None], precision: str, problem: str
) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    with fabric, pytest.raises(UsageError, match=problem):
        train(fabric)


def change_a_list(fabric: Fabric) -> None:
    model = fabric.setup(Model())
    scales = fabric.setup(nn.ParameterList([nn.Parameter(torch.ones(1))]))
    for number in range(3):
        loss = mean_loss(fabric, model, number) * scales[0]
        fabric.backward(loss)
        change_by_hand(scales.parameters())


def change_without_synchronization(fabric: Fabric) -> None:
    model = fabric.setup(Model())
    for number in range(3):
        with fabric.no_backward_sync(model, enabled=number == 0):
            loss = mean_loss(fabric, model, number)
            fabric.backward(loss)
        change_by_hand(model.parameters())


def step_with_a_parameter_outside_modules(fabric: Fabric) -> None:
    model, optimizer = set_up(fabric)
    scale = nn.Parameter(torch.ones(1))
    scale_optimizer = torch.optim.SGD([scale], lr=LR)
    for number in range(3):
        loss = mean_loss(fabric, model, number) * scale
        fabric.backward(loss)
        optimizer.step()
        scale_optimizer.step()
        optimizer.zero_grad()
        scale_optimizer.zero_grad()


@pytest.mark.parametrize(
    ("train", "strategy", "problem"),
    [
        (change_a_list, "fsdp", "differ between ranks 0 and 1"),
        (change_without_synchronization, "ddp", "differ between ranks 0 and 1"),
        (
            step_with_a_parameter_outside_modules,
            "ddp",
            "differ between ranks 0 and 1: parameter 1 that no set-up module has",
        ),
        (
            step_with_a_parameter_outside_modules,
            "fsdp",
            "differ between ranks 0 and 1: parameter 1 that no set-up module has",
        ),
        (
            partial(step_within_the_backward_pass, sets_up_optimizers=True),
            "ddp",
            "within the backward pass, with gradients that are not averaged over the ranks yet",
        ),
        (
            partial(step_within_the_backward_pass, sets_up_optimizers=False),
            "ddp",
            "within the backward pass, with gradients that are not averaged over the ranks yet",
        ),
    ],
)
def test_changes_that_differ_between_ranks_are_refused(
    train: Callable[[Fabric], None], strategy: str, problem: str
) -> None:
    with pytest.raises(RankFailedError, match=problem):
        run_in_ranks(train, strategy=strategy)


# -- changes that are right ------------------------------------------------------------------------


def change_by_plain_gradients(fabric: Fabric) -> None:
    model = fabric.setup(Model())
    scales = fabric.setup(nn.ParameterList([nn.Parameter(torch.ones(1))]))
    for number in range(3):
        loss = mean_loss(fabric, model, number) * scales[0]
        fabric.backward(loss)
        # The average that fabric.clip_gradients makes.
        scales[0].grad = fabric.all_reduce(scales[0].grad)
        change_by_hand([*model.parameters(), *scales.parameters()])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_complete_gradients_may_be_used_as_they_are(strategy: str) -> None:
    run_in_ranks(change_by_plain_gradients, strategy=strategy)


def test_a_step_within_the_backward_pass_under_fsdp_is_that_of_one_process() -> None:
    train = partial(step_within_the_backward_pass, sets_up_optimizers=True)
    [expected] = run_in_ranks(train, ranks=1, strategy="single_device")
    values, _ = run_in_ranks(train, strategy="fsdp")
    torch.testing.assert_close(values, expected)


def load_a_snapshot(model: nn.Module, snapshot: dict[str, Any]) -> None:
    model.load_state_dict(snapshot)


@torch.no_grad()
def limit_weights(model: nn.Module, snapshot: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


@torch.no_grad()
def ascend(model: nn.Module, snapshot: dict[str, Any]) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter += 0.05 * nn.functional.normalize(parameter.grad, dim=0)


@pytest.mark.parametrize("change", [load_a_snapshot, limit_weights, ascend])
def test_other_changes_between_backward_passes_are_no_steps(
    change: Callable[[nn.Module, dict[str, Any]], None],
) -> None:
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        model, optimizer = set_up(fabric)
        snapshot = deepcopy(model.state_dict())
        for number in range(3):
            for _ in range(2):
                loss = mean_loss(fabric, model, number)
                fabric.backward(loss)
                change(model, snapshot)
                optimizer.zero_grad()
            loss = mean_loss(fabric, model, number)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
