"""The collectives over collections of tensors and numbers.

[Note: Buffers] Leaves of one dtype travel in one flat, contiguous buffer and thus in one collective, in the order in
which :func:`fabric.tree.flatten` visits them. The buffer is always a copy: gloo reduces the wrong elements of a
non-contiguous view (pytorch#192920), and nothing here writes into what the caller passed. Python floats travel as
float64 and ints as int64. Dtypes that a backend does not carry travel in one that holds all their values.

[Note: Gradients] A gradient through a collective is that of the sum over ranks of each rank's local loss: the backward
of an all-reduce is the same all-reduce, that of an all-gather is a reduce-scatter of the sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fabric.communicators import Communicator, Reduce
from fabric.errors import ConfigurationError
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = ["all_gather", "all_reduce", "broadcast", "parse_reduce_op"]

_REDUCE_NAMES = {
    "mean": Reduce.MEAN,
    "avg": Reduce.MEAN,
    "sum": Reduce.SUM,
    "min": Reduce.MIN,
    "max": Reduce.MAX,
    "product": Reduce.PRODUCT,
}
_REDUCE_OPS = {
    dist.ReduceOp.AVG: Reduce.MEAN,
    dist.ReduceOp.SUM: Reduce.SUM,
    dist.ReduceOp.MIN: Reduce.MIN,
    dist.ReduceOp.MAX: Reduce.MAX,
    dist.ReduceOp.PRODUCT: Reduce.PRODUCT,
}
# Which dtype carries another; every value survives the way there and back. bool: min is all, max is any.
_CARRIERS = {torch.bool: torch.uint8, torch.uint16: torch.int32, torch.uint32: torch.int64}
_NUMBERS = {float: torch.float64, int: torch.int64, bool: torch.bool}


def parse_reduce_op(op: Any) -> Reduce:
    """A reduction from its name, in any case, or from a :class:`torch.distributed.ReduceOp`.

    Raises:
        ConfigurationError: there is no such reduction; the text lists those there are.
    """
    if isinstance(op, Reduce):
        return op
    if isinstance(op, str) and op.lower() in _REDUCE_NAMES:
        return _REDUCE_NAMES[op.lower()]
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        for torch_op, reduce in _REDUCE_OPS.items():
            if op == torch_op:
                return reduce
    raise ConfigurationError(
        f"reduce_op={op!r}",
        "there is no such reduction",
        ", ".join(repr(name) for name in _REDUCE_NAMES) + ", or one of these as a torch.distributed.ReduceOp",
        'reduce_op="mean"',
    )


def all_reduce(communicator: Communicator, tree: Any, op: Reduce, *, numbers: bool = True) -> Any:
    """Reduce every tensor, and every Python number if ``numbers``, over the ranks.

    Collective: every rank must call it, with collections of the same structure, shapes and dtypes. The arguments are
    not written to. Differentiable for the sum and the mean, see ``[Note: Gradients]``.

    Args:
        communicator: the ranks to reduce over.
        tree: any collection. Tensors may have any shape, strides and device.
        op: integers have no mean, booleans neither mean, sum nor product, complex numbers no order.
        numbers: whether Python numbers take part; if not they come back unchanged.

    Returns:
        The same collection: tensors as new tensors of the same dtype and device, numbers as numbers.

    Raises:
        ConfigurationError: the reduction has no meaning for a leaf; the text names the leaf and what to write.
    """
    leaves, structure = flatten(tree)
    parcels = _pack(leaves, numbers)
    for dtype, parcel in parcels.items():
        _check_reduction(op, dtype, parcel, lambda: leaf_paths(structure))
    for dtype, parcel in parcels.items():
        buffer = parcel.buffer(dtype, communicator.device)
        if buffer.requires_grad:
            reduced = _AllReduce.apply(communicator, op, buffer)
        else:
            reduced = communicator.all_reduce(buffer, op)
        parcel.unpack(reduced, leaves)
    return unflatten(structure, leaves)


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
    """
    leaves, structure = flatten(tree)
    for dtype, parcel in _pack(leaves, numbers=True).items():
        buffer = parcel.buffer(dtype, communicator.device, detach=not sync_grads)
        if buffer.requires_grad:
            gathered = _AllGather.apply(communicator, buffer)
        else:
            gathered = communicator.all_gather(buffer)
        parcel.unpack(gathered, leaves, leading=(communicator.size,))
    return unflatten(structure, leaves)


