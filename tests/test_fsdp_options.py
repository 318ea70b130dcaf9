"""The options of FSDP, each on real processes where it changes what they do."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)

from fabric import Fabric
from fabric._plan import resolve_plan
from fabric._torch import local_tensor
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError
from fabric.strategies import FSDPStrategy
from tests.loops import Block, Record, Transformer, assert_same, fabric_loop, plain_loop
from tests.ranks import outcome, remedy
from tests.test_fsdp import full_parameters, in_ranks

# Another spelling of an option that another case has.
SOAK = [pytest.mark.slow, pytest.mark.soak]


def is_linear_or_norm(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.LayerNorm)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "device_mesh": (3,)}),
        (2, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)}),
        pytest.param(2, {"sharding_strategy": "HYBRID_SHARD"}, marks=SOAK),
        pytest.param(2, {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}, marks=SOAK),
        (
            2,
            {
                "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
                "auto_wrap_policy": is_linear_or_norm,
            },
        ),
        pytest.param(
            2, {"backward_prefetch": 2, "auto_wrap_policy": {Block, nn.LayerNorm}}, marks=SOAK
        ),
        (2, {"auto_wrap_policy": 200, "activation_checkpointing": nn.LayerNorm}),
        pytest.param(2, {"activation_checkpointing": [Block]}, marks=SOAK),
        (2, {"activation_checkpointing": Block, "sharding_strategy": "SHARD_GRAD_OP"}),
        (2, {"reshard_after_forward": True}),
        (2, {"cpu_offload": True}),
    ],
)
def test_no_option_changes_the_numbers(ranks: int, options: dict[str, Any]) -> None:
    # Three micro-batches for a step.
    expected = plain_loop(torch.float64, None, False, 3)
    records: list[Record] = in_ranks(
        fabric_loop, torch.float64, 3, ranks=ranks, precision="64-true", **options
    )
    for record in records:
        assert_same(record, expected, 1e-10)


def timeouts_of_groups(fabric: Fabric) -> set[timedelta]:
    fabric.setup(nn.Linear(4, 4))
    groups = fabric.strategy.runtime.mesh(replicas=2, shards=2).get_all_groups()
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_groups_of_a_hybrid_strategy_have_the_timeout_of_the_job() -> None:
    timeout = timedelta(seconds=77)
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "timeout": timeout}
    assert in_ranks(timeouts_of_groups, ranks=4, **options) == [{timeout}] * 4


def test_a_group_that_the_user_has_made_keeps_its_timeout() -> None:
    timeout = timedelta(hours=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
            fabric.setup(nn.Linear(2, 2))
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timeout
    finally:
        dist.destroy_process_group()


def test_ignored_parameters_are_replicated_and_trained() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with one_process(ignored_params={net[0].weight}) as fabric:
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = fabric.setup(net, optimizer)
        before = full_parameters(model)
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)
        optimizer.step()
        assert local_tensor(net[0].weight).shape == (4, 4)
        assert net[0].weight.placements != net[1].weight.placements
        for parameter, parameter_before in zip(full_parameters(model), before, strict=True):
            assert (parameter != parameter_before).any()


def test_ignored_parameters_of_another_model_are_warned_of() -> None:
    ignored = {nn.Parameter(torch.ones(2, 2))}
    text = r"Linear: none of ignored_params is a parameter of it.*launch\(train, model\)"
    with pytest.warns(UserWarning, match=text):
        in_ranks(Fabric.setup_module, nn.Linear(2, 2), ranks=1, ignored_params=ignored)


# -- precision -------------------------------------------------------------------------------------


class Dtypes(nn.Module):
    """Records the dtypes that its blocks return, and returns a tensor next to an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("scale", torch.ones(4))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
            self.dtypes.append(x.dtype)
        # FSDP2 casts parameters and inputs. Autocast would multiply in another dtype.
        assert (x.float() @ x.float().T).dtype is F32
        return x, index


