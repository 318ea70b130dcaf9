"""Tensors on disk in the layout of torch.distributed.checkpoint, written by all ranks and read without running code.

[Note: inert unpickling]
torch.distributed.checkpoint (DCP) keeps where each tensor is in ``.metadata``, a pickle, and reads it without
restriction. Here every class in it, from a list of names, becomes a record that only holds what it was given; the real
objects are made from the records afterwards, field by field. What is no tensor is never asked for: DCP would unpickle
that freely too, and fabric keeps it elsewhere. The tensors are archives of ``torch.save``, which torch reads with
``weights_only=True``.

[Note: checksums] The checksums inside of an archive do not cover its frame, and damage there has been seen to load as
other values. So each file has a CRC32 over all of its bytes, summed while they are written, and a file that is needed
is compared with it as a whole before anything is copied out of it.

What is imported inside functions here takes a second to import, and only those who save or load in this format pay.
"""

import io
import os
import pickle
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from fabric._torch import local_tensor
from fabric.checkpoint.commit import sync_folder
from fabric.checkpoint.failures import DAMAGE, TRUSTED, damaged, listed
from fabric.checkpoint.unison import write_together
from fabric.communicators import Communicator
from fabric.errors import CheckpointError, UnsafeCheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "LAYOUT",
    "Reading",
    "check_files",
    "file_checksum",
    "plan_reading",
    "read_layout",
    "write_tensors",
]

LAYOUT = ".metadata"

_PIECE = 1 << 20

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORD_NAMES = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_RECORDS = {(_METADATA_MODULE, name) for name in _RECORD_NAMES} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def write_tensors(
    asked: str, tensors: Mapping[str, Tensor], folder: Path, communicator: Communicator
) -> dict[str, int]:
    """Collective. Write tensors to a folder that exists and is empty, and return when they are on the disk.

    Each rank writes its shards of a sharded tensor. Of what several ranks hold, the lowest of them writes it.

    Args:
        asked: what is being done, for errors.
        tensors: whole or sharded tensors by name, the same names on every rank.
        folder: where, on a file system that all ranks share.
        communicator: the ranks.

    Returns:
        On rank 0 the CRC32 of every file in the folder, by name; nothing on others.

    Raises:
        CheckpointError: one of the ranks could not write, or the shards do not make up whole tensors.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    writer = FileSystemWriter(folder, overwrite=False)
    checksums = _sum_what_is_written(writer)
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
        return written, checksums

    def finish(written: list[Any]) -> dict[str, int]:
        if divided is None:
            return {}
        writer.finish(divided[1], [results for results, _ in written])
        checksums[LAYOUT] = checksums.pop(f"{LAYOUT}.tmp")
        return {name: value for _, others in written for name, value in others.items()} | checksums

    agreed = partial(write_together, communicator, asked)
    plans = communicator.gather_objects(agreed(plan))
    divided = agreed(lambda: divide(plans) if is_first else None)
    own = communicator.broadcast_object(divided and divided[0], 0)[communicator.rank]
    written = communicator.gather_objects(agreed(lambda: write(own)))
    return agreed(lambda: finish(written))


def file_checksum(path: Path) -> int:
    """The CRC32 of a file."""
    # One buffer for all pieces: memory that is asked for anew costs more than the sum.
    checksum, piece = 0, memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            checksum = zlib.crc32(piece[:count], checksum)
    return checksum


def check_files(asked: str, folder: Path, names: Iterable[str], checksums: Mapping[str, int]) -> None:
    """Compare files in a folder with the checksums that they have to have.

    Raises:
        CheckpointError: one is missing, is not what was written, or has no checksum.
    """
    for name in names:
        try:
            if name not in checksums or file_checksum(folder / name) != checksums[name]:
                raise damaged(asked, f"the checksum of {name} does not match")
        except OSError as error:
            raise damaged(asked, f"{name} cannot be read ({error})") from error


def read_layout(asked: str, folder: Path, checksum: int | None) -> "Metadata":
    """Read which tensors a folder holds, and where; see ``[Note: inert unpickling]``.

    Args:
        asked: what is being done, for errors.
        folder: where :func:`write_tensors` wrote.
        checksum: CRC32 that the layout has to have; None if nobody knows it, which is damage, too.

    Raises:
        UnsafeCheckpointError: reading it would run code.
        CheckpointError: it is damaged.
    """
    try:
        content = (folder / LAYOUT).read_bytes()
        if zlib.crc32(content) != checksum:
            raise damaged(asked, f"the checksum of {LAYOUT} does not match")
        return _metadata(_InertUnpickler(asked, content).load())
    except CheckpointError:
        raise
    except DAMAGE as error:
        raise damaged(asked, f"{LAYOUT} cannot be read ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Reading:
    """What is to be read.

    Attributes:
        files: names of the files that hold it.
        copy: copies it into its targets, and tells the function that it is given how many bytes have been copied after
            each tensor. Not a collective, whatever the targets are. Raises a CheckpointError when it finds damage.
    """

    files: frozenset[str]
    copy: Callable[[Callable[[int], None]], None]


def plan_reading(asked: str, targets: Mapping[str, Tensor], folder: Path, layout: "Metadata") -> Reading:
    """What to read for ``targets``. Nothing is read yet; compare the files with their checksums before.

    Args:
        asked: what is being done, for errors.
        targets: whole or sharded tensors by name, of the shapes in ``layout``.
        folder: where :func:`write_tensors` wrote.
        layout: what :func:`read_layout` returned.

    Raises:
        CheckpointError: parts of a tensor are missing.
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
        files = frozenset(layout.storage_data[item.storage_index].relative_path for item in items)
    except CheckpointError:
        raise
    except DAMAGE as error:
        raise damaged(asked, f"{type(error).__name__}: {error}") from error

    def copy(progress: Callable[[int], None]) -> None:
        by_name: dict[str, list[Any]] = {}
        for item in items:
            by_name.setdefault(item.dest_index.fqn, []).append(item)
        for name, parts in by_name.items():
            try:
                reader.read_data(LoadPlan(parts), planner).wait()
            except DAMAGE as error:
                # Its checksum is right: what torch refuses to read as a tensor was put there by somebody.
                if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"GLOBAL (\S+)", str(error))):
                    raise _unsafe(asked, f"{name!r}", found[1]) from error
                raise damaged(asked, f"{name!r}: {type(error).__name__}: {error}") from error
            progress(local_tensor(targets[name]).nbytes)

    return Reading(files, copy)


