"""Model parallelism on real processes: every mesh gives the numbers of the single process."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.parametrizations import spectral_norm

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.errors import RankFailedError
from fabric.strategies import ModelParallelStrategy
from tests.compilers import NEEDS_CPP_COMPILER
from tests.ranks import outcome, run_in_ranks

PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.norm": "sequence_parallel",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_rep",
}
COLWISE_LAYERS = ("attention.query", "attention.key", "attention.value", "up")
ROWWISE_LAYERS = ("attention.out", "down")
SPLIT = {"up": "colwise", "down": "rowwise"}
WIDTH = 8
BATCH = 8
STEPS = 3
MICRO = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def split_heads(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.split_heads(self.query(x))
        key = self.split_heads(self.key(x))
        value = self.split_heads(self.value(x))
        heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        hidden = nn.functional.gelu(self.up(x))
        return x + self.down(hidden)


class Gpt(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def full_parameters(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]


def full_gradients(model: nn.Module) -> list[Tensor]:
    return [full_tensor(parameter.grad).clone() for parameter in model.parameters()]


def largest_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    difference = parameters_to_vector(actual) - parameters_to_vector(expected)
    return difference.abs().max().item()


def make(*shape: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Gpt(*shape).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return model, optimizer


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS * MICRO, BATCH, 5, 4)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return [(x, x.cumsum(1).tanh()) for x in inputs]


def share(fabric: Fabric, samples: Tensor) -> Tensor:
    """Return the samples of this rank."""
    sampler_kwargs = fabric.strategy.distributed_sampler_kwargs
    if sampler_kwargs is None:
        return samples
    return samples[sampler_kwargs["rank"] :: sampler_kwargs["num_replicas"]]


def train(fabric: Fabric, *shape: int) -> dict[str, Any]:
    """Take three steps with clipping and accumulation; return numbers over all ranks."""
    model, optimizer = fabric.setup(*make(*shape))
    losses = []
    norms = []
    gradients = []
    for number, (x, y) in enumerate(batches()):
        is_accumulating = number % MICRO < MICRO - 1
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            output = model(share(fabric, x))
            loss = mse_loss(output, share(fabric, y)) / MICRO
            fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach()))
        if is_accumulating:
            continue
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(fabric.all_reduce(mse_loss(model(share(fabric, x)), share(fabric, y))))
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": full_parameters(model),
        "draw": torch.rand(3),
    }


def split(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: Any = {"head": ColwiseParallel(output_layouts=Replicate())}
    for number, block in enumerate(model.blocks):
        for name in COLWISE_LAYERS:
            plan[f"blocks.{number}.{name}"] = ColwiseParallel()
        for name in ROWWISE_LAYERS:
            plan[f"blocks.{number}.{name}"] = RowwiseParallel()
        block.attention.heads //= mesh["tensor_parallel"].size()
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def split_and_shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    split(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


MESHES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 2, "replicate_size": 2},
    {},
    {"tensor_parallel_size": 2, "parallelize_fn": split},
    {"tensor_parallel_size": 2, "parallelize_fn": split_and_shard, "shape": (1,)},
    {"tensor_parallel_size": 2, "sequence_parallel_size": 2},
    {"tensor_parallel_size": 2, "replicate_size": 2, "devices": 8},
    {"tensor_parallel_size": 2, "replicate_size": 2, "sequence_parallel_size": 2, "devices": 8},
]
SLOW_MESHES = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES]


def on_mesh(mesh: dict[str, Any], function: Any, *args: Any) -> list[Any]:
    """Return the results of a function by rank of a job on a mesh.

    The mesh has the options of the strategy, of which ``tp_plan`` is ``PLAN`` by default. Further
    keys are ``devices`` (4 by default) and ``check_collectives`` of the job, and ``shape``, which
    this function ignores.
    """
    options = dict(mesh)
    options.pop("shape", None)
    devices = options.pop("devices", 4)
    check_collectives = options.pop("check_collectives", False)
    if "parallelize_fn" not in options:
        options.setdefault("tp_plan", PLAN)
    return run_in_ranks(
        function,
        *args,
        ranks=devices,
        strategy=ModelParallelStrategy(start_method="forkserver", **options),
        check_collectives=check_collectives,
    )


TENSOR_PARALLEL_ALONE = {"tensor_parallel_size": 2, "devices": 2}


@pytest.mark.parametrize("mesh", [{"tensor_parallel_size": 2}, TENSOR_PARALLEL_ALONE, *SLOW_MESHES])
def test_three_steps_are_those_of_the_single_process(mesh: dict[str, Any]) -> None:
    shape = mesh.get("shape", ())
    [expected] = run_in_ranks(train, *shape, ranks=1, strategy="auto")
    for actual in on_mesh(mesh, train, *shape):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-12, atol=0)


# -- checkpoints -----------------------------------------------------------------------------------


def load_and_save(
    fabric: Fabric, source: Path | None, target: Path | None, takes_step: bool = False
) -> dict[str, Any]:
    """Load, take a step and save; return the full states of the model and of the optimizer."""
    model, optimizer = fabric.setup(*make())
    state = {"model": model, "optimizer": optimizer}
    if source is not None:
        fabric.load(source, state)
    if takes_step:
        x, y = batches()[0]
        loss = mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if target is not None:
        fabric.save(target, state)
    optimizer_state = fabric.strategy.full_state(optimizer.state_dict())["state"]
    slots_by_parameter = {key: dict(slots) for key, slots in optimizer_state.items()}
    return {"model": fabric.get_state_dict(model), "optimizer": slots_by_parameter}


def test_a_checkpoint_of_any_mesh_loads_into_every_mesh(tmp_path: Path) -> None:
    two = {"tensor_parallel_size": 2}
    four_in_full = {"tensor_parallel_size": 4, "state_dict_type": "full"}
    a = tmp_path / "a"
    b = tmp_path / "b"
    c = tmp_path / "c"
    d = tmp_path / "d"
    e = tmp_path / "e"
    f = tmp_path / "f"
    expected = on_mesh(two, load_and_save, None, a, True)[0]
    results = [
        run_in_ranks(load_and_save, a, b, ranks=1, strategy="auto")[0],
        on_mesh({"devices": 2}, load_and_save, b, c)[0],
        on_mesh(four_in_full, load_and_save, c, d)[0],
        run_in_ranks(load_and_save, d, e)[0],
        on_mesh(TENSOR_PARALLEL_ALONE, load_and_save, e, f)[0],
        on_mesh(two, load_and_save, f, None)[0],
    ]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


# -- data and random numbers on a mesh -------------------------------------------------------------


class Dropping(nn.Module):
    """Keeps its latest dropout masks: ``inner`` of split and ``outer`` of full activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        inner = dropout(torch.ones_like(hidden), training=self.training)
        output = self.down(hidden * inner)
        outer = dropout(torch.ones_like(output), training=self.training)
        self.inner = inner.bool()
        self.outer = outer.bool()
        return output * outer


