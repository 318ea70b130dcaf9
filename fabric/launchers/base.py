"""What every launcher is, and all that it is told about a job."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fabric.errors import ConfigurationError

__all__ = ["LaunchSpec", "Launcher", "available_cores", "interpreter_options", "rank_variables"]


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How many processes a launcher makes on this node, and what it brings back from them.

    A launcher makes the processes of a single-node job only; those of several nodes come from ``torchrun``,
    ``fabric run`` or SLURM.

    Attributes:
        num_processes: number of processes, at least 1.
        device_type: type of the devices they will use, such as ``"cpu"`` or ``"cuda"``; some start methods are unsafe
            with some devices.
        results: ``"first"`` brings back what rank 0 returned, ``"all"`` a list by rank, ``"none"`` nothing (None).

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
        """Whether what this rank returns has to come back."""
        return self.results == "all" or (self.results == "first" and rank == 0)


class Launcher(ABC):
    """Brings the processes of a job into existence and runs a function in each of them.

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


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_variables(environ: Mapping[str, str], num_processes: int, cores: int, platform: str) -> dict[str, str]:
    """What a rank of a single-node job finds in its environment besides its place; what the user set wins.

    Args:
        environ: the environment of the launching process.
        num_processes: number of ranks that share the cores.
        cores: number of cores to share.
        platform: as in ``sys.platform``.
    """
    # torchrun sets one thread and warns; without any limit every rank would take all cores and they would starve
    # each other. gloo listens on whatever the host name resolves to unless it is told an interface.
    variables = {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        "GLOO_SOCKET_IFNAME": "lo0" if platform == "darwin" else "lo",
    }
    return {name: environ.get(name) or value for name, value in variables.items()}


def interpreter_options(orig_argv: Sequence[str] = tuple(sys.orig_argv)) -> tuple[list[str], list[str]]:
    """Split the command line of an interpreter into its options and the rest.

    Args:
        orig_argv: as in ``sys.orig_argv``: the interpreter, its options, then a script or ``-m module`` or ``-c code``.

    Returns:
        The options (``-i`` left out: a child must end by itself), and the rest, which starts with the script, ``-m``,
        ``-c`` or ``-``, or is empty.
    """
    options: list[str] = []
    arguments = list(orig_argv[1:])
    while arguments and arguments[0].startswith("-") and arguments[0] != "-":
        argument = arguments.pop(0)
        if argument.startswith("--"):
            options.append(argument)
            if argument == "--check-hash-based-pycs" and arguments:
                options.append(arguments.pop(0))
            continue
        flags, letter, value = _split_cluster(argument)
        if flags:
            options.append("-" + flags)
        if letter and letter in "mc":
            return options, [f"-{letter}", *([value] if value else []), *arguments]
        if letter:
            options += [f"-{letter}", value or arguments.pop(0)]
    return options, arguments


def _split_cluster(argument: str) -> tuple[str, str, str]:
    """``"-uWerror"`` is the flags ``"u"``, the letter ``"W"`` that takes a value, and that value."""
    for position, letter in enumerate(argument[1:], start=1):
        if letter in "WXmc":
            return argument[1:position].replace("i", ""), letter, argument[position + 1 :]
    return argument[1:].replace("i", ""), "", ""
