"""A rank of a job: runs a payload in its process, and keeps its supervisor informed.

[Note: Control pipe] Every rank has one duplex pipe to its supervisor. The supervisor first sends
``(RankConfig, payload)``. After that both sides send a :class:`Message`:

=========  ===========  ============================================================================
kind       sent by      content
=========  ===========  ============================================================================
ready      rank         None: signals run the rank's ``finally`` blocks from now on
error      rank         the :class:`Failure` that ends the rank
finished   rank         the pickled result of the payload
signal     rank         the number of a signal that the rank's main thread has acted on
saving     rank         None: signals ask the rank to save and exit from now on
describe   supervisor   None: asks for the error that the main thread is handling
stack      rank         sent before the answer: the stack of the main thread, as in a traceback
described  rank         the :class:`Failure` of the main thread, or None
report     supervisor   the id of the user's request for a report of what the ranks are doing
call       supervisor   for the ranks of a pool: the call to run, pickled, or None to end
serving    rank         of a pool, None: a signal makes the rank write its stack from now on
reply      rank         of a pool: the outcome of the call
=========  ===========  ============================================================================

When the pipe closes, the supervisor has ended, and the rank exits at once.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

from fabric.errors import CollectiveMismatchError
from fabric.launchers.serialize import dump_result
from fabric.world import World

__all__ = [
    "PREEMPTED",
    "ControlThread",
    "Failure",
    "Message",
    "MessageKind",
    "Payload",
    "RankConfig",
    "SignalHandler",
    "ending_signals",
    "exit_process",
    "exit_with_late_error",
    "is_secondary",
    "main",
    "raise_on_signals",
    "receive_payload",
    "run_rank",
    "stop_signals",
]

# The exit code of a job that has saved and asks to be started again: EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75

Payload = Callable[[], Callable[[], Any]]
"""Prepares a process, and returns a function to call once the rank's variables are set."""

MessageKind = Literal[
    "ready",
    "error",
    "finished",
    "signal",
    "saving",
    "describe",
    "stack",
    "described",
    "report",
    "call",
    "serving",
    "reply",
]
"""The kind of a message between a rank and its supervisor; see ``[Note: Control pipe]``."""


class Message(NamedTuple):
    """A message between a rank and its supervisor; see ``[Note: Control pipe]``."""

    kind: MessageKind
    content: Any


# Characters. A message may hold a whole tensor, which would push the cause off the screen.
_MAX_TEXT_LENGTH = 20_000
# Seconds between two attempts to wake the main thread.
_WAKE_INTERVAL = 0.05
# Phrases in messages of gloo, the stores and NCCL about a lost process. The errors are
# RuntimeErrors or subclasses of torch's.
_PEER_LOST_PHRASES = ("closed by peer", "reset by peer")
_SECONDARY_PHRASES = (
    *_PEER_LOST_PHRASES,
    "broken pipe",
    "connection refused",
    "timed out",
    "timeout",
    "distnetwork",
    "diststore",
)
_PR_SET_PDEATHSIG = 1
_OUR_FRAMES = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>", "<string>")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The place and the settings of one rank.

    Attributes:
        world: the place in the job.
        variables: the variables that are added to the environment.
        threads: the number of threads of a CPU operation.
        stack_file: the path to which the interpreter writes the stack of a fatal signal.
        runs_script: whether the rank runs a script, which may exit at any time. Otherwise it runs a
            function.
        returns: whether the result of the payload is sent back.
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
        secondary: whether the error looks like the result of another rank's failure (a lost
            connection, a timeout).
        peer_lost: whether the error says that another process has closed its connection. That
            process may have ended normally.
        time: when the error was noticed, in seconds on the system-wide monotonic clock.
    """

    text: str
    exit_code: int = 1
    secondary: bool = False
    peer_lost: bool = False
    time: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure for an error, without the frames that lead to the user's code."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FRAMES):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(trace)))
        return cls(
            text=_shorten(text),
            secondary=is_secondary(error),
            peer_lost=_mentions(error, _PEER_LOST_PHRASES),
        )


def _shorten(text: str) -> str:
    """Leave out the middle of a text that is too long to read."""
    left_out = len(text) - _MAX_TEXT_LENGTH
    if left_out <= 0:
        return text
    half = _MAX_TEXT_LENGTH // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a job to save and end.

    Under SLURM, SIGUSR1 is one of them, because users often have SLURM send it.
    """
    signals = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2]
    if "SLURM_JOB_ID" in os.environ:
        signals.append(signal.SIGUSR1)
    return signals


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a job: those of :func:`stop_signals`, and Ctrl-C."""
    return [*stop_signals(), signal.SIGINT]


def is_secondary(error: BaseException) -> bool:
    """Return whether an error is usually the result of another rank's failure.

    The first error of its chain is then a lost connection, a timeout or a missing rank.
    """
    origin = _origin(error)
    if isinstance(origin, ConnectionError | TimeoutError | CollectiveMismatchError):
        return True
    return isinstance(origin, RuntimeError) and _mentions(origin, _SECONDARY_PHRASES)


def _origin(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes and contexts of an error."""
    chain = [error]
    while True:
        last = chain[-1]
        previous = last.__cause__
        if previous is None and not last.__suppress_context__:
            previous = last.__context__
        if previous is None or previous in chain:
            return last
        chain.append(previous)


