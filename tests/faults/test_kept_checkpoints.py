"""A job that keeps checkpoints and is killed at any moment leaves one for the next job."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fabric import Fabric
from tests.faults.test_crash_points import SMALL, Constant, Death, gets_through, prepare, value_of

KEEP = 2
BEST = ("loss", "min")
# Saves of a job that is not killed.
SAVES = 4


def live(fabric: Fabric, folder: Path, async_: bool, death: Death) -> None:
    """Go on from the newest checkpoint, and save ``SAVES`` more."""
    model = Constant(0, SMALL)
    state: dict[str, Any] = {"model": fabric.setup(model), "step": 0}
    if fabric.global_rank == death.rank:
        prepare(death, folder)
    checkpoints = fabric.checkpoints(folder, keep=KEEP, best=BEST)
    start = checkpoints.restore(state) or 0
    assert state["step"] == start
    for step in range(start + 1, start + 1 + SAVES):
        for parameter in state["model"].parameters():
            parameter.data.fill_(step)
        state["step"] = step
        checkpoints.save(step, state, {"loss": step % 3}, async_)


def assert_a_shell_can_read(folder: Path) -> None:
    """Fail unless ``latest`` and ``best`` name complete checkpoints, and there are few of them."""
    checkpoints = set()
    for name in os.listdir(folder):
        # Temporary files of a checkpoint count, and the files of its metrics do not.
        match = re.fullmatch(r"\.?(\d{8}-step-\d+)(?:\.[0-9a-f]{12}\.tmp)?", name)
        if match is not None:
            checkpoints.add(match[1])
    assert len(checkpoints) <= KEEP + 2, checkpoints
    for name in ("latest", "best"):
        if not (folder / name).exists():
            continue
        checkpoint = (folder / name).read_text().strip()
        _, _, step = checkpoint.rpartition("-")
        assert value_of(folder / checkpoint) == int(step)


def restore(folder: Path) -> int:
    """Restore the newest checkpoint as the next job does, and return its step."""
    with Fabric(accelerator="cpu", devices=1, environment="none") as fabric:
        checkpoints = fabric.checkpoints(folder, keep=KEEP, best=BEST)
        state = {"model": fabric.setup(Constant(0, SMALL)), "step": 0}
        step = checkpoints.restore(state) or 0
        for parameter in state["model"].parameters():
            assert (parameter == step).all()
        if checkpoints.latest is not None:
            assert (folder / "latest").read_text() == f"{checkpoints.latest.name}\n"
        if checkpoints.best is not None:
            assert (folder / "best").read_text() == f"{checkpoints.best.name}\n"
    return step


def assert_no_leftovers(folder: Path, maximum: int) -> None:
    """Fail unless the folder holds complete checkpoints alone, ``maximum`` of them at most."""
    names = {name.removesuffix(".json") for name in os.listdir(folder)}
    names -= {".lock", "latest", "best"}
    assert len(names) <= maximum, names
    for name in names:
        assert re.fullmatch(r"\d{8}-step-\d+", name)
        assert (folder / name).exists()
        if (folder / name).is_dir():
            files = os.listdir(folder / name)
            assert len(files) == 5, "an index, shards and random states"


def draw_death(seed: int, strategy: str) -> Death:
    draw = random.Random(seed)
    rank = 0
    if strategy == "fsdp":
        rank = draw.randrange(2)
    if draw.random() < 0.1:
        return Death(rank=rank, size=draw.choice([10, 100_000, 400_000]))
    steps_of_rank = 130
    if rank == 1:
        steps_of_rank = 30
    return Death(rank=rank, step=draw.randrange(1, steps_of_rank))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(10, 18), id="some", marks=pytest.mark.slow),
        pytest.param(range(20, 220), id="all", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_a_job_killed_at_any_moment_leaves_a_checkpoint_that_loads(
    tmp_path: Path, seeds: range
) -> None:
    killed = 0
    step = 0
    for seed in seeds:
        strategy = ["ddp", "fsdp"][seed % 2]
        async_ = seed % 4 > 1
        death = draw_death(seed, strategy)
        ended = gets_through(live, strategy, tmp_path, async_, death)
        assert_a_shell_can_read(tmp_path)
        committed_step = step
        most_checkpoints = KEEP + 2
        if ended:
            committed_step += SAVES
            most_checkpoints -= 1
        else:
            killed += 1
        step = restore(tmp_path)
        assert step >= committed_step, "a committed checkpoint was lost"
        assert_no_leftovers(tmp_path, most_checkpoints)
    assert killed >= len(seeds) // 2
