"""The launcher that runs the script again in every rank, and the runner of ``fabric run``."""

import io
import multiprocessing.process
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, NoReturn

from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.launchers import base
from fabric.launchers.fork_server import OPTIMIZER_MODULE, ForkServer
from fabric.launchers.logs import RankLogs
from fabric.launchers.rank import PREEMPTED, RankConfig, main
from fabric.launchers.supervisor import (
    StartedProcess,
    Supervisor,
    exit_status,
    never,
    rank_variables,
)
from fabric.world import World, available_cores

__all__ = [
    "Script",
    "ScriptEnd",
    "ScriptLauncher",
    "run_script",
    "script_fork_server",
]

# The working directory in which this process was started. multiprocessing reads it at its import,
# before the script has a chance to change the directory.
_START_DIRECTORY: str | None = vars(multiprocessing.process)["ORIGINAL_DIR"]
# A quoted name of a variable that torch or a library of torch may read while it is loaded.
_LIBRARY_VARIABLE = re.compile(
    r"""["'](?P<name>(TORCH(?!ELASTIC)|PYTORCH|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_)\w*)["']"""
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with its arguments, which a rank runs as the interpreter would.

    Attributes:
        name: the path of a script, a folder or an archive, or the name of a module.
        is_module: whether ``name`` is the name of a module.
        arguments: the ``sys.argv`` of the script, whose first item is its name.
        directory: the initial working directory.
        extends_path: whether to prepend the script's folder to ``sys.path``. The interpreter does
            so unless it has the option ``-P``.
    """

    name: str
    is_module: bool
    arguments: Sequence[str]
    directory: str | None = _START_DIRECTORY
    extends_path: bool = not sys.flags.safe_path

    @classmethod
    def of(cls, main: ModuleType, command: Sequence[str] = tuple(sys.orig_argv)) -> "Script":
        """Return the script that this process runs.

        Args:
            main: the module ``__main__``.
            command: the command line of the process. Default: ``sys.orig_argv``, which has all
                arguments even if the script has changed ``sys.argv``.

        Raises:
            ConfigurationError: there is no script that could be run again.
        """
        script_path = getattr(main, "__file__", None)  # None at a prompt and for python -c
        spec = getattr(main, "__spec__", None)
        if base.is_interactive():
            raise _no_script_error("this is a notebook or a prompt")
        if script_path in (None, "<stdin>"):
            raise _no_script_error("the code came from `python -c` or standard input")

        is_module = False
        if spec is None:  # python script.py: the interpreter gives __main__ no spec
            name = os.path.abspath(script_path)
        elif spec.name == "__main__":  # a directory or a zip archive with a __main__.py
            name = str(Path(script_path).parent)
        else:  # python -m name
            name = spec.name.removesuffix(".__main__")
            is_module = True
        # With an argument for Hydra, if it is running: the ranks share one output folder.
        arguments = _in_hydra_folder(_arguments_from(command, name, is_module))
        return cls(name=name, is_module=is_module, arguments=arguments)

    def __call__(self) -> Callable[[], None]:
        """Prepare this process to run the script, and return the function that runs the script.

        A script is the payload of its ranks: a rank calls this method in its main thread, and then
        the returned function.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Each line is flushed at once. Otherwise the lines of a killed rank would be lost, and
            # parts of lines of several ranks would be mixed.
            sys.stdout.reconfigure(line_buffering=True)
        sys.argv[:] = self.arguments
        # For a script that is a folder or an archive, runpy itself prepends the entry.
        if self.extends_path and (self.is_module or os.path.isfile(self.name)):
            sys.path.insert(0, self.path_entry)
        return self._run

    @property
    def path_entry(self) -> str:
        """The entry of ``sys.path`` that the interpreter would prepend for this script."""
        if self.is_module:
            return self.directory or os.getcwd()
        if os.path.isfile(self.name):
            return os.path.dirname(os.path.realpath(self.name))
        return self.name

    def find_fork_hazard(self) -> str:
        """Return why a rank should not be forked from a process with torch loaded, or "".

        Torch and its libraries read some environment variables while they are loaded. If the script
        sets such a variable, it is too late in a fork that has torch loaded.
        """
        if sys.platform != "linux":
            return "ranks are forked on Linux only"
        for path in self._first_files():
            match = _LIBRARY_VARIABLE.search(path.read_text(errors="replace"))
            if match is not None:
                return f"{path} has {match['name']}, which libraries read while they are loaded"
        return ""

    def mentions(self, word: str) -> bool:
        """Return whether a word is in the files that a rank runs first.

        The files that these import are not read.
        """
        for path in self._first_files():
            text = path.read_text(errors="replace")
            if word in text:
                return True
        return False

    def _first_files(self) -> list[Path]:
        """Return the files that a rank runs first: the script, or a module and its packages.

        Nothing is imported. The list is empty if there is no such module: the ranks then fail to
        import the module, and report this error.
        """
        if not self.is_module:
            script = Path(self.name)
            if script.is_dir():
                script = script / "__main__.py"
            return [script]
        package, *submodules = self.name.split(".")
        spec = PathFinder.find_spec(package, [self.path_entry]) or find_spec(package)
        if spec is None:
            return []
        paths: list[Path] = []
        if spec.origin is not None:
            paths.append(Path(spec.origin))  # the module, or the __init__.py of the package
        # The files that there may be for a module "package.inner.job". Missing ones are left out.
        for folder in spec.submodule_search_locations or ():
            for depth in range(1, len(submodules) + 1):
                paths.append(Path(folder, *submodules[:depth], "__init__.py"))
            paths.append(Path(folder, f"{'/'.join(submodules)}.py"))
            paths.append(Path(folder, *submodules, "__main__.py"))
        return [path for path in paths if path.is_file()]

    def _run(self) -> None:
        """Run the script as ``__main__``."""
        # Both functions of runpy return the globals of the script. This method returns nothing, so
        # that the script's objects are freed before the rank reports that it has finished.
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(self.name), run_name="__main__")


