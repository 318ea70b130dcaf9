"""``Fabric`` with the behavior of Lightning Fabric."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from fabric._fabric import Fabric as _Fabric
from fabric._fabric import _single_or_tuple, _without_schedulers
from fabric._plan import _parse_accelerator
from fabric._torch import compile_as, uncompiled
from fabric.accelerators import Accelerator
from fabric.checkpoint.save_load import CheckpointCoordinator
from fabric.data import FabricDataLoader
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.module import FabricModule
from fabric.strategies import FSDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from fabric.strategies.init_module import created_on
from fabric.strategies.parallel import as_list
from fabric.tree import flatten, map_tensors
from fabric.world import World
from fabric_compat import strategies
from fabric_compat.accelerators import (
    ACCELERATOR_REGISTRY,
    CUDAAccelerator,
    MPSAccelerator,
    with_lightning_methods,
)
from fabric_compat.environments import find_cluster_environment
from fabric_compat.loggers import Loggers
from fabric_compat.notes import note
from fabric_compat.pickling import allow_pickle
from fabric_compat.plugins import (
    AsEnvironment,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    accepted_keywords,
    precision_object,
)
from fabric_compat.utilities import (
    _distributed_sampler,
    _update_dataloader,
    convert_to_tensors,
    has_iterable_dataset,
    name_of_reduction,
    pl_worker_init_function,
    seed_everything,
)
from fabric_compat.wrappers import _FabricDataLoader, _FabricModule, mark_set_up

# The arguments of Fabric that have an environment variable, such as LT_DEVICES, and their defaults.
_DEFAULTS = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
}
# The registry of names that are values of an argument of Fabric, by the argument.
_REGISTRIES = {
    "accelerator": ACCELERATOR_REGISTRY,
    "strategy": strategies.STRATEGY_REGISTRY,
}


class Fabric(_Fabric):
    """:class:`fabric.Fabric` with Lightning's arguments and results.

    The arguments may be positional, in Lightning's order.

    Args:
        accelerator: As in ``fabric``. ``"gpu"`` is also the GPU of a Mac.
        strategy: As in ``fabric``.
        devices: As in ``fabric``.
        num_nodes: The number of nodes. The default leaves the number to a launcher that knows it.
        precision: As in ``fabric``.
        plugins: A precision, an environment and a format of checkpoints, as objects of
            :mod:`fabric_compat.plugins`.
        callbacks: As in ``fabric``.
        loggers: As in ``fabric``.
        **options: The other arguments of ``fabric``.
    """

    def __init__(
        self,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: Any = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        **options: Any,
    ) -> None:
        options.update(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            callbacks=callbacks,
            loggers=loggers,
        )
        options = _with_variables(options)
        _replace_registered_names(options)
        _refuse_missing_hardware(options["accelerator"])
        if options["accelerator"] == "gpu" and MPSAccelerator.is_available():
            options["accelerator"] = "mps"
        strategy = options["strategy"]
        sorted_plugins = _sort_plugins(as_list(plugins))
        _refuse_plugins_set_twice(sorted_plugins, options)
        environment_of_strategy = _cluster_environment_of(strategy)
        cluster = sorted_plugins.get("cluster_environment", environment_of_strategy)
        if cluster is not None:
            _refuse_second_environment(cluster, options)
            options["environment"] = _environment(cluster, options)
            if cluster is environment_of_strategy:
                # fabric's constructor reads this attribute, and takes no environment of Lightning.
                # _plan_process() sets the attribute again.
                strategy.cluster_environment = None
        elif isinstance(strategy, SingleDeviceStrategy):
            # As in Lightning, the processes of a launcher then are jobs of one process each.
            options.setdefault("environment", "none")
        # As text: an environment variable may have set the number.
        if str(options["num_nodes"]) == str(_DEFAULTS["num_nodes"]):
            # As in Lightning, the default leaves the number to a launcher that knows it.
            options["num_nodes"] = "auto"
        precision_name = options["precision"]
        options["precision"] = sorted_plugins.get("precision", options["precision"])
        if options["precision"] is not None:
            options["precision"] = precision_object(options["precision"])
        super().__init__(**options)
        # Raises if the user's strategy overrides a method that fabric never calls.
        strategies.refuse_uncalled_methods(self.strategy)
        checkpoint_io = sorted_plugins.get("checkpoint_io")
        if checkpoint_io is not None:
            self.strategy.checkpoint_io = checkpoint_io
        # Changes the class of the strategy in place. _plan_process() reads the class.
        strategies.with_lightning_methods(self.strategy)
        self._plan_process(cluster)
        # Whether launch() has been called.
        self._launched = False
        # Scripts read Lightning's private attributes _strategy and _precision.
        self._strategy = self.strategy
        self._precision = precision_object(self.precision)
        if isinstance(precision_name, str | int) and self._replaces_float16():
            note("precision='16-mixed' on CPUs is 'bf16-mixed'")
            self._precision = precision_object("bf16-mixed")
        # The object with Lightning's methods takes the place of fabric's precision.
        self._plan = replace(self._plan, precision=self._precision)
        self.strategy.precision = self._precision

    def _replaces_float16(self) -> bool:
        """Return whether the precision is ``"16-mixed"`` on CPUs, where Lightning uses bfloat16.

        The strategies that shard compute in float16.
        """
        is_sharded = isinstance(self.strategy, FSDPStrategy)
        is_float16 = self._precision.name == "16-mixed"
        return is_float16 and self.accelerator.name == "cpu" and not is_sharded

    def _plan_process(self, cluster: ClusterEnvironment | None) -> None:
        """Tell the strategy the ranks, the device and the environment, before the launch.

        A strategy of a class of the user is not told. ``cluster`` is the environment that the user
        has passed, which may refuse the numbers of processes and nodes.
        """
        strategy = self.strategy
        if not isinstance(strategy, strategies._LightningStrategy):
            return
        plan = self._plan
        world = plan.world
        if world is None:
            num_processes = plan.launch_spec.num_processes
            world = World(world_size=plan.world_size, local_world_size=num_processes)
        device = plan.devices[world.local_rank]
        strategy.planned_process = strategies.PlannedProcess(world, device)
        if isinstance(strategy, ParallelStrategy):
            strategy.set_cluster_environment(cluster or find_cluster_environment())
            if cluster is not None:
                cluster.validate_settings(
                    num_devices=strategy.num_processes, num_nodes=strategy.num_nodes
                )

    @property
    def _loggers(self) -> Loggers:
        return vars(self)["_loggers"]

    @_loggers.setter
    def _loggers(self, loggers: Any) -> None:
        """Set the loggers, given as a list of loggers or as an object of fabric."""
        user_loggers = getattr(loggers, "user_loggers", loggers)
        vars(self)["_loggers"] = Loggers(as_list(user_loggers))

    @property
    def loggers(self) -> list[Any]:
        """All loggers. A logger that a script appends to the list is called, too."""
        return self._loggers

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator, with Lightning's methods."""
        return with_lightning_methods(super().accelerator)

    @property
    def device(self) -> torch.device:
        """The device of this process. Before the launch, the first of the devices."""
        if self._plan.world is None:
            return self._plan.devices[0]
        return super().device

    def _connected_world(self, method_name: str) -> World:
        """Return the ranks of this process. Before the launch, all ranks are 0.

        ``fabric.Fabric`` raises an error before the launch.
        """
        return self._plan.world or World()

    def launch(self, *function_and_args: Any, **kwargs: Any) -> Any:
        """Start the processes. Without a function, do nothing if the processes are connected.

        Raises:
            ArgumentTypeError: A function is needed and missing. ``fabric.Fabric`` raises an error
                that is no ``TypeError``.
        """
        # Any method that needs a rank connects the process, also before the launch.
        is_connected = self._launched or self._session is not None
        # Without a world, no launcher has started this process: launch() starts the ranks.
        needs_function = self._plan.world is None and self._plan.launcher.runs_function
        if not function_and_args and needs_function and not is_connected:
            raise ArgumentTypeError(
                "fabric.launch()",
                problem=f"start method {self._plan.launcher.name!r} has no function to run in each "
                "process",
                suggestion="fabric.launch(train), with def train(fabric): ...",
            )
        self._launched = True
        if not function_and_args and is_connected:
            return None
        return super().launch(*function_and_args, **kwargs)

    def setup(
        self,
        module: Any,
        *optimizers: Any,
        scheduler: Any = None,
        move_to_device: bool = True,
        **_: Any,
    ) -> Any:
        """Set up a module and optimizers, and call ``on_after_setup`` of the callbacks.

        A module may be set up twice. The second call returns the same prepared module. If the
        second call gets the compiled module, the result is compiled, too.
        """
        trained_optimizers = _without_schedulers(optimizers)
        model = self._find_prepared_module(module)
        if model is None:
            model = self._prepare_module(module, trained_optimizers, move_to_device)
        else:
            note("setup() of a module that is set up already returns the same module")
            if uncompiled(module) is not module:
                model = compile_as(module, model)
        self._set_up_optimizers(trained_optimizers)
        self._connect_lightning_module(self.unwrap(model), trained_optimizers)
        self.call("on_after_setup", fabric=self, module=model)
        return _single_or_tuple(model, *optimizers, scheduler)

    def _connect_lightning_module(self, user_module: Any, optimizers: Any) -> None:
        """Tell a LightningModule its Fabric and its optimizers, and make it a callback.

        :meth:`call` then calls the hooks of the module. Other modules do not change.
        """
        # Only a LightningModule has the attribute.
        if not hasattr(user_module, "_fabric"):
            return
        user_module._fabric = self
        user_module._fabric_optimizers = list(optimizers)
        if user_module not in self._callbacks:
            self._callbacks.append(user_module)

    def _find_prepared_module(self, module: Any) -> Any:
        """Return the result of an earlier setup of a module, or None."""
        user_module = uncompiled(self.unwrap(module))
        for prepared in self._ensure_session("setup").objects.modules:
            if self.unwrap(prepared) is user_module:
                return prepared
        return None

    def _prepare_module(self, module: Any, optimizers: Any, move_to_device: bool) -> Any:
        """Set up a module, and return a :class:`_FabricModule`. May be collective.

        ``optimizers`` are the optimizers that train the module. They are only checked.
        """
        session = self._ensure_session("setup")
        new_optimizers = [
            optimizer for optimizer in optimizers if optimizer not in session.objects.optimizers
        ]
        # An optimizer that is set up already was checked then.
        session.check_setup(module, new_optimizers)
        model = session.setup_module(module, move_to_device)
        # Not by assignments: FabricModule.__setattr__ would set attributes of the user's module.
        object.__setattr__(model, "__class__", _FabricModule)
        precision = precision_object(model._fabric_precision)
        model.__dict__["_fabric_precision"] = precision
        if precision.name != "32-true":
            note(
                f"modules under {precision.name} get floating inputs as {precision.input_dtype}, "
                f"and return {torch.get_default_dtype()}"
            )
        return model

    def setup_module(self, module: Any, move_to_device: bool = True, **_: Any) -> Any:
        """Set up a module without optimizers."""
        return self.setup(module, move_to_device=move_to_device)

    def setup_optimizers(self, *optimizers: Any, **_: Any) -> Any:
        """Set up optimizers. Their parameters need not belong to a prepared module."""
        self._set_up_optimizers(optimizers)
        return _single_or_tuple(*optimizers)

    def _set_up_optimizers(self, optimizers: Any) -> None:
        """Set up the optimizers that are not set up yet, in place."""
        session = self._ensure_session("setup_optimizers")
        new_optimizers = [
            optimizer for optimizer in optimizers if optimizer not in session.objects.optimizers
        ]
        session.setup_optimizers(new_optimizers)
        if not session.objects.modules:
            note("optimizers are set up without their modules, whose gradients nothing averages")
        for optimizer in new_optimizers:
            mark_set_up(optimizer)
            optimizer.register_step_post_hook(self._after_step)

    def setup_dataloaders(
        self,
        *loaders: Any,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        **options: Any,
    ) -> Any:
        """Set up loaders, whose samples have Lightning's order on every rank.

        Under a strategy for several processes, a ``DistributedSampler`` takes the place of the
        sampler, with the seed of ``seed_everything``. Data without indices is not sharded.

        Args:
            *loaders: The loaders.
            use_distributed_sampler: Whether to shard data with indices over the ranks.
            move_to_device: Whether batches move to the device of this process.
            **options: ``overlap_copies`` and ``uneven``, as in ``fabric``.

        Raises:
            ValueError: There is no loader, or one is set up already.
        """
        if not loaders:
            raise ValueError("setup_dataloaders() without a loader: pass at least one DataLoader")
        session = self._ensure_session("setup_dataloaders")
        device = session.runtime.device if move_to_device else None
        prepared: list[Any] = []
        for loader in loaders:
            shard = use_distributed_sampler and not has_iterable_dataset(loader)
            fabric_loader = session.setup_loader(
                self._as_in_lightning(loader, shard),
                shard=shard,
                device=device,
                seed_workers=False,  # pl_worker_init_function() seeds workers, if they are seeded
                **options,
            )
            # Not by assignments: FabricDataLoader.__setattr__ would set attributes of the user's
            # loader.
            object.__setattr__(fabric_loader, "__class__", _FabricDataLoader)
            vars(fabric_loader)["device"] = device
            prepared.append(fabric_loader)
        if len(prepared) > 1:
            return prepared
        return prepared[0]

    def _as_in_lightning(self, loader: Any, shard: bool) -> Any:
        """Return a loader with Lightning's sampler and random streams of workers.

        Objects that ``setup_loader`` refuses are returned unchanged.
        """
        if isinstance(loader, FabricDataLoader) or not isinstance(loader, DataLoader):
            return loader
        sampler_kwargs = self.strategy.distributed_sampler_kwargs
        # A batch sampler may have no sampler to replace. Fabric then shards the batches.
        has_sampler = loader.batch_sampler is None or hasattr(loader.batch_sampler, "sampler")
        is_sharded = isinstance(loader.sampler, DistributedSampler)
        if shard and sampler_kwargs is not None and has_sampler and not is_sharded:
            loader = _update_dataloader(loader, _distributed_sampler(loader, sampler_kwargs))
        # Set by seed_everything(workers=True).
        should_seed_workers = os.environ.get("PL_SEED_WORKERS") == "1"
        if should_seed_workers and loader.worker_init_fn is None:
            loader = copy(loader)  # the user's loader does not change
            loader.worker_init_fn = partial(pl_worker_init_function, rank=self.global_rank)
        return loader

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Call ``on_after_optimizer_step`` of the callbacks. torch calls this hook after a step."""
        self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=optimizer)

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Compute gradients. ``model`` has no effect: Lightning needs it for DeepSpeed."""
        super().backward(tensor, *args, **kwargs)

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any = None,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of an optimizer's parameters.

        The module may be the user's own, the result of ``setup``, one that is not set up, or None:
        Lightning reads the module under strategies that shard only. For a module that is not set
        up, the parameters are those of the optimizer.
        """
        options: dict[str, Any] = {
            "clip_val": clip_val,
            "max_norm": max_norm,
            "error_if_nonfinite": error_if_nonfinite,
        }
        if isinstance(module, nn.Module):
            module = self._find_prepared_module(module) or module
            # A module that is set up may also be a part of the user's module.
            has_set_up_module = any(isinstance(child, FabricModule) for child in module.modules())
        else:
            # A list of set-up modules, which fabric takes, too. It raises for anything else.
            has_set_up_module = module is not None
        # Without an optimizer, fabric clips all parameters of the module, or raises.
        if has_set_up_module or optimizer is None:
            return super().clip_gradients(module, optimizer, norm_type=norm_type, **options)
        session = self._ensure_session("clip_gradients")
        # An empty list: no module is set up. The session clips the optimizer's parameters.
        return session.clip_gradients([], optimizer, norm_type=float(norm_type), **options)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``hook_name`` of the callbacks that have it.

        Each method gets the keyword arguments that it accepts.
        """
        for callback in self._callbacks:
            hook = getattr(callback, hook_name, None)
            if callable(hook):
                hook(*args, **accepted_keywords(hook, kwargs))
            elif hook is not None:
                name = f"{type(callback).__name__}.{hook_name}"
                rank_zero_warn(f"Skipping the callback `{name}` because it is not callable.")

    def all_gather(  # type: ignore[override]
        self, data: Any, group: Any = None, sync_grads: bool = False, **options: Any
    ) -> Any:
        """Gather tensors and numbers as tensors of shape ``(world_size, *shape)``.

        On one process, the shape does not change. Collective: every rank must call it.
        """
        self._ensure_session("all_gather")  # sets the rank that note() reads
        tensors = convert_to_tensors(data, self.device)
        note("all_gather returns tensors for numbers, and adds no dimension on one process")
        if self.world_size == 1 and group is None:
            return tensors
        return super().all_gather(tensors, group, sync_grads, **options)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors in place and return them. Numbers are returned as tensors.

        Collective: every rank must call it.
        """
        data = convert_to_tensors(data, self.device)
        name = name_of_reduction(reduce_op)
        leaves, _ = flatten(data)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if name == "mean":
            tensors = [_as_inexact(tensor) for tensor in tensors]
        # In the order of the leaves, in which map_tensors() visits the tensors below.
        results = iter(super().all_reduce(tensors, group, name))
        note("all_reduce returns tensors for numbers, and changes tensors in place")

        def fill_with_result(tensor: Tensor) -> Tensor:
            result = next(results)
            # A copy into the tensor would lose the graph of a result with gradients.
            if result.requires_grad:
                return result
            return tensor.detach().copy_(result)

        return map_tensors(fill_with_result, data)

    def broadcast(self, obj: Any, src: int = 0, group: Any = None) -> Any:
        """Send an object from one process to all. Collective: every rank must call it.

        One process returns its object, whatever ``src`` is, as in Lightning.
        """
        if self.world_size == 1 and group is None:
            src = 0
        return super().broadcast(obj, src, group)

    # Scripts call these methods before the launch, too.
    def to_device(self, obj: Any) -> Any:
        """Move a module or the tensors of a collection to the device of this process."""
        if self._plan.world is not None:
            return super().to_device(obj)
        if isinstance(obj, nn.Module):
            return self.strategy.module_to_device(obj)
        return self.strategy.batch_to_device(obj)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass under the precision."""
        return self.precision.forward_context(self.device.type)

    def init_tensor(self) -> AbstractContextManager[object]:
        """Return a context in which tensors get the device and the dtype of the precision."""
        return created_on(self.device, self.precision.param_dtype)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Run a block on rank 0 first. Before the launch, no process waits for another."""
        if self._plan.world is None:
            return nullcontext()
        return super().rank_zero_first(local)

    def save(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path: Any, state: Any, filter: Any = None, **kwargs: Any
    ) -> Any:
        """Save a checkpoint to a path, which may begin with ``~`` and contain variables.

        A filter of an entry that is not saved as a dict has no effect, as in Lightning. Objects
        that need pickle are saved in a file. Only ``load(path, weights_only=False)`` reads them.

        Raises:
            ArgumentTypeError: The filter is not a dict of functions.
            ConfigurationError: The filter has a name that ``state`` lacks.
        """
        if filter is not None:
            filter = _effective_filters(filter, state)
        return super().save(_expand(path), state, filter=filter, **kwargs)

    @contextmanager
    def _checkpoint_coordinator(self, method_name: str) -> Iterator[CheckpointCoordinator]:
        """Yield the object that saves and loads checkpoints.

        As in Lightning, a file may have values that need pickle, which ``fabric.Fabric`` refuses.
        """
        with super()._checkpoint_coordinator(method_name) as coordinator:
            yield allow_pickle(coordinator)

    def load(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint from a path, which may begin with ``~`` and contain variables."""
        return super().load(_expand(path), *args, **kwargs)

    def load_raw(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Load a state dict from a path, which may begin with ``~`` and contain variables."""
        super().load_raw(_expand(path), *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on the first process of each machine."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    @staticmethod
    def seed_everything(  # type: ignore[override]
        seed: int | None = None, workers: bool | None = None, verbose: bool = True
    ) -> int:
        """Seed Python, NumPy and torch, and loader workers unless ``workers=False``."""
        return seed_everything(seed, workers is not False, verbose)


def _effective_filters(filters: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters without those of plain values, for which Lightning calls no filter.

    Args:
        filters: functions by names of ``state``.
        state: the objects and values to save.

    Raises:
        ArgumentTypeError: ``filters`` is not a dict of functions.
    """
    if not isinstance(filters, dict):
        raise ArgumentTypeError(
            f"fabric.save(filter={filters!r})",
            problem="it is not a dict",
            expected="functions (name, value) -> bool, by names of the state",
        )
    effective_filters: dict[str, Any] = {}
    for name, should_keep in filters.items():
        if not callable(should_keep):
            raise ArgumentTypeError(
                f"fabric.save(filter={{{name!r}: {should_keep!r}}})",
                problem="it is not a function",
                expected="functions (name, value) -> bool, by names of the state",
            )
        value = state.get(name)
        # A filter with a name that is not in the state stays: fabric refuses it.
        is_plain_value = name in state and not isinstance(value, dict)
        if is_plain_value and not hasattr(value, "state_dict"):
            continue
        effective_filters[name] = should_keep
    return effective_filters


def _expand(path: Any) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _with_variables(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the values of Lightning's environment variables, such as LT_DEVICES.

    Raises:
        ValueError: Lightning's command has set a variable that differs from its option, and the
            option is not the default.
    """
    # Variables that the user has set take precedence over the options, as in Lightning.
    is_command_used = os.environ.get("LT_CLI_USED") == "1"
    merged_options = dict(options)
    for name, default in _DEFAULTS.items():
        option = options[name]
        value = os.environ.get(f"LT_{name.upper()}", option)
        if is_command_used and str(option) not in (str(default), str(value)):
            raise ValueError(f"{name}={option!r} contradicts LT_{name.upper()}={value!r}")
        merged_options[name] = value
    return merged_options


def _replace_registered_names(options: dict[str, Any]) -> None:
    """Replace names of accelerators and strategies that the user has registered by objects.

    Fabric itself knows its own names. They stay.
    """
    for argument, registry in _REGISTRIES.items():
        name = options[argument]
        if isinstance(name, str) and registry.of_user(name):
            options[argument] = registry.get(name)


class MissingHardwareError(ConfigurationError, RuntimeError):
    """This machine lacks the hardware.

    Lightning raises a ``RuntimeError``, and ``fabric`` a ``ConfigurationError``.
    """


def _refuse_missing_hardware(accelerator: Any) -> None:
    """Raise a MissingHardwareError if this machine lacks the hardware of an accelerator.

    Other values of the argument of ``Fabric`` are left to ``fabric``: ``"auto"``, and names that
    Lightning does not know.
    """
    if isinstance(accelerator, Accelerator):
        hardware = accelerator
    elif accelerator == "gpu":
        hardware = MPSAccelerator if MPSAccelerator.is_available() else CUDAAccelerator
    elif isinstance(accelerator, str) and accelerator in ACCELERATOR_REGISTRY:
        # Not an object: a script can ask the class of the TPU, and has no object of this class.
        hardware = ACCELERATOR_REGISTRY[accelerator]["accelerator"]
    else:
        return
    if not hardware.is_available():
        raise MissingHardwareError(
            f"Fabric(accelerator={accelerator!r})",
            problem="there is none on this machine, or torch was built without it",
            expected='"auto" or "cpu"',
        )


def _sort_plugins(plugins: list[Any]) -> dict[str, Any]:
    """Return the plugins by their use, under the names of a strategy's arguments.

    The names are ``"cluster_environment"``, ``"checkpoint_io"`` and ``"precision"``. A use without
    a plugin is missing in the result.

    Raises:
        TypeError: An object is not a plugin.
        ConfigurationError: Two plugins are values of the same argument.
    """
    sorted_plugins: dict[str, Any] = {}
    for plugin in plugins:
        if isinstance(plugin, ClusterEnvironment):
            argument = "cluster_environment"
        elif isinstance(plugin, CheckpointIO):
            argument = "checkpoint_io"
        elif isinstance(plugin, Precision):
            argument = "precision"
        else:
            raise TypeError(
                f"plugins={plugin!r} is not a precision, an environment or a format of checkpoints"
            )
        if argument in sorted_plugins:
            raise ConfigurationError(
                f"Fabric(plugins=...) with {type(plugin).__name__}",
                problem=f"two of the plugins are for {argument}",
                expected="at most one precision, one environment and one format of checkpoints",
            )
        sorted_plugins[argument] = plugin
    return sorted_plugins


def _refuse_plugins_set_twice(plugins: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError if the user sets a plugin and an argument for the same thing.

    Args:
        plugins: The plugins by argument.
        options: The arguments of ``Fabric``.
    """
    strategy = options["strategy"]
    for argument, plugin in plugins.items():
        places: list[str] = []
        if argument == "precision" and options["precision"] is not None:
            places.append(f"precision={options['precision']!r}")
        # The value that the user has passed to the strategy, if any.
        strategy_value = None
        if isinstance(strategy, Strategy) and argument == "precision":
            strategy_value = strategy._requested_precision
        elif isinstance(strategy, Strategy):
            strategy_value = getattr(strategy, argument)
        if strategy_value is not None:
            places.append(f"{argument}={type(strategy_value).__name__}(...) of the strategy")
        if places:
            raise ConfigurationError(
                f"Fabric(plugins={type(plugin).__name__}(...)) with {' and '.join(places)}",
                problem=f"{argument} is set in several places",
                expected="one place for each option",
                suggestion=f"Fabric() without the plugin {type(plugin).__name__}",
            )


def _refuse_second_environment(cluster: ClusterEnvironment, options: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError if the arguments of ``Fabric`` name an environment, too.

    ``cluster`` is the environment of a plugin or of the strategy.
    """
    environment = options.get("environment")
    if environment is not None:
        raise ConfigurationError(
            f"Fabric(environment={environment!r}) with {type(cluster).__name__}(...)",
            problem="the environment is set in several places",
            expected="one place for each option",
            suggestion="Fabric() without environment=",
        )


def _cluster_environment_of(strategy: Any) -> ClusterEnvironment | None:
    """Return the environment of Lightning that a strategy has, or None if there is none."""
    environment = getattr(strategy, "cluster_environment", None)
    if isinstance(environment, ClusterEnvironment):
        return environment
    return None


def _environment(cluster: ClusterEnvironment, options: dict[str, Any]) -> AsEnvironment | str:
    """Return the value of ``Fabric(environment=...)`` for a cluster environment.

    If no launcher started this process, the value is ``"none"``: this process will start the other
    ranks. Otherwise the cluster environment is told its numbers of processes, and its rank.
    """
    devices = getattr(options["strategy"], "parallel_devices", None)
    if devices is None:
        accelerator = _parse_accelerator(options["accelerator"])
        devices = accelerator.parse_devices(options["devices"])
    environment = AsEnvironment(cluster, len(devices), int(options["num_nodes"]))
    # detect() also sets the number of processes and the rank of the cluster environment.
    if environment.detect(os.environ) is None:
        return "none"
    return environment


def _as_inexact(tensor: Tensor) -> Tensor:
    """Return a tensor whose mean is not truncated: integers become float64."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.double()
