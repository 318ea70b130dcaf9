"""Averaged weights equal torch's AveragedModel in one process, under every strategy."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fabric import Fabric
from fabric._torch import full_tensor, local_tensor
from fabric.errors import CheckpointError, ConfigurationError, UsageError
from fabric.optim.ema import ExponentialMovingAverage
from fabric.strategies import FSDPStrategy
from tests.ranks import run_in_ranks

DECAY = 0.9
STEPS = 10
# The batch divides by 1 to 4 ranks.
BATCH = 12


class Uneven(nn.Module):
    """A model with uneven rows, a shared weight and a parameter without a dimension.

    The rows of its layers do not divide by two or three ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        first_block = nn.Linear(5, 5, bias=False)
        second_block = nn.Linear(5, 5)
        second_block.weight = first_block.weight
        self.blocks = nn.ModuleList([first_block, second_block])
        # The average has an attribute of this name, too.
        self.decay = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x).tanh()
        return (x * self.decay).sum(-1)


def make() -> tuple[Uneven, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Uneven().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    return model, optimizer


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)


def full_state(state: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensor = full_tensor(value).detach()
            tensors[name] = tensor.clone()
    return tensors


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def assert_close(actual: Any, expected: Any) -> None:
    """Compare numbers of steps in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare tensors bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def train_plainly() -> dict[str, Tensor]:
    """Return the averages of torch in one process."""
    model, optimizer = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in batches():
        optimizer.zero_grad()
        loss = mean_square(model(batch))
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    return {name: parameter.detach() for name, parameter in average.module.named_parameters()}


def train(fabric: Fabric) -> tuple[Any, Any, ExponentialMovingAverage]:
    model, optimizer = fabric.setup(*make())
    ema = fabric.ema(model, DECAY)
    for batch in batches():
        rank_samples = batch[fabric.global_rank :: fabric.world_size]
        step_once(fabric, model, optimizer, rank_samples)
        ema.update()
    return model, optimizer, ema


def train_averages(fabric: Fabric, path: str | None = None) -> dict[str, Tensor]:
    model, optimizer, ema = train(fabric)
    if path is not None:
        fabric.save(path, {"model": model, "optimizer": optimizer, "ema": ema})
    return full_state(ema.state_dict())


class LoadedAverage(NamedTuple):
    """A loaded average, how far an update moves it, and the number of updates after that."""

    average: dict[str, Tensor]
    distance: float
    updates: int


def load_averages(fabric: Fabric, path: str) -> LoadedAverage:
    model, optimizer = fabric.setup(*make())
    ema = fabric.ema(model)
    fabric.load(path, {"model": model, "optimizer": optimizer, "ema": ema})
    average = full_state(ema.state_dict())
    # This is not the first update: it moves the average by the default decay.
    ema.update()
    moved_average = full_state(ema.state_dict())
    movement = moved_average["first.weight"] - average["first.weight"]
    return LoadedAverage(
        average=average,
        distance=movement.abs().max().item(),
        updates=ema.get_extra_state(),
    )


def run_in_one_process(
    function: Callable[..., Any], *args: Any, devices: int = 1, **options: Any
) -> list[Any]:
    with Fabric(accelerator="cpu", devices=devices, precision="64-true", **options) as fabric:
        return [function(fabric, *args)]


def run_sharded(
    function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any
) -> list[Any]:
    strategy = FSDPStrategy(start_method="forkserver", **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy, precision="64-true")


RUNS: dict[str, Callable[..., list[Any]]] = {
    "single": run_in_one_process,
    "dp": partial(run_in_one_process, devices=2, strategy="dp"),
    "ddp": partial(run_in_ranks, precision="64-true"),
    "fsdp": run_sharded,
    "fsdp on 3": partial(run_sharded, ranks=3),
    "full file": partial(run_sharded, state_dict_type="full"),
    "hybrid": partial(run_sharded, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)),
}


@pytest.mark.parametrize("run", RUNS)
def test_averages_are_those_of_torch_in_one_process(run: str) -> None:
    expected = train_plainly()
    for average in RUNS[run](train_averages):
        assert_close(average, expected)


@pytest.mark.parametrize(
    ("saver", "loaders"), [("fsdp", ["fsdp on 3", "ddp", "single"]), ("full file", ["fsdp"])]
)
def test_averages_load_into_any_strategy_and_number_of_processes(
    saver: str, loaders: list[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    averages = RUNS[saver](train_averages, path)
    for loader in loaders:
        for result in RUNS[loader](load_averages, path):
            assert_equal(result.average, averages[0])
            assert result.distance > 0
            assert result.distance < 0.01
            assert result.updates == STEPS + 1


# -- applied() -------------------------------------------------------------------------------------


def local_parameters(model: nn.Module) -> list[Tensor]:
    parameters = []
    for parameter in model.parameters():
        shard = local_tensor(parameter).detach()
        parameters.append(shard.clone())
    return parameters


def with_averages(ema: ExponentialMovingAverage, forward: Callable[[], Tensor]) -> Tensor:
    with ema.applied():
        return forward()


def step_once(fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss = mean_square(model(batch))
    fabric.backward(loss)
    optimizer.step()


def check_outputs(model: Any, ema: ExponentialMovingAverage, batch: Tensor) -> None:
    """Check that passes inside ``applied()`` see the averages, and later passes the weights."""
    averages = full_state(ema.state_dict())
    reference, _ = make()
    reference.load_state_dict(averages, strict=False)
    reference.blocks[1].weight = reference.blocks[0].weight
    expected = reference(batch)

    def validate() -> Tensor:
        with torch.no_grad():
            return model(batch)

    def forward_with_gradients() -> Tensor:
        with torch.enable_grad():
            return model(batch).detach()

    output_of_weights = validate()
    outputs = [
        with_averages(ema, validate),
        with_averages(ema, lambda: model(batch)),
        with_averages(ema, lambda: with_averages(ema, validate)),
    ]
    assert_equal(validate(), output_of_weights)
    assert_equal(model(batch).detach(), output_of_weights)
    # The last pass had gradients and no backward pass: it has left weights gathered.
    outputs.append(with_averages(ema, validate))
    outputs.append(with_averages(ema, forward_with_gradients))
    assert_equal(validate(), output_of_weights)
    for output in outputs:
        assert not output.requires_grad
        assert_close(output, expected)
        assert not torch.allclose(output, output_of_weights, rtol=1e-3)


def check_failing_passes(model: Any, ema: ExponentialMovingAverage, batch: Tensor) -> None:
    """Check that a pass that raises inside of ``applied()`` puts the weights back."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def validate() -> Tensor:
        with torch.no_grad():
            return model(batch)

    output_of_weights = validate()
    handle = model.blocks[1].register_forward_pre_hook(fail)
    for forward in (validate, lambda: model(batch)):
        with pytest.raises(ZeroDivisionError):
            with_averages(ema, forward)
    handle.remove()
    assert_equal(validate(), output_of_weights)


def check_applied(fabric: Fabric) -> None:
    model, optimizer, ema = train(fabric)
    batch = next(batches())
    weights = local_parameters(model)
    check_outputs(model, ema, batch)
    check_failing_passes(model, ema, batch)
    assert_equal(local_parameters(model), weights)
    # The next step is that of a model whose averages have never been applied.
    untouched_model, untouched_optimizer, _ = train(fabric)
    step_once(fabric, model, optimizer, batch)
    step_once(fabric, untouched_model, untouched_optimizer, batch)
    assert_equal(local_parameters(model), local_parameters(untouched_model))


RUNS_OF_APPLIED = {
    **RUNS,
    "SHARD_GRAD_OP": partial(run_sharded, sharding_strategy="SHARD_GRAD_OP"),
}


@pytest.mark.parametrize("run", RUNS_OF_APPLIED)
def test_the_averages_are_applied_and_the_weights_put_back_bit_for_bit(run: str) -> None:
    RUNS_OF_APPLIED[run](check_applied)


def count_collectives(fabric: Fabric) -> dict[str, int]:
    model, _, ema = train(fabric)
    batch = next(batches())

    def read_averages() -> None:
        with ema.applied():
            ema.state_dict()

    actions = {
        "update": ema.update,
        "applied": read_averages,
        "forward": lambda: model(batch),
    }
    counts = {}
    for name, action in actions.items():
        with CommDebugMode() as mode:
            action()
        counts[name] = mode.get_total_counts()
    return counts


def test_an_update_is_no_collective() -> None:
    for counts in run_sharded(count_collectives):
        assert counts["update"] == 0
        assert counts["applied"] == 0
        assert counts["forward"] > 0


def errors_of_copies(fabric: Fabric) -> list[str]:
    model, _, _ = train(fabric)
    copies: list[Callable[[], Any]] = [
        lambda: AveragedModel(model),
        lambda: copy.deepcopy(model),
        lambda: AveragedModel(model.module),
    ]
    errors = []
    for make_copy in copies:
        with pytest.raises(Exception, match=r"deepcopy|sharded") as raised:
            make_copy()
        # Fabric explains an error that leaves the loop.
        error = raised.value
        fabric.strategy._explain_error(error)
        notes = getattr(error, "__notes__", [])
        text = "\n".join([str(error), *notes])
        errors.append(text)
    return errors


def test_copies_of_sharded_models_point_to_the_average() -> None:
    for errors in run_sharded(errors_of_copies):
        assert len(errors) == 3
        for error in errors:
            assert "fabric.ema(model)" in error


# -- in one process --------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1, precision="bf16-true") as fabric:
        yield fabric


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


def test_averages_of_bfloat16_weights_are_float32_and_begin_with_the_first_update(
    fabric: Fabric,
) -> None:
    module = nn.Linear(2, 2)
    model = fabric.setup(module)
    ema = fabric.ema(model)
    weight = ema.state_dict()["weight"]
    assert torch.equal(weight, model.weight.float())
    fill(model, 1.0)
    ema.update()
    weight = ema.state_dict()["weight"]
    assert weight.eq(1).all()
    fill(model, 2.0)
    ema.update()
    bias = ema.state_dict()["bias"]
    torch.testing.assert_close(bias, torch.full((2,), 1.001))
    with ema.applied():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.eq(1).all()
    assert model.weight.eq(2).all()


def test_a_decay_may_depend_on_the_number_of_updates(fabric: Fabric) -> None:
    module = nn.Linear(2, 2)
    model = fabric.setup(module)
    counts = []

    def decay_of_mean(updates: int) -> float:
        counts.append(updates)
        return 1 - 1 / (updates + 1)

    ema = fabric.ema(model, decay_of_mean)
    for value in (1.0, 2.0, 6.0):
        fill(model, value)
        ema.update()
    assert counts == [1, 2]
    bias = ema.state_dict()["bias"]
    mean = torch.full((2,), 3.0)
    torch.testing.assert_close(bias, mean)
    state_without_updates = fabric.ema(model).state_dict()
    ema.load_state_dict(state_without_updates)
    ema.update()
    assert counts == [1, 2], "the number of updates is loaded, too"


def test_buffers_are_averaged_where_that_is_chosen(fabric: Fabric) -> None:
    module = nn.BatchNorm1d(2)
    model = fabric.setup(module)
    ema_of_parameters = fabric.ema(model)
    ema = fabric.ema(model, 0.5, buffers=True)
    for value in (1.0, 3.0):
        fill(model, value)
        ema.update()
        ema_of_parameters.update()
    with ema_of_parameters.applied():
        assert model.running_mean.eq(3).all()
    with ema.applied():
        assert model.running_mean.eq(2).all()
        # A buffer of integers has its latest value.
        assert model.num_batches_tracked == 3
    assert model.running_mean.eq(3).all()
    assert "running_mean" not in ema_of_parameters.state_dict()


class Caching(nn.Linear):
    """Keeps a table as long as the input, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        length = len(input)
        self.register_buffer("table", torch.zeros(length))
        self.register_buffer("length", torch.tensor(length))
        return super().forward(input)


def test_weights_are_put_back_beside_buffers_that_a_forward_pass_has_replaced(
    fabric: Fabric,
) -> None:
    module = Caching()
    model = fabric.setup(module)
    ema = fabric.ema(model, 0.5, buffers=True)
    fill(model, 1.0)
    with ema.applied():
        model(torch.ones(3, 1))
        assert model.weight != 1
    assert model.weight == 1
    assert model.bias == 1
    with pytest.raises(UsageError, match=r"added to the model.*length"):
        ema.update()


def test_weights_that_autocast_has_cast_before_are_not_used_again() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="bf16-mixed") as fabric:
        module = nn.Linear(2, 1)
        model = fabric.setup(module)
        fill(model, 0.0)
        ema = fabric.ema(model)
        fill(model, 1.0)
        inputs = torch.ones(1, 2)
        with fabric.autocast():
            assert model(inputs).item() == 3.0
            with ema.applied():
                assert model(inputs).item() == 0.0
            assert model(inputs).item() == 3.0


def test_modules_that_were_not_set_up_are_refused(fabric: Fabric) -> None:
    model = fabric.setup(nn.Sequential(nn.Linear(2, 2)))
    modules: list[Any] = [nn.Linear(2, 2), model.module, copy.deepcopy(model)]
    for module in modules:
        with pytest.raises(Exception, match="set"):
            fabric.ema(module)


def test_decays_outside_of_0_to_1_are_refused(fabric: Fabric) -> None:
    module = nn.Linear(2, 2)
    model = fabric.setup(module)
    for decay in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigurationError, match="decay"):
            fabric.ema(model, decay)
    ema = fabric.ema(model, lambda updates: 2.0)
    ema.update()
    with pytest.raises(ConfigurationError, match=r"decay=2\.0"):
        ema.update()


def test_an_update_while_the_averages_are_applied_is_refused(fabric: Fabric) -> None:
    module = nn.Linear(2, 2)
    model = fabric.setup(module)
    ema = fabric.ema(model)
    ema.update()
    with ema.applied(), pytest.raises(UsageError, match="within"):
        ema.update()


def test_averages_of_a_model_of_other_shapes_are_refused(fabric: Fabric, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    module = nn.Sequential(nn.Linear(2, 2))
    model = fabric.setup(module)
    ema = fabric.ema(model)
    fabric.save(path, {"ema": ema})
    wider_model = fabric.setup(nn.Sequential(nn.Linear(3, 2)))
    wider_ema = fabric.ema(wider_model)
    with pytest.raises(CheckpointError, match=r"other shapes: 0\.weight"):
        fabric.load(path, {"ema": wider_ema})


def test_averages_of_a_model_that_has_grown_are_not_applied(fabric: Fabric) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    model = fabric.setup(module)
    ema = fabric.ema(model)
    ema.update()
    model.module.append(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"1.bias, 1.weight"), ema.applied():
        pass
