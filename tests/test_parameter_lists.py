"""Parameters without a forward pass are set up in an nn.ParameterList and synchronized."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

X = torch.ones(2, 4)


def sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


class Agent(nn.Module):
    """A module of two modules that are set up."""

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({"actor": actor, "critic": critic})


class Trained(NamedTuple):
    """The parameter after each step, the norms of its gradients, and the loaded parameter."""

    values: list[float]
    norms: list[float]
    loaded_value: float


def train_parameter_beside_modules(fabric: Fabric, path: str) -> Trained:
    log_alpha = nn.Parameter(torch.tensor(1.0 + fabric.global_rank))
    alpha, optimizer = fabric.setup(nn.ParameterList([log_alpha]), sgd([log_alpha], lr=1.0))
    module = Net()
    actor = fabric.setup(module)
    critic = fabric.setup(Net())
    agent_optimizer = fabric.setup_optimizers(
        sgd([*actor.parameters(), *critic.parameters()], lr=1e-4)
    )
    values = []
    norms = []
    for number in range(3):
        # The gradient is 1.5 on average over the ranks, and 0.25 of the second pass.
        fabric.backward(log_alpha * (fabric.global_rank + 1))
        with fabric.no_backward_sync([alpha, actor]):
            fabric.backward(log_alpha * 0.5 * fabric.global_rank)
        fabric.backward(actor(X).mean() + critic(X).mean())
        if number > 0:
            norms.append(float(fabric.clip_gradients(alpha, optimizer, max_norm=100.0)))
        fabric.clip_gradients(Agent(actor, critic), agent_optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        agent_optimizer.step()
        agent_optimizer.zero_grad()
        values.append(float(log_alpha))
    fabric.save(path, {"alpha": alpha, "optimizer": optimizer})
    log_alpha.data.zero_()
    fabric.load(path, {"alpha": alpha, "optimizer": optimizer})
    # No rank has a gradient for this step.
    optimizer.step()
    return Trained(values, norms, float(log_alpha))


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "16-mixed"), ("fsdp", "32-true")])
def test_parameters_in_a_list_are_synchronized_clipped_and_saved(
    strategy: str, precision: str, tmp_path: Path
) -> None:
    results = run_in_ranks(
        train_parameter_beside_modules,
        str(tmp_path / "saved"),
        strategy=strategy,
        precision=precision,
    )
    for result in results:
        assert result.values == [1.0 - 1.75, 1.0 - 2 * 1.75, 1.0 - 3 * 1.75]
        assert result.norms == [1.75, 1.75]
        assert result.loaded_value == result.values[-1]


def set_up_list_after_its_optimizer(fabric: Fabric) -> float:
    net = Net()
    weight = nn.Parameter(torch.tensor(1.0))
    _, optimizer = fabric.setup(net, sgd([*net.parameters(), weight], lr=1.0))
    fabric.setup(nn.ParameterList([weight]))
    fabric.backward(weight * fabric.global_rank)
    optimizer.step()
    return float(weight)


def test_a_list_that_is_set_up_after_its_optimizer_is_synchronized() -> None:
    weights = run_in_ranks(set_up_list_after_its_optimizer, check_training=False)
    assert weights == [0.5, 0.5]


def step_with_a_closure(fabric: Fabric) -> list[str]:
    weight = nn.Parameter(torch.tensor(1.0))
    weights, optimizer = fabric.setup(nn.ParameterList([weight]), torch.optim.LBFGS([weight]))

    def closure() -> Tensor:
        return weights[0] * fabric.global_rank

    by_position = outcome(lambda: optimizer.step(closure))
    by_keyword = outcome(lambda: optimizer.step(closure=closure))
    return [by_position, by_keyword]


def test_a_closure_is_refused_for_a_list_that_is_synchronized() -> None:
    for by_position, by_keyword in run_in_ranks(step_with_a_closure):
        assert "LBFGS.step(closure) of an nn.ParameterList" in by_position
        assert "LBFGS.step(closure) of an nn.ParameterList" in by_keyword
