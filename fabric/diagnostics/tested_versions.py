"""The releases of Python and torch with which the tests of fabric have run.

`make test-versions` runs the tests, and writes the table beside this file.
"""

import csv
import re
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

__all__ = ["TABLE", "SuiteRun", "read_table", "untested_torch", "write_table"]

TABLE = Path(__file__).with_suffix(".csv")


class SuiteRun(NamedTuple):
    """A run of all tests in one environment.

    Attributes:
        environment: the name of the environment, such as ``"3.12-2.14"`` or ``"newest"``.
        date: the day of the run, as in ``"2026-11-25"``.
        python: the version of Python.
        torch: the version of torch.
        dependencies: ``"pinned"`` if the other packages had the versions that the developers use,
            ``"newest"`` if they had the newest versions on that day.
        passed: the number of tests that passed.
        failed: the number of tests that failed.
        skipped: the number of tests that were skipped, or failed as expected.
    """

    environment: str
    date: str
    python: str
    torch: str
    dependencies: str
    passed: int
    failed: int
    skipped: int


def read_table() -> list[SuiteRun]:
    """Return the rows of the table, one for each environment."""
    runs: list[SuiteRun] = []
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            passed = int(row.pop("passed"))
            failed = int(row.pop("failed"))
            skipped = int(row.pop("skipped"))
            runs.append(SuiteRun(**row, passed=passed, failed=failed, skipped=skipped))
    return runs


def write_table(runs: Iterable[SuiteRun]) -> None:
    """Replace the runs in the table."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(SuiteRun._fields)
        writer.writerows(runs)


def untested_torch() -> str:
    """Return a sentence if the installed torch is newer than every tested one, else an empty text.

    Patch releases count as tested. torch is not imported.
    """
    tested = {run.torch: _minor_release(run.torch) for run in read_table()}
    for distribution in distributions(name="torch"):
        # The first one is the one that Python imports. Its version is None if its metadata is
        # damaged.
        installed = str(distribution.version)
        if not tested or _minor_release(installed) <= max(tested.values()):
            return ""
        newest = max(tested, key=_minor_release)
        return (
            f"torch {installed} is newer than torch {newest}, the newest release with which fabric "
            "was tested"
        )
    return ""


def _minor_release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: ``(2, 13)`` for ``"2.13.0+cpu"``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
