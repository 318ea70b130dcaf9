"""A loader knows where it is, and goes on from there."""

import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from fabric.data import DataParallelJob, FabricDataLoader
from fabric.errors import CheckpointError, ConfigurationError
from fabric.seed import rng_state, sample_generator, set_rng_state
from tests.datasets import ResumableStream

laws = settings(max_examples=50, deadline=None, derandomize=True)


class Counted(Dataset[int]):
    """Counts what is loaded from it."""

    def __init__(self, n: int = 23) -> None:
        self.n = n
        self.loaded = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


class Noisy(Counted):
    """Augments with the global stream, as transforms do."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random()


class Eager(Sampler[int]):
    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())


class Lazy(Eager):
    """Draws each index when it is asked for, from both streams."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            yield (random.randrange(23) + int(torch.randint(23, ()))) % 23


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(23, ()))


class Batches(Eager):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter([[i, i + 1] for i in torch.randperm(6).tolist()])


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "sequential": lambda data, **o: DataLoader(data, 4, **o),
    "shuffled": lambda data, **o: DataLoader(data, 4, shuffle=True, **o),
    "drop last": lambda data, **o: DataLoader(data, 4, shuffle=True, drop_last=True, **o),
    "own generator": lambda data, **o: DataLoader(
        data, 4, True, generator=torch.Generator().manual_seed(9), **o
    ),
    "loader's generator": lambda data, **o: DataLoader(
        data, 4, generator=torch.Generator().manual_seed(9), **o
    ),
    "replacement": lambda data, **o: DataLoader(
        data,
        4,
        sampler=RandomSampler(data, True, 40, generator=torch.Generator().manual_seed(9)),
        **o,
    ),
    "eager": lambda data, **o: DataLoader(data, 4, sampler=Eager(), **o),
    "eager batches": lambda data, **o: DataLoader(data, batch_sampler=Batches(), **o),
    "no batches": lambda data, **o: DataLoader(data, None, sampler=Eager(), **o),
    "lazy": lambda data, **o: DataLoader(data, 4, sampler=Lazy(), **o),
}
WITHOUT_LAZY = sorted(LOADERS.keys() - {"lazy"})


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


