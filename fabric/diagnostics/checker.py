"""Checked mode: compares the calls of all ranks before any data is sent.

[Note: Progress] Each rank publishes one record, which it overwrites when it starts a call: how many
calls it has started in each group, and the latest call. In call number n of a group, a rank waits
until every member has started its call number n there, and compares them. It continues once all
have started and agree. So a member that is already further must have agreed: it saw this rank's
record first. Hence records need not be kept for slow readers, groups progress independently, and
each rank waits for all members of one group at a time. A cycle of ranks that wait for each other,
in any groups, is then a deadlock, and the only kind: every other wait ends, or leads to a rank that
makes no further calls. (A rank that waits in several threads may continue in any of them, and
counts as computing.)
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
# Most characters of arguments in a record. Longer arguments become their beginning and a digest.
_INLINE = 120
_DIGEST = "... #"
# characters of arguments shown: with a call, around the first difference
_SHOWN = 160
_WINDOW = 60

_PHASES = "phases"  # the group of phases, in which torch issues collectives by itself

_EXPECTED = "a call that every rank of the group makes"
_SUGGESTION = (
    "the call outside of branches on the rank and loops of other lengths; see what ended the rank "
    "named here"
)


class Call(NamedTuple):
    """One call of a collective on one rank.

    Attributes:
        group: the group of the call.
        members: the global ranks that must make the call.
        operation: the name of the operation, as the user called it.
        location: the file and line of the user's call.
        facts: the facts that must be the same on every rank, by name, the most informative one
            first.
        data: the arguments as text. The text is the same on all ranks that have arguments, and
            empty on the others.
    """

    group: str
    members: Sequence[int]
    operation: str
    location: str
    facts: Mapping[str, str]
    data: str

    @classmethod
    def of(cls, entry: Entry, collective: Collective) -> "Call":
        """Return the call of an entry of the flight recorder."""
        facts = collective.facts
        data = "" if collective.call is None else collective.call.arguments()
        if collective.operation in (Operation.SEND, Operation.RECV):
            # The two ranks make different operations, so the operation is not compared.
            facts = {
                "from": str(entry.members[0]),
                "to": str(entry.members[1]),
                "dtype": facts["dtype"],
                "shape": facts["shape"],
            }
        return cls(
            entry.group, tuple(entry.members), entry.operation, str(entry.call_site), facts, data
        )

    def __str__(self) -> str:
        arguments = _window(self.data, 0, _SHOWN)
        if not arguments:
            facts = []
            for name, value in self.facts.items():
                if name not in ("operation", "collective"):
                    facts.append(f"{name}={value}")
            arguments = ", ".join(facts)
        if arguments:
            return f"{self.operation}({arguments}) at {self.location}"
        return f"{self.operation} at {self.location}"


class _Record(NamedTuple):
    """The record that one rank publishes.

    Attributes:
        begun: the number of calls started in each group.
        calls: the latest call of the rank. A rank that waits in several threads has one for each.
        end_reason: why the rank makes no further calls. Empty while it makes calls.
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
        store: a store that the ranks of the job share, and use for nothing else.
        rank: the rank of this process.
        size: the number of ranks.
        timeout: how long a rank may keep the others waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = JobStore(store, rank, size)
        self._rank = rank
        self._size = size
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        self._record = _NO_CALLS
        self._latest: Call | None = None
        self._error: CollectiveMismatchError | None = None
        self._store.publish("process", [node(), os.getpid()])

    def check(self, entry: Entry, collective: Collective) -> None:
        """Wait until all members of the group make this call.

        Raises:
            CollectiveMismatchError: a member makes another call, waits elsewhere for this rank, or
                makes none.
        """
        full_call = Call.of(entry, collective)
        call = _with_digest(full_call)
        with self._lock:
            record = self._record
            if record.end_reason:
                request = f"{full_call} (rank {self._rank} of {self._size})"
                problem = f"this rank makes no further collectives: {record.end_reason}"
                raise CollectiveMismatchError(request, problem) from self._error
            self._latest = call
            begun = {**record.begun, entry.group: entry.number}
            self._publish(_Record(begun, (*record.calls, call), end_reason=""))
        try:
            self._wait(full_call, entry.number)
        except dist.DistError as error:
            host = "the process that hosted it, rank 0 as a rule"
            self._stop(full_call, f"the store of the job is gone, and {host}: {error}")
        with self._lock:
            # The next call publishes this.
            calls = [open_call for open_call in self._record.calls if open_call is not call]
            self._record = self._record._replace(calls=tuple(calls))

    def check_phase(self, phase: str) -> None:
        """Wait until all ranks start a phase in which torch issues collectives.

        Raises:
            CollectiveMismatchError: a rank makes a call, waits elsewhere for this rank, or ends.
        """
        number = self._record.count(_PHASES) + 1
        place = user_call(sys._getframe(1))
        entry = Entry(_PHASES, range(self._size), number, phase, "", place)
        self.check(entry, Collective(Operation.BARRIER, call=CallDescription(phase)))

    def close(self, reason: str = "") -> None:
        """Publish that this rank makes no further calls. Only the first call has an effect.

        Args:
            reason: why the rank makes no further calls, for the errors of other ranks. Empty, the
                default: the reason is that the rank has finished, or has raised an error.
        """
        with self._lock:
            if self._record.end_reason:
                return
            end_reason = reason or exit_reason()
            if self._latest is not None:
                end_reason = f"{end_reason}; its latest call was {self._latest}"
            # If the process that hosts the store has ended, no rank can read the reason.
            with suppress(dist.DistError):
                self._publish(self._record._replace(end_reason=end_reason))

    def _wait(self, call: Call, number: int) -> None:
        """Wait until all members start call ``number`` of the group.

        Raises:
            CollectiveMismatchError: a member never starts the call, or starts another one.
        """
        started = monotonic()
        pause = _FIRST_PAUSE
        next_search = started + _SEARCH_EVERY
        # While the ranks arrive, only the records of the members are read. A search for the reason
        # of a longer wait reads the records and the processes of all ranks.
        searches = False
        missing: list[int] = []
        while True:
            # Read before the records, so that the last record of a rank is not missed.
            ended_processes = self._ended_processes(missing if searches else [])
            records = self._read(range(self._size) if searches else call.members)
            calls = _calls(records, call.group, number)
            if difference(calls):
                self._disagree(call, number)
            if searches:
                self._check_circle(call, records)
            missing = [rank for rank in call.members if records[rank].count(call.group) < number]
            stopped = [rank for rank in (*missing, *calls) if records[rank].end_reason]
            if not missing and not stopped:
                return
            # Not after the first read: records are read one by one, and the record of another rank
            # may have the root cause.
            if stopped and searches:
                end_reason = records[stopped[0]].end_reason
                self._stop(call, f"rank {stopped[0]} makes no further calls: {end_reason}")
            self._check_missing(call, missing, ended_processes, records)
            now = monotonic()
            if missing and now - started > self._timeout:
                self._time_out(call, missing, records)
            searches = bool(stopped) or now > next_search
            if searches:
                next_search = now + _SEARCH_EVERY
            else:
                sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _ended_processes(self, ranks: Collection[int]) -> dict[int, int]:
        """Return the process ids of those ranks whose process on this node has ended, by rank."""
        ended = {}
        for rank, (process_node, pid) in self._store.read("process", ranks).items():
            if has_ended(process_node, pid):
                ended[rank] = pid
        return ended

    def _check_missing(
        self,
        call: Call,
        missing: Collection[int],
        ended_processes: Mapping[int, int],
        records: Mapping[int, _Record],
    ) -> None:
        """Raise if the process of a rank that has not made the call has ended."""
        for rank, pid in ended_processes.items():
            if rank in missing:
                latest = _latest(records[rank])
                problem = f"rank {rank} does not call: its process (pid {pid}) has ended; {latest}"
                self._stop(call, problem)

    def _time_out(
        self, call: Call, missing: Collection[int], records: Mapping[int, _Record]
    ) -> NoReturn:
        """Raise for ranks that have not made the call within the timeout."""
        latest = _table({rank: _latest(records[rank]) for rank in missing})
        ranks = ranks_in_words(missing)
        self._stop(call, f"after {self._timeout:g} s {ranks} did not call:{latest}")

    def _disagree(self, call: Call, number: int) -> NoReturn:
        """Raise for different calls.

        The error lists the calls of the ranks that publish their full arguments in
        ``_ANSWER_WITHIN``.
        """
        with self._lock:
            full_calls = []
            for open_call in self._record.calls:
                full_calls.append(call if open_call.group == call.group else open_call)
            self._publish(self._record._replace(calls=tuple(full_calls)))
        until = monotonic() + _ANSWER_WITHIN
        calls: dict[int, Call] = {}
        while monotonic() < until:
            calls = _calls(self._read(call.members), call.group, number)
            has_digests = any(_DIGEST in member_call.data for member_call in calls.values())
            if len(calls) == len(call.members) and not has_digests:
                break
            sleep(_FIRST_PAUSE)
        ranks = ranks_in_words(call.members)
        problem = f"{ranks} make different calls:{_table(calls)}"
        self._stop(
            call,
            f"{problem}\n  They differ in {difference(calls)}",
            "the same calls in the same order on every rank of a group, on data of one structure, "
            "shapes and dtypes",
            "no branch on the rank around a collective; on the ranks named here, the call that the "
            "others make",
        )

    def _check_circle(self, call: Call, records: Mapping[int, _Record]) -> None:
        """Raise if this rank waits for ranks that wait for each other."""
        try:
            TopologicalSorter(self._waiting_ranks(records)).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]  # the first rank is also the last one
        else:
            return
        again = self._read(circle)
        # Records that are unchanged between two reads were all valid at the same moment.
        if all(again[rank].begun == records[rank].begun for rank in circle):
            lines = {}
            for rank, next_rank in pairwise(circle):
                lines[rank] = f"{records[rank].calls[0]}, waits for rank {next_rank}"
            self._stop(
                call,
                f"ranks wait for each other in different calls:{_table(lines)}",
                "calls of several groups, messages, and phases such as a backward pass, in one "
                "order on all ranks",
                "no branch on the rank around any of them; of two ranks, one sends while the other "
                "receives",
            )

    def _waiting_ranks(self, records: Mapping[int, _Record]) -> dict[int, list[int]]:
        """Return the ranks that this rank waits for, the ranks that these wait for, and so on.

        Returns:
            For each of these ranks, the ranks that it waits for.
        """
        waits_for: dict[int, list[int]] = {}
        pending = [self._rank]
        while pending:
            rank = pending.pop()
            waits_for[rank] = _awaited_ranks(rank, records)
            for awaited_rank in waits_for[rank]:
                if awaited_rank not in waits_for:
                    pending.append(awaited_rank)
        return waits_for

    def _stop(
        self, call: Call, problem: str, expected: str = _EXPECTED, suggestion: str = _SUGGESTION
    ) -> NoReturn:
        """Raise, and make no further calls: the ranks are now out of sync."""
        self.close(f"it raised CollectiveMismatchError: {problem.splitlines()[0].rstrip(':')}")
        request = f"{call} (rank {self._rank} of {self._size})"
        self._error = CollectiveMismatchError(request, problem, expected, suggestion)
        raise self._error

    def _publish(self, record: _Record) -> None:
        self._record = record
        self._store.publish("record", record)

    def _read(self, ranks: Collection[int]) -> dict[int, _Record]:
        other_ranks = [rank for rank in ranks if rank != self._rank]
        records = {self._rank: self._record}
        for rank, published in self._store.read("record", other_ranks).items():
            begun, calls, end_reason = published
            records[rank] = _Record(begun, tuple(Call(*call) for call in calls), end_reason)
        return {rank: records.get(rank, _NO_CALLS) for rank in ranks}


