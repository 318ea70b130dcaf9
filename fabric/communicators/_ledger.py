"""What every rank of a job is calling, in the job's store.

[Note: Arrivals] Each rank has one entry in the store, which it overwrites when it begins a call: how many calls it has
begun in each group, and what the latest is. In its call number n of a group a rank waits until every member has begun
its own call number n there, and compares. It moves on when all are there and agree, which is why a member that is
found further on must have agreed: it saw this rank's entry first. So nobody has to keep an entry for a rank that is
slow to read it, groups run ahead of each other freely, and each rank waits for all members of one group at a time. A
circle of ranks that wait for each other, in whatever groups, is then a deadlock, and the only kind there is: every
other wait ends, or ends at a rank that has left.
"""

import json
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from fabric.communicators._calls import Call, difference, in_words, table
from fabric.errors import CollectiveMismatchError

__all__ = ["Ledger"]

_FIRST_PAUSE, _LONGEST_PAUSE, _SEARCH_EVERY = 0.00005, 0.005, 0.05  # seconds
_ANSWER_WITHIN = 0.3  # seconds, in which other ranks come and tell what they pass
_INLINE = 120  # characters of what is passed that an entry holds itself; of more it holds the beginning and a digest
_BRIEF = "... #"


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one rank tells of itself.

    Attributes:
        number: how many calls it has begun, in all groups.
        begun: how many in each group.
        group: that of its latest call.
        members: of that group.
        call: its latest.
        left: why it makes no further calls; empty while it does.
        done: whether the latest call was found to agree; only told when it leaves.
    """

    number: int = 0
    begun: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    members: tuple[int, ...] = ()
    call: Call | None = None
    left: str = ""
    done: bool = True

    def stands_in(self, group: str) -> int:
        """How many calls of the group it has begun."""
        return self.begun.get(group, 0)

    def in_call(self, group: str, count: int) -> bool:
        """Whether its latest call is this one, rather than one after it."""
        return self.group == group and self.stands_in(group) == count

    def to_json(self) -> str:
        """The entry as text; most entries are written once a call, so it is short."""
        call = self.call
        told = None if call is None else [call.operation, call.where, call.facts, call.data]
        return json.dumps([self.number, self.begun, self.group, self.members, told, self.left, self.done])

    @classmethod
    def from_json(cls, text: bytes) -> "_Entry":
        """The entry that became this text."""
        number, begun, group, members, told, left, done = json.loads(text)
        return cls(number, begun, group, tuple(members), None if told is None else Call(*told), left, done)

    def waits_for(self, other: "_Entry") -> bool:
        """Whether a member of its latest call, with the entry ``other``, has not begun it."""
        return other.stands_in(self.group) < self.stands_in(self.group)


class Ledger:
    """One process's view of what the ranks of a job call; used by one thread at a time.

    Args:
        store: shared by the ranks of the job, and used for nothing else.
        rank: of this process.
        size: number of ranks.
        timeout: how long a rank may keep the others waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._timeout = timeout.total_seconds()
        self._own = _Entry()
        self._begun: dict[str, int] = {}
        self._present: set[int] = set()
        store.set(f"process/{rank}", json.dumps([_node(), os.getpid()]))
        self._write(self._own)

    def meet(self, group: str, members: Sequence[int], call: Call) -> int:
        """Wait until all members of a group make this call; the number of the call in the group, from 1.

        Raises:
            CollectiveMismatchError: a member makes another call, waits elsewhere for this rank, or does not come.
        """
        if self._own.left:
            self._refuse(call)
        count = self._begun[group] = self._begun.get(group, 0) + 1
        if len(members) > 1:
            entry = _Entry(self._own.number + 1, self._begun, group, tuple(members), _brief(call), done=False)
            self._own = entry
            self._write(entry)
            try:
                self._wait(call, count)
            except dist.DistError as error:
                self._stop(call, f"the store of the job is gone: {error}", "a store that outlives the calls", _LOOK)
            self._own = replace(entry, done=True)
        return count

    def leave(self, reason: str) -> None:
        """Tell the others that this rank makes no further calls; only the first reason counts."""
        if self._own.left:
            return
        self._own = replace(self._own, left=reason)
        # The store goes with the process that hosts it; then nobody is left who could read this.
        with suppress(dist.DistError):
            self._write(self._own)

    def _wait(self, call: Call, count: int) -> None:
        started, pause = time.monotonic(), _FIRST_PAUSE
        search = started + _SEARCH_EVERY
        while True:
            entries = self._read(self._own.members)
            here = {r: entry for r, entry in entries.items() if entry.in_call(self._own.group, count)}
            if any(entry.call != self._own.call for entry in here.values()) and difference(_calls_of(here)):
                self._disagree(call, count)
            gave_up = [r for r, entry in here.items() if entry.left and not entry.done]
            missing = [r for r in entries if entries[r].stands_in(self._own.group) < count]
            now = time.monotonic()
            if gave_up or (missing and now > search):
                self._search(call, missing)
                search = now + _SEARCH_EVERY
            for r in gave_up:
                self._stop(call, f"rank {r} gave up in the same call: {entries[r].left}", _COME, _LOOK)
            if not missing:
                return
            if now - started > self._timeout:
                self._stop(call, *self._late(missing))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _disagree(self, call: Call, count: int) -> NoReturn:
        """Raise for calls that differ, with those of the ranks that come within a moment and what they pass in full."""
        self._store.set(f"data/{self.rank}", call.data)
        until, calls = time.monotonic() + _ANSWER_WITHIN, dict[int, Call]()
        while True:
            entries = self._read(self._own.members)
            here = _calls_of({r: entry for r, entry in entries.items() if entry.in_call(self._own.group, count)})
            calls = {r: self._in_full(r, here[r]) for r in here} | {self.rank: call}
            told = len(here) == len(entries) and not any(_is_brief(one) for one in calls.values())
            if told or time.monotonic() > until:
                break
            time.sleep(_FIRST_PAUSE)
        self._stop(
            call,
            f"the ranks of {self._named(self._own)} make different calls:{table(calls)}\n"
            f"  They differ in {difference(calls)}",
            "the same calls in the same order on every rank of a group, on data of one structure, shapes and dtypes",
            "no branch on the rank around a collective; on the ranks named here, the call that the others make",
        )

    def _in_full(self, rank: int, call: Call) -> Call:
        """The call with all that is passed, if the rank has told it by now."""
        key = f"data/{rank}"
        told = _is_brief(call) and self._store.check([key])
        return replace(call, data=self._store.get(key).decode()) if told else call

    def _search(self, call: Call, missing: Collection[int]) -> None:
        """Raise if a member that is not here will not come."""
        ended = {r: process for r in missing if (process := self._ended(r))}
        # Read after that, so that what a rank wrote before it ended is seen.
        entries = self._read(range(self.size))
        circle = _circle(entries, self.rank)
        if circle:
            again = self._read(circle)
            # Entries that stand still from one reading to the next were all true at one moment between the two.
            if all(again[r].number == entries[r].number for r in circle):
                self._stop(call, *self._deadlock(entries, circle))
        for r in missing:
            entry = entries[r]
            if self._own.waits_for(entry) and (entry.left or r in ended):
                reason = entry.left or f"its process ({ended[r]}) has ended"
                self._stop(call, f"rank {r} does not come: {reason}; {self._latest(entry)}", _COME, _LOOK)

    def _deadlock(self, entries: Mapping[int, _Entry], circle: Sequence[int]) -> tuple[str, str, str]:
        after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
        lines = {r: f"{entries[r].call} in {self._named(entries[r])}, waits for rank {after[r]}" for r in circle}
        return (
            f"the ranks wait for each other in different calls:{table(lines)}",
            "calls of different groups, and messages, in an order in which every rank can get to each of them",
            "the calls in the same order on all ranks that share a group; one rank sends while the other receives",
        )

    def _late(self, missing: Collection[int]) -> tuple[str, str, str]:
        entries = self._read(missing)
        lines = {r: self._latest(entries[r]) for r in missing}
        return f"after {self._timeout:g} s {in_words(list(missing))} did not come:{table(lines)}", _COME, _LOOK

    def _latest(self, entry: _Entry) -> str:
        if not entry.number:
            return "it has made no checked call (are calls checked on every rank?)"
        return f"its latest call was {entry.call} in {self._named(entry)}"

    def _named(self, entry: _Entry) -> str:
        return "the job" if len(entry.members) == self.size else f"the group of ranks {list(entry.members)}"

    def _stop(self, call: Call, wrong: str, valid: str, instead: str) -> NoReturn:
        """Raise, and make no further calls: the ranks are out of step from here on."""
        self.leave(f"it raised CollectiveMismatchError in {call}: {wrong.splitlines()[0]}")
        raise CollectiveMismatchError(f"{call} (rank {self.rank} of {self.size})", wrong, valid, instead)

    def _refuse(self, call: Call) -> NoReturn:
        raise CollectiveMismatchError(
            f"{call} (rank {self.rank} of {self.size})",
            f"this rank makes no further collectives: {self._own.left}",
            "collectives before the first error and before teardown()",
            "see the first CollectiveMismatchError; the job has to start again after it",
        )

    def _ended(self, rank: int) -> str:
        """The process of a rank of this node if it has ended, as text; empty if it lives or cannot be seen."""
        if not self._store.check([f"process/{rank}"]):
            return ""
        node, pid = json.loads(self._store.get(f"process/{rank}"))
        if node == _node():
            try:
                os.kill(pid, 0)  # sends nothing
            except ProcessLookupError:
                return f"pid {pid}"
            except PermissionError:
                pass  # it lives, as another user
        return ""

    def _write(self, entry: _Entry) -> None:
        self._store.set(f"entry/{self.rank}", entry.to_json())

    def _read(self, ranks: Collection[int]) -> dict[int, _Entry]:
        entries = {r: _Entry() if r != self.rank else self._own for r in ranks}
        self._present |= {r for r in ranks if r not in self._present and self._store.check([f"entry/{r}"])}
        others = [r for r in ranks if r in self._present and r != self.rank]
        texts = self._store.multi_get([f"entry/{r}" for r in others]) if others else []
        return entries | {r: _Entry.from_json(text) for r, text in zip(others, texts, strict=True)}


