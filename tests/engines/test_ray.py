"""Ray Train, on a network of its own that is nothing but loopback."""

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

pytestmark = pytest.mark.engines

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPBACK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
STEPS = 40
SECONDS = 150


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where Ray keeps its token, its sockets, whose paths may not be long, and what a worker that is killed leaves."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        folders = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "RAY_TMPDIR": folder}
        yield os.environ | folders | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def steps(path: Path) -> list[dict[str, object]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses_alone(folder: Path) -> list[object]:
    command = [
        sys.executable,
        EXAMPLES / "long_run.py",
        "--accelerator=cpu",
        "--devices=1",
        f"--steps={STEPS}",
    ]
    record = folder / "alone.jsonl"
    subprocess.run(
        [*command, f"--folder={folder / 'alone'}", f"--record={record}"],
        check=True,
        timeout=SECONDS,
    )
    return [step["loss"] for step in steps(record)]


def test_a_worker_is_killed_and_the_run_goes_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    record = tmp_path / "record.jsonl"
    output = tmp_path / "output"
    command = [
        *LOOPBACK,
        sys.executable,
        EXAMPLES / "ray_train.py",
        "--accelerator=cpu",
        f"--steps={STEPS}",
    ]
    command += [f"--folder={tmp_path / 'run'}", f"--record={record}", "--pause=0.1"]
    with open(output, "w") as file:
        driver = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=tmp_path)
    try:
        deadline = time.monotonic() + SECONDS
        while len(steps(record)) < 17:
            assert driver.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        descendants = psutil.Process(driver.pid).children(recursive=True)
        workers = [
            descendant
            for descendant in descendants
            if "RayTrainWorker" in " ".join(descendant.cmdline())
        ]
        assert len(workers) == 2
        workers[1].kill()
        assert driver.wait(SECONDS) == 0, output.read_text()
    finally:
        for process in (
            psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else ()
        ):
            process.kill()
        driver.kill()
        driver.wait()
    actual = steps(record)
    expected = losses_alone(tmp_path)
    assert {each["step"] for each in actual} == set(range(1, STEPS + 1))
    for each in actual:
        assert each["processes"] == 2
        assert each["loss"] == pytest.approx(expected[int(str(each["step"])) - 1], rel=1e-4)
    # What Ray's result says is what the loop has saved last.
    shown = re.search(r"(?m)^step (\d+): loss \S+, in (\S+)$", output.read_text())
    assert shown is not None
    assert int(shown[1]) == STEPS - STEPS % 3
    checkpoints = tmp_path / "run" / "checkpoints"
    latest = (checkpoints / "latest").read_text().strip()
    assert json.loads(Path(shown[2], "checkpoint.json").read_text()) == {
        "path": str(checkpoints / latest)
    }
