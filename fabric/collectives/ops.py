"""Reductions, gathers, exchanges and broadcasts of collections of tensors and numbers.

See :class:`fabric.Fabric` for the meaning of each operation. Collective: all ranks of the
communicator must call these functions, with collections of the same structure, shapes and dtypes.
Nothing writes into the arguments.
"""

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fabric._torch import current_transform
from fabric.collectives.buckets import (
    SMALL_INTEGERS,
    Bucket,
    describe,
    fits_dtype,
    pack,
    pack_chunks,
)
from fabric.collectives.objects import TensorMeta
from fabric.communicators import Collective, Communicator, Operation, Reduce
from fabric.communicators.base import BITWISE, MIN_MAX_PRODUCT, CallDescription, as_fabric_error
from fabric.errors import ConfigurationError
from fabric.tree import Leaf, Structure, Tree, flatten, leaf_paths, unflatten

__all__ = [
    "all_gather",
    "all_gather_ragged",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "sum_overflow_error",
]


def all_reduce(communicator: Communicator, tree: Tree, op: Reduce, *, numbers: bool = True) -> Tree:
    """Reduce a collection over the ranks. Collective. See :meth:`fabric.Fabric.all_reduce`.

    Python numbers are reduced, too, unless ``numbers`` is False.
    """
    # Shortcuts for a single metric, the most frequent call of a training loop. _exchange() returns
    # the same results, and takes twice as many steps.
    if communicator.size > 1 and op not in BITWISE:
        if numbers and type(tree) is float:
            return _all_reduce_float(communicator, tree, op)
        if type(tree) is Tensor and _is_plain_scalar(tree, communicator.device):
            return _all_reduce_scalar(communicator, tree, op)
    return _exchange(communicator, Operation.ALL_REDUCE, tree, op, sends_numbers=numbers)


def reduce_scatter(communicator: Communicator, tree: Tree, op: Reduce) -> Tree:
    """Reduce chunks over the ranks, and return the chunk of this rank. Collective.

    See :meth:`fabric.Fabric.reduce_scatter`.
    """
    return _exchange(communicator, Operation.REDUCE_SCATTER, tree, op)


def all_to_all(communicator: Communicator, tree: Tree) -> Tree:
    """Send a chunk to each rank, and return the received chunks. Collective.

    See :meth:`fabric.Fabric.all_to_all`.
    """
    return _exchange(communicator, Operation.ALL_TO_ALL, tree)


def all_gather(communicator: Communicator, tree: Tree, *, sync_grads: bool = False) -> Tree:
    """Gather the collections of all ranks. Collective. See :meth:`fabric.Fabric.all_gather`.

    Tensors of shape ``s`` become tensors of shape ``(size, *s)``, and numbers become lists.
    """
    return _exchange(communicator, Operation.ALL_GATHER, tree, sync_grads=sync_grads)


def broadcast(communicator: Communicator, tree: Tree, src: int, device: torch.device) -> Tree:
    """Return the object of rank ``src`` on every rank. Collective.

    See :meth:`fabric.Fabric.broadcast`. The object is sent in two steps: first the structure with a
    :class:`TensorMeta` for each tensor, then the tensors.

    Args:
        communicator: the ranks.
        tree: the object. Only the object of rank ``src`` counts, with one exception: if a tensor of
            the sender requires a gradient, and this rank passes a tensor of the same description,
            the tensor of this rank gets a gradient of zeros.
        src: the rank of the sender in the communicator.
        device: the device of this process. Tensors that the sender had on an accelerator arrive on
            this device.

    Raises:
        FabricError: rank ``src`` cannot send its object. Every rank raises the error.
    """
    call = CallDescription("broadcast", arguments=lambda: f"{src=}")
    is_source = communicator.rank == src
    error = None
    tree_of_metas = None
    # Values for a source that cannot send its object. broadcast_object() then raises its error.
    leaves, structure = flatten(None)
    buckets: list[Bucket] = []
    if is_source:
        try:
            leaves, structure = flatten(tree)
            # Only tensors are packed. Everything else is sent with the structure.
            buckets = pack(leaves, structure, sends_numbers=False, allows_opaque=True)
            tree_of_metas = unflatten(structure, _describe_tensors(leaves))
        except Exception as caught:  # noqa: BLE001 - broadcast_object() raises it on all ranks
            error = as_fabric_error(caught)
    received = communicator.broadcast_object(tree_of_metas, src, call=call, error=error)
    if not is_source:
        leaves, structure = flatten(received)
        # Each tensor has the dtype and shape of the sender's tensor. So the buckets have the same
        # order and lengths as those of the sender.
        leaves = _allocate_tensors(leaves, tree, device)
        buckets = pack(leaves, structure, sends_numbers=False, allows_opaque=True)
    buffers: list[Tensor] = []
    for bucket in buckets:
        buffers.append(bucket.new_buffer(communicator.device))
    # Replaces the tensors among the leaves by the received ones.
    _run_for_buckets(
        communicator, Operation.BROADCAST, buffers, buckets, leaves, peer=src, call=call
    )
    return unflatten(structure, leaves)


