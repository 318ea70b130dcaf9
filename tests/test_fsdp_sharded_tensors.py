"""Sharded tensors in the hands of the user: what errors say, and what works as on one device."""

import copy
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import FSDPStrategy
from tests.ranks import SharedRanks, outcome, run_in_ranks

X = torch.arange(30.0).view(2, 3, 5) / 30


class Tower(nn.Module):
    """Two blocks and a head, whose rows two ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_block(), make_block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, in_place: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if in_place:
                x += 1
        return self.head(x)


def make_block() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 5),
        nn.Tanh(),
        nn.Linear(5, 5),
    )


class Tensors(NamedTuple):
    """The full tensors of a sharded model, and the tensors of a plain model."""

    sharded: list[Tensor]
    plain: list[Tensor]


def parameters_of(model: nn.Module, plain: nn.Module) -> Tensors:
    tensors = Tensors([], [])
    for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        tensors.sharded.append(full_tensor(sharded.detach()))
        tensors.plain.append(parameter.detach())
    return tensors


def gradients_of(model: nn.Module, plain: nn.Module) -> Tensors:
    tensors = Tensors([], [])
    for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        tensors.sharded.append(full_tensor(sharded.grad))
        tensors.plain.append(parameter.grad)
    return tensors


def assert_equals_plain(tensors: Tensors) -> None:
    torch.testing.assert_close(tensors.sharded, tensors.plain)


def run_sharded(function: Callable[..., Any]) -> list[Any]:
    return run_in_ranks(function, strategy=FSDPStrategy(start_method="forkserver"))


# -- errors of torch -------------------------------------------------------------------------------


class EmbeddingTable(nn.Linear):
    """A layer whose weight has sparse gradients."""

    def forward(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self.weight, sparse=True)


class OwnerOfOptimizer(nn.Module):
    """A module that calls the step of its optimizer, as modules of other libraries do."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer

    def train_step(self) -> None:
        self.optimizer.step()


def torch_errors(fabric: Fabric) -> dict[str, str]:
    module = Tower()
    model = fabric.setup(module)

    def add_weight_to_output() -> None:
        output = model(X)
        weight = model.blocks[0][0].weight
        fabric.backward(output.sum() + weight.pow(2).sum())

    def second_derivative() -> None:
        x = X.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = slope.pow(2).sum()
        fabric.backward(loss)

    def sparse() -> None:
        module = EmbeddingTable(4, 6, bias=False)
        table = fabric.setup(module)
        rows = table(torch.tensor([1, 2]))
        loss = rows.sum()
        fabric.backward(loss)

    def gradients_of_shards() -> None:
        shards = list(model.parameters())
        torch.autograd.grad(model(X).sum(), shards)

    def step_with_whole_gradients(*, is_in_module: bool = False) -> None:
        layer = nn.Linear(4, 4)
        prepared, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        loss = prepared(torch.ones(2, 4)).sum()
        gradients = torch.autograd.grad(loss, list(prepared.parameters()))
        for parameter, gradient in zip(prepared.parameters(), gradients, strict=True):
            parameter.grad = gradient
        if is_in_module:
            OwnerOfOptimizer(optimizer).train_step()
        else:
            optimizer.step()

    return {
        "add_weight_to_output": outcome(add_weight_to_output),
        "second_derivative": outcome(second_derivative),
        "sparse": outcome(sparse),
        "gradients_of_shards": outcome(partial(explained, fabric, gradients_of_shards)),
        "step_with_whole_gradients": outcome(partial(explained, fabric, step_with_whole_gradients)),
        "step_in_module": outcome(
            partial(explained, fabric, partial(step_with_whole_gradients, is_in_module=True))
        ),
    }


def explained(fabric: Fabric, action: Callable[[], None]) -> None:
    """Run an action. The end of a rank explains an error of the user's code in the same way."""
    try:
        action()
    except Exception as error:
        fabric.strategy._explain_error(error)
        raise


