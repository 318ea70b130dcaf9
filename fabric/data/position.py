"""The position of a loop over a loader."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["EpochPosition", "MicroBatch", "State", "length_of"]

State = dict[str, Any]  # plain containers, numbers, strings and tensors


class MicroBatch(NamedTuple):
    """The number of a micro-batch in a window of ``fabric.accumulate``.

    Attributes:
        number: the number of the micro-batch, from 1.
        window_length: the number of micro-batches in a full window.
    """

    number: int
    window_length: int


# [Note: Data]
# The *order* is what the user's own sampler yields in one epoch, the same on every rank: single
# samples or, from a batch sampler, whole batches. An *entry* is one item of the order. The order is
# *sharded*: this rank takes the entries `rank, rank + num_replicas, ...`. The *cursor* counts how
# many entries of the order all ranks together have received, in the *unit* of the order:
# `"samples"` that the loader groups into batches, `"single samples"` of a loader without automatic
# batching, or `"batches"`. The cursor does not depend on the number of ranks or, in samples, on the
# batch size. When a position is loaded, the remaining entries of the order are sharded again.
# See [Note: Uneven ranks] in lockstep.py.
@dataclass(eq=False)
class EpochPosition:
    """The position of one iteration over a loader, which the iteration updates.

    Attributes:
        epoch: number of the epoch.
        skipped_entries: number of entries that were received before the iteration began. They are
            not loaded again. If fabric shards the order, entries of all ranks count. If the sampler
            shards by itself, only entries of this rank count.
        states_to_replay: states of the random streams from which the order is drawn again. The key
            is the phase of the drawing, ``"begin"`` or ``"draw"``. Empty for a new order.
        drawn_states: states of the random streams from which the order was drawn, by phase.
        received_batches: number of batches that the user has received, without repeats.
        is_repeat: whether the current batch is a repeat.
        is_finished: whether the iteration has ended.
        is_final: whether the current batch is known to be the last one.
        micro_batch: the current micro-batch while a window of
            :class:`~fabric.data.accumulate.Windows` is open. None otherwise.
        state_before_fetch: the loader's or dataset's own state from before a batch was fetched
            ahead. None if no batch was fetched ahead.
    """

    epoch: int
    skipped_entries: int = 0
    states_to_replay: Mapping[str, State] = field(default_factory=dict)
    drawn_states: dict[str, State] = field(default_factory=dict)
    received_batches: int = 0
    is_repeat: bool = False
    is_finished: bool = False
    is_final: bool = False
    micro_batch: MicroBatch | None = None
    state_before_fetch: Any = None


def length_of(sized: Any) -> int | None:
    """Return the length of a sampler, dataset or loader. None if it has no length."""
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return None
