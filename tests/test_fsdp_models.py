"""Models of every shape under FSDP: each trains like the same model in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric._torch import full_tensor
from tests.loops import Block
from tests.test_fsdp import in_ranks, whole

pytestmark = pytest.mark.timeout(90)

WIDTH = 8


class Stack(nn.Module):
    """Two blocks without anything around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.blocks[1].mlp[0].weight = self.blocks[0].mlp[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))


class Buffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.norm.eval()(x) + self.shift)


class OwnCheckpoints(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class TwoPasses(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Shared(nn.Module):
    """One block that is called several times, and a parameter next to it."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([block, block])
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


MODELS = [Stack, Frozen, Tied, Buffers, OwnCheckpoints, TwoPasses, Shared]


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(3)
    model = make().double()
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4),
        torch.randn(12, 5, WIDTH).double(),
    )


def plainly(make: Callable[[], nn.Module]) -> list[Tensor]:
    model, optimizer, x = build(make)
    for _ in range(3):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*(parameter.detach() for parameter in model.parameters()), *model.buffers()]


def sharded(fabric: Fabric, make: Callable[[], nn.Module]) -> tuple[list[Tensor], list[str]]:
    plain, plain_optimizer, x = build(make)
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    model, optimizer = fabric.setup(plain, plain_optimizer)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    x = x[fabric.global_rank :: fabric.world_size]
    with torch.no_grad():
        expected = model.eval()(x)
    assert not expected.requires_grad
    assert torch.equal(model.train()(x), expected)
    if "calls" in dict(model.named_buffers()):
        model.calls.zero_()
    for _ in range(3):
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [*whole(model), *model.buffers()], sorted(
        type(parameter).__name__ for parameter in model.parameters()
    )


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_trains_as_in_one_process(make: Callable[[], nn.Module], ranks: int) -> None:
    expected = plainly(make)
    for actual, kinds in in_ranks(sharded, make, ranks=ranks, precision="64-true"):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        assert set(kinds) == {"DTensor"}


def several_forwards(fabric: Fabric, order: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = fabric.setup(Stack())
    inputs = [torch.full((2, 5, WIDTH), 0.1) + 0.01 * torch.randn(2, 5, WIDTH) for _ in range(2)]
    if order == "together":
        fabric.backward(sum(model(x).pow(3).mean() for x in inputs))
    elif order == "one by one":
        for x in inputs:
            fabric.backward(model(x).pow(3).mean())
    else:
        losses = [model(x).pow(3).mean() for x in inputs]
        for loss in losses:
            fabric.backward(loss)
    return [full_tensor(parameter.grad).clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_several_forward_passes_may_come_before_a_backward(strategy: str) -> None:
    orders = ("one by one", "together", "first all forwards")
    results = [in_ranks(several_forwards, order, sharding_strategy=strategy)[0] for order in orders]
    torch.testing.assert_close(results[1:], [results[0]] * 2, rtol=1e-4, atol=1e-6)


def drawn_apart(fabric: Fabric) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(fabric.global_rank)
    model = fabric.setup(Buffers())
    return whole(model), model.shift


def test_every_rank_starts_with_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    expected = Buffers()
    for parameters, shift in in_ranks(drawn_apart):
        torch.testing.assert_close(
            parameters, [parameter.detach() for parameter in expected.parameters()]
        )
        assert torch.equal(shift, expected.shift)


def compiled(fabric: Fabric, where: str) -> list[Tensor]:
    plain, _, x = build(Stack)
    if where == "blocks":
        for block in plain.blocks:
            block.compile(backend="eager")
    model = fabric.setup(torch.compile(plain, backend="eager") if where == "before" else plain)
    called = torch.compile(model, backend="eager") if where == "after" else model
    for _ in range(2):
        fabric.backward(called(x[fabric.global_rank :: fabric.world_size]).pow(2).mean())
    return [full_tensor(parameter.grad).clone() for parameter in model.parameters()]


def test_compiled_models_and_blocks_have_the_same_gradients() -> None:
    places = ("blocks", "before", "after", "nowhere")
    results = [in_ranks(compiled, where, precision="64-true")[0] for where in places]
    torch.testing.assert_close(results[:-1], [results[-1]] * 3, rtol=1e-10, atol=1e-10)
