"""Hang reports: which rank waits, for which ranks, and what every rank is doing.

[Note: Reports] Each rank has a thread that polls a few times a minute, with its own connection to
the store. A rank whose flight recorder has not changed for longer than the threshold requests
report number n by a key in the store. Every rank that sees the key publishes its state: what the
rank is doing, and its stack. Rank 0 composes the report. If C++ code holds the interpreter of rank
0, the requesting rank composes it. The composing rank prints the report, and stores the text for
ranks whose collective times out. If a rank publishes nothing, its stack is read as the note in
``stacks.py`` says. None of this is a collective. While a rank compiles, the report is not printed
but requested again.
"""

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import NamedTuple

import torch.distributed as dist

from fabric._torch import is_compiling
from fabric.diagnostics.call_site import user_call
from fabric.diagnostics.recorder import HEADING, Entry, FlightRecorder, ranks_in_words
from fabric.diagnostics.stacks import StackAddress, Stacks, exit_reason, read_stack
from fabric.errors import ConfigurationError
from fabric.launchers.rank import ControlThread
from fabric.store import JobStore

__all__ = [
    "DEFAULT_WATCHDOG",
    "HangReporter",
    "RankState",
    "announce_wait",
    "compose_report",
    "connect_again",
]

DEFAULT_WATCHDOG = timedelta(seconds=60)
_POLLS = 16  # of the store, per threshold
_COMPILES = "torch.compile is at work"

# In seconds.
_LONGEST_TICK = 0.5
_GRACE_PERIOD = 2.0
_PAUSE = 0.02
_JOIN = 5.0
_STORE_TIMEOUT = timedelta(seconds=30)  # of store requests that do not wait for other ranks

# How many ranks a report lists, and how many of them with their stacks.
_MOST_LINES = 16
_MOST_STACKS = 4


class RankState(NamedTuple):
    """The state that a rank publishes.

    Attributes:
        activity: what the rank is doing and where, as text.
        history: the step of the rank and what it did before, as text.
        is_inside: whether the rank is in a collective, or in a phase in which torch issues some.
        seconds_waited: seconds since the flight recorder of the rank changed.
        key: the key in ``counts`` of what the rank is in, or started last.
        members: the ranks that must make the same call. Empty for all ranks.
        counts: how many calls of each kind the rank has started. See
            :class:`fabric.diagnostics.recorder.FlightRecorder`.
        stack: the stack of the rank, innermost frame first.
    """

    activity: str
    history: str = ""
    is_inside: bool = False
    seconds_waited: float = 0.0
    key: str = ""
    members: Sequence[int] = ()
    counts: Mapping[str, int] = {}
    stack: str = ""


def compose_report(states: Mapping[int, RankState], requester: int, reason: str = "") -> str:
    """Compose a report.

    Args:
        states: the states of all ranks.
        requester: the rank that waits.
        reason: the reason for the report, unless the requester waits.

    Returns:
        The text. Empty if the requester is not waiting and no rank is behind it.
    """
    if reason:
        requester = _longest_waiting(states)
    waiting = states[requester]
    members = waiting.members or tuple(states)
    missing = _missing_ranks(states, waiting, members)
    if not reason and not waiting.is_inside and not missing:
        return ""
    if not reason:
        seconds = f"{round(waiting.seconds_waited, 1):g} s"
        reason = f"rank {requester} of {len(states)} has waited {seconds} {waiting.activity}"
        most_stacks = _MOST_STACKS
    else:
        most_stacks = len(states)
    lines = [f"fabric: {reason}"]
    if missing:
        lines += _describe_missing(states, waiting, members, missing)
    elif waiting.is_inside:
        lines.append(
            "every rank has reached it: it is slow, or the ranks wait for each other inside of it"
        )
    lines.append(HEADING)
    lines += _describe_ranks(states, requester, missing, most_stacks)
    return "\n  ".join(lines)


def _longest_waiting(states: Mapping[int, RankState]) -> int:
    """Return the rank that waits longest, first among those in a collective."""

    def wait(rank: int) -> tuple[bool, float]:
        return states[rank].is_inside, states[rank].seconds_waited

    return max(states, key=wait)