def collect_dtypes(fabric: Fabric) -> list[torch.dtype]:
    module = Dtypes()
    model = fabric.setup(module)
    output, index = model(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
    loss = output.float().sum()
    fabric.backward(loss)
    gradient = model.blocks[0].weight.grad
    return [*model.dtypes, output.dtype, index.dtype, gradient.dtype, model.scale.dtype]


F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
INT = torch.int64


@pytest.mark.parametrize(
    ("precision", "mixed_precision", "expected"),
    [
        ("32-true", None, [F32, F32, F32, INT, F32, F32]),
        ("bf16-true", None, [BF16, BF16, BF16, INT, BF16, BF16]),
        ("bf16-mixed", None, [BF16, BF16, F32, INT, F32, F32]),
        ("16-mixed", None, [F16, F16, F32, INT, F32, F32]),
        ("bf16-mixed", MixedPrecisionPolicy(), [F32, F32, F32, INT, F32, F32]),
        (
            "32-true",
            MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F16),
            [BF16, BF16, F16, INT, F32, F32],
        ),
        (
            "32-true",
            MixedPrecision(param_dtype=BF16, buffer_dtype=F16),
            [BF16, BF16, BF16, INT, F32, F16],
        ),
    ],
)
def test_every_tensor_has_the_dtype_of_the_precision(
    precision: str, mixed_precision: Any, expected: list[torch.dtype]
) -> None:
    for dtypes in in_ranks(collect_dtypes, precision=precision, mixed_precision=mixed_precision):
        assert dtypes == expected


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"reshard": True}, ArgumentTypeError, ["reshard=True", "reshard_after_forward"]),
        ({"mp_policy": None}, ArgumentTypeError, ["mp_policy", "strategy decides"]),
        ({"cpu_offload": "yes"}, ArgumentTypeError, ["cpu_offload='yes'", "CPUOffloadPolicy"]),
        ({"backward_prefetch": -1}, ConfigurationError, ["-1", "BACKWARD_PRE"]),
        ({"backward_prefetch": "PRE"}, ConfigurationError, ["'PRE'", "BACKWARD_PRE"]),
        ({"mixed_precision": "bf16"}, ConfigurationError, ["'bf16'", "MixedPrecisionPolicy"]),
        (
            {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
            ConfigurationError,
            ["bf16-true"],
        ),
        ({"activation_checkpointing": "Block"}, ArgumentTypeError, ["'Block'", "a class"]),
        ({"activation_checkpointing": [3]}, ArgumentTypeError, ["[3]"]),
        ({"auto_wrap_policy": "Block"}, ArgumentTypeError, ["'Block'", "a class"]),
        ({"sharding_strategy": "ZERO"}, ConfigurationError, ["'ZERO'", "'SHARD_GRAD_OP'"]),
        (
            {"activation_checkpointing": nn.Linear, "activation_checkpointing_policy": nn.Conv2d},
            ConfigurationError,
            ["Linear", "Conv2d", "names of one option"],
        ),
        ({"state_dict_type": "shards"}, ConfigurationError, ["'shards'", "'sharded' or 'full'"]),
    ],
)
def test_wrong_options_are_refused_at_construction(
    arguments: dict[str, Any], error: type[FabricError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        FSDPStrategy(**arguments)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.expected


@pytest.mark.parametrize("mesh", [(2, 2), (0, 2), (6,), (1, 1, 6)])
def test_a_mesh_that_does_not_divide_the_world_is_refused_before_launch(
    mesh: tuple[int, ...],
) -> None:
    strategy = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    with pytest.raises(ConfigurationError, match="a job of 6 processes") as caught:
        resolve_plan(accelerator="cpu", devices=6, strategy=strategy, env={})
    assert "(3, 2)" in caught.value.expected


def test_a_strategy_without_replicas_takes_a_mesh_of_one_dimension() -> None:
    with pytest.raises(ConfigurationError, match="FULL_SHARD") as caught:
        resolve_plan(
            accelerator="cpu", devices=4, strategy=FSDPStrategy(device_mesh=(2, 2)), env={}
        )
    assert "device_mesh=(4,)" in caught.value.expected


@pytest.mark.parametrize("mesh", [(4.0,), ("4",), (-4,), 4, "4"])
def test_a_mesh_of_something_else_than_numbers_of_processes_is_refused(mesh: Any) -> None:
    strategy = FSDPStrategy(device_mesh=mesh)
    with pytest.raises(ConfigurationError) as caught:
        resolve_plan(accelerator="cpu", devices=4, strategy=strategy, env={})
    assert "device_mesh=(4,)" in caught.value.expected


@pytest.mark.parametrize(
    ("value", "offloads"),
    [
        (True, True),
        (CPUOffload(offload_params=True), True),
        (CPUOffloadPolicy(), True),
        (False, False),
        (None, False),
    ],
)
def test_offloading_can_be_spelled_as_torch_does(value: Any, offloads: bool) -> None:
    policy = FSDPStrategy(cpu_offload=value).cpu_offload
    assert (policy is not None) is offloads


def test_a_hybrid_strategy_without_replicas_warns() -> None:
    with pytest.warns(UserWarning, match=r"device_mesh=\(2, "):
        one_process(sharding_strategy="HYBRID_SHARD").teardown()


def test_options_of_torchs_first_fsdp_warn_once() -> None:
    older = {
        "use_orig_params": True,
        "limit_all_gathers": True,
        "activation_checkpointing_policy": nn.Linear,
    }
    text = (
        "policy is activation_checkpointing; limit_all_gathers means nothing, .*; "
        "use_orig_params means nothing,"
    )
    with pytest.warns(UserWarning, match=text) as caught, one_process(**older) as fabric:
        fabric.setup(nn.Linear(4, 4))
    assert len(caught) == 1
    assert fabric.strategy.activation_checkpointing == (nn.Linear,)


def test_offloading_on_the_cpu_warns() -> None:
    with pytest.warns(UserWarning, match="cpu_offload means nothing on the CPU"):
        one_process(cpu_offload=True).teardown()


def strided() -> nn.Module:
    module: Any = nn.Sequential(nn.Conv2d(3, 4, 3))
    return module.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("options", "make", "words"),
    [
        ({"activation_checkpointing": nn.Conv2d}, Transformer, ["Conv2d", "Block"]),
        ({"auto_wrap_policy": {nn.Conv2d}}, Transformer, ["Conv2d", "Block"]),
        ({}, strided, ["0.weight", "channels_last"]),
    ],
)
def test_a_model_that_does_not_fit_the_options_is_refused(
    options: dict[str, Any], make: Callable[[], nn.Module], words: list[str]
) -> None:
    with one_process(**options) as fabric:
        text = outcome(lambda: fabric.setup(make()))
    assert text.startswith("ConfigurationError")
    for word in words:
        assert word in text


def transposed() -> nn.Module:
    module = nn.Linear(4, 2)
    module.weight = nn.Parameter(torch.ones(4, 2).t())
    return module


def expanded() -> nn.Module:
    module = nn.Linear(4, 2)
    module.bias = nn.Parameter(torch.ones(1).expand(2))
    return module


@pytest.mark.parametrize("make", [strided, transposed, expanded])
def test_the_remedy_for_parameters_that_are_not_contiguous_works(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    with one_process() as fabric:
        text = outcome(lambda: fabric.setup(model))
        exec(remedy(text), {"model": model})
        assert outcome(lambda: fabric.setup(model)) == "fine"


def one_process(**options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FSDPStrategy(**options))
    fabric.launch()
    return fabric
