"""Hang reports: which rank waits, for which ranks, and what every rank is doing.

[Note: Reports] Each rank has a thread that polls several times a minute, with its own connection to
the store. The reports are numbered from 1. A rank whose flight recorder has not changed for longer
than the threshold requests the next report, number n, by writing the key ``request/n``. Every rank
that sees the key publishes its state: what the rank is doing, and its stack. Rank 0 composes the
report. If rank 0 does not, for example because C++ code holds its interpreter, the requesting rank
composes the report. The composing rank prints the report, and stores the text for ranks whose
collective times out. If a rank publishes nothing, its stack is read as ``[Note: Stacks]`` in
``stacks.py`` says. None of these steps is a collective, since a collective would hang, too. While a
rank compiles, the report is not printed but requested again.

[Note: Deadlocks] Some reports prove that ranks can never go on: each of them waits for a rank that
has ended, or that waits itself for one of these ranks. A call counts as a wait for the ranks that
have not started it, since it cannot end without them. A phase counts as a wait only while the main
thread uses no CPU time in one of torch's collectives. The states are not published at the same
moment. The proof holds nevertheless: a rank that waits for a rank which has not started its call
still waits when that rank publishes its state. Of these ranks, the one that has waited longest ends
its process with an error. The others lose their connection to it, so that their calls raise.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from fabric._torch import is_compiling
from fabric.diagnostics.call_site import user_call
from fabric.diagnostics.recorder import HEADING, Entry, FlightRecorder, ranks_in_words
from fabric.diagnostics.stacks import StackAddress, Stacks, exit_reason, has_ended, read_stack
from fabric.errors import CollectiveMismatchError, ConfigurationError
from fabric.launchers import rank as launched_rank
from fabric.launchers.rank import ControlThread, Failure
from fabric.store import JobStore
from fabric.tested_versions import untested_torch

__all__ = [
    "DEFAULT_WATCHDOG",
    "HangReporter",
    "RankState",
    "announce_wait",
    "compose_report",
    "connect_again",
    "deadlocked_ranks",
]

DEFAULT_WATCHDOG = timedelta(seconds=60)
_LOOKS_PER_THRESHOLD = 16  # how often a rank looks for requests of other ranks
_COMPILES = "torch.compile is at work"  # the activity of a rank that compiles contains this text
_CANNOT_GO_ON = "the job cannot go on and ends here:"  # in a report that proves it
_IDLE_PARTS = 4  # a thread is idle if it has used no CPU for this part of the threshold
_MAX_IDLE_LOAD = 0.05  # the share of a core that a thread uses at most while it waits
# The innermost frame of a thread that waits for a collective of torch.
_TORCH_COLLECTIVE = re.compile(
    r'File "[^"]*/torch/('
    r"distributed/(distributed_c10d\.py|_functional_collectives\.py|fsdp/|tensor/)"
    r"|nn/parallel/distributed\.py|autograd/graph\.py|_ops\.py)"
)

# In seconds.
_MAX_POLL_INTERVAL = 0.5
_GRACE_PERIOD = 2.0  # for other ranks to publish their states, in addition to their poll intervals
_PAUSE = 0.02  # between two looks for something that is due
_JOIN_TIMEOUT = 5.0
_LOSS_TIMEOUT = 0.5  # for a lost rank to publish why it ends
_STORE_TIMEOUT = timedelta(seconds=30)  # of store requests that do not wait for other ranks

# How many ranks a report lists, and how many of them with their stacks.
_MAX_LISTED_RANKS = 16
_MAX_STACKS = 4


class RankState(NamedTuple):
    """The state of one rank, which the rank publishes for a report.

    Attributes:
        activity: what the rank is doing and where, as text that follows "rank 1".
        history: the step of the rank and what it did before, as text that follows ``activity``.
            Empty, or begins with a comma.
        is_inside: whether the rank is in a collective, or in a phase in which torch issues
            collectives.
        seconds_waited: seconds since the flight recorder of the rank changed.
        key: the key in ``counts`` of the collective or phase that the rank is in, or else of the
            one that started last. The keys are groups and phases.
        members: the global ranks that must make the same call. Empty means all ranks.
        counts: how many collectives of each group and how many phases the rank has started. See
            :class:`fabric.diagnostics.recorder.FlightRecorder`.
        stack: the stack of the rank, innermost frame first. Empty if unknown.
        call: the operation of the collective that the rank is in, which must be the same on all
            members. Empty for other ranks, and for a message.
        awaited: the global ranks of which none can be missing, if the rank is to go on. Empty means
            all ranks. None, the default, if the rank is not known to wait.
        has_ended: whether the rank makes no further calls.
    """

    activity: str
    history: str = ""
    is_inside: bool = False
    seconds_waited: float = 0.0
    key: str = ""
    members: Sequence[int] = ()
    counts: Mapping[str, int] = {}
    stack: str = ""
    call: str = ""
    awaited: Sequence[int] | None = None
    has_ended: bool = False

    @property
    def number(self) -> int:
        """The number of the call or phase that the rank is in, among those with its key."""
        return self.counts.get(self.key, 0)

    def makes_another_call_than(self, other: "RankState") -> bool:
        """Return whether two ranks are in calls that should be the same call, and are not."""
        are_in_calls = self.call != "" and other.call != ""
        is_same_place = self.key == other.key and self.number == other.number
        return are_in_calls and is_same_place and self.call != other.call


def compose_report(states: Mapping[int, RankState], requester: int, reason: str = "") -> str:
    """Compose the text of a report from the states of all ranks.

    The report compares one rank with the others: the rank that requested the report because it
    waits or, if the user requested the report, the rank that has waited longest.

    Args:
        states: the states of all ranks, by rank.
        requester: the rank that requested the report.
        reason: the first line of a report that the user requested. Empty, the default, means that
            the requester waits.

    Returns:
        The text. It is empty if the requester does not wait after all: the requester is not in a
        collective or phase, and all ranks have started what it started last.
    """
    is_by_user = reason != ""
    waiting_rank = _longest_waiting(states) if is_by_user else requester
    waiting = states[waiting_rank]
    # A state without members stands for all ranks.
    members = waiting.members or tuple(states)
    missing_ranks = _missing_ranks(states, waiting, members)
    first_line = reason
    max_stacks = len(states)
    if not is_by_user:
        if not waiting.is_inside and not missing_ranks:
            return ""
        seconds = f"{round(waiting.seconds_waited, 1):g} s"
        waiter = f"rank {waiting_rank} of {len(states)}"
        first_line = f"{waiter} has waited {seconds} {waiting.activity}"
        max_stacks = _MAX_STACKS
    lines = [f"fabric: {first_line}"]
    lines += _describe_call(states, waiting, members, missing_ranks)
    note = untested_torch()
    if note:
        lines.append(note)
    lines.append(HEADING)
    lines += _describe_ranks(states, waiting_rank, missing_ranks, max_stacks)
    return "\n  ".join(lines)


def _longest_waiting(states: Mapping[int, RankState]) -> int:
    """Return the rank that has waited longest.

    Ranks in a collective or phase come before all others, since only they wait for other ranks.
    """

    def waiting_time(rank: int) -> tuple[bool, float]:
        return states[rank].is_inside, states[rank].seconds_waited

    return max(states, key=waiting_time)


def _missing_ranks(
    states: Mapping[int, RankState], waiting: RankState, members: Sequence[int]
) -> list[int]:
    """Return the ranks that have not started the call in which a rank waits.

    Args:
        states: the states of all ranks, by rank.
        waiting: the state of the waiting rank.
        members: the ranks that must make the call.
    """
    # A rank has started the call if it has counted as many calls with this key.
    number = waiting.number
    return [rank for rank in members if states[rank].counts.get(waiting.key, 0) < number]


def _differing_ranks(
    states: Mapping[int, RankState], waiting: RankState, members: Sequence[int]
) -> list[int]:
    """Return the ranks that make another call in the place of the call in which a rank waits.

    See :func:`_missing_ranks` for the arguments.
    """
    return [rank for rank in members if states[rank].makes_another_call_than(waiting)]


def deadlocked_ranks(states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks that can never go on. See ``[Note: Deadlocks]``."""
    ended: set[int] = set()
    deadlocked: set[int] = set()
    for rank, state in states.items():
        if state.has_ended:
            ended.add(rank)
        elif state.awaited is not None:
            deadlocked.add(rank)
    absent_ranks = _absent_ranks(states, deadlocked)
    # A rank can go on if all ranks that it waits for may still come. Whatever then waits only for
    # this rank can go on, too.
    may_go_on = deadlocked
    while may_go_on:
        may_go_on = set()
        for rank in deadlocked:
            if absent_ranks[rank].isdisjoint(deadlocked | ended):
                may_go_on.add(rank)
        deadlocked = deadlocked - may_go_on
    return deadlocked


