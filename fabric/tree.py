"""Collections of tensors: traversal, flattening, moving between devices, and checks.

A *collection* is any nesting of lists, tuples, named tuples, dicts, dataclasses and types that are
registered with torch's pytree. Everything else is a *leaf*. Functions that change leaves return a
collection of the same type.

The entries of a dict are visited in the order of (name of the key's type, key), not in the order of
insertion, so that leaves match on ranks that filled a dict in different orders. Keys that differ
only by identity (functions, tensors) are visited in the order of insertion. A result keeps the
order of insertion of the input.
"""

import copy
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
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
_STRING_TYPES = frozenset({str})
# Frequent types of leaves. They are recognized without a Python call.
_LEAF_TYPES = PLAIN_TENSOR_TYPES | {torch.Size, float, int, bool, str, bytes, type(None), complex}


class _Node(NamedTuple):
    """One collection in a structure.

    Attributes:
        path_format: the format of a step in the path to a leaf, such as ``"[{!r}]"``. The format
            takes the key of a child.
        keys: the keys of the children, in visiting order. The keys of a sequence are its indices.
        children: the structure of each child. If all children are leaves, only the number of
            children, so that collections of a thousand metrics are traversed in few steps.
        rebuild: returns a collection of the same type with other children, in visiting order.
    """

    path_format: str
    keys: Sequence[Any]
    children: "Sequence[_Node | None] | int"
    rebuild: Callable[[list[Any]], Tree]


Structure = _Node | None
"""The structure of a collection. None stands for a leaf."""

_Level = tuple[str, Sequence[Any], Sequence[Any], Callable[[list[Any]], Tree]]
"""One level of a collection: path format, keys, children and rebuild function.

The fields are those of :class:`_Node`, but the children are collections and leaves, not structures.
This is a plain tuple, since a named tuple would cost a Python call for each collection in a forward
pass.
"""


def flatten(tree: Tree) -> tuple[list[Leaf], Structure]:
    """Flatten a collection.

    Args:
        tree: any collection, or a single leaf.

    Returns:
        The leaves in visiting order, and the structure for :func:`unflatten`.
    """
    leaves: list[Leaf] = []
    structure = _flatten(tree, leaves)
    return leaves, structure


def unflatten(structure: Structure, leaves: Iterable[Leaf]) -> Tree:
    """Rebuild a collection from as many leaves as :func:`flatten` returned, in the same order.

    Args:
        structure: the structure of the collection.
        leaves: the leaves. From an iterator, only the leaves of this structure are taken.
    """
    # iter() returns an iterator itself, so nested calls continue where the previous one ended.
    leaves = iter(leaves)
    if structure is None:
        return next(leaves)
    children = structure.children
    if isinstance(children, int):  # all children are leaves
        return structure.rebuild(list(islice(leaves, children)))
    return structure.rebuild([unflatten(child, leaves) for child in children])


def leaf_paths(structure: Structure, root: str = "") -> list[str]:
    """Return the path to each leaf for error texts, as in code: ``['losses'][0]``.

    Args:
        structure: the structure of a collection.
        root: the path of the collection itself, with which each path begins.
    """
    if structure is None:
        return [root]
    children = structure.children
    if isinstance(children, int):
        children = [None] * children  # None is the structure of a leaf
    paths = []
    for key, child in zip(structure.keys, children, strict=True):
        child_root = root + structure.path_format.format(key)
        paths += leaf_paths(child, child_root)
    return paths


def describe_keys(structure: Structure) -> str:
    """Return the keys of a structure as text.

    Ranks compare the texts to find out whether their structures are the same, so the text does not
    contain anything that differs between processes, such as an address.
    """
    if structure is None:
        return ""
    keys = structure.keys
    if isinstance(keys, range):  # a sequence
        text = str(keys)
    else:
        try:
            text = ", ".join(keys)  # the common case
        except TypeError:  # not all keys are strings
            # The keys by which a set is sorted are texts without what differs between processes,
            # such as an address.
            text = str(list(map(_sort_key, keys)))
    if isinstance(structure.children, int):  # all children are leaves, which have no keys
        return text
    inner = "; ".join(map(describe_keys, structure.children))
    return f"{text}: ({inner})"


