"""The reductions by name, and which of them have a meaning for which dtype."""

from typing import Any

import torch
import torch.distributed as dist

from fabric.collectives.base import Parcel
from fabric.communicators import Reduce
from fabric.errors import ConfigurationError
from fabric.tree import Structure, leaf_paths

__all__ = ["check_reduction", "parse_reduce_op"]

_NAMES = {"mean": Reduce.MEAN, "avg": Reduce.MEAN} | {op.value: op for op in Reduce if op is not Reduce.MEAN}
_TORCH_OPS = {
    dist.ReduceOp.AVG: Reduce.MEAN,
    dist.ReduceOp.SUM: Reduce.SUM,
    dist.ReduceOp.MIN: Reduce.MIN,
    dist.ReduceOp.MAX: Reduce.MAX,
    dist.ReduceOp.PRODUCT: Reduce.PRODUCT,
    dist.ReduceOp.BAND: Reduce.BAND,
    dist.ReduceOp.BOR: Reduce.BOR,
    dist.ReduceOp.BXOR: Reduce.BXOR,
}
_BITWISE = (Reduce.BAND, Reduce.BOR, Reduce.BXOR)


def parse_reduce_op(op: Any) -> Reduce:
    """A reduction from its name, in any case, or from a :class:`torch.distributed.ReduceOp`.

    Raises:
        ConfigurationError: there is no such reduction; the text lists those there are.
    """
    if isinstance(op, Reduce):
        return op
    if isinstance(op, str) and op.lower() in _NAMES:
        return _NAMES[op.lower()]
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        for torch_op, reduce in _TORCH_OPS.items():
            if op == torch_op:
                return reduce
    raise ConfigurationError(
        f"reduce_op={op!r}",
        "there is no such reduction",
        ", ".join(map(repr, _NAMES)) + ", or one of these as a torch.distributed.ReduceOp",
        'reduce_op="mean"',
    )


def check_reduction(operation: str, op: Reduce, parcel: Parcel, structure: Structure) -> None:
    """Raise a ConfigurationError, which names a leaf and what to write, for a reduction that has no meaning."""
    if (refusal := _refusal(op, parcel)) is None:
        return
    place = next((p for p, v in zip(parcel.places, parcel.tensors, strict=True) if v.requires_grad), None)
    place = min([*parcel.places, *parcel.number_places], default=0) if place is None else place
    leaf = leaf_paths(structure)[place] or "the tensor or number"
    raise ConfigurationError(f"{operation}(..., reduce_op={op.value!r}) of {leaf} ({parcel.dtype})", *refusal)


def _refusal(op: Reduce, parcel: Parcel) -> tuple[str, str, str] | None:
    """What is wrong, what is valid and what to write instead; None when all is well."""
    dtype = parcel.dtype
    if dtype is torch.bool and op in (Reduce.MEAN, Reduce.SUM, Reduce.PRODUCT):
        return (
            f"booleans have no {op.value}",
            '"min" (true on all ranks), "max" (true on any rank), and the bitwise reductions',
            "x.long() for a count, x.float() for a mean",
        )
    if op is Reduce.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        return (
            "the mean of integers is not an integer",
            '"sum", "min", "max", "product" for integers',
            'reduce_op="sum", or float(x) for a mean',
        )
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return f"{op.value} is over bits", "integers and booleans for bitwise reductions", "x.long(), or x > 0"
    if dtype is torch.uint64 and op in (Reduce.MIN, Reduce.MAX):
        return (
            f"no backend carries uint64, and as int64 its {op.value} is another",
            '"sum" and "product" for uint64',
            "x.long(), for values below 2**63",
        )
    if dtype.is_complex and op in (Reduce.MIN, Reduce.MAX, Reduce.PRODUCT):
        lack = "have no product over ranks in torch" if op is Reduce.PRODUCT else f"have no {op.value}"
        return (
            f"complex numbers {lack}",
            '"mean" and "sum" for complex numbers',
            "fabric.all_gather(x).prod(0), or x.abs()",
        )
    if op in (Reduce.MIN, Reduce.MAX, Reduce.PRODUCT) and torch.is_grad_enabled() and parcel.requires_grad():
        return (
            f"the {op.value} over ranks has no gradient, and this tensor requires one",
            '"mean" and "sum" for tensors that require a gradient',
            "x.detach()",
        )
    return None
