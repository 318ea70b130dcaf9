"""Gradients that would never be synchronised, because a forward pass took another door.

[Note: Doors] Under DDP the gradients of a backward pass are synchronised only if a forward pass went through the
prepared module before, with synchronisation on. Calling a submodule, a method that runs one, or the user's own module
leaves each rank with its local gradients, silently. The guard watches these doors: what comes out of one gets a hook,
and a gradient that arrives there while nothing prepared its synchronisation is an error. A direct call is fine
beside a forward pass through the front door, without gradients, and under ``no_backward_sync``.

The front door is watched as well: torch synchronises in the first backward pass after a forward pass, so that the
gradients of a second one would stay local. A backward pass that never reaches the module, such as that of another
model, uses nothing up. Whether one does is seen at a single parameter, since a hook on what each forward pass returns
costs ten times as much; only where parameters may go unused it takes these. A gradient of which nothing is known may be
that of a penalty, the same on all ranks: it is an error if the way to it leads through what the front door computed in
one of its last thousand passes. A loss older than these is hardly left: its graph is in memory with what it saved, and
torch itself refuses it once the optimizer has changed that.

A parameter that was frozen when the module was set up is no part of the synchronisation. Once it is to be trained, its
gradients would stay local: the next forward pass with gradients is an error.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from fabric._torch import HookSwitch, operations_behind, operations_recorded
from fabric.diagnostics.contract import GradientContract
from fabric.diagnostics.recorder import FlightRecorder
from fabric.errors import UsageError
from fabric.pace import Pace
from fabric.tree import map_tensors

__all__ = ["ForwardGuard"]


class ForwardGuard:
    """Watches one module that was set up with a strategy that synchronises in forward.

    Args:
        prepared: what the strategy made of the user's module; hooks go on that and on the submodules that one would
            call directly.
        contract: how its gradients are synchronized.
        rank: rank of this process, for the error.
        pace: told of each forward pass that prepares a synchronisation, where there are other ranks.
    """

    def __init__(self, prepared: nn.Module, contract: GradientContract, rank: int, pace: Pace | None) -> None:
        self._inside = False
        self._sync_prepared = False
        self._reached = False
        self.left_local = False
        """Whether the last backward pass left gradients of this rank alone, as one under ``no_backward_sync`` does."""
        self._frozen: list[tuple[str, Tensor]] = []
        self._pace = pace
        if pace is not None:
            self._frozen = [(name, each) for name, each in contract.parameters().items() if not each.requires_grad]
        self._module, self._contract, self._rank = contract.module, contract, rank
        self._syncs = contract.synchronizes
        self._by_output = contract.expects_unused
        self._suspects = False
        # Of each forward pass: its first operation, the first one after it, and whether it was without synchronisation.
        self._computed: deque[tuple[int, int, bool]] = deque(maxlen=1000)
        # Weak: the parameters are held by C++, out of sight of the garbage collector.
        own = ref(self)
        self._arrived = unserializable_hook(lambda grad: None if (guard := own()) is None else guard._on_gradient())
        trained = [] if self._by_output else [each for each in prepared.parameters() if each.requires_grad]
        self._on_parameter = trained[0].register_hook(self._arrived) if trained else None
        self._doors = HookSwitch()
        for path, child in _callable_parts(contract.module):
            self._doors.add(child.register_forward_hook(_DoorHook(self, f"{path}(...)")))

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass has prepared a synchronisation, and no backward pass has come for it yet."""
        return self._sync_prepared and not self._reached

    def front_door(self, forward: Callable[..., Any], record: FlightRecorder, phase: str) -> Callable[..., Any]:
        """``forward`` as the front door: watched, and noted in the record of this process as a phase."""
        syncs, doors = self._syncs, self._doors

        def run(*args: Any, **kwargs: Any) -> Any:
            # Notes are no part of a graph, and would break it.
            if torch.compiler.is_dynamo_compiling() or self._inside:
                return forward(*args, **kwargs)
            trains = torch.is_grad_enabled()
            prepares = trains and syncs()
            before = record.enter(phase)
            begin = operations_recorded()
            try:
                if trains and self._frozen:
                    self._check_frozen()
                if prepares and self._pace is not None:
                    self._pace.step()
                self._inside = True
                doors.off()
                output = forward(*args, **kwargs)
            except RuntimeError as error:
                self._contract.explain(error)
                record.annotate(error)
                raise
            finally:
                doors.on()
                self._inside = False
                record.phase = before
            if trains:
                self._computed.append((begin, operations_recorded(), not prepares))
                self._sync_prepared |= prepares
                if self._by_output:
                    _watch(output, self._arrived)
            return output

        return run

    def after_backward(self, loss: Tensor) -> None:
        """Note that a backward pass is over: if it came through here, the next one needs a forward pass of its own."""
        suspects, self._suspects = self._suspects, False
        if self._reached:
            self._sync_prepared = self._reached = False
        elif suspects:
            self._check_computed(loss)

    def through_door(self, output: Any, door: str) -> None:
        """Note that ``output`` came out of another door than the front one."""
        if not self._inside and torch.is_grad_enabled():
            _watch(output, partial(self._on_gradient_of_door, door))

    def wrap_method(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A user's method whose results are watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            self.through_door(output, f"model.{name}(...)")
            return output

        return watched

    def close(self) -> None:
        """Take the hooks off again."""
        self._doors.close()
        if self._on_parameter is not None:
            self._on_parameter.remove()

    def _on_gradient(self) -> None:
        syncs = self._syncs()
        if not self._sync_prepared:
            self._suspects, self.left_local = syncs, self.left_local or not syncs
        elif syncs:
            self._reached, self.left_local = True, False
        else:
            raise UsageError(
                f"backward through {type(self._module).__name__} inside of no_backward_sync on rank {self._rank}",
                "its forward pass was outside of it, and has prepared a synchronisation that takes place all the same",
                "forward and backward in the same no_backward_sync",
                "with fabric.no_backward_sync(model): fabric.backward(loss_function(model(batch), target))",
            )

    def _on_gradient_of_door(self, door: str, grad: Tensor) -> None:
        if self._sync_prepared:
            return
        if self._syncs():
            self._refuse_door(door)
        self.left_local = True

    def _check_computed(self, loss: Tensor) -> None:
        # Sorted, since each thread counts operations of its own. The first is an empty pass before all operations.
        passes, begin = [(0, 0, False), *sorted(self._computed)], itemgetter(0)
        for operation in operations_behind(loss):
            _, end, is_local = passes[bisect_right(passes, operation, key=begin) - 1]
            if operation < end:
                self._refuse_computed(is_local)

    def _refuse_computed(self, is_local: bool) -> NoReturn:
        if is_local:
            self._refuse_door("model(...) inside no_backward_sync, with backward outside of it")
        raise UsageError(
            f"a second backward pass through {type(self._module).__name__} on rank {self._rank}",
            "gradients are synchronised in the first backward pass after a forward pass; these would stay local",
            "forward and backward in turns, with all losses of a forward pass in one backward pass",
            "fabric.backward(loss_a + loss_b)",
        )

    def _refuse_door(self, door: str) -> NoReturn:
        raise UsageError(
            f"backward through {door} of {type(self._module).__name__} on rank {self._rank}",
            "these gradients would not be synchronised over the ranks: no forward pass through the module that setup() "
            "returned prepared it",
            "a forward pass model(...), or a method marked as one; forward and backward in the same no_backward_sync",
            'model.mark_forward_method("name_of_method") before the call, for a method that computes the loss',
        )

    def _check_frozen(self) -> None:
        names = [name for name, parameter in self._frozen if parameter.requires_grad]
        if not names:
            return
        raise UsageError(
            f"a forward pass of {type(self._module).__name__} on rank {self._rank}",
            f"these were frozen when it was set up, and their gradients would not be synchronised: {', '.join(names)}",
            "parameters that are to be trained at any time require a gradient during setup()",
            "model.requires_grad_(True) before fabric.setup(model), then parameter.requires_grad_(False) for some, "
            'with strategy="ddp_find_unused_parameters_true"',
        )


class _DoorHook:
    """A forward hook for one door. A copy or a pickle of the module gets a hook that does nothing in its place."""

    def __init__(self, guard: ForwardGuard, door: str) -> None:
        self._guard, self._door = guard, door

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # Inside a compiled graph the call came through the front door, or through a compiled part of the user's own.
        if not torch.compiler.is_compiling():
            self._guard.through_door(output, self._door)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


def _watch(output: Any, on_gradient: Callable[[Tensor], None]) -> None:
    if type(output) is Tensor:
        if output.requires_grad:
            output.register_hook(on_gradient)
        return

    def watch(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(on_gradient)
        return tensor

    map_tensors(watch, output)


def _callable_parts(module: nn.Module, path: str = "model.module") -> Iterator[tuple[str, nn.Module]]:
    """The module and its parts with parameters that one would call: children, and those in containers that are not."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        if any(True for _ in module.parameters()):
            yield path, module
        if path != "model.module":
            return
    for name, child in module.named_children():
        yield from _callable_parts(child, f"{path.removesuffix('.module')}.{name}")
