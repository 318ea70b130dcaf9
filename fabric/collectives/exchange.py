"""Tensors that change hands: rows between all ranks, and one rank's collection to all."""

from typing import Any

import torch
from torch import Tensor

from fabric.collectives.base import CARRIERS, Header, Refusal, pack, pack_rows, run, signature
from fabric.communicators import CallDescription, Collective, Communicator, Operation
from fabric.errors import FabricError
from fabric.tree import Structure, flatten, unflatten

__all__ = ["all_to_all", "broadcast"]


def all_to_all(communicator: Communicator, tree: Any) -> Any:
    """Send row i of every tensor of shape ``(size, *s)`` to rank i.

    Collective: every rank must call it, with collections of the same structure, shapes and dtypes. The arguments are
    not written to. Differentiable, see ``[Note: Gradients]``.

    Args:
        communicator: the ranks that exchange.
        tree: any collection of tensors with a row for each rank. Python numbers have none and are refused.

    Returns:
        The same collection, with new tensors of the same shape, whose row j came from rank j. What is no tensor comes
        back unchanged.

    Raises:
        ConfigurationError: a leaf has not ``size`` rows or cannot travel; the text names it.
    """
    leaves, structure = flatten(tree)
    parcels = pack_rows(leaves, structure, communicator.size, "all_to_all")
    grads = torch.is_grad_enabled()
    call = CallDescription("all_to_all", lambda: signature(tree, grads))
    for parcel in parcels:
        buffer = parcel.buffer(communicator.device, CARRIERS)
        received = run(communicator, Collective(Operation.ALL_TO_ALL, buffer, call=call))
        parcel.unpack(received, leaves, leading=(communicator.size,))
    return unflatten(structure, leaves)


def broadcast(communicator: Communicator, tree: Any, src: int, device: torch.device) -> Any:
    """Send any object from one rank to all.

    Collective: every rank must call it; what ranks other than ``src`` pass is ignored and may be None. Tensors inside
    collections travel as tensors, never pickled; other leaves have to pickle. An object that does not travel raises
    on every rank. Differentiable, see ``[Note: Gradients]``: where the sender's tensor requires a gradient, those that
    arrive do, and all ranks have to take part in the backward pass. A receiver that passed the like of it gets zeros.

    Args:
        communicator: the ranks that receive.
        tree: the object; only that of rank ``src`` counts.
        src: rank of the sender in the communicator.
        device: this process's device, where tensors arrive that were on an accelerator at the sender.

    Returns:
        On every rank a copy of the sender's collection; on ``src`` itself too, where leaves that are not tensors are
        those that were passed.

    Raises:
        ConfigurationError: there is no rank ``src``, or a tensor cannot travel.
        ArgumentTypeError: a leaf does not pickle.
    """
    communicator.check_rank(src, "broadcast", "src")
    call = CallDescription("broadcast", lambda: f"{src=}")
    if communicator.rank == src:
        leaves, structure = flatten(tree)
        _tell(communicator, leaves, structure, src, call)
    else:
        told = communicator.broadcast_object(None, src, call)
        if isinstance(told, Refusal):
            raise told.error
        leaves, structure = flatten(told)
        _make_room(leaves, tree, device)
    for parcel in pack(leaves, structure, numbers=False, foreign=True):
        buffer = parcel.buffer(communicator.device, CARRIERS)
        parcel.unpack(run(communicator, Collective(Operation.BROADCAST, buffer, peer=src, call=call)), leaves)
    return unflatten(structure, leaves)


def _tell(communicator: Communicator, leaves: list[Any], structure: Structure, src: int, call: CallDescription) -> None:
    """Tell the receivers what will come, or why nothing can."""
    try:
        pack(leaves, structure, numbers=False, foreign=True)
    except FabricError as error:
        communicator.broadcast_object(Refusal(error), src, call)
        raise
    headers = [Header(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    communicator.broadcast_object(unflatten(structure, headers), src, call)


def _make_room(leaves: list[Any], passed: Any, device: torch.device) -> None:
    """Put tensors to receive into in the places of headers; those that were passed, if a gradient has to reach them."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Header)]
    own: list[Any] = []
    if any(leaves[place].requires_grad for place in places):
        own, _ = flatten(passed)
    for place in places:
        header = leaves[place]
        fits = header.requires_grad and len(own) == len(leaves) and header.describes(own[place])
        leaves[place] = own[place] if fits else header.empty(device)
