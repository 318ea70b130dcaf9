"""Ray Train, on a network that is nothing but loopback."""

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

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOLD_WORKER = Path(__file__).with_name("ray_told_worker.py")
LOOPBACK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
STEPS = 40
SECONDS = 500


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
