"""Launchers that run a function in new processes: spawn, fork and forkserver.

[Note: The fork server] It is a warm process with torch in it, from which ranks are forked. The standard library's
listens at an address in a directory that stays when its owner is killed, and gives its children the output of the
moment at which it started. This one has an inherited socket pair to its owner; each request carries open
files: the rank's end of the control pipe, a pipe on which the server sends the rank's process id, then its exit code,
and the owner's standard output and error of this moment.
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
from fabric.launchers.rank import Payload, RankConfig, ending_signals, main, receive, run
from fabric.launchers.serialize import Call, dump_call, load
from fabric.launchers.supervisor import Start, Started, Supervisor, exit_status

__all__ = ["ProcessLauncher", "fork_server", "forkserver_main", "pickled_call"]

_START_DEADLINE = 120.0  # seconds, of which the import of torch takes most
# The first optimizer that a process makes imports torch._dynamo, which takes longer than torch itself; and nearly every
# function of a rank is handed a Fabric.
_PRELOAD = ("torch", "torch._dynamo", "fabric._fabric")


class ProcessLauncher(base.Launcher):
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
    """

    def __init__(self, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        self.name = start_method

    def check(self, spec: base.LaunchSpec) -> None:
        """Refuse a launch while a script is being imported by a rank, and a fork that could not work.

        Raises:
            UsageError: the script has no guard, and a rank imports it.
            ConfigurationError: a device library is initialized that does not survive a fork.
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
        self, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], spec: base.LaunchSpec
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
            raise ArgumentTypeError(f"launch({fn!r})", "it is no function", "launch(train, x), not launch(train(x))")
        # Before any process starts: what cannot be pickled is an error here.
        payload = None if self.name == "fork" else pickled_call(Call(fn, args, kwargs))
        job = Supervisor()
        try:
            with job:
                start: Start = {
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
            # The ranks have ended; now the signal has the effect that it has without them.
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, None)
            raise SystemExit(128 + number) from None
        except RankFailedError:
            if sys.excepthook is sys.__excepthook__ and not base.is_interactive():  # a hook of the user stays
                sys.excepthook = _exit_as_the_rank
            raise
        return {"all": results, "first": results[0], "none": None}[spec.results]


def _exit_as_the_rank(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error as always; one of a rank that ends this process gives it the exit code of the rank."""
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, RankFailedError):
        raise SystemExit(exit_status(error.exit_code))


def pickled_call(call: Call) -> Payload:
    """A call, to be made in the state in which this process is now.

    Raises:
        MissingDependencyError, ArgumentTypeError: see :func:`dump_call`.
    """
    # Where a new process finds __main__: nowhere in an interactive session or a notebook, nor for `python -m package`,
    # whose code is not a library.
    main = sys.modules["__main__"]
    name, path = getattr(main.__spec__, "name", None), getattr(main, "__file__", None)
    is_importable = not f".{name}".endswith(".__main__") if name else path not in (None, "<stdin>")
    packed, needs_main = dump_call(call, main_is_importable=is_importable)
    state = {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "dir": os.getcwd(),
        # Of notebook cells and prompts, which no file holds: for tracebacks, and for what asks for its own source.
        "sources": {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)},
    }
    if needs_main:
        state |= {"init_main_from_name": name} if name else {"init_main_from_path": path}
    return partial(_load_call, dict(os.environ), state, packed)


def _load_call(environment: dict[str, str], state: dict[str, Any], packed: bytes) -> Callable[[], Any]:
    """Give this rank the state of the launching process, and load the call."""
    os.environ.clear()
    os.environ.update(environment)
    # Forked from one server, all ranks of all launches would draw the same numbers from it.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    linecache.cache.update(state["sources"])
    multiprocessing.spawn.prepare(state)
    fn, args, kwargs = load(packed)
    return partial(fn, *args, **kwargs)


def _spawn(control: Connection, config: RankConfig) -> Started:
    process = base.start_interpreter(main, control.fileno(), stdin=subprocess.DEVNULL)
    return process.pid, process.poll


def _fork(call: Callable[[], Any], control: Connection, config: RankConfig) -> Started:
    def be_rank() -> None:
        sys.exit(run(control, replace(config, threads=1), lambda: call))

    process = multiprocessing.get_context("fork").Process(target=be_rank)
    # What is garbage here may wait for threads, which the copy does not have: to collect it there can crash or hang.
    gc.freeze()
    try:
        process.start()
    finally:
        gc.unfreeze()
    return process.pid or 0, lambda: process.exitcode


class _ForkServer:
    """Owns the server process: starts it on first use and again should it have died, and ends it with this process.

    Args:
        owner: ``os.getpid()``.
    """

    def __init__(self, owner: int) -> None:
        assert owner == os.getpid()
        self._lock = threading.Lock()
        self._server: tuple[socket.socket, Callable[[], object]] | None = None

    def start_rank(self, control: Connection, config: RankConfig) -> Started:
        """Fork a rank, whose configuration is read from its end of the control pipe."""
        with self._lock:
            if self._server is not None:
                requests, stop = self._server
                with suppress(OSError, EOFError):  # it was killed since the last launch
                    return _request(requests, control)
                stop()
            requests, theirs = socket.socketpair()
            with theirs:
                process = base.start_interpreter(forkserver_main, theirs.fileno(), stdin=subprocess.DEVNULL)
            self._server = requests, weakref.finalize(self, _stop, requests, process)
            return _request(requests, control)


# The one of this process: a forked child must not use its parent's.
fork_server = cache(_ForkServer)


def _request(requests: socket.socket, control: Connection) -> Started:
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
        # The server was killed, and the rank ends too, since it watches its parent's process id; its code is unknown.
        return 255


def forkserver_main() -> None:
    """Run the server: fork a rank for each request until the owner has ended."""
    owner = os.getppid()
    # A signal to the whole process group is for the owner and the ranks, whose exit codes only the server reports.
    # If SIGINT is ignored it stays so: a rank inherits that.
    for number in ending_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in _PRELOAD:
        importlib.import_module(name)
    # Each collection of garbage in a rank would go through all of that, and with its marks copy the memory it is in.
    gc.freeze()
    ranks: dict[Any, Connection] = {}
    while os.getppid() == owner:  # a process that the owner forked may hold the connection open
        # A rank's sentinel stays silent while a process that it forked lives on, hence the timeout.
        ready = wait([requests, *(rank.sentinel for rank in ranks)], 0.1 if ranks else 1.0)
        for rank in [rank for rank in ranks if rank.exitcode is not None]:
            _send(ranks.pop(rank), rank.exitcode)
        if requests in ready:
            message, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not message:
                break
            control, status = map(Connection, fds[:2])
            inherited = [status, requests, *ranks.values()]
            rank = multiprocessing.get_context("fork").Process(target=_served_rank, args=(control, fds[2:], inherited))
            rank.start()
            control.close()
            for fd in fds[2:]:
                os.close(fd)
            _send(status, rank.pid)
            ranks[rank] = status
    # No exit handlers: they would wait for the ranks, which exit by themselves.
    os._exit(0)


def _send(status: Connection, number: int | None) -> None:
    # The owner may have ended, which the next read of the requests shows.
    with suppress(BrokenPipeError):
        status.send(number)


def _served_rank(control: Connection, output: list[int], inherited: list[Any]) -> None:
    for connection in inherited:
        connection.close()
    for number, fd in enumerate(output, 1):
        os.dup2(fd, number)
        os.close(fd)
    # As multiprocessing ends what it forks: the exit handlers are those of the server.
    sys.exit(run(control, *receive(control)))