def stored(state: Any) -> Any:
    """Through a file, as a checkpoint would."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def plain(batch: Any) -> Any:
    return (
        [plain(part) for part in batch]
        if isinstance(batch, list)
        else getattr(batch, "tolist", lambda: batch)()
    )


def train(loader: Any, epochs: int, stop: int | None = None) -> tuple[list[Any], Any]:
    """A loop that draws between batches, as dropout does; saved in its body, and left, after ``stop`` batches."""
    steps: list[Any] = []
    for _ in range(epochs):
        for batch in loader:
            steps.append((plain(batch), torch.rand(()).item(), random.random()))
            if len(steps) == stop:
                return steps, stored({"loader": loader.state_dict(), "streams": rng_state()})
    return steps, None


def resume(loader: FabricDataLoader, saved: Any, epochs: int) -> list[Any]:
    seed(12345)
    set_rng_state(saved["streams"])
    loader.load_state_dict(saved["loader"])
    return train(loader, epochs - saved["loader"]["epoch"])[0]


@laws
@given(kind=st.sampled_from(sorted(LOADERS)), stop=st.integers(1, 30), noisy=st.booleans())
def test_resumed_run_on_one_process_is_the_uninterrupted_one_bit_for_bit(
    kind: str, stop: int, noisy: bool
) -> None:
    make = lambda: prepare(LOADERS[kind](Noisy() if noisy else Counted()))  # noqa: E731
    seed(1)
    whole, _ = train(make(), 5)
    seed(1)
    before, saved = train(make(), 5, min(stop, len(whole)))
    assert before + resume(make(), saved, 5) == whole


@laws
@given(
    kind=st.sampled_from(sorted(LOADERS)),
    num_replicas=st.integers(2, 4),
    stop=st.integers(1, 9),
    uneven=st.sampled_from(["pad", "drop"]),
)
def test_resumed_rank_continues_its_own_share(
    kind: str, num_replicas: int, stop: int, uneven: str
) -> None:
    published: dict[str, bytes] = {}
    resumed: dict[str, bytes] = {}
    for rank in range(num_replicas):
        make = lambda agree, rank=rank: prepare(  # noqa: E731
            LOADERS[kind](Counted()), rank, num_replicas, uneven=uneven, from_rank0=agree.setdefault
        )
        seed(rank)
        whole, _ = train(make(published), 4)
        seed(rank)
        before, saved = train(make(published), 4, min(stop, len(whole)))
        assert before + resume(make(resumed), saved, 4) == whole


@pytest.mark.parametrize("kind", WITHOUT_LAZY)
@pytest.mark.parametrize("received", [0, 3])
def test_resuming_loads_no_sample_that_was_received_and_leaves_the_streams_alone(
    kind: str, received: int
) -> None:
    loader = prepare(LOADERS[kind](Counted()))
    iterator = iter(loader)
    list(itertools.islice(iterator, received))
    saved = stored(loader.state_dict())
    streams = torch.get_rng_state()
    expected = [plain(batch) for batch in iterator]
    after = torch.get_rng_state()
    data = Counted()
    resumed = prepare(LOADERS[kind](data))
    resumed.load_state_dict(saved)
    torch.set_rng_state(streams)
    iterator = iter(resumed)
    assert torch.equal(torch.get_rng_state(), streams)
    assert [plain(batch) for batch in iterator] == expected
    assert data.loaded == sum(len(batch) if isinstance(batch, list) else 1 for batch in expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_batches_that_workers_prefetched_do_not_count() -> None:
    make = lambda: prepare(LOADERS["shuffled"](Counted(), num_workers=2))  # noqa: E731
    loader = make()
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(2)]
    saved = stored(loader.state_dict())
    rest = [batch.tolist() for batch in iterator]
    assert saved["cursor"] == 8
    resumed = make()
    resumed.load_state_dict(saved)
    assert [batch.tolist() for batch in resumed] == rest
    assert sorted(itertools.chain.from_iterable(first + rest)) == list(range(23))


def test_persistent_workers_iterate_as_plain_ones_and_resume() -> None:
    make = lambda: LOADERS["shuffled"](Counted(), num_workers=1, persistent_workers=True)  # noqa: E731
    seed(0)
    user_loader = make()
    plain_epochs = [[batch.tolist() for batch in user_loader] for _ in range(2)]
    seed(0)
    loader = prepare(user_loader)
    assert [batch.tolist() for batch in loader] == plain_epochs[0]
    epoch = []
    for batch in loader:
        epoch.append(batch.tolist())
        if len(epoch) == 2:
            saved = stored(loader.state_dict())
    assert epoch == plain_epochs[1]
    resumed = prepare(make())
    resumed.load_state_dict(saved)
    assert [batch.tolist() for batch in resumed] == epoch[2:]


def test_position_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    loader = prepare(LOADERS["shuffled"](Counted()))
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["cursor"]) == (1, 0)
    resumed = prepare(LOADERS["shuffled"](Counted()))
    resumed.load_state_dict(stored(state))
    assert len(list(resumed)) == 6
    assert resumed.state_dict()["epoch"] == 2


def test_breaking_out_keeps_the_position_until_the_next_epoch_begins() -> None:
    loader = prepare(LOADERS["sequential"](Counted()))
    for _ in zip(range(2), loader, strict=False):
        break
    assert (loader.state_dict()["epoch"], loader.state_dict()["cursor"]) == (0, 4)
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert (loader.state_dict()["epoch"], loader.state_dict()["cursor"]) == (1, 4)


def test_nested_iterations_draw_orders_of_their_own_and_the_last_batch_counts() -> None:
    loader = prepare(LOADERS["shuffled"](Counted()))
    outer = iter(loader)
    inner = iter(loader)
    orders = [
        list(itertools.chain.from_iterable(batch.tolist() for batch in each))
        for each in (inner, outer)
    ]
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(23)) for order in orders)
    outer = iter(loader)
    inner = iter(loader)
    next(outer), next(inner), next(inner), next(outer)
    assert (loader.state_dict()["epoch"], loader.state_dict()["cursor"]) == (2, 8)


def test_state_loaded_and_saved_again_is_the_same_position() -> None:
    loader = prepare(LOADERS["shuffled"](Counted()))
    next(iter(loader))
    state = loader.state_dict()
    resumed = prepare(LOADERS["shuffled"](Counted()))
    resumed.load_state_dict(state)
    again = resumed.state_dict()
    assert {name: again[name] for name in ("epoch", "cursor", "unit")} == {
        "epoch": 0,
        "cursor": 4,
        "unit": "samples",
    }
    assert torch.equal(again["drawn"]["draw"]["torch"], state["drawn"]["draw"]["torch"])


def test_batch_samplers_count_batches_over_all_ranks() -> None:
    loader = prepare(LOADERS["eager batches"](Counted()), 1, 3)
    next(iter(loader))
    assert (loader.state_dict()["unit"], loader.state_dict()["cursor"]) == ("batches", 3)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_position_can_be_taken_over_by_another_number_of_ranks(num_replicas: int) -> None:
    seed(0)
    saved = []
    for rank in range(3):
        seed(0)
        loader = prepare(DataLoader(Counted(24), 2, shuffle=True), rank, 3)
        next(iter(loader))
        saved.append(loader.state_dict())
    rest = []
    for rank in range(num_replicas):
        loader = prepare(DataLoader(Counted(24), 2, shuffle=True), rank, num_replicas)
        loader.load_state_dict(saved[0])
        rest.append([sample for batch in loader for sample in batch.tolist()])
    seed(0)
    order = [
        sample for batch in DataLoader(Counted(24), 2, shuffle=True) for sample in batch.tolist()
    ]
    assert [sample for round_ in zip(*rest, strict=True) for sample in round_] == order[6:]


def test_endless_sampler_resumes_in_its_order() -> None:
    published: dict[str, bytes] = {}
    make = lambda: prepare(  # noqa: E731
        DataLoader(Counted(), 2, sampler=Endless()), 1, 2, from_rank0=published.setdefault
    )
    loader = make()
    iterator = iter(loader)
    list(itertools.islice(iterator, 3))
    saved = stored(loader.state_dict())
    rest = [batch.tolist() for batch in itertools.islice(iterator, 4)]
    resumed = make()
    resumed.load_state_dict(saved)
    assert [batch.tolist() for batch in itertools.islice(resumed, 4)] == rest


def test_distributed_sampler_resumes_in_the_middle_of_its_epoch() -> None:
    def make() -> FabricDataLoader:
        return prepare(DataLoader(Counted(), 2, sampler=DistributedSampler(Counted(), 2, 1)), 1, 2)

    loader = make()
    list(loader)
    iterator = iter(loader)
    next(iterator)
    saved = stored(loader.state_dict())
    assert (saved["epoch"], saved["cursor"]) == (1, 4)
    resumed = make()
    resumed.load_state_dict(saved)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in iterator]


class Epochs(Counted):
    """Remembers what it was told; its number is also an attribute, as in torch's DistributedSampler."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.told = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)


