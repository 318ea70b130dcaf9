"""Checks in the first steps of each optimizer that find silent training mistakes.

[Note: Training checks] Some mistakes raise no error and only spoil the result: gradients that never arrive or are not
reduced yet, replicas that drift apart. Hooks around an optimizer's first steps check for them and are then removed.
Fingerprints of the replicas are compared through the store, never by a collective: the rank that is first writes its
own; each other rank compares with that and, if they differ, writes its own beside it. The other ranks check for one
again after the next backward pass, which needs every rank. So the store, which is in the memory of one node, holds at
most two fingerprints, however many ranks there are.

Only certain mistakes are errors. A missing gradient is an error if the strategy needs it, and otherwise a warning at
the last of these steps. Parameters outside of set-up modules count as replicas, since the user may synchronize them:
they must not differ.

One hook on the first steps of all optimizers of the process finds what was not set up: an optimizer that steps with
scaled gradients or with parameters that a model no longer has, or a module or loader that is separate on each rank.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from textwrap import shorten
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet, ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric._torch import datasets_iterated_in_full, local_tensor, real_tensors
from fabric.communicators import Collective, Communicator, Operation
from fabric.contract import GradientContract
from fabric.errors import UsageError
from fabric.hooks import Hooks
from fabric.store import JobStore
from fabric.tree import parameters_of

__all__ = ["SetupChecks", "TrainingChecks", "check_same_model", "fingerprint"]

# Each optimizer is checked in this many of its steps.
_STEPS = 2
# All optimizers together are checked in this many steps: one may step five times before another.
_STEPS_OF_ALL = 6
# For an optimizer that seems never to step, because it clears its gradients in the step.
_MOST_STEPS = 20
_OFF = "Fabric(check_training=False) if this is meant"
_GATHERED = "fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors"
# Characters of a list of parameters.
_LONGEST = 400
# Elements that a checksum converts to int64 at a time.
_CHUNK = 1 << 20
# The integers with as many bytes as an element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_PRIME = 1_000_003

Contracts = Collection[GradientContract]


class _Published(NamedTuple):
    """What a rank writes to the store after a step.

    Attributes:
        rank: the rank.
        fingerprint: a number for each of its replicated parameters.
        synchronized: the number of backward passes that synchronized gradients.
    """

    rank: int
    fingerprint: list[int]
    synchronized: int

    def to_bytes(self) -> bytes:
        """Return the form that is in the store."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "_Published":
        """Return what another rank wrote to the store."""
        return cls(*json.loads(content))


