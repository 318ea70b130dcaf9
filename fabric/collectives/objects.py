"""Any object from one rank to another, as bytes: scatter, gather, send and receive.

[Note: Messages] A message is one buffer of bytes: the length of a pickle, the pickle, in which each tensor is a
:class:`TensorMeta`, and the values of the tensors one after the other. So the shapes may be others on each rank, and
the tensors are never pickled. They arrive detached, in the dtype and shape that they were sent with, on the CPU if they
were there and else on the receiver's device. What one rank cannot send raises on every rank.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fabric.collectives.buckets import check_tensor
from fabric.communicators import CallDescription, Communicator
from fabric.communicators.process_group import to_bytes
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError
from fabric.tree import flatten, unflatten

__all__ = ["TensorMeta", "gather", "raise_first", "recv", "scatter", "send"]

_PREFIX = 8  # bytes that say how long the pickle is


class TensorMeta:
    """What a receiver has to know of a tensor before it arrives; no dataclass, since those are collections."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tensor.shape, tensor.dtype, tensor.device.type == "cpu"
        self.requires_grad = tensor.requires_grad and torch.is_grad_enabled()

    def device(self, own: torch.device) -> torch.device:
        """Where the tensor belongs in a process with this device."""
        return torch.device("cpu") if self.on_cpu else own

    def empty(self, own: torch.device) -> Tensor:
        """A tensor to receive into, in a process with this device."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device(own), requires_grad=self.requires_grad)

    def describes(self, leaf: Any) -> bool:
        """Whether this could have been made of ``leaf``."""
        return isinstance(leaf, Tensor) and vars(self) == vars(TensorMeta(leaf))


def raise_first(answers: list[Any]) -> list[Any]:
    """What all ranks answered; or raise, on every rank, the first error among the answers."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, FabricError):
            answer.add_note(f"raised on rank {rank}")
            raise answer
    return answers


def scatter(communicator: Communicator, parts: Any, src: int, device: torch.device) -> Any:
    """See :meth:`fabric.Fabric.scatter`; ``device`` is this process's."""
    communicator.check_rank(src, "scatter", "src")
    call = CallDescription("scatter", lambda: f"{src=}")
    rows, lengths = None, None
    if communicator.rank == src:
        try:
            messages = [_message(part, communicator.device) for part in _checked_parts(parts, communicator)]
        except FabricError as error:
            lengths = error
        else:
            rows, lengths = _in_rows(messages), [message.numel() for message in messages]
    lengths = communicator.broadcast_object(lengths, src, call)
    if isinstance(lengths, FabricError):
        raise lengths
    output = torch.empty(max(lengths), dtype=torch.uint8, device=communicator.device)
    return _opened(communicator.scatter(rows, output, src, call)[: lengths[communicator.rank]], device)


def gather(communicator: Communicator, tree: Any, dst: int, device: torch.device) -> list[Any] | None:
    """See :meth:`fabric.Fabric.gather`; ``device`` is this process's."""
    communicator.check_rank(dst, "gather", "dst")
    call = CallDescription("gather", lambda: f"{dst=}")
    message = torch.empty(0)
    try:
        message = _message(tree, communicator.device)
        length = message.numel()
    except FabricError as error:
        length = error
    lengths = raise_first(communicator.gather_objects(length, call))
    padding = message.new_zeros(max(lengths) - message.numel())
    rows = communicator.gather(torch.cat([message, padding]), dst, call)
    return None if rows is None else [_opened(row[:n], device) for row, n in zip(rows, lengths, strict=True)]


def send(communicator: Communicator, tree: Any, dst: int) -> None:
    """See :meth:`fabric.Fabric.send`; returns when the message is on its way, at the latest when it has arrived."""
    communicator.check_peer(dst, "send", "dst")
    failure = None
    try:
        message = _message(tree, communicator.device)
    except FabricError as error:
        failure, message = error, _message(error, communicator.device)
    # A negative length says that the message is the error in its place.
    length = message.numel() if failure is None else -message.numel()
    communicator.send(torch.tensor([length], device=communicator.device), dst)
    communicator.send(message, dst)
    if failure is not None:
        raise failure


def recv(communicator: Communicator, src: int, device: torch.device) -> Any:
    """See :meth:`fabric.Fabric.recv`; ``device`` is this process's."""
    communicator.check_peer(src, "recv", "src")
    length = int(communicator.recv(torch.empty(1, dtype=torch.int64, device=communicator.device), src).item())
    message = torch.empty(abs(length), dtype=torch.uint8, device=communicator.device)
    received = _opened(communicator.recv(message, src), device)
    if length < 0:
        raise received
    return received


def _message(tree: Any, device: torch.device) -> Tensor:
    """One-dimensional, of bytes, on ``device``."""
    leaves, structure = flatten(tree)
    tensors: list[Tensor] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, structure, place)
            tensors.append(leaf.detach())
            leaves[place] = TensorMeta(tensors[-1])
    pickled = _pickled(unflatten(structure, leaves))
    head = bytearray(len(pickled).to_bytes(_PREFIX, "little") + pickled)
    parts = [torch.frombuffer(head, dtype=torch.uint8).to(device)]
    for tensor in tensors:
        values = tensor.to(device).resolve_conj().resolve_neg().contiguous()
        # Not reshaped: what has fewer than two elements is contiguous with any strides, and would keep them.
        parts.append(values.as_strided((values.numel(),), (1,)).view(torch.uint8))
    return torch.cat(parts)


def _opened(message: Tensor, device: torch.device) -> Any:
    end = _PREFIX + int.from_bytes(to_bytes(message[:_PREFIX]), "little")
    tree = pickle.loads(to_bytes(message[_PREFIX:end]))  # noqa: S301 - from a rank of this job, as torch does itself
    leaves, structure = flatten(tree)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, TensorMeta):
            start, end = end, end + leaf.shape.numel() * leaf.dtype.itemsize
            # Cloned as bytes: where the values begin need not be a place for a number of their dtype.
            values = message[start:end].clone().view(leaf.dtype)
            leaves[place] = values.reshape(leaf.shape).to(leaf.device(device))
    return unflatten(structure, leaves)


def _in_rows(messages: list[Tensor]) -> Tensor:
    rows = messages[0].new_zeros(len(messages), max(map(len, messages)))
    for row, message in zip(rows, messages, strict=True):
        row[: message.numel()] = message
    return rows


def _checked_parts(parts: Any, communicator: Communicator) -> Sequence[Any]:
    request = f"scatter(parts, ...) on rank {communicator.rank} of {communicator.size}"
    expected = f"a list or tuple of {communicator.size} objects, by rank"
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        raise ArgumentTypeError(request, f"parts is a {type(parts).__name__}", expected, "list(x), or x.unbind(0)")
    if len(parts) != communicator.size:
        raise ConfigurationError(request, f"there are {len(parts)} parts", expected, "one part for each rank")
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
