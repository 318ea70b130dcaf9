"""DataLoaders: sharded over the ranks, their batches moved to the device, and resumed at the batch.

``state`` defines the terms and puts together what all ranks computed from a batch, ``sharding`` says which samples a
rank asks for, ``copies`` moves batches, and ``loader`` is the loader of the user.
"""

from fabric.data.loader import FabricDataLoader
from fabric.data.state import ActiveIterator, gather_batch

__all__ = ["ActiveIterator", "FabricDataLoader", "gather_batch"]
