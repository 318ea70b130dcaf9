"""The tests of each promise: runs them, and writes the table of ``docs/proof.md``.

``python -m benchmarks.promises [--slow]`` runs the tests below, three files at a time, and writes
how many have passed to ``benchmarks/results/promises.json`` and to the page. ``--slow`` includes
the longer samples of `make test-slow`, and takes half an hour instead of some minutes. The exit
code is 1 if a test fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.framework import ROOT
from benchmarks.report import machine, replace_between, table_of

RESULTS = ROOT / "benchmarks" / "results" / "promises.json"
PAGE = ROOT / "docs" / "proof.md"
NAME = "promises"
COMMAND = "python -m benchmarks.promises"


@dataclass(frozen=True)
class Promise:
    """What fabric promises, and the tests of it.

    Attributes:
        text: the promise.
        method: how it is tested.
        tests: files and folders of tests.
    """

    text: str
    method: str
    tests: Sequence[str]


PROMISES = (
    Promise(
        "An update does not depend on the number of processes, the strategy, or the split of a "
        "batch",
        "a property test over models, strategies, batches that do not divide and accumulation, "
        "and ten kinds of loops, compared with the plain loop",
        ["tests/laws/test_exactness.py", "tests/test_parity.py", "tests/test_gallery.py"],
    ),
    Promise(
        "Collectives return what their description says, for every dtype, shape and group",
        "laws over generated collections and sequences of calls, compared with an oracle in one "
        "process",
        ["tests/laws/test_laws.py", "tests/laws/test_machines.py"],
    ),
    Promise(
        "The laws find bugs",
        "collectives with a planted bug; each has to be found, and shrunk to an example that a "
        "person would write",
        ["tests/laws/test_planted.py", "tests/test_testing_oracles.py"],
    ),
    Promise(
        "A resumed run takes the samples of the uninterrupted one, on any number of processes",
        "a property test of positions, checkpoints on other layouts, and checkpoints that earlier "
        "releases wrote",
        ["tests/laws/test_positions.py", "tests/test_resharding.py", "tests/test_stored.py"],
    ),
    Promise(
        "A save that is killed leaves the old checkpoint or the new one",
        "a rank is killed at one step of a save after the other, and while it writes",
        ["tests/faults/test_crash_points.py", "tests/faults/test_kept_checkpoints.py"],
    ),
    Promise(
        "Replicas that drift apart are an error",
        "planted differences between ranks, in parameters, buffers, optimizers and averages",
        ["tests/test_replicas.py", "tests/test_replica_digests.py"],
    ),
    Promise(
        "`fabric diff` names the first value that differs between two runs",
        "planted differences, each of which has to be named; equal runs, which have none",
        ["tests/test_fingerprint.py"],
    ),
    Promise(
        "A rank that fails ends the job, with its cause and exit code, and leaves no process",
        "ranks that raise, exit, are killed and abort, and signals to the launching process, "
        "under every launcher",
        ["tests/faults/test_ranks.py", "tests/faults/test_parents.py"],
    ),
    Promise(
        "A hang names who waits where",
        "ranks that wait in collectives, in backward passes and in C++ code",
        ["tests/test_watchdog.py"],
    ),
    Promise(
        "Mistakes raise errors on every rank",
        "mistakes of users, each with the part of the error that has to name it",
        [
            "tests/test_first_mistakes.py",
            "tests/test_checked.py",
            "tests/test_collectives_mistakes.py",
            "tests/test_checkpoint_mistakes.py",
            "tests/test_training_mistakes.py",
            "tests/test_process_mistakes.py",
        ],
    ),
    Promise(
        "A step costs next to nothing",
        "the number of Python calls of a step, compared with that of raw torch",
        ["tests/test_costs.py"],
    ),
    Promise(
        "Loading a checkpoint runs no code from it",
        "checkpoints that would run code under pickle",
        ["tests/test_security.py"],
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How many tests have passed, failed and been skipped."""

    passed: int
    failed: int
    skipped: int


def run_tests(tests: Sequence[str], selection: str, report: Path) -> None:
    """Run tests, and write pytest's report.

    Args:
        tests: files of tests, relative to the root of the repository.
        selection: the tests to run, in pytest's language of marks.
        report: the file to write. The tests write temporary files next to it.

    Raises:
        RuntimeError: the run of the tests did not end.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    command += [f"--basetemp={report.parent / 'pytest'}", "-m", selection, *tests]
    exit_code = subprocess.run(command, cwd=ROOT).returncode
    # 0: all tests have passed. 1: some have failed.
    if exit_code not in (0, 1):
        raise RuntimeError(f"pytest has ended with {exit_code}")


def read_report(report: Path, tests: Sequence[str]) -> Outcome:
    """Return the outcome of files of tests from pytest's report."""
    results: list[str] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.attrib["file"] in tests:
            results.append(_result(case))
    return Outcome(
        passed=results.count("passed"),
        failed=results.count("failed"),
        skipped=results.count("skipped"),
    )


def _result(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    if "skipped" in tags:
        return "skipped"
    return "passed"


def summary(results: dict[str, Any] | None) -> str:
    """Return the table of the promises as Markdown, without counts if there are no results."""
    rows = [["promise", "how it is tested", "tests", "passed", "failed"]]
    for promise in PROMISES:
        links = [f"[`{Path(test).stem}`](../{test})" for test in promise.tests]
        counts = ["-", "-"]
        if results is not None:
            outcome = Outcome(**results["rows"][promise.text])
            counts = [str(outcome.passed), str(outcome.failed)]
        rows.append([promise.text, promise.method, ", ".join(links), *counts])
    made = f"`{COMMAND}` runs these tests and fills in the counts."
    if results is not None:
        made = f"Made by `{results['command']}` on {results['date']}; {results['machine']}."
    return f"{table_of(rows, text_columns=3)}\n\n{made}"


def in_page(page: str, results: dict[str, Any] | None) -> str:
    """Return the text of the page with the table of these results."""
    return replace_between(page, NAME, summary(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="the tests of `make test-slow`, too")
    options = parser.parse_args()
    command = COMMAND
    selection = "not soak and not gpu and not engines"
    if options.slow:
        command = f"{command} --slow"
    else:
        selection = f"not slow and {selection}"
    tests: list[str] = []
    for promise in PROMISES:
        tests += promise.tests
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        run_tests(tests, selection, report)
        for promise in PROMISES:
            outcomes[promise.text] = read_report(report, promise.tests)
    results = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "command": command,
        "rows": {text: asdict(outcome) for text, outcome in outcomes.items()},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(in_page(PAGE.read_text(), results))
    return int(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
