"""Checks in the first steps of each optimizer that find silent training mistakes.

[Note: Training checks] Some mistakes raise no error and only spoil the result: gradients that never
arrive or are not reduced yet, replicas that drift apart. Hooks around an optimizer's first steps
check for them and are then removed. Fingerprints of the replicas are compared through the store,
never by a collective: the first rank writes its fingerprint. If the fingerprint of another rank
differs, that rank writes a second one. The ranks look for the second fingerprint again after the
next backward pass, which needs every rank. So the store, which is in the memory of one node, holds
at most two fingerprints, however many ranks there are.

Only certain mistakes are errors. A missing gradient is an error if the strategy needs it, and
otherwise a warning at the last of these steps. Parameters outside of set-up modules count as
replicas, since the user may synchronize them: they must not differ.

One hook on the first steps of all optimizers of the process finds what was not set up: an optimizer
that steps with scaled gradients or with parameters that a model no longer has, or a module or
loader that is separate on each rank.
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
from fabric.errors import FabricError, UsageError
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
_MAX_CHARACTERS = 400
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
                    f"these are not a number before the first step: {_names_of(contract, empty)}",
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
                f"{_names_of(contract, unreduced)}",
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
        names = _names_of(contract, without)
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
        trained = _trainable_parameters(optimizer)
        self._had_gradient |= _ids_with_gradient(trained)
        return _ids(trained)

    def _refuse(self, problem: str, expected: str, suggestion: str) -> NoReturn:
        raise UsageError(
            f"{self._class_name}.step() on rank {self._store.rank}", problem, expected, suggestion
        )

    # -- after a step ---------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        trained = _trainable_parameters(optimizer)
        # A step that is skipped after an overflow has no gradients either.
        if self._is_finished or not _ids_with_gradient(trained):
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
        elif _ids_of_modules(self._contracts) & _ids(trained):  # shards
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
        outside_of_modules = _ids_with_gradient(plain) - _ids_of_modules(self._contracts)
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
        # The lengths differ if the other rank has gradients of other parameters outside of modules.
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
                problem=f"the replicas of ranks {first} and {second} differ after it: "
                f"{_join_names(different)}",
                expected="the same changes on all ranks, by gradients of set-up modules from "
                "outside of no_backward_sync",
                suggestion="fabric.backward(loss_function(model(batch), target)); "
                f"optimizer.step(); {_OFF}",
            )


class SetupChecks:
    """Checks in the first steps of all optimizers for what was not set up.

    See ``[Note: Training checks]``.

    Args:
        contracts: the contracts of the set-up modules.
        store: the store in which ranks exchange fingerprints.
        backward: the hooks around backward passes.
        optimizers: the set-up optimizers.
        loaders: the set-up loaders.
        check_setup: raises for optimizers that cannot be set up.
        scales_loss: whether backward passes scale gradients.
    """

    def __init__(
        self,
        contracts: Contracts,
        store: JobStore,
        backward: Hooks,
        *,
        optimizers: Collection[Optimizer],
        loaders: Collection[object],
        check_setup: Callable[[Sequence[Optimizer]], object],
        scales_loss: bool,
    ) -> None:
        self._contracts = contracts
        self._store = store
        self._backward = backward
        self._optimizers = optimizers
        self._loaders = loaders
        self._check_setup = check_setup
        self._scales_loss = scales_loss
        self._backwards = 0
        self._calls = 0
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._numbers = count()
        self._has_set_up_optimizer = False
        # The hooks of this object, which are removed first, and those of each optimizer.
        self._hooks = ExitStack()
        self._all_hooks = ExitStack()
        self._all_hooks.callback(self._hooks.close)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        backward.after.append(self._after_backward)
        self._hooks.callback(backward.after.remove, self._after_backward)

    def watch(self, optimizer: Optimizer) -> None:
        """Check the first steps of a set-up optimizer; again, once it has more parameters."""
        self._has_set_up_optimizer = True
        self._start_checks(optimizer, str(next(self._numbers)))

    def on_param_group(self, optimizer: Optimizer) -> None:
        """Check an optimizer that got parameters after setup, now and in its first steps."""
        self._check_setup([optimizer])
        optimizer_ref = ref(optimizer)

        def watch_after_backward(*_: object) -> None:
            self._backward.after.remove(watch_after_backward)
            extended_optimizer = optimizer_ref()
            if extended_optimizer is not None:
                self.watch(extended_optimizer)

        # This runs in an optimizer's hook, where no other hook can be added.
        self._backward.after.append(watch_after_backward)

    def close(self) -> None:
        """Remove the hooks of all checks. Not to be called in an optimizer's hook."""
        self._all_hooks.close()

    def _start_checks(self, optimizer: Optimizer, name: str) -> None:
        checks = TrainingChecks(optimizer, name, self._contracts, self._store, self._backward)
        self._all_hooks.callback(checks.close)

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        self._backwards += 1
        if self._calls >= _STEPS_OF_ALL:
            self._hooks.close()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self._calls += 1
        if self._calls > _STEPS_OF_ALL:
            return
        is_first_step = optimizer not in self._stepped
        self._stepped.add(optimizer)
        trained = _trainable_parameters(optimizer)
        if optimizer not in self._optimizers:
            self._check_setup([optimizer])
            self._check_not_scaled(optimizer, trained)
        self._check_parameters_in_use(optimizer, trained)
        if is_first_step and self._store.size > 1:
            self._check_synchronized(optimizer, trained)

    def _check_not_scaled(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Raise if an optimizer that was not set up would step with scaled gradients."""
        arrived = _ids_with_gradient(trained)
        if not arrived or not self._scales_loss or not self._backwards:
            return
        # Without a set-up module, the gradients may be those of any model.
        if self._contracts and arrived.isdisjoint(_ids_of_modules(self._contracts)):
            return
        raise UsageError(
            self._request(optimizer),
            problem="it has not been set up, and steps with the gradients of the loss times its "
            "scale",
            expected="every optimizer of gradients that fabric.backward() computes is set up",
            suggestion="model, optimizer = fabric.setup(model, optimizer), or "
            "fabric.setup_optimizers(optimizer)",
        )

    def _check_parameters_in_use(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Raise if an optimizer has parameters that a model has replaced by others."""
        without_gradient = _ids(trained) - _ids_with_gradient(trained)
        if without_gradient <= _ids_of_modules(self._contracts):
            return
        in_optimizers: set[int] = set()
        for other_optimizer in (*self._optimizers, *self._stepped):
            in_optimizers |= _ids(_trainable_parameters(other_optimizer))
        for contract in self._contracts:
            left_out = _ids_with_gradient(contract.parameters().values()) - in_optimizers
            if left_out:
                raise UsageError(
                    self._request(optimizer),
                    problem="no gradient has arrived at parameters of it that no set-up module "
                    f"has, and no optimizer has {_names_of(contract, left_out)}",
                    expected="an optimizer of the parameters that the module has when it is set up",
                    suggestion="optimizer = torch.optim.SGD(model.parameters()) after a layer is "
                    "replaced, then fabric.setup(...)",
                )

    def _check_synchronized(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Warn on rank 0 if each rank has its own model, or reads the whole dataset."""
        is_rank_0 = self._store.rank == 0
        has_setup = bool(self._contracts) or self._has_set_up_optimizer
        # Each rank may have latent tensors of its own, and sharded parameters are no problem.
        if not has_setup and any(type(parameter) is nn.Parameter for parameter in trained):
            num_elements = sum(parameter.numel() for parameter in trained)
            self._start_checks(optimizer, f"{self._calls} {num_elements}")
            if is_rank_0:
                self._warn(
                    "each has a model of its own: model, optimizer = fabric.setup(model, optimizer)"
                )
            return
        trains_module = _ids_with_gradient(trained) & _ids_of_modules(self._contracts)
        if is_rank_0 and trains_module and not self._loaders:
            datasets = datasets_iterated_in_full()
            if datasets:
                self._warn(
                    f"each reads the whole {datasets[-1]}: "
                    "loader = fabric.setup_dataloaders(loader)"
                )

    def _warn(self, problem: str) -> None:
        message = f"of {self._store.size} processes {problem}; or {_OFF}"
        # At the hook in torch's optimizer, past the three methods of this class.
        warnings.warn(message, stacklevel=4)

    def _request(self, optimizer: Optimizer) -> str:
        return f"{type(optimizer).__name__}.step() on rank {self._store.rank}"


def check_same_model(
    communicator: Communicator,
    root: nn.Module,
    error: FabricError | None = None,
    plan: object = None,
) -> None:
    """Raise on every rank if the models differ, or if a rank has an error.

    Collective: every rank must call it.

    Args:
        communicator: all ranks.
        root: the model.
        error: the error for which this rank cannot set up the model. None if there is none.
        plan: how each submodule will be set up. Plans are compared by their ``repr``.

    Raises:
        UsageError: the models or plans differ.
        FabricError: the error of the first rank that has one.
    """
    with real_tensors():  # in a dry run, too
        digest = 0
        if error is None:
            digest = _digest(root, plan)
        message = torch.tensor(digest, device=communicator.device)
        digests = communicator.run(Collective(Operation.ALL_GATHER, message)).tolist()
    if 0 in digests:
        communicator.gather_objects(None, error=error)  # raises the error on every rank
    for rank, digest_of_rank in enumerate(digests):
        if digest_of_rank != digests[0]:
            raise UsageError(
                f"setup({type(root).__name__}) on rank {communicator.rank}",
                problem=f"it is another model on rank {rank} than on rank 0, by the names, shapes, "
                "dtypes or parts of it",
                suggestion="a build that does not depend on the rank",
            )


def _digest(root: nn.Module, plan: object) -> int:
    """Return a nonzero digest of a model's parameters and buffers, and of a plan.

    The digest depends on names, shapes and dtypes, and on which names share a tensor.
    """
    tensors: list[tuple[str, Tensor]] = [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
    last_numbers = {id(tensor): number for number, (_, tensor) in enumerate(tensors)}
    layout: list[object] = []
    for name, tensor in tensors:
        shape = None
        if not is_lazy(tensor):
            shape = tensor.shape
        number = last_numbers[id(tensor)]
        layout.append((name, number, shape, tensor.dtype, tensor.requires_grad, type(tensor)))
    content = repr((layout, plan)).encode()
    return 1 + int.from_bytes(hashlib.sha256(content).digest()[:7])


def fingerprint(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit number for each tensor, which depends on all bits and their positions.

    Waits for the device once.
    """
    checksums = [_checksum(local_tensor(tensor).detach()) for tensor in tensors]
    device = checksums[0].device
    return torch.stack([checksum.to(device) for checksum in checksums]).tolist()


def _checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits.

    The weights are odd, so that every bit counts. Integers wrap around in the same way on all
    devices.
    """
    bits = tensor.contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        weights = 2 * torch.arange(chunk.numel(), dtype=torch.int64, device=bits.device) + 1
        total = total * _PRIME + (chunk.to(torch.int64) * weights).sum()
    return total


def _ids(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _ids_with_gradient(parameters: Iterable[Tensor]) -> set[int]:
    return _ids(parameter for parameter in parameters if parameter.grad is not None)


def _ids_of_modules(contracts: Iterable[GradientContract]) -> set[int]:
    ids: set[int] = set()
    for contract in contracts:
        ids |= _ids(contract.parameters().values())
    return ids


def _has_nan(parameter: Tensor) -> bool:
    tensor = local_tensor(parameter)
    # One-byte and quantized dtypes have no isnan, or no NaN.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.element_size() == 1:
        return False
    return bool(tensor.isnan().any())


def _trainable_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer that can have a gradient on this rank."""
    parameters: list[Tensor] = []
    for parameter in parameters_of(optimizer):
        # A rank may hold an empty shard of a parameter, and then has no gradient for it.
        if parameter.requires_grad and local_tensor(parameter).numel():
            parameters.append(parameter)
    return parameters


def _names_of(contract: GradientContract, ids: set[int]) -> str:
    names = [name for name, parameter in contract.parameters().items() if id(parameter) in ids]
    return f"{_join_names(names)} of {contract.title}"


def _join_names(names: Iterable[str]) -> str:
    return shorten(", ".join(names), _MAX_CHARACTERS, placeholder=" ...")
