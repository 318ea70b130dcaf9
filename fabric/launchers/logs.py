"""The output of the ranks of ``fabric run``: files, and lines on the terminal."""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from fabric.launchers.supervisor import RankProcess, describe_exit

__all__ = ["RankLogs"]

_POLL_INTERVAL = 0.1  # seconds between two looks at the files
_READ_SIZE = 1 << 20  # bytes of a file that are in memory at once
# Bytes of a line without an end after which the line is shown in parts.
_MAX_LINE_LENGTH = 1 << 16


@dataclass
class _RankLog:
    """The output file of a rank, and how far the file has been shown on the terminal.

    Attributes:
        file: the open file. The rank has inherited the descriptor and writes to the file.
        position: the number of bytes that have been read.
        unfinished_line: the bytes that have been read and not shown, because their line is not
            complete.
    """

    file: BinaryIO
    position: int
    unfinished_line: bytes = b""


@final
class RankLogs:
    """A file for the output of each rank of this machine, which ``fabric run`` can also show.

    The ranks write to their files directly, so that nothing is lost if any process is killed.

    Args:
        folder: an existing folder for the files. Existing files are appended to.
        restart: how often the ranks have been restarted. If it is not 0, it is part of the names of
            the files.
        tee: whether to show complete lines on standard output, too, after the number of their rank.
            Of a progress bar that rewrites its line, only the last state is shown.
    """

    def __init__(self, folder: Path, restart: int = 0, *, tee: bool = False) -> None:
        """Start the thread that shows lines, if ``tee`` is true. :meth:`open` opens the files."""
        self._folder = folder
        self._suffix = ".log"
        if restart > 0:
            self._suffix = f".restart-{restart}.log"
        self._logs: dict[int, _RankLog] = {}  # by global rank
        self._ranks_have_ended = threading.Event()  # set by close(); _show_lines() then returns
        self._tee_thread: threading.Thread | None = None
        if tee:
            self._tee_thread = threading.Thread(
                target=self._show_lines, name="fabric-tee", daemon=True
            )
            self._tee_thread.start()

    def path(self, rank: object) -> Path:
        """Return the path of the file of a rank, or a pattern of all paths for ``"*"``."""
        return self._folder / f"rank-{rank}{self._suffix}"

    def open(self, rank: int) -> int:
        """Open the file of a rank, and return the descriptor, which the rank inherits."""
        file = self.path(rank).open("a+b", buffering=0)
        # The present content of the file is of an earlier run, and is not shown.
        size = os.fstat(file.fileno()).st_size
        self._logs[rank] = _RankLog(file, position=size)
        return file.fileno()

    def show_report(self, text: str) -> None:
        """Print a hang report on the terminal, unless the lines of all files are shown there.

        Args:
            text: the report. A rank has written it to its file already.
        """
        if self._tee_thread is None:
            print(f"\n{text}", file=sys.stderr, flush=True)

    def close(self, ranks: Iterable[RankProcess]) -> None:
        """Show the remaining output, append each failed rank's error to its file, close the files.

        The errors are not in the files yet: ranks send them to the supervisor and do not print
        them.

        Args:
            ranks: the ranks, which have all ended.
        """
        self._ranks_have_ended.set()
        if self._tee_thread is not None:
            self._tee_thread.join()
        for rank in ranks:
            # None for a killed rank that the system has not reaped in time.
            if rank.exit_code is None or rank.exit_code == 0:
                continue
            if rank.failure is not None:
                text = rank.failure.text
            else:
                outcome = describe_exit(rank.exit_code, is_killed_by_fabric=rank.is_killed)
                text = f"rank {rank.global_rank} {outcome}\n"
            self._logs[rank.global_rank].file.write(f"\n{text}".encode())
        for log in self._logs.values():
            log.file.close()

    def _show_lines(self) -> None:
        """Show the new lines of all files on standard output until the ranks have ended.

        This is the main function of the thread that ``tee`` starts. :meth:`close` ends it.
        """
        # If the standard output is a pipe, its reader may close it, as `head` does. Then no more
        # lines are shown. Opened as a binary file, since the output of a rank may be no valid text.
        with suppress(BrokenPipeError), open(1, "wb", closefd=False) as standard_output:
            is_last_read = False
            while not is_last_read:
                # After the ranks have ended, the files are read once more.
                is_last_read = self._ranks_have_ended.wait(_POLL_INTERVAL)
                # The items are copied, since the main thread may add the file of another rank.
                for rank, log in list(self._logs.items()):
                    for line in _read_lines(log, is_last_read):
                        # A progress bar writes "\r" before each of its states. As on a terminal,
                        # only the last state is shown.
                        _, _, visible = line.rstrip(b"\r").rpartition(b"\r")
                        standard_output.write(b"[rank%d]: %s\n" % (rank, visible))
                standard_output.flush()


def _read_lines(log: _RankLog, is_last_read: bool) -> Iterator[bytes]:
    """Yield the complete lines that were added to a file since the last call.

    Args:
        log: the file. Its position and its unfinished line are updated.
        is_last_read: whether to yield the unfinished line, too.
    """
    descriptor = log.file.fileno()
    # If the user has truncated the file, the size may be less than the position. Then the loop
    # reads nothing.
    size = os.fstat(descriptor).st_size
    while log.position < size:
        # pread() and not read(): the rank shares the file position, which read() would move.
        added = os.pread(descriptor, min(_READ_SIZE, size - log.position), log.position)
        if added == b"":  # the user has just truncated the file
            break
        log.position += len(added)
        *lines, unfinished_line = (log.unfinished_line + added).split(b"\n")
        yield from lines
        # A progress bar writes "\r" before each of its states. Of an unfinished line, only the last
        # state is kept, so that the line does not grow with each state.
        start_of_last_state = unfinished_line.rfind(b"\r")
        if start_of_last_state != -1:
            unfinished_line = unfinished_line[start_of_last_state:]
        if len(unfinished_line) > _MAX_LINE_LENGTH:
            yield unfinished_line
            unfinished_line = b""
        log.unfinished_line = unfinished_line
    # No later call could complete the line.
    if is_last_read and log.unfinished_line:
        yield log.unfinished_line
