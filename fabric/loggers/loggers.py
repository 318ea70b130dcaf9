"""Loggers of metrics: the interface, a logger of CSV files, and a logger for TensorBoard."""

import csv
import io
import json
import numbers
import operator
import os
import sys
import traceback
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
    """The interface of a logger. fabric calls a logger only on global rank 0.

    Any object with the method :meth:`log_metrics` is a logger. An object may also have the methods
    ``log_hyperparams(params)``, ``finalize(status)`` and ``close()``, which fabric then calls, too.
    The status is ``"success"`` or ``"failed"``. Runs of W&B and a ``SummaryWriter`` are accepted as
    they are. Adapt other trackers like this::

        class MyLogger:
            def log_metrics(self, metrics, step=None):
                tracker.track(metrics, step)
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the values of some metrics.

        Args:
            metrics: the values by the names of the metrics.
            step: the training step of the metrics. None if the caller gave no step.
        """


class Loggers:
    """The loggers of one ``Fabric``.

    :meth:`add` is called on every rank, and the other methods only on global rank 0.

    Args:
        loggers: loggers, runs of W&B or objects like ``SummaryWriter``.

    Attributes:
        user_loggers: the objects as the user passed them, which ``Fabric.loggers`` returns.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        """Add all loggers. See :meth:`add` for the error."""
        self.user_loggers: list[Any] = []
        # The user's objects, or adapters of them, in the same order.
        self._loggers: list[Logger] = []
        # Whether log_metrics() has warned that there is no logger.
        self._has_warned = False
        for logger in loggers:
            self.add(logger)

    def add(self, logger: Any) -> None:
        """Add a logger of the user. If it is no :class:`Logger`, fabric calls an adapter of it.

        Raises:
            ArgumentTypeError: the object is not a :class:`Logger`, W&B run or ``SummaryWriter``.
        """
        self._loggers.append(_as_logger(logger))
        self.user_loggers.append(logger)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Pass metrics to each logger as floats. Warn once if there is no logger."""
        # The values are converted even without a logger, so that a wrong value is always an error.
        values = metrics_as_floats(metrics)
        if not self._loggers and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "fabric.log has no logger to write to. "
                "Write: Fabric(loggers=CSVLogger()), or fabric.add_logger(...)",
                stacklevel=3,  # the line of the user, who calls Fabric.log or Fabric.log_dict
            )
        for logger in self._loggers:
            logger.log_metrics(values, step)

    def log_hyperparams(self, params: Any) -> None:
        """Pass hyperparameters to each logger that has a method for them."""
        for logger in self._loggers:
            # Lightning's CSVLogger has the method, which raises NotImplementedError.
            with suppress(NotImplementedError):
                _call_if_present(logger, "log_hyperparams", params)

    def close(self, status: str) -> None:
        """Finish and close all loggers, even if one of them raises.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        # An ExitStack calls all of its functions, even if some of them raise. It calls the last one
        # first: finalize() is added after close(), and so it is called before close().
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(_call_if_present, logger, "close")
                stack.callback(_call_if_present, logger, "finalize", status)

    def close_at_exit(self, status: str) -> None:
        """Finish and close all loggers, and print an error in place of raising it.

        Called while the interpreter exits. An error of a logger must not change the exit code,
        which tells whether the training has succeeded.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        try:
            self.close(status)
        except Exception:  # noqa: BLE001 - printed with the errors that have caused it
            print(
                "[fabric] a logger has failed at the end of the program. Its last values may be "
                "missing. The exit code is that of the training.",
                file=sys.stderr,
            )
            traceback.print_exc()


def _as_logger(logger: Any) -> Logger:
    """Return a logger as it is, or an adapter for a W&B run or a ``SummaryWriter``.

    The kind of the object is found by its methods, so that neither package is imported.

    Raises:
        ArgumentTypeError: the object is none of these.
    """
    if isinstance(logger, type):
        raise _logger_error(logger, problem="it is a class")
    if callable(getattr(logger, "log_metrics", None)):
        return logger
    if callable(getattr(logger, "add_scalar", None)):
        return _SummaryWriterAdapter(logger)
    # The package is checked, too, since many objects have a method "log".
    package, _, _ = type(logger).__module__.partition(".")
    if package == "wandb" and callable(getattr(logger, "log", None)):
        return _WandbAdapter(logger)
    raise _logger_error(logger, problem="it has no method log_metrics(metrics, step)")


def _logger_error(logger: Any, problem: str) -> ArgumentTypeError:
    """Return the error for an object that is no logger."""
    return ArgumentTypeError(
        f"loggers={logger!r}",
        problem=problem,
        expected="an object with that method, a run of W&B, or a SummaryWriter of TensorBoard",
        suggestion="CSVLogger(); or a class with "
        "def log_metrics(self, metrics, step=None): ... (three lines)",
    )


def _call_if_present(logger: Any, name: str, *args: Any) -> None:
    """Call an optional method of a logger. Do nothing if the logger does not have the method."""
    method = getattr(logger, name, None)
    if method is not None:
        method(*args)


