"""Starts the ranks of a job, waits for them, and ends them when one fails or the user interrupts.

[Note: The end of a failed job] The first process to end is often a secondary failure: the rank that failed first is
still in its ``finally``. So the supervisor waits briefly for the errors of all ranks, asks the remaining ranks which
error they are handling, and only then names the root cause. Errors that do not look like a lost connection come first;
among them, the earliest.

[Note: Unresponsive ranks] A rank handles a signal in Python code. If it waits for another rank in C++ code, it
handles the signal only after the other rank makes the same call or ends. So the supervisor waits as long as some rank
has acted on the signal, has just ended, or uses the CPU. Otherwise the ranks wait for each other and will not run their
``finally`` blocks.
"""

import linecache
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Self

from fabric.errors import RankFailedError
from fabric.launchers.rank import PREEMPTED, Failure, Payload, RankConfig, ending_signals
from fabric.world import World, available_cores

__all__ = [
    "RankProcess",
    "StartedProcess",
    "Supervisor",
    "describe_exit",
    "exit_status",
    "rank_variables",
]

StartedProcess = tuple[int, Callable[[], int | None]]
"""A process id, and a function that returns the exit code: negative for a signal, None while it runs."""
StartProcess = Callable[[Connection, RankConfig], StartedProcess]
"""Starts a process and gives it this end of the control pipe."""

# Seconds: for the other errors to arrive; for the ranks that remain to describe theirs; for ``finally`` blocks after a
# failure and after an interruption; for an unresponsive rank; for the system to reap a killed process; from a signal to
# one that repeats it. What a user waits for after a fault must total less than five: a test checks this.
COLLECT_TIMEOUT = 1.0
DESCRIBE_TIMEOUT = 0.3
END_GRACE = 2.0
INTERRUPT_GRACE = 3.0
RESPONSE_TIME = 1.0
REAP_TIMEOUT = 5.0
REPEAT_WINDOW = 0.3
# Seconds for a script that asks fabric.should_stop to write its checkpoint; the default of torchrun and of Kubernetes.
SAVE_GRACE = 30.0
# Signals that conventionally end a process; programs choose the meaning of the others.
_STANDARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL = 0.1  # seconds between two looks at the processes
_IDLE = 0.05  # of a core: the threads of fabric and of gloo poll now and then
_LINES = 16  # number of ranks whose last call an error shows
# A frame of user code: the innermost frame is the last in a traceback, the first in a faulthandler stack.
_LIBRARIES = rf'<|{re.escape(str(Path(__file__).parents[1]))}/|[^"]*-packages/torch/'
_FRAME = re.compile(rf'File "(?!{_LIBRARIES})(.+?)", line (\d+)(,?)')


def _open_standard_streams() -> None:
    # Otherwise the next open files would get the numbers of closed streams, and ranks would print to them.
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)


