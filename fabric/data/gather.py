"""The results of all ranks for the batch of a step, in the order of the samples."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from fabric.collectives import all_gather, all_gather_ragged
from fabric.communicators import Communicator
from fabric.data.position import EpochPosition, length_of
from fabric.data.spec import ActiveLoop, LoaderSpec
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = ["gather_batch"]

_REQUEST = "fabric.gather_for_metrics(...)"


class _BatchSize(NamedTuple):
    """The size of the latest batch over all ranks.

    Its entries are in the order of the sampler. For ``"samples"``, sample i of rank r is entry
    ``i * num_replicas + r``. For ``"batches"``, the batch of rank r is entry r. For ``"single
    samples"``, the sample of rank r is entry r; it has no dim 0.
    """

    entries: int | None
    """Number of entries that are no repetitions. None: all are."""
    samples_of_rank: int | None
    """Number of samples in this rank's batch. None if unknown."""


_UNKNOWN = _BatchSize(None, None)


def gather_batch(
    communicator: Communicator, active_loops: Sequence[ActiveLoop], results: Any
) -> Any:
    """Gather the results of all ranks for this step's batches, without repeated samples.

    ``Fabric.gather_for_metrics`` calls it. Collective.

    Args:
        communicator: all processes of the job.
        active_loops: the active loops over loaders; the last one is the innermost.
        results: any collection of tensors, computed from this process's batch.

    Raises:
        UsageError: no loop over a set-up loader is active, fabric does not shard its data, or it
            is unknown which entries were repeated.
        ConfigurationError: a leaf cannot be assigned to samples.
    """
    spec, position = _innermost_loop(communicator, active_loops)
    # Ranks may have batches of different lengths, or none.
    is_uneven = spec.ends_in_lockstep and not (
        spec.has_equal_counts and spec.worker_seed_streams is None
    )
    size = _UNKNOWN if is_uneven else _batch_size(spec, position)
    leaves, structure = flatten(results)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        _check_leaf(path, leaf, spec, size.samples_of_rank)
    if is_uneven:
        leaves = [_without_repeat(leaf, spec, position) for leaf in leaves]

    # The ranks compare the title: results of different iterations must not be combined.
    title = f"of iteration {position.epoch}" if spec.order_streams else "of a fixed order"
    if is_uneven or spec.unit == "batches":
        gathered = all_gather_ragged(communicator, {title: leaves})[title]
        join_ranks = _concatenate
    elif spec.unit == "samples":
        gathered = all_gather(communicator, {title: leaves})[title]
        join_ranks = _interleave
    else:
        gathered = all_gather(communicator, {title: leaves})[title]
        join_ranks = _take
    for number, of_ranks in enumerate(gathered):
        if isinstance(leaves[number], Tensor):
            leaves[number] = join_ranks(of_ranks, size.entries)
    return unflatten(structure, leaves)


def _innermost_loop(communicator: Communicator, active_loops: Sequence[ActiveLoop]) -> ActiveLoop:
    """Return the innermost loop. Raise a UsageError unless fabric shards its data."""
    expected = "the body of a loop over a loader that fabric shards"
    if not active_loops:
        raise UsageError(
            _REQUEST,
            problem="no loop over a set-up loader is active",
            expected=expected,
            suggestion="for batch in fabric.setup_dataloaders(loader): "
            "fabric.gather_for_metrics(model(batch))",
        )
    loop = active_loops[-1]
    if loop.spec.num_replicas != communicator.size and not loop.spec.ends_in_lockstep:
        raise UsageError(
            _REQUEST,
            problem=f"this loader gives each of {communicator.size} processes all of the data, or "
            "what you sharded",
            expected=expected,
            suggestion="the values as they are; or fabric.all_gather(x, concat=True)",
        )
    return loop


def _batch_size(spec: LoaderSpec, position: EpochPosition) -> _BatchSize:
    if spec.num_replicas == 1 or spec.worker_seed_streams is not None:
        return _UNKNOWN
    order_length = _order_length(spec)
    before = replace(position, received_batches=position.received_batches - 1)
    entries = None
    if order_length is not None:
        entries = order_length - spec.cursor(before)
    samples_of_rank = None
    shard_length = spec.shard_length(position)
    if spec.unit == "samples" and shard_length is not None:
        remaining = shard_length - before.received_batches * spec.entries_per_batch
        samples_of_rank = min(spec.entries_per_batch, remaining)
    return _BatchSize(entries, samples_of_rank)


def _order_length(spec: LoaderSpec) -> int | None:
    """Return the length of the order without repetitions.

    None if it has no length and nothing is repeated.
    """
    order: Any = spec.order_source
    if spec.shard_count > 1:
        length = length_of(order)
        sampler = spec.sharded_sampler
        if length is None and sampler is not None and sampler.pads:
            _refuse_order(order, "has no length")
        return length
    # DistributedSampler gives rank r the entries r, r + num_replicas, ..., as fabric does. The
    # entries of any other sampler that shards by itself are not known.
    if getattr(type(order), "__iter__", None) is not DistributedSampler.__iter__:
        _refuse_order(order, "shards the data itself")
    return length_of(order.dataset)


def _refuse_order(order: Any, problem: str) -> NoReturn:
    raise UsageError(
        _REQUEST,
        problem=f"the {type(order).__name__} {problem}: which samples are repetitions is not known",
        expected="a loader that fabric shards, with a sampler that has a length",
        suggestion='setup_dataloaders(DataLoader(dataset)), uneven="drop"; with repetitions '
        "fabric.all_gather(x, concat=True)",
    )


def _check_leaf(path: str, leaf: Any, spec: LoaderSpec, samples: int | None) -> None:
    """Raise a ConfigurationError unless a leaf has an entry for each sample of the batch."""
    if isinstance(leaf, Tensor):
        if spec.unit == "single samples":
            return
        if leaf.dim() > 0 and samples in (None, len(leaf)):
            return
        description = f"its shape is {tuple(leaf.shape)}"
    elif isinstance(leaf, Number):
        description = f"it is the number {leaf!r}"
    else:
        return
    raise ConfigurationError(
        f"gather_for_metrics(...) of {path or 'the tensor'}",
        problem=f"which sample is what? {description}",
        expected=f"tensors of shape ({samples or 'n'}, ...), one entry for each sample of this "
        "batch",
        suggestion="the values before any mean or sum; fabric.all_reduce(x) for a number for the "
        "whole batch",
    )


def _without_repeat(leaf: Any, spec: LoaderSpec, position: EpochPosition) -> Any:
    """Return a leaf with one row for each sample of this rank: no row for a repeated batch."""
    if not isinstance(leaf, Tensor):
        return leaf
    if spec.unit == "single samples":
        leaf = leaf[None]
    if position.is_repeat:
        return leaf[:0]
    return leaf


def _concatenate(of_ranks: Sequence[Tensor], entries: int | None) -> Tensor:
    """Return the rows of all ranks, one rank after the other. An entry is a rank's batch."""
    return torch.cat(of_ranks[:entries])  # pyright: ignore[reportArgumentType]  # a list


def _interleave(of_ranks: Tensor, entries: int | None) -> Tensor:
    """Return the rows of all ranks: the first row of each rank, then the second, and so on."""
    return of_ranks.transpose(0, 1).flatten(0, 1)[:entries].clone()


def _take(of_ranks: Tensor, entries: int | None) -> Tensor:
    """Return a row for each rank."""
    return of_ranks[:entries].clone()
