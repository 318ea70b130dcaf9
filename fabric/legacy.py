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
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fabric._fabric import Fabric
from fabric._session import prepared_module
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.environments import Environment
from fabric.errors import ConfigurationError, UsageError
from fabric.hooks import Hooks
from fabric.module import FabricModule
from fabric.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy
from fabric.strategies.parallel import as_list
from fabric.tree import map_tensors

__all__ = ["DDPFullyShardedNativeStrategy", "DDPSpawnPlugin"]


class _Mailbox(deque[Any]):
    """A queue whose entries :meth:`DDPSpawnPlugin.spawn` carries from process 0 to the process that called it."""

    put = deque.append
    get = deque.popleft


class _OlderMethods(ParallelStrategy):
    """The methods that both of the older strategies had."""

    model: nn.Module | None = None

    @override
    def setup(self, trainer: Any = None) -> None:
        """See :meth:`fabric.strategies.ParallelStrategy.setup`; afterward the prepared module is :attr:`model`, too.

        Args:
            trainer: an object with ``model`` and perhaps ``optimizers``; None takes :attr:`model` of the strategy.

        Raises:
            UsageError: the model is prepared already, or there is none.
            ConfigurationError: a mixed precision under DDP, which needs ``Fabric.setup`` and ``Fabric.backward``.
        """
        _deprecated("setup(trainer)", "model, optimizer = fabric.setup(model, optimizer)")
        if trainer is None:
            if self.model is None:
                request = f"{type(self).__name__}.setup()"
                raise UsageError(request, "there is no model", suggestion="strategy.model = model")
            trainer = SimpleNamespace(model=self.model)
        super().setup(trainer)
        self.model = trainer.model

    def setup_optimizers(self, trainer: Any) -> None:
        """Older form of :meth:`fabric.Fabric.setup_optimizers`, for ``trainer.optimizers`` of a set-up model."""
        _deprecated("setup_optimizers(trainer)", "optimizer = fabric.setup_optimizers(optimizer)")
        optimizers = as_list(trainer.optimizers)
        self.check_setup(None, optimizers)
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)

    def model_to_device(self) -> None:
        """Move :attr:`model` to this process's device; a model that has been set up is there already."""
        _deprecated(
            "model_to_device()", "fabric.to_device(model); fabric.setup(model) moves it, too"
        )
        if self.model is not None and not self._is_prepared(self.model):
            self.module_to_device(self.model)

    @override
    def block_backward_sync(
        self, module: nn.Module | None = None, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Older name of ``no_backward_sync``; without a module for every one that has been set up."""
        _deprecated("block_backward_sync()", "with fabric.no_backward_sync(model):")
        return super().block_backward_sync(
            None if module is None else prepared_module(module), enabled
        )

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Older name of ``module_init_context``."""
        _deprecated("model_sharded_context()", "with fabric.init_module():")
        return self.module_init_context()


def _step(name: str) -> Callable[..., Any]:
    def step(self: "DDPFullyShardedNativeStrategy", *args: Any, **kwargs: Any) -> Any:
        modern = f"model = fabric.setup_module(model), and model.{name}(batch)"
        _deprecated(f"{name}(...) of a strategy", modern)
        last = None
        if self.model is not None and self._is_prepared(self.model):
            last = self.model
        elif self._prepared_modules:
            last = self._prepared_modules[-1]
        if last is None:
            raise UsageError(
                f"{type(self).__name__}.{name}(...)", "no module is set up", suggestion=modern
            )
        runtime = self.runtime
        model = FabricModule(
            last, last, runtime.precision, runtime.device, Hooks(), self.gradient_contract(last)
        )
        return getattr(model, name)(*args, **kwargs)

    step.__name__ = name
    step.__doc__ = f"Call ``{name}`` of the module of :meth:`setup`, or else of the last set-up one: a forward pass."
    return step


class DDPSpawnPlugin(_OlderMethods, DDPStrategy):
    """Older name of :class:`fabric.strategies.DDPStrategy` with ``start_method="spawn"``.

    The modern spelling is ``Fabric(strategy="ddp_spawn")``, or ``DDPStrategy(start_method="spawn")`` with options.

    Args:
        parallel_devices: the devices of this node, one for each process; :meth:`spawn` needs them.
        num_nodes: number of nodes of the job; None is one.
        cluster_environment: the environment that says which rank this is.
        checkpoint_io: format of ``save`` and ``load``.
        sync_batchnorm: as for :class:`fabric.strategies.DDPStrategy`, and so are the rest; None is False.
        ddp_comm_state: state handed to the hook.
        ddp_comm_hook: how gradients are sent.
        ddp_comm_wrapper: wraps the hook.
        **options: the other arguments of ``DDPStrategy``; ``precision_plugin`` is the older name of ``precision``.

    Attributes:
        model: the module that :meth:`setup` and :meth:`model_to_device` without a trainer act on; None at first.
        mp_queue: what process 0 put there is there after :meth:`spawn`.

    Raises:
        TypeError: an unknown option, or a start method.
        ConfigurationError: two precisions, or options that contradict each other.
    """

    def __init__(
        self,
        parallel_devices: Sequence[torch.device] | None = None,
        num_nodes: int | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        sync_batchnorm: bool | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        modern = 'Fabric(strategy="ddp_spawn"), or DDPStrategy(start_method="spawn"); precision= for precision_plugin='
        _deprecated("DDPSpawnPlugin(...)", modern)
        super().__init__(
            parallel_devices=parallel_devices,
            num_nodes=1 if num_nodes is None else num_nodes,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            sync_batchnorm=bool(sync_batchnorm),
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            start_method="spawn",
            **options,
        )
        self.mp_queue = _Mailbox()
        # The state of the model that process 0 set up, on the CPU.
        self._weights: dict[str, Any] | None = None

    def spawn(
        self, function: Callable[..., Any], *args: Any, return_result: bool = True, **kwargs: Any
    ) -> Any:
        """Run ``function(*args, **kwargs)`` in a process for each parallel device, connected by this strategy.

        The modern spelling is ``Fabric(strategy="ddp_spawn", devices=2).launch(function)``, whose function gets the
        Fabric as its first argument. Where this strategy is among the arguments, or the function is one of its
        methods, each process has its own copy of it there, and that one is started: its ``global_rank`` is the index
        of the process. With one device nothing is spawned, and the function runs in this process.

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
            problem = (
                "this strategy has no parallel_devices, so that the number of processes is unknown"
            )
            raise ConfigurationError(f"spawn({function!r})", problem, suggestion=modern)
        with Fabric(strategy=self) as fabric:
            result, items, weights = fabric.launch(
                _run_spawned, self, function, args, kwargs, return_result
            )
        self.mp_queue.extend(items)
        self._weights = weights
        return result

    def add_to_queue(self, trainer: Any, queue: Any) -> None:
        """Put the trainer's ``callback_metrics`` into a queue, with tensors by value: detached, on the CPU.

        The modern spelling is to return the metrics from the function that is launched.

        Args:
            trainer: an object with ``callback_metrics``, a mapping.
            queue: an object with ``put``; :attr:`mp_queue`, or a queue of ``multiprocessing`` that the processes share.
        """
        _deprecated(
            "add_to_queue(trainer, queue)",
            "return trainer.callback_metrics from the launched function",
        )
        # The copies keep a view from dragging all of its storage along.
        metrics = map_tensors(
            lambda tensor: tensor.detach().cpu().clone(), dict(trainer.callback_metrics)
        )
        queue.put(pickle.dumps(metrics))

    def get_from_queue(self, trainer: Any, queue: Any) -> None:
        """Update ``trainer.callback_metrics`` by what one :meth:`add_to_queue` put into a queue; tensors on the CPU."""
        _deprecated("get_from_queue(trainer, queue)", "metrics = fabric.launch(function)")
        trainer.callback_metrics.update(pickle.loads(queue.get()))  # noqa: S301 - from a process of this job

    def post_dispatch(self, trainer: Any) -> None:
        """Load what the spawned processes trained into ``trainer.model``, and their metrics into the trainer.

        The weights are those of the model of :meth:`setup` in process 0 at the end of :meth:`spawn`. The metrics are
        everything that it left in :attr:`mp_queue`, and update ``trainer.callback_metrics``.

        Args:
            trainer: an object with ``model`` where one was set up, and ``callback_metrics`` where there are metrics.
        """
        _deprecated(
            "post_dispatch(trainer)", "fabric.launch(function), which returns what function returns"
        )
        if self._weights is not None:
            self.load_module_state_dict(trainer.model, self._weights)
            self._weights = None
        while self.mp_queue:
            trainer.callback_metrics.update(pickle.loads(self.mp_queue.get()))  # noqa: S301 - as above

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Does nothing: the forward pass of a prepared module has made everything ready for the backward pass."""
        _deprecated("pre_backward(loss)", "fabric.backward(loss), with nothing before it")


class DDPFullyShardedNativeStrategy(_OlderMethods, FSDPStrategy):
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
        activation_checkpointing: a class of layers, or several, whose activations are computed again.
        **options: the other arguments of ``FSDPStrategy``.

    Attributes:
        model: the module that :meth:`setup` and :meth:`model_to_device` without a trainer act on; None at first.

    Raises:
        TypeError: an unknown option.
        ConfigurationError: two precisions, or options that cannot work.
    """

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        cpu_offload: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        activation_checkpointing: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
        **options: Any,
    ) -> None:
        modern = 'Fabric(strategy="fsdp"), or FSDPStrategy(...); precision= for precision_plugin='
        _deprecated("DDPFullyShardedNativeStrategy(...)", modern)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            **options,
        )

    training_step = _step("training_step")
    validation_step = _step("validation_step")
    test_step = _step("test_step")
    predict_step = _step("predict_step")


def _deprecated(older: str, modern: str) -> None:
    # Python itself shows the same warning once for each line that causes it.
    warnings.warn(f"{older} is an older name. Write: {modern}", DeprecationWarning, stacklevel=3)


def _run_spawned(
    fabric: Fabric, strategy: Any, function: Any, args: Any, kwargs: Any, return_result: bool
) -> Any:
    result = function(*args, **kwargs)
    model = strategy.model
    weights = (
        strategy.get_module_state_dict(model)
        if model is not None and strategy._is_prepared(model)
        else None
    )
    return result if return_result else None, list(strategy.mp_queue), weights
