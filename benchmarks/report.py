"""The report: a table for each case, and the table and the picture of the README."""

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.framework import (
    CONTESTANTS,
    OURS,
    RAW,
    ROOT,
    Case,
    Comparison,
    Rounds,
    Row,
    compare,
    spread,
)

__all__ = [
    "PAGES",
    "chart",
    "comparison_with_raw",
    "headline",
    "in_page",
    "machine",
    "missed",
    "number",
    "replace_between",
    "table_of",
    "tables",
    "to_record",
]

# The pages with the headline table.
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")


class Headline(NamedTuple):
    """A row of the headline table: what is measured, and what it means for a user."""

    label: str
    meaning: str


# The rows of the headline table, by case and row.
HEADLINE = {
    ("import", "time"): Headline("import, beyond torch's", "a script starts without delay"),
    ("step-ddp", "calls"): Headline(
        "a step in Python calls, DDP on 2 ranks", "what a step costs besides torch, on any machine"
    ),
    ("step-32-true", "time"): Headline(
        "a step of a tiny model, one device", "the most that a step can lose"
    ),
    ("step-ddp", "time"): Headline("the same, DDP on 2 ranks", "the same, with communication"),
    ("trees-2", "all_reduce, 64 tensors"): Headline(
        "all_reduce of 64 metrics, 2 ranks", "metrics can be logged at every step"
    ),
    ("launch-spawn", "first"): Headline("launch of 2 ranks", "the wait until the loop starts"),
    ("gpt-ddp", "throughput"): Headline("a small GPT, DDP on 2 ranks", "the speed of training"),
    ("disk-full", "save"): Headline("save 1 GB", "how long a save stops the loop"),
    ("disk-full", "load"): Headline("load 1 GB", "the wait when a run resumes"),
}
# The label in the picture, by case and row. The import has its own panel, in milliseconds, because
# raw torch takes next to no time beyond its own import.
PICTURE = {
    ("step-32-true", "time"): "step, one device",
    ("step-bf16-mixed", "time"): "the same in bf16-mixed",
    ("step-16-mixed", "time"): "the same in 16-mixed",
    ("step-ddp", "time"): "step, DDP",
    ("step-fsdp", "time"): "step, FSDP",
    ("gpt-ddp", "throughput"): "token of a small GPT, DDP",
    ("gpt-fsdp", "throughput"): "token of a small GPT, FSDP",
    ("trees-2", "all_reduce, 64 tensors"): "all_reduce of 64 metrics",
    ("trees-2", "all_reduce, 1000 floats"): "all_reduce of 1,000 floats",
    ("launch-spawn", "first"): "launch",
    ("launch-popen", "first"): "launch of a script, with imports",
    ("launch-forkserver", "again"): "second launch",
    ("disk-full", "save"): "save 1 GB",
    ("disk-full", "load"): "load 1 GB",
}

# The colors of the contestants in the picture.
COLORS = {OURS: "#2a6fdb", "lightning-fabric": "#b8a2d8", "accelerate": "#e0b060"}

Record = dict[str, Any]
# Lengths of bars, by label and contestant.
Bars = dict[str, dict[str, float]]


def to_record(case: Case, rounds: Rounds, missing: Mapping[str, str]) -> Record:
    """Return the record of a case that is stored as JSON."""
    rows: dict[str, Record] = {}
    for name, row in case.rows.items():
        record = _row_record(rounds, name, row)
        if OURS in record["values"]:
            rows[name] = record
    return {
        "title": case.title,
        "date": date.today().isoformat(),
        "rounds": len(rounds),
        "rows": rows,
        "missing": dict(missing),
    }


def _row_record(rounds: Rounds, name: str, row: Row) -> Record:
    values: dict[str, Record] = {}
    for contestant in CONTESTANTS:
        numbers: list[float] = []
        for measured in rounds:
            if name in measured.get(contestant, {}):
                numbers.append(measured[contestant][name])
        if numbers:
            values[contestant] = asdict(spread(numbers))
    against: dict[str, Record] = {}
    for peer in CONTESTANTS:
        if peer == OURS:
            continue
        comparison = compare(rounds, name, OURS, peer, row.by)
        if comparison is not None:
            against[peer] = asdict(comparison)
    return {
        "unit": row.unit,
        "by": row.by,
        "budget": row.budget,
        "values": values,
        "against": against,
    }


