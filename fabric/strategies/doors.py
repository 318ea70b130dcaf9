"""Parts of a sharded model that are called on their own.

[Note: Shards] The parameters of a sharded model are whole only while its own forward pass, or the backward pass after
it, is running. A part that is called by itself computes with shards, or makes itself a model of its own whose gradients
the rest knows nothing of. Such a call is an error when it is made, with or without gradients.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from fabric._torch import HookSwitch, in_backward, reset_after_error
from fabric.errors import UsageError

__all__ = ["Doors"]


class Doors:
    """Refuses calls of the parts of one sharded model outside of its forward and backward pass.

    Args:
        root: the user's module, sharded already.
        units: the parts that are units of their own; what is inside of them is not watched.
        rank: rank of this process, for the error.

    Attributes:
        hooks: those of the parts, which have nothing to say within a forward pass.
    """

    def __init__(self, root: nn.Module, units: Collection[nn.Module], rank: int) -> None:
        self._depth, self._finished, self._usable = 0, True, True
        self._rank = rank
        self._handles = [
            root.register_forward_pre_hook(self._enter, prepend=True),
            root.register_forward_hook(self._finish),
            root.register_forward_hook(self._leave, always_call=True),
        ]
        self.hooks = HookSwitch()
        for path, part in _parts(root, set(units)):
            # First, before the unit's own hook takes it for the root of a model.
            self.hooks.add(part.register_forward_pre_hook(self._door(path), prepend=True), first=True)

    def close(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.hooks.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._usable:
            raise UsageError(
                f"model(...) on rank {self._rank}",
                "an earlier forward pass was left by an error, and this release of torch cannot make the model forget "
                "that: gradients would be wrong",
                "forward passes that finish; any with a torch that has FSDPModule.reset_iter_state",
                "fabric.load(...) of the last checkpoint into a model that is set up anew, or a newer torch",
            )
        self._depth += 1
        self._finished = False

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        self._finished = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # An error in another hook may have come before _enter.
        self._depth = max(0, self._depth - 1)
        if self._depth or (self._finished and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        if not self._finished:
            self._usable, self._finished = reset_after_error(module), True
        else:
            # No backward pass will do it, and a change of whole parameters would be lost.
            from torch.distributed.fsdp import FSDPModule  # takes a second to import; here it has been

            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def _door(self, path: str) -> Any:
        def check(module: nn.Module, args: Any) -> None:
            # In the backward pass the user's own activation checkpointing calls parts again.
            if self._depth or torch.compiler.is_compiling() or in_backward():
                return
            raise UsageError(
                f"{path}(...) on rank {self._rank}",
                "its parameters are spread over the ranks, and are whole only within a forward pass of the whole model",
                "model(...), or a method of the model that is marked as a forward pass",
                'model.mark_forward_method("name_of_method") once, for a method that calls this part',
            )

        return check


def _parts(root: nn.Module, units: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The parts from the root down to the units, each once, with the path that one would write."""
    seen: set[nn.Module] = {root}
    inside: tuple[str, ...] = ()
    for path, part in root.named_modules(remove_duplicate=False):
        if path.startswith(inside):
            continue
        if part in units:
            inside += (f"{path}.",)
        if part not in seen:
            seen.add(part)
            yield re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"model.{path}"), part
