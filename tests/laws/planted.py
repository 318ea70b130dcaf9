"""Collectives with a bug, as somebody might write it, for the laws to find."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric import Fabric
from fabric.tree import map_tensors


class Broken:
    """The collectives of a fabric, except the one that a subclass overrides."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)


class IgnoresTheReduction(Broken):
    """Reduces by the sum, whatever reduction is passed."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return self._fabric.all_reduce(data, group, "sum")


class IgnoresStrides(Broken):
    """Sends the memory of a tensor as if the tensor were contiguous, as gloo does."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        def without_strides(x: Tensor) -> Tensor:
            return x.as_strided(x.shape, torch.empty(x.shape).stride())

        return self._fabric.all_reduce(map_tensors(without_strides, data), group, reduce_op)


class TakesARowOfPadding(Broken):
    """Pads to the longest tensor, and leaves one row of padding."""

    def all_gather(
        self, data: Any, group: Any = None, *, ragged: bool = False, concat: bool = False
    ) -> Any:
        lengths = self._fabric.all_gather(len(data), group)
        missing = data.new_zeros(max(lengths) - len(data), *data.shape[1:])
        rows = self._fabric.all_gather(torch.cat([data, missing]), group)
        tensors = [row[: length + 1] for row, length in zip(rows, lengths, strict=True)]
        if concat:
            return torch.cat(tensors)
        return tensors


class WorksInPlace(Broken):
    """Reduces the caller's own tensor, as torch does."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        reduced = self._fabric.all_reduce(data, group, reduce_op)
        if isinstance(data, Tensor) and not data.requires_grad:
            return data.copy_(reduced)
        return reduced


class KeepsGradientsAtHome(Broken):
    """Returns the right values, with the gradient of the rank's own loss alone."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return data + (self._fabric.all_reduce(data.detach(), group, reduce_op) - data.detach())


class ReducesInTheWorld(Broken):
    """Reduces over all ranks, whatever group is passed."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return self._fabric.all_reduce(data, None, reduce_op)


class ReusesItsBuffer(Broken):
    """Returns the same tensor from every call, so that a call overwrites the previous result."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._buffers: dict[torch.Size, Tensor] = {}

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        reduced = self._fabric.all_reduce(data, group, reduce_op)
        buffer = self._buffers.setdefault(reduced.shape, torch.empty_like(reduced))
        return buffer.copy_(reduced)


class IgnoresAWeight(Broken):
    """Counts each micro-batch of the last rank as one term, whatever its weight."""

    def backward(self, loss: Tensor, weight: Any) -> None:
        is_last = self._fabric.global_rank == self._fabric.world_size - 1
        if is_last:
            weight = 0 * weight + 1
        self._fabric.backward(loss, weight=weight)


class DividesByTheWorldTwice(Broken):
    """Divides by the number of ranks, though the gradients are averaged over the ranks."""

    def backward(self, loss: Tensor, weight: Any) -> None:
        self._fabric.backward(loss / self._fabric.world_size, weight=weight)


class DividesTheTailByAFullWindow(Broken):
    """Divides the last window by the number of micro-batches of a full window."""

    def setup(self, module: nn.Module, optimizer: Optimizer) -> Any:
        self._number = 0
        self._configured = 0
        optimizer.register_step_pre_hook(self._scale)
        return self._fabric.setup(module, optimizer)

    def backward(self, loss: Tensor, weight: Any) -> None:
        self._number += 1
        self._fabric.backward(loss, weight=weight)

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        self._configured = max(self._configured, self._number)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(self._number / self._configured)
        self._number = 0