def children(tree: Tree) -> dict[str, Tree]:
    """Return the values of a collection by path, one level deep. The result of a leaf is empty."""
    level = _split_one_level(tree)
    if level is None:  # a leaf
        return {}
    path_format, keys, values, _rebuild = level
    paths = map(path_format.format, keys)
    return dict(zip(paths, values, strict=True))


def map_leaves(
    function: Callable[[Leaf], Leaf], tree: Tree, is_leaf: Callable[[Tree], bool] | None = None
) -> Tree:
    """Apply ``function`` to every leaf of a collection.

    If no leaf changes, the collection itself is returned, not a copy. Example: a module whose
    arguments are mapped can still append to a list of its caller.

    Args:
        function: returns the replacement of a leaf.
        tree: any collection, or a single leaf.
        is_leaf: returns whether to treat a collection as a leaf. With None, the default, no
            collection is a leaf.
    """
    if type(tree) in _LEAF_TYPES or (is_leaf is not None and is_leaf(tree)):
        return function(tree)
    level = _split_one_level(tree)
    if level is None:  # a leaf of a rarer type
        return function(tree)
    _path_format, _keys, values, rebuild = level
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
            computation.

    Returns:
        The moved collection. If nothing moved, ``tree`` itself. Tensors that are already on the
        device are not copied.
    """

    def move(leaf: Leaf) -> Leaf:
        """Return the leaf on the device, or the leaf itself if it cannot be moved."""
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if not _has_to_method(leaf):
            return leaf
        # The method of another library may not know non_blocking.
        moved = leaf.to(device)
        if moved is None:  # the object has moved in place
            return leaf
        return moved

    # A collection that has a method ``to`` is a leaf here, and moves as a whole.
    return map_leaves(move, tree, is_leaf=_has_to_method)


def _has_to_method(leaf: Leaf) -> bool:
    return callable(getattr(leaf, "to", None))


def _are_identical(before: Iterable[Leaf], after: Iterable[Leaf]) -> bool:
    return all(map(operator.is_, before, after))


def _flatten(tree: Tree, leaves: list[Leaf]) -> Structure:
    """Append the leaves of a collection to ``leaves``, and return the collection's structure."""
    level = None  # None stands for a leaf
    if type(tree) not in _LEAF_TYPES:
        level = _split_one_level(tree)
    if level is None:
        leaves.append(tree)
        return None
    path_format, keys, values, rebuild = level
    if _LEAF_TYPES.issuperset(map(type, values)):
        leaves.extend(values)
        # All children are leaves, of which a node stores only the number.
        return _Node(path_format, keys, len(values), rebuild)
    children = [_flatten(value, leaves) for value in values]
    return _Node(path_format, keys, children, rebuild)


def _split_one_level(tree: Tree) -> _Level | None:
    """Return the path format, keys, children and rebuild function of a collection.

    Return None for a leaf. The order of the conditions matters: the frequent types come first,
    since this runs in every forward pass. The functions that are registered with torch's pytree
    come before the general rules for dataclasses and subclasses of dict, list and tuple.
    """
    kind = type(tree)
    if isinstance(tree, Tensor):  # a leaf, even if its class is registered or a dataclass
        return None
    if kind is dict:
        return _split_mapping(tree, build=_identity)  # the built dict is the result
    if kind is list or kind is tuple:
        return _split_sequence(tree, kind)
    is_named_tuple = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if is_named_tuple:
        return ".{}", tree._fields, tree, kind._make  # type: ignore[attr-defined]
    # An OrderedDict may be a state dict. torch's registered functions lose its attribute _metadata.
    if kind is not OrderedDict:
        # None if the type is not registered.
        children_and_rebuild = flatten_one_level(tree)
        if children_and_rebuild is not None:
            return _split_registered(tree, *children_and_rebuild)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _split_dataclass(tree)
    if isinstance(tree, dict):
        return _split_dict_subclass(tree)
    if isinstance(tree, list | tuple):
        return _split_sequence(tree, kind)
    return None


