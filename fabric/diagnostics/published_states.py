"""The states that the ranks have published in the store, and what is seen of other ranks."""

from fabric.diagnostics.hang_report import MAX_LISTED_RANKS
from fabric.diagnostics.rank_state import RankState
from fabric.diagnostics.stacks import StackAddress, has_ended, read_stack
from fabric.store import JobStore

__all__ = ["read_states", "reasons_of_ended_ranks"]


def read_states(store: JobStore, number: int) -> dict[int, RankState]:
    """Return the state of every rank for a report.

    A rank that has not published a state gets one from what can be read of its process.
    """
    ranks = range(store.size)
    # A state for this report takes precedence over the state of a rank that closed later.
    closed = store.read("closed", ranks)
    published = closed | store.read(f"state/{number}", ranks)
    states = {}
    for rank in ranks:
        if rank in published:
            states[rank] = RankState(*published[rank])
        else:
            states[rank] = _read_unresponsive_state(store, rank)
    return states


def _read_unresponsive_state(store: JobStore, rank: int) -> RankState:
    """Return a state for a rank that has published none, with its stack if it can be read."""
    address = store.read("address", [rank]).get(rank)
    if address is None:
        return RankState("it has not started")
    # The first line of the text says what is known of the process. The other lines are the
    # stack.
    stack_address = StackAddress(*address)
    activity, _, stack = read_stack(stack_address).partition("\n")
    is_gone = has_ended(stack_address.node, stack_address.pid)
    return RankState(activity, stack=stack, has_ended=is_gone)


def reasons_of_ended_ranks(store: JobStore) -> list[str]:
    """Return a line for each of the first ranks that make no further calls."""
    ranks = range(store.size)
    reasons: dict[int, str] = {}
    for rank, address in store.read("address", ranks).items():
        stack_address = StackAddress(*address)
        if has_ended(stack_address.node, stack_address.pid):
            reasons[rank] = f"its process (pid {stack_address.pid}) has ended"
    # What a rank has published comes before what is seen of its process.
    for rank, state in store.read("closed", ranks).items():
        reasons[rank] = RankState(*state).activity
    lines = [f"  rank {rank}: {reasons[rank]}" for rank in sorted(reasons)]
    return lines[:MAX_LISTED_RANKS]
