"""The user's objects as plain state, and plain state as JSON. Knows nothing of files, processes or strategies.

[Note: plain state]
State is *plain* when ``torch.load(weights_only=True)`` can read it back: tensors, numbers, strings, bytes, ``None``,
dtypes, devices, and dicts, lists, tuples and sets of these; by exact type, since a subclass is rebuilt by running its
code. Anything else is refused when it is saved rather than when it is loaded, after the run.

[Note: JSON with type tags]
A value whose type JSON lacks is an object with one key, the *tag*, which is ``$`` and the name of the type:
``{"$tuple": [1, 2]}``, ``{"$bytes": "..."}`` in hexadecimal, ``{"$tensor": "model.weight"}`` for a tensor that is
stored elsewhere under that name. Every plain value is restored with its exact type and bits. A dict, whose keys may be
of any type, is a tagged list of pairs.

A *place* is the tuple of keys and indices that leads from a state to one of its values, such as
``("model", "layer.weight")``.
"""

import copy
import ctypes
import math
import operator
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.serialization import get_safe_globals
from torch.utils.data import DataLoader

from fabric._torch import COMPILED_MODULE, may_refuse_state
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.seed import rng_state, set_rng_state
from fabric.tree import map_tensors

__all__ = [
    "FORMAT_VERSION", "METADATA_KEY", "Access", "State", "check_entries", "check_version", "collect", "encode",
    "flatten_state", "is_stateful", "listed", "local_chunks", "pop_metadata", "tensor_bytes", "uncompiled_state",
    "unflatten_state",
]  # fmt: skip

METADATA_KEY = "__fabric__"
FORMAT_VERSION = 1

State = Mapping[str, Any]  # values, or objects that have a state, by name
MutableState = MutableMapping[str, Any]
PlainState = dict[str, Any]  # plain values by name, see [Note: plain state]
Filter = Mapping[str, Callable[[str, Any], bool]]
ModuleState = Callable[[nn.Module], State]
_Place = tuple[Any, ...]
_Take = Callable[[_Place, Any], Any]

_LISTED = 12  # names given in full before an error only counts the rest
_COLLECTIONS = {
    f"${kind.__name__}": kind for kind in (list, tuple, set, dict, OrderedDict, Counter)
}
_SPARSE = {
    torch.sparse_coo: ("indices", "values"),
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")
    ),
    **dict.fromkeys(
        (torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")
    ),
}


