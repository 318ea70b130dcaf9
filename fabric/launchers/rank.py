"""Runs a payload in a process of a job, and keeps its supervisor informed.

[Note: Control pipe] Every rank has one duplex pipe to the process that supervises it. The supervisor begins with
``(RankConfig, payload)``; from then on both send pairs of a kind and a content:

=========  ===========  ===============================================================================================
kind       sent by      content
=========  ===========  ===============================================================================================
ready      rank         None: signals run its ``finally`` blocks from now on
error      rank         the :class:`Failure` that ends it
finished   rank         what the payload returned, pickled
signal     rank         number of a signal that its main thread has acted on
saving     rank         None: SIGTERM asks it to save and exit
describe   supervisor   None: asks for the error that the main thread is handling
described  rank         that :class:`Failure`, or None
report     supervisor   None: asks for a report of what the ranks are doing
call       supervisor   for the ranks of a pool: what to call
reply      rank         of a pool: the outcome of the call
=========  ===========  ===============================================================================================

The end of the pipe means to a rank that its supervisor is gone: it exits at once.
"""

import contextlib
import ctypes
import faulthandler
import os
import queue
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from fabric.errors import CollectiveMismatchError
from fabric.launchers.process_exit import exit_process
from fabric.launchers.serialize import dump_result
from fabric.world import World

__all__ = [
    "ControlThread",
    "Failure",
    "RankConfig",
    "RankPayload",
    "StopRequest",
    "is_secondary",
    "main",
    "raise_on_signals",
    "run",
    "run_payload",
]

_LONGEST_TEXT = 20_000  # characters; a message may hold a whole tensor, and would push the cause off the screen
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1  # seconds until the main thread is woken again; each is twice as long
_PR_SET_PDEATHSIG = 1
# How gloo, the stores and NCCL word it when another process has gone; they raise a plain RuntimeError.
_PEER_LOST = ("closed by peer", "reset by peer")
_SECONDARY = (*_PEER_LOST, "broken pipe", "connection refused", "timed out", "timeout")
_OUR_FRAMES = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>", "<string>")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The place and the settings of one rank.

    Attributes:
        world: its place in the job.
        variables: what it adds to its environment.
        threads: number of threads of an operation on the CPU.
        stack_file: where the interpreter writes the stack of a fatal signal.
        interruptible: False when the job was started with SIGINT ignored, as in the background of a shell script.
        returns: whether what the payload returns is sent back.
        supervisor: names the supervising process among those of all machines.
    """

    world: World
    variables: dict[str, str]
    threads: int
    stack_file: str
    interruptible: bool
    returns: bool
    supervisor: str


class RankPayload(Protocol):
    """What a rank runs."""

    @property
    def skips_teardown(self) -> bool:
        """Whether the process exits without the teardown of the interpreter after a success too."""
        ...

    def load(self) -> Callable[[], Any]:
        """The function to call once the environment is that of a rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one rank.

    Attributes:
        time: when it was noticed, seconds on the system-wide monotonic clock.
        text: the traceback, as the interpreter would have printed it.
        exit_code: with which the rank exits because of it.
        secondary: whether it looks like the result of another rank's failure (a lost connection, a timeout).
        peer_lost: whether it says that another process has closed its connection, be it by ending well.
        pending: whether the rank was still handling it (in a ``finally``, say) when it was asked.
    """

    time: float
    text: str = ""
    exit_code: int = 1
    secondary: bool = False
    peer_lost: bool = False
    pending: bool = False

    @classmethod
    def of(cls, error: BaseException, *, pending: bool = False) -> "Failure":
        """The failure that an error is."""
        return cls(
            time=time.monotonic(),
            text=_shortened("".join(traceback.format_exception(error.with_traceback(_of_user(error.__traceback__))))),
            secondary=is_secondary(error),
            peer_lost=any(words in str(error).lower() for words in _PEER_LOST),
            pending=pending,
        )


def is_secondary(error: BaseException) -> bool:
    """Whether an error began as a lost connection, a timeout or a missing rank: usually another rank's failure."""
    *_, origin = _chain(error)
    if isinstance(origin, (ConnectionError, TimeoutError, CollectiveMismatchError)):
        return True
    # Without torch.distributed in the process, none of its errors can be here.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(origin, (distributed.DistNetworkError, distributed.DistStoreError)):
        return True
    words = str(origin).lower()
    return isinstance(origin, RuntimeError) and any(word in words for word in _SECONDARY)