def all_gather_ragged(
    communicator: Communicator, tree: Tree, *, sync_grads: bool = False, concat: bool = False
) -> Tree:
    """Gather collections whose first dimensions differ between ranks. Collective.

    See :meth:`fabric.Fabric.all_gather` with ``ragged`` or ``concat``. The ranks exchange the
    lengths of their tensors, pad the tensors to the greatest length, and then make one collective
    for each dtype.

    Args:
        communicator: the ranks.
        tree: the collection of this rank.
        sync_grads: whether gradients flow through the collective. Default: False.
        concat: whether to concatenate the tensors of all ranks. Default: False, which returns a
            list of tensors in place of each tensor.
    """
    try:
        leaves, structure = flatten(tree)
        buckets = pack(leaves, structure)
        has_grads = sync_grads and torch.is_grad_enabled()
        description = describe(structure, leaves, buckets, has_grads, is_ragged=True)
    except Exception as error:
        # The other ranks wait for a call of this rank. They get the error instead.
        _answer_with_error(communicator, Operation.ALL_GATHER, error)
        raise
    call = CallDescription(
        "all_gather",
        # For errors and hang reports.
        arguments=lambda: f"ragged=True, {concat=}, {sync_grads=}, {description}",
        # The ranks compare this text while they exchange the lengths.
        signature_text=f"all_gather({concat=}, {description})",
        # The lengths are read at once, since the padding below depends on them.
        reads_result=True,
    )
    lengths_by_position = _gather_lengths(communicator, leaves, call)
    for position, lengths in lengths_by_position.items():
        leaf = leaves[position]
        padding = leaf.new_zeros(max(lengths) - len(leaf), *leaf.shape[1:])
        leaves[position] = torch.cat([leaf, padding])
    # is_signed=False: the ranks have compared their calls above, in _gather_lengths().
    gathered = _exchange(
        communicator, Operation.ALL_GATHER, leaves, sync_grads=sync_grads, is_signed=False
    )
    for position, rows in enumerate(gathered):
        # Tensors were padded. A number has become the list of the ranks' numbers, and stays so.
        if isinstance(rows, Tensor):
            lengths_of_ranks = lengths_by_position.get(position)  # None for a 0-dim tensor
            gathered[position] = _cut_rows(rows, lengths_of_ranks, concat)
    return unflatten(structure, gathered)


def _gather_lengths(
    communicator: Communicator, leaves: list[Leaf], call: CallDescription
) -> dict[int, list[int]]:
    """Return the lengths, on all ranks, of each tensor along its first dimension. Collective.

    Args:
        communicator: the ranks.
        leaves: the leaves of a ragged collection, as many on all ranks.
        call: the user's call. The message with the lengths also has the signature of the call, so
            that this function raises an error if the calls of the ranks differ.

    Returns:
        The lengths in rank order, by the position of the leaf. 0-dim tensors are left out.
    """
    positions = []
    lengths = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            positions.append(position)
            lengths.append(len(leaf))
    buffer = torch.tensor(lengths, dtype=torch.int64, device=communicator.device)
    rows = communicator.run(Collective(Operation.ALL_GATHER, buffer, call=call))
    # From one row per rank to one row per leaf.
    lengths_of_leaves = rows.t().tolist()
    return dict(zip(positions, lengths_of_leaves, strict=True))


