"""Rank 0 in the process that calls ``launch``, where a person can debug it."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial

from fabric.errors import RankFailedError
from fabric.launchers.rank import Message, Outcome, Payload, call_payload, outcome_of_error
from fabric.launchers.supervisor import RankProcess, StartedProcess, Supervisor
from fabric.world import World

__all__ = ["CallingRank"]


# [Note: Rank 0 in the calling process]
# Under `LaunchSpec.runs_rank0_here`, the process that calls `launch` runs the function as rank 0,
# with its keyboard, its debugger and its notebook. The other ranks are processes as usual.
# Meanwhile the supervisor runs in a thread. To the supervisor, rank 0 is like the other ranks: it
# sends the same messages through a control pipe, and has an exit code. There are two differences:
#
# - A signal would end the calling process. So `StartedProcess.send_signal` of this rank interrupts
#   the function instead, as Ctrl-C does.
# - `launch` raises an exception of the function itself, with its frames, unless another rank is the
#   cause of the exception.
#
# The signal handlers stay those of the user, so that Ctrl-C reaches the function and its debugger.
# The supervisor learns of Ctrl-C from a pipe to which the interpreter writes, also while the
# function waits in C++ code for another rank. The supervisor then ends the other ranks, and with
# them this wait.
class CallingRank:
    """Rank 0 in this process.

    Args:
        supervisor: the supervisor of the job. It has no ranks yet, and installs no signal handlers.
        world: the place of this process in the job.
        results: which ranks send back their results, as in ``LaunchSpec``.
    """

    def __init__(self, supervisor: Supervisor, world: World, results: str) -> None:
        """Add this process to the ranks of the supervisor. :meth:`run` runs the function.

        Make this object before ``Supervisor.start()`` adds the other ranks, since :meth:`run` takes
        the first rank of the supervisor for this one.
        """
        self._supervisor = supervisor
        self._config, stack_file = supervisor.configure_rank(world, results)
        self._thread = threading.current_thread()  # it calls run(), too
        self._exit_code: int | None = None  # None while the function runs
        self._is_interrupted = False  # whether the supervisor has interrupted the function
        self._can_be_interrupted = False  # true while _call() runs the function
        # Guards _can_be_interrupted: the supervisor must not interrupt once the function has ended.
        self._interrupt_lock = threading.Lock()
        # As in any other rank, this end sends messages, and the supervisor's end receives them.
        supervisor_control, self._control = multiprocessing.Pipe()
        process = StartedProcess(
            pid=os.getpid(), poll=lambda: self._exit_code, send_signal=self._interrupt
        )
        rank = RankProcess(
            config=self._config, process=process, control=supervisor_control, stack_file=stack_file
        )
        supervisor.ranks.append(rank)

    def run(self, payload: Payload) -> list[bytes]:
        """Run the payload in this thread, while another thread supervises all ranks.

        Afterwards this process has its environment variables, settings of torch, random streams and
        current device again.

        Args:
            payload: the work of this rank.

        Returns:
            The pickled result of each rank, in the order of the ranks.

        Raises:
            RankFailedError: another rank is the cause of the end of the job.
            BaseException: the payload has raised it, or the user has pressed Ctrl-C.
        """
        error: BaseException | None = None
        pickled_result = b""
        with ThreadPoolExecutor(1, "fabric-supervisor") as executor, _signal_pipe() as signal_pipe:
            supervision = executor.submit(self._supervise, signal_pipe)
            try:
                try:
                    pickled_result = self._call(payload)
                except BaseException as payload_error:  # noqa: BLE001 (raised below)
                    error = payload_error
                self._end(error)
                # The supervisor records Ctrl-C and ends the other ranks, so the wait is short.
                while not supervision.done():
                    with suppress(KeyboardInterrupt):
                        wait([supervision])
            finally:
                # A Ctrl-C between the statements above may skip _end(), which sets the exit code.
                # Without an exit code, the supervisor would wait for this rank, and the `with`
                # block waits for the supervisor.
                if self._exit_code is None:
                    self._exit_code = 128 + signal.SIGINT
        self._control.close()
        try:
            error = self._choose_error(error, supervision)
            if error is not None:
                raise error
            # The first result is that of this rank. It is empty, since this rank has sent no result
            # to the supervisor.
            _, *results_of_others = supervision.result()
            return [pickled_result, *results_of_others]
        finally:
            # The traceback of the error refers to this frame. Without this line, the tensors of the
            # function would live until the next collection of garbage.
            del error

    def _choose_error(
        self, error: BaseException | None, supervision: "Future[list[bytes]]"
    ) -> BaseException | None:
        """Return the exception that :meth:`run` raises: that of this rank or of the supervisor.

        Args:
            error: the exception that the function has raised, or None.
            supervision: the result or the exception of the supervisor.

        Returns:
            The exception, with the traceback to show. None if all ranks have finished.
        """
        if error is not None and not self._is_consequence(error, supervision):
            return error
        supervisor_error = supervision.exception()
        if supervisor_error is None:
            return None
        if isinstance(supervisor_error, KeyboardInterrupt) and error is not None:
            # The frames of the function show what the user has interrupted. The cause is shown
            # first, as after "raise supervisor_error from error".
            supervisor_error.__cause__ = error
            return supervisor_error.with_traceback(error.__traceback__)
        # The frames of the supervisor's thread mean nothing to the user.
        return supervisor_error.with_traceback(None)

    def _call(self, payload: Payload) -> bytes:
        """Run the payload, and return its pickled result. The supervisor may interrupt the payload.

        Raises:
            KeyboardInterrupt: the supervisor or the user has interrupted the payload.
            BaseException: the payload has raised it.
        """
        self._control.send(Message("ready", None))
        try:
            with _keeping_process():
                # Python runs the handler of SIGINT in the main thread only.
                self._can_be_interrupted = self._thread is threading.main_thread()
                return call_payload(self._config, payload, has_keyboard=True)
        finally:
            with self._interrupt_lock:
                self._can_be_interrupted = False
            # The supervisor may have sent SIGINT just before this thread got the lock. In this call
            # the signal arrives and raises KeyboardInterrupt, which run() catches. Later it could
            # raise where nothing catches it.
            time.sleep(0)

    def _end(self, error: BaseException | None) -> None:
        """Tell the supervisor how the function has ended.

        Args:
            error: the exception that the function has raised, or None.
        """
        # The message has no result: run() returns the result itself. To send a large result, this
        # thread would have to wait until the supervisor has read it.
        outcome = Outcome(exit_code=0, message=Message("finished", b""))
        if error is not None:
            outcome = outcome_of_error(error, runs_script=False)
        if outcome.message is not None:
            self._control.send(outcome.message)
        # Set last: once all ranks have an exit code, the supervisor reads no more messages.
        self._exit_code = outcome.exit_code

    def _supervise(self, signal_pipe: int | None) -> list[bytes]:
        """Wait for all ranks, as :meth:`Supervisor.wait_for_ranks` does, in a thread.

        Args:
            signal_pipe: the descriptor from which the numbers of arrived signals are read, or None.
        """
        try:
            return self._supervisor.wait_for_ranks(partial(self._note_signals, signal_pipe))
        finally:
            # Without this, the function might wait forever for a rank that handles no signal.
            for rank in self._supervisor.ranks:
                rank.kill()

    def _note_signals(self, signal_pipe: int | None) -> bool:
        """Tell the supervisor of a Ctrl-C that this process has received.

        Args:
            signal_pipe: the descriptor from which the numbers of arrived signals are read, or None.

        Returns:
            False, as a condition that ends no wait. The supervisor itself ends the job on a signal.
        """
        if signal_pipe is not None:
            with suppress(BlockingIOError):  # no signal has arrived
                if signal.SIGINT in os.read(signal_pipe, 4096):
                    self._supervisor.record_signal(signal.SIGINT)
        return False

    def _interrupt(self, _process_id: int, number: int) -> None:
        """Interrupt the function in place of a signal. The supervisor calls this in its thread.

        The function is interrupted only once. After that it is in its ``finally`` blocks, or a
        person is at the prompt of a debugger.

        Args:
            _process_id: unused. A ``StartedProcess.send_signal`` gets the id of the process.
            number: the number of the signal.
        """
        # A Ctrl-C of the user has interrupted the function already.
        has_user_interrupted = bool(self._supervisor.signals)
        if number == signal.SIGKILL or has_user_interrupted or self._is_interrupted:
            return
        # If SIGINT has no handler in Python, it would not raise in the function. It would end this
        # process, or do nothing.
        if not callable(signal.getsignal(signal.SIGINT)):
            return
        with self._interrupt_lock:
            if self._can_be_interrupted:
                self._is_interrupted = True
                # The identifier of a thread that runs is not None: "or 0" is for the type checker.
                signal.pthread_kill(self._thread.ident or 0, signal.SIGINT)

    def _is_consequence(self, error: BaseException, supervision: "Future[list[bytes]]") -> bool:
        """Return whether another rank or Ctrl-C is the cause of the exception of this rank.

        Args:
            error: the exception that the function has raised.
            supervision: the result or the exception of the supervisor.
        """
        failure = supervision.exception()
        if isinstance(failure, KeyboardInterrupt):
            # Python drops the KeyboardInterrupt of a Ctrl-C that arrives in a __del__ method. The
            # function then fails when it loses the ranks that the supervisor has ended.
            return not isinstance(error, KeyboardInterrupt)
        if not isinstance(failure, RankFailedError) or failure.rank == 0:  # rank 0 is this rank
            return False
        if isinstance(error, KeyboardInterrupt):
            return self._is_interrupted  # or else the user has raised it
        # A rank of a lower kind is more likely the cause. If the kinds are equal, the exception of
        # this rank is better for the user, since it has its frames.
        ranks = self._supervisor.ranks  # in rank order, since all ranks are on this machine
        kind_of_other = ranks[failure.rank].cause_order(has_lost_peer=False).kind
        kind_of_this = ranks[0].cause_order(has_lost_peer=False).kind
        return kind_of_other < kind_of_this


@contextmanager
def _signal_pipe() -> Iterator[int | None]:
    """Have the interpreter write the number of each signal that arrives to a pipe.

    Yields:
        The end of the pipe to read from, which does not block. None if this is not the main thread,
        in which alone Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    reading_end, writing_end = os.pipe()
    os.set_blocking(reading_end, False)
    os.set_blocking(writing_end, False)  # set_wakeup_fd() requires this
    previous_end = signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
    try:
        yield reading_end
    finally:
        signal.set_wakeup_fd(previous_end)
        os.close(reading_end)
        os.close(writing_end)


@contextmanager
def _keeping_process() -> Iterator[None]:
    """Give this process its variables, settings and state of torch again after the block."""
    # Imported here: the processes of ranks import this file, and torch only if their call needs it.
    from fabric.launchers.global_state import keeping_state

    environment = dict(os.environ)
    breakpoint_hook = sys.breakpointhook
    # A notebook keeps the error of an earlier cell here. In a rank, it would be an error that ends
    # the process.
    last_error = getattr(sys, "last_value", None)
    if last_error is not None:
        del sys.last_value
    try:
        with keeping_state():
            yield
    finally:
        if last_error is not None:
            sys.last_value = last_error
        sys.breakpointhook = breakpoint_hook
        os.environ.clear()
        os.environ.update(environment)
