"""DataLoaders: sharded over the ranks, their batches moved to the device, and resumed at the batch.

``state`` defines the terms and puts together what all ranks computed from a batch, ``sharding`` says which samples a
rank asks for, ``agreed`` whether another batch follows, ``copies`` moves batches, and ``loader`` is the loader of the
user. ``windows`` are of those whose gradients are accumulated.
"""

from fabric.data.loader import FabricDataLoader
from fabric.data.state import ActiveIterator, gather_batch
from fabric.data.windows import Windows, check_no_window

__all__ = ["ActiveIterator", "FabricDataLoader", "Windows", "check_no_window", "gather_batch"]
