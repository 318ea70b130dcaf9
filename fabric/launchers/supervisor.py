"""The supervisor of a job: starts its ranks, waits for them, and ends them when one fails."""

import linecache
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

from fabric.diagnostics.report_signal import ignore_request, report_signal
from fabric.diagnostics.tested_versions import untested_torch
from fabric.errors import RankFailedError
from fabric.launchers.private_file import PrivateFile
from fabric.launchers.rank import (
    PREEMPTED,
    Failure,
    Message,
    MessageKind,
    Payload,
    RankConfig,
    ending_signals,
)
from fabric.world import World, available_cores

__all__ = [
    "RankProcess",
    "ReceivedSignal",
    "StartProcess",
    "StartedProcess",
    "StatField",
    "Supervisor",
    "describe_exit",
    "exit_status",
    "never",
    "processor_seconds",
    "rank_variables",
    "read_stat",
]


class StartedProcess(NamedTuple):
    """A process that has been started.

    Attributes:
        pid: the process id.
        poll: returns the exit code, without waiting: negative for a signal, None while the process
            runs.
        send_signal: sends a signal to a process, by the id of the process and the number of the
            signal.
    """

    pid: int
    poll: Callable[[], int | None]
    send_signal: Callable[[int, int], object] = os.kill


StartProcess = Callable[[Connection, RankConfig], StartedProcess]
"""A function that starts the process of one rank, and gives it the rank's end of the control pipe.

Its arguments are this end of the pipe and the configuration of the rank.
"""

# All times are in seconds. After a fault, a user must wait less than five seconds in total. A test
# checks this limit.

# How long the errors of the other ranks may take to arrive.
COLLECT_TIMEOUT = 1.0
# How long the remaining ranks may take to describe their errors.
DESCRIBE_TIMEOUT = 0.3
# How long ``finally`` blocks may take after a failure.
END_GRACE = 2.0
# How long ``finally`` blocks may take after an interruption.
INTERRUPT_GRACE = 3.0
# How long a rank may take to show that it has noticed a signal.
RESPONSE_TIME = 1.0
# How long the system may take to reap a killed process.
REAP_TIMEOUT = 5.0
# `timeout` and other programs send each signal twice. A signal that follows the first within this
# time is such a repetition.
REPEAT_WINDOW = 0.3
# How long a script that asks fabric.should_stop may take to write its checkpoint. This is also the
# default of torchrun and of Kubernetes.
SAVE_GRACE = 30.0
# The time between two looks at the processes.
_POLL_INTERVAL = 0.1

# Signals that conventionally end a process. Programs choose the meaning of the others.
_STANDARD_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The share of a core that an idle rank uses at most: threads of fabric and of gloo wake up to poll.
_IDLE_LOAD = 0.05
# The number of ranks whose last call an error shows.
_MAX_LAST_CALLS = 16
# A frame of user code, that is, of a file that belongs to neither fabric nor torch. The frame is in
# a traceback or in a stack of faulthandler.
_LIBRARIES = rf'<|{re.escape(str(Path(__file__).parents[1]))}/|[^"]*-packages/torch/'
_FRAME = re.compile(rf'File "(?!{_LIBRARIES})(?P<file>.+?)", line (?P<line>\d+)(?P<comma>,?)')


def _open_standard_streams() -> None:
    """Open each closed standard stream of this process as ``os.devnull``.

    Otherwise the next files that this process opens would get the numbers 0 to 2, and ranks would
    print to these files.
    """
    # os.open() returns the lowest descriptor that is not in use. The loop keeps 0 to 2 open.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        os.set_inheritable(descriptor, True)  # the ranks need standard streams, too
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


class StatField(IntEnum):
    """Fields of ``/proc/<pid>/stat``, with their numbers in the manual page proc(5)."""

    PROCESS_ID = 1
    STATE = 3
    USER_TICKS = 14
    SYSTEM_TICKS = 15
    START_TIME = 22


def read_stat(pid: int | str) -> dict[int, str]:
    """Return the fields of ``/proc/<pid>/stat`` by :class:`StatField`.

    The result is empty if there is no such process, or if this is not Linux.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    # Spaces separate the fields, whose numbers begin with 1. The second field is the name of the
    # program in parentheses, which may contain spaces, so the text is split after this field.
    process_id, _, _ = stat.partition(" ")
    _, _, text_after_name = stat.rpartition(")")
    fields = dict(enumerate(text_after_name.split(), start=3))
    fields[StatField.PROCESS_ID] = process_id
    return fields


def _ignore_report(text: str) -> None:
    """Ignore a report, since the rank has printed the report on the terminal of the supervisor."""


def never() -> bool:
    """Return False. This is the condition of a wait that nothing ends early."""
    return False


class _CauseKind(IntEnum):
    """What a rank has done. A rank of a lower kind is more likely the cause of the job's end."""

    OWN_FAILURE = 0
    """The rank has sent its error, was killed, or exited with an error code."""
    ERROR_IN_HANDLING = 1
    """The rank is handling an error, and may recover from the error."""
    EARLY_END = 2
    """The rank has left the job early, without an error."""
    SECONDARY_ERROR = 3
    """The error of the rank looks like the result of another rank's failure."""
    NO_FAILURE = 4
    """The rank runs, has finished, or was preempted."""


