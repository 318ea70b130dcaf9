"""Hypothesis strategies for inputs of collectives: sizes, groups, dtypes, shapes, layouts, collections, PerRank values.

Everything is drawn once, in the process that runs the test, and passed to the ranks: ranks that drew for themselves
could differ by accident. Needs hypothesis: ``pip install "torch-fabric[testing]"``.

Values are *exact* by default: every partial sum of up to eight of them, in any order, can be represented in the dtype,
even a 16-bit float, so a test can compare bit for bit. Floats are multiples of 0.25 from -4 to 4; integers cover an
eighth of their range.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from fabric.errors import MissingDependencyError
from fabric.testing.base import Pair, PerRank, Record
from fabric.tree import map_leaves

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingDependencyError(
        "hypothesis is not installed", 'pip install "torch-fabric[testing]"'
    ) from error

__all__ = [
    "DTYPES", "FLOATS", "LAYOUTS", "REDUCE_OPS", "dtypes", "groups", "lay_out", "numbers", "partitions",
    "per_rank", "per_rank_tensors", "per_rank_trees", "reduce_ops", "shapes", "tensor_of", "tensors", "trees",
    "world_sizes",
]  # fmt: skip

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *_INTEGERS, torch.bool, *_COMPLEX)
LAYOUTS = ("contiguous", "strided", "transposed", "offset", "expanded")

_OF_OP = {
    "sum": (*FLOATS, *_INTEGERS, *_COMPLEX),
    "mean": (*FLOATS, *_COMPLEX),
    **dict.fromkeys(("min", "max"), (*FLOATS, *_INTEGERS, torch.bool)),
    "product": (*FLOATS, *_INTEGERS),
    **dict.fromkeys(("band", "bor", "bxor"), (*_INTEGERS, torch.bool)),
}
REDUCE_OPS = tuple(_OF_OP)
_NUMBERS = (torch.float64, torch.int64, torch.bool)  # the dtypes of Python numbers


def world_sizes(max_size: int = 4, min_size: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks; small ones are simpler."""
    return st.integers(min_size, max_size)


