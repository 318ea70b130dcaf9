"""Plots of the metrics of runs: ``fabric plot``, and :func:`plot` in a notebook."""

import csv
import io
import os
from functools import partial
from pathlib import Path
from typing import Any

from fabric.errors import ConfigurationError, MissingDependencyError

__all__ = ["plot"]


def plot(*folders: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Any:
    """Draw what :class:`fabric.loggers.CSVLogger` wrote: a panel for each metric, a line for each run.

    ``train/loss`` and ``val/loss`` share a panel, as they differ only before the last ``/``. Needs matplotlib.

    Args:
        folders: runs, or folders with runs below them.
        output: a file to write; its suffix sets the format. None for none.

    Returns:
        A matplotlib ``Figure``, which a notebook shows.

    Raises:
        ConfigurationError: there are no metrics in a folder.
        MissingDependencyError: matplotlib is not installed.
    """
    with MissingDependencyError.unless_installed(
        "plot the metrics of a run", 'pip install "torch-fabric[plot]"'
    ):
        from matplotlib.figure import Figure
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    tables = [table for folder in folders for table in _tables(Path(folder))]
    for table in tables:
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row, cells in enumerate(rows):
            step = float(cells.pop("step") or row)
            for name, value in cells.items():
                if value:  # an empty cell was not logged, and None is the end of a row that a crash cut short
                    label = name if len(tables) == 1 else f"{table.parent}: {name}"
                    lines = panels.setdefault(name.rpartition("/")[2], {})
                    lines.setdefault(label, []).append((step, float(value)))
    if not panels:
        raise ConfigurationError(
            f"plot {', '.join(map(str, tables))}", problem="no metric has been logged there yet"
        )
    columns = min(len(panels), 3)
    rows_of_panels = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3 * rows_of_panels), layout="constrained")
    for place, (name, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows_of_panels, columns, place, title=name, xlabel="step")
        for label, points in lines.items():
            axes.plot(
                *zip(*points, strict=True), marker="." if len(points) == 1 else "", label=label
            )
        if len(lines) > 1:
            axes.legend(fontsize="small")
    # Notebooks render figures only once pyplot is imported, which is slow; but they call this method.
    figure._repr_png_ = partial(_png, figure)  # pyright: ignore[reportAttributeAccessIssue]
    if output is not None:
        figure.savefig(output, dpi=150)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _tables(folder: Path) -> list[Path]:
    here = folder / "metrics.csv"
    found = [here] if here.is_file() else sorted(folder.rglob("metrics.csv"))
    if not found:
        problem = (
            "there is no metrics.csv in it or below it"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise ConfigurationError(
            f"plot {folder}", problem, expected="a folder that CSVLogger has written"
        )
    return found
