"""Loggers of metrics: the protocol, a table in a text file, and TensorBoard."""

import csv
import io
import json
import numbers
import operator
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol, final, runtime_checkable

import torch

from fabric.errors import ArgumentTypeError, ConfigurationError, MissingDependencyError

__all__ = ["CSVLogger", "Logger", "Loggers", "TensorBoardLogger", "metrics_as_floats"]


@runtime_checkable
class Logger(Protocol):
    """The interface of a logger, which fabric calls on global rank 0 alone.

    Any object with the method :meth:`log_metrics` is a logger. If an object has the methods
    ``log_hyperparams(params)``, ``finalize(status)`` with ``"success"`` or ``"failed"``, or
    ``close()``, these are called, too.
    W&B runs and a ``SummaryWriter`` are accepted as they are. Adapt other trackers like this::

        class MyLogger:
            def log_metrics(self, metrics, step=None):
                tracker.track(metrics, step)
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the values of some metrics.

        Args:
            metrics: names and numbers.
            step: the training step of the metrics, or ``None``.
        """


class Loggers:
    """The loggers of one ``Fabric``; used only on global rank 0, except :meth:`add`."""

    def __init__(self, loggers: Sequence[Any]) -> None:
        self.user_loggers: list[Any] = []  # as the user passed them
        self._loggers: list[Any] = []
        self._has_warned = False
        for logger in loggers:
            self.add(logger)

    def add(self, logger: Any) -> None:
        """Add a logger.

        Raises:
            ArgumentTypeError: the object is not a :class:`Logger`, W&B run or ``SummaryWriter``.
        """
        self._loggers.append(_as_logger(logger))
        self.user_loggers.append(logger)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Pass metrics to each logger, and warn once if there is none."""
        values = metrics_as_floats(metrics)
        if not self._loggers and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "fabric.log has no logger to write to. "
                "Write: Fabric(loggers=CSVLogger()), or fabric.add_logger(...)",
                stacklevel=3,
            )
        for logger in self._loggers:
            logger.log_metrics(values, step)

    def log_hyperparams(self, params: Any) -> None:
        """Pass hyperparameters to each logger that takes them."""
        for logger in self._loggers:
            with suppress(NotImplementedError):  # Lightning's CSVLogger raises it
                _call(logger, "log_hyperparams", params)

    def close(self, status: str) -> None:
        """Finish all loggers, the last one first, even if one raises."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(_call, logger, "close")
                stack.callback(_call, logger, "finalize", status)


def _as_logger(logger: Any) -> Logger:
    """Return a logger as it is, or an adapter for a W&B run or a ``SummaryWriter``."""
    problem = "it is a class"
    if not isinstance(logger, type):
        if callable(getattr(logger, "log_metrics", None)):
            return logger
        if callable(getattr(logger, "add_scalar", None)):
            return _SummaryWriter(logger)
        package, _, _ = type(logger).__module__.partition(".")
        if package == "wandb" and callable(getattr(logger, "log", None)):
            return _WandbRun(logger)
        problem = "it has no method log_metrics(metrics, step)"
    raise ArgumentTypeError(
        f"loggers={logger!r}",
        problem=problem,
        expected="an object with that method, a run of W&B, or a SummaryWriter of TensorBoard",
        suggestion="CSVLogger(); or a class with "
        "def log_metrics(self, metrics, step=None): ... (three lines)",
    )


def _call(logger: Any, name: str, *args: Any) -> None:
    method = getattr(logger, name, None)
    if method is not None:
        method(*args)


@final
class _WandbRun:
    """The run of ``wandb.init()``, as a logger."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Any) -> None:
        self._run.config.update(_as_mapping(params), allow_val_change=True)

    def finalize(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "success"))


class _RunLogger:
    """A logger that writes into the folder of one run, ``root_dir/name/version_k``.

    The folder is created at the first write.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str] = "logs",
        name: str = "run",
        version: int | str | None = None,
    ) -> None:
        self._parent = Path(root_dir) / name
        if isinstance(version, int):
            version = f"version_{version}"
        self._folder_name = version

    def _folder(self) -> Path:
        """Return the folder of the run, after creating it if it does not exist."""
        while self._folder_name is None:
            self._parent.mkdir(parents=True, exist_ok=True)
            folder_name = f"version_{_next_version(self._parent)}"
            with suppress(FileExistsError):  # another process took this number first
                (self._parent / folder_name).mkdir()
                self._folder_name = folder_name
        path = self._parent / self._folder_name
        path.mkdir(parents=True, exist_ok=True)
        return path


def _next_version(parent: Path) -> int:
    """Return the number after the largest one of a ``version_k`` in a folder, or 0."""
    next_version = 0
    for name in os.listdir(parent):
        number = name.removeprefix("version_")
        if number.isdecimal():
            next_version = max(next_version, int(number) + 1)
    return next_version


