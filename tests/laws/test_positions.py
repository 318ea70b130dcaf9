"""A run that is killed and resumed on any number of ranks equals the uninterrupted run."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
    """A sampler that draws from two streams when an iterator is made."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        random.shuffle(order)
        return iter(order)


class Lazy(Eager):
    """A sampler that draws when the first entry is read."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


class Unsized(Sampler[int]):
    """A sampler without a length that draws when the first entry is read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.n).tolist()


class Stateful(DataLoader[int]):
    """A loader with a state of its own, as torchdata's StatefulDataLoader."""

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


class Stage(NamedTuple):
    """The time between two interruptions of a run."""

    ranks: int
    batch_size: int
    steps: int


class Batch(NamedTuple):
    """The samples of one step of one rank."""

    epoch: int
    samples: list[int]


def read(loader: FabricDataLoader, steps: int) -> list[Batch]:
    """Read at most so many batches, up to the end of the last epoch."""
    batches: list[Batch] = []
    if steps == 0:
        return batches
    for epoch in range(loader.state_dict()["epoch"], EPOCHS):
        for batch in loader:
            batches.append(Batch(epoch, torch.as_tensor(batch).flatten().tolist()))
            if len(batches) == steps:
                return batches
    return batches


def run_stage(
    make: Callable[[Any, int], DataLoader[Any]], data: Any, stage: Stage, saved: Any
) -> tuple[list[list[int]], Any]:
    """Read the batches of a stage on all ranks.

    Args:
        make: Makes the loader of a rank from the data and the batch size.
        data: The dataset.
        stage: The ranks, the batch size, and the steps to take at most.
        saved: The state after the stage before, or None at the start.

    Returns:
        The samples of every epoch in their order over all ranks, and the state of rank 0.
    """
    published: dict[str, bytes] = {}
    batches_by_rank = []
    states = []
    for rank in range(stage.ranks):
        # The ranks agree on the order of rank 0, whatever their own streams are.
        seed(0 if rank == 0 else 100 + rank)
        job = DataParallelJob(rank, stage.ranks, from_rank0=published.setdefault)
        loader = FabricDataLoader(make(data, stage.batch_size), job, device=None)
        if saved is not None:
            set_rng_state(saved["streams"])
            loader.load_state_dict(saved["loader"])
        batches_by_rank.append(read(loader, stage.steps))
        states.append({"loader": loader.state_dict(), "streams": rng_state()})
    return global_order(batches_by_rank, loader._spec.unit), states[0]


def global_order(batches_by_rank: list[list[Batch]], unit: str) -> list[list[int]]:
    """Return the samples of every epoch in their order over all ranks.

    Args:
        batches_by_rank: The batches of every rank.
        unit: Whether the ranks take turns by "samples" or by "batches".
    """
    epochs: list[list[int]] = [[] for _ in range(EPOCHS)]
    for batches in zip(*batches_by_rank, strict=True):
        [epoch] = {batch.epoch for batch in batches}
        turns = [batch.samples for batch in batches]
        if unit == "samples":
            turns = zip(*turns, strict=True)
        epochs[epoch] += chain.from_iterable(turns)
    return epochs


stages = st.lists(
    st.builds(Stage, st.integers(1, 4), st.integers(1, 6), st.integers(0, 7)),
    min_size=1,
    max_size=3,
)
last_stages = st.builds(Stage, st.integers(1, 4), st.integers(1, 6), st.just(1000))


def read_epoch(loader: DataLoader[Any]) -> list[int]:
    samples: list[int] = []
    for batch in loader:
        samples += torch.as_tensor(batch).flatten().tolist()
    return samples


def check_order(kind: str, length: int, stages: list[Stage]) -> None:
    """Compare the order of samples of an interrupted run with the order of a plain loop."""
    data = torch.arange(length)
    epochs: list[list[int]] = [[] for _ in range(EPOCHS)]
    saved = None
    largest_batch = 0
    for stage in stages:
        orders, saved = run_stage(KINDS[kind], data, stage, saved)
        for epoch, order in zip(epochs, orders, strict=True):
            epoch += order
        largest_batch = max(largest_batch, stage.ranks * stage.batch_size)
    seed(0)
    plain = KINDS[kind](data, 1)
    for actual in epochs:
        expected = read_epoch(plain)
        assert actual[: len(expected)] == expected[: len(actual)]
        missing = len(expected) - len(actual)
        if kind == "drop last":
            assert missing <= largest_batch
        else:
            assert missing <= 0
        # All ranks get equally many samples in the last round, so that samples are repeated.
        repeated = actual[len(expected) :]
        assert repeated == (expected * 12)[: len(repeated)]
        assert len(repeated) < 4 * 3


