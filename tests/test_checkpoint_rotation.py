"""The newest checkpoints of a run and the best one are kept, and one that loads is always there."""

import errno
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric._torch import local_tensor
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint, file, save_load
from fabric.checkpoint.sharded_reader import ShardedReader
from fabric.errors import CheckpointError, UsageError
from fabric.strategies import SingleDeviceStrategy
from tests.ranks import in_another_process, outcome, run_in_ranks
from tests.test_checkpoint_failures import in_own_mounts, limited
from tests.test_checkpoint_paths import Objects

BEST = ("val_loss", "min")
FORMATS = {"file": FullCheckpoint(), "shards": ShardedCheckpoint()}


def single(io: Any = None) -> Fabric:
    return Fabric(
        strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none"
    )


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in the order in which they were saved."""
    numbers = []
    for name in sorted(os.listdir(folder)):
        match = re.fullmatch(r"\d{8}-step-(\d+)", name)
        if match is not None:
            numbers.append(int(match[1]))
    return numbers


def step_of(path: Any) -> int:
    return int(str(path).rpartition("-")[2])


def damage(path: Path) -> None:
    file = path
    if path.is_dir():
        file = next(path.glob("rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-len(content) // 2] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize("form", FORMATS)
def test_the_newest_and_the_best_are_kept(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(folder, keep=2, best=BEST)
        assert checkpoints.latest is None
        assert checkpoints.best is None
        assert checkpoints.restore({}) is None
        for step, loss in enumerate([5.0, 1.0, 3.0, 1.0, 4.0, 2.0]):
            metrics = {"val_loss": torch.tensor(loss), "other": math.nan}
            checkpoints.save(10 * step, {"step": step}, metrics)
        # The properties wait for the last save.
        assert step_of(checkpoints.latest) == 50
        assert step_of(checkpoints.best) == 30
        assert steps(folder) == [30, 40, 50]
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(folder, keep=1, best=BEST)
        state = {"step": -1}
        assert checkpoints.restore(state) == 50
        assert state["step"] == 5
        checkpoints.save(60, state, async_=False)
        assert step_of(checkpoints.latest) == 60
        assert step_of(checkpoints.best) == 30
        fabric.load(checkpoints.best, state)
        assert state["step"] == 3
        checkpoints.save(70, state, {"val_loss": 0}, async_=False)
        # Those that the texts named before stay until the next save.
        assert steps(folder) == [30, 60, 70]
        checkpoints.save(70, state, {"val_loss": 0}, async_=False)
        checkpoints.save(70, state, {"val_loss": 0})
    assert steps(folder) == [70, 70]
    assert (folder / "latest").read_text() == "00000010-step-70\n"
    assert (folder / "best").read_text() == "00000010-step-70\n"
    assert json.loads((folder / "00000010-step-70.json").read_text()) == {"val_loss": 0.0}
    assert len(os.listdir(folder)) == 7, "with the lock"


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_text_names_can_be_read_until_after_the_next_save(form: str, tmp_path: Path) -> None:
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1, best=BEST)
        # The best one changes with the latest, stays, and is of the same step.
        saves = [(1, 5.0), (2, 4.0), (3, 9.0), (3, 3.0), (4, 8.0), (5, 7.0), (6, 1.0)]
        checkpoints.save(0, {"step": 0}, {"val_loss": 9.0}, async_=False)
        for step, loss in saves:
            texts = [(tmp_path / title).read_text().strip() for title in ("latest", "best")]
            checkpoints.save(step, {"step": step}, {"val_loss": loss}, async_=False)
            for name in texts:
                assert fabric.load(tmp_path / name)["step"] == step_of(name)


def number_of(name: str) -> int:
    """Return the number of a save, with which the name of its checkpoint begins."""
    number, _, _ = name.partition("-")
    return int(number)


def read_in_a_tight_loop(folder: Path, form: str, last_step: int) -> int:
    """Read what the texts name until they name a step.

    Returns:
        How many reads failed although the text had moved by less than two saves.
    """
    failures = 0
    step = 0
    while step < last_step:
        text = folder / ("latest", "best")[step % 2]
        name = text.read_text().strip()
        step = step_of(name)
        try:
            state = FORMATS[form].load(folder / name)
            assert state["step"] == step
        except CheckpointError:
            # A reader that has slept for two saves comes too late.
            if number_of(text.read_text()) < number_of(name) + 2:
                failures += 1
    return failures


@pytest.mark.parametrize("form", FORMATS)
def test_a_process_that_reads_in_a_tight_loop_finds_what_the_texts_name(
    form: str, tmp_path: Path
) -> None:
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1, best=BEST)
        step = 1
        checkpoints.save(step, {"step": step}, {"val_loss": -step}, async_=False)
        with ThreadPoolExecutor(1) as executor:
            reader = executor.submit(in_another_process, read_in_a_tight_loop, tmp_path, form, 20)
            while not reader.done():
                step += 1
                checkpoints.save(step, {"step": step}, {"val_loss": -step}, async_=False)
        assert reader.result() == 0


def test_a_job_without_best_leaves_no_text_that_names_a_removed_checkpoint(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.checkpoints(tmp_path, keep=1, best=BEST).save(1, {"step": 1}, {"val_loss": 0.0})
    assert (tmp_path / "best").exists()
    with single() as fabric:
        fabric.checkpoints(tmp_path, keep=1)
        assert not (tmp_path / "best").exists()
        assert (tmp_path / "latest").read_text() == "00000001-step-1\n"


def test_a_step_that_is_saved_again_and_one_that_goes_back_are_the_newest(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=2)
        for step in (10, 20, 20):
            checkpoints.save(step, {"step": step})
        assert checkpoints.best is None
        # The first one of step 20 stays for readers of ``latest``.
        assert steps(tmp_path) == [10, 20, 20]
        # As after a restore of step 10.
        checkpoints.save(15, {"step": 15}, async_=False)
        assert steps(tmp_path) == [20, 15]
    with single() as fabric:
        assert fabric.checkpoints(tmp_path).restore({"step": 0}) == 15


def test_leftovers_are_removed_and_files_of_the_user_stay(tmp_path: Path) -> None:
    with single(ShardedCheckpoint()) as fabric:
        fabric.checkpoints(tmp_path, keep=1).save(5, {"x": torch.ones(3)}, {"loss": 1})
    committed_names = sorted(os.listdir(tmp_path))
    unfinished = tmp_path / "00000002-step-9"
    shutil.copytree(tmp_path / "00000001-step-5", unfinished)
    (unfinished / "index.json").rename(unfinished / ".index.json.0123456789ab.tmp")
    for name in (
        "00000003-step-9.json",
        ".00000003-step-9.0123456789ab.tmp",
        ".latest.0123456789ab.tmp",
    ):
        (tmp_path / name).write_text("1")
    user_names = [
        "notes.txt",
        "step-3",
        "00000004-step-x",
        ".mine.0123456789ab.tmp",
        "00000001-step-5.pdf",
    ]
    for name in user_names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "latest").unlink()
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1)
        assert sorted(os.listdir(tmp_path)) == sorted([*committed_names, *user_names])
        assert checkpoints.restore({"x": None}) == 5
        checkpoints.save(6, {"x": 1})
    assert set(user_names) < set(os.listdir(tmp_path))
    assert steps(tmp_path)[-1] == 6


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_behind_a_link_in_the_folder_is_removed_or_replaced(
    form: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    moved = tmp_path / "disk" / "moved"
    note = tmp_path / "note"
    note.write_text("mine")
    with single(FORMATS[form]) as fabric:
        fabric.checkpoints(run, keep=1).save(1, {"x": torch.ones(3)})
    link = run / "00000001-step-1"
    moved.parent.mkdir()
    link.rename(moved)
    link.symlink_to(moved)
    (run / "latest").unlink()
    (run / "latest").symlink_to(note)
    (run / "00000002-step-2").symlink_to(tmp_path / "not-mounted")
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(run, keep=1)
        state = {"x": None}
        with pytest.warns(UserWarning, match="00000002-step-2 is passed over"):
            assert checkpoints.restore(state) == 1
        for step in (3, 4, 5):
            checkpoints.save(step, state, async_=False)
        assert (run / "latest").read_text() == "00000005-step-5\n"
        assert not link.is_symlink()
        assert fabric.load(moved)["x"].tolist() == [1.0, 1.0, 1.0]
    assert note.read_text() == "mine"
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(note)
    with single(FORMATS[form]) as fabric, pytest.raises(CheckpointError, match=r"\.lock"):
        fabric.checkpoints(run, keep=1)
    assert note.read_text() == "mine"


def test_a_save_into_a_folder_of_links_to_a_cache_leaves_the_cache_as_it_is(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = tmp_path / "folder"
    ShardedCheckpoint().save({"x": torch.ones(3)}, cache)
    folder.mkdir()
    for path in cache.iterdir():
        (folder / path.name).symlink_to(path)
    assert ShardedCheckpoint().load(folder)["x"].tolist() == [1.0, 1.0, 1.0]
    ShardedCheckpoint().save({"x": torch.zeros(3)}, folder)
    assert ShardedCheckpoint().load(folder)["x"].tolist() == [0.0, 0.0, 0.0]
    assert ShardedCheckpoint().load(cache)["x"].tolist() == [1.0, 1.0, 1.0]


class Notes:
    """A format of the user, whose saves end in ``wait``."""

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


def test_checkpoints_in_a_format_of_the_user_are_kept(tmp_path: Path) -> None:
    with single(Notes()) as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1)
        for step in (1, 2, 3):
            checkpoints.save(step, {"step": step})
        assert checkpoints.restore({"step": 0}) == 3
        assert steps(tmp_path) == [2, 3]


def test_in_memory_a_second_job_takes_over_and_saves_of_the_first_one_fail() -> None:
    with single() as fabric, single() as second_fabric:
        checkpoints = fabric.checkpoints("memory://rotation/a", keep=2, best=BEST)
        for step in range(5):
            checkpoints.save(step, {"step": step}, {"val_loss": step})
        assert str(checkpoints.best) == "memory://rotation/a/00000001-step-0"
        state = {"step": 0}
        fabric.load(checkpoints.latest, state)
        assert state == {"step": 4}
        files = fsspec.filesystem("memory")
        files.pipe_file("/rotation/a/.lock", b"process 7 elsewhere")
        text = outcome(lambda: checkpoints.save(7, {"step": 7}, async_=False))
        assert "another job has begun to save into the folder: process 7 elsewhere" in text
        checkpoints = second_fabric.checkpoints("memory://rotation/a", keep=1)
        checkpoints.save(7, state)
        checkpoints.save(8, state)
        assert checkpoints.restore({"step": 0}) == 8
        names = [Path(name).name for name in files.find("/rotation/a")]
        names_without_metrics = [name for name in names if not name.endswith(".json")]
        checkpoint_names = ["00000006-step-7", "00000007-step-8"]
        assert names_without_metrics == [".lock", *checkpoint_names, "latest"]


def test_a_full_disk_leaves_what_there_was_and_a_later_save_goes_on(tmp_path: Path) -> None:
    metrics = {"loss": 1}
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, keep=1)
        checkpoints.save(1, {"x": torch.zeros(100_000)}, metrics, async_=False)
        new_state = {"x": torch.ones(100_000)}
        with limited(20_000):
            pending = checkpoints.save(2, new_state, metrics)
            assert "untouched" in outcome(lambda: checkpoints.latest)
            assert pending.exception() is not None
            assert step_of(checkpoints.latest) == 1
            text = outcome(lambda: checkpoints.save(3, new_state, metrics, async_=False))
            assert "untouched" in text
        assert checkpoints.restore({"x": None}) == 1
        assert steps(tmp_path) == [1]
        checkpoints.save(4, {"x": 1})
    assert steps(tmp_path) == [1, 4]
    assert len(os.listdir(tmp_path)) == 5, "with the lock, the latest, and metrics"


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
    strategy = SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io)
    with Fabric(strategy=strategy, environment="none") as fabric:
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
        checkpoints.save(3, {"x": torch.ones(500_000)}, {"loss": -2.0})
    names = [name for name in os.listdir(disk) if name[0].isdigit() and not name.endswith("json")]
    assert sorted(name.partition("-")[2] for name in names) == ["step-2", "step-3"], names
    subprocess.run(["umount", disk], check=True)
"""


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(in_own_mounts("true"), check=False, capture_output=True).returncode > 0,
    reason="a mount of one's own needs Linux's user namespaces",
)
def test_a_small_disk_that_is_full_loses_no_checkpoint(tmp_path: Path) -> None:
    command = in_own_mounts(sys.executable, "-c", FULL_DISK, str(tmp_path))
    completed = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert completed.returncode == 0, completed.stderr


