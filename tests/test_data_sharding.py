"""What each rank gets out of a loader: ranks are simulated by preparing the same loader once for each."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.data import DataParallelJob, FabricDataLoader
from tests.datasets import Eager

laws = settings(max_examples=50, deadline=None, derandomize=True)


class Delegating(Eager):
    """Looks eager and is lazy."""

    def __iter__(self) -> Iterator[int]:
        return iter(RandomSampler(range(self.n)))


class Pythonic(Eager):
    """Draws from python's stream, one by one."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield random.randrange(self.n)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(1000, ()))


class Batches(Eager):
    """A batch sampler that draws eagerly; batches of one to three samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter([list(range(i, i + 1 + i % 3)) for i in torch.randperm(self.n).tolist()])


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "sequential": lambda n: SequentialSampler(range(n)),
    "random": lambda n: RandomSampler(range(n)),
    "own generator": lambda n: RandomSampler(range(n), generator=torch.Generator().manual_seed(5)),
    "replacement": lambda n: RandomSampler(range(n), replacement=True, num_samples=n + 3),
    "subset": lambda n: SubsetRandomSampler(range(n)),
    "weighted": lambda n: WeightedRandomSampler([1.0 + i for i in range(n)], n + 1),
    "eager": Eager,
    "delegating": Delegating,
    "pythonic": Pythonic,
    "list": lambda n: list(range(n))[::-1],
}


class Rank0:
    """``agree`` for ranks that run one after the other: what was passed first is rank 0's."""

    def __init__(self) -> None:
        self.published: dict[str, bytes] = {}

    def __call__(self, key: str, mine: bytes) -> bytes:
        return self.published.setdefault(key, mine)


def prepare(
    loader: DataLoader[Any],
    rank: int = 0,
    num_replicas: int = 1,
    from_rank0: Any = None,
    **options: Any,
) -> FabricDataLoader:
    job = DataParallelJob(rank, num_replicas, from_rank0)
    return FabricDataLoader(loader, job, device=None, **options)


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


def make_loader(kind: str, n: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(n + 10), batch_size=batch_size, sampler=SAMPLERS[kind](n), **options)


def ranks_of(
    make: Callable[[], DataLoader[Any]], num_replicas: int, diverged: bool, **options: Any
) -> list[Any]:
    """All epochs' batches of every rank: ``[rank][epoch][batch]``; with streams that moved apart if ``diverged``."""
    agree = Rank0()
    all_ranks = []
    for rank in range(num_replicas):
        seed(100 + rank if diverged else 100)
        loader = prepare(make(), rank, num_replicas, from_rank0=agree, **options)
        all_ranks.append([lists(loader) for _ in range(2)])
    return all_ranks


def interleaved(batches: list[list[int]]) -> list[int]:
    """The samples of the i-th batches of all ranks in the order of the plain loop."""
    rows = itertools.zip_longest(*batches)
    return [sample for row in rows for sample in row if sample is not None]


