"""A pool of ranks: real processes with a real process group, reused for thousands of short calls.

The processes are forked from a fork server, which has torch loaded; see function.py. After a failed
call, messages between the ranks may still be in flight. So all processes are ended, and the next
call starts new ones. To fork a process takes about a tenth of a second, which is fast enough for
every step of hypothesis' shrinking.

The pool sends a message "call" to each rank, and the rank answers with a message "reply".
"""

# See [Note: Control pipe] in rank.py.

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from types import ModuleType
from typing import Any, NamedTuple, Self, cast

import torch.distributed as dist

from fabric._fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.launchers.base import node_worlds
from fabric.launchers.fork_server import UNKNOWN_EXIT_CODE, ForkServer, fork_server
from fabric.launchers.function import payload_of_call
from fabric.launchers.global_state import GlobalState
from fabric.launchers.rank import ControlThread
from fabric.launchers.serialize import Call, dump_call, dump_result, has_cloudpickle, load
from fabric.launchers.supervisor import (
    RankProcess,
    Supervisor,
    describe_exit,
    processor_seconds,
)
from fabric.launchers.terminal import DEBUG_TIMEOUT, DebuggedRank, check_debug_rank
from fabric.seed import seed_everything
from fabric.testing.base import (
    FailureRole,
    Report,
    arguments_of_rank,
    check_arguments,
    check_unchanged,
    error_report,
    function_name,
    rank_failed_error,
    timeout_report,
)
from fabric.testing.patches import (
    Patch,
    applied,
    find_test_module,
    is_test_module,
    replaced_attributes,
)
from fabric.testing.rank_warnings import (
    RankWarning,
    WarningRegistries,
    dump_warnings,
    recorded_warnings,
)
from fabric.testing.stacks import frames_of_faulthandler, is_waiting, position
from fabric.testing.state import check_group
from fabric.testing.time_limits import CallTimes, ShrinkingBudget

__all__ = ["Group", "RankPool"]

_START_TIMEOUT = 120.0  # seconds for the ranks to connect
_COLLECT_TIMEOUT = 0.15  # seconds for the other ranks to answer after one has failed
# Seconds for the rank that is the cause to answer, if the known failures follow from its failure.
_CAUSE_TIMEOUT = 5.0
_EXIT_TIMEOUT = 1.0  # seconds for the ranks to exit by themselves
_STACK_TIMEOUT = 5.0  # seconds for a hanging rank to write its stack
_IDLE_TIME = 0.2  # seconds over which the processor time of ranks is measured
# Ranks that use at most this share of a core are idle. Their threads wake up to poll.
_IDLE_LOAD = 0.11
_PIPE_SIZE = 1 << 16  # bytes that can be sent before the receiver reads


class Group(NamedTuple):
    """An argument of ``run`` for which each rank is passed a process group of these ranks.

    :meth:`RankPool.group` makes it.
    """

    ranks: tuple[int, ...]


class _CallMessage(NamedTuple):
    """A call, and the state of this process that travels with it.

    Attributes:
        path: ``sys.path``, since test runners extend it while they run.
        environment: variables that have changed since the start of the ranks. A variable that was
            deleted is None.
        patches: the attributes of modules that are replaced during the call.
        pickled_call: the function and its arguments.
    """

    path: Sequence[str]
    environment: Mapping[str, str | None]
    patches: Sequence[Patch]
    pickled_call: bytes


class _Reply(NamedTuple):
    """The answer of a rank to a call.

    Attributes:
        report: what happened. Its field ``error`` is None, since the error is the payload.
        payload: the pickled result or error. Empty if the error cannot be pickled.
        warnings: the pickled warnings of the call. Empty if there are none.
    """

    report: Report
    payload: bytes
    warnings: bytes = b""