class _CauseOrder(NamedTuple):
    """A sort key of ranks, which puts the rank that has most likely ended the job first.

    Attributes:
        kind: what the rank has done.
        time: when the rank failed or ended, on the monotonic clock.
        global_rank: the number of the rank, which orders ranks that failed at the same time.
    """

    kind: _CauseKind
    time: float
    global_rank: int


# See [Note: Control pipe] in rank.py.
@dataclass(kw_only=True)
class RankProcess:
    """One rank, as its supervisor sees it: the process, the pipe to it, and what it has sent.

    Attributes:
        config: the configuration of the rank.
        process: the process of the rank.
        control: the supervisor's end of the control pipe.
        stack_file: the file to which the rank writes its stack on a fatal signal.
        messages: the content of the latest message of each kind. A kind is missing if the rank has
            not sent a message of this kind.
        exit_code: the exit code of the rank, which is -n if signal n has killed the rank. None
            while the rank runs.
        is_killed: whether the supervisor has sent SIGKILL to the rank.
        end_time: when the end of the rank was noticed, on the monotonic clock. While the rank runs,
            the time of the latest poll.
    """

    config: RankConfig
    process: StartedProcess
    control: Connection
    stack_file: PrivateFile
    messages: dict[MessageKind, Any] = field(default_factory=dict)
    exit_code: int | None = None
    is_killed: bool = False
    end_time: float = 0.0

    @property
    def global_rank(self) -> int:
        """The number of the rank in the job."""
        return self.config.world.rank

    @property
    def failure(self) -> Failure | None:
        """The error of the rank, or None if it has sent none."""
        # "error" has the error that ended the payload. "described" has an error that the payload is
        # still handling, or None.
        return self.messages.get("error") or self.messages.get("described")

    @property
    def is_exiting(self) -> bool:
        """Whether the payload has returned or failed, so that only the process has to end."""
        return "finished" in self.messages or "error" in self.messages

    def poll(self) -> bool:
        """Update ``exit_code`` and ``end_time`` without waiting. Return whether the rank ended."""
        if self.exit_code is None:
            self.exit_code = self.process.poll()
            self.end_time = monotonic()
        return self.exit_code is not None

    def has_failed(self) -> bool:
        """Return whether the rank has sent an error, or has ended in an unexpected way."""
        if "error" in self.messages:
            return True
        if self.exit_code is None:
            return False
        if self.exit_code not in (0, PREEMPTED):
            return True
        if self.config.runs_script:
            return False  # a script may exit at any time
        # A rank that runs a function sends "finished" when the function has returned.
        return "finished" not in self.messages

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank, unless the rank has ended."""
        if not self.poll():
            # A rank of the fork server is not a child of this process, and may end after the poll.
            with suppress(ProcessLookupError):
                self.process.send_signal(self.process.pid, signal_number)
                self.is_killed |= signal_number == signal.SIGKILL

    def send(self, kind: MessageKind, content: Any = None) -> None:
        """Send a message to the rank. The message is lost if the rank has ended."""
        with suppress(OSError):  # the rank has ended, which poll() reports
            self.control.send(Message(kind, content))

    def send_payload(self, payload: Payload) -> None:
        """Send the configuration and the payload, which the rank reads before any message."""
        with suppress(OSError):  # the rank has ended, which poll() reports
            self.control.send((self.config, payload))

    def receive(self) -> None:
        """Read the messages that have arrived into ``messages``, without waiting."""
        try:
            while not self.control.closed and self.control.poll():
                message: Message = self.control.recv()
                self.messages[message.kind] = message.content
        except (EOFError, OSError):  # the rank has closed its end of the pipe
            self.control.close()

    def read_stack(self) -> str:
        """Return the stack that faulthandler has written in the rank on a fatal signal.

        It is the stack of the thread that received the signal. If no Python thread received it, it
        is the stack of the main thread. The text is empty if there was no fatal signal.
        """
        text = Path(self.stack_file.path).read_text(errors="replace")
        # faulthandler writes paragraphs: the reason, one per thread, and a list of the extension
        # modules, which is cut off here.
        paragraphs, _, _ = text.partition("\n\nExtension")
        reason, *threads = paragraphs.split("\n\n")
        # The paragraph of the thread that received the signal begins with "Current thread".
        shown_threads = [thread for thread in threads if thread.startswith("Current")]
        if not shown_threads:
            shown_threads = threads[-1:]  # the main thread
        return "\n\n".join([reason, *shown_threads])

    def last_call(self) -> str:
        """Return where the rank was last in user code, for the table in an error text.

        The place is the innermost line of user code in the rank's error, in the stack that the rank
        has sent, or in the stack of a fatal signal.
        """
        if self.failure is not None:
            text = self.failure.text
        else:
            text = self.messages.get("stack") or self.read_stack()
        frames = list(_FRAME.finditer(text))  # only the frames of user code
        if frames:
            # In a traceback a comma follows the line number, and the innermost frame is the last.
            # In a stack of faulthandler the innermost frame is the first.
            is_traceback = frames[0]["comma"] != ""
            frame = frames[-1] if is_traceback else frames[0]
            source_line = linecache.getline(frame["file"], int(frame["line"])).strip()
            return f"{frame['file']}:{frame['line']}: {source_line}"
        if "finished" in self.messages:
            return "it had finished"
        return "unknown"

    def processor_seconds(self) -> float | None:
        """Return the CPU time in seconds that all threads of the process have used.

        The result is None if the main thread does not sleep, so that the process is certainly
        busy, or if the time is unknown.
        """
        fields = read_stat(self.process.pid)
        # The system gives the state of the main thread as that of the process.
        is_sleeping = fields.get(StatField.STATE) == "S"
        if not is_sleeping:
            return None
        ticks = int(fields[StatField.USER_TICKS]) + int(fields[StatField.SYSTEM_TICKS])
        return ticks / os.sysconf("SC_CLK_TCK")

    def is_suspended(self) -> bool:
        """Return whether the process is stopped, as by SIGSTOP. It then handles no signal."""
        return read_stat(self.process.pid).get(StatField.STATE) == "T"

    def cannot_respond(self) -> bool:
        """Return whether the rank can neither send an error nor handle a signal.

        Call this method after another rank has failed. A rank that is stopped cannot respond. Nor
        can one that connects: the C++ code of torch waits for the failed rank.
        """
        return self.is_suspended() or self.messages.get("connecting", False)

    def cause_order(self, has_lost_peer: bool) -> _CauseOrder:
        """Return a sort key that puts the rank that has most likely ended the job first.

        Args:
            has_lost_peer: whether any rank of the job reports that it has lost its connection to
                another rank.
        """
        failure = self.failure
        if failure is not None:
            if failure.is_secondary:
                kind = _CauseKind.SECONDARY_ERROR
            elif "error" in self.messages:
                kind = _CauseKind.OWN_FAILURE
            else:
                # The rank has only described the error, and has not ended because of it.
                kind = _CauseKind.ERROR_IN_HANDLING
            return _CauseOrder(kind, failure.time, self.global_rank)

        if "finished" in self.messages:
            # To finish is an error only if another rank still needed the connection to this rank.
            has_left_early = has_lost_peer
        else:
            # The rank has sent no error and no result. With the code 0 it has ended by itself, for
            # example by os._exit(0).
            has_left_early = self.exit_code == 0
        if has_left_early:
            kind = _CauseKind.EARLY_END
        elif self.exit_code in (None, 0, PREEMPTED):
            kind = _CauseKind.NO_FAILURE
        else:
            kind = _CauseKind.OWN_FAILURE
        return _CauseOrder(kind, self.end_time, self.global_rank)

    def final_exit_code(self) -> int:
        """Return the exit code of a rank that has ended, or of a rank that is about to end."""
        if self.exit_code is not None:
            return self.exit_code
        if self.failure is not None:
            return self.failure.exit_code
        return 0  # the payload has returned without an error


class ReceivedSignal(NamedTuple):
    """A signal that has arrived.

    Attributes:
        number: the number of the signal.
        time: when it arrived, on the monotonic clock.
    """

    number: int
    time: float


class Supervisor:
    """The starter and watcher of a job's ranks on this machine, which ends all ranks if one fails.

    Within the ``with`` block, signals to this process are recorded in ``signals``, and do not end
    this process. Leaving the block kills the ranks that still run. A pool of ranks uses no block,
    and calls :meth:`close`.

    Args:
        is_rank: whether this process is a rank, too, and opens the store of the ranks. Default:
            False.

    Attributes:
        ranks: the ranks that have been started.
        signals: the signals that have arrived since the block was entered and that end a job.
    """

    def __init__(self, *, is_rank: bool = False) -> None:
        """Open the file of the store. :meth:`__enter__` installs signal handlers."""
        # If a standard stream of this process is closed, the next file to be opened would get its
        # descriptor, and print() would write into that file. So the streams are opened first.
        _open_standard_streams()
        self.ranks: list[RankProcess] = []
        self.signals: list[ReceivedSignal] = []
        # The file through which the ranks find each other. Its path is in /proc by default, where
        # other users cannot read it. If this process is a rank, the file has a name of its own:
        # torch opens the path once more when Python frees the store, which may be after close(). A
        # path in /proc may lead to another file by then, and torch would write to that file.
        self._store_file = PrivateFile(is_named=is_rank)
        self._result_files: list[PrivateFile] = []  # of the ranks that return their results
        self._previous_handlers: dict[int, Any] = {}  # by signal
        # The signal with which a user asks for a report of what the ranks are doing.
        self._report_signal = report_signal()
        self._is_report_requested = False  # set by the handler, and reset by _collect()
        # Called with each hang report that a rank of this machine has printed.
        self.on_report: Callable[[str], object] = _ignore_report

    def __enter__(self) -> Self:
        """Install signal handlers, which record signals instead of ending this process."""
        # Python lets only the main thread install handlers. In another thread, a signal ends this
        # process as usual.
        if threading.current_thread() is threading.main_thread():
            for number in (*ending_signals(), self._report_signal):
                if self._should_handle(number):
                    self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def _should_handle(self, number: int) -> bool:
        """Return whether the supervisor replaces the current handler of a signal."""
        handler = signal.getsignal(number)
        # `fabric run` installs this handler until there is a supervisor.
        if handler is ignore_request:
            return True
        # The handler was installed from C code, so Python could not restore it.
        if handler is None:
            return False
        # A signal that the shell or nohup ignores stays ignored. The exception is the signal of a
        # report: shells ignore SIGQUIT for "&" jobs only because the keyboard sends it.
        if handler is signal.SIG_IGN:
            return number == self._report_signal
        # A handler of the user stays only for a signal whose meaning programs choose.
        return number in _STANDARD_SIGNALS or handler is signal.SIG_DFL

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Kill the ranks that still run, wait until they are gone, and close all files."""
        for rank in self.ranks:
            rank.kill()
        self.collect_until(REAP_TIMEOUT)
        for rank in self.ranks:
            rank.control.close()
            rank.stack_file.close()
        for file in self._result_files:
            file.close()
        self._store_file.close()

    def start(
        self,
        start_process: StartProcess,
        worlds: Sequence[World],
        payload: Payload | None,
        results: str = "none",
        variables: Mapping[str, str] = {},
        *,
        runs_script: bool = False,
    ) -> None:
        """Start ranks, and append them to ``ranks`` in the order of ``worlds``.

        If a process cannot be started, the error is passed on, and :meth:`close` ends the ranks
        that have been started before.

        Args:
            start_process: starts the process of one rank.
            worlds: the place of each rank. A world without a port gets a store of this supervisor,
                through which the ranks find each other.
            payload: the work, which is sent to the ranks. None if the ranks share the memory of
                this process and have the work already.
            results: which ranks send back their results, as in
                :class:`~fabric.launchers.LaunchSpec`.
            variables: variables for the environment of the ranks. They are added to those of
                :meth:`World.to_env` and of :func:`rank_variables`.
            runs_script: whether the ranks run a script. A rank that runs a function fails if it
                exits before it returns.
        """
        started_ranks: list[RankProcess] = []
        for world in worlds:
            config, stack_file = self.configure_rank(
                world, results, user_variables=variables, runs_script=runs_script
            )
            rank = self._start_rank(start_process, config, stack_file)
            started_ranks.append(rank)
        # Sent after all processes have been started: if the payload exceeds the capacity of the
        # pipe, send_payload() waits until the rank reads it, which a new rank does late.
        if payload is not None:
            for rank in started_ranks:
                rank.send_payload(payload)

    def configure_rank(
        self,
        world: World,
        results: str,
        *,
        user_variables: Mapping[str, str] = {},
        runs_script: bool = False,
    ) -> tuple[RankConfig, PrivateFile]:
        """Return the configuration of a rank, and the new file for its stack traces.

        The caller makes a RankProcess of both and appends it to ``ranks``, so that :meth:`close`
        closes the file.

        Args:
            world: the place of the rank.
            results: which ranks send back their results: ``"all"``, ``"first"`` (only rank 0) or
                ``"none"``.
            user_variables: variables for the environment of the rank. They replace variables of
                fabric.
            runs_script: whether the rank runs a script.
        """
        returns_result = results == "all" or (results == "first" and world.rank == 0)
        if world.port is None:
            # The ranks of one machine have no port, and find each other through a file.
            world = replace(world, store=f"file://{self._store_file.path}")
        rank_environment = {
            **world.to_env(),
            **rank_variables(os.environ, world, available_cores(), sys.platform),
            **user_variables,
        }
        # The variable may be a list, such as "4,2", with a number for each level of nesting. The
        # first number is for the outermost level.
        threads, _, _ = rank_environment["OMP_NUM_THREADS"].partition(",")
        result_file = None  # a rank without this file sends back no result
        if returns_result:
            file = PrivateFile()
            self._result_files.append(file)  # for close(), which closes the file
            result_file = file.path
        stack_file = PrivateFile()
        config = RankConfig(
            world=world,
            variables=rank_environment,
            threads=int(threads),
            stack_file=stack_file.path,
            runs_script=runs_script,
            result_file=result_file,
        )
        return config, stack_file

    def _start_rank(
        self, start_process: StartProcess, config: RankConfig, stack_file: PrivateFile
    ) -> RankProcess:
        """Start the process of a rank, append the rank to ``ranks``, and return it.

        Args:
            start_process: starts the process.
            config: the configuration of the rank.
            stack_file: the open file whose path is ``config.stack_file``.
        """
        control, rank_control = multiprocessing.Pipe()
        # On Ctrl-C a process that is still starting would print a long traceback. So SIGINT is
        # blocked here, and the new process inherits the block. When the rank is ready,
        # raise_on_signals() in rank.py unblocks SIGINT, and the rank then gets the signal.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Closes this process's copy of the rank's end. Otherwise the pipe would stay open when
            # the rank ends, and receive() would not notice.
            with rank_control:
                process = start_process(rank_control, config)
        except BaseException:
            control.close()
            stack_file.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        rank = RankProcess(config=config, process=process, control=control, stack_file=stack_file)
        self.ranks.append(rank)
        return rank

    def wait_for_ranks(self, should_end: Callable[[], bool] = never) -> list[bytes]:
        """Wait until all ranks have ended. End all ranks if one fails or a signal arrives.

        Ranks that are ended early get time for their ``finally`` blocks.

        Args:
            should_end: returns whether to end the ranks early, for example because ranks of another
                machine have failed.

        Returns:
            The pickled result of each rank, in the order in which they were started. A result is
            empty if the rank was ended early. The tensors of the results are in files that
            :meth:`close` removes, so load the results before.

        Raises:
            RankFailedError: a rank failed.
            KeyboardInterrupt: a signal arrived that ends a job, see ``signals``.
            SystemExit: the job was preempted: all ranks have ended, at least one of them with
                :data:`PREEMPTED`.
        """
        have_all_ended = False
        while not have_all_ended:
            have_all_ended = self._collect(_POLL_INTERVAL)
            # Signals come first: a rank that Ctrl-C in the terminal has ended is no failure.
            if self.signals:
                # Raises KeyboardInterrupt, unless the signal only told the ranks to save.
                self._handle_signal()
            if any(rank.has_failed() for rank in self.ranks):
                self._end_failed_job()  # always raises
            if not have_all_ended and should_end():
                self._end_ranks(signal.SIGTERM, END_GRACE)
                return [b"" for _ in self.ranks]
        if any(rank.exit_code == PREEMPTED for rank in self.ranks):
            raise SystemExit(PREEMPTED)
        return [rank.messages.get("finished", b"") for rank in self.ranks]

    def raise_if_signaled(self) -> None:
        """Raise if a signal that ends a job has arrived.

        A caller that starts ranks and does not wait for them calls this method in between.

        Raises:
            KeyboardInterrupt: a signal has arrived, see ``signals``.
        """
        if self.signals:
            raise KeyboardInterrupt

    def collect_until(self, timeout: float, is_done: Callable[[], object] = never) -> None:
        """Collect messages and exit codes until all ranks have ended.

        Args:
            timeout: how long to wait at most, in seconds. 0 only reads the messages that have
                arrived.
            is_done: returns whether to stop waiting.
        """
        deadline = monotonic() + timeout
        wait_time = 0.0  # first, the messages that have arrived already are read
        while True:
            have_all_ended = self._collect(wait_time)
            time_left = deadline - monotonic()
            if have_all_ended or is_done() or time_left <= 0:
                return
            wait_time = min(_POLL_INTERVAL, time_left)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. The interpreter calls this handler in the main thread."""
        if number == self._report_signal:
            self._is_report_requested = True
        else:
            self.record_signal(number)

    def record_signal(self, number: int) -> None:
        """Record a signal that ends a job, on which the loops that wait for the ranks act."""
        self.signals.append(ReceivedSignal(number, monotonic()))

    def _handle_signal(self) -> None:
        """Pass the first recorded signal on to the ranks, and end the job unless it is a warning.

        A rank that asks ``fabric.should_stop`` saves a checkpoint on a signal, and then exits with
        :data:`PREEMPTED`. This method returns if the signal was only a warning for such ranks, or
        if all ranks have exited in this way.

        Raises:
            KeyboardInterrupt: the ranks have been ended, and not all of them were preempted.
        """
        number = self.signals[0].number
        # The ranks that ask fabric.should_stop. They have sent "saving".
        saving_ranks = [rank for rank in self.ranks if "saving" in rank.messages]
        if saving_ranks and number not in _STANDARD_SIGNALS:
            # The signal is a scheduler's warning, for example SIGUSR1. The scheduler itself ends
            # the job when the time to save is over. So this method forgets the signal and returns.
            self.signals.pop(0)
            for rank in saving_ranks:
                rank.kill(number)
            return
        grace = INTERRUPT_GRACE
        if saving_ranks and number != signal.SIGINT:  # should_stop does not note Ctrl-C
            grace = SAVE_GRACE
        self._end_ranks(number, grace, self._has_second_signal)
        if any(rank.exit_code != PREEMPTED for rank in self.ranks):
            raise KeyboardInterrupt

    def _has_second_signal(self) -> bool:
        """Return whether another signal has arrived well after the first one.

        If so, the user does not want to wait for the ranks any longer. A signal that follows the
        first one at once does not count, since ``timeout`` and other programs send each signal
        twice.
        """
        return self.signals[-1].time - self.signals[0].time > REPEAT_WINDOW

    def _running_ranks(self) -> list[RankProcess]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if not rank.poll()]

    def _collect(self, timeout: float) -> bool:
        """Wait until a rank sends a message or ends, and update ``ranks``.

        Every wait for ranks calls this method repeatedly, so it also passes on requests of the user
        for a report.

        Args:
            timeout: how long to wait at most, in seconds.

        Returns:
            Whether all ranks have ended.
        """
        self._pass_on_report_request()
        controls: list[Connection] = []
        for rank in self.ranks:
            if not rank.control.closed:
                controls.append(rank.control)
            elif rank.exit_code is None:
                # The rank has closed its pipe and is about to end. wait() does not notice the end
                # of a process, so this call waits only 5 ms, and the next call polls again.
                timeout = min(timeout, 0.005)
        wait(controls, timeout)
        for rank in self.ranks:
            # poll() before receive(): if the rank has ended, all its messages are in the pipe, and
            # receive() reads the last one, too.
            rank.poll()
            rank.receive()
            # Removed from the messages, so that each report is shown once.
            report = rank.messages.pop("report", None)
            if report is not None:
                self.on_report(report)
        return all(rank.exit_code is not None for rank in self.ranks)

    def _pass_on_report_request(self) -> None:
        """Tell the ranks if the user has asked for a report of what the ranks are doing.

        The signal handler only sets a flag, since it may interrupt another message to a rank.
        """
        if not self._is_report_requested:
            return
        self._is_report_requested = False
        # The same in all ranks. A rank reports once for each new id.
        request_id = os.urandom(8).hex()
        for rank in self._running_ranks():
            rank.send("report", request_id)

    # [Note: The end of a failed job]
    # The first process to end is often a secondary failure: the rank that failed first is still in
    # its `finally` block. So the supervisor waits briefly for the errors of all ranks, asks the
    # remaining ranks which error they are handling, and only then names the root cause. Errors that
    # do not look like a lost connection come first. Among these errors, the cause is the earliest.
    def _end_failed_job(self) -> NoReturn:
        """Find the rank that has failed first, end the other ranks, and raise a RankFailedError.

        Raises:
            RankFailedError: always. It has the error of the rank that is most likely the root
                cause.
        """
        self._collect_errors()
        # The cause is determined before the ranks are ended. Otherwise a rank that SIGTERM has
        # ended would look like one that has failed.
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        has_lost_peer = any(failure.has_lost_peer for failure in failures)
        # A rank that finished normally is a cause only if another rank lost the connection to it.
        cause = min(self.ranks, key=lambda rank: rank.cause_order(has_lost_peer))
        error = self._error_for(cause, failures)
        for rank in self._running_ranks():
            # A rank that handles no signals would not run its ``finally`` blocks on SIGTERM either.
            if rank.cannot_respond():
                rank.kill()
        self._end_ranks(signal.SIGTERM, END_GRACE)
        raise error

    def _collect_errors(self) -> None:
        """Wait briefly for the errors of all ranks, as the first to arrive may not be the cause.

        Afterwards ``messages`` of each rank has the error that has ended its payload, or the error
        that its payload is handling, if the rank could tell.
        """
        self.collect_until(COLLECT_TIMEOUT, self._are_errors_complete)
        # The remaining ranks may still handle their errors, for example in a ``finally`` block.
        for rank in self._running_ranks():
            if not rank.is_exiting:
                rank.send("describe")
        self.collect_until(DESCRIBE_TIMEOUT, self._are_descriptions_complete)

    def _are_errors_complete(self) -> bool:
        """Return whether no rank will send another error, or a signal asks not to wait.

        A rank that is exiting has sent its error already.
        """
        if self.signals:
            return True
        return all(rank.is_exiting or rank.cannot_respond() for rank in self._running_ranks())

    def _are_descriptions_complete(self) -> bool:
        """Return whether no rank will still answer "describe", or a signal asks not to wait."""
        if self.signals:
            return True
        for rank in self._running_ranks():
            has_answered = "described" in rank.messages
            # A rank that is exiting does not answer.
            if not has_answered and not rank.is_exiting and not rank.cannot_respond():
                return False
        return True

    # [Note: Unresponsive ranks]
    # A rank handles a signal in Python code. If it waits for another rank in C++ code, it handles
    # the signal only after the other rank makes the same call or ends. So the supervisor waits as
    # long as some rank has acted on the signal, has just ended, or uses the CPU. Otherwise the
    # ranks wait for each other and will not run their `finally` blocks.
    def _end_ranks(
        self, signal_number: int, grace: float, should_stop: Callable[[], object] = never
    ) -> None:
        """Send a signal to the ranks, and wait until they have ended.

        The ranks run their ``finally`` blocks on the signal. The wait stops early if no rank
        responds to the signal. Later, :meth:`close` kills the ranks that still run.

        Args:
            signal_number: the signal to send.
            grace: how long to wait at most, in seconds.
            should_stop: returns whether to stop waiting.
        """
        for rank in self.ranks:
            # A signal to a rank that is exiting would only replace its exit code.
            if rank.is_exiting:
                continue
            is_ready = "ready" in rank.messages
            if is_ready:
                rank.kill(signal_number)
            else:
                # A rank that is still starting blocks SIGINT, and has no ``finally`` block to run.
                rank.kill(signal.SIGKILL)
        deadline = monotonic() + grace
        while not should_stop():
            seconds_left = deadline - monotonic()
            if not self._running_ranks() or seconds_left <= 0:
                return
            will_end = self._wait_for_response(min(RESPONSE_TIME, seconds_left), should_stop)
            if not will_end:
                return

    # See [Note: Unresponsive ranks].
    def _wait_for_response(self, timeout: float, should_stop: Callable[[], object]) -> bool:
        """Wait, and return whether the running ranks may still end by themselves after a signal.

        This is so if a rank has noticed the signal, has ended during the wait, or uses the CPU.
        Otherwise all of them wait for each other in C++ code, where no signal is handled.

        Args:
            timeout: how long to wait, in seconds.
            should_stop: returns whether to stop waiting.
        """
        ranks = self._running_ranks()
        cpu_before = processor_seconds(ranks)
        self.collect_until(timeout, should_stop)
        cpu_after = processor_seconds(ranks)
        # None means that the main thread of a rank is running, or that its state is unknown.
        if cpu_before is None or cpu_after is None:
            return True
        max_seconds_of_idle_ranks = _IDLE_LOAD * timeout
        is_busy = cpu_after - cpu_before >= max_seconds_of_idle_ranks
        has_rank_ended = self._running_ranks() != ranks
        return is_busy or has_rank_ended or _has_responded(ranks)

    def _error_for(self, cause: RankProcess, failures: Sequence[Failure]) -> RankFailedError:
        """Return the error for the rank that has most likely ended the job.

        Args:
            cause: the rank.
            failures: the errors that all ranks have sent.
        """
        exit_code = cause.final_exit_code()
        outcome = describe_exit(exit_code)
        title = f"rank {cause.global_rank} of {cause.config.world.world_size}"
        if exit_code == 0:
            # A rank that has left early has no error. The earliest error of another rank shows
            # where this rank was missed.
            text = _first_consequence(failures, cause=f"{title} {outcome}")
        elif cause.failure is not None:
            text = cause.failure.text
        else:
            text = cause.read_stack()
        # A rank whose payload raises an exception exits with 1.
        has_raised = exit_code == 1 and text != ""
        if has_raised:
            outcome = "failed (exit code 1)"
        return RankFailedError(
            f"{title} {outcome}",
            rank=cause.global_rank,
            exit_code=exit_code,
            traceback=text,
            problem="\n".join(self._hints(exit_code)),
        )

    def _hints(self, exit_code: int) -> list[str]:
        """Return lines for the error text that may explain the exit code of the failed rank."""
        if exit_code == 0:
            return []  # the rank has left early, which the error text says already
        hints: list[str] = []
        if exit_code == -signal.SIGABRT:
            # C++ code often aborts because another rank made a different call. The table shows it.
            hints.append(self._last_calls())
        torch_version_note = untested_torch()  # "" for a version of torch that fabric was tested on
        if torch_version_note:
            hints.append(torch_version_note)
        return hints

    def _last_calls(self) -> str:
        """Return where the first ranks were last in user code, as a table for an error text."""
        lines = ["where each rank was:"]
        for rank in self.ranks[:_MAX_LAST_CALLS]:
            lines.append(f"    rank {rank.global_rank}: {rank.last_call()}")
        return "\n".join(lines)


def _has_responded(ranks: Sequence[RankProcess]) -> bool:
    """Return whether any of the ranks has noticed a signal, or is exiting."""
    return any("signal" in rank.messages or rank.is_exiting for rank in ranks)


def processor_seconds(ranks: Sequence[RankProcess]) -> float | None:
    """Return the CPU time that all ranks have used, in seconds.

    By two such times a caller sees whether the ranks have computed in between. The result is None
    if the main thread of a rank does not sleep, so that the rank certainly computes, or if a time
    is unknown.
    """
    total = 0.0
    for rank in ranks:
        seconds = rank.processor_seconds()
        if seconds is None:
            return None
        total += seconds
    return total


def _first_consequence(failures: Sequence[Failure], cause: str) -> str:
    """Return the text of the earliest error, followed by its cause.

    Args:
        failures: the errors of the ranks. The first of them has missed the rank that has left.
        cause: a sentence on the rank that has left without an error.

    Returns:
        The text. Empty if there is no error, or if the earliest is ``sys.exit(number)``, which has
        no text.
    """
    if not failures:
        return ""
    first_failure = min(failures, key=lambda failure: failure.time)
    if not first_failure.text:
        return ""
    # The cause comes last, since most people read the last line first.
    return f"{first_failure.text.rstrip()}\n\nThe cause of this error: {cause}"


def rank_variables(
    environ: Mapping[str, str], world: World, cores: int, platform: str
) -> dict[str, str]:
    """Return the environment variables that a rank needs besides those of :meth:`World.to_env`.

    A variable that the user has set to a non-empty value keeps this value.

    Args:
        environ: the environment of the launching process.
        world: the place of the rank.
        cores: the number of cores that the ranks of this machine share.
        platform: as in ``sys.platform``.
    """
    # Without a limit every rank would use all cores and slow down the others. torchrun sets one
    # thread instead, and warns.
    variables = {"OMP_NUM_THREADS": str(max(1, cores // world.local_world_size))}
    if world.port is None:
        # All ranks are on this machine. Without this variable, gloo would listen on the address
        # that the host name resolves to.
        loopback = "lo0" if platform == "darwin" else "lo"
        variables["GLOO_SOCKET_IFNAME"] = loopback
    for name in variables:
        user_value = environ.get(name, "")
        if user_value != "":
            variables[name] = user_value
    return variables


def exit_status(code: int) -> int:
    """Return the exit code of the launching process after a rank has failed with ``code``.

    The code -n of a rank that signal n has killed becomes 128 + n, as in a shell. The code 0 of a
    rank that has left early becomes 1, since the job has failed.
    """
    if code < 0:
        return 128 - code
    if code == 0:
        return 1
    return code


# Usual reasons for a rank's end by a signal.
_HINTS: dict[int, str] = {
    signal.SIGKILL: ": fabric did not kill it; the system kills this way when memory runs out",
    signal.SIGABRT: ": C++ code aborted, as when ranks make different calls. The reason is on "
    "standard error, often after what(). FABRIC_CHECK=1 compares calls of fabric's collectives, "
    "and not those of torch.distributed",
}


def describe_exit(code: int, *, is_killed_by_fabric: bool = False) -> str:
    """Return how a rank ended and the usual reason, to follow the rank's name in a sentence.

    Args:
        code: the exit code of the rank. It is -n if signal n has killed the rank.
        is_killed_by_fabric: whether the supervisor has killed the rank. Then no usual reason is
            given. Default: False.
    """
    if code == 0:
        return (
            "exited with exit code 0: it ended early, without an error, while the other ranks "
            "still needed it"
        )
    if code > 0:
        return f"exited with exit code {code}"
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = ""
    if not is_killed_by_fabric:
        hint = _HINTS.get(number, "")
    return f"was killed by {name} (exit code {code}){hint}"
