"""Data parallelism: each process has one device and the whole model.

The backward pass averages the gradients over the processes.
"""

import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from fabric._torch import (
    FakeTensor,
    disable_join,
    ignored_by_ddp,
    names_to_ignore_in_ddp,
    reduce_bucket_without_result,
    synchronization_check,
    uncompiled,
)
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.collectives.batch_norm import has_sync_batch_norm, synchronize_batch_norms
from fabric.communicators.call_site import warn_user
from fabric.contract import GradientContract
from fabric.diagnostics.training_checks import check_same_model
from fabric.environments import Environment
from fabric.errors import ConfigurationError, UsageError
from fabric.precision import Precision, PrecisionName
from fabric.strategies.parallel import (
    ParallelStrategy,
    check_forwarded_arguments,
    refuse_join,
    refuse_unprepared,
)
from fabric.tree import flatten, parameters_of

__all__ = ["DDPStrategy"]

# The parameters of DistributedDataParallel that users cannot pass, since the strategy decides them.
_DECIDED_ARGUMENTS = {
    "self",
    "module",
    "device_ids",
    "output_device",
    "process_group",
    "device_mesh",
}
# The part of torch's error about parameters that the loss does not use.
_UNUSED_PARAMETERS = re.compile(
    r"Parameter indices which did not receive grad for rank (?P<rank>\d+):(?P<indices>(?: \d+)+)"
)
# Notes for errors of torch, by a part of the error's text.
_NOTES = {
    "Expected to mark a variable ready only once": (
        "a parameter has got a gradient twice after one forward pass, as by a penalty on a weight "
        "with a backward pass of its own, or by checkpoint(..., use_reentrant=True)\n"
        "  Write: fabric.backward(loss + penalty); checkpoint(..., use_reentrant=False)"
    ),
    "!tensors.empty() INTERNAL ASSERT FAILED": (
        "the model had buffers at setup, and has none any more, as after "
        "torch.nn.utils.prune.remove(...)\n"
        "  Write: prune.remove(...) before fabric.setup(...) or after the last step; or "
        "DDPStrategy(broadcast_buffers=False)"
    ),
}


