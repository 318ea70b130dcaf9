"""What FSDP saves, measured on the kernel's own count of each rank's memory."""

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
def test_two_ranks_of_fsdp_need_less_than_two_of_ddp_and_never_the_whole_model() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = [
        line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| 2 | fsdp")
    ]
    assert [float(row[5]) >= 1.6 for row in rows if len(row) == 6] == [True, True]


FREES = """
import resource, torch
from fabric.accelerators import CPUAccelerator
CPUAccelerator().return_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
# Freed in this order, each raises the size that glibc keeps.
kept = [torch.ones(n * 2**20) for n in (4, 8, 16, 24)]
kept.append(torch.ones(1))
del kept[:4]
again = [torch.ones(2**22) for _ in range(2)]
del again
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps large blocks")
@pytest.mark.parametrize(
    ("variables", "limit"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": str(2**25)}, False)]
)
def test_large_blocks_go_back_to_the_system_unless_the_user_has_said_otherwise(
    variables: dict[str, str], limit: bool
) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **variables,
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
    }
    if limit:
        del environment["MALLOC_TRIM_THRESHOLD_"]
    done = subprocess.run(
        [sys.executable, "-c", FREES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (int(done.stdout) < 4) == limit
