"""Data parallelism with one process for each device, each with the whole model.

Gradients are averaged during the backward pass.
"""

import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from fabric._torch import (
    FakeTensor,
    disable_join,
    ignored_by_ddp,
    reduce_bucket_without_result,
    synchronization_check,
    uncompiled,
)
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.contract import GradientContract
from fabric.diagnostics.training_checks import check_same_model
from fabric.environments import Environment
from fabric.errors import ConfigurationError
from fabric.precision import Precision, PrecisionName
from fabric.strategies.parallel import (
    ParallelStrategy,
    check_forwarded_arguments,
    refuse_unprepared,
)

__all__ = ["DDPStrategy"]

# The arguments of DistributedDataParallel that the strategy decides.
_DECIDED_ARGUMENTS = {
    "self",
    "module",
    "device_ids",
    "output_device",
    "process_group",
    "device_mesh",
}
_UNUSED_PARAMETERS = re.compile(
    r"Parameter indices which did not receive grad for rank (?P<rank>\d+):(?P<indices>(?: \d+)+)"
)


class DDPStrategy(ParallelStrategy):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    Args:
        accelerator: the hardware. None uses that of ``Fabric``.
        parallel_devices: the devices of this node. None uses those of ``Fabric``.
        cluster_environment: the environment that says which rank this is. None detects it.
        checkpoint_io: the format of ``save`` and ``load``. None uses the strategy's own.
        precision: the precision. None uses that of ``Fabric``.
        ddp_comm_state: the state that is handed to the hook, one for all modules that are set up.
        ddp_comm_hook: how gradients are sent, see ``torch.distributed.algorithms.ddp_comm_hooks``.
        ddp_comm_wrapper: wraps the hook, such as ``fp16_compress_wrapper``.
        model_averaging_period: with a ``PostLocalSGDState`` as ``ddp_comm_state``: parameters are
            averaged over all ranks every so many optimizer steps, inside the step, once the state's
            ``start_localSGD_iter`` is reached.
        process_group_backend: the backend of the process group. None uses the device's default.
        timeout: how long a collective may wait.
        start_method: ``"popen"`` runs the script again; ``"spawn"``, ``"fork"`` and
            ``"forkserver"`` run a function.
        precision_plugin: older name of ``precision``.
        sync_batchnorm: compute the statistics of BatchNorm layers over all ranks. Reverted at
            teardown. CUDA only.
        num_nodes: the number of nodes of the job.
        **ddp_kwargs: passed to ``DistributedDataParallel``, such as
            ``find_unused_parameters=True``.

    Raises:
        ArgumentTypeError: ``DistributedDataParallel`` knows no such argument.
        ConfigurationError: options that contradict each other.
    """

    name = "ddp"
    _wrapper_class = DistributedDataParallel

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
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "popen",
        *,
        precision_plugin: Any = None,
        sync_batchnorm: bool = False,
        num_nodes: int = 1,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            num_nodes=num_nodes,
        )
        check_forwarded_arguments(
            strategy_name="DDPStrategy",
            torch_function=DistributedDataParallel.__init__,
            user_arguments=ddp_kwargs,
            decided_names=_DECIDED_ARGUMENTS,
        )
        if ddp_comm_wrapper is not None and ddp_comm_hook is None:
            raise ConfigurationError(
                "DDPStrategy(ddp_comm_wrapper=...)", problem="there is no ddp_comm_hook to wrap"
            )
        if model_averaging_period is not None:
            _check_model_averaging(model_averaging_period, ddp_comm_state)
        self.ddp_comm_state = ddp_comm_state
        self.ddp_comm_hook = ddp_comm_hook
        self.ddp_comm_wrapper = ddp_comm_wrapper
        self.model_averaging_period = model_averaging_period
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs = ddp_kwargs
        # The names of the parameters that DistributedDataParallel numbers. A parameter that is
        # frozen later keeps its number.
        self._wrappers: WeakKeyDictionary[DistributedDataParallel, list[str]] = WeakKeyDictionary()
        # What teardown has to do to modules and optimizers.
        self._cleanup = ExitStack()

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        if self.sync_batchnorm and accelerator.name == "cpu":
            raise ConfigurationError(
                "DDPStrategy(sync_batchnorm=True)",
                problem="torch's SyncBatchNorm refuses inputs on the CPU",
                expected="sync_batchnorm=False, or GroupNorm",
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        # torch tells some ranks, or none, of some differences.
        check_same_model(self.runtime.communicator, module)
        if not _has_trainable_parameters(module):
            self._broadcast_state(module)
            return module
        if self.sync_batchnorm:
            self._synchronize_batchnorm(module)
        wrapper = self._wrap(module)
        if self.ddp_comm_hook is not None:
            hook = self.ddp_comm_hook
            if self.ddp_comm_wrapper is not None:
                hook = self.ddp_comm_wrapper(hook)
            wrapper.register_comm_hook(self._hook_state(), hook)
        # The last attribute of the wrapper, so that it is freed after the reducer.
        vars(wrapper)["_fabric_group"] = _KeepsGroup(wrapper.process_group)
        self._wrappers[wrapper] = list(_synchronized_parameters(wrapper))
        return wrapper

    def _broadcast_state(self, module: nn.Module) -> None:
        """Give all ranks rank 0's values, as DistributedDataParallel does for what it wraps."""
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.copy_(self.broadcast(tensor.data))

    def _synchronize_batchnorm(self, module: nn.Module) -> None:
        """Convert BatchNorm layers to SyncBatchNorm until teardown.

        The layers stay the same objects, with their parameters, buffers and hooks. torch's own
        conversion makes new ones.
        """
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                self._cleanup.callback(setattr, layer, "__class__", type(layer))
                vars(layer)["process_group"] = None
                layer.__class__ = nn.SyncBatchNorm

    def _wrap(self, module: nn.Module) -> DistributedDataParallel:
        device_ids = None
        if self.root_device.type == "cuda":
            device_ids = [self.root_device.index]
        # A dry run has no other ranks: what torch does by itself would read what they answer.
        is_dry_run = isinstance(next(module.parameters()), FakeTensor)
        options = {"init_sync": not is_dry_run, **self.ddp_kwargs}
        wrapper = DistributedDataParallel(module, device_ids=device_ids, **options)
        if is_dry_run:
            wrapper.register_comm_hook(None, reduce_bucket_without_result)
        return wrapper

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> None:
        if self.model_averaging_period is None:
            return
        # Imported here: few users average models.
        from torch.distributed.algorithms.model_averaging import averagers

        averager = averagers.PeriodicModelAverager(
            self.model_averaging_period, self._hook_state().start_localSGD_iter
        )

        def average(stepped: Optimizer, *_: Any) -> None:
            # torch averages the parameters that have gradients. A step that is skipped after an
            # overflow has none.
            if _has_gradients(stepped):
                averager.average_parameters(stepped.param_groups)

        self._cleanup.callback(optimizer.register_step_post_hook(average).remove)

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[object]:
        if not enabled or not _has_trainable_parameters(module):
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            refuse_unprepared(self, module)
        return module.no_sync()

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        drifts = self.model_averaging_period is not None
        unused_options = ("find_unused_parameters", "static_graph")
        contract = replace(
            super().gradient_contract(prepared),
            needs_forward=True,
            expects_unused=any(map(self.ddp_kwargs.get, unused_options)),
            gradients_differ=drifts,
        )
        if not isinstance(prepared, DistributedDataParallel):  # without trainable parameters
            return contract
        contract = replace(contract, synchronizes=synchronization_check(prepared))
        if self.world_size > 1 and not drifts:
            replicated = partial(_synchronized_parameters, prepared)
            contract = replace(contract, replicated=replicated)
        return contract

    @override
    def _join(
        self, modules: Sequence[nn.Module], divide_by_all: bool
    ) -> AbstractContextManager[object] | None:
        wrappers: list[DistributedDataParallel] = []
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                wrappers.append(module)
        needs_all_ranks = self.model_averaging_period is not None or self.sync_batchnorm
        if needs_all_ranks or len(wrappers) < len(modules):
            return super()._join(modules, divide_by_all)
        if self.world_size == 1:
            return None
        return _joined(wrappers, divide_by_all)

    @property
    @override
    def _prepared_modules(self) -> Sequence[nn.Module]:
        return list(self._wrappers)

    @override
    def _explain(self, exception: BaseException) -> None:
        """Add the names of parameters whose indices DistributedDataParallel gives in an error.

        Other errors are left alone.
        """
        match = _UNUSED_PARAMETERS.search(str(exception))
        if match is None or getattr(exception, "__notes__", None):
            return
        indices = [int(index) for index in match["indices"].split()]
        for wrapper, names in self._wrappers.items():
            if max(indices) >= len(names):  # the error is about another module
                continue
            title = type(uncompiled(wrapper.module)).__name__
            unused = ", ".join(names[index] for index in indices)
            exception.add_note(
                f"rank {match['rank']}: these parameters of {title} took no part in the loss: "
                f"{unused}\n"
                "  Write: fabric.all_gather(x, sync_grads=True) for a loss of gathered tensors; "
                'else strategy="ddp_find_unused_parameters_true", or .requires_grad_(False) '
                "before setup"
            )
            return

    @override
    def teardown(self) -> None:
        self._cleanup.close()
        self._wrappers.clear()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # On the way to a rank. States of hooks look for the process group when they are unpickled,
        # which is too early there: the state is unpickled when a module is set up.
        hook_state = _PickledState(pickle.dumps(self.ddp_comm_state))
        return {**vars(self), "ddp_comm_state": hook_state, "_wrappers": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _wrappers=WeakKeyDictionary())

    def _hook_state(self) -> Any:
        """Return ``ddp_comm_state``, unpickled if it came to this process in a pickle."""
        if isinstance(self.ddp_comm_state, _PickledState):
            # Pickled by __getstate__ of the same object.
            self.ddp_comm_state = pickle.loads(self.ddp_comm_state)  # noqa: S301
        return self.ddp_comm_state