def data_and_masks(fabric: Fabric) -> dict[str, Any]:
    torch.manual_seed(fabric.global_rank)
    module = Dropping()
    model = fabric.setup(module)
    samples: Any = list(range(10))
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    )
    torch.manual_seed(fabric.global_rank + 10)
    samples_of_rank = []
    gathered_samples = []
    for batch in loader:
        samples_of_rank += batch.tolist()
        gathered_samples += fabric.gather_for_metrics(batch).tolist()
    model(torch.ones(3, WIDTH)).sum().backward()
    inner_mask = model.inner
    outer_mask = model.outer
    model.eval()(torch.ones(3, WIDTH))

    assert sorted(gathered_samples) == list(range(10))
    assert fabric.all_reduce(1, reduce_op="sum") == 2
    assert fabric.all_reduce(1, reduce_op="max") == 1
    assert fabric.all_reduce(torch.ones(2), reduce_op="sum").tolist() == [2, 2]
    assert fabric.device_mesh.mesh_dim_names == ("data_parallel", "tensor_parallel")
    return {
        "samples": samples_of_rank,
        "inner mask": inner_mask,
        "outer mask": outer_mask,
        "draw": torch.rand(1),
    }


def test_ranks_that_share_a_batch_have_equal_data_and_the_masks_of_their_shards() -> None:
    mesh = {"tensor_parallel_size": 2, "tp_plan": SPLIT, "check_collectives": True}
    results = on_mesh(mesh, data_and_masks)
    for first, second in (results[:2], results[2:]):
        assert first["samples"] == second["samples"]
        assert first["draw"] == second["draw"]
        assert first["inner mask"].shape == (3, 32)
        assert not torch.equal(first["inner mask"], second["inner mask"])
        assert torch.equal(first["outer mask"], second["outer mask"])
    assert not torch.equal(results[0]["outer mask"], results[2]["outer mask"])


