"""The prepared loader: its attributes, the batches that it moves, and what it refuses."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from benchmarks.timing import count_calls
from fabric.data import DataParallelJob, FabricDataLoader
from fabric.errors import ArgumentTypeError, ConfigurationError
from tests.datasets import batches_of


def prepare(
    loader: Any,
    rank: int = 0,
    num_replicas: int = 1,
    *,
    device: torch.device | None = None,
    **options: Any,
) -> FabricDataLoader:
    job = DataParallelJob(rank, num_replicas)
    return FabricDataLoader(loader, job, device=device, **options)


class Scaled(DataLoader[Any]):
    """A subclass that takes another argument and iterates in its own way."""

    def __init__(self, factor: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * self.factor


def test_the_users_loader_is_not_changed() -> None:
    loader = DataLoader(range(8), 2, shuffle=True)
    before = dict(vars(loader))
    prepared = prepare(loader, 1, 2)
    list(prepared)
    assert vars(loader) == before
    assert prepared.original is loader
    assert prepared.loader is not loader


def test_attributes_are_those_of_the_prepared_copy() -> None:
    loader = DataLoader(range(8), 2)
    prepared = prepare(loader, 0, 2)
    assert prepared.batch_size == 2
    assert prepared.dataset == range(8)
    assert prepared.num_workers == 0
    assert prepared.batch_sampler.drop_last is False
    prepared.timeout = 5
    assert prepared.loader.timeout == 5
    assert loader.timeout == 0
    with pytest.raises(AttributeError):
        prepared.no_such_attribute  # noqa: B018


def test_one_replica_shows_the_users_own_sampler() -> None:
    loader = DataLoader(range(8), 2, shuffle=True)
    prepared = prepare(loader)
    assert prepared.sampler is loader.sampler
    sharded = prepare(loader, 0, 2)
    assert len(sharded.sampler) == 4


def test_samplers_own_attributes_are_reached_through_the_sharded_sampler() -> None:
    sampler = RandomSampler(range(8))
    loader = DataLoader(range(8), 2, sampler=sampler)
    prepared = prepare(loader, 0, 2)
    assert prepared.sampler.replacement is False
    batch_sampler = BatchSampler(sampler, 3, True)
    loader = DataLoader(range(8), batch_sampler=batch_sampler)
    prepared = prepare(loader, 0, 2)
    assert prepared.batch_sampler.batch_size == 3


class Duplicable(RandomSampler):
    """A sampler that says how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Duplicable":
        return self


def test_a_sharded_sampler_is_copied_as_itself_and_not_as_the_users_own_sampler() -> None:
    loader = DataLoader(range(8), 2, sampler=Duplicable(range(8)))
    prepared = prepare(loader, 0, 2)
    copied = copy.deepcopy(prepared.batch_sampler)
    assert type(copied) is type(prepared.batch_sampler)
    assert copied is not prepared.batch_sampler
    assert len(copied) == len(prepared.batch_sampler) == 2
    sampler = copy.deepcopy(prepared.sampler)
    assert type(sampler) is type(prepared.sampler)
    assert len(sampler) == 4


