"""Any object from one rank to another, as bytes: scatter, gather, send and receive.

[Note: Messages] A message is one buffer of bytes: the length of a pickle, the pickle, in which each tensor is a
:class:`TensorMeta`, and the values of the tensors one after the other. So the shapes may be others on each rank, and
the tensors are never pickled. They arrive detached, in the dtype and shape that they were sent with, on the CPU if they
were there and else on the receiver's device. What one rank cannot send raises on every rank: an error takes
the place of the object.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fabric.communicators import Communicator, Operation
from fabric.communicators.base import (
    CallDescription,
    as_fabric_error,
    from_pickle,
    peer_mismatch_error,
    to_pickle,
)
from fabric.communicators.process_group import to_bytes, to_tensor
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError
from fabric.tree import PLAIN_TENSOR_TYPES, check_tensor, flatten, unflatten

__all__ = ["TensorMeta", "gather", "recv", "scatter", "send"]

_PREFIX = 8  # bytes that say how long the pickle is


class TensorMeta:
    """What a receiver has to know of a tensor before it arrives; no dataclass, since those are collections."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"
        self.requires_grad = tensor.requires_grad and torch.is_grad_enabled()

    def device(self, own: torch.device) -> torch.device:
        """Where the tensor belongs in a process with this device."""
        return torch.device("cpu") if self.on_cpu else own

    def empty(self, own: torch.device) -> Tensor:
        """A tensor to receive into, in a process with this device."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=self.device(own), requires_grad=self.requires_grad
        )

    def describes(self, leaf: Any) -> bool:
        """Whether this could have been made of ``leaf``, which is a dense tensor."""
        is_dense = (
            isinstance(leaf, Tensor)
            and type(leaf) in PLAIN_TENSOR_TYPES
            and leaf.layout is torch.strided
        )
        return is_dense and vars(self) == vars(TensorMeta(leaf))


def scatter(communicator: Communicator, parts: Any, src: int, device: torch.device) -> Any:
    """See :meth:`fabric.Fabric.scatter`; ``device`` is this process's."""
    communicator.check_rank(Operation.SCATTER, src)
    call = CallDescription("scatter", lambda: f"{src=}")
    rows = None
    error = None
    if communicator.rank == src:
        try:
            _check_parts(parts, communicator)
            rows = pad_sequence(
                [_packed(part, communicator.device) for part in parts], batch_first=True
            )
        except Exception as caught:  # noqa: BLE001 - raised on all ranks
            error = as_fabric_error(caught)
    length = communicator.broadcast_object(rows is not None and rows.shape[1], src, call, error)
    output = torch.empty(length, dtype=torch.uint8, device=communicator.device)
    return _unpacked(communicator.scatter(rows, output, src, call), device, src)


def gather(
    communicator: Communicator, tree: Any, dst: int, device: torch.device
) -> list[Any] | None:
    """See :meth:`fabric.Fabric.gather`; ``device`` is this process's."""
    communicator.check_rank(Operation.GATHER, dst)
    call = CallDescription("gather", lambda: f"{dst=}")
    message, error = _message(tree, communicator.device)
    lengths, named = zip(
        *communicator.gather_objects((len(message), dst), call, error), strict=True
    )
    if len(set(named)) > 1:
        raise peer_mismatch_error(f"gather(..., dst={dst}) on rank {communicator.rank}", named)
    rows = communicator.gather(pad(message, (0, max(lengths) - len(message))), dst, call)
    return None if rows is None else [_unpacked(row, device, rank) for rank, row in enumerate(rows)]


def send(communicator: Communicator, tree: Any, dst: int) -> None:
    """See :meth:`fabric.Fabric.send`; returns when the message is on its way, at the latest when it has arrived."""
    message, error = _message(tree, communicator.device)
    communicator.send(torch.tensor([len(message)], device=communicator.device), dst)
    communicator.send(message, dst)
    if error is not None:
        raise error


def recv(communicator: Communicator, src: int, device: torch.device) -> Any:
    """See :meth:`fabric.Fabric.recv`; ``device`` is this process's."""
    length = int(
        communicator.recv(torch.empty(1, dtype=torch.int64, device=communicator.device), src)
    )
    message = torch.empty(length, dtype=torch.uint8, device=communicator.device)
    return _unpacked(communicator.recv(message, src), device, src)


def _message(tree: Any, device: torch.device) -> tuple[Tensor, FabricError | None]:
    """The message of a collection; that of an error, and the error, where it cannot be sent."""
    try:
        return _packed(tree, device), None
    except Exception as caught:  # noqa: BLE001 - raised on all ranks
        error = as_fabric_error(caught)
        return _packed(None, device, error), error


def _packed(tree: Any, device: torch.device, error: FabricError | None = None) -> Tensor:
    """A message, one-dimensional, of bytes, on ``device``."""
    leaves, structure = flatten(tree)
    tensors: list[Tensor] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, structure, place)
            tensors.append(leaf.detach())
            leaves[place] = TensorMeta(tensors[-1])
    pickled = to_pickle(unflatten(structure, leaves), error)
    parts = [to_tensor(len(pickled).to_bytes(_PREFIX, "little") + pickled).to(device)]
    for tensor in tensors:
        values = tensor.to(device).resolve_conj().resolve_neg().contiguous()
        # Not reshaped: what has fewer than two elements is contiguous with any strides, and would keep them.
        parts.append(values.as_strided((values.numel(),), (1,)).view(torch.uint8))
    return torch.cat(parts)


def _unpacked(message: Tensor, device: torch.device, src: int) -> Any:
    end = _PREFIX + int.from_bytes(to_bytes(message[:_PREFIX]), "little")
    leaves, structure = flatten(from_pickle(to_bytes(message[_PREFIX:end]), src))
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, TensorMeta):
            start = end
            end = end + leaf.shape.numel() * leaf.dtype.itemsize
            # Cloned as bytes: where the values begin need not be a place for a number of their dtype.
            values = message[start:end].clone().view(leaf.dtype)
            leaves[place] = values.reshape(leaf.shape).to(leaf.device(device))
    return unflatten(structure, leaves)


def _check_parts(parts: Any, communicator: Communicator) -> None:
    request = f"scatter(parts, ...) on rank {communicator.rank}"
    expected = f"a list or tuple of {communicator.size} objects, by rank"
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        raise ArgumentTypeError(
            request, f"parts is a {type(parts).__name__}", expected, "list(x), or x.unbind(0)"
        )
    if len(parts) != communicator.size:
        raise ConfigurationError(
            request, f"there are {len(parts)} parts", expected, "one part for each rank"
        )
