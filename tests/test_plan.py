"""The decisions from the user's arguments, and the refusals before any process starts."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from fabric import Fabric
from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from fabric.environments import SlurmEnvironment
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError
from fabric.launchers import ProcessLauncher
from fabric.precision import PRECISIONS
from fabric.runtime import DEFAULT_TIMEOUT
from fabric.strategies import DataParallelStrategy, DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.ranks import run_in_ranks

TWO_RANKS = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_PORT": "1234",
}
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
TWO_NODES = {
    **TWO_RANKS,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
}
OWN_RANKS = {**TWO_RANKS, "FABRIC_STORE": "file:///nowhere/store"}
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")


def plan(env: dict[str, str] | None = None, **arguments: object) -> Fabric:
    """Build a Fabric in a process with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        # pytest itself may have been started by code that is in no file.
        patch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        return Fabric(**{"accelerator": "cpu", **arguments})  # type: ignore[arg-type]


def processes(fabric: Fabric) -> str:
    """Return what ``describe()`` says of the processes: their number, nodes and launcher."""
    lines = fabric.describe().splitlines()
    [line] = [line for line in lines if line.startswith("processes")]
    return line.removeprefix("processes").strip()


def test_defaults_are_one_process_on_one_device() -> None:
    fabric = plan()
    assert isinstance(fabric.strategy, SingleDeviceStrategy)
    assert processes(fabric) == "1 on 1 node(s), by this script"
    assert fabric.describe().startswith("accelerator  cpu\n")
    assert fabric.precision.name == "32-true"
    assert fabric.global_rank == 0


def test_several_devices_mean_ddp_in_processes_that_are_still_to_start() -> None:
    fabric = plan(devices=3)
    assert isinstance(fabric.strategy, DDPStrategy)
    assert processes(fabric) == "3 on 1 node(s), by popen"


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        ("ddp_forkserver", "processes    2 on 1 node(s), by forkserver"),
        ("dp", "replicas     2 of each module, in this process"),
    ],
)
def test_two_devices_of_a_cpu_are_counted_and_not_listed(strategy: str, line: str) -> None:
    fabric = plan(devices=2, strategy=strategy)
    assert repr(fabric) == fabric.describe()
    lines = repr(fabric).splitlines()
    assert lines[0] == "accelerator  cpu"
    assert line in lines


def test_the_representation_in_each_of_two_processes_has_one_device_and_both_processes() -> None:
    for rank, text in enumerate(run_in_ranks(repr)):
        lines = text.splitlines()
        assert lines[0] == "accelerator  cpu"
        assert lines[3].startswith("processes    2 on 1 node(s), by ")
        assert lines[4] == f"this one     rank {rank}, local rank {rank}"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ddp", "popen"),
        ("ddp_spawn", "spawn"),
        ("ddp_fork", "fork"),
        ("ddp_forkserver", "forkserver"),
        ("ddp_notebook", "forkserver"),
        ("DDP_SPAWN", "spawn"),
    ],
)
@pytest.mark.parametrize("suffix", ["", "_find_unused_parameters_true"])
def test_a_strategy_name_sets_the_start_method(name: str, method: str, suffix: str) -> None:
    strategy = plan(devices=2, strategy=name + suffix).strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy.start_method == method
    if suffix:
        assert strategy.ddp_kwargs == {"find_unused_parameters": True}
    else:
        assert strategy.ddp_kwargs == {}


@pytest.mark.parametrize("env", [{}, ONE_RANK])
def test_dp_drives_all_devices_from_one_process(env: dict[str, str]) -> None:
    fabric = plan(env, devices=3, strategy="dp")
    assert isinstance(fabric.strategy, DataParallelStrategy)
    assert fabric.world_size == 1
    assert fabric.global_rank == 0
    assert "replicas     3 of each module" in fabric.describe()
    assert "replicas     1 of each module" in plan(env, strategy="dp").describe()


@pytest.mark.parametrize(("name", "offloads"), [("fsdp", False), ("fsdp_cpu_offload", True)])
def test_fsdp_has_a_row_with_and_without_offloading(name: str, offloads: bool) -> None:
    strategy = plan(devices=2, strategy=name).strategy
    assert isinstance(strategy, FSDPStrategy)
    assert (strategy.cpu_offload is not None) is offloads


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (None, "32-true"),
        (64, "64-true"),
        ("64", "64-true"),
        (16, "16-mixed"),
        ("bf16", "bf16-mixed"),
        (32, "32-true"),
    ],
)
def test_an_alias_of_a_precision_resolves_to_its_name(precision: object, name: str) -> None:
    assert plan(precision=precision).precision.name == name


