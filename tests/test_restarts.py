"""Ranks that are started again, in real processes."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from tests.ranks import run_in_ranks

DEADLINE = 150
STEPS = 90
Steps = list[tuple[float, list[int]]]  # loss and samples of each
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
def test_what_a_rank_that_died_early_left_in_the_store_of_torchrun_stops_no_restart(
    tmp_path: Path,
) -> None:
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
def test_the_order_of_the_next_epoch_is_drawn_on_another_number_of_ranks_too(
    strategy: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    nn.Linear(1, 1)
    plain = DataLoader(range(24), 12, shuffle=True)
    orders = [[sample for batch in plain for sample in batch.tolist()] for _ in range(2)]
    actual = [
        run_in_ranks(an_epoch, tmp_path / "state", ranks=ranks, strategy=strategy)[0]
        for ranks in (2, 1, 3)
    ]
    assert actual == [orders[0], orders[1], orders[1]]


# -- a run that is killed and comes back ----------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "examples" / "long_run.py"
CONFIGURATION = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
ELASTIC = [
    *(
        "--nnodes",
        "1:3",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "5",
        "--local-addr",
        "127.0.0.1",
    ),
    *("--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-conf", CONFIGURATION),
]


@pytest.fixture(scope="module")
def uninterrupted() -> Steps:
    """Loss and samples of each step of the plain loop."""
    torch.manual_seed(0)
    inputs = torch.randn(120, 4)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(len(inputs)))
    loader = DataLoader(data, 12, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    steps: Steps = []
    while len(steps) < STEPS:
        for batch, targets, numbers in loader:
            loss = mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            steps.append((loss.item(), numbers.tolist()))
    return steps[:STEPS]


class Run:
    """The example in a folder, under one command after another; what lives in the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.jsonl"
        self.commands: list[subprocess.Popen[str]] = []

    def start(self, *command: object, pause: float = 0.0) -> subprocess.Popen[str]:
        options = {
            "accelerator": "cpu",
            "folder": "checkpoints",
            "record": self.log,
            "steps": STEPS,
            "pause": pause,
        }
        script = [EXAMPLE, *(f"--{name}={value}" for name, value in options.items())]
        environment = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with open(self.folder / f"errors-{len(self.commands)}", "w") as errors:
            process = subprocess.Popen(
                [str(word) for word in [*command, *script]],
                cwd=self.folder, env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment},
                stdout=subprocess.DEVNULL, stderr=errors, text=True,
            )  # fmt: skip
        self.commands.append(process)
        return self.commands[-1]

    def fabric_run(self, processes: int, *options: object) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "fabric",
            "run",
            "--accelerator",
            "cpu",
            "--devices",
            processes,
            *options,
        ]
        return self.start(*command)

    def steps(self) -> list[dict[str, Any]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, step: int, processes: int) -> None:
        """Wait until a step is logged by a job of this size."""
        deadline = time.monotonic() + DEADLINE
        while not any(
            each["step"] >= step and each["processes"] == processes for each in self.steps()
        ):
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.003)

    def wait_for_port(self, port: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while True:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                return
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)

    def kill_rank(self, command: subprocess.Popen[str], rank: int) -> None:
        psutil.Process(command.pid).children()[rank].kill()

    def errors(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("errors-*")))

    def close(self) -> None:
        for command in self.commands:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(command.pid).children(recursive=True):
                    process.kill()
            command.kill()
            command.wait()

    def check(self, expected: Steps) -> None:
        """Each step, also one that was repeated after a restart, is that of the plain loop."""
        found = self.steps()
        assert {each["step"] for each in found} == set(range(1, len(expected) + 1))
        for each in found:
            loss, samples = expected[each["step"] - 1]
            assert each["samples"] == samples
            assert each["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path)
    yield one
    one.close()


def test_ranks_that_are_restarted_go_on_from_the_newest_checkpoint(
    run: Run, uninterrupted: Steps
) -> None:
    command = run.fabric_run(2, "--max-restarts", 1)
    run.wait_for(random.Random(1).randrange(20, 50), processes=2)
    run.kill_rank(command, 1)
    assert command.wait(DEADLINE) == 0, run.errors()
    run.check(uninterrupted)
    assert "was killed by SIGKILL" in run.errors()


def tries(slow: int, soak: int) -> list:
    marks = [pytest.mark.slow, pytest.mark.soak]
    return [pytest.param(seed, marks=marks[: 1 + (seed >= slow)]) for seed in range(soak)]


@pytest.mark.parametrize("seed", tries(3, 50))
def test_a_run_that_was_killed_goes_on_with_fewer_or_more_processes(
    run: Run, seed: int, uninterrupted: Steps
) -> None:
    draw = random.Random(seed)
    command = run.fabric_run(2)
    processes = (1, 3)[seed % 2]
    run.wait_for(draw.randrange(2, 60), processes=2)
    run.kill_rank(command, draw.randrange(2))
    assert command.wait(DEADLINE) == 137, run.errors()
    again = run.fabric_run(processes)
    assert again.wait(DEADLINE) == 0, run.errors()
    run.check(uninterrupted)


@pytest.mark.parametrize("seed", tries(1, 10))
def test_torchrun_goes_on_with_a_machine_more_and_with_fewer(
    run: Run, seed: int, uninterrupted: Steps
) -> None:
    draw = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free a moment ago; a rival would have to be quick
    elastic = [SCRIPTS / "torchrun", *ELASTIC, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    first = run.start(*elastic, pause=0.05)
    run.wait_for_port(port)  # the machine that serves the rendezvous has to live on
    second = run.start(*elastic, pause=0.05)
    run.wait_for(draw.randrange(2, 20), processes=2)
    run.kill_rank(second, 0)
    third = run.start(*elastic, pause=0.05)
    run.wait_for(draw.randrange(20, 60), processes=3)
    for machine in (second, third):
        for process in (*psutil.Process(machine.pid).children(), machine):
            process.kill()
    assert first.wait(DEADLINE) == 0, run.errors()
    assert run.steps()[-1]["processes"] == 1
    run.check(uninterrupted)
