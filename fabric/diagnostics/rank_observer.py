"""What this rank is doing, as a hang report shows it."""

import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from time import monotonic

from fabric._torch import awaited_worker, is_compiling
from fabric.communicators.call_site import user_line
from fabric.diagnostics.rank_state import COMPILES, RankState
from fabric.diagnostics.recorder import STEP, Entry, FlightRecorder
from fabric.diagnostics.stacks import Stacks

__all__ = ["RankObserver"]

_MAX_IDLE_LOAD = 0.05  # the share of a core that a thread uses at most while it waits
# The innermost frame of a thread that waits for a collective of torch.
_TORCH_COLLECTIVE = re.compile(
    r'File "[^"]*/torch/('
    r"distributed/(distributed_c10d\.py|_functional_collectives\.py|fsdp/|tensor/)"
    r"|nn/parallel/distributed\.py|autograd/graph\.py|_ops\.py)"
)


class RankObserver:
    """Watches the flight recorder and the user's thread of this rank, and describes the rank.

    The *user's thread* is the one that trains and makes the calls. It creates this object. The
    thread that makes hang reports calls the methods.

    Args:
        recorder: the flight recorder of this process.
        size: the number of ranks.
        idle_threshold: after how many seconds without CPU time the user's thread counts as idle.
        is_asynchronous: whether the device runs collectives in the background. If so, a rank may
            wait for a collective anywhere, not only in a collective or phase.

    Attributes:
        stacks: reads the stack of the user's thread.
        unchanged_since: when the flight recorder changed last, or when the rank was seen to
            compile, on the monotonic clock.
    """

    def __init__(
        self, recorder: FlightRecorder, *, size: int, idle_threshold: float, is_asynchronous: bool
    ) -> None:
        """Watch the thread that calls this, which must be the user's thread."""
        self.stacks = Stacks(recorder.thread)
        self.unchanged_since = monotonic()
        self._recorder = recorder
        self._size = size  # the number of ranks
        # Seconds without CPU time after which this thread counts as idle.
        self._idle_threshold = idle_threshold
        # Whether the device runs collectives in the background. If so, this thread may wait for a
        # collective anywhere.
        self._is_asynchronous = is_asynchronous
        self._idle_timer = _IdleTimer()  # of this thread
        # The state of the flight recorder at the latest call of update(), which compares it.
        self._snapshot: object = None

    def update(self, now: float) -> bool:
        """Return whether the flight recorder has changed since the latest call of this method.

        Also notice whether the user's thread has used the CPU. Called several times a minute.

        Args:
            now: the monotonic time.
        """
        self._idle_timer.update(now)
        recorder = self._recorder
        # Copied, since other threads change the dict.
        threads_in_collectives = list(recorder.open_collectives)
        snapshot = (recorder.phase, sum(recorder.counts.values()), threads_in_collectives)
        if snapshot == self._snapshot:
            return False
        self._snapshot = snapshot
        self.unchanged_since = now  # the present wait of this rank cannot be older
        return True

    def seconds_waited(self, now: float) -> float:
        """Return for how many seconds this rank may have waited. Zero if it cannot be waiting.

        Args:
            now: the monotonic time.
        """
        is_inside = bool(self._recorder.phase or self._recorder.open_collectives)
        may_wait = is_inside or self._is_asynchronous
        if not may_wait:
            return 0.0
        return now - self.unchanged_since

    def state(self) -> RankState:
        """Return the state of this rank now."""
        recorder = self._recorder
        call = self._current_call()
        # Reports compare how many calls with this key each rank has started. It is the group of the
        # current call, else the name of the current phase, else the key that was counted last.
        if call is not None:
            key = call.group
        else:
            key = recorder.phase or recorder.latest_key
        latest = call or recorder.latest_collective
        # Empty members stand for all ranks, which keeps the state small. In a phase they are empty,
        # since all ranks have to start it.
        members: Sequence[int] = ()
        if latest is not None and latest.group == key and len(latest.members) < self._size:
            members = tuple(latest.members)
        history = f", {self._describe_step()}"
        if call is None:
            history += self._describe_latest()
        stack = self.stacks.dump()
        # Two ranks in one message make different calls: one sends, and the other receives. So the
        # calls of a message are not compared.
        compared_call = ""
        if call is not None and not call.is_message:
            compared_call = call.title
        return RankState(
            activity=self._describe_activity(call),
            history=history,
            is_inside=call is not None or bool(recorder.phase),
            seconds_waited=self.seconds_waited(monotonic()),
            key=key,
            members=members,
            counts=dict(recorder.counts),
            stack=stack,
            call=compared_call,
            awaited=self._awaited_ranks(stack),
            step=recorder.step,
            pid=recorder.process,
        )

    def _awaited_ranks(self, stack: str) -> Sequence[int] | None:
        """Return the ranks without which this rank cannot go on.

        Args:
            stack: the stack of the user's thread.

        Returns:
            The ranks. Empty if the rank waits for all ranks. None if it is not known to wait.
        """
        recorder = self._recorder
        # The user's thread goes on while the device runs a collective, so it may not wait.
        if self._is_asynchronous:
            return None
        open_collectives = dict(recorder.open_collectives)  # a copy, since other threads change it
        if open_collectives:
            return self._awaited_in_collective(open_collectives)
        if not recorder.phase or not recorder.phases_need_all_ranks:
            return None
        # In a phase the rank may also compute. It waits for all ranks if it is in a collective of
        # torch and uses no CPU time.
        idle_seconds = monotonic() - self._idle_timer.idle_since
        is_idle = idle_seconds > self._idle_threshold
        is_in_torch_collective = _TORCH_COLLECTIVE.match(stack) is not None
        if is_idle and is_in_torch_collective:
            return ()
        return None

    def _awaited_in_collective(self, open_collectives: Mapping[int, Entry]) -> Sequence[int] | None:
        """Return the ranks without which this rank cannot leave its collective.

        Args:
            open_collectives: the collective that each thread is in, by the id of the thread. There
                is at least one.

        Returns:
            The ranks. Empty if the rank waits for all ranks. None if it is not known to wait.
        """
        # A rank that is in calls of several threads may go on in any of them.
        is_only_user_thread = list(open_collectives) == [self._recorder.thread]
        if not is_only_user_thread:
            return None
        awaited = open_collectives[self._recorder.thread].awaited_ranks
        if not awaited:  # the collective does not say for which ranks it waits, as in a gather
            return None
        if len(awaited) == self._size:
            return ()  # stands for all ranks
        return tuple(awaited)

    def activity(self) -> str:
        """Return what this rank is doing now, and where, as text that follows "rank 1"."""
        return self._describe_activity(self._current_call())

    def _current_call(self) -> Entry | None:
        """Return the collective that the user's thread is in, or else one of another thread.

        Returns:
            The collective. None if no thread is in a collective.
        """
        # A copy, since other threads change the dict.
        open_collectives = dict(self._recorder.open_collectives)
        if self._recorder.thread in open_collectives:
            return open_collectives[self._recorder.thread]
        return next(iter(open_collectives.values()), None)

    def _describe_activity(self, call: Entry | None) -> str:
        """Return what this rank is doing, and where, as text that follows "rank 1".

        Args:
            call: the collective that the rank is in. None if it is in none.
        """
        recorder = self._recorder
        phase = recorder.phase
        if call is not None and phase:
            text = f"in {phase}: {call}"
        elif call is not None:
            text = call.activity
        else:
            text = f"in {phase or 'no collective'}"
            frame = sys._current_frames().get(recorder.thread)
            call_site = user_line(frame)
            if call_site:
                text += f" at {call_site}"
            worker = awaited_worker(frame)
            if worker is not None:
                text += f", waits for a DataLoader worker (pid {worker})"
        if is_compiling():
            text += f" ({COMPILES})"
        return text

    def _describe_step(self) -> str:
        """Return the optimizer step in which this rank is, or its latest one, as text."""
        step = self._recorder.step
        if self._recorder.phase == STEP:
            return f"in optimizer step {step}"
        if step == 1:
            return "before optimizer step 1"
        return f"after optimizer step {step - 1}"

    def _describe_latest(self) -> str:
        """Return what this rank, which is not in a collective, did last, as the end of a sentence.

        An example is ``"; its latest collective was barrier at train.py:1"``.
        """
        recorder = self._recorder
        latest = recorder.latest_collective
        text = ""
        if latest is not None:
            text += f"; its latest collective was {latest.public_title} at {latest.call_site}"
        # The key is the group of the latest collective, or a phase that started after it.
        latest_key = recorder.latest_key
        has_newer_phase = latest_key != "" and (latest is None or latest.group != latest_key)
        if has_newer_phase and not recorder.phase:
            text += f"; its latest phase was {latest_key}"
        return text


