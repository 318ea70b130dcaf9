"""Launchers that run a function in new processes: spawn, fork and forkserver.

[Note: The fork server] A process with torch loaded, from which ranks are forked. The standard
library's fork server leaves its socket directory behind if its owner is killed, and its children
write to the output that the owner had when the server started. This server uses a socket pair to
its owner, which it inherits. Each request carries open files: the rank's end of the control pipe, a
pipe on which the server sends the rank's process id and later its exit code, and the owner's
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
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

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

# Seconds for the fork server to start a rank. The import of torch takes most of them.
_START_TIMEOUT = 120.0
# The modules that the fork server loads. Creating the first optimizer imports torch._dynamo, which
# takes longer than torch itself. Nearly every function of a rank receives a Fabric.
_PRELOAD = ("torch", "torch._dynamo", "fabric._fabric")


class ProcessLauncher(base.Launcher):
    """A launcher that runs a function in new processes on this machine.

    ``"spawn"`` starts a new interpreter for each rank. It is the slowest start method and isolates
    ranks best. ``"forkserver"`` forks from a server process that has torch loaded and lives as long
    as this process. It isolates ranks as well as spawn, and a second launch takes hundredths of a
    second. ``"fork"`` copies this process, so that nothing has to be pickled. It is refused once
    CUDA is initialized. Its ranks run with one thread per operation, because the thread pool of an
    operation that ran before the fork does not exist in the copy, and waiting for that pool would
    hang. Do not raise the number of threads in such a rank.

    Functions of importable modules are sent by name. Closures, lambdas and functions that a script
    or notebook defines are sent by value with ``cloudpickle``. Without ``cloudpickle`` a function
    of a script is found by importing the script in every rank. The script then needs an
    ``if __name__ == "__main__"`` guard.

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
        if self.name != "fork":
            return
        backend = base.initialized_backend(spec.device_type)
        if backend is not None:
            raise ConfigurationError(
                "the start method 'fork'",
                problem=f"{backend} is initialized in this process, and a forked copy cannot use "
                f"{backend}",
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
            The result of rank 0, a list by rank, or None, as ``spec.results`` says. Tensors are
            detached, on the CPU.

        Raises:
            ArgumentTypeError: ``fn`` is not a function, or a part of the call cannot be pickled.
            MissingDependencyError: ``fn`` has to be sent by value and ``cloudpickle`` is not
                installed.
            RankFailedError: a rank raised, exited without returning, or was killed. The other ranks
                have been ended. If nothing catches the error, this process ends with the exit code
                of that rank, 128 + n for signal n.
            KeyboardInterrupt: SIGINT arrived. The ranks had a grace period for their ``finally``
                blocks.
            SystemExit: another signal that ends a job arrived, with code 128 + n. The ranks had a
                grace period. Or all ranks were preempted, with code 75.
        """
        self.check(spec)
        if not callable(fn):
            raise ArgumentTypeError(
                f"launch({fn!r})",
                problem="it is not a function",
                expected="launch(train, x), not launch(train(x))",
            )
        call = Call(fn, args, kwargs)
        payload = None
        if self.name != "fork":
            # Before any process starts: an argument that cannot be pickled raises here.
            payload = pickled_call(call)
        start = self._choose_start(call)
        job = Supervisor()
        try:
            with job:
                job.start(start, base.node_worlds(spec.num_processes), payload, spec.results)
                results = list(map(load, job.run()))
        except KeyboardInterrupt:
            if job.signals:
                _raise_signal(job.signals[0].number)
            raise
        except RankFailedError:
            # A hook that the user has installed stays.
            if sys.excepthook is sys.__excepthook__ and not base.is_interactive():
                sys.excepthook = _exit_as_the_rank
            raise
        if spec.results == "all":
            return results
        if spec.results == "first":
            return results[0]
        return None

    def _choose_start(self, call: Call) -> StartProcess:
        """Return the function that starts a rank."""
        if self.name == "spawn":
            return _spawn
        if self.name == "fork":
            return partial(_fork, partial(call.fn, *call.args, **call.kwargs))
        return fork_server(os.getpid()).start_rank


def _raise_signal(number: int) -> None:
    """Have a signal that has ended the ranks take its usual effect on this process.

    SIGINT has none here: the caller raises KeyboardInterrupt.
    """
    if number == signal.SIGINT:
        return
    handler = signal.getsignal(number)
    if callable(handler):
        handler(number, None)
    raise SystemExit(128 + number) from None


def _exit_as_the_rank(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error as usual. If a rank has failed, exit with the exit code of that rank."""
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, RankFailedError):
        raise SystemExit(exit_status(error.exit_code))


