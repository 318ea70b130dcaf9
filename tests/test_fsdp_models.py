"""Models of every shape under FSDP train as in one process, or as under DDP."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from fabric import Fabric
from fabric._torch import DispatchMode, full_tensor, local_tensor
from tests.loops import Block
from tests.ranks import outcome, run_in_ranks
from tests.test_fsdp import full_gradients, full_parameters, in_ranks

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
        hidden = super().forward(self.first(x))
        return self.last(hidden)


class Buffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.norm.eval()
        shifted = self.norm(x) + self.shift
        return super().forward(shifted)


class OwnCheckpoints(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class TwoPasses(Stack):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return super().forward(hidden)


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


class CallsItself(Stack):
    """A model that calls itself, and uses its own parameters before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        hidden = super().forward(x * self.scale)
        if depth > 0:
            hidden = self(hidden, depth - 1)
        return super().forward(hidden * self.scale)


MODELS = [Stack, Frozen, Tied, Buffers, OwnCheckpoints, TwoPasses, Shared, CallsItself]


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def assert_close_in_float64(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(3)
    model = make().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    x = torch.randn(12, 5, WIDTH).double()
    return model, optimizer, x


def names_of_parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def train_in_one_process(make: Callable[[], nn.Module]) -> list[Tensor]:
    model, optimizer, x = build(make)
    for _ in range(3):
        loss = mean_square(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*full_parameters(model), *model.buffers()]


def train_sharded(fabric: Fabric, make: Callable[[], nn.Module]) -> list[Tensor]:
    plain, plain_optimizer, x = build(make)
    names = names_of_parameters(plain)
    model, optimizer = fabric.setup(plain, plain_optimizer)
    assert names_of_parameters(model) == names
    for parameter in model.parameters():
        assert type(parameter).__name__ == "DTensor"
    x = x[fabric.global_rank :: fabric.world_size]
    model.eval()
    with torch.no_grad():
        expected = model(x)
    assert not expected.requires_grad
    model.train()
    assert torch.equal(model(x), expected)
    if "calls" in dict(model.named_buffers()):
        model.calls.zero_()
    for _ in range(3):
        loss = mean_square(model(x))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [*full_parameters(model), *model.buffers()]


# Shards of two ranks are equal, which is simpler than those of three.
TWO_RANKS = pytest.param(2, marks=[pytest.mark.slow, pytest.mark.soak])


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [TWO_RANKS, 3])
def test_a_model_trains_as_in_one_process(make: Callable[[], nn.Module], ranks: int) -> None:
    expected = train_in_one_process(make)
    for actual in in_ranks(train_sharded, make, ranks=ranks, precision="64-true"):
        assert_close_in_float64(actual, expected)


