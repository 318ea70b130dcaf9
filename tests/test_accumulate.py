"""Windows of micro-batches: where a window ends, and what a loop in windows draws and saves."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
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
    """A dataset that counts loaded samples and augments them with the global stream."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.loaded = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        noise = random.random() + torch.rand(()).item()
        return index, noise


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
    with Fabric(accelerator="cpu", devices=1) as fabric:
        yield fabric


def window_ends(fabric: Fabric, loader: DataLoader[Any], steps: int, **options: Any) -> list[bool]:
    """Return for each micro-batch whether it ends a window."""
    prepared = fabric.setup_dataloaders(loader, **options)
    return [last for _, last in fabric.accumulate(prepared, steps=steps)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans())
def test_windows_have_steps_micro_batches_and_the_last_window_has_the_remaining_batches(
    n: int, batch_size: int, steps: int, drop_last: bool, iterable: bool
) -> None:
    data: Any = ResumableStream(n) if iterable else range(n)
    loader = DataLoader(data, batch_size, drop_last=drop_last)
    count = len(list(loader))
    expected = []
    for number in range(1, count + 1):
        is_last = number % steps == 0 or number == count
        expected.append(is_last)
    with Fabric(accelerator="cpu", devices=1) as fabric:
        assert window_ends(fabric, loader, steps) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_in_windows_draws_what_the_plain_loop_draws(fabric: Fabric, shuffle: bool) -> None:
    def run(iterate: Callable[[Any], Iterable[Any]]) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        data = Noisy(10)
        loader = DataLoader(data, 3, shuffle=shuffle)
        loader = fabric.setup_dataloaders(loader)
        steps = []
        for batch in iterate(loader):
            draw = torch.rand(()).item()
            steps.append((str(batch), draw, data.loaded, loader.state_dict()["cursor"]))
        return steps

    def in_windows(loader: Any) -> Iterator[Any]:
        for batch, _ in fabric.accumulate(loader, 2):
            yield batch

    assert run(in_windows) == run(iter)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "map": lambda: DataLoader(range(7), 2),
    "iterable": lambda: DataLoader(ResumableStream(7), 2),
    "own state": lambda: Stateful(range(7), 2),
    "no length": lambda: DataLoader(range(7), 2, sampler=Unsized()),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_position_saved_in_the_loop_is_that_of_the_last_batch_handed_out(
    fabric: Fabric, kind: str
) -> None:
    def positions(loader: Any, iterable: Iterable[Any]) -> list[Any]:
        states = []
        for _ in iterable:
            states.append(loader.state_dict())
        states.append(loader.state_dict())
        return states

    loader = fabric.setup_dataloaders(LOADERS[kind]())
    states = positions(loader, fabric.accumulate(loader, 3))
    plain = fabric.setup_dataloaders(LOADERS[kind]())
    assert list(map(str, states)) == list(map(str, positions(plain, plain)))
    if kind == "own state":
        return
    resumed = fabric.setup_dataloaders(LOADERS[kind]())
    resumed.load_state_dict(states[0])
    batches = [(batch.tolist(), last) for batch, last in fabric.accumulate(resumed, 3)]
    assert batches == [([2, 3], False), ([4, 5], False), ([6], True)]


def test_each_loop_is_an_epoch_and_has_the_length_of_the_loader(fabric: Fabric) -> None:
    windows = fabric.accumulate(fabric.setup_dataloaders(DataLoader(range(5), 2)), 2)
    assert len(windows) == 3
    for _ in range(3):
        assert len(list(windows)) == 3
    assert windows.loader.state_dict()["epoch"] == 3


def test_a_sampler_that_miscounts_is_an_error_and_no_open_window(fabric: Fabric) -> None:
    class Miscounting(Unsized):
        def __init__(self, length: int) -> None:
            self.length = length

        def __len__(self) -> int:
            return self.length

    for length, word in ((6, "more"), (8, "fewer")):
        with pytest.raises(UsageError, match=f"{word} batches than its length says"):
            window_ends(fabric, DataLoader(range(7), sampler=Miscounting(length)), 3)


def test_a_wrong_number_of_steps_or_loader_is_an_error_of_the_call(fabric: Fabric) -> None:
    loader = DataLoader(range(5))
    loader = fabric.setup_dataloaders(loader)
    for steps in (0, -1, True, 2.5):
        with pytest.raises(ConfigurationError, match="steps="):
            fabric.accumulate(loader, steps=steps)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentTypeError, match="not set up"):
        fabric.accumulate(DataLoader(range(5)), 2)  # pyright: ignore[reportArgumentType]


def try_to_save(fabric: Fabric, folder: Path, loader: Any, model: Any = None) -> str:
    state = {"loader": loader, "model": model}
    return outcome(lambda: fabric.save(folder / "checkpoint.pt", state))