ORDERS = [
    pytest.param(25),
    pytest.param(400, marks=pytest.mark.slow),
    pytest.param(8000, marks=[pytest.mark.slow, pytest.mark.soak]),
]


@pytest.mark.parametrize("examples", ORDERS)
def test_the_order_of_samples_is_that_of_the_uninterrupted_run(examples: int) -> None:
    @profile(examples)
    @given(
        kind=st.sampled_from(sorted(KINDS)),
        length=st.integers(1, 40),
        killed_stages=stages,
        last_stage=last_stages,
    )
    def holds(kind: str, length: int, killed_stages: list[Stage], last_stage: Stage) -> None:
        check_order(kind, length, [*killed_stages, last_stage])

    holds()


# -- real ranks, killed ----------------------------------------------------------------------------

GLOBAL_BATCH = 12
STEPS = 8  # of two epochs
DATA = TensorDataset(
    torch.randn(48, 3, generator=generator()),
    torch.randn(48, 1, generator=generator()),
    torch.arange(48),
)


def build(batch_size: int) -> tuple[DataLoader[Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    loader = DataLoader(DATA, batch_size, sampler=shuffled(DATA))
    return loader, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def uninterrupted() -> list[Any]:
    """Train in one process, and return the loss and the samples of every step."""
    loader, model, optimizer = build(GLOBAL_BATCH)
    steps = []
    for _ in range(EPOCHS):
        for x, y, index in loader:
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([loss.item(), index.tolist()])
    return steps


class Kill(NamedTuple):
    """A kill of a job by the end of one rank.

    Args:
        ranks: The number of ranks of the job.
        step: The step in which the rank is killed.
        victim: The rank, modulo the number of ranks.
        is_saved: Whether the step is saved before the kill.
    """

    ranks: int
    step: int
    victim: int
    is_saved: bool


def train(fabric: Fabric, folder: Path, kill: Kill | None) -> None:
    """Train on from the latest checkpoint, and save every step."""
    plain, net, sgd = build(GLOBAL_BATCH // fabric.world_size)
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
            result = [fabric.all_reduce(loss.item()), fabric.gather_for_metrics(index).tolist()]
            if fabric.is_global_zero:
                (folder / f"{state['step']}.json").write_text(json.dumps(result))
            state["step"] += 1
            if kill is None or state["step"] != kill.step:
                fabric.save(path, state)
                continue
            if kill.is_saved:
                fabric.save(path, state)
            # A single rank is the process of the test, and only returns.
            if fabric.world_size == 1:
                return
            if fabric.global_rank == kill.victim % fabric.world_size:
                os.kill(os.getpid(), signal.SIGKILL)


def check_kills(strategy: str, kills: list[Kill], last_ranks: int) -> None:
    """Compare the losses and samples of a run that is killed with those of a plain loop."""
    results = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        for kill in sorted(kills, key=attrgetter("step")):
            try:
                run_in_ranks(train, folder, kill, ranks=kill.ranks, strategy=strategy)
            except RankFailedError as error:
                assert "SIGKILL" in str(error)  # noqa: PT017 - a single rank is not killed
        run_in_ranks(train, folder, None, ranks=last_ranks, strategy=strategy)
        for step in range(STEPS):
            results.append(json.loads((folder / f"{step}.json").read_text()))
    for result, expected in zip(results, uninterrupted(), strict=True):
        loss, samples = result
        expected_loss, expected_samples = expected
        assert samples == expected_samples
        assert loss == pytest.approx(expected_loss, rel=1e-6)


KILLS = [
    pytest.param(10, marks=pytest.mark.slow),
    pytest.param(200, marks=[pytest.mark.slow, pytest.mark.soak]),
]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("examples", KILLS)
def test_a_run_that_is_killed_and_resumed_on_any_number_of_ranks_is_the_uninterrupted_one(
    examples: int,
) -> None:
    kill = st.builds(
        Kill, st.integers(1, 4), st.integers(1, STEPS), st.integers(0, 3), st.booleans()
    )

    @profile(examples)
    @given(
        strategy=st.sampled_from(["ddp", "fsdp"]),
        kills=st.lists(kill, min_size=1, max_size=2, unique_by=attrgetter("step")),
        last_ranks=st.integers(1, 4),
    )
    def holds(strategy: str, kills: list[Kill], last_ranks: int) -> None:
        check_kills(strategy, kills, last_ranks)

    holds()
