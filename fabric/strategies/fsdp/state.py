"""The state of a sharded model: unsharded parameters and buffers, state dicts, optimizer state."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._torch import (
    at_end_of_backward,
    full_tensor,
    is_dtensor,
    local_tensor,
    registered_buffers,
    registered_parameters,
)
from fabric.collectives import all_reduce
from fabric.communicators import Communicator, Reduce
from fabric.optim.gradients import is_cleared, mark_as_computed
from fabric.tree import flatten, parameters_of

__all__ = [
    "ParameterSlot",
    "UnshardedState",
    "gather_full_tensor",
    "is_unsharded",
    "parameter_slots",
    "set_shard_of",
    "shard_module_state",
    "shard_of",
    "shard_parameter_state",
    "shard_state",
]

# The attribute of an original parameter that holds the sharded parameter that replaced it.
_SHARD = "_fabric_shard"
# Optimizer state that is a plain scalar tensor for a parameter of any shape, so also for a
# replicated parameter without a dimension.
_SCALAR_STATE = {"step", "mu_product", "eta", "mu"}


class ParameterSlot(NamedTuple):
    """A name under which a module holds a parameter.

    Attributes:
        module: the module.
        parameters_of_module: the dict in which the module holds its parameters.
        name: the name in that dict.
        parameter: the parameter that was in the dict when the slot was made.
    """

    module: nn.Module
    parameters_of_module: dict[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter


def parameter_slots(root: nn.Module) -> Iterator[ParameterSlot]:
    """Yield a slot for each name under which a module of a model holds a parameter.

    A parameter that several modules share has a slot in each of them.
    """
    for module in root.modules():
        parameters = registered_parameters(module)
        for name, parameter in parameters.items():
            if parameter is not None:
                yield ParameterSlot(module, parameters, name, parameter)


# -- parameters ---------------------------------------------------------------------------------


def shard_of(parameter: Any) -> nn.Parameter | None:
    """Return the sharded parameter that replaced an original one. None if it was not replaced."""
    return getattr(parameter, _SHARD, None)


def set_shard_of(original: nn.Parameter, parameter: nn.Parameter) -> None:
    """Record the sharded parameter that replaces an original one.

    An optimizer may still hold the original. :func:`shard_of` finds the replacement for it.
    """
    setattr(original, _SHARD, parameter)


def is_unsharded(parameter: nn.Parameter, ignored: set[nn.Parameter]) -> bool:
    """Return whether a parameter is replicated and not sharded.

    This holds for a parameter without a dimension or without elements, which cannot be sharded, and
    for a parameter in ``ignored``.
    """
    has_no_dimension = parameter.dim() == 0
    has_no_elements = parameter.numel() == 0
    return has_no_dimension or has_no_elements or parameter in ignored


# -- state dicts --------------------------------------------------------------------------------


def gather_full_tensor(device: torch.device, tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one. Other tensors are returned unchanged.

    Collective for a sharded tensor.

    Args:
        device: the device of the process group, where shards are gathered.
        tensor: the tensor. Its shards may be on the CPU.
    """
    if not is_dtensor(tensor):
        return tensor
    return full_tensor(tensor.to(device))


