"""A pool of ranks: real processes with a real process group, reused for thousands of short calls.

[Note: The processes of a pool] After a failed call, messages between the ranks may still be in
flight, so all processes are ended and the next call starts new ones. Forking one from the warm
server takes about a tenth of a second, fast enough for every step of hypothesis' shrinking.
"""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple, Self

from fabric._fabric import Fabric
from fabric.errors import UsageError
from fabric.launchers.base import node_worlds
from fabric.launchers.function import UNKNOWN_EXIT_CODE, fork_server, payload_of_call
from fabric.launchers.rank import ControlThread
from fabric.launchers.serialize import Call, dump_call, dump_result, has_cloudpickle, load
from fabric.launchers.supervisor import RankProcess, Supervisor, describe_exit
from fabric.seed import seed_everything
from fabric.testing.base import (
    Report,
    arguments_of_rank,
    check_arguments,
    error_report,
    function_name,
    rank_failed_error,
)

__all__ = ["RankPool"]

_START = 120.0  # seconds for the ranks to connect
_COLLECT = 0.15  # seconds for the other ranks to answer after one has failed
_EXIT = 1.0  # seconds for the ranks to exit by themselves
_STACK = 0.5  # seconds for a hanging rank to write its stack
_PIPE_SIZE = 1 << 16  # bytes that can be sent without a reader
# Paths in the innermost frame of a rank that waits for others; the last is for checked mode.
_WHERE_RANKS_WAIT = ("torch/distributed/", "fabric/communicators/", "fabric/diagnostics/checker")


class _Reply(NamedTuple):
    """The answer of a rank to a call.

    Attributes:
        report: what happened, without the error.
        payload: the pickled result or error. Empty if an error cannot be pickled.
    """

    report: Report
    payload: bytes


