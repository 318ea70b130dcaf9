"""Agents of torchrun, and of `fabric run`, on two hosts."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.conftest import JOB, Places, Steps, long_run, steps_of
from tests.engines.hosts import ADDRESSES, Hosts

pytestmark = pytest.mark.engines

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=host-a:29400"]
QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"  # seconds until a host counts as lost
FABRIC_RUN = [sys.executable, "-m", "fabric", "run", "--accelerator=cpu", "--devices=2"]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc/net/tcp and tcp6 write it


def on_both(hosts: Hosts, commands: Mapping[str, Sequence[object]], code: int = 0) -> list[str]:
    """What a command on each host writes; they run at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda host: hosts.run(host, *commands[host], code=code), commands))


def test_two_agents_of_torchrun_make_one_job(hosts: Hosts, places: Places, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nnodes=2", f"--log-dir={tmp_path}/logs", JOB, tmp_path]
    on_both(hosts, dict.fromkeys(ADDRESSES, command))
    actual = places()
    # Which host comes first is up to the rendezvous.
    first, second = (actual[rank][-1] for rank in (0, 2))
    assert {first, second} == set(ADDRESSES)
    assert actual == [
        (0, 0, 0, 4, first),
        (1, 1, 0, 4, first),
        (2, 0, 1, 4, second),
        (3, 1, 1, 4, second),
    ]


def test_a_job_goes_on_with_the_host_that_is_left(
    hosts: Hosts, tmp_path: Path, uninterrupted: Steps
) -> None:
    elastic = [
        "--nnodes=1:2",
        "--max-restarts=3",
        f"--rdzv-conf={QUICK}",
        f"--log-dir={tmp_path}/logs",
    ]
    command = [*TORCHRUN, *elastic, *long_run(tmp_path, steps=150), "--pause=0.05"]
    with open(tmp_path / "output", "w+") as output:
        agents = [
            hosts.start(host, *command, stdout=output, stderr=subprocess.STDOUT)
            for host in ADDRESSES
        ]
        hosts.run(
            "host-a",
            "sh",
            "-c",
            f"until grep -qs '\"step\": 30,' {tmp_path}/record; do sleep 0.1; done",
        )
        hosts.kill("host-b")
        assert agents[0].wait(120) == 0, output.seek(0) or output.read()
    steps = steps_of(tmp_path)
    assert {step["processes"] for step in steps} == {2, 4}
    # Those that were not saved yet are done twice.
    assert {step["step"] for step in steps} == set(range(1, 151))
    assert all((step["loss"], step["samples"]) == uninterrupted[step["step"]] for step in steps)


def test_fabric_run_on_each_host_makes_one_job(
    hosts: Hosts, places: Places, tmp_path: Path
) -> None:
    two = [*FABRIC_RUN, "--num-nodes=2", "--main-address=host-a"]
    on_both(
        hosts,
        {host: [*two, f"--node-rank={node}", JOB, tmp_path] for node, host in enumerate(ADDRESSES)},
    )
    assert places() == [
        (0, 0, 0, 4, "host-a"),
        (1, 1, 0, 4, "host-a"),
        (2, 0, 1, 4, "host-b"),
        (3, 1, 1, 4, "host-b"),
    ]


def test_a_job_on_one_host_cannot_be_reached_from_the_other(hosts: Hosts, tmp_path: Path) -> None:
    for host in ADDRESSES:
        (tmp_path / host).mkdir()
    on_both(hosts, {host: [*FABRIC_RUN, JOB, tmp_path / host] for host in ADDRESSES})
    for host in ADDRESSES:
        ranks = [json.loads(path.read_text()) for path in (tmp_path / host).iterdir()]
        assert [(rank["host"], rank["world_size"]) for rank in ranks] == [(host, 2)] * 2
        assert all(set() < set(rank["listening"]) <= LOOPBACK for rank in ranks)


def doctor(hosts: Hosts, code: int, interface: str = "") -> list[str]:
    """The report of each host."""
    run = [
        "env",
        f"GLOO_SOCKET_IFNAME={interface}",
        *FABRIC_RUN,
        "--num-nodes=2",
        "--main-address=host-a",
    ]
    each = {
        host: [*run, f"--node-rank={node}", "-m", "fabric", "doctor"]
        for node, host in enumerate(ADDRESSES)
    }
    return on_both(hosts, each, code)


def test_the_doctor_reports_the_address_from_which_each_rank_reaches_the_first(
    hosts: Hosts,
) -> None:
    first, _ = doctor(hosts, code=0)
    for rank, host in enumerate(["host-a", "host-a", "host-b", "host-b"]):
        assert (
            f"ok    rank {rank} of 4 on {host}: at {ADDRESSES[host]}, rank 0 at {ADDRESSES['host-a']}"
            in first
        )
    assert "ok    all_reduce" in first


def test_the_doctor_names_an_interface_that_does_not_lead_to_the_others(hosts: Hosts) -> None:
    for report in doctor(hosts, code=1, interface="lo"):
        assert "process group: " in report
        assert "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: of lo, eth0 the one" in report
