"""Checks in the first steps of each optimizer that find silent training mistakes."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from textwrap import shorten
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakSet, ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric._torch import (
    datasets_iterated_in_full,
    has_nan,
    local_tensor,
    real_tensors,
)
from fabric.communicators import Collective, Communicator, Operation
from fabric.communicators.call_site import warn_user
from fabric.contract import GradientContract
from fabric.diagnostics.clipping_check import ClippingCheck
from fabric.diagnostics.digest import digests
from fabric.diagnostics.drift import CALL_EVERY_BLOCK
from fabric.diagnostics.evaluation_mode_check import EvaluationModeCheck
from fabric.diagnostics.unscaled_loss_check import UnscaledLossCheck
from fabric.errors import FabricError, UsageError
from fabric.hooks import Hooks
from fabric.optim.gradients import has_gradients
from fabric.optim.loss_scaler import has_closure
from fabric.store import JobStore
from fabric.tree import parameters_of

__all__ = ["SetupChecks", "TrainingChecks", "TrainingSession", "check_same_model"]

# The number of steps in which each optimizer is checked.
_CHECKED_STEPS = 2
# The number of calls of step() after which an optimizer is not checked any more, although no step
# has been counted. Some optimizers clear their gradients in step(), which looks like a skipped
# step.
_MAX_STEP_CALLS = 20
# The number of steps of all optimizers together in which SetupChecks checks them. It is larger,
# since in a GAN one optimizer may step five times before the other one.
_CHECKED_STEPS_OF_ALL = 6
# The seconds in which the other ranks of a split layer are expected to finish a step.
_MAX_WAIT_FOR_STEP = 10.0
_TURN_OFF = "Fabric(check_training=False) if this is meant"
_GATHER_WITH_GRADIENTS = "fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors"
_MAX_NAMES_CHARACTERS = 400  # of a list of parameters in an error
# The name of the losses in a fingerprint.
_LOSSES = "its losses"
# What the names in a fingerprint begin with that stand for gradients of sharded parameters.
_GRADIENT_OF = "the gradient of "

Contracts = Collection[GradientContract]


class TrainingSession(Protocol):
    """The part of a job's session that the checks ask about the training."""

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise if the strategy cannot set up these optimizers."""

    def open_micro_batch(self) -> tuple[int, int] | None:
        """Return the number of the current micro-batch in its window, and the window's length.

        Return None at the last micro-batch, and outside of windows of ``fabric.accumulate``.
        """
        ...

    def pending_change(self, optimizer: Optimizer | None) -> str | None:
        """Return why gradients are not complete before a step. None if they are.

        An example is "multiplied by the loss scale". The argument None stands for parameters that
        no set-up optimizer has.
        """
        ...


class _Published(NamedTuple):
    """The values that a rank writes to the store after a step.

    Attributes:
        rank: the rank.
        fingerprint: a number for each of its replicated parameters.
        synchronized_backwards: the number of its backward passes that synchronized gradients.
    """

    rank: int
    fingerprint: list[int]
    synchronized_backwards: int

    def to_bytes(self) -> bytes:
        """Return the bytes to write to the store."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "_Published":
        """Return the values that a rank wrote to the store as bytes."""
        return cls(*json.loads(content))


class _Fingerprint(NamedTuple):
    """What a rank compares with the other ranks after a step.

    Attributes:
        names: the names of the compared values, as a rule of replicated parameters.
        numbers: a number for each name, such as the digest of the parameter.
    """

    names: list[str]
    numbers: list[int]

    def add(self, name: str, text: str) -> None:
        """Add a value that is not a tensor, as text."""
        self.names.append(name)
        self.numbers.append(crc32(text.encode()))


