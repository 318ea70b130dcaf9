"""Digests of tensors: a hash of the bits, the norm, and a few random projections."""

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


# [Note: Digests]
# A tensor is read as a sequence of elements, each with its index in the whole tensor. The *hash* is
# the sum of `scrambled(bits) * key(index)` modulo 2**64. All keys are odd and `scrambled` is
# one-to-one, so a change of one element always changes the hash. Since each index has a key of its
# own, so does any other change, but for a chance of about 2**-60. The *sketch* has the dot products
# of the tensor with some fixed random vectors, whose elements have a mean of zero and a variance of
# one. So the mean square of the sketch of a difference is, on average, the squared norm of the
# difference, and two sketches tell how far two tensors are apart.
#
# All three are sums over elements, so the digests of the shards of a tensor add up to the digest of
# the tensor, and no rank has to gather anything. A zero adds nothing, so a sparse tensor has the
# digest of the dense one.
#
# Keys and random vectors are periodic: index `i` has the product of an entry for `i % _BLOCK` and
# an entry for `i // _BLOCK`. The entries are computed by integer arithmetic alone, and are the same
# on every machine and with every release of torch.
@dataclass(frozen=True)
class _Table:
    """Entries of an index modulo the length of the table.

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
        # Different streams give the two tables different random numbers.
        self._elements = _build_table(_BLOCK, stream=1)
        self._blocks = _build_table(_MAX_BLOCKS, stream=2)
        self._by_device: dict[torch.device, tuple[_Table, _Table]] = {}

    # See [Note: Digests].
    def packed_digest(self, chunk: Chunk, shape: Sequence[int]) -> Tensor:
        """Return the digest of a chunk as a tensor, without waiting for the chunk's device.

        A change of the formulas would make new digests differ from those in the files of earlier
        runs.

        Args:
            chunk: a shard of a tensor with its offsets, or the whole tensor. Any layout but a
                nested one, and any dtype that is not quantized.
            shape: the shape of the whole tensor.

        Returns:
            ``2 + SKETCH_SIZE`` numbers of dtype int64 on the chunk's device, for
            :func:`unpack_digest`.
        """
        elements = _flat_elements(chunk, shape)
        device = elements.values.device
        elements_table, blocks_table = self._tables(device)
        hash_sum = torch.zeros(1, dtype=torch.int64, device=device)
        squared_norm = torch.zeros(1, dtype=torch.float64, device=device)
        sketch = torch.zeros(SKETCH_SIZE, dtype=torch.float64, device=device)
        for piece in elements.pieces():
            # The key and the weights of an element are products of an entry for its position in
            # a block, and an entry for the block.
            scrambled = _scrambled_bits(piece.values)
            values = piece.values.to(torch.float64)
            keys = elements_table.keys[piece.positions]
            block_keys = blocks_table.keys[piece.blocks]
            weights = elements_table.weights[:, piece.positions]
            block_weights = blocks_table.weights[:, piece.blocks]
            if isinstance(piece.blocks, int):
                # All elements are in one block. Its entries multiply the sums, which is faster.
                hash_sum += (scrambled * keys).sum() * block_keys
                sketch += (weights @ values) * block_weights
            else:
                hash_sum += (scrambled * keys * block_keys).sum()
                sketch += (weights * block_weights) @ values
            squared_norm += values.square().sum()
        floats = torch.cat([squared_norm, sketch])
        return torch.cat([hash_sum, floats.view(torch.int64)])

    def row_hashes(self, tensor: Tensor) -> Tensor:
        """Return a hash of each row of a dense tensor, with dtype int64 on the tensor's device.

        A fingerprint compares the samples of batches by these hashes. The hash of a row depends on
        the bits of the row, but not on its position.
        """
        rows = _real_values(tensor).flatten(1)
        elements_table, blocks_table = self._tables(rows.device)
        hashes = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for block, columns in enumerate(rows.split(_BLOCK, dim=1)):
            scrambled = _scrambled_bits(columns)
            keys = elements_table.keys[: columns.shape[1]]
            block_key = blocks_table.keys[block % _MAX_BLOCKS]
            hashes += (scrambled * keys).sum(dim=1) * block_key
        return hashes

    def _tables(self, device: torch.device) -> tuple[_Table, _Table]:
        """Return the tables of elements and of blocks on a device."""
        if device not in self._by_device:
            self._by_device[device] = (self._elements.to(device), self._blocks.to(device))
        return self._by_device[device]


def unpack_digest(numbers: Sequence[int]) -> Digest:
    """Return the digest that :meth:`DigestTables.packed_digest` has packed.

    Args:
        numbers: the hash as a signed number, then the bits of the squared norm and of the sketch.
    """
    unsigned_hash = numbers[0] % 2**64
    # The user may have set another default device.
    floats = torch.tensor(numbers[1:], dtype=torch.int64, device="cpu").view(torch.float64)
    squared_norm, *sketch = floats.tolist()
    return Digest(hash=unsigned_hash, square=squared_norm, sketch=tuple(sketch))


class _Piece(NamedTuple):
    """Elements of a tensor, and the indices of their entries in the tables.

    Attributes:
        values: the elements, in one dimension.
        positions: for each element, the index in the table of elements.
        blocks: the index in the table of blocks: an int if all elements are in one block, else an
            index for each element.
    """

    values: Tensor
    positions: slice | Tensor
    blocks: int | Tensor


class _Elements(NamedTuple):
    """The elements of a chunk, with their indices in the flattened whole tensor.

    Attributes:
        values: real numbers, in one dimension.
        start: the index of the first element. Unused if ``indices`` is given.
        indices: the index of each element. None if the indices are consecutive.
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
        # The indices are consecutive: each piece reaches to the end of a block.
        begin = 0
        while begin < len(self.values):
            index = self.start + begin
            position = index % _BLOCK
            block = index // _BLOCK % _MAX_BLOCKS
            values = self.values[begin : begin + _BLOCK - position]
            yield _Piece(values, slice(position, position + len(values)), block)
            begin += len(values)


