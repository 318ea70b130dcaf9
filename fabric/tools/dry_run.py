"""A dry run: the memory and the collectives of a training step on one rank, without the job.

[Note: Dry run] One process takes the place of rank 0, which has the largest shards. Fabric, the
strategy and torch run as they are, over tensors without memory and a process group without other
ranks, so a dry run counts what they allocate and send. A dispatch mode sees every operation and
tracks the storages. The peak is that of live tensors: workspaces of kernels, fragmentation, the
device context and NCCL's buffers are not included.
"""

import inspect
import re
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
from fabric._plan import parse_strategy
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
    IssuedCollective,
    Rank0Chunks,
    collective_of,
    fake_ranks,
    run_fake,
)
from fabric.tree import PLAIN_TENSOR_TYPES, flatten, parameters_of
from fabric.world import World

__all__ = ["DryRun", "Traffic", "plan"]

# In the first step optimizers make their state, and DTensor works out its operations with tensors
# of the full shape. In the second step DDP makes its buckets. Later steps are like the third.
_STEPS = 3
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")

# What memory is for, where nothing says more.
_UNSHARDED = "unsharded parameters"
_ACTIVATIONS = "activations and others"


class Traffic(NamedTuple):
    """The collectives of one kind that a rank issues in a step.

    Attributes:
        operation: such as ``"all_gather"``.
        axis: over which ranks: ``"world"`` for all, else the name of a dimension of the mesh, such
            as ``"shards"``.
        ranks: the number of these ranks.
        calls: the number of calls.
        nbytes: the bytes of all messages together. For a gather, the output on a rank counts, for a
            reduction, its input.
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
        title: what was planned.
        peak: bytes by kind on the rank that needs most, at the time when their sum is largest.
        traffic: the collectives of a step.
        memory: bytes that a rank has. None if that was not said.
        alternatives: what was tried if the memory is too small, by what to write. If anything fits,
            it is the last alternative.
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
        """Whether the memory of a rank is large enough, or not known."""
        return self.memory is None or self.peak_bytes <= self.memory

    def __str__(self) -> str:
        lines = [f"{self.title}: {self._verdict}"]
        for kind, nbytes in self.peak.items():
            if nbytes:
                lines.append(f"  {kind:<36}{_with_unit(nbytes):>12}")
        for traffic in self.traffic:
            label = f"{traffic.calls} {traffic.operation} over {traffic.ranks} ({traffic.axis})"
            lines.append(f"  {label:<36}{_with_unit(traffic.nbytes):>12} a step")
        for text, alternative in self.alternatives.items():
            lines.append(f"{text}: {alternative._verdict}")
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        verdict = f"{_with_unit(self.peak_bytes)} a rank"
        if self.memory is None:
            return verdict
        relation = "within" if self.fits else "more than"
        return f"{verdict}, {relation} {_with_unit(self.memory)}"


def plan(
    build: Callable[[Fabric], Any], step: Callable[..., Any], *, world: int = 1,
    strategy: Strategy | StrategyName = "auto", memory: int | str | None = None, num_nodes: int = 1,
    precision: Precision | PrecisionName | None = None, accelerator: AcceleratorName = "cuda",
) -> DryRun:  # fmt: skip
    """Plan what a training step needs on each rank of a job, in one process and on the CPU.

    ``build`` and ``step`` see a :class:`fabric.Fabric` that is rank 0 of the job, on the CPU.
    Nothing is computed and no memory is needed: tensors have no values. A value that is read, by
    ``.item()`` or an ``if``, is 1. The numbers are those of tensors and collectives: workspaces of
    kernels, fragmentation, the device context and NCCL's buffers are not included.

    Args:
        build: ``build(fabric)`` returns the model, or a tuple of the model and its optimizers. They
            are then set up.
        step: ``step(fabric, model, *optimizers)`` makes a step, with inputs that it makes itself.
        world: number of processes.
        strategy: as for :class:`fabric.Fabric`.
        memory: memory of each device, in bytes or as ``"80GiB"``. If it is too small, strategies
            that need less are tried.
        num_nodes: number of nodes.
        precision: as for :class:`fabric.Fabric`.
        accelerator: the accelerator of the job. On any but ``"cpu"`` torch's optimizers step all
            parameters together, in more memory.

    Raises:
        ConfigurationError: arguments that cannot work, or what a dry run does not cover:
            ``cpu_offload``, ``ddp_comm_hook``, and a process with several devices.
        ValueError: this process belongs to a job.
    """
    if world % num_nodes:
        raise ConfigurationError(
            f"fabric.plan({world=}, {num_nodes=})", expected="equally many processes on each node"
        )
    if accelerator not in ACCELERATORS:
        raise ConfigurationError(f"fabric.plan({accelerator=})", expected=", ".join(ACCELERATORS))
    try:
        inspect.signature(build).bind("fabric")
    except TypeError as error:
        raise ConfigurationError(
            f"fabric.plan({build=})", problem=str(error), expected="build(fabric)"
        ) from error
    job = _Job(
        build=build,
        step=step,
        world_size=world,
        num_nodes=num_nodes,
        steps_together=accelerator != "cpu",
        memory=_parse_memory(memory),
    )
    requested = parse_strategy(strategy)
    if requested is None:
        requested = DDPStrategy() if world > 1 else SingleDeviceStrategy()
    result, layer_types = job.run(requested, precision)
    if result.fits:
        return result
    alternatives: dict[str, DryRun] = {}
    for alternative in _alternatives(requested, precision, layer_types):
        tried, _ = job.run(alternative.strategy, alternative.precision)
        alternatives[alternative.text] = tried
        if tried.fits:
            break
    return replace(result, alternatives=alternatives)


class _PlannedEnvironment:
    """A launcher that says that this process is rank 0 of the planned job."""

    name = "fabric plan"

    def __init__(self, world: World) -> None:
        self._world = world

    def detect(self, env: Mapping[str, str]) -> World:
        """Return the world of the planned job, whatever the environment is."""
        return self._world


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The job of which one rank is run. See :func:`plan` for the arguments.

    Attributes:
        build: as for :func:`plan`.
        step: as for :func:`plan`.
        world_size: number of processes.
        num_nodes: number of nodes.
        steps_together: whether optimizers step all parameters together.
        memory: bytes of each device, if known.
    """

    build: Callable[[Fabric], Any]
    step: Callable[..., Any]
    world_size: int
    num_nodes: int
    steps_together: bool
    memory: int | None

    def run(
        self, strategy: Strategy, precision: Precision | PrecisionName | None
    ) -> tuple[DryRun, tuple[type[nn.Module], ...]]:
        """Run rank 0, and return the result and the types of the layers that FSDP would wrap."""
        options = vars(strategy)
        if options.get("cpu_offload") or options.get("ddp_comm_hook"):
            problem = "a dry run does not cover cpu_offload and ddp_comm_hook yet"
            raise ConfigurationError(f"fabric.plan({strategy=})", problem)
        precision = parse_precision(strategy.precision if precision is None else precision)
        fabric = self._fabric(strategy, precision)
        with fake_ranks(self.world_size) as mode:
            fabric.launch()
            with fabric, mode, _Trace(mode) as trace:
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

    def _fabric(self, strategy: Strategy, precision: Precision) -> Fabric:
        world = World(
            world_size=self.world_size, local_world_size=self.world_size // self.num_nodes
        )
        return Fabric(
            accelerator="cpu",
            strategy=strategy,
            environment=_PlannedEnvironment(world),
            watchdog=0,
            # The loss scaler and the training checks look at values.
            precision=replace(precision, loss_scale=None),
            check_training=False,
        )

    def _train(self, fabric: Fabric, trace: "_Trace") -> tuple[type[nn.Module], ...]:
        """Build the model and make some steps, of which the last ones are traced."""
        model: Any = self.build(fabric)
        optimizers: Sequence[Optimizer] = ()
        if not isinstance(model, nn.Module):
            model, *optimizers = model
        layer_types = dict.fromkeys(type(layer) for layer in find_fsdp_modules(model))
        if self.steps_together:
            for optimizer in optimizers:
                _step_together(optimizer)
        with Rank0Chunks():
            model, *_ = fabric.setup(model, *optimizers, scheduler="none")
        trace.mark([*model.parameters()], "parameters")
        trace.mark([*model.buffers()], "buffers")
        for optimizer in optimizers:
            optimizer.register_step_post_hook(trace.after_step)
        for number in range(_STEPS):
            trace.calls.clear()
            # The peak is that of the second and third step.
            if number <= 1:
                trace.peak = 0
            self.step(fabric, model, *optimizers)
        return tuple(layer_types)


