"""Launchers that run a function in new processes: spawn, fork and forkserver."""

import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, NoReturn

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError
from fabric.launchers._failures import RunDirectory
from fabric.launchers._forkserver import fork_server, fresh_interpreter
from fabric.launchers._fresh import Orders, refuse_while_importing_main
from fabric.launchers._rank import Seat, run_function
from fabric.launchers._signals import ReportRequests
from fabric.launchers._supervision import Crew, JobInterrupted, Member, RankProcess, exit_status
from fabric.launchers._transport import Call, load_result, main_source, pack_call
from fabric.launchers.base import Launcher, LaunchSpec, available_cores, rank_variables
from fabric.world import World

__all__ = ["ProcessLauncher", "initialised_backend", "seat_of"]

StartMethod = Literal["spawn", "fork", "forkserver"]


class ProcessLauncher(Launcher):
    """Runs a function in new processes on this machine and brings back what it returned.

    ``"spawn"`` starts a new interpreter for each rank: the slowest and the most isolated. ``"forkserver"`` forks fresh
    processes from a warm one that has torch loaded and is kept as long as this process lives: as clean as spawn, and a
    second launch takes hundredths of a second. ``"fork"`` copies this process, so that nothing has to be pickled; it is
    refused once CUDA is initialised, and its ranks run with one thread per operation, because the thread pool of an
    operation that ran before the fork does not exist in the copy: waiting for it would never end. Do not raise the
    number of threads in such a rank.

    Functions of importable modules need nothing; closures, lambdas and what a script or notebook defines travel by
    value with ``cloudpickle``. Without it a function of a script is found by importing the script in every rank, which
    then needs an ``if __name__ == "__main__"`` guard.

    Args:
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        ConfigurationError: another start method.
    """

    def __init__(self, start_method: StartMethod) -> None:
        starts = {"spawn": _start_spawned, "fork": None, "forkserver": _start_served}
        if start_method not in starts:
            raise ConfigurationError(
                f"ProcessLauncher({start_method!r})",
                "there is no such start method",
                "'spawn', 'fork', 'forkserver'",
                "ProcessLauncher('forkserver')",
            )
        self.name = start_method
        self._start_fresh = starts[start_method]

    def check(self, spec: LaunchSpec) -> None:
        """Refuse a launch while a script is being imported by a rank, and a fork that could not work.

        Raises:
            UsageError: the script has no guard, and a rank imports it.
            ConfigurationError: the system cannot fork, or a device library is initialised that does not survive it.
        """
        refuse_while_importing_main()
        if self.name == "spawn":
            return
        if not hasattr(os, "fork"):
            raise ConfigurationError(
                f"the start method {self.name!r}", "this system cannot fork", "'spawn', 'popen'", 'launcher="spawn"'
            )
        backend = initialised_backend(spec.device_type) if self.name == "fork" else None
        if backend is not None:
            raise ConfigurationError(
                "the start method 'fork'",
                f"{backend} is initialised in this process, and a forked copy of it cannot use {backend}",
                "'forkserver', 'spawn', 'popen'; or a fork before anything touches the device",
                'launcher="forkserver"',
            )

    def launch(
        self, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], spec: LaunchSpec
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in ``spec.num_processes`` processes and wait for them.

        Returns:
            What rank 0 returned, a list by rank, or None, as ``spec.results`` says; tensors detached, on the CPU.

        Raises:
            ArgumentTypeError: ``fn`` is no function, or a part of the call cannot be pickled.
            MissingDependencyError: ``fn`` has to travel by value and ``cloudpickle`` is not installed.
            RankFailedError: a rank raised, left without returning, or was killed; the others have been ended. If
                nothing catches it, this process ends with the exit code of that rank, 128 + n for signal n.
            KeyboardInterrupt: SIGINT; the ranks had a grace period for their ``finally`` blocks.
            SystemExit: SIGTERM, likewise; code 143.
        """
        self.check(spec)
        if not callable(fn):
            raise ArgumentTypeError(
                f"launch({fn!r}) with the start method {self.name!r}",
                f"{type(fn).__name__} is not a function, so the processes would have nothing to run",
                "a function; launch() calls it in every process",
                "launch(train, *args), not launch(train(*args))",
            )
        call = (fn, tuple(args), dict(kwargs))
        try:
            with Crew(answering=True) as crew:
                if self._start_fresh is None:
                    _fork(crew, call, spec)
                else:
                    _start(crew, call, spec, self._start_fresh)
                answers = crew.run()
        except JobInterrupted as interruption:
            _pass_on(interruption)
        except RankFailedError as error:
            _leave_as_the_rank_did(error)
            raise
        if spec.results == "none":
            return None
        if spec.results == "first":
            return load_result(answers[0])
        return [load_result(answers[rank]) for rank in range(spec.num_processes)]


def initialised_backend(device_type: str) -> str | None:
    """The name of a device library that is initialised in this process, such as ``"CUDA"``; None when there is none."""
    torch = sys.modules.get("torch")
    for name in dict.fromkeys(("cuda", "xpu", device_type)):
        module = getattr(torch, name, None)
        # The CPU needs no initialisation and calls itself initialised.
        if name != "cpu" and module is not None and getattr(module, "is_initialized", bool)():
            return name.upper()
    return None


class _Forked:
    """A forked process in the shape that the supervisor knows."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode


