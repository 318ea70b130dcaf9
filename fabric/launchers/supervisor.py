"""Starts the ranks of a job, waits for them, and ends them when one fails or the user interrupts.

[Note: The end of a failed job] The first process to end is often a secondary failure of another, which is still in its
``finally``. So the supervisor waits a moment for the errors of all, asks the ranks that remain what they are handling,
and only then names the root cause: an error of its own before one that looks like a lost connection, an earlier one
before a later one.

[Note: Unresponsive ranks] A signal makes a rank run Python code. A rank in C++ code that waits for another one runs it
when the other one calls too, or ends. So there is something to wait for as long as a rank has acted on the signal, has
ended lately, or computes; where none of this is the case, the ranks wait for each other and will not run their
``finally``.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from fabric.errors import RankFailedError
from fabric.launchers.rank import Failure, RankConfig, RankPayload
from fabric.world import World

__all__ = [
    "JobInterrupted",
    "PrivateFile",
    "Process",
    "RankProcess",
    "Supervisor",
    "describe_exit",
    "exit_status",
    "explain_exit",
]

# Seconds: for the other errors to arrive; for the ranks that remain to describe theirs; for ``finally`` blocks after a
# failure and after an interruption; for an unresponsive rank; for the system to reap a killed process; from a signal to
# one that means insisting. Nothing that a user waits for after a fault may sum up to five: a test counts.
COLLECT, DESCRIBE, END, INTERRUPT, RESPOND, REAP, INSIST = 1.0, 0.3, 2.0, 3.0, 1.0, 5.0, 0.3
# Seconds for a script that asks fabric.should_stop to write its checkpoint; the default of torchrun and of Kubernetes.
SAVE = 30.0
_POLL = 0.1  # seconds between two looks at the processes
_IDLE = 0.05  # of a core: the threads of fabric and of gloo look around now and then


class Process(Protocol):
    """A process, however it was started."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...


class JobInterrupted(Exception):
    """SIGINT or SIGTERM reached the launching process, and the ranks have been ended."""

    def __init__(self, number: int, previous: Any) -> None:
        super().__init__(number)
        self.number, self.previous = number, previous


class PrivateFile:
    """A file that other users cannot open, and that is gone with this process, be it killed.

    Attributes:
        path: under which processes of the same user open it.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            # In memory, without a name; the system lets nobody else look into /proc/<pid>/fd.
            self._file: Any = open(os.memfd_create("fabric"), "rb")  # noqa: SIM115 - closed by close()
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="fabric-")  # noqa: SIM115 - likewise
            self.path = self._file.name

    def read(self) -> str:
        """What it holds now."""
        fd = self._file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Let it go."""
        self._file.close()


