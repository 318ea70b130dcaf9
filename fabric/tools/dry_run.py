"""A dry run: the memory and the collectives of a training step on one rank, without the job."""

import inspect
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._fabric import Fabric
from fabric._plan import parse_size, parse_strategy
from fabric._torch import DispatchMode, FakeTensor, local_tensor
from fabric.accelerators import ACCELERATORS, AcceleratorName
from fabric.errors import ConfigurationError
from fabric.precision import Precision, PrecisionName, parse_precision
from fabric.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyName,
)
from fabric.strategies.fsdp.wrapping import find_fsdp_modules
from fabric.strategies.standalone import Strategy
from fabric.tools._torch import (
    FakeTensorMode,
    IssuedCollective,
    Rank0Chunks,
    collective_of,
    fake_ranks,
    run_fake,
)
from fabric.tree import PLAIN_TENSOR_TYPES, flatten, parameters_of
from fabric.world import World

__all__ = ["DryRun", "Traffic", "plan"]

# A dry run makes three steps. In step 0, optimizers make their state, and DTensor works out its
# operations with tensors of the full shape. In step 1, DDP makes its buckets. Later steps are like
# step 2. The peak is that of steps 1 and 2, and the traffic that of step 2.
_STEPS = 3
_FIRST_STEP_OF_PEAK = 1
# Fabric's names of collectives.
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")

_UNSHARDED = "unsharded parameters"
# The kind of memory until another kind is known.
_ACTIVATIONS = "activations and others"


class Traffic(NamedTuple):
    """The collectives of one kind that a rank issues in a step.

    Attributes:
        operation: the name of the collective, such as ``"all_gather"``.
        axis: the ranks that take part: ``"world"`` for all, else the name of a dimension of the
            mesh, such as ``"shards"``.
        ranks: the number of ranks that take part.
        calls: the number of calls.
        nbytes: the bytes of all messages together. The message of a gather is its output on a rank,
            and the message of a reduction is its input.
    """

    operation: str
    axis: str
    ranks: int
    calls: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of :func:`plan`. As text it is a table.

    Attributes:
        title: the strategy, the precision and the size of the job.
        peak: bytes by kind of memory on the rank that needs most, at the time when their sum is
            largest.
        traffic: the collectives of a step.
        memory: bytes that a rank has. None if it was not given.
        alternatives: if the memory is too small, the results for other strategies, by the code to
            write for the strategy. They end with the first strategy that fits.
    """

    title: str
    peak: Mapping[str, int]
    traffic: tuple[Traffic, ...]
    memory: int | None = None
    alternatives: Mapping[str, "DryRun"] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs most, in bytes."""
        return sum(self.peak.values())

    @property
    def fits(self) -> bool:
        """Whether the memory of a rank is large enough, or unknown."""
        return self.memory is None or self.peak_bytes <= self.memory

    def __str__(self) -> str:
        """Return a table: the kinds of memory, the collectives and the alternatives."""
        lines = [f"{self.title}: {self._verdict}"]
        for kind, nbytes in self.peak.items():
            if nbytes:
                lines.append(f"  {kind:<36}{_with_unit(nbytes):>12}")
        for traffic in self.traffic:
            label = f"{traffic.calls} {traffic.operation} over {traffic.ranks} ({traffic.axis})"
            lines.append(f"  {label:<36}{_with_unit(traffic.nbytes):>12} a step")
        for code, alternative in self.alternatives.items():
            lines.append(f"{code}: {alternative._verdict}")
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        """The peak memory as text and, if the memory of a rank is known, whether it suffices."""
        verdict = f"{_with_unit(self.peak_bytes)} a rank"
        if self.memory is None:
            return verdict
        relation = "within" if self.fits else "more than"
        return f"{verdict}, {relation} {_with_unit(self.memory)}"


