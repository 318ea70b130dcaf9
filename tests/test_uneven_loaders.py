"""Loaders whose ranks have different numbers of batches: they stop together, or those without get a batch again."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tests.laws.base import profile
from tests.ranks import outcome, run_in_ranks

SPAN = 100  # samples of rank r are r * SPAN, r * SPAN + 1, ...


class Own(IterableDataset[Any]):
    """The samples of one rank, which has ``n`` of them, without saying how many."""

    shards_itself = True

    def __init__(self, rank: int, n: int, width: int = 0) -> None:
        self.first = rank * SPAN
        self.n = n
        self.width = width

    def __iter__(self) -> Iterator[Any]:
        for sample in range(self.first, self.first + self.n):
            yield torch.full((self.width,), float(sample)) if self.width else sample


class Common(IterableDataset[int]):
    """Samples that all ranks read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n


class Contiguous(Sampler[int]):
    """Shards by itself, a part of another length for each rank."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank = rank
        self.num_replicas = num_replicas

    def __len__(self) -> int:
        return self.rank + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 2 * self.rank + 1))


def own(fabric: Fabric, counts: Any, uneven: Any, known: bool, **options: Any) -> Any:
    rank = fabric.global_rank
    data: Any = range(rank * SPAN, rank * SPAN + counts[rank]) if known else Own(rank, counts[rank])
    return fabric.setup_dataloaders(
        DataLoader(data, **options), use_distributed_sampler=False, uneven=uneven
    )


def in_passes(fabric: Fabric, counts: Any, uneven: str, known: bool, steps: int) -> list[Any]:
    loader = own(fabric, counts, uneven, known)
    found = []
    for _ in range(2):
        found.append([])
        for item in fabric.accumulate(loader, steps) if steps else loader:
            batch, last = item if steps else (item, None)
            cursor = loader.state_dict()["cursor"]
            gathered = fabric.gather_for_metrics(batch).tolist()
            found[-1].append((batch.item(), loader.is_repeat, last, cursor, gathered))
        assert not loader.is_repeat
        assert loader.state_dict()["cursor"] == 0  # of the next epoch
    return found


def expected_pass(counts: Any, rank: int, uneven: str, steps: int) -> list[Any]:
    """What one rank gets, told without fabric."""
    total = min(counts) if uneven == "shortest" else max(counts)
    spare = [r * SPAN for r, count in enumerate(counts) if count][:1]
    found = []
    for i in range(total):
        last = None if not steps else (i + 1) % steps == 0 or i + 1 == total
        is_repeat = i >= counts[rank]
        batch = spare[0] if not counts[rank] else rank * SPAN + min(i, counts[rank] - 1)
        gathered = [r * SPAN + i for r, count in enumerate(counts) if i < count]
        found.append((batch, is_repeat, last, min(i + 1, counts[rank]) * len(counts), gathered))
    return found


COUNTS = [(2, 3), (3, 1), (0, 2), (0, 0), (4,), (0, 1, 3), (5, 2, 2)]


@pytest.mark.parametrize("uneven", ["shortest", "longest"])
@pytest.mark.parametrize("known", [False, True])
def test_all_ranks_stop_with_the_first_or_with_the_last(uneven: str, known: bool) -> None:
    for counts in COUNTS:
        for steps in (0, 2):
            results = ThreadedWorld(len(counts)).run(in_passes, counts, uneven, known, steps)
            for rank, passes in enumerate(results):
                assert passes == [expected_pass(counts, rank, uneven, steps)] * 2, (
                    counts,
                    rank,
                    steps,
                )


def test_a_rank_that_knows_its_length_and_one_that_does_not_agree() -> None:
    def loop(fabric: Fabric) -> list[Any]:
        return [
            batch.item() for batch in own(fabric, (2, 3), "longest", known=fabric.global_rank == 0)
        ]

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
        loader = fabric.setup_dataloaders(
            DataLoader(data), use_distributed_sampler=False, uneven="shortest"
        )
        return [data.loaded for _ in loader]

    assert ThreadedWorld(2).run(loop) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_fabric_shards_itself_is_even_anyway(ranks: int) -> None:
    def refused(fabric: Fabric) -> str:
        return outcome(lambda: fabric.setup_dataloaders(DataLoader(range(5)), uneven="longest"))

    for text in ThreadedWorld(ranks).run(refused):
        assert text.startswith(ConfigurationError.__name__)
        assert 'uneven="pad" or "drop"' in text
    with (
        Fabric(accelerator="cpu", devices=1) as fabric,
        pytest.raises(ConfigurationError, match="'longest'"),
    ):
        fabric.setup_dataloaders(DataLoader(range(5)), uneven="long")  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_the_last_round_of_a_common_stream_counts_under_longest_alone() -> None:
    def loop(fabric: Fabric, n: int, uneven: Any) -> Any:
        loader = fabric.setup_dataloaders(DataLoader(Common(n), 2), uneven=uneven)
        own = [sample for batch in loader if not loader.is_repeat for sample in batch.tolist()]
        return own, [
            sample for batch in loader for sample in fabric.gather_for_metrics(batch).tolist()
        ]

    for ranks, n in ((1, 5), (2, 5), (3, 8), (3, 1), (2, 0)):
        for uneven in ("pad", "shortest", "longest"):
            results = ThreadedWorld(ranks).run(loop, n, uneven)
            kept = n if uneven == "longest" else n // ranks * ranks
            assert [result[0] for result in results] == [
                list(range(rank, kept, ranks)) for rank in range(ranks)
            ]
            assert all(sorted(result[1]) == list(range(kept)) for result in results)


def test_samplers_that_shard_by_themselves() -> None:
    def loop(fabric: Fabric, kind: str, uneven: Any) -> Any:
        place = fabric.world_size, fabric.global_rank
        data = range(7)
        ours = Contiguous(place[1], place[0])
        sampler: Any = (
            DistributedSampler(data, *place, shuffle=False) if kind == "torch's" else ours
        )
        made = DataLoader(data, 2, sampler=sampler)
        if kind == "in batches":
            made = DataLoader(data, batch_sampler=BatchSampler(ours, 2, drop_last=False))
        loader = fabric.setup_dataloaders(made, uneven=uneven)
        return [fabric.gather_for_metrics(batch).tolist() for batch in loader]

    for uneven in ("shortest", "longest"):
        assert ThreadedWorld(2).run(loop, "torch's", uneven)[0] == [[0, 1, 2, 3], [4, 5, 6]]
    for kind in ("by hand", "in batches"):
        assert ThreadedWorld(3).run(loop, kind, "shortest")[0] == [[0, 1, 2, 2, 3]]
        assert ThreadedWorld(3).run(loop, kind, "longest")[0] == [[0, 1, 2, 2, 3], [4]]


def test_a_loader_of_single_samples_counts_each_once() -> None:
    def loop(fabric: Fabric) -> Any:
        loader = own(fabric, (1, 2), "longest", known=False, batch_size=None)
        return [fabric.gather_for_metrics(torch.tensor(sample)).tolist() for sample in loader]

    assert ThreadedWorld(2).run(loop) == [[[0, 100], [101]]] * 2


@pytest.mark.parametrize("known", [False, True])
def test_a_repeat_is_not_in_a_position(known: bool) -> None:
    def loop(fabric: Fabric, stop: int) -> Any:
        def samples(loader: Any) -> list[int]:
            return [batch.item() for batch in loader if not loader.is_repeat]

        loader = own(fabric, (2, 5), "longest", known)
        seen = []
        for number, batch in enumerate(loader, 1):
            seen += [] if loader.is_repeat else [batch.item()]
            if number == stop:
                break
        state = loader.state_dict()
        resumed = own(fabric, (2, 5), "longest", known)
        if not known:
            return seen
        resumed.load_state_dict(state)
        return seen + samples(resumed)

    for stop in range(1, 6):
        actual = ThreadedWorld(2).run(loop, stop)
        assert (
            actual == [[0, 1], [100, 101, 102, 103, 104]]
            if known
            else [[0, 1][:stop], list(range(100, 100 + stop))]
        )


class Counting(Own):
    """Knows how many samples it has yielded."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.n:
            self.at += 1
            yield self.first + self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def saved_and_resumed(fabric: Fabric, folder: str) -> list[Any]:
    rank = fabric.global_rank
    found = []

    def make(known: bool, count: int) -> Any:
        data: Any = range(rank * SPAN, rank * SPAN + count) if known else Counting(rank, count)
        return fabric.setup_dataloaders(
            DataLoader(data), use_distributed_sampler=False, uneven="longest"
        )

    for known, counts, stop in itertools.product((False, True), ((2, 5), (5, 2)), (1, 4)):
        loader = make(known, counts[rank])
        seen = []
        for number, batch in enumerate(loader, 1):
            seen += [] if loader.is_repeat else [batch.item()]
            if number == stop:
                fabric.save(path := f"{folder}/{len(found)}", {"loader": loader})
                break
        resumed = make(known, counts[rank])
        loaded = outcome(lambda: fabric.load(path, {"loader": resumed}))  # noqa: B023
        if loaded == "fine":
            seen += [batch.item() for batch in resumed if not resumed.is_repeat]
        found.append(
            (
                known,
                counts,
                stop,
                loaded,
                seen == list(range(rank * SPAN, rank * SPAN + counts[rank])),
            )
        )
    return found


