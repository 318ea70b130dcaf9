"""A model built in init_module() under FSDP: each rank gets its shards of the whole build's values, and no more."""

import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from tests.loops import Transformer
from tests.ranks import outcome, run_in_ranks
from tests.test_fsdp import in_ranks
from tests.test_fsdp_models import Buffers, Frozen, Tied
from tests.test_init_module import in_a_file, mapped_files

pytestmark = pytest.mark.timeout(90)


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.orthogonal_(module.weight[:4])


class Wide(nn.Module):
    """Most of it is large enough for files: tied weights, deep copies, a table that no checkpoint holds, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 2100, bias=False)
        self.head = nn.Linear(2100, 8)
        self.head.weight = nn.Parameter(torch.randn(8, 2100) * 0.02)
        self.tied = self.embedding.weight
        block = nn.Sequential(nn.Linear(8, 2100), nn.GELU(), nn.Linear(2100, 8))
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer(
            "table", torch.linspace(0, 1, 16800).view(2100, 8).sin(), persistent=False
        )
        self.recurrent = nn.LSTM(8, 128, proj_size=8, batch_first=True)
        self.embedding.weight.requires_grad_(False)
        self.apply(draw)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm.eval()(x) + self.table[:5]
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.embedding(self.recurrent(x)[0]))


def mixed_dtypes() -> nn.Module:
    model = Buffers()
    model.register_buffer("table", torch.rand(3, dtype=torch.float32))
    model.blocks[0].mlp[0].weight = nn.Parameter(torch.randn(16, 8, dtype=torch.float32))
    return model


def plain(
    build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Tensor]:
    """Values and the generator's state after a whole build on the CPU in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(7)
    model = build()
    state = torch.get_rng_state()
    torch.set_default_dtype(before)
    return values_of(model.to(dtype)), state


def values_of(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in named}


def built(
    fabric: Fabric, build: Callable[[], nn.Module], source: str
) -> tuple[dict[str, Tensor], Tensor, bool]:
    """The values after setup, the generator's state after the build, and whether memory is where it should be."""
    gc.collect()
    before = set(mapped_files())
    torch.manual_seed(7)
    with fabric.init_module(source=source):
        module = build()
    state = torch.get_rng_state()
    elsewhere = source == "rank0" and fabric.global_rank > 0
    large = [parameter for parameter in module.parameters() if parameter.nbytes >= 2**16]
    right = all(parameter.is_meta if elsewhere else in_a_file(parameter) for parameter in large)
    flags = [parameter.requires_grad for parameter in module.parameters()]
    model = fabric.setup(module)
    right &= flags == [parameter.requires_grad for parameter in model.parameters()]
    large.clear()
    # A thread of gloo may hold what it has sent a little longer.
    deadline = time.monotonic() + 10
    while not set(mapped_files()) <= before and time.monotonic() < deadline:
        gc.collect()
    return values_of(model), state, right and set(mapped_files()) <= before


