"""A cluster of SLURM on two hosts with four CPUs each, whatever this machine has."""

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.engines.hosts import ADDRESSES, Hosts

__all__ = ["Cluster"]

# The configuration does without cgroups, which need rights that a container may lack. A job that
# was put back into the queue starts when its credentials have expired: two minutes by default.
CONFIGURATION = """
ClusterName=engines
SlurmctldHost=host-a
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=/run/munge.socket,cred_expire=5
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=10
NodeName=host-a,host-b CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""
MUNGED = [
    "munged",
    "--foreground",
    "--force",
    "--socket=/run/munge.socket",
    "--pid-file=/run/munged.pid",
    "--log-file=/run/munged.log",
    "--seed-file=/run/munged.seed",
]


class Cluster:
    """A running cluster. The cluster and its jobs end with the hosts.

    Args:
        hosts: The hosts on which the cluster runs.
        folder: The folder for the configuration and the logs.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text(CONFIGURATION)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        self._start("host-a", *MUNGED, f"--key-file={key}")
        wait_for_socket = "until test -S /run/munge.socket; do sleep 0.1; done"
        self.run("sh", "-c", wait_for_socket, seconds=120)
        self._start("host-a", "slurmctld", "-D")
        for host in ADDRESSES:
            self._start(host, "slurmd", "-D", "-N", host)
        all_idle = f"sinfo -h -t idle -o =%D= | grep ={len(ADDRESSES)}="
        self.run("sh", "-c", f"until {all_idle}; do sleep 0.2; done")

    def run(self, *command: object, **options: Any) -> str:
        """Run a command on the first host. See :meth:`Hosts.run`."""
        try:
            return self._hosts.run("host-a", *command, env=self._environment, **options)
        except AssertionError as error:
            for log in sorted(self._folder.glob("*.log")):
                error.add_note(f"{log.name}:\n{log.read_text()[-3000:]}")
            raise

    def _start(self, host: str, *command: str) -> None:
        with open(self._folder / f"{command[0]}-{host}.log", "w") as log:
            self._hosts.start(
                host, *command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
