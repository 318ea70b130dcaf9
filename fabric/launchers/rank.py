"""A rank of a job: runs a payload in its process, and keeps its supervisor informed."""

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
import weakref
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
from fabric.launchers.terminal import refuse_breakpoint, refuse_input
from fabric.world import World

__all__ = [
    "PREEMPTED",
    "ControlThread",
    "Failure",
    "Message",
    "MessageKind",
    "Outcome",
    "Payload",
    "RankConfig",
    "SignalHandler",
    "call_payload",
    "end_with_parent",
    "ending_signals",
    "exit_process",
    "exit_with_late_error",
    "is_secondary",
    "main",
    "outcome_of_error",
    "raise_on_signals",
    "run_process",
    "run_rank",
    "stop_signals",
]

# The exit code of a job that has saved and asks to be started again: EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75

Payload = Callable[[], Callable[[], Any]]
"""A function that prepares the process of a rank and returns the function that the rank runs.

The environment variables of the rank are set between the two calls.
"""

# [Note: Control pipe]
# Every rank has one duplex pipe to its supervisor. The supervisor first sends `(RankConfig,
# payload)`. After that both sides send a `Message`:
#
# =========  ===========  ==========================================================================
# kind       sent by      content
# =========  ===========  ==========================================================================
# ready      rank         None. From now on a signal runs the rank's `finally` blocks
# error      rank         the `Failure` that ends the rank
# finished   rank         the pickled result of the payload
# connecting rank         whether the rank now waits until all ranks have connected
# signal     rank         the number of a signal that the rank's main thread has acted on
# saving     rank         None. From now on a signal asks the rank to save and exit
# describe   supervisor   None. The rank answers with *stack* and *described*
# stack      rank         the stack of the main thread, as in a traceback
# described  rank         the `Failure` that the main thread is handling, or None
# report     both         from the supervisor: the id of the user's request for a report of what the
#                         ranks are doing. From a rank: the text of a report that it has printed
# call       supervisor   to a rank of a pool: the call to run, pickled, or None to end
# serving    rank         from a rank of a pool: None. From now on SIGUSR1 writes the rank's stack
# reply      rank         from a rank of a pool: the outcome of the call
# =========  ===========  ==========================================================================
#
# When the pipe closes, the supervisor has ended, and the rank exits at once.
MessageKind = Literal[
    "ready",
    "error",
    "finished",
    "connecting",
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
"""The kind of a message between a rank and its supervisor."""


# See [Note: Control pipe].
class Message(NamedTuple):
    """A message between a rank and its supervisor."""

    kind: MessageKind
    content: Any


# The number of characters of an error text. The text of an error may hold a whole tensor, which
# would push the cause of the error off the screen.
_MAX_TEXT_LENGTH = 20_000
# Seconds between two attempts to wake the main thread.
_WAKE_INTERVAL = 0.05
# Phrases in the messages of gloo, of torch's stores and of NCCL about a lost process. The errors
# are RuntimeErrors.
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
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
# The beginnings of the file names of the frames between the start of a rank and the user's code.
_STARTING_FRAMES = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>", "<string>")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The place and the settings of one rank, which its supervisor chooses.

    Attributes:
        world: the place in the job.
        variables: the variables that are added to the environment.
        threads: the number of threads of a CPU operation.
        stack_file: the path to which the interpreter writes the stack of a fatal signal.
        runs_script: whether the rank runs a script, which may exit at any time. Otherwise the rank
            runs a function.
        result_file: the path of the file for the tensors of the result. None if the result of the
            payload is not sent back.
    """

    world: World
    variables: dict[str, str]
    threads: int
    stack_file: str
    runs_script: bool
    result_file: str | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one rank, as the rank sends it to its supervisor.

    Attributes:
        text: the traceback, as the interpreter would have printed it.
        exit_code: the exit code of the rank.
        is_secondary: whether the error looks like the result of another rank's failure (a lost
            connection, a timeout).
        has_lost_peer: whether the error says that another process has closed its connection. That
            process may have ended normally.
        time: when the error was noticed, in seconds on the monotonic clock, which all processes of
            a machine share. Default: now.
    """

    text: str
    exit_code: int = 1
    is_secondary: bool = False
    has_lost_peer: bool = False
    time: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure for an error of the user's code.

        The first frames of its traceback, in which fabric starts the user's code, are removed, also
        in ``error`` itself.
        """
        user_traceback = error.__traceback__
        while user_traceback is not None:
            file_name = user_traceback.tb_frame.f_code.co_filename
            if not file_name.startswith(_STARTING_FRAMES):
                break
            user_traceback = user_traceback.tb_next
        lines = traceback.format_exception(error.with_traceback(user_traceback))
        return cls(
            text=_shorten("".join(lines)),
            is_secondary=is_secondary(error),
            has_lost_peer=_mentions(error, _PEER_LOST_PHRASES),
        )


def _shorten(text: str) -> str:
    """Return an error text without its middle part if the text is too long to read."""
    excess = len(text) - _MAX_TEXT_LENGTH
    if excess <= 0:
        return text
    half = _MAX_TEXT_LENGTH // 2
    return f"{text[:half]}\n[... {excess} characters left out ...]\n{text[-half:]}"


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a job to save a checkpoint and end.

    SIGUSR1 is one of them in a SLURM job, because users often have SLURM send SIGUSR1.
    """
    signals = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2]
    if "SLURM_JOB_ID" in os.environ:
        signals.append(signal.SIGUSR1)
    return signals


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a job: Ctrl-C, and the signals of :func:`stop_signals`."""
    return [*stop_signals(), signal.SIGINT]


def is_secondary(error: BaseException) -> bool:
    """Return whether an error is usually the result of another rank's failure.

    This is so if the first error in the chain of causes and contexts is a lost connection, a
    timeout, or a call that another rank does not make. torch raises a RuntimeError for some of
    these reasons, and only the text of the error tells the reason.
    """
    origin = _origin(error)
    if isinstance(origin, ConnectionError | TimeoutError | CollectiveMismatchError):
        return True
    return isinstance(origin, RuntimeError) and _mentions(origin, _SECONDARY_PHRASES)


def _origin(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes and contexts that a traceback would show."""
    chain = [error]
    while True:
        last = chain[-1]
        previous = last.__cause__
        if previous is None and not last.__suppress_context__:
            previous = last.__context__
        # A chain may be circular, because __cause__ and __context__ can be assigned.
        if previous is None or previous in chain:
            return last
        chain.append(previous)


