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
    at once and write nothing. It is destroyed at the end of the block.

    The caller enters the mode. In the mode, operations only compute shapes and dtypes, and tensors
    have no memory. Within :func:`real_tensors` the mode is off.
    """
    # Imported for its side effect: the module registers the backend.
    import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings():
            # torch's deepcopy of a fake tensor causes this warning.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            # Some arguments of operators are real tensors; run_fake() says which.
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


class Rank0Chunks(TorchFunctionMode):
    """A mode in which FSDP2 makes only rank 0's chunk of each parameter that it shards.

    FSDP2 uses no other chunk on rank 0, and making thousands for each parameter takes minutes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and replace FSDP2's calls of ``torch.chunk``.

        torch calls this method for every function while the mode is entered.
        """
        kwargs = kwargs or {}
        # FSDP2 calls torch.chunk in its helper _chunk_with_empty. Other callers need all chunks.
        caller_name = sys._getframe(1).f_code.co_name
        is_call_of_fsdp = func is torch.chunk and caller_name == "_chunk_with_empty"
        if not is_call_of_fsdp:
            return func(*args, **kwargs)
        # The helper calls torch.chunk(tensor, chunk_count, dim=dim).
        tensor, chunk_count = args
        dim = kwargs["dim"]
        chunk_length = -(-tensor.shape[dim] // chunk_count)  # rounded up
        chunk = tensor.narrow(dim, 0, chunk_length)
        # Empty chunks stand for the chunks of the other ranks.
        return [chunk] + [chunk.new_empty(0)] * (chunk_count - 1)


# The operator behind ``Tensor.item()``.
_ITEM = torch.ops.aten._local_scalar_dense.default
# The dtypes that a DeviceMesh uses for its ranks, for positions of ranks, and for whether a rank is
# in the mesh.
_MESH_DTYPES = (torch.int32, torch.int64, torch.bool)


def run_fake(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run an ATen operator on fake tensors. A read of a value (``.item()``) gives 1.

    Call it from the ``__torch_dispatch__`` of another mode, which was entered after ``mode``.

    Some tensors have to be real, since torch reads their values:

    - DDP's C++ code writes indices of parameters into int32 tensors, and reads the indices.
    - A DeviceMesh looks for this process's rank in tensors that hold rank numbers.

    Args:
        mode: the mode of fake tensors, which is active already.
        func: the operator.
        args: the operator's arguments.
        kwargs: the operator's keyword arguments.
    """
    tensors_context: AbstractContextManager[object] = nullcontext()
    if _is_called_by_ddp(func, kwargs) or _may_be_called_by_mesh(args):
        tensors_context = real_tensors()
    try:
        with tensors_context:
            return func(*args, **kwargs)
    except DataDependentOutputException:
        # The mode refuses to read any value, even of one of the real tensors.
        if func is not _ITEM:
            raise
        # This context turns the mode off.
        with real_tensors():
            tensor = args[0]
            if isinstance(tensor, FakeTensor):
                tensor = torch.ones((), dtype=tensor.dtype)
            return tensor.item()
    finally:
        # Forget the tensors that the mode has converted. The mode keeps weak references to them,
        # and module.to() refuses tensors that have weak references.
        converter = mode.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()
        converter.describer.lookup_tensor.clear()


