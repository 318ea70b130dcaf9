"""Starting the job of ``train.py`` and looking at how it ends."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.train import LAUNCHERS

__all__ = ["TRAIN", "Ended", "Job", "command", "nothing_left", "within"]

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
    """How a job ended; seconds since the fault, to the end of the launching process and all ranks.

    ``code`` is None when the launching process still ran at the limit; ``alive`` counts ranks that did.
    """

    code: int | None
    output: list[str]
    errors: str
    seconds: float
    alive: int = 0


def command(launcher: str, fault: str) -> list[str]:
    """What starts the job of ``train.py`` with a launcher of fabric."""
    assert launcher in LAUNCHERS
    run = (
        ["-m", "fabric", "run", "--accelerator", "cpu", "--devices", "2"]
        if launcher == "run"
        else []
    )
    return [sys.executable, *run, str(TRAIN), launcher, fault]


class Job:
    """Two ranks in a process group of their own, as a terminal would start them; leaving the block kills what lives."""

    def __init__(self, directory: Path, started: list[str]) -> None:
        self.directory = directory
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self.process = subprocess.Popen(
            started,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
            cwd=directory.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,
        )
        self.output: list[str] = []
        self.ranks: list[psutil.Process] = []
        try:
            for _ in range(2):
                with contextlib.suppress(psutil.NoSuchProcess):  # the fault came quickly
                    self.ranks.append(psutil.Process(int(self.line("ready").split()[2])))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for rank in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        self.process.communicate(timeout=DEADLINE)
        self._errors.close()

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
        raise AssertionError(f"the job ended before {first_word!r}: {self._written()[-2000:]}")

    def signal(self, number: int, *, to_group: bool = False) -> float:
        """Send a signal to the launching process or to all; when, on the monotonic clock."""
        (os.killpg if to_group else os.kill)(self.process.pid, number)
        return time.monotonic()

    def end(self, since: float) -> Ended:
        """Wait for it; every rank has to end with it, and no file may be left."""
        ended = self.watch(since, DEADLINE)
        assert ended.code is not None, "the launching process did not end"
        assert not ended.alive, "ranks outlived the launching process"
        nothing_left(self.directory)
        return ended

    def watch(self, since: float, limit: float) -> Ended:
        """Wait for it, for so many seconds at most; what lives then is counted and killed."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        _, alive = psutil.wait_procs(self.ranks, timeout=max(0.0, deadline - time.monotonic()))
        seconds = time.monotonic() - since
        code = self.process.poll()
        for process in [self.process, *alive]:
            process.kill()
        output, _ = self.process.communicate(timeout=DEADLINE)
        return Ended(
            code, [*self.output, *output.splitlines()], self._written(), seconds, len(alive)
        )

    def _written(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


def nothing_left(directory: Path) -> None:
    """Raise unless this directory for temporary files is empty within seconds."""
    deadline = time.monotonic() + 5
    # torch's compiler makes its cache folder as soon as it is imported, with the first optimizer at the latest.
    while left := [
        path for path in directory.iterdir() if not path.name.startswith("torchinductor")
    ]:
        assert time.monotonic() < deadline, (
            f"something was left in the directory for temporary files: {left}"
        )
        time.sleep(0.02)  # processes that end at this moment still clean up
