"""One file of a sharded checkpoint.

[Note: bounded memory] The tensors are assembled in a scratch file that is mapped into memory and has no name, so that
the system can move them to the disk and nothing is left of it, however the process ends. What has to be in memory at
once is one part of one tensor. The price is room on the disk for the checkpoint twice.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from fabric.checkpoint.atomic import atomic_write, write_errors
from fabric.checkpoint.file import FullCheckpoint
from fabric.checkpoint.sharded import ALIGNMENT, ShardedCheckpoint, safetensors_header
from fabric.checkpoint.state import METADATA_KEY, tensor_bytes
from fabric.checkpoint.stored import StoredCheckpoint
from fabric.errors import CheckpointError, ConfigurationError
from fabric.tree import map_tensors

__all__ = ["consolidate", "progress_line"]

_WEIGHTS_ONLY = ".safetensors"


def consolidate(
    directory: Path,
    output: Path | None = None,
    *,
    key: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the content of a sharded checkpoint to one file, in one process.

    Args:
        directory: the sharded checkpoint; it stays as it is.
        output: the file, which is replaced if it exists; None for ``directory`` with ``.pt`` behind it. With the suffix
            ``.safetensors`` the weights of one model are written, else all entries, as
            :class:`fabric.checkpoint.FullCheckpoint` writes them.
        key: for ``.safetensors``, which entry is the model; None for the only one that can be.
        progress: called after each tensor with how many bytes have been read, and how many there are.

    Returns:
        The file that was written.

    Raises:
        CheckpointNotFoundError: there is no sharded checkpoint at ``directory``.
        CheckpointError: it is damaged, or the file cannot be written; what was there before is untouched.
        ConfigurationError: ``key`` is not an entry that is a model, is missing where there are several, or is given for
            a file that holds all entries.
    """
    directory = Path(directory)
    output = Path(f"{os.path.abspath(directory)}.pt") if output is None else Path(output)
    request = f"fabric consolidate {directory} -o {output}" + (f" --key {key}" if key else "")
    stored = ShardedCheckpoint().open(directory)
    described = stored.content
    if output.suffix == _WEIGHTS_ONLY:
        key = _model_entry(request, described, key)
        described = {key: described[key]}
    elif key is not None:
        raise ConfigurationError(request, "--key chooses the model for .safetensors; other files hold all entries")
    output.parent.mkdir(parents=True, exist_ok=True)
    loaded = _read(request, stored, described, output.parent, progress)
    if key is not None:
        _save_weights(request, loaded[key], output)
    else:
        metadata = stored.metadata | stored.read_values()
        FullCheckpoint().save({**loaded, **({METADATA_KEY: metadata} if metadata else {})}, output)
    return output


def progress_line(command: str, stream: TextIO) -> Callable[[int, int], None]:
    """A function for ``progress`` that prints a line for each tenth."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        tenths = 10 * done // max(1, total)
        if tenths > shown:
            shown = tenths
            print(f"{command}: read {done / 1e6:.1f} of {total / 1e6:.1f} MB", file=stream, flush=True)

    return show


def _read(
    request: str,
    stored: StoredCheckpoint,
    described: dict[str, Any],
    scratch: Path,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    tensors: dict[int, Tensor] = {}  # by identity: what is one tensor in the checkpoint is one here
    map_tensors(lambda tensor: tensors.setdefault(id(tensor), tensor) if tensor.is_meta else tensor, described)
    room = dict(zip(tensors, _scratch_tensors(request, list(tensors.values()), scratch), strict=True))
    content, targets = stored.prepare(map_tensors(lambda tensor: room.get(id(tensor), tensor), described))
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def count(copied: int) -> None:
        nonlocal done
        done += copied
        progress(done, total)

    progress(0, total)
    stored.read(targets, count)
    return content


def _scratch_tensors(request: str, like: list[Tensor], folder: Path) -> list[Tensor]:
    """Tensors of the shapes and dtypes of ``like``, each with a storage of its own in a mapped file without a name."""
    starts, size = [], 0
    for tensor in like:
        starts.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    allocate = getattr(os, "posix_fallocate", None)
    if size == 0 or allocate is None:
        # Without room that is set aside, a full disk would kill this process when it writes into the mapping.
        return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like]
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            allocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        problem = f"there is no room to assemble {size / 1e6:.0f} MB in {str(folder)!r}: {error}"
        raise CheckpointError(request, problem, "a folder with room for the checkpoint twice") from error
    # A buffer of no bytes is refused.
    return [
        torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if tensor.nbytes
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, start in zip(like, starts, strict=True)
    ]


def _model_entry(request: str, described: Mapping[str, Any], key: str | None) -> str:
    """The name of the entry that holds a model's weights."""
    models = [name for name, content in described.items() if _is_model(content)]
    if key is None and len(models) == 1:
        return models[0]
    if key in models:
        return key
    problem = f"the entry {key!r} is not a model's state" if key in described else f"there is no entry {key!r}"
    if key is None:
        problem = f"{len(models) or 'none'} of its entries can be a model; choose by --key"
    raise ConfigurationError(request, problem, ", ".join(map(repr, models)) or "an entry with names of tensors")


def _is_model(content: Any) -> bool:
    """Whether names stand for tensors in it; beside them a module's state may hold extra values of its own."""
    return (
        isinstance(content, Mapping)
        and all(isinstance(name, str) for name in content)
        and any(isinstance(value, Tensor) for value in content.values())
        and not any(isinstance(value, Mapping | list | tuple) for value in content.values())
    )


def _save_weights(request: str, weights: Mapping[str, Any], output: Path) -> None:
    # The format knows no shared memory; what is one tensor here is two there.
    tensors = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    header, starts = safetensors_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    with atomic_write(output) as file, write_errors(request):
        file.write(header)
        for name in starts:
            file.write(tensor_bytes(tensors[name]))
