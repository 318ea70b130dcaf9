"""Hang reports: a thread in each rank prints, when a rank has waited for long, what every rank is doing.

[Note: Reports] As long as all goes well the ranks exchange nothing but a look at the store, a few times per threshold.
A rank whose flight recorder has stood still for longer than the threshold requests report number n by a key in the
store. Every rank that sees it publishes its state: what it is doing, and its stack. Rank 0, or, when its interpreter is
held by C++ code, the rank that requested it, composes the report, prints it and keeps the text for those whose
collective times out. For a rank that publishes nothing, its stack is read as the note in ``stacks.py`` says. Nothing of
this is a collective.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from fabric.diagnostics.recorder import CLOSURE, HEADING, STEP, FlightRecorder, in_words, location, user_frame
from fabric.diagnostics.stacks import Stacks, exit_reason, read_stack
from fabric.errors import ConfigurationError
from fabric.store import JobStore

__all__ = ["DEFAULT_WATCHDOG", "HangReporter", "RankState", "compose", "second_connection"]

DEFAULT_WATCHDOG = timedelta(seconds=60)
_LOOKS = 16  # at the store, per threshold
_LONGEST_TICK, _GRACE_PERIOD, _PAUSE, _JOIN = 0.5, 2.0, 0.02, 5.0  # seconds
_ANSWER_WITHIN = timedelta(seconds=30)  # within which the store answers what does not wait for other ranks
_LINES, _STACKS = 16, 4  # ranks of which a report says what they are doing, and shows the stack


@dataclass(frozen=True)
class RankState:
    """What one rank says of itself.

    Attributes:
        place: what it is doing and where, in words.
        more: its step and what it did before, in words.
        inside: whether it is in a collective, or in a phase in which torch issues some.
        waited: seconds since its flight recorder changed.
        key: what it is in, or has begun last, in the terms of ``counts``.
        number: which one of these it is.
        members: the ranks that have to make the same call; empty for all.
        counts: how many of each it has begun; see :class:`fabric.diagnostics.recorder.FlightRecorder`.
        stack: innermost frame first.
    """

    place: str
    more: str = ""
    inside: bool = False
    waited: float = 0.0
    key: str = ""
    number: int = 0
    members: Sequence[int] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    stack: str = ""


def compose(states: Mapping[int, RankState], requester: int, reason: str = "") -> str:
    """The report.

    Args:
        states: of all ranks.
        requester: the rank that waits.
        reason: why there is a report, when it is not because that rank waits.

    Returns:
        The text; empty if the requester waits in nothing, and no rank is behind it.
    """
    if reason:
        requester = max(states, key=lambda rank: (states[rank].inside, states[rank].waited))
    waiting = states[requester]
    members = waiting.members or tuple(states)
    missing = [rank for rank in members if states[rank].counts.get(waiting.key, 0) < waiting.number]
    if not reason and not waiting.inside and not missing:
        return ""
    waited = f"{waiting.waited:.0f}" if waiting.waited >= 10 else f"{waiting.waited:.1f}"
    lines = [f"fabric: {reason or f'rank {requester} of {len(states)} has waited {waited} s {waiting.place}'}"]
    if missing:
        lines.append(f"reached by: {in_words([rank for rank in members if rank not in missing])}")
        lines.append(f"not reached by: {in_words(missing)}")
    elif waiting.inside:
        lines.append("every rank has reached it: it is slow, or they wait for each other inside of it")
    return "\n  ".join([*lines, HEADING, *_table(states, requester, missing, len(states) if reason else _STACKS)])


def _table(states: Mapping[int, RankState], requester: int, missing: Sequence[int], stacks: int) -> Iterator[str]:
    """What each rank does, with stacks of the missing ones, or of as many others where none is missing."""
    order = sorted(states, key=lambda rank: (rank not in missing, rank != requester, rank))[:_LINES]
    for rank in sorted(order):
        yield f"  rank {rank}: {states[rank].place}{states[rank].more}"
        if rank in (missing or order)[:stacks]:
            yield from (f"    {frame}" for frame in states[rank].stack.splitlines())
    if len(states) > len(order):
        yield f"  ... and {len(states) - len(order)} ranks more"


def second_connection(store: dist.Store, is_required: bool) -> dist.Store | None:
    """A connection for the reports alone: the main thread may wait on the other for as long as it likes.

    None where the store of a user has none, and it is not required.
    """
    try:
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue] - missing in the stub
    except RuntimeError as error:
        if isinstance(error, dist.DistError):
            raise
        if not is_required:
            return None
        raise ConfigurationError(
            "a process group that was there before, made with a store of your own",
            f"the watchdog needs a second connection to it, and its clone() does not work: {error}",
            suggestion="Fabric(..., watchdog=0), without a report when ranks wait for each other",
        ) from error
    own = dist.PrefixStore("watchdog", own)
    own.set_timeout(_ANSWER_WITHIN)
    return own


class HangReporter:
    """Notices that this rank waits, and publishes its state when another does; see ``[Note: Reports]``.

    Args:
        store: shared by the ranks of the job, through a connection that nobody else uses.
        rank: of this process.
        size: number of ranks.
        threshold: how long a rank waits before it requests a report that is printed; zero for never.
        timeout: how long a collective may wait. Its error holds a report, which is composed half way.
        is_asynchronous: whether collectives go on in the background, so that a rank may wait for one anywhere.
        requests: how often a report has been requested from outside.
        where: the same on the ranks whose ``requests`` is the same count.

    Attributes:
        recorder: what this process is doing, for those that write into it.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        threshold: timedelta,
        timeout: timedelta,
        is_asynchronous: bool = False,
        requests: Callable[[], int] = int,
        where: str = "",
    ) -> None:
        self._store, self._rank, self._size = JobStore(store, rank, size), rank, size
        self._is_asynchronous, self._requests, self._where = is_asynchronous, requests, where
        printed, half = threshold.total_seconds(), timeout.total_seconds() / 2
        # When a report is due, and whether it is printed.
        self._due = sorted([(half, False), (printed, True)]) if printed else [(half, False)]
        if self._due[0][1]:
            del self._due[1:]
        self._every = self._due[0][0] / _LOOKS
        self._tick = min(_LONGEST_TICK, self._every)
        self._grace = _GRACE_PERIOD + 2 * self._every
        self._seen: object = None
        self._since = self._looked = time.monotonic()
        self._passed = 0  # of what is due for the present wait
        self._answered = self._heard = self._awaited = 0  # numbers of reports and of requests from outside
        self._reported: dict[str, int] = {}  # the number of the latest request, by its origin
        self._text = self._lost = ""
        self._hurry, self._stop = threading.Event(), threading.Event()
        self.recorder = FlightRecorder(self.explain)
        self._stacks = Stacks(self.recorder.thread)
        self._thread = threading.Thread(target=self._watch, name="fabric-watchdog", daemon=True)

    def start(self) -> None:
        """Publish where to find the stack of this rank, and start the thread."""
        self._store.publish("address", self._stacks.address)
        self._thread.start()

    def close(self) -> None:
        """Stop, and publish why; calling it again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN)
        if not self._lost:
            # The store goes with the process that hosts it; then nobody is left who could read this.
            with suppress(dist.DistError):
                place = f"makes no further calls: {exit_reason()}"
                self._store.publish("left", asdict(replace(self._state(), place=place, inside=False, stack="")))
        self._stacks.close()

    def explain(self) -> str:
        """The report on what this rank waits in, requested now if there is none yet."""
        self._hurry.set()
        until = time.monotonic() + 2 * self._grace
        while not self._text and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(_PAUSE)
        self._hurry.clear()
        return self._text or f"{HEADING} unknown; {self._lost or 'there was no report in time'}"

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._tick):
                self._look(time.monotonic())
        except dist.DistError as error:
            self._lost = f"the store of the job is gone: {error}"

    def _look(self, now: float) -> None:
        recorder = self.recorder
        seen = (recorder.phase, sum(recorder.counts.values()), list(recorder.calls))
        if seen != self._seen:
            self._seen, self._since, self._passed, self._text, self._awaited = seen, now, 0, "", 0
        waits = recorder.phase or recorder.calls or self._is_asynchronous
        waited = now - self._since if waits else 0.0
        requests = self._requests()
        if requests > self._heard:
            self._heard = requests
            self._request(printed=True)
        elif self._hurry.is_set() and not self._text and not self._awaited:
            self._request(printed=False)
        elif self._passed < len(self._due) and waited > self._due[self._passed][0]:
            self._request(printed=self._due[self._passed][1])
        elif self._awaited and (text := self._store.get_nowait(f"report/{self._awaited}")) is not None:
            self._text, self._awaited = text.decode(), 0
        elif now - self._looked > self._every:
            self._looked = now
            if self._store.get_nowait(f"request/{self._answered + 1}") is not None:
                self._answer(self._answered + 1)

    def _request(self, *, printed: bool) -> None:
        number = self._answered + 1
        if printed:
            self._store.set(f"printed/{number}", "yes")
        own = json.dumps([self._rank, self._heard, self._where])
        self._store.set_if_absent(f"request/{number}", own.encode())
        self._answer(number)
        if self._rank != 0:
            self._report(number)

    def _answer(self, number: int) -> None:
        """Publish this rank's state; as rank 0, report."""
        _, heard, where = json.loads(self._store.get_nowait(f"request/{number}") or b"")
        state = self._state()
        self._store.publish(f"state/{number}", asdict(state))
        self._answered, self._heard = number, max(heard, self._heard) if where == self._where else self._heard
        self._awaited, self._text = (number, "") if state.waited else (0, self._text)
        if state.waited > self._due[0][0] / 2:
            # What this rank waits in is in this report.
            self._passed = len(self._due) if self._store.get_nowait(f"printed/{number}") else 1
        if self._rank == 0:
            self._report(number)

    def _report(self, number: int) -> None:
        """Compose the report once all states are there; as another rank only if rank 0 does not."""
        until = time.monotonic() + self._grace * (1 if self._rank == 0 else 1.5)
        pending = list(range(self._size))
        while pending and time.monotonic() < until:
            if self._store.get_nowait(f"report/{number}") is not None or self._stop.wait(_PAUSE):
                return
            while self._rank == 0 and pending and self._has_published(number, pending[-1]):
                pending.pop()
        own = str(self._rank).encode()
        if self._store.set_if_absent(f"composed/{number}", own) != own:
            return
        requester, heard, where = json.loads(self._store.get_nowait(f"request/{number}") or b"")
        ranks = range(self._size)
        published = self._store.read("left", ranks) | self._store.read(f"state/{number}", ranks)
        states = {r: RankState(**published[r]) if r in published else self._of_silent(r) for r in ranks}
        reason = "a report was requested by SIGUSR1" if heard > self._reported.get(where, 0) else ""
        self._reported[where] = heard
        text = compose(states, requester, reason)
        self._store.set(f"report/{number}", text)
        if text and self._store.get_nowait(f"printed/{number}"):
            print(f"\n{text}", file=sys.stderr, flush=True)

    def _has_published(self, number: int, rank: int) -> bool:
        keys = (f"state/{number}/{rank}", f"left/{rank}")
        return any(self._store.get_nowait(key) is not None for key in keys)

    def _of_silent(self, rank: int) -> RankState:
        address = self._store.read("address", [rank]).get(rank)
        if address is None:
            return RankState("it has not started")
        place, _, stack = read_stack(tuple(address)).partition("\n")
        return RankState(place, stack=stack)

    def _state(self) -> RankState:
        recorder = self.recorder
        phase, latest = recorder.phase, recorder.latest
        call = recorder.calls.get(recorder.thread) or next(iter(list(recorder.calls.values())), None)
        frame = user_frame(sys._current_frames().get(recorder.thread))
        here = "" if frame is None else f" at {location(frame.f_code, frame.f_lasti)}"
        taken = recorder.counts.get(STEP, 0)
        more = f", step {taken if phase in (STEP, CLOSURE) else taken + 1}"
        members: Sequence[int] = ()
        if call:
            place, key, number, members = f"in {call}", call.group, call.number, call.members
        else:
            place, key = (f"in {phase}{here}", phase) if phase else (f"in no collective{here}", recorder.newest)
            number = recorder.counts.get(key, 0)
            if latest:
                more += f"; its latest collective was {latest}"
                members = latest.members if latest.group == key else ()
            more += f"; its latest phase was {key}" if not phase and key not in ("", latest and latest.group) else ""
        return RankState(
            place,
            more,
            bool(call or phase),
            time.monotonic() - self._since if call or phase or self._is_asynchronous else 0.0,
            key,
            number,
            () if len(members) == self._size else tuple(members),
            dict(recorder.counts),
            self._stacks.own(),
        )
