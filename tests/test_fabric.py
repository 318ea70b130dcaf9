"""Fabric in one process: what it refuses, what works without launch(), and that nothing is left."""

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import fabric as package
from fabric import Fabric
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    FabricError,
    UsageError,
)
from fabric.loggers import CSVLogger
from fabric.strategies import DDPStrategy, SingleDeviceStrategy
from fabric.world import World
from tests.models import Net


def single(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none", **options)


def several() -> Fabric:
    return Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn", environment="none")


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def enter(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def assert_four_parts(error: FabricError, *names: str) -> None:
    for name in names:
        assert name in str(error)
    assert error.request
    assert error.problem
    assert error.expected
    assert error.suggestion


BEFORE_LAUNCH: dict[str, Callable[[Fabric], Any]] = {
    "device": lambda fabric: fabric.device,
    "global_rank": lambda fabric: fabric.global_rank,
    "local_rank": lambda fabric: fabric.local_rank,
    "node_rank": lambda fabric: fabric.node_rank,
    "setup": lambda fabric: fabric.setup(Net()),
    "setup_module": lambda fabric: fabric.setup_module(Net()),
    "setup_optimizers": lambda fabric: fabric.setup_optimizers(sgd(Net())),
    "setup_dataloaders": lambda fabric: fabric.setup_dataloaders(DataLoader([1])),
    "init_module": lambda fabric: fabric.init_module(),
    "init_tensor": lambda fabric: fabric.init_tensor(),
    "to_device": lambda fabric: fabric.to_device(torch.ones(1)),
    "autocast": lambda fabric: fabric.autocast(),
    "all_reduce": lambda fabric: fabric.all_reduce(1.0),
    "all_gather": lambda fabric: fabric.all_gather(1.0),
    "broadcast": lambda fabric: fabric.broadcast(1.0),
    "barrier": lambda fabric: fabric.barrier(),
    "reduce_boolean_decision": lambda fabric: fabric.reduce_boolean_decision(True),
    "rank_zero_first": lambda fabric: enter(fabric.rank_zero_first()),
    "save": lambda fabric: fabric.save("nowhere.pt", {}),
    "load": lambda fabric: fabric.load("nowhere.pt"),
    "load_raw": lambda fabric: fabric.load_raw("nowhere.pt", Net()),
    "save_pretrained": lambda fabric: fabric.save_pretrained(Net(), "nowhere"),
}


@pytest.mark.parametrize("member", BEFORE_LAUNCH)
def test_what_needs_the_processes_is_refused_before_launch(member: str) -> None:
    with pytest.raises(UsageError) as caught:
        BEFORE_LAUNCH[member](several())
    assert_four_parts(caught.value, f"fabric.{member}", "2 processes", "fabric.launch()")


@dataclass
class Job:
    """A model and its optimizer that are set up, and an optimizer that is not."""

    fabric: Fabric
    net: Net
    model: Any
    optimizer: torch.optim.SGD
    new_optimizer: torch.optim.SGD
    path: Path

    def truncated(self) -> None:
        self.fabric.save(self.path, {"model": self.model})
        self.path.write_bytes(self.path.read_bytes()[:-200])
        self.fabric.load(self.path, {"model": self.model})

    def missing_key(self) -> None:
        self.fabric.save(self.path, {"model": self.model})
        self.fabric.load(self.path, {"model": self.model, "epoch": 0})

    def twice(self) -> None:
        self.fabric.launch()
        self.fabric.launch()


REFUSALS: dict[str, tuple[Callable[[Job], Any], type[FabricError], list[str]]] = {
    "setup twice": (lambda job: job.fabric.setup(job.net), UsageError, ["Net", "already"]),
    "setup of a result": (lambda job: job.fabric.setup(job.model), UsageError, ["Net", "already"]),
    "setup compiled": (
        lambda job: job.fabric.setup(torch.compile(job.net)),
        UsageError,
        ["Net", "already"],
    ),
    "optimizer first": (
        lambda job: job.fabric.setup_optimizers(job.new_optimizer),
        UsageError,
        ["SGD", "with or after the module"],
    ),
    "optimizer of another": (
        lambda job: job.fabric.setup(Net(), job.new_optimizer),
        UsageError,
        ["none of its parameters"],
    ),
    "optimizer twice": (
        lambda job: job.fabric.setup_optimizers(job.optimizer),
        UsageError,
        ["already"],
    ),
    "same optimizer": (
        lambda job: setup_with_one_optimizer_twice(job.fabric),
        UsageError,
        ["already"],
    ),
    "launch of a result": (
        lambda job: job.fabric.launch(3),
        ArgumentTypeError,
        ["launch(3)", "not fabric.launch(train(fabric, 1, 2))"],
    ),  # type: ignore[arg-type]
    "launch without a function": (
        lambda job: several().launch(),
        UsageError,
        ["'spawn'", "fabric.launch(train, 1, 2)"],
    ),
    "launch with arguments": (
        lambda job: job.fabric.launch(x=3),
        UsageError,
        ["no function", "train, 1, 2"],
    ),
    "setup of a loader": (
        lambda job: job.fabric.setup(Net(), DataLoader([1])),
        UsageError,
        ["DataLoader", "neither", "setup_dataloaders(loader)"],
    ),
    "setup of a list": (
        lambda job: job.fabric.setup(Net(), [job.new_optimizer]),
        UsageError,
        ["list", "neither"],
    ),
    "optimizer before its model": (
        lambda job: job.fabric.setup(job.optimizer, job.net),
        ArgumentTypeError,
        ["type SGD", "setup(model, optimizer)"],
    ),
    "launch twice": (Job.twice, UsageError, ["launched already"]),
    "run": (lambda job: job.fabric.run(), UsageError, ["Fabric.run()", "subclass"]),
    "clip a plain module": (
        lambda job: job.fabric.clip_gradients(job.net, job.optimizer, max_norm=1.0),
        ArgumentTypeError,
        ["clip_gradients with Net"],
    ),
    "clip another optimizer": (
        lambda job: job.fabric.clip_gradients(job.model, job.new_optimizer, max_norm=1.0),
        UsageError,
        ["SGD", "not been set up"],
    ),
    "clip the optimizer of another": (
        lambda job: job.fabric.clip_gradients(job.fabric.setup(Net()), job.optimizer, max_norm=1.0),
        UsageError,
        ["none of the optimizer's parameters", "Net"],
    ),
    "clip with a limit in place of the optimizer": (
        lambda job: job.fabric.clip_gradients(job.model, 1.0),  # type: ignore[arg-type]
        ArgumentTypeError,
        ["type float", "max_norm=1.0"],
    ),
    "clip without a limit": (
        lambda job: job.fabric.clip_gradients(job.model, job.optimizer),
        ConfigurationError,
        ["clip_val", "max_norm"],
    ),
    "accumulate on a plain module": (
        lambda job: job.fabric.no_backward_sync([job.model, job.net]),  # type: ignore[list-item]
        ArgumentTypeError,
        ["no_backward_sync with Net"],
    ),
    "reduction": (
        lambda job: job.fabric.all_reduce(1.0, reduce_op="avrg"),
        ConfigurationError,
        ["'avrg'", "'mean'"],
    ),
    "reduction as group": (
        lambda job: job.fabric.all_reduce(1.0, "sum"),  # type: ignore[arg-type]
        UsageError,
        ["group='sum'", 'Write: fabric.all_reduce(x, reduce_op="sum")'],
    ),
    "broadcast": (lambda job: job.fabric.broadcast(1, src=1), ConfigurationError, ["src=1"]),
    "environment class": (
        lambda job: Fabric(accelerator="cpu", environment=Recorded),  # type: ignore[arg-type]
        ArgumentTypeError,
        ["Recorded", "not an environment"],
    ),
    "checkpoint_io class": (
        lambda job: DDPStrategy(checkpoint_io=dict),
        ArgumentTypeError,
        ["it is not an object"],
    ),
    "checkpoint_io": (
        lambda job: SingleDeviceStrategy(checkpoint_io="x"),
        ArgumentTypeError,
        ["save", "wait"],
    ),
    "metric": (
        lambda job: single(loggers=CSVLogger(job.path)).log("loss", torch.ones(2)),
        ArgumentTypeError,
        ["'loss'", "tensor([1., 1.])", "one element"],
    ),
    "truncated checkpoint": (Job.truncated, CheckpointError, ["damaged", "state.pt"]),
    "missing key": (Job.missing_key, CheckpointError, ["'epoch'", "'model'"]),
    "save of a module": (
        lambda job: job.fabric.save(job.path, job.model),
        ArgumentTypeError,
        ["a path, then a dict"],
    ),
    "save as torch": (
        lambda job: job.fabric.save({"model": job.model}, job.path),  # type: ignore[arg-type]
        ArgumentTypeError,
        ["PosixPath", "(path, {'model': model})"],
    ),
    "plain loader": (
        lambda job: job.fabric.save(job.path, {"loader": DataLoader([1])}),
        ArgumentTypeError,
        ["DataLoader", "setup_dataloaders"],
    ),
    "seed": (lambda job: job.fabric.seed_everything(-1), ConfigurationError, ["-1"]),
}


def setup_with_one_optimizer_twice(fabric: Fabric) -> None:
    net = Net()
    optimizer = sgd(net)
    fabric.setup(net, optimizer, optimizer)


def test_setup_accepts_schedulers_after_their_optimizers() -> None:
    net = Net()
    optimizer = sgd(net)
    scheduler = StepLR(optimizer, step_size=1)
    other_optimizer = sgd(net)
    other_scheduler = StepLR(other_optimizer, step_size=1)
    with single() as fabric:
        results = fabric.setup(net, optimizer, scheduler)
        assert results[1:] == (optimizer, scheduler)
        others = fabric.setup_optimizers(other_optimizer, other_scheduler)
        assert others == (other_optimizer, other_scheduler)


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_work_is_refused_by_name_and_with_the_reason(case: str, tmp_path: Path) -> None:
    action, error, names = REFUSALS[case]
    with single() as fabric:
        net = Net()
        model, optimizer = fabric.setup(net, sgd(net))
        job = Job(fabric, net, model, optimizer, sgd(Net()), tmp_path / "state.pt")
        with pytest.raises(error) as caught:
            action(job)
    for name in names:
        assert name in str(caught.value)
    assert caught.value.problem or caught.value.expected


def test_a_missing_checkpoint_names_its_path_and_what_is_there(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.save(tmp_path / "last.pt", {"step": 1})
        with pytest.raises(CheckpointNotFoundError) as caught:
            fabric.load(tmp_path / "lasst.pt")
    assert str(tmp_path / "lasst.pt") in caught.value.request
    assert str(tmp_path / "last.pt") in caught.value.suggestion


def test_a_missing_checkpoint_suggests_no_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.save(tmp_path / "train.pt", {"step": 1})
        (tmp_path / "train.py").write_text("pass")
        (tmp_path / "unlike").write_text("it")
        with pytest.raises(CheckpointNotFoundError) as caught:
            fabric.load(tmp_path / "trian.pt")
    assert str(caught.value).endswith(f"Write: {tmp_path / 'train.pt'}")


def test_one_device_needs_no_launch() -> None:
    fabric = single()
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net))
    before = net.head.weight.detach().clone()
    loss = model(torch.ones(2, 4)).pow(2).mean()
    fabric.backward(loss)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0) > 0
    optimizer.step()
    assert not torch.equal(before, net.head.weight)
    assert fabric.all_reduce({"loss": 2.0, "n": 3}, reduce_op="sum") == {"loss": 2.0, "n": 3}
    assert fabric.all_gather(torch.ones(2)).shape == (1, 2)
    assert fabric.broadcast({"x": 1}) == {"x": 1}
    assert fabric.reduce_boolean_decision(True)
    fabric.barrier("end")
    fabric.teardown()


