"""Agents of torchrun, and of `fabric run`, on two hosts."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.conftest import JOB, Places
from tests.engines.hosts import ADDRESSES, Hosts

pytestmark = pytest.mark.engines

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
FABRIC_RUN = [sys.executable, "-m", "fabric", "run", "--accelerator=cpu", "--devices=2"]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc/net/tcp and tcp6 write it


def on_both(hosts: Hosts, commands: dict[str, list[object]]) -> None:
    """Run a command on each host, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda host: hosts.run(host, *commands[host]), commands))


def test_two_agents_of_torchrun_make_one_job(hosts: Hosts, places: Places, tmp_path: Path) -> None:
    command: list[object] = [*TORCHRUN, "--rdzv-backend=c10d", "--rdzv-endpoint=host-a:29400"]
    command += [f"--log-dir={tmp_path / 'logs'}", JOB, tmp_path]
    on_both(hosts, dict.fromkeys(ADDRESSES, command))
    found = places()
    # Which host comes first is up to the rendezvous.
    first, second = (found[rank][-1] for rank in (0, 2))
    assert {first, second} == set(ADDRESSES)
    assert found == [(0, 0, 0, 4, first), (1, 1, 0, 4, first), (2, 0, 1, 4, second), (3, 1, 1, 4, second)]


def test_fabric_run_on_each_host_makes_one_job(hosts: Hosts, places: Places, tmp_path: Path) -> None:
    two = [*FABRIC_RUN, "--num-nodes=2", "--main-address=host-a"]
    on_both(hosts, {host: [*two, f"--node-rank={node}", JOB, tmp_path] for node, host in enumerate(ADDRESSES)})
    assert places() == [(0, 0, 0, 4, "host-a"), (1, 1, 0, 4, "host-a"), (2, 0, 1, 4, "host-b"), (3, 1, 1, 4, "host-b")]


def test_a_job_on_one_host_cannot_be_reached_from_the_other(hosts: Hosts, tmp_path: Path) -> None:
    for host in ADDRESSES:
        (tmp_path / host).mkdir()
    on_both(hosts, {host: [*FABRIC_RUN, JOB, tmp_path / host] for host in ADDRESSES})
    for host in ADDRESSES:
        ranks = [json.loads(path.read_text()) for path in (tmp_path / host).iterdir()]
        assert [(rank["host"], rank["world_size"]) for rank in ranks] == [(host, 2)] * 2
        assert all(set() < set(rank["listening"]) <= LOOPBACK for rank in ranks)
