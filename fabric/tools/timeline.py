"""Time per phase of a training step: a table over all ranks, and a trace."""

import json
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import override

from fabric._session import Session, SessionObserver, rank_zero_first
from fabric._torch import is_in_backward
from fabric.communicators import Communicator
from fabric.diagnostics.recorder import ranks_in_words
from fabric.errors import ConfigurationError, UsageError
from fabric.hooks import Hooks
from fabric.module import FabricModule
from fabric.runtime import Runtime
from fabric.tools._torch import ProfiledCollective, profiled, wrap_collectives

__all__ = ["Timeline", "Timings", "Wait", "profile", "timings"]

_OTHER = "other"  # the name of the time in no phase
_END_OF_BATCHES = object()
_KEPT_ROUNDS = 100
_MAX_TRACE_SPANS = 40_000  # these are some megabytes in the job's store
_SHOWN_DELAY = 0.01  # of a step: shorter delays are not shown
_CLOCK_READINGS = 8  # barriers, of which the fastest one counts
_STORE_TIMEOUT = 10.0  # seconds that rank 0 waits for the spans of the other ranks

# A point in time: nanoseconds, or an event on the stream of a CUDA device.
Mark = Any


@dataclass
class _PhaseTime:
    """The time of a rank in a phase, in one round.

    Attributes:
        seconds: the duration of the phase, without phases inside of it.
        possible_wait: seconds of the phase in which the rank may have waited for other ranks.
    """

    seconds: float = 0.0
    possible_wait: float = 0.0


_PhaseTimes = dict[str, _PhaseTime]  # by phase


class Wait(str):
    """The name of a span in which this rank may wait for others."""


class _OpenSpan(NamedTuple):
    """A span that has begun and has not ended."""

    name: str
    begin: Mark


class _Span(NamedTuple):
    """A finished span.

    Attributes:
        name: the name of the phase, or a :class:`Wait`.
        outer: the name of the phase around it, or ``_OTHER``. Not used for the span of a step of
            the loop, which is only in the trace.
        begin: the mark of its start.
        end: the mark of its end.
    """

    name: str
    outer: str
    begin: Mark
    end: Mark


# See [Note: Timeline].
class _Round(NamedTuple):
    """A finished round.

    Attributes:
        number: how many steps of the loop had ended at the end of the round. 0 if the round is
            disturbed: it had work outside of the loop, or a wait for the device.
        begin: the mark of its start.
        end: the mark of its end.
        spans: the spans that ended in the round.
    """

    number: int
    begin: Mark
    end: Mark
    spans: list[_Span]