def _mentions(error: BaseException, phrases: Sequence[str]) -> bool:
    """Return whether the first line of an error contains a phrase, in upper or lower case.

    Args:
        error: the error.
        phrases: the phrases, in lower case.
    """
    # str(error) is not used, since the __str__ method of a user's error may raise.
    first_line = traceback.format_exception_only(error)[0].lower()
    return any(phrase in first_line for phrase in phrases)


# See [Note: Control pipe].
class ControlThread(threading.Thread):
    """The thread that serves the rank's end of the control pipe.

    The thread receives messages from the supervisor, and any thread sends messages with
    :meth:`send`. A process that the rank forks does not have this thread.

    Attributes:
        config: the configuration of this rank.
        calls: the pickled calls that the supervisor of a pool has sent, in order. The item None
            asks the rank to end.
        report_request: the id of the supervisor's latest request for a report. Empty before the
            first request.
    """

    def __init__(self, control: Connection, config: RankConfig) -> None:
        """Prepare the thread in the process of the rank. ``start()`` starts it."""
        super().__init__(name="fabric-control", daemon=True)
        self.config = config
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of a pool of ranks
        self.report_request = ""  # the id of the latest request of the supervisor for a report
        self._control = control
        self._rank_pid = os.getpid()  # send() compares it, since a fork of the rank sends nothing
        self._send_lock = threading.Lock()  # two threads must not mix their messages

    @classmethod
    def of_this_process(cls) -> "ControlThread | None":
        """Return the control thread of this process.

        The result is None if no launcher of fabric started this process, or if a rank forked it.
        """
        for thread in threading.enumerate():
            if isinstance(thread, cls):
                return thread
        return None

    def send(self, kind: MessageKind, content: Any = None) -> None:
        """Send a message to the supervisor, from any thread.

        The message is lost if the supervisor has ended. In a process that the rank has forked,
        nothing is sent.
        """
        is_rank = os.getpid() == self._rank_pid
        if is_rank:
            with self._send_lock, suppress(OSError):
                self._control.send(Message(kind, content))
        elif kind == "error":
            # The script has forked this process, and an error in the script ends the fork. The
            # error is printed here, since the supervisor does not know of forks.
            print(content.text, file=sys.stderr, flush=True)

    def run(self) -> None:
        """Receive messages until the supervisor has ended, then end this process at once.

        This is the main function of the thread. It ends the process even if the main thread is
        blocked.
        """
        parent = os.getppid()
        # The pipe closes when the supervisor ends, unless a fork of the supervisor holds it open.
        # So the id of the parent process is watched, too. It changes when the parent ends.
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if self._control.poll(1.0):
                    self._handle_message(self._control.recv())
        os._exit(1)

    def _handle_message(self, message: Message) -> None:
        """Act on a message of the supervisor. This method runs in the control thread."""
        if message.kind == "describe":
            self._describe_main_thread()
        elif message.kind == "report":
            self.report_request = message.content
        else:
            assert message.kind == "call"
            self.calls.put(message.content)

    def _describe_main_thread(self) -> None:
        """Send the stack of the main thread, and the error that the main thread is handling.

        This is the answer to the supervisor's message "describe", in the control thread. So the
        supervisor learns the error of a rank that still waits in a ``finally`` block, and has not
        sent its error yet.
        """
        # The identifier of a thread that runs is not None. "or 0" is only for the type checker.
        main_thread = threading.main_thread().ident or 0
        stack = traceback.format_stack(sys._current_frames()[main_thread])
        # The supervisor waits only until "described" has arrived, so "stack" is sent before it.
        self.send("stack", "".join(stack))
        error: Any = sys._current_exceptions().get(main_thread)
        if isinstance(error, tuple):  # type, error and traceback, until Python 3.12
            error = error[1]
        failure = None  # tells the supervisor that no error is being handled
        # Python may be handling a StopIteration, which is no error: it ends a loop.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            failure = Failure.of(error)
        self.send("described", failure)


