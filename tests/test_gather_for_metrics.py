"""Gathering for metrics counts each sample once, in the order of the data."""

import itertools
import re
import warnings
from collections.abc import Callable
from functools import partial
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
from fabric.errors import RankFailedError, UsageError
from fabric.testing import ThreadedWorld
from tests.datasets import samples_of
from tests.ranks import outcome, run_in_ranks


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(range(self.n))


class Unsized:
    def __iter__(self) -> Any:
        return iter(range(5))


def gathered(
    replicas: int, make: Callable[[int], DataLoader[Any]], uneven: Any = "pad"
) -> list[int]:
    """Loop over a loader on several ranks, and return what every rank gathers."""

    def loop(fabric: Fabric) -> list[int]:
        plain_loader = make(fabric.global_rank)
        loader = fabric.setup_dataloaders(plain_loader, uneven=uneven)
        return samples_of(map(fabric.gather_for_metrics, loader))

    first, *samples_of_ranks = ThreadedWorld(replicas).run(loop)
    for samples in samples_of_ranks:
        assert samples == first
    return first


def expected_count(replicas: int, n: int, batch_size: int, uneven: str, drop_last: bool) -> int:
    """Return how many of n samples the ranks read together."""
    if uneven == "pad" and not drop_last:
        return n
    samples_of_rank = n // replicas
    if drop_last:
        samples_of_rank -= samples_of_rank % batch_size
    return samples_of_rank * replicas


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_every_sample_counts_once_and_in_order(uneven: str) -> None:
    cases = itertools.product(
        (1, 2, 3, 4),
        (1, 2, 5, 12, 13),
        (1, 3, 4),
        (False, True),
    )
    for replicas, n, batch_size, drop_last in cases:
        loader = DataLoader(range(n), batch_size, drop_last=drop_last)
        actual = gathered(replicas, lambda _, loader=loader: loader, uneven)
        count = expected_count(replicas, n, batch_size, uneven, drop_last)
        expected = list(range(count))
        assert actual == expected, (replicas, n, batch_size, drop_last)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_batch_samplers_single_samples_and_streams_count_every_sample_once(replicas: int) -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
    bulk = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    values = torch.arange(10)
    loaders: list[DataLoader[Any]] = [
        DataLoader(range(10), batch_sampler=batches),
        DataLoader(Rows(values), batch_size=None, sampler=bulk),
        DataLoader(values, batch_size=None),
    ]
    for loader in loaders:
        samples = gathered(replicas, lambda _, loader=loader: loader)
        assert samples == list(range(10))
    samples = gathered(replicas, lambda _: DataLoader(Stream(12), 2))
    assert samples == list(range(12))


@pytest.mark.parametrize(("drop_last", "count"), [(False, 11), (True, 9)])
def test_a_distributed_sampler_of_the_users_counts_every_sample_once(
    drop_last: bool, count: int
) -> None:
    def by_hand(rank: int) -> DataLoader[Any]:
        sampler = DistributedSampler(
            range(11),
            num_replicas=3,
            rank=rank,
            shuffle=False,
            drop_last=drop_last,
        )
        return DataLoader(range(11), 2, sampler=sampler)

    assert gathered(3, by_hand) == list(range(count))


class Contiguous(DistributedSampler[int]):
    def __iter__(self) -> Any:
        first = self.rank * 3
        return iter(range(first, first + 3))


def test_a_sampler_that_shards_in_its_own_way_does_not_say_what_it_repeated() -> None:
    def contiguous_loader(rank: int) -> DataLoader[Any]:
        sampler = Contiguous(range(5), 2, rank)
        return DataLoader(range(5), 2, sampler=sampler)

    with pytest.raises(RankFailedError, match="Contiguous shards the data itself"):
        gathered(2, contiguous_loader)


