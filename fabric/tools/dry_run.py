"""A dry run: the memory and the collectives of a training step on one rank of a job, without the job.

[Note: Dry run] One process takes the place of rank 0, which has the largest shards. Fabric, the strategy and torch run
as they are, over tensors without memory and a process group without other ranks, so it counts what
they allocate and send. A dispatch mode sees every operation and tracks the storages. The peak is that of live tensors:
workspaces of kernels, fragmentation, the device context and NCCL's buffers are not included.
"""

import inspect
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
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
from fabric.tools._torch import Rank0Chunks, collective_of, fake_ranks, run_fake
from fabric.tree import PLAIN_TENSOR_TYPES, flatten, parameters_of
from fabric.world import World

__all__ = ["DryRun", "Traffic", "plan"]

# In the first optimizers make their state, and DTensor works out its operations with tensors of the whole shape. In the
# second DDP makes its buckets. The third is as all later ones.
_STEPS = 3
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_GATHERED = "unsharded parameters"
_OTHERS = "activations and others"


class Traffic(NamedTuple):
    """The collectives of one kind that a rank issues in a step.

    Attributes:
        operation: such as ``"all_gather"``.
        axis: over which ranks: ``"world"`` for all, else the name of a dimension of the mesh, such as ``"shards"``.
        ranks: how many these are.
        calls: how often.
        nbytes: all messages together: for a gather its output on a rank, for a reduction its input.
    """

    operation: str
    axis: str
    ranks: int
    calls: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What :func:`plan` found; as text a table.

    Attributes:
        title: what was planned.
        peak: bytes by kind on the fullest rank, when they are most in sum.
        traffic: the collectives of a step.
        memory: bytes that a rank has; None if that was not said.
        alternatives: where they are too few, what was tried, by what to write. If anything fits it is the last one.
    """

    title: str
    peak: Mapping[str, int]
    traffic: tuple[Traffic, ...]
    memory: int | None = None
    alternatives: Mapping[str, "DryRun"] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest rank, when they are most."""
        return sum(self.peak.values())

    @property
    def fits(self) -> bool:
        """Whether a rank has as many."""
        return self.memory is None or self.peak_bytes <= self.memory

    def __str__(self) -> str:
        lines = [f"{self.title}: {self._verdict}"]
        lines += [
            f"  {kind:<36}{_text(nbytes):>12}" for kind, nbytes in self.peak.items() if nbytes
        ]
        for name, axis, ranks, calls, nbytes in self.traffic:
            lines.append(
                f"  {f'{calls} {name} over {ranks} ({axis})':<36}{_text(nbytes):>12} a step"
            )
        return "\n".join(
            [*lines, *(f"{text}: {other._verdict}" for text, other in self.alternatives.items())]
        )

    @property
    def _verdict(self) -> str:
        fits = (
            ""
            if self.memory is None
            else f", {'within' if self.fits else 'more than'} {_text(self.memory)}"
        )
        return f"{_text(self.peak_bytes)} a rank{fits}"


