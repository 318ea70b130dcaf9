"""Open MPI and MPICH, on one host and on two."""

import sys
from pathlib import Path

import pytest

from tests.engines.conftest import JOB, JobRanks
from tests.engines.hosts import Hosts

pytestmark = pytest.mark.engines

# The network of the hosts is separate from that of this machine, so that a port is free.
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
MPICH = ["mpirun.mpich", "-genv", "MASTER_PORT", "29500"]

REMOTE_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


@pytest.fixture
def remote_shell(tmp_path: Path) -> Path:
    """Write a script that stands in for ssh: `remote-shell [OPTIONS] HOST COMMAND...`."""
    script = tmp_path / "remote-shell"
    script.write_text(REMOTE_SHELL)
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("mpirun", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_processes_of_one_host_are_the_ranks_of_one_job(
    hosts: Hosts, job_ranks: JobRanks, tmp_path: Path, mpirun: list[str]
) -> None:
    hosts.run("host-a", *mpirun, "-n", "4", sys.executable, JOB, tmp_path)
    assert job_ranks() == [(rank, rank, 0, 4, "host-a") for rank in range(4)]


TWO_HOSTS = {
    "openmpi": [
        *OPEN_MPI,
        "--mca",
        "plm_rsh_agent",
        "{shell}",
        "--host",
        "host-a:2,host-b:2",
        "-x",
        "MASTER_ADDR=host-a",
    ],
    "mpich": [
        *MPICH,
        "-launcher-exec",
        "{shell}",
        "-hosts",
        "host-a:2,host-b:2",
        "-genv",
        "MASTER_ADDR",
        "host-a",
    ],
}


@pytest.mark.parametrize("mpirun", TWO_HOSTS.values(), ids=TWO_HOSTS)
def test_processes_of_two_hosts_connect_where_master_addr_says(
    hosts: Hosts, job_ranks: JobRanks, tmp_path: Path, remote_shell: Path, mpirun: list[str]
) -> None:
    command = [word.format(shell=remote_shell) for word in mpirun]
    hosts.run("host-a", *command, "-n", "4", sys.executable, JOB, tmp_path)
    assert job_ranks() == [
        (0, 0, 0, 4, "host-a"),
        (1, 1, 0, 4, "host-a"),
        (2, 0, 1, 4, "host-b"),
        (3, 1, 1, 4, "host-b"),
    ]
