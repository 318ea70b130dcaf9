"""The newest checkpoints of a run and the best one are kept; whatever happens, one that loads is there."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import UsageError
from fabric.strategies import SingleDeviceStrategy
from tests.ranks import outcome, run_in_ranks
from tests.test_checkpoint_failures import in_own_mounts, limited
from tests.test_promises_checkpoints import Objects

pytestmark = pytest.mark.timeout(90)

BEST = ("val_loss", "min")
FORMATS = {"file": FullCheckpoint(), "shards": ShardedCheckpoint()}


def single(io: Any = None) -> Fabric:
    return Fabric(
        strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none"
    )


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in the order in which they were saved."""
    return [
        int(match[1])
        for name in sorted(os.listdir(folder))
        if (match := re.fullmatch(r"\d{8}-step-(\d+)", name))
    ]


def step_of(path: Any) -> int | None:
    return None if path is None else int(str(path).rpartition("-")[2])


def damage(path: Path) -> None:
    path = next(path.glob("rank-*.safetensors")) if path.is_dir() else path
    content = bytearray(path.read_bytes())
    content[-len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize("form", FORMATS)
def test_the_newest_and_the_best_are_kept(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(folder, keep=2, best=BEST)
        assert (checkpoints.latest, checkpoints.best, checkpoints.restore({})) == (None, None, None)
        for step, loss in enumerate([5.0, 1.0, 3.0, 1.0, 4.0, 2.0]):
            checkpoints.save(
                10 * step, {"step": step}, {"val_loss": torch.tensor(loss), "other": math.nan}
            )
        assert (step_of(checkpoints.latest), step_of(checkpoints.best)) == (50, 30), (
            "properties wait"
        )
        assert steps(folder) == [30, 40, 50]
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(folder, keep=1, best=BEST)
        state = {"step": -1}
        assert (checkpoints.restore(state), state["step"]) == (50, 5)
        checkpoints.save(60, state, async_=False)
        assert (step_of(checkpoints.latest), step_of(checkpoints.best)) == (60, 30)
        fabric.load(checkpoints.best, state)
        assert state["step"] == 3
        checkpoints.save(70, state, {"val_loss": 0})
    assert steps(folder) == [70]
    assert (folder / "latest").read_text() == (folder / "best").read_text() == "00000008-step-70\n"
    assert json.loads((folder / "00000008-step-70.json").read_text()) == {"val_loss": 0.0}
    assert len(os.listdir(folder)) == 5, "with the lock"


def test_a_step_that_is_saved_again_and_one_that_goes_back_are_the_newest(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=2)
        for step in (10, 20, 20):
            checkpoints.save(step, {"step": step})
        assert checkpoints.best is None
        assert steps(tmp_path) == [10, 20]
        checkpoints.save(
            15, {"step": 15}, async_=False
        )  # somebody has loaded step 10 and goes on from there
        assert steps(tmp_path) == [20, 15]
    with single() as fabric:
        assert fabric.checkpoints(tmp_path).restore({"step": 0}) == 15


def test_leftovers_go_and_what_others_have_there_stays(tmp_path: Path) -> None:
    with single(ShardedCheckpoint()) as fabric:
        fabric.checkpoints(tmp_path, keep=1).save(5, {"x": torch.ones(3)}, {"loss": 1})
    whole = sorted(os.listdir(tmp_path))
    unfinished = tmp_path / "00000002-step-9"
    shutil.copytree(tmp_path / "00000001-step-5", unfinished)
    (unfinished / "index.json").rename(unfinished / ".index.json.0123456789ab.tmp")
    for name in (
        "00000003-step-9.json",
        ".00000003-step-9.0123456789ab.tmp",
        ".latest.0123456789ab.tmp",
    ):
        (tmp_path / name).write_text("1")
    own = [
        "notes.txt",
        "step-3",
        "00000004-step-x",
        ".mine.0123456789ab.tmp",
        "00000001-step-5.pdf",
    ]
    for name in own:
        (tmp_path / name).write_text("mine")
    (tmp_path / "latest").unlink()
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1)
        assert sorted(os.listdir(tmp_path)) == sorted([*whole, *own])
        assert checkpoints.restore({"x": None}) == 5
        checkpoints.save(6, {"x": 1})
    assert {*own} < {*os.listdir(tmp_path)}
    assert steps(tmp_path)[-1] == 6


class Notes:
    """Somebody's own format, whose saves end when it is waited for."""

    def __init__(self) -> None:
        self.begun: dict[Path, str] = {}

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        self.begun[path] = str(state["step"])

    def load(self, path: Path) -> dict[str, Any]:
        return {"step": int(path.read_text())}

    def remove(self, path: Path) -> None:
        path.unlink()

    def wait(self) -> None:
        while self.begun:
            path, text = self.begun.popitem()
            path.write_text(text)


def test_a_format_of_ones_own_is_kept_too(tmp_path: Path) -> None:
    with single(Notes()) as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1)
        for step in (1, 2, 3):
            checkpoints.save(step, {"step": step})
        assert checkpoints.restore({"step": 0}) == 3
        assert steps(tmp_path) == [3]


