"""Scaling of the loss, so that float16 gradients do not underflow."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric._torch import backoff_or_grow, foreach_multiply, unscale_and_check
from fabric.errors import ConfigurationError, UsageError
from fabric.optim.gradients import has_gradients, local_gradients
from fabric.precision import LossScale
from fabric.tree import parameters_of

__all__ = ["LossScaler", "has_closure"]

# Powers of two, so that scaling is exact. See [Note: Loss scale].
_GROWTH_FACTOR = 2.0
_BACKOFF_FACTOR = 0.5


@dataclass
class _OptimizerState:
    """The state of the gradients of an optimizer under loss scaling.

    Attributes:
        found_inf: 1 if the gradients overflowed when they were last unscaled, else 0. A float32
            tensor without dimensions.
        is_scaled: whether the gradients, if there are any, are multiplied by the scale.
        removed_gradients: each parameter with its gradient, while a step is skipped. The gradient
            is None for a parameter without one.
        was_skipped: whether the last step was skipped.
    """

    found_inf: Tensor
    is_scaled: bool = False
    removed_gradients: Sequence[tuple[Tensor, Tensor | None]] = ()
    was_skipped: bool = False


# [Note: Loss scale]
# The scale changes only at the start of a backward pass, and only if no optimizer holds scaled
# gradients that were neither used in a step nor cleared. So the scale never changes during
# accumulation, or between the steps of two optimizers that share a backward pass. Gradients that
# were unscaled and are kept for another backward pass are scaled again before this pass. Scaling
# and unscaling are exact, since scales are powers of two. The gradients of optimizers that share
# parameters are unscaled together, so that no gradient is unscaled twice.
class LossScaler:
    """Dynamic loss scaling for any number of optimizers that may share backward passes.

    The method is that of :class:`torch.amp.GradScaler` (Micikevicius et al., "Mixed Precision
    Training", 2018): a step whose gradients overflowed is skipped and the scale halved; after
    ``growth_interval`` good steps the scale is doubled. Two things differ:

    - The scale changes at the start of a backward pass.
    - Users call the optimizers' own ``step``. Hooks of the step unscale the gradients, and remove
      them during a skipped step.

    Args:
        device: the device of the scale.
        settings: the initial scale and the growth interval.
        max_over_ranks: a collective that returns the maximum of a float32 tensor over ranks. None
            in a single process.

    Attributes:
        gradients_may_differ: whether ranks step with different gradients. An overflow on one rank
            then skips the step on all ranks.
        accumulates: whether some backward passes leave gradients that are not yet synchronized, so
            that ranks hold different gradients between passes.
    """

    def __init__(
        self,
        device: torch.device,
        settings: LossScale,
        max_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Start with the initial scale. :meth:`register` adds optimizers."""
        self._scale = torch.full((), settings.init_scale, dtype=torch.float32, device=device)
        # The number of updates without an overflow since the scale last changed.
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        # 1 if any gradients overflowed since the last update of the scale, else 0. None if no
        # gradients were unscaled since then.
        self._found_inf_since_update: Tensor | None = None
        self._growth_interval = settings.growth_interval
        # Whether a loss was ever scaled. A loop that calls loss.backward() scales none.
        self._has_scaled_a_loss = False
        self._max_over_ranks = max_over_ranks
        # Whether ranks step with different gradients. Set to True by the session.
        self.gradients_may_differ = False
        # Whether ranks hold different gradients between backward passes. Set to True by Fabric.
        self.accumulates = False
        self._states: WeakKeyDictionary[Optimizer, _OptimizerState] = WeakKeyDictionary()
        self._hooks = ExitStack()

    @property
    def scale(self) -> float:
        """The current scale; reading it waits for the device."""
        return float(self._scale)

    def register(self, optimizer: Optimizer) -> None:
        """Register hooks that unscale gradients before each step and skip it after an overflow."""
        self._states[optimizer] = _OptimizerState(found_inf=torch.zeros_like(self._scale))
        before_step = optimizer.register_step_pre_hook(self._before_step)
        self._hooks.callback(before_step.remove)
        after_step = optimizer.register_step_post_hook(self._after_step)
        self._hooks.callback(after_step.remove)

    def close(self) -> None:
        """Remove the hooks, so that optimizers step as if they had never been registered."""
        self._hooks.close()

    @property
    def has_scaled_a_loss(self) -> bool:
        """Whether a loss was ever multiplied by the scale."""
        return self._has_scaled_a_loss

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale. Called at the start of each backward pass.

        Only this method and :meth:`load_state_dict` change the scale. A float16 loss is returned as
        float32, so that it does not overflow. Collective if ranks hold different gradients.
        """
        # What unscale() has found since the scale was last updated. None if it was not called.
        found_inf = self._found_inf_since_update
        # The scale must not change while an optimizer holds gradients that are scaled by it. To ask
        # for them may be a collective. All ranks unscale in the same calls, so found_inf is None on
        # all ranks or on none, and all ranks ask.
        if found_inf is not None and not self._any_optimizer_holds_scaled_gradients():
            self._update_scale(found_inf)
            self._found_inf_since_update = None
        unscaled: list[Optimizer] = []
        for optimizer, state in self._states.items():
            if not state.is_scaled:
                unscaled.append(optimizer)
        # The optimizers may hold unscaled gradients. They are scaled again, since this pass adds
        # scaled gradients to them.
        for grads in local_gradients(*unscaled):  # each list has one device
            foreach_multiply(grads, self._scale.to(grads[0].device))
        for optimizer in unscaled:
            self._states[optimizer].is_scaled = True
        self._has_scaled_a_loss = True
        if loss.dtype is torch.float16:
            loss = loss.float()
        return loss * self._scale.to(loss.device, loss.dtype)

    def holds_scaled_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's gradients, if it has any, are multiplied by the scale."""
        return optimizer in self._states and self._states[optimizer].is_scaled

    def _update_scale(self, found_inf: Tensor) -> None:
        """Halve the scale after an overflow, or double it after enough good steps, in place.

        Args:
            found_inf: 1 if any step since the last update overflowed, else 0.
        """
        backoff_or_grow(
            self._scale,
            self._growth_tracker,
            found_inf,
            _GROWTH_FACTOR,
            _BACKOFF_FACTOR,
            self._growth_interval,
        )

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscale an optimizer's gradients in place, once per step.

        Called before each step, and before gradients are clipped. Further calls before the step
        change nothing. An overflow lowers the next scale, even if no step of the optimizer follows,
        as in a loop that clips gradients and changes the parameters itself. Collective if ranks
        step with different gradients.

        Returns:
            Whether any gradient is infinite or NaN. The next step will then be skipped.

        Raises:
            ConfigurationError: the gradients are float16.
        """
        state = self._states[optimizer]
        if not state.is_scaled:
            # The gradients were unscaled before, as by clip_gradients.
            return bool(state.found_inf)
        # Optimizers that share a parameter share its gradient. All of their gradients are unscaled
        # now, so that each gradient is unscaled once.
        optimizers = self._optimizers_that_share(optimizer)
        # Each list has one device and one dtype.
        grads_by_kind = local_gradients(*optimizers)
        for grads in grads_by_kind:
            if grads[0].dtype is torch.float16:
                raise ConfigurationError(
                    'precision="16-mixed" with float16 parameters',
                    problem="their gradients are float16 too, and unscaling them loses the small "
                    "values that the scale has kept",
                    suggestion='model.float(), or Fabric(precision="16-true")',
                )
        found_inf = self._unscale_and_find_inf(grads_by_kind)
        # All ranks have to skip the same steps. Ranks with equal gradients find the same overflows
        # without a message.
        if self.gradients_may_differ and self._max_over_ranks is not None:
            found_inf = self._max_over_ranks(found_inf)
        for unscaled_optimizer in optimizers:
            self._states[unscaled_optimizer].found_inf = found_inf
            self._states[unscaled_optimizer].is_scaled = False
        # The next update of the scale counts the overflows of all optimizers.
        found_inf_before = self._found_inf_since_update
        if found_inf_before is not None:
            found_inf = torch.maximum(found_inf_before, found_inf)
        self._found_inf_since_update = found_inf
        return bool(state.found_inf)

    def _optimizers_that_share(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return an optimizer and those that share parameters with it, or with one of these."""
        optimizers = [optimizer]
        if len(self._states) == 1:
            return optimizers
        for member in optimizers:  # the list grows in the loop
            parameter_ids = set(map(id, parameters_of(member)))
            for other in self._states:
                shares = not parameter_ids.isdisjoint(map(id, parameters_of(other)))
                if shares and other not in optimizers:
                    optimizers.append(other)
        return optimizers

    def _unscale_and_find_inf(self, grads_by_kind: Sequence[list[Tensor]]) -> Tensor:
        """Unscale gradients in place, and find out whether they overflowed on this rank.

        Args:
            grads_by_kind: lists of gradients. Each list has one device and one dtype.

        Returns:
            1 if any gradient is infinite or NaN, else 0, on the device of the scale.
        """
        if self._scale.device.type == "mps":
            # MPS has no float64.
            inverse = 1 / self._scale
        else:
            # The reciprocal of a large float32 scale is not exact in float32 on every device.
            inverse = self._scale.double().reciprocal().float()
        found_inf = torch.zeros_like(self._scale)
        for grads in grads_by_kind:
            device = grads[0].device
            # to() returns found_inf itself, and not a copy, if it is on this device already.
            found_inf_on_device = found_inf.to(device)
            # Multiplies the gradients in place, and sets found_inf_on_device to 1 after an
            # overflow.
            unscale_and_check(grads, found_inf_on_device, inverse.to(device))
            is_copy = found_inf_on_device is not found_inf
            if is_copy:
                found_inf = torch.maximum(found_inf, found_inf_on_device.to(found_inf.device))
        return found_inf

    def forget_overflow(self) -> None:
        """Forget overflows since the last update of the scale, so that they do not lower the scale.

        Called when a step is refused because the loss was not finite or too large: then the scale
        has not caused the overflow.
        """
        self._found_inf_since_update = None

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped because gradients overflowed."""
        return self._states[optimizer].was_skipped

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the state from which :meth:`load_state_dict` resumes exactly.

        Reading it waits for the device. ``"pending"`` is 1 if gradients overflowed since the last
        update of the scale, 0 if none did, and None if none were unscaled.
        """
        pending = self._found_inf_since_update
        return {
            "scale": float(self._scale),
            "growth_tracker": int(self._growth_tracker),
            "pending": None if pending is None else float(pending),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` of a scaler returned.

        Raises:
            KeyError: an entry is missing. Nothing has changed.
        """
        # All entries are read before anything changes.
        scale = state["scale"]
        growth_tracker = state["growth_tracker"]
        pending = state["pending"]
        self._scale.fill_(scale)
        self._growth_tracker.fill_(growth_tracker)
        self._found_inf_since_update = None
        if pending is not None:
            self._found_inf_since_update = torch.full_like(self._scale, pending)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Unscale the gradients, and remove them if they overflowed. A step pre-hook.

        :meth:`_after_step` puts the removed gradients back. Without gradients, the optimizer's own
        step changes nothing. Collective if ranks hold different gradients.

        Raises:
            UsageError: the step has a closure, or its gradients come from a loss that was not
                scaled.
        """
        if has_closure(args, kwargs):
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) under loss scaling",
                problem="the closure computes new gradients inside the step, after the overflow "
                "check",
                expected="step() without a closure under 16-mixed; closures under every other "
                "precision",
            )
        if not self._has_scaled_a_loss and has_gradients(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__}.step() under loss scaling",
                problem="the loss was not multiplied by the loss scale, so small gradients are "
                "zero in float16",
                expected="losses that fabric scales, and no torch.amp.GradScaler beside it",
                suggestion="fabric.backward(loss), in place of loss.backward()",
            )
        state = self._states[optimizer]
        has_overflow = self.unscale(optimizer)
        state.was_skipped = has_overflow
        if has_overflow:
            state.removed_gradients = _remove_gradients(optimizer)

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Put back the gradients that were removed for a skipped step. A step post-hook."""
        state = self._states[optimizer]
        for parameter, grad in state.removed_gradients:
            parameter.grad = grad
        state.removed_gradients = ()

    def _any_optimizer_holds_scaled_gradients(self) -> bool:
        """Return whether any optimizer holds scaled gradients that are not zero, on any rank.

        Collective if ranks may hold different gradients. Waits for the device: gradients that
        ``zero_grad(set_to_none=False)`` has cleared are still there, and have to be read to see
        that they are zero.
        """
        # The last return exchanges a message. All ranks come to it or none does: no return above it
        # depends on the values of gradients, which may differ between ranks.
        scaled = [optimizer for optimizer, state in self._states.items() if state.is_scaled]
        if not scaled:
            return False
        holds_scaled = any(map(has_gradients, scaled))
        # Within an accumulation window, each rank holds the gradients of its own batches.
        may_differ_between_ranks = self.gradients_may_differ or self.accumulates
        if self._max_over_ranks is None or not may_differ_between_ranks:
            return holds_scaled
        # This rank's gradients may be zero while gradients of other ranks are not.
        return bool(self._max_over_ranks(torch.full_like(self._scale, float(holds_scaled))))


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``Optimizer.step`` passes a closure.

    Args:
        args: the positional arguments as a step hook gets them, with the optimizer first.
        kwargs: the keyword arguments of the call.
    """
    if len(args) > 1:
        return args[1] is not None
    return kwargs.get("closure") is not None


def _remove_gradients(optimizer: Optimizer) -> list[tuple[Tensor, Tensor | None]]:
    """Set the gradients of an optimizer to None.

    Returns:
        Each parameter with its gradient before. The gradient is None for a parameter without one.
    """
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    removed = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return removed
