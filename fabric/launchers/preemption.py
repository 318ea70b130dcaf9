"""The decision to stop: on a signal, at a time limit, before a SLURM job ends, or for Ray."""

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
from fabric.diagnostics.hang_reporter import HangReporter
from fabric.environments import RayEnvironment
from fabric.errors import ConfigurationError, UsageError
from fabric.launchers.rank import PREEMPTED, ControlThread, SignalHandler, stop_signals
from fabric.runtime import Runtime
from fabric.store import JobStore
from fabric.world import read_integer_variable, read_variable

__all__ = ["StopRequest", "exit_preempted", "slurm_deadline", "to_seconds"]

# Seconds for the ranks to agree, in addition to the timeout of collectives.
_GRACE = 3.0
# Seconds between two looks of a held main thread at whether the agreed call is known.
_POLL_INTERVAL = 0.02
# Seconds for an answer of SLURM's controller.
_SCONTROL_TIMEOUT = 60.0
# Seconds before the end of a SLURM job, unless the user gives a margin.
_DEFAULT_MARGIN = 60.0
# Stands for a call that is not known, or will not come. No count of calls reaches it.
_NO_CALL = math.inf
_DURATION = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)"
)


# [Note: Stopping]
# All ranks stop at the same step, which they agree on as follows:
#
# 1. Every rank counts its calls of `should_stop`. On each rank, the thread of the hang reports
#    looks at the store twice a second.
# 2. A rank that is asked to stop writes the request to the store.
# 3. A thread that finds the request *holds* its rank at the next call of `should_stop`, and
#    publishes the number of this *held call*.
# 4. The last rank to publish also publishes the highest of the numbers, the *agreed call*.
# 5. The main thread of a rank waits at the held call until the agreed call is known. Then the rank
#    continues up to the agreed call, at which `should_stop` is true.
#
# A rank waits only for the threads of other ranks, which answer even while their main threads are
# blocked, and never in a collective. A rank does not answer before its first call of `should_stop`.
# A rank that closes answers without holding.
class StopRequest:
    """The decision of all ranks to save and stop.

    Once a rank is asked to stop, the *reporter*, the thread of the hang reports, *holds* each rank
    at its next call of ``should_stop``. A held rank waits until all ranks know the *agreed call*:
    the number of the call at which ``should_stop`` is true on all of them.

    Args:
        runtime: the runtime of this process.
        deadline: when to stop at the latest, on the monotonic clock.
        margin: how long before the end of a SLURM job to stop. None uses the default of
            :func:`slurm_deadline`.
    """

    def __init__(self, runtime: Runtime, deadline: float, margin: timedelta | None) -> None:
        """Prepare the count. Signals are noted only from the first call of :meth:`is_due` on."""
        self._runtime = runtime
        self._deadline = deadline
        self._margin = margin
        self._communicator = runtime.communicator
        # The owner of the thread that looks at the store. None if there is no such thread or this
        # is the only rank: then each call of is_due() is a collective.
        self._reporter = runtime.reporter
        self._call_count = 0  # of is_due()
        # The number of the call at which this rank is held. Before that call, is_due() only counts.
        # - 0: is_due() calls _decide() every time. The value is 0 before the first call, and stays
        #   0 if there is no reporter.
        # - _NO_CALL: no rank is asked to stop.
        self._held_call = 0.0
        # True from the first call of is_due() until this rank answers. A rank answers once, after
        # any rank is asked to stop. The ranks have agreed when all of them have answered.
        self._has_to_answer = False
        # The call at which all ranks stop. _NO_CALL until it is known.
        self._agreed_call = _NO_CALL
        self._is_requested = False  # whether a signal has asked this rank to stop
        self._reads_ray = False  # whether Ray tells this rank of preemptions
        self._is_listening = False  # whether signals are noted: from the first call to close()
        # Guards the answer of this rank, which the reporter's thread or close() gives.
        self._answer_lock = threading.Lock()
        self._previous_handlers: dict[int, Any] = {}  # by signal

    def is_due(self) -> bool:
        """Return whether to stop now. From the first call on, signals are noted and do not raise.

        ``fabric.should_stop`` calls this method. All ranks must call it equally often, since they
        agree on the number of the call at which it is True.

        Raises:
            ConfigurationError: the variables of SLURM contradict each other, or the margin is too
                long.
            UsageError: not all ranks have answered within the timeout.
        """
        self._call_count += 1
        # Nearly every call returns here, because this rank is not held. The first call does not,
        # since _held_call is still 0.
        if self._call_count < self._held_call:
            return False
        return self._decide()

    def _decide(self) -> bool:
        """Return whether this is the call of :meth:`is_due` at which all ranks stop.

        With a reporter, :meth:`is_due` calls this method at its first call, and again once a rank
        is asked to stop, from the held call on. Without a reporter, :meth:`is_due` calls this
        method every time, and this method is collective.
        """
        if not self._is_listening:
            self._listen()
        reporter = self._reporter
        if reporter is None:
            # Collective. All ranks stop if any rank is asked to stop.
            return any(self._communicator.gather_objects(self._is_asked(time.monotonic())))
        # A hang report shows the phase while this rank waits.
        with reporter.recorder.record_phase("should_stop"):
            self._wait_for_agreement()
        return self._call_count >= self._agreed_call

    def _is_asked(self, now: float) -> bool:
        """Return whether a signal, a time limit or Ray has asked this rank to stop.

        ``now`` is the current time on the monotonic clock.
        """
        if self._is_requested or now >= self._deadline:
            return True
        return self._reads_ray and _has_ray_preemption()

    def is_preempted_by_ray(self) -> bool:
        """Return whether Ray is about to take a machine of this job away. Collective under Ray."""
        if not self._reads_ray:
            return False
        # Ray does not tell all workers at the same time, so the ranks tell each other.
        return any(self._communicator.gather_objects(_has_ray_preemption()))

    def _wait_for_agreement(self) -> None:
        """Wait in the main thread until the agreed call is known, if this rank is held.

        The reporter's thread ends the wait when it sets ``_agreed_call``.

        Raises:
            UsageError: not all ranks have answered within the timeout.
        """
        timeout = self._runtime.timeout.total_seconds() + _GRACE
        start = time.monotonic()
        while self._is_held():
            if time.monotonic() - start > timeout:
                raise UsageError(
                    "fabric.should_stop",
                    problem="a rank has not read it within the timeout, or hangs",
                )
            time.sleep(_POLL_INTERVAL)

    def _is_held(self) -> bool:
        """Return whether this rank has reached the held call, and the agreed call is not known."""
        # _poll() sets _reporter to None when the process that hosts the store has ended. Then no
        # rank can answer, and this rank is not held any longer.
        if self._call_count < self._held_call or self._reporter is None:
            return False
        return self._agreed_call == _NO_CALL

    def _listen(self) -> None:
        """Note signals from now on, and have the reporter's thread look for requests to stop.

        The first call of :meth:`is_due` calls this method. :meth:`close` undoes it.
        """
        deadline_of_slurm = slurm_deadline(os.environ, self._margin, self._runtime.world.rank)
        self._deadline = min(self._deadline, deadline_of_slurm)
        self._is_listening = True
        is_main_thread = threading.current_thread() is threading.main_thread()
        for number in stop_signals():
            self._listen_to(number, is_main_thread)
        self._reads_ray = _can_read_ray()
        # None if fabric did not start this process.
        control_thread = ControlThread.of_this_process()
        if control_thread is not None:
            # Tells the supervisor that this rank saves on a signal. From now on, the supervisor
            # gives the rank time to save before it ends the rank.
            control_thread.send("saving")
        elif not is_main_thread and not self._reads_ray:
            warnings.warn(
                "should_stop cannot note signals in this thread: read it in the main thread first",
                stacklevel=5,  # the line that reads should_stop
            )
        if self._reporter is not None:
            self._poll_in(self._reporter)

    def _poll_in(self, reporter: HangReporter) -> None:
        """Have the reporter's thread look for requests to stop, so that :meth:`is_due` need not.

        :meth:`is_due` returns False at once while the count of its calls is below ``_held_call``.
        So from now on :meth:`is_due` only counts, until a rank is asked to stop. Then :meth:`_poll`
        sets ``_held_call`` to the next call, in which the main thread waits for the other ranks.
        """
        self._held_call = _NO_CALL
        self._has_to_answer = True  # the other ranks wait for an answer of this rank
        # Must be last: the reporter's thread calls each function of this list twice a second, and
        # _poll() reads and changes both values.
        reporter.polls.append(self._poll)

    def _listen_to(self, number: int, is_main_thread: bool) -> None:
        """Have the signal ``number`` call :meth:`_on_signal` from now on.

        In a rank that fabric started, a SignalHandler calls listeners, which any thread may add. In
        another process, only the main thread can install a handler.
        """
        handler = signal.getsignal(number)
        if isinstance(handler, SignalHandler):
            self._previous_handlers[number] = handler
            handler.listeners.append(self._on_signal)
            return
        # Ignored signals stay ignored, for example SIGHUP under nohup. SIGTERM is always noted.
        should_note = number == signal.SIGTERM or handler is not signal.SIG_IGN
        if is_main_thread and should_note:
            self._previous_handlers[number] = signal.signal(number, self._on_signal)

    def _poll(self, now: float) -> None:
        """Look for a request to stop. The reporter's thread calls this method twice a second.

        Args:
            now: the current time on the monotonic clock.

        Raises:
            DistError: the process that hosted the store has ended. The error ends the reporter's
                thread.
        """
        with self._answer_lock:
            is_agreed = self._agreed_call != _NO_CALL
            if self._reporter is None or is_agreed:
                return
            try:
                self._read_store(self._reporter.store, now)
            except dist.DistError:
                # Without the store, this rank cannot agree with others. From now on it decides
                # alone, in each call of is_due().
                self._communicator = LocalCommunicator(self._runtime.device)
                self._reporter = None
                self._held_call = 0  # no count is below 0, so is_due() decides in each call
                raise

    # See [Note: Stopping].
    def _read_store(self, store: JobStore, now: float) -> None:
        """Hold this rank once any rank is asked to stop. From then on, read the agreed call.

        A held rank waits in its next call of :meth:`is_due` until the agreed call is known: the
        number of the call at which all ranks stop. The reporter's thread calls this method and has
        the ``_answer_lock``.
        """
        # Reset by _hold(), which answers. Afterwards only the agreed call is missing.
        if self._has_to_answer:
            is_any_asked = self._is_asked(now) or store.get_nowait("stop/requested") is not None
            if not is_any_asked:
                return
            self._hold(store)
        # None until all ranks have answered.
        agreed_call = store.get_nowait("stop/agreed")
        if agreed_call is not None:
            self._agreed_call = float(agreed_call)  # a float, as _NO_CALL is

    def _hold(self, store: JobStore) -> None:
        """Hold this rank at its next call of :meth:`is_due`, and answer the other ranks.

        The main thread waits in the held call until the ranks have agreed on the call at which all
        of them stop. The reporter's thread calls this method and has the ``_answer_lock``.
        """
        # The main thread may make the next call just before _held_call is assigned, and then does
        # not wait in it. So a later call is chosen until the main thread has not made it yet.
        self._held_call = self._call_count + 1
        while self._call_count >= self._held_call:
            self._held_call = self._call_count + 1
        # When the other ranks read this key, they are held, too.
        store.set("stop/requested", "yes")
        # Published before the answer, since the last rank to answer reads the held calls of all.
        store.publish("stop/held", self._held_call)
        self._answer(store)

    def _answer(self, store: JobStore) -> None:
        """Count this rank as one that has answered. The last rank to answer writes the agreed call.

        Called once, while ``_has_to_answer`` is true. The caller has the ``_answer_lock``.
        """
        self._has_to_answer = False
        is_last_answer = store.add("stop/answers", 1) == store.size
        if is_last_answer:
            # A rank that was closed before it was held has published no call. If there is no call
            # at all, all ranks are closed, and the value does not matter. No rank has passed the
            # largest call, since each rank waits in its own held call.
            held_calls = store.read("stop/held", range(store.size)).values()
            store.set("stop/agreed", str(max(held_calls, default=0)))

    def close(self) -> None:
        """Restore the signal handlers, and let the other ranks agree without this one.

        Call this method once, in any thread.
        """
        self._stop_listening()
        # After a DistError, the store has ended, and no rank waits for the answer of this one.
        with self._answer_lock, suppress(dist.DistError):
            if self._reporter is not None and self._has_to_answer:
                self._answer(self._reporter.store)
            self._reporter = None  # ends the wait of a held rank, and _poll() does nothing

    def _stop_listening(self) -> None:
        """Restore the previous signal handlers, as far as this thread can.

        Only the main thread can restore handlers. If this is another thread, :meth:`_on_signal`
        restores the handler of a signal when the signal arrives.
        """
        self._is_listening = False
        for number, previous_handler in self._previous_handlers.items():
            if isinstance(previous_handler, SignalHandler):
                previous_handler.listeners.remove(self._on_signal)
            elif threading.current_thread() is threading.main_thread():
                self._restore_handler(number)

    def _restore_handler(self, number: int) -> bool:
        """Restore the previous handler of a signal, unless the user has installed another one.

        Call this method in the main thread.

        Args:
            number: the signal.

        Returns:
            Whether the handler was :meth:`_on_signal`, and has been replaced.
        """
        # Compared by != and not by `is not`: every access to a method makes a new object.
        if signal.getsignal(number) != self._on_signal:
            return False
        # The previous handler is None if it was installed from C. Python cannot restore such a
        # handler, and so the default action takes its place.
        signal.signal(number, self._previous_handlers.get(number) or signal.SIG_DFL)
        return True

    def _on_signal(self, number: int, frame: Any = None) -> None:
        """Note that this rank is asked to stop.

        In a rank that fabric started, the SignalHandler of the rank calls this method, without a
        frame. In any other process, this method is itself the handler of the signal ``number``.
        """
        self._is_requested = True
        # If close() ran in a thread that could not restore the previous handler, the handler is
        # restored now and gets the signal.
        if not self._is_listening and self._restore_handler(number):
            signal.raise_signal(number)
            return
        # A handler of the user is called as well. A SignalHandler, fabric's own handler in a rank,
        # is not called: it has called this method.
        previous_handler = self._previous_handlers.get(number)
        if callable(previous_handler) and not isinstance(previous_handler, SignalHandler):
            previous_handler(number, frame)