def test_a_checkpoint_has_the_positions_of_all_ranks_also_where_one_has_run_out(
    tmp_path: Path,
) -> None:
    for found in run_in_ranks(saved_and_resumed, str(tmp_path)):
        for known, counts, stop, loaded, is_whole in found:
            assert loaded == "fine", (known, counts, stop)
            assert is_whole, (known, counts, stop)


def broken_off(fabric: Fabric, at: int | tuple[int, int]) -> list[int]:
    loader = own(fabric, (4, 6), "longest", known=False)
    found = []
    stop = at if isinstance(at, int) else at[fabric.global_rank]
    for _ in range(3):
        for number, batch in enumerate(loader, 1):
            found.append(batch.item())
            if number == stop:
                break
    return found


def test_a_break_leaves_nothing_that_the_next_loop_meets() -> None:
    assert ThreadedWorld(2).run(broken_off, 2) == [[0, 1] * 3, [100, 101] * 3]
    assert ThreadedWorld(2).run(broken_off, 5) == [
        [0, 1, 2, 3, 3] * 3,
        [100, 101, 102, 103, 104] * 3,
    ]


def test_breaks_at_different_batches_are_told() -> None:
    with pytest.raises(
        RankFailedError, match=r"rank 0 behind batch 0 of loop 2, rank 1 behind batch 3 of loop 1"
    ):
        ThreadedWorld(2).run(broken_off, (2, 3))


