"""A communicator that records each collective, for error messages and hang reports."""

import os
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from fabric.communicators.base import Collective, Communicator, Operation
from fabric.communicators.checked import CheckedCommunicator, call_site
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.errors import UsageError

__all__ = ["RecordedCommunicator"]


# See [Note: Signatures] in checked.py.
class RecordedCommunicator(Communicator):
    """A wrapper of any communicator that records each collective and runs the checks before it.

    If a collective times out, its error gets a hang report as a note. The signatures of calls are
    compared, too.

    Args:
        inner: the communicator that transfers the data.
        recorder: the recorder of this process. Its checks run before each collective.
        name: the name of the group, the same on all members and unique to the group.
        ranks: the members' global ranks, in group order. None, the default, means all ranks.
    """

    def __init__(
        self,
        inner: Communicator,
        recorder: FlightRecorder,
        name: str = JOB,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Wrap the communicator ``inner``, which transfers the data. Not a collective."""
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._checked = CheckedCommunicator(inner, recorder.signatures)
        self._recorder = recorder
        self._name = name
        # A range takes as little memory in a job of thousands of ranks as in one of two.
        self._ranks = range(inner.size) if ranks is None else ranks
        # The number of groups made from this group. It is the same on all ranks.
        self._subgroup_count = 0

    @override
    def run(self, collective: Collective) -> Any:
        """Run a collective, and record it while it runs. Return the result of the collective.

        The recorder's checks run before the collective sends data, and raise if it must not run.
        """
        recorder = self._recorder
        is_forked_child = os.getpid() != recorder.process
        if is_forked_child:
            raise self._forked_process_error(collective)
        entry = self._new_entry(collective)
        thread = threading.get_ident()
        # The call is recorded before the checks, since this rank may wait in a check, and a hang
        # report then shows the call.
        recorder.latest_collective = entry
        # A thread makes one collective at a time.
        recorder.open_collectives[thread] = entry
        # Hang reports say whether this group or a phase was counted last. _new_entry() has counted
        # this collective.
        recorder.latest_key = entry.group
        try:
            for check in recorder.checks:
                check(entry, collective)
            if recorder.collective_context is None:
                result = self._checked.run(collective)
            else:
                # A tool, such as a timeline, has set the context.
                with recorder.collective_context(entry):
                    result = self._checked.run(collective)
        except RuntimeError as error:
            # torch raises a RuntimeError for a timeout or a lost rank. It gets the hang report.
            recorder.annotate(error)
            raise
        finally:
            del recorder.open_collectives[thread]
        if collective.operation is Operation.NEW_GROUP:
            return self._recorded_group(result, collective.buffer)
        return result

    @override
    def close(self) -> None:
        self._checked.close()

    def _recorded_group(
        self, group: Communicator | None, ranks: Sequence[int]
    ) -> "RecordedCommunicator | None":
        """Return a wrapper that records the collectives of a new group. None if there is no group.

        Args:
            group: the communicator of the new group. None on a rank that is not a member.
            ranks: the members, as ranks of this group.
        """
        # Ranks that are no members count the group, too. So all ranks give the next group the same
        # name without communication.
        self._subgroup_count += 1
        if group is None:
            return None
        name = f"{self._name}/{self._subgroup_count}"
        global_ranks = [self._ranks[rank] for rank in ranks]
        return RecordedCommunicator(group, self._recorder, name, global_ranks)

    def _forked_process_error(self, collective: Collective) -> UsageError:
        """Return the error of a collective in a forked child, such as a worker of a DataLoader."""
        process = self._recorder.process
        operation = collective.user_operation
        return UsageError(
            f"{operation} in process {os.getpid()}, which rank {self.rank} (process {process}) has "
            "forked",
            problem="only the process of the rank is connected to the other ranks, and the forked "
            "process would wait for ever",
            expected="collectives in the process of the rank; none in the workers of a DataLoader, "
            "nor in other children",
            suggestion="move the collective to the training loop, and apply it to what the worker "
            "returns",
        )

    def _new_entry(self, collective: Collective) -> Entry:
        """Count a collective that starts, and return the entry that describes it.

        The members of a group make its collectives in the same order, so the number of a collective
        in its group is the same on all of them. Hang reports and checked mode match calls by it.
        """
        group = self._name
        members = self._ranks
        if collective.operation in (Operation.SEND, Operation.RECV):
            # Only two ranks make the call, so each source and destination have a group of their
            # own.
            message = collective.source_and_destination(self.rank)
            group = f"{group} {message.source}>{message.destination}"
            members = [self._ranks[message.source], self._ranks[message.destination]]
        counts = self._recorder.counts
        counts[group] += 1
        return Entry(
            group=group,
            members=members,
            number=counts[group],
            operation=collective.user_operation,
            name=collective.name,
            call_site=call_site(collective),
            kind=collective.operation,
            peer=collective.peer,
        )
