"""DataLoaders: sharded over the ranks, their batches moved to the device, and resumed at the batch.

``state`` defines the terms, ``sharding`` says which samples a rank asks for, ``prefetch`` moves batches to a GPU,
``gathering`` puts together what all ranks computed from a batch, ``loader`` is the loader of the user.
"""

from fabric.data.gathering import ActiveIterator, gather_batch
from fabric.data.loader import FabricDataLoader

__all__ = ["ActiveIterator", "FabricDataLoader", "gather_batch"]