def _absent_ranks(
    states: Mapping[int, RankState], waiting_ranks: Collection[int]
) -> dict[int, set[int]]:
    """Return the ranks that each waiting rank waits for.

    These are the awaited ranks that have not started its call, or make another call in its place.

    Args:
        states: the states of all ranks, by rank.
        waiting_ranks: the ranks whose state has awaited ranks.
    """
    absent_by_rank: dict[int, set[int]] = {}
    # In a large job most ranks are in the same call, whose absent ranks are computed once.
    absent_by_call: dict[object, set[int]] = {}
    for rank in waiting_ranks:
        state = states[rank]
        awaited = tuple(state.awaited or states)
        call = (state.key, state.number, state.call, awaited)
        if call not in absent_by_call:
            missing = _missing_ranks(states, state, awaited)
            differing = _differing_ranks(states, state, awaited)
            absent_by_call[call] = {*missing, *differing}
        absent_by_rank[rank] = absent_by_call[call]
    return absent_by_rank


def _describe_deadlock(states: Mapping[int, RankState], deadlocked: Collection[int]) -> str:
    """Return the last line of a report that proves that ranks can never go on.

    Args:
        states: the states of all ranks, by rank.
        deadlocked: the ranks that :func:`deadlocked_ranks` has found.
    """
    awaited: set[int] = set()
    for absent in _absent_ranks(states, deadlocked).values():
        awaited |= absent
    ended = [rank for rank in sorted(awaited) if states[rank].has_ended]
    waiting = ranks_in_words(deadlocked)
    if ended:
        return f"{_CANNOT_GO_ON} {waiting} cannot go on after the end of {ranks_in_words(ended)}"
    return f"{_CANNOT_GO_ON} {waiting} wait for each other, in different calls"