def test_in_memory_a_second_job_takes_over_and_the_first_one_is_told() -> None:
    with single() as fabric, single() as other:
        checkpoints = fabric.checkpoints("memory://rotation/a", keep=2, best=BEST)
        for step in range(5):
            checkpoints.save(step, {"step": step}, {"val_loss": step})
        assert str(checkpoints.best) == "memory://rotation/a/00000001-step-0"
        fabric.load(checkpoints.latest, state := {"step": 0})
        assert state == {"step": 4}
        files = fsspec.filesystem("memory")
        files.pipe_file("/rotation/a/.lock", b"process 7 elsewhere")
        assert "another job has begun to save into the folder" in outcome(
            lambda: checkpoints.save(7, {"step": 7}, async_=False)
        )
        checkpoints = other.checkpoints("memory://rotation/a", keep=1)
        checkpoints.save(8, state)
        assert checkpoints.restore({"step": 0}) == 8
        names = [name for name in files.find("/rotation/a") if not name.endswith(".json")]
        assert [name.rpartition("/")[2] for name in names] == [
            ".lock",
            "00000006-step-8",
            "best",
            "latest",
        ]


def test_a_full_disk_leaves_what_there_was_and_a_later_save_goes_on(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1)
        checkpoints.save(1, {"x": torch.zeros(100_000)}, {"loss": 1}, async_=False)
        with limited(20_000):
            pending = checkpoints.save(2, {"x": torch.ones(100_000)}, {"loss": 1})
            assert "untouched" in outcome(lambda: checkpoints.latest)
            assert pending.exception() is not None
            assert step_of(checkpoints.latest) == 1
            assert "untouched" in outcome(
                lambda: checkpoints.save(3, {"x": torch.ones(100_000)}, {"loss": 1}, async_=False)
            )
        assert checkpoints.restore({"x": None}) == 1
        assert steps(tmp_path) == [1]
        checkpoints.save(4, {"x": 1})
    assert steps(tmp_path) == [4]
    assert len(os.listdir(tmp_path)) == 3, "with the lock, and the name of the latest"


