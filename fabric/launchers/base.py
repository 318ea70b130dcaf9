"""The interface of launchers, the description of a launch, and checks of what this process may start."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from fabric.errors import ConfigurationError, UsageError
from fabric.world import World

__all__ = [
    "InlineLauncher", "LaunchSpec", "Launcher", "initialized_backend", "is_interactive", "node_worlds",
    "notebook_start_method", "refuse_while_importing_main", "start_interpreter",
]  # fmt: skip

_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How many processes a launcher starts on this node, and which results it returns.

    A launcher starts single-node jobs only; use ``torchrun``, ``fabric run`` or SLURM for several nodes.

    Attributes:
        num_processes: number of processes, at least 1.
        device_type: type of the devices they will use, such as ``"cpu"`` or ``"cuda"``; some start methods are unsafe
            with some devices.
        results: ``"first"`` is what rank 0 returned, ``"all"`` a list by rank, ``"none"`` None.

    Raises:
        ConfigurationError: a value is not one of those listed here.
    """

    num_processes: int
    device_type: str = "cpu"
    results: Literal["first", "all", "none"] = "first"

    def __post_init__(self) -> None:
        if self.num_processes < 1 or self.results not in ("first", "all", "none"):
            raise ConfigurationError(
                repr(self), expected="num_processes >= 1; results 'first', 'all' or 'none'"
            )


class Launcher(ABC):
    """Starts the processes of a job and runs a function in each of them.

    Attributes:
        name: the name under which the launcher is selected.
        runs_function: False when the launcher re-runs the script, so that ``launch`` needs no function.
    """

    name: str
    runs_function: ClassVar[bool] = True

    def check(self, spec: LaunchSpec) -> None:
        """Raise a :class:`~fabric.errors.FabricError` when this launch cannot work; starts no process."""

    @abstractmethod
    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: LaunchSpec,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in every process of the job, and wait for all of them.

        Returns:
            The results that ``spec.results`` selects; tensors by value, detached, on the CPU.

        Raises:
            RankFailedError: a process raised, exited early or was killed; the others have been ended.
        """


class InlineLauncher(Launcher):
    """Runs a function in this process: the only one of its job, or one that another launcher started."""

    name = "inline"

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: LaunchSpec,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` here and return its result untouched; without ``fn`` return None."""
        return None if fn is None else fn(*args, **kwargs)


def node_worlds(size: int, node: int = 0, nodes: int = 1, **rendezvous: Any) -> list[World]:
    """The places of the ``size`` processes of one node, in a job with ``size`` processes on every node."""
    common = {"node_rank": node, "world_size": nodes * size, "local_world_size": size, **rendezvous}
    return [World(rank=node * size + each, local_rank=each, **common) for each in range(size)]


def start_interpreter(
    fn: Callable[[], None],
    fd: int,
    arguments: Sequence[str] = (),
    cwd: str | None = None,
    stdin: int | None = None,
    output: int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start an interpreter with this one's options, and call a function in it.

    Unlike that of ``multiprocessing``, it imports ``__main__`` only if needed, and starts no resource tracker.

    Args:
        fn: a module-level function, imported by name.
        fd: an open file that it inherits; its number is the first argument.
        arguments: further arguments, shown in process lists.
        cwd: its working directory.
        stdin: its standard input.
        output: its standard output and error; None for those of this process.
    """
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] - as multiprocessing does
    if getattr(sys.__stdout__, "write_through", False):
        options.append("-u")
    name = fn.__name__
    first = os.environ.get(
        "FABRIC_PRELOAD"
    )  # modules, such as an import hook, that the script's imports need
    statement = f"from {fn.__module__} import {name}; {f'import {first}; ' if first else ''}sys.path.pop(); {name}()"
    # -P: files in the current folder must not shadow modules of fabric or of the standard library.
    statement = f"import sys; sys.path.append({_ROOT!r}); {statement}"
    command = [sys.executable, *options, "-P", "-c", statement, str(fd), *arguments]
    return subprocess.Popen(
        command, pass_fds=[fd], cwd=cwd, stdin=stdin, stdout=output, stderr=output
    )


def is_interactive() -> bool:
    """Whether this process is a notebook, a Python or IPython prompt, or ``python -i``."""
    ipython_shell = getattr(sys.modules.get("IPython"), "get_ipython", bool)()
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or ipython_shell)


def notebook_start_method(
    can_pickle_functions: bool, platform: str = sys.platform
) -> Literal["forkserver", "fork"]:
    """The start method for functions of a notebook: ``"fork"`` only if they cannot be pickled and it is safe.

    Args:
        can_pickle_functions: whether ``cloudpickle`` is installed.
        platform: as in ``sys.platform``; the libraries of macOS do not survive a fork.
    """
    is_fork_safe = platform != "darwin" and initialized_backend("cuda") is None
    return "fork" if is_fork_safe and not can_pickle_functions else "forkserver"


def initialized_backend(device_type: str) -> str | None:
    """The name of a device library initialized in this process, such as ``"CUDA"``; None if there is none."""
    torch = sys.modules.get("torch")
    for name in dict.fromkeys(("cuda", "xpu", device_type)):
        if name == "cpu":
            continue  # needs no initialization and calls itself initialized
        library = getattr(torch, name, None)
        is_initialized = getattr(library, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return name.upper()
    return None


def refuse_while_importing_main() -> None:
    """Raise if a script without a guard attempts a launch while a rank imports it: it would launch for ever.

    A rank imports the script to find its functions, under the name ``__mp_main__``, as ``multiprocessing`` does.
    """
    importing = sys.modules.get("__mp_main__")
    # Elsewhere the name is the script itself, even if a debugger or `fabric run` has replaced `__main__`.
    if (
        importing is not sys.modules["__main__"]
        and getattr(importing, "__name__", None) == "__mp_main__"
    ):
        raise UsageError(
            "launch() at the top level of a script",
            "another process imports the script to find the function it has to run, and so reaches launch() again",
            suggestion="if __name__ == '__main__': above the lines that create Fabric and launch; or launcher='fork'",
        )
