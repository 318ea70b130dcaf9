"""Contexts for building modules: on a device, in a dtype, and outside of the process's own memory.

[Note: Building for shards] Before sharding, every rank builds the real model on the CPU, with the same operations in
the same order as a plain loop, so that values and generator states equal the plain loop's, and code can read values.
Only the memory differs: each new tensor of 64 KB or more is in an unnamed memory-mapped file in the temporary folder.
This takes disk space instead of memory, for one model per rank of the node. Nothing is left however the process ends.
``setup`` shards one FSDP module after another, and frees the files of each.

An empty build fills values with NaN, so that a first step without a checkpoint is an error.

Where no values are needed, parameters of 64 KB or more become meta tensors when a module registers them: in an empty
build, and on ranks that receive rank 0's values. Everything else is real, such as tables in buffers, which may be in no
checkpoint.
"""

import ctypes
import math
import mmap
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import TypeIs

from fabric._torch import DispatchMode, allocates_outputs
from fabric.errors import UsageError
from fabric.tree import flatten, map_tensors

__all__ = [
    "EmptyParameter",
    "MappedMemory",
    "SkipRandomInit",
    "created_on",
    "fill_empty",
    "registered_on_meta",
    "release_pages",
]

SMALLEST = 1 << 16  # bytes; what is smaller stays in ordinary memory
_RESIDENT = 1 << 25  # bytes that may be used before unused pages are given back
_UNINITIALIZED = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


@contextmanager
def created_on(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False
) -> Iterator[None]:
    """Within this context, new tensors are made on ``device`` and new floating ones in ``dtype``.

    Args:
        device: the device; explicit ``device=`` arguments take precedence.
        dtype: default floating dtype; None leaves torch's default.
        empty: make ``uniform_``, ``normal_`` and ``kaiming_uniform_`` of ``torch.nn.init``, which the common layers
            use, fill in NaN. torch does not let others be skipped; constants are still filled in.
    """
    with ExitStack() as stack:
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if empty:
            stack.enter_context(SkipRandomInit())
        stack.enter_context(device)
        yield


class MappedMemory(DispatchMode):
    """Within this mode, new CPU tensors of 64 KB or more are in unnamed files; see ``[Note: Building for shards]``.

    Args:
        warn: whether to warn if the temporary folder is itself in memory (tmpfs).

    Raises:
        UsageError: there is no room in that folder; raised by the constructor if there is none at all.
    """

    def __init__(self, warn: bool) -> None:
        DispatchMode.__init__(self)
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._used = 0
        _unnamed_file(SMALLEST)
        folder = tempfile.gettempdir()
        if warn and _is_memory(folder):
            warnings.warn(
                f"init_module() builds the model in {folder}, which is itself memory (tmpfs). Name a folder on a disk "
                "in the environment of the job, such as TMPDIR=/var/tmp",
                stacklevel=2,
            )

    def __exit__(self, *error: Any) -> None:
        DispatchMode.__exit__(self, *error)
        self._release()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if allocates_outputs(func):
            made = map_tensors(
                lambda tensor: self._mapped(tensor, func not in _UNINITIALIZED), made
            )
        self._used += sum(each.nbytes for each in flatten((args, made))[0] if _is_large(each))
        if self._used >= _RESIDENT:
            self._release()
        return made

    def _mapped(self, made: Tensor, has_values: bool) -> Tensor:
        # If the sizes differ, it shares memory with other tensors, or overlaps itself.
        if (
            not _is_large(made)
            or made.is_quantized
            or made.untyped_storage().nbytes() != made.nbytes
        ):
            return made
        storage = _unnamed_file(made.nbytes)
        self._storages.add(storage)
        mapped = made.new_empty(0).set_(storage, made.storage_offset(), made.size(), made.stride())
        return mapped.copy_(made) if has_values else mapped

    def _release(self) -> None:
        for storage in self._storages:
            release_pages(storage)
        self._used = 0


class EmptyParameter(nn.Parameter):
    """A meta parameter to be filled from a checkpoint. A class, since that survives ``deepcopy``."""


@contextmanager
def registered_on_meta(parameter: type[nn.Parameter]) -> Iterator[None]:
    """Within this context, parameters of 64 KB or more become meta ones of this type when a module registers them."""
    replacements = WeakTensorKeyDictionary()

    def replace(module: nn.Module, name: str, tensor: nn.Parameter | None) -> Any:
        if not _is_large(tensor):
            return None
        if tensor not in replacements:
            replacements[tensor] = parameter(
                tensor.detach().to("meta"), requires_grad=tensor.requires_grad
            )
            vars(replacements[tensor]).update(vars(tensor))
        return replacements[tensor]

    handle = register_module_parameter_registration_hook(replace)
    try:
        yield
    except Exception as error:
        error.add_note(
            'With empty_init=True, or with source="rank0" on other ranks, large parameters have no values.'
        )
        raise
    finally:
        handle.remove()


class SkipRandomInit(TorchFunctionMode):
    """Makes the random functions of torch.nn.init that a mode can intercept fill in NaN."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ != "constant_":
            return fill_empty(kwargs["tensor"] if "tensor" in kwargs else args[0])
        return func(*args, **kwargs)


def fill_empty(tensor: Tensor) -> Tensor:
    """Fill a tensor that awaits a checkpoint with NaN, if its dtype has that."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(math.nan)
    return tensor


def _is_large(value: Any) -> TypeIs[Tensor]:
    """Whether this is a plain tensor of 64 KB or more in the memory of the CPU."""
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return is_plain and value.device.type == "cpu" and value.nbytes >= SMALLEST


def _unnamed_file(nbytes: int) -> Any:
    """A storage in an unnamed memory-mapped file in the temporary folder."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # On a full disk, writing to a page would kill the process. macOS cannot reserve space.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            # The mapping outlives the descriptor.
            return torch.UntypedStorage.from_file(
                f"/dev/fd/{file.fileno()}", shared=True, nbytes=nbytes
            )
    except OSError as error:
        room = os.statvfs(folder)
        raise UsageError(
            f"init_module(): a file of {nbytes:,} bytes in {folder}",
            f"{error.strerror}; there are {room.f_bavail * room.f_frsize:,} bytes free",
            "room for the whole model, once for each rank on the node",
            "TMPDIR=/a/folder/with/room in the environment of the job, or init_module(source='rank0') for one model",
        ) from error


def release_pages(storage: torch.UntypedStorage) -> None:
    """Take the pages of a mapped file out of the resident set; their contents stay."""
    advise = ctypes.CDLL(None).madvise
    advise(
        ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), mmap.MADV_DONTNEED
    )


def _is_memory(folder: str) -> bool:
    """Whether a folder is on a file system that keeps its files in memory; false if unknown."""
    mounts = Path("/proc/self/mountinfo")
    device = os.stat(folder).st_dev
    entry = rf"(?m)^\d+ \d+ {os.major(device)}:{os.minor(device)} .* - (tmpfs|ramfs) "
    return mounts.exists() and re.search(entry, mounts.read_text()) is not None
