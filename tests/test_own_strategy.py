"""Strategies of third parties, written as docs/how-to/write-a-strategy.md says."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fabric import Fabric
from fabric.contract import GradientContract
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.precision import PRECISIONS, LossScale
from fabric.strategies import Strategy
from fabric.testing import check_strategy
from tests.ranks import outcome, run_in_ranks

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "write-a-strategy.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
STEPS = 7
PERIOD = 3
LEARNING_RATE = 0.1
MOMENTUM = 0.9
INIT_SCALE = 2.0**10


def classes_of_the_page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        if "class " in block:
            exec(block, names)
    return names


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def batches_of_rank(rank: int, has_overflow: bool) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    batches = []
    for step in range(STEPS):
        inputs = torch.randn(6, 4, generator=generator)
        if has_overflow and rank == 1 and step == 2:
            inputs[0, 0] = float("inf")
        batches.append((inputs, torch.randn(6, 2, generator=generator)))
    return batches


def train_local_sgd(job: Fabric, precision: str, has_overflow: bool) -> list[Tensor]:
    """Return the parameters of this rank after training with the strategy of the page."""
    job.teardown()
    strategy = classes_of_the_page()["LocalSGDStrategy"](period=PERIOD)
    row = PRECISIONS[precision]
    if row.loss_scale is not None:
        row = replace(row, loss_scale=LossScale(init_scale=INIT_SCALE))
    with Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=row) as fabric:
        fabric.launch()
        module = make_model()
        model, optimizer = fabric.setup(module, make_optimizer(module))
        for inputs, targets in batches_of_rank(fabric.global_rank, has_overflow):
            loss = mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def local_sgd_by_definition(precision: str, has_overflow: bool) -> list[list[Tensor]]:
    """Return the parameters of both ranks after training as the definition says, in one process."""
    is_mixed = precision == "16-mixed"
    scale = INIT_SCALE if is_mixed else 1.0
    first = make_model()
    second = make_model()
    batches = zip(batches_of_rank(0, has_overflow), batches_of_rank(1, has_overflow), strict=True)
    # One optimizer: both ranks step or skip the step together.
    optimizer = make_optimizer(nn.ModuleList([first, second]))
    for step, (first_batch, second_batch) in enumerate(batches, 1):
        optimizer.zero_grad()
        for model, (inputs, targets) in ((first, first_batch), (second, second_batch)):
            with torch.autocast("cpu", torch.float16, enabled=is_mixed):
                output = model(inputs)
            (mse_loss(output.float(), targets) * scale).backward()
        if unscale_gradients(optimizer, scale):
            optimizer.step()
        else:
            scale /= 2
        if step % PERIOD == 0:
            average_parameters(first, second)
    return [parameters_of(first), parameters_of(second)]


def unscale_gradients(optimizer: torch.optim.Optimizer, scale: float) -> bool:
    """Divide the gradients by the loss scale, and return whether all of them are finite."""
    is_finite = True
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.div_(scale)
        if not parameter.grad.isfinite().all():
            is_finite = False
    return is_finite


@torch.no_grad()
def average_parameters(first: nn.Module, second: nn.Module) -> None:
    for parameter, replica in zip(first.parameters(), second.parameters(), strict=True):
        average = (parameter + replica) / 2
        parameter.copy_(average)
        replica.copy_(average)


@pytest.mark.parametrize(
    ("precision", "has_overflow"), [("32-true", False), ("16-mixed", False), ("16-mixed", True)]
)
def test_local_sgd_of_the_page_equals_its_definition(precision: str, has_overflow: bool) -> None:
    actual = run_in_ranks(train_local_sgd, precision, has_overflow)
    expected = local_sgd_by_definition(precision, has_overflow)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    # The last of the seven steps comes after the last average.
    first_rank, second_rank = actual
    assert not torch.equal(first_rank[0], second_rank[0])


@pytest.mark.parametrize(
    ("name", "options"), [("LocalSGDStrategy", {"period": 1}), ("ReplicatedStrategy", {})]
)
def test_the_strategies_of_the_page_conform(name: str, options: dict[str, int]) -> None:
    check_strategy(classes_of_the_page()[name](**options), world_size=2)


class LeastStrategy(Strategy):
    name = "least"

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


def gather_ranks(fabric: Fabric) -> tuple[int, list[int]]:
    return fabric.world_size, fabric.all_gather(fabric.global_rank)


def test_a_strategy_of_one_method_is_connected() -> None:
    for world_size, ranks in run_in_ranks(gather_ranks, strategy=LeastStrategy()):
        assert world_size == 2
        assert ranks == [0, 1]


def refusal_of_join(fabric: Fabric) -> str:
    model = fabric.setup(nn.Linear(2, 1))

    def join() -> None:
        with fabric.join(model):
            pass

    return outcome(join)


def test_a_strategy_that_does_not_mention_join_is_refused_there() -> None:
    for rank, text in enumerate(run_in_ranks(refusal_of_join, strategy=LeastStrategy())):
        assert f"fabric.join(...) with LeastStrategy on rank {rank}" in text


class UnconnectedStrategy(LeastStrategy):
    name = "unconnected"
    connects_processes = False


def test_several_processes_are_refused_if_the_strategy_does_not_connect_them() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", devices=2, strategy=UnconnectedStrategy())
    assert "2 processes" in str(caught.value)
    assert "connects_processes" in str(caught.value)


def test_a_strategy_that_does_not_connect_works_in_one_process() -> None:
    with Fabric(accelerator="cpu", devices=1, strategy=UnconnectedStrategy()) as fabric:
        assert gather_ranks(fabric) == (1, [0])


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class ForgetfulStrategy(Strategy):
    name = "forgetful"

    def setup_module(self, module: nn.Module) -> nn.Module:
        return Wrapper(module)


class WrappingStrategy(ForgetfulStrategy):
    name = "wrapping"

    def unwrap(self, prepared: nn.Module) -> nn.Module:
        if isinstance(prepared, Wrapper):
            prepared = prepared.inner
        return super().unwrap(prepared)


def test_a_wrapper_that_unwrap_does_not_know_is_refused() -> None:
    with (
        Fabric(accelerator="cpu", devices=1, strategy=ForgetfulStrategy()) as fabric,
        pytest.raises(UsageError, match=r"override ForgetfulStrategy\.unwrap"),
    ):
        fabric.setup(nn.Linear(2, 1))


def test_a_strategy_with_a_wrapper_keeps_the_names_of_the_user() -> None:
    with Fabric(accelerator="cpu", devices=1, strategy=WrappingStrategy()) as fabric:
        module = torch.compile(nn.Linear(2, 1), backend="eager")
        model = fabric.setup(module)
        assert set(fabric.get_state_dict(model)) == {"weight", "bias"}
        assert set(dict(model.named_parameters())) == {"weight", "bias"}


def test_a_strategy_that_returns_no_module_is_refused() -> None:
    class Returnless(LeastStrategy):
        def setup_module(self, module: nn.Module) -> Any:
            pass

    with (
        Fabric(accelerator="cpu", devices=1, strategy=Returnless()) as fabric,
        pytest.raises(ArgumentTypeError, match="returned an object of type NoneType"),
    ):
        fabric.setup(nn.Linear(2, 1))


def test_help_shows_what_the_defaults_of_the_contract_return() -> None:
    signature = str(inspect.signature(GradientContract))
    assert "= <returns False>" in signature
    assert "<function" not in signature
    assert "<class" not in signature