def test_dataset_is_told_each_epoch_counting_from_where_the_user_says() -> None:
    data = Epochs()
    loader = prepare(DataLoader(data, 4))
    list(loader), list(loader)
    loader.set_epoch(7)
    list(loader), list(loader)
    assert data.told == [0, 1, 7, 7, 8]


class Augmented(Epochs):
    """Has noise that belongs to the sample, and an epoch that workers see which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 24
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.shared.fill_(epoch)

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand((), generator=sample_generator(7, int(self.shared), index)).item()


def augmented(ranks: int, workers: int, stop: int = 0, saved: Any = None) -> tuple[list[Any], Any]:
    """The samples of all ranks in two epochs, in their order; and the position after ``stop`` batches."""
    steps = []
    state = None
    for rank in range(ranks):
        data = Augmented()
        order = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        plain_loader = DataLoader(
            data, 12 // ranks, sampler=order, num_workers=workers, persistent_workers=workers > 0
        )
        loader = prepare(plain_loader, rank, ranks)
        if saved is not None:
            loader.load_state_dict(saved["loader"])
        received, state = train(loader, 2 - loader.state_dict()["epoch"], stop or None)
        steps.append([list(zip(*batch, strict=True)) for batch, *_ in received])
    rounds = (zip(*batches, strict=True) for batches in zip(*steps, strict=True))
    return [sample for batches in rounds for entries in batches for sample in entries], state


def test_augmentations_of_a_sample_generator_are_the_same_on_any_number_of_processes_and_workers() -> (
    None
):
    whole, _ = augmented(1, 0)
    assert len({*whole}) == 48  # of the second epoch others than of the first
    for ranks, workers in ((1, 2), (2, 0), (2, 1), (3, 0), (4, 1)):
        assert augmented(ranks, workers)[0] == whole


@pytest.mark.parametrize(
    ("saving", "resuming"), [((1, 0), (2, 1)), ((4, 0), (3, 0)), ((2, 1), (1, 0))]
)
def test_augmentations_go_on_after_a_resume_on_another_number_of_processes(
    saving: Any, resuming: Any
) -> None:
    for stop in (1, 3):
        before, saved = augmented(*saving, stop=stop)
        after, _ = augmented(*resuming, saved=saved)
        assert before + after == augmented(1, 0)[0]


def test_set_epoch_on_the_users_own_object_is_followed() -> None:
    data = Epochs()
    loader = prepare(DataLoader(data, 4))
    data.set_epoch(5)
    list(loader)
    assert loader.state_dict()["epoch"] == 6


def test_set_epoch_gives_up_a_position_inside_another_epoch_only() -> None:
    saved = prepare(LOADERS["sequential"](Counted()))
    next(iter(saved))
    for epoch, length in ((0, 5), (1, 6)):
        loader = prepare(LOADERS["sequential"](Counted()))
        loader.load_state_dict(saved.state_dict())
        loader.set_epoch(epoch)
        assert len(list(loader)) == length


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_iterable_dataset_resumes_between_epochs_only() -> None:
    loader = prepare(DataLoader(Stream(), 2), 0, 2)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(CheckpointError, match="Stream is iterable"):
        prepare(DataLoader(Stream(), 2), 0, 2).load_state_dict(loader.state_dict())
    list(iterator)
    resumed = prepare(DataLoader(Stream(), 2), 0, 2)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict()["epoch"] == 1


def test_iterable_dataset_with_a_state_of_its_own_resumes_in_the_middle() -> None:
    loader = prepare(DataLoader(ResumableStream(10), 2), 1, 2)
    iterator = iter(loader)
    next(iterator)
    saved = stored(loader.state_dict())
    resumed = prepare(DataLoader(ResumableStream(10), 2), 1, 2)
    resumed.load_state_dict(saved)
    rest = iter(resumed)
    assert next(rest).tolist() == next(iterator).tolist() == [5, 7]
    assert resumed.state_dict()["cursor"] == loader.state_dict()["cursor"] == 8


class Stateful(DataLoader[Any]):
    """A loader with a state of its own, as torchdata's StatefulDataLoader."""

    place: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Remembering(Counted):
    """Has a state of its own beside the order."""

    def state_dict(self) -> dict[str, int]:
        return {"loaded": self.loaded}


