"""Metrics as a table in a text file."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric.errors import ConfigurationError
from fabric.loggers.base import RunFolder, hyperparameters_as_json, metrics_as_floats, step_as_integer

__all__ = ["CSVLogger"]

_STEP = "step"


class CSVLogger:
    """Writes ``metrics.csv`` and ``hparams.json`` into ``root_dir/name/version_k``; needs no other package.

    ``metrics.csv`` has a row per call of :meth:`log_metrics`: the column ``step``, then one column per metric in order
    of appearance, values with every digit, an empty cell where a metric was not given. A metric that comes up later
    gets a new column. Each row is in the file when the call returns, so that a crash loses nothing. No file or folder
    is created before the first write.

    Args:
        root_dir: folder of all runs.
        name: of the experiment.
        version: ``k``, or a folder name; an existing run is continued. ``None`` takes the next free number.

    Raises:
        ConfigurationError: ``name`` or ``version`` would lead out of its folder.
    """

    def __init__(
        self, root_dir: str | os.PathLike[str] = "logs", name: str = "run", version: int | str | None = None
    ) -> None:
        self._folder = RunFolder(root_dir, name, version)
        self._columns: list[str] | None = None
        self._hyperparams: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row.

        Args:
            metrics: names, and numbers or tensors of one element.
            step: an integer, or ``None`` for an empty cell.

        Raises:
            ArgumentTypeError: a value or ``step`` is of another type; the text names the metric.
            ConfigurationError: a metric is called ``"step"``.
        """
        values = metrics_as_floats(metrics)
        if _STEP in values:
            raise ConfigurationError(
                f"log a metric named {_STEP!r}",
                "that is the name of the column of steps",
                "any other name",
                f"log_metrics(metrics, step=...), or the name {'global_step'!r}",
            )
        row = {_STEP: step_as_integer(step), **values}
        path = self._folder.path() / "metrics.csv"
        if self._columns is None:
            self._columns = _continued(path)
        added = [name for name in row if name not in self._columns]
        if added:
            self._columns = [*self._columns, *added]
            _widen(path, self._columns)
        with open(path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(_cells(self._columns, row))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json``; further calls add to it. Values that JSON has no type for are written as text.

        Raises:
            ArgumentTypeError: ``params`` is no mapping.
        """
        self._hyperparams.update(hyperparameters_as_json(params))
        _replace(self._folder.path() / "hparams.json", json.dumps(self._hyperparams, indent=2) + "\n")

    def close(self) -> None:
        """Nothing is left to be done: every row is in the file already."""


def _cells(columns: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    # repr has every digit of a float, and reads back as the same one.
    return ["" if row.get(name) is None else repr(row[name]) for name in columns]


def _continued(path: Path) -> list[str]:
    """The columns of a file that an earlier run wrote; none for a new one."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        # A crash cut its last row short.
        _replace(path, text[: text.rfind("\n") + 1])
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _widen(path: Path, columns: Sequence[str]) -> None:
    """Write the file anew, with further columns; a crash leaves the old one or the new one."""
    rows: list[list[str]] = []
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
    temporary = _beside(path)
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)
    os.replace(temporary, path)


def _replace(path: Path, text: str) -> None:
    temporary = _beside(path)
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


def _beside(path: Path) -> Path:
    """The one name that is used for a file about to take the place of ``path``; a crash's left-over is overwritten."""
    return path.with_name(f".{path.name}.tmp")