class _PickledState(bytes):
    """The state of a hook, pickled."""


class _KeepsGroup:
    """Keeps a process group from being freed by a reducer.

    gloo's destructor joins a thread that may need the interpreter lock to free the last collective.
    A reducer frees its group while it holds that lock, which deadlocks. Python's own reference to a
    group releases the lock first.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __reduce__(self) -> tuple[type["_KeepsGroup"], tuple[()]]:
        return _KeepsGroup, ()


def _check_model_averaging(period: int, hook_state: Any) -> None:
    """Raise a ConfigurationError if the models of the ranks would never differ."""
    if not hasattr(hook_state, "start_localSGD_iter"):
        raise ConfigurationError(
            f"DDPStrategy(model_averaging_period={period})",
            problem="replicas drift only with a PostLocalSGDState as ddp_comm_state and "
            "post_localSGD_hook",
        )


def _has_trainable_parameters(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _has_gradients(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def _synchronized_parameters(wrapper: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the trainable parameters that torch was not told to ignore, by the user's names."""
    ignored = ignored_by_ddp(wrapper)
    synchronized: dict[str, torch.Tensor] = {}
    for name, parameter in uncompiled(wrapper.module).named_parameters():
        if parameter.requires_grad and name not in ignored:
            synchronized[name] = parameter
    return synchronized


@contextmanager
def _joined(wrappers: Sequence[DistributedDataParallel], divide_by_all: bool) -> Iterator[None]:
    """Run the block under torch's ``Join``, and leave the wrappers as they were before."""
    join = Join(list(wrappers), divide_by_initial_world_size=divide_by_all)
    try:
        yield
        with warnings.catch_warnings():  # leaving Join changes the filters of the process
            join.__exit__(None, None, None)
    finally:
        for wrapper in wrappers:
            disable_join(wrapper)
