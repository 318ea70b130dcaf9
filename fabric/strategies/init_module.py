"""Contexts for building modules: on a device, in a dtype, and in files instead of memory."""

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
    "SMALLEST_MAPPED_BYTES",
    "EmptyParameter",
    "MappedMemory",
    "SkipRandomInit",
    "created_on",
    "fill_empty",
    "registered_on_meta",
    "release_pages",
]

# In bytes. Smaller tensors stay in ordinary memory.
SMALLEST_MAPPED_BYTES = 1 << 16
# In bytes. Once operators have used this much memory of large tensors, the pages of the files are
# given back.
_RESIDENT_BYTES = 1 << 25
# The operators whose results have no values that would have to be copied to a file.
_OPERATORS_WITHOUT_VALUES = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
)


@contextmanager
def created_on(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False
) -> Iterator[None]:
    """Make new tensors on ``device`` and new floating tensors in ``dtype`` within this context.

    Args:
        device: the device. Explicit ``device=`` arguments take precedence.
        dtype: the default floating dtype. None leaves torch's default.
        empty: whether to fill tensors with NaN in place of random values. This holds for
            ``uniform_``, ``normal_`` and ``kaiming_uniform_`` of ``torch.nn.init``, which the
            common layers use.
    """
    with ExitStack() as stack:
        if dtype is not None:
            # Restores the present default at the end of the context.
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if empty:
            stack.enter_context(SkipRandomInit())
        # A torch.device is a context in which it is the default device.
        stack.enter_context(device)
        yield


# [Note: Building for shards]
# Before sharding, every rank builds the real model on the CPU, with the same operations in the same
# order as a plain loop. So the values and the states of generators equal those of the plain loop,
# and code can read values. Only the memory differs: each new tensor of 64 KB or more is in an
# unnamed memory-mapped file in the temporary folder. This takes disk space instead of memory, for
# one model per rank of the node. The system deletes unnamed files when the process ends, however it
# ends. `setup` shards one FSDP module after another, and frees the files of each.
#
# An empty build fills values with NaN, so that a first step without a checkpoint is an error.
#
# Some ranks need no values: all ranks in an empty build, and the ranks that receive rank 0's
# values. There, parameters of 64 KB or more become meta tensors when a module registers them.
# Everything else is real, such as tables in buffers, which may not be in a checkpoint.
class MappedMemory(DispatchMode):
    """A mode that puts new CPU tensors of 64 KB or more into unnamed memory-mapped files.

    Args:
        warn: whether to warn if the temporary folder is itself in memory (tmpfs).

    Raises:
        UsageError: there is no room for a tensor in the temporary folder. The constructor raises it
            if there is no room at all.
    """

    def __init__(self, warn: bool) -> None:
        """Check that the temporary folder has room. The mode starts when it is entered."""
        super().__init__()
        # The storages in files, which may be freed before the mode ends.
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        # The bytes of the large tensors that operators have read or returned since _release_pages()
        # was last called.
        self._used_bytes = 0
        # Called for its error: a folder without any room is refused before the model is built.
        _unnamed_file(SMALLEST_MAPPED_BYTES)
        folder = tempfile.gettempdir()
        if warn and _is_in_memory(folder):
            warnings.warn(
                f"init_module() builds the model in {folder}, which is itself memory (tmpfs). Name "
                "a folder on a disk in the environment of the job, such as TMPDIR=/var/tmp",
                stacklevel=2,
            )

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._release_pages()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and move its new outputs to files. torch calls it for every operator."""
        result = func(*args, **(kwargs or {}))
        # Outputs that are arguments, or views of arguments, keep their memory.
        if allocates_outputs(func):
            has_values = func not in _OPERATORS_WITHOUT_VALUES
            result = map_tensors(partial(self._move_to_file, has_values), result)
        # An operator brings the pages of its large arguments and results into memory.
        leaves, _ = flatten((args, result))
        for leaf in leaves:
            if _is_large(leaf):
                self._used_bytes += leaf.nbytes
        if self._used_bytes >= _RESIDENT_BYTES:
            self._release_pages()  # also sets _used_bytes to 0
        return result

    def _move_to_file(self, has_values: bool, tensor: Tensor) -> Tensor:
        """Return a tensor in a file in place of a new tensor.

        Args:
            has_values: whether the tensor has values, which are then copied to the file.
            tensor: an output of an operator, which no other code has seen yet.

        Returns:
            The tensor in a file. A tensor that has to stay in memory is returned unchanged.
        """
        if not _is_large(tensor) or tensor.is_quantized:
            return tensor
        # A view of a larger storage, or a tensor whose elements share memory, stays in memory.
        fills_its_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
        if not fills_its_storage:
            return tensor
        storage = _unnamed_file(tensor.nbytes)
        self._storages.add(storage)
        mapped = tensor.new_empty(0)
        mapped.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if has_values:
            mapped.copy_(tensor)
        return mapped

    def _release_pages(self) -> None:
        """Give the memory pages of all files back to the system. The values stay in the files."""
        for storage in self._storages:
            release_pages(storage)
        self._used_bytes = 0


class EmptyParameter(nn.Parameter):
    """A meta parameter whose values a checkpoint will fill in.

    The class marks the parameter. A copy by ``deepcopy`` has the class, too.
    """


@contextmanager
def registered_on_meta(parameter_class: type[nn.Parameter]) -> Iterator[None]:
    """Replace parameters of 64 KB or more by meta parameters when a module registers them.

    Args:
        parameter_class: the class of the meta parameters.
    """
    # The meta parameter of each replaced parameter. Modules that share a parameter have to share
    # the meta parameter, too.
    replacements = WeakTensorKeyDictionary()

    def replace_if_large(module: nn.Module, name: str, tensor: nn.Parameter | None) -> Any:
        """Return the meta parameter that torch registers in place of a large parameter.

        torch calls this hook for every parameter that any module registers. If the hook returns
        None, torch registers the parameter itself.
        """
        if not _is_large(tensor):
            return None
        if tensor not in replacements:
            meta_tensor = tensor.detach().to("meta")
            replacement = parameter_class(meta_tensor, requires_grad=tensor.requires_grad)
            # The attributes that the user has given to the parameter.
            vars(replacement).update(vars(tensor))
            replacements[tensor] = replacement
        return replacements[tensor]

    handle = register_module_parameter_registration_hook(replace_if_large)
    try:
        yield
    except Exception as error:
        # Most likely the user's code has read a value of a meta parameter.
        error.add_note(
            'With empty_init=True, or with source="rank0" on other ranks, large parameters have no '
            "values."
        )
        raise
    finally:
        handle.remove()


class SkipRandomInit(TorchFunctionMode):
    """A mode in which random functions of ``torch.nn.init`` fill tensors with NaN.

    These are the functions that a mode can intercept: ``uniform_``, ``normal_`` and
    ``kaiming_uniform_``, which the common layers use.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, or fill its tensor with NaN if it is a random initialization.

        torch calls this method for every function. The functions of ``torch.nn.init`` take a tensor
        as their first argument, fill it in place and return it.
        """
        kwargs = kwargs or {}
        is_init = getattr(func, "__module__", None) == "torch.nn.init"
        # Of the functions of torch.nn.init that get here, only constant_ draws no random values.
        if not is_init or func.__name__ == "constant_":
            return func(*args, **kwargs)
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        return fill_empty(tensor)


def fill_empty(tensor: Tensor) -> Tensor:
    """Fill a tensor in place with NaN, until a checkpoint fills it, and return the tensor.

    A tensor whose dtype has no NaN, such as int64, is not changed.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(math.nan)
    return tensor


