"""Plain state as JSON and tensors. Knows nothing of files, processes or strategies.

[Note: JSON with type tags]
A value whose type JSON lacks is an object with one key, the *tag*, which is ``$`` and the name of
the type: ``{"$tuple": [1, 2]}``, ``{"$bytes": "..."}`` in hexadecimal, ``{"$tensor":
"model.weight"}`` for a tensor that is stored elsewhere under that name. Every plain value is
restored with its exact type and bits. A dict, whose keys may be of any type, is a tagged list of
pairs.

[Note: key path]
A *key path* is the tuple of keys and indices that leads from a state to one of its values, such as
``("model", "layer.weight")``. An ellipsis in it means that the value is in a set, a key of a dict
or an attribute of a dict. A load cannot fill in a separately stored tensor at such a path.
"""

import ctypes
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fabric.errors import ArgumentTypeError

__all__ = [
    "PLAIN_COLLECTIONS",
    "Chunk",
    "FlatState",
    "Json",
    "KeyPath",
    "PlainValue",
    "flatten_state",
    "from_json",
    "local_chunks",
    "memory_key",
    "tensor_bytes",
    "to_json",
    "unsupported",
]

Json = Any
"""A value that JSON holds: None, a bool, a number, a string, or a list or dict of these."""

PlainValue = Any
"""A value of plain state, or one that is refused because it is not plain."""

KeyPath = tuple[Any, ...]
_Convert = Callable[[KeyPath, PlainValue], Json]

PLAIN_COLLECTIONS = (list, tuple, set, dict, OrderedDict, Counter)
_COLLECTIONS = {f"${kind.__name__}": kind for kind in PLAIN_COLLECTIONS}
# The methods that return the tensors of which a sparse tensor consists, by layout.
_SPARSE = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Chunk(NamedTuple):
    """A chunk of a tensor, and where it begins in the full tensor."""

    offsets: list[int]
    tensor: Tensor


class FlatState(NamedTuple):
    """A state, split into JSON and tensors.

    Attributes:
        entries: the entries as JSON pairs of name and value, with the names of stored tensors.
        stored_names: for the name of each tensor, the name of the first tensor with the same
            memory. The tensor is stored under that name.
        tensors: all tensors by name.
    """

    entries: list[list[Any]]
    stored_names: dict[str, str]
    tensors: dict[str, Tensor]


def flatten_state(state: Mapping[str, Any]) -> FlatState:
    """Split a state into JSON and tensors.

    No tensor is copied, except sparse ones, which are stored in the JSON.

    Raises:
        ArgumentTypeError: a value cannot be stored in a sharded checkpoint.
    """
    flat = FlatState([], {}, {})
    first_names: dict[Any, str] = {}

    def convert(path: KeyPath, item: PlainValue) -> Json:
        is_tensor = type(item) in (Tensor, nn.Parameter) or hasattr(item, "full_tensor")
        if not is_tensor or ... in path or not _is_dense(item):
            return _tensor_to_json(path, item)
        name = ".".join(map(str, path))
        # {"a.b": x} and {"a": {"b": y}} would get the same name, and safetensors reserves one.
        while name in flat.tensors or name == "__metadata__":
            name = f"{name}#{len(flat.tensors)}"
        stored_name = first_names.setdefault(memory_key(item) or name, name)
        flat.tensors[name] = item
        flat.stored_names[name] = stored_name
        return {"$tensor": stored_name}

    for name, value in state.items():
        flat.entries.append([to_json(name), to_json(value, convert, (name,))])
    return flat


def _tensor_to_json(path: KeyPath, value: PlainValue) -> dict[str, Json]:
    """Return a tensor as JSON, with its values. Refuse anything else."""
    if type(value) not in (Tensor, nn.Parameter):
        raise unsupported(path, value)
    if _is_dense(value):
        return {"$values": to_json([value.dtype, value.shape, bytes(tensor_bytes(value))])}
    is_uncoalesced = value.layout is torch.sparse_coo and not value.is_coalesced()
    if value.layout not in _SPARSE or is_uncoalesced:
        raise unsupported(path, value)
    detached = value.detach()
    components = [getattr(detached, method)() for method in _SPARSE[value.layout]]
    return {"$sparse": to_json([value.layout, value.shape, components])}


