"""A check of changes of parameters that no step of a set-up optimizer makes."""

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fabric._torch import in_place_version, leaves_of_graph, local_tensor
from fabric.contract import GradientContract
from fabric.diagnostics.digest import digests
from fabric.diagnostics.loss_checks import LossCheck
from fabric.errors import UsageError
from fabric.hooks import Hooks
from fabric.optim.loss_scaler import has_closure
from fabric.store import JobStore
from fabric.tree import parameters_of

__all__ = ["HandStepCheck"]

# More than one backward pass for each step, since a step may accumulate several losses.
_CHECKED_LOSSES = 12
# A loop that has not stepped by then may never step.
_MAX_LOSSES = 200
# The number of elements of each parameter that are compared.
_SAMPLE_ELEMENTS = 1000
# The largest cosine, between a change and the gradient, of a step against the gradient. A multiple
# of the gradient has -1, and a step of Adam has about -0.8.
_MAX_COSINE = -0.5
_MAX_NAMES_CHARACTERS = 400
_OUTSIDE_MODULES = "that no set-up module has"
_TURN_OFF = "Fabric(check_training=False) if this is meant"


@dataclass(frozen=True)
class _Sample:
    """Some elements of a parameter and of its gradient after a backward pass.

    Attributes:
        values: elements of the parameter.
        gradient: the elements of the gradient at the same positions.
        is_of_weighted_loss: whether the loss of the backward pass had a weight.
    """

    values: Tensor
    gradient: Tensor
    is_of_weighted_loss: bool


class _Change(NamedTuple):
    """A parameter that was changed since its sample was taken.

    Attributes:
        name: the names of the parameter and of its module, for errors.
        parameter: the parameter.
        sample: the sample, from before the change.
    """

    name: str
    parameter: Tensor
    sample: _Sample


