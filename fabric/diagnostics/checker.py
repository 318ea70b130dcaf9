"""Checked mode: compares the calls of all ranks before any data is sent.

[Note: Progress] Each rank publishes one record, which it overwrites when it starts a call: how many calls it has
started in each group, and the latest call. In call number n of a group, a rank waits until every member has started its
call number n there, and compares them. It continues once all have started and agree. So a member that is already
further must have agreed: it saw this rank's record first. Hence records need not be kept for slow readers, groups
progress independently, and each rank waits for all members of one group at a time. A cycle of ranks that wait for each
other, in any groups, is then a deadlock, and the only kind: every other wait ends, or leads to a rank that makes no
further calls. (A rank that waits in several threads may continue in any of them, and counts as computing.)
"""

import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b
from itertools import pairwise
from time import monotonic, sleep
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from fabric.communicators import Collective, Operation
from fabric.communicators.base import CallDescription
from fabric.diagnostics.call_site import user_call
from fabric.diagnostics.recorder import Entry, ranks_in_words
from fabric.diagnostics.stacks import exit_reason, has_ended, node
from fabric.errors import CollectiveMismatchError
from fabric.store import JobStore

__all__ = ["Call", "CollectiveChecker", "difference"]

# seconds
_FIRST_PAUSE = 0.00005
_LONGEST_PAUSE = 0.005
_SEARCH_EVERY = 0.05
_ANSWER_WITHIN = 0.3  # seconds for other ranks to make their call and publish its arguments
_INLINE = (
    120  # most characters of arguments in a record; longer ones become their beginning and a digest
)
_DIGEST = "... #"
# characters of arguments shown: with a call, around the first difference
_SHOWN = 160
_WINDOW = 60

_PHASES = "phases"  # the group of phases, in which torch issues collectives by itself

_EXPECTED = "a call that every rank of the group makes"
_SUGGESTION = "the call outside of branches on the rank and loops of other lengths; see what ended the rank named here"


class Call(NamedTuple):
    """One call of a collective on one rank.

    Attributes:
        group: of the call.
        members: the global ranks that must make it.
        operation: its name, as the user called it.
        location: file and line of the user's call.
        facts: what must be the same on every rank, by name, the most informative difference first.
        data: the arguments as text; the same on all ranks that have any, and empty on the others.
    """

    group: str
    members: Sequence[int]
    operation: str
    location: str
    facts: Mapping[str, str]
    data: str

    @classmethod
    def of(cls, entry: Entry, collective: Collective) -> "Call":
        """The call of an entry of the flight recorder."""
        facts = collective.facts
        data = "" if collective.call is None else collective.call.arguments()
        if collective.operation in (
            Operation.SEND,
            Operation.RECV,
        ):  # two ranks, and two operations
            ends = {"from": str(entry.members[0]), "to": str(entry.members[1])}
            facts = ends | {name: facts[name] for name in ("dtype", "shape")}
        return cls(
            entry.group, tuple(entry.members), entry.operation, str(entry.call_site), facts, data
        )

    def __str__(self) -> str:
        arguments = (
            f"{name}={value}"
            for name, value in self.facts.items()
            if name not in ("operation", "collective")
        )
        shown = _window(self.data, 0, _SHOWN) or ", ".join(arguments)
        return f"{self.operation}{shown and f'({shown})'} at {self.location}"


class _Record(NamedTuple):
    """What one rank publishes.

    Attributes:
        begun: number of calls started in each group.
        calls: its latest call; if it waits in several threads, one for each.
        end_reason: why it makes no further calls; empty while it does.
    """

    begun: Mapping[str, int]
    calls: tuple[Call, ...]
    end_reason: str

    def count(self, group: str) -> int:
        return self.begun.get(group, 0)


_NO_CALLS = _Record({}, (), "")


