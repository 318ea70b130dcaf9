"""Contexts for building modules: on a device, in a dtype, and outside of the process's own memory.

[Note: Building for shards] Before sharding, every rank builds the real model on the CPU, with the
same operations in the same order as a plain loop, so that values and generator states equal the
plain loop's, and code can read values. Only the memory differs: each new tensor of 64 KB or more is
in an unnamed memory-mapped file in the temporary folder. This takes disk space instead of memory,
for one model per rank of the node. Nothing is left however the process ends. ``setup`` shards one
FSDP module after another, and frees the files of each.

An empty build fills values with NaN, so that a first step without a checkpoint is an error.

Where no values are needed, parameters of 64 KB or more become meta tensors when a module registers
them: in an empty build, and on ranks that receive rank 0's values. Everything else is real, such as
tables in buffers, which no checkpoint may hold.
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
from functools import partial
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

# Bytes. Smaller tensors stay in ordinary memory.
_SMALLEST_MAPPED_BYTES = 1 << 16
# Bytes of mapped tensors that may be used before unused pages are given back.
_RESIDENT = 1 << 25
_UNINITIALIZED = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


@contextmanager
def created_on(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False
) -> Iterator[None]:
    """Make new tensors on ``device`` and new floating tensors in ``dtype`` within this context.

    Args:
        device: the device. Explicit ``device=`` arguments take precedence.
        dtype: the default floating dtype. None leaves torch's default.
        empty: make ``uniform_``, ``normal_`` and ``kaiming_uniform_`` of ``torch.nn.init``, which
            the common layers use, fill in NaN. torch does not let other functions be skipped.
            Constants are still filled in.
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
    """Puts new CPU tensors of 64 KB or more in unnamed files; see ``[Note: Building for shards]``.

    Args:
        warn: whether to warn if the temporary folder is itself in memory (tmpfs).

    Raises:
        UsageError: there is no room in that folder. The constructor raises it if there is none at
            all.
    """

    def __init__(self, warn: bool) -> None:
        DispatchMode.__init__(self)
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._used_bytes = 0
        _unnamed_file(_SMALLEST_MAPPED_BYTES)  # for its error
        folder = tempfile.gettempdir()
        if warn and _is_in_memory(folder):
            warnings.warn(
                f"init_module() builds the model in {folder}, which is itself memory (tmpfs). Name "
                "a folder on a disk in the environment of the job, such as TMPDIR=/var/tmp",
                stacklevel=2,
            )

    def __exit__(self, *error: Any) -> None:
        DispatchMode.__exit__(self, *error)
        self._release_pages()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if allocates_outputs(func):
            has_values = func not in _UNINITIALIZED
            result = map_tensors(partial(self._move_to_file, has_values), result)
        for leaf in flatten((args, result))[0]:
            if _is_large(leaf):
                self._used_bytes += leaf.nbytes
        if self._used_bytes >= _RESIDENT:
            self._release_pages()
        return result

    def _move_to_file(self, has_values: bool, tensor: Tensor) -> Tensor:
        """Return a new tensor in a file. Tensors that stay in memory are returned unchanged."""
        if not _is_large(tensor) or tensor.is_quantized:
            return tensor
        # A tensor that shares memory with others, or overlaps itself, stays in memory.
        has_own_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
        if not has_own_memory:
            return tensor
        storage = _unnamed_file(tensor.nbytes)
        self._storages.add(storage)
        mapped = tensor.new_empty(0)
        mapped.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if has_values:
            mapped.copy_(tensor)
        return mapped

    def _release_pages(self) -> None:
        for storage in self._storages:
            release_pages(storage)
        self._used_bytes = 0


class EmptyParameter(nn.Parameter):
    """A meta parameter that a checkpoint will fill. A class, since that survives ``deepcopy``."""


@contextmanager
def registered_on_meta(parameter: type[nn.Parameter]) -> Iterator[None]:
    """Make parameters of 64 KB or more meta tensors when a module registers them.

    Args:
        parameter: the type of the meta parameters.
    """
    replacements = WeakTensorKeyDictionary()

    def replace(module: nn.Module, name: str, tensor: nn.Parameter | None) -> Any:
        if not _is_large(tensor):
            return None
        if tensor not in replacements:  # modules may share a parameter
            replacement = parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
            vars(replacement).update(vars(tensor))
            replacements[tensor] = replacement
        return replacements[tensor]

    handle = register_module_parameter_registration_hook(replace)
    try:
        yield
    except Exception as error:
        error.add_note(
            'With empty_init=True, or with source="rank0" on other ranks, large parameters have no '
            "values."
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
        is_init = getattr(func, "__module__", None) == "torch.nn.init"
        if not is_init or func.__name__ == "constant_":
            return func(*args, **kwargs)
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        return fill_empty(tensor)


def fill_empty(tensor: Tensor) -> Tensor:
    """Fill a tensor that awaits a checkpoint with NaN, if its dtype has NaN. Return the tensor."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(math.nan)
    return tensor


def _is_large(value: Any) -> TypeIs[Tensor]:
    """Return whether this is a plain tensor of 64 KB or more in the memory of the CPU."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and value.nbytes >= _SMALLEST_MAPPED_BYTES


def _unnamed_file(nbytes: int) -> torch.UntypedStorage:
    """Return a storage in an unnamed memory-mapped file in the temporary folder."""
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # On a full disk, writing to a page would kill the process. macOS cannot reserve space.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            # The mapping outlives the descriptor.
            path = f"/dev/fd/{file.fileno()}"
            storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
            return storage
    except OSError as error:
        usage = os.statvfs(folder)
        free_bytes = usage.f_bavail * usage.f_frsize
        raise UsageError(
            f"init_module(): a file of {nbytes:,} bytes in {folder}",
            problem=f"{error.strerror}; there are {free_bytes:,} bytes free",
            expected="room for the whole model, once for each rank on the node",
            suggestion="TMPDIR=/a/folder/with/room in the environment of the job, or "
            "init_module(source='rank0') for one model",
        ) from error


def release_pages(storage: torch.UntypedStorage) -> None:
    """Take the pages of a mapped file out of the resident set; their contents stay."""
    # Python's mmap has madvise only for its own objects.
    madvise = ctypes.CDLL(None).madvise
    address = ctypes.c_void_p(storage.data_ptr())
    madvise(address, ctypes.c_size_t(storage.nbytes()), mmap.MADV_DONTNEED)


def _is_in_memory(folder: str) -> bool:
    """Return whether a folder's file system keeps its files in memory; false if unknown."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return False
    device = os.stat(folder).st_dev
    entry = rf"(?m)^\d+ \d+ {os.major(device)}:{os.minor(device)} .* - (tmpfs|ramfs) "
    return re.search(entry, mounts.read_text()) is not None