class _GradientSamples:
    """The samples of parameters, and of the gradients that they got in backward passes.

    A *sample* has some elements of a parameter and of its gradient. A parameter that differs from
    its sample was changed by hand, since the samples of the parameters with which an optimizer
    steps are dropped.

    Args:
        contracts: the contracts of the set-up modules. Later ones are seen, too.

    Attributes:
        has_weight: whether the latest loss had a weight.
    """

    def __init__(self, contracts: Collection[GradientContract]) -> None:
        self.has_weight = False
        self._contracts = contracts
        # The _Sample of each parameter.
        self._samples = WeakTensorKeyDictionary()
        # The leaves of the graphs of the losses so far. This is a set: all values are None.
        self._leaves = WeakTensorKeyDictionary()
        # The version of each parameter's gradient before the backward pass, by id of the parameter.
        self._versions_before: dict[int, object] = {}
        # The ids of the parameters of optimizers whose steps have closures. after_backward() takes
        # no samples of them.
        self._ids_with_closures: set[int] = set()

    def before_backward(self, loss: Tensor, has_weight: bool) -> None:
        """Record the leaves of a loss, and the versions of all gradients.

        Args:
            loss: the loss.
            has_weight: whether the user has given a weight for it.
        """
        self.has_weight = has_weight
        for leaf in leaves_of_graph(loss):
            self._leaves[leaf] = None
        self._versions_before = {
            id(tensor): _gradient_version(tensor) for tensor in self._tensors_to_sample()
        }

    def after_backward(self) -> None:
        """Take samples of the parameters that got a gradient in the backward pass."""
        for tensor in self._tensors_to_sample():
            version = _gradient_version(tensor)  # None without a gradient
            has_new_gradient = version != self._versions_before.get(id(tensor))
            # A step with a closure itself changes the parameters between backward passes.
            steps_with_closure = id(tensor) in self._ids_with_closures
            if version is None or not has_new_gradient or steps_with_closure:
                continue
            self.take(tensor)

    def take(self, tensor: Tensor) -> None:
        """Take a sample of a tensor and of its gradient, if it has elements on this rank."""
        if _has_elements(tensor):
            assert tensor.grad is not None
            self._samples[tensor] = _Sample(
                values=_sampled(tensor),
                gradient=_sampled(tensor.grad),
                is_of_weighted_loss=self.has_weight,
            )

    def drop(self, parameter: Tensor) -> _Sample | None:
        """Drop the sample of a parameter, and return it. None if there is none."""
        return self._samples.pop(parameter, None)

    def stop_sampling_after_backward(self, optimizer: Optimizer) -> None:
        """Take no more samples of an optimizer's parameters after backward passes.

        Called for an optimizer whose steps have closures. Such a step makes several backward
        passes, and changes the parameters between them.
        """
        self._ids_with_closures.update(map(id, parameters_of(optimizer)))

    def clear(self) -> None:
        """Drop all samples and leaves, to free their memory."""
        self._samples.clear()
        self._leaves.clear()

    def changes(self) -> list[_Change]:
        """Return the parameters that were changed since their sample was taken."""
        names: dict[int, str] = {}
        for contract in self._contracts:
            for name, parameter in contract.parameters().items():
                names[id(parameter)] = f"{name} of {contract.title}"
        num_outside_modules = 0
        changes: list[_Change] = []
        for parameter, sample in self._samples.items():
            values = _sampled(parameter)
            # torch.equal() would call a NaN changed.
            is_unchanged = torch.allclose(values, sample.values, rtol=0, atol=0, equal_nan=True)
            if is_unchanged:
                continue
            name = names.get(id(parameter))
            if name is None:
                num_outside_modules += 1
                shape = tuple(parameter.shape)
                name = f"parameter {num_outside_modules} {_OUTSIDE_MODULES}, of shape {shape}"
            changes.append(_Change(name, parameter, sample))
        return changes

    def is_outside_modules(self, parameter: Tensor) -> bool:
        """Return whether a tensor is a parameter of a loss that no set-up module has."""
        # Any other tensor may be meant to differ between ranks.
        if type(parameter) is not nn.Parameter:
            return False
        for contract in self._contracts:
            if any(parameter is tensor for tensor in contract.parameters().values()):
                return False
        return parameter in self._leaves

    def _tensors_to_sample(self) -> list[Tensor]:
        """Return the parameters of the set-up modules, and the leaves of the losses."""
        tensors = WeakTensorKeyDictionary()  # as a set: no tensor is returned twice
        # Under FSDP, leaves are gathered tensors, which replace the parameters for a short time.
        is_sharded = any(contract.is_sharded for contract in self._contracts)
        if not is_sharded:
            tensors.update(self._leaves)
        for contract in self._contracts:
            for parameter in contract.parameters().values():
                tensors[parameter] = None
        return list(tensors)


class _ComparedParameters(NamedTuple):
    """Parameters changed by hand that this rank has compared with other ranks.

    Attributes:
        names: the names of the parameters.
        key: their key in the store, without the ``"/first"`` or ``"/other"`` at its end.
    """

    names: list[str]
    key: str


