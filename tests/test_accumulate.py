"""Windows of micro-batches: where each ends, what a loop over them costs, and what it leaves as it was."""

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fabric import Fabric
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    RankFailedError,
    UsageError,
)
from fabric.testing import ThreadedWorld
from tests.datasets import ResumableStream
from tests.ranks import outcome, run_in_ranks


class Noisy(Dataset[Any]):
    """Counts what is loaded from it, and augments with the global stream."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.loaded = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return index, random.random() + torch.rand(()).item()


class Stateful(DataLoader[Any]):
    """A loader with a state of its own, as torchdata's StatefulDataLoader."""

    yielded = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            object.__setattr__(self, "yielded", self.yielded + 1)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "yielded", state["yielded"])


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1) as one:
        yield one


def ends(fabric: Fabric, loader: DataLoader[Any], steps: int, **options: Any) -> list[bool]:
    return [
        last
        for _, last in fabric.accumulate(fabric.setup_dataloaders(loader, **options), steps=steps)
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans())
def test_windows_have_as_many_micro_batches_as_asked_and_the_last_one_what_is_left(
    n: int, batch_size: int, steps: int, drop_last: bool, iterable: bool
) -> None:
    data: Any = ResumableStream(n) if iterable else range(n)
    loader = DataLoader(data, batch_size, drop_last=drop_last)
    count = len(list(loader))
    with Fabric(accelerator="cpu", devices=1) as fabric:
        expected = [i % steps == 0 or i == count for i in range(1, count + 1)]
        assert ends(fabric, loader, steps) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_in_windows_draws_what_the_plain_loop_draws(fabric: Fabric, shuffle: bool) -> None:
    def run(windows: bool) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        data = Noisy(10)
        loader = fabric.setup_dataloaders(DataLoader(data, 3, shuffle=shuffle))
        found = []
        for batch in fabric.accumulate(loader, 2) if windows else loader:
            found += [
                str(batch[0] if windows else batch),
                torch.rand(()).item(),
                data.loaded,
                loader.state_dict()["cursor"],
            ]
        return found

    assert run(True) == run(False)


@pytest.mark.parametrize("kind", ["map", "iterable", "own state", "no length"])
def test_a_position_saved_in_the_loop_is_that_of_the_last_batch_handed_out(
    fabric: Fabric, kind: str
) -> None:
    def make() -> Any:
        data: Any = ResumableStream(7) if kind == "iterable" else range(7)
        sampler: Any = Unsized() if kind == "no length" else None
        made = Stateful(data, 2) if kind == "own state" else DataLoader(data, 2, sampler=sampler)
        return fabric.setup_dataloaders(made)

    def states(windows: bool) -> list[Any]:
        loader = make()
        return [
            loader.state_dict() for _ in (fabric.accumulate(loader, 3) if windows else loader)
        ] + [loader.state_dict()]

    assert [str(state) for state in states(True)] == [str(state) for state in states(False)]
    if kind == "own state":
        return
    resumed = make()
    resumed.load_state_dict(states(True)[0])
    assert [(batch.tolist(), last) for batch, last in fabric.accumulate(resumed, 3)] == [
        ([2, 3], False),
        ([4, 5], False),
        ([6], True),
    ]


def test_each_loop_is_an_epoch_and_has_the_length_of_the_loader(fabric: Fabric) -> None:
    windows = fabric.accumulate(fabric.setup_dataloaders(DataLoader(range(5), 2)), 2)
    assert len(windows) == 3
    assert [len(list(windows)) for _ in range(3)] == [3, 3, 3]
    assert windows.loader.state_dict()["epoch"] == 3


def test_a_sampler_that_miscounts_is_an_error_and_no_open_window(fabric: Fabric) -> None:
    class Miscounting(Unsized):
        def __init__(self, length: int) -> None:
            self.length = length

        def __len__(self) -> int:
            return self.length

    for length, word in ((6, "more"), (8, "fewer")):
        with pytest.raises(UsageError, match=f"{word} batches than its length says"):
            ends(fabric, DataLoader(range(7), sampler=Miscounting(length)), 3)


