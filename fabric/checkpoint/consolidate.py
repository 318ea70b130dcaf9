"""Conversion of a sharded checkpoint to one file, or to files of weights."""

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fabric.checkpoint.atomic import atomic_write, write_errors
from fabric.checkpoint.encoding import Chunk
from fabric.checkpoint.file import FullCheckpoint
from fabric.checkpoint.pretrained import (
    INDEX_OF_WEIGHTS,
    check_shard_size,
    encode_index,
    group_by_size,
    weights_name,
)
from fabric.checkpoint.safetensors import write_safetensors
from fabric.checkpoint.sharded import ShardedCheckpoint
from fabric.checkpoint.state import State, join_names
from fabric.checkpoint.storage import Location, locate
from fabric.errors import CheckpointError, ConfigurationError

__all__ = ["consolidate"]

_MAPPED_BYTES = 1 << 16  # smaller tensors are assembled in memory


def consolidate(
    directory: str | os.PathLike[str],
    output: Path | None = None,
    key: str | None = None,
    max_shard_gb: float | None = None,
) -> Path:
    """Write a sharded checkpoint to one file, or its weights to several files, in one process.

    Args:
        directory: the sharded checkpoint. It stays as it is.
        output: the file, which is replaced if it exists. By default ``directory`` with ``.pt``
            appended. With the suffix ``.safetensors`` the weights of one model are written,
            otherwise all entries, as :class:`fabric.checkpoint.FullCheckpoint` writes them.
        key: for weights, the entry that is the model. By default the only possible one.
        max_shard_gb: the largest size of a file in GB, to write weights to several files. Then
            ``output`` is a folder (by default ``directory`` with ``-weights`` appended) with the
            files and their index, as Hugging Face's libraries read them. A tensor that is larger
            gets a file of its own. By default one file is written.

    Returns:
        The file or folder that was written.

    Raises:
        CheckpointNotFoundError: there is no sharded checkpoint at ``directory``.
        CheckpointError: the checkpoint is damaged, or the file cannot be written, or the folder of
            weights exists. What was there before is untouched.
        ConfigurationError: ``key`` does not name a model, is missing although there are several
            models, or is given for a file that holds all entries. ``max_shard_gb`` is not positive.
    """
    if max_shard_gb is not None:
        check_shard_size(max_shard_gb)
    source = locate(directory)
    if output is None:
        output = _default_output(source, is_folder=max_shard_gb is not None)
    request = f"fabric consolidate {source} -o {output}"
    if key is not None:
        request += f" --key {key}"
    writes_folder = max_shard_gb is not None
    if writes_folder and output.exists():
        problem = f"{str(output)!r} exists, and weights that stay there would be read too"
        raise CheckpointError(request, problem)
    reader = ShardedCheckpoint().open(source)
    writes_weights = writes_folder or output.suffix == ".safetensors"
    names_to_write = list(reader.content)
    if writes_weights:
        names_to_write = [_model_entry(request, reader.content, key)]
    elif key is not None:
        problem = "--key chooses the model for weights alone; other files hold all entries"
        raise ConfigurationError(request, problem)
    output.parent.mkdir(parents=True, exist_ok=True)
    # load() calls allocate() with a meta tensor for each tensor. The scratch files are beside the
    # output, whose disk needs room for the output anyway.
    allocate = partial(_scratch_tensor, request, output.parent)
    # load() adds fabric's metadata as one more entry.
    entries = reader.load(names_to_write, allocate)
    if not writes_weights:
        FullCheckpoint().save(entries, output)
        return output
    [model_name] = names_to_write
    tensors = _tensors_of_model(request, entries[model_name])
    if max_shard_gb is None:
        _write_weights(request, output, tensors)
    else:
        max_bytes = max_shard_gb * 1e9  # decimal GB, as in Hugging Face's libraries
        _write_weights_folder(request, output, tensors, max_bytes=max_bytes)
    return output


def _default_output(source: Location, is_folder: bool) -> Path:
    """Return the path to write to if the user gave none.

    The path is beside the checkpoint. For a remote checkpoint, the path is in the working folder.

    Args:
        source: the sharded checkpoint.
        is_folder: whether the output is a folder of weights.
    """
    base = source
    if not isinstance(source, Path):
        base = source.name  # abspath() puts the name into the working folder
    suffix = "-weights" if is_folder else ".pt"
    return Path(os.path.abspath(base) + suffix)