def _step_together(optimizer: Optimizer) -> None:
    """Have an optimizer step all parameters together, as torch does by default on accelerators."""
    for group in optimizer.param_groups:
        if "foreach" in group and not group.get("fused"):
            group["foreach"] = group["foreach"] is not False


class _Alternative(NamedTuple):
    """A strategy that may need less memory, and what to write for it."""

    text: str
    strategy: Strategy
    precision: Precision | PrecisionName | None


def _alternatives(
    requested: Strategy,
    precision: Precision | PrecisionName | None,
    layer_types: tuple[type[nn.Module], ...],
) -> Iterator[_Alternative]:
    """Yield strategies that need less and less memory.

    Args:
        requested: the strategy that needs too much. One on a mesh is kept, with recomputation.
        precision: the precision that was requested.
        layer_types: the types of layers to recompute.
    """
    base: Strategy = FSDPStrategy()
    options = ""
    if isinstance(requested, ModelParallelStrategy):
        base = requested
        options = "..., "
    else:
        sharded_grads = _with_options(base, sharding_strategy="SHARD_GRAD_OP")
        text = 'FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")'
        yield _Alternative(text, sharded_grads, precision)
        yield _Alternative("FSDPStrategy()", copy(base), precision)
    if layer_types:
        names = ", ".join(layer_type.__name__ for layer_type in layer_types)
        options += f"activation_checkpointing=[{names}]"
    recomputing = _with_options(base, activation_checkpointing=layer_types or None)
    text = f"{type(base).__name__}({options})"
    yield _Alternative(text, recomputing, precision)
    yield _Alternative(f'{text}, Fabric(precision="bf16-mixed")', copy(recomputing), "bf16-mixed")


