"""The collectives over collections of tensors and numbers: reductions, gathers, exchanges, broadcast.

See :class:`fabric.Fabric` for what each operation means. All are collectives over the ranks of a communicator, with
collections of the same structure, shapes and dtypes on all of them; nothing writes into the arguments.

[Note: Gradients] A gradient through a collective is that of the sum over ranks of each rank's local loss: the backward
of an all-reduce is the same all-reduce, that of an all-gather a reduce-scatter of the sum and the other way round, that
of an all-to-all an all-to-all, that of a broadcast the sum over ranks, which arrives at the source. They can be
differentiated again. Every rank has to go through the backward pass, as it went through the forward pass. A leaf that
required no gradient is returned without one, whatever it was sent with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from fabric.collectives.buckets import Bucket, describe, pack, pack_chunks
from fabric.collectives.objects import TensorMeta
from fabric.communicators import Collective, Communicator, Operation, Reduce
from fabric.communicators.base import BITWISE, ORDERED, CallDescription, as_fabric_error
from fabric.errors import ConfigurationError
from fabric.tree import Structure, flatten, leaf_paths, unflatten

__all__ = [
    "all_gather",
    "all_gather_ragged",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
]

Sent = tuple[Bucket, Tensor]  # and its buffer


def all_reduce(communicator: Communicator, tree: Any, op: Reduce, *, numbers: bool = True) -> Any:
    """See :meth:`fabric.Fabric.all_reduce`; Python numbers take part if ``numbers``."""
    return _exchange(communicator, Operation.ALL_REDUCE, tree, op, numbers=numbers)


def reduce_scatter(communicator: Communicator, tree: Any, op: Reduce) -> Any:
    """See :meth:`fabric.Fabric.reduce_scatter`."""
    return _exchange(communicator, Operation.REDUCE_SCATTER, tree, op)


def all_to_all(communicator: Communicator, tree: Any) -> Any:
    """See :meth:`fabric.Fabric.all_to_all`."""
    return _exchange(communicator, Operation.ALL_TO_ALL, tree)


def all_gather(communicator: Communicator, tree: Any, *, sync_grads: bool = False) -> Any:
    """See :meth:`fabric.Fabric.all_gather`; tensors of shape ``s`` become ``(size, *s)``, numbers lists."""
    return _exchange(communicator, Operation.ALL_GATHER, tree, sync_grads=sync_grads)


def broadcast(communicator: Communicator, tree: Any, src: int, device: torch.device) -> Any:
    """See :meth:`fabric.Fabric.broadcast`.

    Args:
        communicator: the ranks.
        tree: the object; only that of rank ``src`` counts. But where the sender's tensor requires a gradient, and this
            rank passes one that is like it, this rank's gets a gradient too, of zeros.
        src: rank of the sender in the communicator.
        device: this process's device, where tensors arrive that were on an accelerator at the sender.
    """
    call = CallDescription("broadcast", lambda: f"{src=}")
    error = None
    metas = None
    leaves, structure = flatten(None)
    if communicator.rank == src:
        try:
            leaves, structure = flatten(tree)
            pack(leaves, structure, numbers=False, opaque=True)
            metas = unflatten(
                structure,
                [TensorMeta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            )
        except Exception as caught:  # noqa: BLE001 - raised on all ranks
            error = as_fabric_error(caught)
    received = communicator.broadcast_object(metas, src, call, error)
    if communicator.rank != src:
        leaves, structure = flatten(received)
        _allocate(leaves, tree, device)
    buckets = pack(leaves, structure, numbers=False, opaque=True)
    sent = [(bucket, bucket.buffer(communicator.device)) for bucket in buckets]
    _run(communicator, Collective(Operation.BROADCAST, peer=src, call=call), sent, leaves)
    return unflatten(structure, leaves)


def all_gather_ragged(
    communicator: Communicator, tree: Any, *, sync_grads: bool = False, concat: bool = False
) -> Any:
    """See :meth:`fabric.Fabric.all_gather` with ``ragged`` or ``concat``.

    Costs an exchange of the lengths besides one collective for each dtype, which is as long as the longest.
    """
    with _raised_everywhere(communicator, Operation.ALL_GATHER):
        leaves, structure = flatten(tree)
        text = describe(
            structure,
            leaves,
            pack(leaves, structure),
            sync_grads and torch.is_grad_enabled(),
            ragged=True,
        )
    signed = f"all_gather({concat=}, {text})"
    call = CallDescription(
        "all_gather", lambda: f"{sync_grads=} of ragged, {concat=}, {text}", signed, True
    )
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]
    own = torch.tensor(
        [len(leaves[place]) for place in places], dtype=torch.int64, device=communicator.device
    )
    of_all = communicator.run(Collective(Operation.ALL_GATHER, own, call=call)).tolist()
    lengths = dict(zip(places, zip(*of_all, strict=True), strict=True))
    for place, of_ranks in lengths.items():
        leaf = leaves[place]
        leaves[place] = torch.cat(
            [leaf, leaf.new_zeros(max(of_ranks) - len(leaf), *leaf.shape[1:])]
        )
    gathered = _exchange(
        communicator, Operation.ALL_GATHER, leaves, sync_grads=sync_grads, signed=False
    )
    for place, rows in enumerate(gathered):
        if isinstance(rows, Tensor):
            if place in lengths:
                rows = [row[:n] for row, n in zip(rows, lengths[place], strict=True)]
                rows = torch.cat(rows) if concat else rows
            gathered[place] = rows if concat else [row.clone() for row in rows]
    return unflatten(structure, gathered)


def _exchange(
    communicator: Communicator,
    operation: Operation,
    tree: Any,
    op: Reduce | None = None,
    *,
    numbers: bool = True,
    sync_grads: bool = True,
    signed: bool = True,
) -> Any:
    """One collective for each dtype of a collection, which is like it on all ranks."""
    signed &= communicator.size > 1
    with _raised_everywhere(communicator, operation):
        leaves, structure = flatten(tree)
        if operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL):
            buckets = pack_chunks(leaves, structure, communicator.size, operation.value)
        else:
            buckets = pack(leaves, structure, numbers)
        if op is not None:
            _check_reduction(op, buckets, structure, operation)
        sent = [(bucket, bucket.buffer(communicator.device, op)) for bucket in buckets]
    head = f"{op.value} of " if op else ""
    options = f"{sync_grads=} of " if operation is Operation.ALL_GATHER else head
    grads = sync_grads and torch.is_grad_enabled()  # where gradients are computed it is off
    call = CallDescription(
        operation.value,
        lambda: options + describe(structure, leaves, buckets, grads),
        f"{operation.value}({head}{describe(structure, leaves, buckets)})" if signed else None,
        any(bucket.numbers for bucket in buckets),
    )
    template = Collective(operation, reduce=op, call=call)
    _run(communicator, template, sent, leaves, detach=not sync_grads)
    if op is Reduce.PRODUCT:
        factors = [
            float(number)
            for bucket in buckets
            if bucket.dtype is torch.int64
            for number in bucket.numbers
        ]
        # So close to the limit, a float does not tell on which side of it the product is.
        if factors and any(
            abs(product) > 0.999 * 2**63 for product in all_reduce(communicator, factors, op)
        ):
            raise ConfigurationError(
                "a product of Python integers", "it is beyond 64 bits", suggestion="float(x)"
            )
    return unflatten(structure, leaves)


def _run(
    communicator: Communicator,
    template: Collective,
    sent: list[Sent],
    leaves: list[Any],
    detach: bool = False,
) -> None:
    """Make one collective for each bucket, the first one signed, and put the results in the places of the leaves."""
    ranks = (
        communicator.size
        if template.operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL)
        else None
    )
    while sent:
        bucket, buffer = sent.pop(0)  # which is let go as soon as its results have been copied
        collective = template._replace(buffer=buffer.detach())
        tracked = buffer.requires_grad and not detach
        result = (
            _Differentiable.apply(communicator, collective, buffer)
            if tracked
            else communicator.run(collective)
        )
        bucket.unpack(result, leaves, ranks)
        template = template._replace(call=template.call and template.call._replace(text=None))


@contextmanager
def _raised_everywhere(communicator: Communicator, operation: Operation) -> Iterator[None]:
    """Let the other ranks raise too where this one cannot make its call."""
    try:
        yield
    except Exception as error:
        if communicator.size == 1:
            raise
        problem = f"nothing: {type(error).__name__}: {error}"
        nothing = torch.zeros(0, dtype=torch.uint8, device=communicator.device)
        call = CallDescription(operation.value, lambda: problem, "", True)
        with suppress(Exception):  # this rank's own error is the one to raise
            communicator.run(Collective(Operation.ALL_GATHER, nothing, call=call))
        raise


def _allocate(leaves: list[Any], passed: Any, device: torch.device) -> None:
    """Put tensors to receive into in the places of metas; those that were passed, if a gradient has to reach them."""
    metas = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, TensorMeta)}
    own = flatten(passed)[0]
    for place, meta in metas.items():
        fits = meta.requires_grad and len(own) == len(leaves) and meta.describes(own[place])
        leaves[place] = own[place] if fits else meta.empty(device)


# -- reductions: what has a meaning -----------------------------------------------------------------------------------


def _check_reduction(
    op: Reduce, buckets: Sequence[Bucket], structure: Structure, operation: Operation
) -> None:
    """Raise a ConfigurationError, which names a leaf and what to write, for a reduction that has no meaning."""
    for bucket in buckets:
        tensors = (
            zip(bucket.places, bucket.tensors, strict=True)
            if op in ORDERED and torch.is_grad_enabled()
            else ()
        )
        trained = [place for place, leaf in tensors if leaf.requires_grad]
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
            problem = f"no backend carries uint64, and as int64 its {op.value} is another"
            suggestion = "x.long(), for values below 2**63"
        elif dtype.is_complex and op in ORDERED:
            problem = f"complex numbers have no {op.value} over ranks"
            suggestion = "fabric.all_gather(x).prod(0), or x.abs()"
        elif trained:
            problem = f"the {op.value} over ranks has no gradient, and this tensor requires one"
            suggestion = "x.detach()"
        else:
            continue
        place = min(trained or [*bucket.places, *bucket.number_places], default=0)
        leaf = leaf_paths(structure)[place] or "the tensor or number"
        request = f"{operation.value}(..., reduce_op={op.value!r}) of {leaf} ({dtype})"
        raise ConfigurationError(request, problem, suggestion=suggestion)


# -- gradients --------------------------------------------------------------------------------------------------------


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, collective: Collective, buffer: Tensor
    ) -> Tensor:
        # The description of the call holds the results, whose graph holds this: a cycle that is never collected.
        ctx.communicator = communicator
        ctx.collective = collective._replace(buffer=None, call=None)
        # A contiguous copy: a gradient of autograd's own may be an expanded view, or be used elsewhere.
        own = (
            buffer.detach()
            .clone(memory_format=torch.contiguous_format)
            .resolve_conj()
            .resolve_neg()
        )
        return communicator.run(collective._replace(buffer=own))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        communicator = ctx.communicator
        collective = ctx.collective
        operation = collective.operation
        op = collective.reduce
        match operation:
            case Operation.ALL_GATHER:
                operation = Operation.REDUCE_SCATTER
                op = Reduce.SUM
            case Operation.REDUCE_SCATTER:
                operation = Operation.ALL_GATHER
            case Operation.BROADCAST:
                operation = Operation.ALL_REDUCE
                op = Reduce.SUM
        grad = _Differentiable.apply(communicator, Collective(operation, grads[0], op), grads[0])
        if collective.operation is Operation.REDUCE_SCATTER and op is Reduce.MEAN:
            grad = grad / communicator.size
        if collective.operation is Operation.BROADCAST and communicator.rank != collective.peer:
            # Zeros that are a part of the graph: all ranks take part in its backward pass.
            grad = grad.masked_fill(torch.ones((), dtype=torch.bool, device=grad.device), 0)
        return None, None, grad
