"""The launchers that fabric recognizes by the environment variables that they set.

A launcher such as ``srun`` starts the processes of a job, and tells each process its rank in
variables.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, final

from fabric.errors import ConfigurationError
from fabric.world import World, read_integer_variable, read_variable

__all__ = [
    "Environment",
    "MPICHEnvironment",
    "Machines",
    "OpenMPIEnvironment",
    "RayEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "detect",
    "find_machines",
    "refuse_to_train_alone",
]


class Environment(Protocol):
    """The interface of a launcher that fabric recognizes by the variables it sets.

    Attributes:
        name: the name in messages, such as ``"slurm"``.
    """

    name: str

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job. None if this launcher did not start it.

        Implementations read only ``env``, and have no effects.

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
        environments: the candidates. The first one that recognizes its variables wins. None tries
            Ray Train, torchrun (and everything else that sets torchrun's variables), Open MPI,
            MPICH and Intel MPI, and SLURM, in this order.

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


class Machines(NamedTuple):
    """The machines of a job on a platform that starts one command on each machine.

    The command has to start the processes of its machine, as ``fabric run`` does.

    Attributes:
        variables: the variables that describe the machines, as a text for errors.
        num_nodes: how many machines there are. None if their number may change during the job.
        node_rank: the number of this machine.
        main_address: the host name of machine 0. None if it is not known.
        main_port: a free port of machine 0. None if it is not known.
        num_processes: how many processes to start on a machine. None if it is not known.
    """

    variables: str
    num_nodes: int | None
    node_rank: int
    main_address: str | None = None
    main_port: int | None = None
    num_processes: int | None = None


def find_machines(env: Mapping[str, str]) -> Machines | None:
    """Return the machines that the variables of a platform describe, or None.

    The variables are those of Kubeflow Trainer or SkyPilot.

    Args:
        env: an environment mapping, such as ``os.environ``.

    Returns:
        The machines. None if no platform has set its variables, or if there is only one machine.

    Raises:
        ConfigurationError: a variable is not a number.
    """
    nodes_text = read_variable(env, "PET_NNODES")
    if nodes_text is not None:
        return _find_kubeflow_machines(env, nodes_text)
    return _find_skypilot_machines(env)


def _find_kubeflow_machines(env: Mapping[str, str], nodes_text: str) -> Machines | None:
    """Return the machines that the variables of Kubeflow Trainer describe. None for one machine.

    torchrun reads the same variables as the defaults of its options.

    Args:
        env: the environment variables.
        nodes_text: the number of machines, or a range such as ``"1:4"``.
    """
    variables = f"PET_NNODES={nodes_text}"
    node_rank = read_integer_variable(env, "PET_NODE_RANK") or 0
    _, colon, largest_text = nodes_text.partition(":")
    is_range = colon != ""
    if is_range:
        if largest_text == "1":
            return None
        # The number of machines may change while the job runs.
        return Machines(variables, num_nodes=None, node_rank=node_rank)
    num_nodes = read_integer_variable(env, "PET_NNODES")
    if num_nodes == 1:
        return None
    # The number of processes may also be "auto", "cpu" or "gpu".
    processes_text = read_variable(env, "PET_NPROC_PER_NODE") or ""
    num_processes = int(processes_text) if processes_text.isdecimal() else None
    return Machines(
        variables=variables,
        num_nodes=num_nodes,
        node_rank=node_rank,
        main_address=read_variable(env, "PET_MASTER_ADDR"),
        main_port=read_integer_variable(env, "PET_MASTER_PORT"),
        num_processes=num_processes,
    )


def _find_skypilot_machines(env: Mapping[str, str]) -> Machines | None:
    """Return the machines that the variables of SkyPilot describe.

    The result is None without these variables, or for one machine.
    """
    num_nodes = read_integer_variable(env, "SKYPILOT_NUM_NODES")
    if num_nodes is None or num_nodes == 1:
        return None
    node_rank = read_integer_variable(env, "SKYPILOT_NODE_RANK") or 0
    # One address a line, in the order of the machines.
    addresses = (read_variable(env, "SKYPILOT_NODE_IPS") or "").split()
    main_address = addresses[0] if addresses else None
    return Machines(
        variables=f"SKYPILOT_NUM_NODES={num_nodes}",
        num_nodes=num_nodes,
        node_rank=node_rank,
        main_address=main_address,
    )


def refuse_to_train_alone(env: Mapping[str, str]) -> None:
    """Raise if a platform's variables describe several machines.

    Called only in a process that no launcher has started. Such a process would train alone.

    Args:
        env: an environment mapping, such as ``os.environ``.

    Raises:
        ConfigurationError: the job has several machines, each of which would train alone.
    """
    machines = find_machines(env)
    if machines is None:
        return
    # ``fabric run`` needs a fixed number of machines. torchrun reads the same variables, and lets
    # the number change during the job.
    has_fixed_number = machines.num_nodes is not None
    command = "fabric run" if has_fixed_number else "torchrun"
    raise ConfigurationError(
        f"{machines.variables} in the environment",
        problem="the job has several machines, and no launcher has started this process: every "
        "machine would train alone",
        expected="a launcher on each machine, which reads these variables",
        suggestion=f"{command} train.py in place of python train.py. Or "
        'Fabric(environment="none") to train on this machine alone',
    )


# SLURM reserves the step ids from here to 2**32 for steps that srun did not start: the batch
# script, the interactive shell of salloc, and the external step of a prolog or an ssh session.
_FIRST_RESERVED_STEP = 2**32 - 16

# The first entry of a SLURM node list, such as "n[03-05,7]" of "n[03-05,7],m1".
_HOST = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9][0-9,-]*\])+(?=,|$)")
# The numbers in such an entry, such as "[03-05,7]".
_RANGE = re.compile(r"\[(?P<first>[0-9]+)[0-9,-]*\]")
# The number of tasks of one node or of several nodes: "2", or "2(x3)" for three nodes.
_TASKS = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<nodes>[0-9]+)\))?")

# The ports from 10,000 to 29,999 are above most registered services, and below 32,768, where Linux
# begins to assign ports to outgoing connections.
_FIRST_PORT = 10_000
_PORT_COUNT = 20_000

# The names of one variable in different releases of a launcher. The first one that is set is used.
_Names = tuple[str, ...]


class _VariableEnvironment:
    """The base class of environments that are defined by the names of their launcher's variables.

    Each attribute holds the names of one variable in different releases of the launcher.

    Attributes:
        _rank_names: the variable of the global rank.
        _world_size_names: the number of processes of the job.
        _local_rank_names: the rank on this node.
        _local_world_size_names: the number of processes on this node. Under SLURM, a list of the
            numbers on all nodes.
        _node_rank_names: the number of this node. Empty if the launcher has no such variable. Then
            the number is derived from the ranks.
        _host_list_names: SLURM's node list. Empty under the other launchers.
        _job_id_names: the variables that together identify the job, each as a tuple of its names.
            The values are equal in all processes of the job.
    """

    name: str
    _rank_names: _Names
    _world_size_names: _Names
    _local_rank_names: _Names
    _local_world_size_names: _Names
    _node_rank_names: _Names = ()
    _host_list_names: _Names = ()
    _job_id_names: tuple[_Names, ...] = ()

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job, or None. See :meth:`Environment.detect`."""
        rank = read_integer_variable(env, *self._rank_names)
        if rank is None:  # this launcher did not start the process
            return None
        world_size = self._read_required_integer(env, self._world_size_names)
        # The values in a job of one process, for which launchers may not set the variables.
        local_rank = 0
        node_rank = 0
        local_world_size = 1
        if world_size > 1:
            local_rank = self._read_required_integer(env, self._local_rank_names)
            # Under SLURM, the number of this node is needed to read local_world_size. Under the
            # launchers without a variable for it, it is derived afterwards.
            if self._node_rank_names:
                node_rank = self._read_required_integer(env, self._node_rank_names)
            local_world_size = self._read_local_world_size(env, node_rank)
            if not self._node_rank_names:
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

    def _read_required_integer(self, env: Mapping[str, str], names: _Names) -> int:
        """Return the integer of a variable that the launcher always sets.

        No default is used: with a wrong value, the process would train alone, or on the device of
        another rank.

        Args:
            env: the environment variables.
            names: the names of the variable.

        Raises:
            ConfigurationError: none of ``names`` is set.
        """
        value = read_integer_variable(env, *names)
        if value is None:
            raise ConfigurationError(
                f"the place of this process in a job of {self.name}",
                problem=f"{self.name} started this process and did not set {' or '.join(names)}",
                expected=f"all variables that {self.name} sets, passed on to the script unchanged",
                suggestion="set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT by hand: they take precedence",
            )
        return value

    def _read_local_world_size(self, env: Mapping[str, str], node_rank: int) -> int:
        """Return the number of processes on this node.

        Args:
            env: the environment variables.
            node_rank: the position of this node in SLURM's list of all nodes, in which
                ``2(x3),1`` means 2, 2, 2 and 1. 0 under the launchers whose variable has only the
                number of this node.

        Raises:
            ConfigurationError: the variable is not set, malformed, or too short.
        """
        text = read_variable(env, *self._local_world_size_names) or ""
        counts = _parse_task_counts(text)
        if not 0 <= node_rank < len(counts):
            raise ConfigurationError(
                f"{' or '.join(self._local_world_size_names)} set to {text!r}",
                problem=f"it does not give the number of processes on node {node_rank}",
                expected="a number; under SLURM, numbers per node as in '4', '2(x3)' or '2(x3),1'",
                suggestion="export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand: they "
                "take precedence",
            )
        return counts[node_rank]

    def _find_rendezvous(
        self, env: Mapping[str, str], world_size: int, local_world_size: int
    ) -> tuple[str, int | None]:
        """Return the address and the port at which the processes connect.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are used if they are set. Otherwise:

        - the address is the loopback address if all processes are on this node, else the first
          host of the node list;
        - the port is derived from the id of the job, or None in a job of one process.

        Raises:
            ConfigurationError: the address or the port cannot be found in ``env``.
        """
        address = read_variable(env, "MASTER_ADDR")
        if address is None and local_world_size == world_size:
            address = "127.0.0.1"
        if address is None:
            address = self._read_first_host(env)
        if address is None:
            raise self._missing_variable_error(
                "MASTER_ADDR",
                description="host of rank 0",
                world_size=world_size,
                local_world_size=local_world_size,
            )

        port = read_integer_variable(env, "MASTER_PORT")
        if port is None and world_size > 1:
            port = self._derive_port(env)
            if port is None:
                raise self._missing_variable_error(
                    "MASTER_PORT",
                    description="port",
                    world_size=world_size,
                    local_world_size=local_world_size,
                )
        return address, port

    def _missing_variable_error(
        self, variable: str, *, description: str, world_size: int, local_world_size: int
    ) -> ConfigurationError:
        """Return the error for a variable of the rendezvous that is neither set nor derived.

        Args:
            variable: the name of the variable.
            description: what the variable has to hold, in words.
            world_size: the number of processes of the job.
            local_world_size: the number of processes on this node.
        """
        return ConfigurationError(
            f"a job of {world_size} processes of {self.name}, {local_world_size} of them on this "
            "node",
            problem=f"{variable} is not set, and cannot be derived from the other variables",
            expected="MASTER_ADDR with the host name of rank 0's node, and MASTER_PORT with a free "
            "port of that node, in every process",
            suggestion=f"export {variable}=<{description}>   # before srun or mpiexec; Open MPI: "
            f"mpirun -x {variable} ...",
        )

    def _derive_port(self, env: Mapping[str, str]) -> int | None:
        """Return a port derived from the id of the job. None if the id is not known.

        All processes of a job derive the same port without communicating. Jobs that share a node
        most likely derive different ports.
        """
        id_parts: list[str] = []
        # Each part of the id is one variable, which has other names in other releases.
        for names in self._job_id_names:
            id_part = read_variable(env, *names)
            if id_part is None:
                return None
            id_parts.append(id_part)
        if not id_parts:
            return None
        # crc32() and not hash(), which differs between processes.
        checksum = zlib.crc32(".".join(id_parts).encode())
        return _FIRST_PORT + checksum % _PORT_COUNT

    def _read_first_host(self, env: Mapping[str, str]) -> str | None:
        """Return the first host of SLURM's node list. None if there is no list, or no host in it.

        The first host of ``n[03-05,7],m1`` is ``n03``, and the first host of ``rack[1-2]n[3-4]-ib``
        is ``rack1n3-ib``.
        """
        host_list = read_variable(env, *self._host_list_names) or ""
        first_entry = _HOST.match(host_list)
        if first_entry is None:
            return None
        # Replace each range in brackets by its first number.
        return _RANGE.sub(r"\g<first>", first_entry.group())


