"""Older names of strategies and of their methods, so that a ported script runs before it is rewritten.

Everything here gives a :class:`DeprecationWarning` with the modern spelling, at the line that uses it. Where a method
takes a *trainer*, that is any object with the attributes that the method needs: ``model`` (a module), ``optimizers``
(an optimizer, or a sequence of them) or ``callback_metrics`` (a dict).
"""

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._fabric import Fabric
from fabric._session import prepared_module, without_sync
from fabric._torch import uncompiled
from fabric.accelerators import Accelerator
from fabric.environments import Environment
from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.precision import Precision, parse_precision
from fabric.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy
from fabric.tree import map_tensors

__all__ = ["DDPFullyShardedNativeStrategy", "DDPSpawnPlugin"]

_MODERN_SETUP = "model, optimizer = fabric.setup(model, optimizer)"
_Older: TypeAlias = "DDPSpawnPlugin | DDPFullyShardedNativeStrategy"


class _Mailbox(deque[Any]):
    """A queue whose entries :meth:`DDPSpawnPlugin.spawn` carries from process 0 to the process that called it."""

    put = deque.append
    get = deque.popleft


def _setup(self: "_Older", trainer: Any = None) -> None:
    """Older form of :meth:`fabric.Fabric.setup`; collective.

    Moves the trainer's model, converts it to the precision and prepares it together with the trainer's optimizers, if
    it has any. Afterward the prepared module of torch is the trainer's model, and :attr:`model` of the strategy.

    Args:
        trainer: an object with ``model`` and perhaps ``optimizers``; None takes :attr:`model` of the strategy.

    Raises:
        UsageError: the model is prepared already.
        ConfigurationError: a mixed precision, which needs ``Fabric.setup`` and ``Fabric.backward``.
    """
    _deprecated("setup(trainer)", _MODERN_SETUP)
    module: Any = self.model if trainer is None else trainer.model
    precision = self.runtime.precision
    if precision.loss_scaling or (precision.compute_dtype is not None and not isinstance(self, FSDPStrategy)):
        problem = "autocast around the forward pass and scaling of the loss are not done by a strategy alone"
        request = f"{type(self).__name__}.setup(trainer) with precision={precision.name!r}"
        raise ConfigurationError(request, problem, suggestion=f"{_MODERN_SETUP} and fabric.backward(loss)")
    if _is_prepared(self, module):
        problem = f"this {type(module).__name__} is set up already"
        raise UsageError("setup(trainer)", problem, suggestion=_MODERN_SETUP)
    optimizers = _listed(getattr(trainer, "optimizers", None) or ())
    self.check_setup(module, optimizers)
    precision.convert_module(module)
    self.model = self.setup_module(self.module_to_device(module))
    for optimizer in optimizers:
        self.setup_optimizer(optimizer)
    if trainer is not None:
        trainer.model = self.model


def _setup_optimizers(self: ParallelStrategy, trainer: Any) -> None:
    """Older form of :meth:`fabric.Fabric.setup_optimizers`, for ``trainer.optimizers`` of a model that is set up."""
    _deprecated("setup_optimizers(trainer)", "optimizer = fabric.setup_optimizers(optimizer)")
    optimizers = _listed(trainer.optimizers)
    self.check_setup(None, optimizers)
    for optimizer in optimizers:
        self.setup_optimizer(optimizer)


def _model_to_device(self: "_Older") -> None:
    """Move :attr:`model` to this process's device; a model that has been set up is there already."""
    _deprecated("model_to_device()", "fabric.to_device(model); fabric.setup(model) moves it, too")
    if self.model is not None and not _is_prepared(self, self.model):
        self.module_to_device(self.model)


def _block_backward_sync(
    self: "_Older", module: nn.Module | None = None, enabled: bool = True
) -> AbstractContextManager[Any]:
    """Older name of ``no_backward_sync``; without a module for every one that has been set up."""
    _deprecated("block_backward_sync()", "with fabric.no_backward_sync(model):")
    modules = self._prepared if module is None else [prepared_module(module)]
    return without_sync(self, modules, enabled)


def _is_prepared(self: "_Older", module: Any) -> bool:
    """Whether this is a prepared module, or the one that was prepared."""
    inner = uncompiled(module)
    return any(inner is one or inner is uncompiled(getattr(one, "module", one)) for one in self._prepared)


def _model_sharded_context(self: ParallelStrategy) -> AbstractContextManager[Any]:
    """Older name of ``module_init_context``."""
    _deprecated("model_sharded_context()", "with fabric.init_module():")
    return self.module_init_context()