def run_two_passes(fabric: Fabric, order: str) -> list[Tensor]:
    torch.manual_seed(3)
    module = Stack()
    model = fabric.setup(module)
    first_input = 0.1 + 0.01 * torch.randn(2, 5, WIDTH)
    second_input = 0.1 + 0.01 * torch.randn(2, 5, WIDTH)

    def forward(x: Tensor) -> Tensor:
        output = model(x)
        return output.pow(3).mean()

    if order == "one by one":
        first_loss = forward(first_input)
        fabric.backward(first_loss)
        second_loss = forward(second_input)
        fabric.backward(second_loss)
    elif order == "together":
        first_loss = forward(first_input)
        second_loss = forward(second_input)
        fabric.backward(first_loss + second_loss)
    else:
        first_loss = forward(first_input)
        second_loss = forward(second_input)
        fabric.backward(first_loss)
        fabric.backward(second_loss)
    return full_gradients(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_several_forward_passes_may_come_before_a_backward(strategy: str) -> None:
    run = partial(in_ranks, run_two_passes, sharding_strategy=strategy)
    expected, _ = run("one by one")
    for order in ("together", "first all forwards"):
        actual, _ = run(order)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def build_from_the_seed_of_the_rank(fabric: Fabric) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(fabric.global_rank)
    module = Buffers()
    model = fabric.setup(module)
    return full_parameters(model), model.shift


def test_every_rank_starts_with_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    model = Buffers()
    expected_parameters = full_parameters(model)
    for parameters, shift in in_ranks(build_from_the_seed_of_the_rank):
        torch.testing.assert_close(parameters, expected_parameters)
        assert torch.equal(shift, model.shift)


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
    x = x[fabric.global_rank :: fabric.world_size]
    for _ in range(2):
        loss = mean_square(forward(x))
        fabric.backward(loss)
    return full_gradients(model)


def test_compiled_models_and_blocks_have_the_same_gradients() -> None:
    run = partial(in_ranks, compute_gradients_compiled, precision="64-true")
    expected, _ = run("nothing")
    for compiled in ("blocks", "before setup", "after setup"):
        gradients, _ = run(compiled)
        assert_close_in_float64(gradients, expected)


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
        similarity = (left * right).mean(-1)
        return self.logit_scale.exp() * similarity


def batches(fabric: Fabric, number: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(number):
        yield torch.randn(3, 5, WIDTH, generator=generator)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, value in model.state_dict().items():
        state[name] = full_tensor(value).clone()
    return state


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
            output = model(batch)
            loss = output.sum()
            fabric.backward(loss)
        if accumulates:
            continue
        norm_type = norm_types[number % 2]
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, norm_type=norm_type)
        norms.append(norm)
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


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)}


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(HYBRID, marks=[pytest.mark.slow, pytest.mark.soak])],
    ids=["fully sharded", "hybrid"],
)
def test_parameters_without_a_dimension_train_as_under_ddp(options: dict[str, Any]) -> None:
    # The gradients grow quickly, and with them the rounding of float32.
    expected = run_in_ranks(train_clip_in_every_way, precision="64-true")
    actual = in_ranks(train_clip_in_every_way, precision="64-true", **options)
    assert_close(actual, expected)


# -- hooks and attributes of parameters ------------------------------------------------------------


def train_with_hooks(fabric: Fabric) -> dict[str, Any]:
    """Return the weights after steps whose gradients hooks have changed, and the hooks' calls."""
    torch.manual_seed(0)
    net: Any = Clip()
    shapes: list[torch.Size] = []

    def record_shape(tensor: Tensor) -> None:
        shapes.append(tensor.shape)

    first_tower, second_tower = net.towers
    first_tower.mlp[0].weight.register_hook(lambda grad: grad * torch.arange(WIDTH))
    removed_hook = second_tower.mlp[0].weight.register_hook(lambda grad: grad * 0)
    net.logit_scale.register_hook(record_shape)
    first_tower.norm.weight.no_decay = True
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, sgd)
    _, second_tower = model.towers
    second_tower.norm.bias.register_hook(record_shape)
    second_tower.mlp[0].bias.register_post_accumulate_grad_hook(record_shape)
    removed_hook.remove()
    for batch in batches(fabric, 2):
        output = model(batch)
        for name, parameter in model.named_parameters():
            assert hasattr(parameter, "no_decay") == (name == "towers.0.norm.weight")
        loss = output.mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert len(shapes) == 6
    return {**full_state(model), "shapes": sorted(shapes)}


def test_hooks_and_attributes_of_parameters_work_as_under_ddp() -> None:
    actual = in_ranks(train_with_hooks)
    expected = run_in_ranks(train_with_hooks)
    assert_close(actual, expected)


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
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, sgd)
    records: list[Any] = []

    def record_buffers() -> None:
        buffers = [buffer.clone() for buffer in model.buffers()]
        records.append(buffers)

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
    actual = in_ranks(run_statistics)
    expected = run_in_ranks(run_statistics)
    assert_close(actual, expected)


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
    for counts in in_ranks(count_broadcasts):
        assert counts == [1, 0]
    for counts in in_ranks(count_broadcasts, broadcast_buffers=False):
        assert counts == [0, 0]


# -- checkpoints -----------------------------------------------------------------------------------


