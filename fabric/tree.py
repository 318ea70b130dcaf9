"""Collections of tensors: traversal, flattening, moving between devices, and checks.

[Note: Collections] A *collection* is any nesting of lists, tuples, named tuples, dicts, dataclasses
and types that are registered with torch's pytree. Everything else is a *leaf*. A result has the
same type as the input. The entries of a dict are visited in the order of (name of the key's type,
key), not in the order of insertion, so that leaves match on ranks that filled a dict in different
orders. The result keeps the order of insertion. Keys that differ only by identity (functions,
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
    "Leaf",
    "Structure",
    "Tree",
    "check_can_send",
    "check_other_leaf",
    "children",
    "describe_keys",
    "flatten",
    "leaf_paths",
    "map_leaves",
    "map_tensors",
    "parameters_of",
    "to_device",
    "unflatten",
]

Leaf = Any
"""An object that is not a collection, such as a tensor or a number."""

Tree = Any
"""A leaf, or any nesting of collections of leaves."""

PLAIN_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})
_STRINGS = frozenset({str})
_LEAF_TYPES = PLAIN_TENSOR_TYPES | {torch.Size, float, int, bool, str, bytes, type(None), complex}


class _Node(NamedTuple):
    """One collection in a structure.

    Attributes:
        form: the format of the path to a child, which takes the child's key.
        keys: the keys of the children, in visiting order.
        children: the structure of each child. If all children are leaves, the number of children:
            collections of a thousand metrics are traversed in few steps.
        rebuild: returns the collection with other children.
    """

    form: str
    keys: Sequence[Any]
    children: "Sequence[_Node | None] | int"
    rebuild: Callable[[list[Any]], Tree]


Structure = _Node | None
"""The structure of a collection. None stands for a leaf."""

_Opened = tuple[str, Sequence[Any], Sequence[Any], Callable[[list[Any]], Tree]]
"""One level of a collection: form, keys, children and rebuild function; see :class:`_Node`.

