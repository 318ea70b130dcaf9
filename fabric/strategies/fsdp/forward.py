"""Forward passes of a sharded model, through the hooks of its root."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from fabric._torch import (
    HookEntry,
    hook_entry,
    is_fsdp_module,
    is_in_backward,
    unfinished_backward_check,
)
from fabric.diagnostics.bypass import callable_submodules, running_method_text
from fabric.errors import UsageError
from fabric.strategies.fsdp.lent_gradients import LentGradients
from fabric.strategies.fsdp.parameters import ShardedParameters
from fabric.strategies.fsdp.state import UnshardedState
from fabric.strategies.fsdp.unreduced import UnreducedGradients

__all__ = ["ShardedForward"]

# The order of modules is hashed as a polynomial in this number, modulo a prime below 2**61.
_ORDER_BASE = 1_000_003
_ORDER_MODULUS = 2**61 - 1


# [Note: Sharded forward]
# Parameters are gathered only while a forward pass of the whole model, or the backward pass after
# it, is running. A submodule that is called by itself would compute with shards, or FSDP2 would
# take it for the root of another model, and the whole model would not get its gradients. So a call
# of a submodule raises an error at once, with or without gradients. So does a call with other
# tensors in place of sharded parameters, as by `functional_call`: FSDP2 would put the gathered
# parameters in place of these tensors.
class ShardedForward:
    """The hooks around each forward pass of a sharded model.

    The hooks refuse calls of submodules from outside of the model. After each forward pass, even
    after one that raised, they leave the model ready for the next one. The hooks of the root keep
    this object alive.

    Args:
        root: the user's module, which is sharded already.
        fsdp_modules: the FSDP modules of the model, without the root. If parameters are not
            sharded, the modules that would be FSDP modules.
        rank: the rank of this process, for errors.
        unsharded: the parameters and buffers of the model that are not sharded.

    Attributes:
        root: the user's module.
        unsharded: the parameters and buffers of the model that are not sharded.
        synchronizes: returns whether a backward pass would reduce gradients now. It runs in C,
            since every step calls it.
        lent_gradients: the gradients that shards have lent to gathered parameters.
        unreduced: the gradients that backward passes without synchronization have left.
    """

    def __init__(
        self, root: Any, fsdp_modules: Sequence[nn.Module], rank: int, unsharded: UnshardedState
    ) -> None:
        """Register the hooks. Called once, after the model has been sharded."""
        self.root = root
        self.unsharded = unsharded
        # Reads unsharded.synchronizes in C.
        self.synchronizes: Callable[[], bool] = partial(attrgetter("synchronizes"), unsharded)
        self.lent_gradients = LentGradients(root)
        self.unreduced = UnreducedGradients(root, self.synchronizes, self.lent_gradients)
        self._rank = rank
        # What module_order() and stepped_gradients() return as text, so that checks can compare it
        # between ranks: which FSDP modules were used so far, in which order, and which parameters
        # had a gradient in the steps so far.
        self._order_digest = 0
        self._gradients_digest = 0
        # Whether a forward pass was compiled. The order of modules is then unknown.
        self._is_compiled = False
        # Empty if the model is not sharded, as under tensor parallelism alone.
        self._fsdp_modules: list[Any] = list(filter(is_fsdp_module, [*fsdp_modules, root]))
        # The number of calls of the root that are running: a model may call itself.
        self._num_running_calls = 0
        # Whether the last forward pass has returned without an error. False while it is running.
        self._last_pass_succeeded = True
        # Returns whether a backward pass of the model has begun and has not ended.
        self._backward_is_unfinished = unfinished_backward_check(root)
        # torch.compile must not put these three methods into a graph.
        self._lend_gradients_uncompiled: Any = torch.compiler.disable(self.lent_gradients.lend)
        self._unsharded_before_forward: Any = torch.compiler.disable(unsharded.before_forward)
        self._unsharded_after_forward: Any = torch.compiler.disable(unsharded.after_forward)
        # The ids of all parameters of the model, which are shards and replicated DTensors now.
        self._parameter_ids = set(map(id, root.parameters()))
        self._sharded_parameters = ShardedParameters(root, rank)
        self._sharded_parameters.register_load_hooks()
        # Prepended, so that the other pre-hooks of the root run after _begin_pass(), and so may
        # call submodules.
        root.register_forward_pre_hook(self._begin_pass, prepend=True)
        # torch calls forward hooks in this order. _end_pass() reads what _note_success() records.
        root.register_forward_hook(self._note_success)
        root.register_forward_hook(self._end_pass, always_call=True)
        self._submodule_hooks = self._register_submodule_hooks(fsdp_modules)
        self._register_parameter_checks()

    def _register_parameter_checks(self) -> None:
        """Register hooks that refuse other tensors in place of the parameters of FSDP modules.

        The hooks run before FSDP's own hooks, which would overwrite the other tensors by the
        gathered parameters. The root needs no hook: :meth:`_begin_pass` checks it. The hooks also
        record the order in which modules are used, by their numbers in the model.
        """
        for number, (path, module) in enumerate(self.root.named_modules(), 1):
            if is_fsdp_module(module) and module is not self.root:
                parameters = ShardedParameters(module, self._rank, path)
                check = partial(self._check_registered, number, parameters)
                module.register_forward_pre_hook(check, prepend=True)

    def _register_submodule_hooks(self, fsdp_modules: Sequence[nn.Module]) -> list[HookEntry]:
        """Register hooks that refuse calls of the submodules from outside of the model.

        Args:
            fsdp_modules: the FSDP modules. Modules within an FSDP module get no hook.

        Returns:
            The hooks. To save time, they are taken off their modules while a forward pass of the
            model is running.
        """
        entries: list[HookEntry] = []
        is_leaf = set(fsdp_modules).__contains__
        # Yields the submodules that have parameters and can be called, down to the leaves.
        for path, module in callable_submodules(self.root, is_leaf):
            refuse = partial(self._refuse_submodule, path)
            # Prepended, since FSDP's own hook would take the submodule for the root of a model.
            handle = module.register_forward_pre_hook(refuse, prepend=True)
            entries.append(hook_entry(handle))
        return entries

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Do not reduce gradients in backward passes in this context.

        FSDP2 keeps the full gradients on this rank, and reduces them in the next backward pass
        outside of the context.
        """
        synchronized_before = self.unsharded.synchronizes
        self.unreduced.watch()
        self.unsharded.synchronizes = False
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self.unsharded.synchronizes = synchronized_before
            self._set_gradient_sync(synchronized_before)

    def _set_gradient_sync(self, synchronizes: bool) -> None:
        """Choose whether the FSDP modules reduce gradients in the next backward pass."""
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(synchronizes, recurse=False)

    def reshard(self, wait: bool = False) -> None:
        """Free gathered parameters. Not a collective.

        Args:
            wait: also wait for the device, which may still copy shards from the host.
        """
        self.lent_gradients.take_back()
        for module in self._fsdp_modules:
            module.reshard()
        if wait:
            torch.accelerator.synchronize()

    def unreduced_parameters(self) -> list[nn.Parameter]:
        """Return the sharded and the replicated parameters with gradients not reduced yet."""
        return [*self.unreduced.parameters(), *self.unsharded.unreduced_parameters()]

    def module_order(self) -> str:
        """Return a digest of the order in which forward passes have used the FSDP modules so far.

        FSDP2 matches the collectives of ranks by their order alone. If ranks use different modules
        of equal shapes, their parameters are mixed up without an error. The text is empty for a
        compiled model, whose passes run without hooks.
        """
        if self._is_compiled:
            return ""
        return f"{self._order_digest:016x}"

    @staticmethod
    def before_step(
        find_forward: Callable[[], "ShardedForward | None"], optimizer: Optimizer, *_: object
    ) -> None:
        """Take back lent gradients, and record which parameters have a gradient. A step pre-hook.

        The record is a running digest, which :meth:`stepped_gradients` returns. The training checks
        compare it between ranks. A static method, so that a hook with a weak reference as
        ``find_forward`` does not keep the model alive.

        Args:
            find_forward: returns the ShardedForward of a model. None if the model is gone.
            optimizer: the optimizer.
            *_: other arguments of the hook, which are not used.
        """
        forward = find_forward()
        if forward is None:
            return
        forward.lent_gradients.take_back()
        has_gradient: list[bool] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in forward._parameter_ids:
                    has_gradient.append(parameter.grad is not None)
        forward._gradients_digest = crc32(bytes(has_gradient), forward._gradients_digest)

    def stepped_gradients(self) -> str:
        """Return a digest of which parameters have had a gradient in each step so far.

        FSDP2 reduces the gradients of a module in one message without their names. If ranks use
        different parameters, their gradients are mixed up without an error.
        """
        return f"{self._gradients_digest:08x}"

    def _refuse_submodule(self, path: str, module: nn.Module, args: Any) -> None:
        """Raise a UsageError if a submodule is called from outside of the model.

        This is a forward pre-hook of the submodule.

        Args:
            path: the path of the submodule in the model.
            module: the submodule.
            args: the arguments of the call.
        """
        is_in_forward = self._num_running_calls > 0
        # In a backward pass, the user's own activation checkpointing calls submodules again.
        if is_in_forward or is_in_backward():
            return
        # For example "model.encode(...)", if this method of the model is running and has called the
        # submodule. Empty if no public method of the model is running.
        call = running_method_text(self.root)
        if call == "":
            call = f"{path}(...)"
        raise UsageError(
            f"{call} on rank {self._rank}",
            problem="its parameters are sharded over the ranks, and are gathered only in a forward "
            "pass of the whole model",
            suggestion=(
                'model(...); or model.mark_forward_method("name") once, for a method that calls '
                "this part"
            ),
        )

    def _check_registered(
        self, number: int, parameters: ShardedParameters, module: nn.Module, args: Any
    ) -> None:
        """Raise a UsageError if other tensors stand in for the parameters of an FSDP module.

        This is a forward pre-hook of the FSDP module. It also records the use of the module.
        """
        # Dynamo traces hooks. The check must not become part of the compiled graph.
        if torch.compiler.is_dynamo_compiling():
            self._is_compiled = True
            return
        self._order_digest = (self._order_digest * _ORDER_BASE + number) % _ORDER_MODULUS
        parameters.check_registered()

    def _begin_pass(self, root: nn.Module, args: Any) -> None:
        """Prepare the model for a forward pass. The first forward pre-hook of the root.

        At the end of the forward pass, torch calls :meth:`_note_success`, but only if the pass did
        not raise, and then :meth:`_end_pass` in any case.
        """
        # Dynamo traces this hook in a compiled model. The skipped steps must not become part of
        # the graph.
        is_compiling = torch.compiler.is_dynamo_compiling()
        # The model may call itself.
        is_outermost = self._num_running_calls == 0
        if is_compiling:
            self._is_compiled = True
        if is_outermost and not is_compiling:
            self._reset_failed_backward()
            self._reshard_outdated()
            self._sharded_parameters.check_registered()
        self._num_running_calls += 1
        self._last_pass_succeeded = False
        if is_outermost and not self.unsharded.is_empty:
            self._unsharded_before_forward()
        if not is_compiling:
            # The model may call its submodules now. _end_pass() puts the hooks back.
            for entry in self._submodule_hooks:
                entry.hooks.pop(entry.key, None)

    def _reset_failed_backward(self) -> None:
        """Clear FSDP2's state of a backward pass that raised. Called before a forward pass.

        A backward pass that has begun and not ended has raised, unless it is running now: then
        activation checkpointing makes the forward pass within it.
        """
        if self._backward_is_unfinished() and not is_in_backward():
            self.unreduced.reset_pass()

    def _reshard_outdated(self) -> None:
        """Free gathered parameters whose shards have changed. Called before a forward pass.

        A forward pass without a backward pass leaves parameters gathered. If an optimizer or a load
        changes the shards after it, the next forward pass has to gather them again.
        """
        # have_changed() comes first because it is faster.
        if self._sharded_parameters.have_changed() and self._sharded_parameters.are_gathered():
            self.reshard()

    def _note_success(self, root: nn.Module, args: Any, output: Any) -> None:
        """Record that the forward pass did not raise. A forward hook of the root.

        torch calls this hook before :meth:`_end_pass`, and only if the call did not raise.
        """
        # The model may call itself. The pass has succeeded when the outermost call returns.
        self._last_pass_succeeded = self._num_running_calls == 1

    def _end_pass(self, root: nn.Module, args: Any, output: Any) -> None:
        """Leave the model ready for the next forward pass. A forward hook of the root.

        Undoes what :meth:`_begin_pass` has done. torch calls this hook after an error, too. Then
        ``output`` may be None, and :meth:`_note_success` was not called before.
        """
        # At least 0, since _begin_pass() was not called if another pre-hook raised first.
        self._num_running_calls = max(0, self._num_running_calls - 1)
        is_in_outer_call = self._num_running_calls > 0
        if is_in_outer_call:
            return
        if not self.unsharded.is_empty:
            self._unsharded_after_forward(output)
        if torch.compiler.is_dynamo_compiling():
            # Without FSDP modules and replicated parameters, modules hold no other tensors in place
            # of their parameters, and there is nothing to lend. The call would break the graph.
            if self._fsdp_modules or not self.unsharded.is_empty:
                self._lend_gradients_uncompiled(output)
            # The steps below undo or check what _begin_pass() skips in a compiled model.
            return
        # Put back the hooks that refuse calls of submodules. They become the first hooks, since
        # they have to run before FSDP's own hooks.
        for entry in self._submodule_hooks:
            entry.hooks[entry.key] = entry.hook
            entry.hooks.move_to_end(entry.key, last=False)
        if not self._last_pass_succeeded:
            # In a backward pass, torch.utils.checkpoint ends its forward pass by an exception once
            # it has recomputed what it needs. The backward pass goes on with the gathered
            # parameters, so FSDP2's state of the pass must stay.
            if not is_in_backward():
                self.unreduced.reset_pass()  # clears FSDP2's state
            return
        self._sharded_parameters.check_gathered_unchanged()
        if not torch.is_grad_enabled():
            # FSDP2 keeps the parameters of the root gathered for a backward pass. No backward pass
            # follows here, and a change of the gathered parameters by the user would be lost.
            self.reshard()
        self.lent_gradients.lend(output)
