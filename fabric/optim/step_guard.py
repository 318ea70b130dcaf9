"""Decides before each optimizer step whether all ranks take the step or leave it out."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fabric._torch import local_tensor
from fabric.communicators import Communicator, Reduce
from fabric.data.position import EpochPosition
from fabric.data.spec import ActiveLoop
from fabric.errors import ArgumentTypeError, ConfigurationError, TooManyBadStepsError
from fabric.module import FabricModule
from fabric.optim.loss_scaler import LossScaler

__all__ = ["StepGuard"]

# The weight of the old value in the running mean and variance of the loss: a mean over about 100
# steps.
_DECAY = 0.99
# No loss is too large until the mean and variance are of this many losses.
_WARMUP_STEPS = 20

_Samples = list[Any] | None  # indices in the dataset. None if they are not known.


class _RankReport(NamedTuple):
    """What a rank tells the others about a refused step.

    Attributes:
        loss: the loss of the rank.
        epoch: the epoch of its loop over a loader. None if it has no such loop.
        samples: the samples that it received since the last step.
        nan_buffer: the name of a buffer that the forward pass has made NaN. None if there is none.
    """

    loss: float
    epoch: int | None
    samples: _Samples
    nan_buffer: str | None


class _RefusedStep(NamedTuple):
    """A line of the log.

    Attributes:
        step: the number of the step, which counts the calls of ``accepts`` from 1.
        reason: why the step was refused.
        losses: the loss of each rank.
        epoch: the epoch of rank 0.
        samples: for each rank the samples since the last step. None where they are not known.
    """

    step: int
    reason: str
    losses: list[float]
    epoch: int | None
    samples: list[_Samples]


class _LossSpikes:
    """Finds losses that are far above the running mean of the losses before them.

    Args:
        spike: the number of deviations above the running mean from which on a loss is too large.
            None if no finite loss is.

    Attributes:
        mean: the running mean of the losses of the steps that were taken.
        variance: the running variance of these losses.
        num_losses: the number of these losses.
    """

    def __init__(self, spike: float | None) -> None:
        self._max_deviations = spike
        self.mean = 0.0
        self.variance = 0.0
        self.num_losses = 0

    @property
    def is_enabled(self) -> bool:
        """Whether any finite loss can be too large."""
        return self._max_deviations is not None

    def reason_to_refuse(self, loss: float) -> str | None:
        """Return why a loss is too large. If it is not, count it in the running mean.

        Returns None if the loss is not too large. A loss that is too large leaves the mean and the
        variance as they are. Call this method only if ``is_enabled`` is true, and once for each
        step.

        Args:
            loss: the mean loss of all ranks, which is finite.
        """
        assert self._max_deviations is not None
        distance = loss - self.mean
        deviation = math.sqrt(self.variance)
        if self.num_losses >= _WARMUP_STEPS and distance > self._max_deviations * deviation:
            return (
                f"the loss {loss:.4g} is more than {self._max_deviations:g} deviations of "
                f"{deviation:.4g} above the mean {self.mean:.4g}"
            )
        self.num_losses += 1
        # At first the mean of all losses, and then an exponential mean of about the last hundred.
        weight = max(1 / self.num_losses, 1 - _DECAY)
        self.mean += weight * distance
        # The incremental form of the weighted variance, with the distance from the old mean.
        self.variance = (1 - weight) * (self.variance + weight * distance**2)
        return None


class _EndOfStep(NamedTuple):
    """Where an optimizer step has ended in a loop over a loader.

    Attributes:
        position: the position of the loop. Each loop has a position object of its own.
        num_batches: how many batches the user had received in the loop by then.
    """

    position: EpochPosition
    num_batches: int


class _SamplesOfStep:
    """Finds the samples that this rank has received since the last optimizer step.

    Args:
        active_loops: the loops over loaders that are running.
    """

    def __init__(self, active_loops: Sequence[ActiveLoop]) -> None:
        self._active_loops = active_loops
        # None if the last step ended outside of loops, and before the first step.
        self._last_end: _EndOfStep | None = None

    def epoch_and_samples(self) -> tuple[int | None, _Samples]:
        """Return the epoch and the samples of this step. None stands for what is not known.

        Call this method before :meth:`end_step`.
        """
        loop = self._latest_loop()
        if loop is None:
            return None, None
        # The batches since the end of the last step, if that step was in the same iteration: each
        # iteration has a position of its own.
        first_batch = 0
        last_end = self._last_end
        if last_end is not None and last_end.position is loop.position:
            first_batch = last_end.num_batches
        batches = range(first_batch, loop.position.received_batches)
        return loop.position.epoch, loop.spec.samples_of_batches(loop.position, batches)

    def end_step(self) -> None:
        """Count the batches that are received from now on as those of the next step."""
        loop = self._latest_loop()
        self._last_end = None
        if loop is not None:
            self._last_end = _EndOfStep(loop.position, loop.position.received_batches)

    def _latest_loop(self) -> ActiveLoop | None:
        """Return the loop that has yielded a batch last, or None."""
        return max(self._active_loops, key=_batch_number, default=None)


class StepGuard:
    """The answer to a bad batch: whether all processes take an optimizer step. See ``accepts``.

    ``fabric.step_guard`` makes this object. Put it into the state of a checkpoint, so that a
    resumed run continues its counts and its running mean.

    Args:
        communicator: all ranks.
        scaler: the loss scaler of the job, or None.
        active_loops: the loops over loaders that are running, which know the samples.
        log_metrics: passes metrics of a step to the loggers.
        nonfinite: what to do with losses and gradients that are not finite. ``"skip"`` refuses the
            step.
        spike: refuse a loss that is more than this many deviations above the running mean. None
            refuses no finite loss.
        patience: the number of refused steps in a row that is an error.
        log: the file to which a line for each refused step is appended. None for none.

    Raises:
        ConfigurationError: an argument is not valid.
    """

    def __init__(
        self,
        communicator: Communicator,
        scaler: LossScaler | None,
        active_loops: Sequence[ActiveLoop],
        log_metrics: Callable[[Mapping[str, float], int], None],
        *,
        nonfinite: Literal["skip"] | None,
        spike: float | None,
        patience: int,
        log: str | os.PathLike[str] | None,
    ) -> None:
        """Check the arguments. ``fabric.step_guard`` calls it, which is not a collective."""
        is_valid_spike = spike is None or spike > 0
        is_valid_patience = type(patience) is int and patience > 0
        if nonfinite not in ("skip", None) or not is_valid_spike or not is_valid_patience:
            raise ConfigurationError(
                f"step_guard({nonfinite=}, {spike=}, {patience=})",
                expected="nonfinite='skip' or None, spike=6.0 or another number above 0, or None, "
                "and a patience of at least 1",
                suggestion="fabric.step_guard(spike=6.0, patience=8)",
            )
        self._communicator = communicator
        self._scaler = scaler
        self._log_metrics = log_metrics
        self._refuses_nonfinite = nonfinite is not None
        self._patience = patience
        self._log_path = None if log is None else Path(log)
        self._spikes = _LossSpikes(spike)
        self._samples_of_step = _SamplesOfStep(active_loops)
        self._step_number = 0
        self._num_refused = 0
        # The refused steps since the last step that was taken.
        self._refused_in_a_row: list[_RefusedStep] = []

    def accepts(
        self,
        loss: Tensor,
        model: nn.Module | Sequence[nn.Module],
        norm: Tensor | None = None,
    ) -> bool:
        """Return whether to take the step. Collective: all ranks get the same answer.

        Call it after ``backward``, and step only if it returns true::

            if guard.accepts(loss, model):
                optimizer.step()
                scheduler.step()

        A step is refused in these cases:

        - A loss or a gradient of any rank is infinite or NaN, unless ``nonfinite`` is None. Under
          ``"16-mixed"`` only the loss counts: after an overflow of gradients the loss scale skips
          the step and is halved.
        - The mean loss of all ranks is a spike, as the guard's argument ``spike`` defines it.

        If ``norm`` is finite and ``spike`` is None, the gradients of all ranks are finite. The step
        is then accepted without a message between the ranks, and the loss is not looked at.
        Otherwise ranks exchange one small message. A refused step leaves parameters, optimizers and
        the loss scale as they were, and sets the gradients of the model to None. This method waits
        for the device.

        Args:
            loss: the loss of this rank, of one element.
            model: the set-up module of the step, or several.
            norm: what ``fabric.clip_gradients(..., error_if_nonfinite=False)`` has returned for
                these gradients. None if it was not called.

        Raises:
            TooManyBadStepsError: this is the last of ``patience`` refused steps in a row. All ranks
                raise it. The next call begins to count again.
        """
        models = _as_modules(model)
        self._step_number += 1
        reason = self._reason_to_refuse(loss, models, norm)
        if reason is None:
            self._refused_in_a_row.clear()
        else:
            self._refuse(reason, loss, models)
        # After _refuse(), which reads the samples of this step.
        self._samples_of_step.end_step()
        if len(self._refused_in_a_row) == self._patience:
            refused_steps = self._refused_in_a_row
            self._refused_in_a_row = []
            raise _too_many_bad_steps(refused_steps)
        return reason is None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the running mean, for a checkpoint."""
        return {
            "step": self._step_number,
            "num_refused": self._num_refused,
            "mean": self._spikes.mean,
            "variance": self._spikes.variance,
            "num_losses": self._spikes.num_losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned. Refused steps in a row count from 0."""
        self._step_number = state["step"]
        self._num_refused = state["num_refused"]
        self._spikes.mean = state["mean"]
        self._spikes.variance = state["variance"]
        self._spikes.num_losses = state["num_losses"]
        self._refused_in_a_row = []

    def _reason_to_refuse(
        self, loss: Tensor, models: Sequence[FabricModule], norm: Tensor | None
    ) -> str | None:
        """Return why the step is refused, the same on all ranks, or None. Collective.

        The arguments are those of :meth:`accepts`.
        """
        is_norm_same_on_ranks = all(map(_has_same_norm_on_ranks, models))
        compares_losses = self._spikes.is_enabled
        # Every rank has to take this branch, or none, since the code below is collective.
        if norm is not None and is_norm_same_on_ranks and not compares_losses and norm.isfinite():
            # All ranks have the same finite norm, so all of them accept the step without a message.
            # A finite norm shows that the gradients are good, even if the loss is not finite.
            return None
        loss_here = float(loss.detach())
        has_bad_loss = not math.isfinite(loss_here)
        if norm is None:
            has_bad_gradients = _has_bad_gradients(models)
        else:
            has_bad_gradients = not bool(norm.isfinite())
        values = torch.tensor(
            [loss_here, float(has_bad_loss), float(has_bad_gradients)],
            device=self._communicator.device,
        )
        sums = self._communicator.all_reduce(values, Reduce.SUM)
        total, num_bad_losses, num_bad_gradients = sums.tolist()
        if self._refuses_nonfinite and num_bad_losses > 0:
            return "the loss is not finite"
        # The loss scaler skips the step after an overflow of scaled gradients.
        if self._refuses_nonfinite and num_bad_gradients > 0 and self._scaler is None:
            return "a gradient is not finite"
        # A loss that is not finite, and was not refused above, has no mean to compare.
        if not compares_losses or num_bad_losses > 0:
            return None
        return self._spikes.reason_to_refuse(total / self._communicator.size)

    def _refuse(self, reason: str, loss: Tensor, models: Sequence[FabricModule]) -> None:
        """Drop the gradients of a step, and record the step. Collective."""
        for model in models:
            model.zero_grad()
        if self._scaler is not None:
            # If the gradients overflowed, the cause is this loss. A smaller scale would not help.
            self._scaler.forget_overflow()
        epoch, samples = self._samples_of_step.epoch_and_samples()
        report = _RankReport(
            loss=float(loss.detach()),
            epoch=epoch,
            samples=samples,
            nan_buffer=_find_nan_buffer(models),
        )
        reports = self._communicator.gather_objects(report)
        refused_step = _RefusedStep(
            step=self._step_number,
            reason=reason,
            losses=[report.loss for report in reports],
            epoch=reports[0].epoch,
            samples=[report.samples for report in reports],
        )
        self._num_refused += 1
        self._refused_in_a_row.append(refused_step)
        if self._communicator.rank == 0:
            self._log_metrics({"bad_steps": self._num_refused}, self._step_number)
            self._append_to_log(refused_step)
            for rank, report in enumerate(reports):
                _warn_of_nan_buffer(self._step_number, rank, report.nan_buffer)

    def _append_to_log(self, refused_step: _RefusedStep) -> None:
        """Append a line to the log, if there is one. Warn if the log cannot be written."""
        if self._log_path is None:
            return
        # JSON has no NaN and no infinity, so they become strings.
        losses = [loss if math.isfinite(loss) else str(loss) for loss in refused_step.losses]
        # default=str: a sampler of the user may yield indices that JSON does not have.
        line = json.dumps({**refused_step._asdict(), "losses": losses}, default=str)
        try:
            with open(self._log_path, "a") as file:
                file.write(f"{line}\n")
        except OSError as error:
            # An error on this rank alone would leave the other ranks waiting. The warning names the
            # line of the user's call of accepts(), which is the fourth from here.
            warnings.warn(f"step_guard(log={str(self._log_path)!r}): {error}: {line}", stacklevel=4)


def _as_modules(model: Any) -> list[FabricModule]:
    """Return one or several set-up modules as a list.

    Raises:
        ArgumentTypeError: one of them is not set up.
    """
    models: list[Any] = [model]
    if isinstance(model, list | tuple):
        models = list(model)
    for module in models:
        if not isinstance(module, FabricModule):
            raise ArgumentTypeError(
                f"guard.accepts(loss, {type(module).__name__})",
                expected="the module that fabric.setup returned, or a list of such modules",
            )
    return models


def _has_same_norm_on_ranks(model: FabricModule) -> bool:
    """Return whether ``clip_gradients`` computes the same norm on all ranks."""
    contract = model._fabric_contract
    if contract is None:
        # The user has copied a set-up module. A copy has no contract that says what ranks share.
        return False
    # Ranks with gradients of their own, as under local SGD, have different norms. The norm of
    # sharded gradients is computed over all ranks.
    return contract.is_sharded or not contract.gradients_may_differ


def _has_bad_gradients(models: Sequence[FabricModule]) -> bool:
    """Return whether a gradient of this rank, or its shard, is infinite or NaN."""
    gradients: list[Tensor] = []
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradients.append(local_tensor(parameter.grad))
    # A finite norm proves that all gradients are finite, and is computed fast. The norm of large
    # finite gradients may overflow, so otherwise each gradient is checked.
    if nn.utils.get_total_norm(gradients).isfinite():
        return False
    return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def _find_nan_buffer(models: Sequence[FabricModule]) -> str | None:
    """Return the name of a buffer that is NaN, such as a running mean, or None."""
    for model in models:
        for name, buffer in model.named_buffers():
            is_float = buffer.is_floating_point() or buffer.is_complex()
            if is_float and bool(local_tensor(buffer).isnan().any()):
                return name
    return None


def _warn_of_nan_buffer(step: int, rank: int, name: str | None) -> None:
    """Warn that the forward pass of a refused step has left NaN in a buffer.

    Args:
        step: the number of the step.
        rank: the rank whose buffer it is.
        name: the name of the buffer. None if there is none, and nothing to warn of.
    """
    if name is None:
        return
    warnings.warn(
        f"guard.accepts refused step {step}, whose forward pass has left NaN in the buffer {name} "
        f"on rank {rank}. Restore it from a checkpoint, or check the inputs before the forward "
        "pass",
        # The line of the user's call of accepts(), which is the fourth from here.
        stacklevel=4,
    )


def _batch_number(loop: ActiveLoop) -> int:
    return loop.batch_number


def _too_many_bad_steps(refused_steps: Sequence[_RefusedStep]) -> TooManyBadStepsError:
    """Return the error after too many refused steps in a row."""
    steps = [refused_step.step for refused_step in refused_steps]
    samples: list[Any] = []
    for refused_step in refused_steps:
        for samples_of_rank in refused_step.samples:
            samples.extend(samples_of_rank or [])  # None if they are not known
    last = refused_steps[-1]
    return TooManyBadStepsError(
        f"guard.accepts at step {last.step}",
        problem=f"{len(steps)} steps in a row were refused, steps {steps[0]} to {steps[-1]}, with "
        f"the samples {samples[:12]}... Of the last one: {last.reason}; the losses of the ranks "
        f"are {last.losses}",
        expected="a step that is accepted",
        suggestion="checkpoints.restore({'model': model, 'optimizer': optimizer}) without the "
        "loader, which then goes on behind these samples; a lower learning rate; or a larger "
        "patience",
        steps=steps,
        samples=samples,
    )