A plain tuple: a named tuple would cost a Python call for each collection in a forward pass.
"""


def flatten(tree: Tree) -> tuple[list[Leaf], Structure]:
    """Flatten a collection.

    Args:
        tree: any collection, or a single leaf.

    Returns:
        The leaves in visiting order (see ``[Note: Collections]``), and the structure for
        :func:`unflatten`.
    """
    leaves: list[Leaf] = []
    structure = _flatten(tree, leaves)
    return leaves, structure


def unflatten(structure: Structure, leaves: Iterable[Leaf]) -> Tree:
    """Rebuild a collection from as many leaves as :func:`flatten` returned, in the same order."""
    leaves = iter(leaves)
    if structure is None:
        return next(leaves)
    children = structure.children
    if isinstance(children, int):
        return structure.rebuild(list(islice(leaves, children)))
    return structure.rebuild([unflatten(child, leaves) for child in children])


def leaf_paths(structure: Structure, root: str = "") -> list[str]:
    """Return the path to each leaf for error texts, as in code: ``['losses'][0]``.

    The path of a single leaf is ``root``, which is empty by default.
    """
    if structure is None:
        return [root]
    children = structure.children
    if isinstance(children, int):
        children = [None] * children
    paths = []
    for key, child in zip(structure.keys, children, strict=True):
        paths += leaf_paths(child, root + structure.form.format(key))
    return paths


def describe_keys(structure: Structure) -> str:
    """Return the keys of a structure as text. It is the same on all ranks with this structure."""
    if structure is None:
        return ""
    keys = structure.keys
    if _STRINGS.issuperset(map(type, keys)):  # the common case, which is fast
        text = ", ".join(keys)
    elif isinstance(keys, range):
        text = str(keys)
    else:
        text = str(list(map(_sort_key, keys)))
    if isinstance(structure.children, int):
        return text
    inner = "; ".join(map(describe_keys, structure.children))
    return f"{text}: ({inner})"


def children(tree: Tree) -> dict[str, Tree]:
    """Return the values of a collection by path, one level deep. A leaf has none."""
    opened = _open(tree)
    if opened is None:
        return {}
    form, keys, values, _ = opened
    return dict(zip(map(form.format, keys), values, strict=True))


def map_leaves(
    function: Callable[[Leaf], Leaf], tree: Tree, is_leaf: Callable[[Tree], bool] | None = None
) -> Tree:
    """Apply ``function`` to every leaf of a collection.

    If no leaf changes, the collection itself is returned, not a copy. So a forward pass can fill a
    list or cache of its caller.

    Args:
        function: returns the replacement of a leaf.
        tree: any collection, or a single leaf.
        is_leaf: returns whether to treat a collection as a leaf. None, the default: only the leaves
            of ``[Note: Collections]``.
    """
    if type(tree) in _LEAF_TYPES or (is_leaf is not None and is_leaf(tree)):
        return function(tree)
    opened = _open(tree)
    if opened is None:
        return function(tree)
    _, _, values, rebuild = opened
    mapped = [map_leaves(function, value, is_leaf) for value in values]
    if _are_identical(values, mapped):
        return tree
    return rebuild(mapped)


def map_tensors(function: Callable[[Tensor], Leaf], tree: Tree) -> Tree:
    """Apply ``function`` to every tensor of a collection, as :func:`map_leaves` does.

    Other leaves are unchanged.
    """

    def map_if_tensor(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return leaf

    return map_leaves(map_if_tensor, tree)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def to_device(tree: Tree, device: torch.device, non_blocking: bool = False) -> Tree:
    """Move every tensor of a collection, and every object that has a ``to`` method, to a device.

    Args:
        tree: any collection. If an object has a method ``to`` (such as the batch of another
            library), the method is called. If the method returns None, the object has moved in
            place.
        device: the target device.
        non_blocking: whether copies of tensors from pinned host memory may overlap with
            computation. Default: False.

    Returns:
        The moved collection. If nothing moved, ``tree`` itself. Tensors that are already on the
        device are not copied.
    """

    def move(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if not _has_to(leaf):
            return leaf
        moved = leaf.to(device)
        if moved is None:
            return leaf
        return moved

    return map_leaves(move, tree, is_leaf=_has_to)


def _has_to(leaf: Leaf) -> bool:
    return callable(getattr(leaf, "to", None))


def _are_identical(before: Iterable[Leaf], after: Iterable[Leaf]) -> bool:
    return all(map(operator.is_, before, after))


def _flatten(tree: Tree, leaves: list[Leaf]) -> Structure:
    """Append the leaves of a collection to ``leaves``, and return its structure."""
    opened = None if type(tree) in _LEAF_TYPES else _open(tree)
    if opened is None:
        leaves.append(tree)
        return None
    form, keys, values, rebuild = opened
    if _LEAF_TYPES.issuperset(map(type, values)):
        leaves.extend(values)
        return _Node(form, keys, len(values), rebuild)
    return _Node(form, keys, [_flatten(value, leaves) for value in values], rebuild)


def _open(tree: Tree) -> _Opened | None:
    """Return one level of a collection. Return None for a leaf."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return None
    if kind is dict:
        return _open_mapping(tree, _identity)
    if kind is list or kind is tuple:
        return _open_sequence(tree, kind)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return ".{}", tree._fields, tree, kind._make  # type: ignore[attr-defined]
    # An OrderedDict may be a state dict, whose attribute _metadata torch's registry would lose.
    if kind is not OrderedDict:
        one_level = flatten_one_level(tree)
        if one_level is not None:
            return _open_registered(tree, *one_level)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _open_dataclass(tree)
    if isinstance(tree, dict):
        return _open_dict_subclass(tree)
    if isinstance(tree, list | tuple):
        return _open_sequence(tree, kind)
    return None


def _identity(items: dict[Any, Any]) -> dict[Any, Any]:
    return items


def _open_registered(
    tree: Tree, values: Sequence[Tree], rebuild: Callable[[list[Any]], Tree]
) -> _Opened:
    """Open an object whose type is registered with torch's pytree."""
    is_mapping = isinstance(tree, Mapping) and len(tree) == len(values)
    # A registered mapping may declare children other than its entries.
    if is_mapping and _are_identical(tree.values(), values):
        return _open_mapping(tree, lambda items: rebuild([items[key] for key in tree]))
    return _open_sequence(values, rebuild)


def _open_dataclass(tree: Tree) -> _Opened:
    fields = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
    values = [getattr(tree, name) for name in fields]
    # object.__setattr__ also sets the fields of a frozen dataclass.
    return ".{}", fields, values, partial(_copy_with, tree, object.__setattr__, fields)


def _open_dict_subclass(tree: dict[Any, Any]) -> _Opened:
    def rebuild(items: dict[Any, Tree]) -> Tree:
        return _copy_with(tree, operator.setitem, items, items.values())

    return _open_mapping(tree, rebuild)


def _open_sequence(values: Sequence[Tree], build: Callable[[list[Any]], Tree]) -> _Opened:
    return "[{}]", range(len(values)), values, build


def _open_mapping(tree: Mapping[Any, Any], build: Callable[[dict[Any, Any]], Any]) -> _Opened:
    if _STRINGS.issuperset(map(type, tree)):
        keys = sorted(tree)
    else:
        keys = sorted(tree, key=_sort_key)

    def rebuild(values: list[Tree]) -> Tree:
        items = dict(tree)  # keeps the order of insertion
        items.update(zip(keys, values, strict=True))
        return build(items)

    return "[{!r}]", keys, list(map(tree.__getitem__, keys)), rebuild


