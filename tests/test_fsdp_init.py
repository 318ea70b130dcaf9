"""A model built in init_module() under FSDP: each rank gets its shards of the whole build's values, and no more."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.strategies import FSDPStrategy
from tests.loops import Transformer
from tests.ranks import outcome, run_in_ranks
from tests.test_fsdp import in_ranks, whole
from tests.test_fsdp_models import Buffers, Frozen, Tied

pytestmark = pytest.mark.timeout(90)


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.orthogonal_(module.weight[:4])


def applied() -> nn.Module:
    return Transformer().apply(draw)


def mixed_dtypes() -> nn.Module:
    model = Buffers()
    model.register_buffer("table", torch.rand(3, dtype=torch.float32))
    model.blocks[0].mlp[0].weight = nn.Parameter(torch.randn(16, 8, dtype=torch.float32))
    return model


def plain(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
    """Values and the generator's state after a whole build on the CPU in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(7)
    model, state = build(), torch.get_rng_state()
    torch.set_default_dtype(before)
    return values_of(model.to(dtype)), state


def values_of(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in named}


def built(fabric: Fabric, build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], Tensor, list[bool]]:
    torch.manual_seed(7)
    with fabric.init_module():
        module = build()
    blank = all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    flags = [parameter.requires_grad for parameter in module.parameters()]
    model = fabric.setup(module)
    state = torch.get_rng_state()
    kept = flags == [parameter.requires_grad for parameter in model.parameters()]
    return values_of(model), state, [blank, kept, not any(tensor.is_meta for tensor in model.buffers())]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("build", [Transformer, applied, Buffers, Frozen, Tied])
def test_the_values_and_the_generator_are_those_of_the_whole_build(build: Callable[[], nn.Module], ranks: int) -> None:
    expected, expected_state = plain(build)
    for values, state, as_it_should in in_ranks(built, build, ranks=ranks):
        assert list(values) == list(expected)
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert torch.equal(state, expected_state)
        assert all(as_it_should)


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_what_has_another_dtype_is_converted(precision: str, dtype: torch.dtype) -> None:
    expected, expected_state = plain(mixed_dtypes, dtype)
    for values, state, as_it_should in in_ranks(built, mixed_dtypes, precision=precision):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert torch.equal(state, expected_state)
        assert all(as_it_should)


OPTIONS = {
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "ranks": 4},
    "checkpointing": {"activation_checkpointing": nn.MultiheadAttention},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_values_do_not_depend_on_how_they_are_spread(options: dict[str, Any]) -> None:
    expected, _ = plain(Transformer)
    for values, _, _ in in_ranks(built, Transformer, **options):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


def ties(fabric: Fabric) -> list[bool]:
    with fabric.init_module():
        module = Tied()
        module.register_buffer("one", torch.rand(3))
        module.first.register_buffer("other", module.one)
    module.last.bias = module.first.bias
    model = fabric.setup(module)
    before = [
        model.last.weight is model.first.weight,
        model.last.bias is model.first.bias,
        model.one is model.first.other,
    ]
    fabric.backward(model(torch.ones(2, 5, 8)).sum())
    return [*before, model.last.weight is model.first.weight]


def test_ties_are_kept_also_those_made_after_the_build() -> None:
    assert in_ranks(ties) == [[True] * 4] * 2


# -- training ---------------------------------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, fabric: Fabric | None = None) -> dict[str, Tensor]:
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


