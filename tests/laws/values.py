"""Values to draw that several laws share; see fabric.testing.generators for the rest."""

from typing import Any

from hypothesis import strategies as st

from fabric.testing import PerRank, oracles
from fabric.testing import generators as gen

# Of exact values: their products are rounded, and have a law of their own.
EXACT_OPS = tuple(op for op in gen.REDUCE_OPS if op != "product")


def rows(size: int, reduce_op: str) -> st.SearchStrategy[PerRank]:
    """For each rank a collection of tensors with a row for each rank, all rows drawn independently."""

    def stacked(values: PerRank) -> PerRank:
        parts = [values.values[rank * size : (rank + 1) * size] for rank in range(size)]
        return PerRank([oracles.all_gather(own)[0] for own in parts])

    return gen.per_rank_trees(size * size, reduce_op, with_numbers=False, max_leaves=3).map(stacked)


def values_for(operation: str, size: int) -> st.SearchStrategy[PerRank]:
    """What an operation of :mod:`tests.laws.operations` takes, in a group of ``size``."""
    op = "mean" if operation.endswith("mean") else "sum"
    if operation.startswith(("reduce_scatter", "all_to_all")):
        return rows(size, op)
    if operation.startswith("all_reduce"):
        return gen.per_rank_trees(size, op)
    return gen.per_rank_trees(size)


def objects() -> st.SearchStrategy[Any]:
    """What a message may hold: collections of tensors, numbers, and what is neither; another on each rank."""
    leaves = st.one_of(
        gen.tensors(gen.dtypes()), gen.numbers(), st.sampled_from(["text", None, b"bytes"])
    )
    return gen.trees(leaves, max_leaves=3)
