"""Buckets: the flat buffers in which the leaves of a collection are sent.

[Note: Buckets] Leaves of one dtype are sent in one flat, contiguous buffer and thus in one collective, in the order in
which :func:`fabric.tree.flatten` visits them. Nothing here writes into what the caller passed, and gloo reduces the
wrong elements of a non-contiguous view (pytorch#192920), so a buffer is a copy wherever it is written to or has strides
of its own. Results are copies out of it again: one that is kept, saved or changed has nothing to do with the others.
0-dim results without a gradient lie side by side in one storage, but each is a tensor of its own, no view. Python
floats travel as float64, ints as int64, complex numbers as complex128. Dtypes that a backend does not carry travel in
one that holds all their values, and 16-bit floats whose mean is taken in float32, since their sum may overflow where
the mean does not.

[Note: Chunks] A tensor of shape ``(size, *s)`` has a chunk of shape ``s`` for each rank. Its buffer has shape
``(size, n)``, so that the chunks of one rank lie together.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from math import prod
from numbers import Complex, Integral, Real
from typing import Any

import torch
from torch import Tensor

from fabric._torch import own_versions
from fabric.communicators import Reduce
from fabric.errors import ConfigurationError
from fabric.tree import Structure, check_opaque, check_tensor, leaf_paths, outline

__all__ = [
    "MEAN_WIRE_DTYPES", "WIRE_DTYPES", "Bucket", "describe", "pack", "pack_chunks",
]  # fmt: skip

# In which dtype another travels; every value survives the way there and back. bool: min is all, max is any.
# uint64 wraps around on both ways, as its sums and products do.
WIRE_DTYPES = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    **{getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
}
MEAN_WIRE_DTYPES = {
    **WIRE_DTYPES,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_NUMBERS = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
# Those of other libraries, numpy's for one. In this order: each kind is one of the later kinds too.
_OTHER_NUMBERS: tuple[tuple[type, type], ...] = ((Integral, int), (Real, float), (Complex, complex))
_ARRAYS = {
    torch.float64: "d",
    torch.int64: "q",
}  # torch reads an array without looking at each number


@dataclass
class Bucket:
    """The leaves of one dtype, and where they stand among all leaves: the tensors, then the numbers.

    Attributes:
        dtype: of the leaves.
        chunks: number of chunks that each tensor has, see ``[Note: Chunks]``; None for tensors that travel whole.
        tensors: the tensors.
        places: where each stands.
        numbers: the Python numbers.
        number_places: where each stands; empty where they are all leaves that there are.
        stacked: the buffer of 0-dim tensors alone, where they could be stacked; else None.
    """

    dtype: torch.dtype
    chunks: int | None = None
    tensors: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    number_places: list[int] = field(default_factory=list)
    stacked: Tensor | None = None

    def buffer(self, device: torch.device, op: Reduce | None = None) -> Tensor:
        """A new buffer that holds all leaves, in the dtype in which they travel; of shape ``(n,)`` or ``(chunks, n)``.

        Args:
            device: where it has to live.
            op: the reduction. With a sum of integers travels that of their upper halves, which does not wrap.
        """
        dtype = (MEAN_WIRE_DTYPES if op is Reduce.MEAN else WIRE_DTYPES).get(self.dtype, self.dtype)
        if self.stacked is not None:
            return self.stacked.to(device, dtype)
        leading = () if self.chunks is None else (self.chunks,)
        parts = [
            tensor.to(device).reshape(*leading, tensor.numel() // prod(leading))
            for tensor in self.tensors
        ]
        if self.numbers:
            is_wide = op is Reduce.SUM and self.dtype is torch.int64
            values = (
                self.numbers + [number >> 32 for number in self.numbers]
                if is_wide
                else self.numbers
            )
            if code := _ARRAYS.get(self.dtype):
                numbers = torch.frombuffer(array(code, values), dtype=self.dtype)
            else:
                numbers = torch.tensor(values, dtype=self.dtype)
            if not parts:
                return numbers.to(device, dtype)
            parts.append(numbers.to(device))
        # A copy also of a single part, with its conjugation carried out.
        return torch.cat(parts, dim=-1).to(dtype)

    def unpack(self, buffer: Tensor, leaves: list[Any], ranks: int | None = None) -> None:
        """Put the parts of a buffer back in the places of their leaves.

        Args:
            buffer: of shape ``(n,)``, or ``(ranks, n)`` if it holds those of several ranks.
            leaves: the list that they are put into.
            ranks: how many; each tensor is then put in with that as its first dimension, each number as a list.
        """
        if self.stacked is not None and not buffer.requires_grad:
            values = buffer.to(self.tensors[0].device, self.dtype)
            values = values if ranks is None else values.t().contiguous()
            with own_versions():
                leaves[:] = values.unbind()
            return
        leading = () if ranks is None else (ranks,)
        sizes = [tensor.numel() // (self.chunks or 1) for tensor in self.tensors]
        is_alone = len(sizes) + bool(self.numbers) == 1
        parts = (
            [buffer] if is_alone else buffer.split([*sizes, buffer.shape[-1] - sum(sizes)], dim=-1)
        )
        for place, tensor, part in zip(self.places, self.tensors, parts, strict=False):
            if buffer.requires_grad and not tensor.requires_grad:
                part = part.detach()
            shape = tensor.shape if self.chunks is None else tensor.shape[1:]
            leaves[place] = part.to(tensor.device, self.dtype, copy=not is_alone).reshape(
                (*leading, *shape)
            )
        if not self.numbers:
            return
        values = parts[-1].bool() if self.dtype is torch.bool else parts[-1]
        numbers = (values if ranks is None else values.t()).tolist()
        if len(numbers) > len(self.numbers):
            numbers = list(map(_whole, numbers, numbers[len(self.numbers) :]))
        if len(numbers) == len(leaves):
            leaves[:] = numbers
            return
        for place, number in zip(self.number_places, numbers, strict=True):
            leaves[place] = number


def pack(
    leaves: list[Any], structure: Structure, numbers: bool = True, opaque: bool = False
) -> list[Bucket]:
    """Sort leaves into one bucket for each dtype, in the order in which the dtypes first occur.

    Args:
        leaves: of a collection. Tensors travel, and Python numbers; what is neither stays where it is.
        structure: of the collection, for error texts.
        numbers: whether Python numbers travel.
        opaque: whether arrays of other libraries, and mappings that are not taken apart, may stay where they are.

    Raises:
        ConfigurationError: a leaf cannot travel, or looks like data and would not.
    """
    kinds = set(map(type, leaves))
    if kinds == {Tensor} and (stacked := _stack(leaves)) is not None:
        return [
            Bucket(
                stacked.dtype, tensors=leaves[:], places=list(range(len(leaves))), stacked=stacked
            )
        ]
    if kinds == {float} and numbers:
        return [Bucket(torch.float64, numbers=leaves[:])]
    buckets: dict[torch.dtype, Bucket] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, structure, place)
            bucket = buckets.setdefault(leaf.dtype, Bucket(leaf.dtype))
            bucket.tensors.append(leaf)
            bucket.places.append(place)
        elif (found := _as_number(leaf)) is not None:
            if numbers:
                number, dtype = found
                if dtype is torch.int64 and not -(2**63) <= number < 2**63:
                    path = leaf_paths(structure)[place] or "a number"
                    raise ConfigurationError(
                        f"a collective over {path}", "it is beyond 64 bits", suggestion="float(x)"
                    )
                bucket = buckets.setdefault(dtype, Bucket(dtype))
                bucket.numbers.append(number)
                bucket.number_places.append(place)
        elif not opaque:
            check_opaque(leaf, structure, place)
    return list(buckets.values())


def pack_chunks(leaves: list[Any], structure: Structure, size: int, operation: str) -> list[Bucket]:
    """:func:`pack` for tensors with a chunk for each rank, see ``[Note: Chunks]``; numbers have none.

    Raises:
        ConfigurationError: as there; or a leaf does not have ``size`` chunks.
    """
    buckets = pack(leaves, structure)
    for bucket in buckets:
        bucket.chunks = size
        bucket.stacked = None
    shapes = [
        tuple(leaf.shape) if isinstance(leaf, Tensor) else () if _as_number(leaf) else (size,)
        for leaf in leaves
    ]
    paths = zip(leaf_paths(structure), shapes, strict=True)
    problems = [
        f"{path or 'it'} is of shape {shape}" for path, shape in paths if shape[:1] != (size,)
    ]
    if problems:
        raise ConfigurationError(
            f"{operation}(...) in a group of {size}",
            f"there is no chunk for each rank: {'; '.join(problems)}",
            f"tensors of shape ({size}, ...), chunk i for rank i",
            f"x.unflatten(0, ({size}, -1)) for a tensor whose length {size} divides; torch.tensor([...]) for numbers",
        )
    return buckets


def describe(
    structure: Structure,
    leaves: list[Any],
    buckets: list[Bucket],
    grads: bool = False,
    ragged: bool = False,
) -> str:
    """What has to agree over ranks: names, then dtype and shape of tensors and the dtype of numbers, in their order.

    A rank whose tensor requires no gradient would not take part in the collective of the backward pass: with ``grads``
    this is said too. Of a ``ragged`` collective the lengths along dim 0 need not agree.
    """
    [only] = buckets if len(buckets) == 1 else [Bucket(torch.bool)]
    if 0 < len(only.numbers) == len(leaves) or (only.stacked is not None and not grads):
        kinds = f"{len(leaves)} {only.dtype}{'' if only.numbers else '[]'}"
    else:
        found = [""] * len(leaves)
        for bucket in buckets:
            for place, tensor in zip(bucket.places, bucket.tensors, strict=True):
                shape = ["*", *tensor.shape[1:]] if ragged and tensor.dim() else list(tensor.shape)
                found[place] = (
                    f"{bucket.dtype}{shape}{' with gradient' * (grads and tensor.requires_grad)}"
                )
            for place in bucket.number_places:
                found[place] = str(bucket.dtype)
        kinds = ", ".join(f"{len(list(run))} {kind}" for kind, run in groupby(found))
    return ": ".join(
        filter(None, (outline(structure), kinds.replace("torch.", "").replace("'*'", "*")))
    )


def _as_number(leaf: Any) -> tuple[Any, torch.dtype] | None:
    """A leaf as a Python number, and the dtype in which it travels; None when it is no number."""
    if type(leaf) in _NUMBERS:
        return leaf, _NUMBERS[type(leaf)]
    for abstract, kind in _OTHER_NUMBERS:
        if isinstance(leaf, abstract):
            return None if isinstance(leaf, Enum) else (kind(leaf), _NUMBERS[kind])
    return None


def _whole(total: int, upper: int) -> int:
    """The sum of integers over ranks, from what 64 bits hold of it and the sum of their upper halves."""
    least = upper << 32  # what the lower halves add is less than 2**64
    return least + (total - least) % 2**64


def _stack(tensors: list[Tensor]) -> Tensor | None:
    """0-dim tensors of one dtype in one, made in few steps: for a thousand metrics these are what costs."""
    if tensors[0].dim() or len({tensor.dtype for tensor in tensors}) > 1:
        return None
    try:
        stacked = torch.stack(tensors)
        check_tensor(stacked, None, 0)
    except (
        RuntimeError,
        ConfigurationError,
    ):  # not all of one shape, or on one device; or one is to be named
        return None
    return stacked