@dataclass(frozen=True)
class Access:
    """How the states of modules and optimizers are read and restored. :attr:`full` and its users are collective.

    Attributes:
        module_state: names and values of a module as in a checkpoint, but with shards as DTensors. The tensors are the
            module's own, so that writing into them loads it.
        load_module: ``load_module(module, content, strict)`` loads such a state, or a full one, into a module.
        load_optimizer: ``load_optimizer(optimizer, content)`` does the same for an optimizer.
        full: replaces the shards in a state by full tensors. Runs no code of the user's, so that it does not fail on
            one rank alone.
    """

    module_state: ModuleState
    load_module: Callable[[nn.Module, dict[str, Any], bool], None]
    load_optimizer: Callable[[Optimizer, dict[str, Any]], None]
    full: Callable[[dict[str, Any]], dict[str, Any]]

    def read(self, state: State) -> dict[str, Any]:
        """The states of objects that have one, and the other values as they are; no tensor is copied.

        Raises:
            ArgumentTypeError: an entry is not plain, holds itself, or is a ``DataLoader`` that is not set up.
            ConfigurationError: one is called ``"__fabric__"``.
        """
        check_entries(state)
        contents = dict(state)
        for name, value in state.items():
            if isinstance(value, nn.Module):
                contents[name] = self.module_state(value)
            elif is_stateful(value):
                contents[name] = value.state_dict()
        encode(contents, _refuse_loop)
        return contents

    def full_copy(self, state: State, is_first: bool) -> dict[str, Any]:
        """Full tensors of a module's state, copied to the CPU on rank 0; an empty dict on others. Collective."""
        copies: dict[Any, Any] = {}
        result: Any = copy.copy(state) if is_first else {}
        for name, value in state.items():
            # one full tensor at a time
            full = self.full({name: value})[name]
            key = _memory_key(value) or name
            if is_first:  # tied weights stay tied
                if key not in copies:
                    copies[key] = map_tensors(lambda each: each.detach().to("cpu", copy=True), full)
                result[name] = copies[key]
        return result

    def back_up(
        self, state: MutableMapping[str, Any], names: Iterable[str], undo: ExitStack
    ) -> None:
        """Have ``undo`` restore entries to their present state; modules only if user code may refuse a state."""
        streams = rng_state()
        undo.callback(set_rng_state, streams)
        copies_modules = any(
            may_refuse_state(value) for value in state.values() if isinstance(value, nn.Module)
        )
        for name in names:
            value: Any = state.get(name)
            if isinstance(value, nn.Module):
                if copies_modules:
                    own = map_tensors(
                        lambda one: one if is_lazy(one) else one.clone(), self.module_state(value)
                    )
                    undo.callback(self.load_module, value, own, False)
            elif is_stateful(value):
                before = (
                    value.state_dict()
                )  # loading gives an optimizer new tensors, and does not write into the old
                undo.callback(
                    value.load_state_dict,
                    before if isinstance(value, Optimizer) else copy.deepcopy(before),
                )
            elif name in state:
                undo.callback(operator.setitem, state, name, value)
        set_rng_state(streams)  # state_dict() may draw random numbers


def collect(
    state: State, contents: State, filter: Filter | None, trainable_only: bool, checks: bool
) -> dict[str, Any]:
    """The part of the contents to save, in full or as shards. Not a collective; no tensor is copied.

    Args:
        state: names and objects; not changed.
        contents: their states, from :meth:`Access.read`.
        filter: for some entries, ``keep(name, value)``: whether an item of that entry's dict is saved.
        trainable_only: leave out the parameters of modules that do not require a gradient.
        checks: whether the states of objects have to be plain.

    Raises:
        ArgumentTypeError: an entry could not be loaded again without running code.
        ConfigurationError: ``filter`` names an entry that is missing or not a dict.
    """
    keep = filter or {}
    if wrong := [name for name in keep if not isinstance(contents.get(name), dict)]:
        problem = "state has no such entry, or none that is saved as a dict"
        raise ConfigurationError(f"filter={{{wrong[0]!r}: ...}}", problem, listed(map(repr, state)))
    collected = dict(contents)
    for name, value in state.items():
        dropped = set[str]()
        if trainable_only and isinstance(value, nn.Module):
            named = value.named_parameters(remove_duplicate=False)
            dropped = {_plain_name(key) for key, item in named if not item.requires_grad}
        if name in keep:
            dropped |= {key for key, item in contents[name].items() if not keep[name](key, item)}
        if dropped:
            # A shallow copy keeps the type, and the versions of its layers that torch attaches to a module's state.
            collected[name] = copy.copy(contents[name])
            for key in dropped & collected[name].keys():
                del collected[name][key]
        if checks:
            _check_plain(name, collected[name])
    return collected


def check_entries(state: State) -> None:
    """Raise unless a user's state is a mapping whose entries are all plain, or objects with a state."""
    if not isinstance(state, Mapping):
        request = f"a checkpoint whose state is of type {type(state).__name__}"
        raise ArgumentTypeError(
            request, expected="a path, then a dict", suggestion="(path, {'model': model})"
        )
    if METADATA_KEY in state:
        raise ConfigurationError(
            "a checkpoint", f"state[{METADATA_KEY!r}] is fabric's own entry", "any other name"
        )
    for name, value in state.items():
        if not is_stateful(value):
            _check_plain(name, value)


