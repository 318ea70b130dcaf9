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

_CALL_TEXT = "fabric.gather_for_metrics(...)"


class _BatchSize(NamedTuple):
    """The size of the latest batch over all ranks.

    An entry is one item of the sampler's order, or a sample or batch that one rank got:

    - For ``"samples"``, sample i of rank r is entry ``i * num_replicas + r``.
    - For ``"batches"``, the batch of rank r is entry r.
    - For ``"single samples"``, the sample of rank r is entry r. The sample has no dim 0.

    Attributes:
        entries: number of entries that are not repetitions. Repetitions come last. None: no entry
            is a repetition.
        samples_of_rank: number of samples in this rank's batch. None if unknown.
    """

    entries: int | None
    samples_of_rank: int | None


_UNKNOWN = _BatchSize(entries=None, samples_of_rank=None)


def gather_batch(
    communicator: Communicator, active_loops: Sequence[ActiveLoop], results: Any
) -> Any:
    """Gather the results of all ranks for this step's batches, without repeated samples.

    ``Fabric.gather_for_metrics`` calls it. Collective.

    Args:
        communicator: all processes of the job.
        active_loops: the active loops over loaders; the last one is the innermost.
        results: any collection of tensors, computed from this process's batch.

    Returns:
        The collection, with the rows of all ranks in each tensor. Other leaves are unchanged.

    Raises:
        UsageError: no loop over a set-up loader is active, fabric does not shard the loader's data,
            or it is unknown which entries were repeated.
        ConfigurationError: a leaf cannot be assigned to samples.
    """
    spec, position = _innermost_loop(communicator, active_loops)
    # worker_seed_streams is set if fabric shards an iterable dataset in rounds. Under "longest" the
    # last round may be incomplete, so that only some ranks have a sample of it.
    has_equal_batches = spec.has_equal_counts and spec.worker_seed_streams is None
    # Ranks may have batches of different lengths, or none.
    is_uneven = spec.ends_in_lockstep and not has_equal_batches
    size = _UNKNOWN if is_uneven else _batch_size(spec, position)
    leaves, structure = flatten(results)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        _check_leaf(path, leaf, spec, size.samples_of_rank)
    if is_uneven:
        leaves = [_without_repeat(leaf, spec, position) for leaf in leaves]

    # all_gather compares the keys of a collection between ranks. The title is such a key, so that
    # results of different iterations raise an error and are not combined.
    title = f"of iteration {position.epoch}" if spec.order_streams else "of a fixed order"
    collection = {title: leaves}
    if is_uneven or spec.unit == "batches":
        # Ranks may have different numbers of rows.
        gathered = all_gather_ragged(communicator, collection)[title]
        join_ranks = _concatenate
    elif spec.unit == "samples":
        gathered = all_gather(communicator, collection)[title]
        join_ranks = _interleave
    else:
        # Each rank has a single sample, without a dim of samples.
        gathered = all_gather(communicator, collection)[title]
        join_ranks = _drop_repetitions
    for index, rank_values in enumerate(gathered):
        if isinstance(leaves[index], Tensor):
            leaves[index] = join_ranks(rank_values, size.entries)
    return unflatten(structure, leaves)


def _innermost_loop(communicator: Communicator, active_loops: Sequence[ActiveLoop]) -> ActiveLoop:
    """Return the loop whose batch the results are of.

    Raises:
        UsageError: no loop is active, or the ranks do not share its data. They share the data if
            fabric or the sampler shards it, or if a policy of ``uneven`` says that the user does.
    """
    expected = "the body of a loop over a loader that fabric shards"
    if not active_loops:
        raise UsageError(
            _CALL_TEXT,
            problem="no loop over a set-up loader is active",
            expected=expected,
            suggestion="for batch in fabric.setup_dataloaders(loader): "
            "fabric.gather_for_metrics(model(batch))",
        )
    loop = active_loops[-1]
    # A policy that ends the loop on all ranks together says that the user shards the data.
    is_shared = loop.spec.num_replicas == communicator.size or loop.spec.ends_in_lockstep
    if not is_shared:
        raise UsageError(
            _CALL_TEXT,
            problem=f"this loader gives each of {communicator.size} processes all of the data, or "
            "what you sharded",
            expected=expected,
            suggestion="the values as they are; or fabric.all_gather(x, concat=True)",
        )
    return loop


def _batch_size(spec: LoaderSpec, position: EpochPosition) -> _BatchSize:
    """Return the size of the batch that the user has received last.

    The result is ``_UNKNOWN`` on one rank, and for an iterable dataset in complete rounds: no
    sample is repeated there.

    Raises:
        UsageError: entries may be repeated, and it is unknown which.
    """
    if spec.num_replicas == 1 or spec.worker_seed_streams is not None:
        return _UNKNOWN
    order_length = _order_length(spec)
    position_before = replace(position, received_batches=position.received_batches - 1)
    entries = None
    if order_length is not None:
        # The entries that remained before this batch. The gathered rows are sliced up to this
        # number, which cuts off nothing but the repetitions in the last batch.
        entries = order_length - spec.cursor(position_before)
    samples_of_rank = None
    shard_length = spec.shard_length(position)
    if spec.unit == "samples" and shard_length is not None:
        remaining = shard_length - position_before.received_batches * spec.entries_per_batch
        samples_of_rank = min(spec.entries_per_batch, remaining)
    return _BatchSize(entries=entries, samples_of_rank=samples_of_rank)


