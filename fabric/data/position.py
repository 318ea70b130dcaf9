"""The position of a loop over a loader.

[Note: Data] The *order* is what the user's own sampler yields in one epoch, the same on every
rank: single samples or, from a batch sampler, whole batches. The order is *sharded*: this rank
takes the entries ``rank, rank + num_replicas, ...``. The *cursor* counts how many entries of the
order all ranks together have received, in the *unit* of the order: ``"samples"`` that make
batches, ``"single samples"`` of a loader without automatic batching, or ``"batches"``. The cursor
does not depend on the number of ranks or, in samples, on the batch size. When a position is
loaded, the remaining entries of the order are sharded again.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EpochPosition", "State", "length_of"]

State = dict[str, Any]  # plain containers, numbers, strings and tensors


@dataclass(eq=False)
class EpochPosition:
    """The position of one iteration over a loader.

    Attributes:
        epoch: number of the epoch.
        skip: number of entries that were received before the iteration began and are not loaded
            again. If the sampler shards by itself, entries of this rank's shard; otherwise entries
            of the order.
        replay: states of the random streams to draw the order from again, by phase of the drawing.
        drawn: states of the random streams from which the order was drawn, by phase.
        received: number of batches that the user has received.
        is_repeat: whether the current batch is a repeat; see ``[Note: Uneven ranks]`` in
            ``lockstep.py``.
        is_finished: whether the iteration has ended.
        is_final: whether the current batch is known to be the last one.
        window: number of the current micro-batch, from 1, and number of micro-batches, inside a
            window of :class:`~fabric.data.accumulate.Windows`; None outside.
        state_before_fetch: the loader's or dataset's own state from before a batch was fetched
            ahead. None if no batch was.
    """

    epoch: int
    skip: int = 0
    replay: Mapping[str, State] = field(default_factory=dict)
    drawn: dict[str, State] = field(default_factory=dict)
    received: int = 0
    is_repeat: bool = False
    is_finished: bool = False
    is_final: bool = False
    window: tuple[int, int] | None = None
    state_before_fetch: Any = None


def length_of(sized: Any) -> int | None:
    """Return the length of a sampler, dataset or loader. None if it has no length."""
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return None