class RankPool:
    """A world whose ranks are processes on this machine, connected by gloo on loopback.

    The processes are forked from a warm server at the first call and reused. Functions are sent by
    value with ``cloudpickle``, including closures, lambdas and functions of a test module. Every
    call begins with the same random state on all ranks, in the same folder, and with the changes
    that this process has made to its environment variables. Between calls a rank keeps only the
    state of its modules and its fabric. :meth:`patch` replaces attributes of modules on the ranks.

    Args:
        world_size: number of ranks, one process each.
        timeout: seconds that a call may take, unless ``run`` is passed another timeout. Once a
            function has exceeded it, later calls of the function end when their ranks have been
            idle for 0.2 seconds, or for 20 times the slowest call of the function that passed.
        max_shrinking_time: seconds that failing calls may take in one run of a hypothesis test,
            after the first of them. Then the pool rejects new examples, so that hypothesis reports
            the smallest one so far.
        preload: names of modules that are imported before the ranks are forked, so that their
            import counts into no timeout, and is not repeated when failed ranks are replaced. Not
            for modules whose import starts threads or uses a GPU.
        check_inputs: whether a call fails if a rank has changed its arguments in place.
        reset: whether each call ends with the default dtype and device, the grad mode, the number
            of threads, the deterministic and precision flags of torch, and the filters of warnings
            that the ranks started with, and fails if it has destroyed the pool's process group.
            Warnings of the ranks are then given again in this process, once for all ranks. With
            False each rank prints its warnings.
        debug: the rank that gets the terminal, so that ``breakpoint()`` opens Python's debugger in
            it. The other ranks skip ``breakpoint()``, and no call has a timeout.
        **options: options of :class:`fabric.Fabric`, for every rank. The default of ``strategy`` is
            ``"ddp"``, and the default of ``accelerator`` is ``"cpu"``.

    Raises:
        ConfigurationError: an option, or a combination of options, cannot work, or a module of
            ``preload`` does not exist. No process has been started.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 30.0,
        max_shrinking_time: float = 30.0,
        preload: Sequence[str] = (),
        check_inputs: bool = False,
        reset: bool = True,
        debug: int | None = None,
        **options: Any,
    ) -> None:
        """Check the options. The first call of :meth:`run` starts the processes."""
        self.size = world_size
        self.timeout = timeout
        self._check_inputs = check_inputs
        self._reset = reset
        self._debug = debug
        options = {"accelerator": "cpu", "strategy": "ddp", "devices": world_size, **options}
        # The ranks get copies of this fabric. Invalid options raise here.
        self._fabric = Fabric(environment="none", launcher="forkserver", **options)
        if debug is not None:
            check_debug_rank(f"RankPool({world_size}, debug={debug!r})", debug, world_size)
        self._supervisor: Supervisor | None = None  # None while there are no processes
        # The variables of this process when the ranks were started.
        self._start_environment: dict[str, str] = {}
        self._patches: list[Patch] = []  # one for each block of patch() that is entered
        self._warning_registries = WarningRegistries()
        self._call_times = CallTimes()
        self._shrinking_budget = ShrinkingBudget(max_shrinking_time)
        # Forks the ranks. None uses the fork server that all pools of this process share.
        self._preloading_server: ForkServer | None = None
        if preload:
            _check_modules(preload)
            self._preloading_server = ForkServer.with_modules(preload)
        self._sender_threads: list[threading.Thread] = []  # see _send_to_all()
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
            Warning: a rank has warned, and a filter of this process turns the warning into an
                error.
        """
        __tracebackhide__ = True  # pytest then shows the line of the test instead of this one
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        pickled_call = _dump_call(Call(fn, args, kwargs))
        self._warn_of_replaced_attributes(fn)
        # Raises an exception of hypothesis if an example has been shrunk for too long.
        self._shrinking_budget.reject_if_exceeded(pickled_call)
        if timeout is None:
            timeout = self.timeout
        if self._debug is not None:
            timeout = DEBUG_TIMEOUT.total_seconds()
        start = monotonic()
        with self._lock:
            if self._is_closed:
                raise UsageError(
                    f"{self!r}.run({function_name(fn)})", problem="the pool has been closed"
                )
            try:
                results = self._call_ranks(fn, pickled_call, timeout)
            except BaseException as error:
                self._shrinking_budget.record_failure(monotonic() - start)
                self._end_failed_call(fn, error)
                raise
            self._repeat_warnings_of_ranks()
            return results

    def _call_ranks(self, fn: Callable[..., Any], pickled_call: bytes, timeout: float) -> list[Any]:
        """Send a call to the ranks, and return their results. Start ranks if none are running.

        Args:
            fn: the function of the call.
            pickled_call: the function and its arguments.
            timeout: seconds that the call may take, without the start of the ranks.

        Raises:
            RankFailedError: a rank raised, died or did not return in time.
        """
        __tracebackhide__ = True  # pytest does not show this frame
        supervisor = self._ensure_ranks()
        message = _CallMessage(
            path=sys.path,
            environment=_changed_variables(self._start_environment, dict(os.environ)),
            patches=self._patches,
            pickled_call=pickled_call,
        )
        idle_timeout = self._call_times.idle_timeout(fn, timeout)
        limits = _TimeLimits(timeout=timeout, idle_timeout=idle_timeout)
        start = monotonic()
        self._send_to_all(supervisor, pickle.dumps(message))
        results = _collect_results(supervisor, function_name(fn), limits)
        # _collect_results() has raised if the call has failed.
        self._call_times.record_pass(fn, monotonic() - start)
        return results

    def group(self, ranks: Sequence[int]) -> Group:
        """Return an argument for :meth:`run`. The function gets a process group in its place.

        The process group is a ``torch.distributed.ProcessGroup``. All ranks make the process group
        in the first call with this argument, and keep it for later calls. As with
        ``torch.distributed.new_group``, a rank outside of the group is passed
        ``torch.distributed.GroupMember.NON_GROUP_MEMBER``.

        Args:
            ranks: the ranks of the group.

        Raises:
            ConfigurationError: one of the ranks does not exist, or there are none.
        """
        members = tuple(sorted(ranks))
        all_exist = set(members) <= set(range(self.size))
        if not members or not all_exist:
            raise ConfigurationError(
                f"{self!r}.group({list(ranks)})", problem=f"the ranks are 0 to {self.size - 1}"
            )
        return Group(members)

    @contextmanager
    def patch(self, module: ModuleType | str, attribute: str, value: object) -> Iterator[None]:
        """Replace an attribute of a module on every rank, in the calls that the block makes.

        The module of this process stays as it is. This method is not needed for globals of a test
        module: functions of a test module are sent with the globals that they use, so pytest's
        ``monkeypatch`` works.

        Args:
            module: a module that the ranks can import, or its name.
            attribute: the name of the attribute.
            value: the new value. It is pickled like a function that is passed to :meth:`run`.

        Raises:
            UsageError: the module is a test module, or has no such attribute.
            ArgumentTypeError: the value cannot be pickled.
        """
        if isinstance(module, str):
            module = importlib.import_module(module)
        name = module.__name__
        call_text = f"{self!r}.patch({name}, {attribute!r}, ...)"
        if name == "__main__" or is_test_module(module):
            raise UsageError(
                call_text,
                problem="the ranks do not import this module; its functions are sent by value",
                suggestion=f"monkeypatch.setattr({name}, {attribute!r}, ...)",
            )
        if not hasattr(module, attribute):
            raise UsageError(call_text, problem="the module has no such attribute")
        # The value is the function of a Call, since _dump_call() pickles functions of test modules.
        pickled_value = _dump_call(Call(cast(Callable[..., Any], value), (), {}))
        patch = Patch(name, attribute, pickled_value)
        self._patches.append(patch)
        try:
            yield
        finally:
            self._patches.pop()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._end(grace=_EXIT_TIMEOUT)
            self._preloading_server = None  # ends with its last reference

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn_of_replaced_attributes(self, fn: Callable[..., Any]) -> None:
        """Warn of attributes that were replaced in this process, but not on the ranks.

        For example, a test has used ``monkeypatch`` in place of :meth:`patch`.

        Args:
            fn: the function of the call.
        """
        patched = {(patch.module_name, patch.attribute) for patch in self._patches}
        for module_name, attribute in replaced_attributes(fn):
            if (module_name, attribute) not in patched:
                warnings.warn(
                    f"{self!r}.run({function_name(fn)}): {module_name}.{attribute} has been "
                    "replaced in this process. The ranks still use the original. Write: "
                    f"with pool.patch({module_name}, {attribute!r}, ...):",
                    stacklevel=3,  # the line that calls run()
                )

    def _repeat_warnings_of_ranks(self) -> None:
        """Give the warnings of the ranks again in this process. They came with the replies.

        Raises:
            Warning: a filter turns a warning into an error.
        """
        if self._supervisor is None:  # the call has failed before the ranks were started
            return
        rank_warnings: list[RankWarning] = []
        for rank in self._supervisor.ranks:
            reply: _Reply | None = rank.messages.get("reply")
            if reply is not None and reply.warnings != b"":
                rank_warnings += load(reply.warnings)
        self._warning_registries.warn_again(rank_warnings)

    def _ensure_ranks(self) -> Supervisor:
        """Start the ranks if none are running. Return their supervisor."""
        # If the fork server was killed between two calls, its ranks have ended with it. No call has
        # failed, so new ranks are started without an error.
        if self._supervisor is not None and _has_lost_server(self._supervisor):
            self._end(grace=0.0)  # sets self._supervisor to None
        if self._supervisor is None:
            self._supervisor = Supervisor()
            # The finalizer runs when the pool is garbage-collected, and when this process exits. By
            # the process id, _close() knows a forked child, which must not end the ranks.
            self._finalizer = weakref.finalize(self, _close, os.getpid(), self._supervisor)
            self._start_ranks(self._supervisor)
        return self._supervisor

    def _start_ranks(self, supervisor: Supervisor) -> None:
        """Start the ranks, and wait until all of them are connected.

        Args:
            supervisor: the supervisor, which has no ranks yet.

        Raises:
            RankFailedError: a rank could not connect.
            UsageError: the fork server has ended.
        """
        self._start_environment = dict(os.environ)
        # Each rank runs _serve(), which answers the calls of the pool.
        payload = payload_of_call(
            Call(_serve, (self._fabric, self._check_inputs, self._reset, self._debug), {})
        )
        server = self._preloading_server or fork_server()
        try:
            supervisor.start(server.start_rank, node_worlds(self.size), payload)
        except EOFError as error:  # the server has ended
            raise UsageError(
                f"the start of {self!r}",
                problem="the process that forks the ranks has ended; if the import of a module "
                "of `preload` has failed, its traceback is in the standard error",
            ) from error
        # Each rank sends a first reply as soon as it is connected.
        limits = _TimeLimits(timeout=_START_TIMEOUT, idle_timeout=_START_TIMEOUT)
        _collect_results(supervisor, "the start of the pool", limits)

    def _end_failed_call(self, fn: Callable[..., Any], error: BaseException) -> None:
        """End the processes, which may be in the middle of the call. The next call starts new ones.

        Args:
            fn: the function of the call.
            error: why the call has failed.
        """
        if isinstance(error, RankFailedError) and self._supervisor is not None:
            # This error also stands for a call that has exceeded its time limit. Then no rank has
            # raised or ended.
            is_hang = not _has_failed(self._supervisor)
            if is_hang:
                self._call_times.record_hang(fn)
        # A filter may turn a warning into an error, which must not replace `error`.
        with suppress(Warning):
            self._repeat_warnings_of_ranks()
        self._end(grace=0.0)

    def _send_to_all(self, supervisor: Supervisor, message: bytes) -> None:
        """Send a call to all ranks, without waiting for a rank that does not read.

        Args:
            supervisor: the supervisor of the ranks, which have all replied to the previous call.
            message: the pickled call.
        """
        # All ranks have replied, so the threads that sent the previous call have ended.
        self._sender_threads.clear()
        for rank in supervisor.ranks:
            # Forget the reply to the previous call, or the first one, which says that the rank is
            # connected. From here on, a "reply" is the reply to this call.
            del rank.messages["reply"]
            if len(message) < _PIPE_SIZE:
                rank.send("call", message)
                continue
            # Sending a large message blocks until the rank reads, and a stopped rank never reads.
            # This thread has to watch the time limit, so another thread sends.
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
        supervisor.collect_until(grace)  # returns earlier if all ranks have ended
        for rank in supervisor.ranks:
            rank.kill()
        # The sender threads end with their ranks, and have to end before the pipes are closed.
        for sender_thread in self._sender_threads:
            sender_thread.join()
        self._finalizer()  # closes the supervisor and its pipes


