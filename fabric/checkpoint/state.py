"""The user's objects as plain state, and plain state as JSON. Knows nothing of files, processes or strategies.

[Note: plain state]
State is *plain* when ``torch.load(weights_only=True)`` can read it again: tensors, numbers, strings, bytes, ``None``,
dtypes, devices, and dicts, lists, tuples and sets of these; by exact type, since a subclass is rebuilt by running its
code. Anything else is refused when it is saved, not when it is loaded, when the run is over.

[Note: JSON with type tags]
What JSON has no type for is an object with one key that begins with ``$``, the *tag*: ``{"$tuple": [1, 2]}``,
``{"$bytes": "..."}`` in base64, ``{"$tensor": "model.weight"}`` for a tensor that is kept elsewhere under that name.
Every plain value is restored with its type and every bit: floats are written with as many digits as tell them from all
others, and those that JSON lacks by their bytes. A dict is a JSON object where its keys are strings that no tag could
be, and else, as subclasses of dict, a list of pairs.

A *place* is the tuple of keys and indices that leads from a state to one of its values, such as
``("model", "layer.weight")``.
"""

import base64
import copy
import ctypes
import dataclasses
import enum
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import get_safe_globals
from torch.utils.data import DataLoader

from fabric.checkpoint.base import listed, newer
from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = [
    "FORMAT_VERSION", "METADATA_KEY", "Access", "check_entries", "check_weights_only_safe", "collect", "encode",
    "flatten_state", "fqn", "is_stateful", "read_metadata", "tensor_bytes", "unflatten_state", "with_metadata",
]  # fmt: skip

METADATA_KEY = "__fabric__"
FORMAT_VERSION = 1

Filter = Mapping[str, Callable[[str, Any], bool]]
_Place = tuple[Any, ...]
_Take = Callable[[_Place, Any], Any]

_SURROGATES = re.compile("[\ud800-\udfff]")  # JSON would decode a pair of them as one character
_MAPPINGS = {"$dict": dict, "$OrderedDict": OrderedDict, "$Counter": Counter}
_SEQUENCES = {"$list": list, "$tuple": tuple, "$set": set}
_TAGS = {kind: tag for tag, kind in {**_MAPPINGS, **_SEQUENCES}.items()}
_SPARSE = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_REPLACEMENTS: tuple[tuple[type, str], ...] = (
    (enum.Enum, "value.name"),
    (torch.Generator, "generator.get_state()"),
    (Tensor, "tensor.as_subclass(torch.Tensor), with values"),
    *((kind, f"{kind.__name__}(value)") for kind in (dict, tuple, list)),
    (frozenset, "set(value)"),
)


@dataclass(frozen=True)
class Access:
    """How the states of modules and optimizers are read and restored.

    Attributes:
        module_state: names and values of a module as they stand in a checkpoint.
        load_module: ``load_module(module, content, strict)`` puts such a state into a module.
        optimizer_state: the state of an optimizer for full parameters, as its own ``state_dict()`` has it.
        load_optimizer: ``load_optimizer(optimizer, content)`` puts such a state into an optimizer.
    """

    module_state: Callable[[nn.Module], Mapping[str, Any]]
    load_module: Callable[[nn.Module, dict[str, Any], bool], None]
    optimizer_state: Callable[[Optimizer], Mapping[str, Any]] = methodcaller("state_dict")
    load_optimizer: Callable[[Optimizer, dict[str, Any]], None] = lambda optimizer, content: optimizer.load_state_dict(
        content
    )


def collect(
    state: Mapping[str, Any],
    access: Access,
    *,
    filter: Filter | None = None,
    trainable_only: bool = False,
    checks_content: bool = True,
) -> dict[str, Any]:
    """Turn ``state`` into plain state, entry by entry. No tensor is copied.

    Modules and optimizers are read through ``access``; another object with ``state_dict()`` and ``load_state_dict()``
    becomes its ``state_dict()``; plain values stay as they are. Every entry that can be refused without these is looked
    at first, since they may be collectives.

    Args:
        state: names and objects; not changed.
        access: how modules and optimizers are read.
        filter: for some entries, ``keep(name, value)``: whether an item of that entry's dict is saved.
        trainable_only: leave out the parameters of modules that do not require a gradient.
        checks_content: whether the states of objects have to be plain.

    Raises:
        ArgumentTypeError: an entry could not be loaded again without running code, or is a ``DataLoader`` that is not
            set up.
        ConfigurationError: ``filter`` names an entry that is missing or no dict, or one is called ``"__fabric__"``.
    """
    keep = filter or {}
    check_entries(state)
    if unknown := [name for name in keep if name not in state]:
        raise ConfigurationError(f"filter={{{unknown[0]!r}: ...}}", "no such entry in state", listed(map(repr, state)))
    collected: dict[str, Any] = {}
    for name, value in state.items():
        content = _content(value, access)
        if trainable_only and isinstance(value, nn.Module):
            frozen = {key for key, item in value.named_parameters(remove_duplicate=False) if not item.requires_grad}
            content = _filtered(name, content, lambda key, _, frozen=frozen: key not in frozen)
        if name in keep:
            content = _filtered(name, content, keep[name])
        if checks_content and content is not value:
            check_weights_only_safe(name, content)
        collected[name] = content
    return collected