def _flat_elements(chunk: Chunk, shape: Sequence[int]) -> _Elements:
    """Return the elements of a chunk.

    Args:
        chunk: a shard of a tensor, or the whole tensor.
        shape: the shape of the whole tensor.
    """
    tensor = chunk.tensor
    if tensor.layout is not torch.strided:
        return _flat_sparse_elements(tensor, shape)
    has_whole_rows = tensor.shape[1:] == tuple(shape[1:])
    if has_whole_rows:
        # Consecutive rows have consecutive indices. A scalar has no rows.
        first_row = chunk.offsets[0] if shape else 0
        return _real_elements(tensor, start=first_row * math.prod(shape[1:]), indices=None)
    indices = _box_indices(tensor.shape, chunk.offsets, shape, tensor.device)
    return _real_elements(tensor, start=0, indices=indices.flatten())


def _flat_sparse_elements(tensor: Tensor, shape: Sequence[int]) -> _Elements:
    """Return the stored elements of a sparse tensor of any layout. Its other elements are 0.

    A stored value has the dense dimensions of the tensor, which come after the sparse ones.
    """
    sparse = tensor.detach().to_sparse_coo().coalesce()
    coordinates = list(sparse.indices().unbind())
    values = sparse.values()
    dense_sizes = values.shape[1:]
    dense_offsets = [0] * len(dense_sizes)
    dense_indices = _box_indices(dense_sizes, dense_offsets, dense_sizes, values.device)
    sparse_indices = _flat_indices(coordinates, shape[: len(coordinates)])
    # For each stored value, the index of its first element.
    starts = sparse_indices * math.prod(dense_sizes)
    indices = starts.unsqueeze(1) + dense_indices.flatten()
    return _real_elements(values, start=0, indices=indices.flatten())


