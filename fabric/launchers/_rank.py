"""How a process takes its place as a rank: environment, signals, the lifeline to its parent, its one function.

[Note: the two pipes of a rank] Every rank has a *lifeline*, a pipe whose writing end only the launching process holds:
its end of file means that the parent is gone, and the rank leaves; a message on it asks for the error that the rank is
handling. A rank that runs a function has an *answer* pipe too, on which what the function returned travels once.
"""

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn, TextIO

from fabric.errors import ConfigurationError
from fabric.launchers._custody import end_with_parent
from fabric.launchers._failures import FailureRecorder, RunDirectory
from fabric.launchers._signals import raise_on_signals
from fabric.launchers._transport import Call, dump_result
from fabric.world import World

__all__ = ["LIFELINE", "Seat", "leave", "leave_with_an_error", "lifeline_variable", "record_failures", "run_function"]

LIFELINE = "FABRIC_LIFELINE"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What one rank is told.

    Attributes:
        world: its place in the job; ``world.store`` lies in the run directory.
        variables: what it adds to its environment.
        threads: number of threads of an operation on the CPU.
        answers: whether what its function returns has to travel back.
        interruptible: False when the job was started with SIGINT ignored, as in the background of a shell script.
    """

    world: World
    variables: dict[str, str]
    threads: int
    answers: bool
    interruptible: bool


class _RecordingHook:
    """Instead of printing the error that ends the script: tell the parent, which prints it once."""

    def __init__(self, recorder: FailureRecorder) -> None:
        self._recorder = recorder

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        if not interrupted:
            try:
                self._recorder.record(error)
            except OSError:
                sys.__excepthook__(kind, error, trace)
        if _is_called_by_interpreter():
            leave(128 + signal.SIGINT if interrupted else 1)


def record_failures(world: World | None) -> None:
    """Tie this process to the script launcher that made it; does nothing in any other process.

    An exception that leaves the script is kept for the parent instead of printed, SIGTERM and the first SIGINT run the
    ``finally`` blocks, and the process leaves when its parent is gone.
    """
    lifeline = _inherited_lifeline(os.environ.get(LIFELINE, ""))
    if world is None or world.store is None or lifeline is None or isinstance(sys.excepthook, _RecordingHook):
        return
    connection, interruptible = lifeline
    recorder = FailureRecorder(RunDirectory.of_store(world.store), world.rank)
    sys.excepthook = _RecordingHook(recorder)
    # Where the script ends without an error the interpreter is torn down, and only then its exit code is known.
    atexit.register(recorder.directory.say_finished, world.rank, os.getpid())
    _listen(connection, recorder, world.rank, interruptible)


def run_function(seat: Seat, lifeline: Connection, answers: Connection, load: Callable[[], Call]) -> int:
    """Be this rank: load the call, make it, send back what it returned.

    Returns:
        The exit code of the process. Whatever goes wrong is recorded in the run directory and printed nowhere.
    """
    assert seat.world.store is not None
    recorder = FailureRecorder(RunDirectory.of_store(seat.world.store), seat.world.rank)
    _listen(lifeline, recorder, seat.world.rank, seat.interruptible)
    try:
        fn, args, kwargs = load()
        # After loading: a script that is imported to find the function must not take itself for a rank.
        os.environ.pop(LIFELINE, None)
        os.environ.update(seat.variables)
        _limit_threads(seat.threads)
        value = fn(*args, **kwargs)
        answers.send_bytes(dump_result(value if seat.answers else None))
        answers.close()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as leaving:
        return _code_of(leaving, recorder)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the parent reports it)
        # The first frame is this function, which is of no interest to the reader.
        trace = error.__traceback__
        recorder.record(error.with_traceback(trace.tb_next if trace else None))
        return 1
    return 0


class _FailingStream:
    """A stream that fails when the interpreter itself flushes it, at its very end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if _is_called_by_interpreter():
            raise OSError("an exit handler has failed")


def _is_called_by_interpreter() -> bool:
    """Whether no Python code has called the function that asks, as when the interpreter ends."""
    asking = sys._getframe(1)
    return asking.f_back is None


def leave(code: int) -> NoReturn:
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
    _flush_open_files()
    os._exit(code)


def _flush_open_files() -> None:
    gc.unfreeze()  # what is frozen is not among the objects
    # By type(): some objects run code of their own when asked for their class.
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    files = [file for file in gc.get_objects() if issubclass(type(file), kinds)]
    # Texts first: they go through the buffers.
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOWrapper)):
        # Closed, detached or on a full disk: the interpreter's end would pass over it as well, and the others count.
        with contextlib.suppress(OSError, ValueError):
            file.flush()


def leave_with_an_error() -> None:
    """Let this process, which is running its exit handlers, end with code 120 instead of 0.

    An exception in an exit handler changes no exit code, and to leave at once would skip the other handlers. Python
    ends with 120 when it cannot flush a standard stream (see ``sys.exit``), which it tries last.
    """
    if sys.stderr is not None:
        sys.stderr = _FailingStream(sys.stderr)


def lifeline_variable(fd: int, interruptible: bool) -> str:
    """The text by which a re-run script finds its lifeline.

    The inode tells the pipe from another file that has this number in a process further down, which inherits the
    variable and not the pipe.
    """
    return f"{fd}:{os.fstat(fd).st_ino}:{int(interruptible)}"


def _inherited_lifeline(text: str) -> tuple[Connection, bool] | None:
    if not text:
        return None
    try:
        fd, inode, interruptible = (int(number) for number in text.split(":"))
    except ValueError:
        raise ConfigurationError(
            f"{LIFELINE}={text!r} in the environment",
            "this is no text that fabric's launcher writes",
            "the variable belongs to fabric",
            f"unset {LIFELINE}",
        ) from None
    try:
        if os.fstat(fd).st_ino != inode:
            return None
    except OSError:
        return None
    os.set_inheritable(fd, False)
    return Connection(fd, writable=False), bool(interruptible)


def _listen(lifeline: Connection, recorder: FailureRecorder, rank: int, interruptible: bool) -> None:
    end_with_parent()
    if threading.current_thread() is threading.main_thread():
        raise_on_signals(interruptible, partial(recorder.directory.say_heard, rank))
    recorder.directory.say_listening(rank)
    if not faulthandler.is_enabled():
        # faulthandler keeps the file open; it is unbuffered because a crash flushes nothing.
        faulthandler.enable(open(recorder.directory.crash_file(rank), "wb", buffering=0))  # noqa: SIM115
    threading.Thread(target=_stay_alive, args=(lifeline, recorder), name="fabric-lifeline", daemon=True).start()


def _stay_alive(lifeline: Connection, recorder: FailureRecorder) -> None:
    """Serve the lifeline until the parent is gone, then leave at once, whatever the main thread waits for.

    Where the kernel ends this process with its parent, this is for a parent that had gone before it was asked to.
    """
    parent = os.getppid()
    # A process that the parent forked for other ends may hold the writing end too; the process id betrays it.
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if lifeline.poll(1.0):
                lifeline.recv_bytes()
                recorder.record_pending()
    os._exit(1)


def _limit_threads(threads: int) -> None:
    # OMP_NUM_THREADS is read when torch is loaded, which has happened in a forked process.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _code_of(leaving: SystemExit, recorder: FailureRecorder) -> int:
    """The exit code that the interpreter would have made of it."""
    if leaving.code is None or isinstance(leaving.code, int):
        code = leaving.code or 0
    else:
        code = 1
    if code not in (0, 128 + signal.SIGTERM):
        trace = leaving.__traceback__
        recorder.record(leaving.with_traceback(trace.tb_next if trace else None))
    return code
