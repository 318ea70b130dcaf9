"""Strategies, alone and by name, behave as in Lightning Fabric."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from fabric.errors import ConfigurationError, UnsafeCheckpointError, UsageError
from fabric_compat import Fabric
from fabric_compat.accelerators import ACCELERATOR_REGISTRY, CPUAccelerator
from fabric_compat.plugins import (
    FSDPPrecision,
    LightningEnvironment,
    TorchCheckpointIO,
    TorchElasticEnvironment,
    precision_object,
)
from fabric_compat.strategies import (
    STRATEGY_REGISTRY,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    _Sharded,
)
from tests.ranks import SharedRanks


def test_a_strategy_that_is_not_started_is_the_only_rank() -> None:
    strategy = SingleDeviceStrategy()
    assert strategy.root_device == torch.device("cpu")
    for unstarted in (strategy, DDPStrategy(), FSDPStrategy()):
        assert unstarted.global_rank == 0
        assert unstarted.world_size == 1
        assert unstarted.is_global_zero
    tensor = torch.ones(2)
    assert strategy.all_gather(tensor) is tensor
    assert strategy.all_reduce(tensor, reduce_op="sum") is tensor


def test_a_strategy_reads_its_rank_from_an_environment_of_lightning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"cluster_environment": LightningEnvironment()}
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], **options)
    strategy.setup_environment()
    assert (strategy.global_rank, strategy.world_size) == (0, 1)
    strategy.teardown()
    # Before the launch, collectives return what they are given.
    with Fabric(accelerator="cpu", devices=2, strategy="ddp") as fabric:
        assert fabric.strategy.broadcast(3) == 3
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), num_nodes=2)
    with pytest.raises(UsageError, match="has not been started"):
        _ = strategy.runtime
    world = strategy._standalone_runtime().world
    assert (world.rank, world.node_rank, world.world_size, world.local_world_size) == (3, 1, 4, 2)


@pytest.mark.parametrize("name", ["16-true", "bf16-true", "64-true"])
def test_tensors_that_a_strategy_makes_have_its_precision(name: str) -> None:
    precision = precision_object(name)
    with SingleDeviceStrategy(precision=precision).tensor_init_context():
        assert torch.ones(1).dtype == precision.param_dtype
        assert torch.ones(1, dtype=torch.float32).dtype == torch.float32
    assert torch.ones(1).dtype == torch.float32


def test_only_strategies_that_shard_are_sharded() -> None:
    assert isinstance(FSDPStrategy(), _Sharded)
    assert not isinstance(DDPStrategy(), _Sharded)


def ranks_of(strategy: Any) -> Any:
    """Return what a strategy and its environment say about this process."""
    environment = strategy.cluster_environment
    return (
        (strategy.global_rank, strategy.local_rank, strategy.node_rank),
        (environment.global_rank(), environment.world_size()),
        (strategy.world_size, strategy.num_processes, strategy.root_device.type),
        strategy.distributed_sampler_kwargs,
    )


def ranks_of_launched(fabric: Fabric) -> Any:
    return ranks_of(fabric.strategy)


def test_a_strategy_knows_its_processes_before_and_after_the_launch() -> None:
    environment = LightningEnvironment()
    for strategy in ("ddp", DDPStrategy(cluster_environment=environment)):
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
        with Fabric(**options, launcher=SharedRanks()) as fabric:
            expected = []
            for rank in (0, 1):
                shares = {"num_replicas": 2, "rank": rank}
                expected.append(((rank, rank, 0), (rank, 2), (2, 2, "cpu"), shares))
            assert ranks_of(fabric.strategy) == expected[0]
            assert isinstance(fabric.strategy.cluster_environment, LightningEnvironment)
            assert fabric.launch(ranks_of_launched, return_all=True) == expected
    assert fabric.strategy.cluster_environment is environment
    with Fabric(accelerator="cpu", devices=1, strategy="ddp") as fabric:
        assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    with Fabric(accelerator="cpu", devices=1) as fabric:
        assert fabric.strategy.distributed_sampler_kwargs is None


def test_the_share_of_a_rank_of_a_mesh_is_not_known_before_the_launch() -> None:
    strategy = ModelParallelStrategy(lambda model, _: model)
    Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(UsageError, match="before the launch"):
        _ = strategy.distributed_sampler_kwargs


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("32-true", torch.float32),
        ("16-mixed", torch.float16),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
    ],
)
def test_the_precision_of_fsdp_has_a_configuration_for_the_strategy(
    name: str, dtype: torch.dtype
) -> None:
    config = FSDPPrecision(name).mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (dtype, dtype, dtype)
    policy = FSDPStrategy(mixed_precision=config).mixed_precision
    assert policy is not None
    assert policy.param_dtype == dtype


def test_the_precision_of_fsdp_has_a_scaler_if_it_scales_the_loss() -> None:
    precision = FSDPPrecision("16-mixed")
    scaler = precision.scaler
    assert scaler is precision.scaler
    assert scaler is not None
    assert precision.loss_scale is not None
    assert scaler._init_scale == precision.loss_scale.init_scale
    assert FSDPPrecision("bf16-mixed").scaler is None


def test_the_precision_of_fsdp_refuses_what_lightning_refuses() -> None:
    with pytest.raises(ValueError, match="64-true"):
        FSDPPrecision("64-true")
    with pytest.raises(ValueError, match="MixedPrecision"):
        FSDPPrecision("16-mixed", scaler=object())


def test_a_strategy_alone_sets_up_saves_and_loads(tmp_path: Path) -> None:
    strategy = SingleDeviceStrategy("cpu")
    module = nn.Linear(2, 1)
    expected = module.weight.detach().clone()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    prepared, optimizers, scheduler = strategy.setup_module_and_optimizers(module, [optimizer])
    assert prepared is module
    assert optimizers == [strategy.setup_optimizer(optimizer)]
    assert scheduler is None
    path = tmp_path / "checkpoint.pt"
    state = {"model": module, "optimizer": optimizer, "step": 3}
    strategy.save_checkpoint(path, state)
    with torch.no_grad():
        module.weight.zero_()
    optimizer.param_groups[0]["lr"] = 0.1
    state["step"] = 0
    assert strategy.load_checkpoint(path, state) == {}
    assert torch.equal(module.weight, expected)
    assert strategy.get_optimizer_state(optimizer)["param_groups"][0]["lr"] == 0.5
    assert state["step"] == 3

    weights = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, weights)
    assert strategy.load_checkpoint(weights, module) == {}
    assert torch.equal(module.weight, torch.ones(1, 2))
    with pytest.raises(TypeError, match="CheckpointIO of your own"):
        strategy.save_checkpoint(path, state, storage_options={"mode": "w"})


def test_a_strategy_alone_saves_objects_that_need_pickle(tmp_path: Path) -> None:
    strategy = SingleDeviceStrategy()
    path = tmp_path / "checkpoint.pt"
    strategy.save_checkpoint(path, {"numbers": numpy.ones(2)})
    with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
        strategy.load_checkpoint(path)
    content = strategy.load_checkpoint(path, weights_only=False)
    assert content["numbers"].tolist() == [1, 1]


@pytest.mark.parametrize("strategy_class", [FSDPStrategy, ModelParallelStrategy])
def test_a_strategy_alone_refuses_a_module_without_values(strategy_class: Any) -> None:
    strategy = strategy_class(parallel_devices=[torch.device("cpu")])
    with torch.device("meta"):
        module = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="it has not been started"):
        strategy.setup_module(module)
    strategy.setup_environment()
    with pytest.raises(ConfigurationError, match="being on meta: weight, bias"):
        strategy.setup_module(module)
    assert strategy.setup_module(nn.Linear(2, 1))(torch.ones(1, 2)).shape == (1, 1)
    strategy.teardown()


class RecordingIO(TorchCheckpointIO):
    """A format of the user that takes options, and keeps those of the last save."""

    options: Any = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.options = storage_options
        super().save_checkpoint(checkpoint, path)


def test_a_format_of_the_user_gets_the_storage_options(tmp_path: Path) -> None:
    checkpoint_io = RecordingIO()
    strategy = SingleDeviceStrategy("cpu", checkpoint_io=checkpoint_io)
    strategy.save_checkpoint(tmp_path / "a.pt", {"step": 3}, storage_options={"mode": "w"})
    assert checkpoint_io.options == {"mode": "w"}
    strategy.save_checkpoint(tmp_path / "b.pt", {"step": 4})
    assert checkpoint_io.options is None
    assert strategy.load_checkpoint(tmp_path / "a.pt")["step"] == 3
    # Objects of fabric that keep the last checkpoints call this method.
    checkpoint_io.remove(tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


def test_a_strategy_clips_the_gradients_of_an_optimizer() -> None:
    module = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    for strategy in (SingleDeviceStrategy(), DDPStrategy()):
        norm = strategy.clip_gradients_norm(module, optimizer, max_norm=1)
    assert norm.item() == pytest.approx(1.0)
    assert torch.allclose(module.weight.grad, torch.tensor([[0.6, 0.8]]))
    SingleDeviceStrategy().clip_gradients_value(module, optimizer, clip_val=0.7)
    assert torch.allclose(module.weight.grad, torch.tensor([[0.6, 0.7]]))
    # The gradients may be those of a scaled loss.
    for precision in ("16-mixed", "bf16-mixed"):
        # A plugin, because the name would stand for bfloat16 on the CPU.
        plugin = precision_object(precision)
        with Fabric(accelerator="cpu", devices=1, plugins=plugin) as fabric:
            assert isinstance(fabric.strategy, SingleDeviceStrategy)
            if precision == "bf16-mixed":
                fabric.strategy.clip_gradients_value(module, optimizer, clip_val=0.5)
                continue
            with pytest.raises(UsageError, match=r"fabric\.clip_gradients"):
                fabric.strategy.clip_gradients_value(module, optimizer, clip_val=0.5)
    assert torch.equal(module.weight.grad, torch.tensor([[0.5, 0.5]]))


def test_a_strategy_names_the_backend_of_its_processes() -> None:
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        devices = [torch.device(device, 0)]
        assert DDPStrategy(parallel_devices=devices)._get_process_group_backend() == backend
    named = FSDPStrategy(process_group_backend="mpi")
    assert named._get_process_group_backend() == "mpi"


def test_the_sharding_strategy_is_the_enumeration_of_torch() -> None:
    for name in ("FULL_SHARD", ShardingStrategy.FULL_SHARD):
        assert FSDPStrategy(sharding_strategy=name).sharding_strategy is ShardingStrategy.FULL_SHARD


def test_the_options_of_fsdp_are_those_of_the_first_fsdp() -> None:
    assert FSDPStrategy().cpu_offload == CPUOffload(offload_params=False)
    assert FSDPStrategy(cpu_offload=True).cpu_offload.offload_params
    half = MixedPrecision(param_dtype=torch.float16)
    assert FSDPStrategy(mixed_precision=half).mixed_precision_config is half
    for precision, dtype in (("bf16-mixed", torch.bfloat16), (None, torch.float32)):
        config = FSDPStrategy(precision=precision).mixed_precision_config
        assert config is not None
        assert config.reduce_dtype == dtype
    assert FSDPStrategy(precision="64-true").mixed_precision_config is None
    # The strategy of a name has the options, too.
    with Fabric(
        accelerator="cpu", devices=1, strategy="fsdp_cpu_offload", precision="16-true"
    ) as fabric:
        assert isinstance(fabric.strategy, FSDPStrategy)
        assert fabric.strategy.cpu_offload.offload_params
        config = fabric.strategy.mixed_precision_config
        assert config is not None
        assert config.param_dtype == torch.float16


def test_a_hybrid_strategy_may_keep_its_parameters_after_the_forward_pass() -> None:
    for name in ("_HYBRID_SHARD_ZERO2", ShardingStrategy._HYBRID_SHARD_ZERO2):
        strategy = FSDPStrategy(sharding_strategy=name, device_mesh=(1, 2))
        assert strategy.sharding_strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
        assert strategy.fsdp_kwargs["reshard_after_forward"] is False
    strategy = FSDPStrategy(sharding_strategy="HYBRID_SHARD")
    assert strategy.sharding_strategy is ShardingStrategy.HYBRID_SHARD


def test_arguments_of_strategies_are_in_the_order_of_lightning() -> None:
    names = list(signature(FSDPStrategy).parameters)
    assert names[3:8] == [
        "precision",
        "process_group_backend",
        "timeout",
        "cpu_offload",
        "mixed_precision",
    ]
    assert "device_mesh" in names
    devices = [torch.device("cpu")]
    sharding = FSDPStrategy("cpu", devices, LightningEnvironment(), "bf16-true")
    assert sharding.precision is not None
    assert sharding.precision.name == "bf16-true"
    replicating = DDPStrategy("cpu", devices, LightningEnvironment(), None, "bf16-true", "gloo")
    assert replicating.process_group_backend == "gloo"


class Scale(nn.Module):
    """A module whose parameter nothing but a checkpoint fills."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.scale)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.scale