def _describe_call(
    states: Mapping[int, RankState],
    waiting: RankState,
    members: Sequence[int],
    missing_ranks: Sequence[int],
) -> list[str]:
    """Return lines that say which ranks have reached the call or phase in which a rank waits.

    Args:
        states: the states of all ranks, by rank.
        waiting: the state of the rank that waits.
        members: the ranks that must make the call.
        missing_ranks: the members that have not reached the call.
    """
    lines: list[str] = []
    differing_ranks = _differing_ranks(states, waiting, members)
    if differing_ranks:
        lines += _describe_differing(states, members, differing_ranks)
    if missing_ranks:
        lines += _describe_missing(states, waiting, members, missing_ranks)
    elif waiting.is_inside and not differing_ranks:
        lines.append(_describe_reached(states, waiting, members))
    return lines


def _describe_differing(
    states: Mapping[int, RankState], members: Sequence[int], differing: Sequence[int]
) -> list[str]:
    """Return lines that name the ranks which make another call in the place of a call.

    Args:
        states: the states of all ranks, by rank.
        members: the ranks that must make the call.
        differing: the members that make another call.
    """
    ranks_by_call: dict[str, list[int]] = {}
    for rank in differing:
        ranks_by_call.setdefault(states[rank].call, []).append(rank)
    lines = []
    for call, ranks in ranks_by_call.items():
        lines.append(f"in its place, {call} was called by {ranks_in_words(ranks)}")
    lines.append(
        f"{ranks_in_words(members)} have to make the same calls in the same order, outside of any "
        "branch on the rank"
    )
    return lines


def _describe_reached(
    states: Mapping[int, RankState], waiting: RankState, members: Sequence[int]
) -> str:
    """Return a line about a call or phase that every member has started.

    Args:
        states: the states of all ranks, by rank.
        waiting: the state of the rank that waits in the call or phase.
        members: the ranks that must make the call.
    """
    left_by = []
    for rank in members:
        state = states[rank]
        is_in_it = state.is_inside and state.key == waiting.key and state.number == waiting.number
        if not is_in_it:
            left_by.append(rank)
    if left_by:
        return (
            f"every rank has reached it, and {ranks_in_words(left_by)} went on: it is slow, or the "
            "ranks have made different calls before"
        )
    return "every rank has reached it: it is slow, or the ranks wait for each other inside of it"


