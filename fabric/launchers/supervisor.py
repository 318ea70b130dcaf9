"""The supervisor of a job: starts its ranks, waits for them, and ends them when one fails.

[Note: The end of a failed job] The first process to end is often a secondary failure: the rank
that failed first is still in its ``finally`` block. So the supervisor waits briefly for the errors
of all ranks, asks the remaining ranks which error they are handling, and only then names the root
cause. Errors that do not look like a lost connection come first. Among them, the earliest is the
cause.

[Note: Unresponsive ranks] A rank handles a signal in Python code. If it waits for another rank in
C++ code, it handles the signal only after the other rank makes the same call or ends. So the
supervisor waits as long as some rank has acted on the signal, has just ended, or uses the CPU.
Otherwise the ranks wait for each other and will not run their ``finally`` blocks.
"""

import linecache
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

from fabric.errors import RankFailedError
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
    "Supervisor",
    "describe_exit",
    "exit_status",
    "rank_variables",
]


class StartedProcess(NamedTuple):
    """A process that has been started.

    Attributes:
        pid: the process id.
        poll: returns the exit code: negative for a signal, None while the process runs.
    """

    pid: int
    poll: Callable[[], int | None]


StartProcess = Callable[[Connection, RankConfig], StartedProcess]
"""Starts a process and passes it its end of the control pipe."""

# All times are in seconds. After a fault, a user must wait less than five seconds in total. A test
# checks this.
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
# The share of a core that an idle rank uses: the threads of fabric and of gloo poll now and then.
_IDLE_LOAD = 0.05
# The number of ranks whose last call an error shows.
_MAX_LAST_CALLS = 16
# A frame of user code. The innermost frame is the last in a traceback, and the first in a stack of
# faulthandler, whose lines do not continue with a comma.
_LIBRARIES = rf'<|{re.escape(str(Path(__file__).parents[1]))}/|[^"]*-packages/torch/'
_FRAME = re.compile(rf'File "(?!{_LIBRARIES})(?P<file>.+?)", line (?P<line>\d+)(?P<comma>,?)')


