"""A check that users clip the gradients that a step uses.

[Note: Gradients before the step] After ``fabric.backward`` gradients may still be multiplied by the
loss scale, or not yet be divided by the loss weights. ``fabric.clip_gradients`` or the step changes
that. A clipping function of torch that is called in between clips by a norm of other gradients.

A call of such a function is not visible. The check raises if two things come together: after the
backward pass a gradient was changed, and the code that calls ``step``, or a function that
this code names, names a clipping function. Other changes, such as a mask or a factor, may
be made before the gradients are scaled as well as after.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from fabric.diagnostics.call_site import is_user_code
from fabric.errors import UsageError
from fabric.optim.gradients import local_gradients

__all__ = ["ClippingCheck"]

# Functions of torch.nn.utils, also under the names that they had in older releases.
_CLIPPING_FUNCTIONS = {
    *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"),
    *("clip_grad_norm", "clip_grad_value"),
}


class ClippingCheck:
    """A check that users do not clip gradients by torch before fabric has completed them.

    Gradients are *incomplete* as long as they are multiplied by the loss scale, or are not divided
    by the loss weights. See ``[Note: Gradients before the step]``.

    Args:
        pending_change: returns why the gradients of an optimizer are incomplete, such as
            "multiplied by the loss scale". None if they are complete.
    """

    def __init__(self, pending_change: Callable[[Optimizer], str | None]) -> None:
        """Start without gradients."""
        self._pending_change = pending_change
        # The norms of the gradients of each optimizer after the latest backward pass.
        self._recorded_norms: WeakKeyDictionary[Optimizer, list[float]] = WeakKeyDictionary()

    def record(self, optimizers: Iterable[Optimizer]) -> None:
        """Record the norms of the gradients. Called after each backward pass."""
        for optimizer in optimizers:
            self._recorded_norms[optimizer] = _gradient_norms(optimizer)

    def check(self, optimizer: Optimizer, request: str) -> None:
        """Raise if the user has clipped incomplete gradients.

        Args:
            optimizer: a set-up optimizer, before its step.
            request: the step, for the error.

        Raises:
            UsageError: incomplete gradients were changed since the latest backward pass, and the
                code that makes the step names a clipping function.
        """
        pending_change = self._pending_change(optimizer)
        if pending_change is None or not self._has_changed(optimizer):
            return
        function_name = _named_clipping_function(sys._getframe())
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
    DTensors in one call.
    """
    return [nn.utils.get_total_norm(grads).item() for grads in local_gradients(optimizer)]


def _named_clipping_function(frame: FrameType | None) -> str | None:
    """Return the clipping function that the user's code names. None if it names none.

    Args:
        frame: the innermost frame of a stack. All frames of the stack are searched.
    """
    while frame is not None:
        if is_user_code(frame):
            named_functions = _CLIPPING_FUNCTIONS & _names_in(frame)
            if named_functions:
                return min(named_functions)  # the same on all ranks
        frame = frame.f_back
    return None


def _names_in(frame: FrameType) -> set[str]:
    """Return the names in the code of a frame, and in the functions that this code names."""
    names = set(frame.f_code.co_names)
    # In a method, the code may also name other methods of its object.
    class_of_self = type(frame.f_locals.get("self"))
    for name in frame.f_code.co_names:
        for function in (frame.f_globals.get(name), getattr(class_of_self, name, None)):
            if isinstance(function, FunctionType):
                # This name differs if the function was imported under another one.
                names.add(function.__name__)
                names.update(function.__code__.co_names)
    return names