@laws
@given(
    kind=st.sampled_from(sorted(SAMPLERS)),
    n=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    num_replicas=st.integers(2, 5),
    drop_last=st.booleans(),
    uneven=st.sampled_from(["pad", "drop"]),
    diverged=st.booleans(),
)
def test_union_of_the_ith_batches_is_the_ith_batch_of_the_plain_loop(
    kind: str,
    n: int,
    batch_size: int,
    num_replicas: int,
    drop_last: bool,
    uneven: str,
    diverged: bool,
) -> None:
    make = lambda: make_loader(kind, n, batch_size, drop_last=drop_last)  # noqa: E731
    ranks = ranks_of(make, num_replicas, diverged, uneven=uneven)
    seed(100)
    plain = make_loader(kind, n, batch_size * num_replicas, drop_last=drop_last)
    for epoch in range(2):
        expected = lists(plain)
        entries = [sample for batch in expected for sample in batch]
        if uneven == "drop" and not drop_last:
            entries = entries[: len(entries) // num_replicas * num_replicas]
        shards = [
            interleaved(list(batches))
            for batches in zip(*(rank[epoch] for rank in ranks), strict=True)
        ]
        together = [sample for batch in shards for sample in batch]
        assert together[: len(entries)] == entries
        repeated = together[len(entries) :]
        assert len(repeated) == (-len(entries) % num_replicas if uneven == "pad" else 0)
        assert repeated == (entries * num_replicas)[: len(repeated)]
        full = len(entries) // (batch_size * num_replicas)
        assert shards[:full] == expected[:full]


@laws
@given(
    kind=st.sampled_from(sorted(SAMPLERS)),
    n=st.integers(1, 30),
    batch_size=st.none() | st.integers(1, 4),
    num_replicas=st.integers(1, 5),
    uneven=st.sampled_from(["pad", "drop"]),
    drop_last=st.booleans(),
)
def test_every_rank_gets_len_of_the_loader_many_batches(
    kind: str, n: int, batch_size: int | None, num_replicas: int, uneven: str, drop_last: bool
) -> None:
    lengths = set()
    for rank in range(num_replicas):
        plain = make_loader(kind, n, batch_size, drop_last=drop_last and batch_size is not None)
        loader = prepare(plain, rank, num_replicas, uneven=uneven)
        assert len(loader) == len(list(loader))
        lengths.add(len(loader))
    assert len(lengths) == 1


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("kind", sorted(SAMPLERS))
def test_random_streams_end_where_the_plain_loop_leaves_them(
    kind: str, batch_size: int | None, num_replicas: int
) -> None:
    agree = Rank0()
    ends = []
    for rank in [*range(num_replicas), None]:
        seed(7)
        loader = make_loader(kind, 12, batch_size, generator=torch.Generator().manual_seed(1))
        iterated = loader if rank is None else prepare(loader, rank, num_replicas, from_rank0=agree)
        for _ in range(2):
            list(iterated)
        ends.append((streams(), loader.generator.get_state().tolist()))
    assert all(end == ends[-1] for end in ends)


@pytest.mark.parametrize("kind", sorted(SAMPLERS))
def test_one_replica_interleaves_its_drawing_with_the_loop_as_the_plain_loop_does(
    kind: str,
) -> None:
    seen = []
    for wrap in (prepare, lambda loader: loader):
        seed(3)
        iterator = iter(wrap(make_loader(kind, 9, 2)))
        drawn = [torch.rand(()).item()]
        seen.append(
            [(batch.tolist(), torch.rand(()).item(), random.random()) for batch in iterator] + drawn
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "make", [Batches, lambda n: BatchSampler(RandomSampler(range(n * 2)), 2, False)]
)
@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_batches_of_a_batch_sampler_are_sharded_whole(
    make: Callable[[int], Any], uneven: str
) -> None:
    agree = Rank0()
    ranks = []
    for rank in range(3):
        seed(rank)
        loader = prepare(
            DataLoader(range(30), batch_sampler=make(7)), rank, 3, from_rank0=agree, uneven=uneven
        )
        ranks.append(lists(loader))
        assert len(ranks[-1]) == len(loader) == (3 if uneven == "pad" else 2)
    seed(0)
    expected = lists(DataLoader(range(30), batch_sampler=make(7)))
    together = [batch for round_ in zip(*ranks, strict=True) for batch in round_]
    assert together == (expected + expected[:2] if uneven == "pad" else expected[:6])


def test_diverged_rank_keeps_its_own_stream() -> None:
    agree = Rank0()
    seed(1)
    list(prepare(DataLoader(range(10), shuffle=True), 0, 2, from_rank0=agree))
    seed(2)
    list(prepare(DataLoader(range(10), shuffle=True), 1, 2, from_rank0=agree))
    own = streams()
    seed(2)
    list(DataLoader(range(10)))
    assert streams() == own


def test_ranks_adopt_the_generator_of_rank_0() -> None:
    agree = Rank0()
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for rank, generator in enumerate(generators):
        list(
            prepare(
                DataLoader(range(10), shuffle=True, generator=generator), rank, 2, from_rank0=agree
            )
        )
    assert generators[0].get_state().equal(generators[1].get_state())


@pytest.mark.parametrize("agreeing", [True, False])
def test_endless_samplers_are_sharded_lazily(agreeing: bool) -> None:
    agree = Rank0()
    ranks = []
    for rank in range(3):
        seed(rank if agreeing else 0)
        loader = prepare(
            DataLoader(range(1000), 2, sampler=Endless()),
            rank,
            3,
            from_rank0=agree if agreeing else None,
        )
        with pytest.raises(TypeError):
            len(loader)
        batches = []
        for batch in itertools.islice(loader, 4):
            batches.append(batch.tolist())
            if agreeing:
                torch.rand(rank)  # each rank's own random numbers in between
        ranks.append(batches)
    seed(0)
    torch.empty((), dtype=torch.int64).random_()  # the base seed
    expected = list(itertools.islice(Endless(), 24))
    assert [
        s for batches in zip(*ranks, strict=True) for s in interleaved(list(batches))
    ] == expected


@pytest.mark.parametrize(("uneven", "lengths"), [("pad", [3, 3]), ("drop", [2, 2])])
def test_order_without_a_length_that_ends_is_evened_out(uneven: str, lengths: list[int]) -> None:
    order = (10 + i for i in range(5))

    class Short(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return (10 + i for i in range(5))

    ranks = [
        lists(prepare(DataLoader(range(20), None, sampler=Short()), r, 2, uneven=uneven))
        for r in range(2)
    ]
    assert [len(rank) for rank in ranks] == lengths
    assert interleaved(ranks)[:4] == list(itertools.islice(order, 4))
    assert uneven == "drop" or ranks[1][-1] == 10


def test_sequential_and_distributed_orders_need_no_agreement() -> None:
    agree = Rank0()
    list(prepare(DataLoader(range(10)), 1, 2, from_rank0=agree))
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1)
    list(prepare(DataLoader(range(10), sampler=sampler), 1, 2, from_rank0=agree))
    assert not agree.published


def test_distributed_sampler_is_left_alone_and_told_the_epoch() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1)
    loader = prepare(DataLoader(range(10), 2, sampler=sampler), 1, 2)
    epochs = [lists(loader) for _ in range(2)]
    assert len(loader) == 3
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert epochs[epoch] == lists(DataLoader(range(10), 2, sampler=sampler))