def test_a_save_inside_a_window_is_an_error_and_a_save_at_its_end_is_fine(
    fabric: Fabric, tmp_path: Path
) -> None:
    loader = DataLoader(range(6))
    loader = fabric.setup_dataloaders(loader)
    saves = [try_to_save(fabric, tmp_path, loader) for _ in fabric.accumulate(loader, 4)]
    for number, word in ((1, "1 of 4"), (2, "2 of 4"), (3, "3 of 4"), (5, "1 of 4")):
        error = saves[number - 1]
        assert f"micro-batch {word}" in error
        assert f"batch {number} of epoch 0" in error
        assert error.startswith(CheckpointError.__name__)
    assert saves[3] == "fine"
    assert saves[5] == "fine"


def test_a_loop_that_is_left_has_no_open_window(fabric: Fabric, tmp_path: Path) -> None:
    loader = DataLoader(range(6))
    loader = fabric.setup_dataloaders(loader)
    for _ in fabric.accumulate(loader, 4):
        break
    assert try_to_save(fabric, tmp_path, loader) == "fine"
    with suppress(KeyError):
        for _ in fabric.accumulate(loader, 4):
            raise KeyError
    assert try_to_save(fabric, tmp_path, loader) == "fine"
    iterator = iter(fabric.accumulate(loader, 4))
    next(iterator)
    assert "CheckpointError" in try_to_save(fabric, tmp_path, loader)
    del iterator
    assert try_to_save(fabric, tmp_path, loader) == "fine"


def test_a_save_at_the_end_of_an_inner_window_is_an_error_in_an_outer_window(
    fabric: Fabric, tmp_path: Path
) -> None:
    inner = DataLoader(range(6))
    inner = fabric.setup_dataloaders(inner)
    outer = DataLoader(range(2))
    outer = fabric.setup_dataloaders(outer)
    saves = []
    for _ in fabric.accumulate(outer, 2):
        for _, last in fabric.accumulate(inner, 6):
            if last:
                saves.append(try_to_save(fabric, tmp_path, inner))
        break
    [error] = saves
    assert "CheckpointError" in error


def ends_of_even_loaders(fabric: Fabric) -> list[list[bool]]:
    """Loop over loaders of different kinds, whose ranks have the same number of batches."""
    sampler = DistributedSampler(range(9), fabric.world_size, fabric.global_rank)
    loaders: list[DataLoader[Any]] = [
        DataLoader(range(9), 2),
        DataLoader(ResumableStream(9), 2),
        DataLoader(range(9), 2, sampler=sampler),
        DataLoader(range(9), sampler=Unsized()),
    ]
    return [window_ends(fabric, loader, 2) for loader in loaders]


def test_windows_end_together_on_all_ranks() -> None:
    for ends in run_in_ranks(ends_of_even_loaders):
        assert ends == [
            [False, True, True],
            [False, True],
            [False, True, True],
            [False, True, False, True],
        ]


def refuse_uneven_loaders(fabric: Fabric) -> list[str]:
    length = 3 + fabric.global_rank
    errors = []
    for data in (range(length), ResumableStream(length)):
        loop = partial(window_ends, fabric, DataLoader(data), 2, use_distributed_sampler=False)
        errors.append(outcome(loop))
    return errors


def test_loaders_whose_ranks_may_have_different_numbers_of_batches_are_refused() -> None:
    for errors in run_in_ranks(refuse_uneven_loaders):
        assert len(errors) == 2
        for error in errors:
            assert 'uneven="shortest"' in error


def train_in_windows(fabric: Fabric, folder: Path) -> tuple[list[Any], list[str]]:
    """Train in windows; return the gradients of all ranks at each step, and the saves."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(torch.arange(9.0).reshape(9, 1))
    loader = fabric.setup_dataloaders(loader)
    gradients = []
    saves = []
    for batch, last in fabric.accumulate(loader, 2):
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(batch).sum()
            fabric.backward(loss)
        saves.append(try_to_save(fabric, folder, loader, model))
        if last:
            gradients.append(fabric.all_gather([model.weight.grad, model.bias.grad]))
            optimizer.step()
            optimizer.zero_grad()
    return gradients, saves


def test_ranks_that_train_in_windows_synchronize_gradients_and_save_at_each_end(
    tmp_path: Path,
) -> None:
    for gradients, saves in run_in_ranks(train_in_windows, tmp_path):
        assert len(gradients) == 3
        for weight, bias in gradients:
            assert torch.equal(weight[0], weight[1])
            assert torch.equal(bias[0], bias[1])
        assert [save.partition(":")[0] for save in saves] == [
            "CheckpointError",
            "fine",
            "CheckpointError",
            "fine",
            "fine",
        ]


def test_a_loop_in_windows_works_in_threads() -> None:
    def loop(fabric: Fabric, n: int, **options: Any) -> list[bool]:
        return window_ends(fabric, DataLoader(range(n), 2), 2, **options)

    assert ThreadedWorld(2).run(loop, 10) == [[False, True, True]] * 2
    with pytest.raises(RankFailedError, match="shortest"):
        ThreadedWorld(2).run(loop, 5, use_distributed_sampler=False)
