"""Python stacks of this process and of others on its node, even while C++ code holds the GIL."""

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

_MAX_FRAMES = 16  # the innermost frames of a stack, which are shown
# Matches the innermost frame of fabric's launchers. This frame and the frames outside of it are not
# shown. The file preemption.py is in the same folder, but the rank itself calls it.
_LAUNCHER_FRAME = re.compile(
    rf'File "(<frozen runpy>"|{re.escape(str(Path(__file__).parents[1]))}/'
    r'(launchers/(?!preemption\.py")|'
    r'_fabric\.py", line \d+ in _run_in_rank$))'
)
# A real-time signal that no program is known to use. 0 on systems without Linux's /proc, where the
# stacks of other processes cannot be read.
_SIGNAL = signal.SIGRTMIN + 11 if os.path.exists("/proc/self/status") else 0
_MAX_DUMP_BYTES = 1 << 20

# In seconds.
_ANSWER_TIMEOUT = 1.0  # for a process to write its stacks
_PAUSE = 0.01  # between two reads of its file


class StackAddress(NamedTuple):
    """The process, file and thread from which :func:`read_stack` reads a stack.

    Attributes:
        node: the node of the process, as :func:`node` returns it.
        pid: the process id.
        descriptor: the descriptor of the file of stacks in that process. -1 if the process does not
            answer the signal.
        thread: the thread whose stack is reported, by ``threading.get_ident()``.
    """

    node: str
    pid: int
    descriptor: int
    thread: int


def exit_reason() -> str:
    """Return why this process makes no further calls, as a sentence without a period.

    Called when the process closes its communicator, as a rule because it ends.
    """
    # The error that ends the process is being handled, or Python has printed its traceback already.
    error = sys.exception() or getattr(sys, "last_value", None)
    if error is None:
        return "it has finished"
    return f"it raised {type(error).__name__}: {error}"


# [Note: Stacks]
# Each process has an open, unnamed file. To read its own stacks, a process lets `faulthandler`
# write them into its file. To read the stacks of another process, fabric sends the process a
# signal. The interpreter of that process handles the signal in C, so it does not need the GIL, and
# writes the stacks into that process's file, which fabric reads through `/proc`. Nothing is left on
# disk. The user's `faulthandler` settings are not changed: the signal is a real-time signal, which
# is used only if nothing else catches it.
class Stacks:
    """The stacks of this process, which other processes can read until :meth:`close`.

    Another process sends a signal, and this process writes its stacks into a file.

    Args:
        thread: the thread whose stack is reported, by ``threading.get_ident()``.
    """

    def __init__(self, thread: int) -> None:
        """Open the file of stacks, and answer the signal if nothing else catches it."""
        self._thread = thread
        # Unbuffered, since the interpreter writes to the descriptor directly.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        # A handler of the user, installed from Python or C, is kept.
        self._answers_signal = _SIGNAL != 0 and not _catches_signal(os.getpid())
        if self._answers_signal:
            faulthandler.register(_SIGNAL, file=self._file, all_threads=True)

    @property
    def address(self) -> StackAddress:
        """The address with which other processes read the stack. See :func:`read_stack`."""
        descriptor = self._file.fileno() if self._answers_signal else -1
        return StackAddress(
            node=node(), pid=os.getpid(), descriptor=descriptor, thread=self._thread
        )

    def dump(self) -> str:
        """Return the stack of the reported thread, innermost frame first."""
        descriptor = self._file.fileno()
        # The dump is appended to the file, so it begins at the present end.
        start = os.fstat(descriptor).st_size
        faulthandler.dump_traceback(self._file, all_threads=True)
        dump = os.pread(descriptor, _MAX_DUMP_BYTES, start)
        return _frames_of_thread(dump, self._thread)

    def close(self) -> None:
        """Stop answering the signal, restore its handler, and close the file."""
        if self._answers_signal:
            faulthandler.unregister(_SIGNAL)
        self._file.close()


