"""Faults in a job of two ranks: prints the table of ``docs/reliability.md``.

``python -m benchmarks.faults [--quick] [--launchers popen,...] [--faults raises,...] [--runs N]``
runs the jobs of ``tests/faults`` with fabric and with plain torch. A cell has the exit code, the
seconds from the fault to the end of all processes, the number of lines on standard error, how many
lines above the end the cause is last named, and the number of ranks that were still alive at the
limit. The cell shows the run of the median time, with the longest time in brackets. A run that does
not end is not repeated.
"""

import argparse
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.faults_raw import COMMANDS
from tests.faults.jobs import Ended, Job, command
from tests.faults.train import LAUNCHERS, ON_ALL, ON_ONE

LIMIT = 10.0  # seconds; plain torch would wait for half an hour
# The rows of the table. `--faults all` runs the faults of the tests instead.
FAULTS = {
    "raises": "rank 1 raises",
    "raises_and_tears_down": "rank 1 raises and tears down",
    "exits": "rank 1 exits with 3",
    "killed": "rank 1 is killed",
    "returns": "rank 1 returns",
    "SIGKILL-waits_in_cpp": "SIGKILL to the parent, ranks wait in C++",
    "SIGTERM-waits_in_cpp": "SIGTERM to the parent, ranks wait in C++",
    "SIGINT-waits_in_cpp": "SIGINT to the parent, ranks wait in C++",
}
QUICK = ("raises", "exits", "SIGINT-waits_in_cpp")
ALL = (
    *(fault.__name__ for fault in ON_ONE),
    *(
        f"{name}-{state.__name__}"
        for state in ON_ALL[:4]
        for name in ("SIGKILL", "SIGTERM", "SIGINT")
    ),
)
# The cause in a report, as a regular expression, if the report does not have the error's message.
CAUSES = {
    "raises_in_collective": r"not a number|must be|Invalid|invalid",
    "exits": r"exit ?code\W+3\b",
    "returns": r"exit code 0|closed by peer",
    "killed": r"SIGKILL|Signal 9|exit ?code\W+-9",
    "segfaults": r"SIGSEGV|Signal 11|exit ?code\W+-11",
    "out_of_memory": r"MemoryError",
    "raises_stubborn": r"StubbornError",
    "raises_long": r"a line of a long message\s+end",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--launchers", default=",".join(["popen", *COMMANDS]), help="popen, run, spawn, ..."
    )
    parser.add_argument(
        "--quick", action="store_true", help="three faults, once, in less than a minute"
    )
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help=f"some of {', '.join(ALL)}; or all"
    )
    parser.add_argument("--runs", type=int, default=3, help="of which a cell is the median")
    options = parser.parse_args()
    launchers = options.launchers.split(",")
    faults = options.faults.split(",")
    runs = options.runs
    if options.quick:
        launchers = ["popen", "torchrun"]
        faults = list(QUICK)
        runs = 1
    if options.faults == "all":
        faults = list(ALL)
    began = time.monotonic()
    print("| fault |", " | ".join(launchers), "|")
    print("|---" * (len(launchers) + 1) + "|")
    for name in faults:
        cells = [cell(measure(launcher, name, runs), name) for launcher in launchers]
        print(f"| {FAULTS.get(name, name.replace('_', ' '))} |", " | ".join(cells), "|", flush=True)
    cores = os.cpu_count() or 1
    print(
        f"\nTwo ranks, torch {torch.__version__.partition('+')[0]}, {cores} cores, each wanted by "
        f"{os.getloadavg()[0] / cores:.1f} processes in the last minute, these included; "
        f"runs of each cell: {runs}; at most {LIMIT:.0f} s each; "
        f"{time.monotonic() - began:.0f} s in all."
    )


def measure(launcher: str, name: str, runs: int) -> list[Ended]:
    """Return the ends of so many runs, the quickest first. A run that does not end is the last."""
    signal_name, _, fault = name.rpartition("-")
    if launcher in LAUNCHERS:
        job_command = command(launcher, fault)
    else:
        job_command = [*COMMANDS[launcher], fault]
    ends: list[Ended] = []
    while len(ends) < runs and not any(end.seconds >= LIMIT for end in ends):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder, "tmp")
            directory.mkdir()
            with Job(directory, job_command) as job:
                if signal_name:
                    since = job.signal(signal.Signals[signal_name])
                else:
                    since = float(job.line("fault").split()[1])
                ends.append(job.watch(since, LIMIT))
    return sorted(ends, key=lambda end: end.seconds)


def cell(ends: list[Ended], name: str) -> str:
    """Return a cell of the table."""
    longest = ends[-1]
    ended = longest
    if longest.seconds < LIMIT:
        ended = ends[len(ends) // 2]
    errors = ended.errors.rstrip()
    facts = ["hangs" if ended.code is None else f"code {ended.code}"]
    seconds = f"over {LIMIT:.0f} s"
    if ended.seconds < LIMIT:
        seconds = f"{ended.seconds:.1f} s"
    if ended is not longest:
        seconds = f"{seconds} ({longest.seconds:.1f})"
    facts.append(seconds)
    facts.append(f"{len(errors.splitlines())} lines")
    if "-" not in name:
        facts.append(cause(errors, CAUSES.get(name, "the loss is not a number")))
    if ended.alive and ended.code is not None:
        facts.append(f"**{ended.alive} orphans**")
    return ", ".join(facts)


def cause(errors: str, pattern: str) -> str:
    """Return how many lines above the end of standard error the cause is last named."""
    matches = list(re.finditer(pattern, errors))
    if not matches:
        return "no cause"
    lines_below = errors.count("\n", matches[-1].end())
    return f"cause {lines_below} up"


if __name__ == "__main__":
    # For the ranks that plain torch starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    main()
