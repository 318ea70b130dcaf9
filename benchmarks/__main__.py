"""`python -m benchmarks [names] [--quick]`: raw torch, fabric and its peers side by side.

The command runs all cases, or the named cases, and prints a table for each case, with the missed
budgets. It writes the tables, the numbers and a chart to benchmarks/results, and the headline table
to the README and the home page of the documentation. Named cases replace their earlier results.
With --quick, raw torch and fabric run every case once, at a small size, and nothing is written.

The exit code is 1 if raw torch or fabric fails in a case. A missed budget is reported but is not an
error, because the machine may be busy. A peer that is missing or fails is a column of "-", with the
reason below.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import MODULES
from benchmarks.framework import Case, Failed, cases_of, find_cpp_compiler, run_case
from benchmarks.report import PAGES, chart, in_page, machine, missed, tables, to_record

RESULTS = Path(__file__).parent / "results"


def all_cases() -> dict[str, tuple[str, Case]]:
    """Return the cases by name, with the name of the module that defines the case."""
    cases: dict[str, tuple[str, Case]] = {}
    for name in MODULES:
        module = f"benchmarks.cases.{name}"
        for case in cases_of(import_module(module)):
            cases[case.name] = (module, case)
    return cases


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(chosen: dict[str, tuple[str, Case]], quick: bool) -> tuple[dict[str, Any], list[str]]:
    """Run the cases, and return their records and the names of the cases that failed."""
    records = {}
    failed = []
    for name, (module, case) in chosen.items():
        if case.cuda and not torch.cuda.is_available():
            say(f"{name}: left out, there is no GPU")
            continue
        if case.cpp and find_cpp_compiler() is None:
            say(f"{name}: left out, there is no C++ compiler")
            continue
        try:
            rounds, missing = run_case(case, module, quick=quick, say=say)
        except Failed as failure:
            say(f"{name}: FAILED: {failure}")
            failed.append(name)
            continue
        records[name] = to_record(case, rounds, missing)
        if not quick:
            for line in missed(records[name]):
                say(f"  over budget: {line}")
    return records, failed


def write(results: dict[str, Any]) -> None:
    """Write the files that are committed."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "results.md").write_text(tables(results))
    chart(results, RESULTS / "results.png")
    for page in PAGES:
        page.write_text(in_page(page.read_text(), results))


def earlier() -> dict[str, Any]:
    """Return the committed records."""
    path = RESULTS / "results.json"
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def main() -> int:
    cases = all_cases()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help="cases: " + ", ".join(cases))
    parser.add_argument(
        "--quick", action="store_true", help="each case once, as small as possible, in two minutes"
    )
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in cases]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(cases)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Contestants inherit the variable, and this command deletes what they write to the folder.
        os.environ["BENCHMARK_FOLDER"] = folder
        chosen = {name: cases[name] for name in args.names or cases}
        records, failed = run(chosen, args.quick)
    merged = records
    if args.names:
        merged = {**earlier(), **records}
    results = {
        "machine": machine(),
        "cases": {name: merged[name] for name in cases if name in merged},
    }
    if not args.quick:
        print(tables({**results, "cases": records}))
        if not failed:
            write(results)
    summary = f"{len(records)} cases in {time.monotonic() - began:.0f} s"
    if failed:
        summary = f"{summary}; failed: {', '.join(failed)}"
    say(summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