def load_and_step(fabric: Fabric, load: Path | None, save: Path | None) -> dict[str, Any]:
    """Load a checkpoint, return the loaded state, then take a step and save another checkpoint."""
    seed = 0
    if load is not None:
        # This seed draws other weights than those that are loaded.
        seed = 1
    torch.manual_seed(seed)
    net = Clip()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, adamw)
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
        x = torch.randn(3, 5, WIDTH, generator=generator)
        output = model(x)
        loss = output.mean()
        fabric.backward(loss)
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
        strides_of_module = [parameter.stride() for parameter in module.parameters()]
        strides_of_modules.append(strides_of_module)
    return strides_of_modules


def set_up_shared_modules(fabric: Fabric) -> list[str]:
    convolution: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 4, 3),
    )
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
        assert "not contiguous, as in channels_last or after expand(): 0.weight" in strided
        assert "parameter.data.contiguous()" in strided
        for text in shared:
            assert "belong to another model" in text
            assert "one module around both" in text
        assert "1.0.norm" in shared[0]


def set_up_mixed_dtypes(fabric: Fabric) -> list[str]:
    def block() -> nn.Sequential:
        float32_layer = nn.Linear(4, 4)
        bfloat16_layer = nn.Linear(4, 4).bfloat16()
        return nn.Sequential(float32_layer, bfloat16_layer)

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


class Complex(nn.Module):
    """A layer with a complex parameter, as in spectral models."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).abs()


def set_up_complex_parameters(fabric: Fabric) -> str:
    return outcome(lambda: fabric.setup(nn.Sequential(nn.Linear(4, 4), Complex())))


def train_complex_parameters(fabric: Fabric) -> float:
    module = nn.Sequential(nn.Linear(4, 4), Complex())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    loss = model(torch.ones(2, 4)).sum()
    fabric.backward(loss)
    optimizer.step()
    phase = full_tensor(model[1].phase.detach())
    return (phase - 1).abs().max().item()


def test_complex_and_real_parameters_in_one_fsdp_module_are_refused_by_name() -> None:
    for precision in ("32-true", "bf16-mixed"):
        for text in in_ranks(set_up_complex_parameters, precision=precision):
            assert "torch.complex64: ['1.phase']" in text
            assert "Write: FSDPStrategy(auto_wrap_policy={...})" in text
    assert min(in_ranks(train_complex_parameters, auto_wrap_policy={Complex})) > 0


def make_perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def squared_output(module: nn.Module, parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
    return functional_call(module, parameters, (sample,)).square().sum()


gradients_of_samples = vmap(grad(squared_output, argnums=1), in_dims=(None, None, 0))
SAMPLES = torch.arange(8.0, dtype=torch.float64).view(2, 4)


class FunctionalCalls(NamedTuple):
    """The outcomes of calls of a sharded model with other parameters.

    Attributes:
        refused: the outcomes of calls with other tensors, before and after a first pass.
        with_shards: the outcome of a call with the sharded parameters.
        first_loss: the loss of a pass after the refused calls.
        gradients: the gradients of each sample, after following the remedy of the error.
    """

    refused: list[str]
    with_shards: str
    first_loss: float
    gradients: dict[str, Tensor]


def call_with_other_parameters(fabric: Fabric) -> FunctionalCalls:
    module = make_perceptron()
    unsharded = deepcopy(module)
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))

    def call(parameters: dict[str, Tensor]) -> str:
        return outcome(lambda: functional_call(module, parameters, (SAMPLES,)))

    def refused_calls() -> list[str]:
        shards = dict(module.named_parameters())
        doubled: dict[str, Tensor] = {}
        for name, shard in shards.items():
            doubled[name] = 2 * shard.detach()
        return [
            outcome(lambda: gradients_of_samples(module, shards, SAMPLES)),
            call(doubled),
            call(dict(unsharded.named_parameters())),
            call({"2.bias": torch.zeros(1)}),
        ]

    refused = refused_calls()
    loss = model(SAMPLES).square().mean()
    fabric.backward(loss)
    refused += refused_calls()
    with_shards = call(dict(module.named_parameters()))
    weights = fabric.broadcast(fabric.get_state_dict(model))
    gradients = gradients_of_samples(unsharded, weights, SAMPLES)
    return FunctionalCalls(refused, with_shards, loss.item(), gradients)


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "SHARD_GRAD_OP"}])
def test_a_functional_call_with_other_parameters_is_refused(options: dict[str, Any]) -> None:
    plain = make_perceptron()
    expected = gradients_of_samples(plain, dict(plain.named_parameters()), SAMPLES)
    for calls in in_ranks(call_with_other_parameters, **options):
        for text in calls.refused:
            assert "UsageError" in text
            assert "2.bias" in text
            assert "fabric.broadcast(fabric.get_state_dict(model))" in text
        assert calls.with_shards == "fine"
        assert calls.first_loss == pytest.approx(plain(SAMPLES).square().mean().item())
        torch.testing.assert_close(calls.gradients, expected)


class Scaled(nn.Module):
    """A model that calls one of two equal blocks with twice its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_perceptron(), make_perceptron()])

    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * weight for name, weight in self.blocks[0].named_parameters()}
        return functional_call(self.blocks[0], doubled, (x,)) + self.blocks[1](x)


