"""Loaders whose ranks have different numbers of batches stop together, or repeat a batch."""

import copy
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError
from fabric.seed import rng_state
from fabric.testing import ThreadedWorld
from tests.datasets import batches_of, samples_of
from tests.laws.base import profile
from tests.ranks import outcome, run_in_ranks

SPAN = 100  # samples of rank r are r * SPAN, r * SPAN + 1, ...


def samples_of_rank(rank: int, n: int) -> range:
    return range(rank * SPAN, rank * SPAN + n)


class RankStream(IterableDataset[Any]):
    """A stream of the ``n`` samples of one rank, without a length."""

    shards_itself = True

    def __init__(self, rank: int, n: int, width: int = 0) -> None:
        self.samples = samples_of_rank(rank, n)
        self.width = width

    def __iter__(self) -> Iterator[Any]:
        for sample in self.samples:
            if self.width:
                yield torch.full((self.width,), float(sample))
            else:
                yield sample


class Common(IterableDataset[int]):
    """A stream of samples that all ranks read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n


class Contiguous(Sampler[int]):
    """A sampler that shards by itself, with one sample for rank 0, two for rank 1, and so on."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank = rank
        self.num_replicas = num_replicas

    def __len__(self) -> int:
        return self.rank + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 2 * self.rank + 1))


def setup_loader(
    fabric: Fabric, data: Any, batch_size: int | None = 1, uneven: Any = "longest", **options: Any
) -> Any:
    """Set up a loader of the data of this rank."""
    loader = DataLoader(data, batch_size, **options)
    return fabric.setup_dataloaders(loader, use_distributed_sampler=False, uneven=uneven)


def data_of_rank(fabric: Fabric, counts: Any, has_length: bool) -> Any:
    rank = fabric.global_rank
    if has_length:
        return samples_of_rank(rank, counts[rank])
    return RankStream(rank, counts[rank])


def samples_without_repeats(loader: Any) -> list[int]:
    """Read a loader, and return its samples without the repeated batches."""
    samples = []
    for batch in loader:
        if not loader.is_repeat:
            samples += batch.tolist()
    return samples


def common_count(counts: Any, uneven: str) -> int:
    """Return the count at which all ranks stop."""
    if uneven == "shortest":
        return min(counts)
    return max(counts)


class Step(NamedTuple):
    """One step of a loop, as one rank sees it."""

    sample: int
    is_repeat: bool
    cursor: int
    gathered: list[int]


def expected_steps(counts: Any, rank: int, uneven: str) -> list[Step]:
    """Compute without fabric the steps of one rank."""
    total = common_count(counts, uneven)
    streams = [samples_of_rank(rank, count) for rank, count in enumerate(counts)]
    steps = []
    for number in range(total):
        gathered = []
        for stream in streams:
            gathered += stream[number : number + 1]
        is_repeat = number >= counts[rank]
        if not is_repeat:
            sample = streams[rank][number]
        elif counts[rank] > 0:
            sample = streams[rank][-1]
        else:
            # A rank without samples repeats the first sample of the first rank that has one.
            sample = next(filter(None, streams))[0]
        cursor = min(number + 1, counts[rank]) * len(counts)
        steps.append(Step(sample, is_repeat, cursor, gathered))
    return steps


def take_step(fabric: Fabric, loader: Any, batch: Any) -> Step:
    cursor = loader.state_dict()["cursor"]
    gathered = fabric.gather_for_metrics(batch).tolist()
    return Step(batch.item(), loader.is_repeat, cursor, gathered)


def loop_twice(fabric: Fabric, counts: Any, uneven: str, has_length: bool) -> list[Step]:
    loader = setup_loader(fabric, data_of_rank(fabric, counts, has_length), uneven=uneven)
    steps = []
    for _ in range(2):
        for batch in loader:
            steps.append(take_step(fabric, loader, batch))
        assert not loader.is_repeat
        # The position is the start of the next epoch.
        assert loader.state_dict()["cursor"] == 0
    return steps


