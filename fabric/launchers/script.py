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
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, NoReturn

from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.launchers import base
from fabric.launchers.logs import RankLogs
from fabric.launchers.rank import RankConfig, main
from fabric.launchers.supervisor import StartedProcess, Supervisor, exit_status
from fabric.world import World

__all__ = ["Script", "ScriptEnd", "ScriptLauncher", "run_script"]

# The working directory in which this process was started. multiprocessing reads it at its import,
# before the script has a chance to change the directory.
_START_DIRECTORY: str | None = vars(multiprocessing.process)["ORIGINAL_DIR"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with its arguments, which a rank runs as the interpreter would.

    Attributes:
        name: the path of a script, a folder or an archive, or the name of a module.
        is_module: whether ``name`` is the name of a module.
        arguments: the ``sys.argv`` of the script, whose first item is its name.
        directory: the initial working directory.
        extends_path: whether the script's folder is prepended to ``sys.path``, as the interpreter
            does without the option ``-P``.
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
            command: the command line of the process, which still has arguments that the script may
                have removed from ``sys.argv``.

        Raises:
            ConfigurationError: there is no script that could be run again.
        """
        script_path = getattr(main, "__file__", None)
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
        arguments = _arguments_from(command, name, is_module)
        return cls(name=name, is_module=is_module, arguments=_in_hydra_folder(arguments))

    def __call__(self) -> Callable[[], None]:
        """Prepare this process to run the script, and return the function that runs the script.

        A script is the payload of its ranks. A rank calls this method in its main thread.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Each line is flushed at once: a killed rank flushes nothing, and parts of a line would
            # mix with the lines of other ranks.
            sys.stdout.reconfigure(line_buffering=True)
        sys.argv[:] = self.arguments
        if self.extends_path:
            self._extend_path()
        return self._run

    def _extend_path(self) -> None:
        """Prepend the folder to ``sys.path`` that the interpreter would prepend.

        If the script is a folder or an archive, this is left to ``runpy``.
        """
        if self.is_module:
            sys.path.insert(0, os.getcwd())
        elif os.path.isfile(self.name):
            sys.path.insert(0, os.path.dirname(os.path.realpath(self.name)))

    def _run(self) -> None:
        """Run the script as ``__main__``."""
        # Both functions return the globals of the script. They are dropped here, so that the
        # script's objects are freed before the rank reports that it has finished.
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
        # The command may have a relative path of the script, so all words are made absolute paths.
        directory = _START_DIRECTORY or ""
        words = [os.path.abspath(os.path.join(directory, word)) for word in command]
    if name not in words:
        return sys.argv
    return command[words.index(name) :]


def _no_script_error(problem: str) -> ConfigurationError:
    """Return the error for a process without a script that could be run again."""
    return ConfigurationError(
        "the launcher 'popen', which runs the script again in every rank",
        problem,
        suggestion='Fabric(..., launcher="forkserver").launch(train)',
    )


def _in_hydra_folder(arguments: Sequence[str]) -> Sequence[str]:
    """Return a script's arguments, with an argument for Hydra's output folder if Hydra is running.

    So every rank uses the output folder of this process, and does not create another folder.
    """
    hydra_config: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra_config is None or not hydra_config.HydraConfig.initialized():
        return arguments
    config = hydra_config.HydraConfig.get()
    is_multirun = "MULTIRUN" in str(config.mode)
    if is_multirun:
        # Every rank runs all jobs of the sweep. Hydra puts the folder of each job below this one.
        option = "hydra.sweep.dir"
        folder = os.path.join(config.runtime.cwd, config.sweep.dir)
    else:
        option = "hydra.run.dir"
        folder = config.runtime.output_dir
    # In Hydra's grammar, quotes within a quoted value are escaped.
    escaped_folder = folder.replace("'", r"\'")
    # Hydra reads arguments such as key=value as overrides. All overrides must be consecutive, so
    # the new one is put after the last one, or at the end.
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
        # Raises if there is no script that could be run again. The script itself is not used here.
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
        script_end = run_script(script, base.node_worlds(spec.num_processes))
        raise SystemExit(script_end.exit_code)


class ScriptEnd(NamedTuple):
    """How a script that ran in several processes has ended.

    Attributes:
        exit_code: the exit code for this process.
        is_interrupted: whether a signal to this process has ended the job. Then ``fabric run``
            does not restart the job.
    """

    exit_code: int
    is_interrupted: bool


def run_script(
    script: Script,
    worlds: Sequence[World],
    variables: Mapping[str, str] = {},
    logs: RankLogs | None = None,
) -> ScriptEnd:
    """Run a script in one process for each place, and wait for the processes.

    Args:
        script: the script.
        worlds: the places of this machine's ranks. Ranks without a port connect through a store of
            this process.
        variables: variables for the environment of the ranks, besides their place.
        logs: files for the output of the ranks, which this function closes. None uses the standard
            output and error of this process.

    Returns:
        The exit code for this process, and whether a signal ended the job:

        - If all ranks ended with 0, the code is 0.
        - If a rank failed, the code is the exit code of the rank that failed first, or 128 + n if
          signal n killed that rank. This function has written a report to standard error.
        - If signal n to this process ended the job, the code is 128 + n.

    Raises:
        SystemExit: the job was preempted; see :meth:`Supervisor.wait_for_ranks`.
    """

    def start_process(control: Connection, config: RankConfig) -> StartedProcess:
        """Start the process of one rank in a new interpreter.

        Args:
            control: the rank's end of the control pipe, through which the rank receives the script.
            config: the configuration of the rank.
        """
        stdin = None
        if config.world.local_rank != 0:
            stdin = subprocess.DEVNULL
        output = None
        if logs is not None:
            output = logs.open(config.world.rank)
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

    supervisor = Supervisor()
    try:
        with supervisor:
            supervisor.start(
                start_process, worlds, payload=script, variables=variables, runs_script=True
            )
            supervisor.wait_for_ranks()
    except KeyboardInterrupt:
        # The supervisor raises KeyboardInterrupt for every signal that ends a job.
        return ScriptEnd(128 + supervisor.signals[0].number, is_interrupted=True)
    except RankFailedError as error:
        # This flushes what this process has printed, so that the report comes last. The method
        # sys.stdout.flush() is not used, since the stream may be None.
        print(end="", flush=True)
        print(f"\n{error}", file=sys.stderr, flush=True)
        # A signal may have arrived while the supervisor ended the other ranks of the failed job.
        is_interrupted = bool(supervisor.signals)
        return ScriptEnd(exit_status(error.exit_code), is_interrupted)
    finally:
        if logs is not None:
            logs.close(supervisor.ranks)
    return ScriptEnd(0, is_interrupted=False)
