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

import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from types import FrameType
from typing import Any

from fabric.errors import RankFailedError
from fabric.launchers.rank import RankConfig, RankPayload
from fabric.launchers.rank_process import PrivateFile, Process, RankProcess, describe_exit, explain_exit
from fabric.world import World

__all__ = ["JobInterrupted", "Supervisor"]

# Seconds: for the other errors to arrive; for the ranks that remain to describe theirs; for ``finally`` blocks after a
# failure and after an interruption; for an unresponsive rank; for the system to reap a killed process; from a signal to
# one that repeats it. Nothing that a user waits for after a fault may sum up to five: a test counts.
COLLECT, DESCRIBE, END, INTERRUPT, RESPOND, REAP, REPEAT = 1.0, 0.3, 2.0, 3.0, 1.0, 5.0, 0.3
# Seconds for a script that asks fabric.should_stop to write its checkpoint; the default of torchrun and of Kubernetes.
SAVE = 30.0
_POLL = 0.1  # seconds between two looks at the processes
_IDLE = 0.05  # of a core: the threads of fabric and of gloo look around now and then


class JobInterrupted(Exception):
    """SIGINT or SIGTERM reached the launching process, and the ranks have been ended."""

    def __init__(self, number: int, previous: Any) -> None:
        super().__init__(number)
        self.number, self.previous = number, previous


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

    def is_repeated(self) -> bool:
        """Whether a second signal followed; not the one that `timeout` and others send twice in one go."""
        return self.received[-1][1] - self.received[0][1] > REPEAT


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

    @property
    def is_interrupted(self) -> bool:
        """Whether SIGINT or SIGTERM has arrived, be it while a failed job was ended."""
        return bool(self._signals.received)

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
        # A process that is still starting would answer Ctrl-C with a page of traceback. Blocked signals are inherited,
        # and arrive when the rank unblocks them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                process = start(theirs, config)
            self.ranks.append(RankProcess(config=config, process=process, control=control, stack=stack))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def send_payload(self, payload: RankPayload) -> None:
        """Send the payload to ranks that do not share this process's memory."""
        for rank in self.ranks:
            rank.send(rank.config, payload)

    def release_in_child(self) -> None:
        """Release the supervisor's pipes and signals in a rank that has been forked from this process."""
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
            JobInterrupted: SIGINT or SIGTERM was received; all of them have ended.
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
        error = self._root_cause()
        self._end(signal.SIGTERM, END)
        raise error

    def _interrupt(self) -> None:
        number, _ = self._signals.received[0]
        saving = number == signal.SIGTERM and any("saving" in rank.messages for rank in self.ranks)
        self._end(number, SAVE if saving else INTERRUPT, self._signals.is_repeated)
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
            before = sum(rank.processor_seconds() for rank in alive)
            self.collect_until(min(RESPOND, left), stop)
            worked = sum(rank.processor_seconds() for rank in alive) - before
            responding = any("signal" in rank.messages or rank.is_exiting for rank in alive)
            if self.alive() == alive and worked < _IDLE * RESPOND and not responding:
                return

    def _root_cause(self) -> RankFailedError:
        """The error of the rank that has ended the job."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        peer_lost = any(failure.peer_lost for failure in failures)
        causes = [(order, rank) for rank in self.ranks if (order := rank.cause_order(peer_lost)) is not None]
        _, rank = min(causes, key=itemgetter(0))
        failure = rank.failure
        code = rank.exit_code if rank.exit_code is not None else failure.exit_code if failure else 0
        text = failure.text if failure else rank.stack.read()
        if code == 0:
            # To end early is no error by itself: show what it did to the first of the others.
            text = min(failures, key=lambda failure: failure.time).text if failures else ""
        return RankFailedError(
            f"rank {rank.rank} of {rank.config.world.world_size} {describe_exit(code, bool(text))}",
            rank=rank.rank,
            exit_code=code,
            traceback=text,
            problem=explain_exit(code),
        )


def _threads(omp_num_threads: str) -> int:
    """OpenMP allows a list, one number per level of nesting."""
    first = omp_num_threads.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else 1