def missed(record: Record) -> list[str]:
    """Return a line for each budget that a case misses.

    The line says by how much, and whether the miss is beyond the spread of the rounds.
    """
    lines = []
    for name, row in record["rows"].items():
        against = row["against"].get(RAW)
        budget = row["budget"]
        if against is None or budget is None:
            continue
        if row["unit"].endswith("/s"):
            is_missed = against["median"] < budget
            is_beyond_spread = against["high"] < budget
        else:
            is_missed = against["median"] > budget
            is_beyond_spread = against["low"] > budget
        if not is_missed:
            continue
        certainty = "beyond the spread" if is_beyond_spread else "within the spread"
        relation = _relation(row, RAW)
        lines.append(f"{record['title']}: {name}: {relation}, budget {_limit(row)}, {certainty}")
    return lines


def tables(results: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    paragraphs = [
        "# Results",
        f"Made by `make bench` on {results['machine']}.",
        "Medians over the rounds. The last columns compare fabric's number with another's number "
        "of the same round: the median over the rounds, with the quartiles, of a factor, or of a "
        "difference in the row's unit.",
    ]
    missed_budgets: list[str] = []
    for name, record in results["cases"].items():
        paragraphs.append(f"## {record['title']}")
        made = f"`python -m benchmarks {name}`, {record['rounds']} rounds"
        # Records of earlier versions have no date.
        if "date" in record:
            made = f"{made}, {record['date']}"
        paragraphs.append(made)
        paragraphs.append(_table(record))
        for peer, reason in record["missing"].items():
            paragraphs.append(f"- {peer}: {reason}")
        for line in missed(record):
            missed_budgets.append(f"- {line}")
    paragraphs.append("## Budgets missed")
    paragraphs.append("\n".join(missed_budgets) or "None.")
    return "\n\n".join(paragraphs) + "\n"


def _table(record: Record) -> str:
    peers = [name for name in CONTESTANTS if name != OURS]
    comparisons = [f"vs. {peer}" for peer in peers]
    lines = [["", "unit", *CONTESTANTS, *comparisons, "budget"]]
    for name, row in record["rows"].items():
        medians = [_median(row, contestant) for contestant in CONTESTANTS]
        relations = [_relation(row, peer) for peer in peers]
        lines.append([name, row["unit"], *medians, *relations, _limit(row)])
    return table_of(lines)


def headline(results: Mapping[str, Any]) -> str:
    """Return the headline table as Markdown."""
    rows = [["", "what it means for you", *CONTESTANTS, "vs. raw"]]
    for (case, name), entry in HEADLINE.items():
        row = _find_row(results, case, name)
        if row is None:
            continue
        cells: list[str] = []
        for contestant in CONTESTANTS:
            cell = _median(row, contestant)
            if cell != "-":
                cell = f"{cell} {row['unit']}"
            cells.append(cell)
        rows.append([entry.label, entry.meaning, *cells, _relation(row, RAW)])
    made = f"Made by `make bench` on {results['machine']}: medians, and in brackets the quartiles."
    return f"{table_of(rows, text_columns=2)}\n\n{made}"


def _find_row(results: Mapping[str, Any], case: str, name: str) -> Record | None:
    return results["cases"].get(case, {}).get("rows", {}).get(name)


def comparison_with_raw(results: Mapping[str, Any], case: str, name: str) -> str:
    """Return how fabric's number compares with raw torch's. "-" if there is no such row."""
    row = _find_row(results, case, name)
    if row is None:
        return "-"
    return _relation(row, RAW)


def in_page(page: str, results: Mapping[str, Any]) -> str:
    """Return the text of a page with the headline table of these results."""
    return replace_between(page, "benchmarks", headline(results))


def replace_between(page: str, name: str, content: str) -> str:
    """Return the text of a page with this content between the markers of this name."""
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    text, count = re.subn(
        f"{begin}.*?{end}", lambda _: f"{begin}\n\n{content}\n\n{end}", page, flags=re.DOTALL
    )
    assert count == 1, f"the page needs {begin} and {end} once"
    return text


def machine() -> str:
    """Return what the numbers depend on, in words."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {platform.system()}, {python}, torch {torch.__version__}{gpu}"


def chart(results: Mapping[str, Any], path: Path) -> None:
    """Draw imports in milliseconds, and the rows of PICTURE as multiples of raw torch's time."""
    # matplotlib is an extra, and slow to import.
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    ratios: Bars = {}
    for (case, name), label in PICTURE.items():
        row = _find_row(results, case, name)
        if row is not None and RAW in row["values"]:
            raw_time = _time(row, RAW)
            ratios[label] = {who: time / raw_time for who, time in _times_of_libraries(row).items()}
    panels = [
        (ratios, "times raw torch (the line); 2 ranks but for the first three, load and save")
    ]
    import_row = _find_row(results, "import", "time")
    if import_row is not None:
        imports = {"import": _times_of_libraries(import_row)}
        panels.insert(0, (imports, "ms beyond torch's own import"))
    groups = sum(len(bars) for bars, _ in panels)
    figure = Figure(figsize=(9, 1.4 + 0.32 * groups), layout="constrained")
    heights = [len(bars) + 0.6 for bars, _ in panels]
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (bars, title) in zip(all_axes, panels, strict=True):
        _draw_bars(axes, bars)
        axes.set_xlabel(title)
    axes = all_axes[-1]
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _time(row: Record, contestant: str) -> float:
    """Return the time that a contestant takes: the inverse of a throughput."""
    median = row["values"][contestant]["median"]
    if row["unit"].endswith("/s"):
        return 1 / median
    return median


def _times_of_libraries(row: Record) -> dict[str, float]:
    return {name: _time(row, name) for name in row["values"] if name != RAW}


def _draw_bars(axes: Any, bars: Bars) -> None:
    """Draw a group of bars for each label, with the numbers at their ends."""
    height = 0.8 / len(COLORS)
    for index, (name, color) in enumerate(COLORS.items()):
        positions: list[float] = []
        lengths: list[float] = []
        for group, length_of in enumerate(bars.values()):
            if name in length_of:
                positions.append(group + index * height)
                lengths.append(length_of[name])
        drawn_bars = axes.barh(positions, lengths, height, label=name, color=color)
        numbers = [number(length) for length in lengths]
        axes.bar_label(drawn_bars, numbers, padding=2, fontsize=6)
    axes.set_yticks([group + height for group in range(len(bars))], list(bars))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _median(row: Record, contestant: str) -> str:
    measured = row["values"].get(contestant)
    return "-" if measured is None else number(measured["median"])


def _relation(row: Record, other: str) -> str:
    record = row["against"].get(other)
    if record is None:
        return "-"
    comparison = Comparison(**record)
    low = comparison.low
    high = comparison.high
    if row["by"] == "ratio":
        return f"{_factor(comparison.median)}x ({_factor(low)} to {_factor(high)})"
    difference = f"{_signed(comparison.median)} {row['unit']}"
    if low == high:
        return difference
    return f"{difference} ({_signed(low)} to {_signed(high)})"


def _limit(row: Record) -> str:
    if row["budget"] is None:
        return ""
    if row["by"] == "difference":
        return f"+{row['budget']:g} {row['unit']}"
    return f"{row['budget']:.2f}x"


def number(value: float) -> str:
    """Return a number with three digits, as tables show it."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _signed(value: float) -> str:
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+g}"


def table_of(rows: Iterable[Iterable[str]], text_columns: int = 1) -> str:
    """Return rows, the first of which is the head, as a table in Markdown.

    The first ``text_columns`` columns hold text. The other columns hold numbers, which are aligned
    to the right.
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    columns = lines[0].count("|") - 1
    alignments = ["---"] * text_columns + ["--:"] * (columns - text_columns)
    lines.insert(1, "|" + "|".join(alignments) + "|")
    return "\n".join(lines)
