"""A run that is resumed, on the same or on another number of processes, is the run that was interrupted."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from fabric import Fabric
from fabric.data import DataParallelJob, FabricDataLoader
from fabric.errors import CheckpointError
from tests.ranks import outcome, run_in_ranks

N = 53


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(N).tolist()


class Stateful(DataLoader[Any]):
    """Knows how many batches it has yielded and goes past them when resumed, as torchdata's StatefulDataLoader."""

    yielded = 0
    behind = 0

    def __iter__(self) -> Any:
        behind, self.behind, self.yielded = self.behind, 0, self.behind
        for batch in islice(super().__iter__(), behind, None):
            self.yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.behind = state["yielded"]


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "in order": lambda batch_size: DataLoader(range(N), batch_size),
    "shuffled": lambda batch_size: DataLoader(range(N), batch_size, shuffle=True),
    "own generator": lambda batch_size: DataLoader(
        range(N), batch_size, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "without a length": lambda batch_size: DataLoader(range(N), batch_size, sampler=Unsized()),
    "single samples": lambda _: DataLoader(range(N), None, sampler=Unsized()),
    "a loader with a state": lambda batch_size: Stateful(range(N), batch_size, shuffle=True),
}


def prepare(loader: DataLoader[Any], rank: int, size: int, state: Any = None) -> FabricDataLoader:
    torch.manual_seed(0)
    prepared = FabricDataLoader(loader, DataParallelJob(rank, size), device=None)
    if state is not None:
        prepared.load_state_dict(state)
    return prepared


