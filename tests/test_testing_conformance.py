"""The conformance suites pass our implementations, and say what wrong ones do wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def run_checks_in(world: World) -> Callable[[Check], Any]:
    """Return a function that runs a check with the communicator of each rank of a world."""

    def run_check(check: Check) -> Any:
        return world.run(lambda fabric: check(fabric.strategy.communicator()))

    return run_check


def test_the_local_communicator_conforms() -> None:
    check_communicator(lambda check: check(LocalCommunicator(torch.device("cpu"))))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_threaded_communicator_conforms(size: int) -> None:
    world = ThreadedWorld(size)
    check_communicator(run_checks_in(world))


@pytest.mark.parametrize("size", [1, 3])
def test_the_process_group_communicator_conforms(
    rank_pool: Callable[[int], RankPool], size: int
) -> None:
    pool = rank_pool(size)
    check_communicator(run_checks_in(pool))


def test_the_checked_communicator_conforms() -> None:
    with RankPool(2, check_collectives=True) as pool:
        check_communicator(run_checks_in(pool))


class WrongSums(LocalCommunicator):
    """A communicator whose sums are too large by one."""

    def run(self, collective: Collective) -> Any:
        result = super().run(collective)
        if collective.operation is Operation.ALL_REDUCE:
            result.add_(1)
        return result


def test_a_wrong_communicator_is_told_which_check_fails() -> None:
    name_of_check = "reductions, all_gather and all_to_all agree with their oracles"
    with pytest.raises(AssertionError, match=name_of_check):
        check_communicator(lambda check: check(WrongSums(torch.device("cpu"))))


@pytest.mark.parametrize(
    ("strategy", "size"), [("single_device", 1), ("dp", 1), ("ddp", 2), ("fsdp", 2)]
)
def test_our_strategies_conform(strategy: str, size: int) -> None:
    check_strategy(strategy, size)


def train_a_step(fabric: Fabric, returns_loss_of_rank: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    rank_data = data.chunk(fabric.world_size)[fabric.global_rank]
    loss = model(rank_data).square().mean()
    fabric.backward(loss)
    optimizer.step()
    loss = loss.detach()
    if not returns_loss_of_rank:
        loss = fabric.all_reduce(loss)
    return {"loss": loss}


def test_a_step_that_does_not_depend_on_the_strategy_passes() -> None:
    assert_equivalent(train_a_step, False)


def test_a_step_that_depends_on_it_is_shown_with_strategy_rank_and_leaf() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(train_a_step, True, strategies=("single_device", "ddp"))
    text = str(caught.value)
    assert "ddp on 2 rank(s)'][1]['loss']: " in text
    assert "ddp on 1 rank(s)" not in text


def test_a_single_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 run"):
        assert_equivalent(train_a_step, False, strategies=("single_device",))
