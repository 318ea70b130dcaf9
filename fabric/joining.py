"""Training on while some ranks have run out of batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fabric.errors import UsageError
from fabric.module import FabricModule

__all__ = ["Turns"]


class Turns:
    """Sees to it that joined modules take their turns as the ranks without batches do in their stead.

    Those answer, module by module, the collectives of one forward pass and of the backward pass after it. Another order
    would make ranks answer collectives that nobody has asked for.

    Args:
        models: the joined modules, in order.
        rank: of this process.

    Attributes:
        rounds: how often the first of them has run.
    """

    def __init__(self, models: Sequence[FabricModule], rank: int) -> None:
        self.rounds = self._next = 0
        self._models, self._rank = models, rank
        self._handles = [
            model._fabric_prepared.register_forward_pre_hook(self._turn(index)) for index, model in enumerate(models)
        ]

    def close(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _turn(self, index: int) -> Any:
        def check(module: nn.Module, args: Any) -> None:
            previous = self._models[index - 1]
            guard = previous._fabric_guard
            if not torch.is_grad_enabled():
                self._refuse(index, "it is without gradients, and ranks that have no batches would wait for them")
            if guard is not None and guard.awaits_backward:
                self._refuse(index, f"the backward pass of {_kind(previous)} has not been there")
            if index != self._next:
                self._refuse(index, f"it is the turn of {_kind(self._models[self._next])}")
            self._next = (index + 1) % len(self._models)
            self.rounds += index == 0

        return check

    def _refuse(self, index: int, wrong: str) -> None:
        raise UsageError(
            f"a forward pass of {_kind(self._models[index])} inside of fabric.join on rank {self._rank}",
            wrong,
            "for each batch one forward and backward pass of each joined module, one after the other, in the order in "
            "which they were joined",
            "with fabric.join([first, second]): fabric.backward(loss(first(x))); fabric.backward(loss(second(x))); and "
            "model.module(x), or the end of the with block, for a pass without gradients",
        )


def _kind(model: FabricModule) -> str:
    return type(model.module).__name__
