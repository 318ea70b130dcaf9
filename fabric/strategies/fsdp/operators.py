"""Operators of torch that give another result for shards than for the whole tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fabric._torch import full_tensor, handle_dtensor_operators, local_tensor
from fabric.errors import UsageError

__all__ = ["handle_operators"]

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
# These fill a tensor in place.
_RANDOM_FILLS = (
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.exponential_.default,
    torch.ops.aten.cauchy_.default,
    torch.ops.aten.log_normal_.default,
    torch.ops.aten.geometric_.default,
    torch.ops.aten.random_.default,
    torch.ops.aten.random_.to,
    getattr(torch.ops.aten.random_, "from"),  # a keyword of Python
)
# These return a new tensor of the same shape.
_RANDOM_TENSORS = (
    torch.ops.aten.rand_like.default,
    torch.ops.aten.randn_like.default,
    torch.ops.aten.randint_like.default,
    torch.ops.aten.randint_like.low_dtype,
)
# The results of these depend on the values of a tensor.
_RANDOM_FUNCTIONS = (torch.ops.aten.bernoulli.default, torch.ops.aten.multinomial.default)
# The same functions with an argument ``out``.
_RANDOM_FUNCTIONS_WITH_OUT = {
    torch.ops.aten.bernoulli.out: torch.ops.aten.bernoulli.default,
    torch.ops.aten.multinomial.out: torch.ops.aten.multinomial.default,
}
_RRELU = torch.ops.aten.rrelu_with_noise.default


# [Note: Operators on shards]
# torch runs most operators on DTensors as on plain tensors. For these two kinds of operators it
# uses the shard of this rank alone, without a word:
#
# - A norm, sum, mean or maximum of a sharded tensor is a DTensor of *partial* values, which are not
#   reduced yet. `float(x)`, `x.item()` and a condition read the value of this rank. The read is an
#   error, because a reduction would wait for ranks that do not read, such as where rank 0 logs.
# - `normal_()`, `uniform_()` and the like draw numbers for the shard alone. Ranks with equal random
#   states drew the same numbers for different shards, and fewer than one process draws. Here each
#   rank draws the numbers of the whole tensor, and keeps those of its shard. If the numbers depend
#   on the values of the tensor, as in `torch.bernoulli(x)`, the ranks gather the tensor first. For
#   the other operators that draw numbers, torch raises an error.
#
# The functions of this file stand in for these operators while sharded models are set up.
def handle_operators(rank: int) -> Callable[[], None]:
    """Replace operators on DTensors that would silently use this rank's shard alone.

    The functions of this file are called in their place.

    Args:
        rank: the rank of this process, for errors.

    Returns:
        A function that ends the replacement.
    """
    functions: dict[Any, Callable[..., Any]] = {_READ_NUMBER: partial(_read_number, rank)}
    functions.update(dict.fromkeys(_RANDOM_FILLS, _fill_whole))
    functions.update(dict.fromkeys(_RANDOM_TENSORS, _draw_whole))
    functions.update(dict.fromkeys(_RANDOM_FUNCTIONS, _draw_from_values))
    functions.update(dict.fromkeys(_RANDOM_FUNCTIONS_WITH_OUT, _draw_into))
    functions[_RRELU] = _multiply_with_noise
    return handle_dtensor_operators(functions)


def _read_number(rank: int, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the number in a DTensor with one element. Not a collective.

    This function is called for ``float(x)``, ``x.item()`` and conditions.

    Raises:
        UsageError: the values of the ranks are not reduced yet. A reduction here would wait for
            ranks that do not read the number.
    """
    dtensor = args[0]
    for mesh_dim, placement in enumerate(dtensor.placements):
        if placement.is_partial() and dtensor.device_mesh.size(mesh_dim) > 1:
            raise UsageError(
                f"float(x), x.item() or a condition on rank {rank}",
                problem="x is a norm, sum, mean or maximum of a sharded tensor. Each rank has the "
                "value of its own shard, and these values are not reduced yet",
                expected="the value of the whole tensor, which is computed by all ranks",
                suggestion="x.full_tensor().item() on every rank; fabric.clip_gradients(...), "
                "which returns the norm of all gradients",
            )
    return operator(local_tensor(dtensor))


