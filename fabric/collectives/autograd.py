"""The collectives on buffers with their gradients.

[Note: Gradients] A gradient through a collective is that of the sum over ranks of each rank's local loss: the backward
of an all-reduce is the same all-reduce, that of an all-gather a reduce-scatter of the sum and the other way round, that
of an all-to-all an all-to-all, that of a broadcast the sum over ranks, which arrives at the source. They can be
differentiated again. Every rank has to go through the backward pass, as it went through the forward pass. A leaf that
required no gradient comes back without one, whatever it travelled with.

None of these functions writes into a buffer that requires a gradient; one that does not is the communicator's to use.
"""

from typing import Any

import torch
from torch import Tensor

from fabric.communicators import Communicator, Reduce

__all__ = ["all_gathered", "all_reduced", "broadcast_from", "exchanged", "reduce_scattered"]


def all_reduced(communicator: Communicator, op: Reduce, buffer: Tensor) -> Tensor:
    """Of any shape; the sum and the mean are differentiable."""
    return _AllReduce.apply(communicator, op, buffer) if _tracked(buffer) else communicator.all_reduce(buffer, op)


def all_gathered(communicator: Communicator, buffer: Tensor) -> Tensor:
    """Of shape ``s`` into ``(size, *s)``."""
    return _AllGather.apply(communicator, buffer) if _tracked(buffer) else communicator.all_gather(buffer)


def reduce_scattered(communicator: Communicator, op: Reduce, rows: Tensor) -> Tensor:
    """Of shape ``(size, *s)`` into this rank's row; the sum and the mean are differentiable."""
    return _ReduceScatter.apply(communicator, op, rows) if _tracked(rows) else communicator.reduce_scatter(rows, op)


def exchanged(communicator: Communicator, rows: Tensor) -> Tensor:
    """Of shape ``(size, *s)``: row i to rank i."""
    return _AllToAll.apply(communicator, rows) if _tracked(rows) else communicator.all_to_all(rows)


def broadcast_from(communicator: Communicator, src: int, buffer: Tensor) -> Tensor:
    """That of rank ``src``; ranks have to agree about ``requires_grad``."""
    return _Broadcast.apply(communicator, src, buffer) if _tracked(buffer) else communicator.broadcast(buffer, src)


def _tracked(buffer: Tensor) -> bool:
    return buffer.requires_grad and torch.is_grad_enabled()


def _fresh(tensor: Tensor) -> Tensor:
    """A contiguous copy: a gradient of autograd's own may be an expanded view, or be used elsewhere."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, op: Reduce, buffer: Tensor) -> Tensor:
        ctx.communicator, ctx.op = communicator, op
        return communicator.all_reduce(_fresh(buffer), op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _AllReduce.apply(ctx.communicator, ctx.op, grads[0])


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, buffer: Tensor) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_gather(_fresh(buffer))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _ReduceScatter.apply(ctx.communicator, Reduce.SUM, grads[0])


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, op: Reduce, rows: Tensor) -> Tensor:
        ctx.communicator, ctx.op = communicator, op
        return communicator.reduce_scatter(_fresh(rows), op)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        rows = _AllGather.apply(ctx.communicator, grads[0])
        return None, None, rows / ctx.communicator.size if ctx.op is Reduce.MEAN else rows


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, rows: Tensor) -> Tensor:
        ctx.communicator = communicator
        return communicator.all_to_all(_fresh(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _AllToAll.apply(ctx.communicator, grads[0])


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, src: int, buffer: Tensor) -> Tensor:
        ctx.communicator, ctx.src = communicator, src
        return communicator.broadcast(_fresh(buffer), src)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _SumTo.apply(ctx.communicator, ctx.src, grads[0])


class _SumTo(torch.autograd.Function):
    """The sum over ranks, on one of them; zeros on the others."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, dst: int, buffer: Tensor) -> Tensor:
        ctx.communicator, ctx.dst = communicator, dst
        total = communicator.all_reduce(_fresh(buffer), Reduce.SUM)
        return total if communicator.rank == dst else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _Broadcast.apply(ctx.communicator, ctx.dst, grads[0])
