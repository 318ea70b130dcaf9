"""The constructors, members and documented behavior of the older toolkits' strategies, as their texts have them."""

import inspect
import warnings
from collections.abc import Mapping
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
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*older name:DeprecationWarning"),
]

CPU = torch.device("cpu")


class Minimal(ParallelStrategy):
    """No more than what is abstract, and the property that is so in the text."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module

    @property
    def root_device(self) -> torch.device:
        return CPU


# -- signatures -------------------------------------------------------------------------------------------------------


class Seed(NamedTuple):
    """A text: the constructor's arguments, the members with theirs, and the properties."""

    constructor: str
    members: dict[str, str]
    properties: tuple[str, ...] = ("root_device",)


SHARED = "accelerator=None, parallel_devices=None, cluster_environment=None, checkpoint_io=None, precision_plugin=None"
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
        "parallel_devices=None, num_nodes=None, cluster_environment=None, checkpoint_io=None, sync_batchnorm=None, "
        f"{HOOKS}, **kwargs",
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
        f"{SHARED}, process_group_backend=None, cpu_offload=None, backward_prefetch=None, mixed_precision=None, "
        "activation_checkpointing=None, **kwargs",
        {
            "barrier": "name=None",
            "broadcast": "obj, src=0",
            "model_sharded_context": "",
            "model_to_device": "",
            **dict.fromkeys(
                ("predict_step", "test_step", "training_step", "validation_step"), "*args, **kwargs"
            ),
            "reduce": REDUCE,
            "setup": "trainer",
            "setup_environment": "",
            "setup_optimizers": "trainer",
            "teardown": "",
        },
    ),
}
# A value for each argument of a constructor, and what the strategy's attribute of that name then is.
POLICY = MixedPrecisionPolicy(torch.bfloat16)
HOOK = SimpleNamespace(start_localSGD_iter=1)
SLURM = SlurmEnvironment()
VALUES: Mapping[str, tuple[Any, Any]] = {
    "accelerator": ("cpu", "cpu"),
    "parallel_devices": ([CPU, CPU], (CPU, CPU)),
    "cluster_environment": (SLURM, SLURM),
    "checkpoint_io": (FORMAT := SimpleNamespace(save=None), FORMAT),
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
    names = {"datetime": SimpleNamespace(timedelta=timedelta)}
    return inspect.signature(eval(f"lambda {text}: None", names))  # noqa: S307 - a text of this file


def named(text: str) -> dict[str, Any]:
    """The arguments that have names, with their defaults."""
    found = signature(text).parameters.values()
    return {one.name: one.default for one in found if one.kind is one.POSITIONAL_OR_KEYWORD}


def attribute(strategy: Any, argument: str) -> Any:
    value = getattr(strategy, argument.removesuffix("_plugin"))
    return getattr(value, "name", None) if argument.startswith("precision") else value


@BY_KIND
def test_e_a_constructor_takes_the_arguments_of_its_text_by_position_and_by_keyword(
    kind: Any,
) -> None:
    defaults = named(SEEDS[kind].constructor)
    given = {name: VALUES[name][0] for name in defaults}
    for strategy in (kind(*given.values()), kind(**given)):
        assert {name: attribute(strategy, name) for name in given} == {
            name: VALUES[name][1] for name in given
        }
    assert vars(kind(*defaults.values())).keys() == vars(kind()).keys()
    ours = list(inspect.signature(kind).parameters.values())
    assert [one.default for one in ours[: len(defaults)]] == list(defaults.values())
    assert all(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in ours[len(defaults) :])


@BY_KIND
def test_e_a_strategy_has_each_member_of_its_text_with_its_arguments(kind: Any) -> None:
    assert issubclass(kind, ParallelStrategy)
    for name, text in SEEDS[kind].members.items():
        ours = inspect.signature(getattr(kind, name))
        defaults = named(text)
        values = {argument: object() for argument in defaults}
        by_position = ours.bind(None, *values.values())
        by_keyword = ours.bind(None, **values)
        for argument in values.keys() & ours.parameters.keys():
            assert (
                by_position.arguments[argument]
                is by_keyword.arguments[argument]
                is values[argument]
            )
            assert defaults[argument] in (
                inspect.Parameter.empty,
                ours.parameters[argument].default,
            )
        ours.bind(
            None,
            *(value for one, value in values.items() if defaults[one] is inspect.Parameter.empty),
        )
        if "**" in text:
            ours.bind(
                None,
                *values.values(),
                *("anything" for _ in range(text.count("*args"))),
                something=1,
            )
    for name in SEEDS[kind].properties:
        assert isinstance(inspect.getattr_static(kind, name), property), name


# -- before the runtime is started ------------------------------------------------------------------------------------


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
def test_e_before_the_environment_is_set_up_collectives_are_the_identity(kind: Any) -> None:
    assert collectives(kind(parallel_devices=[CPU, CPU])) == [3.0, 2, {"of": "anybody"}, False]
    assert collectives(kind()) == [3.0, 2, {"of": "anybody"}, False]


@pytest.mark.parametrize(
    "kind", [DataParallelStrategy, DDPStrategy, DDPSpawnPlugin, DDPFullyShardedNativeStrategy]
)
def test_e_before_the_environment_is_set_up_the_root_device_is_one_of_the_parallel_devices(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = kind(parallel_devices=[torch.device("cuda", 3), torch.device("cuda", 1)])
    assert strategy.root_device == torch.device("cuda", 3)
    place = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    for name, value in {**place, "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert strategy.root_device == torch.device("cuda", 1)
    # Something is distributed now, and not connected yet: no silent identity.
    assert outcome(lambda: strategy.reduce(torch.ones(1))).startswith("UsageError: the runtime of")
    with pytest.raises(UsageError, match="the runtime of"):
        kind().root_device  # noqa: B018


# -- on 2 processes ---------------------------------------------------------------------------------------------------


def trainer_of(net: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(
        model=net, optimizers=[torch.optim.SGD(net.parameters(), lr=0.1)], callback_metrics={}
    )


def parameters_of(module: nn.Module) -> torch.Tensor:
    return torch.cat(
        [full_tensor(parameter.detach()).flatten() for parameter in module.parameters()]
    )


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def expected_step() -> torch.Tensor:
    """Parameters after one step of the plain loop on the batches of both ranks."""
    net = seeded()
    for rank in range(2):
        (net(batch_of(rank)).pow(2).mean() / 2).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return parameters_of(net)


def shared_members(strategy: Any) -> dict[str, Any]:
    """What every text has of collectives, and of the place of a process."""
    rank = strategy.global_rank
    strategy.barrier()
    strategy.barrier("a name")
    strategy.barrier(name="a name")
    own = torch.tensor([float(rank + 1)])
    return {
        "mean": [strategy.reduce(own, None, op).item() for op in ("mean", "avg", None)],
        "sum": [
            strategy.reduce(own, reduce_op=op).item()
            for op in ("sum", torch.distributed.ReduceOp.SUM)
        ],
        "unchanged": strategy.reduce("no tensor"),
        "sent": [strategy.broadcast([rank, torch.ones(1)])[0], strategy.broadcast(obj=rank, src=1)],
        "device": strategy.root_device,
        "zero": strategy.is_global_zero is (rank == 0),
    }


SHARED_RESULTS = {
    "mean": [1.5] * 3, "sum": [3.0] * 2, "unchanged": "no tensor", "sent": [0, 1], "device": CPU, "zero": True,
}  # fmt: skip


def ddp_members(fabric: Fabric) -> dict[str, Any]:
    strategy: Any = fabric.strategy
    net = seeded()
    seen = shared_members(fabric.strategy)
    trainer = trainer_of(net)
    strategy.setup(trainer)
    [optimizer] = trainer.optimizers

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = trainer.model(batch_of(fabric.global_rank)).pow(2).mean()
        loss.backward()
        return loss

    loss = strategy.optimizer_step(optimizer, closure, net)
    with strategy.block_backward_sync():
        trainer.model(batch_of(fabric.global_rank)).sum().backward()
    local = strategy.all_gather(net.head.weight.grad)
    again = outcome(lambda: strategy.setup(trainer_of(net)))
    alone = outcome(lambda: DDPStrategy(parallel_devices=[CPU]).reduce(torch.ones(1)))
    second = outcome(strategy.setup_environment)
    error = RuntimeError("Parameter indices which did not receive grad for rank 1: 0 1")
    strategy.on_exception(exception=error)
    strategy.teardown()
    return {
        **seen,
        "distributed": strategy.is_distributed,
        "loss": isinstance(loss, torch.Tensor),
        "wrapped": type(trainer.model).__name__,
        "stepped": parameters_of(net),
        "local": bool((local[0] != local[1]).any()),
        "again": "Net is set up already" in again,
        "alone": alone.startswith("UsageError: the runtime of DDPStrategy"),
        "second": "started already" in second,
        "hint": "encoder.weight, encoder.bias" in error.__notes__[0],
        "group": torch.distributed.is_initialized(),
    }


def test_e_ddp_does_what_its_text_says_on_two_processes() -> None:
    for seen in run_in_ranks(ddp_members, strategy=DDPStrategy(start_method="forkserver")):
        torch.testing.assert_close(seen.pop("stepped"), expected_step())
        assert seen == {
            **SHARED_RESULTS, "distributed": True, "loss": True, "wrapped": "DistributedDataParallel", "local": True,
            "again": True, "alone": True, "second": True, "hint": True, "group": False,
        }  # fmt: skip


def minimal_members(fabric: Fabric) -> dict[str, Any]:
    strategy: Any = fabric.strategy
    own = torch.tensor([float(fabric.global_rank)], requires_grad=True)
    gathered = strategy.all_gather(own, None, True)
    (gathered * (fabric.global_rank + 1)).sum().backward()
    trainer = trainer_of(seeded())
    strategy.setup(trainer)
    with strategy.block_backward_sync():
        trainer.model(batch_of(0)).sum().backward()
    return {
        **shared_members(strategy),
        "gathered": gathered.tolist(),
        "gradient": [] if own.grad is None else own.grad.tolist(),
        "without": strategy.all_gather(own).requires_grad,
        "decided": [
            strategy.reduce_boolean_decision(fabric.is_global_zero),
            strategy.reduce_boolean_decision(True),
        ],
        "distributed": strategy.is_distributed,
        "failed": outcome(lambda: strategy.reconciliate_processes("the trace")),
    }


def test_e_a_minimal_parallel_strategy_does_what_its_text_says_on_two_processes() -> None:
    for rank, seen in enumerate(
        run_in_ranks(minimal_members, strategy=Minimal(start_method="forkserver"))
    ):
        failed = seen.pop("failed")
        assert failed.startswith("RankFailedError")
        assert all(text in failed for text in (f"rank {rank}", "the trace"))
        assert seen == {
            **SHARED_RESULTS, "gathered": [[0.0], [1.0]], "gradient": [3.0], "without": False, "decided": [False, True],
            "distributed": True,
        }  # fmt: skip


class Steps(Net):
    """A module with the steps of older toolkits, none of which is forward itself."""

    def validation_step(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(x) * scale, "dtype": self.encoder(x.double().to(x.dtype)).dtype}

    def predict_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def native_members(fabric: Fabric) -> dict[str, Any]:
    strategy: Any = fabric.strategy
    x = batch_of(fabric.global_rank)
    seen = shared_members(fabric.strategy)
    none = outcome(lambda: strategy.training_step(x))
    with strategy.model_sharded_context():
        torch.manual_seed(0)
        first = Steps()
    fabric.setup_module(first)
    last = strategy.training_step(x)  # the one that was set up last
    trainer = SimpleNamespace(model=seeded_steps())
    strategy.setup(trainer)
    trainer.optimizers = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    strategy.setup_optimizers(trainer)
    fabric.setup_module(Steps())
    strategy.model_to_device()
    loss = strategy.training_step(x)  # that of setup(trainer), whatever came later
    loss.backward()
    strategy.optimizer_step(trainer.optimizers, None)
    seen |= {
        "none": "no module is set up" in none,
        "last": last.item() == loss.item(),
        "stepped": parameters_of(trainer.model),
        "scaled": strategy.validation_step(x, scale=0.0)["loss"].item(),
        "shape": strategy.predict_step(x).shape,
        "missing": outcome(lambda: strategy.test_step(x)),
    }
    strategy.teardown()
    return {**seen, "group": torch.distributed.is_initialized()}


def seeded_steps() -> Steps:
    torch.manual_seed(0)
    return Steps()


def test_e_fully_sharded_does_what_its_text_says_on_two_processes() -> None:
    strategy = DDPFullyShardedNativeStrategy(
        start_method="forkserver", activation_checkpointing=nn.Linear
    )
    for seen in run_in_ranks(native_members, strategy=strategy):
        torch.testing.assert_close(seen.pop("stepped"), expected_step())
        assert "has no attribute 'test_step'" in seen.pop("missing")
        assert seen == {
            **SHARED_RESULTS, "none": True, "last": True, "scaled": 0.0, "shape": (4, 1), "group": False,
        }  # fmt: skip


OLDER = {
    "use_orig_params": False, "limit_all_gathers": True, "sync_module_states": True, "forward_prefetch": True,
    "activation_checkpointing_policy": {nn.Linear}, "sharding_strategy": ShardingStrategy.NO_SHARD,
}  # fmt: skip


def step_and_warnings(**options: Any) -> tuple[list[str], SimpleNamespace, Any]:
    """What a strategy of its own warns of, and a trainer after one step with it."""
    strategy = DDPFullyShardedNativeStrategy(**options)
    trainer = trainer_of(seeded_steps())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.setup_environment()
        strategy.setup(trainer)
        loss = strategy.training_step(batch_of(strategy.global_rank))
    loss.backward()
    strategy.optimizer_step(trainer.optimizers[0], None)
    return [str(one.message) for one in caught if one.category is UserWarning], trainer, strategy


def options_of_old(fabric: Fabric) -> list[Any]:
    said, trainer, strategy = step_and_warnings(**OLDER)
    sizes = [
        parameter.to_local().numel() == parameter.numel()
        for parameter in trainer.model.parameters()
    ]
    half, in_half, own = step_and_warnings(precision_plugin=16)
    dtype = own.validation_step(batch_of(0))["dtype"]
    dtypes = dtype, in_half.model.head.weight.dtype
    return [
        said,
        strategy.activation_checkpointing,
        all(sizes),
        parameters_of(trainer.model),
        half,
        dtypes,
    ]


def test_e_options_of_the_first_fsdp_and_precision_16_are_taken_with_one_warning_each() -> None:
    results = run_in_ranks(options_of_old, strategy="fsdp")
    for said, recomputed, whole, stepped, half, dtypes in results:
        assert (recomputed, whole, dtypes) == ((nn.Linear,), True, (torch.float16, torch.float32))
        torch.testing.assert_close(stepped, expected_step())
        assert [len(said), len(half)] == ([1, 1] if said is results[0][0] else [0, 0])
    [older], [half] = results[0][0], results[0][4]
    assert all(f"{name} " in older for name in (set(OLDER) - {"sharding_strategy"}) | {"NO_SHARD"})
    assert "float16" in half
    assert "fabric.backward(loss)" in half


class Loop:
    """What a ported script spawns: a method of an object that holds its strategy."""

    def __init__(self, strategy: DDPSpawnPlugin) -> None:
        self.strategy = strategy

    def fit(self, trainer: Any, *, epoch: int) -> dict[str, Any]:
        return {**fit(self.strategy, trainer, epoch), "mine": torch.ones(3, requires_grad=True)[1:]}


def fit(strategy: DDPSpawnPlugin, trainer: Any, epoch: int) -> dict[str, Any]:
    strategy.setup(trainer)
    strategy.model_to_device()
    loss = trainer.model(batch_of(strategy.global_rank)).pow(2).mean()
    strategy.pre_backward(loss)
    loss.backward()
    strategy.optimizer_step(trainer.optimizers[0], None)
    trainer.callback_metrics = {"loss": torch.ones(2)[1:], "epoch": epoch}
    strategy.add_to_queue(trainer, strategy.mp_queue)
    strategy.add_to_queue(trainer, strategy.mp_queue)
    return shared_members(strategy)


def test_e_spawn_does_what_its_text_says_on_two_processes() -> None:
    strategy = DDPSpawnPlugin([CPU, CPU])
    trainer = trainer_of(seeded())
    result = strategy.spawn(Loop(strategy).fit, trainer, epoch=3)
    assert (result["mine"].tolist(), result.pop("mine").requires_grad) == ([1.0, 1.0], False)
    assert result == SHARED_RESULTS
    assert trainer.callback_metrics == {}
    assert torch.equal(parameters_of(trainer.model), parameters_of(seeded()))
    strategy.get_from_queue(trainer, strategy.mp_queue)
    assert trainer.callback_metrics == {"loss": torch.ones(1), "epoch": 3}
    trainer.callback_metrics = {}
    strategy.post_dispatch(trainer)
    assert trainer.callback_metrics == {"loss": torch.ones(1), "epoch": 3}
    torch.testing.assert_close(parameters_of(trainer.model), expected_step())
    strategy.post_dispatch(trainer)  # nothing is left
    strategy.teardown()


def test_e_the_plugin_takes_no_model_along_where_none_was_set_up() -> None:
    strategy = DDPSpawnPlugin([CPU])
    assert strategy.spawn(abs, -3) == 3
    assert strategy.spawn(abs, -3, return_result=False) is None
    strategy.post_dispatch(SimpleNamespace())


# -- in one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.complex64])
def test_e_dp_reduces_any_tensor_over_dim_0(dtype: torch.dtype, rows: int) -> None:
    strategy = DataParallelStrategy(parallel_devices=[CPU, CPU])
    gathered = torch.arange(rows * 6).reshape(rows, 2, 3).to(dtype)
    for op in ("sum",) if dtype is torch.int64 else ("mean", "sum", None):
        expected = gathered.sum(0) if op == "sum" else gathered.mean(0)
        actual = strategy.all_reduce({"x": [gathered], "n": 2, "zero": gathered[0, 0, 0]}, None, op)
        torch.testing.assert_close(actual["x"][0], expected)
        assert (actual["n"], actual["zero"]) == (2, gathered[0, 0, 0])


def test_e_dp_reduces_what_overflows_or_is_trained_and_refuses_what_has_no_rows() -> None:
    strategy = DataParallelStrategy(parallel_devices=[CPU, CPU])
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    assert strategy.all_reduce(large).item() == 60000.0
    assert strategy.all_reduce(torch.tensor([True, False]), reduce_op="max").item() is True
    trained = torch.tensor([2.0, 1.0], requires_grad=True)
    strategy.all_reduce({"loss": trained}, reduce_op="min")["loss"].backward()
    assert torch.equal(
        trained.grad if trained.grad is not None else trained, torch.tensor([0.0, 1.0])
    )
    with pytest.raises(ConfigurationError, match="no rows"):
        strategy.all_reduce(torch.zeros(0, 2), reduce_op="sum")
    assert strategy.distributed_sampler_kwargs is None


def test_e_dp_does_what_its_text_says() -> None:
    strategy = DataParallelStrategy("cpu", [CPU, CPU])
    net = seeded()
    strategy.setup_environment()
    try:
        prepared = strategy.setup_module(net)
        assert isinstance(prepared, nn.DataParallel)
        prepared(torch.cat([batch_of(0), batch_of(1)])).pow(2).mean().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        torch.testing.assert_close(parameters_of(net), expected_step())
        state = strategy.get_module_state_dict(prepared)
        assert state.keys() == net.state_dict().keys()
        strategy.load_module_state_dict(prepared, {"head.bias": torch.ones(1)}, strict=False)
        assert net.head.bias.item() == 1
        assert strategy.module_to_device(net) is net
        strategy.barrier("a name", "anything", loop=3)
        assert strategy.broadcast(obj={"a": 1}, src=0) == {"a": 1}
        assert type(strategy.batch_to_device((torch.ones(1), "text"))) is tuple
        assert strategy.batch_to_device(torch.ones(1), torch.device("meta")).is_meta
        assert [strategy.reduce_boolean_decision(one, all=False) for one in (True, False)] == [
            True,
            False,
        ]
        assert (strategy.distributed_sampler_kwargs, strategy.root_device) == (None, CPU)
    finally:
        strategy.teardown()
