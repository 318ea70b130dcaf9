"""A model whose layers are split is the whole model, or its first forward pass raises."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.errors import ArgumentTypeError, RankFailedError
from fabric.strategies import ModelParallelStrategy
from tests.ranks import outcome, run_in_ranks

WIDTH = 16
HEADS = 4
ATTENTION_PLAN = {
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.out": "rowwise",
}
FEED_FORWARD_PLAN = {"*.up": "colwise", "*.gate": "colwise", "*.down": "rowwise"}


class Attention(nn.Module):
    """The attention of common model libraries, whose subclasses count heads in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.split_heads(self.query(x))
        key = self.split_heads(self.key(x))
        value = self.split_heads(self.value(x))
        heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class AttentionWithUnknownAttribute(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.nb_heads = HEADS

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.nb_heads, -1)).transpose(1, 2)


class AttentionWithConfig(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)


class AttentionWithDropout(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(dropout(x, training=self.training))


class FusedAttention(nn.Module):
    """One layer for queries, keys and values, one level deeper than the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).chunk(3, -1)
        heads = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts]
        output = scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(output.transpose(1, 2).flatten(2))


class Cat(nn.Module):
    # The comparison also copies the arguments that are no tensors.
    arguments = (SimpleNamespace(dim=-1),)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.gate = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, options: SimpleNamespace, x: Tensor) -> Tensor:
        joined = torch.cat([self.up(x), self.gate(x)], options.dim)
        return self.down(joined)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(softmax(self.up(x), -1))


class SmallGate(nn.Module):
    """A gate with one weight for all columns. Its gradient on a rank is that of one part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.router = nn.Linear(WIDTH, 1)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.router(x))


class ScalarGate(nn.Module):
    """A scale of all columns by one number, which is not sharded where other parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


class SlicedInput(nn.Module):
    """A gate with this rank's slice of the input, whose gradient on a rank is that of one part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        width = hidden.shape[-1]
        begin = 0
        if width < WIDTH:
            # Each data-parallel rank has a group of ranks, which are neighbors, for all columns.
            begin = torch.distributed.get_rank() * width % WIDTH
        return self.down(hidden * x[..., begin : begin + width])


class Model(nn.Module):
    """A model with one block behind a norm."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.block = block
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        arguments = getattr(self.block, "arguments", ())
        x = x + self.block(*arguments, self.norm(x))
        return self.head(x)


def plan_for(model: nn.Module) -> dict[str, Any]:
    """Return the lines of the plans above that name a layer of the model."""
    plan: dict[str, Any] = {}
    for pattern, style in {**ATTENTION_PLAN, **FEED_FORWARD_PLAN}.items():
        name = pattern.removeprefix("*.")
        if hasattr(model.block, name):
            plan[pattern] = style
    if isinstance(model.block, FusedAttention):
        plan["block.inputs.0"] = "colwise"
    return plan


def first_pass(fabric: Fabric, build: Callable[[], nn.Module], plan: Any = None) -> str:
    """Return the error of the first forward pass of a model around a block, or "fine"."""
    strategy: Any = fabric.strategy
    torch.manual_seed(3)
    module = Model(build())
    strategy.tp_plan = plan or plan_for(module)
    x = torch.randn(2, 5, WIDTH)
    model = fabric.setup(module)
    return outcome(lambda: model(x))


def on_mesh(
    function: Any, *args: Any, ranks: int = 2, precision: Any = "32-true", **options: Any
) -> list[Any]:
    options.setdefault("tp_plan", ATTENTION_PLAN)
    options.setdefault("data_parallel_size", 1)
    strategy = ModelParallelStrategy(start_method="forkserver", tensor_parallel_size=2, **options)
    return run_in_ranks(function, *args, strategy=strategy, ranks=ranks, precision=precision)


WRONG_BLOCKS: dict[type[nn.Module], list[str]] = {
    AttentionWithUnknownAttribute: ["the output of block.out differs", '"*.query": "colwise"'],
    AttentionWithConfig: ["the output of block.out differs", '"*.out": "rowwise"'],
    FusedAttention: ["the output of block.out differs", '"block.inputs.0": "colwise"'],
    Cat: ["the output of block.down differs", '"*.gate": "colwise"'],
    Softmax: ["the output of block.down differs", '"*.up": "colwise"'],
    SmallGate: ["the gradient of block.router.weight differs", "one part only"],
    ScalarGate: ["the gradient of block.scale differs", "one part only"],
    SlicedInput: ["the gradient of input 0 of block differs", '"*.up": "colwise"'],
}


def pass_through_wrong_blocks(fabric: Fabric) -> bool:
    for block, texts in WRONG_BLOCKS.items():
        error = first_pass(fabric, block)
        for text in texts:
            assert text in error, (block, error)
    return True


def test_another_model_than_the_whole_one_is_an_error_that_names_layer_and_line() -> None:
    assert on_mesh(pass_through_wrong_blocks) == [True, True]


class AttentionWithWideNorm(Attention):
    """An attention with a norm of all columns, of which a rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.value(x)))