def _missing_ranks(
    states: Mapping[int, RankState], waiting: RankState, members: Sequence[int]
) -> list[int]:
    """Return the members that have not started the call in which a rank waits."""
    number = waiting.counts.get(waiting.key, 0)
    return [rank for rank in members if states[rank].counts.get(waiting.key, 0) < number]


def _describe_missing(
    states: Mapping[int, RankState],
    waiting: RankState,
    members: Sequence[int],
    missing: Sequence[int],
) -> list[str]:
    """Return lines that name the ranks that reached a call and those that did not."""
    reached = sorted(set(members) - set(missing))
    lines = [
        f"reached by: {ranks_in_words(reached)}",
        f"not reached by: {ranks_in_words(missing)}",
    ]
    is_message = ">" in waiting.key
    is_any_running = any(states[rank].stack for rank in missing)
    if is_any_running and not is_message:
        lines.append(
            f"it is collective: {ranks_in_words(members)} have to make it, outside of any branch "
            "on the rank"
        )
    return lines


def _describe_ranks(
    states: Mapping[int, RankState], requester: int, missing: Sequence[int], most_stacks: int
) -> list[str]:
    """Return lines that say what ranks are doing, the missing ranks first of all with stacks."""

    def order(rank: int) -> tuple[bool, bool, int]:
        return rank not in missing, rank != requester, rank

    listed = sorted(states, key=order)[:_MOST_LINES]
    with_stack = (missing or listed)[:most_stacks]
    lines = []
    for rank in sorted(listed):
        state = states[rank]
        lines.append(f"  rank {rank}: {state.activity}{state.history}")
        if rank in with_stack:
            for frame in state.stack.splitlines():
                lines.append(f"    {frame}")
    if len(states) > len(listed):
        lines.append(f"  ... and {len(states) - len(listed)} ranks more")
    return lines


def announce_wait(rank: int, size: int, watchdog: timedelta) -> ExitStack:
    """Return a context for the wait until all ranks connect. It prints that this rank waits.

    Ranks 0 and 1 print, since either of them may be the missing one.
    """
    stack = ExitStack()
    if watchdog and rank < 2:
        text = f"rank {rank} of {size} waits for all to call fabric.launch() or to use Fabric"
        reminder = threading.Timer(watchdog.total_seconds(), print, [text], {"file": sys.stderr})
        reminder.daemon = True
        reminder.start()
        stack.callback(reminder.cancel)
    return stack