class _PrivateFile:
    """A file that other users cannot open, and that disappears with this process, even if killed.

    Attributes:
        path: the path that processes of the same user open.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            # Without a name; other users cannot read /proc/<pid>/fd. An interpreter that was built for an
            # older C library, as some of conda's are, cannot make one in memory.
            in_memory = getattr(os, "memfd_create", None)
            if in_memory is not None:
                self._file: Any = open(in_memory("fabric"), "rb")  # noqa: SIM115 - open as long as this object
            else:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - likewise
            # The process id as this /proc has it, which may belong to an outer namespace.
            self.path = f"/proc/{os.readlink('/proc/self')}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="fabric-")  # noqa: SIM115 - likewise
            self.path = self._file.name
        self.close = self._file.close


@dataclass(kw_only=True)
class RankProcess:
    """One rank, as its supervisor sees it.

    Attributes:
        config: its configuration.
        pid: its process id.
        read_exit_code: returns its exit code, or None.
        control: this end of its control pipe; see ``rank.py``.
        stack: the file with the stack of a fatal signal.
        messages: the content of its latest message of each kind.
        exit_code: its exit code, once it has ended.
        ended: when its end was noticed, on the monotonic clock.
    """

    config: RankConfig
    pid: int
    read_exit_code: Callable[[], int | None]
    control: Connection
    stack: _PrivateFile
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
        """Whether its payload has returned or failed."""
        return "finished" in self.messages or "error" in self.messages

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.exit_code is None:
            self.exit_code = self.read_exit_code()
            self.ended = monotonic()
        return self.exit_code is not None

    def has_failed(self) -> bool:
        """Whether it has sent an error, or has ended in an unexpected way."""
        if "error" in self.messages or self.exit_code is None:
            return "error" in self.messages
        return self.exit_code not in (0, PREEMPTED) or not (
            "finished" in self.messages or self.config.runs_script
        )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended."""
        if not self.poll():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send(self, kind: Any, content: Any = None) -> None:
        """Send a message; :meth:`poll` finds a rank that has died."""
        with suppress(OSError):
            self.control.send((kind, content))

    def receive(self) -> None:
        """Read the messages that have arrived."""
        try:
            while not self.control.closed and self.control.poll():
                kind, content = self.control.recv()
                self.messages[kind] = content
        except (EOFError, OSError):
            self.control.close()

    def read_stack(self) -> str:
        """The stack that it has written: of the thread that failed or, if that is no Python thread, of the main one."""
        reason, *threads = (
            Path(self.stack.path)
            .read_text(errors="replace")
            .partition("\n\nExtension")[0]
            .split("\n\n")
        )
        failed = [thread for thread in threads if thread.startswith("Current")]
        return "\n\n".join([reason, *(failed or threads[-1:])])

    def last_call(self) -> str:
        """The innermost line of user code in its error or stack, as a line of a table."""
        text = (
            self.failure.text if self.failure else self.messages.get("stack") or self.read_stack()
        )
        frames = _FRAME.findall(text)
        place = "it had finished" if "finished" in self.messages else "unknown"
        if frames:
            file, line, _ = frames[-1 if frames[0][2] else 0]
            place = f"{file}:{line}: {linecache.getline(file, int(line)).strip()}"
        return f"\n    rank {self.rank}: {place}"

    def processor_seconds(self) -> float:
        """CPU time of all threads of the process; NaN if it is unknown or the main thread is not sleeping."""
        try:
            state, *fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, or this is not Linux
            return math.nan
        return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK") if state == "S" else math.nan

    def cause_order(self, peer_lost: bool) -> tuple[int, float, int]:
        """A sort key that puts the root cause first, and ranks that cannot be the cause last.

        Args:
            peer_lost: whether a rank reports that it has lost another one.
        """
        failure = self.failure
        if failure is not None:
            return (
                3 if failure.secondary else int("error" not in self.messages),
                failure.time,
                self.rank,
            )
        # A rank that has finished did so too early only if another rank reports that it has lost a peer.
        if peer_lost if "finished" in self.messages else self.exit_code == 0:
            return 2, self.ended, self.rank
        return 4 if self.exit_code in (None, 0, PREEMPTED) else 0, self.ended, self.rank