def pass_through_wide_norm(fabric: Fabric) -> tuple[str, str]:
    x = torch.ones(2, 5, WIDTH)
    model = fabric.setup(Model(AttentionWithWideNorm()))
    text = outcome(lambda: model(x))
    # The remedy of the error.
    strategy: Any = fabric.strategy
    strategy.tp_plan = {"head": "rowwise_rep"}
    model = fabric.setup(Model(AttentionWithWideNorm()))
    return text, outcome(lambda: model(x))


def test_an_error_because_of_the_split_names_the_module_and_the_lines_to_leave_out() -> None:
    plan = {"*.value": "colwise", "*.out": "rowwise", "head": "rowwise_rep"}
    for text, outcome_of_remedy in on_mesh(pass_through_wide_norm, tp_plan=plan):
        assert text.startswith("RuntimeError: Given normalized_shape=[16]")
        assert "block raises this error because its layers are split by " in text
        assert '"*.value": "colwise", "*.out": "rowwise". As a whole it raises none' in text
        assert outcome_of_remedy == "fine"


def pass_output_on(module: nn.Module, args: Any, output: Any) -> None:
    """A hook behind which torch looks for more hooks if the forward pass raises."""


class RaisingAttention(Attention):
    """An attention that raises in evaluation mode on some ranks, before or after its layers."""

    def __init__(self, ranks: tuple[int, ...], is_late: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.is_late = is_late

    def refuse_evaluation(self) -> None:
        rank = torch.distributed.get_rank()
        if rank in self.ranks and not self.training:
            raise RuntimeError(f"no evaluation on rank {rank}")

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_late:
            self.refuse_evaluation()
        output = super().forward(x)
        if self.is_late:
            self.refuse_evaluation()
        return output


def pass_through_raising_block(fabric: Fabric, ranks: tuple[int, ...], is_late: bool) -> bool:
    model = fabric.setup(Model(RaisingAttention(ranks, is_late)))
    output = model(torch.ones(2, 5, WIDTH))
    return output.requires_grad


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_of_one_rank_in_the_comparison_ends_the_job(is_late: bool) -> None:
    with pytest.raises(RankFailedError, match="no evaluation on rank 1"):
        on_mesh(pass_through_raising_block, (1,), is_late)


def test_an_error_of_all_ranks_in_the_comparison_leaves_it_out() -> None:
    assert on_mesh(pass_through_raising_block, (0, 1), True) == [True, True]


def save_after_comparison_in_some_groups(fabric: Fabric, path: Path) -> str:
    """Return the outcome of a save after only ranks 0 and 1 have computed their block once more."""
    model = fabric.setup(Model(RaisingAttention((2, 3), False)))
    model(torch.ones(2, 5, WIDTH))
    return outcome(lambda: fabric.save(path, {"model": model}))


def test_a_save_does_not_compare_how_often_a_comparison_has_used_sharded_layers(
    tmp_path: Path,
) -> None:
    options = {"data_parallel_size": 2, "auto_wrap_policy": {nn.Linear}}
    path = tmp_path / "checkpoint"
    outcomes = on_mesh(save_after_comparison_in_some_groups, path, ranks=4, **options)
    assert outcomes == ["fine"] * 4


def repeat_wrong_pass(fabric: Fabric) -> list[str]:
    module = Model(AttentionWithConfig())
    model = fabric.setup(module)
    module.register_forward_hook(pass_output_on)
    x = torch.randn(2, 5, WIDTH)
    outcomes = []
    for _ in range(2):
        text = outcome(lambda: model(x))
        outcomes.append(text)
    return outcomes


def count_graphs(fabric: Fabric) -> list[int]:
    """Return how many graphs have run after each pass of a model that is compiled after setup."""
    calls: list[Tensor] = []

    def run_and_count(graph: nn.Module, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(args[0])
            return graph(*args)

        return run

    model = torch.compile(fabric.setup(Model(Attention())), backend=run_and_count)
    counts = []
    for has_gradients in (False, False, True, True):
        with torch.set_grad_enabled(has_gradients):
            model(torch.randn(2, 5, WIDTH))
        counts.append(len(calls))
    return counts


def test_only_passes_that_are_compared_run_uncompiled() -> None:
    for first, second, third, fourth in on_mesh(count_graphs):
        assert first == 0
        assert second > 0
        assert third == second
        assert fourth > third


def compile_wrong_block(fabric: Fabric, order: str) -> str:
    module: Any = Model(AttentionWithConfig())
    if order == "before":
        module = torch.compile(module, backend="eager")
    model = fabric.setup(module)
    if order == "after":
        model = torch.compile(model, backend="eager")
    x = torch.randn(2, 5, WIDTH)
    return outcome(lambda: model(x))


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_compiled_model_is_compared(order: str) -> None:
    for error in on_mesh(compile_wrong_block, order):
        assert "the output of block.out differs" in error


def test_a_wrong_model_raises_the_same_error_when_the_pass_is_repeated() -> None:
    for first, second in on_mesh(repeat_wrong_pass):
        assert "the output of block.out differs" in first
        assert "the output of block.out differs" in second


class CallsLayers(nn.Module):
    """A model that calls the layers of its block, and not the block, in a method of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("training_step() is the forward pass")

    def training_step(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        return x + block.down(softmax(block.up(x), -1))


def call_layers_of_wrong_block(fabric: Fabric, plan: Any) -> list[str]:
    """Return the outcomes of two forward passes."""
    strategy: Any = fabric.strategy
    strategy.tp_plan = plan
    torch.manual_seed(3)
    module = CallsLayers(Softmax())
    x = torch.randn(2, 5, WIDTH)
    model = fabric.setup(module)
    return [outcome(lambda: model.training_step(x)) for _ in range(2)]


def test_layers_that_are_called_outside_of_their_block_are_compared_in_the_next_pass() -> None:
    wrong_plan = {"*.*.up": "colwise", "*.*.down": "rowwise"}
    for outcomes in on_mesh(call_layers_of_wrong_block, wrong_plan):
        assert outcomes[0] == "fine"
        assert "the output of blocks.0.down differs" in outcomes[1]
    whole_plan = {"*.*.up": "colwise_rep", "*.*.down": "rowwise_rep"}
    assert on_mesh(call_layers_of_wrong_block, whole_plan) == [["fine", "fine"]] * 2


# -- models that are the whole ones ---------------------------------------------------------------


class TwoLayers(nn.Module):
    """The remedy for concatenated outputs: a layer for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.gate = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid())


class CountingAttention(Attention):
    """An attention that counts its calls, in an attribute, in a buffer and in an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, cache: "Cache | None" = None) -> Tensor:
        self.calls += 1
        self.get_buffer("steps").add_(1)
        if cache is not None:
            cache.calls += 1
        x.mul_(1)
        return super().forward(x)


class Cache:
    calls = 0


class ModelWithCache(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.cache = Cache()
        return self.head(self.block(self.norm(x), cache=self.cache))


class ZeroOut(AttentionWithUnknownAttribute):
    """A wrong attention whose output is zero before the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)


