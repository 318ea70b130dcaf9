"""Where the time of a step goes: a table of all ranks, with the one that the others wait for, and a trace.

[Note: Timeline] A *span* is a phase (data, forward, backward, optimizer, save, ...), or a :class:`Wait`. A *step* of
the loop ends with each ``step()`` of the optimizer that stepped first, whatever others do. Times are added up over
*rounds*: from one beginning of such a ``step()`` to the next, where under DDP and FSDP all ranks have just met, so that
a rank is late, and others wait for it, in the same round.

Under DDP and FSDP a phase lasts as long on every rank as on the slowest. So what may be spent in waiting for others is
noted apart: from the last gradient of this rank until its backward pass is over, in the collectives of fabric and FSDP,
and until DDP's buffers have come. What it is beyond that of the rank with the least, the rank has waited; the rest of a
phase is its own. The others wait for the rank that has waited least, in the phase of which its own time is furthest
above that of the fastest rank.

On a CUDA device the times are those of its stream: an event stands at each end of a span, and is read when somebody
asks for the times, steps later.

[Note: Clocks] The times of a trace are those of rank 0's clock. Before it begins, rank 0 writes its time into the store
of the job and enters a barrier, a few times; a rank that leaves the barrier reads what is written. The least difference
that it sees is taken for that of the clocks: too large by the time of a barrier, some tenths of a millisecond.
"""

import json
import os
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import get_ident
from time import monotonic, sleep, time_ns
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fabric._session import Session
from fabric._torch import around_collectives, in_backward, profiled
from fabric.diagnostics.bypass import GradientContract
from fabric.diagnostics.recorder import Hooks, in_words
from fabric.errors import ConfigurationError, UsageError
from fabric.runtime import Runtime
from fabric.store import JobStore

__all__ = ["Timeline", "Timings", "Wait", "compare", "profile", "timings"]

Totals = dict[str, list[float]]  # of each phase its seconds, and those of waits in it

_OTHER, _END = "other", object()  # what is in no phase
_KEPT, _MOST_SPANS = 100, 40_000  # rounds; and spans of a trace, some megabytes in the store of the job
_SHOWN = 0.01  # of a step: nothing is said of shorter waits
_READINGS = 8  # of the clocks
_PATIENCE, _PAUSE = 10.0, 0.02  # seconds for which rank 0 waits for the spans of the others


class Wait(str):
    """The name of a span in which this rank may wait for others."""