def _arguments_from(command: Sequence[str], name: str, is_module: bool) -> Sequence[str]:
    """Return the arguments of a script, whose first item is its name, from a command line.

    Args:
        command: the command line: the interpreter, its options, the script and its arguments.
        name: the absolute path of the script, or the name of a module.
        is_module: whether ``name`` is the name of a module.

    Returns:
        The end of the command, from the script on. If the command does not contain the script,
        because a program such as a debugger runs it, the result is ``sys.argv``.
    """
    words = command
    if not is_module:
        # The command may have the script as a relative path, so all words are made absolute paths.
        directory = _START_DIRECTORY or ""
        words = [os.path.abspath(os.path.join(directory, word)) for word in command]
    if name not in words:
        return sys.argv
    return command[words.index(name) :]


def _no_script_error(problem: str) -> ConfigurationError:
    """Return the error for a process without a script that could be run again."""
    return ConfigurationError(
        "the launcher 'popen', which runs the script again in every rank",
        problem=problem,
        suggestion='Fabric(..., launcher="forkserver").launch(train)',
    )


def _in_hydra_folder(arguments: Sequence[str]) -> Sequence[str]:
    """Return a script's arguments, with an argument for Hydra's output folder if Hydra is running.

    With this argument, every rank uses the output folder of this process. Otherwise Hydra would
    create another folder in each rank.
    """
    hydra_config: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra_config is None or not hydra_config.HydraConfig.initialized():
        return arguments
    config = hydra_config.HydraConfig.get()
    is_multirun = "MULTIRUN" in str(config.mode)
    if is_multirun:
        # Every rank runs all jobs of the sweep, whose folders Hydra creates in this folder.
        option = "hydra.sweep.dir"
        folder = os.path.join(config.runtime.cwd, config.sweep.dir)
    else:
        option = "hydra.run.dir"
        folder = config.runtime.output_dir
    # In Hydra's grammar, quotes within a quoted value are escaped.
    escaped_folder = folder.replace("'", r"\'")
    # Hydra calls arguments like key=value overrides. All overrides must follow each other, so the
    # new override is inserted after the last one, or at the end if there is none.
    position = len(arguments)
    for index, argument in enumerate(arguments):
        is_override = re.match("[^-]*=", argument) is not None
        if is_override:
            position = index + 1
    return [*arguments[:position], f"{option}='{escaped_folder}'", *arguments[position:]]


