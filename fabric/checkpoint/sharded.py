"""A checkpoint in a folder, which all ranks write in parallel and any number of ranks can read.

Each rank writes its shards to a *safetensors* file, with the metadata of torch's own format in its
header, so that ``torch.distributed.checkpoint.HuggingFaceStorageReader`` and the safetensors
library can read it too. The file has room for one shard of each tensor. If a rank holds a second
shard of a tensor, the second shard goes to a second file. A dtype that safetensors does not support
is written as bytes, with one more dimension. Non-tensor state is in the index, which is JSON. State
of a single rank, such as its random states, is in a JSON file of that rank. Nothing in the folder
can name code.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from fabric._torch import is_dtensor
from fabric.checkpoint.agreement import gather_on_first, run_on_all_ranks
from fabric.checkpoint.atomic import (
    atomic_write,
    flush_during,
    sync_folder,
    write_errors,
)
from fabric.checkpoint.encoding import Chunk, FlatState, flatten_state, local_chunks, to_json
from fabric.checkpoint.safetensors import DataFile, write_safetensors
from fabric.checkpoint.sharded_reader import DATA_NAME, FORMAT, INDEX, ShardedReader, read_index
from fabric.checkpoint.state import FORMAT_VERSION, METADATA_KEY, PlainState, State, join_names
from fabric.checkpoint.storage import Location, RemotePath, path_type, require_folder
from fabric.communicators import Communicator, LocalCommunicator
from fabric.errors import CheckpointError

__all__ = [
    "ShardedCheckpoint",
    "check_folder_is_replaceable",
    "clean",
    "context_on_one_rank",
    "refuse_in_memory_path",
    "remove_folder",
    "run_with_write_errors_on_all_ranks",
]

T = TypeVar("T")
_Files = dict[str, DataFile]

_THIS_PROCESS = LocalCommunicator(torch.device("cpu"))


@dataclass(frozen=True)
class _OpenSave:
    """A save into a folder that rank 0 has begun and not yet committed.

    Attributes:
        folder: the folder, behind any symbolic link.
        id: the ID of the save, which is in the names of its data files.
        index: the temporary file that replaces the index when the save is committed.
    """

    folder: Location
    id: str
    index: BinaryIO


class _SavePlan(NamedTuple):
    """What every rank has to know of a save to write its data files. Rank 0 sends it to all ranks.

    Attributes:
        folder: the folder.
        id: the ID of the save, which is in the names of its data files.
        stored_names: for the name of each tensor, the name of the first tensor with the same
            memory. Only the first one is written.
    """

    folder: Location
    id: str
    stored_names: dict[str, str]


# [Note: commit of a folder]
# A non-empty folder cannot be replaced atomically, but a file can. So the *index* names the save
# whose data files are valid. A save takes these steps:
#
# 1. It opens a temporary index, whose name has the ID of the save: `.index.json.<ID>.tmp`. While
#    the temporary index exists, no other process touches the files of this save.
# 2. It writes data files, whose names have the ID and the suffix `.tmp`, which torch's readers
#    skip. It flushes the files to the disk.
# 3. It renames the temporary index to `index.json`, which replaces the old index. This is the
#    commit.
# 4. It removes the data files of older saves, and removes the suffix from the names of the new
#    files.
#
# Until step 4, fabric finds the new files by the suffix. So a process that dies at any point leaves
# the old checkpoint or the new one. The next save removes the files of a save that the index does
# not name and that has no temporary index.
class ShardedCheckpoint:
    """The sharded format: one folder per checkpoint, in which each rank writes its own shards.

    The folder is replaced as a whole: a crash at any moment leaves the old content or the new one.
    Any number of ranks can read it, into full tensors or tensors sharded in any way; each rank
    reads only what it needs. With one process this is a :class:`fabric.checkpoint.CheckpointIO`
    like any other.
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
                cannot be written; or the ranks have different structures. If the save fails on one
                rank, all ranks raise. What was at ``path`` is untouched.
            ArgumentTypeError: a value in ``state`` is not plain, or cannot be loaded without
                unpickling.
        """
        with self.write(state, path, communicator, per_rank):
            pass  # The end of the block commits the save.

    @contextmanager
    def write(
        self,
        state: State,
        path: Location,
        communicator: Communicator = _THIS_PROCESS,
        per_rank: State | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Iterator[None]:
        """Write ``state`` as :meth:`save` does, and commit the save at the end of the block.

        Collective. If the block raises, what was at ``path`` is untouched. The block must raise on
        all ranks or on none. The errors are those of :meth:`save`.

        Args:
            state: plain state, possibly with sharded tensors, of the same structure on every rank.
            path: the folder, on a file system that all ranks share.
            communicator: the ranks. By default this process alone.
            per_rank: plain values that are kept for each rank. None keeps none.
            meanwhile: is called while this rank waits for the disk or for ranks that write, once or
                several times. Not a collective. None, the default, calls nothing.
        """
        request = f"save a sharded checkpoint to {str(path)!r}"
        refuse_in_memory_path(request, path, communicator)
        metadata = state.get(METADATA_KEY, {})
        entries = {name: content for name, content in state.items() if name != METADATA_KEY}
        flat: FlatState = run_with_write_errors_on_all_ranks(
            communicator, request, partial(flatten_state, entries)
        )
        # The end of the block commits the save. If the block raises, the old checkpoint stays.
        replace_folder = partial(_replace_folder, request, path)
        with context_on_one_rank(communicator, 0, request, replace_folder) as save:
            plan = None
            if save is not None:  # on rank 0
                plan = _SavePlan(save.folder, save.id, flat.stored_names)
            plan = communicator.broadcast_object(plan, 0)
            write_data_files = partial(
                _write_data_files,
                request,
                plan,
                communicator.rank,
                flat.tensors,
                per_rank=per_rank,
                meanwhile=meanwhile,
            )
            files = run_with_write_errors_on_all_ranks(communicator, request, write_data_files)
            # Empty on all ranks but rank 0.
            files_of_ranks = gather_on_first(communicator, files)
            write_index = partial(
                _write_index_on_first_rank, request, save, flat, files_of_ranks, metadata
            )
            run_with_write_errors_on_all_ranks(communicator, request, write_index)
            yield

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
        """Return a reader of the checkpoint in the folder ``path``, without reading tensors.

        Collective over ``communicator``, which is this process alone by default. Rank 0 reads the
        index for all ranks.

        Raises:
            CheckpointError: as for :meth:`load`, except for damaged tensors, which are not checked
                yet.
        """
        request = f"load the sharded checkpoint {str(path)!r}"

        def read_on_first_rank() -> bytes:
            if communicator.rank != 0:
                return b""
            return read_index(request, path).content

        # If rank 0 cannot read the index, all ranks raise its error.
        index = run_on_all_ranks(communicator, request, read_on_first_rank)
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


def run_with_write_errors_on_all_ranks(
    communicator: Communicator, request: str, step: Callable[[], T]
) -> T:
    """Return ``step()`` of this rank, or raise on every rank if the step fails on any rank.

    Collective over ``communicator``. Unlike :func:`run_on_all_ranks`, it converts errors of torch
    and the file system, as :func:`write_errors` does. ``step`` itself must not be collective.
    ``request`` is the user's request, a text for errors.
    """

    def step_with_converted_errors() -> T:
        with write_errors(request):
            return step()

    return run_on_all_ranks(communicator, request, step_with_converted_errors)


@contextmanager
def context_on_one_rank(
    communicator: Communicator,
    rank: int,
    request: str,
    make_context: Callable[[], AbstractContextManager[T]],
) -> Iterator[T | None]:
    """Run a block on all ranks, and on one rank within a context such as an open file.

    Collective over ``communicator``. If the context cannot be entered, or fails at the end of the
    block, every rank raises, with errors converted as by
    :func:`run_with_write_errors_on_all_ranks`. If the block raises on ``rank``, the context gets
    this error.

    Args:
        communicator: the ranks.
        rank: the rank that enters the context.
        request: the user's request, a text for errors.
        make_context: returns the context. Only called on ``rank``.

    Yields:
        The value of the context on ``rank``, and None on the other ranks.
    """
    # Holds the context on ``rank``. Empty on the other ranks.
    with ExitStack() as entered_context:

        def enter_on_one_rank() -> T | None:
            if communicator.rank != rank:
                return None
            return entered_context.enter_context(make_context())

        yield run_with_write_errors_on_all_ranks(communicator, request, enter_on_one_rank)
        # The block has succeeded. All ranks take part in the end of the context, so that all raise
        # if it fails, as when a file cannot replace its target.
        run_with_write_errors_on_all_ranks(communicator, request, entered_context.close)


def refuse_in_memory_path(request: str, path: Location, communicator: Communicator) -> None:
    """Raise a CheckpointError if ``path`` is in the memory of one process and there are others.

    ``request`` is the user's request, a text for the error.
    """
    # "memory://..." is a file system of fsspec.
    if communicator.size > 1 and str(path).startswith("memory:"):
        raise CheckpointError(
            request,
            problem="each process has memory of its own, and no other process could read what this "
            "one writes there",
            expected="a file system that all ranks share",
        )


# See [Note: commit of a folder].
@contextmanager
def _replace_folder(request: str, path: Location) -> Iterator[_OpenSave]:
    """Begin a save into a folder, yield the save to the block, and commit the save after the block.

    The block has to write the data files and the index. Only rank 0 calls this function. If the
    block raises, the old checkpoint stays as it was. ``request`` is the user's request, a text for
    errors.

    Raises:
        CheckpointError: ``path`` is a file, its index is not fabric's, or the file system refuses.
    """
    folder = path
    if isinstance(path, Path):
        # If the path is a symbolic link, the folder behind the link is filled, and the link stays.
        folder = Path(os.path.realpath(path))
    is_new = path_type(folder) is None
    check_folder_is_replaceable(request, folder)
    try:
        # At the end of its block, atomic_write() replaces the index, which commits the save. If the
        # index is a link, as in a cache of downloads, the link is replaced, and the file stays.
        with atomic_write(folder / INDEX, follow_symlinks=False) as index:
            if not is_new:
                # Removes what interrupted saves left, so that this save has the disk space.
                clean(folder)
            elif isinstance(folder, Path):
                sync_folder(folder.parent)  # atomic_write() has created the folder
            # The name of the temporary file ends in .<ID>.tmp.
            save_id = index.name.split(".")[-2]
            yield _OpenSave(folder, save_id, index)
    except BaseException:
        # The save was not committed, so clean() removes its files.
        with suppress(OSError):
            clean(folder)
            if is_new:
                folder.rmdir()  # fails, and leaves the folder, if it holds anything else
        raise
    # The save is committed: clean() removes the files of older saves and renames the new files. If
    # clean() fails, the checkpoint is still valid, and the next save calls clean() again.
    with suppress(OSError):
        clean(folder)


def check_folder_is_replaceable(request: str, folder: Location) -> None:
    """Raise a CheckpointError if a folder of shards cannot replace what is at ``folder``.

    A file cannot be replaced, nor can a folder with an ``index.json`` that another program wrote.
    ``request`` is the user's request, a text for errors.
    """
    type_of_path = path_type(folder)
    if type_of_path is None:
        require_folder(request, folder.parent)
        return
    if type_of_path != "directory":
        raise CheckpointError(
            request,
            problem="there is a file of that name, and this strategy saves a folder of shards",
            expected="the path of a folder, or a path where nothing is",
            suggestion='another path; or FSDPStrategy(state_dict_type="full"), which replaces the '
            "file",
        )
    if path_type(folder / INDEX) == "file":
        # Called for its error: the index is not fabric's.
        read_index(request, folder)


def _write_data_files(
    request: str,
    plan: _SavePlan,
    rank: int,
    tensors: Mapping[str, Tensor],
    per_rank: State | None,
    meanwhile: Callable[[], object] | None,
) -> _Files:
    """Write the data files of one rank. Not a collective.

    Args:
        request: the user's request, a text for errors.
        plan: the folder, the ID of the save and the tensors, as rank 0 has them.
        rank: this rank.
        tensors: the tensors of this rank by name, full or sharded.
        per_rank: plain values of this rank alone, for a file of their own. None for no such file.
        meanwhile: is called while this rank waits for the disk, once or several times. None calls
            nothing.

    Returns:
        The written files by name.

    Raises:
        CheckpointError: this rank and rank 0 have tensors of different names.
    """
    # The names that only rank 0 or only this rank has.
    names_of_one_rank = plan.stored_names.keys() ^ tensors.keys()
    if names_of_one_rank:
        names = join_names(sorted(names_of_one_rank))
        problem = f"not both rank 0 and rank {rank} have these tensors: {names}"
        raise CheckpointError(
            request,
            problem,
            expected="a state of the same structure on every rank",
            suggestion='{"model": model}, in place of fabric.get_state_dict(model), which is empty '
            "on other ranks than the first",
        )
    files: _Files = {}
    for number, chunks in enumerate(_chunks_of_files(plan, rank, tensors)):
        # Only a rank with several chunks of a tensor writes more than one file.
        suffix = ""
        if number > 0:
            suffix = f"-{number}"
        name = f"rank-{rank:05}{suffix}-{plan.id}.safetensors"
        with _data_file(plan.folder, name) as file:
            files[name] = write_safetensors(file, chunks)
            flush_during(request, file, meanwhile)
    if per_rank:
        name = f"rank-{rank:05}-{plan.id}.json"
        content = json.dumps(to_json(dict(per_rank)), allow_nan=False).encode()
        with _data_file(plan.folder, name) as file:
            file.write(content)
        files[name] = DataFile(checksum=zlib.crc32(content), chunks={})
    if meanwhile is not None:
        # flush_during() has called it for each file of tensors. A rank without such files calls it
        # only here.
        meanwhile()
    return files


def _chunks_of_files(
    plan: _SavePlan, rank: int, tensors: Mapping[str, Tensor]
) -> list[dict[str, Chunk]]:
    """Return the chunks that this rank writes, by tensor name for each of its files.

    A safetensors file holds one chunk of each tensor: the n-th file has the n-th chunk of each.
    ``plan`` has the names of the tensors to write. ``tensors`` are the tensors of this rank.
    """
    chunks_of_files: list[dict[str, Chunk]] = []
    # Tensors with the same memory have the same stored name, which is written once.
    unique_names = dict.fromkeys(plan.stored_names.values())
    for name in unique_names:
        for number, chunk in enumerate(_chunks_to_write(tensors[name], rank)):
            if number == len(chunks_of_files):
                chunks_of_files.append({})
            chunks_of_files[number][name] = chunk
    return chunks_of_files


def _chunks_to_write(tensor: Tensor, rank: int) -> list[Chunk]:
    """Return the chunks of a tensor that this rank writes. Empty if other ranks write all of it."""
    if not _is_writer(tensor, rank):
        return []
    chunks = local_chunks(tensor)
    if rank == 0:
        # Rank 0 writes empty chunks, too: a tensor without elements has to be in one file. Rank 0
        # is among the writers of every tensor.
        return chunks
    return [chunk for chunk in chunks if chunk.tensor.numel() > 0]


def _is_writer(tensor: Any, rank: int) -> bool:
    """Return whether this rank writes its part of a tensor, so that each value is written once.

    Rank 0 writes full tensors. A DTensor is written by the ranks with coordinate 0 in each
    replicated dimension of its mesh. If the mesh is a submesh, the parallel submeshes have replicas
    of the tensor, and only the submesh that contains rank 0 writes.
    """
    if not is_dtensor(tensor):
        return rank == 0
    has_rank0 = 0 in tensor.device_mesh.mesh
    # None if this rank is not in the mesh.
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not has_rank0:
        return False
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate() and index != 0:
            return False
    return True


@contextmanager
def _data_file(folder: Location, name: str) -> Iterator[BinaryIO]:
    """Yield a data file to write, which is on the disk after the block.

    A local file gets the suffix ``.tmp``. :func:`clean` renames it to its final name after the
    commit. An object store cannot rename a file, so a remote file gets its final name at once.
    """
    if isinstance(folder, RemotePath):
        # The object appears in the store at the end of the block.
        with (folder / name).replace() as file:
            yield file
        return
    with open(folder / f"{name}.tmp", "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    # Flushes the name of the file, too.
    sync_folder(folder)


def _write_index_on_first_rank(
    request: str,
    save: _OpenSave | None,
    flat: FlatState,
    files_of_ranks: list[_Files],
    metadata: State,
) -> None:
    """Write the index of a save on rank 0. Other ranks do nothing.

    Args:
        request: the user's request, a text for errors.
        save: the save, or None on other ranks.
        flat: the content of the checkpoint, as rank 0 has it.
        files_of_ranks: the files that each rank has written. Empty on other ranks.
        metadata: fabric's metadata.

    Raises:
        CheckpointError: the files do not hold all tensors.
    """
    if save is None:
        return
    # The names of files contain the rank, so that no two ranks have the same name.
    files: _Files = {}
    for files_of_rank in files_of_ranks:
        files.update(files_of_rank)
    # Tensors with the same memory have the same stored name, and are described once.
    tensors = {name: flat.tensors[name] for name in flat.stored_names.values()}
    _check_complete(request, tensors, files)
    descriptions = {}
    for name, tensor in tensors.items():
        descriptions[name] = [str(tensor.dtype), [*tensor.shape]]
    content = {
        "files": files,
        "tensors": descriptions,
        "metadata": to_json(metadata),
        "state": flat.entries,
    }
    save.index.write(_encode_index(save.id, content))


def _check_complete(request: str, tensors: Mapping[str, Tensor], files: _Files) -> None:
    """Raise a CheckpointError if the chunks in ``files`` do not make up the tensors.

    This finds a rank whose tensor has another shape or sharding, before the save is committed.

    Args:
        request: the user's request, a text for the error.
        tensors: the tensors of rank 0 by name, with their full shapes.
        files: the files of all ranks.
    """
    missing_elements = {name: tensor.numel() for name, tensor in tensors.items()}
    for file in files.values():
        for name, chunk in file.chunks.items():
            missing_elements[name] -= prod(chunk.sizes)
    incomplete = [name for name, number in missing_elements.items() if number != 0]
    if incomplete:
        names = join_names(incomplete)
        problem = f"the chunks that ranks hold do not make up the whole tensor for: {names}"
        raise CheckpointError(request, problem)


def _encode_index(save_id: str, content: Mapping[str, Any]) -> bytes:
    """Return the bytes of an index: one JSON object of two lines.

    The first line has the format, the version, the ID of the save, and a checksum of the ID and the
    second line. The second line has ``content``. So :func:`read_index` can verify the second line
    before it parses it.
    """
    # Without the opening brace, which begins the first line.
    body = json.dumps(content, allow_nan=False)[1:].encode()
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "save": save_id,
        "crc32": zlib.crc32(save_id.encode() + body),
    }
    # Without the closing brace, which ends the second line.
    first_line = json.dumps(header)[:-1].encode()
    return first_line + b",\n" + body


def remove_folder(folder: Location) -> None:
    """Delete the files of all saves in a folder, and the folder if it holds nothing else.

    If ``folder`` is a symbolic link, only the link is deleted.
    """
    if isinstance(folder, Path) and folder.is_symlink():
        folder.unlink()
        return
    with suppress(FileNotFoundError):
        # The index is removed first, so that an interrupted removal leaves no checkpoint.
        (folder / INDEX).unlink()
    # Without an index no save is valid, so clean() removes the files of all saves.
    clean(folder)
    with suppress(OSError):
        folder.rmdir()  # fails, and leaves the folder, if it holds anything else


# See [Note: commit of a folder].
def clean(folder: Location) -> None:
    """Remove files of uncommitted saves, and give those of the committed save their final names.

    The index names the committed save. Files that a process is still writing stay. Rank 0 calls
    this function after the commit of a save, and before a save, in case the last save was
    interrupted.
    """
    # By path, the ID of the save that has written the file.
    save_ids = _finished_files(folder)
    # The index is read after the listing. In the other order, a save that another process commits
    # in between would lose its files.
    committed_id = ""  # no save: all finished files are removed
    if path_type(folder / INDEX) == "file":
        index = read_index("save a sharded checkpoint", folder)
        committed_id = index.save_id
    for path, save_id in save_ids.items():
        # Another process may have removed or renamed the file.
        with suppress(FileNotFoundError):
            if save_id != committed_id:
                path.unlink()
            elif isinstance(path, Path) and path.suffix == ".tmp":
                # The final name is the name without ".tmp". Files on a remote file system are
                # written under their final names.
                os.replace(path, path.with_suffix(""))


def _finished_files(folder: Location) -> dict[Location, str]:
    """Return the data files in a folder that no process is writing, with the ID of their save.

    In an object store it is not known what another process is writing. There, all data files are
    returned.
    """
    save_ids: dict[Location, str] = {}
    for path in folder.iterdir():
        match = DATA_NAME.fullmatch(path.name)
        if match is None:
            continue
        save_id = match["save"]
        # A local save has a temporary index until it is committed or has failed. An object store
        # has no temporary files.
        if isinstance(path, Path):
            is_being_written = path_type(folder / f".{INDEX}.{save_id}.tmp") is not None
            if is_being_written or path_type(path) != "file":
                continue
        save_ids[path] = save_id
    return save_ids
