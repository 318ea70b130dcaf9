"""A checkpoint in a folder, which all ranks write in parallel and any number of ranks can read.

[Note: files of a sharded checkpoint]
Each rank writes its shards to a *safetensors* file, with the metadata of torch's own format in its
header, so that ``torch.distributed.checkpoint.HuggingFaceStorageReader`` and the safetensors
library can read it too. The file has room for one shard of each tensor; a second shard goes to a
second file. A dtype that safetensors does not support is written as bytes, with one more dimension.
Non-tensor state is in the index, which is JSON. State of a single rank, such as its random states,
is in a JSON file of that rank. Nothing in the folder can name code.

[Note: commit of a folder]
A non-empty folder cannot be replaced atomically, but a file can. So the *index* names the save
whose data is valid. A save writes data files with its own ID in their names and the additional
suffix ``.tmp``, which torch's readers skip, flushes them, and replaces the index: that is the
commit. Only then are the older data files removed, and the new ones renamed. Until then fabric
finds the new ones by the suffix, so that a process that dies at any point leaves the old checkpoint
or the new one. The next save removes the files of saves that the index does not name and whose
temporary index is gone.
"""

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from fabric.checkpoint.agreement import gather_on_first, raise_on_any_rank_error
from fabric.checkpoint.atomic import atomic_write, sync_folder, write_errors
from fabric.checkpoint.encoding import Chunk, FlatState, flatten_state, local_chunks, to_json
from fabric.checkpoint.safetensors import DataFile, write_safetensors
from fabric.checkpoint.sharded_reader import DATA_NAME, FORMAT, INDEX, ShardedReader, read_index
from fabric.checkpoint.state import FORMAT_VERSION, METADATA_KEY, PlainState, State, join_names
from fabric.checkpoint.storage import Location, RemotePath
from fabric.communicators import Communicator, LocalCommunicator
from fabric.errors import CheckpointError

