"""What is gathered for metrics: each sample once, in the order of the data."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.testing import ThreadedWorld
from tests.ranks import run_in_ranks


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


class Unsized:
    def __iter__(self) -> Any:
        return iter(range(5))


def seen(replicas: int, make: Callable[[int], DataLoader[Any]], uneven: Any = "pad") -> list[int]:
    """What a loop over a loader gathers, the same on every rank."""

    def loop(fabric: Fabric) -> list[int]:
        loader = fabric.setup_dataloaders(make(fabric.global_rank), uneven=uneven)
        return [value for batch in loader for value in fabric.gather_for_metrics(batch).tolist()]

    results = ThreadedWorld(replicas).run(loop)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_every_sample_counts_once_and_in_order(uneven: str) -> None:
    for replicas, n, batch_size, drop_last in itertools.product(
        (1, 2, 3, 4), (1, 2, 5, 12, 13), (1, 3, 4), (0, 1)
    ):
        loader = DataLoader(range(n), batch_size, drop_last=bool(drop_last))
        actual = seen(replicas, lambda _, loader=loader: loader, uneven)
        dropped = uneven == "drop" or drop_last
        share = n // replicas if dropped else n
        expected = (
            share // batch_size * batch_size * replicas
            if drop_last
            else share * replicas
            if dropped
            else n
        )
        assert actual == list(range(expected)), (replicas, n, batch_size, drop_last)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_orders_of_other_kinds(replicas: int) -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
    assert seen(replicas, lambda _: DataLoader(range(10), batch_sampler=batches)) == list(range(10))
    bulk = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    whole = torch.arange(10)
    assert seen(replicas, lambda _: DataLoader(Rows(whole), batch_size=None, sampler=bulk)) == list(
        range(10)
    )
    assert seen(replicas, lambda _: DataLoader(whole, batch_size=None)) == list(range(10))
    assert seen(replicas, lambda _: DataLoader(Stream(12), 2)) == list(range(12))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_of_the_users_counts_every_sample_once(drop_last: bool) -> None:
    def by_hand(rank: int) -> DataLoader[Any]:
        sampler = DistributedSampler(range(11), 3, rank, shuffle=False, drop_last=drop_last)
        return DataLoader(range(11), 2, sampler=sampler)

    assert seen(3, by_hand) == list(range(9 if drop_last else 11))


class Contiguous(DistributedSampler[int]):
    def __iter__(self) -> Any:
        return iter(range(self.rank * 3, self.rank * 3 + 3))


def test_a_sampler_that_shards_in_its_own_way_does_not_say_what_it_repeated() -> None:
    with pytest.raises(RankFailedError, match="Contiguous shards the data itself"):
        seen(2, lambda rank: DataLoader(range(5), 2, sampler=Contiguous(range(5), 2, rank)))


def test_a_position_of_another_number_of_ranks_counts_every_sample_once() -> None:
    def loop(fabric: Fabric, state: Any) -> Any:
        loader = fabric.setup_dataloaders(DataLoader(range(23), 10 // fabric.world_size))
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            samples = fabric.gather_for_metrics(batch).tolist()
            if state is None:
                return loader.state_dict()
            seen.append(samples)
        return seen

    seen: list[Any] = []
    [state] = ThreadedWorld(1).run(loop, None)
    ThreadedWorld(3).run(loop, state)
    assert list(itertools.chain.from_iterable(sorted(seen)[::3])) == list(range(10, 23))


class Rows:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.values[index]


def test_an_order_without_a_length_does_not_say_what_it_repeated() -> None:
    with pytest.raises(RankFailedError, match=r"Unsized has no length(.|\n)*drop"):
        seen(2, lambda _: DataLoader(range(5), sampler=Unsized()))
    assert seen(2, lambda _: DataLoader(range(5), sampler=Unsized()), "drop") == [0, 1, 2, 3]


def evaluate(fabric: Fabric) -> Any:
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(7.0), batch_size=2))
    inner = fabric.setup_dataloaders(DataLoader(torch.arange(100, 103), batch_size=1))
    values = []
    nested = []
    resumed = []
    for batch in loader:
        result = fabric.gather_for_metrics({"x": batch, "y": batch[:, None] * 2, "text": "kept"})
        assert (result["y"][:, 0] == result["x"] * 2).all()
        assert result["text"] == "kept"
        values += result["x"].tolist()
        if not nested:
            nested = [fabric.gather_for_metrics(one).tolist() for one in inner]
            for _ in inner:
                break
        assert torch.equal(fabric.gather_for_metrics(batch), result["x"])
        with pytest.raises(ConfigurationError, match=r"\['n'\].*\n.*number 3"):
            fabric.gather_for_metrics({"n": 3})
        with pytest.raises(ConfigurationError, match=r"which sample is what\?.*\(\)"):
            fabric.gather_for_metrics(batch.mean())
    state = None
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict(state)
    for batch in loader:
        resumed += fabric.gather_for_metrics(batch).tolist()
    with pytest.raises(UsageError, match="no loop over a set-up loader is active"):
        fabric.gather_for_metrics(torch.ones(1))
    each = fabric.setup_dataloaders(DataLoader(torch.arange(3)), use_distributed_sampler=False)
    if fabric.world_size > 1:
        with pytest.raises(UsageError, match="all of the data"):
            [fabric.gather_for_metrics(batch) for batch in each]
    return values, [one for part in nested for one in part], resumed


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_evaluation_over_n_samples_counts_n(size: int) -> None:
    for values, nested, resumed in run_in_ranks(evaluate, ranks=size):
        assert values == list(range(7))
        assert nested == [100, 101, 102]
        assert resumed == list(range(2 * size, 7))