def shard_module_state(
    shards: Mapping[str, Any], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Replace full tensors in a module's state dict by this rank's shards. Not a collective.

    With ``shards`` bound, this function is a pre-hook for ``load_state_dict`` of one module.

    Args:
        shards: the sharded tensors of the module, by name. Only the tensors of these names are
            replaced.
        module: the module.
        state: the state dict, which is changed in place.
        prefix: the prefix of the module's names in the state dict.
        *_: other arguments of the hook, which are not used.
    """
    for name, tensor in shards.items():
        key = prefix + name
        if key in state:
            state[key] = _shard_like(tensor, state[key])


def shard_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with full tensors replaced by this rank's shards.

    Not a collective. This function is also a pre-hook for ``load_state_dict`` of the optimizer.

    Args:
        optimizer: the optimizer, which holds sharded parameters.
        state_dict: its state dict. State that is sharded already stays as it is.
    """
    # A state dict has a number in place of each parameter, in the order of the optimizer.
    numbers: list[int] = []
    for group in state_dict["param_groups"]:
        numbers.extend(group["params"])
    # Not strict: if the counts differ, load_state_dict() raises torch's own error afterward.
    parameters_by_number = dict(zip(numbers, parameters_of(optimizer), strict=False))
    state: dict[int, dict[str, Any]] = {}
    for number, parameter_state in state_dict["state"].items():
        # None if the counts differ. shard_parameter_state() then returns the state unchanged.
        parameter = parameters_by_number.get(number)
        state[number] = shard_parameter_state(parameter, parameter_state)
    return {**state_dict, "state": state}


def shard_parameter_state(parameter: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter with full tensors replaced by shards.

    Not a collective.

    Args:
        parameter: the sharded parameter. For None or a plain parameter, values stay as they are.
        state: the optimizer's state of the parameter, by name, such as ``"exp_avg"``.
    """
    sharded: dict[str, Any] = {}
    for name, value in state.items():
        if name in _SCALAR_STATE:
            # State such as "step" stays a plain tensor. _shard_like() would make a DTensor of it if
            # the parameter had the same shape, as a parameter without dimensions has.
            sharded[name] = value
        else:
            sharded[name] = _shard_like(parameter, value)
    return sharded


def _shard_like(sharded: Any, value: Any) -> Any:
    """Return this rank's shard of a full tensor, sharded as another tensor is. Not a collective.

    Args:
        sharded: the tensor whose mesh and placements are used. If it is not a DTensor, ``value`` is
            returned unchanged.
        value: a full tensor of the same shape. Any other value is returned unchanged.
    """
    if sharded is None or not is_dtensor(sharded):
        return value
    is_full_tensor = isinstance(value, Tensor) and not is_dtensor(value)
    if not is_full_tensor or value.shape != sharded.shape:
        return value
    # Imported here, so that importing fabric stays fast.
    from torch.distributed.tensor import distribute_tensor

    mesh = sharded.device_mesh
    # Without a source rank, nothing is sent: every rank cuts its shard from its own full tensor.
    shard = distribute_tensor(
        value.to(mesh.device_type), mesh, sharded.placements, src_data_rank=None
    )
    # A copy, since a shard may be a view, which would keep the full value in memory.
    return shard.to(sharded.device, copy=True)


# -- forward and backward passes ----------------------------------------------------------------


# [Note: Unsharded state]
# A parameter without a dimension, or without elements, cannot be sharded. A parameter in
# `ignored_params` should not be sharded. These parameters become replicated DTensors, so that
# optimizers, clipping and checkpoints deal with one kind of parameter. From a forward pass until
# the end of the backward pass after it, this rank's plain tensor replaces the DTensor in its
# module. At the end of the backward pass, the gradients of all these parameters are averaged in one
# all-reduce. The parameter keeps its dtype in forward passes, and its device if shards are on the
# CPU.
#
# Buffers are not sharded either. Running statistics are as under DDP: the first forward pass, and
# each forward pass after a pass with synchronization, starts with rank 0's statistics on all ranks.
# Other buffers stay local to each rank.
class UnshardedState:
    """The parameters and buffers of a model that are not sharded.

    Each of these parameters is a replicated DTensor. From a forward pass until the end of the
    backward pass after it, the module has this rank's plain tensor in place of the DTensor. A
    *slot* is a name under which a module holds a parameter.

    Args:
        root: the user's module, which is sharded already.
        communicator: the ranks that gradients are averaged over.
        replicated: the parameters of the model that are replicated DTensors.
        broadcasts_statistics: whether all ranks use rank 0's running statistics.

    Attributes:
        parameters: the replicated parameters, as the keys of a dict in the order of the model.
        is_empty: whether there is nothing to do in forward passes.
        synchronizes: whether a backward pass reduces gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        communicator: Communicator,
        replicated: set[nn.Parameter],
        broadcasts_statistics: bool,
    ) -> None:
        """List the unsharded parameters and buffers. Called after the model has been sharded."""
        self._communicator = communicator
        self._slots = [slot for slot in parameter_slots(root) if slot.parameter in replicated]
        # A dict and not a set, since the order has to be the same on all ranks.
        self.parameters = dict.fromkeys(slot.parameter for slot in self._slots)
        # The buffers of each module with running statistics. Empty if each rank keeps its own
        # statistics.
        self._buffers_of_norms: list[dict[str, Tensor | None]] = []
        if broadcasts_statistics:
            self._buffers_of_norms = _buffers_with_statistics(root)
        self.is_empty = not self._slots and not self._buffers_of_norms
        # ShardedForward.without_sync() sets it to False for its block.
        self.synchronizes = True
        # The parameters whose gradients the last backward pass did not reduce.
        self._unreduced: list[nn.Parameter] = []
        # Whether ranks may have different running statistics since the last broadcast. The first
        # forward pass broadcasts, too.
        self._statistics_may_differ = True
        # Whether this object's callback at the end of the running backward pass is registered.
        self._awaits_backward_end = False

    def unreduced_parameters(self) -> list[nn.Parameter]:
        """Return the replicated parameters with gradients that have not been reduced yet.

        Gradients that the user has cleared are left out.
        """
        unreduced: list[nn.Parameter] = []
        for parameter in self._unreduced:
            grad = parameter.grad
            if grad is not None and not is_cleared(local_tensor(grad)).item():
                unreduced.append(parameter)
        return unreduced

    def before_forward(self) -> None:
        """Put this rank's plain tensors in place of the replicated parameters.

        Called before each forward pass of the whole model, if ``is_empty`` is false. Collective if
        rank 0's running statistics have to be broadcast. Ranks that make the same passes agree on
        whether to broadcast.
        """
        if self._statistics_may_differ and self._buffers_of_norms:
            self._broadcast_statistics()
        # As under DDP, the next forward pass broadcasts only if this one trains with
        # synchronization.
        self._statistics_may_differ = torch.is_grad_enabled() and self.synchronizes
        # If the last backward pass raised, autograd did not call _after_backward(), which resets
        # this flag.
        self._awaits_backward_end = False
        for slot in self._slots:
            # torch.func.functional_call() replaces parameters by the user's tensors, for example.
            was_replaced_by_user = slot.parameters_of_module.get(slot.name) is not slot.parameter
            if was_replaced_by_user:
                continue
            parameter: Any = slot.parameter
            plain = parameter.to_local()  # in the graph, so that the parameter gets a gradient
            # An instance attribute hides the parameter of the same name, because Python finds it
            # before nn.Module looks for a parameter. _restore_parameters() removes it.
            vars(slot.module)[slot.name] = plain
            # after_forward() watches the outputs. But a loss may depend on this parameter alone.
            self._watch_backward([plain])

    def after_forward(self, output: Any) -> None:
        """Put the replicated parameters back, now or at the end of the backward pass.

        Called after each forward pass of the whole model, if ``is_empty`` is false.

        Args:
            output: what the forward pass returned. If a tensor in ``output`` requires a gradient,
                the plain tensors stay until the end of the backward pass, because activation
                checkpointing repeats parts of the forward pass in the backward pass.
        """
        if not self._slots:
            return
        leaves, _ = flatten(output)
        has_backward = self._watch_backward(leaves)
        if not has_backward:
            self._restore_parameters()

    def _watch_backward(self, values: Iterable[Any]) -> bool:
        """Register a hook on each tensor that requires a gradient, to detect the backward pass.

        Returns:
            Whether any of the values is a tensor that requires a gradient.
        """
        is_watched = False
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._on_gradient)
                is_watched = True
        return is_watched

    def _on_gradient(self, grad: Tensor) -> None:
        """Have autograd call ``_after_backward`` at the end of the running backward pass.

        This is a hook of the outputs of a forward pass and of the plain tensors of the replicated
        parameters. Only the first call in a backward pass registers the callback.
        """
        if not self._awaits_backward_end:
            self._awaits_backward_end = True
            at_end_of_backward(self._after_backward)

    def _restore_parameters(self) -> None:
        """Take away the instance attributes that hide the replicated parameters."""
        for slot in self._slots:
            vars(slot.module).pop(slot.name, None)

    @torch.no_grad()
    def _after_backward(self) -> None:
        """Put the replicated parameters back into the modules, and average their gradients.

        Autograd calls this method at the end of a backward pass. Until then, the modules hold plain
        tensors in place of the parameters. Collective if gradients are synchronized. Otherwise the
        parameters with a gradient are listed in ``_unreduced``, for :meth:`unreduced_parameters`.
        """
        self._awaits_backward_end = False  # the next backward pass registers this method again
        self._restore_parameters()
        parameters_with_gradient: list[nn.Parameter] = []
        # This rank's plain tensors of the gradients, by the number of the parameter. all_reduce()
        # compares the keys between the ranks, so that it never averages the gradients of different
        # parameters.
        gradients: dict[int, Tensor] = {}
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                parameters_with_gradient.append(parameter)
                gradients[number] = local_tensor(parameter.grad)
        if not self.synchronizes:
            self._unreduced = parameters_with_gradient
            for gradient in gradients.values():
                mark_as_computed(gradient)  # so that a zero gradient does not look cleared
            return
        self._unreduced = []
        if gradients:
            means = all_reduce(self._communicator, gradients, Reduce.MEAN)
            for number, mean in means.items():
                # This changes ``parameter.grad``, with which the plain tensor shares its memory.
                gradients[number].copy_(mean)

    def _broadcast_statistics(self) -> None:
        """Copy the buffers of modules with running statistics from rank 0 to all ranks.

        Collective. All buffers travel in one message of bytes.
        """
        buffers: list[Tensor] = []
        for buffers_of_module in self._buffers_of_norms:
            for buffer in buffers_of_module.values():
                if buffer is not None:
                    buffers.append(buffer)
        bytes_of_buffers = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
        message = torch.cat(bytes_of_buffers)
        self._communicator.broadcast(message, 0)  # in place
        sizes = [buffer_bytes.numel() for buffer_bytes in bytes_of_buffers]
        for buffer, received in zip(buffers, message.split(sizes), strict=True):
            # Cloned, since view() needs aligned bytes, and the parts of a message are unaligned.
            value = received.clone().view(buffer.dtype)
            # ``data`` hides the change from autograd. Otherwise the backward pass of an earlier
            # forward pass would raise for a buffer changed in place.
            buffer.data.copy_(value.view_as(buffer))


def _buffers_with_statistics(root: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return the dict of buffers of each module that has running statistics.

    A dict is the module's own. If the module replaces a buffer later, the dict has the new one.
    """
    buffers_of_norms: list[dict[str, Tensor | None]] = []
    for module in root.modules():
        buffers = registered_buffers(module)
        has_statistics = buffers.get("running_mean") is not None
        if has_statistics:
            buffers_of_norms.append(buffers)
    return buffers_of_norms
