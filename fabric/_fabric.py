"""The facade: one object that holds an accelerator, a precision and a strategy.

A *collective* is a method that every process of the job, or of ``group``, must call, in the same
order. A group is the result of :meth:`Fabric.new_group`, a process group of torch, or None for the
whole job. The ``data`` of a collective is any collection of tensors and Python numbers. The data
must have the same structure, dtypes and shapes on every process. A collective does not change its
data, and returns the same types of collections. A leaf that cannot be sent or reduced raises a
:class:`fabric.errors.ConfigurationError` that names the leaf. Calls that differ between processes
raise a :class:`fabric.errors.CollectiveMismatchError` on every process.
"""

import atexit
import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Never,
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
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fabric import checkpoint, collectives
from fabric._plan import parse_size, refuse_unknown_arguments, resolve_plan
from fabric._session import Session, find_fabric_modules, rank_zero_first
from fabric._torch import uncompiled
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.checkpoint import PendingSave
from fabric.communicators import Communicator, NonMember, Reduce
from fabric.communicators.base import ReduceName, ReduceOp
from fabric.data import (
    BatchSource,
    FabricDataLoader,
    LoaderOptions,
    Uneven,
    Windows,
    gather_batch,
    without_repeats,
)
from fabric.data.metrics import compute_metrics
from fabric.environments import Environment
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    UsageError,
    hide_first_frames,
    hide_frames,
)
from fabric.launchers import InlineLauncher, Launcher, StartMethod
from fabric.launchers.base import is_interactive, refuse_while_importing_main
from fabric.launchers.preemption import exit_preempted
from fabric.launchers.rank import exit_with_late_error
from fabric.launchers.serialize import dump_result, load
from fabric.launchers.terminal import (
    DEBUG_TIMEOUT,
    DebuggedRank,
    check_debug_rank,
    take_terminal,
)
from fabric.launchers.trained_weights import TrainedResult, load_weights, modules_among
from fabric.loggers import Loggers
from fabric.loggers.progress import Metrics, Progress, print_texts_of_ranks
from fabric.migration import METHODS
from fabric.module import Compiled, FabricModule, Module
from fabric.optim.ema import ExponentialMovingAverage
from fabric.optim.parameter_lists import PARAMETER_LISTS
from fabric.precision import Precision, PrecisionName
from fabric.seed import seed_everything, seed_rank
from fabric.strategies import StrategyName
from fabric.strategies.init_module import created_on
from fabric.strategies.parallel import as_list
from fabric.strategies.sequence_parallel import sequence_parallel
from fabric.strategies.standalone import Group, Strategy, without_sync
from fabric.tree import Tree
from fabric.world import World

if TYPE_CHECKING:
    from fabric.checkpoint.save_load import CheckpointCoordinator
    from fabric.optim.step_guard import StepGuard
    from fabric.tools.timeline import Timings

__all__ = ["Fabric"]

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", int, float)
Os = TypeVarTuple("Os")
S = TypeVar("S")
T = TypeVar("T")
Tensors = TypeVar("Tensors", bound=Mapping[Any, Tensor] | Sequence[Tensor])

_Path = str | os.PathLike[str]
_State = Mapping[str, Any]
_Source = Literal["every_rank", "rank0"]
_PerRank = bool | Literal["after_setup"]
_Optimizers = Optimizer | Sequence[Optimizer] | None
_EntryFilters = Mapping[str, Callable[[str, Any], bool]] | None
_Rename = Mapping[str, str | None] | Callable[[str], str | None] | None
# What launch() returns: the result of rank 0, those of all ranks, or nothing.
_Results = Literal["first", "all", "none"]


