"""`make proof`: one loop in many ways, and how far its numbers are from those of the plain loop.

The command runs ``examples/mesh/any_strategy.py`` as the plain PyTorch loop, and then with Fabric
on 1 to 4 processes, under several strategies, and killed (SIGKILL) and started again. It prints a
table with the largest difference of a loss, over all steps, and of a weight after the last step. It
writes the numbers to ``benchmarks/results/proof.json``, the table to ``docs/proof.md``, and the
loss curves to ``docs/proof.png``. The exit code is 1 if a difference is above its limit.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.framework import ROOT
from benchmarks.report import machine, number, replace_between, table_of

SCRIPT = ROOT / "examples" / "mesh" / "any_strategy.py"
RESULTS = ROOT / "benchmarks" / "results" / "proof.json"
PAGE = ROOT / "docs" / "proof.md"
PICTURE = ROOT / "docs" / "proof.png"
NAME = "proof"
# A job is killed when it has logged this step. Every tenth step is saved.
STEP_OF_KILL = 33
DEADLINE = 600.0  # seconds for each start of the script

Losses = list[tuple[int, float]]


@dataclass(frozen=True)
class Run:
    """A way to run the loop.

    Attributes:
        title: what the table calls the run.
        starts: the options of the script. All starts but the last are killed.
        limit: the largest difference that is promised. The loop is in float64.
    """

    title: str
    starts: Sequence[str]
    limit: float = 1e-9


@dataclass(frozen=True)
class Difference:
    """The largest differences between a run and the plain loop.

    Attributes:
        loss: over all steps, those that were repeated after a kill included.
        weight: over all weights after the last step.
    """

    title: str
    loss: float
    weight: float
    limit: float

    @property
    def is_within_limit(self) -> bool:
        return self.loss <= self.limit and self.weight <= self.limit


PLAIN = Run("plain PyTorch", ["--strategy plain"])
RUNS = (
    Run("1 process", ["--devices 1"], limit=0.0),
    Run("1 process, killed and resumed", ["--devices 1", "--devices 1"], limit=0.0),
    Run("ddp, 2 processes", ["--devices 2"]),
    Run("ddp, 3 processes", ["--devices 3"]),
    Run("fsdp, 2 processes", ["--strategy fsdp --devices 2"]),
    Run("fsdp, 3 processes", ["--strategy fsdp --devices 3"]),
    Run("mesh, each layer on 3 processes", ["--strategy mesh --devices 3 --tensor 3"]),
    Run("mesh of 2 x 2 processes", ["--strategy mesh --devices 4 --tensor 2"]),
    Run("ddp on 2, killed, resumed on 3", ["--devices 2", "--devices 3"]),
    Run(
        "fsdp on 3, killed, resumed on a mesh of 2",
        ["--strategy fsdp --devices 3", "--strategy mesh --devices 2 --tensor 2"],
    ),
)


def run(way: Run, folder: Path) -> None:
    """Run the loop in a folder, and kill every start but the last."""
    *killed_starts, last_start = way.starts
    for options in killed_starts:
        _start(options, folder, is_killed=True)
    _start(last_start, folder, is_killed=False)


def _start(options: str, folder: Path, is_killed: bool) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *options.split()]
    end = time.monotonic() + DEADLINE
    # With one thread, sums have the same order in every start.
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while is_killed and process.poll() is None and time.monotonic() < end:
            if any(step == STEP_OF_KILL for step, _ in read_losses(folder)):
                process.kill()
            time.sleep(0.01)
        # The ranks hold the pipe, too. It ends with the last rank.
        output, _ = process.communicate(timeout=DEADLINE)
    expected_code = -9 if is_killed else 0
    if process.returncode != expected_code:
        raise RuntimeError(f"{options} has ended with {process.returncode}:\n{output}")


def read_losses(folder: Path) -> Losses:
    """Return the steps and losses that a run has logged, in the order of time."""
    path = folder / "losses.jsonl"
    if not path.exists():
        return []
    losses: Losses = []
    for line in path.read_text().splitlines(keepends=True):
        # The end of a killed job may have cut the last line short.
        if line.endswith("\n"):
            record = json.loads(line)
            losses.append((record["step"], record["loss"]))
    return losses


def compare(way: Run, folder: Path, plain_folder: Path) -> Difference:
    """Compare a run with the plain loop."""
    plain_losses = dict(read_losses(plain_folder))
    losses = read_losses(folder)
    if {step for step, _ in losses} != plain_losses.keys():
        raise RuntimeError(f"{way.title}: the steps are not those of the plain loop")
    loss = max(abs(loss - plain_losses[step]) for step, loss in losses)
    weight = 0.0
    weights = torch.load(folder / "weights.pt", map_location="cpu")
    plain_weights = torch.load(plain_folder / "weights.pt", map_location="cpu")
    for name, plain_weight in plain_weights.items():
        difference = (weights[name] - plain_weight).abs().max()
        weight = max(weight, difference.item())
    return Difference(way.title, loss, weight, way.limit)


def summary(results: dict[str, Any]) -> str:
    """Return the table of the differences as Markdown."""
    rows = [["run", "largest difference of a loss", "of a weight", "limit"]]
    for record in results["rows"]:
        difference = Difference(**record)
        limit = number(difference.limit)
        if not difference.is_within_limit:
            limit = f"**{limit}, exceeded**"
        rows.append([difference.title, number(difference.loss), number(difference.weight), limit])
    conditions = (
        f"Made by `make proof` on {results['date']}: {results['steps']} steps in float64; "
        f"{results['machine']}."
    )
    return f"{table_of(rows)}\n\n{conditions}"


def draw(losses: dict[str, Losses], path: Path) -> None:
    """Draw the loss curves over each other, and below them their distances from the plain loop."""
    # matplotlib is an extra, and slow to import.
    from matplotlib import colormaps  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    curves, distances = figure.subplots(2, sharex=True, height_ratios=[3, 1])
    plain_losses = dict(losses[PLAIN.title])
    colors = colormaps["turbo"]
    for position, (title, points) in enumerate(losses.items()):
        color = colors(position / len(losses))
        by_step = dict(points)
        # The first curve is the widest, so that every curve can be seen.
        width = 1.5 * (len(losses) - position)
        curves.plot(
            list(by_step), list(by_step.values()), linewidth=width, color=color, label=title
        )
        if title != PLAIN.title:
            distance = [abs(loss - plain_losses[step]) for step, loss in by_step.items()]
            distances.plot(list(by_step), distance, linewidth=1, color=color)
    curves.axvline(STEP_OF_KILL, color="gray", linestyle=":", linewidth=1)
    curves.text(STEP_OF_KILL + 0.5, max(plain_losses.values()), "kill -9 of three runs", va="top")
    curves.set_ylabel("loss of a small GPT")
    for line in curves.legend(fontsize="small").get_lines():
        line.set_linewidth(4)
    distances.set_yscale("symlog", linthresh=1e-16)
    distances.set_ylim(0, 1e-8)
    distances.set_yticks([0, 1e-15, 1e-12, 1e-9], ["0", "1e-15", "1e-12", "1e-9"])
    distances.axhline(1e-9, color="black", linewidth=1)
    distances.set_ylabel("difference")
    distances.set_xlabel("step; the line is the promised limit")
    for axes in (curves, distances):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def in_page(page: str, results: dict[str, Any]) -> str:
    """Return the text of the page with the table of these results."""
    return replace_between(page, NAME, summary(results))


def run_all(runs: Sequence[Run], directory: Path) -> tuple[list[Difference], dict[str, Losses]]:
    """Run the plain loop, which is the first run, and the other runs.

    Returns:
        The difference of each other run from the plain loop, and the losses of all runs by title.
    """
    began = time.monotonic()
    plain, *_ = runs
    differences: list[Difference] = []
    losses: dict[str, Losses] = {}
    for way in runs:
        print(f"{time.monotonic() - began:4.0f} s  {way.title}", file=sys.stderr, flush=True)
        folder = directory / way.title
        run(way, folder)
        losses[way.title] = read_losses(folder)
        if way is not plain:
            differences.append(compare(way, folder, directory / plain.title))
    return differences, losses


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        differences, losses = run_all((PLAIN, *RUNS), Path(directory))
    results = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "steps": len(dict(losses[PLAIN.title])),
        "rows": [asdict(difference) for difference in differences],
    }
    print(summary(results))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(in_page(PAGE.read_text(), results))
    draw(losses, PICTURE)
    print(f"{time.monotonic() - began:.0f} s; the loss curves: {PICTURE.relative_to(ROOT)}")
    return int(not all(difference.is_within_limit for difference in differences))


if __name__ == "__main__":
    sys.exit(main())
