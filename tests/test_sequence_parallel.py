"""Sequences split over ranks give the numbers of the single process for all lengths and heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import ModelParallelStrategy
from tests.compilers import NEEDS_CPP_COMPILER
from tests.ranks import outcome, run_in_ranks

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
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def split_heads(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.split_heads(self.query(x))
        key = self.split_heads(self.key(x))
        value = self.split_heads(self.value(x))
        heads = scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        attended = heads.transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        hidden = self.up(x).tanh()
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.position_embedding = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([Block(heads, is_causal), Block(heads, is_causal)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(x) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(heads: int, is_causal: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model(heads, is_causal).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return model, optimizer


def batches(tokens: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS * MICRO, BATCH, tokens)
    inputs = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    masks = torch.rand(shape, generator=generator) > 0.3
    positions = torch.arange(tokens).expand(BATCH, tokens)
    batches = []
    for x, counts in zip(inputs, masks, strict=True):
        batch = {
            "x": x,
            "y": x.cumsum(1).tanh(),
            "counts": counts,
            "positions": positions,
        }
        batches.append(batch)
    return batches


class Setting(NamedTuple):
    heads: int  # two ranks divide 4 heads, but not 3
    is_causal: bool
    tokens: int
    has_weights: bool = True
    compiled: str = "never"  # or "before" or "after" setup
    backend: str = "aot_eager"  # of torch.compile


def share(fabric: Fabric, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the samples of this rank."""
    sampler_kwargs = fabric.strategy.distributed_sampler_kwargs
    if sampler_kwargs is None:
        return batch
    samples = slice(sampler_kwargs["rank"], None, sampler_kwargs["num_replicas"])
    return {name: tensor[samples] for name, tensor in batch.items()}


def squared_errors(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"], batch["positions"])
    errors = output - batch["y"]
    return errors.square().sum(-1)


def full_gradients(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.grad).clone() for parameter in model.parameters()]


def full_parameters(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


def train(fabric: Fabric, setting: Setting) -> dict[str, Any]:
    """Take three steps with clipping and accumulation; return numbers over all ranks."""
    module: Any
    module, optimizer = make(setting.heads, setting.is_causal)
    if setting.compiled == "before":
        module = torch.compile(module, backend=setting.backend)
    model: Any
    model, optimizer = fabric.setup(module, optimizer)
    if setting.compiled == "after":
        model = torch.compile(model, backend=setting.backend)
    losses = []
    norms = []
    gradients = []
    for number, batch in enumerate(batches(setting.tokens)):
        is_accumulating = number % MICRO < MICRO - 1
        with (
            fabric.no_backward_sync(model, enabled=is_accumulating),
            fabric.sequence_parallel(share(fabric, batch)) as shard,
        ):
            errors = squared_errors(model, shard)
            if setting.has_weights:
                loss = errors[shard["counts"]].sum()
                weight = shard["counts"].sum()
                fabric.backward(loss, weight=weight, optimizer=optimizer)
                losses.append(fabric.all_reduce(loss.detach(), reduce_op="sum"))
            else:
                loss = errors.mean() / MICRO
                fabric.backward(loss)
                losses.append(fabric.all_reduce(loss.detach()))
        if is_accumulating:
            continue
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": full_parameters(model),
    }