def _has_lost_server(supervisor: Supervisor) -> bool:
    """Return whether a rank has ended because the fork server was killed."""
    for rank in supervisor.ranks:
        has_ended = rank.poll()
        if has_ended and rank.exit_code == UNKNOWN_EXIT_CODE:
            return True
    return False


def _close(owner_pid: int, supervisor: Supervisor) -> None:
    """End the processes of a pool, unless this process is a fork of the pool's owner.

    A forked child inherits the finalizer of the pool, and calls this function when it exits.

    Args:
        owner_pid: the id of the process that has started the pool.
        supervisor: the supervisor of the processes.
    """
    if os.getpid() == owner_pid:
        supervisor.close()


# See [Note: Shrinking a hang] in time_limits.py.
class _TimeLimits(NamedTuple):
    """When a call counts as hanging.

    Attributes:
        timeout: seconds after which a call counts as hanging.
        idle_timeout: seconds after which a call counts as hanging if its ranks are idle. At most
            ``timeout``.
    """

    timeout: float
    idle_timeout: float


def _check_modules(names: Sequence[str]) -> None:
    """Check that modules exist, without importing them.

    Raises:
        ConfigurationError: a module does not exist.
    """
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:  # the package of the module does not exist
            spec = None
        if spec is None:
            raise ConfigurationError(
                f"RankPool(preload={list(names)!r})", problem=f"there is no module {name!r}"
            )


