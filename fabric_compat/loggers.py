"""Loggers with the attributes that Lightning Fabric's have, on the files of ours."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_only

from fabric import loggers as ours


class Logger(ABC):
    """What fabric logs to, for subclasses of the user; they have ``name`` and ``version``, too."""

    group_separator, root_dir, log_dir = "/", None, None

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Nothing; for subclasses."""

    def save(self) -> None:
        """Nothing; for subclasses."""

    def finalize(self, status: str) -> None:
        self.save()


class _DummyExperiment:
    """The experiment on other ranks: whatever is called or read does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def rank_zero_experiment(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have a property return the experiment on rank 0, and elsewhere one that does nothing."""

    @wraps(fn)
    def experiment(self: Any) -> Any:
        return fn(self) if getattr(rank_zero_only, "rank", 0) == 0 else _DummyExperiment()

    return experiment


class _FileLogger(Logger):
    _kind: ClassVar[Any]  # of ours

    def __init__(
        self, root_dir: Any, name: str | None = "lightning_logs", version: Any = None, prefix: str = "", **_: Any
    ) -> None:
        self.root_dir, self.name, self._version, self._prefix = os.fspath(root_dir), name or "", version, prefix
        self._ours: Any = None

    @property
    def version(self) -> int | str:
        if self._version is None:
            folder = os.path.join(self.root_dir, self.name)
            taken = [entry.removeprefix("version_") for entry in os.listdir(folder)] if os.path.isdir(folder) else []
            self._version = max((int(number) for number in taken if number.isdecimal()), default=-1) + 1
        return self._version

    @property
    def log_dir(self) -> str:
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, self.name, version)

    def _logger(self) -> Any:
        if self._ours is None:
            folder, version = os.path.split(self.log_dir)
            self._ours = self._kind(folder, "", version)
        return self._ours

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        prefix = f"{self._prefix}/" if self._prefix else ""
        self._logger().log_metrics({f"{prefix}{name}": value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._logger().log_hyperparams(params)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._ours is not None:
            self._ours.close()


class CSVLogger(_FileLogger):
    """``metrics.csv`` and ``hparams.json``. Rows are on disk at once, whatever ``flush_logs_every_n_steps``."""

    _kind = ours.CSVLogger
    _next_step = 0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = self._next_step if step is None else step
        self._next_step = step + 1
        super().log_metrics(metrics, step)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._logger()


class TensorBoardLogger(_FileLogger):
    """TensorBoard's event files; ``experiment`` is the ``SummaryWriter``."""

    _kind = ours.TensorBoardLogger

    def __init__(self, root_dir: Any, *args: Any, sub_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(root_dir, *args, **kwargs)
        self._sub_dir = sub_dir

    @property
    def log_dir(self) -> str:
        return os.path.join(super().log_dir, *([self._sub_dir] if self._sub_dir else []))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._logger()._open()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        groups = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
        super().log_metrics({name: value for name, value in metrics.items() if name not in groups}, step)
        for name, group in groups.items():
            self.experiment.add_scalars(name, group, step)

    def save(self) -> None:
        self.experiment.flush()