def _sort_key(key: Any) -> tuple[str, Any]:
    """Return the sort key of a dict key, which is the same on every rank.

    Keys that differ only by identity have equal sort keys.
    """
    kind = type(key).__name__
    if isinstance(key, str | bytes | int | float):
        return kind, key
    if isinstance(key, tuple):
        return kind, list(map(_sort_key, key))
    if isinstance(key, frozenset):
        # frozensets compare by inclusion, which does not sort.
        return kind, sorted(map(_sort_key, key))
    # The text of a tensor contains its values, and the text of a function its address. Neither is
    # the same on every rank.
    if isinstance(key, Tensor):
        return kind, ""
    text = repr(key)
    if " at 0x" in text:
        return kind, ""
    return kind, text


def _copy_with(
    tree: Tree,
    assign: Callable[[Any, Any, Any], None],
    keys: Iterable[Any],
    values: Iterable[Tree],
) -> Tree:
    """Return a shallow copy of a collection with other values.

    The copy keeps attributes that ``__init__`` does not take.

    Args:
        tree: the collection.
        assign: sets one value of the copy, as ``assign(copy, key, value)``.
        keys: the keys of a dict, or the names of a dataclass's fields.
        values: the new values, one for each key.
    """
    result = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        assign(result, key, value)
    return result


# -- checks of what can be sent -------------------------------------------------------------------


def check_can_send(tensor: Tensor, structure: Structure, position: int) -> None:
    """Check that a tensor has dense local values.

    Args:
        tensor: a leaf of a collection.
        structure: the structure of the collection, for the error.
        position: the position of the leaf.

    Raises:
        ConfigurationError: the tensor cannot be sent. The error names the leaf.
    """
    if tensor.is_meta:
        problem = "on the meta device and has no values"
        suggestion = "module.to_empty(device=fabric.device)"
    elif tensor.is_nested:
        problem = "nested"
        suggestion = "x.to_padded_tensor(0.0), or list(x.unbind())"
    elif tensor.is_quantized:
        problem = "quantized"
        suggestion = "x.dequantize()"
    elif tensor.layout is not torch.strided:
        problem = f"laid out as {tensor.layout}"
        suggestion = "x.to_dense()"
    elif debug_unwrap(tensor) is not tensor or unpack_dual(tensor).tangent is not None:
        problem = (
            "inside of torch.func or of forward-mode AD, "
            "and its tangent would be the tangent of this rank alone"
        )
        suggestion = "loss.backward() or torch.autograd.grad, which go through collectives"
    elif type(tensor) not in PLAIN_TENSOR_TYPES and hasattr(tensor, "device_mesh"):
        problem = "sharded over ranks already (a DTensor)"
        suggestion = "x.full_tensor(), or x.to_local()"
    else:
        return
    path = leaf_paths(structure)[position] or "a tensor"
    # The error does not show the shape: nested tensors have none.
    raise ConfigurationError(
        f"a collective over {path}",
        problem=f"it is {problem}",
        expected="dense tensors on a device",
        suggestion=suggestion,
    )


def check_other_leaf(leaf: Leaf, structure: Structure, position: int) -> None:
    """Check that a leaf which is neither a tensor nor a number does not look like data.

    Args:
        leaf: a leaf of a collection.
        structure: the structure of the collection, for the error.
        position: the position of the leaf.

    Raises:
        ConfigurationError: the leaf is an array or number of another library, an unknown container,
            or an object that holds tensors. It would come back unchanged.
    """
    if isinstance(leaf, str | bytes | bytearray | torch.Size | type | Enum):
        return
    if hasattr(leaf, "__array__"):
        suggestion = "torch.as_tensor(x), or x.item() for a single value"
    elif isinstance(leaf, Number):
        suggestion = "float(x)"
    elif isinstance(leaf, Mapping):
        suggestion = "dict(x)"
    elif isinstance(leaf, Iterable):
        suggestion = "list(x)"
    elif _holds_tensor(leaf):
        suggestion = "its tensors, in a dict or a dataclass"
    else:
        return
    path = leaf_paths(structure)[position] or "an object"
    raise ConfigurationError(
        f"a collective over {path} of type {type(leaf).__name__}",
        problem="it is taken for a single object, and would come back with the values of this rank "
        "alone",
        expected="tensors and Python numbers, in dicts, lists, tuples, dataclasses and types "
        "registered with torch's pytree",
        suggestion=suggestion,
    )


def _holds_tensor(leaf: Leaf) -> bool:
    """Return whether an attribute of an object is a tensor, or a collection with a tensor in it."""
    for value in getattr(leaf, "__dict__", {}).values():
        candidates = [value, *children(value).values()]
        if any(isinstance(candidate, Tensor) for candidate in candidates):
            return True
    return False
