"""A pool of ranks: real processes with a real process group, reused for thousands of short calls.

[Note: The processes of a pool] After a failed call, messages between the ranks may still be in flight, so all processes
are ended and the next call starts new ones. Forking one from the warm server takes about a tenth of a second, fast
enough for every step of hypothesis' shrinking.
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
from typing import Any, Self

from fabric._fabric import Fabric
from fabric.errors import UsageError
from fabric.launchers.base import node_worlds
from fabric.launchers.function import fork_server, pickled_call
from fabric.launchers.rank import ControlThread
from fabric.launchers.serialize import Call, dump_call, dump_result, has_cloudpickle, load
from fabric.launchers.supervisor import RankProcess, Supervisor, describe_exit
from fabric.seed import seed_everything
from fabric.testing.base import Report, check_arguments, failure, for_rank, name_of, raised

__all__ = ["RankPool"]

# Seconds for the ranks to connect; for the other ranks to answer after one has failed; for ranks to exit by
# themselves; for a hanging rank to write its stack.
_START = 120.0
_COLLECT = 0.15
_EXIT = 1.0
_STACK = 0.5
_FITS = 1 << 16  # bytes that can be sent without a reader
# Paths in the innermost frame of a rank that waits for others; the last is for checked mode.
_WHERE_RANKS_WAIT = ("torch/distributed/", "fabric/communicators/", "fabric/diagnostics/checker")


class RankPool:
    """A world of processes on this machine, connected by gloo on loopback; see ``[Note: Worlds]``.

    The processes are forked from a warm server at the first call and reused. Functions are sent by value with
    ``cloudpickle``, including closures, lambdas and functions of a test module. Every call begins with the same random
    state on all ranks, in the same folder and environment. Between calls a rank keeps only the state of its modules and
    its fabric.

    Args:
        world_size: number of ranks, one process each.
        timeout: seconds that a call may take, unless ``run`` gets another timeout.
        **options: of :class:`fabric.Fabric`, for every rank: ``strategy``, by default ``"ddp"``, ``precision``,
            ``accelerator``, by default ``"cpu"``.

    Raises:
        ConfigurationError: a value or a combination that cannot work; no process has been started.
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
            *args: its arguments; a :class:`PerRank` has a different value for each rank.
            timeout: seconds that this call may take; None for the timeout of the pool.
            **kwargs: keyword arguments, like ``args``.

        Returns:
            The results in rank order; tensors detached and on the CPU.

        Raises:
            RankFailedError: a rank raised, died or did not return in time. The text says what each rank did;
                ``__cause__`` is the exception of the rank. The next call uses new processes.
            ArgumentTypeError: a part of the call cannot be pickled.
            ConfigurationError: a :class:`PerRank` has another number of values.
            UsageError: the pool has been closed.
        """
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        # With the current module path, since test runners extend it while they run.
        message = pickle.dumps((sys.path, _dump(Call(fn, args, kwargs))))
        with self._lock:
            if self._closed:
                raise UsageError(f"{self!r}.run({name_of(fn)})", "the pool has been closed")
            try:
                job = self._started()
                self._senders.clear()
                for rank in job.ranks:
                    del rank.messages["reply"]
                    if len(message) < _FITS:
                        rank.send("call", message)
                        continue
                    # In another thread, since this one has a time limit: a stopped rank does not read.
                    self._senders.append(threading.Thread(target=rank.send, args=("call", message)))
                    self._senders[-1].start()
                return _results(job, name_of(fn), self.timeout if timeout is None else timeout)
            except BaseException:
                self._end(0.0)
                raise

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        with self._lock:
            self._closed = True
            self._end(_EXIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> Supervisor:
        # If the server has exited, and its ranks with it, new ones are started: no call has failed.
        if self._job is not None and any(
            rank.poll() and rank.exit_code == 255 for rank in self._job.ranks
        ):
            self._end(0.0)
        if self._job is None:
            self._job = job = Supervisor()
            # Ends the processes of a pool that is garbage-collected or still open when the interpreter exits.
            self._close = weakref.finalize(self, _close, os.getpid(), job)
            payload = pickled_call(Call(_serve, (self._fabric,), {}))
            job.start(fork_server(os.getpid()).start_rank, node_worlds(self.size), payload)
            _results(job, "the start of the pool", _START)
        return self._job

    def _end(self, grace: float) -> None:
        job = self._job
        self._job = None
        if job is not None:
            for rank in job.ranks if grace else ():
                rank.send("call", None)
            job.collect_until(grace)
            for rank in job.ranks:
                rank.kill()
            for sender in self._senders:
                sender.join()
            self._close()


def _close(owner: int, job: Supervisor) -> None:
    """End the processes; does nothing in a fork of the owner."""
    if os.getpid() == owner:
        job.close()


def _results(job: Supervisor, name: str, limit: float) -> list[Any]:
    """The results of the ranks; raises if one fails, or does not answer within the time limit."""

    def all_answered() -> bool:
        return all("reply" in rank.messages or rank.poll() for rank in job.ranks)

    def any_failed() -> bool:
        return any(
            rank.messages["reply"][0].failed if "reply" in rank.messages else rank.poll()
            for rank in job.ranks
        )

    job.collect_until(limit, lambda: all_answered() or any_failed())
    if failed := any_failed():
        job.collect_until(_COLLECT, all_answered)
    elif all_answered():
        return [load(rank.messages["reply"][1]) for rank in job.ranks]
    raise failure(name, [_report(job, rank, failed, limit) for rank in job.ranks])


def _report(job: Supervisor, rank: RankProcess, failed: bool, limit: float) -> Report:
    """The report of a rank; ``failed`` tells whether any rank has failed."""
    if "reply" in rank.messages:
        report, payload = rank.messages["reply"]
        with suppress(Exception):  # its pickle cannot be loaded; its text is sent separately
            report = replace(report, error=load(payload) if report.failed and payload else None)
        return report
    if rank.exit_code is not None:
        did = describe_exit(rank.exit_code)
        return Report(
            rank=rank.rank, did=did, failed=True, exit_code=rank.exit_code, text=rank.read_stack()
        )
    if failed:
        return Report(rank=rank.rank, did="was still in the call")
    stack = _stack(job, rank)
    # The innermost frame is first.
    innermost = stack.partition("\n")[2].partition("\n")[0]
    waits = any(place in innermost for place in _WHERE_RANKS_WAIT)
    did = f"did not return within {limit:g} s"
    return Report(
        rank=rank.rank,
        did=did,
        failed=True,
        secondary=int(waits),
        exit_code=-signal.SIGKILL,
        text=stack,
    )


def _stack(job: Supervisor, rank: RankProcess) -> str:
    """The current stack of a rank, innermost frame first."""
    if "serving" not in rank.messages:
        return ""
    rank.kill(signal.SIGUSR1)
    # It is written line by line, from the innermost frame to those of the pool, which are left out.
    job.collect_until(_STACK, lambda: __file__ in rank.read_stack())
    return rank.read_stack().partition(__file__)[0].rpartition("\n")[0]


def _serve(fabric: Fabric) -> None:
    """Run a rank of a pool: connect, then make one call after another until the pool is closed."""
    control = ControlThread.of_this_process()
    assert control is not None, "a pool starts ranks"
    world = control.config.world
    # Only the owner handles Ctrl-C; its run() ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # faulthandler's handler is in C, so it works while the main thread waits in a collective. The file stays open.
    stacks = open(control.config.stack_file, "ab", buffering=0)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    control.send("serving")
    fabric._enter_rank(world)
    control.send("reply", (Report(rank=world.rank), dump_result(None)))
    directory = os.open(".", os.O_RDONLY)
    environment = dict(os.environ)
    while (message := control.calls.get()) is not None:
        answer = _answer(fabric, world.rank, message)
        os.fchdir(directory)  # by file descriptor, since its path may no longer exist
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        control.send("reply", answer)


def _answer(fabric: Fabric, rank: int, message: bytes) -> tuple[Report, bytes]:
    """The report of a call on this rank, and the pickled result or error; empty if the error cannot be pickled."""
    try:
        sys.path[:], call = load(message)
        fn, args, kwargs = load(call)
        # A call draws the same numbers whatever ran before; otherwise a failing example could not be repeated.
        seed_everything(0)
        result = fn(
            fabric,
            *(for_rank(arg, rank) for arg in args),
            **{k: for_rank(v, rank) for k, v in kwargs.items()},
        )
        return Report(rank=rank), dump_result(result)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 (run() raises it in the caller)
        report = raised(rank, error)
        payload = b""
        with suppress(Exception):  # an error that cannot be pickled is sent as text only
            payload = dump_result(report.error)
        return replace(report, error=None), payload


def _dump(call: Call) -> bytes:
    """Pickle a call; functions of test code by value, since ranks may be unable to import modules that a test runner
    has loaded in its own way.
    """
    function = getattr(call.fn, "func", call.fn)  # functools.partial
    module = sys.modules.get(getattr(function, "__module__", ""))
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if (
        module is None
        or not type(loader).__module__.startswith("_pytest.")
        or not has_cloudpickle()
    ):
        return dump_call(call, main_is_importable=False)[0]
    import cloudpickle  # an optional dependency

    was_registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(module)
    try:
        return dump_call(call, main_is_importable=False, by_name=False)[0]
    finally:
        if not was_registered:
            cloudpickle.unregister_pickle_by_value(module)