def to_json(
    value: PlainValue,
    convert: _Convert = _tensor_to_json,
    path: KeyPath = (),
    enclosing: tuple[int, ...] = (),
) -> Json:
    """Return a value as JSON. See ``[Note: JSON with type tags]``.

    Args:
        value: any value.
        convert: ``convert(path, item)`` returns the JSON of tensors, of values that are not plain,
            and of collections that contain themselves. By default the JSON has the values of
            tensors, and the others are refused.
        path: where the value is. See ``[Note: key path]``.
        enclosing: the ids of the enclosing collections.
    """
    kind = type(value)
    tag = f"${kind.__name__}"
    if _is_json(value):
        return value
    if kind in _SCALARS:
        return {tag: _SCALARS[kind].write(value)}
    if _COLLECTIONS.get(tag) is not kind or id(value) in enclosing:
        return convert(path, value)
    enclosing = (*enclosing, id(value))
    if isinstance(value, dict):
        return _dict_to_json(value, tag, convert, path, enclosing)
    if kind is set:
        path = (*path, ...)
    items = []
    for index, item in enumerate(value):
        items.append(to_json(item, convert, (*path, index), enclosing))
    if kind is list:
        return items
    return {tag: items}


def _is_json(value: PlainValue) -> bool:
    """Return whether JSON restores the exact type and bits of a value."""
    kind = type(value)
    if kind is str:
        return value.isascii()  # JSON would decode a pair of surrogates as one character
    if kind is float:
        return math.isfinite(value)  # JSON has no other numbers
    return kind in (bool, int, type(None))


def _dict_to_json(
    value: dict[Any, PlainValue],
    tag: str,
    convert: _Convert,
    path: KeyPath,
    enclosing: tuple[int, ...],
) -> dict[str, Json]:
    pairs = []
    for key, item in value.items():
        json_key = to_json(key, convert, (*path, ..., key), enclosing)
        pairs.append([json_key, to_json(item, convert, (*path, key), enclosing)])
    result: dict[str, Json] = {tag: pairs}
    attributes = getattr(value, "__dict__", None)
    if attributes:
        result["attributes"] = to_json(attributes, convert, (*path, ..., "__dict__"), enclosing)
    return result


