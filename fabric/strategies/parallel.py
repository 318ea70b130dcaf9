"""The base of strategies for several devices, with the older forms of setup that take a trainer."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import nn

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.strategies.base import uncompiled
from fabric.strategies.standalone import Strategy

__all__ = ["ParallelStrategy", "as_list", "check_forwarded_arguments", "refuse_unprepared"]


class ParallelStrategy(Strategy):
    """A strategy for several devices, with one process for each unless it says otherwise.

    Arguments as for :class:`Strategy`.
    """

    name = "parallel"
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
        module = trainer.model
        precision = self.runtime.precision
        request = f"{type(self).__name__}.setup(trainer)"
        modern = "model, optimizer = fabric.setup(model, optimizer)"
        needs_autocast = precision.compute_dtype is not None and not self._casts
        if needs_autocast or precision.has_own_context:
            problem = (
                "a strategy alone does not enter the precision's forward context, and does not "
                "scale the loss"
            )
            request = f"{request} with precision={precision.name!r}"
            raise ConfigurationError(
                request, problem, suggestion=f"{modern} and fabric.backward(loss)"
            )
        if precision.loss_scale is not None and self.is_global_zero:
            text = "computes in float16 and does not scale the loss: gradients below 6e-8 become 0. Write:"
            warnings.warn(f"{request} {text} {modern} and fabric.backward(loss)", stacklevel=3)
        if self._is_prepared(module):
            raise UsageError(
                request, f"this {type(module).__name__} is set up already", suggestion=modern
            )
        optimizers = as_list(getattr(trainer, "optimizers", None))
        self.check_setup(module, optimizers)
        precision.convert_module(module)
        trainer.model = self.setup_module(self.module_to_device(module))
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)

    def _is_prepared(self, module: nn.Module) -> bool:
        """Whether this is a prepared module, or the user's module of one."""
        inner = uncompiled(module)
        return isinstance(inner, self._wrapper) or inner in map(self.unwrap, self._prepared_modules)

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
            raise RankFailedError(
                f"reconciliate_processes(trace) on rank {rank}", rank, 1, trace, "this rank failed"
            )


def as_list(objects: Any) -> list[Any]:
    """None, one object, or a sequence of several, as a list."""
    is_several = isinstance(objects, Sequence) and not isinstance(objects, str)
    return [] if objects is None else list(objects) if is_several else [objects]


def refuse_unprepared(strategy: Strategy, module: nn.Module) -> NoReturn:
    """Raise for a module whose gradients this strategy does not synchronize."""
    problem = f"it was not set up with {type(strategy).__name__}: no backward pass of it synchronizes anything"
    raise UsageError(
        f"no_backward_sync({type(module).__name__})",
        problem,
        suggestion="fabric.setup_module(model)",
    )


def check_forwarded_arguments(
    strategy: str, function: Callable[..., Any], given: Mapping[str, Any], own: set[str]
) -> None:
    """Raise an ArgumentTypeError for what torch's ``function`` does not take, or a strategy decides as its ``own``."""
    known = set(inspect.signature(function).parameters) - own
    if unknown := sorted(set(given) - known):
        raise ArgumentTypeError(
            f"{strategy}({', '.join(f'{name}={given[name]!r}' for name in unknown)})",
            f"{function.__qualname__.split('.')[0]} takes no {', '.join(unknown)}, or the strategy decides it",
            ", ".join(sorted(known)),
        )
