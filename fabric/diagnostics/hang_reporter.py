"""The thread of each rank that reports hangs: it requests, answers and prints hang reports."""

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from fabric.communicators.call_site import is_user_code
from fabric.diagnostics.deadlocks import (
    CANNOT_GO_ON,
    deadlocked_ranks,
    odd_ranks,
)
from fabric.diagnostics.hang_report import MAX_LISTED_RANKS, compose_report
from fabric.diagnostics.published_states import read_states, reasons_of_ended_ranks
from fabric.diagnostics.rank_observer import RankObserver
from fabric.diagnostics.rank_state import COMPILES, RankState
from fabric.diagnostics.recorder import HEADING, FlightRecorder
from fabric.diagnostics.stacks import exit_reason
from fabric.errors import CollectiveMismatchError, ConfigurationError
from fabric.launchers import rank as launched_rank
from fabric.launchers.rank import ControlThread, Failure
from fabric.store import JobStore

__all__ = ["DEFAULT_WATCHDOG", "HangReporter", "connect_again"]

DEFAULT_WATCHDOG = timedelta(seconds=60)
_LOOKS_PER_THRESHOLD = 16  # how often a rank looks for requests of other ranks
_IDLE_PARTS = 4  # a thread is idle if it has used no CPU for this part of the threshold

# In seconds.
_MAX_POLL_INTERVAL = 0.5
_GRACE_PERIOD = 2.0  # for other ranks to publish their states, in addition to their poll intervals
_PAUSE = 0.02  # between two looks for something that is due
_JOIN_TIMEOUT = 5.0
_LOSS_TIMEOUT = 0.5  # for a lost rank to publish why it ends
_STORE_TIMEOUT = timedelta(seconds=30)  # of store requests that do not wait for other ranks


def connect_again(store: dist.Store, is_required: bool) -> dist.Store | None:
    """Return a second connection to a store, for the thread that makes reports.

    The thread cannot share the first connection, which is blocked while the main thread waits for a
    key.

    Args:
        store: the store of the job, or of a process group of the user.
        is_required: whether to raise if the store cannot be cloned. Otherwise None is returned.

    Raises:
        ConfigurationError: the store cannot be cloned, and a connection is required.
    """
    try:
        clone = store.clone()  # pyright: ignore[reportAttributeAccessIssue] - not in the stub
    except RuntimeError as error:
        if not is_required:
            return None
        raise ConfigurationError(
            "a process group of yours",
            problem="the watchdog needs a second connection to the store of the group, and clone() "
            f"of the store does not work: {error}",
            suggestion="Fabric(watchdog=0)",
        ) from error
    connection = dist.PrefixStore("watchdog", clone)
    connection.set_timeout(_STORE_TIMEOUT)
    return connection


class _ReportRequest(NamedTuple):
    """The request of a report, which is the same for every rank that takes part in the report.

    Attributes:
        number: the number of the report.
        rank: the rank that requests the report.
        user_request: the id of the user's request. Empty if the rank requests the report because it
            waits.
    """

    number: int
    rank: int
    user_request: str

    def to_bytes(self) -> bytes:
        """Return the value of the key ``request/{number}`` in the store."""
        return json.dumps([self.rank, self.user_request]).encode()

    @classmethod
    def from_bytes(cls, number: int, content: bytes) -> "_ReportRequest":
        """Return the request that is stored under the key ``request/{number}``."""
        rank, user_request = json.loads(content)
        return cls(number, rank, user_request)