class _IdleTimer:
    """Tracks how long a thread has been idle. Created by that thread, updated by any thread.

    Attributes:
        idle_since: when :meth:`update` last saw that the thread had used the CPU, on the monotonic
            clock. On a system without CPU clocks of threads, the time of the latest update.
    """

    def __init__(self) -> None:
        # The clock of the CPU time that this thread uses. None if the system has no such clock.
        self._cpu_clock_id: int | None = None
        if hasattr(time, "pthread_getcpuclockid"):
            self._cpu_clock_id = time.pthread_getcpuclockid(threading.get_ident())
        # When update() was called last, and the CPU time of the thread then.
        self._updated_at = monotonic()
        self._cpu_seconds = 0.0
        self.idle_since = self._updated_at

    def update(self, now: float) -> None:
        """Set ``idle_since`` if the thread has used the CPU since the latest update.

        Args:
            now: the monotonic time.
        """
        if self._cpu_clock_id is None:
            self.idle_since = now
            return
        cpu_seconds = time.clock_gettime(self._cpu_clock_id)
        # An idle thread uses a little CPU time, too.
        idle_limit = _MAX_IDLE_LOAD * (now - self._updated_at)
        is_busy = cpu_seconds - self._cpu_seconds > idle_limit
        if is_busy:
            self.idle_since = now
        self._cpu_seconds = cpu_seconds
        self._updated_at = now
