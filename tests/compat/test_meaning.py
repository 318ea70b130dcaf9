"""Where Lightning Fabric means something else, fabric_compat means what Lightning does."""

import inspect
import json
import logging
import os
import pickle
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.distributed import ReduceOp
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from fabric.errors import ArgumentTypeError, ConfigurationError, UnsafeCheckpointError
from fabric.world import World
from fabric_compat import Fabric, is_wrapped
from fabric_compat.accelerators import (
    ACCELERATOR_REGISTRY,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
    _parse_cpu_cores,
    find_usable_cuda_devices,
)
from fabric_compat.loggers import CSVLogger, TensorBoardLogger, rank_zero_experiment
from fabric_compat.notes import print_once
from fabric_compat.plugins import (
    CheckpointIO,
    DoublePrecision,
    HalfPrecision,
    LightningEnvironment,
    MixedPrecision,
    Precision,
    SingleDeviceCollective,
    TorchCheckpointIO,
    TorchCollective,
)
from fabric_compat.spike import SpikeDetection, TrainingSpikeException
from fabric_compat.strategies import DDPStrategy, SingleDeviceStrategy
from fabric_compat.throughput import (
    Throughput,
    ThroughputMonitor,
    get_available_flops,
    measure_flops,
)
from fabric_compat.utilities import (
    AttributeDict,
    MisconfigurationException,
    _atomic_save,
    _collect_rng_states,
    _determine_root_gpu_device,
    _DeviceDtypeModuleMixin,
    _init_dist_connection,
    _move_state_into,
    _parse_gpu_ids,
    _sanitize_callable_params,
    _set_rng_states,
    _set_sampler_epoch,
    _sync_ddp_if_available,
    convert_tensors_to_scalars,
    get_filesystem,
    has_len,
    is_shared_filesystem,
    isolate_rng,
    pl_worker_init_function,
    rank_zero_debug,
    rank_zero_info,
    seed_everything,
    suggested_max_num_workers,
)
from fabric_compat.wrappers import (
    _FabricDataLoader,
    _FabricModule,
    _FabricOptimizer,
    _unwrap_objects,
)
from tests.ranks import SharedRanks


def in_ranks(function: Any, *args: Any, **options: Any) -> list[Any]:
    options = {
        "strategy": "ddp",
        "launcher": SharedRanks(),
        "accelerator": "cpu",
        "devices": 2,
        **options,
    }
    with Fabric(**options) as fabric:
        return fabric.launch(function, *args, return_all=True)


def single(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, **options)


def test_the_arguments_of_fabric_may_be_positional() -> None:
    strategy = DDPStrategy(timeout=timedelta(seconds=5))
    plugin = TorchCheckpointIO()
    with Fabric("cpu", strategy, 2, 1, "bf16-mixed", plugin, [], CSVLogger("runs")) as fabric:
        assert fabric.strategy is strategy
        assert fabric.world_size == 2
        assert fabric.precision.name == "bf16-mixed"
        assert fabric.strategy.checkpoint_io is plugin
        assert isinstance(fabric.logger, CSVLogger)
    # Command lines are made from the signature.
    parameters = inspect.signature(Fabric).parameters
    assert [parameters[name].default for name in ("strategy", "devices")] == ["auto", "auto"]


def set_hardware(monkeypatch: Any, gpus: int, has_mps: bool) -> None:
    monkeypatch.setattr("fabric_compat.accelerators.num_cuda_devices", lambda: gpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: has_mps)


def test_hardware_that_is_missing_is_a_runtime_error(monkeypatch: Any) -> None:
    set_hardware(monkeypatch, gpus=0, has_mps=False)
    for accelerator in ("cuda", "mps", "gpu", "tpu", CUDAAccelerator()):
        with pytest.raises(RuntimeError, match="there is none on this machine") as raised:
            Fabric(accelerator=accelerator)
        assert f"Fabric(accelerator={accelerator!r})" in str(raised.value)
    # The remedies of the error.
    assert Fabric("cpu").device == Fabric("auto").device == torch.device("cpu")


def test_more_devices_than_there_are_is_an_error_of_lightning(monkeypatch: Any) -> None:
    set_hardware(monkeypatch, gpus=2, has_mps=False)
    with pytest.raises(MisconfigurationException, match="2 devices"):
        Fabric(accelerator="cuda", devices=3)


def test_gpu_is_also_the_gpu_of_a_mac(monkeypatch: Any) -> None:
    set_hardware(monkeypatch, gpus=0, has_mps=True)
    assert Fabric(accelerator="gpu", devices=1).device == torch.device("mps", 0)


def test_a_script_may_ask_whether_there_is_a_tpu() -> None:
    assert not XLAAccelerator.is_available()
    assert XLAAccelerator.auto_device_count() == 0


def test_usable_cuda_devices_are_found_or_an_error_says_why(monkeypatch: Any) -> None:
    assert find_usable_cuda_devices(0) == []
    set_hardware(monkeypatch, gpus=0, has_mps=False)
    with pytest.raises(ValueError, match="sees 0 CUDA devices"):
        find_usable_cuda_devices()
    set_hardware(monkeypatch, gpus=2, has_mps=False)
    assert CUDAAccelerator.auto_device_count() == 2
    with pytest.raises(ValueError, match="sees 2 CUDA devices"):
        find_usable_cuda_devices(3)
    with patch("torch.tensor", side_effect=RuntimeError("busy")):
        with pytest.raises(RuntimeError, match=r"use the devices \[0, 1\]"):
            find_usable_cuda_devices(2)
        assert find_usable_cuda_devices() == []
    with patch("torch.tensor"):
        assert find_usable_cuda_devices() == [0, 1]


def test_gpus_are_parsed_as_fabric_parses_devices(monkeypatch: Any) -> None:
    set_hardware(monkeypatch, gpus=4, has_mps=True)
    gpus = {
        0: None,
        "0": None,
        2: [0, 1],
        -1: [0, 1, 2, 3],
        "1, 3": [1, 3],
        "2,": [2],
        (3, 1): [3, 1],
    }
    for value, indices in gpus.items():
        assert _parse_gpu_ids(value, include_cuda=True) == indices
        assert _determine_root_gpu_device(indices) == (indices and indices[0])
    assert _parse_gpu_ids([0], include_mps=True) == [0]
    for value in (5, [4], [0, 0], 0.1, False):
        with pytest.raises((TypeError, MisconfigurationException)):
            _parse_gpu_ids(value, include_cuda=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="include_cuda=True or include_mps=True"):
        _parse_gpu_ids(1)


def test_a_number_of_processes_on_the_cpu_is_above_zero() -> None:
    assert _parse_cpu_cores("3") == _parse_cpu_cores(3) == 3
    for devices in (0, -1, [3], "auto"):
        with pytest.raises(TypeError, match="should be an int > 0"):
            _parse_cpu_cores(devices)  # type: ignore[arg-type]


