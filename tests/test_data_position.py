"""A loader saves its position, and a resumed loader goes on from there."""

import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from fabric import Fabric
from fabric.data import DataParallelJob, FabricDataLoader
from fabric.errors import CheckpointError, ConfigurationError
from fabric.seed import rng_state, sample_generator, set_rng_state
from tests.datasets import Eager, ResumableStream, batches_of, samples_of
from tests.ranks import outcome, run_in_ranks

laws = settings(max_examples=50, deadline=None, derandomize=True)


class Counted(Dataset[int]):
    """A dataset that counts the samples that are loaded from it."""

    def __init__(self, n: int = 23) -> None:
        self.n = n
        self.loaded = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


class Noisy(Counted):
    """A dataset that augments with the global stream, as transforms do."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random()


class LazyLoader(DataLoader[Any]):
    """A loader whose ``__iter__`` is a generator function, which runs at the first batch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def random_index() -> int:
    return int(torch.randint(23, ()))


class Lazy(Eager):
    """A sampler that draws an index only when it is needed, from two streams."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            sum_of_streams = random.randrange(23) + random_index()
            yield sum_of_streams % 23


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield random_index()


class Batches(Sampler[list[int]]):
    """A batch sampler that draws six batches of two samples eagerly."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        starts = torch.randperm(6)
        batches = torch.stack([starts, starts + 1], dim=1)
        return iter(batches.tolist())


KINDS_WITHOUT_LAZY = [
    "drop last",
    "eager",
    "eager batches",
    "loader's generator",
    "no batches",
    "own generator",
    "replacement",
    "sequential",
    "shuffled",
]
KINDS = [*KINDS_WITHOUT_LAZY, "lazy"]


