"""Plain state as JSON and tensors. Knows nothing of files, processes or strategies."""

import argparse
import ctypes
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fabric._torch import is_dtensor
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
    "has_pickled_items",
    "is_dense",
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

# [Note: key path]
# A *key path* is the tuple of keys and indices that leads from a state to one of its values, such
# as `("model", "layer.weight")`. An ellipsis in the tuple means that the value is in a set, is in a
# key of a dict, or is an attribute of a dict. A load could not fill in a separately stored tensor
# at such a path, so the values of the tensor are stored in the JSON.
KeyPath = tuple[Any, ...]
"""The keys and indices that lead to a value."""

_Convert = Callable[[KeyPath, PlainValue], Json]

PLAIN_COLLECTIONS = (list, tuple, set, dict, OrderedDict, Counter)
# The collections by tag, see [Note: JSON with type tags].
_COLLECTIONS = {f"${kind.__name__}": kind for kind in PLAIN_COLLECTIONS}
# By layout, the names of the methods that return the dense components of a sparse tensor.
_SPARSE_COMPONENTS = {
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
        entries: a pair of name and value for each entry, as JSON. A tensor is replaced by the name
            under which it is stored.
        stored_names: by name of each tensor, the name under which its values are stored. Tensors
            with the same memory have the stored name of the first of them.
        tensors: all tensors by name, including tensors with the same memory.
    """

    entries: list[list[Any]]
    stored_names: dict[str, str]
    tensors: dict[str, Tensor]


def flatten_state(state: Mapping[str, Any]) -> FlatState:
    """Split a state into JSON and tensors.

    A sharded checkpoint has the JSON in its index, and the tensors in data files. :func:`from_json`
    reads the JSON, and gets each tensor by its stored name. No tensor is copied, except sparse
    ones, whose values are in the JSON.

    Raises:
        ArgumentTypeError: a value cannot be stored in a sharded checkpoint.
    """
    flat = FlatState(entries=[], stored_names={}, tensors={})
    # By the key of a tensor's memory, the name of the first tensor with this memory.
    first_names: dict[Any, str] = {}

    def convert(path: KeyPath, item: PlainValue) -> Json:
        """Return the JSON of a tensor: the name under which it is stored, or its values.

        to_json() calls it for tensors and for values that are not plain, which it refuses.
        """
        is_tensor = type(item) in (Tensor, nn.Parameter) or is_dtensor(item)
        if not is_tensor:
            raise unsupported(path, item)
        # An ellipsis in a path stands for a place that a load cannot look up, such as in a set.
        can_be_filled_in = ... not in path
        if not can_be_filled_in or not is_dense(item):
            return _tensor_to_json(path, item)
        name = ".".join(map(str, path))
        # {"a.b": x} and {"a": {"b": y}} give the same name. safetensors uses "__metadata__" itself.
        while name in flat.tensors or name == "__metadata__":
            name = f"{name}#{len(flat.tensors)}"
        # A tensor without a memory key, such as an empty one, shares no memory. Its own name serves
        # as the key.
        key = memory_key(item) or name
        stored_name = first_names.setdefault(key, name)
        flat.tensors[name] = item
        flat.stored_names[name] = stored_name
        return {"$tensor": stored_name}

    for name, value in state.items():
        flat.entries.append([to_json(name), to_json(value, convert, (name,))])
    return flat


def _tensor_to_json(path: KeyPath, value: PlainValue) -> dict[str, Json]:
    """Return a tensor as JSON that contains its values.

    ``path`` is where the value is, for the error.

    Raises:
        ArgumentTypeError: the value is not a tensor, is of a subclass such as a DTensor, or has no
            values or a layout that is not supported.
    """
    # A subclass may have state beside its values.
    if type(value) not in (Tensor, nn.Parameter):
        raise unsupported(path, value)
    if is_dense(value):
        return {"$values": to_json([value.dtype, value.shape, bytes(tensor_bytes(value))])}
    # torch's indices() and values() refuse an uncoalesced tensor.
    is_uncoalesced = value.layout is torch.sparse_coo and not value.is_coalesced()
    if value.layout not in _SPARSE_COMPONENTS or is_uncoalesced:
        raise unsupported(path, value)
    detached = value.detach()
    components = [getattr(detached, method)() for method in _SPARSE_COMPONENTS[value.layout]]
    return {"$sparse": to_json([value.layout, value.shape, components])}


# [Note: JSON with type tags]
# A value whose type JSON lacks is an object with one key, the *tag*, which is `$` and the name of
# the type: `{"$tuple": [1, 2]}`, `{"$bytes": "..."}` in hexadecimal, `{"$tensor": "model.weight"}`
# for a tensor that is stored elsewhere under that name. Every plain value is restored with its
# exact type and bits. A dict, whose keys may be of any type, is a tagged list of pairs.
# See [Note: key path].
def to_json(
    value: PlainValue,
    convert: _Convert = _tensor_to_json,
    path: KeyPath = (),
    enclosing: tuple[int, ...] = (),
) -> Json:
    """Return a value as JSON.

    A value whose type JSON lacks becomes a dict with one key, the tag, such as ``{"$tuple":
    [...]}``.

    Args:
        value: any value.
        convert: ``convert(path, item)`` returns the JSON of an item that is a tensor, is not plain,
            or is a collection that contains itself. By default the JSON of a tensor has its values,
            and other items are refused.
        path: where the value is.
        enclosing: the ids of the collections that contain the value, to find one that contains
            itself.
    """
    if _is_exact_in_json(value):
        return value
    kind = type(value)
    tag = f"${kind.__name__}"
    # A scalar that needs a tag, such as a complex number or a dtype.
    if kind in _SCALARS:
        return {tag: _SCALARS[kind].write(value)}
    # ``is``: a class of the user may have the name of a collection, and so the same tag.
    is_plain_collection = _COLLECTIONS.get(tag) is kind
    contains_itself = id(value) in enclosing
    if not is_plain_collection or contains_itself:
        return convert(path, value)
    enclosing = (*enclosing, id(value))
    if isinstance(value, dict):
        return _dict_to_json(value, tag=tag, convert=convert, path=path, enclosing=enclosing)
    if kind is set:
        # An item of a set has no key or index by which a load could find it. The ellipsis in the
        # path says so.
        path = (*path, ...)
    items = []
    for index, item in enumerate(value):
        items.append(to_json(item, convert, (*path, index), enclosing))
    if kind is list:
        return items  # the one collection that JSON has itself
    return {tag: items}


def _is_exact_in_json(value: PlainValue) -> bool:
    """Return whether JSON itself restores the exact type and bits of a value, without a tag."""
    kind = type(value)
    if kind is str:
        # Text that is not ASCII may contain surrogates. json.loads() would decode a pair of
        # surrogates as one character.
        return value.isascii()
    if kind is float:
        # JSON has no infinity and no NaN.
        return math.isfinite(value)
    return kind in (bool, int, type(None))


def _dict_to_json(
    value: dict[Any, PlainValue],
    *,
    tag: str,
    convert: _Convert,
    path: KeyPath,
    enclosing: tuple[int, ...],
) -> dict[str, Json]:
    """Return a dict as JSON: its pairs under ``tag``, and its attributes under ``"attributes"``.

    torch sets an attribute with the versions of layers on the state dict of a module.

    Args:
        value: the dict, of one of the classes in ``PLAIN_COLLECTIONS``.
        tag: ``"$"`` and the name of the class.
        convert: returns the JSON of an item that is a tensor or not plain, see :func:`to_json`.
        path: where the dict is.
        enclosing: the ids of the collections that contain the items, including the dict itself.
    """
    pairs = []
    for key, item in value.items():
        # The ellipsis says that the value is a part of a key, see [Note: key path].
        json_key = to_json(key, convert, (*path, ..., key), enclosing)
        pairs.append([json_key, to_json(item, convert, (*path, key), enclosing)])
    tagged: dict[str, Json] = {tag: pairs}
    # An exact dict has no attributes. An OrderedDict or a Counter may have some.
    attributes = getattr(value, "__dict__", None)
    if attributes:
        tagged["attributes"] = to_json(attributes, convert, (*path, ..., "__dict__"), enclosing)
    return tagged


def from_json(
    value: Json,
    read_tensor: Callable[[str, Any], Tensor] | None = None,
    existing: PlainValue = None,
) -> PlainValue:
    """Return the value that :func:`to_json` or :func:`flatten_state` wrote. Runs no code from it.

    Args:
        value: JSON.
        read_tensor: ``read_tensor(name, destination)`` returns the tensor stored under ``name``.
            ``destination`` is the value in ``existing`` that has the same path, or None. If
            ``read_tensor`` is None, the JSON has to contain the values of all tensors.
        existing: a value of the same structure, whose dicts have tensors to read into, or None.
            Stored tensors that these dicts lack are left out of the result.
    """
    if isinstance(value, list):
        # Only values in dicts are matched with ``existing``: a list gets new tensors.
        return [from_json(item, read_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    # The tag is the first key. The JSON of a dict with attributes has a second key for them.
    tag, content = next(iter(value.items()))
    if tag == "$tensor" and read_tensor is not None:
        return read_tensor(content, existing)
    # A scalar, or a tensor whose values are in the JSON.
    if tag in _READERS:
        return _READERS[tag](content)
    if tag in ("$tuple", "$set"):
        # New tensors, as for a list.
        return _COLLECTIONS[tag](from_json(content, read_tensor))
    # A dict, an OrderedDict or a Counter.
    return _dict_from_json(value, tag, read_tensor, existing)


def _dict_from_json(
    value: dict[str, Json],
    tag: str,
    read_tensor: Callable[[str, Any], Tensor] | None,
    existing: PlainValue,
) -> PlainValue:
    """Return the dict, OrderedDict or Counter that :func:`_dict_to_json` wrote under ``tag``.

    Args:
        value: the JSON of the dict.
        tag: the first key of the JSON, such as ``"$dict"``.
        read_tensor: see :func:`from_json`.
        existing: a dict of the same structure, whose items are passed on with the items of the same
            keys. Stored tensors whose keys it lacks are left out. Any other value, such as None,
            leaves nothing out.
    """
    mapping: Any = _COLLECTIONS[tag]()
    for json_key, item in value[tag]:
        key = from_json(json_key)
        if not isinstance(existing, Mapping):
            mapping[key] = from_json(item, read_tensor)
            continue
        is_stored_tensor = isinstance(item, dict) and "$tensor" in item
        if is_stored_tensor and key not in existing:
            continue
        mapping[key] = from_json(item, read_tensor, existing.get(key))
    if "attributes" in value:
        vars(mapping).update(from_json(value["attributes"]))
    return mapping


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a tensor. The view keeps the tensor alive.

    A tensor that is not contiguous or not on the CPU is copied.
    """
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.nbytes == 0:
        # A view of the null address must not be returned: zlib.crc32(view, checksum) would ignore
        # the checksum.
        return memoryview(b"")
    # torch itself gives access to the bytes only through numpy, which is optional.
    array: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    # The array does not own the memory: this attribute keeps the tensor alive.
    array.owner = tensor
    # The format of a ctypes array is "<B". "B" is the usual format of bytes.
    return memoryview(array).cast("B")


def local_chunks(tensor: Any) -> list[Chunk]:
    """Return the chunks of a tensor that this rank holds, which share memory with the tensor.

    DTensors, and sharded tensors of other libraries, have the methods by which
    torch.distributed.checkpoint gets chunks. A tensor without these methods is one chunk.
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        return [Chunk([0] * tensor.dim(), tensor.detach())]
    # Imported here: the import takes a second, which a program without sharded tensors need not
    # spend.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunks = []
    for metadata in tensor.__create_chunk_list__():
        # Only the offsets are needed to find a shard. The name of the tensor may be empty.
        shard = tensor.__get_tensor_shard__(MetadataIndex("", metadata.offsets))
        chunks.append(Chunk([*metadata.offsets], shard.detach()))
    return chunks


def is_dense(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are plain bytes in memory."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def memory_key(tensor: Any) -> Any:
    """Return a key that is equal for tensors that are the same view of memory.

    Tied weights have equal keys, so that they can be stored once.

    Returns:
        The key, or None for a tensor that is empty on this rank or of a class of another library.
    """
    local = tensor
    if is_dtensor(tensor):
        local = tensor.to_local()
    if type(local) not in (Tensor, nn.Parameter) or local.numel() == 0:
        return None
    return (
        local.data_ptr(),
        local.device,
        local.dtype,
        local.shape,
        local.stride(),
        # Two DTensors with equal shards may have different full shapes.
        tensor.shape,
        # A conjugate or negative view has the same memory as its base, and other values.
        (local.is_conj(), local.is_neg()),
    )


def has_pickled_items(value: PlainValue) -> bool:
    """Return whether a value is a collection whose items torch cannot load without running code.

    ``torch.load(weights_only=True)`` adds items only to a plain list or dict, also where
    ``torch.serialization.add_safe_globals`` allows the class. A class whose ``__reduce__`` passes
    the items to a constructor, as that of ``Counter`` does, can be loaded.
    """
    if type(value) in PLAIN_COLLECTIONS or not isinstance(value, list | dict | deque):
        return False
    # torch.save() uses protocol 2. Entries 3 and 4 are iterators of the items of a list and a dict.
    reduction = value.__reduce_ex__(2)
    items = [entry for entry in reduction[3:5] if entry is not None]
    return bool(items)


# See [Note: key path].
def unsupported(path: KeyPath, value: PlainValue) -> ArgumentTypeError:
    """Return the error for a value that is not plain, or for a collection that contains itself.

    ``path`` says where in the state the value is.
    """
    kind = type(value)
    expression = "state"
    for key in path:
        # An ellipsis stands for a step without a key, such as into a set.
        if key is not ...:
            expression += f"[{key!r}]"
    # The text for most values. Some kinds of values have another text below.
    problem = "this object needs pickle, which fabric does not load"
    suggestion = (
        f"{expression} as plain data: value.item(), torch.from_numpy(array), str(path), "
        "list(value), dict(value), enum.name, dataclasses.asdict(value), value.state_dict(); or an "
        "object with load_state_dict() as an entry of the state itself."
    )
    if kind in PLAIN_COLLECTIONS:
        # This is the only reason to refuse a plain collection.
        problem = "this collection contains itself"
    if is_dtensor(value):
        problem = "this rank has a part of the tensor, as in the state_dict() of a sharded module"
        suggestion = (
            f"{{{path[0]!r}: model}} or {{{path[0]!r}: optimizer}}, the set-up object itself in "
            "place of its state_dict(); or the whole tensor: value.full_tensor(), on all ranks"
        )
    elif isinstance(value, argparse.Namespace):
        # For example "{'args': vars(args)}": the same entry, with a dict as its value.
        entry_name = path[-1] if path else "args"
        suggestion = f"{{{entry_name!r}: vars(args)}}, and argparse.Namespace(**...) after the load"
    elif has_pickled_items(value):
        problem = "torch loads items only into a plain list or dict, not into a subclass or a deque"
    else:
        suggestion += (
            " For classes that torch.serialization.add_safe_globals allows: "
            "strategy=DDPStrategy(checkpoint_io=FullCheckpoint())"
        )
    return ArgumentTypeError(
        f"save {expression}, a {kind.__module__}.{kind.__qualname__}",
        problem,
        expected="tensors (not on the meta device), numbers, strings, bytes, None, and dicts, "
        "lists, tuples and sets of these, by exact type",
        suggestion=suggestion,
    )


class _ScalarFormat(NamedTuple):
    """The functions that write a value of one type as JSON without its tag, and read it back."""

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
    """Return the dense tensor that :func:`_tensor_to_json` wrote.

    Args:
        content: a list of the dtype, the shape and the bytes of the tensor, as JSON.
    """
    dtype, shape, values = from_json(content)
    if not values:
        return torch.empty(shape, dtype=dtype)  # frombuffer() refuses an empty buffer
    # A bytearray, because a tensor needs memory that can be written to.
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def _read_sparse(content: Json) -> Tensor:
    """Return the sparse tensor that :func:`_tensor_to_json` wrote.

    torch checks the invariants of the tensor: with indices from a damaged file, torch could access
    other memory.

    Args:
        content: a list of the layout, the shape and the dense components of the tensor, as JSON.
    """
    layout, shape, components = from_json(content)
    with torch.sparse.check_sparse_tensor_invariants():
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(*components, size=shape, is_coalesced=True)
        return torch.sparse_compressed_tensor(*components, size=shape, layout=layout)


# The dtypes and layouts by their names, such as "torch.float32".
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
# The functions that read a value that is not a collection, by tag.
_READERS = {f"${kind.__name__}": scalar.read for kind, scalar in _SCALARS.items()}
_READERS["$values"] = _read_values
_READERS["$sparse"] = _read_sparse
