"""Waiting for the ranks of a job, and ending them when one fails or the user interrupts.

[Note: the end of a failed job] The first process to go is often a victim of another, which is still in its ``finally``.
So the supervisor waits a moment for the errors of all, asks the ranks that remain what they are handling, and only then
names the cause: an error of its own before one that looks like a lost connection, an earlier one before a later one.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NamedTuple, Protocol

from fabric.errors import RankFailedError
from fabric.launchers._custody import DirectoryGuard
from fabric.launchers._failures import Failure, RunDirectory
from fabric.launchers._patience import ASK, COLLECT, INSISTING, INTERRUPT, REAP, SAVE, WIND_DOWN, await_ends
from fabric.launchers._signals import ReportRequests

__all__ = [
    "Crew",
    "JobInterrupted",
    "Member",
    "RankProcess",
    "describe_exit",
    "exit_status",
    "explain_exit",
    "signal_name",
]


class RankProcess(Protocol):
    """What the supervisor knows of a process, however it was started."""

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


@dataclass
class Member:
    """One rank, as its parent sees it.

    Attributes:
        rank: global rank.
        process: the process.
        lifeline: see the note in ``_rank.py``; this end is for writing.
        answers: from which its result comes; None when it runs no function of ours, or has closed its end.
        answer: the result, pickled, once it is here.
        exit_code: once it has ended.
        ended: when that was noticed, on the monotonic clock.
    """

    rank: int
    process: RankProcess
    lifeline: Connection
    answers: Connection | None = None
    answer: bytes | None = None
    exit_code: int | None = None
    ended: float = 0.0

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.exit_code is None:
            self.exit_code = self.process.poll()
            self.ended = time.monotonic()
        return self.exit_code is not None

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.poll():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def order(self, orders: Any) -> None:
        """Send a fresh process what it has to know; one that has died already is found by :meth:`poll`."""
        with contextlib.suppress(BrokenPipeError):
            self.lifeline.send(orders)

    def ask(self) -> None:
        """Ask for the error that it is handling."""
        with contextlib.suppress(OSError):
            self.lifeline.send_bytes(b"?")

    def read_answer(self) -> None:
        """Take its result from the pipe, or note that it will not send one."""
        assert self.answers is not None
        try:
            self.answer = self.answers.recv_bytes()
        except (EOFError, OSError):
            self.answers.close()
            self.answers = None


class _Interruptions:
    """Notes SIGINT and SIGTERM instead of letting them act, from entry to exit.

    Only the main thread may install handlers; in another thread the signals keep the meaning they have.
    """

    def __init__(self) -> None:
        self.received: list[tuple[int, float]] = []
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "_Interruptions":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # Ignored: the shell wants it so. None: installed from C, and could not be restored.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append((number, time.monotonic()))

    def is_impatient(self) -> bool:
        """Whether the user insists; `timeout` and others send the same signal twice in one go, and do not mean it."""
        return self.received[-1][1] - self.received[0][1] > INSISTING


class Crew:
    """The ranks of one job. Leaving the ``with`` block ends those that still run and removes the run directory."""

    def __init__(self, *, answering: bool) -> None:
        self.directory = RunDirectory.create()
        self.guard = DirectoryGuard(self.directory.path)
        self.members: list[Member] = []
        self._answering = answering
        self._signals = _Interruptions()
        self.report_requests = ReportRequests(lambda: [self.directory])
        # Whether SIGINT is meant to end the job: a shell script ignores it for what it starts in the background.
        self.interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def __enter__(self) -> "Crew":
        self._signals.__enter__()
        self.report_requests.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for member in self.members:
                member.send(signal.SIGKILL)
            self._collect_until(time.monotonic() + REAP)
            for member in self.members:
                member.lifeline.close()
                if member.answers is not None:
                    member.answers.close()
            self.directory.remove()
            self.guard.close()
        finally:
            self.report_requests.__exit__()
            self._signals.__exit__()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Start processes under this: they ignore Ctrl-C until they are ready to end well.

        A process that is still importing would answer it with a page of traceback; ours is told by the parent.
        """
        if signal.SIGINT not in self._signals.previous:
            yield
            return
        noting = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, noting)

    def run(self) -> dict[int, bytes]:
        """Wait for all ranks.

        Returns:
            The pickled result of each rank; empty when the ranks run no function of ours.

        Raises:
            RankFailedError: a rank failed; all of them have ended.
            JobInterrupted: SIGINT or SIGTERM came; all of them have ended.
        """
        while not self._collect(0.01 if self._answering and self._all_answered() else 0.1):
            if self._signals.received:
                self._interrupt()
            if any(self._has_failed(member) for member in self.members):
                self._conclude()
        if self._signals.received:
            self._interrupt()
        if any(self._has_failed(member) for member in self.members):
            self._conclude()
        return {member.rank: member.answer for member in self.members if member.answer is not None}

    def _has_failed(self, member: Member) -> bool:
        if member.exit_code is None:
            return False
        return member.exit_code != 0 or (self._answering and member.answer is None)

    def _all_answered(self) -> bool:
        return all(member.answer is not None for member in self.members)

    def _finishing(self) -> list[Member]:
        finished = self.directory.finished()
        return [member for member in self._alive() if member.rank in finished]

    def _all_told(self) -> bool:
        return all(self.directory.read(member.rank) is not None for member in self._alive())

    def _alive(self) -> list[Member]:
        return [member for member in self.members if not member.poll()]

    def _collect(self, timeout: float) -> bool:
        """Take in results and exits for at most this many seconds; whether all ranks have ended."""
        pipes = {member.answers: member for member in self.members if member.answers is not None}
        if pipes:
            for pipe in wait(list(pipes), timeout):
                pipes[pipe].read_answer()  # type: ignore[index]: wait() returns what it was given
        elif self._alive():
            time.sleep(timeout)
        over = not self._alive()
        # What a rank sent before it ended is in the pipe by now; whether it failed is asked next, of each that ended.
        for pipe, member in pipes.items():
            while member.exit_code is not None and member.answers is pipe and pipe.poll():
                member.read_answer()
        return over

    def _collect_until(self, deadline: float, stop: Callable[[], object] = bool) -> None:
        while time.monotonic() < deadline and not self._collect(0.02) and not stop():
            pass

    def _conclude(self) -> None:
        self._collect_until(time.monotonic() + COLLECT, lambda: self._signals.received)
        for member in self._alive():
            member.ask()
        self._collect_until(time.monotonic() + ASK, lambda: self._signals.received or self._all_told())
        suspects, late = self._suspects(self.members), self._finishing()
        self._end(signal.SIGTERM, WIND_DOWN)
        if min(suspect.suspicion for suspect in suspects) == _VICTIM:
            # The one that has left them may take longer to end than they do.
            suspects += self._suspects([member for member in late if member.exit_code != -signal.SIGKILL])
        raise self._cause(suspects)

    def _interrupt(self) -> None:
        number, _ = self._signals.received[0]
        saving = number == signal.SIGTERM and any(self.directory.is_saving(member.rank) for member in self.members)
        self._end(number, SAVE if saving else INTERRUPT, self._signals.is_impatient)
        raise JobInterrupted(number, self._signals.previous.get(number))

    def _end(self, number: int, grace: float, stop: Callable[[], object] = bool) -> None:
        finishing = self._finishing()
        for member in self.members:
            if member in finishing:
                continue  # a signal would take the place of its exit code
            # A rank that is still importing has no ``finally`` to run, and ignores Ctrl-C: see ``starting``.
            member.send(number if self.directory.is_listening(member.rank) else signal.SIGKILL)

        def pause(seconds: float) -> bool:
            self._collect_until(time.monotonic() + seconds, stop)
            return bool(stop())

        await_ends(
            lambda: {member.rank: member.process.pid for member in self._alive()},
            lambda rank: self.directory.has_heard(rank, number),
            pause,
            grace,
        )
        for member in self.members:
            member.send(signal.SIGKILL)
        self._collect_until(time.monotonic() + REAP)

    def _suspects(self, members: Iterable[Member]) -> list["_Suspect"]:
        """Those that may have ended the job."""
        suspects = []
        failures = {member.rank: self.directory.read(member.rank) for member in self.members}
        deserted = any(failure is not None and failure.deserted for failure in failures.values())
        for member in members:
            failure, code = failures[member.rank], member.exit_code
            # A rank whose function returned has left early only if another says that it was still needed.
            left_early = code == 0 and failure is None and (member.answer is None or deserted)
            if left_early or self._has_failed(member) or (failure is not None and failure.pending):
                suspicion = _suspicion(failure, left_early)
                moment = failure.time if failure else member.ended
                suspects.append(_Suspect(suspicion, moment, member.rank, 1 if code is None else code, failure))
        return suspects

    def _cause(self, suspects: list["_Suspect"]) -> RankFailedError:
        suspects = sorted(suspects, key=lambda suspect: suspect[:3])
        _, _, rank, code, failure = suspects[0]
        text = failure.text if failure else self.directory.read_crash(rank)
        if not text and code == 0:
            # To leave early is no error by itself: show what it did to the first of the others.
            text = next((other.failure.text for other in suspects if other.failure is not None), "")
        asked = f"rank {rank} of {len(self.members)} {describe_exit(code, bool(failure))}"
        return RankFailedError(asked, rank=rank, exit_code=code, traceback=text, problem=explain_exit(code))