def loop_twice_in_windows(
    fabric: Fabric, counts: Any, uneven: str, has_length: bool
) -> tuple[list[Step], list[bool]]:
    """Loop in windows of two micro-batches; return the steps, and whether each ends a window."""
    loader = setup_loader(fabric, data_of_rank(fabric, counts, has_length), uneven=uneven)
    steps = []
    window_ends = []
    for _ in range(2):
        for batch, is_last in fabric.accumulate(loader, 2):
            steps.append(take_step(fabric, loader, batch))
            window_ends.append(is_last)
        assert not loader.is_repeat
        assert loader.state_dict()["cursor"] == 0
    return steps, window_ends


COUNTS = [
    (2, 3),
    (3, 1),
    (0, 2),
    (0, 0),
    (4,),
    (0, 1, 3),
    (5, 2, 2),
]


@pytest.mark.parametrize("uneven", ["shortest", "longest"])
@pytest.mark.parametrize("has_length", [False, True])
def test_all_ranks_stop_with_the_first_or_with_the_last(uneven: str, has_length: bool) -> None:
    for counts in COUNTS:
        results = ThreadedWorld(len(counts)).run(loop_twice, counts, uneven, has_length)
        for rank, steps in enumerate(results):
            assert steps == expected_steps(counts, rank, uneven) * 2, (counts, rank)


