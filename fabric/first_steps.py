"""Training that does not train, seen at the first steps of each optimizer.

[Note: First steps] Some mistakes cost nothing but the result: parameters that no set-up module has, gradients that
never arrive or are not reduced yet, replicas that drift apart. Hooks around an optimizer's first steps look for them
and go away. What has to agree over ranks, fingerprints of the replicas, goes through the store, never through a
collective: the rank that comes first leaves its own, each other compares with that, and leaves its own beside it if
they differ. Those that saw no difference look for one again after the next backward pass, by when all have been there.
So the store, which is in the memory of one node, holds two fingerprints at most, however many ranks there are.

Only what is certainly wrong is an error. A gradient that is missing is one where the strategy needs it; elsewhere it is
a warning, after the last of these steps.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric._torch import local_tensor, uncompiled
from fabric.errors import UsageError
from fabric.module import FabricModule
from fabric.runtime import Runtime

__all__ = ["FirstSteps", "fingerprint"]

STEPS = 2
_PATIENCE = 20
_OFF = "Fabric(check_training=False) if this is meant"
_CHUNK = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003
_RANK = 4  # bytes that hold a rank


@dataclass(frozen=True)
class _Posted:
    """Fingerprints of this rank that were those of the first to come; a later one may have others."""

    step: int
    names: tuple[str, ...]
    values: bytes


class FirstSteps:
    """Watches one optimizer until it has stepped :data:`STEPS` times; see ``[Note: First steps]``.

    Args:
        optimizer: what is watched; held weakly.
        number: tells the optimizers of a job apart; the same on all ranks.
        models: the modules that are set up when it is called.
        owns: whether a parameter belongs to a set-up module.
        runtime: the way to the other ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        models: Callable[[], Iterable[FabricModule]],
        owns: Callable[[Tensor], bool],
        runtime: Runtime,
    ) -> None:
        self._optimizer, self._kind, self._number = ref(optimizer), type(optimizer).__name__, number
        self._models, self._owns, self._runtime = models, owns, runtime
        self._seen = self._steps = self._backwards = self._without = 0
        self._arrived: set[int] = set()
        self._posted: list[_Posted] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to see."""
        # An optimizer that clears its gradients within the step never seems to have stepped.
        return self._steps >= STEPS or self._seen > _PATIENCE or self._optimizer() is None

    def after_backward(self) -> None:
        """Note where gradients have arrived, and look at what other ranks left after the step before."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._backwards += 1
        self._arrived.update(id(parameter) for parameter in _trained(optimizer) if parameter.grad is not None)
        self._look()

    def close(self) -> None:
        """Take the hooks off; never from within one of them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- before a step --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._seen += 1
        self._look()
        # A closure computes the gradients within the step.
        if self.finished or kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
            return
        trained = _trained(optimizer)
        self._check_reduced({id(parameter) for parameter in trained})
        with_gradient = {id(parameter) for parameter in trained if parameter.grad is not None}
        self._check_owned(optimizer, with_gradient)
        self._arrived |= with_gradient
        self._check_arrived({id(parameter) for parameter in trained})

    def _check_reduced(self, trained: set[int]) -> None:
        for model in self._models():
            waiting = {id(parameter) for parameter in model._fabric_contract.unreduced()} & trained
            if waiting:
                raise UsageError(
                    f"{self._kind}.step() on rank {self._runtime.world.rank}",
                    "the last backward pass did not reduce the gradients, so that the step would not see those of "
                    f"{_names(model, waiting)}",
                    "a step after a backward pass with synchronisation",
                    "with fabric.no_backward_sync(model, enabled=accumulating): around all micro-batches but the last",
                )

    def _check_owned(self, optimizer: Optimizer, with_gradient: set[int]) -> None:
        # In a single process nothing has to be synchronised.
        if not self._runtime.world.world_size > 1:
            return
        foreign = [
            f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) in with_gradient and not self._owns(parameter)
        ]
        if foreign:
            raise UsageError(
                f"{self._kind}.step() on rank {self._runtime.world.rank}",
                f"these belong to no module that is set up, and their gradients differ between ranks: {_some(foreign)}",
                "parameters of modules that went through setup()",
                f"fabric.setup(module) for the module that has them, be it the loss function; {_OFF}",
            )

    def _check_arrived(self, trained: set[int]) -> None:
        if not self._backwards:
            return
        for model in self._models():
            missing = self._missing(model, trained)
            if missing and model._fabric_contract.needs_all_gradients:
                raise UsageError(
                    f"{self._kind}.step() on rank {self._runtime.world.rank}",
                    f"no gradient has arrived at {_names(model, missing)}, and without these gradients the others "
                    "are not synchronised",
                    "every parameter that requires a gradient gets one in each backward pass",
                    'strategy="ddp_find_unused_parameters_true", or parameter.requires_grad_(False) before setup',
                )
        self._without = 0 if trained & self._arrived else self._without + 1
        if self._without >= STEPS and trained:
            raise UsageError(
                f"{self._kind}.step() on rank {self._runtime.world.rank}, for the second time",
                f"no gradient has arrived at any of its parameters in {self._backwards} backward pass(es)",
                "an optimizer of parameters that the loss is computed from",
                f"loss = loss_function(model(batch), target); fabric.backward(loss); {_OFF}",
            )

    def _missing(self, model: FabricModule, trained: set[int]) -> set[int]:
        """Parameters of a model that have had no gradient although others of it have."""
        own = {id(parameter) for parameter in uncompiled(model.module).parameters()} & trained
        return own - self._arrived if own & self._arrived else set()

    # -- after a step ---------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        trained = _trained(optimizer)
        # A step that is skipped after an overflow has no gradients either.
        if self.finished or all(parameter.grad is None for parameter in trained):
            return
        self._steps += 1
        own = {id(parameter) for parameter in trained}
        replicas = [
            (name, parameter)
            for model in self._models()
            for name, parameter in model._fabric_contract.replicated().items()
            if id(parameter) in own
        ]
        if replicas:
            names, tensors = zip(*replicas, strict=True)
            posted = _Posted(self._steps, names, fingerprint(tensors))
            self._compare(posted)
            self._posted.append(posted)
        if self.finished and self._backwards:
            self._warn_of_missing(own)

    def _look(self) -> None:
        waiting, self._posted = self._posted, []
        for posted in waiting:
            self._refuse_other(posted, self._runtime.store.get_nowait(self._key(posted, "other")))

    def _compare(self, posted: _Posted) -> None:
        own = self._runtime.world.rank.to_bytes(_RANK, "little") + posted.values
        first = self._runtime.store.set_if_absent(self._key(posted, "first"), own)
        if first[_RANK:] != posted.values:
            self._runtime.store.set(self._key(posted, "other"), own)
            self._refuse_other(posted, first)
        self._refuse_other(posted, self._runtime.store.get_nowait(self._key(posted, "other")))

    def _key(self, posted: _Posted, which: str) -> str:
        return f"first steps/{self._number}/{posted.step}/{which}"

    def _refuse_other(self, posted: _Posted, left: bytes | None) -> None:
        """Raise if another rank has left fingerprints that are not those of this one."""
        if left is None:
            return
        rank, other = self._runtime.world.rank, int.from_bytes(left[:_RANK], "little")
        pairs = zip(posted.names, _words(posted.values), _words(left[_RANK:]), strict=False)
        names = [name for name, mine, theirs in pairs if mine != theirs]
        raise UsageError(
            f"step {posted.step} of {self._kind} on rank {rank}",
            f"the replicas of ranks {min(rank, other)} and {max(rank, other)} differ after it: {_some(names)}",
            "the same gradients and the same step on all ranks" + self._cause(),
            f"forward and backward through model, and a step after a backward pass with synchronisation; {_OFF}",
        )

    def _cause(self) -> str:
        models = [model for model in self._models() if model._fabric_contract.replicated()]
        if any(model._fabric_guard is not None and model._fabric_guard.left_local for model in models):
            return "; the last backward pass was inside no_backward_sync, so that these gradients are this rank's own"
        return "; the same hyperparameters, closures, and changes of parameters outside of the optimizer"

    def _warn_of_missing(self, trained: set[int]) -> None:
        if self._runtime.world.rank > 0:
            return
        for model in self._models():
            missing = self._missing(model, trained)
            if missing and not model._fabric_contract.expects_unused:
                warnings.warn(
                    f"no gradient has arrived in the first {STEPS} steps of {self._kind} at {_names(model, missing)}: "
                    f"they are not trained; parameter.requires_grad_(False) for these, or {_OFF}",
                    stacklevel=4,
                )


def fingerprint(tensors: Iterable[Tensor]) -> bytes:
    """Eight bytes for each tensor, which depend on every bit of it and on its place.

    Waits for the device once.
    """
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


def _checksum(tensor: Tensor) -> Tensor:
    """Odd weights make every single bit count; integers wrap around, the same on every device."""
    flat = tensor.contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_CHUNK):
        weights = 2 * torch.arange(part.numel(), dtype=torch.int64, device=bits.device) + 1
        total = total * _PRIME + (part.to(torch.int64) * weights).sum()
    return total


def _words(values: bytes) -> list[bytes]:
    return [values[start : start + 8] for start in range(0, len(values), 8)]


def _trained(optimizer: Optimizer) -> list[Tensor]:
    groups = optimizer.param_groups
    # Of a sharded parameter a rank may hold nothing at all, and then has no gradient to show.
    return [p for group in groups for p in group["params"] if p.requires_grad and local_tensor(p).numel()]


def _names(model: FabricModule, wanted: set[int]) -> str:
    original = uncompiled(model.module)
    names = [name for name, parameter in original.named_parameters() if id(parameter) in wanted]
    return f"{_some(names)} of {type(original).__name__}" if names else f"parameters of {type(original).__name__}"


def _some(names: list[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
