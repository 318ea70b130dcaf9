"""Buckets: the flat buffers in which the leaves of a collection are sent.

[Note: Buckets] The leaves of one dtype are sent in one flat, contiguous buffer and thus in one
collective, in the order in which :func:`fabric.tree.flatten` visits the leaves. Nothing here writes
into what the caller passed. gloo reduces the wrong elements of a non-contiguous view
(pytorch#192920). So a buffer is a copy if it is written to or if it is not contiguous. Results are
copies of parts of the buffer: a result that is kept, saved or changed does not affect other
results. 0-dim results without a gradient lie side by side in one storage, but each is a tensor with
its own version, not a view. Python floats travel as float64, ints as int64, complex numbers as
complex128. Dtypes that a backend does not carry travel in a dtype that holds all their values.
16-bit floats whose mean is taken travel in float32, since their sum may overflow where the mean
does not.

[Note: Chunks] A tensor of shape ``(size, *s)`` has a chunk of shape ``s`` for each rank. Its buffer
has shape ``(size, n)``, so that the chunks of one rank lie together.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from numbers import Complex, Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fabric._torch import untracked_views
from fabric.communicators import Reduce
from fabric.errors import ConfigurationError
from fabric.tree import Leaf, Structure, check_can_send, check_other_leaf, describe_keys, leaf_paths

__all__ = [
    "MEAN_WIRE_DTYPES",
    "WIRE_DTYPES",
    "Bucket",
    "describe",
    "pack",
    "pack_chunks",
]

# The dtype in which another dtype travels. Every value survives the way there and back. For bool,
# min is "all" and max is "any". uint64 wraps around on both ways, as its sums and products do.
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
_NUMBER_DTYPES = {
    float: torch.float64,
    int: torch.int64,
    bool: torch.bool,
    complex: torch.complex128,
}
# Numbers of other libraries, such as numpy. The order matters: an Integral is Real and Complex,
# too.
_ABSTRACT_NUMBERS: tuple[tuple[type, type], ...] = (
    (Integral, int),
    (Real, float),
    (Complex, complex),
)
# Typecodes of the arrays that torch reads without looking at each number.
_ARRAY_CODES = {torch.float64: "d", torch.int64: "q"}


class _Number(NamedTuple):
    """A leaf as a Python number, and the dtype in which it travels."""

    value: Any
    dtype: torch.dtype


@dataclass
class Bucket:
    """The leaves of one dtype, and their positions among all leaves: the tensors, then the numbers.

    Attributes:
        dtype: the dtype of the leaves.
        chunks: the number of chunks of each tensor, see ``[Note: Chunks]``. None if tensors are
            sent whole.
        tensors: the tensors.
        tensor_positions: the position of each tensor among all leaves.
        numbers: the Python numbers.
        number_positions: the position of each number. Empty if the numbers are all the leaves.
        stacked: the buffer of a bucket with 0-dim tensors only, if they could be stacked; else
            None.
    """

    dtype: torch.dtype
    chunks: int | None = None
    tensors: list[Tensor] = field(default_factory=list)
    tensor_positions: list[int] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    number_positions: list[int] = field(default_factory=list)
    stacked: Tensor | None = None

    def buffer(self, device: torch.device, op: Reduce | None = None) -> Tensor:
        """Return a new buffer that holds all leaves, in the dtype in which they travel.

        Args:
            device: the device of the buffer.
            op: the reduction. For a sum, integers are followed by their upper halves, whose sum
                does not wrap around.

        Returns:
            A tensor of shape ``(n,)``, or ``(chunks, n)``.
        """
        wire_dtypes = MEAN_WIRE_DTYPES if op is Reduce.MEAN else WIRE_DTYPES
        dtype = wire_dtypes.get(self.dtype, self.dtype)
        if self.stacked is not None:
            return self.stacked.to(device, dtype)
        if not self.tensors:
            return self._number_tensor(op).to(device, dtype)
        sections = [self._flatten_tensor(tensor.to(device)) for tensor in self.tensors]
        if self.numbers:
            sections.append(self._number_tensor(op).to(device))
        # torch.cat makes a copy of a single section, too, and carries out a pending conjugation.
        return torch.cat(sections, dim=-1).to(dtype)

    def unpack(self, buffer: Tensor, leaves: list[Leaf], ranks: int | None = None) -> None:
        """Put the results in a buffer at the positions of their leaves.

        Args:
            buffer: a tensor of shape ``(n,)``, or ``(ranks, n)`` if it holds the values of several
                ranks.
            leaves: the list of all leaves, which is changed.
            ranks: the number of ranks whose values are in the buffer. Each tensor gets a first
                dimension of this size, and each number becomes a list. None, the default: the
                buffer holds one value for each leaf.
        """
        if self.stacked is not None and not buffer.requires_grad:
            self._unpack_stacked(buffer, leaves, ranks)
            return
        sections = self._split(buffer)
        is_shared = len(sections) > 1
        for position, tensor, section in zip(
            self.tensor_positions, self.tensors, sections, strict=False
        ):
            shape = tensor.shape if self.chunks is None else tensor.shape[1:]
            if ranks is not None:
                shape = (ranks, *shape)
            if buffer.requires_grad and not tensor.requires_grad:
                section = section.detach()
            result = section.to(tensor.device, self.dtype, copy=is_shared)
            leaves[position] = result.reshape(shape)
        if self.numbers:
            numbers = self._unpack_numbers(sections[-1], ranks)
            self._place_numbers(numbers, leaves)

    def _flatten_tensor(self, tensor: Tensor) -> Tensor:
        if self.chunks is None:
            return tensor.reshape(tensor.numel())
        return tensor.reshape(self.chunks, tensor.numel() // self.chunks)

    def _number_tensor(self, op: Reduce | None) -> Tensor:
        """Return the numbers as a tensor on the CPU; see :meth:`buffer`."""
        numbers = self.numbers
        if op is Reduce.SUM and self.dtype is torch.int64:
            upper_halves = [number >> 32 for number in numbers]
            numbers = numbers + upper_halves
        array_code = _ARRAY_CODES.get(self.dtype)
        if array_code is None:
            return torch.tensor(numbers, dtype=self.dtype)
        return torch.frombuffer(array(array_code, numbers), dtype=self.dtype)

    def _unpack_stacked(self, buffer: Tensor, leaves: list[Leaf], ranks: int | None) -> None:
        values = buffer.to(self.tensors[0].device, self.dtype)
        if ranks is not None:
            values = values.t().contiguous()
        with untracked_views():
            leaves[:] = values.unbind()

    def _split(self, buffer: Tensor) -> Sequence[Tensor]:
        """Return the part of a buffer for each tensor, and last the part of all numbers."""
        chunks = self.chunks or 1
        lengths = [tensor.numel() // chunks for tensor in self.tensors]
        if self.numbers:
            lengths.append(buffer.shape[-1] - sum(lengths))
        if len(lengths) == 1:
            return [buffer]
        return buffer.split(lengths, dim=-1)

    def _unpack_numbers(self, section: Tensor, ranks: int | None) -> list[Any]:
        if self.dtype is torch.bool:
            section = section.bool()
        if ranks is not None:
            section = section.t()
        numbers = section.tolist()
        count = len(self.numbers)
        if len(numbers) == count:
            return numbers
        # Integers that were summed: the totals are followed by the totals of the upper halves.
        return list(map(_exact_sum, numbers[:count], numbers[count:]))

    def _place_numbers(self, numbers: list[Any], leaves: list[Leaf]) -> None:
        if len(numbers) == len(leaves):
            leaves[:] = numbers
            return
        for position, number in zip(self.number_positions, numbers, strict=True):
            leaves[position] = number


def pack(
    leaves: list[Leaf], structure: Structure, numbers: bool = True, opaque: bool = False
) -> list[Bucket]:
    """Sort leaves into one bucket for each dtype, in the order in which the dtypes first occur.

    Args:
        leaves: the leaves of a collection. Tensors and Python numbers travel. Other leaves are not
            in any bucket.
        structure: the structure of the collection, for error texts.
        numbers: whether Python numbers travel. Default: True.
        opaque: whether to accept leaves that look like data and do not travel: arrays of other
            libraries, and containers that are not taken apart. Default: False.

    Raises:
        ConfigurationError: a leaf cannot travel, or looks like data and would not travel.
    """
    types = set(map(type, leaves))
    if types == {Tensor}:
        stacked = _stack(leaves)
        if stacked is not None:
            positions = list(range(len(leaves)))
            bucket = Bucket(
                stacked.dtype, tensors=leaves[:], tensor_positions=positions, stacked=stacked
            )
            return [bucket]
    if types == {float} and numbers:
        return [Bucket(torch.float64, numbers=leaves[:])]
    buckets: dict[torch.dtype, Bucket] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_can_send(leaf, structure, position)
            bucket = buckets.setdefault(leaf.dtype, Bucket(leaf.dtype))
            bucket.tensors.append(leaf)
            bucket.tensor_positions.append(position)
            continue
        number = _as_number(leaf)
        if number is not None and numbers:
            _check_range(number, structure, position)
            bucket = buckets.setdefault(number.dtype, Bucket(number.dtype))
            bucket.numbers.append(number.value)
            bucket.number_positions.append(position)
        elif number is None and not opaque:
            check_other_leaf(leaf, structure, position)
    return list(buckets.values())


def pack_chunks(
    leaves: list[Leaf], structure: Structure, size: int, operation: str
) -> list[Bucket]:
    """Sort tensors that have a chunk for each rank into buckets, as :func:`pack` does.

    See ``[Note: Chunks]``.

    Raises:
        ConfigurationError: a leaf cannot travel, or is not a tensor with ``size`` chunks.
    """
    buckets = pack(leaves, structure)
    for bucket in buckets:
        bucket.chunks = size
        bucket.stacked = None
    problems = []
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if isinstance(leaf, Tensor):
            shape = tuple(leaf.shape)
        elif _as_number(leaf) is not None:
            shape = ()
        else:
            continue
        if shape[:1] != (size,):
            name = path or "it"
            problems.append(f"{name} is of shape {shape}")
    if problems:
        raise ConfigurationError(
            f"{operation}(...) in a group of {size}",
            problem=f"there is no chunk for each rank: {'; '.join(problems)}",
            expected=f"tensors of shape ({size}, ...), chunk i for rank i",
            suggestion=f"x.unflatten(0, ({size}, -1)) for a tensor whose length {size} divides; "
            "torch.tensor([...]) for numbers",
        )
    return buckets


def describe(
    structure: Structure,
    leaves: list[Leaf],
    buckets: list[Bucket],
    grads: bool = False,
    ragged: bool = False,
) -> str:
    """Return a text of what must be the same on all ranks.

    The text has the names, then in the order of the leaves the dtype and shape of tensors and the
    dtype of numbers.

    Args:
        structure: the structure of the collection.
        leaves: the leaves of the collection.
        buckets: the buckets of the leaves.
        grads: whether the text says which tensors require a gradient. A rank whose tensor does not
            require one would not take part in the collective of the backward pass. Default: False.
        ragged: whether the lengths along the first dimension may differ. Default: False.
    """
    names = describe_keys(structure)
    kinds = _describe_leaves(leaves, buckets, grads, ragged).replace("torch.", "")
    if names and kinds:
        return f"{names}: {kinds}"
    return names or kinds


def _describe_leaves(leaves: list[Leaf], buckets: list[Bucket], grads: bool, ragged: bool) -> str:
    """Return the dtypes and shapes of the leaves, with a count for equal leaves that follow."""
    if len(buckets) == 1:
        # Collections of a thousand metrics are described in few steps.
        bucket = buckets[0]
        if bucket.numbers and len(bucket.numbers) == len(leaves):
            return f"{len(leaves)} {bucket.dtype}"
        if bucket.stacked is not None and not grads:
            return f"{len(leaves)} {bucket.dtype}[]"
    kinds = [""] * len(leaves)
    for bucket in buckets:
        for position, tensor in zip(bucket.tensor_positions, bucket.tensors, strict=True):
            kinds[position] = _describe_tensor(tensor, grads, ragged)
        for position in bucket.number_positions:
            kinds[position] = str(bucket.dtype)
    runs = []
    for kind, run in groupby(kinds):
        count = len(list(run))
        runs.append(f"{count} {kind}")
    return ", ".join(runs)


def _describe_tensor(tensor: Tensor, grads: bool, ragged: bool) -> str:
    lengths = list(map(str, tensor.shape))
    if ragged and lengths:
        lengths[0] = "*"
    text = f"{tensor.dtype}[{', '.join(lengths)}]"
    if grads and tensor.requires_grad:
        return f"{text} with gradient"
    return text


def _as_number(leaf: Leaf) -> _Number | None:
    """Return a leaf as a Python number, or None if it is not a number."""
    dtype = _NUMBER_DTYPES.get(type(leaf))
    if dtype is not None:
        return _Number(leaf, dtype)
    if isinstance(leaf, Enum):
        return None
    for abstract_type, python_type in _ABSTRACT_NUMBERS:
        if isinstance(leaf, abstract_type):
            return _Number(python_type(leaf), _NUMBER_DTYPES[python_type])
    return None


def _check_range(number: _Number, structure: Structure, position: int) -> None:
    if number.dtype is torch.int64 and not -(2**63) <= number.value < 2**63:
        path = leaf_paths(structure)[position] or "a number"
        raise ConfigurationError(
            f"a collective over {path}", problem="it is beyond 64 bits", suggestion="float(x)"
        )


def _exact_sum(wrapped_sum: int, upper_sum: int) -> int:
    """Return the sum of integers over ranks.

    Args:
        wrapped_sum: the sum modulo ``2**64``.
        upper_sum: the sum of the upper halves of the integers.
    """
    # The lower halves add between 0 and 2**64 to the sum of the upper halves.
    least_sum = upper_sum << 32
    return least_sum + (wrapped_sum - least_sum) % 2**64


def _stack(tensors: list[Tensor]) -> Tensor | None:
    """Stack 0-dim tensors of one dtype in few steps, which matters for a thousand metrics.

    Returns:
        The stacked tensor, or None if the tensors cannot be stacked.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if tensors[0].dim() > 0 or len(dtypes) > 1:
        return None
    try:
        stacked = torch.stack(tensors)
        check_can_send(stacked, None, 0)
    except (RuntimeError, ConfigurationError):
        # The shapes or devices differ, or a tensor cannot be sent. pack() names that tensor.
        return None
    return stacked
