"""Digests of tensors: 64-bit numbers that differ if any bit differs, or stands elsewhere."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fabric._torch import local_tensor

__all__ = ["combined_digests", "digests"]

_ROW_WORDS = 1024
_ROW_BYTES = 8 * _ROW_WORDS
_SMALL_BYTES = 1 << 16  # of a tensor that combined_digests() concatenates with others
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
    numbers: list[Tensor] = []
    weights: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        local = local_tensor(tensor).detach()
        if local.device not in weights:
            weights[local.device] = _odd_numbers(_ROW_WORDS, local.device)
        numbers.append(_digest(local, weights[local.device]))
    if not numbers:
        return []
    # Move the digests to one device, and read them together. The tensors may be on several devices.
    first_device = numbers[0].device
    return torch.stack([number.to(first_device) for number in numbers]).tolist()


def combined_digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return digests of all tensors together, which depend on all bits and their positions.

    Small tensors of one device and dtype are concatenated and have one digest, so that this takes a
    fraction of the time of :func:`digests`. This waits for the device, once for all tensors.

    Args:
        tensors: the tensors, none of which is a DTensor.
    """
    large: list[Tensor] = []
    small_groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() > _SMALL_BYTES:
            large.append(tensor)
        else:
            group = small_groups.setdefault((tensor.device, tensor.dtype), [])
            group.append(tensor.detach().flatten())
    concatenated = [torch.cat(group) for group in small_groups.values()]
    return digests([*large, *concatenated])


# [Note: Digests of replicas]
# A digest is computed on the device of its tensor, by integer arithmetic modulo 2**64, which gives
# the same number on every device. The bytes are read as 64-bit words, in rows of 1,024 words. Each
# row is summed with an odd weight for each position, and the sums of the rows are summed with an
# odd weight for each row. A sum alone would not see that the sign bits of two elements are flipped:
# the top bits of two words cancel, whatever their odd weights. So each word is mixed before it is
# weighted: its upper bits are also added to its lower bits. (An exclusive or in place of this
# addition would mix a word and its complement alike, such as 0 and -1: the shift repeats the top
# bit.)
#
# Only tensors of the same shape and dtype are compared, such as the replicas of a parameter. A rank
# reads a sharded tensor as its own part, so digests of different shardings differ.
def _digest(tensor: Tensor, word_weights: Tensor) -> Tensor:
    """Return the digest of a tensor, as an int64 scalar on the tensor's device.

    The bytes are summed in rows of words, and then the sums of the rows.

    Args:
        tensor: the tensor, which is no DTensor.
        word_weights: ``_odd_numbers(_ROW_WORDS, tensor.device)``, the weights of the words in a
            row.
    """
    # Conjugated and negated views only have a flag. resolve_conj() and resolve_neg() apply it.
    octets = tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    is_aligned = octets.storage_offset() % 8 == 0
    if not is_aligned:
        # A view as 64-bit words needs an offset of whole words. A clone has offset 0.
        octets = octets.clone()
    full_rows = octets.numel() // _ROW_BYTES
    rows = octets[: full_rows * _ROW_BYTES].view(torch.int64).view(-1, _ROW_WORDS)
    # The remaining bytes are one more row, which zeros fill up.
    remaining = octets[full_rows * _ROW_BYTES :]
    last_row = octets.new_zeros(_ROW_BYTES)
    last_row[: remaining.numel()] = remaining

    rows_at_a_time = _CPU_ROWS if octets.device.type == "cpu" else _DEVICE_ROWS
    # All chunks use the same scratch memory. To allocate memory takes longer than the digest, since
    # the system fills each page with zeros.
    scratch = torch.empty_like(rows[:rows_at_a_time])
    row_sums: list[Tensor] = []
    for chunk in rows.split(rows_at_a_time):
        row_sums.append(_weighted_sums(chunk, word_weights, scratch[: chunk.shape[0]]))
    last_words = last_row.view(torch.int64).view(1, _ROW_WORDS)
    row_sums.append(_weighted_sums(last_words, word_weights, torch.empty_like(last_words)))
    # The sums of the rows are the words of a single row, which is summed like the others.
    sums = torch.cat(row_sums).view(1, -1)
    row_weights = _odd_numbers(sums.numel(), octets.device)
    return _weighted_sums(sums, row_weights, torch.empty_like(sums))[0]


def _weighted_sums(rows: Tensor, weights: Tensor, scratch: Tensor) -> Tensor:
    """Return the weighted sum of the mixed words of each row. All arithmetic is modulo 2**64.

    Args:
        rows: words, of shape ``(rows, words)``.
        weights: the weight of each position in a row, of shape ``(words,)``. The weights are odd,
            so that different words have different products. An even weight would lose the top bit.
        scratch: memory for the mixed words, of the shape of ``rows``. It is overwritten.
    """
    # Mix each word: add its upper bits to its lower bits. The note at the top says why.
    mixed = torch.bitwise_right_shift(rows, 29, out=scratch)
    mixed += rows
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
