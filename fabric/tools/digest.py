"""Digests of tensors: a hash of the bits, the norm, and a few random projections.

[Note: Digests] A tensor is read as a sequence of elements, each with its index in the whole tensor.
The *hash* is the sum of ``scrambled(bits) * key(index)`` modulo 2**64. All keys are odd and
``scrambled`` is one-to-one, so a change of one element always changes the hash. Since each index
has a key of its own, so does any other change, but for a chance of about 2**-60. The *sketch* has
the dot products of the tensor with some fixed random vectors, whose elements have a mean of zero
and a variance of one. So the mean square of the sketch of a difference is, on average, the squared
norm of the difference, and two sketches tell how far two tensors are apart.

All three are sums over elements, so the digests of the shards of a tensor add up to the digest of
the tensor, and no rank has to gather anything. A zero adds nothing, so a sparse tensor has the
digest of the dense one.

Keys and random vectors are periodic: index ``i`` has the product of an entry for ``i % _BLOCK`` and
an entry for ``i // _BLOCK``. The entries are computed by integer arithmetic alone, and are the same
on every machine and with every release of torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fabric.checkpoint.encoding import Chunk
from fabric.tools.records import Digest

__all__ = ["SKETCH_SIZE", "DigestTables", "unpack_digest"]

SKETCH_SIZE = 4
_BLOCK = 2**16  # elements
_MAX_BLOCKS = 2**12  # a tensor with more blocks uses their entries again
# The constants of the generator splitmix64.
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SCRAMBLER = 0xD6E8FEB86659FD93
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Table:
    """Entries of an index modulo the length of the table; see ``[Note: Digests]``.

    Attributes:
        keys: odd numbers of dtype int64.
        weights: random numbers of dtype float64, with shape ``(SKETCH_SIZE, length)``.
    """

    keys: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> "_Table":
        """Return the table on a device."""
        return _Table(self.keys.to(device), self.weights.to(device))


class DigestTables:
    """The tables with which digests are computed, on each device that has tensors."""

    def __init__(self) -> None:
        """Compute the tables on the CPU."""
        # Each is computed from numbers of its own.
        self._elements = _build_table(_BLOCK, stream=1)
        self._blocks = _build_table(_MAX_BLOCKS, stream=2)
        self._by_device: dict[torch.device, tuple[_Table, _Table]] = {}

    def packed_digest(self, chunk: Chunk, shape: Sequence[int]) -> Tensor:
        """Return the digest of a chunk as a tensor on the chunk's device, without waiting for it.

        Args:
            chunk: a shard of a tensor with its offsets, or the whole tensor. Any layout but a
                nested one, and any dtype that is not quantized.
            shape: the shape of the whole tensor.

        Returns:
            ``2 + SKETCH_SIZE`` numbers of dtype int64, for :func:`unpack_digest`.
        """
        elements = _flat_elements(chunk, shape)
        elements_table, blocks_table = self._tables(elements.values.device)
        hash_sum = torch.zeros((), dtype=torch.int64, device=elements.values.device)
        # The squared norm, and then the dot products of the sketch.
        sums = torch.zeros(1 + SKETCH_SIZE, dtype=torch.float64, device=hash_sum.device)
        for piece in elements.pieces():
            scrambled = _scrambled_bits(piece.values)
            values = piece.values.to(torch.float64)
            keys = elements_table.keys[piece.positions]
            block_keys = blocks_table.keys[piece.blocks]
            weights = elements_table.weights[:, piece.positions]
            block_weights = blocks_table.weights[:, piece.blocks]
            if isinstance(piece.blocks, int):
                # All elements of the piece are in one block, whose entries are scalars.
                hash_sum += (scrambled * keys).sum() * block_keys
                sums[1:] += (weights @ values) * block_weights
            else:
                hash_sum += (scrambled * keys * block_keys).sum()
                sums[1:] += (weights * block_weights) @ values
            sums[0] += values.square().sum()
        return torch.cat([hash_sum.view(1), sums.view(torch.int64)])

    def row_hashes(self, tensor: Tensor) -> Tensor:
        """Return a hash of each row of a dense tensor, with dtype int64 on the tensor's device.

        The hash of a row depends on the bits of the row, but not on its position.
        """
        rows = _real_values(tensor).flatten(1)
        elements_table, blocks_table = self._tables(rows.device)
        hashes = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for number, columns in enumerate(rows.split(_BLOCK, dim=1)):
            scrambled = _scrambled_bits(columns)
            keys = elements_table.keys[: columns.shape[1]]
            hashes += (scrambled * keys).sum(dim=1) * blocks_table.keys[number % _MAX_BLOCKS]
        return hashes

    def _tables(self, device: torch.device) -> tuple[_Table, _Table]:
        """Return the tables of elements and of blocks on a device."""
        if device not in self._by_device:
            self._by_device[device] = (self._elements.to(device), self._blocks.to(device))
        return self._by_device[device]


def unpack_digest(numbers: Sequence[int]) -> Digest:
    """Return the digest that :meth:`DigestTables.packed_digest` has packed.

    Args:
        numbers: the elements of its result, read from the device.
    """
    floats = torch.tensor(numbers[1:], dtype=torch.int64).view(torch.float64).tolist()
    return Digest(hash=numbers[0] % 2**64, square=floats[0], sketch=tuple(floats[1:]))


class _Piece(NamedTuple):
    """Elements of a tensor, and what their indices are in the tables.

    Attributes:
        values: a dimension of elements.
        positions: the indices in the table of elements, one for each value.
        blocks: the index in the table of blocks of all values, or one for each value.
    """

    values: Tensor
    positions: slice | Tensor
    blocks: int | Tensor


class _Elements(NamedTuple):
    """The elements of a chunk.

    Attributes:
        values: a dimension of real elements.
        start: the index of the first element in the whole tensor, if the others follow it.
        indices: the index of each element. None if the indices follow each other.
    """

    values: Tensor
    start: int
    indices: Tensor | None

    def pieces(self) -> Iterator[_Piece]:
        """Yield pieces of at most ``_BLOCK`` elements."""
        if self.indices is not None:
            pairs = zip(self.values.split(_BLOCK), self.indices.split(_BLOCK), strict=True)
            for values, indices in pairs:
                blocks = indices.div(_BLOCK, rounding_mode="floor") % _MAX_BLOCKS
                yield _Piece(values, indices % _BLOCK, blocks)
            return
        begin = 0
        while begin < len(self.values):
            position = (self.start + begin) % _BLOCK
            block = (self.start + begin) // _BLOCK % _MAX_BLOCKS
            # Up to the end of the block.
            values = self.values[begin : begin + _BLOCK - position]
            yield _Piece(values, slice(position, position + len(values)), block)
            begin += len(values)


def _flat_elements(chunk: Chunk, shape: Sequence[int]) -> _Elements:
    """Return the elements of a chunk. The elements of a sparse tensor are its values."""
    tensor = chunk.tensor
    sizes = list(tensor.shape)
    if tensor.layout is not torch.strided:
        sparse = tensor.detach().to_sparse_coo().coalesce()
        coordinates = list(sparse.indices().unbind())
        values = sparse.values()
        # The values have dense dimensions after the first one.
        dense_sizes = values.shape[1:]
        dense_indices = _indices(dense_sizes, [0] * len(dense_sizes), dense_sizes, values.device)
        rows = _combine(coordinates, shape[: len(coordinates)]) * math.prod(dense_sizes)
        indices = rows.unsqueeze(1) + dense_indices.flatten()
        return _with_real_parts(values, start=0, indices=indices.flatten())
    start = 0
    if sizes:
        start = chunk.offsets[0] * math.prod(shape[1:])
    # Rows of the whole tensor follow each other. Parts of rows do not.
    if sizes[1:] == list(shape[1:]):
        return _with_real_parts(tensor, start=start, indices=None)
    indices = _indices(sizes, chunk.offsets, shape, tensor.device)
    return _with_real_parts(tensor, start=0, indices=indices.flatten())


def _with_real_parts(tensor: Tensor, start: int, indices: Tensor | None) -> _Elements:
    """Return elements, each complex one as two: its real and its imaginary part."""
    if tensor.is_complex():
        start = 2 * start
        if indices is not None:
            indices = torch.stack([2 * indices, 2 * indices + 1], dim=1).flatten()
    return _Elements(_real_values(tensor).flatten(), start, indices)


def _real_values(tensor: Tensor) -> Tensor:
    """Return a plain tensor of numbers that are not complex, without a gradient.

    The result may share its memory with the argument.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type == "mps":
        # It has no numbers of 64 bits.
        tensor = tensor.cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