def _identity(items: dict[Any, Any]) -> dict[Any, Any]:
    return items


def _split_registered(
    tree: Tree, values: Sequence[Tree], rebuild: Callable[[list[Any]], Tree]
) -> _Level:
    """Return the path format, keys, children and rebuild function of a registered object.

    The type of the object is registered with torch's pytree.

    Args:
        tree: the object.
        values: the children, as the function that the type has registered returns them.
        rebuild: builds the object from new children in the same order.
    """
    # A registered mapping is split by its sorted keys, as a dict is. But a mapping may declare
    # children that are not its entries. Such children have no keys, and are split as a sequence.
    has_entries_as_children = (
        isinstance(tree, Mapping)
        and len(tree) == len(values)
        and _are_identical(tree.values(), values)
    )
    if not has_entries_as_children:
        return _split_sequence(values, rebuild)

    def build(items: dict[Any, Tree]) -> Tree:
        # _split_mapping() sorts the keys, but `rebuild` takes the children in the mapping's order.
        return rebuild([items[key] for key in tree])

    return _split_mapping(tree, build)


def _split_dataclass(tree: Tree) -> _Level:
    """Return the path format, field names, values and rebuild function of a dataclass instance.

    Fields that are not set are left out.
    """
    fields = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
    values = [getattr(tree, name) for name in fields]

    def rebuild(new_values: list[Any]) -> Tree:
        """Return a copy of the object with new values of the fields."""
        # object.__setattr__ also sets the fields of a frozen dataclass.
        return _copy_with(tree, assign=object.__setattr__, keys=fields, values=new_values)

    return ".{}", fields, values, rebuild


def _split_dict_subclass(tree: dict[Any, Any]) -> _Level:
    """Return the path format, keys, children and rebuild function of a subclass of dict."""

    def build(items: dict[Any, Tree]) -> Tree:
        """Return a copy of the object with the new values of ``items``."""
        return _copy_with(tree, assign=operator.setitem, keys=items.keys(), values=items.values())

    return _split_mapping(tree, build)


def _split_sequence(values: Sequence[Tree], rebuild: Callable[[list[Any]], Tree]) -> _Level:
    return "[{}]", range(len(values)), values, rebuild


def _split_mapping(tree: Mapping[Any, Any], build: Callable[[dict[Any, Any]], Any]) -> _Level:
    """Return the path format, sorted keys, children and rebuild function of a mapping.

    Args:
        tree: the mapping.
        build: builds a mapping of the same type from a dict with the same keys, in the mapping's
            own order.
    """
    # Sorted, since ranks may have added the same keys in different orders, and a collective needs
    # the leaves in the same order on all ranks.
    if _STRING_TYPES.issuperset(map(type, tree)):  # the common case, which is fast
        keys = sorted(tree)
    else:
        keys = sorted(tree, key=_sort_key)

    def rebuild(new_values: list[Tree]) -> Tree:
        """Build a mapping from new values in the order of the sorted keys."""
        items = dict(tree)  # in the mapping's own order
        items.update(zip(keys, new_values, strict=True))
        return build(items)

    values = list(map(tree.__getitem__, keys))
    return "[{!r}]", keys, values, rebuild


def _sort_key(key: Any) -> tuple[str, Any]:
    """Return the sort key of a dict key, which is the same on every rank.

    Returns:
        The name of the key's type, and a value that sorts keys of this type. The value is empty for
        keys that differ only by identity, so sorting leaves them in the order of insertion.
    """
    # The type comes first, since Python cannot compare keys of different types.
    kind = type(key).__name__
    if isinstance(key, str | bytes | int | float):
        return kind, key
    if isinstance(key, tuple):
        return kind, list(map(_sort_key, key))
    if isinstance(key, frozenset):
        # frozensets compare by inclusion, which does not sort.
        return kind, sorted(map(_sort_key, key))
    # The text of a tensor contains its values, which may differ between ranks.
    if isinstance(key, Tensor):
        return kind, ""
    text = repr(key)
    # The text of a function contains its address, which differs between ranks.
    if " at 0x" in text:
        return kind, ""
    return kind, text


