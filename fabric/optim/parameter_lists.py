"""Parameters without a forward pass: replicated under every strategy, their gradients averaged before each step."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fabric.contract import GradientContract
from fabric.errors import UsageError
from fabric.strategies import Strategy

__all__ = ["PARAMETER_LISTS", "ParameterLists"]

PARAMETER_LISTS = nn.ParameterList | nn.ParameterDict


class ParameterLists:
    """The parameters of a job without a forward pass; held weakly, and also when the list of them is gone.

    Args:
        strategy: of the job.
        cleanup: removes the hook around steps.
    """

    def __init__(self, strategy: Strategy, cleanup: ExitStack) -> None:
        self._strategy = strategy
        self._cleanup = cleanup
        self._parameters: Any = WeakTensorKeyDictionary()
        self._hook: Any = None

    def replicate(self, module: nn.Module) -> GradientContract:
        """Give all ranks rank 0's values of a module's parameters, and average their gradients from now on.

        Collective. Returns the contract of the module.
        """
        for parameter in module.parameters():
            parameter.data.copy_(self._strategy.broadcast(parameter.data))
            self._parameters[parameter] = None
        # Of all optimizers: one with such parameters may have been set up before them.
        if self._hook is None:
            self._hook = self._cleanup.enter_context(
                register_optimizer_step_pre_hook(self.average_gradients)
            )
        contract = Strategy.gradient_contract(self._strategy, module)
        replicated = contract.parameters if self._strategy.is_distributed else dict
        return replace(contract, replicated=replicated, gradients_differ=False)

    def average_gradients(self, optimizer: Optimizer, *call: Any) -> None:
        """Average the gradients of an optimizer's bare parameters over the ranks; a hook before its steps.

        Collective where there are any. Averages stay as they are, and a gradient that no rank has stays away.

        Raises:
            UsageError: a step with a closure, whose gradients would stay those of this rank.
        """
        bare = self._parameters
        # Most often there are none, and an optimizer may have thousands.
        own = (
            [each for group in optimizer.param_groups for each in group["params"] if each in bare]
            if bare
            else []
        )
        if not own or not self._strategy.is_distributed:
            return
        args, kwargs = call or ((), {})
        if kwargs.get("closure", *args[1:2]) is not None:
            request = f"{type(optimizer).__name__}.step(closure) of an nn.ParameterList or nn.ParameterDict"
            problem = "its gradients are averaged before the step, and those of the closure are computed within"
            raise UsageError(
                request, problem, suggestion="fabric.backward(loss), then optimizer.step()"
            )
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
        *means, shares = self._strategy.all_reduce(
            [*grads, grads[0].new_tensor([p.grad is not None for p in own])]
        )
        for parameter, mean, share in zip(own, means, shares.tolist(), strict=True):
            parameter.grad = mean if share else None