def connect_again(store: dist.Store, is_required: bool) -> dist.Store | None:
    """Return a store connection for reports alone. The main thread may block the other one.

    Returns:
        The connection. None if a user's store cannot be cloned and ``is_required`` is false.

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


class HangReporter:
    """Detects that this rank waits, and publishes its state when another rank does.

    See ``[Note: Reports]``.

    Args:
        store: the store of the job, through a connection of its own.
        threshold: how long a rank waits before it requests a printed report. Zero for never.
        timeout: the timeout of a collective. Its error holds a report, which is composed after
            half of that time at the latest.
        is_asynchronous: whether collectives run in the background, so that a rank may wait for one
            anywhere.

    Attributes:
        recorder: the flight recorder of this process.
        store: the ``store`` argument.
        polls: functions that the thread calls with the monotonic time whenever it polls. They may
            use the store.
    """

    def __init__(
        self,
        store: JobStore,
        threshold: timedelta,
        timeout: timedelta,
        is_asynchronous: bool = False,
    ) -> None:
        # Has the id of the user's latest request for a report, which a supervisor sends to all its
        # ranks.
        self._control = ControlThread.of_this_process()
        self._answered_requests = {"", self._user_request()}
        self.store = store
        self.polls: list[Callable[[float], object]] = []
        self._is_asynchronous = is_asynchronous
        self._prints = bool(threshold)
        half = timeout / 2
        self._threshold = min(threshold or half, half).total_seconds()
        self._interval = self._threshold / _POLLS
        self._grace = _GRACE_PERIOD + 2 * self._interval

        self._snapshot: object = None  # of the flight recorder
        # When the flight recorder changed, or a rank compiled.
        self._unchanged_since = monotonic()
        self._polled = self._unchanged_since
        self._published = 0  # number of the latest report that has this rank's state
        self._report_number = 0  # of the report on the current wait; 0 while there is none
        self._report: str | None = None
        self._store_error = ""
        self._needs_report = threading.Event()
        self._stop = threading.Event()
        self.recorder = FlightRecorder(self.wait_for_report)
        self._stacks = Stacks(self.recorder.thread)
        self._thread = threading.Thread(target=self._watch, name="fabric-watchdog", daemon=True)

    def start(self) -> None:
        """Publish the address of this rank's stack, and start the thread."""
        self.store.publish("address", self._stacks.address)
        self._thread.start()

    def close(self) -> None:
        """Stop, and publish why. Calling it again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN)
        if not self._store_error:
            activity = f"makes no further calls: {exit_reason()}"
            state = self._state()._replace(activity=activity, is_inside=False, stack="")
            # The process that hosts the store may have ended, and no rank could read this.
            with suppress(dist.DistError):
                self.store.publish("closed", state)
        self._stacks.close()

    def wait_for_report(self) -> str:
        """Return the report on the current wait. Request it if there is none yet.

        If the report was printed, only its first lines are returned.
        """
        self._needs_report.set()
        deadline = monotonic() + 2 * self._grace
        while self._report is None and self._thread.is_alive() and monotonic() < deadline:
            sleep(_PAUSE)
        self._needs_report.clear()
        report = self._report
        if not report:
            return f"{HEADING} unknown; {self._store_error or 'there was no report in time'}"
        was_printed = self._prints and _COMPILES not in report
        if was_printed:
            first_lines = report.partition(HEADING)[0]
            return f"{first_lines}{HEADING} in the report that was printed, as a rule by rank 0"
        return report

    def _watch(self) -> None:
        try:
            while not self._stop.wait(min(_LONGEST_TICK, self._interval)):
                for poll in (self._poll, *self.polls):
                    poll(monotonic())
        except dist.DistError as error:
            self._store_error = f"the store of the job is gone: {error}"

    def _poll(self, now: float) -> None:
        self._look_for_progress(now)
        self._look_for_report(now)
        user_request = self._user_request()
        if user_request not in self._answered_requests:
            # Repeated until it is answered: another request may have been first.
            self._request_report(user_request)
            return
        is_due = self._needs_report.is_set() or self._seconds_waited(now) > self._threshold
        if is_due and not self._report_number:
            self._request_report()
        elif now - self._polled > self._interval:
            self._polled = now
            self._answer_request()

    def _user_request(self) -> str:
        if self._control is None:
            return ""
        return self._control.report_request

    def _look_for_progress(self, now: float) -> None:
        """Forget the report on a wait once the flight recorder has changed."""
        recorder = self.recorder
        snapshot = (recorder.phase, sum(recorder.counts.values()), list(recorder.calls))
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._unchanged_since = now
            self._report_number = 0
            self._report = None

    def _look_for_report(self, now: float) -> None:
        """Read the report on the current wait, once it is stored."""
        if not self._report_number or self._report is not None:
            return
        text = self.store.get_nowait(f"report/{self._report_number}")
        if text is None:
            return
        self._report = text.decode()
        if _COMPILES in self._report:
            self._report_number = 0
            self._unchanged_since = now

    def _request_report(self, user_request: str = "") -> None:
        """Request the next report, and take part in it."""
        content = json.dumps([self.store.rank, user_request]).encode()
        request = self.store.set_if_absent(f"request/{self._published + 1}", content)
        self._publish_state(request)
        self._compose(request)

    def _answer_request(self) -> None:
        """Take part in the next report if a rank has requested it."""
        request = self.store.get_nowait(f"request/{self._published + 1}")
        if not request:
            return
        self._publish_state(request)
        if self.store.rank == 0:
            self._compose(request)

    def _publish_state(self, request: bytes) -> None:
        """Publish the state of this rank for the next report."""
        self._published += 1
        state = self._state()
        self.store.publish(f"state/{self._published}", state)
        if state.seconds_waited > self._threshold / 2 or self._needs_report.is_set():
            self._report_number = self._published
            self._report = None
        _, user_request = json.loads(request)
        self._answered_requests.add(user_request)

    def _compose(self, request: bytes) -> None:
        """Compose the latest report once all states are published.

        Ranks other than 0 compose it only if rank 0 does not.
        """
        number = self._published
        rank = str(self.store.rank).encode()
        if not self._wait_for_states(number):
            return
        if self.store.set_if_absent(f"composed/{number}", rank) != rank:
            return
        requester, user_request = json.loads(request)
        reason = "a report was requested by a signal" if user_request else ""
        text = compose_report(self._read_states(number), requester, reason)
        self.store.set(f"report/{number}", text)
        should_print = user_request or (self._prints and _COMPILES not in text)
        if text and should_print:
            print(f"\n{text}", file=sys.stderr, flush=True)

    def _wait_for_states(self, number: int) -> bool:
        """Wait for the states of all ranks or, on ranks other than 0, for the report of rank 0.

        Returns:
            Whether this rank should go on. It should not if it is closed.
        """
        deadline = monotonic() + self._grace
        awaited = []
        if self.store.rank == 0:
            for rank in range(self.store.size):
                awaited.append((f"state/{number}/{rank}", f"closed/{rank}"))
        else:
            awaited.append((f"report/{number}",))
            deadline += self._grace / 2
        for keys in awaited:
            while monotonic() < deadline and not self._is_any_set(keys):
                if self._stop.wait(_PAUSE):
                    return False
        return True

    def _is_any_set(self, keys: Sequence[str]) -> bool:
        return any(self.store.get_nowait(key) is not None for key in keys)

    def _read_states(self, number: int) -> dict[int, RankState]:
        """Return the published states, and for ranks without one what can be said of them."""
        ranks = range(self.store.size)
        published = self.store.read("closed", ranks) | self.store.read(f"state/{number}", ranks)
        states = {}
        for rank in ranks:
            if rank in published:
                states[rank] = RankState(*published[rank])
            else:
                states[rank] = self._unresponsive(rank)
        return states

    def _unresponsive(self, rank: int) -> RankState:
        address = self.store.read("address", [rank]).get(rank)
        if address is None:
            return RankState("it has not started")
        activity, _, stack = read_stack(StackAddress(*address)).partition("\n")
        return RankState(activity, stack=stack)

    def _seconds_waited(self, now: float) -> float:
        may_wait = self.recorder.phase or self.recorder.calls or self._is_asynchronous
        if not may_wait:
            return 0.0
        return now - self._unchanged_since

    def _state(self) -> RankState:
        """Return the state of this rank."""
        recorder = self.recorder
        call = self._current_call()
        if call is not None:
            key = call.group
        else:
            key = recorder.phase or recorder.latest_key
        latest = call or recorder.latest
        members: Sequence[int] = ()
        if latest is not None and latest.group == key and len(latest.members) < self.store.size:
            members = tuple(latest.members)
        history = f", step {recorder.step}"
        if call is None and recorder.latest is not None:
            history += f"; its latest collective was {recorder.latest}"
        is_latest_a_phase = latest is None or latest.group != key
        if call is None and not recorder.phase and key and is_latest_a_phase:
            history += f"; its latest phase was {key}"
        return RankState(
            activity=self._describe_activity(call),
            history=history,
            is_inside=call is not None or bool(recorder.phase),
            seconds_waited=self._seconds_waited(monotonic()),
            key=key,
            members=members,
            counts=dict(recorder.counts),
            stack=self._stacks.dump(),
        )

    def _current_call(self) -> Entry | None:
        """Return the collective that the user's thread is in, else that of another thread."""
        calls = self.recorder.calls
        call = calls.get(self.recorder.thread)
        if call is None:
            call = next(iter(list(calls.values())), None)
        return call

    def _describe_activity(self, call: Entry | None) -> str:
        recorder = self.recorder
        phase = recorder.phase
        if call is not None and phase:
            text = f"in {phase}: {call}"
        elif call is not None:
            text = f"in {call}"
        else:
            text = f"in {phase or 'no collective'}"
            call_site = user_call(sys._current_frames().get(recorder.thread))
            if call_site:
                text += f" at {call_site}"
        if is_compiling():
            text += f" ({_COMPILES})"
        return text
