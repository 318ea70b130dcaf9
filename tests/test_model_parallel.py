"""Model parallelism on real processes: the numbers of the single process, whatever the mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss, scaled_dot_product_attention

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.errors import RankFailedError
from fabric.strategies import ModelParallelStrategy
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
COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
SPLIT = {"up": "colwise", "down": "rowwise"}
WIDTH = 8
BATCH = 8
STEPS = 3
MICRO = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in map(self.get_submodule, ("query", "key", "value"))
        ]
        return self.out(
            scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(x)))


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


def grad(parameter: Any) -> Any:
    return parameter.grad


def make(*shape: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Gpt(*shape).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(STEPS * MICRO, BATCH, 5, 4, generator=generator, dtype=torch.float64)
    return [(x, x.cumsum(1).tanh()) for x in made]


def train(fabric: Fabric, *shape: int) -> dict[str, Any]:
    """Three steps with clipping and accumulation; what is recorded is over all ranks."""
    model, optimizer = fabric.setup(*make(*shape))
    place = fabric.strategy.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
    own = slice(place["rank"], None, place["num_replicas"])
    losses = []
    norms = []
    gradients = []
    for number, (x, y) in enumerate(batches()):
        last = number % MICRO == MICRO - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = mse_loss(model(x[own]), y[own]) / MICRO
            fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach()))
        if last:
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
            gradients = [full_tensor(grad(parameter)).clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    parameters = [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": parameters,
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
        plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in COLUMNS}
        plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("attention.out", "down")}
        block.attention.heads //= mesh["tensor_parallel"].size()
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def split_and_shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    split(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


MESHES = [
    {"tensor_parallel_size": 2},
    *(
        pytest.param(mesh, marks=pytest.mark.slow)
        for mesh in [
            {"tensor_parallel_size": 2, "devices": 2},
            {"tensor_parallel_size": 4},
            {"tensor_parallel_size": 2, "replicate_size": 2},
            {},
            {"tensor_parallel_size": 2, "parallelize_fn": split},
            {"tensor_parallel_size": 2, "parallelize_fn": split_and_shard, "shape": (1,)},
            {"tensor_parallel_size": 2, "sequence_parallel_size": 2},
            {"tensor_parallel_size": 2, "replicate_size": 2, "devices": 8},
            {
                "tensor_parallel_size": 2,
                "replicate_size": 2,
                "sequence_parallel_size": 2,
                "devices": 8,
            },
        ]
    ),
]


def on(mesh: dict[str, Any], function: Any, *args: Any) -> list[Any]:
    """What a function returned in each rank of a job on a mesh: options of the strategy, and some of the job."""
    sizes = {"tp_plan": None if "parallelize_fn" in mesh else PLAN, **mesh}
    sizes.pop("shape", None)
    job = {
        "ranks": sizes.pop("devices", 4),
        "check_collectives": sizes.pop("check_collectives", False),
    }
    return run_in_ranks(
        function, *args, strategy=ModelParallelStrategy(start_method="forkserver", **sizes), **job
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_three_steps_are_those_of_the_single_process(mesh: dict[str, Any]) -> None:
    shape = mesh.get("shape", ())
    [expected] = run_in_ranks(train, *shape, ranks=1, strategy="auto")
    for actual in on(mesh, train, *shape):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-12, atol=0)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def step(
    fabric: Fabric, source: str | None, target: str | None, takes_step: bool
) -> dict[str, Any]:
    """Load, take a step, save; the state of the model and of the optimizer, in full."""
    model, optimizer = fabric.setup(*make())
    state = {"model": model, "optimizer": optimizer}
    if source is not None:
        fabric.load(source, state)
    if takes_step:
        x, y = batches()[0]
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    if target is not None:
        fabric.save(target, state)
    whole = fabric.get_state_dict(model)
    slots = fabric.strategy.full_state(optimizer.state_dict())["state"]
    return {"model": whole, "optimizer": {key: dict(each) for key, each in slots.items()}}


def test_a_checkpoint_of_any_mesh_loads_into_any_other(tmp_path: Path) -> None:
    both = {"tensor_parallel_size": 2}
    four = {"tensor_parallel_size": 4}
    whole = {"state_dict_type": "full"}
    first = on(both, step, None, f"{tmp_path}/a", True)[0]
    [single] = run_in_ranks(step, f"{tmp_path}/a", f"{tmp_path}/b", False, ranks=1, strategy="auto")
    results = [
        single,
        on({}, step, f"{tmp_path}/b", f"{tmp_path}/c", False)[0],
        on({**four, **whole}, step, f"{tmp_path}/c", f"{tmp_path}/d", False)[0],
        run_in_ranks(step, f"{tmp_path}/d", f"{tmp_path}/e", False, ranks=2)[0],
        on(both, step, f"{tmp_path}/e", None, False)[0],
    ]
    for result in results:
        torch.testing.assert_close(result, first, rtol=0, atol=0)


# -- what follows the mesh --------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Remembers its latest masks: of what is computed in parts, and of what is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        inner = dropout(torch.ones_like(hidden := self.up(x)), training=self.training)
        outer = dropout(torch.ones_like(whole := self.down(hidden * inner)), training=self.training)
        self.masks = inner.bool(), outer.bool()
        return whole * outer


def data_and_masks(fabric: Fabric) -> dict[str, Any]:
    torch.manual_seed(fabric.global_rank)
    model = fabric.setup(Dropping())
    samples: Any = list(range(10))
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    )
    torch.manual_seed(fabric.global_rank + 10)
    seen = []
    batches = []
    for batch in loader:
        batches += batch.tolist()
        seen += fabric.gather_for_metrics(batch).tolist()
    model(torch.ones(3, WIDTH)).sum().backward()
    masks = model.masks
    model.eval()(torch.ones(3, WIDTH))
    counts = (
        [fabric.all_reduce(1, reduce_op=op) for op in ("sum", "max")],
        fabric.all_reduce(torch.ones(2), reduce_op="sum"),
    )
    names = fabric.device_mesh.mesh_dim_names
    return {
        "batches": batches,
        "seen": seen,
        "masks": masks,
        "counts": counts,
        "names": names,
        "draw": torch.rand(1),
    }


def test_ranks_that_share_a_batch_have_the_same_data_and_the_masks_of_their_parts() -> None:
    results = on(
        {"tensor_parallel_size": 2, "tp_plan": SPLIT, "check_collectives": True}, data_and_masks
    )
    for first, second in (results[:2], results[2:]):
        assert first["batches"] == second["batches"]
        assert first["draw"] == second["draw"]
        (inner, outer), (inner_there, outer_there) = first["masks"], second["masks"]
        assert inner.shape == (3, 32)
        assert not torch.equal(inner, inner_there)
        assert torch.equal(outer, outer_there)
    assert not torch.equal(results[0]["masks"][1], results[2]["masks"][1])
    for result in results:
        assert sorted(result["seen"]) == list(range(10))
        assert result["counts"][0] == [2, 1]
        assert result["counts"][1].tolist() == [2, 2]
        assert result["names"] == ("data_parallel", "tensor_parallel")


class PerHead(nn.Module):
    """Has a scale in the middle of what is computed in parts, whose gradient is then that of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.scale = nn.Parameter(torch.ones(2))
        self.down = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x).unflatten(-1, (-1, 2)) * self.scale).flatten(-2))


