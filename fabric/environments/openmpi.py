"""A process that Open MPI's ``mpirun`` (or ``mpiexec``, or PRRTE's ``prterun``) started."""

from collections.abc import Mapping
from typing import final

from fabric.environments.base import derive_node_rank, read, rendezvous, require
from fabric.world import World

__all__ = ["OpenMPIEnvironment"]

# What names one mpirun among others, the same in all of its processes: since release 4, before it, and before 3.
_IDENTITIES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")


@final
class OpenMPIEnvironment:
    """``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE`` and their ``LOCAL`` counterparts.

    ``OMPI_COMM_WORLD_NODE_RANK`` is not a number of a node but the rank on it across jobs, and is not read.
    """

    name: str = "openmpi"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This process's place; on several nodes ``MASTER_ADDR`` has to tell where rank 0 is.

        Raises:
            ConfigurationError: a rank without a size or a place on the node, or several nodes without ``MASTER_ADDR``.
        """
        if read(env, "OMPI_COMM_WORLD_RANK") is None:
            return None
        rank, world_size, local_rank, local_world_size = require(
            env,
            self.name,
            ("OMPI_COMM_WORLD_RANK",),
            ("OMPI_COMM_WORLD_SIZE",),
            ("OMPI_COMM_WORLD_LOCAL_RANK",),
            ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        )
        address, port = rendezvous(
            env,
            launcher=self.name,
            world_size=world_size,
            local_world_size=local_world_size,
            identity=read(env, *_IDENTITIES),
            passing="mpirun -x {} ...",
        )
        return World(
            rank=rank,
            local_rank=local_rank,
            node_rank=derive_node_rank(rank, local_rank, world_size, local_world_size),
            world_size=world_size,
            local_world_size=local_world_size,
            address=address,
            port=port,
        )