def test_errors_of_torch_about_sharded_tensors_are_explained() -> None:
    for texts in run_sharded(torch_errors):
        remedy = "weight.full_tensor() for this use, before model(batch)"
        assert remedy in texts["add_weight_to_output"]
        assert 'strategy="ddp" for a loss of gradients' in texts["second_derivative"]
        assert "dense gradients" in texts["sparse"]
        assert "the parameters of a sharded model are shards" in texts["gradients_of_shards"]
        for name in ("step_with_whole_gradients", "step_in_module"):
            text = texts[name]
            assert "parameter.grad has the gradient of a whole parameter" in text
            assert "fabric.backward(loss), which also averages over the ranks" in text
        for text in texts.values():
            assert text.count("Write:") == 1


def change_in_place(fabric: Fabric) -> Tensors | str:
    """Return the gradients after a change in place of a block's output, or the error."""
    plain = Tower()
    module = copy.deepcopy(plain)
    plain_loss = plain(X, in_place=True).sum()
    plain_loss.backward()
    model = fabric.setup(module)
    loss = model(X, in_place=True).sum()
    error = outcome(lambda: fabric.backward(loss))
    if "Write:" in error:
        return error
    return gradients_of(model, plain)


def test_a_change_in_place_of_an_output_is_right_or_explained() -> None:
    for outcome_of_rank in run_sharded(change_in_place):
        # torch 2.15 can do it.
        if isinstance(outcome_of_rank, Tensors):
            assert_equals_plain(outcome_of_rank)
        else:
            assert "y = y + 1 for y += 1" in outcome_of_rank


def penalty(model: nn.Module) -> Tensor:
    total = torch.zeros(())
    for parameter in model.parameters():
        weight = full_tensor(parameter)
        total = total + weight.pow(2).sum()
    return total


def gradients_with_penalty(fabric: Fabric) -> Tensors:
    plain = Tower()
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    plain_penalty = penalty(plain)
    plain_loss = plain(X).sum() + plain_penalty
    plain_loss.backward()
    sharded_penalty = penalty(model)
    loss = model(X).sum() + sharded_penalty
    fabric.backward(loss)
    return gradients_of(model, plain)


def test_the_penalty_that_the_error_suggests_has_the_right_gradients() -> None:
    for gradients in run_sharded(gradients_with_penalty):
        assert_equals_plain(gradients)


class Recurrent(nn.Module):
    """A recurrent layer whose hidden state is made in the way that the argument says."""

    def __init__(self, from_weight: bool) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 2, batch_first=True)
        self.from_weight = from_weight

    def initial_state(self) -> Tensor:
        if self.from_weight:
            return self.layer.weight_hh_l0.new_zeros(1, 2, 2)
        return torch.zeros(1, 2, 2)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        output, _ = self.layer(x, state)
        return output


class Momentum(optim.Optimizer):
    """An optimizer of the user, whose state may be plain tensors."""

    def __init__(self, parameters: Iterable[Tensor], has_plain_state: bool) -> None:
        super().__init__(parameters, {"has_plain_state": has_plain_state})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                total = torch.zeros_like(parameter)
                if group["has_plain_state"]:
                    total = torch.zeros(parameter.shape)
                total.add_(parameter.grad)
                parameter.sub_(total)


def run_recurrent(fabric: Fabric, from_weight: bool) -> None:
    model = fabric.setup(Recurrent(from_weight))
    state = model.initial_state()
    fabric.backward(model(torch.ones(2, 3, 4), state).sum())


def step_with_momentum(fabric: Fabric, has_plain_state: bool) -> None:
    module = Tower()
    optimizer = Momentum(module.parameters(), has_plain_state)
    model, optimizer = fabric.setup(module, optimizer)
    fabric.backward(model(X).sum())
    optimizer.step()


def read_weight(fabric: Fabric, shard_only: bool) -> list[float]:
    model = fabric.setup(nn.Linear(2, 1))
    weight = model.weight
    if not shard_only:
        weight = fabric.get_state_dict(model)["weight"]
    return weight.tolist()


