"""The launchers that fabric recognizes, and how each one's variables are read into a :class:`fabric.world.World`."""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from fabric.errors import ConfigurationError
from fabric.world import World, read, read_integer

__all__ = [
    "Environment", "MPICHEnvironment", "OpenMPIEnvironment", "RayEnvironment", "SlurmEnvironment",
    "TorchrunEnvironment", "detect",
]  # fmt: skip


class Environment(Protocol):
    """A launcher that fabric recognizes by the variables it sets."""

    name: str  # in messages, such as "slurm"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This process's place in the job, or ``None`` when this launcher did not start it.

        Pure: it reads the mapping and nothing else, and changes nothing.

        Raises:
            ConfigurationError: the launcher is recognized, and its variables are incomplete or contradict each other.
        """


def detect(
    env: Mapping[str, str], environments: Sequence[Environment] | None = None
) -> tuple[Environment, World] | None:
    """Find the launcher that started this process, and this process's place in its job.

    Args:
        env: an environment mapping, such as ``os.environ``; nothing else is read.
        environments: the candidates; the first that recognizes its variables wins. Default: Ray Train, torchrun
            (and whatever sets its variables), Open MPI, MPICH and Intel MPI, SLURM.

    Returns:
        The environment and the world it found, or ``None`` when no launcher started this process.

    Raises:
        ConfigurationError: a launcher is recognized, and its variables are incomplete or contradict each other.
    """
    for environment in _INNERMOST_FIRST if environments is None else environments:
        world = environment.detect(env)
        if world is not None:
            return environment, world
    return None


# Steps that srun did not start have ids just below 2**32: the batch script, the interactive shell of salloc, the
# external step of a prolog or an ssh session.
_FIRST_RESERVED_STEP = 2**32 - 16

_HOST = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9][0-9,-]*\])+(?=,|$)")
_RANGE = re.compile(r"\[([0-9]+)[0-9,-]*\]")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")

# Below 32768, where Linux begins to hand out ports for outgoing connections, and above most registered services.
_FIRST_PORT = 10_000
_PORTS = 20_000

_Names = tuple[
    str, ...
]  # names of one variable in different releases; the first that is set is used


class _Launcher:
    """An environment defined by the names of its launcher's variables."""

    name: str
    _rank: _Names
    _world_size: _Names
    _local_rank: _Names
    _local_world_size: _Names  # a number, or one for each node as SLURM writes them
    _node_rank: _Names = ()  # empty: derived from the ranks
    _hosts: _Names = ()  # of the job's nodes, as SLURM writes them
    _job_id: tuple[
        _Names, ...
    ] = ()  # together the same in all processes of a job, and in no other job

    def detect(self, env: Mapping[str, str]) -> World | None:
        """See :meth:`Environment.detect`."""
        rank = read_integer(env, *self._rank)
        if rank is None:
            return None
        world_size = self._require(env, self._world_size)
        local_rank = 0
        node_rank = 0
        local_world_size = 1
        if world_size > 1:
            local_rank = self._require(env, self._local_rank)
            node_rank = self._require(env, self._node_rank) if self._node_rank else None
            local_world_size = self._tasks_on_node(env, node_rank or 0)
            if node_rank is None:
                # Nodes of equal size are assumed, filled one after the other unless local_rank says that ranks
                # alternate.
                in_order = rank % local_world_size == local_rank
                node_rank = (
                    rank // local_world_size
                    if in_order
                    else rank % -(-world_size // local_world_size)
                )
        address, port = self._find_rendezvous(env, world_size, local_world_size)
        return World(
            rank=rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            address=address,
            port=port,
        )

    def _require(self, env: Mapping[str, str], names: _Names) -> int:
        value = read_integer(env, *names)
        if value is None:
            # A process that guessed would train alone, or on the device of another rank.
            raise ConfigurationError(
                f"the place of this process in a job of {self.name}",
                f"{self.name} started this process and did not set {' or '.join(names)}",
                f"all that {self.name} sets, passed on to the script unchanged",
                "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand: they win",
            )
        return value

    def _tasks_on_node(self, env: Mapping[str, str], node: int) -> int:
        """Number of tasks on one node. SLURM has a list for all nodes, in which ``2(x3),1`` is 2, 2, 2 and 1."""
        tasks = read(env, *self._local_world_size) or ""
        fields = [_TASKS.fullmatch(field.strip()) for field in tasks.split(",")]
        counts = [int(field[1]) for field in fields if field for _ in range(int(field[2] or 1))]
        if None in fields or not 0 <= node < len(counts):
            raise ConfigurationError(
                f"{' or '.join(self._local_world_size)} set to {tasks!r}",
                f"it does not give the number of processes on node {node}",
                "a number; under SLURM, numbers per node as in '4', '2(x3)' or '2(x3),1'",
                "export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand: they win",
            )
        return counts[node]

    def _find_rendezvous(
        self, env: Mapping[str, str], world_size: int, local_world_size: int
    ) -> tuple[str, int | None]:
        """``MASTER_ADDR`` and ``MASTER_PORT`` if set, else derived from the job; a single process needs no port."""
        is_one_node = local_world_size == world_size
        address = read(env, "MASTER_ADDR") or (
            "127.0.0.1" if is_one_node else self._first_host(env)
        )
        port = read_integer(env, "MASTER_PORT")
        job_id = [read(env, *names) for names in self._job_id]
        if port is None and world_size > 1 and job_id and None not in job_id:
            port = _FIRST_PORT + zlib.crc32(".".join(map(str, job_id)).encode()) % _PORTS
        if address is None or (port is None and world_size > 1):
            name, value = (
                ("MASTER_ADDR", "host of rank 0") if address is None else ("MASTER_PORT", "port")
            )
            raise ConfigurationError(
                f"a job of {world_size} processes of {self.name}, {local_world_size} of them on this node",
                f"{name} is not set, and cannot be derived from the other variables",
                "MASTER_ADDR with the host name of rank 0's node, MASTER_PORT with a free port there, in every process",
                f"export {name}=<{value}>   # before srun or mpiexec; Open MPI: mpirun -x {name} ...",
            )
        return address, port

    def _first_host(self, env: Mapping[str, str]) -> str | None:
        """First host of a SLURM node list: n03 for ``n[03-05,7],m1``, rack1n3-ib for ``rack[1-2]n[3-4]-ib``.

        ``None`` if there is no list, or it does not begin with a host.
        """
        match = _HOST.match(read(env, *self._hosts) or "")
        return None if match is None else _RANGE.sub(r"\1", match.group())


@final
class TorchrunEnvironment(_Launcher):
    """``RANK`` and ``WORLD_SIZE``, with ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK`` and the rendezvous.

    torchrun, fabric's own launchers and users set them. ``WORLD_SIZE`` without ``RANK`` is not this environment:
    scripts for SLURM often export only that and leave the rank to srun. ``RANK`` without ``WORLD_SIZE``, next to
    another variable of a job, is an error, since each process would train alone; so are several processes without an
    address and a port.
    """

    name = "torchrun"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This process's place, from :meth:`fabric.world.World.from_env`. See :meth:`Environment.detect`."""
        world = World.from_env(env)
        others = [
            f"{name}={env[name]}"
            for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
            if read(env, name)
        ]
        if world is None and read(env, "RANK") and others:
            raise ConfigurationError(
                f"RANK={env['RANK']} and {', '.join(others)} in the environment",
                "WORLD_SIZE is missing: every process of the job would train alone",
                "RANK together with WORLD_SIZE, as torchrun sets them; neither of them for a single process",
                "export WORLD_SIZE=<number of processes>   # or: unset RANK",
            )
        if world is not None and world.store is None:
            # Checked here and not in World, whose defaults are right for a process without peers.
            self._find_rendezvous(env, world.world_size, world.local_world_size)
        return world


@final
class RayEnvironment:
    """A worker of Ray Train's ``TorchTrainer``, which connects the processes before it calls the training function."""

    name = "ray"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """See :meth:`Environment.detect`."""
        # Ray sets torchrun's variables except GROUP_RANK; torchrun inside a worker sets that too.
        is_worker = all(read(env, name) for name in ("RAY_JOB_ID", "NODE_RANK")) and not read(
            env, "GROUP_RANK"
        )
        return World.from_env({**env, "GROUP_RANK": env["NODE_RANK"]}) if is_worker else None


@final
class OpenMPIEnvironment(_Launcher):
    """Open MPI's ``mpirun``, ``mpiexec`` or ``prterun``; several nodes need ``MASTER_ADDR``."""

    name = "openmpi"
    _rank = ("OMPI_COMM_WORLD_RANK",)
    _world_size = ("OMPI_COMM_WORLD_SIZE",)
    _local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    _local_world_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    # OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts the processes of all jobs on a node.
    _job_id = (("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),)


@final
class MPICHEnvironment(_Launcher):
    """``mpiexec`` of MPICH or Intel MPI (Hydra), or of a Cray system (PALS); several nodes need ``MASTER_ADDR``.

    MPICH's own ``mpiexec`` sets nothing that distinguishes one job from another, so several processes need
    ``MASTER_PORT``. ``srun`` can set ``PMI_*`` variables too: a step of SLURM without Hydra's own variables is left to
    SLURM.
    """

    name = "mpich"
    _rank = ("PMI_RANK",)
    _world_size = ("PMI_SIZE",)
    _local_rank = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    _local_world_size = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    # Intel MPI, PALS, and Hydra with -pmi-port. Not the id of a batch job: two mpiexec in one job
    # would use the same port.
    _job_id = (("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_PORT"),)

    def detect(self, env: Mapping[str, str]) -> World | None:
        """See :meth:`Environment.detect`."""
        started_by_srun = read(env, "SLURM_STEP_ID", "SLURM_STEPID") and read(env, "SLURM_PROCID")
        if started_by_srun and not read(env, "MPI_LOCALRANKID"):
            return None
        return super().detect(env)


@final
class SlurmEnvironment(_Launcher):
    """The variables of a step that ``srun`` started, one process per task; rank 0 is on the first host of the step.

    The body of an ``sbatch`` script and an interactive shell (``salloc``, ``srun --pty bash``) carry variables of
    SLURM too, but SLURM did not start one process per task there, so they are not this environment. A step of several
    tasks with a pseudo-terminal is: an srun inside an interactive shell inherits the shell's terminal variables.
    """

    name = "slurm"
    _rank = ("SLURM_PROCID",)
    _world_size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    _local_rank = ("SLURM_LOCALID",)
    _local_world_size = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    _node_rank = ("SLURM_NODEID",)
    _hosts = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    _job_id = (("SLURM_JOB_ID", "SLURM_JOBID"), ("SLURM_STEP_ID", "SLURM_STEPID"))

    def detect(self, env: Mapping[str, str]) -> World | None:
        """See :meth:`Environment.detect`."""
        step = read_integer(env, "SLURM_STEP_ID", "SLURM_STEPID")
        is_shell = read(env, "SLURM_PTY_PORT") and read_integer(env, *self._world_size) == 1
        return (
            None
            if step is None or step >= _FIRST_RESERVED_STEP or is_shell
            else super().detect(env)
        )


# The innermost launcher first. Ray sets torchrun's variables and more. The variables of torchrun, of fabric's own
# launchers and those set by hand always win. mpirun precedes SLURM because in a SLURM job it starts its daemons with
# srun: its processes then have the variables of both, and SLURM's describe the daemons.
_INNERMOST_FIRST = [
    kind()
    for kind in (
        RayEnvironment,
        TorchrunEnvironment,
        OpenMPIEnvironment,
        MPICHEnvironment,
        SlurmEnvironment,
    )
]
