"""The facade: one object that holds an accelerator, a precision and a strategy."""

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric import checkpoint, collectives
from fabric._plan import resolve
from fabric._session import Session, find_fabric_modules, loss_weights, rank_zero_first
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.checkpoint import PendingSave
from fabric.communicators import Communicator, NonMember, Reduce
from fabric.communicators.base import ReduceName, ReduceOp
from fabric.data import (
    FabricDataLoader,
    LoaderOptions,
    Uneven,
    Windows,
    gather_batch,
    without_repeats,
)
from fabric.data.metrics import compute_metrics
from fabric.diagnostics.hang_report import DEFAULT_WATCHDOG
from fabric.environments import Environment
from fabric.errors import CheckpointError, UsageError
from fabric.launchers import InlineLauncher, Launcher, StartMethod
from fabric.launchers.base import refuse_while_importing_main
from fabric.launchers.preemption import exit_preempted
from fabric.launchers.rank import exit_with_late_error
from fabric.loggers import Loggers
from fabric.loggers.progress import Metrics, Progress, print_texts_of_ranks
from fabric.module import Compiled, FabricModule, Module
from fabric.optim.ema import ExponentialMovingAverage
from fabric.optim.parameter_lists import PARAMETER_LISTS
from fabric.precision import Precision, PrecisionName
from fabric.seed import seed_everything
from fabric.strategies import StrategyName
from fabric.strategies.base import uncompiled, without_sync
from fabric.strategies.init_module import created_on
from fabric.strategies.parallel import as_list
from fabric.strategies.sequence_parallel import sequence_parallel
from fabric.strategies.standalone import Group, Strategy
from fabric.world import World

if TYPE_CHECKING:
    from fabric.tools.timeline import Timings

__all__ = ["Fabric"]

M = TypeVar("M", bound=nn.Module)
Os = TypeVarTuple("Os")
S = TypeVar("S")
T = TypeVar("T")

_Path = str | os.PathLike[str]
_State = Mapping[str, Any]
_Source = Literal["every_rank", "rank0"]
_Optims = Optimizer | Sequence[Optimizer] | None
_Keep = Mapping[str, Callable[[str, Any], bool]] | None


def _nothing(fabric: "Fabric") -> None:
    """What ``launch()`` runs without a function."""


