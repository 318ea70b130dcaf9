"""Collections vs. flat tensors: what coalescing costs, and what it saves.

`python -m benchmarks.collectives` measures on 2 and on 4 ranks: one flat
`torch.distributed.all_reduce`, `fabric.all_reduce` of a dict of as many metrics, and torch's
collective for each metric. It also measures one tensor of 64 MiB with fabric and with torch,
including the copy that both need. Every round measures all contestants, in an order that rotates.
The time of a round is the time of the slowest rank. Ratios are taken within a round, because a busy
machine slows both sides, and shown as the median with the quartiles.

The command prints a table and writes it to `benchmarks/results/collectives.md`. The exit code is 1
if a median misses its target. `--quick` takes fewer rounds and writes nothing.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.testing import RankPool

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "collectives.md"
LARGE = ("64 MiB reduced", "64 MiB by hand", "64 MiB gathered", "64 MiB gathered by hand")
# The slow contestants are called once. NUMBER calls of another contestant take about as long.
REPETITIONS: dict[str, int] = dict.fromkeys(("a loop over 64 tensors", *LARGE), 1)
NUMBER = 5


class Target(NamedTuple):
    """The highest or lowest ratio of the times of two contestants, by the number of ranks."""

    contestant: str
    reference: str
    limits: dict[int, float]
    at_least: bool = False

    def holds(self, ratio: float, ranks: int) -> bool:
        limit = self.limits[ranks]
        return ratio >= limit if self.at_least else ratio <= limit


TARGETS = (
    Target("one number", "one number by hand", {2: 1.8, 4: 1.8}),
    Target("one tensor of one number", "one number by hand", {2: 1.8, 4: 1.8}),
    Target("dict of 64 tensors", "one flat tensor of 64", {2: 1.5, 4: 1.5}),
    Target("dict of 64 floats", "one flat tensor of 64", {2: 1.5, 4: 1.5}),
    Target("a loop over 64 tensors", "dict of 64 tensors", {2: 12.0, 4: 6.0}, at_least=True),
    Target("dict of 1,000 floats", "one flat tensor of 1,000", {2: 1.5, 4: 1.5}),
    Target("dict of 1,000 tensors", "stack, all_reduce, unbind", {2: 1.1, 4: 1.1}),
    Target("64 MiB reduced", "64 MiB by hand", {2: 1.1, 4: 1.1}),
    Target("64 MiB gathered", "64 MiB gathered by hand", {2: 1.25, 4: 1.4}),
)

Rounds = list[dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser(description="Collectives of collections vs. flat tensors.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args(arguments).quick
    lines = [
        "| ranks | what | ms | vs. | ms | ratio | quartiles | target |",
        "|--:|---|--:|---|--:|--:|--:|--:|",
    ]
    missed = 0
    number_of_rounds = 10 if quick else 40
    for ranks in (2, 4):
        with RankPool(ranks, timeout=600) as pool:
            rounds_by_rank: list[Rounds] = pool.run(measure, number_of_rounds)
        rounds = [slowest(results) for results in zip(*rounds_by_rank, strict=True)]
        for target in TARGETS:
            line, ratio = compare(target, rounds, ranks)
            lines.append(line)
            if not target.holds(ratio, ranks):
                missed += 1
    table = "\n".join(lines)
    print(table)
    if not quick:
        load = f"load {os.getloadavg()[0]:.0f}"
        where = (
            f"{platform.system()}, {os.cpu_count()} cores, {load}, torch {torch.__version__}, gloo"
        )
        RESULTS.write_text(
            "# Collections vs. flat tensors\n\n"
            f"`python -m benchmarks.collectives`. {where}.\n\n{table}\n"
        )
    return int(missed > 0)


def slowest(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the time of the slowest rank for each contestant."""
    return {name: max(result[name] for result in results) for name in results[0]}