def _open_standard_streams() -> None:
    """Open the standard streams that are closed.

    Otherwise the next open files would get the numbers of closed streams, and ranks would print to
    these files.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _never() -> bool:
    return False


class _PrivateFile:
    """A file that other users cannot open, and that disappears with this process, even if killed.

    Attributes:
        path: the path that processes of the same user open.
    """

    def __init__(self) -> None:
        self._file = self._open()
        if sys.platform == "linux":
            # The process id as this /proc has it, which may belong to an outer namespace.
            self.path = f"/proc/{os.readlink('/proc/self')}/fd/{self._file.fileno()}"
        else:
            self.path = self._file.name

    def _open(self) -> Any:
        """Return a new open file.

        On Linux it has no name, and its path is in /proc/<pid>/fd, which other users cannot read.
        """
        if sys.platform != "linux":
            return tempfile.NamedTemporaryFile(prefix="fabric-")
        if hasattr(os, "memfd_create"):
            return open(os.memfd_create("fabric"), "rb")
        # The interpreter was built for an older C library, as some of conda's are.
        return tempfile.TemporaryFile()

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()


@dataclass(kw_only=True)
class RankProcess:
    """One rank, as its supervisor sees it.

    Attributes:
        config: the configuration of the rank.
        process: the process of the rank.
        control: the supervisor's end of the control pipe; see ``[Note: Control pipe]`` in rank.py.
        stack: the file with the stack of a fatal signal.
        messages: the content of the latest message of each kind.
        exit_code: the exit code of the rank, once it has ended.
        end_time: when the end was noticed, on the monotonic clock.
    """

    config: RankConfig
    process: StartedProcess
    control: Connection
    stack: _PrivateFile
    messages: dict[MessageKind, Any] = field(default_factory=dict)
    exit_code: int | None = None
    end_time: float = 0.0

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.config.world.rank

    @property
    def failure(self) -> Failure | None:
        """The error of the rank, if it has sent one."""
        return self.messages.get("error") or self.messages.get("described")

    @property
    def is_exiting(self) -> bool:
        """Whether the payload has returned or failed."""
        return "finished" in self.messages or "error" in self.messages

    def poll(self) -> bool:
        """Return whether the rank has ended."""
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
        return "finished" not in self.messages and not self.config.runs_script

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the rank has ended."""
        if not self.poll():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def send(self, kind: MessageKind, content: Any = None) -> None:
        """Send a message. :meth:`poll` finds a rank that has died."""
        with suppress(OSError):
            self.control.send(Message(kind, content))

    def send_payload(self, payload: Payload) -> None:
        """Send the configuration and the payload, which the rank reads before any message."""
        with suppress(OSError):
            self.control.send((self.config, payload))

    def receive(self) -> None:
        """Read the messages that have arrived."""
        try:
            while not self.control.closed and self.control.poll():
                message: Message = self.control.recv()
                self.messages[message.kind] = message.content
        except (EOFError, OSError):
            self.control.close()

    def read_stack(self) -> str:
        """Return the stack of the thread that failed, as the rank has written it.

        If the thread that failed is not a Python thread, the stack is that of the main thread.
        """
        text = Path(self.stack.path).read_text(errors="replace")
        stacks, _, _ = text.partition("\n\nExtension")
        reason, *threads = stacks.split("\n\n")
        failed_threads = [thread for thread in threads if thread.startswith("Current")]
        return "\n\n".join([reason, *(failed_threads or threads[-1:])])

    def last_call(self) -> str:
        """Return the innermost line of user code in the error or stack, as a line of a table."""
        if self.failure is not None:
            text = self.failure.text
        else:
            text = self.messages.get("stack") or self.read_stack()
        frames = list(_FRAME.finditer(text))
        if frames:
            is_traceback = frames[0]["comma"] != ""
            frame = frames[-1] if is_traceback else frames[0]
            code = linecache.getline(frame["file"], int(frame["line"])).strip()
            call = f"{frame['file']}:{frame['line']}: {code}"
        elif "finished" in self.messages:
            call = "it had finished"
        else:
            call = "unknown"
        return f"\n    rank {self.rank}: {call}"

    def processor_seconds(self) -> float:
        """Return the CPU time of all threads of the process, in seconds.

        The result is NaN if the time is unknown, or if the main thread is not sleeping.
        """
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:  # the process has ended, or this is not Linux
            return math.nan
        # The name of the program, in parentheses, may contain spaces.
        _, _, after_name = stat.rpartition(")")
        state, *fields = after_name.split()
        if state != "S":
            return math.nan
        user_ticks = int(fields[10])
        system_ticks = int(fields[11])
        return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")

    def cause_order(self, peer_lost: bool) -> tuple[int, float, int]:
        """Return a sort key that puts the root cause first.

        Args:
            peer_lost: whether a rank reports that it has lost another rank.

        Returns:
            How unlikely the rank is to be the cause, from 0; when it failed; and its rank.
        """
        failure = self.failure
        if failure is not None:
            if failure.secondary:
                unlikeliness = 3
            elif "error" in self.messages:
                unlikeliness = 0
            else:
                unlikeliness = 1  # the rank is handling this error, and may recover from it
            return unlikeliness, failure.time, self.rank

        if "finished" in self.messages:
            # A rank that has finished did so too early only if another rank has lost a peer.
            has_left_early = peer_lost
        else:
            has_left_early = self.exit_code == 0
        if has_left_early:
            unlikeliness = 2
        elif self.exit_code in (None, 0, PREEMPTED):
            unlikeliness = 4
        else:
            unlikeliness = 0
        return unlikeliness, self.end_time, self.rank


class ReceivedSignal(NamedTuple):
    """A signal that has arrived.

    Attributes:
        number: the number of the signal.
        time: when it arrived, on the monotonic clock.
    """

    number: int
    time: float


