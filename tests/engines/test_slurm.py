"""Jobs of SLURM, on a cluster of two hosts."""

import sys
from pathlib import Path

import pytest

from tests.engines.conftest import JOB, Places
from tests.engines.hosts import Hosts
from tests.engines.slurm import Cluster

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(hosts, tmp_path_factory.mktemp("slurm"))


def test_tasks_on_one_host_are_the_ranks_of_one_job(slurm: Cluster, places: Places, tmp_path: Path) -> None:
    slurm.run("srun", "--nodes=1", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert places() == [(rank, rank, 0, 4, "host-a") for rank in range(4)]


def test_hosts_may_have_different_numbers_of_tasks(slurm: Cluster, places: Places, tmp_path: Path) -> None:
    slurm.run("srun", "--nodes=2", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert places() == [(0, 0, 0, 4, "host-a"), (1, 1, 0, 4, "host-a"), (2, 2, 0, 4, "host-a"), (3, 0, 1, 4, "host-b")]
