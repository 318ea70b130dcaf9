"""Saves of a module to a folder that Hugging Face's libraries read, by all ranks of a job."""

import copy
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn

from fabric._torch import is_dtensor, uncompiled
from fabric.checkpoint.adapters import adapter_names, adapters_of
from fabric.checkpoint.agreement import run_on_all_ranks
from fabric.checkpoint.atomic import sync_folder, write_errors
from fabric.checkpoint.encoding import tensor_bytes
from fabric.checkpoint.full_tensors import BUCKET_BYTES, ShardGatherer
from fabric.checkpoint.pretrained import (
    INDEX_OF_WEIGHTS,
    check_shard_size,
    drop_tied_names,
    encode_index,
    group_by_size,
    weights_name,
)
from fabric.checkpoint.safetensors import encode_header
from fabric.checkpoint.sharded import context_on_one_rank, run_with_write_errors_on_all_ranks
from fabric.checkpoint.state import StateDicts
from fabric.checkpoint.storage import locate, require_folder
from fabric.communicators import Communicator
from fabric.errors import CheckpointError

__all__ = ["PretrainedSave"]

T = TypeVar("T")
_AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class _WeightsFile:
    """A file of weights.

    Attributes:
        name: the name of the file.
        tensors: meta tensors of the full shapes, by name, in the order of their values in the file.
        writer: the rank that writes the file.
    """

    name: str
    tensors: dict[str, Tensor]
    writer: int


