"""Ranks that are started again, in real processes."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.launchers.agent import AgentConfig, NodeAgent, _Coordinator, _NodeStatus
from fabric.launchers.script import ScriptEnd
from fabric.store import JobStore
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

    def fabric_run(
        self, processes: int, *options: str, pause: float = 0.0
    ) -> subprocess.Popen[str]:
        python = [sys.executable, "-m", "fabric", "run", "--accelerator=cpu"]
        return self.start(*python, f"--devices={processes}", *options, pause=pause)

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
        # The ranks are children of the command, or of its fork server.
        ranks = []
        for process in psutil.Process(command.pid).children(recursive=True):
            if not process.children():
                ranks.append(process)
        ranks[rank].kill()

    def wait_for_restart(self, number: int) -> None:
        """Wait until a step is repeated or made after this number of restarts."""
        deadline = time.monotonic() + DEADLINE
        while f"restart {number} of" not in self.errors():
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)
        steps = len(self.steps())
        while len(self.steps()) < steps + 10:
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.003)

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
    # With the pause, the test has a second to kill the rank before the last step.
    command = run.fabric_run(processes, "--max-restarts=1", pause=0.02)
    last_step = random.Random(1).randrange(20, 50)
    run.wait_for(last_step, processes)
    run.kill_rank(command, processes - 1)
    assert command.wait(DEADLINE) == 0, run.errors()
    run.check(uninterrupted)
    assert "was killed by SIGKILL" in run.errors()


def free_port() -> int:
    """Return a port that is free now. Another process would have to be quick to take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    return port


class Machines:
    """Commands on this machine that pose as the machines of one job of the example."""

    def __init__(
        self,
        run: Run,
        *options: str,
        pause: float = 0.0,
        devices: tuple[int, int] = (1, 1),
    ) -> None:
        self.run = run
        self.options = options
        self.pause = pause
        self.devices = devices
        self.port = free_port()
        self.commands = [self.start(0), self.start(1)]

    def start(self, node: int) -> subprocess.Popen[str]:
        return self.run.start(
            *[sys.executable, "-m", "fabric", "run", "--accelerator=cpu"],
            f"--devices={self.devices[node]}",
            *["--num-nodes=2", f"--node-rank={node}", "--main-address=127.0.0.1"],
            *[f"--main-port={self.port}", *self.options],
            pause=self.pause,
        )

    def exit_codes(self) -> list[int]:
        return [command.wait(DEADLINE) for command in self.commands]


@pytest.mark.slow
def test_a_rank_and_a_command_that_are_killed_restart_the_ranks_of_all_machines(
    run: Run, uninterrupted: Steps
) -> None:
    machines = Machines(run, "--max-restarts=2", pause=0.01)
    run.wait_for(20, processes=2)
    run.kill_rank(machines.commands[1], 0)
    run.wait_for_restart(1)
    machines.commands[1].kill()
    machines.commands[1] = machines.start(1)
    assert machines.exit_codes() == [0, 0], run.errors()
    run.check(uninterrupted)
    errors = run.errors()
    assert re.search(r"restart 1 of 2: machine 1 \(.*\): rank 1 of 2 was killed by", errors)
    assert "restart 2 of 2: machine 1" in errors
    assert "its command ended and was started again" in errors
    # Errors that follow from a lost rank are not shown.
    assert "Connection closed by peer" not in errors


