"""Digests of tensors: 64-bit numbers that differ if any bit differs, or stands elsewhere."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fabric._torch import local_tensor

__all__ = ["combined_digests", "digests"]

_ROW_WORDS = 1024
_ROW_BYTES = 8 * _ROW_WORDS
# The largest tensor that is copied, so that it is read together with other small tensors.
_SMALL_BYTES = 1 << 16
# The rows that are mixed at a time. On the CPU their 512 KiB stay in the cache. On other devices
# larger chunks need fewer calls.
_CPU_ROWS = 64
_DEVICE_ROWS = 1 << 14
# The factor and the offset of a generator of pseudorandom numbers: Knuth's MMIX.
_FACTOR = 6364136223846793005
_OFFSET = 1442695040888963407


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit number for each tensor, which depends on all bits and their positions.

    Of a DTensor, the part on this rank counts. This waits for the device, once for all tensors.
    """
    return _digests_of_groups([local_tensor(tensor)] for tensor in tensors)


def combined_digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return digests of all tensors together, which depend on all bits and their positions.

    All tensors of one device and dtype have one digest, so that this takes a fraction of the time
    of :func:`digests` if there are many small tensors. This waits for the device, once for all
    tensors.

    Args:
        tensors: the tensors, none of which is a DTensor.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return _digests_of_groups(groups.values())


def _digests_of_groups(groups: Iterable[list[Tensor]]) -> list[int]:
    """Return one number for each group of tensors. A group has one device and one dtype."""
    numbers: list[Tensor] = []
    digesters: dict[torch.device, _Digester] = {}
    with torch.no_grad():
        for tensors in groups:
            device = tensors[0].device
            if device not in digesters:
                digesters[device] = _Digester(device)
            numbers.append(digesters[device].digest(tensors))
    if not numbers:
        return []
    # Move the digests to one device, and read them together. The tensors may be on several devices.
    first_device = numbers[0].device
    return torch.stack([number.to(first_device) for number in numbers]).tolist()