class _ChangeComparison:
    """Compares parameters that were changed by hand, and must be equal on all ranks, between ranks.

    The first rank that compares writes digests of its parameters to the store. A rank with other
    digests writes its own under another key, which the first rank reads in its next backward pass.

    Args:
        contracts: the contracts of the set-up modules. Later ones are seen, too.
        store: the store in which ranks compare parameters.
    """

    def __init__(self, contracts: Collection[GradientContract], store: JobStore) -> None:
        self._contracts = contracts
        self._store = store
        # The latest comparison. None before the first one.
        self._latest: _ComparedParameters | None = None

    def check(self, changes: Sequence[_Change], num_losses: int) -> None:
        """Raise if parameters that must be equal on all ranks were changed differently.

        Args:
            changes: the changes of these parameters on this rank.
            num_losses: the number of backward passes so far.

        Raises:
            UsageError: this rank and the first rank that compares have different values.
        """
        if not changes or self._store.size == 1:
            return
        names = [change.name for change in changes]
        # Ranks are compared only if they hold the same replicas, and have changed the same
        # parameters after the same number of backward passes. The key has all three.
        scope = "".join(contract.scope for contract in self._contracts)
        checksum = crc32(" ".join(names).encode())
        key = f"changes by hand{scope}/{num_losses}/{checksum}"
        self._latest = _ComparedParameters(names, key)
        local_digests = digests([_sampled(change.parameter) for change in changes])
        content = json.dumps([self._store.rank, local_digests]).encode()
        # Writes this content if no rank has written any. Returns the content in the store.
        first_content = self._store.set_if_absent(f"{key}/first", content)
        first_rank, first_digests = json.loads(first_content)
        if first_digests != local_digests:
            # This rank writes before it raises, so that the first rank raises, too.
            self._store.set(f"{key}/other", content)
            self._raise_different(names, first_rank)

    def check_latest(self) -> None:
        """Raise if another rank has found that its parameters differ from those of this rank.

        The other rank may have compared them after this rank did. So this method is called before
        the next comparison, too.
        """
        if self._latest is None:
            return
        content = self._store.get_nowait(f"{self._latest.key}/other")
        if content is not None:
            other_rank, _other_digests = json.loads(content)
            self._raise_different(self._latest.names, other_rank)

    def _raise_different(self, names: list[str], other_rank: int) -> NoReturn:
        """Raise a UsageError for parameters that differ between this rank and another one."""
        lower_rank, higher_rank = sorted((self._store.rank, other_rank))
        suggestion = (
            "fabric.clip_gradients(model, max_norm=math.inf) before the change, which averages the "
            "gradients of nn.ParameterList and nn.ParameterDict; for other modules, changes after "
            f"a backward pass outside of no_backward_sync; {_TURN_OFF}"
        )
        if any(_OUTSIDE_MODULES in name for name in names):
            suggestion = (
                "module, optimizer = fabric.setup(module, optimizer), with "
                "nn.ParameterList([parameter]) as the module of a parameter that no module has; "
                f"{_TURN_OFF}"
            )
        _raise_changed_by_hand(
            self._store.rank,
            names,
            problem=f"and differ between ranks {lower_rank} and {higher_rank}",
            expected="the same changes on all ranks, by gradients that are averaged over them",
            suggestion=suggestion,
        )