def _wait_for_replies(supervisor: Supervisor, limits: _TimeLimits) -> float:
    """Wait until all ranks have replied or one has failed, or until the call counts as hanging.

    Args:
        supervisor: the supervisor of the ranks.
        limits: when the call counts as hanging.

    Returns:
        The seconds after which the call counts as hanging, for the error text of such a call. Of no
        use to the caller if all ranks have replied or one has failed.
    """
    is_settled = partial(_is_settled, supervisor)
    start = monotonic()
    supervisor.collect_until(limits.idle_timeout, is_settled)
    while not is_settled():
        seconds = monotonic() - start
        if seconds >= limits.timeout:
            break
        # After idle_timeout, the call goes on only while its ranks compute. The list is made once,
        # since a rank may reply between the two measurements.
        ranks = _ranks_without_reply(supervisor)
        cpu_before = processor_seconds(ranks)
        supervisor.collect_until(_IDLE_TIME, is_settled)
        cpu_after = processor_seconds(ranks)
        # None means that the main thread of a rank is running, or that its state is unknown.
        if cpu_before is None or cpu_after is None:
            continue
        is_idle = cpu_after - cpu_before <= _IDLE_TIME * _IDLE_LOAD
        if is_idle:
            return round(monotonic() - start, 1)
    return limits.timeout