def broadcast(communicator: Communicator, tree: Any, src: int, device: torch.device) -> Any:
    """Send any object from one rank to all.

    Collective: every rank must call it; what ranks other than ``src`` pass is ignored and may be None. Tensors inside
    collections travel as tensors, never pickled; other leaves have to pickle.

    Args:
        communicator: the ranks that receive.
        tree: the object; only that of rank ``src`` counts.
        src: rank of the sender in the communicator.
        device: this process's device, where tensors arrive that were on an accelerator at the sender.

    Returns:
        On every rank a copy of the sender's object, detached; on ``src`` itself too.
    """
    communicator.check_src(src)
    if communicator.rank == src:
        leaves, structure = flatten(tree)
        headers = [_Header(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        communicator.broadcast_object(unflatten(structure, headers), src)
    else:
        leaves, structure = flatten(communicator.broadcast_object(None, src))
        leaves = [leaf.empty(device) if isinstance(leaf, _Header) else leaf for leaf in leaves]
    for dtype, parcel in _pack(leaves, numbers=False).items():
        parcel.unpack(communicator.broadcast(parcel.buffer(dtype, communicator.device, detach=True), src), leaves)
    return unflatten(structure, leaves)


class _Header:
    """What a receiver has to know of a tensor before it comes; no dataclass, since those are collections."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tensor.shape, tensor.dtype, tensor.device.type == "cpu"

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


@dataclass
class _Parcel:
    """The leaves of one dtype, and where they stand among all leaves: the tensors, then the numbers."""

    values: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    number_places: list[int] = field(default_factory=list)

    def requires_grad(self) -> bool:
        return any(value.requires_grad for value in self.values)

    def buffer(self, dtype: torch.dtype, device: torch.device, detach: bool = False) -> Tensor:
        """A fresh flat buffer that holds all leaves."""
        parts = [(value.detach() if detach else value).to(device).reshape(-1) for value in self.values]
        if self.numbers:
            parts.append(torch.tensor(self.numbers, dtype=dtype, device=device))
        flat = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
        return flat.to(_CARRIERS.get(dtype, dtype))

    def unpack(self, buffer: Tensor, leaves: list[Any], leading: tuple[int, ...] = ()) -> None:
        """Put the parts of ``buffer``, of shape ``(*leading, n)``, in the places that the leaves came from."""
        sizes = [value.numel() for value in self.values]
        parts = buffer.split([*sizes, len(self.numbers)], dim=-1) if len(sizes) + len(self.numbers) > 1 else [buffer]
        for place, value, part in zip(self.places, self.values, parts, strict=False):
            leaves[place] = part.to(value.device, value.dtype).reshape((*leading, *value.shape))
        if self.numbers:
            kind = type(self.numbers[0])
            for place, number in zip(self.number_places, parts[-1].movedim(-1, 0).tolist(), strict=True):
                leaves[place] = [kind(one) for one in number] if leading else kind(number)


def _pack(leaves: Sequence[Any], numbers: bool) -> dict[torch.dtype, _Parcel]:
    parcels: dict[torch.dtype, _Parcel] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            parcel = parcels.setdefault(leaf.dtype, _Parcel())
            parcel.values.append(leaf)
            parcel.places.append(place)
        elif numbers and type(leaf) in _NUMBERS:
            parcel = parcels.setdefault(_NUMBERS[type(leaf)], _Parcel())
            parcel.numbers.append(leaf)
            parcel.number_places.append(place)
    return parcels


def _check_reduction(op: Reduce, dtype: torch.dtype, parcel: _Parcel, paths: Callable[[], list[str]]) -> None:
    wrong, valid, instead = "", "", ""
    if dtype is torch.bool and op not in (Reduce.MIN, Reduce.MAX):
        wrong = f"booleans have no {op.value}"
        valid, instead = (
            '"min" (true on all ranks) and "max" (true on any rank)',
            "x.long() for a count, x.float() for a mean",
        )
    elif op is Reduce.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        wrong = "the mean of integers is not an integer"
        valid, instead = '"sum", "min", "max", "product" for integers', 'reduce_op="sum", or float(x) for a mean'
    elif dtype.is_complex and op in (Reduce.MIN, Reduce.MAX):
        wrong = f"complex numbers have no {op.value}"
        valid, instead = '"mean", "sum", "product" for complex numbers', "x.abs()"
    elif op in (Reduce.MIN, Reduce.MAX, Reduce.PRODUCT) and torch.is_grad_enabled() and parcel.requires_grad():
        wrong = f"the {op.value} over ranks has no gradient, and this tensor requires one"
        valid, instead = '"mean" and "sum" for tensors that require a gradient', "x.detach()"
    if wrong:
        place = next((p for p, v in zip(parcel.places, parcel.values, strict=True) if v.requires_grad), None)
        place = min([*parcel.places, *parcel.number_places]) if place is None else place
        leaf = paths()[place] or "the tensor or number"
        raise ConfigurationError(f"all_reduce(..., reduce_op={op.value!r}) of {leaf} ({dtype})", wrong, valid, instead)


class _AllReduce(torch.autograd.Function):
    """A differentiable sum or mean over ranks; ``buffer`` is a fresh copy and is left as it is."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, op: Reduce, buffer: Tensor) -> Tensor:
        ctx.communicator, ctx.op = communicator, op
        return communicator.all_reduce(buffer.detach().clone(), op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.communicator.all_reduce(_fresh(grads[0]), ctx.op)


class _AllGather(torch.autograd.Function):
    """A differentiable gathering of flat buffers into ``(size, n)``."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, buffer: Tensor) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_gather(buffer.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.communicator.reduce_scatter(_fresh(grads[0]), Reduce.SUM)


def _fresh(grad: Tensor) -> Tensor:
    """A contiguous copy: autograd's own may be an expanded view, or be used elsewhere."""
    return grad.clone(memory_format=torch.contiguous_format)