def to_seconds(length: Any) -> Any:
    """Return a length of time in seconds.

    Args:
        length: a timedelta, or a text like ``"01:30:00"`` or ``"2-12:00:00"``, which is two days
            and a half. Any other value is returned unchanged, for the caller to check.
    """
    if isinstance(length, str):
        duration = _DURATION.fullmatch(length)
        if duration is not None:
            numbers = duration.groupdict(default="0")  # the days may be left out
            # The groups have the names of the arguments of timedelta.
            length = timedelta(**{unit: int(number) for unit, number in numbers.items()})
    if isinstance(length, timedelta):
        return length.total_seconds()
    return length


def slurm_deadline(env: Mapping[str, str], margin: timedelta | None = None, rank: int = 0) -> float:
    """Return when to stop before the end of a SLURM job, on the monotonic clock.

    Args:
        env: the environment, such as ``os.environ``.
        margin: how long before the end to stop. None uses a minute, or half of the remaining time
            if half of it is less than a minute.
        rank: the rank of this process. If the environment has no end time, rank 0 asks
            ``scontrol``. The other ranks return infinity, since they stop together with rank 0.

    Returns:
        The time, or infinity without a SLURM job or an end time.

    Raises:
        ConfigurationError: the variables contradict each other, or the end is past or nearer than
            the margin.
    """
    job = read_variable(env, "SLURM_JOB_ID")
    end = read_integer_variable(env, "SLURM_JOB_END_TIME")  # seconds since the epoch
    if job is not None and end is None and rank == 0:
        end = _ask_for_end(job)
    if job is None or end is None:
        return math.inf
    seconds_left = end - time.time()
    if margin is None:
        margin_seconds = min(_DEFAULT_MARGIN, seconds_left / 2)
    else:
        margin_seconds = margin.total_seconds()
    # SLURM sets both variables to the same job. They differ only if the shell has kept a variable
    # of an earlier job. Then the end time may be that of the earlier job, too.
    is_other_job = read_variable(env, "SLURM_JOBID") not in (None, job)
    has_ended = seconds_left <= 0
    if is_other_job or has_ended or seconds_left <= margin_seconds:
        raise ConfigurationError(
            f"fabric.should_stop {margin_seconds:g} s before the end of a SLURM job",
            problem=f"SLURM_JOB_ID={job}, SLURM_JOBID={env.get('SLURM_JOBID', job)}, and the end "
            f"is in {seconds_left:.0f} s",
            expected="the variables of one job that has not ended, and a margin that is shorter "
            "than the time to its end",
            suggestion="unset SLURM_JOB_ID   # in a shell older than its job",
        )
    return time.monotonic() + seconds_left - margin_seconds


