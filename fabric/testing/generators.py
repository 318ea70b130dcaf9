"""Hypothesis strategies for the inputs of collectives.

All values are drawn in the process that runs the test, and then passed to the ranks: ranks that
drew for themselves could differ by accident. This module needs hypothesis:
``pip install "torch-fabric[testing]"``.

Values are *exact* by default: every partial sum of up to eight values, in any order, can be
represented in the dtype. So a test can compare results bit for bit, even of 16-bit floats. Floats
are multiples of 0.25 from -4 to 4. Integers cover an eighth of the range of their dtype.

With ``special_values=True`` floats may also be -0.0, NaN and infinities. Sums of exact floats and
special values are still equal in any order. The minimum and the maximum of 0.0 and -0.0 may have
either sign.
"""

import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fabric.errors import ConfigurationError, MissingDependencyError
from fabric.testing.base import Pair, PerRank, Record
from fabric.tree import Leaf, Tree, map_leaves

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingDependencyError(
        "hypothesis is not installed", suggestion='pip install "torch-fabric[testing]"'
    ) from error

__all__ = [
    "DTYPES",
    "FLOATS",
    "LAYOUTS",
    "REDUCE_OPS",
    "dtypes",
    "groups",
    "lay_out",
    "numbers",
    "partitions",
    "per_rank",
    "per_rank_tensors",
    "per_rank_trees",
    "reduce_ops",
    "shapes",
    "tensor_of",
    "tensors",
    "trees",
    "world_sizes",
]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *_INTEGERS, torch.bool, *_COMPLEX)
LAYOUTS = ("contiguous", "strided", "transposed", "offset", "expanded")

# The dtypes that each reduction is defined for.
_DTYPES_OF_OP = {
    "sum": (*FLOATS, *_INTEGERS, *_COMPLEX),
    "mean": (*FLOATS, *_COMPLEX),
    **dict.fromkeys(("min", "max"), (*FLOATS, *_INTEGERS, torch.bool)),
    "product": (*FLOATS, *_INTEGERS),
    **dict.fromkeys(("band", "bor", "bxor"), (*_INTEGERS, torch.bool)),
}
REDUCE_OPS = tuple(_DTYPES_OF_OP)
_SPECIAL_VALUES = (-0.0, math.nan, math.inf, -math.inf)
_NUMBER_DTYPES = (torch.float64, torch.int64, torch.bool)  # the dtypes of Python numbers


def world_sizes(max_size: int = 4, min_size: int = 1) -> st.SearchStrategy[int]:
    """Draw numbers of ranks. Hypothesis shrinks a failing example to a small number."""
    return st.integers(min_size, max_size)


def groups(world_size: int, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Draw distinct ranks of a world of ``world_size`` ranks, in ascending order."""
    rank = st.integers(0, world_size - 1)
    ranks = st.lists(rank, min_size=min_size, max_size=world_size, unique=True)
    return ranks.map(sorted)


def partitions(world_size: int) -> st.SearchStrategy[list[list[int]]]:
    """Draw disjoint groups that together have all ranks of a world."""

    def ranks_by_label(labels: list[int]) -> list[list[int]]:
        """Group the ranks that have equal labels. Item ``r`` is the label of rank ``r``."""
        ranks_of_label: dict[int, list[int]] = {label: [] for label in sorted(labels)}
        for rank, label in enumerate(labels):
            ranks_of_label[label].append(rank)
        return list(ranks_of_label.values())

    label = st.integers(0, world_size - 1)
    labels = st.lists(label, min_size=world_size, max_size=world_size)
    return labels.map(ranks_by_label)


def dtypes(
    reduce_op: str | None = None, *, integer_means: bool = False
) -> st.SearchStrategy[torch.dtype]:
    """Draw dtypes that a reduction is defined for.

    Args:
        reduce_op: the name of the reduction. None draws any dtype that the collectives of fabric
            support. Those of torch with gloo support fewer: they have no ``int16``, for example.
        integer_means: whether the dtypes of ``"mean"`` include integers. Fabric refuses to compute
            their mean. In :mod:`fabric.testing.oracles` it is a floating-point number.
    """
    if reduce_op is None:
        return st.sampled_from(DTYPES)
    dtypes_of_op = _DTYPES_OF_OP[reduce_op]
    if integer_means and reduce_op == "mean":
        dtypes_of_op = (*dtypes_of_op, *_INTEGERS)
    return st.sampled_from(dtypes_of_op)


def reduce_ops(dtype: torch.dtype | None = None) -> st.SearchStrategy[str]:
    """Draw names of reductions that are defined for a dtype. None draws any name."""
    if dtype is None:
        return st.sampled_from(REDUCE_OPS)
    return st.sampled_from([op for op in REDUCE_OPS if dtype in _DTYPES_OF_OP[op]])


def shapes(
    max_dims: int = 3, max_side: int = 3, *, min_dims: int = 0, min_side: int = 0
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes of tensors. By default they include ``()`` and shapes without elements."""
    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple)


