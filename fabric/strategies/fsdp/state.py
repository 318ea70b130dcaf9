"""The tensors of a model under FSDP: its shards, and unsharded state that is the same on all ranks.

[Note: Unsharded state] A parameter without a dimension, or without elements, cannot be sharded; one of
``ignored_params`` should not be. It becomes a replicated DTensor, so that optimizers, clipping and checkpoints deal
with one kind of parameter. From a forward pass until the end of the backward pass after it, this rank's plain tensor
replaces it in its module; then the gradients of all such parameters are averaged in one all-reduce. It keeps its dtype
in forward passes, and its device if shards are on the CPU.

Buffers are not sharded either. Running statistics are as under DDP: the first forward pass, and each one after a pass
with synchronization, starts with rank 0's on all ranks. Other buffers stay local to each rank.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from fabric._torch import (
    at_end_of_backward,
    full_tensor,
    local_tensor,
    share_accumulation_hooks,
    share_gradient_hooks,
)
from fabric.collectives import all_reduce
from fabric.communicators import Communicator, Reduce
from fabric.strategies.init_module import EmptyParameter, fill_empty, release_pages
from fabric.tree import flatten, parameters_of

__all__ = [
    "SHARD", "UnshardedState", "full", "is_mapped", "receive_values", "replicate_unsharded", "shard_module",
    "shard_slots", "shard_state", "stays_whole", "take_shards",
]  # fmt: skip

# The attribute of an original parameter that holds the sharded one that replaced it.
SHARD = "_fabric_shard"
# Optimizer state that is a plain scalar tensor for a parameter of any shape.
_NUMBERS = {"step", "mu_product", "eta", "mu"}


def shard_module(
    communicator: Communicator, module: nn.Module, before: Mapping[str, Any], **arguments: Any
) -> None:
    """Make an FSDP module with rank 0's values, freeing the memory of the original parameters. Collective.

    Args:
        communicator: all ranks.
        module: the module; one that is an FSDP module already stays as it is.
        before: by name, the originals of parameters that are split over another dimension of the mesh.
        **arguments: of ``fully_shard``.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
        fully_shard,
    )  # takes a second to import; here it has been

    plain = {name: each for name, each in module.named_parameters() if local_tensor(each) is each}
    before = {**plain, **before}
    receive_values(communicator, module, list(plain.values()))
    if not isinstance(module, FSDPModule):
        fully_shard(module, **arguments)
    sharded = {each: before[name] for name, each in module.named_parameters() if name in before}
    for parameter, old in sharded.items():
        _replace(old, parameter)
    places = [each for each in _owned(module) if each[2] in sharded]

    def attach(*_: object) -> None:
        # FSDP has just gathered them for the first time, into parameters that it reuses.
        handle.remove()
        for owner, name, parameter in places:
            _attach(parameter, owner._parameters[name])

    out_of_graphs: Any = torch.compiler.disable(attach)
    handle = module.register_forward_pre_hook(out_of_graphs)


