"""Who waits where: a thread in each rank that tells, when nothing goes on, what every rank is doing.

[Note: Reports] As long as all goes well the ranks exchange nothing but a look at the store, a few times per threshold.
A rank whose record has stood still for longer than the threshold asks for report number n by a key in the store. Every
rank that sees it answers with what it is doing and its stack; rank 0, or, when its interpreter is held by C++ code, the
rank that asked, puts the answers together, prints them and leaves the text for those whose collective times out. A rank
that does not answer is asked for its stack as the note in ``_stacks.py`` says. Nothing of this is a collective.
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

from fabric.diagnostics._calls import in_words
from fabric.diagnostics.recorder import CLOSURE, HEADING, STEP, FlightRecorder
from fabric.diagnostics.stacks import Stacks, exit_reason, location, read_stack, user_frame

__all__ = ["DEFAULT_WATCHDOG", "Answer", "Watchdog", "compose"]

DEFAULT_WATCHDOG = timedelta(seconds=60)
_LOOKS = 16  # at the store, per threshold
_LONGEST_TICK, _PATIENCE, _PAUSE, _JOIN = 0.5, 2.0, 0.02, 5.0  # seconds
_LINES, _STACKS = 16, 4  # ranks of which a report tells what they are doing, and the stack


@dataclass(frozen=True)
class Answer:
    """What one rank tells of itself.

    Attributes:
        place: what it is doing and where, in words.
        more: its step and what it did before, in words.
        inside: whether it is in a collective, or in a phase in which torch issues some.
        waited: seconds since its record changed.
        key: what it is in, or has begun last, in the terms of ``counts``.
        number: which one of these it is.
        members: the ranks that have to come to it; empty for all.
        counts: how many of each it has begun; see :class:`fabric.diagnostics.recorder.FlightRecorder`.
        stack: innermost frame first.
    """

    place: str
    more: str = ""
    inside: bool = False
    waited: float = 0.0
    key: str = ""
    number: int = 0
    members: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    stack: str = ""

    def to_json(self) -> str:
        """The answer as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Answer":
        """The answer that became this text."""
        fields = json.loads(text)
        return cls(**{**fields, "members": tuple(fields["members"])})


def compose(answers: Mapping[int, Answer], asker: int, reason: str = "") -> str:
    """The report.

    Args:
        answers: of all ranks.
        asker: the rank that waits.
        reason: why there is a report, when it is not because that rank waits.

    Returns:
        The text; empty if the asker waits in nothing, and no rank is behind it.
    """
    if reason:
        asker = max(answers, key=lambda rank: (answers[rank].inside, answers[rank].waited))
    waiting = answers[asker]
    members = waiting.members or tuple(answers)
    missing = [rank for rank in members if answers[rank].counts.get(waiting.key, 0) < waiting.number]
    if not reason and not waiting.inside and not missing:
        return ""
    waited = f"{waiting.waited:.0f}" if waiting.waited >= 10 else f"{waiting.waited:.1f}"
    lines = [f"fabric: {reason or f'rank {asker} of {len(answers)} has waited {waited} s {waiting.place}'}"]
    if missing:
        lines.append(f"has come: {in_words([rank for rank in members if rank not in missing])}")
        lines.append(f"has not come: {in_words(missing)}")
    elif waiting.inside:
        lines.append("every rank has come: it is slow, or they wait for each other inside of it")
    return "\n  ".join([*lines, HEADING, *_table(answers, asker, missing, len(answers) if reason else _STACKS)])


def _table(answers: Mapping[int, Answer], asker: int, missing: Sequence[int], stacks: int) -> Iterator[str]:
    """What each rank does, with stacks of the missing ones, or of as many others where none is missing."""
    order = sorted(answers, key=lambda rank: (rank not in missing, rank != asker, rank))[:_LINES]
    for rank in sorted(order):
        yield f"  rank {rank}: {answers[rank].place}{answers[rank].more}"
        if rank in (missing or order)[:stacks]:
            yield from (f"    {frame}" for frame in answers[rank].stack.splitlines())
    if len(answers) > len(order):
        yield f"  ... and {len(answers) - len(order)} ranks more"