class PerHead(nn.Module):
    """A scale of split activations, whose gradient on a rank is therefore partial."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.scale = nn.Parameter(torch.ones(2))
        self.down = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.up(x).unflatten(-1, (-1, 2))
        scaled = pairs * self.scale
        return self.down(scaled.flatten(-2))


def partial_gradient(fabric: Fabric, has_hook: bool) -> str:
    model = PerHead()
    if has_hook:
        # The first pass is not compared with the whole model then.
        model.up.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)

    def make_step() -> None:
        loss = model(torch.ones(1, WIDTH)).square().sum()
        fabric.backward(loss)
        optimizer.step()

    return outcome(make_step)


@pytest.mark.parametrize(
    ("has_hook", "text"),
    [
        (False, "the gradient of scale differs by"),
        (True, "replicas of ranks 0 and 1 differ after it: scale\n.*\n.*with_grad_allreduce"),
    ],
)
def test_a_partial_gradient_of_a_replicated_parameter_is_an_error_on_all_ranks(
    has_hook: bool, text: str
) -> None:
    mesh = {"tensor_parallel_size": 2, "tp_plan": SPLIT, "devices": 2}
    # A rank without an error would wait for the other rank in the next forward pass.
    for text_of_rank in on_mesh(mesh, partial_gradient, has_hook):
        assert re.search(text, text_of_rank)


class Penalized(nn.Module):
    """A model that keeps a penalty on the columns of its inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.penalty = hidden.square().mean()
        return self.down(hidden.tanh())


def train_with_penalty(fabric: Fabric, plan: Any) -> list[Tensor]:
    strategy: Any = fabric.strategy
    strategy.tp_plan = plan
    torch.manual_seed(5)
    module = Penalized().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for _ in range(3):
        loss = model(x).square().mean() + model.penalty
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def test_a_loss_of_the_columns_of_one_rank_is_an_error_with_a_remedy() -> None:
    mesh = {"tensor_parallel_size": 2, "devices": 2}
    with pytest.raises(RankFailedError, match="the losses of ranks 0 and 1 differ before it"):
        on_mesh(mesh, train_with_penalty, SPLIT)
    [expected] = run_in_ranks(train_with_penalty, None, ranks=1, strategy="auto")
    remedy = {"up": "colwise_rep", "down": "rowwise_rep"}
    for actual in on_mesh(mesh, train_with_penalty, remedy):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def train_with_lists(fabric: Fabric, mistake: str) -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=mistake == "foreach")
    model, optimizer = fabric.setup(model, optimizer)
    x, _ = batches()[0]
    fabric.backward(model(x).square().mean())
    if mistake == "clip_grad_norm_":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if mistake == "deepcopy":
        deepcopy(fabric.unwrap(model))
    optimizer.step()


@pytest.mark.parametrize(
    ("mistake", "remedy"),
    [
        ("foreach", "an optimizer without foreach=True"),
        ("clip_grad_norm_", r"fabric.clip_gradients\(model, optimizer, max_norm=1.0\)"),
        ("deepcopy", r"fabric.ema\(model\) for averages"),
    ],
)
def test_errors_of_torch_where_only_some_layers_are_split_are_explained(
    mistake: str, remedy: str
) -> None:
    with pytest.raises(RankFailedError, match=remedy):
        on_mesh({"tensor_parallel_size": 2, "devices": 2}, train_with_lists, mistake)


