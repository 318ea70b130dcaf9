"""The base of strategies for several devices, with an older form of setup that takes a trainer."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from torch import nn

from fabric._torch import uncompiled
from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.strategies.standalone import Strategy

__all__ = [
    "ParallelStrategy",
    "as_list",
    "check_forwarded_arguments",
    "refuse_join",
    "refuse_unprepared",
]

# The code that replaces the older form, for errors.
_MODERN_SETUP = "model, optimizer = fabric.setup(model, optimizer)"


class ParallelStrategy(Strategy):
    """A strategy for several devices, usually with one process for each device.

    The arguments are those of :class:`Strategy`.
    """

    name = "parallel"
    # Whether a prepared module itself casts to the compute dtype of a mixed precision. Otherwise
    # Fabric enters autocast around forward passes.
    _casts_to_compute_dtype: ClassVar[bool] = False

    def setup(self, trainer: Any) -> None:
        """Prepare a trainer's model and optimizers. Older form of :meth:`fabric.Fabric.setup`.

        Collective. The trainer's model is converted to the precision, moved to the device and
        prepared. The prepared module becomes the trainer's model. The trainer's optimizers, if
        there are any, are set up in place.

        Args:
            trainer: an object with ``model`` and perhaps ``optimizers``.

        Raises:
            UsageError: the model is prepared already.
            ConfigurationError: the precision has a forward context, which only ``Fabric`` enters.
        """
        module = trainer.model
        self._check_standalone_precision()
        if self._is_prepared(module):
            raise UsageError(
                f"{type(self).__name__}.setup(trainer)",
                problem=f"this {type(module).__name__} is set up already",
                suggestion=_MODERN_SETUP,
            )
        optimizers = as_list(getattr(trainer, "optimizers", None))
        self.check_setup(module, optimizers)
        self.runtime.precision.convert_module(module)
        trainer.model = self.setup_module(self.module_to_device(module))
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)

    def _check_standalone_precision(self) -> None:
        """Raise or warn if the precision needs ``Fabric``. Called only by :meth:`setup`.

        A strategy alone neither enters autocast around forward passes nor scales the loss.

        Raises:
            ConfigurationError: the precision has a forward context that nothing would enter.
        """
        precision = self.runtime.precision
        request = f"{type(self).__name__}.setup(trainer)"
        modern = f"{_MODERN_SETUP} and fabric.backward(loss)"
        needs_autocast = precision.compute_dtype is not None and not self._casts_to_compute_dtype
        if needs_autocast or precision.has_own_context:
            raise ConfigurationError(
                f"{request} with precision={precision.name!r}",
                problem="a strategy alone does not enter the precision's forward context, and does "
                "not scale the loss",
                suggestion=modern,
            )
        if precision.loss_scale is not None and self.is_global_zero:
            # Frame 1 is this method, frame 2 is setup(), and frame 3 is the user's call of setup().
            # An override that calls this setup() is one frame more.
            is_overridden = type(self).setup is not ParallelStrategy.setup
            stacklevel = 4 if is_overridden else 3
            # The smallest positive number of float16 is 6e-8.
            warnings.warn(
                f"{request} computes in float16 and does not scale the loss: gradients below 6e-8 "
                f"become 0. Write: {modern}",
                stacklevel=stacklevel,
            )

    def _is_prepared(self, module: nn.Module) -> bool:
        """Return whether this is a prepared module, or the user's module of a prepared module."""
        inner = uncompiled(module)
        # True for a wrapper that another strategy of this kind has made, too.
        is_wrapper = self.unwrap(inner) is not inner
        if is_wrapper:
            return True
        return inner in map(self.unwrap, self._prepared_modules)

    def reconciliate_processes(self, trace: str) -> None:
        """Abort the process group after a failure of this process, and raise an error.

        With one process the call does nothing. With several, the launcher ends the other ranks, and
        the launching process raises an error with this rank and the trace. This method is for older
        code: the launcher does the same for every exception of a rank.

        Args:
            trace: the traceback of the failure, as text.

        Raises:
            RankFailedError: always, with several processes. It holds the rank and the trace.
        """
        if self.world_size > 1:
            rank = self.global_rank
            self.runtime.abort()
            raise RankFailedError(
                f"reconciliate_processes(trace) on rank {rank}",
                rank=rank,
                exit_code=1,
                traceback=trace,
                problem="this rank failed",
            )


def as_list(objects: Any) -> list[Any]:
    """Return a list of the objects in a sequence, or of one object. None gives an empty list."""
    if objects is None:
        return []
    if isinstance(objects, Sequence) and not isinstance(objects, str):
        return list(objects)
    return [objects]


def refuse_unprepared(strategy: Strategy, module: nn.Module) -> NoReturn:
    """Raise the UsageError for ``no_backward_sync`` of a module that was not set up.

    The context would have no effect, since the gradients of such a module are never synchronized.
    """
    raise UsageError(
        f"no_backward_sync({type(module).__name__})",
        problem=f"the module was not set up with {type(strategy).__name__}, and so its gradients "
        "are never synchronized",
        suggestion="fabric.setup_module(model)",
    )


def refuse_join(strategy: Strategy) -> NoReturn:
    """Raise the UsageError for ``fabric.join`` with modules that cannot be joined."""
    raise UsageError(
        f"fabric.join(...) with {type(strategy).__name__} on rank {strategy.global_rank}",
        problem="a forward pass, a backward pass or a step needs all ranks, but a rank without "
        "batches makes none of them",
        expected='strategy="ddp" and modules with trainable parameters, without '
        "model_averaging_period and sync_batchnorm",
        suggestion='setup_dataloaders(loader, uneven="drop") or uneven="pad"; or, for data '
        'that fabric does not shard, uneven="shortest" or uneven="longest"',
    )


def check_forwarded_arguments(
    *,
    strategy_name: str,
    torch_function: Callable[..., Any],
    user_arguments: Mapping[str, Any],
    decided_names: set[str],
) -> None:
    """Raise an ArgumentTypeError for arguments that a strategy cannot forward to torch.

    Called by a strategy's constructor, so that a wrong argument is an error before ``setup``.

    Args:
        strategy_name: the name of the strategy, for the error.
        torch_function: the function of torch that gets the arguments.
        user_arguments: the keyword arguments of the user.
        decided_names: the parameters of ``torch_function`` that the strategy itself passes, and
            ``self`` if it is a constructor.
    """
    accepted = set(inspect.signature(torch_function).parameters) - decided_names
    unknown = sorted(set(user_arguments) - accepted)
    if not unknown:
        return
    call = ", ".join(f"{name}={user_arguments[name]!r}" for name in unknown)
    # The name of the class for a constructor, such as "DistributedDataParallel.__init__".
    torch_name = torch_function.__qualname__.split(".")[0]
    raise ArgumentTypeError(
        f"{strategy_name}({call})",
        problem=f"{torch_name} takes no {', '.join(unknown)}, or the strategy decides it",
        expected=", ".join(sorted(accepted)),
    )
