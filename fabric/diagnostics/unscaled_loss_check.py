"""A check that every loss is multiplied by the loss scale."""

from collections.abc import Collection
from contextlib import ExitStack

from torch.optim import Optimizer

from fabric.contract import GradientContract
from fabric.errors import UsageError
from fabric.optim.gradient_watch import GradientWatch
from fabric.optim.gradients import has_gradients

__all__ = ["UnscaledLossCheck"]


# [Note: Unscaled losses]
# Under a loss scale, the step divides all gradients by the scale. The gradients of a loss that was
# not multiplied by the scale, as by `loss.backward()`, are then many thousand times too small. If
# no loss was scaled at all, `LossScaler` itself refuses the step.
class UnscaledLossCheck:
    """A check that no backward pass under a loss scale goes around ``fabric.backward``.

    Args:
        optimizers: the set-up optimizers. Later ones are added to this collection.
        contracts: the contracts of the set-up modules. Later ones are added to this collection.
        cleanup: the stack whose end removes the hooks of the parameters.
    """

    def __init__(
        self,
        optimizers: Collection[Optimizer],
        contracts: Collection[GradientContract],
        cleanup: ExitStack,
    ) -> None:
        """Start without hooks. :meth:`watch` adds them."""
        self._optimizers = optimizers
        self._gradient_watch = GradientWatch(contracts, cleanup)
        # Whether a backward pass of Fabric is running. It may call the step of an optimizer.
        self._is_in_pass = False

    def watch(self, optimizer: Optimizer) -> None:
        """Watch the gradients of a set-up optimizer."""
        self._gradient_watch.watch(optimizer)

    def before_backward(self, request: str) -> None:
        """Check the gradients of all optimizers before a backward pass of ``Fabric``.

        Args:
            request: the call of ``fabric.backward``, for the error.

        Raises:
            UsageError: an optimizer has gradients of an unscaled loss.
        """
        for optimizer in self._optimizers:
            self.check(optimizer, request)
        self._is_in_pass = True
        self._gradient_watch.begin_pass()

    def after_backward(self) -> None:
        """End the record of a backward pass of ``Fabric``, also of one that raised.

        If :meth:`before_backward` has raised, the pass did not begin. The next pass is refused,
        too, unless the user clears the gradients.
        """
        if self._is_in_pass:
            self._is_in_pass = False
            self._gradient_watch.end_pass()

    def check(self, optimizer: Optimizer, request: str) -> None:
        """Raise if an optimizer has gradients of an unscaled loss.

        Args:
            optimizer: a set-up optimizer, before its step.
            request: the step, for the error.

        Raises:
            UsageError: a backward pass without ``fabric.backward`` has added to its gradients,
                and the user has not cleared them since.
        """
        # Within a pass of Fabric, a hook may call the step. The gradients are those of the pass,
        # and before_backward() has checked the earlier ones.
        if self._is_in_pass or not self._gradient_watch.has_unknown_pass(optimizer):
            return
        if has_gradients(optimizer):
            class_name = type(optimizer).__name__
            raise UsageError(
                request,
                problem="a backward pass without fabric.backward has added to gradients of "
                f"{class_name}: its loss was not multiplied by the loss scale, by which the step "
                "divides them",
                expected="losses that fabric scales",
                suggestion="fabric.backward(loss), in place of loss.backward(), for every loss. "
                "optimizer.zero_grad() drops the gradients of other losses",
            )
