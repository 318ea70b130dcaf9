"""A check that users clip and read the gradients that a step uses."""

import math
import sys
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from fabric.communicators.call_site import warn_user
from fabric.diagnostics.gradient_reads import (
    CodePosition,
    code_positions,
    find_clipping_function,
    find_gradient_read,
)
from fabric.errors import UsageError
from fabric.optim.gradients import local_gradients

__all__ = ["ClippingCheck"]


# [Note: Gradients before the step]
# After `fabric.backward` gradients may still be multiplied by the loss scale, or not yet be divided
# by the loss weights. `fabric.clip_gradients` or the step changes that. A clipping function of
# torch that is called in between clips by a norm of other gradients.
#
# A call of such a function is not visible. The check raises if two things come together: a gradient
# was changed after the backward pass, and the code between the backward pass and the step names a
# clipping function. Other changes, such as a mask or a factor, may be made before the gradients are
# scaled as well as after.
#
# A norm that is computed in between, for a log or for clipping by hand, is that of other gradients,
# too. The check warns of the line, see [Note: Gradient reads] in gradient_reads.py.
class ClippingCheck:
    """A check that users do not clip gradients by torch before fabric has completed them.

    Gradients are *incomplete* as long as they are multiplied by the loss scale, or are not divided
    by the loss weights.

    Args:
        pending_change: returns why the gradients of an optimizer are incomplete, such as
            "multiplied by the loss scale". None if they are complete.
    """

    def __init__(self, pending_change: Callable[[Optimizer], str | None]) -> None:
        """Start without gradients."""
        self._pending_change = pending_change
        # The norms of the gradients of each optimizer after the latest backward pass.
        self._recorded_norms: WeakKeyDictionary[Optimizer, list[float]] = WeakKeyDictionary()
        # Where in the user's code the latest backward pass was called.
        self._backward_positions: list[CodePosition] = []
        self._has_warned = False

    def record(self, optimizers: Iterable[Optimizer]) -> None:
        """Record the norms of the gradients. Called after each backward pass."""
        for optimizer in optimizers:
            self._recorded_norms[optimizer] = _gradient_norms(optimizer)
        # The checks before the step look at the user's code that runs after this position.
        self._backward_positions = code_positions(sys._getframe())

    def warn_of_reads(self, optimizer: Optimizer, turn_off: str) -> None:
        """Warn once if the user's code reads incomplete gradients after the latest backward pass.

        Args:
            optimizer: a set-up optimizer, before its gradients are completed by clipping or a step.
            turn_off: how to turn the warning off.
        """
        pending_change = self._pending_change(optimizer)
        if pending_change is None or self._has_warned:
            return
        line = find_gradient_read(self._backward_positions, sys._getframe())
        if line is not None:
            self._has_warned = True
            warn_user(
                f"{line} reads gradients of {type(optimizer).__name__} that are {pending_change}: "
                "their norm is not that of the step. First call norm = fabric.clip_gradients("
                "model, optimizer, max_norm=math.inf), which clips nothing and completes "
                f"parameter.grad; or {turn_off}"
            )

    def check(self, optimizer: Optimizer, request: str) -> None:
        """Raise if the user has clipped incomplete gradients.

        Args:
            optimizer: a set-up optimizer, before its step.
            request: the step, for the error.

        Raises:
            UsageError: incomplete gradients were changed since the latest backward pass, and the
                code in between names a clipping function.
        """
        pending_change = self._pending_change(optimizer)
        if pending_change is None or not self._has_changed(optimizer):
            return
        function_name = find_clipping_function(self._backward_positions, sys._getframe())
        if function_name is not None:
            raise UsageError(
                request,
                problem=f"gradients were changed by {function_name} while they are "
                f"{pending_change}, so that other gradients are clipped than the step uses",
                expected="clipping by fabric, which first completes the gradients",
                suggestion="fabric.clip_gradients(model, optimizer, max_norm=1.0) or clip_val=1.0 "
                "in its place. After this call, parameter.grad holds the gradients of the step",
            )

    def _has_changed(self, optimizer: Optimizer) -> bool:
        """Return whether gradients were changed since the latest backward pass, but not cleared."""
        norms = _gradient_norms(optimizer)
        recorded_norms = self._recorded_norms.get(optimizer)
        is_cleared = not any(norms)
        if recorded_norms is None or is_cleared:
            return False
        return norms != recorded_norms


def _gradient_norms(optimizer: Optimizer) -> list[float]:
    """Return the norms of an optimizer's gradients on this rank, one for each device and dtype.

    The versions of the tensors would not show all changes: torch does not count a change of several
    DTensors in one call. NaN, which is not equal to itself, is returned as -1.
    """
    norms: list[float] = []
    for grads in local_gradients(optimizer):
        norm = nn.utils.get_total_norm(grads).nan_to_num(nan=-1.0, posinf=math.inf)
        norms.append(norm.item())
    return norms
