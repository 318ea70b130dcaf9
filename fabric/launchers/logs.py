"""The output of the ranks of ``fabric run``: files, and lines on the terminal."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from fabric.launchers.supervisor import RankProcess, describe_exit

__all__ = ["RankLogs"]

_POLL_INTERVAL = 0.1  # seconds between two looks at the files


@dataclass
class _RankLog:
    """The file of a rank, and what of it has been shown.

    Attributes:
        file: the open file.
        position: the number of bytes that have been read.
        unfinished_line: the bytes that have been read and not shown, because their line goes on.
    """

    file: BinaryIO
    position: int
    unfinished_line: bytes = b""


@final
class RankLogs:
    """A file for the output of each rank of this machine.

    The ranks write to their files directly, so that nothing is lost if any process is killed.

    Args:
        folder: an existing folder for the files. Existing files are appended to.
        restart: how often the ranks have been restarted. If it is not 0, it is part of the names.
        tee: whether to show complete lines on standard output, too, each behind its rank. Of a
            progress bar that rewrites its line, the last state is shown.
    """

    def __init__(self, folder: Path, restart: int = 0, *, tee: bool = False) -> None:
        self._folder = folder
        self._suffix = ".log"
        if restart > 0:
            self._suffix = f".restart-{restart}.log"
        self._logs: dict[int, _RankLog] = {}
        self._have_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fabric-tee", daemon=True)
        if tee:
            self._thread.start()

    def path(self, rank: object) -> Path:
        """Return the path of the file of a rank."""
        return self._folder / f"rank-{rank}{self._suffix}"

    def open(self, rank: int) -> int:
        """Open the file of a rank, and return its descriptor."""
        file = self.path(rank).open("a+b", buffering=0)
        self._logs[rank] = _RankLog(file, position=os.fstat(file.fileno()).st_size)
        return file.fileno()

    def close(self, ranks: Iterable[RankProcess]) -> None:
        """Show the remaining output, and append each failed rank's error to its file.

        The ranks do not print their errors themselves.
        """
        self._have_ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        for rank in ranks:
            if not rank.exit_code:
                continue
            if rank.failure is not None:
                text = rank.failure.text
            else:
                text = f"rank {rank.global_rank} {describe_exit(rank.exit_code)}\n"
            self._logs[rank.global_rank].file.write(f"\n{text}".encode())
        for log in self._logs.values():
            log.file.close()

    def _follow(self) -> None:
        """Show new lines of all files until the ranks have ended."""
        with open(1, "wb", closefd=False) as terminal:
            have_ended = False
            while not have_ended:
                have_ended = self._have_ended.wait(_POLL_INTERVAL)
                for rank, log in list(self._logs.items()):
                    for line in _read_lines(log, have_ended):
                        # What a progress bar has written over is left out.
                        _, _, visible = line.rstrip(b"\r").rpartition(b"\r")
                        terminal.write(b"[rank%d]: %s\n" % (rank, visible))
                terminal.flush()


def _read_lines(log: _RankLog, is_last_read: bool) -> list[bytes]:
    """Return the complete lines that were added to a file, and at the end the unfinished line."""
    descriptor = log.file.fileno()
    size = max(0, os.fstat(descriptor).st_size - log.position)
    # read() would move the file position, which the rank shares.
    added = os.pread(descriptor, size, log.position)
    log.position += len(added)
    *lines, unfinished_line = (log.unfinished_line + added).split(b"\n")
    # Only the last state of a progress bar is needed.
    log.unfinished_line = unfinished_line[max(0, unfinished_line.rfind(b"\r")) :]
    if is_last_read and log.unfinished_line:
        lines.append(log.unfinished_line)
    return lines