def validate_unevenly(fabric: Fabric) -> None:
    module = Dropping()
    model = fabric.setup(module)
    samples: Any = torch.ones(3 - fabric.global_rank // 2, WIDTH)
    loader = torch.utils.data.DataLoader(samples, batch_size=1)
    model.eval()
    for batch in fabric.setup_dataloaders(loader, use_distributed_sampler=False):
        with torch.no_grad():
            model(batch)
    fabric.barrier()


def test_ranks_that_run_out_of_batches_are_named() -> None:
    with pytest.raises(RankFailedError, match="batches"):
        on_mesh({"tensor_parallel_size": 2, "tp_plan": SPLIT}, validate_unevenly)


# -- refusals --------------------------------------------------------------------------------------

WRONG_OPTIONS = {
    "tensor_parallel 3 = 3, and not 4": {"tensor_parallel_size": 3, "tp_plan": PLAN},
    "replicate 2 x data_parallel 2 x sequence 1 x tensor_parallel 2 = 8": {
        "replicate_size": 2,
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "tp_plan": PLAN,
    },
    "data_parallel 0 x": {"data_parallel_size": 0},
    "nothing says how layers are split": {"tensor_parallel_size": 2},
    "torch has no style 'diagonal'": {"tp_plan": {"*": "diagonal"}},
    "replicate_size=2": {"sharding_strategy": "HYBRID_SHARD"},
    "a function, or a plan": {"parallelize_fn": print, "tp_plan": PLAN},
    "a dict by pattern": {"tp_plan": "own"},
    "takes no nonsense": {"nonsense": 1},
    "the mesh cannot have -2 processes along sequence": {"sequence_parallel_size": -2},
    "ModelParallelStrategy(sequence_parallel_size=1.0)": {"sequence_parallel_size": 1.0},
    "the mesh cannot have 2.0 processes along data_parallel": {"data_parallel_size": 2.0},
    "the mesh cannot have '2' processes along tensor_parallel": {"tensor_parallel_size": "2"},
    "the mesh cannot have True processes along replicate": {"replicate_size": True},
    "the plan has no pattern of layers, and so splits no layer": {"tp_plan": {}},
}


@pytest.mark.parametrize("words", WRONG_OPTIONS)
def test_sizes_and_options_that_cannot_work_are_refused_before_a_process_starts(words: str) -> None:
    def construct() -> None:
        strategy = ModelParallelStrategy(**WRONG_OPTIONS[words])
        Fabric(accelerator="cpu", devices=4, strategy=strategy)

    assert words in outcome(construct)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 8, 1, 1)),
        ({"tp_plan": PLAN}, (1, 2, 1, 4)),
        ({"tp_plan": PLAN, "replicate_size": 2}, (2, 1, 1, 4)),
        ({"tp_plan": PLAN, "data_parallel_size": 4}, (1, 4, 1, 2)),
        ({"tp_plan": PLAN, "tensor_parallel_size": 2, "sequence_parallel_size": 2}, (1, 2, 2, 2)),
    ],
)
def test_auto_splits_tensors_within_a_node_and_data_over_the_remaining_factor(
    options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    mesh_sizes = ModelParallelStrategy(**options)._mesh_sizes(8, 4)
    assert tuple(mesh_sizes.values()) == sizes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class Packed(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(24, 8)


def with_a_plan_for_absent_layers() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model._tp_plan = {"layers.*.up": "colwise"}
    return model


class Gated(nn.Module):
    """One layer computes a gate and the gated values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.down = nn.Linear(8, 4)


QKV_PLAN = {"qkv": "colwise", "out": "rowwise"}

# The words of the error, the model, and the plan for it.
WRONG_PLANS: list[tuple[str, Callable[[], nn.Module], Any]] = [
    ("no layer is called 'up'", Tied, {"up": "colwise"}),
    ("and have to be split in one way", Tied, {"head": "colwise"}),
    (
        "out_features 3 / 2 parts leaves 1",
        lambda: nn.Sequential(nn.Linear(4, 3)),
        {"0": "colwise"},
    ),
    (
        "splits Linear and Embedding",
        lambda: nn.Sequential(nn.Conv1d(4, 4, 1)),
        {"0": "colwise"},
    ),
    (
        "0: its weight is computed from other parameters",
        lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4))),
        {"0": "colwise"},
    ),
    ("num_heads 3 / 2 parts leaves 1", lambda: Packed(3), QKV_PLAN),
    ("write three", Packed, QKV_PLAN),
    (".up: a gate and what it gates", Gated, SPLIT),
    (
        "uses the weights of its layers itself",
        lambda: nn.MultiheadAttention(4, 2),
        {"out_proj": "rowwise"},
    ),
    ("no plan of its own", Tied, "auto"),
    ("no layer fits layers.*.up", with_a_plan_for_absent_layers, "auto"),
]


def set_up_with_wrong_plans(fabric: Fabric) -> bool:
    strategy: Any = fabric.strategy
    for words, build, plan in WRONG_PLANS:
        strategy.tp_plan = plan
        assert words in outcome(partial(fabric.setup, build())), words
    return True


def test_layers_that_cannot_be_split_are_refused_on_all_ranks() -> None:
    mesh = {"tensor_parallel_size": 2, "devices": 2}
    assert on_mesh(mesh, set_up_with_wrong_plans) == [True, True]


def return_nothing(model: Any, mesh: Any) -> None:
    pass


def put_head_on_meta(model: Any, mesh: Any) -> Any:
    model.head = nn.Linear(4, 8, bias=False, device="meta")
    return model


def set_up_with_wrong_functions(fabric: Fabric) -> bool:
    strategy: Any = fabric.strategy
    strategy.tp_plan = None
    strategy.parallelize_fn = return_nothing
    assert "which returned a NoneType" in outcome(lambda: fabric.setup(Tied()))
    assert "return model, as the last line" in outcome(lambda: fabric.setup(Tied()))
    strategy.parallelize_fn = put_head_on_meta
    assert "head.weight on meta" in outcome(lambda: fabric.setup(Tied()))
    return True


def test_functions_that_return_no_usable_model_are_refused_on_all_ranks() -> None:
    mesh = {"tensor_parallel_size": 2, "devices": 2}
    assert on_mesh(mesh, set_up_with_wrong_functions) == [True, True]


def split_other_layers_by_rank(model: Any, mesh: Any) -> Any:
    """Split two layers of the same shape, each rank in its own order."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    names = ["query", "key"]
    if mesh.get_local_rank("tensor_parallel") == 1:
        names.reverse()
    return parallelize_module(model, mesh["tensor_parallel"], {names[0]: ColwiseParallel()})


def split_more_layers_on_rank_1(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {"query": ColwiseParallel()}
    if mesh.get_local_rank("tensor_parallel") == 1:
        plan["key"] = ColwiseParallel()
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def set_up_attention(fabric: Fabric) -> None:
    fabric.setup(Attention())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (split_other_layers_by_rank, "(query|key).weight is split as (None on rank 0|.*Shard)"),
        (split_more_layers_on_rank_1, "this rank comes to .*; split here so far: query.weight"),
    ],
)
def test_functions_that_split_other_layers_by_rank_are_errors(function: Any, text: str) -> None:
    mesh = {"tensor_parallel_size": 2, "devices": 2, "parallelize_fn": function}
    with pytest.raises(RankFailedError, match=text):
        on_mesh(mesh, set_up_attention)


def set_up_a_parallelized_module(fabric: Fabric) -> str:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    strategy: Any = fabric.strategy
    strategy.tp_plan = None
    mesh = fabric.device_mesh["tensor_parallel"]
    module = parallelize_module(nn.Linear(4, 8), mesh, ColwiseParallel())
    return outcome(lambda: fabric.setup(module))


def test_a_module_that_is_on_a_mesh_already_is_refused() -> None:
    for text in on_mesh({"tensor_parallel_size": 2, "devices": 2}, set_up_a_parallelized_module):
        assert "on a mesh already: weight" in text


def leave_an_output_split(fabric: Fabric) -> str:
    module = nn.Sequential(nn.Linear(4, 4))
    model = fabric.setup(module)
    return outcome(lambda: model(torch.ones(1, 4)))


def test_a_split_output_that_no_layer_takes_is_refused() -> None:
    mesh = {"tensor_parallel_size": 2, "devices": 2, "tp_plan": {"0": "colwise"}}
    for text in on_mesh(mesh, leave_an_output_split):
        assert "went into no layer" in text


def penalize_gradients(fabric: Fabric) -> str:
    """Return the error of a gradient penalty, after a first derivative, which is none."""
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    batch = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(batch).sum(), batch)
    output = model(batch).sum()
    return outcome(lambda: torch.autograd.grad(output, batch, create_graph=True))


