"""Checked mode: compares the calls of all ranks before any data is sent."""

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
from fabric.communicators.call_site import user_call
from fabric.diagnostics.deadlocks import describe_ranks_by_call, ranks_of_odd_call
from fabric.diagnostics.recorder import Entry, ranks_in_words
from fabric.diagnostics.stacks import exit_reason, has_ended, node
from fabric.errors import CollectiveMismatchError
from fabric.store import JobStore

__all__ = ["Call", "CollectiveChecker", "difference"]

# In seconds.
_MIN_PAUSE = 0.00005  # between two reads of the records
_MAX_PAUSE = 0.005
_SEARCH_INTERVAL = 0.05  # between two searches for the reason of a long wait
_ANSWER_TIMEOUT = 0.3  # for other ranks to make their call, publish its arguments, or raise first

# Longer arguments are shortened in a record to this many characters, the prefix and a digest.
_MAX_RECORDED_CHARACTERS = 120
_DIGEST_PREFIX = "... #"
_MAX_SHOWN_CHARACTERS = 160  # of the arguments of a call in an error
_DIFFERENCE_CHARACTERS = 60  # of arguments around the first difference in an error

_PHASES = "phases"  # the group of phases, in which torch issues collectives by itself

_EXPECTED = "a call that every rank of the group makes"
_SUGGESTION = (
    "make the call outside of branches on the rank, and of loops whose length depends on the rank; "
    "find out what ended the rank named here"
)


class Call(NamedTuple):
    """One call of a collective on one rank, as published and as shown in errors.

    Attributes:
        group: the name of the group of the call.
        members: the global ranks that must make the call.
        operation: the name of the operation, as the user called it.
        location: the file and line of the user's call.
        facts: the values that must be the same on every rank, such as the dtype, by name. The most
            informative one is the first.
        arguments: the arguments as text, to be compared. The text is empty on a rank whose
            arguments need not be the same, such as a rank that only receives.
    """

    group: str
    members: Sequence[int]
    operation: str
    location: str
    facts: Mapping[str, str]
    arguments: str

    @classmethod
    def of(cls, entry: Entry, collective: Collective) -> "Call":
        """Return the call that the flight recorder has recorded as an entry.

        Args:
            entry: the entry.
            collective: the collective of the entry.
        """
        facts = collective.facts
        arguments = ""
        if collective.call is not None:
            arguments = collective.call.arguments()
        if collective.operation in (Operation.SEND, Operation.RECV):
            # The facts without the operation: one rank sends, and the other one receives.
            source, destination = entry.members
            facts = {
                "from": str(source),
                "to": str(destination),
                "dtype": facts["dtype"],
                "shape": facts["shape"],
            }
        return cls(
            group=entry.group,
            members=tuple(entry.members),
            operation=entry.operation,
            location=str(entry.call_site),
            facts=facts,
            arguments=arguments,
        )

    def __str__(self) -> str:
        """Return the call for an error: the operation, its arguments, and the location.

        If this rank has no arguments, other facts of the call are shown instead of them.
        """
        arguments = _window(self.arguments, start=0, length=_MAX_SHOWN_CHARACTERS)
        if not arguments:
            facts = []
            for name, value in self.facts.items():
                # The operation is shown first. "collective" is what it runs inside of fabric.
                if name not in ("operation", "collective"):
                    facts.append(f"{name}={value}")
            arguments = ", ".join(facts)
        if arguments:
            return f"{self.operation}({arguments}) at {self.location}"
        return f"{self.operation} at {self.location}"


# [Note: Progress]
# Each rank publishes one record, which it overwrites whenever it starts a call. The record has the
# number of calls that the rank has started in each group, and the latest call. In call number n of
# a group, a rank waits until every member has started its call number n of that group, and compares
# these calls. It continues once all have started and agree. So a member that has started call
# number n + 1 has agreed in call number n: it has seen this rank's record. Hence a rank may
# overwrite its record before slow readers have read it, groups progress independently of each
# other, and each rank waits for all members of one group at a time. A cycle of ranks that wait for
# each other, in any groups, is then a deadlock. No other deadlock exists: every other wait ends, or
# leads to a rank that makes no further calls. A rank that waits in several threads may continue in
# any of them, so it counts as a rank that does not wait.
class _Record(NamedTuple):
    """The record that one rank publishes.

    Attributes:
        started: the number of calls that the rank has started, by group.
        calls: the call in which the rank is, or its latest call. If several threads of the rank are
            in calls, the calls of all of them, the latest one last.
        end_reason: why the rank makes no further calls. Empty while it makes calls.
    """

    started: Mapping[str, int]
    calls: tuple[Call, ...]
    end_reason: str

    def count(self, group: str) -> int:
        """Return the number of calls that the rank has started in a group."""
        return self.started.get(group, 0)