def plan(
    build: Callable[[Fabric], Any],
    step: Callable[..., Any],
    *,
    world: int = 1,
    strategy: Strategy | StrategyName = "auto",
    memory: int | str | None = None,
    num_nodes: int = 1,
    precision: Precision | PrecisionName | None = None,
    accelerator: AcceleratorName = "cuda",
) -> DryRun:
    """Plan what a training step needs on each rank of a job, in one process and on the CPU.

    ``build`` and ``step`` see a :class:`fabric.Fabric` that is rank 0 of the job, on the CPU.
    Nothing is computed and no memory is needed: tensors have no values. A value that is read, by
    ``.item()`` or an ``if``, is 1. The numbers are those of tensors and collectives: workspaces of
    kernels, fragmentation, the device context and NCCL's buffers are not included.

    Args:
        build: ``build(fabric)`` returns the model, or a tuple of the model and its optimizers. They
            are then set up.
        step: ``step(fabric, model, *optimizers)`` makes a training step, and the inputs for it.
        world: number of processes.
        strategy: as for :class:`fabric.Fabric`.
        memory: memory of each device, in bytes or as ``"80GiB"``. If it is too small, strategies
            that need less are tried.
        num_nodes: number of nodes.
        precision: as for :class:`fabric.Fabric`.
        accelerator: the accelerator of the job. Except on ``"cpu"``, torch's optimizers step all
            parameters together (``foreach``), which needs more memory.

    Raises:
        ConfigurationError: the arguments cannot work, or a dry run does not cover them. It covers
            neither ``cpu_offload`` nor ``ddp_comm_hook`` nor a process with several devices.
        ValueError: this process belongs to a job.
    """
    if world % num_nodes:
        raise ConfigurationError(
            f"fabric.plan({world=}, {num_nodes=})", expected="equally many processes on each node"
        )
    if accelerator not in ACCELERATORS:
        raise ConfigurationError(f"fabric.plan({accelerator=})", expected=", ".join(ACCELERATORS))
    _check_build(build)
    memory_bytes: int | None = None
    if memory is not None:
        memory_bytes = parse_size(memory, request=f"fabric.plan({memory=})")
    job = _Job(
        build=build,
        step=step,
        world_size=world,
        num_nodes=num_nodes,
        uses_foreach=accelerator != "cpu",
        memory=memory_bytes,
    )
    requested = parse_strategy(strategy)
    if requested is None:
        requested = DDPStrategy() if world > 1 else SingleDeviceStrategy()
    result, layer_types = job.run(requested, precision)
    if result.fits:
        return result
    alternatives: dict[str, DryRun] = {}
    for alternative in _alternatives(requested, precision, layer_types):
        alternative_result, _ = job.run(alternative.strategy, alternative.precision)
        alternatives[alternative.code] = alternative_result
        if alternative_result.fits:
            break
    return replace(result, alternatives=alternatives)


