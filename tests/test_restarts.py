"""Ranks that are started again, in real processes."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

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