class ScriptLauncher(base.Launcher):
    """A launcher that runs the script of this process again in every rank.

    Every rank is a child of this process, which only supervises. Rank 0 inherits the standard
    input, and the other ranks read nothing. All ranks write to the standard output and error of
    this process.
    """

    name = "popen"
    runs_function: ClassVar[bool] = False

    def check(self, spec: base.LaunchSpec) -> None:
        """Raise if the script of this process cannot be run again. No process is started.

        Raises:
            ConfigurationError: this is an interactive session, a notebook, ``python -c`` or a
                script on standard input.
            UsageError: this process is a rank already, or is a rank that is importing the script.
        """
        base.refuse_while_importing_main()
        is_rank = "FABRIC_STORE" in os.environ
        if is_rank:
            raise UsageError(
                f"a launch of {spec.num_processes} processes by re-running the script",
                problem=f"this process is rank {os.environ.get('RANK')} of a job that fabric "
                "launched: each rank would start the script again, without end",
                suggestion="unset FABRIC_STORE, RANK and WORLD_SIZE to start another job from "
                "within a rank",
            )
        # Called only for the error that it raises if there is no script that could be run again.
        Script.of(sys.modules["__main__"])

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: base.LaunchSpec,
    ) -> NoReturn:
        """Run the script in ``spec.num_processes`` processes, wait for them, and exit.

        This method never returns, and does not call ``fn``. The ranks run the script from its
        beginning, and call ``fn`` when they reach the line of the launch.

        Raises:
            SystemExit: always, with the exit code of :func:`run_script`.
        """
        self.check(spec)
        script = Script.of(sys.modules["__main__"])
        worlds = base.node_worlds(spec.num_processes)
        server = None
        if spec.num_processes > 1:
            # This script has imported torch, and so will each rank. The server imports it once.
            server = script_fork_server(script, worlds)
        script_end = run_script(script, worlds, server=server)
        script_end.print_report()
        raise SystemExit(script_end.exit_code)


class ScriptEnd(NamedTuple):
    """How a script that ran in several processes has ended.

    Attributes:
        exit_code: the exit code for this process.

            - If all ranks ended with 0, the code is 0. If all of these ranks ended and some of them
              were preempted, the code is :data:`PREEMPTED`.
            - If a rank failed, the code is the exit code of the rank that failed first, or 128 + n
              if signal n killed that rank.
            - If signal n to this process ended the job, the code is 128 + n.
            - If the ranks were ended because of another machine, the code is 1.
        is_interrupted: whether a signal to this process has ended the job. Then ``fabric run``
            does not restart the job.
        is_canceled: whether the ranks of this machine were ended because of another machine.
        failure: the rank that failed first and how, in words. Empty if no rank failed.
        is_secondary: whether this failure looks like the result of another rank's failure.
        report: the text of the failure for the user.
    """

    exit_code: int
    is_interrupted: bool = False
    is_canceled: bool = False
    failure: str = ""
    is_secondary: bool = False
    report: str = ""

    def print_report(self) -> None:
        """Print the failure to standard error, after everything that this process has printed."""
        if self.report == "":
            return
        # Flushes the standard output. Unlike sys.stdout.flush(), this works if the stream is None.
        print(end="", flush=True)
        print(f"\n{self.report}", file=sys.stderr, flush=True)


def script_fork_server(
    script: Script, worlds: Sequence[World], *, has_restarts: bool = False
) -> ForkServer:
    """Return a fork server for the ranks of a script. :func:`run_script` starts it.

    The server imports torch once for all ranks of this machine, and for all starts of the ranks.

    Args:
        script: the script.
        worlds: the places of this machine's ranks.
        has_restarts: whether the ranks may be started again. Then the server also imports the slow
            module that the first optimizer of a process needs. Without restarts, it does so only
            if the script seems to have an optimizer. Default: False.
    """
    path_entry = ""
    if script.extends_path:
        path_entry = script.path_entry
    # The server gets the variables of rank 0. Libraries read the number of threads from them, which
    # is equal for all ranks.
    variables = rank_variables(os.environ, worlds[0], available_cores(), sys.platform)
    modules: list[str] = []
    if has_restarts or script.mentions("optim"):
        modules.append(OPTIMIZER_MODULE)
    return ForkServer.of_script(path_entry, script.arguments, variables, script.directory, modules)


