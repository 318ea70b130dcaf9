"""The reductions: their names, torch's operations, and what they do to two tensors."""

import functools
from collections.abc import Callable, Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from fabric.errors import ConfigurationError

__all__ = ["Reduce"]


class Reduce(Enum):
    """What a reduction does to the values of the ranks; the mean is the sum divided by the number of ranks.

    The bitwise ones are for integers and booleans. ``Reduce(x)`` takes a name in any case, ``"avg"`` too, and a
    :class:`torch.distributed.ReduceOp`; for anything else it raises a :class:`fabric.errors.ConfigurationError`.

    Attributes:
        combine: what it does to the values of two ranks.
    """

    _value_: str
    combine: Callable[[Tensor, Tensor], Tensor]

    MEAN = "mean", torch.add
    SUM = "sum", torch.add
    MIN = "min", torch.minimum
    MAX = "max", torch.maximum
    PRODUCT = "product", torch.mul
    BAND = "band", torch.bitwise_and
    BOR = "bor", torch.bitwise_or
    BXOR = "bxor", torch.bitwise_xor

    def __new__(cls, name: str, combine: Callable[[Tensor, Tensor], Tensor]) -> "Reduce":  # noqa: D102
        member = object.__new__(cls)
        member._value_, member.combine = name, combine
        return member

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        """The reduction of one tensor of each rank, in the order of ranks; a new tensor."""
        total = functools.reduce(self.combine, tensors[1:], tensors[0].clone())
        return total / len(tensors) if self is Reduce.MEAN else total

    @classmethod
    def _missing_(cls, value: object) -> "Reduce":
        if value is None:
            return cls.MEAN
        is_torch_op = isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)
        for op in cls:
            name = "AVG" if op is cls.MEAN else op.name
            if isinstance(value, str) and value.lower() in (op.value, name.lower()):
                return op
            if is_torch_op and value == getattr(dist.ReduceOp, name):
                return op
        raise ConfigurationError(
            f"reduce_op={value!r}",
            "there is no such reduction",
            f"{', '.join(repr(op.value) for op in cls)}, 'avg', or one of these as a torch.distributed.ReduceOp",
            'reduce_op="mean"',
        )
