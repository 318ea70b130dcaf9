"""Launchers that run a function in new processes: spawn, fork and forkserver."""

import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, NoReturn

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError
from fabric.launchers.base import Launcher, LaunchSpec, available_cores, rank_variables, single_node_worlds
from fabric.launchers.child import CallPayload, refuse_while_importing_main, start_interpreter
from fabric.launchers.forkserver import fork_server
from fabric.launchers.notebook import initialized_backend
from fabric.launchers.rank import RankConfig, run_payload
from fabric.launchers.rank_process import Process, exit_status
from fabric.launchers.serialize import load_result
from fabric.launchers.supervisor import JobInterrupted, Supervisor

__all__ = ["ProcessLauncher"]


class ProcessLauncher(Launcher):
    """Runs a function in new processes on this machine and returns what it returned there.

    ``"spawn"`` starts a new interpreter for each rank: the slowest and the most isolated. ``"forkserver"`` forks fresh
    processes from a warm one that has torch loaded and is kept as long as this process lives: as clean as spawn, and a
    second launch takes hundredths of a second. ``"fork"`` copies this process, so that nothing has to be pickled; it is
    refused once CUDA is initialized, and its ranks run with one thread per operation, because the thread pool of an
    operation that ran before the fork does not exist in the copy: waiting for it would never end. Do not raise the
    number of threads in such a rank.

    Functions of importable modules need nothing; closures, lambdas and what a script or notebook defines are sent by
    value with ``cloudpickle``. Without it a function of a script is found by importing the script in every rank, which
    then needs an ``if __name__ == "__main__"`` guard.

    Args:
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        ConfigurationError: another start method.
    """

    def __init__(self, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        if start_method not in ("spawn", "fork", "forkserver"):
            raise ConfigurationError(
                f"ProcessLauncher({start_method!r})",
                "there is no such start method",
                "'spawn', 'fork', 'forkserver'",
                "ProcessLauncher('forkserver')",
            )
        self.name = start_method

    def check(self, spec: LaunchSpec) -> None:
        """Refuse a launch while a script is being imported by a rank, and a fork that could not work.

        Raises:
            UsageError: the script has no guard, and a rank imports it.
            ConfigurationError: a device library is initialized that does not survive a fork.
        """
        refuse_while_importing_main()
        backend = initialized_backend(spec.device_type) if self.name == "fork" else None
        if backend is not None:
            raise ConfigurationError(
                "the start method 'fork'",
                f"{backend} is initialized in this process, and a forked copy of it cannot use {backend}",
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
            MissingDependencyError: ``fn`` has to be sent by value and ``cloudpickle`` is not installed.
            RankFailedError: a rank raised, exited without returning, or was killed; the others have been ended. If
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
        try:
            results = self._run(partial(fn, *args, **kwargs), spec)
        except JobInterrupted as interruption:
            _pass_on(interruption)
        except RankFailedError as error:
            _exit_as_the_rank(error)
            raise
        if spec.results == "none":
            return None
        return load_result(results[0]) if spec.results == "first" else [load_result(result) for result in results]

    def _run(self, call: "partial[Any]", spec: LaunchSpec) -> list[bytes]:
        # Before any process starts: what cannot be pickled is an error here.
        payload = None if self.name == "fork" else CallPayload.of_this_process((call.func, call.args, call.keywords))
        variables = rank_variables(os.environ, spec.num_processes, available_cores(), sys.platform)
        with Supervisor(needs_results=True) as job:
            start: Callable[[Connection, RankConfig], Process] = {
                "spawn": _spawn,
                "fork": partial(_fork, job, _InheritedCall(call)),
                "forkserver": fork_server(os.getpid()).start_rank,
            }[self.name]
            for world in single_node_worlds(spec.num_processes):
                job.start(start, world, variables, returns=spec.wants_result_of(world.rank))
            if payload is not None:
                job.send_payload(payload)
            return job.run()


@dataclass(frozen=True)
class _InheritedCall:
    """A call in the memory that a forked rank shares."""

    call: Callable[[], Any]
    skips_teardown = True

    def load(self) -> Callable[[], Any]:
        return self.call


class _ForkedProcess:
    """A process of ``multiprocessing`` in the shape that the supervisor knows."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode


def _fork(job: Supervisor, payload: _InheritedCall, control: Connection, config: RankConfig) -> Process:
    process = multiprocessing.get_context("fork").Process(target=_forked_rank, args=(job, payload, control, config))
    process.start()
    return _ForkedProcess(process)


def _forked_rank(job: Supervisor, payload: _InheritedCall, control: Connection, config: RankConfig) -> None:
    # It must not hold the pipes of the others open, or they would outlive the parent.
    job.release_in_child()
    sys.exit(run_payload(control, replace(config, threads=1), payload))


def _spawn(control: Connection, config: RankConfig) -> Process:
    return start_interpreter("fabric.launchers.rank:main", control.fileno(), stdin=subprocess.DEVNULL)


def _exit_as_the_rank(error: RankFailedError) -> None:
    """Let the error, if it ends this process, give it the exit code of the rank; a hook of the user stays.

    The hook is there as long as the error is: one that is caught and dropped takes the hook with it.
    """
    is_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if sys.excepthook is sys.__excepthook__ and not is_prompt:
        sys.excepthook = _print_and_exit
        weakref.finalize(error, _restore_hook).atexit = False


def _restore_hook() -> None:
    if sys.excepthook is _print_and_exit:
        sys.excepthook = sys.__excepthook__


def _print_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
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
