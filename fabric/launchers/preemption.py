"""Ends the loop at the same step on all ranks: on a signal, at a time limit, or before the end of a SLURM job.

[Note: Stopping] Every rank counts its calls of ``should_stop``. A rank that is asked to stop writes that to the store.
On each rank the thread of the hang reports checks the store twice a second. It then holds its rank at the next call and
publishes the number of that call. The last rank to publish also publishes the highest number, the *agreed call*. A rank
waits at the call where it is held until the agreed call is known, then continues up to that call. It waits only for the
threads of other ranks, which answer even while their main threads are blocked, and never in a collective. A rank does
not answer before its first call of ``should_stop``; it does when it closes.
"""

import math
import os
import re
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from fabric.communicators import LocalCommunicator
from fabric.errors import ConfigurationError, UsageError
from fabric.launchers.rank import PREEMPTED, ControlThread, SignalHandler, stop_signals
from fabric.runtime import Runtime
from fabric.store import JobStore
from fabric.world import read, read_integer

__all__ = ["StopRequest", "exit_preempted", "slurm_deadline", "to_seconds"]

# Seconds for ranks to agree, beside the timeout; between looks at what the thread has found; for an answer of SLURM's
# controller; before the end of a SLURM job, unless the user says how many.
_GRACE = 3.0
_PAUSE = 0.02
_SCONTROL = 60.0
_MARGIN = 60.0
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)")


class StopRequest:
    """The decision whether the job saves and stops; see ``[Note: Stopping]``.

    Args:
        runtime: of this process.
        deadline: when to stop at the latest, on the monotonic clock.
        margin: how long before the end of a SLURM job to stop.
    """

    def __init__(self, runtime: Runtime, deadline: float, margin: timedelta | None) -> None:
        self._runtime = runtime
        self._deadline = deadline
        self._margin = margin
        # Without a thread that answers, each call is a collective, or this is the only rank.
        self._communicator = runtime.communicator
        self._reporter = runtime.reporter
        # is_due does more than count from call _held_at on
        self._calls = 0
        self._held_at = 0.0
        self._agreed = math.inf
        self._is_requested = False
        self._listens = False
        self._lock = threading.Lock()  # shared by the thread that answers and the one that closes
        self._handlers: dict[int, Any] = {}

    def is_due(self) -> bool:
        """Whether to stop now. From the first call on, signals are noted instead of raising.

        Raises:
            ConfigurationError: the variables of SLURM contradict each other, or the margin is too long.
            UsageError: not all ranks have answered within the timeout.
        """
        self._calls += 1
        return self._calls >= self._held_at and self._decide()

    def _decide(self) -> bool:
        if not self._listens:
            self._listen()
        until = time.monotonic() + self._runtime.timeout.total_seconds() + _GRACE
        reporter = self._reporter
        if reporter is None:
            return any(
                self._communicator.gather_objects(
                    self._is_requested or time.monotonic() >= self._deadline
                )
            )
        with reporter.recorder.record_phase("should_stop"):
            while (
                self._calls >= self._held_at
                and self._agreed == math.inf
                and self._reporter is not None
            ):
                if time.monotonic() > until:
                    raise UsageError(
                        "fabric.should_stop", "a rank has not read it within the timeout, or hangs"
                    )
                time.sleep(_PAUSE)
        return self._calls >= self._agreed

    def _listen(self) -> None:
        self._deadline = min(
            self._deadline, slurm_deadline(os.environ, self._margin, self._runtime.world.rank)
        )
        self._listens = True
        is_main = threading.current_thread() is threading.main_thread()
        control = ControlThread.of_this_process()
        for number in stop_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, SignalHandler):
                self._handlers[number] = handler
                handler.listeners.append(self._note)
            elif is_main and (number == signal.SIGTERM or handler is not signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._note)
        if control is not None:
            control.send("saving")
        elif not is_main:
            warnings.warn(
                "should_stop cannot note signals in this thread: read it in the main one first",
                stacklevel=5,
            )
        if self._reporter is not None:
            self._held_at = math.inf
            self._reporter.polls.append(self._poll)

    def _poll(self, now: float) -> None:
        with self._lock:
            if self._reporter is None or self._agreed < math.inf:
                return
            try:
                self._look(self._reporter.store, now)
            except dist.DistError:
                # The process that hosted the store has ended: there are no ranks to agree with.
                self._communicator = LocalCommunicator(self._runtime.device)
                self._reporter = None
                self._held_at = 0
                raise

    def _look(self, store: JobStore, now: float) -> None:
        if self._held_at == math.inf:
            if not (
                self._is_requested or now >= self._deadline or store.get_nowait("stop/requested")
            ):
                return
            while (
                not self._calls < self._held_at < math.inf
            ):  # the main thread may call is_due meanwhile
                self._held_at = self._calls + 1
            store.set("stop/requested", "yes")
            store.publish("stop/held", self._held_at)
            self._answer(store)
        self._agreed = float(store.get_nowait("stop/agreed") or math.inf)

    def _answer(self, store: JobStore) -> None:
        if store.add("stop/answers", 1) == store.size:
            held = store.read("stop/held", range(store.size)).values()
            store.set("stop/agreed", str(max(held, default=0)))

    def close(self) -> None:
        """Restore the handlers, and let the other ranks agree without this one."""
        self._listens = False
        for number, previous in self._handlers.items():
            if isinstance(previous, SignalHandler):
                previous.listeners.remove(self._note)
            elif (
                signal.getsignal(number) == self._note
                and threading.current_thread() is threading.main_thread()
            ):
                # None: installed from C, which Python cannot put back.
                signal.signal(number, previous or signal.SIG_DFL)
        with self._lock, suppress(dist.DistError):
            if self._reporter is not None and self._held_at == math.inf:
                self._answer(self._reporter.store)
            self._reporter = None

    def _note(self, number: int, frame: Any = None) -> None:
        self._is_requested = True
        previous = self._handlers.get(number)
        if (
            not self._listens and signal.getsignal(number) == self._note
        ):  # closed by a thread that is not the main one
            signal.signal(number, previous or signal.SIG_DFL)
            signal.raise_signal(number)
        elif callable(previous) and not isinstance(previous, SignalHandler):
            previous(number, frame)