class _UserCall(NamedTuple):
    """The function that ``launch`` calls in each rank, and its arguments after the fabric."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class _Seeding(NamedTuple):
    """The arguments of the latest call of :meth:`Fabric.seed_everything`.

    A process that is started later makes the same call.
    """

    seed: int
    workers: bool
    per_rank: _PerRank


class Fabric:
    """The accelerator, precision and strategy of a hand-written PyTorch loop.

    The defaults suit the machine. Methods marked *collective* must be called by every process of
    the job, or of the group passed as ``group``, in the same order.

    Args:
        accelerator: the hardware: ``"cpu"``, ``"cuda"`` (or ``"gpu"``), ``"mps"``, the name of an
            entry point in the group ``fabric.accelerators``, the name by which torch knows other
            hardware, such as ``"xpu"``, or ``"npu"`` after ``import torch_npu``, or an
            :class:`fabric.accelerators.Accelerator`. ``"auto"`` takes the accelerator of this
            machine, or the CPU.
        strategy: the parallel strategy: ``"ddp"`` and its variants (see
            :class:`fabric.strategies.DDPStrategy`), ``"fsdp"``, ``"dp"``, ``"single_device"``,
            ``"model_parallel"``, the name of an entry point in the group ``fabric.strategies``, or
            a :class:`fabric.strategies.Strategy`. ``"auto"`` is a single device for one process
            and DDP for several.
        devices: the number of devices of this node, or their indices; see
            :mod:`fabric.accelerators`. On the CPU, the number of processes, or of replicas under
            ``"dp"``. ``"auto"`` is 1 on the CPU and all devices on other hardware.
        num_nodes: the number of nodes. ``"auto"`` asks the launcher of the job, and is 1 without a
            launcher.
        precision: the dtypes: ``"32-true"``, ``"64-true"``, ``"16-true"``, ``"bf16-true"``,
            ``"16-mixed"``, ``"bf16-mixed"``, one of the aliases ``64``, ``32``, ``16`` and
            ``"bf16"``, the name of an entry point in the group ``fabric.precisions``, or a
            :class:`fabric.precision.Precision`. None is ``"32-true"``.
        environment: the source of this process's rank. None detects torchrun, SLURM, MPI and Ray.
            ``"none"`` detects nothing and ignores the options of ``fabric run``: use it for a job
            of this process alone.
        launcher: the way to start processes: ``"popen"``, ``"spawn"``, ``"fork"``,
            ``"forkserver"``, or a :class:`fabric.launchers.Launcher`. None leaves the choice to the
            strategy.
        check_collectives: whether the ranks compare every collective before they make it. A
            collective that differs or is missing then raises a
            :class:`fabric.errors.CollectiveMismatchError` with the line where each rank called. The
            environment variable ``FABRIC_CHECK=1`` turns the check on, too. The check costs nothing
            while it is off.
        timeout: how long a collective may wait for other ranks, in seconds or as a timedelta.
            Afterwards the collective raises an error that names the missing ranks. None is the
            timeout of the strategy, 30 minutes by default.
        watchdog: how long a collective may wait before the first rank prints a hang report, in
            seconds or as a timedelta. The report says where each rank is, with the stacks of the
            missing ranks. 0 disables the report.
        time_limit: how long the job may run before :attr:`should_stop` becomes true, in seconds, as
            a timedelta or as ``"HH:MM:SS"``. None is no limit.
        stop_margin: how long before the end of a SLURM job :attr:`should_stop` becomes true, in
            seconds, as a timedelta or as ``"HH:MM:SS"``. None is one minute, or half of the
            remaining time if that is less.
        callbacks: an object or a list of objects whose methods :meth:`call` calls.
        loggers: a logger or a list of loggers that :meth:`log` writes to; see
            :mod:`fabric.loggers`.
        check_training: whether to check the first steps of each optimizer for parameters that do
            not train, for models that train in evaluation mode, and for replicas that drift apart.
            The check issues no collective and costs nothing after these steps.
        check_replicas: whether to compare what ranks should hold alike: parameters, optimizers,
            averages, the loss scale. True compares in every :meth:`save`. An integer n also
            compares after every n backward passes that synchronize gradients, which is one pass for
            each optimizer step. False never compares. A difference raises a
            :class:`fabric.errors.ReplicaDriftError` on all ranks.
        timings: whether to measure the steps for :meth:`timings`.

    Raises:
        ConfigurationError: a value, or a combination of values, cannot work. Nothing was started.
        ArgumentTypeError: a value has a type that its argument does not take.
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
        watchdog: timedelta | float = 60.0,
        time_limit: timedelta | float | str | None = None,
        stop_margin: timedelta | float | str | None = None,
        callbacks: Any = None,
        loggers: Any = None,
        check_training: bool = True,
        check_replicas: bool | int = True,
        timings: bool = False,
        **unknown: Never,
    ) -> None:
        """Check the arguments. No rank is started, and no device is touched.

        In a notebook or at a prompt, the server from which the ranks will be forked begins to load
        torch.
        """
        with hide_frames:
            refuse_unknown_arguments(unknown, _ARGUMENTS)
            _require_interval(check_replicas)
            # The plan is everything that is decided before a process starts.
            self._plan = resolve_plan(
                accelerator=accelerator,
                strategy=strategy,
                devices=devices,
                num_nodes=num_nodes,
                precision=precision,
                environment=environment,
                launcher=launcher,
                check_collectives=check_collectives,
                timeout=timeout,
                watchdog=watchdog,
                time_limit=time_limit,
                stop_margin=stop_margin,
            )
        # A user at a prompt launches some seconds later. The fork server imports torch in this
        # time. A script launches at once, and gains nothing. Without a world, this process is not
        # a rank, and the launch will start the ranks.
        if self._plan.world is None and is_interactive():
            self._plan.launcher.warm_up()
        self._callbacks = as_list(callbacks)
        self._loggers = Loggers(as_list(loggers))
        self._should_check_training = check_training
        self._check_replicas = check_replicas
        self._should_measure_timings = timings
        self._seeding: _Seeding | None = None  # None until seed_everything() is called
        # True from seed_everything(per_rank="after_setup") until the next setup of a module.
        self._has_to_seed_per_rank = False
        self._session: Session | None = None  # begun by _ensure_session()
        self._is_closed = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the ``run`` method of a subclass, so that calling the method launches the job."""
        super().__init_subclass__(**kwargs)
        # An inherited method was wrapped when the class that defines it was created.
        if "run" in cls.__dict__:
            cls.run = _launch_on_call(cls.__dict__["run"])

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise the error for an attribute that does not exist.

            The error says what to write for a method of another toolkit.
            """
            if name not in METHODS:
                return object.__getattribute__(self, name)  # raises Python's own error
            text = f"Fabric has no {name!r}\n  Write: {METHODS[name]}"
            raise AttributeError(text, name=name, obj=self)

    @property
    def accelerator(self) -> Accelerator:
        """The kind of hardware."""
        return self._plan.accelerator

    @property
    def strategy(self) -> Strategy:
        """The parallel strategy."""
        return self._plan.strategy

    @property
    def precision(self) -> Precision:
        """The dtypes of parameters, computation and gradients."""
        return self._plan.precision

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._ensure_session("device").runtime.device

    @property
    def device_mesh(self) -> Any:
        """The torch ``DeviceMesh`` of the strategy, or None.

        The strategy ``"model_parallel"`` has a mesh from the start, and ``"fsdp"`` after ``setup``.
        """
        meshes = self._ensure_session("device_mesh").runtime.meshes
        # The strategy makes its mesh before any other mesh, and the dict keeps the order.
        return next(iter(meshes.values()), None)

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes of the job."""
        return self._connected_world("global_rank").rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among the processes of its node."""
        return self._connected_world("local_rank").local_rank

    @property
    def node_rank(self) -> int:
        """The number of the node of this process."""
        return self._connected_world("node_rank").node_rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job, which is known before the processes exist."""
        return self._plan.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first one of all nodes."""
        return self.global_rank == 0

    @overload
    def launch(
        self, *, return_result: bool = ..., return_all: bool = ..., debug: int | None = ...
    ) -> Any: ...
    @overload
    def launch(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        return_result: Literal[True] = ...,
        return_all: Literal[False] = ...,
        return_weights: bool = ...,
        debug: int | None = ...,
        **kwargs: Any,
    ) -> T: ...
    @overload
    def launch(
        self,
        function: Callable[..., T],
        /,
        *args: Any,
        return_result: Literal[True] = ...,
        return_all: Literal[True],
        return_weights: bool = ...,
        debug: int | None = ...,
        **kwargs: Any,
    ) -> list[T]: ...
    @overload
    def launch(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        return_result: bool = ...,
        return_all: bool = ...,
        return_weights: bool = ...,
        debug: int | None = ...,
        **kwargs: Any,
    ) -> Any: ...
    def launch(
        self,
        *function_and_args: Any,
        return_result: bool = True,
        return_all: bool = False,
        return_weights: bool = False,
        debug: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the processes of the job and connect them.

        Nothing is started on one device, or in processes that torchrun, ``fabric run``, SLURM or
        MPI has started. The call may be left out in these cases: the first call that needs a device
        or other ranks connects the processes. On one device, what is set up in ``function`` ends
        with ``function``, as in processes that are started.

        With the start method ``popen`` every process runs the script again. The process that starts
        the others does not return from this call: it exits with the exit code of the ranks. With
        ``spawn``, ``fork`` and ``forkserver`` each process runs ``function(fabric, *args,
        **kwargs)``.

        Args:
            *function_and_args: the function that every process runs, and its arguments after the
                fabric. The function may be left out under ``popen``, and if nothing is started.
            return_result: whether to return the result of the function.
            return_all: whether to return the results of all processes, as a list by rank.
            return_weights: whether the modules among the arguments of the function get the trained
                weights of process 0, with the shards of all processes. Otherwise started processes
                train copies of the modules, and the caller's modules do not change. With
                ``return_weights`` the function gets copies on one device, too. In processes that
                another launcher has started, the function gets the modules themselves.
            debug: the rank to debug. With 0, this process is rank 0 and starts only the others:
                ``breakpoint()``, ``input()`` and ``%debug`` after an error work as in any function,
                also in a notebook. The function still gets copies of its arguments (not under
                ``fork``), and its exceptions are raised as they are. Any other rank, and rank 0
                under ``popen``, gets the terminal. The other ranks skip ``breakpoint()``, and wait
                for this rank as long as it takes: ``timeout`` and ``watchdog`` do not count. None,
                the default, debugs no rank.
            **kwargs: the keyword arguments of the function.

        Returns:
            The result of the function in process 0, copied to the CPU. If nothing is started, the
            result in this process. With ``return_all``, a list of the results of all processes by
            rank. None if ``return_result`` is false.

        Raises:
            RankFailedError: a process raised, exited early or was killed. Or the result has sharded
                tensors, of which a process has only a part.
            ArgumentTypeError: the function cannot be called with the Fabric and the arguments. Or
                ``return_weights`` is true, and no argument is a module.
            UsageError: a function is needed and missing, or this is a second ``launch()`` without a
                function, or with ``debug``.
            ConfigurationError: ``debug`` is no rank, or there is no terminal for that rank.
            Exception: with ``debug=0``, whatever the function has raised.
        """
        # A rank imports the user's script to find the function to run. A launch() during the import
        # would start a further job in each rank. This call raises during the import.
        refuse_while_importing_main()
        if self._is_closed:
            raise self._not_running_error("launch()")
        with hide_frames:
            self._check_launch(function_and_args, kwargs)
            debugged = self._debugged_rank(debug, function_and_args)
            modules: list[nn.Module] = []
            if return_weights:
                modules = modules_among(function_and_args[1:], kwargs)
        results: _Results = "first"
        if not return_result:
            results = "none"
        elif return_all:
            results = "all"
        # Without a function, launch() only connects the processes, and calls a function that does
        # nothing.
        call = _UserCall(_return_none, args=(), kwargs={})
        if function_and_args:
            function, *args = function_and_args
            call = _UserCall(function, args, kwargs)

        if self._plan.world is None:  # this process is not a rank of the job
            # With debug=0 the function runs in this process, and a debugger shows its frames.
            runs_here = debugged is not None and debugged.is_here
            hidden_frames = hide_first_frames if runs_here else hide_frames
            with hidden_frames:
                return self._call_in_new_ranks(call, modules, results, debugged)
        if debugged is not None and self._plan.world_size > 1:
            self._begin_debugging(debugged, self._plan.world)
        begins_job = self._session is None
        self._ensure_session("launch")  # connects this rank to the others
        # On one device, a job that begins with the function also ends with it. A session that
        # exists already, or that launch() without a function begins, stays for further calls.
        if function_and_args and begins_job and self._plan.world_size == 1:
            return self._call_as_whole_job(call, modules, results)
        result = call.function(self, *call.args, **call.kwargs)
        return self._select_results(result, results)

    def _call_in_new_ranks(
        self,
        call: _UserCall,
        modules: Sequence[nn.Module],
        results: _Results,
        debugged: DebuggedRank | None,
    ) -> Any:
        """Call the user's function in new processes, and return what ``launch`` returns.

        Args:
            call: the user's function and its arguments.
            modules: the modules that get the trained weights. If there are none, the weights stay
                in the ranks.
            results: which results to return.
            debugged: the rank that is debugged, or None.
        """
        launcher = self._plan.launcher
        runs_rank0_here = debugged is not None and debugged.is_here
        job_spec = replace(self._plan.launch_spec, runs_rank0_here=runs_rank0_here)
        # In each rank, the launcher calls _run_in_rank with the elements of `rank_args`.
        if not modules:
            spec = replace(job_spec, results=results)
            rank_args = (self, debugged, call.function, call.args, call.kwargs)
            return launcher.launch(_run_in_rank, rank_args, {}, spec)
        # _train calls the user's function, and returns its result with the weights. So the launcher
        # has to return the result of rank 0, even if the user wants no results.
        returns_result = results != "none"
        results_with_weights = "first" if results == "none" else results
        spec = replace(job_spec, results=results_with_weights)
        train_args = (call.function, call.args, call.kwargs, returns_result)
        rank_args = (self, debugged, _train, train_args, {})
        outcome = launcher.launch(_run_in_rank, rank_args, {}, spec)
        return _take_weights(modules, outcome)

    def _call_as_whole_job(
        self, call: _UserCall, modules: Sequence[nn.Module], results: _Results
    ) -> Any:
        """Call the user's function in a job of this process alone, which ends with the function.

        So what is set up in the function ends with it, as in processes that ``launch`` starts.

        Args:
            call: the user's function and its arguments.
            modules: the modules that get the trained weights. If there are none, the function gets
                its arguments themselves, and no copies.
            results: which results to return.
        """
        with self._ending_session():
            if modules:
                # The function gets copies, as in a started process: a strategy that shards would
                # leave shards in the user's modules.
                args, kwargs = copy.deepcopy((call.args, call.kwargs))
                returns_result = results != "none"
                trained = _train(self, call.function, args, kwargs, returns_result)
                result = _take_weights(modules, trained)
            else:
                result = call.function(self, *call.args, **call.kwargs)
            return self._select_results(result, results)

    def _select_results(self, result: Any, results: _Results) -> Any:
        """Return what ``launch`` returns in a rank. Collective if ``results`` is ``"all"``.

        Args:
            result: the result of this rank.
            results: which results to return. With ``"first"``, each rank returns its own result.
        """
        if results == "none":
            return None
        if results == "all":
            return _gather_results(self._communicator("launch"), result)
        return result

    def _check_launch(self, function_and_args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check the arguments of ``launch()`` before a process is started.

        Args:
            function_and_args: the positional arguments of the call.
            kwargs: the keyword arguments of the call, which are for the function.

        Raises:
            ArgumentTypeError: the first argument is not a function, or not one that can be called
                with the Fabric and these arguments.
            UsageError: a function is needed and missing, or this is a second ``launch()`` without a
                function.
        """
        plan = self._plan
        is_rank = plan.world is not None  # False in a process that is about to start the ranks
        if function_and_args:
            _require_callable_in_ranks(self, function_and_args, kwargs)
            return
        # Keyword arguments need a function that takes them.
        lacks_function = bool(kwargs) or (not is_rank and plan.launcher.runs_function)
        if lacks_function:
            raise UsageError(
                "fabric.launch()",
                problem=f"start method {plan.launcher.name!r} has no function to run in each "
                "process",
                expected="a function whose first argument is the Fabric: def train(fabric): ...",
                suggestion="fabric.launch(train), or fabric.launch(train, 1, 2) with arguments",
            )
        # A second launch() is valid only with a function, which returned above.
        if is_rank and self._session is not None:
            raise UsageError(
                f"fabric.launch() on rank {self.global_rank}",
                problem="the job has been launched already, by an earlier launch() or by an "
                "earlier call that needs a device or other ranks",
                expected="one launch() right after Fabric(...)",
                suggestion="no second launch(); or fabric.launch(train) to run a function in the "
                "ranks that exist",
            )

    def _debugged_rank(
        self, debug: int | None, function_and_args: Sequence[Any]
    ) -> DebuggedRank | None:
        """Return the rank that is debugged, and check before a process is started that it can be.

        Args:
            debug: the argument of ``launch``.
            function_and_args: the positional arguments of ``launch``.

        Raises:
            UsageError: the ranks are connected already.
            ConfigurationError: there is no such rank, or the rank needs a terminal and there is
                none. Or the argument seems to be meant for the function.
        """
        if debug is None:
            return None
        request = f"fabric.launch(..., debug={debug!r})"
        parameters: Iterable[str] = ()
        if function_and_args:
            with suppress(TypeError, ValueError):  # a function written in C has no signature
                parameters = inspect.signature(function_and_args[0]).parameters
        if isinstance(debug, bool) or "debug" in parameters:
            raise ConfigurationError(
                request,
                problem="this argument is not passed on to the function: it is the number of the "
                "rank to debug",
                suggestion="fabric.launch(functools.partial(train, debug=...)) for an argument of "
                "the function; or another name for it",
            )
        if self._session is not None:
            raise UsageError(
                request,
                problem="the ranks are connected already, and wait for each other no longer than "
                "their timeout",
                suggestion="debug in the first launch(), right after Fabric(...)",
            )
        starts_ranks = self._plan.world is None
        is_here = starts_ranks and debug == 0 and self._plan.launcher.can_run_rank0_here
        check_debug_rank(request, debug, self._plan.world_size, needs_terminal=not is_here)
        return DebuggedRank(debug, is_here)

    def _begin_debugging(self, debugged: DebuggedRank, world: World) -> None:
        """Prepare this rank for a job in which one rank is debugged, before the rank is connected.

        Args:
            debugged: the rank that is debugged.
            world: the place of this process in the job.
        """
        # A watchdog of zero prints no hang reports.
        self._plan = replace(self._plan, timeout=DEBUG_TIMEOUT, watchdog=timedelta(0))
        take_terminal(world.rank, debugged)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop of a subclass in every process of the job, as in Lightning Fabric.

        A subclass defines its loop as a method ``run``. A call of the method launches the job if
        the job is not running yet.

        Raises:
            UsageError: the class defines no ``run``.
        """
        raise UsageError(
            f"{type(self).__name__}.run()",
            problem="this class does not define a loop",
            expected="a method run(self, ...) of a subclass; or fabric.launch(main), with the loop "
            "in main(fabric)",
        )

    def teardown(self) -> None:
        """Close the strategy, the process group and the loggers. A second call does nothing."""
        self._close(self._loggers.close)

    def _close(self, close_loggers: Callable[[str], None]) -> None:
        """Close the session and the loggers. A second call does nothing.

        Args:
            close_loggers: closes the loggers. The argument is the status of the job, ``"success"``
                or ``"failed"``. Called on rank 0 and in the launching process.
        """
        if self._is_closed:
            return
        # Set first, so that a second call closes nothing again, even if this call raises.
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        # When the block ends, the stack calls the callbacks in reverse order: the session closes
        # before the loggers. All of them are called, even if one raises.
        with ExitStack() as stack:
            if self._is_rank0_or_launcher():
                is_handling_exception = sys.exc_info()[0] is not None
                # Python sets sys.last_value when an uncaught exception ends the program. At a
                # prompt or in a notebook, it is the error of an earlier line or cell.
                has_uncaught_exception = getattr(sys, "last_value", None) is not None
                ends_program = has_uncaught_exception and not is_interactive()
                has_failed = is_handling_exception or ends_program
                status = "failed" if has_failed else "success"
                stack.callback(close_loggers, status)
            if self._session is not None:
                stack.callback(self._session.close)
            # From here on, methods that need a session raise. The stack keeps the session alive.
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the strategy about an exception in the block, and call :meth:`teardown`."""
        try:
            if exception is not None and self._session is not None:
                self.strategy.on_exception(exception)
        finally:
            try:
                self.teardown()
            except CheckpointError as error:
                if exception is None:
                    raise
                # A background save has failed, often because of the exception in the block. The
                # user should see the exception, and the failed save only as a note.
                exception.add_note(f"In addition: {error}")

    # The overloads overlap: without optimizers the result is not a tuple, and every module is also
    # a callable. A type checker takes the first overload that fits.
    @overload
    def setup(  # pyright: ignore[reportOverlappingOverload]
        self, module: M, *, scheduler: None = ..., move_to_device: bool = ...
    ) -> M: ...
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
        """Set up a module together with the optimizers of its parameters. Collective.

        Args:
            module: the model. Its parameters are moved and converted in place. An
                ``nn.ParameterList`` or ``nn.ParameterDict``, which has no forward pass, is
                replicated, and its gradients are averaged before each step or clipping.
            *optimizers: optimizers of the module's parameters, and learning-rate schedulers of
                these optimizers. The same objects are returned. The optimizers get hooks around
                their step.
            scheduler: a learning-rate scheduler of one of the optimizers. None if there is none.
            move_to_device: whether parameters and buffers move to this process's device.

        Returns:
            The :class:`fabric.module.FabricModule`. With optimizers or a scheduler, a tuple of the
            module, the optimizers and the scheduler.

        Raises:
            ArgumentTypeError: ``module`` is not a module.
            UsageError: the module or an optimizer has been set up already, or an optimizer has none
                of the module's parameters.
        """
        session = self._ensure_session("setup")
        trained_optimizers = _without_schedulers(optimizers)
        with hide_frames:
            session.check_setup(module, trained_optimizers)  # raises before anything has changed
        model = session.setup_module(module, move_to_device=move_to_device)
        session.setup_optimizers(trained_optimizers)
        # The ranks have initialized equal models. From now on they may draw different numbers.
        self._seed_per_rank(session)
        return _single_or_tuple(model, *optimizers, scheduler)

    @overload
    def setup_module(  # pyright: ignore[reportOverlappingOverload]
        self, module: M, move_to_device: bool = ...
    ) -> M: ...
    @overload
    def setup_module(self, module: Compiled, move_to_device: bool = ...) -> FabricModule: ...
    def setup_module(self, module: Module, move_to_device: bool = True) -> nn.Module:
        """Set up a module without optimizers, and return it. Collective.

        The arguments and errors are described in :meth:`setup`.
        """
        self._ensure_session("setup_module")  # called for its error, which names this method
        return self.setup(module, move_to_device=move_to_device)

    @overload
    def setup_optimizers(self, optimizer: T, /) -> T: ...
    @overload
    def setup_optimizers(self, *optimizers: *Os) -> tuple[*Os]: ...
    @overload
    def setup_optimizers(self, *optimizers: *Os, scheduler: S) -> tuple[*Os, S]: ...
    def setup_optimizers(self, *optimizers: Any, scheduler: Any = None) -> Any:
        """Set up optimizers of modules that are set up already, and return them.

        Args:
            *optimizers: optimizers of parameters of set-up modules, and learning-rate schedulers of
                these optimizers.
            scheduler: a learning-rate scheduler of one of the optimizers. None if there is none.

        Returns:
            A single optimizer itself. Several optimizers, or optimizers and a scheduler, as a
            tuple.

        Raises:
            UsageError: an optimizer has been set up already, or has no parameter of a set-up
                module.
        """
        session = self._ensure_session("setup_optimizers")
        trained_optimizers = _without_schedulers(optimizers)
        with hide_frames:
            # Raises before anything has changed.
            session.check_setup(module=None, optimizers=trained_optimizers)
        session.setup_optimizers(trained_optimizers)
        return _single_or_tuple(*optimizers, scheduler)

    @overload
    def setup_dataloaders(  # pyright: ignore[reportOverlappingOverload]
        self, loader: BatchSource[T], /, **options: Unpack[LoaderOptions]
    ) -> FabricDataLoader[T]: ...
    @overload
    def setup_dataloaders(
        self, loader: BatchSource[T], /, *more: BatchSource[T], **options: Unpack[LoaderOptions]
    ) -> list[FabricDataLoader[T]]: ...
    def setup_dataloaders(
        self,
        loader: BatchSource[T],
        /,
        *more: BatchSource[T],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        overlap_copies: bool = True,
        uneven: Uneven = "pad",
    ) -> FabricDataLoader[T] | list[FabricDataLoader[T]]:
        """Shard the data of loaders over the processes, and move their batches to the device.

        Args:
            loader: the loader, which is not changed: the result is built around a copy.
            *more: further loaders.
            use_distributed_sampler: whether to shard the data over the processes. If not, each
                process sees all of the data.
            move_to_device: whether batches move to this process's device.
            overlap_copies: whether each batch is copied to a CUDA device during the previous step,
                from pinned memory and on a separate stream. Then batches in host memory must not be
                written to, and workers must return CPU tensors.
            uneven: what happens if some processes would have fewer samples than others. ``"pad"``
                repeats samples, and ``"drop"`` leaves samples out. Data that fabric does not shard
                by index needs ``"shortest"`` or ``"longest"``; see
                :class:`fabric.data.FabricDataLoader`.

        Returns:
            The :class:`fabric.data.FabricDataLoader`, or a list of them for several loaders.

        Raises:
            ArgumentTypeError: an argument is not a DataLoader.
            ConfigurationError: a loader is set up already, or ``uneven`` does not fit its data.
        """
        session = self._ensure_session("setup_dataloaders")
        device = session.runtime.device if move_to_device else None
        # The argument `workers` of the latest seed_everything(), which is True by default.
        seed_workers = self._seeding is None or self._seeding.workers
        prepared: list[FabricDataLoader[T]] = []
        for dataloader in (loader, *more):
            fabric_loader = session.setup_loader(
                dataloader,
                shard=use_distributed_sampler,
                overlap_copies=overlap_copies,
                uneven=uneven,
                device=device,
                seed_workers=seed_workers,
            )
            prepared.append(fabric_loader)
        if more:
            return prepared
        return prepared[0]

    def sync_batchnorm(self, module: M) -> M:
        """Let the BatchNorm layers of a module compute their statistics over all processes.

        In training mode, the outputs, gradients and running statistics of these layers then equal
        those of one process with the batches of all processes together. The batches may have
        different lengths, also zero. A forward pass sends two messages for each layer, and so does
        its backward pass. In evaluation mode nothing is sent. The layers keep their parameters,
        buffers and hooks, and get their own classes back in :meth:`teardown`.

        Call it before ``setup``, as in ``model = fabric.setup(fabric.sync_batchnorm(model))``. It
        replaces torch's ``SyncBatchNorm.convert_sync_batchnorm``, whose layers run on GPUs only.
        Nothing changes with one process.

        Args:
            module: the module. Its layers are changed in place.

        Returns:
            The same module.

        Raises:
            UsageError: the module has been set up already.
            ConfigurationError: a layer has a forward pass of its own, or has no parameters yet. Or
                the strategy is ``"dp"``, whose replicas run in one process.
        """
        self._ensure_session("sync_batchnorm").sync_batchnorm(module)
        return module

    def init_module(
        self, empty_init: bool = False, source: _Source = "every_rank"
    ) -> AbstractContextManager[object]:
        """Return a context in which modules get this process's device and the precision's dtype.

        A strategy that shards builds modules on the CPU instead, with the same values, in scratch
        space on disk instead of memory. ``setup`` moves the modules to the device shard by shard.
        The scratch space is in the folder for temporary files, which ``TMPDIR`` names. Each process
        of the node needs room for the whole model.

        Args:
            empty_init: whether to fill parameters with nan instead of their initial values, for a
                model whose values come from a checkpoint. Scratch space is not needed then.
            source: the ranks that have values, ``"every_rank"`` or ``"rank0"``. ``"rank0"`` matters
                only to a strategy that shards. Then only rank 0 has values and needs scratch space,
                code on other ranks cannot read large parameters, and exiting the context is
                collective.

        Raises:
            ConfigurationError: ``source`` has another value.
            UsageError: the scratch space is full, when the context is entered or in the context.
        """
        strategy = self._ensure_session("init_module").strategy
        return strategy.module_init_context(empty_init, source)

    sharded_model = init_module  # the name in Lightning Fabric 2.0

    def init_tensor(self) -> AbstractContextManager[object]:
        """Return a context in which tensors get this process's device and the precision's dtype."""
        device = self._ensure_session("init_tensor").runtime.device
        return created_on(device, self.precision.param_dtype)

    def to_device(self, obj: T) -> T:
        """Move a module in place, or the tensors of a collection, to this process's device.

        Args:
            obj: a module, or any collection of tensors and other objects.

        Returns:
            The same module, or a collection of the same types.
        """
        strategy = self._ensure_session("to_device").strategy
        if isinstance(obj, nn.Module):
            return strategy.module_to_device(obj)
        return strategy.batch_to_device(obj)

    def is_wrapped(self, obj: Any) -> bool:
        """Return whether an object is a result of ``setup``, or an optimizer that was set up."""
        if isinstance(obj, Optimizer):
            return self._session is not None and obj in self._session.objects.optimizers
        return self.unwrap(obj) is not obj

    @overload
    def unwrap(self, obj: FabricDataLoader) -> DataLoader[Any]: ...
    @overload
    def unwrap(self, obj: T) -> T: ...
    def unwrap(self, obj: Any) -> Any:
        """Return the user's module of a set-up module, or the torch loader of a set-up loader.

        Other objects are returned unchanged.
        """
        if isinstance(obj, FabricDataLoader):
            return obj.loader
        if isinstance(obj, nn.Module):
            inner = uncompiled(obj)  # the user may have compiled the set-up module
            if isinstance(inner, FabricModule):
                return inner.module
        return obj

    def backward(
        self,
        tensor: Tensor,
        *args: Any,
        weight: float | Tensor | None = None,
        optimizer: _Optimizers = None,
        reduce: Literal["mean", "sum"] = "mean",
        **kwargs: Any,
    ) -> None:
        """Compute gradients, instead of ``tensor.backward(*args, **kwargs)``.

        The loss is scaled if the precision needs a loss scale. Collective where gradients are
        synchronized. A step whose losses have weights sends one more message.

        Args:
            tensor: the loss.
            *args: the arguments of ``Tensor.backward``.
            weight: the number of terms that the loss sums up on this process, zero or more. The
                step then uses the gradients of a mean: the sum of all losses divided by the sum of
                all weights, over all processes and all losses since the last step or ``zero_grad``.
                ``clip_gradients`` or ``step`` divides the gradients. A weight may be a tensor on a
                CUDA device, which is not waited for. None leaves the loss as it is.
            optimizer: the optimizer or optimizers that the loss is for. None means all that are set
                up.
            reduce: ``"mean"``, the default, gives the gradients of the mean of the losses of all
                processes. ``"sum"`` gives those of their sum, for losses that are sums over
                samples.
            **kwargs: the keyword arguments of ``Tensor.backward``.

        Raises:
            UsageError: gradients would not be synchronized (see
                :class:`fabric.module.FabricModule`). Or losses with and without a weight, or for
                different optimizers, are added up in one gradient. Or all weights of a step are
                zero. Or ``reduce`` is ``"sum"``, and gradients are not averaged over all processes.
                Or a loss with a weight is a mean, which only the first steps check. Or the loss has
                several elements, or was not computed from a parameter.
            ArgumentTypeError: ``tensor`` is not a tensor.
            ConfigurationError: ``reduce`` is another value, or ``"sum"`` together with a weight.
        """
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            raise _loss_error(tensor)
        if tensor.numel() != 1 and not args and not kwargs:
            # torch can differentiate several elements only with the argument `gradient`.
            raise _loss_error(tensor)
        is_plain = weight is None and optimizer is None and reduce == "mean"
        if is_plain and self._session is None:
            tensor.backward(*args, **kwargs)  # nothing has been set up
            return
        session = self._session or self._ensure_session("backward")
        # A check may remove itself from the list, so this loop is over a copy.
        for check_loss in list(session.loss_checks):
            check_loss(tensor, weight, reduce)
        for loop in session.active_loops:
            if loop.spec.uneven == "longest":
                # A rank that has run out of batches repeats one to stay in step with the other
                # ranks. The loss and the weight of a repeated batch become zero. For any other
                # batch, loss and weight are not changed.
                is_sum = reduce == "sum"
                tensor, weight = without_repeats(loop.position, tensor, weight, is_sum=is_sum)
        if not is_plain or session.loss_weights is not None:
            tensor = session.weigh_loss(tensor, weight, optimizer, reduce)
        if session.scaler is not None:
            tensor = session.scaler.scale_loss(tensor)

        hooks = session.backward_hooks
        try:
            for function in hooks.before:
                function()
            tensor.backward(*args, **kwargs)
        except BaseException as error:
            session.end_failed_backward(tensor, error)
            raise
        # A copy of the list, since a function may remove itself from the list.
        for function in list(hooks.after):
            function(tensor, None)  # None means that there was no error

    def autocast(self) -> AbstractContextManager[object]:
        """Run code outside of a forward pass in the autocast context of the precision.

        The context does nothing under ``*-true`` precisions.
        """
        device = self._ensure_session("autocast").runtime.device
        return self.precision.forward_context(device.type)

    def clip_gradients(
        self,
        module: Module | Sequence[Module],
        optimizer: Optimizer | None = None,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float | Literal["inf"] = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip gradients in place, and return their norm.

        Pass exactly one of ``clip_val`` and ``max_norm``. A loss scale is removed from the
        gradients first. If scaled gradients have overflowed, the step will be skipped, and a norm
        that is not finite is not an error. The call is collective in each of these cases:

        - The gradients are sharded, or belong to a parameter list.
        - The loss had a weight.
        - The gradients are scaled and differ between processes.

        Args:
            module: the set-up module of the parameters, several modules, or a module around them.
            optimizer: the set-up optimizer whose gradients are clipped. None, the default, clips
                the gradients of all parameters of the modules, for loops without an optimizer.
            clip_val: the largest absolute value of a gradient, positive.
            max_norm: the largest total norm, positive. ``math.inf`` does not clip. It only averages
                gradients over the processes, divides them by the loss weights and unscales them,
                for a loop that changes parameters without ``step``.
            norm_type: the p of the p-norm, or ``"inf"``.
            error_if_nonfinite: whether to raise if the norm is not finite. The check waits for the
                device.

        Returns:
            The total norm before clipping, of shape ``()``.

        Raises:
            NonFiniteGradientError: the norm is not finite. No gradient was changed.
            ConfigurationError: both limits were passed, or none, or one that is not positive, or
                an infinite ``clip_val``.
            UsageError: the optimizer is not set up, or updates no parameter of the module; or there
                is no optimizer, and gradients have a loss scale or loss weights.
            ArgumentTypeError: ``optimizer`` is not an optimizer.
        """
        models = find_fabric_modules("clip_gradients", module)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"clip_gradients with an optimizer of type {type(optimizer).__name__}",
                expected="a set-up optimizer, or None",
                suggestion="fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            )
        session = self._ensure_session("clip_gradients")
        return session.clip_gradients(
            models,
            optimizer,
            error_if_nonfinite=error_if_nonfinite,
            clip_val=clip_val,
            max_norm=max_norm,
            norm_type=float(norm_type),  # "inf" becomes infinity
        )

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last ``step`` of an optimizer was skipped because of an overflow.

        Gradients can overflow under ``"16-mixed"``. Use the method to count only the steps that
        were made: ``if not fabric.step_was_skipped(optimizer): scheduler.step()``. The result is
        the same on all processes, and False without loss scaling. Not a collective.

        Raises:
            UsageError: the optimizer is not set up.
        """
        return self._ensure_session("step_was_skipped").step_was_skipped(optimizer)

    def no_backward_sync(
        self, module: Module | Sequence[Module], enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return a context in which gradients are not synchronized, to accumulate them.

        Use the context for all micro-batches of an accumulation but the last. The context has to
        contain the forward and the backward pass.

        Args:
            module: the set-up module, or several.
            enabled: whether the context has an effect.
        """
        models = find_fabric_modules("no_backward_sync", module)
        if enabled and self._session is not None and self._session.scaler is not None:
            # Until the next synchronization, gradients may overflow on one rank alone. From now on
            # the scaler asks all ranks before it changes the scale.
            self._session.scaler.accumulates = True
        prepared: list[nn.Module] = []
        for model in models:
            # The gradients of a parameter list are averaged before the step, not in the backward
            # pass, so the strategy cannot postpone the average.
            if not isinstance(model.module, PARAMETER_LISTS):
                prepared.append(model._fabric_prepared)
        return without_sync(self.strategy, prepared, enabled=enabled)

    def accumulate(self, loader: FabricDataLoader[T], steps: int) -> Windows[T]:
        """Return a loop over pairs ``(batch, last)``, in windows of ``steps`` micro-batches.

        Args:
            loader: the set-up loader.
            steps: the number of micro-batches in a window, 1 or more. The last window of an epoch
                may be shorter.

        Returns:
            The :class:`fabric.data.Windows`. ``last`` is true for the last micro-batch of a window,
            and the same on all processes.
        """
        return Windows(loader, steps)

    def sequence_parallel(self, batch: Any, dim: int = 1) -> AbstractContextManager[object]:
        """Split the sequences of a batch over ranks, for one forward and backward pass.

        Collective over the ranks that have parts of the same sequences. These ranks pass the same
        batch. Without a ``"sequence"`` dimension in the mesh the batch is not split. See
        :func:`fabric.strategies.sequence_parallel.sequence_parallel`.

        Args:
            batch: any collection. The batch contains everything that depends on the position of a
                token, with labels that are already shifted.
            dim: the dimension of the tokens. Tensors without this dimension are not split.

        Returns:
            A context that yields the same collection with this rank's tokens.
        """
        runtime = self._ensure_session("sequence_parallel").runtime
        return sequence_parallel(runtime, self.device_mesh, batch, dim)

    def ema(
        self,
        module: Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        buffers: bool = False,
    ) -> ExponentialMovingAverage:
        """Return exponential moving averages of a set-up module's weights. Not a collective.

        See :class:`fabric.optim.ema.ExponentialMovingAverage`.

        Args:
            module: the set-up module.
            decay: the weight of the old average in an update, in ``[0, 1]``, or a function that
                returns the weight for the number of updates so far.
            buffers: whether to average the buffers, too. If not, the module's own buffers are used.
        """
        [model] = find_fabric_modules("ema", module)  # exactly one
        averages = ExponentialMovingAverage(model, decay, buffers)
        self._ensure_session("ema").watch_averages(averages, model)
        return averages

    def step_guard(
        self,
        nonfinite: Literal["skip"] | None = "skip",
        spike: float | None = None,
        patience: int = 8,
        log: _Path | None = None,
    ) -> "StepGuard":
        """Return a guard that leaves out the optimizer steps of bad batches. Not a collective.

        Args:
            nonfinite: ``"skip"`` refuses a step with a loss or a gradient that is infinite or NaN.
                None accepts them.
            spike: refuse a loss that is more than ``spike`` standard deviations above the mean,
                such as 6.0. Both are running values over about the last hundred losses. None
                accepts any finite loss. The first 20 losses are accepted.
            patience: the number of refused steps in a row that is an error.
            log: a file to which rank 0 appends a line of JSON for each refused step: its number,
                the reason, the loss of each rank, the epoch, and the samples of each rank.

        Returns:
            The :class:`fabric.optim.step_guard.StepGuard`. Loggers get the number of refused steps
            as ``bad_steps``.

        Raises:
            ConfigurationError: an argument is not valid.
        """
        from fabric.optim.step_guard import StepGuard  # few jobs use it

        session = self._ensure_session("step_guard")
        return StepGuard(
            session.runtime.communicator,
            session.scaler,
            session.active_loops,  # the loops over loaders, from which the guard reads the samples
            self._log_if_there_are_loggers,
            nonfinite=nonfinite,
            spike=spike,
            patience=patience,
            log=log,
        )

    def _log_if_there_are_loggers(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of fabric's own, without the warning of :meth:`log_dict` for no loggers."""
        if self.loggers:
            self.log_dict(metrics, step)

    def join(
        self, module: Module | Sequence[Module], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Let processes have different numbers of batches in a training loop under DDP. Collective.

        Every process enters the context. A process leaves the context once all processes have
        finished. A process without further batches answers the collectives of the others with
        gradients of zero. Afterwards every process has the modules, optimizers and loss scale of a
        process that made the last step. Schedulers stay as they are.

        Args:
            module: the set-up module that is trained, or several, in the order of their passes.
            divide_by_initial_world_size: whether to divide gradients by the number of all
                processes, so that each batch counts the same. If not, they are divided by the
                number of processes that still have batches.

        Raises:
            UsageError: the strategy does not support different numbers of batches. FSDP, for
                example, does not. Within the context, a collective of the whole job and a forward
                pass without gradients raise this error.
        """
        models = find_fabric_modules("join", module)
        session = self._ensure_session("join")
        return session.join(models, divide_by_initial_world_size)

    def all_reduce(
        self, data: T, group: Group = None, reduce_op: ReduceName | ReduceOp = "mean"
    ) -> T:
        """Reduce every tensor and number over the processes. Collective.

        Sum and mean are differentiable. Python integers never wrap around, and neither do sums of
        tensors of integers with less than 64 bits. Sums of larger integers and products of tensors
        wrap around, as in torch.

        Args:
            data: a tensor, a number, or any collection of them, with the same structure, dtypes and
                shapes on every process. The data is not changed.
            group: the processes: a result of :meth:`new_group` or a torch process group. None is
                all processes of the job.
            reduce_op: ``"mean"`` (or ``"avg"``), ``"sum"``, ``"min"``, ``"max"``, ``"product"``,
                ``"band"``, ``"bor"``, ``"bxor"``, or a torch ``ReduceOp``. Integers have no mean.
                Booleans have ``"min"`` (all), ``"max"`` (any) and the bitwise operations.

        Returns:
            The same collection, with new tensors of the same shapes on the same devices.

        Raises:
            ConfigurationError: a leaf cannot be reduced, or a sum does not fit into its dtype.
            CollectiveMismatchError: the calls differ between processes.
        """
        op = Reduce(reduce_op)
        # The ranks of a tensor-parallel group hold the same samples. A sum must count them once, so
        # the communicator depends on the reduction.
        communicator = self._communicator("all_reduce", group, op)
        return collectives.all_reduce(communicator, data, op)

    def reduce_scatter(
        self, data: T, group: Group = None, reduce_op: ReduceName | ReduceOp = "mean"
    ) -> T:
        """Reduce every tensor over the processes, and keep this process's row. Collective.

        Sum and mean are differentiable.

        Args:
            data: tensors of shape ``(size, *s)`` for a group of ``size`` processes.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.
            reduce_op: the reduction, as for :meth:`all_reduce`.

        Returns:
            The same collection, with tensors of shape ``s``: row ``rank`` of the result of
            :meth:`all_reduce`.

        Raises:
            ConfigurationError: a leaf cannot be reduced, or has another number of rows; or a sum in
                the row of this process does not fit into its dtype.
            CollectiveMismatchError: the calls differ between processes.
        """
        communicator = self._communicator("reduce_scatter", group)
        return collectives.reduce_scatter(communicator, data, Reduce(reduce_op))

    @overload
    def all_gather(
        self, data: Tensor, group: Group = ..., sync_grads: bool = ..., *, concat: bool = ...
    ) -> Tensor: ...
    @overload
    def all_gather(
        self,
        data: Tensor,
        group: Group = ...,
        sync_grads: bool = ...,
        *,
        ragged: Literal[True],
        concat: Literal[False] = ...,
    ) -> list[Tensor]: ...
    @overload
    def all_gather(
        self, data: Tensors, group: Group = ..., sync_grads: bool = ..., *, concat: bool = ...
    ) -> Tensors: ...
    @overload
    def all_gather(self, data: N, group: Group = ..., sync_grads: bool = ...) -> list[N]: ...
    @overload
    def all_gather(
        self,
        data: Tree,
        group: Group = ...,
        sync_grads: bool = ...,
        ragged: bool = ...,
        concat: bool = ...,
    ) -> Any: ...
    def all_gather(
        self,
        data: Tree,
        group: Group = None,
        sync_grads: bool = False,
        ragged: bool = False,
        concat: bool = False,
    ) -> Any:
        """Collect every tensor and number from all processes, by rank. Collective.

        Args:
            data: a tensor, a number, or any collection of them, with the same structure and dtypes
                on every process, and the same shapes unless ``ragged`` or ``concat`` is true. The
                data is not changed.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.
            sync_grads: whether gradients flow back to the process that passed the values.
            ragged: whether the length of tensors along dim 0 may differ between processes.
            concat: whether to concatenate the tensors of all processes along dim 0. Their lengths
                may differ, and a 0-dim tensor counts as one of length 1.

        Returns:
            The same collection. A tensor of shape ``s`` becomes one of shape ``(size, *s)`` for a
            group of ``size`` processes, on one process too. A number becomes a list. With
            ``ragged`` a tensor becomes a list of ``size`` tensors, and with ``concat`` one tensor
            of shape ``(n_0 + n_1 + ..., *s)``.

        Raises:
            ConfigurationError: a leaf cannot be sent.
            CollectiveMismatchError: the calls differ between processes.
        """
        communicator = self._communicator("all_gather", group)
        if ragged or concat:
            return collectives.all_gather_ragged(
                communicator, data, sync_grads=sync_grads, concat=concat
            )
        return collectives.all_gather(communicator, data, sync_grads=sync_grads)

    def gather_for_metrics(self, data: T, *, loader: FabricDataLoader | None = None) -> T:
        """Collect values computed from a batch from all processes, each sample once. Collective.

        Call the method in the body of a loop over a set-up loader. An evaluation over n samples
        counts n samples: samples that were repeated so that all processes get equally many
        (``uneven="pad"``) are removed again.

        Args:
            data: a collection of tensors of shape ``(n, *s)``, for the n samples of this process's
                batch. Under ``batch_size=None`` each tensor is one sample.
            loader: the set-up loader that yielded the batch. None is the loader that yielded a
                batch last, which is the loader of the innermost loop.

        Returns:
            The same collection, with new, detached tensors of shape ``(m, *s)``, for the m samples
            of the batches of all processes, in the order of the loader's sampler.

        Raises:
            UsageError: no loop over the loader is active; fabric does not shard its data; or loops
                take turns, as in ``zip(first, second)``, and ``loader`` is not given.
            ConfigurationError: a tensor has no entry for each sample of the batch; or there is a
                list of strings, which are not gathered.
        """
        session = self._ensure_session("gather_for_metrics")
        # The group has only ranks that read different batches, so that each sample counts once.
        communicator = session.strategy._data_parallel_communicator()
        # The running loops know which samples of a batch repeat earlier samples.
        return gather_batch(communicator, session.active_loops, data, loader)

    def compute_metrics(self, metrics: Any) -> Any:
        """Compute metrics over the samples of all processes, in one exchange. Collective.

        Args:
            metrics: a metric or collection of torchmetrics, moved by :meth:`to_device`. A process
                may have no samples.

        Returns:
            The result of ``metrics.compute()``, the same on every process.
        """
        session = self._ensure_session("compute_metrics")
        # The group has only ranks that hold different samples, so that each sample counts once.
        communicator = session.strategy._distinct_samples_communicator()
        return compute_metrics(communicator, metrics)

    def all_to_all(self, data: T, group: Group = None) -> T:
        """Send row i of every tensor to process i. Collective and differentiable.

        Args:
            data: tensors of shape ``(size, *s)`` for a group of ``size`` processes.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.

        Returns:
            The same collection, with tensors of shape ``(size, *s)``: row j is from process j.

        Raises:
            ConfigurationError: a leaf cannot be sent, or has another number of rows.
            CollectiveMismatchError: the calls differ between processes.
        """
        return collectives.all_to_all(self._communicator("all_to_all", group), data)

    def broadcast(self, obj: T, src: int = 0, group: Group = None) -> T:
        """Send any object from one process to all. Collective and differentiable.

        Tensors in a collection are sent as tensors, and other leaves are pickled.

        Args:
            obj: the object to send. Only the object of rank ``src`` counts: the other processes may
                pass None.
            src: the rank of the sender within the group.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.

        Returns:
            The object of rank ``src``.
        """
        strategy = self._ensure_session("broadcast").strategy
        # A strategy of another package may override broadcast without the argument group.
        if group is None:
            return strategy.broadcast(obj, src)
        return strategy.broadcast(obj, src, group)

    def scatter(self, parts: Sequence[T] | None = None, src: int = 0, group: Group = None) -> T:
        """Send one object or collection to each process. Collective.

        Args:
            parts: the objects by rank, on rank ``src`` alone. Shapes and types may differ. The
                other processes pass None.
            src: the rank of the sender within the group.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.

        Returns:
            The object of this process. Its tensors are detached. Tensors that were on an
            accelerator are on this process's device.
        """
        communicator = self._communicator("scatter", group)
        return collectives.scatter(communicator, parts, src=src, device=self.device)

    def gather(self, obj: T, dst: int = 0, group: Group = None) -> list[T] | None:
        """Collect one object or collection from each process on one process. Collective.

        Args:
            obj: the object of this process. Shapes and types may differ between processes.
            dst: the rank of the receiver within the group.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.

        Returns:
            The objects by rank, with detached tensors, on rank ``dst``. None on the other
            processes.
        """
        communicator = self._communicator("gather", group)
        return collectives.gather(communicator, obj, dst=dst, device=self.device)

    def send(self, obj: Any, dst: int, group: Group = None) -> None:
        """Send any object to one process, which has to call :meth:`recv`. Not a collective.

        Objects arrive in the order in which they were sent.

        Args:
            obj: any object or collection.
            dst: the rank of the receiver within the group.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.
        """
        collectives.send(self._communicator("send", group), obj, dst)

    def recv(self, src: int, group: Group = None) -> Any:
        """Receive an object that another process sends with :meth:`send`. Not a collective.

        Args:
            src: the rank of the sender within the group.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.

        Returns:
            The object. Its tensors are detached. Tensors that were on an accelerator are on this
            process's device.
        """
        return collectives.recv(self._communicator("recv", group), src, self.device)

    def barrier(self, name: str | None = None, group: Group = None) -> None:
        """Wait until every process has called this method. Collective.

        Args:
            name: a name for the error that is raised if a process does not call this method.
            group: the processes, as for :meth:`all_reduce`. None is all processes of the job.
        """
        self._communicator("barrier", group).barrier(name)

    def new_group(self, ranks: Sequence[int]) -> Communicator | NonMember:
        """Make a group of some processes, for the argument ``group`` of the collectives.

        Collective: every process of the job must call this method, also the processes outside of
        the group.

        Args:
            ranks: the global ranks of the members, in any order. Within the group they are numbered
                in ascending order.

        Returns:
            The group. A process outside of the group gets a
            :class:`fabric.communicators.NonMember`, with which every collective raises. In a
            condition, ``if group:``, the group is true, and a NonMember is false.
        """
        return self._communicator("new_group").new_group(ranks)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether the decision of all processes, or of any process, is True. Collective.

        The strategies of Lightning have a method of this name. For a signal or a time limit,
        :attr:`should_stop` is enough.

        Args:
            decision: the decision of this process.
            all: True asks whether all decisions are True. False asks whether any decision is True.
        """
        strategy = self._ensure_session("reduce_boolean_decision").strategy
        return strategy.reduce_boolean_decision(decision, all)

    @property
    def should_stop(self) -> bool:
        """Whether it is time to save and stop. Every process has to read it equally often.

        All processes get the same answer. The answer becomes true

        - after SIGTERM, SIGHUP or SIGUSR2 to any process, and under SLURM also after SIGUSR1,
        - at ``time_limit``,
        - before the end of a SLURM job.

        Only the read at which the processes agree to stop communicates. From the first read until
        ``teardown`` these signals no longer end this process.
        """
        return self._ensure_session("should_stop").stop_request.is_due()

    def exit_preempted(self, requeue: bool = False) -> NoReturn:
        """End this process with code 75, which asks for a restart. Collective.

        The call waits until unfinished saves are complete. In a worker of Ray Train that will be
        preempted, it waits until Ray ends the worker at the deadline of the machine, since Ray
        takes any exit for a failure.

        Args:
            requeue: whether rank 0 requeues the SLURM job, or this task of a job array, with a
                warning if SLURM refuses. Without SLURM the argument has no effect.
        """
        # A process that exits too early would break the collectives of a process that still trains.
        self.barrier("exit_preempted")
        is_requeued_here = requeue and self.global_rank == 0
        stop_request = self._ensure_session("exit_preempted").stop_request
        waits_for_ray = stop_request.is_preempted_by_ray()
        # The imported function, not this method: ends the process after teardown(), which waits for
        # unfinished saves.
        exit_preempted(self.teardown, requeue=is_requeued_here, waits_for_ray=waits_for_ray)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Run a block on rank 0 first, then on the other ranks. Use it for downloads. Collective.

        Args:
            local: whether the first process of each node goes first, for files that nodes do not
                share.

        Raises:
            UsageError: on the other ranks, if the block failed on rank 0. The text contains the
                error of rank 0.
        """
        runtime = self._ensure_session("rank_zero_first").runtime
        if local:
            return rank_zero_first(runtime.node_communicator())
        return rank_zero_first(runtime.communicator)

    @overload
    def save(
        self,
        path: _Path,
        state: _State,
        filter: _EntryFilters = ...,
        trainable_only: bool = ...,
        *,
        async_: Literal[True],
    ) -> PendingSave: ...
    @overload
    def save(
        self,
        path: _Path,
        state: _State,
        filter: _EntryFilters = ...,
        trainable_only: bool = ...,
        *,
        async_: bool = ...,
    ) -> PendingSave | None: ...
    def save(
        self,
        path: _Path,
        state: _State,
        filter: _EntryFilters = None,
        trainable_only: bool = False,
        *,
        async_: bool = False,
    ) -> PendingSave | None:
        """Write a checkpoint. Collective.

        After any failure the path has the complete old checkpoint or the complete new one.

        Modules, optimizers, schedulers, loaders and other objects with ``state_dict`` are stored as
        their state, and plain values as they are. The loss scale and the random states of all
        processes are added. If ``state`` is a mapping of nothing but tensors, such as
        ``model.state_dict()``, a checkpoint in one file contains the mapping alone, for
        :meth:`load_raw` and torch.

        The checkpoint is one file that the first process writes. Under FSDP, unless
        ``state_dict_type="full"``, the checkpoint is a folder into which every process writes its
        shards. The ``checkpoint_io`` of the strategy takes precedence over both formats.

        Args:
            path: the file or folder, which does not exist yet or is a checkpoint of the same kind.
                An existing checkpoint is replaced. URLs such as ``s3://...`` work, too.
            state: the objects and values by name.
            filter: functions ``(name, value) -> bool`` by names of ``state``. A function returns
                whether an entry of that object's state is kept. In a folder of shards, sharded
                values are DTensors. None keeps everything.
            trainable_only: whether to leave out parameters without ``requires_grad``. Buffers are
                kept. Load the checkpoint with ``strict=False``.
            async_: whether to return as soon as everything is copied to host memory. The memory is
                used again by the next save. The next ``save``, ``load`` or ``teardown`` waits until
                the checkpoint is written.

        Returns:
            The :class:`fabric.checkpoint.PendingSave` with ``async_``, else None.

        Raises:
            ArgumentTypeError: an object could not be loaded again. Nothing was written.
            ReplicaDriftError: ranks hold different values of what they should hold alike. The path
                has what it had before.
            CheckpointError: this save, or an earlier one with ``async_``, failed on a process; or
                the path exists and is not a checkpoint of the same kind.
        """
        with self._checkpoint_coordinator("save") as coordinator:
            return coordinator.save(
                path, state, filter=filter, trainable_only=trainable_only, async_=async_
            )

    def checkpoints(
        self,
        folder: _Path,
        keep: int = 3,
        best: tuple[str, Literal["min", "max"]] | None = None,
        *,
        healthy: bool = True,
    ) -> "checkpoint.Checkpoints":
        """Keep the newest checkpoints of a run, and the best by a metric, in a folder. Collective.

        Args:
            folder: a folder for this run alone, which is created if it does not exist. URLs such as
                ``s3://...`` work, too.
            keep: the number of newest checkpoints to keep, 1 or more.
            best: the name of a metric, and whether its best value is the least (``"min"``) or the
                largest (``"max"``). None keeps no best checkpoint.
            healthy: whether a save of a model or an optimizer with NaN or infinite values is set
                apart: it is not restored, and removes no other checkpoint. False saves any values
                alike.

        Returns:
            The :class:`fabric.checkpoint.Checkpoints`, which saves, restores, and removes old
            checkpoints.

        Raises:
            ConfigurationError: ``keep`` or ``best`` is not valid.
            CheckpointError: another job saves into the folder, or the folder cannot be written.
        """
        # Pass the method and not its result, so that each call of the checkpoints uses the session
        # that runs at that time.
        return checkpoint.Checkpoints(self._ensure_session, folder, keep, best, healthy)

    def load(
        self,
        path: _Path,
        state: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        rng: bool = True,
        *,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Restore a checkpoint. Collective.

        Objects are restored in place, and plain values are replaced in ``state``. Everything is
        checked before anything changes, and no code of the checkpoint runs. A checkpoint loads
        under any strategy and number of processes. From a folder each process reads only the data
        that this process will hold.

        Args:
            path: the file or folder.
            state: the objects and values to restore, by name. None returns everything as it was
                stored.
            strict: whether an entry that the checkpoint or an object lacks is an error. If not, the
                entries that fit by name are loaded.
            rng: whether each process continues its random streams. If the job has more processes
                than the checkpoint has random states, the additional processes keep their streams.
            weights_only: False rebuilds any object in a file, which runs the code that the file
                names. Use False only for a file whose writer you trust. None means True, as for
                torch. A folder never needs False.

        Returns:
            The entries that ``state`` does not name. The result of a folder has only entries
            without tensors. To read an entry with tensors, name the entry in ``state`` with None.

        Raises:
            CheckpointNotFoundError: the file or folder does not exist.
            CheckpointError: the checkpoint is damaged or does not fit. The text has all reasons.
            UnsafeCheckpointError: the checkpoint holds code, which was not run.
        """
        refuses_code = weights_only is not False  # None means True
        session = self._ensure_session("load")
        if rng:
            # This process keeps these streams if the checkpoint has no streams for it.
            self._seed_per_rank(session)
        with self._checkpoint_coordinator("load") as coordinator:
            return coordinator.load(path, state, strict=strict, rng=rng, weights_only=refuses_code)

    def load_raw(
        self,
        path: _Path,
        obj: Any,
        strict: bool = True,
        *,
        weights_only: bool | None = True,
        rename: _Rename = None,
    ) -> None:
        """Restore one module or optimizer from its ``state_dict``, or a module from weights.

        Collective. Each process reads only the values that it holds. A parameter keeps its dtype.

        Args:
            path: the file, as ``torch.save(model.state_dict(), path)`` writes it; a safetensors
                file; or a folder of Hugging Face, with one file of weights or several and an index.
            obj: a module, an optimizer, or any object with ``state_dict`` and ``load_state_dict``.
                Under a strategy that shards, set up a module before the load.
            strict: whether an entry that the file or the object lacks is an error. Of the names of
                a tied weight, the file needs one.
            weights_only: whether the file may only hold tensors and plain values, as for
                :meth:`load`. None means True.
            rename: the names in the module, as a mapping from names in the file or as a function of
                a name in the file. A mapping leaves other names as they are. An entry that is
                renamed to None is left out.

        Raises:
            CheckpointNotFoundError: the file or folder does not exist.
            CheckpointError: the file is damaged or does not fit. The text has all reasons.
            UnsafeCheckpointError: the file holds code, which was not run.
        """
        refuses_code = weights_only is not False  # None means True
        session = self._ensure_session("load_raw")
        with session.checkpoint_coordinator(phase="load_raw") as coordinator:
            coordinator.load_raw(path, obj, strict=strict, weights_only=refuses_code, rename=rename)

    def save_pretrained(self, module: Module, path: _Path, max_shard_gb: float = 5) -> None:
        """Write the weights of a module as Hugging Face's libraries read them. Collective.

        The folder has safetensors files, an index if there are several, and the config of a model
        of ``transformers``, whose ``from_pretrained(path)`` reads it back. :meth:`load_raw` reads
        it into any module. Tied weights are written once. Under a strategy that shards, each
        process writes some of the files, and needs memory for 64 MiB of full tensors, or for the
        largest one.

        The folder appears when it is complete. After any failure there is nothing at the path.

        Args:
            module: the module, set up or not.
            path: the folder, on a file system that all processes share. Nothing may be there yet.
            max_shard_gb: the largest size of a file in GB. A larger tensor gets a file of its own.

        Raises:
            CheckpointError: there is something at the path, or the folder could not be written.
            ConfigurationError: the module has no values.
        """
        session = self._ensure_session("save_pretrained")
        with session.checkpoint_coordinator(phase="save") as coordinator:
            coordinator.save_pretrained(
                module, user_module=self.unwrap(module), path=path, max_shard_gb=max_shard_gb
            )

    def get_state_dict(self, module: Module) -> dict[str, Any]:
        """Return the full state dict of a module, for other formats. Collective.

        Only the first process has the weights, so only that process may write them::

            weights = fabric.get_state_dict(model)
            if fabric.is_global_zero:
                fabric.unwrap(model).save_pretrained(path, state_dict=weights)
            fabric.barrier()

        Without the condition, the other processes write a folder without weights to the same path.

        Returns:
            Copies on the CPU of the first process. An empty dict on the other processes.
        """
        session = self._ensure_session("get_state_dict")
        with session.checkpoint_coordinator(phase="save") as coordinator:
            return coordinator.state_dict(module)

    def iter_full_tensors(
        self,
        module: Module,
        bucket: int | str = "1GiB",
        dtype: torch.dtype | None = None,
        rename: _Rename = None,
        dst: int | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the names and full tensors of a module, gathered in buckets.

        Collective, as is the iteration: every process must call this method, and iterate to the end
        or stop at the same tensor. It hands the weights to an inference engine, a file or a
        teacher, and needs memory for one bucket::

            for name, tensor in fabric.iter_full_tensors(model, dtype=torch.bfloat16):
                engine.update_weight(name, tensor)

        The tensors are those of :meth:`get_state_dict`: parameters and buffers under the names of
        the user's module, and a tied weight under each of its names. They are copies on the device
        of the process, without gradients. The shards of a bucket travel in one message along each
        dimension of the mesh. Without shards, there are no messages.

        Args:
            module: the module, set up or not.
            bucket: the size of the tensors that are gathered at once, in bytes or as a text such as
                ``"512MiB"``. A larger tensor has a bucket of its own.
            dtype: the dtype of floating tensors. Shards are cast before they travel. None leaves
                the tensors as they are.
            rename: the names to yield, as a mapping from names in the module or as a function of a
                name in the module. A mapping leaves other names as they are. A tensor that is
                renamed to None is left out, and not gathered.
            dst: the only process that gets the tensors. The iterators of other processes are empty,
                and still must be iterated. None stands for all processes.

        Raises:
            ConfigurationError: the module has no values, two tensors get the same name, ``bucket``
                is not a size, or ``dst`` is not a process.
            CollectiveMismatchError: a process that has stopped early makes another call, while
                others iterate. All of these processes raise it.
        """
        bucket_bytes = parse_size(bucket, request=f"fabric.iter_full_tensors({bucket=})")
        session = self._ensure_session("iter_full_tensors")
        # The phase only checks the arguments on all processes. It ends at the return, before the
        # iteration, in which the user's code runs.
        with session.checkpoint_coordinator(phase="save") as coordinator:
            return coordinator.iter_full_tensors(
                module, bucket_bytes=bucket_bytes, dtype=dtype, rename=rename, dst=dst
            )

    def seed_everything(
        self, seed: int | None = None, workers: bool = True, per_rank: _PerRank = False
    ) -> int:
        """Seed python, numpy and torch, and return the seed. Collective without a seed.

        If the processes do not exist yet, each of them is seeded when it starts. The function
        ``fabric.seed_everything`` of the package seeds this process alone.

        Args:
            seed: the seed, ``0 <= seed < 2**32``. None draws one, the same for all processes.
            workers: whether loader workers of different processes get different streams, in loaders
                that are set up from now on. If not, worker k has the same stream on every process.
            per_rank: whether each process gets different streams. With ``"after_setup"`` all
                processes build the model and the data from the same streams, and get different ones
                in the next ``setup`` of a module or ``load``, for dropout masks and other noise.
                The first process then keeps its streams, so that a job of one process is the plain
                loop. Processes that read the same batch, as under tensor parallelism, always have
                the same streams.

        Raises:
            ConfigurationError: the seed is out of range, or ``per_rank`` has another value.
        """
        # In Lightning the method is static. Here, Fabric.seed_everything(1) has the seed as `self`.
        if not isinstance(self, Fabric):
            raise UsageError(
                "Fabric.seed_everything(...)",
                problem="seed_everything was called on the class",
                suggestion="fabric = Fabric(...), then fabric.seed_everything(1)",
            )
        if not isinstance(per_rank, bool) and per_rank != "after_setup":
            raise ConfigurationError(
                f"fabric.seed_everything(per_rank={per_rank!r})",
                expected='True, False or "after_setup"',
            )
        # Before the launch, this process is seeded as rank 0. Each rank repeats the call when it
        # starts.
        world = self._plan.world or World()
        must_draw_on_rank0 = seed is None and world.world_size > 1
        if must_draw_on_rank0:
            self._ensure_session("seed_everything")  # called for its error, which names this method
            if self.is_global_zero:
                seed = seed_everything(None)
            seed = self.broadcast(seed)
        rank = world.rank
        if self._session is not None:
            # Ranks that read the same batch need equal streams, and so get the same number.
            rank = self._session.data_parallel_rank
        seed = seed_everything(seed, rank=rank, per_rank=per_rank is True)
        self._seeding = _Seeding(seed, workers, per_rank)
        self._has_to_seed_per_rank = per_rank == "after_setup"
        return seed

    def _seed_per_rank(self, session: Session) -> None:
        """Give each rank random streams of its own, if ``per_rank="after_setup"`` asks for it.

        Called after the setup of a module. Also called before a load, which then replaces the
        streams by those of the checkpoint, if any.
        """
        if self._has_to_seed_per_rank:
            assert self._seeding is not None, "seed_everything() sets both"
            seed_rank(self._seeding.seed, session.data_parallel_rank)
            self._has_to_seed_per_rank = False

    @property
    def logger(self) -> Any:
        """The first logger, or None.

        The logger is the object that the user passed. A direct call of its methods writes on every
        process. :meth:`log` writes on the first process only.
        """
        return next(iter(self._loggers.user_loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """All loggers, as the user passed them."""
        return list(self._loggers.user_loggers)

    def describe(self) -> str:
        """Return a short text about the options and the objects that were set up.

        Not a collective.
        """
        lines = self._plan.describe()
        if self._session is not None:
            lines += self._session.describe()
        return "\n".join(lines)

    __repr__ = describe

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def profile(self, path: _Path, steps: range | None = None) -> AbstractContextManager[None]:
        """Return a context that writes a trace of the steps of all processes. Collective on entry.

        The trace contains the phases of every step and the collectives of each process. Open the
        file in ui.perfetto.dev or ``chrome://tracing``.

        Args:
            path: the file, which rank 0 writes. The suffix ``.json`` is added if it is missing.
            steps: a contiguous range of steps, counted from 0 at the start of the context. None is
                all steps. A step ends with each ``step()`` of the first optimizer that was stepped.

        Raises:
            ConfigurationError: ``steps`` is not a contiguous range.
            UsageError: another profile is active; or, on the other ranks, rank 0 cannot write the
                file.
            OSError: on rank 0, this rank cannot write the file.
        """
        from fabric.tools.timeline import profile  # imported late: few programs need it

        return profile(self._ensure_session("profile"), path, steps)

    def fingerprint(
        self,
        folder: _Path,
        *,
        every: int = 1,
        detail: Literal["modules", "steps"] = "modules",
        first_step: int = 0,
    ) -> AbstractContextManager[None]:
        """Return a context that records hashes and norms of all values. Collective on entry.

        ``fabric diff`` compares two such records, and prints the first value that differs. Each
        process writes a file of its own, at the end of each step. A step ends with each ``step()``
        of the first optimizer that was stepped. Nothing is sent to other processes.

        Recorded are batches, inputs and outputs of modules, losses, gradients after each backward
        pass and at the step, options of optimizers, parameters, buffers and optimizer states after
        the step, and random states.

        Args:
            folder: the folder to write to, which has no fingerprint yet.
            every: records the steps whose numbers are divisible by it.
            detail: ``"steps"`` leaves out the inputs and outputs of modules.
            first_step: the number of the first step, for a run that resumes at that step.

        Raises:
            ConfigurationError: an argument is out of range.
            UsageError: another fingerprint is active; or the folder has a fingerprint, or rank 0
                cannot write to it.
            OSError: this process cannot write its file.
        """
        from fabric.tools.fingerprint import fingerprint  # imported late: few programs need it

        session = self._ensure_session("fingerprint")
        return fingerprint(session, folder, every=every, detail=detail, first_step=first_step)

    def timings(self) -> "Timings":
        """Return the time per phase of the latest steps. Collective.

        The result names the rank that the other ranks wait for.

        Steps are measured only under ``Fabric(timings=True)``. See
        :class:`fabric.tools.timeline.Timings`.
        """
        from fabric.tools.timeline import timings  # imported late: few programs need it

        return timings(self._ensure_session("timings"))

    def print(self, *args: Any, all_ranks: bool = False, **kwargs: Any) -> None:
        """Print on the first process. Collective with ``all_ranks``.

        Args:
            *args: the arguments of ``print``.
            all_ranks: whether the first process prints the texts of all processes, by rank, with
                the rank before each line.
            **kwargs: the keyword arguments of ``print``.
        """
        if all_ranks:
            print_texts_of_ranks(self._communicator("print"), args, kwargs)
        elif self._is_rank0_or_launcher():
            print(*args, **kwargs)

    def progress(
        self, batches: Iterable[T], desc: str = "", metrics: Metrics | None = None
    ) -> Iterable[T]:
        """Iterate over batches and write a progress line on the first process.

        The line goes to standard error. In a terminal and a notebook the line is overwritten.
        Elsewhere a new line follows every 30 s. The line shows the position in the loop, the
        metrics, the samples per second of all processes, the time left and the peak memory. The
        samples are counted by dim 0 of the first tensor of a batch. A set-up loader whose position
        was loaded counts on from that position.

        Args:
            batches: a loader, or any iterable.
            desc: the beginning of the line.
            metrics: a mapping of names to numbers, or a function that returns one. The
                numbers are read only when a line is written. Reading a tensor waits for its device.

        Returns:
            An iterable over the same batches.
        """
        # None if this process reads all of the data.
        sampler_kwargs = self._ensure_session("progress").strategy.distributed_sampler_kwargs
        num_replicas = 1
        if sampler_kwargs is not None:
            num_replicas = sampler_kwargs["num_replicas"]
        return Progress(
            batches,
            description=desc,
            metrics=metrics,
            num_replicas=num_replicas,
            is_shown=self._is_rank0_or_launcher(),
        )

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has the method, on this process.

        The callbacks are called in the order in which they were passed.

        Args:
            hook_name: the name of the method.
            *args: the arguments of the method.
            **kwargs: the keyword arguments of the method.
        """
        for callback in self._callbacks:
            hook = getattr(callback, hook_name, None)
            if hook is not None:
                hook(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Pass one metric to every logger, on the first process only.

        Args:
            name: the name of the metric.
            value: a number, or a tensor of one element. Reading a tensor waits for its device.
            step: the training step, or None.
        """
        # Do not call log_dict() here. The warning that there is no logger points at the line that
        # is a fixed number of calls up the stack.
        if self._is_rank0_or_launcher():
            self._loggers.log_metrics({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass metrics to every logger, on the first process only.

        Args:
            metrics: names, and numbers or tensors of one element. Reading a tensor waits for its
                device.
            step: the training step, or None.

        Raises:
            ArgumentTypeError: a value is neither a number nor a tensor of one element.
        """
        if self._is_rank0_or_launcher():
            self._loggers.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any) -> None:
        """Pass the hyperparameters of the run to every logger that takes them, on rank 0 only.

        Args:
            params: a mapping, or an object whose attributes are the parameters, such as
                ``argparse.Namespace``.
        """
        if self._is_rank0_or_launcher():
            self._loggers.log_hyperparams(params)

    def add_logger(self, logger: Any) -> None:
        """Log to one more logger from now on.

        Call it before the launch, or in every process of a launched job.

        Args:
            logger: a logger; see :mod:`fabric.loggers`.

        Raises:
            ArgumentTypeError: the object is not a logger.
        """
        self._loggers.add(logger)
        if self._session is not None:
            # The logger's library, such as W&B, may have added an exit handler that ends the run.
            # Register again, so that this Fabric closes before, and can still report its status.
            self._register_exit_handler()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a started rank gets, when the launcher pickles this object.

        The attributes include those of a subclass. The session and the launcher stay in the
        launching process, and the launcher may not be picklable. The Fabric of a rank is open.
        """
        plan = replace(self._plan, launcher=InlineLauncher())
        return {**vars(self), "_plan": plan, "_session": None, "_is_closed": False}

    def _join_job(self, world: World | None, debugged: DebuggedRank | None = None) -> None:
        """Connect a process that a function launcher has started to the job. Collective.

        Args:
            world: the place of this process in the job. None if the environment contains no
                rank, in which case this method raises.
            debugged: the rank that is debugged, or None.
        """
        self._plan = replace(self._plan, world=world)
        if debugged is not None and world is not None:
            self._begin_debugging(debugged, world)
        self._ensure_session("launch")  # connects this process to the others
        # Repeat the call that the launching process made before this process existed.
        if self._seeding is not None:
            self.seed_everything(
                self._seeding.seed,
                workers=self._seeding.workers,
                per_rank=self._seeding.per_rank,
            )

    def _ensure_session(self, method_name: str) -> Session:
        """Return the session. The first call begins the session, and is collective.

        A session exists only in a rank of the job: a process that is the whole job, or a process
        that a launcher has started.

        Args:
            method_name: the name of the method that needs the session, for errors.

        Raises:
            UsageError: the processes are not started yet, or the Fabric is closed.
        """
        if self._session is None:
            world = self._plan.world
            if self._is_closed or world is None:
                raise self._not_running_error(method_name)
            self._session = Session(
                self._plan,
                world,
                check_training=self._should_check_training,
                check_replicas=self._check_replicas,
            )
            if self._should_measure_timings:
                from fabric.tools.timeline import Timeline  # imported late: few programs need it

                self._session.attach(Timeline(self._session))
            self._register_exit_handler()
        return self._session

    def _checkpoint_coordinator(
        self, method_name: str
    ) -> AbstractContextManager["CheckpointCoordinator"]:
        """Return the context of ``save`` and ``load``. Its value saves and loads checkpoints.

        ``method_name`` is the name of the method, for errors and hang reports.
        """
        return self._ensure_session(method_name).checkpoint_coordinator(phase=method_name)

    @contextmanager
    def _ending_session(self) -> Iterator[None]:
        """End the session after the block. A later ``launch`` begins a new session.

        A job that ``launch`` runs in this process ends with its function, as jobs in started
        processes do. The Fabric stays open.
        """
        try:
            yield
        except BaseException as error:
            if self._session is not None:
                self.strategy.on_exception(error)
            raise
        finally:
            # None if the function has called teardown().
            if self._session is not None:
                session = self._session
                self._session = None
                session.close()

    def _not_running_error(self, method_name: str) -> UsageError:
        """Return the error of a method that needs a session, after teardown or before launch."""
        if self._is_closed:
            return UsageError(
                f"fabric.{method_name}",
                problem="teardown() has closed this Fabric",
                suggestion="a new Fabric(...)",
            )
        return UsageError(
            f"fabric.{method_name}",
            problem=f"this Fabric is for {self.world_size} processes, and they are not connected "
            "before launch()",
            expected="calls that need a device or other ranks come after fabric.launch()",
            suggestion="fabric.launch() right after Fabric(...); or fabric.launch(train) with "
            "def train(fabric): ..., which a notebook needs",
        )

    def _communicator(
        self, method_name: str, group: Group = None, op: Reduce | None = None
    ) -> Communicator:
        """Return the collectives over ``group``, or over the whole job if ``group`` is None.

        Args:
            method_name: the name of the method that needs the collectives, for errors.
            group: a result of :meth:`new_group`, a process group of torch, or None.
            op: the reduction. For a sum or product over the whole job, the communicator has one of
                the ranks that hold the same samples. None for methods without a reduction.
        """
        return self._ensure_session(method_name).strategy.communicator(group, op)

    def _connected_world(self, method_name: str) -> World:
        """Return the place of this process in the job. Raise in a process that is no rank."""
        if self._plan.world is None:
            raise self._not_running_error(method_name)
        return self._plan.world

    def _is_rank0_or_launcher(self) -> bool:
        """Return whether this process is rank 0, or the process that will start the ranks."""
        return self._plan.world is None or self._plan.world.rank == 0

    def _register_exit_handler(self) -> None:
        """Have the interpreter close this Fabric before it calls exit handlers set so far.

        Handlers run in reverse order. So a second call registers the handler anew, as the latest.
        """
        atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Close this Fabric when the interpreter exits, if the user did not call ``teardown``."""
        # Python sets sys.last_value when an uncaught exception ends the program.
        has_uncaught_exception = getattr(sys, "last_value", None) is not None
        if has_uncaught_exception and self._session is not None:
            # The other ranks may be in a collective that this rank will never call. Closing would
            # wait for them. abort() drops the connections without waiting.
            self._session.runtime.abort()
        try:
            # This method of the loggers prints errors: a logger must not change the exit code.
            self._close(self._loggers.close_at_exit)
        except BaseException:
            # An exception in an exit handler does not change the exit code. This call has the
            # process end with code 120 after the other exit handlers.
            exit_with_late_error()
            raise


# The names of the arguments of Fabric, for errors.
_ARGUMENTS = inspect.getfullargspec(Fabric.__init__).kwonlyargs


def _loss_error(loss: Any) -> ArgumentTypeError | UsageError:
    """Return the error for an argument of ``backward`` that has no gradient.

    The argument is not a tensor, was not computed from a parameter, or has several elements.
    """
    request = f"fabric.backward({type(loss).__name__})"
    if not isinstance(loss, Tensor):
        suggestion = "fabric.backward(loss) with the tensor itself, before loss.item()"
        if hasattr(loss, "loss") or isinstance(loss, Mapping):
            suggestion = "fabric.backward(output.loss), or output['loss'], with the tensor"
        return ArgumentTypeError(
            request,
            problem="the loss is not a tensor",
            expected="a tensor with one element",
            suggestion=suggestion,
        )
    if not loss.requires_grad:
        return UsageError(
            request,
            problem="the loss was not computed from a parameter that requires a gradient",
            expected="a loss of the model's output, and a parameter that is not frozen",
            suggestion="fabric.backward(loss_function(model(batch), target)), computed outside of "
            "torch.no_grad(), and without detach(), item() or argmax()",
        )
    return UsageError(
        request,
        problem=f"the loss has {loss.numel()} elements",
        expected="a tensor with one element",
        suggestion="fabric.backward(loss.mean()), or fabric.backward(loss.sum(), "
        "weight=loss.numel())",
    )


def _require_interval(check_replicas: object) -> None:
    """Raise a ConfigurationError unless ``check_replicas`` is a bool or an integer from 0."""
    if not isinstance(check_replicas, int) or check_replicas < 0:
        raise ConfigurationError(
            f"Fabric({check_replicas=})",
            expected="True to compare in each save; a number n of at least 1 to compare also after "
            "every n backward passes; or False",
        )


def _single_or_tuple(*results: Any) -> Any:
    """Return a single result itself, and several as a tuple. A result that is None is left out."""
    results = tuple(result for result in results if result is not None)
    if len(results) == 1:
        return results[0]
    return results


def _require_callable_in_ranks(
    fabric: Fabric, function_and_args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise an ArgumentTypeError if ``launch`` cannot call its function, before it starts ranks.

    Args:
        fabric: the Fabric, which is the first argument of the function.
        function_and_args: the positional arguments of ``launch``.
        kwargs: the keyword arguments of ``launch``.
    """
    function, *args = function_and_args
    if not callable(function):
        raise ArgumentTypeError(
            f"fabric.launch({function!r})",
            problem=f"an object of type {type(function).__name__} is not a function",
            suggestion="fabric.launch(train, 1, 2), not fabric.launch(train(fabric, 1, 2))",
        )
    name = getattr(function, "__name__", repr(function))
    kind = ""
    if inspect.iscoroutinefunction(function):
        kind = "async"
    elif inspect.isgeneratorfunction(function):
        kind = "a generator"
    if kind:
        raise ArgumentTypeError(
            f"fabric.launch({name})",
            problem=f"{name} is {kind}, so that calling it would run nothing",
            expected="a function that returns when the training is over",
            suggestion=f"def main(fabric): asyncio.run({name}(fabric)) for async code, or a loop "
            f"over {name}(fabric) for a generator",
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C has no signature to check
        return
    try:
        signature.bind(fabric, *args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(
            f"fabric.launch({name}, ...)",
            problem=f"{name}{signature} does not take these arguments: {error}",
            expected="the Fabric as the first argument, and then those of launch()",
            suggestion=f"def {name}(fabric, ...)",
        ) from None


def _without_schedulers(optimizers: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``setup`` that are not schedulers, which need no setup."""
    return [argument for argument in optimizers if not isinstance(argument, LRScheduler)]


def _return_none(fabric: Fabric) -> None:
    """Stand in for the user's function in a ``launch()`` that only connects the processes."""


def _run_in_rank(
    fabric: Fabric,
    debugged: DebuggedRank | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a function in a process that a launcher has started. The launcher calls this.

    Args:
        fabric: the copy of the user's Fabric that this process has received. Only with
            ``debugged.is_here`` under ``"fork"`` it is the user's own object.
        debugged: the rank that is debugged, or None.
        function: the user's function, or :func:`_train`, which calls the user's function.
        args: the positional arguments of the function, after the fabric.
        kwargs: the keyword arguments of the function.
    """
    attributes_before_job = dict(vars(fabric))
    # Before this call, the launcher has set the variables of this process's rank.
    fabric._join_job(World.from_env(os.environ), debugged)
    try:
        with fabric:
            return function(fabric, *args, **kwargs)
    finally:
        # The process that called launch() has run rank 0, and goes on after launch(). The user's
        # own Fabric becomes what it was before, since the `with` block has closed it.
        if debugged is not None and debugged.is_here:
            vars(fabric).update(attributes_before_job)


def _train(
    fabric: Fabric,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    returns_result: bool,
) -> TrainedResult:
    """Call the user's function, and return the weights of the modules among its arguments.

    Collective, since the weights of a sharded module are gathered.

    Args:
        fabric: the Fabric of this process.
        function: the function that the user passed to ``launch``.
        args: the positional arguments of the function, after the fabric.
        kwargs: the keyword arguments of the function.
        returns_result: whether to return the result of the function. A result that is not wanted
            may not be picklable.

    Raises:
        UsageError: the function has closed the Fabric, and with it the process group.
    """
    modules = modules_among(args, kwargs)
    result = function(fabric, *args, **kwargs)
    if fabric._is_closed:
        raise UsageError(
            "launch(..., return_weights=True)",
            problem="the function has called fabric.teardown(), after which no weights can be "
            "gathered",
            suggestion="no teardown() in the function: launch() closes what the function has used",
        )
    if not returns_result:
        result = None
    return TrainedResult(result, [fabric.get_state_dict(module) for module in modules])


def _take_weights(modules: Sequence[nn.Module], outcome: Any) -> Any:
    """Load the weights that ranks have trained, and return the results of the user's function.

    Args:
        modules: the modules of this process that get the weights.
        outcome: the result of rank 0, or a list of the results of all ranks.
    """
    if isinstance(outcome, list):
        load_weights(modules, outcome[0].weights)
        return [trained.result for trained in outcome]
    load_weights(modules, outcome.weights)
    return outcome.result


def _gather_results(communicator: Communicator, result: Any) -> list[Any]:
    """Return the results of all ranks by rank, in a job that is running. Collective.

    Results are pickled as in a launch, with tensors on the CPU. In a job of one process, the result
    is not copied.

    Raises:
        FabricError: the result of a rank does not pickle. Every rank raises the error.
    """
    if communicator.size == 1:
        return [result]
    pickled_result = b""
    error = None
    try:
        pickled_result = dump_result(result)
    except ArgumentTypeError as caught:
        error = caught  # this rank takes part in the collective, which raises on every rank
    pickled_results = communicator.gather_objects(pickled_result, error=error)
    return list(map(load, pickled_results))


def _launch_on_call(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the ``run`` method of a subclass, so that calling the method launches the job.

    The wrapper runs twice. The user's call has no session, and passes the wrapper to ``launch``. In
    each rank, ``launch`` begins the session and calls the wrapper, which calls ``run``.
    """

    @functools.wraps(run)
    def launch_or_run(self: Fabric, *args: Any, **kwargs: Any) -> Any:
        """Call ``run`` in a rank whose session is running. Launch the job otherwise."""
        if self._session is not None:
            return run(self, *args, **kwargs)
        # Not `run`: functions are pickled by name, and under this name the class has the wrapper.
        # launch() passes the Fabric as the first argument.
        return self.launch(launch_or_run, *args, **kwargs)

    return launch_or_run