def _with_options(strategy: Strategy, **options: Any) -> Strategy:
    changed = copy(strategy)
    vars(changed).update(options)
    return changed


@dataclass(eq=False)
class _Storage:
    """Memory that tensors share: what it is for, and its bytes."""

    ref: weakref.ref[Any]
    kind: str = _ACTIVATIONS
    nbytes: int = 0


class _CollectiveKey(NamedTuple):
    """What collectives have in common that are counted together. See :class:`Traffic`."""

    operation: str
    axis: str
    ranks: int


class _Trace(DispatchMode):
    """Follows the memory of tensors and the collectives; see ``[Note: Dry run]``.

    Attributes:
        peak: bytes of the live tensors, when they were most.
        calls: the bytes of each collective, by kind.
    """

    def __init__(self, mode: Any) -> None:
        DispatchMode.__init__(self)
        self._mode = mode
        self._live: dict[int, _Storage] = {}
        # FSDP frees and allocates unsharded parameters where no operation shows it.
        self._unsharded: set[_Storage] = set()
        self._nbytes = 0
        self.peak = 0
        self._at_peak: list[tuple[_Storage, int]] = []
        self.calls: defaultdict[_CollectiveKey, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_unsharded(func, args, kwargs)
        for tensor_type in types:
            if tensor_type not in PLAIN_TENSOR_TYPES and not issubclass(tensor_type, FakeTensor):
                return NotImplemented  # DTensor calls operators on its local tensors
        output = run_fake(self._mode, func, args, kwargs)
        self.see(output)
        collective = collective_of(func, args)
        if collective is not None:
            self._count(collective, (*args, output))
        self._update_peak()
        return output

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Mark the memory that an optimizer holds; a hook of its step."""
        gradients = [parameter.grad for parameter in parameters_of(optimizer)]
        self.mark(gradients, "gradients")
        self.see([*optimizer.state.values()], "optimizer state")

    def mark(self, tree: Any, kind: str) -> None:
        """Record what the tensors in a collection are for, in place of what was known."""
        for storage in self.see(tree):
            storage.kind = kind

    def see(self, tree: Any, kind: str = _ACTIVATIONS) -> list[_Storage]:
        """Track the storages of the tensors in a collection, and return them.

        Args:
            tree: the collection.
            kind: what the tensors are for, if that is not known yet.
        """
        storages: list[_Storage] = []
        for tensor in flatten(tree)[0]:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            memory = local_tensor(tensor).untyped_storage()
            key = id(memory)
            if key not in self._live:
                self._live[key] = _Storage(weakref.ref(memory, partial(self._free, key)))
            storage = self._live[key]
            self._resize(storage, memory.nbytes())
            if storage.kind == _ACTIVATIONS:
                storage.kind = kind
            storages.append(storage)
        return storages

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak, the largest first."""
        peak: Counter[str] = Counter()
        for storage, nbytes in self._at_peak:
            peak[storage.kind] += nbytes
        return dict(peak.most_common())

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the collectives of the latest step, by kind."""
        rows: list[Traffic] = []
        for key, sizes in self.calls.items():
            rows.append(Traffic(*key, calls=len(sizes), nbytes=sum(sizes)))
        return tuple(rows)

    def _note_unsharded(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if func.namespace == "fsdp":
            tensors = kwargs.get("out")
        else:
            tensors = [argument for argument in args if isinstance(argument, nn.Parameter)]
        for storage in self.see(tensors, _UNSHARDED):
            if storage.kind == _UNSHARDED:
                self._unsharded.add(storage)

    def _update_peak(self) -> None:
        if self._nbytes > self.peak:
            # FSDP may have freed some since.
            for storage in list(self._unsharded):
                memory = storage.ref()
                if memory is not None:
                    self._resize(storage, memory.nbytes())
        if self._nbytes > self.peak:
            self.peak = self._nbytes
            self._at_peak = [(storage, storage.nbytes) for storage in self._live.values()]

    def _resize(self, storage: _Storage, nbytes: int) -> None:
        self._nbytes += nbytes - storage.nbytes
        storage.nbytes = nbytes

    def _free(self, key: int, _: object) -> None:
        self._resize(self._live[key], 0)
        self._unsharded.discard(self._live.pop(key))

    def _count(self, collective: IssuedCollective, values: tuple[Any, ...]) -> None:
        """Count a collective. Its message is the largest of its arguments and its output."""
        self.see(values, "communication")
        group = collective.group
        axis = group.group_desc.replace("default_pg", "world").removeprefix("mesh_")
        key = _CollectiveKey(_operation(collective.name), axis, group.size())
        self.calls[key].append(max(_nbytes(value) for value in values))


def _operation(name: str) -> str:
    """Return fabric's name of a collective, which torch writes in several ways."""
    compact = name.replace("_", "")
    for operation in _OPERATIONS:
        if operation.replace("_", "") in compact:
            return operation
    return name


def _nbytes(tree: Any) -> int:
    nbytes = 0
    for leaf in flatten(tree)[0]:
        if isinstance(leaf, Tensor):
            nbytes += leaf.nbytes
    return nbytes


def _parse_memory(memory: int | str | None) -> int | None:
    if memory is None:
        return None
    pattern = r"(?P<number>[\d.]+) *(?P<prefix>[KMGT]?)(?P<binary>I?)B?"
    match = re.fullmatch(pattern, str(memory).upper())
    if match is None:
        raise ConfigurationError(f"fabric.plan({memory=})", expected='bytes, or such as "80GiB"')
    base = 1024 if match["binary"] else 1000
    exponent = 0
    if match["prefix"]:
        exponent = " KMGT".index(match["prefix"])
    return int(float(match["number"]) * base**exponent)


def _with_unit(nbytes: int) -> str:
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    exponent = max(0, nbytes.bit_length() - 1) // 10
    exponent = min(exponent, len(prefixes) - 1)
    prefix = prefixes[exponent]
    return f"{nbytes / 1024**exponent:,.1f} {prefix}B"