# [Note: Timeline]
# A *span* is a phase (data, forward, backward, optimizer, save, ...), or a `Wait`. A *step* of the
# loop ends with each `step()` of the first optimizer that was stepped; other optimizers do not
# count. Times are summed over *rounds*. A round lasts from the start of one such `step()` to the
# start of the next. Under DDP and FSDP all ranks have just synchronized at that point, so a late
# rank and the waits that it causes fall into the same round.
#
# Under DDP and FSDP a phase lasts as long on every rank as on the slowest. So the time in which a
# rank *may wait* for others is measured separately: from its last gradient to the end of its
# backward pass, in the collectives of fabric and FSDP, and until DDP has broadcast its buffers. The
# least such time of any rank is what the communication itself takes. The rest is the time that a
# rank has *waited*. The *own* time of a rank in a phase is the time of the phase without the waited
# time. The ranks that wait are delayed by the rank that waited least, in the phase where its own
# time most exceeds that of the fastest rank.
#
# On a CUDA device times are measured on its stream: an event is recorded at the start and the end
# of each span, and read only when the times are needed.
class Timeline(SessionObserver):
    """Measures the phases of a session, by hooks, until it is closed.

    A *mark* is a point in time. A *span* is the time of one phase, such as a forward pass, between
    two marks. A *round* lasts from one step of the first optimizer to its next.

    Attributes:
        now: returns a mark of the current time: nanoseconds or, on CUDA, an event of the stream.
        is_active: whether the hooks are there. False after :meth:`close`.
        steps: number of finished steps of the loop: those of the first optimizer that was stepped.
        on_step: called with ``steps`` after each step. A profile sets it, otherwise it is None.
        trace: the latest spans, including those of steps, up to its ``maxlen``. A profile sets it.
            Otherwise its length is 0.
    """

    def __init__(self, session: Session) -> None:
        """Begin to measure the session. The caller then attaches the timeline to the session."""
        device = session.runtime.device
        # The thread of the loop. Spans of other threads, such as savers, do not count.
        self._thread = get_ident()
        self._has_other_ranks = session.runtime.world.world_size > 1
        self._is_cuda = device.type == "cuda"
        self.now: Callable[[], Mark] = time_ns
        if self._is_cuda:
            self.now = partial(_record_event, device)
        # A profile sets on_step and trace. Until then, no span is kept in the trace.
        self.on_step: Callable[[int], None] | None = None
        self.trace: deque[_Span] = deque(maxlen=0)
        self.steps = 0
        # The id() of the first optimizer that was stepped.
        self._first_optimizer_id: int | None = None
        # When the latest gradient of the current backward pass was ready. None if none is ready.
        self._last_gradient_time: Mark | None = None
        # Each span is inside of the span before it.
        self._open_spans: list[_OpenSpan] = []
        # The finished spans of the current round.
        self._spans: list[_Span] = []
        self._rounds: deque[_Round] = deque(maxlen=_KEPT_ROUNDS)
        self._round_start = self.now()
        self._step_start = self._round_start
        # Whether the current round is disturbed; see _Round. The first round is, by the setup.
        self._is_round_disturbed = True
        # close() closes this stack, which removes the hooks.
        self._hooks = ExitStack()
        self.is_active = True
        self._register_hooks(session)

    def _register_hooks(self, session: Session) -> None:
        """Measure optimizer steps, backward passes and fabric's collectives, until :meth:`close`.

        Forward passes are measured from :meth:`on_setup` on.
        """
        before_step = register_optimizer_step_pre_hook(self._before_step)
        self._hooks.callback(before_step.remove)
        after_step = register_optimizer_step_post_hook(self._after_step)
        self._hooks.callback(after_step.remove)
        self._record_passes("backward", session.backward_hooks)
        # The recorder enters its `collective_context` around each collective of fabric. A job of
        # one process has no recorder.
        recorder = session.runtime.recorder
        if recorder is not None:
            earlier_context = recorder.collective_context
            self._hooks.callback(setattr, recorder, "collective_context", earlier_context)
            recorder.collective_context = self._around_collective

    @contextmanager
    def _around_collective(self, call: object) -> Iterator[None]:
        """Record the block, which runs one collective, as a wait with the name ``str(call)``."""
        with self.during(Wait(call)):
            yield

    @override
    def close(self) -> None:
        """Remove all hooks. :meth:`totals` still works."""
        self._hooks.close()
        self.is_active = False

    @override
    def on_setup(self, model: FabricModule) -> None:
        """Record the forward passes of a module, and the times in which it may wait for ranks.

        The session calls this method for each module that is set up. A sharded module waits in
        FSDP's collectives. Any other module may wait until DDP has reduced its gradients, or has
        broadcast its buffers.
        """
        contract = model._fabric_contract
        self._record_passes("forward", model._fabric_hooks)
        if contract.is_sharded:
            wrap_collectives(model._fabric_prepared, self._around_collective, self._hooks)
            return
        if not self._has_other_ranks:
            return
        # A rank may wait for other ranks from its last gradient on. Each gradient overwrites the
        # time, so that the time of the last one remains.
        for parameter in contract.parameters().values():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._record_gradient_time)
                self._hooks.callback(handle.remove)
        # DDP, which needs the forward pass, broadcasts the buffers before the forward of the user's
        # module.
        has_buffers = next(contract.module.buffers(), None) is not None
        if contract.needs_forward and has_buffers:
            before_forward = contract.module.register_forward_pre_hook(self._record_buffers_wait)
            self._hooks.callback(before_forward.remove)

    @override
    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the same batches, which records the fetch of each as a phase.

        The session calls this method for each iteration over a loader.
        """
        if not self.is_active:
            return batches
        return self._with_timed_fetches(batches)

    def _with_timed_fetches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. The time in which each is fetched is a span ``"data"``."""
        # A context manager decorates next(): fetch() calls next() within a new span.
        fetch = self.during("data")(next)
        while True:
            batch = fetch(batches, _END_OF_BATCHES)
            if batch is _END_OF_BATCHES:
                return
            yield batch

    @override
    def around_phase(
        self, name: str, context: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Return ``context``, or a context that also records the phase as a span.

        The session calls this method for its own phases, such as a save.
        """
        if not self.is_active:
            return context
        return self._recorded_context(name, context)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record the block as a span. A name that is a :class:`Wait` makes it a wait."""
        self._begin_span(name)
        try:
            yield
        finally:
            self._end_span(name)

    @contextmanager
    def _recorded_context(self, name: str, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enter ``context``, and record the time from before it to after it as a span."""
        with self.during(name), context:
            yield

    def totals(self) -> dict[int, _PhaseTimes]:
        """Return the times of each phase of the latest rounds, by number of the round.

        Disturbed rounds, which had work outside of the loop or a wait for the device, are left out.
        If all finished rounds are disturbed, the result has only the last one. If none is finished,
        the result has the current round. Waits for the device.
        """
        # A disturbed round has the number 0.
        rounds = [finished for finished in self._rounds if finished.number > 0]
        if not rounds:
            rounds = list(self._rounds)
        if not rounds:
            unfinished = _Round(
                number=0, begin=self._round_start, end=self.now(), spans=self._spans
            )
            rounds = [unfinished]
        # The events of a CUDA device can be read only once the device has reached them.
        self.wait()
        totals: dict[int, _PhaseTimes] = {}
        for latest_round in rounds:
            # If all are disturbed, all have the number 0, and the last one remains.
            totals[latest_round.number] = _times_by_phase(latest_round)
        return totals

    def wait(self) -> None:
        """Wait for the device, and mark the current round as disturbed by the wait."""
        self._is_round_disturbed = True
        if self._is_cuda:
            torch.accelerator.synchronize()

    def _record_passes(self, name: str, hooks: Hooks) -> None:
        """Record each pass that has these hooks as a span of this name, until :meth:`close`."""
        before = partial(self._begin_span, name)
        after = partial(self._end_span, name)
        # First in both lists: the time of other hooks before the phase counts as part of the phase,
        # and the time of other hooks after the phase does not.
        hooks.before.insert(0, before)
        hooks.after.insert(0, after)
        self._hooks.callback(hooks.before.remove, before)
        self._hooks.callback(hooks.after.remove, after)

    def _is_in_loop(self) -> bool:
        """Return whether the caller is in the loop's thread, or in a thread of autograd."""
        return get_ident() == self._thread or is_in_backward()

    def _is_open(self, name: str) -> bool:
        """Return whether a span of this name has begun and has not ended."""
        return any(span.name == name for span in self._open_spans)

    def _begin_span(self, name: str) -> None:
        """Begin a span inside of the open spans. Ignored in threads that do not run the loop."""
        if not self._is_in_loop():
            return
        if name == "backward":
            # Forget the last gradient of the backward pass before.
            self._last_gradient_time = None
        self._open_spans.append(_OpenSpan(name, self.now()))

    def _end_span(self, name: str, *_: object) -> None:
        """End the innermost span of a name, and the spans inside of that span.

        Ignored if no span of this name is open: the phase may have begun before the hooks were
        added. The other arguments are those of a hook, and are not used.
        """
        if not self._is_in_loop() or not self._is_open(name):
            return
        end = self.now()
        ended_name = None
        # Usually the span is the innermost one. Spans inside of it are still open only if an error
        # has skipped their end.
        while ended_name != name:
            ended_name, begin = self._open_spans.pop()
            outer = _OTHER
            if self._open_spans:
                outer = self._open_spans[-1].name
            self._add_span(_Span(ended_name, outer=outer, begin=begin, end=end))
        if name == "backward" and self._last_gradient_time is not None:
            # After its last gradient, the rank only waits for the reduction of gradients.
            wait = Wait("gradients")
            self._add_span(_Span(wait, outer=name, begin=self._last_gradient_time, end=end))

    def _add_span(self, span: _Span) -> None:
        """Add a finished span to the current round and to the trace of a profile."""
        self._spans.append(span)
        self.trace.append(span)

    def _record_gradient_time(self, *_: object) -> None:
        """Record the time. torch calls this hook when the gradient of any parameter is computed."""
        self._last_gradient_time = self.now()

    def _record_buffers_wait(self, *_: object) -> None:
        """Record the time since the forward pass began as a wait.

        A hook before the forward of the user's module. DDP calls this forward after it has
        broadcast the buffers. Nothing is recorded if the user calls the module itself, without DDP.
        """
        if self._open_spans and self._open_spans[-1].name == "forward":
            begin = self._open_spans[-1].begin
            self._add_span(_Span(Wait("buffers"), outer="forward", begin=begin, end=self.now()))

    def _before_step(self, optimizer: Any, *_: object) -> None:
        """Begin the span of an optimizer's step. End the round before a step of the loop.

        torch calls this hook before each step of any optimizer.
        """
        # The step() of a subclass calls the step() of its base class. torch calls the hook for
        # both, and the span covers the outer call.
        if self._is_open("optimizer"):
            return
        if self._first_optimizer_id is None:
            self._first_optimizer_id = id(optimizer)
        if self._first_optimizer_id == id(optimizer):
            self._end_round()
        self._begin_span("optimizer")

    def _end_round(self) -> None:
        """Keep the current round, and begin the next one."""
        now = self.now()
        # All ranks number a round alike, by the steps of the loop that have ended. A disturbed
        # round has the number 0, by which totals() leaves it out. No other round has it: the round
        # before the first step is always disturbed.
        number = 0 if self._is_round_disturbed else self.steps
        finished = _Round(number=number, begin=self._round_start, end=now, spans=self._spans)
        self._rounds.append(finished)
        self._round_start = now
        self._spans = []
        self._is_round_disturbed = False

    def _after_step(self, optimizer: Any, *_: object) -> None:
        """End the span of an optimizer's step. The first optimizer also ends the loop's step.

        torch calls this hook after each step of any optimizer.
        """
        # The step() of a subclass calls the step() of its base class. torch calls the hook for
        # both, and the call for the base class has ended the span.
        if not self._is_open("optimizer"):
            return
        self._end_span("optimizer")
        # _before_step() has set the id.
        if self._first_optimizer_id != id(optimizer):
            return
        now = self.now()
        # The number of a step is the number of steps before it.
        name = f"step {self.steps}"
        self.trace.append(_Span(name, outer=_OTHER, begin=self._step_start, end=now))
        self.steps += 1
        self._step_start = now
        if self.on_step is not None:
            self.on_step(self.steps)


def _record_event(device: torch.device) -> Mark:
    """Record an event on the current stream of a CUDA device. The event is read later."""
    event = torch.Event(device, enable_timing=True)
    return torch.accelerator.current_stream(device).record_event(event)


def _nanoseconds(begin: Mark, end: Mark) -> float:
    """Return the time between two marks. Events of a device must have been waited for."""
    if isinstance(begin, int):
        return end - begin
    milliseconds = begin.elapsed_time(end)
    return 1e6 * milliseconds


def _times_by_phase(measured_round: _Round) -> _PhaseTimes:
    """Return the times of each phase of a round. Their seconds add up to the round's duration.

    The time of a phase inside of another phase counts only for the inner one.
    """
    times: defaultdict[str, _PhaseTime] = defaultdict(_PhaseTime)
    # _OTHER is the outer phase of phases that are in no other phase.
    times[_OTHER].seconds = _nanoseconds(measured_round.begin, measured_round.end) / 1e9
    for span in measured_round.spans:
        seconds = _nanoseconds(span.begin, span.end) / 1e9
        is_wait = isinstance(span.name, Wait)
        if is_wait:
            # A wait is a part of its outer phase.
            times[span.outer].possible_wait += seconds
        else:
            # The span of the outer phase includes this span, which counts only once.
            times[span.name].seconds += seconds
            times[span.outer].seconds -= seconds
    return dict(times)


class Timings(NamedTuple):
    """Time per phase of a job's steps; ``str()`` of it is a table in milliseconds.

    Attributes:
        steps: number of steps measured: the latest, at most 100. A step ends with each ``step()``
            of the first optimizer that was stepped; without any, everything is one step.
        seconds: duration of a step. All times are averages over the steps.
        own: the time of each rank, by phase, without the time that the rank waited for others.
        waited: the time that each rank waited for others.
        delays: by rank and phase, how long the other ranks waited because of that rank in that
            phase, the longest first.
    """

    steps: int
    seconds: float
    own: Mapping[str, Sequence[float]]
    waited: Sequence[float]
    delays: Mapping[tuple[int, str], float]

    @property
    def slowest(self) -> tuple[int, str] | None:
        """The rank that the others wait for longest, and its phase; None if there is one rank."""
        return next(iter(self.delays), None)

    def __str__(self) -> str:
        """Return a table with a row for each phase, and a line for each delay that matters."""
        ranks = len(self.waited)
        lines = [
            f"{self.steps} step(s) of {1e3 * self.seconds:.1f} ms on {ranks} rank(s)",
            f"{'':14}{'mean':>8}{'share':>7}{'fastest rank':>17}{'slowest rank':>17}",
        ]
        for name, times in {**self.own, "waits": self.waited}.items():
            mean = sum(times) / len(times)
            fastest = _time_and_rank(times, min(times))
            slowest = _time_and_rank(times, max(times))
            share = mean / self.seconds
            lines.append(f"{name:14}{1e3 * mean:8.1f}{share:7.0%}{fastest:>17}{slowest:>17}")
        for (rank, phase), delay in self.delays.items():
            if delay > _SHOWN_DELAY * self.seconds:  # more than 1 % of a step
                milliseconds = f"{1e3 * delay:.1f} ms"
                lines.append(f"the others wait {milliseconds} a step for rank {rank}, in {phase}")
        return "\n".join(lines)


def _time_and_rank(times: Sequence[float], seconds: float) -> str:
    """Return a time in milliseconds and, in brackets, the first rank that has this time."""
    return f"{1e3 * seconds:.1f} ({times.index(seconds)})"


def _latest_timeline(session: Session) -> Timeline | None:
    """Return the timeline of a session, active or closed. None if there has been none."""
    for observer in session.observers:
        if isinstance(observer, Timeline):
            return observer
    return None


def timings(session: Session) -> Timings:
    """Return the timings of the latest steps; see ``Fabric.timings``. Collective.

    Raises:
        UsageError: nothing was measured, by ``Fabric(timings=True)`` or by a profile.
    """
    timeline = _latest_timeline(session)
    if timeline is None:
        raise UsageError(
            "fabric.timings()",
            problem="nothing has been measured",
            suggestion="Fabric(timings=True), profile()",
        )
    totals_by_rank = session.runtime.communicator.gather_objects(timeline.totals())
    round_numbers = _common_rounds(totals_by_rank)
    phases = _phases_of(totals_by_rank, round_numbers)
    # Both tensors have the dimensions (rounds, ranks, phases).
    seconds, possible_waits = _as_tensors(totals_by_rank, round_numbers, phases)
    # A possible wait is the time of a communication and of the wait for the other ranks before it.
    # The rank that comes last does not wait, so its possible wait, which is the least, is the time
    # of the communication alone.
    communication = possible_waits.amin(dim=1, keepdim=True)
    waits = possible_waits - communication
    own = seconds - waits  # what a rank needs by itself, communication included
    # The dimensions are (rounds, ranks).
    waited = waits.sum(dim=2)
    # The dimensions are (phases, ranks).
    mean_own = own.mean(dim=0).T
    return Timings(
        steps=len(round_numbers),
        seconds=float(seconds.sum(dim=2).mean()),
        own=dict(zip(phases, mean_own.tolist(), strict=True)),
        waited=waited.mean(dim=0).tolist(),
        delays=_delays(own, waited, phases),
    )


def _common_rounds(totals_by_rank: Sequence[Mapping[int, _PhaseTimes]]) -> list[int]:
    """Return the numbers of the rounds that all ranks have in their totals.

    Args:
        totals_by_rank: the result of :meth:`Timeline.totals` on each rank, by number of the round.
            A rank leaves out its old rounds, and the rounds that it has disturbed.
    """
    common_rounds: list[int] = []
    for number in totals_by_rank[0]:
        if all(number in totals for totals in totals_by_rank):
            common_rounds.append(number)
    return common_rounds


def _phases_of(
    totals_by_rank: Sequence[Mapping[int, _PhaseTimes]], round_numbers: Sequence[int]
) -> list[str]:
    """Return the names of the phases of some rounds, in the order in which they appear."""
    phases: dict[str, None] = {}  # a dict keeps the order, unlike a set
    for number in round_numbers:
        for totals in totals_by_rank:
            phases.update(dict.fromkeys(totals[number]))
    return list(phases)


def _as_tensors(
    totals_by_rank: Sequence[Mapping[int, _PhaseTimes]],
    round_numbers: list[int],
    phases: list[str],
) -> tuple[Tensor, Tensor]:
    """Return the seconds in phases, and the seconds of possible waits.

    Both tensors have the shape (rounds, ranks, phases). The seconds are 0 for a phase that a rank
    did not have.

    Args:
        totals_by_rank: for each rank, its times by number of the round and phase.
        round_numbers: the rounds to return, which all ranks have.
        phases: the names of the phases.
    """
    no_time = _PhaseTime()
    seconds: list[float] = []
    possible_waits: list[float] = []
    for number in round_numbers:
        for totals in totals_by_rank:
            for phase in phases:
                phase_time = totals[number].get(phase, no_time)
                seconds.append(phase_time.seconds)
                possible_waits.append(phase_time.possible_wait)
    shape = (len(round_numbers), len(totals_by_rank), len(phases))
    seconds_tensor = torch.tensor(seconds, dtype=torch.float64).view(shape)
    waits_tensor = torch.tensor(possible_waits, dtype=torch.float64).view(shape)
    return seconds_tensor, waits_tensor


def _delays(own: Tensor, waited: Tensor, phases: list[str]) -> dict[tuple[int, str], float]:
    """Return how long the others waited for a rank in a phase, the longest first.

    Args:
        own: seconds that a rank did not wait, with shape (rounds, ranks, phases).
        waited: seconds that a rank waited, with shape (rounds, ranks).
        phases: the names of the phases.

    Returns:
        By rank and phase, the mean seconds of another rank in a round. Empty for one rank.
    """
    rounds, ranks = waited.shape
    delays: defaultdict[tuple[int, str], float] = defaultdict(float)
    if ranks == 1:
        return delays
    for own_seconds, waits in zip(own, waited, strict=True):
        # The rank that waited least came last, so the other ranks waited for it.
        last_rank = int(waits.argmin())
        # By phase, how much longer the last rank took than the fastest rank. The phase with the
        # largest excess counts as the cause of the delay.
        excess = own_seconds[last_rank] - own_seconds.amin(dim=0)
        phase = phases[int(excess.argmax())]
        others_waited = float((waits - waits.min()).sum())
        # A mean over the other ranks, and a summand of the mean over rounds.
        delays[last_rank, phase] += others_waited / (ranks - 1) / rounds
    longest_first = sorted(delays.items(), key=lambda item: -item[1])
    return dict(longest_first)


@contextmanager
def profile(session: Session, path: str | os.PathLike[str], steps: range | None) -> Iterator[None]:
    """Write one trace of all processes, for ui.perfetto.dev or ``chrome://tracing``.

    Collective on entry. The trace has the phases of every step (data, forward, backward,
    optimizer, save) and the collectives of each process, on rank 0's clock. The trace is written
    after the last of the steps, or when the context exits before that. Then rank 0 waits at most
    ten seconds for the other processes. See ``Fabric.profile``.

    Args:
        session: the session of this process.
        path: the file, written on rank 0; ``.json`` may be omitted.
        steps: a contiguous range, counted from 0 at the start of the context. None records all
            steps. A step ends with each ``step()`` of the first optimizer that was stepped.

    Raises:
        ConfigurationError: ``steps`` is not a contiguous range.
        UsageError: another profile is active, or rank 0 cannot write the file.
        OSError: this is rank 0, and it cannot write the file.
    """
    call_text = f"fabric.profile({path!r}, {steps=})"
    if steps is None:
        steps = range(2**62)  # more steps than any job makes
    _require_contiguous(call_text, steps)
    timeline = _latest_timeline(session)
    # Only a profile sets on_step, as long as it is under way.
    if timeline is not None and timeline.on_step is not None:
        raise UsageError(call_text, problem="another profile is under way")
    target = Path(f"{os.fspath(path).removesuffix('.json')}.json")
    communicator = session.runtime.communicator
    # An error of rank 0 in this block is raised on all ranks.
    with rank_zero_first(communicator):
        if communicator.rank == 0:
            # The trace is written at the end. Opening the file now raises an error early.
            target.parent.mkdir(parents=True, exist_ok=True)
            target.open("a").close()
    clock = _synchronize_clocks(communicator)
    with ExitStack() as stack:
        # Without Fabric(timings=True), a timeline measures only as long as this profile.
        if timeline is None or not timeline.is_active:
            timeline = stack.enter_context(closing(Timeline(session)))
            session.attach(timeline)
        running_profile = _Profile(
            session.runtime, timeline, steps=steps, clock=clock, target=target
        )
        stack.enter_context(closing(running_profile))
        yield


# [Note: Clocks]
# A trace uses rank 0's clock. Before it starts, all ranks enter a barrier several times. The
# shortest time from rank 0's entry to a rank's exit is the difference of their clocks plus the
# duration of a barrier, which is the same for all ranks to within some tenths of a millisecond.
class _Clock(NamedTuple):
    """The clock of a trace, which is rank 0's.

    Attributes:
        start: the time at which the trace begins on rank 0's clock, in nanoseconds.
        lead: how far this process's clock is ahead of rank 0's clock, in nanoseconds.
    """

    start: int
    lead: int


def _synchronize_clocks(communicator: Communicator) -> _Clock:
    """Compare this process's clock with rank 0's. Collective."""
    entries: list[int] = []
    exits: list[int] = []
    for _ in range(_CLOCK_READINGS):
        entries.append(time_ns())
        communicator.barrier("fabric.profile")
        exits.append(time_ns())
    entries_of_rank0 = communicator.broadcast_object(entries, 0)
    # From rank 0's entry to this rank's exit, the two clocks show the lead of this rank's clock
    # plus the duration of a barrier. So the least difference is the nearest to the lead.
    leads: list[int] = []
    for entered, exited in zip(entries_of_rank0, exits, strict=True):
        leads.append(exited - entered)
    return _Clock(start=entries_of_rank0[0], lead=min(leads))


def _require_contiguous(call_text: str, steps: Any) -> None:
    """Raise a ConfigurationError unless ``steps`` is a contiguous range that begins at 0 or later.

    Args:
        call_text: the user's call, for the error.
        steps: an object of any type.
    """
    is_contiguous = isinstance(steps, range) and steps.step == 1 and 0 <= steps.start < steps.stop
    if not is_contiguous:
        raise ConfigurationError(
            call_text, expected="steps that follow each other, from 0 on, such as range(10, 20)"
        )


class _Profile:
    """A profile under way: it records the given steps, and then writes the trace.

    Args:
        runtime: the runtime of this process.
        timeline: measures this process. The profile sets its ``on_step`` and ``trace``.
        steps: the steps to record, counted from the construction of the profile.
        clock: the clock of the trace.
        target: the file of the trace.
    """

    def __init__(
        self, runtime: Runtime, timeline: Timeline, *, steps: range, clock: _Clock, target: Path
    ) -> None:
        """Begin to record if the steps begin at 0. :func:`profile` calls it on every rank."""
        self._device = runtime.device
        self._store = runtime.store
        self._timeline = timeline
        self._steps = steps
        self._clock = clock
        self._target = target
        # The timeline may have counted steps before the profile.
        self._steps_before = timeline.steps
        # The events of the trace, as JSON.
        self._events: list[dict[str, Any]] = []
        self._collectives: list[ProfiledCollective] = []
        self._add_metadata("process_name", f"rank {self._store.rank}")
        self._add_metadata("thread_name", "phases")
        # Closed after the last step, or by close(). An ExitStack makes its calls in reverse order,
        # so the trace is written after the calls that _begin_recording() adds.
        self._at_end = ExitStack()
        self._at_end.callback(self._publish_and_write)
        timeline.on_step = self._on_step
        # Begins the recording if the steps begin at 0.
        self._on_step(timeline.steps)

    def close(self) -> None:
        """Write the trace, unless it has been written."""
        self._at_end.close()

    def _on_step(self, finished_steps: int) -> None:
        """Begin or end the recording. The timeline calls it after each step of the loop."""
        step = finished_steps - self._steps_before
        if step == self._steps.start:
            self._begin_recording()
        elif step == self._steps.stop:
            self._at_end.close()

    def _begin_recording(self) -> None:
        """Begin to record spans and collectives.

        ``_at_end`` gets the calls that end the recording, in reverse order: wait for the device,
        end the profile of collectives, and add the events of spans and collectives.
        """
        timeline = self._timeline
        # Once the device is idle, its mark and the time of the host belong to the same moment.
        timeline.wait()
        start_mark = timeline.now()
        start_ns = time_ns()
        timeline.trace = deque(maxlen=_MAX_TRACE_SPANS)
        self._at_end.callback(self._add_recorded_events, start_mark, start_ns)
        self._at_end.enter_context(profiled(self._device, self._collectives))
        self._at_end.callback(timeline.wait)

    def _add_recorded_events(self, start_mark: Mark, start_ns: int) -> None:
        """Add the events of the spans and collectives that were recorded.

        Args:
            start_mark: the mark at which the recording began. Marks of a device have no time, only
                a distance from each other.
            start_ns: the time of this mark on this process's clock, in nanoseconds.
        """
        for span in self._timeline.trace:
            begin = start_ns + _nanoseconds(start_mark, span.begin)
            duration = _nanoseconds(span.begin, span.end)
            # The format wants the duration of a complete event ("X") in microseconds.
            self._add_event("X", span.name, begin, track=0, dur=duration / 1e3)
        # Collectives may overlap, so each of them is a pair of events, "b" for its begin and "e"
        # for its end, with the same id.
        for number, collective in enumerate(self._collectives):
            pair = f"{self._store.rank}/{number}"
            self._add_event("b", collective.name, collective.begin, track=1, id=pair)
            self._add_event("e", collective.name, collective.end, track=1, id=pair)

    def _add_event(self, kind: str, name: str, time: float, track: int, **options: Any) -> None:
        """Add an event of the trace, in the format of ``chrome://tracing``.

        Args:
            kind: ``"X"`` for a span with a duration, ``"b"`` and ``"e"`` for the begin and the end
                of an event that may overlap others.
            name: the text that is shown.
            time: a time on this process's clock, in nanoseconds. The trace has microseconds.
            track: the line below the process on which the event is shown.
            **options: more fields of the event.
        """
        time_on_rank0 = time - self._clock.lead
        event = {
            "ph": kind,
            "name": name,
            "cat": "fabric",
            "pid": self._store.rank,
            "tid": track,
            "ts": (time_on_rank0 - self._clock.start) / 1e3,
        }
        self._events.append({**event, **options})

    def _add_metadata(self, kind: str, name: str) -> None:
        """Add the name of this process, or of its track of phases, which is track 0.

        Args:
            kind: ``"process_name"`` or ``"thread_name"``.
            name: the name that is shown.
        """
        event = {"ph": "M", "name": kind, "pid": self._store.rank, "tid": 0, "args": {"name": name}}
        self._events.append(event)

    def _publish_and_write(self) -> None:
        """Publish the events of this rank. On rank 0, write the events of all ranks.

        Called once, at the end of the profile. Not collective, since other ranks may end earlier,
        or never.
        """
        self._timeline.on_step = None
        # A deque of length 0 keeps nothing: this ends the recording.
        self._timeline.trace = deque(maxlen=0)
        # The start is rank 0's time. So the topic is the same on all ranks, and different for each
        # profile.
        topic = f"trace/{self._clock.start}"
        try:
            self._store.publish(topic, self._events)
            if self._store.rank == 0:
                self._write_of_all_ranks(topic)
        # This is a warning, so that a failed trace neither ends the job nor hides an error of the
        # profiled block.
        except (OSError, RuntimeError) as error:
            warnings.warn(f"{self._target} was not written: {error}", stacklevel=2)

    def _write_of_all_ranks(self, topic: str) -> None:
        """Write the events that the ranks have published. Warns of ranks that are missing."""
        ranks = range(self._store.size)
        # The result lacks a rank that does not publish its events in this time.
        events_by_rank = self._store.read(topic, ranks, max_wait=_STORE_TIMEOUT)
        trace: list[dict[str, Any]] = []
        for events in events_by_rank.values():
            trace.extend(events)
        self._target.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
        missing = set(ranks) - events_by_rank.keys()
        if missing:
            warnings.warn(
                f"{self._target} lacks {ranks_in_words(missing)}, which did not reach the end of "
                "the profiled block in time",
                stacklevel=2,
            )
