"""Collections beside flat tensors: what coalescing costs, and what it saves.

`python -m benchmarks.collectives` measures side by side, on 2 and on 4 ranks: one flat `torch.distributed.all_reduce`,
`fabric.all_reduce` of a dict of as many metrics, and torch's collective for each metric; and one tensor of 64 MiB by
fabric and by torch, with the copy that either needs. All are measured in each of many short rounds, in an order that
rotates; the time of a round is that of the slowest rank. Ratios are taken within a round, so that a busy machine slows
both sides, and shown as the median with the quartiles.

Prints a table and writes it to `benchmarks/results/collectives.md`. The exit code is 1 where a median misses its
target. `--quick` takes fewer rounds and writes nothing.
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
from fabric._torch import all_gather_into
from fabric.testing import RankPool

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "collectives.md"
# So many of these take about as long as one of the others.
LARGE = ("64 MiB reduced", "64 MiB by hand", "64 MiB gathered", "64 MiB gathered by hand")
REPETITIONS = dict.fromkeys(("a loop over 64 tensors", *LARGE), 1)
NUMBER = 5


class Target(NamedTuple):
    """Two contestants, and what their ratio should be at most, or at least; for each number of ranks."""

    one: str
    other: str
    limits: dict[int, float]
    at_least: bool = False

    def holds(self, ratio: float, ranks: int) -> bool:
        return ratio >= self.limits[ranks] if self.at_least else ratio <= self.limits[ranks]


TARGETS = (
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
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Collectives of collections beside flat tensors.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args(arguments).quick
    lines = [
        "| ranks | what | ms | beside | ms | ratio | quartiles | target |",
        "|--:|---|--:|---|--:|--:|--:|--:|",
    ]
    missed = 0
    for ranks in (2, 4):
        with RankPool(ranks, timeout=600) as pool:
            by_rank: list[Rounds] = pool.run(measured, 10 if quick else 40)
        rounds = [
            {name: max(own[name] for own in of_ranks) for name in of_ranks[0]}
            for of_ranks in zip(*by_rank, strict=True)
        ]
        for target in TARGETS:
            line, ratio = compared(target, rounds, ranks)
            lines.append(line)
            missed += not target.holds(ratio, ranks)
    table = "\n".join(lines)
    print(table)
    if not quick:
        load = f"load {os.getloadavg()[0]:.0f}"
        where = (
            f"{platform.system()}, {os.cpu_count()} cores, {load}, torch {torch.__version__}, gloo"
        )
        RESULTS.write_text(
            f"# Collections beside flat tensors\n\n`python -m benchmarks.collectives`. {where}.\n\n{table}\n"
        )
    return int(missed > 0)


def compared(target: Target, rounds: Rounds, ranks: int) -> tuple[str, float]:
    """A line of the table, and the median of the ratios."""
    ratios = [one[target.one] / one[target.other] for one in rounds]
    low, middle, high = quantiles(ratios, n=4)
    one, other = (
        1e3 * median(each[name] for each in rounds) for name in (target.one, target.other)
    )
    limit = f"{'>=' if target.at_least else '<='} {target.limits[ranks]:g}"
    limit += "" if target.holds(middle, ranks) else ", missed"
    spread = f"{low:.2f} to {high:.2f}"
    return (
        f"| {ranks} | {target.one} | {one:.2f} | {target.other} | {other:.2f} | {middle:.2f} | {spread} | {limit} |",
        middle,
    )


def measured(fabric: Fabric, rounds: int) -> Rounds:
    """On a rank: seconds for one call of each contestant, in every round but a first that is for warming up."""
    actions = contestants(fabric)
    groups = [
        [name for name in actions if name not in LARGE],
        list(LARGE),
    ]  # so that none always follows a large one
    found = []
    for turn in range(rounds + 1):
        order = [
            name
            for group in groups
            for name in group[turn % len(group) :] + group[: turn % len(group)]
        ]
        found.append(
            {name: seconds(actions[name], REPETITIONS.get(name, NUMBER)) for name in order}
        )
    return found[1:]


def seconds(action: Callable[[], Any], number: int) -> float:
    """The mean of ``number`` calls that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(number):
        action()
    return (time.perf_counter() - start) / number


def contestants(fabric: Fabric) -> dict[str, Callable[[], Any]]:
    """What is measured; sums, so that no side divides."""
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
        all_gather_into(large.new_empty(fabric.world_size * len(large)), large)

    def loop() -> None:
        for tensor in loose:
            dist.all_reduce(tensor)

    loose = [torch.zeros(()) for _ in range(64)]
    large = torch.zeros(2**24)
    return {
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