@final
class _WandbAdapter:
    """A logger that writes to the run that ``wandb.init()`` returned."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(metrics), step=step)

    def log_hyperparams(self, params: Any) -> None:
        self._run.config.update(_as_mapping(params), allow_val_change=True)

    def finalize(self, status: str) -> None:
        has_failed = status != "success"
        self._run.finish(exit_code=int(has_failed))


class _RunLogger:
    """The base class of loggers that write into the folder of one run.

    The folder is ``root_dir/name/version_k``. It is created at the first write.

    Args:
        root_dir: the folder of all runs.
        name: the name of the experiment.
        version: a number ``k``, or the name of the run's folder. An existing run is continued.
            None, the default, takes the next free number.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str] = "logs",
        name: str = "run",
        version: int | str | None = None,
    ) -> None:
        """Choose the folder. Nothing is created before the first write."""
        self._parent_folder = Path(root_dir) / name
        if isinstance(version, int):
            version = f"version_{version}"
        # If no version is given, it is None until the first write chooses a number.
        self._folder_name = version

    def _ensure_folder(self) -> Path:
        """Return the folder of the run. The first call creates it."""
        while self._folder_name is None:
            self._parent_folder.mkdir(parents=True, exist_ok=True)
            folder_name = f"version_{_next_version(self._parent_folder)}"
            # mkdir() fails if another process has taken the number. Then try the next number.
            with suppress(FileExistsError):
                (self._parent_folder / folder_name).mkdir()
                self._folder_name = folder_name
        path = self._parent_folder / self._folder_name
        # If the user gave the version, the loop was skipped, and the folder may not exist.
        path.mkdir(parents=True, exist_ok=True)
        return path


def _next_version(parent_folder: Path) -> int:
    """Return the number after the largest ``k`` of the names ``version_k`` in a folder, or 0."""
    next_version = 0
    for name in os.listdir(parent_folder):
        # A name that is only a number counts, too. At worst, this skips a number.
        number = name.removeprefix("version_")
        if number.isdecimal():
            next_version = max(next_version, int(number) + 1)
    return next_version


