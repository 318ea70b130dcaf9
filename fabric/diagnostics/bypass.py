"""Calls of parts of a prepared module that bypass its forward pass.

[Note: Bypass] A strategy wraps the forward pass of a module, and only what goes through the *wrapped forward* is
synchronized. A call of a submodule, of a method that calls one, or of the user's own module is a *bypass call*.

Under DDP a bypass call leaves each rank with its local gradients, silently. So its output gets a hook, and a
gradient that arrives there while no forward pass has prepared its synchronization is an error. A bypass call is fine
beside a wrapped forward, without gradients, and under ``no_backward_sync``.

The wrapped forward is watched as well: torch synchronizes in the first backward pass after a forward pass, so that the
gradients of a second one would stay local. A backward pass that never reaches the module, such as that of another
model, changes nothing. Whether one does is seen at a single parameter, since a hook on what each forward pass returns
costs ten times as much; such hooks are used only where parameters may go unused. A gradient without a wrapped forward
before it may be that of a penalty, the same on all ranks: it is an error only if the graph of the loss contains what
the wrapped forward computed in one of its last thousand passes. An older loss is unlikely: its graph is in memory with
what it saved, and torch itself refuses it once the optimizer has changed that.

Two kinds of parameters are not synchronized: those that were frozen when the module was set up under DDP and, under
every strategy, those that were registered on a part of the module since, for which torch has a hook. Once one of them
requires a gradient, that would stay local: the next forward pass with gradients is an error.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from fabric._torch import operations_behind, operations_recorded
from fabric.diagnostics.recorder import FlightRecorder, Hooks, hook_place
from fabric.errors import UsageError
from fabric.tree import flatten
from fabric.world import World

__all__ = ["BypassChecks", "BypassGuard", "GradientContract", "call_of_method", "callable_parts"]


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientContract:
    """How the gradients of one prepared module become those of all ranks. A strategy makes it once, in setup.

    Attributes:
        module: the user's module, without what ``torch.compile`` put around it.
        title: the class of that, for errors.
        parameters: its parameters by the user's names, also while a forward pass has replaced them.
        synchronizes: whether a backward pass, now, would synchronize gradients. Called in every step.
        needs_forward: whether gradients are synchronized only after a forward pass through the prepared module.
        expects_unused: whether it was said that some parameters may take no part in the loss; else gradients that need
            a forward pass are right only if every parameter gets one.
        gradients_differ: whether ranks step with different gradients, as of shards or of replicas that drift.
        replicated: the parameters, by the user's names, that are to be equal on all ranks after a step.
        scope: another text for each set of ranks that have different ``replicated`` parameters.
        unreduced: the parameters whose gradients were computed, and are not yet where a step sees them.
        is_sharded: whether the parameters are sharded over ranks.
        peers: those of the ranks that every forward pass needs.
        casts: whether the prepared module casts inputs and outputs, so that nothing else may.
        join: a context in which ranks may run these prepared modules for different numbers of batches; None if there is
            nothing to do. Raises a UsageError where the strategy cannot do it.
        explain: adds a note to an error of torch that says what to do about it.
        reshard: frees gathered parameters, so that the next forward pass gathers them anew from their shards.
    """

    module: nn.Module
    title: str
    parameters: Callable[[], Mapping[str, Tensor]]
    join: Callable[[Sequence[nn.Module], bool], AbstractContextManager[Any] | None]
    synchronizes: Callable[[], bool] = bool
    needs_forward: bool = False
    expects_unused: bool = False
    gradients_differ: bool = False
    replicated: Callable[[], Mapping[str, Tensor]] = dict
    scope: str = ""
    unreduced: Callable[[], Sequence[Tensor]] = list
    is_sharded: bool = False
    peers: Callable[[], Iterable[int]] = tuple
    casts: bool = False
    explain: Callable[[BaseException], object] = bool
    reshard: Callable[[], object] = bool

    def check_conversion(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise a UsageError if a method of modules would change the dtype in which gradients are synchronized."""
        probe, is_synchronized = nn.Module(), self.needs_forward or self.is_sharded
        for dtype in {each.dtype for each in self.parameters().values()} if is_synchronized else ():
            probe.values = nn.Buffer(torch.empty(0, dtype=dtype))
            if (converted := getattr(probe, method)(*args, **kwargs).values.dtype) is not dtype:
                problem = f"gradients are synchronized in {dtype}, and would then be {converted}"
                suggestion = f"model.{method}() before setup, or fabric.unwrap(model).{method}() after the last step"
                raise UsageError(f"model.{method}(...) after setup", problem, suggestion=suggestion)


