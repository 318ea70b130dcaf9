"""A checkpoint in a folder, which all ranks write in parallel and any number of ranks can read.

[Note: files of a sharded checkpoint]
Each rank writes its shards to a *safetensors* file, with the metadata of torch's own format in its header, so that
``torch.distributed.checkpoint.HuggingFaceStorageReader`` and the safetensors library can read it too. The file has room
for one shard of each tensor; a second shard goes to a second file. A dtype that safetensors does not support is written
as bytes, with one more dimension. Non-tensor state is in the index, which is JSON. State of a single rank, such as its
random states, is in a JSON file of that rank. Nothing in the folder can name code.

[Note: commit of a folder]
A non-empty folder cannot be replaced atomically, but a file can. So the *index* names the save whose data is valid.
A save writes data files with its own ID in their names and the additional suffix ``.tmp``, which torch's readers skip,
flushes them, and replaces the index: that is the commit. Only then are the older data files removed, and the new ones
renamed. Until then fabric finds the new ones by the suffix, so that a process that dies at any point leaves the old
checkpoint or the new one. The next save removes the files of saves that the index does not name and whose temporary
index is gone.

[Note: bounded memory] To convert a folder to one file, tensors are assembled in unnamed scratch files that are mapped
into memory: the system can page them out to the disk, and they vanish however the process ends. Only one part of one
tensor has to be in memory at a time. The cost is disk space for a second copy of the checkpoint.
"""

import json
import os
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fabric.checkpoint.encoding import flatten_state, local_chunks, to_json
from fabric.checkpoint.file import (
    FullCheckpoint,
    Written,
    atomic_write,
    gather_on_first,
    locate,
    raise_on_any_rank_error,
    sync_folder,
    write_errors,
    write_safetensors,
)  # fmt: skip
from fabric.checkpoint.state import (
    FORMAT_VERSION,
    METADATA_KEY,
    State,
    join_names,
)
from fabric.checkpoint.storage import Location, RemotePath
from fabric.checkpoint.stored import DATA_NAME, FORMAT, INDEX, StoredCheckpoint, read_index
from fabric.communicators import Communicator, LocalCommunicator
from fabric.errors import CheckpointError, ConfigurationError

__all__ = ["ShardedCheckpoint", "clean", "consolidate", "remove_folder"]

_Files = dict[str, Written]

_ALONE = LocalCommunicator(torch.device("cpu"))