def _mentions(error: BaseException, phrases: Sequence[str]) -> bool:
    """Return whether the first line of an error contains one of the phrases."""
    # str(error) may raise, and would include the notes.
    first_line = traceback.format_exception_only(error)[0].lower()
    return any(phrase in first_line for phrase in phrases)


class ControlThread(threading.Thread):
    """The rank's end of the control pipe. A process that the rank forks does not have one.

    Attributes:
        config: the configuration of this rank.
        calls: the calls that the supervisor of a pool has sent, in order.
        report_request: the id of the supervisor's latest request for a report. Empty before the
            first request.
    """

    def __init__(self, control: Connection, config: RankConfig) -> None:
        super().__init__(name="fabric-control", daemon=True)
        self.config = config
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.report_request = ""
        self._control = control
        self._process = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def of_this_process(cls) -> "ControlThread | None":
        """Return the control thread, or None if no launcher of fabric started this process."""
        for thread in threading.enumerate():
            if isinstance(thread, cls):
                return thread
        return None

    def send(self, kind: MessageKind, content: Any = None) -> None:
        """Send a message to the supervisor. The message is lost if the supervisor has ended."""
        if os.getpid() == self._process:
            with self._lock, suppress(OSError):
                self._control.send(Message(kind, content))
        elif kind == "error":
            # A process that the script forked also gets here, but it is not the rank.
            print(content.text, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Serve the pipe until the supervisor has ended, then exit at once.

        The process exits even if the main thread is blocked. This is needed although the kernel
        kills the process with its parent: the parent may end before ``prctl`` is called.
        """
        parent = os.getppid()
        # Another process that the parent forked may hold the pipe open. The id of the parent
        # process shows that the parent has ended.
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if self._control.poll(1.0):
                    self._receive(self._control.recv())
        os._exit(1)

    def _receive(self, message: Message) -> None:
        if message.kind == "describe":
            self._describe_main_thread()
        elif message.kind == "report":
            self.report_request = message.content
        else:
            self.calls.put(message.content)

    def _describe_main_thread(self) -> None:
        """Send the stack of the main thread, and the error that the main thread is handling.

        A rank that waits for other ranks in a ``finally`` block has not sent its error yet.
        """
        main_thread = threading.main_thread().ident or 0
        stack = traceback.format_stack(sys._current_frames()[main_thread])
        self.send("stack", "".join(stack))
        error: Any = sys._current_exceptions().get(main_thread)
        if isinstance(error, tuple):  # type, error and traceback, until Python 3.12
            error = error[1]
        failure = None
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            failure = Failure.of(error)
        self.send("described", failure)


def main() -> None:
    """Run as a rank in a new interpreter. The first argument is the number of the control pipe."""
    control = Connection(int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    config, payload = receive_payload(control)
    code = run_rank(control, config, payload)
    if code != 0 or not config.runs_script:
        exit_process(code)


def receive_payload(control: Connection) -> tuple[RankConfig, Payload]:
    """Receive the configuration and the payload of a rank.

    A rank that shares the memory of its supervisor does not need this.
    """
    try:
        return control.recv()
    except (EOFError, OSError):
        # The parent has exited, or has ended the launch, before or while it configured this rank.
        os._exit(1)


def run_rank(control: Connection, config: RankConfig, payload: Payload) -> int:
    """Run the payload as this rank.

    Args:
        control: the rank's end of the control pipe.
        config: the configuration of this rank.
        payload: the work of this rank.

    Returns:
        The exit code of the process. Errors are sent to the supervisor and not printed.
    """
    thread = ControlThread(control, config)
    if sys.platform == "linux":
        _end_with_parent()
    if not faulthandler.is_enabled():
        # faulthandler keeps the file open. It is unbuffered because a crash flushes nothing.
        faulthandler.enable(open(config.stack_file, "ab", buffering=0))  # noqa: SIM115
    thread.start()
    end = _run_payload(thread, payload)
    # No ``finally`` block is left to run, and a signal that raises during send() would leave half a
    # message in the pipe.
    for number in ending_signals():
        if isinstance(signal.getsignal(number), SignalHandler):
            signal.signal(number, signal.SIG_IGN)
    if end.message is not None:
        thread.send(*end.message)
    return end.exit_code


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even while C++ code holds the GIL.

    To the kernel the parent is the *thread* that started the process. A launch keeps that thread
    until its ranks have ended. DataLoader workers and other forks of the main thread end with this
    process in turn. Daemons, which fork twice, do not.
    """
    set_parent_death_signal = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    set_parent_death_signal()
    process = os.getpid()
    main_thread = threading.get_ident()

    def set_in_child() -> None:
        if os.getppid() == process and threading.get_ident() == main_thread:
            set_parent_death_signal()

    os.register_at_fork(after_in_child=set_in_child)


class _End(NamedTuple):
    """The end of a rank: its exit code, and the last message to its supervisor, if any."""

    exit_code: int
    message: Message | None = None


def _run_payload(thread: ControlThread, payload: Payload) -> _End:
    """Run the payload and return how it ended."""
    config = thread.config
    try:
        raise_on_signals(partial(thread.send, "signal"))
        thread.send("ready")
        call = payload()
        # Set after loading: a script that is imported to find the function must not detect that it
        # is a rank.
        os.environ.update(config.variables)
        torch = sys.modules.get("torch")
        if torch is not None:
            # A forked process has torch, which reads OMP_NUM_THREADS only when it is loaded.
            torch.set_num_threads(config.threads)
        result = call()
        if not config.returns:
            result = None
        return _End(0, Message("finished", dump_result(result)))
    except KeyboardInterrupt:
        return _End(128 + signal.SIGINT)
    except SystemExit as error:
        return _end_of_exit(error, config.runs_script)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the supervisor reports it)
        # For exit handlers: the interpreter sets these on an uncaught exception.
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        return _End(1, Message("error", Failure.of(error)))