def is_stateful(value: Any) -> bool:
    """Whether a value is restored in place; any other is replaced.

    Raises:
        ArgumentTypeError: it is a ``DataLoader`` that is not set up.
    """
    if (
        not isinstance(value, type)
        and hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
    ):
        return True
    if isinstance(value, DataLoader):
        problem = "it does not know its position, so a resumed run would replay or skip samples"
        suggestion = "loader = fabric.setup_dataloaders(loader), and put the result into the state"
        raise ArgumentTypeError(
            "a DataLoader in a checkpoint", problem, "one with state_dict()", suggestion
        )
    return False


def pop_metadata(loaded: dict[str, Any]) -> dict[str, Any]:
    """Remove and return fabric's own metadata, if any; a CheckpointError if a newer release wrote it."""
    metadata = loaded.pop(METADATA_KEY, {})
    check_version(
        "load a checkpoint",
        metadata.get("format_version", 0) if isinstance(metadata, Mapping) else None,
    )
    return dict(metadata)


def check_version(request: str, version: object) -> None:
    """Raise a CheckpointError for a format that this release does not know."""
    if not isinstance(version, int) or version > FORMAT_VERSION:
        problem = f"its format version is {version!r}: a newer release wrote it"
        raise CheckpointError(request, problem, suggestion="pip install --upgrade torch-fabric")


def listed(names: Iterable[object]) -> str:
    """The first names, and how many more there are."""
    found = list(map(str, names))
    rest = [f"and {len(found) - _LISTED} more"] if len(found) > _LISTED else []
    return ", ".join(found[:_LISTED] + rest) or "nothing"


def _plain_name(name: str) -> str:
    """The name of a parameter or module without the wrapper modules of ``torch.compile`` in it."""
    return ".".join(part for part in str(name).split(".") if part != COMPILED_MODULE)


def uncompiled_state(state: Any, like: Iterable[str] = ()) -> Any:
    """A module's state under plain names, or under the names in ``like`` with the same plain name."""
    own = {_plain_name(name): name for name in like}
    renamed = copy.copy(state)  # with the versions of layers that torch attaches to it
    renamed.clear()
    for name, value in state.items():
        renamed[own.get(_plain_name(name), _plain_name(name))] = value
    return renamed


def _refuse_loop(place: _Place, value: Any) -> None:
    if type(value) in _COLLECTIONS.values():
        raise _refused(place, value)


def _check_plain(name: str, value: Any) -> None:
    """Raise an ArgumentTypeError unless an entry of a state is plain: see ``[Note: plain state]``.

    Instances of classes in ``torch.serialization.add_safe_globals`` are accepted.
    """
    # Classes that the program has allowed, maybe under another name.
    own = [entry[0] if isinstance(entry, tuple) else entry for entry in get_safe_globals()]
    allowed = {Tensor, nn.Parameter, *own}

    def take(place: _Place, item: Any) -> None:
        is_tensor = isinstance(item, Tensor)
        # torch itself allows DTensors, but a file cannot hold their process group.
        if type(item) not in allowed or (
            is_tensor and (item.is_meta or hasattr(item, "full_tensor"))
        ):
            raise _refused(place, item)
        if is_tensor:
            encode(vars(item), take, (*place, "__dict__"))

    encode(value, take, (name,))