class RankPool:
    """A world whose ranks are processes on this machine, connected by gloo on loopback.

    The processes are forked from a warm server at the first call and reused. Functions are sent by
    value with ``cloudpickle``, including closures, lambdas and functions of a test module. Every
    call begins with the same random state on all ranks, in the same folder and environment. Between
    calls a rank keeps only the state of its modules and its fabric.

    Args:
        world_size: number of ranks, one process each.
        timeout: seconds that a call may take, unless ``run`` is passed another timeout.
        **options: of :class:`fabric.Fabric`, for every rank: ``strategy``, by default ``"ddp"``,
            ``precision``, and ``accelerator``, by default ``"cpu"``.

    Raises:
        ConfigurationError: a value or a combination cannot work. No process has been started.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        self.size = world_size
        self.timeout = timeout
        options = {"accelerator": "cpu", "strategy": "ddp", "devices": world_size, **options}
        self._fabric = Fabric(environment="none", launcher="forkserver", **options)
        self._job: Supervisor | None = None
        self._senders: list[threading.Thread] = []
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RankPool({self.size})"

    def run(
        self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank.

        Args:
            fn: any function.
            *args: its arguments. A :class:`PerRank` has a different value for each rank.
            timeout: seconds that this call may take. None uses the timeout of the pool.
            **kwargs: keyword arguments, like ``args``.

        Returns:
            The results in rank order, with tensors detached and on the CPU.

        Raises:
            RankFailedError: a rank raised, died or did not return in time. The text says what each
                rank did. ``__cause__`` is the exception of the rank. The next call uses new
                processes.
            ArgumentTypeError: a part of the call cannot be pickled.
            ConfigurationError: a :class:`PerRank` has another number of values.
            UsageError: the pool has been closed.
        """
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        # With the current module path, since test runners extend it while they run.
        message = pickle.dumps((sys.path, _dump(Call(fn, args, kwargs))))
        if timeout is None:
            timeout = self.timeout
        with self._lock:
            if self._closed:
                raise UsageError(
                    f"{self!r}.run({function_name(fn)})", problem="the pool has been closed"
                )
            try:
                job = self._running_job()
                self._send_to_all(job, message)
                return _results(job, function_name(fn), timeout)
            except BaseException:
                self._end(0.0)
                raise

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._end(_EXIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_job(self) -> Supervisor:
        """Return the processes of the pool, after starting them if there are none."""
        # If the server has exited, and its ranks with it, new ones are started: no call has failed.
        if self._job is not None and _has_lost_server(self._job):
            self._end(0.0)
        if self._job is None:
            job = Supervisor()
            self._job = job
            # Ends the processes of a pool that is garbage-collected, or open at the end.
            self._close = weakref.finalize(self, _close, os.getpid(), job)
            payload = payload_of_call(Call(_serve, (self._fabric,), {}))
            job.start(fork_server().start_rank, node_worlds(self.size), payload)
            _results(job, "the start of the pool", _START)
        return self._job

    def _send_to_all(self, job: Supervisor, message: bytes) -> None:
        """Send a call to all ranks."""
        self._senders.clear()
        for rank in job.ranks:
            del rank.messages["reply"]
            if len(message) < _PIPE_SIZE:
                rank.send("call", message)
                continue
            # In another thread, since this one has a time limit: a stopped rank does not read.
            sender = threading.Thread(target=rank.send, args=("call", message))
            self._senders.append(sender)
            sender.start()

    def _end(self, grace: float) -> None:
        """End the processes. With a grace period in seconds, the ranks first exit by themselves."""
        job = self._job
        self._job = None
        if job is None:
            return
        if grace:
            for rank in job.ranks:
                rank.send("call", None)
        job.collect_until(grace)
        for rank in job.ranks:
            rank.kill()
        for sender in self._senders:
            sender.join()
        self._close()


def _has_lost_server(job: Supervisor) -> bool:
    """Return whether a rank has ended since its server did."""
    return any(rank.poll() and rank.exit_code == UNKNOWN_EXIT_CODE for rank in job.ranks)


def _close(owner: int, job: Supervisor) -> None:
    """End the processes of a job. In a fork of the owner, do nothing."""
    if os.getpid() == owner:
        job.close()


def _results(job: Supervisor, call: str, timeout: float) -> list[Any]:
    """Return the results of the ranks, or raise if a rank fails or does not answer in time."""

    def all_have_answered() -> bool:
        return all("reply" in rank.messages or rank.poll() for rank in job.ranks)

    def is_settled() -> bool:
        return all_have_answered() or _has_failed(job)

    job.collect_until(timeout, is_settled)
    has_failed = _has_failed(job)
    if has_failed:
        job.collect_until(_COLLECT, all_have_answered)
    elif all_have_answered():
        return [load(rank.messages["reply"].payload) for rank in job.ranks]
    reports: list[Report] = []
    for rank in job.ranks:
        if "reply" in rank.messages:
            reports.append(_received_report(rank.messages["reply"]))
        elif rank.exit_code is not None:
            reports.append(_exit_report(rank, rank.exit_code))
        elif has_failed:
            reports.append(Report(rank=rank.global_rank, did="was still in the call"))
        else:
            reports.append(_timeout_report(job, rank, timeout))
    raise rank_failed_error(call, reports)


def _has_failed(job: Supervisor) -> bool:
    """Return whether a rank has raised, or has ended without an answer."""
    for rank in job.ranks:
        if "reply" in rank.messages:
            has_failed = rank.messages["reply"].report.failed
        else:
            has_failed = rank.poll()
        if has_failed:
            return True
    return False


def _received_report(reply: _Reply) -> Report:
    """Return the report that a rank has sent, with the rank's error if it can be loaded."""
    if not reply.report.failed or not reply.payload:
        return reply.report
    with suppress(Exception):  # the text of an error that cannot be loaded is in the report
        return replace(reply.report, error=load(reply.payload))
    return reply.report


def _exit_report(rank: RankProcess, exit_code: int) -> Report:
    """Return the report of a rank whose process has ended."""
    return Report(
        rank=rank.global_rank,
        did=describe_exit(exit_code),
        failed=True,
        exit_code=exit_code,
        text=rank.read_stack(),
    )


def _timeout_report(job: Supervisor, rank: RankProcess, timeout: float) -> Report:
    """Return the report of a rank that is still running."""
    stack = _stack(job, rank)
    _, _, frames = stack.partition("\n")
    innermost, _, _ = frames.partition("\n")
    is_waiting = any(path in innermost for path in _WHERE_RANKS_WAIT)
    return Report(
        rank=rank.global_rank,
        did=f"did not return within {timeout:g} s",
        failed=True,
        secondary=int(is_waiting),
        exit_code=-signal.SIGKILL,
        text=stack,
    )


def _stack(job: Supervisor, rank: RankProcess) -> str:
    """Return the current stack of a rank, innermost frame first."""
    if "serving" not in rank.messages:
        return ""
    rank.kill(signal.SIGUSR1)
    # The rank writes line by line, and the frames of this file, which are left out, come last.
    job.collect_until(_STACK, lambda: __file__ in rank.read_stack())
    frames, _, _ = rank.read_stack().partition(__file__)
    complete_lines, _, _ = frames.rpartition("\n")
    return complete_lines


def _serve(fabric: Fabric) -> None:
    """Run a rank of a pool: connect, then make one call after another until the pool is closed."""
    control = ControlThread.of_this_process()
    assert control is not None, "a pool starts ranks"
    world = control.config.world
    # Only the owner handles Ctrl-C; its run() ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # faulthandler's handler is in C, so it works while the main thread waits in a collective. The
    # file stays open.
    stacks = open(control.config.stack_file, "ab", buffering=0)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    control.send("serving")
    fabric._join_job(world)
    control.send("reply", _Reply(Report(rank=world.rank), dump_result(None)))
    folder = os.open(".", os.O_RDONLY)
    environment = dict(os.environ)
    message = control.calls.get()
    while message is not None:
        reply = _run_call(fabric, world.rank, message)
        os.fchdir(folder)  # by file descriptor, since its path may no longer exist
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        control.send("reply", reply)
        message = control.calls.get()


def _run_call(fabric: Fabric, rank: int, message: bytes) -> _Reply:
    """Run a call on this rank, and return the reply with its result or error."""
    try:
        sys.path[:], call = load(message)
        fn, args, kwargs = load(call)
        # A call draws the same numbers whatever ran before. Otherwise a failing example could not
        # be repeated.
        seed_everything(0)
        args, kwargs = arguments_of_rank(args, kwargs, rank)
        result = fn(fabric, *args, **kwargs)
        return _Reply(Report(rank=rank), dump_result(result))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 (run() raises it in the caller)
        report = error_report(rank, error)
        payload = b""
        with suppress(Exception):  # an error that cannot be pickled is sent as text only
            payload = dump_result(report.error)
        return _Reply(replace(report, error=None), payload)


def _dump(call: Call) -> bytes:
    """Pickle a call.

    Functions of test code are pickled by value, since ranks may be unable to import modules that a
    test runner has loaded in its own way.
    """
    test_module = _module_of_test_runner(call.fn)
    if test_module is None or not has_cloudpickle():
        return dump_call(call, main_is_importable=False).data
    import cloudpickle  # an optional dependency

    was_registered = test_module.__name__ in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(test_module)
    try:
        return dump_call(call, main_is_importable=False, by_name=False).data
    finally:
        if not was_registered:
            cloudpickle.unregister_pickle_by_value(test_module)


def _module_of_test_runner(fn: Callable[..., Any]) -> ModuleType | None:
    """Return the module of a function if pytest has loaded the module, else None."""
    function = getattr(fn, "func", fn)  # the function of a functools.partial
    module = sys.modules.get(getattr(function, "__module__", ""))
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if type(loader).__module__.startswith("_pytest."):
        return module
    return None
