"""A task that ``srun`` started."""

import re
from collections.abc import Mapping
from typing import final

from fabric.environments.base import read, read_integer, rendezvous, require
from fabric.errors import ConfigurationError
from fabric.world import World

__all__ = ["SlurmEnvironment", "first_host", "tasks_on_node"]

# SLURM counts the ids of steps that are not srun's down from 2**32: the batch script, the interactive shell of salloc,
# the external step of a prolog or an ssh session.
_FIRST_RESERVED_STEP = 2**32 - 16

_HOST = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9][0-9,-]*\])+")
_RANGE = re.compile(r"\[([0-9]+)[0-9,-]*\]")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@final
class SlurmEnvironment:
    """The variables of a step that ``srun`` started, one process per task.

    The body of an ``sbatch`` script and an interactive shell (``salloc``, ``srun --pty bash``) also carry variables of
    SLURM, but nobody made one process per task there, so they are not this environment. A step of several tasks with a
    pseudo-terminal counts as made by srun: an srun inside an interactive shell inherits the shell's terminal variables.
    """

    name: str = "slurm"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This task's place; rank 0 is on the first host of the step, and the port comes from the job and step ids.

        Raises:
            ConfigurationError: in a step, a variable is missing, malformed, or contradicts another.
        """
        step = read_integer(env, "SLURM_STEP_ID", "SLURM_STEPID")
        if step is None or step >= _FIRST_RESERVED_STEP or read(env, "SLURM_PROCID") is None:
            return None
        rank, local_rank, node_rank, world_size = require(
            env,
            self.name,
            ("SLURM_PROCID",),
            ("SLURM_LOCALID",),
            ("SLURM_NODEID",),
            ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        )
        if world_size == 1 and read(env, "SLURM_PTY_PORT") is not None:
            return None
        local_world_size = _local_world_size(env, node_rank, world_size)
        several_nodes = local_world_size < world_size
        job = read(env, "SLURM_JOB_ID", "SLURM_JOBID")
        address, port = rendezvous(
            env,
            launcher=self.name,
            world_size=world_size,
            local_world_size=local_world_size,
            first_host=_first_host_of_step(env) if several_nodes else None,
            identity=job and f"{job}.{step}",
            passing="export {}   # before srun",
        )
        return World(
            rank=rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            address=address,
            port=port,
        )


def first_host(nodes: str) -> str:
    """First host of a node list as SLURM writes it: ``n[03-05,7],m1`` is n03, ``rack[1-2]n[3-4]-ib`` is rack1n3-ib.

    Raises:
        ConfigurationError: it is not such a list.
    """
    match = _HOST.match(nodes.strip())
    if match is None or nodes.strip()[match.end() :][:1] not in ("", ","):
        raise ConfigurationError(
            f"the node list {nodes!r} of SLURM",
            "it does not begin with a host",
            "hosts as in 'node[01-03,7]', 'a-[1-2]b' or 'n1,n2'",
            "export MASTER_ADDR=<host of rank 0>   # before srun",
        )
    return _RANGE.sub(r"\1", match.group())


def tasks_on_node(tasks: str, node: int) -> int:
    """Number of tasks on one node of a list as SLURM writes it: ``2(x3),1`` is 2, 2, 2 and 1.

    Args:
        tasks: value of ``SLURM_STEP_TASKS_PER_NODE``.
        node: number of the node in the step, from 0.

    Raises:
        ConfigurationError: it is not such a list, or has fewer nodes.
    """
    counts: list[int] = []
    for field in tasks.split(","):
        match = _TASKS.fullmatch(field.strip())
        if match is None:
            break
        counts += [int(match[1])] * int(match[2] or 1)
    else:
        if 0 <= node < len(counts):
            return counts[node]
    raise ConfigurationError(
        f"SLURM_STEP_TASKS_PER_NODE={tasks!r} in the environment",
        f"it does not tell the number of tasks on node {node}",
        "counts per node as in '4', '2(x3)' or '2(x3),1'",
        "export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand: they win",
    )


def _local_world_size(env: Mapping[str, str], node: int, world_size: int) -> int:
    tasks = read(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if tasks is None and read_integer(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == 1:
        return world_size
    return tasks_on_node(tasks or "", node)


def _first_host_of_step(env: Mapping[str, str]) -> str | None:
    nodes = read(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # A list that cannot be read does no harm when the address is given.
    return first_host(nodes) if nodes is not None and read(env, "MASTER_ADDR") is None else None