def _start_process(
    script: Script,
    logs: RankLogs | None,
    server: ForkServer | None,
    control: Connection,
    config: RankConfig,
) -> StartedProcess:
    """Start the process of one rank.

    :func:`run_script` binds the first three arguments. The supervisor passes ``control`` and
    ``config``, for each rank.

    Args:
        script: the script.
        logs: files for the output of the ranks. None uses the output of this process.
        server: the fork server that starts the rank. None starts a new interpreter.
        control: the rank's end of the control pipe, through which the rank receives the script.
        config: the configuration of the rank.
    """
    output = None
    if logs is not None:
        output = logs.open(config.world.rank)
    # The first rank gets the standard input of this process, and the others get an empty one.
    is_first = config.world.local_rank == 0
    if server is not None:
        stdin = 0 if is_first else None  # None is an empty input for start_rank()
        return server.start_rank(control, config, stdin, output)
    stdin = None if is_first else subprocess.DEVNULL  # None is inherited from this process
    process = base.start_interpreter(
        main,
        control.fileno(),
        # Shown in process lists only.
        arguments=[script.name, *script.arguments[1:]],
        cwd=script.directory,
        stdin=stdin,
        output=output,
    )
    return StartedProcess(process.pid, process.poll)


def run_script(
    script: Script,
    worlds: Sequence[World],
    variables: Mapping[str, str] = {},
    logs: RankLogs | None = None,
    server: ForkServer | None = None,
    should_end: Callable[[], bool] = never,
    prints_hazard: bool = False,
) -> ScriptEnd:
    """Run a script in one process for each place, and wait for the processes.

    Args:
        script: the script.
        worlds: the places of this machine's ranks. Ranks without a port connect through a store of
            this process.
        variables: variables for the environment of the ranks, besides their place.
        logs: files for the output of the ranks, which this function closes. None uses the standard
            output and error of this process.
        server: the fork server that starts the ranks. None starts each rank in a new interpreter.
            If forked ranks could differ from new interpreters, this function does not use the
            server.
        should_end: returns whether to end the ranks early, for example because another machine has
            failed.
        prints_hazard: whether to print the reason if the server is not used.

    Returns:
        How the ranks have ended. The caller prints the report.
    """
    supervisor = Supervisor()
    if logs is not None:
        supervisor.on_report = logs.show_report
    try:
        with supervisor:
            if server is not None:
                hazard = _find_fork_hazard(script, server, supervisor)
                if hazard != "" and prints_hazard:
                    text = f"fabric run: the ranks start in new interpreters: {hazard}"
                    print(text, file=sys.stderr)
                if hazard != "":
                    server = None
            start_process = partial(_start_process, script, logs, server)
            supervisor.start(
                start_process, worlds, payload=script, variables=variables, runs_script=True
            )
            supervisor.wait_for_ranks(should_end)
    except SystemExit:  # wait_for_ranks() raises this error if the job was preempted
        return ScriptEnd(PREEMPTED)
    except KeyboardInterrupt:
        # The supervisor raises KeyboardInterrupt for every signal that ends a job.
        return ScriptEnd(128 + supervisor.signals[0].number, is_interrupted=True)
    except RankFailedError as error:
        return ScriptEnd(
            exit_status(error.exit_code),
            # A signal may have arrived while the supervisor ended the other ranks.
            is_interrupted=bool(supervisor.signals),
            failure=error.request,
            is_secondary=_has_secondary_failure(supervisor, error.rank),
            report=str(error),
        )
    finally:
        if logs is not None:
            logs.close(supervisor.ranks)
    # Without an error, all ranks have ended with 0, or should_end() has ended them.
    if any(rank.exit_code != 0 for rank in supervisor.ranks):
        return ScriptEnd(1, is_canceled=True)
    return ScriptEnd(0)


def _find_fork_hazard(script: Script, server: ForkServer, supervisor: Supervisor) -> str:
    """Return why forked ranks could differ from ranks in new interpreters, or an empty text.

    Waits until the server has imported torch.

    Args:
        script: the script of the ranks.
        server: the fork server.
        supervisor: ends the wait by an error if a signal has arrived.
    """
    hazard = script.find_fork_hazard()
    if hazard != "":
        return hazard
    return server.find_hazard(while_waiting=supervisor.raise_if_signaled)


def _has_secondary_failure(supervisor: Supervisor, global_rank: int) -> bool:
    """Return whether the error of a rank looks like the result of another rank's failure."""
    for rank in supervisor.ranks:
        if rank.global_rank == global_rank and rank.failure is not None:
            return rank.failure.is_secondary
    return False