class _Record:
    """Stands for an object of a class that is not called: it keeps the state that it was given."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        """Nothing that is read here has its content in arguments."""

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
        raise _unsafe(self._asked, f"its {LAYOUT}", f"{module_name}.{global_name}")


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


def _location(info: _Record) -> SimpleNamespace:
    """Where the archive with a part of a tensor is; the attributes are those that DCP's reader asks for."""
    path = info.get("relative_path")
    if not isinstance(path, str) or os.path.basename(path) != path or path in ("", ".", ".."):
        raise ValueError(f"{path!r} is not a file in the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{path!r} is encoded by {info.get('transform_descriptors')!r}")
    offset, length = int(info.get("offset")), int(info.get("length"))
    return SimpleNamespace(relative_path=path, offset=offset, length=length, transform_descriptors=None)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or any(type(number) is not int or number < 0 for number in value):
        raise ValueError(f"{value!r} is no size")
    return torch.Size(value)


def _check_coverage(asked: str, targets: Mapping[str, Tensor], items: Iterable[Any]) -> None:
    """Refuse a layout whose parts do not make up the whole, which DCP would leave with whatever was in memory."""
    found: Counter[str] = Counter()
    for item in items:
        found[item.dest_index.fqn] += prod(item.lengths)
    incomplete = [name for name, target in targets.items() if found[name] != local_tensor(target).numel()]
    if incomplete:
        raise damaged(asked, f"parts are missing of {listed(incomplete)}")


class _SummedFile(io.BufferedWriter):
    """A file that sums what is written to it; it is only ever appended to."""

    checksum = 0

    @override
    def write(self, content: Any, /) -> int:
        self.checksum = zlib.crc32(content, self.checksum)
        return io.BufferedWriter.write(self, content)


def _sum_what_is_written(writer: "FileSystemWriter") -> dict[str, int]:
    """The CRC32 of each file that the writer finishes, by name; filled while it writes."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    checksums: dict[str, int] = {}

    class SummingFileSystem(FileSystem):
        @contextmanager
        @override
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
            assert mode == "wb", "a writer only writes"
            with _SummedFile(io.FileIO(path, "w")) as file:
                yield file
            checksums[Path(path).name] = file.checksum

    writer.fs = SummingFileSystem()
    return checksums


def _unsafe(asked: str, place: str, found: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        asked,
        f"{place} holds {found}: to rebuild that could run any code; it was not run",
        f"tensors, and their names, sizes and places as {_METADATA_MODULE} has them",
        TRUSTED,
    )
