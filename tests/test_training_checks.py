"""Mistakes in the first steps of an optimizer raise. Steps that are only unusual do not."""

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import DDPStrategy
from tests.models import Net, OneWeight, PartlyUnused
from tests.ranks import outcome, remedy, run_in_ranks

X = torch.ones(2, 4)
# The hooks of other parts of the library: the watchdog and the loss scaler note the steps, too.
WATCHDOG_HOOKS = 2
SCALER_HOOKS = 2

Case = Callable[[Fabric], Any]


def sgd(parameters: Iterable[Any], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def make(
    fabric: Fabric, net: nn.Module | None = None, lr: float = 0.1
) -> tuple[Any, torch.optim.Optimizer]:
    """Set up a module, a ``Net`` by default, and an optimizer."""
    net = net or Net()
    return fabric.setup(net, sgd(net.parameters(), lr))


def step(
    fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer, x: Tensor = X, times: int = 1
) -> None:
    for _ in range(times):
        loss = model(x).sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def count_hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def outcomes(fabric: Fabric, cases: Iterable[Case]) -> dict[str, str]:
    """Return the outcomes of cases by their names."""
    results = {}
    for case in cases:
        results[case.__name__] = outcome(partial(case, fabric))
        fabric.barrier(case.__name__)
    return results


def assert_outcomes(results: list[dict[str, str]], expected: Mapping[Case, str]) -> None:
    """Check that the outcome of a case has its text, on every rank."""
    for rank, rank_results in enumerate(results):
        for case, text in expected.items():
            actual = rank_results[case.__name__]
            assert text in actual, f"{case.__name__} on rank {rank}: {actual}"


# -- mistakes on two ranks ------------------------------------------------------------------------


def step_and_check_again(fabric: Fabric, optimizer: torch.optim.Optimizer) -> None:
    """Step twice: the rank that comes first sees nothing yet, and checks again at its next step."""
    try:
        optimizer.step()
    finally:
        fabric.barrier()
    optimizer.step()


def changed_on_one_rank(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    with torch.no_grad():
        model.head.weight.add_(fabric.global_rank)
    loss = model(X).sum()
    fabric.backward(loss)
    step_and_check_again(fabric, optimizer)


def different_hyperparameters(fabric: Fabric) -> None:
    model, optimizer = make(fabric, lr=0.1 + fabric.global_rank)
    loss = model(X).sum()
    fabric.backward(loss)
    step_and_check_again(fabric, optimizer)


def step_on_local_gradients(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    with fabric.no_backward_sync(model):
        loss = model(X + fabric.global_rank).sum()
        fabric.backward(loss)
    step_and_check_again(fabric, optimizer)


def clear_before_step(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for _ in range(2):
        loss = model(X).sum()
        fabric.backward(loss)
        optimizer.zero_grad()
        optimizer.step()


def set_to_zero_before_step(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for _ in range(2):
        loss = model(X).sum()
        fabric.backward(loss)
        model.zero_grad(set_to_none=False)
        optimizer.step()


def step_after_each_micro_batch(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(16, 4)))
    for batch, _ in fabric.accumulate(loader, steps=4):
        step(fabric, model, optimizer, batch)


def step_after_half_of_a_window(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(16, 4)))
    windows = fabric.accumulate(loader, steps=4)
    for index, (batch, _) in enumerate(windows):
        loss = model(batch).sum()
        fabric.backward(loss)
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def clear_before_each_micro_batch(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(16, 4)))
    for batch, last in fabric.accumulate(loader, steps=4):
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(batch).sum()
            optimizer.zero_grad()
            fabric.backward(loss)
        if last:
            optimizer.step()


def clear_after_each_micro_batch(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(16, 4)))
    for batch, last in fabric.accumulate(loader, steps=4):
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(batch).sum()
            fabric.backward(loss)
        if last:
            optimizer.step()
        model.zero_grad(set_to_none=False)


def foreign_parameter(fabric: Fabric) -> None:
    net = OneWeight()
    temperature = nn.Parameter(torch.ones(3))
    model, optimizer = fabric.setup(net, sgd([*net.parameters(), temperature]))
    fabric.backward(model(X[0]) + (fabric.global_rank + 1) * temperature.sum())
    step_and_check_again(fabric, optimizer)


def unused_parameter(fabric: Fabric) -> None:
    model, optimizer = make(fabric, PartlyUnused())
    step(fabric, model, optimizer)


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
    loss = model(X[0])
    fabric.backward(loss)


MISTAKES: dict[Case, str] = {
    changed_on_one_rank: "ranks 0 and 1 differ after it: head.weight",
    different_hyperparameters: "ranks 0 and 1 differ after it: encoder.weight, encoder.bias",
    step_on_local_gradients: "outside of no_backward_sync",
    clear_before_step: "were cleared before the step, 2 times in a row",
    set_to_zero_before_step: "were cleared before the step, 2 times in a row",
    step_after_each_micro_batch: "at micro-batch 1 of 4 of a window of fabric.accumulate",
    step_after_half_of_a_window: "at micro-batch 2 of 4 of a window of fabric.accumulate",
    clear_before_each_micro_batch: "were cleared within the window of fabric.accumulate",
    clear_after_each_micro_batch: "in 2 windows in a row",
    foreign_parameter: (
        "ranks 0 and 1 differ after it: parameter 1 of the optimizer, which no set-up module has"
    ),
    unused_parameter: ("no gradient has arrived at left_out.weight, left_out.bias of PartlyUnused"),
    unfrozen_parameter: (
        "these parameters were frozen or absent when it was set up, so their gradients would not "
        "be synchronized: encoder"
    ),
    unfrozen_module: "their gradients would not be synchronized: weight",
}


def make_mistakes(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, MISTAKES)


def test_what_trains_wrongly_on_two_ranks_raises_on_each() -> None:
    # Some mistakes let the replicas drift apart, which are compared in saves alone.
    results = run_in_ranks(make_mistakes, check_replicas=True)
    assert_outcomes(results, MISTAKES)
    for rank, rank_results in enumerate(results):
        for text in rank_results.values():
            assert f"rank {rank}" in text
            assert "Write: " in text


def step_with_different_learning_rates(fabric: Fabric) -> tuple[int, str]:
    model, optimizer = make(fabric, lr=0.1 + fabric.global_rank)
    hooks = count_hooks(optimizer)
    return hooks, outcome(lambda: step(fabric, model, optimizer, times=3))


def test_without_the_check_nothing_is_watched() -> None:
    options = {"check_training": False, "check_replicas": True}
    results = run_in_ranks(step_with_different_learning_rates, **options)
    assert results == [(WATCHDOG_HOOKS, "fine")] * 2


def loops_that_do_not_train_in_one_process(fabric: Fabric) -> dict[str, str]:
    cases = [
        clear_before_step,
        set_to_zero_before_step,
        step_after_each_micro_batch,
        step_after_half_of_a_window,
        clear_before_each_micro_batch,
        clear_after_each_micro_batch,
    ]
    return outcomes(fabric, cases)


@pytest.mark.parametrize(
    "options", [{"ranks": 1}, {"ranks": 1, "precision": "16-mixed"}, {"strategy": "fsdp"}], ids=str
)
def test_cleared_gradients_and_parts_of_windows_raise_under_every_strategy(
    options: dict[str, Any],
) -> None:
    for results in run_in_ranks(loops_that_do_not_train_in_one_process, **options):
        for name, text in results.items():
            assert text.startswith("UsageError: SGD.step() on rank"), f"{name}: {text}"
            assert "Write: " in text


def repeat_a_cleared_step(fabric: Fabric) -> list[str]:
    """Return the outcomes of two tries of a step that is an error, and of a right step."""
    model, optimizer = make(fabric)
    tries: list[str] = []
    for _ in range(2):
        loss = model(X).sum()
        fabric.backward(loss)
        optimizer.zero_grad()
        tries = [outcome(optimizer.step) for _ in range(2)]
    right_step = outcome(lambda: step(fabric, model, optimizer))
    return [*tries, right_step]


def test_the_error_of_cleared_gradients_comes_again_until_there_are_gradients() -> None:
    [(first, second, right_step)] = run_in_ranks(repeat_a_cleared_step, ranks=1, strategy="auto")
    assert "were cleared before the step, 2 times in a row" in first
    assert second == first
    assert right_step == "fine"


# -- parameters that were added after the setup ---------------------------------------------------


def make_trained(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    """Set up a net and an optimizer, and take more steps than are watched."""
    model, optimizer = make(fabric, lr=1e-4)
    step(fabric, model, optimizer, X + fabric.global_rank, times=8)
    return model, optimizer


def an_adapter(fabric: Fabric) -> None:
    model, optimizer = make_trained(fabric)
    model.adapter = nn.Linear(4, 1)
    optimizer.add_param_group({"params": model.adapter.parameters()})
    fabric.backward(model(X).sum() + model.adapter(X).sum())


def a_replaced_layer(fabric: Fabric) -> None:
    model, _ = make_trained(fabric)
    model.blocks[0] = nn.Linear(8, 8)
    step(fabric, model, sgd(model.parameters(), 1e-4), X + fabric.global_rank)


def a_replaced_parameter(fabric: Fabric) -> None:
    model, _ = make_trained(fabric)
    model.head.weight = nn.Parameter(torch.ones(1, 8))
    step(fabric, model, sgd(model.parameters(), 1e-4), X + fabric.global_rank)


def an_adapter_of_no_module(fabric: Fabric) -> None:
    model, optimizer = make_trained(fabric)
    scale = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [scale]})
    inputs = X + fabric.global_rank

    def scaled(x: Tensor) -> Tensor:
        return model(x * scale)

    results = [outcome(lambda: step(fabric, scaled, optimizer, inputs)) for _ in range(4)]
    assert results == ["fine"] * 4, results


