"""The launcher that runs the script again, once for every rank, and the supervision of scripts for ``fabric run``."""

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
from typing import Any, ClassVar, NoReturn

from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.launchers import base
from fabric.launchers.logs import RankLogs
from fabric.launchers.rank import RankConfig, main
from fabric.launchers.supervisor import StartedProcess, Supervisor, exit_status
from fabric.world import World

__all__ = ["Script", "ScriptLauncher", "run_script"]


# Read before the script has a chance to change it.
_START_DIRECTORY: str | None = vars(multiprocessing.process)["ORIGINAL_DIR"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with its arguments, which a rank runs as the interpreter would.

    Attributes:
        name: path of a script, a folder or an archive; or the name of a module.
        is_module: whether ``name`` is that of a module.
        arguments: its ``sys.argv``, the name of the script first.
        directory: its initial working directory.
        extends_path: whether the interpreter prepends the script's folder to ``sys.path``.
    """

    name: str
    is_module: bool
    arguments: Sequence[str]
    directory: str | None = _START_DIRECTORY
    extends_path: bool = not sys.flags.safe_path

    @classmethod
    def of(cls, main: ModuleType, command: Sequence[str] = tuple(sys.orig_argv)) -> "Script":
        """The script that this process runs.

        Args:
            main: the module ``__main__``.
            command: the command line; the script may have removed arguments from ``sys.argv``.

        Raises:
            ConfigurationError: there is no script that could be run again.
        """
        interactive = base.is_interactive()
        file = getattr(main, "__file__", None)
        spec = getattr(main, "__spec__", None)
        if interactive or file in (None, "<stdin>"):
            raise ConfigurationError(
                "the launcher 'popen', which runs the script again in every rank",
                "this is a notebook or a prompt"
                if interactive
                else "the code came from `python -c` or standard input",
                suggestion='Fabric(..., launcher="forkserver").launch(train)',
            )
        name = os.path.abspath(file) if spec is None else spec.name.removesuffix(".__main__")
        if name == "__main__":
            # A directory or a zip archive with a __main__.py.
            name = str(Path(file).parent)
            spec = None
        paths = [os.path.abspath(os.path.join(_START_DIRECTORY or "", word)) for word in command]
        words = paths if spec is None else command
        arguments = command[words.index(name) :] if name in words else sys.argv
        return cls(name=name, is_module=spec is not None, arguments=_in_hydras_folder(arguments))

    def __call__(self) -> Callable[[], None]:
        """Prepare this process to run the script."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Line buffering: a killed rank flushes nothing, and partial lines would mix with those of other ranks.
            sys.stdout.reconfigure(line_buffering=True)
        sys.argv[:] = self.arguments
        if self.extends_path and self.is_module:
            sys.path.insert(0, os.getcwd())
        elif self.extends_path and os.path.isfile(self.name):
            sys.path.insert(0, os.path.dirname(os.path.realpath(self.name)))
        return self._run

    def _run(self) -> None:
        # Returns nothing, so that the script's globals are freed before it counts as finished.
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(self.name), run_name="__main__")


def _in_hydras_folder(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, and if Hydra runs this script, an override: every rank uses this process's output folder."""
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return arguments
    config = hydra.HydraConfig.get()
    kind = "run"
    folder = config.runtime.output_dir
    if "MULTIRUN" in str(config.mode):  # every rank runs all jobs
        kind = "sweep"
        folder = os.path.join(config.runtime.cwd, config.sweep.dir)
    # After the other overrides, which must be consecutive.
    last = max(
        (at for at, word in enumerate(arguments) if re.match("[^-]*=", word)),
        default=len(arguments),
    )
    escaped = folder.replace("'", r"\'")
    return [*arguments[: last + 1], f"hydra.{kind}.dir='{escaped}'", *arguments[last + 1 :]]


class ScriptLauncher(base.Launcher):
    """Re-runs the script of this process, once for every rank; this process only supervises.

    Every rank is a child. Rank 0 inherits the standard input, the others read nothing; all write to the standard output
    and error of this process.
    """

    name = "popen"
    runs_function: ClassVar[bool] = False

    def check(self, spec: base.LaunchSpec) -> None:
        """Refuse a script that cannot be run again.

        Raises:
            ConfigurationError: this is an interactive session, a notebook, ``python -c`` or a script on standard input.
            UsageError: this process is a rank already, or a rank is importing the script.
        """
        base.refuse_while_importing_main()
        if "FABRIC_STORE" in os.environ:
            raise UsageError(
                f"a launch of {spec.num_processes} processes by re-running the script",
                f"this process is rank {os.environ.get('RANK')} of a job that fabric launched: it would never end",
                suggestion="unset FABRIC_STORE, RANK and WORLD_SIZE to start a job of its own from within a rank",
            )
        Script.of(sys.modules["__main__"])

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: base.LaunchSpec,
    ) -> NoReturn:
        """Run the script in ``spec.num_processes`` processes, wait for them, and exit. Never returns.

        ``fn`` runs in the ranks, when they reach the same line.

        Raises:
            SystemExit: the code of :func:`run_script`.
        """
        self.check(spec)
        code, _ = run_script(
            Script.of(sys.modules["__main__"]), base.node_worlds(spec.num_processes)
        )
        raise SystemExit(code)


def run_script(
    script: Script,
    worlds: Sequence[World],
    variables: Mapping[str, str] = {},
    logs: RankLogs | None = None,
) -> tuple[int, bool]:
    """Run a script in one process for each of these places, and wait for them.

    Args:
        script: the script.
        worlds: the places of this machine's ranks. Without a port they connect through a store of this process.
        variables: added to the environment that the ranks inherit, besides their place.
        logs: files for their output; None for the standard output and error of this process.

    Returns:
        The exit code for this process: 0 when all ranks ended with 0; that of the rank that failed first, 128 + n for
        signal n, after one report on standard error; 128 + n if signal n interrupted this process. And whether one did.

    Raises:
        SystemExit: the job was preempted; see :meth:`Supervisor.run`.
    """

    def start(control: Connection, config: RankConfig) -> StartedProcess:
        stdin = None if config.world.local_rank == 0 else subprocess.DEVNULL
        shown = [script.name, *script.arguments[1:]]
        output = logs and logs.open(config.world.rank)
        process = base.start_interpreter(
            main, control.fileno(), shown, script.directory, stdin, output
        )
        return process.pid, process.poll

    job = Supervisor()
    try:
        with job:
            job.start(start, worlds, script, variables=variables, runs_script=True)
            job.run()
    except KeyboardInterrupt:
        return 128 + job.signals[0][0], True
    except RankFailedError as error:
        print(end="", flush=True)  # standard output may be None
        print(f"\n{error}", file=sys.stderr, flush=True)
        return exit_status(error.exit_code), bool(job.signals)
    finally:
        if logs is not None:
            logs.close(job.ranks)
    return 0, False