class ShardedCheckpoint:
    """The sharded format: one folder per checkpoint, in which each rank writes its own shards.

    See ``[Note: files of a sharded checkpoint]``. The folder is replaced as a whole: a crash at any moment leaves the
    old content or the new one, see ``[Note: commit of a folder]``. Any number of ranks can read it, into full tensors
    or tensors sharded in any way; each rank reads only what it needs. With one process this is a
    :class:`fabric.checkpoint.CheckpointIO` like any other.
    """

    def save(
        self,
        state: State,
        path: Location,
        communicator: Communicator = _ALONE,
        per_rank: State | None = None,
    ) -> None:
        """Write ``state`` to the folder ``path`` and return when it is on the disk.

        Collective: every rank of ``communicator`` must call it. Sharded tensors (DTensors) are written shard by shard;
        full tensors and everything else are saved from rank 0. Tensors that share the same memory are written once.
        Parameters are loaded as plain tensors.

        Args:
            state: the result of :func:`fabric.checkpoint.state.collect`, possibly with sharded tensors; of the same
                structure on every rank.
            path: the folder, on a file system that all ranks share. Missing parent folders are created.
            communicator: the ranks; by default this process alone.
            per_rank: plain values that are kept for each rank; a load returns them as lists in fabric's metadata.

        Raises:
            CheckpointError: ``path`` is a file, holds an ``index.json`` that is not fabric's, or cannot be written, or
                ranks disagree; on every rank, if it fails on one. What was at ``path`` is untouched.
            ArgumentTypeError: something in ``state`` is not plain, or is of a class that only code can rebuild.
        """
        request = f"save a sharded checkpoint to {str(path)!r}"
        rank = communicator.rank

        def agreed(action: Callable[[], Any]) -> Any:
            return raise_on_any_rank_error(communicator, request, write_errors(request)(action))

        entries = {name: content for name, content in state.items() if name != METADATA_KEY}
        if communicator.size > 1 and str(path).startswith("memory:"):
            problem = "each process has memory of its own, and no other could read what this one writes there"
            raise CheckpointError(request, problem, "a file system that all ranks share")
        tree, own_kept, tensors = agreed(lambda: flatten_state(entries))
        with ExitStack() as stack:
            target = agreed(
                lambda: stack.enter_context(_replace_folder(request, path)) if rank == 0 else None
            )
            folder, save, kept = communicator.broadcast_object(
                (*target[:2], own_kept) if target else None, 0
            )

            def write() -> _Files:
                if different := kept.keys() ^ tensors.keys():
                    problem = f"not both rank 0 and rank {rank} have these tensors: {join_names(sorted(different))}"
                    raise CheckpointError(
                        request, problem, "a state of the same structure on every rank"
                    )
                return _write_rank(
                    folder, save, rank, {name: tensors[name] for name in kept.values()}, per_rank
                )

            written: list[_Files] = gather_on_first(communicator, agreed(write))

            def commit() -> None:
                if rank == 0:
                    files = {name: file for own in written for name, file in own.items()}
                    missing = Counter({name: tensors[name].numel() for name in kept.values()})
                    for _, chunks in files.values():
                        missing.subtract(
                            {name: prod(sizes) for name, (_, sizes, _) in chunks.items()}
                        )
                    if wrong := [name for name, number in missing.items() if number]:
                        problem = f"what ranks hold of these does not make up a tensor: {join_names(wrong)}"
                        raise CheckpointError(request, problem)
                    described = {
                        name: [str(tensors[name].dtype), [*tensors[name].shape]] for name in missing
                    }
                    metadata = to_json(state.get(METADATA_KEY, {}))
                    index = {
                        "files": files,
                        "tensors": described,
                        "metadata": metadata,
                        "state": tree,
                    }
                    _write_index(target[2], save, index)
                stack.close()

            agreed(commit)

    def load(self, path: Location) -> dict[str, Any]:
        """Read what :meth:`save` wrote, in full, with every tensor on the CPU. Never runs code that the folder holds.

        Raises:
            CheckpointNotFoundError: there is no such folder, or no save into it was ever finished.
            CheckpointError: ``path`` is a file, or it is damaged.
        """
        stored = self.open(path)
        return stored.load(stored.content)

    def open(self, path: Location, communicator: Communicator = _ALONE) -> StoredCheckpoint:
        """The content of the folder ``path``, without reading tensors. Collective with a communicator.

        Raises:
            CheckpointError: as for :meth:`load`, except for damaged tensors, which are not checked yet.
        """
        request = f"load the sharded checkpoint {str(path)!r}"
        index = raise_on_any_rank_error(
            communicator,
            request,
            lambda: read_index(request, path)[1] if communicator.rank == 0 else b"",
        )
        return StoredCheckpoint(request, path, communicator.broadcast_object(index, 0))

    def remove(self, path: Location) -> None:
        """Delete the checkpoint in the folder ``path``, and the folder unless it holds anything else.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: ``path`` is a file, or its ``index.json`` is not fabric's.
        """
        read_index(f"remove the checkpoint {str(path)!r}", path)
        remove_folder(path)

    def wait(self) -> None:
        """Return at once: :meth:`save` has already waited for the disk."""