def _describe_missing(
    states: Mapping[int, RankState],
    waiting: RankState,
    members: Sequence[int],
    missing: Sequence[int],
) -> list[str]:
    """Return lines that name the ranks that reached a call and the ranks that did not.

    Args:
        states: the states of all ranks, by rank.
        waiting: the state of the rank that waits in the call.
        members: the ranks that must make the call.
        missing: the members that have not reached the call.
    """
    reached = sorted(set(members) - set(missing))
    lines = [
        f"reached by: {ranks_in_words(reached)}",
        f"not reached by: {ranks_in_words(missing)}",
    ]
    # Only the key of a message, "{group} {source}>{destination}", has this character.
    is_message = ">" in waiting.key
    # A process that has ended has no stack. If all missing ranks have ended, the advice below is
    # left out, since it would not help.
    is_any_running = any(states[rank].stack for rank in missing)
    if is_any_running and not is_message:
        lines.append(
            f"it is collective: {ranks_in_words(members)} have to make it, outside of any branch "
            "on the rank"
        )
    return lines


def _describe_ranks(
    states: Mapping[int, RankState],
    waiting_rank: int,
    missing: Sequence[int],
    max_stacks: int,
) -> list[str]:
    """Return lines that say what the ranks are doing, some of them with their stacks.

    The lines are ordered by rank. At most ``_MAX_LISTED_RANKS`` ranks are listed. The missing ranks
    are chosen first, then the waiting rank, and then the other ranks.

    Args:
        states: the states of all ranks, by rank.
        waiting_rank: the rank that waits.
        missing: the ranks that it waits for. If there are any, only these get a stack.
        max_stacks: how many ranks get a stack.
    """

    def priority(rank: int) -> tuple[bool, bool, int]:
        """Return the sort key of a rank. False is sorted before True."""
        return rank not in missing, rank != waiting_rank, rank

    listed_ranks = sorted(states, key=priority)[:_MAX_LISTED_RANKS]
    ranks_with_stack = (missing or listed_ranks)[:max_stacks]
    lines = []
    for rank in sorted(listed_ranks):
        state = states[rank]
        lines.append(f"  rank {rank}: {state.activity}{state.history}")
        if rank in ranks_with_stack:
            for frame in state.stack.splitlines():
                lines.append(f"    {frame}")
    if len(states) > len(listed_ranks):
        lines.append(f"  ... and {len(states) - len(listed_ranks)} ranks more")
    return lines


def announce_wait(rank: int, size: int, watchdog: timedelta) -> ExitStack:
    """Return a context for the wait until all ranks have connected.

    If the wait takes longer than ``watchdog``, a timer's thread prints that this rank waits. No
    hang report is possible before the ranks are connected. A ``watchdog`` of zero prints nothing.
    """
    context = ExitStack()
    # Two ranks print, since one of the two may be the rank that is missing.
    if watchdog and rank < 2:
        text = f"rank {rank} of {size} waits for all to call fabric.launch() or to use Fabric"
        timer = threading.Timer(watchdog.total_seconds(), print, [text], {"file": sys.stderr})
        timer.daemon = True
        timer.start()
        # The end of the context cancels the timer, so that a short wait prints nothing.
        context.callback(timer.cancel)
    return context


