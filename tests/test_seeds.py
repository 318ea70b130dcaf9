"""The constructors, members and behavior that older toolkits document for their strategies."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.environments import SlurmEnvironment
from fabric.errors import ConfigurationError, UsageError
from fabric.legacy import DDPFullyShardedNativeStrategy, DDPSpawnPlugin
from fabric.strategies import DataParallelStrategy, DDPStrategy, ParallelStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*older name:DeprecationWarning"),
]

CPU = torch.device("cpu")


class Minimal(ParallelStrategy):
    """A strategy that overrides only the abstract members."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module

    @property
    def root_device(self) -> torch.device:
        return CPU


# -- signatures ------------------------------------------------------------------------------------


class Seed(NamedTuple):
    """A documented class: the constructor's arguments, the members with theirs, the properties."""

    constructor: str
    members: dict[str, str]
    properties: tuple[str, ...] = ("root_device",)


SHARED = (
    "accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None, "
    "precision_plugin=None"
)
HOOKS = "ddp_comm_state=None, ddp_comm_hook=None, ddp_comm_wrapper=None"
REDUCE = "tensor, group=None, reduce_op='mean'"
SEEDS: Mapping[Any, Seed] = {
    DataParallelStrategy: Seed(
        "accelerator=None, parallel_devices=None, checkpoint_io=None, precision=None",
        {
            "all_reduce": "collection, group=None, reduce_op='mean'",
            "barrier": "*args, **kwargs",
            "batch_to_device": "batch, device=None",
            "broadcast": "obj, src=0",
            "get_module_state_dict": "module",
            "load_module_state_dict": "module, state_dict, strict=True",
            "module_to_device": "module",
            "reduce_boolean_decision": "decision, all=True",
            "setup_module": "module",
        },
        ("distributed_sampler_kwargs", "root_device"),
    ),
    DDPStrategy: Seed(
        f"{SHARED}, {HOOKS}, model_averaging_period=None, process_group_backend=None, "
        "timeout=datetime.timedelta(seconds=1800), start_method='popen', **kwargs",
        {
            "barrier": "*args, **kwargs",
            "broadcast": "obj, src=0",
            "on_exception": "exception",
            "optimizer_step": "optimizer, closure, model=None, **kwargs",
            "reduce": REDUCE,
            "setup": "trainer",
            "setup_environment": "",
            "teardown": "",
        },
        ("is_distributed", "root_device"),
    ),
    Minimal: Seed(
        SHARED,
        {
            "all_gather": "tensor, group=None, sync_grads=False",
            "block_backward_sync": "",
            "reconciliate_processes": "trace",
            "reduce_boolean_decision": "decision",
            "teardown": "",
        },
        ("is_global_zero", "root_device"),
    ),
    DDPSpawnPlugin: Seed(
        "parallel_devices=None, num_nodes=None, cluster_environment=None, checkpoint_io=None, "
        f"sync_batchnorm=None, {HOOKS}, **kwargs",
        {
            "add_to_queue": "trainer, queue",
            "barrier": "*args, **kwargs",
            "broadcast": "obj, src=0",
            "get_from_queue": "trainer, queue",
            "model_to_device": "",
            "post_dispatch": "trainer",
            "pre_backward": "closure_loss",
            "reduce": REDUCE,
            "setup": "",
            "spawn": "function, *args, return_result=True, **kwargs",
            "teardown": "",
        },
    ),
    DDPFullyShardedNativeStrategy: Seed(
        f"{SHARED}, process_group_backend=None, cpu_offload=None, backward_prefetch=None, "
        "mixed_precision=None, activation_checkpointing=None, **kwargs",
        {
            "barrier": "name=None",
            "broadcast": "obj, src=0",
            "model_sharded_context": "",
            "model_to_device": "",
            "predict_step": "*args, **kwargs",
            "reduce": REDUCE,
            "setup": "trainer",
            "setup_environment": "",
            "setup_optimizers": "trainer",
            "teardown": "",
            "test_step": "*args, **kwargs",
            "training_step": "*args, **kwargs",
            "validation_step": "*args, **kwargs",
        },
    ),
}
POLICY = MixedPrecisionPolicy(torch.bfloat16)
HOOK = SimpleNamespace(start_localSGD_iter=1)
SLURM = SlurmEnvironment()
FORMAT = SimpleNamespace(save=None)
# For each argument of a constructor, a value and the strategy's attribute of that name after it.
VALUES: Mapping[str, tuple[Any, Any]] = {
    "accelerator": ("cpu", "cpu"),
    "parallel_devices": ([CPU, CPU], (CPU, CPU)),
    "cluster_environment": (SLURM, SLURM),
    "checkpoint_io": (FORMAT, FORMAT),
    "precision": ("64-true", "64-true"),
    "precision_plugin": (SimpleNamespace(precision=64), "64-true"),
    "ddp_comm_state": (HOOK, HOOK),
    "ddp_comm_hook": (print, print),
    "ddp_comm_wrapper": (repr, repr),
    "model_averaging_period": (3, 3),
    "process_group_backend": ("gloo", "gloo"),
    "timeout": (timedelta(seconds=7), timedelta(seconds=7)),
    "start_method": ("spawn", "spawn"),
    "num_nodes": (2, 2),
    "sync_batchnorm": (True, True),
    "cpu_offload": (False, None),
    "backward_prefetch": (2, 2),
    "mixed_precision": (POLICY, POLICY),
    "activation_checkpointing": (nn.Linear, (nn.Linear,)),
}
BY_KIND = pytest.mark.parametrize("kind", SEEDS, ids=lambda kind: kind.__name__)


