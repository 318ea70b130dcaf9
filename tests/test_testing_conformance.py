"""The conformance suites: ours pass, and wrong ones are told what they do wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.communicators import Collective, Communicator, LocalCommunicator, Operation
from fabric.errors import ConfigurationError
from fabric.testing import (
    RankPool,
    ThreadedWorld,
    World,
    assert_equivalent,
    check_communicator,
    check_strategy,
)

Check = Callable[[Communicator], None]


def over(world: World) -> Callable[[Check], Any]:
    return lambda check: world.run(lambda fabric: check(fabric.strategy.communicator()))


def test_the_local_communicator_conforms() -> None:
    check_communicator(lambda check: check(LocalCommunicator(torch.device("cpu"))))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_threaded_communicator_conforms(size: int) -> None:
    check_communicator(over(ThreadedWorld(size)))


@pytest.mark.parametrize("size", [1, 3])
def test_the_process_group_communicator_conforms(
    rank_pool: Callable[[int], RankPool], size: int
) -> None:
    check_communicator(over(rank_pool(size)))


def test_the_checked_communicator_conforms() -> None:
    with RankPool(2, check_collectives=True) as pool:
        check_communicator(over(pool))


class IgnoresTheReduction(LocalCommunicator):
    def run(self, collective: Collective) -> Any:
        result = super().run(collective)
        return result.add_(1) if collective.operation is Operation.ALL_REDUCE else result


def test_a_wrong_communicator_is_told_which_check_fails() -> None:
    with pytest.raises(
        AssertionError, match="reductions, all_gather and all_to_all agree with their oracles"
    ):
        check_communicator(lambda check: check(IgnoresTheReduction(torch.device("cpu"))))


@pytest.mark.parametrize(
    ("strategy", "size"), [("single_device", 1), ("dp", 1), ("ddp", 2), ("fsdp", 2)]
)
def test_our_strategies_conform(strategy: str, size: int) -> None:
    check_strategy(strategy, size)


def step(fabric: Fabric, wrong: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loss = model(data.chunk(fabric.world_size)[fabric.global_rank]).square().mean()
    fabric.backward(loss)
    optimizer.step()
    return {"loss": loss.detach() if wrong else fabric.all_reduce(loss.detach())}


def test_a_step_that_does_not_depend_on_the_strategy_passes() -> None:
    assert_equivalent(step, False)


def test_a_step_that_does_is_shown_with_strategy_rank_and_leaf() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(step, True, strategies=("single_device", "ddp"))
    text = str(caught.value)
    assert "ddp on 2 rank(s)'][1]['loss']: " in text
    assert "ddp on 1 rank(s)" not in text


def test_one_run_alone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 run"):
        assert_equivalent(step, False, strategies=("single_device",))
