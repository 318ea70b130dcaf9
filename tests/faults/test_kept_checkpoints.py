"""A job that is killed at any moment of its life with kept checkpoints leaves one that loads, and the next goes on."""

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
SAVES = 4  # of a life that nobody ends


def live(fabric: Fabric, folder: Path, async_: bool, death: Death) -> None:
    """Go on from the newest checkpoint, and save some more."""
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


def check(folder: Path, least: int, ended: bool) -> int:
    """The step that the next job goes on from; what a job left is looked at before and after that has begun."""
    pattern = re.compile(
        r"\.?(\d{8}-step-\d+)(?:\.[0-9a-f]{12}\.tmp)?"
    )  # temporaries count, metrics do not
    names = {match[1] for name in os.listdir(folder) if (match := pattern.fullmatch(name))}
    assert len(names) <= KEEP + 2, names
    named = [folder / name for name in ("latest", "best") if (folder / name).exists()]
    for file in named:
        step = int(file.read_text().rpartition("-")[2])
        assert value_of(folder / file.read_text().strip()) == step, "what a shell reads is whole"
    with Fabric(accelerator="cpu", devices=1, environment="none") as fabric:
        checkpoints = fabric.checkpoints(folder, keep=KEEP, best=BEST)
        state = {"model": fabric.setup(Constant(0, SMALL)), "step": 0}
        step = checkpoints.restore(state) or 0
        assert step >= least, "none that was committed is lost"
        assert all((parameter == step).all() for parameter in state["model"].parameters())
        kept = [path for path in (checkpoints.latest, checkpoints.best) if path is not None]
        assert [(folder / name).read_text() for name in ("latest", "best")[: len(kept)]] == [
            f"{p.name}\n" for p in kept
        ]
    left = {name.removesuffix(".json") for name in os.listdir(folder)} - {".lock", "latest", "best"}
    assert all(
        re.fullmatch(r"\d{8}-step-\d+", name) and (folder / name).exists() for name in left
    ), left
    assert all(not path.is_dir() or len(list(path.iterdir())) == 5 for path in folder.iterdir()), (
        "shards and an index"
    )
    assert len(left) <= (KEEP + 1 if ended else KEEP + 2)
    return step


def deaths(seed: int, strategy: str) -> Death:
    draw = random.Random(seed)
    rank = draw.randrange(2) if strategy == "fsdp" else 0
    if draw.random() < 0.1:
        return Death(rank=rank, size=draw.choice([10, 100_000, 400_000]))
    return Death(rank=rank, step=draw.randrange(1, 30 if rank else 130))


def survive(folder: Path, tries: list[int]) -> int:
    killed = 0
    step = 0
    for seed in tries:
        strategy = ("ddp", "fsdp")[seed % 2]
        death = deaths(seed, strategy)
        ended = gets_through(live, strategy, folder, seed % 4 > 1, death)
        step = check(folder, step + SAVES if ended else step, ended)
        killed += not ended
    return killed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tries",
    [
        pytest.param(range(10, 20), id="some", marks=pytest.mark.slow),
        pytest.param(range(20, 220), id="all", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_a_job_killed_at_any_moment_leaves_a_checkpoint_that_loads(
    tmp_path: Path, tries: range
) -> None:
    assert survive(tmp_path, [*tries]) >= len(tries) // 2
