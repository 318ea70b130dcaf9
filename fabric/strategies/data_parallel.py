"""One process: on a single device, or with replicas of a module, each of which has a part of the batch.

[Note: Replicas] A *replica* is a copy of the user's module for one forward pass, on one device, with a *part* of the
batch. Each is a copy of the module tree and of its Python attributes, so that what a forward pass assigns to ``self``
is gone afterward. On the CPU all replicas share the parameters themselves: their gradients add up on them, and equal
those of one device. Replica 0 shares the buffers too, whether they are written in place or assigned; the others have
copies. Hooks are shared, and thus run once for each replica.

[Note: Threads] Grad mode, inference mode and autocast belong to a thread, and a new one has torch's defaults, so each
replica enters those of the caller. autocast's cache of casted parameters is off in them: the cache is one for all
threads, and whether two replicas use the same entry would decide in which precision their gradients are summed. Threads
are new in each forward pass: the order in which autograd sums gradients depends on how much a thread has computed
before. The generator of the CPU is one for all threads: the random numbers of two replicas are drawn in no fixed order.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fabric._torch import compiled_in_place
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.collectives.buckets import MEAN_WIRE_DTYPES, WIRE_DTYPES
from fabric.communicators import Reduce, fold
from fabric.errors import ConfigurationError
from fabric.precision import Precision, PrecisionName
from fabric.strategies.base import uncompiled
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.standalone import Group, Strategy
from fabric.tree import flatten, leaf_paths, map_tensors, unflatten

__all__ = [
    "CopiedDataParallel",
    "DataParallelStrategy",
    "SingleDeviceStrategy",
    "ThreadedDataParallel",
]

_ContextFactory = Callable[[], AbstractContextManager[Any]]


class SingleDeviceStrategy(Strategy):
    """One process on one device; the prepared module is the user's own.

    Args:
        device: the device, such as ``"cpu"`` or ``"cuda:1"``; None for the one that ``Fabric`` resolves.
        **shared: ``accelerator``, ``checkpoint_io`` and ``precision`` as for :class:`Strategy`.
    """

    name = "single_device"
    connects_processes = False

    def __init__(self, device: torch.device | str | int | None = None, **shared: Any) -> None:
        super().__init__(
            parallel_devices=None if device is None else [torch.device(device)], **shared
        )

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        if len(devices) * num_nodes != 1:
            problem = f"it drives one device, and there are {num_nodes} node(s) with {len(devices)} device(s) each"
            raise ConfigurationError(
                'strategy="single_device"', problem, 'strategy="ddp", or devices=1'
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


class DataParallelStrategy(ParallelStrategy):
    """Data parallelism in one process by :class:`torch.nn.DataParallel`.

    Each forward pass replicates the module to every device and splits the batch over the replicas along dim 0; their
    outputs are joined on the first device, where the loss is computed. Its gradients end on the user's parameters and
    equal those of one device, for uneven parts too. A 0-dim output becomes a vector with one entry for each replica,
    whose mean is the mean over the batch only if the parts are even: let the module return one value for each sample,
    or take the loss of the joined output.

    On the CPU ``devices=n`` means n replicas that run in threads and share the parameters. Buffers are kept as those
    of replica 0, and what a forward pass assigns to other attributes of the module is lost. Random numbers, as of
    dropout, are drawn from one generator in no fixed order there; ``torch.utils.checkpoint`` around dropout is for
    one replica. ``torch.compile`` around the set-up module leaves the replicas as they are, and a module that was
    compiled before is refused on several devices.

    There is one process: ``world_size`` is 1, ``is_distributed`` false, ``Fabric.all_reduce`` changes nothing, and data
    is not sharded.
    Methods that are not marked as forward methods run on the first device alone, on all of their arguments.

    Args:
        accelerator: as for :class:`fabric.strategies.Strategy`, and so are the rest.
        parallel_devices: the devices, one for each replica; the CPU may be named several times.
        checkpoint_io: format of ``save`` and ``load``.
        precision: precision.
    """

    name = "dp"
    connects_processes = False
    drives_all_devices = True
    _wrapper = nn.DataParallel

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision: Precision | PrecisionName | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, None, checkpoint_io, precision)

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        is_repeated = accelerator.name != "cpu" and len(set(devices)) < len(devices)
        if num_nodes > 1 or is_repeated:
            raise ConfigurationError(
                f'strategy="dp" on {num_nodes} nodes with devices {", ".join(map(str, devices))}',
                "it drives the devices of one node from one process, and none but the CPU may be named twice",
                suggestion='strategy="ddp", with a process for each device',
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        devices = self.runtime.devices
        named = module.named_modules() if len(devices) > 1 else ()
        compiled = [
            path or "it"
            for path, part in named
            if uncompiled(part) is not part or compiled_in_place(part)
        ]
        if compiled:
            raise ConfigurationError(
                f'setup of a {type(module).__name__} with strategy="dp" on several devices',
                f"torch.compile was applied to {', '.join(compiled)}, and compiled code acts on one module",
                suggestion='setup of the module without torch.compile; or strategy="ddp", which takes compiled modules',
            )
        # There torch's own runs the module once, on the whole batch.
        if self.root_device.type in ("cpu", "mps"):
            prepared: nn.Module = ThreadedDataParallel(module, devices)
        else:
            prepared = CopiedDataParallel(
                module, device_ids=list(devices), output_device=self.root_device
            )
        precision = self.runtime.precision
        if precision.has_own_context:
            prepared.forward_context = partial(precision.forward_context, self.root_device.type)
        return prepared

    @override
    def all_reduce(self, collection: Any, group: Group = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas every tensor of a collection that was gathered from them.

        Not a collective: there is one process. ``Fabric.all_reduce`` is the one over processes, and changes nothing.

        Args:
            collection: any collection; tensors of shape ``(replicas, *s)``, as the vector that a 0-dim output
                becomes, or of shape ``()``, which are returned as they are; so is what is not a tensor.
            group: None; there are no other processes.
            reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"`` or a torch ``ReduceOp``.

        Returns:
            A new collection of the same structure and dtypes, with tensors of shape ``s``.

        Raises:
            ConfigurationError: the reduction is unknown or has no meaning for the tensor's dtype, or there are no rows.
        """
        op = Reduce(reduce_op)
        dtypes = MEAN_WIRE_DTYPES if op is Reduce.MEAN else WIRE_DTYPES
        # Over this one process: changes no value, and refuses what has no meaning, such as the mean of integers.
        with torch.no_grad():
            super().all_reduce(collection, group, op)

        def over_rows(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0:
                return tensor
            if not len(tensor):
                raise ConfigurationError(
                    f"all_reduce of shape {tuple(tensor.shape)} under dp", "it has no rows"
                )
            # As over processes: the sum of float16 may overflow where the mean does not.
            return fold(op, tensor.to(dtypes.get(tensor.dtype, tensor.dtype)).unbind()).to(
                tensor.dtype
            )

        return map_tensors(over_rows, collection)


class ThreadedDataParallel(nn.DataParallel[Any]):
    """:class:`torch.nn.DataParallel` for replicas that share one device, such as those of the CPU.

    torch's own runs the module once there, on the whole batch. The semantics are torch's, see ``[Note: Replicas]``:
    tensors of shape ``(batch, *s)`` among the arguments are split along dim 0 as :meth:`torch.Tensor.chunk` does, so
    that parts may be uneven and a small batch uses fewer replicas; 0-dim tensors and what is no tensor go to every
    replica. Outputs are joined along dim 0, 0-dim ones into a vector with one entry for each part. A call without
    anything to split runs on replica 0. With a single device the module is called as it is.

    Args:
        module: the user's module, on that device.
        devices: the device, once for each replica.

    Raises:
        ConfigurationError: in a call, when the tensors among the arguments differ in dim 0, or when the replicas return
            collections of different structures, or different objects that are no tensors.
    """

    forward_context: _ContextFactory = nullcontext

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        # Not torch's own: it looks for GPUs, and moves the module to one when there is one.
        nn.Module.__init__(self)
        self.module = module
        self.dim = 0
        # None has torch call the module as it is.
        self.device_ids = list(devices) if len(devices) > 1 else []
        self.output_device = self.src_device_obj = devices[0]

    @override
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Split the arguments of a call into those of each replica that has something to do."""
        call = inputs, kwargs or {}
        shapes = [
            tuple(leaf.shape)
            for leaf in flatten(call)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        ]
        batch = shapes[0][0] if shapes else 0
        if any(shape[0] != batch for shape in shapes):
            raise ConfigurationError(
                f"a forward pass under dp with tensors of shapes {', '.join(map(str, shapes))}",
                "a batch is split over the replicas along dim 0, and these tensors differ in it",
                suggestion="mask.expand(batch, ...) for what belongs to every sample, or a buffer of the module",
            )
        size = max(1, -(-batch // len(device_ids)))
        parts = [
            map_tensors(partial(_part, start, size), call)
            for start in range(0, max(1, batch), size)
        ]
        return tuple(zip(*parts, strict=True))

    @override
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """One replica of the module for each device."""
        return [_replicate(module, owns_buffers=index == 0) for index in range(len(device_ids))]

    @override
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its part, in a thread; once all have ended, raise the error of the first that has one."""
        as_caller = _as_caller(self.src_device_obj.type, self.forward_context)
        results: list[Any] = [None] * len(replicas)
        errors: dict[int, BaseException] = {}

        def work(index: int) -> None:
            try:
                results[index] = as_caller(replicas[index], *inputs[index], **kwargs[index])
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors[index] = error

        indices = range(len(replicas))
        threads = [
            threading.Thread(target=work, args=(index,), name=f"replica-{index}")
            for index in indices
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = min(errors)
            errors[first].add_note(
                f"replica {first} of {len(replicas)} on {self.src_device_obj} raised this"
            )
            try:
                raise errors[first]
            finally:
                # The error's traceback leads to these frames: without this, their tensors would outlive it.
                errors.clear()
        return results

    @override
    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the outputs of the replicas, collections leaf by leaf."""
        flat = [flatten(output) for output in outputs]
        # Where these are equal, so are the structures.
        paths = _join("output", [leaf_paths(structure, "output") for _, structure in flat])
        values = zip(*(leaves for leaves, _ in flat), strict=True)
        return unflatten(
            flat[0][1], [_join(path, leaves) for path, leaves in zip(paths, values, strict=True)]
        )


class CopiedDataParallel(nn.DataParallel[Any]):
    """:class:`torch.nn.DataParallel` on several accelerator devices, with the caller's autocast in each replica.

    torch's own enters autocast in the threads of the replicas, but with its default dtype, whatever the caller's is.
    Arguments as for torch's.
    """

    forward_context: _ContextFactory = nullcontext

    @override
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[Any]:
        """One replica of the module for each device, whose methods are its own."""
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            for original, copied in zip(module.modules(), replica.modules(), strict=True):
                _rebind_methods(original, copied)
        return replicas

    @override
    def parallel_apply(
        self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its part, in a thread with the caller's autocast."""
        as_caller = _as_caller(self.src_device_obj.type, self.forward_context)
        return super().parallel_apply(
            [partial(as_caller, replica) for replica in replicas], inputs, kwargs
        )


def _as_caller(device_type: str, forward_context: _ContextFactory) -> Callable[..., Any]:
    """Return a function that calls another one in any thread as if this thread had called it.

    See ``[Note: Threads]``. ``forward_context`` is entered in the thread.
    """
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    kinds = ("cpu", device_type)
    autocasts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ]

    def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for autocast in autocasts:
                stack.enter_context(torch.autocast(*autocast, cache_enabled=False))
            stack.enter_context(forward_context())
            return function(*args, **kwargs)

    return call


def _part(start: int, size: int, tensor: Tensor) -> Tensor:
    """The rows of a batch that one replica gets."""
    if tensor.dim() == 0:
        return tensor
    part = tensor[start : start + size]
    # Apart from each other for autograd: replicas that write to their parts in place must not share a history.
    return part.clone() if part.requires_grad else part.detach()


def _replicate(module: nn.Module, owns_buffers: bool) -> nn.Module:
    """A copy of a module tree that shares its parameters, and its buffers or copies of them."""
    # Not copy.copy, which goes through the state that a class gives to pickle.
    replicas = {original: type(original).__new__(type(original)) for original in module.modules()}
    buffers: dict[Tensor, Tensor] = {}
    for original, replica in replicas.items():
        own = {
            "_parameters": dict(original._parameters),
            "_modules": {
                name: child and replicas[child] for name, child in original._modules.items()
            },
        }
        if not owns_buffers:
            own["_buffers"] = {
                name: None if buffer is None else buffers.setdefault(buffer, buffer.clone())
                for name, buffer in original._buffers.items()
            }
        vars(replica).update(vars(original), **own)
        _rebind_methods(original, replica)
    return replicas[module]


def _rebind_methods(original: nn.Module, replica: nn.Module) -> None:
    """Have methods of the instance, such as a ``forward`` that was replaced for one call, act on the replica."""
    for name, value in vars(original).items():
        if isinstance(value, MethodType) and value.__self__ is original:
            vars(replica)[name] = MethodType(value.__func__, replica)


def _join(path: str, values: Sequence[Any]) -> Any:
    """One leaf of the output from those of the replicas."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(tuple(values)) if first.dim() == 0 else torch.cat(tuple(values))
    if any(value is not first and value != first for value in values):
        raise ConfigurationError(
            f"gathering {path} of a forward pass under dp",
            f"it cannot be joined along dim 0: the replicas returned {', '.join(map(repr, values))}",
            "collections of one structure, of tensors (torch.tensor(number) for numbers) or objects that are equal",
        )
    return first
