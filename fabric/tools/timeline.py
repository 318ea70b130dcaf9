"""Time per phase of a training step: a table over all ranks that names the slowest one, and a trace.

[Note: Timeline] A *span* is a phase (data, forward, backward, optimizer, save, ...), or a :class:`Wait`. A *step* of
the loop ends with each ``step()`` of the first optimizer that was stepped; other optimizers do not count. Times are
summed over *rounds*, each from the start of one such ``step()`` to the start of the next. Under DDP and FSDP all ranks
have just synchronized at that point, so a late rank and the waits that it causes fall into the same round.

Under DDP and FSDP a phase lasts as long on every rank as on the slowest. So the time in which a rank may wait for
others is measured separately: from its last gradient to the end of its backward pass, in the collectives of fabric and
FSDP, and until DDP has broadcast its buffers. The least such time of any rank is subtracted from that of each: the
difference is what the rank waited, and the rest of the phase is its own. The others wait for the rank that waited
least, in the phase where its own time most exceeds that of the fastest rank.

On a CUDA device times are measured on its stream: an event is recorded at the start and the end of each span, and read
only when the times are needed.

[Note: Clocks] A trace uses rank 0's clock. Before it starts, all ranks enter a barrier several times. The shortest time
from rank 0's entry to a rank's exit is the difference of their clocks plus the duration of a barrier, which is the same
for all ranks to within some tenths of a millisecond.
"""

import json
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import override

from fabric._session import Session, SessionObserver, rank_zero_first
from fabric._torch import in_backward
from fabric.diagnostics.recorder import ranks_in_words
from fabric.errors import ConfigurationError, UsageError
from fabric.hooks import Hooks
from fabric.module import FabricModule
from fabric.tools._torch import ProfiledCollective, profiled, wrap_collectives

__all__ = ["Timeline", "Timings", "Wait", "profile", "timings"]

Span = tuple[str, str, Any, Any]  # its name, the phase around it, and marks of its start and end

# time in no phase
_OTHER = "other"
_END = object()
# rounds kept; spans in a trace, which are some megabytes in the job's store
_KEPT = 100
_MOST_SPANS = 40_000
_SHOWN = 0.01  # of a step: shorter waits are not shown
# clock readings; seconds that rank 0 waits for the other ranks' spans
_READINGS = 8
_GRACE = 10.0


class Wait(str):
    """The name of a span in which this rank may wait for others."""


