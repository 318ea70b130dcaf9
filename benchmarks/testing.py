"""Examples per second of the test kit.

`python -m benchmarks.testing` runs a property test of a 2-rank `all_reduce` on real processes, with
values drawn by hypothesis. The command prints the time of the first call, of the examples, and of a
failing example. The first call starts the warm process, which imports torch and forks the ranks. A
failing example replaces the ranks. The exit code is 1 if 1,000 examples and the start of the pool
take 10 s or more. `--quick` takes 200 examples.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings

from fabric import Fabric
from fabric.errors import RankFailedError
from fabric.testing import PerRank, RankPool, ThreadedWorld, World, assert_same, oracles
from fabric.testing.generators import per_rank_tensors

__all__ = ["main"]

TARGET = 10.0  # seconds for 1,000 examples
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Examples per second of fabric.testing.")
    parser.add_argument("--quick", action="store_true", help="200 examples")
    count = 200 if parser.parse_args(arguments).quick else 1000
    with RankPool(2) as pool:
        start = seconds(lambda: pool.run(total, 1))
        plain = seconds(lambda: [pool.run(total, 1) for _ in range(count)])
        drawn = seconds(lambda: examples(pool, count))
        failing = seconds(lambda: [fail(pool) for _ in range(10)]) / 10
    threads = seconds(lambda: examples(ThreadedWorld(2), count))
    extrapolated = start + drawn * 1000 / count
    print("| what | seconds | a second |\n|---|--:|--:|")
    print(f"| the first call, cold | {start:.2f} | |")
    print(f"| {count} calls of `all_reduce` | {plain:.2f} | {count / plain:.0f} |")
    print(
        f"| {count} examples, drawn by hypothesis and compared with the oracle "
        f"| {drawn:.2f} | {count / drawn:.0f} |"
    )
    print(f"| the same in a world of threads | {threads:.2f} | {count / threads:.0f} |")
    print(
        "| an example in which a rank raises, and a call of the ranks that replace it "
        f"| {failing:.2f} | |"
    )
    print(f"\n1,000 examples and the start: {extrapolated:.1f} s, target {TARGET:.0f} s")
    return int(extrapolated >= TARGET)


def examples(world: World, count: int) -> None:
    """Run a property test of all_reduce with so many examples."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=SLOW,
    )
    @given(per_rank_tensors(2))
    def law(values: PerRank) -> None:
        assert_same(world.run(total, values), oracles.all_reduce(values.values, "sum"))

    law()


def fail(pool: RankPool) -> None:
    """Make a call that fails on one rank while the other waits, and then a call that works."""
    with suppress(RankFailedError):
        pool.run(lambda fabric: fabric.barrier() if fabric.global_rank else 1 / 0)
    pool.run(total, 1)


def total(fabric: Fabric, value: Any) -> Any:
    """Run the collective that is measured."""
    return fabric.all_reduce(value, reduce_op="sum")


def seconds(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