def make_loader(
    kind: str,
    data: Dataset[Any],
    loader_class: type[DataLoader[Any]] = DataLoader,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader whose order is of a kind."""
    generator = torch.Generator().manual_seed(9)
    options["batch_size"] = 4
    match kind:
        case "shuffled":
            options["shuffle"] = True
        case "drop last":
            options["shuffle"] = True
            options["drop_last"] = True
        case "own generator":
            options["shuffle"] = True
            options["generator"] = generator
        case "loader's generator":
            options["generator"] = generator
        case "replacement":
            options["sampler"] = RandomSampler(data, True, 40, generator=generator)
        case "eager":
            options["sampler"] = Eager(23)
        case "eager batches":
            del options["batch_size"]
            options["batch_sampler"] = Batches()
        case "no batches":
            options["batch_size"] = None
            options["sampler"] = Eager(23)
        case "lazy":
            options["sampler"] = Lazy(23)
        case _:
            assert kind == "sequential"
    return loader_class(data, **options)


def prepare(
    loader: DataLoader[Any],
    rank: int = 0,
    num_replicas: int = 1,
    from_rank0: Any = None,
    **options: Any,
) -> FabricDataLoader:
    job = DataParallelJob(rank, num_replicas, from_rank0)
    return FabricDataLoader(loader, job, device=None, **options)


def sequential() -> FabricDataLoader:
    return prepare(make_loader("sequential", Counted()))


def shuffled(**options: Any) -> FabricDataLoader:
    return prepare(make_loader("shuffled", Counted(), **options))


def position(loader: FabricDataLoader) -> tuple[int, int]:
    """Return the epoch and the cursor of a loader."""
    state = loader.state_dict()
    return state["epoch"], state["cursor"]


def interleaved(samples_by_rank: list[list[Any]]) -> list[Any]:
    """Return the samples of all ranks, which take turns, as one list."""
    samples = []
    for samples_of_turn in zip(*samples_by_rank, strict=True):
        samples.extend(samples_of_turn)
    return samples


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def stored(state: Any) -> Any:
    """Write the state to a file and read it, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def plain(batch: Any) -> Any:
    """Return the numbers of a batch, which may consist of several tensors."""
    if isinstance(batch, list):
        return batches_of(batch)
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return batch


def train(loader: Any, epochs: int, stop: int | None = None) -> tuple[list[Any], Any]:
    """Loop with draws between batches, as dropout has; save and leave after ``stop`` batches."""
    steps: list[Any] = []
    for _ in range(epochs):
        for batch in loader:
            step = (plain(batch), torch.rand(()).item(), random.random())
            steps.append(step)
            if len(steps) == stop:
                state = {"loader": loader.state_dict(), "streams": rng_state()}
                return steps, stored(state)
    return steps, None


def resume(loader: FabricDataLoader, saved: Any, epochs: int) -> list[Any]:
    seed(12345)
    set_rng_state(saved["streams"])
    position = saved["loader"]
    loader.load_state_dict(position)
    steps, _ = train(loader, epochs - position["epoch"])
    return steps


@laws
@given(
    kind=st.sampled_from(sorted(KINDS)),
    stop=st.integers(1, 30),
    dataset_class=st.sampled_from([Counted, Noisy]),
    loader_class=st.sampled_from([DataLoader, LazyLoader]),
)
def test_resumed_run_on_one_process_is_the_uninterrupted_one_bit_for_bit(
    kind: str,
    stop: int,
    dataset_class: type[Counted],
    loader_class: type[DataLoader[Any]],
) -> None:
    def make() -> FabricDataLoader:
        loader = make_loader(kind, dataset_class(), loader_class)
        return prepare(loader)

    seed(1)
    uninterrupted, _ = train(make(), 5)
    stop = min(stop, len(uninterrupted))
    seed(1)
    before, saved = train(make(), 5, stop)
    after = resume(make(), saved, 5)
    assert before + after == uninterrupted


@laws
@given(
    kind=st.sampled_from(sorted(KINDS)),
    num_replicas=st.integers(2, 4),
    stop=st.integers(1, 9),
    uneven=st.sampled_from(["pad", "drop"]),
    loader_class=st.sampled_from([DataLoader, LazyLoader]),
)
def test_resumed_rank_continues_its_own_share(
    kind: str,
    num_replicas: int,
    stop: int,
    uneven: str,
    loader_class: type[DataLoader[Any]],
) -> None:
    published: dict[str, bytes] = {}
    published_by_resumed: dict[str, bytes] = {}

    def make(rank: int, values_of_rank0: dict[str, bytes]) -> FabricDataLoader:
        loader = make_loader(kind, Counted(), loader_class)
        agree = values_of_rank0.setdefault
        return prepare(loader, rank, num_replicas, uneven=uneven, from_rank0=agree)

    for rank in range(num_replicas):
        seed(rank)
        uninterrupted, _ = train(make(rank, published), 4)
        stop_of_rank = min(stop, len(uninterrupted))
        seed(rank)
        before, saved = train(make(rank, published), 4, stop_of_rank)
        after = resume(make(rank, published_by_resumed), saved, 4)
        assert before + after == uninterrupted


@pytest.mark.parametrize("kind", KINDS_WITHOUT_LAZY)
@pytest.mark.parametrize("received", [0, 3])
def test_resuming_loads_no_sample_that_was_received_and_leaves_the_streams_alone(
    kind: str, received: int
) -> None:
    loader = prepare(make_loader(kind, Counted()))
    iterator = iter(loader)
    list(itertools.islice(iterator, received))
    saved = stored(loader.state_dict())
    streams = torch.get_rng_state()
    expected = batches_of(iterator)
    after = torch.get_rng_state()
    data = Counted()
    resumed = prepare(make_loader(kind, data))
    resumed.load_state_dict(saved)
    torch.set_rng_state(streams)
    iterator = iter(resumed)
    assert torch.equal(torch.get_rng_state(), streams)
    assert batches_of(iterator) == expected
    if kind == "no batches":
        assert data.loaded == len(expected)
    else:
        lengths = map(len, expected)
        assert data.loaded == sum(lengths)
    assert torch.equal(torch.get_rng_state(), after)


def test_batches_that_workers_prefetched_do_not_count() -> None:
    loader = shuffled(num_workers=2)
    iterator = iter(loader)
    before = samples_of(itertools.islice(iterator, 2))
    saved = stored(loader.state_dict())
    assert saved["cursor"] == 8
    after = batches_of(iterator)
    resumed = shuffled(num_workers=2)
    resumed.load_state_dict(saved)
    assert batches_of(resumed) == after
    for batch in after:
        before += batch
    assert sorted(before) == list(range(23))


def test_persistent_workers_iterate_as_plain_ones_and_resume() -> None:
    def make() -> DataLoader[Any]:
        return make_loader("shuffled", Counted(), num_workers=1, persistent_workers=True)

    seed(0)
    user_loader = make()
    first_epoch = batches_of(user_loader)
    second_epoch = batches_of(user_loader)
    seed(0)
    loader = prepare(user_loader)
    assert batches_of(loader) == first_epoch
    epoch = []
    for batch in loader:
        epoch.append(batch.tolist())
        if len(epoch) == 2:
            saved = stored(loader.state_dict())
    assert epoch == second_epoch
    resumed = prepare(make())
    resumed.load_state_dict(saved)
    assert batches_of(resumed) == epoch[2:]


def test_position_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    loader = shuffled()
    list(loader)
    state = loader.state_dict()
    assert position(loader) == (1, 0)
    resumed = shuffled()
    resumed.load_state_dict(stored(state))
    batches = list(resumed)
    assert len(batches) == 6
    assert resumed.state_dict()["epoch"] == 2


def test_breaking_out_keeps_the_position_until_the_next_epoch_begins() -> None:
    loader = sequential()
    for _ in loader:
        break
    assert position(loader) == (0, 4)
    batch = next(iter(loader))
    assert batch.tolist() == [0, 1, 2, 3]
    assert position(loader) == (1, 4)


def test_nested_iterations_draw_orders_of_their_own_and_the_last_batch_counts() -> None:
    loader = shuffled()
    outer = iter(loader)
    inner = iter(loader)
    order_of_inner = samples_of(inner)
    order_of_outer = samples_of(outer)
    assert order_of_inner != order_of_outer
    assert sorted(order_of_inner) == list(range(23))
    assert sorted(order_of_outer) == list(range(23))
    outer = iter(loader)
    inner = iter(loader)
    next(outer)
    next(inner)
    next(inner)
    next(outer)
    assert position(loader) == (2, 8)


def test_a_position_is_not_changed_by_loading_and_saving() -> None:
    loader = shuffled()
    next(iter(loader))
    state = loader.state_dict()
    resumed = shuffled()
    resumed.load_state_dict(state)
    assert position(resumed) == (0, 4)
    resumed_state = resumed.state_dict()
    assert resumed_state["unit"] == "samples"
    draw = state["drawn"]["draw"]["torch"]
    assert torch.equal(resumed_state["drawn"]["draw"]["torch"], draw)


def test_batch_samplers_count_batches_over_all_ranks() -> None:
    loader = prepare(make_loader("eager batches", Counted()), 1, 3)
    next(iter(loader))
    state = loader.state_dict()
    assert state["unit"] == "batches"
    assert state["cursor"] == 3


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_position_can_be_taken_over_by_another_number_of_ranks(num_replicas: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Counted(24), 2, shuffle=True)

    seed(0)
    loader = prepare(make(), 0, 3)
    next(iter(loader))
    saved = loader.state_dict()
    samples_by_rank = []
    for rank in range(num_replicas):
        resumed = prepare(make(), rank, num_replicas)
        resumed.load_state_dict(saved)
        samples_by_rank.append(samples_of(resumed))
    seed(0)
    order = samples_of(make())
    assert interleaved(samples_by_rank) == order[6:]


def test_other_steps_on_another_number_of_ranks_are_a_warning_with_a_remedy() -> None:
    def make(batch_size: int) -> DataLoader[Any]:
        return DataLoader(Counted(24), batch_size, shuffle=True)

    loader = prepare(make(4), 0, 2)
    next(iter(loader))
    saved = stored(loader.state_dict())
    with pytest.warns(UserWarning, match="4 samples a step, .* used 8, 4 on each of 2") as caught:
        prepare(make(4), 0, 1).load_state_dict(saved)
    assert "DataLoader(..., batch_size=8)" in str(caught[0].message)
    with pytest.warns(UserWarning, match=r"write DataLoader\(\.\.\., batch_size=2\)"):
        prepare(make(4), 0, 4).load_state_dict(saved)
    with pytest.warns(UserWarning, match="on 3 processes no batch size keeps the steps"):
        prepare(make(4), 0, 3).load_state_dict(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The remedy, another rank than the first, and another batch size that the user chose.
        prepare(make(8), 0, 1).load_state_dict(saved)
        prepare(make(4), 1, 3).load_state_dict(saved)
        prepare(make(5), 0, 2).load_state_dict(saved)


def test_endless_sampler_resumes_in_its_order() -> None:
    published: dict[str, bytes] = {}

    def make() -> FabricDataLoader:
        loader = DataLoader(Counted(), 2, sampler=Endless())
        return prepare(loader, 1, 2, from_rank0=published.setdefault)

    loader = make()
    iterator = iter(loader)
    list(itertools.islice(iterator, 3))
    saved = stored(loader.state_dict())
    expected = batches_of(itertools.islice(iterator, 4))
    resumed = make()
    resumed.load_state_dict(saved)
    assert batches_of(itertools.islice(resumed, 4)) == expected


def test_distributed_sampler_resumes_in_the_middle_of_its_epoch() -> None:
    def make() -> FabricDataLoader:
        sampler = DistributedSampler(Counted(), 2, 1)
        loader = DataLoader(Counted(), 2, sampler=sampler)
        return prepare(loader, 1, 2)

    loader = make()
    list(loader)
    iterator = iter(loader)
    next(iterator)
    saved = stored(loader.state_dict())
    assert position(loader) == (1, 4)
    resumed = make()
    resumed.load_state_dict(saved)
    assert batches_of(resumed) == batches_of(iterator)


class Epochs(Counted):
    """A dataset that logs epochs, with an attribute ``epoch`` as in torch's DistributedSampler."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epochs.append(epoch)


def test_a_dataset_is_told_every_epoch_counted_from_the_epoch_that_the_user_sets() -> None:
    data = Epochs()
    loader = prepare(DataLoader(data, 4))
    for _ in range(2):
        list(loader)
    loader.set_epoch(7)
    for _ in range(2):
        list(loader)
    assert data.epochs == [0, 1, 7, 7, 8]


class Augmented(Epochs):
    """A dataset whose noise belongs to the sample and its epoch, also in persistent workers."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 24
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.shared.fill_(epoch)

    def __getitem__(self, index: int) -> Any:
        generator = sample_generator(7, int(self.shared), index)
        return index, torch.rand((), generator=generator).item()


def augmented_loader(ranks: int, workers: int) -> DataLoader[Any]:
    data = Augmented()
    generator = torch.Generator().manual_seed(5)
    return DataLoader(
        data,
        12 // ranks,
        sampler=RandomSampler(data, generator=generator),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def augmented(
    ranks: int, workers: int, stop: int | None = None, saved: Any = None
) -> tuple[list[Any], Any]:
    """Return the samples of all ranks in two epochs, and the position after ``stop`` batches."""
    samples_by_rank = []
    state = None
    for rank in range(ranks):
        loader = prepare(augmented_loader(ranks, workers), rank, ranks)
        if saved is not None:
            loader.load_state_dict(saved["loader"])
        epoch, _ = position(loader)
        steps, state = train(loader, 2 - epoch, stop)
        samples: list[tuple[int, float]] = []
        for batch, _, _ in steps:
            indices, noise = batch
            samples += zip(indices, noise, strict=True)
        samples_by_rank.append(samples)
    return interleaved(samples_by_rank), state


def test_a_sample_generator_augments_alike_on_any_number_of_processes_and_workers() -> None:
    expected, _ = augmented(1, 0)
    # The noise of the second epoch differs from the noise of the first.
    assert len(set(expected)) == 48
    for ranks, workers in ((1, 2), (2, 0), (2, 1), (3, 0), (4, 1)):
        actual, _ = augmented(ranks, workers)
        assert actual == expected


@pytest.mark.parametrize(
    ("saving", "resuming"), [((1, 0), (2, 1)), ((4, 0), (3, 0)), ((2, 1), (1, 0))]
)
def test_augmentations_go_on_after_a_resume_on_another_number_of_processes(
    saving: Any, resuming: Any
) -> None:
    expected, _ = augmented(1, 0)
    for stop in (1, 3):
        before, saved = augmented(*saving, stop=stop)
        after, _ = augmented(*resuming, saved=saved)
        assert before + after == expected


def test_set_epoch_on_the_users_own_object_is_followed() -> None:
    data = Epochs()
    loader = prepare(DataLoader(data, 4))
    data.set_epoch(5)
    list(loader)
    assert loader.state_dict()["epoch"] == 6


def test_set_epoch_gives_up_a_position_inside_another_epoch_only() -> None:
    saved = sequential()
    next(iter(saved))
    for epoch, length in ((0, 5), (1, 6)):
        loader = sequential()
        loader.load_state_dict(saved.state_dict())
        loader.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == length


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_iterable_dataset_resumes_between_epochs_only() -> None:
    loader = prepare(DataLoader(Stream(), 2), 0, 2)
    resumed = prepare(DataLoader(Stream(), 2), 0, 2)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(CheckpointError, match="Stream is iterable"):
        resumed.load_state_dict(loader.state_dict())
    list(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict()["epoch"] == 1


def test_iterable_dataset_with_a_state_of_its_own_resumes_in_the_middle() -> None:
    loader = prepare(DataLoader(ResumableStream(10), 2), 1, 2)
    iterator = iter(loader)
    next(iterator)
    saved = stored(loader.state_dict())
    resumed = prepare(DataLoader(ResumableStream(10), 2), 1, 2)
    resumed.load_state_dict(saved)
    expected = next(iterator)
    actual = next(iter(resumed))
    assert expected.tolist() == [5, 7]
    assert actual.tolist() == [5, 7]
    # The dataset is copied into a worker, where nothing loads its state.
    with_worker = prepare(DataLoader(ResumableStream(10), 2, num_workers=1), 1, 2)
    with pytest.raises(CheckpointError, match="ResumableStream is iterable"):
        with_worker.load_state_dict(saved)
    assert loader.state_dict()["cursor"] == 8
    assert resumed.state_dict()["cursor"] == 8


class NoisyStream(ResumableStream):
    """A stream that draws a random number for each sample."""

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            yield sample + 100 * random_index()


class StreamWithEnd(ResumableStream):
    """A stream that has its end as its position until it is iterated again."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.is_loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.at = 0
        self.is_loaded = False
        while self.at < self.n:
            self.at += 1
            yield self.at - 1

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.is_loaded = True


@pytest.mark.parametrize("loader_class", [DataLoader, LazyLoader])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("stream_class", [NoisyStream, StreamWithEnd])
@pytest.mark.parametrize("stop", range(1, 8))
def test_a_stream_resumes_after_any_batch(
    stop: int,
    stream_class: type[ResumableStream],
    num_replicas: int,
    loader_class: type[DataLoader[Any]],
) -> None:
    def make() -> FabricDataLoader:
        loader = loader_class(stream_class(10), 4)
        return prepare(loader, 0, num_replicas)

    seed(1)
    uninterrupted, _ = train(make(), 3)
    stop = min(stop, len(uninterrupted))
    seed(1)
    before, saved = train(make(), 3, stop)
    after = resume(make(), saved, 3)
    assert before + after == uninterrupted


@pytest.mark.parametrize("stream_class", [NoisyStream, StreamWithEnd])
def test_a_position_of_an_older_version_does_not_say_whether_the_dataset_has_ended(
    stream_class: type[ResumableStream],
) -> None:
    def make() -> FabricDataLoader:
        return prepare(DataLoader(stream_class(10), 4))

    seed(1)
    uninterrupted, _ = train(make(), 3)
    seed(1)
    before, saved = train(make(), 3, stop=2)
    del saved["loader"]["dataset_has_ended"]
    after = resume(make(), saved, 3)
    assert before + after == uninterrupted


class LoaderWithState(DataLoader[Any]):
    """A loader with a state of its own, which it does not use."""

    number: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class DatasetWithState(Counted):
    """A dataset with a state, beside the order in which it is read."""

    def state_dict(self) -> dict[str, int]:
        return {"loaded": self.loaded}


@pytest.mark.parametrize(
    ("data", "batches"), [(DatasetWithState(), 6), (Stream(), 3)], ids=["dataset", "stream"]
)
def test_a_loader_keeps_its_own_state_where_its_data_has_more_state_than_an_order(
    data: Any, batches: int
) -> None:
    loader = prepare(LoaderWithState(data, 4))
    loader.load_state_dict({"number": 3})
    assert loader.number == 3
    assert loader.state_dict() == {"number": 3}
    assert len(list(loader)) == batches


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1), (2, 3)])
def test_a_loader_with_its_own_state_resumes_on_as_many_processes(
    saving: int, resuming: int
) -> None:
    first = prepare(LoaderWithState(Stream(), 4), 0, saving)
    state = first.state_dict()
    last = prepare(LoaderWithState(Stream(), 4), saving - 1, saving)
    last.load_state_dict(state)
    resharded = prepare(LoaderWithState(Stream(), 4), 0, resuming)
    with pytest.raises(CheckpointError, match=f"one of {saving} processes"):
        resharded.load_state_dict(state)


class ShardedStream(ResumableStream):
    shards_itself = True


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1), (2, 4), (2, 3)])
def test_an_iterable_dataset_that_shards_itself_resumes_on_as_many_processes(
    saving: int, resuming: int
) -> None:
    loader = prepare(DataLoader(ShardedStream(10), 2), 0, saving)
    iterator = iter(loader)
    next(iterator)
    resumed = prepare(DataLoader(ShardedStream(10), 2), 0, saving)
    resumed.load_state_dict(loader.state_dict())
    resharded = prepare(DataLoader(ShardedStream(10), 2), 0, resuming)
    with pytest.raises(CheckpointError, match="ShardedStream, which shards itself"):
        resharded.load_state_dict(loader.state_dict())
    expected = next(iterator)
    actual = next(iter(resumed))
    assert expected.tolist() == [2, 3]
    assert actual.tolist() == [2, 3]
    # Between epochs, another number of processes may resume.
    list(iterator)
    resharded.load_state_dict(loader.state_dict())


def test_data_that_ranks_shard_themselves_resumes_on_as_many_processes() -> None:
    def make(rank: int, size: int) -> FabricDataLoader:
        # The ranks have different numbers of samples.
        data: Any = range(rank, 11, size)
        return prepare(DataLoader(data, 2), rank, size, shard=False, uneven="shortest")

    loader = make(0, 2)
    next(iter(loader))
    resumed = make(1, 2)
    resumed.load_state_dict(stored(loader.state_dict()))
    assert batches_of(resumed) == [[5, 7], [9]]
    for size in (1, 3):
        resharded = make(0, size)
        with pytest.raises(CheckpointError, match="saved with 2"):
            resharded.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1), (3, 2), (1, 4)])
def test_a_stream_that_all_ranks_read_resumes_on_another_number_of_processes(
    saving: int, resuming: int
) -> None:
    loader = prepare(DataLoader(ResumableStream(10), 1), 0, saving)
    next(iter(loader))
    samples_by_rank = []
    for rank in range(resuming):
        resumed = prepare(DataLoader(ResumableStream(10), 1), rank, resuming)
        resumed.load_state_dict(stored(loader.state_dict()))
        samples_by_rank.append(samples_of(resumed))
    remaining = 10 - saving
    end = 10 - remaining % resuming
    assert interleaved(samples_by_rank) == list(range(saving, end))


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (DataLoader(Counted(22), 4, shuffle=True), "dataset_length 23.*has 22"),
        (DataLoader(Counted(), 4), "RandomSampler.*SequentialSampler"),
        (make_loader("eager batches", Counted()), "unit 'samples'.*'batches'"),
        (make_loader("own generator", Counted()), "generators 0.*has 1"),
    ],
    ids=["length", "sampler", "unit", "generator"],
)
def test_state_of_a_loader_that_differs_is_refused(loader: DataLoader[Any], text: str) -> None:
    saved = prepare(make_loader("shuffled", Counted()), 0, 2)
    next(iter(saved))
    target = prepare(loader, 0, 2)
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        target.load_state_dict(saved.state_dict())


def test_batches_out_of_order_have_no_position_inside_an_epoch() -> None:
    saved = shuffled()
    next(iter(saved))
    loader = shuffled(num_workers=2, in_order=False)
    with pytest.raises(CheckpointError, match="in_order=False"):
        loader.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("state", [{}, None, {"epoch": 3}])
def test_state_of_something_else_is_refused(state: Any) -> None:
    loader = prepare(DataLoader(Counted()))
    with pytest.raises(CheckpointError, match="not what state_dict"):
        loader.load_state_dict(state)


def test_state_without_one_of_its_entries_is_refused() -> None:
    loader = shuffled()
    # States of earlier releases lack this entry.
    needed = loader.state_dict().keys() - {"dataset_has_ended"}
    for name in needed:
        state = loader.state_dict()
        del state[name]
        with pytest.raises(CheckpointError, match="not what state_dict"):
            loader.load_state_dict(state)


def test_naming_the_samples_of_batches_does_not_draw_from_the_users_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(range(8), generator=generator)
    job = DataParallelJob(0, 1, None)
    loader = FabricDataLoader(DataLoader(range(8), 2, sampler=sampler), job, device=None)
    iterator = iter(loader)
    batches = [next(iterator), next(iterator)]
    torch.rand(3, generator=generator)
    state = generator.get_state()
    [loop] = job.active_loops
    samples = loop.spec.samples_of_batches(loop.position, range(2))
    assert samples == torch.cat(batches).tolist()
    assert torch.equal(generator.get_state(), state)


def test_state_of_another_format_is_refused() -> None:
    loader = prepare(DataLoader(Counted()))
    state = loader.state_dict()
    state["format"] = 99
    with pytest.raises(CheckpointError, match="in format 1"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("epoch", "error"), [(-1, ConfigurationError), ("next", TypeError), (1.5, TypeError)]
)
def test_set_epoch_takes_whole_numbers_from_0(epoch: Any, error: type[Exception]) -> None:
    loader = prepare(DataLoader(Counted()))
    with pytest.raises(error):
        loader.set_epoch(epoch)


# -- another number of processes -----------------------------------------------------------------

N = 53


class Unsized(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(N).tolist()


class CountingLoader(DataLoader[Any]):
    """A loader that counts batches and skips them when it resumes, as StatefulDataLoader does."""

    yielded = 0
    skipped = 0

    def __iter__(self) -> Any:
        self.yielded = self.skipped
        self.skipped = 0
        for batch in itertools.islice(super().__iter__(), self.yielded, None):
            self.yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["yielded"]


def in_order(batch_size: int) -> DataLoader[Any]:
    return DataLoader(range(N), batch_size)


def in_random_order(batch_size: int) -> DataLoader[Any]:
    return DataLoader(range(N), batch_size, shuffle=True)


def with_own_generator(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(range(N), batch_size, shuffle=True, generator=generator)


def without_a_length(batch_size: int) -> DataLoader[Any]:
    return DataLoader(range(N), batch_size, sampler=Unsized())


def of_single_samples(batch_size: int) -> DataLoader[Any]:
    return DataLoader(range(N), None, sampler=Unsized())


def with_a_state(batch_size: int) -> DataLoader[Any]:
    return CountingLoader(range(N), batch_size, shuffle=True)


RESHARDED = [
    in_order,
    in_random_order,
    with_own_generator,
    without_a_length,
    of_single_samples,
    with_a_state,
]


def prepare_seeded(
    loader: DataLoader[Any], rank: int, size: int, state: Any = None
) -> FabricDataLoader:
    """Prepare a loader, with the seed that a new process would set, and load its state."""
    torch.manual_seed(0)
    prepared = prepare(loader, rank, size)
    if state is not None:
        prepared.load_state_dict(state)
    return prepared


def take(loader: FabricDataLoader, steps: int) -> list[int]:
    """Return the samples of the next batches."""
    samples: list[int] = []
    for batch in itertools.islice(loader, steps):
        samples += torch.as_tensor(batch).flatten().tolist()
    return samples


def take_on_all_ranks(loaders: list[FabricDataLoader], steps: int) -> list[int]:
    """Return the samples of the next batches of all ranks, which end at one position."""
    samples_by_rank = []
    for loader in loaders:
        torch.manual_seed(0)
        samples = take(loader, steps)
        samples_by_rank.append(samples)
    for loader in loaders:
        assert position(loader) == position(loaders[0])
    return interleaved(samples_by_rank)


@pytest.mark.parametrize("make", RESHARDED)
@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 1, 4), (2, 5, 2), (5, 3, 1)])
def test_another_number_of_processes_goes_on_in_the_same_order(
    make: Callable[[int], DataLoader[Any]], sizes: tuple[int, ...]
) -> None:
    expected = take(prepare_seeded(make(12), 0, 1), N)
    actual: list[int] = []
    state = None
    for size, steps in zip(sizes, (2, 1, N), strict=True):
        loaders = []
        for rank in range(size):
            loader = prepare_seeded(make(12 // size), rank, size, state)
            loaders.append(loader)
        actual += take_on_all_ranks(loaders, steps)
        state = loaders[0].state_dict()
    assert actual[:N] == expected
    # All ranks get equally many samples: the last round repeats the first samples.
    assert actual[N:] == expected[: len(actual) - N]


def recipe(fabric: Fabric, path: Path, steps: int) -> list[list[int]]:
    batch_size = 12 // fabric.world_size
    plain_loader = DataLoader(torch.arange(N), batch_size, shuffle=True)
    loader = fabric.setup_dataloaders(plain_loader)
    if path.exists():
        fabric.load(path, {"loader": loader})
    else:
        fabric.seed_everything(5)
    batches = []
    for step, batch in enumerate(loader, 1):
        gathered = fabric.gather_for_metrics(batch)
        batches.append(gathered.tolist())
        if step == steps:
            fabric.save(path, {"loader": loader})
            break
    return batches


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1)])
def test_the_documented_recipe_resumes_on_another_number_of_processes(
    saving: int, resuming: int, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    [uninterrupted] = run_in_ranks(recipe, tmp_path / "none", N, ranks=1)
    samples = itertools.chain.from_iterable(uninterrupted)
    assert sorted(samples) == list(range(N))
    before = run_in_ranks(recipe, path, 3, ranks=saving)
    after = run_in_ranks(recipe, path, 3, ranks=resuming)
    assert before[0] + after[0] == uninterrupted[:6]


def test_batches_of_another_size_are_refused_where_batches_are_counted() -> None:
    def make(batch_size: int) -> FabricDataLoader:
        batches = BatchSampler(SequentialSampler(range(N)), batch_size, drop_last=False)
        return prepare(DataLoader(range(N), batch_sampler=batches), 0, 2)

    loader = make(6)
    next(iter(loader))
    larger = make(12)
    with pytest.raises(CheckpointError, match="batch_size 6, this one has 12"):
        larger.load_state_dict(loader.state_dict())


def test_a_sampler_that_shards_by_itself_resumes_where_its_ranks_had_equally_many() -> None:
    def make(rank: int, size: int, state: Any = None) -> FabricDataLoader:
        sampler = DistributedSampler(range(N), size, rank)
        loader = DataLoader(range(N), 12 // size, sampler=sampler)
        return prepare_seeded(loader, rank, size, state)

    loader = make(0, 2)
    expected = take(make(0, 1), N)
    take(loader, 2)
    state = loader.state_dict()
    samples_by_rank = [take(make(rank, 4, state), 1) for rank in range(4)]
    assert interleaved(samples_by_rank) == expected[24:36]
    with pytest.raises(CheckpointError, match=r"(?s)DistributedSampler, which shards.*divides 24"):
        make(0, 5, state)


# -- data and loaders with positions of their own ------------------------------------------------


class EpochStream(IterableDataset[int]):
    """A stream whose samples depend on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * 100
        return iter(range(first, first + 12))


def shuffled_loader(fabric: Fabric) -> CountingLoader:
    return CountingLoader(range(20), 2, shuffle=True)


def loader_with_sampler(fabric: Fabric) -> CountingLoader:
    sampler = DistributedSampler(range(20), fabric.world_size, fabric.global_rank)
    return CountingLoader(range(20), 2, sampler=sampler)


def loader_of_epochs(fabric: Fabric) -> CountingLoader:
    return CountingLoader(EpochStream(), 2)


def resume_in_the_second_epoch(
    fabric: Fabric, make: Callable[[Fabric], CountingLoader], in_place: bool
) -> tuple[list[Any], list[Any]]:
    """Return the batches after a position, and the batches of a loader that resumes there."""
    loader = fabric.setup_dataloaders(make(fabric))
    take(loader, N)
    batches = []
    state = None
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 2:
            state = loader.state_dict()
    resumed = loader
    if not in_place:
        resumed = fabric.setup_dataloaders(make(fabric))
    resumed.load_state_dict(state)
    return batches[2:], batches_of(resumed)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("make", [shuffled_loader, loader_with_sampler, loader_of_epochs])
def test_a_loader_with_a_state_of_its_own_resumes_in_its_order(make: Any, in_place: bool) -> None:
    for expected, actual in run_in_ranks(resume_in_the_second_epoch, make, in_place):
        assert expected
        assert actual == expected


def test_a_state_of_fabrics_is_refused_by_a_loader_that_keeps_its_own() -> None:
    loader = prepare_seeded(DataLoader(EpochStream(), 2), 0, 1)
    saved = loader.state_dict()
    text = "the CountingLoader keeps its own position; this is fabric's"
    with pytest.raises(CheckpointError, match=text):
        prepare_seeded(CountingLoader(EpochStream(), 2), 0, 1, saved)
    with pytest.raises(CheckpointError, match="not what state_dict"):
        prepare_seeded(CountingLoader(range(20), 2), 0, 2, {"yielded": 3})


class Files(IterableDataset[str]):
    """The files of one rank, of different lengths; its position names the file."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.file = 0
        self.line = 0

    def __iter__(self) -> Iterator[str]:
        while self.file < 4:
            while self.line < 2 + self.rank:
                self.line += 1
                yield f"{self.rank}/{self.file}/{self.line}"
            self.file += 1
            self.line = 0
        self.file = 0

    def state_dict(self) -> dict[str, Any]:
        return {"name": f"{self.rank}/{self.file}", "line": self.line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rank, _, file = state["name"].partition("/")
        assert int(rank) == self.rank, "the file of another rank"
        self.file = int(file)
        self.line = state["line"]


class ShardedFiles(Files):
    """The files of one rank, declared as data that shards itself."""

    shards_itself = True


def sharded_files(fabric: Fabric) -> FabricDataLoader:
    loader = DataLoader(ShardedFiles(fabric.global_rank), 1)
    return fabric.setup_dataloaders(loader)


def files_sharded_by_the_user(fabric: Fabric) -> FabricDataLoader:
    loader = DataLoader(Files(fabric.global_rank), 1)
    return fabric.setup_dataloaders(loader, use_distributed_sampler=False)


def ranges_of_different_lengths(fabric: Fabric) -> FabricDataLoader:
    loader = DataLoader(range(9 + fabric.global_rank))
    return fabric.setup_dataloaders(loader, use_distributed_sampler=False)


def resume_rank_data(
    fabric: Fabric, path: Path, make: Callable[[Fabric], FabricDataLoader]
) -> tuple[list[str], list[str]]:
    """Return the batches after a checkpoint, and the batches of a loader that resumes there."""
    loader = make(fabric)
    resumed = make(fabric)
    batches = iter(loader)
    # The ranks are at different batches.
    for _ in range(3 + fabric.global_rank):
        next(batches)
    fabric.save(path, {"loader": loader})
    fabric.load(path, {"loader": resumed})
    return list(map(str, batches)), list(map(str, resumed))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "make", [sharded_files, files_sharded_by_the_user, ranges_of_different_lengths]
)
def test_every_rank_resumes_in_its_own_data(make: Any, strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for expected, actual in run_in_ranks(resume_rank_data, path, make, strategy=strategy):
        assert expected
        assert actual == expected


def load_sharded_files(fabric: Fabric, path: Path) -> str:
    loader = sharded_files(fabric)
    return outcome(lambda: fabric.load(path, {"loader": loader}))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_data_that_shards_itself_is_refused_on_another_number_of_ranks(
    strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    run_in_ranks(resume_rank_data, path, sharded_files, strategy=strategy)
    [text] = run_in_ranks(load_sharded_files, path, ranks=1)
    assert "ShardedFiles, which shards itself" in text
