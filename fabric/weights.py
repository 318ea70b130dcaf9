"""Weighted backward passes: gradients of the sum of all losses over the sum of all weights.

[Note: Loss weights] A loss that is a sum has a *weight*, the number of its terms. The *window* of an optimizer holds
the weighted backward passes since its last step, or since its gradients were found cleared. Strategies average
gradients over ranks: at the step, or in ``clip_gradients`` before it, they are multiplied once by the number of ranks
over the sum of the weights of all ranks in the window, which takes one message. Until then each loss is divided by a
power of two near the sum over ranks of its weights by their number, so that its gradients are about those of a mean,
for a loss scale or for gradients that are float16 anywhere: a division that rounds nothing. It is the power of the
optimizer's last step; at the first step that of the first backward pass, for which there is another message, once.

Optimizers of the same losses have the same window. A window is found dropped at one gradient, which is looked at after
each backward pass and before the next, without waiting for a device; all are only where that one was changed.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric._torch import foreach_multiply, hook_place, local_tensor, unscale_and_check, version
from fabric.collectives import all_reduce
from fabric.communicators import Reduce
from fabric.diagnostics.bypass import GradientContract
from fabric.errors import ConfigurationError, UsageError
from fabric.loss_scaler import LossScaler, gradients, holds_gradients
from fabric.runtime import Runtime
from fabric.strategies.parallel import as_list

__all__ = ["LossWeights"]


@dataclass(eq=False)
class _Window:
    divisor: Any = None  # of the losses
    weight: Any = 0  # on this rank
    result: Any = None  # at the step: the factor of the gradients, and the divisor of the next window


_DIVIDED = _Window()  # that of an optimizer whose gradients have been multiplied, until its step


@dataclass(eq=False)
class _OptimizerState:
    window: _Window | None = None
    divisor: Tensor | None = None  # of the next window
    probe: object = None


class LossWeights:
    """The windows of all set-up optimizers; see ``[Note: Loss weights]``.

    Args:
        runtime: of this process; gradients are averaged over its ranks.
        scaler: of the loss, where there is one.
        optimizers, contracts: those that are set up, and those of the modules.
        cleanup: removes the hooks of the optimizers.

    Attributes:
        reads: whether weights are read, since that does not wait for a device; else a sum that is zero or not finite
            makes the gradients zero, and is an error at the next step or save.
    """

    def __init__(
        self, runtime: Runtime, scaler: LossScaler | None, optimizers: Collection[Optimizer],
        contracts: Collection[GradientContract], cleanup: ExitStack,
    ) -> None:  # fmt: skip
        self._ranks, self._device, self._scaler = runtime.communicator, runtime.device, scaler
        self._optimizers, self._contracts, self._cleanup = optimizers, contracts, cleanup
        self._copied = torch.cuda.Event() if runtime.device.type == "cuda" else None
        self._is_good: Tensor | bool = True  # the last sum, once it has been copied
        self.reads = self._copied is None
        self._states: WeakKeyDictionary[Optimizer, _OptimizerState] = WeakKeyDictionary()
        self._pass: tuple[Sequence[Optimizer], _Window | None] = (), None

    def scale_loss(self, loss: Tensor, weight: Any, optimizer: Any) -> Tensor:
        """The loss divided, and times the loss scale, at the start of each backward pass; see ``Fabric.backward``."""
        weight = None if weight is None else self._checked(weight)
        targets = as_list(optimizer) or list(self._optimizers)
        if not targets or any(each not in self._optimizers for each in targets):
            self._refuse("an optimizer of this loss has not been set up")
        for target in targets:
            self._watch(target)
        for each, state in self._states.items():
            before, state.probe = state.probe, _probe(each)
            if state.window and state.probe != before and not holds_gradients(each):
                state.window = None
        window, *others = {self._states[target].window for target in targets}
        if others:
            self._refuse("the optimizers have had different losses with weights since their last steps")
        if window is _DIVIDED:
            self._refuse("clip_gradients has divided the gradients already, and there has been no step since")
        if weight is not None:
            divisor = self._first_divisor(targets, weight) if window is None else window.divisor
            window = _Window(divisor, weight if window is None else window.weight + weight)
            loss = loss.float() if loss.dtype is torch.float16 else loss
        elif window is not None:
            self._refuse("it has no weight, and another loss since the last step has one")
        divisor = None if window is None else window.divisor
        self._pass = targets, window
        if self._scaler is not None:
            return self._scaler.scale_loss(loss, divisor)
        return loss if divisor is None else loss / divisor.to(loss.device, loss.dtype)

    def after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Note that a backward pass is over."""
        (targets, window), self._pass = self._pass, ((), None)
        for optimizer, state in list(self._states.items()) if error is None else ():
            before, state.probe = state.probe, _probe(optimizer)
            if optimizer in targets:
                state.window = window
            elif state.window not in (None, _DIVIDED) and state.probe != before:
                self._refuse(f"it reached parameters of {type(optimizer).__name__}, which has weights of other losses")

    @torch.no_grad()
    def divide(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the weights of its window, once. Collective where it has one."""
        state = self._states.get(optimizer)
        if state is None or (window := state.window) in (None, _DIVIDED):
            return
        if window.result is None:
            self.check()
            mean, power = self._mean_over_ranks(window.weight)
            is_good = power > 0
            self._is_good = is_good.to("cpu", non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            elif self.reads:
                self.check()
            next_divisor = torch.where(is_good, power, window.divisor)
            window.result = torch.where(is_good, window.divisor / mean, 0), next_divisor
        factor, state.divisor = window.result
        for grads in gradients(optimizer):
            factor = factor.to(grads[0].device)
            if grads[0].dtype in (torch.float16, torch.bfloat16):
                # In float32: as one of these the factor would be rounded first.
                unscale_and_check(grads, torch.zeros_like(factor.float()), factor.float())
            else:
                foreach_multiply(grads, factor.to(grads[0].dtype))
        state.window = _DIVIDED

    def check(self) -> None:
        """Raise a UsageError if the weights of the last step had no sum to divide by."""
        if self._copied is not None:
            self._copied.synchronize()
        is_good, self._is_good = self._is_good, True
        if not is_good:
            self._refuse(
                "the weights of all ranks since the step before have a sum that is zero or not finite", "a step"
            )

    def _checked(self, weight: Any) -> Any:
        """A weight as a number, or as a float64 tensor on a device that is not to be waited for."""
        is_scalar = getattr(weight, "shape", None) == ()
        if is_scalar and not self.reads and weight.device.type == self._device.type and weight.dtype is not torch.bool:
            return torch.where(weight.detach() >= 0, weight.detach().double(), torch.nan)
        number = weight.item() if is_scalar else weight
        if type(number) not in (int, float) or not 0 <= number < torch.inf:
            request = f"fabric.backward(loss, {weight=}) on rank {self._ranks.rank}"
            raise ConfigurationError(request, expected="a finite number >= 0 or a tensor of one, of shape ()")
        return number if self.reads else torch.full((), number, dtype=torch.float64, device=self._device)

    def _first_divisor(self, targets: Sequence[Optimizer], weight: Any) -> Tensor:
        """The divisor of a window that is opened; raises where that cannot be."""
        if any(each.gradients_differ and not each.is_sharded for each in self._contracts):
            self._refuse("with model_averaging_period each rank steps by its own gradients")
        unreduced = {id(each) for contract in self._contracts for each in contract.unreduced()}
        for target in targets:
            own = {id(parameter) for group in target.param_groups for parameter in group["params"]}
            if own & unreduced or holds_gradients(target):
                self._refuse(f"{type(target).__name__} has gradients of an earlier step, or of losses without a weight")
        known = (self._states[target].divisor for target in targets)
        divisor = next((each for each in known if each is not None), None)
        return self._mean_over_ranks(weight)[1].nan_to_num(1.0) if divisor is None else divisor

    def _mean_over_ranks(self, weight: Any) -> tuple[Tensor, Tensor]:
        """The mean, and the power of two above it: not a number if the mean is zero or not finite."""
        size = self._ranks.size
        total = all_reduce(self._ranks, weight, Reduce.SUM) if size > 1 else weight
        mean = (total if isinstance(total, Tensor) else torch.tensor(float(total), dtype=torch.float64)) / size
        return mean, (mean / mean.frexp().mantissa).clamp(2.0**-100, 2.0**100)

    def _watch(self, optimizer: Optimizer) -> None:
        if optimizer not in self._states:
            self._states[optimizer] = _OptimizerState(probe=_probe(optimizer))
            handle = optimizer.register_step_pre_hook(self._before_step)
            self._cleanup.callback(handle.remove)
            self._cleanup.callback(optimizer.register_step_post_hook(self._after_step).remove)
            # First: hooks of users see divided gradients, from the first step on.
            hooks, number, _ = hook_place(handle)
            hooks.move_to_end(number, last=False)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(map(callable, args[1:])):
            self._refuse("the closure computes gradients within the step, when they are not divided", "step(closure)")
        self.divide(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        window, self._states[optimizer].window = self._states[optimizer].window, None
        if window not in (None, _DIVIDED):
            self._refuse("the closure computed gradients within the step, when they are not divided", "step(closure)")

    def _refuse(self, problem: str, call: str = "fabric.backward(loss, weight=...)") -> NoReturn:
        expected = "losses with weights, added to gradients that are cleared after a step, or in place of one"
        suggestion = "optimizer.zero_grad() after step(); optimizer=... if the loss is not for all that are set up"
        raise UsageError(f"{call} on rank {self._ranks.rank}", problem, expected, suggestion)


def _probe(optimizer: Optimizer) -> object:
    """What differs once gradients were cleared or changed: the first one, and how often that was changed."""
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    grad = next((each for each in grads if each is not None), None)
    # FSDP adds to the local part of a DTensor, and zero_grad(set_to_none=False) changes the DTensor.
    return None if grad is None else (id(grad), version(grad), version(local_tensor(grad)))