def replicate_unsharded(
    communicator: Communicator, root: nn.Module, ignored: set[nn.Parameter], mesh: DeviceMesh
) -> set[nn.Parameter]:
    """Give buffers and parameters that are not sharded rank 0's values. Collective.

    Args:
        communicator: all ranks.
        root: the model.
        ignored: parameters that should not be sharded, besides those that cannot be.
        mesh: the mesh of the shards.

    Returns:
        The replicated parameters that replace them.
    """
    from torch.distributed.tensor import (
        Replicate,
        distribute_tensor,
    )  # takes a second to import; here it has been

    if ignored and ignored.isdisjoint(root.parameters()) and communicator.rank == 0:
        # Pickling a strategy for a rank copies its parameters.
        text = "ignored_params are no parameters of it. A model from before a launch: fabric.launch(train, model)"
        warnings.warn(f"setup of {type(root).__name__}: {text}", stacklevel=2)
    before = {name: each for name, each in root.named_parameters() if stays_whole(each, ignored)}
    receive_values(communicator, root, [*root.buffers(), *before.values()])
    for path, old in before.items():
        present = root.get_parameter(path)  # a meta tensor has been replaced
        whole = distribute_tensor(
            present.detach().clone(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None
        )
        parameter = nn.Parameter(whole, requires_grad=old.requires_grad)
        _put(root, present, parameter)
        _replace(old, parameter)
    return {getattr(old, SHARD) for old in before.values()}


def stays_whole(parameter: nn.Parameter, ignored: set[nn.Parameter]) -> bool:
    """Whether a parameter is not sharded; see ``[Note: Unsharded state]``."""
    return not parameter.dim() or not parameter.numel() or parameter in ignored


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor is in a shared file mapping, as those of :class:`MappedMemory`."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def receive_values(
    communicator: Communicator, module: nn.Module, tensors: Sequence[Tensor]
) -> None:
    """Give tensors rank 0's values and ordinary memory on the communicator's device. Collective.

    An :class:`EmptyParameter` gets values that are not a number. A parameter that is on the device may stay in a
    mapped file, since it is about to be sharded. A meta tensor is replaced, wherever the module has it; any other keeps
    its identity.

    Args:
        communicator: all ranks.
        module: the module that the tensors belong to.
        tensors: parameters and buffers, the same on every rank.
    """
    copies: dict[int, Any] = {}
    for tensor in tensors:
        if tensor.is_meta:
            value = torch.empty_like(tensor, device=communicator.device, requires_grad=False)
        else:
            value = tensor.detach().to(communicator.device).contiguous()
        if isinstance(tensor, EmptyParameter):
            fill_empty(value)
        else:
            communicator.broadcast(value.view(-1).view(torch.uint8), 0)
        if is_mapped(tensor):
            # Buffers that are views of each other remain so.
            if value.device.type == "cpu" and not isinstance(tensor, nn.Parameter):
                value = deepcopy(tensor.detach(), copies).copy_(value)
            release_pages(tensor.untyped_storage())
        if tensor.is_meta:
            is_parameter = isinstance(tensor, nn.Parameter)
            _put(
                module,
                tensor,
                nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value,
            )
        else:
            tensor.data = value


