"""The state of one rank, as the rank publishes it for a hang report, and what two states say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["COMPILES", "RankState", "Wait"]

COMPILES = "torch.compile is at work"  # the activity of a rank that compiles contains this text


class RankState(NamedTuple):
    """The state of one rank, which the rank publishes for a report.

    Attributes:
        activity: what the rank is doing and where, as text that follows "rank 1".
        history: the step of the rank and what it did before, as text that follows ``activity``.
            Empty, or begins with a comma.
        is_inside: whether the rank is in a collective, or in a phase in which torch issues
            collectives.
        seconds_waited: seconds since the flight recorder of the rank changed.
        key: the name of the group of the collective that the rank is in, or the name of the phase.
            If the rank is in neither, the key of what it started last.
        members: the global ranks that must make the same call. Empty means all ranks.
        counts: how many collectives of each group and how many phases of each name the rank has
            started, by key.
        stack: the stack of the rank, innermost frame first. Empty if unknown.
        call: the operation of the collective that the rank is in, which must be the same on all
            members. Empty outside of collectives, and for a send or recv.
        awaited: the global ranks without which the rank cannot go on. Empty means all ranks. None,
            the default, if the rank is not known to wait.
        has_ended: whether the rank makes no further calls.
        step: the number of the current optimizer step, from 1. Outside of a step, that of the next
            one. 0, the default, if unknown.
        pid: the id of the process of the rank. 0, the default, if unknown.
    """

    activity: str
    history: str = ""
    is_inside: bool = False
    seconds_waited: float = 0.0
    key: str = ""
    members: Sequence[int] = ()
    counts: Mapping[str, int] = {}
    stack: str = ""
    call: str = ""
    awaited: Sequence[int] | None = None
    has_ended: bool = False
    step: int = 0
    pid: int = 0

    @property
    def number(self) -> int:
        """The number of the call or phase that the rank is in, among those with the same key."""
        return self.counts.get(self.key, 0)

    def makes_another_call_than(self, other: "RankState") -> bool:
        """Return whether two ranks are in different calls that should be the same call."""
        are_in_calls = self.call != "" and other.call != ""
        have_same_number = self.key == other.key and self.number == other.number
        return are_in_calls and have_same_number and self.call != other.call


@dataclass(frozen=True)
class Wait:
    """The call or phase in which a rank waits for other ranks.

    Attributes:
        states: the states of all ranks, by rank.
        waiting: the state of the rank that waits.
        members: the ranks that must make the call.
    """

    states: Mapping[int, RankState]
    waiting: RankState
    members: Sequence[int]

    @property
    def missing_ranks(self) -> list[int]:
        """The members that have not started the call."""
        # A rank has started the call number n of a group if it has counted n calls of the group.
        number = self.waiting.number
        missing: list[int] = []
        for rank in self.members:
            if self.states[rank].counts.get(self.waiting.key, 0) < number:
                missing.append(rank)
        return missing

    @property
    def differing_ranks(self) -> list[int]:
        """The members that make another call in place of the call of the waiting rank."""
        differing: list[int] = []
        for rank in self.members:
            if self.states[rank].makes_another_call_than(self.waiting):
                differing.append(rank)
        return differing
