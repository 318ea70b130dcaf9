"""Any object from one rank to another, as bytes: scatter, gather, send and receive.

[Note: Messages] A message is one buffer of bytes: the length of a pickle, the pickle, in which each tensor is a
:class:`~fabric.collectives.base.Header`, and the values of the tensors one after the other. So the shapes may be others
on each rank, and the tensors are never pickled. They arrive detached, in the dtype and shape that they were sent with,
on the CPU if they were there and else on the receiver's device.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fabric.collectives.base import Header, Refusal, check_refusals, check_tensor
from fabric.communicators import CallDescription, Communicator
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError
from fabric.tree import flatten, unflatten

__all__ = ["gather", "recv", "scatter", "send"]

_PREFIX = 8  # bytes that say how long the pickle is


def scatter(communicator: Communicator, parts: Any, src: int, device: torch.device) -> Any:
    """Hand out one object to each rank.

    Collective: every rank must call it; what ranks other than ``src`` pass is ignored and may be None. What cannot be
    sent raises on every rank.

    Args:
        communicator: the ranks.
        parts: on ``src`` a list or tuple of ``size`` objects or collections, by rank; shapes and kinds may differ.
        src: rank of the sender in the communicator.
        device: this process's device.

    Returns:
        This rank's part, see ``[Note: Messages]``.

    Raises:
        ConfigurationError: there is no rank ``src``, there are not ``size`` parts, or a tensor cannot travel.
        ArgumentTypeError: the parts are no sequence, or a leaf does not pickle.
    """
    communicator.check_rank(src, "scatter", "src")
    call = CallDescription("scatter", lambda: f"{src=}")
    rows, told = None, None
    if communicator.rank == src:
        try:
            messages = [_message(part, communicator.device) for part in _checked_parts(parts, communicator)]
        except FabricError as error:
            told = Refusal(error)
        else:
            rows, told = _in_rows(messages), [message.numel() for message in messages]
    lengths = communicator.broadcast_object(told, src, call)
    if isinstance(lengths, Refusal):
        raise lengths.error
    output = torch.empty(max(lengths), dtype=torch.uint8, device=communicator.device)
    return _opened(communicator.scatter(rows, output, src, call)[: lengths[communicator.rank]], device)


def gather(communicator: Communicator, tree: Any, dst: int, device: torch.device) -> list[Any] | None:
    """Collect one object from each rank on one of them.

    Collective: every rank must call it. What one rank cannot send raises on every rank.

    Args:
        communicator: the ranks.
        tree: any object or collection; shapes and kinds may differ between ranks.
        dst: rank of the receiver in the communicator.
        device: this process's device.

    Returns:
        On ``dst`` the list of all ranks' objects by rank, see ``[Note: Messages]``; None elsewhere.

    Raises:
        ConfigurationError: there is no rank ``dst``, or a tensor cannot travel.
        ArgumentTypeError: a leaf does not pickle.
    """
    communicator.check_rank(dst, "gather", "dst")
    call = CallDescription("gather", lambda: f"{dst=}")
    message, told = None, None
    try:
        message = _message(tree, communicator.device)
        told = message.numel()
    except FabricError as error:
        told = Refusal(error)
    lengths: list[Any] = communicator.gather_objects(told, call)
    check_refusals(lengths)
    assert message is not None, "this rank's refusal would have been raised"
    padding = message.new_zeros(max(lengths) - message.numel())
    rows = communicator.gather(torch.cat([message, padding]), dst, call)
    return None if rows is None else [_opened(row[:n], device) for row, n in zip(rows, lengths, strict=True)]


def send(communicator: Communicator, tree: Any, dst: int) -> None:
    """Send any object to another rank, which has to call :func:`recv`.

    Not a collective: only the two ranks call it. Messages of a pair of ranks arrive in the order in which they were
    sent. Returns when the message is on its way, at the latest when it has arrived.

    Args:
        communicator: a group of which both are members.
        tree: any object or collection.
        dst: rank of the receiver in the communicator.

    Raises:
        ConfigurationError: ``dst`` is no other member, or a tensor cannot travel; the receiver raises it, too.
        ArgumentTypeError: a leaf does not pickle; likewise.
    """
    communicator.check_peer(dst, "send", "dst")
    failure = None
    try:
        message = _message(tree, communicator.device)
    except FabricError as error:
        failure, message = error, _message(Refusal(error), communicator.device)
    communicator.send(torch.tensor([message.numel()], device=communicator.device), dst)
    communicator.send(message, dst)
    if failure is not None:
        raise failure


def recv(communicator: Communicator, src: int, device: torch.device) -> Any:
    """Receive what another rank sends with :func:`send`; waits for it.

    Args:
        communicator: a group of which both are members.
        src: rank of the sender in the communicator.
        device: this process's device.

    Returns:
        The object, see ``[Note: Messages]``.

    Raises:
        ConfigurationError: ``src`` is no other member, or a tensor of the sender's could not travel.
        ArgumentTypeError: a leaf of the sender's did not pickle.
    """
    communicator.check_peer(src, "recv", "src")
    length = communicator.recv(torch.empty(1, dtype=torch.int64, device=communicator.device), src)
    message = torch.empty(int(length.item()), dtype=torch.uint8, device=communicator.device)
    received = _opened(communicator.recv(message, src), device)
    if isinstance(received, Refusal):
        raise received.error
    return received


def _message(tree: Any, device: torch.device) -> Tensor:
    """One-dimensional, of bytes, on ``device``."""
    leaves, structure = flatten(tree)
    tensors: list[Tensor] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, structure, place)
            tensors.append(leaf.detach())
            leaves[place] = Header(tensors[-1])
    pickled = _pickled(unflatten(structure, leaves))
    head = bytearray(len(pickled).to_bytes(_PREFIX, "little") + pickled)
    parts = [torch.frombuffer(head, dtype=torch.uint8).to(device)]
    for tensor in tensors:
        values = tensor.to(device).resolve_conj().resolve_neg().contiguous()
        # Not reshaped: what has fewer than two elements is contiguous with any strides, and would keep them.
        parts.append(values.as_strided((values.numel(),), (1,)).view(torch.uint8))
    return torch.cat(parts)


def _opened(message: Tensor, device: torch.device) -> Any:
    end = _PREFIX + int.from_bytes(_bytes(message[:_PREFIX]), "little")
    tree = pickle.loads(_bytes(message[_PREFIX:end]))  # noqa: S301 - from a rank of this job, as torch does itself
    if isinstance(tree, Refusal):
        return tree
    leaves, structure = flatten(tree)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Header):
            start, end = end, end + leaf.shape.numel() * leaf.dtype.itemsize
            # Cloned as bytes: where the values begin need not be a place for a number of their dtype.
            values = message[start:end].clone().view(leaf.dtype)
            leaves[place] = values.reshape(leaf.shape).to(leaf.home(device))
    return unflatten(structure, leaves)


def _bytes(tensor: Tensor) -> bytearray:
    room = bytearray(tensor.numel())
    torch.frombuffer(room, dtype=torch.uint8).copy_(tensor)
    return room


def _in_rows(messages: list[Tensor]) -> Tensor:
    rows = messages[0].new_zeros(len(messages), max(map(len, messages)))
    for row, message in zip(rows, messages, strict=True):
        row[: message.numel()] = message
    return rows


def _checked_parts(parts: Any, communicator: Communicator) -> Sequence[Any]:
    asked = f"scatter(parts, ...) on rank {communicator.rank} of {communicator.size}"
    valid = f"a list or tuple of {communicator.size} objects, by rank"
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        raise ArgumentTypeError(asked, f"parts is a {type(parts).__name__}", valid, "list(x), or x.unbind(0)")
    if len(parts) != communicator.size:
        raise ConfigurationError(asked, f"there are {len(parts)} parts", valid, "one part for each rank, maybe None")
    return parts


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ArgumentTypeError(
            f"sending an object of type {type(value).__name__}",
            f"it does not pickle: {type(error).__name__}: {error}",
            "objects that pickle; tensors inside collections travel as tensors",
            "send what the object is made of: its state_dict(), its numbers, its name",
        ) from error
