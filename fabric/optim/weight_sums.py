"""The loss weights of all ranks: read, added up and checked."""

# See [Note: Loss weights] in loss_weights.py.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fabric.collectives import all_reduce
from fabric.communicators import Reduce
from fabric.errors import ConfigurationError, UsageError
from fabric.runtime import Runtime

__all__ = ["EXPECTED_LOSSES", "LossWeight", "StepFactors", "WeightSums"]

# A float64 tensor on the device if reading its value would wait for the device, else a number.
LossWeight = float | Tensor

# What errors about loss weights say is expected.
EXPECTED_LOSSES = "weighted losses, added to gradients that are cleared after each step"


@dataclass(frozen=True, eq=False)
class StepFactors:
    """What the step of an optimizer needs to know of the loss weights of all ranks.

    Attributes:
        factor: the number by which to multiply the gradients, so that they are divided by the sum
            of the loss weights. Zero if this sum is zero or not finite.
        next_divisor: the number by which to divide the losses after the step.
    """

    factor: Tensor
    next_divisor: Tensor


@dataclass(frozen=True, eq=False)
class _UnreadSum:
    """A sum of loss weights on CUDA that the CPU has not read yet.

    Attributes:
        is_valid: whether the sum was valid, a tensor on the CPU without dimensions.
        is_copied: the event after the copy of ``is_valid`` from the device. Before the event,
            ``is_valid`` has no value.
    """

    is_valid: Tensor
    is_copied: Any