def _ranks_without_reply(supervisor: Supervisor) -> list[RankProcess]:
    """Return the ranks that have not replied to the current call."""
    return [rank for rank in supervisor.ranks if "reply" not in rank.messages]


def _collect_results(supervisor: Supervisor, call_text: str, limits: _TimeLimits) -> list[Any]:
    """Wait for the replies of the ranks, and return their results in rank order.

    Args:
        supervisor: the supervisor of the ranks.
        call_text: the name of the call, for the error.
        limits: when the call counts as hanging.

    Raises:
        RankFailedError: a rank raised, ended, or did not reply in time.
    """
    __tracebackhide__ = True  # pytest does not show this frame
    seconds_waited = _wait_for_replies(supervisor, limits)
    has_failed = _has_failed(supervisor)
    if not has_failed and _are_replies_complete(supervisor):
        return [load(rank.messages["reply"].payload) for rank in supervisor.ranks]
    if has_failed:
        _wait_for_cause(supervisor)
    reports: list[Report] = []
    for rank in supervisor.ranks:
        if "reply" in rank.messages:
            report = _received_report(rank.messages["reply"])
        elif rank.exit_code is not None:
            report = _exit_report(rank, rank.exit_code)
        elif has_failed:
            report = Report(rank=rank.global_rank, outcome="was still in the call")
        else:
            report = _report_of_running_rank(supervisor, rank, seconds_waited, limits)
        reports.append(report)
    raise rank_failed_error(call_text, reports)