class Timeline:
    """What a session does, from hooks around its phases, until it is closed; see ``[Note: Timeline]``.

    Attributes:
        now: a mark of the present time.
        close: removes all hooks; what was measured stays.
        steps: how many have ended.
        on_step: called with that number when one has.
        trace: names and marks of the spans, and of steps, since somebody put a list there.
    """

    def __init__(self, session: Session) -> None:
        runtime, self._thread = session.runtime, get_ident()
        self._has_peers, self._is_cuda = runtime.world.world_size > 1, runtime.device.type == "cuda"
        self.now: Callable[[], Any] = partial(_event, runtime.device) if self._is_cuda else time_ns
        self.on_step: Callable[[int], object] | None = None
        self.trace: list[tuple[str, Any, Any]] | None = None
        self.steps, self._first, self._last_gradient = 0, 0, None
        self._open, self._spans = list[tuple[str, Any]](), list[tuple[str, str, Any, Any]]()
        self._rounds = deque[tuple[int, Any, Any, Any]](maxlen=_KEPT)
        self._step_began = self._round_began = self.now()
        self._is_disturbed = True  # this round, by something beside the loop
        hooks = self._hooks = ExitStack()
        self.close = hooks.close
        hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._watch("backward", session.backward)
        if (recorder := runtime.recorder) is not None:
            recorder.around = lambda entry: self.during(Wait(entry))
            hooks.callback(setattr, recorder, "around", None)
        for model in session.modules:
            self._watch_module(model._fabric_contract, model._fabric_prepared, model._fabric_hooks)
        session._bypass.on_module = self._watch_module
        session.timeline = session.measured = self
        hooks.callback(setattr, session, "timeline", None)
        hooks.callback(setattr, session._bypass, "on_module", None)

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; the wait for each is a phase."""
        fetch = self.during("data")(next)
        while (batch := fetch(batches, _END)) is not _END:
            yield batch

    @contextmanager
    def during(self, name: str, inner: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """A context that is a span, around another one."""
        self._enter(name)
        try:
            with inner or nullcontext():
                yield
        finally:
            self._exit(name)

    def totals(self) -> list[tuple[int, Totals]]:
        """Those of the latest rounds, by number; if no other has ended, of one that was disturbed or is under way.

        Waits for the device.
        """
        under_way = (0, self._round_began, self.now(), self._spans)
        self.wait()
        rounds = [each for each in self._rounds if each[0]] or self._rounds or [under_way]
        return [(number, _total(*rest)) for number, *rest in rounds]

    def wait(self) -> None:
        """Wait for the device, in a round that is not to count."""
        self._is_disturbed = True
        if self._is_cuda:
            torch.cuda.synchronize()

    def _watch(self, name: str, hooks: Hooks) -> None:
        enter, leave = partial(self._enter, name), partial(self._exit, name)
        hooks.before.insert(0, enter)
        hooks.after.insert(0, leave)
        self._hooks.callback(hooks.before.remove, enter)
        self._hooks.callback(hooks.after.remove, leave)

    def _watch_module(self, contract: GradientContract, prepared: nn.Module, forward: Hooks) -> None:
        """Note the forward passes of a prepared module, and when its gradients and buffers are there."""
        self._watch("forward", forward)
        if contract.is_sharded:
            self._hooks.enter_context(around_collectives(prepared, lambda name: self.during(Wait(name))))
        elif self._has_peers:
            trained = (each for each in contract.parameters().values() if each.requires_grad)
            handles = [each.register_post_accumulate_grad_hook(self._note_gradient) for each in trained]
            if contract.needs_forward and any(True for _ in contract.module.buffers()):
                handles.append(contract.module.register_forward_pre_hook(self._note_buffers))
            for handle in handles:
                self._hooks.callback(handle.remove)

    def _is_here(self) -> bool:
        return get_ident() == self._thread or in_backward()  # for which autograd has threads of its own

    def _enter(self, name: str) -> None:
        if self._is_here():
            self._last_gradient = None if name == "backward" else self._last_gradient
            self._open.append((name, self.now()))

    def _exit(self, name: str, *_: object) -> None:
        if self._is_here() and name in dict(self._open):
            end, each = self.now(), None
            while each != name:  # an error may have left others open
                each, begin = self._open.pop()
                self._keep(each, begin, end, self._open[-1][0] if self._open else _OTHER)
            if name == "backward" and self._last_gradient is not None:
                self._keep(Wait("gradients"), self._last_gradient, end, name)

    def _keep(self, name: str, begin: Any, end: Any, outer: str) -> None:
        self._spans.append((name, outer, begin, end))
        if self.trace is not None and len(self.trace) < _MOST_SPANS:
            self.trace.append((name, begin, end))

    def _note_gradient(self, parameter: Any) -> None:
        self._last_gradient = self.now()

    def _note_buffers(self, module: nn.Module, args: Any) -> None:
        if self._open and self._open[-1][0] == "forward":
            self._keep(Wait("buffers"), self._open[-1][1], self.now(), "forward")

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._first = self._first or id(optimizer)
        if self._first == id(optimizer):
            now, number = self.now(), 0 if self._is_disturbed else self.steps
            self._rounds.append((number, self._round_began, now, self._spans))
            self._round_began, self._spans, self._is_disturbed = now, [], False
        self._enter("optimizer")

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._exit("optimizer")
        if self._first == id(optimizer):
            began, self._step_began = self._step_began, self.now()
            if self.trace is not None:
                self.trace.append((f"step {self.steps}", began, self._step_began))
            self.steps += 1
            if self.on_step is not None:
                self.on_step(self.steps)


def _event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _nanoseconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, int) else 1e6 * begin.elapsed_time(end)


def _total(begin: Any, end: Any, spans: Sequence[tuple[str, str, Any, Any]]) -> Totals:
    totals = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for name, outer, *ends in [*spans, (_OTHER, "", begin, end)]:
        took = _nanoseconds(*ends) / 1e9
        if isinstance(name, Wait):
            totals[outer][1] += took
        else:
            totals[name][0] += took
            totals[outer][0] -= took
    del totals[""]
    return dict(totals)


@dataclass(frozen=True)
class Timings:
    """Where the steps of a job go; ``str()`` of it is a table in milliseconds.

    Attributes:
        steps: how many it is of, the latest hundred at most. A step ends with each ``step()`` of the optimizer that
            stepped first; without any, all is one step.
        seconds: that one of them takes. All times are averages over them.
        own: of each phase, by rank: what it took without what the rank waited for others.
        waited: that, by rank.
        delays: for a rank and its phase, how long the others waited because of it, the longest first.
    """

    steps: int
    seconds: float
    own: Mapping[str, Sequence[float]]
    waited: Sequence[float]
    delays: Mapping[tuple[int, str], float]

    @property
    def slowest(self) -> tuple[int, str] | None:
        """The rank that the others wait for longest, and its phase; None where there are no others."""
        return next(iter(self.delays), None)

    def __str__(self) -> str:
        lines = [f"{self.steps} step(s) of {1e3 * self.seconds:.1f} ms on {len(self.waited)} rank(s)"]
        lines.append(f"{'':14}{'mean':>8}{'share':>7}{'fastest rank':>17}{'slowest rank':>17}")
        for name, times in {**self.own, "waits": self.waited}.items():
            mean = sum(times) / len(times)
            ends = "".join(f"{f'{1e3 * end:.1f} ({times.index(end)})':>17}" for end in (min(times), max(times)))
            lines.append(f"{name:14}{1e3 * mean:8.1f}{mean / self.seconds:7.0%}{ends}")
        for (rank, phase), delay in self.delays.items():
            if delay > _SHOWN * self.seconds:
                lines.append(f"the others wait {1e3 * delay:.1f} ms a step for rank {rank}, in {phase}")
        return "\n".join(lines)


def compare(ranks: Sequence[Sequence[tuple[int, Totals]]]) -> Timings:
    """The timings of a job, from the totals of the rounds of each rank."""
    rounds = [dict(each) for each in ranks]
    numbers = [number for number in rounds[0] if all(number in each for each in rounds)]
    names = list(dict.fromkeys(name for number in numbers for each in rounds for name in each[number]))
    # In dimensions of rounds, ranks and phases.
    rows = [[[each[number].get(name, [0.0, 0.0]) for name in names] for each in rounds] for number in numbers]
    took, called = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    waits = called - called.amin(1, keepdim=True)
    own, waited, delays = took - waits, waits.sum(2), defaultdict[tuple[int, str], float](float)
    for works, each in zip(own, waited, strict=True):
        last = int(each.argmin())
        phase = names[int((works[last] - works.amin(0)).argmax())]
        if len(ranks) > 1:
            delays[last, phase] += float((each - each.min()).sum()) / (len(ranks) - 1) / len(numbers)
    means = dict(zip(names, own.mean(0).T.tolist(), strict=True))
    delays = dict(sorted(delays.items(), key=lambda each: -each[1]))
    return Timings(len(numbers), float(took.sum(2).mean()), means, waited.mean(0).tolist(), delays)


def timings(session: Session) -> Timings:
    """``fabric.timings()``, under ``Fabric(timings=True)`` and from a profile on: of the latest steps. Collective."""
    if session.measured is None:
        suggestion = "Fabric(timings=True), or with fabric.profile(path): around some steps"
        raise UsageError("fabric.timings()", "nothing has been measured", suggestion=suggestion)
    return compare(session.runtime.communicator.gather_objects(session.measured.totals()))


@contextmanager
def profile(session: Session, path: str | os.PathLike[str], steps: range | None) -> Iterator[None]:
    """``fabric.profile(path, steps)``: a context that writes one trace, for ui.perfetto.dev or ``chrome://tracing``.

    Collective on entering. The trace has the phases of every step (data, forward, backward, optimizer, save) and the
    collectives of each process, in the time of the first one. It is written after the last of the steps, or where the
    context ends, be it early: the first process waits ten seconds at most for one that does not get there.

    Args:
        session: of this process.
        path: the file, on the first process; ``.json`` may be left out.
        steps: those that follow each other, counted from 0 where the context begins; None for all. A step ends with
            each ``step()`` of the optimizer that stepped first.

    Raises:
        ConfigurationError, UsageError: other steps; another profile is under way.
        OSError: the first process cannot write there, of which the others raise a UsageError.
    """
    request, steps = f"fabric.profile({path!r}, {steps=})", range(sys.maxsize) if steps is None else steps
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop:
        raise ConfigurationError(request, expected="steps that follow each other, from 0 on, such as range(10, 20)")
    if session.timeline is not None and session.timeline.on_step is not None:
        raise UsageError(request, "another profile is under way")
    target, store = Path(f"{os.fspath(path).removesuffix('.json')}.json"), session.runtime.store
    with session.rank_zero_first(local=False):
        if store.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.open("a").close()
    topic, lag = _compare_clocks(session.runtime)
    rows, before = list[tuple[str, int, float, float]](), 0

    @contextmanager
    def tracing() -> Iterator[None]:
        timeline.wait()
        mark, began, timeline.trace = timeline.now(), time_ns() - lag, []
        calls = list[tuple[str, int, int]]()
        try:
            with profiled(session.runtime.device) as calls:
                yield
        finally:
            timeline.wait()
            rows.extend((name, 1, begin - lag, end - begin) for name, begin, end in calls)
            for name, begin, end in timeline.trace:
                rows.append((name, 0, began + _nanoseconds(mark, begin), _nanoseconds(begin, end)))
            timeline.trace = None

    def on_step(ended: int) -> None:
        if ended - before == steps.start:
            under_way.enter_context(tracing())
        elif ended - before == steps.stop:
            under_way.close()

    def write() -> None:
        try:
            store.publish(topic, rows)
            if store.rank == 0:
                _write(target, store, topic)
        except (OSError, RuntimeError) as error:  # which must not end a job, nor take the place of another error
            warnings.warn(f"{target} was not written: {error}", stacklevel=2)

    with nullcontext(session.timeline) if session.timeline else closing(Timeline(session)) as timeline:
        before, timeline.on_step = timeline.steps, on_step
        with ExitStack() as under_way:
            under_way.callback(write)
            under_way.callback(setattr, timeline, "on_step", None)
            on_step(before)
            yield


def _compare_clocks(runtime: Runtime) -> tuple[str, int]:
    """A topic for a trace, and by how much the clock of this rank is ahead of rank 0's; see ``[Note: Clocks]``."""
    topic, store, lags = runtime.communicator.broadcast_object(f"trace/{time_ns()}", 0), runtime.store, [0]
    for number in range(_READINGS if runtime.world.world_size > 1 else 0):
        if store.rank == 0:
            store.set(f"{topic}/clock/{number}", str(time_ns()))
        runtime.communicator.barrier("fabric.profile")
        if left := store.rank and time_ns():
            lags.append(left - int(store.from_rank0(f"{topic}/clock/{number}", b"")))
    return topic, min(lags[1:], default=0)


def _write(path: Path, store: JobStore, topic: str) -> None:
    """Write what the ranks publish."""
    everyone, deadline = range(store.size), monotonic() + _PATIENCE
    while len(found := store.read(topic, everyone)) < len(everyone) and monotonic() < deadline:
        sleep(_PAUSE)
    zero, events = min((begin for rows in found.values() for _, _, begin, _ in rows), default=0), list[dict[str, Any]]()
    for rank, rows in found.items():
        for kind, name in (("process_name", f"rank {rank}"), ("thread_name", "phases")):
            events.append({"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": {"name": name}})
        for number, (name, track, begin, took) in enumerate(rows):
            event = {"ph": "X", "name": name, "cat": "fabric", "pid": rank, "tid": track, "ts": (begin - zero) / 1e3}
            if track:  # calls overlap each other, for which there are events with two ends
                end = event["ts"] + took / 1e3
                events += [{**event, "ph": "b", "id": number}, {**event, "ph": "e", "id": number, "ts": end}]
            else:
                events.append({**event, "dur": took / 1e3})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    if missing := set(everyone) - found.keys():
        warnings.warn(f"{path} lacks {in_words(missing)}, which did not get to its end", stacklevel=2)
