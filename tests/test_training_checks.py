"""Mistakes in the first steps of an optimizer raise. Steps that are only unusual do not."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.diagnostics.training_checks import fingerprint
from tests.models import Net, OneWeight
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

X = torch.ones(2, 4)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.left_out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def make(
    fabric: Fabric, net: nn.Module | None = None, lr: float = 0.1
) -> tuple[Any, torch.optim.Optimizer]:
    if net is None:
        net = Net()
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=lr))


def step(
    fabric: Fabric,
    model: Any,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor = X,
    times: int = 1,
) -> None:
    for _ in range(times):
        fabric.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


# -- on two ranks: what raises ---------------------------------------------------------------------


def step_and_look_again(fabric: Fabric, optimizer: torch.optim.Optimizer) -> None:
    """Make two steps, since the first rank finds another rank's difference in its next step."""
    try:
        optimizer.step()
    finally:
        fabric.barrier()
    optimizer.step()


def changed_on_one_rank(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    with torch.no_grad():
        model.head.weight.add_(fabric.global_rank)
    fabric.backward(model(X).sum())
    step_and_look_again(fabric, optimizer)


def other_hyperparameters(fabric: Fabric) -> None:
    model, optimizer = make(fabric, lr=0.1 + fabric.global_rank)
    fabric.backward(model(X).sum())
    step_and_look_again(fabric, optimizer)


def step_on_local_gradients(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    with fabric.no_backward_sync(model):
        fabric.backward(model(X + fabric.global_rank).sum())
    step_and_look_again(fabric, optimizer)


def foreign_parameter(fabric: Fabric) -> None:
    net = OneWeight()
    temperature = nn.Parameter(torch.ones(3))
    model, optimizer = fabric.setup(net, torch.optim.SGD([*net.parameters(), temperature], lr=0.1))
    fabric.backward(model(X[0]) + (fabric.global_rank + 1) * temperature.sum())
    step_and_look_again(fabric, optimizer)


def unused_parameter(fabric: Fabric) -> None:
    step(fabric, *make(fabric, TwoParts()))


def unfrozen_parameter(fabric: Fabric) -> None:
    net = Net()
    net.encoder.requires_grad_(False)
    model, optimizer = make(fabric, net)
    step(fabric, model, optimizer, times=3)
    model.encoder.requires_grad_(True)
    step(fabric, model, optimizer)


def unfrozen_module(fabric: Fabric) -> None:
    model, _ = make(fabric, OneWeight().requires_grad_(False))
    model.weight.requires_grad_(True)
    fabric.backward(model(X[0]))


RAISE = {
    changed_on_one_rank: "ranks 0 and 1 differ after it: head.weight",
    other_hyperparameters: "ranks 0 and 1 differ after it: encoder.weight, encoder.bias",
    step_on_local_gradients: "outside of no_backward_sync",
    foreign_parameter: (
        "ranks 0 and 1 differ after it: parameter 1 of the optimizer, which no set-up module has"
    ),
    unused_parameter: "no gradient has arrived at left_out.weight, left_out.bias of TwoParts",
    unfrozen_parameter: (
        "frozen when it was set up, or absent, and their gradients would not be synchronized: "
        "encoder"
    ),
    unfrozen_module: "their gradients would not be synchronized: weight",
}


def run_mistakes(fabric: Fabric) -> dict[str, str]:
    results = {}
    for mistake in RAISE:
        results[mistake.__name__] = outcome(partial(mistake, fabric))
        fabric.barrier(mistake.__name__)
    return results


def test_what_trains_wrongly_on_two_ranks_raises_on_each() -> None:
    for rank, results in enumerate(run_in_ranks(run_mistakes)):
        for mistake, text in RAISE.items():
            error = results[mistake.__name__]
            assert text in error, (rank, mistake.__name__, error)
            assert f"rank {rank}" in error
            assert "Write: " in error


def test_without_the_check_nothing_is_watched() -> None:
    watchdog_hooks = 2  # they record the step
    results = run_in_ranks(hooks_without_check, check_training=False)
    assert results == [(watchdog_hooks, "fine")] * 2


def hooks_without_check(fabric: Fabric) -> tuple[int, str]:
    model, optimizer = make(fabric, lr=0.1 + fabric.global_rank)
    return hooks(optimizer), outcome(lambda: step(fabric, model, optimizer, times=3))


# -- on two ranks: what does not -------------------------------------------------------------------


def adversaries(fabric: Fabric) -> None:
    maker, maker_optimizer = make(fabric, nn.Linear(4, 4))
    judge, judge_optimizer = make(fabric)
    for _ in range(3):
        fabric.backward(judge(maker(X + fabric.global_rank).detach()).sum())
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        fabric.backward(judge(maker(X + fabric.global_rank)).sum())
        maker_optimizer.step()
        maker_optimizer.zero_grad()


def accumulation(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for number in range(9):
        with fabric.no_backward_sync(model, enabled=number % 3 < 2):
            fabric.backward(model(X * fabric.global_rank + number).sum())
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def frozen_part(fabric: Fabric) -> None:
    net = Net()
    net.encoder.requires_grad_(False)
    step(fabric, *make(fabric, net), times=3)


def gradients_dropped_on_purpose(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for _ in range(3):
        fabric.backward(model(X).sum())
        model.head.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()


def closures(fabric: Fabric) -> None:
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.LBFGS(net.parameters(), max_iter=2))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).pow(2).mean()
        fabric.backward(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)


def turns(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    second_model, second_optimizer = make(fabric)
    for model_in_turn in (model, second_model, model, second_model):
        fabric.backward(model_in_turn(X).sum())
        for optimizer_of_both in (optimizer, second_optimizer):
            optimizer_of_both.step()
            optimizer_of_both.zero_grad()


def step_in_backward(fabric: Fabric) -> None:
    # All ranks have the same batch: under DDP, gradients are not reduced yet when this hook runs.
    net = Net()
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}
    for parameter in net.parameters():
        optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)
    model, *_ = fabric.setup(net, *optimizers.values())

    def step_of_parameter(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_of_parameter)
    for _ in range(3):
        fabric.backward(model(X).sum())
        model.zero_grad()


def reduced_by_the_user(fabric: Fabric) -> None:
    net = OneWeight()
    temperature = nn.Parameter(torch.ones(3))
    model, optimizer = fabric.setup(net, torch.optim.SGD([*net.parameters(), temperature], lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(X[0]) + fabric.global_rank * temperature.sum())
        temperature.grad = fabric.all_reduce(temperature.grad)
        optimizer.step()


def sharded_in_place(fabric: Fabric) -> None:
    # Under DDP a forward pass of the user's own module raises.
    if fabric.strategy.name != "fsdp":
        return
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fabric.setup(net, optimizer)  # sharded in place: what is returned may be dropped
    before = fabric.strategy.get_module_state_dict(net)
    step(fabric, net, optimizer, X + fabric.global_rank, times=3)
    after = fabric.strategy.get_module_state_dict(net)
    assert not torch.equal(before["head.bias"], after["head.bias"])


def dropped(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    step(fabric, model, optimizer)
    watched = [weakref.ref(model.module), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    for reference in watched:
        assert reference() is None


def compiled(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    step(fabric, torch.compile(model, backend="eager"), optimizer, times=3)


ALLOWED = (
    adversaries,
    accumulation,
    frozen_part,
    gradients_dropped_on_purpose,
    closures,
    turns,
    step_in_backward,
    reduced_by_the_user,
    sharded_in_place,
    dropped,
    compiled,
)


def run_allowed(fabric: Fabric) -> dict[str, str]:
    results: dict[str, str] = {}
    for habit in ALLOWED:
        # LBFGS does not support sharded parameters.
        if habit is closures and fabric.strategy.name == "fsdp":
            continue
        results[habit.__name__] = outcome(partial(habit, fabric))
    return results


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp"}, {"ranks": 1}], ids=str)
def test_what_is_only_unusual_does_not_raise(options: dict[str, Any]) -> None:
    for results in run_in_ranks(run_allowed, **options):
        assert set(results.values()) == {"fine"}, results


def unused_under_find_unused(fabric: Fabric) -> str:
    return outcome(lambda: step(fabric, *make(fabric, TwoParts()), times=3))


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_parts_may_stay_unused_where_that_was_said(option: str) -> None:
    from fabric.strategies import DDPStrategy

    strategy = DDPStrategy(start_method="forkserver", **{option: True})
    assert run_in_ranks(unused_under_find_unused, strategy=strategy) == ["fine", "fine"]


# -- in one process --------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Any:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        yield fabric


def test_hooks_are_gone_after_the_first_steps(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    assert hooks(optimizer) == 2
    step(fabric, model, optimizer, times=3)
    assert hooks(optimizer) == 0


def test_hooks_are_gone_after_teardown(fabric: Fabric) -> None:
    _, optimizer = make(fabric)
    fabric.teardown()
    assert hooks(optimizer) == 0


def test_an_optimizer_that_never_gets_a_gradient_raises_at_its_second_step(fabric: Fabric) -> None:
    _, optimizer = make(fabric)
    other_model, _ = make(fabric)
    fabric.backward(other_model(X).sum())
    optimizer.step()
    with pytest.raises(
        RuntimeError, match="no gradient has arrived at any of its parameters in 1 backward"
    ):
        optimizer.step()


def test_a_parameter_without_gradient_is_a_warning_that_names_it(fabric: Fabric) -> None:
    model, optimizer = make(fabric, TwoParts())
    with pytest.warns(
        UserWarning, match="no gradient has arrived in the first 2 steps of SGD at left_out.weight"
    ):
        step(fabric, model, optimizer, times=3)


def test_steps_that_are_skipped_do_not_count() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        model, optimizer = make(fabric, OneWeight())
        step(fabric, model, optimizer, X[0] * float("inf"))
        step(fabric, model, optimizer, X[0], times=2)
        scaler_hooks = 2
        assert hooks(optimizer) > scaler_hooks
        step(fabric, model, optimizer, X[0])
        assert hooks(optimizer) == scaler_hooks


def test_an_optimizer_that_clears_its_gradients_itself_is_let_go_of(fabric: Fabric) -> None:
    class Clearing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.zero_grad()
            return result

    net = OneWeight()
    model, optimizer = fabric.setup(net, Clearing(net.parameters(), lr=0.1))
    for _ in range(25):
        fabric.backward(model(X[0]))
        optimizer.step()
    assert hooks(optimizer) == 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.uint8]
)
def test_a_fingerprint_depends_on_every_element_and_its_position(dtype: torch.dtype) -> None:
    values = torch.arange(1, 7).reshape(2, 3).to(dtype)
    numbers = {*fingerprint([values]), *fingerprint([values.flip(0)]), *fingerprint([values.t()])}
    for index in range(6):
        changed = values.clone()
        changed.view(-1)[index] += 1
        numbers.update(fingerprint([changed]))
    assert len(numbers) == 9
    assert fingerprint([values.t().contiguous().t()]) == fingerprint([values])


def test_a_fingerprint_depends_on_single_bits_beyond_one_chunk() -> None:
    values = torch.zeros(2**20 + 3)
    before = fingerprint([values, torch.zeros(0)])
    for index in (0, 2**20 - 1, 2**20, -1):
        changed = values.clone()
        changed.view(torch.int32)[index] = -(2**31)  # minus zero: equal as a number
        assert fingerprint([changed, torch.zeros(0)]) != before