class DDPStrategy(ParallelStrategy):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    Args:
        accelerator: the hardware. None uses that of ``Fabric``.
        parallel_devices: the devices of this node. None uses those of ``Fabric``.
        cluster_environment: the environment that says which rank this is. None detects it.
        checkpoint_io: the format of ``save`` and ``load``. None uses the strategy's own.
        precision: the precision. None uses that of ``Fabric``.
        ddp_comm_state: the state that is passed to the hook. All modules share it.
        ddp_comm_hook: a communication hook, which says how gradients are sent. See
            ``torch.distributed.algorithms.ddp_comm_hooks``.
        ddp_comm_wrapper: a function that wraps the hook, such as ``fp16_compress_wrapper``.
        model_averaging_period: the number of optimizer steps from one average of the parameters
            over all ranks to the next. The parameters are averaged at the end of a step, from the
            step ``start_localSGD_iter`` of the hook's state on. ``ddp_comm_state`` has to be a
            ``PostLocalSGDState``. None averages no parameters. A checkpoint has rank 0's
            parameters and optimizer state, and starts a new period when it is loaded.
        process_group_backend: the backend of the process group. None uses the device's default.
        timeout: how long a collective may wait.
        start_method: ``"popen"`` runs the script again; ``"spawn"``, ``"fork"`` and
            ``"forkserver"`` run a function.
        precision_plugin: older name of ``precision``.
        sync_batchnorm: whether BatchNorm layers compute their statistics over all ranks, until
            teardown. ``fabric.sync_batchnorm(module)`` does the same under every strategy.
        num_nodes: the number of nodes of the job.
        **ddp_kwargs: passed to ``DistributedDataParallel``, such as
            ``find_unused_parameters=True``. With ``static_graph=True``, the first pass has to be
            outside of ``no_backward_sync``.

    Raises:
        ArgumentTypeError: ``DistributedDataParallel`` knows no such argument.
        ConfigurationError: options that contradict each other.
    """

    name = "ddp"

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
        """Check the options and keep them. No process runs yet."""
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
        self.ddp_comm_state = ddp_comm_state
        self.ddp_comm_hook = ddp_comm_hook
        self.ddp_comm_wrapper = ddp_comm_wrapper
        self.model_averaging_period = model_averaging_period
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs = ddp_kwargs
        self._check_hook_options()
        # For each prepared module, the names of its trainable parameters at setup. torch's errors
        # give indices into this list, even if a parameter is frozen later.
        self._names_by_wrapper: WeakKeyDictionary[DistributedDataParallel, list[str]] = (
            WeakKeyDictionary()
        )
        # Calls with which teardown undoes changes of modules and optimizers.
        self._teardown_calls = ExitStack()

    def _check_hook_options(self) -> None:
        """Raise a ConfigurationError if the options for communication hooks contradict each other.

        Called by the constructor, once the attributes with the options are set.
        """
        if self.ddp_comm_wrapper is not None and self.ddp_comm_hook is None:
            raise ConfigurationError(
                "DDPStrategy(ddp_comm_wrapper=...)", problem="there is no ddp_comm_hook to wrap"
            )
        period = self.model_averaging_period
        if period is None:
            return
        if type(period) is not int or period < 1:
            raise ConfigurationError(
                f"DDPStrategy(model_averaging_period={period!r})",
                problem="it is no number of steps",
                expected="an int of at least 1, or None",
            )
        # torch's PostLocalSGDState has this attribute. Without local SGD, gradients are averaged in
        # every step, and the models of the ranks stay equal.
        is_local_sgd = hasattr(self.ddp_comm_state, "start_localSGD_iter")
        if not is_local_sgd:
            raise ConfigurationError(
                f"DDPStrategy(model_averaging_period={period})",
                problem="replicas drift only with a PostLocalSGDState as ddp_comm_state and "
                "post_localSGD_hook",
            )

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Wrap a module in DistributedDataParallel, which averages its gradients over the ranks.

        Collective. A module without trainable parameters is not wrapped, because torch refuses to
        wrap it. Such a module only gets rank 0's values.

        Raises:
            ConfigurationError: rank 0's values cannot be copied to a parameter or a buffer, since
                its elements share memory.
            UsageError: the models of the ranks differ.
        """
        error = None
        try:
            self._refuse_shared_memory(module)
        except ConfigurationError as raised:
            # check_same_model() raises the error on all ranks, which wait for each other there.
            error = raised
        # torch itself reports some differences between the models only on some ranks, or not at
        # all.
        check_same_model(self.runtime.communicator, module, error=error)
        _normalize_strides(module)  # otherwise DDP's copy of buffers may fail
        if not _has_trainable_parameters(module):
            self._broadcast_state(module)
            return module
        if self.sync_batchnorm:
            communicator = self._data_parallel_communicator()
            synchronize_batch_norms(module, communicator, self.root_device, self._teardown_calls)
        wrapper = self._wrap(module)
        if self.ddp_comm_hook is not None:
            hook = self.ddp_comm_hook
            if self.ddp_comm_wrapper is not None:
                hook = self.ddp_comm_wrapper(hook)
            wrapper.register_comm_hook(self._unpickled_hook_state(), hook)
        # The process group must be freed after the wrapper's reducer: freeing a gloo group from
        # within the reducer may deadlock. Python frees the attributes of an object in the order in
        # which they were set, so this one is set last.
        vars(wrapper)["_fabric_group"] = _GroupReference(wrapper.process_group)
        # For _explain_error(): torch's errors have indices into this list.
        self._names_by_wrapper[wrapper] = list(_synchronized_parameters(wrapper))
        return wrapper

    def _refuse_shared_memory(self, module: nn.Module) -> None:
        """Raise a ConfigurationError if rank 0's values cannot be copied to a module's tensors.

        torch refuses to write to a tensor whose elements share memory. Not a collective.
        """
        root = uncompiled(module)
        # What setup_module() will copy from rank 0. If the module has no trainable parameters, it
        # is not wrapped, and everything is copied.
        copies_parameters = True
        copies_buffers = True
        # The names of the tensors that the user has told torch not to synchronize.
        ignored: set[str] = set()
        if _has_trainable_parameters(root):
            copies_parameters = self.ddp_kwargs.get("init_sync", True)
            copies_buffers = self._broadcasts_buffers()
            # DDP reads the names from the module that it wraps, which may be a compiled one.
            ignored = names_to_ignore_in_ddp(module)
        # For each tensor that cannot be written to, the code that gives it memory of its own.
        remedies: dict[str, str] = {}
        if copies_parameters:
            for name, parameter in root.named_parameters():
                if name not in ignored and _is_expanded(parameter):
                    path = _attribute_path(name)
                    remedies[name] = f"{path}.data = {path}.data.clone()"
        if copies_buffers:
            for name, buffer in root.named_buffers():
                if name not in ignored and _is_expanded(buffer):
                    path = _attribute_path(name)
                    remedies[name] = f"{path} = {path}.clone()"
        if remedies:
            raise ConfigurationError(
                f"setup({type(root).__name__}) with {type(self).__name__}",
                problem=f"elements of {', '.join(remedies)} share memory, as after expand(), so "
                "that rank 0's values cannot be copied to them",
                expected="a place in memory for each element, before setup()",
                suggestion="; ".join(remedies.values()),
            )

    def _broadcasts_buffers(self) -> bool:
        """Return whether torch copies rank 0's buffers, in its constructor or in forward passes."""
        is_synchronized_in_forward = self.ddp_kwargs.get("forward_sync_buffers")
        if is_synchronized_in_forward is None:
            # The older option is for both copies. If it is missing or None, torch copies.
            return self.ddp_kwargs.get("broadcast_buffers") is not False
        # init_sync is for the copy in the constructor.
        return is_synchronized_in_forward or self.ddp_kwargs.get("init_sync", True)

    def _broadcast_state(self, module: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to all ranks, in place. Collective.

        DistributedDataParallel does the same for the modules that it wraps.
        """
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.copy_(self.broadcast(tensor.data))

    def _wrap(self, module: nn.Module) -> DistributedDataParallel:
        """Return a module in DistributedDataParallel. Collective, except in a dry run.

        A dry run is one process with fake tensors, without other ranks. It skips the initial copy
        of rank 0's values, and a hook takes the place of the reduction of gradients.
        """
        device_ids = None
        if self.root_device.type == "cuda":
            device_ids = [self.root_device.index]
        is_dry_run = isinstance(next(module.parameters()), FakeTensor)
        # The user's options come last, since they take precedence.
        options = {"init_sync": not is_dry_run, **self.ddp_kwargs}
        wrapper = DistributedDataParallel(module, device_ids=device_ids, **options)
        if is_dry_run:
            wrapper.register_comm_hook(None, reduce_bucket_without_result)
        if wrapper.static_graph:
            _FirstPassCheck(wrapper)  # registers a hook, which keeps the check alive
        return wrapper

    @override
    def unwrap(self, prepared: nn.Module) -> nn.Module:
        if isinstance(prepared, DistributedDataParallel):
            prepared = prepared.module
        return super().unwrap(prepared)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> None:
        """Have the optimizer's step average the parameters over all ranks once in a period.

        The option ``model_averaging_period`` is the number of steps of the period. If it is None,
        this method does nothing.
        """
        if self.model_averaging_period is None:
            return
        # Imported here: few users average models.
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        period = self.model_averaging_period
        # DDP averages the gradients of the steps before this one.
        first_local_step = self._unpickled_hook_state().start_localSGD_iter
        step_numbers = count()

        def average_after_step(stepped: Optimizer, *_: Any) -> None:
            """Count a step. At the end of a period, average the parameters, which is collective.

            All ranks make the same steps, but a rank may have no gradients in a step. So every step
            counts, and every trainable parameter is averaged. torch's PeriodicModelAverager leaves
            out parameters without gradients: ranks would send other parameters than their peers.
            """
            local_steps = next(step_numbers) - first_local_step
            if local_steps < 0 or local_steps % period != 0:
                return
            parameters = parameters_of(stepped)
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            all_ranks: Any = dist.group.WORLD
            if trainable:
                average_parameters(iter(trainable), all_ranks)

        handle = optimizer.register_step_post_hook(average_after_step)
        self._teardown_calls.callback(handle.remove)

    @override
    def get_module_state_dict(self, module: nn.Module, *, sharded: bool = False) -> dict[str, Any]:
        """Return the state dict of the user's module. See ``BaseStrategy.get_module_state_dict``.

        Warns on rank 0 if the ranks may hold different parameters.
        """
        has_own_parameters = self.model_averaging_period is not None and self.world_size > 1
        if has_own_parameters and self.is_global_zero:
            warn_user(
                "the ranks hold parameters of their own under model_averaging_period, and "
                "a checkpoint has those of rank 0, with rank 0's optimizer state. A run that "
                "resumes continues from these on all ranks, with a new period"
            )
        return super().get_module_state_dict(module, sharded=sharded)

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return a context in which backward passes do not average gradients.

        The context does nothing if ``enabled`` is false, or if the module has no trainable
        parameters.

        Raises:
            UsageError: the module was not set up, so that its gradients are never averaged.
        """
        if not enabled or not _has_trainable_parameters(module):
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            refuse_unprepared(self, module)  # raises the UsageError
        return module.no_sync()

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        """Return how the gradients of a prepared module are synchronized.

        Args:
            prepared: the result of :meth:`setup_module`. It is not a DistributedDataParallel if the
                module has no trainable parameters.
        """
        # With model averaging, each rank steps with its own gradients, and the parameters of the
        # ranks differ until the next average.
        replicas_drift = self.model_averaging_period is not None
        # With either of these options, DDP allows parameters that the loss does not use.
        finds_unused = self.ddp_kwargs.get("find_unused_parameters", False)
        has_static_graph = self.ddp_kwargs.get("static_graph", False)
        contract = replace(
            super().gradient_contract(prepared),
            needs_forward=True,
            expects_unused=finds_unused or has_static_graph,
            gradients_may_differ=replicas_drift,
            join=self._join,
            explain_error=self._explain_error,
        )
        if not isinstance(prepared, DistributedDataParallel):
            return contract
        # A function that returns whether the next backward pass averages gradients.
        synchronizes = synchronization_check(prepared)
        contract = replace(contract, synchronizes=synchronizes)
        has_equal_replicas = self.world_size > 1 and not replicas_drift
        if has_equal_replicas:
            # The training checks compare these parameters between the ranks after steps.
            replicated = partial(_synchronized_parameters, prepared)
            # Saves compare these tensors.
            replicas = partial(_replicas, prepared, includes_buffers=self._broadcasts_buffers())
            contract = replace(contract, replicated=replicated, replicas=replicas)
        return contract

    def _join(
        self, modules: Sequence[nn.Module], divide_by_all: bool
    ) -> AbstractContextManager[object]:
        """Return a context in which the ranks may have different numbers of batches.

        The context is torch's ``Join``, which answers the collectives of the backward pass for a
        rank without batches.

        Args:
            modules: the prepared modules that are used within the context.
            divide_by_all: whether gradients are divided by the number of all ranks, and not by the
                number of ranks that still have batches.

        Raises:
            UsageError: something else than the backward pass needs all ranks, or a module is not
                wrapped.
        """
        wrappers: list[DistributedDataParallel] = []
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                wrappers.append(module)
        # Join answers only the collectives of the backward pass. Model averaging communicates in
        # the optimizer's step, and SyncBatchNorm in the forward pass.
        averages_models = self.model_averaging_period is not None
        has_other_collectives = averages_models or any(map(has_sync_batch_norm, modules))
        # Join answers the collectives of DDP wrappers only.
        has_unwrapped_module = len(wrappers) < len(modules)
        if has_other_collectives or has_unwrapped_module:
            refuse_join(self)  # raises the UsageError
        return _joined(wrappers, divide_by_all)

    @property
    @override
    def _prepared_modules(self) -> Sequence[nn.Module]:
        """The prepared modules that are still in use and synchronize gradients, oldest first."""
        return list(self._names_by_wrapper)

    @override
    def _explain_error(self, exception: BaseException) -> None:
        """Add a note to the errors of DistributedDataParallel that this strategy knows.

        One of them is about parameters that the loss does not use, of which torch gives only the
        indices. Errors that have a note already are left alone.
        """
        if getattr(exception, "__notes__", None):
            return
        text = str(exception)
        for part_of_text, note in _NOTES.items():
            if part_of_text in text:
                exception.add_note(note)
        match = _UNUSED_PARAMETERS.search(text)
        if match is None:
            return
        indices = [int(index) for index in match["indices"].split()]
        for wrapper, names in self._names_by_wrapper.items():
            # The error does not name its module. It is taken to be about the first module with
            # enough parameters.
            if max(indices) >= len(names):
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
        """Undo the changes of modules and optimizers, forget the modules and close the runtime."""
        self._teardown_calls.close()
        self._names_by_wrapper.clear()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle when the strategy is sent to the process of a rank.

        The state of the communication hook is pickled to bytes on its own. torch's states look for
        the process group when they are unpickled, and a new process has no group yet.
        :meth:`_unpickled_hook_state` unpickles the bytes when a module is set up.
        """
        hook_state = _PickledState(pickle.dumps(self.ddp_comm_state))
        # A weak dictionary cannot be pickled. The modules in it belong to this process anyway.
        return {**vars(self), "ddp_comm_state": hook_state, "_names_by_wrapper": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes that :meth:`__getstate__` returned in another process."""
        vars(self).update(state, _names_by_wrapper=WeakKeyDictionary())

    def _unpickled_hook_state(self) -> Any:
        """Return ``ddp_comm_state``. Unpickle it first if the strategy was sent to this process.

        The process group must have been initialized, since torch's states look for it.
        """
        if isinstance(self.ddp_comm_state, _PickledState):
            # Safe: these are the bytes that __getstate__ of this strategy pickled.
            self.ddp_comm_state = pickle.loads(self.ddp_comm_state)  # noqa: S301
        return self.ddp_comm_state


class _PickledState(bytes):
    """The pickled state of a communication hook. The type marks it, since a user may pass bytes."""


class _GroupReference:
    """A reference to a process group, which prevents a deadlock when a wrapper is freed.

    A gloo group that is freed waits for its thread, and the thread may need the interpreter lock.
    The reducer of a DistributedDataParallel holds the lock while the reducer frees the group, which
    is a deadlock. Python releases the lock before Python frees the group. So this reference has to
    outlive the reducer.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __reduce__(self) -> tuple[type["_GroupReference"], tuple[()]]:
        """Copy and pickle a reference without its group, which cannot be copied."""
        return _GroupReference, ()


def _has_trainable_parameters(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory by a stride of 0, as after ``expand()``.

    torch refuses to write to such a tensor.
    """
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride == 0:
            return True
    return False


def _attribute_path(name: str) -> str:
    """Return the Python expression for a tensor in ``model``: "0.weight" is model[0].weight."""
    path = "model"
    for attribute in name.split("."):
        if attribute.isdecimal():
            path += f"[{attribute}]"
        else:
            path += f".{attribute}"
    return path


def _normalize_strides(module: nn.Module) -> None:
    """Give contiguous buffers the strides of new tensors of their shapes, without a copy.

    The stride of a dimension of size 1 may be any number. With an unusual number, torch takes the
    buffer for one whose elements share memory, and DDP's copy of rank 0's buffers fails.
    """
    for buffer in module.buffers():
        if buffer.layout is torch.strided and buffer.is_contiguous():
            # A view of the same shape could keep the strides. A view of the flat tensor has the
            # strides of a new tensor.
            view = buffer.data.view(-1).view(buffer.shape)
            if view.stride() != buffer.stride():
                buffer.data = view


def _synchronized_parameters(wrapper: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return the parameters whose gradients are averaged, by the user's names.

    These are the trainable parameters, except those that the user told torch to ignore. They are in
    the order in which torch's errors count them.
    """
    ignored = ignored_by_ddp(wrapper)
    synchronized: dict[str, torch.Tensor] = {}
    for name, parameter in uncompiled(wrapper.module).named_parameters():
        if parameter.requires_grad and name not in ignored:
            synchronized[name] = parameter
    return synchronized


def _replicas(
    wrapper: DistributedDataParallel, *, includes_buffers: bool
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that are equal on all ranks, by the user's names.

    Args:
        wrapper: the wrapped module.
        includes_buffers: whether to return the buffers, too. They are equal if torch copies rank
            0's buffers to all ranks.
    """
    ignored = ignored_by_ddp(wrapper)
    root = uncompiled(wrapper.module)
    tensors: dict[str, torch.Tensor] = dict(root.named_parameters())
    if includes_buffers:
        tensors.update(root.named_buffers())
    return {name: tensors[name] for name in tensors if name not in ignored}


class _FirstPassCheck:
    """A check that the first backward pass of a static graph synchronizes gradients.

    DDP records a static graph in the first backward pass. A forward pass outside of ``no_sync`` has
    to prepare the recording. The check ends with that forward pass.

    Args:
        wrapper: the module with the static graph.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        """Register the forward hook, which keeps this object alive."""
        # Whether a forward pass outside of no_sync has prepared the recording.
        self._is_prepared = False
        self._synchronizes = synchronization_check(wrapper)
        self._hook = wrapper.register_forward_hook(self._after_forward)

    def _after_forward(
        self, wrapper: DistributedDataParallel, _arguments: object, output: object
    ) -> None:
        """End the check, or have a backward pass of this output raise. This is a forward hook.

        The first forward pass outside of ``no_sync`` prepares DDP, and ends the check. An output
        from within ``no_sync`` is allowed if its backward pass runs after that, so
        :meth:`_refuse_backward` decides when the backward pass runs.
        """
        if not torch.is_grad_enabled():
            return
        is_in_no_sync = not self._synchronizes()
        if not is_in_no_sync:
            self._is_prepared = True
            self._hook.remove()  # this hook
            return
        check = partial(self._refuse_backward, type(uncompiled(wrapper.module)).__name__)
        leaves, _ = flatten(output)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(check)

    def _refuse_backward(self, title: str, _gradient: torch.Tensor) -> None:
        """Raise the UsageError for a first backward pass without synchronization.

        This is a gradient hook of an output from within ``no_sync``.

        Args:
            title: the class of the user's module.
        """
        # A later forward pass may have prepared DDP before this output's backward pass.
        if self._is_prepared:
            return
        raise UsageError(
            f"the first backward pass of {title} under DDPStrategy(static_graph=True)",
            problem="its forward pass was in no_backward_sync, but DDP records the graph in the "
            "first pass and has to synchronize there; torch would fail with an internal error",
            expected="a first pass outside of no_backward_sync",
            suggestion="fabric.no_backward_sync(model, enabled=not last and number > 0), where "
            "number counts the passes",
        )


@contextmanager
def _joined(wrappers: Sequence[DistributedDataParallel], divide_by_all: bool) -> Iterator[None]:
    """Run the block under torch's ``Join``, and switch Join off in the wrappers at the end.

    Collective at the end of the block: a rank without batches takes part in the collectives of the
    ranks that still have batches. After an exception in the block, nothing is done for other ranks.

    Args:
        wrappers: the modules whose collectives are answered.
        divide_by_all: whether gradients are divided by the number of all ranks, and not by the
            number of ranks that still have batches.
    """
    join = Join(list(wrappers), divide_by_initial_world_size=divide_by_all)
    try:
        yield
        # Leaving Join takes part in the collectives of the other ranks until all are done. It also
        # changes the warning filters of the process, which catch_warnings() restores. Entering Join
        # would do nothing.
        with warnings.catch_warnings():
            join.__exit__(None, None, None)
    finally:
        # torch leaves joining switched on in the wrappers.
        for wrapper in wrappers:
            disable_join(wrapper)