def test_a_dataset_that_raises_on_one_rank_ends_all() -> None:
    class Bad(Own):
        def __iter__(self) -> Iterator[Any]:
            yield 0
            yield 1
            raise KeyError("of the dataset")

    def loop(fabric: Fabric) -> None:
        data = Bad(0, 5) if fabric.global_rank else Own(0, 5)
        list(
            fabric.setup_dataloaders(
                DataLoader(data), use_distributed_sampler=False, uneven="shortest"
            )
        )

    with pytest.raises(RankFailedError, match="of the dataset"):
        ThreadedWorld(2).run(loop)


# -- with modules, on real ranks ----------------------------------------------------------------------------------


def net(fabric: Fabric) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)
    ).double()
    return fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.01))


def rows(fabric: Fabric, counts: Any, uneven: Any, workers: int = 0) -> Any:
    data = Own(fabric.global_rank, 2 * counts[fabric.global_rank], 3)
    made = DataLoader(data, 2, num_workers=workers)
    return fabric.setup_dataloaders(made, use_distributed_sampler=False, uneven=uneven)


def train_and_validate(fabric: Fabric, every: Any) -> list[Any]:
    found: list[Any] = []
    for counts, uneven in every:
        model, optimizer = net(fabric)
        loader = rows(fabric, counts, uneven)
        trained = 0
        seen = []
        for _ in range(2):
            for x in loader:
                fabric.backward(model(x.double()).sum(), weight=len(x))
                optimizer.step()
                optimizer.zero_grad()
                trained += not loader.is_repeat
            model.eval()
            with torch.no_grad():
                for x in loader:
                    model(x.double())
                    seen += fabric.gather_for_metrics(x)[::2, 0].long().tolist()
            model.train()
        found.append((trained, seen))
    return found


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
    results = run_in_ranks(train_and_validate, CASES, strategy=strategy, check_collectives=checked)
    for rank, found in enumerate(results):
        for (counts, uneven), (trained, seen) in zip(CASES, found, strict=True):
            total = min(counts) if uneven == "shortest" else max(counts)
            assert trained == 2 * min(total, counts[rank])
            one = [r * SPAN + 2 * i for i in range(total) for r in range(2) if i < counts[r]]
            assert seen == one * 2


