"""Contexts in which modules are built: on a device, in a dtype, and outside of the process's own memory.

[Note: Building for shards] A model that is to be sharded is built for real, on the CPU, by every rank: the same
operations in the same order as in a plain loop, so that values and generator states are those of a plain loop, and code
that reads values can. Only the memory is another. A new tensor of 64 KB or more lies in a mapped file of its own that
has no name, in the folder for temporary files: disk in place of memory, one model for each rank of the node.
Nothing is left however the process ends. ``setup`` shards one FSDP module after another, and frees the files of each.

Where no values are needed, parameters of 64 KB or more become meta tensors when a module registers them: in an empty
build, and on ranks that receive those of rank 0. In an empty build everything else is real, such as tables in buffers,
which no checkpoint may hold.
"""

import ctypes
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fabric._torch import DispatchMode, allocates_outputs
from fabric.communicators import Communicator
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import flatten, map_tensors

__all__ = ["EmptyParameter", "MappedMemory", "built_for_shards", "check_source", "created_on", "receive_values"]

SMALLEST = 1 << 16  # bytes; what is smaller stays in ordinary memory
_RESIDENT = 1 << 25  # bytes that may be used before unused pages are given back
_UNINITIALIZED = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


@contextmanager
def created_on(device: torch.device, dtype: torch.dtype | None = None, empty: bool = False) -> Iterator[None]:
    """Within this context, new tensors are made on ``device`` and new floating ones in ``dtype``.

    Args:
        device: where to; explicit ``device=`` arguments win.
        dtype: default floating dtype; None leaves torch's default.
        empty: ``uniform_``, ``normal_`` and ``kaiming_uniform_`` of ``torch.nn.init``, through which the common layers
            draw their values, do nothing. torch lets no others be skipped; constants are still filled in.
    """
    with ExitStack() as stack:
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if empty:
            stack.enter_context(_WithoutInit())
        stack.enter_context(device)
        yield


def check_source(source: object) -> None:
    """Raise a ConfigurationError unless this says which ranks build the values of a model that is to be sharded."""
    if source not in ("every_rank", "rank0"):
        raise ConfigurationError(
            f"init_module(source={source!r})",
            "there is no such source of values",
            '"every_rank", where each rank builds the model, and "rank0", where the others receive the values',
            'fabric.init_module(source="rank0")',
        )


class MappedMemory(DispatchMode):
    """Within this mode, new CPU tensors of 64 KB or more lie in unnamed files; see ``[Note: Building for shards]``.

    It can be entered any number of times.
    """

    def __init__(self) -> None:
        DispatchMode.__init__(self)
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._used = 0

    def __contains__(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage() in self._storages

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if allocates_outputs(func):
            made = map_tensors(lambda tensor: self._mapped(tensor, func not in _UNINITIALIZED), made)
        self.use(*flatten((args, made))[0])
        return made

    def check_folder(self, warn: bool) -> None:
        """Raise where nothing can be written to the folder for temporary files; with ``warn``, warn where it is memory.

        Raises:
            UsageError: there is no room.
        """
        self._file(SMALLEST)
        if warn and _file_system(tempfile.gettempdir()) in ("tmpfs", "ramfs"):
            warnings.warn(
                f"init_module() builds the model in {tempfile.gettempdir()}, which is itself memory (tmpfs). Name a "
                "folder on a disk in the environment of the job, such as TMPDIR=/var/tmp",
                stacklevel=2,
            )

    def use(self, *objects: Any) -> None:
        """Count tensors that were read or written; after 32 MB pages are taken out of the resident set."""
        self._used += sum(each.nbytes for each in objects if isinstance(each, Tensor) and _is_large(each))
        if self._used >= _RESIDENT:
            self.release()

    def release(self) -> None:
        """Take the pages of all files out of the resident set; their contents stay."""
        advise = ctypes.CDLL(None).madvise
        for storage in self._storages:
            advise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), mmap.MADV_DONTNEED)
        self._used = 0

    def _mapped(self, made: Tensor, has_values: bool) -> Tensor:
        if type(made) is not Tensor or made.device.type != "cpu" or made.is_quantized or not _is_large(made):
            return made
        if made.untyped_storage().nbytes() != made.nbytes:  # it shares memory with others, or with itself
            return made
        storage = self._file(made.untyped_storage().nbytes())
        self._storages.add(storage)
        mapped = made.new_empty(0).set_(storage, made.storage_offset(), made.size(), made.stride())
        return mapped.copy_(made) if has_values else mapped

    def _file(self, nbytes: int) -> torch.UntypedStorage:
        folder = tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Without room a page that is written to ends the process. macOS cannot reserve any.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                # The mapping outlives the descriptor.
                name = f"/dev/fd/{file.fileno()}"
                return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8).untyped_storage()
        except OSError as error:
            room = os.statvfs(folder)
            raise UsageError(
                f"init_module(): a file of {nbytes:,} bytes in {folder}",
                f"{error.strerror}; there are {room.f_bavail * room.f_frsize:,} bytes free",
                "room for the whole model, once for each rank on the node",
                "TMPDIR=/a/folder/with/room in the environment of the job, or init_module(source='rank0'), which takes "
                "room for one model",
            ) from error


