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
# The loss and the samples of each step.
Steps = list[tuple[float, list[int]]]
SCRIPTS = Path(sysconfig.get_path("scripts"))
TORCHRUN = [SCRIPTS / "torchrun", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]

KILLED_EARLY = """
import os, signal, time
from fabric import Fabric
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while not os.path.exists("rank 0 is waiting"):
        time.sleep(0.01)
    # Rank 0 probably waits in the store by now. Where it does not, the restart is an easier one.
    time.sleep(0.5)
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
    process = subprocess.run(
        [*TORCHRUN, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    # The lines of two ranks may mix.
    assert sorted("".join(process.stdout.split())) == sorted("sum2" * 4)


def samples_of_an_epoch(fabric: Fabric, path: Path) -> list[int]:
    """Return the samples of the first epoch and save, or load and return those of the next one."""
    torch.manual_seed(0)
    module = nn.Linear(1, 1)
    model = fabric.setup(module)
    loader = fabric.setup_dataloaders(DataLoader(range(24), 12 // fabric.world_size, shuffle=True))
    is_new = not path.exists()
    if not is_new:
        fabric.load(path, {"model": model, "loader": loader})
    samples = []
    for batch in loader:
        samples += fabric.gather_for_metrics(batch).tolist()
    if is_new:
        fabric.save(path, {"model": model, "loader": loader})
    return samples


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_order_of_the_next_epoch_is_drawn_on_another_number_of_ranks_too(
    strategy: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    nn.Linear(1, 1)
    loader = DataLoader(range(24), 12, shuffle=True)
    first_epoch = torch.cat(list(loader)).tolist()
    second_epoch = torch.cat(list(loader)).tolist()
    for ranks, expected in [(2, first_epoch), (1, second_epoch), (3, second_epoch)]:
        path = tmp_path / "state"
        samples, *_ = run_in_ranks(samples_of_an_epoch, path, ranks=ranks, strategy=strategy)
        assert samples == expected


# -- a run that is killed and comes back ----------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "examples" / "long_run.py"
ELASTIC = [
    "--nnodes=1:3",
    "--nproc-per-node=1",
    "--max-restarts=5",
    "--local-addr=127.0.0.1",
    "--rdzv-backend=c10d",
    "--rdzv-id=1",
    "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
]


@pytest.fixture(scope="module")
def uninterrupted() -> Steps:
    """Return the steps of the plain loop."""
    torch.manual_seed(0)
    inputs = torch.randn(120, 4)
    targets = inputs.sin().sum(1, keepdim=True)
    numbers = torch.arange(len(inputs))
    loader = DataLoader(TensorDataset(inputs, targets, numbers), 12, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    steps: Steps = []
    while len(steps) < STEPS:
        for batch, batch_targets, samples in loader:
            loss = mse_loss(model(batch), batch_targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            steps.append((loss.item(), samples.tolist()))
    return steps[:STEPS]


class Run:
    """The example in a folder, under one command after another.

    ``close`` kills the processes that still live.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.jsonl"
        self.commands: list[subprocess.Popen[str]] = []

    def start(self, *command: object, pause: float = 0.0) -> subprocess.Popen[str]:
        script = [
            EXAMPLE,
            "--accelerator=cpu",
            "--folder=checkpoints",
            f"--record={self.log}",
            f"--steps={STEPS}",
            f"--pause={pause}",
        ]
        variables = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.folder / f"errors-{len(self.commands)}", "w") as errors:
            process = subprocess.Popen(
                [str(word) for word in [*command, *script]],
                cwd=self.folder,
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )
        self.commands.append(process)
        return process

    def fabric_run(self, processes: int, *options: str) -> subprocess.Popen[str]:
        python = [sys.executable, "-m", "fabric", "run"]
        return self.start(*python, "--accelerator=cpu", f"--devices={processes}", *options)

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps that are logged so far, without a line that is still being written."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def has_reached(self, step: int, processes: int) -> bool:
        for logged in self.steps():
            if logged["step"] >= step and logged["processes"] == processes:
                return True
        return False

    def wait_for(self, step: int, processes: int) -> None:
        """Wait until a job of this size logs this step or a later one."""
        deadline = time.monotonic() + DEADLINE
        while not self.has_reached(step, processes):
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
        texts = [path.read_text() for path in sorted(self.folder.glob("errors-*"))]
        return "\n".join(text[-2000:] for text in texts)

    def close(self) -> None:
        for command in self.commands:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(command.pid).children(recursive=True):
                    process.kill()
            command.kill()
            command.wait()

    def check(self, expected: Steps) -> None:
        """Compare each step with the plain loop, also those that were repeated after a restart."""
        numbers = set()
        for logged in self.steps():
            number = logged["step"]
            numbers.add(number)
            loss, samples = expected[number - 1]
            assert logged["samples"] == samples
            assert logged["loss"] == pytest.approx(loss, rel=1e-4)
        assert numbers == set(range(1, len(expected) + 1))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_that_are_restarted_go_on_from_the_newest_checkpoint(
    run: Run, processes: int, uninterrupted: Steps
) -> None:
    command = run.fabric_run(processes, "--max-restarts=1")
    last_step = random.Random(1).randrange(20, 50)
    run.wait_for(last_step, processes)
    run.kill_rank(command, processes - 1)
    assert command.wait(DEADLINE) == 0, run.errors()
    run.check(uninterrupted)
    assert "was killed by SIGKILL" in run.errors()


def seeds(slow: int, soak: int) -> list[Any]:
    """Return ``soak`` seeds, of which the first ``slow`` are in the slow tests as well."""
    parameters = []
    for seed in range(soak):
        marks = [pytest.mark.slow]
        if seed >= slow:
            marks.append(pytest.mark.soak)
        parameters.append(pytest.param(seed, marks=marks))
    return parameters


@pytest.mark.parametrize("seed", seeds(slow=3, soak=50))
def test_a_run_that_was_killed_goes_on_with_fewer_or_more_processes(
    run: Run, seed: int, uninterrupted: Steps
) -> None:
    generator = random.Random(seed)
    command = run.fabric_run(2)
    run.wait_for(generator.randrange(2, 60), processes=2)
    run.kill_rank(command, generator.randrange(2))
    assert command.wait(DEADLINE) == 137, run.errors()
    processes = 1
    if seed % 2 == 1:
        processes = 3
    next_command = run.fabric_run(processes)
    assert next_command.wait(DEADLINE) == 0, run.errors()
    run.check(uninterrupted)


@pytest.mark.parametrize("seed", seeds(slow=1, soak=10))
def test_torchrun_goes_on_with_a_machine_more_and_with_fewer(
    run: Run, seed: int, uninterrupted: Steps
) -> None:
    generator = random.Random(seed)
    # The port is free now, and another process would have to be quick to take it.
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    elastic = [SCRIPTS / "torchrun", *ELASTIC, f"--rdzv-endpoint=127.0.0.1:{port}"]
    first = run.start(*elastic, pause=0.05)
    # The first machine serves the rendezvous, and has to live on.
    run.wait_for_port(port)
    second = run.start(*elastic, pause=0.05)
    run.wait_for(generator.randrange(2, 20), processes=2)
    run.kill_rank(second, 0)
    third = run.start(*elastic, pause=0.05)
    run.wait_for(generator.randrange(20, 60), processes=3)
    for machine in (second, third):
        for process in psutil.Process(machine.pid).children():
            process.kill()
        machine.kill()
    assert first.wait(DEADLINE) == 0, run.errors()
    assert run.steps()[-1]["processes"] == 1
    run.check(uninterrupted)
