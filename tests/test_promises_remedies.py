"""Errors say what helps: of torch's sharded tensors, of what was set up, and of calls that were meant otherwise."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fabric import Fabric
from fabric.strategies import FSDPStrategy
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)


def sharded(function: Callable[..., Any]) -> list[Any]:
    return run_in_ranks(function, strategy=FSDPStrategy(start_method="forkserver"))


class Tower(nn.Module):
    """Blocks and a head, none of which has as many rows as two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, in_place: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if in_place:
                x += 1
        return self.head(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.head(x)


X = torch.arange(30.0).view(2, 3, 5) / 30


# -- errors of sharded tensors ----------------------------------------------------------------------------------------


def penalty(model: Any) -> Tensor:
    weights = (getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters())
    return torch.stack([weight.pow(2).sum() for weight in weights]).sum()


def raw_errors(fabric: Fabric) -> dict[str, str]:
    model = fabric.setup(Tower())

    def mixed() -> None:
        fabric.backward(model(X).sum() + model.blocks[0][0].weight.pow(2).sum())

    def second_derivative() -> None:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        fabric.backward(slope.pow(2).sum())

    def in_place() -> None:
        fabric.backward(model(X, in_place=True).sum())

    def sparse() -> None:
        class Table(nn.Linear):
            def forward(self, index: Tensor) -> Tensor:
                return nn.functional.embedding(index, self.weight, sparse=True)

        fabric.backward(fabric.setup(Table(4, 6, bias=False))(torch.tensor([1, 2])).sum())

    return {case.__name__: outcome(case) for case in (mixed, second_derivative, in_place, sparse)}


def test_b11_raw_errors_of_sharded_tensors_are_explained() -> None:
    for found in sharded(raw_errors):
        assert "weight.full_tensor() for such a use, before model(batch)" in found["mixed"]
        assert 'strategy="ddp" for a loss of gradients' in found["second_derivative"]
        assert "y = y + 1 for y += 1" in found["in_place"]
        assert "dense gradients" in found["sparse"]
        assert all(text.count("Write:") == 1 for text in found.values())


def with_penalty(fabric: Fabric) -> tuple[list[Tensor], list[Tensor | None]]:
    plain = Tower()
    model = fabric.setup(copy.deepcopy(plain))
    for net, backward in ((plain, Tensor.backward), (model, fabric.backward)):
        extra = penalty(net)
        backward(net(X).sum() + extra)
    return [each.grad.full_tensor() for each in model.parameters()], [each.grad for each in plain.parameters()]


def test_b11_the_penalty_that_the_error_suggests_has_the_right_gradients() -> None:
    for own, plain in sharded(with_penalty):
        torch.testing.assert_close(own, plain)


def refusals(fabric: Fabric) -> dict[str, str]:
    def made(kind: type[optim.Optimizer], net: nn.Module) -> str:
        return outcome(lambda: fabric.setup(net, kind(net.parameters(), lr=0.1)))

    even = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return {
        "sparse": outcome(lambda: fabric.setup(nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)))),
        "Adafactor": made(optim.Adafactor, Tower()),
        "Rprop": made(optim.Rprop, copy.deepcopy(even)),
        "LBFGS": made(optim.LBFGS, Tower()),
        "even": made(optim.LBFGS, even),
    }


def test_b11_what_cannot_train_sharded_is_refused_before_anything_changes() -> None:
    for found in sharded(refusals):
        assert found.pop("even") == "fine"
        assert "these have sparse gradients, which cannot be sharded: 0" in found.pop("sparse")
        assert all("torch has no such step for shards" in text for text in found.values())


def whole_states(fabric: Fabric) -> dict[str, bool]:
    torch.manual_seed(0)
    state = {name: value + 1 for name, value in Tower().state_dict().items()}
    net = Tower()
    model, optimizer = fabric.setup(net, optim.Adam(net.parameters()))
    fabric.backward(model(X).sum())
    optimizer.step()
    kept = {name: each.full_tensor().clone() for name, each in optimizer.state[net.head.weight].items() if each.dim()}
    optimizer.load_state_dict(fabric.strategy.full_state(optimizer.state_dict()))
    again = {name: each.full_tensor() for name, each in optimizer.state[net.head.weight].items() if each.dim()}

    def loaded(prefix: str = "") -> bool:
        named = ((name, each.full_tensor()) for name, each in model.named_parameters() if name.startswith(prefix))
        return all(torch.equal(value, state[name]) for name, value in named)

    with torch.no_grad():
        model(X)  # leaves gathered weights
    model.blocks[0].load_state_dict({name[9:]: value for name, value in state.items() if name.startswith("blocks.0")})
    found = {"optimizer": all(torch.equal(kept[name], again[name]) for name in kept), "part": loaded("blocks.0")}
    nn.ModuleDict({"inside": model}).load_state_dict({f"inside.{name}": value for name, value in state.items()})
    return {**found, "around": loaded(), "missing": "Missing key" in outcome(lambda: model.load_state_dict({}))}


def test_b11_whole_state_dicts_load_into_sharded_modules() -> None:
    assert sharded(whole_states) == [dict.fromkeys(("optimizer", "part", "around", "missing"), True)] * 2


def early_state(fabric: Fabric) -> tuple[list[Tensor], list[Tensor]]:
    plain = Tower()
    net = copy.deepcopy(plain)
    adagrad = {each: optim.Adagrad(each.parameters(), lr=0.1, initial_accumulator_value=0.5) for each in (plain, net)}
    model, optimizer = fabric.setup(net, adagrad[net])
    for _ in range(3):
        adagrad[plain].zero_grad()
        plain(X).sum().backward()
        adagrad[plain].step()
        optimizer.zero_grad()
        fabric.backward(model(X).sum())
        optimizer.step()
    return [each.full_tensor().detach() for each in model.parameters()], [each.detach() for each in plain.parameters()]


def test_b11_the_early_state_of_adagrad_is_sharded_with_its_parameter() -> None:
    for own, plain in sharded(early_state):
        torch.testing.assert_close(own, plain)


class Raises(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError("as on a device without room")


def after_a_failure(fabric: Fabric) -> tuple[str, list[Tensor], list[Tensor | None]]:
    plain = Tower()
    model = fabric.setup(copy.deepcopy(plain))
    hook = model.blocks[0].register_forward_hook(lambda part, args, output: Raises.apply(output))
    loss = model(X).sum()
    hook.remove()
    failure = outcome(lambda: fabric.backward(loss))
    model.zero_grad()
    for _ in range(2):
        plain(X).sum().backward()
        fabric.backward(model(X).sum())
    return failure, [each.grad.full_tensor() for each in model.parameters()], [each.grad for each in plain.parameters()]


def test_b11_a_backward_pass_that_raised_leaves_no_gradient_unreduced_in_the_next() -> None:
    for failure, own, plain in sharded(after_a_failure):
        assert "without room" in failure
        torch.testing.assert_close(own, plain)
