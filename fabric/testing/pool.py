"""Ranks that stay: real processes with a real process group, for thousands of short calls.

[Note: One pool, many crews] The processes of a pool are a *crew*. After a call in which a rank failed nobody knows what
the other ranks have sent to it, so the crew is ended, and the next call starts another. Forking one from the warm
server takes about a tenth of a second, which hypothesis can afford for every step of its shrinking.
"""

import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Self

from fabric._fabric import Fabric
from fabric.errors import UsageError
from fabric.launchers._custody import DirectoryGuard
from fabric.launchers._failures import RunDirectory
from fabric.launchers._forkserver import UNKNOWN_EXIT_CODE, fork_server
from fabric.launchers._fresh import Orders
from fabric.launchers._supervision import Member, describe_exit, explain_exit
from fabric.launchers._transport import Call, has_cloudpickle, load_result, pack_call
from fabric.launchers.processes import seat_of
from fabric.testing._worker import THIS_FILE, Reply, serve, stack_file
from fabric.testing.base import Report, check_call, check_world, failure, name_of

__all__ = ["RankPool"]

# Seconds: for a crew to connect; for the other ranks to answer once one has failed; for a process to leave or be
# reaped; for a rank that hangs to write where it does.
_START, _COLLECT, _LEAVE, _STACK = 120.0, 0.15, 5.0, 0.5
# In the innermost frame of a rank that waits for others; the second is checked mode.
_WHERE_RANKS_WAIT = (os.path.join("torch", "distributed", ""), os.path.join("fabric", "communicators", ""))


