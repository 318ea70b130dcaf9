"""The losses of closures, on which all ranks have to agree.

[Note: Closures] ``step(closure)`` calls a function that computes the loss and its gradients.
``LBFGS`` decides by this loss how far it steps, and whether it calls the closure again. The
gradients are averaged over the ranks. The loss of each rank is that of its own batch. With such
losses ranks would call the closure a different number of times, and hang. So the closure of
``LBFGS`` returns the mean of the losses over the ranks, which is the loss of the gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from fabric.collectives import all_reduce
from fabric.communicators import Communicator, Reduce
from fabric.optim.loss_scaler import has_closure

__all__ = ["average_closure_losses"]

_Closure = Callable[[], Any]


def average_closure_losses(
    optimizer: Optimizer, communicator: Communicator
) -> RemovableHandle | None:
    """Average the losses of an optimizer's closures over the ranks. See ``[Note: Closures]``.

    Args:
        optimizer: the optimizer.
        communicator: the ranks that read different batches.

    Returns:
        The handle that removes the hook before steps. None if no step depends on the losses.
    """
    if communicator.size == 1 or not isinstance(optimizer, LBFGS):
        return None

    def before_step(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the closure of a step. torch takes the arguments that the hook returns."""
        if not has_closure(args, kwargs):
            return None
        if "closure" in kwargs:
            closure = partial(_mean_loss, kwargs["closure"], communicator)
            return args, {**kwargs, "closure": closure}
        optimizer_argument, closure, *more = args
        averaged_closure = partial(_mean_loss, closure, communicator)
        return (optimizer_argument, averaged_closure, *more), kwargs

    return optimizer.register_step_pre_hook(before_step)


def _mean_loss(closure: _Closure, communicator: Communicator) -> Any:
    """Call a closure, and return the mean of its losses over the ranks. Collective."""
    loss = closure()
    if isinstance(loss, Tensor):
        loss = loss.detach()
    return all_reduce(communicator, loss, Reduce.MEAN)
