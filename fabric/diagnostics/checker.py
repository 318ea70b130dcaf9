"""Checked mode: compares what all ranks call before anything moves.

[Note: Arrivals] Each rank publishes one record, which it overwrites when it begins a call: how many calls it has begun
in each group, and what the latest is. In its call number n of a group a rank waits until every member has begun its own
call number n there, and compares. It moves on when all have and agree, which is why a member that is found further on
must have agreed: it saw this rank's record first. So nobody has to keep a record for a rank that is slow to read it,
groups run ahead of each other freely, and each rank waits for all members of one group at a time. A circle of ranks
that wait for each other, in whatever groups, is then a deadlock, and the only kind there is: every other wait ends, or
ends at a rank that makes no further calls. (A rank that waits in several threads may still arrive by any of them, and
counts as one that computes.)
"""

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NoReturn

import torch.distributed as dist

from fabric.communicators import Collective, Operation
from fabric.diagnostics.recorder import Entry, in_words
from fabric.diagnostics.stacks import exit_reason, node
from fabric.errors import CollectiveMismatchError
from fabric.store import JobStore

__all__ = ["Call", "CollectiveChecker", "difference"]

_FIRST_PAUSE, _LONGEST_PAUSE, _SEARCH_EVERY = 0.00005, 0.005, 0.05  # seconds
_ANSWER_WITHIN = 0.3  # seconds, in which other ranks make their call and publish what they pass
_INLINE = 120  # characters of what is passed that a record holds itself; of more it holds the beginning and a digest
_BRIEF = "... #"
_SHOWN, _WINDOW = 160, 60  # characters of what is passed that are shown: with a call, around the first difference
_NOT_AN_ARGUMENT = ("operation", "collective", "dtype", "shape")

