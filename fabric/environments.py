"""The launchers that fabric recognizes by their environment variables."""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from fabric.errors import ConfigurationError
from fabric.world import World, read_integer_variable, read_variable

__all__ = [
    "Environment",
    "MPICHEnvironment",
    "OpenMPIEnvironment",
    "RayEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "detect",
]


class Environment(Protocol):
    """A launcher that fabric recognizes by the variables it sets.

    Attributes:
        name: the name in messages, such as ``"slurm"``.
    """

    name: str

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job, or None if another launcher started it.

        This is a pure function of the mapping.

        Args:
            env: an environment mapping, such as ``os.environ``.

        Raises:
            ConfigurationError: the launcher is recognized, and its variables are incomplete or
                contradict each other.
        """


def detect(
    env: Mapping[str, str], environments: Sequence[Environment] | None = None
) -> tuple[Environment, World] | None:
    """Find the launcher that started this process, and the place of this process in its job.

    Args:
        env: an environment mapping, such as ``os.environ``. Nothing else is read.
        environments: the candidates. The first that recognizes its variables wins. None tries Ray
            Train, torchrun (and whatever sets its variables), Open MPI, MPICH and Intel MPI, SLURM.

    Returns:
        The environment and the world that it returned, or None if no launcher started this process.

    Raises:
        ConfigurationError: a launcher is recognized, and its variables are incomplete or contradict
            each other.
    """
    if environments is None:
        environments = _INNERMOST_FIRST
    for environment in environments:
        world = environment.detect(env)
        if world is not None:
            return environment, world
    return None


# Steps that srun did not start have ids just below 2**32: the batch script, the interactive shell
# of salloc, and the external step of a prolog or an ssh session.
_FIRST_RESERVED_STEP = 2**32 - 16

_HOST = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9][0-9,-]*\])+(?=,|$)")
_RANGE = re.compile(r"\[(?P<first>[0-9]+)[0-9,-]*\]")
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<nodes>[0-9]+)\))?")

# Below 32768, where Linux begins to assign ports to outgoing connections, and above most registered
# services.
_FIRST_PORT = 10_000
_PORT_COUNT = 20_000

# The names of one variable in different releases of a launcher. The first that is set is used.
_Names = tuple[str, ...]


class _VariableEnvironment:
    """An environment defined by the names of its launcher's variables.

    Attributes:
        _rank: the global rank.
        _world_size: the number of processes of the job.
        _local_rank: the rank on this node.
        _local_world_size: the number of processes on this node, or on each node as SLURM writes it.
        _node_rank: the number of this node. Without names it is derived from the ranks.
        _hosts: the hosts of the job, as SLURM writes them.
        _job_id: variables that together identify the job. They are equal in all its processes.
    """

    name: str
    _rank: _Names
    _world_size: _Names
    _local_rank: _Names
    _local_world_size: _Names
    _node_rank: _Names = ()
    _hosts: _Names = ()
    _job_id: tuple[_Names, ...] = ()

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job. See :meth:`Environment.detect`."""
        rank = read_integer_variable(env, *self._rank)
        if rank is None:
            return None
        world_size = self._require(env, self._world_size)
        local_rank = 0
        node_rank = 0
        local_world_size = 1
        if world_size > 1:
            local_rank = self._require(env, self._local_rank)
            if self._node_rank:
                node_rank = self._require(env, self._node_rank)
            local_world_size = self._tasks_on_node(env, node_rank)
            if not self._node_rank:
                node_rank = _derive_node_rank(rank, local_rank, world_size, local_world_size)
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
        """Return the integer of a variable. A process without it cannot know its place."""
        value = read_integer_variable(env, *names)
        if value is None:
            # A process that guessed would train alone, or on the device of another rank.
            raise ConfigurationError(
                f"the place of this process in a job of {self.name}",
                problem=f"{self.name} started this process and did not set {' or '.join(names)}",
                expected=f"all variables that {self.name} sets, passed on to the script unchanged",
                suggestion="set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT by hand: they take precedence",
            )
        return value

    def _tasks_on_node(self, env: Mapping[str, str], node: int) -> int:
        """Return the number of tasks on one node.

        SLURM has a list for all nodes, in which ``2(x3),1`` means 2, 2, 2 and 1.
        """
        value = read_variable(env, *self._local_world_size) or ""
        counts = _parse_task_counts(value)
        if not 0 <= node < len(counts):
            raise ConfigurationError(
                f"{' or '.join(self._local_world_size)} set to {value!r}",
                problem=f"it does not give the number of processes on node {node}",
                expected="a number; under SLURM, numbers per node as in '4', '2(x3)' or '2(x3),1'",
                suggestion="export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand: they "
                "take precedence",
            )
        return counts[node]

    def _find_rendezvous(
        self, env: Mapping[str, str], world_size: int, local_world_size: int
    ) -> tuple[str, int | None]:
        """Return the address and the port at which the processes connect.

        They are those of ``MASTER_ADDR`` and ``MASTER_PORT`` if set, and otherwise derived from the
        variables of the job. A single process needs no port.
        """
        address = read_variable(env, "MASTER_ADDR")
        if address is None and local_world_size == world_size:
            address = "127.0.0.1"
        if address is None:
            address = self._first_host(env)
        port = read_integer_variable(env, "MASTER_PORT")
        if port is None and world_size > 1:
            port = self._derive_port(env)

        if address is None:
            name = "MASTER_ADDR"
            value = "host of rank 0"
        elif port is None and world_size > 1:
            name = "MASTER_PORT"
            value = "port"
        else:
            return address, port
        raise ConfigurationError(
            f"a job of {world_size} processes of {self.name}, {local_world_size} of them on this "
            "node",
            problem=f"{name} is not set, and cannot be derived from the other variables",
            expected="MASTER_ADDR with the host name of rank 0's node, and MASTER_PORT with a free "
            "port of that node, in every process",
            suggestion=f"export {name}=<{value}>   # before srun or mpiexec; Open MPI: mpirun -x "
            f"{name} ...",
        )

    def _derive_port(self, env: Mapping[str, str]) -> int | None:
        """Return a port derived from the id of the job, or None if the id is not complete."""
        values: list[str] = []
        for names in self._job_id:
            value = read_variable(env, *names)
            if value is None:
                return None
            values.append(value)
        if not values:
            return None
        return _FIRST_PORT + zlib.crc32(".".join(values).encode()) % _PORT_COUNT

    def _first_host(self, env: Mapping[str, str]) -> str | None:
        """Return the first host of a SLURM node list, or None if no list begins with a host.

        It is n03 for ``n[03-05,7],m1``, and rack1n3-ib for ``rack[1-2]n[3-4]-ib``.
        """
        match = _HOST.match(read_variable(env, *self._hosts) or "")
        if match is None:
            return None
        return _RANGE.sub(r"\g<first>", match.group())