# The record of a rank that has published none.
_NO_CALLS = _Record(started={}, calls=(), end_reason="")


# See [Note: Progress].
class CollectiveChecker:
    """Compares the calls of this rank with those of the other ranks, before data is sent.

    Each rank publishes a *record*: the number of calls that it has started in each group, and its
    latest call. A rank waits in a call until the records of all members of the group show the same
    call.

    After the first error the ranks are out of sync, so every further call on this rank raises.

    Args:
        store: a store that the ranks of the job share, and use for nothing else.
        rank: the rank of this process.
        size: the number of ranks.
        timeout: how long a rank waits for the others to make its call.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Publish the id of this process. Not a collective: no other rank is waited for."""
        self._store = JobStore(store, rank, size)
        self._rank = rank
        self._size = size
        self._timeout = timeout.total_seconds()
        # Guards the changes of _record, which collectives of several threads make.
        self._lock = threading.Lock()
        # The record of this rank. The published one may still have calls that have ended.
        self._record = _NO_CALLS
        # The call that this rank has started last, for the errors of other ranks.
        self._latest_call: Call | None = None
        # The error that has ended the calls of this rank. It is the cause of the errors of later
        # calls.
        self._error: CollectiveMismatchError | None = None
        # Other ranks on this node look by this id whether the process has ended.
        self._store.publish("process", [node(), os.getpid()])

    def check(self, entry: Entry, collective: Collective) -> None:
        """Wait until all members of the group have started the same call.

        The flight recorder calls this method before a collective sends data, in any thread.

        Raises:
            CollectiveMismatchError: one of these:

                - A member makes another call.
                - A member waits in another call, in a cycle that includes this rank.
                - A member makes no further calls, or not this one within the timeout.
                - An earlier call on this rank has raised.
        """
        full_call = Call.of(entry, collective)
        published_call = _with_digest(full_call)
        with self._lock:
            record = self._record
            if record.end_reason:
                request = f"{full_call} (rank {self._rank} of {self._size})"
                problem = f"this rank makes no further collectives: {record.end_reason}"
                raise CollectiveMismatchError(request, problem=problem) from self._error
            self._latest_call = published_call  # for the reason why this rank stops, if it does
            # For each group, the number of calls that this rank has started. Members wait for it.
            started = {**record.started, entry.group: entry.number}
            self._publish(_Record(started, (*record.calls, published_call), end_reason=""))
        # The wait is outside of the lock, so that other threads can make calls meanwhile.
        try:
            self._wait_for_members(full_call, entry.number)
        except dist.DistError as error:
            host = "the process that hosted it, rank 0 as a rule"
            self._raise_and_close(full_call, f"the store of the job is gone, and {host}: {error}")
        with self._lock:
            # Removed by identity, since another thread may be in an equal call.
            calls = [call for call in self._record.calls if call is not published_call]
            # Not published: slower members still have to read the call. The next call of this rank
            # publishes the record.
            self._record = self._record._replace(calls=tuple(calls))

    def check_phase(self, phase: str) -> None:
        """Wait until all ranks start a phase, as :meth:`check` waits for a call.

        In a phase, such as a backward pass, torch issues collectives by itself. The flight recorder
        calls this method before each phase that all ranks must start.

        Raises:
            CollectiveMismatchError: a rank makes another call or phase instead, or ends.
        """
        entry = Entry(
            group=_PHASES,
            members=range(self._size),
            number=self._record.count(_PHASES) + 1,
            operation=phase,
            name="",
            # The line of the user that has led to this call.
            call_site=user_call(sys._getframe(1)),
        )
        # The phase is compared like a barrier of its name, since a barrier has no other facts.
        collective = Collective(Operation.BARRIER, call=CallDescription(phase))
        self.check(entry, collective)

    def check_wait_for_rank0(self, entry: Entry) -> None:
        """Wait until rank 0 has started to store a value. Rank 0 itself waits for no rank.

        The flight recorder calls this method on every rank, before ranks wait for the value.

        Args:
            entry: the entry of the wait. Its members are all ranks.

        Raises:
            CollectiveMismatchError: rank 0 makes another call, or ends.
        """
        # Compared like a barrier with this title, in which only rank 0 has to be.
        collective = Collective(Operation.BARRIER, call=CallDescription(entry.title))
        self.check(entry._replace(members=[0]), collective)

    def close(self, reason: str = "") -> None:
        """Publish that this rank makes no further calls, so that no rank waits for it.

        Only the first call has an effect.

        Args:
            reason: why the rank makes no further calls, for the errors of other ranks. Empty, the
                default, means that the rank has finished, or has raised the current error.
        """
        with self._lock:
            is_closed = self._record.end_reason != ""
            if is_closed:
                return
            end_reason = reason or exit_reason()
            if self._latest_call is not None:
                end_reason = f"{end_reason}; its latest call was {self._latest_call}"
            # If the process that hosts the store has ended, no rank can read the reason anyway.
            with suppress(dist.DistError):
                self._publish(self._record._replace(end_reason=end_reason))

    def _wait_for_members(self, call: Call, number: int) -> None:
        """Wait until all members have started the same call as this rank.

        Each round reads the records of the members. If the wait takes long, a round is a *search*
        for the reason: it reads the records of all ranks, and looks for ended processes.

        Args:
            call: the call of this rank, which is published.
            number: the number of the call in its group.

        Raises:
            CollectiveMismatchError: a member never starts the call, or starts another one.
        """
        start_time = monotonic()
        pause = _MIN_PAUSE
        next_search = start_time + _SEARCH_INTERVAL
        is_search = False
        missing: list[int] = []
        while True:
            ended_processes: dict[int, int] = {}
            ranks_to_read: Collection[int] = call.members
            if is_search:
                # Before the records are read: a process that has ended by now writes no further
                # record, so that its last one is read.
                ended_processes = self._ended_processes(missing)
                ranks_to_read = range(self._size)
            records = self._read(ranks_to_read)
            calls = _calls_with_number(records, call.group, number)
            are_different = difference(calls) != ""
            if are_different:
                self._raise_difference(call, number)
            if is_search:
                self._check_cycle(call, records)
            # The members that have not started the call.
            missing = [rank for rank in call.members if records[rank].count(call.group) < number]
            # The members that make no further calls: they end without this call, or have raised in
            # it. `calls` has the members that are in the call.
            stopped = [rank for rank in (*missing, *calls) if records[rank].end_reason]
            if not missing and not stopped:
                return
            # If several members have stopped, the error should name the first one in this list.
            # This round may have read its record before it stopped. So the error is raised only
            # after a search, which has read all records again.
            if stopped and is_search:
                self._raise_for_ended_member(call, stopped[0], records)
            self._raise_if_process_ended(call, missing, ended_processes, records)
            now = monotonic()
            if missing and now - start_time > self._timeout:
                self._raise_timeout(call, missing, records)
            is_search = bool(stopped) or now > next_search
            if is_search:
                next_search = now + _SEARCH_INTERVAL
            else:
                sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)

    def _ended_processes(self, ranks: Collection[int]) -> dict[int, int]:
        """Return the process ids of the ranks whose process has ended, by rank.

        Only processes on this node are found.
        """
        ended = {}
        for rank, (process_node, pid) in self._store.read("process", ranks).items():
            if has_ended(process_node, pid):
                ended[rank] = pid
        return ended

    def _raise_if_process_ended(
        self,
        call: Call,
        missing: Collection[int],
        ended_processes: Mapping[int, int],
        records: Mapping[int, _Record],
    ) -> None:
        """Raise if the process of a rank that has not made the call has ended.

        Args:
            call: the call of this rank.
            missing: the members that have not started the call.
            ended_processes: the ids of processes that have ended, by rank. They had ended before
                the records were read, so a record without the call is final.
            records: the records, by rank.
        """
        for rank, pid in ended_processes.items():
            # A rank that started the call before its process ended makes no error here.
            if rank in missing:
                latest = _describe_latest_call(records[rank])
                problem = f"rank {rank} does not call: its process (pid {pid}) has ended; {latest}"
                self._raise_and_close(call, problem)

    def _raise_for_ended_member(
        self, call: Call, rank: int, records: Mapping[int, _Record]
    ) -> NoReturn:
        """Raise the error for a member that makes no further calls.

        Args:
            call: the call of this rank.
            rank: the member.
            records: the records, by rank. The record of the member has the reason.
        """
        reason = records[rank].end_reason
        self._raise_and_close(call, f"rank {rank} makes no further calls: {reason}")

    def _raise_timeout(
        self, call: Call, missing: Collection[int], records: Mapping[int, _Record]
    ) -> NoReturn:
        """Raise the error for members that have not made the call within the timeout.

        Args:
            call: the call of this rank.
            missing: the members that have not made it.
            records: the records, by rank. The error shows the latest calls in them.
        """
        latest_calls = _table({rank: _describe_latest_call(records[rank]) for rank in missing})
        ranks = ranks_in_words(missing)
        problem = f"after {self._timeout:g} s {ranks} did not call. Latest calls:{latest_calls}"
        self._raise_and_close(call, problem)

    def _raise_difference(self, call: Call, number: int) -> NoReturn:
        """Raise the error for calls that differ.

        The published calls have only the beginning of long arguments. So each rank that sees the
        difference publishes its full call, and waits for the full calls of the others. The error
        shows what is published after ``_ANSWER_TIMEOUT`` seconds.

        Args:
            call: the call of this rank, with its full arguments.
            number: the number of the call in its group.
        """
        with self._lock:
            # Replace the shortened copy of this call in the record. A rank is in one call of a
            # group at a time, so the group tells which call it is.
            full_calls = []
            for open_call in self._record.calls:
                is_this_call = open_call.group == call.group
                full_calls.append(call if is_this_call else open_call)
            self._publish(self._record._replace(calls=tuple(full_calls)))
        deadline = monotonic() + _ANSWER_TIMEOUT
        calls: dict[int, Call] = {}
        while monotonic() < deadline:
            calls = _calls_with_number(self._read(call.members), call.group, number)
            has_shortened_call = any(
                _DIGEST_PREFIX in member_call.arguments for member_call in calls.values()
            )
            if len(calls) == len(call.members) and not has_shortened_call:
                break
            sleep(_MIN_PAUSE)
        ranks = ranks_in_words(call.members)
        problem = f"{ranks} make different calls:{_table(calls)}"
        self._raise_and_close(
            call,
            problem=f"{problem}\n  They differ in {difference(calls)}",
            expected="the same calls in the same order on every rank of a group, on data of one "
            "structure, shapes and dtypes",
            suggestion="no branch on the rank around a collective; on the ranks named here, the "
            "call that the others make",
        )

    def _check_cycle(self, call: Call, records: Mapping[int, _Record]) -> None:
        """Raise if this rank waits, directly or not, for ranks that wait for each other.

        Args:
            call: the call of this rank.
            records: the records of all ranks.
        """
        waiting_graph = TopologicalSorter(self._waiting_ranks(records))
        try:
            # Raises a CycleError if there is a cycle. The order is not used.
            waiting_graph.prepare()
        except CycleError as error:
            # args[1] is the list of the ranks in the cycle. Each waits for the rank before it, and
            # the first rank is also the last one. In reversed order, each waits for the next one.
            cycle = error.args[1][::-1]
        else:
            return
        # The records were read at different moments, so the cycle may never have existed. If none
        # of them has changed until a second read, the ranks do wait for each other.
        second_records = self._read(cycle)
        is_unchanged = all(second_records[rank].started == records[rank].started for rank in cycle)
        if is_unchanged:
            calls = self._describe_cycle(cycle)
            self._raise_and_close(
                call,
                problem=f"ranks wait for each other in different calls:{calls}",
                expected="collectives of all groups, send and recv, and backward passes, in one "
                "order on all ranks",
                suggestion="no branch on the rank around any of them; of two ranks, one sends "
                "while the other receives",
            )

    def _describe_cycle(self, cycle: Sequence[int]) -> str:
        """Return the calls of ranks that wait for each other, as the lines of an error.

        A call is *odd* if fewer ranks wait in it than in every other call. If there is an odd call,
        the lines have the calls of all waiting ranks, and name the odd ranks. Otherwise, they have
        the calls of the cycle.

        The other ranks give the odd rank time to raise first. The launcher shows the first error,
        and the mistake is probably on the odd rank.

        Args:
            cycle: the ranks of the cycle, each of which waits for the next one. The first rank is
                also the last one.
        """
        ranks_by_call = self._ranks_by_call_when_all_wait()
        odd_ranks = ranks_of_odd_call(ranks_by_call)
        if odd_ranks:
            if self._rank not in odd_ranks:
                sleep(_ANSWER_TIMEOUT)
            lines = [f"\n    {line}" for line in describe_ranks_by_call(ranks_by_call)]
            return "".join(lines)
        records = self._read(cycle)
        calls: dict[int, str] = {}
        for rank, next_rank in pairwise(cycle):
            calls[rank] = f"{records[rank].calls[0]}, waits for rank {next_rank}"
        return _table(calls)

    def _ranks_by_call_when_all_wait(self) -> dict[str, list[int]]:
        """Return the ranks that wait in each call, by the text of the call, once all ranks wait.

        Some ranks may still be on their way to their call. After ``_ANSWER_TIMEOUT`` seconds, the
        ranks that wait by then are returned.
        """
        deadline = monotonic() + _ANSWER_TIMEOUT
        while True:
            records = self._read(range(self._size))
            ranks_by_call: dict[str, list[int]] = {}
            waiting_count = 0
            for rank, record in records.items():
                if _awaited_ranks(rank, records):
                    ranks_by_call.setdefault(str(record.calls[0]), []).append(rank)
                    waiting_count += 1
            if waiting_count == self._size or monotonic() > deadline:
                return ranks_by_call
            sleep(_MAX_PAUSE)

    def _waiting_ranks(self, records: Mapping[int, _Record]) -> dict[int, list[int]]:
        """Return the graph of ranks that wait, as far as it can be reached from this rank.

        Args:
            records: the records of all ranks.

        Returns:
            The ranks that a rank waits for, by that rank.
        """
        awaited_by_rank: dict[int, list[int]] = {}
        pending = [self._rank]
        while pending:
            rank = pending.pop()
            awaited_by_rank[rank] = _awaited_ranks(rank, records)
            for awaited_rank in awaited_by_rank[rank]:
                if awaited_rank not in awaited_by_rank:
                    pending.append(awaited_rank)
        return awaited_by_rank

    def _raise_and_close(
        self, call: Call, problem: str, expected: str = _EXPECTED, suggestion: str = _SUGGESTION
    ) -> NoReturn:
        """Raise, and refuse all further calls of this rank, since the ranks are out of sync now.

        Args:
            call: the call of this rank.
            problem: why the call cannot be made. The errors of other ranks show its first line.
            expected: what is valid.
            suggestion: what to write instead.
        """
        summary = problem.splitlines()[0].rstrip(":")
        self.close(f"it raised CollectiveMismatchError: {summary}")
        request = f"{call} (rank {self._rank} of {self._size})"
        # Kept as the cause of the errors of later calls.
        self._error = CollectiveMismatchError(
            request, problem=problem, expected=expected, suggestion=suggestion
        )
        raise self._error

    def _publish(self, record: _Record) -> None:
        """Publish a new record of this rank. The caller holds ``_lock``."""
        self._record = record
        self._store.publish("record", record)

    def _read(self, ranks: Collection[int]) -> dict[int, _Record]:
        """Return the latest records of some ranks, which are read one after the other.

        A rank that has published none has a record without calls.
        """
        other_ranks = [rank for rank in ranks if rank != self._rank]
        records = {self._rank: self._record}
        for rank, published in self._store.read("record", other_ranks).items():
            # JSON has made lists of the named tuples.
            started, calls_as_lists, end_reason = published
            calls = tuple(Call(*fields) for fields in calls_as_lists)
            records[rank] = _Record(started, calls, end_reason)
        return {rank: records.get(rank, _NO_CALLS) for rank in ranks}


