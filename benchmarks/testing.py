"""Examples per second of the test kit, compared with torch's own classes of tests.

``python -m benchmarks.testing`` runs a property test of a mean of integers on two ranks, with
values drawn by hypothesis. The contestants are a pool and a world of threads of fabric.testing,
the classes with which torch tests itself, and new interpreters for each example. They take turns,
and a ratio is taken within a round. The last column is the time from the start of the same test to
the report of the smallest example, if the mean truncates. Where each example starts processes, this
is the number of examples of the pool's report, times the seconds of an example.

The command then prints what a pool costs once: its start, and an example in which a rank raises,
after which new ranks are forked. The exit code is 1 if 1,000 examples and the start of the pool
take 10 s or more. torch's classes need the package expecttest. ``--quick`` takes one short round.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from torch import Tensor

from benchmarks.testing_torch import RANKS, mean, run_in_spawned_processes, test_case_contestants
from fabric import Fabric
from fabric.errors import RankFailedError
from fabric.testing import PerRank, RankPool, ThreadedWorld, assert_same, differences, oracles
from fabric.testing.generators import per_rank_tensors

__all__ = ["main"]

TARGET = 10.0  # seconds for 1,000 examples
SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
POOL = "`RankPool`"

Run = Callable[[Sequence[Tensor], bool], list[Any]]
"""Runs an example on two ranks: with its values, and whether the mean is broken."""


class Contestant(NamedTuple):
    """A way to run an example on two ranks.

    Attributes:
        run: runs an example.
        examples: the number of examples in a round.
        can_shrink: whether an example is fast enough to shrink one in the benchmark.
    """

    run: Run
    examples: int
    can_shrink: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description="Examples per second of fabric.testing.")
    parser.add_argument("--quick", action="store_true", help="one short round")
    is_quick = parser.parse_args(arguments).quick
    rounds = 1 if is_quick else 5
    fast = 50 if is_quick else 200
    slow = 1 if is_quick else 3
    with RankPool(RANKS) as pool:
        start = seconds(lambda: pool.run(total, 1))

        def run_in_pool(values: Sequence[Tensor], is_broken: bool) -> list[Any]:
            return pool.run(mean_on_rank, PerRank(values), is_broken)

        contestants = {
            POOL: Contestant(run_in_pool, fast, can_shrink=True),
            "`ThreadedWorld`": Contestant(run_in_threads, fast, can_shrink=True),
            "two interpreters per example": Contestant(
                run_in_spawned_processes, slow, can_shrink=False
            ),
        }
        for name, run in test_case_contestants().items():
            is_fast = name == "MultiThreadedTestCase"
            count = 20 if is_fast else slow
            contestants[f"torch's `{name}`"] = Contestant(run, count, can_shrink=is_fast)
        per_example = measure_rounds(contestants, rounds)
        print_comparison(contestants, per_example)
        failing = seconds(lambda: [fail(pool) for _ in range(10)]) / 10
    print(
        f"\nThe start of a pool: {start:.2f} s. An example in which a rank raises: {failing:.2f} s."
    )
    extrapolated = start + 1000 * median(per_example[POOL])
    print(f"1,000 examples and the start: {extrapolated:.1f} s, target {TARGET:.0f} s")
    return int(extrapolated >= TARGET)


def measure_rounds(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an example in each round, by contestant, after a warm-up."""
    per_example: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        run_examples(contestant.run, 1)
    for _ in range(rounds):
        for name, contestant in contestants.items():
            duration = seconds(lambda it=contestant: run_examples(it.run, it.examples))
            per_example[name].append(duration / contestant.examples)
    return per_example


def print_comparison(
    contestants: dict[str, Contestant], per_example: dict[str, list[float]]
) -> None:
    """Print the table of the contestants."""
    print("| a property test on two ranks | examples/s | time of an example | report after |")
    print("|---|--:|--:|--:|")
    shrinking_runs = 0
    for name, contestant in contestants.items():
        times = per_example[name]
        ratios: list[float] = []
        for time_of_contestant, time_of_pool in zip(times, per_example[POOL], strict=True):
            ratios.append(time_of_contestant / time_of_pool)
        report = ""
        if contestant.can_shrink:
            duration, count = shrink(contestant.run)
            if name == POOL:
                shrinking_runs = count
            report = f"{duration:.1f} s"
        else:
            report = f"about {shrinking_runs * median(times):.0f} s"
        rate = 1 / median(times)
        print(f"| {name} | {rate:.3g} | x {median(ratios):.3g} | {report} |", flush=True)


def run_examples(run: Run, count: int) -> None:
    """Run the property test with so many examples."""

    @settings(SETTINGS, max_examples=count, phases=[Phase.generate])
    @given(per_rank_tensors(RANKS, torch.int64))
    def law(x: PerRank) -> None:
        assert_same(run(x.values, False), expected_means(x))

    law()


def shrink(run: Run) -> tuple[float, int]:
    """Return the seconds and the number of runs until an example of a broken mean is smallest."""
    count = 0

    def is_wrong(x: PerRank) -> bool:
        nonlocal count
        count += 1
        return any(differences(run(x.values, True), expected_means(x)))

    values = per_rank_tensors(RANKS, torch.int64)
    duration = seconds(lambda: find(values, is_wrong, settings=SETTINGS))
    return duration, count


def expected_means(x: PerRank) -> list[Any]:
    return oracles.all_reduce(x.values, "mean")


def mean_on_rank(fabric: Fabric, x: Tensor, is_broken: bool) -> Tensor:
    return mean(x, is_broken)


def run_in_threads(values: Sequence[Tensor], is_broken: bool) -> list[Any]:
    return ThreadedWorld(RANKS).run(mean_of_thread, PerRank(values), is_broken)


def mean_of_thread(fabric: Fabric, x: Tensor, is_broken: bool) -> Tensor:
    """Compute the mean as :func:`mean` does. Threads have no process group of torch."""
    summed = fabric.all_reduce(x, reduce_op="sum")
    if is_broken:
        return (summed // fabric.world_size).float()
    return summed / fabric.world_size


def fail(pool: RankPool) -> None:
    """Make a call that fails on one rank while the other waits, and then a call that works."""
    with suppress(RankFailedError):
        pool.run(lambda fabric: fabric.barrier() if fabric.global_rank else 1 / 0)
    pool.run(total, 1)


def total(fabric: Fabric, value: Any) -> Any:
    return fabric.all_reduce(value, reduce_op="sum")


def seconds(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
