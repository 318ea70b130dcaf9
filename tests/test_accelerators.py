"""Which devices a value of ``devices`` names, and what each kind of hardware answers."""

import os
import subprocess
import sys

import pytest
import torch

from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from fabric.accelerators.devices import parse_count, parse_indices
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no CUDA device"),
]

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

# devices, how many there are, what the error has to say
REFUSED_INDICES = [
    (0, 4, "at least one device"),
    ("0", 4, "at least one device"),
    (-2, 4, "only as -1"),
    (5, 4, "there are 4 devices of type 'cuda', fewer than 5"),
    ("5", 4, "there are 4 devices of type 'cuda', fewer than 5"),
    (2, 1, "there is 1 device of type 'cuda', fewer than 2"),
    ([], 4, "the list is empty"),
    ([4], 4, "index 0 to 3: 4 is none of them"),
    ([0, 7, 9], 4, "7, 9 is none of them"),
    ([-1], 4, "-1 is none of them"),
    ("0,4", 4, "4 is none of them"),
    ([0, 1, 0], 4, "index 0 is in it more than once"),
    ("1,1", 4, "index 1 is in it more than once"),
    ("auto", 0, "sees 0 devices"),
    (-1, 0, "sees 0 devices"),
    (1, 0, "sees 0 devices"),
]

COUNTS = [(1, 1), (3, 3), (64, 64), ("3", 3), ("auto", 1), (-1, 8), ("-1", 8)]

REFUSED_COUNTS = [
    (0, "at least one device"),
    (-3, "only as -1"),
    ([0, 1], "cores have no index"),
    ([], "cores have no index"),
    ("0,1", "cores have no index"),
]

GARBAGE = ["", " ", ",", "two", "0,,2", "cuda:0", "1.5", "1_0", "--1", "all", "Auto!", "0;2"]
WRONG_TYPES = [True, False, 1.0, None, {0, 1}, {0: 1}, b"01", [0, 1.0], [True], ["0"], [[0]], object()]


@pytest.mark.parametrize(("devices", "available", "expected"), INDICES)
def test_a_value_names_these_indices(devices, available, expected) -> None:
    assert parse_indices(devices, available, "cuda") == expected


@pytest.mark.parametrize(("devices", "available", "wrong"), REFUSED_INDICES)
def test_devices_that_are_not_there_are_refused_with_their_number(devices, available, wrong) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_indices(devices, available, "cuda")
    assert wrong in caught.value.problem
    assert_has_four_parts(caught.value, devices)


@pytest.mark.parametrize(("devices", "expected"), COUNTS)
def test_on_a_cpu_a_value_is_a_number_of_processes(devices, expected) -> None:
    assert parse_count(devices, cores=8) == expected


@pytest.mark.parametrize(("devices", "wrong"), REFUSED_COUNTS)
def test_on_a_cpu_what_is_no_number_of_processes_is_refused(devices, wrong) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_count(devices, cores=8)
    assert wrong in caught.value.problem
    assert_has_four_parts(caught.value, devices)


@pytest.mark.parametrize("devices", GARBAGE)
def test_a_string_that_names_no_devices_is_refused(devices) -> None:
    for parse in (lambda: parse_indices(devices, 4, "cuda"), lambda: parse_count(devices, 8)):
        with pytest.raises(ConfigurationError, match="is not an integer") as caught:
            parse()
        assert_has_four_parts(caught.value, devices)


@pytest.mark.parametrize("devices", WRONG_TYPES, ids=repr)
def test_a_value_of_another_type_is_refused(devices) -> None:
    for parse in (lambda: parse_indices(devices, 4, "cuda"), lambda: parse_count(devices, 8)):
        with pytest.raises(ArgumentTypeError) as caught:
            parse()
        assert_has_four_parts(caught.value, devices)


def test_an_integer_from_another_library_counts_as_one() -> None:
    assert parse_indices(torch.tensor(2), 4, "cuda") == (0, 1)  # type: ignore[arg-type]


def test_the_suggested_spelling_is_accepted() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_count([0, 1, 2], cores=2)
    assert caught.value.suggestion == "devices=3"
    with pytest.raises(ConfigurationError) as caught:
        parse_indices(9, 4, "cuda")
    assert caught.value.suggestion == "devices=4"


class MetaAccelerator(Accelerator):
    """What a user's own accelerator has to define, on a device type that torch has no backend for."""

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


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_a_core_that_this_process_may_not_use_does_not_count() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert CPUAccelerator().device_count() == 1
        assert len(CPUAccelerator().parse_devices(-1)) == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_the_cpu_may_hold_more_processes_than_cores() -> None:
    assert CPUAccelerator().parse_devices(64) == (torch.device("cpu"),) * 64


def test_each_accelerator_is_named_after_its_torch_device() -> None:
    for accelerator in (CPUAccelerator(), CUDAAccelerator(), MPSAccelerator()):
        assert torch.device(accelerator.name).type == accelerator.name


@pytest.mark.parametrize(
    ("accelerator", "backend"), [(CPUAccelerator(), "gloo"), (CUDAAccelerator(), "nccl")], ids=["cpu", "cuda"]
)
def test_torch_chooses_the_backend(accelerator: Accelerator, backend: str) -> None:
    assert accelerator.default_backend == backend


def test_hardware_without_a_backend_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match="process_group_backend") as caught:
        _ = MetaAccelerator().default_backend
    assert "'meta'" in caught.value.request
    assert caught.value.expected


def test_an_accelerator_of_ones_own_needs_two_methods() -> None:
    own = MetaAccelerator()
    assert own.parse_devices("auto") == (torch.device("meta", 0), torch.device("meta", 1))
    assert own.parse_devices([1]) == (torch.device("meta", 1),)
    own.activate(torch.device("meta", 0))
    own.release()


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


def test_asking_about_gpus_does_not_initialise_cuda() -> None:
    cuda = CUDAAccelerator()
    cuda.is_available()
    cuda.device_count()
    if cuda.is_available():
        cuda.parse_devices("auto")
    cuda.release()
    assert not torch.cuda.is_initialized()


class TestOnCudaDevices:
    pytestmark = gpu

    def test_all_gpus_are_named_by_auto(self) -> None:
        cuda = CUDAAccelerator()
        assert cuda.parse_devices("auto") == tuple(torch.device("cuda", n) for n in range(cuda.device_count()))

    def test_an_activated_gpu_is_the_current_one(self) -> None:
        cuda = CUDAAccelerator()
        last = cuda.parse_devices("auto")[-1]
        cuda.activate(last)
        assert torch.empty(1, device="cuda").device == last
        cuda.release()

    def test_a_process_forked_after_parsing_can_use_cuda(self) -> None:
        script = (
            "import os, torch\n"
            "from fabric.accelerators import CUDAAccelerator\n"
            "CUDAAccelerator().parse_devices('auto')\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    os._exit(0 if torch.ones(2, device='cuda').sum().item() == 2 else 1)\n"
            "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        )
        subprocess.run(
            [sys.executable, "-c", script], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
