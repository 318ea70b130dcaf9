"""Errors say what helps: of torch's sharded tensors, of what was set up, and of calls that were meant otherwise."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric._torch import local_tensor
from fabric.strategies import DDPStrategy, FSDPStrategy
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)


def sharded(function: Callable[..., Any]) -> list[Any]:
    return run_in_ranks(function, strategy=FSDPStrategy(start_method="forkserver"))


class Tower(nn.Module):
    """Blocks and a head, none of which has as many rows as two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)
        )
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
    weights = (
        getattr(each, "full_tensor", lambda each=each: each)() for each in model.parameters()
    )
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


def test_raw_errors_of_sharded_tensors_are_explained() -> None:
    for actual in sharded(raw_errors):
        assert "weight.full_tensor() for such a use, before model(batch)" in actual["mixed"]
        assert 'strategy="ddp" for a loss of gradients' in actual["second_derivative"]
        assert "y = y + 1 for y += 1" in actual["in_place"]
        assert "dense gradients" in actual["sparse"]
        assert all(text.count("Write:") == 1 for text in actual.values())


def with_penalty(fabric: Fabric) -> tuple[list[Tensor], list[Tensor | None]]:
    plain = Tower()
    model = fabric.setup(copy.deepcopy(plain))
    for net, backward in ((plain, Tensor.backward), (model, fabric.backward)):
        extra = penalty(net)
        backward(net(X).sum() + extra)
    return [parameter.grad.full_tensor() for parameter in model.parameters()], [
        parameter.grad for parameter in plain.parameters()
    ]


def test_the_penalty_that_the_error_suggests_has_the_right_gradients() -> None:
    for own, plain in sharded(with_penalty):
        torch.testing.assert_close(own, plain)


def refusals(fabric: Fabric) -> dict[str, str]:
    def made(kind: type[optim.Optimizer], net: nn.Module) -> str:
        return outcome(lambda: fabric.setup(net, kind(net.parameters(), lr=0.1)))

    even = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return {
        "sparse": outcome(
            lambda: fabric.setup(nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)))
        ),
        "Adafactor": made(optim.Adafactor, Tower()),
        "Rprop": made(optim.Rprop, copy.deepcopy(even)),
        "LBFGS": made(optim.LBFGS, Tower()),
        "even": made(optim.LBFGS, even),
    }


def test_what_cannot_train_sharded_is_refused_before_anything_changes() -> None:
    for actual in sharded(refusals):
        assert actual.pop("even") == "fine"
        assert "these have sparse gradients, which cannot be sharded: 0" in actual.pop("sparse")
        assert all("torch has no such step for shards" in text for text in actual.values())


def whole_states(fabric: Fabric) -> dict[str, bool]:
    torch.manual_seed(0)
    state = {name: value + 1 for name, value in Tower().state_dict().items()}
    net = Tower()
    model, optimizer = fabric.setup(net, optim.Adam(net.parameters()))
    fabric.backward(model(X).sum())
    optimizer.step()
    kept = {
        name: each.full_tensor().clone()
        for name, each in optimizer.state[net.head.weight].items()
        if each.dim()
    }
    optimizer.load_state_dict(fabric.strategy.full_state(optimizer.state_dict()))
    again = {
        name: each.full_tensor()
        for name, each in optimizer.state[net.head.weight].items()
        if each.dim()
    }

    def loaded(prefix: str = "") -> bool:
        named = (
            (name, each.full_tensor())
            for name, each in model.named_parameters()
            if name.startswith(prefix)
        )
        return all(torch.equal(value, state[name]) for name, value in named)

    with torch.no_grad():
        model(X)  # leaves gathered weights
    model.blocks[0].load_state_dict(
        {name[9:]: value for name, value in state.items() if name.startswith("blocks.0")}
    )
    found = {
        "optimizer": all(torch.equal(kept[name], again[name]) for name in kept),
        "part": loaded("blocks.0"),
    }
    nn.ModuleDict({"inside": model}).load_state_dict(
        {f"inside.{name}": value for name, value in state.items()}
    )
    return {
        **found,
        "around": loaded(),
        "missing": "Missing key" in outcome(lambda: model.load_state_dict({})),
    }


