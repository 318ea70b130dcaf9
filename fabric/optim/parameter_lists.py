"""Parameter lists: parameters without a forward pass.

They are replicated under every strategy, and their gradients are averaged before each step.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fabric.contract import GradientContract
from fabric.errors import UsageError
from fabric.optim.loss_scaler import has_closure
from fabric.strategies import Strategy

__all__ = ["PARAMETER_LISTS", "ParameterLists"]

PARAMETER_LISTS = nn.ParameterList | nn.ParameterDict


class ParameterLists:
    """The parameters in the parameter lists of a job.

    They are held weakly, and also when the list that they were in is gone.

    Args:
        strategy: the strategy of the job.
        cleanup: removes the hook around steps.
    """

    def __init__(self, strategy: Strategy, cleanup: ExitStack) -> None:
        self._strategy = strategy
        self._cleanup = cleanup
        self._parameters = WeakTensorKeyDictionary()
        self._hook: RemovableHandle | None = None

    def replicate(self, module: nn.Module) -> GradientContract:
        """Give all ranks rank 0's values of a list, and average its gradients from now on.

        Collective. Returns the contract of the list.
        """
        for parameter in module.parameters():
            parameter.data.copy_(self._strategy.broadcast(parameter.data))
            self._parameters[parameter] = None
        # The hook is for all optimizers: an optimizer may have been set up before its parameters.
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            self._cleanup.callback(self._hook.remove)
        # The override of the strategy's class is not called: it is for modules with a forward pass.
        contract = Strategy.gradient_contract(self._strategy, module)
        contract = replace(contract, gradients_differ=False)
        if self._strategy.is_distributed:
            contract = replace(contract, replicated=contract.parameters)
        return contract

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients of an optimizer's listed parameters over the ranks.

        Collective if the optimizer has parameters of lists. Gradients that are equal on all ranks
        do not change, and a gradient that is None on all ranks stays None.
        """
        parameters = self._parameters_to_average(optimizer)
        if parameters:
            self._average_gradients(parameters)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Average the gradients of parameters in lists before a step; a hook of all optimizers.

        Raises:
            UsageError: the step has a closure.
        """
        parameters = self._parameters_to_average(optimizer)
        if not parameters:
            return
        if has_closure(args, kwargs):
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) of an nn.ParameterList or "
                "nn.ParameterDict",
                problem="the gradients of these lists are averaged over the ranks before step(), "
                "and a closure computes gradients during step()",
                suggestion="fabric.backward(loss), then optimizer.step()",
            )
        self._average_gradients(parameters)

    def _parameters_to_average(self, optimizer: Optimizer) -> list[nn.Parameter]:
        # Most often there are no lists, and an optimizer may have thousands of parameters.
        if not self._parameters or not self._strategy.is_distributed:
            return []
        listed: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._parameters:
                    listed.append(parameter)
        return listed

    def _average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients in one message. A missing gradient counts as zero."""
        grads: list[torch.Tensor] = []
        has_grad: list[bool] = []
        for parameter in parameters:
            has_grad.append(parameter.grad is not None)
            grads.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        *means, shares = self._strategy.all_reduce([*grads, grads[0].new_tensor(has_grad)])
        for parameter, mean, share in zip(parameters, means, shares.tolist(), strict=True):
            parameter.grad = mean if share else None
