"""A pool of ranks: real processes with a real process group, reused for thousands of short calls.

[Note: The processes of a pool] The processes are forked from a fork server, which has torch loaded;
see function.py. After a failed call, messages between the ranks may still be in flight. So all
processes are ended, and the next call starts new ones. To fork a process takes about a tenth of a
second, which is fast enough for every step of hypothesis' shrinking.

The pool sends a message "call" to each rank, and the rank answers with a message "reply"; see
``[Note: Control pipe]`` in rank.py.
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
    FailureRole,
    Report,
    arguments_of_rank,
    check_arguments,
    error_report,
    function_name,
    rank_failed_error,
    timeout_report,
)

__all__ = ["RankPool"]

_START_TIMEOUT = 120.0  # seconds for the ranks to connect
_COLLECT_TIMEOUT = 0.15  # seconds for the other ranks to answer after one has failed
# Seconds for the rank that caused a failure to answer, if all known failures are consequences.
_CAUSE_TIMEOUT = 5.0
_EXIT_TIMEOUT = 1.0  # seconds for the ranks to exit by themselves
_STACK_TIMEOUT = 0.5  # seconds for a hanging rank to write its stack
_PIPE_SIZE = 1 << 16  # bytes that can be sent before the receiver reads
# Paths in the innermost frame of a rank that waits for other ranks. The last path is that of the
# checked mode.
_WHERE_RANKS_WAIT = ("torch/distributed/", "fabric/communicators/", "fabric/diagnostics/checker")


class _Reply(NamedTuple):
    """The answer of a rank to a call.

    Attributes:
        report: what happened, without the error.
        payload: the pickled result or error. Empty if the error cannot be pickled.
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
        **options: options of :class:`fabric.Fabric`, for every rank. The default of ``strategy`` is
            ``"ddp"``, and the default of ``accelerator`` is ``"cpu"``.

    Raises:
        ConfigurationError: an option, or a combination of options, cannot work. No process has been
            started.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        """Check the options. The first call of :meth:`run` starts the processes."""
        self.size = world_size
        self.timeout = timeout
        options = {"accelerator": "cpu", "strategy": "ddp", "devices": world_size, **options}
        # The fabric is sent to the ranks. It is created here, so that invalid options raise at
        # once.
        self._fabric = Fabric(environment="none", launcher="forkserver", **options)
        self._supervisor: Supervisor | None = None  # None while there are no processes
        self._sender_threads: list[threading.Thread] = []
        self._is_closed = False
        self._lock = threading.Lock()  # guards all of the above: one call runs at a time

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
            ConfigurationError: a :class:`PerRank` has another number of values than there are
                ranks.
            UsageError: the pool has been closed.
        """
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        pickled_call = _dump_call(Call(fn, args, kwargs))
        # The ranks get the current sys.path, since test runners extend it while they run.
        message = pickle.dumps((sys.path, pickled_call))
        if timeout is None:
            timeout = self.timeout
        with self._lock:
            if self._is_closed:
                raise UsageError(
                    f"{self!r}.run({function_name(fn)})", problem="the pool has been closed"
                )
            try:
                supervisor = self._running_supervisor()
                self._send_to_all(supervisor, message)
                return _collect_results(supervisor, function_name(fn), timeout)
            except BaseException:
                # The ranks may be in the middle of the call, so they cannot be used again. The next
                # call starts new ones.
                self._end(grace=0.0)
                raise

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._end(grace=_EXIT_TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_supervisor(self) -> Supervisor:
        """Return the supervisor of the pool's processes. Start processes if there are none."""
        # If the fork server was killed, its ranks have ended, too. No call has failed, so new ranks
        # are started without an error.
        if self._supervisor is not None and _has_lost_server(self._supervisor):
            self._end(grace=0.0)
        if self._supervisor is None:
            supervisor = Supervisor()
            self._supervisor = supervisor
            # _end() calls this finalizer. It is also called when the pool is garbage-collected, and
            # when this process exits.
            self._close_supervisor = weakref.finalize(self, _close, os.getpid(), supervisor)
            # Each rank runs _serve(), which makes the calls that the pool sends.
            payload = payload_of_call(Call(_serve, (self._fabric,), {}))
            supervisor.start(fork_server().start_rank, node_worlds(self.size), payload)
            # Waits until all ranks are connected: each of them then sends a first reply, as if to a
            # call.
            _collect_results(supervisor, "the start of the pool", _START_TIMEOUT)
        return self._supervisor

    def _send_to_all(self, supervisor: Supervisor, message: bytes) -> None:
        """Send a call to all ranks, without waiting for a rank that does not read.

        Args:
            supervisor: the supervisor of the ranks, which have all replied to the previous call.
            message: the pickled call.
        """
        # All ranks have replied, so the threads that sent the previous call have ended.
        self._sender_threads.clear()
        for rank in supervisor.ranks:
            # Remove the reply to the previous call. Before the first call, this is the reply by
            # which the rank has said that it is ready. Then a "reply" means a new one.
            del rank.messages["reply"]
            if len(message) < _PIPE_SIZE:
                rank.send("call", message)
                continue
            # Sending a large message blocks until the rank reads, and a stopped rank never reads.
            # This thread must not block, because it watches the time limit. So another thread
            # sends.
            sender_thread = threading.Thread(target=rank.send, args=("call", message))
            self._sender_threads.append(sender_thread)
            sender_thread.start()

    def _end(self, grace: float) -> None:
        """End the processes, if there are any. Call this method with the lock.

        Args:
            grace: seconds that the ranks have to exit by themselves, or 0 to kill them at once.
        """
        supervisor = self._supervisor
        self._supervisor = None
        if supervisor is None:
            return
        if grace > 0:
            for rank in supervisor.ranks:
                rank.send("call", None)  # asks the rank to exit
        supervisor.collect_until(grace)
        for rank in supervisor.ranks:
            rank.kill()
        # The sender threads end, since their ranks have been killed. They must have ended before
        # the pipes are closed.
        for sender_thread in self._sender_threads:
            sender_thread.join()
        self._close_supervisor()