def test_whole_state_dicts_load_into_sharded_modules() -> None:
    assert (
        sharded(whole_states)
        == [dict.fromkeys(("optimizer", "part", "around", "missing"), True)] * 2
    )


def early_state(fabric: Fabric) -> tuple[list[Tensor], list[Tensor]]:
    plain = Tower()
    net = copy.deepcopy(plain)
    adagrad = {
        each: optim.Adagrad(each.parameters(), lr=0.1, initial_accumulator_value=0.5)
        for each in (plain, net)
    }
    model, optimizer = fabric.setup(net, adagrad[net])
    for _ in range(3):
        adagrad[plain].zero_grad()
        plain(X).sum().backward()
        adagrad[plain].step()
        optimizer.zero_grad()
        fabric.backward(model(X).sum())
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()], [
        parameter.detach() for parameter in plain.parameters()
    ]


def test_the_early_state_of_adagrad_is_sharded_with_its_parameter() -> None:
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
    return (
        failure,
        [parameter.grad.full_tensor() for parameter in model.parameters()],
        [parameter.grad for parameter in plain.parameters()],
    )


def test_a_backward_pass_that_raised_leaves_no_gradient_unreduced_in_the_next() -> None:
    for failure, own, plain in sharded(after_a_failure):
        assert "without room" in failure
        torch.testing.assert_close(own, plain)


# -- what was set up --------------------------------------------------------------------------------------------------


def converted(fabric: Fabric) -> dict[str, str]:
    model = fabric.setup(Tower())
    found = {
        name: outcome(getattr(model, name))
        for name in ("double", "float", "half", "bfloat16", "cpu")
    }
    found["to"] = outcome(lambda: model.to(torch.float64))
    found["type"] = outcome(lambda: model.type(torch.float64))
    found["same"] = outcome(lambda: model.to("cpu", torch.float32))
    fabric.backward(model(X).sum())
    return found


@pytest.mark.parametrize("strategy", [FSDPStrategy, DDPStrategy])
def test_a_dtype_that_changes_after_setup_is_refused_where_gradients_are_synchronized(
    strategy: Any,
) -> None:
    for actual in run_in_ranks(converted, strategy=strategy(start_method="forkserver")):
        fine = {name for name, text in actual.items() if text == "fine"}
        assert fine == {"float", "cpu", "same"}
        for name in ("to", "type"):
            assert "synchronized in torch.float32, and would then be torch.float64" in actual[name]


def test_a_dtype_that_changes_after_setup_is_that_of_the_next_forward_pass_on_one_device() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model = fabric.setup(Tower())
        assert model.double()(X).dtype is torch.float64
        assert model.to(torch.bfloat16)(X).dtype is torch.bfloat16


def test_a_container_that_was_set_up_is_one() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
        model = fabric.setup(nn.Sequential(*layers))
        net = fabric.setup(Tower())
        assert (len(model), model[0], list(model), model[-1] in model) == (
            3,
            layers[0],
            layers,
            True,
        )
        assert len(model[:2]) == 2
        assert net  # is true, as any module without a length
        for action in (lambda: len(net), lambda: net[0], lambda: iter(net)):
            assert "Tower" in outcome(action)


def close_one(fabric: Fabric, kept: str) -> tuple[float, list[Tensor], bool]:
    other = Fabric(accelerator="cpu", devices=2, strategy=type(fabric.strategy)())
    other.launch()
    closed, left = (fabric, other) if kept == "second" else (other, fabric)
    plain = Tower()
    model = left.setup(copy.deepcopy(plain))
    closed.teardown()
    left.backward(model(X + left.global_rank).sum())
    total = left.all_reduce(1.0, reduce_op="sum")
    left.teardown()
    return (
        total,
        [local_tensor(parameter.grad) for parameter in model.parameters()],
        torch.distributed.is_initialized(),
    )