def _ask_for_end(job: str) -> float | None:
    """Return the time at which a SLURM job ends, in seconds since the epoch.

    Return None if SLURM does not know the time. If SLURM cannot be asked, warn and return None.
    """
    try:
        description = _scontrol("show", "job", "-o", job)
        end = re.search(r"\bEndTime=(?P<time>\S+)", description)
        if end is None or end["time"] == "Unknown":
            return None
        return datetime.fromisoformat(end["time"]).timestamp()
    except (UsageError, ValueError) as error:
        warnings.warn(
            f"the end of job {job} of SLURM is not known; pass time_limit= instead: {error}",
            stacklevel=7,  # the line that reads should_stop
        )
        return None


def _can_read_ray() -> bool:
    """Return whether this process is a worker of Ray Train, and Ray tells workers of preemptions.

    Warn if this release of Ray does not have the private value that ``_has_ray_preemption`` reads.
    """
    if RayEnvironment().detect(os.environ) is None:
        return False
    try:
        _has_ray_preemption()  # called only for its errors
    except (ImportError, AttributeError, RuntimeError) as error:
        warnings.warn(
            "should_stop follows the time limit only, and not the preemptions of Ray, which this "
            f"release of Ray does not tell: {type(error).__name__}: {error}",
            stacklevel=6,  # the line that reads should_stop
        )
        return False
    return True


