"""Steps with a closure on several ranks are those of the single process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from tests.ranks import run_in_ranks

LINE_SEARCHES = [None, "strong_wolfe"]


def train(fabric: Fabric, options: Mapping[str, Any]) -> tuple[list[float], Tensor]:
    """Return the losses and the last weight of two steps of LBFGS on this rank's samples."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 3, dtype=torch.float64)
    targets = inputs.square().sum(dim=1, keepdim=True)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, **options)
    model, optimizer = fabric.setup(net, optimizer)
    rank_inputs = inputs[fabric.global_rank :: fabric.world_size]
    rank_targets = targets[fabric.global_rank :: fabric.world_size]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(rank_inputs) - rank_targets).square().mean()
        fabric.backward(loss)
        return loss

    first_loss = optimizer.step(closure)
    second_loss = optimizer.step(closure=closure)
    losses = [first_loss.item(), second_loss.item()]
    return losses, net[0].weight.detach()


@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_lbfgs_takes_the_steps_of_the_single_process(line_search: str | None) -> None:
    options = {"line_search_fn": line_search}
    [(expected_losses, expected_weight)] = run_in_ranks(
        train, options, ranks=1, strategy="single_device"
    )
    for losses, weight in run_in_ranks(train, options):
        assert losses == pytest.approx(expected_losses, rel=1e-7)
        torch.testing.assert_close(weight, expected_weight, rtol=1e-7, atol=1e-7)
