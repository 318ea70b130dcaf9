"""Parameters without a forward pass: replicated under every strategy, their gradients averaged before each step."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.diagnostics.bypass import GradientContract
from fabric.strategies import Strategy

__all__ = ["BARE", "average_gradients", "replicate"]

BARE = nn.ParameterList | nn.ParameterDict


def average_gradients(strategy: Strategy, models: Iterable[Any], optimizer: Optimizer, *_: object) -> None:
    """Average the gradients of an optimizer's bare parameters over the ranks; a hook before its steps.

    Collective where there are any. Averages stay as they are, and a gradient that no rank has stays away.

    Args:
        strategy: of the job.
        models: all that are set up.
        optimizer: the one.
    """
    bare = {id(each) for model in models if isinstance(model.module, BARE) for each in model.parameters()}
    # Most often there are none, and an optimizer may have thousands.
    own = [each for group in optimizer.param_groups for each in group["params"] if id(each) in bare] if bare else []
    if not own or not strategy.is_distributed:
        return
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
    *means, shares = strategy.all_reduce([*grads, grads[0].new_tensor([each.grad is not None for each in own])])
    for parameter, mean, share in zip(own, means, shares.tolist(), strict=True):
        parameter.grad = mean if share else None


def replicate(strategy: Strategy, module: nn.Module) -> GradientContract:
    """Give all ranks rank 0's values of parameters without a forward pass; the contract of these. Collective."""
    for parameter in module.parameters():
        parameter.data.copy_(strategy.broadcast(parameter.data))
    contract = Strategy.gradient_contract(strategy, module)
    return replace(contract, replicated=contract.parameters if strategy.is_distributed else dict)