@dataclass(frozen=True, kw_only=True)
class _LauncherState:
    """The state of the launching process that a rank takes over before it loads the call.

    Attributes:
        environment: the environment variables.
        preparation: the arguments of ``multiprocessing.spawn.prepare``.
        sources: the source of notebook cells and prompts, which is in no file, by name. Tracebacks
            show it, and code reads it.
    """

    environment: dict[str, str]
    preparation: dict[str, Any]
    sources: dict[str, Any]


def pickled_call(call: Call) -> Payload:
    """Return the payload for a call, which first restores the current state of this process.

    Raises:
        MissingDependencyError: see :func:`dump_call`.
        ArgumentTypeError: see :func:`dump_call`.
    """
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", None)
    path = getattr(main, "__file__", None)
    # A new process cannot import the __main__ of an interactive session or notebook, nor that of
    # `python -m package`, which is not a library.
    if name:
        is_importable = not f".{name}".endswith(".__main__")
    else:
        is_importable = path not in (None, "<stdin>")
    packed, needs_main = dump_call(call, main_is_importable=is_importable)
    preparation: dict[str, Any] = {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "dir": os.getcwd(),
    }
    if needs_main and name:
        preparation["init_main_from_name"] = name
    elif needs_main:
        preparation["init_main_from_path"] = path
    state = _LauncherState(
        environment=dict(os.environ), preparation=preparation, sources=_sources_without_file()
    )
    return partial(_load_call, state, packed)


def _sources_without_file() -> dict[str, Any]:
    """Return the entries of the line cache that no file backs: they have no time of change."""
    sources: dict[str, Any] = {}
    for name, entry in linecache.cache.items():
        if entry[1:2] == (None,):
            sources[name] = entry
    return sources


def _load_call(state: _LauncherState, packed: bytes) -> Callable[[], Any]:
    """Give this rank the state of the launching process, and load the call."""
    os.environ.clear()
    os.environ.update(state.environment)
    # All ranks of all launches are forked from one server, and would draw the same numbers.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    linecache.cache.update(state.sources)
    multiprocessing.spawn.prepare(state.preparation)
    call: Call = load(packed)
    return partial(call.fn, *call.args, **call.kwargs)


def _spawn(control: Connection, config: RankConfig) -> StartedProcess:
    process = base.start_interpreter(main, control.fileno(), stdin=subprocess.DEVNULL)
    return StartedProcess(process.pid, process.poll)


def _fork(call: Callable[[], Any], control: Connection, config: RankConfig) -> StartedProcess:
    # A fork has no threads, but inherits the thread pools of this process: to compute in them would
    # hang. So the rank computes in one thread.
    config = replace(config, threads=1)
    process = multiprocessing.get_context("fork").Process(
        target=_run_forked_rank, args=(control, config, call)
    )
    # Finalizers of garbage may wait for threads that the fork does not have: to collect the garbage
    # in the fork can crash or hang. start() returns only in this process, so the garbage stays
    # frozen in the fork.
    gc.freeze()
    try:
        process.start()
    finally:
        gc.unfreeze()
    assert process.pid is not None
    return StartedProcess(process.pid, lambda: process.exitcode)


def _run_forked_rank(control: Connection, config: RankConfig, call: Callable[[], Any]) -> NoReturn:
    sys.exit(run_rank(control, config, lambda: call))


class _ServerConnection(NamedTuple):
    """The connection to a fork server.

    Attributes:
        requests: the socket on which a rank is requested.
        stop: ends the server.
    """

    requests: socket.socket
    stop: Callable[[], object]


class _ForkServer:
    """The owner's side of the fork server; see ``[Note: The fork server]``.

    It starts the server on first use, restarts it if it has died, and ends it with this process.

    Args:
        owner: the id of this process.
    """

    def __init__(self, owner: int) -> None:
        assert owner == os.getpid()
        self._lock = threading.Lock()
        self._server: _ServerConnection | None = None

    def start_rank(self, control: Connection, config: RankConfig) -> StartedProcess:
        """Fork a rank, which reads its configuration from its end of the control pipe."""
        with self._lock:
            if self._server is not None:
                with suppress(OSError, EOFError):  # it was killed since the last launch
                    return _request_rank(self._server.requests, control)
                self._server.stop()
            self._server = self._start_server()
            return _request_rank(self._server.requests, control)

    def _start_server(self) -> _ServerConnection:
        requests, server_requests = socket.socketpair()
        with server_requests:
            process = base.start_interpreter(
                forkserver_main, server_requests.fileno(), stdin=subprocess.DEVNULL
            )
        stop = weakref.finalize(self, _stop_server, requests, process)
        return _ServerConnection(requests, stop)


