"""The older names do on real processes what their modern spellings do, and name those."""

import traceback
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.errors import (
    ArgumentTypeError,
    ConfigurationError,
    FabricError,
    RankFailedError,
    UsageError,
)
from fabric.legacy import DDPFullyShardedNativeStrategy, DDPSpawnPlugin
from fabric.precision import PRECISIONS
from fabric.strategies import DDPStrategy, FSDPStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*older name:DeprecationWarning"),
]

CPU = torch.device("cpu")


def plugin(ranks: int = 2, **options: Any) -> DDPSpawnPlugin:
    return DDPSpawnPlugin(parallel_devices=[CPU] * ranks, **options)


def sharded(**options: Any) -> DDPFullyShardedNativeStrategy:
    return DDPFullyShardedNativeStrategy(start_method="forkserver", **options)


def trainer_of(net: nn.Module) -> SimpleNamespace:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return SimpleNamespace(model=net, optimizers=[optimizer], callback_metrics={})


def parameters_of(module: nn.Module) -> torch.Tensor:
    parameters = [full_tensor(parameter.detach()) for parameter in module.parameters()]
    return nn.utils.parameters_to_vector(parameters)


# -- a loop on the older names ---------------------------------------------------------------------


def step_of_trainer(strategy: Any, trainer: Any) -> torch.Tensor:
    """Return the parameters after one step on data that differs between ranks."""
    strategy.setup(trainer)
    strategy.model_to_device()
    torch.manual_seed(strategy.global_rank)
    loss = trainer.model(torch.randn(4, 4)).pow(2).mean()
    if isinstance(strategy, DDPSpawnPlugin):
        strategy.pre_backward(loss)
    loss.backward()
    strategy.optimizer_step(trainer.optimizers[0])
    strategy.barrier()
    return parameters_of(trainer.model)


def expected_step(ranks: int = 2) -> torch.Tensor:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rank in range(ranks):
        torch.manual_seed(rank)
        (net(torch.randn(4, 4)).pow(2).mean() / ranks).backward()
    optimizer.step()
    return parameters_of(net)


class Model:
    """An object as ported scripts have it: it holds its strategy, which spawns its method."""

    def __init__(self, strategy: DDPSpawnPlugin) -> None:
        self.strategy = strategy

    def fit(self, trainer: Any, offset: int, *, scale: int) -> dict[str, torch.Tensor]:
        rank = self.strategy.global_rank
        value = torch.tensor(float(rank + offset) * scale, requires_grad=True)
        parameters = step_of_trainer(self.strategy, trainer)
        trainer.callback_metrics = {
            "rank": torch.tensor(rank),
            "nested": [torch.ones(3)[1:]],
            "epoch": 3,
        }
        self.strategy.add_to_queue(trainer, self.strategy.mp_queue)
        total = self.strategy.all_reduce(value, reduce_op="sum")
        return {"parameters": parameters, "value": value, "sum": total}


def test_with_one_device_a_trainer_takes_the_step_of_the_plain_loop_in_this_process() -> None:
    torch.manual_seed(0)
    strategy = plugin(ranks=1)
    trainer = trainer_of(Net())
    result = strategy.spawn(Model(strategy).fit, trainer, 1, scale=10)
    assert torch.allclose(result["parameters"], expected_step(ranks=1), atol=1e-6)
    assert result["sum"].item() == 10
    assert result["value"].item() == 10
    assert result["value"].requires_grad
    trainer.callback_metrics = {"earlier": 1}
    strategy.post_dispatch(trainer)
    assert torch.equal(trainer.callback_metrics.pop("nested")[0], torch.ones(2))
    assert trainer.callback_metrics == {"earlier": 1, "rank": torch.tensor(0), "epoch": 3}
    assert len(strategy.mp_queue) == 0


def sharded_step(fabric: Fabric) -> torch.Tensor:
    torch.manual_seed(0)
    return step_of_trainer(fabric.strategy, trainer_of(Net()))


def test_a_sharded_trainer_takes_the_step_of_the_plain_loop() -> None:
    for result in run_in_ranks(sharded_step, strategy=sharded()):
        assert torch.allclose(result, expected_step(), atol=1e-6)


def rank_and_size(fabric: Fabric) -> tuple[int, int]:
    return fabric.global_rank, fabric.world_size