@dataclass(kw_only=True)
class RankProcess:
    """One rank, as its supervisor sees it.

    Attributes:
        config: what it was configured with.
        process: the process.
        control: this end of its control pipe; see ``rank.py``.
        stack: where the stack of a fatal signal is.
        messages: by kind, the content of the latest message from it.
        exit_code: once it has ended.
        ended: when that was noticed, on the monotonic clock.
    """

    config: RankConfig
    process: Process
    control: Connection
    stack: PrivateFile
    messages: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    ended: float = 0.0

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.config.world.rank

    @property
    def failure(self) -> Failure | None:
        """Its error, if it has sent one."""
        return self.messages.get("error") or self.messages.get("described")

    @property
    def is_exiting(self) -> bool:
        """Whether it has run its payload to an end, good or bad."""
        return "finished" in self.messages or "error" in self.messages

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.exit_code is None:
            self.exit_code = self.process.poll()
            self.ended = time.monotonic()
        return self.exit_code is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended."""
        if not self.poll():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send(self, kind: Any, content: Any = None) -> None:
        """Send a message; that a rank has died is found by :meth:`poll`."""
        with contextlib.suppress(OSError):
            self.control.send((kind, content))

    def receive(self) -> None:
        """Take the messages that are there."""
        try:
            while not self.control.closed and self.control.poll():
                kind, content = self.control.recv()
                self.messages[kind] = content
        except (EOFError, OSError):
            self.control.close()


class _SignalNotes:
    """Notes SIGINT, SIGTERM and SIGUSR1 instead of letting them act, from entry to exit.

    Only the main thread may install handlers; in another thread the signals keep the meaning they have. So does SIGUSR1
    where the user has given it one.
    """

    def __init__(self) -> None:
        self.received: list[tuple[int, float]] = []
        self.reports_requested = 0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # Ignored: the shell wants it so. None: installed from C, and could not be restored.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.previous[number] = signal.signal(number, self._note)
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                self.previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.reports_requested += 1
        else:
            self.received.append((number, time.monotonic()))

    def is_insisting(self) -> bool:
        """Whether the user insists; `timeout` and others send the same signal twice in one go, and do not mean it."""
        return self.received[-1][1] - self.received[0][1] > INSIST


class Supervisor:
    """The ranks of one job on this machine. Leaving the ``with`` block ends those that still run.

    Args:
        needs_results: whether a rank that exits with code 0 before its payload has returned has failed.
    """

    def __init__(self, *, needs_results: bool) -> None:
        self.ranks: list[RankProcess] = []
        self._controls: list[Connection] = []
        self._store = PrivateFile()
        self._needs_results = needs_results
        self._signals = _SignalNotes()
        self._reports = 0
        # Whether SIGINT is meant to end the job: a shell script ignores it for what it starts in the background.
        self._interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def __enter__(self) -> "Supervisor":
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self._signals.__exit__()

    def close(self) -> None:
        """Kill the ranks that still run, and wait until they are gone."""
        for rank in self.ranks:
            rank.kill()
        self.collect_until(REAP)
        for rank in self.ranks:
            rank.control.close()
            rank.stack.close()
        self._store.close()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Start processes under this: they ignore Ctrl-C until they are ready to end well.

        A process that is still importing would answer it with a page of traceback; ours hears of it from the parent.
        """
        if signal.SIGINT not in self._signals.previous:
            yield
            return
        noting = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, noting)

    def start(
        self,
        start: Callable[[Connection, RankConfig], Process],
        world: World,
        variables: Mapping[str, str],
        *,
        returns: bool = False,
        interruptible: bool = True,
    ) -> None:
        """Start one rank.

        Args:
            start: starts the process that is handed this end of the control pipe.
            world: its place. In a job of one machine the store is added.
            variables: what it adds to its environment.
            returns: whether what the payload returns is sent back.
            interruptible: whether SIGINT is for the rank too.
        """
        if world.port is None:
            world = replace(world, store=f"file://{self._store.path}")
        stack = PrivateFile()
        config = RankConfig(
            world=world,
            variables=world.to_env() | dict(variables),
            threads=_threads(variables["OMP_NUM_THREADS"]),
            stack_file=stack.path,
            interruptible=self._interruptible and interruptible,
            returns=returns,
            supervisor=f"{socket.gethostname()}:{self._store.path}",
        )
        control, theirs = multiprocessing.Pipe()
        self._controls.append(control)
        with theirs:
            process = start(theirs, config)
        self.ranks.append(RankProcess(config=config, process=process, control=control, stack=stack))

    def send_payload(self, payload: RankPayload) -> None:
        """Begin the conversation with ranks that do not share this process's memory."""
        for rank in self.ranks:
            rank.send(rank.config, payload)

    def release_in_child(self) -> None:
        """Let go of the supervisor's pipes and signals in a rank that has been forked from this process."""
        for control in self._controls:
            control.close()
        if signal.SIGUSR1 in self._signals.previous:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def run(self) -> list[bytes]:
        """Wait for all ranks.

        Returns:
            The pickled result of each rank, in the order in which they were started.

        Raises:
            RankFailedError: a rank failed; all of them have ended.
            JobInterrupted: SIGINT or SIGTERM came; all of them have ended.
        """
        over = False
        while not over:
            over = self._collect(_POLL)
            if self._signals.received:
                self._interrupt()
            if any(map(self._has_failed, self.ranks)):
                self._conclude()
        return [rank.messages.get("finished", b"") for rank in self.ranks]

    def alive(self) -> list[RankProcess]:
        """The ranks that run."""
        return [rank for rank in self.ranks if not rank.poll()]

    def collect_until(self, seconds: float, done: Callable[[], object] = bool) -> None:
        """Take messages and exits until all ranks have ended, something is done, or so many seconds are over."""
        deadline = time.monotonic() + seconds
        while not self._collect(min(_POLL, max(0.0, deadline - time.monotonic()))) and not done():
            if time.monotonic() >= deadline:
                return

    def _collect(self, timeout: float) -> bool:
        """Wait for messages or an exit for at most this many seconds; whether all ranks have ended."""
        if self._reports < self._signals.reports_requested:
            self._reports += 1
            for rank in self.alive():
                rank.send("report")
        pipes = {rank.control: rank for rank in self.ranks if not rank.control.closed}
        if pipes:
            for pipe in wait(list(pipes), timeout):
                pipes[pipe].receive()  # type: ignore[index]: wait() returns what it was given
        elif self.alive():
            time.sleep(min(timeout, 0.005))
        over = not self.alive()
        # What a rank sent before it ended is in the pipe by now; whether it failed is asked next, of each that ended.
        for rank in self.ranks:
            if rank.exit_code is not None:
                rank.receive()
        return over

    def _has_failed(self, rank: RankProcess) -> bool:
        if "error" in rank.messages:
            return True
        if rank.exit_code is None:
            return False
        return rank.exit_code != 0 or (self._needs_results and "finished" not in rank.messages)

    def _conclude(self) -> None:
        self.collect_until(COLLECT, lambda: self._signals.received or all(rank.is_exiting for rank in self.alive()))
        for rank in self.alive():
            rank.send("describe")
        self.collect_until(
            DESCRIBE, lambda: self._signals.received or all("described" in rank.messages for rank in self.alive())
        )
        suspects = self._suspects()
        self._end(signal.SIGTERM, END)
        raise self._error(suspects)

    def _interrupt(self) -> None:
        number, _ = self._signals.received[0]
        saving = number == signal.SIGTERM and any("saving" in rank.messages for rank in self.ranks)
        self._end(number, SAVE if saving else INTERRUPT, self._signals.is_insisting)
        raise JobInterrupted(number, self._signals.previous.get(number))

    def _end(self, number: int, grace: float, stop: Callable[[], object] = bool) -> None:
        """End the ranks by a signal, and kill those that remain after the grace period."""
        for rank in self.ranks:
            # A rank that is still starting has no ``finally`` to run, and ignores Ctrl-C: see ``starting``. To one that
            # is exiting a signal would do no more than take the place of its exit code.
            if not rank.is_exiting:
                rank.kill(number if "ready" in rank.messages else signal.SIGKILL)
        self._await_ends(grace, stop)
        for rank in self.ranks:
            rank.kill()
        self.collect_until(REAP)

    def _await_ends(self, grace: float, stop: Callable[[], object]) -> None:
        """Wait as long as it makes sense: ``[Note: Unresponsive ranks]``."""
        until = time.monotonic() + grace
        while (alive := self.alive()) and (left := until - time.monotonic()) > 0 and not stop():
            before = sum(_processor_seconds(rank.process.pid) for rank in alive)
            self.collect_until(min(RESPOND, left), stop)
            worked = sum(_processor_seconds(rank.process.pid) for rank in alive) - before
            responding = any("signal" in rank.messages or rank.is_exiting for rank in alive)
            if self.alive() == alive and worked < _IDLE * RESPOND and not responding:
                return

    def _suspects(self) -> list["_Suspect"]:
        """The ranks that may have ended the job."""
        suspects = []
        peer_lost = any(rank.failure is not None and rank.failure.peer_lost for rank in self.ranks)
        for rank in self.ranks:
            failure, finished = rank.failure, "finished" in rank.messages
            # A rank that has finished did so too early only if another says that it was still needed.
            left_early = failure is None and (peer_lost if finished else rank.exit_code == 0)
            if left_early or failure is not None or self._has_failed(rank):
                code = rank.exit_code if rank.exit_code is not None else failure.exit_code if failure else 0
                suspects.append(_Suspect(rank, failure, left_early, code))
        return suspects

    def _error(self, suspects: list["_Suspect"]) -> RankFailedError:
        suspects = sorted(suspects, key=_Suspect.order)
        cause = suspects[0]
        text = cause.failure.text if cause.failure else cause.rank.stack.read()
        if cause.left_early:
            # To end early is no error by itself: show what it did to the first of the others.
            text = next((other.failure.text for other in suspects if other.failure is not None), "")
        code = cause.exit_code
        return RankFailedError(
            f"rank {cause.rank.rank} of {cause.rank.config.world.world_size} {describe_exit(code, bool(text))}",
            rank=cause.rank.rank,
            exit_code=code,
            traceback=text,
            problem=explain_exit(code),
        )


