"""Agents of torchrun, and of `fabric run`, on two hosts."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.conftest import EXACT_STRATEGY, JOB, JobRanks, Steps, long_run, recorded_steps
from tests.engines.hosts import ADDRESSES, Hosts

pytestmark = pytest.mark.engines

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=host-a:29400",
]
# Seconds until a host counts as lost.
QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
FABRIC_RUN = [
    sys.executable,
    "-m",
    "fabric",
    "run",
    "--accelerator=cpu",
    "--devices=2",
]
ON_TWO_HOSTS = ["--num-nodes=2", "--main-address=host-a"]
# The addresses of loopback, as /proc/net/tcp and tcp6 write them.
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def run_on_hosts(
    hosts: Hosts, commands: Mapping[str, Sequence[object]], code: int = 0
) -> list[str]:
    """Run a command on each host at the same time, and return what the commands write."""
    with ThreadPoolExecutor(2) as pool:
        futures = []
        for host, command in commands.items():
            futures.append(pool.submit(hosts.run, host, *command, code=code))
        return [future.result() for future in futures]


def test_two_agents_of_torchrun_make_one_job(
    hosts: Hosts, job_ranks: JobRanks, tmp_path: Path
) -> None:
    command = [*TORCHRUN, "--nnodes=2", f"--log-dir={tmp_path}/logs", JOB, tmp_path]
    run_on_hosts(hosts, dict.fromkeys(ADDRESSES, command))
    ranks = job_ranks()
    # The rendezvous decides which host comes first.
    first = ranks[0].host
    second = ranks[2].host
    assert {first, second} == set(ADDRESSES)
    assert ranks == [
        (0, 0, 0, 4, first),
        (1, 1, 0, 4, first),
        (2, 0, 1, 4, second),
        (3, 1, 1, 4, second),
    ]


def test_a_job_goes_on_with_the_host_that_is_left(
    hosts: Hosts, tmp_path: Path, uninterrupted: Steps
) -> None:
    record = tmp_path / "record"
    output = tmp_path / "output"
    elastic = [
        "--nnodes=1:2",
        "--max-restarts=3",
        f"--rdzv-conf={QUICK}",
        f"--log-dir={tmp_path}/logs",
    ]
    command = [*TORCHRUN, *elastic, *long_run(tmp_path, steps=150), "--pause=0.05"]
    wait_for_step_30 = f"until grep -qs '\"step\": 30,' {record}; do sleep 0.1; done"
    with open(output, "w") as file:
        agent_of_host_a = hosts.start("host-a", *command, stdout=file, stderr=subprocess.STDOUT)
        hosts.start("host-b", *command, stdout=file, stderr=subprocess.STDOUT)
        hosts.run("host-a", "sh", "-c", wait_for_step_30)
        hosts.kill("host-b")
        assert agent_of_host_a.wait(120) == 0, output.read_text()
    # Steps that were not saved yet are done twice.
    numbers = set()
    sizes = set()
    for step in recorded_steps(record):
        numbers.add(step["step"])
        sizes.add(step["processes"])
        assert (step["loss"], step["samples"]) == uninterrupted[step["step"]]
    assert numbers == set(range(1, 151))
    assert sizes == {2, 4}


def test_fabric_run_on_each_host_makes_one_job(
    hosts: Hosts, job_ranks: JobRanks, tmp_path: Path
) -> None:
    commands = {}
    for node, host in enumerate(ADDRESSES):
        commands[host] = [*FABRIC_RUN, *ON_TWO_HOSTS, f"--node-rank={node}", JOB, tmp_path]
    run_on_hosts(hosts, commands)
    assert job_ranks() == [
        (0, 0, 0, 4, "host-a"),
        (1, 1, 0, 4, "host-a"),
        (2, 0, 1, 4, "host-b"),
        (3, 1, 1, 4, "host-b"),
    ]


def test_hosts_restart_together_after_a_rank_a_command_and_the_link_have_failed(
    hosts: Hosts, tmp_path: Path, uninterrupted_on_four: Steps
) -> None:
    record = tmp_path / "record"
    options = ["--max-restarts=3", "--node-timeout=40", *long_run(tmp_path), "--pause=0.1"]
    options.append(EXACT_STRATEGY)
    output = tmp_path / "output"

    def start(node: int) -> "subprocess.Popen[str]":
        host = list(ADDRESSES)[node]
        command = [*FABRIC_RUN, *ON_TWO_HOSTS, f"--node-rank={node}", *options]
        with open(output, "a") as file:
            return hosts.start(host, *command, stdout=file, stderr=subprocess.STDOUT)

    def wait_for(text: str, path: Path = output) -> None:
        hosts.run("host-a", "sh", "-c", f"until grep -qs '{text}' {path}; do sleep 0.1; done")

    first = start(0)
    start(1)
    wait_for('"step": 25,', record)
    # The newest process of host-b is a rank.
    hosts.run("host-a", "sh", "-c", "kill -9 $(ip netns pids host-b | sort -n | tail -n 1)")
    wait_for("restart 1 of 3: machine 1 (host-b): rank")
    wait_for('"step": 60,', record)
    hosts.kill("host-b")
    second = start(1)
    wait_for("restart 2 of 3: machine 1 (host-b): its command ended and was started again")
    wait_for('"step": 100,', record)
    hosts.run("host-b", "ip", "link", "set", "eth0", "down")
    wait_for("restart 3 of 3:")
    hosts.run("host-b", "ip", "link", "set", "eth0", "up")
    assert first.wait(120) == 0, output.read_text()
    assert second.wait(30) == 0, output.read_text()
    # Two processes on each of two hosts compute the losses of four on one host, bit by bit.
    numbers = set()
    for step in recorded_steps(record):
        numbers.add(step["step"])
        assert (step["loss"], step["samples"]) == uninterrupted_on_four[step["step"]]
    assert numbers == set(range(1, 201))


def test_a_job_on_one_host_cannot_be_reached_from_another_host(
    hosts: Hosts, tmp_path: Path
) -> None:
    commands = {}
    for host in ADDRESSES:
        folder = tmp_path / host
        folder.mkdir()
        commands[host] = [*FABRIC_RUN, JOB, folder]
    run_on_hosts(hosts, commands)
    for host in ADDRESSES:
        paths = list((tmp_path / host).iterdir())
        assert len(paths) == 2
        for path in paths:
            report = json.loads(path.read_text())
            assert report["position"]["host"] == host
            assert report["position"]["world_size"] == 2
            assert report["listening"]
            assert set(report["listening"]) <= LOOPBACK


def reports_of_doctor(hosts: Hosts, code: int, interface: str = "") -> list[str]:
    """Run ``fabric doctor`` as one job of two hosts, and return the report of each host."""
    commands = {}
    for node, host in enumerate(ADDRESSES):
        commands[host] = [
            "env",
            f"GLOO_SOCKET_IFNAME={interface}",
            *FABRIC_RUN,
            *ON_TWO_HOSTS,
            f"--node-rank={node}",
            "-m",
            "fabric",
            "doctor",
        ]
    return run_on_hosts(hosts, commands, code)


def test_the_doctor_reports_the_address_from_which_each_rank_reaches_rank_0(hosts: Hosts) -> None:
    report, _ = reports_of_doctor(hosts, code=0)
    address_of_rank_0 = ADDRESSES["host-a"]
    for rank, host in enumerate(["host-a", "host-a", "host-b", "host-b"]):
        addresses = f"at {ADDRESSES[host]}, rank 0 at {address_of_rank_0}"
        assert f"ok    rank {rank} of 4 on {host}: {addresses}" in report
    assert "ok    all_reduce" in report


def test_the_doctor_names_an_interface_that_does_not_reach_the_ranks_of_another_host(
    hosts: Hosts,
) -> None:
    for report in reports_of_doctor(hosts, code=1, interface="lo"):
        assert "process group: " in report
        assert "the interface to the other ranks, one of lo, eth0" in report