def build() -> nn.Module:
    """Return a model with small and large, tied and constant parameters."""
    # The parameters of the last two layers are more than 64 KB.
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 5000),
        nn.Linear(4, 5000, bias=False),
        Scale(),
    )
    model[3].weight = model[2].weight
    return model


def parameters_after_setup(fabric: Fabric) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with fabric.init_module(empty_init=True):
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    if isinstance(fabric.strategy, ModelParallelStrategy):
        mesh = fabric.strategy.device_mesh
        assert mesh is not None
        assert mesh["tensor_parallel"].get_local_rank() == fabric.global_rank
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    return fabric.get_state_dict(model)


@pytest.mark.parametrize(
    "strategy", [FSDPStrategy(), ModelParallelStrategy(lambda model, _: model)]
)
def test_an_empty_module_gets_the_values_of_its_reset_parameters(strategy: Any) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    with Fabric(**options, launcher=SharedRanks()) as fabric:
        actual = fabric.launch(parameters_after_setup)
    # In the order of the modules, as Lightning calls the methods.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = build()
        torch.manual_seed(0)
        for module in expected:
            if not isinstance(module, Scale):
                module.reset_parameters()
    for name, parameter in expected.named_parameters():
        if name != "4.scale":
            assert torch.equal(actual[name], parameter), name
    assert torch.equal(actual["2.weight"], actual["3.weight"])
    assert actual["4.scale"].isnan().all()