def _with_digest(call: Call) -> Call:
    """Return a call with short arguments, so that a record stays small."""
    if len(call.data) <= _INLINE:
        return call
    digest = blake2b(call.data.encode(), digest_size=8).hexdigest()
    return call._replace(data=f"{call.data[:_INLINE]}{_DIGEST}{digest}")


def _awaited_ranks(rank: int, records: Mapping[int, _Record]) -> list[int]:
    """Return the members that have not started the call in which a rank waits."""
    record = records[rank]
    if len(record.calls) != 1:
        # A rank that waits in several threads may continue in any of them.
        return []
    group = record.calls[0].group
    number = record.count(group)
    return [member for member in record.calls[0].members if records[member].count(group) < number]


def difference(calls: Mapping[int, Call]) -> str:
    """Return the first fact in which the calls differ, as text. It is empty if they agree.

    Args:
        calls: the calls, by rank.
    """
    names = dict.fromkeys(name for call in calls.values() for name in call.facts)
    values_of: dict[str, dict[int, str]] = {"operation": {}, "data": _differing_windows(calls)}
    # Arguments come after the operation, since other operations have other arguments, and before
    # the buffers, since the user's arguments say more than the buffers that are made of them.
    for name in names:
        values_of[name] = {rank: call.facts.get(name, "none") for rank, call in calls.items()}
    for name, values in values_of.items():
        ranks_with: dict[str, list[int]] = {}
        for rank, value in sorted(values.items()):
            ranks_with.setdefault(value, []).append(rank)
        if len(ranks_with) > 1:
            texts = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in ranks_with.items()]
            return f"{name}: {'; '.join(texts)}"
    return ""


