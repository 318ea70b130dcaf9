"""A model built in init_module() under FSDP has the values of a plain build in its shards."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.orthogonal_(module.weight[:4])


class Wide(nn.Module):
    """Large tensors: tied weights, deep copies, a table that no checkpoint holds, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 2100, bias=False)
        self.head = nn.Linear(2100, 8)
        head_weight = torch.randn(8, 2100) * 0.02
        self.head.weight = nn.Parameter(head_weight)
        self.tied = self.embedding.weight
        block = nn.Sequential(
            nn.Linear(8, 2100),
            nn.GELU(),
            nn.Linear(2100, 8),
        )
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])
        self.norm = nn.BatchNorm1d(5)
        angles = torch.linspace(0, 1, 16800).view(2100, 8)
        self.register_buffer("table", angles.sin(), persistent=False)
        self.recurrent = nn.LSTM(8, 128, proj_size=8, batch_first=True)
        self.embedding.weight.requires_grad_(False)
        self.apply(draw)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        x = self.norm(x) + self.table[:5]
        for block in self.blocks:
            x = x + block(x)
        hidden, _ = self.recurrent(x)
        return self.head(self.embedding(hidden))


def mixed_dtypes() -> nn.Module:
    model = Buffers()
    table = torch.rand(3, dtype=torch.float32)
    model.register_buffer("table", table)
    weight = torch.randn(16, 8, dtype=torch.float32)
    model.blocks[0].mlp[0].weight = nn.Parameter(weight)
    return model


