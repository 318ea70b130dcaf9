"""Python stacks of this process and of others on its node, even while C++ code holds the GIL.

[Note: Stacks] The interpreter writes the stacks into an open, unnamed file. A process dumps its own
stacks by a call. To read the stacks of another process, fabric sends it a signal, which the
interpreter of that process handles in C, and reads the file through ``/proc``. So nothing is left
on disk, and the user's ``faulthandler`` settings are not changed: the signal is a real-time signal,
used only if nothing else catches it.
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
from pathlib import Path
from typing import NamedTuple

__all__ = ["StackAddress", "Stacks", "exit_reason", "has_ended", "node", "read_stack"]

_FRAMES = 16  # innermost frames of a stack that are shown
# This frame and those outside of it are fabric's launchers. The rank itself calls preemption.py.
_LAUNCH = re.compile(
    rf'File "(<frozen runpy>"|{re.escape(str(Path(__file__).parents[1]))}/'
    r'(launchers/(?!preemption\.py")|'
    r'_fabric\.py", line \d+ in _run_in_rank$))'
)
_SIGNAL = signal.SIGRTMIN + 11 if os.path.exists("/proc/self/status") else 0

# In seconds.
_ANSWER_WITHIN = 1.0
_PAUSE = 0.01


class StackAddress(NamedTuple):
    """Where to find the stack of a process.

    Attributes:
        node: the node, as :func:`node` returns it.
        pid: the process id.
        file: the descriptor of the file of stacks in that process. -1 if there is none.
        thread: the reported thread, by ``threading.get_ident()``.
    """

    node: str
    pid: int
    file: int
    thread: int


def exit_reason() -> str:
    """Return why this process makes no further calls, when it closes its communicator."""
    error = sys.exception() or getattr(sys, "last_value", None)
    if error is None:
        return "it has finished"
    return f"it raised {type(error).__name__}: {error}"


class Stacks:
    """The stacks of this process, which other processes can read until :meth:`close`.

    Args:
        thread: the reported thread, by ``threading.get_ident()``.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        # Keep a user's handler, even one installed from C, which Python does not see.
        self._answers = _SIGNAL != 0 and not _catches_signal(os.getpid())
        if self._answers:
            faulthandler.register(_SIGNAL, file=self._file, all_threads=True)

    @property
    def address(self) -> StackAddress:
        """The address for other processes."""
        file = self._file.fileno() if self._answers else -1
        return StackAddress(node(), os.getpid(), file, self._thread)

    def dump(self) -> str:
        """Return the stack of the reported thread, innermost frame first."""
        size = os.fstat(self._file.fileno()).st_size
        faulthandler.dump_traceback(self._file, all_threads=True)
        return _frames_of_thread(os.pread(self._file.fileno(), 1 << 20, size), self._thread)

    def close(self) -> None:
        """Stop answering, and restore the signal's handler."""
        if self._answers:
            faulthandler.unregister(_SIGNAL)
        self._file.close()


def read_stack(address: StackAddress) -> str:
    """Return what is known of a process that does not answer, and its stack if it can be read."""
    if address.node != node():
        return "it does not answer, on another node"
    if has_ended(address.node, address.pid):
        return f"its process (pid {address.pid}) has ended"
    if address.file >= 0 and _catches_signal(address.pid):
        with suppress(OSError):  # the process may end in the meantime
            dump = _request_dump(address)
            if dump:
                text = "it does not answer: C++ code, or the system, holds its interpreter"
                return f"{text}\n{_frames_of_thread(dump, address.thread)}"
    return f"its process (pid {address.pid}) does not answer"


def _request_dump(address: StackAddress) -> bytes:
    """Have a process write its stacks, and return what it wrote."""
    with open(f"/proc/{address.pid}/fd/{address.file}", "rb") as file:
        size = file.seek(0, os.SEEK_END)
        os.kill(address.pid, _SIGNAL)
        return _read_until_complete(file.fileno(), size)


def has_ended(process_node: str, pid: int) -> bool:
    """Return whether a process has ended, reaped or not.

    Returns False for a process on another node, of which this is unknown.
    """
    if process_node != node():
        return False
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except OSError:  # the process of another user
        return False
    return "State:\tZ" in _read_status(pid)


@cache
def node() -> str:
    """Return an id that is shared by processes that see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not a Linux
        return os.uname().nodename


def _catches_signal(pid: int) -> bool:
    """Return whether a process has a handler for the signal."""
    caught = re.search(r"^SigCgt:\s*(?P<mask>[0-9a-f]+)", _read_status(pid), re.MULTILINE)
    if caught is None:
        return False
    mask = int(caught["mask"], 16)
    return mask >> (_SIGNAL - 1) & 1 == 1


def _read_status(pid: int) -> str:
    """Return Linux's status of a process. Empty on other systems, and once the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def _read_until_complete(file: int, start: int) -> bytes:
    """Return the bytes of a file from ``start`` on, once the file stops growing."""
    deadline = time.monotonic() + _ANSWER_WITHIN
    content = b""
    while time.monotonic() < deadline:
        previous = content
        content = os.pread(file, 1 << 20, start)
        if content and content == previous:
            break
        time.sleep(_PAUSE)
    return content


def _frames_of_thread(dump: bytes, thread: int) -> str:
    """Return the frames of one thread in what faulthandler wrote.

    If the thread is not in the dump, the frames of all threads are returned.
    """
    text = dump.decode(errors="replace")
    section = re.search(rf"hread 0x0*{thread:x}\b.*\n(?P<frames>(?:  .*\n?)+)", text)
    if section is not None:
        text = section["frames"]
    frames = []
    for line in text.splitlines():
        frame = line.strip()
        if not line.startswith("  "):
            continue
        if _LAUNCH.match(frame) or len(frames) == _FRAMES:
            break
        frames.append(frame)
    return "\n".join(frames)