class Timeline(SessionObserver):
    """Measures the phases of a session, by hooks, until it is closed; see ``[Note: Timeline]``.

    Attributes:
        now: returns a mark of the current time.
        is_active: whether it measures, until it is closed.
        steps: number of finished steps.
        on_step: called with ``steps`` after each step; ``bool`` outside of a profile.
        trace: the latest spans, including those of steps, up to its ``maxlen``.
    """

    def __init__(self, session: Session) -> None:
        runtime = session.runtime
        self._thread = get_ident()
        self._has_peers = runtime.world.world_size > 1
        self._is_cuda = runtime.device.type == "cuda"
        self.now: Callable[[], Any] = partial(_event, runtime.device) if self._is_cuda else time_ns
        self.on_step: Callable[[int], object] = bool
        self.trace = deque[Span](maxlen=0)
        self.steps = 0
        self._first = 0
        self._last_gradient = None
        self._open = list[tuple[str, Any]]()
        self._spans = list[Span]()
        self._rounds = deque[tuple[int, Any, Any, list[Span]]](maxlen=_KEPT)
        self._step_began = self._round_began = self.now()
        self._is_disturbed = True  # this round has work outside of the loop
        hooks = self._hooks = ExitStack()
        hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._watch("backward", session.backward)
        if (recorder := runtime.recorder) is not None:
            hooks.callback(setattr, recorder, "collective_context", recorder.collective_context)
            recorder.collective_context = lambda entry: self.during(Wait(entry))
        self.is_active = True
        hooks.callback(setattr, self, "is_active", False)

    @override
    def close(self) -> None:
        """Remove all hooks. What was measured is kept."""
        self._hooks.close()

    @override
    def on_setup(self, model: FabricModule) -> None:
        """Record the forward passes of a set-up module, and when its gradients and buffers are ready."""
        contract = model._fabric_contract
        undo = self._hooks.callback
        self._watch("forward", model._fabric_hooks)
        if contract.is_sharded:
            wrap_collectives(
                model._fabric_prepared, lambda name: self.during(Wait(name)), self._hooks
            )
        elif self._has_peers:
            for each in (value for value in contract.parameters().values() if value.requires_grad):
                undo(each.register_post_accumulate_grad_hook(self._note_gradient).remove)
            if contract.needs_forward and next(contract.module.buffers(), None) is not None:
                undo(contract.module.register_forward_pre_hook(self._note_buffers).remove)

    @override
    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the same batches. Fetching each of them is a phase, as long as this is active."""
        return self._timed(batches) if self.is_active else batches

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        fetch = self.during("data")(next)
        while (batch := fetch(batches, _END)) is not _END:
            yield batch

    @override
    def around_phase(
        self, name: str, context: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Return a context around ``context`` that is recorded as a span, if this is active."""
        return self._recorded(name, context) if self.is_active else context

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record the block as a span."""
        self._enter(name)
        try:
            yield
        finally:
            self._exit(name)

    @contextmanager
    def _recorded(self, name: str, context: AbstractContextManager[None]) -> Iterator[None]:
        with self.during(name), context:
            yield

    def totals(self) -> dict[int, dict[str, list[float]]]:
        """Seconds of each phase, and of possible waits in it, in the latest rounds, by number.

        Disturbed or unfinished rounds only if there are no others. Waits for the device.
        """
        under_way = (0, self._round_began, self.now(), self._spans)
        rounds = [each for each in self._rounds if each[0]] or self._rounds or [under_way]
        self.wait()
        return {number: _total(*rest) for number, *rest in rounds}

    def wait(self) -> None:
        """Wait for the device, and exclude this round."""
        self._is_disturbed = True
        if self._is_cuda:
            torch.cuda.synchronize()

    def _watch(self, name: str, hooks: Hooks) -> None:
        calls: list[tuple[list[Any], Any]] = [
            (hooks.before, self._enter),
            (hooks.after, self._exit),
        ]
        for each, own in calls:
            each.insert(0, bound := partial(own, name))
            self._hooks.callback(each.remove, bound)

    def _is_here(self) -> bool:
        return get_ident() == self._thread or in_backward()  # autograd uses threads of its own

    def _enter(self, name: str) -> None:
        if self._is_here():
            self._last_gradient = None if name == "backward" else self._last_gradient
            self._open.append((name, self.now()))

    def _exit(self, name: str, *_: object) -> None:
        if self._is_here() and name in dict(self._open):
            end = self.now()
            each = None
            while each != name:  # an error may have left spans open
                each, begin = self._open.pop()
                self._keep(each, begin, end, self._open[-1][0] if self._open else _OTHER)
            if name == "backward" and self._last_gradient is not None:
                self._keep(Wait("gradients"), self._last_gradient, end, name)

    def _keep(self, name: str, begin: Any, end: Any, outer: str) -> None:
        for spans in (self._spans, self.trace):
            spans.append((name, outer, begin, end))

    def _note_gradient(self, *_: object) -> None:
        self._last_gradient = self.now()

    def _note_buffers(self, *_: object) -> None:
        if self._open and self._open[-1][0] == "forward":
            self._keep(Wait("buffers"), self._open[-1][1], self.now(), "forward")

    def _before_step(self, optimizer: Any, *_: object) -> None:
        if "optimizer" in dict(self._open):
            return  # torch calls the hooks again for the base class's step
        self._first = self._first or id(optimizer)
        if self._first == id(optimizer):
            now = self.now()
            number = 0 if self._is_disturbed else self.steps
            self._rounds.append((number, self._round_began, now, self._spans))
            self._round_began = now
            self._spans = []
            self._is_disturbed = False
        self._enter("optimizer")

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if "optimizer" not in dict(self._open):
            return
        self._exit("optimizer")
        if self._first == id(optimizer):
            now = self.now()
            self.trace.append((f"step {self.steps}", "", self._step_began, now))
            self.steps = self.steps + 1
            self._step_began = now
            self.on_step(self.steps)


def _event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def _nanoseconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, int) else 1e6 * begin.elapsed_time(end)


def _total(begin: Any, end: Any, spans: Sequence[Span]) -> dict[str, list[float]]:
    totals = defaultdict[str, list[float]](
        lambda: [0.0, 0.0], {_OTHER: [_nanoseconds(begin, end) / 1e9, 0.0]}
    )
    for name, outer, *ends in spans:
        took = _nanoseconds(*ends) / 1e9
        if isinstance(name, Wait):
            totals[outer][1] += took
        else:
            totals[name][0] += took
            totals[outer][0] -= took
    return dict(totals)


class Timings(NamedTuple):
    """Time per phase of a job's steps; ``str()`` of it is a table in milliseconds.

    Attributes:
        steps: number of steps measured: the latest, at most 100. A step ends with each ``step()`` of the first
            optimizer that was stepped; without any, everything is one step.
        seconds: duration of a step. All times are averages over the steps.
        own: each phase's time by rank, without the time that the rank waited for others.
        waited: the time that each rank waited for others.
        delays: by rank and phase, how long the others waited because of it, the longest first.
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
        lines = [
            f"{self.steps} step(s) of {1e3 * self.seconds:.1f} ms on {len(self.waited)} rank(s)"
        ]
        lines.append(f"{'':14}{'mean':>8}{'share':>7}{'fastest rank':>17}{'slowest rank':>17}")
        for name, times in {**self.own, "waits": self.waited}.items():
            mean = sum(times) / len(times)
            ends = "".join(
                f"{f'{1e3 * end:.1f} ({times.index(end)})':>17}" for end in (min(times), max(times))
            )
            lines.append(f"{name:14}{1e3 * mean:8.1f}{mean / self.seconds:7.0%}{ends}")
        for (rank, phase), delay in self.delays.items():
            if delay > _SHOWN * self.seconds:
                lines.append(
                    f"the others wait {1e3 * delay:.1f} ms a step for rank {rank}, in {phase}"
                )
        return "\n".join(lines)


