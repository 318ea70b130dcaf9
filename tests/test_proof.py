"""The page of proofs agrees with the files that its commands wrote, and the commands work."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, promises, proof
from benchmarks.proof import Difference, Run
from tests.mutants import score

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "proof.md").read_text()
SMALL = "--devices 1 --steps 40"


def results_of(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of results, or None if the command has not written it."""
    if not path.exists():
        return None
    return json.loads(path.read_text())


def test_the_page_has_the_figures_of_the_files() -> None:
    differences = results_of(proof.RESULTS)
    assert differences is not None
    assert proof.in_page(PAGE, differences) == PAGE
    assert promises.in_page(PAGE, results_of(promises.RESULTS)) == PAGE
    assert gpu.in_page(PAGE) == PAGE
    mutations = results_of(score.RESULTS)
    assert mutations is not None
    assert score.in_page(PAGE, mutations) == PAGE


def test_the_differences_of_the_page_are_within_their_limits() -> None:
    differences = results_of(proof.RESULTS)
    assert differences is not None
    assert [record["title"] for record in differences["rows"]] == [way.title for way in proof.RUNS]
    assert all(Difference(**record).is_within_limit for record in differences["rows"])


def test_at_least_95_percent_of_the_changes_that_matter_are_noticed() -> None:
    mutations = results_of(score.RESULTS)
    assert mutations is not None
    assert score.score_of(score.read_rows(mutations)).percentage >= 95


def test_every_promise_has_tests() -> None:
    for promise in promises.PROMISES:
        for test in promise.tests:
            assert (ROOT / test).is_file(), test


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_compared_with_the_plain_loop(tmp_path: Path) -> None:
    plain = Run("plain", ["--strategy plain --steps 40"])
    killed = Run("killed", [SMALL, SMALL], limit=0.0)
    [difference], losses = proof.run_all([plain, killed], tmp_path)
    assert difference == Difference("killed", loss=0.0, weight=0.0, limit=0.0)
    steps = [step for step, _ in losses["killed"]]
    # The newest checkpoint is older than the step of the kill.
    assert steps.count(proof.STEP_OF_KILL) == 2
    assert set(steps) == set(range(1, 41))


def test_a_difference_above_its_limit_is_marked() -> None:
    difference = Difference("ddp", loss=1e-15, weight=2e-9, limit=1e-9)
    assert not difference.is_within_limit
    results = {
        "date": "2026-01-01",
        "machine": "two cores",
        "steps": 40,
        "rows": [vars(difference)],
    }
    assert "| ddp | 1e-15 | 2e-09 | **1e-09, exceeded** |" in proof.summary(results)


def test_loss_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "proof.png"
    proof.draw({proof.PLAIN.title: [(1, 2.0), (2, 1.0)], "other": [(1, 2.0), (2, 1.5)]}, picture)
    assert picture.stat().st_size > 10_000


def test_the_counts_of_a_promise_come_from_the_report_of_its_files(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase file="tests/a.py"/>'
        '<testcase file="tests/a.py"><failure/></testcase>'
        '<testcase file="tests/a.py"><skipped/></testcase>'
        '<testcase file="tests/b.py"/>'
        "</testsuite></testsuites>"
    )
    outcome = promises.read_report(report, ["tests/a.py"])
    assert outcome == promises.Outcome(passed=1, failed=1, skipped=1)


def test_without_a_gpu_the_command_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu.main(["--folder", str(tmp_path)]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def results_of_gpu(**changes: Any) -> dict[str, Any]:
    """Return what the command would write on a GPU."""
    difference = Difference("1 process", loss=0.0, weight=3e-12, limit=1e-9)
    results = {
        "format": gpu.FORMAT,
        "date": "2026-01-01",
        "gpu": "NVIDIA H200",
        "count": 2,
        "cuda": "13.0",
        "machine": "16 cores",
        "tests": {"passed": 30, "failed": 0, "skipped": 0},
        "proof": [vars(difference)],
        "quick": False,
        "cases": {},
        "failed_cases": [],
    }
    return results | changes


def test_a_file_of_a_gpu_is_a_row_of_the_page(tmp_path: Path) -> None:
    path = gpu.write(results_of_gpu(), tmp_path)
    assert path.name == "nvidia-h200_2026-01-01.json"
    page = gpu.in_page("<!-- gpu: begin --><!-- gpu: end -->", tmp_path)
    assert "| 2 x NVIDIA H200, CUDA 13.0 | 2026-01-01 | 30 | 0 | 3e-12 | - | - |" in page


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = gpu.write(results_of_gpu(format=2), tmp_path)
    with pytest.raises(ValueError, match="has the format 2, not 1"):
        gpu.read(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"tests": {"passed": 29, "failed": 1, "skipped": 0}},
        {"failed_cases": ["gpu-step"]},
        {"proof": [vars(Difference("1 process", loss=1.0, weight=0.0, limit=1e-9))]},
    ],
    ids=["test", "case", "difference"],
)
def test_a_failure_on_a_gpu_is_told(changes: dict[str, Any]) -> None:
    assert gpu.is_successful(results_of_gpu())
    assert not gpu.is_successful(results_of_gpu(**changes))


@pytest.mark.slow
@pytest.mark.soak
def test_a_cpu_stands_in_for_a_gpu(tmp_path: Path) -> None:
    assert gpu.main(["--accelerator", "cpu", "--folder", str(tmp_path), "--quick"]) == 0
    [path] = tmp_path.iterdir()
    results = gpu.read(path)
    assert results["tests"]["failed"] == 0
    assert len(results["proof"]) == len(gpu.runs_on("cpu", 1)) - 1
    assert list(results["cases"]) == ["step-32-true"]
