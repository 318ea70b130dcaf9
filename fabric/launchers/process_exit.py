"""Ends a process of a job without the interpreter's teardown, and with an exit code for a late error."""

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from typing import Any, NoReturn, TextIO

__all__ = ["exit_process", "exit_with_late_error"]


def exit_process(code: int) -> NoReturn:
    """End this process: threads are waited for and exit handlers run, but the interpreter is not torn down.

    That takes half a second and more with torch in it, for which everybody waits; and a thread of gloo that frees its
    last collective meanwhile aborts the process. A process that ``multiprocessing`` has forked ends in the same way.
    As at the interpreter's end, open files are flushed, and 0 becomes 120 when a standard stream cannot be.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - as multiprocessing does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except ValueError:
            pass  # the script has closed it
        except OSError:
            code = code or 120
    gc.unfreeze()  # what is frozen is not among the objects
    # By type(): some objects run code of their own when asked for their class.
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [file for file in gc.get_objects() if issubclass(type(file), kinds)]
    # Texts first: they go through the buffers.
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOWrapper)):
        # Closed, detached or on a full disk: the interpreter's end would pass over it as well, and the others count.
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(code)


def exit_with_late_error() -> None:
    """Let this process, which is running its exit handlers, end with code 120 instead of 0.

    An exception in an exit handler changes no exit code, and to leave at once would skip the other handlers. Python
    ends with 120 when it cannot flush a standard stream (see ``sys.exit``), which it tries last.
    """
    if sys.stderr is not None:
        sys.stderr = _FailingStream(sys.stderr)


class _FailingStream:
    """A stream that fails when the interpreter itself flushes it, at its very end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        # No Python code has called this.
        if sys._getframe().f_back is None:
            raise OSError("an exit handler has failed")