def _latest_timeline(session: Session) -> Timeline | None:
    """Return the timeline of a session that measures now, or else measured last."""
    for observer in session.observers:
        if isinstance(observer, Timeline):
            return observer
    return None


def timings(session: Session) -> Timings:
    """``fabric.timings()`` of the latest steps, with ``Fabric(timings=True)`` or after a profile. Collective."""
    timeline = _latest_timeline(session)
    if timeline is None:
        raise UsageError(
            "fabric.timings()",
            "nothing has been measured",
            suggestion="Fabric(timings=True), profile()",
        )
    rounds = session.runtime.communicator.gather_objects(timeline.totals())
    numbers = [number for number in rounds[0] if all(number in each for each in rounds)]
    names = list(
        dict.fromkeys(name for number in numbers for each in rounds for name in each[number])
    )
    # Dimensions: rounds, ranks, phases.
    rows = [
        [[each[number].get(name, [0.0, 0.0]) for name in names] for each in rounds]
        for number in numbers
    ]
    took, called = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    waits = called - called.amin(1, keepdim=True)
    own = took - waits
    waited = waits.sum(2)
    delays = defaultdict[tuple[int, str], float](float)
    for works, each in zip(own, waited, strict=True) if len(rounds) > 1 else ():
        last = int(each.argmin())
        phase = names[int((works[last] - works.amin(0)).argmax())]
        delays[last, phase] += float((each - each.min()).sum()) / (len(rounds) - 1) / len(numbers)
    means = dict(zip(names, own.mean(0).T.tolist(), strict=True))
    delays = dict(sorted(delays.items(), key=lambda each: -each[1]))
    return Timings(len(numbers), float(took.sum(2).mean()), means, waited.mean(0).tolist(), delays)


