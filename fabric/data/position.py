"""The spec of a loader, the state of an epoch, its saved form, and gathering of all ranks' results for a batch.

[Note: Data] The *order* is what the user's own sampler yields in one epoch, the same on every rank: single samples or,
from a batch sampler, whole batches. It is *sharded*: this rank takes entries ``rank, rank + num_replicas, ...``. The
*cursor* counts how many entries of the order all ranks together have received, in the *unit* of the order:
``"samples"`` that make batches, ``"single samples"`` of a loader without automatic batching, or ``"batches"``. This
position does not depend on the number of ranks or, in samples, on the batch size: on load, the rest of the order is
sharded again.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from fabric.collectives import all_gather, all_gather_ragged
from fabric.communicators import Communicator
from fabric.errors import CheckpointError, ConfigurationError, UsageError
from fabric.seed import Streams
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = [
    "ActiveIterator", "EpochState", "LoaderSpec", "check_saved", "gather_batch", "length_of", "saved_state", "skipped",
]  # fmt: skip

State = dict[str, Any]

_FORMAT = 1


@dataclass(eq=False)
class EpochState:
    """One iteration over a loader.

    Attributes:
        epoch: its number.
        skip: number of entries received before it began, which are not loaded again; of the order, or of this rank's
            part of it if the sampler shards by itself.
        replay: states of the random streams to draw the order from again, by phase of the drawing.
        drawn: states of the random streams from which the order was drawn, by phase.
        received: batches that the user has received.
        is_repeat: whether the current batch is a repeat; see ``[Note: Uneven ranks]``.
        finished: whether the iteration has ended.
        is_final: whether the current batch is known to be the last one.
        window: inside a window of :class:`~fabric.data.uneven.Windows`, the number of the current micro-batch, from 1,
            and how many there are.
        ahead: the loader's or dataset's own state from before a batch was fetched ahead; None if none was.
    """

    epoch: int
    skip: int = 0
    replay: Mapping[str, State] = field(default_factory=dict)
    drawn: dict[str, State] = field(default_factory=dict)
    received: int = 0
    is_repeat: bool = False
    finished: bool = False
    is_final: bool = False
    window: tuple[int, int] | None = None
    ahead: Any = None


@dataclass(frozen=True, eq=False)
class LoaderSpec:
    """How the batches of a loader are made; fixed at setup.

    Attributes:
        dataset: the user's own.
        batch_size: samples in one rank's batch; ``None`` without automatic batching.
        order: the user's own sampler or batch sampler that makes the order; the dataset if it is iterable.
        unit: what the cursor counts; see ``[Note: Data]``.
        num_replicas: ranks that the order is sharded over, by fabric or by the sampler itself.
        streams: the random streams that the order is drawn from.
        generators: the generators of the loader and its sampler.
        indices: the :class:`~fabric.data.sharding.ShardedSampler` in the loader; ``None`` where fabric does not follow
            the indices: an iterable dataset, a loader that keeps its own state.
        base_seed: the :class:`~fabric.data.sharding.AgreedStreams` that the base seed of the workers is drawn
            from, for an iterable dataset that fabric shards.
        uneven: what happens if ranks cannot get equally many samples or batches.
        is_own: whether the ranks shard the data themselves, in a way unknown to fabric.
    """

    dataset: Any
    batch_size: int | None
    order: Any
    unit: str
    num_replicas: int
    streams: Streams
    generators: tuple[torch.Generator, ...]
    indices: Any = None
    base_seed: Any = None
    uneven: str = "pad"
    is_own: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the ranks agree on the end of a loop; see ``[Note: Uneven ranks]``."""
        return self.uneven in ("shortest", "longest")

    @property
    def shards(self) -> int:
        """The number of ranks over which fabric shards the order; any others are sharded by the sampler or dataset."""
        return (
            self.num_replicas
            if self.base_seed is not None
            else getattr(self.indices, "num_replicas", 1)
        )

    def shard_length(self, state: EpochState) -> int | None:
        """Entries that this rank receives in an iteration; ``None`` if unknown."""
        return (
            None
            if self.indices is None or length_of(self.order) is None
            else self.indices.length(state.skip)
        )

    @property
    def is_even(self) -> bool:
        """Whether all ranks get equally many batches, however many that are."""
        sampler = self.order.sampler if type(self.order) is BatchSampler else self.order
        return (
            self.shards > 1 or getattr(type(sampler), "__len__", None) is DistributedSampler.__len__
        )

    @property
    def entries_per_batch(self) -> int:
        """Entries of the order in a full batch of this rank."""
        return self.batch_size or 1 if self.unit == "samples" else 1

    def cursor(self, state: EpochState) -> int:
        """Entries that all ranks together have received in this epoch."""
        entries = state.received * self.entries_per_batch
        length = self.shard_length(state)
        # The last batch may be short; entries repeated to fill the last round count as received.
        entries = entries if length is None else min(entries, length)
        return (state.skip + entries * self.shards) * (self.num_replicas // self.shards)

    def summary(self) -> State:
        """The properties that must match to load a saved state; see :func:`check_saved`."""
        return {
            "unit": self.unit,
            "num_replicas": self.num_replicas,
            "batch_size": getattr(self.order, "batch_size", None)
            if self.unit == "batches"
            else self.batch_size,
            # A dataset need not have a length when its sampler knows one.
            "dataset_length": None
            if self.indices is None or self.is_own
            else length_of(self.dataset),
            "sampler": type(self.order).__name__,
        }


ActiveIterator = tuple[LoaderSpec, EpochState]


def length_of(sized: Any) -> int | None:
    """The length of a sampler, dataset or loader; ``None`` when it has none."""
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return None


def saved_state(spec: LoaderSpec, state: EpochState, begun: bool, dataset: Any) -> State:
    """A position as plain dicts, numbers, strings and tensors.

    Args:
        spec: of the loader.
        state: of the epoch, the next one if the last has ended.
        begun: whether an iteration over it has begun, even if it has yielded no batch.
        dataset: the dataset's own state, when it has one and is iterated in this process.
    """
    return {
        "format": _FORMAT,
        **spec.summary(),
        "epoch": state.epoch,
        "begun": begun,
        "cursor": spec.cursor(state),
        "drawn": dict(state.drawn),
        "generators": [generator.get_state() for generator in spec.generators],
        "dataset": dataset,
    }


def check_saved(saved: Any, spec: LoaderSpec, in_order: bool, keeps_dataset_state: bool) -> bool:
    """Refuse a saved state under which this loader would yield different samples.

    Args:
        saved: the state to check.
        spec: of the loader.
        in_order: whether it yields batches in the order in which they were requested.
        keeps_dataset_state: whether the position in an iterable dataset is part of its state.

    Returns:
        Whether the position is inside an epoch.

    Raises:
        CheckpointError: it is not a loader's state; the loaders differ in more than the number of ranks and (except for
            an order of batches) the batch size; or the position cannot be restored.
    """
    needed = {"epoch", "begun", "cursor", "drawn", "generators", "dataset", *spec.summary()}
    if not isinstance(saved, Mapping) or saved.get("format") != _FORMAT or needed - set(saved):
        raise CheckpointError(
            f"loader.load_state_dict({type(saved).__name__})",
            f"it is not what state_dict() of a set-up loader returned, in format {_FORMAT}",
        )
    then = {**saved, "generators": len(saved["generators"])}
    now = {**spec.summary(), "generators": len(spec.generators)}
    free = {"num_replicas"} if spec.unit == "batches" else {"num_replicas", "batch_size"}
    for name in now:
        if name not in free and then[name] != now[name]:
            raise CheckpointError(
                f"loader.load_state_dict() at epoch {saved['epoch']}, {saved['cursor']} {saved['unit']} into it",
                f"the saved loader has {name} {then[name]!r}, this one has {now[name]!r}: other samples are there",
                suggestion="a loader made as it was when the state was saved, or no state of it to start anew",
            )
    skipped(saved, spec)
    inside = saved["begun"] if spec.indices is not None else saved["cursor"] > 0
    if inside and not in_order:
        problem = "workers with in_order=False yield batches as they are ready: which were received is not known"
        suggestion = "DataLoader(..., in_order=True)"
    elif inside and spec.indices is None and (not keeps_dataset_state or saved["dataset"] is None):
        problem = f"the {type(spec.dataset).__name__} is iterable: only itself knows how to go on from there"
        suggestion = (
            "with num_workers=0, state_dict() and load_state_dict(state) of the dataset's own"
        )
    else:
        return inside
    position = (
        f"loader.load_state_dict() {saved['cursor']} {saved['unit']} into epoch {saved['epoch']}"
    )
    raise CheckpointError(position, problem, "a state saved at the end of an epoch", suggestion)


def skipped(saved: Mapping[str, Any], spec: LoaderSpec) -> int:
    """:attr:`EpochState.skip` of an iteration that continues at the saved position.

    Raises:
        CheckpointError: the sampler shards by itself, the cursor is not a multiple of its number of ranks, and the
            order is not at its end; or ranks shard the data themselves, and their number differs.
    """
    cursor = saved["cursor"]
    length = spec.shard_length(EpochState(0))
    entries, rest = divmod(cursor, spec.num_replicas // spec.shards)
    # A position is valid for another number of ranks only if all ranks read the same stream.
    if spec.is_own:
        rest = cursor * (saved["num_replicas"] != spec.num_replicas)
    if not rest or (length is not None and entries >= length):
        return entries + bool(rest)
    raise CheckpointError(
        f"loader.load_state_dict() with {spec.num_replicas} ranks, saved with {saved['num_replicas']}",
        f"where each rank of a {type(spec.order).__name__}, which shards itself, was after {cursor} {saved['unit']} of "
        "all ranks is not known",
        f"as many ranks{'' if spec.is_own else f', or a number that divides {cursor}'}",
        f"devices={saved['num_replicas']}, or save at the end of an epoch",
    )


def gather_batch(communicator: Communicator, active: Sequence[ActiveIterator], data: Any) -> Any:
    """Gather the results of all ranks for this step's batches; see ``Fabric.gather_for_metrics``. Collective.

    Args:
        communicator: all processes of the job.
        active: the active iterations over loaders; the last is that of the innermost loop.
        data: any collection of tensors, computed from this process's batch.

    Raises:
        UsageError: no loop over a set-up loader is active, fabric does not shard its data, or it is unknown which
            entries were repeated.
        ConfigurationError: a leaf cannot be assigned to samples.
    """
    request = "fabric.gather_for_metrics(...)"
    expected = "the body of a loop over a loader that fabric shards"
    if not active:
        suggestion = (
            "for batch in fabric.setup_dataloaders(loader): fabric.gather_for_metrics(model(batch))"
        )
        raise UsageError(request, "no loop over a set-up loader is active", expected, suggestion)
    spec, state = active[-1]
    if spec.num_replicas != communicator.size and not spec.agrees:
        problem = f"this loader gives each of {communicator.size} processes all of the data, or what you sharded"
        raise UsageError(
            request,
            problem,
            expected,
            "the values as they are; or fabric.all_gather(x, concat=True)",
        )
    unit = spec.unit
    by_rank = spec.agrees and not (spec.is_even and spec.base_seed is None)
    kept, length = (None, None) if by_rank else _received(spec, state)
    leaves, structure = flatten(data)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        fits = not isinstance(leaf, Number)
        found = f"it is the number {leaf!r}"
        if isinstance(leaf, Tensor):
            fits = unit == "single samples" or (leaf.dim() > 0 and length in (None, len(leaf)))
            found = f"its shape is {tuple(leaf.shape)}"
        if not fits:
            raise ConfigurationError(
                f"gather_for_metrics(...) of {path or 'the tensor'}",
                f"which sample is what? {found}",
                f"tensors of shape ({length or 'n'}, ...), one entry for each sample of this batch",
                "the values before any mean or sum; fabric.all_reduce(x) for a number for the whole batch",
            )
    for place, leaf in enumerate(leaves):
        if by_rank and isinstance(leaf, Tensor):
            leaves[place] = (leaf[None] if unit == "single samples" else leaf)[
                : 0 if state.is_repeat else None
            ]
    by_rank |= unit == "batches"
    # The ranks compare it: parts of different iterations must not be combined into a batch.
    title = f"of iteration {state.epoch}" if spec.streams else "of a fixed order"
    [gathered] = (all_gather_ragged if by_rank else all_gather)(
        communicator, {title: leaves}
    ).values()
    for place, parts in enumerate(gathered):
        if isinstance(leaves[place], Tensor):
            whole = (
                parts.transpose(0, 1).flatten(0, 1) if unit == "samples" and not by_rank else parts
            )
            leaves[place] = torch.cat(parts[:kept]) if by_rank else whole[:kept].clone()
    return unflatten(structure, leaves)


def _received(spec: LoaderSpec, state: EpochState) -> tuple[int | None, int | None]:
    """The size of the latest batch over all ranks, in places: one for each entry of the order.

    By unit. ``"samples"``: sample i of rank r has place ``i * num_replicas + r``. ``"batches"``: the whole batch of
    rank r has place r. ``"single samples"``: likewise, but it is one sample, without a dim 0.

    Returns:
        The number of places without a repetition, None for all; and the number of samples in this rank's batch, None if
        unknown.
    """
    if spec.num_replicas == 1 or spec.base_seed is not None:
        return None, None
    order: Any = spec.order
    # Of samplers that shard by themselves, torch's is known: rank r has entries r, r + num_replicas, ... as here.
    is_torchs = getattr(type(order), "__iter__", None) is DistributedSampler.__iter__
    is_ours = spec.shards > 1
    total = length_of(order.dataset if is_torchs else order)
    if not (is_ours or is_torchs) or (total is None and spec.indices.pads):
        problem = "has no length" if is_ours else "shards the data itself"
        raise UsageError(
            "fabric.gather_for_metrics(...)",
            f"the {type(order).__name__} {problem}: which samples are repetitions is not known",
            "a loader that fabric shards, with a sampler that has a length",
            'setup_dataloaders(DataLoader(dataset)), uneven="drop"; with repetitions fabric.all_gather(x, concat=True)',
        )
    before = replace(state, received=state.received - 1)
    length = spec.shard_length(state)
    kept = None if total is None else total - spec.cursor(before)
    left = None if length is None else length - before.received * spec.entries_per_batch
    return kept, None if spec.unit != "samples" or left is None else min(
        spec.entries_per_batch, left
    )