def _model_entry(request: str, content: State, key: str | None) -> str:
    """Return the name of the entry that is the state of a model.

    Args:
        request: the user's request, a text for the error.
        content: the entries of the checkpoint by name, with meta tensors.
        key: the name that the user has given. None for the only entry that can be a model.

    Raises:
        ConfigurationError: the entry ``key`` cannot be a model, or ``key`` is None and not exactly
            one entry can be a model.
    """
    models = []
    for name, entry in content.items():
        if isinstance(entry, Mapping) and _is_model_state(entry):
            models.append(name)
    candidates = models
    if key is not None:
        candidates = [name for name in models if name == key]
    if len(candidates) == 1:
        return candidates[0]
    count = len(models) or "none"
    problem = f"of its entries, {count} can be a model"
    if key is not None:
        problem += f"; --key names {key!r}, which is none of them"
    elif models:
        problem += "; --key has to name one of them"
    raise ConfigurationError(request, problem, expected=join_names(map(repr, models)))


def _is_model_state(entry: Mapping[Any, Any]) -> bool:
    """Return whether a mapping looks like the state dict of a module.

    A state dict of a module contains tensors, and may contain plain extra values. Mappings and
    sequences are signs of another object: the state dict of an optimizer contains them.
    """
    # The reader of a checkpoint returns tensors of exactly this type.
    has_tensor = any(type(value) is Tensor for value in entry.values())
    has_collection = any(isinstance(value, Mapping | list | tuple) for value in entry.values())
    return has_tensor and not has_collection


def _tensors_of_model(request: str, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors in the state of a model, without its extra values.

    Raises:
        ConfigurationError: a tensor is called "__metadata__", which safetensors does not allow.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in entry.items():
        if isinstance(value, Tensor):
            tensors[name] = value
    if "__metadata__" in tensors:
        raise ConfigurationError(
            request, problem="safetensors keeps the name '__metadata__' for itself"
        )
    return tensors


# [Note: bounded memory]
# To convert a folder, tensors are assembled in unnamed scratch files that are mapped into memory.
# The system can write the pages of a mapped file to the disk when memory is short, and an unnamed
# file vanishes however the process ends. Only one chunk of one tensor has to be in memory at a
# time. The cost is disk space for a second copy of the checkpoint.
def _scratch_tensor(request: str, folder: Path, meta: Tensor) -> Tensor:
    """Allocate a tensor in a memory-mapped file without a name.

    The system can write the tensor to the disk when memory is short. The file vanishes with the
    tensor, however the process ends.

    Args:
        request: the user's request, a text for errors.
        folder: the folder of the file.
        meta: a meta tensor with the shape and dtype of the result. If it is small, the result is
            allocated in memory instead.
    """
    if meta.nbytes < _MAPPED_BYTES:
        return torch.empty_like(meta, device="cpu")
    with write_errors(request), tempfile.TemporaryFile(dir=folder) as file:
        # macOS has no posix_fallocate().
        if hasattr(os, "posix_fallocate"):
            # Raises if the disk is full. Without this call, a write to the mapping would then kill
            # this process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, meta.nbytes)
        # from_file() needs a path. The file has no name, but its descriptor has this path. The
        # mapping remains valid after the file is closed.
        descriptor_path = f"/dev/fd/{file.fileno()}"
        tensor = torch.from_file(descriptor_path, shared=True, size=meta.numel(), dtype=meta.dtype)
        return tensor.view(meta.shape)


def _write_weights(request: str, path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file of full tensors, which ``tensors`` has by name.

    The format cannot express that tensors share memory, so tied tensors are each written in full.
    ``request`` is the user's request, a text for errors.
    """
    chunks = {}
    for name, tensor in tensors.items():
        # The full tensor is a single chunk that begins at its first element.
        chunks[name] = Chunk(offsets=[0] * tensor.dim(), tensor=tensor)
    # write_errors() is the inner context: its error says that nothing was replaced, so it has to
    # end before atomic_write() replaces the file.
    with atomic_write(path) as file, write_errors(request):
        write_safetensors(file, chunks)


def _write_weights_folder(
    request: str, folder: Path, tensors: Mapping[str, Tensor], max_bytes: float
) -> None:
    """Write files of weights and their index, named as Hugging Face's libraries expect.

    Args:
        request: the user's request, a text for errors.
        folder: the folder. It does not exist, and is created.
        tensors: the full tensors by name.
        max_bytes: the largest size of a file, unless the file has only one tensor.
    """
    groups = group_by_size(tensors, max_bytes)
    file_names: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file_name = weights_name(number, len(groups))
        _write_weights(request, folder / file_name, group)
        file_names.update(dict.fromkeys(group, file_name))
    # The index comes last: without it, the libraries do not read an incomplete folder.
    with atomic_write(folder / INDEX_OF_WEIGHTS) as file:
        file.write(encode_index(file_names))