def _indices(
    sizes: Sequence[int], offsets: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Return the indices in a flattened tensor of the elements of a box, with the box's sizes.

    Args:
        sizes: the sizes of the box.
        offsets: where the box begins in the tensor.
        shape: the shape of the tensor.
        device: the device of the result.
    """
    coordinates: list[Tensor] = []
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        coordinate = torch.arange(offset, offset + size, device=device)
        dims_after = len(sizes) - dim - 1
        coordinates.append(coordinate.reshape(size, *[1] * dims_after))
    return _combine(coordinates, shape).to(device).expand(tuple(sizes))


def _combine(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the indices in a flattened tensor of the elements with these coordinates."""
    indices = torch.zeros((), dtype=torch.int64)
    for coordinate, size in zip(coordinates, shape, strict=True):
        indices = indices.to(coordinate.device) * size + coordinate
    return indices


def _scrambled_bits(values: Tensor) -> Tensor:
    """Return the bits of each element after a one-to-one map that leaves zero as it is.

    The product with an odd number, modulo 2**64, can be undone, and so can the xor with the upper
    half. They make all bits of the result depend on each bit of the element, so that similar
    elements do not cancel each other in a sum.
    """
    if values.dtype is torch.bool:  # cannot be viewed as an integer
        bits = values.to(torch.int64)
    else:
        integers = values.contiguous().view(_INTEGER_DTYPES[values.element_size()])
        bits = integers.to(torch.int64)
    bits = bits * _signed(_SCRAMBLER)
    return bits ^ _shift_right(bits, 32)


def _build_table(length: int, stream: int) -> _Table:
    """Return a table of random numbers. Tables of other streams have other numbers."""
    count = (1 + SKETCH_SIZE) * length
    numbers = _random_bits(torch.arange(count) + stream * 2**32).view(-1, length)
    keys = numbers[0] | 1
    # Numbers from 0 to 1, of 53 bits, which are exact.
    uniform = _shift_right(numbers[1:], 11).to(torch.float64) / 2**53
    weights = (2 * uniform - 1) * math.sqrt(3)
    return _Table(keys, weights)


def _random_bits(numbers: Tensor) -> Tensor:
    """Return 64 random bits for each number, by the generator splitmix64."""
    bits = numbers * _signed(_GOLDEN)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MULTIPLIERS[0])
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MULTIPLIERS[1])
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift 64 bits to the right and fill up with zeros. torch would fill up with the sign."""
    return (bits >> count) & (2 ** (64 - count) - 1)


def _signed(number: int) -> int:
    """Return the number from -2**63 to 2**63 - 1 that has the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
