"""Examples per second of the test kit. raw is a property test that forks ranks for each example."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.launch import free_port
from benchmarks.framework import Case, Measure, Row

RANKS = 2


def rate(check: Callable[[int], None], examples: int) -> Callable[[], dict[str, float]]:
    """Return a function that measures the examples per second of a property test of ``check``."""

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, 2**40))
    def test(number: int) -> None:
        check(number)

    def measure() -> dict[str, float]:
        began = time.perf_counter()
        test()
        return {"examples": examples / (time.perf_counter() - began)}

    return measure


def raw_rank(rank: int, port: int, number: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    value = torch.tensor(number)
    dist.all_reduce(value)
    assert value == RANKS * number
    dist.destroy_process_group()


def raw(quick: bool) -> Measure:
    def check(number: int) -> None:
        processes.start_processes(
            raw_rank, (free_port(), number), nprocs=RANKS, start_method="fork"
        )

    return rate(check, 2 if quick else 10)


def ours(quick: bool) -> Measure:
    from fabric.testing import RankPool

    pool = RankPool(RANKS)

    def check(number: int) -> None:
        assert pool.run(our_rank, number) == [RANKS * number] * RANKS

    return rate(check, 20 if quick else 200)


def our_rank(fabric: object, number: int) -> int:
    return fabric.all_reduce(number, reduce_op="sum")  # pyright: ignore[reportAttributeAccessIssue]  # a Fabric


CASES = [
    Case(
        name="kit",
        title="Property tests on two ranks; raw forks two ranks for each example",
        rows={"examples": Row("examples/s", "ratio")},
        contestants={"raw": raw, "fabric": ours},
        rounds=4,
        notes=dict.fromkeys(("lightning-fabric", "accelerate"), "has no such kit"),
    )
]
