"""Each process draws random numbers of its own, from the first setup of a module on."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric import Fabric
from fabric.errors import ConfigurationError
from fabric.strategies import ModelParallelStrategy
from tests.datasets import samples_of
from tests.ranks import run_in_ranks

SEED = 3


class Numbers(NamedTuple):
    """A number of each of the random streams."""

    torch: float
    python: float
    numpy: float


def draw() -> Numbers:
    return Numbers(torch.rand(()).item(), random.random(), numpy.random.random())


def are_different(draws: Sequence[Numbers]) -> bool:
    """Return whether each stream has different numbers in all draws."""
    return all(len(set(numbers)) == len(draws) for numbers in zip(*draws, strict=True))


def draw_plainly(count: int) -> list[Numbers]:
    """Return the first numbers of a single process that knows nothing of ranks."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)
    return [draw() for _ in range(count)]


def draw_around_setup(fabric: Fabric, per_rank: Any) -> list[Numbers]:
    fabric.seed_everything(SEED, per_rank=per_rank)
    before = draw()
    model = nn.Linear(1, 1)
    fabric.setup(model)
    torch.rand(2)  # the number of the weight and of the bias of the model
    return [before, draw()]


def numbers_around_setup(ranks: int, per_rank: Any) -> list[list[Numbers]]:
    return run_in_ranks(draw_around_setup, per_rank, ranks=ranks)


def test_each_process_has_its_own_streams_after_the_setup_of_a_module() -> None:
    [plain] = numbers_around_setup(1, False)
    first, second, third = numbers_around_setup(3, "after_setup")
    assert first == plain
    assert second[0] == plain[0]
    assert third[0] == plain[0]
    assert are_different([first[1], second[1], third[1]])


def test_one_process_draws_the_numbers_of_the_plain_loop() -> None:
    [plain] = numbers_around_setup(1, False)
    [numbers] = numbers_around_setup(1, "after_setup")
    assert numbers == plain
    assert numbers[0] == draw_plainly(1)[0]


def test_another_value_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    with pytest.raises(ConfigurationError, match="after_setup"):
        fabric.seed_everything(1, per_rank="later")  # pyright: ignore[reportArgumentType]


# -- checkpoints -----------------------------------------------------------------------------------


def draw_and_save(fabric: Fabric, path: Path) -> Numbers:
    """Save, and return the numbers that follow."""
    fabric.seed_everything(SEED, per_rank="after_setup")
    model = fabric.setup(nn.Linear(1, 1))
    draw()
    fabric.save(path, {"model": model})
    return draw()


def load_and_draw(fabric: Fabric, path: Path, loads_first: bool) -> Numbers:
    fabric.seed_everything(SEED, per_rank="after_setup")
    module = nn.Linear(1, 1)
    if loads_first:
        fabric.load(path, {"model": module})
        fabric.setup(module)
    else:
        model = fabric.setup(module)
        fabric.load(path, {"model": model})
    return draw()