def partial_gradient(fabric: Fabric) -> None:
    model = PerHead()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.ones(1, WIDTH)).square().sum())
        optimizer.step()


def test_a_gradient_of_one_part_is_found_out() -> None:
    with pytest.raises(RankFailedError, match="replicas of ranks 0 and 1 differ after it: scale"):
        on({"tensor_parallel_size": 2, "tp_plan": SPLIT, "devices": 2}, partial_gradient)


def validate_unevenly(fabric: Fabric) -> None:
    model = fabric.setup(Dropping())
    samples: Any = torch.ones(3 - fabric.global_rank // 2, WIDTH)
    loader = torch.utils.data.DataLoader(samples, batch_size=1)
    model.eval()
    for batch in fabric.setup_dataloaders(loader, use_distributed_sampler=False):
        with torch.no_grad():
            model(batch)
    fabric.barrier()


def test_ranks_that_run_out_of_batches_are_named() -> None:
    with pytest.raises(RankFailedError, match="batches"):
        on({"tensor_parallel_size": 2, "tp_plan": SPLIT}, validate_unevenly)


# -- refusals ---------------------------------------------------------------------------------------------------------

SIZES = {
    "tensor_parallel 3 = 3, and not 4": {"tensor_parallel_size": 3, "tp_plan": PLAN},
    "replicate 2 x data_parallel 2 x sequence 1 x tensor_parallel 2 = 8": {
        "replicate_size": 2, "data_parallel_size": 2, "tensor_parallel_size": 2, "tp_plan": PLAN,
    },
    "data_parallel 0 x": {"data_parallel_size": 0},
    "nothing says how layers are split": {"tensor_parallel_size": 2},
    "torch has no style 'diagonal'": {"tp_plan": {"*": "diagonal"}},
    "replicate_size=2": {"sharding_strategy": "HYBRID_SHARD"},
    "a function, or a plan": {"parallelize_fn": print, "tp_plan": PLAN},
    "a dict by pattern": {"tp_plan": "own"},
    "takes no nonsense": {"nonsense": 1},
}  # fmt: skip


@pytest.mark.parametrize("words", SIZES)
def test_sizes_and_options_that_cannot_work_are_refused_before_a_process_starts(words: str) -> None:
    assert words in outcome(
        lambda: Fabric(accelerator="cpu", devices=4, strategy=ModelParallelStrategy(**SIZES[words]))
    )


@pytest.mark.parametrize(("options", "sizes"), [
    ({}, (1, 8, 1, 1)),
    ({"tp_plan": PLAN}, (1, 2, 1, 4)),
    ({"tp_plan": PLAN, "replicate_size": 2}, (2, 1, 1, 4)),
    ({"tp_plan": PLAN, "data_parallel_size": 4}, (1, 4, 1, 2)),
    ({"tp_plan": PLAN, "tensor_parallel_size": 2, "sequence_parallel_size": 2}, (1, 2, 2, 2)),
])  # fmt: skip
def test_auto_is_the_processes_of_a_node_and_what_is_left(
    options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert tuple(ModelParallelStrategy(**options)._mesh_sizes(8, 4).values()) == sizes


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


class Gated(nn.Module):
    """A gate and what it gates are the outputs of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.down = nn.Linear(8, 4)


def refused(fabric: Fabric) -> dict[str, str]:
    strategy: Any = fabric.strategy

    def open_ended() -> None:
        strategy.tp_plan = {"0": "colwise"}
        fabric.setup(nn.Sequential(nn.Linear(4, 4)))(torch.ones(1, 4))

    stranger: Any = nn.Sequential(nn.Linear(4, 4))
    stranger._tp_plan = {"layers.*.up": "colwise"}

    def setup(model: nn.Module, **plan: Any) -> str:
        strategy.tp_plan = plan.get("plan")
        strategy.parallelize_fn = plan.get("function")
        return outcome(lambda: fabric.setup(model))

    def meta(model: Any, mesh: Any) -> Any:
        model.head = nn.Linear(4, 8, bias=False, device="meta")
        return model

    def parallelized() -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        return parallelize_module(
            nn.Linear(4, 8), fabric.device_mesh["tensor_parallel"], ColwiseParallel()
        )

    return {
        "no layer is called 'up'": setup(Tied(), plan={"up": "colwise"}),
        "and have to be split in one way": setup(Tied(), plan={"head": "colwise"}),
        "out_features 3 / 2 parts leaves 1": setup(
            nn.Sequential(nn.Linear(4, 3)), plan={"0": "colwise"}
        ),
        "splits Linear and Embedding": setup(
            nn.Sequential(nn.Conv1d(4, 4, 1)), plan={"0": "colwise"}
        ),
        "num_heads 3 / 2 parts leaves 1": setup(
            Packed(3), plan={"qkv": "colwise", "out": "rowwise"}
        ),
        "write three": setup(Packed(), plan={"qkv": "colwise", "out": "rowwise"}),
        ".up: a gate and what it gates": setup(Gated(), plan={"up": "colwise", "down": "rowwise"}),
        "uses the weights of its parts itself": setup(
            nn.MultiheadAttention(4, 2), plan={"out_proj": "rowwise"}
        ),
        "no plan of its own": setup(Tied(), plan="auto"),
        "no layer fits layers.*.up": setup(stranger, plan="auto"),
        "which returned a NoneType": setup(Tied(), function=lambda model, mesh: None),
        "head.weight on meta": setup(Tied(), function=meta),
        "on a mesh already: weight": setup(parallelized()),
        "went into no layer": outcome(open_ended),
    }


def test_layers_that_cannot_be_split_are_refused_on_all_ranks() -> None:
    for results in on({"tensor_parallel_size": 2, "devices": 2}, refused):
        for words, raised in results.items():
            assert words in raised


def tied_and_own(fabric: Fabric) -> list[float]:
    """Largest differences from the single process of gradients of a tied model, and of one that plans for itself."""
    differences = []
    for plan in ({"embedding": "rowwise", "head": "colwise_rep"}, "auto"):
        torch.manual_seed(3)
        model = Tied().double()
        model._tp_plan = {"embedding": "colwise", "head": "rowwise"}  # pyright: ignore[reportArgumentType]
        tokens = torch.arange(6).view(2, 3)
        model(tokens).square().sum().backward()
        [expected] = [grad(parameter) for parameter in model.parameters()]
        model.zero_grad()
        fabric.strategy.tp_plan = plan  # pyright: ignore[reportAttributeAccessIssue]
        prepared = fabric.setup(model)
        fabric.backward(prepared(tokens).square().sum())
        [actual] = prepared.parameters()
        differences.append((full_tensor(grad(actual)) - expected).abs().max().item())
    return differences


def test_tied_layers_stay_tied_and_a_model_may_plan_for_itself() -> None:
    for differences in on({"tensor_parallel_size": 2, "devices": 2}, tied_and_own):
        assert max(differences) < 1e-12


# -- beside the other parts -------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dropping(), nn.Linear(32, WIDTH), Dropping()])
        self.big = nn.Linear(32, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.big(x)


def built(fabric: Fabric, source: str, empty: bool) -> list[Tensor]:
    torch.manual_seed(7 + fabric.global_rank * (source == "rank0"))
    with fabric.init_module(empty_init=empty, source=source):
        model = Wide()
    return [full_tensor(parameter.detach()) for parameter in fabric.setup(model).parameters()]


def parts_together(fabric: Fabric) -> dict[str, Any]:
    strategy: Any = fabric.strategy
    strategy.tp_plan = {
        **{f"blocks.*.{name}": style for name, style in SPLIT.items()},
        "big": "colwise_rep",
    }
    torch.manual_seed(7)
    plain = Wide()
    expected = [parameter.detach() for parameter in plain.parameters()]
    values = {source: built(fabric, source, False) for source in ("every_rank", "rank0")}
    values["nan"] = [
        each.isnan().all() for each in built(fabric, "every_rank", True) if each.numel() >= 1 << 14
    ]
    torch.manual_seed(9)
    runs = []
    state = torch.get_rng_state()
    for recomputes in (None, Dropping):
        strategy.activation_checkpointing = (recomputes,) if recomputes else None
        torch.manual_seed(7)
        model = fabric.setup(Wide())
        torch.set_rng_state(state)
        loss = model(torch.ones(3, WIDTH)).square().sum()
        fabric.backward(loss)
        runs.append(
            [loss.detach(), *(full_tensor(grad(parameter)) for parameter in model.parameters())]
        )
    strategy.activation_checkpointing = None
    ema = fabric.ema(model, 0.5)
    ema.update()
    with torch.no_grad():
        model.big.bias.add_(1.0)
    ema.update()
    with ema.applied():
        average = full_tensor(model.big.bias.detach())
    return {
        "expected": expected,
        "values": values,
        "runs": runs,
        "average": average - plain.big.bias.detach(),
    }


def test_values_recomputation_and_averages_are_those_of_one_process() -> None:
    for result in on({"tensor_parallel_size": 2}, parts_together):
        for values in ("every_rank", "rank0"):
            torch.testing.assert_close(result["values"][values], result["expected"], rtol=0, atol=0)
        assert result["values"]["nan"] == [True]
        torch.testing.assert_close(*result["runs"])
        torch.testing.assert_close(result["average"], torch.full((1024,), 0.5))


def weighted(fabric: Fabric) -> list[float]:
    """Differences from the single process of a step with weights, which are not the same for all batches."""
    strategy: Any = fabric.strategy
    strategy.tp_plan = {**SPLIT, "head": "colwise_rep"}
    torch.manual_seed(4)
    plain = Classifier().double()
    x = torch.randn(4, 3, WIDTH, dtype=torch.float64)
    counts = [1, 3, 2, 3]
    total = sum(
        plain(x[number, :count]).square().sum() for number, count in enumerate(counts)
    ) / sum(counts)
    torch.as_tensor(total).backward()
    expected = [grad(parameter) for parameter in plain.parameters()]
    plain.zero_grad()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    place = strategy.distributed_sampler_kwargs
    for number in range(place["rank"], 4, place["num_replicas"]):
        fabric.backward(model(x[number, : counts[number]]).square().sum(), weight=counts[number])
    fabric.clip_gradients(model, optimizer, max_norm=1e9)
    actual = [full_tensor(grad(parameter)) for parameter in model.parameters()]
    return [(one - other).abs().max().item() for one, other in zip(actual, expected, strict=True)]


def test_weights_count_each_batch_once() -> None:
    for differences in on({"tensor_parallel_size": 2}, weighted):
        assert max(differences) < 1e-12


def at_the_end(fabric: Fabric) -> dict[str, list[Any]]:
    """By what is done about ranks that run out of batches: losses and repeats of steps with weights, and parameters."""
    found: dict[str, list[Any]] = {}
    for uneven in ("shortest", "longest"):
        torch.manual_seed(4)
        plain = Classifier().double()
        batches: Any = torch.randn(7, 3, WIDTH, dtype=torch.float64)
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        place: Any = fabric.strategy.distributed_sampler_kwargs
        own = batches[place["rank"] :: place["num_replicas"]]
        loader = torch.utils.data.DataLoader(own, batch_size=1)
        loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False, uneven=uneven)
        found[uneven] = []
        for x in loader:
            loss = model(x).square().sum()
            fabric.backward(loss, weight=x.shape[1])
            optimizer.step()
            optimizer.zero_grad()
            found[uneven] += [fabric.all_reduce(loss.detach(), reduce_op="sum"), loader.is_repeat]
        found[uneven] += [
            full_tensor(parameter.detach()).clone() for parameter in model.parameters()
        ]
    return found


@pytest.mark.slow
def test_ranks_of_one_batch_run_out_of_batches_together() -> None:
    plan = {**SPLIT, "head": "colwise_rep"}
    expected = run_in_ranks(at_the_end)
    for rank, actual in enumerate(on({"tensor_parallel_size": 2, "tp_plan": plan}, at_the_end)):
        torch.testing.assert_close(actual, expected[rank // 2], rtol=0, atol=1e-12)
    assert [len(expected[1][uneven]) for uneven in ("shortest", "longest")] == [
        2 * 3 + 6,
        2 * 4 + 6,
    ]
    assert expected[1]["longest"][7]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x)))


def loss_of_parts(fabric: Fabric) -> tuple[float, float]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

    strategy: Any = fabric.strategy
    strategy.tp_plan = {
        **SPLIT,
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    torch.manual_seed(5)
    plain = Classifier().double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    y = torch.tensor([0, 5, 2, 3])
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    gradient = grad(plain.up.weight)
    plain.zero_grad()
    model = fabric.setup(plain)
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
    mean = fabric.all_reduce(full_tensor(loss.detach()))
    return float(mean - expected), float(
        (full_tensor(grad(model.up.weight)) - gradient).abs().max()
    )


def test_a_loss_may_be_computed_in_parts() -> None:
    for differences in on({"tensor_parallel_size": 2}, loss_of_parts):
        assert max(map(abs, differences)) < 1e-12
