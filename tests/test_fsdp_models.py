"""Models of every shape under FSDP train as in one process, or as under DDP."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric._torch import DispatchMode, full_tensor, local_tensor
from tests.loops import Block
from tests.ranks import outcome, run_in_ranks
from tests.test_fsdp import full_gradients, full_parameters, in_ranks

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    return model, optimizer, torch.randn(12, 5, WIDTH).double()


def names_of_parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def train_in_one_process(make: Callable[[], nn.Module]) -> list[Tensor]:
    model, optimizer, x = build(make)
    for _ in range(3):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*full_parameters(model), *model.buffers()]


def train_sharded(fabric: Fabric, make: Callable[[], nn.Module]) -> list[Tensor]:
    plain, plain_optimizer, x = build(make)
    names = names_of_parameters(plain)
    model, optimizer = fabric.setup(plain, plain_optimizer)
    assert names_of_parameters(model) == names
    assert {type(parameter).__name__ for parameter in model.parameters()} == {"DTensor"}
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
    return [*full_parameters(model), *model.buffers()]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_trains_as_in_one_process(make: Callable[[], nn.Module], ranks: int) -> None:
    expected = train_in_one_process(make)
    for actual in in_ranks(train_sharded, make, ranks=ranks, precision="64-true"):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def run_two_passes(fabric: Fabric, order: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = fabric.setup(Stack())
    first_input = 0.1 + 0.01 * torch.randn(2, 5, WIDTH)
    second_input = 0.1 + 0.01 * torch.randn(2, 5, WIDTH)

    def loss(x: Tensor) -> Tensor:
        return model(x).pow(3).mean()

    if order == "one by one":
        fabric.backward(loss(first_input))
        fabric.backward(loss(second_input))
    elif order == "together":
        fabric.backward(loss(first_input) + loss(second_input))
    else:
        first_loss = loss(first_input)
        second_loss = loss(second_input)
        fabric.backward(first_loss)
        fabric.backward(second_loss)
    return full_gradients(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_several_forward_passes_may_come_before_a_backward(strategy: str) -> None:
    orders = ("one by one", "together", "first all forwards")
    results = [in_ranks(run_two_passes, order, sharding_strategy=strategy)[0] for order in orders]
    torch.testing.assert_close(results[1:], [results[0]] * 2, rtol=1e-4, atol=1e-6)


def build_from_the_seed_of_the_rank(fabric: Fabric) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(fabric.global_rank)
    model = fabric.setup(Buffers())
    return full_parameters(model), model.shift


def test_every_rank_starts_with_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    expected = Buffers()
    for parameters, shift in in_ranks(build_from_the_seed_of_the_rank):
        torch.testing.assert_close(parameters, full_parameters(expected))
        assert torch.equal(shift, expected.shift)


def compute_gradients_compiled(fabric: Fabric, compiled: str) -> list[Tensor]:
    plain: Any
    plain, _, x = build(Stack)
    if compiled == "blocks":
        for block in plain.blocks:
            block.compile(backend="eager")
    elif compiled == "before setup":
        plain = torch.compile(plain, backend="eager")
    model = fabric.setup(plain)
    forward = model
    if compiled == "after setup":
        forward = torch.compile(model, backend="eager")
    for _ in range(2):
        fabric.backward(forward(x[fabric.global_rank :: fabric.world_size]).pow(2).mean())
    return full_gradients(model)


def test_compiled_models_and_blocks_have_the_same_gradients() -> None:
    expected = in_ranks(compute_gradients_compiled, "nothing", precision="64-true")[0]
    for compiled in ("blocks", "before setup", "after setup"):
        gradients = in_ranks(compute_gradients_compiled, compiled, precision="64-true")[0]
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)


# -- parameters without a dimension ----------------------------------------------------------------


class Clip(nn.Module):
    """Two towers, a temperature without a dimension as in CLIP, and a scale of both towers."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Block(), Block()])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        scale = nn.Parameter(torch.tensor(1.5))
        for tower in self.towers:
            tower.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        left_tower, right_tower = self.towers
        left = left_tower(x) * left_tower.scale
        right = right_tower(x) * right_tower.scale
        return self.logit_scale.exp() * (left * right).mean(-1)


def batches(fabric: Fabric, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(fabric.global_rank)
    return [torch.randn(3, 5, WIDTH, generator=generator) for _ in range(number)]


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value).clone() for name, value in model.state_dict().items()}


