"""The proof that ranks wait for each other, and can never go on."""

from collections.abc import Collection, Mapping

from fabric.diagnostics.rank_state import RankState, Wait
from fabric.diagnostics.recorder import ranks_in_words

__all__ = [
    "CANNOT_GO_ON",
    "deadlocked_ranks",
    "describe_deadlock",
    "describe_ranks_by_call",
    "odd_ranks",
    "ranks_of_odd_call",
]

CANNOT_GO_ON = "the job cannot go on and ends here:"  # the beginning of the proof in a report


# [Note: Deadlocks]
# Some reports prove that ranks can never go on: each of them waits for a rank that has ended, or
# that waits itself for one of these ranks. A call counts as a wait for the ranks that have not
# started it, since it cannot end without them. A phase counts as a wait only while the main thread
# uses no CPU time in one of torch's collectives. The states are not published at the same moment.
# The proof holds nevertheless: a rank that waits for a rank which has not started its call still
# waits when that rank publishes its state. Of these ranks, one ends its process with an error: the
# odd one, if a call has fewer ranks than every other call, or else the one that has waited longest.
# The others lose their connection to it, so that their calls raise.
def deadlocked_ranks(states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks that can never go on.

    At first, all waiting ranks are candidates. Each round takes out the candidates that can still
    go on. When a round finds none, the remaining candidates are deadlocked.
    """
    ended: set[int] = set()
    waiting: set[int] = set()
    for rank, state in states.items():
        if state.has_ended:
            ended.add(rank)
        elif state.awaited is not None:  # None if the rank is not known to wait
            waiting.add(rank)
    # For each waiting rank, the ranks that have not come to its call.
    absent_ranks = _absent_ranks(states, waiting)
    candidates = waiting
    while True:
        # A candidate can go on if it waits for no other candidate and no rank that has ended.
        may_go_on: set[int] = set()
        may_never_come = candidates | ended
        for rank in candidates:
            if absent_ranks[rank].isdisjoint(may_never_come):
                may_go_on.add(rank)
        if not may_go_on:
            return candidates
        # In the next round, the candidates that wait only for these ranks can go on, too.
        candidates = candidates - may_go_on


def _absent_ranks(
    states: Mapping[int, RankState], waiting_ranks: Collection[int]
) -> dict[int, set[int]]:
    """Return the ranks that each waiting rank waits for, by the waiting rank.

    These are the awaited ranks that have not started its call, or make another call in its place.

    Args:
        states: the states of all ranks, by rank.
        waiting_ranks: the ranks whose state has awaited ranks.
    """
    absent_by_rank: dict[int, set[int]] = {}
    # In a large job most ranks are in the same call, whose absent ranks are computed once.
    absent_by_call: dict[object, set[int]] = {}
    for rank in waiting_ranks:
        state = states[rank]
        awaited = tuple(state.awaited or states)  # an empty sequence stands for all ranks
        call = (state.key, state.number, state.call, awaited)
        if call not in absent_by_call:
            wait = Wait(states, state, awaited)
            absent_by_call[call] = {*wait.missing_ranks, *wait.differing_ranks}
        absent_by_rank[rank] = absent_by_call[call]
    return absent_by_rank


def describe_deadlock(states: Mapping[int, RankState], deadlocked: Collection[int]) -> str:
    """Return the text at the beginning of a hang report that says why ranks can never go on.

    Args:
        states: the states of all ranks, by rank.
        deadlocked: the ranks that :func:`deadlocked_ranks` has found.
    """
    absent_ranks: set[int] = set()
    for absent in _absent_ranks(states, deadlocked).values():
        absent_ranks |= absent
    ended = [rank for rank in sorted(absent_ranks) if states[rank].has_ended]
    waiting = ranks_in_words(deadlocked)
    if ended:
        return f"{CANNOT_GO_ON} {waiting} cannot go on after the end of {ranks_in_words(ended)}"
    lines = [f"{CANNOT_GO_ON} {waiting} wait for each other, in different calls"]
    lines += describe_ranks_by_call(_ranks_by_call(states, deadlocked))
    return "\n  ".join(lines)


def describe_ranks_by_call(ranks_by_call: Mapping[str, list[int]]) -> list[str]:
    """Return a line for each call in which ranks wait. The call of most ranks comes last.

    Args:
        ranks_by_call: the ranks in each call, by the text of the call.
    """
    odd = ranks_of_odd_call(ranks_by_call)  # empty if no call has fewer ranks than all others
    lines = []
    for call, ranks in sorted(ranks_by_call.items(), key=lambda item: len(item[1])):
        words = ranks_in_words(ranks)
        if ranks == odd:
            words = f"the odd one is {words}"
        lines.append(f"{words}: {call}")
    return lines


def odd_ranks(states: Mapping[int, RankState], deadlocked: Collection[int]) -> list[int]:
    """Return the deadlocked ranks in the call in which the fewest ranks wait.

    The list is empty if several calls have the fewest ranks.

    Args:
        states: the states of all ranks, by rank.
        deadlocked: the ranks that :func:`deadlocked_ranks` has found.
    """
    return ranks_of_odd_call(_ranks_by_call(states, deadlocked))


def ranks_of_odd_call(ranks_by_call: Mapping[str, list[int]]) -> list[int]:
    """Return the ranks that wait in a call in which fewer ranks wait than in every other call.

    The list is empty if there is no such call, as with two ranks in two calls.

    Args:
        ranks_by_call: the ranks in each call, by the text of the call.
    """
    groups = sorted(ranks_by_call.values(), key=len)
    has_smallest_group = len(groups) > 1 and len(groups[0]) < len(groups[1])
    if not has_smallest_group:
        return []
    return groups[0]


def _ranks_by_call(
    states: Mapping[int, RankState], deadlocked: Collection[int]
) -> dict[str, list[int]]:
    """Return the deadlocked ranks in each call, by the text of their activity.

    The text names the call and its line, such as ``"in all_reduce at train.py:1"``.
    """
    ranks_by_call: dict[str, list[int]] = {}
    for rank in sorted(deadlocked):
        ranks_by_call.setdefault(states[rank].activity, []).append(rank)
    return ranks_by_call