@pytest.mark.parametrize("data", [Remembering(), Stream()])
def test_loader_with_its_own_state_keeps_it_where_it_knows_more_than_the_order(data: Any) -> None:
    loader = prepare(Stateful(data, 4))
    loader.load_state_dict({"place": 3})
    assert loader.place == 3
    assert loader.state_dict() == {"place": 3}
    assert len(list(loader)) == (3 if isinstance(data, Stream) else len(loader))


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1), (2, 3)])
def test_the_state_of_a_loader_is_one_of_as_many_processes(saving: int, resuming: int) -> None:
    state = prepare(Stateful(Stream(), 4), 0, saving).state_dict()
    prepare(Stateful(Stream(), 4), saving - 1, saving).load_state_dict(state)
    with pytest.raises(CheckpointError, match=f"one of {saving} processes"):
        prepare(Stateful(Stream(), 4), 0, resuming).load_state_dict(state)


class OwnShard(ResumableStream):
    shards_itself = True


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1), (2, 4), (2, 3)])
def test_an_iterable_dataset_that_shards_itself_resumes_on_as_many_processes(
    saving: int, resuming: int
) -> None:
    loader = prepare(DataLoader(OwnShard(10), 2), 0, saving)
    iterator = iter(loader)
    next(iterator)
    again, others = (prepare(DataLoader(OwnShard(10), 2), 0, size) for size in (saving, resuming))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="OwnShard, which shards itself"):
        others.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist() == next(iterator).tolist() == [2, 3]
    list(iterator)
    others.load_state_dict(loader.state_dict())