def test_unsharded_loader_gives_every_rank_everything() -> None:
    loader = prepare(DataLoader(range(5), 2), 1, 2, shard=False)
    assert lists(loader) == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3


class Numbers(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.start = 0
        self.stop = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.stop - self.start


def split_between_workers(worker_id: int) -> None:
    """As in torch's documentation: it configures the worker's copy of the dataset."""
    info = torch.utils.data.get_worker_info()
    half = info.dataset.stop // 2
    info.dataset.start, info.dataset.stop = (
        (0, half) if worker_id == 0 else (half, info.dataset.stop)
    )


@laws
@given(
    n=st.integers(0, 30), num_replicas=st.integers(1, 4), batch_size=st.none() | st.integers(1, 4)
)
def test_iterable_dataset_is_sharded_in_complete_rounds(
    n: int, num_replicas: int, batch_size: int | None
) -> None:
    ranks = []
    for rank in range(num_replicas):
        loader = prepare(DataLoader(SizedNumbers(n), batch_size=batch_size), rank, num_replicas)
        ranks.append(lists(loader))
        assert len(loader) == len(ranks[-1])
    flat = [
        [s for batch in rank for s in (batch if isinstance(batch, list) else [batch])]
        for rank in ranks
    ]
    assert interleaved(flat) == list(range(n // num_replicas * num_replicas))


def test_iterable_dataset_without_a_length_has_none_when_sharded() -> None:
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Numbers(4)), 0, 2))


def test_iterable_dataset_that_shards_itself_is_left_alone() -> None:
    dataset = Numbers(4)
    dataset.shards_itself = True
    assert lists(prepare(DataLoader(dataset), 1, 2)) == [[0], [1], [2], [3]]


def test_worker_init_fn_configures_the_dataset_inside_the_rounds() -> None:
    ranks = []
    for rank in range(2):
        loader = DataLoader(Numbers(8), 2, num_workers=2, worker_init_fn=split_between_workers)
        ranks.append(
            sorted(sample for batch in lists(prepare(loader, rank, 2)) for sample in batch)
        )
    assert ranks == [[0, 2, 4, 6], [1, 3, 5, 7]]


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())


def test_ranks_agree_on_what_an_iterable_dataset_draws_when_asked_for_its_iterator() -> None:
    agree = Rank0()
    ranks = []
    for rank in range(2):
        seed(rank)
        loader = prepare(DataLoader(Shuffled(), None), rank, 2, from_rank0=agree)
        ranks.append([sample for _ in range(2) for sample in loader])
    assert (
        sorted(ranks[0][:5] + ranks[1][:5])
        == sorted(ranks[0][5:] + ranks[1][5:])
        == list(range(10))
    )


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_all_ranks_shuffle_an_iterable_dataset_alike(context: str) -> None:
    agree = Rank0()
    ranks = []
    for rank in range(2):
        seed(rank)
        loader = DataLoader(Shuffled(), 5, num_workers=1, multiprocessing_context=context)
        ranks.append(
            [
                sample
                for batch in lists(prepare(loader, rank, 2, from_rank0=agree))
                for sample in batch
            ]
        )
    assert sorted(ranks[0] + ranks[1]) == list(range(10))


class Noise(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float]:
        return torch.rand(()).item(), random.random()


def test_workers_draw_as_torch_does_on_rank_0_and_differently_on_others() -> None:
    drawn = []
    for rank in (None, 0, 1):
        seed(4)
        loader = DataLoader(Noise(), num_workers=1, sampler=[0, 1, 2, 3])
        wrapped = loader if rank is None else prepare(loader, rank, 2, shard=False)
        drawn.append([tuple(map(float, batch)) for batch in wrapped])
    assert drawn[0] == drawn[1]
    assert not {value for pair in drawn[0] for value in pair} & {
        value for pair in drawn[2] for value in pair
    }
