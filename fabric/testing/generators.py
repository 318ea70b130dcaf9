"""Hypothesis strategies for what collectives take: sizes, groups, dtypes, shapes, layouts, collections, values by rank.

Everything is drawn once, in the process that runs the test, and passed to the ranks: a strategy that each rank drew
from would let them disagree by accident. Needs hypothesis: ``pip install "torch-fabric[testing]"``.

Values are *exact* unless asked otherwise: every partial sum of up to eight of them, in any order, is a value of the
dtype, also of a 16-bit float, so that a law may ask for equality bit for bit. Floats are quarters from -4 to 4,
integers cover an eighth of their range.
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
    raise MissingDependencyError("hypothesis is not installed", 'pip install "torch-fabric[testing]"') from error

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
_NUMBERS = (torch.float64, torch.int64, torch.bool)  # what Python's are


def world_sizes(max_size: int = 4, min_size: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks; small ones are simpler."""
    return st.integers(min_size, max_size)


def groups(world_size: int, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Different ranks of a world, in ascending order."""
    ranks = st.integers(0, world_size - 1)
    return st.lists(ranks, min_size=min_size, max_size=world_size, unique=True).map(sorted)


def partitions(world_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Groups that share the ranks of a world among them, none left out."""

    def grouped(labels: list[int]) -> list[list[int]]:
        return [[rank for rank, own in enumerate(labels) if own == label] for label in sorted(set(labels))]

    return st.lists(st.integers(0, world_size - 1), min_size=world_size, max_size=world_size).map(grouped)


def dtypes(reduce_op: str | None = None) -> st.SearchStrategy[torch.dtype]:
    """Dtypes that collectives carry; with a reduction those that it has a meaning for."""
    return st.sampled_from(DTYPES if reduce_op is None else _OF_OP[reduce_op])


def reduce_ops(dtype: torch.dtype | None = None) -> st.SearchStrategy[str]:
    """Names of reductions; with a dtype those that have a meaning for it."""
    return st.sampled_from([op for op in REDUCE_OPS if dtype is None or dtype in _OF_OP[op]])


def shapes(
    max_dims: int = 3, max_side: int = 3, *, min_dims: int = 0, min_side: int = 0
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, among them ``()`` and those without elements."""
    return st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def tensors(
    dtype: Any = torch.float32, shape: Any = None, layout: Any = None, *, exact: bool = True
) -> st.SearchStrategy[Tensor]:
    """Tensors.

    Args:
        dtype: the dtype, or a strategy for it.
        shape: the shape, or a strategy for it; None for :func:`shapes`.
        layout: one of ``LAYOUTS``, or a strategy for it; None for any; see :func:`lay_out`.
        exact: whether sums are exact, see the note at the top; else any finite floats of up to 1,000.
    """
    return _leaves(dtype, shape, layout, exact).flatmap(lambda values: values)


def numbers() -> st.SearchStrategy[Any]:
    """Python numbers: floats, integers and booleans."""
    return st.sampled_from(_NUMBERS).flatmap(_elements)


def trees(leaves: st.SearchStrategy[Any], max_leaves: int = 5) -> st.SearchStrategy[Any]:
    """Collections of leaves: dicts, lists, tuples, namedtuples and dataclasses, nested, a lone leaf, empty ones."""
    keys = st.sampled_from(["a", "b", "c", 0, 1])

    def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        of_any_length = st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
        return of_any_length | st.tuples(inner, inner) | st.builds(Pair, inner, inner) | st.builds(Record, inner, inner)

    return st.recursive(leaves, nested, max_leaves=max_leaves)


def per_rank(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[PerRank]:
    """A value for each rank, drawn independently."""
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
    """Tensors of one dtype and shape, with values and a layout of its own for each rank.

    Args:
        draw: hypothesis's.
        size: number of ranks.
        dtype: as for :func:`tensors`, and so are the next two.
        shape: the shape.
        exact: whether sums are exact.
        ragged: whether the length along dim 0 may differ between ranks; the shape needs one dimension at least.
    """
    common = draw(_strategy(shape, _SHAPES[ragged]))
    kind = draw(_strategy(dtype))
    own = [(draw(_LENGTHS), *common[1:]) if ragged else common for _ in range(size)]
    return PerRank([draw(_tensors(kind, shape, draw(_ANY_LAYOUT), exact)) for shape in own])


@functools.cache
def per_rank_trees(
    size: int, reduce_op: str | None = None, *, with_numbers: bool = True, max_leaves: int = 5
) -> st.SearchStrategy[PerRank]:
    """Collections of one structure, with shapes and dtypes in common, and values of its own for each rank.

    The ranks fill their dicts in different orders.

    Args:
        size: number of ranks.
        reduce_op: leave out dtypes that this reduction has no meaning for.
        with_numbers: whether some leaves are Python numbers.
        max_leaves: about how many leaves.
    """
    leaves: st.SearchStrategy[Any] = _leaves(dtypes(reduce_op), None, None, exact=True)
    kinds = [dtype for dtype in _NUMBERS if reduce_op is None or dtype in _OF_OP[reduce_op]]
    if with_numbers and kinds:
        leaves |= st.sampled_from(kinds).map(_elements)
    of_ranks = trees(leaves.flatmap(lambda values: per_rank(values, size)), max_leaves)
    return of_ranks.map(lambda tree: PerRank([_of_rank(tree, rank) for rank in range(size)]))


def tensor_of(values: list[Any], *, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> Tensor:
    """The tensor of these values, as many as the shape has elements, in one of ``LAYOUTS``; see :func:`lay_out`."""
    return lay_out(torch.tensor(values, dtype=dtype).reshape(shape), layout)


_SHAPES = shapes(), shapes(min_dims=1)  # any; with a dim 0 that may differ
_ANY_LAYOUT, _LENGTHS = st.sampled_from(LAYOUTS), st.integers(0, 3)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another place in memory, where that can be; elements between them hold a fill value.

    Args:
        tensor: any tensor.
        layout: ``"contiguous"``; ``"strided"``, every second element; ``"transposed"``, first and last dimension
            swapped in memory; ``"offset"``, one element into the storage; ``"expanded"``, one row repeated with a
            stride of 0, which takes the values of the first row.
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


# Kept: hypothesis spends more time on making a strategy than on drawing from it.
@functools.lru_cache(maxsize=4096)
def _tensors(dtype: torch.dtype, shape: tuple[int, ...], layout: str, exact: bool) -> st.SearchStrategy[Tensor]:
    count = torch.Size(shape).numel()
    values = st.lists(_elements(dtype, exact), min_size=count, max_size=count)
    # Built by a call of a public function, which is what hypothesis prints of a failing example.
    return st.builds(tensor_of, values, dtype=st.just(dtype), shape=st.just(shape), layout=st.just(layout))


def _leaves(dtype: Any, shape: Any, layout: Any, exact: bool) -> st.SearchStrategy[st.SearchStrategy[Tensor]]:
    """What a tensor has but values, drawn: the strategy for its values."""
    parts = st.tuples(_strategy(dtype), _strategy(shape, _SHAPES[0]), _strategy(layout, _ANY_LAYOUT))
    return parts.map(lambda drawn: _tensors(*drawn, exact))


def _of_rank(tree: Any, rank: int) -> Any:
    """What a rank has of a collection of values by rank; each rank begins its dicts with another key."""

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