class AttentionWithBackwardHook(Attention):
    """An attention whose input gets twice the gradient, which the whole copy would not get."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


class RouterBehind(SmallGate):
    """The remedy for a layer whose input is whole."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * self.router(x)


def pass_through_right_blocks(fabric: Fabric) -> bool:
    whole_styles = {"*.up": "colwise_rep", "*.down": "rowwise_rep"}
    assert first_pass(fabric, Attention) == "fine"
    assert first_pass(fabric, AttentionWithDropout) == "fine"
    assert first_pass(fabric, AttentionWithBackwardHook) == "fine"
    assert first_pass(fabric, TwoLayers) == "fine"
    assert first_pass(fabric, Softmax, whole_styles) == "fine"
    assert first_pass(fabric, RouterBehind) == "fine"
    return True


def test_the_remedies_of_the_error_are_the_whole_model() -> None:
    assert on_mesh(pass_through_right_blocks) == [True, True]


def pass_through_sharded_layers(fabric: Fabric) -> bool:
    return pass_through_wrong_blocks(fabric) and pass_through_right_blocks(fabric)


class HeadScales(Attention):
    """An attention with a layer on this rank's heads that setup does not recognize."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH // HEADS, 1)

    def split_heads(self, x: Tensor) -> Tensor:
        heads = super().split_heads(x)
        return heads * self.scale(heads)


WHOLE_PLAN = {"*.up": "colwise_rep", "*.gate": "colwise_rep", "*.down": "rowwise_rep"}
# For each remedy in the error, the block that follows it, and the plan.
REMEDIES: list[tuple[type[nn.Module], Any]] = [
    (Attention, None),  # a view with -1 in place of a number of heads
    (TwoLayers, None),
    (Cat, WHOLE_PLAN),
    (Softmax, {"*.up": "colwise_rep", "*.down": "rowwise_rep"}),
    (HeadScales, {**ATTENTION_PLAN, "*.scale": "replicated_with_grad_allreduce"}),
    (RouterBehind, None),
]


def train_with_remedies(fabric: Fabric) -> list[list[tuple[Tensor, Tensor]]]:
    """Return for each remedy the pairs of a parameter of a split and of a plain model."""
    strategy: Any = fabric.strategy
    pairs_of_blocks: list[list[tuple[Tensor, Tensor]]] = []
    for build, plan in REMEDIES:
        torch.manual_seed(3)
        plain = Model(build())
        strategy.tp_plan = plan or plan_for(plain)
        pairs_of_blocks.append(train_beside(fabric, plain))
    return pairs_of_blocks


def train_beside(fabric: Fabric, plain: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter after two steps of a split model and of the plain one."""
    module = deepcopy(plain)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(2, 5, WIDTH)
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    pairs: list[tuple[Tensor, Tensor]] = []
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        pairs.append((full_tensor(parameter.detach()), expected.detach()))
    return pairs


