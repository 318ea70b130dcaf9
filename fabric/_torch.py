"""Private and renamed names of torch that the core relies on, each with the reason.

tests/test_torch_names.py tests each of them.
"""

import gc
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils import data
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader

# Sees every ATen operation below autograd; its module is private, though torch's notes on extending
# torch use it.
DispatchMode = TorchDispatchMode

# A context within which new tensors are real, although a mode of fake tensors is on.
real_tensors = unset_fake_temporarily


# A context in which the views of a tensor without a gradient are to autograd tensors of their own,
# with a version each: rows from ``torch.unbind`` count changes in place together, and changing one
# would forbid the backward pass through another. ``torch.unsafe_split`` does the same for parts
# that keep the dimension, at five times the time.
untracked_views = torch._C._AutoDispatchBelowADInplaceOrView


# How many operations autograd has recorded in this thread: it numbers them, under private names
# only.
next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr


# Collective: write a tensor of every rank into an output of ``(size * n,)``, or sum one of that
# shape over ranks and write this rank's part into an output; all 1-D and contiguous. Called as
# ``(output, tensor, group=group)``. Both functions were renamed in torch 2.13, where the old names
# warn.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


# The kernels behind ``torch.amp.GradScaler``, which have no public names. With gradients of one
# device and dtype, and ``found_inf`` and ``inverse_scale`` float32 tensors of one element there:
# multiply the gradients by the latter in place, and note in the former any that is not finite.
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_

# With the scale, an int32 count of good steps, ``found_inf``, and three numbers: after an overflow
# the scale is multiplied by the second number, after as many good steps as the third says by the
# first.
backoff_or_grow = torch._amp_update_scale_

# Multiply tensors in place by one of shape ``()``, in one kernel where the device has one: torch
# documents its foreach operations under names with an underscore only.
foreach_multiply = torch.ops.aten._foreach_mul_.Tensor

# How often a tensor has been changed in place.
in_place_version: Callable[[Tensor], int] = attrgetter("_version")


# Close the default process group without waiting for its other ranks.
abort_process_group = dist.distributed_c10d._abort_process_group

# The store through which the default process group was made.
default_store = dist.distributed_c10d._get_default_store


def flatten_one_level(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a collection that is registered with torch's pytree.

    Also return the function that builds the collection again from as many children. Return None
    for any other object.

    torch's pytree is the registry in which libraries register their containers (Hugging Face model
    outputs do); torch has no public name for it yet.
    """
    if pytree.tree_is_leaf(tree):
        return None
    values, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return values, lambda new: pytree.tree_unflatten(new, spec)


def disable_join(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """Undo what ``torch.distributed.algorithms.Join`` has changed in a DDP module.

    torch leaves it switched on: forward passes go on notifying joined ranks, of which there are
    none, and the reducer goes on dividing by the number of ranks that took part in the last of
    them.
    """
    from torch.distributed.algorithms.join import _JoinConfig

    wrapper._join_config = _JoinConfig.construct_disabled_join_config()
    wrapper.reducer._set_forward_pass_work_handle(None, True)  # pyright: ignore[reportArgumentType]  # declared without None


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds, sharing its memory; any other tensor itself.

    Asked by attribute: ``torch.distributed.tensor`` takes a second to import, and without it no
    tensor is a DTensor.
    """
    return getattr(tensor, "_local_tensor", tensor)


def dtensor_like(tensor: Any, local: Tensor) -> Tensor:
    """Return a DTensor like ``tensor`` whose shard on this rank is ``local``, on any device.

    ``DTensor.from_local`` would move it to the device of the mesh.
    """
    return type(tensor)(local, tensor._spec, requires_grad=False)