@pytest.mark.parametrize(
    ("action", "remedy"),
    [
        (run_recurrent, "torch.zeros(..., device=x.device) for weight.new_zeros(...)"),
        (step_with_momentum, "torch.zeros_like(p)"),
        (read_weight, "fabric.get_state_dict(model)[name]"),
    ],
)
def test_an_error_about_shards_that_leaves_the_loop_has_a_remedy_that_works(
    action: Callable[..., object], remedy: str
) -> None:
    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        text = outcome(lambda: fabric.launch(action, True))
        assert text.count("Write:") == 1
        assert remedy in text
        assert outcome(lambda: fabric.launch(action, False)) == "fine"


class Normalized(optim.Optimizer):
    """An optimizer of the user, which divides each gradient by its norm."""

    def __init__(self, parameters: Iterable[Tensor], reads_whole_norm: bool) -> None:
        super().__init__(parameters, {"reads_whole_norm": reads_whole_norm})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.grad.norm()
                if group["reads_whole_norm"]:
                    norm = full_tensor(norm)
                parameter.sub_(parameter.grad, alpha=1 / norm.item())


def step_by_norms(fabric: Fabric, reads_whole_norm: bool) -> Tensors | str:
    """Return the parameters after a step, or the error of the step."""
    plain = Tower()
    module = copy.deepcopy(plain)
    model, optimizer = fabric.setup(module, Normalized(module.parameters(), reads_whole_norm))
    fabric.backward(model(X).square().mean())
    error = outcome(optimizer.step)
    if error != "fine":
        return error
    plain(X).square().mean().backward()
    Normalized(plain.parameters(), True).step()
    return parameters_of(model, plain)


def test_a_number_of_one_shard_is_not_read_as_if_it_were_that_of_the_tensor() -> None:
    for error in run_sharded(partial(step_by_norms, reads_whole_norm=False)):
        assert "UsageError: float(x), x.item() or a condition on rank" in error
        assert "x.full_tensor().item() on every rank" in error
    for parameters in run_sharded(partial(step_by_norms, reads_whole_norm=True)):
        assert_equals_plain(parameters)


def change_rows(fabric: Fabric) -> dict[str, str]:
    module = Tower()
    model = fabric.setup(module)
    weight = model.head.weight

    def assign_product() -> None:
        weight.grad[:2] *= 2

    loss = model(X).sum()
    fabric.backward(loss)
    before = full_tensor(weight.detach()).clone()
    with torch.no_grad():
        texts = {
            "zero_": outcome(lambda: weight[0].zero_()),
            "mul_": outcome(lambda: weight.grad[1:].mul_(2)),
            "fill_": outcome(lambda: weight.data[1, 2].fill_(5.0)),
            "copy_": outcome(assign_product),
            "normal_": outcome(lambda: nn.init.normal_(weight[2:])),
        }
        # Whole columns, whole tensors and copies of rows may change.
        weight[:, 1].mul_(2)
        weight.mul_(2)
        weight[0].clone().zero_()
    expected = 2 * before
    expected[:, 1] *= 2
    torch.testing.assert_close(full_tensor(weight.detach()), expected)
    return texts


def test_a_change_of_rows_of_a_sharded_tensor_is_not_lost_without_a_word() -> None:
    for texts in run_sharded(change_rows):
        for operator, text in texts.items():
            assert "would be lost" in text
            if operator != "copy_":
                assert text.startswith(f"UsageError: {operator}(...) of a part of a sharded tensor")


def assign_data(fabric: Fabric) -> dict[str, str]:
    module = Tower()
    model = fabric.setup(module)
    weight = model.head.weight
    fabric.backward(model(X).sum())
    expected = 2 * full_tensor(weight.detach()) - full_tensor(weight.grad)
    saved = weight.data.clone()
    vector = torch.zeros(weight.numel())

    def assign(tensor: Tensor, value: Tensor) -> None:
        tensor.data = value

    texts = {
        "parameter": outcome(lambda: assign(weight, saved)),
        "gradient": outcome(lambda: assign(weight.grad, saved)),
        "plain": outcome(lambda: assign(weight, torch.zeros(3, 5))),
        "vector": outcome(lambda: nn.utils.vector_to_parameters(vector, [weight])),
    }
    # Changes in place of the data are not lost.
    weight.data *= 2
    weight.data.sub_(weight.grad.data)
    torch.testing.assert_close(full_tensor(weight.detach()), expected)
    # What the error suggests.
    with torch.no_grad():
        weight.copy_(saved)
    torch.testing.assert_close(full_tensor(weight.detach()), full_tensor(saved))
    return texts


