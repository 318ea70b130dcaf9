"""The base of strategies for several devices, with the older forms of setup that take a trainer."""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from fabric._torch import uncompiled
from fabric.communicators import Communicator
from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.strategies.base import Strategy

__all__ = ["ParallelStrategy", "as_list", "check_passed_on", "check_same_model", "refuse_unprepared"]


class ParallelStrategy(Strategy):
    """A strategy for several devices, with one process for each unless it says otherwise.

    Arguments as for :class:`Strategy`.
    """

    name = "parallel"
    connects_processes = True
    # Whether a prepared module computes in the dtype of a mixed precision by itself.
    _casts: ClassVar[bool] = False

    def setup(self, trainer: Any) -> None:
        """Older form of :meth:`fabric.Fabric.setup`; collective.

        Moves the trainer's model, converts it to the precision and prepares it together with the trainer's optimizers,
        if it has any. Afterward the prepared module of torch is the trainer's model.

        Args:
            trainer: an object with ``model`` and perhaps ``optimizers``.

        Raises:
            UsageError: the model is prepared already.
            ConfigurationError: a mixed precision under a strategy whose modules do not compute in it by themselves.
        """
        module, precision = trainer.model, self.runtime.precision
        request, modern = f"{type(self).__name__}.setup(trainer)", "model, optimizer = fabric.setup(model, optimizer)"
        if precision.compute_dtype is not None and not self._casts:
            problem = "autocast around the forward pass and scaling of the loss are not done by a strategy alone"
            request = f"{request} with precision={precision.name!r}"
            raise ConfigurationError(request, problem, suggestion=f"{modern} and fabric.backward(loss)")
        if precision.loss_scale is not None and self.is_global_zero:
            text = "computes in float16 and does not scale the loss: gradients below 6e-8 become 0. Write:"
            warnings.warn(f"{request} {text} {modern} and fabric.backward(loss)", stacklevel=3)
        if self._is_prepared(module):
            raise UsageError(request, f"this {type(module).__name__} is set up already", suggestion=modern)
        optimizers = as_list(getattr(trainer, "optimizers", None))
        self.check_setup(module, optimizers)
        precision.convert_module(module)
        trainer.model = self.setup_module(self.module_to_device(module))
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)

    def _is_prepared(self, module: nn.Module) -> bool:
        """Whether this is a prepared module, or the user's module of one."""
        inner = uncompiled(module)
        return isinstance(inner, self._wrapper) or inner in map(self._users, self._prepared)

    def reconciliate_processes(self, trace: str) -> None:
        """Abort the process group after a failure of this process, and raise; with one process do nothing.

        The launcher then ends the other processes, and the process that launched them raises with this rank and its
        traceback. It does so for every exception that the function raises, so that the call is not needed.

        Args:
            trace: the traceback of the failure, as text.

        Raises:
            RankFailedError: always, with several processes; it holds the rank and the trace.
        """
        if self.world_size > 1:
            rank = self.global_rank
            self.runtime.abort()
            raise RankFailedError(f"reconciliate_processes(trace) on rank {rank}", rank, 1, trace, "this rank failed")


def check_same_model(communicator: Communicator, root: nn.Module, error: Any = None, plan: object = None) -> None:
    """Raise on every rank where any rank has an error, or another model. Collective.

    Args:
        communicator: all ranks.
        root: the model.
        error: a FabricError, why this rank cannot set it up; None if it can.
        plan: what will be made of which part, as text tells it.

    Raises:
        FabricError: the error of the first rank that has one.
        UsageError: a difference between the models.
    """
    layouts = communicator.gather_objects("" if error else _layout(root, plan), error=error)
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            request = f"setup({type(root).__name__}) on rank {communicator.rank}"
            problem = f"it is another model on rank {rank} than on rank 0, by names, shapes, dtypes or parts of it"
            raise UsageError(request, problem, suggestion="a build that does not depend on the rank")


def _layout(root: nn.Module, plan: object) -> str:
    """A digest of the names of parameters and buffers, which of them are one tensor, their shapes and dtypes."""
    tensors = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
    numbers = {id(each): number for number, (_, each) in enumerate(tensors)}
    layout = [
        (name, numbers[id(each)], not is_lazy(each) and each.shape, each.dtype, each.requires_grad, type(each))
        for name, each in tensors
    ]
    return hashlib.sha256(repr((layout, plan)).encode()).hexdigest()


def as_list(objects: Any) -> list[Any]:
    """None, one object, or a sequence of several, as a list."""
    return [] if objects is None else list(objects) if isinstance(objects, Sequence) else [objects]


def refuse_unprepared(strategy: Strategy, module: nn.Module) -> NoReturn:
    """Raise for a module whose gradients this strategy does not synchronize."""
    problem = f"it was not set up with {type(strategy).__name__}: no backward pass of it synchronizes anything"
    raise UsageError(f"no_backward_sync({type(module).__name__})", problem, suggestion="fabric.setup_module(model)")


def check_passed_on(strategy: str, function: Callable[..., Any], given: Mapping[str, Any], own: set[str]) -> None:
    """Raise an ArgumentTypeError for what torch's ``function`` does not take, or a strategy decides as its ``own``."""
    known = set(inspect.signature(function).parameters) - own
    if unknown := sorted(set(given) - known):
        raise ArgumentTypeError(
            f"{strategy}({', '.join(f'{name}={given[name]!r}' for name in unknown)})",
            f"{function.__qualname__.split('.')[0]} takes no {', '.join(unknown)}, or the strategy decides it",
            ", ".join(sorted(known)),
        )