class EmptyParameter(nn.Parameter):
    """A meta parameter that a checkpoint is to fill. A class, since that survives ``deepcopy``."""


@contextmanager
def built_for_shards(
    memory: MappedMemory, dtype: torch.dtype | None, *, empty: bool, receives: bool, warn: bool
) -> Iterator[None]:
    """Within this context, modules are built as ``[Note: Building for shards]`` says.

    Args:
        memory: where the values are.
        dtype: default floating dtype; None leaves torch's default.
        empty: the values of parameters are left to a checkpoint.
        receives: this rank receives all values from rank 0.
        warn: whether to warn of scratch space that is itself memory.

    Raises:
        UsageError: there is no room.
    """
    with created_on(torch.device("cpu"), dtype, empty):
        if empty:
            context = _registered_on_meta(EmptyParameter, False, "With empty_init=True")
        elif receives:
            context = _registered_on_meta(nn.Parameter, True, 'With source="rank0", on the other ranks')
        else:
            memory.check_folder(warn)
            context = memory
        with context:
            yield
    memory.release()


@contextmanager
def _registered_on_meta(parameter: type[nn.Parameter], buffers: bool, reason: str) -> Iterator[None]:
    """Within this context, tensors of 64 KB or more become meta tensors when a module registers them.

    Args:
        parameter: the class of the parameters.
        buffers: whether buffers do as well.
        reason: why, for errors of code that reads their values.
    """
    replacements = WeakTensorKeyDictionary()

    def replace(module: nn.Module, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or is_lazy(tensor) or not (tensor.is_meta or _is_large(tensor)):
            return None
        if tensor.is_meta and (isinstance(tensor, parameter) or not isinstance(tensor, nn.Parameter)):
            return None
        if tensor not in replacements:
            replacement = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                replacement = parameter(replacement, requires_grad=tensor.requires_grad)
            vars(replacement).update(vars(tensor))
            replacements[tensor] = replacement
        return replacements[tensor]

    hook: Any = replace  # may return a replacement; torch annotates that it returns nothing
    handles = [register_module_parameter_registration_hook(hook)]
    if buffers:
        handles.append(register_module_buffer_registration_hook(hook))
    try:
        yield
    except Exception as error:
        error.add_note(f"{reason}, parameters of 64 KB or more are meta tensors, which have no values.")
        raise
    finally:
        for handle in handles:
            handle.remove()


def receive_values(
    communicator: Communicator, module: nn.Module, tensors: Sequence[Tensor], memory: MappedMemory
) -> None:
    """Give tensors rank 0's values and memory on the communicator's device. Collective.

    An :class:`EmptyParameter` gets memory that is not initialized. A meta tensor is replaced, wherever the module has
    it, and so is a parameter that goes to another device; any other tensor keeps its identity.

    Args:
        communicator: all ranks.
        module: the module that the tensors belong to.
        tensors: parameters and buffers, the same on every rank.
        memory: in which the module was built.
    """
    places = _places(module)
    copies: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.is_meta:
            value = torch.empty_like(tensor, device=communicator.device, requires_grad=False)
        else:
            value = tensor.detach().to(communicator.device).contiguous()
        if not isinstance(tensor, EmptyParameter):
            communicator.broadcast(value.view(-1).view(torch.uint8), 0)
        # A parameter is about to be copied into its shard; a buffer stays, and those that are views of others stay so.
        if tensor in memory and not isinstance(tensor, nn.Parameter) and value.device.type == "cpu":
            storage = tensor.untyped_storage()
            if storage not in copies:
                copies[storage] = storage.clone()
            own = tensor.new_empty(0).set_(copies[storage], tensor.storage_offset(), tensor.size(), tensor.stride())
            value = own.copy_(value)
        # An optimizer may hold the parameter: with its memory on the device, the whole model would be there.
        is_moved = isinstance(tensor, nn.Parameter) and value.device != tensor.device
        if is_moved:
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        if is_moved or tensor.is_meta:
            for owner, name in places[tensor]:
                setattr(owner, name, value)
        else:
            tensor.data = value
        memory.use(value)
    memory.release()


def _places(root: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """Where the parameters and buffers of a module are registered: the owner, and the name there."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(recurse=False, remove_duplicate=False):
                places.setdefault(tensor, []).append((module, name))
    return places


class _WithoutInit(TorchFunctionMode):
    """Makes no-ops of those random functions of torch.nn.init that a mode sees, which the common layers call."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ != "constant_":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _is_large(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes >= SMALLEST


def _file_system(folder: str) -> str:
    """The type of the file system that a folder is on, such as "tmpfs"; empty where it is not known."""
    mounts, device = Path("/proc/self/mountinfo"), os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = mounts.read_text().splitlines() if mounts.exists() else []
    return next((line.split(" - ")[1].split()[0] for line in lines if line.split()[2] == number), "")