def compare(target: Target, rounds: Rounds, ranks: int) -> tuple[str, float]:
    """Return a line of the table, and the median of the ratios."""
    times = [seconds[target.contestant] for seconds in rounds]
    reference_times = [seconds[target.reference] for seconds in rounds]
    ratios = [time / reference for time, reference in zip(times, reference_times, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    sign = ">=" if target.at_least else "<="
    limit = f"{sign} {target.limits[ranks]:g}"
    if not target.holds(middle, ranks):
        limit = f"{limit}, missed"
    cells = [
        str(ranks),
        target.contestant,
        f"{1e3 * median(times):.2f}",
        target.reference,
        f"{1e3 * median(reference_times):.2f}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        limit,
    ]
    return f"| {' | '.join(cells)} |", middle


def measure(fabric: Fabric, rounds: int) -> Rounds:
    """Return the seconds of one call of each contestant on this rank, by round.

    A first round warms up and is not returned.
    """
    actions = contestants(fabric)
    small = [name for name in actions if name not in LARGE]
    results: Rounds = []
    for turn in range(rounds + 1):
        # The groups rotate separately, so that no contestant always follows a large one.
        order = [*rotate(small, turn), *rotate(list(LARGE), turn)]
        results.append(
            {name: seconds(actions[name], REPETITIONS.get(name, NUMBER)) for name in order}
        )
    return results[1:]


def rotate(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def seconds(action: Callable[[], Any], number: int) -> float:
    """Return the mean seconds of ``number`` calls that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(number):
        action()
    return (time.perf_counter() - start) / number


def contestants(fabric: Fabric) -> dict[str, Callable[[], Any]]:
    """Return the contestants. All of them compute sums, so that no side divides."""
    floats = {
        size: {f"metric {index}": float(index) for index in range(size)} for size in (64, 1000)
    }
    tensors = {
        size: {name: torch.tensor(value) for name, value in tree.items()}
        for size, tree in floats.items()
    }
    flat = {size: torch.zeros(size) for size in floats}

    def by_hand() -> dict[str, torch.Tensor]:
        stacked = torch.stack(list(tensors[1000].values()))
        dist.all_reduce(stacked)
        return dict(zip(tensors[1000], stacked.unbind(), strict=True))

    def large_by_hand() -> None:
        dist.all_reduce(large.clone())

    def gathered_by_hand() -> None:
        dist.all_gather_single(large.new_empty(fabric.world_size * len(large)), large)

    def loop() -> None:
        for tensor in loose:
            dist.all_reduce(tensor)

    number = torch.zeros(())
    loose = [torch.zeros(()) for _ in range(64)]
    large = torch.zeros(2**24)
    return {
        "one number by hand": lambda: dist.all_reduce(number),
        "one number": lambda: fabric.all_reduce(1.0, reduce_op="sum"),
        "one tensor of one number": lambda: fabric.all_reduce(number, reduce_op="sum"),
        "one flat tensor of 64": lambda: dist.all_reduce(flat[64]),
        "dict of 64 tensors": lambda: fabric.all_reduce(tensors[64], reduce_op="sum"),
        "dict of 64 floats": lambda: fabric.all_reduce(floats[64], reduce_op="sum"),
        "a loop over 64 tensors": loop,
        "one flat tensor of 1,000": lambda: dist.all_reduce(flat[1000]),
        "dict of 1,000 floats": lambda: fabric.all_reduce(floats[1000], reduce_op="sum"),
        "stack, all_reduce, unbind": by_hand,
        "dict of 1,000 tensors": lambda: fabric.all_reduce(tensors[1000], reduce_op="sum"),
        "64 MiB by hand": large_by_hand,
        "64 MiB reduced": lambda: fabric.all_reduce(large, reduce_op="sum"),
        "64 MiB gathered by hand": gathered_by_hand,
        "64 MiB gathered": lambda: fabric.all_gather(large),
    }


if __name__ == "__main__":
    sys.exit(main())