@pytest.mark.parametrize("uneven", ["shortest", "longest"])
@pytest.mark.parametrize("has_length", [False, True])
def test_all_ranks_stop_together_in_windows(uneven: str, has_length: bool) -> None:
    for counts in COUNTS:
        world = ThreadedWorld(len(counts))
        results = world.run(loop_twice_in_windows, counts, uneven, has_length)
        for rank, (steps, window_ends) in enumerate(results):
            expected = expected_steps(counts, rank, uneven)
            assert steps == expected * 2, (counts, rank)
            ends = [False, True] * (len(expected) // 2)
            if len(expected) % 2 == 1:
                ends.append(True)
            assert window_ends == ends * 2, (counts, rank)


def test_a_rank_with_a_length_and_a_rank_without_a_length_agree() -> None:
    def loop(fabric: Fabric) -> list[int]:
        has_length = fabric.global_rank == 0
        data = data_of_rank(fabric, (2, 3), has_length)
        loader = setup_loader(fabric, data)
        return samples_of(loader)

    assert ThreadedWorld(2).run(loop) == [[0, 1, 1], [100, 101, 102]]


def test_nothing_is_fetched_ahead_of_the_user_where_the_length_is_known() -> None:
    class Counted(Dataset[int]):
        loaded = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            self.loaded += 1
            return index

    def loop(fabric: Fabric) -> list[int]:
        data = Counted()
        loader = setup_loader(fabric, data, uneven="shortest")
        return [data.loaded for _ in loader]

    assert ThreadedWorld(2).run(loop) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_longest_is_refused_for_data_that_fabric_shards(ranks: int) -> None:
    def refused(fabric: Fabric) -> str:
        return outcome(lambda: fabric.setup_dataloaders(DataLoader(range(5)), uneven="longest"))

    for text in ThreadedWorld(ranks).run(refused):
        assert text.startswith(ConfigurationError.__name__)
        assert 'uneven="pad" or "drop"' in text
    invalid: Any = "long"
    with (
        Fabric(accelerator="cpu", devices=1) as fabric,
        pytest.raises(ConfigurationError, match="'longest'"),
    ):
        fabric.setup_dataloaders(DataLoader(range(5)), uneven=invalid)


def test_the_last_round_of_a_common_stream_counts_under_longest_alone() -> None:
    def loop(fabric: Fabric, n: int, uneven: Any) -> tuple[list[int], list[int]]:
        loader = DataLoader(Common(n), 2)
        loader = fabric.setup_dataloaders(loader, uneven=uneven)
        samples = samples_without_repeats(loader)
        return samples, samples_of(map(fabric.gather_for_metrics, loader))

    cases = [(1, 5), (2, 5), (3, 8), (3, 1), (2, 0)]
    for ranks, n in cases:
        for uneven in ("pad", "shortest", "longest"):
            results = ThreadedWorld(ranks).run(loop, n, uneven)
            count = n
            if uneven != "longest":
                count = n // ranks * ranks
            for rank, (samples, gathered) in enumerate(results):
                assert samples == list(range(rank, count, ranks))
                assert sorted(gathered) == list(range(count))


def distributed_sampler(fabric: Fabric) -> DataLoader[int]:
    sampler = DistributedSampler(range(7), fabric.world_size, fabric.global_rank, shuffle=False)
    return DataLoader(range(7), 2, sampler=sampler)


def sampler_by_hand(fabric: Fabric) -> DataLoader[int]:
    sampler = Contiguous(fabric.global_rank, fabric.world_size)
    return DataLoader(range(7), 2, sampler=sampler)


def batch_sampler_by_hand(fabric: Fabric) -> DataLoader[int]:
    sampler = Contiguous(fabric.global_rank, fabric.world_size)
    batch_sampler = BatchSampler(sampler, 2, drop_last=False)
    return DataLoader(range(7), batch_sampler=batch_sampler)


def test_samplers_that_shard_by_themselves_may_be_uneven() -> None:
    def loop(fabric: Fabric, make: Any, uneven: Any) -> Any:
        loader = fabric.setup_dataloaders(make(fabric), uneven=uneven)
        return batches_of(map(fabric.gather_for_metrics, loader))

    for uneven in ("shortest", "longest"):
        results = ThreadedWorld(2).run(loop, distributed_sampler, uneven)
        assert results[0] == [[0, 1, 2, 3], [4, 5, 6]]
    for make in (sampler_by_hand, batch_sampler_by_hand):
        shortest, *_ = ThreadedWorld(3).run(loop, make, "shortest")
        assert shortest == [[0, 1, 2, 2, 3]]
        longest, *_ = ThreadedWorld(3).run(loop, make, "longest")
        assert longest == [[0, 1, 2, 2, 3], [4]]


def test_a_loader_of_single_samples_counts_every_sample_once() -> None:
    def loop(fabric: Fabric) -> Any:
        data = data_of_rank(fabric, (1, 2), has_length=False)
        loader = setup_loader(fabric, data, batch_size=None)
        gathered = []
        for sample in loader:
            gathered.append(fabric.gather_for_metrics(torch.tensor(sample)).tolist())
        return gathered

    assert ThreadedWorld(2).run(loop) == [[[0, 100], [101]]] * 2


def loop_until(fabric: Fabric, stop: int, has_length: bool) -> tuple[list[int], Any]:
    """Break off a loop after ``stop`` batches; return the samples of no repeat, and the state."""
    loader = setup_loader(fabric, data_of_rank(fabric, (2, 5), has_length))
    samples = []
    for number, batch in enumerate(loader, 1):
        if not loader.is_repeat:
            samples += batch.tolist()
        if number == stop:
            break
    return samples, loader.state_dict()


def test_a_position_does_not_count_repeats() -> None:
    def loop(fabric: Fabric, stop: int) -> list[int]:
        samples, state = loop_until(fabric, stop, has_length=True)
        data = data_of_rank(fabric, (2, 5), has_length=True)
        resumed = setup_loader(fabric, data)
        resumed.load_state_dict(state)
        return samples + samples_without_repeats(resumed)

    for stop in range(1, 6):
        assert ThreadedWorld(2).run(loop, stop) == [[0, 1], [100, 101, 102, 103, 104]]


def test_a_stream_that_has_run_out_repeats_up_to_a_break() -> None:
    for stop in range(1, 6):
        results = ThreadedWorld(2).run(loop_until, stop, has_length=False)
        assert results[0][0] == [0, 1][:stop]
        assert results[1][0] == list(range(100, 100 + stop))


class CountingStream(RankStream):
    """A stream that saves and loads how many samples it has yielded."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def save_and_resume(fabric: Fabric, path: Path, make_data: Any, count: int, stop: int) -> list[int]:
    """Save after ``stop`` batches, load, and return the samples before and after that."""
    loader = setup_loader(fabric, make_data(fabric.global_rank, count))
    samples = []
    for number, batch in enumerate(loader, 1):
        if not loader.is_repeat:
            samples += batch.tolist()
        if number == stop:
            fabric.save(path, {"loader": loader})
            break
    resumed = setup_loader(fabric, make_data(fabric.global_rank, count))
    fabric.load(path, {"loader": resumed})
    return samples + samples_without_repeats(resumed)


def check_saved_positions(fabric: Fabric, folder: Path) -> None:
    rank = fabric.global_rank
    cases = itertools.product((samples_of_rank, CountingStream), ((2, 5), (5, 2)), (1, 4))
    for number, (make_data, counts, stop) in enumerate(cases):
        count = counts[rank]
        samples = save_and_resume(fabric, folder / str(number), make_data, count, stop)
        assert samples == list(samples_of_rank(rank, count)), (make_data, counts, stop)


def test_a_checkpoint_has_the_positions_of_all_ranks_also_where_one_has_run_out(
    tmp_path: Path,
) -> None:
    run_in_ranks(check_saved_positions, tmp_path)


def loop_three_times(fabric: Fabric, stops: tuple[int, int]) -> list[int]:
    """Break off each of three loops after as many batches as ``stops`` says for the rank."""
    loader = setup_loader(fabric, data_of_rank(fabric, (4, 6), has_length=False))
    samples = []
    for _ in range(3):
        for number, batch in enumerate(loader, 1):
            samples += batch.tolist()
            if number == stops[fabric.global_rank]:
                break
    return samples


def test_a_loop_after_a_break_starts_again() -> None:
    assert ThreadedWorld(2).run(loop_three_times, (2, 2)) == [[0, 1] * 3, [100, 101] * 3]
    assert ThreadedWorld(2).run(loop_three_times, (5, 5)) == [
        [0, 1, 2, 3, 3] * 3,
        [100, 101, 102, 103, 104] * 3,
    ]


def test_breaks_at_different_batches_are_an_error() -> None:
    with pytest.raises(
        RankFailedError, match=r"rank 0 behind batch 0 of loop 2, rank 1 behind batch 3 of loop 1"
    ):
        ThreadedWorld(2).run(loop_three_times, (2, 3))


def test_a_dataset_that_raises_on_one_rank_ends_all() -> None:
    class Bad(RankStream):
        def __iter__(self) -> Iterator[Any]:
            yield 0
            yield 1
            raise KeyError("of the dataset")

    def loop(fabric: Fabric) -> None:
        data = RankStream(0, 5) if fabric.global_rank == 0 else Bad(0, 5)
        list(setup_loader(fabric, data, uneven="shortest"))

    with pytest.raises(RankFailedError, match="of the dataset"):
        ThreadedWorld(2).run(loop)


# -- with modules, on real ranks -------------------------------------------------------------------


def net(fabric: Fabric) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(),
        nn.Linear(4, 1),
    ).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    return fabric.setup(plain, optimizer)


def rows(fabric: Fabric, counts: Any, uneven: Any, workers: int = 0) -> Any:
    data = RankStream(fabric.global_rank, 2 * counts[fabric.global_rank], 3)
    return setup_loader(fabric, data, batch_size=2, uneven=uneven, num_workers=workers)


def train_and_validate(fabric: Fabric, counts: Any, uneven: str) -> tuple[int, list[int]]:
    """Train and validate twice; return the batches trained on, and the first samples validated."""
    model, optimizer = net(fabric)
    loader = rows(fabric, counts, uneven)
    trained_batches = 0
    validated = []
    for _ in range(2):
        for x in loader:
            loss = model(x.double()).sum()
            fabric.backward(loss, weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            if not loader.is_repeat:
                trained_batches += 1
        model.eval()
        with torch.no_grad():
            for x in loader:
                model(x.double())
                gathered = fabric.gather_for_metrics(x)
                validated += gathered[::2, 0].long().tolist()
        model.train()
    return trained_batches, validated


def train_and_validate_all(fabric: Fabric) -> list[tuple[int, list[int]]]:
    return [train_and_validate(fabric, counts, uneven) for counts, uneven in CASES]


CASES = [
    ((1, 3), "shortest"),
    ((0, 2), "shortest"),
    ((0, 0), "longest"),
    ((1, 3), "longest"),
    ((2, 0), "longest"),
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("checked", [False, True])
def test_training_and_validation_end_on_all_ranks(strategy: str, checked: bool) -> None:
    results = run_in_ranks(train_and_validate_all, strategy=strategy, check_collectives=checked)
    for rank, results_of_rank in enumerate(results):
        for case, (trained_batches, validated) in zip(CASES, results_of_rank, strict=True):
            counts, uneven = case
            total = common_count(counts, uneven)
            assert trained_batches == 2 * min(total, counts[rank])
            expected = []
            for number in range(total):
                for validating_rank in range(2):
                    if number < counts[validating_rank]:
                        expected.append(validating_rank * SPAN + 2 * number)
            assert validated == expected * 2


def states_of_steps(fabric: Fabric, workers: int) -> tuple[list[Any], list[Any]]:
    """Return the random state and the buffers after each step, and after the loop."""
    model, _ = net(fabric)
    states = []
    for x in rows(fabric, (1, 4), "longest", workers):
        model(x.double())
        torch.rand(3)
        states.append(copy.deepcopy([rng_state()["torch"], *model.buffers()]))
    return states, [rng_state()["torch"], *model.buffers()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_repeat_leaves_random_streams_and_running_statistics(workers: int) -> None:
    states, state_after_loop = run_in_ranks(states_of_steps, workers)[0]
    # Each worker reads the whole stream: rank 0 has one batch and three repeats for each.
    readers = max(workers, 1)
    assert len(states) == 4 * readers
    torch.testing.assert_close(state_after_loop, states[readers - 1], rtol=0, atol=0)
    assert not torch.equal(states[-1][0], state_after_loop[0])


def synchronized(fabric: Fabric) -> str:
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = fabric.setup(fabric.sync_batchnorm(plain))
    loader = rows(fabric, (1, 2), "longest")
    text = outcome(lambda: iter(loader))
    del model
    return text


def test_statistics_over_all_ranks_are_refused_under_longest() -> None:
    for text in run_in_ranks(synchronized, strategy="fsdp"):
        assert text.startswith("UsageError")
        assert "SyncBatchNorm" in text
        assert 'uneven="shortest"' in text


# -- training, for any numbers of samples ----------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run whose ranks have different numbers of samples.

    Args:
        counts: The number of samples of each rank.
        uneven: The option of the loader.
        steps: The number of micro-batches in a window.
    """

    counts: tuple[int, ...]
    uneven: Any
    steps: int

    def batch(self, rank: int, number: int) -> range:
        """Return the samples of a batch, which is empty where the rank has no such batch."""
        return samples_of_rank(rank, self.counts[rank])[2 * number : 2 * number + 2]

    def global_batch(self, number: int) -> list[int]:
        """Return the samples of the batches of all ranks."""
        samples = []
        for rank in range(len(self.counts)):
            samples += self.batch(rank, number)
        return samples

    @property
    def batches(self) -> int:
        """The number of batches that every rank gets."""
        return math.ceil(common_count(self.counts, self.uneven) / 2)


jobs = st.builds(
    Job,
    st.lists(st.integers(0, 10), min_size=2, max_size=3).map(tuple),
    st.sampled_from(["shortest", "longest"]),
    st.integers(1, 3),
)


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 2),
        nn.Tanh(),
        nn.Linear(2, 1),
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def features(samples: Any) -> torch.Tensor:
    """Return the inputs of the samples, of shape (n, 3)."""
    x = torch.as_tensor(samples, dtype=torch.float64)
    return torch.stack([x.sin(), x.cos(), (2 * x).sin()], dim=-1)


