"""The decision to stop: on a signal, at a time limit, or before the end of a SLURM job.

[Note: Stopping] All ranks stop at the same step. Every rank counts its calls of ``should_stop``. A
rank that is asked to stop writes the request to the store. On each rank the thread of the hang
reports checks the store twice a second. If it finds the request, it holds its rank at the next call
and publishes the number of that call. The last rank to publish also publishes the highest number,
the *agreed call*. A rank waits at the call where it is held until the agreed call is known, then
continues up to that call. It waits only for the threads of other ranks, which answer even while
their main threads are blocked, and never in a collective. A rank does not answer before its first
call of ``should_stop``. It does answer when it closes.
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
from fabric.world import read_integer_variable, read_variable

__all__ = ["StopRequest", "exit_preempted", "slurm_deadline", "to_seconds"]

# Seconds for the ranks to agree, in addition to the timeout.
_GRACE = 3.0
# Seconds between two looks at what the thread has found.
_POLL_INTERVAL = 0.02
# Seconds for an answer of SLURM's controller.
_SCONTROL_TIMEOUT = 60.0
# Seconds before the end of a SLURM job, unless the user gives a margin.
_DEFAULT_MARGIN = 60.0
_DURATION = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)"
)


class StopRequest:
    """The decision whether the job saves and stops; see ``[Note: Stopping]``.

    Args:
        runtime: the runtime of this process.
        deadline: when to stop at the latest, on the monotonic clock.
        margin: how long before the end of a SLURM job to stop. None uses the default of
            :func:`slurm_deadline`.
    """

    def __init__(self, runtime: Runtime, deadline: float, margin: timedelta | None) -> None:
        self._runtime = runtime
        self._deadline = deadline
        self._margin = margin
        self._communicator = runtime.communicator
        # None if this is the only rank, or if no thread of a reporter answers: then each call is a
        # collective.
        self._reporter = runtime.reporter
        self._calls = 0
        # The call at which this rank is held. is_due() only counts before that call.
        self._held_call = 0.0
        self._agreed_call = math.inf
        self._is_requested = False
        self._is_listening = False
        # Shared by the thread that answers and the thread that closes.
        self._lock = threading.Lock()
        # The previous handler of each signal.
        self._handlers: dict[int, Any] = {}

    def is_due(self) -> bool:
        """Return whether to stop now. From the first call on, signals are noted and do not raise.

        Raises:
            ConfigurationError: the variables of SLURM contradict each other, or the margin is too
                long.
            UsageError: not all ranks have answered within the timeout.
        """
        self._calls += 1
        return self._calls >= self._held_call and self._decide()

    def _decide(self) -> bool:
        if not self._is_listening:
            self._listen()
        reporter = self._reporter
        if reporter is None:
            is_due = self._is_requested or time.monotonic() >= self._deadline
            return any(self._communicator.gather_objects(is_due))
        with reporter.recorder.record_phase("should_stop"):
            self._wait_for_agreement()
        return self._calls >= self._agreed_call

    def _wait_for_agreement(self) -> None:
        """Wait while the thread of the reports holds this rank at the current call."""
        deadline = time.monotonic() + self._runtime.timeout.total_seconds() + _GRACE
        while self._is_held():
            if time.monotonic() > deadline:
                raise UsageError(
                    "fabric.should_stop",
                    problem="a rank has not read it within the timeout, or hangs",
                )
            time.sleep(_POLL_INTERVAL)

    def _is_held(self) -> bool:
        if self._calls < self._held_call or self._reporter is None:
            return False
        return self._agreed_call == math.inf

    def _listen(self) -> None:
        """Note signals from now on, and have the thread of the reports look for requests."""
        end_of_job = slurm_deadline(os.environ, self._margin, self._runtime.world.rank)
        self._deadline = min(self._deadline, end_of_job)
        self._is_listening = True
        is_main_thread = threading.current_thread() is threading.main_thread()
        for number in stop_signals():
            self._listen_to(number, is_main_thread)
        control = ControlThread.of_this_process()
        if control is not None:
            control.send("saving")
        elif not is_main_thread:
            warnings.warn(
                "should_stop cannot note signals in this thread: read it in the main thread first",
                stacklevel=5,
            )
        if self._reporter is not None:
            self._held_call = math.inf
            self._reporter.polls.append(self._poll)

    def _listen_to(self, number: int, is_main_thread: bool) -> None:
        handler = signal.getsignal(number)
        if isinstance(handler, SignalHandler):
            self._handlers[number] = handler
            handler.listeners.append(self._on_signal)
        elif is_main_thread and (number == signal.SIGTERM or handler is not signal.SIG_IGN):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _poll(self, now: float) -> None:
        """Look for a request to stop. The thread of the reports calls this."""
        with self._lock:
            if self._reporter is None or self._agreed_call < math.inf:
                return
            try:
                self._read_store(self._reporter.store, now)
            except dist.DistError:
                # The process that hosted the store has ended: there are no ranks to agree with.
                self._communicator = LocalCommunicator(self._runtime.device)
                self._reporter = None
                self._held_call = 0
                raise

    def _read_store(self, store: JobStore, now: float) -> None:
        """Hold this rank if a rank is asked to stop, and read the agreed call if it is known."""
        if self._held_call == math.inf:
            is_requested = self._is_requested or now >= self._deadline
            if not is_requested and not store.get_nowait("stop/requested"):
                return
            # Repeated, because the main thread may call is_due at the same time.
            while not self._calls < self._held_call < math.inf:
                self._held_call = self._calls + 1
            store.set("stop/requested", "yes")
            store.publish("stop/held", self._held_call)
            self._answer(store)
        self._agreed_call = float(store.get_nowait("stop/agreed") or math.inf)

    def _answer(self, store: JobStore) -> None:
        """Count this rank as one that has answered. The last rank writes the agreed call."""
        if store.add("stop/answers", 1) == store.size:
            held_calls = store.read("stop/held", range(store.size)).values()
            store.set("stop/agreed", str(max(held_calls, default=0)))

    def close(self) -> None:
        """Restore the handlers, and let the other ranks agree without this one."""
        self._is_listening = False
        for number, previous in self._handlers.items():
            if isinstance(previous, SignalHandler):
                previous.listeners.remove(self._on_signal)
            elif threading.current_thread() is threading.main_thread():
                self._restore_handler(number)
        with self._lock, suppress(dist.DistError):
            if self._reporter is not None and self._held_call == math.inf:
                self._answer(self._reporter.store)
            self._reporter = None

    def _restore_handler(self, number: int) -> bool:
        """Restore the previous handler of a signal, unless the user has installed another one.

        Returns:
            Whether the handler was this object's.
        """
        if signal.getsignal(number) != self._on_signal:
            return False
        # None: the previous handler was installed from C, and Python cannot restore it.
        signal.signal(number, self._handlers.get(number) or signal.SIG_DFL)
        return True

    def _on_signal(self, number: int, frame: Any = None) -> None:
        self._is_requested = True
        # A thread that is not the main thread has closed this object, and could not restore the
        # handler.
        if not self._is_listening and self._restore_handler(number):
            signal.raise_signal(number)
            return
        previous = self._handlers.get(number)
        if callable(previous) and not isinstance(previous, SignalHandler):
            previous(number, frame)


def to_seconds(length: Any) -> Any:
    """Return a length of time in seconds.

    Args:
        length: a timedelta, or a text such as ``"HH:MM:SS"`` or ``"D-HH:MM:SS"``. Any other value
            is returned unchanged.
    """
    if isinstance(length, str):
        duration = _DURATION.fullmatch(length)
        if duration is not None:
            units = duration.groupdict("0")
            length = timedelta(**{unit: int(number) for unit, number in units.items()})
    if isinstance(length, timedelta):
        return length.total_seconds()
    return length


def slurm_deadline(env: Mapping[str, str], margin: timedelta | None = None, rank: int = 0) -> float:
    """Return when to stop before the end of a SLURM job, on the monotonic clock.

    Args:
        env: the environment, such as ``os.environ``.
        margin: how long before the end to stop. None uses a minute, or half of the remaining time
            if that is less.
        rank: the rank of this process. Rank 0 asks ``scontrol`` if the environment has no end time.

    Returns:
        The time, or infinity without a SLURM job or an end time.

    Raises:
        ConfigurationError: the variables contradict each other, or the end is past or nearer than
            the margin.
    """
    job = read_variable(env, "SLURM_JOB_ID")
    end = read_integer_variable(env, "SLURM_JOB_END_TIME")
    if job and end is None and rank == 0:
        end = _ask_for_end(job)
    if job is None or end is None:
        return math.inf
    seconds_left = end - time.time()
    if margin is None:
        margin_seconds = min(_DEFAULT_MARGIN, seconds_left / 2)
    else:
        margin_seconds = margin.total_seconds()
    is_other_job = read_variable(env, "SLURM_JOBID") not in (None, job)
    if is_other_job or seconds_left <= max(margin_seconds, 0):
        raise ConfigurationError(
            f"fabric.should_stop {margin_seconds:g} s before the end of a SLURM job",
            problem=f"SLURM_JOB_ID={job}, SLURM_JOBID={env.get('SLURM_JOBID', job)}, and the end "
            f"is in {seconds_left:.0f} s",
            expected="the variables of one job that has not ended, and a margin shorter than that",
            suggestion="unset SLURM_JOB_ID   # in a shell older than its job",
        )
    return time.monotonic() + seconds_left - margin_seconds


def _ask_for_end(job: str) -> float | None:
    """Return the time at which a SLURM job ends, in seconds since the epoch, or None."""
    try:
        answer = re.search(r"\bEndTime=(?P<time>\S+)", _scontrol("show", "job", "-o", job))
        if answer is None or answer["time"] == "Unknown":
            return None
        return datetime.fromisoformat(answer["time"]).timestamp()
    except (UsageError, ValueError) as error:
        warnings.warn(
            f"the end of job {job} of SLURM is not known, time_limit= says it: {error}",
            stacklevel=6,
        )
        return None


def exit_preempted(close: Callable[[], object], requeue: bool) -> NoReturn:
    """Exit with :data:`PREEMPTED`, the exit code of a job that asks to be started again.

    Args:
        close: called first.
        requeue: whether to put the SLURM job, if there is one, back into the queue.

    Raises:
        UsageError: SLURM did not put the job, or this task of an array, back into the queue.
    """
    close()
    job = read_variable(os.environ, "SLURM_JOB_ID")
    if requeue and job is not None:
        # To scontrol, SLURM_JOB_ID would mean all tasks of an array.
        array = read_variable(os.environ, "SLURM_ARRAY_JOB_ID")
        if array is not None:
            job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        _scontrol("requeue", job)
    raise SystemExit(PREEMPTED)


def _scontrol(*arguments: str) -> str:
    """Run ``scontrol`` and return what it prints.

    Raises:
        UsageError: the command is missing, fails or takes too long.
    """
    command = ["scontrol", *arguments]
    # The user's own format of times may be one that fromisoformat() does not read.
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        result = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        # An OSError has no such attribute.
        stderr = getattr(error, "stderr", None) or ""
        raise UsageError(" ".join(command), problem=f"{error} {stderr}") from error
    return result.stdout