def flatten_state(state: State) -> tuple[Any, dict[str, str], dict[str, Tensor]]:
    """Split a state into JSON and tensors. No tensor is copied, except sparse ones, which are stored in the JSON.

    Returns:
        The entries as JSON pairs, with the names under which their tensors are stored; for the name of each tensor, the
        name of the first one with the same memory; and the tensors by name.

    Raises:
        ArgumentTypeError: something in it has no place in a sharded checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    kept: dict[str, str] = {}
    owners: dict[Any, str] = {}

    def take(place: _Place, item: Any) -> Any:
        is_plain = type(item) in (Tensor, nn.Parameter) or hasattr(item, "full_tensor")
        if not is_plain or ... in place or not _is_dense(item):
            return _inline(place, item)
        name = ".".join(map(str, place))
        # {"a.b": x} and {"a": {"b": y}} would get the same name, and safetensors reserves one.
        while name in tensors or name == "__metadata__":
            name = f"{name}#{len(tensors)}"
        tensors[name], kept[name] = item, owners.setdefault(_memory_key(item) or name, name)
        return {"$tensor": kept[name]}

    return (
        [[encode(name), encode(value, take, (name,))] for name, value in state.items()],
        kept,
        tensors,
    )


def encode(
    value: Any, take: _Take | None = None, place: _Place = (), above: tuple[int, ...] = ()
) -> Any:
    """A value as JSON; see ``[Note: JSON with type tags]``.

    Args:
        value: any.
        take: ``take(place, item)`` returns what to write for tensors, values that are not plain, and collections that
            contain themselves. None stores the values of tensors in the JSON, and refuses the others.
        place: where the value is; an ellipsis in it means that a load could not fill in a tensor there.
        above: ids of the enclosing collections.
    """
    kind = type(value)
    tag = f"${kind.__name__}"
    # JSON has no non-finite numbers, and would decode a pair of surrogates as one character.
    is_json = kind in (bool, int, type(None)) or (kind is str and value.isascii())
    if is_json or (kind is float and math.isfinite(value)):
        return value
    if kind in _ATOMS:
        return {tag: _ATOMS[kind][0](value)}
    if _COLLECTIONS.get(tag) is not kind or id(value) in above:
        return (take or _inline)(place, value)
    above = (*above, id(value))
    if not isinstance(value, dict):
        place = (*place, ...) if kind is set else place
        items = [encode(item, take, (*place, index), above) for index, item in enumerate(value)]
        return items if kind is list else {tag: items}
    pairs = [
        [encode(key, take, (*place, ..., key)), encode(item, take, (*place, key), above)]
        for key, item in value.items()
    ]
    written: dict[str, Any] = {tag: pairs}
    if attributes := getattr(value, "__dict__", None):
        written["attributes"] = encode(attributes, take, (*place, ..., "__dict__"), above)
    return written


def unflatten_state(
    value: Any, tensors: Callable[[str, Any], Tensor] | None = None, present: Any = None
) -> Any:
    """The inverse of :func:`flatten_state` or :func:`encode`. Runs no code from the input.

    Args:
        value: JSON.
        tensors: ``tensors(name, present)`` returns each tensor, given the value of ``present`` in its place.
        present: a value of the same structure, or None. Tensors that are missing in its dicts are left out.
    """
    if isinstance(value, list):
        return [unflatten_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()))
    if tag == "$tensor" and tensors is not None:
        return tensors(content, present)
    if tag in _READERS:
        return _READERS[tag](content)
    if tag in ("$tuple", "$set"):
        return _COLLECTIONS[tag](unflatten_state(content, tensors))
    mapping: Any = _COLLECTIONS[tag]()
    for name, item in content:
        key = unflatten_state(name)
        if not isinstance(present, Mapping):
            mapping[key] = unflatten_state(item, tensors)
        elif key in present or not (isinstance(item, dict) and "$tensor" in item):
            mapping[key] = unflatten_state(item, tensors, present.get(key))
    if "attributes" in value:
        vars(mapping).update(unflatten_state(value["attributes"]))
    return mapping


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, kept alive by the result; a copy unless it is contiguous and on the CPU."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.nbytes == 0:
        return memoryview(b"")  # zlib.crc32 restarts at a null pointer
    # torch exposes a buffer only through numpy, which is optional.
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def local_chunks(tensor: Any) -> list[tuple[list[int], Tensor]]:
    """The chunks of a tensor that this rank holds, each with its offsets in the full tensor.

    DTensors, and sharded tensors of other libraries, have the methods that torch.distributed.checkpoint uses for this.
    Any other tensor is one chunk.
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        return [([0] * tensor.dim(), tensor.detach())]
    from torch.distributed.checkpoint.metadata import (
        MetadataIndex,
    )  # takes a second to import; already imported here

    places = [chunk.offsets for chunk in tensor.__create_chunk_list__()]
    return [([*at], tensor.__get_tensor_shard__(MetadataIndex("", at)).detach()) for at in places]