def test_an_assignment_to_the_data_of_a_sharded_tensor_is_not_lost_without_a_word() -> None:
    for texts in run_sharded(assign_data):
        for text in texts.values():
            assert text.startswith("UsageError: an assignment to .data of a sharded tensor")
            assert "parameter.copy_(value)" in text


def count_objects_of_row_reads(fabric: Fabric) -> int:
    model = fabric.setup(Tower())
    weight = model.head.weight.detach()

    def read_rows() -> None:
        for _ in range(50):
            weight[0]

    read_rows()
    gc.collect()
    before = len(gc.get_objects())
    read_rows()
    gc.collect()
    return len(gc.get_objects()) - before


def test_reading_rows_of_a_sharded_tensor_in_every_step_keeps_nothing() -> None:
    for new_objects in run_sharded(count_objects_of_row_reads):
        assert new_objects < 50


def train_without_first_rows(fabric: Fabric) -> Tensors:
    """Set a row of a weight, and train the other rows, as the error suggests."""
    plain = Tower()
    module = copy.deepcopy(plain)
    mask = torch.tensor([[0.0], [1.0], [1.0]])
    module.head.weight.register_hook(lambda grad: grad * mask)
    model = fabric.setup(module)
    weights = fabric.broadcast(fabric.get_state_dict(model))
    weights["head.weight"][0] = 5.0
    model.load_state_dict(weights)
    with torch.no_grad():
        plain.head.weight[0] = 5.0
    loss = model(X).sum()
    fabric.backward(loss)
    plain(X).sum().backward()
    assert plain.head.weight.grad is not None
    plain.head.weight.grad[0] = 0.0
    gradients = gradients_of(model, plain)
    parameters = parameters_of(model, plain)
    return Tensors(
        gradients.sharded + parameters.sharded,
        gradients.plain + parameters.plain,
    )


def test_rows_change_and_stay_as_the_error_suggests() -> None:
    for tensors in run_sharded(train_without_first_rows):
        assert_equals_plain(tensors)


# Their means are those over the whole tensor, of whose rows two ranks have different numbers.
MEAN_LOSSES = {
    "mse_loss": nn.functional.mse_loss,
    "smooth_l1_loss": partial(nn.functional.smooth_l1_loss, beta=0.1),
    "huber_loss": partial(nn.functional.huber_loss, delta=0.1),
    "soft_margin_loss": nn.functional.soft_margin_loss,
    "binary_cross_entropy_with_logits": nn.functional.binary_cross_entropy_with_logits,
    "sum": partial(nn.functional.mse_loss, reduction="sum"),
}


def value_and_gradient(loss_function: Callable[..., Tensor], weight: Any) -> tuple[Tensor, Tensor]:
    """Return a loss of a weight, which is sharded or not, and its gradient."""
    weight.grad = None
    target = torch.sigmoid(weight.detach() * 3)
    loss = loss_function(weight, target)
    loss.backward()
    return full_tensor(loss.detach()), full_tensor(weight.grad)


def losses_of_weights(fabric: Fabric) -> dict[str, Tensors]:
    plain = Tower()
    model = fabric.setup(copy.deepcopy(plain))
    losses: dict[str, Tensors] = {}
    for name, loss_function in MEAN_LOSSES.items():
        sharded = value_and_gradient(loss_function, model.head.weight)
        expected = value_and_gradient(loss_function, plain.head.weight)
        losses[name] = Tensors(list(sharded), list(expected))
    return losses


def test_mean_losses_of_sharded_weights_have_the_gradients_of_one_process() -> None:
    for losses in run_sharded(losses_of_weights):
        for tensors in losses.values():
            assert_equals_plain(tensors)


