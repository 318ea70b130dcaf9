"""What every rank of a job is calling, in the job's store.

[Note: Arrivals] Each rank has one entry in the store, which it overwrites when it begins a call: how many calls it has
begun in each group, and what the latest is. In its call number n of a group a rank waits until every member has begun
its own call number n there, and compares. It moves on when all are there and agree, which is why a member that is
found further on must have agreed: it saw this rank's entry first. So nobody has to keep an entry for a rank that is
slow to read it, groups run ahead of each other freely, and each rank waits for all members of one group at a time. A
circle of ranks that wait for each other, in whatever groups, is then a deadlock, and the only kind there is: every
other wait ends, or ends at a rank that has left. (A rank that waits in several threads may still come by any of them,
and counts as one that computes.)
"""

import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from fabric.communicators import Collective, Operation
from fabric.diagnostics._calls import Call, difference, in_words, table
from fabric.diagnostics.recorder import Entry
from fabric.diagnostics.stacks import exit_reason, node
from fabric.errors import CollectiveMismatchError

__all__ = ["CollectiveChecker"]

_FIRST_PAUSE, _LONGEST_PAUSE, _SEARCH_EVERY = 0.00005, 0.005, 0.05  # seconds
_ANSWER_WITHIN = 0.3  # seconds, in which other ranks come and tell what they pass
_INLINE = 120  # characters of what is passed that an entry holds itself; of more it holds the beginning and a digest
_BRIEF = "... #"

_COME = "a call that every rank of the group reaches"
_LOOK = (
    "the call outside of any branch on the rank and of loops that differ in length; see what ended the rank named here"
)


