"""How long the ranks of a job have to end, and when there is nothing left to wait for.

[Note: Deaf ranks] A signal makes a rank run Python code. A rank in C++ code that waits for another one comes to that
when the other one comes, or ends. So there is something to wait for as long as a rank has heard the signal, has ended
lately, or computes; where none of this is the case, the ranks wait for each other and will not run their ``finally``.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["ASK", "COLLECT", "HEAR", "INSISTING", "INTERRUPT", "REAP", "SAVE", "WIND_DOWN", "await_ends"]

# Seconds: for the other errors to arrive; for the ranks that remain to tell theirs; for ``finally`` blocks after a
# failure and after an interruption; for a deaf rank; for the system to reap a killed process; from a signal to one that
# means insisting. Nothing that a user waits for after a fault may sum up to five: a test counts.
COLLECT, ASK, WIND_DOWN, INTERRUPT, HEAR, REAP, INSISTING = 1.0, 0.3, 2.0, 3.0, 1.0, 5.0, 0.3
# Seconds for a script that asks fabric.should_stop to write its checkpoint; the default of torchrun and of Kubernetes.
SAVE = 30.0
_IDLE = 0.05  # of a core: the threads of fabric and of gloo look around now and then


def await_ends(
    alive: Callable[[], Mapping[int, int]],
    has_heard: Callable[[int], bool],
    pause: Callable[[float], bool],
    grace: float,
) -> None:
    """Wait for ranks that got a signal, as long as it makes sense; see the note at the top.

    Args:
        alive: the process ids of the ranks that still run, by rank.
        has_heard: whether a rank has acted on the signal.
        pause: wait for so many seconds, or less if all end; whether the rest of the grace is to be given up.
        grace: seconds.
    """
    until = time.monotonic() + grace
    while (pids := alive()) and (left := until - time.monotonic()) > 0:
        before = sum(map(_processor_seconds, pids.values()))
        if pause(min(HEAR, left)):
            return
        worked = sum(map(_processor_seconds, pids.values())) - before
        if alive() == pids and worked < _IDLE * HEAR and not any(map(has_heard, pids)):
            return


def _processor_seconds(pid: int) -> float:
    """What all threads of a process have taken; not a number unless it is known, and its main thread sleeps."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is not a Linux
        return math.nan
    return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK") if state == "S" else math.nan
