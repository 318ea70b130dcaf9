"""A process that ``mpiexec`` of MPICH or Intel MPI (Hydra), or of a Cray system (PALS), started."""

from collections.abc import Mapping
from typing import final

from fabric.environments.base import derive_node_rank, read, read_integer, rendezvous, require
from fabric.world import World

__all__ = ["MPICHEnvironment"]

# What names one mpiexec among others, the same in all of its processes: Intel MPI, PALS, and Hydra with -pmi-port.
# Hydra otherwise sets nothing of the kind, and the id of a batch job will not do: two mpiexec in one job would meet.
_IDENTITIES = ("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_PORT")


@final
class MPICHEnvironment:
    """``PMI_RANK`` and ``PMI_SIZE``, with ``MPI_LOCALRANKID`` and ``MPI_LOCALNRANKS`` (``PMI_LOCAL_*`` under PALS).

    ``srun`` can set ``PMI_*`` variables too. Without Hydra's own, a step of SLURM is left to SLURM, whose variables
    tell more.
    """

    name: str = "mpich"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This process's place; on several nodes ``MASTER_ADDR`` has to tell where rank 0 is.

        MPICH's own ``mpiexec`` sets nothing that tells one job from another, so several processes need ``MASTER_PORT``.

        Raises:
            ConfigurationError: a rank without a size or a place on the node, several nodes without ``MASTER_ADDR``, or
                no way to find a port.
        """
        if read(env, "PMI_RANK") is None or _left_to_slurm(env):
            return None
        alone = read_integer(env, "PMI_SIZE") == 1
        rank, world_size, local_rank, local_world_size = require(
            {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", **env} if alone else env,
            self.name,
            ("PMI_RANK",),
            ("PMI_SIZE",),
            ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
            ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        )
        address, port = rendezvous(
            env,
            launcher=self.name,
            world_size=world_size,
            local_world_size=local_world_size,
            identity=read(env, *_IDENTITIES),
            passing="env {} mpiexec ...",
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


def _left_to_slurm(env: Mapping[str, str]) -> bool:
    in_step = read(env, "SLURM_STEP_ID", "SLURM_STEPID") is not None and read(env, "SLURM_PROCID") is not None
    return in_step and read(env, "MPI_LOCALRANKID") is None
