"""Clipping gives torch's own result, bit for bit, or changes nothing and says why."""

import math

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import ConfigurationError, NonFiniteGradientError
from fabric.optim.clipping import clip_gradients

FIRST = {"clip_val": None, "max_norm": None, "norm_type": 2.0, "error_if_nonfinite": True}


def model_with_gradients(dtype=torch.float32):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)).to(dtype)
    model[:2](torch.randn(2, 5, dtype=dtype)).square().sum().backward()
    return model  # the last layer has no gradients


def gradients(model):
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for parameter in model.parameters()
    ]


def same(first, second):
    return all(
        a is b if a is None else torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def clip(model, **options):
    return clip_gradients(model.parameters(), **{**FIRST, **options})


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
    assert same(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("clip_val", [1e-3, 0.5, 100])
def test_clipping_by_value_equals_torch_and_returns_the_norm(clip_val):
    ours = model_with_gradients()
    theirs = model_with_gradients()
    norm = clip(ours, clip_val=clip_val)
    nn.utils.clip_grad_value_(theirs.parameters(), clip_val)
    assert same(gradients(ours), gradients(theirs))
    assert torch.equal(
        norm,
        nn.utils.get_total_norm([g for g in gradients(model_with_gradients()) if g is not None]),
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_gradients_that_are_not_finite_raise_and_stay_as_they_are(value, limit):
    model = model_with_gradients()
    next(model.parameters()).grad[0, 0] = value
    before = [None if grad is None else grad.nan_to_num(7.0) for grad in gradients(model)]
    with pytest.raises(NonFiniteGradientError, match=r"error_if_nonfinite=False"):
        clip(model, **limit)
    assert same(
        [None if grad is None else grad.nan_to_num(7.0) for grad in gradients(model)], before
    )


def test_gradients_that_are_not_finite_can_be_clipped_as_torch_does():
    ours = model_with_gradients()
    theirs = model_with_gradients()
    for model in (ours, theirs):
        next(model.parameters()).grad[0, 0] = math.inf
    assert clip(ours, max_norm=1.0, error_if_nonfinite=False).item() == math.inf
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    pairs = zip(gradients(ours)[:4], gradients(theirs)[:4], strict=True)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_no_gradients_at_all_have_norm_zero(limit):
    assert clip(nn.Linear(2, 2), **limit).item() == 0
    assert clip_gradients(iter([]), **{**FIRST, **limit}).item() == 0


def test_parameters_may_come_from_a_generator():
    model = model_with_gradients()
    clip_gradients((parameter for parameter in model.parameters()), **{**FIRST, "max_norm": 0.1})
    grads = [grad for grad in gradients(model) if grad is not None]
    assert nn.utils.get_total_norm(grads).item() == pytest.approx(0.1, rel=1e-4)


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
    given = {"clip_val": None, "max_norm": None, "norm_type": 2.0, **limits}
    assert all(f"{name}={value!r}" in caught.value.request for name, value in given.items())
    assert caught.value.expected
    assert same(gradients(model), gradients(model_with_gradients()))


def clip_shards(fabric):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    results = []
    for limit in ({"max_norm": 0.5}, {"clip_val": 0.1}, {"max_norm": 0.1, "norm_type": math.inf}):
        whole = model_with_gradients(torch.float64)
        sharded = []
        for parameter in list(whole.parameters())[:4]:
            shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            shard.grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
            sharded.append(shard)
        norm = clip_gradients(sharded, **{**FIRST, **limit})
        expected = clip(whole, **limit)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for shard, parameter in zip(sharded, whole.parameters(), strict=False):
            torch.testing.assert_close(
                shard.grad.full_tensor(), parameter.grad, rtol=1e-12, atol=1e-15
            )
        results.append(type(norm) is torch.Tensor)
    return results


@pytest.mark.timeout(60)
def test_sharded_gradients_are_clipped_by_the_norm_of_the_whole():
    assert (
        Fabric(devices=2, strategy="ddp_forkserver").launch(clip_shards, return_all=True)
        == [[True] * 3] * 2
    )
