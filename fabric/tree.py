"""Collections of tensors: traversal, flattening, moving between devices, and checks of what can be sent.

[Note: Collections] A *collection* is any nesting of lists, tuples, named tuples, dicts, dataclasses and types that are
registered with torch's pytree; everything else is a *leaf*. A result has the same type as the input. Entries of a dict
are visited in the order of (name of the key's type, key), not of insertion, so that leaves match on ranks that filled a
dict in different orders; the result keeps the order of insertion. Keys that differ only by identity (functions,
tensors) are visited in the order of insertion.
"""

import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.func import debug_unwrap

from fabric._torch import flatten_one_level
from fabric.errors import ConfigurationError

__all__ = [
    "PLAIN_TENSOR_TYPES",
    "Structure",
    "check_opaque",
    "check_tensor",
    "children",
    "flatten",
    "leaf_paths",
    "map_leaves",
    "map_tensors",
    "outline",
    "parameters_of",
    "to_device",
    "unflatten",
]

PLAIN_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})
_STRINGS = frozenset({str})
_LEAF_TYPES = PLAIN_TENSOR_TYPES | {torch.Size, float, int, bool, str, bytes, type(None), complex}


class _Node(NamedTuple):
    """One collection: the path to each child, the structure of the children, and a function that rebuilds it.

    If all children are leaves, ``children`` is their number: collections of a thousand metrics are traversed in few
    steps.
    """

    form: str
    keys: Sequence[Any]  # formatted into form, in visiting order
    children: "Sequence[_Node | None] | int"
    rebuild: Callable[[list[Any]], Any]