def test_fabric_takes_the_older_classes_as_strategies() -> None:
    strategy = DDPSpawnPlugin()
    assert isinstance(strategy, DDPStrategy)
    results = run_in_ranks(rank_and_size, strategy=strategy)
    assert results == [(0, 2), (1, 2)]
    assert isinstance(sharded(), FSDPStrategy)


# -- spawn -----------------------------------------------------------------------------------------


def fail_on_rank_one(strategy: DDPSpawnPlugin) -> None:
    if strategy.global_rank == 1:
        try:
            raise ValueError("the file of rank one is damaged")
        except ValueError:
            strategy.reconciliate_processes(traceback.format_exc())
    strategy.barrier("never together")


@pytest.mark.usefixtures("spawned_ranks_are_forked")
def test_reconciled_processes_end_with_the_rank_and_the_trace_of_the_failure() -> None:
    strategy = plugin()
    with pytest.raises(RankFailedError, match="the file of rank one is damaged") as caught:
        strategy.spawn(fail_on_rank_one, strategy)
    assert caught.value.rank == 1


def raise_in_loop(strategy: DDPSpawnPlugin) -> str:
    strategy.reconciliate_processes("a trace")
    strategy.on_exception(exception=ValueError("of the loop"))
    return "a result that the caller does not request"


def test_a_single_process_has_nothing_to_reconcile() -> None:
    strategy = plugin(ranks=1)
    assert strategy.spawn(raise_in_loop, strategy, return_result=False) is None


# -- gradients stay local --------------------------------------------------------------------------


def synchronizing_models(fabric: Fabric) -> dict[str, list[bool]]:
    """Return by context whether a backward pass through each of two models synchronizes."""
    strategy: Any = fabric.strategy
    models = [fabric.setup(Net()), fabric.setup(Net())]

    def synchronizes(model: Any) -> bool:
        return strategy.gradient_contract(model._fabric_prepared).synchronizes()

    states = {"before": list(map(synchronizes, models))}
    with strategy.block_backward_sync():
        states["in a block"] = list(map(synchronizes, models))
        with strategy.block_backward_sync(models[0], enabled=False):
            states["in a nested block"] = list(map(synchronizes, models))
    with strategy.block_backward_sync(models[1]):
        states["in a block of the second"] = list(map(synchronizes, models))
    states["after"] = list(map(synchronizes, models))
    return states


@pytest.mark.parametrize("make", [DDPSpawnPlugin, sharded])
def test_without_a_module_the_sync_of_every_module_is_blocked(make: Callable[[], Any]) -> None:
    for states in run_in_ranks(synchronizing_models, strategy=make()):
        assert states == {
            "before": [True, True],
            "in a block": [False, False],
            "in a nested block": [False, False],
            "in a block of the second": [True, False],
            "after": [True, True],
        }


# -- warnings --------------------------------------------------------------------------------------


