"""Weighted backward passes: gradients of the sum of all losses over the sum of all loss weights.

[Note: Loss weights] A loss that is a sum has a *loss weight*, its number of terms. The *window* of
an optimizer is its weighted backward passes since its last step, or since its gradients were found
cleared. Strategies average gradients over ranks. At the step, or in ``clip_gradients`` before it,
gradients are multiplied once by the number of ranks over the sum of all ranks' loss weights in the
window, in one message. Before that, each loss is divided by a power of two near the mean loss
weight over ranks. This division is exact and gives gradients of about the size of a mean loss's,
which a loss scale and float16 gradients need. The power is that of the optimizer's last step.
Before the first step it is that of the first backward pass, which takes another message, once.

Optimizers of the same losses share one window. To detect cleared gradients, one gradient is
compared after each backward pass and before the next, without waiting for a device. All gradients
are read only if that gradient has changed.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fabric._torch import foreach_multiply, in_place_version, local_tensor, unscale_and_check
from fabric.collectives import all_reduce
from fabric.communicators import Reduce
from fabric.contract import GradientContract
from fabric.errors import ConfigurationError, UsageError
from fabric.optim.loss_scaler import (
    LossScaler,
    has_closure,
    has_nonzero_gradients,
    local_gradients,
)
from fabric.runtime import Runtime
from fabric.strategies.parallel import as_list

__all__ = ["LossWeights"]

# A number, or a float64 tensor on the device if reading a number would wait for the device.
LossWeight = float | Tensor


@dataclass(eq=False)
class _Window:
    """The weighted backward passes of one or more optimizers since their last step.

    Attributes:
        divisor: the power of two by which each loss was divided.
        weight: the sum of the loss weights on this rank.
        factor: by which the gradients are multiplied. None until the first optimizer steps.
        next_divisor: the divisor of the next window. None until the first optimizer steps.
    """

    divisor: Tensor
    weight: LossWeight
    factor: Tensor | None = None
    next_divisor: Tensor | None = None


# In place of a window: the gradients have been multiplied, and the optimizer has not stepped yet.
_DIVIDED = _Window(torch.ones(()), 0)
# In place of a window: the optimizer holds gradients of losses that are for other optimizers.
_FOREIGN = _Window(torch.ones(()), 0)


@dataclass
class _OptimizerState:
    """What is known about an optimizer that has had gradients of weighted losses.

    Attributes:
        window: its window, or a mark in place of one. None after a step.
        fingerprint: of its gradients after the last backward pass.
        divisor: the divisor of its next window. None before its first step.
    """

    window: _Window | None = None
    fingerprint: object = None
    divisor: Tensor | None = None


@dataclass(frozen=True)
class _BackwardPass:
    """A backward pass under way.

    Attributes:
        optimizers: the optimizers of the loss, if it belongs to a window.
        window: the window that includes this pass. None without loss weights.
        fingerprints: the fingerprint of each set-up optimizer that the loss is not for.
    """

    optimizers: Sequence[Optimizer] = ()
    window: _Window | None = None
    fingerprints: dict[Optimizer, object] = field(default_factory=dict)


_CLOSURE = (
    "gradients are divided before a step, and not those of its closure, nor in a step within a "
    "backward pass"
)
# Suggestions in errors.
_CLEAR = "optimizer.zero_grad() after step()"
_NAME_OPTIMIZERS = "optimizer=... if the loss is not for all that are set up"
_NO_CLOSURE = "fabric.backward(loss, weight=n), then optimizer.step() without a closure"


class LossWeights:
    """The loss weights of all set-up optimizers; see ``[Note: Loss weights]``.

    Args:
        runtime: the runtime of this process. Gradients are averaged over its ranks.
        scaler: the loss scaler, if there is one.
        optimizers: the set-up optimizers.
        contracts: the contracts of the set-up modules.
        cleanup: removes the hooks around the steps of all optimizers.

    Attributes:
        reads_at_once: whether loss weights are read at once, since reading does not wait for a
            device. Otherwise a sum that is zero or not finite makes the gradients zero, and is an
            error at the next step or save.
    """

    def __init__(
        self,
        runtime: Runtime,
        scaler: LossScaler | None,
        optimizers: Collection[Optimizer],
        contracts: Collection[GradientContract],
        cleanup: ExitStack,
    ) -> None:
        self._communicator = runtime.communicator
        self._device = runtime.device
        self._scaler = scaler
        self._optimizers = optimizers
        self._contracts = contracts
        # These run before each optimizer's own hooks, so that users' hooks see divided gradients.
        cleanup.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        cleanup.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.reads_at_once = runtime.device.type != "cuda"
        # Whether the last sum of loss weights is valid. A tensor can be read after the event.
        self._is_sum_valid: Tensor | bool = True
        self._sum_was_copied = torch.cpu.Event() if self.reads_at_once else torch.cuda.Event()
        self._states: WeakKeyDictionary[Optimizer, _OptimizerState] = WeakKeyDictionary()
        self._backward_pass = _BackwardPass()

    def scale_loss(self, loss: Tensor, weight: Any, optimizer: Any) -> Tensor:
        """Divide the loss and apply the loss scale, at the start of each backward pass.

        Args:
            loss: the loss.
            weight: its loss weight. None for a loss that is a mean.
            optimizer: the optimizers that the loss is for. None means all that are set up.

        Returns:
            The loss to call ``backward`` on. See ``Fabric.backward``.
        """
        loss_weight = None
        if weight is not None:
            loss_weight = self._parse_weight(weight)
        optimizers = as_list(optimizer) or list(self._optimizers)
        self._check_set_up(optimizers)
        self._drop_cleared_windows()
        window = self._common_window(optimizers)
        if loss_weight is not None:
            window = self._extended_window(window, optimizers, loss_weight)
            if loss.dtype is torch.float16:
                loss = loss.float()
            loss = loss / window.divisor.to(loss.device, loss.dtype)
        elif window is not None:
            self._refuse_loss(
                "it has no weight, and a loss since the last step has one",
                f"weight=...; or {_NAME_OPTIMIZERS}",
            )
        self._begin_backward_pass(optimizers, window)
        if self._scaler is None:
            return loss
        return self._scaler.scale_loss(loss)

    def after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Record the end of a backward pass."""
        finished = self._backward_pass
        self._backward_pass = _BackwardPass()
        if error is not None:
            return
        for optimizer, before in finished.fingerprints.items():
            fingerprint = _gradient_fingerprint(optimizer)
            if fingerprint != before:
                self._record_foreign_gradients(optimizer, fingerprint, finished.window)
        for optimizer in finished.optimizers:
            state = self._states.setdefault(optimizer, _OptimizerState())
            state.window = finished.window
            state.fingerprint = _gradient_fingerprint(optimizer)

    @torch.no_grad()
    def divide_gradients(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss weights of its window, once.

        Collective if the optimizer has a window.
        """
        state = self._states.get(optimizer)
        if state is None or state.window is None or state.window is _DIVIDED:
            return
        window = state.window
        if window is _FOREIGN:
            self._refuse_step(
                optimizer, "it has gradients of weighted losses for other optimizers", _CLEAR
            )
        # Optimizers with the same window exchange one message, at the first step.
        if window.factor is None:
            self._reduce_window(window)
        assert window.factor is not None
        state.divisor = window.next_divisor
        for grads in local_gradients(optimizer):
            _multiply(grads, window.factor)
        state.window = _DIVIDED

    def check(self) -> None:
        """Raise a UsageError if the loss weights of the last step have no valid sum."""
        self._sum_was_copied.synchronize()
        is_sum_valid = self._is_sum_valid
        self._is_sum_valid = True
        if not is_sum_valid:
            problem = (
                "the loss weights of all ranks since the step before have a sum of zero, or a sum "
                "that is not finite"
            )
            suggestion = "optimizer.zero_grad() in place of such a step"
            self._refuse("an optimizer's step after weighted losses", problem, suggestion)

    # -- before a backward pass -----------------------------------------------------------------

    def _parse_weight(self, weight: Any) -> LossWeight:
        """Return a loss weight as a number, or as a tensor if reading would wait for the device."""
        is_scalar = getattr(weight, "shape", None) == ()
        if is_scalar and not self.reads_at_once and self._is_number_on_device(weight):
            # A negative weight becomes nan, which makes the sum invalid.
            return torch.where(weight.detach() >= 0, weight.detach().double(), torch.nan)
        number: Any = weight
        if is_scalar:
            number = weight.item()
        if type(number) not in (int, float) or not 0 <= number < torch.inf:
            raise ConfigurationError(
                f"fabric.backward(loss, {weight=}) on rank {self._communicator.rank}",
                expected="a finite number >= 0, or a tensor of one with shape ()",
            )
        if self.reads_at_once:
            return number
        return torch.full((), number, dtype=torch.float64, device=self._device)

    def _is_number_on_device(self, weight: Any) -> bool:
        """Return whether a loss weight is a tensor of numbers on this process's device."""
        if not isinstance(weight, Tensor) or weight.dtype is torch.bool:
            return False
        return weight.device.type == self._device.type

    def _check_set_up(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a UsageError unless there are optimizers and all of them are set up."""
        unknown = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        if unknown or not optimizers:
            self._refuse_loss(
                "an optimizer of this loss has not been set up", "fabric.setup(model, optimizer)"
            )

    def _drop_cleared_windows(self) -> None:
        """End the windows of optimizers whose gradients the user has cleared."""
        for optimizer, state in self._states.items():
            if state.window is None:
                continue
            fingerprint = _gradient_fingerprint(optimizer)
            has_changed = fingerprint != state.fingerprint
            state.fingerprint = fingerprint
            if has_changed and not has_nonzero_gradients(optimizer):
                state.window = None

    def _common_window(self, optimizers: Sequence[Optimizer]) -> _Window | None:
        """Return the window of the optimizers of a loss, or None if they have none.

        Raises:
            UsageError: they have different windows, or gradients that a weighted loss cannot be
                added to.
        """
        windows: set[_Window | None] = set()
        for optimizer in optimizers:
            state = self._states.get(optimizer)
            windows.add(None if state is None else state.window)
        if len(windows) > 1:
            self._refuse_loss(
                "the optimizers have had different weighted losses since their last steps",
                _NAME_OPTIMIZERS,
            )
        window = windows.pop()
        if window is _DIVIDED:
            self._refuse_loss(
                "clip_gradients has divided the gradients that it would be added to", _CLEAR
            )
        if window is _FOREIGN:
            self._refuse_loss("the gradients are of weighted losses for other optimizers", _CLEAR)
        return window

    def _extended_window(
        self, window: _Window | None, optimizers: Sequence[Optimizer], weight: LossWeight
    ) -> _Window:
        """Return a window with another loss weight. Collective at the first loss of an optimizer.

        A new object: the pass may fail, and then the optimizers keep the old window.
        """
        if window is not None:
            return _Window(window.divisor, window.weight + weight)
        self._check_new_window(optimizers)
        for optimizer in optimizers:
            state = self._states.get(optimizer)
            if state is not None and state.divisor is not None:
                return _Window(state.divisor, weight)
        return _Window(_power_of_two_above(self._mean_over_ranks(weight)), weight)

    def _check_new_window(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a UsageError if the optimizers cannot begin a window."""
        unreduced: set[int] = set()
        for contract in self._contracts:
            if contract.gradients_differ and not contract.is_sharded:
                self._refuse_loss(
                    "with model_averaging_period each rank steps by its own gradients",
                    "DDPStrategy() without it; or fabric.backward(loss / n)",
                )
            unreduced.update(map(id, contract.unreduced()))
        parameters: list[int] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters.extend(map(id, group["params"]))
        has_shared = len(set(parameters)) < len(parameters)
        has_unreduced = not unreduced.isdisjoint(parameters)
        if has_shared or has_unreduced or any(map(has_nonzero_gradients, optimizers)):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            self._refuse_loss(
                f"{names}: gradients of an earlier step, or of a loss without a weight; or shared "
                "parameters",
                f"{_CLEAR}; {_NAME_OPTIMIZERS}",
            )

    def _begin_backward_pass(self, optimizers: Sequence[Optimizer], window: _Window | None) -> None:
        fingerprints: dict[Optimizer, object] = {}
        for optimizer in self._optimizers:
            if optimizer not in optimizers:
                fingerprints[optimizer] = _gradient_fingerprint(optimizer)
        if window is None:
            optimizers = ()
        self._backward_pass = _BackwardPass(optimizers, window, fingerprints)

    def _record_foreign_gradients(
        self, optimizer: Optimizer, fingerprint: object, window: _Window | None
    ) -> None:
        """Mark an optimizer that got gradients of a loss that is not for it.

        Raises:
            UsageError: the optimizer has a window of its own, which the gradients were added to.
        """
        state = self._states.get(optimizer)
        if state is not None and state.window not in (None, _FOREIGN):
            self._refuse_loss(
                f"it reached parameters of {type(optimizer).__name__}, which has weights of other "
                "losses",
                "x.detach() where the loss enters it, or its step() before; " + _NAME_OPTIMIZERS,
            )
        if window is not None:
            state = self._states.setdefault(optimizer, _OptimizerState())
            state.window = _FOREIGN
            state.fingerprint = fingerprint

    # -- around a step --------------------------------------------------------------------------

    def _reduce_window(self, window: _Window) -> None:
        """Compute the factor of a window's gradients, and the next divisor. Collective."""
        self.check()
        mean = self._mean_over_ranks(window.weight)
        is_valid = (mean > 0) & mean.isfinite()
        self._is_sum_valid = is_valid.to("cpu", non_blocking=True)
        self._sum_was_copied.record()
        if self.reads_at_once:
            self.check()
        window.factor = torch.where(is_valid, window.divisor / mean, 0)
        window.next_divisor = _power_of_two_above(mean)

    def _mean_over_ranks(self, weight: LossWeight) -> Tensor:
        """Return the mean of the ranks' loss weights, in float64. Collective."""
        total = weight
        if self._communicator.size > 1:
            total = all_reduce(self._communicator, weight, Reduce.SUM)
        return torch.as_tensor(total, dtype=torch.float64) / self._communicator.size

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_within_backward = optimizer in self._backward_pass.optimizers
        if is_within_backward or (optimizer in self._states and has_closure(args, kwargs)):
            self._refuse_step(optimizer, _CLOSURE, _NO_CLOSURE)
        self.divide_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        state = self._states.get(optimizer)
        if state is None:
            return
        window = state.window
        state.window = None
        if window is not None and window is not _DIVIDED:
            # A closure has called backward within the step.
            self._refuse_step(optimizer, _CLOSURE, _NO_CLOSURE)

    # -- errors ---------------------------------------------------------------------------------

    def _refuse_loss(self, problem: str, suggestion: str) -> NoReturn:
        self._refuse("fabric.backward(loss, weight=...)", problem, suggestion)

    def _refuse_step(self, optimizer: Optimizer, problem: str, suggestion: str) -> NoReturn:
        request = f"a step of {type(optimizer).__name__} after weighted losses"
        self._refuse(request, problem, suggestion)

    def _refuse(self, request: str, problem: str, suggestion: str) -> NoReturn:
        raise UsageError(
            f"{request} on rank {self._communicator.rank}",
            problem,
            expected="weighted losses, added to gradients that are cleared after each step",
            suggestion=suggestion,
        )


def _power_of_two_above(mean: Tensor) -> Tensor:
    """Return the next power of two above a number, or 1 if the number is zero or not finite."""
    power = mean / mean.frexp().mantissa
    return power.clamp(2.0**-100, 2.0**100).nan_to_num(1.0)


def _multiply(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place.

    Args:
        grads: the gradients, at least one. All have the same device and dtype.
        factor: the factor, a tensor without dimensions.
    """
    factor = factor.to(grads[0].device)
    if grads[0].dtype in (torch.float16, torch.bfloat16):
        # In a 16-bit dtype, the factor would be rounded. The kernel that unscales gradients
        # multiplies them by a float32 factor. Its check for overflows is not needed.
        factor = factor.float()
        found_inf = torch.zeros_like(factor)
        unscale_and_check(grads, found_inf, factor)
    else:
        foreach_multiply(grads, factor.to(grads[0].dtype))


def _gradient_fingerprint(optimizer: Optimizer) -> object:
    """Return a value that changes when an optimizer's gradients are cleared or changed.

    The value is made of the identity and the versions of the first gradient.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                # FSDP adds to the local part of a DTensor, and zero_grad(set_to_none=False)
                # changes the DTensor.
                return id(grad), in_place_version(grad), in_place_version(local_tensor(grad))
    return None
