"""Older names of strategies and their methods, for scripts that are not rewritten yet.

Each use of a name gives a :class:`DeprecationWarning` with the modern spelling. Some methods take
a *trainer*. A trainer is any object with the attributes that the method needs: ``model`` (a
module), ``optimizers`` (an optimizer, or a sequence of optimizers) or ``callback_metrics`` (a
dict).
"""

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

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


class _ResultQueue(deque[Any]):
    """The type of :attr:`DDPSpawnPlugin.mp_queue`: a deque with the methods of a queue."""

    put = deque.append
    get = deque.popleft


class _SpawnResult(NamedTuple):
    """What process 0 sends to the process that called :meth:`DDPSpawnPlugin.spawn`.

    Attributes:
        value: what the function returned, or None if the caller does not want the value.
        queue_entries: what process 0 has put into ``mp_queue``.
        weights: the state dict of the model that was set up. None if no model was set up.
    """

    value: Any
    queue_entries: list[Any]
    weights: dict[str, Any] | None


class _OlderMethods(ParallelStrategy):
    """The deprecated methods that both of the older strategies had."""

    model: nn.Module | None = None

    @override
    def setup(self, trainer: Any = None) -> None:
        """Prepare a trainer's model and optimizers, and keep the prepared module as :attr:`model`.

        Collective. See :meth:`fabric.strategies.ParallelStrategy.setup`.

        Args:
            trainer: an object with ``model`` and perhaps ``optimizers``. None, the default,
                prepares :attr:`model` of the strategy, without optimizers.

        Raises:
            UsageError: the model is prepared already, or there is no model.
            ConfigurationError: a mixed precision under DDP, which needs ``Fabric.setup`` and
                ``Fabric.backward``.
        """
        _warn_deprecated("setup(trainer)", "model, optimizer = fabric.setup(model, optimizer)")
        if trainer is None:
            if self.model is None:
                raise UsageError(
                    f"{type(self).__name__}.setup()",
                    problem="there is no model",
                    suggestion="strategy.model = model",
                )
            trainer = SimpleNamespace(model=self.model)
        # This call replaces trainer.model by the prepared module.
        super().setup(trainer)
        self.model = trainer.model

    def setup_optimizers(self, trainer: Any) -> None:
        """Set up ``trainer.optimizers``, whose model is set up already.

        The modern method is :meth:`fabric.Fabric.setup_optimizers`.
        """
        _warn_deprecated(
            "setup_optimizers(trainer)", "optimizer = fabric.setup_optimizers(optimizer)"
        )
        optimizers = as_list(trainer.optimizers)
        self.check_setup(None, optimizers)
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)

    def model_to_device(self) -> None:
        """Move :attr:`model` to this process's device, unless it has been set up."""
        _warn_deprecated(
            "model_to_device()", "fabric.to_device(model); fabric.setup(model) moves it, too"
        )
        if self.model is not None and not self._is_prepared(self.model):
            self.module_to_device(self.model)

    @override
    def block_backward_sync(
        self, module: nn.Module | None = None, enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return a context without synchronization of gradients. See ``Fabric.no_backward_sync``.

        Without a module, the context is for all modules that are set up.
        """
        _warn_deprecated("block_backward_sync()", "with fabric.no_backward_sync(model):")
        if module is not None:
            module = prepared_module(module)
        return super().block_backward_sync(module, enabled)

    def model_sharded_context(self) -> AbstractContextManager[object]:
        """Return ``module_init_context()``, which is the newer name."""
        _warn_deprecated("model_sharded_context()", "with fabric.init_module():")
        return self.module_init_context()


def _make_older_step(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of an older strategy, which runs a forward pass of its module.

    Args:
        name: ``"training_step"`` or the like, which is also a method of the user's module.
    """

    # The name and the docstring of this function, which the user sees, are set below.
    def step(self: "DDPFullyShardedNativeStrategy", *args: Any, **kwargs: Any) -> Any:
        modern = f"model = fabric.setup_module(model), and model.{name}(batch)"
        _warn_deprecated(f"{name}(...) of a strategy", modern)
        if self.model is not None and self._is_prepared(self.model):
            prepared = self.model
        elif self._prepared_modules:
            prepared = self._prepared_modules[-1]
        else:
            raise UsageError(
                f"{type(self).__name__}.{name}(...)",
                problem="no module is set up",
                suggestion=modern,
            )
        # FSDP needs a forward pass around the method. A FabricModule runs the method in a forward
        # pass. The user's module is not known here, so both arguments are the prepared module.
        model = FabricModule(
            prepared,
            prepared,
            precision=self.runtime.precision,
            device=self.runtime.device,
            hooks=Hooks(),
            contract=self.gradient_contract(prepared),
        )
        method = getattr(model, name)
        return method(*args, **kwargs)

    step.__name__ = name
    step.__doc__ = (
        f"Call ``{name}`` of the module of :meth:`setup`, or else of the last set-up module, as a "
        "forward pass."
    )
    return step


class DDPSpawnPlugin(_OlderMethods, DDPStrategy):
    """Older name of :class:`fabric.strategies.DDPStrategy` with ``start_method="spawn"``.

    The modern spelling is ``Fabric(strategy="ddp_spawn")``, or
    ``DDPStrategy(start_method="spawn")`` with options.

    Args:
        parallel_devices: the devices of this node, one for each process; :meth:`spawn` needs them.
        num_nodes: the number of nodes of the job. None means 1.
        cluster_environment: the environment that says which rank this is. None detects it.
        checkpoint_io: the format of ``save`` and ``load``. None uses the strategy's own.
        sync_batchnorm: compute the statistics of BatchNorm layers over all ranks. None means False.
        ddp_comm_state: the state that is handed to the hook.
        ddp_comm_hook: how gradients are sent.
        ddp_comm_wrapper: wraps the hook.
        **options: the other arguments of :class:`fabric.strategies.DDPStrategy`;
            ``precision_plugin`` is the older name of ``precision``.

    Attributes:
        model: the module that :meth:`setup` and :meth:`model_to_device` without a trainer act on.
            None at first.
        mp_queue: a queue. What process 0 puts into it can be read here after :meth:`spawn`.

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
        """Warn that the name is deprecated, and pass the arguments on to ``DDPStrategy``.

        The parameters have the order of Lightning's class. None, a default of Lightning's, becomes
        ``num_nodes=1`` and ``sync_batchnorm=False``.
        """
        _warn_deprecated(
            "DDPSpawnPlugin(...)",
            'Fabric(strategy="ddp_spawn"), or DDPStrategy(start_method="spawn"); precision= for '
            "precision_plugin=",
        )
        if num_nodes is None:
            num_nodes = 1
        super().__init__(
            parallel_devices=parallel_devices,
            num_nodes=num_nodes,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            sync_batchnorm=bool(sync_batchnorm),
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            start_method="spawn",
            **options,
        )
        # What the spawned function puts into the queue of process 0. spawn() copies it here.
        self.mp_queue = _ResultQueue()
        # The state dict of the model in process 0, on the CPU. spawn() sets it for post_dispatch().
        self._weights_of_process_0: dict[str, Any] | None = None

    def spawn(
        self, function: Callable[..., Any], *args: Any, return_result: bool = True, **kwargs: Any
    ) -> Any:
        """Run ``function(*args, **kwargs)`` in a process for each parallel device.

        This strategy connects the processes. If the strategy is among the arguments, or
        ``function`` is one of its methods, each process has a started copy of the strategy, whose
        ``global_rank`` is the index of the process. With one device no process is started, and the
        function runs in this process.

        The modern spelling is ``Fabric(strategy="ddp_spawn", devices=2).launch(function)``, whose
        function gets the Fabric as its first argument.

        Args:
            function: what every process runs.
            *args: the arguments of the function, which are pickled.
            return_result: whether to return the result.
            **kwargs: the keyword arguments of the function, which are pickled.

        Returns:
            What ``function`` returned in process 0, with tensors copied to the CPU. None if
            ``return_result`` is false.

        Raises:
            ConfigurationError: the strategy has no parallel devices, whose number is the number of
                processes.
            RankFailedError: a process raised, exited early or was killed.
        """
        modern = 'Fabric(strategy="ddp_spawn", devices=2).launch(function)'
        _warn_deprecated("spawn(function)", modern)
        if not self.parallel_devices:
            raise ConfigurationError(
                f"spawn({function!r})",
                problem="this strategy has no parallel_devices, so that the number of processes is "
                "unknown",
                suggestion=modern,
            )
        with Fabric(strategy=self) as fabric:
            # `self` is an argument, so that _run_spawned() gets its process's copy of the strategy.
            result = fabric.launch(_run_spawned, self, function, args, kwargs, return_result)
        # The function has put these entries into the queue of process 0's copy of the strategy.
        self.mp_queue.extend(result.queue_entries)
        self._weights_of_process_0 = result.weights
        return result.value

    def add_to_queue(self, trainer: Any, queue: Any) -> None:
        """Put a pickled copy of the trainer's ``callback_metrics`` into a queue.

        Tensors are copied to the CPU. The modern spelling is to return the metrics from the
        function that is launched.

        Args:
            trainer: an object with ``callback_metrics``, a mapping.
            queue: an object with ``put``: :attr:`mp_queue`, or a queue of ``multiprocessing`` that
                the processes share.
        """
        _warn_deprecated(
            "add_to_queue(trainer, queue)",
            "return trainer.callback_metrics from the launched function",
        )
        metrics = map_tensors(_copy_to_cpu, dict(trainer.callback_metrics))
        # The metrics are pickled here: torch passes tensors in a queue of multiprocessing through
        # shared memory, which another process can open only while this process lives.
        queue.put(pickle.dumps(metrics))

    def get_from_queue(self, trainer: Any, queue: Any) -> None:
        """Update ``trainer.callback_metrics`` by one entry that :meth:`add_to_queue` has put.

        The tensors of the metrics are on the CPU.

        Args:
            trainer: an object with ``callback_metrics``, a dict.
            queue: an object with ``get``.
        """
        _warn_deprecated("get_from_queue(trainer, queue)", "metrics = fabric.launch(function)")
        metrics = pickle.loads(queue.get())  # noqa: S301 - from a process of this job
        trainer.callback_metrics.update(metrics)

    def post_dispatch(self, trainer: Any) -> None:
        """Load the weights and the metrics of process 0 into a trainer, after :meth:`spawn`.

        The weights are those of the model of :meth:`setup`, and are loaded into ``trainer.model``.
        The metrics are all entries of :attr:`mp_queue`, each a pickled dict, and update
        ``trainer.callback_metrics``.

        Args:
            trainer: an object with ``model`` if a model was set up, and ``callback_metrics`` if
                there are metrics.
        """
        _warn_deprecated(
            "post_dispatch(trainer)", "fabric.launch(function), which returns what function returns"
        )
        if self._weights_of_process_0 is not None:
            self.load_module_state_dict(trainer.model, self._weights_of_process_0)
            self._weights_of_process_0 = None
        while self.mp_queue:
            metrics = pickle.loads(self.mp_queue.get())  # noqa: S301 - from a process of this job
            trainer.callback_metrics.update(metrics)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the forward pass has made everything ready for the backward pass."""
        _warn_deprecated("pre_backward(loss)", "fabric.backward(loss), with nothing before it")


class DDPFullyShardedNativeStrategy(_OlderMethods, FSDPStrategy):
    """Older name of :class:`fabric.strategies.FSDPStrategy`.

    The modern spelling is ``Fabric(strategy="fsdp")``, or ``FSDPStrategy(...)`` with options. It
    shards by ``fully_shard``. Options that only torch's first FSDP had are errors, unless they make
    no difference here.

    Args:
        accelerator: the hardware. None uses the accelerator of ``Fabric``.
        parallel_devices: the devices of this node. None uses the devices of ``Fabric``.
        cluster_environment: the environment that says which rank this is. None detects it.
        checkpoint_io: the format of ``save`` and ``load``. None uses the strategy's own.
        precision_plugin: older name of ``precision``. An object with an attribute ``precision``
            stands for its value.
        process_group_backend: the backend of the process group. None uses the device's default.
        cpu_offload: keep shards, gradients and optimizer state on the CPU.
        backward_prefetch: how many FSDP modules are gathered ahead in the backward pass.
        mixed_precision: torch's policy, in place of what the precision says.
        activation_checkpointing: a class of layers, or several, whose activations are computed
            again.
        **options: the other arguments of :class:`fabric.strategies.FSDPStrategy`.

    Attributes:
        model: the module that :meth:`setup` and :meth:`model_to_device` without a trainer act on.
            None at first.

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
        """Warn that the name is deprecated, and pass the arguments on to ``FSDPStrategy``.

        The parameters have the order of Lightning's class.
        """
        _warn_deprecated(
            "DDPFullyShardedNativeStrategy(...)",
            'Fabric(strategy="fsdp"), or FSDPStrategy(...); precision= for precision_plugin=',
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            **options,
        )

    training_step = _make_older_step("training_step")
    validation_step = _make_older_step("validation_step")
    test_step = _make_older_step("test_step")
    predict_step = _make_older_step("predict_step")


def _warn_deprecated(older: str, modern: str) -> None:
    """Give a DeprecationWarning at the line where the user calls the older name.

    The function of the older name calls this one.

    Args:
        older: the older name or call.
        modern: the code to write instead.
    """
    # 1 is this line, 2 the function of the older name, and 3 the user's line.
    warnings.warn(f"{older} is an older name. Write: {modern}", DeprecationWarning, stacklevel=3)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    # Without clone(), pickle would write the whole storage of which the tensor may be a view.
    return tensor.detach().cpu().clone()


def _run_spawned(
    fabric: Fabric,
    strategy: DDPSpawnPlugin,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    return_result: bool,
) -> _SpawnResult:
    """Run the function of :meth:`DDPSpawnPlugin.spawn` in one of the spawned processes.

    Args:
        fabric: the Fabric of this process, which ``launch`` passes to every function. Not used.
        strategy: this process's copy of the strategy, which the Fabric has started.
        function: the user's function.
        args: the arguments of the function.
        kwargs: the keyword arguments of the function.
        return_result: whether the caller wants what the function returns.
    """
    value = function(*args, **kwargs)
    if not return_result:
        value = None
    weights = None
    if strategy.model is not None and strategy._is_prepared(strategy.model):
        weights = strategy.get_module_state_dict(strategy.model)
    return _SpawnResult(value, list(strategy.mp_queue), weights)