def test_a_position_of_another_number_of_ranks_counts_every_sample_once() -> None:
    def setup(fabric: Fabric) -> Any:
        loader = DataLoader(range(23), 10 // fabric.world_size)
        return fabric.setup_dataloaders(loader)

    def position_after_a_batch(fabric: Fabric) -> Any:
        loader = setup(fabric)
        next(iter(loader))
        return loader.state_dict()

    def resume(fabric: Fabric, state: Any) -> list[int]:
        loader = setup(fabric)
        loader.load_state_dict(state)
        return samples_of(map(fabric.gather_for_metrics, loader))

    [state] = ThreadedWorld(1).run(position_after_a_batch)
    for samples in ThreadedWorld(3).run(resume, state):
        assert samples == list(range(10, 23))


class Rows:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.values[index]


def test_an_order_without_a_length_does_not_say_what_it_repeated() -> None:
    def unsized_loader(rank: int) -> DataLoader[Any]:
        return DataLoader(range(5), sampler=Unsized())

    with pytest.raises(RankFailedError, match=r"Unsized has no length(.|\n)*drop"):
        gathered(2, unsized_loader)
    assert gathered(2, unsized_loader, "drop") == [0, 1, 2, 3]


# -- several loops ---------------------------------------------------------------------------------


def two_loaders(fabric: Fabric, first: int, second: int) -> list[Any]:
    """Set up two loaders with batches of 4: of ``first`` and of ``second`` numbers."""
    loaders = []
    for count in (first, second):
        plain_loader = DataLoader(range(count), 4)
        loader = fabric.setup_dataloaders(plain_loader)
        loaders.append(loader)
    return loaders


def gather_from_zip(fabric: Fabric, counts: tuple[int, int], names_loader: bool) -> list[Any]:
    """Return the samples that each of two zipped loaders has counted, or the error."""
    loaders = two_loaders(fabric, *counts)
    samples: list[list[int]] = [[], []]
    for batches in zip(*loaders, strict=False):
        for index, batch in enumerate(batches):
            loader = None
            if names_loader:
                loader = loaders[index]
            try:
                gathered_batch = fabric.gather_for_metrics(batch, loader=loader)
            except UsageError as error:
                return [str(error)]
            samples[index] += gathered_batch.tolist()
    return samples


@pytest.mark.parametrize("counts", [(9, 7), (7, 9), (7, 8), (20, 19)])
def test_zipped_loaders_count_every_sample_once_if_the_loader_is_named(
    counts: tuple[int, int],
) -> None:
    # The loop ends with the shorter loader. A batch of all ranks has 8 samples.
    steps = -(-min(counts) // 8)
    expected = [list(range(min(count, 8 * steps))) for count in counts]
    for samples in ThreadedWorld(2).run(gather_from_zip, counts, True):
        assert samples == expected


def test_zipped_loaders_are_refused_if_it_is_not_known_whose_batch_it_is() -> None:
    for samples in ThreadedWorld(2).run(gather_from_zip, (9, 7), False):
        [text] = samples
        assert "batch 1 of a loader of a range with 9 samples" in text
        assert "batch 1 of a loader of a range with 7 samples" in text
        assert "fabric.gather_for_metrics(results, loader=loader)" in text


def test_zipped_loaders_of_equally_many_samples_need_not_be_told_apart() -> None:
    for samples in ThreadedWorld(2).run(gather_from_zip, (7, 7), False):
        assert samples == [list(range(7)), list(range(7))]


def gather_beside_another_loop(fabric: Fabric) -> dict[str, list[int]]:
    outer, inner = two_loaders(fabric, 9, 7)
    samples: dict[str, list[int]] = {"outer": [], "inner": [], "outer in inner": []}
    # An iterator that is kept, and that takes no turns with the loops below.
    kept_iterator = iter(inner)
    next(kept_iterator)
    for outer_batch in outer:
        samples["outer"] += fabric.gather_for_metrics(outer_batch).tolist()
        for inner_batch in inner:
            samples["inner"] += fabric.gather_for_metrics(inner_batch).tolist()
            in_inner = fabric.gather_for_metrics(outer_batch, loader=outer)
            samples["outer in inner"] += in_inner.tolist()
        samples["outer"] += fabric.gather_for_metrics(outer_batch).tolist()
    kept_iterator.close()
    return samples


def test_nested_loops_and_kept_iterators_do_not_take_turns() -> None:
    first_batch = list(range(8))
    for samples in ThreadedWorld(2).run(gather_beside_another_loop):
        assert samples["outer"] == [*first_batch, *first_batch, 8, 8]
        assert samples["inner"] == [*range(7), *range(7)]
        assert samples["outer in inner"] == [*first_batch, 8]


def gather_in_turns(fabric: Fabric) -> dict[str, str]:
    def gather(batch: Any, loader: Any = None) -> str:
        return outcome(lambda: fabric.gather_for_metrics(batch, loader=loader))

    first, second = two_loaders(fabric, 9, 7)
    plain_loader = DataLoader(range(9), 4)
    unsharded = fabric.setup_dataloaders(plain_loader, use_distributed_sampler=False)
    errors = {}
    outer = iter(first)
    next(outer)
    inner = iter(first)
    batch = next(inner)
    errors["nested"] = gather(batch, first)
    batch = next(outer)
    errors["in turns"] = gather(batch, first)
    for batch, _ in zip(first, unsharded, strict=False):
        errors["unsharded"] = gather(batch)
        break
    # The next batch is fetched before the results of a batch are gathered.
    ahead = iter(second)
    batch = next(ahead)
    next(ahead, None)
    errors["fetched ahead"] = gather(batch, second)
    errors["plain"] = gather(batch, plain_loader)
    return errors


def test_a_batch_whose_loop_is_not_known_is_refused() -> None:
    for errors in ThreadedWorld(2).run(gather_in_turns):
        assert errors["nested"] == "fine"
        assert "a set-up loader for each loop" in errors["in turns"]
        assert "several loops take turns" in errors["unsharded"]
        assert "its last batch was fetched" in errors["fetched ahead"]
        assert "the loader that fabric.setup_dataloaders returned" in errors["plain"]


# -- on real ranks ---------------------------------------------------------------------------------


def setup_numbers(fabric: Fabric) -> Any:
    """Set up a loader of seven numbers."""
    loader = DataLoader(torch.arange(7.0), batch_size=2)
    return fabric.setup_dataloaders(loader)


def evaluate(fabric: Fabric) -> list[float]:
    values = []
    for batch in setup_numbers(fabric):
        column = batch[:, None] * 2
        result = fabric.gather_for_metrics({"x": batch, "y": column, "text": "a"})
        x = result["x"]
        assert torch.equal(result["y"][:, 0], x * 2)
        assert result["text"] == "a"
        assert torch.equal(fabric.gather_for_metrics(batch), x)
        values += x.tolist()
    return values


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_evaluation_over_n_samples_counts_n(size: int) -> None:
    for values in run_in_ranks(evaluate, ranks=size):
        assert values == list(range(7))


def evaluate_in_nested_loops(fabric: Fabric) -> tuple[list[float], list[int]]:
    plain_inner = DataLoader(torch.arange(100, 103), batch_size=1)
    inner = fabric.setup_dataloaders(plain_inner)
    outer_values = []
    inner_values = []
    for batch in setup_numbers(fabric):
        if not inner_values:
            inner_values = samples_of(map(fabric.gather_for_metrics, inner))
            for _ in inner:
                break
        gathered_batch = fabric.gather_for_metrics(batch)
        outer_values += gathered_batch.tolist()
    return outer_values, inner_values


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nested_loops_gather_from_the_loop_that_is_running(size: int) -> None:
    for outer_values, inner_values in run_in_ranks(evaluate_in_nested_loops, ranks=size):
        assert outer_values == list(range(7))
        assert inner_values == [100, 101, 102]


def resume_in_the_middle(fabric: Fabric) -> list[float]:
    loader = setup_numbers(fabric)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    return samples_of(map(fabric.gather_for_metrics, loader))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resumed_evaluation_counts_the_remaining_samples(size: int) -> None:
    remaining = list(range(2 * size, 7))
    for samples in run_in_ranks(resume_in_the_middle, ranks=size):
        assert samples == remaining


def gather_without_samples(fabric: Fabric) -> dict[str, str]:
    def gather(value: Any) -> str:
        return outcome(lambda: fabric.gather_for_metrics(value))

    errors = {}
    for batch in setup_numbers(fabric):
        errors["a number"] = gather({"n": 3})
        errors["a mean"] = gather(batch.mean())
        errors["strings"] = gather({"x": batch, "names": [f"sample {number}" for number in batch]})
    errors["after the loop"] = gather(torch.ones(1))
    plain_loader = DataLoader(torch.arange(3))
    unsharded = fabric.setup_dataloaders(plain_loader, use_distributed_sampler=False)
    for batch in unsharded:
        errors["unsharded"] = gather(batch)
    return errors


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_that_do_not_belong_to_samples_of_a_loop_are_refused(size: int) -> None:
    for errors in run_in_ranks(gather_without_samples, ranks=size):
        assert re.search(r"ConfigurationError(.|\n)*\['n'\].*\n.*number 3", errors["a number"])
        assert re.search(
            r"ConfigurationError(.|\n)*not have one entry for each sample.*\(\)", errors["a mean"]
        )
        assert re.search(r"ConfigurationError(.|\n)*\['names'\]\[0\]", errors["strings"])
        assert "UsageError" in errors["after the loop"]
        assert "no loop over a set-up loader is active" in errors["after the loop"]
        if size > 1:
            assert "UsageError" in errors["unsharded"]
            assert "all of the data" in errors["unsharded"]


# -- evaluations that count samples twice ----------------------------------------------------------


def evaluate_and_count(fabric: Fabric, gathers: bool, **options: Any) -> list[str]:
    """Evaluate seven samples twice, and return the texts of the warnings."""
    model = fabric.setup(torch.nn.Linear(1, 1)).eval()
    plain_loader = DataLoader(torch.arange(7.0).unsqueeze(1), batch_size=2)
    loader = fabric.setup_dataloaders(plain_loader, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in loader:
                with torch.no_grad():
                    outputs = model(batch)
                if gathers:
                    fabric.gather_for_metrics(outputs)
    return [str(warning.message) for warning in caught]


def test_an_evaluation_that_counts_samples_twice_says_so_once() -> None:
    first, second = run_in_ranks(evaluate_and_count, False)
    [text] = first
    assert "loop over 7 samples" in text
    assert "1 of them were repeated" in text
    assert second == []


@pytest.mark.parametrize(
    ("gathers", "options"),
    [(True, {}), (False, {"uneven": "drop"}), (False, {"use_distributed_sampler": False})],
)
def test_an_evaluation_that_counts_each_sample_at_most_once_does_not_warn(
    gathers: bool, options: dict[str, Any]
) -> None:
    run = partial(evaluate_and_count, gathers=gathers, **options)
    assert run_in_ranks(run) == [[], []]


def evaluate_longest(fabric: Fabric) -> dict[str, list[str]]:
    """Evaluate five samples on rank 0 and three on rank 1. Return the texts of the warnings."""
    model = fabric.setup(torch.nn.Linear(1, 1)).eval()
    samples = torch.arange(5.0 - 2 * fabric.global_rank).unsqueeze(1)
    texts: dict[str, list[str]] = {}
    for leaves_out in ("nothing", "is_repeat", "gather_for_metrics"):
        loader = fabric.setup_dataloaders(
            DataLoader(samples, batch_size=2), use_distributed_sampler=False, uneven="longest"
        )
        counted = 0
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(2):
                for batch in loader:
                    outputs = model(batch)
                    if leaves_out == "gather_for_metrics":
                        counted += len(fabric.gather_for_metrics(outputs))
                    elif leaves_out == "nothing" or not loader.is_repeat:
                        counted += len(outputs)
        if leaves_out == "is_repeat":
            counted = fabric.all_reduce(counted, reduce_op="sum")
        if leaves_out != "nothing":
            # Both loops together, each sample once in each.
            assert counted == 2 * (5 + 3)
        texts[leaves_out] = [str(warning.message) for warning in caught]
    return texts


def test_an_evaluation_that_counts_the_repeats_of_longest_says_so_on_their_rank() -> None:
    first, second = run_in_ranks(evaluate_longest)
    assert first == {"nothing": [], "is_repeat": [], "gather_for_metrics": []}
    [text] = second.pop("nothing")
    assert "had fewer batches than others, got 1 of them again" in text
    assert "if not loader.is_repeat" in text
    assert second == {"is_repeat": [], "gather_for_metrics": []}


def count_as_the_warning_says(fabric: Fabric, remedy: str) -> tuple[list[str], list[float]]:
    """Evaluate seven samples. Return the texts of the warnings, and the samples that count here.

    Without a remedy, the samples of the batches count.
    """
    options: dict[str, Any] = {}
    if 'uneven="drop"' in remedy:
        options["uneven"] = "drop"
    model = fabric.setup(torch.nn.Linear(1, 1)).eval()
    plain_loader = DataLoader(torch.arange(7.0).unsqueeze(1), batch_size=2)
    loader = fabric.setup_dataloaders(plain_loader, **options)
    counted: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            with torch.no_grad():
                model(batch)
            results = batch
            if "gather_for_metrics" in remedy:
                results = fabric.gather_for_metrics(batch)
            counted.extend(results.flatten().tolist())
    return [str(warning.message) for warning in caught], counted


REMEDIES = ["fabric.gather_for_metrics(results)", 'setup_dataloaders(loader, uneven="drop")']


def test_both_remedies_of_an_evaluation_that_counts_samples_twice_count_none_twice() -> None:
    (texts, first), (_, second) = run_in_ranks(count_as_the_warning_says, "")
    [text] = texts
    for remedy in REMEDIES:
        assert remedy in text
    assert sorted(first + second) == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for texts, samples in run_in_ranks(count_as_the_warning_says, REMEDIES[0]):
        assert texts == []
        assert samples == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    (first_texts, first), (second_texts, second) = run_in_ranks(
        count_as_the_warning_says, REMEDIES[1]
    )
    assert first_texts == second_texts == []
    assert sorted(first + second) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def train_in_an_uneven_loop(fabric: Fabric) -> int:
    model = fabric.setup(torch.nn.Linear(1, 1))
    plain_loader = DataLoader(torch.arange(7.0).unsqueeze(1), batch_size=2)
    loader = fabric.setup_dataloaders(plain_loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            fabric.backward(model(batch).mean())
    return len(caught)


def test_a_training_loop_that_repeats_samples_does_not_warn() -> None:
    assert run_in_ranks(train_in_an_uneven_loop) == [0, 0]
