"""Digests tell any two tensors apart, and those of shards add up to that of the whole tensor."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric.checkpoint.encoding import Chunk, tensor_bytes
from fabric.testing.generators import shapes, tensors
from fabric.tools.digest import SKETCH_SIZE, DigestTables, unpack_digest
from fabric.tools.records import Digest

TABLES = DigestTables()
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def digest_of(tensor: Tensor) -> Digest:
    return digest_of_chunk([0] * tensor.dim(), tensor, tensor.shape)


def digest_of_chunk(offsets: list[int], tensor: Tensor, shape: Any) -> Digest:
    packed = TABLES.packed_digest(Chunk(offsets, tensor), shape)
    return unpack_digest(packed.tolist())


def sum_of(digests: list[Digest]) -> Digest:
    sketches = [digest.sketch for digest in digests]
    return Digest(
        hash=sum(digest.hash for digest in digests) % 2**64,
        square=math.fsum(digest.square for digest in digests),
        sketch=tuple(map(math.fsum, zip(*sketches, strict=True))),
    )


def assert_same(actual: Digest, expected: Digest) -> None:
    """Compare two digests: the hashes exactly, and the rest to the rounding of float64."""
    assert actual.hash == expected.hash
    tolerance = 1e-12 * (expected.norm + 1)
    assert actual.norm == pytest.approx(expected.norm, rel=1e-12, nan_ok=True)
    assert actual.sketch == pytest.approx(expected.sketch, abs=tolerance, rel=1e-9, nan_ok=True)


def bits_of(tensor: Tensor) -> bytes:
    return bytes(tensor_bytes(tensor))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_hashes_are_equal_for_equal_bits_alone(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(shapes())
    tensor = data.draw(tensors(dtype, shape))
    other = data.draw(tensors(dtype, shape))
    has_equal_hashes = digest_of(tensor).hash == digest_of(other).hash
    assert has_equal_hashes == (bits_of(tensor) == bits_of(other))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_tensor_cut_along_any_dimensions_has_the_sum_of_the_digests(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    tensor = torch.randn(shape, dtype=torch.float64).mul(100).to(dtype)
    cuts = []
    for size in shape:
        cut = data.draw(st.integers(0, size))
        cuts.append([(0, cut), (cut, size)])
    digests = []
    for box in itertools.product(*cuts):
        slices = tuple(slice(*interval) for interval in box)
        offsets = [begin for begin, _ in box]
        digests.append(digest_of_chunk(offsets, tensor[slices], tensor.shape))
    assert_same(sum_of(digests), digest_of(tensor))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 131, 200])
def test_shards_of_a_large_tensor_add_up_wherever_it_is_cut(dim, size):
    tensor = torch.randn(450, 500)  # four blocks of the tables
    offsets = [0, 0]
    digests = []
    for shard in tensor.split(size, dim):
        digest = digest_of_chunk(list(offsets), shard, tensor.shape)
        digests.append(digest)
        offsets[dim] += size
    assert_same(sum_of(digests), digest_of(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_permutation_of_different_elements_has_another_hash(dtype):
    count = 2 if dtype is torch.bool else 5
    hashes = set()
    for permutation in itertools.permutations(range(count)):
        digest = digest_of(torch.tensor(permutation).to(dtype))
        hashes.add(digest.hash)
    assert len(hashes) == math.factorial(count)


def test_permuted_rows_with_equal_xor_have_different_hashes():
    rows = torch.randn(6, 70_000)  # more than a block
    permuted = rows.flip(0)
    assert torch.hash_tensor(rows) == torch.hash_tensor(permuted)
    assert digest_of(rows).hash != digest_of(permuted).hash
    assert digest_of(rows).norm == pytest.approx(digest_of(permuted).norm)


@given(st.integers(0, 70_000), st.integers(0, 31))
@settings(max_examples=25, deadline=None)
def test_a_flipped_bit_changes_the_hash(index, bit):
    tensor = torch.ones(70_001)
    before = digest_of(tensor).hash
    mask = 1 << bit
    if bit == 31:
        mask = -(1 << 31)
    tensor.view(torch.int32)[index] ^= mask
    assert digest_of(tensor).hash != before


def test_minus_zero_and_the_payloads_of_nans_count_in_the_hash():
    bits = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001], dtype=torch.int32)
    numbers = bits.view(torch.float32)
    hashes = {digest_of(number).hash for number in numbers}
    assert len(hashes) == 4


@given(st.sampled_from(DTYPES), st.sampled_from(["transposed", "strided", "expanded", "flipped"]))
@settings(max_examples=60, deadline=None)
def test_the_layout_in_memory_does_not_count(dtype, layout):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    views = {
        "transposed": tensor.T,
        "strided": tensor[::2, 1::3],
        "expanded": tensor[:1].expand(3, 6),
        "flipped": tensor[1:, 2:],
    }
    view = views[layout]
    assert_same(digest_of(view), digest_of(view.clone(memory_format=torch.contiguous_format)))


def test_views_that_conjugate_or_negate_have_the_digest_of_their_values():
    tensor = torch.randn(5, dtype=torch.complex64)
    conjugate = tensor.conj()
    assert_same(digest_of(conjugate), digest_of(conjugate.resolve_conj()))
    assert_same(digest_of(conjugate.imag), digest_of(conjugate.imag.resolve_neg()))
    assert digest_of(conjugate).hash != digest_of(tensor).hash


def test_a_sparse_tensor_has_the_digest_of_the_dense_tensor():
    dense = torch.zeros(7, 5, 2)
    dense[1] = torch.randn(5, 2)
    dense[4, 3, 1] = 2.0
    for sparse_dims in (1, 2, 3):
        assert_same(digest_of(dense.to_sparse(sparse_dims)), digest_of(dense))


def test_repeated_indices_of_a_sparse_tensor_are_added_up_first():
    indices = torch.tensor([[2, 2]])
    values = torch.tensor([[1.0], [2.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (4, 1), check_invariants=True)
    assert_same(digest_of(sparse), digest_of(sparse.to_dense()))


def test_an_empty_tensor_adds_nothing():
    assert digest_of(torch.empty(0, 3)) == Digest(0, 0.0, (0.0,) * SKETCH_SIZE)


@given(st.floats(1e-6, 1e3), st.integers(1, 20_000))
@settings(max_examples=20, deadline=None)
def test_sketches_are_as_far_apart_as_the_tensors(distance, size):
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randn(size, generator=generator, dtype=torch.float64)
    difference = torch.randn(size, generator=generator, dtype=torch.float64)
    difference *= distance / difference.norm()
    sketch = torch.tensor(digest_of(tensor).sketch, dtype=torch.float64)
    other_sketch = torch.tensor(digest_of(tensor + difference).sketch, dtype=torch.float64)
    estimate = (other_sketch - sketch).square().mean().sqrt().item()
    assert distance / 20 < estimate < 4 * distance


def test_the_default_device_of_new_tensors_does_not_count():
    values = torch.arange(24.0).reshape(4, 6)
    chunks = [
        Chunk([0, 0], values),
        Chunk([0, 0], values.to_sparse()),
        Chunk([1, 2], values[1:3, 2:5]),
    ]
    expected = [TABLES.packed_digest(chunk, values.shape) for chunk in chunks]
    with torch.device("meta"):
        tables = DigestTables()
        actual = [tables.packed_digest(chunk, values.shape) for chunk in chunks]
        digests = [unpack_digest(packed.tolist()) for packed in actual]
        row_hashes = tables.row_hashes(values)
    assert [packed.tolist() for packed in actual] == [packed.tolist() for packed in expected]
    assert digests == [unpack_digest(packed.tolist()) for packed in expected]
    assert torch.equal(row_hashes, TABLES.row_hashes(values))


def test_digests_do_not_depend_on_the_release_of_torch_or_the_machine():
    tensor = torch.arange(200_000, dtype=torch.int32)
    digest = digest_of(tensor)
    assert digest.hash == 13990456759447747
    expected = (-3888873.956197746, -65020750.5673581, 10570203.061637389, -3464670.671544738)
    assert digest.sketch == pytest.approx(expected, rel=1e-9)


def test_rows_have_hashes_that_do_not_depend_on_their_position():
    rows = torch.randn(5, 3, 30_000)
    order = torch.tensor([3, 0, 4, 1, 2])
    hashes = TABLES.row_hashes(rows)
    assert torch.equal(TABLES.row_hashes(rows[order]), hashes[order])
    assert len(set(hashes.tolist())) == 5
    changed = rows.clone()
    changed[2, 1, 29_000] += 1
    is_equal = TABLES.row_hashes(changed) == hashes
    assert is_equal.tolist() == [True, True, False, True, True]