def _cut_rows(
    rows: Tensor, lengths_of_ranks: list[int] | None, concat: bool
) -> Tensor | list[Tensor]:
    """Return the gathered tensors of all ranks without their padding.

    Args:
        rows: the padded tensors, one for each rank.
        lengths_of_ranks: the length of each tensor. None for 0-dim tensors, which have no padding.
        concat: whether to concatenate the tensors.
    """
    # Tensors in a list are clones, so that a change of one result does not change the others.
    if lengths_of_ranks is None:
        if concat:
            return rows  # the numbers of all ranks, in one dimension
        return [row.clone() for row in rows]
    tensors = [row[:length] for row, length in zip(rows, lengths_of_ranks, strict=True)]
    if concat:
        return torch.cat(tensors)
    return [tensor.clone() for tensor in tensors]


def _exchange(
    communicator: Communicator,
    operation: Operation,
    tree: Tree,
    op: Reduce | None = None,
    *,
    sends_numbers: bool = True,
    sync_grads: bool = True,
    is_signed: bool = True,
) -> Tree:
    """Make one collective for each dtype of a collection, and return the results. Collective.

    The structure of the collection is the same on all ranks.

    Args:
        communicator: the ranks.
        operation: the collective.
        tree: the collection.
        op: the reduction. None if the operation has no reduction.
        sends_numbers: whether Python numbers take part. Default: True.
        sync_grads: whether gradients flow through the collective. Default: True.
        is_signed: whether the first message carries a signature, by which the ranks notice that
            their calls differ. Default: True.
    """
    try:
        packed = _pack_for_exchange(communicator, operation, tree, op, sends_numbers)
    except Exception as error:
        # The other ranks wait for a call of this rank. They get the error instead.
        _answer_with_error(communicator, operation, error)
        raise
    # A single rank has nothing to compare.
    is_signed = is_signed and communicator.size > 1
    call = _describe_call(operation, packed, op, sync_grads=sync_grads, is_signed=is_signed)
    # Replaces the leaves in the buckets by their results.
    _run_for_buckets(
        communicator,
        operation,
        packed.buffers,
        packed.buckets,
        packed.leaves,
        op,
        call=call,
        detach=not sync_grads,
    )
    if op is Reduce.PRODUCT:
        _check_product_of_integers(communicator, packed.buckets)
    return unflatten(packed.structure, packed.leaves)


class _PackedTree(NamedTuple):
    """A collection that is ready to be sent.

    Attributes:
        leaves: the leaves of the collection. The results replace the leaves that are sent.
        structure: the structure of the collection.
        buckets: the leaves that are sent, one bucket for each dtype.
        buffers: the buffer of each bucket.
    """

    leaves: list[Leaf]
    structure: Structure
    buckets: list[Bucket]
    buffers: list[Tensor]


def _pack_for_exchange(
    communicator: Communicator,
    operation: Operation,
    tree: Tree,
    op: Reduce | None,
    sends_numbers: bool,
) -> _PackedTree:
    """Check and pack the collection of :func:`_exchange`, whose arguments these are.

    Not a collective.

    Raises:
        ConfigurationError: a leaf cannot be sent, or the reduction is not defined for the leaf.
    """
    leaves, structure = flatten(tree)
    if operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL):
        buckets = pack_chunks(leaves, structure, communicator.size, operation.value)
    else:
        buckets = pack(leaves, structure, sends_numbers)
    if op is not None:
        _check_reduction(op, buckets, structure, operation)
    buffers = [bucket.new_buffer(communicator.device, op) for bucket in buckets]
    return _PackedTree(leaves, structure, buckets, buffers)


def _describe_call(
    operation: Operation,
    packed: _PackedTree,
    op: Reduce | None,
    *,
    sync_grads: bool,
    is_signed: bool,
) -> CallDescription:
    """Return the description of a call, for errors, hang reports and signatures.

    Args:
        operation: the collective.
        packed: the collection of this rank, before the collective runs.
        op: the reduction. None if the operation has no reduction.
        sync_grads: whether gradients flow through the collective.
        is_signed: whether the first message carries a signature.
    """
    leaves, structure, buckets, _ = packed
    reduction_text = "" if op is None else f"{op} of "
    # For reports and for checked mode, which compares which tensors require a gradient. The
    # signature leaves this out: without a backward pass, a difference does no harm. Autograd's mode
    # is read here, because describe_arguments() may be called later, while autograd is off.
    has_grads = sync_grads and torch.is_grad_enabled()

    def describe_arguments() -> str:
        """Return the arguments of the call, for errors and reports."""
        options_text = reduction_text
        if operation is Operation.ALL_GATHER:
            options_text = f"{sync_grads=} of "
        return options_text + describe(structure, leaves, buckets, has_grads)

    signature_text = None
    if is_signed:
        signature_text = f"{operation}({reduction_text}{describe(structure, leaves, buckets)})"
    # Results for Python numbers are read from the device at once, so the call waits for the device.
    # Results for tensors stay on the device.
    reads_result = any(bucket.numbers for bucket in buckets)
    return CallDescription(
        operation,
        arguments=describe_arguments,
        signature_text=signature_text,
        reads_result=reads_result,
    )