class Supervisor:
    """The ranks of one job on this machine. Leaving the ``with`` block kills ranks that still run.

    Attributes:
        ranks: the ranks that have been started.
        signals: the job-ending signals that have arrived since the block was entered.
    """

    def __init__(self) -> None:
        _open_standard_streams()
        self.ranks: list[RankProcess] = []
        self.signals: list[ReceivedSignal] = []
        self._store = _PrivateFile()
        self._handlers: dict[int, Any] = {}
        self._report_signal = signal.SIGUSR1
        if signal.SIGUSR1 in ending_signals():  # users of SLURM have it send SIGUSR1
            self._report_signal = signal.SIGQUIT
        self._is_report_requested = False

    def __enter__(self) -> Self:
        # Only the main thread may install handlers. In another thread the signals keep theirs.
        if threading.current_thread() is threading.main_thread():
            for number in (*ending_signals(), self._report_signal):
                if self._should_handle(number):
                    self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def _should_handle(self, number: int) -> bool:
        """Return whether the supervisor handles a signal, rather than the handler of now."""
        handler = signal.getsignal(number)
        if handler is None:  # installed from C: it could not be restored
            return False
        if handler is signal.SIG_IGN:
            # An ignored signal stays ignored, as the shell or nohup wants. The shell also ignores
            # SIGQUIT for all "&" jobs, but only because of the keyboard.
            return number == self._report_signal
        return number in _STANDARD_SIGNALS or handler is signal.SIG_DFL

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Kill the ranks that still run, and wait until they are gone."""
        for rank in self.ranks:
            rank.kill()
        self.collect_until(REAP_TIMEOUT)
        for rank in self.ranks:
            rank.control.close()
            rank.stack.close()
        self._store.close()

    def start(
        self,
        start: StartProcess,
        worlds: Sequence[World],
        payload: Payload | None,
        results: str = "none",
        variables: Mapping[str, str] = {},
        *,
        runs_script: bool = False,
    ) -> None:
        """Start the ranks.

        Args:
            start: starts a process.
            worlds: the place of each rank. In a job of one machine the store is added.
            payload: the work, which is sent to the ranks. None if the ranks share the memory of
                this process.
            results: which ranks send back their results, as in
                :class:`~fabric.launchers.LaunchSpec`.
            variables: variables for the environment of the ranks, besides their place and
                :func:`rank_variables`.
            runs_script: whether the ranks run a script. A rank that runs a function fails if it
                exits before it returns.
        """
        for world in worlds:
            self._start_rank(start, world, results, variables, runs_script)
        if payload is not None:
            for rank in self.ranks:
                rank.send_payload(payload)

    def _start_rank(
        self,
        start: StartProcess,
        world: World,
        results: str,
        variables: Mapping[str, str],
        runs_script: bool,
    ) -> None:
        if world.port is None:
            world = replace(world, store=f"file://{self._store.path}")
        rank_environment = {
            **world.to_env(),
            **rank_variables(os.environ, world, available_cores(), sys.platform),
            **variables,
        }
        # OpenMP allows a list, one number per level of nesting.
        threads, _, _ = rank_environment["OMP_NUM_THREADS"].partition(",")
        stack = _PrivateFile()
        config = RankConfig(
            world=world,
            variables=rank_environment,
            threads=int(threads),
            stack_file=stack.path,
            runs_script=runs_script,
            returns=results == "all" or (results == "first" and world.rank == 0),
        )
        control, rank_control = multiprocessing.Pipe()
        # On Ctrl-C a process that is still starting would print a long traceback. Blocked signals
        # are inherited, and are delivered when the rank unblocks them.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with rank_control:
                process = start(rank_control, config)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        rank = RankProcess(config=config, process=process, control=control, stack=stack)
        self.ranks.append(rank)

    def run(self) -> list[bytes]:
        """Wait for all ranks.

        Returns:
            The pickled result of each rank, in the order in which they were started.

        Raises:
            RankFailedError: a rank failed. The other ranks have had a grace period.
            KeyboardInterrupt: a job-ending signal arrived, see ``signals``. The ranks have had a
                grace period.
            SystemExit: the job was preempted: all ranks have ended, at least one of them with
                :data:`PREEMPTED`.
        """
        have_ended = False
        while not have_ended:
            have_ended = self._collect(_POLL_INTERVAL)
            if self.signals:
                self._handle_signal()
            if any(rank.has_failed() for rank in self.ranks):
                self._end_failed_job()
        if any(rank.exit_code == PREEMPTED for rank in self.ranks):
            raise SystemExit(PREEMPTED)
        return [rank.messages.get("finished", b"") for rank in self.ranks]

    def collect_until(self, seconds: float, done: Callable[[], object] = _never) -> None:
        """Collect messages and exit codes until all ranks have ended.

        Args:
            seconds: how long to wait at most.
            done: a condition that ends the wait earlier.
        """
        deadline = monotonic() + seconds
        while True:
            timeout = min(_POLL_INTERVAL, max(0.0, deadline - monotonic()))
            have_ended = self._collect(timeout)
            if have_ended or done() or monotonic() >= deadline:
                return

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == self._report_signal:
            self._is_report_requested = True
        else:
            self.signals.append(ReceivedSignal(number, monotonic()))

    def _handle_signal(self) -> None:
        """Pass the first signal on to the ranks, and end the job unless the ranks save on it.

        Raises:
            KeyboardInterrupt: the ranks have ended, unless all of them were preempted.
        """
        number = self.signals[0].number
        saving_ranks = [rank for rank in self.ranks if "saving" in rank.messages]
        if saving_ranks and number not in _STANDARD_SIGNALS:
            # A scheduler sent it, and will end the job itself when the time to save is over.
            self.signals.pop(0)
            for rank in saving_ranks:
                rank.kill(number)
            return
        grace = INTERRUPT_GRACE
        if saving_ranks and number != signal.SIGINT:
            grace = SAVE_GRACE
        self._end(number, grace, self._is_signal_followed)
        if any(rank.exit_code != PREEMPTED for rank in self.ranks):
            raise KeyboardInterrupt

    def _is_signal_followed(self) -> bool:
        """Return whether a second signal has arrived that does not just repeat the first one."""
        return self.signals[-1].time - self.signals[0].time > REPEAT_WINDOW

    def _alive(self) -> list[RankProcess]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if not rank.poll()]

    def _collect(self, timeout: float) -> bool:
        """Wait for messages or an exit. Return whether all ranks have ended.

        Args:
            timeout: how long to wait at most, in seconds.
        """
        if self._is_report_requested:
            self._is_report_requested = False
            request = os.urandom(8).hex()
            for rank in self._alive():
                rank.send("report", request)
        controls = [rank.control for rank in self.ranks if not rank.control.closed]
        if not controls:
            timeout = min(timeout, 0.005)  # nothing will end this wait early
        wait(controls, timeout)
        for rank in self.ranks:
            # In this order: once a rank has ended, all its messages are in the pipe.
            rank.poll()
            rank.receive()
        return all(rank.exit_code is not None for rank in self.ranks)

    def _end_failed_job(self) -> NoReturn:
        """End the other ranks and raise the root cause. See ``[Note: The end of a failed job]``."""
        self.collect_until(COLLECT_TIMEOUT, self._are_errors_complete)
        for rank in self._alive():
            rank.send("describe")
        self.collect_until(DESCRIBE_TIMEOUT, self._are_descriptions_complete)
        error = self._root_cause()
        self._end(signal.SIGTERM, END_GRACE)
        raise error

    def _are_errors_complete(self) -> bool:
        """Return whether all ranks are ending, or a signal asks not to wait for them."""
        return bool(self.signals) or all(rank.is_exiting for rank in self._alive())

    def _are_descriptions_complete(self) -> bool:
        """Return whether all ranks have described their errors, or a signal asks not to wait."""
        return bool(self.signals) or all("described" in rank.messages for rank in self._alive())

    def _end(self, number: int, grace: float, stop: Callable[[], object] = _never) -> None:
        """Signal the ranks to end, and wait. :meth:`close` kills the ranks that remain.

        The wait stops early if the ranks do not respond; see ``[Note: Unresponsive ranks]``.

        Args:
            number: the signal to send.
            grace: how long to wait at most, in seconds.
            stop: a condition that ends the wait earlier.
        """
        for rank in self.ranks:
            # A signal to a rank that is exiting would only replace its exit code.
            if rank.is_exiting:
                continue
            if "ready" in rank.messages:
                rank.kill(number)
            else:
                rank.kill()  # a rank that starts has no ``finally`` to run, and ignores Ctrl-C
        deadline = monotonic() + grace
        while not stop():
            ranks = self._alive()
            seconds_left = deadline - monotonic()
            if not ranks or seconds_left <= 0:
                return
            seconds_before = _processor_seconds(ranks)
            self.collect_until(min(RESPONSE_TIME, seconds_left), stop)
            seconds_used = _processor_seconds(ranks) - seconds_before
            is_responding = any("signal" in rank.messages or rank.is_exiting for rank in ranks)
            # The time may be NaN, which is not less than anything: then the wait goes on.
            is_idle = seconds_used < _IDLE_LOAD * RESPONSE_TIME
            if self._alive() == ranks and is_idle and not is_responding:
                return

    def _root_cause(self) -> RankFailedError:
        """Return the error of the rank that has ended the job."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        peer_lost = any(failure.peer_lost for failure in failures)
        rank = min(self.ranks, key=lambda rank: rank.cause_order(peer_lost))
        failure = rank.failure
        if rank.exit_code is not None:
            code = rank.exit_code
        elif failure is not None:
            code = failure.exit_code
        else:
            code = 0

        if code == 0:
            # The early exit raised no error: show the first error that it caused.
            text = _first_text(failures)
        elif failure is not None:
            text = failure.text
        else:
            text = rank.read_stack()
        if text and code == 1:
            end = "failed (exit code 1)"
        else:
            end = describe_exit(code)
        last_calls = ""
        if code == -signal.SIGABRT:
            # C++ code often aborts because another rank made a different call.
            calls = "".join(rank.last_call() for rank in self.ranks[:_MAX_LAST_CALLS])
            last_calls = f"where each rank was:{calls}"
        request = f"rank {rank.rank} of {rank.config.world.world_size} {end}"
        return RankFailedError(
            request, rank=rank.rank, exit_code=code, traceback=text, problem=last_calls
        )


