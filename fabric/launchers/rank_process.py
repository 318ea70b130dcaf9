"""One rank as its supervisor sees it: its process, its end of the control pipe, and how it ended."""

import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from fabric.launchers.rank import Failure, RankConfig

__all__ = ["PrivateFile", "Process", "RankProcess", "describe_exit", "exit_status", "explain_exit"]


class Process(Protocol):
    """A process, however it was started."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...


class PrivateFile:
    """A file that other users cannot open, and that is gone with this process, be it killed.

    Attributes:
        path: under which processes of the same user open it.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            # Without a name; the system lets nobody else look into /proc/<pid>/fd. An interpreter that was built for an
            # older C library, as some of conda's are, cannot make one in memory.
            in_memory = getattr(os, "memfd_create", None)
            self._file: Any = open(in_memory("fabric"), "rb") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
            # Numbered as this /proc numbers processes, which may be that of an outer namespace.
            self.path = f"/proc/{os.readlink('/proc/self')}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile(prefix="fabric-")  # noqa: SIM115 - likewise
            self.path = self._file.name

    def read(self) -> str:
        """What it holds now."""
        fd = self._file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Close and remove it."""
        self._file.close()


@dataclass(kw_only=True)
class RankProcess:
    """One rank, as its supervisor sees it.

    Attributes:
        config: what it was configured with.
        process: the process.
        control: this end of its control pipe; see ``rank.py``.
        stack: where the stack of a fatal signal is.
        messages: by kind, the content of the latest message from it.
        exit_code: once it has ended.
        ended: when that was noticed, on the monotonic clock.
    """

    config: RankConfig
    process: Process
    control: Connection
    stack: PrivateFile
    messages: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    ended: float = 0.0

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.config.world.rank

    @property
    def failure(self) -> Failure | None:
        """Its error, if it has sent one."""
        return self.messages.get("error") or self.messages.get("described")

    @property
    def is_exiting(self) -> bool:
        """Whether it has run its payload to an end, good or bad."""
        return "finished" in self.messages or "error" in self.messages

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.exit_code is None:
            self.exit_code = self.process.poll()
            self.ended = time.monotonic()
        return self.exit_code is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended."""
        if not self.poll():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send(self, kind: Any, content: Any = None) -> None:
        """Send a message; that a rank has died is found by :meth:`poll`."""
        with contextlib.suppress(OSError):
            self.control.send((kind, content))

    def receive(self) -> None:
        """Take the messages that are there."""
        try:
            while not self.control.closed and self.control.poll():
                kind, content = self.control.recv()
                self.messages[kind] = content
        except (EOFError, OSError):
            self.control.close()

    def processor_seconds(self) -> float:
        """What all threads of the process have taken; not a number unless it is known, and its main thread sleeps."""
        try:
            state, *fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended, or this is not a Linux
            return math.nan
        return sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK") if state == "S" else math.nan

    def cause_order(self, peer_lost: bool) -> tuple[int, float, int] | None:
        """Its place in the order in which ranks are taken for the root cause; None if it cannot be.

        Args:
            peer_lost: whether a rank says that it has lost another one.
        """
        failure, finished = self.failure, "finished" in self.messages
        if failure is not None:
            return 3 if failure.secondary else 1 if failure.pending else 0, failure.time, self.rank
        # One that has finished did so too early only if another says that it was still needed.
        if peer_lost if finished else self.exit_code == 0:
            return 2, self.ended, self.rank
        return (0, self.ended, self.rank) if self.exit_code else None


def exit_status(code: int) -> int:
    """What a launching process ends with when a rank has ended with this code: as a shell shows it, and never 0."""
    return 128 - code if code < 0 else code or 1


def describe_exit(code: int, raised: bool = False) -> str:
    """How a rank ended, for a sentence that begins with its name."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name} (exit code {code})"
    if code == 128 + signal.SIGTERM:
        return f"was ended by SIGTERM (exit code {code})"
    if raised and code == 1:
        return "failed (exit code 1)"
    return f"exited with exit code {code}"


def explain_exit(code: int) -> str:
    """What that usually means; empty where there is no more to say."""
    if code == 0:
        return "it ended early, without an error, while the other ranks still needed it"
    if code == -signal.SIGKILL:
        return "fabric did not do it; the system kills this way when memory runs out"
    return ""