def test_a_wrong_number_of_steps_or_loader_is_an_error_of_the_call(fabric: Fabric) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(5)))
    for steps, error in (
        (0, ConfigurationError),
        (-1, ConfigurationError),
        (True, ConfigurationError),
        (2.5, ConfigurationError),
    ):
        with pytest.raises(error, match="steps="):
            fabric.accumulate(loader, steps=steps)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentTypeError, match="not set up"):
        fabric.accumulate(DataLoader(range(5)), 2)  # pyright: ignore[reportArgumentType]


def test_a_save_inside_a_window_is_an_error_and_fine_wherever_none_is_open(
    fabric: Fabric, tmp_path: Path
) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(6)))
    outer = fabric.setup_dataloaders(DataLoader(range(2)))
    saves: list[str] = []

    def save() -> None:
        saves.append(outcome(lambda: fabric.save(tmp_path / "c.pt", {"loader": loader})))

    for _ in fabric.accumulate(loader, 4):
        save()
    for number, word in ((1, "1 of 4"), (2, "2 of 4"), (3, "3 of 4"), (5, "1 of 4")):
        assert f"micro-batch {word}" in saves[number - 1], saves[number - 1]
        assert f"batch {number} of epoch 0" in saves[number - 1]
        assert saves[number - 1].startswith(CheckpointError.__name__)
    assert saves[3] == saves[5] == "fine"
    saves.clear()
    for _ in fabric.accumulate(loader, 4):
        break
    save()
    with suppress(KeyError):
        for _ in fabric.accumulate(loader, 4):
            raise KeyError
    save()
    iterator = iter(fabric.accumulate(loader, 4))
    next(iterator)
    save()
    del iterator
    save()
    for _ in fabric.accumulate(outer, 2):
        for _, last in fabric.accumulate(loader, 6):
            if last:
                save()
        break
    assert [save == "fine" for save in saves] == [True, True, False, True, False]


def in_ranks(fabric: Fabric, folder: str) -> tuple[Any, ...]:
    rank = fabric.global_rank
    world = fabric.world_size
    # Loaders of different kinds, whose ranks have the same number of batches.
    sampler = DistributedSampler(range(9), world, rank)
    kinds = [
        DataLoader(range(9), 2),
        DataLoader(ResumableStream(9), 2),
        DataLoader(range(9), 2, sampler=sampler),
    ]
    kinds.append(DataLoader(range(9), sampler=Unsized()))
    lasts = [ends(fabric, kind, 2) for kind in kinds]
    # Of loaders that may have different ones nothing is fetched.
    refused = [
        outcome(lambda each=each: ends(fabric, each, 2, use_distributed_sampler=False))
        for each in (DataLoader(range(3 + rank)), DataLoader(ResumableStream(3 + rank)))
    ]
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(9.0).reshape(9, 1)))
    syncs = []
    saves = []
    for batch, last in fabric.accumulate(loader, 2):
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(batch).sum())
        saves.append(
            outcome(lambda: fabric.save(f"{folder}/c", {"loader": loader, "model": model}))
        )
        if last:
            syncs.append(fabric.all_gather([parameter.grad for parameter in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
    return (
        lasts,
        refused,
        [all(bool((one[0] == one[1]).all()) for one in sync) for sync in syncs],
        [save[:15] for save in saves],
    )


def test_windows_end_together_on_all_ranks(tmp_path: Path) -> None:
    for lasts, refused, same, saves in run_in_ranks(in_ranks, str(tmp_path)):
        assert lasts == [
            [False, True, True],
            [False, True],
            [False, True, True],
            [False, True, False, True],
        ]
        assert all('uneven="shortest"' in text for text in refused)
        assert same == [True] * 3
        assert saves == ["CheckpointError", "fine", "CheckpointError", "fine", "fine"]


def test_a_loop_in_windows_works_in_threads() -> None:
    def loop(fabric: Fabric) -> list[bool]:
        return ends(fabric, DataLoader(range(10), 2), 2)

    assert ThreadedWorld(2).run(loop) == [[False, True, True]] * 2
    with pytest.raises(RankFailedError, match="shortest"):
        ThreadedWorld(2).run(
            lambda fabric: ends(fabric, DataLoader(range(3)), 2, use_distributed_sampler=False)
        )