def test_gradients_of_gradients_of_split_layers_are_refused() -> None:
    mesh = {"tensor_parallel_size": 2, "devices": 2, "tp_plan": {"0": "colwise", "2": "rowwise"}}
    for text in on_mesh(mesh, penalize_gradients):
        assert "create_graph=True through Sequential" in text


def train_tied_layers(fabric: Fabric) -> list[float]:
    """Return differences of gradients from the single process, with two plans for tied layers.

    The second plan is the model's own.
    """
    strategy: Any = fabric.strategy
    differences = []
    for plan in ({"embedding": "rowwise", "head": "colwise_rep"}, "auto"):
        torch.manual_seed(3)
        model: Any = Tied().double()
        model._tp_plan = {"embedding": "colwise", "head": "rowwise"}
        tokens = torch.arange(6).view(2, 3)
        model(tokens).square().sum().backward()
        expected = full_gradients(model)
        model.zero_grad()
        strategy.tp_plan = plan
        prepared = fabric.setup(model)
        loss = prepared(tokens).square().sum()
        fabric.backward(loss)
        gradients = full_gradients(prepared)
        assert len(gradients) == 1
        differences.append(largest_difference(gradients, expected))
    return differences


def test_tied_layers_stay_tied_and_a_model_may_plan_for_itself() -> None:
    for differences in on_mesh({"tensor_parallel_size": 2, "devices": 2}, train_tied_layers):
        assert max(differences) < 1e-12