def signature(text: str) -> inspect.Signature:
    """Return the signature that a text of this file writes out."""
    names = {"datetime": SimpleNamespace(timedelta=timedelta)}
    return inspect.signature(eval(f"lambda {text}: None", names))  # noqa: S307


def named_arguments(text: str) -> dict[str, Any]:
    """Return the defaults of the arguments that have names."""
    defaults = {}
    for parameter in signature(text).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            defaults[parameter.name] = parameter.default
    return defaults


def attribute(strategy: Any, argument: str) -> Any:
    """Return the attribute of a strategy that holds an argument of its constructor."""
    value = getattr(strategy, argument.removesuffix("_plugin"))
    if argument.startswith("precision"):
        return getattr(value, "name", None)
    return value


@BY_KIND
def test_a_constructor_takes_the_arguments_of_its_text_by_position_and_by_keyword(
    kind: Any,
) -> None:
    defaults = named_arguments(SEEDS[kind].constructor)
    arguments = {name: VALUES[name][0] for name in defaults}
    for strategy in (kind(*arguments.values()), kind(**arguments)):
        for name in arguments:
            assert attribute(strategy, name) == VALUES[name][1], name
    assert vars(kind(*defaults.values())).keys() == vars(kind()).keys()
    parameters = list(inspect.signature(kind).parameters.values())
    documented = parameters[: len(defaults)]
    assert [parameter.default for parameter in documented] == list(defaults.values())
    for parameter in parameters[len(defaults) :]:
        assert parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)


@BY_KIND
def test_a_strategy_has_each_member_of_its_text_with_its_arguments(kind: Any) -> None:
    assert issubclass(kind, ParallelStrategy)
    for name, text in SEEDS[kind].members.items():
        check_member(inspect.signature(getattr(kind, name)), text)
    for name in SEEDS[kind].properties:
        assert isinstance(inspect.getattr_static(kind, name), property), name


def check_member(member: inspect.Signature, text: str) -> None:
    """Check that a method takes the arguments of its text, each by position and by keyword."""
    defaults = named_arguments(text)
    values = {argument: object() for argument in defaults}
    by_position = member.bind(None, *values.values()).arguments
    by_keyword = member.bind(None, **values).arguments
    for argument in values.keys() & member.parameters.keys():
        assert by_position[argument] is values[argument]
        assert by_keyword[argument] is values[argument]
        default = member.parameters[argument].default
        assert defaults[argument] in (inspect.Parameter.empty, default)
    required = []
    for argument, default in defaults.items():
        if default is inspect.Parameter.empty:
            required.append(values[argument])
    member.bind(None, *required)
    if "**" in text:
        positional = list(values.values())
        if "*args" in text:
            positional.append("anything")
        member.bind(None, *positional, something=1)


# -- before the runtime is started -----------------------------------------------------------------


