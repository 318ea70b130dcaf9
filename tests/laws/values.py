"""Strategies for values that several laws share, beside :mod:`fabric.testing.generators`."""

from typing import Any

from hypothesis import strategies as st

from fabric.testing import PerRank, oracles
from fabric.testing import generators as gen

# Reductions of exact values that are exact. Products are rounded, and have a law of their own.
EXACT_OPS = tuple(op for op in gen.REDUCE_OPS if op != "product")


def rows(size: int, reduce_op: str) -> st.SearchStrategy[PerRank]:
    """Return a strategy for trees of tensors with a row for each rank.

    All rows are drawn independently: the values of ``size * size`` ranks are stacked.
    """

    def stack_rows(values: PerRank) -> PerRank:
        trees = []
        for rank in range(size):
            rows_of_rank = values.values[rank * size : (rank + 1) * size]
            stacked, *_ = oracles.all_gather(rows_of_rank)
            trees.append(stacked)
        return PerRank(trees)

    trees = gen.per_rank_trees(size * size, reduce_op, with_numbers=False, max_leaves=3)
    return trees.map(stack_rows)


def values_for(operation: str, size: int) -> st.SearchStrategy[PerRank]:
    """Return a strategy for the values of an operation of :mod:`tests.laws.operations`."""
    op = "mean" if operation.endswith("mean") else "sum"
    if operation.startswith(("reduce_scatter", "all_to_all")):
        return rows(size, op)
    if operation.startswith("all_reduce"):
        return gen.per_rank_trees(size, op)
    return gen.per_rank_trees(size)


def objects() -> st.SearchStrategy[Any]:
    """Return a strategy for trees of tensors, numbers and other objects."""
    plain_objects = st.sampled_from(["text", None, b"bytes"])
    return gen.trees(
        st.one_of(gen.tensors(gen.dtypes()), gen.numbers(), plain_objects), max_leaves=3
    )