def parameters_from_before_the_setup(fabric: Fabric) -> None:
    net = Net()
    encoder = [*net.encoder.parameters()]
    optimizer = sgd([*net.head.parameters(), *net.blocks.parameters()], 1e-4)
    model, optimizer = fabric.setup(net, optimizer)
    step(fabric, model, optimizer, X + fabric.global_rank, times=8)
    optimizer.add_param_group({"params": encoder})
    step(fabric, model, optimizer, X + fabric.global_rank)


def modules_that_may_be_added(fabric: Fabric) -> None:
    model, optimizer = make_trained(fabric)
    model.frozen = nn.Linear(4, 1).requires_grad_(False)
    model.again = model.blocks
    model.set_up = fabric.setup_module(nn.Linear(4, 1))
    step(fabric, model, optimizer, X + fabric.global_rank)
    with torch.no_grad():
        model.head = nn.Linear(8, 2)
        model(X)


ADDED = "their gradients would not be synchronized: "
ADDITIONS: dict[Case, str] = {
    an_adapter: ADDED + "adapter.weight, adapter.bias",
    a_replaced_layer: ADDED + "blocks.0.weight, blocks.0.bias",
    a_replaced_parameter: ADDED + "head.weight",
    an_adapter_of_no_module: (
        "ranks 0 and 1 differ after it: parameter 6 of the optimizer, which no set-up"
    ),
    modules_that_may_be_added: "fine",
}
# DDP leaves a module its parameters; FSDP replaces them.
OF_OLD_PARAMETERS = {
    "ddp": "fine",
    "fsdp": "the sharding: stepping changes nothing of encoder.weight, encoder.bias",
}