def _call_with_one_leaf(op: Reduce, leaf_text: str, reads_result: bool) -> CallDescription:
    """Return the description that :func:`_describe_call` makes for an all-reduce of one leaf.

    Args:
        op: the reduction.
        leaf_text: the text of the leaf, as :func:`fabric.collectives.buckets.describe` returns it.
        reads_result: whether the result is read from the device at once.
    """
    arguments = f"{op} of {leaf_text}"
    return CallDescription(
        Operation.ALL_REDUCE,
        arguments=lambda: arguments,
        signature_text=f"{Operation.ALL_REDUCE}({arguments})",
        reads_result=reads_result,
    )


# Made once, since making a description takes longer than copying a number.
_CALLS_WITH_ONE_FLOAT: dict[Reduce, CallDescription] = {}
_CALLS_WITH_ONE_SCALAR: dict[tuple[Reduce, torch.dtype], CallDescription] = {}
for _op in (Reduce.MEAN, Reduce.SUM, *MIN_MAX_PRODUCT):
    _CALLS_WITH_ONE_FLOAT[_op] = _call_with_one_leaf(_op, "1 float64", reads_result=True)
    _CALLS_WITH_ONE_SCALAR[_op, torch.float32] = _call_with_one_leaf(
        _op, "1 float32[]", reads_result=False
    )
    _CALLS_WITH_ONE_SCALAR[_op, torch.float64] = _call_with_one_leaf(
        _op, "1 float64[]", reads_result=False
    )


def _all_reduce_float(communicator: Communicator, number: float, op: Reduce) -> float:
    """Reduce a Python float over at least two ranks. Collective."""
    # Faster than torch.tensor(), which looks at the type of the number.
    buffer = torch.frombuffer(array("d", (number,)), dtype=torch.float64)
    buffer = buffer.to(communicator.device)
    call = _CALLS_WITH_ONE_FLOAT[op]  # describes the call for signatures and errors
    result = communicator.run(Collective(Operation.ALL_REDUCE, buffer, op, call=call))
    (reduced,) = result.tolist()  # item() would run an operator of torch
    return reduced