def tensors(
    dtype: Any = torch.float32,
    shape: Any = None,
    layout: Any = None,
    *,
    exact: bool = True,
    special_values: bool = False,
) -> st.SearchStrategy[Tensor]:
    """Draw tensors.

    Args:
        dtype: the dtype, or a strategy for dtypes.
        shape: the shape, or a strategy for shapes. None uses :func:`shapes`.
        layout: ``"contiguous"``, ``"strided"``, ``"transposed"``, ``"offset"`` or ``"expanded"``,
            or a strategy for these names. None draws any of them.
        exact: whether floats are multiples of 0.25 from -4 to 4, whose sums are exact. Otherwise
            they are any numbers from -1,000 to 1,000.
        special_values: whether floats may also be -0.0, NaN and infinities.
    """
    float_options = _FloatOptions(exact, special_values)
    # First a strategy for one dtype, shape and layout is drawn. flatmap() then draws a tensor from
    # this strategy.
    strategies = _tensor_strategies(dtype, shape, layout, float_options)
    return strategies.flatmap(lambda strategy: strategy)


def numbers(*, special_values: bool = False) -> st.SearchStrategy[complex]:
    """Draw Python numbers: floats, integers and booleans.

    Args:
        special_values: whether floats may also be -0.0, NaN and infinities.
    """
    float_options = _FloatOptions(special_values=special_values)
    # First a strategy for numbers of one type is drawn. flatmap() then draws a number from it.
    return _number_strategies(_NUMBER_DTYPES, float_options).flatmap(lambda strategy: strategy)