def groups(world_size: int, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Distinct ranks of a world, in ascending order."""
    ranks = st.integers(0, world_size - 1)
    return st.lists(ranks, min_size=min_size, max_size=world_size, unique=True).map(sorted)


def partitions(world_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Disjoint groups that together have all ranks of a world."""

    def grouped(labels: list[int]) -> list[list[int]]:
        return [
            [rank for rank, own in enumerate(labels) if own == label]
            for label in sorted(set(labels))
        ]

    return st.lists(st.integers(0, world_size - 1), min_size=world_size, max_size=world_size).map(
        grouped
    )


def dtypes(reduce_op: str | None = None) -> st.SearchStrategy[torch.dtype]:
    """Dtypes that collectives support; with a reduction, those that it is defined for."""
    return st.sampled_from(DTYPES if reduce_op is None else _OF_OP[reduce_op])


def reduce_ops(dtype: torch.dtype | None = None) -> st.SearchStrategy[str]:
    """Names of reductions; with a dtype, those that are defined for it."""
    return st.sampled_from([op for op in REDUCE_OPS if dtype is None or dtype in _OF_OP[op]])


def shapes(
    max_dims: int = 3, max_side: int = 3, *, min_dims: int = 0, min_side: int = 0
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, including ``()`` and shapes without elements."""
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(
        tuple
    )


def tensors(
    dtype: Any = torch.float32, shape: Any = None, layout: Any = None, *, exact: bool = True
) -> st.SearchStrategy[Tensor]:
    """Tensors.

    Args:
        dtype: the dtype, or a strategy for it.
        shape: the shape, or a strategy for it; None for :func:`shapes`.
        layout: one of ``LAYOUTS``, or a strategy for it; None for any; see :func:`lay_out`.
        exact: whether sums are exact, see the top of the module; otherwise any floats from -1,000 to 1,000.
    """
    return _leaves(dtype, shape, layout, exact).flatmap(lambda values: values)


def numbers() -> st.SearchStrategy[Any]:
    """Python numbers: floats, integers and booleans."""
    return st.sampled_from(_NUMBERS).flatmap(_elements)


def trees(leaves: st.SearchStrategy[Any], max_leaves: int = 5) -> st.SearchStrategy[Any]:
    """Nested dicts, lists, tuples, namedtuples and dataclasses of leaves, including empty ones, or a single leaf."""
    keys = st.sampled_from(["a", "b", "c", 0, 1])

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        of_any_length = st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
        return (
            of_any_length
            | st.tuples(inner, inner)
            | st.builds(Pair, inner, inner)
            | st.builds(Record, inner, inner)
        )

    return st.recursive(leaves, nested, max_leaves=max_leaves)


def per_rank(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[PerRank]:
    """One value per rank, drawn independently."""
    return st.lists(values, min_size=size, max_size=size).map(PerRank)


@st.composite
def per_rank_tensors(
    draw: st.DrawFn,
    size: int,
    dtype: Any = torch.float32,
    shape: Any = None,
    *,
    exact: bool = True,
    ragged: bool = False,
) -> PerRank:
    """Tensors of one dtype and shape, with different values and layouts on each rank.

    Args:
        draw: passed by hypothesis.
        size: number of ranks.
        dtype: as for :func:`tensors`.
        shape: as for :func:`tensors`.
        exact: as for :func:`tensors`.
        ragged: whether the length along dim 0 may differ between ranks; the shape then needs at least one dimension.
    """
    common = draw(_strategy(shape, _SHAPES[ragged]))
    kind = draw(_strategy(dtype))
    own = [(draw(_LENGTHS), *common[1:]) if ragged else common for _ in range(size)]
    return PerRank([draw(_tensors(kind, shape, draw(_ANY_LAYOUT), exact)) for shape in own])


@functools.cache
def per_rank_trees(
    size: int, reduce_op: str | None = None, *, with_numbers: bool = True, max_leaves: int = 5
) -> st.SearchStrategy[PerRank]:
    """Collections of one structure, shapes and dtypes, with different values on each rank.

    The insertion order of dicts differs between ranks.

    Args:
        size: number of ranks.
        reduce_op: only dtypes that this reduction is defined for.
        with_numbers: whether some leaves are Python numbers.
        max_leaves: the approximate maximum number of leaves.
    """
    leaves: st.SearchStrategy[Any] = _leaves(dtypes(reduce_op), None, None, exact=True)
    kinds = [dtype for dtype in _NUMBERS if reduce_op is None or dtype in _OF_OP[reduce_op]]
    if with_numbers and kinds:
        leaves |= st.sampled_from(kinds).map(_elements)
    of_ranks = trees(leaves.flatmap(lambda values: per_rank(values, size)), max_leaves)
    return of_ranks.map(lambda tree: PerRank([_of_rank(tree, rank) for rank in range(size)]))


def tensor_of(
    values: list[Any], *, dtype: torch.dtype, shape: tuple[int, ...], layout: str
) -> Tensor:
    """A tensor of these values, one per element of the shape, in one of ``LAYOUTS``; see :func:`lay_out`."""
    return lay_out(torch.tensor(values, dtype=dtype).reshape(shape), layout)


_SHAPES = shapes(), shapes(min_dims=1)  # any shape; shapes with a dim 0, which may differ
_ANY_LAYOUT = st.sampled_from(LAYOUTS)
_LENGTHS = st.integers(0, 3)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout, where possible; unused elements of the storage have a fill value.

    Args:
        tensor: any tensor.
        layout: ``"contiguous"``; ``"strided"``, every second element of the storage; ``"transposed"``, first and last
            dimension swapped in memory; ``"offset"``, a storage offset of one; ``"expanded"``, the first row repeated
            with a stride of 0.
    """
    if layout == "strided":
        return _fill_value((*tensor.shape, 2), tensor)[..., 0].copy_(tensor)
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        return _fill_value((tensor.numel() + 1,), tensor)[1:].view(tensor.shape).copy_(tensor)
    if layout == "expanded" and tensor.dim() > 0 and tensor.shape[0] > 1:
        return tensor[:1].expand(tensor.shape)
    return tensor


# Cached: hypothesis spends more time on creating a strategy than on drawing from it.
@functools.lru_cache(maxsize=4096)
def _tensors(
    dtype: torch.dtype, shape: tuple[int, ...], layout: str, exact: bool
) -> st.SearchStrategy[Tensor]:
    count = torch.Size(shape).numel()
    values = st.lists(_elements(dtype, exact), min_size=count, max_size=count)
    # Built by a public function, since hypothesis prints this call for a failing example.
    return st.builds(
        tensor_of, values, dtype=st.just(dtype), shape=st.just(shape), layout=st.just(layout)
    )


def _leaves(
    dtype: Any, shape: Any, layout: Any, exact: bool
) -> st.SearchStrategy[st.SearchStrategy[Tensor]]:
    """Draw dtype, shape and layout; the result is a strategy for tensors that have them."""
    parts = st.tuples(
        _strategy(dtype), _strategy(shape, _SHAPES[0]), _strategy(layout, _ANY_LAYOUT)
    )
    return parts.map(lambda drawn: _tensors(*drawn, exact))


def _of_rank(tree: Any, rank: int) -> Any:
    """The collection of one rank; each rank starts its dicts with a different key."""

    def of(part: Any) -> Any:
        if isinstance(part, PerRank):
            return part.values[rank]
        first = rank % max(1, len(part))
        items = [*part.items()][first:] + [*part.items()][:first]
        return {key: _of_rank(value, rank) for key, value in items}

    return map_leaves(of, tree, is_leaf=lambda part: isinstance(part, dict))


@functools.cache
def _elements(dtype: torch.dtype, exact: bool = True) -> st.SearchStrategy[Any]:
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        parts = _elements(torch.float32, exact)
        return st.builds(complex, parts, parts)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return st.integers(-(-limits.min // 8), limits.max // 8)
    if exact:
        return st.integers(-16, 16).map(lambda quarters: quarters / 4)
    return st.floats(-1000.0, 1000.0, width={2: 16, 4: 32}.get(dtype.itemsize, 64))  # type: ignore[arg-type]


def _strategy(value: Any, default: Any = None) -> st.SearchStrategy[Any]:
    value = default if value is None else value
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


def _fill_value(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.full(shape, 1 if like.dtype is torch.bool else 77, dtype=like.dtype)
