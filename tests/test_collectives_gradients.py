"""A gradient through a collective is the gradient of the sum of all ranks' local losses."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fabric import Fabric
from fabric.collectives import all_gather, all_reduce
from fabric.communicators import LocalCommunicator, Reduce
from tests.ranks import run_in_ranks

OPS = ["sum", "mean", "gather", "ragged", "scatter sum", "scatter mean", "all_to_all", "broadcast"]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def local():
    return LocalCommunicator(torch.device("cpu"))


def inputs(size):
    """Return the input of each rank, a float64 tensor of two rows or more."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for _ in range(size):
        tensor = torch.randn(size, 2, generator=generator, dtype=torch.float64)
        tensors.append(tensor.requires_grad_())
    return tensors


def local_loss(rank, result):
    """Return a loss that differs between ranks, so that a wrong factor or a missing term shows."""
    return ((rank + 1.0) * result.sin() * (result + rank)).sum()


class Gradients(NamedTuple):
    """The gradient of a loss by the input of a rank, and the gradient of its square sum."""

    first: Tensor
    second: Tensor


# -- the reference, in one process ----------------------------------------------------------------


def results_in_one_process(tensors, op):
    """Return the result of each rank, computed from the inputs of all ranks."""
    size = len(tensors)
    if op == "gather":
        return [torch.stack(tensors)] * size
    if op == "ragged":
        rows = [tensor[: rank + 1] for rank, tensor in enumerate(tensors)]
        return [torch.cat(rows)] * size
    if op == "broadcast":
        return [tensors[-1]] * size
    if op == "all_to_all":
        stacked = torch.stack(tensors)
        return [stacked[:, rank] for rank in range(size)]
    reduced = sum(tensors)
    if op.endswith("mean"):
        reduced = reduced / size
    if op.startswith("scatter"):
        return list(reduced)
    return [reduced] * size


def expected_gradients(size, op):
    """Return the gradients of the sum over ranks of each rank's local loss, by rank."""
    tensors = inputs(size)
    total = torch.zeros((), dtype=torch.float64)
    for rank, result in enumerate(results_in_one_process(tensors, op)):
        total = total + local_loss(rank, result)
    options = {"allow_unused": True, "materialize_grads": True}
    firsts = torch.autograd.grad(total, tensors, create_graph=True, **options)
    square_sum = torch.zeros((), dtype=torch.float64)
    for first in firsts:
        square_sum = square_sum + first.square().sum()
    seconds = torch.autograd.grad(square_sum, tensors, **options)
    gradients = []
    for first, second in zip(firsts, seconds, strict=True):
        gradients.append(Gradients(first.detach(), second))
    return gradients


# -- the collectives ------------------------------------------------------------------------------


def run_collective(fabric, x, op, group=None):
    communicator = fabric.strategy.communicator(group)
    transposed = x.t().contiguous().t()
    count = torch.ones(communicator.size, dtype=torch.float64)
    if op == "gather":
        result = fabric.all_gather({"x": transposed, "count": count}, group, sync_grads=True)
    elif op == "ragged":
        tree = {"x": x[: communicator.rank + 1], "count": count}
        result = fabric.all_gather(tree, group, sync_grads=True, concat=True)
    elif op == "broadcast":
        result = fabric.broadcast({"x": x, "count": count}, communicator.size - 1, group)
    elif op == "all_to_all":
        result = fabric.all_to_all({"x": transposed, "count": count}, group)
    elif op.startswith("scatter"):
        _, reduce_op = op.split()
        result = fabric.reduce_scatter({"x": transposed, "count": count}, group, reduce_op)
    else:
        result = fabric.all_reduce({"x": transposed, "count": count}, group, op)
    assert result["x"].requires_grad
    assert not result["count"].requires_grad
    return result["x"]


def gradients_of_rank(fabric, op, group=None):
    communicator = fabric.strategy.communicator(group)
    x = inputs(communicator.size)[communicator.rank]
    loss = local_loss(communicator.rank, run_collective(fabric, x, op, group))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return Gradients(first.detach(), second)


