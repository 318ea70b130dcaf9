"""Clipping gives torch's own result, bit for bit, or changes nothing and says why."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fabric import Fabric
from fabric.errors import ConfigurationError, NonFiniteGradientError
from fabric.optim.clipping import clip_gradients
from tests.models import Net
from tests.ranks import run_in_ranks

DEFAULTS = {"clip_val": None, "max_norm": None, "norm_type": 2.0, "error_if_nonfinite": True}


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Make a model whose last layer has no gradients."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)).to(dtype)
    model[:2](torch.randn(2, 5, dtype=dtype)).square().sum().backward()
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients by the names of their parameters."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors bit for bit; values that are not a number are equal."""
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0, equal_nan=True)


def clip(model: nn.Module, **options: Any) -> Tensor:
    return clip_gradients(model.parameters(), **{**DEFAULTS, **options})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, 3, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_by_norm_equals_torch(dtype, norm_type, max_norm):
    ours = model_with_gradients(dtype)
    theirs = model_with_gradients(dtype)
    norm = clip(ours, max_norm=max_norm, norm_type=norm_type)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert torch.equal(norm, expected)
    assert norm.shape == ()
    assert_equal(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("clip_val", [1e-3, 0.5, 100])
def test_clipping_by_value_equals_torch_and_returns_the_norm(clip_val):
    ours = model_with_gradients()
    theirs = model_with_gradients()
    norm = clip(ours, clip_val=clip_val)
    nn.utils.clip_grad_value_(theirs.parameters(), clip_val)
    assert_equal(gradients(ours), gradients(theirs))
    unclipped = gradients(model_with_gradients())
    assert torch.equal(norm, nn.utils.get_total_norm(unclipped.values()))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_gradients_that_are_not_finite_raise_and_stay_as_they_are(value, limit):
    model = model_with_gradients()
    next(model.parameters()).grad[0, 0] = value
    before = gradients(model)
    with pytest.raises(NonFiniteGradientError, match=r"error_if_nonfinite=False"):
        clip(model, **limit)
    assert_equal(gradients(model), before)


def test_gradients_that_are_not_finite_can_be_clipped_as_torch_does():
    ours = model_with_gradients()
    theirs = model_with_gradients()
    for model in (ours, theirs):
        next(model.parameters()).grad[0, 0] = math.inf
    assert clip(ours, max_norm=1.0, error_if_nonfinite=False).item() == math.inf
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert_equal(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_no_gradients_at_all_have_norm_zero(limit):
    assert clip(nn.Linear(2, 2), **limit).item() == 0
    assert clip_gradients(iter([]), **{**DEFAULTS, **limit}).item() == 0


def test_parameters_may_come_from_a_generator():
    model = model_with_gradients()
    generator = (parameter for parameter in model.parameters())
    clip_gradients(generator, **{**DEFAULTS, "max_norm": 0.1})
    norm = nn.utils.get_total_norm(gradients(model).values())
    assert norm.item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"clip_val": 1.0, "max_norm": 1.0},
        {"clip_val": 0},
        {"clip_val": -1.0},
        {"max_norm": 0.0},
        {"max_norm": math.nan},
        {"max_norm": math.inf},
        {"max_norm": 1.0, "norm_type": 0},
        {"max_norm": 1.0, "norm_type": -math.inf},
        {"max_norm": 1.0, "norm_type": math.nan},
    ],
)
def test_limits_that_mean_nothing_are_refused(limits):
    model = model_with_gradients()
    with pytest.raises(ConfigurationError) as caught:
        clip(model, **limits)
    arguments = {"clip_val": None, "max_norm": None, "norm_type": 2.0, **limits}
    for name, value in arguments.items():
        assert f"{name}={value!r}" in caught.value.request
    assert caught.value.expected
    assert_equal(gradients(model), gradients(model_with_gradients()))


def clip_shards(fabric: Fabric) -> list[type]:
    """Check clipped shards against clipped full gradients; return the types of the norms."""
    mesh = init_device_mesh("cpu", (2,))
    types = []
    for limit in ({"max_norm": 0.5}, {"clip_val": 0.1}, {"max_norm": 0.1, "norm_type": math.inf}):
        model = model_with_gradients(torch.float64)
        sharded = []
        for parameter in list(model.parameters())[:4]:
            shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            shard.grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
            sharded.append(shard)
        norm = clip_gradients(sharded, **{**DEFAULTS, **limit})
        expected = clip(model, **limit)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for shard, parameter in zip(sharded, model.parameters(), strict=False):
            torch.testing.assert_close(
                shard.grad.full_tensor(), parameter.grad, rtol=1e-12, atol=1e-15
            )
        types.append(type(norm))
    return types


@pytest.mark.timeout(60)
def test_sharded_gradients_are_clipped_by_the_norm_of_the_whole():
    fabric = Fabric(devices=2, strategy="ddp_forkserver")
    for types in fabric.launch(clip_shards, return_all=True):
        assert types == [Tensor, Tensor, Tensor]


def norm_under_fsdp(fabric: Fabric) -> Tensor:
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 4)).sum())
    return fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_fsdp_clipping_returns_the_norm_of_all_shards():
    first, second = run_in_ranks(norm_under_fsdp, strategy="fsdp")
    assert type(first) is Tensor
    assert torch.equal(first, second)
