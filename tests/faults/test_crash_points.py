"""A rank that is killed at any point of a save leaves the old checkpoint or the new one.

There are two kinds of points. Python reports the steps of a save before it takes them (opening,
locking, renaming, listing and removing files): a rank is killed at one step after the other, until
a save ends. And the kernel ends a process that writes beyond a size of a file.
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
from fabric.checkpoint import CheckpointIO, FullCheckpoint, ShardedCheckpoint
from fabric.errors import RankFailedError

ROWS = 2600
# Numbers of columns: for 104 MB of float32, and for 1 MB.
LARGE = 10_000
SMALL = 100


@dataclass(frozen=True)
class Death:
    """The point at which a rank is killed.

    It dies at step number ``step`` in the folder, or when it writes byte ``size`` of a file.
    """

    rank: int = 0
    step: int = 0
    size: int = 0


NO_DEATH = Death(rank=-1)


class Constant(nn.Module):
    """A model of one value, in which a mixture of two saves can be seen."""

    def __init__(self, value: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ROWS, columns), float(value)))


def prepare(death: Death, folder: Path) -> None:
    """Arrange that this process dies at this point."""
    if death.size:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Python ignores this signal by default.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (death.size, death.size))
        return
    steps = count(1)

    def kill_at_step(event: str, arguments: tuple[Any, ...]) -> None:
        is_in_folder = any(str(argument).startswith(str(folder)) for argument in arguments)
        is_step = event == "fcntl.flock" or is_in_folder
        if is_step and next(steps) == death.step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at_step)


def save(fabric: Fabric, path: Path, value: int, columns: int, async_: bool, death: Death) -> None:
    module = Constant(value, columns)
    model = fabric.setup(module)
    if fabric.global_rank == death.rank:
        prepare(death, path.parent)
    if async_:
        fabric.save(path, {"model": model, "step": value}, async_=True).wait()
    else:
        fabric.save(path, {"model": model, "step": value})


def gets_through(function: Callable[..., None], strategy: str, *arguments: Any) -> bool:
    """Run a function on two ranks; return whether it ended on both, and none was killed."""
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
    """Return the number of the save that ``path`` holds, and fail where it is a mixture."""
    checkpoint_io: CheckpointIO = FullCheckpoint()
    if path.is_dir():
        checkpoint_io = ShardedCheckpoint()
    content = checkpoint_io.load(path)
    step = content["step"]
    weight = content["model"]["weight"]
    assert (weight == step).all(), "torn"
    return step


def survive(strategy: str, path: Path, columns: int, async_: bool, deaths: Iterable[Death]) -> int:
    """Kill a save at each of these points, until one ends; return how many were killed."""
    if not path.exists():
        assert gets_through(save, strategy, path, 0, columns, False, NO_DEATH)
    old_value = value_of(path)
    killed = 0
    for new_value, death in enumerate(deaths, old_value + 1):
        if gets_through(save, strategy, path, new_value, columns, async_, death):
            assert value_of(path) == new_value, death
            break
        killed += 1
        present_value = value_of(path)
        assert present_value in (old_value, new_value), death
        old_value = present_value
    return killed


def assert_no_litter(strategy: str, path: Path, columns: int) -> None:
    assert gets_through(save, strategy, path, 9999, columns, False, NO_DEATH)
    assert value_of(path) == 9999
    assert list(path.parent.iterdir()) == [path]
    if path.is_dir():
        assert len(list(path.iterdir())) == 5, "an index, shards and random states"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_killed_while_it_saves_beside_the_loop_leaves_a_complete_checkpoint(
    strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    last_writer = 0
    if strategy == "fsdp":
        last_writer = 1
    deaths = [Death(step=4), Death(size=300_000), Death(rank=last_writer, step=3)]
    assert survive(strategy, path, SMALL, True, deaths) == 3
    assert_no_litter(strategy, path, SMALL)


SAMPLE = pytest.param(SMALL, 6, 10, id="some", marks=pytest.mark.slow)
ALL = pytest.param(LARGE, 1, 40, id="all", marks=[pytest.mark.slow, pytest.mark.soak])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("columns", "stride", "minimum"), [SAMPLE, ALL])
def test_no_checkpoint_is_lost_or_torn_at_any_point_of_a_save(
    tmp_path: Path, columns: int, stride: int, minimum: int
) -> None:
    killed = 0
    for strategy, writers in [("ddp", 1), ("fsdp", 2)]:
        path = tmp_path / strategy / "state"
        path.parent.mkdir()
        share = ROWS * columns * 4 // writers
        sizes = [100_000, share // 3, share - 1, share + 100]
        if stride > 1:
            sizes = [sizes[0], sizes[-1]]
        for async_ in (False, True):
            deaths = [Death(size=size) for size in sizes]
            killed += survive(strategy, path, columns, async_, deaths)
            # A save of shards takes many steps. The async save is killed at the even ones and the
            # other save at the odd ones.
            first_step = 1
            if async_ and writers > 1:
                first_step = 2
            for rank in range(writers):
                steps = range(first_step, 100, writers * stride)
                deaths = [Death(rank=rank, step=step) for step in steps]
                killed += survive(strategy, path, columns, async_, deaths)
        assert_no_litter(strategy, path, columns)
    assert killed >= minimum, killed
