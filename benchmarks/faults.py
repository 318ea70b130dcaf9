"""What happens when something goes wrong in a job of two ranks: the table of ``docs/reliability.md``.

``python -m benchmarks.faults [--quick] [--launchers popen,run,...]`` runs the jobs of ``tests/faults``, each once, with
fabric and with plain torch. A cell holds the exit code, the seconds from the fault to the end of all processes, how
many lines were written to standard error, how far above their end the cause is last named, and how many ranks were
still there after 15 seconds.
"""

import argparse
import os
import re
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.faults_raw import COMMANDS
from tests.faults.jobs import Ended, Job, command
from tests.faults.train import LAUNCHERS, ON_ALL, ON_ONE

LIMIT = 15.0  # seconds; plain torch would wait for half an hour
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# How a report may say it, where it is not the message of the error.
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
    parser.add_argument("--launchers", default=",".join(["popen", "run", *COMMANDS]))
    parser.add_argument("--quick", action="store_true", help="three faults, in less than a minute")
    parser.add_argument("--faults", default="", help="some of them: raises, exits, SIGKILL-trains, SIGINT-waits, ...")
    options = parser.parse_args()
    launchers = options.launchers.split(",")
    faults = [fault.__name__ for fault in ON_ONE]
    faults += [f"{number.name}-{state.__name__}" for state in ON_ALL[:4] for number in SIGNALS]
    if options.quick:
        launchers, faults = ["popen", "torchrun"], ["raises", "exits", "SIGKILL-waits_in_cpp"]
    if options.faults:
        faults = options.faults.split(",")
    print("| fault |", " | ".join(launchers), "|")
    print("|---" * (len(launchers) + 1) + "|")
    for name in faults:
        *numbers, fault = name.split("-")
        number = signal.Signals[numbers[0]] if numbers else None
        cells = [measure(launcher, fault, number) for launcher in launchers]
        title = f"rank 1 {fault}" if number is None else f"{number.name} to the parent, ranks: {fault}"
        print(f"| {title.replace('_', ' ')} |", " | ".join(cells), "|", flush=True)


def measure(launcher: str, fault: str, number: signal.Signals | None) -> str:
    started = command(launcher, fault) if launcher in LAUNCHERS else [*COMMANDS[launcher], fault]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "tmp")
        directory.mkdir()
        with Job(directory, started) as job:
            since = float(job.line("fault").split()[1]) if number is None else job.signal(number)
            ended = job.watch(since, LIMIT)
    return cell(ended, fault, number)


def cell(ended: Ended, fault: str, number: signal.Signals | None) -> str:
    lines = ended.errors.rstrip().splitlines()
    said = [f"code {ended.code}" if ended.code is not None else "hangs"]
    said.append(f"{ended.seconds:.1f} s" if ended.seconds < LIMIT else f"over {LIMIT:.0f} s")
    said.append(f"{len(lines)} lines")
    if number is None:
        pattern = re.compile(CAUSES.get(fault, "the loss is not a number"))
        named = [match.end() for match in pattern.finditer(ended.errors.rstrip())]
        below = ended.errors.rstrip().count("\n", named[-1]) if named else None
        said.append("no cause" if below is None else f"cause {below} up")
    if ended.alive and ended.code is not None:
        said.append(f"**{ended.alive} orphans**")
    return ", ".join(said)


if __name__ == "__main__":
    # For the ranks that plain torch starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    began = time.monotonic()
    main()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"\n{time.monotonic() - began:.0f} s; in the last minute {load:.1f} processes wanted each core")