def full(device: torch.device, tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, gathered on the device; any other tensor unchanged. Collective."""
    # Shards on the CPU are moved too: the process group works on the device.
    return full_tensor(tensor.to(device)) if local_tensor(tensor) is not tensor else tensor


def _shard_like(like: Any, value: Any) -> Any:
    """This rank's shard of a full tensor, sharded like ``like``; any other value unchanged."""
    is_full = isinstance(value, torch.Tensor) and local_tensor(value) is value
    if like is None or local_tensor(like) is like or not is_full or value.shape != like.shape:
        return value
    from torch.distributed.tensor import (
        distribute_tensor,
    )  # takes a second to import; here it has been

    mesh = like.device_mesh
    shard = distribute_tensor(value.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    # A copy: a shard may be a view, which would keep the full value in memory.
    return shard.to(like.device, copy=True)


def take_shards(
    own: Mapping[str, Any], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """A load_state_dict pre-hook: replaces full tensors by this rank's shards, for the ``own`` parameters."""
    for name, parameter in own.items():
        if prefix + name in state:
            state[prefix + name] = _shard_like(parameter, state[prefix + name])


def shard_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer, with full tensors replaced by this rank's shards."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters_of(optimizer), strict=False))
    content = {
        number: shard_slots(by_number.get(number), slots)
        for number, slots in state_dict["state"].items()
    }
    return {**state_dict, "state": content}


def shard_slots(parameter: Any, slots: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state of a parameter, with full tensors replaced by this rank's shards."""
    return {
        name: value if name in _NUMBERS else _shard_like(parameter, value)
        for name, value in slots.items()
    }


class UnshardedState:
    """The unsharded state of a model: see ``[Note: Unsharded state]``.

    Args:
        root: the user's module, sharded already.
        communicator: all ranks.
        whole: the parameters made by :func:`replicate_unsharded`.
        buffers: whether all ranks use rank 0's running statistics.

    Attributes:
        parameters: the replicated parameters.
        synchronizes: whether a backward pass reduces gradients.
        unreduced: the replicated parameters whose gradients the last backward pass has not reduced.
    """

    def __init__(
        self, root: nn.Module, communicator: Communicator, whole: set[nn.Parameter], buffers: bool
    ) -> None:
        self._communicator = communicator
        self._places = [each for each in _owned(root) if each[2] in whole]
        self.parameters = dict.fromkeys(each for _, _, each in self._places)
        parts = root.modules() if buffers else ()
        self._with_statistics = [
            part for part in parts if part._buffers.get("running_mean") is not None
        ]
        self._buffers_differ = True
        self._waits = False
        self.synchronizes = True
        self.unreduced = list[nn.Parameter]()

    def __bool__(self) -> bool:
        return bool(self._places or self._with_statistics)

    def before_forward(self) -> None:
        """Broadcast running statistics from rank 0, and replace parameters by plain tensors. Collective."""
        if self._buffers_differ and self._with_statistics:
            self._broadcast_statistics()
        self._buffers_differ = torch.is_grad_enabled() and self.synchronizes
        self._waits = False
        for owner, name, parameter in self._places:
            if owner._parameters.get(name) is parameter:  # otherwise the user has replaced it
                local = vars(owner)[name] = parameter.to_local()  # found before the parameter
                self._watch([local])

    def after_forward(self, output: Any) -> None:
        """Put the parameters back, now or at the end of the backward pass."""
        if self._places and not self._watch(flatten(output)[0]):
            self._restore()

    def _watch(self, tensors: Iterable[Any]) -> bool:
        """Register hooks that detect the backward pass; returns whether any of these tensors requires a gradient."""
        watched = [
            tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        for each in watched:
            each.register_hook(self._in_backward)
        return bool(watched)

    def _in_backward(self, grad: Tensor) -> None:
        if not self._waits:
            self._waits = True
            at_end_of_backward(self._after_backward)

    def _restore(self) -> None:
        for owner, name, _ in self._places:
            vars(owner).pop(name, None)

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._waits = False
        self._restore()
        grads = {
            number: local_tensor(p.grad)
            for number, p in enumerate(self.parameters)
            if p.grad is not None
        }
        self.unreduced = (
            [] if self.synchronizes else [p for p in self.parameters if p.grad is not None]
        )
        if grads and self.synchronizes:
            for number, mean in all_reduce(self._communicator, grads, Reduce.MEAN).items():
                grads[number].copy_(mean)

    def _broadcast_statistics(self) -> None:
        buffers = [
            each
            for part in self._with_statistics
            for each in part._buffers.values()
            if each is not None
        ]
        values = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
        message = torch.cat(values)
        self._communicator.broadcast(message, 0)
        for each, value in zip(
            buffers, message.split([value.numel() for value in values]), strict=True
        ):
            # By ``data``: a change that autograd sees would invalidate the backward pass of the previous forward pass.
            each.data.copy_(value.clone().view(each.dtype).view_as(each))


def _replace(old: nn.Parameter, parameter: nn.Parameter) -> None:
    """Move the attributes and hooks of an old parameter to the one that replaces it, and free the old memory."""
    _attach(old, parameter)
    share_accumulation_hooks(old, parameter)
    setattr(old, SHARD, parameter)
    # An optimizer may hold the old one until it is set up.
    old.data = old.new_empty(0)


def _attach(source: Tensor, target: Any) -> None:
    vars(target).update(vars(source))
    share_gradient_hooks(source, target)


def _put(root: nn.Module, old: Tensor, new: Any) -> None:
    """Replace a parameter or buffer everywhere in a module."""
    for owner in root.modules():
        for held in (owner._parameters, owner._buffers):
            held.update({name: new for name, each in held.items() if each is old})


def _owned(root: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    return (
        (owner, name, each) for owner in root.modules() for name, each in owner._parameters.items()
    )