def _with_digest(call: Call) -> Call:
    """Return a copy of a call with short arguments, so that a record stays small.

    Long arguments become their beginning and a digest. So different arguments stay different.
    """
    if len(call.arguments) <= _MAX_RECORDED_CHARACTERS:
        return call
    beginning = call.arguments[:_MAX_RECORDED_CHARACTERS]
    digest = blake2b(call.arguments.encode(), digest_size=8).hexdigest()
    return call._replace(arguments=f"{beginning}{_DIGEST_PREFIX}{digest}")


def _awaited_ranks(rank: int, records: Mapping[int, _Record]) -> list[int]:
    """Return the ranks that a rank waits for: the members that have not started its call.

    Args:
        rank: the rank that may wait.
        records: the records of all ranks.
    """
    record = records[rank]
    # A rank in calls of several threads may continue in one of them, so it does not count.
    waits_in_one_call = len(record.calls) == 1
    if not waits_in_one_call:
        return []
    call = record.calls[0]
    number = record.count(call.group)
    return [member for member in call.members if records[member].count(call.group) < number]


def difference(calls: Mapping[int, Call]) -> str:
    """Return the first fact in which calls differ, with its values, as text for an error.

    Args:
        calls: the calls, by rank.

    Returns:
        For example ``"op: sum on rank 0; mean on rank 1"``. Empty if the calls agree.
    """
    # The operation is compared first, since different operations have different arguments, too. The
    # arguments come next, named "data": they say more than the buffers that are made of them. The
    # other facts follow in their own order.
    values_by_fact: dict[str, dict[int, str]] = {
        "operation": {},  # filled in by the loop, if the calls have this fact
        "data": _windows_around_difference(calls),
    }
    # A dict and not a set, to keep the order of the facts.
    names = dict.fromkeys(name for call in calls.values() for name in call.facts)
    for name in names:
        # A call without the fact differs from a call with the fact.
        values_by_fact[name] = {rank: call.facts.get(name, "none") for rank, call in calls.items()}
    for name, values in values_by_fact.items():
        if len(set(values.values())) > 1:
            return f"{name}: {_values_in_words(values)}"
    return ""