def to_seconds(length: Any) -> Any:
    """A timedelta, or a text such as ``"HH:MM:SS"`` or ``"D-HH:MM:SS"``, in seconds; anything else as it is."""
    if isinstance(length, str) and (parts := _CLOCK.fullmatch(length)):
        length = timedelta(**{unit: int(number) for unit, number in parts.groupdict("0").items()})
    return length.total_seconds() if isinstance(length, timedelta) else length


def slurm_deadline(env: Mapping[str, str], margin: timedelta | None = None, rank: int = 0) -> float:
    """When to stop before the end of a SLURM job, on the monotonic clock; infinity without a job or an end time.

    Args:
        env: the environment, such as ``os.environ``.
        margin: how long before the end; None: a minute, or half of the remaining time if that is less.
        rank: of this process; rank 0 asks ``scontrol`` if the environment has no end time.

    Raises:
        ConfigurationError: the variables contradict each other, or the end is past or nearer than the margin.
    """
    job = read(env, "SLURM_JOB_ID")
    end = read_integer(env, "SLURM_JOB_END_TIME")
    if job and end is None and rank == 0:
        end = _ask_for_end(job)
    if job is None or end is None:
        return math.inf
    left = end - time.time()
    before = min(_MARGIN, left / 2) if margin is None else margin.total_seconds()
    if left <= max(before, 0) or read(env, "SLURM_JOBID") not in (None, job):
        request = f"fabric.should_stop {before:g} s before the end of a SLURM job"
        problem = f"SLURM_JOB_ID={job}, SLURM_JOBID={env.get('SLURM_JOBID', job)}, and the end is in {left:.0f} s"
        expected = "the variables of one job that has not ended, and a margin shorter than that"
        raise ConfigurationError(
            request, problem, expected, "unset SLURM_JOB_ID   # in a shell older than its job"
        )
    return time.monotonic() + left - before


def _ask_for_end(job: str) -> float | None:
    try:
        shown = re.search(r"\bEndTime=(\S+)", _scontrol("show", "job", "-o", job))
        return (
            None
            if shown is None or shown[1] == "Unknown"
            else datetime.fromisoformat(shown[1]).timestamp()
        )
    except (UsageError, ValueError) as error:
        warnings.warn(
            f"the end of job {job} of SLURM is not known, time_limit= says it: {error}",
            stacklevel=6,
        )
        return None


def exit_preempted(close: Callable[[], object], requeue: bool) -> NoReturn:
    """Call ``close``, requeue the SLURM job, if any, with ``requeue``, and exit with :data:`PREEMPTED`.

    Raises:
        UsageError: SLURM did not put the job, or this task of an array, back into the queue.
    """
    close()
    if requeue and (job := read(os.environ, "SLURM_JOB_ID")):
        array = read(
            os.environ, "SLURM_ARRAY_JOB_ID"
        )  # not SLURM_JOB_ID; to scontrol it means all tasks
        _scontrol("requeue", f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job)
    raise SystemExit(PREEMPTED)


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_SCONTROL, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            " ".join(command), f"{error} {getattr(error, 'stderr', None) or ''}"
        ) from error