def test_auto_yields_to_the_launcher_that_started_the_processes() -> None:
    fabric = plan(TWO_RANKS)
    assert fabric.global_rank == 1
    assert processes(fabric) == "2 on 1 node(s), by torchrun"
    assert isinstance(fabric.strategy, DDPStrategy)
    assert processes(plan(TWO_NODES)) == "2 on 2 node(s), by torchrun"


def test_environment_none_turns_detection_off() -> None:
    assert plan(TWO_RANKS, environment="none").world_size == 1


def test_ranks_that_fabric_started_accept_the_start_method_that_started_them() -> None:
    assert plan(OWN_RANKS, devices=2, strategy="ddp_spawn").world_size == 2
    assert processes(plan(OWN_RANKS, devices=2, launcher="spawn")) == "2 on 1 node(s), by fabric"


def test_the_launcher_argument_wins_over_the_start_method() -> None:
    assert processes(plan(devices=2, strategy="ddp", launcher="spawn")).endswith("by spawn")
    fabric = plan(devices=2, strategy="ddp_spawn", launcher=ProcessLauncher("fork"))
    assert processes(fabric).endswith("by fork")


def test_a_strategy_name_without_a_start_method_is_safe_at_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert processes(plan(devices=2, strategy="ddp")).endswith("by forkserver")
    assert processes(plan(devices=2)).endswith("by forkserver")
    assert processes(plan(devices=2, strategy="ddp_spawn")).endswith("by spawn")
    with pytest.raises(ConfigurationError, match="popen"):
        plan(devices=2, strategy=DDPStrategy())


def test_options_of_fabric_run_apply_where_the_script_says_nothing() -> None:
    env = {
        **TWO_RANKS,
        "FABRIC_PRECISION": "bf16-mixed",
        "FABRIC_STRATEGY": "ddp",
        "FABRIC_DEVICES": "2",
    }
    fabric = plan(env, accelerator="auto", devices=2, precision="bf16")
    assert fabric.precision.name == "bf16-mixed"


@pytest.mark.parametrize("strategy", ["auto", "single_device", "dp", "ddp_spawn", "fsdp"])
def test_a_strategy_that_is_named_has_the_precision_that_is_named(strategy: str) -> None:
    for precision, name in ((None, "32-true"), ("bf16-mixed", "bf16-mixed")):
        actual = plan(strategy=strategy, precision=precision).strategy.precision
        assert actual is not None
        assert actual.name == name


def test_a_strategy_object_has_the_precision_of_the_fabric_that_uses_it() -> None:
    strategy = SingleDeviceStrategy()
    for precision in ("64-true", "bf16-mixed"):
        with Fabric(accelerator="cpu", strategy=strategy, precision=precision) as fabric:
            fabric.setup(torch.nn.Linear(1, 1))
            assert strategy.precision is PRECISIONS[precision]
        assert strategy.precision is None


def test_a_job_of_this_process_alone_runs_inside_of_a_rank() -> None:
    fabric = plan(OWN_RANKS, strategy=SingleDeviceStrategy(device="cpu"), environment="none")
    assert fabric.world_size == 1
    assert fabric.global_rank == 0


def test_a_job_of_this_process_alone_takes_no_option_of_fabric_run() -> None:
    env = {
        **OWN_RANKS,
        "FABRIC_DEVICES": "2",
        "FABRIC_STRATEGY": "fsdp",
        "FABRIC_PRECISION": "bf16-mixed",
    }
    for devices in (1, "auto"):
        fabric = plan(env, devices=devices, environment="none")
        assert fabric.world_size == 1
        assert fabric.strategy.name == "single_device"
        assert fabric.precision.name == "32-true"
    with pytest.raises(
        ConfigurationError, match=r"--devices 2` \(FABRIC_DEVICES; environment='none' ignores it"
    ):
        plan(env, devices=1)


def test_options_of_the_strategy_are_merged() -> None:
    cpu = torch.device("cpu")
    strategy = DDPStrategy(parallel_devices=[cpu, cpu], precision="64-true", accelerator="cpu")
    for devices in ("auto", 2, "2"):
        fabric = plan(accelerator="auto", devices=devices, strategy=strategy)
        assert fabric.world_size == 2
        assert fabric.precision.name == "64-true"


