"""Ranks that are started again, in real processes."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from tests.ranks import run_in_ranks

DEADLINE = 120
SCRIPTS = Path(sysconfig.get_path("scripts"))
TORCHRUN = [SCRIPTS / "torchrun", "--standalone", "--max-restarts", "1", "--nproc-per-node"]

KILLED_EARLY = """
import os, signal, time
from fabric import Fabric
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while not os.path.exists("rank 0 is waiting"):
        time.sleep(0.01)
    time.sleep(0.5)  # it waits in the store by now; elsewhere the restart is an easier one
    os.kill(os.getpid(), signal.SIGKILL)
open("rank 0 is waiting", "w").close()
for _ in range(2):
    with Fabric(accelerator="cpu", strategy="ddp", timeout=60) as fabric:
        print("sum", int(fabric.all_reduce(1, reduce_op="sum")), flush=True)
"""


@pytest.mark.slow
def test_what_a_rank_that_died_early_left_in_the_store_of_torchrun_stops_no_restart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED_EARLY)
    done = subprocess.run(
        [*TORCHRUN, "2", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "".join(sorted(done.stdout.replace("sum", ""))).split() == ["2222"]


def an_epoch(fabric: Fabric, path: Path) -> list[int]:
    torch.manual_seed(0)
    model = fabric.setup(nn.Linear(1, 1))
    loader = fabric.setup_dataloaders(DataLoader(range(24), 12 // fabric.world_size, shuffle=True))
    is_new = not path.exists()
    if not is_new:
        fabric.load(path, {"model": model, "loader": loader})
    seen = [sample for batch in loader for sample in fabric.gather_for_metrics(batch).tolist()]
    if is_new:
        fabric.save(path, {"model": model, "loader": loader})
    return seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_order_of_the_next_epoch_is_drawn_on_another_number_of_ranks_too(strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    nn.Linear(1, 1)
    plain = DataLoader(range(24), 12, shuffle=True)
    orders = [[sample for batch in plain for sample in batch.tolist()] for _ in range(2)]
    found = [run_in_ranks(an_epoch, tmp_path / "state", ranks=ranks, strategy=strategy)[0] for ranks in (2, 1, 3)]
    assert found == [orders[0], orders[1], orders[1]]
