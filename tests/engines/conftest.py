"""What the tests of the engines share: two hosts, and the numbers that a job has to come to."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.hosts import Hosts

Places = Callable[[], list[tuple[Any, ...]]]
JOB = Path(__file__).with_name("job.py")


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