class Build(NamedTuple):
    """The values of a model after its setup, and the generator's state before the setup."""

    values: dict[str, Tensor]
    generator_state: Tensor


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare tensors bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def build_plainly(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Build:
    """Return the values and the generator's state after a plain build on the CPU in the dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(7)
    model = build()
    state = torch.get_rng_state()
    torch.set_default_dtype(before)
    model.to(dtype)
    return Build(values_of(model), state)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    values = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = full_tensor(tensor.detach())
        values[name] = value.clone()
    return values


def requires_grad(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def build_and_set_up(fabric: Fabric, build: Callable[[], nn.Module], source: str) -> Build:
    """Build a module and set it up; check where its memory is."""
    gc.collect()
    files_before = set(mapped_files())
    torch.manual_seed(7)
    with fabric.init_module(source=source):
        module = build()
    state = torch.get_rng_state()
    for parameter in module.parameters():
        is_large = parameter.nbytes >= 2**16
        if is_large and source == "rank0" and fabric.global_rank > 0:
            assert parameter.is_meta
        elif is_large:
            assert in_a_file(parameter)
    # The variable would keep a file mapped.
    del parameter
    expected = requires_grad(module)
    model = fabric.setup(module)
    assert requires_grad(model) == expected
    # A thread of gloo may hold a sent tensor a little longer.
    deadline = time.monotonic() + 150
    while not set(mapped_files()) <= files_before:
        assert time.monotonic() < deadline, "files of the build are still mapped"
        gc.collect()
    return Build(values_of(model), state)


def builds_and_ranks() -> list[Any]:
    parameters = []
    for build in (Wide, Buffers, Frozen, Tied):
        parameters.append(pytest.param(build, 3))
        # A single rank has no shards that could differ from one model to another.
        marks = [] if build is Wide else [pytest.mark.slow, pytest.mark.soak]
        parameters.append(pytest.param(build, 1, marks=marks))
    return parameters


@pytest.mark.parametrize("source", ["every_rank", "rank0"])
@pytest.mark.parametrize(("build", "ranks"), builds_and_ranks())
def test_the_values_and_the_generator_are_those_of_the_plain_build(
    build: Callable[[], nn.Module], ranks: int, source: str
) -> None:
    expected, expected_state = build_plainly(build)
    for values, state in in_ranks(build_and_set_up, build, source, ranks=ranks):
        assert list(values) == list(expected)
        assert_equal(values, expected)
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize(
    ("build", "precision", "dtype"),
    [
        (Wide, "64-true", torch.float64),
        (mixed_dtypes, "64-true", torch.float64),
        (mixed_dtypes, "bf16-true", torch.bfloat16),
    ],
)
def test_tensors_of_another_dtype_are_converted(
    build: Callable[[], nn.Module], precision: str, dtype: torch.dtype
) -> None:
    expected, expected_state = build_plainly(build, dtype)
    for values, state in in_ranks(build_and_set_up, build, "every_rank", precision=precision):
        assert_equal(values, expected)
        assert torch.equal(state, expected_state)


OPTIONS = {
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "ranks": 4},
    "checkpointing": {"activation_checkpointing": nn.BatchNorm1d},
    "blocks": {"auto_wrap_policy": {nn.Linear}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_values_do_not_depend_on_the_sharding(options: dict[str, Any]) -> None:
    build = Wide
    if "auto_wrap_policy" in options:
        # The policy would separate the tied weights of the wide model.
        build = Buffers
    expected, _ = build_plainly(build)
    for values, _ in in_ranks(build_and_set_up, build, "rank0", **options):
        assert_equal(values, expected)


def build_with_ties(fabric: Fabric, source: str) -> bool:
    with fabric.init_module(source=source):
        module = Tied()
        module.register_buffer("table", torch.rand(130, 130))
        module.first.register_buffer("table", module.table)
        module.large = nn.Parameter(torch.rand(130, 130))
        module.first.large = module.large
    module.last.bias = module.first.bias
    model = fabric.setup(module)

    def check_ties() -> None:
        assert model.last.weight is model.first.weight
        assert model.last.bias is model.first.bias
        assert model.table is model.first.table
        assert model.large is model.first.large

    check_ties()
    output = model(torch.ones(2, 5, 8))
    loss = output.sum()
    fabric.backward(loss)
    check_ties()
    return True


@pytest.mark.parametrize("source", ["every_rank", "rank0"])
def test_ties_of_the_build_and_after_it_stay(source: str) -> None:
    assert in_ranks(build_with_ties, source) == [True, True]


# -- training --------------------------------------------------------------------------------------


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(6, 5, 8, generator=generator, dtype=torch.float64)


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def train_in_one_process(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Take three steps in float64 and return the values of the model."""
    for x in batches():
        loss = mean_square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def train_in_ranks(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Take three steps on this rank's share of the batches and return the values of the model."""
    for x in batches():
        rank_samples = x[fabric.global_rank :: fabric.world_size]
        loss = mean_square(model(rank_samples))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def assert_close(actual: Any, expected: Any) -> None:
    """Compare numbers of steps in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def build_and_train(
    fabric: Fabric, build: Callable[[], nn.Module], source: str
) -> dict[str, Tensor]:
    torch.manual_seed(7)
    with fabric.init_module(source=source):
        module = build()
    model, optimizer = fabric.setup(module, adamw(module))
    return train_in_ranks(fabric, model, optimizer)


@pytest.mark.parametrize(("ranks", "source"), [(2, "rank0"), (3, "every_rank")])
@pytest.mark.parametrize("build", [Tied, Wide])
def test_training_gives_the_numbers_of_one_process(
    build: Callable[[], nn.Module], ranks: int, source: str
) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = build()
    torch.set_default_dtype(torch.float32)
    expected = train_in_one_process(model, adamw(model))
    for values in in_ranks(build_and_train, build, source, ranks=ranks, precision="64-true"):
        assert_close(values, expected)


# -- checkpoints -----------------------------------------------------------------------------------


def load_into_an_empty_model(fabric: Fabric, path: Path) -> dict[str, Tensor]:
    torch.manual_seed(fabric.global_rank)
    with fabric.init_module(empty_init=True):
        module = Wide()
    assert module.head.weight.is_meta
    assert not module.table.is_meta
    model, optimizer = fabric.setup(module, adamw(module))
    fabric.load(path, {"model": model, "optimizer": optimizer})
    return train_in_ranks(fabric, model, optimizer)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_fills_an_empty_model(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    with Fabric(accelerator="cpu", devices=1, precision="64-true") as fabric:
        with fabric.init_module():
            module = Wide()
        model, optimizer = fabric.setup(module, adamw(module))
        train_in_ranks(fabric, model, optimizer)
        fabric.save(path, {"model": model, "optimizer": optimizer})
        expected = train_in_ranks(fabric, model, optimizer)
    for values in in_ranks(load_into_an_empty_model, path, ranks=ranks, precision="64-true"):
        assert_close(values, expected)


# -- refusals --------------------------------------------------------------------------------------


def on_meta(fabric: Fabric) -> None:
    with torch.device("meta"):
        fabric.setup(Transformer())


def partly_on_meta(fabric: Fabric) -> None:
    with fabric.init_module():
        model = Transformer()
    model.head.bias = nn.Parameter(torch.empty(1, device="meta"))
    fabric.setup(model)


def unknown_source(fabric: Fabric) -> None:
    fabric.init_module(source="rank1")


def lazy(fabric: Fabric) -> None:
    with fabric.init_module():
        model = nn.Sequential(nn.LazyLinear(3))
    fabric.setup(model)


def another_model(fabric: Fabric) -> None:
    fabric.setup(nn.Linear(2, 2 + fabric.global_rank))


def another_tie(fabric: Fabric) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if fabric.global_rank:
        model[0].weight = model[1].weight
    fabric.setup(model)


def empty_on_one_rank(fabric: Fabric) -> None:
    with fabric.init_module(empty_init=fabric.global_rank > 0):
        model = nn.Linear(200, 200)
    fabric.setup(model)


def lazy_on_one_rank(fabric: Fabric) -> None:
    model = nn.Linear(3, 3)
    if fabric.global_rank > 0:
        model = nn.LazyLinear(3)
    fabric.setup(model)


def untouched(fabric: Fabric) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    outcome(lambda: fabric.setup(model))
    assert model[0].weight.dtype is torch.float32


def read_on_another_rank(fabric: Fabric) -> None:
    with fabric.init_module(source="rank0"):
        layer = nn.Linear(200, 200)
        assert layer.weight.norm().item() > 0


def set_up_in_wrong_ways(fabric: Fabric) -> dict[str, str]:
    cases = [
        on_meta,
        partly_on_meta,
        unknown_source,
        lazy,
        another_model,
        another_tie,
        empty_on_one_rank,
        lazy_on_one_rank,
        untouched,
    ]
    if fabric.global_rank == fabric.world_size - 1:
        # Rank 0 would wait in a collective for the ranks that raise in this case.
        cases.append(read_on_another_rank)
    outcomes = {}
    for case in cases:
        outcomes[case.__name__] = outcome(partial(case, fabric))
    return outcomes


def test_modules_that_fit_no_setup_are_refused_on_all_ranks_before_anything_changes() -> None:
    for rank, results in enumerate(in_ranks(set_up_in_wrong_ways, precision="64-true")):
        assert results.pop("untouched") == "fine"
        if rank == 1:
            assert 'with source="rank0"' in results.pop("read_on_another_rank").lower()
        for text in results.values():
            assert text.startswith(("UsageError", "ConfigurationError"))
        assert "blocks.1.mlp.2.bias" in results["on_meta"]
        assert "head.bias" in results["partly_on_meta"]
        assert "embedding.weight" not in results["partly_on_meta"]
        assert "init_module()" in results["on_meta"]
        assert "0.weight, 0.bias" in results["lazy"]
        for case in ("another_model", "another_tie", "empty_on_one_rank"):
            assert "another model" in results[case]
        assert f"on rank {rank}" in results["another_model"]
        assert "LazyLinear" in results["lazy_on_one_rank"]


def build_with_other_values_on_each_rank(fabric: Fabric) -> dict[str, Tensor]:
    """Build a model whose values differ over ranks, partly on the meta device on rank 1."""
    torch.manual_seed(fabric.global_rank)
    state = torch.get_rng_state()
    with fabric.init_module(source="rank0"):
        pass
    assert torch.equal(torch.get_rng_state(), state)
    with fabric.init_module():
        module = Transformer()
        nn.init.constant_(module.head.weight, fabric.global_rank)
    device = "cpu"
    if fabric.global_rank > 0:
        device = "meta"
    module.embedding = nn.Linear(4, 8, device=device)
    model = fabric.setup(module)
    return values_of(model)


def test_every_rank_has_the_values_of_rank_0() -> None:
    torch.manual_seed(0)
    model = Transformer()
    nn.init.constant_(model.head.weight, 0)
    model.embedding = nn.Linear(4, 8)
    expected = values_of(model)
    for values in in_ranks(build_with_other_values_on_each_rank):
        assert_equal(values, expected)


def build_two_models(fabric: Fabric) -> list[dict[str, Tensor]]:
    torch.manual_seed(7)
    with fabric.init_module():
        first = Transformer()
        second = Wide()
    torch.randn(3)
    second_values = values_of(fabric.setup(second))
    first_values = values_of(fabric.setup(first))
    return [first_values, second_values]


def test_models_of_one_context_are_set_up_in_any_order() -> None:
    torch.manual_seed(7)
    first = values_of(Transformer())
    second = values_of(Wide())
    for actual in in_ranks(build_two_models):
        assert_equal(actual, [first, second])


def draw_after_builds(fabric: Fabric) -> float:
    torch.manual_seed(7)
    for _ in range(5):
        with fabric.init_module(source="rank0"):
            nn.Linear(600, 600)
    return torch.rand(()).item()


def test_every_build_on_rank_0_leaves_the_random_state_of_its_own_end() -> None:
    torch.manual_seed(7)
    for _ in range(5):
        nn.Linear(600, 600)
    expected = torch.rand(()).item()
    assert in_ranks(draw_after_builds) == [expected, expected]


def fail_on_rank_0(fabric: Fabric) -> str:
    def build() -> None:
        with fabric.init_module(source="rank0"):
            module = Tied()
            if fabric.is_global_zero:
                raise KeyError("no such file")
        fabric.setup(module)

    text = outcome(build)
    # The next build works.
    fabric.setup(Tied())
    return text


def test_a_build_that_fails_on_rank_0_fails_on_all_ranks() -> None:
    first, second = in_ranks(fail_on_rank_0)
    assert first.startswith("KeyError")
    assert "rank 0 failed" in second


class FromNumpy(Tied):
    """Values that numpy has drawn, which torch does not see, and a shape that depends on a draw."""

    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.default_rng(5)
        table = numbers.standard_normal((300, 90))
        self.table = nn.Parameter(torch.from_numpy(table).float())
        self.alias = self.table
        mask = numbers.integers(0, 2, (300, 300)) > 0
        self.register_buffer("mask", torch.from_numpy(mask))
        self.drawn = nn.Parameter(torch.rand(5, 4))
        doubled = self.drawn.detach().numpy() * 2
        self.drawn.data.copy_(torch.from_numpy(doubled))
        if self.drawn.sum() > -1:
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


@pytest.mark.parametrize("source", ["every_rank", "rank0"])
def test_values_from_numpy_arrive(source: str) -> None:
    expected, expected_state = build_plainly(FromNumpy)
    for values, state in in_ranks(build_and_set_up, FromNumpy, source):
        assert_equal(values, expected)
        assert torch.equal(state, expected_state)


def build_in_contexts_of_every_name(fabric: Fabric) -> bool:
    torch.manual_seed(7)
    expected = nn.Linear(130, 130).weight.detach()
    for context in (
        fabric.init_module,
        fabric.sharded_model,
        fabric.strategy.model_sharded_context,
    ):
        torch.manual_seed(7)
        with context():
            module = nn.Linear(130, 130)
        assert in_a_file(module.weight)
        model = fabric.setup(module)
        assert torch.equal(full_tensor(model.weight.detach()), expected)
    return True


def test_the_older_names_of_the_context_build_the_model_alike() -> None:
    assert in_ranks(build_in_contexts_of_every_name) == [True, True]


def build_from_rank_0(fabric: Fabric) -> dict[str, Tensor]:
    torch.manual_seed(7)
    with fabric.init_module(source="rank0"):
        module = FromNumpy()
        model = fabric.setup(module)
        return values_of(model)


def test_other_strategies_build_the_model_on_every_rank() -> None:
    expected, _ = build_plainly(FromNumpy)
    for values in run_in_ranks(build_from_rank_0):
        assert_equal(values, expected)


def count_different_rows(fabric: Fabric) -> int:
    with fabric.init_module():
        layer = nn.Linear(4, 8)
    model = fabric.setup_module(layer)
    state = fabric.strategy.get_module_state_dict(model._fabric_prepared)
    different_rows = state["weight"].unique(dim=0)
    return len(different_rows)


def test_shards_of_different_ranks_have_different_rows() -> None:
    results = run_in_ranks(count_different_rows, strategy="fsdp")
    assert results == [8, 8]
