"""Collectives with a bug, each as somebody might write it, for the laws to find."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric import Fabric
from fabric.tree import map_tensors


class Broken:
    """The collectives of a fabric, but for what a subclass does wrong."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)


class IgnoresTheReduction(Broken):
    """Always the sum."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return self._fabric.all_reduce(data, group, "sum")


class IgnoresStrides(Broken):
    """Takes the memory of a tensor for its values, as gloo does."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        dense = map_tensors(lambda x: x.as_strided(x.shape, torch.empty(x.shape).stride()), data)
        return self._fabric.all_reduce(dense, group, reduce_op)


class TakesARowOfPadding(Broken):
    """Pads to the longest, and cuts one row too late."""

    def all_gather(
        self, data: Any, group: Any = None, *, ragged: bool = False, concat: bool = False
    ) -> Any:
        lengths = self._fabric.all_gather(len(data), group)
        missing = data.new_zeros(max(lengths) - len(data), *data.shape[1:])
        rows = self._fabric.all_gather(torch.cat([data, missing]), group)
        parts = [row[: length + 1] for row, length in zip(rows, lengths, strict=True)]
        return torch.cat(parts) if concat else parts


class WorksInPlace(Broken):
    """Reduces the caller's own tensor, as torch does."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        reduced = self._fabric.all_reduce(data, group, reduce_op)
        return (
            reduced if not isinstance(data, Tensor) or data.requires_grad else data.copy_(reduced)
        )


class KeepsGradientsAtHome(Broken):
    """The right values, with the gradient of the rank's own loss alone."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return data + (self._fabric.all_reduce(data.detach(), group, reduce_op) - data.detach())


class ReducesInTheWorld(Broken):
    """Forgets the group."""

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return self._fabric.all_reduce(data, None, reduce_op)


class ReusesItsBuffer(Broken):
    """Returns the same tensor from every call, so that each overwrites the result of the one before."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._buffers: dict[torch.Size, Tensor] = {}

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        reduced = self._fabric.all_reduce(data, group, reduce_op)
        return self._buffers.setdefault(reduced.shape, torch.empty_like(reduced)).copy_(reduced)


class IgnoresAWeight(Broken):
    """The last rank's micro-batches count as one term each."""

    def backward(self, loss: Tensor, weight: Any) -> None:
        is_last = self._fabric.global_rank == self._fabric.world_size - 1
        self._fabric.backward(loss, weight=0 * weight + 1 if is_last else weight)


class DividesByTheWorldTwice(Broken):
    """Takes the sum over the ranks for their mean."""

    def backward(self, loss: Tensor, weight: Any) -> None:
        self._fabric.backward(loss / self._fabric.world_size, weight=weight)


class DividesTheTailByAWholeWindow(Broken):
    """By the configured number of micro-batches, also where the last window has fewer."""

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