def check_entries(state: Mapping[str, Any]) -> None:
    """Raise unless every entry of a user's state is an object with a state, or plain."""
    if METADATA_KEY in state:
        raise ConfigurationError(
            "a checkpoint", f"state[{METADATA_KEY!r}] is where fabric keeps its own", "any other name"
        )
    for name, value in state.items():
        if not is_stateful(value):
            check_weights_only_safe(name, value)


def is_stateful(value: Any) -> bool:
    """Whether a value is restored in place; any other is replaced.

    Raises:
        ArgumentTypeError: it is a ``DataLoader`` that is not set up.
    """
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    if not isinstance(value, type) and all(map(callable, methods)):
        return True
    if isinstance(value, DataLoader):
        raise ArgumentTypeError(
            "a DataLoader in a checkpoint",
            "it does not know its position, so a resumed run would replay or skip samples",
            "a loader that fabric has set up, or any loader with state_dict() and load_state_dict()",
            "loader = fabric.setup_dataloaders(loader), and put the result into the state",
        )
    return False


def with_metadata(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Add what fabric itself wants to know about a checkpoint to its entries.

    The version of the format and that of torch are added to ``metadata``, which is plain.
    """
    stamp = {"format_version": FORMAT_VERSION, "torch_version": str(torch.__version__), **metadata}
    return {**entries, METADATA_KEY: stamp}


def read_metadata(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`with_metadata` added, if anything; a CheckpointError for the format of a newer fabric."""
    metadata = loaded.get(METADATA_KEY, {})
    version = metadata.get("format_version", 0) if isinstance(metadata, Mapping) else None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise newer("load a checkpoint", version, FORMAT_VERSION)
    return dict(metadata)


def check_weights_only_safe(name: str, value: Any) -> None:
    """Raise an ArgumentTypeError unless an entry of a state is plain: see ``[Note: plain state]``.

    Classes of ``torch.serialization.add_safe_globals`` and collections that hold themselves are taken as they are.
    """
    allowed = {*_TAGS, *_allowed_classes()}

    def take(place: _Place, item: Any) -> None:
        if isinstance(item, Tensor):
            if type(item) not in (Tensor, nn.Parameter, *allowed) or item.is_meta or hasattr(item, "full_tensor"):
                raise _not_plain(place, item)
            encode(vars(item), take, (*place, "__dict__"))
        elif type(item) not in allowed:
            raise _not_plain(place, item)

    encode(value, take, (name,))


def flatten_state(state: Mapping[str, Any]) -> tuple[Any, dict[_Place, str], dict[_Place, Tensor]]:
    """Split a state into JSON and tensors. No tensor is copied, but sparse ones, which are kept in the JSON.

    Returns:
        The state as JSON with the names of its tensors; the name of each place, unique but for those that hold the same
        memory; and the tensors.

    Raises:
        ArgumentTypeError: something in it has no place in a sharded checkpoint.
    """
    tensors: dict[_Place, Tensor] = {}
    names: dict[_Place, str] = {}
    owners: dict[Any, str] = {}
    taken = {"__metadata__"}  # which safetensors keeps for itself

    def take(place: _Place, item: Any) -> Any:
        is_plain = type(item) in (Tensor, nn.Parameter) or hasattr(item, "full_tensor")
        if not is_plain or ... in place or item.layout is not torch.strided or item.is_quantized or item.is_meta:
            return _inline(place, item)
        owner = _memory(item) or place
        if owner not in owners:
            name = fqn(place)
            while name in taken:  # {"a.b": x} and {"a": {"b": y}} would get the same one
                name = f"{name}#{len(taken)}"
            taken.add(name)
            owners[owner] = name
        tensors[place], names[place] = item, owners[owner]
        return {"$tensor": owners[owner]}

    return encode(dict(state), take), names, tensors


def encode(value: Any, take: _Take | None = None, place: _Place = (), above: tuple[int, ...] = ()) -> Any:
    """A value as JSON; see ``[Note: JSON with type tags]``.

    Args:
        value: any.
        take: what to write for tensors, for values that are not plain, and for collections that hold themselves, by
            their place. None keeps the values of tensors in the JSON, and refuses the others.
        place: where the value is; an ellipsis in it says that a load could not fill in a tensor there.
        above: identities of the collections that it is in.
    """
    kind = type(value)
    if value is None or kind is bool or _is_json(value, kind):
        return value
    if kind in _ATOMS:
        tag, write, _ = _ATOMS[kind]
        return {tag: write(value)}
    if kind not in _TAGS or id(value) in above:
        return (take or _inline)(place, value)
    above = (*above, id(value))
    if not isinstance(value, dict):
        place = (*place, ...) if kind is set else place
        items = [encode(item, take, (*place, index), above) for index, item in enumerate(value)]
        return items if kind is list else {_TAGS[kind]: items}
    if kind is dict and all(type(key) is str and not key.startswith("$") and _is_json(key, str) for key in value):
        return {key: encode(item, take, (*place, key), above) for key, item in value.items()}
    pairs = [
        [encode(key, take, (*place, ..., key)), encode(item, take, (*place, key), above)] for key, item in value.items()
    ]
    attributes = encode(dict(getattr(value, "__dict__", {})), take, (*place, ..., "__dict__"), above)
    return {_TAGS[kind]: pairs, **({"attributes": attributes} if attributes else {})}


def unflatten_state(value: Any, tensors: Callable[[str], Tensor] | None = None) -> Any:
    """The value of :func:`flatten_state` or :func:`encode`, with ``tensors(name)`` for its tensors. Runs no code."""
    if isinstance(value, list):
        return [unflatten_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()), ("", cast(Any, None)))
    if not tag.startswith("$"):
        return {key: unflatten_state(item, tensors) for key, item in value.items()}
    if tag == "$tensor" and tensors is not None:
        return tensors(content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](unflatten_state(content, tensors))
    if tag not in _MAPPINGS:
        return _READERS[tag](content)
    mapping: Any = _MAPPINGS[tag]()
    for key, item in content:
        mapping[unflatten_state(key, tensors)] = unflatten_state(item, tensors)
    if "attributes" in value:
        vars(mapping).update(unflatten_state(value["attributes"], tensors))
    return mapping


