"""The report: a table for each case, and the table and the picture of the README."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

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

__all__ = ["PAGES", "chart", "headline", "in_page", "missed", "tables", "to_record"]

MARKERS = ("<!-- benchmarks: begin -->", "<!-- benchmarks: end -->")
# The pages with the headline table.
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
# The label in the headline table, by case and row.
HEADLINE = {
    ("import", "time"): "import, beyond torch's",
    ("step-ddp", "calls"): "a step in Python calls, DDP on 2 ranks",
    ("step-32-true", "time"): "a step of a tiny model, one device",
    ("step-ddp", "time"): "the same, DDP on 2 ranks",
    ("trees-2", "all_reduce, 64 tensors"): "all_reduce of 64 metrics, 2 ranks",
    ("launch-spawn", "first"): "launch of 2 ranks",
    ("gpt-ddp", "throughput"): "a small GPT, DDP on 2 ranks",
    ("disk-full", "save"): "save 1 GB",
    ("disk-full", "load"): "load 1 GB",
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
    return {"title": case.title, "rounds": len(rounds), "rows": rows, "missing": dict(missing)}


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
        paragraphs.append(f"`python -m benchmarks {name}`, {record['rounds']} rounds")
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
    return _markdown(lines)


def headline(results: Mapping[str, Any]) -> str:
    """Return the headline table as Markdown, between its markers."""
    rows = [["", *CONTESTANTS, "vs. raw"]]
    for (case, name), label in HEADLINE.items():
        row = _find_row(results, case, name)
        if row is None:
            continue
        cells: list[str] = []
        for contestant in CONTESTANTS:
            cell = _median(row, contestant)
            if cell != "-":
                cell = f"{cell} {row['unit']}"
            cells.append(cell)
        rows.append([label, *cells, _relation(row, RAW)])
    made = f"Made by `make bench` on {results['machine']}: medians, and in brackets the quartiles."
    return "\n\n".join([MARKERS[0], _markdown(rows), made, MARKERS[1]])


def _find_row(results: Mapping[str, Any], case: str, name: str) -> Record | None:
    return results["cases"].get(case, {}).get("rows", {}).get(name)


def in_page(page: str, results: Mapping[str, Any]) -> str:
    """Return the text of a page with the headline table of these results."""
    begin, end = map(re.escape, MARKERS)
    text, count = re.subn(f"{begin}.*?{end}", lambda _: headline(results), page, flags=re.DOTALL)
    assert count == 1, f"the page needs {MARKERS[0]} and {MARKERS[1]} once"
    return text


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
        numbers = [_number(length) for length in lengths]
        axes.bar_label(drawn_bars, numbers, padding=2, fontsize=6)
    axes.set_yticks([group + height for group in range(len(bars))], list(bars))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _median(row: Record, contestant: str) -> str:
    measured = row["values"].get(contestant)
    return "-" if measured is None else _number(measured["median"])


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


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _signed(value: float) -> str:
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+g}"


def _markdown(rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    columns = lines[0].count("|") - 1
    alignments = ["---", *["--:"] * (columns - 1)]
    lines.insert(1, "|" + "|".join(alignments) + "|")
    return "\n".join(lines)