# [Note: Digests of replicas]
# A digest is computed on the device of its tensors, by integer arithmetic modulo 2**64, which gives
# the same number on every device. The bytes are read as 64-bit words, in rows of 1,024 words. Each
# row is summed with an odd weight for each position, and the sums of the rows are summed with an
# odd weight for each row. A sum alone would not see that the sign bits of two elements are flipped:
# the top bits of two words cancel, whatever their odd weights. So each word is mixed before it is
# weighted: its upper half is also added to its lower half. Two words that differ in one half are
# always mixed differently. The only words that are mixed alike are n - 2**63 and
# (n + 1) % 2**32 + 2**63 - 2**32, for each n from 0 to 2**32 - 1. (An exclusive or in place of the
# addition would mix a word and its complement alike, such as 0 and -1: the shift repeats the top
# bit.) The halves are added as 32-bit integers, which takes half as long as an addition of words:
# torch multiplies one summand by 1, and AVX2 has no multiplication of words.
#
# A call of torch takes as long as it takes to read several kilobytes. So small tensors, and what
# the large ones have beyond full rows, are first copied to common rows, a chunk at a time: a copy
# in the cache is cheap, and a copy of all would be memory that the system has to provide.
#
# Only tensors of the same shape and dtype are compared, such as the replicas of a parameter. A rank
# reads a sharded tensor as its own part, so digests of different shardings differ.
class _Digester:
    """Takes digests on one device.

    Args:
        device: the device of all tensors.
    """

    def __init__(self, device: torch.device) -> None:
        """Compute the weights of the words in a row."""
        self._rows_at_a_time = _CPU_ROWS if device.type == "cpu" else _DEVICE_ROWS
        self._word_weights = _odd_numbers(_ROW_WORDS, device)
        # All chunks use the same scratch memory, which grows with the chunks. To allocate memory
        # takes longer than the digest, since the system fills each page with zeros.
        self._scratch = torch.empty(0, _ROW_WORDS, dtype=torch.int64, device=device)

    def digest(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the digest of all tensors, as an int64 scalar on the device.

        Args:
            tensors: tensors of one dtype, none of which is a DTensor.
        """
        row_sums: list[Tensor] = []
        for rows in self._chunks_of(tensors):
            if rows.shape[0] > self._scratch.shape[0]:
                # Later chunks use this memory, too.
                self._scratch = torch.empty_like(rows)
            scratch = self._scratch[: rows.shape[0]]
            row_sums.append(_weighted_sums(rows, self._word_weights, scratch))
        # The sums of the rows are the words of a single row, which is summed like the others.
        sums = torch.cat(row_sums).view(1, -1)
        row_weights = _odd_numbers(sums.numel(), sums.device)
        return _weighted_sums(sums, row_weights, torch.empty_like(sums))[0]

    def _chunks_of(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield all bytes of the tensors in chunks of rows, at least one row.

        ``tensors`` have one dtype. A chunk has the shape ``(rows, words)``.
        """
        # What is copied to the next common rows.
        pieces: list[Tensor] = []
        piece_bytes = 0
        for tensor in tensors:
            piece = tensor.flatten()
            if piece.nbytes > _SMALL_BYTES:
                # Only the elements beyond the full rows of a large tensor are copied.
                rows, piece = _split_rows(piece)
                yield from rows.split(self._rows_at_a_time)
            pieces.append(piece)
            piece_bytes += piece.nbytes
            if piece_bytes >= self._rows_at_a_time * _ROW_BYTES:
                yield _join_to_rows(pieces)
                pieces = []
                piece_bytes = 0
        if pieces:
            yield _join_to_rows(pieces)


def _split_rows(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the full rows of a one-dimensional tensor as words, and its elements beyond them."""
    # Conjugated and negated views only have a flag. These calls apply it.
    flat = flat.resolve_conj().resolve_neg()
    is_aligned = flat.storage_offset() * flat.itemsize % 8 == 0
    if not is_aligned:
        # A view as 64-bit words needs an offset of whole words. A clone has offset 0.
        flat = flat.clone()
    row_elements = _ROW_BYTES // flat.itemsize
    end = flat.numel() // row_elements * row_elements
    return flat[:end].view(torch.int64).view(-1, _ROW_WORDS), flat[end:]


def _join_to_rows(pieces: list[Tensor]) -> Tensor:
    """Copy one-dimensional tensors of one dtype to rows of words, which zeros fill up."""
    first = pieces[0]
    row_elements = _ROW_BYTES // first.itemsize
    num_elements = sum(piece.numel() for piece in pieces)
    # There is at least one row, since the padding has at least one element. If the last row is full
    # already, the padding is a row of zeros.
    padding = first.new_zeros(row_elements - num_elements % row_elements)
    joined = torch.cat([*pieces, padding]).resolve_conj().resolve_neg()
    return joined.view(torch.int64).view(-1, _ROW_WORDS)


def _weighted_sums(rows: Tensor, weights: Tensor, scratch: Tensor) -> Tensor:
    """Return the weighted sum of the mixed words of each row. All arithmetic is modulo 2**64.

    Args:
        rows: words, of shape ``(rows, words)``.
        weights: the weight of each position in a row, of shape ``(words,)``. The weights are odd,
            so that different words have different products. An even weight would lose the top bit.
        scratch: memory for the mixed words, of the shape of ``rows``. It is overwritten.
    """
    # Mix each word: add its upper half to its lower half. See [Note: Digests of replicas].
    mixed = torch.bitwise_right_shift(rows, 32, out=scratch)
    halves = mixed.view(torch.int32)
    halves += rows.view(torch.int32)
    if mixed.device.type == "cpu":
        # mv() is three times as fast as the lines below, but multiplies integers only on the CPU.
        return torch.mv(mixed, weights)
    mixed *= weights
    return mixed.sum(1)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers, the same in every call and on every device."""
    # These operations scatter the numbers 0, 1, 2 and so on over all 64 bits.
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    numbers = (numbers * _FACTOR + _OFFSET) * _FACTOR
    numbers = (numbers ^ (numbers >> 32)) * _FACTOR
    return numbers | 1
