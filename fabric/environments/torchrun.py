"""torchrun's variables, whoever set them: torchrun, fabric's own launchers, or a person."""

from collections.abc import Mapping
from typing import final

from fabric.environments.base import read, rendezvous
from fabric.errors import ConfigurationError
from fabric.world import World

__all__ = ["TorchrunEnvironment"]

_SIGNS_OF_A_JOB = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@final
class TorchrunEnvironment:
    """``RANK`` and ``WORLD_SIZE``, with ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK`` and the rendezvous.

    ``WORLD_SIZE`` without ``RANK`` is not this environment: scripts for SLURM often export the one and leave the other
    to srun. ``RANK`` without ``WORLD_SIZE``, next to another variable of a job, is an error: each process would train
    alone. So are several processes without a place to meet.
    """

    name: str = "torchrun"

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This process's place, from :meth:`fabric.world.World.from_env`; ``None`` without a rank and a size.

        Raises:
            ConfigurationError: the variables are incomplete, contradict each other, or name no place to meet.
        """
        world = World.from_env(env)
        if world is None:
            _refuse_rank_alone(env)
        elif world.store is None:
            # Checked here rather than in World, whose defaults are right for a process that has nobody to meet.
            rendezvous(
                env,
                launcher="torchrun, or by hand with RANK and WORLD_SIZE",
                world_size=world.world_size,
                local_world_size=world.local_world_size,
                passing="export {}   # in every process, or let torchrun do it",
            )
        return world


def _refuse_rank_alone(env: Mapping[str, str]) -> None:
    rank = read(env, "RANK")
    signs = [f"{name}={env[name]}" for name in _SIGNS_OF_A_JOB if read(env, name)]
    if rank is None or not signs:
        return
    raise ConfigurationError(
        f"RANK={rank} and {', '.join(signs)} in the environment",
        "WORLD_SIZE is missing: every process of the job would train alone",
        "RANK together with WORLD_SIZE, as torchrun sets them; neither of them for a single process",
        "export WORLD_SIZE=<number of processes>   # or: unset RANK",
    )