def _wait_for_cause(supervisor: Supervisor) -> None:
    """Wait for other ranks after a failure, since one of them may be the cause."""
    supervisor.collect_until(_COLLECT_TIMEOUT, partial(_are_replies_complete, supervisor))
    # If all known failures follow from another failure, wait longer for the rank that is the cause.
    supervisor.collect_until(_CAUSE_TIMEOUT, partial(_is_cause_known, supervisor))


def _are_replies_complete(supervisor: Supervisor) -> bool:
    """Return whether every rank has replied or ended, so that no more replies will come."""
    return all("reply" in rank.messages or rank.poll() for rank in supervisor.ranks)


def _is_settled(supervisor: Supervisor) -> bool:
    """Return whether it is known that the call has succeeded, or that it has failed."""
    return _are_replies_complete(supervisor) or _has_failed(supervisor)


def _is_cause_known(supervisor: Supervisor) -> bool:
    """Return whether a rank has failed by itself, or no rank is left that could be the cause."""
    if _are_replies_complete(supervisor):
        return True
    return any(_failure_role(rank) is FailureRole.POSSIBLE_CAUSE for rank in supervisor.ranks)


def _has_failed(supervisor: Supervisor) -> bool:
    """Return whether any rank has raised, or has ended without a reply."""
    return any(_failure_role(rank) is not None for rank in supervisor.ranks)


def _failure_role(rank: RankProcess) -> FailureRole | None:
    """Return the role of a rank that has raised or ended. Return None for any other rank."""
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
    # A rank that ended by a Python exception has sent its traceback. After a crash, there may be a
    # stack that faulthandler has written.
    if rank.failure is not None:
        stack = rank.failure.text
    else:
        stack = rank.read_stack()
    return Report(
        rank=rank.global_rank,
        outcome=describe_exit(exit_code),
        has_failed=True,
        exit_code=exit_code,
        stack=stack,
    )


def _report_of_running_rank(
    supervisor: Supervisor, rank: RankProcess, seconds_waited: float, limits: _TimeLimits
) -> Report:
    """Return the report of a rank that is still running after ``seconds_waited`` seconds."""
    stack = _current_stack(supervisor, rank)
    frames = frames_of_faulthandler(stack)
    reason = ""
    if seconds_waited < limits.timeout:
        reason = (
            f"not {limits.timeout:g} s, since the ranks were idle and this function has hung before"
        )
    return timeout_report(
        rank.global_rank,
        stack,
        seconds_waited,
        is_waiting=is_waiting(frames),
        reason=reason,
        position=position(frames),
        exit_code=-signal.SIGKILL,  # the pool kills the rank after this report
    )


