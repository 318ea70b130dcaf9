"""A gradient through a collective is that of the sum over ranks of each rank's local loss."""

import gc
import weakref

import pytest
import torch

from fabric import Fabric
from fabric.collectives import all_gather, all_reduce
from fabric.communicators import LocalCommunicator, Reduce
from tests.ranks import run_in_ranks


def launch(ranks, function, *args):
    return run_in_ranks(function, *args, ranks=ranks)


def local():
    return LocalCommunicator(torch.device("cpu"))


def inputs(size):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(size, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(size)
    ]


def local_loss(rank, reduced):
    """A loss of its own on each rank, so that a mistaken factor or a missing sum shows."""
    return ((rank + 1.0) * reduced.sin() * (reduced + rank)).sum()


OPS = ["sum", "mean", "gather", "ragged", "scatter sum", "scatter mean", "all_to_all", "broadcast"]


def one_process(everyone, op):
    """What each rank gets, in one process that holds the inputs of all."""
    size = len(everyone)
    if op in ("gather", "ragged"):
        return [
            torch.stack(everyone)
            if op == "gather"
            else torch.cat([x[: r + 1] for r, x in enumerate(everyone)])
        ] * size
    if op == "broadcast":
        return [everyone[-1]] * size
    if op == "all_to_all":
        return [torch.stack([x[rank] for x in everyone]) for rank in range(size)]
    joined = sum(everyone) / (size if op.endswith("mean") else 1)
    return [joined[rank] for rank in range(size)] if op.startswith("scatter") else [joined] * size


def reference(size, op):
    """Gradients of the sum over ranks of each rank's local loss, and of a loss of these gradients, in one process."""
    everyone = inputs(size)
    total = sum(local_loss(rank, result) for rank, result in enumerate(one_process(everyone, op)))
    zeros = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(total, everyone, create_graph=True, **zeros)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), everyone, **zeros)
    return list(zip((one.detach() for one in first), second, strict=True))


def collective(fabric, x, op, group=None):
    communicator = fabric.strategy.communicator(group)
    tree = {
        "x": x.t().contiguous().t(),
        "count": torch.ones(communicator.size, dtype=torch.float64),
    }
    if op == "gather":
        result = fabric.all_gather(tree, group, sync_grads=True)
    elif op == "ragged":
        result = fabric.all_gather(
            {**tree, "x": x[: communicator.rank + 1]}, group, sync_grads=True, concat=True
        )
    elif op == "broadcast":
        result = fabric.broadcast({**tree, "x": x}, communicator.size - 1, group)
    elif op == "all_to_all":
        result = fabric.all_to_all(tree, group)
    elif op.startswith("scatter"):
        result = fabric.reduce_scatter(tree, group, op.split()[1])
    else:
        result = fabric.all_reduce(tree, group, op)
    assert result["x"].requires_grad
    assert not result["count"].requires_grad
    return result["x"]


def gradient(fabric, op, group=None):
    communicator = fabric.strategy.communicator(group)
    x = inputs(communicator.size)[communicator.rank]
    loss = local_loss(communicator.rank, collective(fabric, x, op, group))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return first.detach(), second


def gradients(fabric):
    world = fabric.strategy.runtime.communicator
    group = world.new_group([1, 2]) if world.size == 3 else None
    return {
        op: (gradient(fabric, op), gradient(fabric, op, group) if group else None) for op in OPS
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_and_theirs_are_those_of_the_sum_of_all_local_losses(size):
    one = Fabric(accelerator="cpu", devices=1)
    results = [one.launch(gradients)] if size == 1 else launch(size, gradients)
    for op in OPS:
        for result, expected in zip(results, reference(size, op), strict=True):
            torch.testing.assert_close(
                result[op][0], expected, rtol=1e-12, atol=1e-12, msg=f"{op}, {expected}"
            )
        for result, expected in zip(
            results[1:] if size == 3 else (), reference(2, op), strict=size == 3
        ):
            torch.testing.assert_close(result[op][1], expected, rtol=1e-12, atol=1e-12)


def let_go(fabric):
    """By operation, whether what it returned, a part of a graph, is freed with the last name of it."""
    results = {
        op: collective(fabric, torch.ones(1, 2, dtype=torch.float64, requires_grad=True), op)
        for op in OPS
    }
    seen = {op: weakref.ref(results.pop(op)) for op in OPS}
    gc.collect()
    return {op: ref() is None for op, ref in seen.items()}


def test_no_graph_keeps_the_results_of_its_collectives():
    assert Fabric(accelerator="cpu", devices=1).launch(let_go) == dict.fromkeys(OPS, True)


def receiver_without_input(fabric):
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    mine = fabric.global_rank == 0
    result = fabric.broadcast({"x": x, "n": torch.ones(1)} if mine else None)
    ((fabric.global_rank + 1.0) * result["x"].square()).sum().backward()
    with torch.no_grad():
        assert not fabric.broadcast(x).requires_grad
    sparse = (
        torch.eye(2).to_sparse().requires_grad_()
    )  # as long as what arrives, but none to receive into
    assert fabric.broadcast(torch.ones(2, 2, requires_grad=True) if mine else sparse).tolist() == [
        [1, 1],
        [1, 1],
    ]
    return x.grad, result["n"].requires_grad


@pytest.mark.timeout(60)
def test_the_gradient_of_a_broadcast_arrives_at_the_source_when_the_others_pass_nothing():
    first, second = launch(2, receiver_without_input)
    assert (first[0].tolist(), second[0]) == ([12.0, 18.0], None)
    assert first[1] is second[1] is False


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