def full_tensor(tensor: Any) -> Tensor:
    """Collective for a DTensor: the full (unsharded) tensor; any other tensor itself."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import Replicate  # takes a second to import; here it has been

    for number in range(1, tensor.device_mesh.ndim):
        # One dimension of the mesh after the other, from the outermost: at once, torch warns of its
        # own order.
        tensor = tensor.redistribute(
            placements=[Replicate()] * number + [*tensor.placements[number:]]
        )
    return tensor.full_tensor()


def concatenate_meshes(meshes: Sequence[Any], timeout: timedelta) -> Any:
    """Join meshes, of which each becomes one dimension of the result. Collective.

    FSDP2 shards layers that are split already only along parts of the mesh that they are on, and
    torch has public names only for parts of whole dimensions.

    Args:
        meshes: parts of one mesh.
        timeout: how long collectives along a dimension may wait that did not exist before.
    """
    dimensions: list[Any] = []
    for mesh in meshes:
        if mesh.ndim > 1:
            mesh = mesh._flatten()
            set_group_timeout(mesh.get_group(), timeout)
        dimensions.append(mesh)
    return dist.DeviceMesh._concatenate(dimensions)


def clear_mesh_caches() -> None:
    """Have DTensors look for the groups of a mesh anew.

    torch reuses the plans cached for a mesh for every equal mesh, even one with other groups: it
    finds groups by name, and another job in the same process may have used these names for other
    groups.
    """
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is not None:
        planned = tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        # Not all of these functions exist in every supported release.
        clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", _do_nothing)
        clear()
        for cache in (planned, tensor._redistribute._gen_transform_infos):
            clear = getattr(cache, "cache_clear", _do_nothing)
            clear()


def _do_nothing() -> None:
    """Stand in for a function that this release of torch does not have."""


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set how long collectives of an existing group of gloo or NCCL may wait.

    torch has no public way to change it.

    The groups of a DeviceMesh have torch's own default, whatever that of the whole job is. Other
    backends have nothing to set.
    """
    if {"gloo", "nccl"} & set(dist.get_backend_config(group).replace(",", ":").split(":")):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def reset_iterator(loader: data.DataLoader[Any]) -> None:
    """Make a loader begin anew at the next ``iter()``, and leave the workers that it had alone.

    A DataLoader keeps the iterator of persistent workers in ``_iterator``, and a copy of it would
    share them; torchdata's StatefulDataLoader also reads its own state from there. Set past the
    ``__setattr__`` of a user's class.
    """
    object.__setattr__(loader, "_iterator", None)


def datasets_iterated_in_full() -> list[str]:
    """Return the types of the datasets that DataLoaders iterate over now, completely.

    A loader counts if its sampler is torch's own sequential or random one. torch exports neither
    the type of the iterators nor their attributes. This goes through all objects of the process.
    """
    samplers = (data.SequentialSampler, data.RandomSampler)
    names: list[str] = []
    for iterator in gc.get_objects():
        if not issubclass(type(iterator), dataloader._BaseDataLoaderIter):
            continue
        iterator: Any
        sampler = getattr(iterator, "_index_sampler", None)  # not there while it is being made
        sampler = getattr(sampler, "sampler", sampler)  # the sampler of a batch sampler
        if type(sampler) in samplers:
            names.append(type(iterator._dataset).__name__)
    return names


def is_in_backward() -> bool:
    """Whether this thread is inside of a backward pass; torch has no public name for it."""
    return torch._C._current_graph_task_id() != -1


def unfinished_backward_check(root: Any) -> Callable[[], bool]:
    """A function that says whether a backward pass of a sharded model is under way, or has raised.

    FSDP2 ends each by a callback, and notes in a private record that it is due. As long as it is,
    no other is called, so that gradients stay unreduced.
    """
    return partial(
        attrgetter("_state_ctx.post_backward_final_callback_queued"), root._get_fsdp_state()
    )


# Inside of a backward pass, have a function be called at its end, as FSDP2 does. DDP and FSDP2 rely
# on it.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Have ``target`` run the ``register_hook`` hooks of ``source``, present and future ones.

    torch copies none of them.
    """
    if source._backward_hooks is None:
        source._backward_hooks = OrderedDict()
    target._backward_hooks = source._backward_hooks


def share_accumulation_hooks(source: Tensor, target: Tensor) -> None:
    """Have ``target`` run the ``register_post_accumulate_grad_hook`` hooks of ``source``.

    FSDP2 calls them with its sharded parameters.
    """
    if source._post_accumulate_grad_hooks is not None:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def sequence_numbers_behind(loss: Tensor) -> Iterator[int]:
    """Yield the numbers of the operations in the graph behind ``loss``.

    The numbers are those that :data:`next_sequence_number` counts.
    """
    seen = {None}
    waiting = list[Any]([loss.grad_fn])
    while waiting:
        if (node := waiting.pop()) not in seen:
            yield node._sequence_nr()
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]


def is_compiling() -> bool:
    """Return whether a thread of this process compiles a forward or a backward pass.

    torch says it of the thread that asks only. By the names of two functions, since those files
    have others that run compiled code.
    """
    compilers = {
        ("_dynamo/convert_frame.py", "_compile"),
        ("_inductor/compile_fx.py", "compile_fx_inner"),
    }
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    codes = (frame.f_code for stack in stacks for frame, _ in stack)
    return any(
        ("/".join(code.co_filename.split(os.sep)[-2:]), code.co_name) in compilers for code in codes
    )


class HookEntry(NamedTuple):
    """A hook of a module, with the dict and the key under which the module holds it."""

    hooks: Any
    key: int
    hook: Any


def hook_entry(handle: Any) -> HookEntry:
    """Return where a module holds a hook, so that the hook can be removed and put back.

    torch's handle removes a hook for good, and holds the dict by a private weak reference.
    """
    hooks = handle.hooks_dict_ref()
    return HookEntry(hooks, handle.id, hooks[handle.id])


# A decorator for a hook of a tensor that need not be in a pickle or copy of the tensor: without it,
# torch warns when it pickles a tensor with hooks.
unserializable_hook: Callable[[Any], Any] = torch.utils.hooks.unserializable_hook


# The name under which a ``torch.compile(module)`` holds the module. Part of its state dict's names.
COMPILED_MODULE = "_orig_mod"


def uncompiled(module: Any) -> torch.nn.Module:
    """Return the module inside of a ``torch.compile(module)``. Others are returned unchanged.

    torch has no public way back from a compiled module.
    """
    return module._modules.get(COMPILED_MODULE, module)


def registered_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict in which a module keeps its own parameters, without submodules.

    ``named_parameters`` leaves out None and what it has met before, and torch's setters refuse some
    names and types. A change of the dict is a change of the module.
    """
    return module._parameters