def _has_lost_server(supervisor: Supervisor) -> bool:
    """Return whether a rank has ended because the fork server was killed."""
    for rank in supervisor.ranks:
        has_ended = rank.poll()
        if has_ended and rank.exit_code == UNKNOWN_EXIT_CODE:
            return True
    return False


def _close(owner: int, supervisor: Supervisor) -> None:
    """End the processes of a pool, unless this process is a fork of the pool's owner.

    Args:
        owner: the id of the process that has started the pool.
        supervisor: the supervisor of the processes.
    """
    if os.getpid() == owner:
        supervisor.close()


def _collect_results(supervisor: Supervisor, call_text: str, timeout: float) -> list[Any]:
    """Wait for the replies of the ranks, and return their results in rank order.

    Args:
        supervisor: the supervisor of the ranks.
        call_text: the name of the call, for the error.
        timeout: how long to wait at most, in seconds.

    Raises:
        RankFailedError: a rank raised, ended, or did not reply in time.
    """

    def have_all_answered() -> bool:
        """Return whether every rank has replied or ended, so that no reply is missing."""
        return all("reply" in rank.messages or rank.poll() for rank in supervisor.ranks)

    def is_settled() -> bool:
        """Return whether waiting longer would not change that the call succeeds or fails."""
        return have_all_answered() or _has_failed(supervisor)

    supervisor.collect_until(timeout, is_settled)
    has_failed = _has_failed(supervisor)
    if not has_failed and have_all_answered():
        return [load(rank.messages["reply"].payload) for rank in supervisor.ranks]
    if has_failed:
        _collect_cause(supervisor, have_all_answered)
    reports: list[Report] = []
    for rank in supervisor.ranks:
        if "reply" in rank.messages:
            report = _received_report(rank.messages["reply"])
        elif rank.exit_code is not None:
            report = _exit_report(rank, rank.exit_code)
        elif has_failed:
            report = Report(rank=rank.global_rank, outcome="was still in the call")
        else:
            report = _report_of_running_rank(supervisor, rank, timeout)
        reports.append(report)
    raise rank_failed_error(call_text, reports)


