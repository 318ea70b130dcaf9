"""Runs a payload in a process of a job, and keeps its supervisor informed.

[Note: Control pipe] Every rank has one duplex pipe to its supervisor. The supervisor first sends
``(RankConfig, payload)``; after that both sides send ``(kind, content)`` pairs:

=========  ===========  ===============================================================================================
kind       sent by      content
=========  ===========  ===============================================================================================
ready      rank         None: signals run its ``finally`` blocks from now on
error      rank         the :class:`Failure` that ends it
finished   rank         what the payload returned, pickled
signal     rank         number of a signal that its main thread has acted on
saving     rank         None: signals ask it to save and exit from now on
describe   supervisor   None: asks for the error that the main thread is handling
stack      rank         before the answer: where the main thread is, as in a traceback
described  rank         the :class:`Failure`, or None
report     supervisor   an id of the user's request for a report of what the ranks are doing
call       supervisor   for the ranks of a pool: what to call
reply      rank         of a pool: the outcome of the call
=========  ===========  ===============================================================================================

When the pipe closes, the supervisor is gone, and the rank exits at once.
"""

import atexit
import ctypes
import faulthandler
import gc
import io
import os
import queue
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fabric.errors import CollectiveMismatchError
from fabric.launchers.serialize import dump_result
from fabric.world import World

__all__ = [
    "PREEMPTED", "ControlThread", "Failure", "Payload", "RankConfig", "SignalHandler", "ending_signals",
    "exit_process", "exit_with_late_error", "is_secondary", "main", "raise_on_signals", "receive_payload", "run_rank",
    "stop_signals",
]  # fmt: skip

PREEMPTED = 75  # the exit code of a job that has saved and wants to be started again; EX_TEMPFAIL of sysexits.h

Payload = Callable[[], Callable[[], Any]]
"""Prepares a process, and returns a function to call once the rank's environment variables are set."""

_LONGEST_TEXT = (
    20_000  # characters; a message may hold a whole tensor, and would push the cause off the screen
)
_PAUSE = 0.05  # seconds until the main thread is woken again
# Messages of gloo, the stores and NCCL about a lost process; they raise a RuntimeError or a subclass of torch's.
_PEER_LOST = ("closed by peer", "reset by peer")
_SECONDARY = (
    *_PEER_LOST,
    "broken pipe",
    "connection refused",
    "timed out",
    "timeout",
    "distnetwork",
    "diststore",
)
_OUR_FRAMES = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>", "<string>")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The place and the settings of one rank.

    Attributes:
        world: its place in the job.
        variables: added to its environment.
        threads: number of threads of a CPU operation.
        stack_file: where the interpreter writes the stack of a fatal signal.
        runs_script: whether it runs a script, which may exit when it likes, rather than a function.
        returns: whether the payload's result is sent back.
    """

    world: World
    variables: dict[str, str]
    threads: int
    stack_file: str
    runs_script: bool
    returns: bool


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one rank.

    Attributes:
        text: the traceback, as the interpreter would have printed it.
        exit_code: the exit code of the rank.
        secondary: whether it looks like the result of another rank's failure (a lost connection, a timeout).
        peer_lost: whether it says that another process has closed its connection, even by ending normally.
        time: when it was noticed, seconds on the system-wide monotonic clock.
    """

    text: str
    exit_code: int = 1
    secondary: bool = False
    peer_lost: bool = False
    time: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """The failure for an error, without the frames that lead to the user's code."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FRAMES):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(trace)))
        half = _LONGEST_TEXT // 2
        if len(text) > _LONGEST_TEXT:
            left_out = len(text) - _LONGEST_TEXT
            text = f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
        peer_lost = any(words in _first_line(error) for words in _PEER_LOST)
        return cls(text=text, secondary=is_secondary(error), peer_lost=peer_lost)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a job to save and end; under SLURM also SIGUSR1, which users often request."""
    return [
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR2,
        *[signal.SIGUSR1] * ("SLURM_JOB_ID" in os.environ),
    ]


def ending_signals() -> list[signal.Signals]:
    """The signals that end a job: those that leave time to save, and Ctrl-C."""
    return [*stop_signals(), signal.SIGINT]


def is_secondary(error: BaseException) -> bool:
    """Whether an error began as a lost connection, a timeout or a missing rank: usually another rank's failure."""
    chain: list[BaseException] = []  # its causes and contexts, back to the first error
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    origin = chain[-1]
    return isinstance(origin, ConnectionError | TimeoutError | CollectiveMismatchError) or (
        isinstance(origin, RuntimeError)
        and any(words in _first_line(origin) for words in _SECONDARY)
    )