# The arguments, the environment variables, the error, and what its text has to name.
REFUSALS = [
    ({"accelerator": "tpu"}, {}, ConfigurationError, ["'tpu'", "'cpu'", "'cuda'"]),
    ({"accelerator": 3}, {}, ArgumentTypeError, ["accelerator=3", "int"]),
    pytest.param(
        {"accelerator": "cuda"},
        {},
        ConfigurationError,
        ["'cuda'", "none on this machine"],
        marks=no_cuda,
    ),
    pytest.param(
        {"accelerator": CUDAAccelerator()}, {}, ConfigurationError, ["cuda"], marks=no_cuda
    ),
    (
        {"strategy": "dpp"},
        {},
        ConfigurationError,
        ["'dpp'", "no strategy of that name", 'strategy="ddp"', "'ddp_spawn'"],
    ),
    ({"strategy": None}, {}, ArgumentTypeError, ["strategy=None"]),
    ({"strategy": DDPStrategy}, {}, ArgumentTypeError, ["DDPStrategy"]),
    ({"precision": "fp16"}, {}, ConfigurationError, ["'fp16'", "'16-mixed'"]),
    ({"precision": True}, {}, ConfigurationError, ["True"]),
    ({"precision": 8}, {}, ConfigurationError, ["8", "'bf16-true'"]),
    ({"devices": 0}, {}, ConfigurationError, ["0"]),
    ({"devices": -2}, {}, ConfigurationError, ["-2"]),
    ({"devices": "two"}, {}, ConfigurationError, ["'two'"]),
    ({"devices": 1.5}, {}, ArgumentTypeError, ["1.5"]),
    ({"devices": [0, 1]}, {}, ConfigurationError, ["[0, 1]"]),
    ({"devices": None}, {}, ArgumentTypeError, ["None"]),
    ({"num_nodes": 0}, {}, ConfigurationError, ["num_nodes=0"]),
    ({"num_nodes": "many"}, {}, ConfigurationError, ["'many'"]),
    ({"num_nodes": 2}, {}, ConfigurationError, ["num_nodes=2", "fabric run --num-nodes 2"]),
    (
        {"num_nodes": 2},
        TWO_RANKS,
        ConfigurationError,
        ["num_nodes=2", "a job of 1 node(s)", "torchrun"],
    ),
    ({"devices": 3}, TWO_RANKS, ConfigurationError, ["devices=3", "2 process(es)", "rank 1"]),
    ({"environment": "slurm"}, {}, ArgumentTypeError, ["'slurm'", "SlurmEnvironment()"]),
    ({"environment": SlurmEnvironment()}, {}, ConfigurationError, ["variables are missing"]),
    ({"launcher": "mpirun"}, {}, ConfigurationError, ["'mpirun'", "'forkserver'"]),
    ({"launcher": 7}, {}, ArgumentTypeError, ["launcher=7"]),
    ({"strategy": "ddp_spawn"}, TWO_RANKS, ConfigurationError, ["'spawn'", "torchrun", "rank 1"]),
    ({"launcher": "fork"}, TWO_RANKS, ConfigurationError, ["'fork'", "torchrun"]),
    (
        {"strategy": "single_device", "devices": 2},
        {},
        ConfigurationError,
        ["single_device", "2 device(s)"],
    ),
    ({"strategy": SingleDeviceStrategy()}, TWO_RANKS, ConfigurationError, ["single_device"]),
    (
        {"strategy": SingleDeviceStrategy(device="cpu")},
        OWN_RANKS,
        ConfigurationError,
        ["'single_device' with 2 processes", "by fabric (rank 1)", 'environment="none"'],
    ),
    (
        {"strategy": "dp"},
        TWO_RANKS,
        ConfigurationError,
        ["'dp'", "2 processes", "torchrun", "rank 1"],
    ),
    ({"strategy": "dp", "devices": 2}, TWO_NODES, ConfigurationError, ["'dp'", "2 node(s)"]),
    ({"strategy": "dp", "num_nodes": "2"}, {}, ConfigurationError, ["num_nodes='2'"]),
    ({"strategy": "dp", "num_nodes": 0}, {}, ConfigurationError, ["num_nodes=0"]),
    (
        {"precision": "16-mixed"},
        {"FABRIC_PRECISION": "32"},
        ConfigurationError,
        ["'16-mixed'", "--precision 32"],
    ),
    ({"devices": 2}, {"FABRIC_DEVICES": "4"}, ConfigurationError, ["devices=2", "--devices 4"]),
    (
        {"strategy": DDPStrategy(precision=64), "precision": 32},
        {},
        ConfigurationError,
        ["precision=32", "64-true"],
    ),
    ({"strategy": DDPStrategy(accelerator="cuda")}, {}, ConfigurationError, ["'cpu'", "'cuda'"]),
    ({"strategy": DDPStrategy(timeout=timedelta(0))}, {}, ConfigurationError, ["timedelta(0)"]),
    ({"strategy": DDPStrategy(num_nodes=0)}, {}, ConfigurationError, ["num_nodes=0"]),
    (
        {"strategy": DDPStrategy(start_method="thread"), "devices": 2},
        {},
        ConfigurationError,
        ["'thread'", "'popen'"],
    ),
    (
        {"strategy": DDPStrategy(parallel_devices=[torch.device("cpu")]), "devices": 2},
        {},
        ConfigurationError,
        ["devices=2", "'cpu' in the strategy"],
    ),
]


