"""Fixtures of the tests of engines: two hosts, and the numbers that a job has to reach."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.hosts import Hosts

# The loss and the samples of each step, by its number.
Steps = dict[int, tuple[Any, list[int]]]
JOB = Path(__file__).with_name("job.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "long_run.py"
STEPS = 200
# DDP that sums the gradients of the first step in the same order as those of all later steps. So a
# run that resumes has the losses of the uninterrupted run bit by bit.
EXACT_STRATEGY = "--strategy=ddp_find_unused_parameters_true"


class JobRank(NamedTuple):
    """The position of a rank in its job."""

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str


JobRanks = Callable[[], list[JobRank]]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Run the job in one process, and return its losses."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, JOB, folder], check=True, timeout=300)
    report = json.loads((folder / "0.json").read_text())
    return report["losses"]


@pytest.fixture
def job_ranks(tmp_path: Path, losses: list[float]) -> JobRanks:
    """Return a function that checks the losses of a job that has ended, and returns its ranks."""

    def read() -> list[JobRank]:
        ranks = []
        for path in sorted(tmp_path.glob("*.json")):
            report = json.loads(path.read_text())
            assert report["losses"] == pytest.approx(losses, rel=1e-5)
            ranks.append(JobRank(**report["position"]))
        return ranks

    return read


def long_run(folder: Path, steps: int = STEPS) -> list[str]:
    """Return the arguments of Python that run the example with its files in a folder."""
    return [
        str(EXAMPLE),
        "--accelerator=cpu",
        f"--folder={folder}/checkpoints",
        f"--record={folder}/record",
        f"--steps={steps}",
        "--save-every=20",
    ]


def recorded_steps(record: Path) -> list[dict[str, Any]]:
    """Return the steps that the example has recorded so far.

    A step has the keys step, loss, samples and processes.
    """
    if not record.exists():
        return []
    lines = record.read_text().splitlines(keepends=True)
    # The last line may be incomplete.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def uninterrupted_steps(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run the example on this host without an interruption, and return its steps."""
    command = [sys.executable, *long_run(folder), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return recorded_steps(folder / "record")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Run the example in one process without an interruption, and return its steps.

    A loss compares equal to that of several processes up to rounding: they sum the gradients of a
    batch in another order than one process does.
    """
    steps: Steps = {}
    for step in uninterrupted_steps(tmp_path_factory.mktemp("uninterrupted"), "--devices=1"):
        loss = pytest.approx(step["loss"], rel=1e-4)
        steps[step["step"]] = (loss, step["samples"])
    return steps


@pytest.fixture(scope="session")
def uninterrupted_on_four(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Run the example in four processes of one host, and return its steps with exact losses."""
    folder = tmp_path_factory.mktemp("four")
    steps: Steps = {}
    for step in uninterrupted_steps(folder, "--devices=4", EXACT_STRATEGY):
        steps[step["step"]] = (step["loss"], step["samples"])
    return steps
