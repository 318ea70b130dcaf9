"""Gradients that backward passes without synchronization keep unreduced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabric._torch import (
    at_end_of_backward,
    backward_number,
    drop_unreduced_gradient,
    fsdp_parameter_records,
    has_unreduced_gradient,
    local_tensor,
    reset_fsdp_pass,
)
from fabric.optim.gradients import (
    cleared_empty_gradients,
    gradient_versions,
    is_cleared,
    mark_as_computed,
)
from fabric.strategies.fsdp.lent_gradients import LentGradients

__all__ = ["UnreducedGradients"]


# [Note: Unreduced gradients]
# In `no_backward_sync`, FSDP2 keeps the full gradients on this rank, where neither the optimizer
# nor the user sees them, and adds them to those of the next backward pass. Under other strategies
# these gradients are in `parameter.grad`, so that `zero_grad()` drops them. Here `parameter.grad`
# gets a *placeholder*: a shard in which every element is -0.0. If the placeholder is gone, or set
# to zero, when the next backward pass begins, the user has dropped the earlier gradients, see
# [Note: Cleared gradients] in `fabric/optim/gradients.py`. Otherwise the reduced gradient is added
# to the placeholder, which changes no number. A gradient of an earlier pass with synchronization is
# its own placeholder.
class UnreducedGradients:
    """The unreduced gradients of a sharded model.

    In ``no_backward_sync``, FSDP2 keeps full gradients in its *records*, its own objects of the
    sharded parameters, where the user does not see them. A *placeholder* in ``parameter.grad``
    stands for such a gradient: if the user clears it, the gradient is dropped, too.

    Args:
        root: the user's module, which is sharded already.
        synchronizes: returns whether a backward pass reduces gradients.
        lent_gradients: the gradients that shards have lent to gathered parameters.

    Attributes:
        num_passes: the number of backward passes so far that have left gradients unreduced.
    """

    def __init__(
        self,
        root: nn.Module,
        synchronizes: Callable[[], bool],
        lent_gradients: LentGradients,
    ) -> None:
        """List the sharded parameters. Called after the model has been sharded."""
        self._root = root
        self._lent_gradients = lent_gradients
        # FSDP2's own objects of the sharded parameters. They keep the unreduced gradients.
        self._records = fsdp_parameter_records(root)
        self._synchronizes = synchronizes
        # The records that had an unreduced gradient at the end of the last backward pass, by their
        # sharded parameters. A placeholder in the ``grad`` of these parameters stands for the
        # unreduced gradient, unless the user has cleared the placeholder since.
        self._records_with_placeholder: dict[Tensor, Any] = {}
        # The gradient_versions() of the placeholders at the end of that pass.
        self._placeholder_versions: dict[Tensor, object] = {}
        # The hooks of watch() on the sharded parameters. Empty if the model is not watched.
        self._gradient_hooks: list[RemovableHandle] = []
        self.num_passes = 0
        # torch's number of the last backward pass that has reached a watched parameter. -1 is the
        # number of no backward pass.
        self._last_backward_number = -1

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters that have unreduced gradients.

        Gradients that the user has cleared are dropped first.
        """
        self._drop_cleared()
        parameters: list[nn.Parameter] = []
        for record in self._records:
            if has_unreduced_gradient(record):
                parameters.append(record.sharded_param)
        return parameters

    def watch(self) -> None:
        """Watch backward passes until one has reduced gradients. Called by ``no_backward_sync``.

        Each parameter gets a hook, since a backward pass may leave out some parameters.
        """
        if self._gradient_hooks:
            return
        for record in self._records:
            parameter = record.sharded_param
            if parameter.requires_grad:
                # A backward pass calls the hooks of the gathered parameter. The sharded and the
                # gathered parameter share one dict of hooks, see shard_module().
                self._gradient_hooks.append(parameter.register_hook(self._on_gradient))

    def reset_pass(self) -> None:
        """Clear FSDP2's state after a pass that raised, but keep all gradients."""
        # Lent gradients go back to their shards before the reset saves all gradients and sets them
        # again.
        self._lent_gradients.take_back()
        reset_fsdp_pass(self._root, self._records)

    @torch.no_grad()
    def add_placeholders(self) -> None:
        """Put a placeholder into ``parameter.grad`` for each unreduced gradient.

        If the user clears the placeholder, by setting it to None or to zero, :meth:`_drop_cleared`
        drops the unreduced gradient. A gradient that is in ``parameter.grad`` already serves as the
        placeholder. Its zeros are marked as computed, so that they do not look cleared.
        """
        self._records_with_placeholder.clear()
        for record in self._records:
            if not has_unreduced_gradient(record):
                continue
            parameter = record.sharded_param
            self._records_with_placeholder[parameter] = record
            if parameter.grad is None:
                # -0.0 differs from the +0.0 that clearing writes, and adding it changes no number.
                parameter.grad = torch.full_like(parameter, -0.0)
            else:
                mark_as_computed(local_tensor(parameter.grad))
        self._placeholder_versions = gradient_versions(self._records_with_placeholder)

    def _on_gradient(self, grad: Tensor) -> None:
        """Drop cleared gradients when a backward pass begins. The hook of watched parameters.

        Only the first call in each backward pass does something: later in the pass, new gradients
        have been added to the earlier ones.
        """
        number = backward_number()
        if number == self._last_backward_number:
            return
        self._last_backward_number = number
        self._drop_cleared()
        at_end_of_backward(self._after_backward)

    def _after_backward(self) -> None:
        """Put placeholders in ``parameter.grad``, or stop watching after a reduction.

        Autograd calls this method at the end of each watched backward pass.
        """
        if not self._synchronizes():
            self.num_passes += 1
            self.add_placeholders()
            return
        # The reduced gradients have replaced the placeholders.
        self._records_with_placeholder.clear()
        self._placeholder_versions.clear()
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks.clear()

    def _drop_cleared(self) -> None:
        """Drop the unreduced gradients of parameters whose placeholders the user has cleared.

        A placeholder is a gradient in ``parameter.grad`` that stands for an unreduced one. The user
        clears it by setting it to None or to zero. This method waits for the device once, if there
        are placeholders.
        """
        # The user may have cleared a placeholder where it is lent, at the gathered parameter. This
        # clears it in ``parameter.grad``, too.
        self._lent_gradients.take_back()
        cleared: set[Tensor] = set()
        parameters: list[Tensor] = []
        # For each of these parameters, whether its placeholder is zero. The flags are tensors on
        # the device, so that one read gets all of them.
        is_zero_flags: list[Tensor] = []
        for parameter in self._records_with_placeholder:
            grad = parameter.grad
            if grad is None:
                cleared.add(parameter)
            elif local_tensor(grad).numel() > 0:
                parameters.append(parameter)
                is_zero_flags.append(is_cleared(local_tensor(grad)))
        are_zero: list[bool] = []
        if is_zero_flags:
            are_zero = torch.stack(is_zero_flags).tolist()
        for parameter, is_zero in zip(parameters, are_zero, strict=True):
            if is_zero:
                cleared.add(parameter)
        # Shards without elements have no zeros to look at. Their in-place versions are compared
        # with those of the shards in `cleared` and of the other shards.
        cleared.update(cleared_empty_gradients(self._placeholder_versions, cleared))
        for parameter in cleared:
            drop_unreduced_gradient(self._records_with_placeholder[parameter])
