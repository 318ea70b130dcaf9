"""Ray Train: on a network that is nothing but loopback, and on a cluster of two hosts."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.conftest import recorded_steps
from tests.engines.hosts import ADDRESSES, Hosts

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOLD_WORKER = Path(__file__).with_name("ray_told_worker.py")
PREEMPTED_JOB = Path(__file__).with_name("ray_preempted_job.py")
LOOPBACK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
STEPS = 40
SECONDS = 500
# Steps of the preempted job. Its two ranks need a minute and a half for them.
LONG_STEPS = 400
# Seconds from the notice until a machine is taken away.
NOTICE = 60
CLUSTER = f"{ADDRESSES['host-a']}:6379"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the variables of Ray, whose files go to folders of the test.

    The paths of Ray's sockets have to be short.
    """
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        folders = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "RAY_TMPDIR": folder}
        yield os.environ | folders | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def losses_of_one_process(folder: Path) -> list[float]:
    record = folder / "one-process.jsonl"
    command = [
        sys.executable,
        EXAMPLES / "long_run.py",
        "--accelerator=cpu",
        "--devices=1",
        f"--steps={STEPS}",
        f"--folder={folder / 'one-process'}",
        f"--record={record}",
    ]
    subprocess.run(command, check=True, timeout=SECONDS)
    return [step["loss"] for step in recorded_steps(record)]


def kill_with_descendants(driver: subprocess.Popen[bytes]) -> None:
    if driver.poll() is None:
        for process in psutil.Process(driver.pid).children(recursive=True):
            process.kill()
    driver.kill()
    driver.wait()


def workers_of(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    workers = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        if "RayTrainWorker" in " ".join(process.cmdline()):
            workers.append(process)
    return workers


def run_with_a_killed_worker(command: list[object], env: dict[str, str], folder: Path) -> str:
    """Run the driver in a folder, kill a worker after 17 steps; return what the driver writes."""
    output = folder / "output"
    record = folder / "record.jsonl"
    with open(output, "w") as file:
        driver = subprocess.Popen(
            [str(word) for word in command],
            env=env,
            stdout=file,
            stderr=file,
            cwd=folder,
        )
    try:
        deadline = time.monotonic() + SECONDS
        while len(recorded_steps(record)) < 17:
            assert driver.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        _, second_worker = workers_of(driver)
        second_worker.kill()
        assert driver.wait(SECONDS) == 0, output.read_text()
    finally:
        kill_with_descendants(driver)
    return output.read_text()


def test_a_worker_is_killed_and_the_run_goes_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    record = tmp_path / "record.jsonl"
    command = [
        *LOOPBACK,
        sys.executable,
        EXAMPLES / "ray_train.py",
        "--accelerator=cpu",
        f"--steps={STEPS}",
        f"--folder={tmp_path / 'run'}",
        f"--record={record}",
        "--pause=0.1",
    ]
    output = run_with_a_killed_worker(command, environment, tmp_path)
    expected = losses_of_one_process(tmp_path)
    numbers = set()
    for step in recorded_steps(record):
        number = step["step"]
        numbers.add(number)
        assert step["processes"] == 2
        assert step["loss"] == pytest.approx(expected[number - 1], rel=1e-4)
    assert numbers == set(range(1, STEPS + 1))
    # Ray's result names the last checkpoint of the loop.
    result = re.search(r"(?m)^step (?P<step>\d+): loss \S+, in (?P<folder>\S+)$", output)
    assert result is not None
    assert int(result["step"]) == STEPS - STEPS % 3
    checkpoints = tmp_path / "run" / "checkpoints"
    latest = (checkpoints / "latest").read_text().strip()
    content = json.loads(Path(result["folder"], "checkpoint.json").read_text())
    assert content == {"path": str(checkpoints / latest)}


def test_should_stop_and_exit_preempted_follow_what_ray_tells_a_worker(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, TOLD_WORKER], env=environment, capture_output=True, timeout=SECONDS
    )
    assert result.stdout == b"False True waits\n", result.stderr