def collectives(strategy: ParallelStrategy) -> list[Any]:
    strategy.barrier("a name", "anything", loop=3)
    return [
        strategy.reduce(torch.tensor(3.0), None, None).item(),
        strategy.all_reduce({"x": torch.tensor(2)}, reduce_op="sum")["x"].item(),
        strategy.broadcast({"of": "anybody"}),
        strategy.reduce_boolean_decision(False, all=False),
    ]


@pytest.mark.parametrize(
    "kind", [DDPStrategy, Minimal, DDPSpawnPlugin, DDPFullyShardedNativeStrategy]
)
def test_before_the_environment_is_set_up_collectives_are_the_identity(kind: Any) -> None:
    assert collectives(kind(parallel_devices=[CPU, CPU])) == [3.0, 2, {"of": "anybody"}, False]
    assert collectives(kind()) == [3.0, 2, {"of": "anybody"}, False]


@pytest.mark.parametrize(
    "kind", [DataParallelStrategy, DDPStrategy, DDPSpawnPlugin, DDPFullyShardedNativeStrategy]
)
def test_before_the_environment_is_set_up_the_root_device_is_one_of_the_parallel_devices(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = kind(parallel_devices=[torch.device("cuda", 3), torch.device("cuda", 1)])
    assert strategy.root_device == torch.device("cuda", 3)
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert strategy.root_device == torch.device("cuda", 1)
    # The job has several processes now, which are not connected yet: no silent identity.
    assert outcome(lambda: strategy.reduce(torch.ones(1))).startswith("UsageError: the runtime of")
    with pytest.raises(UsageError, match="the runtime of"):
        kind().root_device  # noqa: B018


def test_a_process_group_of_the_user_is_not_taken_for_a_single_process() -> None:
    strategy = DDPStrategy(parallel_devices=[CPU])
    assert strategy.reduce(torch.ones(1)).tolist() == [1.0]
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        text = outcome(lambda: strategy.reduce(torch.ones(1)))
    finally:
        torch.distributed.destroy_process_group()
    assert text.startswith("UsageError: the runtime of DDPStrategy")


# -- on 2 processes --------------------------------------------------------------------------------


def trainer_of(net: nn.Module) -> SimpleNamespace:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return SimpleNamespace(model=net, optimizers=[optimizer], callback_metrics={})


def parameters_of(module: nn.Module) -> torch.Tensor:
    parameters = [full_tensor(parameter.detach()) for parameter in module.parameters()]
    return nn.utils.parameters_to_vector(parameters)


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def expected_step() -> torch.Tensor:
    """Return the parameters after one step of the plain loop on the batches of both ranks."""
    net = seeded()
    for rank in range(2):
        (net(batch_of(rank)).pow(2).mean() / 2).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return parameters_of(net)


def shared_members(strategy: Any) -> dict[str, Any]:
    """Return the results of the members that every text has: collectives, rank and device."""
    rank = strategy.global_rank
    strategy.barrier()
    strategy.barrier("a name")
    strategy.barrier(name="a name")
    tensor = torch.tensor([float(rank + 1)])
    return {
        "mean": strategy.reduce(tensor, None, "mean").item(),
        "avg": strategy.reduce(tensor, None, "avg").item(),
        "default": strategy.reduce(tensor, None, None).item(),
        "sum": strategy.reduce(tensor, reduce_op="sum").item(),
        "SUM": strategy.reduce(tensor, reduce_op=torch.distributed.ReduceOp.SUM).item(),
        "unchanged": strategy.reduce("no tensor"),
        "sent by rank 0": strategy.broadcast([rank, torch.ones(1)])[0],
        "sent by rank 1": strategy.broadcast(obj=rank, src=1),
        "device": strategy.root_device,
        "zero": strategy.is_global_zero is (rank == 0),
    }


SHARED_RESULTS = {
    "mean": 1.5,
    "avg": 1.5,
    "default": 1.5,
    "sum": 3.0,
    "SUM": 3.0,
    "unchanged": "no tensor",
    "sent by rank 0": 0,
    "sent by rank 1": 1,
    "device": CPU,
    "zero": True,
}


def ddp_members(fabric: Fabric) -> torch.Tensor:
    """Check the members of DDP, and return the parameters after one step."""
    strategy: Any = fabric.strategy
    assert shared_members(strategy) == SHARED_RESULTS
    net = seeded()
    trainer = trainer_of(net)
    strategy.setup(trainer)
    [optimizer] = trainer.optimizers

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = trainer.model(batch_of(fabric.global_rank)).pow(2).mean()
        loss.backward()
        return loss

    loss = strategy.optimizer_step(optimizer, closure, net)
    assert isinstance(loss, torch.Tensor)
    with strategy.block_backward_sync():
        trainer.model(batch_of(fabric.global_rank)).sum().backward()
    first, second = strategy.all_gather(net.head.weight.grad)
    assert (first != second).any()

    assert "Net is set up already" in outcome(lambda: strategy.setup(trainer_of(net)))
    assert "started already" in outcome(strategy.setup_environment)
    unconnected = DDPStrategy(parallel_devices=[CPU])
    text = outcome(lambda: unconnected.reduce(torch.ones(1)))
    assert text.startswith("UsageError: the runtime of DDPStrategy")
    error = RuntimeError("Parameter indices which did not receive grad for rank 1: 0 1")
    strategy.on_exception(exception=error)
    assert "encoder.weight, encoder.bias" in error.__notes__[0]

    strategy.teardown()
    assert not torch.distributed.is_initialized()
    assert strategy.is_distributed
    assert type(trainer.model).__name__ == "DistributedDataParallel"
    return parameters_of(net)


def test_ddp_does_what_its_text_says_on_two_processes() -> None:
    strategy = DDPStrategy(start_method="forkserver")
    for parameters in run_in_ranks(ddp_members, strategy=strategy):
        torch.testing.assert_close(parameters, expected_step())


def minimal_members(fabric: Fabric) -> None:
    """Check the members of a minimal parallel strategy."""
    strategy: Any = fabric.strategy
    rank = fabric.global_rank
    tensor = torch.tensor([float(rank)], requires_grad=True)
    gathered = strategy.all_gather(tensor, None, True)
    assert gathered.tolist() == [[0.0], [1.0]]
    (gathered * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [3.0]
    assert not strategy.all_gather(tensor).requires_grad

    trainer = trainer_of(seeded())
    strategy.setup(trainer)
    with strategy.block_backward_sync():
        trainer.model(batch_of(0)).sum().backward()
    assert shared_members(strategy) == SHARED_RESULTS
    assert not strategy.reduce_boolean_decision(fabric.is_global_zero)
    assert strategy.reduce_boolean_decision(True)
    assert strategy.is_distributed
    failure = outcome(lambda: strategy.reconciliate_processes("the trace"))
    assert failure.startswith("RankFailedError")
    assert f"rank {rank}" in failure
    assert "the trace" in failure
    # The launcher ends the other ranks. A rank that still waits for this one would hang.
    assert not torch.distributed.is_initialized()


def test_a_minimal_parallel_strategy_does_what_its_text_says_on_two_processes() -> None:
    run_in_ranks(minimal_members, strategy=Minimal(start_method="forkserver"))


class Steps(Net):
    """A module with the steps of older toolkits besides its forward pass."""

    def validation_step(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(x) * scale, "dtype": self.encoder(x.double().to(x.dtype)).dtype}

    def predict_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def native_members(fabric: Fabric) -> torch.Tensor:
    """Check the members of the fully sharded strategy, and return the parameters after one step."""
    strategy: Any = fabric.strategy
    x = batch_of(fabric.global_rank)
    assert shared_members(strategy) == SHARED_RESULTS
    assert "no module is set up" in outcome(lambda: strategy.training_step(x))
    with strategy.model_sharded_context():
        module = seeded_steps()
    fabric.setup_module(module)
    # The step of the module that was set up last.
    loss_of_module = strategy.training_step(x)

    trainer = SimpleNamespace(model=seeded_steps())
    strategy.setup(trainer)
    trainer.optimizers = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    strategy.setup_optimizers(trainer)
    fabric.setup_module(Steps())
    strategy.model_to_device()
    # The step of the trainer's module, although another module was set up later.
    loss = strategy.training_step(x)
    assert loss.item() == loss_of_module.item()
    loss.backward()
    strategy.optimizer_step(trainer.optimizers, None)
    assert strategy.validation_step(x, scale=0.0)["loss"].item() == 0
    assert strategy.predict_step(x).shape == (4, 1)
    assert "has no attribute 'test_step'" in outcome(lambda: strategy.test_step(x))
    parameters = parameters_of(trainer.model)
    strategy.teardown()
    assert not torch.distributed.is_initialized()
    return parameters


def seeded_steps() -> Steps:
    torch.manual_seed(0)
    return Steps()


def test_fully_sharded_does_what_its_text_says_on_two_processes() -> None:
    strategy = DDPFullyShardedNativeStrategy(
        start_method="forkserver", activation_checkpointing=nn.Linear
    )
    for parameters in run_in_ranks(native_members, strategy=strategy):
        torch.testing.assert_close(parameters, expected_step())


OLDER_OPTIONS = {
    "use_orig_params": False,
    "limit_all_gathers": True,
    "sync_module_states": True,
    "forward_prefetch": True,
    "activation_checkpointing_policy": {nn.Linear},
    "sharding_strategy": ShardingStrategy.NO_SHARD,
}


def step_and_warnings(strategy: Any) -> tuple[SimpleNamespace, list[str]]:
    """Return a trainer after one step with a strategy, and what the strategy warns of."""
    trainer = trainer_of(seeded_steps())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.setup_environment()
        strategy.setup(trainer)
        loss = strategy.training_step(batch_of(strategy.global_rank))
    loss.backward()
    strategy.optimizer_step(trainer.optimizers[0], None)
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return trainer, texts


class OlderOptions(NamedTuple):
    """The parameters after one step, and what was warned of."""

    parameters: torch.Tensor
    texts: list[str]
    texts_in_half: list[str]


def take_older_options(fabric: Fabric) -> OlderOptions:
    strategy = DDPFullyShardedNativeStrategy(**OLDER_OPTIONS)
    trainer, texts = step_and_warnings(strategy)
    assert strategy.activation_checkpointing == (nn.Linear,)
    for parameter in trainer.model.parameters():
        assert parameter.to_local().numel() == parameter.numel()

    strategy_in_half: Any = DDPFullyShardedNativeStrategy(precision_plugin=16)
    trainer_in_half, texts_in_half = step_and_warnings(strategy_in_half)
    assert strategy_in_half.validation_step(batch_of(0))["dtype"] is torch.float16
    assert trainer_in_half.model.head.weight.dtype is torch.float32
    return OlderOptions(parameters_of(trainer.model), texts, texts_in_half)


def test_options_of_the_first_fsdp_and_precision_16_are_taken_with_one_warning_each() -> None:
    first, second = run_in_ranks(take_older_options, strategy="fsdp")
    torch.testing.assert_close(first.parameters, expected_step())
    torch.testing.assert_close(second.parameters, expected_step())
    [text] = first.texts
    for name in OLDER_OPTIONS.keys() - {"sharding_strategy"}:
        assert f"{name} " in text
    assert "NO_SHARD " in text
    [text_in_half] = first.texts_in_half
    assert "float16" in text_in_half
    assert "fabric.backward(loss)" in text_in_half
    assert second.texts == []
    assert second.texts_in_half == []


class Loop:
    """An object as ported scripts have it: it holds its strategy, which spawns its method."""

    def __init__(self, strategy: DDPSpawnPlugin) -> None:
        self.strategy = strategy

    def fit(self, trainer: Any, *, epoch: int) -> torch.Tensor:
        strategy = self.strategy
        strategy.setup(trainer)
        strategy.model_to_device()
        loss = trainer.model(batch_of(strategy.global_rank)).pow(2).mean()
        strategy.pre_backward(loss)
        loss.backward()
        strategy.optimizer_step(trainer.optimizers[0], None)
        trainer.callback_metrics = {"loss": torch.ones(2)[1:], "epoch": epoch}
        strategy.add_to_queue(trainer, strategy.mp_queue)
        strategy.add_to_queue(trainer, strategy.mp_queue)
        assert shared_members(strategy) == SHARED_RESULTS
        return torch.ones(3, requires_grad=True)[1:]


@pytest.mark.usefixtures("spawned_ranks_are_forked")
def test_spawn_does_what_its_text_says_on_two_processes() -> None:
    strategy = DDPSpawnPlugin([CPU, CPU])
    trainer = trainer_of(seeded())
    result = strategy.spawn(Loop(strategy).fit, trainer, epoch=3)
    assert result.tolist() == [1.0, 1.0]
    assert not result.requires_grad
    assert trainer.callback_metrics == {}
    assert torch.equal(parameters_of(trainer.model), parameters_of(seeded()))
    strategy.get_from_queue(trainer, strategy.mp_queue)
    assert trainer.callback_metrics == {"loss": torch.ones(1), "epoch": 3}
    trainer.callback_metrics = {}
    strategy.post_dispatch(trainer)
    assert trainer.callback_metrics == {"loss": torch.ones(1), "epoch": 3}
    torch.testing.assert_close(parameters_of(trainer.model), expected_step())
    # The queue and the parameters are empty by now: nothing happens.
    strategy.post_dispatch(trainer)
    strategy.teardown()


def test_spawn_returns_no_model_if_none_was_set_up() -> None:
    strategy = DDPSpawnPlugin([CPU])
    assert strategy.spawn(abs, -3) == 3
    assert strategy.spawn(abs, -3, return_result=False) is None
    strategy.post_dispatch(SimpleNamespace())


# -- in one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.complex64])
def test_dp_reduces_any_tensor_over_dim_0(dtype: torch.dtype, rows: int) -> None:
    strategy = DataParallelStrategy(parallel_devices=[CPU, CPU])
    gathered = torch.arange(rows * 6).reshape(rows, 2, 3).to(dtype)
    collection = {"x": [gathered], "n": 2, "zero": gathered[0, 0, 0]}
    results: dict[Any, torch.Tensor] = {"sum": gathered.sum(0)}
    # torch has no mean of integers.
    if dtype is not torch.int64:
        results["mean"] = gathered.mean(0)
        results[None] = gathered.mean(0)
    for op, expected in results.items():
        actual = strategy.all_reduce(collection, None, op)
        torch.testing.assert_close(actual["x"][0], expected)
        assert actual["n"] == 2
        assert actual["zero"] == gathered[0, 0, 0]


def test_dp_reduces_what_overflows_or_is_trained_and_refuses_what_has_no_rows() -> None:
    strategy = DataParallelStrategy(parallel_devices=[CPU, CPU])
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    assert strategy.all_reduce(large).item() == 60000.0
    assert strategy.all_reduce(torch.tensor([True, False]), reduce_op="max").item() is True
    trained = torch.tensor([2.0, 1.0], requires_grad=True)
    strategy.all_reduce({"loss": trained}, reduce_op="min")["loss"].backward()
    assert trained.grad is not None
    assert torch.equal(trained.grad, torch.tensor([0.0, 1.0]))
    with pytest.raises(ConfigurationError, match="no rows"):
        strategy.all_reduce(torch.zeros(0, 2), reduce_op="sum")
    assert strategy.distributed_sampler_kwargs is None


@pytest.fixture
def dp_strategy() -> Iterator[DataParallelStrategy]:
    strategy = DataParallelStrategy("cpu", [CPU, CPU])
    strategy.setup_environment()
    yield strategy
    strategy.teardown()


def test_dp_does_what_its_text_says(dp_strategy: DataParallelStrategy) -> None:
    net = seeded()
    prepared = dp_strategy.setup_module(net)
    assert isinstance(prepared, nn.DataParallel)
    prepared(torch.cat([batch_of(0), batch_of(1)])).pow(2).mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    torch.testing.assert_close(parameters_of(net), expected_step())
    state = dp_strategy.get_module_state_dict(prepared)
    assert state.keys() == net.state_dict().keys()
    dp_strategy.load_module_state_dict(prepared, {"head.bias": torch.ones(1)}, strict=False)
    assert net.head.bias.item() == 1
    assert dp_strategy.module_to_device(net) is net
    dp_strategy.barrier("a name", "anything", loop=3)
    assert dp_strategy.broadcast(obj={"a": 1}, src=0) == {"a": 1}
    assert type(dp_strategy.batch_to_device((torch.ones(1), "text"))) is tuple
    assert dp_strategy.batch_to_device(torch.ones(1), torch.device("meta")).is_meta
    assert dp_strategy.reduce_boolean_decision(True, all=False)
    assert not dp_strategy.reduce_boolean_decision(False, all=False)
    assert dp_strategy.distributed_sampler_kwargs is None
    assert dp_strategy.root_device == CPU
