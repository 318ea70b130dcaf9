"""The interface of launchers, what a launch consists of, and the launcher that starts nothing."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fabric.errors import ConfigurationError
from fabric.world import World

__all__ = ["InlineLauncher", "LaunchSpec", "Launcher", "available_cores", "rank_variables", "single_node_worlds"]


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How many processes a launcher starts on this node, and which results it returns.

    A launcher starts the processes of a single-node job only; those of several nodes are started by ``torchrun``,
    ``fabric run`` or SLURM.

    Attributes:
        num_processes: number of processes, at least 1.
        device_type: type of the devices they will use, such as ``"cpu"`` or ``"cuda"``; some start methods are unsafe
            with some devices.
        results: ``"first"`` is what rank 0 returned, ``"all"`` a list by rank, ``"none"`` None.

    Raises:
        ConfigurationError: a value outside of what is listed here.
    """

    num_processes: int
    device_type: str = "cpu"
    results: Literal["first", "all", "none"] = "first"

    def __post_init__(self) -> None:
        if self.num_processes < 1 or self.results not in ("first", "all", "none"):
            raise ConfigurationError(
                f"LaunchSpec(num_processes={self.num_processes!r}, results={self.results!r})",
                "there is no such launch",
                "num_processes >= 1; results 'first', 'all' or 'none'",
                "LaunchSpec(num_processes=2)",
            )

    def wants_result_of(self, rank: int) -> bool:
        """Whether what this rank returns is sent back."""
        return self.results == "all" or (self.results == "first" and rank == 0)


class Launcher(ABC):
    """Starts the processes of a job and runs a function in each of them.

    Attributes:
        name: the name under which the launcher is selected.
        runs_function: False when the launcher re-runs the script, so that ``launch`` needs no function.
    """

    name: str
    runs_function: ClassVar[bool] = True

    @abstractmethod
    def check(self, spec: LaunchSpec) -> None:
        """Raise a :class:`~fabric.errors.FabricError` when this launch cannot work; starts no process."""

    @abstractmethod
    def launch(
        self, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], spec: LaunchSpec
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in every process of the job, and wait for all of them.

        Returns:
            What ``spec.results`` asks for; tensors by value, detached, on the CPU.

        Raises:
            RankFailedError: a process raised, exited early or was killed; the others have been ended.
        """


class InlineLauncher(Launcher):
    """Runs a function in this process: the only one of its job, or one that somebody else made."""

    name = "inline"

    def check(self, spec: LaunchSpec) -> None:
        """Accept everything: there is nothing to start."""

    def launch(
        self, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], spec: LaunchSpec
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` here and return its result untouched; without ``fn`` return None."""
        return None if fn is None else fn(*args, **kwargs)


def single_node_worlds(size: int) -> list[World]:
    """The places of the processes of a job on one machine."""
    return [World(rank=rank, local_rank=rank, world_size=size, local_world_size=size) for rank in range(size)]


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_variables(environ: Mapping[str, str], num_processes: int, cores: int, platform: str) -> dict[str, str]:
    """The environment variables of a rank on a single node besides its place; what the user set wins.

    Args:
        environ: the environment of the launching process.
        num_processes: number of ranks that share the cores.
        cores: number of cores to share.
        platform: as in ``sys.platform``.
    """
    # torchrun sets one thread and warns; without any limit every rank would take all cores and they would starve
    # each other. gloo listens on whatever the host name resolves to unless it is given an interface.
    variables = {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        "GLOO_SOCKET_IFNAME": "lo0" if platform == "darwin" else "lo",
    }
    return {name: environ.get(name) or value for name, value in variables.items()}
