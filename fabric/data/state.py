"""The spec of a loader, the state of an epoch, what of that is saved, and what the ranks received at the same step.

[Note: Data] The *order* is what the user's own sampler yields in one epoch, the same on every rank: single samples or,
from a batch sampler, whole batches. It is *sharded*: this rank takes entries ``rank, rank + num_replicas, ...``. The
*cursor* counts how many entries of the order all ranks together have received, in the *unit* of the order:
``"samples"`` that make batches, ``"single samples"`` of a loader without automatic batching, or ``"batches"``. It is a
position that depends neither on the number of ranks nor, in samples, on the batch size: what is left of the order is
sharded anew.
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
        skip: entries of the order, or of the part of it that the sampler gives this rank by itself, that were received
            before it began; they are not loaded again.
        replay: states of the random streams to draw the order from again, by phase of the drawing.
        drawn: states of the random streams from which the order was drawn, by phase.
        received: batches that the user has received.
        is_repeat: whether one is out that it had received before; see ``[Note: Uneven ranks]``.
        finished: whether the iteration has ended.
        is_final: whether the batch that is out is known to be the last one.
        window: while one of :class:`~fabric.data.agreed.Windows` is open, the number of the micro-batch that is out,
            from 1, and how many there are.
        ahead: the own state of the loader or dataset before a batch was fetched ahead of the user; None when none was.
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
    """How the batches of a loader are made; settled when it is set up.

    Attributes:
        dataset: the user's own.
        batch_size: samples in one rank's batch; ``None`` without automatic batching.
        order: the user's own sampler or batch sampler that makes the order; the dataset if it is iterable.
        unit: what the cursor counts; see ``[Note: Data]``.
        num_replicas: ranks that the order is sharded over, by fabric or by the sampler itself.
        streams: the random streams that the order is drawn from.
        generators: those that belong to the loader and its sampler.
        indices: the :class:`~fabric.data.sharding.ShardedSampler` in the loader; ``None`` where fabric does not follow
            the indices: an iterable dataset, a loader that keeps its own state.
        base_seed: the :class:`~fabric.data.sharding.AgreedStreams` that the base seed of the workers is drawn
            from, for an iterable dataset that fabric shards.
        uneven: what happens where ranks cannot get equally many samples or batches.
        is_own: whether the ranks shard the data themselves, in a way that is not known here.
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
        """Over how many ranks fabric shards the order; the sampler or the dataset itself, over the others."""
        return self.num_replicas if self.base_seed is not None else getattr(self.indices, "num_replicas", 1)

    def shard_length(self, state: EpochState) -> int | None:
        """Entries that this rank receives in an iteration; ``None`` when that is not known."""
        return None if self.indices is None or length_of(self.order) is None else self.indices.length(state.skip)

    @property
    def is_even(self) -> bool:
        """Whether all ranks get equally many batches, however many that are."""
        sampler = self.order.sampler if type(self.order) is BatchSampler else self.order
        return self.shards > 1 or getattr(type(sampler), "__len__", None) is DistributedSampler.__len__

    @property
    def entries_per_batch(self) -> int:
        """Entries of the order in a full batch of this rank."""
        return self.batch_size or 1 if self.unit == "samples" else 1

    def cursor(self, state: EpochState) -> int:
        """Entries that all ranks together have received in this epoch."""
        entries, length = state.received * self.entries_per_batch, self.shard_length(state)
        # The last batch may be short; what was repeated to fill the last round counts as received.
        entries = entries if length is None else min(entries, length)
        return (state.skip + entries * self.shards) * (self.num_replicas // self.shards)

    def summary(self) -> State:
        """What a loader has to have in common with one whose saved state it loads; see :func:`check_saved`."""
        return {
            "unit": self.unit,
            "num_replicas": self.num_replicas,
            "batch_size": getattr(self.order, "batch_size", None) if self.unit == "batches" else self.batch_size,
            # A dataset need not have a length when its sampler knows one.
            "dataset_length": None if self.indices is None or self.is_own else length_of(self.dataset),
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
        begun: whether an iteration over it has begun, be it without a batch.
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
    """Refuse a saved state with which this loader would put other samples at the same places.

    Args:
        saved: what may be a state.
        spec: of the loader.
        in_order: whether it yields batches in the order in which they were asked for.
        keeps_dataset_state: whether the position in an iterable dataset is part of its state.

    Returns:
        Whether the position is inside an epoch.

    Raises:
        CheckpointError: it is something else; the loaders differ in something other than the number of ranks and, but
            for an order of batches, the batch size; or the position cannot be found again.
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
        suggestion = "with num_workers=0, state_dict() and load_state_dict(state) of the dataset's own"
    else:
        return inside
    position = f"loader.load_state_dict() {saved['cursor']} {saved['unit']} into epoch {saved['epoch']}"
    raise CheckpointError(position, problem, "a state saved at the end of an epoch", suggestion)


def skipped(saved: Mapping[str, Any], spec: LoaderSpec) -> int:
    """:attr:`EpochState.skip` of an iteration that goes on at the saved position.

    Raises:
        CheckpointError: the sampler shards by itself, the cursor is not a multiple of its number of ranks, and the
            order is not at its end; or it is not known how ranks shard, and the number of them is another one.
    """
    cursor, length = saved["cursor"], spec.shard_length(EpochState(0))
    entries, rest = divmod(cursor, spec.num_replicas // spec.shards)
    # Only in one stream that all ranks read is the position of one rank also that of another number of them.
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
    """What all ranks computed from this step's batches; see ``Fabric.gather_for_metrics``. Collective.

    Args:
        communicator: all processes of the job.
        active: the iterations over loaders that have begun and not ended; that of the innermost loop is the last.
        data: any collection of tensors, computed from this process's batch.

    Raises:
        UsageError: no loop over a set-up loader is active, fabric does not shard its data, or which entries were
            repeated is not known.
        ConfigurationError: a leaf does not say to which sample it belongs.
    """
    request, expected = "fabric.gather_for_metrics(...)", "the body of a loop over a loader that fabric shards"
    if not active:
        suggestion = "for batch in fabric.setup_dataloaders(loader): fabric.gather_for_metrics(model(batch))"
        raise UsageError(request, "no loop over a set-up loader is active", expected, suggestion)
    spec, state = active[-1]
    if spec.num_replicas != communicator.size and not spec.agrees:
        problem = f"this loader gives each of {communicator.size} processes all of the data, or what you sharded"
        raise UsageError(request, problem, expected, "the values as they are; or fabric.all_gather(x, concat=True)")
    unit, by_rank = spec.unit, spec.agrees and not (spec.is_even and spec.base_seed is None)
    kept, length = (None, None) if by_rank else _received(spec, state)
    leaves, structure = flatten(data)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        fits, found = not isinstance(leaf, Number), f"it is the number {leaf!r}"
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
            leaves[place] = (leaf[None] if unit == "single samples" else leaf)[: 0 if state.is_repeat else None]
    by_rank |= unit == "batches"
    # The ranks compare it: shares of the orders of different iterations are no batch.
    title = f"of iteration {state.epoch}" if spec.streams else "of a fixed order"
    [gathered] = (all_gather_ragged if by_rank else all_gather)(communicator, {title: leaves}).values()
    for place, parts in enumerate(gathered):
        if isinstance(leaves[place], Tensor):
            whole = parts.transpose(0, 1).flatten(0, 1) if unit == "samples" and not by_rank else parts
            leaves[place] = torch.cat(parts[:kept]) if by_rank else whole[:kept].clone()
    return unflatten(structure, leaves)


def _received(spec: LoaderSpec, state: EpochState) -> tuple[int | None, int | None]:
    """What all ranks received last, in their order of places, of which each entry has one.

    By unit. ``"samples"``: sample i of rank r has place ``i * num_replicas + r``. ``"batches"``: the batch of rank r is
    at place r, as a whole. ``"single samples"``: likewise, and it is one sample, without a dim 0.

    Returns:
        How many places hold no repetition, None for all; and the samples of this rank's batch, None when that is not
        known.
    """
    if spec.num_replicas == 1 or spec.base_seed is not None:
        return None, None
    order: Any = spec.order
    # Of those that shard the data themselves, torch's is known: rank r has entries r, r + num_replicas, ... as here.
    is_torchs, is_ours = getattr(type(order), "__iter__", None) is DistributedSampler.__iter__, spec.shards > 1
    total = length_of(order.dataset if is_torchs else order)
    if not (is_ours or is_torchs) or (total is None and spec.indices.pads):
        problem = "has no length" if is_ours else "shards the data itself"
        raise UsageError(
            "fabric.gather_for_metrics(...)",
            f"the {type(order).__name__} {problem}: which samples are repetitions is not known",
            "a loader that fabric shards, with a sampler that has a length",
            'setup_dataloaders(DataLoader(dataset)), uneven="drop"; with repetitions fabric.all_gather(x, concat=True)',
        )
    before, length = replace(state, received=state.received - 1), spec.shard_length(state)
    kept = None if total is None else total - spec.cursor(before)
    left = None if length is None else length - before.received * spec.entries_per_batch
    return kept, None if spec.unit != "samples" or left is None else min(spec.entries_per_batch, left)