def test_setup_returns_what_it_was_given_in_order() -> None:
    with single() as fabric:
        net = Net()
        loaders = [DataLoader([1]), DataLoader([2])]
        optimizers = [sgd(net), sgd(net)]
        scheduler = StepLR(optimizers[1], 1)
        model, first, second, returned_scheduler = fabric.setup(
            net, *optimizers, scheduler=scheduler
        )
        assert model.module is net
        assert first is optimizers[0]
        assert second is optimizers[1]
        assert returned_scheduler is scheduler
        third = sgd(net)
        assert fabric.setup_optimizers(third) is third
        assert [loader.original for loader in fabric.setup_dataloaders(*loaders)] == loaders


class Recorder:
    """A logger and callback that records the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.calls.append((dict(metrics), step))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.calls.append(params)

    def close(self) -> None:
        self.calls.append("closed")

    def on_step(self, step: int, loss: float = 0.0) -> None:
        self.calls.append((step, loss))


class Failing(Recorder):
    def close(self) -> None:
        raise OSError("disk full")


def test_the_end_of_the_block_closes_and_a_second_teardown_does_nothing() -> None:
    logger = Recorder()
    with single(loggers=logger, strategy="ddp") as fabric:
        fabric.barrier()
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()
    fabric.teardown()
    assert logger.calls == ["closed"]


@pytest.mark.parametrize("member", ["setup", "all_reduce", "device"])
def test_a_torn_down_fabric_is_refused(member: str) -> None:
    fabric = single()
    fabric.barrier()
    fabric.teardown()
    with pytest.raises(UsageError) as caught:
        BEFORE_LAUNCH[member](fabric)
    assert "teardown() has closed this Fabric" in str(caught.value)
    assert caught.value.request == f"fabric.{member}"


def test_a_torn_down_fabric_launches_nothing() -> None:
    fabric = several()
    fabric.teardown()
    with pytest.raises(UsageError, match="teardown"):
        fabric.launch(print)


def test_everything_is_closed_even_when_one_logger_fails() -> None:
    last = Recorder()
    fabric = single(loggers=[Failing(), last], strategy="ddp")
    fabric.barrier()
    with pytest.raises(OSError, match="disk full"):
        fabric.teardown()
    assert last.calls == ["closed"]
    assert not torch.distributed.is_initialized()


def test_an_exception_in_the_block_closes_the_group_and_passes() -> None:
    def failing() -> None:
        with single(strategy="ddp") as fabric:
            fabric.barrier()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert not torch.distributed.is_initialized()


def test_hooks_are_gone_after_teardown() -> None:
    net = Net()
    with single(strategy="ddp") as fabric:
        fabric.setup(net)
        assert net.encoder._forward_hooks
    for module in net.modules():
        assert not module._forward_hooks


def test_a_strategy_object_serves_one_fabric_at_a_time() -> None:
    strategy = SingleDeviceStrategy()
    with single(strategy=strategy) as first:
        first.barrier()
        with pytest.raises(UsageError) as caught:
            single(strategy=strategy, precision="16-mixed").setup(Net())
        assert "a strategy of its own" in str(caught.value)
    with single(strategy=strategy, precision="16-mixed") as second:
        second.setup(Net())
        assert "loss scale" in second.describe()


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_what_the_user_drops_is_freed(strategy: str) -> None:
    with single(strategy=strategy) as fabric:
        net = Net()
        data = Net()
        model, optimizer = fabric.setup(net, sgd(net))
        loader = fabric.setup_dataloaders(DataLoader([1, 2], collate_fn=data))
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)
        references = list(map(weakref.ref, (net, model, optimizer, loader, data)))
        del net, model, optimizer, loader, data, loss
        gc.collect()
        for reference in references:
            assert reference() is None
        assert "Net" not in fabric.describe()


def test_is_wrapped_and_unwrap() -> None:
    with single() as fabric:
        net = Net()
        plain = DataLoader([1])
        model, optimizer = fabric.setup(net, sgd(net))
        loader = fabric.setup_dataloaders(plain)
        compiled = torch.compile(model, backend="eager")
        for value in (model, optimizer, loader, compiled):
            assert fabric.is_wrapped(value)
        for value in (net, sgd(net), plain, 3):
            assert not fabric.is_wrapped(value)
        assert fabric.unwrap(model) is net
        assert fabric.unwrap(compiled) is net
        assert isinstance(fabric.unwrap(loader), DataLoader)
        assert fabric.unwrap(net) is net


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_is_clipped_accumulated_and_saved_like_any(
    strategy: str, when: str, tmp_path: Path
) -> None:
    with single(strategy=strategy) as fabric:
        net = Net()
        if when == "before":
            model, optimizer = fabric.setup(torch.compile(net, backend="eager"), sgd(net))
        else:
            prepared, optimizer = fabric.setup(net, sgd(net))
            model = torch.compile(prepared, backend="eager")
        with fabric.no_backward_sync(model):
            loss = model(torch.ones(1, 4)).sum()
            fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        fabric.save(tmp_path / "state.pt", {"model": model})
        content = torch.load(tmp_path / "state.pt", weights_only=True)
        assert list(content["model"]) == list(net.state_dict())
        expected = net.head.bias.detach().clone()
        nn.init.zeros_(net.head.bias)
        fabric.load(tmp_path / "state.pt", {"model": model})
        assert torch.equal(net.head.bias, expected)


def test_describe_shows_what_was_resolved_and_set_up_in_order() -> None:
    with single(precision="16-mixed", strategy="ddp") as fabric:
        models = [fabric.setup(nn.Linear(1, 1)), fabric.setup(Net())]
        loader = fabric.setup_dataloaders(DataLoader([1]))
        text = fabric.describe()
    first = text.index("Linear in DistributedDataParallel")
    second = text.index("Net in DistributedDataParallel")
    assert first < second
    for name in ("cpu", "DDPStrategy", "16-mixed", "rank 0", "FabricDataLoader", "65536"):
        assert name in text
    assert len(models) == 2
    assert loader is not None


def test_callbacks_are_called_in_order_and_callbacks_without_the_hook_are_skipped() -> None:
    first = Recorder()
    second = Recorder()
    single(callbacks=[first, object(), second]).call("on_step", 3, loss=0.5)
    assert first.calls == [(3, 0.5)]
    assert second.calls == [(3, 0.5)]


def test_metrics_reach_every_logger_as_numbers(tmp_path: Path) -> None:
    recorder = Recorder()
    with single(loggers=[CSVLogger(tmp_path), recorder]) as fabric:
        assert isinstance(fabric.logger, CSVLogger)
        fabric.log_dict({"loss": torch.tensor(0.5), "epoch": 2}, step=7)
        fabric.log("lr", 0.1)
    assert recorder.calls == [({"loss": 0.5, "epoch": 2.0}, 7), ({"lr": 0.1}, None), "closed"]
    rows = (tmp_path / "run" / "version_0" / "metrics.csv").read_text().split()
    assert rows == ["step,loss,epoch,lr", "7,0.5,2.0,", ",,,0.1"]


class Loop(Fabric):
    def __init__(self, factor: int, **options: Any) -> None:
        super().__init__(accelerator="cpu", environment="none", **options)
        self.factor = factor

    def run(self, number: int, *, plus: int = 0) -> int:
        return self.factor * number + plus + self.all_reduce(self.global_rank, reduce_op="sum")


class Doubled(Loop):
    def run(self, number: int, *, plus: int = 0) -> int:
        return 2 * super().run(number, plus=plus)


def test_run_of_a_subclass_returns_its_result() -> None:
    with Loop(3, devices=1) as loop:
        assert loop.run(4, plus=1) == 13
        assert loop.run(1) == 3
    with Doubled(3, devices=1) as doubled:
        assert doubled.run(4, plus=1) == 26


def test_launch_runs_a_function_here_and_returns_its_result() -> None:
    with single() as fabric:
        assert fabric.launch(lambda job, x, y=0: (job is fabric, x + y), 1, y=2) == (True, 3)
        assert fabric.launch(lambda job: job.world_size, return_all=True) == [1]
        assert fabric.launch(lambda job: 5, return_result=False) is None


def train_one_step(fabric: Fabric, should_fail: bool) -> float:
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net))
    loss = model(torch.ones(2, 4)).sum()
    fabric.backward(loss)
    optimizer.step()
    if should_fail:
        raise ValueError("in the function")
    return loss.item()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "model_parallel"])
def test_a_launch_in_this_process_leaves_no_process_group(strategy: str) -> None:
    with single(strategy=strategy) as fabric:
        with pytest.raises(ValueError, match="in the function"):
            fabric.launch(train_one_step, should_fail=True)
        assert not torch.distributed.is_initialized()
        # The Fabric stays usable.
        torch.manual_seed(0)
        first_loss = fabric.launch(train_one_step, should_fail=False)
        assert not torch.distributed.is_initialized()
        torch.manual_seed(0)
        assert fabric.launch(train_one_step, should_fail=False) == first_loss


def train_an_argument(fabric: Fabric, net: Net, closes: bool = False) -> Callable[[], int]:
    model, optimizer = fabric.setup(net, sgd(net))
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    if closes:
        fabric.teardown()
    return lambda: 3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_returns_weights_as_several_do(strategy: str) -> None:
    net = Net()
    before = net.head.weight.detach().clone()
    with single(strategy=strategy) as fabric:
        result = fabric.launch(train_an_argument, net, return_weights=True)
        assert result() == 3
        assert (
            fabric.launch(train_an_argument, net, return_weights=True, return_result=False) is None
        )
    assert type(net.head.weight) is nn.Parameter
    assert not torch.equal(net.head.weight, before)


def test_weights_that_cannot_come_back_are_an_error_that_says_what_to_write() -> None:
    fabric = several()
    with pytest.raises(
        ArgumentTypeError, match="no argument of the function is a module"
    ) as caught:
        fabric.launch(train_an_argument, 5, return_weights=True)
    assert_four_parts(caught.value, "fabric.launch(train, model, return_weights=True)")
    with single() as one, pytest.raises(UsageError, match=r"has called fabric\.teardown\(\)"):
        one.launch(train_an_argument, Net(), closes=True, return_weights=True)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "16-mixed"])
def test_modules_and_tensors_are_created_in_the_dtype_of_the_precision(precision: str) -> None:
    with single(precision=precision) as fabric:
        with fabric.init_module():
            net = Net()
        with fabric.init_tensor():
            floats = torch.ones(2)
            integers = torch.ones(2, dtype=torch.int32)
    expected = fabric.precision.param_dtype or torch.float32
    assert net.head.weight.dtype is expected
    assert net.steps.dtype is torch.int64
    assert floats.dtype is expected
    assert integers.dtype is torch.int32
    assert torch.ones(1).dtype is torch.float32


def test_an_empty_init_draws_nothing() -> None:
    with single() as fabric:
        before = torch.get_rng_state()
        with fabric.init_module(empty_init=True):
            Net()
        assert torch.equal(torch.get_rng_state(), before)
        with fabric.init_module():
            Net()
        assert not torch.equal(torch.get_rng_state(), before)


def test_to_device_keeps_the_type_of_a_collection() -> None:
    with single() as fabric:
        net = Net()
        assert fabric.to_device(net) is net
        moved = fabric.to_device({"x": [torch.ones(1)], "pair": (torch.zeros(1), "text"), "n": 3})
    assert moved == {"x": [torch.ones(1)], "pair": (torch.zeros(1), "text"), "n": 3}


class Recorded:
    """An environment of a job that another launcher has started."""

    name = "recorded"

    def __init__(self, world: World) -> None:
        self._world = world

    def detect(self, env: Mapping[str, str]) -> World | None:
        return self._world


def test_an_environment_that_is_passed_says_who_this_is() -> None:
    world = World(
        rank=5,
        local_rank=1,
        node_rank=1,
        world_size=8,
        local_world_size=4,
        address="node0",
        port=2900,
    )
    fabric = Fabric(accelerator="cpu", environment=Recorded(world))
    assert fabric.global_rank == 5
    assert fabric.local_rank == 1
    assert fabric.node_rank == 1
    assert fabric.world_size == 8
    assert not fabric.is_global_zero
    assert "2 node(s), by recorded" in fabric.describe()


def test_nodes_with_different_numbers_of_processes_count_every_process() -> None:
    world = World(rank=4, local_rank=1, node_rank=1, world_size=5, local_world_size=2, port=2900)
    assert Fabric(accelerator="cpu", environment=Recorded(world)).world_size == 5


def test_ddp_under_torchrun_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with Fabric(accelerator="cpu", strategy="ddp") as fabric:
        fabric.launch()
        assert "by torchrun" in fabric.describe()
        net = Net()
        model, optimizer = fabric.setup(net, sgd(net))
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)
        optimizer.step()
        assert fabric.all_reduce(torch.ones(1)).item() == 1


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_ddp_refuses_a_second_backward_pass_that_would_not_synchronize(strategy: str) -> None:
    with single(strategy=strategy) as fabric:
        module = Net()
        model = fabric.setup(module)
        first = model(torch.ones(1, 4)).sum()
        second = model(torch.ones(2, 4)).sum()
        fabric.backward(first)
        with pytest.raises(UsageError) as caught:
            fabric.backward(second)
        assert_four_parts(caught.value, "second backward pass", "Net", "loss_a + loss_b")
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_ddp_refuses_a_second_backward_pass_of_any_earlier_forward_pass(strategy: str) -> None:
    with single(strategy=strategy) as fabric:
        module = Net()
        model = fabric.setup(module)
        first = model(torch.ones(1, 4)).sum()
        fabric.backward(first, retain_graph=True)
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)
        with pytest.raises(UsageError, match="second backward pass"):
            fabric.backward(first)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_ddp_refuses_a_forward_pass_without_synchronization_whose_backward_pass_synchronizes(
    strategy: str,
) -> None:
    with single(strategy=strategy) as fabric:
        module = Net()
        model = fabric.setup(module)
        with fabric.no_backward_sync(model):
            losses = [model(torch.ones(1, 4)).sum() for _ in range(3)]
        for loss in losses[:2]:
            with pytest.raises(UsageError, match="inside no_backward_sync, with backward outside"):
                fabric.backward(loss)
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)
        with pytest.raises(UsageError, match="inside no_backward_sync, with backward outside"):
            fabric.backward(losses[2])


def test_a_backward_pass_of_another_model_counts_for_that_model_alone() -> None:
    with single(strategy="ddp") as fabric:
        module = Net()
        generator = fabric.setup(module)
        critic = fabric.setup(nn.Linear(1, 1))
        fake = generator(torch.ones(2, 4)) + generator.encoder(torch.ones(2, 4)).sum()
        loss = critic(fake.detach()).sum()
        fabric.backward(loss)
        loss = critic(fake).sum()
        fabric.backward(loss)
        assert generator.module.encoder.weight.grad is not None


def test_a_penalty_may_have_a_backward_pass_of_its_own() -> None:
    with single(strategy="ddp") as fabric:
        module = nn.Linear(2, 1)
        model = fabric.setup(module)
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum()
            fabric.backward(loss)
            penalty = torch.zeros(())
            for parameter in model.parameters():
                penalty = penalty + parameter.pow(2).sum()
            fabric.backward(penalty)


def test_a_penalty_may_be_computed_between_forward_passes() -> None:
    with single(strategy="ddp") as fabric:
        module = nn.Linear(2, 1)
        model = fabric.setup(module)
        first = model(torch.ones(1, 2))
        penalty = model.module.weight.pow(2).sum()
        second = model(torch.ones(1, 2))
        fabric.backward(first.sum() + second.sum())
        fabric.backward(penalty)


def test_a_check_that_ends_in_a_failed_backward_pass_leaves_the_next_check_in_the_pass() -> None:
    with single() as fabric:
        model = fabric.setup(Net())
        assert fabric._session is not None, "setup() begins the session"
        checks = fabric._session.backward_hooks.after
        errors: list[BaseException | None] = []

        def end_check(loss: torch.Tensor, error: BaseException | None) -> None:
            checks.remove(end_check)

        def record_error(loss: torch.Tensor, error: BaseException | None) -> None:
            errors.append(error)

        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

        checks.extend([end_check, record_error])
        loss = model(torch.ones(2, 4)).sum()
        loss.register_hook(fail)
        with pytest.raises(ZeroDivisionError) as raised:
            fabric.backward(loss)
        assert errors == [raised.value]


def test_a_backward_pass_outside_of_fabric_leaves_later_passes_alone() -> None:
    with single(strategy="ddp") as fabric:
        module = nn.Linear(2, 1)
        model = fabric.setup(module)
        inputs = torch.ones(1, 2, requires_grad=True)
        model.module.weight.pow(2).sum().backward()
        loss = model(inputs).sum()
        fabric.backward(loss, retain_graph=True)
        fabric.backward(loss, inputs=[inputs])


def test_a_context_that_is_never_entered_changes_nothing() -> None:
    with single(strategy="ddp") as fabric:
        models = [fabric.setup(Net()), fabric.setup(Net())]
        context = fabric.no_backward_sync(models)
        losses = [model(torch.ones(1, 4)).sum() for model in models]
        for loss in losses:
            fabric.backward(loss)
        with context:
            losses = [model(torch.ones(1, 4)).sum() for model in models]
        for loss in losses:
            with pytest.raises(UsageError, match="inside no_backward_sync"):
                fabric.backward(loss)


def test_seeding_gives_the_same_numbers_again() -> None:
    fabric = single()
    assert fabric.seed_everything(3) == 3
    drawn = torch.rand(2)
    fabric.seed_everything(3)
    assert torch.equal(drawn, torch.rand(2))
    assert 0 <= fabric.seed_everything() < 2**32


def test_setup_of_no_loader_and_launch_of_no_function_are_errors() -> None:
    with single() as fabric:
        with pytest.raises(TypeError, match="loader"):
            fabric.setup_dataloaders()  # type: ignore[call-overload]
        with pytest.raises(ArgumentTypeError, match=r"launch\(None\)"):
            fabric.launch(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_a_method_of_the_model_is_marked_and_a_norm_is_named(strategy: str) -> None:
    with single(strategy=strategy) as fabric:
        net = Net()
        model, optimizer = fabric.setup(net, sgd(net))
        for _ in range(2):
            model.mark_forward_method(model.loss)
        loss = model.loss(torch.ones(1, 4))
        fabric.backward(loss)
        largest = 0.0
        for parameter in net.parameters():
            if parameter.grad is not None:
                largest = max(largest, parameter.grad.abs().max().item())
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf")
        assert norm.item() == largest


def test_the_package_seeds_and_seeding_on_the_class_is_refused() -> None:
    assert package.seed_everything(3) == 3
    drawn = torch.rand(2)
    single().seed_everything(3)
    assert torch.equal(drawn, torch.rand(2))
    with pytest.raises(UsageError, match="on the class"):
        Fabric.seed_everything(1)  # type: ignore[arg-type]
