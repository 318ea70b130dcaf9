"""`make test-versions`: run the tests with each release of Python and torch that fabric supports.

The environments are created in a folder, and used again by the next run. Some need gigabytes: see
`stand_ins.py`. After each run of the tests, the table of tested versions is written into the
package, which `fabric doctor` shows, and into the documentation.

With names, such as `3.12-2.14` or `newest`, it runs only these environments. The exit code is 1 if
a test fails, or if a run of the tests does not end.
"""

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree

from fabric.diagnostics.tested_versions import SuiteRun, read_table, write_table
from tests.versions.environment import ROOT, Versions, build_environment, oldest_torch

PAGE = ROOT / "docs" / "install.md"
MARKERS = ("<!-- tested versions: begin -->", "<!-- tested versions: end -->")
# Each supported Python and each supported torch, in pairs. The last run has the newest release of
# every dependency, which constraints.txt does not know yet.
VERSIONS = (
    Versions("3.11", oldest_torch()),
    Versions("3.12", "2.14"),
    Versions("3.13", "2.15"),
    Versions("3.13", "newest", dependencies="newest"),
)
# In seconds. All tests take nine minutes on two idle cores, and a machine may be slow.
SESSION = 3600


def main(arguments: list[str]) -> int:
    """Test the environments that the arguments name, or all of them; return the exit code."""
    names = [versions.name for versions in VERSIONS]
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(names))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    options = parser.parse_args(arguments)
    unknown = ", ".join(sorted(set(options.names) - set(names)))
    if unknown:
        parser.error(f"there is no {unknown}; there are {', '.join(names)}")
    has_failed = False
    for versions in VERSIONS:
        if options.names and versions.name not in options.names:
            continue
        folder = options.folder.resolve() / versions.name
        run = run_tests(versions, folder)
        if run is None or run.failed:
            has_failed = True
        if run is not None:
            record(run)
    print(as_markdown(read_table()))
    return int(has_failed)


def run_tests(versions: Versions, folder: Path) -> SuiteRun | None:
    """Run the tests in an environment, and return the counts. None if the run did not end.

    Args:
        versions: the versions of the environment.
        folder: the folder of the environment, which may exist.
    """
    print(f"test-versions: {versions.name}, in {folder}", flush=True)
    python = build_environment(versions, folder)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "3",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        f"--junitxml={report}",
    ]
    selection = ["-m", "not slow and not gpu and not engines", f"--session-timeout={SESSION}"]
    began = monotonic()
    exit_code = subprocess.run([*command, *selection], cwd=ROOT).returncode
    print(f"test-versions: {versions.name} took {monotonic() - began:.0f} s", flush=True)
    # 0: all tests have passed. 1: some have failed.
    if exit_code not in (0, 1):
        return None
    return read_report(versions, python, report)


def read_report(versions: Versions, python: Path, report: Path) -> SuiteRun:
    """Return the row of the table for a run of the tests.

    Args:
        versions: the versions that were asked for.
        python: the interpreter of the environment, which tells the exact versions.
        report: the report of pytest.
    """
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    total = int(suite.attrib["tests"])
    skipped = int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    answer = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    python_version, torch_version = answer.stdout.split()
    return SuiteRun(
        environment=versions.name,
        date=date.today().isoformat(),
        python=python_version,
        torch=torch_version.partition("+")[0],
        dependencies=versions.dependencies,
        passed=total - skipped - failed,
        failed=failed,
        skipped=skipped,
    )


def record(run: SuiteRun) -> None:
    """Replace the row of an environment in the tables of the package and of the documentation."""
    runs_by_name = {earlier.environment: earlier for earlier in read_table()}
    runs_by_name[run.environment] = run
    # Environments that are not tested any more are left out.
    runs: list[SuiteRun] = []
    for versions in VERSIONS:
        if versions.name in runs_by_name:
            runs.append(runs_by_name[versions.name])
    write_table(runs)
    PAGE.write_text(in_page(PAGE.read_text(), runs))


def in_page(page: str, runs: list[SuiteRun]) -> str:
    """Return the text of a page with the table of these runs between the markers."""
    begin, end = MARKERS
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    replacement = f"{begin}\n\n{as_markdown(runs)}\n{end}"
    text, count = re.subn(pattern, lambda _: replacement, page, flags=re.DOTALL)
    assert count == 1, f"the page needs {begin} and {end} once"
    return text


def as_markdown(runs: list[SuiteRun]) -> str:
    lines = [
        "| Python | torch | other packages | date | passed | failed | skipped |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for run in runs:
        lines.append(
            f"| {run.python} | {run.torch} | {run.dependencies} | {run.date} | {run.passed:,} "
            f"| {run.failed:,} | {run.skipped:,} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
