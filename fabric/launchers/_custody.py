"""What holds when the launching process is killed: no rank and no file of its job stays."""

import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

__all__ = ["DirectoryGuard", "end_with_parent"]

# Ranks that are being killed too may still be writing, hence the second time.
_REMOVE = """
import os, sys
os.read(0, 1)
import shutil, time  # not while the ranks start, since most of these processes never come here
while os.path.exists(sys.argv[1]):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1)
"""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even while C++ code holds the interpreter's lock.

    Linux only, and only from now on: whoever calls this watches for a parent that had gone before. The kernel means the
    *thread* that made this process; a launch keeps that thread until its ranks have ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class DirectoryGuard:
    """A small process that removes a directory when this one is killed.

    Ranks that the kernel kills cannot do it. In a session of its own it is out of reach of what ends a process group.
    """

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVE, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def lifeline(self) -> IO[bytes]:
        """What only the launching process may hold open; a forked rank closes its copy."""
        assert self._process.stdin is not None
        return self._process.stdin

    def close(self) -> None:
        """End it without a removal."""
        self._process.kill()
        self._process.wait()
        self.lifeline.close()