class Supervisor:
    """The ranks of one job on this machine. Leaving the ``with`` block kills those that still run.

    Attributes:
        ranks: the ranks that have been started.
        signals: the job-ending signals that have arrived since the block was entered, each with its time.
    """

    def __init__(self) -> None:
        _open_standard_streams()
        self.ranks: list[RankProcess] = []
        self.signals: list[tuple[int, float]] = []
        self._store = _PrivateFile()
        self._handlers: dict[int, Any] = {}
        # Users of SLURM have it send SIGUSR1 for another purpose.
        self._report_signal = (
            signal.SIGQUIT if signal.SIGUSR1 in ending_signals() else signal.SIGUSR1
        )
        self._report_requested = False

    def __enter__(self) -> Self:
        # Only the main thread may install handlers; in another thread the signals keep their handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (*ending_signals(), self._report_signal):
                handler = signal.getsignal(number)
                # An ignored signal stays ignored, as the shell or nohup wants. SIGQUIT is the exception: the shell
                # ignores it for all "&" jobs, but means the keyboard. None: installed from C, cannot be restored.
                is_ours = (
                    handler != signal.SIG_IGN if number in _STANDARD else handler is signal.SIG_DFL
                )
                is_ours |= number == self._report_signal and handler is signal.SIG_IGN
                if is_ours and handler is not None:
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Kill the ranks that still run, and wait until they are gone."""
        for rank in self.ranks:
            rank.kill()
        self.collect_until(REAP_TIMEOUT)
        for rank in self.ranks:
            rank.control.close()
            rank.stack.close()
        self._store.close()

    def start(
        self,
        start: StartProcess,
        worlds: Sequence[World],
        payload: Payload | None,
        results: str = "none",
        variables: Mapping[str, str] = {},
        *,
        runs_script: bool = False,
    ) -> None:
        """Start the ranks.

        Args:
            start: starts a process.
            worlds: the place of each rank. In a job of one machine the store is added.
            payload: sent to the ranks; None if they share the memory of this process.
            results: which ranks send back their results, as in :class:`~fabric.launchers.LaunchSpec`.
            variables: added to their environment, besides their place and :func:`rank_variables`.
            runs_script: whether they run a script. A rank that runs a function fails if it exits before it returns.
        """
        for place in worlds:
            world = (
                replace(place, store=f"file://{self._store.path}") if place.port is None else place
            )
            added = rank_variables(os.environ, world, available_cores(), sys.platform) | dict(
                variables
            )
            stack = _PrivateFile()
            config = RankConfig(
                world=world,
                variables=world.to_env() | added,
                # OpenMP allows a list, one number per level of nesting.
                threads=int(added["OMP_NUM_THREADS"].split(",")[0]),
                stack_file=stack.path,
                runs_script=runs_script,
                returns=results == "all" or (results == "first" and world.rank == 0),
            )
            control, theirs = multiprocessing.Pipe()
            # On Ctrl-C a process that is still starting would print a long traceback. Blocked signals are inherited,
            # and are delivered when the rank unblocks them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with theirs:
                    pid, read_exit_code = start(theirs, config)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            rank = RankProcess(
                config=config, pid=pid, read_exit_code=read_exit_code, control=control, stack=stack
            )
            self.ranks.append(rank)
        for rank in self.ranks if payload else ():
            rank.send(rank.config, payload)

    def run(self) -> list[bytes]:
        """Wait for all ranks.

        Returns:
            The pickled result of each rank, in the order in which they were started.

        Raises:
            RankFailedError: a rank failed; the others have had their grace period.
            KeyboardInterrupt: a job-ending signal arrived, see ``signals``; the ranks have had a grace period.
            SystemExit: the job was preempted: all ranks have ended, at least one with :data:`PREEMPTED`.
        """
        over = False
        while not over:
            over = self._collect(_POLL)
            saving = [rank for rank in self.ranks if "saving" in rank.messages]
            if self.signals and saving and self.signals[0][0] not in _STANDARD:
                # A scheduler sent it, and will end the job itself when the time to save is over.
                number, _ = self.signals.pop(0)
                for rank in saving:
                    rank.kill(number)
            elif self.signals:
                number, _ = self.signals[0]
                # A second signal ends the wait, unless it follows at once: `timeout` and others send each signal twice.
                grace = SAVE_GRACE if saving and number != signal.SIGINT else INTERRUPT_GRACE
                self._end(
                    number, grace, lambda: self.signals[-1][1] - self.signals[0][1] > REPEAT_WINDOW
                )
                if any(rank.exit_code != PREEMPTED for rank in self.ranks):
                    raise KeyboardInterrupt
            if any(rank.has_failed() for rank in self.ranks):
                self._conclude()
        if any(rank.exit_code == PREEMPTED for rank in self.ranks):
            raise SystemExit(PREEMPTED)
        return [rank.messages.get("finished", b"") for rank in self.ranks]

    def collect_until(self, seconds: float, done: Callable[[], object] = bool) -> None:
        """Collect messages and exit codes until all ranks have ended, ``done()`` is true, or the time is over."""
        deadline = monotonic() + seconds
        while not self._collect(min(_POLL, max(0.0, deadline - monotonic()))) and not done():
            if monotonic() >= deadline:
                return

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == self._report_signal:
            self._report_requested = True
        else:
            self.signals.append((number, monotonic()))

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if not rank.poll()]

    def _collect(self, timeout: float) -> bool:
        """Wait for messages or an exit for at most this many seconds; whether all ranks have ended."""
        if self._report_requested:
            self._report_requested = False
            request = os.urandom(8).hex()
            for rank in self._alive():
                rank.send("report", request)
        controls = [rank.control for rank in self.ranks if not rank.control.closed]
        wait(controls, timeout if controls else min(timeout, 0.005))
        for rank in self.ranks:
            # In this order: once a rank has ended, all its messages are in the pipe.
            rank.poll()
            rank.receive()
        return all(rank.exit_code is not None for rank in self.ranks)

    def _conclude(self) -> None:
        self.collect_until(
            COLLECT_TIMEOUT, lambda: self.signals or all(rank.is_exiting for rank in self._alive())
        )
        for rank in self._alive():
            rank.send("describe")
        self.collect_until(
            DESCRIBE_TIMEOUT,
            lambda: self.signals or all("described" in one.messages for one in self._alive()),
        )
        error = self._root_cause()
        self._end(signal.SIGTERM, END_GRACE)
        raise error

    def _end(self, number: int, grace: float, stop: Callable[[], object] = bool) -> None:
        """Signal the ranks to end, and wait for a grace period; :meth:`close` kills those that remain."""
        for rank in self.ranks:
            # A rank that is still starting has no ``finally`` to run, and ignores Ctrl-C. A signal to a rank that is
            # exiting would only replace its exit code.
            if not rank.is_exiting:
                rank.kill(number if "ready" in rank.messages else signal.SIGKILL)
        # Stops early if the ranks do not respond: [Note: Unresponsive ranks].
        until = monotonic() + grace
        while (alive := self._alive()) and (left := until - monotonic()) > 0 and not stop():
            before = sum(rank.processor_seconds() for rank in alive)
            self.collect_until(min(RESPONSE_TIME, left), stop)
            worked = sum(rank.processor_seconds() for rank in alive) - before
            responding = any("signal" in rank.messages or rank.is_exiting for rank in alive)
            if self._alive() == alive and worked < _IDLE * RESPONSE_TIME and not responding:
                break

    def _root_cause(self) -> RankFailedError:
        """The error of the rank that has ended the job."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        peer_lost = any(failure.peer_lost for failure in failures)
        rank = min(self.ranks, key=lambda rank: rank.cause_order(peer_lost))
        failure = rank.failure
        code = rank.exit_code if rank.exit_code is not None else failure.exit_code if failure else 0
        text = failure.text if failure else rank.read_stack()
        if code == 0:
            # The early exit raised no error itself: show the first error that it caused.
            text = min(failures, key=lambda failure: failure.time).text if failures else ""
        how = "failed (exit code 1)" if text and code == 1 else describe_exit(code)
        # C++ code often aborts because another rank made a different call.
        calls = (
            "".join(rank.last_call() for rank in self.ranks[:_LINES])
            if code == -signal.SIGABRT
            else ""
        )
        request = f"rank {rank.rank} of {rank.config.world.world_size} {how}"
        return RankFailedError(
            request, rank.rank, code, text, calls and f"where each rank was:{calls}"
        )