def test_each_remedy_of_the_error_trains_the_whole_model() -> None:
    for pairs_of_blocks in on_mesh(train_with_remedies):
        for pairs in pairs_of_blocks:
            for actual, expected in pairs:
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Softmax(), SmallGate()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def leave_out_blocks(fabric: Fabric) -> list[str]:
    """Return the errors of first passes of a model that differs in two blocks when it is split."""
    strategy: Any = fabric.strategy
    errors: list[str] = []
    x = torch.randn(2, 5, WIDTH)
    for patterns in ([], ["blocks.0"], ["blocks.*"]):
        strategy.not_compared = patterns
        model = fabric.setup(TwoBlocks())
        errors.append(outcome(lambda model=model: model(x)))
    strategy.not_compared = ["block"]
    errors.append(outcome(lambda: fabric.setup(TwoBlocks())))
    return errors


def split_two_blocks(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor_parallel"], layers)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"tp_plan": {"*.*.up": "colwise", "*.*.down": "rowwise"}},
        {"tp_plan": None, "parallelize_fn": split_two_blocks},
    ],
)
def test_a_block_that_is_meant_to_differ_is_left_out_by_name(options: Any) -> None:
    for nothing, first, both, unknown in on_mesh(leave_out_blocks, **options):
        assert "the output of blocks.0.down differs" in nothing
        assert "not_compared=['blocks.*']" in nothing
        assert "check_training" not in nothing
        assert "the gradient of blocks.1.router.weight differs" in first
        assert both == "fine"
        assert "no module is called 'block'" in unknown


def test_a_string_for_a_list_of_blocks_is_an_error() -> None:
    patterns: Any = "blocks.*"
    with pytest.raises(ArgumentTypeError, match=r"not_compared=\['blocks\.\*'\]"):
        ModelParallelStrategy(tp_plan=ATTENTION_PLAN, not_compared=patterns)


