"""Gradients of shards, lent to the gathered parameters so that users can clear them there."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from fabric._torch import (
    HookEntry,
    backward_number,
    dtensor_like,
    hook_entry,
    in_place_version,
    is_dtensor,
    local_tensor,
)
from fabric.optim.gradients import is_cleared
from fabric.strategies.fsdp.state import parameter_slots
from fabric.tree import flatten

__all__ = ["LentGradients"]


@dataclass(frozen=True, eq=False)
class _LentGradient:
    """A gradient that a shard has lent to its gathered parameter.

    Attributes:
        shard: the sharded parameter.
        gathered: the gathered parameter. Any, since pyright does not know ``grad_dtype``.
        unreduced_grad: the gradient that FSDP2 keeps unreduced in the gathered parameter.
        grad_dtype: the dtype that gradients of the gathered parameter have otherwise.
        grad: the gradient of the shard, or the placeholder in its place.
        is_placeholder: whether the gradient of the shard is on another device than the gathered
            parameter, as with ``cpu_offload``. A placeholder of -0.0 is lent then.
    """

    shard: nn.Parameter
    gathered: Any
    unreduced_grad: Tensor | None
    grad_dtype: Any
    grad: Tensor
    is_placeholder: bool

    def take_back(self) -> None:
        """Give the gathered parameter its own gradient again, and the shard what the user left.

        The gathered parameter has had the gradient of the shard as its ``grad``. Since then the
        user may have changed it in place, set it to None, or replaced it.
        """
        grad_of_user = self.gathered.grad
        self.gathered.grad = None  # torch refuses to change the dtype of a gradient that exists
        self.gathered.grad_dtype = self.grad_dtype
        if grad_of_user is self.grad:
            # Not replaced. A change in place has reached the shard, which has the same gradient,
            # unless a placeholder was lent.
            self.gathered.grad = self.unreduced_grad
            if self.is_placeholder and self.shard.grad is not None:
                self._clear_like_placeholder(self.shard.grad)
        elif grad_of_user is None:
            # Cleared. The unreduced gradient is dropped, too.
            self.shard.grad = None
        elif is_dtensor(grad_of_user):
            # Replaced by another gradient of the shard.
            self.shard.grad = grad_of_user
            self.gathered.grad = self.unreduced_grad
        else:
            # Replaced by a gradient of the full parameter, which the next backward pass reduces.
            self.shard.grad = None
            self.gathered.grad = grad_of_user.to(self.gathered.dtype)

    def _clear_like_placeholder(self, grad: Tensor) -> None:
        """Set the gradient of the shard to zero if the user has set the placeholder to zero.

        Waits for the device only if the placeholder was changed in place.
        """
        if in_place_version(self.grad) > 0 and is_cleared(local_tensor(self.grad)).item():
            grad.zero_()


@dataclass(frozen=True, eq=False)
class _LentGradientOfReplica:
    """A gradient that a replicated parameter has lent to the plain tensor in its place.

    Attributes:
        parameter: the parameter, a DTensor.
        plain: the plain tensor, which is computed from the parameter and so is no leaf.
        grad: this rank's part of the gradient of the parameter, which is the whole gradient.
    """

    parameter: nn.Parameter
    plain: Tensor
    grad: Tensor

    def take_back(self) -> None:
        """Give the parameter the gradient that the plain tensor has now.

        The plain tensor, which modules hold in place of the parameter, has got the gradient of the
        parameter. Since then the user may have changed the gradient in place, replaced it, or set
        it to None. A change in place needs nothing, since both gradients share their memory.
        """
        with warnings.catch_warnings():
            # torch warns that the gradient of a tensor that is no leaf is None.
            warnings.simplefilter("ignore")
            grad_of_user = self.plain.grad
        self.plain.grad = None
        if grad_of_user is None:
            self.parameter.grad = None
        elif grad_of_user is not self.grad:
            self.parameter.grad = dtensor_like(self.parameter, grad_of_user)


# [Note: Lent gradients]
# Between a forward and a backward pass, some modules hold gathered parameters in place of the
# shards that optimizers hold. `zero_grad()` of a submodule and `parameter.grad = None` reach only
# the gathered parameters there, but the gradients of earlier passes belong to the shards. So at the
# end of a forward pass, each gathered parameter is *lent* the gradient of its shard: both have the
# same tensor as their `grad`. Before anything else uses gradients, the gathered parameter gives the
# gradient back. If it was set to None on the gathered parameter, it is set to None on the shard.
# Changes in place need nothing, since the tensor is the same. FSDP2 must never find a lent
# gradient, since it would take the gradient for one of its own.
class LentGradients:
    """The gradients that shards have lent to gathered parameters.

    They are taken back at the start of each backward pass: by hooks of the outputs of the model,
    and by hooks of the parameters, since a loss need not depend on the outputs.

    Args:
        root: the user's module, which is sharded already.
    """

    def __init__(self, root: nn.Module) -> None:
        """List the slots. Called while no slot holds a gathered parameter."""
        self._slots = list(parameter_slots(root))
        self._parameters = [slot.parameter for slot in self._slots]
        # Returns whether a gradient is not None. Runs in C, since lend() calls it in every step.
        self._is_gradient: Callable[[object], bool] = partial(is_not, None)
        # The gradients that are lent now.
        self._lent: list[_LentGradient | _LentGradientOfReplica] = []
        # The hooks of the parameters, which call take_back() when a backward pass begins. They are
        # in the hook dicts of the parameters only while gradients are lent: lend() puts them in and
        # take_back() takes them out, so that they cost a backward pass one call at most.
        self._hooks: list[HookEntry] = []
        for parameter in dict.fromkeys(self._parameters):  # a shared parameter once
            if parameter.requires_grad:
                entry = hook_entry(parameter.register_hook(self.take_back))
                del entry.hooks[entry.key]
                self._hooks.append(entry)

    def lend(self, output: Any) -> None:
        """Lend the gradients of all shards whose parameters are gathered.

        Called after each forward pass. A gathered parameter then has the ``grad`` of its shard, so
        that the user can clear it there. The backward pass must not find it, so hooks take the
        gradients back when the backward pass begins. Gradients that are lent already are taken back
        first.

        Args:
            output: what the forward pass returned.
        """
        if self._lent:
            self.take_back()
        # In many loops there are no gradients here. This check runs in C.
        has_gradients = any(map(self._is_gradient, map(attrgetter("grad"), self._parameters)))
        # In a backward pass, activation checkpointing may call the model.
        is_in_backward = backward_number() != -1
        if not has_gradients or is_in_backward or not torch.is_grad_enabled():
            return
        self._lend_to_stand_ins()
        if not self._lent:
            return
        # The first hook to run takes all gradients back. A loss need not depend on the output, and
        # then only the hooks of the parameters run.
        for entry in self._hooks:
            entry.hooks[entry.key] = entry.hook
        tensors = [output]
        if not isinstance(output, Tensor):
            tensors, _ = flatten(output)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self.take_back)

    def take_back(self, *_: object) -> None:
        """Take all gradients back. Does nothing if none are lent. Also a hook of tensors."""
        if not self._lent:
            return
        for entry in self._hooks:
            entry.hooks.pop(entry.key, None)
        while self._lent:
            self._lent.pop().take_back()

    def _lend_to_stand_ins(self) -> None:
        """Lend the gradients of the parameters to the tensors that modules hold in their place.

        After a forward pass, a module holds a plain tensor in place of a replicated parameter, and
        may hold a gathered parameter in place of a shard. The user reaches only these tensors, and
        clears the gradients there. To *lend* a gradient is to set it as the ``grad`` of the tensor,
        too, until :meth:`take_back` is called.
        """
        lender_ids: set[int] = set()
        for slot in self._slots:
            parameter: Any = slot.parameter
            # Several modules may share a parameter. Its gradient is lent once.
            if parameter.grad is None or id(parameter) in lender_ids:
                continue
            lender_ids.add(id(parameter))
            # An instance attribute with a plain tensor hides a replicated parameter.
            plain = vars(slot.module).get(slot.name)
            if plain is not None:
                plain.grad = local_tensor(parameter.grad)
                self._lent.append(_LentGradientOfReplica(parameter, plain=plain, grad=plain.grad))
                continue
            gathered: Any = slot.parameters_of_module.get(slot.name)
            if gathered is None or gathered is parameter:
                # The parameter is not gathered.
                continue
            grad = parameter.grad
            is_placeholder = grad.device != gathered.device
            if is_placeholder:
                # torch refuses a gradient on another device, as with cpu_offload. So a placeholder
                # of -0.0 is lent. If the user clears it, it is +0.0, and so take_back() can tell.
                local_grad = torch.full_like(local_tensor(grad), -0.0, device=gathered.device)
                grad = dtensor_like(grad, local_grad)
            lent = _LentGradient(
                shard=parameter,
                gathered=gathered,
                # What backward passes without synchronization have left here. take_back() puts it
                # back.
                unreduced_grad=gathered.grad,
                grad_dtype=gathered.grad_dtype,
                grad=grad,
                is_placeholder=is_placeholder,
            )
            gathered.grad = None  # torch refuses to change the dtype of a gradient that exists
            gathered.grad_dtype = grad.dtype
            gathered.grad = grad
            self._lent.append(lent)