def _inline(place: _Place, value: Any) -> dict[str, Any]:
    """A tensor as JSON, with its values."""
    if type(value) in (Tensor, nn.Parameter):
        if value.layout in _SPARSE and (
            value.layout is not torch.sparse_coo or value.is_coalesced()
        ):
            parts = [getattr(value.detach(), part)() for part in _SPARSE[value.layout]]
            return {"$sparse": encode([value.layout, value.shape, parts])}
        if _is_dense(value):
            return {"$values": encode([value.dtype, value.shape, bytes(tensor_bytes(value))])}
    raise _refused(place, value)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _read_values(content: Any) -> Tensor:
    dtype, shape, values = unflatten_state(content)
    return (
        torch.frombuffer(bytearray(values), dtype=dtype).view(shape)
        if values
        else torch.empty(shape, dtype=dtype)
    )


def _read_sparse(content: Any) -> Tensor:
    layout, shape, parts = unflatten_state(content)
    with torch.sparse.check_sparse_tensor_invariants():
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*parts, size=shape, is_coalesced=True)
        return torch.sparse_compressed_tensor(*parts, size=shape, layout=layout)


_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout)
}
# By type: how the value is written under its tag, and how it is read back.
_ATOMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (
        lambda value: struct.pack("<d", value).hex(),
        lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    ),
    complex: (
        lambda value: encode([value.real, value.imag]),
        lambda parts: complex(*unflatten_state(parts)),
    ),
    str: (
        lambda value: value.encode("utf-8", "surrogatepass").hex(),
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    torch.dtype: (str, _CONSTANTS.__getitem__),
    torch.layout: (str, _CONSTANTS.__getitem__),
    torch.device: (str, torch.device),
    torch.Size: (list, torch.Size),
}
_READERS = {f"${kind.__name__}": read for kind, (_, read) in _ATOMS.items()}
_READERS |= {"$values": _read_values, "$sparse": _read_sparse}


def _memory_key(tensor: Any) -> Any:
    """A key that is equal for tensors that are the same view of memory; None for one that is empty on this rank."""
    local = tensor.to_local() if hasattr(tensor, "full_tensor") else tensor
    if type(local) not in (Tensor, nn.Parameter) or local.numel() == 0:
        return None
    bits = local.is_conj(), local.is_neg()  # views of the same memory with other values
    return (
        local.data_ptr(),
        local.device,
        local.dtype,
        local.shape,
        local.stride(),
        tensor.shape,
        bits,
    )


def _refused(place: _Place, value: Any) -> Exception:
    kind = type(value)
    written = "state" + "".join(f"[{key!r}]" for key in place if key is not ...)
    problem = (
        "it holds itself"
        if kind in _COLLECTIONS.values()
        else "only running code could load it again"
    )
    return ArgumentTypeError(
        f"save {written}, a {kind.__module__}.{kind.__qualname__}",
        problem,
        "tensors with values, numbers, strings, bytes, None, and dicts, lists, tuples and sets of these, by exact type",
        f"{written} as plain data: value.item(), torch.from_numpy(array), str(path), dict(value), enum.name, "
        "dataclasses.asdict(value), value.state_dict(), or its own entry for what has load_state_dict(). Classes "
        "that torch.serialization.add_safe_globals allows fit into one file: checkpoint_io=FullCheckpoint()",
    )
