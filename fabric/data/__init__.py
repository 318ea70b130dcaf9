"""DataLoaders: sharded over the ranks, their batches moved to the device, and resumed at the batch.

``state`` defines the terms and gathers the results of all ranks for a batch, ``sharding`` selects the samples of a
rank, ``agreed`` looks ahead and agrees on the end of a loop, ``copies`` moves batches, and ``loader`` is the loader
that the user gets.
"""

from fabric.data.loader import FabricDataLoader, LoaderOptions
from fabric.data.position import ActiveIterator, gather_batch
from fabric.data.sharding import Uneven
from fabric.data.uneven import Agreement, Windows, check_no_window, without_repeats

__all__ = [
    "ActiveIterator", "Agreement", "FabricDataLoader", "LoaderOptions", "Uneven", "Windows", "check_no_window",
    "gather_batch", "without_repeats",
]  # fmt: skip