def taken(loader: FabricDataLoader, steps: int) -> list[int]:
    return torch.cat([torch.as_tensor(batch).flatten() for batch in islice(loader, steps)]).tolist()


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 1, 4), (2, 5, 2), (5, 3, 1)])
def test_another_number_of_processes_goes_on_in_the_same_order(
    kind: str, sizes: tuple[int, ...]
) -> None:
    expected = taken(prepare(LOADERS[kind](12), 0, 1), N)
    actual: list[int] = []
    state = None
    for size, steps in zip(sizes, (2, 1, N), strict=True):
        loaders = [prepare(LOADERS[kind](12 // size), rank, size, state) for rank in range(size)]
        parts = []
        for loader in loaders:
            torch.manual_seed(0)
            parts.append(taken(loader, steps))
        actual += chain.from_iterable(zip(*parts, strict=True))
        states = [loader.state_dict() for loader in loaders]
        assert len({one["cursor"] for one in states}) == 1
        state = states[-1]
    assert actual[:N] == expected
    assert actual[N:] == expected[: len(actual) - N]  # all ranks get equally many


def recipe(fabric: Fabric, path: Path, steps: int) -> list[list[int]]:
    loader = fabric.setup_dataloaders(
        DataLoader(torch.arange(N), 12 // fabric.world_size, shuffle=True)
    )
    if path.exists():
        fabric.load(path, {"loader": loader})
    else:
        fabric.seed_everything(5)
    found = []
    for step, batch in enumerate(loader):
        found.append(fabric.gather_for_metrics(batch).tolist())
        if step + 1 == steps:
            fabric.save(path, {"loader": loader})
            break
    return found


def test_the_documented_recipe_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    whole = run_in_ranks(recipe, tmp_path / "none", N, ranks=1)[0]
    for first, then in [(1, 2), (2, 1)]:
        path = tmp_path / f"{first}.pt"
        before, after = (run_in_ranks(recipe, path, 3, ranks=size)[0] for size in (first, then))
        assert before + after == whole[:6]
        assert sorted(chain.from_iterable(whole)) == list(range(N))


def test_batches_of_another_size_are_refused_where_batches_are_counted() -> None:
    def make(batch_size: int) -> FabricDataLoader:
        batches = BatchSampler(SequentialSampler(range(N)), batch_size, drop_last=False)
        return prepare(DataLoader(range(N), batch_sampler=batches), 0, 2)

    loader = make(6)
    next(iter(loader))
    with pytest.raises(CheckpointError, match="batch_size 6, this one has 12"):
        make(12).load_state_dict(loader.state_dict())


def test_a_sampler_that_shards_by_itself_resumes_where_its_ranks_had_equally_many() -> None:
    def make(rank: int, size: int, state: Any = None) -> FabricDataLoader:
        sampler = DistributedSampler(range(N), size, rank)
        return prepare(DataLoader(range(N), 12 // size, sampler=sampler), rank, size, state)

    loader = make(0, 2)
    expected = taken(make(0, 1), N)
    taken(loader, 2)
    state = loader.state_dict()
    parts = [taken(make(rank, 4, state), 1) for rank in range(4)]
    assert list(chain.from_iterable(zip(*parts, strict=True))) == expected[24:36]
    with pytest.raises(CheckpointError, match=r"(?s)DistributedSampler, which shards.*divides 24"):
        make(0, 5, state)


class Epochs(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 100, self.epoch * 100 + 12))


def interrupted(fabric: Fabric) -> dict[str, bool]:
    kinds: dict[str, Callable[[], DataLoader[Any]]] = {
        "shuffled": lambda: Stateful(range(20), 2, shuffle=True),
        "sampler": lambda: Stateful(
            range(20),
            2,
            sampler=DistributedSampler(range(20), fabric.world_size, fabric.global_rank),
        ),
        "epochs": lambda: Stateful(Epochs(), 2),
    }
    found = {}
    for kind, make in kinds.items():
        loader = fabric.setup_dataloaders(make())
        taken(loader, N)
        whole = []
        state = None
        for batch in loader:
            whole.append(batch.tolist())
            if len(whole) == 2:
                state = loader.state_dict()
        for resumed in (loader, fabric.setup_dataloaders(make())):
            resumed.load_state_dict(state)
            found[f"{kind}, {'in place' if resumed is loader else 'anew'}"] = whole[2:] == [
                batch.tolist() for batch in resumed
            ]
    return found


class Files(IterableDataset[str]):
    """The files of one rank, of different lengths; its position names the file."""

    def __init__(self, rank: int, shards_itself: bool) -> None:
        self.rank = rank
        self.shards_itself = shards_itself
        self.file = 0
        self.line = 0

    def __iter__(self) -> Iterator[str]:
        while self.file < 4:
            while self.line < 2 + self.rank:
                self.line += 1
                yield f"{self.rank}/{self.file}/{self.line}"
            self.file = self.file + 1
            self.line = 0
        self.file = 0

    def state_dict(self) -> dict[str, Any]:
        return {"name": f"{self.rank}/{self.file}", "line": self.line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rank, self.file = map(int, state["name"].split("/"))
        assert rank == self.rank, "the file of another rank"
        self.line = state["line"]


def own_data(fabric: Fabric, kind: str) -> Any:
    if kind == "lists":  # of different lengths
        return fabric.setup_dataloaders(
            DataLoader(range(9 + fabric.global_rank)), use_distributed_sampler=False
        )
    loader = DataLoader(Files(fabric.global_rank, kind == "shards itself"), 1)
    return fabric.setup_dataloaders(loader, use_distributed_sampler=kind == "shards itself")


def resumed_data(fabric: Fabric, folder: Path) -> dict[str, bool]:
    found = {}
    for kind in ("shards itself", "sharded by the user", "lists"):
        loader = own_data(fabric, kind)
        again = own_data(fabric, kind)
        batches = iter(loader)
        for _ in range(3 + fabric.global_rank):
            next(batches)
        fabric.save(folder / kind, {"loader": loader})
        fabric.load(folder / kind, {"loader": again})
        found[kind] = list(map(str, batches)) == list(map(str, again))
    return found


def load_own_data(fabric: Fabric, folder: Path) -> str:
    return outcome(
        lambda: fabric.load(folder / "shards itself", {"loader": own_data(fabric, "shards itself")})
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_goes_on_in_data_of_its_own(strategy: str, tmp_path: Path) -> None:
    assert [
        value
        for actual in run_in_ranks(resumed_data, tmp_path, strategy=strategy)
        for value in actual.values()
    ] == [True] * 6
    for text in run_in_ranks(load_own_data, tmp_path, ranks=1):
        assert "Files, which shards itself" in text


def test_a_loader_with_a_state_of_its_own_resumes_in_its_order() -> None:
    for actual in run_in_ranks(interrupted):
        assert len(actual) == 6
        assert all(actual.values()), actual


def test_a_state_of_fabrics_is_refused_by_a_loader_that_keeps_its_own() -> None:
    saved = prepare(DataLoader(Epochs(), 2), 0, 1).state_dict()
    with pytest.raises(
        CheckpointError, match="the Stateful keeps its own position; this is fabric's"
    ):
        prepare(Stateful(Epochs(), 2), 0, 1, saved)
    assert "not what state_dict" in outcome(
        lambda: prepare(Stateful(range(20), 2), 0, 2, {"yielded": 3})
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(inputs))


def bare(fabric: Fabric, folder: Path) -> Any:
    model = fabric.setup(Net())
    fabric.save(folder / "bare.pt", model.state_dict())
    fabric.save(folder / "later.pt", model.state_dict(), async_=True).wait()
    other = fabric.setup(Net())
    with torch.no_grad():
        other.out.weight.zero_()
    fabric.load_raw(folder / "bare.pt", other)
    return torch.equal(other.out.weight, model.out.weight), list(fabric.load(folder / "bare.pt"))


def test_a_bare_state_dict_is_saved_as_one(tmp_path: Path) -> None:
    names = list(Net().state_dict())
    assert run_in_ranks(bare, tmp_path) == [(True, names)] * 2
    for name in ("bare.pt", "later.pt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert list(loaded) == names
        assert loaded._metadata == Net().state_dict()._metadata
        Net().load_state_dict(loaded)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_another_toolkit_names_a_way_that_loses_nothing(tmp_path: Path) -> None:
    """Lightning's: the shards in torch's format, and what is no tensor in a file beside them."""
    net = Net()
    folder = tmp_path / "other"
    dcp.save({"model": net.state_dict(), "epoch": 3}, checkpoint_id=folder)
    torch.save({"step": 7}, folder / "meta.pt")
    with Fabric(accelerator="cpu", devices=1) as fabric:
        with pytest.raises(CheckpointError) as caught:
            fabric.load(folder)
        command, _, rest = str(caught.value.suggestion).partition("; ")
        assert (
            command
            == f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} {folder}.pt"
        )
        assert rest.startswith(f"the state outside of the shards is in {folder}/meta.pt;")
        dcp_to_torch_save(folder, f"{folder}.pt")
        model = fabric.setup(Net())
        assert fabric.load(f"{folder}.pt", {"model": model}) == {"epoch": 3}
        assert fabric.load(folder / "meta.pt") == {"step": 7}
        assert torch.equal(model.out.weight, net.out.weight)
