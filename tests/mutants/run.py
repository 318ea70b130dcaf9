"""Runs of tests against a copy of the repository, and against the mutations of the copy."""

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import psutil

from tests.mutants.mutations import Mutation

# Every process that a run starts inherits this variable, even a process that lost its parent.
MARK = "FABRIC_MUTANT_RUN"
# A run may take this many times the time of the unchanged copy, and some seconds: machines vary.
SLOWDOWN = 3.0
EXTRA_SECONDS = 60.0
# A test that fails by chance, for lack of time, is followed by another attempt.
ATTEMPTS = 3
_FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_NO_TESTS = 5


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        status: "passed", "failed", "timeout" if the tests did not end within the limit, or
            "unclear" if tests fail only among others.
        failed_test: the first test that failed; empty if there is none.
        seconds: the duration of the run.
    """

    status: str
    failed_test: str
    seconds: float


def copy_repository(root: Path, copy: Path) -> None:
    """Copy the files of a repository that git does not ignore, in place of an earlier copy."""
    shutil.rmtree(copy, ignore_errors=True)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    for name in listing.stdout.splitlines():
        source = root / name
        # A file that was deleted without a commit is still listed, and a link may be no file.
        if source.is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def run_tests(copy: Path, tests: Sequence[str], limit: float | None, log: Path) -> Outcome:
    """Run test files of a copy, up to the first test that fails.

    Args:
        copy: the copy of the repository.
        tests: the paths of the test files in the copy.
        limit: the seconds after which the tests are ended. None: there is no limit.
        log: the file that gets the output.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short"]
    plugins = ["-p", "no:cacheprovider", "-p", "no:hydra_pytest"]
    selection = ["-m", "not slow and not gpu and not engines", *tests]
    mark = secrets.token_hex(8)
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as temporary:
        # An empty variable lets Python keep what it compiles: a run starts hundreds of processes.
        variables = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(copy)}
        variables |= {"TMPDIR": temporary, MARK: mark}
        with open(log, "w") as output:
            process = subprocess.Popen(
                [*command, *plugins, *selection],
                cwd=copy,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                exit_code = process.wait(limit)
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                _end_processes(mark)
                process.wait()
    seconds = round(monotonic() - began, 1)
    failed_test = ""
    match = _FAILED_TEST.search(log.read_text(errors="replace"))
    if match:
        failed_test = match[1]
    if exit_code is None:
        return Outcome("timeout", failed_test, seconds)
    assert exit_code != _NO_TESTS, f"there are no tests in {tests}"
    status = "passed" if exit_code == 0 else "failed"
    return Outcome(status, failed_test, seconds)


def run_mutant(
    copy: Path, mutation: Mutation, tests: Sequence[str], limit: float, log: Path
) -> Outcome:
    """Run test files of a copy with a mutation, which is undone afterwards.

    A test notices the mutation if it fails twice: once among the other tests, and once alone.
    """
    path = copy / mutation.file
    source = path.read_text()
    _write_source(path, mutation.apply(source))
    try:
        for _ in range(ATTEMPTS):
            outcome = run_tests(copy, tests, limit, log)
            if outcome.status != "failed" or not outcome.failed_test:
                return outcome
            alone = run_tests(copy, [outcome.failed_test], limit, log)
            if alone.status != "passed":
                return outcome
        return Outcome("unclear", outcome.failed_test, outcome.seconds)
    finally:
        _write_source(path, source)


def _write_source(path: Path, source: str) -> None:
    """Write a file of Python, and remove what Python compiled from the earlier text.

    Python takes two texts of one length that were written in the same second for the same.
    """
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _end_processes(mark: str) -> None:
    """Kill every process of a run, including the processes that have left its session."""
    while True:
        processes = []
        for process in psutil.process_iter():
            try:
                is_of_run = process.environ().get(MARK) == mark
            except psutil.Error:
                continue
            if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        if not processes:
            return
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=5)