class ControlThread(threading.Thread):
    """The rank's end of the control pipe; a process that the rank forks has none.

    Attributes:
        config: that of this rank.
        calls: what a rank of a pool has to call, in order.
    """

    def __init__(self, control: Connection, config: RankConfig) -> None:
        super().__init__(name="fabric-control", daemon=True)
        self.config = config
        self._reports = 0
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._control, self._process, self._lock = control, os.getpid(), threading.Lock()

    @classmethod
    def of_this_process(cls) -> "ControlThread | None":
        """That of this process; None where no launcher of fabric has made it a rank."""
        return next((thread for thread in threading.enumerate() if isinstance(thread, cls)), None)

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message; one to a supervisor that is gone is lost."""
        # A process that the script forks runs on through this code, and is not the rank.
        if os.getpid() == self._process:
            with self._lock, contextlib.suppress(OSError):
                self._control.send((kind, content))

    def reports_requested(self) -> int:
        """How often the supervisor has asked for a report."""
        return self._reports

    def run(self) -> None:
        """Serve the pipe until the supervisor is gone, then exit at once, whatever the main thread waits for.

        Where the kernel ends this process with its parent, that is for a parent that had gone before it was asked to.
        """
        parent = os.getppid()
        # A process that the parent forked for other ends may hold its end of the pipe; the process id shows it.
        with contextlib.suppress(EOFError, OSError):
            while os.getppid() == parent:
                if self._control.poll(1.0):
                    self._receive(*self._control.recv())
        # Where files have names, nobody else is left to remove them.
        for path in (self.config.stack_file, (self.config.world.store or "").removeprefix("file://")):
            with contextlib.suppress(OSError):
                os.unlink(path)
        os._exit(1)

    def _receive(self, kind: str, content: Any) -> None:
        if kind == "describe":
            self.send("described", _pending_failure())
        elif kind == "report":
            self._reports += 1
        else:
            self.calls.put(content)


def main() -> None:
    """Be a rank in an interpreter of its own; the number of the control pipe is the first argument."""
    control = Connection(int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    code, payload = run(control)
    if code or payload.skips_teardown:
        exit_process(code)


def run(control: Connection) -> tuple[int, RankPayload]:
    """Be the rank that the supervisor configures: the exit code of the process, and what it ran."""
    try:
        config, payload = control.recv()
    except (EOFError, OSError):
        # The parent has exited, or ended the launch, before or while it configured this rank.
        os._exit(1)
    return run_payload(control, config, payload), payload


def run_payload(control: Connection, config: RankConfig, payload: RankPayload) -> int:
    """Run the payload as this rank.

    Returns:
        The exit code of the process. Whatever goes wrong is sent to the supervisor and printed nowhere.
    """
    thread = ControlThread(control, config)
    _end_with_parent()
    raise_on_signals(config.interruptible, partial(thread.send, "signal"))
    if not faulthandler.is_enabled():
        # faulthandler keeps the file open; it is unbuffered because a crash flushes nothing.
        faulthandler.enable(open(config.stack_file, "ab", buffering=0))  # noqa: SIM115
    thread.start()
    thread.send("ready")
    code, outcome = _outcome(config, payload)
    # There is no ``finally`` left, and an error in the midst of a message would leave half of it in the pipe.
    _ignore_signals()
    if isinstance(outcome, bytes):
        thread.send("finished", outcome)
    elif outcome is not None:
        thread.send("error", outcome)
    return code


def _outcome(config: RankConfig, payload: RankPayload) -> tuple[int, bytes | Failure | None]:
    """The exit code, and what the payload returned or how it failed; None after a signal."""
    try:
        call = payload.load()
        # After loading: a script that is imported to find the function must not take itself for a rank.
        os.environ.update(config.variables)
        _limit_threads(config.threads)
        result = call()
        return 0, dump_result(result if config.returns else None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, None
    except SystemExit as leaving:
        code = 0 if leaving.code is None else leaving.code if isinstance(leaving.code, int) else 1
        if code in (0, 128 + signal.SIGTERM):
            return code, None
        text = "" if leaving.code == code else str(leaving.code)
        return code, Failure(time=time.monotonic(), exit_code=code, text=text)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the supervisor reports it)
        # What an exit handler would find if the interpreter had reached this point.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        return 1, Failure.of(error)


class _RaiseOnce:
    """Lets the first signal raise, so that ``finally`` blocks run, and ignores the ones that follow.

    Ctrl-C in a terminal reaches a rank twice, from the terminal and from the parent, and the second would interrupt
    the ``finally`` block.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise, this once."""
        signal.signal(number, signal.SIG_IGN)
        raise self._error


def raise_on_signals(interruptible: bool, acted: Callable[[int], object]) -> None:
    """Let SIGTERM and, if ``interruptible``, SIGINT raise in the main thread, which is this one.

    ``acted`` is called with the number of a signal once it has raised, or is left to another handler.
    """
    signal.signal(signal.SIGTERM, _RaiseOnce(SystemExit(128 + signal.SIGTERM)))
    if interruptible:
        signal.signal(signal.SIGINT, _RaiseOnce(KeyboardInterrupt()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the supervisor blocked it
    # A signal that arrives between the interpreter's last look and the start of a wait, or is taken by another thread,
    # interrupts nothing: the main thread would sleep on, and its ``finally`` blocks never run.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A process that this one forks would write of its own signals here.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    main = threading.main_thread().ident
    assert main is not None

    def wake() -> None:
        while received := os.read(reading, 1):
            time.sleep(pause := _FIRST_PAUSE)
            while isinstance(signal.getsignal(received[0]), _RaiseOnce):
                signal.pthread_kill(main, received[0])
                time.sleep(pause := min(2 * pause, _LONGEST_PAUSE))
            if received[0] in (signal.SIGTERM, signal.SIGINT):  # others, as SIGCHLD, say nothing about the grace period
                acted(received[0])

    threading.Thread(target=wake, name="fabric-signals", daemon=True).start()


def _ignore_signals() -> None:
    """Ignore signals that would have raised: there is no ``finally`` left that they could run."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if isinstance(signal.getsignal(number), _RaiseOnce):
            signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Notes SIGTERM from the first question on, instead of letting it raise. A handler of the user is still called."""

    def __init__(self) -> None:
        self._received = False
        self._previous: Any = None
        self._installed = False

    def received(self) -> bool:
        """Whether SIGTERM was received since this was first asked.

        Raises:
            ValueError: first asked in another thread than the main one, which alone may say what a signal means.
        """
        if not self._installed:
            self._install()
        return self._received

    def close(self) -> None:
        """Restore the handler of SIGTERM."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            # None: installed from C, which Python cannot put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        self._installed = False

    def _install(self) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._installed = True
        control = ControlThread.of_this_process()
        if control is not None:
            control.send("saving")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if callable(self._previous) and not isinstance(self._previous, _RaiseOnce):
            self._previous(number, frame)


def _pending_failure() -> Failure | None:
    """The error that the main thread is handling just now.

    A rank whose ``finally`` waits for the others has not sent its error yet.
    """
    active = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = active[1] if isinstance(active, tuple) else active  # a triple until Python 3.12
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        return None
    return Failure.of(error, pending=True)


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even while C++ code holds the interpreter's lock.

    The kernel means the *thread* that made this process; a launch keeps that thread until its ranks have ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_threads(threads: int) -> None:
    # OMP_NUM_THREADS is read when torch is loaded, which has happened in a forked process.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that brought the rank to the user's code."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FRAMES):
        trace = trace.tb_next
    return trace


def _shortened(text: str) -> str:
    """Its beginning and its end."""
    left_out = len(text) - _LONGEST_TEXT
    if left_out <= 0:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then what it was raised from or while handling, back to the first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
