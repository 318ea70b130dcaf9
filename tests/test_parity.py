"""Every strategy, number of ranks, precision and accumulation gives the numbers of the plain loop in one process."""

import pytest
import torch

from fabric import Fabric
from tests.loops import Record, assert_same, fabric_loop, plain_loop

# Precision: dtype of the plain loop, its autocast dtype, whether it scales the loss, and the tolerance on several
# ranks, where sums are taken in another order. 16-bit autocast rounds each micro-batch's gradients on its own.
PRECISIONS = {
    "32-true": (torch.float32, None, False, 1e-5),
    "64-true": (torch.float64, None, False, 1e-10),
    "bf16-mixed": (torch.float32, torch.bfloat16, False, 2e-2),
    "16-mixed": (torch.float32, torch.float16, True, 2e-3),
}
JOBS = {
    "single": {"strategy": "single_device", "devices": 1},
    "dp-2": {"strategy": "dp", "devices": 2},
    "dp-3": {"strategy": "dp", "devices": 3},
    "ddp-1": {"strategy": "ddp_forkserver", "devices": 1},
    "ddp-2": {"strategy": "ddp_forkserver", "devices": 2},
    "ddp-3": {"strategy": "ddp_forkserver", "devices": 3},
    "fsdp-1": {"strategy": "fsdp", "launcher": "forkserver", "devices": 1},
    "fsdp-2": {"strategy": "fsdp", "launcher": "forkserver", "devices": 2},
    "fsdp-3": {"strategy": "fsdp", "launcher": "forkserver", "devices": 3},
    "fsdp-4": {"strategy": "fsdp", "launcher": "forkserver", "devices": 4},
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> dict[str, object]:
    return JOBS[request.param]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_numbers_are_those_of_the_plain_loop(job: dict[str, object], precision: str, accumulation: int) -> None:
    dtype, autocast, scaled, tolerance = PRECISIONS[precision]
    # float16 gradients of a replica's part are summed in float32: they overflow later than those of a whole batch.
    parts = int(str(job["devices"])) if scaled and job["strategy"] == "dp" else 1
    expected = plain_loop(dtype, autocast, scaled, accumulation * parts)
    fabric = Fabric(accelerator="cpu", precision=precision, **job)  # type: ignore[arg-type]
    records: list[Record] = fabric.launch(fabric_loop, dtype, accumulation, return_all=True)
    fabric.teardown()
    # Under FSDP whole modules compute in 16 bits, where autocast keeps some operations in 32.
    exact = job["devices"] == 1 and (autocast is None or job["strategy"] != "fsdp")
    for record in records:
        assert_same(record, expected, 0.0 if exact else tolerance)