# -- together with other features ------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dropping(), nn.Linear(32, WIDTH), Dropping()])
        self.big = nn.Linear(32, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.big(x)


WIDE_PLAN = {
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "big": "colwise_rep",
}


def build_wide(fabric: Fabric, source: str, empty_init: bool = False) -> list[Tensor]:
    seed = 7
    if source == "rank0":
        seed += fabric.global_rank  # the values of the other ranks do not count
    torch.manual_seed(seed)
    with fabric.init_module(empty_init=empty_init, source=source):
        model = Wide()
    return full_parameters(fabric.setup(model))


class TiedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2048, WIDTH)
        self.head = nn.Linear(WIDTH, 2048, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def build_tied_table(fabric: Fabric, empty_init: bool) -> Tensor:
    """Return the one full parameter of a tied model that is built in init_module()."""
    torch.manual_seed(7 + fabric.global_rank)
    with fabric.init_module(empty_init=empty_init, source="rank0"):
        model = TiedTable()
    prepared: Any = fabric.setup(model)
    assert prepared.head.weight is prepared.embedding.weight
    (parameter,) = full_parameters(prepared)
    return parameter


def build_tied_in_init_module(fabric: Fabric) -> bool:
    torch.manual_seed(7)
    expected = TiedTable().embedding.weight
    value = build_tied_table(fabric, empty_init=False)
    torch.testing.assert_close(value, expected, rtol=0, atol=0, check_device=False)
    return bool(build_tied_table(fabric, empty_init=True).isnan().all())


def build_in_init_module(fabric: Fabric) -> bool:
    torch.manual_seed(7)
    expected = full_parameters(Wide())
    for source in ("every_rank", "rank0"):
        torch.testing.assert_close(build_wide(fabric, source), expected, rtol=0, atol=0)
    large_tensors = []
    for tensor in build_wide(fabric, "every_rank", empty_init=True):
        if tensor.numel() >= 2**14:
            large_tensors.append(tensor)
    (empty,) = large_tensors
    assert empty.isnan().all()
    return True


def test_values_of_a_build_are_those_of_one_process() -> None:
    mesh = {"tensor_parallel_size": 2, "tp_plan": WIDE_PLAN}
    assert on_mesh(mesh, build_in_init_module) == [True] * 4


def test_tied_layers_of_init_module_stay_tied_when_they_are_split() -> None:
    plan = {"embedding": "rowwise", "head": "colwise_rep"}
    mesh = {"tensor_parallel_size": 2, "devices": 2, "tp_plan": plan}
    assert on_mesh(mesh, build_tied_in_init_module) == [True] * 2


def recompute_activations(fabric: Fabric) -> bool:
    strategy: Any = fabric.strategy
    torch.manual_seed(9)
    state = torch.get_rng_state()
    runs = []
    for classes in (None, (Dropping,)):
        strategy.activation_checkpointing = classes
        torch.manual_seed(7)
        module = Wide()
        model = fabric.setup(module)
        torch.set_rng_state(state)
        loss = model(torch.ones(3, WIDTH)).square().sum()
        fabric.backward(loss)
        runs.append([loss.detach(), *full_gradients(model)])
    expected, recomputed = runs
    torch.testing.assert_close(recomputed, expected)
    return True


def test_recomputed_activations_have_the_masks_of_the_forward_pass() -> None:
    mesh = {"tensor_parallel_size": 2, "tp_plan": WIDE_PLAN}
    assert on_mesh(mesh, recompute_activations) == [True] * 4


def average_parameters(fabric: Fabric) -> Tensor:
    """Return the difference of an averaged bias from the bias before a change by 1."""
    torch.manual_seed(7)
    module = Wide()
    model = fabric.setup(module)
    before = full_tensor(model.big.bias.detach()).clone()
    ema = fabric.ema(model, 0.5)
    ema.update()
    with torch.no_grad():
        model.big.bias.add_(1.0)
    ema.update()
    with ema.applied():
        average = full_tensor(model.big.bias.detach())
    return average - before


def test_averages_of_parameters_are_those_of_one_process() -> None:
    mesh = {"tensor_parallel_size": 2, "tp_plan": WIDE_PLAN}
    for difference in on_mesh(mesh, average_parameters):
        torch.testing.assert_close(difference, torch.full((1024,), 0.5))


class Normed(nn.Module):
    """A layer with a spectral norm, whose buffers change when its weight is read, before a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x)).tanh())


def train_normed(fabric: Fabric) -> list[Tensor]:
    torch.manual_seed(5)
    module = Normed().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for _ in range(2):
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [*full_parameters(model), *model.buffers()]


def test_a_spectral_norm_beside_split_layers_is_that_of_one_process() -> None:
    [expected] = run_in_ranks(train_normed, ranks=1, strategy="auto")
    mesh = {"tensor_parallel_size": 2, "devices": 2, "tp_plan": SPLIT}
    for actual in on_mesh(mesh, train_normed):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


class Scaled(nn.Module):
    """A pair of layers, two of whose modules share a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.temperature = nn.Module()
        self.temperature.gain = self.gain

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.down(self.up(x).tanh())
        return x * self.temperature.gain


class ScaledBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.gain * x


def train_scaled(fabric: Fabric) -> list[Tensor]:
    torch.manual_seed(5)
    module = ScaledBlocks().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for _ in range(2):
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def test_parameters_without_a_dimension_beside_split_layers_are_those_of_one_process() -> None:
    [expected] = run_in_ranks(train_scaled, ranks=1, strategy="auto")
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    mesh = {"tensor_parallel_size": 2, "devices": 2, "tp_plan": plan}
    for actual in on_mesh(mesh, train_scaled):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x)))