def _current_stack(supervisor: Supervisor, rank: RankProcess) -> str:
    """Have a running rank write the stack of its main thread, and return the stack.

    The innermost frame comes first. Frames of this file and frames that called them are left out.
    The result is "" if the rank is still starting.
    """
    # The rank has sent "serving" once it has a handler. Without one, SIGUSR1 would end the rank.
    can_write_stack = "serving" in rank.messages
    if not can_write_stack:
        return ""
    rank.kill(signal.SIGUSR1)

    def is_stack_settled() -> bool:
        """Return whether the rank has written all frames of the user, or cannot write."""
        # The rank writes the innermost frame first. This file calls the user's function, so all
        # frames of the user come before the first frame of this file.
        has_user_frames = __file__ in rank.read_stack()
        return has_user_frames or rank.is_suspended()

    supervisor.collect_until(_STACK_TIMEOUT, is_stack_settled)
    # What comes before the name of this file ends within a line: '  File "'.
    user_frames, _, _ = rank.read_stack().partition(__file__)
    complete_lines, _, _ = user_frames.rpartition("\n")
    return complete_lines


def _serve(fabric: Fabric, check_inputs: bool, reset: bool, debug: int | None) -> None:
    """Run a rank of a pool: connect, then make one call after another until the pool is closed.

    This function runs in the main thread of each rank.

    Args:
        fabric: the rank's copy of the pool's fabric, which is not connected yet.
        check_inputs: whether a call fails if it changes its arguments in place.
        reset: whether torch's global state is restored after each call.
        debug: the rank that gets the terminal, or None.
    """
    control_thread = ControlThread.of_this_process()
    assert control_thread is not None, "this process was not started by a supervisor"
    world = control_thread.config.world
    _install_handlers(control_thread.config.stack_file)
    # The pool sends SIGUSR1 only after this message, since the handler is there now. The message is
    # sent before the rank connects, since the connection may hang, too.
    control_thread.send("serving")
    debugged = None if debug is None else DebuggedRank(debug, is_here=False)
    fabric._join_job(world, debugged)  # collective: waits until all ranks are connected
    # The pool waits for this reply when it starts the ranks, and ignores the result.
    first_report = Report(rank=world.rank)
    control_thread.send("reply", _Reply(first_report, dump_result(None)))
    default_group = None
    if reset and dist.is_initialized():
        default_group = dist.group.WORLD
    runner = _CallRunner(
        fabric=fabric, rank=world.rank, check_inputs=check_inputs, default_group=default_group
    )
    torch_settings = GlobalState.current()
    process_settings = _ProcessSettings.current()
    message = control_thread.calls.get()  # waits until the pool sends a call
    while message is not None:  # None means that the pool is closed, and this rank ends
        if reset:
            reply = _run_recording_warnings(runner, message)
            torch_settings.restore()
        else:
            reply = runner.run(message)
        process_settings.restore()
        control_thread.send("reply", reply)
        message = control_thread.calls.get()


def _install_handlers(stack_file_path: str) -> None:
    """Ignore Ctrl-C in this rank, and write its stack to a file on SIGUSR1."""
    # On Ctrl-C, RankPool.run() raises KeyboardInterrupt in the process of the pool, and ends the
    # ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pool sends SIGUSR1 to a rank that hangs. The handler of faulthandler is written in C, so
    # it works while the main thread waits in a collective. The handler needs the file to stay open.
    stack_file = open(stack_file_path, "ab", buffering=0)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)


class _ProcessSettings(NamedTuple):
    """The environment variables and the working folder with which each call on a rank begins.

    Attributes:
        environment: the environment variables.
        folder: a file descriptor of the working folder. Unlike a path, it stays valid if a call
            renames the folder.
    """

    environment: dict[str, str]
    folder: int

    @classmethod
    def current(cls) -> Self:
        """Return the present settings of this process."""
        return cls(dict(os.environ), os.open(".", os.O_RDONLY))

    def restore(self) -> None:
        """Give this process the settings again, after a call that may have changed them."""
        os.fchdir(self.folder)
        if os.environ != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)


def _run_recording_warnings(runner: "_CallRunner", message: bytes) -> _Reply:
    """Run a call on this rank, and return the reply with the warnings of the call.

    ``message`` is a pickled :class:`_CallMessage`.
    """
    with recorded_warnings() as rank_warnings:
        reply = runner.run(message)
    if rank_warnings:
        return reply._replace(warnings=dump_warnings(rank_warnings))
    return reply


