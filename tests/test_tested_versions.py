"""The table of tested versions, and what is said about a torch that is newer."""

import tomllib
from functools import partial

import pytest
import torch

from fabric.diagnostics import tested_versions
from fabric.diagnostics.hang_report import compose_report
from fabric.diagnostics.rank_state import RankState
from fabric.diagnostics.tested_versions import SuiteRun, read_table, untested_torch, write_table
from fabric.errors import RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec
from tests.versions.__main__ import PAGE, VERSIONS, in_page
from tests.versions.environment import ROOT, oldest_torch

RUN = SuiteRun(
    environment="3.11-2.13",
    date="2026-11-25",
    python="3.11.7",
    torch="2.13.0",
    dependencies="pinned",
    passed=2000,
    failed=0,
    skipped=30,
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return a function that replaces the table by one with this release of torch."""
    monkeypatch.setattr(tested_versions, "TABLE", tmp_path / "table.csv")

    def write(torch_version):
        write_table([RUN._replace(torch=torch_version), RUN._replace(torch="1.9.1")])

    return write


def test_a_run_is_read_as_it_was_written(table):
    table("2.13.0")
    assert read_table() == [RUN, RUN._replace(torch="1.9.1")]


def test_a_torch_that_is_newer_than_every_tested_one_is_named(table):
    table("1.13.1")
    sentence = untested_torch()
    assert sentence.startswith(f"torch {torch.__version__.partition('+')[0]}")
    assert sentence.endswith(
        "is newer than torch 1.13.1, the newest release with which fabric was tested"
    )


def test_a_tested_torch_an_older_one_and_a_patch_release_are_not_named(table):
    major, minor, *_ = torch.__version__.split(".")
    table(f"{major}.{minor}.0")
    assert untested_torch() == ""
    table(f"{major}.{int(minor) + 1}.0")
    assert untested_torch() == ""


def test_nothing_is_newer_than_an_empty_table(table):
    write_table([])
    assert untested_torch() == ""


def test_the_error_of_a_failed_job_names_a_torch_that_is_newer_than_every_tested_one(table):
    table("1.13.1")
    fail = partial(int, "no number")
    with pytest.raises(RankFailedError, match=r"newer than torch 1\.13\.1(.|\n)*no number"):
        LAUNCHERS["forkserver"].launch(fail, (), {}, LaunchSpec(num_processes=1))


def test_a_hang_report_names_a_torch_that_is_newer_than_every_tested_one(table):
    table("1.13.1")
    waiting = RankState("in barrier('a')", is_inside=True, key="job", counts={"job": 1})
    states = {0: waiting, 1: RankState("in no collective")}
    assert "is newer than torch 1.13.1" in compose_report(states, requester=0)


def test_the_page_has_the_table_that_the_doctor_prints():
    page = PAGE.read_text()
    assert in_page(page, read_table()) == page


def test_every_python_and_the_oldest_torch_that_the_project_claims_are_tested():
    claimed = set()
    for classifier in PROJECT["classifiers"]:
        name, _, version = classifier.rpartition(" :: ")
        if name == "Programming Language :: Python" and "." in version:
            claimed.add(version)
    tested_pythons = set()
    tested_torches = set()
    for versions in VERSIONS:
        tested_pythons.add(versions.python)
        tested_torches.add(versions.torch)
    assert tested_pythons == claimed
    assert oldest_torch() in tested_torches
