"""The private and renamed names of torch that fabric's core uses, each with the reason.

``tests/test_torch_names.py`` tests each name with the installed torch.
"""

import gc
import os
import sys
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils import data
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import dataloader

# The base class of modes that see every ATen operation below autograd. Its module is private,
# though torch's own notes on extending torch use the class.
DispatchMode = TorchDispatchMode

# A context in which new tensors are real although a fake tensor mode is active, as in a dry run.
real_tensors = unset_fake_temporarily

# A context in which no TorchDispatchMode sees the operators: no counter of FLOPs, and no cache of
# selective activation checkpointing. torch has no public context for all modes.
without_dispatch_modes = _disable_current_modes


# A context in which autograd does not track views, so that each view has a version counter of its
# own. Otherwise the rows from ``torch.unbind`` share one counter, and after an in-place change of
# one row, backward passes through the other rows fail. ``torch.unsafe_split`` would do the same for
# parts that keep the dimension, but takes five times as long.
untracked_views = torch._C._AutoDispatchBelowADInplaceOrView


# Returns the innermost transform of ``torch.func`` in which this thread runs, or None. Inside of a
# transform, tensors that were made outside cannot be changed. torch has no public name for it.
current_transform: Callable[[], object] = peek_interpreter_stack


# Returns the sequence number that autograd gives to the next operation that this thread records.
# torch has no public name for sequence numbers.
next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr


# Called as ``(gradients, found_inf, inverse_scale)``: multiplies the gradients in place by
# ``inverse_scale``, and sets ``found_inf`` to 1 if any of them is not finite. The gradients have
# one device and one dtype. The other two are float32 tensors of one element on this device. This
# kernel and the next one are what ``torch.amp.GradScaler`` calls. They have no public names.
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_

# Called as ``(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)``:
# updates ``scale`` and ``growth_tracker`` in place. After an overflow the scale is multiplied by
# ``backoff_factor``. After ``growth_interval`` steps without an overflow, which the int32 tensor
# ``growth_tracker`` counts, the scale is multiplied by ``growth_factor``.
backoff_or_grow = torch._amp_update_scale_

# Called as ``(tensors, factor)`` with a tensor ``factor`` of shape ``()``: multiplies the tensors
# in place, in one kernel if the device has such a kernel. torch has foreach operations only under
# names with an underscore.
foreach_multiply = torch.ops.aten._foreach_mul_.Tensor

# Returns the version counter of a tensor, which counts the changes of the tensor in place.
in_place_version: Callable[[Tensor], int] = attrgetter("_version")


# Close the default process group without waiting for its other ranks.
abort_process_group = dist.distributed_c10d._abort_process_group

# The store through which the default process group was made.
default_store = dist.distributed_c10d._get_default_store