def with_repeats(fabric: Fabric, workers: int) -> list[Any]:
    model, _ = net(fabric)
    loader = rows(fabric, (1, 4), "longest", workers)
    states = []
    for x in loader:
        model(x.double())
        torch.rand(3)
        states.append([rng_state()["torch"], *(buffer.clone() for buffer in model.buffers())])
    return [rng_state()["torch"], *(buffer.clone() for buffer in model.buffers())], states


@pytest.mark.parametrize("workers", [0, 2])
def test_a_repeat_leaves_random_streams_and_running_statistics(workers: int) -> None:
    after, states = run_in_ranks(with_repeats, workers)[0]
    assert len(states) == 4 * max(workers, 1)  # each worker reads the whole stream
    assert all(
        torch.equal(one, other)
        for one, other in zip(after, states[max(workers, 1) - 1], strict=True)
    )
    assert not torch.equal(states[-1][0], after[0])


def synchronized(fabric: Fabric) -> str:
    plain = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    model = fabric.setup(plain)
    loader = rows(fabric, (1, 2), "longest")
    text = outcome(lambda: iter(loader))
    del model
    return text


def test_statistics_over_all_ranks_are_refused_under_longest() -> None:
    for text in run_in_ranks(synchronized, strategy="fsdp"):
        assert text.startswith("UsageError")
        assert "SyncBatchNorm" in text
        assert 'uneven="shortest"' in text


