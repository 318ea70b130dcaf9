"""A warm process with torch in it, from which ranks are forked.

The standard library's fork server listens at an address in a directory that stays when its owner is killed, and gives
its children the environment and the output of the moment at which it started. This one speaks with its owner over an
inherited socket pair; each request carries open files: the rank's end of the control pipe, a pipe on which the server
sends the rank's process id, then its exit code, and the owner's standard output and error of this moment.
"""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from fabric.errors import UsageError
from fabric.launchers.child import start_interpreter
from fabric.launchers.rank import RankConfig, run

__all__ = ["UNKNOWN_EXIT_CODE", "ForkServer", "fork_server", "serve"]

_START_DEADLINE = 120.0  # seconds, of which the import of torch takes most
# What a rank shows when its server was killed and nobody knows its exit code.
UNKNOWN_EXIT_CODE = 255
# The first optimizer that a process makes imports torch._dynamo, which takes longer than torch itself; and nearly every
# function of a rank is handed a Fabric.
_PRELOAD = ("torch", "torch._dynamo", "fabric._fabric")


@functools.cache
def fork_server(owner: int) -> "ForkServer":
    """The one server of the process ``owner``, which is ``os.getpid()``: a forked child must not use its parent's."""
    assert owner == os.getpid()
    return ForkServer()


class _ServedProcess:
    """A rank that the server forked."""

    def __init__(self, status: Connection) -> None:
        self._status = status
        self._exit_code: int | None = None
        if not status.poll(_START_DEADLINE):
            raise UsageError(
                "the start method 'forkserver'",
                f"the fork server has started no rank within {_START_DEADLINE:g} s",
                "a machine on which `import torch` takes less",
                'launcher="spawn"',
            )
        self.pid: int = status.recv()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._exit_code is None and self._status.poll():
            try:
                self._exit_code = self._status.recv()
            except EOFError:
                # The server is gone, so the rank ends too: it watches its parent's process id.
                self._exit_code = UNKNOWN_EXIT_CODE
            self._status.close()
        return self._exit_code


class ForkServer:
    """Owns the server process: starts it on first use and again should it have died, and ends it with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start_rank(self, control: Connection, config: RankConfig) -> _ServedProcess:
        """Fork a rank, whose configuration is read from its end of the control pipe."""
        with self._lock:
            try:
                return self._request(control)
            except (BrokenPipeError, ConnectionResetError, EOFError):
                # It was killed since the last launch. Its sockets close a moment before poll() can tell.
                assert self._process is not None
                self._process.kill()
                self._process.wait()
                return self._request(control)

    def _request(self, control: Connection) -> _ServedProcess:
        requests = self._running()
        status, theirs = multiprocessing.Pipe(duplex=False)
        with theirs:
            socket.send_fds(requests, [b"!"], [control.fileno(), theirs.fileno(), 1, 2])
        return _ServedProcess(status)

    def _running(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None:
            assert self._requests is not None
            return self._requests
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair()
        with theirs:
            self._process = start_interpreter(f"{__name__}:serve", theirs.fileno(), stdin=subprocess.DEVNULL)
        weakref.finalize(self, _stop, self._requests, self._process)
        return self._requests


def _stop(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Close the connection, upon which the server exits."""
    requests.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve() -> None:
    """Be the server: fork a rank for each request until the owner is gone."""
    owner = os.getppid()
    # A signal to the whole process group is for the owner and the ranks; without the server nobody learns their end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(requests.fileno(), False)
    for name in _PRELOAD:
        importlib.import_module(name)
    # Each collection of garbage in a rank would go through all of that, and with its marks copy the memory it is in.
    gc.freeze()
    ranks: dict[BaseProcess, Connection] = {}
    while True:
        # A rank's sentinel stays silent while a process that it forked lives on, hence the timeout.
        ready = wait([requests, *(process.sentinel for process in ranks)], 0.1 if ranks else 1.0)
        if os.getppid() != owner:  # a process that the owner forked may hold the connection open
            os._exit(0)
        for process in [process for process in ranks if process.exitcode is not None]:
            _send(ranks[process], process.exitcode)
            ranks.pop(process).close()
            process.close()
        if requests in ready:
            message, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not message:
                # No exit handlers: they would wait for the ranks, which exit by themselves.
                os._exit(0)
            status = Connection(fds[1], readable=False)
            inherited = [status, requests, *ranks.values()]
            process = multiprocessing.get_context("fork").Process(target=_be_rank, args=(fds, inherited))
            process.start()
            for fd in (fds[0], *fds[2:]):
                os.close(fd)
            _send(status, process.pid)
            ranks[process] = status


def _send(status: Connection, number: int | None) -> None:
    # The owner may have gone; the next look at the requests shows it.
    with contextlib.suppress(BrokenPipeError):
        status.send(number)


def _be_rank(fds: list[int], inherited: list[Any]) -> None:
    control, _, stdout, stderr = fds
    for connection in inherited:
        connection.close()
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    code, _ = run(Connection(control))
    # As multiprocessing ends what it forks: the exit handlers are those of the server.
    sys.exit(code)