# The first rank's rows of this tensor lack the largest and the smallest element.
UNLIKE_ROWS = torch.tensor([[1.0, 2.0], [0.5, 1.5], [3.0, -4.0]])

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": torch.amax,
    "amin": torch.amin,
    "greatest absolute value": lambda weight: torch.linalg.vector_norm(weight, torch.inf),
    "norms of columns": lambda weight: weight.norm(dim=0).sum(),
    "norms of columns over dimension 0": lambda weight: weight.norm(dim=0).sum(0),
    "norms in a list": lambda weight: torch.stack(torch._foreach_norm([weight, 2 * weight])).sum(),
    "columns with a positive element": lambda weight: (weight > 0).any(0).sum(),
    "any as a number": lambda weight: (weight > 0).any().float() * 3,
    "no column with a large element": lambda weight: ~(weight > 2.5).any(0, keepdim=True),
    "any over dimensions": lambda weight: torch.any(weight > 2.5, (0, 1)),
}


def reduce_weights(fabric: Fabric) -> dict[str, Tensors]:
    """Return the value of each reduction, and the gradient if there is one."""
    plain = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        plain.weight.copy_(UNLIKE_ROWS)
    model = fabric.setup(copy.deepcopy(plain))
    results: dict[str, Tensors] = {}
    for name, reduce in REDUCTIONS.items():
        tensors = Tensors([], [])
        for weight, list_of_tensors in zip((model.weight, plain.weight), tensors, strict=True):
            value = reduce(weight)
            list_of_tensors.append(full_tensor(value.detach()))
            if value.requires_grad:
                value.backward()
                list_of_tensors.append(full_tensor(weight.grad))
                weight.grad = None
        results[name] = tensors
    return results


def test_reductions_of_sharded_weights_are_those_of_one_process() -> None:
    for results in run_sharded(reduce_weights):
        for name, tensors in results.items():
            torch.testing.assert_close(tensors.sharded, tensors.plain, msg=name)


class Draws(NamedTuple):
    """The parameters of a sharded and a plain model, and a number that each draws afterwards."""

    parameters: Tensors
    next_numbers: tuple[float, float]


def redraw(model: Any) -> float:
    """Draw some parameters anew and add noise to all, and return a number drawn afterwards."""
    torch.manual_seed(7)
    with torch.no_grad():
        model.head.reset_parameters()
        nn.init.xavier_normal_(model.blocks[0][0].weight)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
            parameter.add_(torch.rand_like(parameter))
    return torch.rand(()).item()


def redraw_parameters(fabric: Fabric) -> Draws:
    plain = Tower()
    model = fabric.setup(copy.deepcopy(plain))
    next_numbers = (redraw(model), redraw(plain))
    return Draws(parameters_of(model, plain), next_numbers)


def test_random_numbers_for_sharded_parameters_are_those_of_one_process() -> None:
    for parameters, (next_number, next_plain_number) in run_sharded(redraw_parameters):
        assert_equals_plain(parameters)
        assert next_number == next_plain_number


