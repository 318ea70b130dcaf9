"""The score: how many of the mutations that matter the tests notice; its file and its page.

`make mutants` writes the outcome of each mutation to ``benchmarks/results/mutants.json``, and a
table to ``docs/proof.md``.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from benchmarks.framework import ROOT
from benchmarks.report import machine, replace_between, table_of

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "proof.md"
NAME = "mutants"
# What a run of tests may say of a mutation that it notices.
NOTICED = ("failed", "timeout")
# What a person may say of a survivor. Only the last needs a test.
VERDICTS = {
    "equivalent": "every program does the same",
    "performance": "slower or larger, with the same results",
    "text": "other words in a message",
    "gap": "a test should notice, and none does",
}
# The verdicts on survivors that do no harm, which the score leaves out.
HARMLESS = ("equivalent", "performance", "text")


@dataclass(frozen=True)
class Row:
    """The outcome of a mutation.

    Attributes:
        mutation: the name of the mutation.
        status: the outcome of the tests, such as "failed" or "survived".
        test: the first test that failed. Empty if there is none.
        verdict: what a person says of the survivor. Empty for a mutation that is noticed, and for
            a survivor that nobody has judged.
    """

    mutation: str
    status: str
    test: str
    verdict: str = ""


@dataclass(frozen=True)
class Score:
    """How many mutations are noticed.

    Attributes:
        noticed: the mutations that a test notices.
        relevant: all mutations but the survivors that do no harm.
        counts: the mutations by outcome: "noticed", a verdict, or "not judged".
    """

    noticed: int
    relevant: int
    counts: Counter[str]

    @property
    def percentage(self) -> float:
        return 100 * self.noticed / max(1, self.relevant)


def score_of(rows: Sequence[Row]) -> Score:
    """Count the mutations that matter, and those of them that are noticed."""
    counts: Counter[str] = Counter()
    for row in rows:
        if row.status in NOTICED:
            counts["noticed"] += 1
        else:
            counts[row.verdict or "not judged"] += 1
    harmless = sum(counts[verdict] for verdict in HARMLESS)
    return Score(counts["noticed"], len(rows) - harmless, counts)


def write(rows: Sequence[Row], command: str) -> None:
    """Write the file of results and the page."""
    results = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "command": command,
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(in_page(PAGE.read_text(), results))


def read_rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of a file of results."""
    return [Row(**record) for record in results["rows"]]


def summary(results: dict[str, Any]) -> str:
    """Return the table of the score as Markdown."""
    score = score_of(read_rows(results))
    columns = ["noticed", *VERDICTS, "not judged"]
    counts = [str(score.counts[column]) for column in columns]
    table = table_of(
        [
            ["changed lines", *columns, "noticed of those that matter"],
            [str(len(results["rows"])), *counts, f"{score.percentage:.1f} %"],
        ],
        text_columns=0,
    )
    return f"{table}\n\nMade by `{results['command']}` on {results['date']}; {results['machine']}."


def in_page(page: str, results: dict[str, Any]) -> str:
    """Return the text of the page with the table of these results."""
    return replace_between(page, NAME, summary(results))
