"""Environments that read the rank of a process from the variables that Lightning reads."""

import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.elastic.utils.distributed import get_free_port as find_free_network_port

from fabric import environments
from fabric.world import read_integer_variable, read_variable

_DEFAULT_PORT = 12910  # Lightning's port where no variable has another


def rank_of_process() -> int | None:
    """Return the rank that launchers have set, or None if no launcher started this process."""
    # The first variable that is set counts. SLURM's variable is not the first: SLURM sets it also
    # where another launcher starts the processes.
    return read_integer_variable(
        os.environ, "RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"
    )


class ClusterEnvironment(ABC):
    """The base class of users' environments, which tell the place of a process in its job."""

    @classmethod
    def detect(cls) -> bool:
        """Return whether the launcher of this environment started the process."""
        return False

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool: ...

    @property
    @abstractmethod
    def main_address(self) -> str: ...

    @property
    @abstractmethod
    def main_port(self) -> int: ...

    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def global_rank(self) -> int: ...

    @abstractmethod
    def local_rank(self) -> int: ...

    @abstractmethod
    def node_rank(self) -> int: ...

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise an error if the launcher has started another number of processes.

        ``Fabric`` calls this method of an environment that the user passes. The default does
        nothing.

        Args:
            num_devices: The number of processes of this node.
            num_nodes: The number of nodes.
        """

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Subclasses may override the methods below."""

    set_world_size = _do_nothing
    set_global_rank = _do_nothing
    teardown = _do_nothing


class LightningEnvironment(ClusterEnvironment):
    """No launcher, or processes that the user started with ``LOCAL_RANK`` and ``NODE_RANK``."""

    _world_size = 1
    _global_rank = 0
    _free_port: int | None = None

    @property
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @classmethod
    def detect(cls) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of rank 0. Without ``MASTER_PORT``, a free port, which stays the same."""
        port = read_integer_variable(os.environ, "MASTER_PORT") or self._free_port
        if port is None:
            port = find_free_network_port()
            self._free_port = port
        return port

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        return read_integer_variable(os.environ, "NODE_RANK", "GROUP_RANK") or 0

    def teardown(self) -> None:
        """Remove the number of processes of this job, which a later job would read."""
        os.environ.pop("WORLD_SIZE", None)


class _VariableEnvironment(ClusterEnvironment):
    """The base class of environments whose launcher sets a variable for each number.

    A subclass sets the names of the variables. A property or method whose variable the launcher has
    not set raises a KeyError.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    _world_size_name: ClassVar[str]
    _rank_name: ClassVar[str]
    _local_rank_name: ClassVar[str]
    _node_rank_name: ClassVar[str]

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    def _read(self, name: str) -> int:
        return int(os.environ[name])

    def world_size(self) -> int:
        return self._read(self._world_size_name)

    def global_rank(self) -> int:
        return self._read(self._rank_name)

    def local_rank(self) -> int:
        return self._read(self._local_rank_name)

    def node_rank(self) -> int:
        return self._read(self._node_rank_name)


class TorchElasticEnvironment(_VariableEnvironment):
    """torchrun, ``fabric run`` and launchers that set the same variables."""

    _world_size_name = "WORLD_SIZE"
    _rank_name = "RANK"
    _local_rank_name = "LOCAL_RANK"

    @classmethod
    def detect(cls) -> bool:
        if read_variable(os.environ, "FABRIC_STORE"):
            return True  # fabric's own launchers started this rank
        return "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", _DEFAULT_PORT))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        world_size = self.world_size()
        if num_devices * num_nodes != world_size:
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} are {num_devices * num_nodes} "
                f"processes, and the launcher has started {world_size}"
            )


class KubeflowEnvironment(_VariableEnvironment):
    """Kubeflow's PyTorchJob, with one process in each pod.

    The class does not detect its launcher, whose variables are those of torchrun.
    """

    _world_size_name = "WORLD_SIZE"
    _rank_name = "RANK"
    _node_rank_name = "RANK"

    @classmethod
    def detect(cls) -> bool:
        raise NotImplementedError(
            "KubeflowEnvironment.detect(): write Fabric(plugins=KubeflowEnvironment())"
        )

    def local_rank(self) -> int:
        return 0