def registered_buffers(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module keeps its own buffers. See `registered_parameters`."""
    return module._buffers


def registered_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dict in which a module keeps its children. See `registered_parameters`."""
    return module._modules


def set_registered_members(
    module: torch.nn.Module,
    parameters: dict[str, torch.nn.Parameter | None],
    buffers: dict[str, Tensor | None],
    modules: dict[str, torch.nn.Module | None],
) -> None:
    """Give a module the dicts in which it keeps its parameters, buffers and children.

    For modules that share them with another module. torch makes new dicts in its constructor only.
    """
    vars(module).update(_parameters=parameters, _buffers=buffers, _modules=modules)


def synchronization_check(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> Callable[[], bool]:
    """Return a function that says whether DDP's next backward pass averages gradients.

    torch's ``no_sync`` sets an attribute that its documentation does not name. The function is not
    one of Python, since it is called in every step.
    """
    return partial(attrgetter("require_backward_grad_sync"), wrapper)


def ignored_by_ddp(wrapper: torch.nn.parallel.DistributedDataParallel) -> set[str]:
    """Return the names of the parameters and buffers that DDP was told to ignore.

    torch has no public name for them, only the private
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` to set them. In the
    names of a compiled module, the part that ``torch.compile`` adds is left out.
    """
    return {name.removeprefix(f"{COMPILED_MODULE}.") for name in wrapper.parameters_to_ignore}


def has_custom_state_loading(module: torch.nn.Module) -> bool:
    """Whether a method that is not torch's takes part when a module loads a state dict."""
    methods = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    found = [getattr(type(part), name) for part in module.modules() for name in methods]
    return not all(method.__module__.startswith("torch.") for method in found)


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether ``module.compile()`` was called, which is recorded under a private name only."""
    return getattr(module, "_compiled_call_impl", None) is not None


def fsdp_param_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's records of parameters that are gathered together, of all submodules."""
    for submodule in module.modules():
        if not hasattr(submodule, "set_requires_gradient_sync"):
            continue
        state = submodule._get_fsdp_state()  # pyright: ignore[reportCallIssue]  # asked for just above
        groups = getattr(state, "_fsdp_param_groups", None)
        if not groups:
            groups = [state._fsdp_param_group]  # up to torch 2.11
        for group in groups:
            if group is not None:
                yield group


def unreduced_parameters(module: torch.nn.Module) -> list[Tensor]:
    """Return the sharded parameters that have an unsharded gradient on this rank.

    A backward pass without synchronization leaves it.

    FSDP2 keeps it in the parameter's private record until a backward pass with synchronization.
    """
    found = []
    for record in (record for group in fsdp_param_groups(module) for record in group.fsdp_params):
        whole = getattr(record, "_unsharded_param", None)
        if (
            record.unsharded_accumulated_grad is not None
            or getattr(whole, "grad", None) is not None
        ):
            found.append(record.sharded_param)
    return found


def allocates_outputs(operator: Any) -> bool:
    """Return whether an ATen operator allocates its outputs, by the aliases in its schema."""
    return all(output.alias_info is None for output in operator._schema.returns)


def reduce_bucket_without_result(
    state: Any, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of DDP without waiting for a result.

    A communication hook for :func:`fake_ranks`, whose collectives have no result.
    """
    dist.all_reduce(bucket.buffer())
    (done := torch.futures.Future[Tensor]()).set_result(bucket.buffer())
    return done


@cache
def freeze_garbage_in_forks() -> None:
    """Keep forked processes, such as workers of a DataLoader, from collecting a process group.

    That waits for the group's threads, which only this process has: it would hang or crash.
    """
    os.register_at_fork(after_in_child=gc.freeze)