def trees(leaves: st.SearchStrategy[Leaf], max_leaves: int = 5) -> st.SearchStrategy[Tree]:
    """Draw nested dicts, lists, tuples, namedtuples and dataclasses of leaves.

    They include empty collections and a single leaf without a collection.

    Args:
        leaves: the hypothesis strategy that draws a leaf.
        max_leaves: the largest number of leaves in a collection.
    """
    keys = st.sampled_from(["a", "b", "c", 0, 1])

    def collections_of(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        """Return a strategy for collections with these children.

        Hypothesis calls this function with a strategy for leaves, and then for nested collections.
        """
        any_list = st.lists(children, max_size=3)
        any_dict = st.dictionaries(keys, children, max_size=3)
        any_tuple = st.tuples(children, children)
        # Pair is a namedtuple and Record a dataclass. Both have two fields.
        any_namedtuple = st.builds(Pair, children, children)
        any_dataclass = st.builds(Record, children, children)
        return any_list | any_dict | any_tuple | any_namedtuple | any_dataclass

    return st.recursive(leaves, collections_of, max_leaves=max_leaves)


def per_rank(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[PerRank]:
    """Draw one value per rank, independently."""
    return st.lists(values, min_size=size, max_size=size).map(PerRank)


@st.composite
def per_rank_tensors(
    draw: st.DrawFn,
    size: int,
    dtype: Any = torch.float32,
    shape: Any = None,
    layout: Any = None,
    *,
    exact: bool = True,
    special_values: bool = False,
    ragged: bool = False,
) -> PerRank:
    """Draw tensors of one dtype and shape, with other values and layouts on each rank.

    Args:
        draw: passed by hypothesis.
        size: number of ranks.
        dtype: as for :func:`tensors`.
        shape: as for :func:`tensors`.
        layout: as for :func:`tensors`. A layout is drawn for each rank.
        exact: as for :func:`tensors`.
        special_values: as for :func:`tensors`.
        ragged: whether the length along dim 0 may differ between ranks. The first number of the
            shape is then the largest length, 3 by default.

    Raises:
        ConfigurationError: ``ragged`` is true, and the shape has no dimension.
    """
    default_shapes = _ANY_SHAPE
    if ragged:
        default_shapes = _SHAPES_WITH_ROWS
    common_shape = draw(_as_strategy(shape, default_shapes))
    lengths = _LENGTHS
    if ragged and shape is not None:
        if not common_shape:
            raise ConfigurationError(
                f"per_rank_tensors({size}, shape={shape!r}, ragged=True)",
                problem="a tensor of shape () has no length that may differ between ranks",
                suggestion="shape=(9,), for up to 9 rows; shapes(min_dims=1)",
            )
        lengths = st.integers(0, common_shape[0])
    drawn_dtype = draw(_as_strategy(dtype))
    layouts = _as_strategy(layout, _ANY_LAYOUT)
    float_options = _FloatOptions(exact, special_values)
    rank_tensors: list[Tensor] = []
    for _ in range(size):
        rank_shape = common_shape
        if ragged:
            rank_shape = (draw(lengths), *common_shape[1:])
        rank_layout = draw(layouts)
        rank_tensors.append(draw(_tensors_of(drawn_dtype, rank_shape, rank_layout, float_options)))
    return PerRank(rank_tensors)


@functools.cache
def per_rank_trees(
    size: int,
    reduce_op: str | None = None,
    *,
    with_numbers: bool = True,
    max_leaves: int = 5,
    special_values: bool = False,
) -> st.SearchStrategy[PerRank]:
    """Draw collections of one structure, with other values on each rank.

    Shapes and dtypes are equal on all ranks. The insertion order of dicts differs between ranks.

    Args:
        size: number of ranks.
        reduce_op: the reduction that all dtypes must be defined for. None allows all dtypes.
        with_numbers: whether some leaves are Python numbers.
        max_leaves: the approximate maximum number of leaves.
        special_values: whether floats may also be -0.0, NaN and infinities.
    """
    float_options = _FloatOptions(special_values=special_values)
    # First a strategy for a leaf of one dtype and shape is drawn, which all ranks have in common.
    # flatmap() then draws a leaf for each rank from this strategy.
    strategies: st.SearchStrategy[Leaf] = _tensor_strategies(
        dtypes(reduce_op), shape=None, layout=None, float_options=float_options
    )
    number_dtypes = list(_NUMBER_DTYPES)
    if reduce_op is not None:
        number_dtypes = [dtype for dtype in _NUMBER_DTYPES if dtype in _DTYPES_OF_OP[reduce_op]]
    if with_numbers and number_dtypes:
        strategies |= _number_strategies(number_dtypes, float_options)
    per_rank_leaves = strategies.flatmap(lambda strategy: per_rank(strategy, size))

    def split_by_rank(tree: Tree) -> PerRank:
        """Return the tree of each rank, from one tree whose leaves are PerRank."""
        return PerRank([_tree_of_rank(tree, rank) for rank in range(size)])

    return trees(per_rank_leaves, max_leaves).map(split_by_rank)


def tensor_of(
    values: list[Any], *, dtype: torch.dtype, shape: tuple[int, ...], layout: str
) -> Tensor:
    """Return a tensor of these values, one per element of the shape. See :func:`lay_out`.

    Hypothesis prints the call of this function for a failing example.
    """
    return lay_out(torch.tensor(values, dtype=dtype).reshape(shape), layout)


class _FloatOptions(NamedTuple):
    """Which floats are drawn; see the notes at the top of the module.

    Attributes:
        exact: whether floats are multiples of 0.25 from -4 to 4, whose sums are exact. Otherwise
            they are any numbers from -1,000 to 1,000.
        special_values: whether floats may also be -0.0, NaN and infinities.
    """

    exact: bool = True
    special_values: bool = False


_ANY_SHAPE = shapes()
_SHAPES_WITH_ROWS = shapes(min_dims=1)
_ANY_LAYOUT = st.sampled_from(LAYOUTS)
_LENGTHS = st.integers(0, 3)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the values of a tensor in another memory layout.

    A tensor whose shape does not allow the layout is returned unchanged. Elements of the storage
    that do not belong to the result have a fill value, so that a test notices a collective that
    reads such elements.

    Args:
        tensor: any tensor.
        layout: ``"contiguous"`` (``tensor`` itself, which should be contiguous), ``"strided"``
            (every second element of the storage), ``"transposed"`` (first and last dimension
            swapped in memory), ``"offset"`` (a storage offset of one), or ``"expanded"`` (the first
            row repeated with a stride of 0, so that the values of the other rows are lost).
    """
    if layout == "strided":
        storage = _filled((*tensor.shape, 2), tensor.dtype)
        return storage[..., 0].copy_(tensor)
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        storage = _filled((tensor.numel() + 1,), tensor.dtype)
        return storage[1:].view(tensor.shape).copy_(tensor)
    if layout == "expanded" and tensor.dim() > 0 and tensor.shape[0] > 1:
        return tensor[:1].expand(tensor.shape)
    # The layout is "contiguous", or the shape does not allow the layout.
    return tensor


# The strategies are cached, because hypothesis spends more time on creating a strategy than on
# drawing from the strategy.
@functools.lru_cache(maxsize=4096)
def _tensors_of(
    dtype: torch.dtype, shape: tuple[int, ...], layout: str, float_options: _FloatOptions
) -> st.SearchStrategy[Tensor]:
    """Return a strategy for tensors of one dtype, shape and layout. See :func:`tensors`."""
    count = torch.Size(shape).numel()
    elements = st.lists(_element_strategy(dtype, float_options), min_size=count, max_size=count)
    # For a failing example, hypothesis prints the call of tensor_of(), which is public.
    return st.builds(
        tensor_of, elements, dtype=st.just(dtype), shape=st.just(shape), layout=st.just(layout)
    )


def _tensor_strategies(
    dtype: Any, shape: Any, layout: Any, float_options: _FloatOptions
) -> st.SearchStrategy[st.SearchStrategy[Tensor]]:
    """Return a strategy that draws strategies for tensors, each of one dtype, shape and layout.

    Several tensors that are drawn from one of the inner strategies have equal dtypes and shapes.

    Args:
        dtype: as for :func:`tensors`.
        shape: as for :func:`tensors`.
        layout: as for :func:`tensors`.
        float_options: which floats are drawn.
    """
    return st.builds(
        _tensors_of,
        _as_strategy(dtype),
        _as_strategy(shape, default=_ANY_SHAPE),
        _as_strategy(layout, default=_ANY_LAYOUT),
        st.just(float_options),
    )


def _number_strategies(
    number_dtypes: Sequence[torch.dtype], float_options: _FloatOptions
) -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """Return a strategy that draws strategies for Python numbers, each for one type of numbers.

    Args:
        number_dtypes: a dtype for each type of numbers, such as ``torch.int64`` for int.
        float_options: which floats are drawn.
    """
    return st.sampled_from(number_dtypes).map(lambda dtype: _element_strategy(dtype, float_options))


def _tree_of_rank(tree: Tree, rank: int) -> Tree:
    """Return the collection of one rank, from a collection whose leaves are PerRank.

    In each dict, the order of the keys differs between ranks. So a test notices a collective that
    relies on the insertion order.
    """

    def value_of_rank(node: Tree) -> Tree:
        """Return this rank's value of a leaf, or a dict with its keys in this rank's order."""
        if isinstance(node, PerRank):
            return node.values[rank]
        # The node is a dict. On rank r its items are rotated by r.
        items = deque(node.items())
        items.rotate(-rank)
        return {key: _tree_of_rank(value, rank) for key, value in items}

    # map_leaves() would keep the order of a dict. So a dict counts as a leaf, of which
    # value_of_rank() makes another dict.
    return map_leaves(value_of_rank, tree, is_leaf=lambda node: isinstance(node, dict))


@functools.cache
def _element_strategy(dtype: torch.dtype, float_options: _FloatOptions) -> st.SearchStrategy[Any]:
    """Return a strategy for Python numbers that are elements of a tensor of a dtype.

    Args:
        dtype: the dtype.
        float_options: which floats are drawn.
    """
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        # Special values are left out: an infinite complex number may become NaN in torch.
        floats = _element_strategy(torch.float32, _FloatOptions(exact=float_options.exact))
        return st.builds(complex, floats, floats)
    if not dtype.is_floating_point:
        # An eighth of the range, so that the sum of eight values does not overflow.
        limits = torch.iinfo(dtype)
        return st.integers(limits.min // 8, limits.max // 8)
    if float_options.exact:
        # Multiples of 0.25, whose sums are exact.
        floats = st.integers(-16, 16).map(lambda quarters: quarters / 4)
    else:
        # Hypothesis draws floats that a type of this many bits can represent.
        width = {2: 16, 4: 32}.get(dtype.itemsize, 64)
        floats = st.floats(-1000.0, 1000.0, width=width)  # type: ignore[arg-type]
    if float_options.special_values:
        floats |= st.sampled_from(_SPECIAL_VALUES)
    return floats


def _as_strategy(value: Any, default: Any = None) -> st.SearchStrategy[Any]:
    """Return a strategy as it is, or a strategy that always draws a plain value.

    Args:
        value: a strategy, or a value. None stands for the default.
        default: a strategy, or a value.
    """
    if value is None:
        value = default
    if isinstance(value, st.SearchStrategy):
        return value
    return st.just(value)


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of fill values: 77, which no exact float is, or True for booleans."""
    fill_value = 77
    if dtype is torch.bool:
        fill_value = 1
    return torch.full(shape, fill_value, dtype=dtype)