@contextmanager
def profile(session: Session, path: str | os.PathLike[str], steps: range | None) -> Iterator[None]:
    """``fabric.profile(path, steps)``: a context that writes one trace, for ui.perfetto.dev or ``chrome://tracing``.

    Collective on entry. The trace has the phases of every step (data, forward, backward, optimizer, save) and the
    collectives of each process, on rank 0's clock. It is written after the last of the steps, or when the context
    exits, even early: rank 0 waits at most ten seconds for the other processes.

    Args:
        session: the session of this process.
        path: the file, written on rank 0; ``.json`` may be omitted.
        steps: a contiguous range, counted from 0 at the start of the context; None for all. A step ends with each
            ``step()`` of the first optimizer that was stepped.

    Raises:
        ConfigurationError, UsageError: ``steps`` is no such range; another profile is active.
        OSError: rank 0 cannot write there; the other ranks raise a UsageError.
    """
    request = f"fabric.profile({path!r}, {steps=})"
    steps = range(2**62) if steps is None else steps
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop:
        raise ConfigurationError(
            request, expected="steps that follow each other, from 0 on, such as range(10, 20)"
        )
    runtime = session.runtime
    current = _latest_timeline(session)
    if current is not None and not current.is_active:
        current = None
    if current is not None and current.on_step is not bool:
        raise UsageError(request, "another profile is under way")
    target = Path(f"{os.fspath(path).removesuffix('.json')}.json")
    store = runtime.store
    with rank_zero_first(runtime.communicator):
        if store.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.open("a").close()
    # See [Note: Clocks].
    readings = [
        (time_ns(), runtime.communicator.barrier("fabric.profile"), time_ns())
        for _ in range(_READINGS)
    ]
    firsts = runtime.communicator.broadcast_object(readings, 0)
    start = firsts[0][0]
    lag = min(left - entered for (entered, *_), (*_, left) in zip(firsts, readings, strict=True))
    topic = f"trace/{start}"
    events = list[dict[str, Any]]()
    calls: list[ProfiledCollective] = []
    for kind, name in (("process_name", f"rank {store.rank}"), ("thread_name", "phases")):
        events.append(
            {"ph": "M", "name": kind, "pid": store.rank, "tid": 0, "args": {"name": name}}
        )

    def add(kind: str, name: str, begin: float, track: int, **options: Any) -> None:
        place = {"pid": store.rank, "tid": track, "ts": (begin - lag - start) / 1e3}
        events.append({"ph": kind, "name": name, "cat": "fabric", **place, **options})

    def finish(mark: Any, began: int) -> None:
        for name, _, begin, end in timeline.trace:
            add("X", name, began + _nanoseconds(mark, begin), 0, dur=_nanoseconds(begin, end) / 1e3)
        for number, (name, begin, end) in enumerate(
            calls
        ):  # they overlap, so each is a pair of events
            add("b", name, begin, 1, id=f"{store.rank}/{number}")
            add("e", name, end, 1, id=f"{store.rank}/{number}")

    def on_step(ended: int) -> None:
        if ended - before == steps.start:
            timeline.wait()
            timeline.trace = deque(maxlen=_MOST_SPANS)
            ends.callback(finish, timeline.now(), time_ns())
            ends.enter_context(profiled(runtime.device, calls))
            ends.callback(timeline.wait)
        elif ended - before == steps.stop:
            ends.close()

    def write() -> None:
        timeline.on_step = bool
        timeline.trace = deque(maxlen=0)
        try:
            store.publish(topic, events)
            if store.rank == 0:
                found = store.read(topic, everyone := range(store.size), _GRACE)
                trace = [event for value in found.values() for event in value]
                target.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
                if missing := {*everyone} - found.keys():
                    warnings.warn(
                        f"{target} lacks {ranks_in_words(missing)}, which did not get to its end",
                        stacklevel=2,
                    )
        except (OSError, RuntimeError) as error:  # must not end the job or hide another error
            warnings.warn(f"{target} was not written: {error}", stacklevel=2)

    with ExitStack() as timelines, ExitStack() as ends:
        if current is None:
            timeline = timelines.enter_context(closing(Timeline(session)))
            session.attach(timeline)
        else:
            timeline = current
        before = timeline.steps
        timeline.on_step = on_step
        ends.callback(write)
        on_step(before)
        yield
