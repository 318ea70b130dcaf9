"""Gradients of earlier backward passes that the user drops: nothing of them reaches a step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.ranks import run_in_ranks

WINDOWS = 2
# The second of the three micro-batches of each window is dropped, with the first.
DROPPED = 1
LAST = 2


class Clip(nn.Module):
    """Two layers, the last of which is on one rank, and a parameter that cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(self.first(x).tanh())


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Clip().double()
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def micro_batch(window: int, number: int) -> Tensor:
    """Return the samples of all ranks. Those of the dropped micro-batches are huge."""
    generator = torch.Generator().manual_seed(10 * window + number)
    samples = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    if number == LAST:
        return samples
    return 100 * samples


def train_plainly() -> list[Tensor]:
    """Return the parameters after steps with the micro-batches that are not dropped."""
    model, optimizer = make_model()
    for window in range(WINDOWS):
        optimizer.zero_grad()
        model(micro_batch(window, LAST)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def clear_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def set_to_zero_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def clear_by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def set_to_zero_by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def set_data_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


CLEARINGS = [
    clear_by_optimizer,
    set_to_zero_by_optimizer,
    clear_by_model,
    set_to_zero_by_model,
    set_data_to_zero,
]
Clear = Callable[[nn.Module, torch.optim.Optimizer], None]


def train(fabric: Fabric, clear: Clear, has_weight: bool, is_within: bool) -> list[Tensor]:
    """Return the parameters after windows whose first micro-batches are dropped.

    Args:
        fabric: the job.
        clear: drops the gradients.
        has_weight: whether the losses are sums with a weight.
        is_within: whether gradients are dropped within ``no_backward_sync``.
    """
    model, optimizer = fabric.setup(*make_model())
    for window in range(WINDOWS):
        for number in range(LAST + 1):
            rank_samples = micro_batch(window, number)[fabric.global_rank :: fabric.world_size]
            with fabric.no_backward_sync(model, enabled=number != LAST):
                errors = model(rank_samples).square()
                if has_weight:
                    fabric.backward(errors.sum(), weight=len(rank_samples))
                else:
                    fabric.backward(errors.mean())
                if is_within and number == DROPPED:
                    clear(model, optimizer)
            if not is_within and number == DROPPED:
                clear(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def train_in_all_ways(fabric: Fabric) -> list[list[Tensor]]:
    parameters: list[list[Tensor]] = []
    for clear in CLEARINGS:
        for has_weight in (False, True):
            parameters.append(train(fabric, clear, has_weight, is_within=False))
    parameters.append(train(fabric, clear_by_optimizer, has_weight=False, is_within=True))
    parameters.append(train(fabric, clear_by_optimizer, has_weight=True, is_within=True))
    return parameters


def shard(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(start_method="forkserver", auto_wrap_policy={nn.Linear}, **options)


RUNS: dict[str, Callable[..., list[Any]]] = {
    "single": partial(run_in_ranks, ranks=1, strategy="auto"),
    "ddp": run_in_ranks,
    "fsdp": partial(run_in_ranks, strategy=shard()),
    "HYBRID_SHARD": partial(
        run_in_ranks,
        ranks=4,
        strategy=shard(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    ),
    "mesh": partial(run_in_ranks, strategy=ModelParallelStrategy(data_parallel_size=2)),
}


@pytest.mark.parametrize("run", RUNS)
def test_gradients_that_are_dropped_within_a_window_reach_no_step(run: str) -> None:
    expected = train_plainly()
    for parameters_by_way in RUNS[run](train_in_all_ways):
        for actual in parameters_by_way:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def train_in_low_precision(fabric: Fabric) -> list[list[Tensor]]:
    dropped = train(fabric, clear_by_optimizer, has_weight=False, is_within=True)
    plain = train_one_micro_batch(fabric, clear_by_model, between_passes=False)
    return [dropped, plain]


def train_one_micro_batch(fabric: Fabric, clear: Clear, between_passes: bool) -> list[Tensor]:
    """Return the parameters after steps with the last micro-batch of each window alone.

    Args:
        fabric: the job.
        clear: clears the gradients of the step before.
        between_passes: clear between a forward and a backward pass, and otherwise before both.
    """
    model, optimizer = fabric.setup(*make_model())
    for window in range(WINDOWS):
        rank_samples = micro_batch(window, LAST)[fabric.global_rank :: fabric.world_size]
        if not between_passes:
            clear(model, optimizer)
        loss = model(rank_samples).square().mean()
        if between_passes:
            clear(model, optimizer)
        fabric.backward(loss)
        optimizer.step()
    return [full_tensor(parameter.detach()) for parameter in model.parameters()]


def clear_by_outer_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.ModuleList([model]).zero_grad()


def clear_by_parts(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.first.zero_grad()
    model.last.zero_grad()
    model.scale.grad = None


def clear_between_passes(fabric: Fabric) -> list[list[Tensor]]:
    clearings = [
        clear_by_optimizer,
        set_to_zero_by_optimizer,
        clear_by_model,
        set_to_zero_by_model,
    ]
    return [train_one_micro_batch(fabric, clear, between_passes=True) for clear in clearings]


def clear_before_passes(fabric: Fabric) -> list[list[Tensor]]:
    clearings = [*CLEARINGS, clear_by_outer_module, clear_by_parts]
    return [train_one_micro_batch(fabric, clear, between_passes=False) for clear in clearings]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_that_fsdp_keeps_in_another_dtype_are_dropped(precision: Any) -> None:
    for dropped, plain in run_in_ranks(
        train_in_low_precision, strategy=shard(), precision=precision
    ):
        torch.testing.assert_close(dropped, plain, rtol=0, atol=0)


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
@pytest.mark.parametrize("function", [clear_between_passes, clear_before_passes])
def test_gradients_of_the_step_before_are_cleared(
    run: str, function: Callable[[Fabric], list[list[Tensor]]]
) -> None:
    expected = train_plainly()
    for parameters_by_way in RUNS[run](function):
        for actual in parameters_by_way:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def keep_gradients(fabric: Fabric) -> list[Tensor]:
    """Return the gradients of a window in which gradients are changed in place, not dropped."""
    model, _ = fabric.setup(*make_model())
    for number in range(LAST + 1):
        rank_samples = micro_batch(0, number)[fabric.global_rank :: fabric.world_size]
        with fabric.no_backward_sync(model, enabled=number == DROPPED):
            fabric.backward(model(rank_samples).square().mean())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_gradients_that_are_changed_in_place_are_not_dropped(run: str) -> None:
    module, _ = make_model()
    for number in range(LAST + 1):
        module(micro_batch(0, number)).square().mean().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for actual in RUNS[run](keep_gradients):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def raise_zero_division(*args: Any) -> None:
    raise ZeroDivisionError


def fail_within_a_window(fabric: Fabric) -> list[Tensor]:
    """Return the gradients of a window with two forward passes that raise."""
    model, _ = fabric.setup(*make_model())
    for number in range(LAST + 1):
        rank_samples = micro_batch(0, number)[fabric.global_rank :: fabric.world_size]
        if number > 0:
            handle = model.last.register_forward_pre_hook(raise_zero_division)
            with pytest.raises(ZeroDivisionError):
                model(rank_samples)
            handle.remove()
        # The first pass reduces gradients, and the second does not.
        with fabric.no_backward_sync(model, enabled=number == DROPPED):
            fabric.backward(model(rank_samples).square().mean())
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("run", ["ddp", "fsdp"])
def test_a_forward_pass_that_raises_leaves_the_gradients_of_its_window(run: str) -> None:
    module, _ = make_model()
    for number in range(LAST + 1):
        module(micro_batch(0, number)).square().mean().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for actual in RUNS[run](fail_within_a_window):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
