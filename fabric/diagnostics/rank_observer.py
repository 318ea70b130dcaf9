"""What this rank is doing, as a hang report shows it."""

import re
import sys
import threading
import time
from collections.abc import Sequence
from time import monotonic

from fabric._torch import awaited_worker, is_compiling
from fabric.diagnostics.call_site import user_line
from fabric.diagnostics.rank_state import COMPILES, RankState
from fabric.diagnostics.recorder import Entry, FlightRecorder
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
    """Watches the flight recorder and the thread of this rank, and describes the rank.

    Made in the thread that makes the calls. Its methods are called in the thread that reports.

    Args:
        recorder: the flight recorder of this process.
        size: the number of ranks.
        idle_threshold: after how many seconds without CPU time the thread counts as idle.
        is_asynchronous: whether the device runs collectives in the background. If so, a rank may
            wait for a collective anywhere, not only in a collective or phase.

    Attributes:
        stacks: reads the stack of the thread that makes the calls.
        unchanged_since: when the flight recorder changed last, or when the rank was seen to
            compile, on the monotonic clock.
    """

    def __init__(
        self, recorder: FlightRecorder, *, size: int, idle_threshold: float, is_asynchronous: bool
    ) -> None:
        self.stacks = Stacks(recorder.thread)
        self.unchanged_since = monotonic()
        self._recorder = recorder
        self._size = size
        self._idle_threshold = idle_threshold
        self._is_asynchronous = is_asynchronous
        self._idle_timer = _IdleTimer()
        # The state of the flight recorder at the latest call of update().
        self._snapshot: object = None

    def update(self, now: float) -> bool:
        """Look at the rank again, and return whether it has made progress since the latest call.

        Progress is a change of the flight recorder.

        Args:
            now: the monotonic time.
        """
        self._idle_timer.update(now)
        recorder = self._recorder
        # The ids of the threads are copied, since other threads change the dict.
        open_threads = list(recorder.open_collectives)
        snapshot = (recorder.phase, sum(recorder.counts.values()), open_threads)
        if snapshot == self._snapshot:
            return False
        self._snapshot = snapshot
        self.unchanged_since = now
        return True

    def seconds_waited(self, now: float) -> float:
        """Return for how long this rank may have waited. Zero if the rank cannot be waiting."""
        is_inside = bool(self._recorder.phase or self._recorder.open_collectives)
        if not is_inside and not self._is_asynchronous:
            return 0.0
        return now - self.unchanged_since

    def state(self) -> RankState:
        """Return the state of this rank now."""
        recorder = self._recorder
        call = self._current_call()
        if call is not None:
            key = call.group
        else:
            key = recorder.phase or recorder.latest_key
        latest = call or recorder.latest_collective
        # The members of a group of all ranks are left out, to keep the state small. If the key is
        # that of a phase, all ranks must start it.
        members: Sequence[int] = ()
        if latest is not None and latest.group == key and len(latest.members) < self._size:
            members = tuple(latest.members)
        history = f", step {recorder.step}"
        if call is None:
            history += self._describe_latest()
        stack = self.stacks.dump()
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
        """Return the ranks without which this rank cannot go on. See ``RankState.awaited``.

        Args:
            stack: the stack of the thread that makes the calls.
        """
        recorder = self._recorder
        if self._is_asynchronous:
            return None
        open_collectives = dict(recorder.open_collectives)
        if open_collectives:
            # A rank with calls in other threads may go on in one of them.
            is_in_main_thread = list(open_collectives) == [recorder.thread]
            awaited = next(iter(open_collectives.values())).awaited_ranks
            if not is_in_main_thread or not awaited:
                return None
            # An empty sequence stands for all ranks, to keep the state small.
            if len(awaited) == self._size:
                return ()
            return tuple(awaited)
        if not recorder.phase or not recorder.phases_need_all_ranks:
            return None
        # The rank may also compute in the phase. It waits only if it uses no CPU time in a
        # collective of torch.
        idle_seconds = monotonic() - self._idle_timer.idle_since
        is_idle = idle_seconds > self._idle_threshold
        is_in_torch = _TORCH_COLLECTIVE.match(stack) is not None
        if is_idle and is_in_torch:
            return ()
        return None

    def activity(self) -> str:
        """Return what this rank is doing now, and where, as text that follows "rank 1"."""
        return self._describe_activity(self._current_call())

    def _current_call(self) -> Entry | None:
        """Return the collective in which the user's thread is, or else another thread.

        Returns:
            The collective. None if no thread is in a collective.
        """
        open_collectives = self._recorder.open_collectives
        call = open_collectives.get(self._recorder.thread)
        if call is None:
            # The values are copied into a list, since other threads change the dict.
            call = next(iter(list(open_collectives.values())), None)
        return call

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

    def _describe_latest(self) -> str:
        """Return what a rank that is not in a collective did last, as text that ends a sentence."""
        recorder = self._recorder
        latest = recorder.latest_collective
        text = ""
        if latest is not None:
            text += f"; its latest collective was {latest.public_title} at {latest.call_site}"
        # The latest key is a group or, after a phase, the name of the phase.
        latest_key = recorder.latest_key
        is_latest_a_phase = latest_key != "" and (latest is None or latest.group != latest_key)
        if is_latest_a_phase and not recorder.phase:
            text += f"; its latest phase was {latest_key}"
        return text


class _IdleTimer:
    """Measures since when the thread that creates the timer has used no CPU time.

    Attributes:
        idle_since: when the thread was last seen to use the CPU, on the monotonic clock. Always the
            present time on systems that do not measure the CPU time of a thread.
    """

    def __init__(self) -> None:
        self._clock: int | None = None
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._latest_update = monotonic()
        self._cpu_seconds = 0.0
        self.idle_since = self._latest_update

    def update(self, now: float) -> None:
        """Notice whether the thread has used the CPU since the latest update, from any thread.

        Args:
            now: the monotonic time.
        """
        if self._clock is None:
            self.idle_since = now
            return
        cpu_seconds = time.clock_gettime(self._clock)
        idle_limit = _MAX_IDLE_LOAD * (now - self._latest_update)
        if cpu_seconds - self._cpu_seconds > idle_limit:
            self.idle_since = now
        self._cpu_seconds = cpu_seconds
        self._latest_update = now