class RankPool:
    """A world of processes on this machine, connected by gloo on loopback; see ``[Note: Worlds]``.

    The processes are forked from a warm one at the first call and kept. Functions travel by value with ``cloudpickle``,
    closures, lambdas and those of a test module included. Every call begins with the same random state on all ranks.
    Between calls a rank keeps only what its modules keep, and its fabric.

    Args:
        world_size: number of ranks, one process each.
        timeout: seconds that a call may take, unless ``run`` is told otherwise.
        **options: of :class:`fabric.Fabric`, for every rank: ``strategy``, which is ``"ddp"`` by default,
            ``precision``, ``accelerator``, which is ``"cpu"`` by default.

    Raises:
        ConfigurationError: a value or a combination that cannot work; no process has been started.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        check_world("RankPool", world_size, timeout)
        self.size, self.timeout = world_size, timeout
        options = {"accelerator": "cpu", "strategy": "ddp", "devices": world_size, **options}
        self._fabric = Fabric(environment="none", launcher="forkserver", **options)
        self._crew: _Crew | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RankPool({self.size})"

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank.

        Args:
            fn: any function.
            *args: what it is handed; a :class:`PerRank` is a value of its own for each rank.
            timeout: seconds that this call may take; None for those of the pool.
            **kwargs: likewise by name.

        Returns:
            The results in rank order; tensors detached and on the CPU.

        Raises:
            RankFailedError: a rank raised, died or did not return in time. The text says what each rank did;
                ``__cause__`` is what the rank raised. The next call finds new processes.
            ArgumentTypeError: a part of the call cannot be pickled.
            ConfigurationError: a :class:`PerRank` of another number of values.
            UsageError: the pool has been closed.
        """
        check_call(fn, [*args, *kwargs.values()], self.size)
        # With the module path of this moment, which test runners extend as they go.
        message = pickle.dumps((sys.path, _pack((fn, args, kwargs))))
        with self._lock:
            if self._closed:
                asked = f"{self!r}.run({name_of(fn)})"
                raise UsageError(asked, "the pool has been closed", "calls before close()", repr(self))
            limit = self.timeout if timeout is None else timeout
            try:
                if self._crew is not None and self._crew.has_lost_its_server():
                    self._end_crew(grace=0.0)
                if self._crew is None:
                    self._crew = _Crew(self.size, self._fabric)
                return self._crew.call(message, name_of(fn), limit)
            except BaseException:
                self._end_crew(grace=0.0)
                raise

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        with self._lock:
            self._closed = True
            self._end_crew(grace=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_crew(self, grace: float) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end(grace)


class _Crew:
    """The processes between one failure and the next."""

    def __init__(self, size: int, fabric: Fabric) -> None:
        self._directory = RunDirectory.create()
        guard = DirectoryGuard(self._directory.path)
        self._members: list[Member] = []
        # A pool that is dropped, or still open when the interpreter leaves, ends its processes too.
        self._end = weakref.finalize(self, _end, os.getpid(), self._members, self._directory, guard)
        for rank in range(size):
            theirs, lifeline = Pipe(duplex=False)
            answers, sending = Pipe(duplex=True)
            with theirs, sending:
                process = fork_server(os.getpid()).start_rank(theirs, sending)
            self._members.append(Member(rank, process, lifeline, answers))
        for member in self._members:
            # Ctrl-C is for this process alone, whose run() ends the ranks.
            seat = seat_of(member.rank, size, self._directory, answers=True, interruptible=False)
            call, _ = pack_call((serve, (fabric, seat.world, self._directory), {}), main_is_importable=False)
            member.order(Orders.like_this_process(seat=seat, main=None, call=call, converses=True))
        self._results("the start of the pool", _START)

    def has_lost_its_server(self) -> bool:
        """Whether the ranks have ended with the fork server, which no call is to blame for."""
        return any(member.poll() and member.exit_code == UNKNOWN_EXIT_CODE for member in self._members)

    def call(self, message: bytes, name: str, limit: float) -> list[Any]:
        """Have every rank make a call, and return the results by rank."""
        for member in self._members:
            # One that has died since the last call is found by the end of its pipe.
            with suppress(OSError):
                _pipe(member).send_bytes(message)
        return self._results(name, limit)

    def end(self, grace: float) -> None:
        """End the processes, at once or after so many seconds to leave by themselves."""
        for member in self._members:
            _pipe(member).close()
        _wait_until(lambda: all(member.poll() for member in self._members), grace)
        self._end()

    def _results(self, name: str, limit: float) -> list[Any]:
        replies = self._replies(limit)
        failed = any(report.failed for report, _ in replies.values())
        if len(replies) == len(self._members) and not failed:
            return [load_result(replies[member.rank][1]) for member in self._members]
        reports = []
        for member in self._members:
            if member.rank in replies:
                report, payload = replies[member.rank]
                reports.append(replace(report, error=_load_error(payload)) if report.failed else report)
            else:
                still = Report(rank=member.rank, did="was still in the call")
                reports.append(still if failed else self._stuck(member, limit))
        raise failure(name, reports)

    def _replies(self, limit: float) -> dict[int, Reply]:
        """What the ranks have answered by the time limit, or shortly after one has failed."""
        replies: dict[int, Reply] = {}
        waiting: dict[Any, Member] = {_pipe(member): member for member in self._members}
        deadline = time.monotonic() + limit
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                member = waiting.pop(pipe)
                replies[member.rank] = reply = self._reply(member)
                if reply[0].failed:
                    deadline = min(deadline, time.monotonic() + _COLLECT)
        return replies

    def _reply(self, member: Member) -> Reply:
        """What a rank has answered; of one that has ended how it did."""
        with suppress(EOFError, OSError):
            return load_result(_pipe(member).recv_bytes())
        _wait_until(member.poll, _LEAVE)
        code = 1 if member.exit_code is None else member.exit_code
        did = "; ".join(part for part in (describe_exit(code), explain_exit(code)) if part)
        text = self._directory.read_crash(member.rank)
        return Report(rank=member.rank, did=did, failed=True, exit_code=code, text=text), b""

    def _stuck(self, member: Member, limit: float) -> Report:
        stack = self._stack(member)
        # The innermost frame comes first.
        innermost = stack.partition("\n")[2].partition("\n")[0]
        waits = any(place in innermost for place in _WHERE_RANKS_WAIT)
        did, code = f"did not return within {limit:g} s", -signal.SIGKILL
        return Report(rank=member.rank, did=did, failed=True, suspicion=int(waits), exit_code=code, text=stack)

    def _stack(self, member: Member) -> str:
        """Where a rank is just now, the innermost frame first."""
        file = stack_file(self._directory, member.rank)
        if file.exists():
            member.send(signal.SIGUSR1)
            # It is written line by line, from the innermost frame to those of the worker, which tell nothing.
            _wait_until(lambda: THIS_FILE in file.read_text(errors="replace"), _STACK)
            lines = file.read_text(errors="replace").splitlines()
            return "\n".join(takewhile(lambda line: THIS_FILE not in line, lines))
        return ""


def _end(owner: int, members: list[Member], directory: RunDirectory, guard: DirectoryGuard) -> None:
    """Kill what still runs, and wait until it is gone. A forked copy of the owner has no business here."""
    if os.getpid() != owner:
        return
    for member in members:
        member.send(signal.SIGKILL)
    _wait_until(lambda: all(member.poll() for member in members), _LEAVE)
    for member in members:
        member.lifeline.close()
        _pipe(member).close()
    directory.remove()
    guard.close()


def _wait_until(condition: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def _pipe(member: Member) -> Connection:
    assert member.answers is not None
    return member.answers


def _load_error(payload: bytes) -> BaseException | None:
    try:
        return load_result(payload) if payload else None
    except Exception:  # noqa: BLE001 (a class whose pickle cannot be read back; its text has come on its own)
        return None


def _pack(call: Call) -> bytes:
    """Pickle a call; functions of test code by value, since a rank need not import it, and a test runner may have
    loaded it in a way of its own.
    """
    module = sys.modules.get(_module_name(call[0]))
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if module is None or not type(loader).__module__.startswith("_pytest.") or not has_cloudpickle():
        return pack_call(call, main_is_importable=False)[0]
    with _by_value(module):
        return pack_call(call, main_is_importable=False, by_name=False)[0]


def _module_name(fn: Any) -> str:
    fn = getattr(fn, "func", fn)  # functools.partial
    return getattr(fn, "__module__", None) or type(fn).__module__


@contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    import cloudpickle  # an optional dependency

    was_registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not was_registered:
            cloudpickle.unregister_pickle_by_value(module)