class RecordingStore(JobStore):
    """A store that records the keys in the order in which they are written."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self.written_keys: list[str] = []

    def set(self, key: str, value: bytes | str) -> None:
        self.written_keys.append(key)
        super().set(key, value)


def agent_config(node_rank: int, num_nodes: int, port: int) -> AgentConfig:
    return AgentConfig(
        node_rank=node_rank,
        num_nodes=num_nodes,
        num_processes=1,
        address="127.0.0.1",
        port=port,
        node_timeout=60,
        restart_limit="0",
        allows_restart=lambda now, times: False,
    )


def test_an_agent_that_is_admitted_finds_the_state_of_the_job() -> None:
    hash_store = dist.HashStore()
    newcomer = _NodeStatus(
        agent_id="agent", host="host", process=None, num_nodes=1, num_processes=1
    )
    JobStore(hash_store, rank=0, size=1).publish("newcomer", asdict(newcomer))
    config = agent_config(node_rank=0, num_nodes=1, port=1)
    store = RecordingStore(hash_store, rank=0, size=1)
    _Coordinator(config, store).update()
    # An agent that reads its admission may read the state before the next key is written.
    assert store.written_keys.index("job/0") < store.written_keys.index("member/0")


def test_a_machine_that_does_not_join_or_stops_answering_is_named() -> None:
    config = replace(agent_config(node_rank=0, num_nodes=1, port=1), node_timeout=0)
    hash_store = dist.HashStore()
    store = JobStore(hash_store, rank=0, size=1)
    _Coordinator(config, store).update()
    assert (
        "machine 0 has not joined within 0 s (--node-timeout)"
        in store.read("job", [0])[0]["notice"]
    )
    newcomer = _NodeStatus(
        agent_id="agent", host="host", process=None, num_nodes=1, num_processes=1
    )
    store.publish("newcomer", asdict(newcomer))
    coordinator = _Coordinator(config, store)
    coordinator.update()
    coordinator.update()
    notice = store.read("job", [0])[0]["notice"]
    assert "machine 0 (host) has not answered for 0 s (--node-timeout)" in notice


def store_of_machine_1(port: int) -> JobStore:
    return JobStore(dist.TCPStore("127.0.0.1", port, is_master=False), rank=1, size=2)


def test_a_command_that_another_one_has_replaced_ends_with_an_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    with (
        NodeAgent(agent_config(0, 2, port)) as first,
        NodeAgent(agent_config(1, 2, port)) as second,
    ):
        assert first.wait_for_generation() is not None
        assert second.wait_for_generation() is not None
        store_of_machine_1(port).set("member/1", "another agent")
        assert second.wait_for_generation() is None
        assert second.should_end_ranks()
        assert second.exit_code() == 1
        assert "another command has become machine 1 of this job" in capfd.readouterr().err
        first.report(ScriptEnd(exit_code=1, is_interrupted=True))
    # To leave the job without an error changes nothing.
    assert first.exit_code() == 1


def test_machine_0_waits_until_the_others_know_how_the_job_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fabric.launchers.agent._CLOSE_TIME", 0.0)
    port = free_port()
    has_joined = threading.Event()
    knows_end = threading.Event()
    end_of_job: dict[str, Any] = {}

    def act_as_machine_1() -> None:
        store = store_of_machine_1(port)
        status = _NodeStatus(
            agent_id="agent", host="host", process=None, num_nodes=2, num_processes=1
        )
        store.publish("newcomer", asdict(status))
        while store.get_nowait("member/1") is None:
            time.sleep(0.01)
        has_joined.set()
        state = store.read("job", [0])[0]
        while state["exit_code"] is None:
            time.sleep(0.01)
            state = store.read("job", [0])[0]
        end_of_job.update(state)
        knows_end.set()
        store.publish("agent", asdict(replace(status, beat=1, has_read_end=True)))

    machine_1 = threading.Thread(target=act_as_machine_1, daemon=True)
    with (
        contextlib.suppress(KeyboardInterrupt),
        NodeAgent(agent_config(0, 2, port)),
    ):
        machine_1.start()
        assert has_joined.wait(DEADLINE)
        raise KeyboardInterrupt
    assert knows_end.is_set()
    assert end_of_job["exit_code"] == 128 + signal.SIGINT
    assert "machine 0" in end_of_job["notice"]
    assert "was stopped by a signal" in end_of_job["notice"]
    machine_1.join(DEADLINE)


def test_an_agent_that_waits_for_machine_0_ends_its_thread_when_the_command_is_stopped() -> None:
    with (
        contextlib.suppress(KeyboardInterrupt),
        NodeAgent(agent_config(node_rank=1, num_nodes=2, port=free_port())),
    ):
        assert "fabric-agent" in [thread.name for thread in threading.enumerate()]
        raise KeyboardInterrupt
    assert "fabric-agent" not in [thread.name for thread in threading.enumerate()]


ENDS = {
    # The command of a machine that is killed or signaled, the signal, and how the other one ends.
    "a lost machine": (1, signal.SIGKILL, 1, "the job ends: machine 1", "10 s (--node-timeout)"),
    "machine 0": (0, signal.SIGKILL, 1, "has ended, and with it the job", ""),
    "Ctrl-C": (1, signal.SIGINT, 130, "was stopped by a signal", ""),
    "preemption": (1, signal.SIGTERM, 75, "", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_a_machine_that_ends_for_good_ends_the_others(run: Run, case: str) -> None:
    node, number, code, *texts = ENDS[case]
    machines = Machines(run, "--max-restarts=3", "--node-timeout=10", pause=0.05)
    run.wait_for(3, processes=2)
    machines.commands[node].send_signal(number)
    codes = machines.exit_codes()
    assert codes[1 - node] == code, run.errors()
    if number != signal.SIGKILL:
        assert codes[node] == code
    for text in texts:
        assert text in run.errors()
    assert len(run.steps()) < STEPS


@pytest.mark.slow
def test_machines_that_start_different_numbers_of_processes_are_refused(run: Run) -> None:
    machines = Machines(run, "--node-timeout=10", devices=(1, 2))
    assert machines.exit_codes() == [1, 1]
    assert "this machine starts 2 processes, machine 0 1" in run.errors()
    assert "machine 1 has not joined within 10 s" in run.errors()


def seeds(slow: int, soak: int) -> list[Any]:
    """Return ``soak`` seeds, of which the first ``slow`` are in the slow tests as well."""
    parameters = []
    for seed in range(soak):
        marks = [pytest.mark.slow]
        if seed >= slow:
            marks.append(pytest.mark.soak)
        parameters.append(pytest.param(seed, marks=marks))
    return parameters


@pytest.mark.parametrize("seed", seeds(slow=1, soak=50))
def test_a_run_that_was_killed_goes_on_with_fewer_or_more_processes(
    run: Run, seed: int, uninterrupted: Steps
) -> None:
    generator = random.Random(seed)
    command = run.fabric_run(2, pause=0.05)
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


# -- what a script sees in a rank that is forked from the server of `fabric run` ------------------

# Writes what a script can see of its process. TORCHELASTIC_... is no variable of a library.
FACTS = """
import atexit, gc, json, multiprocessing, os, pickle, random, signal, sys, threading, time, warnings

