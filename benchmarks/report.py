"""The report of the numbers: a table for each case, and the table and the picture of the README and the home page."""

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
# What has the table.
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
# Case and row, with what the table calls them.
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
# And the picture, whose first panel has the import: of nearly nothing a multiple says nothing.
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

Record = dict[str, Any]


def to_record(case: Case, rounds: Rounds, missing: Mapping[str, str]) -> Record:
    """What is kept of a case, as JSON holds it."""
    rows = {name: _row_record(rounds, name, row) for name, row in case.rows.items()}
    measured = {name: row for name, row in rows.items() if OURS in row["values"]}
    return {"title": case.title, "rounds": len(rounds), "rows": measured, "missing": dict(missing)}


def _row_record(rounds: Rounds, name: str, row: Row) -> Record:
    values = {
        contestant: asdict(spread(numbers))
        for contestant in CONTESTANTS
        if (numbers := [one[contestant][name] for one in rounds if name in one.get(contestant, {})])
    }
    against = {
        other: asdict(found)
        for other in CONTESTANTS
        if other != OURS and (found := compare(rounds, name, OURS, other, row.by)) is not None
    }
    return {
        "unit": row.unit,
        "by": row.by,
        "budget": row.budget,
        "values": values,
        "against": against,
    }


def missed(record: Record) -> list[str]:
    """A line for each budget that a case misses, with by how much and whether that is beyond the spread."""
    lines = []
    for name, row in record["rows"].items():
        against = row["against"].get(RAW)
        budget = row["budget"]
        if against is None or budget is None:
            continue
        higher_is_better = row["unit"].endswith("/s")
        over = budget - against["median"] if higher_is_better else against["median"] - budget
        if over > 0:
            sure = against["high"] < budget if higher_is_better else against["low"] > budget
            how = "beyond the spread" if sure else "within the spread"
            lines.append(
                f"{record['title']}: {name}: {_relation(row, RAW)}, budget {_limit(row)}, {how}"
            )
    return lines


def tables(results: Mapping[str, Any]) -> str:
    """The whole report, as Markdown."""
    parts = [
        "# Results",
        f"Made by `make bench` on {results['machine']}.",
        "Medians over the rounds. The last columns are the median, over the rounds, of ours beside another's number of "
        "the same round, with the quartiles: a factor, or a difference in the row's unit.",
    ]
    for name, record in results["cases"].items():
        parts.append(
            f"## {record['title']}\n\n`python -m benchmarks {name}`, {record['rounds']} rounds"
        )
        parts.append(_table(record))
        parts += [f"- {other}: {reason}" for other, reason in record["missing"].items()]
    late = [line for record in results["cases"].values() for line in missed(record)]
    parts.append("## Budgets missed\n\n" + ("\n".join(f"- {line}" for line in late) or "None."))
    return "\n\n".join(parts) + "\n"


def _table(record: Record) -> str:
    others = [name for name in CONTESTANTS if name != OURS]
    header = ["", "unit", *CONTESTANTS, *(f"ours beside {name}" for name in others), "budget"]
    rows = [
        [
            name,
            row["unit"],
            *(_median(row, contestant) for contestant in CONTESTANTS),
            *(_relation(row, other) for other in others),
            _limit(row),
        ]
        for name, row in record["rows"].items()
    ]
    return _markdown([header, *rows])


def headline(results: Mapping[str, Any]) -> str:
    """The table of these pages, as Markdown, between its markers."""
    rows = [["", *CONTESTANTS, "ours beside raw"]]
    for (case, name), label in HEADLINE.items():
        row = results["cases"].get(case, {}).get("rows", {}).get(name)
        if row is not None:
            unit = row["unit"]
            cells = [
                f"{cell} {unit}" if cell != "-" else cell
                for cell in (_median(row, one) for one in CONTESTANTS)
            ]
            rows.append([label, *cells, _relation(row, RAW)])
    made = f"Made by `make bench` on {results['machine']}: medians, and in brackets the quartiles."
    return "\n\n".join([MARKERS[0], _markdown(rows), made, MARKERS[1]])


