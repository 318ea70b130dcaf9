"""The progress line of a loop, and the printed text of all ranks."""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from io import StringIO
from time import monotonic
from typing import Any, Generic, TypeVar

import torch

from fabric.collectives import gather
from fabric.communicators import Communicator
from fabric.loggers.loggers import metrics_as_floats
from fabric.tree import flatten

__all__ = ["Metrics", "Progress", "print_texts_of_ranks"]

T = TypeVar("T")
Metrics = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_NOTEBOOK_WIDTH = 100  # characters


@dataclass(eq=False)
class Progress(Generic[T]):
    """An iterable over batches that writes a progress line to standard error.

    Attributes:
        batches: a loader or any other iterable.
        description: the beginning of the line.
        metrics: names and numbers at the end of the line, or a function that returns them. They
            are read only when a line is written.
        num_replicas: the number of processes that read different batches.
        is_shown: whether this process writes the line.
    """

    batches: Iterable[T]
    description: str
    metrics: Metrics | None
    num_replicas: int
    is_shown: bool

    def __iter__(self) -> Iterator[T]:
        if not self.is_shown:
            yield from self.batches
            return
        writer = _LineWriter()
        num_batches = 0
        num_samples = 0
        start = monotonic()
        last_write = start
        try:
            for batch in self.batches:
                yield batch
                num_batches += 1
                num_samples += _count_samples(batch)
                now = monotonic()
                if now - last_write > writer.interval:
                    last_write = now
                    writer.update(self._line(num_batches, num_samples, now - start))
        finally:
            writer.finish(self._line(num_batches, num_samples, monotonic() - start))

    def _line(self, num_batches: int, num_samples: int, seconds: float) -> str:
        """Return the line after some batches of this process."""
        position = num_batches + getattr(self.batches, "resumed_at", 0)
        total = 0
        if isinstance(self.batches, Sized):
            total = len(self.batches)

        fields: list[str] = []
        if self.description:
            fields.append(self.description)
        if total:
            fields.append(f"{position}/{total} {position / total:.0%}")
        else:
            fields.append(str(position))
        for name, value in self._read_metrics().items():
            fields.append(f"{name} {value:.4g}")
        fields.append(self._speed(num_batches, num_samples, seconds))
        if num_batches and position < total:
            seconds_left = seconds / num_batches * (total - position)
            fields.append(f"{_format_seconds(seconds_left)} left")
        else:
            fields.append(_format_seconds(seconds))
        fields.append(f"{_peak_memory() / 2**30:.2f} GiB")
        return "  ".join(fields)

    def _read_metrics(self) -> dict[str, float]:
        metrics = self.metrics
        if callable(metrics):
            metrics = metrics()
        return metrics_as_floats(metrics or {})

    def _speed(self, num_batches: int, num_samples: int, seconds: float) -> str:
        """Return the samples of all processes in a second, or the batches of this process."""
        seconds = max(seconds, 1e-9)
        if num_samples:
            return f"{num_samples * self.num_replicas / seconds:,.4g} samples/s"
        return f"{num_batches / seconds:,.4g} batches/s"


class _LineWriter:
    """Writes lines to standard error, in a terminal or notebook each over the line before.

    Attributes:
        interval: seconds between two lines.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr
        is_notebook = type(self._stream).__module__.startswith("ipykernel")
        is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._overwrites = is_notebook or is_terminal
        self._width = shutil.get_terminal_size().columns - 1
        if is_notebook:
            self._width = _NOTEBOOK_WIDTH
        self._length = 0  # of the line that can be overwritten
        self.interval = 0.2 if self._overwrites else 30.0

    def update(self, line: str) -> None:
        """Write a line that a later line replaces if the stream allows it."""
        if not self._overwrites:
            print(line, file=self._stream, flush=True)
            return
        line = line[: self._width]
        print(self._cover_last(line), end="", file=self._stream, flush=True)
        self._length = len(line)

    def finish(self, line: str) -> None:
        """Write the last line."""
        if self._overwrites:
            line = self._cover_last(line)
        print(line, file=self._stream, flush=True)

    def _cover_last(self, line: str) -> str:
        """Return a text that replaces the last line of a terminal, padded to its length."""
        return f"\r{line:{self._length}}"


def _format_seconds(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def _count_samples(batch: Any) -> int:
    """Return the length of the first tensor with dimensions in a batch, or 0."""
    leaves, _ = flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    return 0


def _peak_memory() -> int:
    """Return the peak memory in bytes, of the GPU once it is used, else of this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024  # Linux counts in KiB


def print_texts_of_ranks(
    communicator: Communicator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Print the texts of all ranks on rank 0, each line with its rank. Collective.

    Args:
        communicator: the ranks.
        args: the arguments of ``print`` on this rank.
        kwargs: the keyword arguments of ``print``. Those of rank 0 say where it prints.
    """
    buffer = StringIO()
    print(*args, **{**kwargs, "file": buffer, "flush": False})
    texts = gather(communicator, buffer.getvalue(), 0, communicator.device)
    if texts is None:
        return
    lines: list[str] = []
    for rank, text in enumerate(texts):
        for line in text.splitlines(keepends=True):
            lines.append(f"[rank {rank}] {line}")
    print("".join(lines), **{**kwargs, "end": ""})
