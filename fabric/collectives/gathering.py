"""Gathering from all ranks: parts of one shape, or of different lengths."""

from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fabric.collectives.base import CARRIERS, Parcel, Refusal, as_number, check_refusals, pack, run, signature
from fabric.communicators import CallDescription, Collective, Communicator, Operation
from fabric.errors import ConfigurationError, FabricError
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = ["all_gather", "all_gather_ragged"]


def all_gather(communicator: Communicator, tree: Any, *, sync_grads: bool = False) -> Any:
    """Collect every tensor and every Python number from all ranks.

    Collective: every rank must call it, with collections of the same structure, shapes and dtypes. The arguments are
    not written to.

    Args:
        communicator: the ranks to collect from.
        tree: any collection.
        sync_grads: whether gradients flow back to the rank that a part came from, see ``[Note: Gradients]``; if not
            the results are detached.

    Returns:
        The same collection: a tensor of shape ``s`` as a new tensor of shape ``(size, *s)`` of the same dtype and
        device, a number as a list of ``size`` numbers, both in rank order. What is neither comes back unchanged.

    Raises:
        ConfigurationError: a leaf cannot travel; the text names it and what to write.
    """
    leaves, structure = flatten(tree)
    parcels = pack(leaves, structure)
    grads = sync_grads and torch.is_grad_enabled()
    call = CallDescription("all_gather", lambda: _described(sync_grads, signature(tree, grads)))
    for parcel in parcels:
        buffer = parcel.buffer(communicator.device, CARRIERS, detach=not sync_grads)
        gathered = run(communicator, Collective(Operation.ALL_GATHER, buffer, call=call))
        parcel.unpack(gathered, leaves, leading=(communicator.size,))
    return unflatten(structure, leaves)


def all_gather_ragged(communicator: Communicator, tree: Any, *, sync_grads: bool = False, concat: bool = False) -> Any:
    """Collect tensors whose length, along dim 0, is another on each rank.

    Collective: every rank must call it, with collections of the same structure and dtypes. The arguments are not
    written to. Costs an exchange of the shapes besides one collective for each dtype, which is as long as the longest.

    Args:
        communicator: the ranks to collect from.
        tree: any collection.
        sync_grads: as for :func:`all_gather`.
        concat: whether a tensor becomes one tensor; a 0-dim tensor then counts as one of length 1.

    Returns:
        The same collection: a tensor of shape ``(n, *s)`` as the list of ``size`` new tensors ``(n_rank, *s)``, or
        with ``concat`` as one tensor of shape ``(n_0 + n_1 + ..., *s)``; a number as a list of ``size`` numbers. All
        in rank order. What is neither comes back unchanged.

    Raises:
        ConfigurationError: ranks differ in structure, dtype, the shape behind dim 0, or whether a gradient is required;
            or a leaf cannot travel. All ranks raise it.
    """
    leaves, structure = flatten(tree)
    parcels: list[Parcel] = []
    own: list[_Part] | Refusal = []
    try:
        parcels = pack(leaves, structure)
        own = [_part(leaf, path, sync_grads) for path, leaf in zip(leaf_paths(structure), leaves, strict=True)]
    except FabricError as error:
        own = Refusal(error)
    call = CallDescription("all_gather", lambda: _described(sync_grads, f"ragged, {concat=}"))
    parts = _check_agreement(communicator.gather_objects(own, call), communicator.rank)
    for parcel in parcels:
        shapes = [[of_rank[place].shape for place in parcel.places] for of_rank in parts]
        _gather_parcel(communicator, parcel, leaves, shapes, call, detach=not sync_grads)
        for place, tensor in zip(parcel.places if concat else (), parcel.tensors, strict=concat):
            leaves[place] = torch.cat(leaves[place]) if tensor.dim() else torch.stack(leaves[place])
    return unflatten(structure, leaves)


class _Part(NamedTuple):
    """What the other ranks have to know of a leaf, and have to have at the same place themselves."""

    path: str
    kind: str  # empty for what does not travel
    shape: tuple[int, ...]
    requires_grad: bool

    def same(self) -> tuple[str, str, int, tuple[int, ...], bool]:
        return self.path, self.kind, len(self.shape), self.shape[1:], self.requires_grad

    def __str__(self) -> str:
        shape = f" of shape {self.shape}" if self.kind.startswith("torch") else ""
        return f"{self.path} {self.kind}{shape}{', requires grad' * self.requires_grad}".lstrip()


def _part(leaf: Any, path: str, sync_grads: bool) -> _Part:
    if isinstance(leaf, Tensor):
        tracked = sync_grads and torch.is_grad_enabled() and leaf.requires_grad
        return _Part(path, str(leaf.dtype), tuple(leaf.shape), tracked)
    number = as_number(leaf)
    return _Part(path, "" if number is None else type(number[0]).__name__, (), False)


def _check_agreement(answers: list[list[_Part] | Refusal], rank: int) -> list[list[_Part]]:
    """Raise on every rank what one of them cannot send, or in what they differ."""
    check_refusals(answers)
    parts: list[list[_Part]] = answers  # pyright: ignore[reportAssignmentType] - just checked
    for other, theirs in enumerate(parts):
        if list(map(_Part.same, theirs)) != list(map(_Part.same, parts[0])):
            pairs = zip_longest(parts[0], theirs)
            zero, this = next((a, b) for a, b in pairs if a is None or b is None or a.same() != b.same())
            raise ConfigurationError(
                f"all_gather(...) of different lengths on rank {rank}",
                f"rank 0 has {zero or 'nothing more'}, rank {other} has {this or 'nothing more'}",
                "the same structure and dtypes on all ranks, and the same shape behind dim 0",
                "x.reshape(-1, *shape) or x.to(dtype) before the call; fabric.gather(x) takes anything, to one rank",
            )
    return parts


def _gather_parcel(
    communicator: Communicator,
    parcel: Parcel,
    leaves: list[Any],
    shapes: list[list[tuple[int, ...]]],
    call: CallDescription,
    detach: bool,
) -> None:
    """Put the list of all ranks' parts in the place of each leaf; ``shapes`` are those of the tensors, by rank."""
    sizes = [[*map(prod, of_rank), len(parcel.numbers)] for of_rank in shapes]
    buffer = parcel.buffer(communicator.device, CARRIERS, detach)
    missing = max(map(sum, sizes)) - buffer.numel()
    padded = torch.cat([buffer, buffer.new_zeros(missing)]) if missing else buffer
    rows = run(communicator, Collective(Operation.ALL_GATHER, padded, call=call))
    split = [row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(rows, sizes, strict=True)]
    for index, (place, tensor) in enumerate(zip(parcel.places, parcel.tensors, strict=True)):
        parts = [row[index] if tensor.requires_grad else row[index].detach() for row in split]
        leaves[place] = [
            part.to(tensor.device, tensor.dtype, copy=True).reshape(of_rank[index])
            for part, of_rank in zip(parts, shapes, strict=True)
        ]
    if parcel.numbers:
        parcel.unpack_numbers(torch.stack([row[-1] for row in split], dim=-1).tolist(), leaves)


def _described(sync_grads: bool, rest: str) -> str:
    return f"{sync_grads=} of {rest}"