# -- on two ranks ---------------------------------------------------------------------------------


def filled(fabric: Fabric, value: float) -> nn.Module:
    model = nn.Linear(64, 64, bias=False)
    nn.init.constant_(model.weight, value)
    return fabric.setup(model)


def save_four_and_damage_two(fabric: Fabric, folder: Path) -> None:
    checkpoints = fabric.checkpoints(folder, keep=3, best=BEST)
    for step in range(1, 5):
        state = {"model": filled(fabric, step), "step": step}
        is_last = step == 4
        pending = checkpoints.save(step, state, {"val_loss": -step}, async_=not is_last)
    assert pending is None
    assert step_of(checkpoints.latest) == 4
    assert step_of(checkpoints.best) == 4
    fabric.barrier()
    if fabric.is_global_zero:
        damage(folder / "00000004-step-4")
        # Metrics as of a save that was not committed.
        (folder / "00000003-step-3.json").write_text('{"val_loss": NaN}')
    fabric.barrier()


def restore_and_record_warnings(checkpoints: Any, state: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoints.restore(state) == 3
    return [str(warning.message) for warning in caught]


def assert_misfit_changes_nothing(fabric: Fabric, checkpoints: Any) -> None:
    state = {"model": fabric.setup(nn.Linear(64, 64)), "step": -1}
    before = [value.clone() for value in state["model"].state_dict().values()]
    text = outcome(lambda: checkpoints.restore(state))
    assert text.startswith("CheckpointError: load a checkpoint into")
    assert state["step"] == -1
    assert all(map(torch.equal, before, state["model"].state_dict().values()))


def pass_over_damaged(fabric: Fabric, folder: Path) -> list[str]:
    """Restore and save after the newest checkpoint was damaged; return the warnings."""
    save_four_and_damage_two(fabric, folder)
    checkpoints = fabric.checkpoints(folder, keep=2, best=BEST)
    state = {"model": filled(fabric, 0), "step": 0}
    messages = restore_and_record_warnings(checkpoints, state)
    for parameter in state["model"].parameters():
        assert (local_tensor(parameter) == 3).all()
    assert step_of(checkpoints.latest) == 3
    assert step_of(checkpoints.best) == 2
    assert (folder / "latest").read_text() == "00000003-step-3\n"
    assert_misfit_changes_nothing(fabric, checkpoints)
    checkpoints.save(5, state, async_=False)
    fabric.barrier()
    # The best checkpoint, the one that was restored, the one that was passed over, and the new one.
    assert steps(folder) == [2, 3, 4, 5]
    fabric.barrier()
    if fabric.is_global_zero:
        for step in (2, 3, 5):
            damage(next(folder.glob(f"*-step-{step}")))
    fabric.barrier()
    text = outcome(lambda: checkpoints.restore(state))
    assert text.count("is passed over") == 4
    return messages


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_damaged_checkpoint_is_passed_over_by_all_ranks(strategy: str, tmp_path: Path) -> None:
    first, second = run_in_ranks(pass_over_damaged, tmp_path, strategy=strategy)
    assert len(first) == 1
    assert "00000004-step-4 is passed over" in first[0]
    assert "checksum" in first[0]
    assert second == []


def restore_while_reads_fail(
    fabric: Fabric, folder: Path, failures: int, error: Exception
) -> dict[str, Any]:
    """Restore while some reads of rank 1 fail. Return what was restored, or the error."""
    checkpoints = fabric.checkpoints(folder)
    model = filled(fabric, 3)
    for step in (1, 2):
        checkpoints.save(step, {"model": model}, async_=False)
    real_read = (
        ShardedReader._map_file if fabric.strategy.name == "fsdp" else file._verify_checksums
    )
    remaining = failures if fabric.global_rank == 1 else 0

    def read(*args: Any) -> Any:
        nonlocal remaining
        if remaining > 0:
            remaining -= 1
            raise error
        return real_read(*args)

    restored_model = filled(fabric, 0)
    with (
        patch.object(ShardedReader, "_map_file", read),
        patch.object(file, "_verify_checksums", read),
        patch.object(save_load, "_PAUSES_BETWEEN_ATTEMPTS", (0.0, 0.0)),
    ):
        text = outcome(lambda: checkpoints.restore({"model": restored_model}))
    values = [local_tensor(parameter) for parameter in restored_model.parameters()]
    has_values = all(bool((value == 3).all()) for value in values)
    return {"text": text, "has values": has_values, "steps": steps(folder)}


READ_ERRORS = [
    OSError(errno.EIO, "Input/output error"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EMFILE, "Too many open files"),
    TimeoutError("the store does not answer"),
    RuntimeError("unable to mmap 4096 bytes from file: Cannot allocate memory (12)"),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
]


NAMES_OF_READ_ERRORS = ["disk", "rights", "files", "store", "map", "memory", "device"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("error", READ_ERRORS, ids=NAMES_OF_READ_ERRORS)
def test_a_read_that_the_system_fails_is_tried_again_on_all_ranks(
    strategy: str, error: Exception, tmp_path: Path
) -> None:
    arguments = (restore_while_reads_fail, tmp_path, 2, error)
    for report in run_in_ranks(*arguments, strategy=strategy):
        assert report == {"text": "fine", "has values": True, "steps": [1, 2]}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_reads_that_fail_three_times_raise_on_all_ranks_and_cost_nothing(
    strategy: str, tmp_path: Path
) -> None:
    arguments = (restore_while_reads_fail, tmp_path, 3, READ_ERRORS[0])
    for report in run_in_ranks(*arguments, strategy=strategy):
        assert report["text"].startswith("UnreadableCheckpointError: ")
        assert "the system has failed to read it: OSError: [Errno 5]" in report["text"]
        assert not report["has values"]
        assert report["steps"] == [1, 2]


def like_python_3_14(method: Callable[[Path], bool]) -> Callable[[Path], bool]:
    """Return a method of a Path that returns False for any error of the system."""

    def look(path: Path) -> bool:
        try:
            return method(path)
        except OSError:
            return False

    return look


@contextmanager
def failing_disk(names: str) -> Iterator[list[Path]]:
    """Make it an error to look at files with matching names. Yield the list of these tries."""
    tries: list[Path] = []
    stat = Path.stat

    def fail(path: Path, **options: Any) -> os.stat_result:
        if re.fullmatch(names, path.name):
            tries.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    with (
        patch.object(Path, "stat", fail),
        patch.object(Path, "is_file", like_python_3_14(Path.is_file)),
        patch.object(Path, "is_dir", like_python_3_14(Path.is_dir)),
        patch.object(Path, "exists", like_python_3_14(Path.exists)),
        patch.object(save_load, "_PAUSES_BETWEEN_ATTEMPTS", (0.0, 0.0)),
    ):
        yield tries


@pytest.mark.parametrize("form", FORMATS)
def test_a_disk_that_fails_to_look_at_files_loses_no_checkpoint(form: str, tmp_path: Path) -> None:
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(tmp_path, best=BEST)
        for step in (1, 2):
            checkpoints.save(step, {"x": torch.ones(3)}, {"val_loss": step}, async_=False)
        files = sorted(tmp_path.rglob("*"))
        for names in (r"\d+-step-\d", "index.json", r"rank-.*\.safetensors"):
            with failing_disk(names) as tries:
                text = outcome(lambda: checkpoints.restore({"x": None}))
            if tries:
                assert text.startswith("UnreadableCheckpointError: ")
                assert len(tries) == 3
    for names in (r"\d+-step-\d", "index.json", r"rank-.*\.safetensors", r".*-1\.json"):
        with failing_disk(names) as tries, single(FORMATS[form]) as fabric:
            text = outcome(lambda: fabric.checkpoints(tmp_path, best=BEST))
        assert bool(tries) == ("Errno 5" in text)
        assert sorted(tmp_path.rglob("*")) == files
    assert len(tries) == 3, "the metrics"


@contextmanager
def one_free_descriptor() -> Iterator[None]:
    """Let this process have one more open file at a time within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
    descriptors = []
    try:
        with suppress(OSError):
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
        os.close(descriptors.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def little_memory() -> Iterator[None]:
    """Let this process have 10 MiB more of memory within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages, *_ = Path("/proc/self/statm").read_text().split()
    size = int(pages) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 10 * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


LACKS = {"descriptors": one_free_descriptor, "memory": little_memory}


def restore_in_want(lack: str, form: str, folder: Path) -> str:
    """Restore a tensor of 40 MB while this process lacks something, and return what happens."""
    with single(FORMATS[form]) as fabric:
        checkpoints = fabric.checkpoints(folder)
        for step in (1, 2):
            checkpoints.save(step, {"table": torch.zeros(10_000_000)}, async_=False)
        with LACKS[lack](), patch.object(save_load, "_PAUSES_BETWEEN_ATTEMPTS", (0.0, 0.0)):
            text = outcome(lambda: checkpoints.restore({"table": None}))
        # Nothing was passed over.
        assert checkpoints.restore({"table": None}) == 2
    return text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("lack", "form", "problem"),
    [
        ("descriptors", "file", "RuntimeError: unable to open file"),
        ("memory", "file", "RuntimeError: unable to mmap"),
        ("memory", "shards", "can't allocate memory"),
    ],
)
def test_a_process_without_files_or_memory_to_read_with_finds_no_damage(
    lack: str, form: str, problem: str, tmp_path: Path
) -> None:
    text = in_another_process(restore_in_want, lack, form, tmp_path)
    assert text.startswith("UnreadableCheckpointError: ")
    assert problem in text


def test_a_warning_that_filters_make_an_error_is_no_damage(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path)
        for step in (1, 2):
            checkpoints.save(step, {"table": torch.eye(2)})
        with (
            patch.object(torch, "load", side_effect=UserWarning("invariants")),
            pytest.raises(UserWarning, match="invariants"),
        ):
            checkpoints.restore({"table": None})
        # Nothing was passed over.
        assert checkpoints.restore({"table": None}) == 2


def open_with_mistakes(fabric: Fabric, folder: Path) -> dict[str, str]:
    file = folder / "file"
    file.write_text("a file")

    def open_folder(path: Path, **options: Any) -> str:
        return outcome(lambda: fabric.checkpoints(path, **options))

    return {
        "keep": open_folder(folder / "new", keep=0),
        "none": open_folder(folder / "new", keep=None),
        "best": open_folder(folder / "new", best="loss"),
        "mode": open_folder(folder / "new", best=("loss", "least")),
        "folder": open_folder(file / "run"),
        "file": open_folder(file),
        "held": open_folder(folder / "held"),
    }


def test_a_folder_with_a_mistake_is_refused_on_every_rank(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.checkpoints(tmp_path / "held")
        first, second = run_in_ranks(open_with_mistakes, tmp_path)
    expected = {
        "keep": "keep=0 is not valid",
        "none": "keep=None is not valid",
        "best": "best='loss' is not valid",
        "mode": "'least'",
        "folder": f"{str(tmp_path / 'file')!r} is a file",
        "file": f"{str(tmp_path / 'file')!r} is a file",
        "held": f"process {os.getpid()} on ",
    }
    for name, problem in expected.items():
        assert problem in first[name], name
        assert "Error: " in second[name], name
    assert not (tmp_path / "new").exists()


def save_once(fabric: Fabric, folder: Path) -> None:
    fabric.checkpoints(folder).save(1, {"step": 1})


def test_a_job_that_ended_leaves_its_folder_to_the_next_job(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.checkpoints(tmp_path)
    run_in_ranks(save_once, tmp_path)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_of_two_objects_for_one_folder_the_later_one_saves(scheme: str, tmp_path: Path) -> None:
    folder = f"{scheme}{tmp_path}/run"
    with single() as fabric:
        first = fabric.checkpoints(folder)
        first.save(1, {"step": 1}, async_=False)
        second = fabric.checkpoints(folder)
        second.save(2, {"step": 2}, async_=False)

        text = outcome(lambda: first.save(3, {"step": 3}, async_=False))
        assert "a later call of fabric.checkpoints in this process saves into the folder" in text
        assert "{'first': first, 'second': second}" in text

        # The remedy of the error.
        second.save(4, {"first": 1, "second": 2}, async_=False)
        state = {"first": 0, "second": 0}
        assert second.restore(state) == 4
        assert state == {"first": 1, "second": 2}


def take_over(folder: Path) -> None:
    with single() as fabric:
        fabric.checkpoints(folder).save(9, {"step": 9}, async_=False)


def test_a_job_that_reads_its_own_folder_notices_another_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with single() as fabric:
        checkpoints = fabric.checkpoints(folder)
        checkpoints.save(1, {"step": 1}, async_=False)
        # POSIX drops the lock when the copy of the lock file is closed.
        shutil.copytree(folder, tmp_path / "copy")
        checkpoints.save(2, {"step": 2}, async_=False)
        in_another_process(take_over, folder)
        text = outcome(lambda: checkpoints.save(3, {"step": 3}, async_=False))
    assert "another job has begun to save into the folder: process" in text
    assert steps(folder) == [1, 2, 9]


def test_metrics_without_a_value_are_a_warning_and_null(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, best=("accuracy", "max"))
        for step, accuracy in enumerate([0.5, math.nan, math.inf]):
            metrics = {"accuracy": accuracy, "loss": 1.0}
            if math.isfinite(accuracy):
                checkpoints.save(step, {"step": step}, metrics)
                continue
            with pytest.warns(UserWarning, match=f"accuracy is {accuracy}, so .* never the best"):
                checkpoints.save(step, {"step": step}, metrics)
        assert step_of(checkpoints.best) == 0
    [nan_file] = tmp_path.glob("*-step-1.json")
    assert json.loads(nan_file.read_text()) == {"accuracy": None, "loss": 1.0}
    assert "NaN" not in nan_file.read_text()

    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, best=("accuracy", "max"))
        assert step_of(checkpoints.best) == 0
        assert step_of(checkpoints.latest) == 2


@pytest.mark.parametrize("content", [b'{"val_', b"\xff", b"[1]", b'{"val_loss": "low"}'])
def test_damaged_metrics_cost_the_metrics_alone(content: bytes, tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path, best=BEST)
        for step in (1, 2):
            checkpoints.save(step, {"step": step}, {"val_loss": step})
    [metrics_file] = tmp_path.glob("*-step-1.json")
    metrics_file.write_bytes(content)

    with single() as fabric:
        with pytest.warns(UserWarning, match="step-1.json' are damaged, so .* is kept without"):
            checkpoints = fabric.checkpoints(tmp_path, best=BEST)
        assert step_of(checkpoints.best) == 2
        assert steps(tmp_path) == [1, 2]
        assert checkpoints.restore({"step": 0}) == 2


def save_with_mistakes(fabric: Fabric, folder: Path) -> dict[str, str]:
    rank = fabric.global_rank
    checkpoints = fabric.checkpoints(folder, best=BEST)
    nan_on_rank_1 = math.nan if rank == 1 else 1.0
    metrics_on_rank_0 = {"val_loss": 1.0} if rank == 0 else None

    def save(step: Any, metrics: Any, **state: Any) -> str:
        return outcome(lambda: checkpoints.save(step, state, metrics))

    texts = {
        "missing": save(1, {"loss": 1.0}),
        "nan": save(1, {"val_loss": nan_on_rank_1}),
        "text": save(1, {"val_loss": "low"}),
        "not reduced": save(1, {"val_loss": 1.0 + rank}),
        "first only": save(1, metrics_on_rank_0),
        "steps": save(1 + rank, None),
        "negative": save(-1, None),
        "fraction": save(1.5, None),
        "text for a step": save("7", None),
        "content": save(1, None, x=object()),
    }
    assert save(1, None) == "fine"
    assert outcome(lambda: fabric.checkpoints(folder)) == "fine"
    return texts


def test_a_save_with_a_mistake_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_in_ranks(save_with_mistakes, tmp_path / "run")
    expected = {
        "missing": "'val_loss'",
        "text": "ArgumentTypeError",
        "negative": "at least 0",
        "fraction": "ArgumentTypeError: checkpoints.save(1.5",
        "text for a step": "an integer of at least 0",
        "content": "ArgumentTypeError",
    }
    for name, problem in expected.items():
        assert problem in first[name], name
        assert "Error: " in second[name], name
    for name in ("not reduced", "first only", "steps"):
        assert second[name].startswith("ConfigurationError: checkpoints.save("), name
        assert "the same on all ranks" in second[name], name
        assert "failed on rank 1" in first[name], name
    assert "nan" in second["nan"]
    assert "failed on rank 1" in first["nan"]
    assert steps(tmp_path / "run") == [1]


def test_after_teardown_there_is_no_saving(tmp_path: Path) -> None:
    with single() as fabric:
        checkpoints = fabric.checkpoints(tmp_path)
        checkpoints.save(1, {"step": 1})
    assert step_of(checkpoints.latest) == 1
    with pytest.raises(UsageError, match="teardown"):
        checkpoints.save(2, {"step": 2})


def keep_at_url(fabric: Fabric, url: str) -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)
    checkpoints = fabric.checkpoints(url, keep=1, best=BEST)
    for step in range(4):
        state = {"model": filled(fabric, step), "step": step}
        checkpoints.save(step, state, {"val_loss": step})
    checkpoints = fabric.checkpoints(url, keep=1, best=BEST)
    assert checkpoints.restore({"model": filled(fabric, 9), "step": 9}) == 3
    assert step_of(checkpoints.best) == 0
    for step in (6, 7):
        checkpoints.save(step, {"step": step}, async_=False)
    state = {"step": 9, "model": filled(fabric, 9)}
    fabric.load(checkpoints.best, state)
    assert state["step"] == 0


@pytest.mark.parametrize("scheme", ["objects", "file"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_paths_with_a_scheme_keep_the_same_checkpoints(
    strategy: str, scheme: str, tmp_path: Path
) -> None:
    run_in_ranks(keep_at_url, f"{scheme}://{tmp_path}/run", strategy=strategy)
    # An object store has no empty folders: only the folders that hold files count.
    names = set()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            names.add(path.relative_to(tmp_path / "run").parts[0])
    checkpoints = {"00000001-step-0", "00000005-step-6", "00000006-step-7"}
    files = {".lock", "latest", "best"}
    assert names - {"00000001-step-0.json"} - files == checkpoints
