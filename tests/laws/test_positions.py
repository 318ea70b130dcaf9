"""Killed on some number of ranks and resumed on others, a run has seen what one without an interruption has seen."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fabric import Fabric
from fabric.data import DataParallelJob, FabricDataLoader
from fabric.errors import RankFailedError
from fabric.seed import rng_state, set_rng_state
from tests import datasets
from tests.laws.base import profile
from tests.ranks import run_in_ranks

EPOCHS = 2


class Eager(datasets.Eager):
    """Draws when it is asked for an iterator, from two streams."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        random.shuffle(order)
        return iter(order)


class Lazy(Eager):
    """Draws when it is asked for an entry."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


class Unsized(Sampler[int]):
    """Draws when it is asked for an entry, and has no length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.n).tolist()


class Stateful(DataLoader[int]):
    """Has a state of its own, as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("the position in an order that is drawn again is fabric's")

    load_state_dict = state_dict


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def shuffled(data: Any) -> RandomSampler:
    return RandomSampler(data, generator=generator())


KINDS: dict[str, Callable[[Any, int], DataLoader[Any]]] = {
    "sequential": DataLoader,
    "shuffled": lambda data, size: DataLoader(data, size, shuffle=True),
    "generator": lambda data, size: DataLoader(data, size, shuffle=True, generator=generator()),
    "weighted": lambda data, size: DataLoader(
        data, size, sampler=WeightedRandomSampler((data + 1.0).tolist(), 2 * len(data))
    ),
    "subset": lambda data, size: DataLoader(
        data, size, sampler=SubsetRandomSampler(range(0, len(data), 2))
    ),
    "eager": lambda data, size: DataLoader(data, size, sampler=Eager(len(data))),
    "lazy": lambda data, size: DataLoader(data, size, sampler=Lazy(len(data))),
    "without a length": lambda data, size: DataLoader(data, size, sampler=Unsized(len(data))),
    "single samples": lambda data, _: DataLoader(data, None, shuffle=True),
    "batches": lambda data, _: DataLoader(
        data, batch_sampler=BatchSampler(shuffled(data), 3, drop_last=False)
    ),
    "whole batches": lambda data, _: DataLoader(
        data, None, sampler=BatchSampler(Lazy(len(data)), 2, drop_last=True)
    ),
    "a loader with a state": lambda data, size: Stateful(data, size, shuffle=True),
    "drop last": lambda data, size: DataLoader(data, size, shuffle=True, drop_last=True),
}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def samples(batch: Any) -> list[int]:
    return torch.as_tensor(batch).flatten().tolist()


def run(
    make: Callable[[], DataLoader[Any]], ranks: int, steps: int, saved: Any
) -> tuple[list[list[int]], Any]:
    """The samples of each epoch in the order over all ranks, for at most so many steps, and the position after them."""
    published: dict[str, bytes] = {}
    received: list[list[tuple[int, Any]]] = [[] for _ in range(ranks)]
    states = []
    for rank, own in enumerate(received):
        seed(0 if rank == 0 else 100 + rank)  # rank 0's are agreed on
        job = DataParallelJob(rank, ranks, from_rank0=published.setdefault)
        loader = FabricDataLoader(make(), job, device=None)
        if saved is not None:
            set_rng_state(saved["streams"])
            loader.load_state_dict(saved["loader"])
        for epoch in range(loader.state_dict()["epoch"], EPOCHS if steps else 0):
            for batch in loader:
                own.append((epoch, samples(batch)))
                if len(own) == steps:
                    break
            if len(own) == steps:
                break
        states.append({"loader": loader.state_dict(), "streams": rng_state()})
    orders: list[list[int]] = [[] for _ in range(EPOCHS)]
    for step in zip(*received, strict=True):
        [epoch] = {epoch for epoch, _ in step}
        parts = [batch for _, batch in step]
        in_turn = zip(*parts, strict=True) if loader._spec.unit == "samples" else parts
        orders[epoch] += chain.from_iterable(in_turn)
    return orders, states[0]


stages = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=3
)


def check_order(
    kind: str, length: int, chain_of_kills: list[tuple[int, int, int]], last: tuple[int, int]
) -> None:
    data = torch.arange(length)
    saved = None
    seed(0)
    plain = KINDS[kind](data, 1)
    expected = [[sample for batch in plain for sample in samples(batch)] for _ in range(EPOCHS)]
    found: list[list[int]] = [[] for _ in range(EPOCHS)]
    for ranks, size, steps in [*chain_of_kills, (*last, 1000)]:
        orders, saved = run(partial(KINDS[kind], data, size), ranks, steps, saved)
        found = [before + after for before, after in zip(found, orders, strict=True)]
    for order, seen in zip(expected, found, strict=True):
        assert seen[: len(order)] == order[: len(seen)]
        missing = order[len(seen) :]
        repeated = seen[len(order) :]
        # All ranks of the last round get equally much.
        most = (
            max(ranks * size for ranks, size, *_ in [*chain_of_kills, last])
            if kind == "drop last"
            else 0
        )
        assert len(missing) <= most
        assert repeated == (order * 12)[: len(repeated)]
        assert len(repeated) < 4 * 3


ORDERS = [pytest.param(25), pytest.param(400, marks=pytest.mark.slow)]
ORDERS += [pytest.param(8000, marks=[pytest.mark.slow, pytest.mark.soak])]


@pytest.mark.parametrize("examples", ORDERS)
def test_the_order_of_samples_is_that_of_the_uninterrupted_run(examples: int) -> None:
    @profile(examples)
    @given(
        kind=st.sampled_from(sorted(KINDS)),
        length=st.integers(1, 40),
        chain_of_kills=stages,
        last=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    )
    def holds(kind: str, length: int, chain_of_kills: list[Any], last: Any) -> None:
        check_order(kind, length, chain_of_kills, last)

    holds()


# -- real ranks, killed ------------------------------------------------------------------------------------------

# of all ranks; two epochs
BATCH = 12
STEPS = 8
DATA = TensorDataset(
    *(torch.randn(48, width, generator=generator()) for width in (3, 1)), torch.arange(48)
)


def parts(batch_size: int) -> tuple[DataLoader[Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    loader = DataLoader(DATA, batch_size, sampler=shuffled(DATA))
    return loader, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def uninterrupted() -> list[Any]:
    loader, model, optimizer = parts(BATCH)
    steps = []
    for _ in range(EPOCHS):
        for x, y, index in loader:
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([loss.item(), index.tolist()])
    return steps


def train(fabric: Fabric, folder: Path, stop: int, victim: int, is_saved: bool) -> None:
    """Train on from the latest checkpoint, save each step, and be killed in the step ``stop``, before or after that."""
    plain, net, sgd = parts(BATCH // fabric.world_size)
    loader = fabric.setup_dataloaders(plain)
    model, optimizer = fabric.setup(net, sgd)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    path = folder / "checkpoint"
    if path.exists():
        fabric.load(path, state)
    for _ in range(loader.state_dict()["epoch"], EPOCHS):
        for x, y, index in loader:
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen = [fabric.all_reduce(loss.item()), fabric.gather_for_metrics(index).tolist()]
            if fabric.is_global_zero:
                (folder / f"{state['step']}.json").write_text(json.dumps(seen))
            state["step"] += 1
            ends = state["step"] == stop
            if is_saved or not ends:
                fabric.save(path, state)
            if ends and fabric.world_size == 1:  # it is this process
                return
            if ends and fabric.global_rank == victim % fabric.world_size:
                os.kill(os.getpid(), signal.SIGKILL)


def check_kills(strategy: str, kills: list[tuple[int, int, int, bool]], last: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for ranks, stop, victim, is_saved in sorted(kills, key=lambda kill: kill[1]):
            try:
                run_in_ranks(train, folder, stop, victim, is_saved, ranks=ranks, strategy=strategy)
            except RankFailedError as error:
                assert "SIGKILL" in str(error)  # noqa: PT017 - a single rank is not killed
        run_in_ranks(train, folder, 0, 0, True, ranks=last, strategy=strategy)
        found = [json.loads((folder / f"{step}.json").read_text()) for step in range(STEPS)]
    for (loss, order), (expected, plain_order) in zip(found, uninterrupted(), strict=True):
        assert order == plain_order
        assert loss == pytest.approx(expected, rel=1e-6)


KILLS = [
    pytest.param(10, marks=pytest.mark.slow),
    pytest.param(200, marks=[pytest.mark.slow, pytest.mark.soak]),
]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("examples", KILLS)
def test_a_run_that_is_killed_and_resumed_on_any_number_of_ranks_is_the_uninterrupted_one(
    examples: int,
) -> None:
    kill = st.tuples(st.integers(1, 4), st.integers(1, STEPS), st.integers(0, 3), st.booleans())

    @profile(examples)
    @given(
        strategy=st.sampled_from(["ddp", "fsdp"]),
        kills=st.lists(kill, min_size=1, max_size=2, unique_by=lambda each: each[1]),
        last=st.integers(1, 4),
    )
    def holds(strategy: str, kills: list[Any], last: int) -> None:
        check_kills(strategy, kills, last)

    holds()