@final
class CSVLogger(_RunLogger):
    """A logger that writes ``metrics.csv`` and ``hparams.json`` into ``root_dir/name/version_k``.

    It needs no other package. ``metrics.csv`` has a row for each call of :meth:`log_metrics`. The
    first column is ``step``, and each metric has a column, in order of appearance. A metric that is
    logged later adds a column. A cell is empty if the metric was not passed in that call. Values
    are written with every digit. Each row is in the file when the call returns, so that a crash
    loses no row. No file or folder is created before the first write.

    Args:
        root_dir: the folder of all runs.
        name: the name of the experiment.
        version: a number ``k``, or the name of the run's folder. An existing run is continued.
            None, the default, takes the next free number.
    """

    # The columns that the file has. Empty before the first write, even if a run is continued.
    _columns: Sequence[str] = ()
    # The hyperparameters of all calls, as JSON values.
    _hyperparams: Mapping[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row.

        Args:
            metrics: the values by the names of the metrics: numbers or tensors of one element.
            step: an integer, or None for an empty cell.

        Raises:
            ArgumentTypeError: a value is neither a number nor a tensor of one element. The message
                names the metric.
            ConfigurationError: a metric is called ``"step"``.
        """
        values = metrics_as_floats(metrics)
        if "step" in values:
            raise ConfigurationError(
                "log a metric named 'step'",
                problem="that is the column of log_metrics(..., step=...)",
            )
        self.append_row({"step": _as_integer(step), **values})

    def append_row(self, row: Mapping[str, Any], *, sorts_columns: bool = False) -> None:
        """Append a row of values. A value need not be a number: a text is written unchanged.

        Args:
            row: the values by the names of the columns.
            sorts_columns: whether a new column takes its place in alphabetical order, and not the
                last place.
        """
        path = self._ensure_folder() / "metrics.csv"
        # Before the first write _columns is empty, so that this is true. The file of a continued
        # run has columns already: _rewrite_with_columns() reads them, and adds the new ones.
        has_new_column = not row.keys() <= set(self._columns)
        if has_new_column:
            self._columns = _rewrite_with_columns(path, row, sorts_columns=sorts_columns)
        with open(path, "a", newline="", encoding="utf-8") as file:
            # csv writes a float by repr(), which loses no digit. A missing metric is an empty cell.
            csv.DictWriter(file, self._columns).writerow(row)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json`` with the parameters of this call and of earlier calls.

        Values that JSON has no type for are written as text.

        Args:
            params: a mapping, or an object whose attributes are the parameters, such as
                ``argparse.Namespace``.
        """
        # Converted to JSON and back, so that all values have a type of JSON.
        new_hyperparams = json.loads(_hyperparams_as_json(params))
        self._hyperparams = {**self._hyperparams, **new_hyperparams}
        text = json.dumps(self._hyperparams, indent=2) + "\n"
        _replace_file(self._ensure_folder() / "hparams.json", text)

    def close(self) -> None:
        """Do nothing, since every row is in the file already."""


class _EventFileLogger:
    """The base class of loggers that write TensorBoard's event files.

    They use torch's ``SummaryWriter``, or an object with the same methods.
    """

    # The ``SummaryWriter``. None before _open_writer() has created it.
    _writer: Any = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a scalar for each metric, and write the scalars to the file.

        Args:
            metrics: the values by the names of the metrics: numbers or tensors of one element.
            step: an integer, or None, which TensorBoard shows as step 0.

        Raises:
            ArgumentTypeError: a value is neither a number nor a tensor of one element. The message
                names the metric.
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        values = metrics_as_floats(metrics)
        step = _as_integer(step)
        writer = self._open_writer()
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add the parameters as JSON text, which TensorBoard shows on the page TEXT.

        Args:
            params: a mapping, or an object whose attributes are the parameters, such as
                ``argparse.Namespace``.

        Raises:
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        # The page HPARAMS takes only flat numbers and strings. The page TEXT shows Markdown, in
        # which JSON that is indented by four spaces is a code block.
        text = indent(_hyperparams_as_json(params), "    ")
        writer = self._open_writer()
        writer.add_text("hyperparameters", text)
        writer.flush()

    def close(self) -> None:
        """Close the event file. A later write opens another file in the same folder."""
        if self._writer is not None:
            self._writer.close()

    def _open_writer(self) -> Any:
        """Return the writer. A subclass may create it at the first call."""
        return self._writer


@final
class _SummaryWriterAdapter(_EventFileLogger):
    """A logger that writes to a ``SummaryWriter`` of the user."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer


@final
class TensorBoardLogger(_EventFileLogger, _RunLogger):
    """A logger that writes TensorBoard's event files into ``root_dir/name/version_k``.

    Show them with ``tensorboard --logdir root_dir``. The package ``tensorboard`` is needed, which
    the extra of this name installs. It is imported at the first write. No file or folder is created
    before the first write.

    Args:
        root_dir: the folder of all runs.
        name: the name of the experiment.
        version: a number ``k``, or the name of the run's folder. An existing run is continued.
            None, the default, takes the next free number.
        writer_options: options of the ``SummaryWriter``, such as ``max_queue`` and ``flush_secs``.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str] = "logs",
        name: str = "run",
        version: int | str | None = None,
        **writer_options: Any,
    ) -> None:
        """Choose the folder. Nothing is created before the first write."""
        super().__init__(root_dir, name, version)
        self._writer_options = writer_options

    def _open_writer(self) -> Any:
        """Return the ``SummaryWriter``. The first call creates it with its file.

        Raises:
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        if self._writer is None:
            suggestion = (
                'pip install "torch-fabric[tensorboard]", or CSVLogger(), which needs no package'
            )
            with MissingDependencyError.unless_installed("TensorBoardLogger", suggestion):
                from torch.utils.tensorboard import SummaryWriter  # slow to import
            self._writer = SummaryWriter(str(self._ensure_folder()), **self._writer_options)
        return self._writer


def metrics_as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of metrics as Python floats.

    Args:
        metrics: the values by the names of the metrics: numbers or tensors of one element, on any
            device. To read a tensor waits for its device.

    Raises:
        ArgumentTypeError: a name is not a string, or a value is not a real number. The message
            names the metric.
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
    """Return a step as an int. It may be None, or an integer of another type, such as numpy's."""
    if step is None:
        return None
    return operator.index(step)


def _as_mapping(params: Any) -> dict[str, Any]:
    if isinstance(params, Mapping):
        return dict(params)
    return dict(vars(params))


def _hyperparams_as_json(params: Any) -> str:
    return json.dumps(_as_mapping(params), indent=2, default=str)


def _rewrite_with_columns(path: Path, names: Iterable[str], *, sorts_columns: bool) -> list[str]:
    """Rewrite a CSV file so that it has columns of these names, and return all column names.

    The file need not exist. Rows that it has get empty cells in new columns. A last row without a
    newline is dropped, since a crash has cut it short.

    Args:
        path: the file.
        names: the names of columns that the file has to have. It keeps its other columns.
        sorts_columns: whether to put all columns into alphabetical order. Otherwise new columns
            come last.
    """
    text = ""
    if path.exists():
        # read_text() would change line ends within quoted cells.
        text = path.read_bytes().decode()
    complete_rows = text[: text.rfind("\n") + 1]
    # newline="" leaves line ends within quoted cells as they are.
    rows = csv.DictReader(io.StringIO(complete_rows, newline=""))
    old_names = rows.fieldnames or ()  # fieldnames is None if there is no header
    # A dict removes duplicates, and keeps the order.
    columns = list(dict.fromkeys([*old_names, *names]))
    if sorts_columns:
        columns.sort()
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns)
    writer.writeheader()
    writer.writerows(rows)
    _replace_file(path, table.getvalue())
    return columns


def _replace_file(path: Path, text: str) -> None:
    """Write a file. If the process crashes, the old file or the complete new file is there."""
    # The name is always the same, so that the next call overwrites what a crash has left.
    temporary_path = path.with_name(f".{path.name}.tmp")
    temporary_path.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary_path, path)