def _end_of_exit(error: SystemExit, runs_script: bool) -> _End:
    """Return how a rank ends that calls ``sys.exit``. A code that is not an integer is a text."""
    text = ""
    if error.code is None:
        code = 0
    elif isinstance(error.code, int):
        code = error.code & 0xFF  # truncated as by the system
    else:
        code = 1
        text = str(error.code)
    if code == PREEMPTED or (code == 0 and runs_script):
        return _End(code, Message("finished", b""))
    if code == 0 or code - 128 in stop_signals():
        return _End(code)
    return _End(code, Message("error", Failure(text=text, exit_code=code)))


class SignalHandler:
    """A signal handler that raises on the first signal, and ignores later signals.

    The exception runs the ``finally`` blocks. Ctrl-C in a terminal reaches a rank twice, from the
    terminal and from the parent, and the second signal would interrupt the ``finally`` blocks.

    Attributes:
        listeners: functions to call with the number of a signal that asks the job to save. If there
            are any, the signal does not raise.
        noted: the signals for which listeners were called.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[int], object]] = []
        self.noted: set[int] = set()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        if self.notify(number):
            return
        signal.signal(number, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def notify(self, number: int) -> bool:
        """Call the listeners for a signal. Return whether there are any, so that it does not raise.

        Ctrl-C has no listeners.
        """
        if number == signal.SIGINT:
            return False
        is_noted = False
        for listener in self.listeners:
            listener(number)
            self.noted.add(number)
            is_noted = True
        return is_noted


def raise_on_signals(on_signal: Callable[[int], object]) -> None:
    """Make the job-ending signals raise in the main thread, which calls this.

    Args:
        on_signal: a function to call with the number of a signal once it has raised, or if a
            handler that the user installed has received it.
    """
    handler = SignalHandler()
    for number in ending_signals():
        # SIGINT is ignored in the background of a shell script, SIGHUP under nohup.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    # A signal interrupts no wait if it arrives after the interpreter's last check but before the
    # wait, or in another thread. The main thread would stay blocked and never run its ``finally``
    # blocks. So another thread reads the numbers of all signals from a pipe, and wakes it.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A forked child would otherwise write the signals that it gets to this pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    main_thread = threading.get_ident()
    threading.Thread(
        target=_wake_on_signals,
        args=(reading, handler, main_thread, on_signal),
        name="fabric-signals",
        daemon=True,
    ).start()
    # The supervisor blocked SIGINT. This raises if SIGINT has arrived.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _wake_on_signals(
    reading: int, handler: SignalHandler, main_thread: int, on_signal: Callable[[int], object]
) -> None:
    """Send each signal to the main thread until the handler has raised there."""
    while True:
        received = os.read(reading, 1)
        if not received:
            return
        number = received[0]
        time.sleep(_WAKE_INTERVAL)
        while signal.getsignal(number) is handler:
            # Listeners are called here, too: the main thread may be in C++ code for a long time.
            # A noted signal is not sent again: if the listeners are gone by now, it would end a job
            # that has saved because of the first signal.
            if handler.notify(number) or number in handler.noted:
                break
            signal.pthread_kill(main_thread, number)
            time.sleep(_WAKE_INTERVAL)
        # Other signals, such as SIGCHLD, do not matter for the grace period.
        if number in ending_signals():
            on_signal(number)


def exit_process(code: int) -> NoReturn:
    """End this process: wait for threads and run exit handlers, but skip the finalization.

    With torch loaded, the interpreter's finalization takes half a second or more. The process
    aborts if a thread of gloo frees a collective during the finalization. ``multiprocessing`` also
    ends the processes that it forks without finalization. As in finalization, open files are
    flushed, and code 0 becomes 120 if a standard stream cannot be flushed.
    """
    # A private function that multiprocessing calls for the same purpose.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            code = code or 120
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Flush all open files of this process."""
    gc.disable()
    gc.unfreeze()  # gc.get_objects() leaves out frozen objects
    objects = gc.get_objects()
    # Text files first: they write to the buffered files.
    for file_type in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for candidate in objects:
            # type(): reading __class__ runs code in some objects.
            if not issubclass(type(candidate), file_type):
                continue
            # The file may be closed, detached or on a full disk. Finalization ignores these errors,
            # too, and the other files must be flushed.
            with suppress(OSError, ValueError):
                candidate.flush()


def exit_with_late_error() -> None:
    """Make this process, which is running its exit handlers, end with code 120 instead of 0.

    An exception in an exit handler does not change the exit code, and exiting at once would skip
    the other handlers. The last step of Python is to flush the standard streams. If that fails, the
    code is 120 (see ``sys.exit``).
    """
    stream: Any = sys.stderr
    if stream is None:
        return
    flush = stream.flush

    def flush_or_fail() -> None:
        flush()
        # Without a Python frame above this one, the interpreter itself is calling.
        if sys._getframe().f_back is None:
            raise OSError("an exit handler has failed")

    stream.flush = flush_or_fail
