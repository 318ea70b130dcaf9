"""Weighted backward passes: gradients of the sum of all losses over the sum of all loss weights."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fabric._torch import foreach_multiply, local_tensor, unscale_and_check
from fabric.contract import GradientContract
from fabric.errors import UsageError
from fabric.optim.gradient_watch import GradientWatch
from fabric.optim.gradients import (
    cleared_empty_gradients,
    gradient_fingerprint,
    gradient_versions,
    has_gradients,
    is_cleared,
    local_gradients,
    mark_first_gradient,
)
from fabric.optim.loss_scaler import has_closure
from fabric.optim.weight_sums import EXPECTED_LOSSES, LossWeight, StepFactors, WeightSums
from fabric.runtime import Runtime
from fabric.strategies.parallel import as_list
from fabric.tree import parameters_of

__all__ = ["LossWeights"]


@dataclass(eq=False)
class _Window:
    """The weighted backward passes of one or more optimizers since their last step.

    Windows are compared by identity.

    Attributes:
        divisor: the power of two by which each loss was divided.
        weight: the sum of the loss weights on this rank.
        factors: what the steps of the optimizers need. None until the first of them steps.
    """

    divisor: Tensor
    weight: LossWeight
    factors: StepFactors | None = None


class _Mark(Enum):
    """What an optimizer has in place of a window, although it holds weighted gradients."""

    DIVIDED = "the gradients were multiplied by the factor, and the step is still to come"
    FOREIGN = "the optimizer holds gradients of losses that are for other optimizers"


@dataclass
class _RecordedGradients:
    """What is recorded of an optimizer's gradients after its last weighted backward pass.

    Without arguments, no backward pass was recorded.

    Attributes:
        had_any: whether there were gradients.
        fingerprint: see ``gradient_fingerprint``. Of the gradients as :meth:`notice_change` has
            seen them last.
        versions: see ``gradient_versions``. Empty if each gradient has elements on this rank.
    """

    had_any: bool = False
    fingerprint: object = None
    versions: dict[Tensor, object] = field(default_factory=dict)

    @classmethod
    def of(cls, optimizer: Optimizer) -> "_RecordedGradients":
        """Mark the gradients of an optimizer as computed, and record them."""
        had_any = mark_first_gradient(optimizer)
        return cls(had_any, gradient_fingerprint(optimizer), _versions_if_any_is_empty(optimizer))

    def notice_change(self, optimizer: Optimizer) -> bool:
        """Return whether a gradient has changed since the backward pass or the latest call.

        A gradient has changed if it is another tensor, or was changed in place. Changes through
        ``grad.data`` are not seen. Does not wait for the device.
        """
        fingerprint = gradient_fingerprint(optimizer)
        has_changed = fingerprint != self.fingerprint
        self.fingerprint = fingerprint
        if self.versions:
            # Some gradients have no elements on this rank. The first one, from which the
            # fingerprint is, may be one of them.
            versions = gradient_versions(parameters_of(optimizer))
            has_changed = has_changed or versions != self.versions
        return has_changed


@dataclass
class _OptimizerState:
    """The state of an optimizer that has had gradients of weighted losses.

    Attributes:
        window: the optimizer's window, or a mark in place of a window. None after a step.
        recorded: what is recorded of the gradients after the last weighted backward pass.
        divisor: the divisor of the optimizer's next window. None before the first step.
    """

    window: _Window | _Mark | None = None
    recorded: _RecordedGradients = field(default_factory=_RecordedGradients)
    divisor: Tensor | None = None


@dataclass(frozen=True)
class _BackwardPass:
    """The backward pass that is running. Without arguments, no backward pass is running.

    Attributes:
        optimizers: the optimizers that the loss is for. Empty if the loss has no weight.
        window: the window that will include this pass. None if the loss has no weight.
        fingerprints: the fingerprint before the pass of each set-up optimizer that the loss is not
            for.
    """

    optimizers: Sequence[Optimizer] = ()
    window: _Window | None = None
    fingerprints: dict[Optimizer, object] = field(default_factory=dict)


# A problem in errors.
_PASS_WITHIN_STEP = (
    "gradients are divided after a backward pass and before a step, but a closure makes a backward "
    "pass within the step, or the step is made within a backward pass"
)
# Suggestions in errors.
_CLEAR_GRADIENTS = "optimizer.zero_grad() after step()"
_WEIGH_ALL_LOSSES = (
    "fabric.backward(loss, weight=n) for every loss of a step; never loss.backward()"
)
_PASS_OPTIMIZERS_OF_LOSS = "optimizer=... if the loss is not for all that are set up"
_STEP_WITHOUT_CLOSURE = "fabric.backward(loss, weight=n), then optimizer.step() without a closure"


# [Note: Loss weights]
# A loss that is a sum has a *loss weight*, which is its number of terms. The *window* of an
# optimizer is its weighted backward passes since its last step, or since its gradients were found
# cleared. Strategies average gradients over ranks. So the gradients of a window are multiplied once
# by the number of ranks over the sum of all ranks' loss weights in the window. This takes one
# message. It happens at the step, or in `clip_gradients` before the step.
#
# Before the backward pass, each loss is divided by the *divisor*, a power of two near the mean loss
# weight over ranks. This division is exact. It gives gradients of about the size that a mean loss
# gives, which a loss scale and float16 gradients need. The divisor of a window is computed at the
# optimizer's step before. The first window computes its divisor in the first backward pass, which
# takes another message, once.
#
# Optimizers of the same losses share one window. Before each backward pass, the windows of
# optimizers end whose gradients the user has cleared, see [Note: Cleared gradients] in
# `fabric/optim/gradients.py`. A backward pass that `Fabric.backward` does not know of has no
# weight. Hooks of the parameters record which of them get gradients, so that such a pass is an
# error.
#
# `Fabric.backward` calls `LossWeights.divide_loss`, runs the backward pass, and then calls
# `LossWeights.after_backward`. In between, `_running_pass` holds what the second call needs. A step
# calls `_before_step` at its start and `_after_step` at its end. `divide_gradients` is called by
# `_before_step`, and before by `Fabric.clip_gradients`.
class LossWeights:
    """Loss weights of all set-up optimizers, and the division of their gradients by the weights.

    A loss that is a sum has a *loss weight*, which is its number of terms. The *window* of an
    optimizer is its weighted backward passes since its last step. At the step, the gradients of the
    window are divided by the sum of the loss weights. Before, each loss is divided by the
    *divisor*, a power of two near the mean weight.

    Args:
        runtime: the runtime of this process. Gradients are averaged over its ranks.
        optimizers: the set-up optimizers. Later ones are added to this collection.
        contracts: the contracts of the set-up modules. Later ones are added to this collection.
        cleanup: the stack whose end removes the hooks around the steps of all optimizers.

    Attributes:
        weight_sums: reads loss weights and adds them up over ranks.
    """

    def __init__(
        self,
        runtime: Runtime,
        optimizers: Collection[Optimizer],
        contracts: Collection[GradientContract],
        cleanup: ExitStack,
    ) -> None:
        """Register the hooks around the steps of all optimizers of the process."""
        self.weight_sums = WeightSums(runtime)
        self._rank = runtime.communicator.rank
        self._optimizers = optimizers
        self._contracts = contracts
        # The optimizers that have had gradients of weighted losses.
        self._states: WeakKeyDictionary[Optimizer, _OptimizerState] = WeakKeyDictionary()
        # What after_backward() needs to know of the running pass. divide_loss() sets this before
        # the pass, and after_backward() resets it.
        self._running_pass = _BackwardPass()
        # Hooks for all optimizers run before the hooks of one optimizer. So the users' hooks see
        # divided gradients.
        before_step = register_optimizer_step_pre_hook(self._before_step)
        cleanup.callback(before_step.remove)
        after_step = register_optimizer_step_post_hook(self._after_step)
        cleanup.callback(after_step.remove)
        self._gradient_watch = GradientWatch(contracts, cleanup)

    def divide_loss(self, loss: Tensor, weight: Any, optimizer: Any) -> Tensor:
        """Divide the loss by the divisor of its window.

        Called at the start of each backward pass, also of a loss without a weight. Collective at
        the first weighted loss of an optimizer. The optimizers get the window with this loss only
        in :meth:`after_backward`, so that a backward pass that raises leaves their windows as they
        were.

        Args:
            loss: the loss.
            weight: the loss weight. None for a loss that is a mean.
            optimizer: the optimizers that the loss is for. None means all that are set up.

        Returns:
            The loss to call ``backward`` on, or to apply the loss scale to. See
            ``Fabric.backward``. A loss without a weight is returned unchanged.

        Raises:
            UsageError: an optimizer is not set up, or has gradients of losses that cannot share a
                step with this loss.
            ConfigurationError: the weight is not a number, or is negative or infinite.
        """
        loss_weight = None
        if weight is not None:
            loss_weight = self.weight_sums.parse(weight)
        # None and an empty list both stand for all optimizers.
        optimizers = as_list(optimizer) or list(self._optimizers)
        self._check_set_up(optimizers)
        # Before the checks below, so that cleared gradients do not count as gradients of an earlier
        # loss.
        self._drop_cleared_windows()
        for set_up_optimizer in self._optimizers:
            self._check_unknown_passes(set_up_optimizer)
        # After the check for unknown passes, which are those without Fabric.backward: begin_pass()
        # forgets the parameters that they have reached.
        self._gradient_watch.begin_pass()
        window = self._common_window(optimizers)
        if loss_weight is None:
            if window is not None:
                self._refuse_loss(
                    problem="this loss has no weight, but an earlier loss since the last step has "
                    "one",
                    suggestion=f"weight=...; or {_PASS_OPTIMIZERS_OF_LOSS}",
                )
            self._running_pass = _BackwardPass(fingerprints=self._fingerprints_except(optimizers))
            return loss
        window = self._extended_window(window, optimizers, loss_weight)
        self._running_pass = _BackwardPass(
            optimizers=optimizers,
            window=window,
            fingerprints=self._fingerprints_except(optimizers),
        )
        # In float16, a sum may overflow before it is divided.
        if loss.dtype is torch.float16:
            loss = loss.float()
        return loss / window.divisor.to(loss.device, loss.dtype)

    def after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Record the end of a backward pass. Called after every backward pass of ``Fabric``.

        A *window* is the record of the weighted backward passes of optimizers since their last
        step. :meth:`divide_loss` has made a new window, which includes this pass. The optimizers
        that the loss is for get this window now. After an error, they keep the windows that they
        had before the pass.

        Args:
            loss: the loss. It is not used, but all hooks after a backward pass get it.
            error: the error that the pass raised. None if there is none.

        Raises:
            UsageError: the loss has reached parameters of an optimizer that it is not for, and that
                has a window of its own.
        """
        finished_pass = self._running_pass
        self._running_pass = _BackwardPass()
        # Called after an error, too: the pass may have accumulated gradients before the error.
        reached_ids = self._gradient_watch.end_pass()
        if error is not None:
            return
        # The loss is not for these optimizers, but may have reached their parameters. The ids come
        # from hooks of the parameters. Under FSDP, some passes call no hooks, so fingerprints are
        # compared, too, which change when a gradient is replaced or changed in place.
        for optimizer, fingerprint_before in finished_pass.fingerprints.items():
            has_reached = not reached_ids.isdisjoint(map(id, parameters_of(optimizer)))
            if has_reached or gradient_fingerprint(optimizer) != fingerprint_before:
                self._record_foreign_gradients(optimizer, finished_pass.window)
        if finished_pass.window is None:
            return
        for optimizer in finished_pass.optimizers:
            self._record_gradients(optimizer, finished_pass.window)

    @torch.no_grad()
    def divide_gradients(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss weights of its window, once per step.

        A *window* is the weighted backward passes since the optimizer's last step. Called before
        the step and before gradients are clipped. Collective if the optimizer has a window. Without
        a window, or the second time, it does nothing.

        Raises:
            UsageError: the optimizer has gradients of losses that are for other optimizers.
        """
        state = self._states.get(optimizer)
        if state is None or state.window is None:
            return
        self._check_unknown_passes(optimizer)
        window = state.window
        if window is _Mark.DIVIDED:
            return
        if window is _Mark.FOREIGN:
            self._refuse_step(
                optimizer,
                problem="it has gradients of weighted losses for other optimizers",
                suggestion=_CLEAR_GRADIENTS,
            )
        # Optimizers that share a window exchange one message, at the first step of any of them.
        if window.factors is None:
            window.factors = self.weight_sums.factors_for(window.weight, window.divisor)
        # The losses of the optimizer's next window are divided by this number.
        state.divisor = window.factors.next_divisor
        for grads in local_gradients(optimizer):  # each list has one device and one dtype
            _multiply(grads, window.factors.factor)
        state.window = _Mark.DIVIDED

    def has_window(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has gradients that are not divided by their weights yet."""
        state = self._states.get(optimizer)
        return state is not None and state.window not in (None, _Mark.DIVIDED)

    @property
    def awaits_step(self) -> bool:
        """Whether an optimizer has had weighted losses since its last step."""
        return any(state.window is not None for state in self._states.values())

    def state_dict(self) -> list[float | None]:
        """Return the divisor of the next window of each set-up optimizer, in order.

        A divisor is None before the first step of an optimizer. Reading them waits for the device.
        """
        divisors: list[float | None] = []
        for optimizer in self._optimizers:
            state = self._states.get(optimizer)
            if state is None or state.divisor is None:
                divisors.append(None)
            else:
                divisors.append(float(state.divisor))
        return divisors

    def load_state_dict(self, divisors: Sequence[float | None]) -> None:
        """Restore the divisors that :meth:`state_dict` returned, as far as there are optimizers."""
        for optimizer, divisor in zip(self._optimizers, divisors, strict=False):
            state = self._states.setdefault(optimizer, _OptimizerState())
            state.divisor = None
            if divisor is not None:
                state.divisor = self.weight_sums.divisor_from(divisor)

    # -- before a backward pass -----------------------------------------------------------------

    def _check_set_up(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a UsageError unless there are optimizers and all of them are set up."""
        unknown = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        if unknown or not optimizers:
            self._refuse_loss(
                problem="an optimizer of this loss has not been set up",
                suggestion="fabric.setup(model, optimizer)",
            )

    def _drop_cleared_windows(self) -> None:
        """End the windows of optimizers whose gradients the user has cleared.

        A *window* is the weighted backward passes of an optimizer since its last step, whose
        gradients will be divided together. Called before each backward pass.

        Cleared gradients are None or zero. To read whether gradients are zero waits for a CUDA
        device. So on CUDA, gradients are read only if the *fingerprint* has changed: the identity
        of the first gradient, and the number of in-place changes to it. The fingerprint misses a
        user who sets gradients to zero through ``grad.data``. For this case the device itself
        computes whether all gradients are zero, and then sets the weight of the window to 0.
        Nothing waits for the device.
        """
        for contract in self._contracts:
            # Under FSDP, the user may have cleared gradients of gathered parameters. This clears
            # those of the optimizer's parameters, too.
            contract.take_back_gradients()
        # For each window, a flag for each gradient: a tensor on the device that says whether the
        # gradient is cleared. Optimizers of one loss share a window, and its flags.
        unread_flags: defaultdict[_Window, list[Tensor]] = defaultdict(list)
        for optimizer, state in self._states.items():
            window = state.window
            if window is None:
                continue
            has_changed = state.recorded.notice_change(optimizer)
            should_read_gradients = self.weight_sums.reads_at_once or has_changed
            if should_read_gradients:
                if _has_cleared_gradients(optimizer, state.recorded, has_changed):
                    _drop_window(state)
                continue
            # On CUDA, and unchanged as far as the CPU can see. A mark in place of a window has no
            # weight that the device could set to 0.
            if isinstance(window, _Window):
                for grads in local_gradients(optimizer):
                    unread_flags[window].extend(map(is_cleared, grads))
        for window, flags in unread_flags.items():
            window.weight = _weight_unless_cleared(window, flags)

    def _check_unknown_passes(self, optimizer: Optimizer) -> None:
        """Raise a UsageError if a pass without ``Fabric.backward`` added gradients to a window.

        An *unknown pass* is such a backward pass. The loss of such a pass has no weight.
        """
        state = self._states.get(optimizer)
        if state is None or state.window is None:
            return
        if self._gradient_watch.has_unknown_pass(optimizer):
            self._refuse(
                "a backward pass without fabric.backward, into gradients of "
                f"{type(optimizer).__name__}",
                problem="its loss has no weight, but an earlier loss since the last step has one",
                suggestion=f"{_WEIGH_ALL_LOSSES}. optimizer.zero_grad() drops these gradients",
            )

    def _fingerprints_except(self, optimizers: Sequence[Optimizer]) -> dict[Optimizer, object]:
        """Return the fingerprints of the gradients of all set-up optimizers but the given ones.

        :meth:`after_backward` compares them, to find out whether the pass has reached parameters of
        optimizers that the loss is not for.
        """
        fingerprints: dict[Optimizer, object] = {}
        for optimizer in self._optimizers:
            if optimizer not in optimizers:
                fingerprints[optimizer] = gradient_fingerprint(optimizer)
        return fingerprints

    def _common_window(self, optimizers: Sequence[Optimizer]) -> _Window | None:
        """Return the window of the optimizers of a loss, or None if they have none.

        A *window* is the weighted backward passes of optimizers since their last step. A mark in
        place of a window says that no loss can be added.

        Raises:
            UsageError: they have different windows, or gradients of losses that cannot share a step
                with another loss.
        """
        # None stands for an optimizer without a window.
        windows: set[_Window | _Mark | None] = set()
        for optimizer in optimizers:
            state = self._states.get(optimizer)
            if state is None:
                windows.add(None)
            else:
                windows.add(state.window)
        if len(windows) > 1:
            self._refuse_loss(
                problem="the optimizers have had different weighted losses since their last steps",
                suggestion=_PASS_OPTIMIZERS_OF_LOSS,
            )
        window = windows.pop()
        if window is _Mark.DIVIDED:
            self._refuse_loss(
                problem="clip_gradients has already divided the gradients of the losses before",
                suggestion=_CLEAR_GRADIENTS,
            )
        if window is _Mark.FOREIGN:
            self._refuse_loss(
                problem="the gradients are of weighted losses for other optimizers",
                suggestion=_CLEAR_GRADIENTS,
            )
        return window

    def _extended_window(
        self, window: _Window | None, optimizers: Sequence[Optimizer], weight: LossWeight
    ) -> _Window:
        """Return a new window that includes another loss. The given window is not changed.

        A *window* is the weighted backward passes of optimizers since their last step. All of its
        losses are divided by one divisor. If the backward pass fails, the optimizers keep the given
        window. Collective only if none of the optimizers has made a step after weighted losses.

        Args:
            window: the window of the optimizers. None if they have none.
            optimizers: the optimizers that the loss is for.
            weight: the weight of the loss.

        Raises:
            UsageError: there is no window, and the optimizers cannot begin one.
        """
        if window is not None:
            return _Window(divisor=window.divisor, weight=window.weight + weight)
        self._check_new_window(optimizers)
        for set_up_optimizer in self._optimizers:
            # Again for each window, since parameters may have been added or unfrozen.
            self._gradient_watch.watch(set_up_optimizer)
        # All ranks pass the optimizers in the same order, so they choose the same divisor, and come
        # to the collective below together.
        for optimizer in optimizers:
            state = self._states.get(optimizer)
            if state is not None and state.divisor is not None:
                # The step before has computed this divisor, from its own loss weights.
                return _Window(divisor=state.divisor, weight=weight)
        # The first window of these optimizers. The divisor is computed by a collective.
        return _Window(divisor=self.weight_sums.divisor_for(weight), weight=weight)

    def _check_new_window(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a UsageError if the optimizers cannot begin a window.

        A *window* is the weighted backward passes of optimizers until their next step. At the step,
        all gradients of a window are multiplied once by the same factor. So the optimizers may not
        have

        - gradients of other losses,
        - a parameter in common, whose gradient would be multiplied twice,
        - parameters whose gradients are never averaged over ranks, which need another factor.
        """
        unreduced_ids: set[int] = set()
        for contract in self._contracts:
            # Sharded gradients differ between ranks, too, but are averaged over ranks.
            steps_by_own_gradients = contract.gradients_may_differ and not contract.is_sharded
            if steps_by_own_gradients:
                self._refuse_loss(
                    problem="with model_averaging_period each rank steps by its own gradients",
                    suggestion="DDPStrategy() without it; or fabric.backward(loss / n)",
                )
            unreduced_ids.update(map(id, contract.unreduced()))
        parameter_ids: list[int] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameter_ids.extend(map(id, group["params"]))
        has_shared = len(set(parameter_ids)) < len(parameter_ids)
        has_unreduced = not unreduced_ids.isdisjoint(parameter_ids)
        if has_shared or has_unreduced or any(map(has_gradients, optimizers)):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            self._refuse_loss(
                problem=f"{names}: gradients of an earlier step, or of a loss without a weight; or "
                "shared parameters",
                suggestion=f"{_CLEAR_GRADIENTS}; {_PASS_OPTIMIZERS_OF_LOSS}",
            )

    def _record_foreign_gradients(self, optimizer: Optimizer, window: _Window | None) -> None:
        """Record that an optimizer got gradients of a loss that is for other optimizers.

        Such gradients are allowed if the user clears them before the optimizer's next step.

        Args:
            optimizer: the optimizer.
            window: the window that includes the loss, which is the weighted backward passes of the
                optimizers that the loss is for. None if the loss has no weight.

        Raises:
            UsageError: the optimizer has gradients of its own weighted losses, to which these
                gradients were added.
        """
        state = self._states.get(optimizer)
        if state is not None and state.window not in (None, _Mark.FOREIGN):
            self._refuse_loss(
                problem=f"the loss reached parameters of {type(optimizer).__name__}, whose "
                "gradients are of other weighted losses",
                suggestion="pass x.detach() to the modules that hold these parameters, or call the "
                f"step() of {type(optimizer).__name__} before this backward pass; "
                f"{_PASS_OPTIMIZERS_OF_LOSS}",
            )
        # Gradients of a loss without a weight are never divided, so they need no record.
        has_weight = window is not None
        if has_weight:
            self._record_gradients(optimizer, _Mark.FOREIGN)

    def _record_gradients(self, optimizer: Optimizer, window: _Window | _Mark) -> None:
        """Record the gradients of an optimizer after a backward pass of a weighted loss.

        The gradients are marked as computed, so that :meth:`_drop_cleared_windows` can tell whether
        they have been cleared.

        Args:
            optimizer: the optimizer.
            window: the window that the gradients belong to, or a mark in place of a window.
        """
        state = self._states.setdefault(optimizer, _OptimizerState())
        state.window = window
        state.recorded = _RecordedGradients.of(optimizer)

    # -- around a step --------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Divide the gradients. A step pre-hook of all optimizers of the process.

        Collective if the optimizer has had weighted losses since its last step.

        Raises:
            UsageError: the step has a closure, or is made within the backward pass. An optimizer
                that has not had a weighted loss yet is not checked here: :meth:`_after_step` raises
                if its closure has called ``backward`` with a weight.
        """
        is_within_backward = optimizer in self._running_pass.optimizers
        state = self._states.get(optimizer)
        had_weighted_gradients = state is not None and state.recorded.had_any
        has_weighted_closure = had_weighted_gradients and has_closure(args, kwargs)
        # In both cases the backward pass does not end before the step. The error names both cases.
        if is_within_backward or has_weighted_closure:
            self._refuse_step(
                optimizer, problem=_PASS_WITHIN_STEP, suggestion=_STEP_WITHOUT_CLOSURE
            )
        self.divide_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """End the optimizer's window. A step post-hook of all optimizers of the process.

        The next weighted backward pass begins a new window.

        Raises:
            UsageError: the step's closure has called ``backward`` with a weight.
        """
        state = self._states.get(optimizer)
        if state is None:
            return
        window = state.window
        state.window = None
        # _before_step() has put DIVIDED in place of the window that the optimizer had before the
        # step. A window or another mark comes from a backward pass within the step.
        was_begun_within_step = window is not None and window is not _Mark.DIVIDED
        if was_begun_within_step:
            self._refuse_step(
                optimizer, problem=_PASS_WITHIN_STEP, suggestion=_STEP_WITHOUT_CLOSURE
            )

    # -- errors ---------------------------------------------------------------------------------

    def _refuse_loss(self, *, problem: str, suggestion: str) -> NoReturn:
        self._refuse("fabric.backward(loss, weight=...)", problem=problem, suggestion=suggestion)

    def _refuse_step(self, optimizer: Optimizer, *, problem: str, suggestion: str) -> NoReturn:
        request = f"a step of {type(optimizer).__name__} after weighted losses"
        self._refuse(request, problem=problem, suggestion=suggestion)

    def _refuse(self, request: str, *, problem: str, suggestion: str) -> NoReturn:
        raise UsageError(
            f"{request} on rank {self._rank}",
            problem,
            expected=EXPECTED_LOSSES,
            suggestion=suggestion,
        )


def _has_cleared_gradients(
    optimizer: Optimizer, recorded: _RecordedGradients, has_changed: bool
) -> bool:
    """Return whether the user has cleared the gradients of an optimizer since its last pass.

    Waits for the device.

    Args:
        optimizer: the optimizer.
        recorded: what is recorded of its gradients after its last weighted backward pass.
        has_changed: the result of ``recorded.notice_change``.
    """
    # True if a gradient has a value that clearing would not leave.
    if has_gradients(optimizer):
        return False
    if not recorded.versions:
        # All gradients had elements, so they are cleared if there are any. If there are none, the
        # user has set them to None, unless the pass left none.
        return bool(local_gradients(optimizer)) or (recorded.had_any and has_changed)
    # Some gradients have no elements on this rank. All gradients with elements are cleared.
    cleared: set[Tensor] = set()
    empty: set[Tensor] = set()
    for parameter in recorded.versions:
        if local_tensor(parameter).numel() > 0:
            cleared.add(parameter)
        else:
            empty.add(parameter)
    # Other ranks may have elements of the gradients that are empty here. They keep the window if
    # such a gradient was not cleared.
    return empty.issubset(cleared_empty_gradients(recorded.versions, cleared))


def _versions_if_any_is_empty(optimizer: Optimizer) -> dict[Tensor, object]:
    """Return the :func:`gradient_versions` of an optimizer that has shards without elements.

    Other optimizers get an empty dict.
    """
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None and local_tensor(parameter).numel() == 0:
            return gradient_versions(parameters_of(optimizer))
    return {}


def _weight_unless_cleared(window: _Window, flags: Sequence[Tensor]) -> Tensor:
    """Return the weight of a window, or 0 if all of its gradients have been cleared.

    The device chooses between the two, and is not waited for.

    Args:
        window: the window.
        flags: for each gradient of the window, whether the gradient is cleared. Bool tensors
            without dimensions, on the devices of the gradients.
    """
    device = window.divisor.device
    are_all_cleared = torch.stack([flag.to(device) for flag in flags]).all()
    return torch.where(are_all_cleared, 0, window.weight)


def _drop_window(state: _OptimizerState) -> None:
    """End the window of an optimizer whose gradients have been cleared."""
    if isinstance(state.window, _Window):
        # All ranks have this divisor, from an all-reduce. The next window uses it, too, and needs
        # no all-reduce of its own.
        state.divisor = state.window.divisor
    state.window = None


def _multiply(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, without rounding the factor to a 16-bit dtype.

    Args:
        grads: the gradients, at least one. All have the same device and dtype.
        factor: the factor, a float64 tensor without dimensions, on any device.
    """
    factor = factor.to(grads[0].device)
    if grads[0].dtype in (torch.float16, torch.bfloat16):
        # In a 16-bit dtype, the factor would be rounded. The kernel that unscales gradients
        # multiplies them by a float32 factor. Its check for overflows is not needed.
        factor = factor.float()
        found_inf = torch.zeros_like(factor)
        unscale_and_check(grads, found_inf, factor)
    else:
        foreach_multiply(grads, factor.to(grads[0].dtype))
