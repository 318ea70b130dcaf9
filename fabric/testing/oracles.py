"""Oracles: the semantics of every collective in plain Python and torch.

Each oracle takes the values of all ranks, in rank order, and returns the results of all ranks, in
rank order: ``world.run(lambda fabric, x: fabric.all_reduce(x, reduce_op="sum"), PerRank(values))``
should equal ``oracles.all_reduce(values, "sum")``. The oracles start no processes and use nothing
of :mod:`fabric.collectives`, so the oracles and the collectives share no bugs.

A value is a tensor, a Python number, or a dict, list, tuple, namedtuple or dataclass of values.
Each rank gets back its own leaves of other types unchanged. Integers overflow as in their dtype.
Tensors may require gradients: see :func:`gradients`.

Collectives of whole objects, such as ``torch.distributed.all_gather_object``, look into no value:
see ``objects`` and a ``reduce_op`` that is a function. ``broadcast``, ``scatter`` and ``gather``
are the same for objects and for tensors.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fabric.tree import Leaf, Structure, Tree, flatten, unflatten

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "gradients",
    "in_groups",
    "reduce_scatter",
    "scatter",
]

# The dtype in which collectives compute with each type of Python numbers.
_DTYPE_OF_NUMBER = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
# Each function takes a tensor with one row per rank, and reduces the rows.
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # Tensor.sum() begins with 0.0, which would turn a sum of -0.0 into 0.0.
    "sum": lambda rows: reduce(torch.add, rows),
    "mean": lambda rows: reduce(torch.add, rows) / rows.shape[0],
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "product": lambda rows: rows.prod(0),
    "band": lambda rows: reduce(torch.bitwise_and, rows),
    "bor": lambda rows: reduce(torch.bitwise_or, rows),
    "bxor": lambda rows: reduce(torch.bitwise_xor, rows),
}


def all_reduce(
    values: Sequence[Tree], reduce_op: str | Callable[[Any, Any], Any] = "mean"
) -> list[Tree]:
    """Return the reduction of each leaf over ranks, on every rank.

    Sums and means of 16-bit floats are computed in float32 and rounded once. The mean of integers
    is a float, or a tensor of torch's default dtype.

    Args:
        values: one value per rank, of equal structure, shapes and dtypes.
        reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"``, ``"band"``,
            ``"bor"`` or ``"bxor"``. Or a function of two whole values, which reduces objects in
            rank order.
    """
    if callable(reduce_op):
        return [reduce(reduce_op, values)] * len(values)
    return _on_each_rank(values, lambda rank, leaves: _reduce(leaves, reduce_op))


def all_gather(
    values: Sequence[Tree], *, ragged: bool = False, concat: bool = False, objects: bool = False
) -> list[Tree]:
    """Compute what the collective of this name returns, from the values of all ranks.

    The result has one item for each rank, as if that rank had called the collective. Each item has,
    for each leaf, the values of all ranks. Tensors of shape ``s`` become one tensor of shape
    ``(size, *s)``. Numbers become a list.

    Args:
        values: one value per rank.
        ragged: whether to return tensors as a list by rank. Their lengths along dim 0 may differ.
        concat: whether to concatenate tensors along dim 0. A 0-dim tensor counts as a tensor of
            length 1.
        objects: whether to return the list of the whole values, as ``all_gather_object`` does.
    """
    if objects:
        return [list(values) for _ in values]

    def gather_leaf(rank: int, leaves: Sequence[Leaf]) -> Leaf:
        """Return the result of one leaf on ``rank``, from the leaf on all ranks."""
        if ragged or not isinstance(leaves[rank], Tensor):
            return list(leaves)
        if concat:
            return torch.cat([torch.atleast_1d(leaf) for leaf in leaves])
        return torch.stack(list(leaves))

    return _on_each_rank(values, gather_leaf)


def reduce_scatter(
    values: Sequence[Tree], reduce_op: str | Callable[[Any, Any], Any] = "mean"
) -> list[Tree]:
    """Return the result of each rank: for rank ``r``, row ``r`` of the reduction of each leaf.

    A leaf has one row per rank: a shape ``(size, *s)`` becomes ``s``. See :func:`all_reduce` for
    the arguments. If ``reduce_op`` is a function, values have no leaves with rows. Each value is
    then a sequence of one object per rank, and the result for rank ``r`` is the reduction of the
    objects at index ``r``.

    Raises:
        TypeError: a leaf is no tensor, and so has no rows.
    """
    if callable(reduce_op):
        return [reduce(reduce_op, rows) for rows in _objects_by_receiver(values)]
    return _on_each_rank(values, lambda rank, leaves: _reduce(_rows(leaves, rank), reduce_op))


def all_to_all(values: Sequence[Tree], *, objects: bool = False) -> list[Tree]:
    """Return, on rank ``r``, a tensor of row ``r`` of each rank, for each leaf.

    A leaf has one row per rank. Its shape ``(size, *s)`` stays.

    Args:
        values: one value per rank.
        objects: whether a value is a sequence of one object for each rank, as the input list of
            ``torch.distributed.all_to_all`` is. Rank ``r`` gets the list of each rank's item ``r``.

    Raises:
        TypeError: a leaf is no tensor, and so has no rows.
    """
    if objects:
        return _objects_by_receiver(values)
    return _on_each_rank(values, lambda rank, leaves: torch.stack(_rows(leaves, rank)))


def broadcast(values: Sequence[Tree], src: int = 0) -> list[Tree]:
    """Return the value of rank ``src`` on every rank."""
    return [values[src]] * len(values)


def scatter(values: Sequence[Tree], src: int = 0) -> list[Tree]:
    """Return, on rank ``r``, item ``r`` of the sequence that rank ``src`` passes."""
    return [values[src][rank] for rank in range(len(values))]


def gather(values: Sequence[Tree], dst: int = 0) -> list[Tree]:
    """Return the list of all values on rank ``dst``, and None on the other ranks."""
    results: list[Tree] = [None] * len(values)
    results[dst] = list(values)
    return results


def in_groups(
    oracle: Callable[..., list[Tree]],
    values: Sequence[Tree],
    groups: Sequence[Sequence[int]],
    *args: Any,
    **kwargs: Any,
) -> list[Tree]:
    """Return the results of an oracle within disjoint groups, and None for a rank in no group.

    Args:
        oracle: a function of this module.
        values: one value per rank of the world.
        groups: the ranks of each group, in any order.
        *args: further arguments of the oracle.
        **kwargs: keyword arguments of the oracle.
    """
    results: list[Tree] = [None] * len(values)
    for group in groups:
        # The ranks of a group are numbered in ascending order.
        ranks = sorted(group)
        group_values = [values[rank] for rank in ranks]
        group_results = oracle(group_values, *args, **kwargs)
        for rank, result in zip(ranks, group_results, strict=True):
            results[rank] = result
    return results


def gradients(
    losses: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradient of the sum of all ranks' losses, for the input of each rank.

    A backward pass through fabric's collectives has this gradient.

    Args:
        losses: takes the inputs of all ranks and returns the loss of each rank, a tensor with one
            element. It uses the functions of this module in place of collectives.
        inputs: one tensor per rank. They are not changed.
    """
    leaves: list[Tensor] = []
    for value in inputs:
        leaves.append(value.detach().clone().requires_grad_())
    rank_losses = [loss.reshape(()) for loss in losses(leaves)]
    total = torch.stack(rank_losses).sum()
    # An input that no loss depends on has a gradient of zeros.
    grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return list(grads)