CLASSIFIER_PLAN = {**SPLIT, "head": "colwise_rep"}


def train_with_weights(fabric: Fabric) -> float:
    """Return the difference from the single process of gradients with a weight for each batch."""
    torch.manual_seed(4)
    plain = Classifier().double()
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    counts = torch.tensor([1, 3, 2, 3])
    for batch, count in zip(x, counts, strict=True):
        loss = plain(batch[:count]).square().sum()
        (loss / counts.sum()).backward()
    expected = full_gradients(plain)
    plain.zero_grad()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = fabric.setup(plain, optimizer)
    for batch, count in zip(share(fabric, x), share(fabric, counts), strict=True):
        loss = model(batch[:count]).square().sum()
        fabric.backward(loss, weight=count.item())
    fabric.clip_gradients(model, optimizer, max_norm=1e9)
    return largest_difference(full_gradients(model), expected)


def test_weights_count_each_batch_once() -> None:
    mesh = {"tensor_parallel_size": 2, "tp_plan": CLASSIFIER_PLAN}
    assert max(on_mesh(mesh, train_with_weights)) < 1e-12


def train_unevenly(fabric: Fabric, uneven: str) -> dict[str, list[Any]]:
    """Take steps with weights until batches run out; return losses, repeats and parameters."""
    torch.manual_seed(4)
    plain = Classifier().double()
    samples = torch.randn(7, 3, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = fabric.setup(plain, optimizer)
    dataset: Any = share(fabric, samples)
    loader = torch.utils.data.DataLoader(dataset, batch_size=1)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False, uneven=uneven)
    losses = []
    repeats = []
    for x in loader:
        loss = model(x).square().sum()
        fabric.backward(loss, weight=x.shape[1])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="sum"))
        repeats.append(loader.is_repeat)
    return {"losses": losses, "repeats": repeats, "parameters": full_parameters(model)}


