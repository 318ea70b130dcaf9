"""The interface of launchers."""

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
    "InlineLauncher",
    "LaunchSpec",
    "Launcher",
    "initialized_backend",
    "is_interactive",
    "node_worlds",
    "notebook_start_method",
    "refuse_while_importing_main",
    "start_interpreter",
]

# The folder that contains the package fabric.
_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The description of a launch.

    A launcher starts jobs of one node. Use ``torchrun``, ``fabric run`` or SLURM for several nodes.

    Attributes:
        num_processes: the number of processes, at least 1.
        device_type: the type of the devices that the processes will use, such as ``"cpu"`` (the
            default) or ``"cuda"``. Some start methods are unsafe with some devices.
        results: ``"first"`` (the default) returns what rank 0 returned, ``"all"`` a list by rank,
            ``"none"`` returns None.
        runs_rank0_here: whether the process that calls ``launch`` is rank 0, and starts only the
            others. Only for launchers with ``can_run_rank0_here``. Default: False.

    Raises:
        ConfigurationError: an attribute has an invalid value.
    """

    num_processes: int
    device_type: str = "cpu"
    results: Literal["first", "all", "none"] = "first"
    runs_rank0_here: bool = False

    def __post_init__(self) -> None:
        if self.num_processes < 1 or self.results not in ("first", "all", "none"):
            raise ConfigurationError(
                repr(self), expected="num_processes >= 1; results 'first', 'all' or 'none'"
            )


class Launcher(ABC):
    """The way in which the processes of a job are started.

    Attributes:
        name: the name under which the launcher is selected.
        runs_function: whether the launcher runs a function in the processes. Otherwise the launcher
            runs the script again, and ``launch`` needs no function.
        can_run_rank0_here: whether :meth:`launch` can run the function as rank 0 in the process
            that calls it, see ``LaunchSpec.runs_rank0_here``. ``Fabric.launch(train, debug=0)``
            asks for it. Without it, rank 0 gets the terminal.
    """

    name: str
    runs_function: ClassVar[bool] = True
    can_run_rank0_here: ClassVar[bool] = False

    def check(self, spec: LaunchSpec) -> None:
        """Raise a :class:`~fabric.errors.FabricError` if this launch cannot work.

        No process is started. The default accepts every launch.
        """

    def warm_up(self) -> None:
        """Begin to start what a launch will need, without waiting. The default does nothing.

        A Fabric calls this method when it is made in a notebook or at a prompt, to make the first
        launch faster.
        """

    @abstractmethod
    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: LaunchSpec,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in every process of the job, and wait for all of them.

        Args:
            fn: the function. None if the launcher runs the script.
            args: the positional arguments of the function.
            kwargs: the keyword arguments of the function.
            spec: the number of processes, and which results to return.

        Returns:
            The results that ``spec.results`` selects. Tensors are copies, detached, on the CPU.

        Raises:
            RankFailedError: a process raised, exited early or was killed. The other processes have
                been ended.
        """