def gradients_in_job(fabric):
    return {op: gradients_of_rank(fabric, op) for op in OPS}


def gradients_in_group(fabric):
    group = fabric.strategy.runtime.communicator.new_group([1, 2])
    if fabric.global_rank == 0:
        return {}
    return {op: gradients_of_rank(fabric, op, group) for op in OPS}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_first_and_second_gradients_are_those_of_the_sum_of_all_local_losses(size):
    results = run_in_ranks(gradients_in_job, ranks=size)
    for op in OPS:
        for result, expected in zip(results, expected_gradients(size, op), strict=True):
            message = f"{op}, {expected}"
            torch.testing.assert_close(result[op], expected, **EXACT, msg=message)


def test_gradients_in_a_group_are_those_of_the_losses_of_its_members():
    _, *results = run_in_ranks(gradients_in_group, ranks=3)
    for op in OPS:
        for result, expected in zip(results, expected_gradients(2, op), strict=True):
            torch.testing.assert_close(result[op], expected, **EXACT)


def released_results(fabric):
    """Return by operation whether a result is freed with its last name, though it has a graph."""
    references = {}
    for op in OPS:
        x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
        result = run_collective(fabric, x, op)
        references[op] = weakref.ref(result)
        del result
    # Once for all operations: a collection looks at every object of this process.
    gc.collect()
    return {op: reference() is None for op, reference in references.items()}


def test_no_graph_keeps_the_results_of_its_collectives():
    fabric = Fabric(accelerator="cpu", devices=1)
    assert fabric.launch(released_results) == dict.fromkeys(OPS, True)


def gradients_of_weights(fabric):
    factor = fabric.global_rank + 1
    summed = torch.full((2,), float(factor), requires_grad=True)
    averaged = summed.detach().clone().requires_grad_()
    sent = summed.detach().clone().requires_grad_()
    (fabric.all_reduce(summed, reduce_op="sum") * factor).sum().backward()
    (fabric.all_reduce(averaged, reduce_op="avg") * factor).sum().backward()
    (fabric.broadcast(sent, src=1) * factor).sum().backward()
    return {
        "sum": summed.grad.tolist(),
        "mean": averaged.grad.tolist(),
        "broadcast": sent.grad.tolist(),
        "value": summed.tolist(),
        "version": summed._version,
    }


def test_a_collective_is_not_in_place_and_a_broadcast_has_a_gradient_at_its_source_only():
    first, second = run_in_ranks(gradients_of_weights)
    for result in (first, second):
        assert result["sum"] == [3.0, 3.0]
        assert result["mean"] == [1.5, 1.5]
        assert result["version"] == 0
    assert first["value"] == [1.0, 1.0]
    assert second["value"] == [2.0, 2.0]
    assert first["broadcast"] == [0.0, 0.0]
    assert second["broadcast"] == [3.0, 3.0]


def broadcast_from_rank_0(fabric):
    """Broadcast values for which the receivers pass nothing, or a tensor of another layout."""
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    tree = None
    # This is as long as the message, but nothing can be received into it.
    matrix = torch.eye(2).to_sparse().requires_grad_()
    if fabric.global_rank == 0:
        tree = {"x": x, "n": torch.ones(1)}
        matrix = torch.ones(2, 2, requires_grad=True)
    result = fabric.broadcast(tree)
    ((fabric.global_rank + 1.0) * result["x"].square()).sum().backward()
    with torch.no_grad():
        assert not fabric.broadcast(x).requires_grad
    assert fabric.broadcast(matrix).tolist() == [[1, 1], [1, 1]]
    assert not result["n"].requires_grad
    return x.grad


def test_the_gradient_of_a_broadcast_arrives_at_the_source_when_the_others_pass_nothing():
    source_gradient, receiver_gradient = run_in_ranks(broadcast_from_rank_0)
    assert source_gradient.tolist() == [12.0, 18.0]
    assert receiver_gradient is None


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