def _values_in_words(values: Mapping[int, str]) -> str:
    """Return values by rank as text, such as ``"sum on rank 0; mean on ranks 1, 2"``."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks_by_value.setdefault(value, []).append(rank)
    texts: list[str] = []
    for value, ranks in ranks_by_value.items():
        texts.append(f"{value} on {ranks_in_words(ranks)}")
    return "; ".join(texts)


def _windows_around_difference(calls: Mapping[int, Call]) -> dict[int, str]:
    """Return a part of each call's arguments, around their first difference, by rank.

    Ranks without arguments are left out. The parts are equal if the arguments are.
    """
    texts = {rank: call.arguments for rank, call in calls.items() if call.arguments}
    common = os.path.commonprefix(list(texts.values()))  # noqa: RUF071 - of texts, not of paths
    # The first difference is in the middle.
    start = len(common) - _DIFFERENCE_CHARACTERS // 2
    return {rank: _window(text, start, _DIFFERENCE_CHARACTERS) for rank, text in texts.items()}


def _table(lines: Mapping[int, object]) -> str:
    """Return a text with a line for each rank, in the order of ranks. It begins with a newline."""
    rows = [f"\n    rank {rank}: {line}" for rank, line in sorted(lines.items())]
    return "".join(rows)


def _window(text: str, start: int, length: int) -> str:
    """Return ``length`` characters of a text from ``start`` on, with dots where the text is cut.

    A negative ``start`` counts as 0.
    """
    start = max(0, start)
    end = start + length
    window = text[start:end]
    if start > 0:
        window = f"...{window}"
    if end < len(text):
        window = f"{window}..."
    return window


def _calls_with_number(records: Mapping[int, _Record], group: str, number: int) -> dict[int, Call]:
    """Return the calls with one number in one group, by rank.

    Ranks that have not started the call, or have started a later call of the group, are left out.
    """
    calls = {}
    for rank, record in records.items():
        if record.count(group) != number:
            continue
        # The calls of a record are in the order in which they were made: the last one counts.
        for call in record.calls:
            if call.group == group:
                calls[rank] = call
    return calls


def _describe_latest_call(record: _Record) -> str:
    """Return a sentence about the latest call of a rank, for an error."""
    if not record.calls:
        return "it has made no checked call (are calls checked on every rank?)"
    call = record.calls[-1]
    return f"its latest call was {call}, with {ranks_in_words(call.members)}"