def trained(fabric: Fabric, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    with fabric.init_module():
        module = build()
    model, optimizer = fabric.setup(module, adamw(module))
    return steps(model, optimizer, fabric)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("build", [Tied, Buffers])
def test_training_gives_the_numbers_of_one_process(build: Callable[[], nn.Module], ranks: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = build()
    torch.set_default_dtype(torch.float32)
    expected = steps(model, adamw(model))
    for values in in_ranks(trained, build, ranks=ranks, precision="64-true"):
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-10)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def filled(fabric: Fabric, path: Path) -> tuple[dict[str, Tensor], bool]:
    torch.manual_seed(fabric.global_rank)
    before = torch.get_rng_state()
    with fabric.init_module(empty_init=True):
        module = Transformer()
    drawn = not torch.equal(before, torch.get_rng_state())
    model, optimizer = fabric.setup(module, adamw(module))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    fabric.backward(model(torch.ones(2, 5, 4)).sum())
    optimizer.step()
    return values_of(model), drawn


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_fills_an_empty_model(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    with Fabric(accelerator="cpu", devices=1) as fabric:
        plain_model = Transformer()
        model, optimizer = fabric.setup(plain_model, adamw(plain_model))
        for _ in range(2):
            fabric.backward(model(torch.ones(2, 5, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            if not path.exists():
                fabric.save(path, {"model": model, "optimizer": optimizer})
        expected = values_of(model)
    for values, drawn in in_ranks(filled, path, ranks=ranks):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
        assert drawn  # by the attention alone, whose xavier_uniform_ is not skipped


def constants(fabric: Fabric) -> dict[str, Tensor]:
    with fabric.init_module(empty_init=True):
        module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    return values_of(fabric.setup(module))


def test_an_empty_model_has_its_constants() -> None:
    for values in in_ranks(constants):
        assert values["1.weight"].tolist() == [1.0] * 3
        assert values["2.running_var"].tolist() == [1.0] * 3
        assert values["0.weight"].shape == (3, 3)


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

    def another_seed() -> None:
        torch.manual_seed(fabric.global_rank)
        with fabric.init_module():
            model = Transformer()
        fabric.setup(model)

    def another_constant() -> None:
        with fabric.init_module():
            model = Transformer()
            nn.init.constant_(model.head.weight, fabric.global_rank)
        fabric.setup(model)

    def written_outside() -> None:
        with fabric.init_module():
            model = Transformer()
        nn.init.normal_(model.head.weight)
        fabric.setup(model)

    torch.manual_seed(0)
    cases = (on_meta, partly_on_meta, another_constant, written_outside, another_seed)
    return {case.__name__: outcome(case) for case in cases}


def test_what_cannot_be_filled_is_refused_with_the_names() -> None:
    for rank, results in enumerate(in_ranks(refusals)):
        assert all(text.startswith("UsageError") for text in results.values()), results
        assert "blocks.1.mlp.2.bias" in results["on_meta"]
        assert "head.bias" in results["partly_on_meta"]
        assert "embedding.weight" not in results["partly_on_meta"]
        assert "init_module()" in results["on_meta"]
        assert f"on rank {rank}" in results["another_seed"]
        assert "seed_everything" in results["another_seed"]
        assert "differ" in results["another_constant"]
        assert "head.weight" in results["written_outside"]


def mixture(fabric: Fabric) -> dict[str, Tensor]:
    torch.manual_seed(fabric.global_rank)
    real = nn.Linear(4, 8)
    torch.manual_seed(7)
    with fabric.init_module():
        module = Transformer()
    module.embedding = real
    return values_of(fabric.setup(module))


def test_real_parts_of_a_blank_model_get_the_values_of_rank_0() -> None:
    expected, _ = plain(Transformer)
    torch.manual_seed(0)
    real = nn.Linear(4, 8)
    expected |= {"embedding.weight": real.weight.detach(), "embedding.bias": real.bias.detach()}
    for values in in_ranks(mixture):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_nothing_is_kept_of_a_model_that_is_set_up() -> None:
    strategy = FSDPStrategy()
    strategy.setup_environment()
    try:
        with strategy.module_init_context():
            model = Transformer()
        strategy.setup_module(strategy.module_to_device(model))
        assert not strategy._nursery._origins
        assert len(whole(model)) == len(list(Transformer().parameters()))
    finally:
        strategy.teardown()


def two_models(fabric: Fabric) -> list[dict[str, Tensor]]:
    torch.manual_seed(7)
    with fabric.init_module():
        first, second = Transformer(), Tied()
    torch.randn(3)
    return [values_of(fabric.setup(model)) for model in (second, first)]


def test_models_of_one_context_are_set_up_in_any_order() -> None:
    torch.manual_seed(7)
    first, second = values_of(Transformer()), values_of(Tied())
    for found in in_ranks(two_models):
        torch.testing.assert_close(found, [second, first], rtol=0, atol=0)


# -- built on rank 0 --------------------------------------------------------------------------------------------------


class FromNumpy(Tied):
    """Filled in ways that nothing can record."""

    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.default_rng(5)
        self.table = nn.Parameter(torch.from_numpy(numbers.standard_normal((300, 90))).float())
        self.alias = self.table
        self.register_buffer("mask", torch.from_numpy(numbers.integers(0, 2, (3, 3)) > 0))
        self.drawn = nn.Parameter(torch.rand(5, 4))
        self.drawn.data.copy_(torch.from_numpy(self.drawn.detach().numpy() * 2))
        if self.drawn.sum() > -1:
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.drawn.sum() + self.table.mean()


def built_on_rank_0(fabric: Fabric) -> tuple[dict[str, Tensor], Tensor, list[bool]]:
    torch.manual_seed(7)
    with fabric.init_module(source="rank0"):
        module = FromNumpy()
    state = torch.get_rng_state()
    tensors = (*module.parameters(), *module.buffers())
    blank = all(tensor.is_meta == (fabric.global_rank > 0) for tensor in tensors)
    if fabric.global_rank == 0:
        # As any real value of rank 0.
        nn.init.constant_(module.drawn, 3.0)
    model, optimizer = fabric.setup(module, adamw(module))
    values = values_of(model)
    fabric.backward(model(torch.ones(2, 5, 8)).sum())
    optimizer.step()
    return values, state, [blank, model.table is model.alias, not model.frozen.requires_grad]


@pytest.mark.parametrize(
    "options",
    [{"ranks": 1}, {"ranks": 3}, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "ranks": 4}],
)
def test_rank_0_builds_what_cannot_be_recorded_and_sends_it_out(options: dict[str, Any]) -> None:
    expected, expected_state = plain(FromNumpy)
    expected["drawn"] = torch.full((5, 4), 3.0)
    for values, state, as_it_should in in_ranks(built_on_rank_0, **options):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
        assert torch.equal(state, expected_state)
        assert all(as_it_should)


def refusals_of_sources(fabric: Fabric) -> dict[str, str]:
    def recorded() -> None:
        with fabric.init_module():
            FromNumpy()

    def unknown() -> None:
        fabric.init_module(source="rank1")

    def nested() -> None:
        with fabric.init_module(), fabric.init_module():
            pass

    def lazy() -> None:
        with fabric.init_module():
            nn.LazyLinear(3)

    def lazy_in_setup() -> None:
        fabric.setup(nn.Sequential(nn.LazyLinear(3)))

    def one_rank_alone_on_meta() -> None:
        with torch.device("meta" if fabric.global_rank else "cpu"):
            model = nn.Linear(2, 2)
        fabric.setup(model)

    def one_rank_alone_recorded() -> None:
        with fabric.init_module() if fabric.global_rank else nullcontext():
            model = nn.Linear(2, 2, dtype=torch.float64)
        fabric.setup(model)

    def another_model() -> None:
        fabric.setup(nn.Linear(2, 2 + fabric.global_rank))

    def untouched() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
        outcome(lambda: fabric.setup(model))
        assert model[0].weight.dtype is torch.float32

    cases = (recorded, unknown, nested, lazy, lazy_in_setup, one_rank_alone_on_meta)
    cases += (one_rank_alone_recorded, another_model, untouched)
    return {case.__name__: outcome(case) for case in cases}


def test_what_ranks_do_not_agree_on_is_refused_on_all_before_anything_changes() -> None:
    for results in in_ranks(refusals_of_sources, precision="64-true"):
        assert results.pop("untouched") == "fine"
        assert all(text.startswith(("UsageError", "ConfigurationError")) for text in results.values()), results
        assert "FromNumpy.drawn" in results["recorded"]
        assert 'source="rank0"' in results["recorded"]
        assert "inside of another" in results["nested"]
        assert "LazyLinear.weight" in results["lazy"]
        assert "0.weight, 0.bias" in results["lazy_in_setup"]
        assert "weight, bias" in results["one_rank_alone_on_meta"]
        assert "some ranks have values" in results["one_rank_alone_recorded"]
        assert "another model" in results["another_model"]


def in_older_contexts(fabric: Fabric) -> list[bool]:
    found = []
    for context in (fabric.init_module, fabric.sharded_model, fabric.strategy.model_sharded_context):
        torch.manual_seed(7)
        with context():
            module = nn.Linear(4, 4)
        blank, model = module.weight.is_meta, fabric.setup(module)
        found += [blank, full_tensor(model.weight.detach()).equal(plain_weight())]
    return found


def plain_weight() -> Tensor:
    torch.manual_seed(7)
    return nn.Linear(4, 4).weight.detach()


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