def assert_close(actual: Any, expected: Any) -> None:
    """Compare with the tolerance of sums in several orders, and of AdamW."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


KINDS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
    "accumulated": {"foreach": True},
    "frozen": {"foreach": True},
}


def train_clip(fabric: Fabric, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Clip()
    if kind == "frozen":
        net.logit_scale.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **KINDS[kind])
    model, optimizer = fabric.setup(net, optimizer)
    norm_types = (2.0, float("inf"))
    norms = []
    for number, batch in enumerate(batches(fabric, 6)):
        accumulates = kind == "accumulated" and number % 3 < 2
        with fabric.no_backward_sync(model, enabled=accumulates):
            fabric.backward(model(batch).sum())
        if accumulates:
            continue
        norm_type = norm_types[number % 2]
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5, norm_type=norm_type))
        optimizer.step()
        optimizer.zero_grad()
    assert local_tensor(model.logit_scale).dim() == 0
    return {
        "norms": torch.stack(norms),
        **full_state(model),
        "logit_scale": model.logit_scale.exp().item(),
    }


def train_clip_in_every_way(fabric: Fabric) -> list[dict[str, Any]]:
    return [train_clip(fabric, kind) for kind in KINDS]


@pytest.mark.parametrize(
    "options", [{}, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)}], ids=str
)
def test_parameters_without_a_dimension_train_as_under_ddp(options: dict[str, Any]) -> None:
    expected = run_in_ranks(train_clip_in_every_way)
    assert_close(in_ranks(train_clip_in_every_way, **options), expected)


# -- hooks and attributes of parameters ------------------------------------------------------------


def train_with_hooks(fabric: Fabric) -> dict[str, Any]:
    """Return the weights after steps whose gradients hooks have changed, and the hooks' calls."""
    torch.manual_seed(0)
    net: Any = Clip()
    shapes: list[torch.Size] = []

    def record_shape(tensor: Tensor) -> None:
        shapes.append(tensor.shape)

    net.towers[0].mlp[0].weight.register_hook(lambda grad: grad * torch.arange(WIDTH))
    removed = net.towers[1].mlp[0].weight.register_hook(lambda grad: grad * 0)
    net.logit_scale.register_hook(record_shape)
    net.towers[0].norm.weight.no_decay = True
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model.towers[1].norm.bias.register_hook(record_shape)
    model.towers[1].mlp[0].bias.register_post_accumulate_grad_hook(record_shape)
    removed.remove()
    for batch in batches(fabric, 2):
        output = model(batch)
        for name, parameter in model.named_parameters():
            assert hasattr(parameter, "no_decay") == (name == "towers.0.norm.weight")
        fabric.backward(output.mean())
        optimizer.step()
        optimizer.zero_grad()
    assert len(shapes) == 6
    return {**full_state(model), "shapes": sorted(shapes)}


def test_hooks_and_attributes_of_parameters_work_as_under_ddp() -> None:
    assert_close(in_ranks(train_with_hooks), run_in_ranks(train_with_hooks))


# -- running statistics ----------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.norm(x))
        return x


def run_statistics(fabric: Fabric) -> list[Any]:
    """Return the running statistics between the passes, and the outputs of an evaluation."""
    torch.manual_seed(0)
    net = Normed()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    records: list[Any] = []

    def record_buffers() -> None:
        records.append([buffer.clone() for buffer in model.buffers()])

    for number, batch in enumerate(batches(fabric, 6)):
        with fabric.no_backward_sync(model, enabled=number % 3 > 0):
            loss = model(batch).sum()
            record_buffers()
            if number == 0:
                # A second forward pass comes before the backward pass.
                loss = loss + model(batch + 1).sum()
            fabric.backward(loss)
    record_buffers()
    optimizer.zero_grad()
    model.eval()
    for batch in batches(fabric, 2):
        with torch.no_grad():
            records.append(model(batch))
        record_buffers()
    return records


def test_running_statistics_are_those_of_ddp() -> None:
    assert_close(in_ranks(run_statistics), run_in_ranks(run_statistics))


