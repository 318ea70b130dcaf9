"""A line of progress: written over in a terminal and a notebook, elsewhere a new line now and then."""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic
from typing import Any, Generic, TypeVar

import torch

from fabric.loggers import metrics_as_floats
from fabric.tree import flatten

__all__ = ["Metrics", "Progress"]

T = TypeVar("T")
Metrics = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class Progress(Generic[T]):
    """Yields what ``batches`` does and writes how far the loop is to standard error; see ``Fabric.progress``."""

    def __init__(self, batches: Iterable[T], desc: str, metrics: Metrics, ranks: int, is_shown: bool) -> None:
        self._batches, self._desc, self._metrics, self._ranks, self._is_shown = batches, desc, metrics, ranks, is_shown

    def __iter__(self) -> Iterator[T]:
        if not self._is_shown:
            yield from self._batches
            return
        stream = sys.stderr
        is_notebook = type(stream).__module__.startswith("ipykernel")
        is_live = is_notebook or (stream.isatty() and os.environ.get("TERM") != "dumb")
        width = 100 if is_notebook else shutil.get_terminal_size().columns - 1
        start = shown = monotonic()
        done, samples, line = 0, 0, ""
        try:
            for batch in self._batches:
                yield batch
                done, samples = done + 1, samples + _samples(batch)
                if monotonic() - shown > (0.2 if is_live else 30):
                    shown, before = monotonic(), len(line)
                    line = self._line(done, samples, shown - start)[: width if is_live else None]
                    text, after = (f"\r{line:{before}}", "") if is_live else (line, "\n")
                    print(text, end=after, file=stream, flush=True)
        finally:
            end = self._line(done, samples, monotonic() - start)
            print(f"\r{end:{len(line)}}" if is_live else end, file=stream, flush=True)

    def _line(self, done: int, samples: int, seconds: float) -> str:
        total = len(self._batches) if hasattr(self._batches, "__len__") else 0  # pyright: ignore[reportArgumentType]
        metrics = metrics_as_floats((self._metrics() if callable(self._metrics) else self._metrics) or {})
        rate, unit = (samples * self._ranks, "samples") if samples else (done, "batches")
        is_under_way = 0 < done < total
        parts = [self._desc, f"{done}/{total} {done / total:.0%}" if total else f"{done}"]
        parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
        parts += [f"{rate / max(seconds, 1e-9):,.4g} {unit}/s"]
        parts += [f"{_clock(seconds / done * (total - done))} left" if is_under_way else _clock(seconds)]
        return "  ".join(filter(None, [*parts, f"{_peak_memory() / 2**30:.2f} GiB"]))


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}" if minutes >= 60 else f"{minutes}:{second:02}"


def _samples(batch: Any) -> int:
    return next((len(leaf) for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def _peak_memory() -> int:
    """Bytes: of the accelerator once it is used, else of this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