class SpotCluster:
    """Ray on two hosts, with room for one worker on each. Host-b may be taken away.

    Args:
        hosts: the hosts. Host-a is the head of the cluster.
        env: the variables of all commands.
        folder: a folder for what the commands write.
    """

    def __init__(self, hosts: Hosts, env: dict[str, str], folder: Path) -> None:
        self._hosts = hosts
        self._env = env | {"RAY_ADDRESS": CLUSTER}
        self._ray = Path(sys.executable).with_name("ray")
        self._output = folder / "output"
        roles = {
            "host-a": ["--head", "--port=6379", "--include-dashboard=false"],
            "host-b": [f"--address={CLUSTER}"],
        }
        for host, options in roles.items():
            options += [
                f"--node-ip-address={ADDRESSES[host]}",
                "--num-cpus=1",
                "--object-store-memory=100000000",
                "--disable-usage-stats",
            ]
            self._start(host, self._ray, "start", "--block", *options)

    def _start(self, host: str, *command: object) -> "subprocess.Popen[str]":
        with open(self._output, "a") as file:
            return self._hosts.start(host, *command, env=self._env, stdout=file, stderr=file)

    def start_job(self, *command: object) -> None:
        """Start a driver on host-a."""
        self._driver = self._start("host-a", sys.executable, *command)

    def wait_for_steps(self, record: Path, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while len(recorded_steps(record)) < count:
            self._check_time(deadline)

    def take_host_b_away(self, node: str) -> None:
        """Do what a cloud does with a spot machine: give notice, and end the machine in time.

        Args:
            node: Ray's id of host-b.
        """
        notice = [
            f"--address={CLUSTER}",
            f"--node-id={node}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=spot",
            f"--deadline-remaining-seconds={NOTICE}",
        ]
        self._hosts.run("host-a", self._ray, "drain-node", *notice, env=self._env)
        deadline = time.monotonic() + SECONDS
        # Ray writes this when the time is over.
        while "PreemptionError" not in self._output.read_text():
            self._check_time(deadline)
        self._hosts.kill("host-b")

    def _check_time(self, deadline: float) -> None:
        assert self._driver.poll() is None, self._output.read_text()
        assert time.monotonic() < deadline, self._output.read_text()
        time.sleep(0.05)

    def wait_for_job(self) -> None:
        assert self._driver.wait(SECONDS) == 0, self._output.read_text()


def test_the_ranks_of_a_preempted_machine_save_and_the_run_goes_on_without_the_machine(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["PYTHONPATH"] = str(ROOT)
    # The end of the block ends the cluster.
    with Hosts(tmp_path) as hosts:
        cluster = SpotCluster(hosts, environment, tmp_path)
        cluster.start_job(PREEMPTED_JOB, tmp_path, LONG_STEPS)
        nodes = {}
        for rank in range(2):
            record = tmp_path / f"rank-{rank}-of-2"
            cluster.wait_for_steps(record, 20)
            first_step, *_ = recorded_steps(record)
            nodes[first_step["host"]] = first_step["node"]
        cluster.take_host_b_away(nodes["host-b"])
        cluster.wait_for_job()

    # should_stop is true on both ranks at the same step, which they have saved. So each step is
    # made once.
    first_rank, second_rank = [recorded_steps(tmp_path / f"rank-{rank}-of-2") for rank in range(2)]
    for step, step_of_second_rank in zip(first_rank, second_rank, strict=True):
        assert step["step"] == step_of_second_rank["step"]
        assert step["should_stop"] == step_of_second_rank["should_stop"]
        assert step["should_stop"] == (step is first_rank[-1])
    all_steps = first_rank + recorded_steps(tmp_path / "rank-0-of-1")
    assert [step["step"] for step in all_steps] == list(range(1, LONG_STEPS + 1))

    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, str(PREEMPTED_JOB), str(alone), str(LONG_STEPS), "--alone"]
    subprocess.run(command, env=environment, check=True, timeout=SECONDS)
    uninterrupted = recorded_steps(alone / "rank-0-of-1")
    for step, expected in zip(all_steps, uninterrupted, strict=True):
        assert step["samples"] == expected["samples"]
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)