@pytest.mark.parametrize("loads_first", [False, True])
def test_a_resumed_process_continues_its_streams_and_a_new_one_has_its_own(
    loads_first: bool, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    expected = run_in_ranks(draw_and_save, path)
    first, second, third = run_in_ranks(load_and_draw, path, loads_first, ranks=3)
    assert [first, second] == expected
    assert are_different([first, second, third])
    [alone] = run_in_ranks(load_and_draw, path, loads_first, ranks=1)
    assert alone == expected[0]


# -- models and data that are made after the setup -------------------------------------------------


def build_after_setup(fabric: Fabric) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    fabric.seed_everything(SEED, per_rank="after_setup")
    fabric.setup(nn.Linear(1, 1))
    module = nn.Linear(2, 2)
    weight = module.weight.detach().clone()
    model = fabric.setup(module)
    return weight, fabric.get_state_dict(model)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_is_built_later_has_the_values_of_the_first_process(strategy: str) -> None:
    (weight, state), (other_weight, _) = run_in_ranks(build_after_setup, strategy=strategy)
    assert not torch.equal(weight, other_weight)
    assert torch.equal(state["weight"], weight)


class ShuffledStream(IterableDataset[int]):
    """A stream that shuffles when its first sample is asked for."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(10).tolist()


def iterate_shuffled(fabric: Fabric) -> list[list[int]]:
    fabric.seed_everything(SEED, per_rank="after_setup")
    fabric.setup(nn.Linear(1, 1))
    plain_loaders = [
        DataLoader(range(10), batch_size=1, shuffle=True),
        DataLoader(ShuffledStream(), batch_size=1),
    ]
    epochs = []
    for plain_loader in plain_loaders:
        loader = fabric.setup_dataloaders(plain_loader)
        for _ in range(2):
            epochs.append(samples_of(loader))
    return epochs


def test_processes_with_their_own_streams_read_different_samples_of_one_order() -> None:
    epochs_of_ranks = run_in_ranks(iterate_shuffled)
    for first, second in zip(*epochs_of_ranks, strict=True):
        assert sorted(first + second) == list(range(10))


# -- ranks that read the same batch ----------------------------------------------------------------


def draw_on_a_mesh(fabric: Fabric, per_rank: Any) -> list[Numbers]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fabric.seed_everything(SEED, per_rank=per_rank)
    fabric.setup(model)
    after_setup = draw()
    fabric.seed_everything(SEED, per_rank=True)
    return [after_setup, draw()]


@pytest.mark.parametrize("per_rank", [True, "after_setup"])
def test_ranks_that_share_a_batch_share_their_streams(per_rank: Any) -> None:
    strategy = ModelParallelStrategy(
        tp_plan={"0": "colwise", "1": "rowwise"},
        tensor_parallel_size=2,
        data_parallel_size=1,
    )
    first, second = run_in_ranks(draw_on_a_mesh, per_rank, strategy=strategy)
    assert first == second


# -- the warning of the first steps ----------------------------------------------------------------


class Noise(nn.Module):
    """A network that maps noise to samples, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.linear(noise)


def own_samples(fabric: Fabric) -> torch.Tensor:
    return torch.full((2, 4), fabric.global_rank + 1.0)


def random_samples(fabric: Fabric) -> torch.Tensor:
    return torch.randn(2, 4)


def shard_of_random_samples(fabric: Fabric) -> torch.Tensor:
    samples = torch.randn(2 * fabric.world_size, 4)
    return samples[fabric.global_rank :: fabric.world_size]


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout())