@final
class CSVLogger(_RunLogger):
    """A logger that writes ``metrics.csv`` and ``hparams.json`` into ``root_dir/name/version_k``.

    It needs no other package. ``metrics.csv`` has a row per call of :meth:`log_metrics`: the column
    ``step``, then one column per metric in order of appearance. Values have every digit, and a cell
    is empty where a metric was not passed. A metric that is logged later adds a column. Each row is
    in the file when the call returns, so that a crash loses nothing. No file or folder is created
    before the first write.

    Args:
        root_dir: folder of all runs.
        name: of the experiment.
        version: ``k``, or a folder name. An existing run is continued. ``None`` takes the next free
            number.
    """

    _columns: Sequence[str] = ()
    _hyperparams: Mapping[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row.

        Args:
            metrics: names, and numbers or tensors of one element.
            step: an integer, or ``None`` for an empty cell.

        Raises:
            ArgumentTypeError: a value is of another type. The text names the metric.
            ConfigurationError: a metric is called ``"step"``.
        """
        values = metrics_as_floats(metrics)
        if "step" in values:
            raise ConfigurationError(
                "log a metric named 'step'",
                problem="that is the column of log_metrics(..., step=...)",
            )
        row = {"step": _as_integer(step), **values}
        path = self._folder() / "metrics.csv"
        if not row.keys() <= set(self._columns):
            self._columns = _add_columns(path, row)
        with open(path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)  # floats with every digit

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json``, with the parameters of earlier calls.

        Values that JSON has no type for are written as text.

        Args:
            params: a mapping, or an object whose attributes are the parameters, such as
                ``argparse.Namespace``.
        """
        self._hyperparams = {**self._hyperparams, **json.loads(_hyperparams_as_json(params))}
        _replace(self._folder() / "hparams.json", json.dumps(self._hyperparams, indent=2) + "\n")

    def close(self) -> None:
        """Do nothing: every row is in the file already."""


class _EventFiles:
    """A logger that uses torch's ``SummaryWriter``, or an object with its methods."""

    _writer: Any = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a scalar per metric, and flush them to the file.

        Args:
            metrics: names, and numbers or tensors of one element.
            step: an integer, or ``None``, which TensorBoard shows as step 0.

        Raises:
            ArgumentTypeError: a value is of another type. The text names the metric.
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        values = metrics_as_floats(metrics)
        step = _as_integer(step)
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add the parameters as JSON text, which appears under TEXT.

        Args:
            params: a mapping, or an object whose attributes are the parameters, such as
                ``argparse.Namespace``.

        Raises:
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        # The HPARAMS page only takes flat numbers and strings. The TEXT page shows Markdown, in
        # which JSON indented by four is a code block.
        text = indent(_hyperparams_as_json(params), "    ")
        writer = self._open()
        writer.add_text("hyperparameters", text)
        writer.flush()

    def close(self) -> None:
        """Close the event file. A later write opens another file in the same folder."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        return self._writer


@final
class _SummaryWriter(_EventFiles):
    """A user's writer, as a logger."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer


@final
class TensorBoardLogger(_EventFiles, _RunLogger):
    """A logger that writes TensorBoard's event files into ``root_dir/name/version_k``.

    Show them with ``tensorboard --logdir root_dir``. The extra ``tensorboard`` is needed, and
    imported at the first write. No file or folder is created before the first write.

    Args:
        root_dir: folder of all runs.
        name: of the experiment.
        version: ``k``, or a folder name. An existing run is continued. ``None`` takes the next free
            number.
    """

    def _open(self) -> Any:
        if self._writer is None:
            suggestion = (
                'pip install "torch-fabric[tensorboard]", or CSVLogger(), which needs no package'
            )
            with MissingDependencyError.unless_installed("TensorBoardLogger", suggestion):
                from torch.utils.tensorboard import SummaryWriter  # slow to import
            self._writer = SummaryWriter(log_dir=str(self._folder()))
        return self._writer


def metrics_as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of metrics as Python floats.

    Args:
        metrics: names, and numbers or tensors of one element. The tensors may be on any device, and
            reading one waits for its device.

    Raises:
        ArgumentTypeError: a name is not a string, or a value is not a number. The text names the
            metric.
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        number = value
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            number = value.item()
        if not isinstance(name, str) or not isinstance(number, numbers.Real):
            raise ArgumentTypeError(
                f"log the metric {name!r} of {value!r}",
                expected="a string as its name, and a number or a real tensor with one element",
            )
        values[name] = float(number)
    return values


def _as_integer(step: int | None) -> int | None:
    """Return a step of any integer type as an int, and None as None."""
    if step is None:
        return None
    return operator.index(step)


def _as_mapping(params: Any) -> dict[str, Any]:
    if isinstance(params, Mapping):
        return dict(params)
    return dict(vars(params))


def _hyperparams_as_json(params: Any) -> str:
    return json.dumps(_as_mapping(params), indent=2, default=str)


def _add_columns(path: Path, names: Iterable[str]) -> list[str]:
    """Add columns to the table, drop a row that a crash cut short, and return all column names."""
    text = ""
    if path.exists():
        text = path.read_bytes().decode()
    complete_rows = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(complete_rows, newline=""))
    columns = list(dict.fromkeys([*(rows.fieldnames or ()), *names]))
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns)
    writer.writeheader()
    writer.writerows(rows)
    _replace(path, table.getvalue())
    return columns


def _replace(path: Path, text: str) -> None:
    """Write a file. A crash leaves the old file or the new one."""
    # Always one name, so that the next call overwrites what a crash has left.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)