class SLURMEnvironment(_VariableEnvironment):
    """SLURM. ``auto_requeue`` and ``requeue_signal`` have no effect without Lightning's Trainer."""

    _world_size_name = "SLURM_NTASKS"
    _rank_name = "SLURM_PROCID"
    _local_rank_name = "SLURM_LOCALID"
    _node_rank_name = "SLURM_NODEID"

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal

    @classmethod
    def detect(cls) -> bool:
        return "SLURM_NTASKS" in os.environ and not _is_slurm_interactive_mode()

    @property
    def main_address(self) -> str:
        address = os.environ.get("MASTER_ADDR")
        if address is None:
            address = self.resolve_root_node_address(os.environ.get("SLURM_NODELIST", "127.0.0.1"))
        return address

    @property
    def main_port(self) -> int:
        port = read_integer_variable(os.environ, "MASTER_PORT")
        if port is not None:
            return port
        job_id = os.environ.get("SLURM_JOB_ID")
        if job_id is None:
            return _DEFAULT_PORT
        # All processes of a job compute the same port, as in Lightning. Ports go up to 65535.
        return 15000 + int(job_id[-4:])

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first host of a list of nodes, such as ``host5`` of ``host[5-9],login``."""
        # The names may be separated by commas, by spaces, or by both.
        node_list = ",".join(nodes.replace(",", " ").split())
        variables = {"SLURM_NODELIST": node_list}
        first_host = environments.SlurmEnvironment()._read_first_host(variables)
        return first_host or nodes

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if _is_slurm_interactive_mode():
            return  # SLURM has started a shell, and no processes
        num_tasks = read_integer_variable(os.environ, "SLURM_NTASKS_PER_NODE")
        if num_tasks not in (None, num_devices):
            raise ValueError(
                f"devices={num_devices}, and SLURM has started --ntasks-per-node={num_tasks}: "
                f"write devices={num_tasks}"
            )
        num_slurm_nodes = read_integer_variable(os.environ, "SLURM_NNODES")
        if num_slurm_nodes not in (None, num_nodes):
            raise ValueError(
                f"num_nodes={num_nodes}, and SLURM has started --nodes={num_slurm_nodes}: write "
                f"num_nodes={num_slurm_nodes}"
            )

    @staticmethod
    def job_id() -> int | None:
        """Return the number of the job. None outside of SLURM, and in a shell."""
        job_id = os.environ.get("SLURM_JOB_ID", "")
        if _is_slurm_interactive_mode() or not job_id.isdigit():
            return None
        return int(job_id)

    @staticmethod
    def job_name() -> str | None:
        return os.environ.get("SLURM_JOB_NAME")


def _is_slurm_interactive_mode() -> bool:
    return SLURMEnvironment.job_name() in ("bash", "interactive")


class LSFEnvironment(_VariableEnvironment):
    """LSF, whose ``jsrun`` starts the processes on the hosts in a file.

    Raises:
        ValueError: A variable of LSF is missing, or the file has no hosts.
    """

    _world_size_name = "JSM_NAMESPACE_SIZE"
    _rank_name = "JSM_NAMESPACE_RANK"
    _local_rank_name = "JSM_NAMESPACE_LOCAL_RANK"

    def __init__(self) -> None:
        self._hosts = self._read_hosts()
        self._port = self._read_port()

    @classmethod
    def detect(cls) -> bool:
        names = {"LSB_JOBID", "LSB_DJOB_RANKFILE", cls._local_rank_name, cls._world_size_name}
        return names <= os.environ.keys()

    @staticmethod
    def _read_hosts() -> list[str]:
        """Return the hosts of the processes, in their order. Each host is there once."""
        file_name = os.environ.get("LSB_DJOB_RANKFILE")
        if not file_name:
            raise ValueError("LSFEnvironment: the variable LSB_DJOB_RANKFILE is not set, or empty")
        lines = Path(file_name).read_text().split()
        # The first line is the host that submits the job. It runs no process.
        hosts = list(dict.fromkeys(lines[1:]))
        if not hosts:
            raise ValueError(f"LSFEnvironment: the file {file_name!r} has no hosts")
        return hosts

    @staticmethod
    def _read_port() -> int:
        """Return the port of rank 0. All processes of a job compute the same, as in Lightning."""
        port = read_integer_variable(os.environ, "MASTER_PORT")
        if port is not None:
            return port
        job_id = read_integer_variable(os.environ, "LSB_JOBID")
        if job_id is None:
            raise ValueError("LSFEnvironment: the variable LSB_JOBID is not set")
        return 10000 + job_id % 1000

    def _read(self, name: str) -> int:
        number = read_integer_variable(os.environ, name)
        if number is None:
            raise ValueError(f"LSFEnvironment: the variable {name} is not set: start with jsrun")
        return number

    @property
    def main_address(self) -> str:
        return self._hosts[0]

    @property
    def main_port(self) -> int:
        return self._port

    def node_rank(self) -> int:
        return self._hosts.index(socket.gethostname())


class MPIEnvironment(ClusterEnvironment):
    """Open MPI, MPICH and Intel MPI, as fabric detects them. mpi4py is not needed.

    Raises:
        ConfigurationError: Several nodes have no ``MASTER_ADDR``.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    _environments = (environments.OpenMPIEnvironment(), environments.MPICHEnvironment())

    @classmethod
    def detect(cls) -> bool:
        return environments.detect(os.environ, cls._environments) is not None

    @property
    def _world(self) -> Any:
        """The place of this process in its job, from the variables of the launcher."""
        detected = environments.detect(os.environ, self._environments)
        if detected is None:
            # The error is that of other environments, whose launcher has not set a variable.
            raise KeyError("OMPI_COMM_WORLD_RANK")
        _, world = detected
        return world

    @property
    def main_address(self) -> str:
        return self._world.address

    @property
    def main_port(self) -> int:
        return self._world.port

    def world_size(self) -> int:
        return self._world.world_size

    def global_rank(self) -> int:
        return self._world.rank

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node_rank


def find_cluster_environment() -> ClusterEnvironment:
    """Return the environment of the launcher that started this process.

    The first environment that detects its launcher counts, in Lightning's order.
    """
    for environment_class in (
        TorchElasticEnvironment,
        SLURMEnvironment,
        LSFEnvironment,
        MPIEnvironment,
    ):
        if environment_class.detect():
            return environment_class()
    return LightningEnvironment()