# [Note: a folder of weights]
# Rank 0 makes a temporary folder beside the target. Each rank writes some of its files: for every
# tensor, all ranks gather the shards, and one rank writes the values. Rank 0 adds the config and
# the index, and renames the folder to the target. So the target has all files or does not exist.
# Rank 0 holds a lock on the temporary folder, and the next save to the same target removes a
# temporary folder that can be locked.
@dataclass(frozen=True)
class PretrainedSave:
    """A save of a module to a folder of weights.

    Args:
        communicator: all ranks of the job.
        state_dicts: reads the module.
        gatherer: gathers the shards of the module.
        request: the user's request, a text for errors.
    """

    communicator: Communicator
    state_dicts: StateDicts
    gatherer: ShardGatherer
    request: str

    def save(
        self, module: nn.Module, user_module: nn.Module, path: _AnyPath, max_shard_gb: float
    ) -> None:
        """Write the module's weights, and its config if it has one. Collective.

        Args:
            module: the set-up module, which may be sharded.
            user_module: the module that the user passed to ``fabric.setup``.
            path: the folder, where nothing is yet.
            max_shard_gb: the largest size of a file in GB.
        """
        weights = run_on_all_ranks(
            self.communicator, self.request, partial(self._weights_to_save, module, max_shard_gb)
        )
        # PEFT writes adapters on rank 0: they have a format of their own, and are small.
        adapters = adapters_of(user_module)
        files: list[_WeightsFile] = []
        if not adapters:
            files = self._plan_files(weights, max_shard_gb)
        # The files are written into a temporary folder. On rank 0 the end of the block renames it
        # to ``path``, and an error removes it.
        with self._context_on(0, partial(_new_folder, self.request, path)) as folder:
            folder = self.communicator.broadcast_object(folder, 0)
            assert folder is not None, "rank 0 returns the folder, or raises"
            for file in files:
                self._write_file(folder, file, weights)
            if adapters:
                self._write_adapters(folder, user_module, weights, adapters)
            # Not run_with_write_errors_on_all_ranks(), which would report an error of the user's
            # config as an error of the file system.
            run_on_all_ranks(
                self.communicator, self.request, partial(self._finish, folder, files, user_module)
            )

    def _context_on(
        self, rank: int, make_context: Callable[[], AbstractContextManager[T]]
    ) -> AbstractContextManager[T | None]:
        """Return a context of all ranks that enters ``make_context()`` on the rank ``rank``.

        Its value is the value of ``make_context()`` on this rank, and None on other ranks. An
        error at its begin or end is raised on all ranks. Collective.
        """
        return context_on_one_rank(self.communicator, rank, self.request, make_context)

    def _weights_to_save(self, module: nn.Module, max_shard_gb: float) -> dict[str, Tensor]:
        """Return the tensors of a module by name, sharded or not, and tied weights once.

        ``max_shard_gb`` is the user's argument, which is checked.

        Raises:
            ConfigurationError: the module has no tensors, or a meta tensor; or ``max_shard_gb`` is
                not positive.
        """
        check_shard_size(max_shard_gb)
        weights = self.state_dicts.read_module_tensors(self.request, module)
        return drop_tied_names(module, weights)

    def _plan_files(self, weights: Mapping[str, Tensor], max_shard_gb: float) -> list[_WeightsFile]:
        """Return the files to write, the same on all ranks.

        If tensors are sharded, all ranks write files in turn. Otherwise rank 0 writes all files,
        since it has all values, and other nodes then need no access to the folder.
        """
        is_sharded = any(map(is_dtensor, weights.values()))
        num_writers = 1
        if is_sharded:
            num_writers = self.communicator.size
        # Meta tensors have the full shapes of the weights, and take no memory.
        meta_tensors: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            meta_tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        max_bytes = max_shard_gb * 1e9  # decimal GB, as in Hugging Face's libraries
        groups = group_by_size(meta_tensors, max_bytes)
        if len(groups) == 1:
            return [_WeightsFile("model.safetensors", groups[0], writer=0)]
        files: list[_WeightsFile] = []
        for number, group in enumerate(groups):
            name = weights_name(number + 1, len(groups))
            files.append(_WeightsFile(name, group, writer=number % num_writers))
        return files

    def _write_file(self, folder: Path, file: _WeightsFile, weights: Mapping[str, Tensor]) -> None:
        """Write one file. Collective: all ranks gather the values that one rank writes."""
        with self._context_on(file.writer, partial(_new_file, folder, file)) as output:
            tensors = {name: weights[name] for name in file.tensors}
            # gather() yields the tensors in the order of ``tensors``, which is their order in the
            # header. On ranks other than the writer, ``output`` and ``full`` are None, and nothing
            # is written.
            for _, full in self.gatherer.gather(tensors, BUCKET_BYTES, dst=file.writer):
                run_with_write_errors_on_all_ranks(
                    self.communicator, self.request, partial(_write_values, output, full)
                )

    def _write_adapters(
        self,
        folder: Path,
        user_module: nn.Module,
        weights: Mapping[str, Tensor],
        adapters: list[str],
    ) -> None:
        """Have PEFT write the adapters of a model on rank 0. Collective.

        Only the tensors of the adapters are gathered.

        Args:
            folder: the folder to write to.
            user_module: the module that the user passed to ``fabric.setup``.
            weights: the tensors of the module by name, possibly sharded.
            adapters: the names of the adapters.
        """

        # Rank 0 decides for all ranks, since all ranks have to gather the same tensors.
        def find_names_on_first_rank() -> list[str]:
            names: set[str] = set()
            if self.communicator.rank == 0:
                for adapter in adapters:
                    name_by_saved_name = adapter_names(user_module, weights, adapter)
                    names.update(name_by_saved_name.values())
            return sorted(names)

        names = run_on_all_ranks(self.communicator, self.request, find_names_on_first_rank)
        names = self.communicator.broadcast_object(names, 0)
        adapter_weights = {name: weights[name] for name in names}
        full_tensors = self.gatherer.copy_to_first_rank(adapter_weights)

        def save_on_first_rank() -> None:
            if self.communicator.rank == 0:
                module: Any = uncompiled(user_module)
                module.save_pretrained(folder, state_dict=full_tensors)

        run_on_all_ranks(self.communicator, self.request, save_on_first_rank)

    def _finish(self, folder: Path, files: list[_WeightsFile], user_module: nn.Module) -> None:
        """Add the index and the config on rank 0, and check that all files are there.

        Afterwards the temporary folder is complete and on the disk, and can be renamed. The other
        ranks do nothing.
        """
        if self.communicator.rank != 0:
            return
        # There are no files if PEFT has written adapters.
        if files:
            _check_files(self.request, folder, files)
            with write_errors(self.request):
                _write_index(folder, files)
            # Outside of write_errors(): an error of the user's config is no error of the disk.
            _save_config(folder, user_module, files)
        with write_errors(self.request):
            _sync_files(folder)


@contextmanager
def _new_file(folder: Path, file: _WeightsFile) -> Iterator[BinaryIO]:
    """Create a file of weights with its header, and yield it. After the block it is on the disk.

    The block writes the values of the tensors.
    """
    path = folder / file.name
    with path.open("xb") as output:
        output.write(encode_header(file.tensors))
        yield output
        output.flush()
        os.fsync(output.fileno())


