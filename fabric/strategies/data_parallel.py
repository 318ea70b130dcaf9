"""One process: on a single device, or with replicas of a module that split each batch.

[Note: Replicas] A *replica* is a copy of the user's module for one forward pass, on one device,
with a *chunk* of the batch. Each is a copy of the module tree and of its Python attributes, so that
what a forward pass assigns to ``self`` is gone afterward. On the CPU all replicas share the
parameters themselves: their gradients add up on the parameters, and equal the gradients of one
device. Replica 0 shares the buffers too, whether they are written in place or assigned; the other
replicas have copies. Hooks are shared, and thus run once for each replica.

[Note: Threads] Grad mode, inference mode and autocast belong to a thread, and a new thread has
torch's defaults, so each replica enters the modes of the caller. autocast's cache of casted
parameters is off in the replicas: all threads have one cache, and whether two replicas use the same
entry would decide in which precision their gradients are summed. Threads are new in each forward
pass: the order in which autograd sums gradients depends on how much a thread has computed before.
All threads have one generator of the CPU: the random numbers of two replicas are drawn in no fixed
order.
"""

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
from fabric.collectives.buckets import MEAN_WIRE_DTYPES, WIRE_DTYPES
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

_ContextFactory = Callable[[], AbstractContextManager[object]]


