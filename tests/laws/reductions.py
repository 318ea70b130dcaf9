"""Laws of reductions.

Integers, booleans and exact floats agree bit for bit. The sum of arbitrary floats depends on the order in which it
is taken, which from three ranks on depends on the place in the buffer: it is within ``n * eps * sum(|x|)`` of the
true one.
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
from tests.laws.operations import ROWS, WHOLE
from tests.laws.values import EXACT_OPS, rows, values_for


def all_reduce_agrees_with_its_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    values = draw(gen.per_rank_trees(size, op), "values")
    found = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    assert_same(found, oracles.all_reduce(values.values, op))


def reduce_scatter_agrees_with_its_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    dtype = draw(gen.dtypes(op), "dtype")
    shape = (size, *draw(gen.shapes(max_dims=2)))
    values = draw(gen.per_rank_tensors(size, dtype, shape), "values")
    found = subject.run(size, lambda fabric, x: fabric.reduce_scatter(x, reduce_op=op), values)
    assert_same(found, oracles.reduce_scatter(values.values, op))


def products_are_exact_for_integers_and_rounded_once_a_rank_for_floats(
    subject: Subject, draw: Draw
) -> None:
    size = draw(gen.world_sizes(), "size")
    dtype = draw(gen.dtypes("product"), "dtype")
    values = draw(gen.per_rank_tensors(size, dtype), "values")
    found = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op="product"), values)
    rtol = size * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    assert_same(found, oracles.all_reduce(values.values, "product"), rtol=rtol)


def sums_of_arbitrary_floats_are_within_the_bound(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(["sum", "mean"]), "reduce_op")
    dtype = draw(st.sampled_from(gen.FLOATS), "dtype")
    values = draw(gen.per_rank_tensors(size, dtype, exact=False), "values")
    found = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    columns = list(zip(*(value.flatten().tolist() for value in values.values), strict=True))
    for result in found:
        assert (result.dtype, result.shape) == (dtype, values.values[0].shape)
        for actual, column in zip(result.flatten().tolist(), columns, strict=True):
            assert_is_near_sum(actual, column, dtype, parts=size if op == "mean" else 1)


def assert_is_near_sum(
    actual: float, column: tuple[float, ...], dtype: torch.dtype, parts: int
) -> None:
    limits = torch.finfo(dtype)
    # Behind the point where numbers lose bits an error is no longer relative.
    bound = (
        len(column) * limits.eps * fsum(map(abs, column)) / parts
        + limits.smallest_normal * limits.eps
    )
    assert abs(actual - fsum(column) / parts) <= bound, (
        f"{actual} of {column}, off by more than {bound}"
    )


def every_rank_has_the_same_bits(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(["sum", "mean", "product"]), "reduce_op")
    values = draw(
        gen.per_rank_tensors(size, draw(st.sampled_from(gen.FLOATS)), exact=False), "values"
    )
    first, *others = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    for other in others:
        assert_same(other, first)


def the_extremes_of_arbitrary_floats_are_exact(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(["min", "max"]), "reduce_op")
    values = draw(
        gen.per_rank_tensors(size, draw(st.sampled_from(gen.FLOATS)), exact=False), "values"
    )
    found = subject.run(size, lambda fabric, x: fabric.all_reduce(x, reduce_op=op), values)
    assert_same(found, oracles.all_reduce(values.values, op))


def ranks_can_be_permuted(subject: Subject, draw: Draw) -> None:
    """Who holds which value changes no reduction, and the order of what is gathered accordingly."""
    size = draw(gen.world_sizes(min_size=2), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    values = draw(gen.per_rank_tensors(size, draw(gen.dtypes(op), "dtype")), "values")
    order = draw(st.permutations(range(size)), "order")

    def both(fabric: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return fabric.all_reduce(x, reduce_op=op), fabric.all_gather(x)

    [(reduced, gathered), *_] = subject.run(size, both, values)
    permuted = subject.run(size, both, PerRank([values.values[rank] for rank in order]))
    assert_same(permuted, [(reduced, gathered[list(order)])] * size)


def all_gather_then_sum_is_all_reduce(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(gen.per_rank_trees(size, "sum", with_numbers=False), "values")
    gathered, reduced = zip(
        *subject.run(
            size,
            lambda fabric, x: (fabric.all_gather(x), fabric.all_reduce(x, reduce_op="sum")),
            values,
        ),
        strict=True,
    )
    assert_same(
        list(reduced), [map_tensors(lambda x: x.sum(0, dtype=x.dtype), tree) for tree in gathered]
    )


def reduce_scatter_then_all_gather_is_all_reduce(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    op = draw(st.sampled_from(EXACT_OPS), "reduce_op")
    values = draw(rows(size, op), "values")

    def both(fabric: Any, x: Any) -> tuple[Any, Any]:
        return fabric.all_gather(fabric.reduce_scatter(x, reduce_op=op)), fabric.all_reduce(
            x, reduce_op=op
        )

    for in_parts, whole in subject.run(size, both, values):
        assert_same(in_parts, whole)


def a_collection_travels_as_its_leaves_would(subject: Subject, draw: Draw) -> None:
    """Coalesced is one by one."""
    size = draw(gen.world_sizes(), "size")
    name = draw(st.sampled_from([*WHOLE, *ROWS]), "operation")
    values = draw(values_for(name, size), "values")
    call = {**WHOLE, **ROWS}[name].call

    def both(fabric: Any, tree: Any) -> tuple[Any, Any]:
        leaves, structure = flatten(tree)
        alone = unflatten(structure, [call(fabric, leaf, None, size) for leaf in leaves])
        return call(fabric, tree, None, size), alone

    for together, alone in subject.run(size, both, values):
        assert_same(together, alone)


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