def _copy_with(
    tree: Tree,
    *,
    assign: Callable[[Any, Any, Any], None],
    keys: Iterable[Any],
    values: Iterable[Tree],
) -> Tree:
    """Return a shallow copy of a collection with other values.

    A copy keeps attributes that the ``__init__`` of the collection does not take, which a new
    object would lose.

    Args:
        tree: the collection.
        assign: sets a value of the copy, as ``assign(copy, key, value)``.
        keys: the keys of a dict, or the names of a dataclass's fields.
        values: the new values, one for each key.
    """
    result = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        assign(result, key, value)
    return result


# -- checks of what can be sent -------------------------------------------------------------------


def check_can_send(tensor: Tensor, structure: Structure, position: int) -> None:
    """Check that a collective can send a tensor: its values are dense and on this rank.

    Args:
        tensor: a leaf of a collection.
        structure: the structure of the collection, for the error.
        position: the position of the leaf in the visiting order, from 0.

    Raises:
        ConfigurationError: the tensor cannot be sent. The error names the leaf.
    """
    # In the suggestions, x is the tensor.
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
    # The first condition finds tensors inside of torch.func, the second one forward-mode AD.
    elif debug_unwrap(tensor) is not tensor or unpack_dual(tensor).tangent is not None:
        problem = (
            "inside of torch.func or of forward-mode AD, "
            "and its tangent would be the tangent of this rank alone"
        )
        suggestion = "loss.backward() or torch.autograd.grad, which go through collectives"
    # A DTensor, recognized by its attribute: importing its class takes a second.
    elif type(tensor) not in PLAIN_TENSOR_TYPES and hasattr(tensor, "device_mesh"):
        problem = "sharded over ranks already (a DTensor)"
        suggestion = "x.full_tensor(), or x.to_local()"
    else:
        return
    # The path of a single tensor is empty.
    path = leaf_paths(structure)[position] or "a tensor"
    # The error does not show the shape, since a nested tensor has no shape.
    raise ConfigurationError(
        f"a collective over {path}",
        problem=f"it is {problem}",
        expected="dense tensors on a device",
        suggestion=suggestion,
    )


def check_other_leaf(leaf: Leaf, structure: Structure, position: int) -> None:
    """Refuse a leaf that holds values which a collective cannot communicate.

    Collectives return all leaves but tensors and Python numbers unchanged. This is right for a
    text. But of an array the user would silently get the values of this rank alone.

    Args:
        leaf: a leaf of a collection. It is neither a tensor nor a Python number.
        structure: the structure of the collection, for the error.
        position: the position of the leaf in the visiting order, from 0.

    Raises:
        ConfigurationError: the leaf is an array or number of another library, an unknown container,
            or an object that holds tensors.
    """
    if isinstance(leaf, str | bytes | bytearray | torch.Size | type | Enum):
        return
    # In the suggestions, x is the leaf.
    if hasattr(leaf, "__array__"):
        suggestion = "torch.as_tensor(x), or x.item() for a single value"
    elif isinstance(leaf, Number):
        # A number of another library, such as a Decimal.
        suggestion = "float(x)"
    elif isinstance(leaf, Mapping):
        suggestion = "dict(x)"
    elif isinstance(leaf, Iterable):
        suggestion = "list(x)"
    elif _holds_tensor(leaf):
        suggestion = "its tensors, in a dict or a dataclass"
    else:
        return
    # The path of a single object is empty.
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
    """Return whether an attribute of a leaf is a tensor, or a collection that contains a tensor.

    For speed, only the first level of a collection is searched.
    """
    attributes = getattr(leaf, "__dict__", {})  # objects with __slots__ have no dict
    for value in attributes.values():
        candidates = [value, *children(value).values()]
        if any(isinstance(candidate, Tensor) for candidate in candidates):
            return True
    return False