def fqn(place: Iterable[Any]) -> str:
    """A place in the form in which errors and files name it."""
    return ".".join(map(str, place))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which live as long as the result does."""
    if tensor.nbytes == 0:
        return memoryview(b"")  # zlib takes the address of nothing for the wish to start anew
    # Neither torch nor Python lends them but through numpy, which is optional.
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def _is_json(value: Any, kind: type) -> bool:
    """Whether JSON has it as it is."""
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        return not _SURROGATES.search(value)
    return kind is int and abs(value) < 1 << 63


def _inline(place: _Place, value: Any) -> dict[str, Any]:
    """A tensor with its values."""
    if not isinstance(value, Tensor) or (type(value) not in (Tensor, nn.Parameter)):
        if type(value) not in _TAGS and type(value) not in _allowed_classes():
            raise _not_plain(place, value)
    elif value.layout in _SPARSE and (value.layout is not torch.sparse_coo or value.is_coalesced()):
        parts = [_inline(place, getattr(value.detach(), part)())["$values"] for part in _SPARSE[value.layout]]
        return {"$sparse": [str(value.layout), [*value.shape], parts]}
    elif value.layout is torch.strided and not value.is_quantized and not value.is_meta:
        content = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return {"$values": [str(value.dtype), [*value.shape], _base64(tensor_bytes(content))]}
    raise ArgumentTypeError(
        f"save {_written(place)}, a {type(value).__name__}, in a sharded checkpoint",
        "the format has no place for it",
        "tensors with values, dense or coalesced; plain data without classes of add_safe_globals, which need code to "
        "be read; collections that do not hold themselves",
        'plain tensors and data, or one file: checkpoint_io=FullCheckpoint(), or state_dict_type="full"',
    )


def _read_values(content: Any) -> Tensor:
    dtype, shape, text = content
    values = bytearray(base64.b64decode(text))
    empty = torch.empty(shape, dtype=_constant(dtype, torch.dtype))
    return torch.frombuffer(values, dtype=torch.uint8).view(empty.dtype).view(shape) if values else empty


def _read_sparse(content: Any) -> Tensor:
    name, shape, parts = content
    layout, tensors = _constant(name, torch.layout), list(map(_read_values, parts))
    with torch.sparse.check_sparse_tensor_invariants():
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*tensors, size=shape, is_coalesced=True)
        return torch.sparse_compressed_tensor(*tensors, size=shape, layout=layout)


def _base64(content: bytes | memoryview) -> str:
    return base64.b64encode(content).decode()


def _read_complex(parts: Any) -> complex:
    return complex(*map(unflatten_state, parts))


def _constant(name: str, kind: type) -> Any:
    value = vars(torch)[name.removeprefix("torch.")]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


# By type: the tag, what is written behind it, and how that is read.
_ATOMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("$int", hex, lambda text: int(text, 16)),
    float: (
        "$float",
        lambda value: struct.pack("<d", value).hex(),
        lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    ),
    complex: ("$complex", lambda value: [encode(value.real), encode(value.imag)], _read_complex),
    str: (
        "$str",
        lambda value: value.encode("utf-8", "surrogatepass").hex(),
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    bytes: ("$bytes", _base64, base64.b64decode),
    bytearray: ("$bytearray", _base64, lambda text: bytearray(base64.b64decode(text))),
    torch.dtype: ("$dtype", str, lambda name: _constant(name, torch.dtype)),
    torch.layout: ("$layout", str, lambda name: _constant(name, torch.layout)),
    torch.device: ("$device", str, torch.device),
    torch.Size: ("$size", list, torch.Size),
}
_READERS = {tag: read for tag, _, read in _ATOMS.values()} | {"$values": _read_values, "$sparse": _read_sparse}


def _memory(tensor: Any) -> Any:
    """What two tensors that are one have in common; None for one that holds nothing on this rank."""
    local = tensor.to_local() if hasattr(tensor, "full_tensor") else tensor
    if type(local) not in (Tensor, nn.Parameter) or local.numel() == 0:
        return None
    bits = local.is_conj(), local.is_neg()  # views of the same memory with other values
    return local.data_ptr(), local.device, local.dtype, local.shape, local.stride(), tensor.shape, bits


def _written(place: _Place) -> str:
    return "state" + "".join(f"[{key!r}]" for key in place if key is not ...)


def _allowed_classes() -> set[Any]:
    return {entry[0] if isinstance(entry, tuple) else entry for entry in get_safe_globals()}


def _not_plain(place: _Place, value: Any) -> ArgumentTypeError:
    kind, written = type(value), _written(place)
    return ArgumentTypeError(
        f"save {written}, a {kind.__module__}.{kind.__qualname__}",
        "it could not be loaded again without running code",
        "tensors with values, numbers, strings, bytes, None, and dicts, lists, tuples and sets of these",
        f"{written} = {_replacement(value)}",
    )


def _replacement(value: Any) -> str:
    kind = type(value)
    if hasattr(value, "full_tensor"):
        return "tensor.full_tensor(), on every rank"
    if hasattr(value, "load_state_dict"):
        return "value.state_dict(), or give it an entry of its own: only entries are restored as objects"
    if kind.__module__ == "numpy":
        return "torch.from_numpy(array)" if kind.__name__ == "ndarray" else "value.item()"
    for base, replacement in _REPLACEMENTS:
        if isinstance(value, base):
            return replacement
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict(value)"
    if hasattr(value, "__fspath__"):
        return "str(value)"
    if callable(value):
        return "a name as a string, by which the function or class is found after loading"
    return f"plain data, or give {kind.__name__} state_dict() and load_state_dict()"


def _content(value: Any, access: Access) -> Any:
    if isinstance(value, nn.Module):
        return access.module_state(value)
    if isinstance(value, Optimizer):
        return access.optimizer_state(value)
    return value.state_dict() if is_stateful(value) else value


def _filtered(name: str, content: Any, keep: Callable[[str, Any], bool]) -> Any:
    if not isinstance(content, dict):
        raise ConfigurationError(f"filter={{{name!r}: ...}}", f"its state is a {type(content).__name__}", "a dict")
    # A shallow copy keeps the type, and the versions of its layers that torch attaches to a module's state.
    kept = copy.copy(content)
    for key, value in content.items():
        if not keep(key, value):
            del kept[key]
    return kept