def _is_plain_scalar(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor needs nothing of :func:`_exchange` but the collective itself.

    It is a 0-dim float without a gradient on the device of the collective, outside of transforms.
    """
    return (
        tensor.dim() == 0
        and not tensor.requires_grad
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.device == device
        and tensor.layout is torch.strided
        and current_transform() is None
        and unpack_dual(tensor).tangent is None
    )


def _all_reduce_scalar(communicator: Communicator, scalar: Tensor, op: Reduce) -> Tensor:
    """Reduce a tensor for which :func:`_is_plain_scalar` is true. Collective."""
    call = _CALLS_WITH_ONE_SCALAR[op, scalar.dtype]
    # A copy, since some collectives write to their buffer.
    buffer = scalar.reshape(1).clone()
    result = communicator.run(Collective(Operation.ALL_REDUCE, buffer, op, call=call))
    return result.reshape(())


def _run_for_buckets(
    communicator: Communicator,
    operation: Operation,
    buffers: list[Tensor],
    buckets: Sequence[Bucket],
    leaves: list[Leaf],
    op: Reduce | None = None,
    *,
    peer: int | None = None,
    call: CallDescription,
    detach: bool = False,
) -> None:
    """Make one collective for each bucket, and replace the leaves by the results. Collective.

    Args:
        communicator: the ranks.
        operation: the collective.
        buffers: the buffer of each bucket. The list is emptied, so that the memory of a buffer is
            freed as soon as its results have been copied.
        buckets: the buckets.
        leaves: the leaves of the collection. The list is changed in place.
        op: the reduction. None, the default, if the operation has no reduction.
        peer: the source of a broadcast. None, the default, for other operations.
        call: the call of the user. Only the first collective sends its signature.
        detach: whether to cut the results off from the graph. Default: False.

    Raises:
        ConfigurationError: a sum is beyond the range of its dtype. Every rank that gets this sum
            raises the error, after the collectives of all buckets.
    """
    # The results of these two operations have a row for each rank, which unpack() separates.
    num_ranks = None
    if operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL):
        num_ranks = communicator.size
    is_sum_of_ranks = op is Reduce.SUM and communicator.size > 1
    overflow_error = None
    for position, bucket in enumerate(buckets):
        if position > 0:
            # The first collective has compared the calls. Without a text, no signature is sent.
            call = call._replace(signature_text=None)
        buffer = buffers.pop(0)
        if detach and buffer.requires_grad:
            buffer = buffer.detach()
        collective = Collective(operation, buffer, op, peer, call=call)
        if buffer.requires_grad:
            # Records the collective in the graph. The backward pass makes a collective, too.
            result = _Differentiable.apply(communicator, collective, buffer)
        else:
            result = communicator.run(collective)
        # Small integers are sent and added up in a wider dtype, in which the sum is right.
        may_overflow = is_sum_of_ranks and bucket.dtype in SMALL_INTEGERS
        if may_overflow and not fits_dtype(result, bucket.dtype):
            overflow_error = sum_overflow_error(operation.value, bucket.dtype)
        bucket.unpack(result, leaves, num_ranks)
    # Raised after the loop, since other ranks may have no overflow, and then make all collectives.
    if overflow_error is not None:
        raise overflow_error


def _answer_with_error(communicator: Communicator, operation: Operation, error: Exception) -> None:
    """Make the other ranks raise an error, since this rank cannot make its call. Collective.

    Otherwise the other ranks would wait for this rank forever. This rank answers their first
    message with a signature that matches no call. Afterwards, the caller raises ``error``.

    Args:
        communicator: the ranks.
        operation: the call of this rank.
        error: the error that was raised while this rank prepared the call.
    """
    if communicator.size == 1:
        return
    # Shown in reports in place of the call's arguments.
    arguments_text = f"nothing: {type(error).__name__}: {error}"
    buffer = torch.zeros(0, dtype=torch.uint8, device=communicator.device)
    # The signature of an empty text matches no other. reads_result=True makes all ranks compare the
    # signatures in this call, and not in a later one. See [Note: Signatures] in
    # communicators/checked.py.
    call = CallDescription(
        operation.value, arguments=lambda: arguments_text, signature_text="", reads_result=True
    )
    # Any operation will do here: the message with the signature has one size for all operations,
    # and nothing follows it if the signatures differ.
    mismatched_collective = Collective(Operation.ALL_GATHER, buffer, call=call)
    # run() raises the error of the mismatch, or torch's error for a lost rank. The error of the
    # caller says more.
    with suppress(RuntimeError):
        communicator.run(mismatched_collective)


def _describe_tensors(leaves: list[Leaf]) -> list[Leaf]:
    """Return the leaves with a :class:`TensorMeta` in place of each tensor."""
    described = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            leaf = TensorMeta(leaf)
        described.append(leaf)
    return described


def _allocate_tensors(
    sent_leaves: list[Leaf], local_tree: Tree, device: torch.device
) -> list[Leaf]:
    """Return the leaves of the source, with a tensor in place of each :class:`TensorMeta`.

    Called on a rank that receives. The values of the source will be written to the tensors.

    Args:
        sent_leaves: the leaves that the source sent.
        local_tree: the collection that this rank passed. Receivers may pass anything, such as None.
            If a tensor of the source requires a gradient, and this collection has a tensor with the
            same description in this position, this tensor is used, so that it gets a gradient.
        device: the device of new tensors.
    """
    local_leaves, _ = flatten(local_tree)
    has_same_length = len(local_leaves) == len(sent_leaves)
    leaves: list[Leaf] = []
    for position, sent_leaf in enumerate(sent_leaves):
        if not isinstance(sent_leaf, TensorMeta):
            leaves.append(sent_leaf)
            continue
        may_use_local_leaf = sent_leaf.requires_grad and has_same_length
        if may_use_local_leaf and sent_leaf.describes(local_leaves[position]):
            leaves.append(local_leaves[position])
        else:
            leaves.append(sent_leaf.empty(device))
    return leaves


# -- reductions that are not defined ---------------------------------------------------------------


def _check_reduction(
    op: Reduce, buckets: Sequence[Bucket], structure: Structure, operation: Operation
) -> None:
    """Check that a reduction is defined for all leaves. Not a collective.

    Args:
        op: the reduction.
        buckets: the buckets of all leaves to be reduced.
        structure: the structure of the collection, for the name of a leaf in the error.
        operation: the user's call, for the error.

    Raises:
        ConfigurationError: the reduction has no meaning. The error names a leaf and a remedy.
    """
    for bucket in buckets:
        positions_with_gradient: list[int] = []
        # Minimum, maximum and product have no gradient over ranks.
        if op in MIN_MAX_PRODUCT and torch.is_grad_enabled():
            positions_with_gradient = _positions_with_gradient(bucket)
        dtype = bucket.dtype
        is_inexact = dtype.is_floating_point or dtype.is_complex
        if dtype is torch.bool and op in (Reduce.MEAN, Reduce.SUM, Reduce.PRODUCT):
            problem = f"booleans have no {op.value}"
            suggestion = '"min" for all, "max" for any; x.long() or x.float() for a count'
        elif op is Reduce.MEAN and not is_inexact:
            problem = "the mean of integers is not an integer"
            suggestion = 'reduce_op="sum", or float(x) for a mean'
        elif op in BITWISE and is_inexact:
            problem = f"{op.value} is over the bits of integers and booleans"
            suggestion = "x.long(), or x > 0"
        elif dtype is torch.uint64 and op in (Reduce.MIN, Reduce.MAX):
            # uint64 travels as int64, where large values are negative.
            problem = (
                f"no backend carries uint64, and the {op.value} of the same bits as int64 differs"
            )
            suggestion = "x.long(), for values below 2**63"
        elif dtype.is_complex and op in MIN_MAX_PRODUCT:
            problem = f"complex numbers have no {op.value} over ranks"
            suggestion = "x.abs()"
            if op is Reduce.PRODUCT:
                suggestion = "fabric.all_gather(x).prod(0)"
        elif positions_with_gradient:
            problem = f"the {op.value} over ranks has no gradient, and this tensor requires one"
            suggestion = "x.detach()"
        else:
            continue
        # The error names the first leaf with a gradient or, if there is none, the first leaf.
        positions = positions_with_gradient
        if not positions:
            positions = [*bucket.tensor_positions, *bucket.number_positions]
        first_position = min(positions)
        # The path is empty if the collection is a single leaf.
        leaf = leaf_paths(structure)[first_position] or "the tensor or number"
        request = f"{operation.value}(..., reduce_op={op.value!r}) of {leaf} ({dtype})"
        raise ConfigurationError(request, problem=problem, suggestion=suggestion)


def _positions_with_gradient(bucket: Bucket) -> list[int]:
    """Return the positions, among all leaves, of the tensors that require a gradient."""
    positions = []
    for position, tensor in zip(bucket.tensor_positions, bucket.tensors, strict=True):
        if tensor.requires_grad:
            positions.append(position)
    return positions


def sum_overflow_error(operation: str, dtype: torch.dtype) -> ConfigurationError:
    """Return the error for a sum over ranks that does not fit into the dtype of the summands."""
    limits = torch.iinfo(dtype)
    return ConfigurationError(
        f"{operation}(..., reduce_op='sum') of {dtype}",
        problem=f"a sum is beyond the range of the dtype, from {limits.min} to {limits.max}",
        suggestion="x.long() in place of x",
    )


def _check_product_of_integers(communicator: Communicator, buckets: Sequence[Bucket]) -> None:
    """Check that the products of Python integers over ranks fit into 64 bits.

    Called after the products have been computed in int64, in which a large product wraps around
    without an error. So this function computes the products again as floats. Collective if there
    are Python integers.

    Raises:
        ConfigurationError: a product is beyond 64 bits. Every rank raises the error.
    """
    factors = []
    for bucket in buckets:
        # The results are not in the bucket: it still has the numbers that this rank has passed.
        if bucket.dtype is torch.int64:
            factors += map(float, bucket.numbers)
    if not factors:
        return
    products = all_reduce(communicator, factors, Reduce.PRODUCT)
    # Products of floats are rounded, and near 2**63 a rounded product may be on the wrong side of
    # the limit. So products up to 0.1 % below 2**63 are refused, too.
    limit = 0.999 * 2**63
    if any(abs(product) > limit for product in products):
        raise ConfigurationError(
            "a product of Python integers", problem="it is beyond 64 bits", suggestion="float(x)"
        )


# -- gradients ------------------------------------------------------------------------------------


# [Note: Gradients]
# A gradient through a collective is the gradient of the sum over ranks of each rank's local loss.
# Every backward pass is itself a collective:
#
# - all-reduce: the same all-reduce;
# - all-gather: a reduce-scatter with a sum;
# - reduce-scatter: an all-gather, divided by the number of ranks if the reduction is a mean;
# - all-to-all: an all-to-all;
# - broadcast: an all-reduce with a sum, whose result only the source uses.
#
# All of them can be differentiated again. Every rank has to run the backward pass if it ran the
# forward pass. A leaf that requires no gradient is returned without a gradient, even if it was sent
# in one buffer with leaves that require a gradient.
class _Differentiable(torch.autograd.Function):
    """A collective whose backward pass is a collective."""

    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, collective: Collective, buffer: Tensor
    ) -> Tensor:
        """Make the collective with a copy of ``buffer``, and return its result. Collective.

        Autograd calls this method within ``apply``. In a backward pass, ``buffer`` is a gradient.

        Args:
            ctx: the context of autograd, in which :meth:`backward` finds the communicator and the
                collective.
            communicator: the ranks.
            collective: the collective. Its field ``buffer`` is not used.
            buffer: the buffer as a part of the graph.
        """
        ctx.communicator = communicator
        # The field `call` is left out: it refers to the results, whose graph refers to ctx, and
        # such a cycle is never collected. The field `buffer` is left out to free its memory.
        ctx.collective = collective._replace(buffer=None, call=None)
        # A copy, since some collectives write to their buffer. The clone is contiguous, which a
        # gradient need not be.
        copied_buffer = buffer.detach().clone(memory_format=torch.contiguous_format)
        copied_buffer = copied_buffer.resolve_conj().resolve_neg()
        return communicator.run(collective._replace(buffer=copied_buffer))

    # See [Note: Gradients].
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        """Return the gradient of ``buffer``, from the gradient of the result. Collective.

        The gradient is that of the sum over ranks of each rank's local loss.
        """
        (grad_of_result,) = grads
        communicator = ctx.communicator
        collective = ctx.collective  # that of the forward pass
        # The backward pass of an all-reduce or an all-to-all is the same collective.
        backward_operation = collective.operation
        backward_reduction = collective.reduce
        match collective.operation:
            case Operation.ALL_GATHER:
                backward_operation = Operation.REDUCE_SCATTER
                backward_reduction = Reduce.SUM
            case Operation.REDUCE_SCATTER:
                backward_operation = Operation.ALL_GATHER
                backward_reduction = None
            case Operation.BROADCAST:
                backward_operation = Operation.ALL_REDUCE
                backward_reduction = Reduce.SUM
        backward_collective = Collective(backward_operation, grad_of_result, backward_reduction)
        # apply() records this collective in the graph, so that the gradient can be differentiated.
        grad = _Differentiable.apply(communicator, backward_collective, grad_of_result)
        is_reduce_scatter = collective.operation is Operation.REDUCE_SCATTER
        if is_reduce_scatter and collective.reduce is Reduce.MEAN:
            # The all-gather does not reduce, so the gradient is divided here.
            grad = grad / communicator.size
        is_broadcast = collective.operation is Operation.BROADCAST
        if is_broadcast and communicator.rank != collective.peer:  # the peer is the source
            # The buffer of this rank has no effect on the result, so its gradient is zero. The
            # zeros are computed from `grad`, so that they are part of the graph: if the gradient is
            # differentiated again, this rank takes part in the collective. They are no product,
            # since NaN times zero is NaN.
            everywhere = torch.ones((), dtype=torch.bool, device=grad.device)
            grad = grad.masked_fill(everywhere, 0)
        # One gradient for each argument of forward(): the first two arguments have none.
        return None, None, grad
