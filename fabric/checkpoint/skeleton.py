"""A state without its tensors, and the tensors by their place in it.

[Note: Places] A *place* is the tuple of keys and indices that leads from a state to one of its values, such as
``("model", "layer.weight")``. The *skeleton* of a state is the state with None at the place of every tensor; it is
plain and small, so that it can be kept and read apart from the tensors.
"""

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fabric._torch import local_tensor
from fabric.checkpoint.state import METADATA_KEY
from fabric.errors import ArgumentTypeError

__all__ = ["MISSING", "Place", "find", "fit_tensors", "name_tensors", "take_apart", "written"]

Place = tuple[Any, ...]

MISSING: Any = object()
"""What :func:`find` returns where there is nothing."""

_DICTS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple)


def take_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Place, Tensor]]:
    """The skeleton of a state and the tensors by place, in the order in which they stand there.

    Whole and sharded tensors of the strided layout are taken out; those of other layouts, and those of fabric's own
    metadata, stay in the skeleton. No tensor is copied, and ``state`` is not changed.

    Raises:
        ArgumentTypeError: a collection holds itself.
    """
    tensors: dict[Place, Tensor] = {}
    skeleton = {
        name: content if name == METADATA_KEY else _without_tensors(content, (name,), tensors, ())
        for name, content in state.items()
    }
    return skeleton, tensors


def name_tensors(tensors: Mapping[Place, Tensor]) -> dict[Place, str]:
    """A name for each place: the keys joined by dots. Places that hold the same memory share a name."""
    names: dict[Place, str] = {}
    owners: dict[Any, str] = {}
    taken: set[str] = set()
    for place, tensor in tensors.items():
        owner = _memory(tensor) or place
        if owner not in owners:
            name = written(place)
            # {"a.b": x} and {"a": {"b": y}} would get the same name.
            while name in taken:
                name = f"{written(place)}#{len(taken)}"
            taken.add(name)
            owners[owner] = name
        names[place] = owners[owner]
    return names


def fit_tensors(skeleton: Any, places: Mapping[Place, str], tensors: Mapping[Place, Tensor], at: Place = ()) -> Any:
    """The part of a state at the place ``at``, built from its skeleton and its tensors.

    A place in ``places`` for which there is no tensor is left out of the dict that it is in, and is None in a list or a
    tuple. Collections are new; the tensors are those of ``tensors``.
    """
    kind = type(skeleton)
    if at in places:
        return tensors.get(at, MISSING)
    if kind in _DICTS:
        built = copy.copy(skeleton)
        for key, item in skeleton.items():
            built[key] = fit_tensors(item, places, tensors, (*at, key))
            if built[key] is MISSING:
                del built[key]
        return built
    if kind in _SEQUENCES:
        items = [fit_tensors(item, places, tensors, (*at, index)) for index, item in enumerate(skeleton)]
        return kind(None if item is MISSING else item for item in items)
    return skeleton


def find(tree: Any, place: Place) -> Any:
    """The value at a place of nested mappings, lists and tuples; :data:`MISSING` where there is none."""
    for key in place:
        if isinstance(tree, Mapping):
            tree = tree.get(key, MISSING)
        elif isinstance(tree, list | tuple) and isinstance(key, int) and 0 <= key < len(tree):
            tree = tree[key]
        else:
            return MISSING
    return tree


def written(place: Place) -> str:
    """A place in the form in which errors and files name it."""
    return ".".join(map(str, place))


def _without_tensors(value: Any, place: Place, tensors: dict[Place, Tensor], above: tuple[int, ...]) -> Any:
    kind = type(value)
    if _is_taken(value):
        tensors[place] = value
        return None
    if kind not in _DICTS and kind not in _SEQUENCES:
        return value
    if id(value) in above:
        raise ArgumentTypeError(
            f"save {written(place)} in a sharded checkpoint",
            f"this {kind.__name__} holds itself",
            "collections that end somewhere",
            "a copy of what is needed, without the reference back",
        )
    above = (*above, id(value))
    parts = value.items() if kind in _DICTS else enumerate(value)
    emptied = {key: _without_tensors(item, (*place, key), tensors, above) for key, item in parts}
    if kind in _SEQUENCES:
        return kind(emptied.values())
    # A shallow copy keeps the type, and the versions of its layers that torch attaches to a module's state.
    copied = copy.copy(value)
    dict.update(copied, emptied)  # a Counter's own would add
    return copied


def _is_taken(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.layout is not torch.strided or value.is_quantized:
        return False
    return type(value) in (Tensor, nn.Parameter) or hasattr(value, "full_tensor")


def _memory(tensor: Tensor) -> Any:
    """What two tensors that are one have in common; None for one that holds nothing on this rank."""
    local = local_tensor(tensor)
    if local.numel() == 0:
        return None
    return local.data_ptr(), local.device, local.dtype, local.shape, local.stride(), tensor.shape
