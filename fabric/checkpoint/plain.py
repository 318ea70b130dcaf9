"""Which values can be kept in a checkpoint.

[Note: what is plain]
What ``torch.load(weights_only=True)`` can read again: tensors, numbers, strings, bytes, ``None``, dtypes, devices, and
dicts, lists, tuples and sets of these; by exact type, since a subclass is rebuilt by running its code. Anything else
is refused when it is saved, which costs a line to change, and not when it is loaded, when the run is over.
"""

import dataclasses
import enum
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import nn
from torch.serialization import get_safe_globals

from fabric.errors import ArgumentTypeError

__all__ = ["check_plain"]

_ATOMS = frozenset(
    {bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size, torch.layout}
)
_TENSORS = (torch.Tensor, nn.Parameter)
_WITH_ATTRIBUTES = (*_TENSORS, OrderedDict, Counter)  # pickle brings their attributes into the file


def check_plain(place: str, value: Any) -> None:
    """Raise unless ``value`` is plain: see ``[Note: what is plain]``.

    Classes that the user has allowed with ``torch.serialization.add_safe_globals`` are taken as they are.

    Args:
        place: how the user would write where the value is, such as ``state['config']``.
        value: anything, at any depth; containers that hold themselves are fine.

    Raises:
        ArgumentTypeError: something in it is not plain; the text names its place and what to write instead.
    """
    allowed = frozenset(entry[0] if isinstance(entry, tuple) else entry for entry in get_safe_globals())
    _check(place, value, allowed, set())


def _check(place: str, value: Any, allowed: frozenset[Any], seen: set[int]) -> None:
    kind = type(value)
    if kind in _ATOMS or id(value) in seen:
        return
    seen.add(id(value))
    if kind in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check(f"a key of {place}", key, allowed, seen)
            _check(f"{place}[{key!r}]", item, allowed, seen)
    elif kind in (list, tuple, set):
        for index, item in enumerate(value):
            _check(f"{place}[{index}]" if kind is not set else f"an item of {place}", item, allowed, seen)
    else:
        if isinstance(value, torch.Tensor):
            _check_whole(place, value)
        if kind not in _TENSORS and kind not in allowed:
            raise _not_plain(place, value)
    if kind in _WITH_ATTRIBUTES:
        for name, item in vars(value).items():
            _check(f"{place}.{name}", item, allowed, seen)


def _check_whole(place: str, tensor: torch.Tensor) -> None:
    """A tensor that torch can load, but whose values would not be in the file, or only a part of them."""
    if hasattr(tensor, "full_tensor"):
        raise ArgumentTypeError(
            f"save {place}",
            "it is a sharded tensor, of which this rank holds a part",
            "whole tensors",
            f"{place} = tensor.full_tensor(), on every rank",
        )
    if tensor.is_meta:
        raise ArgumentTypeError(
            f"save {place}", "it is a meta tensor, which has no values", "tensors with values", "materialise it first"
        )


def _not_plain(place: str, value: Any) -> ArgumentTypeError:
    kind = type(value)
    instead = (
        _spelling(place, value) or f"{place} = plain data, or give {kind.__name__} state_dict() and load_state_dict()"
    )
    return ArgumentTypeError(
        f"save {place}, a {kind.__module__}.{kind.__qualname__}",
        "it could not be loaded again without running code",
        "tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of these",
        instead,
    )


def _spelling(place: str, value: Any) -> str:
    """What to write instead of a value of a common kind."""
    kind = type(value)
    if hasattr(value, "load_state_dict"):
        return "give it an entry of its own in the state: only entries are saved and restored as objects"
    if isinstance(value, enum.Enum):
        return f"{place} = {kind.__name__}.{value.name}.name"
    if isinstance(value, torch.Generator):
        return f"{place} = generator.get_state()"
    if isinstance(value, torch.Tensor):
        return f"{place} = tensor.as_subclass(torch.Tensor)"
    if kind.__module__ == "numpy":
        return f"{place} = torch.from_numpy(array)" if kind.__name__ == "ndarray" else f"{place} = value.item()"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{place} = dataclasses.asdict(value)"
    if callable(value):
        return f"{place} = a name as a string, and look the function up by it after loading"
    for base, spelling in (
        (dict, "dict(value)"),
        (tuple, "tuple(value)"),
        (list, "list(value)"),
        (frozenset, "set(value)"),
    ):
        if isinstance(value, base):
            return f"{place} = {spelling}"
    return f"{place} = str(value)" if hasattr(value, "__fspath__") else ""
