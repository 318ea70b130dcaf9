"""Forward passes of a sharded model, through the hooks of its root.

[Note: Sharded forward] Parameters are gathered only while a forward pass of the whole model, or the
backward pass after it, is running. A submodule that is called by itself would compute with shards,
or FSDP2 would take it for the root of another model, and the whole model would not get its
gradients. So a call of a submodule raises an error at once, with or without gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from fabric._torch import (
    HookEntry,
    fsdp_parameter_records,
    hook_entry,
    in_place_version,
    is_in_backward,
    is_parameter_of_record,
    unfinished_backward_check,
)
from fabric.diagnostics.bypass import call_of_method, callable_submodules
from fabric.errors import UsageError
from fabric.strategies.fsdp.state import (
    ParameterSlot,
    UnshardedState,
    parameter_slots,
    take_shards,
)
from fabric.strategies.fsdp.unreduced import UnreducedGradients

__all__ = ["ShardedForward"]


class ShardedForward:
    """The hooks around each forward pass of a sharded model. See ``[Note: Sharded forward]``.

    The hooks refuse calls of submodules, and leave the model ready for the next forward pass after
    each forward pass, even after one that raised. The hooks of the root keep this object alive. A
    *slot* is a name under which a module holds a parameter. A *record* is FSDP2's own object of a
    sharded parameter.

    Args:
        root: the user's module, which is sharded already.
        fsdp_modules: the FSDP modules of the model, without the root.
        rank: the rank of this process, for errors.
        unsharded: the parameters and buffers of the model that are not sharded.
    """

    def __init__(
        self, root: Any, fsdp_modules: Sequence[nn.Module], rank: int, unsharded: UnshardedState
    ) -> None:
        """Register the hooks. Called once, after the model has been sharded."""
        self.root = root
        self.unsharded = unsharded
        self.unreduced = UnreducedGradients(
            root, synchronizes=partial(attrgetter("synchronizes"), unsharded)
        )
        self._rank = rank
        self._fsdp_modules: list[Any] = [*fsdp_modules, root]
        # The number of calls of the root that are running: a model may call itself.
        self._depth = 0
        # Whether the last forward pass did not raise. False while a forward pass is running.
        self._has_succeeded = True
        # Returns whether a backward pass of the model has begun and has not ended.
        self._backward_is_unfinished = unfinished_backward_check(root)
        # Like FSDP's own hooks, these are not part of a compiled graph.
        self._before_forward: Any = torch.compiler.disable(unsharded.before_forward)
        self._after_forward: Any = torch.compiler.disable(unsharded.after_forward)
        # Listed now, since a forward pass may leave gathered parameters in place of the shards.
        self._slots = list(parameter_slots(root))
        self._shards = [slot.parameter for slot in self._slots]
        self._records = {
            id(record.sharded_param): record for record in fsdp_parameter_records(root)
        }
        self._owners = [slot.parameters_of_module for slot in self._slots]
        self._names = [slot.name for slot in self._slots]
        # The sum of the in-place versions of the shards before the last forward pass.
        self._sum_of_versions = 0
        self._register_state_dict_hooks()
        # The first hook is prepended, so that the other pre-hooks of the root run within the
        # forward pass, and may call submodules.
        root.register_forward_pre_hook(self._begin_pass, prepend=True)
        root.register_forward_hook(self._note_success)
        root.register_forward_hook(self._end_pass, always_call=True)
        self._submodule_hooks = self._register_submodule_hooks()

    def _register_state_dict_hooks(self) -> None:
        """Let every module of the model load state dicts with full tensors."""
        shards_of_modules: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for slot in self._slots:
            shards_of_modules.setdefault(slot.module, {})[slot.name] = slot.parameter
        for module, shards in shards_of_modules.items():
            module.register_load_state_dict_pre_hook(partial(take_shards, shards))

    def _register_submodule_hooks(self) -> list[HookEntry]:
        """Register hooks that refuse calls of the submodules from outside of the model.

        Returns:
            The hooks. To save time, they are taken off their modules while a forward pass of the
            model is running.
        """
        entries: list[HookEntry] = []
        is_fsdp_module = self._fsdp_modules.__contains__
        # Yields the submodules that have parameters and can be called. The modules within an FSDP
        # module are left out, and get no hook of their own.
        for path, module in callable_submodules(self.root, is_fsdp_module):
            refuse = partial(self._refuse_submodule, path)
            # Prepended to run before FSDP's own hook, which would take the submodule for the root
            # of a model.
            handle = module.register_forward_pre_hook(refuse, prepend=True)
            entries.append(hook_entry(handle))
        return entries

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Do not reduce gradients in backward passes in this context.

        FSDP2 keeps the full gradients on this rank until a backward pass outside of the context.
        """
        synchronized_before = self.unsharded.synchronizes
        self.unreduced.watch()
        self.unsharded.synchronizes = False
        self.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.unsharded.synchronizes = synchronized_before
            self.root.set_requires_gradient_sync(synchronized_before)

    def reshard(self, wait: bool = False) -> None:
        """Free gathered parameters. Not a collective.

        Args:
            wait: also wait for the device, which may still copy shards from the host.
        """
        for module in self._fsdp_modules:
            module.reshard()
        if wait:
            torch.accelerator.synchronize()

    def _refuse_submodule(self, path: str, module: nn.Module, args: Any) -> None:
        """Raise a UsageError for a call of a submodule by itself. Its forward pre-hook.

        Args:
            path: the path of the submodule in the model.
            module: the submodule.
            args: the arguments of the call.
        """
        is_in_forward = self._depth > 0
        # In a backward pass, the user's own activation checkpointing calls submodules again.
        if is_in_forward or is_in_backward():
            return
        # If a public method of the user's model calls the submodule, the error names the method.
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

    def _begin_pass(self, root: nn.Module, args: Any) -> None:
        """Prepare the model for a forward pass. The first forward pre-hook of the root.

        torch calls :meth:`_end_pass` at the end of each forward pass, even of one that raised. In
        between, :meth:`_note_success` sets ``_has_succeeded`` if the forward pass did not raise.
        """
        # In a compiled model, Dynamo traces this hook, but not the steps that are skipped here.
        is_compiling = torch.compiler.is_dynamo_compiling()
        is_outermost = self._depth == 0
        if is_outermost and not is_compiling:
            # If a backward pass has not ended, it has raised an error. The exception is a backward
            # pass that is still running: its activation checkpointing calls the root.
            has_failed_backward = self._backward_is_unfinished() and not is_in_backward()
            if has_failed_backward:
                self.unreduced.reset_pass()
            # Optimizers and loading change shards in place, which raises their versions.
            sum_of_versions = sum(map(in_place_version, self._shards))
            if sum_of_versions != self._sum_of_versions:
                self._sum_of_versions = sum_of_versions
                self._free_outdated_parameters()
            # Without a Python function, since every forward pass compares all parameters.
            registered = map(dict.get, self._owners, self._names)
            if not all(map(is_, registered, self._shards)):
                self._refuse_substitutes()
        self._depth += 1
        self._has_succeeded = False
        if is_outermost and not self.unsharded.is_empty:
            self._before_forward()
        if not is_compiling:
            # The model may call its submodules now. _end_pass() puts the hooks back.
            for entry in self._submodule_hooks:
                entry.hooks.pop(entry.key, None)

    def _note_success(self, root: nn.Module, args: Any, output: Any) -> None:
        """Record that the forward pass did not raise. A forward hook of the root.

        torch does not call this hook after an error, whereas it always calls ``_end_pass``.
        """
        # The model may call itself. Only the end of the outermost call is the end of the pass.
        self._has_succeeded = self._depth == 1

    def _end_pass(self, root: nn.Module, args: Any, output: Any) -> None:
        """Leave the model as it was before the forward pass. A forward hook of the root.

        torch calls this hook after an error, too. Then ``output`` may be None.
        """
        # At least 0, since _begin_pass() was not called if another pre-hook raised first.
        self._depth = max(0, self._depth - 1)
        is_in_outer_call = self._depth > 0
        if is_in_outer_call:
            return
        if not self.unsharded.is_empty:
            self._after_forward(output)
        if torch.compiler.is_dynamo_compiling():
            return
        # Put back the hooks that refuse calls of submodules. They become the first hooks, since
        # they have to run before FSDP's own hooks.
        for entry in self._submodule_hooks:
            entry.hooks[entry.key] = entry.hook
            entry.hooks.move_to_end(entry.key, last=False)
        if not self._has_succeeded:
            self.unreduced.reset_pass()
        elif not torch.is_grad_enabled():
            # FSDP2 keeps the parameters of the root gathered for a backward pass, which does not
            # follow here. The user must find the shards: a change of gathered parameters would be
            # lost.
            self.reshard()

    def _refuse_substitutes(self) -> None:
        """Raise a UsageError if modules hold other tensors than the sharded parameters.

        FSDP2 would compute with the sharded parameters, or would take the tensors for shards.
        """
        replaced: list[ParameterSlot] = []
        for slot in self._slots:
            registered = slot.parameters_of_module.get(slot.name)
            if registered is slot.parameter:
                continue
            record = self._records.get(id(slot.parameter))
            # Parameters without a record are replicated, and may be replaced.
            if record is not None and not is_parameter_of_record(registered, record):
                replaced.append(slot)
        if replaced:
            # The names cost time, and are collected only for the error.
            paths = {module: path for path, module in self.root.named_modules()}
            names: list[str] = []
            for slot in replaced:
                path = paths.get(slot.module, "")
                names.append(f"{path}.{slot.name}".removeprefix("."))
            raise UsageError(
                f"model(...) on rank {self._rank}",
                problem="other tensors stand in for sharded parameters, as in "
                f"torch.func.functional_call, and FSDP would not use them: {', '.join(names)}",
                expected="the parameters that setup() has sharded",
                suggestion='strategy="ddp"; or functional_call(copy, '
                "fabric.broadcast(fabric.get_state_dict(model)), ...), where copy is a "
                "copy.deepcopy of the module from before setup",
            )

    def _free_outdated_parameters(self) -> None:
        """Free gathered parameters if there are any. Called after the shards have changed.

        A forward pass that is not followed by a backward pass leaves gathered parameters in place.
        The next forward pass would use their values, which are those of the shards before the
        change.
        """
        for slot in self._slots:
            shard = slot.parameter
            is_gathered = slot.parameters_of_module[slot.name] is not shard
            if is_gathered:
                self.reshard()
                return
