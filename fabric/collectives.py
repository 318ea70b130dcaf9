"""The collectives over collections of tensors and numbers.

[Note: Buffers] Leaves of one dtype travel in one flat, contiguous buffer and thus in one collective, in the order in
which :func:`fabric.tree.flatten` visits them. The buffer is always a copy: gloo reduces the wrong elements of a
non-contiguous view (pytorch#192920), and nothing here writes into what the caller passed. Results are copies out of it
again: one that is kept, saved or changed has nothing to do with the others. Python floats travel as float64, ints as
int64, complex numbers as complex128. Dtypes that a backend does not carry travel in one that holds all their values,
and 16-bit floats whose mean is taken in float32, since their sum may overflow where the mean does not.

[Note: Gradients] A gradient through a collective is that of the sum over ranks of each rank's local loss: the backward
of an all-reduce is the same all-reduce, that of an all-gather is a reduce-scatter of the sum. They can be
differentiated again. A leaf that required no gradient comes back without one, whatever it travelled with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Complex, Integral, Real
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fabric.communicators import Communicator, Reduce
from fabric.errors import ConfigurationError
from fabric.tree import Structure, flatten, leaf_paths, unflatten

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
# uint64 wraps around on both ways, as its sums and products do.
_CARRIERS = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}
_MEAN_CARRIERS = {
    **_CARRIERS,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_NUMBERS = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
# The numbers of other libraries, numpy's for one. In this order: each kind is one of the later kinds too.
_OTHER_NUMBERS: tuple[tuple[type, type[int] | type[float] | type[complex]], ...] = (
    (Integral, int),
    (Real, float),
    (Complex, complex),
)
_INT64 = range(-(2**63), 2**63)


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
        op: integers have no mean, booleans neither mean, sum nor product, complex numbers neither
            order nor product.
        numbers: whether Python numbers take part; if not they come back unchanged.

    Returns:
        The same collection: tensors as new tensors of the same dtype and device, numbers as numbers. What is neither
        comes back unchanged.

    Raises:
        ConfigurationError: the reduction has no meaning for a leaf, or the leaf cannot travel; the text names the leaf
            and what to write.
    """
    leaves, structure = flatten(tree)
    parcels = _pack(leaves, structure, numbers)
    carriers = _MEAN_CARRIERS if op is Reduce.MEAN else _CARRIERS
    for dtype, parcel in parcels.items():
        _check_reduction(op, dtype, parcel, lambda: leaf_paths(structure))
    for dtype, parcel in parcels.items():
        buffer = parcel.buffer(dtype, communicator.device).to(carriers.get(dtype, dtype))
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

    Raises:
        ConfigurationError: a leaf cannot travel; the text names it and what to write.
    """
    leaves, structure = flatten(tree)
    for dtype, parcel in _pack(leaves, structure, numbers=True).items():
        buffer = parcel.buffer(dtype, communicator.device, detach=not sync_grads).to(_CARRIERS.get(dtype, dtype))
        if buffer.requires_grad:
            gathered = _AllGather.apply(communicator, buffer)
        else:
            gathered = communicator.all_gather(buffer)
        parcel.unpack(gathered, leaves, leading=(communicator.size,))
    return unflatten(structure, leaves)


def broadcast(communicator: Communicator, tree: Any, src: int, device: torch.device) -> Any:
    """Send any object from one rank to all.

    Collective: every rank must call it; what ranks other than ``src`` pass is ignored and may be None. Tensors inside
    collections travel as tensors, never pickled; other leaves have to pickle. An object that does not travel raises
    on every rank.

    Args:
        communicator: the ranks that receive.
        tree: the object; only that of rank ``src`` counts.
        src: rank of the sender in the communicator.
        device: this process's device, where tensors arrive that were on an accelerator at the sender.

    Returns:
        On every rank a copy of the sender's collection, detached; on ``src`` itself too, where leaves that are not
        tensors are those that were passed.

    Raises:
        ConfigurationError: there is no rank ``src``, or a tensor cannot travel.
        ArgumentTypeError: a leaf does not pickle.
    """
    communicator.check_src(src)
    if communicator.rank == src:
        leaves, structure = flatten(tree)
        _announce(communicator, leaves, structure, src)
    else:
        announced = communicator.broadcast_object(None, src)
        if isinstance(announced, ConfigurationError):
            raise announced
        leaves, structure = flatten(announced)
        leaves = [leaf.empty(device) if isinstance(leaf, _Header) else leaf for leaf in leaves]
    for dtype, parcel in _pack(leaves, structure, numbers=False).items():
        buffer = parcel.buffer(dtype, communicator.device, detach=True).to(_CARRIERS.get(dtype, dtype))
        parcel.unpack(communicator.broadcast(buffer, src), leaves)
    return unflatten(structure, leaves)


def _announce(communicator: Communicator, leaves: list[Any], structure: Structure, src: int) -> None:
    """Tell the receivers what will come, or why nothing can."""
    try:
        _pack(leaves, structure, numbers=False)
    except ConfigurationError as error:
        communicator.broadcast_object(error, src)
        raise
    headers = [_Header(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    communicator.broadcast_object(unflatten(structure, headers), src)


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
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts)

    def unpack(self, buffer: Tensor, leaves: list[Any], leading: tuple[int, ...] = ()) -> None:
        """Put the parts of ``buffer``, of shape ``(*leading, n)``, in the places that the leaves came from."""
        sizes = [value.numel() for value in self.values]
        if self.numbers:
            sizes.append(len(self.numbers))
        parts = [part.clone() for part in buffer.split(sizes, dim=-1)] if len(sizes) > 1 else [buffer]
        for place, value, part in zip(self.places, self.values, parts, strict=False):
            if buffer.requires_grad and not value.requires_grad:
                part = part.detach()
            leaves[place] = part.to(value.device, value.dtype).reshape((*leading, *value.shape))
        if self.numbers:
            kind = type(self.numbers[0])
            for place, number in zip(self.number_places, parts[-1].movedim(-1, 0).tolist(), strict=True):
                leaves[place] = [kind(one) for one in number] if leading else kind(number)


def _pack(leaves: Sequence[Any], structure: Structure, numbers: bool) -> dict[torch.dtype, _Parcel]:
    parcels: dict[torch.dtype, _Parcel] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_meta:
                _refuse_tensor(leaf, leaf_paths(structure)[place])
            parcel = parcels.setdefault(leaf.dtype, _Parcel())
            parcel.values.append(leaf)
            parcel.places.append(place)
        elif numbers and (found := _number(leaf)) is not None:
            number, dtype = found
            if dtype is torch.int64 and number not in _INT64:
                _refuse_number(number, leaf_paths(structure)[place])
            parcel = parcels.setdefault(dtype, _Parcel())
            parcel.numbers.append(number)
            parcel.number_places.append(place)
    return parcels


def _number(leaf: Any) -> tuple[Any, torch.dtype] | None:
    """A leaf as a Python number, and the dtype in which it travels; None when it is no number."""
    if type(leaf) in _NUMBERS:
        return leaf, _NUMBERS[type(leaf)]
    for abstract, kind in _OTHER_NUMBERS:
        if isinstance(leaf, abstract):
            return None if isinstance(leaf, Enum) else (kind(leaf), _NUMBERS[kind])
    return None


def _refuse_tensor(tensor: Tensor, path: str) -> NoReturn:
    raise ConfigurationError(
        f"a collective over {path or 'a tensor'} of shape {tuple(tensor.shape)}",
        f"it is {'on the meta device and has no values' if tensor.is_meta else f'laid out as {tensor.layout}'}",
        "dense tensors on a device",
        "module.to_empty(device=fabric.device)" if tensor.is_meta else "x.to_dense()",
    )


def _refuse_number(number: int, path: str) -> NoReturn:
    raise ConfigurationError(
        f"a collective over {path or 'a number'} = {number}",
        "it does not fit in the 64 bits in which integers travel",
        "integers from -2**63 to 2**63 - 1",
        "float(x), which is exact to 53 bits",
    )


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
    elif dtype is torch.uint64 and op in (Reduce.MIN, Reduce.MAX):
        wrong = f"no backend carries uint64, and as int64 its {op.value} is another"
        valid, instead = '"sum" and "product" for uint64', "x.long(), for values below 2**63"
    elif dtype.is_complex and op in (Reduce.MIN, Reduce.MAX, Reduce.PRODUCT):
        lack = "have no product over ranks in torch" if op is Reduce.PRODUCT else f"have no {op.value}"
        wrong = f"complex numbers {lack}"
        valid, instead = '"mean" and "sum" for complex numbers', "fabric.all_gather(x).prod(0), or x.abs()"
    elif op in (Reduce.MIN, Reduce.MAX, Reduce.PRODUCT) and torch.is_grad_enabled() and parcel.requires_grad():
        wrong = f"the {op.value} over ranks has no gradient, and this tensor requires one"
        valid, instead = '"mean" and "sum" for tensors that require a gradient', "x.detach()"
    if wrong:
        place = next((p for p, v in zip(parcel.places, parcel.values, strict=True) if v.requires_grad), None)
        place = min([*parcel.places, *parcel.number_places]) if place is None else place
        leaf = paths()[place] or "the tensor or number"
        raise ConfigurationError(f"all_reduce(..., reduce_op={op.value!r}) of {leaf} ({dtype})", wrong, valid, instead)


class _AllReduce(torch.autograd.Function):
    """A differentiable sum or mean over ranks, of a tensor that is left as it is."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, op: Reduce, buffer: Tensor) -> Tensor:
        ctx.communicator, ctx.op = communicator, op
        return communicator.all_reduce(_fresh(buffer), op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _AllReduce.apply(ctx.communicator, ctx.op, grads[0])


class _AllGather(torch.autograd.Function):
    """A differentiable gathering of flat buffers into ``(size, n)``."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, buffer: Tensor) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_gather(buffer.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _ReduceScatter.apply(ctx.communicator, grads[0])


class _ReduceScatter(torch.autograd.Function):
    """The backward pass of :class:`_AllGather`, differentiable itself: ``(size, n)`` summed into this rank's row."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, rows: Tensor) -> Tensor:
        ctx.communicator = communicator
        return communicator.reduce_scatter(_fresh(rows), Reduce.SUM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _AllGather.apply(ctx.communicator, grads[0])


def _fresh(tensor: Tensor) -> Tensor:
    """A contiguous copy: a gradient of autograd's own may be an expanded view, or be used elsewhere."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