class WeightSums:
    """Adds up the loss weights of all ranks, and checks that the sum is valid.

    On CUDA, reading a sum would wait for the device, so an invalid sum (zero or not finite) is not
    seen at once. An invalid sum makes the gradients zero, and :meth:`check_last_sum` raises the
    error at the next step or save.

    Args:
        runtime: the runtime of this process, with the ranks.

    Attributes:
        reads_at_once: whether loss weights, sums and gradients are read at once. True except on
            CUDA.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Start without a sum."""
        self.reads_at_once = runtime.device.type != "cuda"
        self._communicator = runtime.communicator
        self._device = runtime.device
        # The sum of the last step. None if check_last_sum() has read it, or if it was read at once.
        self._unread_sum: _UnreadSum | None = None

    def parse(self, weight: Any) -> LossWeight:
        """Return a loss weight as a number, or as a tensor if reading would wait for the device.

        Args:
            weight: the user's weight: a number, or a tensor or array without dimensions.

        Raises:
            ConfigurationError: the weight is not a number, or is negative or infinite. The value of
                a tensor on CUDA is not checked here, but makes the sum of the weights invalid.
        """
        # Tensors and arrays have a shape, and numbers of Python have none.
        is_scalar = getattr(weight, "shape", None) == ()
        if is_scalar and not self.reads_at_once and self._is_number_on_device(weight):
            value = weight.detach()
            # A negative weight becomes NaN, so that the sum of the weights is invalid.
            return torch.where(value >= 0, value.double(), torch.nan)
        number: Any = weight
        if is_scalar:
            number = weight.item()
        # type() and not isinstance(): a bool is not a weight. NaN fails the comparison.
        if type(number) not in (int, float) or not 0 <= number < torch.inf:
            raise ConfigurationError(
                f"fabric.backward(loss, {weight=}) on rank {self._communicator.rank}",
                expected="a finite number >= 0, or a tensor of shape () that holds such a number",
            )
        if self.reads_at_once:
            return number
        # On CUDA all weights are tensors, since a sum of them may contain weights from the device.
        return torch.full((), number, dtype=torch.float64, device=self._device)

    def divisor_from(self, number: float) -> Tensor:
        """Return a divisor of losses that was saved as a number."""
        device = "cpu" if self.reads_at_once else self._device
        return torch.full((), number, dtype=torch.float64, device=device)

    def divisor_for(self, weight: LossWeight) -> Tensor:
        """Return the divisor for losses with about the given weight on each rank. Collective."""
        return _power_of_two_above(self._mean_over_ranks(weight))

    def factors_for(self, weight: LossWeight, divisor: Tensor) -> StepFactors:
        """Return the factors for a step, from the loss weights of all ranks. Collective.

        Args:
            weight: the sum of the loss weights on this rank since the step before.
            divisor: the number by which the losses were divided.

        Raises:
            UsageError: the sum of the step before was not valid. Except on CUDA, the error is also
                raised for the sum of this step.
        """
        # Before the sum of this step replaces the sum of the step before.
        self.check_last_sum()
        mean_weight = self._mean_over_ranks(weight)
        is_valid = (mean_weight > 0) & mean_weight.isfinite()
        if self.reads_at_once:
            self._raise_unless_valid(is_valid)
        else:
            # This copy to the CPU does not wait for the device. check_last_sum() waits for the
            # event, which has to be recorded after the copy has begun.
            unread_sum = _UnreadSum(
                is_valid=is_valid.to("cpu", non_blocking=True),
                is_copied=torch.get_device_module(self._device).Event(),
            )
            unread_sum.is_copied.record()
            self._unread_sum = unread_sum
        # With n ranks, a gradient is now sum(gradients of losses) / (n * divisor). The factor
        # divisor / mean_weight makes it sum(gradients of losses) / sum(weights).
        return StepFactors(
            factor=torch.where(is_valid, divisor / mean_weight, 0),
            next_divisor=_power_of_two_above(mean_weight),
        )

    def check_last_sum(self) -> None:
        """Raise a UsageError if the loss weights of the last step had no valid sum.

        Called at the next step and before a save. Waits until the sum of the last step is known.
        The error is raised once.
        """
        unread_sum = self._unread_sum
        if unread_sum is None:
            return
        # Before the check, so that the next call does not raise the same error again.
        self._unread_sum = None
        unread_sum.is_copied.synchronize()
        self._raise_unless_valid(unread_sum.is_valid)

    def _raise_unless_valid(self, is_valid: Tensor) -> None:
        """Raise a UsageError if the loss weights of a step have no valid sum."""
        if not is_valid:
            raise UsageError(
                f"an optimizer's step after weighted losses on rank {self._communicator.rank}",
                problem="the loss weights of all ranks since the step before have a sum of zero, "
                "or a sum that is not finite",
                expected=EXPECTED_LOSSES,
                suggestion="optimizer.zero_grad() in place of such a step",
            )

    def _is_number_on_device(self, weight: Any) -> bool:
        """Return whether a loss weight is a tensor of numbers on this process's device."""
        if not isinstance(weight, Tensor) or weight.dtype is torch.bool:
            return False
        return weight.device.type == self._device.type

    def _mean_over_ranks(self, weight: LossWeight) -> Tensor:
        """Return the mean of the ranks' loss weights, in float64. Collective.

        The gradients are to be divided by the sum of the weights. They are means over the ranks,
        which divides them by the number of ranks already, so the mean of the weights remains.
        """
        total = weight
        if self._communicator.size > 1:
            total = all_reduce(self._communicator, weight, Reduce.SUM)
        return torch.as_tensor(total, dtype=torch.float64) / self._communicator.size


def _power_of_two_above(mean: Tensor) -> Tensor:
    """Return the smallest power of two greater than a number, without waiting for a device.

    The result is 1 if the number is zero or not finite. It is at least ``2**-100`` and at most
    ``2**100``: float32 holds these powers, and products with them rarely leave its range, which
    ends near ``2**-126`` and ``2**128``.

    Args:
        mean: the number, a float64 tensor without dimensions that is not negative.
    """
    # frexp() splits a number into a mantissa in [0.5, 1) and a power of two. For zero, infinity and
    # NaN, the quotient below is NaN, which clamp() keeps.
    power = mean / mean.frexp().mantissa
    return power.clamp(2.0**-100, 2.0**100).nan_to_num(nan=1.0)
