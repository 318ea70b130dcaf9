"""Weighted backward passes: gradients of the sum of all losses over the sum of all weights.

[Note: Loss weights] A loss that is a sum has a *weight*, its number of terms. The *window* of an optimizer is its
weighted backward passes since its last step, or since its gradients were found cleared. Strategies average gradients
over ranks. At the step, or in ``clip_gradients`` before it, gradients are multiplied once by the number of ranks over
the sum of all ranks' weights in the window, in one message. Before that, each loss is divided by a power of two
near the mean weight over ranks. This division is exact and gives gradients of about the size of a mean loss's, which a
loss scale and float16 gradients need. The power is that of the optimizer's last step; before the first step it is that
of the first backward pass, which takes another message, once.

Optimizers of the same losses have the same window. To detect cleared gradients, one gradient is compared after each
backward pass and before the next, without waiting for a device; all are read only if that one has changed.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fabric._torch import foreach_multiply, local_tensor, unscale_and_check, version
from fabric.collectives import all_reduce
from fabric.communicators import Reduce
from fabric.contract import GradientContract
from fabric.errors import ConfigurationError, UsageError
from fabric.optim.loss_scaler import LossScaler, has_nonzero_gradients, local_gradients
from fabric.runtime import Runtime
from fabric.strategies.parallel import as_list

__all__ = ["LossWeights"]


@dataclass(eq=False)
class _Window:
    divisor: Any = None  # of each loss
    weight: Any = 0  # the sum on this rank
    result: Any = (
        None  # at the step: the factor of the gradients, and the divisor of the next window
    )


_DIVIDED = _Window()  # for an optimizer whose gradients have been multiplied, until its step
_OF_OTHERS = _Window()  # for one with gradients of other optimizers' losses, until cleared
_CLOSURE = "gradients are divided before a step, and not those of its closure, nor in a step within a backward pass"
# Suggestions in errors.
_CLEAR = "optimizer.zero_grad() after step()"
_WHOSE = "optimizer=... if the loss is not for all that are set up"
_NO_CLOSURE = "fabric.backward(loss, weight=n), then optimizer.step() without a closure"


class LossWeights:
    """The windows of all set-up optimizers; see ``[Note: Loss weights]``.

    Args:
        runtime: the runtime of this process; gradients are averaged over its ranks.
        scaler: the loss scaler, if there is one.
        optimizers, contracts: the set-up optimizers, and the contracts of the set-up modules.
        cleanup: removes the hooks around the steps of all optimizers.

    Attributes:
        reads_at_once: whether loss weights are read at once, since reading does not wait for a
            device. Otherwise a sum that is zero or not finite makes the gradients zero, and is an
            error at the next step or save.
    """

    def __init__(
        self, runtime: Runtime, scaler: LossScaler | None, optimizers: Collection[Optimizer],
        contracts: Collection[GradientContract], cleanup: ExitStack,
    ) -> None:  # fmt: skip
        self._ranks = runtime.communicator
        self._device = runtime.device
        self._scaler = scaler
        self._optimizers = optimizers
        self._contracts = contracts
        # These run before each optimizer's own hooks, so that users' hooks see divided gradients.
        cleanup.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        cleanup.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self.reads_at_once = runtime.device.type != "cuda"
        self._is_good: Tensor | bool = (
            True  # whether the last sum is valid, once it has been copied
        )
        self._copied = torch.cpu.Event() if self.reads_at_once else torch.cuda.Event()
        # For optimizers that have had weighted losses: windows, divisors of the next windows, and last seen gradients.
        self._windows: WeakKeyDictionary[Optimizer, _Window | None] = WeakKeyDictionary()
        self._divisors: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._probes: WeakKeyDictionary[Optimizer, object] = WeakKeyDictionary()
        self._pass: tuple[Sequence[Optimizer], _Window | None, dict[Optimizer, object]] = (
            (),
            None,
            {},
        )

    def scale_loss(self, loss: Tensor, weight: Any, optimizer: Any) -> Tensor:
        """Divide the loss and apply the loss scale, at the start of each backward pass; see ``Fabric.backward``."""
        weight = None if weight is None else self._checked(weight)
        targets = as_list(optimizer) or list(self._optimizers)
        if not targets or any(each not in self._optimizers for each in targets):
            self._refuse(
                "an optimizer of this loss has not been set up", "fabric.setup(model, optimizer)"
            )
        for each, window in self._windows.items():
            before, self._probes[each] = self._probes[each], _probe(each)
            if window and self._probes[each] != before and not has_nonzero_gradients(each):
                self._windows[each] = None
        window, *more = {self._windows.get(target) for target in targets}
        if more:
            self._refuse(
                "the optimizers have had different losses with weights since their last steps",
                _WHOSE,
            )
        if window is _DIVIDED:
            self._refuse(
                "clip_gradients has divided the gradients that it would be added to", _CLEAR
            )
        if window is _OF_OTHERS:
            self._refuse(
                "the gradients are of others: those of losses with weights for another optimizer",
                _CLEAR,
            )
        if window and weight is None:
            self._refuse(
                "it has no weight, and a loss since the last step has one",
                f"weight=...; or {_WHOSE}",
            )
        if weight is not None:
            divisor = window.divisor if window else self._first_divisor(targets, weight)
            window = _Window(divisor, window.weight + weight if window else weight)
            loss = loss.float() if loss.dtype is torch.float16 else loss
            loss = loss / divisor.to(loss.device, loss.dtype)
        others = {each: _probe(each) for each in self._optimizers if each not in targets}
        self._pass = targets if window else (), window, others
        return loss if self._scaler is None else self._scaler.scale_loss(loss)

    def after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Record the end of a backward pass."""
        (targets, new, others), self._pass = self._pass, ((), None, {})
        for each in (
            each for each, before in others.items() if error is None and _probe(each) != before
        ):
            if self._windows.get(each) not in (None, _OF_OTHERS):
                problem = f"it reached parameters of {type(each).__name__}, which has weights of other losses"
                self._refuse(
                    problem, f"x.detach() where the loss enters it, or its step() before; {_WHOSE}"
                )
            if new:
                self._windows[each], self._probes[each] = _OF_OTHERS, _probe(each)
        for each in targets if error is None else ():
            self._windows[each], self._probes[each] = new, _probe(each)

    @torch.no_grad()
    def divide_gradients(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the weights of its window, once. Collective if it has a window."""
        window = self._windows.get(optimizer)
        if window is None or window is _DIVIDED:
            return
        if window is _OF_OTHERS:
            self._refuse(
                "it has gradients of losses with weights for others",
                _CLEAR,
                type(optimizer).__name__,
            )
        if window.result is None:
            self.check()
            mean, next_divisor = self._mean_over_ranks(window.weight)
            is_good = (mean > 0) & mean.isfinite()
            self._is_good = is_good.to("cpu", non_blocking=True)
            self._copied.record()
            if self.reads_at_once:
                self.check()
            window.result = torch.where(is_good, window.divisor / mean, 0), next_divisor
        factor, self._divisors[optimizer] = window.result
        for grads in local_gradients(optimizer):
            factor = factor.to(grads[0].device)
            if grads[0].dtype in (torch.float16, torch.bfloat16):
                # In float32, since the factor would be rounded in a 16-bit dtype.
                unscale_and_check(grads, torch.zeros_like(factor.float()), factor.float())
            else:
                foreach_multiply(grads, factor.to(grads[0].dtype))
        self._windows[optimizer] = _DIVIDED

    def check(self) -> None:
        """Raise a UsageError if the weights of the last step have a sum that is zero or not finite."""
        self._copied.synchronize()
        is_good = self._is_good
        self._is_good = True
        if not is_good:
            problem = "the weights of all ranks since the step before have a sum of zero, or none"
            self._refuse(problem, "optimizer.zero_grad() in place of such a step", "an optimizer")

    def _checked(self, weight: Any) -> Any:
        """The weight as a number, or as a float64 tensor if reading it would wait for the device."""
        is_scalar = getattr(weight, "shape", None) == ()
        is_there = isinstance(weight, Tensor) and weight.device.type == self._device.type
        if is_there and is_scalar and not self.reads_at_once and weight.dtype is not torch.bool:
            return torch.where(weight.detach() >= 0, weight.detach().double(), torch.nan)
        number: Any = weight.item() if is_scalar else weight
        if type(number) not in (int, float) or not 0 <= number < torch.inf:
            request = f"fabric.backward(loss, {weight=}) on rank {self._ranks.rank}"
            raise ConfigurationError(
                request, expected="a finite number >= 0, or a tensor of one with shape ()"
            )
        return (
            number
            if self.reads_at_once
            else torch.full((), number, dtype=torch.float64, device=self._device)
        )

    def _first_divisor(self, targets: Sequence[Optimizer], weight: Any) -> Tensor:
        """The divisor of a new window; raises if there cannot be one."""
        if any(each.gradients_differ and not each.is_sharded for each in self._contracts):
            problem = "with model_averaging_period each rank steps by its own gradients"
            self._refuse(problem, "DDPStrategy() without it; or fabric.backward(loss / n)")
        own = [
            id(each)
            for target in targets
            for group in target.param_groups
            for each in group["params"]
        ]
        unreduced = {id(each) for contract in self._contracts for each in contract.unreduced()}
        if (
            len(own) > len(set(own))
            or unreduced.intersection(own)
            or any(map(has_nonzero_gradients, targets))
        ):
            names = ", ".join(type(target).__name__ for target in targets)
            problem = f"{names}: gradients of an earlier step, or of a loss without a weight; or shared parameters"
            self._refuse(problem, f"{_CLEAR}; {_WHOSE}")
        known = [self._divisors[target] for target in targets if target in self._divisors]
        return known[0] if known else self._mean_over_ranks(weight)[1]

    def _mean_over_ranks(self, weight: Any) -> tuple[Tensor, Tensor]:
        """The mean, and the next power of two above it, or 1 if the mean is zero or not finite."""
        total = all_reduce(self._ranks, weight, Reduce.SUM) if self._ranks.size > 1 else weight
        mean = torch.as_tensor(total, dtype=torch.float64) / self._ranks.size
        return mean, (mean / mean.frexp().mantissa).clamp(2.0**-100, 2.0**100).nan_to_num(1.0)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if optimizer in self._pass[0] or (
            kwargs.get("closure", *args[1:2]) is not None and optimizer in self._probes
        ):
            self._refuse(_CLOSURE, _NO_CLOSURE, type(optimizer).__name__)
        self.divide_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._windows.pop(optimizer, None) not in (None, _DIVIDED):
            self._refuse(_CLOSURE, _NO_CLOSURE, type(optimizer).__name__)

    def _refuse(self, problem: str, suggestion: str, stepping: str = "") -> NoReturn:
        request = (
            f"a step of {stepping} after weighted losses"
            if stepping
            else "fabric.backward(loss, weight=...)"
        )
        expected = "losses with weights, added to gradients that are cleared after each step"
        raise UsageError(f"{request} on rank {self._ranks.rank}", problem, expected, suggestion)


def _probe(optimizer: Optimizer) -> object:
    """A value that changes when gradients are cleared or changed: the first gradient's id and versions."""
    grads = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    grad = next((gradient for gradient in grads if gradient is not None), None)
    # FSDP adds to the local part of a DTensor, and zero_grad(set_to_none=False) changes the DTensor.
    return None if grad is None else (id(grad), version(grad), version(local_tensor(grad)))