# [Note: Steps by hand]
# After `fabric.backward` gradients may still be multiplied by the loss scale, not be divided by the
# loss weights, or not be averaged over the ranks. The step of an optimizer and
# `fabric.clip_gradients` complete them. A loop such as `p -= lr * p.grad` calls neither, and no
# hook sees it. So the check keeps a sample of the elements of each parameter after a backward pass,
# and compares it before the next one. Samples of parameters with which an optimizer steps are
# dropped.
#
# A parameter that was changed by hand is an error in two cases. The first case: its gradient was
# not complete, and the change went against the gradient. A snapshot that is loaded after a bad
# loss, or a limit for weights, changes parameters in other directions. The second case: the
# parameter must be equal on all ranks, and differs. The ranks compare their samples through the
# store and never by a collective. A rank with other values than the first rank writes them under
# the key "other", which the first rank reads before its next backward pass.
#
# The step of an optimizer that is not set up is checked like a change by hand where it changes an
# `nn.Parameter` of the loss that no set-up module has: nothing averages its gradient over the
# ranks. And an optimizer that steps within a backward pass, called by a hook of a parameter, is an
# error if the gradients are completed only later, as under DDP.
class HandStepCheck:
    """The check of a job's first backward passes.

    A step *by hand* is a change of parameters in place that no optimizer makes, as in
    ``parameter.data -= lr * parameter.grad``.

    Args:
        contracts: the contracts of the set-up modules. Later ones are seen, too.
        optimizers: the set-up optimizers. Later ones are seen, too.
        store: the store in which ranks compare parameters.
        backward: the hooks around backward passes.
        checks: the functions that ``Fabric.backward`` calls for each loss. This object adds
            :meth:`check`.
        pending_change: returns why the gradients of an optimizer are not complete, such as "not
            divided by the loss weights yet". None if they are complete. The argument None stands
            for parameters that no set-up optimizer has.
    """

    def __init__(
        self,
        contracts: Collection[GradientContract],
        optimizers: Collection[Optimizer],
        store: JobStore,
        backward: Hooks,
        checks: list[LossCheck],
        pending_change: Callable[[Optimizer | None], str | None],
    ) -> None:
        """Add the check, and the hooks around backward passes and before steps."""
        self._contracts = contracts
        self._optimizers = optimizers
        self._store = store
        # Fabric.backward() calls these functions for each loss. check() removes itself at last.
        self._checks = checks
        # Returns why the gradients of an optimizer are not complete, as text. None if they are
        # complete. The argument None stands for parameters that no set-up optimizer has.
        self._pending_change = pending_change
        self._num_losses = 0
        # Whether an optimizer has stepped, or a parameter was changed by hand. Before that, the
        # check does not end.
        self._has_stepped = False
        # Whether a backward pass is running. A step in it is called by a hook of a parameter.
        self._is_in_backward = False
        self._samples = _GradientSamples(contracts)
        self._comparison = _ChangeComparison(contracts, store)
        self._hooks = ExitStack()
        before_step = register_optimizer_step_pre_hook(self._before_step)
        self._hooks.callback(before_step.remove)
        backward.after.append(self._after_backward)
        self._hooks.callback(backward.after.remove, self._after_backward)
        checks.append(self.check)

    def close(self) -> None:
        """Remove the hooks, and drop the samples."""
        self._hooks.close()
        self._samples.clear()

    def check(self, loss: Tensor, weight: Any, reduce: str) -> None:
        """Check the changes since the backward pass before. Called before each backward pass.

        Args:
            loss: the loss.
            weight: the weight of the loss. None if there is none.
            reduce: how the gradients of the ranks are reduced. Not used.

        Raises:
            UsageError: parameters were changed by gradients that were not complete, or differ
                between ranks after the change.
        """
        self._num_losses += 1
        # Another rank may have found a difference after this rank has compared its changes.
        self._comparison.check_latest()
        changes = self._samples.changes()
        if changes:
            self._has_stepped = True
            self._check_gradients_of_changes(changes)
            self._comparison.check(self._replicated(changes), self._num_losses)
        if self._is_finished():
            # This is allowed, since Fabric.backward() iterates over a copy of the list.
            self._checks.remove(self.check)
            self.close()
            return
        self._samples.before_backward(loss, has_weight=weight is not None)
        self._is_in_backward = True

    def _is_finished(self) -> bool:
        """Return whether the first steps, or enough losses, were checked."""
        if self._has_stepped and self._num_losses > _CHECKED_LOSSES:
            return True
        return self._num_losses > _MAX_LOSSES

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Take samples of the parameters that got a gradient.

        ``Fabric.backward`` calls this after each backward pass.
        """
        self._is_in_backward = False
        if error is not None:
            return
        # The second condition is true if the precision has a loss scale.
        may_be_incomplete = self._samples.has_weight or self._pending_change(None) is not None
        # On several ranks, parameters that were changed by hand are compared between ranks, too.
        if may_be_incomplete or self._store.size > 1:
            self._samples.after_backward()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Drop the samples of the parameters that an optimizer steps with. A step pre-hook.

        A sample has elements of a parameter from after the latest backward pass. Before the next
        backward pass, :meth:`check` takes a parameter that differs from its sample as changed by
        hand. The optimizer changes these parameters, which is no step by hand.

        If the optimizer is not set up, its parameters outside of set-up modules get new samples:
        nothing averages their gradients over the ranks, so the next check compares them between
        ranks.

        Raises:
            UsageError: the optimizer steps with gradients that are not complete.
        """
        self._has_stepped = True
        if self._is_in_backward:
            self._check_step_in_backward(optimizer)
        # The optimizer, and not the user, changes the parameters between the backward passes of its
        # closure.
        if has_closure(args, kwargs):
            self._samples.stop_sampling_after_backward(optimizer)
        was_set_up = optimizer in self._optimizers
        for parameter in parameters_of(optimizer):
            sample = self._samples.drop(parameter)
            # The hooks of a set-up optimizer complete and average its gradients before the step.
            if was_set_up:
                continue
            if sample is not None:
                self._check_gradient_is_complete(optimizer, parameter, sample)
            if parameter.grad is not None and self._samples.is_outside_modules(parameter):
                self._samples.take(parameter)

    def _check_gradient_is_complete(
        self, optimizer: Optimizer, parameter: Tensor, sample: _Sample
    ) -> None:
        """Raise if an optimizer that was not set up steps with a gradient that is not complete.

        Args:
            optimizer: the optimizer.
            parameter: one of its parameters.
            sample: the sample of the parameter.
        """
        pending_change = self._pending_change_of(parameter, sample)
        if pending_change is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() on rank {self._store.rank}",
                problem="it has not been set up, and steps with gradients that are "
                f"{pending_change}",
                expected="every optimizer of gradients that fabric.backward() computes is set up",
                suggestion="model, optimizer = fabric.setup(model, optimizer), or "
                "fabric.setup_optimizers(optimizer)",
            )

    def _check_step_in_backward(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer steps within a backward pass, before its gradients are complete.

        Args:
            optimizer: the optimizer, whose step a hook of a parameter has called.
        """
        trained_ids = set(map(id, parameters_of(optimizer)))
        # Why the gradients are not complete, as text. None if they are complete.
        pending_change: str | None = None
        suggestion = ""
        was_set_up = optimizer in self._optimizers
        # The hooks of a set-up optimizer remove loss scales and loss weights before the step.
        if not was_set_up:
            # The argument None stands for parameters that no set-up optimizer has.
            pending_change = self._pending_change(None)
            suggestion = "optimizer = fabric.setup_optimizers(optimizer)"
        # Setup does not help against the second reason, so its text replaces the one above.
        for contract in self._contracts:
            is_trained = not trained_ids.isdisjoint(map(id, contract.parameters().values()))
            # DDP averages gradients at the end of the backward pass. FSDP averages the gradient of
            # a parameter before the hooks of the parameter run.
            if is_trained and contract.needs_forward and self._store.size > 1:
                pending_change = "not averaged over the ranks yet"
                suggestion = (
                    'optimizer.step() after fabric.backward(loss), or strategy="fsdp", which '
                    "averages gradients before hooks of parameters run"
                )
        if pending_change is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() on rank {self._store.rank}",
                problem="a hook has called it within the backward pass, with gradients that are "
                f"{pending_change}",
                expected="a step with complete gradients",
                suggestion=f"{suggestion}; {_TURN_OFF}",
            )

    def _pending_change_of(self, parameter: Tensor, sample: _Sample) -> str | None:
        """Return why the gradient of a parameter is not complete. None if it is complete.

        An example is "not divided by the loss weights yet".
        """
        for optimizer in self._optimizers:
            if any(parameter is tensor for tensor in parameters_of(optimizer)):
                return self._pending_change(optimizer)
        # No set-up optimizer has the parameter, so none will divide its gradient by the weights.
        if sample.is_of_weighted_loss:
            return "not divided by the loss weights yet"
        return self._pending_change(None)

    def _check_gradients_of_changes(self, changes: Sequence[_Change]) -> None:
        """Raise if parameters were changed against gradients that are not complete.

        The change has to go against the gradients on average. A change in another direction, such
        as a snapshot that is loaded, is no step.

        Args:
            changes: the changes by hand.
        """
        names: list[str] = []
        cosines: list[float] = []
        pending_changes: set[str] = set()
        for name, parameter, sample in changes:
            pending_change = self._pending_change_of(parameter, sample)
            if pending_change is not None:
                names.append(name)
                cosines.append(_cosine_of_change(parameter, sample))
                pending_changes.add(pending_change)
        if not names:
            return
        goes_against_gradients = sum(cosines) / len(cosines) <= _MAX_COSINE
        if not goes_against_gradients:
            return
        _raise_changed_by_hand(
            self._store.rank,
            names,
            problem=f"by gradients that are {' and '.join(sorted(pending_changes))}",
            expected="the step of a set-up optimizer, or a change by completed gradients",
            suggestion="norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf) before "
            "the change, with a set-up optimizer of these parameters. parameter.grad then holds "
            f"the gradients of the loss, and an infinite norm is an overflow; {_TURN_OFF}",
        )

    def _replicated(self, changes: Sequence[_Change]) -> list[_Change]:
        """Return the changes of parameters that must be equal on all ranks."""
        replicated_ids: set[int] = set()
        for contract in self._contracts:
            replicated_ids.update(map(id, contract.replicated().values()))
        replicated: list[_Change] = []
        for change in changes:
            is_replicated = id(change.parameter) in replicated_ids
            if is_replicated or self._samples.is_outside_modules(change.parameter):
                replicated.append(change)
        return replicated


def _raise_changed_by_hand(
    rank: int, names: Sequence[str], *, problem: str, expected: str, suggestion: str
) -> NoReturn:
    """Raise a UsageError about parameters that were changed by hand."""
    listed_names = shorten(", ".join(names), _MAX_NAMES_CHARACTERS, placeholder=" ...")
    raise UsageError(
        f"fabric.backward(loss) on rank {rank}",
        problem="since the backward pass before, these were changed without the step of a "
        f"set-up optimizer, {problem}: {listed_names}",
        expected=expected,
        suggestion=suggestion,
    )


def _gradient_version(tensor: Tensor) -> object:
    """Return a value that differs after a change of a tensor's gradient. None without one."""
    # A tensor that is no leaf has no gradient, and torch warns if its grad is read.
    grad = tensor.grad if tensor.is_leaf else None
    if grad is None:
        return None
    # Some changes of a DTensor change only the version of its local tensor.
    return id(grad), in_place_version(grad), in_place_version(local_tensor(grad))


def _has_elements(tensor: Tensor) -> bool:
    """Return whether a tensor has elements on this rank, and a dense gradient."""
    assert tensor.grad is not None
    return local_tensor(tensor).numel() > 0 and tensor.grad.layout is torch.strided


def _sampled(tensor: Tensor) -> Tensor:
    """Return a copy of some elements of a tensor, at evenly spaced positions.

    Of a DTensor, the part on this rank counts. Complex elements count as two real ones.
    """
    elements = local_tensor(tensor).detach().reshape(-1)
    if elements.is_complex():
        elements = torch.view_as_real(elements).reshape(-1)
    stride = max(1, elements.numel() // _SAMPLE_ELEMENTS)
    return elements[::stride].clone()


def _cosine_of_change(parameter: Tensor, sample: _Sample) -> float:
    """Return the cosine of the angle between the change of a parameter and its gradient.

    -1 means that the change went against the gradient. If the change is not finite, the result is
    -1, too: it may be a step by scaled gradients, which overflow.
    """
    change = _sampled(parameter).double() - sample.values.double()
    if not change.isfinite().all():
        return -1.0
    gradient = sample.gradient.to(change.device).double()
    return torch.cosine_similarity(change, gradient, dim=0).nan_to_num().item()
