"""The spec of a loader, the state of an epoch, and what of that is saved.

[Note: Data] The *order* is what the user's own sampler yields in one epoch, the same on every rank: single samples or,
from a batch sampler, whole batches. It is *sharded*: this rank takes entries ``rank, rank + num_replicas, ...``. The
*cursor* counts how many entries of the order all ranks together have received, in the *unit* of the order:
``"samples"`` that make batches, ``"single samples"`` of a loader without automatic batching, or ``"batches"``. It is a
position that does not depend on the number of ranks.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fabric.errors import CheckpointError
from fabric.seed import Streams

__all__ = ["EpochState", "LoaderSpec", "check_saved", "length_of", "saved_state", "skipped"]

State = dict[str, Any]

_FORMAT = 1


@dataclass(eq=False)
class EpochState:
    """One iteration over a loader.

    Attributes:
        epoch: its number.
        start: the cursor at which it began; not 0 in a resumed epoch.
        skip: entries of this rank's shard that were received before; they are not loaded again.
        resumed: whether it continues a saved epoch.
        replay: states of the random streams to draw the order from again, by phase of the drawing.
        drawn: states of the random streams from which the order was drawn, by phase.
        opened: whether an index sampler already works for it.
        received: batches that the user has received.
        finished: whether the iteration has ended.
    """

    epoch: int
    start: int = 0
    skip: int = 0
    resumed: bool = False
    replay: Mapping[str, State] = field(default_factory=dict)
    drawn: dict[str, State] = field(default_factory=dict)
    opened: bool = False
    received: int = 0
    finished: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
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
        indices: the :class:`~fabric.data.sharding.IndexSampler` in the loader; ``None`` where fabric does not follow
            the indices: an iterable dataset, a loader that keeps its own state.
        base_seed: the :class:`~fabric.data.sharding.AgreedStreams` that the base seed of the workers is drawn
            from, for an iterable dataset that fabric shards.
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

    @property
    def epoch_length(self) -> int | None:
        """Entries that all ranks together receive in an epoch; ``None`` when that is not known."""
        length = None if self.indices is None else length_of(self.indices.sharded)
        return None if length is None else length * self.num_replicas

    @property
    def entries_per_batch(self) -> int:
        """Entries of the order in a full batch of this rank."""
        return self.batch_size or 1 if self.unit == "samples" else 1

    def cursor(self, state: EpochState) -> int:
        """Entries that all ranks together have received in this epoch."""
        cursor = state.start + state.received * self.entries_per_batch * self.num_replicas
        length = self.epoch_length
        # The last batch may be short; what was repeated to fill the last round counts as received.
        return cursor if length is None else min(cursor, length)

    def summary(self) -> State:
        """What a loader has to have in common with one whose saved state it loads, but for the number of ranks."""
        return {
            "unit": self.unit,
            "num_replicas": self.num_replicas,
            "batch_size": self.batch_size,
            # A dataset need not have a length when its sampler knows one.
            "dataset_length": None if self.indices is None else length_of(self.dataset),
            "sampler": type(self.order).__name__,
        }


def length_of(sized: Any) -> int | None:
    """The length of a sampler, dataset or loader; ``None`` when it has none."""
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return None


def saved_state(spec: LoaderSpec, epoch: int, state: EpochState | None = None, dataset: Any = None) -> State:
    """A position as plain dicts, numbers, strings and tensors.

    Args:
        spec: of the loader.
        epoch: number of the epoch, the next one if the last has ended.
        state: of the iteration that has begun over this epoch, be it without a batch; ``None`` when none has.
        dataset: the dataset's own state, when it has one and is iterated in this process.
    """
    return {
        "format": _FORMAT,
        **spec.summary(),
        "epoch": epoch,
        "begun": state is not None,
        "cursor": 0 if state is None else spec.cursor(state),
        "drawn": {} if state is None else dict(state.drawn),
        "generators": [generator.get_state() for generator in spec.generators],
        "dataset": dataset,
    }


def check_saved(saved: Any, spec: LoaderSpec) -> None:
    """Refuse a saved state with which this loader would put other samples at the same places.

    Raises:
        CheckpointError: it is something else, or the loaders differ in something other than the number of ranks.
    """
    needed = {"epoch", "begun", "cursor", "drawn", "generators", "dataset", *spec.summary()}
    if not isinstance(saved, Mapping) or saved.get("format") != _FORMAT or needed - set(saved):
        raise CheckpointError(
            f"loader.load_state_dict({type(saved).__name__})",
            f"it is not what state_dict() of a set-up loader returned, in format {_FORMAT}",
            suggestion="loader.load_state_dict(saved_loader_state)",
        )
    then = {**saved, "generators": len(saved["generators"])}
    now = {**spec.summary(), "generators": len(spec.generators)}
    for name in ("unit", "sampler", "dataset_length", "batch_size", "generators"):
        if then[name] != now[name]:
            raise CheckpointError(
                f"loader.load_state_dict() at epoch {saved['epoch']}, {saved['cursor']} {saved['unit']} into it",
                f"the saved loader has {name} {then[name]!r}, this one has {now[name]!r}: "
                "the same position means other samples",
                f"a loader with {name} {then[name]!r}",
                "a loader made as it was when the state was saved, or leave its state out to start afresh",
            )


def skipped(saved: State, spec: LoaderSpec) -> int:
    """How many entries of its shard each rank of this job has received before the saved position.

    Raises:
        CheckpointError: the cursor is not a multiple of the number of ranks, and the order is not at its end.
    """
    cursor, length = saved["cursor"], spec.epoch_length
    entries, rest = divmod(cursor, spec.num_replicas)
    if not rest:
        return entries
    if length is not None and cursor >= length:
        return entries + 1
    divisors = [number for number in range(1, 65) if cursor % number == 0]
    raise CheckpointError(
        f"loader.load_state_dict() with {spec.num_replicas} ranks, saved with {saved['num_replicas']}",
        f"{cursor} {saved['unit']} were received, which {spec.num_replicas} ranks cannot have received evenly",
        f"a number of ranks that divides {cursor}: {', '.join(map(str, divisors))}",
        f"devices={saved['num_replicas']}, or save at the end of an epoch",
    )
