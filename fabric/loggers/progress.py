"""The progress line of a loop, and printing the texts of all ranks on rank 0."""

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

from fabric.accelerators import initialized_device_module
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
        description: the beginning of the line. It may be empty.
        metrics: names and numbers that the line shows, or a function that returns them. They are
            read only when a line is written, since reading a tensor waits for its device. None
            shows no metrics.
        num_replicas: the number of processes that read different batches.
        is_shown: whether this process writes the line.
    """

    batches: Iterable[T]
    description: str
    metrics: Metrics | None
    num_replicas: int
    is_shown: bool

    def __iter__(self) -> Iterator[T]:
        """Yield the batches, and write the line at intervals and at the end of the loop."""
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
                # The body of the user's loop has run for this batch when execution comes here.
                num_batches += 1
                num_samples += _count_samples(batch)
                now = monotonic()
                if now - last_write > writer.interval:
                    last_write = now
                    writer.update(self._format_line(num_batches, num_samples, seconds=now - start))
        finally:
            # Also after a break or an error in the loop.
            seconds = monotonic() - start
            writer.finish(self._format_line(num_batches, num_samples, seconds))

    def _format_line(self, num_batches: int, num_samples: int, seconds: float) -> str:
        """Return the text of the line.

        Args:
            num_batches: the number of batches of this process since the loop began.
            num_samples: the number of samples in these batches. 0 if it is unknown.
            seconds: the time since the loop began.
        """
        # A loader of Fabric.setup_dataloaders that was restored from a checkpoint begins in the
        # middle of the epoch, at the batch ``resumed_at``.
        position = num_batches + getattr(self.batches, "resumed_at", 0)
        total = 0  # 0 stands for an unknown length
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
        fields.append(self._format_speed(num_batches, num_samples, seconds))
        # False if the length is unknown, since total is then 0.
        has_estimate = num_batches > 0 and position < total
        if has_estimate:
            seconds_left = seconds / num_batches * (total - position)
            fields.append(f"{_format_seconds(seconds_left)} left")
        else:
            fields.append(_format_seconds(seconds))
        fields.append(f"{_peak_memory() / 2**30:.2f} GiB")
        return "  ".join(fields)

    def _read_metrics(self) -> dict[str, float]:
        """Return the metrics as floats. The dict is empty if there are none."""
        metrics = self.metrics
        if callable(metrics):
            metrics = metrics()
        return metrics_as_floats(metrics or {})

    def _format_speed(self, num_batches: int, num_samples: int, seconds: float) -> str:
        """Return the samples per second of all processes, as a text.

        If the number of samples is unknown (``num_samples`` is 0), return the batches per second of
        this process.
        """
        seconds = max(seconds, 1e-9)  # never divide by zero
        if num_samples:
            # The other processes are assumed to be equally fast, so that no collective is needed.
            return f"{num_samples * self.num_replicas / seconds:,.4g} samples/s"
        return f"{num_batches / seconds:,.4g} batches/s"


class _LineWriter:
    """Writes the states of a progress line to standard error.

    In a terminal or notebook, a new line is written over the last one.

    Attributes:
        interval: the time between two lines, in seconds.
    """

    def __init__(self) -> None:
        """Choose how lines are written, from the kind of the current ``sys.stderr``."""
        self._stream = sys.stderr
        is_notebook = type(self._stream).__module__.startswith("ipykernel")
        # A dumb terminal, such as that of an editor, cannot return to the beginning of a line.
        is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._can_overwrite = is_notebook or is_terminal
        # One column stays free: some terminals begin a new line after the last column.
        self._max_length = shutil.get_terminal_size().columns - 1
        if is_notebook:
            self._max_length = _NOTEBOOK_WIDTH
        # The length of the last line that can be overwritten, in characters.
        self._last_length = 0
        # A line that cannot be overwritten stays, as in a log file, so lines are rarer.
        self.interval = 0.2 if self._can_overwrite else 30.0

    def update(self, line: str) -> None:
        """Write a line that later lines overwrite, if the stream allows it."""
        if not self._can_overwrite:
            print(line, file=self._stream, flush=True)
            return
        # A longer line would take several rows of the screen, and "\r" returns only to the
        # beginning of the last row.
        line = line[: self._max_length]
        text = self._overwriting_text(line)
        print(text, end="", file=self._stream, flush=True)
        self._last_length = len(line)

    def finish(self, line: str) -> None:
        """Write the last line, which stays."""
        if self._can_overwrite:
            line = self._overwriting_text(line)
        print(line, file=self._stream, flush=True)

    def _overwriting_text(self, line: str) -> str:
        """Return a text that overwrites the previous line with ``line``."""
        # A carriage return, then the line, padded with spaces to the length of the previous line.
        return f"\r{line:{self._last_length}}"


def _format_seconds(seconds: float) -> str:
    """Return a duration as ``M:SS`` or ``H:MM:SS``."""
    all_minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(all_minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def _count_samples(batch: Any) -> int:
    """Return the number of samples in a batch, or 0 if the batch holds no tensor with dimensions.

    The first such tensor is assumed to have one row for each sample.
    """
    leaves, _ = flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return len(leaf)
    return 0


def _peak_memory() -> int:
    """Return the peak memory of the accelerator in bytes, or of the process if it uses none."""
    hardware = initialized_device_module()
    if hardware is not None and hasattr(hardware.module, "max_memory_allocated"):
        return hardware.module.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # macOS counts in bytes
    return peak * 1024  # Linux counts in KiB


def print_texts_of_ranks(
    communicator: Communicator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Print the texts of all ranks on rank 0, each line after the number of its rank. Collective.

    Args:
        communicator: the ranks.
        args: the arguments of ``print`` on this rank.
        kwargs: the keyword arguments of ``print`` on this rank. ``file`` and ``flush`` are used
            only on rank 0.
    """
    # Print to memory, so that the text of each rank is what its own print() would have written.
    buffer = StringIO()
    print(*args, **{**kwargs, "file": buffer, "flush": False})
    texts = gather(communicator, buffer.getvalue(), dst=0, device=communicator.device)
    if texts is None:
        return  # this is not rank 0
    lines: list[str] = []
    for rank, text in enumerate(texts):
        for line in text.splitlines(keepends=True):
            lines.append(f"[rank {rank}] {line}")
    # The texts have their line ends already.
    print("".join(lines), **{**kwargs, "end": ""})
