"""Loggers with Lightning Fabric's attributes, which write the files of ``fabric.loggers``."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

from lightning_utilities.core.imports import RequirementCache
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor

from fabric import loggers as fabric_loggers
from fabric.loggers.loggers import Loggers as _Loggers
from fabric.loggers.loggers import _as_logger
from fabric_compat.plugins import set_default_rank
from fabric_compat.utilities import (
    _convert_params,
    _flatten_dict,
    _sanitize_params,
    convert_tensors_to_scalars,
)
from fabric_compat.wrappers import _unwrap_objects

_TENSORBOARD_AVAILABLE = RequirementCache("tensorboard")
_TENSORBOARDX_AVAILABLE = RequirementCache("tensorboardX")


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


class Loggers(_Loggers, list[Any]):
    """The loggers of one ``Fabric``: a list that scripts change, as they change Lightning's list.

    The loggers get the values that Lightning passes to loggers.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        """Add all loggers. See :meth:`add` for the error."""
        list.__init__(self)
        for logger in loggers:
            self.add(logger)

    def add(self, logger: Any) -> None:
        """Append a logger of the user.

        Raises:
            ArgumentTypeError: the object is not a logger, W&B run or ``SummaryWriter``.
        """
        _as_logger(logger)  # called for its error
        self.append(logger)

    @property
    def user_loggers(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The list itself."""
        return self

    @property
    def _loggers(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The objects to call, which may be adapters. A script may have changed the list."""
        return [_as_logger(logger) for logger in self]

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
    """The base class of loggers that write files into ``root_dir/name/version_k/sub_dir``."""

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: Any = None,
        prefix: str = "",
        sub_dir: str | None = None,
    ) -> None:
        # rank_zero_only, which guards the methods, reads this rank. A process that joins no job has
        # not set it.
        set_default_rank()
        self.root_dir = os.fspath(root_dir)
        self.name = name or ""
        self._version = version
        self._prefix = prefix
        self.sub_dir = sub_dir

    @property
    def version(self) -> int | str:
        """The version. If the user gave none, the next free number."""
        if self._version is None:
            self._version = self._next_version()
        return self._version

    def _next_version(self) -> int:
        """Return one more than the largest number of a folder ``version_<number>``, or 0."""
        next_version = 0
        root_folder = Path(os.path.expandvars(self.root_dir)).expanduser()
        for path in (root_folder / self.name).glob("version_*"):
            number = path.name.removeprefix("version_")
            if number.isdecimal():
                next_version = max(next_version, int(number) + 1)
        return next_version

    @property
    def log_dir(self) -> str:
        """The folder of the run, with ``~`` and environment variables replaced."""
        version = self.version
        if not isinstance(version, str):
            version = f"version_{version}"
        folder = Path(self.root_dir, self.name, version, self.sub_dir or "")
        return os.path.expandvars(folder.expanduser())

    @cached_property
    @abstractmethod
    def _logger(self) -> Any:
        """The logger of fabric that writes the files."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._logger.log_metrics(self._add_prefix(metrics), step)

    def _add_prefix(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        if not self._prefix:
            return dict(metrics)
        return {f"{self._prefix}-{name}": value for name, value in metrics.items()}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._logger.close()


class _ExperimentWriter:
    """The rows of a :class:`CSVLogger`, which :meth:`save` appends to the file.

    ``CSVLogger.experiment`` returns this object.

    Attributes:
        metrics: the rows that are not in the file yet.
    """

    NAME_METRICS_FILE = "metrics.csv"

    def __init__(self, log_dir: str) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.log_dir = log_dir
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        # log_dir has the name and the version already.
        self._logger = fabric_loggers.CSVLogger(log_dir, name="", version="")
        os.makedirs(log_dir, exist_ok=True)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a row. The number of the step takes the place of a metric of this name."""
        if step is None:
            step = len(self.metrics)
        row = {name: _as_scalar(value) for name, value in metrics_dict.items()}
        self.metrics.append({**row, "step": step})

    def save(self) -> None:
        """Append the rows to the file, whose columns are in alphabetical order."""
        for row in self.metrics:
            self._logger.append_row(row, sorts_columns=True)
        self.metrics = []


