"""Plots of the metrics of runs: ``fabric plot``, and :func:`plot` in a notebook."""

import csv
import io
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

from fabric.errors import ConfigurationError, MissingDependencyError

__all__ = ["plot"]


# The points (step, value) of the lines of one panel, by the line's label.
_Lines = dict[str, list[tuple[float, float]]]
# The lines of each panel, by the panel's name.
_Panels = dict[str, _Lines]

_MAX_COLUMNS = 3


def plot(*folders: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Any:
    """Draw the metrics that :class:`fabric.loggers.CSVLogger` wrote, with a line per run.

    Metrics that differ only before the last ``/``, such as ``train/loss`` and ``val/loss``, share a
    panel. Needs matplotlib.

    Args:
        folders: runs, or folders with runs below them.
        output: a file to write. Its suffix sets the format. None writes no file.

    Returns:
        A matplotlib ``Figure``, which a notebook shows.

    Raises:
        ConfigurationError: a folder has no table, or no table has a metric.
        MissingDependencyError: matplotlib is not installed.
    """
    remedy = 'pip install "torch-fabric[plot]"'
    with MissingDependencyError.unless_installed("plot the metrics of a run", remedy):
        from matplotlib.figure import Figure
    tables: list[Path] = []
    for folder in folders:
        tables += _find_tables(Path(folder))
    panels = _read_panels(tables)
    if not panels:
        call_text = f"plot {', '.join(map(str, tables))}"
        raise ConfigurationError(call_text, problem="no metric has been logged there yet")
    columns = min(len(panels), _MAX_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    # A panel is 4.5 inches wide and 3 inches high.
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    for position, (name, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, position, title=name, xlabel="step")
        _draw_lines(axes, lines)
    # Notebooks show an object by its method _repr_png_. matplotlib adds the method when pyplot is
    # imported, which is slow. So the method is added here.
    figure._repr_png_ = partial(_png, figure)  # pyright: ignore[reportAttributeAccessIssue]
    if output is not None:
        figure.savefig(output, dpi=150)
    return figure


def _read_panels(tables: list[Path]) -> _Panels:
    """Read the metrics of all tables into panels.

    A panel is named by the text after the last ``/`` of its metrics, such as ``loss`` for
    ``train/loss`` and ``val/loss``. It has a line for each metric and, with several tables, for
    each table.

    Args:
        tables: the CSV files that ``CSVLogger`` wrote, one for each run. Each has a column ``step``
            and a column for each metric.
    """
    panels: _Panels = {}
    for table in tables:
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row_number, row in enumerate(rows):
            # The cell is empty if the metrics were logged without a step. Then the number of the
            # row takes its place.
            step = float(row.pop("step") or row_number)
            for name, cell in row.items():
                # A cell is empty if the metric was not logged in this row, and None if a crash has
                # cut the row short.
                if not cell:
                    continue
                label = name
                if len(tables) > 1:
                    label = f"{table.parent}: {name}"
                _, _, panel_name = name.rpartition("/")
                panel_lines = panels.setdefault(panel_name, {})
                points = panel_lines.setdefault(label, [])
                points.append((step, float(cell)))
    return panels


def _draw_lines(axes: Any, lines: _Lines) -> None:
    """Draw the lines of one panel, with a legend if there are several."""
    for label, points in lines.items():
        marker = ""
        if len(points) == 1:
            marker = "."  # a line through a single point cannot be seen
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker=marker, label=label)
    if len(lines) > 1:
        axes.legend(fontsize="small")


def _png(figure: Any) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _find_tables(folder: Path) -> list[Path]:
    """Return the table of metrics in a folder. If it has none, return all tables in folders below.

    Raises:
        ConfigurationError: there is no table.
    """
    table = folder / "metrics.csv"
    if table.is_file():
        return [table]
    tables = sorted(folder.rglob("metrics.csv"))
    if tables:
        return tables
    problem = "there is no such folder"
    if folder.is_dir():
        problem = "there is no metrics.csv in it or below it"
    raise ConfigurationError(
        f"plot {folder}", problem=problem, expected="a folder that CSVLogger has written"
    )
