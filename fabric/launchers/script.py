"""The launcher that runs the script again, once for every rank."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.launchers._fresh import refuse_while_importing_main
from fabric.launchers._rank import LIFELINE, lifeline_variable
from fabric.launchers._supervision import Crew, JobInterrupted, Member, exit_status
from fabric.launchers.base import Launcher, LaunchSpec, available_cores, interpreter_options, rank_variables
from fabric.launchers.notebook import is_interactive
from fabric.world import World

__all__ = ["ScriptLauncher", "rerun_command"]


def _start_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# Read before the script has a chance to change it: a relative path on the command line means this directory.
_START_DIRECTORY = _start_directory()


class ScriptLauncher(Launcher):
    """Runs the command that started this process again, once for every rank; this process only supervises.

    Every rank is a child. Rank 0 inherits the standard input, the others read nothing; all write to the standard output
    and error of this process.
    """

    name = "popen"
    runs_function: ClassVar[bool] = False

    def check(self, spec: LaunchSpec) -> None:
        """Refuse what cannot be run again.

        Raises:
            ConfigurationError: this is an interactive session, a notebook, ``python -c`` or a script on standard input.
            UsageError: this process is a rank already, or a rank's import of a script.
        """
        refuse_while_importing_main()
        if "FABRIC_STORE" in os.environ:
            raise UsageError(
                f"a launch of {spec.num_processes} processes by re-running the script",
                f"this process is rank {os.environ.get('RANK')} of a job that fabric launched: it would never end",
                "one launch per job",
                "unset FABRIC_STORE, RANK and WORLD_SIZE to start a job of its own from within a rank",
            )
        rerun_command()

    def launch(
        self, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], spec: LaunchSpec
    ) -> NoReturn:
        """Run the script in ``spec.num_processes`` processes, wait for them, and leave this one. Never returns.

        ``fn`` runs in the ranks, when they come to the same line.

        Raises:
            SystemExit: code 0 when all ranks ended with 0; otherwise the exit code of the rank that failed first, 128
                + n for signal n, after one report on standard error.
        """
        self.check(spec)
        try:
            with Crew(answering=False) as crew:
                _start(crew, spec)
                crew.run()
        except JobInterrupted as interruption:
            raise SystemExit(128 + interruption.number) from None
        except RankFailedError as error:
            sys.stdout.flush()
            print(f"\n{error}", file=sys.stderr, flush=True)
            raise SystemExit(exit_status(error.exit_code)) from None
        raise SystemExit(0)


def rerun_command(
    main: ModuleType | None = None,
    *,
    argv: Sequence[str] | None = None,
    orig_argv: Sequence[str] | None = None,
    interactive: bool | None = None,
) -> list[str]:
    """The command that starts this script again, with the same interpreter, options and arguments.

    Args:
        main: the module ``__main__``.
        argv: as in ``sys.argv``.
        orig_argv: as in ``sys.orig_argv``.
        interactive: whether this is a prompt or a notebook.

    Raises:
        ConfigurationError: there is no script that could be run again.
    """
    main = sys.modules["__main__"] if main is None else main
    argv = sys.argv if argv is None else argv
    orig_argv = sys.orig_argv if orig_argv is None else orig_argv
    interactive = is_interactive() if interactive is None else interactive
    options, started = interpreter_options(orig_argv)
    file = getattr(main, "__file__", None)
    if interactive or file is None or started[:1] in (["-c"], ["-"]):
        raise ConfigurationError(
            "the launcher 'popen', which runs the script again in every rank",
            "this is a notebook or a prompt" if interactive else "the code came from `python -c` or standard input",
            "popen: `python script.py`, `python -m module`; otherwise a function in launch(), with 'forkserver', "
            "'spawn' or 'fork'",
            'Fabric(..., launcher="forkserver").launch(train)',
        )
    target = _target(main, file)
    # Not sys.argv, which the script may have emptied; but a debugger's own command line would run the debugger again.
    own = started[: len(target)] == target or (len(target) == 1 and started and _same_file(started[0], target[0]))
    return [sys.executable, *options, *target, *(started[len(target) :] if own else argv[1:])]


def _target(main: ModuleType, file: str) -> list[str]:
    spec = getattr(main, "__spec__", None)
    if spec is None:
        return [file]
    if spec.name == "__main__":
        # A directory or a zip archive with a __main__.py.
        return [str(Path(file).parent)]
    return ["-m", spec.name.removesuffix(".__main__")]


def _same_file(one: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(_START_DIRECTORY or "", one).resolve() == Path(_START_DIRECTORY or "", other).resolve()
    return False


def _start(crew: Crew, spec: LaunchSpec) -> None:
    command = rerun_command()
    variables = rank_variables(os.environ, spec.num_processes, available_cores(), sys.platform)
    with crew.starting():
        for rank in range(spec.num_processes):
            world = World(
                rank=rank,
                local_rank=rank,
                world_size=spec.num_processes,
                local_world_size=spec.num_processes,
                store=crew.directory.store,
            )
            theirs, lifeline = multiprocessing.Pipe(duplex=False)
            seat = {LIFELINE: lifeline_variable(theirs.fileno(), crew.interruptible)}
            with theirs:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **variables, **world.to_env(), **seat},
                    cwd=_START_DIRECTORY,
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            crew.members.append(Member(rank, process, lifeline))