@pytest.mark.parametrize(("arguments", "env", "error", "names"), REFUSALS)
def test_what_cannot_work_is_refused_with_what_is_valid(
    arguments: dict[str, object], env: dict[str, str], error: type[FabricError], names: list[str]
) -> None:
    with pytest.raises(error) as caught:
        plan(env, **arguments)
    for name in names:
        assert name in str(caught.value)
    assert caught.value.problem
    assert caught.value.expected or caught.value.suggestion


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        (
            {"find_unused_parameter": True},
            ArgumentTypeError,
            ["find_unused_parameter=True", "find_unused_parameters"],
        ),
        ({"module": None}, ArgumentTypeError, ["module"]),
        ({"ddp_comm_wrapper": print}, ConfigurationError, ["ddp_comm_wrapper"]),
        (
            {"model_averaging_period": 4},
            ConfigurationError,
            ["model_averaging_period=4", "PostLocalSGDState"],
        ),
        ({"precision": "fp8"}, ConfigurationError, ["'fp8'"]),
    ],
)
def test_wrong_options_of_ddp_are_refused_at_construction(
    arguments: dict[str, object], error: type[FabricError], names: list[str]
) -> None:
    with pytest.raises(error) as caught:
        DDPStrategy(**arguments)  # type: ignore[arg-type]
    for name in names:
        assert name in str(caught.value)


def test_a_plugin_accelerator_can_be_passed_as_an_object() -> None:
    class Board(CPUAccelerator):
        name = "cpu"

    board = Board()
    assert Fabric(accelerator=board, environment="none").accelerator is board


class Cards(Accelerator):
    """An accelerator of which each process sees some devices."""

    name = "meta"

    def __init__(self, count: int) -> None:
        self.count = count

    def device_count(self) -> int:
        return self.count


def test_a_launcher_may_start_as_many_processes_as_there_are_devices() -> None:
    for count in (2, 3):
        assert processes(plan(TWO_RANKS, accelerator=Cards(count))).startswith("2 on 1 node(s)")
    four_ranks = {**TWO_RANKS, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    # A scheduler may show each process its own device alone.
    assert processes(plan(four_ranks, accelerator=Cards(1))).startswith("4 on 1 node(s)")
    with pytest.raises(ConfigurationError, match="rank 1 sees only 3 meta devices"):
        plan(four_ranks, accelerator=Cards(3))


PLUGINS = """
from fabric.accelerators import CPUAccelerator
from fabric.precision import PRECISIONS, Precision
from fabric.strategies import SingleDeviceStrategy

class OurPrecision(Precision):
    def __init__(self):
        super().__init__(name="ours")

def make_strategy():
    return SingleDeviceStrategy()

not_a_precision = 3
one_of_the_table = PRECISIONS["bf16-mixed"]
"""


def install_plugin(folder: Path, group: str, target: str) -> None:
    """Write a package with an entry point called ours."""
    (folder / "ours.py").write_text(PLUGINS)
    metadata = folder / "ours-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nours = ours:{target}\n")


@pytest.mark.parametrize(
    ("argument", "group", "target", "class_name"),
    [
        ("strategy", "fabric.strategies", "make_strategy", "SingleDeviceStrategy"),
        ("accelerator", "fabric.accelerators", "CPUAccelerator", "CPUAccelerator"),
        ("precision", "fabric.precisions", "OurPrecision", "OurPrecision"),
        ("precision", "fabric.precisions", "one_of_the_table", "Precision"),
    ],
)
def test_an_installed_package_adds_names_through_entry_points(
    argument: str,
    group: str,
    target: str,
    class_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_plugin(tmp_path, group, target)
    monkeypatch.syspath_prepend(tmp_path)
    resolved = plan(**{argument: "ours"})
    assert type(getattr(resolved, argument)).__name__ == class_name


def test_an_entry_point_that_is_no_precision_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, "fabric.precisions", "not_a_precision")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentTypeError, match="'ours:not_a_precision' is of type int"):
        plan(precision="ours")


def test_an_unknown_precision_lists_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, "fabric.precisions", "OurPrecision")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="'bf16', 'ours'"):
        plan(precision="theirs")


@pytest.mark.parametrize("strategy_class", [SingleDeviceStrategy, DDPStrategy, FSDPStrategy])
def test_a_strategy_made_without_a_timeout_has_the_default_of_the_runtime(
    strategy_class: type,
) -> None:
    assert strategy_class().timeout == DEFAULT_TIMEOUT