def _has_ray_preemption() -> bool:
    """Return whether Ray has told this worker that a machine of the job will be taken away.

    ``ray.train.get_preemption_info`` is not used: all workers would have to call it together, and
    each call would send a message. This function reads the private value of this worker instead.
    Seen to work in Ray 2.60.

    Raises:
        ImportError, AttributeError, RuntimeError: this release of Ray has no such value.
    """
    from ray.train.v2._internal.execution.context import (  # pyright: ignore[reportMissingImports]
        get_train_context,
    )

    return get_train_context().preemption_context.preemption_info is not None


def exit_preempted(close: Callable[[], object], requeue: bool, waits_for_ray: bool) -> NoReturn:
    """Exit with :data:`PREEMPTED`, the exit code of a job that asks to be started again.

    Args:
        close: called first. It finishes what this process has begun, such as saves.
        requeue: whether to put the SLURM job, or this task of an array, back into the queue. If
            SLURM refuses to, there is a warning.
        waits_for_ray: whether to wait until Ray ends this process, instead of exiting.

    Raises:
        SystemExit: always.
    """
    close()
    if waits_for_ray:
        # Ray would count an exit as one of the failures that max_failures allows. Instead, this
        # process waits until Ray ends all workers and starts them again.
        threading.Event().wait()  # never returns, since nobody sets the event
    job = read_variable(os.environ, "SLURM_JOB_ID")
    if requeue and job is not None:
        # In a job array, scontrol would requeue all tasks for SLURM_JOB_ID. A name such as "17_3"
        # means task 3 of array 17 only.
        array = read_variable(os.environ, "SLURM_ARRAY_JOB_ID")
        if array is not None:
            task = os.environ["SLURM_ARRAY_TASK_ID"]
            job = f"{array}_{task}"
        try:
            _scontrol("requeue", job)
        except UsageError as error:
            # Only a warning: after an error, `fabric run --max-restarts` would start the ranks
            # again in the last seconds of the job.
            warnings.warn(
                f"the job ends with exit code {PREEMPTED}, but is not back in the queue: {error}",
                stacklevel=3,  # the line that calls fabric.exit_preempted
            )
    raise SystemExit(PREEMPTED)


def _scontrol(*arguments: str) -> str:
    """Run ``scontrol`` and return what it prints.

    Raises:
        UsageError: the command is missing, fails or takes too long.
    """
    command = ["scontrol", *arguments]
    # The user may have chosen another format of times, which fromisoformat() does not read.
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
        # An OSError has no stderr, and a command that took too long may have None.
        stderr = getattr(error, "stderr", None) or ""
        raise UsageError(" ".join(command), problem=f"{error} {stderr}") from error
    return result.stdout
