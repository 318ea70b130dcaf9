"""Averaged weights: those of torch's AveragedModel in one process, under every strategy and number of processes."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

# a batch that divides by 1 to 4 ranks
DECAY = 0.9
STEPS = 10
BATCH = 12
Fsdp = partial(FSDPStrategy, start_method="forkserver")


class Uneven(nn.Module):
    """Layers whose rows do not divide by two or three ranks, a shared weight, a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5, bias=False), nn.Linear(5, 5)])
        self.blocks[1].weight = self.blocks[0].weight
        self.decay = nn.Parameter(torch.tensor(0.5))  # a name that the average has, too

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x).tanh()
        return (x * self.decay).sum(-1)


def make() -> tuple[Uneven, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Uneven().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(BATCH, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS))


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: full_tensor(each).detach().clone()
        for name, each in state.items()
        if isinstance(each, Tensor)
    }


def plain() -> dict[str, Tensor]:
    """What torch averages in one process."""
    model, optimizer = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    return {name: each.detach() for name, each in average.module.named_parameters()}


def train(fabric: Fabric) -> tuple[Any, Any, ExponentialMovingAverage]:
    model, optimizer = fabric.setup(*make())
    ema = fabric.ema(model, DECAY)
    for batch in batches():
        optimizer.zero_grad()
        fabric.backward(model(batch[fabric.global_rank :: fabric.world_size]).square().mean())
        optimizer.step()
        ema.update()
    return model, optimizer, ema


def trained(fabric: Fabric, path: str | None = None) -> dict[str, Tensor]:
    model, optimizer, ema = train(fabric)
    if path is not None:
        fabric.save(path, {"model": model, "optimizer": optimizer, "ema": ema})
    return whole(ema.state_dict())


def loaded(fabric: Fabric, path: str) -> dict[str, Any]:
    model, optimizer = fabric.setup(*make())
    ema = fabric.ema(model)
    fabric.load(path, {"model": model, "optimizer": optimizer, "ema": ema})
    first = whole(ema.state_dict())
    ema.update()  # by the default decay: it is not the first
    moved = (whole(ema.state_dict())["first.weight"] - first["first.weight"]).abs().max().item()
    return {"average": first, "moved": moved, "updates": ema.get_extra_state()}


