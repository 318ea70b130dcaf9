"""The memory of ranks, measured by the kernel's count of each process."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLIBC = hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak can only be set back on Linux"
)
@pytest.mark.timeout(600)
def test_two_ranks_of_fsdp_need_less_than_two_of_ddp_and_never_the_full_model() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--quick"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    ratios = []
    for line in process.stdout.splitlines():
        cells = line.split("|")[1:-1]
        if line.startswith("| 2 | fsdp") and len(cells) == 6:
            ratios.append(float(cells[5]))
    assert len(ratios) == 2
    assert min(ratios) >= 1.6


FREE_LARGE_BLOCKS = """
import resource, torch
from fabric.accelerators import CPUAccelerator
CPUAccelerator().return_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
# Freed in this order, each tensor raises the size that glibc keeps.
tensors = [torch.ones(n * 2**20) for n in (4, 8, 16, 24)]
tensors.append(torch.ones(1))
del tensors[:4]
more_tensors = [torch.ones(2**22) for _ in range(2)]
del more_tensors
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps large blocks")
@pytest.mark.parametrize(
    ("variables", "returns_blocks"),
    [
        ({}, True),
        ({"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}, False),
    ],
)
def test_large_blocks_go_back_to_the_system_unless_the_users_variables_keep_them(
    variables: dict[str, str], returns_blocks: bool
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    if "MALLOC_TRIM_THRESHOLD_" not in variables:
        environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    process = subprocess.run(
        [sys.executable, "-c", FREE_LARGE_BLOCKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    resident_mebibytes = int(process.stdout)
    assert (resident_mebibytes < 4) == returns_blocks
