"""What the tests of the engines share: two hosts, and the numbers that a job has to come to."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hosts import Hosts

Steps = dict[int, tuple[Any, list[int]]]  # loss and samples of each
Places = Callable[[], list[tuple[Any, ...]]]
JOB = Path(__file__).with_name("job.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "long_run.py"
STEPS = 200


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="session")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of one process."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, JOB, folder], check=True, timeout=90)
    return json.loads((folder / "0.json").read_text())["losses"]


@pytest.fixture
def places(tmp_path: Path, losses: list[float]) -> Places:
    """Call it after the job: (rank, local rank, node rank, world size, host) of each rank, whose losses are right."""

    def read() -> list[tuple[Any, ...]]:
        ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
        for rank in ranks:
            assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        names = ("global_rank", "local_rank", "node_rank", "world_size", "host")
        return [tuple(rank[name] for name in names) for rank in ranks]

    return read


def long_run(folder: Path, steps: int = STEPS) -> list[str]:
    """The example of a run that is interrupted; it keeps its checkpoints and a record in a folder."""
    paths = [f"--folder={folder}/kept", f"--record={folder}/record"]
    return [str(EXAMPLE), "--accelerator=cpu", *paths, f"--steps={steps}", "--save-every=20"]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What :func:`long_run` has written so far, as the keys step, loss, samples and processes."""
    record = folder / "record"
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Loss and samples of each step, of one process that nobody interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    subprocess.run(
        [sys.executable, *long_run(folder)], check=True, stdout=subprocess.DEVNULL, timeout=90
    )
    return {
        step["step"]: (pytest.approx(step["loss"], rel=1e-4), step["samples"])
        for step in steps_of(folder)
    }