class DuplicableStream(IterableDataset[int]):
    """A dataset that says how it is copied, as a dataset with open files does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "DuplicableStream":
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_sharded_dataset_is_copied_as_itself_and_not_as_the_users_own_dataset() -> None:
    prepared = prepare(DataLoader(DuplicableStream(), 2), 1, 2)
    copied = copy.deepcopy(prepared.loader.dataset)
    assert list(copied) == [1, 3, 5, 7]


def test_iterating_the_samplers_directly_does_not_move_the_position() -> None:
    prepared = prepare(DataLoader(range(8), 2), 1, 2)
    next(iter(prepared))
    assert list(prepared.batch_sampler) == [[1, 3], [5, 7]]
    assert list(prepared.sampler) == [1, 3, 5, 7]
    assert prepared.state_dict()["cursor"] == 4


def test_subclasses_keep_their_class_and_iteration() -> None:
    loader = Scaled(10, range(6), batch_size=1)
    prepared = prepare(loader, 1, 2)
    assert isinstance(prepared.loader, Scaled)
    iterator = iter(prepared)
    first = next(iterator)
    assert first.tolist() == [10]
    resumed = prepare(Scaled(10, range(6), batch_size=1), 1, 2)
    resumed.load_state_dict(prepared.state_dict())
    assert batches_of(resumed) == [[30], [50]]
    assert batches_of(iterator) == [[30], [50]]


def test_workers_of_the_users_own_iteration_are_not_touched() -> None:
    loader = DataLoader(range(4), 2, num_workers=1, persistent_workers=True)
    assert batches_of(loader) == [[0, 1], [2, 3]]
    prepared = prepare(loader)
    assert batches_of(prepared) == [[0, 1], [2, 3]]
    assert prepared.loader._iterator is not loader._iterator
    del prepared
    assert batches_of(loader) == [[0, 1], [2, 3]]


def test_batches_are_moved_to_a_device_other_than_the_cpu() -> None:
    data = TensorDataset(torch.arange(4.0), torch.arange(4))
    prepared = prepare(DataLoader(data, 2), device=torch.device("meta"))
    batches = list(prepared)
    assert len(batches) == 2
    for inputs, targets in batches:
        assert inputs.device.type == "meta"
        assert targets.device.type == "meta"


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_batches_are_handed_out_untouched_on_the_cpu(device: torch.device | None) -> None:
    batches = [
        {"x": torch.ones(2)},
        {"x": torch.zeros(2)},
    ]
    loader = DataLoader(batches, None, collate_fn=lambda batch: batch)
    prepared = prepare(loader, device=device)
    for actual, expected in zip(prepared, batches, strict=True):
        assert actual is expected


def test_prepared_loader_can_be_copied() -> None:
    prepared = prepare(DataLoader(range(4), 2), 0, 2)
    copied = copy.copy(prepared)
    assert batches_of(copied) == [[0, 2]]


def test_errors_of_the_dataset_come_through() -> None:
    loader = DataLoader([0, 1], 1, sampler=[0, 5])
    prepared = prepare(loader)
    iterator = iter(prepared)
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)
    assert prepared.state_dict()["cursor"] == 1


class Ready(DataLoader[Any]):
    """A loader whose batches exist already, so that the calls are those of the wrapper."""

    def __iter__(self) -> Any:
        return iter(range(100))


def calls_per_item(items: Any) -> int:
    """Return the number of Python calls for an item, after a first one."""
    iterator = iter(items)
    next(iterator)
    return count_calls(lambda: next(iterator), number=3)


def test_handing_out_a_batch_is_one_python_call_and_drawing_its_indices_adds_none() -> None:
    prepared = prepare(Ready(range(2)), device=torch.device("cpu"))
    assert calls_per_item(prepared) == 1
    plain = DataLoader(range(100), 1)
    plain_calls = calls_per_item(plain.batch_sampler)
    assert calls_per_item(prepare(plain).batch_sampler) == plain_calls


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([1, 2], "DataLoader"),
        (iter([1]), "batch_size=None"),
    ],
    ids=["list", "iterator"],
)
def test_objects_that_are_no_loader_are_refused(items: Any, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        prepare(items)


def test_a_loader_that_was_set_up_is_refused() -> None:
    prepared = prepare(DataLoader([1]))
    with pytest.raises(ConfigurationError, match="set up already"):
        prepare(prepared)


def test_an_unknown_value_of_uneven_is_refused() -> None:
    loader = DataLoader([1])
    with pytest.raises(ConfigurationError, match="'pad'"):
        prepare(loader, uneven="repeat")


def loader_with_distributed_sampler(num_replicas: int, rank: int) -> DataLoader[Any]:
    sampler = DistributedSampler(range(8), num_replicas, rank)
    return DataLoader(range(8), sampler=sampler)


def test_a_sampler_of_another_number_of_ranks_is_refused() -> None:
    loader = loader_with_distributed_sampler(num_replicas=4, rank=1)
    with pytest.raises(ConfigurationError, match="rank 1 of 4"):
        prepare(loader, 1, 2)


def test_a_sampler_of_another_rank_is_refused() -> None:
    loader = loader_with_distributed_sampler(num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match="rank 0 of 2"):
        prepare(loader, 1, 2)


def test_a_sampler_of_several_ranks_is_refused_in_one_process() -> None:
    loader = loader_with_distributed_sampler(num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match="rank 0 of 1"):
        prepare(loader)


def test_a_sampler_of_another_rank_is_accepted_without_sharding() -> None:
    loader = loader_with_distributed_sampler(num_replicas=4, rank=1)
    prepared = prepare(loader, 1, 2, shard=False)
    assert len(prepared) == 2
