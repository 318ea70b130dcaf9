"""The losses of closures, on which all ranks have to agree."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.collectives import all_reduce
from fabric.communicators import Communicator, Reduce
from fabric.errors import UsageError
from fabric.hooks import Hooks
from fabric.optim.loss_scaler import has_closure

__all__ = ["ClosureLosses"]

_Closure = Callable[[], Any]


# [Note: Closures]
# `step(closure)` calls a function that computes the loss and its gradients. `LBFGS` decides by this
# loss how far it steps, and whether it calls the closure again. The gradients are averaged over the
# ranks, or summed up by `backward(loss, reduce="sum")`. The loss of each rank is that of its own
# batch. With such losses ranks would call the closure a different number of times, and hang. So the
# closure of `LBFGS` returns the mean or the sum of the losses over the ranks, which is the loss of
# the gradients.
@dataclass
class ClosureLosses:
    """Averages or sums of the losses of closures over the ranks.

    Args:
        communicator: the ranks over which gradients are averaged.
        backward: the hooks around backward passes.
        num_summed_losses: the number of ranks whose losses are summed up by ``reduce="sum"``.
        summed_passes: the number of backward passes with ``reduce="sum"`` so far, in closures and
            outside. Counted by the session.
    """

    communicator: Communicator
    backward: Hooks
    num_summed_losses: int
    summed_passes: int = 0

    def register(self, optimizer: Optimizer) -> RemovableHandle | None:
        """Register a hook that reduces the losses of the optimizer's closures over the ranks.

        Called at setup. Only LBFGS gets a hook, since no other step of torch depends on the losses
        that its closure returns.

        Returns:
            The handle that removes the hook before steps. None if there is no hook.
        """
        if self.communicator.size == 1 or not isinstance(optimizer, LBFGS):
            return None
        return optimizer.register_step_pre_hook(self._before_step)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Have a step call its closure through :meth:`_reduced_loss`. A step pre-hook of LBFGS.

        torch passes the arguments that the hook returns on to the step.
        """
        if not has_closure(args, kwargs):
            return None
        if "closure" in kwargs:
            closure = partial(self._reduced_loss, kwargs["closure"])
            return args, {**kwargs, "closure": closure}
        # torch passes the optimizer as the first argument, since the hook sees its method step.
        optimizer_argument, closure, *more = args
        reducing_closure = partial(self._reduced_loss, closure)
        return (optimizer_argument, reducing_closure, *more), kwargs

    def _reduced_loss(self, closure: _Closure) -> Any:
        """Call a closure, and return the mean or the sum of its losses over ranks. Collective.

        LBFGS needs the loss to which the gradients belong, and the gradients are averaged over the
        ranks, or summed by ``backward(loss, reduce="sum")``.

        Raises:
            UsageError: some backward passes of the closure have averaged gradients, and some have
                summed them up.
        """
        num_passes = 0

        def count_pass(loss: Tensor, error: BaseException | None) -> None:
            nonlocal num_passes
            num_passes += 1

        # count_pass() counts all backward passes of the closure. TrainingSession adds 1 to
        # self.summed_passes in each backward pass with reduce="sum", also within the closure.
        summed_passes_before = self.summed_passes
        self.backward.after.append(count_pass)
        try:
            loss = closure()
        finally:
            self.backward.after.remove(count_pass)
        if isinstance(loss, Tensor):
            loss = loss.detach()
        mean_loss = all_reduce(self.communicator, loss, Reduce.MEAN)
        num_summed_passes = self.summed_passes - summed_passes_before
        if num_summed_passes == 0:
            return mean_loss
        if num_summed_passes < num_passes:
            raise UsageError(
                f"a closure of LBFGS on rank {self.communicator.rank}",
                problem='some of its backward passes have reduce="sum" and some have not, so that '
                "its loss is neither the mean nor the sum of the losses of all ranks",
                expected="one kind of reduction in a closure",
                suggestion='fabric.backward(loss, reduce="sum") for every loss of the closure',
            )
        # All passes have summed gradients. The mean times the number of ranks is the sum of losses.
        return mean_loss * self.num_summed_losses
