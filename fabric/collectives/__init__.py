"""The collectives over collections of tensors and numbers, and over any object."""

from fabric.collectives.objects import gather, recv, scatter, send
from fabric.collectives.ops import (
    all_gather,
    all_gather_ragged,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)

__all__ = [
    "all_gather",
    "all_gather_ragged",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