def read_stack(address: StackAddress) -> str:
    """Return what is known of a process that does not answer, and its stack if it can be read.

    Args:
        address: the process, and where its stack is.

    Returns:
        One line that says what is known. If the stack was read, its frames are the next lines,
        innermost frame first.
    """
    if address.node != node():
        return "it does not answer, on another node"
    if has_ended(address.node, address.pid):
        return f"its process (pid {address.pid}) has ended"
    dump = b""
    # The signal would end a process without a handler, such as one that has closed its file.
    can_be_read = address.descriptor >= 0 and _catches_signal(address.pid)
    if can_be_read:
        with suppress(OSError):  # the process may end in the meantime
            dump = _request_dump(address)
    if not dump:
        return f"its process (pid {address.pid}) does not answer"
    # The process has written its stacks, which needs no GIL, but has not answered in Python.
    text = "it does not answer: C++ code, or the system, holds its interpreter"
    return f"{text}\n{_frames_of_thread(dump, address.thread)}"


def _request_dump(address: StackAddress) -> bytes:
    """Have another process write its stacks, and return what it wrote.

    Args:
        address: the process and its file of stacks. The process has a handler for the signal.

    Returns:
        The stacks of all threads, as faulthandler writes them. Empty if the process did not write
        in time.

    Raises:
        OSError: the process has ended.
    """
    with open(f"/proc/{address.pid}/fd/{address.descriptor}", "rb") as file:
        # The process appends its stacks to the file.
        start = file.seek(0, os.SEEK_END)
        os.kill(address.pid, _SIGNAL)
        return _read_until_complete(file.fileno(), start)


def has_ended(process_node: str, pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not waited for it yet.

    Args:
        process_node: the node of the process, as :func:`node` returns it. Nothing is known of a
            process on another node, so the result is False.
        pid: the process id.
    """
    if process_node != node():
        return False
    try:
        os.kill(pid, 0)  # sends no signal, but raises if there is no such process
    except ProcessLookupError:
        return True
    except OSError:  # there is a process, which belongs to another user
        return False
    # A zombie: its parent has not waited for it.
    return "State:\tZ" in _read_status(pid)


@cache
def node() -> str:
    """Return an id that is equal exactly for processes that see each other's process ids.

    Two containers on one machine are different nodes in this sense.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # this system is not Linux
        return os.uname().nodename
    return f"{boot_id} {pid_namespace}"


def _catches_signal(pid: int) -> bool:
    """Return whether a process has a handler for ``_SIGNAL``, installed from Python or C."""
    # Linux shows the signals that have a handler. Python does not see a handler installed from C.
    caught = re.search(r"^SigCgt:\s*(?P<mask>[0-9a-f]+)", _read_status(pid), re.MULTILINE)
    if caught is None:
        return False
    mask = int(caught["mask"], 16)
    signal_bit = 1 << (_SIGNAL - 1)  # the lowest bit is that of signal 1
    return mask & signal_bit != 0


def _read_status(pid: int) -> str:
    """Return Linux's status of a process. Empty on other systems, and once the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def _read_until_complete(descriptor: int, start: int) -> bytes:
    """Return the bytes of a file that another process is writing, once the file stops growing.

    Args:
        descriptor: the descriptor of the file.
        start: the position of the first byte to return.

    Returns:
        The bytes. Empty or incomplete if the process takes longer than ``_ANSWER_TIMEOUT``.
    """
    deadline = time.monotonic() + _ANSWER_TIMEOUT
    content = b""
    while time.monotonic() < deadline:
        previous_content = content
        content = os.pread(descriptor, _MAX_DUMP_BYTES, start)
        has_stopped_growing = content != b"" and content == previous_content
        if has_stopped_growing:
            break
        time.sleep(_PAUSE)
    return content


def _frames_of_thread(dump: bytes, thread: int) -> str:
    """Return the frames of one thread in a dump of faulthandler, one on each line.

    The frames of fabric's launchers are left out, and so are frames beyond ``_MAX_FRAMES``.

    Args:
        dump: what faulthandler wrote, innermost frame of each thread first.
        thread: the thread, by ``threading.get_ident()``. If it is not in the dump, the frames of
            all threads are returned.
    """
    text = dump.decode(errors="replace")
    # The section of a thread is the line "Thread 0x..." or "Current thread 0x...", and then
    # indented frames.
    section = re.search(rf"[Tt]hread 0x0*{thread:x}\b.*\n(?P<frames>(?:  .*\n?)+)", text)
    if section is not None:
        text = section["frames"]
    frames = []
    for line in text.splitlines():
        is_frame = line.startswith("  ")
        if not is_frame:
            continue
        frame = line.strip()
        # No frame of the user is outside of the launcher's frames.
        if _LAUNCHER_FRAME.match(frame) or len(frames) == _MAX_FRAMES:
            break
        frames.append(frame)
    return "\n".join(frames)