def split(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def build_pair(fabric: Fabric) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    return fabric.get_state_dict(fabric.setup(model))


def test_an_empty_module_with_split_layers_gets_the_values_of_a_plain_build() -> None:
    strategy = ModelParallelStrategy(split, tensor_parallel_size=2)
    with Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher=SharedRanks()) as fabric:
        actual = fabric.launch(build_pair)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for name, parameter in expected.named_parameters():
        assert torch.equal(actual[name], parameter), name


def test_a_strategy_of_the_user_keeps_its_class() -> None:
    user_class = type("DDPStrategy", (DDPStrategy,), {})
    with Fabric(accelerator="cpu", devices=2, strategy=user_class()) as fabric:
        assert type(fabric.strategy) is user_class


def test_a_strategy_of_the_user_has_no_method_that_nothing_calls() -> None:
    for name in ("backward", "optimizer_step", "save_checkpoint"):
        user_class = type("MyStrategy", (DDPStrategy,), {name: print})
        with pytest.raises(ConfigurationError, match=rf"defines {name}\(\)"):
            Fabric(accelerator="cpu", devices=2, strategy=user_class())


def test_registries_hold_strategies_and_accelerators_of_fabric_and_of_the_user() -> None:
    @ACCELERATOR_REGISTRY.register("mine", description="as the CPU")
    class Mine(CPUAccelerator):
        """An accelerator with a name of the user."""

    STRATEGY_REGISTRY.register("mine", DDPStrategy, start_method="spawn")
    try:
        with Fabric(accelerator="mine", devices=2, strategy="mine") as fabric:
            assert fabric.strategy.start_method == "spawn"
            assert isinstance(fabric.accelerator, Mine)
        with pytest.raises(ValueError, match="override=True"):
            STRATEGY_REGISTRY.register("mine", DDPStrategy)
    finally:
        STRATEGY_REGISTRY.remove("mine")
        ACCELERATOR_REGISTRY.remove("mine")
    assert "mine" not in STRATEGY_REGISTRY.available_strategies()
    assert ACCELERATOR_REGISTRY.available_accelerators() == ["cpu", "cuda", "mps", "tpu"]
    assert {"ddp", "fsdp", "model_parallel"} <= STRATEGY_REGISTRY.keys()
    spawning = STRATEGY_REGISTRY.get("ddp_spawn")
    assert type(spawning) is DDPStrategy
    assert spawning.start_method == "spawn"
    with pytest.raises(KeyError, match="not in the registry"):
        STRATEGY_REGISTRY.get("nothing")
    assert STRATEGY_REGISTRY.get("nothing", 3) == 3
    registry = type(STRATEGY_REGISTRY)()
    assert registry.available_strategies() == []
