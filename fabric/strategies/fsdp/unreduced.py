"""Gradients that backward passes without synchronization keep unreduced.

[Note: Unreduced gradients] In ``no_backward_sync``, FSDP2 keeps the full gradients on this rank,
where neither the optimizer nor the user sees them, and adds them to those of the next backward
pass. Under other strategies these gradients are in ``parameter.grad``, so that ``zero_grad()``
drops them. Here a *placeholder* in ``parameter.grad`` makes ``zero_grad()`` do the same: a shard in
which every element is -0.0. If it is gone, or set to zero, when the next backward pass begins, the
user has dropped the earlier gradients, see ``[Note: Cleared gradients]`` in
``fabric/optim/gradients.py``. Otherwise the reduced gradient is added to it, which changes no
number. A gradient of an earlier pass with synchronization is its own placeholder.
"""

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
    in_place_version,
    local_tensor,
    reset_fsdp_pass,
)
from fabric.optim.gradients import is_cleared, mark_as_computed

__all__ = ["UnreducedGradients"]


class UnreducedGradients:
    """The unreduced gradients of a sharded model. See ``[Note: Unreduced gradients]``.

    In ``no_backward_sync``, FSDP2 keeps full gradients in its *records*, its own objects of the
    sharded parameters, where the user does not see them. A *placeholder* in ``parameter.grad``
    stands for such a gradient: if the user clears it, the gradient is dropped, too.

    Args:
        root: the user's module, which is sharded already.
        synchronizes: returns whether a backward pass reduces gradients.

    Attributes:
        num_passes: the number of backward passes so far that have left gradients unreduced.
    """

    def __init__(self, root: nn.Module, synchronizes: Callable[[], bool]) -> None:
        """List the sharded parameters. Called after the model has been sharded."""
        self._root = root
        self._records = fsdp_parameter_records(root)
        self._synchronizes = synchronizes
        # The records that had an unreduced gradient at the end of the last backward pass. Their
        # parameters have a placeholder in ``grad``, unless the user has cleared it since.
        self._records_with_placeholder: list[Any] = []
        # The hooks of the sharded parameters. Empty if the model is not watched.
        self._handles: list[RemovableHandle] = []
        self.num_passes = 0
        # The number of the last backward pass that has reached a watched parameter.
        self._backward_number = -1

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters that have unreduced gradients."""
        self._drop_cleared()
        parameters: list[nn.Parameter] = []
        for record in self._records:
            if has_unreduced_gradient(record):
                parameters.append(record.sharded_param)
        return parameters

    def watch(self) -> None:
        """Watch backward passes until one has reduced gradients. Called by ``no_backward_sync``.

        Each parameter gets a hook, since a backward pass may leave out any of them.
        """
        if self._handles:
            return
        for record in self._records:
            parameter = record.sharded_param
            if parameter.requires_grad:
                # Backward passes reach the gathered parameter, to which shard_module() has given
                # the dict of hooks of the sharded one.
                self._handles.append(parameter.register_hook(self._on_gradient))

    def reset_pass(self) -> None:
        """Clear FSDP2's state after a pass that raised. The gradients stay as they are."""
        reset_fsdp_pass(self._root, self._records)

    @torch.no_grad()
    def add_placeholders(self) -> None:
        """Put a placeholder into ``parameter.grad`` for each unreduced gradient.

        If there is a reduced gradient of an earlier backward pass, that one is the placeholder. See
        ``[Note: Unreduced gradients]``.
        """
        self._records_with_placeholder.clear()
        for record in self._records:
            if not has_unreduced_gradient(record):
                continue
            self._records_with_placeholder.append(record)
            parameter = record.sharded_param
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, -0.0)
            else:
                mark_as_computed(local_tensor(parameter.grad))

    def _on_gradient(self, grad: Tensor) -> None:
        """Drop cleared gradients when a backward pass begins. The hook of watched parameters.

        Only the first call of a backward pass does something. At that time, no gradient of the pass
        has been added to an earlier gradient yet.
        """
        number = backward_number()
        if number == self._backward_number:
            return
        self._backward_number = number
        self._drop_cleared()
        at_end_of_backward(self._after_backward)

    def _after_backward(self) -> None:
        """Put placeholders in ``parameter.grad``, or stop watching after a reduction.

        Called at the end of a backward pass. A placeholder stands for an unreduced gradient. If the
        user clears it, the unreduced gradient is dropped, too. See
        ``[Note: Unreduced gradients]``.
        """
        if not self._synchronizes():
            self.num_passes += 1
            self.add_placeholders()
            return
        # The reduced gradients have replaced the placeholders.
        self._records_with_placeholder.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _drop_cleared(self) -> None:
        """Drop the unreduced gradients of parameters whose placeholders the user has cleared.

        The user clears a placeholder by setting it to None or to zero. Waits for the device once,
        if there are placeholders. A second call drops nothing more.
        """
        with_elements: list[Any] = []
        # For each record in with_elements, whether its placeholder is zero. The flags are tensors
        # on the device, so that all are read at once.
        is_zero_flags: list[Tensor] = []
        without_elements: list[Any] = []
        for record in self._records_with_placeholder:
            grad = record.sharded_param.grad
            if grad is None:
                drop_unreduced_gradient(record)
            elif local_tensor(grad).numel() == 0:
                without_elements.append(record)
            else:
                with_elements.append(record)
                is_zero_flags.append(is_cleared(local_tensor(grad)))
        are_zero: list[bool] = []
        if is_zero_flags:
            are_zero = torch.stack(is_zero_flags).tolist()
        for record, is_zero in zip(with_elements, are_zero, strict=True):
            if is_zero:
                drop_unreduced_gradient(record)
        # A shard without elements cannot show that it was set to zero. Such a shard counts as
        # cleared if all shards with elements were. If this rank has only shards without elements,
        # the version of the placeholder decides: zero_grad() raises it from 0.
        for record in without_elements:
            if with_elements:
                was_cleared = all(are_zero)
            else:
                was_cleared = in_place_version(record.sharded_param.grad) > 0
            if was_cleared:
                drop_unreduced_gradient(record)