__all__ = ["ShardedCheckpoint", "clean", "remove_folder"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Files = dict[str, DataFile]

_THIS_PROCESS = LocalCommunicator(torch.device("cpu"))


@dataclass(frozen=True)
class _FolderSave:
    """A save into a folder, on rank 0.

    Attributes:
        folder: the folder, behind any symbolic link.
        id: the ID of the save, which is in the names of its data files.
        index: the temporary that replaces the index.
    """

    folder: Location
    id: str
    index: BinaryIO


class _Target(NamedTuple):
    """What all ranks learn from rank 0 about a save.

    Attributes:
        folder: the folder.
        id: the ID of the save.
        stored_names: see :class:`FlatState`.
    """

    folder: Location
    id: str
    stored_names: dict[str, str]


class ShardedCheckpoint:
    """The sharded format: one folder per checkpoint, in which each rank writes its own shards.

    See ``[Note: files of a sharded checkpoint]``. The folder is replaced as a whole: a crash at any
    moment leaves the old content or the new one, see ``[Note: commit of a folder]``. Any number of
    ranks can read it, into full tensors or tensors sharded in any way; each rank reads only what it
    needs. With one process this is a :class:`fabric.checkpoint.CheckpointIO` like any other.
    """

    def save(
        self,
        state: State,
        path: Location,
        communicator: Communicator = _THIS_PROCESS,
        per_rank: State | None = None,
    ) -> None:
        """Write ``state`` to the folder ``path`` and return when it is on the disk.

        Collective: every rank of ``communicator`` must call it. Sharded tensors (DTensors) are
        written shard by shard; full tensors and everything else are saved from rank 0. Tensors that
        share the same memory are written once. Parameters are loaded as plain tensors.

        Args:
            state: plain state, possibly with sharded tensors, of the same structure on every rank.
            path: the folder, on a file system that all ranks share. Missing parent folders are
                created.
            communicator: the ranks. By default this process alone.
            per_rank: plain values that are kept for each rank. A load returns them as lists in
                fabric's metadata.

        Raises:
            CheckpointError: ``path`` is a file, holds an ``index.json`` that is not fabric's, or
                cannot be written, or ranks disagree; on every rank, if the save fails on one. What
                was at ``path`` is untouched.
            ArgumentTypeError: a value in ``state`` is not plain, or is of a class that only code
                can rebuild.
        """
        request = f"save a sharded checkpoint to {str(path)!r}"
        rank = communicator.rank
        run_on_all_ranks = partial(_run_on_all_ranks, communicator, request)
        if communicator.size > 1 and str(path).startswith("memory:"):
            problem = (
                "each process has memory of its own, and no other could read what this one writes "
                "there"
            )
            raise CheckpointError(request, problem, expected="a file system that all ranks share")
        metadata = state.get(METADATA_KEY, {})
        entries = {name: content for name, content in state.items() if name != METADATA_KEY}
        flat: FlatState = run_on_all_ranks(flatten_state, entries)
        with ExitStack() as stack:
            save = run_on_all_ranks(_begin, stack, request, path, rank == 0)
            target = None
            if save is not None:
                target = _Target(save.folder, save.id, flat.stored_names)
            target = communicator.broadcast_object(target, 0)
            files = run_on_all_ranks(_write_rank, request, target, rank, flat.tensors, per_rank)
            files_of_ranks = gather_on_first(communicator, files)
            run_on_all_ranks(_commit, stack, request, save, flat, files_of_ranks, metadata)

    def load(self, path: Location) -> PlainState:
        """Read what :meth:`save` wrote, in full, with every tensor on the CPU.

        Never runs code that the folder holds.

        Raises:
            CheckpointNotFoundError: there is no such folder, or no save into the folder was ever
                finished.
            CheckpointError: ``path`` is a file, or the checkpoint is damaged.
        """
        reader = self.open(path)
        return reader.load(reader.content)

    def open(self, path: Location, communicator: Communicator = _THIS_PROCESS) -> ShardedReader:
        """Return the content of the folder ``path``, without reading tensors.

        Collective with a communicator.

        Raises:
            CheckpointError: as for :meth:`load`, except for damaged tensors, which are not checked
                yet.
        """
        request = f"load the sharded checkpoint {str(path)!r}"

        def read_on_first_rank() -> bytes:
            if communicator.rank != 0:
                return b""
            return read_index(request, path).content

        index = raise_on_any_rank_error(communicator, request, read_on_first_rank)
        return ShardedReader(request, path, communicator.broadcast_object(index, 0))

    def remove(self, path: Location) -> None:
        """Delete the checkpoint in the folder ``path``, and the folder if it holds nothing else.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CheckpointError: ``path`` is a file, or its ``index.json`` is not fabric's.
        """
        read_index(f"remove the checkpoint {str(path)!r}", path)
        remove_folder(path)

    def wait(self) -> None:
        """Return at once: :meth:`save` has already waited for the disk."""


def _run_on_all_ranks(
    communicator: Communicator, request: str, step: Callable[[*Ts], T], *args: *Ts
) -> T:
    """Return ``step(*args)`` once it has succeeded on every rank. ``step`` is no collective."""

    def run() -> T:
        with write_errors(request):
            return step(*args)

    return raise_on_any_rank_error(communicator, request, run)


def _begin(stack: ExitStack, request: str, path: Location, is_first: bool) -> _FolderSave | None:
    """Open the folder on rank 0, until ``stack`` is closed."""
    if not is_first:
        return None
    return stack.enter_context(_replace_folder(request, path))


@contextmanager
def _replace_folder(request: str, path: Location) -> Iterator[_FolderSave]:
    """Yield a folder to fill, and the index file to write last. See ``[Note: commit of a folder]``.

    If several processes fill the folder, one of them calls this. When the block raises, the
    checkpoint is unchanged.

    Raises:
        CheckpointError: ``path`` is a file, its index is not fabric's, or the file system refuses.
    """
    target = path
    if isinstance(path, Path):
        target = Path(os.path.realpath(path))
    is_new = not target.exists()
    if not is_new and not target.is_dir():
        raise CheckpointError(
            request, problem="there is a file of that name", expected="the path of a folder"
        )
    if (target / INDEX).is_file():
        # Called for its error: an index that is not fabric's is not replaced.
        read_index(request, target)
    try:
        with atomic_write(target / INDEX) as index:
            if not is_new:
                clean(target)
            elif isinstance(target, Path):
                sync_folder(target.parent)
            yield _FolderSave(target, index.name.split(".")[-2], index)
        is_new = False
    finally:
        # Files that cannot be removed or renamed now are still found, and the next save tries
        # again.
        with suppress(OSError):
            clean(target)
            if is_new:
                target.rmdir()  # fails if it holds anything else


def _write_rank(
    request: str, target: _Target, rank: int, tensors: Mapping[str, Tensor], per_rank: State | None
) -> _Files:
    """Write the data files of one rank.

    File n has the n-th chunk of each tensor.

    Returns:
        The written files by name.
    """
    different = target.stored_names.keys() ^ tensors.keys()
    if different:
        names = join_names(sorted(different))
        problem = f"not both rank 0 and rank {rank} have these tensors: {names}"
        raise CheckpointError(
            request, problem, expected="a state of the same structure on every rank"
        )
    chunks_of_files: defaultdict[int, dict[str, Chunk]] = defaultdict(dict)
    # Names of several tensors with the same memory occur once.
    for name in dict.fromkeys(target.stored_names.values()):
        for number, chunk in enumerate(_chunks_to_write(tensors[name], rank)):
            chunks_of_files[number][name] = chunk
    files: _Files = {}
    for number, chunks in chunks_of_files.items():
        suffix = ""
        if number > 0:
            suffix = f"-{number}"
        name = f"rank-{rank:05}{suffix}-{target.id}.safetensors"
        with _data_file(target.folder, name) as file:
            files[name] = write_safetensors(file, chunks)
    if per_rank:
        name = f"rank-{rank:05}-{target.id}.json"
        with _data_file(target.folder, name) as file:
            text = json.dumps(to_json(dict(per_rank)), allow_nan=False).encode()
            file.write(text)
            files[name] = DataFile(zlib.crc32(text), {})
    return files


def _chunks_to_write(tensor: Tensor, rank: int) -> list[Chunk]:
    """Return the chunks of a tensor that this rank writes."""
    if not _is_writer(tensor, rank):
        return []
    chunks = local_chunks(tensor)
    if rank == 0:
        return chunks  # with empty chunks: a tensor without elements has to be in some file
    return [chunk for chunk in chunks if chunk.tensor.numel() > 0]


def _is_writer(tensor: Any, rank: int) -> bool:
    """Return whether this rank writes its share of a tensor.

    Rank 0 writes full tensors, and one replica of a DTensor is written. A DTensor on a submesh has
    a replica on each parallel submesh.
    """
    if not hasattr(tensor, "device_mesh"):
        return rank == 0
    coordinate = None
    if 0 in tensor.device_mesh.mesh:
        coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    for number, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate() and number != 0:
            return False
    return True


@contextmanager
def _data_file(folder: Location, name: str) -> Iterator[BinaryIO]:
    """Yield a data file to write, which is on the disk after the block."""
    if isinstance(folder, RemotePath):
        with (folder / name).replace() as file:
            yield file
        return
    with open(folder / f"{name}.tmp", "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _commit(
    stack: ExitStack,
    request: str,
    save: _FolderSave | None,
    flat: FlatState,
    files_of_ranks: list[_Files],
    metadata: State,
) -> None:
    """Write the index on rank 0, and put it in place."""
    if save is not None:
        files: _Files = {}
        for files_of_rank in files_of_ranks:
            files.update(files_of_rank)
        tensors = {name: flat.tensors[name] for name in flat.stored_names.values()}
        _check_complete(request, tensors, files)
        descriptions = {}
        for name, tensor in tensors.items():
            descriptions[name] = [str(tensor.dtype), [*tensor.shape]]
        index = {
            "files": files,
            "tensors": descriptions,
            "metadata": to_json(metadata),
            "state": flat.entries,
        }
        _write_index(save, index)
    # Commits: leaves the context of _replace_folder().
    stack.close()


def _check_complete(request: str, tensors: Mapping[str, Tensor], files: _Files) -> None:
    """Raise a CheckpointError if the chunks in ``files`` do not make up the tensors."""
    missing = {name: tensor.numel() for name, tensor in tensors.items()}
    for file in files.values():
        for name, chunk in file.chunks.items():
            missing[name] -= prod(chunk.sizes)
    incomplete = [name for name, number in missing.items() if number != 0]
    if incomplete:
        names = join_names(incomplete)
        problem = f"the chunks that ranks hold do not make up the whole tensor for: {names}"
        raise CheckpointError(request, problem)


def _write_index(save: _FolderSave, content: Mapping[str, Any]) -> None:
    """Write the index as JSON with a checksum.

    The first line has the format, the version, the save's ID and the checksum.
    """
    body = json.dumps(content, allow_nan=False)[1:].encode()
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "save": save.id,
        "crc32": zlib.crc32(save.id.encode() + body),
    }
    save.index.write(json.dumps(header)[:-1].encode() + b",\n" + body)


