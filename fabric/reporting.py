"""What a loop reports, mostly on the first process: text, progress, metrics, hyperparameters, times."""

import io
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from textwrap import indent
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from fabric import collectives
from fabric._plan import Plan
from fabric._session import Session
from fabric.loggers import Loggers, metrics_as_floats
from fabric.tree import flatten
from fabric.world import World

if TYPE_CHECKING:
    from fabric.tools.timeline import Timings

__all__ = ["Progress", "Reporting"]

T = TypeVar("T")
Metrics = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class Reporting:
    """The part of ``Fabric`` that reports what a loop does."""

    _plan: Plan
    _session: Session | None
    _callbacks: list[Any]
    _loggers: Loggers
    _running: Callable[[str], Session]  # begins it for a call of that name

    @property
    def logger(self) -> Any:
        """The first logger, or None; the user's own, which called directly writes on each process: see :meth:`log`."""
        return next(iter(self._loggers.given), None)

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return list(self._loggers.given)

    def describe(self) -> str:
        """A short text of what was resolved and what was set up, so that nothing is hidden. Not a collective."""
        return "\n".join(
            [*self._plan.describe(), *(self._session.describe() if self._session else [])]
        )

    __repr__ = describe

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def profile(
        self, path: str | os.PathLike[str], steps: range | None = None
    ) -> AbstractContextManager[None]:
        """A context that writes a trace of all processes; see :func:`fabric.timeline.profile`. Collective."""
        from fabric.tools.timeline import profile  # few programs need it

        return profile(self._running("profile"), path, steps)

    def timings(self) -> "Timings":
        """Return where the time of the latest steps went, and which rank the others wait for.

        Collective. See :class:`fabric.tools.timeline.Timings`.
        """
        from fabric.tools.timeline import timings  # few programs need it

        return timings(self._running("timings"))

    def print(self, *args: Any, all_ranks: bool = False, **kwargs: Any) -> None:
        """``print`` on the first process only; or with ``all_ranks`` the text of each, by rank, with its prefix.

        Collective with ``all_ranks``.
        """
        if all_ranks:
            communicator = self._running("print").strategy.communicator()
            print(*args, **{**kwargs, "file": (text := io.StringIO()), "flush": False})
            parts = collectives.gather(communicator, text.getvalue(), 0, communicator.device) or []
            args = (
                "".join(indent(part, f"[rank {rank}] ", bool) for rank, part in enumerate(parts)),
            )
            kwargs |= {"end": ""}
        if self._is_first():
            print(*args, **kwargs)

    def progress(
        self, batches: Iterable[T], desc: str = "", metrics: Metrics = None
    ) -> Iterable[T]:
        """Yield what ``batches``, a loader or any iterable, yields; the first process writes how far the loop is.

        The line goes to standard error: written over in a terminal and a notebook, a new one every 30 s elsewhere. It
        has samples a second, of all processes, counted by dim 0 of a batch's first tensor; the time left; the peak
        memory; and ``metrics``, names and numbers or a function that returns them. They are read when a line is
        written, which waits for a tensor on a device. A set-up loader whose position was loaded counts on from there.
        """
        ranks = (
            self._running("progress").strategy.distributed_sampler_kwargs or {"num_replicas": 1}
        )["num_replicas"]
        return Progress(batches, desc, metrics, ranks, self._is_first())

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``hook_name`` of every callback that has it, in their order, on this process."""
        for callback in self._callbacks:
            hook = getattr(callback, hook_name, None)
            if hook is not None:
                hook(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Hand one metric to every logger, on the first process only; see :meth:`log_dict`."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Hand metrics to every logger, on the first process only.

        They are numbers and tensors of one element, which are read: that waits for the device. ``step`` may be None.
        """
        if self._is_first():
            self._loggers.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any) -> None:
        """Hand what the run was started with, a mapping or a namespace, to every logger that takes it, on rank 0."""
        if self._is_first():
            self._loggers.log_hyperparams(params)

    def add_logger(self, logger: Any) -> None:
        """Log to one more from now on: in every process of a launched job, or before it. See :mod:`fabric.loggers`."""
        self._loggers.add(logger)

    def _is_first(self) -> bool:
        return (self._plan.world or World()).rank == 0


@dataclass(eq=False)
class Progress(Generic[T]):
    """Yields what ``batches`` does and writes how far the loop is to standard error; see ``Fabric.progress``."""

    batches: Iterable[T]
    desc: str
    metrics: Metrics
    ranks: int
    is_shown: bool

    def __iter__(self) -> Iterator[T]:
        if not self.is_shown:
            yield from self.batches
            return
        stream = sys.stderr
        is_notebook = type(stream).__module__.startswith("ipykernel")
        is_live = is_notebook or (stream.isatty() and os.environ.get("TERM") != "dumb")
        width = 100 if is_notebook else shutil.get_terminal_size().columns - 1
        start = shown = monotonic()
        own = 0
        samples = 0
        line = ""
        try:
            for batch in self.batches:
                yield batch
                own = own + 1
                samples = samples + _samples(batch)
                if monotonic() - shown > (0.2 if is_live else 30):
                    shown = monotonic()
                    before = len(line)
                    line = self._line(own, samples, shown - start)[: width if is_live else None]
                    text, after = (f"\r{line:{before}}", "") if is_live else (line, "\n")
                    print(text, end=after, file=stream, flush=True)
        finally:
            end = self._line(own, samples, monotonic() - start)
            print(f"\r{end:{len(line)}}" if is_live else end, file=stream, flush=True)

    def _line(self, own: int, samples: int, seconds: float) -> str:
        done = own + getattr(self.batches, "resumed_at", 0)
        total = len(self.batches) if hasattr(self.batches, "__len__") else 0  # pyright: ignore[reportArgumentType]
        metrics = metrics_as_floats(
            (self.metrics() if callable(self.metrics) else self.metrics) or {}
        )
        rate, unit = (samples * self.ranks, "samples") if samples else (own, "batches")
        parts = [self.desc, f"{done}/{total} {done / total:.0%}" if total else f"{done}"]
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        parts += [f"{rate / max(seconds, 1e-9):,.4g} {unit}/s"]
        parts += [
            f"{_clock(seconds / own * (total - done))} left"
            if own and done < total
            else _clock(seconds)
        ]
        return "  ".join(filter(None, [*parts, f"{_peak_memory() / 2**30:.2f} GiB"]))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{second:02}"
        if minutes >= 60
        else f"{minutes}:{second:02}"
    )


def _samples(batch: Any) -> int:
    return next(
        (len(leaf) for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()),
        0,
    )


def _peak_memory() -> int:
    """Bytes: of the accelerator once it is used, else of this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
