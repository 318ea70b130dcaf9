"""Data parallelism in one process: one device, or replicas of a module that split each batch."""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fabric._torch import (
    is_compiled_in_place,
    registered_buffers,
    registered_modules,
    registered_parameters,
    set_registered_members,
    uncompiled,
)
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.collectives.buckets import SMALL_INTEGERS, fits_dtype, wire_dtype
from fabric.collectives.ops import sum_overflow_error
from fabric.communicators import Reduce, fold
from fabric.communicators.base import ReduceName, ReduceOp
from fabric.errors import ConfigurationError
from fabric.precision import Precision, PrecisionName
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.standalone import Group, Strategy
from fabric.tree import Leaf, Structure, Tree, flatten, leaf_paths, map_tensors, unflatten

__all__ = [
    "CopiedDataParallel",
    "DataParallelStrategy",
    "SingleDeviceStrategy",
    "ThreadedDataParallel",
]

# Returns a new context.
_ContextFactory = Callable[[], AbstractContextManager[object]]


class SingleDeviceStrategy(Strategy):
    """One process on one device, where the prepared module is the user's own module.

    Args:
        device: the device, such as ``"cpu"`` or ``"cuda:1"``. None uses the device of ``Fabric``.
        **shared: ``accelerator``, ``checkpoint_io`` and ``precision`` as for :class:`Strategy`.
    """

    name = "single_device"
    connects_processes = False

    def __init__(self, device: torch.device | str | int | None = None, **shared: Any) -> None:
        """Keep the device as the only one of ``parallel_devices``."""
        devices = None
        if device is not None:
            devices = [torch.device(device)]
        super().__init__(parallel_devices=devices, **shared)

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        """Raise a ConfigurationError if the job has more than one device."""
        if len(devices) * num_nodes != 1:
            raise ConfigurationError(
                'strategy="single_device"',
                problem=f"it drives one device, and there are {num_nodes} node(s) with "
                f"{len(devices)} device(s) each",
                expected='strategy="ddp", or devices=1',
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module itself: there are no other processes or devices to synchronize."""
        return module


class DataParallelStrategy(ParallelStrategy):
    """Data parallelism in one process by :class:`torch.nn.DataParallel`.

    Each forward pass replicates the module to every device and splits the batch over the replicas
    along dim 0. The outputs of the replicas are joined on the first device, where the loss is
    computed. The gradients of the loss end on the user's parameters and equal the gradients of one
    device, also for a batch that does not split evenly. A 0-dim output becomes a vector with one
    entry for each replica. The mean of this vector is the mean over the batch only if the batch
    splits evenly: let the module return one value for each sample, or compute the loss of the
    joined output.

    On the CPU ``devices=n`` means n replicas that run in threads and share the parameters. All
    replicas draw random numbers from one generator, in no fixed order, and so
    ``torch.utils.checkpoint`` around dropout needs a single replica.

    Buffers are kept as replica 0 left them. Values that a forward pass assigns to other attributes
    of the module are lost. ``torch.compile`` around the set-up module does not compile the
    replicas. A module that was compiled before is refused on several devices.

    There is one process: ``world_size`` is 1, ``is_distributed`` is false, ``Fabric.all_reduce``
    changes nothing, and data is not sharded. Methods that are not marked as forward methods run on
    the first device alone, on all of their arguments.

    Args:
        accelerator: the hardware. None uses the accelerator of ``Fabric``.
        parallel_devices: the devices, one for each replica. The CPU may be named several times.
        checkpoint_io: the format of ``save`` and ``load``. None uses the strategy's own.
        precision: the precision. None uses the precision of ``Fabric``.
    """

    name = "dp"
    connects_processes = False
    drives_all_devices = True

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision: Precision | PrecisionName | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, checkpoint_io=checkpoint_io, precision=precision
        )

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        """Raise a ConfigurationError for several nodes, or for an accelerator that is named twice.

        The CPU may be named several times, once for each replica.
        """
        has_repeated_device = accelerator.name != "cpu" and len(set(devices)) < len(devices)
        if num_nodes > 1 or has_repeated_device:
            names = ", ".join(map(str, devices))
            raise ConfigurationError(
                f'strategy="dp" on {num_nodes} nodes with devices {names}',
                problem="it drives the devices of one node from one process, and no device but the "
                "CPU may be named twice",
                suggestion='strategy="ddp", with a process for each device',
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return a wrapper that splits each batch over replicas of the module.

        Not a collective: there is one process.

        Raises:
            ConfigurationError: the module was compiled, and there are several devices.
        """
        devices = self.runtime.devices
        if len(devices) > 1:
            _check_not_compiled(module)
        prepared: ThreadedDataParallel | CopiedDataParallel
        # On the CPU and MPS, nn.DataParallel would run the module once, on the whole batch.
        if self.root_device.type in ("cpu", "mps"):
            prepared = ThreadedDataParallel(module, devices)
        else:
            prepared = CopiedDataParallel(
                module, device_ids=list(devices), output_device=self.root_device
            )
        precision = self.runtime.precision
        # The forward context of a user's own precision may belong to a thread, as autocast does.
        # So each replica enters it in its own thread.
        if precision.has_own_context:
            prepared.forward_context = partial(precision.forward_context, self.root_device.type)
        return prepared

    @override
    def unwrap(self, prepared: nn.Module) -> nn.Module:
        if isinstance(prepared, nn.DataParallel):
            prepared = prepared.module
        return super().unwrap(prepared)

    @override
    def all_reduce(
        self,
        collection: Tree,
        group: Group = None,
        reduce_op: ReduceName | ReduceOp | None = "mean",
    ) -> Tree:
        """Reduce every tensor of a collection that was gathered from the replicas.

        Not a collective: there is one process. ``Fabric.all_reduce`` reduces over processes, and
        changes nothing.

        Args:
            collection: any collection. Tensors have the shape ``(replicas, *s)``. An example is
                the vector that a 0-dim output becomes. Tensors of shape ``()`` and other objects
                are returned unchanged.
            group: None. There are no other processes.
            reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"`` or a
                torch ``ReduceOp``.

        Returns:
            A new collection of the same structure and dtypes, with tensors of shape ``s``.

        Raises:
            ConfigurationError: the reduction is unknown or has no meaning for the tensor's dtype,
                or there are no rows.
        """
        op = Reduce(reduce_op)
        # Called for its error: the reduction may have no meaning, such as the mean of integers. The
        # result is not used, since a reduction over one process changes nothing.
        with torch.no_grad():
            super().all_reduce(collection, group, op)
        return map_tensors(partial(_reduce_rows, op), collection)


# [Note: Replicas]
# A *replica* is a copy of the user's module for one forward pass on one device. It gets a *chunk*
# of the batch. The module tree and the Python attributes of each module are copied, so that
# attributes that a forward pass assigns to `self` are lost afterward. On the CPU all replicas share
# the parameters themselves. The gradients of the replicas add up on the parameters, and equal the
# gradients of one device. Replica 0 also shares the buffers, so that changes and assignments of its
# buffers last. The other replicas have copies of the buffers. Hooks are shared, and so they run
# once for each replica.
class ThreadedDataParallel(nn.DataParallel[Any]):
    """:class:`torch.nn.DataParallel` for replicas that share one device, such as the CPU.

    With one device, torch's class runs the module once, on the whole batch. This class does
    what torch's class does on several devices:

    - Tensors of shape ``(batch, *s)`` among the arguments are split along dim 0 as
      :meth:`torch.Tensor.chunk` splits them. Chunks may be uneven, and a small batch may use fewer
      replicas.
    - 0-dim tensors and other objects go to every replica.
    - Outputs are joined along dim 0. 0-dim outputs become a vector with one entry for each replica.
    - A call without tensors to split runs on replica 0.
    - With a single device the module itself is called.

    Args:
        module: the user's module. Its parameters and buffers are on the device.
        devices: the device, repeated once for each replica.

    Attributes:
        forward_context: returns a context that each replica enters in its thread.

    Raises:
        ConfigurationError: in a call, the tensors among the arguments differ in the size of dim 0,
            or the replicas return collections of different structures, or objects that are neither
            tensors nor equal.
    """

    forward_context: _ContextFactory = nullcontext

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        """Set the attributes that the ``forward`` of ``nn.DataParallel`` reads."""
        # nn.DataParallel.__init__ is skipped. It moves the module to a GPU if the machine has one.
        nn.Module.__init__(self)
        self.module = module
        self.dim = 0
        # With an empty list, the forward of nn.DataParallel calls the module itself.
        self.device_ids: list[torch.device] = []
        if len(devices) > 1:
            self.device_ids = list(devices)
        self.output_device = devices[0]
        self.src_device_obj = devices[0]

    @override
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Split the arguments of a call along dim 0. Called by the ``forward`` of torch's class.

        Args:
            inputs: the positional arguments of the call.
            kwargs: the keyword arguments of the call. None stands for none.
            device_ids: one entry for each replica.

        Returns:
            The positional arguments and the keyword arguments of each replica. There are fewer
            entries than replicas if the batch is small, and one entry if nothing can be split.
        """
        arguments = (inputs, kwargs or {})
        batch_size = _batch_size(arguments)
        # Rounded up, as Tensor.chunk does.
        chunk_size = max(1, math.ceil(batch_size / len(device_ids)))
        replica_inputs: list[Any] = []
        replica_kwargs: list[Any] = []
        # Replica 0 runs even if there is no batch, or an empty one.
        for start in range(0, max(1, batch_size), chunk_size):
            chunk = partial(_take_chunk, start, chunk_size)
            chunk_inputs, chunk_kwargs = map_tensors(chunk, arguments)
            replica_inputs.append(chunk_inputs)
            replica_kwargs.append(chunk_kwargs)
        return replica_inputs, replica_kwargs

    @override
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Return one replica of the module for each entry of ``device_ids``.

        Called by the ``forward`` of torch's class. Only replica 0 shares the module's buffers. So
        its updates of running statistics are kept, and those of the other replicas are lost.
        """
        replicas: list[nn.Module] = []
        for index in range(len(device_ids)):
            replicas.append(_replicate(module, shares_buffers=index == 0))
        return replicas

    @override
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its chunk, in a new thread, and return the outputs in order.

        Called by the ``forward`` of torch's class. All threads are joined first. Then the error of
        the first replica that has one is raised.

        Args:
            replicas: the replicas. All are on one device.
            inputs: the positional arguments of each replica.
            kwargs: the keyword arguments of each replica.
        """
        # Each thread has its own grad mode, inference mode and autocast. This function calls a
        # replica in the modes of the present thread.
        call_in_modes = _bind_thread_modes(self.src_device_obj.type, self.forward_context)
        results: list[Any] = [None] * len(replicas)
        errors: dict[int, BaseException] = {}

        def run_replica(index: int) -> None:
            """Run one replica and keep its result or error. The function of a thread."""
            try:
                results[index] = call_in_modes(replicas[index], *inputs[index], **kwargs[index])
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors[index] = error

        threads: list[threading.Thread] = []
        for index in range(len(replicas)):
            name = f"replica-{index}"
            threads.append(threading.Thread(target=run_replica, args=(index,), name=name))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            index = min(errors)
            errors[index].add_note(
                f"replica {index} of {len(replicas)} on {self.src_device_obj} raised this"
            )
            try:
                raise errors[index]
            finally:
                # The traceback of an error refers to this frame, and this dict to the error. The
                # cycle would keep the tensors of the replicas alive.
                errors.clear()
        return results

    @override
    def gather(self, outputs: Sequence[Tree], output_device: Any) -> Tree:
        """Join the outputs of the replicas leaf by leaf, and return one output.

        Called by the ``forward`` of torch's class.

        Args:
            outputs: the output of each replica, any collection.
            output_device: not used. All outputs are on one device.

        Raises:
            ConfigurationError: the outputs have different structures, or leaves that cannot be
                joined.
        """
        leaves_by_replica: list[list[Leaf]] = []
        structures: list[Structure] = []
        paths_by_replica: list[list[str]] = []
        for output in outputs:
            leaves, structure = flatten(output)
            leaves_by_replica.append(leaves)
            structures.append(structure)
            paths_by_replica.append(leaf_paths(structure, "output"))
        # Raises if the outputs have different structures, and so different paths.
        paths = _equal_object("output", paths_by_replica)
        # An item has the same leaf of each replica.
        leaves_by_path = list(zip(*leaves_by_replica, strict=True))
        joined: list[Leaf] = []
        for path, leaves in zip(paths, leaves_by_path, strict=True):
            joined.append(_join_leaves(path, leaves))
        return unflatten(structures[0], joined)


class CopiedDataParallel(nn.DataParallel[Any]):
    """:class:`torch.nn.DataParallel` on several accelerator devices, with the caller's autocast.

    In the threads of the replicas, torch's class enters autocast with the default dtype, whatever
    dtype the caller's autocast has. The arguments are those of torch's class.

    Attributes:
        forward_context: returns a context that each replica enters in its thread.
    """

    forward_context: _ContextFactory = nullcontext

    @override
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Return one replica of the module for each device.

        Called by the ``forward`` of torch's class. In torch's replicas, a method in an attribute of
        a module stays bound to the original module. This method binds it to the replica.
        """
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            for original, copied in zip(module.modules(), replica.modules(), strict=True):
                _rebind_methods(original, copied)
        return replicas

    @override
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its chunk, in a thread with the caller's autocast.

        Called by the ``forward`` of torch's class. torch starts the threads.
        """
        call_in_modes = _bind_thread_modes(self.src_device_obj.type, self.forward_context)
        calls = [partial(call_in_modes, replica) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def _check_not_compiled(module: nn.Module) -> None:
    """Raise a ConfigurationError if a module or a submodule was compiled.

    Compiled code would use the parameters and buffers of the original module in every replica.
    """
    compiled: list[str] = []
    for path, submodule in module.named_modules():
        if uncompiled(submodule) is not submodule or is_compiled_in_place(submodule):
            # The path of the root is empty.
            compiled.append(path or "the module itself")
    if compiled:
        raise ConfigurationError(
            f'setup of a {type(module).__name__} with strategy="dp" on several devices',
            problem=f"torch.compile was applied to {', '.join(compiled)}, and compiled code is "
            "bound to the module that it was made from, not to its replicas",
            suggestion="setup of the module without torch.compile; or "
            'strategy="ddp", which takes compiled modules',
        )


def _reduce_rows(op: Reduce, tensor: Tensor) -> Tensor:
    """Return the reduction of a tensor over dim 0, in the tensor's dtype.

    Row n of the tensor is from replica n. A tensor without dimensions is one value of the whole
    process, and is returned unchanged.

    Raises:
        ConfigurationError: the tensor has no rows, or a sum is beyond the range of the dtype.
    """
    if tensor.dim() == 0:
        return tensor
    if len(tensor) == 0:
        raise ConfigurationError(
            f'all_reduce of shape {tuple(tensor.shape)} under strategy="dp"',
            problem="it has no rows",
        )
    # Some dtypes are reduced in a wider dtype, as in a reduction over processes. For example, a sum
    # in float16 may overflow although the mean would not.
    rows = tensor.to(wire_dtype(tensor.dtype, op)).unbind()
    result = fold(op, rows)
    may_overflow = op is Reduce.SUM and tensor.dtype in SMALL_INTEGERS
    if may_overflow and not fits_dtype(result, tensor.dtype):
        raise sum_overflow_error("all_reduce", tensor.dtype)
    return result.to(tensor.dtype)


# [Note: Threads]
# Grad mode, inference mode and autocast belong to a thread, and a new thread has torch's defaults.
# So each replica enters the modes of the caller. autocast's cache of casted parameters is off in
# the replicas: all threads share one cache, and the precision in which gradients are summed would
# depend on whether two replicas use the same entry. Each forward pass starts new threads, because
# the order in which autograd sums gradients depends on how much a thread has computed before. All
# threads share one generator of the CPU, so that two replicas draw their random numbers in no fixed
# order.
def _bind_thread_modes(device_type: str, forward_context: _ContextFactory) -> Callable[..., Any]:
    """Return a function that calls another function, in any thread, under this thread's modes.

    The modes are grad mode, inference mode and autocast. They are read now, and entered around each
    call.

    Args:
        device_type: the device of the replicas. The autocast modes of this device and of the CPU
            are entered.
        forward_context: returns a further context to enter around each call.
    """
    has_grad = torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    # The device type, the dtype, and whether autocast is on.
    autocast_modes: list[tuple[str, torch.dtype, bool]] = []
    for kind in ("cpu", device_type):
        dtype = torch.get_autocast_dtype(kind)
        autocast_modes.append((kind, dtype, torch.is_autocast_enabled(kind)))

    def call_in_modes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function under the modes of the thread that bound them, and return its result."""
        with ExitStack() as stack:
            # inference_mode also sets the grad mode, and so the grad mode is set after it.
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            for kind, dtype, is_enabled in autocast_modes:
                # The cache of autocast is off, because all threads would share it.
                autocast = torch.autocast(kind, dtype, enabled=is_enabled, cache_enabled=False)
                stack.enter_context(autocast)
            stack.enter_context(forward_context())
            return function(*args, **kwargs)

    return call_in_modes


def _batch_size(arguments: Tree) -> int:
    """Return the size of dim 0 that all tensors of a call have in common.

    Tensors without dimensions are not counted. If there are no other tensors, the size is 0.

    Raises:
        ConfigurationError: the tensors have different sizes.
    """
    shapes: list[tuple[int, ...]] = []
    leaves, _ = flatten(arguments)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            shapes.append(tuple(leaf.shape))
    sizes = {shape[0] for shape in shapes}
    if len(sizes) > 1:
        raise ConfigurationError(
            'a forward pass under strategy="dp" with tensors '
            f"of shapes {', '.join(map(str, shapes))}",
            problem="a batch is split over the replicas along dim 0, and these tensors differ in "
            "it",
            suggestion="mask.expand(batch, ...) for what belongs to every sample, or a buffer of "
            "the module",
        )
    return sizes.pop() if sizes else 0


def _take_chunk(start: int, size: int, tensor: Tensor) -> Tensor:
    """Return the chunk of a tensor that one replica gets.

    Args:
        start: the first row of the chunk.
        size: the number of rows. The last chunk may have fewer.
        tensor: the tensor. Without dimensions, it is returned unchanged.
    """
    if tensor.dim() == 0:
        return tensor
    rows = tensor[start : start + size]
    # Views of one tensor share their autograd history. If replicas changed their chunks in place,
    # all would change this history. So a tensor with gradients is copied.
    return rows.clone() if rows.requires_grad else rows.detach()


def _replicate(module: nn.Module, shares_buffers: bool) -> nn.Module:
    """Return a copy of a module tree that shares the parameters of the original.

    Args:
        module: the root of the tree.
        shares_buffers: whether the copy shares the buffers, too. Otherwise it has copies of them.
    """
    # __new__ makes a module without attributes, which are copied below. copy.copy is not used,
    # since it calls methods such as __getstate__, which may leave attributes out.
    replicas = {original: type(original).__new__(type(original)) for original in module.modules()}
    # The copy of each buffer. Submodules that share a buffer have to share the copy, too.
    copied_buffers: dict[Tensor, Tensor] = {}
    for original, replica in replicas.items():
        # The children of a replica are replicas, too.
        children: dict[str, nn.Module | None] = {}
        for name, child in registered_modules(original).items():
            children[name] = None if child is None else replicas[child]
        buffers = registered_buffers(original)
        if not shares_buffers:
            buffers = _copy_buffers(buffers, copied_buffers)
        vars(replica).update(vars(original))
        # By now the replica refers to the original's dicts of parameters, buffers and children. It
        # gets dicts of its own.
        set_registered_members(replica, dict(registered_parameters(original)), buffers, children)
        # A method in the attributes, such as a replaced forward, would run on the original.
        _rebind_methods(original, replica)
    return replicas[module]


def _copy_buffers(
    buffers: dict[str, Tensor | None], copied_buffers: dict[Tensor, Tensor]
) -> dict[str, Tensor | None]:
    """Return copies of the buffers of a module, by name.

    Args:
        buffers: the buffers by name. None stands for a name without a buffer.
        copied_buffers: the copies made so far for the whole model, by the original buffer. The new
            copies are added.
    """
    copies_by_name: dict[str, Tensor | None] = {}
    for name, buffer in buffers.items():
        if buffer is None:
            copies_by_name[name] = None
            continue
        if buffer not in copied_buffers:
            copied_buffers[buffer] = buffer.clone()
        copies_by_name[name] = copied_buffers[buffer]
    return copies_by_name


def _rebind_methods(original: nn.Module, replica: nn.Module) -> None:
    """Bind the methods in the attributes of a replica to the replica, in place.

    An example is a ``forward`` method that was assigned to the original module. In a plain copy of
    the attributes, the method is bound to the original module, and would run on it.
    """
    for name, value in vars(original).items():
        if isinstance(value, MethodType) and value.__self__ is original:
            vars(replica)[name] = MethodType(value.__func__, replica)


def _join_leaves(path: str, leaves: Sequence[Leaf]) -> Leaf:
    """Return one leaf of the joined output.

    Tensors are concatenated along dim 0, and tensors without dimensions are stacked. Other objects
    have to be equal, and the first one is returned.

    Args:
        path: where the leaf is in the output, for the error.
        leaves: the leaf of each replica.

    Raises:
        ConfigurationError: the leaves are neither all tensors nor all equal.
    """
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return _equal_object(path, leaves)
    tensors = tuple(leaves)
    if tensors[0].dim() == 0:
        return torch.stack(tensors)
    return torch.cat(tensors)


def _equal_object(path: str, objects: Sequence[Leaf]) -> Leaf:
    """Return the object that all replicas have returned.

    Args:
        path: where the object is in the output, for the error.
        objects: the object of each replica.

    Raises:
        ConfigurationError: the objects differ.
    """
    first = objects[0]
    for value in objects:
        # Identity comes first, since "!=" of objects such as arrays does not return a bool.
        if value is not first and value != first:
            returned = ", ".join(map(repr, objects))
            raise ConfigurationError(
                f'gathering {path} of a forward pass under strategy="dp"',
                problem=f"it cannot be joined along dim 0: the replicas returned {returned}",
                expected="collections of one structure, of tensors (torch.tensor(number) for "
                "numbers) or objects that are equal",
            )
    return first
