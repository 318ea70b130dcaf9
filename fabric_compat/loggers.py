"""Loggers with the attributes that Lightning Fabric's have, on the files of ours."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_only

from fabric import loggers as ours


class Logger(ABC):
    """What fabric logs to, for subclasses of the user; they have ``name`` and ``version``, too."""

    group_separator = "/"
    root_dir = None
    log_dir = None

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def save(self) -> None:
        """Nothing; for subclasses."""

    def finalize(self, status: str) -> None:
        self.save()


class _DummyExperiment:
    """The experiment on other ranks: whatever is called or read does nothing."""

    def _same(self, *_: Any, **__: Any) -> Any:
        return self

    __getattr__ = __call__ = _same


def rank_zero_experiment(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have a property return the experiment on rank 0, and elsewhere one that does nothing."""
    return rank_zero_only(fn, default=_DummyExperiment())


class _FileLogger(Logger):
    _kind: ClassVar[Any]  # of ours

    def __init__(
        self, root_dir: Any, name: str | None = "lightning_logs", version: Any = None, prefix: str = "",
        sub_dir: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        self.root_dir = os.fspath(root_dir)
        self.name = name or ""
        self._version = version
        self._prefix = prefix
        self._sub_dir = sub_dir or ""

    @property
    def version(self) -> int | str:
        if self._version is None:
            taken = (
                path.name.removeprefix("version_")
                for path in Path(self.root_dir, self.name).glob("version_*")
            )
            self._version = (
                max((int(number) for number in taken if number.isdecimal()), default=-1) + 1
            )
        return self._version

    @property
    def log_dir(self) -> str:
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(Path(self.root_dir, self.name, version, self._sub_dir))

    @cached_property
    def _ours(self) -> Any:
        return self._kind(self.log_dir, "", "")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        prefix = f"{self._prefix}/" if self._prefix else ""
        self._ours.log_metrics({f"{prefix}{name}": value for name, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._ours.log_hyperparams(params)

    @rank_zero_only
    def finalize(self, status: str) -> None:
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

    experiment = property(rank_zero_experiment(lambda self: self._ours))


class TensorBoardLogger(_FileLogger):
    """TensorBoard's event files; ``experiment`` is the ``SummaryWriter``."""

    _kind = ours.TensorBoardLogger

    experiment = property(rank_zero_experiment(lambda self: self._ours._open()))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        groups = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
        super().log_metrics(
            {name: value for name, value in metrics.items() if name not in groups}, step
        )
        for name, group in groups.items():
            self.experiment.add_scalars(name, group, step)

    def save(self) -> None:
        self.experiment.flush()
