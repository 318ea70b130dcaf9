"""Loggers with Lightning Fabric's attributes, which write the files of ``fabric.loggers``."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor

from fabric import loggers as fabric_loggers
from fabric.loggers.loggers import Loggers as _Loggers
from fabric_compat.plugins import set_default_rank
from fabric_compat.utilities import convert_tensors_to_scalars


class Logger(ABC):
    """The base class of users' loggers, which also define ``name`` and ``version``."""

    group_separator = "/"
    root_dir = None
    log_dir = None

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def save(self) -> None:
        """Do nothing. Subclasses may override this method."""

    def finalize(self, status: str) -> None:
        self.save()


class Loggers(_Loggers):
    """The loggers of one ``Fabric``, which get the values that Lightning passes to loggers."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Pass metrics by keyword. Tensors become numbers, and other values stay as they are."""
        values = {name: _as_scalar(value) for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(metrics=values, step=step)


def _as_scalar(value: Any) -> Any:
    if isinstance(value, Tensor):
        return convert_tensors_to_scalars(value)
    return value


class _DummyExperiment:
    """The experiment on ranks other than 0: every attribute and every call returns itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def rank_zero_experiment(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a property return the experiment on rank 0, and elsewhere one that does nothing."""
    on_first_rank = rank_zero_only(fn, default=_DummyExperiment())

    @wraps(fn)
    def experiment(*args: Any, **kwargs: Any) -> Any:
        set_default_rank()
        return on_first_rank(*args, **kwargs)

    return experiment


class _FileLogger(Logger):
    _logger_class: ClassVar[Any]  # of fabric.loggers

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: Any = None,
        prefix: str = "",
        sub_dir: str | None = None,
        **_: Any,
    ) -> None:
        # The methods run on rank 0 only, also in a process that joins no job.
        set_default_rank()
        self.root_dir = os.fspath(root_dir)
        self.name = name or ""
        self._version = version
        self._prefix = prefix
        self.sub_dir = sub_dir

    @property
    def version(self) -> int | str:
        if self._version is None:
            self._version = self._next_version()
        return self._version

    def _next_version(self) -> int:
        next_version = 0
        root_folder = Path(os.path.expandvars(self.root_dir)).expanduser()
        for path in (root_folder / self.name).glob("version_*"):
            number = path.name.removeprefix("version_")
            if number.isdecimal():
                next_version = max(next_version, int(number) + 1)
        return next_version

    @property
    def log_dir(self) -> str:
        version = self.version
        if not isinstance(version, str):
            version = f"version_{version}"
        folder = Path(self.root_dir, self.name, version, self.sub_dir or "")
        return os.path.expandvars(folder.expanduser())

    @cached_property
    def _logger(self) -> Any:
        return self._logger_class(self.log_dir, "", "")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._logger.log_metrics(self._add_prefix(metrics), step)

    def _add_prefix(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        if not self._prefix:
            return dict(metrics)
        return {f"{self._prefix}-{name}": value for name, value in metrics.items()}

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._logger.log_hyperparams(params)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._logger.close()


class _ExperimentWriter:
    """The rows of a :class:`CSVLogger`, which :meth:`save` appends to the file.

    Attributes:
        metrics: the rows that are not in the file yet.
    """

    NAME_METRICS_FILE = "metrics.csv"

    def __init__(self, log_dir: str) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.log_dir = log_dir
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self._logger = fabric_loggers.CSVLogger(log_dir, "", "")

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a row. The number of the step takes the place of a metric of this name."""
        if step is None:
            step = len(self.metrics)
        row = {name: _as_scalar(value) for name, value in metrics_dict.items()}
        self.metrics.append({**row, "step": step})

    def save(self) -> None:
        """Append the rows to the file."""
        for row in self.metrics:
            self._logger.append_row(row)
        self.metrics = []


class CSVLogger(_FileLogger):
    """A logger that writes ``metrics.csv`` and ``hparams.json``.

    The rows are in the file after each step whose number, plus 1, is a multiple of
    ``flush_logs_every_n_steps``, after :meth:`save`, and when the ``Fabric`` ends. An existing file
    is continued.
    """

    _logger_class = fabric_loggers.CSVLogger

    def __init__(self, *args: Any, flush_logs_every_n_steps: int = 100, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flush_logs_every_n_steps = flush_logs_every_n_steps

    @cached_property
    def _experiment(self) -> _ExperimentWriter:
        return _ExperimentWriter(self.log_dir)

    experiment = property(rank_zero_experiment(lambda self: self._experiment))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is None:
            step = len(self._experiment.metrics)
        self._experiment.log_metrics(self._add_prefix(metrics), step)
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        self._experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


class TensorBoardLogger(_FileLogger):
    """A logger that writes TensorBoard's event files. ``experiment`` is the ``SummaryWriter``."""

    _logger_class = fabric_loggers.TensorBoardLogger

    experiment = property(rank_zero_experiment(lambda self: self._logger._open_writer()))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        groups: dict[str, Mapping[str, Any]] = {}
        scalars: dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                groups[name] = value
            else:
                scalars[name] = value
        super().log_metrics(scalars, step)
        for name, group in groups.items():
            self.experiment.add_scalars(name, group, step)

    def save(self) -> None:
        self.experiment.flush()

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the graph of a module for an input, by default its ``example_input_array``."""
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if input_array is None:
            rank_zero_warn("log_graph() writes no graph: there is no input_array")
            return
        self.experiment.add_graph(model, input_array)
