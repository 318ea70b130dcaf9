"""``Fabric`` with Lightning Fabric's behavior where that differs from ours."""

import inspect
import os
import sys
from functools import cache
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._fabric import Fabric as _Fabric
from fabric._fabric import _single_or_tuple
from fabric._plan import _parse_accelerator
from fabric.data.sharding import ShardedSampler
from fabric.strategies import SingleDeviceStrategy
from fabric.strategies.parallel import as_list
from fabric.tree import flatten, map_tensors
from fabric.world import World
from fabric_compat import strategies
from fabric_compat.plugins import (
    AsEnvironment,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    precision_object,
)
from fabric_compat.utilities import convert_to_tensors, name_of_reduction, seed_everything
from fabric_compat.wrappers import _FabricModule, mark_set_up

_DEFAULTS = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
}


class Fabric(_Fabric):
    """Takes Lightning's arguments and gives its results; everything else is :class:`fabric.Fabric`.

    Args:
        plugins: a precision, an environment and a format of checkpoints, as objects of :mod:`fabric_compat.plugins`.
        options: ``accelerator``, ``strategy``, ``devices``, ``num_nodes``, ``precision``, ``callbacks``, ``loggers``.
    """

    def __init__(self, *, plugins: Any = None, **options: Any) -> None:
        given = {**_DEFAULTS, **options}
        for name, default in _DEFAULTS.items():
            value = os.environ.get(f"LT_{name.upper()}", given[name])
            if str(given[name]) not in (str(default), str(value)):
                raise ValueError(
                    f"{name}={given[name]!r}, and LT_{name.upper()}={value!r} says otherwise"
                )
            given[name] = value
        if isinstance(given["strategy"], str):
            given["strategy"] = strategies.STRATEGY_REGISTRY.get(
                given["strategy"], given["strategy"]
            )
        elif isinstance(given["strategy"], SingleDeviceStrategy):
            given.setdefault("environment", "none")  # of several processes each may have one
        formats = []
        for plugin in as_list(plugins):
            if isinstance(plugin, ClusterEnvironment):
                devices = _parse_accelerator(given["accelerator"]).parse_devices(given["devices"])
                environment = AsEnvironment(plugin, len(devices), int(given["num_nodes"]))
                given["environment"] = environment if environment.detect(os.environ) else "none"
            elif isinstance(plugin, CheckpointIO):
                formats.append(plugin)
            elif isinstance(plugin, Precision):
                given["precision"] = plugin
            else:
                raise TypeError(
                    f"plugins={plugin!r} is no precision, environment or format of checkpoints"
                )
        if given["precision"] is not None:
            given["precision"] = precision_object(given["precision"])
        super().__init__(**given)
        for plugin in formats:
            self.strategy.checkpoint_io = plugin
        kind = type(self.strategy)
        self.strategy.__class__ = vars(strategies).get(kind.__name__, kind)  # that a name stood for
        self._launched = False
        self._strategy = self.strategy
        self._precision = precision_object(self.precision)

    @property
    def device(self) -> torch.device:
        """The device of this process; before the launch, the first one."""
        return super().device if self._plan.world is not None else self._plan.devices[0]

    def _world(self, call: str) -> World:
        return self._plan.world or World()  # ranks are 0 before there are processes

    def launch(self, *function_and_args: Any, **kwargs: Any) -> Any:
        """Start the processes; a second call without a function does nothing."""
        has_launched = self._launched
        self._launched = True
        return (
            None
            if has_launched and not function_and_args
            else super().launch(*function_and_args, **kwargs)
        )

    def setup(
        self,
        module: Any,
        *optimizers: Any,
        scheduler: Any = None,
        move_to_device: bool = True,
        **_: Any,
    ) -> Any:
        """Set up a module, even a second time, and optimizers; calls ``on_after_setup`` of the callbacks."""
        session = self._running_session("setup")
        model = next(
            (each for each in session.modules if self.unwrap(each) is self.unwrap(module)), None
        )
        if model is None:
            session.check_setup(
                module,
                [optimizer for optimizer in optimizers if optimizer not in session.optimizers],
            )
            model = session.setup_module(module, move_to_device)
            object.__setattr__(model, "__class__", _FabricModule)
            model.__dict__["_fabric_precision"] = precision_object(model._fabric_precision)
            if self.precision.name != "32-true":
                _note(f"modules under {self.precision.name} cast inputs, and return float32")
        else:
            _note("a module that is set up again is the one that was")
        self._set_up(optimizers)
        self.call("on_after_setup", fabric=self, module=model)
        return _single_or_tuple(model, *optimizers, scheduler)

    def setup_module(self, module: Any, move_to_device: bool = True, **_: Any) -> Any:
        """Set up a module on its own."""
        return self.setup(module, move_to_device=move_to_device)

    def setup_optimizers(self, *optimizers: Any, **_: Any) -> Any:
        """Set up optimizers, also of parameters that belong to no module that is set up."""
        self._set_up(optimizers)
        return _single_or_tuple(*optimizers)

    def _set_up(self, optimizers: Any) -> None:
        session = self._running_session("setup_optimizers")
        new = [each for each in optimizers if each not in session.optimizers]
        session.setup_optimizers(new)
        if not session.modules:
            _note("optimizers are set up without their modules, whose gradients nothing averages")
        for optimizer in new:
            mark_set_up(optimizer)
            optimizer.register_step_post_hook(self._after_step)

    def setup_dataloaders(self, *loaders: Any, **options: Any) -> Any:
        """Set up loaders, whose samplers have a ``set_epoch`` if there are other processes."""
        prepared = super().setup_dataloaders(*loaders, **options)
        for each in as_list(prepared):
            if isinstance(each.sampler, ShardedSampler) and not hasattr(each.sampler, "set_epoch"):
                vars(each.sampler).update(set_epoch=each.set_epoch)
        return prepared

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=optimizer)

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Compute gradients; ``model`` is for DeepSpeed, which is not here."""
        super().backward(tensor, *args, **kwargs)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of all callbacks that have it, with the keywords that it accepts."""
        for callback in self._callbacks:
            if callable(hook := getattr(callback, hook_name, None)):
                parameters = inspect.signature(hook).parameters
                takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
                hook(
                    *args,
                    **{
                        name: value
                        for name, value in kwargs.items()
                        if takes_all or name in parameters
                    },
                )

    def all_gather(  # type: ignore[override]
        self, data: Any, group: Any = None, sync_grads: bool = False, **ours: Any
    ) -> Any:
        """Tensors of shape ``(world_size, *s)``, of numbers too; on one process ``s``."""
        self._running_session("all_gather")  # which sets the rank that says it
        tensors = convert_to_tensors(data, self.device)
        _note("all_gather returns tensors for numbers, and adds no dimension on one process")
        if self.world_size == 1 and group is None:
            return tensors
        return super().all_gather(tensors, group, sync_grads, **ours)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors in place, and return them; numbers as tensors."""
        data = convert_to_tensors(data, self.device)
        name = name_of_reduction(reduce_op)
        tensors = [each for each in flatten(data)[0] if isinstance(each, Tensor)]
        if name == "mean":  # that of integers is cut off
            tensors = [
                each if each.is_floating_point() or each.is_complex() else each.double()
                for each in tensors
            ]
        results = iter(super().all_reduce(tensors, group, name))
        _note("all_reduce returns tensors for numbers, and changes tensors in place")

        def filled(tensor: Tensor) -> Tensor:
            result = next(results)
            return result if result.requires_grad else tensor.detach().copy_(result)

        return map_tensors(filled, data)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    @staticmethod
    def seed_everything(  # type: ignore[override]
        seed: int | None = None, workers: bool | None = None, verbose: bool = True
    ) -> int:
        """Seed python, numpy and torch in this process, and loader workers unless ``workers=False``."""
        return seed_everything(seed, workers is not False, verbose)


@rank_zero_only
@cache
def _note(text: str) -> None:
    """Print once, on the first rank, where the behavior differs from ``fabric``."""
    print(f"fabric_compat: as in Lightning Fabric, {text}", file=sys.stderr, flush=True)
