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

__all__ = ["TRAIN", "Ended", "Job", "assert_no_files_left", "command", "within"]

TRAIN = Path(__file__).with_name("train.py")
DEADLINE = 150


def within(seconds: float = 5.0) -> float:
    """Return the seconds within which a job has to end on a busy machine.

    Fabric promises ``seconds`` on an idle machine, which ``python -m benchmarks.faults`` measures.
    Fabric's own waits sum to less than 3.5 s (see ``test_launchers_signals.py``), and the remaining
    time is work. The result allows for ten times that work. It is less than the next longer wait of
    fabric, SAVE_GRACE.
    """
    return seconds + 15.0


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    ``code`` is None when the launching process still ran at the limit. ``seconds`` counts from the
    fault to the end of the launching process and of all ranks. ``alive`` is the number of ranks
    that still ran at the limit.
    """

    code: int | None
    output: list[str]
    errors: str
    seconds: float
    alive: int = 0


def command(launcher: str, fault: str) -> list[str]:
    """Return the command that starts the job of ``train.py`` with a launcher of fabric."""
    assert launcher in LAUNCHERS
    python = [sys.executable]
    if launcher == "run":
        python += ["-m", "fabric", "run", "--accelerator", "cpu", "--devices", "2"]
    return [*python, str(TRAIN), launcher, fault]


class Job:
    """Two ranks in a new process group, as a terminal starts them.

    Leaving the block kills the processes that still live.
    """

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
                pid = int(self.line("ready").split()[2])
                # A rank whose fault came quickly has ended already.
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.ranks.append(psutil.Process(pid))
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
        """Return the next line that starts with this word; keep the lines before it."""
        for line in self.output:
            if line.startswith(first_word):
                self.output.remove(line)
                return line
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(first_word):
                return line
            self.output.append(line.rstrip("\n"))
        raise AssertionError(f"the job ended before {first_word!r}: {self._written()[-2000:]}")

    def signal(self, number: int, *, to_group: bool = False) -> float:
        """Send a signal to the launching process, or to its group; return the monotonic time."""
        if to_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return time.monotonic()

    def end(self, since: float) -> Ended:
        """Wait for the job. Every rank has to end with it, and no temporary file may be left."""
        ended = self.watch(since, DEADLINE)
        assert ended.code is not None, "the launching process did not end"
        assert not ended.alive, "ranks outlived the launching process"
        assert_no_files_left(self.directory)
        return ended

    def watch(self, since: float, limit: float) -> Ended:
        """Wait ``limit`` seconds for the job; count and kill the processes that live then."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        remaining = max(0.0, deadline - time.monotonic())
        _, alive = psutil.wait_procs(self.ranks, timeout=remaining)
        seconds = time.monotonic() - since
        code = self.process.poll()
        for process in [self.process, *alive]:
            process.kill()
        last_output, _ = self.process.communicate(timeout=DEADLINE)
        output = [*self.output, *last_output.splitlines()]
        return Ended(code, output, self._written(), seconds, alive=len(alive))

    def _written(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


def assert_no_files_left(directory: Path) -> None:
    """Fail unless this directory for temporary files becomes empty within 150 seconds."""
    deadline = time.monotonic() + DEADLINE
    files = _temporary_files(directory)
    while files:
        assert time.monotonic() < deadline, f"files were left in the temporary directory: {files}"
        time.sleep(0.02)  # processes that end at this moment still clean up
        files = _temporary_files(directory)


def _temporary_files(directory: Path) -> list[Path]:
    # torch's compiler makes its cache folder when it is imported, at the latest with the first
    # optimizer.
    return [path for path in directory.iterdir() if not path.name.startswith("torchinductor")]
