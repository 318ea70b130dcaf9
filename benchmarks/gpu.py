"""Everything that is shown on a CPU, on the GPUs of this machine.

``python -m benchmarks.gpu [--quick]`` takes about ten minutes. On whatever GPUs are there, it

- runs the tests that need a GPU,
- compares the loop of `make proof` with the plain loop: on one GPU, killed and resumed, and, if
  there are several GPUs, under DDP, FSDP and on a mesh,
- measures the cases of ``benchmarks/cases/gpu.py``, beside raw torch and the other libraries.

It writes ``benchmarks/results/<gpu>_<date>.json``, and a row for each such file to
``docs/proof.md``. The exit code is 1 if a test fails or a difference is above its limit, and 2 if
there is no GPU. ``--accelerator cpu --folder FOLDER`` tries the command on a CPU.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks import promises, proof
from benchmarks.__main__ import all_cases, run
from benchmarks.framework import ROOT
from benchmarks.proof import Difference, Run
from benchmarks.report import comparison_with_raw, machine, number, replace_between, table_of

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "proof.md"
NAME = "gpu"
TESTS = ("tests/test_gpu.py",)
# The files of this command. Other files in the folder have no date in their name.
PATTERN = "*_????-??-??.json"
FORMAT = 1
# What the page shows of the cases: the case, the row, and the head of the column.
SHOWN = (
    ("gpu-step", "time", "a step, vs. raw"),
    ("gpu-gpt", "throughput", "a GPT, vs. raw"),
)
# The case that a CPU measures when it stands in for a GPU.
CASES_OF_CPU = ("step-32-true",)


def runs_on(accelerator: str, count: int) -> list[Run]:
    """Return the plain loop and the runs that a number of devices allows."""
    options = f"--accelerator {accelerator}"
    runs = [
        Run("plain PyTorch", [f"{options} --strategy plain"]),
        Run("1 process", [f"{options} --devices 1"]),
        Run("1 process, killed and resumed", [f"{options} --devices 1"] * 2),
    ]
    if count < 2:
        return runs
    mesh = f"{options} --strategy mesh --devices 2 --tensor 2"
    return [
        *runs,
        Run("ddp, 2 processes", [f"{options} --devices 2"]),
        Run("fsdp, 2 processes", [f"{options} --strategy fsdp --devices 2"]),
        Run("mesh, each layer on 2 processes", [mesh]),
        Run("ddp on 2, killed, resumed on a mesh of 2", [f"{options} --devices 2", mesh]),
    ]


def measure(accelerator: str, count: int, quick: bool) -> dict[str, Any]:
    """Run everything, and return the content of the file.

    Args:
        accelerator: ``"cuda"``, or ``"cpu"`` to try the command.
        count: the number of devices.
        quick: whether the cases are measured once, at small sizes.
    """
    cases = all_cases()
    chosen = {name: cases[name] for name in CASES_OF_CPU}
    name = "cpu"
    if accelerator == "cuda":
        chosen = {name: entry for name, entry in cases.items() if entry[1].cuda}
        name = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        promises.run_tests(TESTS, "gpu", report)
        outcome = promises.read_report(report, TESTS)
        differences, _ = proof.run_all(runs_on(accelerator, count), Path(directory, "proof"))
    records, failed = run(chosen, quick)
    return {
        "format": FORMAT,
        "date": date.today().isoformat(),
        "gpu": name,
        "count": count,
        "cuda": torch.version.cuda,
        "machine": machine(),
        "tests": asdict(outcome),
        "proof": [asdict(difference) for difference in differences],
        "quick": quick,
        "cases": records,
        "failed_cases": failed,
    }


def write(results: dict[str, Any], folder: Path) -> Path:
    """Write the file into a folder, and return its path."""
    name = re.sub(r"\W+", "-", results["gpu"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{results['date']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file that this command has written.

    Raises:
        ValueError: the file has another format.
    """
    results = json.loads(path.read_text())
    if results.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {results.get('format')}, not {FORMAT}")
    return results


def is_successful(results: dict[str, Any]) -> bool:
    """Return whether all tests and cases have passed, and all differences are small enough."""
    differences = [Difference(**record) for record in results["proof"]]
    are_close = all(difference.is_within_limit for difference in differences)
    return are_close and not results["tests"]["failed"] and not results["failed_cases"]


def summary(files: Iterable[dict[str, Any]]) -> str:
    """Return a table with a row for each file as Markdown."""
    heads = ["GPU", "date", "tests passed", "failed", "largest difference"]
    rows = [[*heads, *(head for _, _, head in SHOWN)]]
    for results in files:
        largest = 0.0
        for record in results["proof"]:
            largest = max(largest, record["loss"], record["weight"])
        tests = results["tests"]
        row = [
            f"{results['count']} x {results['gpu']}, CUDA {results['cuda']}",
            results["date"],
            str(tests["passed"]),
            str(tests["failed"]),
            number(largest),
        ]
        for case, name, _ in SHOWN:
            row.append(comparison_with_raw(results, case, name))
        rows.append(row)
    if len(rows) == 1:
        return "Nobody has sent a file yet."
    return table_of(rows, text_columns=2)


def in_page(page: str, folder: Path = RESULTS) -> str:
    """Return the text of the page with a row for each file in the folder."""
    files = [read(path) for path in sorted(folder.glob(PATTERN))]
    return replace_between(page, NAME, summary(files))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where to write the file")
    parser.add_argument("--quick", action="store_true", help="measure once, at small sizes")
    options = parser.parse_args(arguments)
    count = 1
    if options.accelerator == "cuda":
        count = torch.cuda.device_count()
    if count == 0:
        print("torch sees no GPU here, so nothing was measured or written.")
        print("To try the command: python -m benchmarks.gpu --accelerator cpu --folder /tmp/gpu")
        return 2
    results = measure(options.accelerator, count, options.quick)
    path = write(results, options.folder)
    print(summary([results]))
    print(f"Written to {path}. To share it, open a pull request that adds the file.")
    if options.folder == RESULTS:
        PAGE.write_text(in_page(PAGE.read_text()))
    return int(not is_successful(results))


if __name__ == "__main__":
    sys.exit(main())
