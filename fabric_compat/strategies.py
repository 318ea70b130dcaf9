"""Fabric's strategies with Lightning's names and arguments."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy
from torch.optim import Optimizer

from fabric import strategies
from fabric._plan import STRATEGIES
from fabric._session import prepared_module
from fabric._torch import has_nan, uncompiled
from fabric.checkpoint.async_save import AsyncSaver
from fabric.checkpoint.full_tensors import ShardGatherer
from fabric.checkpoint.save_load import CheckpointCoordinator, LossDivisors, builtin_format
from fabric.checkpoint.state import StateDicts
from fabric.errors import ConfigurationError, UsageError
from fabric.optim.clipping import clip_gradients
from fabric.precision import PRECISIONS
from fabric.runtime import Runtime
from fabric.strategies import ParallelStrategy, Strategy, StrategyName
from fabric.strategies.init_module import SMALLEST_MAPPED_BYTES, EmptyParameter, created_on
from fabric.tree import parameters_of
from fabric.world import World
from fabric_compat.environments import ClusterEnvironment
from fabric_compat.missing import missing
from fabric_compat.pickling import allow_pickle
from fabric_compat.plugins import (
    AsEnvironment,
    CheckpointIO,
    FSDPPrecision,
    default_pg_timeout,
    with_storage_options,
)
from fabric_compat.registry import Registry

__all__ = [
    "STRATEGY_REGISTRY",
    "DDPStrategy",
    "DataParallelStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "StrategyName",
    "TBroadcast",
]

TBroadcast = TypeVar("TBroadcast")

# The methods of a strategy that Lightning's Fabric calls, and this Fabric does not.
_UNCALLED_METHODS = (
    "backward",
    "clip_gradients_norm",
    "clip_gradients_value",
    "load_checkpoint",
    "optimizer_step",
    "process_dataloader",
    "save_checkpoint",
    "setup_module_and_optimizers",
)


__getattr__ = partial(missing, __name__)


def _has_fsdp_modules(module: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) for child in module.modules())


class PlannedProcess(NamedTuple):
    """What a ``Fabric`` knows of this process before the launch.

    Attributes:
        world: the ranks. All ranks are 0 in a process that will start the other processes.
        device: the device of this process.
    """

    world: World
    device: torch.device


class _NoSession:
    """What a save reads and a load restores of a job, if a strategy is used without Fabric.

    Only ``Fabric.backward`` takes loss weights, so there are no divisors of losses.
    """

    def check_before_save(self) -> None:
        """Allow every save."""

    def loss_divisors(self) -> LossDivisors:
        """Return no divisors."""
        return []

    def load_loss_divisors(self, divisors: LossDivisors) -> None:
        """Ignore the divisors of a checkpoint that ``Fabric.save`` has written."""


class _LightningStrategy(Strategy):
    """The methods of Lightning's strategies. Scripts also call them without a ``Fabric``.

    A strategy that is not started has the ranks and the device that its ``Fabric`` has planned.
    Without a ``Fabric``, its process is the only rank of a job, as in Lightning.
    """

    # Fabric sets it. None if there is no Fabric.
    planned_process: PlannedProcess | None = None

    @property
    def runtime(self) -> Runtime:
        """The runtime. A strategy that is not started has one for a job of a single process.

        If the process is one of several, a strategy that is not started raises an error.
        """
        if self._runtime is None and not dist.is_initialized():
            runtime = self._standalone_runtime()
            if runtime.world.world_size == 1:
                return runtime
        return super().runtime

    def _environments(self) -> Sequence[Any] | None:
        """Return a list with the user's environment, in the form that fabric reads.

        The environment says which rank this process is. None stands for all environments that
        fabric knows, as in ``fabric``.
        """
        cluster = self.cluster_environment
        if not isinstance(cluster, ClusterEnvironment):
            return super()._environments()
        if self.parallel_devices is not None:
            num_processes = len(self.parallel_devices)
        else:
            num_processes = cluster.world_size() // self.num_nodes
        return [AsEnvironment(cluster, num_processes, self.num_nodes)]

    def setup_environment(self, runtime: Runtime | None = None) -> None:
        """Start the runtime, and tell the environment the rank of this process."""
        super().setup_environment(runtime)
        if isinstance(self.cluster_environment, ClusterEnvironment):
            self.set_cluster_environment(self.cluster_environment)

    def set_cluster_environment(self, environment: Any) -> None:
        """Set the environment, a :class:`ClusterEnvironment`, and tell it the ranks."""
        environment.set_world_size(self.world_size)
        environment.set_global_rank(self.global_rank)
        self.cluster_environment = environment

    @property
    def _world(self) -> World:
        """The ranks. Before the launch, the ranks that the ``Fabric`` has planned."""
        if self._runtime is None and self.planned_process is not None:
            return self.planned_process.world
        return self.runtime.world

    @property
    def root_device(self) -> torch.device:
        """The device of this process, also before the launch."""
        if self._runtime is None and self.planned_process is not None:
            return self.planned_process.device
        return super().root_device

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes. 0 before the launch."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among the processes of its node. 0 before the launch."""
        return self._world.local_rank

    @property
    def node_rank(self) -> int:
        """The number of the node of this process. 0 before the launch."""
        return self._world.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job, also before the launch."""
        return self._world.world_size

    @property
    def num_processes(self) -> int:
        """The number of processes of this node, also before the launch."""
        return self._world.local_world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments of a ``DistributedSampler``, also before the launch and in one process.

        None under a strategy that runs in one process only.
        """
        if not isinstance(self, ParallelStrategy) or self.drives_all_devices:
            return None
        if self._runtime is not None and self.world_size > 1:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which new tensors get the strategy's device and precision."""
        return created_on(self.root_device, self.runtime.precision.param_dtype)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of an optimizer's parameters to a norm, and return their norm.

        Collective under a strategy that shards. ``module`` has no effect.
        """
        return self._clip_gradients(
            optimizer,
            clip_val=None,
            max_norm=max_norm,
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_gradients_value(self, module: Any, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each value in the gradients of an optimizer's parameters.

        ``module`` has no effect.
        """
        self._clip_gradients(
            optimizer, clip_val=clip_val, max_norm=None, norm_type=2.0, error_if_nonfinite=False
        )

    def _clip_gradients(self, optimizer: Optimizer, **limits: Any) -> Tensor:
        """Clip the gradients of an optimizer's parameters. See :func:`clip_gradients`.

        Raises:
            UsageError: the gradients have a loss scale, which only ``Fabric`` can remove.
        """
        precision = self.precision
        if precision is not None and precision.loss_scale is not None:
            raise UsageError(
                f"{type(self).__name__}.clip_gradients_... under {precision.name}",
                problem="the gradients are those of a scaled loss, and Fabric has the scale",
                suggestion="fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            )
        return clip_gradients(parameters_of(optimizer), **limits)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a module. May be collective.

        ``Fabric`` has checked the module. Without a ``Fabric``, this method does, unless the
        strategy is not started.
        """
        if self.planned_process is None and self._runtime is not None:
            self.check_setup(module)
        return super().setup_module(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Prepare a module and its optimizers. The scheduler is returned as it is.

        May be collective.
        """
        self.check_setup(module, optimizers)
        prepared = self.setup_module(module)
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        return prepared, list(optimizers), scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        """Prepare an optimizer in place, and return it."""
        super().setup_optimizer(optimizer)
        return optimizer

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer. May be collective."""
        return self.full_state(optimizer.state_dict())

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a checkpoint as ``Fabric.save`` does. Collective: every rank must call it.

        Args:
            path: the file or folder.
            state: the objects to save, by name.
            storage_options: passed to the ``CheckpointIO`` of the user.
            filter: which items to save, see :meth:`fabric.Fabric.save`.

        Raises:
            TypeError: there are ``storage_options``, and no ``CheckpointIO`` of the user.
        """
        coordinator = self._coordinator()
        if storage_options is not None:
            if not isinstance(self.checkpoint_io, CheckpointIO):
                name = type(self).__name__
                raise TypeError(
                    f"{name}.save_checkpoint(storage_options=...): no CheckpointIO of the strategy "
                    f"takes them. Write: {name}(checkpoint_io=...), with a CheckpointIO of your own"
                )
            coordinator.io = with_storage_options(self.checkpoint_io, storage_options)
        coordinator.save(path, state, filter=filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore a checkpoint as ``Fabric.load`` and ``load_raw`` do.

        Collective: every rank must call it.
        """
        # None is Lightning's default, which leaves the choice to torch.load. torch chooses True.
        if weights_only is None:
            weights_only = True
        coordinator = self._coordinator()
        if isinstance(state, nn.Module | Optimizer):
            coordinator.load_raw(path, state, strict=strict, weights_only=weights_only, rename=None)
            return {}
        return coordinator.load(path, state, strict=strict, weights_only=weights_only)

    def _coordinator(self) -> CheckpointCoordinator:
        """Return the object that saves and loads the checkpoints of this strategy."""
        runtime = self.runtime
        coordinator = CheckpointCoordinator(
            runtime.communicator,
            AsyncSaver(partial(runtime.background_communicator, "saves")),
            io=self.checkpoint_io or builtin_format(self.saves_shards),
            state_dicts=StateDicts(self, prepared_module),
            gatherer=ShardGatherer(runtime, self),
            session=_NoSession(),
        )
        return allow_pickle(coordinator)


class _WithProcessGroup(_LightningStrategy):
    """The methods of strategies whose processes have a process group of torch."""

    def _get_process_group_backend(self) -> str:
        """Return the backend of the process group, which is that of the device by default."""
        if self.process_group_backend is not None:
            return self.process_group_backend
        return dist.get_default_backend_for_device(self.root_device)


class _ShardingStrategy(_WithProcessGroup):
    """The methods of strategies that shard parameters."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Fill the modules that were left empty, and shard a module in place. Collective.

        Raises:
            UsageError: the strategy is not started.
        """
        if self._runtime is None:
            raise self._not_started_error()
        _reset_empty_modules(self, module)
        return super().setup_module(module)


class SingleDeviceStrategy(_LightningStrategy, strategies.SingleDeviceStrategy):
    """One process on one device, by default the CPU."""

    def __init__(self, device: Any = "cpu", *args: Any, **kwargs: Any) -> None:
        # In Lightning, these arguments may be positional.
        for name, value in zip(("accelerator", "checkpoint_io", "precision"), args, strict=False):
            kwargs[name] = value
        super().__init__(device, **kwargs)

    # The collectives of one process return what they are given.
    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return tensor

    def all_reduce(self, collection: Any, *_: Any, **__: Any) -> Any:
        return collection


class DataParallelStrategy(_LightningStrategy, strategies.DataParallelStrategy):
    """Data parallelism in one process."""


class DDPStrategy(_WithProcessGroup, strategies.DDPStrategy):
    """DDP over all processes, or over the processes of ``process_group``.

    The other arguments are those of :class:`fabric.strategies.DDPStrategy`, in Lightning's order.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: str = "popen",
        *,
        process_group: dist.ProcessGroup | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **ddp_kwargs,
        )
        # Not passed above: fabric's constructor refuses this argument.
        if process_group is not None:
            self.ddp_kwargs["process_group"] = process_group


class _Sharded:
    """The base class of strategies that shard parameters, for ``isinstance``."""


class FSDPStrategy(_ShardingStrategy, _Sharded, strategies.FSDPStrategy):
    """FSDP2 with the options of FSDP1, in Lightning's order.

    ``activation_checkpointing_policy`` has the signature of a wrapping policy of FSDP1:
    ``policy(module, recurse, nonwrapped_numel)``.
    """

    # The option `mixed_precision`. fabric keeps a policy of FSDP2 instead.
    _mixed_precision_option: Any = None

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        cpu_offload: bool | CPUOffload | None = None,
        mixed_precision: MixedPrecision | None = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "sharded",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        **fsdp_kwargs: Any,
    ) -> None:
        policy = activation_checkpointing_policy
        if callable(policy):
            # fabric calls the policy with the module alone. ``recurse=False`` asks whether to
            # checkpoint this module.
            policy = partial(policy, recurse=False, nonwrapped_numel=0)
        if sharding_strategy in ("_HYBRID_SHARD_ZERO2", ShardingStrategy._HYBRID_SHARD_ZERO2):
            # The counterpart of SHARD_GRAD_OP, as HYBRID_SHARD is that of FULL_SHARD.
            sharding_strategy = "HYBRID_SHARD"
            fsdp_kwargs["reshard_after_forward"] = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=policy,
            sharding_strategy=sharding_strategy,
            state_dict_type=state_dict_type,
            device_mesh=device_mesh,
            **fsdp_kwargs,
        )
        self._mixed_precision_option = mixed_precision
        # fabric would warn of these options of FSDP1. They are usual in scripts for Lightning.
        self._first_fsdp_options.clear()

    @property
    def sharding_strategy(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> ShardingStrategy:
        """The strategy as a constant of FSDP1, which scripts compare with."""
        keeps_parameters = self.fsdp_kwargs.get("reshard_after_forward") is False
        if self._sharding == "HYBRID_SHARD" and keeps_parameters:
            return ShardingStrategy._HYBRID_SHARD_ZERO2
        return ShardingStrategy[self._sharding]

    @property
    def cpu_offload(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
    ) -> CPUOffload:
        """Whether shards are kept on the CPU, as an option of FSDP1."""
        return CPUOffload(offload_params=self._offload_policy is not None)

    @property
    def mixed_precision_config(self) -> MixedPrecision | None:
        """The dtypes as an option of FSDP1: those of ``mixed_precision``, or of the precision.

        None under ``"64-true"``, under which all dtypes are the same.
        """
        if self._mixed_precision_option is not None:
            return self._mixed_precision_option
        precision = self.precision or PRECISIONS["32-true"]
        if precision.name == "64-true":
            return None
        return FSDPPrecision(precision).mixed_precision_config


class ModelParallelStrategy(_ShardingStrategy, strategies.ModelParallelStrategy):
    """Tensor parallelism and FSDP2 on one mesh.

    Attributes:
        device_mesh: the mesh of all processes. None before the launch.
    """

    def setup_environment(self, runtime: Runtime | None = None) -> None:
        """Start the runtime, and make the mesh. Collective."""
        super().setup_environment(runtime)
        assert self._topology is not None, "setup_environment() makes the topology"
        self.device_mesh = self._topology.mesh

    def teardown(self) -> None:
        """Close the runtime and forget the mesh. A second call does nothing."""
        super().teardown()
        self.device_mesh = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments of a ``DistributedSampler``, equal on tensor-parallel ranks.

        Raises:
            UsageError: the processes are not started, and so the mesh does not exist yet.
        """
        if self._runtime is None and self.world_size > 1:
            raise UsageError(
                "ModelParallelStrategy.distributed_sampler_kwargs",
                problem="the mesh, which says which ranks get the same batches, does not exist "
                "before the launch",
                suggestion="fabric.launch() first",
            )
        return super().distributed_sampler_kwargs


def _reset_empty_modules(strategy: Strategy, root: nn.Module) -> None:
    """Call ``reset_parameters`` of the modules that ``init_module(empty_init=True)`` left empty.

    Lightning does so under strategies that shard. A module without this method stays empty until a
    checkpoint is loaded. Large parameters get memory in files, as from ``init_module()``.
    """
    empty_modules: list[Any] = []
    for module in uncompiled(root).modules():
        has_empty = any(_is_empty(parameter) for parameter in module.parameters(recurse=False))
        if has_empty and hasattr(module, "reset_parameters"):
            empty_modules.append(module)
    if not empty_modules:
        return
    with strategy.module_init_context():
        for module in empty_modules:
            for parameter in module.parameters(recurse=False):
                if parameter.is_meta:
                    values = torch.empty_like(parameter, device="cpu")
                    filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    # Swapped, not replaced: an optimizer, and modules that share the parameter,
                    # refer to the same object.
                    torch.utils.swap_tensors(parameter, filled)
            module.reset_parameters()


def _is_empty(parameter: Tensor) -> bool:
    """Return whether ``init_module(empty_init=True)`` left a parameter without values."""
    if parameter.is_meta:
        # Other parameters on the meta device are the user's. The strategy refuses them.
        return isinstance(parameter, EmptyParameter)
    # A small parameter that was left empty is an ordinary one, filled with nan.
    return parameter.nbytes < SMALLEST_MAPPED_BYTES and has_nan(parameter)


def refuse_uncalled_methods(strategy: Strategy) -> None:
    """Raise a ConfigurationError if the user's class overrides a method that Fabric never calls.

    Lightning's Fabric calls the method, so the user's code would silently not run here.
    """
    for strategy_class in type(strategy).__mro__:
        package = strategy_class.__module__.partition(".")[0]
        if package in ("fabric", "fabric_compat"):
            continue
        for name in _UNCALLED_METHODS:
            if name in vars(strategy_class):
                raise ConfigurationError(
                    f"Fabric(strategy={type(strategy).__name__}(...))",
                    problem=f"the class defines {name}(), which Fabric does not call",
                    expected=f"a strategy without {', '.join(_UNCALLED_METHODS)}",
                    suggestion=f"the code of {name}() in the training loop",
                )


def with_lightning_methods(strategy: Strategy) -> Strategy:
    """Change the class of a strategy of fabric to the class of this name in this file.

    The strategy itself is returned. A strategy of a class of the user is not changed, whatever its
    name.
    """
    name = type(strategy).__name__
    if type(strategy) is getattr(strategies, name, None):
        strategy.__class__ = globals()[name]  # the class of this name in this file
    return strategy


class _StrategyRegistry(Registry):
    """The strategies of this process. An entry point registers a strategy in every process."""

    _kind = "strategy"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a new strategy of this name, with Lightning's methods. See `Registry.get`."""
        strategy = super().get(name, default)
        if isinstance(strategy, Strategy):
            return with_lightning_methods(strategy)
        return strategy

    def available_strategies(self) -> list[str]:
        return list(self)


STRATEGY_REGISTRY = _StrategyRegistry(STRATEGIES)