def fill(method: str, *args: float) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a copy of a tensor by one of the methods that draw numbers."""
    return lambda tensor: getattr(tensor.clone(), method)(*args)


def multiply_with_noise(tensor: Tensor) -> Tensor:
    """Return the gradient of a randomized leaky ReLU, which the drawn noise decides."""
    leaf = (tensor - 0.5).requires_grad_()
    nn.functional.rrelu(leaf, training=True).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


# The argument of each function is a matrix of probabilities, whose rows ranks cannot divide evenly.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randint_like": lambda p: torch.randint_like(p, 100),
    "randint_like with a low": lambda p: torch.randint_like(p, 5, 100),
    "exponential_": fill("exponential_"),
    "cauchy_": fill("cauchy_"),
    "log_normal_": fill("log_normal_"),
    "geometric_": fill("geometric_", 0.1),
    "random_": fill("random_"),
    "random_ to": fill("random_", 100),
    "random_ from": fill("random_", 5, 100),
    "bernoulli": torch.bernoulli,
    "bernoulli out": lambda p: torch.bernoulli(p, out=torch.empty_like(p)),
    "multinomial": lambda p: torch.multinomial(p, 3),
    "multinomial of a vector": lambda p: torch.multinomial(p[:, 0], 8, replacement=True),
    "gumbel_softmax": nn.functional.gumbel_softmax,
    "rrelu": multiply_with_noise,
    "dropout": nn.functional.dropout,
    "alpha_dropout": nn.functional.alpha_dropout,
}


def draw(tensor: Tensor) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    for name, function in DRAWS.items():
        torch.manual_seed(7)
        results[name] = full_tensor(function(tensor)).detach()
        results[f"the next number after {name}"] = torch.rand(())
    return results


def draw_for_shards(fabric: Fabric) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    plain = Tower()
    model = fabric.setup(copy.deepcopy(plain))
    sharded_results = draw(model.head.weight.detach().sigmoid())
    return sharded_results, draw(plain.head.weight.detach().sigmoid())


def test_operators_that_draw_numbers_for_a_sharded_tensor_draw_those_of_one_process() -> None:
    for sharded_results, plain_results in run_sharded(draw_for_shards):
        for name, expected in plain_results.items():
            torch.testing.assert_close(sharded_results[name], expected, msg=name)


def fill_with_streams_of_ranks(fabric: Fabric) -> list[Tensor]:
    """Fill the parameters of a set-up model from a random stream that differs between ranks."""
    model = fabric.setup(Tower())
    torch.manual_seed(fabric.global_rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
            parameter.add_(torch.rand_like(parameter))
    return [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (4, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}),
    ],
)
def test_replicas_of_a_shard_get_the_same_random_numbers(
    ranks: int, options: dict[str, Any]
) -> None:
    first, *others = run_in_ranks(
        fill_with_streams_of_ranks, ranks=ranks, strategy=FSDPStrategy(**options)
    )
    for parameters in others:
        torch.testing.assert_close(parameters, first, rtol=0, atol=0)


# -- refusals --------------------------------------------------------------------------------------


def refusals(fabric: Fabric) -> dict[str, str]:
    def set_up(optimizer_class: type[optim.Optimizer], net: nn.Module) -> str:
        optimizer = optimizer_class(net.parameters(), lr=0.1)
        return outcome(lambda: fabric.setup(net, optimizer))

    even = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 2),
    )
    sparse = nn.Sequential(
        nn.Embedding(6, 4, sparse=True),
        nn.Linear(4, 2),
    )
    return {
        "sparse": outcome(lambda: fabric.setup(sparse)),
        "max_norm": outcome(lambda: fabric.setup(nn.Embedding(6, 4, max_norm=1.0))),
        "Adafactor": set_up(optim.Adafactor, Tower()),
        "Rprop": set_up(optim.Rprop, copy.deepcopy(even)),
        "LBFGS": set_up(optim.LBFGS, Tower()),
        "LBFGS of even shards": set_up(optim.LBFGS, even),
    }


def test_training_that_cannot_be_sharded_is_refused_before_anything_changes() -> None:
    for texts in run_sharded(refusals):
        assert texts["LBFGS of even shards"] == "fine"
        expected = "these have sparse gradients, which cannot be sharded: 0"
        assert expected in texts["sparse"]
        assert "which changes the gathered weight in forward passes" in texts["max_norm"]
        for name in ("Adafactor", "Rprop", "LBFGS"):
            assert "torch has no such step for shards" in texts[name]


def renormalize(fabric: Fabric) -> Tensors:
    """Follow the remedy of the error about ``max_norm``."""
    plain = nn.Embedding(6, 4)
    model = fabric.setup(copy.deepcopy(plain))
    with torch.no_grad():
        for weight in (plain.weight, model.weight):
            weight.mul_((1.0 / weight.norm(dim=1, keepdim=True)).clamp(max=1))
    return parameters_of(model, plain)


def test_rows_of_a_sharded_table_are_renormalized_as_the_error_suggests() -> None:
    for tables in run_sharded(renormalize):
        assert_equals_plain(tables)


class Scale(nn.Module):
    """A module with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def set_up_lbfgs(fabric: Fabric, outputs: int) -> None:
    """Take a step of LBFGS with a weight of ``outputs`` rows and parameters of one element."""
    net = nn.Sequential(nn.PReLU(), Scale(), nn.Linear(3, outputs))
    model, optimizer = fabric.setup(net, optim.LBFGS(net.parameters()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        fabric.backward(loss)
        return loss

    optimizer.step(closure)


def test_lbfgs_on_one_rank_is_refused_only_where_torch_cannot_flatten_a_shard() -> None:
    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        text = outcome(lambda: fabric.launch(set_up_lbfgs, 1))
        assert "torch has no such step for shards" in text
        assert outcome(lambda: fabric.launch(set_up_lbfgs, 2)) == "fine"


# -- state -----------------------------------------------------------------------------------------


def has_state(model: nn.Module, state: dict[str, Tensor], prefix: str = "") -> bool:
    """Return whether the parameters below a prefix have the values of a full state dict."""
    for name, parameter in model.named_parameters():
        if not name.startswith(prefix):
            continue
        if not torch.equal(full_tensor(parameter), state[name]):
            return False
    return True


def full_optimizer_state(optimizer: optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return copies of an optimizer's full tensors for a parameter."""
    state = {}
    for name, value in optimizer.state[parameter].items():
        if value.dim() > 0:
            state[name] = full_tensor(value).clone()
    return state


def load_full_optimizer_state(fabric: Fabric) -> None:
    net = Tower()
    model, optimizer = fabric.setup(net, optim.Adam(net.parameters()))
    output = model(X)
    loss = output.sum()
    fabric.backward(loss)
    optimizer.step()
    weight = net.head.weight
    expected = full_optimizer_state(optimizer, weight)
    full_state = fabric.strategy.full_state(optimizer.state_dict())
    optimizer.load_state_dict(full_state)
    actual = full_optimizer_state(optimizer, weight)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_full_state_dict_loads_into_the_optimizer_of_a_sharded_module() -> None:
    run_sharded(load_full_optimizer_state)


def load_full_state(fabric: Fabric) -> None:
    torch.manual_seed(0)
    source = Tower()
    state = source.state_dict()
    module = Tower()
    model = fabric.setup(module)
    # This forward pass leaves gathered weights, which must not be the target of the load.
    with torch.no_grad():
        model(X)
    block_state = source.blocks[0].state_dict()
    model.blocks[0].load_state_dict(block_state)
    assert has_state(model, state, "blocks.0")
    assert not has_state(model, state)

    outer_state = nn.ModuleDict({"inside": source}).state_dict()
    outer_model = nn.ModuleDict({"inside": model})
    outer_model.load_state_dict(outer_state)
    assert has_state(model, state)
    text = outcome(lambda: model.load_state_dict({}))
    assert "Missing key" in text


def test_a_full_state_dict_loads_into_a_sharded_module_its_blocks_and_a_module_around_it() -> None:
    run_sharded(load_full_state)


def train_with_adagrad(fabric: Fabric) -> Tensors:
    def adagrad(module: nn.Module) -> optim.Optimizer:
        return optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5)

    plain = Tower()
    net = copy.deepcopy(plain)
    plain_optimizer = adagrad(plain)
    model, optimizer = fabric.setup(net, adagrad(net))
    for _ in range(3):
        plain_optimizer.zero_grad()
        plain_loss = plain(X).sum()
        plain_loss.backward()
        plain_optimizer.step()
        optimizer.zero_grad()
        loss = model(X).sum()
        fabric.backward(loss)
        optimizer.step()
    return parameters_of(model, plain)


def test_the_state_that_adagrad_has_from_the_start_is_sharded_with_its_parameter() -> None:
    for parameters in run_sharded(train_with_adagrad):
        assert_equals_plain(parameters)


# -- backward passes -------------------------------------------------------------------------------


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError("as on a device without room")


def gradients_after_a_failure(fabric: Fabric) -> Tensors:
    plain = Tower()
    module = copy.deepcopy(plain)
    model = fabric.setup(module)

    def fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return RaiseInBackward.apply(output)

    hook = model.blocks[0].register_forward_hook(fail_in_backward)
    failing_loss = model(X).sum()
    hook.remove()
    text = outcome(lambda: fabric.backward(failing_loss))
    assert "without room" in text
    model.zero_grad()
    for _ in range(2):
        plain_loss = plain(X).sum()
        plain_loss.backward()
        loss = model(X).sum()
        fabric.backward(loss)
    return gradients_of(model, plain)


def test_a_backward_pass_that_raised_leaves_no_gradient_unreduced_in_the_next() -> None:
    for gradients in run_sharded(gradients_after_a_failure):
        assert_equals_plain(gradients)


def gradients_of_changed_output(fabric: Fabric) -> Tensors:
    plain = Tower()
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    with warnings.catch_warnings(record=True) as caught:
        plain_output = plain(X)
        plain_output *= 2
        plain_loss = plain_output.pow(2).sum()
        plain_loss.backward()
        output = model(X)
        output *= 2
        loss = output.pow(2).sum()
        fabric.backward(loss)
    for warning in caught:
        assert "view" not in str(warning.message)
    return gradients_of(model, plain)


def test_the_output_of_a_model_may_change_in_place_without_a_warning_about_views() -> None:
    for gradients in run_sharded(gradients_of_changed_output):
        assert_equals_plain(gradients)


# -- results of a launch ---------------------------------------------------------------------------


@dataclass
class Progress:
    """A result of the user's own class."""

    weights: Any


def return_tensors(fabric: Fabric, kind: str) -> Any:
    torch.manual_seed(0)
    plain = Tower()
    plain_optimizer = optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(plain, plain_optimizer)
    fabric.backward(model(X).mean())
    optimizer.step()
    results: dict[str, Callable[[], Any]] = {
        "state dict": model.state_dict,
        "nested": lambda: {"last": [1, model.head.weight]},
        "object": lambda: Progress(model.state_dict()),
        "optimizer": optimizer.state_dict,
        "full state dict": lambda: fabric.get_state_dict(model),
        "full tensor": lambda: full_tensor(model.head.weight),
        "nothing": lambda: None,
    }
    return results[kind]()


REFUSED = {
    "state dict": "result['blocks.0.0.bias'] is a DTensor",
    "nested": "result['last'][1] is a DTensor",
    "object": "result.weights['blocks.0.0.bias'] is a DTensor",
    "optimizer": "result['state'][0]['momentum_buffer'] is a DTensor",
}


def refusal(launcher: Any, kind: str) -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp", launcher=launcher)
    return outcome(lambda: fabric.launch(return_tensors, kind))


@pytest.mark.parametrize("kind", REFUSED)
def test_a_launch_refuses_to_return_a_shard_as_if_it_were_the_tensor(kind: str) -> None:
    text = refusal(SharedRanks(), kind)
    assert REFUSED[kind] in text
    assert "this rank has a part of the tensor of shape" in text
    assert "return fabric.get_state_dict(model)" in text


def test_every_launcher_refuses_shards() -> None:
    assert REFUSED["state dict"] in refusal("forkserver", "state dict")
    # In a process of its own: forks of this process cannot run backward passes if an earlier test
    # has started the threads of autograd.
    code = f"from {__name__} import refusal; print(refusal('fork', 'state dict'))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True
    )
    assert REFUSED["state dict"] in process.stdout


def results_in_a_job(fabric: Fabric) -> list[Any]:
    """Launch in a job that runs already, which gathers the results without a launcher."""
    full_states = fabric.launch(return_tensors, "full state dict", return_all=True)
    error = outcome(lambda: fabric.launch(return_tensors, "nested", return_all=True))
    return [full_states, error]


def test_the_remedies_return_whole_tensors() -> None:
    shapes = {name: value.shape for name, value in Tower().state_dict().items()}
    full_state: Any = {}
    for full_states, error in run_in_ranks(results_in_a_job, strategy="fsdp"):
        full_state, state_of_other_rank = full_states
        assert {name: value.shape for name, value in full_state.items()} == shapes
        assert state_of_other_rank == {}
        assert REFUSED["nested"] in error
    weights = run_in_ranks(return_tensors, "full tensor", strategy="fsdp")
    for weight in weights:
        assert type(weight) is Tensor
        torch.testing.assert_close(weight, full_state["head.weight"])