def single(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    with Fabric(accelerator="cpu", **{"devices": 1, **options}) as fabric:
        return [function(fabric, *args)]


RUNS = {
    "single": partial(single, precision="64-true"),
    "dp": partial(single, devices=2, strategy="dp", precision="64-true"),
    "ddp": partial(run_in_ranks, precision="64-true"),
    "fsdp": lambda *args: run_in_ranks(*args, strategy=Fsdp(), precision="64-true"),
    "fsdp on 3": lambda *args: run_in_ranks(*args, ranks=3, strategy=Fsdp(), precision="64-true"),
    "full file": lambda *args: run_in_ranks(
        *args, strategy=Fsdp(state_dict_type="full"), precision="64-true"
    ),
    "hybrid": lambda *args: run_in_ranks(
        *args,
        strategy=Fsdp(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)),
        precision="64-true",
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_averages_are_those_of_torch_in_one_process(run: str, tmp_path: Path) -> None:
    expected = plain()
    for average in RUNS[run](trained):
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("saver", "loaders"), [("fsdp", ["fsdp on 3", "ddp", "single"]), ("full file", ["fsdp"])]
)
def test_averages_load_into_any_strategy_and_number_of_processes(
    saver: str, loaders: list[str], tmp_path: Path
) -> None:
    expected = RUNS[saver](trained, str(tmp_path / "saved"))[0]
    for loader in loaders:
        for result in RUNS[loader](loaded, str(tmp_path / "saved")):
            torch.testing.assert_close(result["average"], expected, rtol=0, atol=0)
            assert 0 < result["moved"] < 0.01
            assert result["updates"] == STEPS + 1


# -- applied() --------------------------------------------------------------------------------------------------------


def held(model: nn.Module) -> list[Tensor]:
    return [local_tensor(parameter).detach().clone() for parameter in model.parameters()]


def swapped(fabric: Fabric) -> dict[str, Any]:
    model, optimizer, ema = train(fabric)
    batch = next(batches())
    reference = make()[0]
    before = held(model)
    reference.load_state_dict(whole(ema.state_dict()), strict=False)
    reference.blocks[1].weight = reference.blocks[0].weight

    def validate() -> Tensor:
        with torch.no_grad():
            return model(batch)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def swap(call: Callable[[], Tensor]) -> Tensor:
        with ema.applied():
            return call()

    own = validate()
    averages = [swap(validate), swap(lambda: model(batch)), swap(lambda: swap(validate))]
    owns = [validate(), model(batch).detach()]
    averages.append(
        swap(validate)
    )  # the pass with gradients, and no backward pass, has left weights gathered
    averages.append(swap(torch.enable_grad()(lambda: model(batch).detach())))
    owns.append(validate())
    handle = model.blocks[1].register_forward_pre_hook(fail)
    failures = [outcome(lambda: swap(validate)), outcome(lambda: swap(lambda: model(batch)))]
    handle.remove()
    owns.append(validate())
    kept = all(torch.equal(one, other) for one, other in zip(held(model), before, strict=True))
    ends = []
    for one, its_optimizer in ((model, optimizer), train(fabric)[:2]):
        its_optimizer.zero_grad()
        fabric.backward(one(batch).square().mean())
        its_optimizer.step()
        ends.append(held(one))
    return {
        "averages": all(
            torch.allclose(average, reference(batch), rtol=1e-12, atol=1e-12)
            for average in averages
        ),
        "own": all(torch.equal(each, own) for each in owns),
        "differ": not torch.allclose(own, averages[0], rtol=1e-3),
        "failures": all(failure.startswith("ZeroDivisionError") for failure in failures),
        "gradients": not any(average.requires_grad for average in averages),
        "kept": kept,
        "the next step": all(torch.equal(one, other) for one, other in zip(*ends, strict=True)),
    }


SHARD_GRAD_OP = partial(
    run_in_ranks, strategy=Fsdp(sharding_strategy="SHARD_GRAD_OP"), precision="64-true"
)


@pytest.mark.parametrize("run", [*RUNS.values(), SHARD_GRAD_OP], ids=[*RUNS, "SHARD_GRAD_OP"])
def test_the_averages_are_applied_and_the_weights_put_back_bit_for_bit(
    run: Callable[..., Any],
) -> None:
    for result in run(swapped):
        assert [name for name, is_right in result.items() if not is_right] == []


def counted(fabric: Fabric) -> tuple[list[int], list[str]]:
    model, _, ema = train(fabric)
    batch = next(batches())
    counts = []

    def swap() -> None:
        with ema.applied():
            ema.state_dict()

    for action in (ema.update, swap, lambda: model(batch)):
        with CommDebugMode() as mode:
            action()
        counts.append(mode.get_total_counts())
    errors = []
    for function, module in (
        (AveragedModel, model),
        (copy.deepcopy, model),
        (AveragedModel, model.module),
    ):
        with pytest.raises(Exception, match=r"deepcopy|sharded") as raised:
            function(module)
        fabric.strategy._explain(raised.value)  # as for one that leaves the loop
        errors.append("\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])]))
    return counts, errors


def test_an_update_is_no_collective_and_copies_of_sharded_models_point_to_it() -> None:
    for counts, errors in RUNS["fsdp"](counted):
        assert counts[:2] == [0, 0]
        assert counts[2] > 0
        assert all("fabric.ema(model)" in error for error in errors)


# -- in one process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1, precision="bf16-true") as fabric:
        yield fabric


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.fill_(value)


def test_averages_of_bfloat16_weights_are_float32_and_begin_with_the_first_update(
    fabric: Fabric,
) -> None:
    model = fabric.setup(nn.Linear(2, 2))
    ema = fabric.ema(model)
    started = ema.state_dict()["weight"].clone()
    assert torch.equal(started, model.weight.float())
    fill(model, 1.0)
    ema.update()
    assert ema.state_dict()["weight"].eq(1).all()
    fill(model, 2.0)
    ema.update()
    torch.testing.assert_close(ema.state_dict()["bias"], torch.full((2,), 1.001))
    with ema.applied():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.eq(1).all()
    assert model.weight.eq(2).all()


def test_a_decay_may_depend_on_the_number_of_updates(fabric: Fabric) -> None:
    model = fabric.setup(nn.Linear(2, 2))
    asked = []
    ema = fabric.ema(model, lambda updates: asked.append(updates) or 1 - 1 / (updates + 1))
    for value in (1.0, 2.0, 6.0):
        fill(model, value)
        ema.update()
    assert asked == [1, 2]
    torch.testing.assert_close(
        ema.state_dict()["bias"], torch.full((2,), 3.0)
    )  # the mean, with this schedule
    ema.load_state_dict(fabric.ema(model).state_dict())
    ema.update()
    assert asked == [1, 2], "the number of updates is loaded, too"


def test_buffers_are_averaged_where_that_is_chosen(fabric: Fabric) -> None:
    model = fabric.setup(nn.BatchNorm1d(2))
    without = fabric.ema(model)
    ema = fabric.ema(model, 0.5, buffers=True)
    for value in (1.0, 3.0):
        fill(model, value)
        ema.update()
        without.update()
    with without.applied():
        assert model.running_mean.eq(3).all()
    with ema.applied():
        assert model.running_mean.eq(2).all()
        assert model.num_batches_tracked == 3, "the latest value of what is not floating point"
    assert model.running_mean.eq(3).all()
    assert "running_mean" not in without.state_dict()


class Caching(nn.Linear):
    """Keeps a table as long as the input, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.register_buffer("table", torch.zeros(len(input)))
        self.register_buffer("length", torch.tensor(len(input)))
        return super().forward(input)


def test_weights_are_put_back_beside_buffers_that_a_forward_pass_has_replaced(
    fabric: Fabric,
) -> None:
    model = fabric.setup(Caching())
    ema = fabric.ema(model, 0.5, buffers=True)
    fill(model, 1.0)
    with ema.applied():
        model(torch.ones(3, 1))
        assert model.weight != 1
    assert model.weight == model.bias == 1
    with pytest.raises(UsageError, match=r"added to the model.*length"):
        ema.update()


def test_weights_that_autocast_has_cast_before_are_not_used_again() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="bf16-mixed") as fabric:
        model = fabric.setup(nn.Linear(2, 1))
        fill(model, 0.0)
        ema = fabric.ema(model)
        fill(model, 1.0)
        with fabric.autocast():
            outputs = [model(torch.ones(1, 2)).item()]
            with ema.applied():
                outputs.append(model(torch.ones(1, 2)).item())
            outputs.append(model(torch.ones(1, 2)).item())
    assert outputs == [3.0, 0.0, 3.0]


def test_what_cannot_be_averaged_is_refused(fabric: Fabric, tmp_path: Path) -> None:
    model = fabric.setup(nn.Sequential(nn.Linear(2, 2)))
    others: list[Any] = [nn.Linear(2, 2), model.module, copy.deepcopy(model)]
    for module in others:
        assert "set" in outcome(lambda module=module: fabric.ema(module))
    for decay in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigurationError, match="decay"):
            fabric.ema(model, decay)
    ema = fabric.ema(model, lambda updates: 2.0)
    ema.update()
    with pytest.raises(ConfigurationError, match=r"decay=2\.0"):
        ema.update()
    with ema.applied(), pytest.raises(UsageError, match="within"):
        ema.update()
    fabric.save(tmp_path / "saved", {"ema": ema})
    with pytest.raises(CheckpointError, match=r"other shapes: 0\.weight"):
        fabric.load(
            tmp_path / "saved", {"ema": fabric.ema(fabric.setup(nn.Sequential(nn.Linear(3, 2))))}
        )
    model.module.append(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"1.bias, 1.weight"), ema.applied():
        pass