def plan(
    build: Callable[[Fabric], Any], step: Callable[..., Any], *, world: int = 1,
    strategy: Strategy | StrategyName = "auto", memory: int | str | None = None, num_nodes: int = 1,
    precision: Precision | PrecisionName | None = None, accelerator: AcceleratorName = "cuda",
) -> DryRun:  # fmt: skip
    """Find out what a training step needs on each rank of a job, in this process and without the job's devices.

    ``build`` and ``step`` see a :class:`fabric.Fabric` that is rank 0 of the job, on the CPU. Nothing is computed and
    no memory is needed: tensors have no values, and where one is asked for, by ``.item()`` or an ``if``, it is 1. See
    ``[Note: Dry run]`` in :mod:`fabric.tools.dry_run` for what the numbers are.

    Args:
        build: ``build(fabric)`` gives the model, or a tuple of it and its optimizers, which are then set up.
        step: ``step(fabric, model, *optimizers)`` makes a step, of inputs that it makes itself.
        world: number of processes.
        strategy: as for :class:`fabric.Fabric`.
        memory: of each device, in bytes or as ``"80GiB"``. Where it is too small, strategies that need less are tried.
        num_nodes: number of nodes.
        precision: as for :class:`fabric.Fabric`.
        accelerator: of the job. On any but ``"cpu"`` torch's optimizers step all parameters together, in more memory.

    Raises:
        ConfigurationError: arguments that cannot work, or what a dry run does not cover: ``cpu_offload``,
            ``ddp_comm_hook``, and a process with several devices.
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
        raise ConfigurationError(f"fabric.plan({build=})", str(error), "build(fabric)") from error
    place = World(world_size=world, local_world_size=world // num_nodes)
    room = _parse_memory(memory)
    blocks = dict[type[nn.Module], None]()

    def run(strategy: Strategy, precision: Any) -> DryRun:
        has = vars(strategy)
        if has.get("cpu_offload") or has.get("ddp_comm_hook"):
            problem = "a dry run does not cover cpu_offload and ddp_comm_hook yet"
            raise ConfigurationError(f"fabric.plan({strategy=})", problem)
        own = parse_precision(strategy.precision if precision is None else precision)
        options: Any = {
            "environment": SimpleNamespace(name="fabric plan", detect=lambda env: place),
            "watchdog": 0,
        }
        options |= {
            "precision": replace(own, loss_scale=None),
            "check_training": False,
        }  # both look at values
        fabric = Fabric(accelerator="cpu", strategy=strategy, **options)
        with fake_ranks(world) as fake, fabric.launch(lambda own: own), fake, _Trace(fake) as trace:
            built: Any = build(fabric)
            model, *optimizers = (built,) if isinstance(built, nn.Module) else built
            blocks.update({type(part): None for part in find_fsdp_modules(model)})
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                if accelerator != "cpu" and "foreach" in group and not group.get("fused"):
                    group["foreach"] = group["foreach"] is not False
            with Rank0Chunks():
                model, *_ = fabric.setup(model, *optimizers, scheduler="none")
            trace.see([*model.parameters()], "parameters", always=True)
            trace.see([*model.buffers()], "buffers", always=True)
            for optimizer in optimizers:
                optimizer.register_step_post_hook(trace.after_step)
            for number in range(_STEPS):
                trace.calls.clear()
                trace.peak *= number > 1
                step(fabric, model, *optimizers)
        peak = Counter[str]()
        for storage, nbytes in trace.at_peak:
            peak[storage.kind] += nbytes
        traffic = tuple(Traffic(*key, len(sizes), sum(sizes)) for key, sizes in trace.calls.items())
        title = f"{strategy.name}, {own.name}, {world} rank(s) on {num_nodes} node(s)"
        return DryRun(title=title, peak=dict(peak.most_common()), traffic=traffic, memory=room)

    given = parse_strategy(strategy) or (DDPStrategy() if world > 1 else SingleDeviceStrategy())
    found = run(given, precision)
    on_mesh = isinstance(given, ModelParallelStrategy)
    recompute = {"activation_checkpointing": tuple(blocks) or None}
    shown = (
        f"activation_checkpointing=[{', '.join(block.__name__ for block in blocks)}]"
        if blocks
        else ""
    )
    others: dict[str, DryRun] = {}
    rows: Any = (
        ('sharding_strategy="SHARD_GRAD_OP"', {"sharding_strategy": "SHARD_GRAD_OP"}, precision),
        ("", {}, precision),
        (shown, recompute, precision),
        (f'{shown}), Fabric(precision="bf16-mixed"', recompute, "bf16-mixed"),
    )
    for text, options, other in rows[2 * on_mesh :]:
        if not any(each.fits for each in (found, *others.values())):
            less = copy(given) if on_mesh else FSDPStrategy()
            vars(less).update(options)
            others[f"{type(less).__name__}({'..., ' * on_mesh}{text})"] = run(less, other)
    return replace(found, alternatives=others)


@dataclass(eq=False)
class _Storage:
    """Memory that tensors share: what it is for, and its bytes."""

    ref: weakref.ref[Any]
    kind: str = _OTHERS
    nbytes: int = 0


class _Trace(DispatchMode):
    """Follows the memory of tensors and the collectives; see ``[Note: Dry run]``."""

    def __init__(self, fake: Any) -> None:
        DispatchMode.__init__(self)
        self._fake = fake
        self._live: dict[int, _Storage] = {}
        self._gathered: set[_Storage] = (
            set()
        )  # what FSDP frees and allocates, where no operation shows it
        self._nbytes = 0
        self.peak = 0
        self.at_peak: list[tuple[_Storage, int]] = []
        self.calls: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        gathered = (
            kwargs.get("out")
            if func.namespace == "fsdp"
            else [x for x in args if isinstance(x, nn.Parameter)]
        )
        self._gathered.update(
            each for each in self.see(gathered, _GATHERED) if each.kind == _GATHERED
        )
        if any(
            kind not in PLAIN_TENSOR_TYPES and not issubclass(kind, FakeTensor) for kind in types
        ):
            return NotImplemented  # DTensor calls operators on what it has
        self.see(made := run_fake(self._fake, func, args, kwargs))
        if found := collective_of(func, args):
            self._count(*found, (*args, made))
        for storage in [*self._gathered] if self._nbytes > self.peak else ():
            if (memory := storage.ref()) is not None:
                self._resize(storage, memory.nbytes())
        if self._nbytes > self.peak:
            self.peak = self._nbytes
            self.at_peak = [(value, value.nbytes) for value in self._live.values()]
        return made

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Know what an optimizer holds; a hook of it."""
        self.see(
            [parameter.grad for parameter in parameters_of(optimizer)], "gradients", always=True
        )
        self.see([*optimizer.state.values()], "optimizer state")

    def see(self, tree: Any, kind: str = _OTHERS, always: bool = False) -> list[_Storage]:
        """Note the storages of the tensors in a collection, and what they are for where that is not known."""
        seen = []
        for tensor in flatten(tree)[0]:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                memory = local_tensor(tensor).untyped_storage()
                if (key := id(memory)) not in self._live:
                    self._live[key] = _Storage(weakref.ref(memory, partial(self._free, key)))
                storage = self._live[key]
                self._resize(storage, memory.nbytes())
                storage.kind = kind if always or storage.kind == _OTHERS else storage.kind
                seen.append(storage)
        return seen

    def _resize(self, storage: _Storage, nbytes: int) -> None:
        self._nbytes += nbytes - storage.nbytes
        storage.nbytes = nbytes

    def _free(self, key: int, _: object) -> None:
        self._resize(self._live[key], 0)
        self._gathered.discard(self._live.pop(key))

    def _count(self, name: str, group: Any, passed: tuple[Any, ...]) -> None:
        self.see(passed, "communication")
        operation = next(
            (each for each in _OPERATIONS if each.replace("_", "") in name.replace("_", "")), name
        )
        axis = group.group_desc.replace("default_pg", "world").removeprefix("mesh_")
        sizes = [
            sum(leaf.nbytes for leaf in flatten(each)[0] if isinstance(leaf, Tensor))
            for each in passed
        ]
        self.calls[operation, axis, group.size()].append(max(sizes))


def _parse_memory(memory: int | str | None) -> int | None:
    found = re.fullmatch(r"([\d.]+) *([KMGT]?)(I?)B?", str(memory).upper())
    if found is None and memory is not None:
        raise ConfigurationError(f"fabric.plan({memory=})", expected='bytes, or such as "80GiB"')
    return found and int(
        float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")
    )


def _text(nbytes: int) -> str:
    unit = max(0, nbytes.bit_length() - 1) // 10
    return f"{nbytes / 1024**unit:,.1f} {('', 'Ki', 'Mi', 'Gi', 'Ti')[unit]}B"