class Fabric:
    """Runs a hand-written PyTorch loop on one device or on many, with defaults that suit the machine.

    [Note: Collectives] A *collective* is a method that every process of the job, or of ``group``, must call, in the
    same order. A group is what :meth:`new_group` returns, a process group of torch, or None for the whole job. The
    ``data`` of a collective is any collection of tensors and Python numbers with the same structure, dtypes and shapes
    on every process; it is not changed, and the same types of collections are returned. What cannot be sent or reduced
    raises a :class:`fabric.errors.ConfigurationError` that names the leaf, and calls that differ between processes a
    :class:`fabric.errors.CollectiveMismatchError` on all of them.

    Args:
        accelerator: ``"cpu"``, ``"cuda"`` (or ``"gpu"``), ``"mps"``, the name of an entry point in the group
            ``fabric.accelerators``, an :class:`fabric.accelerators.Accelerator`, or ``"auto"`` for what is there.
        strategy: ``"ddp"`` and its variants (see :class:`fabric.strategies.DDPStrategy`), ``"fsdp"``, ``"dp"``,
            ``"single_device"``, ``"model_parallel"``, an entry point in the group ``fabric.strategies``, a
            :class:`fabric.strategies.Strategy`, or ``"auto"``: a single device for one process, DDP for several.
        devices: how many, or which; see :mod:`fabric.accelerators`. On the CPU it is the number of processes, or of
            replicas under ``"dp"``; ``"auto"`` is 1 there and all devices elsewhere.
        num_nodes: number of nodes; ``"auto"`` is what the launcher of the job says, else 1.
        precision: ``"32-true"`` (or None), ``"64-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"``,
            ``"bf16-mixed"``, or one of the aliases ``64``, ``32``, ``16``, ``"bf16"``.
        environment: where a process learns its rank; None detects torchrun, SLURM, MPI and Ray, ``"none"`` nothing,
            and ignores the options of ``fabric run``: for a job of this process alone.
        launcher: how processes are started: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"`` or a
            :class:`fabric.launchers.Launcher`; None leaves it to the strategy.
        check_collectives: whether the ranks compare every collective before they make it, so that one that differs or
            is missing raises :class:`fabric.errors.CollectiveMismatchError` with the line where each rank called; the
            environment variable ``FABRIC_CHECK=1`` turns it on too. Off, it costs nothing.
        timeout: how long a collective may wait for other ranks before it raises an error that names those that are
            missing, in seconds or as a timedelta; None is the strategy's, half an hour.
        watchdog: likewise, before the first rank prints where each rank is, and the stacks of those that are missing;
            0 leaves that to the error.
        time_limit: how long until :attr:`should_stop`, in seconds, as a timedelta or as ``"HH:MM:SS"``.
        stop_margin: likewise, how long before the end of a SLURM job; None is a minute, or half of what is left then.
        callbacks, loggers: objects whose methods :meth:`call` calls, and that :meth:`log` writes to.
        check_training: whether the first steps of each optimizer are checked for parameters that do not train and for
            replicas that drift apart. It issues no collective and costs nothing after these steps.
        timings: whether steps are measured for :meth:`timings`.

    Raises:
        ConfigurationError, ArgumentTypeError: a value or a combination that cannot work; nothing has been started.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator | AcceleratorName = "auto",
        strategy: Strategy | StrategyName = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int | str = "auto",
        precision: Precision | PrecisionName | None = None,
        environment: Environment | Literal["none"] | None = None,
        launcher: Launcher | StartMethod | None = None,
        check_collectives: bool = False,
        timeout: timedelta | float | None = None,
        watchdog: timedelta | float = DEFAULT_WATCHDOG,
        time_limit: timedelta | float | str | None = None,
        stop_margin: timedelta | float | str | None = None,
        callbacks: Any = None,
        loggers: Any = None,
        check_training: bool = True,
        timings: bool = False,
    ) -> None:
        self._plan = resolve(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision,
            environment=environment, launcher=launcher, check_collectives=check_collectives, timeout=timeout,
            watchdog=watchdog, time_limit=time_limit, stop_margin=stop_margin,
        )  # fmt: skip
        self._callbacks = as_list(callbacks)
        self._loggers = Loggers(as_list(loggers))
        self._check_training = check_training
        self._timings = timings
        self._seed: dict[str, Any] | None = None
        self._session: Session | None = None
        self._closed = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass's own ``run`` is launched in every process of the job when it is called."""
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = _launched(cls.__dict__["run"])

    @property
    def accelerator(self) -> Accelerator:
        """The kind of hardware."""
        return self._plan.accelerator

    @property
    def strategy(self) -> Strategy:
        """What is done to modules."""
        return self._plan.strategy

    @property
    def precision(self) -> Precision:
        """The dtypes."""
        return self._plan.precision

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._running_session("device").runtime.device

    @property
    def device_mesh(self) -> Any:
        """The mesh of ``"model_parallel"``, a torch ``DeviceMesh``; that of ``"fsdp"`` after ``setup``; else None."""
        return next(iter(self._running_session("device_mesh").runtime.meshes.values()), None)

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes of the job."""
        return self._world("global_rank").rank

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its node."""
        return self._world("local_rank").local_rank

    @property
    def node_rank(self) -> int:
        """Number of the node of this process."""
        return self._world("node_rank").node_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job; known before they exist."""
        return self._plan.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process of all nodes."""
        return self.global_rank == 0

    def launch(
        self,
        function: Callable[..., Any] = _nothing,
        /,
        *args: Any,
        return_result: bool = True,
        return_all: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Start the processes of the job and connect them.

        On one device, and in processes that torchrun, ``fabric run``, SLURM or MPI made, nothing is started, and the
        call may be left out: the first that needs a device or other ranks connects the processes. With the start method
        ``popen`` every process runs the script again: where it launches, this call does not return but ends with the
        exit code of the ranks. With ``spawn``, ``fork`` and ``forkserver`` each runs ``function(fabric, ...)``.

        Args:
            function: what every process runs; under ``popen`` and where nothing is started it may be left out.
            *args, **kwargs: its arguments after the fabric.
            return_result, return_all: whether the result is returned, and whether all are, as a list by rank.

        Returns:
            What ``function`` returned: in process 0, copied to the CPU; where nothing is started, in this process.

        Raises:
            RankFailedError: a process raised, exited early or was killed.
            UsageError: a function is needed and missing, or this is a second ``launch()`` without one.
        """
        refuse_while_importing_main()
        plan = self._plan
        if self._closed:
            raise self._not_running_error("launch()")
        is_given = function is not _nothing
        needs_function = kwargs or (plan.world is None and plan.launcher.runs_function)
        if not callable(function) or (needs_function and not is_given):
            request = f"fabric.launch({repr(function) if is_given else ''})"
            problem = f"start method {plan.launcher.name!r} has no function to run in each process with these arguments"
            raise UsageError(
                request,
                problem,
                suggestion="fabric.launch(main, 1, 2), not fabric.launch(main(1, 2))",
            )
        if plan.world is None:
            results = "none" if not return_result else "all" if return_all else "first"
            spec = replace(plan.launch_spec, results=results)
            return plan.launcher.launch(_run_in_rank, (self, function, args, kwargs), {}, spec)
        if self._session and not is_given:
            problem = "the job has been launched already, or begun by a call before launch() that needs it"
            raise UsageError(f"fabric.launch() on rank {plan.world.rank}", problem)
        self._running_session("launch")
        result = function(self, *args, **kwargs)
        if return_result and return_all:
            return self._communicator("launch").gather_objects(result)
        return result if return_result else None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The loop of a subclass: calling it launches the job and runs the subclass's ``run`` in every process."""
        expected = "a method run(self, ...) of a subclass; or fabric.launch(main), with the loop in main(fabric)"
        raise UsageError(f"{type(self).__name__}.run()", "it has no loop of its own", expected)

    def teardown(self) -> None:
        """Close the strategy, the process group and the loggers. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        # A stack, so that everything is closed even when one of them raises.
        with ExitStack() as stack:
            if self._is_first():
                has_failed = sys.exc_info()[0] or getattr(sys, "last_value", None)
                stack.callback(self._loggers.close, "failed" if has_failed else "success")
            if self._session is not None:
                stack.callback(self._session.close)
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, exception: BaseException | None, trace: Any) -> None:
        try:
            if exception is not None and self._session is not None:
                self.strategy.on_exception(exception)
        finally:
            try:
                self.teardown()
            except CheckpointError as error:
                if exception is None:
                    raise
                # A background save often fails because of what happened, and must not take its place.
                exception.add_note(f"Besides: {error}")

    # Without optimizers it is no tuple, and every module is also a function: the first that fits counts.
    @overload
    def setup(self, module: M, *, scheduler: None = ..., move_to_device: bool = ...) -> M: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def setup(
        self, module: M, *optimizers: *Os, scheduler: None = ..., move_to_device: bool = ...
    ) -> tuple[M, *Os]: ...
    @overload
    def setup(  # pyright: ignore[reportOverlappingOverload]
        self, module: M, *optimizers: *Os, scheduler: S, move_to_device: bool = ...
    ) -> tuple[M, *Os, S]: ...
    @overload
    def setup(
        self, module: Compiled, *, scheduler: None = ..., move_to_device: bool = ...
    ) -> FabricModule: ...
    @overload
    def setup(
        self, module: Compiled, *optimizers: *Os, scheduler: None = ..., move_to_device: bool = ...
    ) -> tuple[FabricModule, *Os]: ...
    @overload
    def setup(
        self, module: Compiled, *optimizers: *Os, scheduler: S, move_to_device: bool = ...
    ) -> tuple[FabricModule, *Os, S]: ...
    def setup(
        self, module: Module, *optimizers: Any, scheduler: Any = None, move_to_device: bool = True
    ) -> nn.Module | tuple[Any, ...]:
        """Set up a module together with the optimizers of its parameters. May be collective.

        Args:
            module: the model; its parameters are moved and converted in place. An ``nn.ParameterList`` or
                ``nn.ParameterDict``, which has no forward pass, is replicated; its gradients are averaged before each
                step or clipping.
            *optimizers: optimizers of its parameters; they are returned as they are, with hooks around their step.
            scheduler: a learning-rate scheduler of one of them.
            move_to_device: whether parameters and buffers move to this process's device.

        Returns:
            The :class:`fabric.module.FabricModule`; with optimizers or a scheduler a tuple of it and them, in order.
        """
        session = self._running_session("setup")
        session.check_setup(module, optimizers)
        model = session.setup_module(module, move_to_device)
        session.setup_optimizers(optimizers)
        return _without_none(model, *optimizers, scheduler)

    @overload
    def setup_module(self, module: M, move_to_device: bool = ...) -> M: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def setup_module(self, module: Compiled, move_to_device: bool = ...) -> FabricModule: ...
    def setup_module(self, module: Module, move_to_device: bool = True) -> nn.Module:
        """Set up a module on its own; see :meth:`setup`. May be collective."""
        self._running_session("setup_module")
        return self.setup(module, move_to_device=move_to_device)

    @overload
    def setup_optimizers(self, optimizer: T, /) -> T: ...
    @overload
    def setup_optimizers(self, *optimizers: *Os) -> tuple[*Os]: ...
    @overload
    def setup_optimizers(self, *optimizers: *Os, scheduler: S) -> tuple[*Os, S]: ...
    def setup_optimizers(self, *optimizers: Any, scheduler: Any = None) -> Any:
        """Set up optimizers of modules that are set up already; returns them, and the scheduler. See :meth:`setup`."""
        session = self._running_session("setup_optimizers")
        session.check_setup(None, optimizers)
        session.setup_optimizers(optimizers)
        return _without_none(*optimizers, scheduler)

    @overload
    def setup_dataloaders(  # pyright: ignore[reportOverlappingOverload]
        self, loader: DataLoader[Any], /, **options: Unpack[LoaderOptions]
    ) -> FabricDataLoader: ...
    @overload
    def setup_dataloaders(
        self, loader: DataLoader[Any], /, *more: DataLoader[Any], **options: Unpack[LoaderOptions]
    ) -> list[FabricDataLoader]: ...
    def setup_dataloaders(
        self, loader: DataLoader[Any], /, *more: DataLoader[Any], use_distributed_sampler: bool = True,
        move_to_device: bool = True, overlap_copies: bool = True, uneven: Uneven = "pad",
    ) -> FabricDataLoader | list[FabricDataLoader]:  # fmt: skip
        """Shard the data of loaders over the processes, and move batches; a :class:`FabricDataLoader`, or a list.

        Args:
            loader, *more: the loaders; they are left as they are, what is returned is built around copies.
            use_distributed_sampler: whether to shard the data over the processes; if not, each sees all of it.
            move_to_device: whether batches move to this process's device.
            overlap_copies: whether a CUDA device gets each batch on a stream of its own, from pinned memory, during the
                step before. A batch in host memory must not be written to then, and workers return CPU tensors.
            uneven: ``"pad"`` repeats samples where some processes would have fewer, ``"drop"`` leaves some out. For
                other data ``"shortest"`` or ``"longest"``; see :class:`fabric.data.FabricDataLoader`.
        """
        session = self._running_session("setup_dataloaders")
        prepared = [
            session.setup_loader(
                each, shard=use_distributed_sampler, overlap_copies=overlap_copies, uneven=uneven,
                device=session.runtime.device if move_to_device else None,
                seed_workers=self._seed is None or self._seed["workers"],
            )
            for each in (loader, *more)
        ]  # fmt: skip
        return prepared if more else prepared[0]

    def init_module(
        self, empty_init: bool = False, source: _Source = "every_rank"
    ) -> AbstractContextManager[Any]:
        """A context in which modules are created on this process's device and in the dtype of the precision.

        Under a strategy that shards, they are built on the CPU with the values of a plain build, but in scratch space
        on disk in place of memory, and get to the device shard by shard in ``setup``. That takes room for the whole
        model, once for each process of the node, in the folder for temporary files, which ``TMPDIR`` names.

        Args:
            empty_init: fill parameters with nan, for a model that a checkpoint fills; takes no scratch space.
            source: ``"every_rank"``, or ``"rank0"`` where a strategy shards: only rank 0 has values and scratch space,
                and code on other ranks cannot read large parameters. Collective on exiting the context.

        Raises:
            ConfigurationError, UsageError: another source; the scratch space is full, on entering or within.
        """
        return self._running_session("init_module").strategy.module_init_context(empty_init, source)

    sharded_model = init_module  # its older name

    def init_tensor(self) -> AbstractContextManager[Any]:
        """A context in which tensors are created on this process's device and in the dtype of the precision."""
        return created_on(
            self._running_session("init_tensor").runtime.device, self.precision.param_dtype
        )

    def to_device(self, obj: T) -> T:
        """Move a module in place, or the tensors of any collection, to this process's device; the same type back."""
        strategy = self._running_session("to_device").strategy
        move: Any = (
            strategy.module_to_device if isinstance(obj, nn.Module) else strategy.batch_to_device
        )
        return move(obj)

    def is_wrapped(self, obj: Any) -> bool:
        """Whether ``obj`` is a module or loader that ``setup`` returned, or an optimizer that is set up here."""
        if isinstance(obj, Optimizer):
            return self._session is not None and obj in self._session.optimizers
        return self.unwrap(obj) is not obj

    @overload
    def unwrap(self, obj: FabricDataLoader) -> DataLoader[Any]: ...
    @overload
    def unwrap(self, obj: T) -> T: ...
    def unwrap(self, obj: Any) -> Any:
        """The user's module of a set-up module, the torch loader of a set-up loader; anything else as it is."""
        inner = uncompiled(obj) if isinstance(obj, nn.Module) else obj
        if isinstance(inner, FabricModule):
            return inner.module
        return obj.loader if isinstance(obj, FabricDataLoader) else obj

    def backward(
        self,
        tensor: Tensor,
        *args: Any,
        weight: float | Tensor | None = None,
        optimizer: _Optims = None,
        **kwargs: Any,
    ) -> None:
        """Compute gradients, in place of ``tensor.backward(*args, **kwargs)``; scales the loss where needed.

        Collective where gradients are synchronized; a weight adds one message to a step. Raises a
        :class:`fabric.errors.UsageError` where gradients would not be synchronized (see
        :class:`fabric.module.FabricModule`), where losses with and without a weight, or for different optimizers, are
        added up in one gradient, or where all weights of a step are zero.

        Args:
            weight: the number of terms that the loss sums up on this process, zero or more. ``clip_gradients`` or
                ``step`` turns the gradients into those of the sum of all losses over the sum of all weights, of all
                processes, since the last step or ``zero_grad``. A tensor on a CUDA device is not waited for.
            optimizer: the one that the loss is for, or several; None for all that are set up.
        """
        session = self._session
        active = () if session is None else session.active_iterators
        for spec, state in active:
            if spec.uneven == "longest":
                tensor, weight = without_repeats(state, tensor, weight)
        if (
            weight is not None
            or optimizer is not None
            or (session is not None and session.weights is not None)
        ):
            session = self._running_session("backward")
            tensor = loss_weights(session).scale_loss(tensor, weight, optimizer)
        elif session is None:
            tensor.backward(*args, **kwargs)
            return
        elif session.scaler is not None:
            tensor = session.scaler.scale_loss(tensor)
        try:
            for call in session.backward.before:
                call()
            tensor.backward(*args, **kwargs)
        except BaseException as error:
            session.strategy._explain(error)
            for call in session.backward.after:
                call(tensor, error)
            raise
        for call in (*session.backward.after,):  # one may remove itself
            call(tensor, None)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that forward passes run in, for code outside of one; does nothing for ``*-true`` precisions."""
        return self.precision.forward_context(self._running_session("autocast").runtime.device.type)

    def clip_gradients(
        self,
        module: Module | Sequence[Module],
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | Literal["inf"] = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of an optimizer's parameters in place; return the total norm before, of shape ``()``.

        Collective where gradients are sharded or weighted. Under a loss scale they are unscaled first; where they have
        overflowed, so that the step will be skipped, the norm is no error.

        Args:
            module: the set-up module that the parameters belong to, several, or a module around them.
            optimizer: the optimizer, set up too.
            clip_val: each value into ``[-clip_val, clip_val]``.
            max_norm: total norm at most this; exactly one of the two limits is given, and it is positive.
            norm_type: p of the p-norm, or ``"inf"``.
            error_if_nonfinite: raise a ``NonFiniteGradientError`` before any change if the norm is not finite; waits.
        """
        models = find_fabric_modules("clip_gradients", module)
        session = self._running_session("clip_gradients")
        return session.clip_gradients(
            models, optimizer, error_if_nonfinite, clip_val, max_norm, float(norm_type)
        )

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last ``step`` of a set-up optimizer changed nothing, since gradients overflowed in ``16-mixed``.

        For what counts steps: ``if not fabric.step_was_skipped(optimizer): scheduler.step()``. The same on all
        processes, False without loss scaling. Not a collective.
        """
        return self._running_session("step_was_skipped").step_was_skipped(optimizer)

    def no_backward_sync(
        self, module: Module | Sequence[Module], enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """A context without synchronization of gradients, for all micro-batches of an accumulation but the last.

        It has to hold the forward and the backward pass of one set-up module or several; if not ``enabled``, it does
        nothing.
        """
        models = find_fabric_modules("no_backward_sync", module)
        if self._session is not None and self._session.scaler is not None:
            self._session.scaler.accumulates |= enabled
        prepared = [
            model._fabric_prepared
            for model in models
            if not isinstance(model.module, PARAMETER_LISTS)
        ]
        return without_sync(self.strategy, prepared, enabled)

    def accumulate(self, loader: FabricDataLoader, steps: int) -> Windows:
        """A loop of pairs ``(batch, last)``, in windows of ``steps``; see :class:`fabric.data.Windows`."""
        return Windows(loader, steps)

    def sequence_parallel(self, batch: Any, dim: int = 1) -> AbstractContextManager[Any]:
        """This rank's part of a batch of sequences; see :func:`fabric.sequence_parallel.sequence_parallel`."""
        return sequence_parallel(
            self._running_session("sequence_parallel").runtime, self.device_mesh, batch, dim
        )

    def ema(
        self,
        module: Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        buffers: bool = False,
    ) -> ExponentialMovingAverage:
        """Return averages of a set-up module's weights. Not a collective.

        See :class:`fabric.optim.ema.ExponentialMovingAverage`.
        """
        [model] = find_fabric_modules("ema", module)
        return ExponentialMovingAverage(model, decay, buffers)

    def join(
        self, module: Module | Sequence[Module], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """A context for a training loop in which processes may have different numbers of batches, under DDP.

        Collective: every process enters it, and exits it once all have finished. A process without further batches
        answers the others' collectives with gradients of zero. Afterwards every process has the modules, their
        optimizers and the loss scale of one that stepped last; schedulers stay. Within, collectives of the whole job
        and forward passes without gradients raise a ``UsageError``; so do strategies that cannot do it, such as FSDP.

        Args:
            module: the set-up module that is trained, or several, whose passes follow each other in that order.
            divide_by_initial_world_size: whether gradients are divided by the number of all processes, so that each
                batch counts the same, or by the number of those that still have batches.
        """
        models = find_fabric_modules("join", module)
        return self._running_session("join").join(models, divide_by_initial_world_size)

    def all_reduce(
        self, data: T, group: Group = None, reduce_op: ReduceName | ReduceOp = "mean"
    ) -> T:
        """Reduce every tensor and number over the processes. Collective, see [Note: Collectives].

        Sum and mean are differentiable. Tensors come back as new tensors on their device; Python integers never wrap.

        Args:
            data, group: see [Note: Collectives].
            reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"``, ``"band"``, ``"bor"``,
                ``"bxor"`` or a torch ``ReduceOp``. Integers have no mean; booleans have min (all), max (any), bitwise.
        """
        return collectives.all_reduce(
            self._communicator("all_reduce", group, op := Reduce(reduce_op)), data, op
        )

    def reduce_scatter(
        self, data: T, group: Group = None, reduce_op: ReduceName | ReduceOp = "mean"
    ) -> T:
        """Reduce every tensor over the processes, each of which keeps its own row. Collective, see [Note: Collectives].

        The tensors of ``data`` have the shape ``(size, *s)`` for a group of ``size`` processes, those of the collection
        that is returned ``s``: row ``rank`` of what :meth:`all_reduce` returns. Sum and mean are differentiable.
        """
        return collectives.reduce_scatter(
            self._communicator("reduce_scatter", group), data, Reduce(reduce_op)
        )

    @overload
    def all_gather(
        self, data: Tensor, group: Group = ..., sync_grads: bool = ..., *, concat: bool = ...
    ) -> Tensor: ...
    @overload
    def all_gather(
        self,
        data: Any,
        group: Group = ...,
        sync_grads: bool = ...,
        ragged: bool = ...,
        concat: bool = ...,
    ) -> Any: ...
    def all_gather(
        self,
        data: Any,
        group: Group = None,
        sync_grads: bool = False,
        ragged: bool = False,
        concat: bool = False,
    ) -> Any:
        """Collect every tensor and number from all processes, by rank. Collective, see [Note: Collectives].

        Args:
            sync_grads: whether gradients flow back to the process that passed a part.
            ragged: whether the length of tensors along dim 0 may differ between processes.
            concat: likewise, and what is collected becomes one tensor; a 0-dim tensor counts as one of length 1.

        Returns:
            The same collection: tensors of shape ``s`` as ``(size, *s)``, on one process too; numbers as lists. With
            ``ragged`` as the list of ``size`` tensors, with ``concat`` as one of shape ``(n_0 + n_1 + ..., *s)``.
        """
        communicator = self._communicator("all_gather", group)
        if ragged or concat:
            return collectives.all_gather_ragged(
                communicator, data, sync_grads=sync_grads, concat=concat
            )
        return collectives.all_gather(communicator, data, sync_grads=sync_grads)

    def gather_for_metrics(self, data: T) -> T:
        """Collect what was computed from a batch from all processes, each sample once, in the order of the data.

        Collective, in the body of a loop over a set-up loader. Dim 0 of each tensor in ``data``, a collection, counts
        the samples of this batch; each is one under ``batch_size=None``. An evaluation over n samples counts n: those
        that were repeated so that all processes get equally many (``uneven="pad"``) are removed again.

        Returns:
            The same collection: tensors of shape ``(n, *s)`` as new, detached tensors of shape ``(m, *s)``, in the
            order in which the loader's sampler, or batch sampler, yielded the m samples of this batch of all processes.
        """
        session = self._running_session("gather_for_metrics")
        return gather_batch(
            session.strategy._data_parallel_communicator(), session.active_iterators, data
        )

    def compute_metrics(self, metrics: Any) -> Any:
        """``metrics.compute()`` over the samples of all processes, in one exchange; the same on each. Collective.

        It is a metric or collection of torchmetrics, moved by :meth:`to_device`; a process may have no samples.
        """
        return compute_metrics(
            self._running_session("compute_metrics").strategy._loss_communicator(), metrics
        )

    def all_to_all(self, data: T, group: Group = None) -> T:
        """Send row i of every tensor to process i. Collective and differentiable, see [Note: Collectives].

        The tensors that are passed and returned have the shape ``(size, *s)``: row j of a result is from process j.
        """
        return collectives.all_to_all(self._communicator("all_to_all", group), data)

    def broadcast(self, obj: T, src: int = 0, group: Group = None) -> T:
        """Send any object from one process to all; tensors in it are sent as tensors. Collective and differentiable.

        Only the object of rank ``src`` of the group counts; the others may pass None. Other leaves are pickled.
        """
        strategy = self._running_session("broadcast").strategy
        # Those of others need not know groups.
        return (
            strategy.broadcast(obj, src) if group is None else strategy.broadcast(obj, src, group)
        )

    def scatter(self, parts: Sequence[T] | None = None, src: int = 0, group: Group = None) -> T:
        """Send one object or collection to each process, and return this process's part. Collective.

        ``parts``, on rank ``src`` of the group alone, has one for each rank; shapes and kinds may differ. Tensors are
        detached; those that were on an accelerator are on this process's device.
        """
        return collectives.scatter(self._communicator("scatter", group), parts, src, self.device)

    def gather(self, obj: T, dst: int = 0, group: Group = None) -> list[T] | None:
        """Collect one object or collection from each process on one of them. Collective.

        Returns the list by rank, detached, on rank ``dst`` of the group, else None. Shapes and kinds may differ.
        """
        return collectives.gather(self._communicator("gather", group), obj, dst, self.device)

    def send(self, obj: Any, dst: int, group: Group = None) -> None:
        """Send any object to rank ``dst`` of the group, which has to call :meth:`recv`; in order, not a collective."""
        collectives.send(self._communicator("send", group), obj, dst)

    def recv(self, src: int, group: Group = None) -> Any:
        """Receive what rank ``src`` of the group sends; tensors are detached, and on this process's kind of device."""
        return collectives.recv(self._communicator("recv", group), src, self.device)

    def barrier(self, name: str | None = None, group: Group = None) -> None:
        """Wait until every process calls it; ``name`` appears in the error when one does not. Collective."""
        self._communicator("barrier", group).barrier(name)

    def new_group(self, ranks: Sequence[int]) -> Communicator | NonMember:
        """A group of some processes, for the argument ``group`` of the collectives.

        Collective: every process of the job must call it, also those outside. ``ranks`` are the global ranks of the
        members, in any order; in the group they are numbered in ascending order. The group is true; a process outside
        gets a :class:`fabric.communicators.NonMember`, which is false, and with which every collective raises.
        """
        return self._communicator("new_group").new_group(ranks)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes decided so, or with ``all=False`` any of them. Collective."""
        return self._running_session("reduce_boolean_decision").strategy.reduce_boolean_decision(
            decision, all
        )

    @property
    def should_stop(self) -> bool:
        """Whether it is time to save and stop. Every process has to read it equally often; all get the same answer.

        It becomes true after SIGTERM, SIGHUP or SIGUSR2 to any process, under SLURM also SIGUSR1, at ``time_limit`` and
        before the end of a SLURM job. Only the read at which the processes agree to stop communicates. From the first
        read until ``teardown`` these signals no longer end this process.
        """
        return self._running_session("should_stop").stopping.is_due()

    def exit_preempted(self, requeue: bool = False) -> NoReturn:
        """End this process with code 75, which says: saved, start me again. Waits for saves. Collective.

        With ``requeue`` rank 0 requeues the SLURM job, or this task of a job array; without SLURM it has no effect.
        """
        self.barrier("exit_preempted")
        exit_preempted(self.teardown, requeue and self._is_first())

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """A context that the first process runs while the others wait, and then the others; for downloads.

        Collective. With ``local`` the first process of each node does, for files that nodes do not share. When it
        raises, the others raise a :class:`fabric.errors.UsageError` with its error.
        """
        runtime = self._running_session("rank_zero_first").runtime
        return rank_zero_first(runtime.node_communicator() if local else runtime.communicator)

    @overload
    def save(
        self,
        path: _Path,
        state: _State,
        filter: _Keep = ...,
        trainable_only: bool = ...,
        *,
        async_: Literal[True],
    ) -> PendingSave: ...
    @overload
    def save(
        self,
        path: _Path,
        state: _State,
        filter: _Keep = ...,
        trainable_only: bool = ...,
        *,
        async_: bool = ...,
    ) -> PendingSave | None: ...
    def save(
        self,
        path: _Path,
        state: _State,
        filter: _Keep = None,
        trainable_only: bool = False,
        *,
        async_: bool = False,
    ) -> PendingSave | None:
        """Write a checkpoint: afterwards there is the new one or, after any failure, the old one, never a torn one.

        Collective. Modules, optimizers, schedulers, loaders and other objects with ``state_dict`` are stored as their
        state, plain values as they are; the loss scale and the random states of all processes are added. One file of
        nothing but tensors, such as ``model.state_dict()``, is written as it is, for :meth:`load_raw` and torch.

        It is one file that the first process writes or, under FSDP unless ``state_dict_type="full"``, a folder into
        which every process writes its shards. The ``checkpoint_io`` of the strategy wins over both.

        Args:
            path: the file or folder, new or one of the same kind, which is replaced; also as ``s3://...`` and the like.
            state: names and objects.
            filter: for a name in ``state``, a function ``(name, value) -> bool`` that says which entries are kept; in a
                folder of shards, sharded values are DTensors.
            trainable_only: leave out parameters without ``requires_grad``, no buffers; load it with ``strict=False``.
            async_: return as soon as everything has been copied to host memory, kept for the next save. The next
                ``save``, ``load`` or ``teardown`` waits for the writing; so does the ``PendingSave`` that is returned.

        Raises:
            ArgumentTypeError: an object that could not be loaded again; nothing has been written.
            CheckpointError: this save, or one before with ``async_``, failed on a process; or another kind is there.
        """
        with self._running_session("save").checkpoints("save") as checkpoints:
            return checkpoints.save(path, state, filter, trainable_only, async_)

    def checkpoints(
        self, folder: _Path, keep: int = 3, best: tuple[str, Literal["min", "max"]] | None = None
    ) -> "checkpoint.Checkpoints":
        """The checkpoints of a run in a folder: the newest, and the best by a metric. Collective.

        See :class:`fabric.checkpoint.Checkpoints`, which saves, restores, and removes the older ones.
        """
        return checkpoint.Checkpoints(self._running_session, folder, keep, best)

    def load(
        self,
        path: _Path,
        state: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        rng: bool = True,
        *,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Restore a checkpoint: objects in place, plain values by replacing them in ``state``.

        Collective. Everything is checked before anything changes, and no code in it is run. Whichever strategy and
        number of processes wrote it, it loads under any other; from a folder each process reads only what it will hold.

        Args:
            path: the file or folder.
            state: names and objects to restore; None returns everything as it was stored.
            strict: whether what one side lacks is an error; if not, what fits by name is loaded.
            rng: whether each process continues its random streams; of more processes than there were, the first ones.
            weights_only: False rebuilds any object that a file holds, which runs whatever code the file names: only for
                a file whose writer you trust. None means True, as it does for torch. A folder never needs it.

        Returns:
            The entries that ``state`` did not name; of a folder those without tensors: name others, with None.

        Raises:
            CheckpointNotFoundError: there is no such file or folder.
            CheckpointError: it is damaged or does not fit, with all reasons.
            UnsafeCheckpointError: it holds code, which is named and was not run.
        """
        with self._running_session("load").checkpoints("load") as checkpoints:
            return checkpoints.load(path, state, strict, rng, weights_only is not False)

    def load_raw(
        self, path: _Path, obj: Any, strict: bool = True, *, weights_only: bool | None = True
    ) -> None:
        """Restore one module or optimizer from a file that is its bare ``state_dict``. Collective.

        Args:
            path: the file, as ``torch.save(model.state_dict(), path)`` wrote it.
            obj: a module, an optimizer, or any object with ``state_dict`` and ``load_state_dict``.
            strict, weights_only: as for :meth:`load`, and so are the errors.
        """
        with self._running_session("load_raw").checkpoints("load_raw") as checkpoints:
            checkpoints.load_raw(path, obj, strict, weights_only is not False)

    def get_state_dict(self, module: Module) -> dict[str, Any]:
        """The full state dict of a module, as copies on the CPU of the first process; empty on others. Collective.

        For other formats: ``fabric.unwrap(model).save_pretrained(path, state_dict=fabric.get_state_dict(model))``.
        """
        with self._running_session("get_state_dict").checkpoints("save") as checkpoints:
            return checkpoints.state_dict(module)

    def seed_everything(
        self, seed: int | None = None, workers: bool = True, per_rank: bool = False
    ) -> int:
        """Seed python, numpy and torch, and return the seed. Collective without a seed.

        Called before the processes exist, it seeds each of them at its start. ``fabric.seed_everything`` of the module
        seeds this process alone.

        Args:
            seed: ``0 <= seed < 2**32``; None draws one, the same for all processes.
            workers: whether loader workers of different processes get different streams, in loaders that are set up
                from now on. Without it worker k has the same stream on every process.
            per_rank: give each process streams of its own.
        """
        if not isinstance(self, Fabric):
            problem = "it was called on the class: write fabric = Fabric(...), then fabric.seed_everything(1)"
            raise UsageError("Fabric.seed_everything(...)", problem)
        world = self._plan.world or World()
        if seed is None and world.world_size > 1:
            self._running_session("seed_everything")
            seed = self.broadcast(seed_everything(None) if self.is_global_zero else None)
        chosen = seed_everything(seed, rank=world.rank, per_rank=per_rank)
        self._seed = {"seed": chosen, "workers": workers, "per_rank": per_rank}
        return chosen

    @property
    def logger(self) -> Any:
        """The first logger, or None; the user's own, which called directly writes on each process: see :meth:`log`."""
        return next(iter(self._loggers.given), None)

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return list(self._loggers.given)

    def describe(self) -> str:
        """A short text of what was resolved and what was set up, so that nothing is hidden. Not a collective."""
        return "\n".join(
            [*self._plan.describe(), *(self._session.describe() if self._session else [])]
        )

    __repr__ = describe

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def profile(
        self, path: str | os.PathLike[str], steps: range | None = None
    ) -> AbstractContextManager[None]:
        """A context that writes a trace of all processes; see :func:`fabric.timeline.profile`. Collective."""
        from fabric.tools.timeline import profile  # few programs need it

        return profile(self._running_session("profile"), path, steps)

    def timings(self) -> "Timings":
        """Return where the time of the latest steps went, and which rank the others wait for.

        Collective. See :class:`fabric.tools.timeline.Timings`.
        """
        from fabric.tools.timeline import timings  # few programs need it

        return timings(self._running_session("timings"))

    def print(self, *args: Any, all_ranks: bool = False, **kwargs: Any) -> None:
        """``print`` on the first process only; or with ``all_ranks`` the text of each, by rank, with its prefix.

        Collective with ``all_ranks``.
        """
        if all_ranks:
            print_texts_of_ranks(self._communicator("print"), args, kwargs)
        elif self._is_first():
            print(*args, **kwargs)

    def progress(
        self, batches: Iterable[T], desc: str = "", metrics: Metrics | None = None
    ) -> Iterable[T]:
        """Yield what ``batches``, a loader or any iterable, yields; the first process writes how far the loop is.

        The line goes to standard error: written over in a terminal and a notebook, a new one every 30 s elsewhere. It
        has samples a second, of all processes, counted by dim 0 of a batch's first tensor; the time left; the peak
        memory; and ``metrics``, names and numbers or a function that returns them. They are read when a line is
        written, which waits for a tensor on a device. A set-up loader whose position was loaded counts on from there.
        """
        sampler_kwargs = self._running_session("progress").strategy.distributed_sampler_kwargs
        num_replicas = 1
        if sampler_kwargs is not None:
            num_replicas = sampler_kwargs["num_replicas"]
        return Progress(batches, desc, metrics, num_replicas, self._is_first())

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``hook_name`` of every callback that has it, in their order, on this process."""
        for callback in self._callbacks:
            hook = getattr(callback, hook_name, None)
            if hook is not None:
                hook(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Hand one metric to every logger, on the first process only; see :meth:`log_dict`."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Hand metrics to every logger, on the first process only.

        They are numbers and tensors of one element, which are read: that waits for the device. ``step`` may be None.
        """
        if self._is_first():
            self._loggers.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any) -> None:
        """Hand what the run was started with, a mapping or a namespace, to every logger that takes it, on rank 0."""
        if self._is_first():
            self._loggers.log_hyperparams(params)

    def add_logger(self, logger: Any) -> None:
        """Log to one more from now on: in every process of a launched job, or before it. See :mod:`fabric.loggers`."""
        self._loggers.add(logger)

    def __getstate__(self) -> dict[str, Any]:
        # What is sent to a rank: the plan and what a subclass keeps, without what belongs to the launching process.
        plan = replace(self._plan, launcher=InlineLauncher())
        return {**vars(self), "_plan": plan, "_session": None, "_closed": False}

    def _enter_rank(self, world: World | None) -> None:
        """Join the job, in a process that was just started for it."""
        self._plan = replace(self._plan, world=world)
        self._running_session("launch")
        if self._seed:
            self.seed_everything(**self._seed)

    def _running_session(self, call: str) -> Session:
        """The session, begun now if this process is the whole job or was made by a launcher."""
        if self._session is None:
            world = self._plan.world
            if self._closed or world is None:
                raise self._not_running_error(call)
            self._session = Session(self._plan, world, check_training=self._check_training)
            if self._timings:
                from fabric.tools.timeline import Timeline  # few programs need it

                self._session.attach(Timeline(self._session))
            atexit.register(self._at_exit)
        return self._session

    def _not_running_error(self, call: str) -> UsageError:
        if self._closed:
            return UsageError(
                f"fabric.{call}",
                "teardown() has closed this Fabric",
                suggestion="a new Fabric(...)",
            )
        problem = f"this Fabric is for {self.world_size} processes, and they are not connected before launch()"
        expected = "everything that needs a device or other ranks, after fabric.launch()"
        suggestion = (
            "fabric.launch() right after Fabric(...); or fabric.launch(main) with main(fabric)"
        )
        return UsageError(f"fabric.{call}", problem, expected, suggestion)

    def _communicator(
        self, call: str, group: Group = None, op: Reduce | None = None
    ) -> Communicator:
        return self._running_session(call).strategy.communicator(group, op)

    def _world(self, call: str) -> World:
        if self._plan.world is None:
            raise self._not_running_error(call)
        return self._plan.world

    def _is_first(self) -> bool:
        return (self._plan.world or World()).rank == 0

    def _at_exit(self) -> None:
        # After an uncaught exception the other ranks may be waiting for a call that this one will never make.
        if getattr(sys, "last_value", None) is not None and self._session is not None:
            self._session.runtime.abort()
        try:
            self.teardown()
        except BaseException:
            exit_with_late_error()
            raise


def _without_none(*results: Any) -> Any:
    """What was set up: one object by itself, several as a tuple."""
    given = tuple(result for result in results if result is not None)
    return given[0] if len(given) == 1 else given


def _run_in_rank(
    fabric: Fabric, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a function launcher runs in every process that it makes."""
    fabric._enter_rank(World.from_env(os.environ))
    with fabric:
        return function(fabric, *args, **kwargs)


def _launched(run: Callable[..., Any]) -> Callable[..., Any]:
    """A ``run`` that launches the job when it is called outside of it, and is itself inside."""

    @functools.wraps(run)
    def launched(self: Fabric, *args: Any, **kwargs: Any) -> Any:
        if self._session is not None:
            return run(self, *args, **kwargs)
        return self.launch(launched, *args, **kwargs)

    return launched
