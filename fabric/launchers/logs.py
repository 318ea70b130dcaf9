"""Files for the output of the ranks of ``fabric run``, and its lines on the terminal."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, final

from fabric.launchers.supervisor import RankProcess, describe_exit

__all__ = ["RankLogs"]

_POLL = 0.1  # seconds between two looks at the files


@final
class RankLogs:
    """A file for the output of each rank of this machine; with ``tee`` the lines also go to standard output.

    The ranks write to their files directly, so that nothing is lost if any process is killed.

    Args:
        folder: existing folder of the files. Existing files are appended to.
        restart: how often the ranks have been restarted; if not 0, it is part of the names.
        tee: whether to show complete lines, prefixed with the rank. Of a progress bar that rewrites its line, the last
            state is shown.
    """

    def __init__(self, folder: Path, restart: int = 0, *, tee: bool = False) -> None:
        self._folder = folder
        self._ending = f".restart-{restart}.log" if restart else ".log"
        self._files: dict[int, BinaryIO] = {}
        self._shown: dict[
            int, tuple[int, bytes]
        ] = {}  # bytes that have been read, and an unfinished line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fabric-tee", daemon=True)
        if tee:
            self._thread.start()

    def path(self, rank: object) -> Path:
        """The file of a rank."""
        return self._folder / f"rank-{rank}{self._ending}"

    def open(self, rank: int) -> int:
        """The open file of a rank."""
        file = self.path(rank).open("a+b", buffering=0)
        self._shown[rank] = os.fstat(file.fileno()).st_size, b""
        self._files[rank] = file
        return file.fileno()

    def close(self, ranks: Iterable[RankProcess]) -> None:
        """Show the remaining output, and append each failed rank's error to its file: ranks do not print errors."""
        self._ended.set()
        if self._thread.ident:
            self._thread.join()
        for rank in ranks:
            if rank.exit_code:
                text = (
                    rank.failure.text
                    if rank.failure
                    else f"rank {rank.rank} {describe_exit(rank.exit_code)}\n"
                )
                self._files[rank.rank].write(f"\n{text}".encode())
        for file in self._files.values():
            file.close()

    def _follow(self) -> None:
        with open(1, "wb", closefd=False) as terminal:
            has_ended = False
            while not has_ended:
                has_ended = self._ended.wait(_POLL)
                for rank, file in list(self._files.items()):
                    (position, rest), size = self._shown[rank], os.fstat(file.fileno()).st_size
                    # Not read(), whose file position the rank shares.
                    new = os.pread(file.fileno(), max(0, size - position), position)
                    *lines, rest = (rest + new).split(b"\n")
                    self._shown[rank] = position + len(new), rest[max(0, rest.rfind(b"\r")) :]
                    for line in [*lines, rest] if has_ended and rest else lines:
                        terminal.write(
                            b"[rank%d]: %s\n" % (rank, line.rstrip(b"\r").rpartition(b"\r")[2])
                        )
                terminal.flush()