os.environ["TMPDIR"] = os.path.join(os.path.dirname(__file__), "temporary")
import tempfile

import helper


class Local:
    pass


def name_of_class_in_worker(value):
    return type(value).__module__


def main():
    import numpy
    import torch

    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        module_in_worker = pool.apply(name_of_class_in_worker, (Local(),))
    process = multiprocessing.current_process()
    facts = {
        "names": [__name__, __file__, str(__spec__), helper.__file__, Local.__module__],
        "pickle": pickle.dumps(Local()).hex(),
        "module in a worker": module_in_worker,
        "main": sys.modules["__main__"].__file__,
        "argv": sys.argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "X options": sys._xoptions,
        "warn options": sys.warnoptions,
        "first warning filters": str([rule for rule in warnings.filters if rule[2] is EOFError]),
        "folders": [os.getcwd(), tempfile.gettempdir()],
        "parent": os.getppid(),
        "environment": dict(os.environ),
        "process": [process.name, str(multiprocessing.parent_process()), process.daemon],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": len(multiprocessing.active_children()),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "streams": [sys.stdin.fileno(), sys.stdout.line_buffering, sys.stdout.encoding],
        "group": os.getpgrp(),
        "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in range(1, 32)],
        "blocked": [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "modes": [torch.is_grad_enabled(), str(torch.get_default_dtype()), gc.isenabled()],
        "numbers": [random.random(), int(numpy.random.randint(2**31)), torch.initial_seed()],
        "input": sys.stdin.read(),
    }
    with open(f"facts-{attempt}-{rank}.new", "w") as file:
        json.dump(facts, file)
    os.rename(file.name, f"facts-{attempt}-{rank}")
    if attempt == restarts:
        # One write, so that the lines of two ranks do not mix.
        atexit.register(os.write, 1, f"exit handler of rank {rank}\\n".encode())
    elif rank == 1:
        while not os.path.exists("facts-0-0"):
            time.sleep(0.01)
        raise ValueError("only once")


if __name__ == "__main__":
    LAUNCH
    main()
"""
# The beginning of a script that starts its ranks by itself.
LAUNCH = """
    if "RANK" not in os.environ:
        from fabric.launchers import LAUNCHERS, LaunchSpec
        os.chdir("/")
        LAUNCHERS["popen"].launch(None, (), {}, LaunchSpec(num_processes=2))
"""
FABRIC = SCRIPTS / "fabric"
INTERPRETER = [sys.executable, "-X", "importtime=0", "-W", "ignore::EOFError"]
RUN = [*INTERPRETER, "-m", "fabric", "run", "--accelerator=cpu", "--devices=2"]
# The commands that start FACTS, and the number of restarts that they allow.
STARTS = {
    "restarts": ([*RUN, "--max-restarts=1"], 1),
    "one start": (RUN, 0),
    "script": (INTERPRETER, 0),
}


def facts_of_ranks(folder: Path, start: str, script: str) -> list[dict[str, Any]]:
    """Run a script that fails before each restart, and return what it saw: two dicts per start."""
    command, restarts = STARTS[start]
    launch = ""
    if start == "script":
        launch = LAUNCH
    (folder / "temporary").mkdir(parents=True)
    (folder / "train.py").write_text(script.replace("    LAUNCH\n", launch))
    (folder / "helper.py").touch()
    with subprocess.Popen(
        [*command, "train.py", "--lr", "0.1"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "2", "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate("text", timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == [f"exit handler of rank {i}" for i in range(2)]
    assert errors.count("ValueError: only once") == restarts
    # A line says why restarts take long.
    assert ("new interpreter" in errors) == (restarts == 1 and script is not FACTS)
    facts = []
    for attempt in range(restarts + 1):
        for rank in range(2):
            text = (folder / f"facts-{attempt}-{rank}").read_text()
            facts_of_rank = json.loads(text.replace(str(folder), "FOLDER"))
            # A forked rank is a child of the fork server.
            is_forked = facts_of_rank.pop("parent") != process.pid
            assert is_forked == (script is FACTS)
            facts.append(facts_of_rank)
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_forked_rank_cannot_be_told_from_one_in_a_new_interpreter(
    tmp_path: Path, start: str
) -> None:
    forked = facts_of_ranks(tmp_path / "forked", start, FACTS)
    # A variable that libraries read while they are loaded is a reason for new interpreters.
    started = facts_of_ranks(tmp_path / "started", start, FACTS + '# "OMP_NUM_THREADS"')
    numbers = set()
    for facts in (*forked, *started):
        numbers.update(facts.pop("numbers"))
        facts["environment"].pop("FABRIC_STORE")  # names a file of the command
        # Set by the import of torch._dynamo, which the first optimizer needs in any interpreter.
        facts["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)
        facts.pop("group")
    assert len(numbers) == 3 * len(forked + started)
    assert forked == started
    assert forked[0]["folders"] == ["FOLDER", "FOLDER/temporary"]


@pytest.mark.slow
def test_a_file_with_the_name_of_a_loaded_module_is_imported_by_the_script_next_to_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import typing_extensions as t; print(t.__file__)")
    (tmp_path / "typing_extensions.py").touch()
    process = subprocess.run(
        # `python -m fabric` would itself import the file.
        [FABRIC, "run", "--accelerator=cpu", "--devices=1", "--max-restarts=1", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert process.stdout == f"{tmp_path / 'typing_extensions.py'}\n"
    assert "the ranks start in new interpreters: the script would import" in process.stderr
