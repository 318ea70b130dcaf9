"""One process that drives several devices: a replica of the module on each, with a part of the batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fabric._torch import compiled_in_place, uncompiled
from fabric.accelerators import Accelerator
from fabric.communicators import Reduce
from fabric.errors import ConfigurationError
from fabric.precision import Precision
from fabric.runtime import Runtime
from fabric.strategies.base import Group, ParallelStrategy
from fabric.strategies.replicas import CopiedDataParallel, ThreadedDataParallel
from fabric.tree import flatten, leaf_paths, map_tensors

__all__ = ["DataParallelStrategy"]

# Where torch's own DataParallel runs the module once, on the whole batch.
_NOT_REPLICATED_BY_TORCH = ("cpu", "mps")

_REDUCTIONS: Mapping[Reduce, Callable[[Tensor], Tensor]] = {
    Reduce.MEAN: lambda tensor: tensor.mean(0),
    Reduce.SUM: lambda tensor: tensor.sum(0, dtype=tensor.dtype),
    Reduce.MIN: lambda tensor: tensor.amin(0),
    Reduce.MAX: lambda tensor: tensor.amax(0),
    Reduce.PRODUCT: lambda tensor: tensor.prod(0, dtype=tensor.dtype),
    Reduce.BAND: lambda tensor: reduce(torch.bitwise_and, tensor.unbind()),
    Reduce.BOR: lambda tensor: reduce(torch.bitwise_or, tensor.unbind()),
    Reduce.BXOR: lambda tensor: reduce(torch.bitwise_xor, tensor.unbind()),
}


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

    There is one process: ``world_size`` is 1, ``Fabric.all_reduce`` changes nothing, and data is not sharded.
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
        accelerator: Accelerator | str | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision: Precision | str | int | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, checkpoint_io=checkpoint_io, precision=precision
        )

    @override
    def check(self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int) -> None:
        if num_nodes > 1:
            _refuse(f"{num_nodes} nodes", "a process reaches the devices of its own node only")
        if accelerator.name != "cpu" and len(set(devices)) < len(devices):
            _refuse(f"devices {', '.join(map(str, devices))}", "one is named twice, and holds one replica at most")

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        runtime = runtime or self._own_runtime()
        world = runtime.world
        if world.world_size > 1:
            _refuse(
                f"{world.world_size} processes (this is rank {world.rank})",
                "another launcher made them, and each would train on its own, on all devices",
            )
        super().setup_environment(runtime)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        devices = self.runtime.devices
        if len(devices) > 1:
            _check_not_compiled(module)
        if self.root_device.type in _NOT_REPLICATED_BY_TORCH:
            return ThreadedDataParallel(module, devices)
        return CopiedDataParallel(module, device_ids=list(devices), output_device=self.root_device)

    @override
    def all_reduce(self, collection: Any, group: Group = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas every tensor of a collection that was gathered from them.

        Not a collective: there is one process. ``Fabric.all_reduce`` is the one over processes, and changes nothing.

        Args:
            collection: any collection; tensors of shape ``(replicas, *s)``, as the vector that a 0-dim output
                becomes, or of shape ``()``, which come back as they are; so does what is not a tensor.
            group: None; there are no other processes.
            reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"`` or a torch ``ReduceOp``.

        Returns:
            A new collection of the same structure and dtypes, with tensors of shape ``s``.

        Raises:
            ConfigurationError: dim 0 of a tensor is not the number of replicas, or the reduction is unknown or has no
                meaning for the tensor's dtype.
        """
        op = Reduce(reduce_op)
        _check_gathered(collection, len(self.runtime.devices))
        # Over this one process: changes no value, and refuses what has no meaning, such as the mean of integers.
        checked = super().all_reduce(collection, group, op)
        reduction = _REDUCTIONS[op]
        return map_tensors(lambda tensor: reduction(tensor) if tensor.dim() else tensor, checked)


def _check_gathered(collection: Any, replicas: int) -> None:
    leaves, structure = flatten(collection)
    wrong = [
        f"{path or 'the tensor'} has shape {tuple(leaf.shape)}"
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True)
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] != replicas
    ]
    if wrong:
        raise ConfigurationError(
            f"DataParallelStrategy.all_reduce() over {replicas} replica(s)",
            "; ".join(wrong),
            f"({replicas}, ...), gathered from the replicas, or (); a batch smaller than the number of devices uses "
            "fewer replicas",
            "tensor.mean(0), for a tensor that was gathered from as many replicas as it has rows",
        )


def _check_not_compiled(module: nn.Module) -> None:
    compiled = [
        path or "the module"
        for path, part in module.named_modules()
        if uncompiled(part) is not part or compiled_in_place(part)
    ]
    if compiled:
        raise ConfigurationError(
            f'setup of a {type(module).__name__} with strategy="dp" on several devices',
            f"torch.compile was applied to {', '.join(compiled)}, and compiled code acts on the one module that it was "
            "made for, not on a replica",
            "modules that are not compiled, or one device",
            'setup of the module itself, without torch.compile; or strategy="ddp", which takes compiled modules',
        )


def _refuse(asked: str, wrong: str) -> None:
    raise ConfigurationError(
        f'strategy="dp" on {asked}',
        f"it drives all devices from one process: {wrong}",
        "one process on one node, with distinct devices or any number of CPU replicas",
        'Fabric(strategy="dp", devices=2) in a plain `python script.py`; or strategy="ddp", with a process a device',
    )
