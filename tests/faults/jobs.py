"""Starting the job of ``train.py`` and looking at how it ends."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.train import LAUNCHERS

__all__ = ["Ended", "Job", "nothing_left", "within"]

TRAIN = Path(__file__).with_name("train.py")
DEADLINE = 60


def within(seconds: float = 5.0) -> float:
    """What is promised of a machine with nothing else to do, times the processes that want each of its cores.

    The factor is an allowance of the tests, no part of the promise: fabric's own waits sum to less than 3.5 s, see
    ``test_launchers_signals.py``, and the rest is work.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass(frozen=True)
class Ended:
    """How a job ended; seconds since the fault."""

    code: int
    output: list[str]
    errors: str
    seconds: float


class Job:
    """Two ranks in a process group of their own, as a terminal would start them; leaving the block kills what lives."""

    def __init__(self, directory: Path, launcher: str, fault: str, *, prefix: tuple[str, ...] = ()) -> None:
        assert launcher in LAUNCHERS
        run = ["-m", "fabric", "run", "--accelerator", "cpu", "--devices", "2"] if launcher == "run" else []
        self.directory = directory
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *run, str(TRAIN), launcher, fault],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
            cwd=directory.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.output: list[str] = []
        self.ranks = [psutil.Process(int(self.line("ready").split()[2])) for _ in range(2)]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=DEADLINE)

    def line(self, first_word: str) -> str:
        """The next line that starts with this word; others are kept."""
        assert self.process.stdout is not None
        if kept := [line for line in self.output if line.startswith(first_word)]:
            self.output.remove(kept[0])
            return kept[0]
        while line := self.process.stdout.readline():
            if line.startswith(first_word):
                return line
            self.output.append(line.rstrip("\n"))
        raise AssertionError(f"the job ended before {first_word!r}: {self.process.communicate()[1][-2000:]}")

    def signal(self, number: int, *, to_group: bool = False) -> float:
        """Send a signal to the launching process or to all; when, on the monotonic clock."""
        (os.killpg if to_group else os.kill)(self.process.pid, number)
        return time.monotonic()

    def end(self, since: float) -> Ended:
        """Wait for it; every rank has to end with it, and no file may be left."""
        output, errors = self.process.communicate(timeout=DEADLINE)
        _, alive = psutil.wait_procs(self.ranks, timeout=10)
        seconds = time.monotonic() - since
        assert not alive, "ranks outlived the launching process"
        nothing_left(self.directory)
        return Ended(self.process.returncode, [*self.output, *output.splitlines()], errors, seconds)


def nothing_left(directory: Path) -> None:
    """Raise unless this directory for temporary files is empty within seconds."""
    deadline = time.monotonic() + 5
    # torch's compiler makes its cache folder as soon as it is imported, with the first optimizer at the latest.
    while left := [path for path in directory.iterdir() if not path.name.startswith("torchinductor")]:
        assert time.monotonic() < deadline, f"something was left in the directory for temporary files: {left}"
        time.sleep(0.02)
