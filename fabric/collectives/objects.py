"""Objects that one rank sends to another as bytes: scatter, gather, send and receive.

A message is one buffer of bytes with three sections:

- the length of the pickle, in 8 bytes;
- the pickle of the object, in which a :class:`TensorMeta` stands for each tensor;
- the values of the tensors, one after the other.

So the shapes may differ between ranks, and tensors are never pickled. Tensors arrive detached, in
the dtype and shape in which they were sent. A tensor that was on the CPU arrives on the CPU, other
tensors on the device of the receiver. If a rank cannot send its object, it sends the error in place
of the object, and every rank raises the error.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
from fabric.tree import PLAIN_TENSOR_TYPES, Leaf, Tree, check_can_send, flatten, unflatten

__all__ = ["TensorMeta", "gather", "recv", "scatter", "send"]

# The number of bytes of the pickle's length, at the start of a message.
_LENGTH_BYTES = 8


class TensorMeta:
    """The properties of a tensor that a receiver needs before the values arrive.

    It is not a dataclass, since :func:`fabric.tree.flatten` takes dataclasses apart.

    Attributes:
        shape: the shape.
        dtype: the dtype.
        is_on_cpu: whether the sender's tensor is on the CPU, and not on an accelerator.
        requires_grad: whether the sender's tensor requires a gradient, and gradients are enabled.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Describe a tensor of the sender. The object is pickled and sent to the receivers."""
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.is_on_cpu = tensor.device.type == "cpu"
        self.requires_grad = tensor.requires_grad and torch.is_grad_enabled()

    def device_in(self, process_device: torch.device) -> torch.device:
        """Return the device of the tensor in a process whose device is ``process_device``."""
        if self.is_on_cpu:
            return torch.device("cpu")
        return process_device

    def empty(self, process_device: torch.device) -> Tensor:
        """Return a tensor to receive into, in a process whose device is ``process_device``."""
        return torch.empty(
            self.shape,
            dtype=self.dtype,
            device=self.device_in(process_device),
            requires_grad=self.requires_grad,
        )

    def describes(self, leaf: Leaf) -> bool:
        """Return whether ``leaf`` is a dense tensor with these properties."""
        if not isinstance(leaf, Tensor) or type(leaf) not in PLAIN_TENSOR_TYPES:
            return False
        is_dense = leaf.layout is torch.strided
        return is_dense and vars(self) == vars(TensorMeta(leaf))


class _Packed(NamedTuple):
    """A message, and the error that it holds in place of an object that cannot be sent."""

    message: Tensor
    error: FabricError | None = None


def scatter(communicator: Communicator, parts: Any, src: int, device: torch.device) -> Any:
    """Return this rank's part of what rank ``src`` passes. Collective.

    See :meth:`fabric.Fabric.scatter`.

    Args:
        communicator: the ranks.
        parts: the objects by rank. Only the argument of rank ``src`` counts.
        src: the rank of the sender.
        device: the device of this process. Tensors that the sender had on an accelerator arrive on
            this device.

    Raises:
        FabricError: rank ``src`` cannot send its objects. Every rank raises the error.
    """
    communicator.check_rank(Operation.SCATTER, src)
    call = CallDescription("scatter", lambda: f"{src=}")
    rows = None
    row_length = None
    error = None
    if communicator.rank == src:
        try:
            _check_parts(parts, communicator)
            messages = [_pack(part, communicator.device) for part in parts]
            # The rows of a scatter have one length, so the messages are padded.
            # _unpack() ignores the padding.
            rows = pad_sequence(messages, batch_first=True)
            row_length = rows.shape[1]
        except Exception as caught:  # noqa: BLE001 - broadcast_object() raises it on all ranks
            error = as_fabric_error(caught)
    # The other ranks need the length to allocate the row that they receive.
    row_length = communicator.broadcast_object(row_length, src, call=call, error=error)
    output = torch.empty(row_length, dtype=torch.uint8, device=communicator.device)
    message = communicator.scatter(rows, output, src=src, call=call)
    return _unpack(message, device, src)


def gather(
    communicator: Communicator, tree: Tree, dst: int, device: torch.device
) -> list[Tree] | None:
    """Return the objects of all ranks on rank ``dst``, and None on the other ranks. Collective.

    See :meth:`fabric.Fabric.gather`.

    Args:
        communicator: the ranks.
        tree: the object of this rank.
        dst: the rank of the receiver.
        device: the device of this process. Tensors that the senders had on accelerators arrive on
            this device.

    Raises:
        FabricError: a rank cannot send its object, or ranks pass different ``dst``. Every rank
            raises an error.
    """
    communicator.check_rank(Operation.GATHER, dst)
    call = CallDescription("gather", lambda: f"{dst=}")
    message, error = _pack_or_error(tree, communicator.device)
    # If any rank has an error, this call raises it on all ranks.
    lengths_and_destinations = communicator.gather_objects(
        (len(message), dst), call=call, error=error
    )
    lengths = [length for length, _ in lengths_and_destinations]
    destinations = [destination for _, destination in lengths_and_destinations]
    if len(set(destinations)) > 1:
        call_text = f"gather(..., dst={dst}) on rank {communicator.rank}"
        raise peer_mismatch_error(call_text, peers=destinations)
    # The buffers of a gather have one length. _unpack() ignores the padding.
    padded_message = pad(message, (0, max(lengths) - len(message)))
    rows = communicator.gather(padded_message, dst, call)
    if rows is None:
        return None
    return [_unpack(row, device, rank) for rank, row in enumerate(rows)]