class InlineLauncher(Launcher):
    """A launcher that starts nothing and runs a function in this process.

    This process is the only one of its job, or another launcher has started the job.
    """

    name = "inline"

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: LaunchSpec,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in this process and return its result unchanged."""
        if fn is None:
            return None
        return fn(*args, **kwargs)


def node_worlds(
    processes: int,
    node_rank: int = 0,
    num_nodes: int = 1,
    *,
    address: str = "127.0.0.1",
    port: int | None = None,
) -> list[World]:
    """Return the place in the job of each process of one node, in the order of local ranks.

    Args:
        processes: the number of processes on every node.
        node_rank: the number of this node, from 0.
        num_nodes: the number of nodes.
        address: the host on which rank 0 can be reached.
        port: the port on that host of the store through which the ranks connect. None, the default,
            if the supervisor of the ranks provides a store.
    """
    worlds: list[World] = []
    for local_rank in range(processes):
        world = World(
            rank=node_rank * processes + local_rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=num_nodes * processes,
            local_world_size=processes,
            address=address,
            port=port,
        )
        worlds.append(world)
    return worlds


def start_interpreter(
    fn: Callable[[], None],
    inherited_fd: int,
    arguments: Sequence[str] = (),
    cwd: str | None = None,
    stdin: int | None = None,
    output: int | None = None,
    variables: Mapping[str, str] = {},
) -> "subprocess.Popen[bytes]":
    """Start an interpreter with the options of this one, and call a function in it.

    ``multiprocessing`` is not used, because it would always import ``__main__`` and start a
    resource tracker.

    Args:
        fn: a module-level function of fabric, imported by name.
        inherited_fd: the descriptor of an open file that the new process inherits under the same
            number. The number is ``sys.argv[1]`` in the new process.
        arguments: further arguments, shown in process lists.
        cwd: the working directory. None uses the directory of this process.
        stdin: the descriptor of the standard input. None uses the input of this process.
        output: the descriptor of the standard output and error. None uses the output of this
            process.
        variables: variables that are added to the environment.
    """
    # multiprocessing uses this private function, too. It returns the options of this interpreter
    # except -u, which is not in sys.flags.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    is_unbuffered = getattr(sys.__stdout__, "write_through", False)  # the effect of -u
    if is_unbuffered:
        options.append("-u")
    # -P: files in the current folder must not shadow modules of fabric or of the standard library.
    command = [
        sys.executable,
        *options,
        "-P",
        "-c",
        _code_to_call(fn),
        str(inherited_fd),
        *arguments,
    ]
    return subprocess.Popen(
        command,
        pass_fds=[inherited_fd],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=stdin,
        stdout=output,
        stderr=output,
    )


def _code_to_call(fn: Callable[[], None]) -> str:
    """Return the code with which a new interpreter imports and calls a function of fabric."""
    packages = ["fabric"]
    # fabric_compat sets this variable to a module that replaces imports of the user's code. The
    # module has to be loaded before fn runs this code.
    preload = os.environ.get("FABRIC_PRELOAD")
    if preload:
        packages.append("fabric_compat")
    statements = [
        "import sys",
        # The new process must import the fabric of this process, and not another version that is
        # installed. So the folder of this fabric comes first, for these imports alone: other
        # packages in the folder must not shadow modules of the standard library.
        f"sys.path.insert(0, {_ROOT!r})",
        f"import {', '.join(packages)}",
        "del sys.path[0]",
        # The folder may also have packages that fabric imports, so it stays at the end of sys.path
        # until fn is imported. The user's code must not find packages there by accident.
        f"sys.path.append({_ROOT!r})",
        f"from {fn.__module__} import {fn.__name__}",
    ]
    if preload:
        statements.append(f"import {preload}")
    statements.append("sys.path.pop()")
    statements.append(f"{fn.__name__}()")
    return "; ".join(statements)


def is_interactive() -> bool:
    """Return whether this process is a notebook, a Python or IPython prompt, or ``python -i``."""
    has_prompt = hasattr(sys, "ps1")
    if has_prompt or sys.flags.interactive:
        return True
    # IPython may be imported without running. Then get_ipython() returns None.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and get_ipython() is not None


def notebook_start_method(
    can_pickle_functions: bool, platform: str = sys.platform
) -> Literal["forkserver", "fork"]:
    """Return the start method for functions of a notebook.

    It is ``"fork"``, which needs no pickling, only if functions of the notebook cannot be pickled
    and a fork is safe.

    Args:
        can_pickle_functions: whether ``cloudpickle`` is installed.
        platform: as in ``sys.platform``.
    """
    # The system libraries of macOS, and CUDA, do not work in a fork once they are in use.
    is_fork_safe = platform != "darwin" and initialized_backend("cuda") is None
    if is_fork_safe and not can_pickle_functions:
        return "fork"
    return "forkserver"


def initialized_backend(device_type: str) -> str | None:
    """Return the name of a device library that is initialized in this process, or None.

    A forked child could not use the library.

    Args:
        device_type: the type of the devices of the job. CUDA and XPU are checked in any case.

    Returns:
        The name in upper case, such as ``"CUDA"``.
    """
    # None if torch has not been imported. Then nothing is initialized.
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu", device_type):
        # The CPU needs no initialization, and torch.cpu.is_initialized() is always true.
        if name == "cpu":
            continue
        library = getattr(torch, name, None)
        is_initialized = getattr(library, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return name.upper()
    return None


def refuse_while_importing_main() -> None:
    """Raise a UsageError if this process is a rank that is importing the user's script.

    A rank imports the script to find the function that it has to run. A script without an
    ``if __name__ == "__main__"`` guard would launch again in each rank, without end. The import has
    the name ``__mp_main__``, as in ``multiprocessing``.
    """
    imported_script = sys.modules.get("__mp_main__")
    # Only a rank has a module with this __name__. In another process, multiprocessing stores the
    # module "__main__" under this key, whose __name__ stays "__main__".
    is_rank = getattr(imported_script, "__name__", None) == "__mp_main__"
    # When the import in a rank ends, multiprocessing makes the imported script the main module.
    is_importing = imported_script is not sys.modules["__main__"]
    if is_rank and is_importing:
        raise UsageError(
            "launch() at the top level of a script",
            problem="another process imports the script to find the function that it has to run, "
            "and so reaches launch() again",
            suggestion="if __name__ == '__main__': above the lines that create Fabric and launch; "
            "or launcher='fork'",
        )