def _seat(crew: Crew, spec: LaunchSpec, rank: int) -> Seat:
    return seat_of(
        rank,
        spec.num_processes,
        crew.directory,
        answers=spec.wants_result_of(rank),
        interruptible=crew.interruptible,
    )


def seat_of(rank: int, size: int, directory: RunDirectory, *, answers: bool, interruptible: bool) -> Seat:
    """The seat of a rank in a job of ``size`` processes on this node; see :class:`Seat` for the rest."""
    world = World(rank=rank, local_rank=rank, world_size=size, local_world_size=size, store=directory.store)
    variables = rank_variables(os.environ, size, available_cores(), sys.platform)
    return Seat(
        world=world,
        variables=world.to_env() | variables,
        threads=_threads(variables["OMP_NUM_THREADS"]),
        answers=answers,
        interruptible=interruptible,
    )


def _threads(omp_num_threads: str) -> int:
    """OpenMP allows a list, one number per level of nesting."""
    first = omp_num_threads.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else 1


def _fork(crew: Crew, call: Call, spec: LaunchSpec) -> None:
    context = multiprocessing.get_context("fork")
    with crew.starting():
        for rank in range(spec.num_processes):
            theirs, lifeline = multiprocessing.Pipe(duplex=False)
            answers, sending = multiprocessing.Pipe(duplex=False)
            # A rank must not hold the lifelines of the others open, or they would outlive the parent.
            ours = [crew.guard.lifeline, lifeline, answers, *(member.lifeline for member in crew.members)]
            ours += [member.answers for member in crew.members if member.answers is not None]
            process = context.Process(
                target=_forked_rank,
                args=(replace(_seat(crew, spec, rank), threads=1), theirs, sending, call, ours, crew.report_requests),
            )
            with theirs, sending:
                process.start()
            crew.members.append(Member(rank, _Forked(process), lifeline, answers))


def _forked_rank(
    seat: Seat, lifeline: Connection, answers: Connection, call: Call, ours: list[Any], requests: ReportRequests
) -> None:
    for connection in ours:
        connection.close()
    # These are the parent's; the rank installs its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    requests.forget()
    sys.exit(run_function(seat, lifeline, answers, lambda: call))


def _start(crew: Crew, call: Call, spec: LaunchSpec, start: Callable[[Connection, Connection], RankProcess]) -> None:
    main = main_source()
    # Before any process starts: what cannot be pickled is an error here.
    packed, needs_main = pack_call(call, main_is_importable=main is not None)
    with crew.starting():
        for rank in range(spec.num_processes):
            theirs, lifeline = multiprocessing.Pipe(duplex=False)
            answers, sending = multiprocessing.Pipe(duplex=False)
            with theirs, sending:
                process = start(theirs, sending)
            crew.members.append(Member(rank, process, lifeline, answers))
    for member in crew.members:
        seat = _seat(crew, spec, member.rank)
        member.order(Orders.like_this_process(seat=seat, main=main if needs_main else None, call=packed))


def _start_spawned(lifeline: Connection, answers: Connection) -> RankProcess:
    fds = [lifeline.fileno(), answers.fileno()]
    statement = f"from fabric.launchers._fresh import obey_and_leave; obey_and_leave({fds[0]}, {fds[1]})"
    return subprocess.Popen(fresh_interpreter(statement), pass_fds=fds, stdin=subprocess.DEVNULL)


def _start_served(lifeline: Connection, answers: Connection) -> RankProcess:
    return fork_server(os.getpid()).start_rank(lifeline, answers)


def _leave_as_the_rank_did(error: RankFailedError) -> None:
    """Let the error, if it ends this process, give it the exit code of the rank; a hook of the user stays.

    The hook is there as long as the error is: one that is caught and dropped leaves nothing behind.
    """
    is_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if sys.excepthook is sys.__excepthook__ and not is_prompt:
        sys.excepthook = _print_and_leave
        weakref.finalize(error, _restore_hook).atexit = False


def _restore_hook() -> None:
    if sys.excepthook is _print_and_leave:
        sys.excepthook = sys.__excepthook__


def _print_and_leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, RankFailedError):
        raise SystemExit(exit_status(error.exit_code))


def _pass_on(interruption: JobInterrupted) -> NoReturn:
    """Do in this process what the signal would have done, now that the ranks are gone."""
    if interruption.number == signal.SIGINT:
        raise KeyboardInterrupt from None
    if callable(interruption.previous):
        interruption.previous(interruption.number, None)
    raise SystemExit(128 + interruption.number) from None
