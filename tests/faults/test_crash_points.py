"""A rank that is killed at any point of a save leaves the old checkpoint or the new one: none is lost, none is torn.

Points are the steps of a save that Python reports before it takes them (opening, locking, renaming, listing and
removing files), one after the other until a save gets through; and the bytes of a file, where the kernel ends the
process that writes one more.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import RankFailedError

ROWS = 2600
# columns: 104 MB and 1 MB of float32
LARGE = 10_000
SMALL = 100


@dataclass(frozen=True)
class Death:
    """Where a rank is killed: at the so-manieth step that it takes in the folder, or when it writes byte ``size``."""

    rank: int = 0
    step: int = 0
    size: int = 0


class Constant(nn.Module):
    """A model of one value, in which a mixture of two saves could be seen."""

    def __init__(self, value: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ROWS, columns), float(value)))


def prepare(death: Death, folder: Path) -> None:
    if death.size:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (death.size, death.size))
        return
    steps = count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        counts = event == "fcntl.flock" or any(
            str(argument).startswith(str(folder)) for argument in arguments
        )
        if counts and next(steps) == death.step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save(fabric: Fabric, path: Path, value: int, columns: int, async_: bool, death: Death) -> None:
    model = fabric.setup(Constant(value, columns))
    if fabric.global_rank == death.rank:
        prepare(death, path.parent)
    if async_:
        fabric.save(path, {"model": model, "step": value}, async_=True).wait()
    else:
        fabric.save(path, {"model": model, "step": value})


def gets_through(function: Callable[..., None], strategy: str, *arguments: Any) -> bool:
    """Whether two ranks came to the end of a function, rather than that one of them was killed."""
    try:
        with Fabric(
            accelerator="cpu", devices=2, strategy=strategy, launcher="forkserver"
        ) as fabric:
            fabric.launch(function, *arguments)
    except RankFailedError as error:
        if error.exit_code not in (-signal.SIGKILL, -signal.SIGXFSZ):
            raise
        return False
    return True


def value_of(path: Path) -> int:
    """The save that ``path`` holds, whole."""
    loaded = (ShardedCheckpoint() if path.is_dir() else FullCheckpoint()).load(path)
    weight = loaded["model"]["weight"]
    assert weight.min() == weight.max() == loaded["step"], "torn"
    return loaded["step"]


def survive(strategy: str, path: Path, columns: int, async_: bool, deaths: Iterable[Death]) -> int:
    """Kill a save in each of these ways, until one gets through; how many were killed."""
    if not path.exists():
        assert gets_through(save, strategy, path, 0, columns, False, Death(rank=-1))
    present = value_of(path)
    killed = 0
    for value, death in enumerate(deaths, present + 1):
        through = gets_through(save, strategy, path, value, columns, async_, death)
        found = value_of(path)
        assert found == value or (found == present and not through), (death, found, present)
        present = found
        killed = killed + (not through)
        if through:
            break
    return killed


def assert_no_litter(strategy: str, path: Path, columns: int) -> None:
    assert gets_through(save, strategy, path, 9999, columns, False, Death(rank=-1))
    assert value_of(path) == 9999
    assert list(path.parent.iterdir()) == [path]
    assert not path.is_dir() or len(list(path.iterdir())) == 5, "an index, shards and random states"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_killed_while_it_saves_beside_the_loop_leaves_a_whole_checkpoint(
    strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    deaths = [
        Death(step=4),
        Death(size=300_000),
        Death(rank=1 if strategy == "fsdp" else 0, step=3),
    ]
    assert survive(strategy, path, SMALL, True, deaths) == 3
    assert_no_litter(strategy, path, SMALL)


SAMPLE = pytest.param(SMALL, 6, 10, id="some", marks=pytest.mark.slow)
ALL = pytest.param(LARGE, 1, 40, id="all", marks=[pytest.mark.slow, pytest.mark.soak])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("columns", "stride", "least"), [SAMPLE, ALL])
def test_no_checkpoint_is_lost_or_torn_at_any_point_of_a_save(
    tmp_path: Path, columns: int, stride: int, least: int
) -> None:
    killed = 0
    for strategy, writers in [("ddp", 1), ("fsdp", 2)]:
        path = tmp_path / strategy / "state"
        path.parent.mkdir()
        share = ROWS * columns * 4 // writers
        for async_ in (False, True):
            sizes = [Death(size=size) for size in (100_000, share // 3, share - 1, share + 100)]
            killed += survive(strategy, path, columns, async_, sizes[:: 3 if stride > 1 else 1])
            for rank in range(writers):
                # Of shards, which take many steps, one kind of save is killed at the odd ones, the other at the even.
                steps = range(1 + (async_ and writers > 1), 100, writers * stride)
                killed += survive(
                    strategy, path, columns, async_, (Death(rank=rank, step=step) for step in steps)
                )
        assert_no_litter(strategy, path, columns)
    assert killed >= least, killed