def _derive_node_rank(rank: int, local_rank: int, world_size: int, local_world_size: int) -> int:
    """Return the number of this node, if all nodes have equally many processes."""
    nodes = -(-world_size // local_world_size)
    is_filled_in_order = rank % local_world_size == local_rank
    if is_filled_in_order:
        return rank // local_world_size
    return rank % nodes  # consecutive ranks are on different nodes


def _parse_task_counts(text: str) -> list[int]:
    """Return the number of tasks of each node, or an empty list if the text is malformed."""
    counts: list[int] = []
    for field in text.split(","):
        match = _TASKS.fullmatch(field.strip())
        if match is None:
            return []
        nodes = int(match["nodes"] or 1)
        counts.extend([int(match["tasks"])] * nodes)
    return counts


@final
class TorchrunEnvironment(_VariableEnvironment):
    """The variables of ``torchrun``.

    They are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``,
    ``MASTER_ADDR`` and ``MASTER_PORT``.

    torchrun, fabric's own launchers and users set these variables. ``WORLD_SIZE`` without ``RANK``
    is not this environment: scripts for SLURM often export ``WORLD_SIZE`` alone and leave the rank
    to srun. ``RANK`` without ``WORLD_SIZE``, next to another variable of a job, is an error, since
    each process would train alone. Several processes without an address and a port are an error,
    too.
    """

    name = "torchrun"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job. See :meth:`Environment.detect`."""
        world = World.from_env(env)
        if world is None:
            self._check_unset(env)
        elif world.store is None:
            # Checked here and not in World, whose defaults are right for a process without peers.
            self._find_rendezvous(env, world.world_size, world.local_world_size)
        return world

    def _check_unset(self, env: Mapping[str, str]) -> None:
        """Raise if ``RANK`` and another variable of a job are set, but not ``WORLD_SIZE``."""
        job_variables: list[str] = []
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            if read_variable(env, name):
                job_variables.append(f"{name}={env[name]}")
        if read_variable(env, "RANK") and job_variables:
            raise ConfigurationError(
                f"RANK={env['RANK']} and {', '.join(job_variables)} in the environment",
                problem="WORLD_SIZE is missing: every process of the job would train alone",
                expected="both RANK and WORLD_SIZE, as torchrun sets them; neither for a single "
                "process",
                suggestion="export WORLD_SIZE=<number of processes>   # or: unset RANK",
            )


@final
class RayEnvironment:
    """A worker of Ray Train's ``TorchTrainer``.

    Ray connects the processes before it calls the training function.
    """

    name = "ray"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job. See :meth:`Environment.detect`."""
        # Ray sets torchrun's variables except GROUP_RANK. torchrun inside a worker sets GROUP_RANK.
        is_torchrun_inside = read_variable(env, "GROUP_RANK") is not None
        if (
            is_torchrun_inside
            or not read_variable(env, "RAY_JOB_ID")
            or not read_variable(env, "NODE_RANK")
        ):
            return None
        return World.from_env({**env, "GROUP_RANK": env["NODE_RANK"]})


@final
class OpenMPIEnvironment(_VariableEnvironment):
    """Open MPI's ``mpirun``, ``mpiexec`` or ``prterun``; several nodes need ``MASTER_ADDR``."""

    name = "openmpi"
    _rank = ("OMPI_COMM_WORLD_RANK",)
    _world_size = ("OMPI_COMM_WORLD_SIZE",)
    _local_rank = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    _local_world_size = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    # OMPI_COMM_WORLD_NODE_RANK is not the number of a node: it counts the processes of all jobs on
    # a node.
    _job_id = (("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),)


@final
class MPICHEnvironment(_VariableEnvironment):
    """``mpiexec`` of MPICH or Intel MPI (Hydra), or of a Cray system (PALS).

    Several nodes need ``MASTER_ADDR``. MPICH's own ``mpiexec`` sets nothing that distinguishes one
    job from another, so several processes need ``MASTER_PORT``. ``srun`` can set ``PMI_*``
    variables, too: a step of SLURM without Hydra's own variables is left to SLURM.
    """

    name = "mpich"
    _rank = ("PMI_RANK",)
    _world_size = ("PMI_SIZE",)
    _local_rank = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    _local_world_size = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    # Intel MPI, PALS, and Hydra with -pmi-port. The id of a batch job would not do: two mpiexec in
    # one job would use the same port.
    _job_id = (("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_PORT"),)

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job. See :meth:`Environment.detect`."""
        started_by_srun = read_variable(env, "SLURM_STEP_ID", "SLURM_STEPID") and read_variable(
            env, "SLURM_PROCID"
        )
        if started_by_srun and not read_variable(env, "MPI_LOCALRANKID"):
            return None
        return super().detect(env)


@final
class SlurmEnvironment(_VariableEnvironment):
    """A step that ``srun`` started, with one process per task. Rank 0 is on the step's first host.

    The body of an ``sbatch`` script and an interactive shell (``salloc``, ``srun --pty bash``) have
    variables of SLURM, too, but SLURM did not start one process per task in them, so they are not
    this environment. A step of several tasks with a pseudo-terminal is this environment, because an
    srun inside an interactive shell inherits the shell's terminal variables.
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
        """Return the place of this process in its job. See :meth:`Environment.detect`."""
        step = read_integer_variable(env, "SLURM_STEP_ID", "SLURM_STEPID")
        if step is None or step >= _FIRST_RESERVED_STEP:
            return None
        if (
            read_variable(env, "SLURM_PTY_PORT")
            and read_integer_variable(env, *self._world_size) == 1
        ):
            return None  # an interactive shell
        return super().detect(env)


# Ray sets torchrun's variables and more. The variables of torchrun, of fabric's own launchers and
# those set by hand always win over the following launchers. mpirun precedes SLURM because in a
# SLURM job mpirun starts its daemons with srun: its processes then have the variables of both
# launchers, and those of SLURM describe the daemons.
_INNERMOST_FIRST: list[Environment] = [
    RayEnvironment(),
    TorchrunEnvironment(),
    OpenMPIEnvironment(),
    MPICHEnvironment(),
    SlurmEnvironment(),
]