def _first_line(error: BaseException) -> str:
    # Not str(error), which may raise; nor its notes.
    return traceback.format_exception_only(error)[0].lower()


class ControlThread(threading.Thread):
    """The rank's end of the control pipe; a process that the rank forks has none.

    Attributes:
        config: that of this rank.
        calls: the calls for a rank of a pool, in order.
        report_request: the id of the supervisor's latest request for a report; empty before the first.
    """

    def __init__(self, control: Connection, config: RankConfig) -> None:
        super().__init__(name="fabric-control", daemon=True)
        self.config = config
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._control = control
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.report_request = ""

    @classmethod
    def of_this_process(cls) -> "ControlThread | None":
        """The control thread of this process; None if no launcher of fabric started it."""
        return next((thread for thread in threading.enumerate() if isinstance(thread, cls)), None)

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message; it is lost if the supervisor is gone."""
        if os.getpid() == self._process:
            with self._lock, suppress(OSError):
                self._control.send((kind, content))
        elif (
            kind == "error"
        ):  # a process that the script forked also gets here, but is not the rank
            print(content.text, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Serve the pipe until the supervisor is gone, then exit at once, even if the main thread is blocked.

        Also needed where the kernel kills this process with its parent: the parent may end before ``prctl``.
        """
        parent = os.getppid()
        # Another process forked by the parent may hold the pipe open; the parent's process id shows that it is gone.
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if self._control.poll(1.0):
                    self._receive(*self._control.recv())
        os._exit(1)

    def _receive(self, kind: str, content: Any) -> None:
        if kind == "describe":
            # A rank that waits for the others in a ``finally`` block has not sent its error yet.
            main = threading.main_thread().ident or 0
            self.send("stack", "".join(traceback.format_stack(sys._current_frames()[main])))
            active = sys._current_exceptions().get(main)
            error: Any = (
                active[1] if isinstance(active, tuple) else active
            )  # a triple until Python 3.12
            is_failure = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self.send("described", Failure.of(error) if is_failure else None)
        elif kind == "report":
            self.report_request = content
        else:
            self.calls.put(content)


def main() -> None:
    """Run as a rank in an interpreter of its own; the number of the control pipe is the first argument."""
    control = Connection(int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    config, payload = receive_payload(control)
    code = run_rank(control, config, payload)
    if code or not config.runs_script:
        exit_process(code)


def receive_payload(control: Connection) -> tuple[RankConfig, Payload]:
    """Receive the configuration and payload of a rank that does not share the supervisor's memory."""
    try:
        return control.recv()
    except (EOFError, OSError):
        # The parent has exited, or ended the launch, before or while it configured this rank.
        os._exit(1)


def run_rank(control: Connection, config: RankConfig, payload: Payload) -> int:
    """Run the payload as this rank.

    Returns:
        The exit code of the process. Errors are sent to the supervisor and not printed.
    """
    thread = ControlThread(control, config)
    if sys.platform == "linux":
        # The kernel kills this process when its parent ends, even while C++ code holds the GIL. Its parent here is
        # the *thread* that started it; a launch keeps that thread until its ranks have ended.
        end_with_parent = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        end_with_parent()
        # Likewise for DataLoader workers and other forks of the main thread, but not daemons, which fork twice.
        own = os.getpid(), threading.get_ident()
        os.register_at_fork(
            after_in_child=lambda: (
                (os.getppid(), threading.get_ident()) == own and end_with_parent()
            )
        )
    if not faulthandler.is_enabled():
        # faulthandler keeps the file open; it is unbuffered because a crash flushes nothing.
        faulthandler.enable(open(config.stack_file, "ab", buffering=0))  # noqa: SIM115
    thread.start()
    code = 1
    message = None
    try:
        raise_on_signals(partial(thread.send, "signal"))
        thread.send("ready")
        call = payload()
        # After loading: a script that is imported to find the function must not detect that it is a rank.
        os.environ.update(config.variables)
        torch = sys.modules.get("torch")
        if (
            torch is not None
        ):  # a forked process has loaded torch already, which reads OMP_NUM_THREADS only then
            torch.set_num_threads(config.threads)
        result = call()
        code = 0
        message = ("finished", dump_result(result if config.returns else None))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as leaving:
        text = "" if isinstance(leaving.code, int) else str(leaving.code)
        # Truncated as by the system.
        code = (
            leaving.code & 0xFF if isinstance(leaving.code, int) else int(leaving.code is not None)
        )
        if code == PREEMPTED or (code == 0 and config.runs_script):
            message = "finished", b""
        elif code not in (0, *(128 + number for number in stop_signals())):
            message = "error", Failure(text=text, exit_code=code)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the supervisor reports it)
        # For exit handlers: the interpreter sets these on an uncaught exception.
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        message = "error", Failure.of(error)
    # No ``finally`` is left to run, and a signal that raises during send() would leave half a message in the pipe.
    for number in ending_signals():
        if isinstance(signal.getsignal(number), SignalHandler):
            signal.signal(number, signal.SIG_IGN)
    if message is not None:
        thread.send(*message)
    return code