def _fill_whole(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Fill a DTensor in place, for operators such as ``uniform_``, and return the DTensor.

    Each rank draws the numbers of the whole tensor, and keeps those of its shard. Collective if
    some ranks hold replicas of one shard, see :func:`_shard`.
    """
    dtensor, *other_args = args
    whole = _empty_whole(dtensor)
    operator(whole, *other_args, **(kwargs or {}))
    local_tensor(dtensor).copy_(local_tensor(_shard(whole, dtensor)))
    return dtensor


def _draw_whole(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return a DTensor of random numbers, for operators such as ``rand_like``.

    Each rank draws the numbers of the whole tensor, and keeps those of its shard. Collective if
    some ranks hold replicas of one shard, see :func:`_shard`.
    """
    dtensor, *other_args = args
    numbers = operator(_empty_whole(dtensor), *other_args, **(kwargs or {}))
    return _shard(numbers, dtensor)


def _draw_from_values(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return a DTensor of random numbers that depend on the values of a DTensor. Collective.

    A result of another shape, such as that of ``torch.multinomial``, is replicated.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor  # takes a second to import

    dtensor, *other_args = args
    numbers = operator(full_tensor(dtensor), *other_args, **(kwargs or {}))
    if numbers.shape == dtensor.shape:
        # Each rank keeps the shard of its own numbers. Only replicas have to be equal.
        return _shard(numbers, dtensor)
    mesh = dtensor.device_mesh
    # All ranks get the first rank's numbers: their own numbers differ if their random states do.
    return distribute_tensor(numbers, mesh, [Replicate()] * mesh.ndim)


def _draw_into(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Write the result of :func:`_draw_from_values` to the argument ``out``. Collective."""
    other_kwargs = dict(kwargs)
    out = other_kwargs.pop("out")
    return out.copy_(_draw_from_values(_RANDOM_FUNCTIONS_WITH_OUT[operator], args, other_kwargs))


def _multiply_with_noise(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the randomized leaky ReLU of a DTensor. Collective.

    The random factors are written to the second argument, a DTensor. The backward pass reads them.
    """
    dtensor, noise, *other_args = args
    whole_noise = _empty_whole(noise)
    output = operator(full_tensor(dtensor), whole_noise, *other_args, **(kwargs or {}))
    local_tensor(noise).copy_(local_tensor(_shard(whole_noise, noise)))
    return _shard(output, dtensor)


def _empty_whole(dtensor: Any) -> Tensor:
    """Return an uninitialized plain tensor of the shape of a whole DTensor."""
    return local_tensor(dtensor).new_empty(dtensor.shape)


def _shard(whole: Tensor, dtensor: Any) -> Any:
    """Return this rank's shard of a whole tensor, split like a DTensor.

    Collective if some ranks hold replicas of one shard: ranks may have different random states, so
    the replicas get the numbers of the first rank of the mesh.

    Args:
        whole: a plain tensor of random numbers.
        dtensor: the DTensor whose mesh and placements the result gets.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor  # takes a second to import

    mesh = dtensor.device_mesh
    placements: list[Any] = []
    has_replicas = False
    for mesh_dim, placement in enumerate(dtensor.placements):
        # With a partial placement, the numbers of all ranks would be added up.
        if placement.is_partial():
            placement = Replicate()
        placements.append(placement)
        if placement.is_replicate() and mesh.size(mesh_dim) > 1:
            has_replicas = True
    # Without a source rank, nothing is sent: every rank cuts its shard from its own numbers.
    source = 0 if has_replicas else None
    return distribute_tensor(whole, mesh, placements, src_data_rank=source)
