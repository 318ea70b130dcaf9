"""`python -m benchmarks [names] [--quick]`: raw torch, fabric and its peers side by side.

Runs every case, or those named, prints a table for each and what it says about the budgets, and writes the tables, the
numbers and a chart to benchmarks/results and the headline table into the README and the home page of the documentation.
Cases that are named replace their part of the results that are there. With --quick raw torch and fabric run every case
once, as small as it can be, and nothing is written.

The exit code is 1 where raw torch or fabric fails in a case. A missed budget is reported, not an error: a machine may
be busy. A peer that is missing, or fails, is a column of "-" with the reason below.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import MODULES
from benchmarks.framework import Case, Failed, cases_of, run_case
from benchmarks.report import PAGES, chart, in_page, missed, tables, to_record

RESULTS = Path(__file__).parent / "results"


def all_cases() -> dict[str, tuple[str, Case]]:
    """The cases by name, each with the module that defines it."""
    names = [f"benchmarks.cases.{module}" for module in MODULES]
    return {
        case.name: (module, case) for module in names for case in cases_of(import_module(module))
    }


def machine() -> str:
    """What the numbers depend on, in words."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {platform.system()}, {python}, torch {torch.__version__}{gpu}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(chosen: dict[str, tuple[str, Case]], quick: bool) -> tuple[dict[str, Any], list[str]]:
    """The records of the cases, and the names of those that failed."""
    records = {}
    failed = []
    for name, (module, case) in chosen.items():
        if case.cuda and not torch.cuda.is_available():
            say(f"{name}: left out, there is no GPU")
            continue
        try:
            rounds, missing = run_case(case, module, quick=quick, say=say)
        except Failed as failure:
            say(f"{name}: FAILED: {failure}")
            failed.append(name)
            continue
        records[name] = to_record(case, rounds, missing)
        for late in [] if quick else missed(records[name]):
            say(f"  over budget: {late}")
    return records, failed


def write(results: dict[str, Any]) -> None:
    """Write what is committed."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "results.md").write_text(tables(results))
    chart(results, RESULTS / "results.png")
    for page in PAGES:
        page.write_text(in_page(page.read_text(), results))


def earlier() -> dict[str, Any]:
    """The records that are there already."""
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
    if unknown := [name for name in args.names if name not in cases]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(cases)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # The processes of the contestants inherit it: what they write to disk goes with this command.
        os.environ["BENCHMARK_FOLDER"] = folder
        records, failed = run({name: cases[name] for name in args.names or cases}, args.quick)
    merged = {**earlier(), **records} if args.names else records
    results = {
        "machine": machine(),
        "cases": {name: merged[name] for name in cases if name in merged},
    }
    if not args.quick:
        print(tables({**results, "cases": records}))
        if not failed:
            write(results)
    say(
        f"{len(records)} cases in {time.monotonic() - began:.0f} s"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