def _on_each_rank(
    values: Sequence[Tree], function: Callable[[int, Sequence[Leaf]], Leaf]
) -> list[Tree]:
    """Apply a function to each tensor and number of all ranks, and return the result of each rank.

    Args:
        values: one value per rank, of equal structure.
        function: ``function(rank, leaf_of_ranks)`` returns the result on one rank for a leaf. The
            second argument has the leaf of each rank, in rank order.

    Returns:
        One result per rank, in the structure of the rank's value. A leaf that is neither a tensor
        nor a number is returned unchanged to its rank.
    """
    leaves_of_ranks: list[Sequence[Leaf]] = []
    structures: list[Structure] = []
    for value in values:
        leaves, structure = flatten(value)
        leaves_of_ranks.append(leaves)
        structures.append(structure)
    results: list[Tree] = []
    for rank, structure in enumerate(structures):
        result_leaves: list[Leaf] = []
        # The n-th leaves of all ranks belong together.
        for leaf_of_ranks in zip(*leaves_of_ranks, strict=True):
            result = leaf_of_ranks[rank]
            if isinstance(result, Tensor | float | int | complex):
                result = function(rank, leaf_of_ranks)
            result_leaves.append(result)
        results.append(unflatten(structure, result_leaves))
    return results


def _objects_by_receiver(values: Sequence[Any]) -> list[Any]:
    """Return, for each receiving rank, the list of the objects that all ranks send to that rank.

    Args:
        values: for each sending rank, a sequence of one object per receiving rank.
    """
    results: list[Any] = []
    for receiver in range(len(values)):
        results.append([sequence[receiver] for sequence in values])
    return results


def _rows(leaves: Sequence[Leaf], index: int) -> list[Leaf]:
    """Return row ``index`` of a leaf on each rank.

    Raises:
        TypeError: the leaf is no tensor.
    """
    rows: list[Leaf] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"the leaf {leaf!r} is no tensor of one row per rank; for lists of objects write "
                "oracles.all_to_all(values, objects=True), or reduce_scatter(values, function)"
            )
        rows.append(leaf[index])
    return rows


def _reduce(leaves: Sequence[Leaf], reduce_op: str) -> Leaf:
    """Return the reduction of a leaf over ranks, with the type and the dtype of the leaf.

    Only the mean of integers has another type: a floating-point number.

    Args:
        leaves: the leaf on each rank: tensors of one shape and dtype, or numbers of one type.
        reduce_op: see :func:`all_reduce`.
    """
    operation = reduce_op.lower().replace("avg", "mean")
    reduction = _REDUCTIONS[operation]
    if not isinstance(leaves[0], Tensor):
        number_type = type(leaves[0])
        numbers = torch.tensor(leaves, dtype=_DTYPE_OF_NUMBER[number_type])
        if operation == "mean" and number_type is int:
            numbers = numbers.double()
            number_type = float
        return number_type(reduction(numbers).item())
    rows = torch.stack(list(leaves))
    dtype = rows.dtype
    # 16-bit floats are reduced in float32, so that the result is rounded only once.
    if dtype.is_floating_point and dtype.itemsize < 4:
        rows = rows.float()
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if operation == "mean" and is_integer:
        return reduction(rows)
    return reduction(rows).to(dtype)