def on_mesh(function: Any, *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    """Return the results of a function by rank of a job whose sequences are split in two."""
    options.setdefault("sequence_parallel_size", 2)
    strategy = ModelParallelStrategy(start_method="forkserver", **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy)


def train_in_every_setting(fabric: Fabric, settings: list[Setting]) -> list[dict[str, Any]]:
    return [train(fabric, setting) for setting in settings]


SETTINGS_OF_4_HEADS = [
    Setting(heads=4, is_causal=True, tokens=7),
    Setting(heads=4, is_causal=True, tokens=8, has_weights=False),
    Setting(heads=4, is_causal=False, tokens=9),
    Setting(heads=4, is_causal=False, tokens=4),
]
SETTINGS_OF_3_HEADS = [
    Setting(heads=3, is_causal=True, tokens=9),
    Setting(heads=3, is_causal=False, tokens=7),
    Setting(heads=3, is_causal=True, tokens=4),
    Setting(heads=3, is_causal=True, tokens=5),
]
SETTINGS = SETTINGS_OF_4_HEADS + SETTINGS_OF_3_HEADS
FAST_SETTINGS = SETTINGS_OF_4_HEADS[:2] + SETTINGS_OF_3_HEADS[:1]
FASTEST_SETTINGS = SETTINGS_OF_4_HEADS[:1]


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param({}, FAST_SETTINGS, id="sequence 2"),
        pytest.param({"ranks": 4}, FASTEST_SETTINGS, id="data 2 x sequence 2"),
    ],
)
def test_three_steps_are_those_of_the_single_process(
    mesh: dict[str, Any], settings: list[Setting]
) -> None:
    [expected] = run_in_ranks(train_in_every_setting, settings, ranks=1, strategy="auto")
    for actual in on_mesh(train_in_every_setting, settings, **mesh):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param({}, SETTINGS, id="sequence 2"),
        pytest.param({"ranks": 4}, SETTINGS, id="data 2 x sequence 2"),
        pytest.param({"ranks": 4, "replicate_size": 2}, SETTINGS, id="replicate 2 x sequence 2"),
        pytest.param({"ranks": 4, "sequence_parallel_size": 4}, SETTINGS, id="sequence 4"),
        pytest.param(
            {"ranks": 4, "tensor_parallel_size": 2, "tp_plan": PLAN},
            SETTINGS_OF_4_HEADS,
            id="sequence 2 x tensor 2",
        ),
    ],
)
def test_three_steps_on_every_mesh_are_those_of_the_single_process(
    mesh: dict[str, Any], settings: list[Setting]
) -> None:
    [expected] = run_in_ranks(train_in_every_setting, settings, ranks=1, strategy="auto")
    for actual in on_mesh(train_in_every_setting, settings, **mesh):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


COMPILED = Setting(heads=4, is_causal=True, tokens=7, compiled="before")
COMPILED_BY_INDUCTOR = COMPILED._replace(backend="inductor")