def call_older_names(fabric: Fabric) -> list[tuple[str, str]]:
    """Call every older name in a rank, and return the texts and files of the warnings."""
    strategy: Any = fabric.strategy
    trainer = trainer_of(Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.barrier()
        strategy.barrier("a name")
        strategy.barrier(name="a name")
        strategy.barrier("a name", "something else", loop=3)
        assert not caught
        strategy.setup(trainer)
        strategy.setup_optimizers(trainer)
        strategy.model_to_device()
        strategy.block_backward_sync()
        with strategy.model_sharded_context():
            net = Net()
        assert not net.head.weight.is_meta
        if isinstance(strategy, DDPSpawnPlugin):
            strategy.pre_backward(torch.ones(()))
            strategy.post_dispatch(trainer)
            queue = SimpleQueue()
            strategy.add_to_queue(trainer, queue)
            strategy.get_from_queue(trainer, queue)
        else:
            strategy.training_step(torch.ones(1, 4))
    result = []
    for warning in caught:
        if warning.category is DeprecationWarning:
            result.append((str(warning.message), warning.filename))
    return result


OLDER_NAMES = [
    "setup",
    "setup_optimizers",
    "model_to_device",
    "block_backward_sync",
    "model_sharded_context",
]
NAMES_OF_PLUGIN = ["pre_backward", "post_dispatch", "add_to_queue", "get_from_queue"]


@pytest.mark.parametrize(
    ("make", "names"),
    [(DDPSpawnPlugin, OLDER_NAMES + NAMES_OF_PLUGIN), (sharded, [*OLDER_NAMES, "training_step"])],
)
def test_every_older_name_warns_its_caller_with_the_modern_name(
    make: Callable[[], Any], names: list[str]
) -> None:
    [calls] = run_in_ranks(call_older_names, strategy=make(), ranks=1)
    assert len(calls) == len(names)
    for name, (text, filename) in zip(names, calls, strict=True):
        assert text.startswith(f"{name}(")
        assert "Write: " in text
        assert filename == __file__


def test_a_line_that_runs_often_warns_once() -> None:
    strategy = DDPSpawnPlugin()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            strategy.pre_backward(torch.ones(()))
        strategy.pre_backward(torch.ones(()))
    first, second = caught
    assert second.lineno == first.lineno + 1


def test_the_constructors_warn_with_the_modern_names_of_strategy_and_precision() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = DDPSpawnPlugin(precision_plugin=64)
        DDPFullyShardedNativeStrategy(
            precision_plugin=SimpleNamespace(precision="bf16"), precision="bf16-mixed"
        )
    assert strategy.precision is PRECISIONS["64-true"]
    modern_names = ['strategy="ddp_spawn"', 'strategy="fsdp"']
    for name, warning in zip(modern_names, caught, strict=True):
        assert name in str(warning.message)
        assert "precision= for precision_plugin=" in str(warning.message)
        assert warning.filename == __file__


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "kind", "text"),
    [
        (lambda: DDPSpawnPlugin(unknown=1), ArgumentTypeError, "unknown"),
        (
            lambda: DDPSpawnPlugin(precision_plugin=64, precision=32),
            ConfigurationError,
            "the two differ",
        ),
        (
            lambda: DDPStrategy(precision="bf16", precision_plugin=16),
            ConfigurationError,
            "the two differ",
        ),
        (
            lambda: DDPFullyShardedNativeStrategy(precision_plugin="8"),
            ConfigurationError,
            "no such precision",
        ),
        (
            lambda: DDPFullyShardedNativeStrategy(flatten_parameters=True),
            ArgumentTypeError,
            "flatten_parameters",
        ),
        (lambda: DDPSpawnPlugin().spawn(print), ConfigurationError, "no parallel_devices"),
        (lambda: DDPSpawnPlugin().setup(), UsageError, "there is no model"),
        (
            lambda: DDPSpawnPlugin().setup(trainer_of(Net())),
            UsageError,
            "the runtime of DDPSpawnPlugin",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_starts(
    action: Callable[[], Any], kind: type[FabricError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        action()
    assert text in str(caught.value)


def refusals(fabric: Fabric) -> list[str]:
    strategy: Any = fabric.strategy
    trainer = trainer_of(Net())
    strategy.setup(trainer)
    return [
        outcome(lambda: strategy.setup(trainer)),
        outcome(lambda: strategy.setup(SimpleNamespace(model=trainer.model.module))),
    ]


def test_a_model_that_is_set_up_already_is_refused() -> None:
    [[again, inner]] = run_in_ranks(refusals, strategy=DDPSpawnPlugin(), ranks=1)
    assert "DistributedDataParallel is set up" in again
    assert "Net is set up already" in inner


def set_up_without_trainer(fabric: Fabric) -> tuple[torch.dtype, bool] | str:
    strategy: Any = fabric.strategy
    net = Net()
    strategy.model = net
    strategy.model_to_device()
    text = outcome(strategy.setup)
    if text != "fine":
        return text
    return net.head.weight.dtype, strategy.gradient_contract(strategy.model).synchronizes()


def test_without_a_trainer_the_model_of_the_strategy_is_set_up_in_its_precision() -> None:
    strategy = DDPSpawnPlugin(precision_plugin="64-true")
    results = run_in_ranks(set_up_without_trainer, strategy=strategy, ranks=1)
    assert results == [(torch.float64, True)]


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_a_precision_that_needs_fabric_is_refused_by_the_strategy_alone(name: str) -> None:
    [text] = run_in_ranks(
        set_up_without_trainer, strategy=DDPSpawnPlugin(precision_plugin=name), ranks=1
    )
    assert f"precision={name!r}" in text
    assert "fabric.setup(model, optimizer)" in text