def _barrier(self: ParallelStrategy, *args: Any, **kwargs: Any) -> None:
    """Wait until every process calls it; arguments of old are accepted and mean nothing. Collective."""
    name = args[0] if args else kwargs.get("name")
    if len(args) > 1 or set(kwargs) - {"name", "group"} or not isinstance(name, str | None):
        _deprecated("barrier(*args, **kwargs)", 'fabric.barrier() or fabric.barrier("name")')
    ParallelStrategy.barrier(self, name if isinstance(name, str) else None, kwargs.get("group"))


def _reconciliate_processes(self: ParallelStrategy, trace: str) -> None:
    """Abort the process group after a failure of this process, and raise; with one process do nothing.

    The launcher then ends the other processes, and the process that launched them raises with this rank and its
    traceback. It does so for every exception that the function raises, so that the call is not needed.

    Args:
        trace: the traceback of the failure, as text.

    Raises:
        RankFailedError: always, with several processes; it holds the rank and the trace.
    """
    _deprecated("reconciliate_processes(trace)", "raise, and the launcher ends the other processes")
    if self.is_distributed:
        rank = self.global_rank
        self.runtime.abort()
        raise RankFailedError(f"reconciliate_processes(trace) on rank {rank}", rank, 1, trace, "this process failed")


class DDPSpawnPlugin(DDPStrategy):
    """Older name of :class:`fabric.strategies.DDPStrategy` with ``start_method="spawn"``.

    The modern spelling is ``Fabric(strategy="ddp_spawn")``, or ``DDPStrategy(start_method="spawn")`` with options.

    Args:
        accelerator: as for :class:`fabric.strategies.DDPStrategy`, and so is what is not listed here.
        parallel_devices: the devices of this node, one for each process; :meth:`spawn` needs them.
        cluster_environment: the environment that says which rank this is.
        checkpoint_io: format of ``save`` and ``load``.
        precision_plugin: older name of ``precision``; an object with an attribute ``precision`` stands for its value.
        *ddp_comm: ``ddp_comm_state``, ``ddp_comm_hook`` and ``ddp_comm_wrapper``, which may have their names as well.
        precision: precision.
        **options: the other arguments of ``DDPStrategy``.

    Attributes:
        model: the module that :meth:`setup` and :meth:`model_to_device` without a trainer act on; None at first.
        mp_queue: what process 0 put there is there after :meth:`spawn`.

    Raises:
        TypeError: an unknown option, or a start method.
        ConfigurationError: two precisions, or options that contradict each other.
    """

    def __init__(
        self,
        accelerator: Accelerator | str | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *ddp_comm: Any,
        precision: Precision | str | int | None = None,
        **options: Any,
    ) -> None:
        _deprecated("DDPSpawnPlugin(...)", 'Fabric(strategy="ddp_spawn"), or DDPStrategy(start_method="spawn")')
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            _one_precision(precision_plugin, precision),
            *ddp_comm,
            start_method="spawn",
            **options,
        )
        self.model: nn.Module | None = None
        self.mp_queue = _Mailbox()

    setup = _setup
    setup_optimizers = _setup_optimizers
    model_to_device = _model_to_device
    block_backward_sync = _block_backward_sync
    model_sharded_context = _model_sharded_context
    barrier = _barrier
    reconciliate_processes = _reconciliate_processes

    @property
    def _prepared(self) -> list[nn.Module]:
        return list(self._wrappers)

    def spawn(self, function: Callable[..., Any], *args: Any, return_result: bool = True, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` in a process for each parallel device, connected by this strategy.

        The modern spelling is ``Fabric(strategy="ddp_spawn", devices=2).launch(function)``, whose function gets the
        Fabric as its first argument. Where this strategy is among the arguments, or the function is one of its
        methods, each process has its own copy of it there, and that one is started. With one device nothing is
        spawned, and the function runs in this process.

        Args:
            function: what every process runs.
            *args: its arguments; they are pickled.
            return_result: whether the result is returned.
            **kwargs: its keyword arguments.

        Returns:
            What ``function`` returned in process 0, tensors by value and on the CPU; None without ``return_result``.

        Raises:
            ConfigurationError: the strategy has no parallel devices, which say how many processes there are.
            RankFailedError: a process raised, exited early or was killed.
        """
        modern = 'Fabric(strategy="ddp_spawn", devices=2).launch(function)'
        _deprecated("spawn(function)", modern)
        if not self.parallel_devices:
            problem = "this strategy has no parallel_devices, so that the number of processes is unknown"
            raise ConfigurationError(f"spawn({function!r})", problem, suggestion=modern)
        with Fabric(strategy=self) as fabric:
            result, items = fabric.launch(_run_spawned, self, function, args, kwargs, return_result)
        self.mp_queue.extend(items)
        return result

    def add_to_queue(self, trainer: Any, queue: Any) -> None:
        """Put the trainer's ``callback_metrics`` into a queue, with tensors by value: detached, on the CPU.

        The modern spelling is to return the metrics from the function that is launched.

        Args:
            trainer: an object with ``callback_metrics``, a mapping.
            queue: an object with ``put``; :attr:`mp_queue`, or a queue of ``multiprocessing`` that the processes share.
        """
        _deprecated("add_to_queue(trainer, queue)", "return trainer.callback_metrics from the launched function")
        # The copies keep a view from dragging all of its storage along.
        metrics = map_tensors(lambda tensor: tensor.detach().cpu().clone(), dict(trainer.callback_metrics))
        queue.put(pickle.dumps(metrics))

    def get_from_queue(self, trainer: Any, queue: Any) -> None:
        """Update ``trainer.callback_metrics`` by what one :meth:`add_to_queue` put into a queue; tensors on the CPU."""
        _deprecated("get_from_queue(trainer, queue)", "metrics = fabric.launch(function)")
        trainer.callback_metrics.update(pickle.loads(queue.get()))  # noqa: S301 - from a process of this job

    def post_dispatch(self, trainer: Any) -> None:
        """Update ``trainer.callback_metrics`` by everything that process 0 left in :attr:`mp_queue`."""
        _deprecated("post_dispatch(trainer)", "metrics = fabric.launch(function)")
        while self.mp_queue:
            trainer.callback_metrics.update(pickle.loads(self.mp_queue.get()))  # noqa: S301 - as above

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Does nothing: the forward pass of a prepared module has made everything ready for the backward pass."""
        _deprecated("pre_backward(loss)", "fabric.backward(loss), with nothing before it")


class DDPFullyShardedNativeStrategy(FSDPStrategy):
    """Older name of :class:`fabric.strategies.FSDPStrategy`.

    The modern spelling is ``Fabric(strategy="fsdp")``, or ``FSDPStrategy(...)`` with options. It shards by
    ``fully_shard``; options that only torch's first FSDP had are errors, but for those that mean nothing here.

    Args:
        accelerator: as for :class:`fabric.strategies.FSDPStrategy`, and so is what is not listed here.
        parallel_devices: the devices of this node.
        cluster_environment: the environment that says which rank this is.
        checkpoint_io: format of ``save`` and ``load``.
        precision_plugin: older name of ``precision``; an object with an attribute ``precision`` stands for its value.
        process_group_backend: backend of the process group.
        cpu_offload: keep shards, gradients and optimizer state on the CPU.
        backward_prefetch: how many FSDP modules are gathered ahead in the backward pass.
        mixed_precision: torch's policy, in place of what the precision says.
        precision: precision.
        **options: the other arguments of ``FSDPStrategy``.

    Attributes:
        model: the module that :meth:`setup` and :meth:`model_to_device` without a trainer act on; None at first.

    Raises:
        TypeError: an unknown option.
        ConfigurationError: two precisions, or options that cannot work.
    """

    def __init__(
        self,
        accelerator: Accelerator | str | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        cpu_offload: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        *,
        precision: Precision | str | int | None = None,
        **options: Any,
    ) -> None:
        _deprecated("DDPFullyShardedNativeStrategy(...)", 'Fabric(strategy="fsdp"), or FSDPStrategy(...)')
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            _one_precision(precision_plugin, precision),
            process_group_backend,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            **options,
        )
        self.model: nn.Module | None = None

    setup = _setup
    setup_optimizers = _setup_optimizers
    model_to_device = _model_to_device
    block_backward_sync = _block_backward_sync
    model_sharded_context = _model_sharded_context
    barrier = _barrier
    reconciliate_processes = _reconciliate_processes

    @property
    def _prepared(self) -> list[nn.Module]:
        return [forward.root for forward in self._forwards.values()]


def _deprecated(older: str, modern: str, stacklevel: int = 3) -> None:
    # Python itself shows the same warning once for each line that causes it.
    warnings.warn(f"{older} is an older name. Write: {modern}", DeprecationWarning, stacklevel=stacklevel)


def _run_spawned(fabric: Fabric, strategy: Any, function: Any, args: Any, kwargs: Any, return_result: bool) -> Any:
    result = function(*args, **kwargs)
    return result if return_result else None, list(strategy.mp_queue)


def _one_precision(plugin: Any, precision: Any) -> Any:
    if plugin is None:
        return precision
    _deprecated("precision_plugin=", "precision=", stacklevel=4)
    older = parse_precision(getattr(plugin, "precision", plugin))
    if precision is not None and parse_precision(precision) != older:
        raise ConfigurationError(f"precision_plugin={plugin!r}, precision={precision!r}", "the two differ")
    return older


def _listed(optimizers: Any) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