@pytest.mark.slow
@pytest.mark.parametrize(("uneven", "steps"), [("shortest", 3), ("longest", 4)])
def test_ranks_of_one_batch_run_out_of_batches_together(uneven: str, steps: int) -> None:
    expected = run_in_ranks(train_unevenly, uneven)
    assert len(expected[1]["losses"]) == steps
    assert expected[1]["repeats"][3:] == [True] * (steps - 3)
    mesh = {"tensor_parallel_size": 2, "tp_plan": CLASSIFIER_PLAN}
    for rank, actual in enumerate(on_mesh(mesh, train_unevenly, uneven)):
        torch.testing.assert_close(actual, expected[rank // 2], rtol=0, atol=1e-12)


def compute_a_loss_of_split_logits(fabric: Fabric) -> tuple[float, float]:
    """Return the differences of the loss and of a gradient from the single process."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

    strategy: Any = fabric.strategy
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    strategy.tp_plan = {**SPLIT, "head": head}
    torch.manual_seed(5)
    plain = Classifier().double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    y = torch.tensor([0, 5, 2, 3])
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    expected_gradients = full_gradients(plain)
    plain.zero_grad()
    model = fabric.setup(plain)
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
    mean = fabric.all_reduce(full_tensor(loss.detach()))
    loss_difference = abs((mean - expected).item())
    return loss_difference, largest_difference(full_gradients(model), expected_gradients)


def test_a_loss_may_be_computed_of_split_logits() -> None:
    for loss_difference, gradient_difference in on_mesh(
        {"tensor_parallel_size": 2}, compute_a_loss_of_split_logits
    ):
        assert loss_difference < 1e-12
        assert gradient_difference < 1e-12


# -- tensor parallelism alone ----------------------------------------------------------------------


def list_parameters(fabric: Fabric) -> bool:
    """Check that only the parameters of split layers are on a mesh, with values of their own."""
    with fabric.init_module():
        module = Wide()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    assert type(model.module) is Wide
    parameters = dict(model.named_parameters())
    assert type(parameters["blocks.1.weight"]) is nn.Parameter
    assert parameters["blocks.1.weight"].untyped_storage().filename is None
    split: Any = parameters["blocks.0.up.weight"]
    assert split.device_mesh.ndim == 1
    other = torch.optim.Adam(model.parameters())
    fabric.setup_optimizers(other)
    for optimizer_of_model in (optimizer, other):
        loss = model(torch.ones(3, WIDTH)).square().mean()
        fabric.backward(loss)
        before = full_parameters(model)
        optimizer_of_model.step()
        assert largest_difference(full_parameters(model), before) > 0
    return True


def test_parameters_are_not_sharded_over_one_rank() -> None:
    mesh = {**TENSOR_PARALLEL_ALONE, "tp_plan": WIDE_PLAN}
    assert on_mesh(mesh, list_parameters) == [True, True]


class Rate(nn.Module):
    """Split layers with dropout between them."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.dropout = rate

    def forward(self, x: Tensor) -> Tensor:
        hidden = dropout(self.up(x).tanh(), p=self.dropout, training=self.training)
        return x + self.down(hidden)


def train_compiled(
    fabric: Fabric, order: str, backend: str, rate: float, plan: dict[str, str]
) -> list[Tensor]:
    """Return losses and parameters of a model that is compiled before or after setup."""
    vars(fabric.strategy)["tp_plan"] = plan
    torch.manual_seed(7)
    torch.compiler.reset()
    norm = nn.LayerNorm(WIDTH)
    head = nn.Linear(WIDTH, 4, bias=False)
    module: Any = nn.Sequential(Rate(rate), norm, head).double()
    if order == "before":
        module = torch.compile(module, backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model: Any
    model, optimizer = fabric.setup(module, optimizer)
    if order == "after":
        model = torch.compile(model, backend=backend)
    losses = []
    # The last batch is smaller, as that of an epoch.
    for samples in (2, 2, 2, 1):
        x = torch.linspace(-1, 1, samples * 4 * WIDTH).double().view(samples, 4, WIDTH)
        loss = model(x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *full_parameters(model)]


RATE_PLAN = {"*.up": "colwise", "*.down": "rowwise", "2": "colwise_rep"}
NORM_PLAN = {**RATE_PLAN, "1": "sequence_parallel"}
WITH_FSDP = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("mesh", "order", "rate", "plan"),
    [
        (TENSOR_PARALLEL_ALONE, "before", 0.5, RATE_PLAN),
        pytest.param(TENSOR_PARALLEL_ALONE, "after", 0.0, NORM_PLAN, marks=pytest.mark.slow),
        pytest.param(TENSOR_PARALLEL_ALONE, "before", 0.0, NORM_PLAN, marks=pytest.mark.slow),
        pytest.param(TENSOR_PARALLEL_ALONE, "after", 0.5, RATE_PLAN, marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, "before", 0.0, RATE_PLAN, marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, "after", 0.0, NORM_PLAN, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_takes_the_steps_of_the_uncompiled_one(
    mesh: dict[str, Any], order: str, rate: float, plan: dict[str, str]
) -> None:
    expected = on_mesh(mesh, train_compiled, "never", "aot_eager", rate, plan)
    actual = on_mesh(mesh, train_compiled, order, "aot_eager", rate, plan)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def cache_key_tags(fabric: Fabric) -> list[str]:
    """Return the tag of torch's cache of compiled graphs during the job, and after it."""
    during_job = torch.compiler.config.cache_key_tag
    fabric.teardown()
    return [during_job, torch.compiler.config.cache_key_tag]


def test_ranks_of_other_groups_do_not_share_compiled_graphs() -> None:
    tags, tags_after_job = zip(*on_mesh(WITH_FSDP, cache_key_tags), strict=True)
    assert len(set(tags)) == 4
    assert tags_after_job == ("", "", "", "")


@pytest.mark.slow
@NEEDS_CPP_COMPILER
@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL_ALONE, WITH_FSDP])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("plan", [RATE_PLAN, NORM_PLAN])
def test_a_model_compiled_by_inductor_takes_the_steps_of_the_uncompiled_one(
    mesh: dict[str, Any], order: str, plan: dict[str, str]
) -> None:
    expected = on_mesh(mesh, train_compiled, "never", "inductor", 0.0, plan)
    actual = on_mesh(mesh, train_compiled, order, "inductor", 0.0, plan)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
