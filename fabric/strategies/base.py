"""The interface of strategies.

[Note: Modules] The *user's module* is what was passed to ``setup``; the *prepared module* is what
:meth:`Strategy.setup_module` made of it, and what forward passes go through. They may be the same object.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._torch import COMPILED_MODULE
from fabric.accelerators import ACCELERATORS, Accelerator, AcceleratorName
from fabric.collectives import all_gather, all_reduce, broadcast
from fabric.communicators import Communicator, NonMember, Reduce
from fabric.diagnostics.bypass import GradientContract
from fabric.environments import Environment, detect
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.precision import PRECISIONS, Precision, PrecisionName, parse_precision
from fabric.runtime import DEFAULT_TIMEOUT, Runtime
from fabric.strategies.init_module import created_on
from fabric.tree import to_device
from fabric.world import World

__all__ = ["Group", "Strategy", "uncompiled", "without_sync"]

M = TypeVar("M", bound=nn.Module)
Group = Communicator | dist.ProcessGroup | NonMember | None


class Strategy(ABC):
    """What is done to a module so that it trains on the devices of a job, and the collectives over them.

    Options go to the constructor. The one late attribute is :attr:`runtime`, which :meth:`setup_environment` sets.

    Args:
        accelerator: hardware, if it is to be fixed here; else that of ``Fabric``.
        parallel_devices: the devices of this node, likewise.
        cluster_environment: the environment that says which rank this is, likewise.
        checkpoint_io: format that ``save`` and ``load`` use in place of the strategy's own.
        precision: precision, likewise; an object with an attribute ``precision`` stands for its value.
        precision_plugin: older name of ``precision``.
        process_group_backend: ``"gloo"``, ``"nccl"`` or another backend of torch; None for the device's default.
        timeout: how long a collective may wait.
        start_method: ``"popen"`` re-runs the script; ``"spawn"``, ``"fork"`` and ``"forkserver"`` run a function.
        num_nodes: number of nodes of the job.
    """

    name: ClassVar[str]
    # Capabilities, which the layers above read in place of the type: whether the processes of the job communicate,
    # and whether one process drives all devices of its node.
    connects_processes: ClassVar[bool] = False
    drives_all_devices: ClassVar[bool] = False
    # The type of a prepared module, where that is not the user's own.
    _wrapper: ClassVar[type[nn.Module] | tuple[()]] = ()

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | PrecisionName | None = None,
        *,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        num_nodes: int = 1,
    ) -> None:
        if isinstance(checkpoint_io, type) or (checkpoint_io is not None and not hasattr(checkpoint_io, "save")):
            problem = "it is no object with save, load, remove and wait, such as fabric.checkpoint.FullCheckpoint()"
            raise ArgumentTypeError(f"checkpoint_io={checkpoint_io!r}", problem)
        self.accelerator = accelerator
        self.parallel_devices = None if parallel_devices is None else tuple(map(torch.device, parallel_devices))
        self.cluster_environment = cluster_environment
        self.checkpoint_io = checkpoint_io
        given: list[Any] = [precision] if precision_plugin is None else [precision_plugin, precision]
        parsed = [parse_precision(getattr(one, "precision", one)) for one in given if one is not None]
        if parsed[1:] and parsed[0] != parsed[1]:
            raise ConfigurationError(f"{precision_plugin=}, {precision=}", "the two differ")
        self.precision = self._own_precision = parsed[0] if parsed else None
        self.process_group_backend, self.timeout = process_group_backend, timeout
        self.start_method, self.num_nodes = start_method, num_nodes
        # Whether a checkpoint is a folder into which each rank writes what it holds, where no format was chosen.
        self.saves_shards = False
        self._runtime: Runtime | None = None

    # -- the life of a process ------------------------------------------------------------------------------------

    def check(self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int) -> None:
        """Raise a ConfigurationError when this strategy cannot run there; called before any process starts."""

    def setup_environment(self, runtime: Runtime | None = None) -> None:
        """Start the runtime: activate the device and connect to the other processes.

        Collective when the processes communicate.

        Args:
            runtime: what ``Fabric`` resolved; None builds one from the constructor's arguments.

        Raises:
            UsageError: it has been started already.
        """
        if self._runtime is not None:
            problem = "it has been started already; each Fabric needs a strategy of its own"
            raise UsageError(f"{type(self).__name__}.setup_environment()", problem)
        if runtime is None:
            runtime = self._own_runtime()
            world = runtime.world
            if world.world_size > 1 and not self.connects_processes:
                problem = f"{world.world_size} processes (this is rank {world.rank}) would each train on their own"
                raise ConfigurationError(f"{type(self).__name__} without Fabric", problem, "one process or DDPStrategy")
        runtime.start()
        self._runtime = runtime
        self.precision = runtime.precision

    def teardown(self) -> None:
        """Close the runtime and release what belongs to it; calling it again does nothing."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
            self.precision = self._own_precision  # another Fabric may have another one

    def on_exception(self, exception: BaseException) -> None:
        """Called when the user's loop raises: adds the hint that fits, and disconnects from the other ranks."""
        self._explain(exception)
        if self._runtime is not None:
            self._runtime.abort()

    def _explain(self, exception: BaseException) -> None:
        """Add a note to an error of torch that says what to do about it, where this strategy knows."""

    @property
    def runtime(self) -> Runtime:
        """The runtime of this process.

        Raises:
            UsageError: there is none yet, or no longer.
        """
        if self._runtime is None:
            problem = "it has not been started, or has been closed by teardown()"
            suggestion = "fabric.launch() first; or strategy.setup_environment() for a strategy used on its own"
            raise UsageError(f"the runtime of {type(self).__name__}", problem, suggestion=suggestion)
        return self._runtime

    @property
    def _current_runtime(self) -> Runtime:
        """The runtime; before it is started one of this process alone, where nothing is distributed."""
        if self._runtime is None and not dist.is_initialized():
            own = self._own_runtime()
            if own.world.world_size == 1:
                return own
        return self.runtime

    @property
    def root_device(self) -> torch.device:
        """The device of this process; before :meth:`setup_environment` the one of ``parallel_devices`` it will be."""
        if self._runtime is None and self.parallel_devices:
            return self._own_runtime().device
        return self.runtime.device

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes of the job."""
        return self.runtime.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of its node."""
        return self.runtime.world.local_rank

    @property
    def node_rank(self) -> int:
        """Number of the node of this process."""
        return self.runtime.world.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.runtime.world.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process of all nodes."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether the processes of the job communicate, be it only one."""
        return self.connects_processes or (self._runtime is not None and self.world_size > 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Which share of the data is this process's, as ``num_replicas`` and ``rank``; None for all of it."""
        if self.drives_all_devices or self.world_size == 1:
            return None
        batches = self._summing(is_batch=True)
        return {"num_replicas": batches.size, "rank": batches.rank}

    # -- modules and optimizers -----------------------------------------------------------------------------------

    def module_to_device(self, module: M) -> M:
        """Move a module's parameters and buffers to this process's device, in place; returns the module."""
        return module.to(self.root_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Move the tensors of any collection to ``device``, or to this process's; see :func:`fabric.tree.to_device`."""
        return to_device(batch, self.root_device if device is None else device)

    def check_setup(self, module: nn.Module | None, optimizers: Sequence[Optimizer] = ()) -> None:
        """Raise for what this strategy cannot set up; called before anything changes. May be collective.

        Args:
            module: the user's module that is about to be set up; None if there is none.
            optimizers: those that are about to be set up, together with the module if there is one.
        """

    @abstractmethod
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Make the prepared module of a user's module that is on its device already; may be collective."""

    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        """How the gradients of a prepared module are synchronized; what diagnostics read."""
        module = self._users(prepared)
        return GradientContract(
            module=module,
            title=type(module).__name__,
            parameters=lambda: dict(module.named_parameters()),
            join=self._join,
            explain=self._explain,
        )

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        """Attach to an optimizer what has to happen around its step."""

    def module_init_context(self, empty_init: bool = False, source: str = "every_rank") -> AbstractContextManager[Any]:
        """A context in which modules are created on the right device, in the dtype of the precision.

        Args:
            empty_init: fill parameters with nan, for a model that a checkpoint fills.
            source: ``"every_rank"`` or ``"rank0"``, which are the same but for a strategy that shards; see
                :meth:`fabric.Fabric.init_module`.

        Raises:
            ConfigurationError: another source.
        """
        if source not in ("every_rank", "rank0"):
            raise ConfigurationError(f"init_module(source={source!r})", expected='"every_rank" or "rank0"')
        return self._building(empty_init, source)

    def _building(self, empty: bool, source: str) -> AbstractContextManager[Any]:
        """:meth:`module_init_context` of this strategy."""
        return created_on(self.root_device, self.runtime.precision.param_dtype, empty)

    def get_module_state_dict(self, module: nn.Module, *, sharded: bool = False) -> dict[str, Any]:
        """The state dict of a prepared or user's module under the user's own names; may be collective.

        Args:
            module: the module.
            sharded: give sharded parameters as DTensors, which is never a collective. The tensors are those of the
                module, not copies. Else they are full tensors, complete on every rank.
        """
        state = self._users(module).state_dict()
        return state if sharded else self.full_state(state)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load what :meth:`get_module_state_dict` returned, sharded or full, into a prepared or user's module."""
        self._users(module).load_state_dict(state_dict, strict=strict)

    def _users(self, module: nn.Module) -> nn.Module:
        """The user's module inside of a prepared one; a wrapper of the user's own belongs to it."""
        return uncompiled(module.module if isinstance(module, self._wrapper) else module)

    def full_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with full tensors in the place of sharded ones, complete on every rank; may be collective."""
        return state

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load an optimizer's ``state_dict()``, or what :meth:`full_state` of any strategy makes of it."""
        optimizer.load_state_dict(dict(state_dict))

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, model: Any = None, **kwargs: Any
    ) -> Any:
        """Perform ``optimizer.step(closure, **kwargs)`` and return what it returned."""
        return optimizer.step(**kwargs) if closure is None else optimizer.step(closure, **kwargs)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """A context that skips the synchronization of gradients, for all micro-batches of an accumulation but the last.

        It has to cover the forward pass and the backward pass. Nothing is skipped when ``enabled`` is false, or where
        there is nothing to synchronize.
        """
        return nullcontext()

    def _join(self, modules: Sequence[nn.Module], divide_by_all: bool) -> AbstractContextManager[Any] | None:
        """:attr:`fabric.diagnostics.bypass.GradientContract.join` of this strategy."""
        if self.world_size == 1:
            return None
        raise UsageError(
            f"fabric.join(...) with {type(self).__name__} on rank {self.global_rank}",
            "a forward pass, a backward pass or a step needs all ranks, and one without batches makes none",
            'strategy="ddp" and modules with trainable parameters, without model_averaging_period and sync_batchnorm',
            'setup_dataloaders(loader, uneven="drop") or "pad"; "shortest" or "longest" for data fabric does not shard',
        )

    def block_backward_sync(self, module: nn.Module | None = None, enabled: bool = True) -> AbstractContextManager[Any]:
        """Older name of :meth:`no_backward_sync`; without a module for every one that is set up."""
        return without_sync(self, self._prepared if module is None else [module], enabled)

    @property
    def _prepared(self) -> Sequence[nn.Module]:
        """The prepared modules that this strategy synchronizes, the last one last."""
        return []

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, collection: Any, group: Group = None, reduce_op: Any = "mean") -> Any:
        """Reduce every tensor of a collection over processes; numbers are returned unchanged.

        Collective over the group, None for all of the job. ``reduce_op`` is ``"mean"``/``"avg"``, ``"sum"``, ``"min"``,
        ``"max"``, ``"product"``, ``"band"``, ``"bor"``, ``"bxor"`` or a torch ``ReduceOp``. Returns a new collection of
        the same structure, shapes and dtypes. See :func:`fabric.collectives.all_reduce`.
        """
        return all_reduce(self.communicator(group, op := Reduce(reduce_op)), collection, op, numbers=False)

    def reduce(self, tensor: Tensor, group: Group = None, reduce_op: Any = "mean") -> Tensor:
        """:meth:`all_reduce` of a single tensor."""
        return self.all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Group = None, sync_grads: bool = False) -> Any:
        """Collect a tensor of shape ``s`` from all processes into ``(size, *s)``, in rank order.

        Collective over the group. See :func:`fabric.collectives.all_gather`.
        """
        return all_gather(self.communicator(group), tensor, sync_grads=sync_grads)

    def broadcast(self, obj: Any, src: int = 0, group: Group = None) -> Any:
        """Send any object from rank ``src`` of a group to all of it; tensors as tensors. Collective over the group."""
        return broadcast(self.communicator(group), obj, src, self._current_runtime.device)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until every process calls it. Collective over the group.

        Args:
            *args: ``name``, a text that appears in the error when a process does not call it, and ``group``. Other
                objects are accepted and mean nothing.
            **kwargs: the same by keyword.
        """
        name, group = (*args, None, None)[:2]
        name, group = kwargs.get("name", name), kwargs.get("group", group if isinstance(group, Group) else None)
        self.communicator(group).barrier(name if isinstance(name, str) else None)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes decided so, or with ``all=False`` any of them. Collective."""
        return all_reduce(self.communicator(), bool(decision), Reduce.MIN if all else Reduce.MAX)

    def communicator(self, group: Group = None, op: Reduce | None = None) -> Communicator:
        """The collectives over a group: a communicator, a process group of torch, or None for all processes.

        With an ``op`` those of a reduction: in a sum, what several ranks have of the same batch counts once.

        Raises:
            UsageError: it is no group, or this process is not a member.
        """
        if group is None:
            return self._summing() if op in (Reduce.SUM, Reduce.PRODUCT) else self._current_runtime.communicator
        if isinstance(group, Communicator):
            return group
        if isinstance(group, dist.ProcessGroup):
            return self.runtime.communicator_over(group)
        request = f"a collective with group={group!r} on rank {self.global_rank}"
        problem = "it is no group, or this process is not a member of it"
        expected = "what fabric.new_group(ranks) returned on its members, a torch ProcessGroup, or None for all ranks"
        suggestion = "if group: ... around it (torch's own groups: if dist.get_rank(group) >= 0: ...)"
        with suppress(ConfigurationError):  # the second argument of torch's all_reduce is the reduction
            suggestion = f'fabric.all_reduce(x, reduce_op="{Reduce(group).value}")'
        raise UsageError(request, problem, expected, suggestion)

    def _summing(self, is_batch: bool = False) -> Communicator:
        """The ranks that have data of their own; with ``is_batch`` those with other batches, not parts of the same."""
        return self.communicator()

    def _agree_on_streams(self, *_: object) -> None:
        """Have ranks that compute parts of the same go on with the same random streams. Collective among these."""

    def _own_runtime(self) -> Runtime:
        """The runtime of a strategy that is used without Fabric, not started."""
        kind = self.accelerator or (self.parallel_devices[0].type if self.parallel_devices else "cpu")
        accelerator = ACCELERATORS[kind]() if isinstance(kind, str) else kind
        found = detect(os.environ, None if self.cluster_environment is None else [self.cluster_environment])
        return Runtime(
            world=World() if found is None else found[1],
            accelerator=accelerator,
            devices=self.parallel_devices or accelerator.parse_devices("auto"),
            precision=self.precision or PRECISIONS["32-true"],
            connected=self.connects_processes,
            backend=self.process_group_backend,
            timeout=self.timeout,
        )


def uncompiled(module: Any) -> nn.Module:
    """The module inside of a ``torch.compile(module)``; any other module itself."""
    return module._modules.get(COMPILED_MODULE, module)


@contextmanager
def without_sync(strategy: Strategy, modules: Sequence[nn.Module], enabled: bool) -> Iterator[None]:
    """``no_backward_sync`` for several prepared modules."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(strategy.no_backward_sync(module, enabled))
        yield
