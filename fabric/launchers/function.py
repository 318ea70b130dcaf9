"""Launchers that run a function in new processes: spawn, fork and forkserver.

[Note: The fork server] A process with torch loaded, from which ranks are forked. The standard library's fork server
leaves its socket directory behind if its owner is killed, and its children write to the output that the owner had when
the server started. This one uses an inherited socket pair to its owner. Each request carries open files: the rank's end
of the control pipe, a pipe on which the server sends the rank's process id and later its exit code, and the owner's
current standard output and error.
"""

import gc
import importlib
import linecache
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.launchers import base
from fabric.launchers.rank import (
    Payload,
    RankConfig,
    ending_signals,
    main,
    receive_payload,
    run_rank,
)
from fabric.launchers.serialize import Call, dump_call, load
from fabric.launchers.supervisor import StartedProcess, StartProcess, Supervisor, exit_status

__all__ = ["ProcessLauncher", "fork_server", "forkserver_main", "pickled_call"]

_START_DEADLINE = 120.0  # seconds, of which the import of torch takes most
# Creating the first optimizer imports torch._dynamo, which takes longer than torch itself. Nearly every function of a
# rank receives a Fabric.
_PRELOAD = ("torch", "torch._dynamo", "fabric._fabric")


class ProcessLauncher(base.Launcher):
    """Runs a function in new processes on this machine and returns its results.

    ``"spawn"`` starts a new interpreter for each rank: the slowest and the most isolated. ``"forkserver"`` forks from
    a server process that has torch loaded and lives as long as this process: as isolated as spawn, and a second launch
    takes hundredths of a second. ``"fork"`` copies this process, so that nothing has to be pickled; it is
    refused once CUDA is initialized, and its ranks run with one thread per operation, because the thread pool of an
    operation that ran before the fork does not exist in the copy, and waiting for it would hang. Do not raise the
    number of threads in such a rank.

    Functions of importable modules need nothing; closures, lambdas and what a script or notebook defines are sent by
    value with ``cloudpickle``. Without it a function of a script is found by importing the script in every rank, which
    then needs an ``if __name__ == "__main__"`` guard.

    Args:
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
    """

    def __init__(self, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        self.name = start_method

    def check(self, spec: base.LaunchSpec) -> None:
        """Refuse a launch while a rank imports a script, and a fork that cannot work.

        Raises:
            UsageError: the script has no guard, and a rank imports it.
            ConfigurationError: an initialized device library does not survive a fork.
        """
        base.refuse_while_importing_main()
        backend = base.initialized_backend(spec.device_type) if self.name == "fork" else None
        if backend is not None:
            raise ConfigurationError(
                "the start method 'fork'",
                f"{backend} is initialized in this process, and a forked copy of it cannot use {backend}",
                suggestion='launcher="forkserver", or a fork before anything touches the device',
            )

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: base.LaunchSpec,
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
            SystemExit: another signal that ends a job, likewise; code 128 + n. Or all ranks were preempted; code 75.
        """
        self.check(spec)
        if not callable(fn):
            raise ArgumentTypeError(
                f"launch({fn!r})", "it is no function", "launch(train, x), not launch(train(x))"
            )
        # Before any process starts: what cannot be pickled is an error here.
        payload = None if self.name == "fork" else pickled_call(Call(fn, args, kwargs))
        job = Supervisor()
        try:
            with job:
                start: StartProcess = {
                    "spawn": _spawn,
                    "fork": partial(_fork, partial(fn, *args, **kwargs)),
                    "forkserver": fork_server(os.getpid()).start_rank,
                }[self.name]
                job.start(start, base.node_worlds(spec.num_processes), payload, spec.results)
                results = list(map(load, job.run()))
        except KeyboardInterrupt:
            number = job.signals[0][0] if job.signals else signal.SIGINT
            if number == signal.SIGINT:
                raise
            # The ranks have ended; now the signal has its usual effect on this process.
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, None)
            raise SystemExit(128 + number) from None
        except RankFailedError:
            if (
                sys.excepthook is sys.__excepthook__ and not base.is_interactive()
            ):  # a hook of the user stays
                sys.excepthook = _exit_as_the_rank
            raise
        return {"all": results, "first": results[0], "none": None}[spec.results]


def _exit_as_the_rank(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error as usual; if it is a rank's, exit with the exit code of that rank."""
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, RankFailedError):
        raise SystemExit(exit_status(error.exit_code))


def pickled_call(call: Call) -> Payload:
    """The payload for a call, which first restores the current state of this process.

    Raises:
        MissingDependencyError, ArgumentTypeError: see :func:`dump_call`.
    """
    # Where a new process finds __main__. It cannot import that of an interactive session or notebook, nor
    # `python -m package`, which is not a library.
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", None)
    path = getattr(main, "__file__", None)
    is_importable = not f".{name}".endswith(".__main__") if name else path not in (None, "<stdin>")
    packed, needs_main = dump_call(call, main_is_importable=is_importable)
    state = {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "dir": os.getcwd(),
        # Source of notebook cells and prompts, which is in no file: for tracebacks, and for code that reads its source.
        "sources": {
            name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)
        },
    }
    if needs_main:
        state |= {"init_main_from_name": name} if name else {"init_main_from_path": path}
    return partial(_load_call, dict(os.environ), state, packed)