# See [Note: Training checks].
class _FingerprintComparison:
    """Compares the replicas of one optimizer between ranks, after each of its first steps.

    A *fingerprint* has a number for each parameter that has to be equal on all ranks. The first
    rank that finishes a step writes its fingerprint to the store. A rank with another fingerprint
    raises, and writes its own under another key, so that the other ranks raise, too. This object
    does not hold the optimizer.

    Args:
        class_name: the class of the optimizer, for errors.
        name: identifies the optimizer in the store. It is the same on all ranks.
        contracts: the contracts of the set-up modules.
        store: the store in which ranks compare fingerprints.

    Attributes:
        steps: the number of steps with gradients so far.
    """

    def __init__(self, class_name: str, name: str, contracts: Contracts, store: JobStore) -> None:
        self.steps = 0
        self._class_name = class_name
        self._name = name  # of the optimizer in the keys of the store
        self._contracts = contracts
        self._store = store
        # The fingerprint of this rank after the latest step.
        self._fingerprint = _Fingerprint([], [])
        self._synchronized_backwards = 0
        # The digests of the losses since the latest step, if they have to be equal on all ranks.
        self._loss_digests: list[int] = []

    def after_backward(self, optimizer: Optimizer, loss: Tensor, *, counts_steps: bool) -> None:
        """Record a backward pass, and compare with other ranks what could not be compared before.

        A synchronized backward pass waits for all ranks. So each rank has finished the latest step
        by now and, if its replicas differ, published its fingerprint.

        Args:
            optimizer: the optimizer.
            loss: the loss of the backward pass.
            counts_steps: whether this rank counts its steps, and is still checked. Every other rank
                would seem to be ahead of a rank that does not count.

        Raises:
            UsageError: replicas differ after the latest step, or another rank has made its next
                step without this backward pass.
        """
        self.check_latest_step()
        self._record_backward(optimizer, loss)
        if counts_steps:
            self._check_no_rank_is_ahead()

    def _record_backward(self, optimizer: Optimizer, loss: Tensor) -> None:
        """Count a backward pass that synchronizes gradients of the optimizer. Record its loss.

        The loss is recorded only if it has to be equal on all ranks.
        """
        trained_contracts = self._trained_contracts(optimizer)
        if any(contract.synchronizes() for contract in trained_contracts):
            self._synchronized_backwards += 1
        # Ranks may have different parts of a loss that is a DTensor.
        is_dtensor = local_tensor(loss) is not loss
        # Ranks that hold parts of the same layers run the same batch, so their losses are equal.
        must_be_equal = any(contract.ranks_of_layers for contract in trained_contracts)
        if must_be_equal and not is_dtensor:
            self._loss_digests += digests([loss])

    def _check_no_rank_is_ahead(self) -> None:
        """Raise if another rank has made its next step without the latest backward pass.

        The other rank has called ``optimizer.step()``, and then taken part in this synchronized
        backward pass. So its step lacks the gradients of this pass, which this rank has counted
        already.
        """
        # The first rank that finishes the next step publishes this.
        content = self._store.get_nowait(self._key("first", steps_ahead=1))
        if content is None:
            return
        published = _Published.from_bytes(content)
        has_stepped_too_early = published.synchronized_backwards < self._synchronized_backwards
        if has_stepped_too_early:
            raise UsageError(
                f"{self._class_name}.step() on rank {self._store.rank}",
                problem=f"rank {published.rank} has made step {self.steps + 1}, before this "
                "backward pass",
                expected="the same steps on all ranks",
                suggestion=f"no branch on the rank around optimizer.step(); {_TURN_OFF}",
            )

    def after_step(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Count a step with gradients, and compare its result with the rank that finished it first.

        Args:
            optimizer: the optimizer.
            trained: the parameters that the optimizer trains on this rank.

        Raises:
            UsageError: the replicas of this rank differ from those of the rank that finished the
                step first, or from those of a rank that has found a difference.
        """
        self.steps += 1
        if self._store.size == 1:
            return
        self._fingerprint = self._compute_fingerprint(optimizer, trained)
        self._loss_digests = []  # the fingerprint has these digests, so the next step starts anew
        if not self._fingerprint.names:
            return  # this rank has no value that has to be equal on all ranks
        values_of_this_rank = _Published(
            self._store.rank, self._fingerprint.numbers, self._synchronized_backwards
        )
        content = values_of_this_rank.to_bytes()
        # The rank that finishes the step first writes its values under this key. On every rank,
        # set_if_absent() returns the values of that rank.
        first = _Published.from_bytes(self._store.set_if_absent(self._key("first"), content))
        is_different = first.fingerprint != self._fingerprint.numbers
        if is_different:
            # This rank writes before it raises, so that the other ranks raise, too: they read this
            # key in check_latest_step().
            self._store.set(self._key("other"), content)
        # Before this rank raises or goes on: ranks that hold parts of the same layers need each
        # other in the next forward pass.
        self._wait_for_ranks_of_layers(optimizer)
        if is_different:
            self._raise_if_different(first)
        # This rank agrees with the first one. Another rank may have found a difference.
        self.check_latest_step()

    def _wait_for_ranks_of_layers(self, optimizer: Optimizer) -> None:
        """Wait until the ranks that hold parts of the same layers have compared the latest step.

        Otherwise an equal rank could go on to the next forward pass, and wait there for a rank that
        has raised. A rank that does not make the step is waited for in vain.
        """
        for contract in self._trained_contracts(optimizer):
            if contract.ranks_of_layers:
                topic = self._key("compared")
                self._store.publish(topic, True)
                self._store.read(topic, contract.ranks_of_layers, _MAX_WAIT_FOR_STEP)

    def check_latest_step(self) -> None:
        """Raise if a rank has found that its replicas differ after the latest step.

        That rank has written its fingerprint under the key "other". Ranks that agree with the first
        rank write nothing.
        """
        content = self._store.get_nowait(self._key("other"))
        if content is not None:
            self._raise_if_different(_Published.from_bytes(content))

    def _trained_contracts(self, optimizer: Optimizer) -> list[GradientContract]:
        """Return the contracts of the modules with parameters of the optimizer.

        The contracts of other models do not count: an old model may be garbage that only some ranks
        have collected.
        """
        trained_ids = _ids(parameters_of(optimizer))
        contracts: list[GradientContract] = []
        for contract in self._contracts:
            if not trained_ids.isdisjoint(_ids(contract.parameters().values())):
                contracts.append(contract)
        return contracts

    def _compute_fingerprint(self, optimizer: Optimizer, trained: list[Tensor]) -> _Fingerprint:
        """Return the fingerprint of this rank, of what has to be equal on all ranks.

        The fingerprint has a number for each of these:

        - each replicated parameter
        - the options of the optimizer, if it trains only sharded parameters of modules, whose
          shards differ between ranks
        - for each sharded parameter, whether it has a gradient
        - the losses since the latest step, if they were recorded

        The fingerprint is empty if there is none of these.

        Args:
            optimizer: the optimizer.
            trained: the parameters that the optimizer trains on this rank.
        """
        names = self._names_of_replicated(optimizer, trained)
        replicated = [parameter for parameter in trained if id(parameter) in names]
        names_of_replicated = [names[id(parameter)] for parameter in replicated]
        fingerprint = _Fingerprint(names_of_replicated, digests(replicated))
        trains_modules = not _ids_of_modules(self._contracts).isdisjoint(_ids(trained))
        has_only_shards = trains_modules and not replicated
        if has_only_shards:
            fingerprint.add("its options", f"{self._class_name} {_float_options(optimizer)}")
        self._add_gradients_of_shards(optimizer, fingerprint)
        if self._loss_digests:
            fingerprint.add(_LOSSES, str(self._loss_digests))
        return fingerprint

    def _add_gradients_of_shards(self, optimizer: Optimizer, fingerprint: _Fingerprint) -> None:
        """Add to a fingerprint which sharded parameters of the optimizer have a gradient.

        FSDP2 reduces the gradients of a module in one message without their names. So all ranks
        must have gradients of the same parameters, also of those whose shard here is empty.
        """
        ids_of_optimizer = _ids(parameters_of(optimizer))
        for contract in self._contracts:
            if not contract.is_sharded:
                continue
            for name, parameter in contract.parameters().items():
                if parameter.requires_grad and id(parameter) in ids_of_optimizer:
                    has_gradient = parameter.grad is not None
                    fingerprint.add(f"{_GRADIENT_OF}{name}", str(has_gradient))

    def _names_of_replicated(self, optimizer: Optimizer, trained: list[Tensor]) -> dict[int, str]:
        """Return the names of the parameters that have to be equal on all ranks, by id.

        These are the replicated parameters of all set-up modules, and the optimizer's parameters
        outside of set-up modules that have a gradient.

        Args:
            optimizer: the optimizer.
            trained: the parameters that the optimizer trains on this rank.
        """
        names: dict[int, str] = {}
        for contract in self._contracts:
            for name, parameter in contract.replicated().items():
                names[id(parameter)] = name
        # DTensors are left out: the code that has sharded them reduces their gradients.
        plain = [parameter for parameter in trained if local_tensor(parameter) is parameter]
        outside_of_modules = _ids_with_gradient(plain) - _ids_of_modules(self._contracts)
        for number, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) in outside_of_modules:
                names[id(parameter)] = (
                    f"parameter {number} of the optimizer, which no set-up module has"
                )
        return names

    def _key(self, writer: str, steps_ahead: int = 0) -> str:
        """Return the key in the store for what a rank writes after a step.

        Args:
            writer: ``"first"`` for the first rank, ``"other"`` for a rank that differs from it.
            steps_ahead: how many steps after the latest step of this rank the step is.
        """
        # Only ranks that hold the same replicated parameters have the same scope, and are compared.
        scope = "".join(contract.scope for contract in self._contracts)
        step = self.steps + steps_ahead
        return f"first steps{scope}/{self._name}/{step}/{writer}"

    def _raise_if_different(self, published: _Published) -> None:
        """Raise if another rank's fingerprint of the latest step differs from this rank's.

        Args:
            published: what the other rank has written to the store after the step.
        """
        different_names: list[str] = []
        # Not strict: on the other rank, another number of parameters outside of modules may have
        # gradients.
        for name, number, other_number in zip(
            self._fingerprint.names,
            self._fingerprint.numbers,
            published.fingerprint,
            strict=False,
        ):
            if number != other_number:
                different_names.append(name)
        if not different_names:
            return
        rank = self._store.rank
        request = f"step {self.steps} of {self._class_name} on rank {rank}"
        lower_rank, higher_rank = sorted((rank, published.rank))
        ranks = f"ranks {lower_rank} and {higher_rank}"
        if different_names == [_LOSSES]:
            raise UsageError(
                request,
                problem=f"the losses of {ranks} differ before it, although these ranks compute "
                "parts of the same layers for the same batch: a term of the loss is of the columns "
                "of one rank",
                expected="a loss of whole outputs, which is equal on all ranks of a split layer",
                suggestion='the lines "colwise_rep" and "rowwise_rep" of tp_plan for the layers '
                "before and behind the columns in the loss",
            )
        if all(name.startswith(_GRADIENT_OF) for name in different_names):
            names = [name.removeprefix(_GRADIENT_OF) for name in different_names]
            raise UsageError(
                request,
                problem=f"only one of {ranks} has gradients of {_join_names(names)}, and FSDP has "
                "added gradients of different parameters to each other",
                expected="the same parameters in the losses of all ranks",
                suggestion=f"{CALL_EVERY_BLOCK}; or, if all ranks call the same blocks, "
                "fabric.unwrap(model).set_reduce_scatter_unused_params(True) of torch 2.13",
            )
        names_of_replicas = [name for name in different_names if name != _LOSSES]
        raise UsageError(
            request,
            problem=f"the replicas of {ranks} differ after it: {_join_names(names_of_replicas)}",
            expected="the same changes on all ranks, by gradients of set-up modules from outside "
            "of no_backward_sync",
            suggestion=self._remedy(names_of_replicas),
        )

    def _remedy(self, names: list[str]) -> str:
        """Return what to write if the replicas of the parameters with these names differ."""
        remedy = (
            f"fabric.backward(loss_function(model(batch), target)); optimizer.step(); {_TURN_OFF}"
        )
        for contract in self._contracts:
            has_parameter = not contract.replicated().keys().isdisjoint(names)
            if has_parameter and contract.replica_remedy:
                remedy = contract.replica_remedy
        return remedy


class _StepsWithClearedGradients:
    """Counts the steps before which the user has cleared all gradients of the backward pass.

    Once a step had gradients, no later step counts: the loop clears them at the right time. If an
    error prevents a step, the next call of ``step()`` is a second try of the same step.

    Attributes:
        num_cleared: the number of cleared steps, including the one that is about to be made.
        is_step_cleared: whether the gradients of the step that is about to be made were cleared.
    """

    def __init__(self) -> None:
        self.num_cleared = 0
        self.is_step_cleared = False
        # Whether any step had a gradient that is not zero. before_step() sets it.
        self._has_stepped_with_gradient = False
        # Whether a backward pass since the latest step has left a gradient that is not zero.
        # after_backward() sets it.
        self._has_new_gradient = False

    def after_backward(self, optimizer: Optimizer) -> None:
        """Record whether a backward pass has left gradients."""
        self._has_new_gradient = has_gradients(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """Record whether the gradients of the next step were cleared."""
        if has_gradients(optimizer):
            self._has_stepped_with_gradient = True
        # If a step raises, torch does not call after_step(), which resets the attribute.
        is_second_try = self.is_step_cleared
        self.is_step_cleared = self._has_new_gradient and not self._has_stepped_with_gradient
        if self.is_step_cleared and not is_second_try:
            self.num_cleared += 1

    def after_step(self) -> None:
        """Record that the step was made."""
        self.is_step_cleared = False
        self._has_new_gradient = False


class _ClearedWindows:
    """Counts windows of ``fabric.accumulate`` of which only the last backward pass counts.

    The user has cleared the gradients of the earlier passes. Once gradients of a pass were kept for
    the next one, no later window counts: the loop then clears single micro-batches on purpose.

    Attributes:
        num_cleared: the number of such windows in a row, without the one whose step is about to be
            made.
    """

    def __init__(self) -> None:
        self.num_cleared = 0
        # Whether the latest backward pass has left gradients, to which later passes of the same
        # window should add theirs. after_backward() sets it, and a step resets it.
        self._has_open_gradient = False
        # Whether the user has cleared such gradients since the latest step.
        self._has_cleared = False
        # Whether such gradients have ever been kept for a later pass. A step does not reset it.
        self._has_kept = False

    def before_backward(self, optimizer: Optimizer) -> None:
        """Record whether the gradients of the earlier passes of the window are still there."""
        if not self._has_open_gradient:
            return
        if has_gradients(optimizer):
            self._has_kept = True
        else:
            self._has_cleared = True

    def after_backward(self, optimizer: Optimizer, is_window_open: bool) -> None:
        """Record whether a backward pass has left gradients.

        Args:
            optimizer: the optimizer.
            is_window_open: whether the window has more micro-batches.
        """
        self._has_open_gradient = is_window_open and has_gradients(optimizer)

    @property
    def is_step_partial(self) -> bool:
        """Whether a step now has only the gradients of the last backward pass of its window."""
        return self._has_cleared and not self._has_kept

    def after_step(self) -> None:
        """Record that the step was made."""
        if self.is_step_partial:
            self.num_cleared += 1
        else:
            self.num_cleared = 0
        self._has_open_gradient = False
        self._has_cleared = False


# [Note: Training checks]
# Some mistakes raise no error and only spoil the result: gradients that never arrive or are not
# reduced yet, and replicas that drift apart. Hooks around an optimizer's first steps check for them
# and are then removed.
#
# The replicas are compared by *fingerprints*, through the store and never by a collective. After a
# step, each rank computes a fingerprint of its replicated parameters. The first rank writes its
# fingerprint to the store under the key "first". A rank with another fingerprint writes its own
# under the key "other". Every rank reads the key "other" after the next backward pass, which needs
# every rank. So the store, which is in the memory of one node, holds at most two fingerprints for
# each step, however many ranks there are. The ranks of split layers need each other in the next
# forward pass already. So they wait for each other after the step, and read the key "other" then.
#
# Only certain mistakes are errors. A missing gradient is an error if the strategy needs the
# gradient, and otherwise a warning at the last of these steps. Parameters outside of set-up modules
# count as replicas, since the user may synchronize them: they must not differ.
#
# One hook on the first steps of all optimizers of the process finds what was not set up: an
# optimizer of parameters that a model no longer has, or a module or loader that is separate on each
# rank. The hook also finds a module that is trained in evaluation mode.
class TrainingChecks:
    """The checks of one optimizer, until it has stepped twice.

    The checks find gradients that never arrive or are not reduced, and replicas that drift apart.
    Hooks of the optimizer hold the checks. The checks hold the optimizer weakly.

    Args:
        optimizer: the optimizer.
        name: identifies the optimizer in the store. It is the same on all ranks.
        contracts: the contracts of the set-up modules.
        store: the store in which ranks compare fingerprints.
        backward: the hooks around backward passes.
        window_check: raises if the optimizer may not step at the current micro-batch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        contracts: Contracts,
        store: JobStore,
        *,
        backward: Hooks,
        window_check: "_WindowCheck",
    ) -> None:
        """Add the hooks around the steps of the optimizer and around backward passes."""
        self._optimizer = ref(optimizer)
        self._class_name = type(optimizer).__name__
        self._contracts = contracts
        self._rank = store.rank
        self._window_check = window_check
        self._comparison = _FingerprintComparison(self._class_name, name, contracts, store)
        self._cleared_steps = _StepsWithClearedGradients()
        self._cleared_windows = _ClearedWindows()
        # The number of calls of step(), also of steps without gradients.
        self._step_calls = 0
        # Whether a step was made while this rank had only empty shards of what the optimizer
        # trains. Then this rank has counted fewer steps than the others.
        self._has_missed_steps = False
        self._num_backward_passes = 0
        # The number of latest steps in a row before which no parameter had ever got a gradient.
        self._steps_without_gradient = 0
        # The ids of the parameters that have had a gradient so far. _record_gradients() adds them.
        self._ids_that_had_gradient: set[int] = set()
        self._hooks = ExitStack()
        before_step = optimizer.register_step_pre_hook(self._before_step)
        self._hooks.callback(before_step.remove)
        after_step = optimizer.register_step_post_hook(self._after_step)
        self._hooks.callback(after_step.remove)
        backward.before.append(self._before_backward)
        self._hooks.callback(backward.before.remove, self._before_backward)
        backward.after.append(self._after_backward)
        self._hooks.callback(backward.after.remove, self._after_backward)

    def close(self) -> None:
        """Remove all hooks.

        Do not call this in a hook of the optimizer: torch iterates over the hooks then.
        """
        self._hooks.close()

    @property
    def _is_finished(self) -> bool:
        """Whether all steps were checked, or the optimizer does not exist any more."""
        # Only steps with gradients count. A step that is skipped after an overflow has none.
        has_made_steps = self._comparison.steps >= _CHECKED_STEPS
        has_made_calls = self._step_calls > _MAX_STEP_CALLS
        is_over = has_made_steps or has_made_calls or self._has_missed_steps
        return is_over or self._optimizer() is None

    # -- around a backward pass -----------------------------------------------------------------

    def _before_backward(self) -> None:
        """Record which gradients were kept. ``Fabric.backward`` calls this before each pass."""
        optimizer = self._optimizer()
        if optimizer is not None:
            # Under FSDP, the user may have cleared gradients of gathered parameters. This clears
            # those of the optimizer's parameters, too.
            for contract in self._contracts:
                contract.take_back_gradients()
            self._cleared_windows.before_backward(optimizer)

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Check the latest step and the gradients. ``Fabric.backward`` calls this after each pass.

        Other ranks may find a difference in the latest step until this backward pass. So the hooks
        stay until the backward pass after the last checked step.
        """
        optimizer = self._optimizer()  # None if the user has dropped the optimizer
        if error is None and optimizer is not None:
            self._num_backward_passes += 1
            # Gradients are recorded here and before the step: the user may clear them in between.
            self._record_gradients(optimizer)
            self._cleared_steps.after_backward(optimizer)
            self._cleared_windows.after_backward(optimizer, self._window_check.is_window_open)
            # A rank that has only empty shards has no gradient, and counts no steps.
            had_gradient = bool(self._ids_that_had_gradient)
            counts_steps = had_gradient and not self._is_finished
            self._comparison.after_backward(optimizer, loss, counts_steps=counts_steps)
        if self._is_finished:
            # A hook of the optimizer could not do this, since torch iterates over the hooks then.
            self.close()

    # -- before a step --------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Check the gradients of a step. Called by torch as a pre-hook of the step.

        Args:
            optimizer: the optimizer.
            args: the arguments of the step, with the optimizer as the first one.
            kwargs: the keyword arguments of the step.
        """
        self._step_calls += 1
        # A rank may have published a different fingerprint since the latest backward pass.
        self._comparison.check_latest_step()
        # The checks below read which parameters have had a gradient so far.
        self._record_gradients(optimizer)
        trained_ids = _ids(_trainable_parameters(optimizer))
        is_first_step = self._step_calls == 1
        if is_first_step:
            self._check_values(trained_ids)
        # Raises if the optimizer may not step at the current micro-batch of a window.
        self._window_check.check(optimizer)
        # After the last checked step, this hook stays until the next backward pass removes it.
        # A closure computes the gradients within the step, so they cannot be checked before it.
        if self._is_finished or has_closure(args, kwargs):
            return
        # The checks below do not depend on each other. If several would raise, the first one does.
        for contract in self._contracts:
            self._check_reduced(contract, trained_ids)
            self._check_missing(contract, trained_ids)
        self._check_some_gradient(trained_ids)
        self._warn_of_no_backward(trained_ids)
        self._check_not_cleared(optimizer)
        self._check_whole_window()

    def _check_values(self, trained_ids: set[int]) -> None:
        """Raise if parameters of a trained model are NaN, as after ``empty_init=True``.

        Args:
            trained_ids: the ids of the parameters that the optimizer trains on this rank. A model
                without any of them is not checked.
        """
        for contract in self._contracts:
            parameters = contract.parameters().values()
            is_trained = not trained_ids.isdisjoint(_ids(parameters))
            if not is_trained:
                continue
            nan_ids = _ids(parameter for parameter in parameters if has_nan(parameter))
            if nan_ids:
                self._raise_usage_error(
                    problem="these are not a number before the first step: "
                    f"{_names_of(contract, nan_ids)}",
                    expected="a checkpoint for a module that was built with empty_init=True, or "
                    "values of the user's own",
                    suggestion='fabric.load(path, {"model": model}) after fabric.setup(...); or '
                    "fabric.init_module()",
                )

    def _check_reduced(self, contract: GradientContract, trained_ids: set[int]) -> None:
        """Raise if the optimizer would step with gradients that are not synchronized yet.

        Args:
            contract: the contract of a set-up module.
            trained_ids: the ids of the parameters that the optimizer trains on this rank.
        """
        # unreduced() returns the parameters whose gradients a step cannot see yet.
        unreduced_ids = _ids(contract.unreduced()) & trained_ids
        if unreduced_ids:
            self._raise_usage_error(
                problem="the last backward pass did not reduce the gradients of "
                f"{_names_of(contract, unreduced_ids)}",
                expected="a step after a backward pass with synchronization",
                suggestion="with fabric.no_backward_sync(model, enabled=accumulating): around all "
                "micro-batches but the last",
            )

    def _check_missing(self, contract: GradientContract, trained_ids: set[int]) -> None:
        """Raise or warn if some, but not all, parameters of a model have never got a gradient.

        If the strategy needs a gradient for every parameter, this raises. Otherwise rank 0 warns
        once, before the last checked step. A model without any gradient is not checked here, but in
        :meth:`_check_some_gradient`.

        Args:
            contract: the contract of a set-up module.
            trained_ids: the ids of the parameters that the optimizer trains on this rank.
        """
        trained_in_module = _ids(contract.parameters().values()) & trained_ids
        without_gradient = trained_in_module - self._ids_that_had_gradient
        have_all_or_none = not without_gradient or without_gradient == trained_in_module
        if have_all_or_none or self._num_backward_passes == 0:
            return
        # The user has said that some parameters may get no gradient.
        if contract.expects_unused:
            return
        names = _names_of(contract, without_gradient)
        # Only DDP needs the forward pass. It synchronizes once all parameters have gradients.
        if contract.needs_forward:
            self._raise_usage_error(
                problem=f"no gradient has arrived at {names}, and without these the others are not "
                "synchronized",
                expected="every parameter that requires a gradient gets one in each backward pass",
                suggestion=f"{_GATHER_WITH_GRADIENTS}; else "
                'strategy="ddp_find_unused_parameters_true", or '
                "parameter.requires_grad_(False) before setup",
            )
        # The steps that were made. The step that is about to be made is not counted yet.
        is_last_checked_step = self._comparison.steps == _CHECKED_STEPS - 1
        if is_last_checked_step and self._rank == 0:
            warn_user(
                f"no gradient has arrived in the first {_CHECKED_STEPS} steps of "
                f"{self._class_name} at {names}: they are not trained; {_GATHER_WITH_GRADIENTS}, "
                f"parameter.requires_grad_(False) for these, or {_TURN_OFF}"
            )

    def _check_some_gradient(self, trained_ids: set[int]) -> None:
        """Raise if no parameter of the optimizer has got a gradient before several steps in a row.

        A single step without gradients is not an error.

        Args:
            trained_ids: the ids of the parameters that the optimizer trains on this rank.
        """
        # _warn_of_no_backward() is about steps before the first backward pass. A rank that has only
        # empty shards trains nothing, and gets no gradient.
        if self._num_backward_passes == 0 or not trained_ids:
            return
        has_any_gradient = not trained_ids.isdisjoint(self._ids_that_had_gradient)
        if has_any_gradient:
            self._steps_without_gradient = 0
            return
        self._steps_without_gradient += 1
        if self._steps_without_gradient >= _CHECKED_STEPS:
            self._raise_usage_error(
                problem="no gradient has arrived at any of its parameters in "
                f"{self._num_backward_passes} backward pass(es)",
                expected="an optimizer of parameters that the loss is computed from",
                suggestion="loss = loss_function(model(batch), target); fabric.backward(loss); "
                f"{_GATHER_WITH_GRADIENTS}; {_TURN_OFF}",
            )

    def _warn_of_no_backward(self, trained_ids: set[int]) -> None:
        """Warn on rank 0 at the second step if there was no backward pass at all.

        It is no error: a loop of empty steps may move a scheduler forward.

        Args:
            trained_ids: the ids of the parameters that the optimizer trains on this rank.
        """
        had_backward = self._num_backward_passes > 0 or bool(self._ids_that_had_gradient)
        if had_backward or not trained_ids:
            return
        if self._step_calls == _CHECKED_STEPS and self._rank == 0:
            warn_user(
                f"{self._class_name} has made {_CHECKED_STEPS} steps without a backward pass, "
                "which change nothing: fabric.backward(loss) before optimizer.step(), or "
                f"{_TURN_OFF}"
            )

    def _check_not_cleared(self, optimizer: Optimizer) -> None:
        """Raise at the second step whose gradients were all cleared before the step.

        A single such step is not an error.
        """
        self._cleared_steps.before_step(optimizer)
        num_cleared = self._cleared_steps.num_cleared
        if self._cleared_steps.is_step_cleared and num_cleared >= _CHECKED_STEPS:
            self._raise_usage_error(
                problem="all gradients of the backward pass were cleared before the step, "
                f"{num_cleared} times in a row, so that the step changes nothing",
                expected="zero_grad() before backward() or after step()",
                suggestion="fabric.backward(loss); optimizer.step(); optimizer.zero_grad(); "
                f"{_TURN_OFF}",
            )

    def _check_whole_window(self) -> None:
        """Raise at the second step that has only the gradients of the last micro-batch.

        A single such step is not an error. With several optimizers, the loss of one of them may
        leave gradients that are meant to be cleared.
        """
        num_cleared = self._cleared_windows.num_cleared + 1
        is_repeated = self._cleared_windows.is_step_partial and num_cleared >= _CHECKED_STEPS
        if is_repeated and self._window_check.has_one_optimizer:
            self._raise_usage_error(
                problem="the gradients of all micro-batches but the last were cleared within the "
                f"window of fabric.accumulate, in {num_cleared} windows in a row",
                expected="zero_grad() after the step at the last micro-batch of each window",
                suggestion="if last: optimizer.step(); optimizer.zero_grad(), and no other "
                f"zero_grad() in the loop; {_TURN_OFF}",
            )

    def _record_gradients(self, optimizer: Optimizer) -> None:
        """Add the parameters that have a gradient now to those that have had one so far."""
        trained = _trainable_parameters(optimizer)
        self._ids_that_had_gradient |= _ids_with_gradient(trained)

    def _raise_usage_error(self, *, problem: str, expected: str, suggestion: str) -> NoReturn:
        """Raise a UsageError about a step of the optimizer."""
        raise UsageError(
            f"{self._class_name}.step() on rank {self._rank}",
            problem=problem,
            expected=expected,
            suggestion=suggestion,
        )

    # -- after a step ---------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Count a step, and compare its result with other ranks. Called by torch as a post-hook.

        Raises:
            UsageError: the replicas of this rank and of another rank differ.
        """
        self._cleared_steps.after_step()
        self._cleared_windows.after_step()
        trained = _trainable_parameters(optimizer)
        # A step that is skipped after an overflow has no gradients, and is not counted.
        has_gradient = bool(_ids_with_gradient(trained))
        if self._is_finished:
            return
        if has_gradient:
            self._comparison.after_step(optimizer, trained)
        elif not trained:
            # With only empty shards, this rank does not count a step that other ranks count. It may
            # get elements later: the user may add parameters to the optimizer, or unfreeze some.
            # Then its steps would have other numbers than those of the other ranks, so the checks
            # end.
            self._has_missed_steps = any(
                parameter.requires_grad for parameter in parameters_of(optimizer)
            )


class _WindowCheck:
    """The check that optimizers step at the end of a window of ``fabric.accumulate``.

    A *window* is a number of micro-batches whose gradients are added up for one step.

    Args:
        optimizers: the set-up optimizers. Later ones are seen, too.
        session: the session, which knows the current micro-batch.
        rank: the rank of this process, for the error.
    """

    def __init__(
        self, optimizers: Collection[Optimizer], session: TrainingSession, rank: int
    ) -> None:
        self._optimizers = optimizers
        self._session = session
        self._rank = rank
        # The set-up optimizers that have stepped before the end of a window.
        self._stepped_too_early: WeakSet[Optimizer] = WeakSet()

    @property
    def has_one_optimizer(self) -> bool:
        """Whether a single optimizer is set up."""
        return len(self._optimizers) == 1

    @property
    def is_window_open(self) -> bool:
        """Whether the window of the current micro-batch has more micro-batches."""
        return self._session.open_micro_batch() is not None

    def check(self, optimizer: Optimizer) -> None:
        """Raise if every set-up optimizer has stepped before the end of some window.

        One of several optimizers, such as that of a critic, may step more often than the others.

        Args:
            optimizer: an optimizer, before its step.
        """
        micro_batch = self._session.open_micro_batch()
        has_gradient = bool(_ids_with_gradient(_trainable_parameters(optimizer)))
        if micro_batch is None or not has_gradient or optimizer not in self._optimizers:
            return
        self._stepped_too_early.add(optimizer)
        have_all_stepped_too_early = len(self._stepped_too_early) >= len(self._optimizers)
        if not have_all_stepped_too_early:
            return
        number, window_length = micro_batch
        raise UsageError(
            _request(optimizer, self._rank),
            problem=f"it is made at micro-batch {number} of {window_length} of a window of "
            "fabric.accumulate, with the gradients of only a part of the window",
            expected="a step at the last micro-batch of each window",
            suggestion="if last: optimizer.step(); optimizer.zero_grad(). Or "
            "fabric.accumulate(loader, steps=1), or a loop over the loader itself, for a step "
            f"after each batch; {_TURN_OFF}",
        )


# See [Note: Training checks].
class SetupChecks:
    """Checks of the first steps of all optimizers, for modules and loaders that are not set up.

    A set-up module that is trained in evaluation mode is found here, too.

    This object also starts the :class:`TrainingChecks` of each set-up optimizer.

    Args:
        session: the session of the job.
        contracts: the contracts of the set-up modules. Later ones are seen, too.
        store: the store in which ranks compare fingerprints.
        backward: the hooks around backward passes.
        optimizers: the set-up optimizers. Later ones are seen, too.
        loaders: the set-up loaders. Later ones are seen, too.
    """

    def __init__(
        self,
        session: TrainingSession,
        contracts: Contracts,
        store: JobStore,
        backward: Hooks,
        *,
        optimizers: Collection[Optimizer],
        loaders: Collection[object],
    ) -> None:
        """Add the hooks around the steps of all optimizers and around backward passes."""
        self._session = session
        self._contracts = contracts
        self._store = store
        self._backward = backward
        self._optimizers = optimizers
        self._loaders = loaders
        self._window_check = _WindowCheck(optimizers, session, store.rank)
        self._clipping_check = ClippingCheck(session.pending_change)
        self._evaluation_mode_check = EvaluationModeCheck(contracts)
        # The number of calls of step() of all optimizers.
        self._step_calls = 0
        # The optimizers of the process that have begun a step, also those that are not set up.
        self._stepped_optimizers: WeakSet[Optimizer] = WeakSet()
        # Numbers the set-up optimizers, which are set up in the same order on all ranks.
        self._optimizer_numbers = count()
        self._has_set_up_optimizer = False
        # Removes the hooks of this object. Closed after the first steps of all optimizers.
        self._hooks = ExitStack()
        # This stack also removes the hooks of the TrainingChecks of each optimizer.
        self._all_hooks = ExitStack()
        self._all_hooks.callback(self._hooks.close)
        # torch calls this hook before the step of any optimizer of the process.
        before_step = register_optimizer_step_pre_hook(self._before_step)
        self._hooks.callback(before_step.remove)
        backward.after.append(self._after_backward)
        self._hooks.callback(backward.after.remove, self._after_backward)
        # None if the precision does not scale losses, or after the first steps.
        self._unscaled_loss_check: UnscaledLossCheck | None = None
        # The argument None stands for parameters that no set-up optimizer has. For these, a loss
        # scale is the only change that can be pending: loss weights are not looked at.
        has_loss_scale = session.pending_change(None) is not None
        if has_loss_scale:
            self._unscaled_loss_check = UnscaledLossCheck(optimizers, contracts, self._hooks)
            backward.before.append(self._before_backward)
            self._hooks.callback(backward.before.remove, self._before_backward)

    def watch(self, optimizer: Optimizer) -> None:
        """Check the first steps of a set-up optimizer.

        Called at setup, and again after the user has added parameter groups to the optimizer.
        """
        self._has_set_up_optimizer = True
        if self._unscaled_loss_check is not None:
            self._unscaled_loss_check.watch(optimizer)
        self._start_checks(optimizer, name=str(next(self._optimizer_numbers)))

    def on_param_groups_changed(self, optimizer: Optimizer) -> None:
        """Check an optimizer to which the user has added parameters after setup.

        The flight recorder calls this method in a step pre-hook of the optimizer. The optimizer
        gets new :class:`TrainingChecks` only after the next backward pass: they add hooks, and
        torch iterates over its hooks now.

        Raises:
            FabricError: the optimizer cannot be set up with these parameters.
        """
        self._session.check_optimizers([optimizer])
        optimizer_ref = ref(optimizer)

        def watch_after_backward(*_: object) -> None:
            """Start the checks, once. ``Fabric.backward`` calls this after its pass."""
            # This is allowed, since Fabric.backward() iterates over a copy of the list.
            self._backward.after.remove(watch_after_backward)
            extended_optimizer = optimizer_ref()
            if extended_optimizer is not None:
                self.watch(extended_optimizer)

        self._backward.after.append(watch_after_backward)

    def before_completion(self, optimizer: Optimizer) -> None:
        """Warn if the user has read gradients that are not complete yet.

        Clipping or a step is about to complete them: to average them, or to remove a loss scale or
        loss weights. The code is the same on all ranks as a rule, so the first rank warns for all.
        Only the first steps are checked, counted over all optimizers together.
        """
        if self._store.rank == 0 and self._step_calls <= _CHECKED_STEPS_OF_ALL:
            self._clipping_check.warn_of_reads(optimizer, _TURN_OFF)

    def close(self) -> None:
        """Remove the hooks of all checks.

        Do not call this in a hook of an optimizer: torch iterates over the hooks then.
        """
        self._all_hooks.close()

    def _start_checks(self, optimizer: Optimizer, name: str) -> None:
        """Start the :class:`TrainingChecks` of one optimizer. :meth:`close` ends them.

        Args:
            optimizer: the optimizer.
            name: identifies the optimizer in the store. It is the same on all ranks.
        """
        checks = TrainingChecks(
            optimizer,
            name,
            self._contracts,
            self._store,
            backward=self._backward,
            window_check=self._window_check,
        )
        self._all_hooks.callback(checks.close)

    def _before_backward(self) -> None:
        """Check for losses that were not scaled. ``Fabric.backward`` calls this before its pass."""
        if self._unscaled_loss_check is not None:
            self._unscaled_loss_check.before_backward(
                f"fabric.backward(loss) on rank {self._store.rank}"
            )

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Record the gradients. ``Fabric.backward`` calls this after each pass."""
        self._clipping_check.record(self._optimizers)
        if self._unscaled_loss_check is not None:
            self._unscaled_loss_check.after_backward()
        if self._step_calls >= _CHECKED_STEPS_OF_ALL:
            # In _before_step(), the hooks could not be removed: torch iterates over them.
            self._hooks.close()
            self._unscaled_loss_check = None

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Check for what was not set up. Called by torch before the step of any optimizer."""
        self._step_calls += 1
        if self._step_calls > _CHECKED_STEPS_OF_ALL:
            return  # the next backward pass removes this hook
        is_first_step = optimizer not in self._stepped_optimizers
        # Before the checks below, which have to know all optimizers that step.
        self._stepped_optimizers.add(optimizer)
        trained = _trainable_parameters(optimizer)
        if optimizer in self._optimizers:
            self._check_incomplete_gradients(optimizer)
        else:
            # Raises if the strategy could not set the optimizer up.
            self._session.check_optimizers([optimizer])
        # A closure computes the gradients within the step, so they cannot be looked at here.
        if not has_closure(args, kwargs):
            self._check_parameters_in_use(optimizer, trained)
        # The mode is the same on all ranks as a rule, so the first rank warns for all.
        if self._store.rank == 0:
            step = f"{type(optimizer).__name__}.step()"
            self._evaluation_mode_check.check(_ids_with_gradient(trained), step, _TURN_OFF)
        if is_first_step and self._store.size > 1:
            if self._is_without_setup(trained):
                self._check_replicas_without_setup(optimizer, trained)
            else:
                self._check_loaders(trained)

    def _check_incomplete_gradients(self, optimizer: Optimizer) -> None:
        """Check for gradients that were unscaled, clipped or read before they are complete.

        The hooks that complete them run after this one.

        Args:
            optimizer: a set-up optimizer, before its step.
        """
        request = _request(optimizer, self._store.rank)
        if self._unscaled_loss_check is not None:
            self._unscaled_loss_check.check(optimizer, request)
        self._clipping_check.check(optimizer, request)
        self.before_completion(optimizer)

    def _check_parameters_in_use(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Raise if an optimizer has parameters that a model has replaced by others.

        This is the case if two conditions hold:

        - A parameter of the optimizer belongs to no set-up module and has no gradient.
        - A parameter of a set-up module has a gradient and belongs to no optimizer.

        Args:
            optimizer: the optimizer that is about to step.
            trained: the parameters that it trains on this rank.
        """
        without_gradient = _ids(trained) - _ids_with_gradient(trained)
        ids_of_modules = _ids_of_modules(self._contracts)
        has_replaced_parameter = bool(without_gradient - ids_of_modules)
        # Gradients outside of set-up modules belong to a model that is not set up, so that this
        # optimizer is no case for this error.
        trains_other_model = bool(_ids_with_gradient(trained) - ids_of_modules)
        if trains_other_model or not has_replaced_parameter:
            return
        # The ids of the parameters of all optimizers that are set up or have stepped.
        in_optimizers: set[int] = set()
        for other_optimizer in (*self._optimizers, *self._stepped_optimizers):
            in_optimizers |= _ids(_trainable_parameters(other_optimizer))
        for contract in self._contracts:
            untrained_ids = _ids_with_gradient(contract.parameters().values()) - in_optimizers
            if untrained_ids:
                raise UsageError(
                    _request(optimizer, self._store.rank),
                    problem="no gradient has arrived at parameters of it that no set-up module "
                    f"has, and no optimizer has {_names_of(contract, untrained_ids)}",
                    expected="an optimizer of the parameters that the module has when it is set up",
                    suggestion="optimizer = torch.optim.SGD(model.parameters()) after a layer is "
                    "replaced, then fabric.setup(...)",
                )

    def _is_without_setup(self, trained: list[Tensor]) -> bool:
        """Return whether parameters are trained although nothing was set up.

        Args:
            trained: the parameters that an optimizer trains on this rank.
        """
        if self._contracts or self._has_set_up_optimizer:
            return False
        # Only parameters of modules count. Plain tensors may be meant to differ between ranks, and
        # torch synchronizes sharded parameters, which are DTensors.
        return any(type(parameter) is nn.Parameter for parameter in trained)

    def _check_replicas_without_setup(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Warn on rank 0 that each rank has its own model, and check the replicas from now on.

        The checks are the same as for a set-up optimizer. They raise if the replicas differ.

        Args:
            optimizer: the optimizer, before its first step.
            trained: the parameters that it trains on this rank.
        """
        # A hook of all optimizers calls this method. torch then runs the hooks of this optimizer,
        # also those that _start_checks() adds now, so this step is checked, too.
        # Ranks are compared if their optimizers have the same name: these have stepped in the same
        # order, and are of the same size.
        num_elements = sum(parameter.numel() for parameter in trained)
        self._start_checks(optimizer, name=f"{self._step_calls} {num_elements}")
        if self._store.rank == 0:
            self._warn(
                "each has a model of its own: model, optimizer = fabric.setup(model, optimizer)"
            )

    def _check_loaders(self, trained: list[Tensor]) -> None:
        """Warn on rank 0 if each rank trains a set-up module on the whole dataset.

        Args:
            trained: the parameters that an optimizer trains on this rank.
        """
        trains_module = bool(_ids_with_gradient(trained) & _ids_of_modules(self._contracts))
        if self._store.rank != 0 or not trains_module or self._loaders:
            return
        datasets = datasets_iterated_in_full()
        if datasets:
            self._warn(
                f"each reads the whole {datasets[-1]}: loader = fabric.setup_dataloaders(loader)"
            )

    def _warn(self, problem: str) -> None:
        """Warn that all ranks do the same work.

        Args:
            problem: what each process does, and what to write instead.
        """
        warn_user(f"of {self._store.size} processes {problem}; or {_TURN_OFF}")


def check_same_model(
    communicator: Communicator,
    root: nn.Module,
    error: FabricError | None = None,
    plan: object = None,
) -> None:
    """Raise on every rank if the models differ, or if a rank has an error.

    Collective: every rank must call it, also a rank that has an error.

    Args:
        communicator: the communicator of all ranks.
        root: the model.
        error: the error because of which this rank cannot set up the model. None, the default, if
            there is none.
        plan: how each submodule will be set up. Plans are compared by their ``repr``.

    Raises:
        UsageError: the models or plans differ.
        FabricError: the error of the first rank that has one.
    """
    # In a dry run, new tensors are fake and have no values.
    with real_tensors():
        digest = 0  # means that this rank has an error
        if error is None:
            digest = _digest(root, plan)
        message = torch.tensor(digest, device=communicator.device)
        rank_digests = communicator.run(Collective(Operation.ALL_GATHER, message)).tolist()
    if 0 in rank_digests:
        # A rank has an error: _digest() is never 0. This call sends the error to all ranks, and
        # raises it on each.
        communicator.gather_objects(None, error=error)
    for rank, rank_digest in enumerate(rank_digests):
        if rank_digest != rank_digests[0]:
            raise UsageError(
                f"setup({type(root).__name__}) on rank {communicator.rank}",
                problem=f"it is another model on rank {rank} than on rank 0: the names, shapes or "
                "dtypes of its parameters and buffers differ, or the submodules to set up",
                suggestion="build the model in the same way on all ranks",
            )


def _digest(root: nn.Module, plan: object) -> int:
    """Return a nonzero digest of a model's layout and of a plan. It fits into an int64.

    Two models have the same layout if their parameters and buffers have the same names, shapes,
    dtypes, types and flags ``requires_grad``, and the same names share a tensor.

    Args:
        root: the model.
        plan: how each submodule will be set up. Its ``repr`` counts.
    """
    tensors: list[tuple[str, Tensor]] = [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
    # A tensor with several names gets one number, by which the names show that they share it.
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(tensors)}
    layout: list[object] = []
    for name, tensor in tensors:
        shape = None  # of a lazy parameter, which raises if asked for its shape
        if not is_lazy(tensor):
            shape = tensor.shape
        number = numbers[id(tensor)]
        layout.append((name, number, shape, tensor.dtype, tensor.requires_grad, type(tensor)))
    content = repr((layout, plan)).encode()
    # 7 bytes, so that the number fits into an int64. 1 is added, since 0 stands for an error.
    return 1 + int.from_bytes(hashlib.sha256(content).digest()[:7])


def _request(optimizer: Optimizer, rank: int) -> str:
    """Return the text of an error for the call that it is about."""
    return f"{type(optimizer).__name__}.step() on rank {rank}"


def _ids(parameters: Iterable[Tensor]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _ids_with_gradient(parameters: Iterable[Tensor]) -> set[int]:
    return _ids(parameter for parameter in parameters if parameter.grad is not None)


def _ids_of_modules(contracts: Iterable[GradientContract]) -> set[int]:
    """Return the ids of the parameters of all set-up modules."""
    ids: set[int] = set()
    for contract in contracts:
        ids |= _ids(contract.parameters().values())
    return ids


def _float_options(optimizer: Optimizer) -> list[tuple[str, float]]:
    """Return the options of an optimizer that are floats, such as the learning rate.

    Ranks compare the options as texts. Other options are left out: two equal options, such as two
    functions, may have different texts.
    """
    options: list[tuple[str, float]] = []
    for group in optimizer.param_groups:
        for key, value in group.items():
            if type(value) is float:
                options.append((key, value))
    return options


def _trainable_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer that can have a gradient on this rank."""
    parameters: list[Tensor] = []
    for parameter in parameters_of(optimizer):
        # A rank with an empty shard of a parameter gets no gradient of the parameter.
        is_empty = local_tensor(parameter).numel() == 0
        if parameter.requires_grad and not is_empty:
            parameters.append(parameter)
    return parameters


def _names_of(contract: GradientContract, ids: set[int]) -> str:
    """Return the names of a module's parameters with these ids, for an error."""
    names = [name for name, parameter in contract.parameters().items() if id(parameter) in ids]
    return f"{_join_names(names)} of {contract.title}"


def _join_names(names: Iterable[str]) -> str:
    return shorten(", ".join(names), _MAX_NAMES_CHARACTERS, placeholder=" ...")