def in_page(page: str, results: Mapping[str, Any]) -> str:
    """The text of a page with the headline table of these results in the place of the one it has."""
    begin, end = map(re.escape, MARKERS)
    text, count = re.subn(f"{begin}.*?{end}", lambda _: headline(results), page, flags=re.DOTALL)
    assert count == 1, f"the page needs {MARKERS[0]} and {MARKERS[1]} once"
    return text


def chart(results: Mapping[str, Any], path: Path) -> None:
    """Draw each contestant's import in milliseconds, and the rows of PICTURE as multiples of raw torch's time."""
    # An extra of its own, and slow to import.
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = {
        label: row
        for (case, name), label in PICTURE.items()
        if (row := results["cases"].get(case, {}).get("rows", {}).get(name))
        and RAW in row["values"]
    }
    times = {label: {who: _time(row, who) for who in row["values"]} for label, row in rows.items()}
    ratios = {
        label: {who: time / of[RAW] for who, time in of.items() if who != RAW}
        for label, of in times.items()
    }
    panels = [
        (ratios, "times raw torch (the line); 2 ranks but for the first three, load and save")
    ]
    if imported := results["cases"].get("import", {}).get("rows", {}).get("time"):
        others = {who: _time(imported, who) for who in imported["values"] if who != RAW}
        panels.insert(0, ({"import": others}, "ms beyond torch's own import"))
    figure = Figure(
        figsize=(9, 1.4 + 0.32 * sum(len(found) for found, _ in panels)), layout="constrained"
    )
    heights = [len(found) + 0.6 for found, _ in panels]
    drawn = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (found, title) in zip(drawn, panels, strict=True):
        _bars(axes, found)
        axes.set_xlabel(title)
    axes = drawn[-1]
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _time(row: Record, contestant: str) -> float:
    """What one of them takes, of a throughput its inverse."""
    median = row["values"][contestant]["median"]
    return 1 / median if row["unit"].endswith("/s") else median


def _bars(axes: Any, found: Mapping[str, Mapping[str, float]]) -> None:
    """A group of bars for each label, with the numbers at their ends; what is missing is no bar."""
    drawn = [name for name in CONTESTANTS if name != RAW]
    height = 0.8 / len(drawn)
    for place, (name, color) in enumerate(
        zip(drawn, ("#2a6fdb", "#b8a2d8", "#e0b060"), strict=True)
    ):
        bars = [
            (at + place * height, of[name]) for at, of in enumerate(found.values()) if name in of
        ]
        drawn_bars = axes.barh(
            [at for at, _ in bars], [length for _, length in bars], height, label=name, color=color
        )
        axes.bar_label(drawn_bars, [_number(length) for _, length in bars], padding=2, fontsize=6)
    axes.set_yticks([at + height for at in range(len(found))], list(found))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _median(row: Record, contestant: str) -> str:
    found = row["values"].get(contestant)
    return "-" if found is None else _number(found["median"])


def _relation(row: Record, other: str) -> str:
    found = row["against"].get(other)
    if found is None:
        return "-"
    one = Comparison(**found)
    if row["by"] == "difference":
        unit = row["unit"]
        if one.low == one.high:
            return f"{_signed(one.median)} {unit}"
        return f"{_signed(one.median)} {unit} ({_signed(one.low)} to {_signed(one.high)})"
    return f"{_factor(one.median)}x ({_factor(one.low)} to {_factor(one.high)})"


def _limit(row: Record) -> str:
    if row["budget"] is None:
        return ""
    return (
        f"+{row['budget']:g} {row['unit']}"
        if row["by"] == "difference"
        else f"{row['budget']:.2f}x"
    )


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _signed(value: float) -> str:
    # Adding zero makes 0.0 of -0.0.
    return f"{round(value, 1) + 0.0:+g}"


def _markdown(rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    columns = lines[0].count("|") - 1
    return "\n".join(
        [lines[0], "|" + "|".join(["---"] + ["--:"] * (columns - 1)) + "|", *lines[1:]]
    )