def test_a_module_of_lightning_knows_its_device_and_dtype() -> None:
    module = _DeviceDtypeModuleMixin()
    outer = nn.Sequential(module, nn.Linear(1, 1))
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
    outer.to("meta").half()
    assert (module.device, module.dtype) == (torch.device("meta"), torch.float16)
    module.layer = nn.Linear(1, 1, dtype=torch.float64)
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float64)
    assert list(module.state_dict()) == ["layer.weight", "layer.bias"]


def test_torch_is_connected_at_the_address_of_an_environment() -> None:
    try:
        for _ in range(2):  # the second call does nothing
            _init_dist_connection(LightningEnvironment(), "gloo", timeout=timedelta(seconds=60))
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()


def collectives(fabric: Fabric) -> Any:
    own = torch.tensor([float(fabric.global_rank)])
    fabric.all_reduce({"a": own}, reduce_op="sum")
    number = fabric.all_gather(3 + fabric.global_rank)
    groups = [TorchCollective().create_group(ranks=[0, 1]), TorchCollective()]
    reduced = [group.all_reduce(torch.ones(1), op="sum").item() for group in groups]
    objects: list[Any] = [None, None]
    groups[0].all_gather_object(objects, fabric.global_rank)
    worst = groups[0].all_reduce(torch.tensor(fabric.global_rank), "max").item()
    groups[0].teardown()
    # The last collective of this function needs the group of the job.
    with pytest.raises(RuntimeError, match="TorchCollective does not own a group to destroy"):
        groups[1].teardown()
    return own.item(), number.tolist(), reduced, objects, worst, fabric.all_reduce(2).item()


def test_collectives_reduce_in_place_and_make_tensors_of_numbers() -> None:
    assert in_ranks(collectives) == [(1.0, [3, 4], [2.0, 2.0], [0, 1], 1, 2)] * 2


def means(fabric: Fabric) -> Any:
    rank = fabric.global_rank
    flag = fabric.all_reduce(rank == 0, reduce_op="sum")
    assert flag.dtype == torch.uint8
    assert fabric.all_gather(numpy.array([rank, 2])).tolist() == [[0, 2], [1, 2]]
    assert fabric.all_reduce(numpy.float64(rank)).dtype == torch.float32
    synced = _sync_ddp_if_available(torch.tensor([rank, 3 + rank]), reduce_op="mean")
    return (
        fabric.all_reduce(torch.tensor(rank * (1 + 2j))).item(),
        fabric.all_reduce(3 + rank).item(),
        (flag.item(), fabric.all_reduce(rank == 0).item()),
        synced.tolist(),
    )


def test_a_collective_leaves_the_variables_of_the_address_alone(monkeypatch: Any) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "5")
    addresses: list[Any] = []

    def init_process_group(**_: Any) -> None:
        addresses.append((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))

    with patch("torch.distributed.init_process_group", init_process_group):
        TorchCollective().setup(main_address="host", main_port=6)
    assert addresses == [("host", "5")]
    assert "MASTER_ADDR" not in os.environ
    assert os.environ["MASTER_PORT"] == "5"


def test_a_collective_calls_the_function_that_torch_has_at_that_time() -> None:
    tensor = torch.ones(1)
    collective = TorchCollective()
    with patch("torch.distributed.new_group") as new_group:
        group = collective.create_group(ranks=[0]).group
    new_group.assert_called_once_with(ranks=[0])
    with patch("torch.distributed.all_reduce") as all_reduce:
        assert collective.all_reduce(tensor, op="max") is tensor
    all_reduce.assert_called_once_with(tensor=tensor, op=ReduceOp.MAX, group=group)
    with pytest.raises(ValueError, match="op 'most' is not a member of `ReduceOp`"):
        collective.all_reduce(tensor, op="most")
    with pytest.raises(ValueError, match="Unsupported op 3 of type int"):
        collective.all_reduce(tensor, op=3)


def test_the_mean_of_complex_numbers_is_complex_and_that_of_integers_is_cut_off() -> None:
    assert in_ranks(means) == [(0.5 + 1j, 3, (1, 0), [0, 3])] * 2