class _Suspect(NamedTuple):
    """A rank that may have ended the job."""

    rank: RankProcess
    failure: Failure | None
    left_early: bool
    exit_code: int

    def order(self) -> tuple[int, float, int]:
        """How far from being the root cause: see the first note at the top."""
        if self.failure is None:
            return 2 if self.left_early else 0, self.rank.ended, self.rank.rank
        level = 3 if self.failure.secondary else 1 if self.failure.pending else 0
        return level, self.failure.time, self.rank.rank


def exit_status(code: int) -> int:
    """What a launching process ends with when a rank has ended with this code: as a shell shows it, and never 0."""
    return 128 - code if code < 0 else code or 1


def describe_exit(code: int, raised: bool = False) -> str:
    """How a rank ended, for a sentence that begins with its name."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name} (exit code {code})"
    if code == 128 + signal.SIGTERM:
        return f"was ended by SIGTERM (exit code {code})"
    if raised and code == 1:
        return "failed (exit code 1)"
    return f"exited with exit code {code}"


def explain_exit(code: int) -> str:
    """What that usually means; empty where there is no more to say."""
    if code == 0:
        return "it ended early, without an error, while the other ranks still needed it"
    if code == -signal.SIGKILL:
        return "fabric did not do it; the system kills this way when memory runs out"
    return ""


def _processor_seconds(pid: int) -> float:
    """What all threads of a process have taken; not a number unless it is known, and its main thread sleeps."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is not a Linux
        return math.nan
    return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK") if state == "S" else math.nan


def _threads(omp_num_threads: str) -> int:
    """OpenMP allows a list, one number per level of nesting."""
    first = omp_num_threads.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else 1