def consolidate(
    directory: str | os.PathLike[str],
    output: Path | None = None,
    key: str | None = None,
    max_shard_gb: float | None = None,
) -> Path:
    """Write the content of a sharded checkpoint to one file, or its weights to several, in one process.

    Args:
        directory: the sharded checkpoint; it stays as it is.
        output: the file, which is replaced if it exists; None for ``directory`` with ``.pt`` appended. With the suffix
            ``.safetensors`` the weights of one model are written, otherwise all entries, as
            :class:`fabric.checkpoint.FullCheckpoint` writes them.
        key: for weights, the entry that is the model; None for the only possible one.
        max_shard_gb: write weights to a folder ``output`` (None for ``directory`` with ``-weights`` appended), as
            Hugging Face's libraries read them: files of at most this many GB, or of one tensor, and their index.

    Returns:
        The file or folder that was written.

    Raises:
        CheckpointNotFoundError: there is no sharded checkpoint at ``directory``.
        CheckpointError: it is damaged, or the file cannot be written, or the folder of weights exists; what was there
            before is untouched.
        ConfigurationError: ``key`` does not name a model, is missing although there are several, or is given for a
            file that holds all entries.
    """
    source = locate(directory)
    base = os.path.abspath(source if isinstance(source, Path) else source.name)
    output = output or Path(base + (".pt" if max_shard_gb is None else "-weights"))
    request = f"fabric consolidate {source} -o {output}" + (f" --key {key}" if key else "")
    if max_shard_gb is not None and output.exists():
        raise CheckpointError(
            request, f"{str(output)!r} exists, and weights that stay there would be read too"
        )
    stored = ShardedCheckpoint().open(source)
    if max_shard_gb is not None or output.suffix == ".safetensors":
        key = _model_entry(request, stored.content, key)
    elif key is not None:
        raise ConfigurationError(
            request, "--key chooses the model for weights alone; other files hold all entries"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    loaded = stored.load(
        stored.content if key is None else [key], partial(_scratch_tensor, request, output.parent)
    )
    if key is None:
        FullCheckpoint().save(loaded, output)
        return output
    # The format has no shared memory: tied tensors are written twice.
    tensors = {name: each for name, each in loaded[key].items() if isinstance(each, Tensor)}
    if "__metadata__" in tensors:
        raise ConfigurationError(request, "safetensors keeps the name '__metadata__' for itself")
    files = (
        {output: tensors}
        if max_shard_gb is None
        else _weight_files(output, tensors, max_shard_gb * 1e9)
    )
    for path, part in files.items():
        with atomic_write(path) as file, write_errors(request):
            write_safetensors(file, {name: ([0] * each.dim(), each) for name, each in part.items()})
    if max_shard_gb is not None:
        index = {
            "metadata": {},
            "weight_map": {name: path.name for path, part in files.items() for name in part},
        }
        with atomic_write(output / "model.safetensors.index.json") as file:
            file.write(json.dumps(index, indent=2).encode())
    return output


def _weight_files(
    folder: Path, tensors: Mapping[str, Tensor], limit: float
) -> dict[Path, dict[str, Tensor]]:
    """The files of a folder of weights, named as Hugging Face's libraries expect, and the tensors in each."""
    parts: list[dict[str, Tensor]] = [{}]
    for name, each in tensors.items():
        if parts[-1] and sum(one.nbytes for one in parts[-1].values()) + each.nbytes > limit:
            parts.append({})
        parts[-1][name] = each
    return {
        folder / f"model-{at:05}-of-{len(parts):05}.safetensors": part
        for at, part in enumerate(parts, 1)
    }


def _scratch_tensor(request: str, folder: Path, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of a meta tensor, in a memory-mapped file without a name."""
    if like.nbytes < 1 << 16:  # small tensors are assembled in memory
        return torch.empty_like(like, device="cpu")
    with write_errors(request), tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            # On a full disk, writing to the mapping would kill this process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
        name = f"/dev/fd/{file.fileno()}"  # the mapping outlives the descriptor
        return torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype).view(
            like.shape
        )


def _model_entry(request: str, content: State, key: str | None) -> str:
    """The name of the entry that is a model's state: a mapping of names to tensors and plain extra values."""
    models = []
    for name, entry in content.items():
        kinds = (
            {type(value) for value in entry.values()} if isinstance(entry, Mapping) else set[type]()
        )
        if Tensor in kinds and not any(issubclass(kind, Mapping | list | tuple) for kind in kinds):
            models.append(name)
    chosen = [name for name in models if key in (None, name)]
    if len(chosen) == 1:
        return chosen[0]
    problem = f"of its entries, {len(models) or 'none'} can be a model; --key names none of them"
    raise ConfigurationError(request, problem, join_names(map(repr, models)))


def _write_rank(
    folder: Location, save: str, rank: int, tensors: dict[str, Tensor], per_rank: State | None
) -> _Files:
    """Write the data files of one rank."""
    parts: defaultdict[int, dict[str, tuple[list[int], Tensor]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        chunks = [chunk for chunk in local_chunks(tensor) if rank == 0 or chunk[1].numel()]
        for number, chunk in enumerate(chunks if _is_writer(tensor, rank) else ()):
            parts[number][name] = chunk
    files: _Files = {}
    for number, part in parts.items():
        name = f"rank-{rank:05}{f'-{number}' if number else ''}-{save}.safetensors"
        with _data_file(folder, name) as file:
            files[name] = write_safetensors(file, part)
    if per_rank:
        name = f"rank-{rank:05}-{save}.json"
        with _data_file(folder, name) as file:
            text = json.dumps(to_json(dict(per_rank)), allow_nan=False).encode()
            file.write(text)
            files[name] = zlib.crc32(text), {}
    return files


@contextmanager
def _data_file(folder: Location, name: str) -> Iterator[BinaryIO]:
    if isinstance(folder, RemotePath):
        with (folder / name).replace() as file:
            yield file
        return
    with open(folder / f"{name}.tmp", "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _is_writer(tensor: Any, rank: int) -> bool:
    """Whether this rank writes its part of a tensor: one replica is written, and full tensors by rank 0.

    A tensor on a submesh has a replica on each parallel submesh.
    """
    if not hasattr(tensor, "device_mesh"):
        return rank == 0
    place = tensor.device_mesh.get_coordinate() if 0 in tensor.device_mesh.mesh else None
    return place is not None and not any(
        number
        for number, placement in zip(place, tensor.placements, strict=True)
        if placement.is_replicate()
    )


@contextmanager
def _replace_folder(request: str, path: Location) -> Iterator[tuple[Location, str, BinaryIO]]:
    """Yield a folder to fill, the save's ID, and the index file to write last; see ``[Note: commit of a folder]``.

    If several processes fill the folder, one of them calls this. When the block raises, the checkpoint is unchanged.

    Raises:
        CheckpointError: ``path`` is a file, its index is not fabric's, or the file system refuses.
    """
    target = path if isinstance(path, RemotePath) else Path(os.path.realpath(path))
    is_new = not target.exists()
    if not is_new and not target.is_dir():
        raise CheckpointError(request, "there is a file of that name", "the path of a folder")
    if (target / INDEX).is_file():
        read_index(request, target)  # an index that is not fabric's is not replaced
    try:
        with atomic_write(target / INDEX) as index:
            if not is_new:
                clean(target)
            elif isinstance(target, Path):
                sync_folder(target.parent)
            yield target, index.name.split(".")[-2], index
        is_new = False
    finally:
        # Files that cannot be removed or renamed now are still found, and the next save tries again.
        with suppress(OSError):
            clean(target)
            if is_new:
                target.rmdir()  # fails if it holds anything else


def remove_folder(folder: Location) -> None:
    """Delete the files of all saves in a folder, and the folder unless it holds anything else."""
    with suppress(FileNotFoundError):
        # First, so that an interrupted removal leaves no checkpoint.
        (folder / INDEX).unlink()
    clean(folder)
    with suppress(OSError):
        folder.rmdir()


def clean(folder: Location) -> None:
    """Finish the last commit, and remove the files of other saves, except those that a process is writing."""
    ended: list[tuple[Location, str]] = []
    for entry in folder.iterdir():
        found = DATA_NAME.fullmatch(entry.name)
        writer = folder / f".{INDEX}.{found[1]}.tmp" if found else folder
        if found and (isinstance(writer, RemotePath) or (entry.is_file() and not writer.exists())):
            ended.append((entry, found[1]))
    # Read last: another process may have committed a save in the meantime.
    current = (
        read_index("save a sharded checkpoint", folder)[0] if (folder / INDEX).is_file() else ""
    )
    for entry, save in ended:
        with suppress(FileNotFoundError):  # another process has done it
            if save != current:
                entry.unlink()
            elif isinstance(entry, Path) and entry.suffix == ".tmp":
                os.replace(entry, entry.with_suffix(""))


def _write_index(index: BinaryIO, save: str, content: dict[str, Any]) -> None:
    """Write the index as JSON with a checksum. The first line has the format, version, save ID and checksum."""
    body = json.dumps(content, allow_nan=False)[1:].encode()
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "save": save,
        "crc32": zlib.crc32(save.encode() + body),
    }
    index.write(json.dumps(header)[:-1].encode() + b",\n" + body)