FULL_DISK = """
import os, subprocess, sys
import torch
from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import CheckpointError
from fabric.strategies import SingleDeviceStrategy
torch.set_num_threads(1)

disk = sys.argv[1]
for io in FullCheckpoint(), ShardedCheckpoint():
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", disk], check=True)
    with Fabric(strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none") as fabric:
        checkpoints = fabric.checkpoints(disk, keep=1, best=("loss", "min"))
        checkpoints.save(0, {"x": torch.zeros(500_000)}, {"loss": 0.0}, async_=False)
        checkpoints.save(1, {"x": torch.ones(500_000)}, {"loss": 1.0}, async_=False)
        for async_ in (False, True):
            try:
                checkpoints.save(2, {"x": torch.ones(500_000)}, {"loss": 2.0}, async_)
                checkpoints.latest
            except CheckpointError as error:
                assert "untouched" in str(error), error
            else:
                raise SystemExit(f"{io} could write")
            assert checkpoints.restore(state := {"x": None}) == 1 and state["x"].all()
            fabric.load(checkpoints.best, state)
            assert not state["x"].any()
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        checkpoints.save(2, {"x": torch.ones(500_000)}, {"loss": -1.0})
    names = [name for name in os.listdir(disk) if name[0].isdigit()]
    assert sorted(name.partition("-")[2] for name in names) == ["step-2", "step-2.json"], names
    subprocess.run(["umount", disk], check=True)
"""


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(in_own_mounts("true"), check=False, capture_output=True).returncode > 0,
    reason="a mount of one's own needs Linux's user namespaces",
)
def test_a_small_disk_that_is_full_loses_no_checkpoint(tmp_path: Path) -> None:
    command = in_own_mounts(sys.executable, "-c", FULL_DISK, str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr


# -- On two ranks -----------------------------------------------------------------------------------------------------


def filled(fabric: Fabric, value: float) -> nn.Module:
    model = nn.Linear(64, 64, bias=False)
    nn.init.constant_(model.weight, value)
    return fabric.setup(model)


def fall_back(fabric: Fabric, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    checkpoints = fabric.checkpoints(folder, keep=3, best=BEST)
    for step in range(1, 5):
        pending = checkpoints.save(
            step, {"model": filled(fabric, step), "step": step}, {"val_loss": -step}, step < 4
        )
    found["pending"] = pending is None
    found["before"] = step_of(checkpoints.latest), step_of(checkpoints.best)
    fabric.barrier()
    if fabric.is_global_zero:
        damage(folder / "00000004-step-4")
        # A name alone, of a save that was not committed.
        (folder / "00000003-step-3.json").write_text('{"val_loss": NaN}')
    fabric.barrier()
    checkpoints = fabric.checkpoints(folder, keep=2, best=BEST)
    state = {"model": filled(fabric, 0), "step": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["step"] = checkpoints.restore(state)
    found["warnings"] = [str(each.message) for each in caught]
    parameter: Any = next(iter(state["model"].parameters())).detach()
    values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    found["value"] = values.unique().tolist()
    found["after"] = step_of(checkpoints.latest), step_of(checkpoints.best)
    found["file"] = (folder / "latest").read_text()
    other = {"model": fabric.setup(nn.Linear(64, 64)), "step": -1}
    before = [value.clone() for value in other["model"].state_dict().values()]
    found["misfit"] = outcome(lambda: checkpoints.restore(other))
    found["unchanged"] = other["step"] == -1 and all(
        map(torch.equal, before, other["model"].state_dict().values())
    )
    checkpoints.save(5, state, async_=False)
    fabric.barrier()
    found["kept"] = steps(folder)
    if fabric.is_global_zero:
        for name in steps(folder):
            damage(next(folder.glob(f"*-step-{name}")))
    fabric.barrier()
    found["none"] = outcome(lambda: checkpoints.restore(state))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(strategy: str, tmp_path: Path) -> None:
    first, second = run_in_ranks(fall_back, tmp_path, strategy=strategy)
    assert "00000004-step-4 is passed over" in first["warnings"][0]
    assert "checksum" in first["warnings"][0]
    assert (len(first["warnings"]), len(second["warnings"])) == (1, 0)
    for actual in (first, second):
        assert actual["pending"]
        assert (actual["before"], actual["step"], actual["after"]) == ((4, 4), 3, (3, 2))
        assert actual["value"] == [3]
        assert actual["file"] == "00000003-step-3\n"
        assert actual["misfit"].startswith("CheckpointError: load a checkpoint into")
        assert actual["unchanged"]
        assert actual["kept"] == [2, 3, 5], (
            "the best one, the one that was restored, and the new one"
        )
        assert actual["none"].count("is passed over") == 3


def refuse(fabric: Fabric, folder: Path) -> dict[str, str]:
    rank = fabric.global_rank
    bare = folder / "bare"
    bare.write_text("a file")
    checkpoints = fabric.checkpoints(folder / "run", best=BEST)

    def save(step: Any, metrics: Any, **state: Any) -> str:
        return outcome(lambda: checkpoints.save(step, state, metrics))

    return {
        "keep": outcome(lambda: fabric.checkpoints(folder / "other", keep=0)),
        "none": outcome(lambda: fabric.checkpoints(folder / "other", keep=None)),  # pyright: ignore[reportArgumentType]
        "best": outcome(lambda: fabric.checkpoints(folder / "other", best="loss")),  # pyright: ignore[reportArgumentType]
        "mode": outcome(lambda: fabric.checkpoints(folder / "other", best=("loss", "least"))),  # pyright: ignore[reportArgumentType]
        "folder": outcome(lambda: fabric.checkpoints(bare / "run")),
        "file": outcome(lambda: fabric.checkpoints(bare)),
        "missing": save(1, {"loss": 1.0}),
        "nan": save(1, {"val_loss": math.nan if rank == 1 else 1.0}),
        "text": save(1, {"val_loss": "low"}),
        "not reduced": save(1, {"val_loss": 1.0 + rank}),
        "first only": save(1, {"val_loss": 1.0} if rank == 0 else None),
        "steps": save(1 + rank, None),
        "negative": save(-1, None),
        "fraction": save(1.5, None),
        "content": save(1, None, x=object()),
        "held": outcome(lambda: fabric.checkpoints(folder / "held")),
        "fine": save(1, None),
        "again": outcome(lambda: fabric.checkpoints(folder / "run")),
    }


def test_what_cannot_be_is_one_error_on_every_rank(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.checkpoints(tmp_path / "held")
        first, second = run_in_ranks(refuse, tmp_path)
    run_in_ranks(save_once, tmp_path / "held")
    own = {
        "keep": "keep=0 is not valid", "none": "keep=None is not valid", "mode": "'least'",
        "best": "best='loss' is not valid",
        "folder": "NotADirectoryError", "file": "FileExistsError", "missing": "'val_loss'", "text": "ArgumentTypeError",
        "negative": "at least 0", "fraction": "TypeError", "content": "ArgumentTypeError",
        "held": f"process {os.getpid()} on ",
    }  # fmt: skip
    for name, text in own.items():
        assert text in first[name], name
        assert "Error: " in second[name], name
    for name in ("not reduced", "first only", "steps"):
        assert second[name].startswith("ConfigurationError: checkpoints.save("), name
        assert "the same on all ranks" in second[name], name
        assert "failed on rank 1" in first[name], name
    assert "nan" in second["nan"]
    assert "failed on rank 1" in first["nan"]
    assert first["fine"] == second["fine"] == first["again"] == "fine"
    assert steps(tmp_path / "run") == [1]
    assert not (tmp_path / "other").exists()


def save_once(fabric: Fabric, folder: Path) -> None:
    """A job that ended has left its folder to others."""
    fabric.checkpoints(folder).save(1, {"step": 1})


def test_after_teardown_there_is_no_saving(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path)
        checkpoints.save(1, {"step": 1})
    assert step_of(checkpoints.latest) == 1
    with pytest.raises(UsageError, match="teardown"):
        checkpoints.save(2, {"step": 2})


def keep_objects(fabric: Fabric, folder: Path) -> tuple[Any, ...]:
    fsspec.register_implementation("objects", Objects, clobber=True)
    found = []
    for scheme in ("objects", "file"):
        checkpoints = fabric.checkpoints(f"{scheme}://{folder}/{scheme}", keep=1, best=BEST)
        for step in range(4):
            checkpoints.save(
                step, {"model": filled(fabric, step), "step": step}, {"val_loss": step}
            )
        again = fabric.checkpoints(f"{scheme}://{folder}/{scheme}", keep=1, best=BEST)
        found += [again.restore({"model": filled(fabric, 9), "step": 9}), step_of(again.best)]
        again.save(7, {"step": 7}, async_=False)
        fabric.load(again.best, state := {"step": 9, "model": filled(fabric, 9)})
        found.append(state["step"])
    return tuple(found)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_paths_with_a_scheme_keep_the_same(strategy: str, tmp_path: Path) -> None:
    assert run_in_ranks(keep_objects, tmp_path, strategy=strategy) == [(3, 0, 0, 3, 0, 0)] * 2
    for scheme in ("objects", "file"):
        files = {
            path.relative_to(tmp_path / scheme)
            for path in (tmp_path / scheme).rglob("*")
            if path.is_file()
        }
        kept = {path.parts[0] for path in files} - {
            ".lock",
            "latest",
            "best",
            "00000001-step-0.json",
        }
        assert kept == {"00000001-step-0", "00000005-step-7"}, (
            "an object store has no empty folders"
        )