def remove_folder(folder: Location) -> None:
    """Delete the files of all saves in a folder, and the folder if it holds nothing else."""
    with suppress(FileNotFoundError):
        # The index is removed first, so that an interrupted removal leaves no checkpoint.
        (folder / INDEX).unlink()
    clean(folder)
    with suppress(OSError):
        folder.rmdir()


def clean(folder: Location) -> None:
    """Finish the last commit, and remove the files of other saves.

    Files that a process is writing stay.
    """
    ended: list[tuple[Location, str]] = []
    for entry in folder.iterdir():
        match = DATA_NAME.fullmatch(entry.name)
        if match is None:
            continue
        save_id = match["save"]
        # An object store has no temporaries.
        if isinstance(entry, Path):
            unfinished_index = folder / f".{INDEX}.{save_id}.tmp"
            if not entry.is_file() or unfinished_index.exists():
                continue
        ended.append((entry, save_id))
    # Read last: another process may have committed a save in the meantime.
    current_id = ""
    if (folder / INDEX).is_file():
        current_id = read_index("save a sharded checkpoint", folder).save_id
    for entry, save_id in ended:
        # Raised if another process has done it.
        with suppress(FileNotFoundError):
            if save_id != current_id:
                entry.unlink()
            elif isinstance(entry, Path) and entry.suffix == ".tmp":
                os.replace(entry, entry.with_suffix(""))
