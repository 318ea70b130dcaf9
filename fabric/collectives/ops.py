"""The collectives over collections of tensors and numbers: reductions, gathers, exchanges, broadcast.

See :class:`fabric.Fabric` for what each operation means. All are collectives over the ranks of a communicator, with
collections of the same structure, shapes and dtypes on all of them; nothing writes into the arguments.
"""

from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fabric.collectives.autograd import run_differentiable
from fabric.collectives.buckets import Bucket, as_number, pack, pack_chunks
from fabric.collectives.objects import TensorMeta, raise_first
from fabric.communicators import CallDescription, Collective, Communicator, NonMember, Operation, Reduce
from fabric.errors import ConfigurationError, FabricError
from fabric.tree import Structure, flatten, leaf_paths, unflatten

__all__ = [
    "all_gather",
    "all_gather_ragged",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "new_group",
    "reduce_scatter",
]


def all_reduce(communicator: Communicator, tree: Any, op: Reduce, *, numbers: bool = True) -> Any:
    """See :meth:`fabric.Fabric.all_reduce`; Python numbers take part if ``numbers``."""
    leaves, structure = flatten(tree)
    buckets = pack(leaves, structure, numbers)
    grads = torch.is_grad_enabled()  # where gradients are computed it is off
    call = CallDescription("all_reduce", lambda: f"{op.value} of {_signature(tree, grads, numbers)}")
    _check_reduction(op, buckets, structure, call)
    return _run(communicator, Operation.ALL_REDUCE, buckets, leaves, structure, call, op=op)


def reduce_scatter(communicator: Communicator, tree: Any, op: Reduce) -> Any:
    """See :meth:`fabric.Fabric.reduce_scatter`."""
    leaves, structure = flatten(tree)
    buckets = pack_chunks(leaves, structure, communicator.size, "reduce_scatter")
    grads = torch.is_grad_enabled()
    call = CallDescription("reduce_scatter", lambda: f"{op.value} of {_signature(tree, grads)}")
    _check_reduction(op, buckets, structure, call)
    return _run(communicator, Operation.REDUCE_SCATTER, buckets, leaves, structure, call, op=op)


def all_to_all(communicator: Communicator, tree: Any) -> Any:
    """See :meth:`fabric.Fabric.all_to_all`."""
    leaves, structure = flatten(tree)
    buckets = pack_chunks(leaves, structure, communicator.size, "all_to_all")
    grads = torch.is_grad_enabled()
    call = CallDescription("all_to_all", lambda: _signature(tree, grads))
    return _run(communicator, Operation.ALL_TO_ALL, buckets, leaves, structure, call, ranks=communicator.size)


def all_gather(communicator: Communicator, tree: Any, *, sync_grads: bool = False) -> Any:
    """See :meth:`fabric.Fabric.all_gather`; tensors of shape ``s`` become ``(size, *s)``, numbers lists."""
    leaves, structure = flatten(tree)
    buckets = pack(leaves, structure)
    grads = sync_grads and torch.is_grad_enabled()
    call = CallDescription("all_gather", lambda: f"{sync_grads=} of {_signature(tree, grads)}")
    ranks, detach = communicator.size, not sync_grads
    return _run(communicator, Operation.ALL_GATHER, buckets, leaves, structure, call, ranks=ranks, detach=detach)


