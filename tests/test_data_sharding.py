"""The samples that each rank gets; the same loader is prepared once for each simulated rank."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
from tests.datasets import Eager, batches_of, samples_of

laws = settings(max_examples=50, deadline=None, derandomize=True)


class Delegating(Eager):
    """A sampler that looks eager and is lazy."""

    def __iter__(self) -> Iterator[int]:
        return iter(RandomSampler(range(self.n)))


class Pythonic(Eager):
    """A sampler that draws from python's stream, one sample after the other."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield random.randrange(self.n)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(1000, ()))


class Batches(Eager):
    """A batch sampler that draws eagerly; its batches have one to three samples."""

    def __iter__(self) -> Iterator[Any]:
        batches = []
        for first in torch.randperm(self.n).tolist():
            length = 1 + first % 3
            batches.append(list(range(first, first + length)))
        return iter(batches)


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "sequential": lambda n: SequentialSampler(range(n)),
    "random": lambda n: RandomSampler(range(n)),
    "own generator": lambda n: RandomSampler(range(n), generator=torch.Generator().manual_seed(5)),
    "replacement": lambda n: RandomSampler(range(n), replacement=True, num_samples=n + 3),
    "subset": lambda n: SubsetRandomSampler(range(n)),
    "weighted": lambda n: WeightedRandomSampler(torch.arange(1.0, n + 1.0).tolist(), n + 1),
    "eager": Eager,
    "delegating": Delegating,
    "pythonic": Pythonic,
    "list": lambda n: list(range(n))[::-1],
}


class Rank0:
    """The broadcast of rank 0's values, for ranks that run one after the other."""

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


def plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader as it is, for a comparison with a prepared loader."""
    return loader


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


def make_loader(kind: str, n: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(n + 10), batch_size=batch_size, sampler=SAMPLERS[kind](n), **options)


def batches_of_ranks(
    make: Callable[[], DataLoader[Any]], num_replicas: int, diverged: bool, **options: Any
) -> list[Any]:
    """Return the batches of two epochs as ``[epoch][rank][batch]``.

    Args:
        make: Makes the loader of a rank.
        num_replicas: The number of ranks.
        diverged: Whether the random streams of the ranks differ.
        options: Options of the prepared loader.
    """
    agree = Rank0()
    epochs: list[Any] = [[], []]
    for rank in range(num_replicas):
        seed(100 + rank if diverged else 100)
        loader = prepare(make(), rank, num_replicas, from_rank0=agree, **options)
        for batches_of_epoch in epochs:
            batches_of_epoch.append(batches_of(loader))
    return epochs


def interleaved(batches: Iterable[list[int]]) -> list[int]:
    """Return the samples of the i-th batches of all ranks in the order of the plain loop."""
    samples = []
    for row in itertools.zip_longest(*batches):
        for sample in row:
            if sample is not None:
                samples.append(sample)
    return samples


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
    make = partial(make_loader, kind, n, batch_size, drop_last=drop_last)
    epochs = batches_of_ranks(make, num_replicas, diverged, uneven=uneven)
    seed(100)
    plain_loader = make_loader(kind, n, batch_size * num_replicas, drop_last=drop_last)
    for batches_by_rank in epochs:
        expected_batches = batches_of(plain_loader)
        expected = list(itertools.chain.from_iterable(expected_batches))
        if uneven == "drop" and not drop_last:
            rounds = len(expected) // num_replicas
            expected = expected[: rounds * num_replicas]
        global_batches = list(map(interleaved, zip(*batches_by_rank, strict=True)))
        samples = list(itertools.chain.from_iterable(global_batches))
        assert samples[: len(expected)] == expected
        repeated = samples[len(expected) :]
        repeated_count = 0
        if uneven == "pad":
            repeated_count = -len(expected) % num_replicas
        assert len(repeated) == repeated_count
        assert repeated == (expected * num_replicas)[:repeated_count]
        full = len(expected) // (batch_size * num_replicas)
        assert global_batches[:full] == expected_batches[:full]


@laws
@given(
    kind=st.sampled_from(sorted(SAMPLERS)),
    n=st.integers(1, 30),
    batch_size=st.none() | st.integers(1, 4),
    num_replicas=st.integers(1, 5),
    uneven=st.sampled_from(["pad", "drop"]),
    drop_last=st.booleans(),
)
def test_every_rank_gets_as_many_batches_as_len_says(
    kind: str, n: int, batch_size: int | None, num_replicas: int, uneven: str, drop_last: bool
) -> None:
    lengths = set()
    for rank in range(num_replicas):
        if batch_size is None:
            plain = make_loader(kind, n, None)
        else:
            plain = make_loader(kind, n, batch_size, drop_last=drop_last)
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
    def streams_after(prepare_loader: Callable[[Any], Any]) -> Any:
        seed(7)
        loader = make_loader(kind, 12, batch_size, generator=torch.Generator().manual_seed(1))
        iterated = prepare_loader(loader)
        for _ in range(2):
            list(iterated)
        return streams(), loader.generator.get_state().tolist()

    expected = streams_after(plain)
    agree = Rank0()
    for rank in range(num_replicas):
        prepare_for_rank = partial(prepare, rank=rank, num_replicas=num_replicas, from_rank0=agree)
        assert streams_after(prepare_for_rank) == expected


@pytest.mark.parametrize("kind", sorted(SAMPLERS))
def test_one_replica_interleaves_its_drawing_with_the_loop_as_the_plain_loop_does(
    kind: str,
) -> None:
    def run(prepare_loader: Callable[[Any], Any]) -> list[Any]:
        seed(3)
        iterator = iter(prepare_loader(make_loader(kind, 9, 2)))
        steps: list[Any] = [torch.rand(()).item()]
        for batch in iterator:
            steps.append((batch.tolist(), torch.rand(()).item(), random.random()))
        return steps

    assert run(prepare) == run(plain)


@pytest.mark.parametrize(
    "make", [Batches, lambda n: BatchSampler(RandomSampler(range(n * 2)), 2, False)]
)
@pytest.mark.parametrize(("uneven", "count"), [("pad", 3), ("drop", 2)])
def test_batches_of_a_batch_sampler_are_not_split(
    make: Callable[[int], Any], uneven: str, count: int
) -> None:
    agree = Rank0()
    batches_by_rank = []
    for rank in range(3):
        seed(rank)
        loader = prepare(
            DataLoader(range(30), batch_sampler=make(7)), rank, 3, from_rank0=agree, uneven=uneven
        )
        batches = batches_of(loader)
        assert len(batches) == count
        assert len(loader) == count
        batches_by_rank.append(batches)
    seed(0)
    # The sampler has seven batches. Under "pad", the first two are repeated.
    expected = batches_of(DataLoader(range(30), batch_sampler=make(7)))
    actual = list(itertools.chain.from_iterable(zip(*batches_by_rank, strict=True)))
    assert actual == (expected + expected[:2])[: 3 * count]


def test_a_diverged_rank_keeps_its_own_stream() -> None:
    agree = Rank0()
    seed(1)
    list(prepare(DataLoader(range(10), shuffle=True), 0, 2, from_rank0=agree))
    seed(2)
    list(prepare(DataLoader(range(10), shuffle=True), 1, 2, from_rank0=agree))
    actual = streams()
    seed(2)
    list(DataLoader(range(10)))
    assert actual == streams()


def test_ranks_adopt_the_generator_of_rank_0() -> None:
    agree = Rank0()
    states = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        loader = DataLoader(range(10), shuffle=True, generator=generator)
        list(prepare(loader, rank, 2, from_rank0=agree))
        states.append(generator.get_state())
    assert torch.equal(states[0], states[1])


def endless_order(batches_by_rank: list[list[list[int]]]) -> list[int]:
    return list(itertools.chain.from_iterable(map(interleaved, zip(*batches_by_rank, strict=True))))


def expected_endless_order() -> list[int]:
    seed(0)
    # A DataLoader first draws the base seed of its workers.
    torch.empty((), dtype=torch.int64).random_()
    return list(itertools.islice(Endless(), 24))


def test_endless_samplers_are_sharded_lazily() -> None:
    batches_by_rank = []
    for rank in range(3):
        seed(0)
        loader = prepare(DataLoader(range(1000), 2, sampler=Endless()), rank, 3)
        with pytest.raises(TypeError):
            len(loader)
        batches_by_rank.append(batches_of(itertools.islice(loader, 4)))
    assert endless_order(batches_by_rank) == expected_endless_order()


def test_ranks_that_agree_draw_the_same_endless_order_whatever_a_rank_draws_between() -> None:
    agree = Rank0()
    batches_by_rank = []
    for rank in range(3):
        seed(rank)
        loader = prepare(DataLoader(range(1000), 2, sampler=Endless()), rank, 3, from_rank0=agree)
        with pytest.raises(TypeError):
            len(loader)
        batches = []
        for batch in itertools.islice(loader, 4):
            batches.append(batch.tolist())
            torch.rand(rank)
        batches_by_rank.append(batches)
    assert endless_order(batches_by_rank) == expected_endless_order()


@pytest.mark.parametrize(
    ("uneven", "samples"),
    [("pad", [[10, 12, 14], [11, 13, 10]]), ("drop", [[10, 12], [11, 13]])],
)
def test_an_order_without_a_length_that_ends_is_evened_out(
    uneven: str, samples: list[list[int]]
) -> None:
    class Short(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10, 15))

    for rank in range(2):
        loader = prepare(DataLoader(range(20), None, sampler=Short()), rank, 2, uneven=uneven)
        assert list(loader) == samples[rank]


def test_sequential_and_distributed_orders_need_no_agreement() -> None:
    agree = Rank0()
    list(prepare(DataLoader(range(10)), 1, 2, from_rank0=agree))
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1)
    list(prepare(DataLoader(range(10), sampler=sampler), 1, 2, from_rank0=agree))
    assert not agree.published


def test_distributed_sampler_is_left_alone_and_told_the_epoch() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1)
    loader = prepare(DataLoader(range(10), 2, sampler=sampler), 1, 2)
    epochs = [batches_of(loader) for _ in range(2)]
    assert len(loader) == 3
    for epoch, batches in enumerate(epochs):
        sampler.set_epoch(epoch)
        assert batches == batches_of(DataLoader(range(10), 2, sampler=sampler))


def test_unsharded_loader_gives_every_rank_everything() -> None:
    loader = prepare(DataLoader(range(5), 2), 1, 2, shard=False)
    assert batches_of(loader) == [[0, 1], [2, 3], [4]]
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
    """Configure the worker's copy of the dataset, as torch's documentation does."""
    dataset = torch.utils.data.get_worker_info().dataset
    half = dataset.stop // 2
    if worker_id == 0:
        dataset.stop = half
    else:
        dataset.start = half


@laws
@given(
    n=st.integers(0, 30), num_replicas=st.integers(1, 4), batch_size=st.none() | st.integers(1, 4)
)
def test_iterable_dataset_is_sharded_in_complete_rounds(
    n: int, num_replicas: int, batch_size: int | None
) -> None:
    samples_by_rank = []
    for rank in range(num_replicas):
        loader = prepare(DataLoader(SizedNumbers(n), batch_size=batch_size), rank, num_replicas)
        samples = batches_of(loader)
        assert len(loader) == len(samples)
        if batch_size is not None:
            samples = list(itertools.chain.from_iterable(samples))
        samples_by_rank.append(samples)
    assert interleaved(samples_by_rank) == list(range(n // num_replicas * num_replicas))


def test_iterable_dataset_of_the_longest_rank_is_sharded_to_its_last_sample() -> None:
    for rank, expected in enumerate([[[0, 3], [6]], [[1, 4], [7]], [[2, 5]]]):
        loader = prepare(DataLoader(SizedNumbers(8), 2), rank, 3, uneven="longest")
        assert batches_of(loader) == expected
        assert len(loader) == len(expected)


def test_iterable_dataset_without_a_length_has_none_when_sharded() -> None:
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Numbers(4)), 0, 2))


def test_iterable_dataset_that_shards_itself_is_left_alone() -> None:
    dataset = Numbers(4)
    dataset.shards_itself = True
    assert batches_of(prepare(DataLoader(dataset), 1, 2)) == [[0], [1], [2], [3]]


def test_worker_init_fn_configures_the_dataset_inside_the_rounds() -> None:
    for rank, expected in enumerate([[0, 2, 4, 6], [1, 3, 5, 7]]):
        loader = DataLoader(Numbers(8), 2, num_workers=2, worker_init_fn=split_between_workers)
        assert sorted(samples_of(prepare(loader, rank, 2))) == expected


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())


class LazyLoader(DataLoader[Any]):
    """A loader whose ``__iter__`` is a generator function, which runs at the first batch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize("loader_class", [DataLoader, LazyLoader])