def rank_variables(
    environ: Mapping[str, str], world: World, cores: int, platform: str
) -> dict[str, str]:
    """The environment variables of a rank besides its place; the user's values take precedence.

    Args:
        environ: the environment of the launching process.
        world: place of the rank.
        cores: number of cores that the ranks of this machine share.
        platform: as in ``sys.platform``.
    """
    # torchrun sets one thread and warns; without a limit every rank would use all cores and slow the others down.
    # gloo listens on the address that the host name resolves to, unless it is given an interface.
    variables = {"OMP_NUM_THREADS": str(max(1, cores // world.local_world_size))}
    if world.port is None:
        variables["GLOO_SOCKET_IFNAME"] = "lo0" if platform == "darwin" else "lo"
    return {name: environ.get(name) or value for name, value in variables.items()}


def exit_status(code: int) -> int:
    """The exit code of the launching process after a rank ended with this code: as a shell shows it, never 0."""
    return 128 - code if code < 0 else code or 1


_HINTS: dict[int, str] = {
    signal.SIGKILL: ": fabric did not do it; the system kills this way when memory runs out",
    signal.SIGABRT: ": C++ code aborted, as when ranks make different calls, which FABRIC_CHECK=1 compares",
}


def describe_exit(code: int) -> str:
    """How a rank ended and the usual reason, to follow the rank's name in a sentence."""
    if code == 0:
        return "exited with exit code 0: it ended early, without an error, while the other ranks still needed it"
    if code > 0:
        return f"exited with exit code {code}"
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    return f"was killed by {name} (exit code {code}){_HINTS.get(-code, '')}"
