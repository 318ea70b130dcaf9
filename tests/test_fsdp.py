"""FSDP on real processes: its contract beyond equal numbers, which tests/test_parity.py shows."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import FSDPStrategy
from tests.loops import Transformer, make_model
from tests.models import Net, OneWeight
from tests.ranks import outcome, run_in_ranks


def in_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    """Return the results of ``function(fabric, *args)`` by rank of a job with FSDP.

    The options are those of the strategy, and ``precision``.
    """
    precision = options.pop("precision", None)
    strategy = FSDPStrategy(start_method="forkserver", **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy, precision=precision)


def full_parameters(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


def full_gradients(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.grad).clone() for parameter in model.parameters()]


def flat_gradient(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(full_gradients(model))


# -- optimizers ------------------------------------------------------------------------------------


def sgd_with_momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def sgd_after_a_step(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd_with_momentum(module)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def set_up_in_every_order(fabric: Fabric) -> dict[str, str]:
    def alone_and_stale() -> None:
        net = Net()
        optimizer = sgd_with_momentum(net)
        fabric.setup_module(net)
        fabric.setup_optimizers(optimizer)

    def partly_stale() -> None:
        first = Net()
        second = Net()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        fabric.setup_module(first)
        fabric.setup(second, optimizer)

    def with_state() -> None:
        net = Net()
        fabric.setup(net, sgd_after_a_step(net))

    def made_between_forward_and_backward() -> None:
        module = Transformer()
        model = fabric.setup_module(module)
        loss = model(torch.ones(1, 5, 4)).sum()
        optimizer = sgd_with_momentum(model)
        fabric.backward(loss)
        fabric.setup_optimizers(optimizer)

    def made_after_an_evaluation() -> None:
        module = Net()
        model = fabric.setup_module(module)
        with torch.no_grad():
            model(torch.ones(1, 4))
        fabric.setup_optimizers(sgd_with_momentum(model))

    def of_the_set_up_module() -> None:
        module = Net()
        model = fabric.setup_module(module)
        optimizer = sgd_after_a_step(model)
        fabric.setup_optimizers(optimizer)

    cases = (
        alone_and_stale,
        partly_stale,
        with_state,
        of_the_set_up_module,
        made_after_an_evaluation,
        made_between_forward_and_backward,
    )
    return {case.__name__: outcome(case) for case in cases}


def test_an_optimizer_that_would_step_on_nothing_is_refused() -> None:
    for results in in_ranks(set_up_in_every_order):
        assert results["of_the_set_up_module"] == "fine"
        assert (
            "none of its parameters belongs to a module that is set up"
            in results["alone_and_stale"]
        )
        assert "parameters from before the sharding" in results["partly_stale"]
        assert results["made_after_an_evaluation"] == "fine"
        assert "a forward pass gathered" in results["made_between_forward_and_backward"]
        assert "it has state" in results["with_state"]
        assert "fabric.setup(model, " in results["with_state"]


def set_up_optimizer_with_groups(fabric: Fabric) -> bool:
    net = Net()
    groups = [{"params": net.encoder.parameters()}, {"params": [net.head.weight], "lr": 0.5}]
    users_optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(users_optimizer, 1)
    model, optimizer, _ = fabric.setup(net, users_optimizer, scheduler=scheduler)
    assert optimizer is users_optimizer
    encoder_group, head_group = optimizer.param_groups
    weight, bias = encoder_group["params"]
    assert weight is model.encoder.weight
    assert bias is model.encoder.bias
    (weight,) = head_group["params"]
    assert weight is model.head.weight
    return True


def test_groups_of_an_optimizer_without_state_point_at_the_shards() -> None:
    assert in_ranks(set_up_optimizer_with_groups) == [True, True]


# -- synchronization -------------------------------------------------------------------------------


def has_gradients(model: nn.Module) -> list[bool]:
    """Say for each parameter whether its gradient has arrived. Placeholders are zero."""
    has_arrived: list[bool] = []
    for parameter in model.parameters():
        grad = parameter.grad
        has_arrived.append(grad is not None and bool(full_tensor(grad).any()))
    return has_arrived


def check_no_backward_sync(fabric: Fabric) -> bool:
    module = Net()
    model = fabric.setup(module)
    strategy = fabric.strategy
    prepared = model._fabric_prepared
    synchronizes = strategy.gradient_contract(prepared).synchronizes
    with fabric.no_backward_sync(model):
        with fabric.no_backward_sync(model, enabled=False), fabric.no_backward_sync([model, model]):
            assert not synchronizes()
        with strategy.block_backward_sync(prepared):
            pass
        loss = model(torch.ones(1, 4)).sum()
        fabric.backward(loss)
        assert not synchronizes()
        assert not any(has_gradients(model))
    with pytest.raises(KeyError), fabric.no_backward_sync(model):
        raise KeyError
    loss = model(torch.ones(1, 4)).sum()
    fabric.backward(loss)
    assert synchronizes()
    assert all(has_gradients(model))
    return True


def test_no_backward_sync_restores_the_state_before() -> None:
    assert in_ranks(check_no_backward_sync) == [True, True]


def overflow_on_one_rank(fabric: Fabric) -> tuple[list[float], str]:
    net = OneWeight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    weights = []
    for step in range(2):
        x = torch.ones(4)
        if step == 0 and fabric.global_rank == 1:
            x[3] = float("inf")  # overflows in the shard of the last rank only
        loss = model(x)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(full_parameters(model)[0].mean().item())
    return weights, fabric.describe().split()[-1]


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks() -> None:
    for weights, scale in in_ranks(overflow_on_one_rank, precision="16-mixed"):
        assert weights == [1.0, pytest.approx(0.9)]
        assert scale == "32768"


def clip(fabric: Fabric, norm_type: float) -> tuple[float, list[Tensor]]:
    plain, optimizer = make_model()
    model, optimizer = fabric.setup(plain, optimizer)
    loss = model(torch.ones(2, 5, 4)).sum()
    fabric.backward(loss)
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1, norm_type=norm_type)
    assert type(norm) is Tensor
    assert norm.shape == ()
    return norm.item(), full_gradients(model)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_is_that_of_the_whole_gradient(norm_type: float) -> None:
    model, _ = make_model()
    model(torch.ones(2, 5, 4)).sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item()
    expected_gradients = full_gradients(model)
    for norm, gradients in in_ranks(clip, norm_type, ranks=3):
        assert norm == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


# -- calls of a model and of its submodules --------------------------------------------------------


def call_in_every_way(fabric: Fabric) -> dict[str, str]:
    net = Transformer()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(2, 5, 4)
    h = torch.ones(2, 5, 8)
    results = {
        "model": outcome(lambda: fabric.backward(model(x).sum())),
        "submodule": outcome(lambda: model.embedding(x)),
        "block": outcome(lambda: model.blocks[0](h)),
        "block without gradients": outcome(torch.no_grad()(lambda: model.blocks[1](h))),
        "deepcopy": outcome(lambda: copy.deepcopy(model)),
        "pickle": outcome(lambda: pickle.dumps(model)),
    }
    outcome(lambda: model(torch.ones(2, 5, 3)))
    results["submodule after an error"] = outcome(lambda: model.embedding(x))
    return results


def test_a_submodule_called_by_itself_is_refused_at_the_call() -> None:
    for rank, results in enumerate(in_ranks(call_in_every_way)):
        assert results.pop("model") == "fine"
        assert "sharded over the ranks" in results.pop("deepcopy")
        assert "fabric.save" in results.pop("pickle")
        for text in results.values():
            assert text.startswith("UsageError: model.")
            assert f"on rank {rank}" in text
            assert "mark_forward_method" in text
        assert "model.blocks[1](...)" in results["block without gradients"]


def raise_zero_division(*args: Any) -> None:
    raise ZeroDivisionError


def raise_interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def fail_in_forward(fabric: Fabric) -> bool:
    module = Transformer()
    model = fabric.setup(module)
    x = torch.ones(2, 5, 4)

    def gradient(fails: bool) -> Tensor:
        with fabric.no_backward_sync(model):
            loss = model(x).sum()
            fabric.backward(loss)
        if fails:
            handle = model.blocks[1].mlp.register_forward_pre_hook(raise_zero_division)
            with pytest.raises(ZeroDivisionError):
                model(2 * x)
            with pytest.raises(ZeroDivisionError), torch.no_grad():
                model(2 * x)
            handle.remove()
        loss = model(3 * x).sum()
        fabric.backward(loss)
        gradient = flat_gradient(model)
        model.zero_grad()
        return gradient

    expected = gradient(fails=False)
    assert torch.equal(gradient(fails=True), expected)
    assert torch.equal(gradient(fails=False), expected)
    return True


def test_a_forward_pass_left_by_an_error_changes_no_later_gradient() -> None:
    assert in_ranks(fail_in_forward) == [True, True]


def drop_losses(fabric: Fabric, drops: bool) -> Tensor:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    x = torch.arange(8.0).reshape(2, 4)
    for _ in range(3):
        loss = model(x).square().mean()
        fabric.backward(loss)
        if drops:
            model(x)
        optimizer.step()
        optimizer.zero_grad()
    return model(x).detach()


@pytest.mark.parametrize("sharding_strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_pass_whose_loss_is_dropped_before_a_step_leaves_no_old_weights(
    sharding_strategy: str,
) -> None:
    outputs = in_ranks(drop_losses, True, sharding_strategy=sharding_strategy)
    expected = in_ranks(drop_losses, False, sharding_strategy=sharding_strategy)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def fail_in_backward_and_interrupt_forward(fabric: Fabric) -> bool:
    module = Transformer()
    model = fabric.setup(module)
    x = torch.ones(2, 5, 4)

    def gradient() -> Tensor:
        loss = model(3 * x).sum()
        fabric.backward(loss)
        gradient = flat_gradient(model)
        model.zero_grad()
        return gradient

    expected = gradient()
    handle = model.blocks[0].mlp.register_full_backward_pre_hook(raise_zero_division)
    loss = model(2 * x).sum()
    with pytest.raises(ZeroDivisionError):
        fabric.backward(loss)
    handle.remove()
    model.zero_grad()
    for _ in range(2):
        assert torch.equal(gradient(), expected)

    handle = model.blocks[1].mlp.register_forward_pre_hook(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(2 * x)
    handle.remove()
    for _ in range(2):
        assert torch.equal(gradient(), expected)
    return True


def test_an_error_in_a_backward_pass_and_an_interrupt_change_no_later_gradient() -> None:
    assert in_ranks(fail_in_backward_and_interrupt_forward) == [True, True]


def gradients_with_a_checkpoint(fabric: Fabric) -> list[Tensor]:
    """Return the gradients of a plain pass, of a recomputed one, and after one that raised."""
    torch.manual_seed(0)
    module = Transformer().double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    model = fabric.setup(module)

    def gradient(output: Tensor) -> Tensor:
        fabric.backward(output.pow(2).mean())
        result = flat_gradient(model)
        model.zero_grad()
        return result

    def recomputed() -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    gradients = [gradient(model(x)), gradient(recomputed())]
    output = recomputed()
    # The backward pass calls this hook when it recomputes.
    handle = model.blocks[1].register_forward_pre_hook(raise_zero_division)
    with pytest.raises(ZeroDivisionError):
        fabric.backward(output.sum())
    handle.remove()
    model.zero_grad()
    gradients.append(gradient(recomputed()))
    return gradients


@pytest.mark.parametrize("sharding_strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_checkpoint_around_the_whole_model_changes_no_gradient(sharding_strategy: str) -> None:
    for expected, *gradients in in_ranks(
        gradients_with_a_checkpoint, sharding_strategy=sharding_strategy
    ):
        for gradient in gradients:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


class Methods(Net):
    def by_submodules(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.encoder(x))).pow(2).mean()


def call_methods(fabric: Fabric) -> bool:
    torch.manual_seed(0)
    module = Methods()
    model = fabric.setup(module)
    x = torch.full((2, 4), float(fabric.global_rank + 1))

    def gradient(loss: Tensor) -> Tensor:
        fabric.backward(loss)
        gradient = flat_gradient(model)
        model.zero_grad()
        return gradient

    assert "mark_forward_method" in outcome(lambda: model.by_submodules(x))
    model.mark_forward_method("by_submodules")
    expected = gradient(model(x).pow(2).mean())
    assert torch.equal(gradient(model.training_step(x)), expected)
    assert torch.equal(gradient(model.by_submodules(x)), expected)
    return True


def test_methods_that_compute_a_loss_are_forward_passes() -> None:
    assert in_ranks(call_methods) == [True, True]


def test_the_strategy_works_without_fabric() -> None:
    strategy = FSDPStrategy()
    strategy.setup_environment()
    try:
        model = strategy.setup_module(strategy.module_to_device(Net()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        strategy.check_setup(None, [optimizer])
        model(torch.ones(1, 4)).sum().backward()
        assert strategy.optimizer_step(optimizer, lambda: 5.0) == 5.0
        state = strategy.full_state(optimizer.state_dict())
        for slots in state["state"].values():
            assert type(slots["momentum_buffer"]) is Tensor
        strategy.load_optimizer_state_dict(optimizer, state)
        strategy.load_module_state_dict(model, strategy.get_module_state_dict(model))
        refused = outcome(lambda: strategy.no_backward_sync(Net()))
    finally:
        strategy.teardown()
    assert "was not set up with FSDP" in refused
