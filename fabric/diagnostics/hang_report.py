"""The text of a hang report: which rank waits, for which ranks, and what every rank is doing."""

from collections.abc import Collection, Mapping, Sequence

from fabric.communicators.call_site import fold_frames, user_frames
from fabric.diagnostics.deadlocks import describe_deadlock
from fabric.diagnostics.rank_state import RankState, Wait
from fabric.diagnostics.recorder import HEADING, ranks_in_words
from fabric.diagnostics.tested_versions import untested_torch

__all__ = ["MAX_LISTED_RANKS", "compose_report"]

# How many ranks a report lists, and how many of them with their stacks.
MAX_LISTED_RANKS = 16
_MAX_STACKS = 4


def compose_report(
    states: Mapping[int, RankState],
    requester: int,
    reason: str = "",
    deadlocked: Collection[int] = (),
) -> str:
    """Compose the text of a report from the states of all ranks.

    The report is about the wait of one rank. This is the rank that requested the report. If the
    user requested the report, it is the rank that has waited longest.

    Args:
        states: the states of all ranks, by rank.
        requester: the rank that requested the report.
        reason: why there is a report, if the user requested it. Empty, the default, means that the
            requester waits.
        deadlocked: the ranks that can never go on, if the report ends the job. The report then
            begins with the proof of this, which is the same text whichever rank has requested the
            report.

    Returns:
        The text. Empty if the requester does not wait after all: it is not in a collective or
        phase, and all ranks have started what it started last.
    """
    is_requested_by_user = reason != ""
    waiting_rank = requester
    if is_requested_by_user:
        waiting_rank = _longest_waiting(states)
    waiting = states[waiting_rank]
    # Empty members mean that all ranks must make the call.
    wait = Wait(states, waiting, members=waiting.members or tuple(states))
    is_waiting = waiting.is_inside or bool(wait.missing_ranks)
    if not is_requested_by_user and not is_waiting:
        return ""
    lines: list[str] = []
    if deadlocked:
        lines.append(describe_deadlock(states, deadlocked))
    max_stacks = _MAX_STACKS
    if is_requested_by_user:
        lines.append(reason)
        max_stacks = len(states)
    if is_waiting:
        lines.append(_describe_wait(states, waiting_rank))
    # The proof has named the calls of deadlocked ranks already, and any of them may be the mistake.
    if waiting_rank not in deadlocked:
        lines += _describe_call(wait)
    if is_requested_by_user:
        lines += _describe_steps(states)
    note = untested_torch()
    if note:
        lines.append(note)
    lines.append(HEADING)
    lines += _describe_ranks(states, waiting_rank, wait.missing_ranks, max_stacks)
    text = "\n  ".join(lines)
    return f"fabric: {text}"


def _describe_wait(states: Mapping[int, RankState], waiting_rank: int) -> str:
    """Return a line that says how long a rank has waited, and for which call.

    Args:
        states: the states of all ranks, by rank.
        waiting_rank: the rank that waits.
    """
    state = states[waiting_rank]
    rank = f"rank {waiting_rank} of {len(states)}"
    if not state.is_inside and state.seconds_waited == 0:
        # No rank waits, but this one is ahead of others. Its history ends with the latest call.
        return f"{rank}: {state.activity}{state.history}"
    seconds = f"{round(state.seconds_waited, 1):g} s"
    # "waits for a value at train.py:1" becomes "has waited 60 s for a value at train.py:1".
    text = f"{rank} has waited {seconds} {state.activity.removeprefix('waits ')}"
    if not state.is_inside:
        # With NCCL. The activity names no call, but the history ends with the latest call.
        text += state.history
    return text


def _longest_waiting(states: Mapping[int, RankState]) -> int:
    """Return the rank that has waited longest.

    Ranks in a collective or phase come before all others, since only they wait for other ranks.
    Ranks that have ended come last.
    """

    def waiting_time(rank: int) -> tuple[bool, bool, float]:
        state = states[rank]
        return state.is_inside, not state.has_ended, state.seconds_waited

    return max(states, key=waiting_time)


def _describe_call(wait: Wait) -> list[str]:
    """Return lines that say which ranks have reached the call or phase in which a rank waits."""
    lines: list[str] = []
    if wait.differing_ranks:
        lines += _describe_differing(wait)
    if wait.missing_ranks:
        lines += _describe_missing(wait)
    elif wait.waiting.is_inside and not wait.differing_ranks:
        lines.append(_describe_reached(wait))
    return lines


def _describe_differing(wait: Wait) -> list[str]:
    """Return lines that name the ranks which make other calls than the rank that waits."""
    ranks_by_call: dict[str, list[int]] = {}
    for rank in wait.differing_ranks:
        ranks_by_call.setdefault(wait.states[rank].call, []).append(rank)
    lines = []
    for call, ranks in ranks_by_call.items():
        lines.append(f"in its place, {call} was called by {ranks_in_words(ranks)}")
    lines.append(
        f"{ranks_in_words(wait.members)} have to make the same calls in the same order, outside of "
        "any branch on the rank"
    )
    return lines