# -- the whole promise, for any numbers of samples ----------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    samples: tuple[int, ...]
    """Of each rank."""
    uneven: Any
    steps: int
    """Micro-batches in a window."""

    def batch(self, rank: int, number: int) -> list[int]:
        """The samples of a batch, from 0; none where the rank has no such batch."""
        first = rank * SPAN
        return list(range(first + 2 * number, first + min(2 * number + 2, self.samples[rank])))

    @property
    def batches(self) -> int:
        """Of each rank, in the end."""
        pick = min if self.uneven == "shortest" else max
        return -(-pick(self.samples) // 2)


jobs = st.builds(
    Job,
    st.lists(st.integers(0, 10), min_size=2, max_size=3).map(tuple),
    st.sampled_from(["shortest", "longest"]),
    st.integers(1, 3),
)


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def features(samples: Any) -> torch.Tensor:
    """The inputs of these samples, of shape (n, 3)."""
    x = torch.as_tensor(samples, dtype=torch.float64)
    return torch.stack([x.sin(), x.cos(), (2 * x).sin()], dim=-1)


def exactly(fabric: Fabric, job: Job) -> tuple[Any, ...]:
    model, optimizer = fabric.setup(*small())
    data = Own(fabric.global_rank, job.samples[fabric.global_rank])
    loader = fabric.setup_dataloaders(
        DataLoader(data, 2), use_distributed_sampler=False, uneven=job.uneven
    )
    trained: list[int] = []
    for batch, last in fabric.accumulate(loader, job.steps):
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(features(batch)).square().sum(), weight=len(batch))
        trained += [] if loader.is_repeat else batch.tolist()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat(
        [value.flatten() for value in fabric.get_state_dict(model).values()] or [torch.zeros(0)]
    )
    count = 0
    gathered = []
    with torch.no_grad():
        for batch in loader:
            model(features(batch))
            count += 0 if loader.is_repeat else len(batch)
            gathered.append(fabric.gather_for_metrics(batch).tolist())
    return trained, weights, fabric.all_reduce(count, reduce_op="sum"), gathered


def in_one_process(job: Job) -> torch.Tensor:
    model, optimizer = small()
    steps = range(job.batches)
    for window in (steps[first : first + job.steps] for first in range(0, job.batches, job.steps)):
        samples = [
            each
            for rank in range(len(job.samples))
            for number in window
            for each in job.batch(rank, number)
        ]
        model(features(samples)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check(job: Job, strategy: str) -> None:
    results = run_in_ranks(exactly, job, ranks=len(job.samples), strategy=strategy)
    ranks = range(len(job.samples))
    gathered = [
        [each for rank in ranks for each in job.batch(rank, number)]
        for number in range(job.batches)
    ]
    for rank, (trained, _, count, found) in enumerate(results):
        assert trained == [
            each for number in range(job.batches) for each in job.batch(rank, number)
        ]
        assert count == sum(map(len, gathered))
        assert found == gathered
    torch.testing.assert_close(results[0][1], in_one_process(job), rtol=1e-12, atol=1e-12)


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
        check(job, strategy)

    holds()


# -- what a loop may and may not do -------------------------------------------------------------------------------


def unweighted(fabric: Fabric) -> tuple[str, str]:
    model = fabric.setup(nn.Linear(3, 1))
    with_gradients = [
        outcome(lambda x=x: fabric.backward(model(x).sum()))
        for x in rows(fabric, (1, 1), "longest")
    ]
    after = outcome(lambda: fabric.backward(model(torch.ones(1, 3)).sum()))
    return with_gradients[0], after


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
        loss = model(x.double()).sum() + (float("inf") if loader.is_repeat else 0)
        # On a repeat any weight counts as zero, of the same kind.
        fabric.backward(loss, weight=torch.tensor(7.0 if loader.is_repeat else 2.0))
        optimizer.step()
        optimizer.zero_grad()
        if len(flags) == 1:
            break
        flags.append(loader.is_repeat)
    flags.append(loader.is_repeat)
    return all(
        bool(value.isfinite().all()) for value in fabric.get_state_dict(model).values()
    ), flags


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_repeat_counts_nothing_whatever_its_loss_and_weight(strategy: str) -> None:
    assert run_in_ranks(with_a_bad_repeat, strategy=strategy) == [(True, [False, False])] * 2


def late(fabric: Fabric) -> str:
    loader = own(fabric, (3, 3), "shortest", known=False)

    def loop() -> None:
        for number, _ in enumerate(loader):
            if number == 1 and fabric.global_rank == 1:
                break
        fabric.barrier()

    return outcome(loop)


@pytest.mark.slow
def test_a_rank_that_waits_for_the_flag_of_another_is_named() -> None:
    for text in run_in_ranks(late, timeout=4.0, watchdog=0):
        assert "rank 0: in the next batch at" in text
        assert "rank 1: in barrier" in text