def train_sharded_layers(fabric: Fabric) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter after two steps of a sharded and of a plain model."""
    torch.manual_seed(3)
    plain = Model(Attention())
    return train_beside(fabric, plain)


@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)]
)
def test_layers_that_are_sharded_one_by_one_are_compared(precision: Any) -> None:
    options = {"data_parallel_size": 2, "auto_wrap_policy": {nn.Linear}}
    results = on_mesh(pass_through_sharded_layers, ranks=4, precision=precision, **options)
    assert results == [True] * 4


def test_the_comparison_of_layers_that_are_sharded_one_by_one_leaves_no_trace() -> None:
    options = {"data_parallel_size": 2, "auto_wrap_policy": {nn.Linear}}
    for pairs in on_mesh(train_sharded_layers, ranks=4, **options):
        for parameter, expected in pairs:
            torch.testing.assert_close(parameter, expected)


def count_saved_tensors(model: nn.Module) -> int:
    """Return the number of tensors that a forward pass saves for the backward pass."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.ones(2, 5, WIDTH))
    return len(saved)


def check_for_traces(fabric: Fabric) -> bool:
    module = ModelWithCache(CountingAttention())
    model: Any = fabric.setup(module)
    hooks_before = len(model._fabric_hooks.before)
    state = torch.get_rng_state()
    num_saved = count_saved_tensors(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.block.training
    assert model.block.calls == 1
    assert model.block.steps.item() == 1
    assert model.cache.calls == 1
    assert len(model._fabric_hooks.before) == hooks_before - 1
    # Otherwise the recomputation of an activation checkpoint would not fit the first pass.
    assert count_saved_tensors(model) == num_saved
    return True


def test_the_comparison_of_the_first_pass_leaves_no_trace() -> None:
    assert on_mesh(check_for_traces) == [True, True]


def train_from_zero(fabric: Fabric) -> list[str]:
    module = Model(ZeroOut())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model, optimizer = fabric.setup(module, optimizer)
    x = torch.randn(2, 5, WIDTH)
    outcomes = [outcome(lambda: model(x))]
    for _ in range(2):
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        outcomes.append(outcome(lambda: model(x)))
    return outcomes


def test_a_layer_of_zeros_is_compared_after_its_first_step() -> None:
    for outcomes in on_mesh(train_from_zero):
        assert outcomes[0] == "fine"
        assert "the output of block.out differs" in outcomes[1]


# -- norms of split heads --------------------------------------------------------------------------


class HeadNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class QwenAttention(nn.Module):
    """The attention of Qwen3: grouped queries, and a norm of each query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.query = nn.Linear(WIDTH, 16, bias=False)
        self.key = nn.Linear(WIDTH, 8, bias=False)
        self.value = nn.Linear(WIDTH, 8, bias=False)
        self.out = nn.Linear(16, WIDTH, bias=False)
        self.query_norm = HeadNorm(self.head_dim)
        self.key_norm = HeadNorm(self.head_dim)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query_norm(self.split_heads(self.query(x))).transpose(1, 2)
        key = self.key_norm(self.split_heads(self.key(x))).transpose(1, 2)
        value = self.split_heads(self.value(x)).transpose(1, 2)
        heads = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class QwenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = HeadNorm(WIDTH)
        self.attention = QwenAttention()
        self.mlp = TwoLayers()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


QWEN_PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


class Qwen(nn.Module):
    _tp_plan = QWEN_PLAN

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([QwenBlock(), QwenBlock()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_qwen(fabric: Fabric, plans: list[Any]) -> list[list[Tensor]]:
    """Return the parameters after two steps, and what a hook of a norm got, for each plan."""
    results = []
    for plan in plans:
        torch.manual_seed(5)
        module = Qwen().double()
        # On one device there is no plan.
        vars(fabric.strategy)["tp_plan"] = plan
        seen: list[Tensor] = []
        norm = module.get_parameter("blocks.0.attention.query_norm.weight")
        norm.register_hook(seen.append)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
        model, optimizer = fabric.setup(module, optimizer)
        for _ in range(2):
            x = torch.linspace(-1, 1, 2 * 5 * WIDTH).double().sin().view(2, 5, WIDTH)
            loss = model(x).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        parameters = [full_tensor(parameter.detach()) for parameter in model.parameters()]
        results.append([*parameters, seen[-1]])
    return results


def test_norms_of_split_heads_get_the_gradient_of_all_heads() -> None:
    with_line = {**QWEN_PLAN, "blocks.*.attention.*_norm": "replicated_with_grad_allreduce"}
    plans = ["auto", with_line]
    expected = run_in_ranks(train_qwen, plans, ranks=1, strategy="auto")[0]
    for actual in on_mesh(train_qwen, plans):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