def _collect_cause(supervisor: Supervisor, have_all_answered: Callable[[], bool]) -> None:
    """Wait for the replies of other ranks after a failure, which may not be the cause.

    Args:
        supervisor: the supervisor of the ranks.
        have_all_answered: returns whether every rank has replied or ended.
    """
    supervisor.collect_until(_COLLECT_TIMEOUT, have_all_answered)

    def has_cause() -> bool:
        """Return whether the cause is known, or no rank is left that could be the cause."""
        return have_all_answered() or _has_failed_by_itself(supervisor)

    # A rank has a longer time if all known failures are consequences of its failure.
    if not has_cause():
        supervisor.collect_until(_CAUSE_TIMEOUT, has_cause)


def _has_failed(supervisor: Supervisor) -> bool:
    """Return whether any rank has raised, or has ended without a reply."""
    return any(_failure_role(rank) is not None for rank in supervisor.ranks)


def _has_failed_by_itself(supervisor: Supervisor) -> bool:
    """Return whether any rank has failed, and not because of another rank's failure."""
    return any(_failure_role(rank) is FailureRole.POSSIBLE_CAUSE for rank in supervisor.ranks)


def _failure_role(rank: RankProcess) -> FailureRole | None:
    """Return the role of a rank that has failed, or None for a rank that has not failed."""
    if "reply" in rank.messages:
        report = rank.messages["reply"].report
        return report.role if report.has_failed else None
    if rank.poll():
        return FailureRole.POSSIBLE_CAUSE
    return None


def _received_report(reply: _Reply) -> Report:
    """Return the report that a rank has sent, with the rank's error if the error can be loaded."""
    has_pickled_error = reply.report.has_failed and reply.payload != b""
    if not has_pickled_error:
        return reply.report
    # If the error cannot be loaded in this process, the report still has the error's text.
    with suppress(Exception):
        return replace(reply.report, error=load(reply.payload))
    return reply.report


def _exit_report(rank: RankProcess, exit_code: int) -> Report:
    """Return the report of a rank whose process has ended without a reply."""
    # The rank has sent an error if it has ended itself because it could never go on.
    stack = rank.failure.text if rank.failure is not None else rank.read_stack()
    return Report(
        rank=rank.global_rank,
        outcome=describe_exit(exit_code),
        has_failed=True,
        exit_code=exit_code,
        stack=stack,
    )


def _report_of_running_rank(supervisor: Supervisor, rank: RankProcess, timeout: float) -> Report:
    """Return the report of a rank that is still running after ``timeout`` seconds."""
    stack = _current_stack(supervisor, rank)
    # The first line of the stack is a title, and the second line is the innermost frame.
    _, _, frames = stack.partition("\n")
    innermost_frame, _, _ = frames.partition("\n")
    is_waiting = any(path in innermost_frame for path in _WHERE_RANKS_WAIT)
    return timeout_report(
        rank.global_rank,
        stack,
        timeout,
        is_waiting=is_waiting,
        exit_code=-signal.SIGKILL,  # the pool kills the rank after this report
    )


def _current_stack(supervisor: Supervisor, rank: RankProcess) -> str:
    """Have a running rank write the stack of its main thread, and return the stack.

    The innermost frame comes first. Frames of this file and frames that called them are left out.
    The result is "" if the rank is still starting.
    """
    is_serving = "serving" in rank.messages
    if not is_serving:
        return ""
    rank.kill(signal.SIGUSR1)
    # The rank writes the stack line by line. The frames of this file come last in the stack. So
    # once the file name is there, all frames of the user are there.
    supervisor.collect_until(_STACK_TIMEOUT, lambda: __file__ in rank.read_stack())
    user_frames, _, _ = rank.read_stack().partition(__file__)
    complete_lines, _, _ = user_frames.rpartition("\n")
    return complete_lines