def _is_called_by_ddp(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator is the one by which DDP creates tensors for parameter indices."""
    return func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.int32


def _may_be_called_by_mesh(args: tuple[Any, ...]) -> bool:
    """Return whether an operator's tensors may be those in which a DeviceMesh keeps ranks.

    This is a guess: all tensor arguments are real, and have dtypes that a DeviceMesh uses. Tensors
    in lists are not looked at.
    """
    has_tensors = False
    for argument in args:
        if not isinstance(argument, Tensor):
            continue
        # Not isinstance(), since FakeTensor is a subclass of Tensor.
        is_real = type(argument) is Tensor
        if not is_real or argument.dtype not in _MESH_DTYPES:
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

    Args:
        func: the operator, as ``__torch_dispatch__`` gets it.
        args: the operator's arguments.
    """
    if func.namespace == "c10d":
        # The group is the first ScriptObject. The reduce op is a later one.
        for argument in args:
            if isinstance(argument, torch.ScriptObject):
                return IssuedCollective(func._opname, dist.ProcessGroup.unbox(argument))
    if func.namespace == "_c10d_functional":
        for argument in reversed(args):
            if isinstance(argument, str):
                group_name: Any = argument  # Any, since torch's type for the name is private
                group = dist.distributed_c10d._resolve_process_group(group_name)
                return IssuedCollective(func._opname, group)
    return None


# -- Profiles --------------------------------------------------------------------------------------

# The attributes of a parameter group that FSDP2 calls for its collectives, and their names.
_FSDP_COLLECTIVES = {
    "_all_gather_comm": "all_gather",
    "_reduce_scatter_comm": "reduce_scatter",
}


def wrap_collectives(
    module: torch.nn.Module, context: Callable[[str], ContextDecorator], undo: ExitStack
) -> None:
    """Have a sharded module issue its collectives within ``context(name)``.

    FSDP2 has methods to set other collectives. They are not used here, since they do not return the
    previous collective, and refuse some meshes.

    Args:
        module: the sharded module.
        context: called with ``"all_gather"`` and ``"reduce_scatter"`` for each parameter group. The
            returned context is entered at each call of the collective.
        undo: restores the module when it is closed.
    """
    for group in fsdp_param_groups(module):
        for attribute, name in _FSDP_COLLECTIVES.items():
            collective = getattr(group, attribute)
            # A ContextDecorator wraps a callable in a function that enters the context.
            wrapper: Any = context(name)(collective)
            # FSDP2 also calls this method of a collective, to allocate the memory for its result.
            wrapper.allocate = collective.allocate
            undo.callback(setattr, group, attribute, collective)
            setattr(group, attribute, wrapper)


# The names of collectives in a profile: such as ``gloo:all_reduce`` on the host, and the kernels of
# NCCL on a device.
_COLLECTIVE_EVENTS = re.compile(r"(gloo|mpi|ucc|xccl):|nccl\w*Kernel")


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
    """Profile the block and, when it ends, append the collectives that ran to a list.

    ``torch.profiler`` records every operator, which may take longer than the operator itself. The
    private functions behind it can be told to leave operators out.

    Args:
        device: the device whose kernels are recorded, besides what runs on the host.
        collectives: the list to extend.
    """
    autograd = torch.autograd
    # The members of the enum are named like the types of devices.
    device_activity = getattr(autograd.ProfilerActivity, device.type.upper())
    activities = {autograd.ProfilerActivity.CPU, device_activity}
    # ProfilerConfig takes no keywords. Its five switches are, in this order, to record shapes,
    # memory, stacks, FLOPs and modules.
    switches = [False] * 5
    # Any, since torch's stub of ProfilerConfig lacks the parameter for the last option.
    options: list[Any] = [*switches, _ExperimentalConfig()]
    config = autograd.ProfilerConfig(autograd.ProfilerState.KINETO, *options)
    # Backends record their collectives in the scope of users' annotations. Operators have another
    # scope, which is left out.
    recorded_scopes = {RecordScope.USER_SCOPE}
    enable: Any = autograd._enable_profiler  # the stub lacks the third parameter
    autograd._prepare_profiler(config, activities)
    enable(config, activities, recorded_scopes)
    try:
        yield
    finally:
        for event in autograd._disable_profiler().events():
            if _COLLECTIVE_EVENTS.match(event.name()):
                # Drop the C++ signature, which follows the name of a kernel.
                name, _, _ = event.name().partition("(")
                collectives.append(ProfiledCollective(name, event.start_ns(), event.end_ns()))
