"""A gradient through a collective is that of the sum over ranks of each rank's local loss."""

import pytest
import torch

from fabric import Fabric
from fabric.collectives import all_gather, all_reduce
from fabric.communicators import LocalCommunicator, Reduce


def launch(ranks, function, *args):
    return Fabric(devices=ranks, strategy="ddp_forkserver").launch(function, *args, return_all=True)


def local():
    return LocalCommunicator(torch.device("cpu"))


def inputs(size):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(size)]


def local_loss(rank, reduced):
    """A loss of its own on each rank, so that a mistaken factor or a missing sum shows."""
    return ((rank + 1.0) * reduced.sin() * (reduced + rank)).sum()


def reference(size, op):
    """Gradients of the sum over ranks of each rank's local loss, in one process."""
    everyone = inputs(size)
    if op == "gather":
        joined = torch.stack(everyone)
    else:
        joined = sum(everyone) / (size if op == "mean" else 1)
    total = sum(local_loss(rank, joined) for rank in range(size))
    return torch.autograd.grad(total, everyone)


def gradient(fabric, op, group=None):
    communicator = fabric.strategy.communicator(group)
    x = inputs(communicator.size)[communicator.rank]
    tree = {"x": x.t(), "count": torch.ones(2, dtype=torch.float64)}
    result = (
        fabric.all_gather(tree, group, sync_grads=True)
        if op == "gather"
        else fabric.all_reduce(tree, group, reduce_op=op)
    )
    assert result["x"].requires_grad
    assert not result["count"].requires_grad
    local_loss(communicator.rank, result["x"].transpose(-1, -2)).backward()
    return x.grad


def gradients(fabric, op):
    world = fabric.strategy.runtime.communicator
    results = {"world": gradient(fabric, op)}
    group = world.new_group([1, 2]) if world.size == 3 else None
    if group is not None:
        results["group"] = gradient(fabric, op, group)
    return results


@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", ["sum", "mean", "gather"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_the_sum_of_all_local_losses(op, size):
    one = Fabric(accelerator="cpu", devices=1)
    results = [one.launch(gradients, op)] if size == 1 else launch(size, gradients, op)
    for result, expected in zip(results, reference(size, op), strict=True):
        torch.testing.assert_close(result["world"], expected, rtol=1e-12, atol=1e-12)
    if size == 3:
        for result, expected in zip(results[1:], reference(2, op), strict=True):
            torch.testing.assert_close(result["group"], expected, rtol=1e-12, atol=1e-12)


def second_order(fabric, op):
    x = inputs(2)[fabric.global_rank]
    joined = fabric.all_gather(x, sync_grads=True) if op == "gather" else fabric.all_reduce(x, reduce_op=op)
    (first,) = torch.autograd.grad(local_loss(fabric.global_rank, joined), x, create_graph=True)
    first.square().sum().backward()
    return x.grad


@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", ["sum", "mean", "gather"])
def test_gradients_can_be_differentiated_again(op):
    everyone = inputs(2)
    joined = torch.stack(everyone) if op == "gather" else sum(everyone) / (2 if op == "mean" else 1)
    total = sum(local_loss(rank, joined) for rank in range(2))
    first = torch.autograd.grad(total, everyone, create_graph=True)
    expected = torch.autograd.grad(sum(one.square().sum() for one in first), everyone)
    for result, one in zip(launch(2, second_order, op), expected, strict=True):
        torch.testing.assert_close(result, one, rtol=1e-12, atol=1e-12)


def test_gathering_without_gradients_detaches():
    weight = torch.ones(2, requires_grad=True)
    assert not all_gather(local(), weight).requires_grad
    assert all_gather(local(), weight, sync_grads=True).requires_grad
    with torch.no_grad():
        assert not all_gather(local(), weight, sync_grads=True).requires_grad


def test_the_mean_of_half_precision_has_half_precision_gradients():
    weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
    all_reduce(local(), weight, Reduce.MEAN).sum().backward()
    assert weight.grad.dtype is torch.float16