def connect_again(store: dist.Store, is_required: bool) -> dist.Store | None:
    """Return a second connection to a store, for the thread that makes reports.

    The thread cannot share the first connection: while the main thread waits for a key, the
    connection is blocked.

    Returns:
        The connection. None if the user's store cannot be cloned and ``is_required`` is false.

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


class _IdleTimer:
    """Measures since when the thread that creates the timer has used no CPU time.

    Attributes:
        idle_since: when the thread was last seen to use the CPU, on the monotonic clock. Always the
            present time on systems that do not measure the CPU time of a thread.
    """

    def __init__(self) -> None:
        self._clock: int | None = None
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._latest_update = monotonic()
        self._cpu_seconds = 0.0
        self.idle_since = self._latest_update

    def update(self, now: float) -> None:
        """Notice whether the thread has used the CPU since the latest update, from any thread.

        Args:
            now: the monotonic time.
        """
        if self._clock is None:
            self.idle_since = now
            return
        cpu_seconds = time.clock_gettime(self._clock)
        idle_limit = _MAX_IDLE_LOAD * (now - self._latest_update)
        if cpu_seconds - self._cpu_seconds > idle_limit:
            self.idle_since = now
        self._cpu_seconds = cpu_seconds
        self._latest_update = now


class HangReporter:
    """A thread that reports when this rank waits, and takes part in the reports of other ranks.

    See ``[Note: Reports]``. The thread runs from :meth:`start` to :meth:`close`.

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
        # This thread receives the id of the latest report that the user requested, which the
        # supervisor sends to all of its ranks. None if no launcher of fabric started this process.
        self._control = ControlThread.of_this_process()
        # The ids of requests that need no report from this object: the empty id, which means that
        # there was no request, and the id of a request from before this object was made.
        self._answered_requests = {"", self._user_request()}
        self.store = store
        self.polls: list[Callable[[float], object]] = []
        self._is_asynchronous = is_asynchronous
        self._prints = bool(threshold)
        # In seconds. Without a threshold, reports are made only for the errors of collectives that
        # time out.
        half_timeout = timeout.total_seconds() / 2
        self._threshold = half_timeout
        if threshold:
            self._threshold = min(threshold.total_seconds(), half_timeout)
        # Seconds between two looks for requests of other ranks.
        self._interval = self._threshold / _LOOKS_PER_THRESHOLD
        # Seconds in which every rank that runs sees a request and publishes its state.
        self._grace = _GRACE_PERIOD + 2 * self._interval

        self._idle_timer = _IdleTimer()
        # Only the thread of this object changes the fields from here to _report.
        self._snapshot: object = None  # the state of the flight recorder at the latest poll
        # When the flight recorder changed last, or a rank was seen to compile.
        self._unchanged_since = monotonic()
        self._last_look = self._unchanged_since  # when this rank looked for requests last
        self._published = 0  # the number of the latest report for which this rank has published
        # The number of the report on the present wait of this rank. None if this rank does not
        # wait, or if no report was requested yet.
        self._report_number: int | None = None
        self._report: str | None = None  # the text of the report on this wait, once it is stored
        self._store_error = ""  # why the thread has ended early
        # Set by another thread, whose collective has timed out and needs a report for its error.
        self._needs_report = threading.Event()
        self._stop = threading.Event()
        self.recorder = FlightRecorder(self.wait_for_report, self.explain_lost_rank)
        self._stacks = Stacks(self.recorder.thread)
        self._thread = threading.Thread(target=self._watch, name="fabric-watchdog", daemon=True)

    def start(self) -> None:
        """Publish where other processes can read this rank's stack, and start the thread."""
        self.store.publish("address", self._stacks.address)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and publish why this rank ends. A second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT)
        # If the store is gone, nothing can be published.
        if not self._store_error:
            activity = f"makes no further calls: {exit_reason()}"
            state = self._state()._replace(
                activity=activity, is_inside=False, stack="", awaited=None, has_ended=True
            )
            # If the process that hosts the store has ended, no rank can read the state anyway.
            with suppress(dist.DistError):
                self.store.publish("closed", state)
        self._stacks.close()

    def wait_for_report(self) -> str:
        """Return the report on the wait in which this rank is now.

        The flight recorder calls this method for the error of a collective that timed out, in the
        thread of the collective. The thread of this object requests the report, if no report was
        requested yet.

        Returns:
            The text. If the report was printed, only its first lines, up to ``HEADING``.
        """
        self._needs_report.set()
        # A second grace period is for the time in which another rank composes the report.
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

    def explain_lost_rank(self) -> str:
        """Return why other ranks have ended, one line for each.

        The flight recorder calls this method for the error of a collective that has lost another
        rank, in the thread of the collective.

        Returns:
            The lines. Empty if no reason is known within half a second.
        """
        deadline = monotonic() + _LOSS_TIMEOUT
        lines: list[str] = []
        # The rank may have lost the process that hosts the store, too.
        with suppress(dist.DistError):
            while not lines and monotonic() < deadline:
                lines = self._reasons_of_ended_ranks()
                sleep(_PAUSE)
        report = self._report or ""
        if _CANNOT_GO_ON in report:
            first_lines = report.partition(HEADING)[0]
            verdict = report.splitlines()[-1]
            lines = [f"{first_lines}{HEADING} in the report that was printed", verdict]
        return "\n".join(lines)

    def _reasons_of_ended_ranks(self) -> list[str]:
        """Return a line for each of the first ranks that make no further calls."""
        ranks = range(self.store.size)
        reasons: dict[int, str] = {}
        for rank, address in self.store.read("address", ranks).items():
            stack_address = StackAddress(*address)
            if has_ended(stack_address.node, stack_address.pid):
                reasons[rank] = f"its process (pid {stack_address.pid}) has ended"
        # What a rank has published comes before what is seen of its process.
        for rank, state in self.store.read("closed", ranks).items():
            reasons[rank] = RankState(*state).activity
        lines = [f"  rank {rank}: {reasons[rank]}" for rank in sorted(reasons)]
        return lines[:_MAX_LISTED_RANKS]

    def _watch(self) -> None:
        """Poll until :meth:`close` is called or the store is gone. Runs in the thread."""
        poll_interval = min(_MAX_POLL_INTERVAL, self._interval)
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
        self._update_progress(now)
        self._update_report(now)
        user_request = self._user_request()
        if user_request not in self._answered_requests:
            # If another rank has requested the same report for another reason, the next poll makes
            # the request again, for the next report.
            self._request_report(user_request)
            return
        is_due = self._needs_report.is_set() or self._seconds_waited(now) > self._threshold
        has_requested = self._report_number is not None
        if is_due and not has_requested:
            self._request_report()
        elif now - self._last_look > self._interval:
            # This reads the store, so it is done less often than polls.
            self._last_look = now
            self._answer_request()

    def _user_request(self) -> str:
        """Return the id of the latest report that the user requested, or an empty string."""
        if self._control is None:
            return ""
        return self._control.report_request

    def _update_progress(self, now: float) -> None:
        """Forget the report on a wait if this rank has made progress since the latest poll.

        Progress is a change of the flight recorder.
        """
        self._idle_timer.update(now)
        recorder = self.recorder
        # The ids of the threads are copied, since other threads change the dict.
        open_threads = list(recorder.open_collectives)
        snapshot = (recorder.phase, sum(recorder.counts.values()), open_threads)
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._unchanged_since = now
            self._report_number = None
            self._report = None

    def _update_report(self, now: float) -> None:
        """Read the report on the wait of this rank, if it is stored now.

        If a rank compiles, the report is kept for an error, but another one is requested after
        another threshold.
        """
        if self._report_number is None or self._report is not None:
            return
        text = self.store.get_nowait(f"report/{self._report_number}")
        if text is None:
            return
        self._report = text.decode()
        if _CANNOT_GO_ON in self._report:
            ending_rank = self.store.get_nowait(f"end/{self._report_number}")
            if ending_rank == str(self.store.rank).encode():
                self._end_process(self._report)
        if _COMPILES in self._report:
            self._report_number = None
            self._unchanged_since = now

    def _end_process(self, report: str) -> NoReturn:
        """End this process with an error, since it can never go on. Runs in the thread.

        The main thread waits in C++ code, which nothing in this process can interrupt. So the
        process ends at once, and its ``finally`` blocks do not run.

        Args:
            report: the report that proves it.
        """
        # In this time the other ranks read the report, for their own errors.
        self._stop.wait(2 * _MAX_POLL_INTERVAL)
        activity = self._describe_activity(self._current_call())
        verdict = report.splitlines()[-1].strip()
        error = CollectiveMismatchError(
            f"rank {self.store.rank} of {self.store.size}, {activity}",
            problem=f"{verdict}; where each rank is, was printed above",
            expected="the same calls in the same order on every rank",
            suggestion="no branch on the rank around a collective, a forward or a backward pass, "
            "nor a loop whose length depends on the rank",
        )
        failure = Failure.of(error.with_traceback(self._main_traceback()))
        # The error is not the consequence of another error, as such an error is as a rule.
        failure = replace(failure, secondary=False)
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
        """Return the present stack of the thread that makes the calls as a traceback.

        The frames that lead to the user's code are left out.
        """
        frame: FrameType | None = sys._current_frames().get(self.recorder.thread)
        stack: TracebackType | None = None
        while frame is not None and frame.f_code.co_filename != launched_rank.__file__:
            stack = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        return stack

    def _request_report(self, user_request: str = "") -> None:
        """Request the next report, and take part in it. Runs in the thread.

        Every rank takes part in every report, in the order of their numbers.

        Args:
            user_request: the id of the user's request. Empty, the default, means that this rank
                waits.
        """
        content = json.dumps([self.store.rank, user_request]).encode()
        # Several ranks may request the report. All of them continue with the first request.
        request = self.store.set_if_absent(f"request/{self._published + 1}", content)
        self._publish_state(request)
        self._compose(request)

    def _answer_request(self) -> None:
        """Take part in the next report if another rank has requested it. Runs in the thread."""
        request = self.store.get_nowait(f"request/{self._published + 1}")
        if request is None:
            return
        self._publish_state(request)
        if self.store.rank == 0:
            self._compose(request)

    def _publish_state(self, request: bytes) -> None:
        """Publish the state of this rank for the next report.

        Args:
            request: the request of the report, as stored: the requesting rank and the id of the
                user's request, in JSON.
        """
        self._published += 1
        state = self._state()
        self.store.publish(f"state/{self._published}", state)
        # If this rank waits, too, the report is also about the wait of this rank, which then
        # requests no other report. Half of the threshold is enough here: the ranks of one hang do
        # not begin to wait at the same time.
        is_waiting = state.seconds_waited > self._threshold / 2 or self._needs_report.is_set()
        if is_waiting:
            self._report_number = self._published
            self._report = None
        _, user_request = json.loads(request)
        self._answered_requests.add(user_request)

    def _compose(self, request: bytes) -> None:
        """Compose, store and print the report for which this rank has just published its state.

        Rank 0 calls this method for every report, and the requesting ranks for theirs. The ranks
        other than 0 first give rank 0 the time to compose the report. The store decides which rank
        composes it, so that no report is printed twice.

        Args:
            request: see :meth:`_publish_state`.
        """
        number = self._published
        should_go_on = self._wait_for_states(number)
        if not should_go_on:
            return
        this_rank = str(self.store.rank).encode()
        # set_if_absent() returns the value in the store: the first rank that has set the key.
        composing_rank = self.store.set_if_absent(f"composed/{number}", this_rank)
        if composing_rank != this_rank:
            return
        requester, user_request = json.loads(request)
        reason = "a report was requested by a signal" if user_request else ""
        states = self._read_states(number)
        text = compose_report(states, requester, reason)
        # Without a watchdog, only the timeout of a collective ends the job.
        if text and self._prints and _COMPILES not in text:
            text = self._end_deadlock(states, text)
        self.store.set(f"report/{number}", text)
        should_print = user_request or (self._prints and _COMPILES not in text)
        if text and should_print:
            print(f"\n{text}", file=sys.stderr, flush=True)

    def _end_deadlock(self, states: Mapping[int, RankState], text: str) -> str:
        """Choose a rank that ends its process, if a report proves a deadlock.

        Args:
            states: the states of all ranks, by rank.
            text: the report.

        Returns:
            The report. If it proves a deadlock, its last line says so.
        """
        deadlocked = deadlocked_ranks(states)
        if not deadlocked:
            return text
        ending_rank = max(deadlocked, key=lambda rank: states[rank].seconds_waited)
        # A rank that has waited less than this does not read the report; see _publish_state().
        if states[ending_rank].seconds_waited <= self._threshold / 2:
            return text
        self.store.set(f"end/{self._published}", str(ending_rank))
        return f"{text}\n  {_describe_deadlock(states, deadlocked)}"

    def _wait_for_states(self, number: int) -> bool:
        """Wait on rank 0 for the states of all ranks, on other ranks for the report of rank 0.

        The wait ends after the grace period. Then the report is composed without the missing
        states.

        Args:
            number: the number of the report.

        Returns:
            Whether this rank should go on. False means that :meth:`close` was called.
        """
        deadline = monotonic() + self._grace
        # At least one key of each tuple has to be set.
        awaited_keys: list[tuple[str, ...]] = []
        if self.store.rank == 0:
            for rank in range(self.store.size):
                awaited_keys.append((f"state/{number}/{rank}", f"closed/{rank}"))
        else:
            awaited_keys.append((f"report/{number}",))
            # Rank 0 composes the report at the end of its own grace period.
            deadline += self._grace / 2
        for keys in awaited_keys:
            while monotonic() < deadline and not self._is_any_set(keys):
                if self._stop.wait(_PAUSE):
                    return False
        return True

    def _is_any_set(self, keys: Sequence[str]) -> bool:
        return any(self.store.get_nowait(key) is not None for key in keys)

    def _read_states(self, number: int) -> dict[int, RankState]:
        """Return the state of every rank for a report.

        A rank that has not published a state gets one from what can be read of its process.
        """
        ranks = range(self.store.size)
        # A state for this report takes precedence over the state of a rank that closed later.
        closed = self.store.read("closed", ranks)
        published = closed | self.store.read(f"state/{number}", ranks)
        states = {}
        for rank in ranks:
            if rank in published:
                states[rank] = RankState(*published[rank])
            else:
                states[rank] = self._read_unresponsive_state(rank)
        return states

    def _read_unresponsive_state(self, rank: int) -> RankState:
        """Return a state for a rank that has published none, with its stack if it can be read."""
        address = self.store.read("address", [rank]).get(rank)
        if address is None:
            return RankState("it has not started")
        # The first line of the text says what is known of the process. The other lines are the
        # stack.
        stack_address = StackAddress(*address)
        activity, _, stack = read_stack(stack_address).partition("\n")
        is_gone = has_ended(stack_address.node, stack_address.pid)
        return RankState(activity, stack=stack, has_ended=is_gone)

    def _seconds_waited(self, now: float) -> float:
        """Return for how long this rank may have waited. Zero if the rank cannot be waiting."""
        is_inside = bool(self.recorder.phase or self.recorder.open_collectives)
        if not is_inside and not self._is_asynchronous:
            return 0.0
        return now - self._unchanged_since

    def _state(self) -> RankState:
        """Return the state of this rank now."""
        recorder = self.recorder
        call = self._current_call()
        if call is not None:
            key = call.group
        else:
            key = recorder.phase or recorder.latest_key
        latest = call or recorder.latest_collective
        # The members of a group of all ranks are left out, to keep the state small. If the key is
        # that of a phase, all ranks must start it.
        members: Sequence[int] = ()
        if latest is not None and latest.group == key and len(latest.members) < self.store.size:
            members = tuple(latest.members)
        history = f", step {recorder.step}"
        if call is None:
            history += self._describe_latest()
        stack = self._stacks.dump()
        compared_call = ""
        if call is not None and not call.is_message:
            compared_call = call.title
        return RankState(
            activity=self._describe_activity(call),
            history=history,
            is_inside=call is not None or bool(recorder.phase),
            seconds_waited=self._seconds_waited(monotonic()),
            key=key,
            members=members,
            counts=dict(recorder.counts),
            stack=stack,
            call=compared_call,
            awaited=self._awaited_ranks(stack),
        )

    def _awaited_ranks(self, stack: str) -> Sequence[int] | None:
        """Return the ranks without which this rank cannot go on. See ``RankState.awaited``.

        Args:
            stack: the stack of the thread that makes the calls.
        """
        recorder = self.recorder
        if self._is_asynchronous:
            return None
        open_collectives = dict(recorder.open_collectives)
        if open_collectives:
            # A rank with calls in other threads may go on in one of them.
            is_in_main_thread = list(open_collectives) == [recorder.thread]
            awaited = next(iter(open_collectives.values())).awaited_ranks
            if not is_in_main_thread or not awaited:
                return None
            # A list of all ranks is left out, to keep the state small.
            if len(awaited) == self.store.size:
                return ()
            return tuple(awaited)
        idle_seconds = monotonic() - self._idle_timer.idle_since
        is_idle = idle_seconds > self._threshold / _IDLE_PARTS
        is_in_torch = _TORCH_COLLECTIVE.match(stack) is not None
        if recorder.phase and recorder.phases_need_all_ranks and is_idle and is_in_torch:
            return ()
        return None

    def _current_call(self) -> Entry | None:
        """Return the collective in which the user's thread is, or else another thread.

        Returns:
            The collective. None if no thread is in a collective.
        """
        open_collectives = self.recorder.open_collectives
        call = open_collectives.get(self.recorder.thread)
        if call is None:
            # The values are copied into a list, since other threads change the dict.
            call = next(iter(list(open_collectives.values())), None)
        return call

    def _describe_activity(self, call: Entry | None) -> str:
        """Return what this rank is doing, and where, as text that follows "rank 1".

        Args:
            call: the collective that the rank is in. None if it is in none.
        """
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

    def _describe_latest(self) -> str:
        """Return what a rank that is not in a collective did last, as text that ends a sentence."""
        recorder = self.recorder
        latest = recorder.latest_collective
        text = ""
        if latest is not None:
            text += f"; its latest collective was {latest}"
        # The latest key is a group or, after a phase, the name of the phase.
        latest_key = recorder.latest_key
        is_latest_a_phase = latest_key != "" and (latest is None or latest.group != latest_key)
        if is_latest_a_phase and not recorder.phase:
            text += f"; its latest phase was {latest_key}"
        return text
