"""Operators of torch that give another result for shards than for the whole tensor."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fabric._torch import (
    base_of_view,
    call_without_function,
    full_tensor,
    handle_data_assignments,
    handle_dtensor_operators,
    is_dtensor,
    local_tensor,
)
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
# These return a part of a tensor, which is a view of a plain tensor.
_PARTS = (
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.diagonal.default,
)
# These change a tensor in place. The list has what programs do to rows of a parameter or gradient.
_CHANGES = (
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.add_.Scalar,
    torch.ops.aten.sub_.Tensor,
    torch.ops.aten.sub_.Scalar,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.mul_.Scalar,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.div_.Scalar,
    torch.ops.aten.lerp_.Scalar,
    torch.ops.aten.clamp_.default,
    torch.ops.aten.clamp_min_.default,
    torch.ops.aten.clamp_max_.default,
    torch.ops.aten.masked_fill_.Scalar,
    torch.ops.aten.neg_.default,
)

# These reduce losses to their mean, by default. The number is the position of their argument
# ``reduction``, after which optional arguments follow.
_LOSSES = {
    torch.ops.aten.mse_loss.default: 2,
    torch.ops.aten.smooth_l1_loss.default: 2,
    torch.ops.aten.huber_loss.default: 2,
    torch.ops.aten.soft_margin_loss.default: 2,
    torch.ops.aten.binary_cross_entropy.default: 3,
    torch.ops.aten.binary_cross_entropy_with_logits.default: 4,
}
# Their backward passes. The first argument is the gradient of the result.
_LOSSES_BACKWARD = {
    torch.ops.aten.mse_loss_backward.default: 3,
    torch.ops.aten.smooth_l1_loss_backward.default: 3,
    torch.ops.aten.huber_loss_backward.default: 3,
    torch.ops.aten.soft_margin_loss_backward.default: 3,
    torch.ops.aten.binary_cross_entropy_backward.default: 4,
}
_SUM = torch.ops.aten.sum.default
_SUM_OF_DIMENSIONS = torch.ops.aten.sum.dim_IntList
# These return whether any element is not zero.
_ANY = (
    torch.ops.aten.any.default,
    torch.ops.aten.any.dim,
    torch.ops.aten.any.dims,
)

# The values of ``reduction``.
_NO_REDUCTION = 0
_MEAN = 1


# [Note: Operators on shards]
# torch runs most operators on DTensors as on plain tensors. With these operators the result is
# wrong without a word:
#
# - A norm, sum, mean or maximum of a sharded tensor is a DTensor of *partial* values, which are not
#   reduced yet. `float(x)`, `x.item()` and a condition read the value of this rank. The read is an
#   error, because a reduction would wait for ranks that do not read, such as where rank 0 logs.
# - `normal_()`, `uniform_()` and the like draw numbers for the shard alone. Ranks with equal random
#   states drew the same numbers for different shards, and fewer than one process draws. Here each
#   rank draws the numbers of the whole tensor, and keeps those of its shard. If the numbers depend
#   on the values of the tensor, as in `torch.bernoulli(x)`, the ranks gather the tensor first. For
#   the other operators that draw numbers, torch raises an error.
# - `mse_loss` and other losses take the mean over the shard. Their gradients are too large by the
#   number of shards, and their values are wrong if the shards differ in size. Here the mean is that
#   over the whole tensor.
# - A sum of several partial norms, as in `weight.norm(dim=0).sum()`, sums the norms of each shard.
#   Here the norms are those of the whole tensor. A sum over an empty list of dimensions, which
#   stands for all dimensions, is that of the shard. The gradients of `amax` and `amin` contain it.
# - `any` adds up the results of the ranks, so that a true element counts once for each rank. Here
#   the results are combined by their maximum.
# - Rows of a sharded tensor, such as `x[0]` or `x[2:4]`, are a copy that the ranks have gathered.
#   `x[0].zero_()` would change the copy alone, and is an error. In-place operators are not watched
#   before a program has made such a copy.
# - `x.data = y` leaves the shard of `x` as it was. The assignment is an error, unless the memory
#   is that of `x` itself, as in `x.data -= y`.
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
    cleanup = ExitStack()

    @cache  # only the first call does something
    def watch_changes() -> None:
        """Have in-place operators on DTensors call :func:`_change` from now on."""
        functions_of_changes = dict.fromkeys(_CHANGES, partial(_change, rank))
        cleanup.callback(handle_dtensor_operators(functions_of_changes))

    functions: dict[Any, Callable[..., Any]] = {_READ_NUMBER: partial(_read_number, rank)}
    functions.update(dict.fromkeys(_PARTS, partial(_take_part, watch_changes)))
    functions.update(dict.fromkeys(_RANDOM_FILLS, partial(_fill_whole, rank)))
    functions.update(dict.fromkeys(_RANDOM_TENSORS, _draw_whole))
    functions.update(dict.fromkeys(_RANDOM_FUNCTIONS, _draw_from_values))
    functions.update(dict.fromkeys(_RANDOM_FUNCTIONS_WITH_OUT, _draw_into))
    functions[_RRELU] = _randomized_leaky_relu
    functions[_SUM] = _sum
    functions[_SUM_OF_DIMENSIONS] = _sum_dimensions
    functions.update(dict.fromkeys(_ANY, _any))
    for operator, position in _LOSSES.items():
        functions[operator] = partial(_reduce_losses, position)
    for operator, position in _LOSSES_BACKWARD.items():
        functions[operator] = partial(_reduce_losses_backward, position)
    cleanup.callback(handle_dtensor_operators(functions))
    cleanup.callback(handle_data_assignments(partial(_refuse_data_assignment, rank)))
    return cleanup.close


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


def _take_part(
    watch_changes: Callable[[], None], operator: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Return a part of a DTensor, for operators such as ``select`` that index or split a tensor.

    If the ranks had to gather the part, it is a copy, and a change of it in place would be lost.
    In-place operators on DTensors are watched from the first copy on, and not before, because this
    costs time and most programs never make a copy.

    Args:
        watch_changes: has in-place operators refuse changes of copies. May be called again.
        operator: the operator.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of the operator, a DTensor or a list of DTensors.
    """
    result = call_without_function(operator, args, kwargs)
    parts = result
    if isinstance(result, Tensor):
        parts = [result]
    for part in parts:
        if _was_gathered(part, args[0]):
            watch_changes()
            break
    return result


