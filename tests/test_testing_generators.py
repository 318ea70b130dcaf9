"""What the hypothesis strategies draw."""

import functools
import operator
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from fabric.testing import PerRank
from fabric.testing import generators as gen
from fabric.tree import flatten

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)
ONCE = settings(database=None, derandomize=True, max_examples=2000)


@FEW
@given(st.data())
def test_ranks_agree_in_structure_shape_and_dtype(data: Any) -> None:
    drawn = data.draw(gen.per_rank_trees(3))
    kinds = {
        str([getattr(leaf, "shape", type(leaf)) for leaf in flatten(value)[0]])
        for value in drawn.values
    }
    dtypes = {
        str([getattr(leaf, "dtype", None) for leaf in flatten(value)[0]]) for value in drawn.values
    }
    assert (len(drawn.values), len(kinds), len(dtypes)) == (3, 1, 1)


@FEW
@given(st.data())
def test_exact_floats_sum_the_same_in_any_order(data: Any) -> None:
    dtype = data.draw(st.sampled_from(gen.FLOATS))
    values = data.draw(st.lists(gen.tensors(dtype, (4,)), min_size=8, max_size=8))
    order = data.draw(st.permutations(values))
    assert torch.equal(
        sum(values, torch.zeros(4, dtype=dtype)), sum(order, torch.zeros(4, dtype=dtype))
    )


@FEW
@given(st.data())
def test_layouts_keep_shape_and_dtype_and_but_for_expanded_the_values(data: Any) -> None:
    plain = data.draw(gen.tensors(gen.dtypes(), layout="contiguous"))
    for layout in gen.LAYOUTS:
        laid = gen.lay_out(plain, layout)
        assert (laid.shape, laid.dtype) == (plain.shape, plain.dtype)
        assert layout == "expanded" or torch.equal(laid, plain)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda x: x.dim() == 0,
        lambda x: x.numel() == 0,
        lambda x: x.numel() > 1 and not x.is_contiguous(),
        lambda x: x.storage_offset() > 0,
        lambda x: 0 in x.stride() and x.numel() > 1,
    ],
    ids=["0-dim", "empty", "strided", "offset", "expanded"],
)
def test_every_kind_of_tensor_comes_up(wanted: Any) -> None:
    assert wanted(find(gen.tensors(), wanted, settings=ONCE))


@FEW
@given(st.data())
def test_reductions_and_dtypes_fit(data: Any) -> None:
    op = data.draw(gen.reduce_ops())
    assert op in gen.REDUCE_OPS
    dtype = data.draw(gen.dtypes(op))
    assert dtype.is_floating_point or dtype.is_complex or op != "mean"
    assert not dtype.is_complex or data.draw(gen.reduce_ops(dtype)) in ("sum", "mean")


@FEW
@given(st.data())
def test_groups_are_sorted_and_partitions_cover_the_world(data: Any) -> None:
    size = data.draw(gen.world_sizes(4))
    group = data.draw(gen.groups(size))
    assert group == sorted(set(group))
    assert set(group) <= set(range(size))
    assert sorted(functools.reduce(operator.iadd, data.draw(gen.partitions(size)), [])) == list(
        range(size)
    )


def test_lengths_differ_where_asked() -> None:
    ragged = gen.per_rank_tensors(2, ragged=True)
    actual = find(
        ragged, lambda drawn: drawn.values[0].shape[0] != drawn.values[1].shape[0], settings=ONCE
    )
    assert sorted(value.shape[0] for value in actual.values) == [0, 1]


def test_what_is_printed_shows_the_strides() -> None:
    assert repr(PerRank([torch.zeros(4)[::2]])) == "PerRank([tensor([0., 0.]) of strides (2,)])"
    assert repr(PerRank([{"a": 1}, torch.zeros(1)])) == "PerRank([{'a': 1}, tensor([0.])])"
