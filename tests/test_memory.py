"""The memory of ranks, measured by the kernel's count of each process."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from fabric import Fabric
from tests.ranks import run_in_ranks

ROOT = Path(__file__).parent.parent
GLIBC = hasattr(ctypes.CDLL(None), "mallopt")
resets_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak can only be set back on Linux"
)


@pytest.mark.slow
@resets_peak
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
def memory():
    # Without the pages of files: the first operators load code of torch.
    _, resident, shared, *_ = open("/proc/self/statm").read().split()
    return (int(resident) - int(shared)) * resource.getpagesize()
before = memory()
# Freed in this order, each tensor raises the size that glibc keeps.
tensors = [torch.ones(n * 2**20) for n in (4, 8, 16, 24)]
tensors.append(torch.ones(1))
del tensors[:4]
more_tensors = [torch.ones(2**22) for _ in range(2)]
del more_tensors
print((memory() - before) >> 20)
"""


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps large blocks")
@pytest.mark.parametrize(
    ("variables", "returns_blocks"),
    [
        ({}, True),
        pytest.param(
            {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)},
            False,
            marks=pytest.mark.slow,
        ),
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
    mebibytes = int(process.stdout)
    assert (mebibytes < 4) == returns_blocks


LAYERS = 8
MEBIBYTES_OF_LAYER = 16


def build_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(LAYERS)])


def mebibytes(name: str) -> float:
    """Return a number of the kernel about the memory of this process."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def peak_of_load(fabric: Fabric, path: Path) -> float:
    """Return by how much memory grows at most while a prepared model is filled, in MiB."""
    with fabric.init_module(empty_init=True):
        module = build_layers()
    model = fabric.setup(module)
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = mebibytes("VmRSS")
    fabric.load_raw(path, model)
    return mebibytes("VmHWM") - before


@pytest.mark.slow
@resets_peak
def test_pretrained_weights_are_mapped_and_need_the_memory_of_one_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(build_layers().state_dict(), path)
    # The shards of the model have their memory before the load. The pages of the file that a rank
    # maps are those of its shards, half of the file, and the system may take them back.
    mapped = LAYERS * MEBIBYTES_OF_LAYER / 2
    for peak in run_in_ranks(peak_of_load, path, strategy="fsdp"):
        assert peak < mapped + MEBIBYTES_OF_LAYER + 12
