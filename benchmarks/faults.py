"""What happens when something goes wrong in a job: the table of ``docs/reliability.md``.

``python -m benchmarks.faults [--launchers popen,run,...]`` runs the jobs of ``tests/faults``, each once.
"""

import argparse
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.jobs import Ended, Job
from tests.faults.train import LAUNCHERS, ON_ALL, ON_ONE

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    print("| fault | launcher | exit code | what the user sees | lines | seconds to the end | orphans |")
    print("|---|---|--:|---|--:|--:|--:|")
    for launcher in parser.parse_args().launchers.split(","):
        for fault in ON_ONE:
            row(f"rank 1: {fault.__name__}", launcher, fault.__name__, None)
        for state in ON_ALL[:3]:
            for number in SIGNALS:
                row(f"{number.name} to the parent: {state.__name__}", launcher, state.__name__, number)


def row(title: str, launcher: str, fault: str, number: signal.Signals | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "tmp")
        directory.mkdir()
        with Job(directory, launcher, fault) as job:
            since = float(job.line("fault").split()[1]) if number is None else job.signal(number)
            ended = job.end(since)  # raises when a rank or a file is left
    print(
        f"| {title.replace('_', ' ')} | {launcher} | {ended.code} | {seen(ended)} | {len(ended.errors.splitlines())} "
        f"| {ended.seconds:.1f} | 0 |",
        flush=True,
    )


def seen(ended: Ended) -> str:
    """The line that names the rank, and the last one."""
    lines = [line.strip()[:90].replace("|", "\\|") for line in ended.errors.splitlines() if line.strip()]
    named = [line for line in lines if "rank " in line and " of 2 " in line]
    return " ... ".join(f"`{line}`" for line in dict.fromkeys([*named[-1:], *lines[-1:]])) or "nothing"


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"\n{time.monotonic() - started:.0f} s")
