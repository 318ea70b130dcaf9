"""Laws of reductions.

Integers, booleans and exact floats agree bit for bit. The sum of arbitrary floats depends on the
order of the terms. With three ranks or more, that order depends on the position in the buffer. The
result is within ``n * eps * sum(|x|)`` of the true sum.
"""

from math import fsum
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import PerRank, assert_same, oracles
from fabric.testing import generators as gen
from fabric.tree import flatten, map_tensors, unflatten
from tests.laws.base import Draw, Subject
from tests.laws.operations import ON_ROWS, ON_TREES
from tests.laws.values import EXACT_OPS, rows, values_for


def all_reduce_agrees_with_its_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    values = draw(gen.per_rank_trees(size, op), "values")
    results = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    expected = oracles.all_reduce(values.values, op)
    assert_same(results, expected)


def reduce_scatter_agrees_with_its_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    dtype = draw(gen.dtypes(op), "dtype")
    shape = (size, *draw(gen.shapes(max_dims=2)))
    values = draw(gen.per_rank_tensors(size, dtype, shape), "values")
    results = subject.run(size, lambda fabric, x: fabric.reduce_scatter(x, reduce_op=op), values)
    expected = oracles.reduce_scatter(values.values, op)
    assert_same(results, expected)


def products_are_exact_for_integers_and_rounded_once_a_rank_for_floats(
    subject: Subject, draw: Draw
) -> None:
    size = draw(gen.world_sizes(), "size")
    dtype = draw(gen.dtypes("product"), "dtype")
    values = draw(gen.per_rank_tensors(size, dtype), "values")
    results = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op="product"), values)
    rtol = 0.0
    if dtype.is_floating_point:
        rtol = size * torch.finfo(dtype).eps
    assert_same(results, oracles.all_reduce(values.values, "product"), rtol=rtol)


def sums_of_arbitrary_floats_are_within_the_bound(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(["sum", "mean"]), "reduce_op")
    dtype = draw(st.sampled_from(gen.FLOATS), "dtype")
    values = draw(gen.per_rank_tensors(size, dtype, exact=False), "values")
    results = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    columns = list(zip(*(value.flatten().tolist() for value in values.values), strict=True))
    for result in results:
        assert result.dtype == dtype
        assert result.shape == values.values[0].shape
        for actual, terms in zip(result.flatten().tolist(), columns, strict=True):
            divisor = size if op == "mean" else 1
            assert_is_near_sum(actual, terms, dtype, divisor)


def assert_is_near_sum(
    actual: float, terms: tuple[float, ...], dtype: torch.dtype, divisor: int
) -> None:
    limits = torch.finfo(dtype)
    relative_bound = len(terms) * limits.eps * fsum(map(abs, terms)) / divisor
    # Denormal numbers have fewer bits, so that their error is not relative.
    bound = relative_bound + limits.smallest_normal * limits.eps
    expected = fsum(terms) / divisor
    assert abs(actual - expected) <= bound, f"{actual} of {terms}, off by more than {bound}"


def every_rank_has_the_same_bits(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(["sum", "mean", "product"]), "reduce_op")
    values = draw(
        gen.per_rank_tensors(size, draw(st.sampled_from(gen.FLOATS)), exact=False), "values"
    )
    results = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    for result in results:
        assert_same(result, results[0])


def the_extremes_of_arbitrary_floats_are_exact(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(["min", "max"]), "reduce_op")
    values = draw(
        gen.per_rank_tensors(size, draw(st.sampled_from(gen.FLOATS)), exact=False), "values"
    )
    results = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    expected = oracles.all_reduce(values.values, op)
    assert_same(results, expected)


def ranks_can_be_permuted(subject: Subject, draw: Draw) -> None:
    """Permuted values have the same reductions, and are gathered in the permuted order."""
    size = draw(gen.world_sizes(min_size=2), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    values = draw(gen.per_rank_tensors(size, draw(gen.dtypes(op), "dtype")), "values")
    order = draw(st.permutations(range(size)), "order")

    def run_both(fabric: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return fabric.all_reduce(x, reduce_op=op), fabric.all_gather(x)

    [(reduced, gathered), *_] = subject.run(size, run_both, values)
    permuted = subject.run(size, run_both, PerRank([values.values[rank] for rank in order]))
    assert_same(permuted, [(reduced, gathered[list(order)])] * size)


def all_gather_then_sum_is_all_reduce(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(gen.per_rank_trees(size, "sum", with_numbers=False), "values")

    def gather_and_reduce(fabric: Any, x: Any) -> tuple[Any, Any]:
        return fabric.all_gather(x), fabric.all_reduce(x, reduce_op="sum")

    for gathered, reduced in subject.run(size, gather_and_reduce, values):
        assert_same(reduced, map_tensors(lambda x: x.sum(0, dtype=x.dtype), gathered))


def reduce_scatter_then_all_gather_is_all_reduce(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    values = draw(rows(size, op), "values")

    def run_both(fabric: Any, x: Any) -> tuple[Any, Any]:
        row = fabric.reduce_scatter(x, reduce_op=op)
        return fabric.all_gather(row), fabric.all_reduce(x, reduce_op=op)

    for gathered, reduced in subject.run(size, run_both, values):
        assert_same(gathered, reduced)


def a_collection_travels_as_its_leaves_would(subject: Subject, draw: Draw) -> None:
    """A tree in one call has the results of its leaves in calls of their own."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from([*ON_TREES, *ON_ROWS]), "operation")
    values = draw(values_for(name, size), "values")
    call = {**ON_TREES, **ON_ROWS}[name].call

    def run_both(fabric: Any, tree: Any) -> tuple[Any, Any]:
        leaves, structure = flatten(tree)
        results = [call(fabric, leaf, None, size) for leaf in leaves]
        return call(fabric, tree, None, size), unflatten(structure, results)

    for coalesced, separate in subject.run(size, run_both, values):
        assert_same(coalesced, separate)


LAWS = (
    all_reduce_agrees_with_its_oracle,
    reduce_scatter_agrees_with_its_oracle,
    products_are_exact_for_integers_and_rounded_once_a_rank_for_floats,
    sums_of_arbitrary_floats_are_within_the_bound,
    every_rank_has_the_same_bits,
    the_extremes_of_arbitrary_floats_are_exact,
    ranks_can_be_permuted,
    all_gather_then_sum_is_all_reduce,
    reduce_scatter_then_all_gather_is_all_reduce,
    a_collection_travels_as_its_leaves_would,
)