def _describe_reached(wait: Wait) -> str:
    """Return a line about a call or phase that every member has started."""
    waiting = wait.waiting
    ranks_that_left = []
    for rank in wait.members:
        state = wait.states[rank]
        is_same_call = state.key == waiting.key and state.number == waiting.number
        if not state.is_inside or not is_same_call:
            ranks_that_left.append(rank)
    if ranks_that_left:
        return (
            f"every rank has reached this call, and {ranks_in_words(ranks_that_left)} went on: "
            "the call is slow, or the ranks have made different calls before"
        )
    return (
        "every rank has reached this call: it is slow, or the ranks wait for each other inside of "
        "it"
    )


def _describe_missing(wait: Wait) -> list[str]:
    """Return lines that name the ranks that reached a call and the ranks that did not."""
    missing = wait.missing_ranks
    reached = sorted(set(wait.members) - set(missing))
    lines = [
        f"reached by: {ranks_in_words(reached)}",
        f"not reached by: {ranks_in_words(missing)}",
    ]
    # Only the key of a send or recv, "{group} {source}>{destination}", has this character.
    is_message = ">" in wait.waiting.key
    # A process that has ended has no stack.
    running = [rank for rank in missing if wait.states[rank].stack]
    # The advice below would be wrong for a message, which has two ranks, and for ended ranks.
    if is_message or not running:
        return lines
    advice = (
        f"{ranks_in_words(wait.members)} have to make this call, outside of any branch on the rank"
    )
    # A rank in no collective and no phase is in the user's own code, and may still make the call.
    in_user_code = [rank for rank in running if not wait.states[rank].is_inside]
    if in_user_code:
        lines.append(
            f"{ranks_in_words(in_user_code)} may still make this call: a line below that makes "
            f"no progress is the cause; otherwise {advice}"
        )
    else:
        lines.append(advice)
    return lines


def _describe_steps(states: Mapping[int, RankState]) -> list[str]:
    """Return a line that explains why the ranks were seen at different steps, if they were.

    Args:
        states: the states of all ranks, by rank.

    Returns:
        A list of the line. Empty if all ranks were seen at the same step.
    """
    steps = {state.step for state in states.values() if state.step > 0}  # 0 stands for unknown
    if len(steps) < 2:
        return []
    return [
        "the ranks were seen at different steps: they answer one after the other, and a rank that "
        "runs makes steps in between"
    ]


def _describe_ranks(
    states: Mapping[int, RankState],
    waiting_rank: int,
    missing: Sequence[int],
    max_stacks: int,
) -> list[str]:
    """Return lines that say what the ranks are doing, some of them with their stacks.

    The lines are ordered by rank. Ranks with equal lines have one description. At most
    ``MAX_LISTED_RANKS`` ranks are listed. The missing ranks are chosen first, then the waiting
    rank, and then the other ranks.

    Args:
        states: the states of all ranks, by rank.
        waiting_rank: the rank that waits.
        missing: the ranks that it waits for. They get a stack with the innermost frame of fabric
            or torch, and the other ranks only the frames of the user's code. If no rank is missing,
            the first listed ranks get a stack with the innermost frame.
        max_stacks: the largest number of ranks that get a stack with the innermost frame.
    """

    def priority(rank: int) -> tuple[bool, bool, int]:
        """Return the sort key of a rank. False is sorted before True."""
        return rank not in missing, rank != waiting_rank, rank

    listed_ranks = sorted(states, key=priority)[:MAX_LISTED_RANKS]
    ranks_with_stack = (missing or listed_ranks)[:max_stacks]
    # Ranks with equal lines are described together.
    ranks_by_description: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(listed_ranks):
        state = states[rank]
        stack = ""
        if rank in ranks_with_stack:
            stack = fold_frames(state.stack)
        elif rank not in missing:
            # This rank has reached the call. The user's code that led to the call may be wrong.
            stack = user_frames(state.stack)
        description = (f"{state.activity}{state.history}", *stack.splitlines())
        ranks_by_description.setdefault(description, []).append(rank)
    lines = []
    for (summary, *frames), ranks in ranks_by_description.items():
        if len(ranks) > 1:
            # The history may have a part such as "; its latest collective was barrier".
            summary = summary.replace("; its latest ", "; their latest ")
        pids = _describe_processes([states[rank].pid for rank in ranks])
        lines.append(f"  {ranks_in_words(ranks)}: {summary}{pids}")
        for frame in frames:
            lines.append(f"    {frame}")
    if len(states) > len(listed_ranks):
        lines.append(f"  ... and {len(states) - len(listed_ranks)} ranks more")
    return lines


def _describe_processes(pids: Sequence[int]) -> str:
    """Return the ids of processes in brackets, as the end of a line. Empty if one is unknown."""
    if 0 in pids:  # 0 stands for unknown
        return ""
    noun = "pids" if len(pids) > 1 else "pid"
    return f" ({noun} {', '.join(map(str, pids))})"
