"""Checks of the first losses: whether a loss and its weight belong together."""

# See also [Note: Loss reduction] in loss_reduction.py.

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from fabric.diagnostics.loss_reduction import loss_reduction
from fabric.errors import UsageError

__all__ = ["LossCheck", "LossChecks"]

# A function that gets the arguments "tensor", "weight" and "reduce" of Fabric.backward.
LossCheck = Callable[[Tensor, Any, str], object]

# More than one backward pass for each step, since a step may accumulate several losses.
_CHECKED_LOSSES = 12
_TURN_OFF = "Fabric(check_training=False) if this is meant"


class LossChecks:
    """Checks whether the first losses of a job are a mean or a sum, as their weights require.

    A weight is the number of terms of a loss that is a sum. Gradients of losses without weights are
    averaged over ranks, which suits a mean. The checks remove themselves after the first losses.

    Args:
        rank: the rank of this process.
        num_replicas: the number of ranks that have different samples.
        checks: the functions that ``Fabric.backward`` calls for each loss. This object adds
            :meth:`check`.
    """

    def __init__(self, rank: int, num_replicas: int, checks: list[LossCheck]) -> None:
        """Add the check."""
        self._rank = rank
        self._num_replicas = num_replicas
        self._checks = checks
        self._num_losses = 0
        self._has_warned = False
        checks.append(self.check)

    def check(self, loss: Tensor, weight: Any, reduce: str) -> None:
        """Check one loss before its backward pass. ``Fabric.backward`` calls this method.

        Raise for a mean with a weight. Warn once, on rank 0, of a sum without a weight.

        Args:
            loss: the loss.
            weight: the number of terms of the loss, as the user has given it. It may not be a
                number. None if the user has given none.
            reduce: how the gradients of the ranks are reduced, such as ``"mean"``.

        Raises:
            UsageError: the loss is a mean, and the weight is greater than one.
        """
        self._num_losses += 1
        if self._num_losses >= _CHECKED_LOSSES:
            # This is allowed, since Fabric.backward() iterates over a copy of the list.
            self._checks.remove(self.check)
        num_terms = _number(weight)
        reduction = loss_reduction(loss, num_terms)
        if reduction is None:  # it is not known whether the loss is a mean or a sum
            return
        if num_terms is not None and num_terms > 1 and reduction.is_plain_mean:
            self._refuse_weight_of_mean(num_terms)
        is_averaged = weight is None and reduce == "mean" and self._num_replicas > 1
        is_averaged_sum = is_averaged and reduction.is_plain_sum
        if is_averaged_sum and self._rank == 0 and not self._has_warned:
            self._has_warned = True
            self._warn_of_averaged_sum()

    def _refuse_weight_of_mean(self, weight: float) -> NoReturn:
        """Raise the UsageError for a loss that is a mean and has a weight."""
        raise UsageError(
            f"fabric.backward(loss, weight={weight:g}) on rank {self._rank}",
            problem="the loss is a mean, and its gradients would be divided by the weight once "
            "more",
            expected="the weight of a loss that is a sum: the number of its terms",
            suggestion="fabric.backward(loss * n, weight=n), or the loss with "
            'reduction="sum"; fabric.backward(loss) for the mean over all processes of their '
            f"losses; {_TURN_OFF}",
        )

    def _warn_of_averaged_sum(self) -> None:
        """Warn that the gradients of a sum are averaged. Called one level below :meth:`check`."""
        warnings.warn(
            f"the loss of each of {self._num_replicas} processes is a sum over its samples, "
            "and gradients are averaged over processes: they are "
            f"{self._num_replicas} times smaller than those of one process that sums over all "
            'samples. Write fabric.backward(loss, reduce="sum") for the sum, or '
            "fabric.backward(loss, weight=n) with the number of terms for the mean; "
            f"{_TURN_OFF}",
            # The line that calls fabric.backward(): past this method, check() and backward().
            stacklevel=4,
        )


def _number(weight: Any) -> float | None:
    """Return a weight as a number. None if it is not a number, which is refused later."""
    is_scalar = getattr(weight, "shape", None) == ()  # a tensor or an array
    if is_scalar:
        weight = weight.item()
    # type() and not isinstance(), since a bool is not a number of terms.
    if type(weight) not in (int, float):
        return None
    return float(weight)