def main() -> None:
    """Run as a rank in a new interpreter.

    The first argument is the descriptor of the rank's end of the control pipe.
    """
    control = Connection(int(sys.argv[1]))
    # Child processes of the rank must not hold the pipe open.
    os.set_inheritable(control.fileno(), False)
    run_process(control)


def run_process(control: Connection) -> None:
    """Run as a rank in this process, which runs nothing else.

    This function returns only for a script that has not failed. The interpreter then ends this
    process as usual.

    Args:
        control: the rank's end of the control pipe.
    """
    # exit_process() looks for this list among the objects that are not frozen. If the list is
    # missing, the user has called gc.freeze().
    freeze_probe: list[Any] = []
    config, payload = _receive_payload(control)
    exit_code = run_rank(control, config, payload)
    # A script may rely on the interpreter's finalization. So a script that has not failed exits in
    # the usual way.
    if exit_code != 0 or not config.runs_script:
        exit_process(exit_code, freeze_probe)


def _receive_payload(control: Connection) -> tuple[RankConfig, Payload]:
    """Receive the configuration and the payload of a rank from its supervisor.

    If the supervisor has ended, this function ends the process.
    """
    try:
        return control.recv()
    except (EOFError, OSError):
        os._exit(1)


def run_rank(control: Connection, config: RankConfig, payload: Payload) -> int:
    """Run the payload as this rank, in the main thread.

    This function starts the control thread, and :func:`_run_payload` a thread for signals.

    Args:
        control: the rank's end of the control pipe.
        config: the configuration of this rank.
        payload: the work of this rank.

    Returns:
        The exit code of the process. Errors are sent to the supervisor and not printed.
    """
    control_thread = ControlThread(control, config)
    if sys.platform == "linux":
        end_with_parent()
    if not faulthandler.is_enabled():
        # The file is unbuffered because a crash flushes nothing. faulthandler keeps a reference to
        # the file, so the file stays open.
        faulthandler.enable(open(config.stack_file, "ab", buffering=0))  # noqa: SIM115
    if not config.runs_script:
        # A script may read input: its launcher gives the first rank the input of the command, and
        # the other ranks an empty one.
        refuse_input(config.world.rank)
    control_thread.start()
    outcome = _run_payload(control_thread, payload)  # raises nothing
    # From now on signals are ignored: no ``finally`` block is left to run, and a signal that raised
    # during send() would leave half a message in the pipe. A handler of the user stays.
    for number in ending_signals():
        if isinstance(signal.getsignal(number), SignalHandler):
            signal.signal(number, signal.SIG_IGN)
    if outcome.message is not None:
        control_thread.send(outcome.message.kind, outcome.message.content)
    return outcome.exit_code


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if a thread is blocked.

    Call this function in the main thread. To the kernel, the parent is the *thread* that started
    the process, so that thread must not end before the process.

    Forks of this process's main thread, such as DataLoader workers, are killed when this process
    ends. Their own forks are not, so that a daemon, which forks twice, lives on.
    """
    # CDLL(None) has the functions of the C library, which this process has loaded.
    set_parent_death_signal = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    set_parent_death_signal()
    this_pid = os.getpid()
    main_thread = threading.get_ident()

    def set_in_child() -> None:
        """Set the signal in a fork, which does not inherit the setting from this process."""
        # Forks of forks call this function, too.
        is_child = os.getppid() == this_pid
        # A fork of another thread would be killed as soon as that thread ends.
        is_fork_of_main_thread = threading.get_ident() == main_thread
        if is_child and is_fork_of_main_thread:
            set_parent_death_signal()

    os.register_at_fork(after_in_child=set_in_child)


class Outcome(NamedTuple):
    """How the payload of a rank has ended.

    Attributes:
        exit_code: the exit code of the rank.
        message: the last message to the supervisor. None if the exit code says everything, as after
            an interruption.
    """

    exit_code: int
    message: Message | None = None


def _run_payload(control_thread: ControlThread, payload: Payload) -> Outcome:
    """Run the payload, and return how the payload has ended. This function raises nothing.

    First it installs signal handlers, starts a thread for signals (see :func:`raise_on_signals`),
    and gives the process the environment variables of the rank.
    """
    config = control_thread.config
    try:
        raise_on_signals(on_signal=partial(control_thread.send, "signal"))
        # Sent after the handlers are installed: from now on a signal runs ``finally`` blocks.
        control_thread.send("ready")
        # breakpoint() is left as it is in a script, and raises an error in a function.
        pickled_result = call_payload(config, payload, has_keyboard=config.runs_script)
        return Outcome(exit_code=0, message=Message("finished", pickled_result))
    except BaseException as error:  # noqa: BLE001 (whatever it is, the supervisor reports it)
        outcome = outcome_of_error(error, config.runs_script)
        if not isinstance(error, SystemExit):
            # For exit handlers: Python sets these after an uncaught exception.
            sys.last_type = type(error)
            sys.last_value = error
            sys.last_traceback = error.__traceback__
        return outcome


def call_payload(config: RankConfig, payload: Payload, *, has_keyboard: bool) -> bytes:
    """Give this process the variables and the threads of a rank, and run the payload.

    Args:
        config: the configuration of the rank.
        payload: the work of the rank.
        has_keyboard: whether ``breakpoint()`` is left as it is. Otherwise it raises an error that
            says what to write instead.

    Returns:
        The pickled result of the payload, or a pickled None if the supervisor does not want it.
    """
    call = payload()  # prepares this process, and returns the function to run
    # Set after payload(), which may import the user's script to find a function. The script must
    # not see the variables of a rank, since it would then act as one.
    os.environ.update(config.variables)
    if not has_keyboard:
        refuse_breakpoint(config.world.rank)
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch reads OMP_NUM_THREADS only when it is loaded, and a fork has torch loaded.
        torch.set_num_threads(config.threads)
    result = call()
    if config.result_file is None:  # the supervisor does not want the result of this rank
        result = None
    return dump_result(result, config.result_file)


def outcome_of_error(error: BaseException, runs_script: bool) -> Outcome:
    """Return the outcome of a payload that has raised an exception.

    Args:
        error: the exception. The frames in which fabric starts the user's code are removed from it.
        runs_script: whether the payload runs a script. Otherwise it calls a function.
    """
    if isinstance(error, KeyboardInterrupt):
        # Without a message: a rank that was interrupted has no error to show.
        return Outcome(exit_code=128 + signal.SIGINT)
    if isinstance(error, SystemExit):
        return _outcome_of_exit(error, runs_script)
    return Outcome(exit_code=1, message=Message("error", Failure.of(error)))


def _outcome_of_exit(error: SystemExit, runs_script: bool) -> Outcome:
    """Return the outcome of a payload that has called ``sys.exit``.

    - The code 75 (:data:`PREEMPTED`), or 0 from a script, means that the rank has finished.
    - For the code 0 from a function, and for 128 + n after a signal n that asks the job to stop,
      the rank sends no message, since it has no error to show. The exit code is a failure, unless
      the supervisor is ending the ranks.
    - Any other code is an error.
    """
    text = ""
    if error.code is None:
        exit_code = 0
    elif isinstance(error.code, int):
        exit_code = error.code & 0xFF  # the system also keeps only eight bits of an exit code
    else:
        # sys.exit("text") prints the text and exits with 1.
        exit_code = 1
        text = str(error.code)
    if exit_code == PREEMPTED or (exit_code == 0 and runs_script):
        return Outcome(exit_code, message=Message("finished", b""))
    was_stopped_by_signal = exit_code - 128 in stop_signals()
    if exit_code == 0 or was_stopped_by_signal:
        return Outcome(exit_code)
    failure = Failure(text=text, exit_code=exit_code)
    return Outcome(exit_code, message=Message("error", failure))


class SignalHandler:
    """A signal handler that raises on the first signal, and ignores the same signal afterwards.

    The exception runs the ``finally`` blocks of the user's code. A second signal must not interrupt
    these blocks: Ctrl-C in a terminal reaches a rank twice, from the terminal and from the
    supervisor.

    Attributes:
        listeners: functions to call with the number of a signal that asks the job to save. While
            there are listeners, a signal other than SIGINT does not raise.
        handled_by_listeners: the numbers of the signals that listeners have been called with.
        last_raised: the exception that the handler raised last, or None. The hook of
            :func:`_repeat_lost_signals` compares it with an exception that was dropped.
        last_raised_for: the number of the signal for which ``last_raised`` was raised, or 0.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[int], object]] = []
        self.handled_by_listeners: set[int] = set()
        self.last_raised: BaseException | None = None
        self.last_raised_for = 0

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle the signal ``number``, in the main thread. The interpreter calls this method.

        Raises:
            KeyboardInterrupt: the signal is SIGINT.
            SystemExit: the signal is another one, and there are no listeners. The code is 128 + n.
        """
        has_listeners = self.notify(number)  # False for SIGINT, which always raises
        if has_listeners:
            return
        # From now on the signal is ignored, so that it does not interrupt the ``finally`` blocks.
        signal.signal(number, signal.SIG_IGN)
        # For _repeat_lost_signals(), since the interpreter drops an exception in a __del__ method.
        self.last_raised_for = number
        if number == signal.SIGINT:
            self.last_raised = KeyboardInterrupt()
        else:
            self.last_raised = SystemExit(128 + number)
        raise self.last_raised

    def notify(self, number: int) -> bool:
        """Call all listeners with the number of a signal. May be called from any thread.

        Returns:
            Whether there are listeners. If so, the handler does not raise. For SIGINT, which always
            raises, no listener is called and the result is False.
        """
        if number == signal.SIGINT:
            return False
        # The flag is set in the loop, since another thread may remove listeners meanwhile.
        has_listeners = False
        for listener in self.listeners:
            listener(number)
            self.handled_by_listeners.add(number)
            has_listeners = True
        return has_listeners


def raise_on_signals(on_signal: Callable[[int], object]) -> None:
    """Make the signals that end a job raise in the main thread. Call this once, in the main thread.

    Args:
        on_signal: tells the supervisor that this rank has handled a signal. It is called with the
            number of a signal that ends a job, in a thread that this function starts.
    """
    handler = SignalHandler()
    for number in ending_signals():
        # Ignored signals stay ignored: SIGINT in the background of a shell script, SIGHUP under
        # nohup. But SIGTERM is handled in any case, since the supervisor ends ranks with it.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    writing_end = _start_signal_thread(handler, on_signal)
    # Without this hook, a signal would be lost if it arrives in a call that cannot raise, such as a
    # __del__ method.
    _repeat_lost_signals(handler, writing_end)
    # Must be last. The supervisor blocked SIGINT while it started this process. This line raises
    # KeyboardInterrupt if SIGINT has arrived since then.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start_signal_thread(handler: SignalHandler, on_signal: Callable[[int], object]) -> int:
    """Start a thread that makes the main thread handle each signal that arrives.

    A signal may arrive in another thread, or just before the main thread begins to wait. It then
    does not interrupt the wait, and the handler does not run. So the interpreter writes the number
    of each signal to a pipe, and the thread reads it and wakes the main thread. Call this function
    in the main thread.

    Args:
        handler: the handler of the signals.
        on_signal: called in the thread with the number of a signal that ends a job, once the signal
            has been handled.

    Returns:
        The descriptor of the end of the pipe to which the interpreter writes. The thread treats a
        number that is written there like a signal.
    """
    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)  # set_wakeup_fd() requires this
    signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
    # A forked child must not write its own signals to the pipe of this process. -1 means no pipe.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    main_thread = threading.get_ident()
    signal_thread = threading.Thread(
        target=_wake_on_signals,
        args=(reading_end, handler, main_thread, on_signal),
        name="fabric-signals",
        daemon=True,
    )
    signal_thread.start()
    return writing_end


def _repeat_lost_signals(handler: SignalHandler, writing_end: int) -> None:
    """Install a hook that handles a signal again if the interpreter drops the handler's exception.

    A signal may arrive while the main thread runs a ``__del__`` method or the callback of a weak
    reference, for example during an import. Such calls cannot raise: the interpreter passes their
    exceptions to ``sys.unraisablehook`` and goes on. Without the hook, the rank would run on, with
    the signal ignored.

    Args:
        handler: the handler of the signals.
        writing_end: the descriptor of the pipe that the thread of :func:`_wake_on_signals` reads.
    """
    previous_hook = sys.unraisablehook

    def repeat_if_lost(unraisable: "sys.UnraisableHookArgs") -> None:
        """Handle a signal again if ``unraisable`` is the exception that the handler raised."""
        error = unraisable.exc_value
        if error is None or error is not handler.last_raised:
            previous_hook(unraisable)
            return
        number = handler.last_raised_for
        # The handler has replaced itself by SIG_IGN, so it is installed again. Only the main thread
        # may do this. The hook runs there, since the handler did.
        signal.signal(number, handler)
        # The thread of _wake_on_signals() sends the signal again after a pause. By then, the call
        # that cannot raise has usually returned.
        os.write(writing_end, bytes([number]))

    sys.unraisablehook = repeat_if_lost


def _wake_on_signals(
    reading_end: int,
    handler: SignalHandler,
    main_thread: int,
    on_signal: Callable[[int], object],
) -> None:
    """Send each signal to the main thread repeatedly, until the signal has been handled.

    This is the main function of the thread of :func:`_start_signal_thread`. A main thread that
    waits in C++ code or in a system call may not run the handler when a signal arrives once.

    Args:
        reading_end: the descriptor of the pipe to which the interpreter writes the number of each
            signal that arrives, as one byte.
        handler: the handler of the signals. In the main thread, it either calls the listeners, or
            replaces itself by SIG_IGN and raises.
        main_thread: the identifier of the main thread.
        on_signal: called with the number of a signal that ends a job, once it has been handled.
    """
    while True:
        received = os.read(reading_end, 1)
        if not received:  # the writing end was closed
            return
        number = received[0]
        time.sleep(_WAKE_INTERVAL)  # usually enough for the main thread to run the handler
        # The handler replaces itself when it raises. While it is installed, it has not raised.
        while signal.getsignal(number) is handler:
            # This thread calls the listeners, too: the main thread may take long to do so.
            handler.notify(number)
            # Once a listener has been called, the signal is not sent again. The job saves because
            # of the signal, and afterwards there may be no listener, so that the handler would
            # raise.
            if number in handler.handled_by_listeners:
                break
            signal.pthread_kill(main_thread, number)
            time.sleep(_WAKE_INTERVAL)
        if number in ending_signals():  # not SIGCHLD, for example
            on_signal(number)


def exit_process(code: int, freeze_probe: list[Any] | None = None) -> NoReturn:
    """End this process as the interpreter would, but without its finalization.

    This function waits for threads, runs exit handlers and flushes open files. The finalization is
    skipped for two reasons. With torch loaded, it takes half a second or more. And a thread of gloo
    that releases a finished collective during the finalization aborts the process.

    Args:
        code: the exit code. As in finalization, 0 becomes 120 if a standard stream cannot be
            flushed.
        freeze_probe: a list that was made when this process began. It shows whether the user has
            called ``gc.freeze()`` since then, which hides open files from the flush of all files.
            None, the default, if there is no such list: the user may have called it.
    """
    # Waits for the threads that are not daemons. multiprocessing calls this private function, too.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    _keep_operators()  # makes the exit handlers of torch faster
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            if code == 0:
                code = 120
    _flush_files(freeze_probe)
    os._exit(code)


def _keep_operators() -> None:
    """Keep the exit handlers of this process from removing torch's operators.

    The removal takes about half of the time of an exit, and is useless: the process ends anyway.
    """
    library = sys.modules.get("torch.library")
    if library is None:
        return
    # weakref has no public list of the finalizers.
    registry = weakref.finalize._registry  # pyright: ignore[reportAttributeAccessIssue]
    for finalizer in list(registry):
        alive = finalizer.peek()
        if alive is None:  # the finalizer has run already
            continue
        watched_object, _, _, _ = alive
        if isinstance(watched_object, library.Library):
            finalizer.atexit = False  # skips the finalizer at the exit


def _flush_files(freeze_probe: list[Any] | None) -> None:
    """Flush all open files of this process, which ends without the interpreter's finalization.

    Args:
        freeze_probe: a list that was made when this process began. ``gc.get_objects()`` has the
            list unless the user has called ``gc.freeze()`` since then. None if there is no such
            list.
    """
    gc.disable()  # the process ends, so a collection of garbage would only take time
    # gc.get_objects() leaves out frozen objects. In a forked rank, these are the objects of the
    # fork server. None of them is an open file, and looking at all of them would take long.
    objects = gc.get_objects()
    # If the probe is missing, the user has frozen more objects. Without a probe this is unknown. In
    # both cases a frozen object may be a file, and so all objects are looked at.
    has_probe = any(candidate is freeze_probe for candidate in objects)
    if not has_probe:
        gc.unfreeze()
        objects = gc.get_objects()
    text_files: list[Any] = []
    buffered_files: list[Any] = []
    for candidate in objects:
        # isinstance() is not used: it reads __class__, which runs code in some objects.
        if issubclass(type(candidate), io.TextIOWrapper):
            text_files.append(candidate)
        elif issubclass(type(candidate), (io.BufferedWriter, io.BufferedRandom)):
            buffered_files.append(candidate)
    # Text files first: they write to the buffered files.
    for file in (*text_files, *buffered_files):
        # The file may be closed, detached or on a full disk. Finalization ignores these errors,
        # too, and the other files must be flushed.
        with suppress(OSError, ValueError):
            file.flush()


def exit_with_late_error() -> None:
    """Make this process end with code 120 instead of 0. Call it in an exit handler that fails.

    An exception in an exit handler does not change the exit code, and exiting at once would skip
    the other handlers. But in its last step, the interpreter flushes the standard streams, and
    exits with 120 if the flush fails (see ``sys.exit``). So this function replaces the method
    ``flush`` of the standard error by a function that fails in the last step.
    """
    stream: Any = sys.stderr
    if stream is None:
        return
    flush = stream.flush

    def flush_or_fail() -> None:
        """Flush the stream, and raise in the interpreter's last step."""
        flush()
        # In the last step, the interpreter calls this function from C code, so there is no caller.
        is_last_step = sys._getframe().f_back is None
        if is_last_step:
            raise OSError("an exit handler has failed")

    stream.flush = flush_or_fail
