"""A warm process with torch in it, from which ranks are forked.

It speaks with its owner over an inherited socket pair, so that there is no address, no file and nobody else to answer
to; each request carries open files: the two pipes of the rank (see the note in ``_rank.py``), the owner's standard
output and error of this moment, and a pipe on which the server tells the rank's process id, then its exit code.
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
from fabric.launchers.base import interpreter_options

__all__ = ["UNKNOWN_EXIT_CODE", "ForkServer", "ServedRank", "fork_server", "fresh_interpreter", "serve"]

# What a rank shows when its server was killed and nobody can tell its exit code.
UNKNOWN_EXIT_CODE = 255
_START_DEADLINE = 120.0  # seconds; importing torch on a loaded machine takes several


def fresh_interpreter(statement: str) -> list[str]:
    """The command that runs a statement in a new interpreter with the options and the module path of this one."""
    options, _ = interpreter_options()
    return [sys.executable, *options, "-c", f"import sys; sys.path[:] = {sys.path!r}; {statement}"]


@functools.cache
def fork_server(owner: int) -> "ForkServer":
    """The one server of the process ``owner``, which is ``os.getpid()``: a forked child must not use its parent's."""
    assert owner == os.getpid()
    # The first optimizer that a process makes imports torch._dynamo, which takes longer than torch itself; and nearly
    # every function of a rank is handed a Fabric.
    return ForkServer(preload=("torch", "torch._dynamo", "fabric.launchers._fresh", "fabric._fabric"))


class ServedRank:
    """A rank that the server forked, as its owner sees it."""

    def __init__(self, status: Connection) -> None:
        self._status = status
        self._exit_code: int | None = None
        if not status.poll(_START_DEADLINE):
            raise UsageError(
                "the start method 'forkserver'",
                f"the fork server did not answer within {_START_DEADLINE:.0f} s",
                "a machine on which `import torch` takes less",
                'launcher="spawn"',
            )
        self.pid = int(status.recv_bytes())

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._exit_code is None and self._status.poll():
            try:
                self._exit_code = int(self._status.recv_bytes())
            except EOFError:
                # The server is gone, so the rank ends too, by its lifeline: it watches its parent's process id.
                self._exit_code = UNKNOWN_EXIT_CODE
            self._status.close()
        return self._exit_code


class ForkServer:
    """Owns the server process: starts it on first use and again should it have died, and ends it with this process."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start_rank(self, lifeline: Connection, answers: Connection) -> ServedRank:
        """Fork a rank; its orders are read from its end of the lifeline (see ``_fresh.py``)."""
        with self._lock:
            try:
                return self._request(lifeline, answers)
            except (BrokenPipeError, ConnectionResetError, EOFError):
                # It was killed since the last launch. Its sockets close a moment before poll() can tell.
                assert self._process is not None
                self._process.kill()
                self._process.wait()
                return self._request(lifeline, answers)

    def _request(self, lifeline: Connection, answers: Connection) -> ServedRank:
        control = self._running()
        status, told = multiprocessing.Pipe(duplex=False)
        with told:
            socket.send_fds(control, [b"!"], [lifeline.fileno(), answers.fileno(), told.fileno(), 1, 2])
        return ServedRank(status)

    def _running(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None:
            assert self._control is not None
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            statement = f"from fabric.launchers._forkserver import serve; serve({theirs.fileno()}, {self._preload!r})"
            self._process = subprocess.Popen(
                fresh_interpreter(statement), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        weakref.finalize(self, _stop, self._control, self._process)
        return self._control


def _stop(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Close the connection, upon which the server leaves."""
    control.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(control_fd: int, preload: tuple[str, ...]) -> None:
    """Be the server: fork a rank for each request until the owner is gone."""
    # A signal to the whole process group is for the owner and the ranks; without the server nobody learns their end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    for name in preload:
        importlib.import_module(name)
    # Each collection of garbage in a rank would go through all of that, and with its marks copy the memory it is in.
    gc.freeze()
    ranks: dict[BaseProcess, Connection] = {}
    while True:
        # A rank's sentinel stays silent while a process that it forked lives on, hence the timeout.
        ready = wait([control, *(rank.sentinel for rank in ranks)], 0.1 if ranks else None)
        for rank in [rank for rank in ranks if rank.exitcode is not None]:
            _tell(ranks[rank], rank.exitcode)
            ranks.pop(rank).close()
            rank.close()
        if control in ready:
            message, fds, _, _ = socket.recv_fds(control, 1, 5)
            if not message:
                # No exit handlers: they would wait for the ranks, which leave by themselves.
                os._exit(0)
            rank, status = _fork(fds, [control, *ranks.values()])
            ranks[rank] = status


def _fork(fds: list[int], inherited: list[Any]) -> tuple[BaseProcess, Connection]:
    lifeline, answers, status_fd, stdout, stderr = fds
    status = Connection(status_fd, readable=False)
    rank = multiprocessing.get_context("fork").Process(
        target=_be_rank, args=(lifeline, answers, stdout, stderr, [status, *inherited])
    )
    rank.start()
    for fd in (lifeline, answers, stdout, stderr):
        os.close(fd)
    _tell(status, rank.pid)
    return rank, status


def _tell(status: Connection, number: int | None) -> None:
    # The owner may have gone; the next look at the control connection shows it.
    with contextlib.suppress(BrokenPipeError):
        status.send_bytes(str(number).encode())


def _be_rank(lifeline: int, answers: int, stdout: int, stderr: int, inherited: list[Any]) -> None:
    from fabric.launchers._fresh import obey

    for connection in inherited:
        connection.close()
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    obey(lifeline, answers)
