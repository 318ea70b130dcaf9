"""Forward passes of a sharded model, through the hooks of its root.

[Note: Sharded forward] Parameters are gathered only while a forward pass of the whole model, or the
backward pass after it, is running. A submodule that is called by itself computes with shards, or
becomes the root of a model of its own whose gradients the whole model knows nothing of. Such a call
is an error when it is made, with or without gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fabric._torch import (
    HookEntry,
    hook_entry,
    in_place_version,
    is_in_backward,
    unfinished_backward_check,
)
from fabric.diagnostics.bypass import call_of_method, callable_submodules
from fabric.errors import UsageError
from fabric.strategies.fsdp.state import UnshardedState, parameter_slots, take_shards

__all__ = ["ShardedForward"]


class ShardedForward:
    """The hooks of a sharded model. See ``[Note: Sharded forward]``.

    They refuse calls of submodules, and leave the model ready for the next forward pass after each
    one, even after one that raised.

    Args:
        root: the user's module, which is sharded already.
        fsdp_modules: the FSDP modules of the model, without the root.
        rank: the rank of this process, for errors.
        unsharded: the state of the model that is not sharded.
    """

    def __init__(
        self, root: Any, fsdp_modules: Sequence[nn.Module], rank: int, unsharded: UnshardedState
    ) -> None:
        self.root = root
        self.unsharded = unsharded
        self._rank = rank
        self._fsdp_modules: list[Any] = [*fsdp_modules, root]
        # The running forward passes of the root: a model may call itself.
        self._depth = 0
        self._is_finished = True
        self._backward_is_unfinished = unfinished_backward_check(root)
        # Like FSDP's own hooks, these are not part of a compiled graph.
        self._before_forward: Any = torch.compiler.disable(unsharded.before_forward)
        self._after_forward: Any = torch.compiler.disable(unsharded.after_forward)
        # Now, since a forward pass may leave gathered parameters in the slots of the shards.
        self._slots = list(parameter_slots(root))
        self._shards = [slot.parameter for slot in self._slots]
        self._sum_of_versions = 0
        self._take_shards_of_state_dicts()
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._finish)
        root.register_forward_hook(self._leave, always_call=True)
        self._submodule_hooks = self._register_submodule_hooks()

    def _take_shards_of_state_dicts(self) -> None:
        """Let every module of the model load state dicts with full tensors."""
        sharded: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for slot in self._slots:
            sharded.setdefault(slot.module, {})[slot.name] = slot.parameter
        for module, parameters in sharded.items():
            module.register_load_state_dict_pre_hook(partial(take_shards, parameters))

    def _register_submodule_hooks(self) -> list[HookEntry]:
        """Refuse calls of submodules.

        Returns:
            The hooks, which are taken off during a forward pass of the model to save time.
        """
        entries: list[HookEntry] = []
        for path, module in callable_submodules(self.root, self._fsdp_modules.__contains__):
            refuse = partial(self._refuse_submodule, path)
            # This hook runs before FSDP's own hook, which would take the submodule for the root of
            # a model.
            handle = module.register_forward_pre_hook(refuse, prepend=True)
            entries.append(hook_entry(handle))
        return entries

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Keep gradients unsharded, and do not reduce them, in backward passes in this context."""
        before = self.unsharded.synchronizes
        self.unsharded.synchronizes = False
        self.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.unsharded.synchronizes = before
            self.root.set_requires_gradient_sync(before)

    def reshard(self, wait: bool = False) -> None:
        """Free gathered parameters.

        Args:
            wait: also wait for copies of shards from the host.
        """
        for module in self._fsdp_modules:
            module.reshard()
        if wait:
            torch.accelerator.synchronize()

    def _refuse_submodule(self, path: str, module: nn.Module, args: Any) -> None:
        # In the backward pass the user's own activation checkpointing calls submodules again.
        if self._depth or is_in_backward():
            return
        call = call_of_method(self.root) or f"{path}(...)"
        raise UsageError(
            f"{call} on rank {self._rank}",
            problem="its parameters are sharded over the ranks, and are gathered only in a forward "
            "pass of the whole model",
            suggestion=(
                'model(...); or model.mark_forward_method("name") once, for a method that calls '
                "this part"
            ),
        )

    def _enter(self, root: nn.Module, args: Any) -> None:
        is_compiling = torch.compiler.is_dynamo_compiling()
        is_outermost = self._depth == 0
        if is_outermost and not is_compiling:
            if self._backward_is_unfinished() and not is_in_backward():
                self._forget_pass()
            sum_of_versions = sum(map(in_place_version, self._shards))
            if sum_of_versions != self._sum_of_versions:
                self._sum_of_versions = sum_of_versions
                self._free_outdated_parameters()
        if is_outermost and not self._is_finished:
            raise UsageError(
                f"model(...) on rank {self._rank} after a pass that raised",
                problem="this release of torch cannot make the model forget that pass: gradients "
                "would be wrong",
                suggestion=(
                    "fabric.load(...) into a model that is set up anew, or torch with "
                    "reset_iter_state"
                ),
            )
        self._depth += 1
        self._is_finished = False
        if is_outermost and not self.unsharded.is_empty:
            self._before_forward()
        if not is_compiling:
            for entry in self._submodule_hooks:
                entry.hooks.pop(entry.key, None)

    def _finish(self, root: nn.Module, args: Any, output: Any) -> None:
        # torch does not call this hook after an error.
        self._is_finished = True

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        # Another hook may have raised before _enter.
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        if not self.unsharded.is_empty:
            self._after_forward(output)
        if torch.compiler.is_dynamo_compiling():
            return
        for entry in self._submodule_hooks:
            entry.hooks[entry.key] = entry.hook
            entry.hooks.move_to_end(entry.key, last=False)
        if not self._is_finished:
            self._forget_pass()
        elif not torch.is_grad_enabled():
            # No backward pass will free the parameters, and changes of the full ones would be lost.
            self.reshard()

    def _free_outdated_parameters(self) -> None:
        """Free parameters that were gathered before the shards changed.

        A forward pass that no backward pass followed leaves them.
        """
        for slot in self._slots:
            if slot.parameters[slot.name] is not slot.parameter:
                self.reshard()
                return

    def _forget_pass(self) -> None:
        """Forget a pass that raised, where torch can."""
        can_forget = hasattr(self.root, "reset_iter_state")  # added after torch 2.11
        if can_forget:
            self.root.reset_iter_state()
        self._is_finished = can_forget
