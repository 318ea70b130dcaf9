"""Digests of tensors tell every change of a bit, and every other order of the elements."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fabric.diagnostics.digest import combined_digests, digests

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
# A row of the digest has 8,192 bytes, and 64 rows are summed at a time.
LENGTHS = st.sampled_from([1, 7, 8, 1023, 2048, 2049, 4096, 131072, 131073, 262149])


def digest(tensor: Tensor) -> int:
    (number,) = digests([tensor])
    return number


def flip_bits(tensor: Tensor, index: int, mask: int) -> Tensor:
    """Return a copy of a float32 tensor with some bits of one element flipped."""
    changed = tensor.clone()
    changed.view(torch.int32)[index] ^= mask
    return changed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_depends_on_each_element_and_its_position(dtype: torch.dtype) -> None:
    values = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    others = [values.t(), values.flip(0), values.flip(1)]
    for index in range(6):
        changed = values.clone()
        changed.view(-1)[index] = changed.view(-1)[index] == 0
        others.append(changed)
    numbers = {digest(other) for other in others}
    assert len(numbers) == len(others)
    assert digest(values) not in numbers


@given(LENGTHS, st.data())
def test_a_digest_tells_each_flipped_bit(length: int, data: st.DataObject) -> None:
    values = torch.linspace(-1, 1, length)
    index = data.draw(st.integers(0, length - 1))
    bit = data.draw(st.integers(0, 31))
    mask = 1 << bit if bit < 31 else -(1 << 31)
    assert digest(flip_bits(values, index, mask)) != digest(values)


@given(LENGTHS, st.data())
def test_a_digest_tells_signs_that_are_flipped_in_pairs(length: int, data: st.DataObject) -> None:
    """In a plain sum of words, the top bits of two words would cancel."""
    values = torch.linspace(-1, 1, length)
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4, unique=True))
    changed = values
    for index in indices:
        changed = flip_bits(changed, index, -(1 << 31))
    assert digest(changed) != digest(values)


@given(LENGTHS, st.data())
def test_a_digest_tells_two_elements_that_are_swapped(length: int, data: st.DataObject) -> None:
    values = torch.arange(length, dtype=torch.float32)
    first = data.draw(st.integers(0, length - 1))
    second = data.draw(st.integers(0, length - 1))
    swapped = values.clone()
    swapped[first] = second
    swapped[second] = first
    assert (digest(swapped) == digest(values)) is (first == second)


def test_a_digest_does_not_depend_on_the_memory_of_a_tensor() -> None:
    values = torch.linspace(-1, 1, 6003).reshape(3, 2001)
    transposed = values.t().contiguous().t()
    misaligned = torch.cat([torch.zeros(1), values.flatten()])[1:].view(3, 2001)
    assert digest(transposed) == digest(values)
    assert digest(misaligned) == digest(values)
    complex_values = torch.complex(values, values)
    assert digest(complex_values.conj()) == digest(complex_values.conj().resolve_conj())


def test_a_digest_tells_minus_zero_from_zero() -> None:
    zero = torch.zeros(())
    assert digest(zero) != digest(-zero)


def test_a_digest_tells_words_whose_bits_are_all_flipped() -> None:
    """0 and -1 are such words."""
    values = torch.arange(2048)
    for index in (0, 1023, 1024, 2047):
        changed = values.clone()
        changed[index] = ~changed[index]
        assert digest(changed) != digest(values)
    assert digest(~values) != digest(values)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_a_digest_tells_two_words_that_differ_in_one_half(value: int, other: int) -> None:
    for position in (0, 1, 2000, 2047):
        values = torch.zeros(2048, dtype=torch.int32)
        values[position] = value
        others = values.clone()
        others[position] = other
        assert (digest(values) == digest(others)) is (value == other)


def test_the_default_device_of_new_tensors_does_not_count() -> None:
    tensors = [torch.arange(3000.0), torch.ones(3)]
    with torch.device("meta"):
        numbers = digests(tensors)
    assert numbers == digests(tensors)


def test_digests_are_in_the_order_of_the_tensors() -> None:
    tensors = [torch.ones(3), torch.zeros(0, 5), torch.zeros(())]
    assert digests(tensors) == [digest(tensor) for tensor in tensors]
    assert digests([]) == []


@given(st.data())
def test_combined_digests_tell_each_flipped_bit_and_swapped_element(data: st.DataObject) -> None:
    # Most of these are smaller than a row, and one is larger than a chunk of rows.
    lengths = [1, 7, 2048, 2049, 20_000, 0, 300_001, 5]
    tensors = [torch.linspace(-1, 1, length) for length in lengths]
    tensors.append(torch.arange(9, dtype=torch.bfloat16))
    number = combined_digests(tensors)
    places = st.sampled_from([0, 1, 2, 3, 4, 6, 7])
    first = data.draw(places)
    second = data.draw(places)
    first_index = data.draw(st.integers(0, lengths[first] - 1))
    second_index = data.draw(st.integers(0, lengths[second] - 1))

    mask = 1 << data.draw(st.integers(0, 30))
    changed = list(tensors)
    changed[first] = flip_bits(tensors[first], first_index, mask)
    assert combined_digests(changed) != number

    first_value = float(tensors[first][first_index])
    second_value = float(tensors[second][second_index])
    swapped = [tensor.clone() for tensor in tensors]
    swapped[first][first_index] = second_value
    swapped[second][second_index] = first_value
    assert (combined_digests(swapped) == number) is (first_value == second_value)


class CopyRecorder(TorchDispatchMode):
    """Counts the operators that run, and records the bytes of concatenated tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.copied_bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_calls += 1
        if func is torch.ops.aten.cat.default:
            self.copied_bytes.append(result.nbytes)
        return result


def test_small_tensors_are_copied_a_chunk_at_a_time_in_few_calls() -> None:
    tensors = [torch.zeros(10_000) for _ in range(200)]
    with CopyRecorder() as recorder:
        combined_digests(tensors)
    chunk_bytes = 64 * 8192
    largest_piece = 10_000 * 4
    assert max(recorder.copied_bytes) <= chunk_bytes + largest_piece + 8192
    assert sum(recorder.copied_bytes) < 1.1 * 200 * largest_piece
    assert recorder.num_calls < 2 * len(tensors)
