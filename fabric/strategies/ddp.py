"""One process for each device, each with the whole model; gradients are averaged during the backward pass."""

import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from fabric._torch import FakeTensor, leave_join, reduce_at_once
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.contract import GradientContract
from fabric.diagnostics.training_checks import check_same_model
from fabric.environments import Environment
from fabric.errors import ConfigurationError
from fabric.precision import Precision, PrecisionName
from fabric.runtime import DEFAULT_TIMEOUT
from fabric.strategies.base import uncompiled
from fabric.strategies.parallel import (
    ParallelStrategy,
    check_forwarded_arguments,
    refuse_unprepared,
)

__all__ = ["DDPStrategy"]

# What the strategy itself decides when it builds the wrapper.
_OWN_ARGUMENTS = {"self", "module", "device_ids", "output_device", "process_group", "device_mesh"}
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank (\d+):((?: \d+)+)")


class DDPStrategy(ParallelStrategy):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    Args:
        accelerator: as for :class:`fabric.strategies.ParallelStrategy`, and so are the other shared ones.
        parallel_devices: the devices of this node.
        cluster_environment: the environment that says which rank this is.
        checkpoint_io: format of ``save`` and ``load``.
        precision: precision.
        ddp_comm_state: state handed to the hook, one for all modules that are set up.
        ddp_comm_hook: how gradients are sent, see ``torch.distributed.algorithms.ddp_comm_hooks``.
        ddp_comm_wrapper: wraps the hook, such as ``fp16_compress_wrapper``.
        model_averaging_period: with a ``PostLocalSGDState`` as ``ddp_comm_state``: parameters are averaged over all
            ranks every so many optimizer steps, inside the step, once the state's ``start_localSGD_iter`` is reached.
        process_group_backend: backend of the process group; None for the device's default.
        timeout: how long a collective may wait.
        start_method: ``"popen"`` re-runs the script; ``"spawn"``, ``"fork"`` and ``"forkserver"`` run a function.
        precision_plugin: older name of ``precision``.
        sync_batchnorm: compute the statistics of BatchNorm layers over all ranks; reverted at teardown. CUDA only.
        num_nodes: number of nodes of the job.
        **ddp_kwargs: passed to ``DistributedDataParallel``, such as ``find_unused_parameters=True``.

    Raises:
        ArgumentTypeError: ``DistributedDataParallel`` knows no such argument.
        ConfigurationError: options that contradict each other.
    """

    name = "ddp"
    _wrapper = DistributedDataParallel

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | PrecisionName | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        *,
        precision_plugin: Any = None,
        sync_batchnorm: bool = False,
        num_nodes: int = 1,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
            precision_plugin=precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, num_nodes=num_nodes,
        )  # fmt: skip
        check_forwarded_arguments(
            "DDPStrategy", DistributedDataParallel.__init__, ddp_kwargs, _OWN_ARGUMENTS
        )
        if ddp_comm_wrapper is not None and ddp_comm_hook is None:
            raise ConfigurationError(
                "DDPStrategy(ddp_comm_wrapper=...)", "there is no ddp_comm_hook to wrap"
            )
        if model_averaging_period is not None and not hasattr(
            ddp_comm_state, "start_localSGD_iter"
        ):
            problem = "replicas drift only with a PostLocalSGDState as ddp_comm_state and post_localSGD_hook"
            raise ConfigurationError(
                f"DDPStrategy(model_averaging_period={model_averaging_period})", problem
            )
        self.ddp_comm_state = ddp_comm_state
        self.ddp_comm_hook = ddp_comm_hook
        self.ddp_comm_wrapper = ddp_comm_wrapper
        self.model_averaging_period = model_averaging_period
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs = ddp_kwargs
        # The names that DistributedDataParallel numbers: what is frozen later keeps its number.
        self._wrappers: WeakKeyDictionary[DistributedDataParallel, list[str]] = WeakKeyDictionary()
        # What teardown has to do to modules and optimizers.
        self._cleanup = ExitStack()

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        if self.sync_batchnorm and accelerator.name == "cpu":
            problem = "torch's SyncBatchNorm refuses inputs on the CPU"
            raise ConfigurationError(
                "DDPStrategy(sync_batchnorm=True)", problem, "sync_batchnorm=False, or GroupNorm"
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        check_same_model(
            self.runtime.communicator, module
        )  # torch tells some ranks, or none, of some differences
        if not any(parameter.requires_grad for parameter in module.parameters()):
            # DistributedDataParallel does so for a module that it wraps.
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data.copy_(self.broadcast(tensor.data))
            return module
        for layer in module.modules() if self.sync_batchnorm else ():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                self._cleanup.callback(setattr, layer, "__class__", type(layer))
                # The same object, with its parameters, buffers and hooks: torch's own conversion makes another one.
                vars(layer)["process_group"] = None
                layer.__class__ = nn.SyncBatchNorm
        device_ids = [self.root_device.index] if self.root_device.type == "cuda" else None
        # A dry run has no other ranks: what torch does by itself would read what they answer.
        is_dry = isinstance(next(module.parameters()), FakeTensor)
        wrapper = DistributedDataParallel(
            module, device_ids=device_ids, **{"init_sync": not is_dry, **self.ddp_kwargs}
        )
        if is_dry:
            wrapper.register_comm_hook(None, reduce_at_once)
        if self.ddp_comm_hook is not None:
            hook = (
                self.ddp_comm_wrapper(self.ddp_comm_hook)
                if self.ddp_comm_wrapper
                else self.ddp_comm_hook
            )
            wrapper.register_comm_hook(self._state_of_hook(), hook)
        # Last in its attributes, so that it goes after the reducer when the wrapper is freed.
        object.__setattr__(wrapper, "_fabric_group", _KeepsGroup(wrapper.process_group))
        self._wrappers[wrapper] = list(_synchronized(wrapper))
        return wrapper

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> None:
        if self.model_averaging_period is None:
            return
        from torch.distributed.algorithms.model_averaging.averagers import (
            PeriodicModelAverager,
        )  # used by few

        averager = PeriodicModelAverager(
            self.model_averaging_period, self._state_of_hook().start_localSGD_iter
        )

        def average(stepped: Optimizer, *_: Any) -> None:
            # A step that is skipped after an overflow has no gradients, and torch averages what has some.
            if any(
                parameter.grad is not None
                for group in stepped.param_groups
                for parameter in group["params"]
            ):
                averager.average_parameters(stepped.param_groups)

        self._cleanup.callback(optimizer.register_step_post_hook(average).remove)

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        if not enabled or not any(parameter.requires_grad for parameter in module.parameters()):
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            refuse_unprepared(self, module)
        return module.no_sync()

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        wrapper = prepared if isinstance(prepared, DistributedDataParallel) else None
        drifts = self.model_averaging_period is not None
        return replace(
            super().gradient_contract(prepared),
            # No function of Python: it is called in every step. Without trainable parameters there is no wrapper.
            synchronizes=partial(attrgetter("require_backward_grad_sync"), wrapper)
            if wrapper
            else bool,
            needs_forward=True,
            expects_unused=any(
                self.ddp_kwargs.get(name) for name in ("find_unused_parameters", "static_graph")
            ),
            gradients_differ=drifts,
            replicated=partial(_synchronized, wrapper)
            if wrapper and self.world_size > 1 and not drifts
            else dict,
        )

    @override
    def _join(
        self, modules: Sequence[nn.Module], divide_by_all: bool
    ) -> AbstractContextManager[Any] | None:
        takes_all_ranks = self.model_averaging_period is not None or self.sync_batchnorm
        if takes_all_ranks or not all(
            isinstance(module, DistributedDataParallel) for module in modules
        ):
            return super()._join(modules, divide_by_all)
        return _joined(modules, divide_by_all) if self.world_size > 1 else None

    @property
    @override
    def _prepared_modules(self) -> Sequence[nn.Module]:
        return list(self._wrappers)

    @override
    def _explain(self, exception: BaseException) -> None:
        """Name the parameters whose indices DistributedDataParallel gives in its error; any other is left alone."""
        found = _UNUSED.search(str(exception))
        if found is None or getattr(exception, "__notes__", None):
            return
        indices = [int(index) for index in found[2].split()]
        for wrapper, names in self._wrappers.items():
            if max(indices) < len(names):  # else the error is about another module
                exception.add_note(
                    f"rank {found[1]}: these parameters of {type(uncompiled(wrapper.module)).__name__} took no part in "
                    f"the loss: {', '.join(names[index] for index in indices)}\n"
                    "  Write: fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors; else "
                    'strategy="ddp_find_unused_parameters_true", or .requires_grad_(False) before setup'
                )
                return

    @override
    def teardown(self) -> None:
        self._cleanup.close()
        self._wrappers.clear()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # On the way to a rank. States of hooks look for the process group when they are unpickled, which is too early.
        return {
            **vars(self),
            "ddp_comm_state": _Packed(pickle.dumps(self.ddp_comm_state)),
            "_wrappers": None,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _wrappers=WeakKeyDictionary())

    def _state_of_hook(self) -> Any:
        if isinstance(self.ddp_comm_state, _Packed):
            self.ddp_comm_state = pickle.loads(self.ddp_comm_state)  # noqa: S301 - packed by the same object
        return self.ddp_comm_state


class _Packed(bytes):
    """The state of a hook, pickled."""


class _KeepsGroup:
    """Keeps a process group from being freed by a reducer.

    gloo's destructor joins a thread that may need the interpreter lock to free the last collective. A reducer frees its
    group while it holds that lock, which deadlocks; Python's own reference to a group releases the lock first.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __reduce__(self) -> tuple[type["_KeepsGroup"], tuple[()]]:
        return _KeepsGroup, ()


def _synchronized(wrapper: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """The trained parameters but those that a user has told torch to ignore, by the user's names."""
    ignored = {name.removeprefix("_orig_mod.") for name in wrapper.parameters_to_ignore}
    named = uncompiled(wrapper.module).named_parameters()
    return {
        name: parameter
        for name, parameter in named
        if parameter.requires_grad and name not in ignored
    }


@contextmanager
def _joined(wrappers: Sequence[Any], divide_by_all: bool) -> Any:
    join = Join(list(wrappers), divide_by_initial_world_size=divide_by_all)
    try:
        yield
        with warnings.catch_warnings():  # leaving it changes the filters of the process
            join.__exit__(None, None, None)
    finally:
        for wrapper in wrappers:
            leave_join(wrapper)
