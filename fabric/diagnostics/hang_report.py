"""Hang reports: which rank waits, for which ranks, and what every rank is doing.

[Note: Reports] Each rank has a thread that polls a few times a minute, with its own connection to the store. A rank
whose flight recorder has not changed for longer than the threshold requests report number n by a key in the store.
Every rank that sees the key publishes its state: what it is doing, and its stack. Rank 0 composes the report, or the
requesting rank if C++ code holds rank 0's interpreter; it prints the report and stores the text for ranks whose
collective times out. If a rank publishes nothing, its stack is read as the note in ``stacks.py`` says. None of this is
a collective. While a rank compiles, the report is not printed but requested again.
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
from fabric.diagnostics.recorder import HEADING, FlightRecorder, ranks_in_words
from fabric.diagnostics.stacks import Stacks, exit_reason, read_stack
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
# seconds
_LONGEST_TICK = 0.5
_GRACE_PERIOD = 2.0
_PAUSE = 0.02
_JOIN = 5.0
_STORE_TIMEOUT = timedelta(seconds=30)  # of store requests that do not wait for other ranks
_COMPILES = "torch.compile is at work"
# most ranks in a report: listed, and with their stacks
_LINES = 16
_STACKS = 4


class RankState(NamedTuple):
    """The state that a rank publishes.

    Attributes:
        place: what it is doing and where, as text.
        more: its step and what it did before, as text.
        inside: whether it is in a collective, or in a phase in which torch issues some.
        waited: seconds since its flight recorder changed.
        key: the key in ``counts`` of what it is in, or started last.
        members: the ranks that must make the same call; empty for all.
        counts: how many of each it has started; see :class:`fabric.diagnostics.recorder.FlightRecorder`.
        stack: innermost frame first.
    """

    place: str
    more: str = ""
    inside: bool = False
    waited: float = 0.0
    key: str = ""
    members: Sequence[int] = ()
    counts: Mapping[str, int] = {}
    stack: str = ""


def compose_report(states: Mapping[int, RankState], requester: int, reason: str = "") -> str:
    """The report.

    Args:
        states: of all ranks.
        requester: the rank that waits.
        reason: the reason for the report, if not that this rank waits.

    Returns:
        The text; empty if the requester is not waiting and no rank is behind it.
    """
    if reason:
        requester = max(states, key=lambda rank: (states[rank].inside, states[rank].waited))
    waiting = states[requester]
    members = waiting.members or tuple(states)
    number = waiting.counts.get(waiting.key, 0)
    missing = [rank for rank in members if states[rank].counts.get(waiting.key, 0) < number]
    if not reason and not waiting.inside and not missing:
        return ""
    waited = f"rank {requester} of {len(states)} has waited {round(waiting.waited, 1):g} s {waiting.place}"
    lines = [f"fabric: {reason or waited}"]
    if missing:
        lines.append(
            f"reached by: {ranks_in_words([rank for rank in members if rank not in missing])}"
        )
        lines.append(f"not reached by: {ranks_in_words(missing)}")
        if ">" not in waiting.key and any(
            states[rank].stack for rank in missing
        ):  # no message; and it still runs
            lines.append(
                f"it is collective: {ranks_in_words(members)} have to make it, outside of any branch on the rank"
            )
    elif waiting.inside:
        lines.append(
            "every rank has reached it: it is slow, or they wait for each other inside of it"
        )
    lines.append(HEADING)
    listed = sorted(states, key=lambda rank: (rank not in missing, rank != requester, rank))[
        :_LINES
    ]
    with_stack = (missing or listed)[: len(states) if reason else _STACKS]
    for rank in sorted(listed):
        lines.append(f"  rank {rank}: {states[rank].place}{states[rank].more}")
        if rank in with_stack:
            lines += [f"    {frame}" for frame in states[rank].stack.splitlines()]
    if len(states) > len(listed):
        lines.append(f"  ... and {len(states) - len(listed)} ranks more")
    return "\n  ".join(lines)


def announce_wait(rank: int, size: int, watchdog: timedelta) -> ExitStack:
    """A context for the wait until all ranks connect; ranks 0 and 1 print it, as either may be missing."""
    text = f"rank {rank} of {size} waits for all to call fabric.launch() or to use Fabric"
    reminder = threading.Timer(watchdog.total_seconds(), print, [text], {"file": sys.stderr})
    reminder.daemon = True
    if watchdog and rank < 2:
        reminder.start()
    stack = ExitStack()
    stack.callback(reminder.cancel)
    return stack


def connect_again(store: dist.Store, is_required: bool) -> dist.Store | None:
    """A store connection for reports alone, since the main thread may block the other one.

    None if a user's store cannot be cloned and it is not required.
    """
    try:
        own = dist.PrefixStore("watchdog", store.clone())  # pyright: ignore[reportAttributeAccessIssue] - not in the stub
    except RuntimeError as error:
        if not is_required:
            return None
        problem = f"the watchdog needs a second connection to its store, and the clone() of that does not work: {error}"
        raise ConfigurationError(
            "a process group of yours", problem, suggestion="Fabric(watchdog=0)"
        ) from error
    own.set_timeout(_STORE_TIMEOUT)
    return own


class HangReporter:
    """Detects that this rank waits, and publishes its state when another does; see ``[Note: Reports]``.

    Args:
        store: the job's store, through its own connection.
        threshold: how long a rank waits before it requests a printed report; zero for never.
        timeout: timeout of a collective. Its error holds a report, composed after half that time at the latest.
        is_asynchronous: whether collectives run in the background, so that a rank may wait for one anywhere.

    Attributes:
        recorder: this process's flight recorder.
        store: the ``store`` argument.
        polls: called with the monotonic time whenever the thread polls; they may use the store.
    """

    def __init__(
        self,
        store: JobStore,
        threshold: timedelta,
        timeout: timedelta,
        is_asynchronous: bool = False,
    ) -> None:
        # It has the id of the user's latest report request, which a supervisor sends to all its ranks.
        self._control = control = ControlThread.of_this_process()
        self._answered = {"", control.report_request if control else ""}
        self.store = store
        self.polls = list[Callable[[float], object]]()
        self._is_asynchronous = is_asynchronous
        self._prints = bool(threshold)
        half = timeout / 2
        self._due = min(threshold or half, half).total_seconds()
        self._interval = self._due / _POLLS
        self._grace = _GRACE_PERIOD + 2 * self._interval
        self._snapshot: object = (
            None  # of the flight recorder; then, when it changed or a rank compiled
        )
        self._unchanged_since = self._polled = monotonic()
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
        """Stop, and publish why; calling it again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN)
        if not self._store_error:
            # The process that hosts the store may have ended, and no rank could read this.
            with suppress(dist.DistError):
                place = f"makes no further calls: {exit_reason()}"
                self.store.publish(
                    "closed", self._state()._replace(place=place, inside=False, stack="")
                )
        self._stacks.close()

    def wait_for_report(self) -> str:
        """The report on the current wait, requested if there is none yet; only its start if it was printed."""
        self._needs_report.set()
        until = monotonic() + 2 * self._grace
        while self._report is None and self._thread.is_alive() and monotonic() < until:
            sleep(_PAUSE)
        self._needs_report.clear()
        if self._report and self._prints and _COMPILES not in self._report:
            return f"{self._report.partition(HEADING)[0]}{HEADING} in the report that was printed, as a rule by rank 0"
        return (
            self._report
            or f"{HEADING} unknown; {self._store_error or 'there was no report in time'}"
        )

    def _watch(self) -> None:
        try:
            while not self._stop.wait(min(_LONGEST_TICK, self._interval)):
                for poll in (self._poll, *self.polls):
                    poll(monotonic())
        except dist.DistError as error:
            self._store_error = f"the store of the job is gone: {error}"

    def _poll(self, now: float) -> None:
        recorder = self.recorder
        snapshot = (recorder.phase, sum(recorder.counts.values()), list(recorder.calls))
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._unchanged_since = now
            self._report_number = 0
            self._report = None
        if self._report_number and self._report is None:
            text = self.store.get_nowait(f"report/{self._report_number}")
            self._report = None if text is None else text.decode()
            if _COMPILES in (self._report or ""):
                self._report_number = 0
                self._unchanged_since = now
        user_request = self._control.report_request if self._control else ""
        if user_request not in self._answered:
            self._request(user_request)  # again until it is answered, if another request was first
        elif not self._report_number and (
            self._waited(now) > self._due or self._needs_report.is_set()
        ):
            self._request()
        elif now - self._polled > self._interval:
            self._polled = now
            if request := self.store.get_nowait(f"request/{self._published + 1}"):
                self._publish_state(request)
                if self.store.rank == 0:
                    self._compose(request)

    def _request(self, user_request: str = "") -> None:
        own = json.dumps([self.store.rank, user_request]).encode()
        request = self.store.set_if_absent(f"request/{self._published + 1}", own)
        self._publish_state(request)
        self._compose(request)

    def _publish_state(self, request: bytes) -> None:
        """Publish the state of this rank for the next report."""
        self._published += 1
        state = self._state()
        self.store.publish(f"state/{self._published}", state)
        if state.waited > self._due / 2 or self._needs_report.is_set():
            self._report_number = self._published
            self._report = None
        self._answered.add(json.loads(request)[1])

    def _compose(self, request: bytes) -> None:
        """Compose the latest report once all states are published; ranks other than 0 only if rank 0 does not."""
        store = self.store
        number = self._published
        until = monotonic() + self._grace
        ranks = range(store.size)
        own = str(store.rank).encode()
        awaited = [(f"state/{number}/{rank}", f"closed/{rank}") for rank in ranks]
        if store.rank != 0:
            awaited = [(f"report/{number}",)]
            until = until + self._grace / 2
        for keys in awaited:
            while all(store.get_nowait(key) is None for key in keys) and monotonic() < until:
                if self._stop.wait(_PAUSE):
                    return
        if store.set_if_absent(f"composed/{number}", own) != own:
            return
        published = store.read("closed", ranks) | store.read(f"state/{number}", ranks)
        states = {
            r: RankState(*published[r]) if r in published else self._unresponsive(r) for r in ranks
        }
        requester, user_request = json.loads(request)
        text = compose_report(
            states, requester, "a report was requested by a signal" if user_request else ""
        )
        store.set(f"report/{number}", text)
        if text and (user_request or (self._prints and _COMPILES not in text)):
            print(f"\n{text}", file=sys.stderr, flush=True)

    def _unresponsive(self, rank: int) -> RankState:
        address = self.store.read("address", [rank]).get(rank)
        if address is None:
            return RankState("it has not started")
        place, _, stack = read_stack(tuple(address)).partition("\n")
        return RankState(place, stack=stack)

    def _waited(self, now: float) -> float:
        waits = self.recorder.phase or self.recorder.calls or self._is_asynchronous
        return now - self._unchanged_since if waits else 0.0

    def _state(self) -> RankState:
        recorder = self.recorder
        phase = recorder.phase
        counts = dict(recorder.counts)
        call = recorder.calls.get(recorder.thread) or next(
            iter(list(recorder.calls.values())), None
        )
        key = call.group if call else phase or recorder.latest_key
        latest = call or recorder.latest
        members = latest.members if latest and latest.group == key else ()
        more = f", step {recorder.step}"
        if call:
            place = f"in {phase}: {call}" if phase else f"in {call}"
        else:
            user = user_call(sys._current_frames().get(recorder.thread))
            place = f"in {phase or 'no collective'}{f' at {user}' if user else ''}"
            more += f"; its latest collective was {latest}" if latest else ""
            more += f"; its latest phase was {key}" if not phase and key and not members else ""
        place += f" ({_COMPILES})" if is_compiling() else ""
        members = () if len(members) == self.store.size else tuple(members)
        waited = self._waited(monotonic())
        return RankState(
            place, more, bool(call or phase), waited, key, members, counts, self._stacks.own()
        )