@pytest.mark.parametrize("source", ["every_rank", "rank0"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("build", [Wide, Buffers, Frozen, Tied])
def test_the_values_and_the_generator_are_those_of_the_whole_build(
    build: Callable[[], nn.Module], ranks: int, source: str
) -> None:
    expected, expected_state = plain(build)
    for values, state, right in in_ranks(built, build, source, ranks=ranks):
        assert list(values) == list(expected)
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert torch.equal(state, expected_state)
        assert right


@pytest.mark.parametrize(
    ("build", "precision", "dtype"),
    [
        (Wide, "64-true", torch.float64),
        (mixed_dtypes, "64-true", torch.float64),
        (mixed_dtypes, "bf16-true", torch.bfloat16),
    ],
)
def test_what_has_another_dtype_is_converted(
    build: Callable[[], nn.Module], precision: str, dtype: torch.dtype
) -> None:
    expected, expected_state = plain(build, dtype)
    for values, state, _ in in_ranks(built, build, "every_rank", precision=precision):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert torch.equal(state, expected_state)


OPTIONS = {
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "ranks": 4},
    "checkpointing": {"activation_checkpointing": nn.BatchNorm1d},
    "blocks": {"auto_wrap_policy": {nn.Linear}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_values_do_not_depend_on_how_they_are_spread(options: dict[str, Any]) -> None:
    build = Buffers if "auto_wrap_policy" in options else Wide
    expected, _ = plain(build)
    for values, _, _ in in_ranks(built, build, "rank0", **options):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


def ties(fabric: Fabric, source: str) -> list[bool]:
    with fabric.init_module(source=source):
        module = Tied()
        module.register_buffer("one", torch.rand(130, 130))
        module.first.register_buffer("other", module.one)
        module.large = weight = nn.Parameter(torch.rand(130, 130))
        module.first.large = weight
    module.last.bias = module.first.bias
    model = fabric.setup(module)

    def tied() -> list[bool]:
        return [
            model.last.weight is model.first.weight,
            model.last.bias is model.first.bias,
            model.one is model.first.other,
            model.large is model.first.large,
        ]

    before = tied()
    fabric.backward(model(torch.ones(2, 5, 8)).sum())
    return [*before, *tied()]


@pytest.mark.parametrize("source", ["every_rank", "rank0"])
def test_ties_are_kept_also_those_made_after_the_build(source: str) -> None:
    assert in_ranks(ties, source) == [[True] * 8] * 2


# -- training ---------------------------------------------------------------------------------------------------------


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, fabric: Fabric | None = None
) -> dict[str, Tensor]:
    """Three steps in float64, on this rank's share of the batch, and what they lead to."""
    rank, size = (fabric.global_rank, fabric.world_size) if fabric else (0, 1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(6, 5, 8, generator=generator, dtype=torch.float64)
        loss = model(x[rank::size]).pow(2).mean()
        fabric.backward(loss) if fabric else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def trained(fabric: Fabric, build: Callable[[], nn.Module], source: str) -> dict[str, Tensor]:
    torch.manual_seed(7)
    with fabric.init_module(source=source):
        module = build()
    model, optimizer = fabric.setup(module, adamw(module))
    return steps(model, optimizer, fabric)


@pytest.mark.parametrize(("ranks", "source"), [(2, "rank0"), (3, "every_rank")])
@pytest.mark.parametrize("build", [Tied, Wide])
def test_training_gives_the_numbers_of_one_process(
    build: Callable[[], nn.Module], ranks: int, source: str
) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = build()
    torch.set_default_dtype(torch.float32)
    expected = steps(model, adamw(model))
    for values in in_ranks(trained, build, source, ranks=ranks, precision="64-true"):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def filled(fabric: Fabric, path: Path) -> dict[str, Tensor]:
    torch.manual_seed(fabric.global_rank)
    with fabric.init_module(empty_init=True):
        module = Wide()
    assert (module.head.weight.is_meta, module.table.is_meta) == (True, False)
    model, optimizer = fabric.setup(module, adamw(module))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    return steps(model, optimizer, fabric)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_fills_an_empty_model(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    with Fabric(accelerator="cpu", devices=1, precision="64-true") as fabric:
        with fabric.init_module():
            module = Wide()
        model, optimizer = fabric.setup(module, adamw(module))
        steps(model, optimizer, fabric)
        fabric.save(path, {"model": model, "optimizer": optimizer})
        expected = steps(model, optimizer, fabric)
    for values in in_ranks(filled, path, ranks=ranks, precision="64-true"):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refusals(fabric: Fabric) -> dict[str, str]:
    def on_meta() -> None:
        with torch.device("meta"):
            fabric.setup(Transformer())

    def partly_on_meta() -> None:
        with fabric.init_module():
            model = Transformer()
        model.head.bias = nn.Parameter(torch.empty(1, device="meta"))
        fabric.setup(model)

    def unknown_source() -> None:
        fabric.init_module(source="rank1")

    def lazy() -> None:
        with fabric.init_module():
            model = nn.Sequential(nn.LazyLinear(3))
        fabric.setup(model)

    def another_model() -> None:
        fabric.setup(nn.Linear(2, 2 + fabric.global_rank))

    def another_tie() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if fabric.global_rank:
            model[0].weight = model[1].weight
        fabric.setup(model)

    def empty_on_one_rank() -> None:
        with fabric.init_module(empty_init=fabric.global_rank > 0):
            model = nn.Linear(200, 200)
        fabric.setup(model)

    def on_rank_1_alone() -> None:
        fabric.setup(nn.LazyLinear(3) if fabric.global_rank else nn.Linear(3, 3))

    def untouched() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
        outcome(lambda: fabric.setup(model))
        assert model[0].weight.dtype is torch.float32

    def read_on_another_rank() -> None:
        with fabric.init_module(source="rank0"):
            assert nn.Linear(200, 200).weight.norm().item() > 0

    cases = (
        on_meta,
        partly_on_meta,
        unknown_source,
        lazy,
        another_model,
        another_tie,
        empty_on_one_rank,
    )
    cases += (on_rank_1_alone, untouched)
    # Rank 0 waits in a collective for the ranks that raise here.
    cases += (read_on_another_rank,) if fabric.global_rank == fabric.world_size - 1 else ()
    return {case.__name__: outcome(case) for case in cases}


def test_what_cannot_be_set_up_is_refused_on_all_ranks_before_anything_changes() -> None:
    for rank, results in enumerate(in_ranks(refusals, precision="64-true")):
        assert results.pop("untouched") == "fine"
        if rank:
            assert 'with source="rank0"' in results.pop("read_on_another_rank").lower()
        assert all(
            text.startswith(("UsageError", "ConfigurationError")) for text in results.values()
        ), results
        assert "blocks.1.mlp.2.bias" in results["on_meta"]
        assert "head.bias" in results["partly_on_meta"]
        assert "embedding.weight" not in results["partly_on_meta"]
        assert "init_module()" in results["on_meta"]
        assert "0.weight, 0.bias" in results["lazy"]
        assert all(
            "another model" in results[case]
            for case in ("another_model", "another_tie", "empty_on_one_rank")
        )
        assert f"on rank {rank}" in results["another_model"]
        assert "LazyLinear" in results["on_rank_1_alone"]


def differing(fabric: Fabric) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Parts that differ over ranks; the tensors of other ranks may be on meta; other parts are real."""
    torch.manual_seed(fabric.global_rank)
    state = torch.get_rng_state()
    with fabric.init_module(source="rank0"):
        pass
    kept = torch.get_rng_state().equal(state)
    with fabric.init_module():
        module = Transformer()
        nn.init.constant_(module.head.weight, fabric.global_rank)
    with torch.device("meta" if fabric.global_rank else "cpu"):
        module.embedding = nn.Linear(4, 8)
    model = fabric.setup(module)
    assert kept
    return values_of(model)


def test_every_rank_has_the_values_of_rank_0() -> None:
    torch.manual_seed(0)
    expected = Transformer()
    nn.init.constant_(expected.head.weight, 0)
    expected.embedding = nn.Linear(4, 8)
    for values in in_ranks(differing):
        torch.testing.assert_close(values, values_of(expected), rtol=0, atol=0)


def two_models(fabric: Fabric) -> list[dict[str, Tensor]]:
    torch.manual_seed(7)
    with fabric.init_module():
        first = Transformer()
        second = Wide()
    torch.randn(3)
    return [values_of(fabric.setup(model)) for model in (second, first)]


def test_models_of_one_context_are_set_up_in_any_order() -> None:
    torch.manual_seed(7)
    first = values_of(Transformer())
    second = values_of(Wide())
    for actual in in_ranks(two_models):
        torch.testing.assert_close(actual, [second, first], rtol=0, atol=0)


def failing_on_rank_0(fabric: Fabric) -> list[str]:
    def build() -> None:
        with fabric.init_module(source="rank0"):
            module = Tied()
            if fabric.is_global_zero:
                raise KeyError("no such file")
        fabric.setup(module)

    return [outcome(build), outcome(lambda: fabric.setup(Tied()))]


def test_a_build_that_fails_on_rank_0_fails_on_all_ranks_and_nobody_waits() -> None:
    first, second = in_ranks(failing_on_rank_0)
    assert first[0].startswith("KeyError")
    assert first[1] == "fine"
    assert "rank 0 failed" in second[0]
    assert second[1] == "fine"


class FromNumpy(Tied):
    """Filled from what torch does not see, and shaped by what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.default_rng(5)
        self.table = nn.Parameter(torch.from_numpy(numbers.standard_normal((300, 90))).float())
        self.alias = self.table
        self.register_buffer("mask", torch.from_numpy(numbers.integers(0, 2, (300, 300)) > 0))
        self.drawn = nn.Parameter(torch.rand(5, 4))
        self.drawn.data.copy_(torch.from_numpy(self.drawn.detach().numpy() * 2))
        if self.drawn.sum() > -1:
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


@pytest.mark.parametrize("source", ["every_rank", "rank0"])
def test_values_from_numpy_arrive(source: str) -> None:
    expected, expected_state = plain(FromNumpy)
    for values, state, right in in_ranks(built, FromNumpy, source):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert torch.equal(state, expected_state)
        assert right


def in_older_contexts(fabric: Fabric) -> list[bool]:
    found = []
    for context in (
        fabric.init_module,
        fabric.sharded_model,
        fabric.strategy.model_sharded_context,
    ):
        torch.manual_seed(7)
        with context():
            module = nn.Linear(130, 130)
        mapped = in_a_file(module.weight)
        model = fabric.setup(module)
        found += [mapped, full_tensor(model.weight.detach()).equal(plain_weight())]
    return found


def plain_weight() -> Tensor:
    torch.manual_seed(7)
    return nn.Linear(130, 130).weight.detach()


def test_the_older_names_of_the_context_build_the_same() -> None:
    assert in_ranks(in_older_contexts) == [[True] * 6] * 2


def whole_on_every_rank(fabric: Fabric) -> dict[str, Tensor]:
    torch.manual_seed(7)
    with fabric.init_module(source="rank0"):
        return values_of(fabric.setup(FromNumpy()))


def test_other_strategies_build_the_model_on_every_rank() -> None:
    expected, _ = plain(FromNumpy)
    for values in run_in_ranks(whole_on_every_rank):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


def count_different_rows(fabric: Fabric) -> int:
    with fabric.init_module():
        layer = nn.Linear(4, 8)
    model = fabric.setup_module(layer)
    state = fabric.strategy.get_module_state_dict(model._fabric_prepared)
    return len(state["weight"].unique(dim=0))


def test_shards_of_different_ranks_have_different_rows() -> None:
    assert run_in_ranks(count_different_rows, strategy="fsdp") == [8, 8]
