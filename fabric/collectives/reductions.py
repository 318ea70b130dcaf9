"""Reductions over ranks: the whole result everywhere, or a row of it on each rank."""

from collections.abc import Sequence
from typing import Any

import torch

from fabric.collectives.base import CARRIERS, MEAN_CARRIERS, Parcel, pack, pack_rows, run, signature
from fabric.collectives.reduce_ops import check_reduction
from fabric.communicators import CallDescription, Collective, Communicator, Operation, Reduce
from fabric.tree import Structure, flatten, unflatten

__all__ = ["all_reduce", "reduce_scatter"]


def all_reduce(communicator: Communicator, tree: Any, op: Reduce, *, numbers: bool = True) -> Any:
    """Reduce every tensor, and every Python number if ``numbers``, over the ranks.

    Collective: every rank must call it, with collections of the same structure, shapes and dtypes. The arguments are
    not written to. Differentiable for the sum and the mean, see ``[Note: Gradients]``.

    Args:
        communicator: the ranks to reduce over.
        tree: any collection. Tensors may have any shape, strides and device.
        op: integers have no mean, booleans neither mean, sum nor product, complex numbers neither
            order nor product; bitwise reductions are for integers and booleans.
        numbers: whether Python numbers take part; if not they come back unchanged.

    Returns:
        The same collection: tensors as new tensors of the same dtype and device, numbers as numbers. What is neither
        comes back unchanged.

    Raises:
        ConfigurationError: the reduction has no meaning for a leaf, or the leaf cannot travel (an array of numpy, a
            mapping that is no dict); the text names the leaf and what to write.
    """
    leaves, structure = flatten(tree)
    parcels = pack(leaves, structure, numbers)
    grads = torch.is_grad_enabled()  # now: where gradients are computed it is off
    call = CallDescription("all_reduce", lambda: f"{op.value} of {signature(tree, grads, numbers)}")
    _reduce(communicator, Operation.ALL_REDUCE, op, call, parcels, leaves, structure)
    return unflatten(structure, leaves)


def reduce_scatter(communicator: Communicator, tree: Any, op: Reduce) -> Any:
    """Reduce every tensor of shape ``(size, *s)`` over the ranks, of which each keeps its own row.

    Collective: every rank must call it, with collections of the same structure, shapes and dtypes. The arguments are
    not written to. Differentiable for the sum and the mean, see ``[Note: Gradients]``.

    Args:
        communicator: the ranks to reduce over.
        tree: any collection of tensors with a row for each rank. Python numbers have none and are refused.
        op: as for :func:`all_reduce`.

    Returns:
        The same collection, with new tensors of shape ``s``: row ``rank`` of what :func:`all_reduce` would return.
        What is no tensor comes back unchanged.

    Raises:
        ConfigurationError: as for :func:`all_reduce`; or a leaf has not ``size`` rows.
    """
    leaves, structure = flatten(tree)
    parcels = pack_rows(leaves, structure, communicator.size, "reduce_scatter")
    grads = torch.is_grad_enabled()
    call = CallDescription("reduce_scatter", lambda: f"{op.value} of {signature(tree, grads)}")
    _reduce(communicator, Operation.REDUCE_SCATTER, op, call, parcels, leaves, structure)
    return unflatten(structure, leaves)


def _reduce(
    communicator: Communicator,
    operation: Operation,
    op: Reduce,
    call: CallDescription,
    parcels: Sequence[Parcel],
    leaves: list[Any],
    structure: Structure,
) -> None:
    """Put the reduced values of all parcels in their places; every one is checked before the first travels."""
    for parcel in parcels:
        check_reduction(call.operation, op, parcel, structure)
    carriers = MEAN_CARRIERS if op is Reduce.MEAN else CARRIERS
    for parcel in parcels:
        buffer = parcel.buffer(communicator.device, carriers)
        parcel.unpack(run(communicator, Collective(operation, buffer, op, call=call)), leaves)