_EXPECTED = "a call that every rank of the group makes"
_SUGGESTION = (
    "the call outside of any branch on the rank and of loops that differ in length; see what ended the rank named here"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective on one rank.

    Attributes:
        group: of the call.
        members: the ranks of the job that have to make it.
        operation: its name, as the user called it.
        location: file and line of the user's call.
        facts: what must be the same on every rank, by name, in the order in which differences are of interest.
        data: what is passed, as text; must be the same on all ranks that say it, and is empty on the others.
    """

    group: str
    members: Sequence[int]
    operation: str
    location: str
    facts: Mapping[str, str] = field(default_factory=dict)
    data: str = ""

    @classmethod
    def of(cls, entry: Entry, collective: Collective) -> "Call":
        """The call of an entry of the flight recorder."""
        facts, data = collective.facts, "" if collective.call is None else collective.call.arguments()
        if collective.operation in (Operation.SEND, Operation.RECV):  # two ranks, and two operations
            ends = {"from": str(entry.members[0]), "to": str(entry.members[1])}
            facts = ends | {name: facts[name] for name in ("dtype", "shape")}
        return cls(entry.group, tuple(entry.members), entry.operation, entry.location, facts, data)

    def __str__(self) -> str:
        passed = self.data if len(self.data) <= _SHOWN else f"{self.data[:_SHOWN]}..."
        if not passed:
            arguments = [f"{name}={value}" for name, value in self.facts.items() if name not in _NOT_AN_ARGUMENT]
            buffer = [self.facts[name] for name in ("dtype", "shape") if name in self.facts]
            passed = ", ".join([*arguments, *([" ".join(buffer)] if buffer else [])])
        return f"{self.operation}({passed}) at {self.location}"

    def brief(self) -> "Call":
        """The call with a digest in the place of the end of a long text, so that a record stays small."""
        if len(self.data) <= _INLINE:
            return self
        digest = blake2b(self.data.encode(), digest_size=8).hexdigest()
        return replace(self, data=f"{self.data[:_INLINE]}{_BRIEF}{digest}")

    def is_brief(self) -> bool:
        """Whether :meth:`brief` shortened it."""
        return self.data.startswith(_BRIEF, _INLINE)


@dataclass(frozen=True, slots=True)
class _Record:
    """What one rank publishes.

    Attributes:
        begun: how many calls it has begun in each group.
        calls: its latest call; of a rank that waits in several threads, that of each.
        end_reason: why it makes no further calls; empty while it does.
    """

    begun: Mapping[str, int] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    end_reason: str = ""

    def to_json(self) -> Any:
        calls = [[c.group, c.members, c.operation, c.location, c.facts, c.data] for c in self.calls]
        return [self.begun, calls, self.end_reason]

    @classmethod
    def from_json(cls, value: Any) -> "_Record":
        begun, calls, end_reason = value
        return cls(begun, tuple(Call(group, tuple(members), *rest) for group, members, *rest in calls), end_reason)

    def count(self, group: str) -> int:
        return self.begun.get(group, 0)


class CollectiveChecker:
    """Compares the calls of this rank with those of the others; see ``[Note: Arrivals]``.

    After the first error the ranks are out of step, and every further call raises.

    Args:
        store: shared by the ranks of the job, and used for nothing else.
        rank: of this process.
        size: number of ranks.
        timeout: how long a rank may keep the others waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size = JobStore(store, rank, size), rank, size
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        self._own = _Record()
        self._latest: Call | None = None
        self._error: CollectiveMismatchError | None = None
        self._store.publish("process", [node(), os.getpid()])
        self._publish(self._own)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Wait until all members of the group make this call.

        Raises:
            CollectiveMismatchError: a member makes another call, waits elsewhere for this rank, or makes none.
        """
        full, count = Call.of(entry, collective), entry.number
        call = full.brief()
        with self._lock:
            own = self._own
            if own.end_reason:
                problem = f"this rank makes no further collectives: {own.end_reason}"
                raise CollectiveMismatchError(f"{full} (rank {self._rank} of {self._size})", problem) from self._error
            self._own = own = replace(own, begun={**own.begun, entry.group: count})
            if len(entry.members) == 1:
                return
            self._latest = call
            self._publish(replace(own, calls=(*own.calls, call)))
        try:
            self._wait(call, count, full)
        except dist.DistError as error:
            self._own = replace(self._own, end_reason="the store of the job is gone")  # nobody can read of it
            problem = f"the store of the job is gone, and so the process that hosted it, rank 0 as a rule: {error}"
            self._stop(full, problem, "a process that stays until the last collective of all ranks")
        with self._lock:  # not published: the next call does
            self._own = replace(self._own, calls=tuple(one for one in self._own.calls if one is not call))

    def close(self) -> None:
        """Publish that this rank makes no further calls, and why."""
        self._leave(exit_reason())

    def _leave(self, reason: str) -> None:
        with self._lock:
            if self._own.end_reason:
                return
            latest = "" if self._latest is None else f"; its latest call was {self._latest}"
            # The store goes with the process that hosts it; then nobody is left who could read this.
            with suppress(dist.DistError):
                self._publish(replace(self._own, end_reason=reason + latest))

    def _wait(self, call: Call, count: int, full: Call) -> None:
        started, pause = time.monotonic(), _FIRST_PAUSE
        search, stopped = started + _SEARCH_EVERY, list[int]()
        while True:
            records = self._read(call.members)
            calls = _calls(records, call.group, count)
            if any(other != call for other in calls.values()) and difference(calls):
                self._disagree(full, count)
            missing = [r for r, record in records.items() if record.count(call.group) < count]
            # Twice the same: records are read one by one, and why a rank stopped may only show the second time.
            stopped, before = [r for r in calls if records[r].end_reason], stopped
            lost = stopped and before
            now = time.monotonic()
            if lost or (missing and now > search):
                self._search(full, count, missing)
                search = now + _SEARCH_EVERY
            if lost:
                self._stop(full, f"rank {stopped[0]} makes no further calls: {records[stopped[0]].end_reason}")
            if not missing and not stopped:
                return
            if missing and now - started > self._timeout:
                lines = {r: _latest(record) for r, record in self._read(missing).items()}
                self._stop(full, f"after {self._timeout:g} s {in_words(missing)} did not call:{_table(lines)}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _disagree(self, call: Call, count: int) -> NoReturn:
        """Raise for calls that differ, with those of the ranks that call within a moment and what they pass in full."""
        self._store.publish("data", call.data)
        until, calls = time.monotonic() + _ANSWER_WITHIN, dict[int, Call]()
        while True:
            found = _calls(self._read(call.members), call.group, count)
            full = self._store.read("data", [r for r, other in found.items() if other.is_brief()])
            calls = {r: replace(other, data=full.get(r, other.data)) for r, other in found.items()} | {self._rank: call}
            is_complete = len(calls) == len(call.members) and not any(other.is_brief() for other in calls.values())
            if is_complete or time.monotonic() > until:
                break
            time.sleep(_FIRST_PAUSE)
        self._stop(
            call,
            f"{in_words(call.members)} make different calls:{_table(calls)}\n  They differ in {difference(calls)}",
            "the same calls in the same order on every rank of a group, on data of one structure, shapes and dtypes",
            "no branch on the rank around a collective; on the ranks named here, the call that the others make",
        )

    def _search(self, call: Call, count: int, missing: Collection[int]) -> None:
        """Raise if a member that has not made the call will not make it."""
        ended = {r: process for r in missing if (process := self._ended(r))}
        # Read after that, so that what a rank published before it ended is seen.
        records = self._read(range(self._size))
        circle = _circle(records, self._rank)
        if circle:
            again = self._read(circle)
            # Records that stand still from one reading to the next were all true at one moment between the two.
            if all(again[r].begun == records[r].begun for r in circle):
                after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
                lines = {r: f"{records[r].calls[0]}, waits for rank {after[r]}" for r in circle}
                self._stop(
                    call,
                    f"ranks wait for each other in different calls:{_table(lines)}",
                    "calls of several groups, and messages, in an order in which every rank can get to each of them",
                    "the same order on all ranks that share groups; of two ranks, one sends while the other receives",
                )
        for r in missing:
            record = records[r]
            if record.count(call.group) < count and record.end_reason:
                self._stop(call, f"rank {r} does not call: {record.end_reason}")
            if record.count(call.group) < count and r in ended:
                self._stop(call, f"rank {r} does not call: its process ({ended[r]}) has ended; {_latest(record)}")

    def _stop(self, call: Call, problem: str, expected: str = _EXPECTED, suggestion: str = _SUGGESTION) -> NoReturn:
        """Raise, and make no further calls: the ranks are out of step from here on."""
        self._leave(f"it raised CollectiveMismatchError: {problem.splitlines()[0].rstrip(':')}")
        request = f"{call} (rank {self._rank} of {self._size})"
        self._error = CollectiveMismatchError(request, problem, expected, suggestion)
        raise self._error

    def _ended(self, rank: int) -> str:
        """The process of a rank of this node if it has ended, as text; empty if it lives or cannot be seen."""
        there, pid = self._store.read("process", [rank]).get(rank, ("", 0))
        if there == node():
            try:
                os.kill(pid, 0)  # sends nothing
            except ProcessLookupError:
                return f"pid {pid}"
            except PermissionError:
                pass  # it lives, as another user
        return ""

    def _publish(self, record: _Record) -> None:
        self._own = record
        self._store.publish("record", record.to_json())

    def _read(self, ranks: Collection[int]) -> dict[int, _Record]:
        found = self._store.read("record", [r for r in ranks if r != self._rank])
        records = {r: _Record.from_json(value) for r, value in found.items()} | {self._rank: self._own}
        return {r: records.get(r, _Record()) for r in ranks}


def difference(calls: Mapping[int, Call]) -> str:
    """Where the calls differ, a line for each fact; empty if they agree.

    Args:
        calls: by rank.
    """
    lines = []
    for name in dict.fromkeys(name for call in calls.values() for name in call.facts):
        values = {rank: call.facts.get(name, "none") for rank, call in calls.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{name}: {_by_value(values)}")
    if lines and lines[0].startswith("operation"):  # what other operations are given says nothing more
        return lines[0]
    texts = {rank: call.data for rank, call in calls.items() if call.data}
    if len(set(texts.values())) > 1:  # and what the user passes says more than the buffers that it became
        shortest = min(map(len, texts.values()))
        first = next((i for i in range(shortest) if len({text[i] for text in texts.values()}) > 1), shortest)
        return f"data: {_by_value({rank: _window(text, first) for rank, text in texts.items()})}"
    return "; ".join(lines)


def _table(lines: Mapping[int, object]) -> str:
    """A line for each rank, in order."""
    return "".join(f"\n    rank {rank}: {line}" for rank, line in sorted(lines.items()))


def _by_value(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {in_words(having)}" for value, having in ranks.items())


def _window(text: str, middle: int) -> str:
    """Of a long text the part around a place."""
    start, end = max(0, middle - _WINDOW // 2), middle + _WINDOW // 2
    if len(text) <= _WINDOW:
        return text
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def _calls(records: Mapping[int, _Record], group: str, count: int) -> dict[int, Call]:
    """The calls of the ranks that are in call number ``count`` of the group."""
    begun = ((r, call) for r, record in records.items() if record.count(group) == count for call in record.calls)
    return {r: call for r, call in begun if call.group == group}


def _circle(records: Mapping[int, _Record], start: int) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first, ``start``; empty if there are none."""
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop(0)
        for r in _waits_for(records, path[-1]):
            if r == start:
                return path
            if r not in seen:
                seen.add(r)
                paths.append([*path, r])
    return []


def _waits_for(records: Mapping[int, _Record], rank: int) -> list[int]:
    """The members of the rank's call who have not begun it."""
    record = records[rank]
    if len(record.calls) != 1:
        return []
    group, count = record.calls[0].group, record.count(record.calls[0].group)
    return [r for r in record.calls[0].members if records[r].count(group) < count]


def _latest(record: _Record) -> str:
    if not record.calls:
        return "it has made no checked call (are calls checked on every rank?)"
    return f"its latest call was {record.calls[-1]}, with {in_words(record.calls[-1].members)}"