def test_on_one_process_a_gathered_tensor_has_no_new_dimension() -> None:
    with single() as fabric:
        assert fabric.all_gather(torch.ones(2, 3)).shape == (2, 3)
        assert fabric.all_gather({"a": 1})["a"].shape == ()
    alone = SingleDeviceCollective()
    assert (
        alone.all_gather([torch.zeros(1)], torch.ones(1))
        == [torch.ones(1)]
        == alone.gather(torch.ones(1), [])
    )


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_a_collective_may_be_the_first_call_of_a_script(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(rank_zero_only, "rank", raising=False)
    with single() as fabric:
        assert getattr(fabric, name)(2.0).item() == 2


@pytest.mark.parametrize(
    ("precision", "inside"),
    [
        ("64-true", torch.float64),
        ("bf16-true", torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_outputs_are_float32_and_inputs_are_cast(
    precision: Any, inside: torch.dtype, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_once.__wrapped__.cache_clear()

    class Model(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.seen = input.dtype, torch.zeros(1).dtype
            return super().forward(input)

    is_mixed = str(precision).endswith("mixed")
    dtype_of_weights = torch.float32 if is_mixed else inside
    with single(precision=precision, strategy=strategy) as fabric:
        module = Model(2, 2)
        model = fabric.setup(module)
        assert model(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float32
        assert model.module.seen == (inside, dtype_of_weights)
        # FSDP gathers weights in the dtype of the computation, and keeps those of the root.
        if strategy == "auto":
            assert model.dtype == dtype_of_weights
        note = f"get floating inputs as {inside}, and return torch.float32"
        assert note in capsys.readouterr().err
        assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"precision": "16-mixed"}, "bf16-mixed"),
        ({"precision": 16, "strategy": "ddp"}, "bf16-mixed"),
        ({"precision": "16-mixed", "strategy": "fsdp"}, "16-mixed"),
        ({"plugins": MixedPrecision("16-mixed", "cpu")}, "16-mixed"),
    ],
)
def test_16_bit_mixed_precision_is_that_of_bfloat16_on_cpus(
    options: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_once.__wrapped__.cache_clear()
    with single(**options) as fabric:
        assert fabric.precision.name == fabric.strategy.precision.name == name
        with fabric.autocast():
            output = nn.Linear(2, 2)(torch.ones(1, 2))
        assert output.dtype == fabric.precision.compute_dtype
    is_replaced = "'16-mixed' on CPUs is 'bf16-mixed'" in capsys.readouterr().err
    assert is_replaced == (name == "bf16-mixed")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)]
)
def test_autocast_makes_tensors_of_the_dtype_of_a_true_precision(
    precision: Any, dtype: torch.dtype
) -> None:
    with single(precision=precision) as fabric:
        with fabric.autocast():
            assert torch.zeros(1).dtype == dtype
        assert torch.zeros(1).dtype == torch.float32


def test_32_bit_precision_leaves_inputs_and_outputs_as_they_are() -> None:
    with single(precision=32) as fabric:
        model = fabric.setup(nn.Identity())
        assert model(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_the_precision_of_the_strategy_has_the_methods_of_lightning(name: str) -> None:
    with single(precision=name) as fabric:
        assert fabric.strategy.precision.precision == name
        fabric.launch()
        assert fabric.strategy.precision.precision == name


@pytest.mark.parametrize("kind", [CPUAccelerator, CUDAAccelerator, MPSAccelerator])
def test_the_methods_of_an_accelerator_are_called_on_its_class(kind: Any) -> None:
    is_available = kind.is_available()
    assert is_available == (kind.auto_device_count() > 0)
    indices: Any = [0, 1]
    if kind is CPUAccelerator:
        indices = 2
    devices = kind.get_parallel_devices(indices)
    assert [device.type for device in devices] == [kind.name] * 2
    with pytest.raises(ValueError, match="expected a device of type"):
        kind().setup_device(torch.device("meta"))
    assert ACCELERATOR_REGISTRY.get(kind.name).name == kind.name


def test_the_accelerator_of_fabric_is_of_the_class_that_scripts_import() -> None:
    with single() as fabric:
        assert isinstance(fabric.accelerator, CPUAccelerator)
        fabric.accelerator.setup_device(fabric.device)
    with Fabric(accelerator=CPUAccelerator(), devices=1) as fabric:
        assert fabric.world_size == 1


MIXED = MixedPrecision("bf16-mixed", "cpu")
TWO_PLACES: dict[str, dict[str, Any]] = {
    "two precisions": {"plugins": [MIXED, HalfPrecision("bf16-true")]},
    "precision and plugin": {"plugins": MIXED, "precision": "bf16-mixed"},
    "precision of the strategy": {
        "plugins": MIXED,
        "strategy": DDPStrategy(precision="64-true"),
    },
    "two formats": {"plugins": [TorchCheckpointIO(), TorchCheckpointIO()]},
    "format of the strategy": {
        "plugins": TorchCheckpointIO(),
        "strategy": DDPStrategy(checkpoint_io=TorchCheckpointIO()),
    },
    "two environments": {"plugins": [LightningEnvironment(), LightningEnvironment()]},
    "environment of the strategy": {
        "plugins": LightningEnvironment(),
        "strategy": DDPStrategy(cluster_environment=LightningEnvironment()),
    },
    "environment and plugin": {"plugins": LightningEnvironment(), "environment": "none"},
    "environment and that of the strategy": {
        "strategy": DDPStrategy(cluster_environment=LightningEnvironment()),
        "environment": "none",
    },
}


@pytest.mark.parametrize("case", TWO_PLACES)
def test_a_plugin_for_what_another_place_sets_is_refused(case: str) -> None:
    options = TWO_PLACES[case]
    with pytest.raises(ConfigurationError, match=r"in several places|two of the plugins"):
        single(**options)


@pytest.mark.parametrize("plugin", [MIXED, HalfPrecision("bf16-true"), DoublePrecision()])
def test_precisions_are_objects_with_methods(plugin: Precision) -> None:
    with single(plugins=plugin) as fabric:
        fabric.launch()
        fabric.setup(nn.Linear(1, 1))
        assert fabric.strategy.precision is plugin
        converted = plugin.convert_output(plugin.convert_input({"x": torch.ones(1)}))["x"]
        assert converted.dtype == torch.float32
        with plugin.forward_context(), plugin.tensor_init_context():
            assert plugin.convert_module(nn.Linear(1, 1)).weight.dtype == (
                plugin.param_dtype or torch.float32
            )
        assert plugin.precision == plugin.name == fabric.precision.name


def test_the_forward_context_of_a_users_precision_is_entered() -> None:
    class Counting(Precision):
        entered = 0

        @contextmanager
        def forward_context(self) -> Iterator[None]:
            Counting.entered += 1
            yield

    with single(plugins=Counting()) as fabric:
        module = nn.Linear(1, 1)
        model = fabric.setup(module)
        model(torch.ones(1, 1))
    assert Counting.entered == 1


def test_a_format_and_an_environment_of_the_users_are_plugins(
    tmp_path: Path, monkeypatch: Any
) -> None:
    class Format(CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            torch.save(checkpoint, f"{path}.mine")

        def load_checkpoint(self, path: Any, map_location: Any = None, **kwargs: Any) -> Any:
            return torch.load(f"{path}.mine", weights_only=True)

        def remove_checkpoint(self, path: Any) -> None:
            Path(f"{path}.mine").unlink()

    class Cluster(LightningEnvironment):
        creates_processes_externally = True  # type: ignore[assignment]

        def local_rank(self) -> int:
            return 0

    with single(plugins=[Format(), Cluster()]) as fabric:
        module = nn.Linear(1, 1)
        model = fabric.setup(module)
        fabric.save(tmp_path / "state", {"model": model, "step": 3})
        state = {"model": model, "step": 0}
        assert fabric.load(tmp_path / "state", state) == {}
        assert state["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state.mine"]
    with pytest.raises(TypeError, match="plugins="):
        single(plugins=object())


def test_an_entry_that_the_file_lacks_is_a_key_error(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.save(tmp_path / "state", {"step": 3})
        with pytest.raises(KeyError, match="the file has no 'epoch'; its entries are 'step'"):
            fabric.load(tmp_path / "state", {"epoch": 0})


class Cluster(LightningEnvironment):
    def __init__(self, has_started: bool) -> None:
        self.has_started = has_started

    @property
    def creates_processes_externally(self) -> bool:
        return self.has_started

    def local_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        self.size = size

    def world_size(self) -> int:
        return self.size


@pytest.mark.parametrize(
    ("devices", "count"), [(2, 2), ("2", 2), ("auto", 1), (-1, CPUAccelerator().device_count())]
)
def test_the_environment_of_a_plugin_has_a_process_for_each_device(
    devices: Any, count: int
) -> None:
    with Fabric(
        plugins=Cluster(has_started=True), accelerator="cpu", devices=devices, strategy="ddp"
    ) as fabric:
        assert fabric.world_size == count


@pytest.mark.parametrize("environment", [LightningEnvironment(), Cluster(has_started=False)])
def test_fabric_starts_the_processes_that_an_environment_does_not(
    environment: Any, monkeypatch: Any
) -> None:
    assert in_ranks(world_size, plugins=environment) == [2, 2]
    for name, value in (
        World(rank=1, local_rank=1, world_size=2, local_world_size=2, store="file:///s")
        .to_env()
        .items()
    ):
        monkeypatch.setenv(name, value)
    with Fabric(plugins=environment, accelerator="cpu", devices=2, strategy="ddp") as fabric:
        assert fabric.global_rank == 1
        assert fabric.world_size == 2  # in one of them, that is


def world_size(fabric: Fabric) -> int:
    return fabric.world_size


def test_a_scaler_says_where_the_scale_begins() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    assert precision.scaler is scaler
    assert precision.loss_scale is not None
    assert precision.loss_scale.init_scale == 2.0**10
    assert MixedPrecision("bf16-mixed", "cpu").scaler is None
    default = MixedPrecision("16-mixed", "cpu")
    assert default.loss_scale is not None
    assert default.scaler.get_scale() == default.loss_scale.init_scale
    with pytest.raises(ValueError, match="`precision='bf16-mixed'` does not use a scaler, found"):
        MixedPrecision("bf16-mixed", "cpu", scaler)


@pytest.mark.parametrize("name", ["32-true", "16", 16, "bf16"])
def test_a_mixed_precision_takes_two_names_and_no_alias(name: Any) -> None:
    expected = f"Passed `MixedPrecision(precision={name!r})`. Precision must be '16-mixed' or "
    with pytest.raises(ValueError, match=re.escape(expected)):
        MixedPrecision(name, "cpu")


def test_subclasses_read_the_dtype_of_the_inputs() -> None:
    assert HalfPrecision("bf16-true")._desired_input_dtype == torch.bfloat16
    assert MixedPrecision("16-mixed", "cpu")._desired_input_dtype == torch.float16


def test_the_error_of_a_wrong_argument_has_the_name_of_lightning() -> None:
    with pytest.raises(MisconfigurationException, match="devices=-2"):
        Fabric(accelerator="cpu", devices=-2)
    with pytest.raises(MisconfigurationException, match="of the script"):
        raise MisconfigurationException("an error of the script")


def test_the_peak_of_an_unknown_device_is_a_warning(monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    device = torch.device("cuda")
    with patch("torch.cuda.get_device_name", return_value="NVIDIA L40"):
        assert get_available_flops(device, torch.bfloat16) == 181e12
    with patch("torch.cuda.get_device_name", return_value="NVIDIA A100-SXM4-80GB"):
        assert get_available_flops(device, torch.float32) == 156e12
    # An RTX A4000 is no A40.
    with (
        patch("torch.cuda.get_device_name", return_value="NVIDIA RTX A4000"),
        pytest.warns(UserWarning, match="FLOPs not found for 'nvidia rtx a4000'"),
    ):
        assert get_available_flops(device, torch.bfloat16) is None
    with (
        patch("torch.cuda.get_device_name", return_value="GPU 1"),
        pytest.warns(UserWarning, match="FLOPs not found for 'gpu 1'") as warnings,
    ):
        assert get_available_flops(device, torch.bfloat16) is None
    assert warnings[0].filename == __file__


class Callback:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        self.seen.append(("setup", type(module).__name__))

    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(("step", type(optimizer).__name__))

    def mine(self, x: int) -> None:
        self.seen.append(x)


def test_callbacks_are_called_with_the_keywords_that_they_take() -> None:
    callback = Callback()
    with single(callbacks=callback) as fabric:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, optimizer = fabric.setup(model, optimizer)
        loss = wrapped(torch.ones(1, 1)).sum()
        fabric.backward(loss, model=wrapped)
        optimizer.step()
        fabric.call("mine", x=1, y=2)
        fabric.call("nothing")
        with pytest.warns(UserWarning, match=r"`Callback.seen` because it is not callable"):
            fabric.call("seen")
    assert callback.seen == [("setup", "_FabricModule"), ("step", "SGD"), 1]


def test_modules_may_be_set_up_again_and_optimizers_alone() -> None:
    with single() as fabric:
        model = nn.Linear(1, 1)
        [optimizer] = [
            fabric.setup_optimizers(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
        ]
        first = fabric.setup(model)
        second = fabric.setup(model)
        assert first is second
        assert isinstance(first, _FabricModule)
        assert isinstance(optimizer, _FabricOptimizer)
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.optimizer is optimizer
        assert not isinstance(torch.optim.SGD(model.parameters()), _FabricOptimizer)
        loader = fabric.setup_dataloaders(DataLoader([1.0]))
        assert isinstance(loader, _FabricDataLoader)
        assert is_wrapped(first)
        assert is_wrapped(optimizer)
        assert not is_wrapped(model)
        assert _unwrap_objects({"a": [first, 1]}) == {"a": [model, 1]}
        assert first.device == fabric.device
        assert first._forward_module == model
        assert first._original_module == model


def test_a_module_that_is_compiled_after_its_setup_is_set_up_compiled() -> None:
    with single() as fabric:
        module = nn.Linear(1, 1)
        first = fabric.setup(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        compiled = torch.compile(module, backend="eager")
        second, _ = fabric.setup(compiled, optimizer)
        assert fabric.unwrap(second) is module
        assert is_wrapped(second)
        user_module = Methods()
        model = fabric.setup(torch.compile(user_module, backend="eager"))
        assert model.module is user_module
        assert type(second) is type(compiled)
        assert second.dynamo_ctx is compiled.dynamo_ctx
        assert torch.equal(second(torch.ones(1, 1)), first(torch.ones(1, 1)))


def test_clipping_takes_the_users_own_module() -> None:
    with single() as fabric:
        module = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, _ = fabric.setup(module, optimizer)
        module.weight.grad = torch.tensor([[3.0, 4.0]])
        assert fabric.clip_gradients(module, optimizer, max_norm=1.0) == 5
        assert fabric.clip_gradients(model, optimizer, max_norm=2.0) == pytest.approx(1.0)


def clip_without_a_module(fabric: Fabric, name: str) -> tuple[float, float]:
    """Clip the gradients of a module that another Fabric, or none, has set up."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    if name == "None":
        single(strategy=SingleDeviceStrategy()).setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=1.0))
    fabric.backward(module(torch.tensor([[3.0, 4.0]])).sum())
    argument = None if name == "None" else module
    norm = fabric.clip_gradients(argument, optimizer, max_norm=1.0)
    optimizer.step()
    return norm.item(), module.weight[0, 0].item()


@pytest.mark.parametrize("module", ["None", "not set up"])
@pytest.mark.parametrize("precision", [Precision("32-true"), MixedPrecision("16-mixed", "cpu")])
def test_clipping_takes_no_module_or_one_that_is_not_set_up(
    module: str, precision: Precision
) -> None:
    for results in in_ranks(clip_without_a_module, module, plugins=precision):
        assert results == pytest.approx((5.0, 0.4), rel=1e-5)


def test_a_loader_knows_the_device_of_its_batches() -> None:
    with single() as fabric:
        loader = DataLoader([1])
        assert fabric.setup_dataloaders(loader).device == torch.device("cpu")
        assert fabric.setup_dataloaders(loader, move_to_device=False).device is None


def test_a_loader_draws_nothing_before_its_first_batch() -> None:
    with single() as fabric:
        user_loader = DataLoader(range(4), shuffle=True)
        loader = fabric.setup_dataloaders(user_loader)
        assert loader._dataloader is user_loader
        assert _unwrap_objects([loader]) == [user_loader]
        state = torch.get_rng_state()
        batches = iter(loader)
        assert torch.equal(torch.get_rng_state(), state)
        assert sorted(int(batch) for batch in batches) == [0, 1, 2, 3]
        assert not torch.equal(torch.get_rng_state(), state)


class Methods(nn.Module):
    attribute = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def special(self) -> None:
        """Do nothing."""


def test_the_error_for_a_forward_method_is_of_lightnings_type() -> None:
    with single() as fabric:
        model = fabric.setup(Methods())
        with pytest.raises(ValueError, match="forward pass already"):
            model.mark_forward_method("forward")
        for name in ("missing", "attribute"):
            with pytest.raises(AttributeError, match=f"Methods has no method '{name}'"):
                model.mark_forward_method(name)
        with pytest.raises(TypeError, match="neither a method nor a name"):
            model.mark_forward_method(3)
        model.mark_forward_method(model.special)
        assert "special" in model._forward_methods


def test_a_scheduler_may_be_the_third_argument_of_setup() -> None:
    with single() as fabric:
        module = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        results = fabric.setup(module, optimizer, scheduler)
        assert results[1:] == (optimizer, scheduler)


def test_ranks_and_the_device_are_known_before_the_launch(monkeypatch: Any) -> None:
    with Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn") as fabric:
        assert fabric.global_rank == 0
        assert fabric.local_rank == 0
        assert fabric.node_rank == 0
        assert fabric.world_size == 2
        assert fabric.is_global_zero
        assert fabric.device == torch.device("cpu")
        assert fabric.to_device([torch.ones(1)]) == [torch.ones(1)]
        assert fabric.to_device(nn.Linear(1, 1)).weight.device == fabric.device
        with fabric.rank_zero_first(), fabric.autocast(), fabric.init_tensor():
            assert torch.ones(1).device == fabric.device
        for _ in range(2):
            with pytest.raises(TypeError, match="has no function to run"):
                fabric.launch()
    with single() as fabric:
        # These calls connect the process, and launch() then has nothing to do.
        with fabric.rank_zero_first():
            assert fabric.broadcast("sent", src=2) == "sent"
        fabric.launch()
        fabric.launch()
        with pytest.raises(ArgumentTypeError, match=r"fabric.launch\(train, 1, 2\)"):
            fabric.launch(3)


def test_the_variables_of_its_command_fill_in_arguments(monkeypatch: Any) -> None:
    monkeypatch.setenv("LT_ACCELERATOR", "cpu")
    monkeypatch.setenv("LT_PRECISION", "bf16-mixed")
    monkeypatch.setenv("LT_DEVICES", "1")
    with Fabric() as fabric:
        assert fabric.precision.name == "bf16-mixed"
    # Without Lightning's command, the variables take precedence.
    with Fabric(precision="64-true") as fabric:
        assert fabric.precision.name == "bf16-mixed"
    monkeypatch.setenv("LT_CLI_USED", "1")
    with pytest.raises(ValueError, match="LT_PRECISION='bf16-mixed'"):
        Fabric(precision="64-true")


def test_seeding_is_a_static_method_with_a_default(monkeypatch: Any) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "7")
    assert Fabric.seed_everything(verbose=False) == 7
    first = torch.rand(3)
    assert seed_everything(7, workers=True, verbose=False) == 7
    assert torch.equal(torch.rand(3), first)
    with pytest.raises(ValueError, match="seed_everything\\(-1\\)"):
        Fabric.seed_everything(-1)


def test_seeding_without_a_seed_warns_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    with patch.dict(os.environ), isolate_rng():
        os.environ.pop("PL_GLOBAL_SEED", None)
        with pytest.warns(UserWarning, match="No seed found, seed set to 0") as warnings:
            assert seed_everything() == 0
        assert warnings[0].filename == __file__
        assert seed_everything() == 0


def test_random_states_have_the_names_of_lightning() -> None:
    states = _collect_rng_states()
    assert states["torch.cuda"] == [] or torch.cuda.is_initialized()
    first = random.random(), torch.rand(1)
    # Lightning's states have tuples, and none of fabric's own names.
    states["numpy"] = numpy.random.get_state()
    _set_rng_states(states)
    assert (random.random(), torch.rand(1)) == first
    assert _collect_rng_states(include_cuda=False).keys() == {"python", "numpy", "torch"}


@dataclass
class EpochSampler:
    """A sampler that knows its epoch, and the sampler that it takes samples from."""

    sampler: Any = None
    epoch: int = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]])


def test_all_samplers_of_a_loader_are_told_the_epoch() -> None:
    batches = EpochSampler(sampler=EpochSampler())
    loader = DataLoader([1.0], batch_sampler=batches)  # type: ignore[arg-type]
    _set_sampler_epoch(loader, 3)
    assert (batches.epoch, batches.sampler.epoch) == (3, 3)
    _set_sampler_epoch(DataLoader([1.0]), 3)


def test_helpers_of_loaders_and_loggers_say_what_is_wrong(monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    with pytest.warns(UserWarning, match="`DataLoader` returned 0 length") as warnings:
        assert has_len(DataLoader([]))  # type: ignore[arg-type]
    assert warnings[0].filename == __file__
    with pytest.raises(ValueError, match="`local_world_size` should be >= 1, got 0"):
        suggested_max_num_workers(0)
    with pytest.raises(ValueError, match=r"of shape \(3,\) does not contain a single element"):
        convert_tensors_to_scalars({"loss": torch.ones(3)})


def test_hyperparameters_that_can_be_called_become_names_or_results() -> None:
    params = {
        "lr": 0.1,
        "layer": nn.Linear,
        "number": lambda: 3,
        "activation": nn.functional.relu,
        "factory": lambda: nn.functional.relu,
    }
    assert _sanitize_callable_params(params) == {
        "lr": 0.1,
        "layer": "Linear",
        "number": 3,
        "activation": "relu",
        "factory": "<lambda>",
    }


def test_messages_of_rank_0_go_to_the_logger_of_lightning(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    with patch.dict(os.environ), isolate_rng():
        Fabric.seed_everything(7)
        Fabric.seed_everything(7, verbose=False)
    rank_zero_info("%s steps", 3)
    rank_zero_debug("a detail")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    rank_zero_info("on rank 1")
    expected = [("lightning.fabric", logging.INFO, text) for text in ("Seed set to 7", "3 steps")]
    assert caplog.record_tuples == expected


@patch.dict(os.environ)
def orders(fabric: Fabric) -> Any:
    """Return the samples of this rank in two epochs of several loaders."""
    seed_everything(3, verbose=False)
    data = list(range(7))
    weighted = WeightedRandomSampler([1.0] * 7, 7)
    batches = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    loaders = fabric.setup_dataloaders(
        DataLoader(data, shuffle=True),
        DataLoader(data, 2, drop_last=True, shuffle=True),
        DataLoader(data, sampler=weighted),
        DataLoader(data, batch_sampler=batches),
        DataLoader(data, batch_size=None, shuffle=True),
        DataLoader(Streamed()),
    )
    samples: list[Any] = []
    for loader in loaders:
        for _ in range(2):
            samples.append([torch.as_tensor(batch).flatten().tolist() for batch in loader])
    return samples


class Streamed(IterableDataset[int]):
    """A dataset without indices, which shards itself or not at all."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def orders_of_torch(rank: int) -> Any:
    """Return the same samples from torch's own samplers, as Lightning puts them together."""
    data = list(range(7))
    shuffled = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=3)
    sequential = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
    seed_everything(3, verbose=False)
    weighted = WeightedRandomSampler([1.0] * 7, 7)
    samples: list[Any] = []
    for kind in ("single", "batches", "weighted", "sequential", "unbatched"):
        for epoch in range(2):
            shuffled.set_epoch(epoch)
            # A loader draws the seed of its workers at the start of each epoch.
            torch.empty((), dtype=torch.int64).random_()
            match kind:
                case "single" | "unbatched":
                    samples.append([[index] for index in shuffled])
                case "batches":
                    samples.append(list(BatchSampler(shuffled, 2, drop_last=True)))
                case "weighted":
                    order = list(weighted)
                    samples.append([[order[position]] for position in sequential])
                case "sequential":
                    samples.append(list(BatchSampler(sequential, 2, drop_last=False)))
    samples += [[[0], [1], [2]]] * 2
    return samples


@patch.dict(os.environ)
def test_samples_have_the_order_of_torchs_distributed_sampler() -> None:
    expected = [orders_of_torch(rank) for rank in (0, 1)]
    assert in_ranks(orders) == expected


@patch.dict(os.environ)
def test_one_process_of_ddp_has_a_distributed_sampler_and_one_device_has_not() -> None:
    Fabric.seed_everything(3, verbose=False)
    data = list(range(7))
    expected = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=3)
    with single(strategy="ddp") as fabric:
        loader = fabric.setup_dataloaders(DataLoader(data, shuffle=True))
        assert [batch.item() for batch in loader] == list(expected)
    with single() as fabric:
        loader = fabric.setup_dataloaders(DataLoader(data, shuffle=True))
        torch.manual_seed(3)
        order = [batch.item() for batch in loader]
        torch.manual_seed(3)
        assert order == [batch.item() for batch in DataLoader(data, shuffle=True)]
        with pytest.raises(ValueError, match="at least one DataLoader"):
            fabric.setup_dataloaders()
        with pytest.raises(ValueError, match="set up already"):
            fabric.setup_dataloaders(loader)


# The numbers of Lightning 2.6.6 for a worker of rank 3.
@pytest.mark.parametrize(
    ("base_seed", "seeds"),
    [
        (7, [15930687233655344391, 14124977093515297596, 18066071283085120909]),
        (2**62 + 11, [7924749085893437122, 14025884378140020251, 8566619229902299072]),
    ],
)
def test_a_worker_has_the_random_numbers_that_lightning_gives_it(
    base_seed: int, seeds: list[int]
) -> None:
    with isolate_rng():
        torch.manual_seed(base_seed + 1)
        pl_worker_init_function(worker_id=1, rank=3)
        assert torch.initial_seed() == seeds[0]
        drawn = random.random()
        random.seed(seeds[1] << 32 | seeds[2])
        assert random.random() == drawn


@patch.dict(os.environ)
def test_workers_have_random_streams_after_seed_everything_only() -> None:
    loader = DataLoader([1, 2], num_workers=1)
    with single() as fabric:
        for workers in (True, False):
            Fabric.seed_everything(3, workers=workers, verbose=False)
            has_seeds = fabric.setup_dataloaders(loader).worker_init_fn is not None
            assert has_seeds is workers
    assert loader.worker_init_fn is None


def test_ddp_takes_a_process_group() -> None:
    assert DDPStrategy(process_group="a group").ddp_kwargs["process_group"] == "a group"


def test_a_logger_works_in_a_process_that_joins_no_job(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delattr(rank_zero_only, "rank", raising=False)
    with single(loggers=CSVLogger(tmp_path)) as fabric:
        fabric.log("loss", 0.5)
    assert (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").exists()


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_loggers_know_their_folder(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    logger = kind(tmp_path, prefix="a")
    with single(loggers=logger) as fabric:
        assert fabric.logger.name == "lightning_logs"
        assert logger.version == 1
        assert logger.root_dir == str(tmp_path)
        assert logger.log_dir == str(tmp_path / "lightning_logs" / "version_1")
        fabric.log("loss", 0.5, step=2)
        logger.log_hyperparams({"lr": 0.1})
        assert logger.experiment is not None
        logger.save()
    assert any((tmp_path / "lightning_logs" / "version_1").iterdir())


@dataclass
class Schedule:
    warmup: int = 3


@dataclass
class Options:
    lr: float = 0.1
    schedule: Schedule = field(default_factory=Schedule)


@pytest.mark.parametrize("params", [Options(), {"lr": 0.1, "schedule": Schedule()}])
def test_the_hyperparameters_may_be_dataclasses(params: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    CSVLogger(tmp_path, name="csv").log_hyperparams(params)
    text = (tmp_path / "csv" / "version_0" / "hparams.json").read_text()
    assert json.loads(text) == {"lr": 0.1, "schedule": {"warmup": 3}}
    logger = TensorBoardLogger(tmp_path, name="events")
    logger.log_hyperparams(params, {"accuracy": 0.5})
    logger.finalize("success")
    [events] = Path(logger.log_dir).iterdir()
    for text in (b"_hparams_", b"schedule/warmup", b"accuracy"):
        assert text in events.read_bytes()
    assert b"hp_metric" not in events.read_bytes()


def test_hyperparameters_of_tensorboard_may_be_tensors(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    tensors = {"weights": torch.ones(2, 3), "array": numpy.ones(2), "scale": torch.tensor(0.5)}
    logger.log_hyperparams(tensors)
    logger.finalize("success")
    [events] = Path(logger.log_dir).iterdir()
    assert b"tensor([[1., 1., 1.]" in events.read_bytes()


def test_the_options_of_tensorboards_writer_are_those_of_the_logger(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, max_queue=3, filename_suffix=".mine")
    logger.log_hyperparams({"lr": 0.1})
    assert logger.experiment.max_queue == 3
    logger.finalize("success")
    [events] = Path(logger.log_dir).iterdir()
    assert events.name.endswith(".mine")
    assert b"hp_metric" in events.read_bytes()
    with pytest.raises(TypeError, match="max_lines"):
        TensorBoardLogger(tmp_path, max_lines=3).log_metrics({"loss": 0.5})
    with pytest.raises(TypeError, match="max_queue"):
        CSVLogger(tmp_path, max_queue=3)


def test_parameters_without_a_metric_are_a_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    [events] = Path(logger.log_dir).iterdir()
    assert b"hyperparameters" in events.read_bytes()


def test_a_checkpoint_is_removed_with_its_folder_and_may_be_missing(tmp_path: Path) -> None:
    checkpoint_io = TorchCheckpointIO()
    checkpoint_io.save_checkpoint({"step": 3}, tmp_path / "folder" / "checkpoint.pt")
    for path in ("folder/checkpoint.pt", "folder/checkpoint.pt", "folder"):
        checkpoint_io.remove_checkpoint(tmp_path / path)
        assert not (tmp_path / path).exists()


def test_a_checkpoint_may_be_in_an_object_store(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    path = "memory://lightning/run/checkpoint.pt"
    checkpoint_io = TorchCheckpointIO()
    with single(plugins=checkpoint_io) as fabric:
        fabric.save(path, {"step": torch.tensor(3)})
        assert fabric.load(path)["step"] == 3
    assert checkpoint_io.load_checkpoint(path, "meta")["step"].is_meta
    _atomic_save({"step": 4}, path)
    assert checkpoint_io.load_checkpoint(path)["step"] == 4
    for _ in range(2):
        checkpoint_io.remove_checkpoint("memory://lightning/run")
    assert not get_filesystem(path).exists(path)
    # The path is no name of a local folder.
    assert list(tmp_path.iterdir()) == []


def test_entries_of_a_checkpoint_move_to_the_state_of_the_user() -> None:
    module = nn.Linear(1, 1)
    weights = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    content: dict[str, Any] = {"model": weights, "step": 3, "rest": 4}
    state: dict[str, Any] = {"model": module, "step": 0}
    _move_state_into(content, state, keys={"model", "step"})
    assert torch.equal(module.weight, torch.ones(1, 1))
    assert state == {"model": module, "step": 3}
    assert content == {"rest": 4}


def test_a_graph_is_written_for_an_input(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    module = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="there is no input_array"):
        logger.log_graph(module)
    with pytest.warns(UserWarning, match="an input of type dict can't be traced"):
        logger.log_graph(module, {"x": torch.ones(1, 2)})
    with single() as fabric:
        logger.log_graph(fabric.setup(module), torch.ones(1, 2))
    logger.finalize("success")
    [events] = Path(logger.log_dir).iterdir()
    assert b"Linear" in events.read_bytes()


def test_an_experiment_is_that_of_rank_0_before_anything_sets_a_rank(monkeypatch: Any) -> None:
    monkeypatch.delattr(rank_zero_only, "rank", raising=False)
    experiment = rank_zero_experiment(lambda self: 3)
    assert experiment(None) == 3


class KeywordLogger:
    def log_metrics(self, step: int | None, metrics: dict[str, Any]) -> None:
        self.row = (metrics, step)


def test_loggers_get_keywords_and_values_of_every_type(tmp_path: Path) -> None:
    file_logger = CSVLogger(tmp_path)
    with single(loggers=[KeywordLogger(), file_logger]) as fabric:
        fabric.log_dict({"sample": "a, b", "loss": torch.ones(1), "step": 9}, step=4)
        assert fabric.logger.row == ({"sample": "a, b", "loss": 1.0, "step": 9}, 4)
        with pytest.raises(ValueError, match=r"shape \(2,\) does not contain a single"):
            fabric.log("loss", torch.ones(2))
        replacement = KeywordLogger()
        fabric._loggers = [replacement]
        fabric.log("loss", 2)
        assert replacement.row == ({"loss": 2}, None)
        assert fabric.loggers == [replacement]
        with single(loggers=fabric._loggers) as other_fabric:
            assert other_fabric.loggers == [replacement]
    file_logger.save()
    path = Path(file_logger.experiment.metrics_file_path)
    assert path.parent == Path(file_logger.experiment.log_dir)
    assert path.read_text().splitlines() == ["loss,sample,step", '1.0,"a, b",4']


def test_the_loggers_are_a_list_that_scripts_change() -> None:
    with single() as fabric:
        assert fabric._loggers == []
        logger = KeywordLogger()
        fabric.loggers.append(logger)
        fabric.log("loss", 2)
        assert logger.row == ({"loss": 2}, None)
        assert fabric.logger is logger
        assert [*fabric._loggers] == fabric.loggers == [logger]
        with pytest.raises(ArgumentTypeError, match="no method log_metrics"):
            single(loggers=[3])
        del fabric._loggers[0]
        assert not fabric.loggers


def test_the_rows_of_a_csv_logger_are_in_the_file_every_few_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="a", flush_logs_every_n_steps=2)
    with single(loggers=logger) as fabric:
        path = Path(logger.experiment.metrics_file_path)
        fabric.log("loss", 0.5, step=0)
        assert logger.experiment.metrics == [{"a-loss": 0.5, "step": 0}]
        assert not path.exists()
        fabric.log("loss", 0.25)
        assert logger.experiment.metrics == []
        assert path.read_text().splitlines() == ["a-loss,step", "0.5,0", "0.25,1"]
        fabric.log("accuracy", 1, step=2)
    assert path.read_text().splitlines()[::3] == ["a-accuracy,a-loss,step", "1,,2"]


def test_a_filter_of_a_plain_value_has_no_effect(tmp_path: Path) -> None:
    def refuse(name: str, value: Any) -> bool:
        return False

    path = tmp_path / "state.ckpt"
    with single() as fabric:
        state = {"model": nn.Linear(1, 1), "config": {"a": 1}, "step": 3}
        fabric.save(path, state, dict.fromkeys(state, refuse))
        content = torch.load(path)
        assert not content["model"]
        assert not content["config"]
        assert content["step"] == 3
        with pytest.raises(TypeError, match="it is not a dict"):
            fabric.save(path, state, filter="model")
        with pytest.raises(TypeError, match="it is not a function"):
            fabric.save(path, state, filter={"model": "weight"})
        with pytest.raises(ValueError, match="no such entry"):
            fabric.save(path, state, filter={"modle": refuse})


class Buffer(list[int]):
    """A list with its own class, as of a replay buffer, which only pickle can rebuild."""

    name = ""


@pytest.mark.parametrize("options", [{}, {"plugins": TorchCheckpointIO()}])
def test_objects_that_need_pickle_are_saved_and_load_only_with_weights_only_false(
    options: dict[str, Any], tmp_path: Path, capfd: Any
) -> None:
    path = tmp_path / "checkpoint.pt"
    buffer = Buffer([1, 2])
    buffer.name = "first"
    module = nn.Linear(1, 1)
    print_once.__wrapped__.cache_clear()
    with single(**options) as fabric:
        model = fabric.setup(module)
        fabric.save(path, {"model": model, "step": 3})
        assert "pickle" not in capfd.readouterr().err
        state: dict[str, Any] = {"model": model, "buffer": buffer, "array": numpy.ones(2)}
        fabric.save(path, state)
        fabric.save(path, state)
        assert capfd.readouterr().err.count("loads with weights_only=False only") == 1
        # As in Lightning, no code of the file runs unless the user asks for it.
        for weights_only in ({}, {"weights_only": None}, {"weights_only": True}):
            with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
                fabric.load(path, **weights_only)
        content = fabric.load(path, weights_only=False)
        assert (type(content["buffer"]), content["buffer"], content["buffer"].name) == (
            Buffer,
            [1, 2],
            "first",
        )
        weight = module.weight.detach().clone()
        nn.init.zeros_(module.weight)
        state.update(buffer=Buffer(), array=None)
        fabric.load(path, state, weights_only=False)
        assert torch.equal(module.weight, weight)
        assert state["buffer"].name == "first"
        assert state["array"].tolist() == [1, 1]


def test_a_format_of_the_user_reads_code_as_it_likes(tmp_path: Path) -> None:
    class OldFormat(TorchCheckpointIO):
        """A format from the time when load_checkpoint() had no argument ``weights_only``."""

        def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:  # type: ignore[override]
            return torch.load(path, map_location, weights_only=False)

    path = tmp_path / "checkpoint.pt"
    with single(plugins=OldFormat()) as fabric:
        fabric.save(path, {"buffer": Buffer([1, 2])})
        for options in ({}, {"weights_only": False}):
            assert type(fabric.load(path, **options)["buffer"]) is Buffer


def test_a_file_is_loaded_to_a_device(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint_io = TorchCheckpointIO()
    checkpoint_io.save_checkpoint({"weight": torch.ones(2), "array": numpy.ones(2)}, path)
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        checkpoint_io.load_checkpoint(path, "meta")
    content = checkpoint_io.load_checkpoint(path, "meta", weights_only=False)
    assert content["weight"].device.type == "meta"
    content = checkpoint_io.load_checkpoint(path, weights_only=False)
    assert content["weight"].device.type == "cpu"


def test_a_tensor_without_values_is_refused_beside_objects_that_need_pickle(tmp_path: Path) -> None:
    state = {"entry": [numpy.ones(2), torch.ones(2, device="meta")]}
    with single() as fabric, pytest.raises(ArgumentTypeError, match="meta device"):
        fabric.save(tmp_path / "checkpoint.pt", state)
    assert not list(tmp_path.iterdir())


def test_a_save_of_an_object_that_pickle_refuses_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with single() as fabric:
        fabric.save(path, {"step": 3})
        with pytest.raises(Exception, match="lambda"):
            fabric.save(path, {"step": 4, "function": lambda: None})
        assert fabric.load(path)["step"] == 3


def test_the_path_of_a_checkpoint_may_have_variables_and_a_tilde(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "runs")
    (tmp_path / "runs").mkdir()
    module = nn.Linear(1, 1)
    with single() as fabric:
        fabric.save("~/$RUNS/checkpoint.pt", {"step": 3})
        fabric.save("~/$RUNS/model.pt", module.state_dict())
        assert (tmp_path / "runs" / "checkpoint.pt").exists()
        assert fabric.load("~/${RUNS}/checkpoint.pt")["step"] == 3
        fabric.load_raw("~/$RUNS/model.pt", module)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_folder_of_a_logger_may_have_variables_and_a_tilde(
    kind: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "runs")
    (tmp_path / "runs" / "a" / "version_3").mkdir(parents=True)
    logger = kind("~/$RUNS", name="a", sub_dir="b")
    assert logger.root_dir == "~/$RUNS"
    assert logger.log_dir == str(tmp_path / "runs" / "a" / "version_4" / "b")
    assert logger.sub_dir == "b"


def test_an_experiment_of_another_rank_does_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    assert rank_zero_experiment(lambda self: 1 / 0)(None).add_image("x", 1) is not None


def test_throughput_is_that_of_a_full_window() -> None:
    throughput = Throughput(available_flops=100, world_size=2, window_size=3)
    for step in range(1, 5):
        throughput.update(
            time=2.0 * step, batches=step, samples=8 * step, lengths=16 * step, flops=20
        )
    actual = throughput.compute()
    assert actual["time"] == 8.0
    assert actual["device/samples_per_sec"] == 4.0
    assert actual["samples_per_sec"] == 8.0
    assert actual["device/items_per_sec"] == 8.0
    assert actual["device/flops_per_sec"] == 10.0
    assert actual["device/mfu"] == 0.1
    with pytest.raises(ValueError, match="total"):
        throughput.update(time=1.0, batches=5, samples=50)
    with torch.device("meta"):
        model = nn.Linear(4, 8)
    assert measure_flops(model, lambda: model(torch.ones(2, 4, device="meta"))) == 2 * 2 * 4 * 8
    with single(loggers=[]) as fabric:
        assert ThroughputMonitor(fabric, window_size=2).world_size == 1


def test_an_attribute_dictionary_reads_and_writes_its_entries() -> None:
    state = AttributeDict(step=1)
    state.step += 1
    assert state == {"step": 2}
    with pytest.raises(AttributeError, match="'AttributeDict' object has no attribute 'loss'"):
        _ = state.loss


def batch_of_spike(fabric: Fabric, losses: list[float]) -> int | None:
    """Return the number of the batch at which the callbacks end the run."""
    for index, loss in enumerate(losses):
        try:
            fabric.call(
                "on_train_batch_end",
                fabric=fabric,
                loss=torch.tensor(loss),
                batch=None,
                batch_idx=index,
            )
        except TrainingSpikeException:
            return index
    return None


@pytest.mark.parametrize(
    ("options", "losses", "spike"),
    [
        ({}, [1.0, 0.9, 5.0], 2),
        ({}, [1.0, 0.9, 2.5], None),
        ({}, [1.0, 0.9, float("nan")], 2),
        ({}, [1.0, 0.9, float("-inf")], 2),
        ({"finite_only": False}, [1.0, float("nan"), float("-inf"), 0.9, float("inf")], 4),
        ({"mode": "max"}, [1.0, 9.0, -20.0], 2),
        ({"warmup": 3}, [1.0, 9.0, 90.0, 900.0], 3),
        ({"atol": 10.0}, [1.0, 5.0, 20.0], 2),
        ({"rtol": None, "atol": 1.0}, [1.0, 1.5, 2.5], 2),
        ({"window": 1}, [1.0, 2.5, 7.0], None),
    ],
)
def test_a_loss_that_jumps_ends_the_run(
    options: Any, losses: list[float], spike: int | None, tmp_path: Path
) -> None:
    callback = SpikeDetection(exclude_batches_path=tmp_path / "new", **options)
    with single(callbacks=[callback]) as fabric:
        assert batch_of_spike(fabric, losses) == spike
    file = tmp_path / "new" / "skip_batches.json"
    if spike is None:
        assert not file.exists()
    else:
        assert json.loads(file.read_text()) == [spike - 1, spike]
    copied = SpikeDetection()
    copied.load_state_dict(callback.state_dict())
    assert copied.state_dict() == callback.state_dict()


def spike_on_the_second_rank(fabric: Fabric) -> int | None:
    last_loss = 9.0 if fabric.global_rank == 1 else 0.8
    return batch_of_spike(fabric, [1.0, 0.9, last_loss])


def test_a_loss_that_jumps_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    callback = SpikeDetection(exclude_batches_path=tmp_path / "bad.json")
    assert in_ranks(spike_on_the_second_rank, callbacks=[callback]) == [2, 2]
    assert json.loads((tmp_path / "bad.json").read_text()) == [1, 2]
    with pytest.raises(ValueError, match="mode='low': expected 'min' or 'max'"):
        SpikeDetection(mode="low")  # type: ignore[arg-type]


def shared_paths(fabric: Fabric, folder: Path) -> list[bool]:
    own_folder = folder / str(fabric.global_rank)
    own_folder.mkdir()
    paths = [None, folder, folder / "file", own_folder, "s3://bucket/data"]
    shared = [is_shared_filesystem(fabric.strategy, path) for path in paths]
    with pytest.raises(FileNotFoundError, match="absent: create it on every node first"):
        is_shared_filesystem(fabric.strategy, folder / "absent")
    # Rank 0 alone tries to create a file.
    with pytest.raises(OSError, match="Unable to determine if /proc is shared: the first rank"):
        is_shared_filesystem(fabric.strategy, "/proc")
    return shared


def test_paths_that_all_ranks_see_are_shared(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert in_ranks(shared_paths, tmp_path) == [[True, True, True, False, True]] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"file", "0", "1"}
    assert is_shared_filesystem(SingleDeviceStrategy("cpu"), tmp_path / "absent")
