"""Parameter lists: ``nn.ParameterList`` and ``nn.ParameterDict``, which have no forward pass.

Without a forward pass, no strategy can shard their parameters or average their gradients. So they
are replicated under every strategy, and their gradients are averaged before each step.
"""

from collections.abc import Mapping, Sequence
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

# As in Optimizer.param_groups. Only "params" is read.
_ParamGroups = Sequence[Mapping[str, Any]]


class ParameterLists:
    """Replication of the parameters in parameter lists, and averages of their gradients over ranks.

    The parameters are held weakly. A parameter stays known after its list is gone.

    Args:
        strategy: the strategy of the job.
        cleanup: the stack whose end removes the hook before steps.
    """

    def __init__(self, strategy: Strategy, cleanup: ExitStack) -> None:
        """Start without parameters. :meth:`replicate` adds the parameters of a list."""
        self._strategy = strategy
        self._cleanup = cleanup
        # A set of parameters: all values are None.
        self._parameters = WeakTensorKeyDictionary()
        # The hook before the steps of all optimizers. None until a list is set up.
        self._hook: RemovableHandle | None = None

    def replicate(self, module: nn.Module) -> GradientContract:
        """Copy rank 0's parameters to all ranks, and average their gradients from now on.

        Collective. Called when an ``nn.ParameterList`` or ``nn.ParameterDict`` is set up.

        Args:
            module: the list or dict.

        Returns:
            The contract of the module.
        """
        for parameter in module.parameters():
            parameter.data.copy_(self._strategy.broadcast(parameter.data))
            self._parameters[parameter] = None  # a set that keeps the order
        # The hook is for all optimizers, since an optimizer may be set up before its parameters.
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._before_step)
            self._cleanup.callback(self._hook.remove)
        # The base class's method is called, since overrides expect a module with a forward pass.
        contract = Strategy.gradient_contract(self._strategy, module)
        # _before_step() makes the gradients equal on all ranks before each step.
        contract = replace(contract, gradients_may_differ=False)
        if self._strategy.is_distributed:
            # All parameters are equal on all ranks. Training compares ``replicated`` between the
            # ranks, and a save compares ``replicas``.
            contract = replace(
                contract, replicated=contract.parameters, replicas=contract.parameters
            )
        return contract

    def average_gradients(self, param_groups: _ParamGroups) -> None:
        """Average the gradients of parameters in an ``nn.ParameterList`` or ``ParameterDict``.

        Called before gradients are clipped. Collective if the groups have parameters in lists.
        :meth:`_before_step` averages the gradients again. This changes nothing, because they are
        equal on all ranks by then. A gradient that is None on all ranks stays None.
        """
        parameters = self._parameters_to_average(param_groups)
        if parameters:
            self._average_gradients(parameters)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Average the gradients of an optimizer's parameters in lists before a step.

        A step pre-hook of all optimizers. Collective if the optimizer has parameters in lists.

        Raises:
            UsageError: the step has a closure.
        """
        parameters = self._parameters_to_average(optimizer.param_groups)
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

    def _parameters_to_average(self, param_groups: _ParamGroups) -> list[nn.Parameter]:
        """Return the parameters of the groups that are in lists. In one process, return none."""
        # This method runs before every step. Most jobs have no lists, and the loop below takes long
        # for thousands of parameters.
        if not self._parameters or not self._strategy.is_distributed:
            return []
        listed: list[nn.Parameter] = []
        for group in param_groups:
            for parameter in group["params"]:
                if parameter in self._parameters:
                    listed.append(parameter)
        return listed

    def _average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of parameters over the ranks, in one message. Collective.

        A gradient that is None on some ranks counts as zero there. A gradient that is None on all
        ranks stays None.

        Args:
            parameters: the parameters, at least one. They are the same on all ranks.
        """
        grads: list[torch.Tensor] = []
        has_grad: list[bool] = []
        for parameter in parameters:
            grad = parameter.grad
            has_grad.append(grad is not None)
            if grad is None:
                grad = torch.zeros_like(parameter)
            grads.append(grad)
        # For each parameter, 1 if this rank has a gradient, else 0. The flags have the dtype of the
        # first gradient, so that they travel in its message.
        flags = grads[0].new_tensor(has_grad)
        # The mean of a flag is the share of the ranks that have a gradient.
        *means, shares = self._strategy.all_reduce([*grads, flags], reduce_op="mean")
        for parameter, mean, share in zip(parameters, means, shares.tolist(), strict=True):
            some_rank_has_grad = share > 0
            parameter.grad = mean if some_rank_has_grad else None