class Result(NamedTuple):
    """What one rank has trained on, and the samples that it has validated and gathered."""

    trained: list[int]
    weights: torch.Tensor
    count: int
    gathered: list[list[int]]


def train_job(fabric: Fabric, job: Job) -> Result:
    """Train one epoch in windows, and validate one epoch."""
    model, optimizer = fabric.setup(*small())
    data = RankStream(fabric.global_rank, job.counts[fabric.global_rank])
    loader = setup_loader(fabric, data, batch_size=2, uneven=job.uneven)
    trained: list[int] = []
    for batch, last in fabric.accumulate(loader, job.steps):
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(features(batch)).square().sum()
            fabric.backward(loss, weight=len(batch))
        if not loader.is_repeat:
            trained += batch.tolist()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    # Only rank 0 has the whole state dict.
    weights = torch.zeros(0)
    state_dict = fabric.get_state_dict(model)
    if state_dict:
        weights = nn.utils.parameters_to_vector(state_dict.values())
    count = 0
    gathered = []
    with torch.no_grad():
        for batch in loader:
            model(features(batch))
            if not loader.is_repeat:
                count += len(batch)
            gathered.append(fabric.gather_for_metrics(batch).tolist())
    return Result(trained, weights, fabric.all_reduce(count, reduce_op="sum"), gathered)


