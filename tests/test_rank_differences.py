"""Models, steps and loaders that differ between ranks are an error on every rank."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fabric import Fabric
from fabric.errors import RankFailedError
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

X = torch.ones(2, 4)
DATA = TensorDataset(torch.ones(16, 4))


# -- models ---------------------------------------------------------------------------------------


def set_up_different_models(fabric: Fabric) -> dict[str, str]:
    """Return the outcomes of setting up models that differ between ranks in one respect."""
    rank = fabric.global_rank
    frozen = Net()
    frozen.encoder.requires_grad_(rank == 0)
    models = {
        "width": nn.Linear(4, 4 + rank),
        "layers": nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + rank)]),
        "frozen": frozen,
        "dtype": nn.Linear(4, 4, dtype=[torch.float32, torch.float64][rank]),
        "names": nn.ModuleDict({f"layer_{rank}": nn.Linear(4, 4)}),
        "untrained": nn.Linear(4, 4 + rank).requires_grad_(False),
    }
    return {name: outcome(partial(fabric.setup, model)) for name, model in models.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_that_differ_between_ranks_are_refused_on_every_rank(strategy: str) -> None:
    for results in run_in_ranks(set_up_different_models, strategy=strategy):
        for name, text in results.items():
            assert "it is another model on rank 1 than on rank 0" in text, name


# -- steps ----------------------------------------------------------------------------------------


def step_on_one_rank(fabric: Fabric) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    model, optimizer = fabric.setup(net, optimizer)
    for _ in range(2):
        loss = model(X).sum()
        fabric.backward(loss)
        if fabric.global_rank == 1:
            optimizer.step()
        optimizer.zero_grad()
        fabric.barrier()


def step_with_different_learning_rates(fabric: Fabric) -> str:
    net = Net()
    learning_rate = 0.1 + fabric.global_rank
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    model, optimizer = fabric.setup(net, optimizer)
    loss = model(X + fabric.global_rank).sum()
    fabric.backward(loss)
    text = outcome(optimizer.step)
    fabric.barrier()
    return text


# These replicas drift apart. Only saves compare them, so that the error of the step is seen.
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_that_one_rank_makes_alone_is_an_error(strategy: str) -> None:
    with pytest.raises(RankFailedError, match="rank 1 has made step 1, before this backward pass"):
        run_in_ranks(step_on_one_rank, strategy=strategy, check_replicas=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_steps_with_different_learning_rates_are_an_error(strategy: str) -> None:
    options = {"strategy": strategy, "check_replicas": True}
    texts = run_in_ranks(step_with_different_learning_rates, **options)
    assert any("differ after it: " in text for text in texts), texts


# -- loaders --------------------------------------------------------------------------------------


class LoaderOutcomes(NamedTuple):
    """The outcomes of three loaders.

    Attributes:
        of_shuffled: of a loader that one rank shuffles.
        of_parts: of a loader in which each rank has its own part of the data.
        of_peeked: of a loader that one rank peeks into.
    """

    of_shuffled: str
    of_parts: str
    of_peeked: str


def iterate_different_orders(fabric: Fabric) -> LoaderOutcomes:
    is_first = fabric.is_global_zero
    shuffled = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2, shuffle=is_first))
    part = Subset(DATA, range(4 + fabric.global_rank))
    parts = fabric.setup_dataloaders(DataLoader(part, batch_size=4))
    peeked = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2, shuffle=True))
    if is_first:
        next(iter(shuffled))
        next(iter(parts))
        next(iter(peeked))
    fabric.barrier()
    of_shuffled = "not tried"
    of_parts = "not tried"
    if not is_first:
        of_shuffled = outcome(lambda: next(iter(shuffled)))
        of_parts = outcome(lambda: next(iter(parts)))

    def gather_batches() -> list[Tensor]:
        return [fabric.gather_for_metrics(x) for (x,) in peeked]

    return LoaderOutcomes(of_shuffled, of_parts, of_peeked=outcome(gather_batches))


def test_loaders_with_different_orders_on_ranks_are_an_error() -> None:
    first, second = run_in_ranks(iterate_different_orders)
    assert (
        "rank 0 draws its order anew in each iteration, as with shuffle=True, and rank 1"
        in second.of_shuffled
    )
    assert "it has the length 5 on rank 1 and 4 on rank 0" in second.of_parts
    assert "use_distributed_sampler=False" in second.of_parts
    assert first.of_peeked.startswith("CollectiveMismatchError")
    assert "of iteration 1" in first.of_peeked
    assert second.of_peeked.startswith("CollectiveMismatchError")
    assert "of iteration 0" in second.of_peeked


def iterate_twice_on(
    fabric: Fabric, ranks_that_iterate_twice: list[int], shuffle: bool = True
) -> str:
    """Train on a loader that some ranks have begun to iterate over before."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2, shuffle=shuffle))
    if fabric.global_rank in ranks_that_iterate_twice:
        next(iter(loader))
    for (x,) in loader:
        loss = model(x).sum()
        fabric.backward(loss)
        optimizer.step()
    return "fine"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_begin_different_numbers_of_iterations_train_on_no_common_order(
    strategy: str,
) -> None:
    results = run_in_ranks(iterate_twice_on, [0, 1], strategy=strategy)
    assert results == ["fine", "fine"]
    results = run_in_ranks(iterate_twice_on, [0], False, strategy=strategy)
    assert results == ["fine", "fine"]
    with pytest.raises(
        RankFailedError, match=r"in iteration \d over its loader and rank \d in iteration \d"
    ):
        run_in_ranks(iterate_twice_on, [0], strategy=strategy)
