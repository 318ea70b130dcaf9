"""Gathers what all ranks computed from the batches that they received together: each sample once, in loader order."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from fabric.collectives import all_gather, all_gather_ragged
from fabric.communicators import Communicator
from fabric.data.state import EpochState, LoaderSpec, length_of
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import Structure, flatten, leaf_paths, unflatten

__all__ = ["ActiveIterator", "GatheredBatch", "gather_batch"]

ActiveIterator = tuple[LoaderSpec, EpochState]


def gather_batch(communicator: Communicator, active: Sequence[ActiveIterator], data: Any) -> Any:
    """What all ranks computed from this step's batches; see ``Fabric.gather_for_metrics``. Collective.

    Args:
        communicator: all processes of the job.
        active: the iterations over loaders that have begun and not ended; that of the innermost loop is the last.
        data: any collection of tensors, computed from this process's batch.

    Raises:
        UsageError: no loop over a set-up loader is active, or fabric does not shard its data.
        ConfigurationError: a leaf does not say to which sample it belongs.
    """
    request, expected = "fabric.gather_for_metrics(...)", "the body of a loop over a loader that fabric shards"
    if not active:
        suggestion = "for batch in fabric.setup_dataloaders(loader): fabric.gather_for_metrics(model(batch))"
        raise UsageError(request, "no loop over a set-up loader is active", expected, suggestion)
    batch = GatheredBatch.of(*active[-1])
    if batch.num_replicas != communicator.size:
        problem = f"this loader gives each of {communicator.size} processes all of the data, or what you sharded"
        raise UsageError(request, problem, expected, "the values as they are; or fabric.all_gather(x, concat=True)")
    leaves, structure = flatten(data)
    batch.check(leaves, structure)
    gathered = (all_gather_ragged if batch.unit == "batches" else all_gather)(communicator, leaves)
    arranged = [
        batch.arrange(parts) if isinstance(leaf, Tensor) else leaf for leaf, parts in zip(leaves, gathered, strict=True)
    ]
    return unflatten(structure, arranged)


@dataclass(frozen=True)
class GatheredBatch:
    """The batches that all ranks received at the same step of their loops.

    Attributes:
        num_replicas: how many ranks.
        unit: ``"samples"``: sample i of rank r has place ``i * num_replicas + r``. ``"batches"``: the batch of rank r
            has place r, as a whole. ``"single samples"``: likewise, and it is one sample, without a dim 0.
        kept: how many places hold no repetition; None for all.
        length: samples of this rank's batch; None when that is not known.
    """

    num_replicas: int
    unit: str
    kept: int | None = None
    length: int | None = None

    @classmethod
    def of(cls, spec: LoaderSpec, state: EpochState) -> "GatheredBatch":
        """The one that ends with the last batch of an iteration.

        Raises:
            UsageError: which entries were repeated, or which place a sample has, is not known.
        """
        replicas, sharded = spec.num_replicas, getattr(spec.indices, "sharded", None)
        unit, size = spec.unit, spec.entries_per_batch
        if replicas == 1 or spec.base_seed is not None:
            return cls(replicas, "samples" if unit == "batches" else unit)
        if sharded is not None and sharded.num_replicas == replicas:
            total = length_of(sharded.sampler)
            if total is None and sharded.uneven == "pad":
                _refuse(f"the {type(sharded.sampler).__name__} has no length", 'uneven="drop" in setup_dataloaders()')
            length = length_of(sharded)
        else:
            sampler = spec.order
            if type(sampler) is BatchSampler and isinstance(sampler.sampler, DistributedSampler):
                unit, size, sampler = "samples", sampler.batch_size, sampler.sampler
            if not isinstance(sampler, DistributedSampler):
                _refuse(f"the {type(sampler).__name__} shards the data itself", "DataLoader(dataset, shuffle=True)")
            total, length = (None if sampler.drop_last else length_of(sampler.dataset)), len(sampler)
        behind = state.skip + (state.received - 1) * size
        kept = None if total is None else total - behind * replicas
        return cls(replicas, unit, kept, None if unit != "samples" or length is None else min(size, length - behind))

    def check(self, leaves: list[Any], structure: Structure) -> None:
        """Raise a ConfigurationError for what does not say to which sample it belongs."""
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
            if isinstance(leaf, Tensor):
                fits = self.unit == "single samples" or (leaf.dim() > 0 and self.length in (None, leaf.shape[0]))
                found = f"its shape is {tuple(leaf.shape)}"
            else:
                fits, found = not isinstance(leaf, Number), f"it is the number {leaf!r}"
            if not fits:
                raise ConfigurationError(
                    f"gather_for_metrics(...) of {path or 'the tensor'}",
                    f"which sample is what? {found}",
                    f"tensors of shape ({'n' if self.length is None else self.length}, ...), one entry for each sample "
                    "of this batch",
                    "the values before any mean or sum; fabric.all_reduce(x) for a number for the whole batch",
                )

    def arrange(self, gathered: Any) -> Tensor:
        """What was gathered from one leaf in one tensor: of shape ``(num_replicas, ...)``, or a list for batches."""
        if self.unit == "batches":
            return torch.cat(gathered[: self.kept])
        whole = gathered.transpose(0, 1).flatten(0, 1) if self.unit == "samples" else gathered
        return whole if self.kept is None or self.kept >= len(whole) else whole[: self.kept].clone()


def _refuse(problem: str, suggestion: str) -> NoReturn:
    raise UsageError(
        "fabric.gather_for_metrics(...)",
        f"{problem}: which samples are repetitions is not known",
        "a loader that fabric shards, with a sampler that has a length",
        f"{suggestion}; or fabric.all_gather(x, concat=True), repetitions included",
    )
