"""A save that fails raises, keeps the checkpoint that was there, and leaves no other file."""

import gc
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import CheckpointError
from fabric.strategies import DDPStrategy, SingleDeviceStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

FORMATS = [FullCheckpoint(), ShardedCheckpoint()]


def single(io: Any) -> Fabric:
    return Fabric(
        strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none"
    )


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Make it an error within the block to write more than ``size`` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_beyond_the_limit(fabric: Fabric, path: Path, sizes: list[int]) -> list[str]:
    texts = []
    fabric.save(path, {"x": torch.ones(100_000), "step": 0})
    new_state = {"x": torch.zeros(100_000), "step": 1}
    for size in sizes:
        limit = size if fabric.global_rank == 0 else resource.RLIM_INFINITY
        for async_ in (False, True):
            fabric.barrier()
            gc.collect()  # a store in a file must not be closed under the limit
            with limited(limit):
                if async_:
                    pending = fabric.save(path, new_state, async_=True)
                    texts.append(outcome(pending.wait))
                else:
                    texts.append(outcome(lambda: fabric.save(path, new_state)))
            state = {"x": torch.zeros(100_000), "step": -1}
            fabric.load(path, state)
            assert state["step"] == 0
            assert state["x"].all()
    return texts


@pytest.mark.parametrize("io", FORMATS, ids=["file", "shards"])
def test_a_disk_that_is_full_raises_on_every_rank_and_leaves_the_old_checkpoint(
    io: Any, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    strategy = DDPStrategy(checkpoint_io=io, start_method="forkserver")
    first, second = run_in_ranks(
        save_beyond_the_limit, path, [20_000, 399_000], strategy=strategy, launcher="forkserver"
    )
    assert len(first) == 4
    assert len(second) == 4
    for text in first:
        assert text.startswith("CheckpointError")
        assert "what was there before is untouched" in text
    for text in second:
        assert "it failed on rank 0 of 2" in text
    assert list(tmp_path.iterdir()) == [path]
    if path.is_dir():
        kinds = {entry.name.partition("-")[0] for entry in path.iterdir()}
        assert kinds == {"index.json", "rank"}


REFUSALS = """
import gc, os, subprocess, sys
from pathlib import Path
import torch
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import CheckpointError
torch.set_num_threads(1)

disk, elsewhere = Path(sys.argv[1], "disk"), Path(sys.argv[1], "elsewhere")
def mount(*options):
    subprocess.run(["mount", *options, str(disk)], check=True)

def refused(io, path, step):
    try:
        io.save({"x": torch.full((500_000,), float(step)), "step": step}, path)
    except CheckpointError as error:
        assert "untouched" in str(error), error
        loaded = io.load(path)
        assert loaded["step"] == 0 and not loaded["x"].any()
        return
    raise SystemExit(f"{io} could write")

disk.mkdir()
elsewhere.mkdir()
for io, name in (FullCheckpoint(), "state.pt"), (ShardedCheckpoint(), "state"):
    mount("-t", "tmpfs", "-o", "size=3m", "none")
    path = elsewhere / name
    path.symlink_to(disk / name)  # so that the target lies on another file system than its name
    io.save({"x": torch.zeros(500_000), "step": 0}, path)
    refused(io, path, 1)
    mount("-o", "remount,ro")
    refused(io, path, 2)
    mount("-o", "remount,rw,size=20m")
    io.save({"x": torch.ones(500_000), "step": 3}, path)
    assert io.load(path)["step"] == 3 and path.is_symlink()
    assert os.listdir(disk) == [name] and len(os.listdir(elsewhere)) == 1
    path.unlink()
    # From Python 3.12 on, contextlib keeps an error in a cycle, with the frames and their tensors,
    # which are mapped from the file.
    gc.collect()
    subprocess.run(["umount", str(disk)], check=True)
"""


def in_own_mounts(*command: str) -> list[str]:
    """Return a command for a process whose mounts no other process sees."""
    return ["unshare", "--map-root-user", "--mount", *command]


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(in_own_mounts("true"), check=False, capture_output=True).returncode > 0,
    reason="a mount of one's own needs Linux's user namespaces",
)
def test_a_full_a_read_only_and_another_file_system_leave_the_old_checkpoint(
    tmp_path: Path,
) -> None:
    completed = subprocess.run(
        in_own_mounts(sys.executable, "-c", REFUSALS, str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize("io", FORMATS, ids=["file", "shards"])
@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_damaged_checkpoint_is_named_and_nothing_of_it_is_in_the_module(
    io: Any, change: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    with single(io) as fabric:
        net = Net()
        model = fabric.setup(net)
        fabric.save(path, {"model": model})
        damaged = path if path.is_file() else next(path.glob("rank-00000-*.safetensors"))
        content = bytearray(damaged.read_bytes())
        offset = content.index(net.head.weight.detach().numpy().tobytes())
        if change == "flip":
            content[offset] ^= 1
        else:
            del content[offset:]
        damaged.write_bytes(content)
        nn.init.zeros_(net.head.bias)
        before = [parameter.clone() for parameter in net.parameters()]
        with pytest.raises(CheckpointError, match=str(path)):
            fabric.load(path, {"model": model})
        assert all(map(torch.equal, before, net.parameters()))