class _PlannedEnvironment:
    """An environment in which this process is rank 0 of the planned job.

    Args:
        world: the world of the job.
    """

    name = "fabric plan"

    def __init__(self, world: World) -> None:
        self._world = world

    def detect(self, env: Mapping[str, str]) -> World:
        """Return the world of the planned job, whatever the environment is."""
        return self._world


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The planned job, of which rank 0 is run in this process.

    Attributes:
        build: as for :func:`plan`.
        step: as for :func:`plan`.
        world_size: number of processes.
        num_nodes: number of nodes.
        uses_foreach: whether optimizers step all parameters together by default.
        memory: bytes of each device. None if unknown.
    """

    build: Callable[[Fabric], Any]
    step: Callable[..., Any]
    world_size: int
    num_nodes: int
    uses_foreach: bool
    memory: int | None

    def run(
        self, strategy: Strategy, precision: Precision | PrecisionName | None
    ) -> tuple[DryRun, tuple[type[nn.Module], ...]]:
        """Run rank 0, and return the result and the types of the layers that FSDP would wrap.

        Args:
            strategy: the strategy. Each run needs an object of its own, as each Fabric does.
            precision: the precision. None uses the precision of the strategy.

        Raises:
            ConfigurationError: the strategy has an option that a dry run does not cover.
        """
        offloads_to_cpu = (
            isinstance(strategy, FSDPStrategy) and strategy._offload_policy is not None
        )
        if offloads_to_cpu or getattr(strategy, "ddp_comm_hook", None) is not None:
            problem = "a dry run does not cover cpu_offload and ddp_comm_hook yet"
            raise ConfigurationError(f"fabric.plan({strategy=})", problem=problem)
        if precision is None:
            precision = strategy.precision
        precision = parse_precision(precision)
        fabric = self._build_fabric(strategy, precision)
        with fake_ranks(self.world_size) as fake_mode:
            # The modes are entered after launch(), whose messages are not part of a step.
            fabric.launch()
            # The trace is entered last, since the mode that is entered last gets each operation
            # first.
            with fabric, fake_mode, _Trace(fake_mode) as trace:
                layer_types = self._train(fabric, trace)
        title = (
            f"{strategy.name}, {precision.name}, "
            f"{self.world_size} rank(s) on {self.num_nodes} node(s)"
        )
        result = DryRun(
            title=title,
            peak=trace.peak_by_kind(),
            traffic=trace.traffic(),
            memory=self.memory,
        )
        return result, layer_types

    def _build_fabric(self, strategy: Strategy, precision: Precision) -> Fabric:
        """Return a Fabric that is rank 0 of the job, on the CPU, and reads no values of tensors."""
        world = World(
            world_size=self.world_size, local_world_size=self.world_size // self.num_nodes
        )
        return Fabric(
            accelerator="cpu",
            strategy=strategy,
            environment=_PlannedEnvironment(world),
            watchdog=0,  # fake collectives cannot hang
            # The loss scaler and the training checks look at values, which fake tensors lack.
            precision=replace(precision, loss_scale=None),
            check_training=False,
            check_replicas=False,
        )

    def _train(self, fabric: Fabric, trace: "_Trace") -> tuple[type[nn.Module], ...]:
        """Build the model, make ``_STEPS`` steps, and record them in the trace.

        Called with fake ranks, and within the modes of fake tensors and of the trace. Afterwards
        the trace has the collectives of the last step, and the peak of all steps but the first.

        Returns:
            The types of the layers that FSDP would wrap.
        """
        model, *optimizers = _model_and_optimizers(self.build(fabric))
        # setup() may wrap the layers, so their types are found first. A dict keeps each type once,
        # in order.
        layer_types = dict.fromkeys(type(layer) for layer in find_fsdp_modules(model))
        if self.uses_foreach:
            for optimizer in optimizers:
                _use_foreach(optimizer)
        # Rank0Chunks makes the sharding faster.
        with Rank0Chunks():
            # With a scheduler, setup() returns a tuple even if there are no optimizers. Any object
            # serves as the scheduler, since setup() only returns it.
            model, *_ = fabric.setup(model, *optimizers, scheduler="no scheduler")
        trace.set_kind([*model.parameters()], "parameters")
        trace.set_kind([*model.buffers()], "buffers")
        for optimizer in optimizers:
            optimizer.register_step_post_hook(trace.after_step)
        for index in range(_STEPS):
            trace.calls.clear()
            if index <= _FIRST_STEP_OF_PEAK:
                trace.peak = 0  # forgets the peak of the setup or of an earlier step
            self.step(fabric, model, *optimizers)
        return tuple(layer_types)


def _model_and_optimizers(built: Any) -> Sequence[Any]:
    """Return the model that ``build`` has returned, and its optimizers.

    Args:
        built: a model, or a tuple of a model and its optimizers.

    Raises:
        ConfigurationError: ``build`` has returned something else.
    """
    if isinstance(built, nn.Module):
        return [built]
    is_sequence = isinstance(built, tuple | list)
    if is_sequence and built:
        model, *optimizers = built
        has_optimizers = all(isinstance(optimizer, Optimizer) for optimizer in optimizers)
        if isinstance(model, nn.Module) and has_optimizers:
            return built
    type_text = type(built).__name__
    if is_sequence:
        item_types = ", ".join(type(item).__name__ for item in built)
        type_text = f"{type_text} of {item_types or 'nothing'}"
    raise ConfigurationError(
        "fabric.plan(build, step)",
        problem=f"build(fabric) has returned a {type_text}",
        expected="a model, or a tuple of a model and its optimizers",
        suggestion="return model, optimizer, as the last line of build",
    )


def _use_foreach(optimizer: Optimizer) -> None:
    """Have an optimizer step all parameters together, unless the user has chosen otherwise.

    This is torch's default on accelerators. On the CPU of the dry run, torch would step each
    parameter by itself.
    """
    for group in optimizer.param_groups:
        # torch refuses a group with both ``fused`` and ``foreach``.
        if "foreach" not in group or group.get("fused"):
            continue
        is_default = group["foreach"] is None
        if is_default:
            group["foreach"] = True


class _Alternative(NamedTuple):
    """A strategy that may need less memory, and the code to write for it."""

    code: str
    strategy: Strategy
    precision: Precision | PrecisionName | None


def _check_build(build: Callable[[Fabric], Any]) -> None:
    """Raise a ConfigurationError if ``build`` cannot be called with one argument.

    Without this check, a wrong signature would show only during the run.
    """
    try:
        # Called for its error. The argument may be any object.
        inspect.signature(build).bind("fabric")
    except TypeError as error:
        raise ConfigurationError(
            f"fabric.plan({build=})", problem=str(error), expected="build(fabric)"
        ) from error


def _alternatives(
    requested: Strategy,
    precision: Precision | PrecisionName | None,
    layer_types: tuple[type[nn.Module], ...],
) -> Iterator[_Alternative]:
    """Yield strategies, each of which may need less memory than the one before.

    Args:
        requested: the strategy that needs too much memory. A ModelParallelStrategy only gets more
            options. FSDP takes the place of any other strategy.
        precision: the precision that was requested.
        layer_types: the types of the layers that FSDP would wrap, whose activations are recomputed.
            Empty if the model has no repeated layers.
    """
    # A strategy object serves one Fabric, so each alternative has a new object. `base` is never
    # yielded itself, but only copied.
    base: FSDPStrategy | ModelParallelStrategy = FSDPStrategy()
    options: list[str] = []
    if isinstance(requested, ModelParallelStrategy):
        base = requested
        options.append("...")  # stands for the user's options in the suggested code
    else:
        sharded_grads = FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")
        code = 'FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")'
        yield _Alternative(code, sharded_grads, precision)
        yield _Alternative("FSDPStrategy()", copy(base), precision)
    if layer_types:
        names = ", ".join(layer_type.__name__ for layer_type in layer_types)
        options.append(f"activation_checkpointing=[{names}]")
        base = copy(base)  # the user's strategy does not change
        base.activation_checkpointing = layer_types
    code = f"{type(base).__name__}({', '.join(options)})"
    if layer_types:
        yield _Alternative(code, copy(base), precision)
    yield _Alternative(f'{code}, Fabric(precision="bf16-mixed")', copy(base), "bf16-mixed")


@dataclass(eq=False)
class _Storage:
    """A storage of memory that tensors share.

    Attributes:
        storage_ref: a weak reference to torch's storage.
        kind: what the memory is for.
        nbytes: the size that was seen last.
    """

    storage_ref: weakref.ref[Any]
    kind: str = _ACTIVATIONS
    nbytes: int = 0


class _CollectiveKey(NamedTuple):
    """The fields of :class:`Traffic` by which collectives are counted."""

    operation: str
    axis: str
    ranks: int


# [Note: Dry run]
# One process takes the place of rank 0, which has the largest shards. Fabric, the strategy and
# torch run as they are, over tensors without memory and a process group without other ranks, so a
# dry run counts what they allocate and send. A dispatch mode sees every operation, and tracks the
# storages of the tensors. The peak is that of live tensors: workspaces of kernels, fragmentation,
# the device context and NCCL's buffers are not included.
class _Trace(DispatchMode):
    """A mode that follows the memory of tensors, and the collectives.

    Args:
        fake_mode: the mode of fake tensors, which is entered before this one.

    Attributes:
        peak: the largest total bytes of the live tensors. Set it to 0 to begin anew.
        calls: the bytes of each call, by kind of collective. Clear it to begin anew.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        """Start without storages and collectives."""
        super().__init__()
        self._fake_mode = fake_mode
        # By the id() of torch's storage. When torch's storage is freed, _forget() removes the
        # entry.
        self._live_storages: dict[int, _Storage] = {}
        # FSDP resizes the storages of unsharded parameters to free and allocate their memory. No
        # operator shows a resize, so these sizes are read again at each new peak.
        self._unsharded: set[_Storage] = set()
        self._live_nbytes = 0
        self.peak = 0
        # The storages that were live at the peak, with their bytes at that time.
        self._storages_at_peak: list[tuple[_Storage, int]] = []
        # By kind of collective, the bytes of the message of each call.
        self.calls: defaultdict[_CollectiveKey, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors, and record its memory and its collective.

        torch calls this method for every operator while the mode is entered.
        """
        kwargs = kwargs or {}
        # This comes before DTensor is handed its operators below: only here are the arguments
        # still the model's parameters. Later they are local tensors.
        self._track_unsharded(func, args, kwargs)
        for tensor_type in types:
            if tensor_type not in PLAIN_TENSOR_TYPES and not issubclass(tensor_type, FakeTensor):
                # The type is a subclass such as DTensor. After NotImplemented, torch has DTensor
                # run the operator, and DTensor calls operators on local tensors, which come here.
                return NotImplemented
        output = run_fake(self._fake_mode, func, args, kwargs)
        self.track(output)
        collective = collective_of(func, args)
        if collective is not None:
            # The output may be larger than all arguments, as that of a functional all_gather.
            self._count_collective(collective, (*args, output))
        self._update_peak()
        return output

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Set the kinds of memory of gradients and optimizer state.

        torch calls this hook after each ``step()`` of the optimizer.
        """
        gradients = [parameter.grad for parameter in parameters_of(optimizer)]
        self.set_kind(gradients, "gradients")
        # Not set_kind(): a state may share the memory of a parameter, which has to keep its kind.
        self.track([*optimizer.state.values()], "optimizer state")

    def set_kind(self, tree: Any, kind: str) -> None:
        """Set the kind of memory of the tensors in a collection, in place of any earlier kind."""
        for storage in self.track(tree):
            storage.kind = kind

    def track(self, tree: Any, kind: str = _ACTIVATIONS) -> list[_Storage]:
        """Track the storages of the tensors in a collection, and return the storages.

        Args:
            tree: the collection.
            kind: what the memory is for. It replaces only the kind ``_ACTIVATIONS``, which stands
                for memory of unknown kind.
        """
        storages: list[_Storage] = []
        leaves, _ = flatten(tree)
        for leaf in leaves:
            # Only strided tensors have a storage of their own.
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                continue
            torch_storage = local_tensor(leaf).untyped_storage()
            # The id is unique as long as the storage is alive.
            key = id(torch_storage)
            if key not in self._live_storages:
                # Python calls _forget(key, ...) when the storage is freed.
                storage_ref = weakref.ref(torch_storage, partial(self._forget, key))
                self._live_storages[key] = _Storage(storage_ref)
            storage = self._live_storages[key]
            self._resize(storage, torch_storage.nbytes())
            if storage.kind == _ACTIVATIONS:
                storage.kind = kind
            storages.append(storage)
        return storages

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak, the largest first."""
        peak: Counter[str] = Counter()
        # The kinds are read only now: some storages get their kind after the peak.
        for storage, nbytes in self._storages_at_peak:
            peak[storage.kind] += nbytes
        return dict(peak.most_common())

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the collectives since ``calls`` was cleared, by kind."""
        rows: list[Traffic] = []
        for key, sizes in self.calls.items():
            rows.append(Traffic(*key, calls=len(sizes), nbytes=sum(sizes)))
        return tuple(rows)

    def _track_unsharded(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Track the memory of FSDP's unsharded parameters. Called before each operator.

        FSDP's operators get this memory as their argument ``out``. The model's operators get it as
        parameters. Other parameters, such as sharded ones, have the kind "parameters" already.
        """
        if func.namespace == "fsdp":
            tensors = kwargs.get("out")
        else:
            tensors = [argument for argument in args if isinstance(argument, nn.Parameter)]
        for storage in self.track(tensors, _UNSHARDED):
            if storage.kind == _UNSHARDED:
                self._unsharded.add(storage)

    def _update_peak(self) -> None:
        """Record the live storages if they need more than ever. Called after each operator."""
        if self._live_nbytes > self.peak:
            # FSDP may have freed unsharded parameters by now. A new peak is rare, so only here are
            # their sizes read again. _resize() corrects _live_nbytes. The list is a copy, since the
            # end of a storage removes it from the collection.
            for storage in list(self._unsharded):
                torch_storage = storage.storage_ref()
                if torch_storage is not None:
                    self._resize(storage, torch_storage.nbytes())
        # The sum may be lower now.
        if self._live_nbytes > self.peak:
            self.peak = self._live_nbytes
            live_storages = self._live_storages.values()
            self._storages_at_peak = [(storage, storage.nbytes) for storage in live_storages]

    def _resize(self, storage: _Storage, nbytes: int) -> None:
        """Record the size that a storage has now."""
        self._live_nbytes += nbytes - storage.nbytes
        storage.nbytes = nbytes

    def _forget(self, key: int, _: object) -> None:
        """Stop tracking a storage. Its weak reference calls this when torch frees the storage."""
        storage = self._live_storages.pop(key)
        self._resize(storage, 0)
        self._unsharded.discard(storage)

    def _count_collective(self, collective: IssuedCollective, values: tuple[Any, ...]) -> None:
        """Count a collective. Its message is the largest of its arguments and its output.

        Args:
            collective: the collective.
            values: the arguments of its operator, and the output.
        """
        # A buffer whose kind is unknown so far counts as memory for communication.
        self.track(values, "communication")
        group = collective.group
        # torch's description of a group is "default_pg", or "mesh_" and the name of a dimension.
        axis = group.group_desc.replace("default_pg", "world").removeprefix("mesh_")
        key = _CollectiveKey(
            operation=_fabric_operation(collective.name), axis=axis, ranks=group.size()
        )
        self.calls[key].append(max(_nbytes_of_tensors(value) for value in values))


def _fabric_operation(torch_name: str) -> str:
    """Return fabric's name of a collective, which torch writes in several ways.

    An operator may be called ``allgather_``, ``all_gather_into_tensor`` or ``_allgather_base_``.
    Unknown names are returned as they are.
    """
    compact = torch_name.replace("_", "")
    for operation in _OPERATIONS:
        if operation.replace("_", "") in compact:
            return operation
    return torch_name


def _nbytes_of_tensors(tree: Any) -> int:
    """Return the bytes of all tensors in a collection."""
    nbytes = 0
    leaves, _ = flatten(tree)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            nbytes += leaf.nbytes
    return nbytes


def _with_unit(nbytes: int) -> str:
    """Return a number of bytes as text with a binary unit, such as ``"1.5 GiB"``."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    # Each prefix stands for ten more bits. max() is for 0 bytes, which have -1.
    exponent = max(0, nbytes.bit_length() - 1) // 10
    exponent = min(exponent, len(prefixes) - 1)
    prefix = prefixes[exponent]
    return f"{nbytes / 1024**exponent:,.1f} {prefix}B"