@dataclass(frozen=True, slots=True)
class _Place:
    """A call that a rank has begun, in a group of these ranks."""

    group: str
    members: tuple[int, ...]
    call: Call

    def __str__(self) -> str:
        return f"{self.call}, with {in_words(self.members)}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one rank tells of itself.

    Attributes:
        begun: how many calls it has begun in each group.
        places: its latest call; of a rank that waits in several threads, that of each.
        left: why it makes no further calls; empty while it does.
    """

    begun: Mapping[str, int] = field(default_factory=dict)
    places: tuple[_Place, ...] = ()
    left: str = ""

    def to_json(self) -> str:
        """The entry as text; one is written at each call, so it is short."""
        places = [[p.group, p.members, p.call.operation, p.call.where, p.call.facts, p.call.data] for p in self.places]
        return json.dumps([self.begun, places, self.left], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: bytes) -> "_Entry":
        """The entry that became this text."""
        begun, places, left = json.loads(text)
        return cls(begun, tuple(_Place(group, tuple(ranks), Call(*call)) for group, ranks, *call in places), left)

    def count(self, group: str) -> int:
        """How many calls of the group it has begun."""
        return self.begun.get(group, 0)


class CollectiveChecker:
    """One process's view of what the ranks of a job call.

    Args:
        store: shared by the ranks of the job, and used for nothing else.
        rank: of this process.
        size: number of ranks.
        timeout: how long a rank may keep the others waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        self._own = _Entry()
        self._latest: _Place | None = None
        self._error: CollectiveMismatchError | None = None
        self._present: set[int] = set()
        store.set(f"process/{rank}", json.dumps([node(), os.getpid()]))
        self._write(self._own)

    def check(self, entry: Entry, collective: Collective) -> None:
        """Wait until all members of the group make this call.

        Raises:
            CollectiveMismatchError: a member makes another call, waits elsewhere for this rank, or does not call.
        """
        self.meet(entry.group, entry.members, _call(entry, collective))

    def close(self) -> None:
        """Tell the others that this rank makes no further calls, and why."""
        self.leave(exit_reason())

    def meet(self, group: str, members: Sequence[int], call: Call) -> int:
        """Wait until all members of a group make this call; the number of the call in the group, from 1.

        Raises:
            CollectiveMismatchError: a member makes another call, waits elsewhere for this rank, or does not come.
        """
        place = _Place(group, tuple(members), _brief(call))
        with self._lock:
            own = self._own
            if own.left:
                self._refuse(call)
            count = own.count(group) + 1
            self._own = own = replace(own, begun={**own.begun, group: count})
            if len(members) == 1:
                return count
            self._latest = place
            self._write(replace(own, places=(*own.places, place)))
        try:
            self._wait(place, count, call)
        except dist.DistError as error:
            self._own = replace(self._own, left="the store of the job is gone")  # nobody can be told
            wrong = f"the store of the job is gone, and so the process that hosted it, rank 0 as a rule: {error}"
            self._stop(call, wrong, "a process that stays until the last collective of all ranks")
        with self._lock:  # not written: the next call tells it
            self._own = replace(self._own, places=tuple(one for one in self._own.places if one is not place))
        return count

    def leave(self, reason: str) -> None:
        """Tell the others that this rank makes no further calls; only the first reason counts."""
        with self._lock:
            if self._own.left:
                return
            latest = "" if self._latest is None else f"; its latest call was {self._latest}"
            # The store goes with the process that hosts it; then nobody is left who could read this.
            with suppress(dist.DistError):
                self._write(replace(self._own, left=reason + latest))

    def _wait(self, place: _Place, count: int, call: Call) -> None:
        started, pause = time.monotonic(), _FIRST_PAUSE
        search, gave_up = started + _SEARCH_EVERY, list[int]()
        while True:
            entries = self._read(place.members)
            calls = _calls(entries, place.group, count)
            if any(other != place.call for other in calls.values()) and difference(calls):
                self._disagree(place, count, call)
            missing = [r for r, entry in entries.items() if entry.count(place.group) < count]
            # Twice the same: entries are read one by one, and what made a rank give up may only show the second time.
            gave_up, before = [r for r in calls if entries[r].left], gave_up
            lost = gave_up and before
            now = time.monotonic()
            if lost or (missing and now > search):
                self._search(call, place, count, missing)
                search = now + _SEARCH_EVERY
            if lost:
                self._stop(call, f"rank {gave_up[0]} gave up: {entries[gave_up[0]].left}")
            if not missing and not gave_up:
                return
            if missing and now - started > self._timeout:
                lines = {r: _latest(entry) for r, entry in self._read(missing).items()}
                self._stop(call, f"after {self._timeout:g} s {in_words(missing)} did not call:{table(lines)}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _disagree(self, place: _Place, count: int, call: Call) -> NoReturn:
        """Raise for calls that differ, with those of the ranks that come within a moment and what they pass in full."""
        self._store.set(f"data/{self.rank}", call.data)
        until, calls = time.monotonic() + _ANSWER_WITHIN, {}
        while True:
            here = _calls(self._read(place.members), place.group, count)
            calls = {r: self._in_full(r, other) for r, other in here.items()} | {self.rank: call}
            told = len(calls) == len(place.members) and not any(map(_is_brief, calls.values()))
            if told or time.monotonic() > until:
                break
            time.sleep(_FIRST_PAUSE)
        self._stop(
            call,
            f"{in_words(place.members)} make different calls:{table(calls)}\n  They differ in {difference(calls)}",
            "the same calls in the same order on every rank of a group, on data of one structure, shapes and dtypes",
            "no branch on the rank around a collective; on the ranks named here, the call that the others make",
        )

    def _in_full(self, rank: int, call: Call) -> Call:
        """The call with all that is passed, if the rank has told it by now."""
        key = f"data/{rank}"
        told = _is_brief(call) and self._store.check([key])
        return replace(call, data=self._store.get(key).decode()) if told else call

    def _search(self, call: Call, place: _Place, count: int, missing: Collection[int]) -> None:
        """Raise if a member that is not here will not come."""
        ended = {r: process for r in missing if (process := self._ended(r))}
        # Read after that, so that what a rank wrote before it ended is seen.
        entries = self._read(range(self.size))
        circle = _circle(entries, self.rank)
        if circle:
            again = self._read(circle)
            # Entries that stand still from one reading to the next were all true at one moment between the two.
            if all(again[r].begun == entries[r].begun for r in circle):
                after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
                lines = {r: f"{entries[r].places[0]}, waits for rank {after[r]}" for r in circle}
                self._stop(
                    call,
                    f"ranks wait for each other in different calls:{table(lines)}",
                    "calls of several groups, and messages, in an order in which every rank can get to each of them",
                    "the same order on all ranks that share groups; of two ranks, one sends while the other receives",
                )
        for r in missing:
            entry = entries[r]
            if entry.count(place.group) < count and entry.left:
                self._stop(call, f"rank {r} does not come: {entry.left}")
            if entry.count(place.group) < count and r in ended:
                self._stop(call, f"rank {r} does not come: its process ({ended[r]}) has ended; {_latest(entry)}")

    def _stop(self, call: Call, wrong: str, valid: str = _COME, instead: str = _LOOK) -> NoReturn:
        """Raise, and make no further calls: the ranks are out of step from here on."""
        self.leave(f"it raised CollectiveMismatchError: {wrong.splitlines()[0].rstrip(':')}")
        self._error = CollectiveMismatchError(f"{call} (rank {self.rank} of {self.size})", wrong, valid, instead)
        raise self._error

    def _refuse(self, call: Call) -> NoReturn:
        raise CollectiveMismatchError(
            f"{call} (rank {self.rank} of {self.size})",
            f"this rank makes no further collectives: {self._own.left}",
            "collectives before the first error and before teardown()",
            "see the first CollectiveMismatchError; the job has to start again after it",
        ) from self._error

    def _ended(self, rank: int) -> str:
        """The process of a rank of this node if it has ended, as text; empty if it lives or cannot be seen."""
        if not self._store.check([f"process/{rank}"]):
            return ""
        there, pid = json.loads(self._store.get(f"process/{rank}"))
        if there == node():
            try:
                os.kill(pid, 0)  # sends nothing
            except ProcessLookupError:
                return f"pid {pid}"
            except PermissionError:
                pass  # it lives, as another user
        return ""

    def _write(self, entry: _Entry) -> None:
        self._own = entry
        self._store.set(f"entry/{self.rank}", entry.to_json())

    def _read(self, ranks: Collection[int]) -> dict[int, _Entry]:
        others = [r for r in ranks if r != self.rank]
        self._present |= {r for r in others if r not in self._present and self._store.check([f"entry/{r}"])}
        there = [r for r in others if r in self._present]
        texts = self._store.multi_get([f"entry/{r}" for r in there]) if there else []
        read = {r: _Entry.from_json(text) for r, text in zip(there, texts, strict=True)}
        return {r: self._own if r == self.rank else read.get(r, _Entry()) for r in ranks}


def _call(entry: Entry, collective: Collective) -> Call:
    kind, buffer, user = collective.operation, collective.buffer, collective.call
    data = "" if user is None else user.arguments()
    facts: dict[str, str] = {}
    if kind is Operation.SEND or kind is Operation.RECV:  # two ranks, and two operations
        facts = dict(zip(("from", "to"), entry.group.rpartition(" ")[2].split(">"), strict=True))
    else:
        facts["operation"] = entry.operation
        if user is not None and user.operation != kind.value:
            facts["collective"] = kind.value
        if collective.reduce is not None:
            facts["op"] = collective.reduce.value
        if collective.peer is not None:
            facts["dst" if kind is Operation.GATHER else "src"] = str(collective.peer)
        if collective.name:
            facts["name"] = repr(collective.name)
        if kind is Operation.NEW_GROUP:
            facts["ranks"] = str(buffer)
    if isinstance(buffer, Tensor):
        facts |= {"dtype": str(buffer.dtype).removeprefix("torch."), "shape": str(tuple(buffer.shape))}
    operation = kind.value if "from" in facts else entry.operation
    return Call(operation, entry.location, facts, data)


def _calls(entries: Mapping[int, _Entry], group: str, count: int) -> dict[int, Call]:
    """The calls of the ranks that are in call number ``count`` of the group."""
    places = ((r, place) for r, entry in entries.items() if entry.count(group) == count for place in entry.places)
    return {r: place.call for r, place in places if place.group == group}


def _circle(entries: Mapping[int, _Entry], start: int) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first, ``start``; empty if there are none."""
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop(0)
        for r in _waits_for(entries, path[-1]):
            if r == start:
                return path
            if r not in seen:
                seen.add(r)
                paths.append([*path, r])
    return []


def _waits_for(entries: Mapping[int, _Entry], rank: int) -> list[int]:
    """The members of the rank's call who have not begun it."""
    entry = entries[rank]
    if len(entry.places) != 1:
        return []
    group, count = entry.places[0].group, entry.count(entry.places[0].group)
    return [r for r in entry.places[0].members if entries[r].count(group) < count]


def _latest(entry: _Entry) -> str:
    if not entry.places:
        return "it has made no checked call (are calls checked on every rank?)"
    return f"its latest call was {entry.places[-1]}"


def _brief(call: Call) -> Call:
    """The call with a digest in the place of the end of a long text, so that an entry stays small."""
    if len(call.data) <= _INLINE:
        return call
    digest = blake2b(call.data.encode(), digest_size=8).hexdigest()
    return replace(call, data=f"{call.data[:_INLINE]}{_BRIEF}{digest}")


def _is_brief(call: Call) -> bool:
    return call.data.startswith(_BRIEF, _INLINE)
