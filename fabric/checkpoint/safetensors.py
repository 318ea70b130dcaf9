"""Files of the safetensors format with torch's sharding metadata."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fabric.checkpoint.encoding import Chunk, tensor_bytes

__all__ = ["DataFile", "StoredChunk", "encode_header", "map_safetensors", "write_safetensors"]

_ALIGNMENT = 64  # bytes; enough for every dtype and for the CPU's widest loads
# The names of dtypes in safetensors.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Dtypes that other programs write, by their names. Fabric's own files store them as bytes.
_DTYPES_OF_OTHER_PROGRAMS = {
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_LENGTH_BYTES = 8  # of the number that a file begins with: the length of its header


class StoredChunk(NamedTuple):
    """A chunk of a tensor in a file.

    Attributes:
        offsets: where the chunk begins in the full tensor.
        sizes: the shape of the chunk.
        start: where the chunk begins in the file, in bytes.
    """

    offsets: list[int]
    sizes: list[int]
    start: int


class DataFile(NamedTuple):
    """A written file.

    Attributes:
        checksum: the CRC32 of all bytes of the file.
        chunks: the file's chunk of each tensor, by the tensor's name.
    """

    checksum: int
    chunks: dict[str, StoredChunk]


def write_safetensors(file: BinaryIO, chunks: Mapping[str, Chunk]) -> DataFile:
    """Write a safetensors file with chunks of tensors.

    The header says where each chunk is in its full tensor, in the metadata that the
    ``HuggingFaceStorageReader`` of torch.distributed.checkpoint reads.

    Args:
        file: the file to write to, which is empty.
        chunks: the chunks by the names of their tensors.

    Returns:
        The checksum of the file, and where each chunk is.
    """
    # The widest dtypes come first. So each chunk begins at a multiple of its own item size, as a
    # view of a memory mapping needs it.
    names = sorted(chunks, key=lambda name: -chunks[name].tensor.itemsize)
    stored_chunks, header = _lay_out_file({name: chunks[name] for name in names})
    file.write(header)
    checksum = zlib.crc32(header)
    for name in names:
        # One tensor at a time: a tensor on another device is copied to the CPU.
        content = tensor_bytes(chunks[name].tensor)
        file.write(content)
        checksum = zlib.crc32(content, checksum)
    return DataFile(checksum, stored_chunks)


def encode_header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the first bytes of a file of full tensors: the length of the header, and the header.

    The values of the tensors have to follow in the order of ``tensors``. The file is for other
    programs. So a dtype that safetensors lacks is refused here, and not stored as bytes.

    Args:
        tensors: the tensors by name, which may be on the meta device.

    Raises:
        ValueError: safetensors has no such dtype, or keeps a name for itself.
    """
    chunks: dict[str, Chunk] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"safetensors has no name for {tensor.dtype}, the dtype of {name}")
        if name == "__metadata__":
            raise ValueError("safetensors keeps the name '__metadata__' for itself")
        chunks[name] = Chunk(offsets=[0] * tensor.dim(), tensor=tensor)
    _, header = _lay_out_file(chunks)
    return header


def _lay_out_file(chunks: Mapping[str, Chunk]) -> tuple[dict[str, StoredChunk], bytes]:
    """Lay out a safetensors file.

    Args:
        chunks: the chunks by the names of their tensors, in the order in which they are written.

    Returns:
        Where each chunk is, and the bytes that the file begins with: the length of the header, and
        the header itself.
    """
    header: dict[str, object] = {}
    sharding: dict[str, object] = {}
    # Where the data of each chunk begins, in bytes after the header. The length of the header is
    # known only at the end, since the header has these numbers, too.
    starts: dict[str, int] = {}
    end = 0
    for name, (offsets, tensor) in chunks.items():
        starts[name] = end
        end += tensor.nbytes
        dtype_name = _DTYPES.get(tensor.dtype)
        shape = [*tensor.shape]
        saved_offsets = [*offsets]
        if dtype_name is None:
            # safetensors has no such dtype: the chunk is stored as bytes, with one more dimension.
            dtype_name = "U8"
            shape.append(tensor.itemsize)
            saved_offsets.append(0)
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [starts[name], end]}
        sharding[name] = {"saved_offsets": saved_offsets}
    # The keys that HuggingFaceStorageReader of torch.distributed.checkpoint reads.
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    encoded_header = _header_bytes({"__metadata__": metadata, **header})
    stored_chunks = {}
    for name, (offsets, tensor) in chunks.items():
        start = len(encoded_header) + starts[name]
        stored_chunks[name] = StoredChunk(offsets, sizes=[*tensor.shape], start=start)
    return stored_chunks, encoded_header


def _header_bytes(header: Mapping[str, object]) -> bytes:
    """Return the length of a header, and the header as JSON with spaces after it.

    The spaces make the data begin at a multiple of ``_ALIGNMENT``.
    """
    text = json.dumps(header).encode()
    num_spaces = -(len(text) + _LENGTH_BYTES) % _ALIGNMENT
    text += b" " * num_spaces
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """Map a safetensors file of any program into memory, and return its tensors by name.

    The values are read from the file when they are used. The tensors must not be written to.

    Args:
        path: the file, on a local file system.

    Raises:
        ValueError: the file is damaged, or has a dtype that torch lacks. The caller converts the
            error.
    """
    size = path.stat().st_size
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    storage = content.untyped_storage()
    header_length = int.from_bytes(tensor_bytes(content[:_LENGTH_BYTES]), "little")
    data_start = _LENGTH_BYTES + header_length
    if data_start > size:
        raise ValueError(f"{path.name} ends within its header")
    header = json.loads(bytes(tensor_bytes(content[_LENGTH_BYTES:data_start])))
    header.pop("__metadata__", None)  # the only item that is not a tensor
    dtypes = {name: dtype for dtype, name in _DTYPES.items()} | _DTYPES_OF_OTHER_PROGRAMS
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        dtype = dtypes.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"torch has no dtype for {name}, which is {entry['dtype']}")
        start, end = entry["data_offsets"]
        if data_start + end > size:
            raise ValueError(f"{path.name} ends within {name}")
        # A view of ``content`` would have to begin at a multiple of the tensor's item size, and
        # other programs may begin a tensor at any byte. A slice of a storage may begin at any byte.
        # The slice shares the memory of the storage.
        tensor_storage = storage[data_start + start : data_start + end]
        tensor: Any = torch.empty(0, dtype=dtype)
        tensors[name] = tensor.set_(tensor_storage, 0, entry["shape"])
    return tensors
