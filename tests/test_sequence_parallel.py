"""Sequences that are split over ranks: the numbers of the single process, whatever the lengths and heads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import ModelParallelStrategy
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

WIDTH = 12
BATCH = 4
STEPS = 3
MICRO = 2
PLAN = {
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
}


class Block(nn.Module):
    def __init__(self, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.is_causal = is_causal
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.places = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([Block(heads, is_causal), Block(heads, is_causal)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(x) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(heads: int, is_causal: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model(heads, is_causal).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def batches(tokens: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(STEPS * MICRO, BATCH, tokens, 4, generator=generator, dtype=torch.float64)
    counts = torch.rand(STEPS * MICRO, BATCH, tokens, generator=generator) > 0.3
    positions = torch.arange(tokens).expand(BATCH, tokens)
    return [
        {"x": x, "y": x.cumsum(1).tanh(), "counts": some, "positions": positions}
        for x, some in zip(made, counts, strict=True)
    ]


def train(
    fabric: Fabric, heads: int, is_causal: bool, tokens: int, is_weighted: bool = True
) -> dict[str, Any]:
    """Three steps with clipping and accumulation; what is recorded is over all ranks."""
    model, optimizer = fabric.setup(*make(heads, is_causal))
    place = fabric.strategy.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    losses = []
    norms = []
    gradients = []
    for number, batch in enumerate(batches(tokens)):
        batch = {name: each[place["rank"] :: place["num_replicas"]] for name, each in batch.items()}
        last = number % MICRO == MICRO - 1
        with (
            fabric.no_backward_sync(model, enabled=not last),
            fabric.sequence_parallel(batch) as part,
        ):
            errors = (model(part["x"], part["positions"]) - part["y"]).square().sum(-1)
            if is_weighted:
                loss = errors[part["counts"]].sum()
                fabric.backward(loss, weight=part["counts"].sum(), optimizer=optimizer)
                losses.append(fabric.all_reduce(loss.detach(), reduce_op="sum"))
            else:
                loss = errors.mean() / MICRO
                fabric.backward(loss)
                losses.append(fabric.all_reduce(loss.detach()))
        if last:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
            parameters: list[Any] = list(model.parameters())
            gradients = [full_tensor(parameter.grad).clone() for parameter in parameters]
            optimizer.step()
            optimizer.zero_grad()
    parameters = [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}


def on(function: Any, *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    strategy = ModelParallelStrategy(
        **{"sequence_parallel_size": 2, "start_method": "forkserver", **options}
    )
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy)


def train_each(fabric: Fabric, settings: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(fabric, *setting) for setting in settings]


# Heads, whether attention is causal, tokens, whether losses have weights. Two ranks divide 4 heads, but not 3.
FEW = [(4, True, 7), (3, True, 9), (3, False, 7), (4, True, 8, False)]
MANY = [*FEW, (4, False, 9), (4, False, 4), (3, True, 4), (3, True, 5)]
MESHES = [
    pytest.param({}, FEW, id="sequence 2"),
    pytest.param({"ranks": 4}, FEW[:2], id="data 2 x sequence 2"),
    pytest.param({}, MANY, id="more", marks=pytest.mark.slow),
    pytest.param({"ranks": 4}, MANY, id="more, data 2 x sequence 2", marks=pytest.mark.slow),
    pytest.param({"ranks": 4, "replicate_size": 2}, MANY, id="replicate 2 x sequence 2", marks=pytest.mark.slow),
    pytest.param({"ranks": 4, "sequence_parallel_size": 4}, MANY, id="sequence 4", marks=pytest.mark.slow),
    pytest.param(
        {"ranks": 4, "tensor_parallel_size": 2, "tp_plan": PLAN},
        [each for each in MANY if each[0] == 4], id="sequence 2 x tensor 2", marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "settings"), MESHES)
def test_three_steps_are_those_of_the_single_process(
    mesh: dict[str, Any], settings: list[tuple[Any, ...]]
) -> None:
    [expected] = run_in_ranks(train_each, settings, ranks=1, strategy="auto")
    for actual in on(train_each, settings, **mesh):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# -- attention --------------------------------------------------------------------------------------------------------


def attend(batch: dict[str, Any], mask: str | None, **options: Any) -> Tensor:
    inputs = [
        batch[name].unflatten(-1, (-1, 2)).transpose(1, 2) for name in ("query", "key", "value")
    ]
    if mask is not None:
        options["attn_mask"] = (
            batch["keys"][:, None, None] if mask == "keys" else batch["rows"].transpose(1, 2)
        )
    return scaled_dot_product_attention(*inputs, scale=0.7, **options).transpose(1, 2).flatten(2)


def differences(fabric: Fabric) -> dict[str, float]:
    """The largest of each kind of attention, and of its gradients, from that of all tokens on one process."""
    found = {}
    for tokens in (7, 3, 2):
        torch.manual_seed(3)
        whole: dict[str, Any] = {
            "query": torch.randn(2, tokens, 8), "key": torch.randn(2, tokens, 4), "value": torch.randn(2, tokens, 4),
            "factor": torch.randn(2, tokens, 8),
        }  # fmt: skip
        whole = {
            name: each.double().requires_grad_(name != "factor") for name, each in whole.items()
        }
        allowed = torch.rand(2, tokens, 1, tokens) > 0.4
        whole |= {
            "rows": allowed | (torch.arange(tokens) == 0),
            "keys": allowed[:, 0, 0] | (torch.arange(tokens) == 0),
        }
        for kind in (
            {"mask": None},
            {"mask": None, "is_causal": True},
            {"mask": "keys"},
            {"mask": "rows"},
        ):
            trained = [whole[name] for name in ("query", "key", "value")]
            expected = attend(whole, enable_gqa=True, **kind)
            gradients = torch.autograd.grad((expected * whole["factor"]).sum(), trained)
            with fabric.sequence_parallel(
                {**whole, "expected": expected.detach(), "name": "any"}
            ) as part:
                actual = attend(part, enable_gqa=True, **kind)
                own = torch.autograd.grad((actual * part["factor"]).sum(), trained)
            sums = fabric.all_reduce(list(own), reduce_op="sum")
            pairs = [(actual, part["expected"]), *zip(sums, gradients, strict=True)]
            found[f"{tokens} {kind}"] = max(
                (first - second).abs().max().item() for first, second in pairs
            )
    return found


def test_attention_and_its_gradients_are_those_over_all_tokens() -> None:
    for actual in on(differences):
        assert max(actual.values()) < 1e-12, actual


# -- the block --------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.mask = dropout(torch.ones(64)).bool()
        return scaled_dot_product_attention(x, x, x)


def block(fabric: Fabric) -> dict[str, Any]:
    model = Dropping()
    x = torch.ones(1, 8, 4)
    torch.manual_seed(5)
    with fabric.sequence_parallel([x, torch.ones(3), "name"]) as (part, *rest):
        model(part)
    return {"part": part, "rest": rest, "mask": model.mask, "next": torch.rand(3)}


def test_parts_have_other_random_numbers_within_and_the_same_after_it() -> None:
    first, second = on(block)
    assert first["part"].shape == second["part"].shape == (1, 4, 4)
    assert [each.shape if isinstance(each, Tensor) else each for each in first["rest"]] == [
        (3,),
        "name",
    ]
    assert not torch.equal(first["mask"], second["mask"])
    assert torch.equal(first["next"], second["next"])


def passed(fabric: Fabric) -> bool:
    batch = {"x": torch.ones(2, 1)}
    with fabric.sequence_parallel(batch) as part:
        return part is batch


def test_without_such_ranks_the_batch_is_passed_on_as_it_is() -> None:
    assert run_in_ranks(passed) == [True, True]
    assert run_in_ranks(passed, ranks=1, strategy="auto") == [True]


def refused(fabric: Fabric) -> dict[str, str]:
    x = torch.ones(1, 4, 4)

    def inside(action: Any, batch: Any = x, **options: Any) -> str:
        def run() -> None:
            with fabric.sequence_parallel(batch, **options) as part:
                action(part)

        return outcome(run)

    def masked(part: Tensor) -> Tensor:
        return scaled_dot_product_attention(part, part, part, torch.ones(2, 2, dtype=torch.bool))

    return {
        "the lengths are {'batch[0]': 4, 'batch[1]': 3}": inside(attended, [x, torch.ones(1, 3)]),
        "of at least 2 tokens": inside(attended, torch.ones(4, 1)),
        "the lengths are {}": inside(attended, x, dim=5),
        "have the sums [[0], [3056]], by rank of the group": inside(
            attended, x * fabric.global_rank
        ),
        "another rank of the group makes another call": inside(
            attended, x[:, : 4 - fabric.global_rank]
        ),
        "have [2, 4, 4] tokens": inside(lambda part: scaled_dot_product_attention(part, x, x)),
        "a mask of shape (..., 2, 4), (..., 1, 4) or (..., 1, 2)": inside(masked),
        "attention over the tokens of this rank alone": inside(
            lambda part: nn.MultiheadAttention(4, 2)(part, part, part, need_weights=False)
        ),
        "was not called: each rank has used its own tokens alone": inside(torch.sum),
        "fine": inside(attended, x, dim=-2),
    }


def attended(part: Any) -> Tensor:
    return scaled_dot_product_attention(part, part, part)


def test_what_would_give_other_numbers_is_refused_on_all_ranks() -> None:
    for results in on(refused):
        for words, raised in results.items():
            assert words in raised


def recomputed(fabric: Fabric, compiles: bool) -> float:
    """The largest difference of gradients of a model that computes its blocks again, or is compiled, from the plain."""
    plain, _ = make(4, True)
    batch = batches(5)[0]
    (plain(batch["x"], batch["positions"]) - batch["y"]).square().sum().backward()
    expected: list[Any] = [parameter.grad for parameter in plain.parameters()]
    fabric.strategy.activation_checkpointing = None if compiles else (Block,)  # pyright: ignore[reportAttributeAccessIssue]
    again: Any = make(4, True)[0]
    if compiles:
        again = torch.compile(again, backend="eager")
    model = fabric.setup(again)
    with fabric.sequence_parallel(batch) as part:
        fabric.backward((model(part["x"], part["positions"]) - part["y"]).square().sum() * 2)
    parameters: list[Any] = list(model.parameters())
    pairs = zip(parameters, expected, strict=True)
    return max((full_tensor(each.grad) - other).abs().max().item() for each, other in pairs)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_may_be_computed_again_and_models_be_compiled(compiles: bool) -> None:
    assert max(on(recomputed, compiles)) < 1e-10