def add_parameters(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, [*ADDITIONS, parameters_from_before_the_setup])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parameters_that_are_added_after_the_setup_are_an_error_that_names_them(
    strategy: str,
) -> None:
    results = run_in_ranks(add_parameters, strategy=strategy)
    assert_outcomes(results, ADDITIONS)
    assert_outcomes(results, {parameters_from_before_the_setup: OF_OLD_PARAMETERS[strategy]})


# -- optimizers that were not set up, or hold other parameters ------------------------------------


def no_optimizer_set_up(fabric: Fabric) -> None:
    net = Net()
    step(fabric, fabric.setup(net), sgd(net.parameters()))


def one_of_two_optimizers_set_up(fabric: Fabric) -> None:
    net = Net()
    model, first = fabric.setup(net, sgd(net.encoder.parameters()))
    step(fabric, model, first, times=5)
    step(fabric, model, sgd(net.head.parameters()))


def no_module_set_up(fabric: Fabric) -> None:
    fabric.launch()
    net = Net()
    step(fabric, net, sgd(net.parameters()))


def test_an_optimizer_that_was_not_set_up_never_steps_with_scaled_gradients() -> None:
    for case in (no_optimizer_set_up, one_of_two_optimizers_set_up, no_module_set_up):
        with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
            result = outcome(partial(case, fabric))
        assert "it has not been set up, and steps with gradients that are still multip" in result


