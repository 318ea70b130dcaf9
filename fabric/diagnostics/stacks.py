"""Python stacks of this process and of others on its node, even while C++ code holds the GIL.

[Note: Stacks] The interpreter writes the stacks into an open, unnamed file. A process dumps its own by a call. Another
process sends it a signal, which the interpreter handles in C, and reads the file through ``/proc``. So nothing is left
on disk, and the user's ``faulthandler`` settings are not changed: the signal is a real-time signal, used only if
nothing else catches it.
"""

import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from itertools import islice, takewhile
from pathlib import Path

__all__ = ["Address", "Stacks", "exit_reason", "has_ended", "node", "read_stack"]

_FRAMES = 16  # innermost frames kept
# This frame and those outside of it are fabric's launchers. The rank itself calls preemption.py.
_LAUNCH = re.compile(
    rf'File "(<frozen runpy>"|{re.escape(str(Path(__file__).parents[1]))}/'
    r'(launchers/(?!preemption\.py")|'
    r'_fabric\.py", line \d+ in _run_in_rank$))'
)
_SIGNAL = signal.SIGRTMIN + 11 if os.path.exists("/proc/self/status") else 0
# seconds
_ANSWER_WITHIN = 1.0
_PAUSE = 0.01

Address = tuple[str, int, int, int]
"""Where to find a process's stack: node, process id, file descriptor (-1: none), thread."""


def exit_reason() -> str:
    """Why this process makes no further calls, when it closes its communicator."""
    error = sys.exception() or getattr(sys, "last_value", None)
    return "it has finished" if error is None else f"it raised {type(error).__name__}: {error}"


class Stacks:
    """The stacks of this process; other processes can read them until :meth:`close`.

    Args:
        thread: the reported thread, by ``threading.get_ident()``.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        # Keep a user's handler, even one installed from C, which Python does not see.
        self._answers = _SIGNAL != 0 and not _catches(os.getpid())
        if self._answers:
            faulthandler.register(_SIGNAL, file=self._file, all_threads=True)

    @property
    def address(self) -> Address:
        """Their address for others."""
        return node(), os.getpid(), self._file.fileno() if self._answers else -1, self._thread

    def own(self) -> str:
        """The stack of the reported thread, innermost frame first, as the interpreter writes it."""
        before = os.fstat(self._file.fileno()).st_size
        faulthandler.dump_traceback(self._file, all_threads=True)
        return _of_thread(os.pread(self._file.fileno(), 1 << 20, before), self._thread)

    def close(self) -> None:
        """Stop answering, and restore the signal's handler."""
        if self._answers:
            faulthandler.unregister(_SIGNAL)
        self._file.close()


def read_stack(address: Address) -> str:
    """The stack of another process, or why there is none."""
    there, pid, fd, thread = address
    if there != node():
        return "it does not answer, on another node"
    if has_ended(there, pid):
        return f"its process (pid {pid}) has ended"
    with suppress(OSError):  # it may end meanwhile
        if fd >= 0 and _catches(pid):
            with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
                size = file.seek(0, os.SEEK_END)
                os.kill(pid, _SIGNAL)
                if text := _written(file.fileno(), size):
                    held = "it does not answer: C++ code, or the system, holds its interpreter"
                    return f"{held}\n{_of_thread(text, thread)}"
    return f"its process (pid {pid}) does not answer"


def has_ended(there: str, pid: int) -> bool:
    """Whether a process has ended, reaped or not; False on another node, where it is unknown."""
    if there != node():
        return False
    try:
        os.kill(pid, 0)  # sends nothing
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # else it is another user's
    return "State:\tZ" in _status(pid)


@cache
def node() -> str:
    """An id shared by processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not a Linux
        return os.uname().nodename


def _catches(pid: int) -> bool:
    """Whether a process has a handler for the signal."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _status(pid), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def _status(pid: int) -> str:
    """Linux's status of a process; empty elsewhere, and once it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def _written(fd: int, start: int) -> bytes:
    """The bytes of a file from ``start`` on, once it stops growing."""
    until = time.monotonic() + _ANSWER_WITHIN
    text = b""
    while time.monotonic() < until:
        before = text
        text = os.pread(fd, 1 << 20, start)
        if text and text == before:
            break
        time.sleep(_PAUSE)
    return text


def _of_thread(dump: bytes, thread: int) -> str:
    """The frames of one thread in what faulthandler wrote, or all of it if that thread is not there."""
    text = dump.decode(errors="replace")
    found = re.search(rf"hread 0x0*{thread:x}\b.*\n((?:  .*\n?)+)", text)
    lines = (
        line.strip() for line in (found[1] if found else text).splitlines() if line.startswith("  ")
    )
    return "\n".join(islice(takewhile(lambda frame: not _LAUNCH.match(frame), lines), _FRAMES))
