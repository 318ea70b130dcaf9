"""The hooks of a sharded module around its own forward pass."""

from collections.abc import Collection
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fabric._torch import reset_after_error
from fabric.errors import UsageError

__all__ = ["ShardedForward"]


class ShardedForward:
    """Leaves a sharded module ready for the next forward pass: after an error, and after one without gradients.

    Args:
        root: the user's module, sharded already.
        fsdp_modules: the parts that gather their parameters themselves.
        rank: rank of this process, for the error.

    Attributes:
        synchronizes: whether a backward pass reduces gradients; torch has a setter for it, but no getter.
    """

    def __init__(self, root: nn.Module, fsdp_modules: Collection[nn.Module], rank: int) -> None:
        self._depth, self._finished, self._usable = 0, True, True
        # Weak: after a forward pass torch's hooks on a part lead to the root, which is a weak key for this object.
        self.fsdp_modules = WeakSet(fsdp_modules)
        self.synchronizes, self._rank = True, rank
        self._handles = [
            root.register_forward_pre_hook(self._enter, prepend=True),
            root.register_forward_hook(self._finish),
            root.register_forward_hook(self._leave, always_call=True),
        ]

    def in_forward(self) -> bool:
        """Whether a forward pass of the module is running."""
        return self._depth > 0

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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
        # Another hook may have raised before _enter.
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