def _order_length(spec: LoaderSpec) -> int | None:
    """Return the length of the order, in which repetitions do not count.

    None if the order has no length. Then no entry is repeated.

    Raises:
        UsageError: entries may be repeated, and it is unknown which.
    """
    order_source: Any = spec.order_source
    is_sharded_by_fabric = spec.shard_count > 1
    if is_sharded_by_fabric:
        length = length_of(order_source)
        sampler = spec.sharded_sampler
        repeats_entries = sampler is not None and sampler.pads
        if length is None and repeats_entries:
            _refuse_order(order_source, "has no length")
        return length
    # DistributedSampler gives rank r the entries r, r + num_replicas, ..., as fabric does. The
    # entries of any other sampler that shards by itself are not known.
    iterates_like_torch = (
        getattr(type(order_source), "__iter__", None) is DistributedSampler.__iter__
    )
    if not iterates_like_torch:
        _refuse_order(order_source, "shards the data itself")
    return length_of(order_source.dataset)


def _refuse_order(order_source: Any, problem: str) -> NoReturn:
    """Raise the error for a loader of which it is not known which samples were repeated.

    Samples are repeated where the ranks would otherwise get unequal numbers of samples.

    Args:
        order_source: the user's sampler, batch sampler or dataset.
        problem: what the object does, as a verb phrase such as "has no length".
    """
    raise UsageError(
        _CALL_TEXT,
        problem=f"the {type(order_source).__name__} {problem}: which samples are repetitions is "
        "not known",
        expected="a loader that fabric shards, with a sampler that has a length",
        suggestion='setup_dataloaders(DataLoader(dataset)), uneven="drop"; or keep the repetitions '
        "with fabric.all_gather(x, concat=True)",
    )


def _check_leaf(path: str, leaf: Any, spec: LoaderSpec, samples: int | None) -> None:
    """Raise a ConfigurationError for a tensor or number that cannot be assigned to samples.

    A tensor needs a row for each sample of the batch, unless the batch is one sample. A number
    belongs to no sample. Other leaves, such as strings, are not gathered and pass.

    Args:
        path: the path to the leaf, as in code. Empty if the collection is one leaf.
        leaf: a leaf of the results.
        spec: the spec of the loader.
        samples: number of samples in this rank's batch. None if unknown.
    """
    if isinstance(leaf, Tensor):
        if spec.unit == "single samples":
            return
        # If the number of samples is unknown, any number of rows may be right.
        has_row_per_sample = leaf.dim() > 0 and samples in (None, len(leaf))
        if has_row_per_sample:
            return
        description = f"its shape is {tuple(leaf.shape)}"
    elif isinstance(leaf, Number):
        description = f"it is the number {leaf!r}"
    else:
        return
    leaf_name = path or "the tensor"
    rows = samples or "n"
    raise ConfigurationError(
        f"gather_for_metrics(...) of {leaf_name}",
        problem=f"which sample is what? {description}",
        expected=f"tensors of shape ({rows}, ...), one entry for each sample of this batch",
        suggestion="the values before any mean or sum; fabric.all_reduce(x) for a number for the "
        "whole batch",
    )


def _without_repeat(leaf: Any, spec: LoaderSpec, position: EpochPosition) -> Any:
    """Return a leaf with one row for each sample of this rank, or no rows for a repeated batch.

    A rank whose batch is a repeat still takes part in the gathering, with empty tensors. Leaves
    that are not tensors are returned as they are.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if spec.unit == "single samples":
        leaf = leaf[None]  # a row for the one sample
    if position.is_repeat:
        return leaf[:0]
    return leaf


def _concatenate(rank_values: Sequence[Tensor], entries: int | None) -> Tensor:
    """Return the rows of all ranks, one rank after the other.

    Args:
        rank_values: a tensor for each rank. They may have different lengths.
        entries: how many ranks, from rank 0 on, have a batch that is not a repetition. None for all
            ranks.
    """
    return torch.cat(list(rank_values[:entries]))


def _interleave(rank_values: Tensor, entries: int | None) -> Tensor:
    """Return the rows of all ranks: the first row of each rank, then the second, and so on.

    Args:
        rank_values: the rows of each rank, with shape (ranks, rows, ...).
        entries: how many rows are not repetitions. Repetitions come last. None for all rows.
    """
    rows = rank_values.transpose(0, 1).flatten(0, 1)
    # A copy, so that the result does not keep the memory of the repetitions.
    return rows[:entries].clone()


def _drop_repetitions(rank_values: Tensor, entries: int | None) -> Tensor:
    """Return the values of the ranks whose sample is not a repetition. Each rank has one sample.

    Args:
        rank_values: the value of each rank, with shape (ranks, ...).
        entries: how many ranks, from rank 0 on, have a sample that is not a repetition. Samples are
            assigned in the order of the ranks, so repetitions are on the last ranks. None for all
            ranks.
    """
    # A copy, so that the result does not keep the memory of the repetitions.
    return rank_values[:entries].clone()
