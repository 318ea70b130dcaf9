"""The states that the ranks have published in the store, and what is seen of other ranks."""

from collections.abc import Iterable

from fabric.diagnostics.rank_state import RankState
from fabric.diagnostics.stacks import StackAddress, has_ended, read_stack
from fabric.store import JobStore

__all__ = ["read_states", "reasons_of_ended_ranks"]


def read_states(store: JobStore, number: int) -> dict[int, RankState]:
    """Return the state of every rank for a hang report.

    The state of a rank that has published none comes from what can be read of its process.

    Args:
        store: the store of the job.
        number: the number of the report.
    """
    ranks = range(store.size)
    # A rank that makes no further calls has published its last state under "closed". The state that
    # it may have published for this report before is preferred.
    closed = store.read("closed", ranks)
    published = closed | store.read(f"state/{number}", ranks)
    states = {}
    for rank in ranks:
        if rank in published:
            # JSON has made a list of the named tuple.
            states[rank] = RankState(*published[rank])
        else:
            states[rank] = _read_unresponsive_state(store, rank)
    return states


def _read_unresponsive_state(store: JobStore, rank: int) -> RankState:
    """Return a state for a rank that has published none, with its stack if it can be read."""
    # A rank publishes its address at the start of its hang reporter.
    address = store.read("address", [rank]).get(rank)
    if address is None:
        return RankState(activity="it has not started")
    stack_address = StackAddress(*address)
    # The first line of the text says what is known of the process. The other lines are the stack.
    activity, _, stack = read_stack(stack_address).partition("\n")
    has_process_ended = has_ended(stack_address.node, stack_address.pid)
    return RankState(activity, stack=stack, has_ended=has_process_ended)


def reasons_of_ended_ranks(store: JobStore, ranks: Iterable[int]) -> dict[int, str]:
    """Return why ranks make no further calls, by rank, as text that follows "rank 1".

    The result has no entry for a rank that runs, or that nothing is known of.

    Args:
        store: the store of the job.
        ranks: the ranks to look at.
    """
    ranks = list(ranks)
    reasons: dict[int, str] = {}
    for rank, address in store.read("address", ranks).items():
        stack_address = StackAddress(*address)
        if has_ended(stack_address.node, stack_address.pid):
            reasons[rank] = (
                f"makes no further calls: its process (pid {stack_address.pid}) has ended"
            )
    # A reason that a rank has published says more, and replaces the other one.
    for rank, state in store.read("closed", ranks).items():
        reasons[rank] = RankState(*state).activity
    return reasons
