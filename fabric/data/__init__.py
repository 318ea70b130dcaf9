"""DataLoaders: sharded over the ranks, their batches moved to the device, and resumed at the batch.

``state`` defines the terms and puts together what all ranks computed from a batch, ``sharding`` says which samples a
rank asks for, ``agreed`` what is known of the batches to come, ``copies`` moves batches, and ``loader`` is the loader
of the user.
"""

from fabric.data.agreed import Agreement, Windows, check_no_window, without_repeats
from fabric.data.loader import FabricDataLoader, LoaderOptions
from fabric.data.sharding import Uneven
from fabric.data.state import ActiveIterator, gather_batch

__all__ = [
    "ActiveIterator", "Agreement", "FabricDataLoader", "LoaderOptions", "Uneven", "Windows", "check_no_window",
    "gather_batch", "without_repeats",
]  # fmt: skip