def gradients_of_scaled(fabric: Fabric) -> list[Tensor]:
    model = fabric.setup(Scaled())
    loss = model(SAMPLES).square().mean()
    fabric.backward(loss)
    return [full_tensor(parameter.grad) for parameter in model.parameters()]


def test_a_functional_call_of_an_fsdp_module_within_the_model_is_refused_with_a_remedy() -> None:
    policy = {nn.Sequential}
    for text in in_ranks(outcome_of_scaled, auto_wrap_policy=policy):
        assert text.startswith("UsageError: blocks.0(...) on rank")
        assert "blocks.0.0.weight" in text
        assert "auto_wrap_policy={Model}" in text
    plain = Scaled()
    plain(SAMPLES).square().mean().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    for gradients in in_ranks(gradients_of_scaled, auto_wrap_policy={Scaled}):
        torch.testing.assert_close(gradients, expected)


def outcome_of_scaled(fabric: Fabric) -> str:
    return outcome(lambda: gradients_of_scaled(fabric))


class Shrinking(nn.Module):
    """A model whose weight shrinks in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        if self.training:
            self.shrink()
        return output

    def shrink(self) -> None:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)


def shrink_in_forward(fabric: Fabric) -> list[str]:
    model = fabric.setup(Shrinking())
    return [outcome(lambda: model(SAMPLES)) for _ in range(2)]


def shrink_after_forward(fabric: Fabric) -> Tensor:
    """Follow the remedy of the error: change the weight outside of forward passes."""
    torch.manual_seed(0)
    module = Shrinking()
    module.eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    for _ in range(3):
        fabric.backward(model(SAMPLES).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.layer.weight.mul_(0.5)
    return full_tensor(model.layer.weight.detach())


def test_a_change_of_a_gathered_parameter_that_fsdp_drops_is_an_error() -> None:
    for texts in in_ranks(shrink_in_forward):
        for text in texts:
            assert "and drops the change: layer.weight" in text
    [expected] = run_in_ranks(shrink_after_forward, ranks=1, strategy="auto")
    for weight in in_ranks(shrink_after_forward):
        torch.testing.assert_close(weight, expected)


def load_by_assignment(fabric: Fabric) -> list[Tensor]:
    """Return the outputs of two passes of a model whose parameters a state dict has replaced."""
    model = fabric.setup(make_perceptron())
    weights = make_perceptron().state_dict()
    for weight in weights.values():
        weight.mul_(2)
    model.load_state_dict(weights, assign=True)
    with torch.no_grad():
        return [model(SAMPLES), model(SAMPLES)]


def test_a_state_dict_that_replaces_the_parameters_is_used() -> None:
    plain = make_perceptron()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
        expected = plain(SAMPLES)
    for outputs in in_ranks(load_by_assignment):
        for output in outputs:
            torch.testing.assert_close(output, expected)
