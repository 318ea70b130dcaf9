"""Scaling of the loss, so that float16 gradients do not underflow.

[Note: Loss scale] The scale changes only at the start of a backward pass, and only if no optimizer holds scaled
gradients that were neither used in a step nor cleared. It never changes during accumulation or between two optimizers
that share a backward pass. Gradients that were unscaled and are kept for another backward pass are first scaled again,
which is exact, since scales are powers of two.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric._torch import backoff_or_grow, foreach_multiply, local_tensor, unscale_and_check
from fabric.errors import ConfigurationError, UsageError
from fabric.precision import LossScale

__all__ = ["LossScaler", "has_nonzero_gradients", "local_gradients"]


@dataclass
class _OptimizerState:
    found_inf: Tensor
    is_scaled: bool = False  # the gradients, if there are any
    held: Sequence[
        tuple[Any, Tensor]
    ] = ()  # parameters and their gradients while a step is skipped
    skipped: bool = False  # whether the last step was


class LossScaler:
    """Dynamic loss scaling for any number of optimizers that may share backward passes.

    The method is that of :class:`torch.amp.GradScaler` (Micikevicius et al., "Mixed Precision Training", 2018): a step
    whose gradients overflowed is skipped and the scale halved; after ``growth_interval`` good steps it is doubled. Two
    things differ: when the scale changes, see ``[Note: Loss scale]``, and that users call the optimizers' own ``step``,
    whose hooks unscale the gradients and remove them during a skipped step.

    Args:
        device: the device of the loss.
        settings: the initial scale, and the growth interval.
        max_over_ranks: a collective for the maximum of a float32 tensor over ranks; None in a single process.

    Attributes:
        gradients_differ: whether ranks step with different gradients; an overflow on one of them then skips the step on
            all.
        accumulates: whether some backward passes leave gradients that are not yet synchronized.
    """

    def __init__(
        self,
        device: torch.device,
        settings: LossScale,
        max_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._scale = torch.full((), settings.init_scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._pending: Tensor | None = (
            None  # whether any step since the last change of scale overflowed
        )
        self._growth_interval = settings.growth_interval
        self._max_over_ranks = max_over_ranks
        self.gradients_differ = False
        self.accumulates = False
        self._states: WeakKeyDictionary[Optimizer, _OptimizerState] = WeakKeyDictionary()
        self._hooks = ExitStack()

    @property
    def scale(self) -> float:
        """The current scale; reading it waits for the device."""
        return float(self._scale)

    def register(self, optimizer: Optimizer) -> None:
        """Register hooks: from now on the optimizer's ``step`` unscales first, and does nothing after an overflow."""
        self._states[optimizer] = _OptimizerState(torch.zeros_like(self._scale))
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)

    def close(self) -> None:
        """Remove the hooks: the optimizers step as if never registered."""
        self._hooks.close()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale; to be called once at the start of each backward pass.

        A float16 loss is returned as float32, so that it does not overflow. Collective if ranks hold different
        gradients.
        """
        if self._pending is not None and not self._any_holds_scaled():
            backoff_or_grow(
                self._scale, self._growth_tracker, self._pending, 2.0, 0.5, self._growth_interval
            )
            self._pending = None
        for optimizer, state in self._states.items():
            if not state.is_scaled:
                for grads in local_gradients(optimizer):
                    foreach_multiply(grads, self._scale.to(grads[0].device))
            state.is_scaled = True
        if loss.dtype is torch.float16:
            loss = loss.float()
        return loss * self._scale.to(loss.device, loss.dtype)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscale an optimizer's gradients, once per step; further calls change nothing.

        Collective if ranks hold different gradients.

        Returns:
            Whether any gradient is infinite or NaN, in which case the next step will be skipped.
        """
        state = self._states[optimizer]
        if not state.is_scaled:
            return bool(state.found_inf)
        groups = local_gradients(optimizer)
        if any(grads[0].dtype is torch.float16 for grads in groups):
            raise ConfigurationError(
                'precision="16-mixed" with float16 parameters',
                "their gradients are float16 too, and lose in unscaling what the scale had kept",
                suggestion='model.float(), or Fabric(precision="16-true")',
            )
        found = torch.zeros_like(self._scale)
        # In float64 first: the reciprocal of a large float32 scale is not exact in float32 on every device.
        inverse = (
            self._scale.double().reciprocal().float()
            if self._scale.device.type != "mps"
            else 1 / self._scale
        )
        for grads in groups:
            found_here = found.to(grads[0].device)
            unscale_and_check(grads, found_here, inverse.to(grads[0].device))
            if found_here is not found:  # gradients on another device than the scale
                found = torch.maximum(found, found_here.to(found.device))
        agree = self._max_over_ranks if self.gradients_differ else None
        state.found_inf = found if agree is None else agree(found)
        state.is_scaled = False
        return bool(state.found_inf)

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last step of an optimizer was skipped because gradients overflowed."""
        return self._states[optimizer].skipped

    def state_dict(self) -> dict[str, float | int | None]:
        """The state from which :meth:`load_state_dict` resumes exactly."""
        pending = None if self._pending is None else float(self._pending)
        return {
            "scale": float(self._scale),
            "growth_tracker": int(self._growth_tracker),
            "pending": pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another scaler. Raises a KeyError for a missing entry, with nothing changed."""
        scale, growth_tracker, pending = (
            state[name] for name in ("scale", "growth_tracker", "pending")
        )
        self._scale.fill_(scale)
        self._growth_tracker.fill_(growth_tracker)
        self._pending = None if pending is None else torch.full_like(self._scale, pending)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if kwargs.get("closure", *args[1:2]) is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) under loss scaling",
                "the closure computes new gradients inside the step, after the overflow check",
                "step() without a closure under 16-mixed; closures under every other precision",
            )
        state = self._states[optimizer]
        state.skipped = self.unscale(optimizer)
        found = state.found_inf
        self._pending = found if self._pending is None else torch.maximum(self._pending, found)
        if state.skipped:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            state.held = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        state = self._states[optimizer]
        for parameter, grad in state.held:
            parameter.grad = grad
        state.held = ()

    def _any_holds_scaled(self) -> bool:
        """Whether any optimizer holds scaled gradients that are not zero; the same on all ranks.

        ``zero_grad(set_to_none=False)`` also clears gradients. Those of an optimizer that has not stepped are read,
        which waits for the device.
        """
        waiting = [optimizer for optimizer, state in self._states.items() if state.is_scaled]
        holds = any(map(has_nonzero_gradients, waiting))
        if (
            not waiting
            or self._max_over_ranks is None
            or not (self.gradients_differ or self.accumulates)
        ):
            return holds
        # Gradients that are zero on this rank may not be zero on others.
        return bool(self._max_over_ranks(torch.full_like(self._scale, float(holds))))


def local_gradients(optimizer: Optimizer) -> list[list[Tensor]]:
    """The local, dense values of an optimizer's gradients, sharing their memory, grouped by device and dtype."""
    grads: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                # Values of repeated indices may overflow when they are added.
                parameter.grad = grad = grad.coalesce()
                grad = grad._values()
            grads[grad.device, grad.dtype].append(local_tensor(grad))
    return list(grads.values())


def has_nonzero_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer has nonzero gradients on this rank; waits for the device if it has gradients."""
    return any(bool(grad.any()) for grads in local_gradients(optimizer) for grad in grads)