def _is_large(value: Any) -> TypeIs[Tensor]:
    """Return whether a value is a plain tensor of 64 KB or more on the CPU.

    Only these tensors are replaced by a tensor in a file, or by a meta parameter. ``nn.Parameter``
    is plain, and instances of other subclasses of Tensor are not.
    """
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and value.nbytes >= SMALLEST_MAPPED_BYTES


def _unnamed_file(nbytes: int) -> torch.UntypedStorage:
    """Return a storage of this size in an unnamed memory-mapped file in the temporary folder.

    Raises:
        UsageError: there is no room in the folder.
    """
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserve the space now: on a full disk, writing to a page later would kill the process.
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, nbytes)
            # torch needs a path, and the file has no name. The mapping stays valid when the file is
            # closed.
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
    """Remove the pages of a mapped file from the process's memory. The values stay in the file."""
    # The madvise of Python's mmap module works only for mappings that the module itself has made.
    madvise = ctypes.CDLL(None).madvise
    # A mapping begins at a page, as madvise requires.
    address = ctypes.c_void_p(storage.data_ptr())
    # The result is ignored, since a failure only leaves the pages in memory.
    madvise(address, ctypes.c_size_t(storage.nbytes()), mmap.MADV_DONTNEED)


def _is_in_memory(folder: str) -> bool:
    """Return whether the file system of a folder keeps its files in memory, such as tmpfs.

    Returns False where the system does not tell, as on macOS.
    """
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return False
    device = os.stat(folder).st_dev
    # A line of mountinfo, such as "36 35 0:31 / /tmp rw shared:1 - tmpfs tmpfs rw".
    entry = rf"(?m)^\d+ \d+ {os.major(device)}:{os.minor(device)} .* - (tmpfs|ramfs) "
    return re.search(entry, mounts.read_text()) is not None
