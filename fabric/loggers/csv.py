"""Metrics as a table in a text file."""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
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
        self._columns: list[str] = []
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
        if not row.keys() <= set(self._columns):
            self._columns = _widened(path, row)
        with open(path, "a", newline="", encoding="utf-8") as file:
            # repr has every digit of a float, and reads back as the same one.
            cells = ["" if row.get(name) is None else repr(row[name]) for name in self._columns]
            csv.writer(file).writerow(cells)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.json``; further calls add to it. Values that JSON has no type for are written as text.

        Raises:
            ArgumentTypeError: ``params`` is no mapping.
        """
        self._hyperparams.update(hyperparameters_as_json(params))
        _replace(self._folder.path() / "hparams.json", json.dumps(self._hyperparams, indent=2) + "\n")

    def close(self) -> None:
        """Nothing is left to be done: every row is in the file already."""


def _widened(path: Path, names: Iterable[str]) -> list[str]:
    """Write the file anew with these columns too, and without a row that a crash cut short; all its columns.

    A crash leaves the old file or the new one.
    """
    text = ""
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            text = file.read()
    header, *rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))) or [[]]
    columns = [*header, *(name for name in names if name not in header)]
    table = io.StringIO(newline="")
    csv.writer(table).writerows([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)])
    _replace(path, table.getvalue())
    return columns


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")  # the one name: a crash's left-over is overwritten
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)
