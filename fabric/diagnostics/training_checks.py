"""Checks of the first steps of each optimizer, for training that does not train, and of the order in ``Fabric.join``.

[Note: Training checks] Some mistakes cost nothing but the result: parameters that no set-up module has, gradients that
never arrive or are not reduced yet, replicas that drift apart. Hooks around an optimizer's first steps look for them
and go away. Fingerprints of the replicas are compared through the store, never through a collective: the first rank
writes its own, each other compares with that, and writes its own beside it if they differ. Those that saw no difference
look for one again after the next backward pass, which needs every rank. So the store, which is in the memory of one
node, holds two fingerprints at most, however many ranks there are.

Only what is certainly wrong is an error. A gradient that is missing is one where the strategy needs it; elsewhere it is
a warning, after the last of these steps.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._torch import local_tensor
from fabric.diagnostics.bypass import BypassGuard, GradientContract
from fabric.diagnostics.recorder import Hooks
from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["CheckContext", "JoinOrderCheck", "TrainingChecks", "fingerprint"]

_STEPS = 2
_MOST_STEPS = 20  # of an optimizer that never seems to have stepped, since it clears its gradients within the step
_OFF = "Fabric(check_training=False) if this is meant"
_CHUNK = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003
_RANK = 4  # bytes that hold a rank


@dataclass(frozen=True)
class CheckContext:
    """What the checks of a process read.

    Attributes:
        contracts: those of the modules that are set up.
        left_local: whether the last backward pass left gradients of this rank alone.
        store: where ranks leave fingerprints for each other.
    """

    contracts: Callable[[], Sequence[GradientContract]]
    left_local: Callable[[], bool]
    store: JobStore


class TrainingChecks:
    """The checks of all optimizers, until each has stepped twice; see ``[Note: Training checks]``.

    Args:
        context: what they read.
        changed: called when there is something to watch again, or nothing any more.
    """

    def __init__(self, context: CheckContext, changed: Callable[[], None]) -> None:
        self._context, self._changed = context, changed
        self._watched: list[_OptimizerChecks] = []
        self._made = 0

    @property
    def hooks(self) -> Hooks:
        """The layer around backward passes; empty when no optimizer is watched."""
        return Hooks(after_backward=self._after_backward) if self._watched else Hooks()

    def watch(self, optimizer: Optimizer) -> None:
        """Watch an optimizer from its next step on."""
        self._watched.append(_OptimizerChecks(optimizer, self._made, self._context))
        self._made += 1
        self._changed()

    def close(self) -> None:
        """Watch no optimizer any more; never from within a hook of one."""
        for checks in self._watched:
            checks.close()
        self._watched = []
        self._changed()

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        if error is not None:
            return
        for checks in self._watched:
            checks.after_backward()
        finished = [checks for checks in self._watched if checks.is_finished]
        for checks in finished:
            checks.close()
            self._watched.remove(checks)
        if finished:
            self._changed()


@dataclass(frozen=True)
class _Posted:
    """Fingerprints of this rank that were those of the first rank; a later one may have others."""

    step: int
    names: tuple[str, ...]
    values: bytes


class _OptimizerChecks:
    """Those of one optimizer, which is held weakly; ``number`` identifies it, the same on all ranks."""

    def __init__(self, optimizer: Optimizer, number: int, context: CheckContext) -> None:
        self._optimizer, self._kind, self._number = ref(optimizer), type(optimizer).__name__, number
        self._context, self._store = context, context.store
        self._seen = self._steps = self._backwards = self._without = 0
        self._arrived: set[int] = set()
        self._posted: list[_Posted] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def is_finished(self) -> bool:
        return self._steps >= _STEPS or self._seen > _MOST_STEPS or self._optimizer() is None

    def after_backward(self) -> None:
        """Note where gradients have arrived, and look at what other ranks wrote after the step before."""
        if (optimizer := self._optimizer()) is not None:
            self._backwards += 1
            self._arrived.update(id(parameter) for parameter in _trained(optimizer) if parameter.grad is not None)
            self._look()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # -- before a step --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._seen += 1
        self._look()
        # A closure computes the gradients within the step.
        if self.is_finished or kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
            return
        trained = {id(parameter) for parameter in _trained(optimizer)}
        self._check_reduced(trained)
        with_gradient = {id(parameter) for parameter in _trained(optimizer) if parameter.grad is not None}
        self._check_owned(optimizer, with_gradient)
        self._arrived |= with_gradient
        if self._backwards:
            self._check_arrived(trained)

    def _check_reduced(self, trained: set[int]) -> None:
        for contract in self._context.contracts():
            if waiting := {id(parameter) for parameter in contract.unreduced()} & trained:
                self._refuse(
                    "the last backward pass did not reduce the gradients, so that the step would not see those of "
                    f"{_names(contract, waiting)}",
                    "a step after a backward pass with synchronization",
                    "with fabric.no_backward_sync(model, enabled=accumulating): around all micro-batches but the last",
                )

    def _check_owned(self, optimizer: Optimizer, with_gradient: set[int]) -> None:
        unknown = set(with_gradient)
        for contract in self._context.contracts():
            # Those that a sharded module held at setup count, and those that it holds now.
            parameters = (*contract.parameters().values(), *contract.module.parameters())
            unknown -= {id(parameter) for parameter in parameters}
        foreign = [
            f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) in unknown
        ]
        # In a single process nothing has to be synchronized.
        if foreign and self._store.size > 1:
            self._refuse(
                f"these belong to no module that is set up, and their gradients differ between ranks: {_some(foreign)}",
                "parameters of modules that went through setup()",
                f"fabric.setup(module) for the module that has them, be it the loss function; {_OFF}",
            )

    def _check_arrived(self, trained: set[int]) -> None:
        for contract in self._context.contracts():
            missing = self._missing(contract, trained)
            if missing and contract.needs_all_gradients:
                self._refuse(
                    f"no gradient has arrived at {_names(contract, missing)}, and without these gradients the others "
                    "are not synchronized",
                    "every parameter that requires a gradient gets one in each backward pass",
                    'strategy="ddp_find_unused_parameters_true", or parameter.requires_grad_(False) before setup',
                )
        self._without = 0 if trained & self._arrived else self._without + 1
        if self._without >= _STEPS and trained:
            self._refuse(
                f"no gradient has arrived at any of its parameters in {self._backwards} backward pass(es)",
                "an optimizer of parameters that the loss is computed from",
                f"loss = loss_function(model(batch), target); fabric.backward(loss); {_OFF}",
            )

    def _refuse(self, problem: str, expected: str, suggestion: str) -> NoReturn:
        raise UsageError(f"{self._kind}.step() on rank {self._store.rank}", problem, expected, suggestion)

    def _missing(self, contract: GradientContract, trained: set[int]) -> set[int]:
        """Parameters of a module that have had no gradient although others of it have."""
        own = {id(parameter) for parameter in contract.parameters().values()} & trained
        return own - self._arrived if own & self._arrived else set()

    # -- after a step ---------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        trained = _trained(optimizer)
        # A step that is skipped after an overflow has no gradients either.
        if self.is_finished or all(parameter.grad is None for parameter in trained):
            return
        self._steps += 1
        own = {id(parameter) for parameter in trained}
        contracts = self._context.contracts()
        replicated = [
            (name, parameter)
            for contract in contracts
            for name, parameter in contract.replicated().items()
            if id(parameter) in own
        ]
        if replicated:
            names, tensors = zip(*replicated, strict=True)
            posted = _Posted(self._steps, names, fingerprint(tensors))
            self._compare(posted)
            self._posted.append(posted)
        if not self.is_finished or not self._backwards or self._store.rank > 0:
            return
        for contract in contracts:
            missing = self._missing(contract, own)
            if missing and not contract.expects_unused:
                warnings.warn(
                    f"no gradient has arrived in the first {_STEPS} steps of {self._kind} at "
                    f"{_names(contract, missing)}: they are not trained; parameter.requires_grad_(False) for these, or "
                    f"{_OFF}",
                    stacklevel=3,
                )

    def _look(self) -> None:
        waiting, self._posted = self._posted, []
        for posted in waiting:
            self._refuse_other(posted, self._store.get_nowait(self._key(posted, "other")))

    def _compare(self, posted: _Posted) -> None:
        own = self._store.rank.to_bytes(_RANK, "little") + posted.values
        first = self._store.set_if_absent(self._key(posted, "first"), own)
        if first[_RANK:] != posted.values:
            self._store.set(self._key(posted, "other"), own)
            self._refuse_other(posted, first)
        self._refuse_other(posted, self._store.get_nowait(self._key(posted, "other")))

    def _key(self, posted: _Posted, which: str) -> str:
        return f"first steps/{self._number}/{posted.step}/{which}"

    def _refuse_other(self, posted: _Posted, written: bytes | None) -> None:
        """Raise if another rank has written fingerprints that are not those of this one."""
        if written is None:
            return
        cause = "; the same hyperparameters, closures, and changes of parameters outside of the optimizer"
        if self._context.left_local():
            cause = "; the last backward pass was inside no_backward_sync, and these gradients are this rank's own"
        other = int.from_bytes(written[:_RANK], "little")
        pairs = zip(posted.names, _words(posted.values), _words(written[_RANK:]), strict=False)
        names = [name for name, mine, theirs in pairs if mine != theirs]
        raise UsageError(
            f"step {posted.step} of {self._kind} on rank {self._store.rank}",
            f"the replicas of ranks {min(self._store.rank, other)} and {max(self._store.rank, other)} differ after it: "
            f"{_some(names)}",
            f"the same gradients and the same step on all ranks{cause}",
            f"forward and backward through model, and a step after a backward pass with synchronization; {_OFF}",
        )


class JoinOrderCheck:
    """Checks that joined modules run in the order in which ranks without batches shadow them.

    Those ranks make, module by module, the collectives of one forward pass and of the backward pass after it. In
    another order the collectives of different modules would meet.

    Args:
        guards: those of the joined modules, in order.
        rank: rank of this process.

    Attributes:
        rounds: how often the first of them has run.
    """

    def __init__(self, guards: Sequence[BypassGuard], rank: int) -> None:
        self.rounds = self._next = 0
        self._guards, self._rank = guards, rank
        self._handles = [
            guard.prepared.register_forward_pre_hook(self._check(index)) for index, guard in enumerate(guards)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _check(self, index: int) -> Any:
        def check(module: nn.Module, args: Any) -> None:
            previous = self._guards[index - 1]
            problem = ""
            if not torch.is_grad_enabled():
                problem = "it is without gradients, and ranks that have no batches would wait for them"
            elif previous.awaits_backward:
                problem = f"the backward pass of {previous.contract.title} has not been made"
            elif index != self._next:
                problem = f"the next one is {self._guards[self._next].contract.title}"
            if problem:
                raise UsageError(
                    f"a forward pass of {self._guards[index].contract.title} in fabric.join on rank {self._rank}",
                    problem,
                    "for each batch one forward and backward pass of each joined module, in the order in which they "
                    "were joined",
                    "with fabric.join([first, second]): fabric.backward(loss(first(x))); "
                    "fabric.backward(loss(second(x))); and model.module(x), or the end of the with block, for a pass "
                    "without gradients",
                )
            self._next = (index + 1) % len(self._guards)
            self.rounds += index == 0

        return check


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


def _names(contract: GradientContract, wanted: set[int]) -> str:
    names = [name for name, parameter in contract.parameters().items() if id(parameter) in wanted]
    return f"{_some(names)} of {contract.title}"


def _some(names: Collection[str], most: int = 10) -> str:
    return ", ".join(list(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
