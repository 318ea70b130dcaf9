"""FSDP on real processes: what its contract says beyond equal numbers, which tests/test_parity.py shows."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import FSDPStrategy
from tests.loops import Transformer, make_model
from tests.models import Net, OneWeight
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)


def in_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    """What ``function(fabric, *args)`` returned in each rank of an FSDP job; options are those of the strategy."""
    precision = options.pop("precision", None)
    strategy = FSDPStrategy(start_method="forkserver", **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy, precision=precision)


def whole(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


# -- optimizers -------------------------------------------------------------------------------------------------------


def orders(fabric: Fabric) -> dict[str, str]:
    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def stepped(net: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(net)
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return optimizer

    def alone_and_stale() -> None:
        net = Net()
        optimizer = sgd(net)
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
        fabric.setup(net, stepped(net))

    def made_between_forward_and_backward() -> None:
        model = fabric.setup_module(Transformer())
        loss = model(torch.ones(1, 5, 4)).sum()
        optimizer = sgd(model)
        fabric.backward(loss)
        fabric.setup_optimizers(optimizer)

    def made_after_an_evaluation() -> None:
        model = fabric.setup_module(Net())
        with torch.no_grad():
            model(torch.ones(1, 4))
        fabric.setup_optimizers(sgd(model))

    def of_the_set_up_module() -> None:
        model = fabric.setup_module(Net())
        optimizer = stepped(model)
        fabric.setup_optimizers(optimizer)

    cases = (
        alone_and_stale,
        partly_stale,
        with_state,
        of_the_set_up_module,
        made_after_an_evaluation,
    )
    cases += (made_between_forward_and_backward,)
    return {case.__name__: outcome(case) for case in cases}


def test_an_optimizer_that_would_step_on_nothing_is_refused() -> None:
    for results in in_ranks(orders):
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


def repointed(fabric: Fabric) -> bool:
    net = Net()
    groups = [{"params": net.encoder.parameters()}, {"params": [net.head.weight], "lr": 0.5}]
    given = torch.optim.SGD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1)
    model, optimizer, _ = fabric.setup(net, given, scheduler=scheduler)
    expected = [[model.encoder.weight, model.encoder.bias], [model.head.weight]]
    same = [
        all(actual is parameter for actual, parameter in zip(group["params"], own, strict=True))
        for group, own in zip(optimizer.param_groups, expected, strict=True)
    ]
    return optimizer is given and same == [True, True]


def test_groups_of_an_optimizer_without_state_point_at_the_shards() -> None:
    assert in_ranks(repointed) == [True, True]


# -- synchronisation --------------------------------------------------------------------------------------------------


def sync_states(fabric: Fabric) -> list[bool]:
    model = fabric.setup(Net())
    strategy = fabric.strategy
    prepared = model._fabric_prepared
    synchronizes = strategy.gradient_contract(prepared).synchronizes
    seen = []
    with fabric.no_backward_sync(model):
        with fabric.no_backward_sync(model, enabled=False), fabric.no_backward_sync([model, model]):
            seen.append(synchronizes())
        with strategy.block_backward_sync(prepared):
            pass
        fabric.backward(model(torch.ones(1, 4)).sum())
        seen.append(synchronizes() or any(p.grad is not None for p in model.parameters()))
    try:
        with fabric.no_backward_sync(model):
            raise KeyError
    except KeyError:
        fabric.backward(model(torch.ones(1, 4)).sum())
        seen.append(synchronizes() and all(p.grad is not None for p in model.parameters()))
    return seen


def test_no_backward_sync_restores_the_state_before() -> None:
    assert in_ranks(sync_states) == [[False, False, True]] * 2


def overflow_on_one_rank(fabric: Fabric) -> tuple[list[float], str]:
    net = OneWeight()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weights = []
    for step in range(2):
        bad = step == 0 and fabric.global_rank == 1
        # Only the shard of the last rank overflows.
        x = torch.ones(4).index_fill(0, torch.tensor([3]), float("inf") if bad else 1.0)
        fabric.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(whole(model)[0].mean().item())
    return weights, fabric.describe().split()[-1]


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks() -> None:
    for weights, scale in in_ranks(overflow_on_one_rank, precision="16-mixed"):
        assert weights == [1.0, pytest.approx(0.9)]
        assert scale == "32768"


def clipped(fabric: Fabric, norm_type: float) -> tuple[bool, float, Tensor]:
    plain, optimizer = make_model()
    model, optimizer = fabric.setup(plain, optimizer)
    fabric.backward(model(torch.ones(2, 5, 4)).sum())
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1, norm_type=norm_type)
    after = torch.cat([full_tensor(parameter.grad).flatten() for parameter in model.parameters()])
    return type(norm) is Tensor and norm.shape == (), norm.item(), after


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_is_that_of_the_whole_gradient(norm_type: float) -> None:
    model, _ = make_model()
    model(torch.ones(2, 5, 4)).sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for is_plain, norm, after in in_ranks(clipped, norm_type, ranks=3):
        assert is_plain
        assert norm == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(after, gradients, rtol=1e-4, atol=1e-6)


# -- doors ------------------------------------------------------------------------------------------------------------


def doors(fabric: Fabric) -> dict[str, str]:
    net = Transformer()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(2, 5, 4)
    h = torch.ones(2, 5, 8)
    results = {
        "front": outcome(lambda: fabric.backward(model(x).sum())),
        "part": outcome(lambda: model.embedding(x)),
        "unit": outcome(lambda: model.blocks[0](h)),
        "unit without gradients": outcome(torch.no_grad()(lambda: model.blocks[1](h))),
        "deepcopy": outcome(lambda: copy.deepcopy(model)),
        "pickle": outcome(lambda: pickle.dumps(model)),
    }
    outcome(lambda: model(torch.ones(2, 5, 3)))
    results["part after an error"] = outcome(lambda: model.embedding(x))
    return results


def test_a_part_called_on_its_own_is_refused_at_the_call() -> None:
    for rank, results in enumerate(in_ranks(doors)):
        assert results.pop("front") == "fine"
        assert "sharded over the ranks" in results.pop("deepcopy")
        assert "fabric.save" in results.pop("pickle")
        for text in results.values():
            assert text.startswith("UsageError: model.")
            assert f"on rank {rank}" in text
            assert "mark_forward_method" in text
        assert "model.blocks[1](...)" in results["unit without gradients"]


def after_an_error(fabric: Fabric) -> list[bool]:
    model = fabric.setup(Transformer())
    x = torch.ones(2, 5, 4)

    def gradients(fail: bool) -> Tensor:
        with fabric.no_backward_sync(model):
            fabric.backward(model(x).sum())
        if fail:
            handle = model.blocks[1].mlp.register_forward_pre_hook(lambda module, args: 1 / 0)
            assert outcome(lambda: model(2 * x)).startswith("ZeroDivisionError")
            assert outcome(torch.no_grad()(lambda: model(2 * x))).startswith("ZeroDivisionError")
            handle.remove()
        fabric.backward(model(3 * x).sum())
        found = torch.cat(
            [full_tensor(parameter.grad).flatten() for parameter in model.parameters()]
        )
        model.zero_grad()
        return found

    expected = gradients(fail=False)
    return [
        torch.equal(gradients(fail=True), expected),
        torch.equal(gradients(fail=False), expected),
    ]


def test_a_forward_pass_left_by_an_error_changes_no_later_gradient() -> None:
    assert in_ranks(after_an_error) == [[True, True]] * 2


def without_its_backward(fabric: Fabric, drops: bool) -> Tensor:
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.arange(8.0).reshape(2, 4)
    for _ in range(3):
        fabric.backward(model(x).square().mean())
        if drops:
            model(x)
        optimizer.step()
        optimizer.zero_grad()
    return model(x).detach()


@pytest.mark.parametrize("sharding_strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_pass_whose_loss_is_dropped_before_a_step_leaves_no_old_weights(
    sharding_strategy: str,
) -> None:
    for drops, expected in zip(
        in_ranks(without_its_backward, True, sharding_strategy=sharding_strategy),
        in_ranks(without_its_backward, False, sharding_strategy=sharding_strategy),
        strict=True,
    ):
        assert torch.equal(drops, expected)


def after_other_ends(fabric: Fabric) -> list[bool]:
    """Gradients after a backward pass that failed half way, and after a forward pass that Ctrl-C ended."""
    model = fabric.setup(Transformer())
    x = torch.ones(2, 5, 4)

    def gradients() -> Tensor:
        fabric.backward(model(3 * x).sum())
        found = torch.cat(
            [full_tensor(parameter.grad).flatten() for parameter in model.parameters()]
        )
        model.zero_grad()
        return found

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    expected = gradients()
    handle = model.blocks[0].mlp.register_full_backward_pre_hook(lambda module, grad: 1 / 0)
    assert outcome(lambda: fabric.backward(model(2 * x).sum())).startswith("ZeroDivisionError")
    handle.remove()
    model.zero_grad()
    equal = [torch.equal(gradients(), expected) for _ in range(2)]
    handle = model.blocks[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(2 * x)
    handle.remove()
    return [*equal, *(torch.equal(gradients(), expected) for _ in range(2))]


def test_an_error_in_a_backward_pass_and_an_interrupt_change_no_later_gradient() -> None:
    assert in_ranks(after_other_ends) == [[True] * 4] * 2


class Methods(Net):
    def by_parts(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.encoder(x))).pow(2).mean()


def methods(fabric: Fabric) -> list[Any]:
    torch.manual_seed(0)
    model = fabric.setup(Methods())
    x = torch.full((2, 4), float(fabric.global_rank + 1))
    refused = outcome(lambda: model.by_parts(x))
    model.mark_forward_method("by_parts")
    gradients = []
    for loss in (
        lambda: model(x).pow(2).mean(),
        lambda: model.training_step(x),
        lambda: model.by_parts(x),
    ):
        fabric.backward(loss())
        gradients.append(
            torch.cat([full_tensor(parameter.grad).flatten() for parameter in model.parameters()])
        )
        model.zero_grad()
    return [refused, *gradients]


def test_methods_that_compute_a_loss_are_forward_passes() -> None:
    for refused, front, step, marked in in_ranks(methods):
        assert "mark_forward_method" in refused
        assert torch.equal(front, step)
        assert torch.equal(front, marked)


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
        assert all(type(slots["momentum_buffer"]) is Tensor for slots in state["state"].values())
        strategy.load_optimizer_state_dict(optimizer, state)
        strategy.load_module_state_dict(model, strategy.get_module_state_dict(model))
        refused = outcome(lambda: strategy.no_backward_sync(Net()))
    finally:
        strategy.teardown()
    assert "was not set up with FSDP" in refused