def test_ranks_agree_on_the_draws_of_an_iterable_dataset_that_makes_its_iterator(
    loader_class: type[DataLoader[Any]],
) -> None:
    agree = Rank0()
    first_epoch = []
    second_epoch = []
    for rank in range(2):
        seed(rank)
        loader = prepare(loader_class(Shuffled(), None), rank, 2, from_rank0=agree)
        first_epoch += loader
        second_epoch += loader
    assert sorted(first_epoch) == list(range(10))
    assert sorted(second_epoch) == list(range(10))


def test_workers_of_all_ranks_shuffle_an_iterable_dataset_alike() -> None:
    agree = Rank0()
    samples = []
    for rank, context in enumerate(["fork", "spawn"]):
        seed(rank)
        loader = DataLoader(Shuffled(), 5, num_workers=1, multiprocessing_context=context)
        samples += samples_of(prepare(loader, rank, 2, from_rank0=agree))
    assert sorted(samples) == list(range(10))


class Noise(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float]:
        return torch.rand(()).item(), random.random()


def test_workers_draw_as_torch_does_on_rank_0_and_differently_on_others() -> None:
    def draw(prepare_loader: Callable[[Any], Any]) -> list[float]:
        seed(4)
        values = []
        for batch in prepare_loader(DataLoader(Noise(), num_workers=1, sampler=[0, 1, 2, 3])):
            values += map(float, batch)
        return values

    expected = draw(plain)
    assert draw(partial(prepare, rank=0, num_replicas=2, shard=False)) == expected
    values_of_rank_1 = draw(partial(prepare, rank=1, num_replicas=2, shard=False))
    assert set(values_of_rank_1).isdisjoint(expected)
