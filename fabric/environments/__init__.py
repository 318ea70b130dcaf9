"""Who made this process, and which one it is: each launcher's variables read into a :class:`fabric.world.World`."""

from collections.abc import Mapping, Sequence

from fabric.environments.base import Environment
from fabric.environments.mpich import MPICHEnvironment
from fabric.environments.openmpi import OpenMPIEnvironment
from fabric.environments.slurm import SlurmEnvironment
from fabric.environments.torchrun import TorchrunEnvironment
from fabric.world import World

__all__ = [
    "Environment",
    "MPICHEnvironment",
    "OpenMPIEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "detect",
]

# The innermost launcher first. torchrun, fabric's own launchers and variables set by hand are always meant. mpirun
# comes before SLURM because in a SLURM job it starts its daemons with srun: what it launches carries the variables of
# both, and SLURM's then describe the daemons.
_INNERMOST_FIRST: tuple[Environment, ...] = (
    TorchrunEnvironment(),
    OpenMPIEnvironment(),
    MPICHEnvironment(),
    SlurmEnvironment(),
)


def detect(
    env: Mapping[str, str], environments: Sequence[Environment] = _INNERMOST_FIRST
) -> tuple[Environment, World] | None:
    """Find the launcher that made this process, and this process's place in its job.

    Args:
        env: an environment mapping, such as ``os.environ``; nothing else is read.
        environments: whom to ask, in this order; the first that recognises its variables answers. Default: torchrun
            (and whatever sets its variables), Open MPI, MPICH and Intel MPI, SLURM.

    Returns:
        The environment and the world it found, or ``None`` when no launcher made this process.

    Raises:
        ConfigurationError: a launcher is recognised, and its variables are incomplete or contradict each other.
    """
    for environment in environments:
        world = environment.detect(env)
        if world is not None:
            return environment, world
    return None
