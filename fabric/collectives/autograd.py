"""The collectives with their gradients.

[Note: Gradients] A gradient through a collective is that of the sum over ranks of each rank's local loss: the backward
of an all-reduce is the same all-reduce, that of an all-gather a reduce-scatter of the sum and the other way round, that
of an all-to-all an all-to-all, that of a broadcast the sum over ranks, which arrives at the source. They can be
differentiated again. Every rank has to go through the backward pass, as it went through the forward pass. A leaf that
required no gradient is returned without one, whatever it was sent with.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fabric.communicators import Collective, Communicator, Operation, Reduce

__all__ = ["run_differentiable"]


def run_differentiable(communicator: Communicator, collective: Collective) -> Tensor:
    """Make a call whose buffer requires a gradient, which is not written to; so does the result.

    Args:
        communicator: the ranks.
        collective: an all-reduce or reduce-scatter of the sum or mean, an all-gather, all-to-all or broadcast.
    """
    return _Differentiable.apply(communicator, collective, collective.buffer)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, collective: Collective, buffer: Tensor) -> Tensor:
        ctx.communicator, ctx.collective = communicator, collective
        # A contiguous copy: a gradient of autograd's own may be an expanded view, or be used elsewhere.
        own = buffer.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        return communicator.run(replace(collective, buffer=own))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        communicator: Communicator = ctx.communicator
        collective: Collective = ctx.collective
        operation, op = collective.operation, collective.reduce
        match operation:
            case Operation.ALL_GATHER:
                operation, op = Operation.REDUCE_SCATTER, Reduce.SUM
            case Operation.REDUCE_SCATTER:
                operation = Operation.ALL_GATHER
            case Operation.BROADCAST:
                operation, op = Operation.ALL_REDUCE, Reduce.SUM
        grad = _Differentiable.apply(communicator, Collective(operation, grads[0], op), grads[0])
        if collective.operation is Operation.REDUCE_SCATTER and op is Reduce.MEAN:
            grad = grad / communicator.size
        if collective.operation is Operation.BROADCAST and communicator.rank != collective.peer:
            # Zeros that are a part of the graph: all ranks take part in its backward pass.
            grad = grad.masked_fill(torch.ones((), dtype=torch.bool, device=grad.device), 0)
        return None, None, grad
