"""Every strategy, number of ranks, precision and accumulation gives the numbers of a plain loop."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from fabric import Fabric
from fabric.strategies import FSDPStrategy
from tests.loops import Record, assert_same, fabric_loop, plain_loop
from tests.ranks import SharedRanks


class PlainLoop(NamedTuple):
    """The options of the plain loop for a precision, and the tolerance on several ranks.

    Several ranks add in another order. 16-bit autocast rounds the gradients of every micro-batch.
    """

    dtype: torch.dtype
    autocast: torch.dtype | None
    is_scaled: bool
    tolerance: float


PRECISIONS = {
    "32-true": PlainLoop(torch.float32, None, False, 1e-5),
    "64-true": PlainLoop(torch.float64, None, False, 1e-10),
    "bf16-mixed": PlainLoop(torch.float32, torch.bfloat16, False, 2e-2),
    "16-mixed": PlainLoop(torch.float32, torch.float16, True, 2e-3),
}
# The numbers of micro-batches of a step.
ACCUMULATIONS = (1, 3)
JOBS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single_device", "devices": 1},
    "dp-2": {"strategy": "dp", "devices": 2},
    "dp-3": {"strategy": "dp", "devices": 3},
    "ddp-1": {"strategy": "ddp", "devices": 1},
    "ddp-2": {"strategy": "ddp", "devices": 2},
    "ddp-3": {"strategy": "ddp", "devices": 3},
    "fsdp-1": {"strategy": "fsdp", "devices": 1},
    "fsdp-2": {"strategy": "fsdp", "devices": 2},
    "fsdp-3": {"strategy": "fsdp", "devices": 3},
    "fsdp-4": {"strategy": "fsdp", "devices": 4},
    "fsdp-grad-op-1": {"strategy": ("SHARD_GRAD_OP", None), "devices": 1},
    "fsdp-grad-op-2": {"strategy": ("SHARD_GRAD_OP", None), "devices": 2},
    "fsdp-grad-op-3": {"strategy": ("SHARD_GRAD_OP", None), "devices": 3},
    "fsdp-grad-op-4": {"strategy": ("SHARD_GRAD_OP", None), "devices": 4},
    "fsdp-hybrid-2x2": {"strategy": ("HYBRID_SHARD", (2, 2)), "devices": 4},
}


def is_slow(name: str, precision: str) -> bool:
    """Say whether `make test` leaves a case out; it runs most jobs in the most exact precision."""
    if precision == "64-true":
        # Four ranks are those of the hybrid job. Two ranks have equal shards, which is simpler than
        # the shards of three.
        return name.endswith("-4") or name in ("fsdp-2", "fsdp-grad-op-1", "fsdp-grad-op-3")
    return name.startswith("fsdp-grad-op") or name.endswith(("-3", "-4", "-2x2"))


def cases() -> list[Any]:
    parameters = []
    for name in JOBS:
        for precision in PRECISIONS:
            marks = [pytest.mark.slow] if is_slow(name, precision) else []
            parameters.append(pytest.param(name, precision, marks=marks))
    return parameters


@pytest.fixture
def fabric(name: str, precision: str) -> Iterator[Fabric]:
    job = JOBS[name]
    if isinstance(job["strategy"], tuple):
        sharding, mesh = job["strategy"]
        strategy = FSDPStrategy(sharding_strategy=sharding, device_mesh=mesh)
        job = {**job, "strategy": strategy}
    with Fabric(accelerator="cpu", precision=precision, launcher=SharedRanks(), **job) as fabric:
        yield fabric


def loops(fabric: Fabric, dtype: torch.dtype) -> list[Record]:
    """Return the records of a loop for each number of micro-batches."""
    return [fabric_loop(fabric, dtype, accumulation) for accumulation in ACCUMULATIONS]


@pytest.mark.parametrize(("name", "precision"), cases())
def test_the_numbers_are_those_of_the_plain_loop(fabric: Fabric, name: str, precision: str) -> None:
    dtype, autocast, is_scaled, tolerance = PRECISIONS[precision]
    devices = JOBS[name]["devices"]
    expected = []
    for accumulation in ACCUMULATIONS:
        chunks = accumulation
        # The float16 gradients of a replica's share of the batch are summed in float32. They
        # overflow later than the gradients of the whole batch.
        if is_scaled and fabric.strategy.drives_all_devices:
            chunks *= devices
        expected.append(plain_loop(dtype, autocast, is_scaled, chunks))
    records_by_rank: list[list[Record]] = fabric.launch(loops, dtype, return_all=True)
    # Under FSDP whole modules compute in 16 bits, where autocast keeps some operations in 32.
    if devices == 1 and (autocast is None or not name.startswith("fsdp")):
        tolerance = 0.0
    for records in records_by_rank:
        for record, expected_record in zip(records, expected, strict=True):
            assert_same(record, expected_record, tolerance)