def from_json(
    value: Json,
    read_tensor: Callable[[str, Any], Tensor] | None = None,
    present: PlainValue = None,
) -> PlainValue:
    """Return the value that :func:`to_json` or :func:`flatten_state` wrote. Runs no code from it.

    Args:
        value: JSON.
        read_tensor: ``read_tensor(name, present)`` returns the tensor stored under ``name``.
            ``present`` is the value at the same path of the argument ``present``.
        present: a value of the same structure, or None. Tensors that its dicts lack are left out.
    """
    if isinstance(value, list):
        return [from_json(item, read_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items()))
    if tag == "$tensor" and read_tensor is not None:
        return read_tensor(content, present)
    if tag in _READERS:
        return _READERS[tag](content)
    if tag in ("$tuple", "$set"):
        return _COLLECTIONS[tag](from_json(content, read_tensor))
    mapping: Any = _COLLECTIONS[tag]()
    for json_key, item in content:
        key = from_json(json_key)
        if not isinstance(present, Mapping):
            mapping[key] = from_json(item, read_tensor)
        elif key in present or not (isinstance(item, dict) and "$tensor" in item):
            mapping[key] = from_json(item, read_tensor, present.get(key))
    if "attributes" in value:
        vars(mapping).update(from_json(value["attributes"]))
    return mapping


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, which keep it alive.

    A tensor that is not contiguous or not on the CPU is copied.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.nbytes == 0:
        return memoryview(b"")  # zlib.crc32 restarts at a null pointer
    # torch exposes a buffer only through numpy, which is optional.
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def local_chunks(tensor: Any) -> list[Chunk]:
    """Return the chunks of a tensor that this rank holds.

    DTensors, and sharded tensors of other libraries, have the methods that
    torch.distributed.checkpoint uses for this. Any other tensor is one chunk.
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        return [Chunk([0] * tensor.dim(), tensor.detach())]
    # Takes a second to import, but whoever has a sharded tensor has imported it.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunks = []
    for metadata in tensor.__create_chunk_list__():
        shard = tensor.__get_tensor_shard__(MetadataIndex("", metadata.offsets))
        chunks.append(Chunk([*metadata.offsets], shard.detach()))
    return chunks


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def memory_key(tensor: Any) -> Any:
    """Return a key that is equal for tensors that are the same view of memory.

    Returns:
        The key, or None for a tensor that is empty on this rank.
    """
    local = tensor
    if hasattr(tensor, "full_tensor"):
        local = tensor.to_local()
    if type(local) not in (Tensor, nn.Parameter) or local.numel() == 0:
        return None
    return (
        local.data_ptr(),
        local.device,
        local.dtype,
        local.shape,
        local.stride(),
        tensor.shape,
        # Views of the same memory may have other values.
        (local.is_conj(), local.is_neg()),
    )


def unsupported(path: KeyPath, value: PlainValue) -> ArgumentTypeError:
    """Return the error for a value that is not plain."""
    kind = type(value)
    written = "state"
    for key in path:
        if key is not ...:
            written += f"[{key!r}]"
    problem = "this object needs pickle, which fabric does not load"
    if kind in PLAIN_COLLECTIONS:
        problem = "this collection contains itself"
    return ArgumentTypeError(
        f"save {written}, a {kind.__module__}.{kind.__qualname__}",
        problem,
        expected="tensors with values, numbers, strings, bytes, None, and dicts, lists, tuples and "
        "sets of these, by exact type",
        suggestion=f"{written} as plain data: value.item(), torch.from_numpy(array), str(path), "
        "dict(value), enum.name, dataclasses.asdict(value), value.state_dict(), or its own entry "
        "for what has load_state_dict(). Classes that torch.serialization.add_safe_globals allows "
        "fit into one file: checkpoint_io=FullCheckpoint()",
    )


class _ScalarFormat(NamedTuple):
    """How a value of one type is written under its tag, and read back."""

    write: Callable[[Any], Json]
    read: Callable[[Json], Any]


def _write_float(value: float) -> str:
    return struct.pack("<d", value).hex()


def _read_float(text: str) -> float:
    [value] = struct.unpack("<d", bytes.fromhex(text))
    return value


def _write_complex(value: complex) -> Json:
    return to_json([value.real, value.imag])


def _read_complex(content: Json) -> complex:
    real, imaginary = from_json(content)
    return complex(real, imaginary)


def _write_str(value: str) -> str:
    return value.encode("utf-8", "surrogatepass").hex()


def _read_str(text: str) -> str:
    return bytes.fromhex(text).decode("utf-8", "surrogatepass")


def _read_values(content: Json) -> Tensor:
    dtype, shape, values = from_json(content)
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def _read_sparse(content: Json) -> Tensor:
    layout, shape, components = from_json(content)
    with torch.sparse.check_sparse_tensor_invariants():
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*components, size=shape, is_coalesced=True)
        return torch.sparse_compressed_tensor(*components, size=shape, layout=layout)


_TORCH_CONSTANTS: dict[str, torch.dtype | torch.layout] = {}
for _constant in vars(torch).values():
    if isinstance(_constant, torch.dtype | torch.layout):
        _TORCH_CONSTANTS[str(_constant)] = _constant

_SCALARS: dict[type, _ScalarFormat] = {
    float: _ScalarFormat(_write_float, _read_float),
    complex: _ScalarFormat(_write_complex, _read_complex),
    str: _ScalarFormat(_write_str, _read_str),
    bytes: _ScalarFormat(bytes.hex, bytes.fromhex),
    bytearray: _ScalarFormat(bytearray.hex, bytearray.fromhex),
    torch.dtype: _ScalarFormat(str, _TORCH_CONSTANTS.__getitem__),
    torch.layout: _ScalarFormat(str, _TORCH_CONSTANTS.__getitem__),
    torch.device: _ScalarFormat(str, torch.device),
    torch.Size: _ScalarFormat(list, torch.Size),
}
_READERS = {f"${kind.__name__}": scalar.read for kind, scalar in _SCALARS.items()}
_READERS["$values"] = _read_values
_READERS["$sparse"] = _read_sparse