def _derive_node_rank(rank: int, local_rank: int, world_size: int, local_world_size: int) -> int:
    """Return the number of this node, for launchers that have no variable for it.

    All nodes are assumed to have equally many processes. A launcher either puts consecutive ranks
    on one node, or puts rank 0 on node 0, rank 1 on node 1, and so on in turn.
    """
    num_nodes = -(-world_size // local_world_size)  # rounded up
    has_consecutive_ranks = rank % local_world_size == local_rank
    if has_consecutive_ranks:
        return rank // local_world_size
    return rank % num_nodes


def _parse_task_counts(text: str) -> list[int]:
    """Return the number of tasks of each node in a text such as ``"2(x3),1"``: 2, 2, 2 and 1.

    The list is empty if the text is malformed.
    """
    counts: list[int] = []
    for field in text.split(","):
        match = _TASKS.fullmatch(field.strip())
        if match is None:
            return []
        # "2(x3)" means two tasks on each of three nodes, and "2" means two tasks on one node.
        num_nodes = int(match["nodes"] or 1)
        counts.extend([int(match["tasks"])] * num_nodes)
    return counts


@final
class TorchrunEnvironment(_VariableEnvironment):
    """The environment of ``torchrun``, and of everything that sets the variables of torchrun.

    The variables are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``GROUP_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. fabric's own launchers set them, and so do
    some users.

    * ``WORLD_SIZE`` without ``RANK`` is not this environment: scripts for SLURM often export
      ``WORLD_SIZE`` alone and leave the rank to srun.
    * ``RANK`` without ``WORLD_SIZE``, next to another variable of a job, is an error, since each
      process would train alone.
    * Several processes without an address and a port are an error.
    """

    name = "torchrun"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job, or None. See :meth:`Environment.detect`."""
        world = World.from_env(env)
        if world is None:
            self._refuse_missing_world_size(env)  # raises only if RANK is set
        elif world.store is None:
            # Called only for the error that it raises if several processes have no address or port.
            # Processes with a store, which fabric started, need neither.
            self._find_rendezvous(env, world.world_size, world.local_world_size)
        return world

    def _refuse_missing_world_size(self, env: Mapping[str, str]) -> None:
        """Raise if ``RANK`` and another variable of a job are set, but not ``WORLD_SIZE``.

        ``RANK`` alone is no error: programs that are not launchers set it, too.
        """
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
        """Return the place of this process in its job, or None. See :meth:`Environment.detect`."""
        is_ray = read_variable(env, "RAY_JOB_ID") is not None
        node_rank = read_variable(env, "NODE_RANK")
        # Ray sets torchrun's variables except GROUP_RANK. A torchrun that was started in a Ray
        # worker sets GROUP_RANK, and is the launcher of this process.
        is_torchrun_inside = read_variable(env, "GROUP_RANK") is not None
        if not is_ray or node_rank is None or is_torchrun_inside:
            return None
        # from_env() reads the number of the node from GROUP_RANK.
        return World.from_env({**env, "GROUP_RANK": node_rank})


@final
class OpenMPIEnvironment(_VariableEnvironment):
    """Open MPI's ``mpirun``, ``mpiexec`` and ``prterun``.

    A job on several nodes needs ``MASTER_ADDR``, which the user exports.
    """

    name = "openmpi"
    _rank_names = ("OMPI_COMM_WORLD_RANK",)
    _world_size_names = ("OMPI_COMM_WORLD_SIZE",)
    _local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    _local_world_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    # OMPI_COMM_WORLD_NODE_RANK is not the number of a node: it counts the processes of all jobs on
    # a node.
    _job_id_names = (("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),)


@final
class MPICHEnvironment(_VariableEnvironment):
    """``mpiexec`` of MPICH or Intel MPI (Hydra), and of Cray systems (PALS).

    A job on several nodes needs ``MASTER_ADDR``, which the user exports. MPICH's own ``mpiexec``
    sets no id of the job, so that several processes also need ``MASTER_PORT``. ``srun`` may set
    ``PMI_*`` variables, too. A process of ``srun`` without Hydra's own variables belongs to
    :class:`SlurmEnvironment`.
    """

    name = "mpich"
    _rank_names = ("PMI_RANK",)
    _world_size_names = ("PMI_SIZE",)
    _local_rank_names = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    _local_world_size_names = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    # Set by Intel MPI, PALS, and Hydra with -pmi-port. The id of a batch job is not used, because
    # two mpiexec in one batch job would then use the same port.
    _job_id_names = (("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_PORT"),)

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job, or None. See :meth:`Environment.detect`."""
        has_step_id = read_variable(env, "SLURM_STEP_ID", "SLURM_STEPID") is not None
        is_slurm_task = has_step_id and read_variable(env, "SLURM_PROCID") is not None
        # Only Hydra sets this variable. Its mpiexec may start processes with srun, so that they
        # have SLURM's variables, too.
        is_hydra = read_variable(env, "MPI_LOCALRANKID") is not None
        if is_slurm_task and not is_hydra:
            return None  # srun started this process, and has set PMI_* variables
        return super().detect(env)


@final
class SlurmEnvironment(_VariableEnvironment):
    """A step that ``srun`` started, with one process per task. Rank 0 is on the step's first host.

    Some processes have variables of SLURM, but are not ranks: the body of an ``sbatch`` script, and
    an interactive shell (``salloc``, ``srun --pty bash``). They are not this environment. A process
    with the variables of a terminal is a rank if its step has several tasks, since an ``srun``
    inside an interactive shell inherits these variables.
    """

    name = "slurm"
    _rank_names = ("SLURM_PROCID",)
    _world_size_names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    _local_rank_names = ("SLURM_LOCALID",)
    _local_world_size_names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    _node_rank_names = ("SLURM_NODEID",)
    _host_list_names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    _job_id_names = (("SLURM_JOB_ID", "SLURM_JOBID"), ("SLURM_STEP_ID", "SLURM_STEPID"))

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job, or None. See :meth:`Environment.detect`."""
        step_id = read_integer_variable(env, "SLURM_STEP_ID", "SLURM_STEPID")
        if step_id is None or step_id >= _FIRST_RESERVED_STEP:
            return None  # the body of a batch script, or another step that srun did not start
        has_terminal = read_variable(env, "SLURM_PTY_PORT") is not None
        if has_terminal and read_integer_variable(env, *self._world_size_names) == 1:
            return None  # an interactive shell
        return super().detect(env)


# The launchers in the order in which detect() tries them. A process may have the variables of
# several launchers. The innermost of these launchers has started the process.
# - Ray comes before torchrun, whose variables it sets, too.
# - torchrun's variables may be set by hand, and then win over the launchers below.
# - mpirun comes before SLURM. In a SLURM job, mpirun starts its daemons with srun. The processes of
#   mpirun then have SLURM's variables as well, which describe the daemons.
_INNERMOST_FIRST: list[Environment] = [
    RayEnvironment(),
    TorchrunEnvironment(),
    OpenMPIEnvironment(),
    MPICHEnvironment(),
    SlurmEnvironment(),
]