def flatten_one_level(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a container of torch's pytree, and a function that rebuilds it.

    The function builds the container from a list of as many new children. Return None for an object
    whose type is not registered, which is a leaf.

    Libraries register their containers with torch's pytree, such as the model outputs of Hugging
    Face. torch has no public name for the registry yet.
    """
    if pytree.tree_is_leaf(tree):
        return None
    # Without ``is_leaf``, the containers among the children would be flattened, too.
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)

    def rebuild(new_children: list[Any]) -> Any:
        return pytree.tree_unflatten(new_children, spec)

    return children, rebuild


def disable_join(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """Restore a DDP module after a ``torch.distributed.algorithms.Join`` block.

    torch leaves joining switched on at the end of the block. Forward passes would go on sending
    notifications to joined ranks, and the reducer would go on dividing gradients by the number of
    ranks that took part in the last step of the block.
    """
    from torch.distributed.algorithms.join import _JoinConfig

    wrapper._join_config = _JoinConfig.construct_disabled_join_config()
    # None: the reducer waits for no collective of joined ranks. True: the reducer divides by the
    # number of all ranks.
    wrapper.reducer._set_forward_pass_work_handle(None, True)  # pyright: ignore[reportArgumentType]  # declared without None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares memory with the DTensor.

    A plain tensor is returned unchanged. An ``isinstance`` check would import
    ``torch.distributed.tensor``, which takes a second.
    """
    return getattr(tensor, "_local_tensor", tensor)


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing the class, which takes a second."""
    return local_tensor(tensor) is not tensor


def has_nan(parameter: Tensor) -> bool:
    """Return whether the part of a parameter on this rank contains a NaN.

    Return False for subclasses of tensors and for one-byte dtypes, on which ``isnan`` may fail.
    """
    tensor = local_tensor(parameter)
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not is_plain or tensor.element_size() == 1:
        return False
    return bool(tensor.isnan().any())


def dtensor_like(tensor: Any, local: Tensor) -> Tensor:
    """Return a DTensor with the shape and the placements of ``tensor``, whose shard is ``local``.

    The shard stays on its device. ``DTensor.from_local`` would move it to the device of the mesh,
    but a background save needs a copy of the shards on the CPU.
    """
    return type(tensor)(local, tensor._spec, requires_grad=False)


def full_tensor(tensor: Any) -> Tensor:
    """Return the unsharded tensor of a DTensor. Collective over the DTensor's mesh.

    A plain tensor is returned unchanged.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    # The import is here, since it takes a second unless the program has a DTensor already.
    from torch.distributed.tensor import Replicate

    # torch warns about its order of gathering if several dimensions are gathered at once. So each
    # step gathers one dimension of the mesh, beginning with the outermost. full_tensor() gathers
    # the last one.
    for num_replicated in range(1, tensor.device_mesh.ndim):
        replicated = [Replicate()] * num_replicated
        tensor = tensor.redistribute(placements=[*replicated, *tensor.placements[num_replicated:]])
    return tensor.full_tensor()


def concatenate_meshes(meshes: Sequence[Any], timeout: timedelta) -> Any:
    """Return a mesh that has one dimension for each of ``meshes``. Collective.

    ``"model_parallel"`` passes the result to ``fully_shard``. For a layer that tensor parallelism
    has split already, FSDP2 accepts no new mesh, only a part of the mesh of that split. This
    function makes such a part, in which several dimensions count as one. torch has no public
    function for that.

    Args:
        meshes: parts of one mesh. A part of several dimensions is flattened to one dimension,
            which creates a process group.
        timeout: how long collectives over a created group may wait.
    """
    one_dimensional_meshes: list[Any] = []
    for mesh in meshes:
        if mesh.ndim > 1:
            mesh = mesh._flatten()
            set_group_timeout(mesh.get_group(), timeout)
        one_dimensional_meshes.append(mesh)
    return dist.DeviceMesh._concatenate(one_dimensional_meshes)


def clear_mesh_caches() -> None:
    """Clear torch's caches of DTensor operations. Called when a job ends.

    The caches refer to meshes, and so to the process groups of the job. A group of gloo that is
    still referred to keeps a thread, which wakes up a hundred times a second, even after
    ``destroy_process_group()``. The next job in this process may also have an equal mesh with other
    groups, for which the old entries are wrong.
    """
    # Looked up, since an import takes a second. If nothing has imported it, the caches are empty.
    dtensor: Any = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return
    torch._C._clear_DTensor_sharding_propagator_cache()
    dtensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    dtensor._redistribute._gen_transform_infos.cache_clear()
    dtensor._redistribute.clear_redistribute_planner_cache()
    dtensor._collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


# The functions that were passed to handle_dtensor_operators() and are not removed yet, by operator.
# An operator has several if the process has several strategies, such as for a teacher and a
# student. The dispatcher calls one of these functions.
_dtensor_functions: defaultdict[Any, list[Callable[..., Any]]] = defaultdict(list)


def handle_dtensor_operators(functions: Mapping[Any, Callable[..., Any]]) -> Callable[[], None]:
    """Have functions called in place of ATen operators on DTensors.

    The dispatcher of DTensor has a dict of such functions, which is private. Seen to work in torch
    2.13, 2.14 and 2.15.

    Args:
        functions: for each operator, a function that gets the operator, its arguments and its
            keyword arguments. If the operator has a function already, the new function is not
            called for now. If that earlier function came from an earlier call of
            ``handle_dtensor_operators``, the new function is used once the earlier is removed.

    Returns:
        A function without arguments that removes these functions.
    """
    from torch.distributed.tensor import DTensor  # takes a second to import

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operator, function in functions.items():
        _dtensor_functions[operator].append(function)
        handlers.setdefault(operator, function)

    def remove() -> None:
        """Remove these functions. The dispatcher then calls another one, if any remains."""
        for operator, function in functions.items():
            remaining = _dtensor_functions[operator]
            remaining.remove(function)
            if handlers.get(operator) is not function:
                continue  # the dispatcher calls the function of another strategy or library
            if remaining:
                handlers[operator] = remaining[0]
            else:
                del handlers[operator]

    return remove


def call_without_function(
    operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Call an ATen operator on DTensors as torch does, without fabric's function for it.

    A function passed to :func:`handle_dtensor_operators` calls this to run the operator itself:
    a direct call of the operator would call the function again, without end. The function is
    removed during the call. Seen to work in torch 2.13, 2.14 and 2.15.
    """
    from torch.distributed.tensor import DTensor  # takes a second to import

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    function = handlers.pop(operator, None)  # None if another thread is in this call
    try:
        return operator(*args, **(kwargs or {}))
    finally:
        if function is not None:
            handlers.setdefault(operator, function)


# The functions that were passed to handle_data_assignments() and are not removed yet.
_data_functions: list[Callable[[Tensor, Any], None]] = []


def handle_data_assignments(function: Callable[[Tensor, Any], None]) -> Callable[[], None]:
    """Have a function called before each assignment ``dtensor.data = value``.

    torch changes the outer tensor of a DTensor then, which has no values, and keeps the shard. No
    operator is dispatched, so :func:`handle_dtensor_operators` cannot see the assignment. DTensor
    gets a property ``data`` in place of the attribute that it inherits from ``torch.Tensor``. Seen
    to work in torch 2.13 and 2.14.

    Args:
        function: called with the DTensor and the value. If several functions are given, the first
            one is called.

    Returns:
        A function without arguments that removes this function.
    """
    from torch.distributed.tensor import DTensor  # takes a second to import

    dtensor_class: Any = DTensor
    attribute: Any = Tensor.data

    def assign(dtensor: Tensor, value: Any) -> None:
        """Call the function, and then do what torch does."""
        _data_functions[0](dtensor, value)
        attribute.__set__(dtensor, value)

    if not _data_functions:
        dtensor_class.data = property(attribute.__get__, assign)
    _data_functions.append(function)

    def remove() -> None:
        """Remove this function, and with the last one the property."""
        _data_functions.remove(function)
        if not _data_functions:
            del dtensor_class.data

    return remove


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view was made from. None if the tensor is not a view.

    ``Tensor._base`` is private. Autograd keeps it also for tensors that need no gradient. Seen to
    work in torch 2.13, 2.14 and 2.15.
    """
    return tensor._base


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set how long collectives of an existing process group may wait.

    The groups of a DeviceMesh have torch's default timeout, even if the job has another timeout.
    Groups with neither a gloo nor an NCCL backend are left unchanged: their backends have no such
    setting. ``dist.set_timeout`` calls the same method, but is new in torch 2.14.
    """
    # A text such as "cpu:gloo,cuda:nccl" or "gloo".
    backend_config = dist.get_backend_config(group)
    names = backend_config.replace(",", ":").split(":")
    if "gloo" in names or "nccl" in names:
        group.set_timeout(timeout)


def reset_iterator(loader: data.DataLoader[Any]) -> None:
    """Make a loader forget its iterator, so that the next ``iter()`` creates a new one.

    A DataLoader with persistent workers keeps its iterator in ``_iterator``, so that a copy of the
    loader would share the workers. torchdata's StatefulDataLoader also reads its state from
    ``_iterator``. The workers of the old iterator go on running.
    """
    # Bypasses the __setattr__ of a user's subclass.
    object.__setattr__(loader, "_iterator", None)


def datasets_iterated_in_full() -> list[str]:
    """Return the class names of the datasets over which plain DataLoaders iterate now.

    With torch's sequential or random sampler, every rank reads the whole dataset. Loaders with
    other samplers are left out. torch keeps no list of iterators, and exports neither their class
    nor their attributes. The search goes through all objects of the process, and takes long.
    """
    full_samplers = (data.SequentialSampler, data.RandomSampler)
    names: list[str] = []
    for candidate in gc.get_objects():
        # isinstance() would read `__class__`, which may run code of a proxy object.
        if not issubclass(type(candidate), dataloader._BaseDataLoaderIter):
            continue
        iterator: Any = candidate
        # None while another thread is in the constructor of the iterator.
        index_sampler = getattr(iterator, "_index_sampler", None)
        # With automatic batching this is a batch sampler, which holds the sampler.
        sampler = getattr(index_sampler, "sampler", index_sampler)
        if type(sampler) in full_samplers:
            names.append(type(iterator._dataset).__name__)
    return names


# Returns the number of the backward pass in which this thread is, or -1 outside of backward passes.
# Each backward pass has another number. torch has no public name for the number.
backward_number: Callable[[], int] = torch._C._current_graph_task_id


def is_in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return backward_number() != -1


def unfinished_backward_check(root: Any) -> Callable[[], bool]:
    """Return a function that says whether a backward pass of an FSDP2 model has not ended.

    A backward pass has not ended if it is running, or if it raised. FSDP2 queues a callback for the
    end of each backward pass, and sets a private flag until the callback runs. After an error the
    flag stays set: FSDP2 queues no further callback, and does not reduce gradients any more.

    Args:
        root: the whole model. If it is not an FSDP module, nothing is sharded, and the function
            always returns False.
    """
    if not is_fsdp_module(root):
        return _is_never_unfinished
    # partial() and attrgetter() are written in C, so that the check in each forward pass is fast.
    is_callback_queued = attrgetter("_state_ctx.post_backward_final_callback_queued")
    return partial(is_callback_queued, root._get_fsdp_state())


def _is_never_unfinished() -> bool:
    """Return False, for a model without FSDP2."""
    return False


# Called inside a backward pass with a function: autograd calls the function at the end of this
# backward pass. DDP and FSDP2 use the same private name.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Make ``target`` call all ``register_hook`` hooks of ``source``, present and future ones.

    Both tensors then share one dict of hooks. torch does not copy hooks to a tensor that replaces
    another one.
    """
    if source._backward_hooks is None:
        source._backward_hooks = OrderedDict()
    target._backward_hooks = source._backward_hooks


def share_accumulation_hooks(source: Tensor, target: Tensor) -> None:
    """Make ``target`` call the ``register_post_accumulate_grad_hook`` hooks of ``source``.

    Called when FSDP2 replaces the parameter ``source`` by the sharded parameter ``target``. FSDP2
    itself runs the hooks of the sharded parameter.
    """
    if source._post_accumulate_grad_hooks is not None:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def sequence_numbers_behind(loss: Tensor) -> Iterator[int]:
    """Yield the sequence number of each operation in the graph of ``loss``.

    An operation with a number below an earlier :func:`next_sequence_number` was recorded before.
    """
    for node in _nodes_behind(loss):
        yield node._sequence_nr()


def leaves_of_graph(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the graph of ``loss``, whose gradients its backward pass computes."""
    for node in _nodes_behind(loss):
        # Only the node that accumulates the gradient of a leaf has this attribute.
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def _nodes_behind(loss: Tensor) -> Iterator[Any]:
    """Yield each node of the graph of ``loss`` once."""
    # For an input that requires no gradient, next_functions has None instead of a node. None counts
    # as seen, so that it is never yielded.
    seen_nodes: set[Any] = {None}
    nodes_to_visit: list[Any] = [loss.grad_fn]
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node in seen_nodes:
            continue
        seen_nodes.add(node)
        yield node
        for predecessor, _ in node.next_functions:
            nodes_to_visit.append(predecessor)


def saved_option(node: Any, name: str) -> Any:
    """Return an option of the operation of an autograd node, such as ``"reduction"``.

    Return None if the operation has no such option. torch's notes on autograd describe these
    attributes, although their names begin with an underscore. Tensors need :func:`saved_constant`.
    """
    return getattr(node, f"_saved_{name}", None)


def saved_constant(node: Any, operand: str) -> Tensor | None:
    """Return an operand that an autograd node has saved. None if the operand cannot be read.

    Reading an attribute such as ``_saved_other`` would run the hooks for saved tensors. The hooks
    of activation checkpointing compute the forward pass again, and can do so only once. Instead,
    this function registers hooks that read the operand. torch raises if there are other hooks.

    Args:
        node: a multiplication or a division.
        operand: ``"self"`` for the first operand, ``"other"`` for the second operand.
    """
    saved_tensor = getattr(node, f"_raw_saved_{operand}", None)
    if saved_tensor is None:
        # The operand may be a number.
        number = saved_option(node, operand)
        return None if number is None else torch.tensor(float(number))

    def pack(tensor: Tensor) -> Tensor:
        # The node keeps the operand for later calls, since torch accepts hooks only once.
        node.metadata[operand] = tensor
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    if operand not in node.metadata:
        try:
            # torch calls pack() at once, and unpack() in the backward pass.
            saved_tensor.register_hooks(pack, unpack)
        except RuntimeError:
            # The user has added other hooks, or a backward pass has freed the tensor.
            return None
    return node.metadata[operand]


def is_compiling() -> bool:
    """Return whether any thread of this process compiles a graph now, for hang reports.

    ``torch.compiler.is_compiling`` answers only for the calling thread. So this function looks for
    two functions of the compiler on the stacks of all threads. Their files contain functions that
    run compiled code, too, so the names of the files are not enough.
    """
    compiling_functions = {
        ("_dynamo/convert_frame.py", "_compile"),
        ("_inductor/compile_fx.py", "compile_fx_inner"),
    }
    for innermost_frame in sys._current_frames().values():
        for frame, _ in traceback.walk_stack(innermost_frame):
            code = frame.f_code
            # For example "_dynamo/convert_frame.py".
            folder_and_file = "/".join(code.co_filename.split(os.sep)[-2:])
            if (folder_and_file, code.co_name) in compiling_functions:
                return True
    return False


def awaited_worker(frame: FrameType | None) -> int | None:
    """Return the process id of the DataLoader worker for which a thread waits, for hang reports.

    torch has no public name for the workers of an iterator. Seen to work in torch 2.13, 2.14 and
    2.15.

    Args:
        frame: the innermost frame of the thread.

    Returns:
        The process id. None if the thread waits for no worker.
    """
    waiting_code = dataloader._MultiProcessingDataLoaderIter._get_data.__code__
    while frame is not None and frame.f_code is not waiting_code:
        frame = frame.f_back
    if frame is None:
        return None
    iterator = frame.f_locals["self"]
    # The task of the next batch in the order of the loop. Its first field is the worker's number.
    task = iterator._task_info.get(iterator._rcvd_idx)
    if task is None:
        return None
    return iterator._workers[task[0]].pid


class HookEntry(NamedTuple):
    """A hook of a module.

    Attributes:
        hooks: the module's dict of hooks of this kind.
        key: the key of the hook in the dict.
        hook: the hook.
    """

    hooks: Any
    key: int
    hook: Any


def hook_entry(handle: Any) -> HookEntry:
    """Return the entry of a hook in the dicts of its module.

    With the entry, a caller can take a hook out for a while and put it back. A handle can only
    remove the hook for good.

    Args:
        handle: what ``register_forward_hook`` or a similar method returned.
    """
    hooks = handle.hooks_dict_ref()  # the handle has only a weak reference to the dict
    return HookEntry(hooks, key=handle.id, hook=hooks[handle.id])


def user_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks around the forward and the backward pass of a module.

    torch has no public way to list hooks, and a copy of a module copies them.
    """
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


# A decorator for tensor hooks that a pickle or a copy of the tensor may leave out. torch warns when
# it pickles a tensor that has other hooks.
unserializable_hook: Callable[[Any], Any] = torch.utils.hooks.unserializable_hook


# The name of the submodule in which a ``torch.compile(module)`` holds the module. The names in its
# state dict begin with this name.
COMPILED_MODULE = "_orig_mod"


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> OrderedDict[int, Any]:
    """Return the hooks before steps of an optimizer, by key, in the order of their calls.

    torch has no public way to change the order.
    """
    hooks: Any = optimizer._optimizer_step_pre_hooks
    return hooks


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage as the object that stands for it in the pickle of a tensor.

    The public constructor warns that the class will be removed, although a pickle of a tensor needs
    the class. The argument ``_internal`` avoids the warning. It was seen in torch 2.7 to 2.13.
    """
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def untyped_storage(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the storage behind the result of :func:`typed_storage`, without a warning."""
    return storage._untyped_storage


def uncompiled(module: Any) -> torch.nn.Module:
    """Return the module inside a ``torch.compile(module)``. Other modules are returned unchanged.

    torch has no public way to get the module back from a compiled module.
    """
    return module._modules.get(COMPILED_MODULE, module)


def compile_as(compiled: Any, module: torch.nn.Module) -> Any:
    """Compile a module with the options with which another module has been compiled.

    torch has no public way to read these options. The attribute was seen in torch 2.7 to 2.13.
    """
    return type(compiled)(module, compiled.dynamo_ctx)


def trace_only_inside_of_graphs(function: FunctionType) -> None:
    """Keep ``torch.compile`` from compiling calls of a function outside of graphs.

    Within a graph, the function is traced as before. ``torch.compiler.disable`` would break each
    graph at the function. torch has no public name for this. The function was seen in torch 2.13.
    """
    from torch._dynamo.eval_frame import skip_code  # takes two seconds to import

    skip_code(function.__code__)


def registered_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict of a module's own parameters, without those of its submodules.

    Changing the dict changes the module. The public ways are not complete: ``named_parameters``
    leaves out None and second names of a parameter, and ``setattr`` refuses some names and types.
    """
    return module._parameters


def registered_buffers(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers. Changing the dict changes the module."""
    return module._buffers


def registered_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dict of a module's children. Changing the dict changes the module."""
    return module._modules


def set_registered_members(
    module: torch.nn.Module,
    parameters: dict[str, torch.nn.Parameter | None],
    buffers: dict[str, Tensor | None],
    modules: dict[str, torch.nn.Module | None],
) -> None:
    """Replace the dicts in which a module keeps its parameters, buffers and children.

    The dicts are not copied, so that two modules can share a dict. torch creates the dicts in the
    constructor of a module, and has no way to replace them.
    """
    vars(module).update(_parameters=parameters, _buffers=buffers, _modules=modules)


def synchronization_check(
    wrapper: torch.nn.parallel.DistributedDataParallel,
) -> Callable[[], bool]:
    """Return a function that says whether DDP's next backward pass averages gradients.

    DDP's ``no_sync`` sets an attribute that torch does not document.
    """
    # partial() and attrgetter() are written in C, so that the check in each step is fast.
    return partial(attrgetter("require_backward_grad_sync"), wrapper)


def ignored_by_ddp(wrapper: torch.nn.parallel.DistributedDataParallel) -> set[str]:
    """Return the names of the parameters and buffers that DDP does not synchronize.

    The user has set the names by ``_set_params_and_buffers_to_ignore_for_model`` of DDP's class.
    The prefix that ``torch.compile`` adds to names is left out.
    """
    return {name.removeprefix(f"{COMPILED_MODULE}.") for name in wrapper.parameters_to_ignore}


def names_to_ignore_in_ddp(module: torch.nn.Module) -> set[str]:
    """Return the names that DDP will not synchronize in a module that is not wrapped by DDP yet.

    The names are those of :func:`ignored_by_ddp`.
    """
    names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return {name.removeprefix(f"{COMPILED_MODULE}.") for name in names}


def has_custom_state_loading(module: torch.nn.Module) -> bool:
    """Return whether a class in a module overrides a method that loads a state dict.

    Such a method may raise after it has loaded a part of the state.
    """
    for submodule in module.modules():
        for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state"):
            method = getattr(type(submodule), name)
            if not method.__module__.startswith("torch."):
                return True
    return False


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, which torch notes in a private attribute."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_fsdp_module(module: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` was called for this module.

    ``fully_shard`` adds this method to the module's class. An ``isinstance`` check would import
    ``torch.distributed.fsdp``, which takes a second.
    """
    return hasattr(module, "set_requires_gradient_sync")


def fsdp_param_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's private ``FSDPParamGroup`` objects of a module and its submodules.

    FSDP2 gathers the parameters of a group together.
    """
    for submodule in module.modules():
        if not is_fsdp_module(submodule):
            continue
        state = submodule._get_fsdp_state()  # pyright: ignore[reportCallIssue]  # fully_shard() adds it, too
        yield from state._fsdp_param_groups


@contextmanager
def gathered_for_recomputation(modules: Iterable[Any]) -> Iterator[None]:
    """Gather the parameters of FSDP modules for the block. Collective.

    A forward pass of these modules in the block is like the recomputation of an activation
    checkpoint: the parameters stay gathered, and nothing is prepared for a backward pass. FSDP2 has
    a private state for this, which was seen in torch 2.13, 2.14 and 2.15.

    Args:
        modules: modules for each of which ``fully_shard`` was called.
    """
    # The import takes a second unless the program has FSDP modules already.
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    with ExitStack() as stack:
        for module in modules:
            state = module._get_fsdp_state()
            # At the end of the block, the stack restores the state. Before, it frees the parameters
            # again, unless they were gathered already.
            stack.callback(setattr, state, "_training_state", state._training_state)
            if not all(group.is_unsharded for group in state._fsdp_param_groups):
                stack.callback(module.reshard)
            module.unshard()
            # In this state, FSDP2 takes a forward pass for a recomputation.
            state._training_state = TrainingState.PRE_BACKWARD
        yield


def fsdp_parameter_records(module: torch.nn.Module) -> list[Any]:
    """Return FSDP2's private ``FSDPParam`` objects of a module and its submodules.

    The attribute ``sharded_param`` of such a record is the parameter that optimizers hold.
    """
    records: list[Any] = []
    for group in fsdp_param_groups(module):
        records.extend(group.fsdp_params)
    return records


def gathered_parameters(records: Iterable[Any]) -> list[Tensor]:
    """Return the gathered parameters of records of FSDP2 whose in-place changes can be detected.

    FSDP2 creates a gathered parameter in the first pass, and frees only its memory between passes.
    FSDP2 itself does not change the tensor's version counter. Parameters that do not exist yet, and
    tensors of inference mode, which have no version counter, are left out.

    Args:
        records: entries of :func:`fsdp_parameter_records`.
    """
    gathered: list[Tensor] = []
    for record in records:
        parameter = getattr(record, "_unsharded_param", None)
        if parameter is not None and not parameter.is_inference():
            gathered.append(parameter)
    return gathered


def is_parameter_of_record(parameter: Any, record: Any) -> bool:
    """Return whether a parameter in a module is one of the tensors that FSDP2 has put there.

    FSDP2 puts the sharded or the gathered parameter of a record into the module. Before the first
    forward pass, also return True for a parameter that FSDP2 will adopt as the shard, as after
    ``load_state_dict(..., assign=True)``.

    Args:
        parameter: the parameter under the record's name in the module.
        record: an entry of :func:`fsdp_parameter_records`. FSDP2 has one record for each parameter,
            which holds the sharded and the gathered tensor.
    """
    if parameter is record.sharded_param:
        return True
    unsharded = getattr(record, "_unsharded_param", None)
    if unsharded is None:
        # No forward pass has gathered the parameter yet. In the first one, FSDP2 adopts any DTensor
        # parameter that the module holds as the shard.
        return is_dtensor(parameter) and isinstance(parameter, torch.nn.Parameter)
    # With ``reshard_after_forward=n``, the module holds a third tensor between the forward and the
    # backward pass: the parameter sharded over n ranks. None in other cases.
    resharded = getattr(record, "_sharded_post_forward_param", None)
    return parameter is unsharded or parameter is resharded


def has_unreduced_gradient(record: Any) -> bool:
    """Return whether a parameter has a full gradient that has not been reduced into its shard.

    A backward pass without synchronization leaves the full gradient in the private record, where an
    optimizer does not see it. A later backward pass with synchronization reduces the gradient.

    Args:
        record: an entry of :func:`fsdp_parameter_records`.
    """
    # The unsharded parameter does not exist before the first forward pass.
    unsharded = getattr(record, "_unsharded_param", None)
    has_gradient = getattr(unsharded, "grad", None) is not None
    # FSDP2 moves the gradient here if gradients are reduced in another dtype.
    has_accumulated_gradient = record.unsharded_accumulated_grad is not None
    return has_gradient or has_accumulated_gradient


def drop_unreduced_gradient(record: Any) -> None:
    """Drop the gradient that :func:`has_unreduced_gradient` has found."""
    record._unsharded_param.grad = None
    # From torch 2.15 on, this attribute reads the gradient above, is None now, and cannot be set.
    if record.unsharded_accumulated_grad is not None:
        record.unsharded_accumulated_grad = None


def reset_fsdp_pass(root: Any, records: Sequence[Any]) -> None:
    """Clear what a pass that raised has left in FSDP2's state, and keep all gradients.

    From torch 2.15 on, ``reset_iter_state`` clears all gradients, too. So the gradients are saved
    and set again.

    Args:
        root: the whole model. Nothing happens if it is not an FSDP module.
        records: the :func:`fsdp_parameter_records` of ``root``.
    """
    if not is_fsdp_module(root):
        return
    gradients: list[tuple[Any, Tensor]] = []
    for record in records:
        # The unsharded parameter does not exist before the first forward pass.
        for parameter in (record.sharded_param, getattr(record, "_unsharded_param", None)):
            if parameter is not None and parameter.grad is not None:
                gradients.append((parameter, parameter.grad))
    root.reset_iter_state()
    for parameter, grad in gradients:
        parameter.grad = grad


def allocates_outputs(operator: Any) -> bool:
    """Return whether no output of an ATen operator is a view of an input or an input itself.

    The operator's schema declares which outputs alias an input.
    """
    return all(output.alias_info is None for output in operator._schema.returns)


def reduce_bucket_without_result(
    state: Any, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Start the all-reduce of a DDP bucket, and return a future that is done already.

    This is a DDP communication hook for dry runs. DDP would otherwise wait for the result of the
    all-reduce, and the collectives of :func:`fabric.tools._torch.fake_ranks` have no result.

    Args:
        state: the state of the hook, which DDP passes. Not used.
        bucket: gradients of one device and dtype.
    """
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future[Tensor]()
    future.set_result(bucket.buffer())
    return future


@cache
def freeze_garbage_in_forks() -> None:
    """Keep forked processes, such as workers of a DataLoader, from freeing a process group.

    The destructor of a group waits for the group's threads. A fork lacks these threads, so that its
    garbage collector would hang or crash. ``gc.freeze`` in the fork excludes all objects of the
    parent from garbage collection. Only the first call registers the hook, which stays for good.
    """
    os.register_at_fork(after_in_child=gc.freeze)