class BypassChecks:
    """The checks of all modules that were set up.

    Args:
        world: place of this process.
        backward: what is called around backward passes.
        recorder: of this process, whose checks of phases are made around those of all ranks.

    Attributes:
        on_forward: what is called at the start of each forward pass that gradients need, or parameters, to be gathered.
        is_sharded: whether a module whose forward passes are noted is, and then its ``peers`` among the neighbors.
        structures: what each module was set up with, by the contracts of all.
    """

    def __init__(self, world: World, backward: Hooks, recorder: FlightRecorder | None = None) -> None:
        self.world, self._backward, self._recorder = world, backward, recorder
        if recorder is not None and recorder.phase_checks:
            backward.before.append(recorder.check_backward)
        self.on_forward: list[Callable[..., None]] = []
        self.is_sharded, self.peers = False, frozenset[int]()
        self.structures: WeakKeyDictionary[GradientContract, _Structure] = WeakKeyDictionary()
        torchs = nn.modules.module
        hooks = (torchs.register_module_module_registration_hook, torchs.register_module_parameter_registration_hook)
        # Without other ranks there is nothing to synchronize.
        self._handles = [hook(self._on_registration) for hook in hooks if world.world_size > 1]
        # No WeakSet: to go through one takes several calls, and it is done in every step.
        self._guards: list[ref[BypassGuard]] = []

    def watch(self, contract: GradientContract, prepared: nn.Module, forward: Hooks) -> "BypassGuard | None":
        """Watch a prepared module by hooks around its forward pass; the guard, where gradients need that pass."""
        self.structures[contract] = _Structure(contract, self, forward)
        guard = None
        if contract.needs_forward:
            if not self._guards:
                self._backward.after.append(self._after_backward)
            guard = BypassGuard(contract, prepared, self)
            self._guards = [ref(guard), *(each for each in self._guards if each() is not None)]
            forward.before.append(guard.before_forward)
            forward.after.append(guard.after_forward)
        if (recorder := self._recorder) is not None and recorder.phase_checks:
            check = partial(recorder.check_forward, contract.title, contract.is_sharded, contract.synchronizes)
            forward.before.append(check)
        return guard

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        for each in self._guards:
            if (guard := each()) is not None:
                guard.close()

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        for each in self._guards:
            if error is None and (guard := each()) is not None:
                guard.after_backward(loss)

    def _on_registration(self, owner: nn.Module, name: str, value: Any) -> None:
        # FSDP itself sets the parameters of modules that have a __setattr__ of their own.
        is_fsdps = type(owner).__setattr__ is not nn.Module.__setattr__
        for contract, structure in self.structures.items():
            # A set of parts: this is called for each part of every model that is built from now on.
            if owner not in structure.parts or value is None or (contract.is_sharded and is_fsdps):
                continue
            is_module = isinstance(value, nn.Module)
            structure.parts.update(value.modules() if is_module else ())
            structure.add(value.parameters() if is_module else [value])