def _serve(fabric: Fabric) -> None:
    """Run a rank of a pool: connect, then make one call after another until the pool is closed.

    This function runs in the main thread of each rank.

    Args:
        fabric: the rank's copy of the pool's fabric, which is not connected yet.
    """
    control_thread = ControlThread.of_this_process()
    assert control_thread is not None, "this process was not started by a supervisor"
    world = control_thread.config.world
    # On Ctrl-C the owner of the pool raises KeyboardInterrupt in run(), which ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pool sends SIGUSR1 to a rank that hangs. The handler of faulthandler is written in C, so
    # it works while the main thread waits in a collective. The file stays open for the handler.
    stack_file = open(control_thread.config.stack_file, "ab", buffering=0)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    # From now on the pool may send SIGUSR1, which would end a process without this handler. So this
    # is sent before the connection, in which a rank may hang.
    control_thread.send("serving")
    fabric._join_job(world)  # collective: waits until all ranks are connected
    # When the pool starts the ranks, it waits for this reply, whose result it ignores.
    first_report = Report(rank=world.rank)
    control_thread.send("reply", _Reply(first_report, dump_result(None)))
    folder_fd = os.open(".", os.O_RDONLY)
    environment = dict(os.environ)
    message = control_thread.calls.get()  # waits until the pool sends a call
    while message is not None:  # None means that the pool is closed, and this rank ends
        reply = _run_call(fabric, world.rank, message)
        # Undo what the call has done to the working directory and to the environment. The directory
        # is known by its descriptor, since its path may no longer exist.
        os.fchdir(folder_fd)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        control_thread.send("reply", reply)
        message = control_thread.calls.get()


def _run_call(fabric: Fabric, rank: int, message: bytes) -> _Reply:
    """Run a call on this rank, and return the reply with the result or the error.

    Args:
        fabric: the connected fabric of this rank.
        rank: this rank.
        message: the message of :meth:`RankPool.run`.

    Raises:
        SystemExit: the call exits. The rank ends.
        KeyboardInterrupt: a call has raised it. The rank ends.
    """
    try:
        # The path is set first, because loading the call imports modules.
        sys.path[:], pickled_call = load(message)
        fn, args, kwargs = load(pickled_call)
        # Every call draws the same random numbers, whatever ran before it. Otherwise a failing
        # example of a test could not be repeated.
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


def _dump_call(call: Call) -> bytes:
    """Pickle a call for the ranks of a pool.

    Functions of a test module are pickled by value, since ranks may be unable to import modules
    that a test runner has loaded in its own way.
    """
    test_module = _module_of_test_runner(call.fn)
    # main_is_importable is False, since the __main__ of this process is the test runner, which a
    # rank must not import.
    if test_module is None or not has_cloudpickle():
        return dump_call(call, main_is_importable=False).data
    import cloudpickle  # an optional dependency

    # cloudpickle pickles functions of an importable module by value if the module is registered.
    was_registered = test_module.__name__ in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(test_module)
    try:
        return dump_call(call, main_is_importable=False, by_name=False).data
    finally:
        # If the user has registered the module before, it stays registered.
        if not was_registered:
            cloudpickle.unregister_pickle_by_value(test_module)


def _module_of_test_runner(fn: Callable[..., Any]) -> ModuleType | None:
    """Return the module of a function if pytest has loaded the module, else None."""
    function = getattr(fn, "func", fn)  # the function of a functools.partial
    module = sys.modules.get(getattr(function, "__module__", ""))
    spec = getattr(module, "__spec__", None)
    loader = getattr(spec, "loader", None)
    # pytest rewrites the assertions of test modules, and so has a loader of its own.
    is_loaded_by_pytest = type(loader).__module__.startswith("_pytest.")
    if is_loaded_by_pytest:
        return module
    return None