def _change(rank: int, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Change a DTensor in place, unless it is a copy of a part of another DTensor."""
    _refuse_lost_change(rank, operator, args[0])
    return call_without_function(operator, args, kwargs)


def _refuse_lost_change(rank: int, operator: Any, dtensor: Any) -> None:
    """Raise if a DTensor is a copy of a part of another DTensor, which is about to be changed.

    Raises:
        UsageError: the change would be lost.
    """
    whole = base_of_view(dtensor)
    if whole is None or not _was_gathered(dtensor, whole):
        return
    raise UsageError(
        f"{operator.overloadpacket.__name__}(...) of a part of a sharded tensor on rank {rank}",
        problem=f"this part, of shape {tuple(dtensor.shape)}, is a copy that the ranks have "
        f"gathered from a tensor of shape {tuple(whole.shape)}, and the change would be lost",
        expected="changes of whole parameters and gradients, such as weight.mul_(2)",
        suggestion="weights = fabric.broadcast(fabric.get_state_dict(model)), a change of a tensor "
        "in it, and model.load_state_dict(weights), for parameters; "
        "weight.register_hook(lambda grad: grad * mask) before fabric.setup(...), for gradients",
    )


def _refuse_data_assignment(rank: int, dtensor: Tensor, value: Any) -> None:
    """Raise for ``dtensor.data = value``, unless the value has the memory of the DTensor's shard.

    ``x.data -= y`` changes the shard in place, and then assigns the shard to itself.

    Raises:
        UsageError: torch would keep the shard as it is.
    """
    if is_dtensor(value) and local_tensor(value).is_set_to(local_tensor(dtensor)):
        return
    raise UsageError(
        f"an assignment to .data of a sharded tensor on rank {rank}",
        problem=f"torch would keep the values of the tensor, of shape {tuple(dtensor.shape)}, as "
        "they are, and drop the assigned tensor",
        expected="changes in place, of whole parameters and gradients",
        suggestion="with torch.no_grad(): parameter.copy_(value), for a value that is sharded as "
        "the parameter; for full tensors, "
        "weights = fabric.broadcast(fabric.get_state_dict(model)), a change of a tensor in it, "
        "and model.load_state_dict(weights)",
    )


def _was_gathered(part: Any, whole: Any) -> bool:
    """Return whether a part of a DTensor was gathered from the ranks that hold the DTensor."""
    for mesh_dim, (before, after) in enumerate(zip(whole.placements, part.placements, strict=True)):
        is_split = before.is_shard() and whole.device_mesh.size(mesh_dim) > 1
        if is_split and not after.is_shard():
            return True
    return False


def _fill_whole(rank: int, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Fill a DTensor in place, for operators such as ``uniform_``, and return the DTensor.

    Each rank draws the numbers of the whole tensor, and keeps those of its shard. Collective if
    some ranks hold replicas of one shard, see :func:`_shard`.

    Raises:
        UsageError: the DTensor is a copy of a part of another DTensor.
    """
    dtensor, *other_args = args
    _refuse_lost_change(rank, operator, dtensor)  # raises the UsageError
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
        # Each rank keeps a shard of the numbers that it has drawn itself. The ranks may have drawn
        # different numbers, but each element is random by itself. _shard() makes replicas equal.
        return _shard(numbers, dtensor)
    mesh = dtensor.device_mesh
    # All ranks get the first rank's numbers: their own numbers differ if their random states do.
    return distribute_tensor(numbers, mesh, [Replicate()] * mesh.ndim)


def _draw_into(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Write the result of :func:`_draw_from_values` to the argument ``out``. Collective."""
    other_kwargs = dict(kwargs)
    out = other_kwargs.pop("out")
    return out.copy_(_draw_from_values(_RANDOM_FUNCTIONS_WITH_OUT[operator], args, other_kwargs))


def _randomized_leaky_relu(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the randomized leaky ReLU of a DTensor. Collective.

    The random factors are written to the second argument, a DTensor. The backward pass reads them.
    Each rank draws the factors of the whole tensor, as one process does, and keeps its own.
    """
    dtensor, noise, *other_args = args
    whole_noise = _empty_whole(noise)
    output = operator(full_tensor(dtensor), whole_noise, *other_args, **(kwargs or {}))
    local_tensor(noise).copy_(local_tensor(_shard(whole_noise, noise)))
    return _shard(output, dtensor)


def _reduce_losses(position: int, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return losses of DTensors, for operators such as ``mse_loss``, or their sum or mean.

    Args:
        position: the position of the argument ``reduction``.
        operator: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    if not _takes_mean(position, args):
        # Only a mean depends on the number of elements of the shard.
        return call_without_function(operator, args, kwargs)
    losses = call_without_function(operator, _without_reduction(position, args), kwargs)
    return losses.mean()


def _reduce_losses_backward(
    position: int, operator: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Return the gradient of losses of DTensors, or of their sum or mean.

    Args:
        position: the position of the argument ``reduction``.
        operator: the backward pass of an operator such as ``mse_loss``.
        args: its arguments. The first one is the gradient of the result, and the second one is the
            input of the loss.
        kwargs: its keyword arguments.
    """
    if _takes_mean(position, args):
        # torch would divide by the number of elements of the shard. So the mean is taken here, and
        # torch computes without a reduction, from a gradient for each element.
        grad, dtensor, *other_args = args
        grad_of_losses = (grad / dtensor.numel()).expand(dtensor.shape)
        args = _without_reduction(position, (grad_of_losses, dtensor, *other_args))
    return call_without_function(operator, args, kwargs)


def _takes_mean(position: int, args: tuple[Any, ...]) -> bool:
    """Return whether the argument ``reduction`` is the mean, which it is where it is left out."""
    return len(args) <= position or args[position] == _MEAN


def _without_reduction(position: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with which each element has its own loss."""
    # Optional tensors before ``reduction`` may have been left out.
    left_out = [None] * (position - len(args))
    return (*args[:position], *left_out, _NO_REDUCTION, *args[position + 1 :])


def _sum(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the sum of a DTensor. Collective for norms that are not reduced yet."""
    dtensor, *other_args = args
    return call_without_function(operator, (_with_reduced_norms(dtensor), *other_args), kwargs)


def _sum_dimensions(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the sum of a DTensor over dimensions. Collective for norms not reduced yet."""
    dtensor, dimensions, *other_args = args
    if not dimensions:
        # None and an empty list stand for all dimensions.
        dimensions = list(range(dtensor.ndim))
    return _sum(operator, (dtensor, dimensions, *other_args), kwargs)


def _with_reduced_norms(dtensor: Any) -> Any:
    """Return a DTensor of norms with their values reduced over the ranks.

    Other DTensors are returned unchanged. Collective for norms that are not reduced yet.
    """
    from torch.distributed.tensor import Partial, Replicate  # takes a second to import

    placements: list[Any] = []
    for placement in dtensor.placements:
        # Norms have a subclass of Partial. torch can add up plain Partial values without reducing
        # them first.
        if placement.is_partial() and type(placement) is not Partial:
            placement = Replicate()
        placements.append(placement)
    if tuple(placements) == tuple(dtensor.placements):
        return dtensor
    return dtensor.redistribute(placements=placements)


def _any(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return whether any element of a DTensor is not zero.

    Each rank has the result for its own shard. torch would add up the results of the ranks, and so
    count a true element once for each rank. Here the result is their maximum.
    """
    from torch.distributed.tensor import DTensor, Partial  # takes a second to import

    result = call_without_function(operator, args, kwargs)
    placements: list[Any] = []
    for placement in result.placements:
        if placement.is_partial():
            placement = Partial("max")
        placements.append(placement)
    return DTensor.from_local(
        local_tensor(result),
        result.device_mesh,
        placements,
        shape=result.shape,
        stride=result.stride(),
    )


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
