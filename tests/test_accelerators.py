"""The devices that a value of ``devices`` names, and what accelerators say of their hardware."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fabric
from fabric.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    TorchAccelerator,
)
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError

PACKAGE = Path(fabric.__file__).parent

# A value of devices, the number of devices that are available, and the expected indices.
INDICES = [
    (1, 4, (0,)),
    (2, 4, (0, 1)),
    (4, 4, (0, 1, 2, 3)),
    ("2", 4, (0, 1)),
    (" 2 ", 4, (0, 1)),
    (-1, 3, (0, 1, 2)),
    ("-1", 3, (0, 1, 2)),
    ("auto", 3, (0, 1, 2)),
    ("auto", 1, (0,)),
    ([0], 1, (0,)),
    ([0, 2], 4, (0, 2)),
    ([3, 1], 4, (3, 1)),
    ((1, 2), 4, (1, 2)),
    (range(1, 3), 4, (1, 2)),
    ("0,2", 4, (0, 2)),
    ("3, 1", 4, (3, 1)),
    ("2,", 4, (2,)),
]

# A value of devices, and the number of devices that are available.
REFUSED_INDICES = [
    (0, 4),
    ("0", 4),
    (-2, 4),
    (5, 4),
    ("5", 4),
    (10**12, 4),
    ([], 4),
    ([4], 4),
    ([0, 7, 9], 4),
    ([-1], 4),
    ("0,4", 4),
    ([0, 1, 0], 4),
    ("1,1", 4),
    ("auto", 0),
    (-1, 0),
    (1, 0),
]

PROCESSES = [(1, 1), (3, 3), (64, 64), ("3", 3), ("auto", 1), (torch.tensor(2), 2)]
REFUSED_PROCESSES = [0, -3, [0, 1], [], "0,1"]

GARBAGE = ["", " ", ",", "two", "0,,2", "cuda:0", "1.5", "--1", "all", "Auto!", "0;2"]
WRONG_TYPES = [1.0, None, {0, 1}, {0: 1}, [0, 1.0], ["0"], [[0]], object()]


def name_without_address(value: object) -> str:
    name, _, _ = repr(value).partition(" at ")
    return name


class Cards(Accelerator):
    """An accelerator with as many devices as a test needs."""

    name = "cuda"

    def __init__(self, count: int) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count


@pytest.mark.parametrize(("devices", "available", "expected"), INDICES)
def test_a_value_names_these_indices(devices, available, expected) -> None:
    expected_devices = [torch.device("cuda", index) for index in expected]
    assert list(Cards(available).parse_devices(devices)) == expected_devices


@pytest.mark.parametrize(("devices", "available"), REFUSED_INDICES)
def test_devices_that_are_not_there_are_refused_with_their_number(devices, available) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Cards(available).parse_devices(devices)
    assert f"sees {available} devices of type 'cuda'" in caught.value.problem
    assert_has_four_parts(caught.value, devices)


@pytest.mark.parametrize(("devices", "expected"), PROCESSES)
def test_on_a_cpu_a_value_is_a_number_of_processes(devices, expected) -> None:
    expected_devices = [torch.device("cpu")] * expected
    assert list(CPUAccelerator().parse_devices(devices)) == expected_devices


@pytest.mark.parametrize("devices", [-1, "-1"])
def test_on_a_cpu_minus_one_is_a_process_for_each_core(devices) -> None:
    cpu = CPUAccelerator()
    assert len(cpu.parse_devices(devices)) == cpu.device_count()


@pytest.mark.parametrize("devices", REFUSED_PROCESSES)
def test_on_a_cpu_what_is_no_number_of_processes_is_refused(devices) -> None:
    with pytest.raises(ConfigurationError, match="not a number of processes") as caught:
        CPUAccelerator().parse_devices(devices)
    assert_has_four_parts(caught.value, devices)


@pytest.mark.parametrize("accelerator", [Cards(4), CPUAccelerator()], ids=["cards", "cpu"])
@pytest.mark.parametrize("devices", GARBAGE)
def test_a_string_that_names_no_devices_is_refused(accelerator, devices) -> None:
    with pytest.raises(ConfigurationError) as caught:
        accelerator.parse_devices(devices)
    assert_has_four_parts(caught.value, devices)


@pytest.mark.parametrize("accelerator", [Cards(4), CPUAccelerator()], ids=["cards", "cpu"])
@pytest.mark.parametrize("devices", WRONG_TYPES, ids=name_without_address)
def test_a_value_of_another_type_is_refused(accelerator, devices) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        accelerator.parse_devices(devices)
    assert_has_four_parts(caught.value, devices)


class MetaAccelerator(Accelerator):
    """The least that an accelerator has to define, for a device type without a backend in torch."""

    name = "meta"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2


def assert_has_four_parts(error: FabricError, devices: object) -> None:
    assert repr(devices) in error.request
    assert error.problem
    assert error.expected
    assert error.suggestion


def test_the_cpu_is_always_there_with_the_cores_of_this_process() -> None:
    cpu = CPUAccelerator()
    assert cpu.is_available()
    assert 1 <= cpu.device_count() <= (os.cpu_count() or 1)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks"
)
def test_a_core_that_this_process_may_not_use_does_not_count() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        cpu = CPUAccelerator()
        assert cpu.device_count() == 1
        assert len(cpu.parse_devices(-1)) == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_an_accelerator_is_named_after_its_torch_device() -> None:
    for accelerator in (CPUAccelerator(), CUDAAccelerator(), MPSAccelerator()):
        assert torch.device(accelerator.name).type == accelerator.name


@pytest.mark.parametrize(
    ("accelerator", "backend"),
    [(CPUAccelerator(), "gloo"), (CUDAAccelerator(), "nccl")],
    ids=["cpu", "cuda"],
)
def test_torch_chooses_the_backend(accelerator: Accelerator, backend: str) -> None:
    assert accelerator.default_backend == backend


def test_an_accelerator_of_a_user_needs_two_methods() -> None:
    meta = MetaAccelerator()
    first = torch.device("meta", 0)
    second = torch.device("meta", 1)
    assert meta.parse_devices("auto") == (first, second)
    assert meta.parse_devices([1]) == (second,)
    meta.activate(first)
    meta.release()


def test_activating_and_releasing_the_cpu_changes_nothing() -> None:
    cpu = CPUAccelerator()
    cpu.activate(torch.device("cpu"))
    cpu.release()
    assert torch.empty(1).device == torch.device("cpu")


@pytest.mark.parametrize("accelerator", [CUDAAccelerator(), MPSAccelerator()], ids=["cuda", "mps"])
def test_hardware_that_is_not_here_says_so(accelerator: Accelerator) -> None:
    if accelerator.is_available():
        pytest.skip(f"{accelerator.name} is here")
    assert accelerator.device_count() == 0
    with pytest.raises(ConfigurationError, match="sees 0 devices") as caught:
        accelerator.parse_devices("auto")
    assert caught.value.suggestion == 'accelerator="cpu"'
    accelerator.release()


def test_asking_about_gpus_does_not_initialize_cuda() -> None:
    cuda = CUDAAccelerator()
    cuda.is_available()
    cuda.device_count()
    if cuda.is_available():
        cuda.parse_devices("auto")
    cuda.release()
    assert not torch.cuda.is_initialized()


def test_hardware_that_an_extension_adds_trains_as_the_cpu_does() -> None:
    # In a process of its own, since hardware cannot be taken away from torch again.
    script = Path(__file__).parent / "scripts" / "train_on_stand_in.py"
    subprocess.run([sys.executable, "-W", "error", script], check=True, timeout=150)


def test_hardware_that_torch_has_no_module_for_is_no_accelerator() -> None:
    for name in ("meta", "xla", "no_such_hardware", "cuda:0", ""):
        assert not TorchAccelerator.is_supported(name)
        assert TorchAccelerator(name).device_count() == 0
        TorchAccelerator(name).release()


def test_code_for_hardware_of_any_kind_calls_no_function_of_cuda() -> None:
    # What torch.accelerator or the modules of other hardware have, and torch.cuda for CUDA alone.
    general = re.compile(
        r"torch\.cuda\.(device_count|current_device|set_device|current_stream|synchronize|"
        r"empty_cache|memory_allocated|max_memory_allocated|memory_stats|Event|Stream|"
        r"is_current_stream_capturing)\b"
    )
    calls: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "accelerators.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if general.search(line):
                calls.append(f"{path.name}:{number}: {line.strip()}")
    assert calls == []


FORKS_AFTER_PARSING = """
import os
import torch
from fabric.accelerators import CUDAAccelerator

CUDAAccelerator().parse_devices("auto")
child = os.fork()
if child == 0:
    total = torch.ones(2, device="cuda").sum().item()
    if total == 2:
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no CUDA device")
class TestOnCudaDevices:
    def test_all_gpus_are_named_by_auto(self) -> None:
        cuda = CUDAAccelerator()
        gpus = [torch.device("cuda", index) for index in range(cuda.device_count())]
        assert list(cuda.parse_devices("auto")) == gpus

    def test_an_activated_gpu_is_the_current_one(self) -> None:
        cuda = CUDAAccelerator()
        last = cuda.parse_devices("auto")[-1]
        cuda.activate(last)
        assert torch.empty(1, device="cuda").device == last
        cuda.release()

    def test_a_process_forked_after_parsing_can_use_cuda(self) -> None:
        subprocess.run(
            [sys.executable, "-c", FORKS_AFTER_PARSING],
            check=True,
            timeout=150,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
