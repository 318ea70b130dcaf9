"""What the hypothesis strategies draw."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fabric.errors import ConfigurationError
from fabric.testing import PerRank
from fabric.testing import generators as gen
from fabric.tree import flatten

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)
# The first example that is found will do: to make it smaller takes longer than to find it.
ONCE = settings(database=None, derandomize=True, max_examples=2000, phases=[Phase.generate])
SHRUNK = settings(ONCE, phases=[Phase.generate, Phase.shrink])


def shapes_of_leaves(tree: Any) -> list[Any]:
    """Return the shape of each tensor of a tree, and the type of each other leaf."""
    leaves, _ = flatten(tree)
    shapes = []
    for leaf in leaves:
        shape = getattr(leaf, "shape", type(leaf))
        shapes.append(shape)
    return shapes


def dtypes_of_leaves(tree: Any) -> list[Any]:
    """Return the dtype of each tensor of a tree, and None for each other leaf."""
    leaves, _ = flatten(tree)
    return [getattr(leaf, "dtype", None) for leaf in leaves]


@FEW
@given(st.data())
def test_ranks_agree_in_structure_shape_and_dtype(data: Any) -> None:
    trees = data.draw(gen.per_rank_trees(3)).values
    assert len(trees) == 3
    for tree in trees:
        assert shapes_of_leaves(tree) == shapes_of_leaves(trees[0])
        assert dtypes_of_leaves(tree) == dtypes_of_leaves(trees[0])


@FEW
@given(st.data())
def test_exact_floats_sum_the_same_in_any_order(data: Any) -> None:
    dtype = data.draw(st.sampled_from(gen.FLOATS))
    values = data.draw(st.lists(gen.tensors(dtype, (4,)), min_size=8, max_size=8))
    permuted = data.draw(st.permutations(values))
    zeros = torch.zeros(4, dtype=dtype)
    assert torch.equal(sum(values, zeros), sum(permuted, zeros))


@FEW
@given(st.data())
def test_layouts_keep_shape_and_dtype_and_but_for_expanded_the_values(data: Any) -> None:
    plain = data.draw(gen.tensors(gen.dtypes(), layout="contiguous"))
    for layout in gen.LAYOUTS:
        tensor = gen.lay_out(plain, layout)
        assert tensor.shape == plain.shape
        assert tensor.dtype == plain.dtype
        if layout != "expanded":
            assert torch.equal(tensor, plain)


@pytest.mark.parametrize(
    "has_kind",
    [
        lambda x: x.dim() == 0,
        lambda x: x.numel() == 0,
        lambda x: x.numel() > 1 and not x.is_contiguous(),
        lambda x: x.storage_offset() > 0,
        lambda x: 0 in x.stride() and x.numel() > 1,
    ],
    ids=["0-dim", "empty", "strided", "offset", "expanded"],
)
def test_every_kind_of_tensor_comes_up(has_kind: Callable[[Tensor], bool]) -> None:
    tensor = find(gen.tensors(), has_kind, settings=ONCE)
    assert has_kind(tensor)


@FEW
@given(st.data())
def test_reductions_and_dtypes_fit(data: Any) -> None:
    op = data.draw(gen.reduce_ops())
    assert op in gen.REDUCE_OPS
    dtype = data.draw(gen.dtypes(op))
    if op == "mean":
        assert dtype.is_floating_point or dtype.is_complex
    if dtype.is_complex:
        op_of_dtype = data.draw(gen.reduce_ops(dtype))
        assert op_of_dtype in ("sum", "mean")


@pytest.mark.parametrize(
    "is_kind",
    [
        torch.isnan,
        lambda x: x == torch.inf,
        lambda x: x == -torch.inf,
        lambda x: (x == 0) & x.signbit(),
    ],
    ids=["nan", "inf", "-inf", "-0.0"],
)
def test_every_special_value_comes_up_on_request(is_kind: Callable[[Tensor], Tensor]) -> None:
    special = gen.tensors(torch.bfloat16, (1,), special_values=True)
    find(special, lambda x: is_kind(x).item(), settings=ONCE)
    numbers = gen.numbers(special_values=True)
    find(numbers, lambda x: is_kind(torch.tensor(x)).item(), settings=ONCE)


def test_trees_have_special_values_on_request() -> None:
    def has_nan(trees: PerRank) -> bool:
        leaves, _ = flatten(trees.values)
        return any(isinstance(leaf, float) and math.isnan(leaf) for leaf in leaves)

    find(gen.per_rank_trees(1, special_values=True), has_nan, settings=ONCE)


def test_integers_have_means_on_request() -> None:
    dtype = find(gen.dtypes("mean", integer_means=True), lambda dtype: dtype is torch.int8)
    assert dtype is torch.int8


@FEW
@given(st.data())
def test_groups_are_sorted_and_partitions_cover_the_world(data: Any) -> None:
    size = data.draw(gen.world_sizes(4))
    ranks = range(size)
    group = data.draw(gen.groups(size))
    assert group == sorted(set(group))
    assert set(group) <= set(ranks)
    ranks_of_partition = []
    for members in data.draw(gen.partitions(size)):
        ranks_of_partition.extend(members)
    assert sorted(ranks_of_partition) == list(ranks)


def has_two_lengths(tensors: PerRank) -> bool:
    first, second = tensors.values
    return len(first) != len(second)


@given(gen.per_rank_tensors(2, shape=(3, 2), layout="transposed"))
def test_the_layout_of_the_tensors_of_all_ranks_can_be_given(tensors: PerRank) -> None:
    assert [tensor.stride() for tensor in tensors.values] == [(1, 3), (1, 3)]


def test_lengths_differ_in_ragged_tensors() -> None:
    ragged = gen.per_rank_tensors(2, ragged=True)
    tensors = find(ragged, has_two_lengths, settings=SHRUNK)
    lengths = [len(tensor) for tensor in tensors.values]
    assert sorted(lengths) == [0, 1]


@pytest.mark.parametrize("shape", [(9,), gen.shapes(2, max_side=9, min_dims=1)])
def test_ragged_tensors_are_as_long_as_the_shape_says(shape: Any) -> None:
    ragged = gen.per_rank_tensors(2, shape=shape, ragged=True)

    def has_longest(tensors: PerRank) -> bool:
        return max(map(len, tensors.values)) == 9

    assert has_two_lengths(
        find(ragged, lambda drawn: has_longest(drawn) and has_two_lengths(drawn), settings=ONCE)
    )


def test_ragged_tensors_need_a_dimension() -> None:
    with pytest.raises(ConfigurationError, match="has no length that may differ"):
        find(gen.per_rank_tensors(2, shape=(), ragged=True), lambda _: True)


def test_what_is_printed_can_be_pasted_and_has_the_strides() -> None:
    strided = torch.arange(4.0)[1::2]
    text = "PerRank([tensor([1., 2., 3.]).as_strided((2,), (2,))])"
    assert repr(PerRank([strided])) == text


@settings(deadline=None)
@given(gen.per_rank_tensors(2, gen.dtypes(), special_values=True))
def test_what_is_printed_makes_equal_tensors(tensors: PerRank) -> None:
    names = {"PerRank": PerRank, "torch": torch, "tensor": torch.tensor}
    pasted = eval(repr(tensors), {**names, "nan": torch.nan, "inf": torch.inf})  # noqa: S307
    for actual, expected in zip(pasted.values, tensors.values, strict=True):
        if not expected.is_contiguous():
            assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_printed_shows_other_values_as_they_are() -> None:
    mixed = PerRank([{"a": 1}, torch.zeros(1)])
    assert repr(mixed) == "PerRank([{'a': 1}, tensor([0.])])"