class TrainingChecks:
    """The checks of one optimizer, until it has stepped twice. See ``[Note: Training checks]``.

    The optimizer is held weakly.

    Args:
        optimizer: the optimizer.
        name: identifies the optimizer, the same on all ranks.
        contracts: the contracts of the set-up modules.
        store: the store in which ranks exchange fingerprints.
        backward: hooks around backward passes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        contracts: Contracts,
        store: JobStore,
        backward: Hooks,
    ) -> None:
        self._optimizer = ref(optimizer)
        self._class_name = type(optimizer).__name__
        self._name = name
        self._contracts = contracts
        self._store = store
        self._calls = 0
        self._steps = 0
        self._backwards = 0
        self._synchronized = 0
        # Successive steps in which no parameter had got a gradient.
        self._steps_without_gradient = 0
        # The ids of the parameters that have had a gradient.
        self._had_gradient: set[int] = set()
        # The replicated parameters, with their fingerprint after the latest step.
        self._replicated_names: list[str] = []
        self._fingerprint: list[int] = []
        self._hooks = ExitStack()
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        backward.after.append(self._after_backward)
        self._hooks.callback(backward.after.remove, self._after_backward)

    def close(self) -> None:
        """Remove all hooks. Not to be called in an optimizer's hook."""
        self._hooks.close()

    @property
    def _is_finished(self) -> bool:
        has_stepped = self._steps >= _STEPS or self._calls > _MOST_STEPS
        return has_stepped or self._optimizer() is None

    # -- after a backward pass ------------------------------------------------------------------

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        optimizer = self._optimizer()
        if error is None and optimizer is not None:
            self._backwards += 1
            self._record_gradients(optimizer)
            self._compare(self._store.get_nowait(self._key("other")))
            if any(contract.synchronizes() for contract in self._contracts):
                self._synchronized += 1
            self._check_no_rank_is_ahead()
        if self._is_finished:
            self.close()

    def _check_no_rank_is_ahead(self) -> None:
        """Raise if another rank made the next step before this synchronized backward pass."""
        # A rank may hold an empty shard, and then counts no steps.
        if self._is_finished or not self._had_gradient:
            return
        content = self._store.get_nowait(self._key("first", steps_ahead=1))
        if not content:
            return
        published = _Published.from_bytes(content)
        if published.synchronized < self._synchronized:
            self._refuse(
                f"rank {published.rank} has made step {self._steps + 1}, before this backward pass",
                "the same steps on all ranks",
                f"no branch on the rank around it; {_OFF}",
            )

    # -- before a step --------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._calls += 1
        self._compare(self._store.get_nowait(self._key("other")))
        trained = self._record_gradients(optimizer)
        if self._calls == 1:
            self._check_values(trained)
        has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        # A closure computes the gradients within the step.
        if self._is_finished or has_closure:
            return
        for contract in self._contracts:
            self._check_reduced(contract, trained)
            self._check_missing(contract, trained)
        self._check_some_gradient(trained)

    def _check_values(self, trained: set[int]) -> None:
        """Raise if parameters of a model that is trained were never filled in."""
        for contract in self._contracts:
            parameters = contract.parameters().values()
            if trained.isdisjoint(_ids(parameters)):
                continue
            empty = _ids(parameter for parameter in parameters if _has_nan(parameter))
            if empty:
                self._refuse(
                    f"these are not a number before the first step: {_named(contract, empty)}",
                    "a checkpoint for a module that was built with empty_init=True, or values of "
                    "the user's own",
                    'fabric.load(path, {"model": model}) after fabric.setup(...); or '
                    "fabric.init_module()",
                )

    def _check_reduced(self, contract: GradientContract, trained: set[int]) -> None:
        """Raise if the optimizer would step with gradients that are not synchronized yet."""
        unreduced = _ids(contract.unreduced()) & trained
        if unreduced:
            self._refuse(
                "the last backward pass did not reduce the gradients of "
                f"{_named(contract, unreduced)}",
                "a step after a backward pass with synchronization",
                "with fabric.no_backward_sync(model, enabled=accumulating): around all "
                "micro-batches but the last",
            )

    def _check_missing(self, contract: GradientContract, trained: set[int]) -> None:
        """Raise or warn if some, but not all, parameters of a model have got no gradient."""
        parameters = _ids(contract.parameters().values()) & trained
        without = parameters - self._had_gradient
        if contract.expects_unused or not self._backwards or without in (set(), parameters):
            return
        names = _named(contract, without)
        if contract.needs_forward:
            self._refuse(
                f"no gradient has arrived at {names}, and without these the others are not "
                "synchronized",
                "every parameter that requires a gradient gets one in each backward pass",
                f'{_GATHERED}; else strategy="ddp_find_unused_parameters_true", or '
                "parameter.requires_grad_(False) before setup",
            )
        if self._steps == _STEPS - 1 and self._store.rank == 0:
            warnings.warn(
                f"no gradient has arrived in the first {_STEPS} steps of {self._class_name} at "
                f"{names}: they are not trained; {_GATHERED}, parameter.requires_grad_(False) for "
                f"these, or {_OFF}",
                stacklevel=4,
            )

    def _check_some_gradient(self, trained: set[int]) -> None:
        """Raise if no parameter of the optimizer has got a gradient in the first steps."""
        if self._backwards and trained:
            if trained & self._had_gradient:
                self._steps_without_gradient = 0
            else:
                self._steps_without_gradient += 1
        if self._steps_without_gradient >= _STEPS:
            self._refuse(
                "no gradient has arrived at any of its parameters in "
                f"{self._backwards} backward pass(es)",
                "an optimizer of parameters that the loss is computed from",
                "loss = loss_function(model(batch), target); fabric.backward(loss); "
                f"{_GATHERED}; {_OFF}",
            )

    def _record_gradients(self, optimizer: Optimizer) -> set[int]:
        """Record which parameters have gradients, and return the ids of all trained ones."""
        trained = _trained(optimizer)
        self._had_gradient |= _with_gradient(trained)
        return _ids(trained)

    def _refuse(self, problem: str, expected: str, suggestion: str) -> NoReturn:
        raise UsageError(
            f"{self._class_name}.step() on rank {self._store.rank}", problem, expected, suggestion
        )

    # -- after a step ---------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        trained = _trained(optimizer)
        # A step that is skipped after an overflow has no gradients either.
        if self._is_finished or not _with_gradient(trained):
            return
        self._steps += 1
        if self._store.size == 1:
            return  # nothing has to be synchronized
        self._take_fingerprint(optimizer, trained)
        if not self._replicated_names:
            return
        published = _Published(self._store.rank, self._fingerprint, self._synchronized).to_bytes()
        first = self._store.set_if_absent(self._key("first"), published)
        if _Published.from_bytes(first).fingerprint != self._fingerprint:
            self._store.set(self._key("other"), published)
            self._compare(first)

    def _take_fingerprint(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Compute a number for each replicated parameter, or for the options if there are none."""
        names = self._names_of_replicated(optimizer, trained)
        replicated = [parameter for parameter in trained if id(parameter) in names]
        if replicated:
            self._replicated_names = [names[id(parameter)] for parameter in replicated]
            self._fingerprint = fingerprint(replicated)
        elif _set_up(self._contracts) & _ids(trained):  # shards
            options: list[tuple[str, float]] = []
            for group in optimizer.param_groups:
                for key, value in group.items():
                    if type(value) is float:
                        options.append((key, value))
            self._replicated_names = ["its options"]
            self._fingerprint = [crc32(f"{self._class_name} {options}".encode())]

    def _names_of_replicated(self, optimizer: Optimizer, trained: list[Tensor]) -> dict[int, str]:
        """Return the names of parameters that have to be equal on all ranks, by id."""
        names: dict[int, str] = {}
        for contract in self._contracts:
            for name, parameter in contract.replicated().items():
                names[id(parameter)] = name
        # Sharded parameters reduce their gradients.
        plain = [parameter for parameter in trained if local_tensor(parameter) is parameter]
        outside_of_modules = _with_gradient(plain) - _set_up(self._contracts)
        for number, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) in outside_of_modules:
                names[id(parameter)] = (
                    f"parameter {number} of the optimizer, which no set-up module has"
                )
        return names

    def _key(self, writer: str, steps_ahead: int = 0) -> str:
        """Return the key in the store of what a rank wrote after a step.

        Args:
            writer: ``"first"`` for the first rank, ``"other"`` for a rank that differs from it.
            steps_ahead: the number of steps after the latest one of this rank.
        """
        scope = "".join(contract.scope for contract in self._contracts)
        return f"first steps{scope}/{self._name}/{self._steps + steps_ahead}/{writer}"

    def _compare(self, content: bytes | None) -> None:
        """Raise if another rank's fingerprint differs from this rank's."""
        if content is None:
            return
        published = _Published.from_bytes(content)
        different: list[str] = []
        # Of different lengths if the other rank has gradients of other parameters outside of
        # modules.
        for name, number, number_there in zip(
            self._replicated_names, self._fingerprint, published.fingerprint, strict=False
        ):
            if number != number_there:
                different.append(name)
        if different:
            rank = self._store.rank
            first, second = sorted((rank, published.rank))
            raise UsageError(
                f"step {self._steps} of {self._class_name} on rank {rank}",
                f"the replicas of ranks {first} and {second} differ after it: {_some(different)}",
                "the same changes on all ranks, by gradients of set-up modules from outside of "
                "no_backward_sync",
                f"fabric.backward(loss_function(model(batch), target)); optimizer.step(); {_OFF}",
            )


class SetupChecks:
    """Checks in the first steps of all optimizers for what was not set up; see ``[Note: Training checks]``.

    Args:
        contracts, store, backward: as for :class:`TrainingChecks`.
        optimizers: set-up optimizers.
        loaders: set-up loaders.
        check: raises for optimizers that cannot be set up.
        scales: whether backward passes scale gradients.
    """

    def __init__(
        self, contracts: Contracts, store: JobStore, backward: Hooks, *, optimizers: Collection[Optimizer],
        loaders: Collection[object], check: Callable[[Sequence[Optimizer]], object], scales: bool,
    ) -> None:  # fmt: skip
        self._contracts = contracts
        self._store = store
        self._backward = backward
        self._optimizers = optimizers
        self._loaders = loaders
        self._check = check
        self._scales = scales
        self._backwards = 0
        self._calls = 0
        self._seen: WeakSet[Optimizer] = WeakSet()
        # has one been set up
        self._numbers = count()
        self._is_used = False
        self._all = ExitStack()
        self._hooks = ExitStack()
        self._all.callback(self._hooks.close)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        backward.after.append(self._after_backward)
        self._hooks.callback(backward.after.remove, self._after_backward)

    def watch(self, optimizer: Optimizer, name: str = "") -> None:
        """Check an optimizer's first steps (again, once it has more parameters)."""
        self._is_used |= not name
        name = name or str(next(self._numbers))
        self._all.callback(
            TrainingChecks(optimizer, name, self._contracts, self._store, self._backward).close
        )

    def on_param_group(self, optimizer: Optimizer) -> None:
        """Check an optimizer that got parameters after setup: at once, and after the next backward."""
        self._check([optimizer])
        held_weakly = ref(optimizer)

        def watch(*_: object) -> None:
            self._backward.after.remove(watch)
            if (extended := held_weakly()) is not None:
                self.watch(extended)

        # This runs in an optimizer's hook, where no other can be added.
        self._backward.after.append(watch)

    def close(self) -> None:
        """Remove the hooks of all checks; not to be called in an optimizer's hook."""
        self._all.close()

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        self._backwards += 1
        if self._calls >= _STEPS_OF_ALL:
            self._hooks.close()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._calls += 1
        if self._calls > _STEPS_OF_ALL:
            return
        is_first = optimizer not in self._seen
        self._seen.add(optimizer)
        request = f"{type(optimizer).__name__}.step() on rank {self._store.rank}"
        trained = _trained(optimizer)
        set_up = _set_up(self._contracts)
        arrived = _with_gradient(trained)
        if optimizer not in self._optimizers:
            self._check([optimizer])
            if (
                self._scales
                and self._backwards
                and arrived
                and (arrived & set_up or not self._contracts)
            ):
                raise UsageError(
                    request,
                    "it has not been set up, and steps with the gradients of the loss times its scale",
                    "every optimizer of gradients that fabric.backward() computes is set up",
                    "model, optimizer = fabric.setup(model, optimizer), or fabric.setup_optimizers(optimizer)",
                )
        held = _ids(each for known in (*self._optimizers, *self._seen) for each in _trained(known))
        for contract in self._contracts if _ids(trained) - set_up - arrived else ():
            if left_out := _with_gradient(contract.parameters().values()) - held:
                raise UsageError(
                    request,
                    "no gradient has arrived at parameters of it that no set-up module has, and no optimizer has "
                    f"{_named(contract, left_out)}",
                    "an optimizer of the parameters that the module has when it is set up",
                    "optimizer = torch.optim.SGD(model.parameters()) after a layer is replaced, then fabric.setup(...)",
                )
        if self._store.size == 1 or not is_first:
            return
        missing = ""
        # Each rank may have latent tensors of its own; sharded parameters are no problem.
        if not (self._contracts or self._is_used) and nn.Parameter in map(type, trained):
            self.watch(optimizer, f"{self._calls} {sum(map(Tensor.numel, trained))}")
            missing = (
                "each has a model of its own: model, optimizer = fabric.setup(model, optimizer)"
            )
        elif arrived & set_up and not self._loaders and self._store.rank == 0:
            for dataset in datasets_iterated_in_full():
                missing = (
                    f"each reads the whole {dataset}: loader = fabric.setup_dataloaders(loader)"
                )
        if missing and self._store.rank == 0:
            warnings.warn(f"of {self._store.size} processes {missing}; or {_OFF}", stacklevel=2)


def check_same_model(
    communicator: Communicator, root: nn.Module, error: Any = None, plan: object = None
) -> None:
    """Raise on every rank the first rank's error, or a UsageError if the models differ. Collective.

    Args:
        communicator: all ranks.
        root: the model.
        error: the FabricError of this rank, which cannot set it up; or None.
        plan: how each part will be set up; compared by its ``repr``.
    """
    with real_tensors():  # in a dry run, too
        own = torch.tensor(0 if error else _digest(root, plan), device=communicator.device)
        digests = communicator.run(Collective(Operation.ALL_GATHER, own)).tolist()
    if 0 in digests:
        communicator.gather_objects(None, error=error)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        request = f"setup({type(root).__name__}) on rank {communicator.rank}"
        problem = f"it is another model on rank {others[0]} than on rank 0, by names, shapes, dtypes or parts of it"
        raise UsageError(request, problem, suggestion="a build that does not depend on the rank")


def _digest(root: nn.Module, plan: object) -> int:
    """A nonzero digest of parameters and buffers: names, shapes, dtypes, and which names share a tensor."""
    tensors = (
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    )
    numbers = {id(each): number for number, (_, each) in enumerate(tensors)}
    layout = [
        (
            name,
            numbers[id(each)],
            not is_lazy(each) and each.shape,
            each.dtype,
            each.requires_grad,
            type(each),
        )
        for name, each in tensors
    ]
    return 1 + int.from_bytes(hashlib.sha256(repr((layout, plan)).encode()).digest()[:7])


def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """A 64-bit number for each tensor, which depends on all bits and their places.

    Waits for the device once.
    """
    sums = [_checksum(local_tensor(tensor).detach()) for tensor in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist()


def _checksum(tensor: Tensor) -> Tensor:
    """A checksum: odd weights make every bit count; integers wrap around alike on all devices."""
    bits = tensor.contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_CHUNK):
        weights = 2 * torch.arange(part.numel(), dtype=torch.int64, device=bits.device) + 1
        total = total * _PRIME + (part.to(torch.int64) * weights).sum()
    return total


def _ids(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _with_gradient(parameters: Iterable[Tensor]) -> set[int]:
    return _ids(parameter for parameter in parameters if parameter.grad is not None)


def _set_up(contracts: Iterable[GradientContract]) -> set[int]:
    return _ids(parameter for contract in contracts for parameter in contract.parameters().values())


def _has_nan(parameter: Tensor) -> bool:
    # One-byte and quantized dtypes have no isnan, or no NaN.
    tensor = local_tensor(parameter)
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.element_size() > 1
        and bool(tensor.isnan().any())
    )


def _trained(optimizer: Optimizer) -> list[Tensor]:
    # A rank may hold an empty shard of a parameter, and then has no gradient for it.

    return [
        each
        for each in parameters_of(optimizer)
        if each.requires_grad and local_tensor(each).numel()
    ]


def _named(contract: GradientContract, wanted: set[int]) -> str:
    names = [name for name, parameter in contract.parameters().items() if id(parameter) in wanted]
    return f"{_some(names)} of {contract.title}"


def _some(names: Iterable[str]) -> str:
    return shorten(", ".join(names), _LONGEST, placeholder=" ...")
