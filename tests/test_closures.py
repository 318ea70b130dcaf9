"""Steps with a closure on several ranks are those of the single process."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from tests.ranks import outcome, run_in_ranks

LINE_SEARCHES = [None, "strong_wolfe"]


NUM_SAMPLES = 8


def samples_of_rank(fabric: Fabric) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    all_inputs = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, generator=generator)
    inputs = all_inputs[fabric.global_rank :: fabric.world_size]
    targets = inputs.square().sum(dim=1, keepdim=True)
    return inputs, targets


def train(
    fabric: Fabric, options: Mapping[str, Any], sums: bool, micro_batches: int
) -> tuple[list[float], Tensor]:
    """Return the losses and the last weight of two steps of LBFGS on this rank's samples.

    Args:
        fabric: the Fabric.
        options: the options of LBFGS.
        sums: whether the loss is summed up over the ranks.
        micro_batches: the number of backward passes in a closure.
    """
    torch.manual_seed(0)
    inputs, targets = samples_of_rank(fabric)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, **options)
    model, optimizer = fabric.setup(net, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for number in range(micro_batches):
            outputs = model(inputs[number::micro_batches])
            errors = outputs - targets[number::micro_batches]
            loss = errors.square().sum()
            if sums:
                loss = loss / NUM_SAMPLES
                fabric.backward(loss, reduce="sum")
            else:
                loss = loss / len(inputs)
                fabric.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    first_loss = optimizer.step(closure)
    second_loss = optimizer.step(closure=closure)
    losses = [first_loss.item(), second_loss.item()]
    return losses, net[0].weight.detach()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_lbfgs_takes_the_steps_of_the_single_process(
    line_search: str | None, sums: bool, micro_batches: int
) -> None:
    options = {"line_search_fn": line_search}
    [(expected_losses, expected_weight)] = run_in_ranks(
        train, options, sums, 1, ranks=1, strategy="single_device"
    )
    for losses, weight in run_in_ranks(train, options, sums, micro_batches):
        assert losses == pytest.approx(expected_losses, rel=1e-7)
        torch.testing.assert_close(weight, expected_weight, rtol=1e-7, atol=1e-7)


def error_of_closure(fabric: Fabric, *options_of_backward: Mapping[str, Any]) -> str:
    """Return the error of a step whose closure makes a backward pass for each of the options."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    model, optimizer = fabric.setup(net, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for options in options_of_backward:
            outputs = model(torch.ones(2, 3))
            loss = outputs.square().sum()
            fabric.backward(loss, **options)
        return loss

    return outcome(partial(optimizer.step, closure))


@pytest.mark.parametrize(
    ("precision", "options_of_backward", "problem"),
    [
        ("32-true", [{"reduce": "sum"}, {}], 'have reduce="sum" and some have not'),
        ("32-true", [{"weight": 2}], "a closure makes a backward pass within the step"),
        ("16-mixed", [{}], "the closure computes new gradients inside the step"),
    ],
)
def test_losses_of_closures_that_are_not_those_of_the_gradients_are_refused(
    precision: str, options_of_backward: list[dict[str, Any]], problem: str
) -> None:
    errors = run_in_ranks(error_of_closure, *options_of_backward, precision=precision)
    assert all(problem in error for error in errors), errors