def broadcast(communicator: Communicator, tree: Any, src: int, device: torch.device) -> Any:
    """See :meth:`fabric.Fabric.broadcast`.

    Args:
        communicator: the ranks.
        tree: the object; only that of rank ``src`` counts. But where the sender's tensor requires a gradient, and this
            rank passes one that is like it, this rank's gets a gradient too, of zeros.
        src: rank of the sender in the communicator.
        device: this process's device, where tensors arrive that were on an accelerator at the sender.
    """
    communicator.check_rank(src, "broadcast", "src")
    call = CallDescription("broadcast", lambda: f"{src=}")
    error: FabricError | None = None
    if communicator.rank == src:
        leaves, structure = flatten(tree)
        try:
            pack(leaves, structure, numbers=False, opaque=True)
        except FabricError as refused:
            error = refused
        metas = [TensorMeta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        communicator.broadcast_object((error, None if error else unflatten(structure, metas)), src, call)
    else:
        error, received = communicator.broadcast_object(None, src, call)
        leaves, structure = flatten(received)
        _allocate(leaves, tree, device)
    if error is not None:
        raise error
    buckets = pack(leaves, structure, numbers=False, opaque=True)
    return _run(communicator, Operation.BROADCAST, buckets, leaves, structure, call, src=src)


def all_gather_ragged(communicator: Communicator, tree: Any, *, sync_grads: bool = False, concat: bool = False) -> Any:
    """See :meth:`fabric.Fabric.all_gather` with ``ragged`` or ``concat``.

    Costs an exchange of the shapes besides one collective for each dtype, which is as long as the longest.

    Raises:
        ConfigurationError: ranks differ in structure, dtype, the shape behind dim 0, or whether a gradient is required;
            or a leaf cannot travel. All ranks raise it.
    """
    leaves, structure = flatten(tree)
    own: list[_Part] | FabricError = []
    try:
        pack(leaves, structure)
        own = [_part(leaf, path, sync_grads) for path, leaf in zip(leaf_paths(structure), leaves, strict=True)]
    except FabricError as error:
        own = error
    call = CallDescription("all_gather", lambda: f"{sync_grads=} of ragged, {concat=}")
    parts = raise_first(communicator.gather_objects(own, call))
    _check_same(parts, communicator.rank)
    lengths = {
        place: [of_rank[place][2][0] for of_rank in parts]
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    for place, of_ranks in lengths.items():
        leaf = leaves[place]
        leaves[place] = torch.cat([leaf, leaf.new_zeros(max(of_ranks) - len(leaf), *leaf.shape[1:])])
    gathered = all_gather(communicator, leaves, sync_grads=sync_grads)
    for place, rows in enumerate(gathered):
        if isinstance(rows, Tensor):
            of_ranks = lengths.get(place)
            cut = rows if of_ranks is None else [row[:n] for row, n in zip(rows, of_ranks, strict=True)]
            joined = rows if of_ranks is None else torch.cat(list(cut))
            gathered[place] = joined if concat else [row.clone() for row in cut]
    return unflatten(structure, gathered)


def barrier(communicator: Communicator, name: str | None = None) -> None:
    """See :meth:`fabric.Fabric.barrier`."""
    communicator.barrier(name or "unnamed")


def new_group(communicator: Communicator, ranks: Sequence[int]) -> Communicator | NonMember:
    """See :meth:`fabric.Fabric.new_group`."""
    members = list(ranks)
    return communicator.new_group(members) or NonMember(members)


def _run(
    communicator: Communicator,
    operation: Operation,
    buckets: Sequence[Bucket],
    leaves: list[Any],
    structure: Structure,
    call: CallDescription,
    *,
    op: Reduce | None = None,
    src: int | None = None,
    ranks: int | None = None,
    detach: bool = False,
) -> Any:
    """One collective for each bucket; the collection of the results, which have a dimension for ``ranks`` if given."""
    for bucket in buckets:
        buffer = bucket.buffer(communicator.device, detach, op is Reduce.MEAN)
        collective = Collective(operation, buffer, op, src, call=call)
        tracked = buffer.requires_grad and torch.is_grad_enabled()
        result = run_differentiable(communicator, collective) if tracked else communicator.run(collective)
        bucket.unpack(result, leaves, ranks)
    return unflatten(structure, leaves)


def _signature(tree: Any, grads: bool, numbers: bool = True) -> str:
    """A text of what has to agree over ranks: structure, shapes, dtypes and, if ``grads``, what requires a gradient.

    A rank whose tensor requires none would not take part in the collective of the backward pass.
    """
    leaves, structure = flatten(tree)
    parts = []
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if isinstance(leaf, Tensor):
            grad = " with gradient" if grads and leaf.requires_grad else ""
            parts.append(f"{path} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{grad}".lstrip())
        elif numbers and (found := as_number(leaf)) is not None:
            parts.append(f"{path} {type(found[0]).__name__}".lstrip())
    return ", ".join(parts)


# -- reductions: what has a meaning -----------------------------------------------------------------------------------

_BITWISE = (Reduce.BAND, Reduce.BOR, Reduce.BXOR)
_ORDERED = (Reduce.MIN, Reduce.MAX, Reduce.PRODUCT)  # and without a gradient
_requires_grad = attrgetter("requires_grad")


def _check_reduction(op: Reduce, buckets: Sequence[Bucket], structure: Structure, call: CallDescription) -> None:
    """Raise a ConfigurationError, which names a leaf and what to write, for a reduction that has no meaning."""
    for bucket in buckets:
        tracked = op in _ORDERED and torch.is_grad_enabled() and any(map(_requires_grad, bucket.tensors))
        problem = _problem(op, bucket.dtype, tracked)
        if problem is not None:
            trained = [place for place, leaf in zip(bucket.places, bucket.tensors, strict=True) if leaf.requires_grad]
            place = min(trained or [*bucket.places, *bucket.number_places], default=0)
            leaf = leaf_paths(structure)[place] or "the tensor or number"
            raise ConfigurationError(
                f"{call.operation}(..., reduce_op={op.value!r}) of {leaf} ({bucket.dtype})", *problem
            )


def _problem(op: Reduce, dtype: torch.dtype, tracked: bool) -> tuple[str, str, str] | None:
    """Why a reduction has no meaning for a dtype, what has, and what to write instead; None where it has one."""
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if dtype is torch.bool and op in (Reduce.MEAN, Reduce.SUM, Reduce.PRODUCT):
        expected = '"min" (true on all ranks), "max" (true on any rank), and the bitwise reductions'
        return f"booleans have no {op.value}", expected, "x.long() for a count, x.float() for a mean"
    if op is Reduce.MEAN and not is_inexact:
        expected = '"sum", "min", "max", "product" for integers'
        return "the mean of integers is not an integer", expected, 'reduce_op="sum", or float(x) for a mean'
    if op in _BITWISE and is_inexact:
        return f"{op.value} is over bits", "integers and booleans for bitwise reductions", "x.long(), or x > 0"
    if dtype is torch.uint64 and op in (Reduce.MIN, Reduce.MAX):
        problem = f"no backend carries uint64, and as int64 its {op.value} is another"
        return problem, '"sum" and "product" for uint64', "x.long(), for values below 2**63"
    if dtype.is_complex and op in _ORDERED:
        problem = f"complex numbers have no {op.value} over ranks"
        return problem, '"mean" and "sum" for complex numbers', "fabric.all_gather(x).prod(0), or x.abs()"
    if tracked and op in _ORDERED:
        problem = f"the {op.value} over ranks has no gradient, and this tensor requires one"
        return problem, '"mean" and "sum" for tensors that require a gradient', "x.detach()"
    return None


# -- broadcast: tensors to receive into -------------------------------------------------------------------------------


def _allocate(leaves: list[Any], passed: Any, device: torch.device) -> None:
    """Put tensors to receive into in the places of metas; those that were passed, if a gradient has to reach them."""
    metas = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, TensorMeta)}
    own: list[Any] = []
    if any(meta.requires_grad for meta in metas.values()):
        own, _ = flatten(passed)
    for place, meta in metas.items():
        fits = meta.requires_grad and len(own) == len(leaves) and meta.describes(own[place])
        leaves[place] = own[place] if fits else meta.empty(device)


