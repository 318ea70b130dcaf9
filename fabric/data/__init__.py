"""DataLoaders: sharded over the ranks, their batches moved to the device, resumed at the batch.

``position`` and ``spec`` define the terms, ``sharding`` selects the samples of a rank,
``saved_position`` saves where a loop is, ``copies`` moves batches, ``lockstep`` ends a loop on all
ranks together, and ``loader`` is the loader that the user gets. ``gather``, ``accumulate``,
``metrics`` and ``join`` serve the body of a loop: results of all ranks, windows of micro-batches,
and loops in which ranks have different numbers of batches.
"""

from fabric.data.accumulate import Windows, check_no_window, open_micro_batch
from fabric.data.gather import gather_batch
from fabric.data.join import JoinedPasses, follow_last_rank
from fabric.data.loader import BatchSource, DataParallelJob, FabricDataLoader, LoaderOptions
from fabric.data.lockstep import Lockstep, without_repeats
from fabric.data.spec import ActiveLoop, Uneven

__all__ = [
    "ActiveLoop",
    "BatchSource",
    "DataParallelJob",
    "FabricDataLoader",
    "JoinedPasses",
    "LoaderOptions",
    "Lockstep",
    "Uneven",
    "Windows",
    "check_no_window",
    "follow_last_rank",
    "gather_batch",
    "open_micro_batch",
    "without_repeats",
]