class Watchdog:
    """Notices that this rank waits, and answers others who ask; see the note at the top.

    Args:
        store: shared by the ranks of the job, through a connection that nobody else uses.
        rank: of this process.
        size: number of ranks.
        threshold: how long a rank waits before it asks for a report that is printed; zero for never.
        timeout: how long a collective may wait. Its error holds a report, which is put together half way.
        is_asynchronous: whether collectives go on in the background, so that a rank may wait for one anywhere.
        requests: how often a report has been asked for from outside.
        where: tells the ranks that are asked together from others.
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
        self._store, self._rank, self._size = store, rank, size
        self._is_asynchronous, self._requests, self._where = is_asynchronous, requests, where
        loud, half = threshold.total_seconds(), timeout.total_seconds() / 2
        # When a report is due, and whether it is printed.
        self._due = [(half, False)] if not loud else [(loud, True)] if loud <= half else [(half, False), (loud, True)]
        self._every = self._due[0][0] / _LOOKS
        self._tick = min(_LONGEST_TICK, self._every)
        self._patience = _PATIENCE + 2 * self._every
        self._seen: object = None
        self._since = self._looked = time.monotonic()
        self._passed = 0  # of what is due for the present wait
        self._served = self._heard = self._awaited = 0  # numbers of reports and requests
        self._reported: dict[str, int] = {}  # the number of the latest request, by where it came from
        self._text = self._lost = ""
        self._hurry, self._stop = threading.Event(), threading.Event()
        self.record = FlightRecorder(self.explain)
        self._stacks = Stacks(self.record.thread)
        self._thread = threading.Thread(target=self._watch, name="fabric-watchdog", daemon=True)

    def start(self) -> None:
        """Tell the other ranks where to find the stack of this one, and begin to watch."""
        self._store.set(f"seat/{self._rank}", json.dumps(self._stacks.address))
        self._thread.start()

    def close(self) -> None:
        """Stop, and tell the others that this rank has left; calling it again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN)
        if not self._lost:
            # The store goes with the process that hosts it; then nobody is left who could ask.
            with suppress(dist.DistError):
                answer = replace(self._answer(), place=f"has left: {exit_reason()}", inside=False, stack="")
                self._store.set(f"left/{self._rank}", answer.to_json())
        self._stacks.close()

    def explain(self) -> str:
        """The report on what this rank waits in, asked for now if there is none yet."""
        self._hurry.set()
        until = time.monotonic() + 2 * self._patience
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
        record = self.record
        seen = (record.phase, sum(record.counts.values()), list(record.calls))
        if seen != self._seen:
            self._seen, self._since, self._passed, self._text, self._awaited = seen, now, 0, "", 0
        waits = record.phase or record.calls or self._is_asynchronous
        waited = now - self._since if waits else 0.0
        requests = self._requests()
        if requests > self._heard:
            self._heard = requests
            self._ask(loud=True)
        elif self._hurry.is_set() and not self._text and not self._awaited:
            self._ask(loud=False)
        elif self._passed < len(self._due) and waited > self._due[self._passed][0]:
            self._ask(loud=self._due[self._passed][1])
        elif self._awaited and self._store.check([f"report/{self._awaited}"]):
            self._text, self._awaited = self._store.get(f"report/{self._awaited}").decode(), 0
        elif now - self._looked > self._every:
            self._looked = now
            if self._store.check([f"asked/{self._served + 1}"]):
                self._serve(self._served + 1)

    def _ask(self, *, loud: bool) -> None:
        number = self._served + 1
        if loud:
            self._store.set(f"loud/{number}", "yes")
        if not self._store.check([f"asked/{number}"]):
            self._store.set(f"asked/{number}", json.dumps([self._rank, self._heard, self._where]))
        self._serve(number)
        if self._rank != 0:
            self._collect(number)

    def _serve(self, number: int) -> None:
        """Answer; as rank 0, put the answers together."""
        _, heard, where = json.loads(self._store.get(f"asked/{number}"))
        answer = self._answer()
        self._store.set(f"answer/{number}/{self._rank}", answer.to_json())
        self._served, self._heard = number, max(heard, self._heard) if where == self._where else self._heard
        self._awaited, self._text = (number, "") if answer.waited else (0, self._text)
        if answer.waited > self._due[0][0] / 2:
            # What this rank waits in is told by this report.
            self._passed = len(self._due) if self._store.check([f"loud/{number}"]) else 1
        if self._rank == 0:
            self._collect(number)

    def _collect(self, number: int) -> None:
        """Put the answers together once all are there; as another rank only if rank 0 does not."""
        until = time.monotonic() + self._patience * (1 if self._rank == 0 else 1.5)
        while time.monotonic() < until:
            if self._store.check([f"report/{number}"]) or self._stop.wait(_PAUSE):
                return
            if self._rank == 0 and not any(self._told(number, rank) is None for rank in range(self._size)):
                break
        if self._store.add(f"composed/{number}", 1) > 1:
            return
        asker, heard, where = json.loads(self._store.get(f"asked/{number}"))
        answers = {rank: self._told(number, rank) or self._of_silent(rank) for rank in range(self._size)}
        reason = "a report was asked for by SIGUSR1" if heard > self._reported.get(where, 0) else ""
        self._reported[where] = heard
        text = compose(answers, asker, reason)
        self._store.set(f"report/{number}", text)
        if text and self._store.check([f"loud/{number}"]):
            print(f"\n{text}", file=sys.stderr, flush=True)

    def _told(self, number: int, rank: int) -> Answer | None:
        for key in (f"answer/{number}/{rank}", f"left/{rank}"):
            if self._store.check([key]):
                return Answer.from_json(self._store.get(key))
        return None

    def _of_silent(self, rank: int) -> Answer:
        if not self._store.check([f"seat/{rank}"]):
            return Answer("it has not started")
        node, pid, fd, thread = json.loads(self._store.get(f"seat/{rank}"))
        place, _, stack = read_stack((node, pid, fd, thread)).partition("\n")
        return Answer(place, stack=stack)

    def _answer(self) -> Answer:
        record = self.record
        phase, latest = record.phase, record.latest
        call = record.calls.get(record.thread) or next(iter(list(record.calls.values())), None)
        frame = user_frame(sys._current_frames().get(record.thread))
        here = "" if frame is None else f" at {location(frame.f_code, frame.f_lasti)}"
        taken = record.counts.get(STEP, 0)
        more = f", step {taken if phase in (STEP, CLOSURE) else taken + 1}"
        if call:
            place, key, number = f"in {call}", call.group, call.number
        else:
            place, key = (f"in {phase}{here}", phase) if phase else (f"in no collective{here}", record.newest)
            number = record.counts.get(key, 0)
            more += f"; its latest collective was {latest}" if latest else ""
            more += f"; its latest phase was {key}" if not phase and key not in ("", latest and latest.group) else ""
        members = call.members if call else () if phase or latest is None or latest.group != key else latest.members
        return Answer(
            place,
            more,
            bool(call or phase),
            time.monotonic() - self._since if call or phase or self._is_asynchronous else 0.0,
            key,
            number,
            () if len(members) == self._size else tuple(members),
            dict(record.counts),
            self._stacks.own(),
        )