class BroadcastCounter(DispatchMode):
    """Counts messages from one rank to all."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d.broadcast" in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def count_broadcasts(fabric: Fabric) -> list[int]:
    """Count the broadcasts in a forward pass with running statistics, and in one without."""
    counts = []
    for net in (Normed(), nn.Sequential(Block(), Block())):
        model = fabric.setup_module(net)
        for batch in batches(fabric, 3):
            with BroadcastCounter() as counter:
                model(batch)
        counts.append(counter.count)
    return counts


def test_one_message_has_all_statistics_and_none_is_sent_without_them() -> None:
    assert in_ranks(count_broadcasts) == [[1, 0]] * 2
    assert in_ranks(count_broadcasts, broadcast_buffers=False) == [[0, 0]] * 2


# -- checkpoints -----------------------------------------------------------------------------------


def load_and_step(fabric: Fabric, load: Path | None, save: Path | None) -> dict[str, Any]:
    """Load a checkpoint, return the loaded state, then take a step and save another checkpoint."""
    seed = 0
    if load is not None:
        seed = 1  # draws other weights than those that are loaded
    torch.manual_seed(seed)
    net = Clip()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer}
    if load is not None:
        fabric.load(load, state)
    moments = []
    for slots in optimizer.state.values():
        moments.append(full_tensor(slots["exp_avg"]))
        assert local_tensor(slots["step"]) is slots["step"]
    loaded = {**full_state(model), "moments": moments}
    if save is not None:
        generator = torch.Generator().manual_seed(5)
        fabric.backward(model(torch.randn(3, 5, WIDTH, generator=generator)).mean())
        optimizer.step()
        fabric.save(save, state)
    return loaded


def load_all(fabric: Fabric, paths: list[Path]) -> list[dict[str, Any]]:
    return [load_and_step(fabric, path, None) for path in paths]


def test_checkpoints_of_clip_load_into_every_strategy_and_number_of_ranks(tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    full = tmp_path / "full"
    ddp = tmp_path / "ddp"
    after_two_steps = tmp_path / "after two steps"
    in_ranks(load_and_step, None, sharded)
    in_ranks(load_and_step, None, full, state_dict_type="full")
    run_in_ranks(load_and_step, None, ddp)
    in_ranks(load_and_step, sharded, after_two_steps, ranks=1)

    paths = [sharded, full, ddp, after_two_steps]
    results = run_in_ranks(load_all, paths)
    _, _, after_a_step_of_ddp, after_two = results[0]
    results += in_ranks(load_all, paths)
    results += in_ranks(load_all, paths, ranks=1)
    for states in results:
        *after_one_step, actual_after_two = states
        assert_close(after_one_step, [after_a_step_of_ddp] * 3)
        assert_close(actual_after_two, after_two)


# -- refusals --------------------------------------------------------------------------------------


def strides(modules: list[Any]) -> list[list[Any]]:
    strides_of_modules = []
    for module in modules:
        strides_of_modules.append([parameter.stride() for parameter in module.parameters()])
    return strides_of_modules


def set_up_shared_modules(fabric: Fabric) -> list[str]:
    convolution: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    convolution.to(memory_format=torch.channels_last)
    blocks = nn.Sequential(Block(), Block())
    fabric.setup_module(blocks)
    tied: Any = nn.Sequential(nn.Linear(4, 4))
    tied_layer = nn.Linear(4, 4)
    tied_layer.weight = tied[0].weight
    model = fabric.setup_module(tied)
    modules = [
        convolution,
        nn.Sequential(nn.Linear(2, 2), blocks),
        nn.Sequential(model),
        blocks[1],
        tied_layer,
    ]
    before = strides(modules)
    outcomes = [outcome(partial(fabric.setup_module, module)) for module in modules]
    assert strides(modules) == before
    return outcomes


def test_shared_nested_and_strided_modules_are_refused() -> None:
    for strided, *shared in in_ranks(set_up_shared_modules):
        assert "not contiguous, as in channels_last: 0.weight, 1.weight" in strided
        assert "contiguous_format" in strided
        for text in shared:
            assert "belong to another model" in text
            assert "one module around both" in text
        assert "1.0.norm" in shared[0]


def set_up_mixed_dtypes(fabric: Fabric) -> list[str]:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())

    all_trained = nn.Sequential(block(), block())
    float32_trained = nn.Sequential(block(), block())
    for layers in float32_trained:
        layers[1].requires_grad_(False)
    mixed_over_blocks = nn.Sequential(block().float(), block().bfloat16())
    modules = [all_trained, float32_trained, mixed_over_blocks]
    return [outcome(partial(fabric.setup_module, module)) for module in modules]


def test_trained_parameters_of_several_dtypes_in_one_fsdp_module_are_refused_by_name() -> None:
    dtypes = "torch.float32: ['0.0.weight', '0.0.bias'], torch.bfloat16: ['0.1.weight', '0.1.bias']"
    for all_trained, float32_trained, mixed_over_blocks in in_ranks(set_up_mixed_dtypes):
        assert dtypes in all_trained
        assert "auto_wrap_policy={...}" in all_trained
        assert float32_trained == "fine"
        assert mixed_over_blocks == "fine"
    [[converted, *_]] = in_ranks(set_up_mixed_dtypes, ranks=1, precision="bf16-true")
    assert converted == "fine"