# Cached by process id: a forked child must not use the server of its parent.
fork_server = cache(_ForkServer)


def _request_rank(requests: socket.socket, control: Connection) -> StartedProcess:
    """Ask the server for a rank, and wait until the server has forked it."""
    status, server_status = multiprocessing.Pipe(duplex=False)
    with server_status:
        files = [control.fileno(), server_status.fileno(), 1, 2]
        socket.send_fds(requests, [b"!"], files)
    if not status.poll(_START_TIMEOUT):
        raise UsageError("the fork server does not start", suggestion='launcher="spawn"')
    return StartedProcess(status.recv(), partial(_read_exit_code, status))


def _stop_server(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    requests.close()
    process.kill()
    process.wait()


def _read_exit_code(status: Connection) -> int | None:
    """Return the exit code that the server has sent, or None if the rank still runs."""
    try:
        if not status.poll():
            return None
        return status.recv()
    except EOFError:
        # The server was killed. The rank watches the id of its parent process, so it ends, too. Its
        # exit code is unknown.
        return 255


def forkserver_main() -> None:
    """Run the fork server: fork a rank for each request until the owner has ended."""
    owner = os.getppid()
    # The server ignores signals to the process group, since only it can report the ranks' exit
    # codes. An ignored SIGINT stays ignored, because a rank inherits that.
    for number in ending_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in _PRELOAD:
        importlib.import_module(name)
    # A garbage collection in a rank would visit all objects that are not frozen, and copy their
    # memory by marking them.
    gc.freeze()
    ranks: dict[Any, Connection] = {}
    # A process that the owner forked may hold the connection open: the id of the parent process
    # shows that the owner has ended.
    while os.getppid() == owner:
        # The timeout: the sentinel of a rank is not ready while a process that the rank forked
        # lives.
        sentinels = [rank.sentinel for rank in ranks]
        timeout = 0.1 if ranks else 1.0
        ready = wait([requests, *sentinels], timeout)
        _report_exits(ranks)
        if requests not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, 1, 4)
        if not message:
            break
        control_fd, status_fd, *output = fds
        rank, status = _fork_rank(control_fd, status_fd, output, [requests, *ranks.values()])
        ranks[rank] = status
    # No exit handlers: they would wait for the ranks, which exit by themselves.
    os._exit(0)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without any effect."""


def _report_exits(ranks: dict[Any, Connection]) -> None:
    """Send the exit codes of the ranks that have ended to the owner, and forget these ranks."""
    for rank in list(ranks):
        if rank.exitcode is not None:
            _send(ranks.pop(rank), rank.exitcode)


def _fork_rank(
    control_fd: int, status_fd: int, output: list[int], inherited: list[Any]
) -> tuple[Any, Connection]:
    """Fork a rank, and send its process id to the owner.

    Args:
        control_fd: the rank's end of its control pipe.
        status_fd: the pipe for the process id and the exit code.
        output: the standard output and error of the rank.
        inherited: what the rank has to close, because only the server uses it.

    Returns:
        The process of the rank, and the pipe for its exit code.
    """
    control = Connection(control_fd)
    status = Connection(status_fd)
    process = multiprocessing.get_context("fork").Process(
        target=_run_served_rank, args=(control, output, [status, *inherited])
    )
    process.start()
    control.close()
    for fd in output:
        os.close(fd)
    _send(status, process.pid)
    return process, status


def _send(status: Connection, number: int | None) -> None:
    # The owner may have ended. The next read of the requests detects that.
    with suppress(BrokenPipeError):
        status.send(number)


def _run_served_rank(control: Connection, output: list[int], inherited: list[Any]) -> NoReturn:
    for connection in inherited:
        connection.close()
    for number, fd in enumerate(output, start=1):
        os.dup2(fd, number)
        os.close(fd)
    config, payload = receive_payload(control)
    # multiprocessing ends a forked process with os._exit, since the exit handlers are the server's.
    sys.exit(run_rank(control, config, payload))