def send(communicator: Communicator, tree: Tree, dst: int) -> None:
    """Send an object to rank ``dst``, which has to call :func:`recv`.

    See :meth:`fabric.Fabric.send`. This function may return before the message has arrived.

    Raises:
        FabricError: the object cannot be sent. Rank ``dst`` raises the error, too.
    """
    message, error = _pack_or_error(tree, communicator.device)
    length = torch.tensor([len(message)], device=communicator.device)
    communicator.send(length, dst)
    communicator.send(message, dst)
    # Raised only now: rank ``dst`` waits for the message, which holds the error.
    if error is not None:
        raise error


def recv(communicator: Communicator, src: int, device: torch.device) -> Tree:
    """Return the object that rank ``src`` sends with :func:`send`, or raise its error.

    See :meth:`fabric.Fabric.recv`. Tensors that were on an accelerator arrive on ``device``, the
    device of this process.
    """
    length = torch.empty(1, dtype=torch.int64, device=communicator.device)
    communicator.recv(length, src)
    message = torch.empty(int(length), dtype=torch.uint8, device=communicator.device)
    communicator.recv(message, src)
    return _unpack(message, device, src)


def _pack_or_error(tree: Tree, device: torch.device) -> _Packed:
    """Pack an object into a message. If the object cannot be sent, pack the error in its place.

    The ranks that unpack the message of an error raise the error. This rank gets the error in the
    result, so that it can send the message before it raises.
    """
    try:
        return _Packed(_pack(tree, device))
    except Exception as caught:  # noqa: BLE001 - sent to the other ranks, which raise it
        error = as_fabric_error(caught)
        message = _pack(None, device, error=error)
        return _Packed(message, error=error)


def _pack(tree: Tree, device: torch.device, error: FabricError | None = None) -> Tensor:
    """Return a message on ``device``, a one-dimensional tensor of bytes.

    The message has the length of the pickle in 8 bytes, the pickle with a :class:`TensorMeta` for
    each tensor, and the values of the tensors one after the other.

    Args:
        tree: the object to send.
        device: the device of the communicator.
        error: an error of this rank. If there is one, it takes the place of ``tree`` in the pickle,
            and :func:`_unpack` raises it on the ranks that receive the message.
    """
    leaves, structure = flatten(tree)
    tensors: list[Tensor] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_can_send(leaf, structure, position)
            tensor = leaf.detach()
            tensors.append(tensor)
            leaves[position] = TensorMeta(tensor)
    pickled = to_pickle(unflatten(structure, leaves), error)
    prefix = len(pickled).to_bytes(_LENGTH_BYTES, "little")
    sections = [to_tensor(prefix + pickled).to(device)]
    for tensor in tensors:
        values = tensor.to(device).resolve_conj().resolve_neg().contiguous()
        # The view as bytes needs a stride of 1. A tensor with one element is contiguous whatever
        # its stride is, so neither contiguous() nor reshape() would change the stride.
        flat_values = values.as_strided((values.numel(),), (1,))
        sections.append(flat_values.view(torch.uint8))
    return torch.cat(sections)


def _unpack(message: Tensor, device: torch.device, src: int) -> Tree:
    """Return the object in a message from :func:`_pack` on rank ``src``.

    Args:
        message: the message, which may be padded at the end.
        device: the device of this process, for tensors that were on an accelerator.
        src: the rank of the sender.

    Raises:
        FabricError: the message holds an error in place of an object.
    """
    pickle_length = int.from_bytes(to_bytes(message[:_LENGTH_BYTES]), "little")
    end = _LENGTH_BYTES + pickle_length
    pickled = to_bytes(message[_LENGTH_BYTES:end])
    value = from_pickle(pickled, src)  # raises the FabricError
    leaves, structure = flatten(value)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, TensorMeta):
            start = end
            end = start + leaf.shape.numel() * leaf.dtype.itemsize
            # A view in another dtype needs an aligned address. The clone has one, whereas the
            # section of the message may begin anywhere.
            values = message[start:end].clone().view(leaf.dtype)
            leaves[position] = values.reshape(leaf.shape).to(leaf.device_in(device))
    return unflatten(structure, leaves)


def _check_parts(parts: Any, communicator: Communicator) -> None:
    """Check the argument ``parts`` of :func:`scatter`, on the sender only.

    Raises:
        ArgumentTypeError: ``parts`` is not a sequence. Text is not a sequence here.
        ConfigurationError: ``parts`` does not have one object for each rank.
    """
    call_text = f"scatter(parts, ...) on rank {communicator.rank}"
    expected = f"a list or tuple of {communicator.size} objects, by rank"
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        raise ArgumentTypeError(
            call_text,
            problem=f"parts is a {type(parts).__name__}",
            expected=expected,
            suggestion="list(x), or x.unbind(0)",
        )
    if len(parts) != communicator.size:
        raise ConfigurationError(
            call_text,
            problem=f"there are {len(parts)} parts",
            expected=expected,
            suggestion="one part for each rank",
        )