def step_plainly(net: nn.Module, times: int = 2) -> None:
    optimizer = sgd(net.parameters())
    for _ in range(times):
        net(X).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_a_short_run_without_teardown_leaves_other_optimizers_alone(precision: str) -> None:
    with Fabric(accelerator="cpu", devices=1, precision=precision) as fabric:
        model, optimizer = make(fabric)
        step(fabric, model, optimizer, times=2)
        model(X).sum().backward()
        step_plainly(PartlyUnused())
        # The optimizer is dropped first, as in a notebook whose cells run again.
        del optimizer
        step_plainly(PartlyUnused())
        del model
        gc.collect()
        step_plainly(Net())


def optimizer_made_before_the_setup(fabric: Fabric) -> None:
    net = Net()
    optimizer = sgd(net.parameters())
    step(fabric, fabric.setup(net), optimizer, X + fabric.global_rank)


def parameter_of_no_module(fabric: Fabric) -> None:
    fabric.setup(Net())
    offset = nn.Parameter(torch.zeros(3))
    offset.sum().backward()
    torch.optim.Rprop([offset]).step()


def head_replaced_before_the_setup(fabric: Fabric) -> None:
    net = Net()
    optimizer = sgd(net.parameters())
    net.head = nn.Linear(8, 2)
    model, optimizer = fabric.setup(net, optimizer)
    step(fabric, model, optimizer, X + fabric.global_rank)


def head_replaced_and_optimizer_not_set_up(fabric: Fabric) -> None:
    net = Net()
    old_head = net.head
    net.head = nn.Linear(8, 2)
    step(fabric, fabric.setup(net), sgd(old_head.parameters()), X + fabric.global_rank)


UNMOVED: dict[Case, str] = {
    parameter_of_no_module: "fine",
    head_replaced_before_the_setup: "no optimizer has head.weight, head.bias of Net",
    head_replaced_and_optimizer_not_set_up: "of Net",
}
OF_OLD_OPTIMIZER = {"ddp": "fine", "fsdp": "it holds parameters from before the sharding"}


def leave_parameters_unmoved(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, [optimizer_made_before_the_setup, *UNMOVED])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parameters_that_no_step_would_move_are_an_error(strategy: str) -> None:
    results = run_in_ranks(leave_parameters_unmoved, strategy=strategy)
    assert_outcomes(results, UNMOVED)
    assert_outcomes(results, {optimizer_made_before_the_setup: OF_OLD_OPTIMIZER[strategy]})


def set_up_an_old_optimizer(fabric: Fabric) -> str:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    fabric.setup_module(net)
    return outcome(lambda: fabric.setup_optimizers(optimizer))


def test_fsdp_setup_of_an_optimizer_from_before_the_sharding_raises() -> None:
    for text in run_in_ranks(set_up_an_old_optimizer, strategy="fsdp"):
        assert "none of its parameters belongs to a module that is set up" in text