class SingleDeviceStrategy(Strategy):
    """One process on one device; the prepared module is the user's own.

    Args:
        device: the device, such as ``"cpu"`` or ``"cuda:1"``. None uses that of ``Fabric``.
        **shared: ``accelerator``, ``checkpoint_io`` and ``precision`` as for :class:`Strategy`.
    """

    name = "single_device"
    connects_processes = False

    def __init__(self, device: torch.device | str | int | None = None, **shared: Any) -> None:
        devices = None
        if device is not None:
            devices = [torch.device(device)]
        super().__init__(parallel_devices=devices, **shared)

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        if len(devices) * num_nodes != 1:
            raise ConfigurationError(
                'strategy="single_device"',
                problem=f"it drives one device, and there are {num_nodes} node(s) with "
                f"{len(devices)} device(s) each",
                expected='strategy="ddp", or devices=1',
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


class DataParallelStrategy(ParallelStrategy):
    """Data parallelism in one process by :class:`torch.nn.DataParallel`.

    Each forward pass replicates the module to every device and splits the batch over the replicas
    along dim 0; their outputs are joined on the first device, where the loss is computed. Its
    gradients end on the user's parameters and equal the gradients of one device, also for a batch
    that does not split evenly. A 0-dim output becomes a vector with one entry for each replica,
    whose mean is the mean over the batch only if the batch splits evenly: let the module return one
    value for each sample, or take the loss of the joined output.

    On the CPU ``devices=n`` means n replicas that run in threads and share the parameters. Buffers
    are kept as those of replica 0, and what a forward pass assigns to other attributes of the
    module is lost. Random numbers, as of dropout, are drawn from one generator in no fixed order on
    the CPU; ``torch.utils.checkpoint`` around dropout is for one replica. ``torch.compile`` around
    the set-up module leaves the replicas as they are, and a module that was compiled before is
    refused on several devices.

    There is one process: ``world_size`` is 1, ``is_distributed`` false, ``Fabric.all_reduce``
    changes nothing, and data is not sharded. Methods that are not marked as forward methods run on
    the first device alone, on all of their arguments.

    Args:
        accelerator: the hardware. None uses that of ``Fabric``.
        parallel_devices: the devices, one for each replica. The CPU may be named several times.
        checkpoint_io: the format of ``save`` and ``load``. None uses the strategy's own.
        precision: the precision. None uses that of ``Fabric``.
    """

    name = "dp"
    connects_processes = False
    drives_all_devices = True
    _wrapper_class = nn.DataParallel

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
        is_repeated = accelerator.name != "cpu" and len(set(devices)) < len(devices)
        if num_nodes > 1 or is_repeated:
            names = ", ".join(map(str, devices))
            raise ConfigurationError(
                f'strategy="dp" on {num_nodes} nodes with devices {names}',
                problem="it drives the devices of one node from one process, and no device but the "
                "CPU may be named twice",
                suggestion='strategy="ddp", with a process for each device',
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        devices = self.runtime.devices
        if len(devices) > 1:
            _check_not_compiled(module)
        prepared: ThreadedDataParallel | CopiedDataParallel
        # On these devices nn.DataParallel would run the module once, on the whole batch.
        if self.root_device.type in ("cpu", "mps"):
            prepared = ThreadedDataParallel(module, devices)
        else:
            prepared = CopiedDataParallel(
                module, device_ids=list(devices), output_device=self.root_device
            )
        precision = self.runtime.precision
        if precision.has_own_context:
            prepared.forward_context = partial(precision.forward_context, self.root_device.type)
        return prepared

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
            collection: any collection. Tensors have the shape ``(replicas, *s)``, as the vector
                that a 0-dim output becomes. Tensors of shape ``()`` and other objects are returned
                as they are.
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
        # Over this one process: changes no value, and refuses what has no meaning, such as the mean
        # of integers.
        with torch.no_grad():
            super().all_reduce(collection, group, op)
        return map_tensors(partial(_reduce_rows, op), collection)


class ThreadedDataParallel(nn.DataParallel[Any]):
    """:class:`torch.nn.DataParallel` for replicas that share one device, such as those of the CPU.

    On one device torch's own runs the module once, on the whole batch. The semantics are torch's,
    see ``[Note: Replicas]``: tensors of shape ``(batch, *s)`` among the arguments are split along
    dim 0 as :meth:`torch.Tensor.chunk` does, so that chunks may be uneven and a small batch uses
    fewer replicas; 0-dim tensors and other objects go to every replica. Outputs are joined along
    dim 0, 0-dim outputs into a vector with one entry for each replica. A call without anything to
    split runs on replica 0. With a single device the module is called as it is.

    Args:
        module: the user's module, on that device.
        devices: the device, once for each replica.

    Attributes:
        forward_context: returns a context to enter in the thread of each replica.

    Raises:
        ConfigurationError: in a call, when the tensors among the arguments differ in dim 0, or when
            the replicas return collections of different structures, or objects that are neither
            tensors nor equal.
    """

    forward_context: _ContextFactory = nullcontext

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        # Not torch's own: it looks for GPUs, and moves the module to one when there is one.
        nn.Module.__init__(self)
        self.module = module
        self.dim = 0
        self.device_ids: list[torch.device] = []  # torch calls the module as it is
        if len(devices) > 1:
            self.device_ids = list(devices)
        self.output_device = devices[0]
        self.src_device_obj = devices[0]

    @override
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Split the arguments of a call into those of each replica that has something to do."""
        call = (inputs, kwargs or {})
        batch_size = _batch_size(call)
        chunk_size = max(1, math.ceil(batch_size / len(device_ids)))
        calls: list[Any] = []
        for start in range(0, max(1, batch_size), chunk_size):
            calls.append(map_tensors(partial(_chunk, start, chunk_size), call))
        replica_inputs, replica_kwargs = zip(*calls, strict=True)
        return replica_inputs, replica_kwargs

    @override
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Return one replica of the module for each device."""
        replicas: list[nn.Module] = []
        for index in range(len(device_ids)):
            replicas.append(_replicate(module, shares_buffers=index == 0))
        return replicas

    @override
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its chunk, in a thread.

        Once all have ended, the error of the first replica that has one is raised.
        """
        as_caller = _as_caller(self.src_device_obj.type, self.forward_context)
        results: list[Any] = [None] * len(replicas)
        errors: dict[int, BaseException] = {}

        def run_replica(index: int) -> None:
            try:
                results[index] = as_caller(replicas[index], *inputs[index], **kwargs[index])
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
                # The error's traceback leads to these frames: without this, their tensors would
                # outlive it.
                errors.clear()
        return results

    @override
    def gather(self, outputs: Sequence[Tree], output_device: Any) -> Tree:
        """Join the outputs of the replicas, collections leaf by leaf."""
        leaves_by_replica: list[list[Leaf]] = []
        structures: list[Structure] = []
        paths_by_replica: list[list[str]] = []
        for output in outputs:
            leaves, structure = flatten(output)
            leaves_by_replica.append(leaves)
            structures.append(structure)
            paths_by_replica.append(leaf_paths(structure, "output"))
        # Equal paths mean equal structures. Raises an error if they differ.
        paths = _join("output", paths_by_replica)
        joined: list[Leaf] = []
        for path, values in zip(paths, zip(*leaves_by_replica, strict=True), strict=True):
            joined.append(_join(path, values))
        return unflatten(structures[0], joined)


class CopiedDataParallel(nn.DataParallel[Any]):
    """:class:`torch.nn.DataParallel` on several accelerator devices, with the caller's autocast.

    torch's own enters autocast in the threads of the replicas, but with its default dtype, whatever
    the caller's is. Arguments as for torch's.

    Attributes:
        forward_context: returns a context to enter in the thread of each replica.
    """

    forward_context: _ContextFactory = nullcontext

    @override
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """Return one replica of the module for each device, whose methods are its own."""
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            for original, copied in zip(module.modules(), replica.modules(), strict=True):
                _rebind_methods(original, copied)
        return replicas

    @override
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its chunk, in a thread with the caller's autocast."""
        as_caller = _as_caller(self.src_device_obj.type, self.forward_context)
        calls = [partial(as_caller, replica) for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def _check_not_compiled(module: nn.Module) -> None:
    """Raise a ConfigurationError if a module or a submodule was compiled."""
    compiled: list[str] = []
    for path, submodule in module.named_modules():
        if uncompiled(submodule) is not submodule or is_compiled_in_place(submodule):
            compiled.append(path or "it")
    if compiled:
        raise ConfigurationError(
            f'setup of a {type(module).__name__} with strategy="dp" on several devices',
            problem=f"torch.compile was applied to {', '.join(compiled)}, and compiled code is "
            "bound to the module that it was made from, not to its replicas",
            suggestion="setup of the module without torch.compile; or "
            'strategy="ddp", which takes compiled modules',
        )


def _reduce_rows(op: Reduce, tensor: Tensor) -> Tensor:
    """Return the reduction of a tensor over its first dimension."""
    if tensor.dim() == 0:
        return tensor
    if not len(tensor):
        raise ConfigurationError(
            f"all_reduce of shape {tuple(tensor.shape)} under dp", problem="it has no rows"
        )
    # The mean is computed as over processes: a sum of float16 may overflow where a mean does not.
    dtypes = MEAN_WIRE_DTYPES if op is Reduce.MEAN else WIRE_DTYPES
    dtype = dtypes.get(tensor.dtype, tensor.dtype)
    return fold(op, tensor.to(dtype).unbind()).to(tensor.dtype)


def _as_caller(device_type: str, forward_context: _ContextFactory) -> Callable[..., Any]:
    """Return a function that calls another one in any thread as if this thread had called it.

    See ``[Note: Threads]``. ``forward_context`` is entered in the thread.
    """
    has_grad = torch.is_grad_enabled()
    is_inference = torch.is_inference_mode_enabled()
    autocast_arguments: list[tuple[str, torch.dtype, bool]] = []
    for kind in ("cpu", device_type):
        dtype = torch.get_autocast_dtype(kind)
        autocast_arguments.append((kind, dtype, torch.is_autocast_enabled(kind)))

    def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            for arguments in autocast_arguments:
                stack.enter_context(torch.autocast(*arguments, cache_enabled=False))
            stack.enter_context(forward_context())
            return function(*args, **kwargs)

    return call


def _batch_size(call: Tree) -> int:
    """Return the size of the tensors in a collection along dim 0, or 0 if there are none.

    Raises:
        ConfigurationError: they have different sizes.
    """
    shapes: list[tuple[int, ...]] = []
    for leaf in flatten(call)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            shapes.append(tuple(leaf.shape))
    sizes = {shape[0] for shape in shapes}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"a forward pass under dp with tensors of shapes {', '.join(map(str, shapes))}",
            problem="a batch is split over the replicas along dim 0, and these tensors differ in "
            "it",
            suggestion="mask.expand(batch, ...) for what belongs to every sample, or a buffer of "
            "the module",
        )
    return sizes.pop() if sizes else 0


def _chunk(start: int, size: int, tensor: Tensor) -> Tensor:
    """Return the rows of a batch that one replica gets."""
    if tensor.dim() == 0:
        return tensor
    rows = tensor[start : start + size]
    # Replicas that write to their chunks in place must not share a history of autograd.
    return rows.clone() if rows.requires_grad else rows.detach()


def _replicate(module: nn.Module, shares_buffers: bool) -> nn.Module:
    """Return a copy of a module tree that shares its parameters, and its buffers or copies."""
    # copy.copy would go through the state that a class gives to pickle.
    replicas = {original: type(original).__new__(type(original)) for original in module.modules()}
    copied_buffers: dict[Tensor, Tensor] = {}  # submodules may share a buffer
    for original, replica in replicas.items():
        children: dict[str, nn.Module | None] = {}
        for name, child in registered_modules(original).items():
            children[name] = None if child is None else replicas[child]
        buffers = registered_buffers(original)
        if not shares_buffers:
            buffers = _copy_buffers(buffers, copied_buffers)
        vars(replica).update(vars(original))
        set_registered_members(replica, dict(registered_parameters(original)), buffers, children)
        _rebind_methods(original, replica)
    return replicas[module]


def _copy_buffers(
    buffers: dict[str, Tensor | None], copies: dict[Tensor, Tensor]
) -> dict[str, Tensor | None]:
    """Return copies of a module's buffers. ``copies`` holds and gets the copy of each buffer."""
    copied: dict[str, Tensor | None] = {}
    for name, buffer in buffers.items():
        if buffer is None:
            copied[name] = None
            continue
        if buffer not in copies:
            copies[buffer] = buffer.clone()
        copied[name] = copies[buffer]
    return copied


def _rebind_methods(original: nn.Module, replica: nn.Module) -> None:
    """Have methods in a module's attributes act on the replica.

    An example is a ``forward`` that was replaced for one call.
    """
    for name, value in vars(original).items():
        if isinstance(value, MethodType) and value.__self__ is original:
            vars(replica)[name] = MethodType(value.__func__, replica)


def _join(path: str, values: Sequence[Leaf]) -> Leaf:
    """Return one leaf of the output, joined from the leaves of the replicas."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        tensors = tuple(values)
        return torch.stack(tensors) if first.dim() == 0 else torch.cat(tensors)
    for value in values:
        if value is not first and value != first:
            returned = ", ".join(map(repr, values))
            raise ConfigurationError(
                f"gathering {path} of a forward pass under dp",
                problem=f"it cannot be joined along dim 0: the replicas returned {returned}",
                expected="collections of one structure, of tensors (torch.tensor(number) for "
                "numbers) or objects that are equal",
            )
    return first
