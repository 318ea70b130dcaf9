"""Putting together what the ranks computed from one round: every sample once, in the order of the data."""

from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from fabric.data.base import Course, Pass
from fabric.data.order import Share, sized
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import Structure, leaf_paths

__all__ = ["WholeRound", "whole_round"]


@dataclass(frozen=True)
class WholeRound:
    """The batches that all ranks received at the same step of their loops.

    Attributes:
        num_replicas: how many ranks.
        kind: ``"samples"``: sample i of rank r has place ``i * num_replicas + r`` in the round. ``"batches"``: the
            batch of rank r has place r, as a whole. ``"single"``: likewise, and it is one sample, without a dim 0.
        kept: how many places hold no repetition; None for all.
        length: samples of this rank's batch; None when that is not known.
    """

    num_replicas: int
    kind: Literal["samples", "batches", "single"]
    kept: int | None
    length: int | None

    def check(self, leaves: list[Any], structure: Structure) -> None:
        """Raise a ConfigurationError for what does not say to which sample it belongs."""
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                fits = not isinstance(leaf, Number)
                found = f"it is the number {leaf!r}"
            else:
                fits = self.kind == "single" or (leaf.dim() > 0 and self.length in (None, leaf.shape[0]))
                found = f"its shape is {tuple(leaf.shape)}"
            if not fits:
                raise ConfigurationError(
                    f"gather_for_metrics(...) of {path or 'the tensor'}",
                    f"which sample is what? {found}",
                    f"tensors of shape ({'n' if self.length is None else self.length}, ...), one entry for each sample "
                    "of this batch",
                    "the values before any mean or sum; fabric.all_reduce(x) for a number for the whole batch",
                )

    def arranged(self, gathered: Any) -> Tensor:
        """What was gathered from one leaf in one tensor: of shape ``(num_replicas, ...)``, or a list for batches."""
        if self.kind == "batches":
            return torch.cat(gathered[: self.kept])
        whole = gathered.transpose(0, 1).flatten(0, 1) if self.kind == "samples" else gathered
        return whole if self.kept is None or self.kept >= len(whole) else whole[: self.kept].clone()


def whole_round(course: Course, current: Pass, batch_size: int | None, rounds: bool) -> WholeRound:
    """The round in which the last batch of a pass was received.

    Args:
        course: of the loader.
        current: the pass.
        batch_size: of the loader; None without automatic batching.
        rounds: whether an iterable dataset is dealt in complete rounds.

    Raises:
        UsageError: which entries were repeated, or which place a sample has, is not known.
    """
    replicas, share = course.num_replicas, getattr(course.indices, "share", None)
    kind, size = ("batches", 1) if course.unit == "batches" else ("samples", batch_size)
    if size is None:
        kind, size = ("batches" if isinstance(course.order, BatchSampler) else "single"), 1
    if replicas == 1:
        return WholeRound(1, "single" if kind == "single" else "samples", None, None)
    if isinstance(share, Share) and share.num_replicas == replicas:
        total = sized(share.sampler)
        if total is None and share.uneven == "pad":
            _refuse(f"the {type(share.sampler).__name__} has no length", 'uneven="drop" in setup_dataloaders(...)')
        length = None if total is None else len(share)
    elif rounds:
        return WholeRound(replicas, "single" if kind == "single" else "samples", None, None)
    else:
        kind, size, sampler = _dealt_by_torch(course, kind, size)
        total, length = (None if sampler.drop_last else sized(sampler.dataset)), len(sampler)
    behind = current.skip + (current.received - 1) * size
    kept = None if total is None else total - behind * replicas
    return WholeRound(
        replicas, kind, kept, min(size, length - behind) if kind == "samples" and length is not None else None
    )


def _dealt_by_torch(course: Course, kind: Any, size: int) -> tuple[Any, int, DistributedSampler[Any]]:
    order = course.order
    if type(order) is BatchSampler and isinstance(order.sampler, DistributedSampler):
        return "samples", order.batch_size, order.sampler
    if not isinstance(order, DistributedSampler):
        _refuse(f"the {type(order).__name__} deals the data itself", "DataLoader(dataset, shuffle=True)")
    return kind, size, order


def _refuse(wrong: str, instead: str) -> NoReturn:
    raise UsageError(
        "fabric.gather_for_metrics(...)",
        f"{wrong}: which samples are repetitions is not known",
        "a loader that fabric deals, with a sampler that has a length",
        f"{instead}; or fabric.all_gather(x, concat=True), repetitions included",
    )