@pytest.mark.parametrize(
    ("mesh", "setting"),
    [
        ({}, COMPILED),
        ({}, COMPILED._replace(compiled="after")),
        pytest.param({}, COMPILED_BY_INDUCTOR, marks=[pytest.mark.slow, NEEDS_CPP_COMPILER]),
        pytest.param(
            {},
            COMPILED_BY_INDUCTOR._replace(compiled="after"),
            marks=[pytest.mark.slow, NEEDS_CPP_COMPILER],
        ),
        pytest.param(
            {"ranks": 4, "tensor_parallel_size": 2, "tp_plan": PLAN},
            COMPILED,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"ranks": 4, "tensor_parallel_size": 2, "tp_plan": PLAN},
            COMPILED._replace(compiled="after"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_compiled_model_takes_the_steps_of_the_uncompiled_one(
    mesh: dict[str, Any], setting: Setting
) -> None:
    uncompiled = setting._replace(compiled="never")
    [expected] = run_in_ranks(train, uncompiled, ranks=1, strategy="auto")
    for actual in on_mesh(train, setting, **mesh):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


# -- attention -------------------------------------------------------------------------------------


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(1, 2)


def attend(batch: dict[str, Any], mask: str | None, is_causal: bool) -> Tensor:
    """Return the attention, masked by the entry of the batch that ``mask`` names."""
    attn_mask = None
    if mask == "keys":
        attn_mask = batch["keys"][:, None, None]
    elif mask == "rows":
        attn_mask = batch["rows"].transpose(1, 2)
    heads = scaled_dot_product_attention(
        split_heads(batch["query"]),
        split_heads(batch["key"]),
        split_heads(batch["value"]),
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=0.7,
        enable_gqa=True,
    )
    return heads.transpose(1, 2).flatten(2)


def attention_inputs(tokens: int) -> dict[str, Any]:
    torch.manual_seed(3)
    query = torch.randn(2, tokens, 8).double().requires_grad_()
    key = torch.randn(2, tokens, 4).double().requires_grad_()
    value = torch.randn(2, tokens, 4).double().requires_grad_()
    factor = torch.randn(2, tokens, 8).double()
    allowed = torch.rand(2, tokens, 1, tokens) > 0.4
    is_first_token = torch.arange(tokens) == 0
    return {
        "query": query,
        "key": key,
        "value": value,
        "factor": factor,
        "rows": allowed | is_first_token,
        "keys": allowed[:, 0, 0] | is_first_token,
        "name": "any",
    }


def compare_attention(fabric: Fabric, tokens: int, mask: str | None, is_causal: bool) -> bool:
    """Compare attention and its gradients over split sequences with those over all tokens."""
    batch = attention_inputs(tokens)
    trained = [batch["query"], batch["key"], batch["value"]]
    expected = attend(batch, mask, is_causal)
    expected_loss = (expected * batch["factor"]).sum()
    expected_gradients = torch.autograd.grad(expected_loss, trained)
    batch["expected"] = expected.detach()
    with fabric.sequence_parallel(batch) as shard:
        actual = attend(shard, mask, is_causal)
        loss = (actual * shard["factor"]).sum()
        gradients = torch.autograd.grad(loss, trained)
    sums = fabric.all_reduce(list(gradients), reduce_op="sum")
    torch.testing.assert_close(actual, shard["expected"], rtol=0, atol=1e-12)
    torch.testing.assert_close(sums, list(expected_gradients), rtol=0, atol=1e-12)
    return True


@pytest.mark.parametrize("tokens", [7, 3, 2])
@pytest.mark.parametrize(
    ("mask", "is_causal"), [(None, False), (None, True), ("keys", False), ("rows", False)]
)
def test_attention_and_its_gradients_are_those_over_all_tokens(
    tokens: int, mask: str | None, is_causal: bool
) -> None:
    assert on_mesh(compare_attention, tokens, mask, is_causal) == [True, True]


# -- the context -----------------------------------------------------------------------------------


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.mask = dropout(torch.ones(64)).bool()
        return scaled_dot_product_attention(x, x, x)


def draw_in_context(fabric: Fabric) -> dict[str, Tensor]:
    model = Dropping()
    batch = [torch.ones(1, 8, 4), torch.ones(3), "name"]
    torch.manual_seed(5)
    with fabric.sequence_parallel(batch) as (sequence, vector, name):
        model(sequence)
    assert sequence.shape == (1, 4, 4)
    assert vector.shape == (3,)
    assert name == "name"
    return {"mask": model.mask, "draw after it": torch.rand(3)}


def test_ranks_draw_different_numbers_in_the_context_and_equal_numbers_after_it() -> None:
    first, second = on_mesh(draw_in_context)
    assert not torch.equal(first["mask"], second["mask"])
    assert torch.equal(first["draw after it"], second["draw after it"])


def passes_batch_through(fabric: Fabric) -> bool:
    batch = {"x": torch.ones(2, 1)}
    with fabric.sequence_parallel(batch) as shard:
        return shard is batch


def test_a_batch_passes_unchanged_through_strategies_that_split_no_sequences() -> None:
    results = run_in_ranks(passes_batch_through)
    assert results == [True, True]
    results = run_in_ranks(passes_batch_through, ranks=1, strategy="auto")
    assert results == [True]


def self_attention(x: Any) -> Tensor:
    return scaled_dot_product_attention(x, x, x)


def masked_self_attention(x: Tensor) -> Tensor:
    mask = torch.ones(2, 2, dtype=torch.bool)
    return scaled_dot_product_attention(x, x, x, mask)


def attention_with_a_mask_without_dimensions(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return scaled_dot_product_attention(heads, heads, heads, torch.tensor(1.0))


def attention_to_full_keys(x: Tensor) -> Tensor:
    keys = torch.ones(1, 4, 4)
    return scaled_dot_product_attention(x, keys, keys)


def multihead_attention(x: Tensor) -> Tensor:
    output, _ = nn.MultiheadAttention(4, 2)(x, x, x, need_weights=False)
    return output


def compute_in_context(fabric: Fabric) -> bool:
    def error(function: Callable[[Any], Tensor], batch: Any, **options: Any) -> str:
        """Return the error of a function in the context, or "fine"."""

        def compute() -> None:
            with fabric.sequence_parallel(batch, **options) as shard:
                function(shard)

        return outcome(compute)

    x = torch.ones(1, 4, 4)
    x_of_rank = x * fabric.global_rank
    shorter_by_rank = x[:, : 4 - fabric.global_rank]
    assert error(self_attention, x, dim=-2) == "fine"
    lengths = "the lengths are {'batch[0]': 4, 'batch[1]': 3}"
    assert lengths in error(self_attention, [x, torch.ones(1, 3)])
    assert "of at least 2 tokens" in error(self_attention, torch.ones(4, 1))
    assert "the lengths are {}" in error(self_attention, x, dim=5)
    sums = "have the sums [[0], [3056]], by rank of the group"
    assert sums in error(self_attention, x_of_rank)
    another_call = "another rank of the group makes another call"
    assert another_call in error(self_attention, shorter_by_rank)
    assert "have [2, 4, 4] tokens" in error(attention_to_full_keys, x)
    shapes = "a mask of shape (..., 2, 4), (..., 1, 4) or (..., 1, 2)"
    assert shapes in error(masked_self_attention, x)
    assert shapes in error(attention_with_a_mask_without_dimensions, x)
    local_attention = "attention over the tokens of this rank alone"
    assert local_attention in error(multihead_attention, x)
    not_called = "was not called: each rank has used its own tokens alone"
    assert not_called in error(torch.sum, x)
    return True


def test_computations_that_would_give_other_numbers_are_refused_on_all_ranks() -> None:
    assert on_mesh(compute_in_context) == [True, True]


def list_inputs_of_graphs(fabric: Fabric) -> list[str]:
    """Return the names of the inputs of all graphs that a compiled model has."""
    names: list[str] = []

    def note_inputs(graph: Any, inputs: Any) -> Any:
        nodes = graph.graph.find_nodes(op="placeholder")
        names.extend(node.name for node in nodes)
        return graph.forward

    torch.compiler.reset()
    module, _ = make(4, True)
    model = fabric.setup(torch.compile(module, backend=note_inputs))
    with fabric.sequence_parallel(batches(8)[0]) as shard:
        loss = squared_errors(model, shard).sum()
        fabric.backward(loss, reduce="sum")
    return names


def test_operations_between_graphs_are_not_compiled_one_by_one() -> None:
    for names in on_mesh(list_inputs_of_graphs):
        assert any("weight" in name for name in names)
        # The function that stands in for each of these operations takes "args".
        assert not any("args" in name for name in names)


def compare_gradients(fabric: Fabric) -> bool:
    """Compare a model with recomputed blocks with the plain model."""
    batch = batches(5)[0]
    plain, _ = make(4, True)
    squared_errors(plain, batch).sum().backward()
    expected = full_gradients(plain)

    module, _ = make(4, True)
    model = fabric.setup(module)
    with fabric.sequence_parallel(batch) as shard:
        loss = squared_errors(model, shard).sum() * 2
        fabric.backward(loss)
    torch.testing.assert_close(full_gradients(model), expected, rtol=0, atol=1e-10)
    return True


def test_blocks_may_be_recomputed() -> None:
    results = on_mesh(compare_gradients, activation_checkpointing=(Block,))
    assert results == [True, True]
