"""Tensors on disk in the layout of torch.distributed.checkpoint, written by all ranks and read without running code.

[Note: inert unpickling]
torch.distributed.checkpoint (DCP) keeps where each tensor is in ``.metadata``, a pickle, and reads it without
restriction. Here every class in it, from a list of names, becomes a record that only holds what it was given; the real
objects are made from the records afterwards, field by field. What is no tensor is never asked for: DCP would unpickle
that freely too, and fabric keeps it elsewhere. The tensors are archives of ``torch.save``, which torch reads with
``weights_only=True``; their checksums are compared before any of them is copied.

What is imported inside functions here takes a second to import, and only those who save or load in this format pay.
"""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor
from typing_extensions import override

from fabric._compat import local_tensor
from fabric.checkpoint.directory import sync_folder
from fabric.checkpoint.unison import reported, together
from fabric.communicators import Communicator
from fabric.errors import CheckpointError, UnsafeCheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

__all__ = ["LAYOUT", "file_checksum", "plan_reading", "read_layout", "write_tensors"]

LAYOUT = ".metadata"

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    {
        (_METADATA_MODULE, "Metadata"),
        (_METADATA_MODULE, "MetadataIndex"),
        (_METADATA_MODULE, "TensorStorageMetadata"),
        (_METADATA_MODULE, "BytesStorageMetadata"),
        (_METADATA_MODULE, "ChunkStorageMetadata"),
        (_METADATA_MODULE, "TensorProperties"),
        (_METADATA_MODULE, "StorageMeta"),
        (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
# What reading records that were never written, or were changed since, can raise.
_DAMAGE = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, AssertionError, OSError,
           MemoryError, OverflowError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError)  # fmt: skip


def write_tensors(asked: str, tensors: Mapping[str, Tensor], folder: Path, communicator: Communicator) -> None:
    """Collective. Write tensors to a folder that exists and is empty, and return when they are on the disk.

    Each rank writes its shards of a sharded tensor. Of what several ranks hold, the lowest of them writes it.

    Args:
        asked: what is being done, for errors.
        tensors: whole or sharded tensors by name, the same names on every rank.
        folder: where, on a file system that all ranks share.
        communicator: the ranks.

    Raises:
        CheckpointError: one of the ranks could not write, or the shards do not make up whole tensors.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    writer = FileSystemWriter(folder, overwrite=False)
    is_first = communicator.rank == 0

    def plan() -> Any:
        if not folder.is_dir():
            raise CheckpointError(
                asked,
                f"rank {communicator.rank} does not see the folder {str(folder)!r} that rank 0 made",
                "a place on a file system that all nodes share",
                "another path",
            )
        planner.set_up_planner(dict(tensors), is_coordinator=is_first)
        writer.set_up_storage_writer(is_first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def divide(plans: list[Any]) -> tuple[list[Any], Any]:
        plans, layout = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans), layout

    def write(plan: Any) -> Any:
        written = writer.write_data(planner.finish_plan(plan), planner).wait()
        sync_folder(folder)
        return written

    plans = communicator.gather_objects(together(communicator, asked, reported(asked, plan)))
    divided = together(communicator, asked, reported(asked, lambda: divide(plans) if is_first else None))
    own = communicator.broadcast_object(divided and divided[0], 0)[communicator.rank]
    written = communicator.gather_objects(together(communicator, asked, reported(asked, lambda: write(own))))
    finish = reported(asked, lambda: writer.finish(divided[1], written) if divided else None)
    together(communicator, asked, finish)


def file_checksum(path: Path) -> int:
    """The CRC32 of a file."""
    return zlib.crc32(path.read_bytes())


def read_layout(asked: str, folder: Path, checksum: int) -> "Metadata":
    """Read which tensors a folder holds, and where; see ``[Note: inert unpickling]``.

    Args:
        asked: what is being done, for errors.
        folder: where :func:`write_tensors` wrote.
        checksum: CRC32 that the layout has to have.

    Raises:
        UnsafeCheckpointError: reading it would run code.
        CheckpointError: it is damaged.
    """
    try:
        content = (folder / LAYOUT).read_bytes()
        if zlib.crc32(content) != checksum:
            raise _damaged(asked, f"the checksum of {LAYOUT} does not match")
        return _metadata(_InertUnpickler(asked, content).load())
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise _damaged(asked, f"{LAYOUT} cannot be read ({type(error).__name__}: {error})") from error


def plan_reading(
    asked: str, targets: Mapping[str, Tensor], folder: Path, layout: "Metadata"
) -> Callable[[Callable[[int], None]], None]:
    """Compare the checksums of all that ``targets`` need, and return the function that copies it into them.

    That function takes another one, which it tells how many bytes have been copied after each tensor. Neither is a
    collective, whatever the targets are.

    Args:
        asked: what is being done, for errors.
        targets: whole or sharded tensors by name, of the shapes in ``layout``.
        folder: where :func:`write_tensors` wrote.
        layout: what :func:`read_layout` returned.

    Raises:
        CheckpointError: a part is damaged or missing; no target has been changed.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.checkpoint.planner import LoadPlan

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FileSystemReader(folder)
    try:
        planner.set_up_planner(dict(targets), layout, is_coordinator=True)
        reader.set_up_storage_reader(layout, True)
        items = planner.finish_plan(planner.create_local_plan()).items
        _check_coverage(asked, targets, items)
        _check_records(asked, folder, layout, [item.storage_index for item in items])
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise _damaged(asked, f"{type(error).__name__}: {error}") from error

    def read(progress: Callable[[int], None]) -> None:
        by_name: dict[str, list[Any]] = {}
        for item in items:
            by_name.setdefault(item.dest_index.fqn, []).append(item)
        try:
            for name, parts in by_name.items():
                reader.read_data(LoadPlan(parts), planner).wait()
                progress(local_tensor(targets[name]).nbytes)
        except _DAMAGE as error:
            raise _damaged(asked, f"{type(error).__name__}: {error}") from error

    return read


@dataclass(frozen=True, kw_only=True, slots=True)
class _Location:
    """Where the archive with a part of a tensor is; the attributes are those that DCP's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Record:
    """Stands for an object of a class that is not called: it keeps what it was given."""

    args: tuple[Any, ...]
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of the object that this stands for, None when it has no such field."""
        return self.state.get(name)


class _InertUnpickler(pickle.Unpickler):
    """Rebuilds records, sizes and dtypes, and refuses any other name."""

    def __init__(self, asked: str, content: bytes) -> None:
        pickle.Unpickler.__init__(self, io.BytesIO(content))
        self._asked = asked
        # Classes of this object's own: a pickle can set attributes on them, and they are gone afterwards.
        self._records = {place: type(place[1], (_Record,), {}) for place in _RECORDS}

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._records:
            return self._records[module_name, global_name]
        if (module_name, global_name) == ("torch", "Size"):
            return torch.Size
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise UnsafeCheckpointError(
            self._asked,
            f"its {LAYOUT} holds {module_name}.{global_name}: to rebuild that could run any code; nothing was loaded",
            f"names, sizes and places of tensors, as {_METADATA_MODULE} has them",
            "a checkpoint from a source that you trust, or another copy of this one",
        )


def _metadata(record: Any) -> "Metadata":
    """The real metadata, with what a reader of tensors needs: entries that are no tensors are left out."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {}
    for name, stored in record.get("state_dict_metadata").items():
        if type(stored).__name__ != "TensorStorageMetadata":
            continue
        dtype = stored.get("properties").state[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} is of no dtype")
        chunks = [
            ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes")))
            for chunk in stored.get("chunks")
        ]
        tensors[str(name)] = TensorStorageMetadata(TensorProperties(dtype), _size(stored.get("size")), chunks)
    places = {
        MetadataIndex(str(index.get("fqn")), _size(index.get("offset"))): _location(info)
        for index, info in record.get("storage_data").items()
        if index.get("fqn") in tensors
    }
    return Metadata(tensors, storage_data=places)


def _location(info: _Record) -> _Location:
    path = info.get("relative_path")
    if not isinstance(path, str) or os.path.basename(path) != path or path in ("", ".", ".."):
        raise ValueError(f"{path!r} is not a file in the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{path!r} is encoded by {info.get('transform_descriptors')!r}")
    return _Location(relative_path=path, offset=int(info.get("offset")), length=int(info.get("length")))


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or any(type(number) is not int or number < 0 for number in value):
        raise ValueError(f"{value!r} is no size")
    return torch.Size(value)


def _check_coverage(asked: str, targets: Mapping[str, Tensor], items: Iterable[Any]) -> None:
    """Refuse a layout whose parts do not make up the whole, which DCP would leave with whatever was in memory."""
    found: Counter[str] = Counter()
    for item in items:
        found[item.dest_index.fqn] += prod(item.lengths)
    partial = [name for name, target in targets.items() if found[name] != local_tensor(target).numel()]
    if partial:
        raise _damaged(asked, f"parts are missing of {', '.join(partial[:5])} ({len(partial)} in all)")


def _check_records(asked: str, folder: Path, layout: "Metadata", indices: Iterable["MetadataIndex"]) -> None:
    """Read every record once without using it: what can be found wrong with it is found before anything is changed."""
    by_file: dict[str, dict[int, MetadataIndex]] = {}
    for index in indices:
        location = layout.storage_data[index]
        by_file.setdefault(location.relative_path, {})[location.offset] = index
    for name, records in by_file.items():
        with open(folder / name, "rb") as file:
            for offset, index in sorted(records.items()):
                length = layout.storage_data[index].length
                raw: Any = _Part(file, offset, length)
                is_cut_off = os.fstat(file.fileno()).st_size < offset + length
                wrong = "it is cut off" if is_cut_off else _record_problem(io.BufferedReader(raw), layout, index)
                if wrong:
                    raise _damaged(asked, f"{wrong} ({index.fqn}, in {name} at byte {offset})")


def _record_problem(part: io.BufferedReader, layout: "Metadata", index: "MetadataIndex") -> str:
    stored: Any = layout.state_dict_metadata[index.fqn]
    sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
    with zipfile.ZipFile(part) as archive:
        # torch never compresses, and a small record could swell to any size.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            return "it is compressed"
        # Damage to the list of an archive's entries could hide the values from the comparison, but not from torch.
        listed = sum(entry.file_size for entry in archive.infolist() if entry.filename.endswith("/data/0"))
        if archive.testzip() is not None or listed < prod(sizes) * stored.properties.dtype.itemsize:
            return "a checksum does not match"
    part.seek(0)
    # The frame of an archive has no checksums, and torch is stricter about it than Python.
    tensor = torch.load(part, map_location="cpu", weights_only=True)
    if isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) == (sizes, stored.properties.dtype):
        return ""
    return "it is not the tensor that it should be"


class _Part(io.RawIOBase):
    """A range of bytes of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("before the beginning")
        self._position = origin + offset
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _damaged(asked: str, wrong: str) -> CheckpointError:
    return CheckpointError(
        asked,
        f"the checkpoint is damaged, or was replaced while it was read: {wrong}",
        "a folder as fabric wrote it, complete",
        "the same again, if a save may have been under way; or an older checkpoint, or a fresh copy of this one",
    )