def _real_elements(tensor: Tensor, start: int, indices: Tensor | None) -> _Elements:
    """Return the elements of a tensor. A complex element becomes two: real and imaginary part.

    Args:
        tensor: the tensor.
        start: the index of the first element. Unused if ``indices`` is given.
        indices: the index of each element. None if the indices are consecutive.
    """
    if tensor.is_complex():
        # Element i becomes the elements 2i and 2i + 1.
        start = 2 * start
        if indices is not None:
            indices = torch.stack([2 * indices, 2 * indices + 1], dim=1).flatten()
    return _Elements(_real_values(tensor).flatten(), start, indices)


def _real_values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor without a gradient.

    Complex values become pairs in a new last dimension. The result may share the tensor's memory.
    """
    # A lazy conjugation or negation is not in the bits that are hashed, unless it is resolved.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type == "mps":
        # MPS lacks float64, in which digests are computed.
        tensor = tensor.cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


def _box_indices(
    sizes: Sequence[int], offsets: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Return the index of each element of a box in the flattened tensor, in the box's shape.

    Args:
        sizes: the sizes of the box.
        offsets: where the box begins in the tensor.
        shape: the shape of the tensor.
        device: the device of the result.
    """
    coordinates: list[Tensor] = []
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        coordinate = torch.arange(offset, offset + size, device=device)
        # Dimensions of size 1 follow, so that the coordinates broadcast to the box.
        dims_after = len(sizes) - dim - 1
        coordinates.append(coordinate.reshape(size, *[1] * dims_after))
    # A box without dimensions has no coordinates, and its index is on the CPU.
    return _flat_indices(coordinates, shape).to(device).expand(tuple(sizes))


def _flat_indices(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the indices in a flattened tensor of the elements with these coordinates.

    The indices have the shape and device of the broadcast coordinates. Without coordinates, for a
    scalar, the result is the index 0 on the CPU.

    Args:
        coordinates: for each dimension, the coordinates of all elements. They are broadcast.
        shape: the shape of the tensor.
    """
    indices = torch.zeros((), dtype=torch.int64, device="cpu")
    for coordinate, size in zip(coordinates, shape, strict=True):
        indices = indices.to(coordinate.device) * size + coordinate
    return indices


def _scrambled_bits(values: Tensor) -> Tensor:
    """Return the bits of each element after a one-to-one map that leaves zero as it is.

    The map mixes the bits, so that the changes of similar elements do not cancel in a sum. It
    multiplies by an odd number modulo 2**64, and xors with the upper half. Both can be undone.
    Another map would make new digests differ from those in the files of earlier runs.
    """
    if values.dtype is torch.bool:  # cannot be viewed as an integer
        bits = values.to(torch.int64)
    else:
        integers = values.contiguous().view(_INTEGER_DTYPES[values.element_size()])
        bits = integers.to(torch.int64)
    bits = bits * _signed(_SCRAMBLER)
    return bits ^ _shift_right(bits, 32)


def _build_table(length: int, stream: int) -> _Table:
    """Return a table of random numbers.

    They are the same in every run, and digests are made with them. Other numbers would make new
    digests differ from those in the files of earlier runs.

    Args:
        length: the number of entries.
        stream: an integer. Tables of different streams have different numbers.
    """
    # A row of keys, then the rows of weights. Streams begin 2**32 numbers apart, which is more than
    # a table uses.
    count = (1 + SKETCH_SIZE) * length
    positions = torch.arange(count, device="cpu")
    numbers = _random_bits(positions + stream * 2**32).view(-1, length)
    keys = numbers[0] | 1  # odd
    # 53 of the 64 bits are a number from 0 to 1 that float64 has exactly.
    uniform = _shift_right(numbers[1:], 11).to(torch.float64) / 2**53
    # Uniform between -sqrt(3) and sqrt(3), for a variance of 1.
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