def train_in_one_process(job: Job) -> torch.Tensor:
    """Train on the samples of all ranks, and return the weights."""
    model, optimizer = small()
    for first in range(0, job.batches, job.steps):
        samples = []
        for number in range(first, min(first + job.steps, job.batches)):
            samples += job.global_batch(number)
        model(features(samples)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def check_job(job: Job, strategy: str) -> None:
    results = run_in_ranks(train_job, job, ranks=len(job.counts), strategy=strategy)
    global_batches = [job.global_batch(number) for number in range(job.batches)]
    for rank, result in enumerate(results):
        samples = []
        for number in range(job.batches):
            samples += job.batch(rank, number)
        assert result.trained == samples
        assert result.count == sum(map(len, global_batches))
        assert result.gathered == global_batches
    expected = train_in_one_process(job)
    torch.testing.assert_close(results[0].weights, expected, rtol=1e-12, atol=1e-12)


HOW_MANY = [
    3,
    pytest.param(25, marks=pytest.mark.slow),
    pytest.param(500, marks=[pytest.mark.slow, pytest.mark.soak]),
]


@pytest.mark.parametrize("examples", HOW_MANY)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_is_that_of_one_process_with_the_samples_of_all(
    strategy: str, examples: int
) -> None:
    @example(Job((5, 0, 2), "longest", 2))
    @profile(examples)
    @given(jobs)
    def holds(job: Job) -> None:
        check_job(job, strategy)

    holds()


# -- weights of losses, and stalls -----------------------------------------------------------------


def unweighted(fabric: Fabric) -> tuple[str, str]:
    module = nn.Linear(3, 1)
    model = fabric.setup(module)

    def backward_without_weight(x: torch.Tensor) -> str:
        return outcome(lambda: fabric.backward(model(x).sum()))

    [inside] = map(backward_without_weight, rows(fabric, (1, 1), "longest"))
    return inside, backward_without_weight(torch.ones(1, 3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_without_a_weight_is_refused_under_longest(ranks: int) -> None:
    for inside, after in run_in_ranks(unweighted, ranks=ranks):
        assert inside.startswith("UsageError")
        assert "weight=len(losses)" in inside
        assert after == "fine"


def with_a_bad_repeat(fabric: Fabric) -> tuple[bool, list[bool]]:
    model, optimizer = fabric.setup(*small())
    loader = rows(fabric, (1, 3), "longest")
    flags = []
    for x in loader:
        loss = model(x.double()).sum()
        weight = 2.0
        if loader.is_repeat:
            # Neither the loss nor the weight of a repeat counts.
            loss = loss + float("inf")
            weight = 7.0
        fabric.backward(loss, weight=torch.tensor(weight))
        optimizer.step()
        optimizer.zero_grad()
        if len(flags) == 1:
            break
        flags.append(loader.is_repeat)
    flags.append(loader.is_repeat)
    is_finite = True
    for value in fabric.get_state_dict(model).values():
        is_finite = is_finite and bool(value.isfinite().all())
    return is_finite, flags


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_repeat_counts_nothing_whatever_its_loss_and_weight(strategy: str) -> None:
    for is_finite, flags in run_in_ranks(with_a_bad_repeat, strategy=strategy):
        assert is_finite
        assert flags == [False, False]


def late(fabric: Fabric) -> str:
    data = data_of_rank(fabric, (3, 3), has_length=False)
    loader = setup_loader(fabric, data, uneven="shortest")

    def loop() -> None:
        for number, _ in enumerate(loader):
            if number == 1 and fabric.global_rank == 1:
                break
        fabric.barrier()

    text = outcome(loop)
    # The report of the other rank would say that this rank has finished.
    store = fabric.strategy.runtime.store
    store.set(f"raised on {fabric.global_rank}", b"")
    while store.get_nowait(f"raised on {1 - fabric.global_rank}") is None:
        time.sleep(0.01)
    return text


@pytest.mark.slow
def test_a_rank_that_waits_for_the_batch_count_of_another_is_named() -> None:
    for text in run_in_ranks(late, timeout=4.0, watchdog=0):
        assert "rank 0: in the next batch at" in text
        assert "rank 1: in barrier" in text