def step_without_reduction(fabric: Fabric) -> tuple[str, str]:
    """Return the outcomes of a step on unreduced gradients, and of a step on reduced gradients."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    model.module.set_requires_gradient_sync(False)
    loss = model(X).sum()
    fabric.backward(loss)
    of_unreduced = outcome(optimizer.step)
    model.module.set_requires_gradient_sync(True)
    loss = model(X).sum()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    return of_unreduced, outcome(optimizer.step)


def test_fsdp_step_without_gradient_sync_raises() -> None:
    for of_unreduced, of_reduced in run_in_ranks(step_without_reduction, strategy="fsdp"):
        assert "did not reduce the gradients" in of_unreduced
        assert of_reduced == "fine"


# -- models without values ------------------------------------------------------------------------


class Wide(nn.Module):
    """A model that is large enough to be made without values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5000)
        self.norm = nn.LayerNorm(5000)
        self.last = nn.Linear(5000, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def make_without_values(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    with fabric.init_module(empty_init=True):
        net = Wide()
    return make(fabric, net, lr=1e-4)


def first_steps_without_values(fabric: Fabric, path: str) -> tuple[str, str]:
    """Return the outcomes of a first step without values, and of one after values were loaded."""
    fabric.save(path, {"model": fabric.setup(Wide())})
    inputs = X + fabric.global_rank
    model, optimizer = make_without_values(fabric)
    without_values = outcome(lambda: step(fabric, model, optimizer, inputs))
    loaded_model, loaded_optimizer = make_without_values(fabric)
    fabric.load(path, {"model": loaded_model})
    return without_values, outcome(lambda: step(fabric, loaded_model, loaded_optimizer, inputs))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_first_step_of_a_model_without_values_is_an_error_that_names_them(
    strategy: str, tmp_path: Path
) -> None:
    results = run_in_ranks(first_steps_without_values, str(tmp_path / "model"), strategy=strategy)
    for without_values, with_loaded_values in results:
        assert (
            "these are not a number before the first step: first.weight, first.bias"
            in without_values
        )
        assert with_loaded_values == "fine"


# -- habits that do not raise ---------------------------------------------------------------------


def adversaries(fabric: Fabric) -> None:
    generator, generator_optimizer = make(fabric, nn.Linear(4, 4))
    discriminator, discriminator_optimizer = make(fabric)
    inputs = X + fabric.global_rank
    for _ in range(3):
        loss = discriminator(generator(inputs).detach()).sum()
        fabric.backward(loss)
        discriminator_optimizer.step()
        discriminator_optimizer.zero_grad()
        loss = discriminator(generator(inputs)).sum()
        fabric.backward(loss)
        generator_optimizer.step()
        generator_optimizer.zero_grad()


def accumulation(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for number in range(9):
        is_last = number % 3 == 2
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(X * fabric.global_rank + number).sum()
            fabric.backward(loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def critic_that_steps_within_windows(fabric: Fabric) -> None:
    generator, generator_optimizer = make(fabric, nn.Linear(4, 4))
    critic, critic_optimizer = make(fabric)
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(16, 4)))
    for batch, last in fabric.accumulate(loader, steps=2):
        step(fabric, critic, critic_optimizer, batch)
        with fabric.no_backward_sync([critic, generator], enabled=not last):
            loss = critic(generator(batch)).sum()
            fabric.backward(loss)
        critic_optimizer.zero_grad()
        if last:
            generator_optimizer.step()
            generator_optimizer.zero_grad()


def dropped_batches(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for number in range(4):
        loss = model(X).sum()
        fabric.backward(loss)
        if number in (1, 2):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def dropped_micro_batches(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(24, 4)))
    for index, (batch, last) in enumerate(fabric.accumulate(loader, steps=3)):
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(batch).sum()
            fabric.backward(loss)
        if index in (0, 1, 3):
            optimizer.zero_grad()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def hinge(fabric: Fabric) -> None:
    """Step with gradients that are exactly zero."""
    model, optimizer = make(fabric)
    for _ in range(3):
        loss = (model(X) * 0).sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def frozen_encoder(fabric: Fabric) -> None:
    net = Net()
    net.encoder.requires_grad_(False)
    model, optimizer = make(fabric, net)
    step(fabric, model, optimizer, times=3)


def gradients_dropped_on_purpose(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    for _ in range(3):
        loss = model(X).sum()
        fabric.backward(loss)
        model.head.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()


def closures(fabric: Fabric) -> None:
    # LBFGS does not know sharded parameters.
    if fabric.strategy.name == "fsdp":
        return
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    model, optimizer = fabric.setup(net, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).pow(2).mean()
        fabric.backward(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)


def turns(fabric: Fabric) -> None:
    first, first_optimizer = make(fabric)
    second, second_optimizer = make(fabric)
    for model in (first, second, first, second):
        loss = model(X).sum()
        fabric.backward(loss)
        for optimizer in (first_optimizer, second_optimizer):
            optimizer.step()
            optimizer.zero_grad()


def step_in_backward(fabric: Fabric) -> None:
    # All ranks have the same data: under DDP gradients are not reduced yet when a hook runs.
    net = Net()
    optimizers = {parameter: sgd([parameter]) for parameter in net.parameters()}
    model, *_ = fabric.setup(net, *optimizers.values())

    def step_parameter(parameter: Tensor) -> None:
        optimizers[parameter].step()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_parameter)
    for _ in range(3):
        loss = model(X).sum()
        fabric.backward(loss)
        model.zero_grad()


def reduced_by_the_user(fabric: Fabric) -> None:
    net = OneWeight()
    temperature = nn.Parameter(torch.ones(3))
    model, optimizer = fabric.setup(net, sgd([*net.parameters(), temperature]))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(X[0]) + fabric.global_rank * temperature.sum())
        temperature.grad = fabric.all_reduce(temperature.grad)
        optimizer.step()


def sharded_in_place(fabric: Fabric) -> None:
    # Under DDP a forward pass of the user's module raises.
    if fabric.strategy.name != "fsdp":
        return
    net = Net()
    optimizer = sgd(net.parameters())
    # FSDP shards the module in place: the returned module may be dropped.
    fabric.setup(net, optimizer)
    before = fabric.strategy.get_module_state_dict(net)
    step(fabric, net, optimizer, X + fabric.global_rank, times=3)
    after = fabric.strategy.get_module_state_dict(net)
    assert not torch.equal(before["head.bias"], after["head.bias"])


def dropped(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    step(fabric, model, optimizer)
    module_reference = weakref.ref(model.module)
    optimizer_reference = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert module_reference() is None
    assert optimizer_reference() is None


def compiled(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    step(fabric, torch.compile(model, backend="eager"), optimizer, times=3)


HABITS: list[Case] = [
    adversaries,
    accumulation,
    critic_that_steps_within_windows,
    dropped_batches,
    dropped_micro_batches,
    hinge,
    frozen_encoder,
    gradients_dropped_on_purpose,
    closures,
    turns,
    step_in_backward,
    reduced_by_the_user,
    sharded_in_place,
    dropped,
    compiled,
]


def follow_habits(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, HABITS)


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp"}, {"ranks": 1}], ids=str)
def test_what_is_only_unusual_does_not_raise(options: dict[str, Any]) -> None:
    for results in run_in_ranks(follow_habits, **options):
        assert set(results.values()) == {"fine"}, results


def leave_parameters_unused(fabric: Fabric) -> str:
    model, optimizer = make(fabric, PartlyUnused())
    return outcome(lambda: step(fabric, model, optimizer, times=3))


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_parameters_may_stay_unused_where_an_option_says_so(option: str) -> None:
    strategy = DDPStrategy(start_method="forkserver", **{option: True})
    results = run_in_ranks(leave_parameters_unused, strategy=strategy)
    assert results == ["fine", "fine"]


# -- in one process -------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        yield fabric


def test_hooks_are_gone_after_the_first_steps(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    assert count_hooks(optimizer) == 2
    step(fabric, model, optimizer, times=3)
    assert count_hooks(optimizer) == 0


def test_hooks_are_gone_after_teardown(fabric: Fabric) -> None:
    _, optimizer = make(fabric)
    fabric.teardown()
    assert count_hooks(optimizer) == 0


def test_an_optimizer_that_never_gets_a_gradient_raises_at_its_second_step(fabric: Fabric) -> None:
    _, optimizer = make(fabric)
    another_model, _ = make(fabric)
    loss = another_model(X).sum()
    fabric.backward(loss)
    optimizer.step()
    message = "no gradient has arrived at any of its parameters in 1 backward"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_a_plain_loop_with_a_closure_may_follow_one_with_fabric(fabric: Fabric) -> None:
    model, optimizer = make(fabric)
    step(fabric, model, optimizer)
    del optimizer
    plain_model = nn.Linear(4, 2)
    plain_optimizer = torch.optim.LBFGS(plain_model.parameters())

    def closure() -> Tensor:
        plain_optimizer.zero_grad()
        loss = plain_model(X).square().sum()
        loss.backward()
        return loss

    first_loss = plain_optimizer.step(closure)
    assert closure() < first_loss


def test_a_parameter_without_gradient_is_a_warning_that_names_it(fabric: Fabric) -> None:
    model, optimizer = make(fabric, PartlyUnused())
    message = "no gradient has arrived in the first 2 steps of SGD at left_out.weight"
    with pytest.warns(UserWarning, match=message):
        step(fabric, model, optimizer, times=3)


def test_steps_that_are_skipped_do_not_count() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        model, optimizer = make(fabric, OneWeight())
        step(fabric, model, optimizer, X[0] * math.inf)
        step(fabric, model, optimizer, X[0], times=2)
        assert count_hooks(optimizer) > SCALER_HOOKS
        step(fabric, model, optimizer, X[0])
        assert count_hooks(optimizer) == SCALER_HOOKS


def test_an_optimizer_that_clears_its_gradients_itself_is_let_go_of(fabric: Fabric) -> None:
    class Clearing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.zero_grad()
            return result

    net = OneWeight()
    model, optimizer = fabric.setup(net, Clearing(net.parameters(), lr=0.1))
    for _ in range(25):
        loss = model(X[0])
        fabric.backward(loss)
        optimizer.step()
    assert count_hooks(optimizer) == 0


# -- gathered features -----------------------------------------------------------------------------


class FeaturesAndScale(nn.Module):
    """A tower and a scale, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(x), self.scale


def train_on_gathered_features(fabric: Fabric, sync_grads: bool, steps: bool) -> str:
    net = FeaturesAndScale()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)

    def train() -> None:
        for _ in range(2):
            features, scale = model(torch.ones(2, 4))
            gathered = fabric.all_gather(features, sync_grads=sync_grads)
            loss = (gathered * scale).sum()
            fabric.backward(loss)
            if steps:
                optimizer.step()

    return outcome(train)


@pytest.mark.parametrize("steps", [True, False], ids=["at the step", "at the forward pass"])
def test_the_error_of_features_gathered_without_gradients_says_to_gather_them_with_gradients(
    steps: bool,
) -> None:
    for text in run_in_ranks(train_on_gathered_features, False, steps):
        assert "fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors; else" in text


def test_features_gathered_with_gradients_train() -> None:
    results = run_in_ranks(train_on_gathered_features, True, True)
    assert results == ["fine", "fine"]


# -- ranks with empty shards -----------------------------------------------------------------------


class SmallHead(nn.Module):
    """Two layers. Under FSDP, the second of two ranks has no elements of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def add_body_after_a_step(fabric: Fabric) -> None:
    module = SmallHead()
    model, optimizer = fabric.setup(module, sgd(module.head.parameters()))
    for number in range(6):
        fabric.backward(model(X).mean())
        optimizer.step()
        model.zero_grad()
        if number == 2:
            optimizer.add_param_group({"params": list(model.body.parameters())})


def add_body_before_a_step(fabric: Fabric) -> None:
    module = SmallHead()
    model, optimizer = fabric.setup(module, sgd(module.head.parameters()))
    for number in range(6):
        fabric.backward(model(X).mean())
        if number == 2:
            optimizer.add_param_group({"params": list(model.body.parameters())})
        optimizer.step()
        model.zero_grad()


def unfreeze_body(fabric: Fabric) -> None:
    module = SmallHead()
    module.body.requires_grad_(False)
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for number in range(6):
        if number == 3:
            model.body.requires_grad_(True)
        fabric.backward(model(X).mean())
        optimizer.step()
        model.zero_grad()


def train_more_after_a_small_head(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, [add_body_after_a_step, add_body_before_a_step, unfreeze_body])


def test_a_rank_with_empty_shards_does_not_take_the_others_to_be_ahead() -> None:
    for results in run_in_ranks(train_more_after_a_small_head, strategy="fsdp"):
        assert set(results.values()) == {"fine"}


class Branches(nn.Module):
    """A model that uses one of two equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, uses_left: bool) -> Tensor:
        if uses_left:
            return self.left(x)
        return self.right(x)


def step_with_other_branches(fabric: Fabric, reduces_unused: bool) -> list[str]:
    """Use another layer on each rank, and return what becomes of two steps."""
    module = Branches()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    if reduces_unused:
        fabric.unwrap(model).set_reduce_scatter_unused_params(True)
    fabric.backward(model(X, uses_left=fabric.global_rank == 0).square().mean())
    first_step = outcome(optimizer.step)
    fabric.barrier()
    return [first_step, outcome(optimizer.step)]


def step_with_and_without_remedy(fabric: Fabric) -> list[list[str]]:
    return [step_with_other_branches(fabric, reduces) for reduces in (True, False)]


def test_sharded_parameters_that_only_one_rank_uses_are_an_error_that_names_them() -> None:
    for with_remedy, without in run_in_ranks(step_with_and_without_remedy, strategy="fsdp"):
        assert with_remedy == ["fine", "fine"]
        # One rank finds it after the step, and the other one before its next step.
        [error] = [text for text in without if text != "fine"]
        assert error.startswith("UsageError: step 1 of SGD on rank ")
        assert "ranks 0 and 1 has gradients of left.weight, left.bias, right.weight" in error
        assert remedy(error).endswith(
            "fabric.unwrap(model).set_reduce_scatter_unused_params(True) of torch 2.13"
        )
