"""Every strategy, number of ranks, precision and accumulation gives the numbers of the plain loop in one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.strategies import FSDPStrategy
from tests.loops import Record, assert_same, fabric_loop, plain_loop
from tests.ranks import SharedRanks

# Precision: dtype of the plain loop, its autocast dtype, whether it scales the loss, and the tolerance on several
# ranks, where sums are taken in another order. 16-bit autocast rounds each micro-batch's gradients on its own.
PRECISIONS = {
    "32-true": (torch.float32, None, False, 1e-5),
    "64-true": (torch.float64, None, False, 1e-10),
    "bf16-mixed": (torch.float32, torch.bfloat16, False, 2e-2),
    "16-mixed": (torch.float32, torch.float16, True, 2e-3),
}
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
# Of those, what `make test` leaves out in all precisions but the most exact.
SLOW = {
    name for name in JOBS if name.startswith("fsdp-grad-op") or name.endswith(("-3", "-4", "-2x2"))
}
CASES = [
    pytest.param(
        name, precision, marks=pytest.mark.slow if name in SLOW and precision != "64-true" else ()
    )
    for name in JOBS
    for precision in PRECISIONS
]


@pytest.fixture
def fabric(name: str, precision: str) -> Iterator[Fabric]:
    job = JOBS[name]
    if isinstance(job["strategy"], tuple):
        sharding, mesh = job["strategy"]
        strategy = FSDPStrategy(sharding_strategy=sharding, device_mesh=mesh)
        job = {**job, "strategy": strategy}
    with Fabric(accelerator="cpu", precision=precision, launcher=SharedRanks(), **job) as made:
        yield made


@pytest.mark.timeout(60)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_numbers_are_those_of_the_plain_loop(
    fabric: Fabric, name: str, precision: str, accumulation: int
) -> None:
    dtype, autocast, scaled, tolerance = PRECISIONS[precision]
    devices = JOBS[name]["devices"]
    # float16 gradients of a replica's part are summed in float32: they overflow later than those of a whole batch.
    parts = devices if scaled and fabric.strategy.drives_all_devices else 1
    expected = plain_loop(dtype, autocast, scaled, accumulation * parts)
    records: list[Record] = fabric.launch(fabric_loop, dtype, accumulation, return_all=True)
    # Under FSDP whole modules compute in 16 bits, where autocast keeps some operations in 32.
    exact = devices == 1 and (autocast is None or not name.startswith("fsdp"))
    for record in records:
        assert_same(record, expected, 0.0 if exact else tolerance)