# -- ragged gathers ---------------------------------------------------------------------------------------------------

# What the other ranks have to know of a leaf: its path, kind (empty for what does not travel), shape, and whether it
# requires a gradient. All but the length along dim 0 has to be the same on all.
_Part = tuple[str, str, tuple[int, ...], bool]


def _part(leaf: Any, path: str, sync_grads: bool) -> _Part:
    if isinstance(leaf, Tensor):
        tracked = sync_grads and torch.is_grad_enabled() and leaf.requires_grad
        return path, str(leaf.dtype), tuple(leaf.shape), tracked
    number = as_number(leaf)
    return path, "" if number is None else type(number[0]).__name__, (), False


def _check_same(parts: Sequence[Sequence[_Part]], rank: int) -> None:
    def without_length(part: _Part | None) -> Any:
        return part and (*part[:2], len(part[2]), *part[2][1:], part[3])

    for other, theirs in enumerate(parts):
        for zero, this in zip_longest(parts[0], theirs):
            if without_length(zero) != without_length(this):
                raise ConfigurationError(
                    f"all_gather(...) of different lengths on rank {rank}",
                    f"rank 0 has {_in_words(zero)}, rank {other} has {_in_words(this)}",
                    "the same structure and dtypes on all ranks, and the same shape behind dim 0",
                    "x.reshape(-1, *shape) or x.to(dtype) before the call; fabric.gather(x) takes anything",
                )


def _in_words(part: _Part | None) -> str:
    if part is None:
        return "nothing more"
    path, kind, shape, tracked = part
    size = f" of shape {shape}" if kind.startswith("torch") else ""
    return f"{path} {kind}{size}{', requires grad' * tracked}".lstrip()