class _Structure:
    """The parameters that a module was set up with, and those that were registered on its parts since.

    Args:
        contract: of the module; neither is kept alive.
        checks: what it is one of.
        forward: what is called around its forward pass.
    """

    def __init__(self, contract: GradientContract, checks: BypassChecks, forward: Hooks) -> None:
        # A list has no weak references, and this one has hooks that hold the contract.
        self._contract, self._checks, self._forward = ref(contract), checks, ref(forward)
        self.parts = WeakSet(contract.module.modules())
        parameters = {*contract.parameters().values()}
        self.synchronized = {each for each in parameters if each.requires_grad or not contract.needs_forward}
        self._others = set[Tensor]()
        self.follow()
        if checks.world.world_size > 1:
            self.add(parameters - self.synchronized)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Have the next forward passes look at parameters that are not synchronized with those of the module."""
        self._others.update(parameters)
        forward = self._forward()
        if self._others and forward is not None and self._check not in forward.before:
            forward.before.append(self._check)

    def follow(self) -> None:
        """Note the forward passes of a sharded module, if there is a function to call for them."""
        contract, forward = self._contract(), self._forward()
        checks = self._checks
        if contract is not None and forward is not None and contract.is_sharded and checks.on_forward:
            checks.is_sharded, checks.peers = True, frozenset(contract.peers()).intersection(checks.world.neighbours)
            forward.before.extend(partial(call, contract) for call in checks.on_forward)

    def _check(self) -> None:
        contract, late = self._contract(), {each for each in self._others if each.requires_grad}
        if contract is None or not late or not torch.is_grad_enabled():
            return
        late.difference_update(*(structure.synchronized for structure in self._checks.structures.values()))
        if names := ", ".join(name for name, each in contract.module.named_parameters() if each in late):
            raise UsageError(
                f"a forward pass of {contract.title} on rank {self._checks.world.rank}",
                f"frozen when it was set up, or absent, and their gradients would not be synchronized: {names}",
                "parameters that are to be trained at any time are there, and require a gradient, during setup()",
                'requires_grad_(False) only after setup(), with strategy="ddp_find_unused_parameters_true"; '
                "or model.adapter = fabric.setup_module(adapter)",
            )
        self._others -= late


class BypassGuard:
    """Watches one module whose gradients are synchronized only after a wrapped forward.

    Args:
        contract: how its gradients are synchronized.
        prepared: what the strategy made of it.
        checks: what it is one of.

    Attributes:
        prepares_sync: whether the latest wrapped forward prepares a synchronization.
    """

    def __init__(self, contract: GradientContract, prepared: nn.Module, checks: BypassChecks) -> None:
        self.contract, self._synchronizes = contract, contract.synchronizes
        self._rank, self._on_forward = checks.world.rank, checks.on_forward
        self._begin = 0
        self._trains = self.prepares_sync = False
        # Whether a forward pass has prepared a synchronization, and a backward pass has used it, or has found none.
        self._sync_prepared = self._sync_used = self._sync_missed = False
        # Of each forward pass: its first operation, the first one after it, and whether it was without synchronization.
        self._passes: deque[tuple[int, int, bool]] = deque(maxlen=1000)
        # Weak: the parameters are held by C++, out of sight of the garbage collector.
        own = ref(self)
        self._hook = unserializable_hook(lambda grad: None if (guard := own()) is None else guard._on_gradient())
        trained = [] if contract.expects_unused else [each for each in prepared.parameters() if each.requires_grad]
        self._handle = trained[0].register_hook(self._hook) if trained else None
        parts = [("model.module", contract.module), *callable_parts(contract.module, lambda part: True)]
        # Off within a forward pass, since a module without hooks is called faster.
        self._places = [hook_place(part.register_forward_hook(_PartHook(self, f"{path}(...)"))) for path, part in parts]

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass has prepared a synchronization that no backward pass has used yet."""
        return self._sync_prepared and not self._sync_used

    def before_forward(self) -> None:
        """Note that a wrapped forward begins."""
        self._trains = torch.is_grad_enabled()
        self.prepares_sync = self._trains and self._synchronizes()
        self._begin = operations_recorded()
        for hooks, number, _ in self._places:
            hooks.pop(number, None)
        for call in self._on_forward:
            call(self.contract, self)

    def after_forward(self, output: Any, error: BaseException | None) -> None:
        """Note that it is over."""
        for hooks, number, hook in self._places:
            hooks[number] = hook
        if error is None and self._trains:
            self._passes.append((self._begin, operations_recorded(), not self.prepares_sync))
            self._sync_prepared |= self.prepares_sync
            if self.contract.expects_unused:
                _watch(output, self._hook)

    def after_backward(self, loss: Tensor) -> None:
        """Note that a backward pass is over: if it reached this module, the next needs a forward pass of its own."""
        missed, self._sync_missed = self._sync_missed, False
        if self._sync_used:
            self._sync_prepared = self._sync_used = False
        elif missed:
            self._check_passes(loss)

    def watch_output(self, output: Any, call: str) -> None:
        """Note that ``output`` is of a call that may have bypassed the wrapped forward."""
        if torch.is_grad_enabled():
            _watch(output, partial(self._on_gradient_of_bypass, call_of_method(self.contract.module) or call))

    def wrap_method(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A user's method whose results are watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            self.watch_output(output, f"model.{name}(...)")
            return output

        watched.__name__ = name  # for mark_forward_method(model.name)
        return watched

    def close(self) -> None:
        """Remove the hooks."""
        for hooks, number, _ in self._places:
            hooks.pop(number, None)
        if self._handle is not None:
            self._handle.remove()

    def _on_gradient(self) -> None:
        synchronizes = self._synchronizes()
        if not self._sync_prepared:
            self._sync_missed = synchronizes
        elif synchronizes:
            self._sync_used = True
        else:
            raise UsageError(
                f"backward through {self.contract.title} inside of no_backward_sync on rank {self._rank}",
                "its forward pass was outside of it, and has prepared a synchronization that takes place all the same",
                "forward and backward in the same no_backward_sync",
                "with fabric.no_backward_sync(model): fabric.backward(loss_function(model(batch), target))",
            )

    def _on_gradient_of_bypass(self, call: str, grad: Tensor) -> None:
        if not self._sync_prepared and self._synchronizes():
            self._refuse_bypass(call)

    def _check_passes(self, loss: Tensor) -> None:
        # Sorted, since each thread counts operations of its own. The first is an empty pass before all operations.
        passes = [(0, 0, False), *sorted(self._passes)]
        for operation in operations_behind(loss):
            _, end, is_local = passes[bisect_left(passes, (operation + 1,)) - 1]
            if operation >= end:
                continue
            if is_local:
                self._refuse_bypass("model(...) inside no_backward_sync, with backward outside of it")
            raise UsageError(
                f"a second backward pass through {self.contract.title} on rank {self._rank}",
                "gradients are synchronized in the first backward pass after a forward pass; these would stay local",
                "one backward pass for each forward pass, of all its losses",
                "fabric.backward(loss_a + loss_b)",
            )

    def _refuse_bypass(self, call: str) -> NoReturn:
        raise UsageError(
            f"backward through {call} of {self.contract.title} on rank {self._rank}",
            "these gradients would not be synchronized: no forward pass through what setup() returned prepared it",
            "a forward pass model(...), or a method marked as one; forward and backward in the same no_backward_sync",
            'model.mark_forward_method("name_of_method") before the call, for a method that computes the loss',
        )


class _PartHook:
    """A forward hook of one part. A copy or a pickle of the module gets one that does nothing in its place."""

    def __init__(self, guard: BypassGuard | None = None, call: str = "") -> None:
        self._guard, self._call = guard, call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # Inside a compiled graph the call was a wrapped forward, or that of a compiled part of the user's own.
        if self._guard is not None and not torch.compiler.is_compiling():
            self._guard.watch_output(output, self._call)

    def __reduce__(self) -> "tuple[type[_PartHook], tuple[()]]":
        return _PartHook, ()


def call_of_method(module: nn.Module) -> str:
    """The outermost method of a module that is being called, as the user wrote it; empty if there is none.

    By the usual name of its first argument: nothing is done around calls, and this is asked for errors.
    """
    frames = [frame.f_code.co_name for frame, _ in walk_stack(None) if frame.f_locals.get("self") is module]
    return f"model.{frames[-1]}(...)" if frames and not frames[-1].startswith("_") else ""


def _watch(output: Any, on_gradient: Callable[[Tensor], None]) -> None:
    for leaf in flatten(output)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(on_gradient)


def callable_parts(
    module: nn.Module, is_last: Callable[[nn.Module], bool], path: str = "model"
) -> Iterator[tuple[str, nn.Module]]:
    """The parts below a module that have parameters and that one would call, but not those below one that is last."""
    for name, part in module.named_children():
        inner = f"{path}[{name}]" if name.isdigit() else f"{path}.{name}"
        is_container = isinstance(part, nn.ModuleList | nn.ModuleDict)
        if not is_container and any(True for _ in part.parameters()):
            yield inner, part
        if is_container or not is_last(part):
            yield from callable_parts(part, is_last, inner)