def _load_call(
    environment: dict[str, str], state: dict[str, Any], packed: bytes
) -> Callable[[], Any]:
    """Give this rank the state of the launching process, and load the call."""
    os.environ.clear()
    os.environ.update(environment)
    # Otherwise all ranks of all launches, forked from one server, would draw the same numbers.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    linecache.cache.update(state["sources"])
    multiprocessing.spawn.prepare(state)
    fn, args, kwargs = load(packed)
    return partial(fn, *args, **kwargs)


def _spawn(control: Connection, config: RankConfig) -> StartedProcess:
    process = base.start_interpreter(main, control.fileno(), stdin=subprocess.DEVNULL)
    return process.pid, process.poll


def _fork(call: Callable[[], Any], control: Connection, config: RankConfig) -> StartedProcess:
    def be_rank() -> None:
        sys.exit(run_rank(control, replace(config, threads=1), lambda: call))

    process = multiprocessing.get_context("fork").Process(target=be_rank)
    # Finalizers of garbage may wait for threads that the copy does not have: collecting it there can crash or hang.
    gc.freeze()
    try:
        process.start()
    finally:
        gc.unfreeze()
    return process.pid or 0, lambda: process.exitcode


class _ForkServer:
    """Owns the server process: starts it on first use, restarts it if it has died, and ends it with this process.

    Args:
        owner: ``os.getpid()``.
    """

    def __init__(self, owner: int) -> None:
        assert owner == os.getpid()
        self._lock = threading.Lock()
        self._server: tuple[socket.socket, Callable[[], object]] | None = None

    def start_rank(self, control: Connection, config: RankConfig) -> StartedProcess:
        """Fork a rank, which reads its configuration from its end of the control pipe."""
        with self._lock:
            if self._server is not None:
                requests, stop = self._server
                with suppress(OSError, EOFError):  # it was killed since the last launch
                    return _request(requests, control)
                stop()
            requests, theirs = socket.socketpair()
            with theirs:
                process = base.start_interpreter(
                    forkserver_main, theirs.fileno(), stdin=subprocess.DEVNULL
                )
            self._server = requests, weakref.finalize(self, _stop, requests, process)
            return _request(requests, control)


# Cached by process id: a forked child must not use its parent's.
fork_server = cache(_ForkServer)


def _request(requests: socket.socket, control: Connection) -> StartedProcess:
    status, theirs = multiprocessing.Pipe(duplex=False)
    with theirs:
        socket.send_fds(requests, [b"!"], [control.fileno(), theirs.fileno(), 1, 2])
    if not status.poll(_START_DEADLINE):
        raise UsageError("the fork server does not start", suggestion='launcher="spawn"')
    return status.recv(), partial(_exit_code, status)


def _stop(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    requests.close()
    process.kill()
    process.wait()


def _exit_code(status: Connection) -> int | None:
    try:
        return status.recv() if status.poll() else None
    except EOFError:
        # The server was killed. The rank watches its parent's process id, so it ends too; its exit code is unknown.
        return 255


def forkserver_main() -> None:
    """Run the server: fork a rank for each request until the owner has ended."""
    owner = os.getppid()
    # The server ignores signals to the process group, since only it can report the ranks' exit codes.
    # An ignored SIGINT stays ignored: a rank inherits that.
    for number in ending_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in _PRELOAD:
        importlib.import_module(name)
    # Otherwise each garbage collection in a rank would visit all these objects, and copy their memory by marking them.
    gc.freeze()
    ranks: dict[Any, Connection] = {}
    while os.getppid() == owner:  # a process that the owner forked may hold the connection open
        # The timeout: a rank's sentinel is not ready while a process that the rank forked lives.
        ready = wait([requests, *(rank.sentinel for rank in ranks)], 0.1 if ranks else 1.0)
        for rank in [rank for rank in ranks if rank.exitcode is not None]:
            _send(ranks.pop(rank), rank.exitcode)
        if requests in ready:
            message, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not message:
                break
            control, status = map(Connection, fds[:2])
            inherited = [status, requests, *ranks.values()]
            rank = multiprocessing.get_context("fork").Process(
                target=_served_rank, args=(control, fds[2:], inherited)
            )
            rank.start()
            control.close()
            for fd in fds[2:]:
                os.close(fd)
            _send(status, rank.pid)
            ranks[rank] = status
    # No exit handlers: they would wait for the ranks, which exit by themselves.
    os._exit(0)


def _send(status: Connection, number: int | None) -> None:
    # The owner may have ended; the next read of the requests detects that.
    with suppress(BrokenPipeError):
        status.send(number)


def _served_rank(control: Connection, output: list[int], inherited: list[Any]) -> None:
    for connection in inherited:
        connection.close()
    for number, fd in enumerate(output, 1):
        os.dup2(fd, number)
        os.close(fd)
    # multiprocessing ends a forked process this way, since the exit handlers are the server's.
    sys.exit(run_rank(control, *receive_payload(control)))