def test_data_that_ranks_shard_themselves_resumes_on_as_many_processes() -> None:
    def own(rank: int, size: int) -> FabricDataLoader:
        data = list(range(rank, 11, size))  # not equally many on all ranks
        return prepare(DataLoader(data, 2), rank, size, shard=False, uneven="shortest")  # pyright: ignore[reportArgumentType]

    loader = own(0, 2)
    next(iter(loader))
    resumed = own(1, 2)
    resumed.load_state_dict(stored(loader.state_dict()))
    assert [batch.tolist() for batch in resumed] == [[5, 7], [9]]
    for size in (1, 3):
        with pytest.raises(CheckpointError, match="saved with 2"):
            own(0, size).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(("saving", "resuming"), [(1, 2), (2, 1), (3, 2), (1, 4)])
def test_one_stream_that_all_ranks_read_goes_on_on_another_number_of_them(
    saving: int, resuming: int
) -> None:
    loader = prepare(DataLoader(ResumableStream(10), 1), 0, saving)
    next(iter(loader))
    parts = []
    for rank in range(resuming):
        resumed = prepare(DataLoader(ResumableStream(10), 1), rank, resuming)
        resumed.load_state_dict(stored(loader.state_dict()))
        parts.append([batch.item() for batch in resumed])
    actual = [sample for round_ in zip(*parts, strict=True) for sample in round_]
    left = 10 - saving
    assert actual == list(range(saving, 10 - left % resuming))


REFUSED: dict[str, tuple[Callable[[], FabricDataLoader], str]] = {
    "length": (
        lambda: prepare(DataLoader(Counted(22), 4, shuffle=True), 0, 2),
        "dataset_length 23.*has 22",
    ),
    "sampler": (
        lambda: prepare(DataLoader(Counted(), 4), 0, 2),
        "RandomSampler.*SequentialSampler",
    ),
    "unit": (
        lambda: prepare(LOADERS["eager batches"](Counted()), 0, 2),
        "unit 'samples'.*'batches'",
    ),
    "generator": (
        lambda: prepare(LOADERS["own generator"](Counted()), 0, 2),
        "generators 0.*has 1",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_state_of_a_loader_that_differs_is_refused(case: str) -> None:
    saved = prepare(LOADERS["shuffled"](Counted()), 0, 2)
    next(iter(saved))
    make, text = REFUSED[case]
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        make().load_state_dict(saved.state_dict())


def test_batches_out_of_order_have_no_position_inside_an_epoch() -> None:
    saved = prepare(LOADERS["shuffled"](Counted()))
    next(iter(saved))
    loader = prepare(LOADERS["shuffled"](Counted(), num_workers=2, in_order=False))
    with pytest.raises(CheckpointError, match="in_order=False"):
        loader.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("state", [{}, None, {"epoch": 3}])
def test_state_of_something_else_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="not what state_dict"):
        prepare(DataLoader(Counted())).load_state_dict(state)


def test_state_of_another_format_is_refused() -> None:
    loader = prepare(DataLoader(Counted()))
    with pytest.raises(CheckpointError, match="in format 1"):
        loader.load_state_dict({**loader.state_dict(), "format": 99})


@pytest.mark.parametrize(
    ("epoch", "error"), [(-1, ConfigurationError), ("next", TypeError), (1.5, TypeError)]
)
def test_set_epoch_takes_whole_numbers_from_0(epoch: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        prepare(DataLoader(Counted())).set_epoch(epoch)