# [Note: Reports]
# Each rank has a thread that polls several times a minute, with its own connection to the store.
# The reports are numbered from 1. A rank whose flight recorder has not changed for longer than the
# threshold requests the next report, number n, by writing the key `request/n`. Every rank that sees
# the key publishes its state: what the rank is doing, and its stack. Rank 0 composes the report. If
# rank 0 does not, for example because C++ code holds its interpreter, the requesting rank composes
# the report. The composing rank prints the report, and stores the text for ranks whose collective
# times out. If a rank publishes nothing, its stack is read as [Note: Stacks] in `stacks.py` says.
# None of these steps is a collective, since a collective would hang, too. While a rank compiles,
# the report is not printed but requested again.
class HangReporter:
    """A thread that reports when this rank waits, and takes part in the reports of other ranks.

    A rank that waits for longer than the threshold *requests* the next report in the store. Every
    rank then publishes its *state*: what it is doing, and its stack. One rank composes the report
    and prints it. The thread runs from :meth:`start` to :meth:`close`.

    Args:
        store: the store of the job. Its connection is used by nothing else.
        threshold: how long a rank waits before it requests a report that is printed. Zero means
            that no report is printed, unless the user requests one.
        timeout: the timeout of a collective. The error of a timed-out collective gets a report, so
            the report is requested after half of this time at the latest.
        is_asynchronous: whether the device runs collectives in the background. If so, a rank may
            wait for a collective anywhere, not only in a collective or phase.

    Attributes:
        recorder: the flight recorder of this process.
        store: the ``store`` argument.
        polls: functions that the thread calls with the monotonic time whenever it polls. The
            functions may use the store.
    """

    def __init__(
        self,
        store: JobStore,
        threshold: timedelta,
        timeout: timedelta,
        is_asynchronous: bool = False,
    ) -> None:
        """Prepare the thread, and make the flight recorder. :meth:`start` starts the thread."""
        # Receives the user's requests for reports, which the supervisor sends to all of its ranks.
        # None if no launcher of fabric started this process.
        self._control = ControlThread.of_this_process()
        # The ids of requests that need no report from this object: the empty id, which means that
        # there was no request, and the id of a request from before this object was made.
        self._answered_requests = {"", self._user_request()}
        self.store = store
        self.polls: list[Callable[[float], object]] = []
        self._has_watchdog = threshold > timedelta(0)
        # Seconds after which a waiting rank requests a report. Without a watchdog, the report is
        # only for the error of a collective that times out.
        half_timeout = timeout.total_seconds() / 2
        self._threshold = half_timeout
        if self._has_watchdog:
            self._threshold = min(threshold.total_seconds(), half_timeout)
        # Seconds between two looks for requests of other ranks.
        self._look_interval = self._threshold / _LOOKS_PER_THRESHOLD
        # Seconds in which every rank that runs sees a request and publishes its state.
        self._grace_period = _GRACE_PERIOD + 2 * self._look_interval

        # Only the thread of this object changes the fields from here to _store_error.
        self._last_look = monotonic()  # when this rank looked for requests last
        # The number of the latest report for which this rank has published its state.
        self._latest_number = 0
        # The number and the text of the report on the present wait of this rank. The number is None
        # if no report was requested since the wait began, the text if it is not stored yet.
        self._report_number: int | None = None
        self._report: str | None = None
        self._store_error = ""  # why the thread has ended early

        # Set while another thread needs a report, for the error of its collective.
        self._needs_report = threading.Event()
        self._stop = threading.Event()
        self.recorder = FlightRecorder(self)
        self._observer = RankObserver(
            self.recorder,
            size=store.size,
            idle_threshold=self._threshold / _IDLE_PARTS,
            is_asynchronous=is_asynchronous,
        )
        self._thread = threading.Thread(target=self._watch, name="fabric-watchdog", daemon=True)

    def start(self) -> None:
        """Publish where other processes can read this rank's stack, and start the thread."""
        self.store.publish("address", self._observer.stacks.address)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and publish why this rank ends. A second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT)
        # If the thread has found the store gone, nothing can be published.
        if not self._store_error:
            activity = f"makes no further calls: {exit_reason()}"
            state = self._observer.state()._replace(
                activity=activity, is_inside=False, stack="", awaited=None, has_ended=True
            )
            # If the process that hosts the store has ended, no rank can read the state anyway.
            with suppress(dist.DistError):
                self.store.publish("closed", state)
        self._observer.stacks.close()

    def wait_for_report(self) -> str:
        """Return the report on the wait in which this rank is now.

        The flight recorder calls this method for the error of a collective that timed out, in the
        thread of the collective. Meanwhile the thread of this object requests the report, unless a
        rank has requested one, and reads it.

        Returns:
            The text. If the report was printed, only its first lines, up to ``HEADING``.
        """
        self._needs_report.set()
        # One grace period is for the states of the ranks, and another one for the report.
        deadline = monotonic() + 2 * self._grace_period
        while self._report is None and self._thread.is_alive() and monotonic() < deadline:
            sleep(_PAUSE)
        self._needs_report.clear()
        report = self._report
        if not report:
            return f"{HEADING} unknown; {self._store_error or 'there was no report in time'}"
        if self._is_printed(report):
            return _shorten(report)
        return report

    def _is_printed(self, report: str) -> bool:
        """Return whether a report that no user has requested is printed.

        Without a watchdog, reports are only for errors. While a rank compiles, the others wait for
        a good reason.
        """
        return self._has_watchdog and COMPILES not in report

    def explain_lost_rank(self) -> str:
        """Return why other ranks have ended, one line for each.

        The flight recorder calls this method for the error of a collective that has lost another
        rank, in the thread of the collective.

        Returns:
            The lines. Empty if no reason is known within ``_LOSS_TIMEOUT`` seconds.
        """
        deadline = monotonic() + _LOSS_TIMEOUT
        lines: list[str] = []
        # The lost rank may be the one that hosts the store.
        with suppress(dist.DistError):
            while not lines and monotonic() < deadline:
                reasons = reasons_of_ended_ranks(self.store, range(self.store.size))
                lines = [f"  rank {rank}: {reasons[rank]}" for rank in sorted(reasons)]
                sleep(_PAUSE)
        report = self._report or ""
        # A report with this sentence proves a deadlock. Then fabric itself has ended a rank, after
        # the report, and the reason is the report rather than the end of the rank.
        proves_deadlock = CANNOT_GO_ON in report
        if proves_deadlock:
            return _shorten(report)
        return "\n".join(lines[:MAX_LISTED_RANKS])

    def reason_of_end(self, rank: int) -> str:
        """Return why a rank makes no further calls, or an empty text if it may make some.

        Call this method in the thread that waits for the rank.
        """
        # If the process that hosts the store has ended, the call that waits fails by itself.
        with suppress(dist.DistError):
            return reasons_of_ended_ranks(self.store, [rank]).get(rank, "")
        return ""

    def _watch(self) -> None:
        """Poll until :meth:`close` is called or the store is gone. Runs in the thread."""
        poll_interval = min(_MAX_POLL_INTERVAL, self._look_interval)
        try:
            while not self._stop.wait(poll_interval):
                for poll in (self._poll, *self.polls):
                    poll(monotonic())
        except dist.DistError as error:
            self._store_error = f"the store of the job is gone: {error}"

    def _poll(self, now: float) -> None:
        """Request a report if one is due. Otherwise, take part in the report of another rank.

        A report is due if the user has requested one, if a collective has timed out, or if this
        rank has waited longer than the threshold. Runs in the thread.

        Args:
            now: the monotonic time.
        """
        has_progressed = self._observer.update(now)
        if has_progressed:
            # The wait is over. The next wait of this rank needs another report.
            self._report_number = None
            self._report = None
        # Before the wait is looked at: if a rank compiles, the wait counts from now on.
        self._read_report(now)
        user_request = self._user_request()
        if user_request not in self._answered_requests:
            # The next report may be one that another rank has requested because it waits. Then the
            # request stays unanswered, and the next poll makes it again.
            self._request_report(user_request)
            return
        has_waited_long = self._observer.seconds_waited(now) > self._threshold
        is_due = has_waited_long or self._needs_report.is_set()
        is_requested = self._report_number is not None
        if is_due and not is_requested:
            self._request_report()
        elif now - self._last_look > self._look_interval:
            # This reads the store, so it is done less often than polls.
            self._last_look = now
            self._answer_request()

    def _user_request(self) -> str:
        """Return the id of the user's latest request for a report. Empty if there is none."""
        if self._control is None:
            return ""
        return self._control.report_request

    def _read_report(self, now: float) -> None:
        """Read the report on the wait of this rank, if it is stored now.

        If the report proves a deadlock and names this rank, end this process.

        Args:
            now: the monotonic time.
        """
        if self._report_number is None or self._report is not None:
            return
        text = self.store.get_nowait(f"report/{self._report_number}")
        if text is None:
            return
        self._report = text.decode()
        proves_deadlock = CANNOT_GO_ON in self._report
        if proves_deadlock:
            # The rank that has composed the report has chosen the rank that ends.
            ending_rank = self.store.get_nowait(f"end/{self._report_number}")
            if ending_rank == str(self.store.rank).encode():
                self._end_process(self._report)
        if COMPILES in self._report:
            # A rank compiles, which ends by itself, so the report was not printed. The wait counts
            # from now on, so that another report is requested later. Until then, the text stays for
            # wait_for_report().
            self._report_number = None
            self._observer.unchanged_since = now

    def _end_process(self, report: str) -> NoReturn:
        """End this process with an error, since it can never go on. Runs in the thread.

        The main thread waits in C++ code, which nothing in this process can interrupt. So the
        process ends at once, and its ``finally`` blocks do not run.

        Args:
            report: the report, which proves that the process can never go on.
        """
        # In this time the other ranks read the report, for their own errors.
        self._stop.wait(2 * _MAX_POLL_INTERVAL)
        activity = self._observer.activity()
        error = CollectiveMismatchError(
            f"rank {self.store.rank} of {self.store.size}, {activity}",
            # Without "fabric: ", with which the text of a report begins.
            problem=_shorten(report).removeprefix("fabric: "),
            expected="the same calls in the same order on every rank",
            suggestion="no branch on the rank around a collective, a forward or a backward pass, "
            "nor a loop whose length depends on the rank; to find the first call that differs, run "
            "once with FABRIC_CHECK=1",
        )
        failure = Failure.of(error.with_traceback(self._main_traceback()))
        # The supervisor shows only errors that are not secondary, that is, not the consequence of
        # an error on another rank. By its class, this error would count as secondary.
        failure = replace(failure, is_secondary=False)
        if self._control is not None:
            self._control.send("error", failure)
        else:
            print(failure.text, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            # A stream may be closed, or its reader gone. The process ends in any case.
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(failure.exit_code)

    def _main_traceback(self) -> TracebackType | None:
        """Return the present stack of the thread that makes the calls, as a traceback.

        The traceback ends at the user's line, which the error is about. The frames of the launcher,
        which are outside of the user's code, are left out, too.
        """
        frame: FrameType | None = sys._current_frames().get(self.recorder.thread)
        while frame is not None and not is_user_code(frame):
            frame = frame.f_back
        stack: TracebackType | None = None
        while frame is not None and frame.f_code.co_filename != launched_rank.__file__:
            stack = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        return stack

    def _request_report(self, user_request: str = "") -> None:
        """Request the next report, and take part in it. Runs in the thread.

        Every rank takes part in all reports, in the order of their numbers.

        Args:
            user_request: the id of the user's request. Empty, the default, if this rank requests
                the report because it waits.
        """
        number = self._latest_number + 1
        request = _ReportRequest(number, self.store.rank, user_request)
        # If another rank has requested this report before, its request counts.
        content = self.store.set_if_absent(f"request/{number}", request.to_bytes())
        stored_request = _ReportRequest.from_bytes(number, content)
        self._publish_state(stored_request)
        self._compose_and_print(stored_request)

    def _answer_request(self) -> None:
        """Take part in the next report if another rank has requested it. Runs in the thread."""
        number = self._latest_number + 1
        content = self.store.get_nowait(f"request/{number}")
        if content is None:
            return
        request = _ReportRequest.from_bytes(number, content)
        self._publish_state(request)
        if self.store.rank == 0:
            self._compose_and_print(request)

    def _publish_state(self, request: _ReportRequest) -> None:
        """Publish the state of this rank for a report.

        Each rank calls this method for every report, in the order of their numbers.

        Args:
            request: the request of the report.
        """
        self._latest_number = request.number
        state = self._observer.state()
        self.store.publish(f"state/{request.number}", state)
        # If this rank waits, too, the report is also about its wait. Then the report is read in
        # later polls, and this rank requests no report of its own. Half of the threshold is enough,
        # since the ranks of one hang do not begin to wait at the same time.
        has_waited = state.seconds_waited > self._threshold / 2
        is_about_this_rank = has_waited or self._needs_report.is_set()
        if is_about_this_rank:
            self._report_number = request.number
            self._report = None  # _read_report() sets the text, once it is stored
        # The supervisor has sent the user's request to all of its ranks. One report is enough.
        self._answered_requests.add(request.user_request)

    def _compose_and_print(self, request: _ReportRequest) -> None:
        """Compose, store and print a report for which this rank has published its state.

        Rank 0 calls this method for every report, and the requesting rank for its own. Rank 0
        composes the report as a rule, and the requesting rank only if rank 0 does not do it in
        time. The store decides, so that no report is printed twice.

        Args:
            request: the request of the report.
        """
        number = request.number
        is_closed = not self._wait_for_states(number)
        if is_closed:
            return
        this_rank = str(self.store.rank).encode()
        # set_if_absent() returns the value in the store: the first rank that has set the key.
        composing_rank = self.store.set_if_absent(f"composed/{number}", this_rank)
        if composing_rank != this_rank:
            return
        is_requested_by_user = request.user_request != ""
        reason = "a report was requested by a signal" if is_requested_by_user else ""
        states = read_states(self.store, number)
        text = compose_report(states, request.rank, reason)  # empty if that rank does not wait
        is_printed = text != "" and self._is_printed(text)
        # Only a report that is printed may end a rank, since the user has to see why. Then the
        # report is composed once more, with the proof of the deadlock at its beginning.
        if is_printed:
            deadlocked = deadlocked_ranks(states)
            ending_rank = self._choose_rank_to_end(states, deadlocked)
            if ending_rank is not None:
                # Set before the report, with which the chosen rank reads this key.
                self.store.set(f"end/{number}", str(ending_rank))
                text = compose_report(states, request.rank, reason, deadlocked)
        self.store.set(f"report/{number}", text)
        is_shown_to_user = text != "" and is_requested_by_user
        if is_printed or is_shown_to_user:
            print(f"\n{text}", file=sys.stderr, flush=True)
            if self._control is not None:
                # The output of this process may go to a file, as under `fabric run --log-dir`.
                self._control.send("report", text)

    def _choose_rank_to_end(
        self, states: Mapping[int, RankState], deadlocked: Collection[int]
    ) -> int | None:
        """Return the rank that is to end its process, or None if no rank can be chosen.

        Args:
            states: the states of all ranks, by rank.
            deadlocked: the ranks that can never go on. Empty if there are none.
        """
        # A rank that has waited less than this does not read the report; see _publish_state().
        readers = [rank for rank in deadlocked if states[rank].seconds_waited > self._threshold / 2]
        if not readers:
            return None
        # Prefer a rank in the call that fewest ranks make: its traceback shows the mistake.
        odd_readers = set(readers).intersection(odd_ranks(states, deadlocked))
        return max(odd_readers or readers, key=lambda rank: states[rank].seconds_waited)

    def _wait_for_states(self, number: int) -> bool:
        """Wait on rank 0 for the states of all ranks, on other ranks for the report of rank 0.

        The wait ends after the grace period. Then the report is composed without the missing
        states.

        Args:
            number: the number of the report.

        Returns:
            False if :meth:`close` was called during the wait.
        """
        deadline = monotonic() + self._grace_period
        # The wait is for at least one key of each tuple. A rank that has closed its reporter
        # publishes no state for this report.
        awaited_keys: list[tuple[str, ...]] = []
        if self.store.rank == 0:
            for rank in range(self.store.size):
                awaited_keys.append((f"state/{number}/{rank}", f"closed/{rank}"))
        else:
            awaited_keys.append((f"report/{number}",))
            # Rank 0 may compose the report only at the end of its own grace period.
            deadline += self._grace_period / 2
        for keys in awaited_keys:
            while monotonic() < deadline and not self._is_any_set(keys):
                is_closed = self._stop.wait(_PAUSE)
                if is_closed:
                    return False
        return True

    def _is_any_set(self, keys: Sequence[str]) -> bool:
        """Return whether the store has a value for at least one of the keys."""
        return any(self.store.get_nowait(key) is not None for key in keys)


def _shorten(report: str) -> str:
    """Return a printed report without its description of each rank, for the error of a rank."""
    first_lines = report.partition(HEADING)[0]
    return (
        f"{first_lines}{HEADING} in the report on standard error, as a rule that of rank 0; with "
        "`fabric run --log-dir` on the terminal, and in the log of that rank"
    )