Structure = _Node | None  # None stands for a leaf
_Opened = tuple[str, Sequence[Any], Sequence[Any], Callable[[list[Any]], Any]]


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Flatten a collection.

    Args:
        tree: any collection, or a single leaf.

    Returns:
        The leaves in visiting order (see ``[Note: Collections]``), and the structure for :func:`unflatten`.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Rebuild a collection from as many leaves as :func:`flatten` returned for it, in the same order."""
    leaves = iter(leaves)
    if structure is None:
        return next(leaves)
    children = structure.children
    if isinstance(children, int):
        return structure.rebuild(list(islice(leaves, children)))
    return structure.rebuild([unflatten(child, leaves) for child in children])


def leaf_paths(structure: Structure, root: str = "") -> list[str]:
    """The path to each leaf for error texts, as in code: ``['losses'][0]``; a single leaf is ``root``."""
    if structure is None:
        return [root]
    children = structure.children
    keyed = zip(
        structure.keys, [None] * children if isinstance(children, int) else children, strict=True
    )
    return [
        path
        for key, child in keyed
        for path in leaf_paths(child, root + structure.form.format(key))
    ]


def outline(structure: Structure) -> str:
    """The keys of a structure as text, equal on all ranks with this structure; fast if all keys are strings."""
    if structure is None:
        return ""
    keys = structure.keys
    inner = structure.children
    texts = _STRINGS.issuperset(map(type, keys))
    own = (
        ", ".join(keys)
        if texts
        else str(keys if isinstance(keys, range) else list(map(_sort_key, keys)))
    )
    return own if isinstance(inner, int) else f"{own}: ({'; '.join(map(outline, inner))})"


def children(tree: Any) -> dict[str, Any]:
    """The values of a collection by path, one level deep; empty for a leaf."""
    form, keys, values, _ = _open(tree) or ("", (), (), list)
    return dict(zip(map(form.format, keys), values, strict=True))


def map_leaves(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply ``function`` to every leaf of a collection.

    If no leaf changes, the collection itself is returned, not a copy: a forward pass can fill the caller's own list or
    cache.

    Args:
        function: returns the replacement of a leaf.
        tree: any collection, or a single leaf.
        is_leaf: whether to treat a collection as a leaf.
    """
    opened = (
        None
        if type(tree) in _LEAF_TYPES or (is_leaf is not None and is_leaf(tree))
        else _open(tree)
    )
    if opened is None:
        return function(tree)
    *_, values, rebuild = opened
    mapped = [map_leaves(function, value, is_leaf) for value in values]
    return tree if _same(values, mapped) else rebuild(mapped)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply ``function`` to every tensor of a collection, like :func:`map_leaves`; other leaves are unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def to_device(tree: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move every tensor of a collection, and every object that has a ``to`` method, to a device.

    Args:
        tree: any collection. On an object with a method ``to`` (such as another library's batch), this is called;
            if it returns ``None``, the object is assumed to have moved in place.
        device: the target device.
        non_blocking: let copies from pinned host memory overlap with computation.

    Returns:
        As :func:`map_leaves`; tensors that are already on the device are not copied.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        moved = leaf.to(device) if _moves(leaf) else None
        return leaf if moved is None else moved

    return map_leaves(move, tree, is_leaf=_moves)


def _moves(leaf: Any) -> bool:
    return callable(getattr(leaf, "to", None))


def _same(before: Iterable[Any], after: Iterable[Any]) -> bool:
    return all(map(operator.is_, before, after))


def _flatten(tree: Any, leaves: list[Any]) -> Structure:
    opened = None if type(tree) in _LEAF_TYPES else _open(tree)
    if opened is None:
        leaves.append(tree)
        return None
    form, keys, values, rebuild = opened
    if _LEAF_TYPES.issuperset(map(type, values)):
        leaves.extend(values)
        return _Node(form, keys, len(values), rebuild)
    return _Node(form, keys, [_flatten(value, leaves) for value in values], rebuild)


def _open(tree: Any) -> _Opened | None:
    """Form, keys, values and rebuild function of one collection, one level deep; None for a leaf."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return None
    if kind is dict:
        return _open_mapping(tree, lambda items: items)
    if kind is list or kind is tuple:
        return _open_sequence(tree, kind)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return ".{}", tree._fields, tree, kind._make  # type: ignore[attr-defined]
    # A state dict has an attribute, _metadata, which torch's registry would lose.
    one_level = None if kind is OrderedDict else flatten_one_level(tree)
    if one_level is not None:
        values, rebuild = one_level
        # A registered mapping may declare children other than its entries.
        if isinstance(tree, Mapping) and len(tree) == len(values) and _same(tree.values(), values):
            return _open_mapping(tree, lambda items: rebuild([items[key] for key in tree]))
        return _open_sequence(values, rebuild)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        opened = [getattr(tree, name) for name in fields]
        # object.__setattr__ reaches the fields of a frozen dataclass.
        return ".{}", fields, opened, partial(_copy_with, tree, object.__setattr__, fields)
    if isinstance(tree, dict):
        return _open_mapping(
            tree, lambda items: _copy_with(tree, operator.setitem, items, items.values())
        )
    if isinstance(tree, list | tuple):
        return _open_sequence(tree, kind)
    return None


def _open_sequence(values: Sequence[Any], build: Callable[[list[Any]], Any]) -> _Opened:
    return "[{}]", range(len(values)), values, build


def _open_mapping(tree: Mapping[Any, Any], build: Callable[[dict[Any, Any]], Any]) -> _Opened:
    keys = sorted(tree) if _STRINGS.issuperset(map(type, tree)) else sorted(tree, key=_sort_key)

    def rebuild(values: list[Any]) -> Any:
        items = dict(tree)  # keeps the order of insertion
        items.update(zip(keys, values, strict=True))
        return build(items)

    return "[{!r}]", keys, list(map(tree.__getitem__, keys)), rebuild


def _sort_key(key: Any) -> tuple[str, Any]:
    """The sort key of a dict key, the same on every rank; equal for keys that differ only by identity."""
    kind = type(key).__name__
    if isinstance(key, str | bytes | int | float):
        return kind, key
    if isinstance(key, tuple | frozenset):  # frozensets compare by inclusion, which does not sort
        parts = list(map(_sort_key, key))
        return kind, parts if isinstance(key, tuple) else sorted(parts)
    # The text of a tensor holds its values, and that of a function its address: neither is the same on every rank.
    text = "" if isinstance(key, Tensor) else repr(key)
    return kind, "" if " at 0x" in text else text


def _copy_with(
    tree: Any, assign: Callable[..., None], names: Iterable[Any], values: Iterable[Any]
) -> Any:
    """A copy with other values, which keeps attributes that ``__init__`` does not take."""
    result = copy.copy(tree)
    for name, value in zip(names, values, strict=True):
        assign(result, name, value)
    return result


# -- checks of what can be sent ---------------------------------------------------------------------------------------


def check_tensor(tensor: Tensor, structure: Structure, place: int) -> None:
    """Raise a ConfigurationError that names the leaf, for a tensor without dense local values."""
    if tensor.is_meta:
        problem = "on the meta device and has no values"
        suggestion = "module.to_empty(device=fabric.device)"
    elif tensor.is_nested or tensor.is_quantized:
        problem = "nested" if tensor.is_nested else "quantized"
        suggestion = (
            "x.to_padded_tensor(0.0), or list(x.unbind())" if tensor.is_nested else "x.dequantize()"
        )
    elif tensor.layout is not torch.strided:
        problem = f"laid out as {tensor.layout}"
        suggestion = "x.to_dense()"
    elif debug_unwrap(tensor) is not tensor or unpack_dual(tensor).tangent is not None:
        problem = "inside of torch.func or of forward-mode AD, and its tangent would be that of this rank alone"
        suggestion = "loss.backward() or torch.autograd.grad, which go through collectives"
    elif type(tensor) not in PLAIN_TENSOR_TYPES and hasattr(tensor, "device_mesh"):
        problem = "sharded over ranks already (a DTensor)"
        suggestion = "x.full_tensor(), or x.to_local()"
    else:
        return
    raise ConfigurationError(
        f"a collective over {leaf_paths(structure)[place] or 'a tensor'}",  # no shape: nested tensors have none
        f"it is {problem}",
        "dense tensors on a device",
        suggestion,
    )


def check_opaque(leaf: Any, structure: Structure, place: int) -> None:
    """Raise for another library's array or number, an unknown container, or an object that holds tensors."""
    held = (
        value
        for each in getattr(leaf, "__dict__", {}).values()
        for value in (each, *children(each).values())
    )
    if isinstance(leaf, str | bytes | bytearray | torch.Size | type | Enum):
        return
    if hasattr(leaf, "__array__"):
        suggestion = "torch.as_tensor(x), or x.item() for a single value"
    elif isinstance(leaf, Iterable | Number):
        suggestion = (
            "float(x)"
            if isinstance(leaf, Number)
            else "dict(x)"
            if isinstance(leaf, Mapping)
            else "list(x)"
        )
    elif any(isinstance(value, Tensor) for value in held):
        suggestion = "its tensors, in a dict or a dataclass"
    else:
        return
    raise ConfigurationError(
        f"a collective over {leaf_paths(structure)[place] or 'an object'} of type {type(leaf).__name__}",
        "it is taken for a single object, and would come back with the values of this rank alone",
        "tensors and Python numbers, in dicts, lists, tuples, dataclasses and types registered with torch's pytree",
        suggestion,
    )