class CollectiveChecker:
    """Compares the calls of this rank with those of the others; see ``[Note: Progress]``.

    After the first error the ranks are out of sync, and every further call raises.

    Args:
        store: shared by the ranks of the job, used for nothing else.
        rank: of this process.
        size: number of ranks.
        timeout: how long a rank may keep the others waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = JobStore(store, rank, size)
        self._rank = rank
        self._size = size
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        self._own = _NO_CALLS
        self._latest: Call | None = None
        self._error: CollectiveMismatchError | None = None
        self._store.publish("process", [node(), os.getpid()])

    def check(self, entry: Entry, collective: Collective) -> None:
        """Wait until all members of the group make this call.

        Raises:
            CollectiveMismatchError: a member makes another call, waits elsewhere for this rank, or makes none.
        """
        full = call = Call.of(entry, collective)
        if len(full.data) > _INLINE:  # so that a record stays small
            digest = blake2b(full.data.encode(), digest_size=8).hexdigest()
            call = full._replace(data=f"{full.data[:_INLINE]}{_DIGEST}{digest}")
        with self._lock:
            own = self._own
            if own.end_reason:
                problem = f"this rank makes no further collectives: {own.end_reason}"
                raise CollectiveMismatchError(
                    f"{full} (rank {self._rank} of {self._size})", problem
                ) from self._error
            self._latest = call
            self._publish(_Record({**own.begun, entry.group: entry.number}, (*own.calls, call), ""))
        try:
            self._wait(full, entry.number)
        except dist.DistError as error:
            self._stop(
                full,
                f"the store of the job is gone, and the process that hosted it, rank 0 as a rule: {error}",
            )
        with self._lock:  # not published: the next call does
            self._own = self._own._replace(
                calls=tuple(one for one in self._own.calls if one is not call)
            )

    def check_phase(self, phase: str) -> None:
        """Wait until all ranks start a phase in which torch issues collectives; raises like :meth:`check`."""
        number = self._own.count(_PHASES) + 1
        place = user_call(sys._getframe(1))
        entry = Entry(_PHASES, range(self._size), number, phase, "", place)
        self.check(entry, Collective(Operation.BARRIER, call=CallDescription(phase)))

    def close(self, reason: str = "") -> None:
        """Publish that this rank makes no further calls, and why; by default, that it finished or raised."""
        with self._lock:
            if self._own.end_reason:
                return
            latest = "" if self._latest is None else f"; its latest call was {self._latest}"
            # The process that hosts the store may have ended, and no rank could read this.
            with suppress(dist.DistError):
                self._publish(self._own._replace(end_reason=(reason or exit_reason()) + latest))

    def _wait(self, call: Call, number: int) -> None:
        """Wait until all members start call ``number`` of the group; raise if they never will, or differ."""
        started = monotonic()
        pause = _FIRST_PAUSE
        next_search = started + _SEARCH_EVERY
        searches = False
        missing = list[int]()
        while True:
            # Read before the records, so that a rank's last record is not missed.
            processes = self._store.read("process", missing if searches else [])
            ended = {r: pid for r, (there, pid) in processes.items() if has_ended(there, pid)}
            records = self._read(range(self._size) if searches else call.members)
            calls = _calls(records, call.group, number)
            if difference(calls):
                self._disagree(call, number)
            if searches:
                self._check_circle(call, records)
            missing = [r for r in call.members if records[r].count(call.group) < number]
            stopped = [r for r in (*missing, *calls) if records[r].end_reason]
            if not missing and not stopped:
                return
            # Not after the first read: records are read one by one, and another may have the root cause.
            if stopped and searches:
                self._stop(
                    call,
                    f"rank {stopped[0]} makes no further calls: {records[stopped[0]].end_reason}",
                )
            for r in ended.keys() & set(missing):
                problem = f"rank {r} does not call: its process (pid {ended[r]}) has ended; {_latest(records[r])}"
                self._stop(call, problem)
            now = monotonic()
            if missing and now - started > self._timeout:
                latest = _table({r: _latest(records[r]) for r in missing})
                self._stop(
                    call,
                    f"after {self._timeout:g} s {ranks_in_words(missing)} did not call:{latest}",
                )
            searches = bool(stopped) or now > next_search
            if searches:
                next_search = now + _SEARCH_EVERY
            else:
                sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _disagree(self, call: Call, number: int) -> NoReturn:
        """Raise for different calls; lists, with full arguments, those of ranks that call within ``_ANSWER_WITHIN``."""
        with self._lock:
            own = tuple(call if one.group == call.group else one for one in self._own.calls)
            self._publish(self._own._replace(calls=own))
        until = monotonic() + _ANSWER_WITHIN
        calls = dict[int, Call]()
        while monotonic() < until:
            calls = _calls(self._read(call.members), call.group, number)
            if len(calls) == len(call.members) and not any(
                _DIGEST in one.data for one in calls.values()
            ):
                break
            sleep(_FIRST_PAUSE)
        ranks = ranks_in_words(call.members)
        problem = f"{ranks} make different calls:{_table(calls)}"
        self._stop(
            call,
            f"{problem}\n  They differ in {difference(calls)}",
            "the same calls in the same order on every rank of a group, on data of one structure, shapes and dtypes",
            "no branch on the rank around a collective; on the ranks named here, the call that the others make",
        )

    def _check_circle(self, call: Call, records: Mapping[int, _Record]) -> None:
        """Raise if this rank waits for ranks that wait for each other."""
        waits_for = dict[int, list[int]]()
        pending = [self._rank]
        while pending:
            rank = pending.pop()
            record = records[rank]
            # A rank that waits in several threads may continue in any.
            calls = record.calls if len(record.calls) == 1 else ()
            waits_for[rank] = [
                r
                for call in calls
                for r in call.members
                if records[r].count(call.group) < record.count(call.group)
            ]
            pending += [r for r in waits_for[rank] if r not in waits_for]
        try:
            TopologicalSorter(waits_for).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]  # the first one is also the last
        else:
            return
        again = self._read(circle)
        # Records that are unchanged between two reads were all valid at the same moment.
        if all(again[rank].begun == records[rank].begun for rank in circle):
            lines = {
                rank: f"{records[rank].calls[0]}, waits for rank {after}"
                for rank, after in pairwise(circle)
            }
            self._stop(
                call,
                f"ranks wait for each other in different calls:{_table(lines)}",
                "calls of several groups, messages, and phases such as a backward pass, in one order on all ranks",
                "no branch on the rank around any of them; of two ranks, one sends while the other receives",
            )

    def _stop(
        self, call: Call, problem: str, expected: str = _EXPECTED, suggestion: str = _SUGGESTION
    ) -> NoReturn:
        """Raise, and make no further calls: the ranks are now out of sync."""
        self.close(f"it raised CollectiveMismatchError: {problem.splitlines()[0].rstrip(':')}")
        request = f"{call} (rank {self._rank} of {self._size})"
        self._error = CollectiveMismatchError(request, problem, expected, suggestion)
        raise self._error

    def _publish(self, record: _Record) -> None:
        self._own = record
        self._store.publish("record", record)

    def _read(self, ranks: Collection[int]) -> dict[int, _Record]:
        found = self._store.read("record", [r for r in ranks if r != self._rank])
        records = {
            r: _Record(begun, tuple(Call(*c) for c in calls), end)
            for r, (begun, calls, end) in found.items()
        }
        records[self._rank] = self._own
        return {r: records.get(r, _NO_CALLS) for r in ranks}


def difference(calls: Mapping[int, Call]) -> str:
    """The first fact in which the calls differ, as text; empty if they agree.

    Args:
        calls: by rank.
    """
    names = dict.fromkeys(name for call in calls.values() for name in call.facts)
    facts = {
        name: {rank: call.facts.get(name, "none") for rank, call in calls.items()} for name in names
    }
    texts = {rank: call.data for rank, call in calls.items() if call.data}
    start = len(os.path.commonprefix(list(texts.values()))) - _WINDOW // 2  # noqa: RUF071 - of texts, not of paths
    shown = {rank: _window(text, start, _WINDOW) for rank, text in texts.items()}
    # Other operations' arguments say nothing, and the user's arguments say more than the buffers made of them.
    for name, values in {"operation": facts.pop("operation", {}), "data": shown, **facts}.items():
        ranks: dict[str, list[int]] = {}
        for rank, value in sorted(values.items()):
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            return f"{name}: " + "; ".join(
                f"{value} on {ranks_in_words(having)}" for value, having in ranks.items()
            )
    return ""


def _table(lines: Mapping[int, object]) -> str:
    """A line for each rank, in order."""
    return "".join(f"\n    rank {rank}: {line}" for rank, line in sorted(lines.items()))


def _window(text: str, start: int, length: int) -> str:
    start = max(0, start)
    return (
        ("..." if start else "")
        + text[start : start + length]
        + ("..." if start + length < len(text) else "")
    )


def _calls(records: Mapping[int, _Record], group: str, number: int) -> dict[int, Call]:
    """The calls of the ranks that are in call ``number`` of the group."""
    begun = (
        (r, call)
        for r, record in records.items()
        if record.count(group) == number
        for call in record.calls
    )
    return {r: call for r, call in begun if call.group == group}


def _latest(record: _Record) -> str:
    if not record.calls:
        return "it has made no checked call (are calls checked on every rank?)"
    return (
        f"its latest call was {record.calls[-1]}, with {ranks_in_words(record.calls[-1].members)}"
    )