def _processor_seconds(ranks: Sequence[RankProcess]) -> float:
    """Return the CPU time of all ranks, or NaN if the time of one is unknown."""
    return sum(rank.processor_seconds() for rank in ranks)


def _first_text(failures: Sequence[Failure]) -> str:
    """Return the text of the earliest failure, or an empty text."""
    if not failures:
        return ""
    return min(failures, key=lambda failure: failure.time).text


def rank_variables(
    environ: Mapping[str, str], world: World, cores: int, platform: str
) -> dict[str, str]:
    """Return the environment variables of a rank besides its place.

    Variables that the user has set keep their values.

    Args:
        environ: the environment of the launching process.
        world: the place of the rank.
        cores: the number of cores that the ranks of this machine share.
        platform: as in ``sys.platform``.
    """
    # torchrun sets one thread and warns. Without a limit every rank would use all cores and slow
    # down the others.
    variables = {"OMP_NUM_THREADS": str(max(1, cores // world.local_world_size))}
    if world.port is None:
        # gloo listens on the address that the host name resolves to, unless an interface is set.
        loopback = "lo0" if platform == "darwin" else "lo"
        variables["GLOO_SOCKET_IFNAME"] = loopback
    for name in variables:
        variables[name] = environ.get(name) or variables[name]
    return variables


def exit_status(code: int) -> int:
    """Return the exit code of the launching process for the exit code of a rank.

    The code is as a shell shows it: 128 + n for a rank that signal n has killed. It is never 0.
    """
    if code < 0:
        return 128 - code
    return code or 1


_HINTS: dict[int, str] = {
    signal.SIGKILL: (": fabric did not kill it; the system kills this way when memory runs out"),
    signal.SIGABRT: (
        ": C++ code aborted, as when ranks make different calls, which FABRIC_CHECK=1 compares"
    ),
}


def describe_exit(code: int) -> str:
    """Return how a rank ended and the usual reason, to follow the rank's name in a sentence."""
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
    return f"was killed by {name} (exit code {code}){_HINTS.get(number, '')}"