def _differing_windows(calls: Mapping[int, Call]) -> dict[int, str]:
    """Return the arguments of the calls around the first difference, by rank."""
    texts = {rank: call.data for rank, call in calls.items() if call.data}
    common = os.path.commonprefix(list(texts.values()))  # noqa: RUF071 - of texts, not of paths
    start = len(common) - _WINDOW // 2
    return {rank: _window(text, start, _WINDOW) for rank, text in texts.items()}


def _table(lines: Mapping[int, object]) -> str:
    """Return a line for each rank, in order."""
    rows = [f"\n    rank {rank}: {line}" for rank, line in sorted(lines.items())]
    return "".join(rows)


def _window(text: str, start: int, length: int) -> str:
    """Return a part of a text, with dots where the text is cut."""
    start = max(0, start)
    end = start + length
    window = text[start:end]
    if start > 0:
        window = f"...{window}"
    if end < len(text):
        window = f"{window}..."
    return window


def _calls(records: Mapping[int, _Record], group: str, number: int) -> dict[int, Call]:
    """Return the calls of the ranks that are in call ``number`` of the group, by rank."""
    calls = {}
    for rank, record in records.items():
        if record.count(group) != number:
            continue
        for call in record.calls:
            if call.group == group:
                calls[rank] = call
    return calls


def _latest(record: _Record) -> str:
    """Return the latest call of a rank as a sentence."""
    if not record.calls:
        return "it has made no checked call (are calls checked on every rank?)"
    call = record.calls[-1]
    return f"its latest call was {call}, with {ranks_in_words(call.members)}"