@pytest.mark.parametrize("kept", ["first", "second"])
def test_closing_one_of_two_fabrics_leaves_the_other_alive(kept: str) -> None:
    (total, first, is_left), (_, second, _) = run_in_ranks(close_one, kept)
    assert (total, is_left) == (2.0, False)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# -- remedies ---------------------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Features and a scale, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(x), self.scale


def gathered(fabric: Fabric) -> list[str]:
    def train(sync_grads: bool, fails: str) -> str:
        net = TwoTowers()
        model, optimizer = fabric.setup(net, optim.SGD(net.parameters(), lr=0.1))

        def step() -> None:
            features, scale = model(torch.ones(2, 4))
            fabric.backward((fabric.all_gather(features, sync_grads=sync_grads) * scale).sum())
            if fails == "step":
                optimizer.step()

        return outcome(lambda: (step(), step()))

    return [train(False, "step"), train(False, "forward"), train(True, "step")]


def test_features_gathered_without_gradients_are_told_to_be_gathered_with_them() -> None:
    for step, forward, fine in run_in_ranks(gathered):
        assert "fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors; else" in step
        assert (
            "fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors; else" in forward
        )
        assert fine == "fine"


def by_method(fabric: Fabric) -> str:
    model = fabric.setup(Tower())
    return outcome(lambda: fabric.backward(model.encode(X).sum()))


@pytest.mark.parametrize("strategy", [FSDPStrategy, DDPStrategy])
def test_a_method_that_bypasses_the_forward_pass_is_called_by_its_name(strategy: Any) -> None:
    for text in run_in_ranks(by_method, strategy=strategy(start_method="forkserver")):
        assert "model.encode(...)" in text
        assert "model.head" not in text


def test_a_missing_checkpoint_suggests_checkpoints(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.save(tmp_path / "train.pt", {"step": 1})
        (tmp_path / "train.py").write_text("pass")
        (tmp_path / "unlike").write_text("it")
        missing = outcome(lambda: fabric.load(tmp_path / "trian.pt"))
    assert missing.strip().endswith(f"Write: {tmp_path / 'train.pt'}")


def test_a_file_that_names_a_class_is_told_the_safe_way_first(tmp_path: Path) -> None:
    torch.save({"net": Tower()}, tmp_path / "net.pt")
    with Fabric(accelerator="cpu", devices=1) as fabric:
        refused = outcome(lambda: fabric.load(tmp_path / "net.pt"))
    assert (
        -1
        < refused.find("add_safe_globals")
        < refused.find("whose author you trust, weights_only=False")
    )


def test_what_goes_elsewhere_is_told_where() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        net = Tower()
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
        assert "setup_dataloaders(loader)" in outcome(
            lambda: fabric.setup(net, optimizer, DataLoader([1, 2]))
        )
        assert "setup(..., scheduler=...)" in outcome(
            lambda: fabric.setup(net, optimizer, scheduler)
        )


def ends_in_a_view(fabric: Fabric) -> tuple[list[str], list[Tensor], list[Tensor | None]]:
    with warnings.catch_warnings(record=True) as caught:
        plain = Tower()
        model = fabric.setup(copy.deepcopy(plain))
        for net, backward in ((plain, Tensor.backward), (model, fabric.backward)):
            output = net(X)
            output *= 2
            backward(output.pow(2).sum())
    texts = [str(each.message) for each in caught if "view" in str(each.message)]
    return (
        texts,
        [parameter.grad.full_tensor() for parameter in model.parameters()],
        [parameter.grad for parameter in plain.parameters()],
    )


def test_a_model_that_returns_a_view_is_not_warned_about_and_its_output_may_change_in_place() -> (
    None
):
    for texts, own, plain in sharded(ends_in_a_view):
        assert texts == []
        torch.testing.assert_close(own, plain)
