"""Private names of torch that only a tool needs, with reasons (tests/test_torch_names.py)."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import RecordScope, _ExperimentalConfig
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from fabric._torch import fsdp_param_groups, real_tensors

# -- Dry runs --------------------------------------------------------------------------------------


@contextmanager
def fake_ranks(world_size: int) -> Iterator[FakeTensorMode]:
    """Make the process rank 0 of a job without other ranks, and yield a mode of fake tensors.

    The process group is torch's "fake" one, which is for torch's own tests: its collectives return
    at once and write nothing. The mode is that of torch.compile: operations compute shapes and
    dtypes, and tensors have no memory. Within :func:`real_tensors` the mode is off.
    """
    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings():
            # torch's deepcopy of a fake tensor causes this warning.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


class Rank0Chunks(TorchFunctionMode):
    """A mode in which FSDP2 makes only rank 0's chunk of each parameter that it shards.

    FSDP2 uses no other chunk on rank 0, and making thousands for each parameter takes minutes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.chunk or sys._getframe(1).f_code.co_name != "_chunk_with_empty":
            return func(*args, **kwargs)
        tensor, chunk_count = args
        dim = kwargs["dim"]
        chunk_length = -(-tensor.shape[dim] // chunk_count)  # rounded up
        chunk = tensor.narrow(dim, 0, chunk_length)
        return [chunk] + [chunk.new_empty(0)] * (chunk_count - 1)


# The dtypes that a DeviceMesh uses for its ranks, for positions of ranks, and for whether a rank is
# in the mesh.
_MESH_DTYPES = (torch.int32, torch.int64, torch.bool)


def run_fake(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run an ATen operator on fake tensors. A read of a value (``.item()``) gives 1.

    To be called from the ``__torch_dispatch__`` of a mode above ``mode``.

    DDP's C++ code writes numbers of parameters into tensors of int32 and reads the numbers, so
    these tensors are real. Tensors that hold numbers of ranks are real, too: a DeviceMesh looks for
    this process's rank in them.
    """
    context: AbstractContextManager[object] = nullcontext()
    if _is_called_by_ddp(func, kwargs) or _may_be_called_by_mesh(args):
        context = real_tensors()
    try:
        with context:
            return func(*args, **kwargs)
    except DataDependentOutputException:
        is_item = func is torch.ops.aten._local_scalar_dense.default
        if not is_item:
            raise
        with real_tensors():
            # A real tensor has a value to read.
            value = args[0]
            if isinstance(value, FakeTensor):
                value = torch.ones((), dtype=value.dtype)
            return value.item()
    finally:
        # The converter's weak references to tensors would make module.to() refuse the tensors.
        converter = mode.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()
        converter.describer.lookup_tensor.clear()


def _is_called_by_ddp(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator creates a tensor as DDP does for numbers of parameters."""
    return func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.int32


def _may_be_called_by_mesh(args: tuple[Any, ...]) -> bool:
    """Return whether all tensor arguments of an operator could be tensors of a DeviceMesh.

    That is a guess: the tensors are real, and have the dtypes that a DeviceMesh uses.
    """
    has_tensors = False
    for argument in args:
        if not isinstance(argument, Tensor):
            continue
        # A FakeTensor is a subclass.
        if type(argument) is not Tensor or argument.dtype not in _MESH_DTYPES:
            return False
        has_tensors = True
    return has_tensors


class IssuedCollective(NamedTuple):
    """A collective that an operator issues.

    Attributes:
        name: the name of the operator, such as ``"allreduce_"``.
        group: the process group.
    """

    name: str
    group: dist.ProcessGroup


def collective_of(func: Any, args: tuple[Any, ...]) -> IssuedCollective | None:
    """Return the collective that an operator issues, or None for any other operator.

    Operators of ``c10d`` take the group as a ``ScriptObject``. Functional collectives take the name
    of the group, which is their last string.
    """
    if func.namespace == "c10d":
        # The group is the first ScriptObject. A reduction is one, too, and comes after the group.
        for argument in args:
            if isinstance(argument, torch.ScriptObject):
                return IssuedCollective(func._opname, dist.ProcessGroup.unbox(argument))
    if func.namespace == "_c10d_functional":
        for argument in reversed(args):
            if isinstance(argument, str):
                group_name: Any = argument  # torch's type for it is a private one
                group = dist.distributed_c10d._resolve_process_group(group_name)
                return IssuedCollective(func._opname, group)
    return None


# -- Profiles --------------------------------------------------------------------------------------

# The attributes under which FSDP2 holds what issues its collectives, with the names of these.
_FSDP_COLLECTIVES = {
    "_all_gather_comm": "all_gather",
    "_reduce_scatter_comm": "reduce_scatter",
}


def wrap_collectives(
    module: torch.nn.Module, context: Callable[[str], ContextDecorator], undo: ExitStack
) -> None:
    """Have a sharded module issue its collectives within ``context(name)``.

    FSDP2's own setters do not return the previous value, and refuse some meshes.

    Args:
        module: the sharded module.
        context: called with ``"all_gather"`` or ``"reduce_scatter"``.
        undo: restores the module when it is closed.
    """
    for group in fsdp_param_groups(module):
        for attribute, name in _FSDP_COLLECTIVES.items():
            communication = getattr(group, attribute)
            wrapper: Any = context(name)(communication)
            wrapper.allocate = communication.allocate
            undo.callback(setattr, group, attribute, communication)
            setattr(group, attribute, wrapper)


# Collectives of a backend on the host, and kernels of NCCL on a device.
_COLLECTIVES = re.compile(r"(gloo|mpi|ucc|xccl):|nccl\w*Kernel")


class ProfiledCollective(NamedTuple):
    """A collective that ran.

    Attributes:
        name: such as ``"gloo:all_reduce"``.
        begin: Unix time in nanoseconds.
        end: Unix time in nanoseconds.
    """

    name: str
    begin: int
    end: int


@contextmanager
def profiled(device: torch.device, collectives: list[ProfiledCollective]) -> Iterator[None]:
    """Profile the collectives that run within the block, and add them to a list at its end.

    ``torch.profiler`` records every operator, which may take longer than the operator itself. The
    private functions behind it can be told to leave operators out.

    Args:
        device: the device whose kernels are recorded, besides what runs on the host.
        collectives: the list to extend.
    """
    profiler = torch.autograd
    activities = {
        profiler.ProfilerActivity.CPU,
        getattr(profiler.ProfilerActivity, device.type.upper()),
    }
    # Five options stay off: shapes, memory, stacks, FLOPs and modules. torch's stub of this class
    # lacks a parameter.
    options: list[Any] = [*[False] * 5, _ExperimentalConfig()]
    config = profiler.ProfilerConfig(profiler.ProfilerState.KINETO, *options)
    profiler._prepare_profiler(config, activities)
    enable: Any = profiler._enable_profiler  # the stub lacks the third parameter
    enable(config, activities, {RecordScope.USER_SCOPE})
    try:
        yield
    finally:
        for event in profiler._disable_profiler().events():
            if _COLLECTIVES.match(event.name()):
                name = event.name().partition("(")[0]
                collectives.append(ProfiledCollective(name, event.start_ns(), event.end_ns()))