_VICTIM = 3  # the highest suspicion


class _Suspect(NamedTuple):
    """A rank that may have ended the job, with what it ended with; in the order of their names, the cause first."""

    suspicion: int
    moment: float
    rank: int
    code: int
    failure: Failure | None


def _suspicion(failure: Failure | None, left_early: bool) -> int:
    """How far from being the cause, from 0: see the note at the top."""
    if failure is not None and failure.consequence:
        return _VICTIM
    if left_early:
        return 2
    return 1 if failure is not None and failure.pending else 0


def exit_status(code: int) -> int:
    """What a launching process ends with when a rank has ended with this code: as a shell shows it, and never 0."""
    return 128 - code if code < 0 else code or 1


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int, raised: bool = False) -> str:
    """How a rank ended, for a sentence that begins with its name."""
    if code < 0:
        return f"was killed by {signal_name(-code)} (exit code {code})"
    if code == 128 + signal.SIGTERM:
        return f"was ended by SIGTERM (exit code {code})"
    if raised and code == 1:
        return "failed (exit code 1)"
    return f"left with exit code {code}"


def explain_exit(code: int) -> str:
    """What that usually means; empty where there is no more to say."""
    if code == 0:
        return "it ended early, without an error, while the other ranks still needed it"
    if code == -signal.SIGKILL:
        return "fabric did not do it; the system kills this way when memory runs out"
    return ""