class SignalHandler:
    """Raises on the first signal, so that ``finally`` blocks run, and ignores later ones.

    Ctrl-C in a terminal reaches a rank twice, from the terminal and from the parent, and the second would interrupt
    the ``finally`` block.

    Attributes:
        listeners: called with the number of a signal that asks the job to save; the signal then does not raise.
        noted: the signals that listeners were called for.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[int], object]] = []
        self.noted: set[int] = set()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        if not self.notify(number):
            signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def notify(self, number: int) -> bool:
        """Call the listeners for this signal; return whether there are any, so that it does not raise."""
        listeners = [] if number == signal.SIGINT else self.listeners
        for listener in listeners:
            listener(number)
            self.noted.add(number)
        return bool(listeners)


def raise_on_signals(acted: Callable[[int], object]) -> None:
    """Make the job-ending signals raise in the main thread, from which this is called.

    ``acted`` is called with the number of a signal once it has raised, or if another handler has it.
    """
    handler = SignalHandler()
    for number in ending_signals():
        # SIGINT is ignored in the background of a shell script, SIGHUP under nohup.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    # A signal interrupts no wait if it arrives after the interpreter's last check but before the wait, or in another
    # thread. The main thread would stay blocked and never run its ``finally`` blocks.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A forked child would otherwise write its own signals to this pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    main = threading.get_ident()

    def wake() -> None:
        while received := os.read(reading, 1):
            number = received[0]
            time.sleep(_PAUSE)
            # Also calls the listeners: the main thread may be in C++ code for long.
            # A noted signal is not sent again: that would end a job that has saved because of the first.
            while signal.getsignal(number) is handler and not (
                handler.notify(number) or number in handler.noted
            ):
                signal.pthread_kill(main, number)
                time.sleep(_PAUSE)
            if (
                number in ending_signals()
            ):  # others, such as SIGCHLD, do not matter for the grace period
                acted(number)

    threading.Thread(target=wake, name="fabric-signals", daemon=True).start()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # the supervisor blocked it; raises if one has arrived


def exit_process(code: int) -> NoReturn:
    """End this process: wait for threads and run exit handlers, but skip the interpreter's finalization.

    With torch loaded, finalization takes half a second or more, and aborts the process if a gloo thread frees its last
    collective meanwhile. ``multiprocessing`` ends the processes it forks in the same way.
    As in finalization, open files are flushed, and 0 becomes 120 when a standard stream cannot be flushed.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - as multiprocessing does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            code = code or 120
    gc.disable()
    gc.unfreeze()  # gc.get_objects() leaves out frozen objects
    # Text files first: they write to the buffered ones.
    objects = gc.get_objects()
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        # By type(): reading __class__ runs code in some objects.
        for file in (each for each in objects if issubclass(type(each), kind)):
            # Closed, detached or on a full disk: finalization ignores this too; the other files must be flushed.
            with suppress(OSError, ValueError):
                file.flush()
    os._exit(code)


def exit_with_late_error() -> None:
    """Make this process, which is running its exit handlers, end with code 120 instead of 0.

    An exception in an exit handler does not change the exit code, and exiting at once would skip the other handlers.
    Python's last step is to flush the standard streams; if that fails, the code is 120 (see ``sys.exit``).
    """
    stream: Any = sys.stderr
    if stream is not None:
        flush = stream.flush

        def flush_or_fail() -> None:
            flush()
            if (
                sys._getframe().f_back is None
            ):  # no Python code has called this, so the interpreter itself did
                raise OSError("an exit handler has failed")

        stream.flush = flush_or_fail