class CSVLogger(_FileLogger):
    """A logger that writes ``metrics.csv`` and ``hparams.json``.

    The rows are in the file after each step whose number, plus 1, is a multiple of
    ``flush_logs_every_n_steps``, after :meth:`save`, and when the ``Fabric`` ends. An existing file
    is continued.
    """

    def __init__(self, *args: Any, flush_logs_every_n_steps: int = 100, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flush_logs_every_n_steps = flush_logs_every_n_steps

    @cached_property
    def _logger(self) -> fabric_loggers.CSVLogger:
        """The logger that writes ``hparams.json``. ``experiment`` writes ``metrics.csv``."""
        return fabric_loggers.CSVLogger(self.log_dir, name="", version="")

    @cached_property
    def _experiment(self) -> _ExperimentWriter:
        return _ExperimentWriter(self.log_dir)

    experiment = property(rank_zero_experiment(lambda self: self._experiment))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep a row, and write the rows if this step is one at which they are flushed."""
        if step is None:
            step = len(self._experiment.metrics)
        self._experiment.log_metrics(self._add_prefix(metrics), step)
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the parameters to ``hparams.json``, the fields of a dataclass as its entries."""
        self._logger.log_hyperparams(_plain_params(params))

    @rank_zero_only
    def save(self) -> None:
        self._experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


def _plain_params(params: Any) -> dict[str, Any]:
    """Return hyperparameters as a dictionary. Values that are dataclasses become dictionaries.

    Args:
        params: a mapping, a ``Namespace``, a dataclass, or None for no parameters.
    """
    if _is_dataclass_object(params):
        return asdict(params)
    plain: dict[str, Any] = {}
    for name, value in _convert_params(params).items():
        if _is_dataclass_object(value):
            value = asdict(value)
        plain[name] = value
    return plain


def _is_dataclass_object(value: Any) -> bool:
    # is_dataclass() is true for the class itself, too.
    return is_dataclass(value) and not isinstance(value, type)


class TensorBoardLogger(_FileLogger):
    """A logger that writes TensorBoard's event files. ``experiment`` is the ``SummaryWriter``.

    Args:
        root_dir: the folder of all runs.
        name: the name of the experiment.
        version: a number or a name of the run.
        default_hp_metric: whether ``log_hyperparams`` without metrics writes ``hp_metric=-1``,
            without which TensorBoard does not show the parameters.
        prefix: the prefix of the names of metrics.
        sub_dir: a folder within the folder of the run.
        options: options of the ``SummaryWriter``, such as ``max_queue``.
    """

    def __init__(
        self,
        root_dir: Any,
        name: str | None = "lightning_logs",
        version: Any = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, sub_dir)
        self._default_hp_metric = default_hp_metric
        self._writer_options = options

    @cached_property
    def _logger(self) -> fabric_loggers.TensorBoardLogger:
        # log_dir has the name and the version already.
        return fabric_loggers.TensorBoardLogger(
            self.log_dir, name="", version="", **self._writer_options
        )

    experiment = property(rank_zero_experiment(lambda self: self._logger._open_writer()))

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Write parameters for the page HPARAMS, with the values of metrics.

        Without metrics, which that page needs, the parameters are on the page TEXT.

        Args:
            params: a mapping, a ``Namespace`` or a dataclass.
            metrics: the values of metrics by their names, or the value of ``hp_metric``.
            step: the step of the metrics.
        """
        if metrics is None and self._default_hp_metric:
            metrics = -1  # any value: TensorBoard shows parameters only with a metric
        if metrics is not None and not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        plain_params = _plain_params(params)
        if not metrics:
            self._logger.log_hyperparams(plain_params)
            return
        self.log_metrics(metrics, step)
        # Imported here, since the package tensorboard is optional.
        from torch.utils.tensorboard.summary import hparams

        flat_params = _sanitize_params(_flatten_dict(plain_params))
        for name, value in flat_params.items():
            # TensorBoard takes numbers and text.
            if isinstance(value, Tensor):
                flat_params[name] = value.item() if value.numel() == 1 else str(value)
        for summary in hparams(flat_params, dict(metrics)):
            self.experiment.file_writer.add_summary(summary, step)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write metrics. A metric that is a mapping becomes several curves in one chart."""
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
        if not isinstance(input_array, Tensor | tuple):
            kind = type(input_array).__name__
            rank_zero_warn(f"log_graph() writes no graph: an input of type {kind} can't be traced")
            return
        self.experiment.add_graph(_unwrap_objects(model), input_array)