_COME = "a call that every rank of the group reaches"
_LOOK = (
    "the call outside of any branch on the rank and of loops that differ in length; see what ended the rank named here"
)


def _calls_of(entries: Mapping[int, _Entry]) -> dict[int, Call]:
    return {r: entry.call for r, entry in entries.items() if entry.call is not None}


def _circle(entries: Mapping[int, _Entry], start: int) -> list[int]:
    """Ranks of which each waits for the next, and the last for the first, ``start``; empty if there are none."""
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop(0)
        entry = entries[path[-1]]
        for r in entry.members:
            if r != path[-1] and entry.waits_for(entries[r]):
                if r == start:
                    return path
                if r not in seen:
                    seen.add(r)
                    paths.append([*path, r])
    return []


def _brief(call: Call) -> Call:
    """The call with a digest in the place of the end of a long text, so that an entry stays small."""
    if len(call.data) <= _INLINE:
        return call
    digest = blake2b(call.data.encode(), digest_size=8).hexdigest()
    return replace(call, data=f"{call.data[:_INLINE]}{_BRIEF}{digest}")


def _is_brief(call: Call) -> bool:
    return _BRIEF in call.data[_INLINE:]


@cache
def _node() -> str:
    """What tells the processes that see each other by their ids from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not a Linux
        return socket.gethostname()
