"""Oracles: the semantics of every collective in plain Python and torch, as functions of the values of all ranks.

Each oracle takes the values of all ranks, in rank order, and returns the results of all ranks, in rank order:
``world.run(lambda fabric, x: fabric.all_reduce(x, reduce_op="sum"), PerRank(values))`` should equal
``oracles.all_reduce(values, "sum")``. The oracles start no processes and use nothing of :mod:`fabric.collectives`, so
the two share no bugs.

A value is a tensor, a Python number, or a dict, list, tuple, namedtuple or dataclass of such values; other leaves are
returned as the rank passed them. Integers overflow as in their dtype. Tensors may require gradients, see
:func:`gradients`.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fabric.tree import flatten, unflatten

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "gradients", "in_groups", "reduce_scatter",
    "scatter",
]  # fmt: skip

_NUMBERS = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.sum(0) / rows.shape[0],
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
    "product": lambda rows: rows.prod(0),
    "band": lambda rows: reduce(torch.bitwise_and, rows),
    "bor": lambda rows: reduce(torch.bitwise_or, rows),
    "bxor": lambda rows: reduce(torch.bitwise_xor, rows),
}


def all_reduce(values: Sequence[Any], reduce_op: str = "mean") -> list[Any]:
    """The reduction of each leaf over ranks, on every rank.

    Args:
        values: one per rank, of equal structure, shapes and dtypes.
        reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"``, ``"band"``, ``"bor"``,
            ``"bxor"``. Sums and means of 16-bit floats are computed in float32 and rounded once.
    """
    return _on_each_rank(values, lambda rank, leaves: _reduced(leaves, reduce_op))


def all_gather(values: Sequence[Any], *, ragged: bool = False, concat: bool = False) -> list[Any]:
    """The values of all ranks: tensors of shape ``s`` as ``(size, *s)``, numbers as a list.

    Args:
        values: one per rank.
        ragged: return tensors as a list by rank; their lengths along dim 0 may differ.
        concat: concatenate tensors along dim 0; a 0-dim tensor counts as one of length 1.
    """

    def collected(rank: int, leaves: tuple[Any, ...]) -> Any:
        if not isinstance(leaves[rank], Tensor) or ragged:
            return list(leaves)
        return (
            torch.cat([torch.atleast_1d(leaf) for leaf in leaves])
            if concat
            else torch.stack(leaves)
        )

    return _on_each_rank(values, collected)


def reduce_scatter(values: Sequence[Any], reduce_op: str = "mean") -> list[Any]:
    """Row ``r`` of the reduction, on rank ``r``: tensors of shape ``(size, *s)`` become ``s``."""
    return _on_each_rank(
        values, lambda rank, leaves: _reduced([leaf[rank] for leaf in leaves], reduce_op)
    )


def all_to_all(values: Sequence[Any]) -> list[Any]:
    """Row ``r`` of every rank, on rank ``r``: tensors of shape ``(size, *s)`` keep their shape."""
    return _on_each_rank(values, lambda rank, leaves: torch.stack([leaf[rank] for leaf in leaves]))


def broadcast(values: Sequence[Any], src: int = 0) -> list[Any]:
    """The value of rank ``src`` on every rank."""
    return [values[src] for _ in values]


def scatter(values: Sequence[Any], src: int = 0) -> list[Any]:
    """Part ``r`` of the sequence that rank ``src`` passes, on rank ``r``."""
    return [values[src][rank] for rank in range(len(values))]


def gather(values: Sequence[Any], dst: int = 0) -> list[Any]:
    """The list of all values on rank ``dst``, None on the others."""
    return [list(values) if rank == dst else None for rank in range(len(values))]


def in_groups(
    oracle: Callable[..., list[Any]],
    values: Sequence[Any],
    groups: Sequence[Sequence[int]],
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    """The results of an oracle within each of several disjoint groups; None for a rank in no group."""
    results: list[Any] = [None for _ in values]
    for group in groups:
        members = sorted(group)
        for rank, result in zip(
            members, oracle([values[rank] for rank in members], *args, **kwargs), strict=True
        ):
            results[rank] = result
    return results


def gradients(
    losses: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The gradient for each rank's input: that of the sum of all ranks' losses.

    Args:
        losses: takes the inputs of all ranks and returns the loss of each rank, shape ``()``; uses the oracles in place
            of collectives.
        inputs: one per rank; not changed.
    """
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    total = torch.stack([loss.reshape(()) for loss in losses(leaves)]).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]


def _on_each_rank(
    values: Sequence[Any], function: Callable[[int, tuple[Any, ...]], Any]
) -> list[Any]:
    """The values with each tensor and number replaced by ``function(rank, that leaf on all ranks)``."""
    flat = [flatten(value) for value in values]
    rows = list(zip(*(leaves for leaves, _ in flat), strict=True))

    def of(rank: int, row: tuple[Any, ...]) -> Any:
        return (
            function(rank, row)
            if isinstance(row[rank], Tensor | float | int | complex)
            else row[rank]
        )

    return [
        unflatten(structure, [of(rank, row) for row in rows])
        for rank, (_, structure) in enumerate(flat)
    ]


def _reduced(leaves: Sequence[Any], reduce_op: str) -> Any:
    reduction = _REDUCTIONS[reduce_op.lower().replace("avg", "mean")]
    if not isinstance(leaves[0], Tensor):
        kind = type(leaves[0])
        return kind(reduction(torch.tensor(leaves, dtype=_NUMBERS[kind])).item())
    rows = torch.stack(list(leaves))
    is_16_bit = rows.is_floating_point() and rows.dtype.itemsize < 4
    return reduction(rows.float() if is_16_bit else rows).to(rows.dtype)