def train(
    fabric: Fabric,
    build: Callable[[], nn.Module],
    inputs: Callable[[Fabric], torch.Tensor],
    per_rank: Any,
) -> list[str]:
    """Train for four steps, and return the texts of the warnings."""
    fabric.seed_everything(SEED, per_rank=per_rank)
    module = build()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            fabric.backward(model(inputs(fabric)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def warnings_of_training(
    build: Callable[[], nn.Module],
    inputs: Callable[[Fabric], torch.Tensor],
    per_rank: Any = False,
    **options: Any,
) -> list[str]:
    run = partial(train, build=build, inputs=inputs, per_rank=per_rank)
    texts = []
    for texts_of_rank in run_in_ranks(run, **options):
        texts += texts_of_rank
    return texts


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_equal_dropout_masks_are_named_once(strategy: str) -> None:
    [text] = warnings_of_training(dropout, own_samples, strategy=strategy)
    assert "training pass 1 of Sequential: replicas 0 and 1" in text
    assert "the same random numbers (torch), such as dropout masks" in text
    assert 'fabric.seed_everything(seed, per_rank="after_setup") before the model is built' in text


def test_equal_noise_that_is_drawn_in_the_loop_is_named() -> None:
    [text] = warnings_of_training(Noise, random_samples)
    assert "training pass 2 of Noise: replicas 0 and 1" in text
    assert "which gives them equal outputs" in text


@pytest.mark.parametrize(
    ("build", "inputs", "per_rank"),
    [
        (dropout, own_samples, "after_setup"),
        (dropout, own_samples, True),
        (Noise, random_samples, "after_setup"),
        (Noise, own_samples, False),
        (Noise, shard_of_random_samples, False),
    ],
)
def test_different_random_numbers_are_not_named(
    build: Callable[[], nn.Module], inputs: Callable[[Fabric], torch.Tensor], per_rank: Any
) -> None:
    assert warnings_of_training(build, inputs, per_rank) == []


def test_equal_random_numbers_are_not_named_without_the_checks_of_training() -> None:
    assert warnings_of_training(dropout, own_samples, check_training=False) == []


# -- seeds of loader workers ----------------------------------------------------------------------


def seed_numpy_by_id(worker_id: int) -> None:
    numpy.random.seed(worker_id)


def seed_all_by_id(worker_id: int) -> None:
    numpy.random.seed(worker_id)
    torch.manual_seed(worker_id)
    random.seed(worker_id)


def seed_numpy_as_torch(worker_id: int) -> None:
    numpy.random.seed(torch.initial_seed() % 2**32)


def seed_nothing(worker_id: int) -> None:
    pass


def add_noise(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + float(numpy.random.random())


def train_with_worker(fabric: Fabric, worker_init_fn: Callable[[int], None] | None) -> list[str]:
    """Train for an epoch, and return the warnings with their files."""
    module = nn.Linear(4, 4)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = DataLoader(
        list(torch.ones(16, 4)),
        batch_size=2,
        num_workers=1,
        collate_fn=add_noise,
        worker_init_fn=worker_init_fn,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Python 3.12 warns of each fork of a process with threads, as for a worker.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for batch in fabric.setup_dataloaders(loader):
            fabric.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [f"{warning.filename}: {warning.message}" for warning in caught]


@pytest.mark.parametrize(
    ("worker_init_fn", "strategy", "streams"),
    [
        (seed_numpy_by_id, "ddp", "(numpy)"),
        (seed_all_by_id, "fsdp", "(python, numpy, torch)"),
    ],
)
def test_a_worker_init_fn_that_seeds_by_the_id_of_the_worker_is_named_once(
    worker_init_fn: Callable[[int], None], strategy: str, streams: str
) -> None:
    first, second = run_in_ranks(train_with_worker, worker_init_fn, strategy=strategy)
    [text] = first + second
    assert text.startswith(__file__)
    assert f"the same random numbers {streams}, as by seeds from the id of the worker" in text
    assert "torch.initial_seed() % 2**32" in text


@pytest.mark.parametrize("worker_init_fn", [seed_numpy_as_torch, seed_nothing, None])
def test_other_worker_init_fns_are_not_named(
    worker_init_fn: Callable[[int], None] | None,
) -> None:
    assert run_in_ranks(train_with_worker, worker_init_fn) == [[], []]


# -- the whole work on every process --------------------------------------------------------------

GRAPH = torch.ones(5, 4)


def train_on_graph(fabric: Fabric, case: str) -> list[str]:
    """Train for four steps as a case says, and return the warnings with their files."""
    torch.manual_seed(SEED)
    module = nn.Linear(4, 4)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    nodes = GRAPH
    if case != "whole graph":
        nodes = GRAPH[fabric.global_rank :: fabric.world_size] + fabric.global_rank
    loader = None
    if case == "set-up loader":
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(GRAPH)))
        nodes = GRAPH
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            output = model(nodes)
            if case == "loss of gathered outputs":
                output = fabric.all_gather(output.mean(0), sync_grads=True)
            fabric.backward(output.mean())
            optimizer.step()
            optimizer.zero_grad()
    # The checks see a loader for as long as it exists.
    del loader
    return [f"{warning.filename}: {warning.message}" for warning in caught]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_that_each_do_the_whole_work_are_named_once(strategy: str) -> None:
    first, second = run_in_ranks(train_on_graph, "whole graph", strategy=strategy)
    [text] = first + second
    assert text.startswith(__file__)
    assert "replicas 0 and 1 of the model had the same outputs and losses in the first 3" in text
    assert "data[fabric.global_rank :: fabric.world_size]" in text
    assert "Fabric(devices=1)" in text


@pytest.mark.parametrize("case", ["parts", "loss of gathered outputs", "set-up loader"])
def test_processes_that_share_the_work_are_not_named(case: str) -> None:
    assert run_in_ranks(train_on_graph, case) == [[], []]