def _write_values(output: BinaryIO | None, tensor: Tensor | None) -> None:
    """Write the values of a full tensor. Do nothing if another rank writes the file."""
    if output is not None:
        assert tensor is not None, "the rank that writes the file gets the tensors"
        output.write(tensor_bytes(tensor))


def _check_files(request: str, folder: Path, files: list[_WeightsFile]) -> None:
    """Raise a CheckpointError unless rank 0 finds all files in the folder, with their full sizes.

    ``request`` is the user's request, a text for the error.
    """
    for file in files:
        size = len(encode_header(file.tensors))
        for tensor in file.tensors.values():
            size += tensor.nbytes
        path = folder / file.name
        # On some network file systems, rank 0 may see a file before it sees all of its content.
        is_complete = path.is_file() and path.stat().st_size == size
        if not is_complete:
            raise CheckpointError(
                request,
                problem=f"rank {file.writer} wrote {file.name}, which rank 0 does not find",
                expected="a folder on a file system that all ranks share",
            )


def _write_index(folder: Path, files: list[_WeightsFile]) -> None:
    """Write the index of several files. A single file has none."""
    if len(files) == 1:
        return
    file_names: dict[str, str] = {}
    total_bytes = 0
    for file in files:
        for name, tensor in file.tensors.items():
            file_names[name] = file.name
            total_bytes += tensor.nbytes
    (folder / INDEX_OF_WEIGHTS).write_bytes(encode_index(file_names, total_bytes))


def _save_config(folder: Path, user_module: nn.Module, files: list[_WeightsFile]) -> None:
    """Write the config and the generation config of a model of transformers.

    Other modules have no config. ``files`` are the files of the weights, whose dtype the config
    names.
    """
    module: Any = uncompiled(user_module)
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    # The model's own save_pretrained() sets these fields, too. from_pretrained() reads them to
    # build the same model.
    config = copy.deepcopy(config)
    # FSDP replaces the class of a module by a subclass whose name has the prefix "FSDP".
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    dtype = _first_floating_dtype(files)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    generation_config: Any = getattr(module, "generation_config", None)
    if hasattr(generation_config, "save_pretrained"):
        generation_config.save_pretrained(folder)


def _first_floating_dtype(files: list[_WeightsFile]) -> torch.dtype | None:
    for file in files:
        for tensor in file.tensors.values():
            if tensor.is_floating_point():
                return tensor.dtype
    return None


def _sync_files(folder: Path) -> None:
    """Wait until all files below a folder, and their names, are on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


# See [Note: a folder of weights].
@contextmanager
def _new_folder(request: str, path: _AnyPath) -> Iterator[Path]:
    """Yield a temporary folder that becomes the folder ``path`` if the block raises no error.

    Rank 0 calls it. ``request`` is the user's request, a text for errors.

    Raises:
        CheckpointError: there is something at ``path``, or ``path`` is remote.
    """
    target = locate(path)
    if not isinstance(target, Path):
        problem = "an object store cannot rename a folder, so it could be left incomplete"
        suggestion = "a local folder, which is uploaded when it is complete"
        raise CheckpointError(request, problem, suggestion=suggestion)
    target = Path(os.path.realpath(target))
    _refuse_existing(request, target)
    require_folder(request, target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The lock tells _remove_abandoned() of another save that this save is running. On a file
        # system without locks, the save goes on without one.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
        # Checked again: another process may have made the target in the meantime.
        _refuse_existing(request, target)
        os.rename(folder, target)
        sync_folder(target.parent)
    finally:
        os.close(descriptor)
        # After an error, removes the temporary folder. After a success, there is no folder of this
        # name any more: os.rename() gave it another name.
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_existing(request: str, target: Path) -> None:
    """Raise a CheckpointError if there is something at ``target``, except an empty folder."""
    if not target.exists():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    removal = "shutil.rmtree(path)" if target.is_dir() else "os.remove(path)"
    raise CheckpointError(
        request,
        problem="there is something of that name, and files that stay there would be read too",
        expected="a path where nothing is",
        suggestion=f"another path, or {removal} on rank 0 and fabric.barrier() before",
    )


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary folders that killed saves to the same target left behind."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.tmp")
    for path in target.parent.iterdir():
        if not pattern.fullmatch(path.name) or not path.is_dir():
            continue
        # After an OSError the folder stays: a running save holds the lock, or the folder is gone.
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