@dataclass(frozen=True, kw_only=True)
class _CallRunner:
    """The runner of a pool's calls on one rank.

    Attributes:
        fabric: the connected fabric of the rank.
        rank: the rank.
        check_inputs: whether a call fails if it changes its arguments in place.
        default_group: torch's default group. A call fails if it destroys this group. None, as for a
            fabric that needs no process group, checks nothing.
        groups: the process groups that the rank has made for arguments of :meth:`RankPool.group`.
    """

    fabric: Fabric
    rank: int
    check_inputs: bool
    default_group: dist.ProcessGroup | None
    groups: dict[Group, Any] = field(default_factory=dict)

    def run(self, message: bytes) -> _Reply:
        """Run a call on this rank, and return the reply with the result or the error.

        Args:
            message: a pickled :class:`_CallMessage`.

        Raises:
            SystemExit: the call exits. The rank ends.
            KeyboardInterrupt: a call has raised it. The rank ends.
        """
        try:
            call_message: _CallMessage = load(message)
            # The path and the variables come first, because loading the call imports modules.
            sys.path[:] = call_message.path
            for name, value in call_message.environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            call: Call = load(call_message.pickled_call)
            # A call must not depend on earlier calls. Otherwise hypothesis could not repeat a
            # failing example.
            seed_everything(0)
            args, kwargs = self._arguments_of_this_rank(call)
            with applied(call_message.patches):
                result = call.fn(self.fabric, *args, **kwargs)
            check_group(self.default_group)
            if self.check_inputs:
                # The arguments before the call are loaded from the message again.
                original_call: Call = load(call_message.pickled_call)
                original_args, original_kwargs = self._arguments_of_this_rank(original_call)
                check_unchanged(
                    call.fn, [*args, *kwargs.values()], [*original_args, *original_kwargs.values()]
                )
            return _Reply(Report(rank=self.rank), dump_result(result))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 (RankPool.run raises it in the caller)
            report = error_report(self.rank, error)
            payload = b""
            with suppress(Exception):  # an error that cannot be pickled is sent as text only
                payload = dump_result(report.error)
            return _Reply(replace(report, error=None), payload)

    def _arguments_of_this_rank(self, call: Call) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments that ``call.fn`` is passed on this rank, after the fabric.

        Collective if an argument is a :class:`Group` that has not been passed before.
        """
        args, kwargs = arguments_of_rank(call.args, call.kwargs, self.rank)
        args = [self._with_group(argument) for argument in args]
        for name, argument in kwargs.items():
            kwargs[name] = self._with_group(argument)
        return args, kwargs

    def _with_group(self, argument: Any) -> Any:
        """Return the process group of a :class:`Group`, and any other argument unchanged.

        Collective: the first use of a :class:`Group` makes the process group.
        """
        if not isinstance(argument, Group):
            return argument
        if argument not in self.groups:
            self.groups[argument] = dist.new_group(list(argument.ranks))
        return self.groups[argument]


def _changed_variables(
    before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the environment variables that have changed. A variable that was deleted is None."""
    changes: dict[str, str | None] = {}
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            changes[name] = after.get(name)
    return changes


def _dump_call(call: Call) -> bytes:
    """Pickle a call for the ranks of a pool.

    Functions of a test module are pickled by value, since ranks may be unable to import modules
    that a test runner has loaded in its own way.
    """
    test_module = find_test_module(call.fn)
    # main_is_importable is False: the __main__ of this process is the test runner, and a rank must
    # not run the test runner again.
    if test_module is None or not has_cloudpickle():
        return dump_call(call, main_is_importable=False).data
    import cloudpickle  # an optional dependency

    # cloudpickle pickles the functions of a registered module by value.
    was_registered = test_module.__name__ in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(test_module)
    try:
        return dump_call(call, main_is_importable=False, by_name=False).data
    finally:
        # A module that the user has registered stays registered.
        if not was_registered:
            cloudpickle.unregister_pickle_by_value(test_module)
