"""The results of all ranks for the batch of a step, in the order of the samples."""

import re
from collections.abc import Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from fabric.collectives import all_gather, all_gather_ragged
from fabric.communicators import Communicator
from fabric.data.loader import FabricDataLoader
from fabric.data.position import EpochPosition, length_of
from fabric.data.spec import ActiveLoop, LoaderSpec
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = ["gather_batch"]

_CALL_TEXT = "fabric.gather_for_metrics(...)"
# The end of the path to an item of a list.
_ITEM_OF_LIST = re.compile(r"\[\d+\]$")


class _BatchSize(NamedTuple):
    """The size of the latest batches of all ranks together.

    An entry is what the sampler yields at a time. The unit of the loader says what that is:

    - ``"samples"``: sample i in the batch of rank r is entry ``i * num_replicas + r``.
    - ``"batches"``: the batch of rank r is entry r.
    - ``"single samples"`` (without batching): the sample of rank r is entry r. Its tensors have no
      dim of samples.

    Attributes:
        remaining_entries: number of entries that remained in the order before these batches.
            Entries of the batches beyond this number are repetitions. None: no entry is one.
        samples_of_rank: number of samples in this rank's batch. None if unknown.
    """

    remaining_entries: int | None
    samples_of_rank: int | None


_UNKNOWN_SIZE = _BatchSize(remaining_entries=None, samples_of_rank=None)


class _BatchLayout(NamedTuple):
    """How the rows of the results are assigned to samples.

    If the batches of two loops have equal layouts, their results are gathered in the same way.

    Attributes:
        unit: what an entry is, see :class:`_BatchSize`.
        size: the size of the ranks' batches.
        is_uneven: whether some ranks may have shorter batches than others, or no more batches.
        is_repeat: whether this rank got an earlier batch again, so that its samples do not count.
    """

    unit: str
    size: _BatchSize
    is_uneven: bool
    is_repeat: bool


def gather_batch(
    communicator: Communicator,
    active_loops: Sequence[ActiveLoop],
    results: Any,
    loader: FabricDataLoader | None = None,
) -> Any:
    """Gather the results of all ranks for this step's batches, without repeated samples.

    ``Fabric.gather_for_metrics`` calls it. Collective.

    Args:
        communicator: all processes of the job.
        active_loops: the active loops over loaders.
        results: any collection of tensors, computed from this process's batch.
        loader: the loader of the batch. None is the loader that yielded a batch last.

    Returns:
        The collection, with the rows of all ranks in each tensor. Other leaves are unchanged.

    Raises:
        UsageError: no loop over a set-up loader is active, the batch may be of several loops,
            fabric does not shard the loader's data, or it is unknown which entries were repeated.
        ConfigurationError: a leaf cannot be assigned to samples.
        ArgumentTypeError: ``loader`` is not set up.
    """
    if not isinstance(loader, FabricDataLoader | None):
        raise ArgumentTypeError(
            f"fabric.gather_for_metrics(..., loader={type(loader).__name__})",
            expected="the loader that fabric.setup_dataloaders returned",
        )
    loop = _latest_loop(active_loops, loader)
    _check_concurrent_loops(loop, active_loops, loader)
    _check_data_is_sharded(communicator, loop.spec)
    _check_repetitions_are_known(loop.spec)
    # fabric warns at the end of a loop whose batches repeated samples, unless this is true: the
    # result of this function has no repetitions.
    loop.was_gathered_for_metrics = True
    layout = _layout(loop)
    leaves, structure = flatten(results)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        _check_leaf(path, leaf, layout)
    if layout.is_uneven:
        # A rank that has run out of data got its last batch again, and sends no rows for it.
        leaves = [_without_repeat(leaf, layout) for leaf in leaves]
    gathered = _gather_leaves(communicator, leaves, layout, key=_iteration_key(loop))
    return unflatten(structure, gathered)


def _gather_leaves(
    communicator: Communicator, leaves: Sequence[Any], layout: _BatchLayout, key: str
) -> list[Any]:
    """Return leaves with the rows of all ranks in each tensor, without repetitions. Collective.

    Args:
        communicator: all processes of the job.
        leaves: the leaves of this rank's results. Leaves that are not tensors are returned as they
            are.
        layout: the layout of this rank's batch.
        key: a text that is the same on all ranks if their batches belong together.
    """
    # Under this key, all_gather raises if the batches of the ranks do not belong together: it
    # compares the keys of a collection between the ranks.
    collection = {key: leaves}
    if layout.is_uneven or layout.unit == "batches":
        # Ranks may have different numbers of rows, so rows cannot alternate between the ranks.
        gathered = all_gather_ragged(communicator, collection)[key]
        join_ranks = _concatenate
    elif layout.unit == "samples":
        # Consecutive samples of the order are on consecutive ranks.
        gathered = all_gather(communicator, collection)[key]
        join_ranks = _interleave
    else:
        # Each rank has a single sample, without a dim of samples.
        gathered = all_gather(communicator, collection)[key]
        join_ranks = _drop_repetitions
    joined: list[Any] = []
    for leaf, rank_values in zip(leaves, gathered, strict=True):
        if isinstance(leaf, Tensor):
            # Keeps only as many entries as remained in the order: the entries after them are
            # repetitions. An entry is a sample or, if the unit is "batches", a rank's batch. None
            # keeps all entries.
            leaf = join_ranks(rank_values, layout.size.remaining_entries)
        joined.append(leaf)
    return joined


def _iteration_key(loop: ActiveLoop) -> str:
    """Return a text that is equal on ranks whose batches are in the same order. Errors show it."""
    if loop.spec.order_streams:
        # The order is drawn anew in each iteration.
        return f"of iteration {loop.position.epoch}"
    return "of a fixed order"


def _latest_loop(active_loops: Sequence[ActiveLoop], loader: FabricDataLoader | None) -> ActiveLoop:
    """Return the loop that yielded a batch last, among the loops over ``loader`` if it is given.

    Raises:
        UsageError: no such loop is active.
    """
    latest: ActiveLoop | None = None
    for loop in active_loops:
        is_of_loader = loader is None or loop.spec is loader._spec
        if is_of_loader and (latest is None or loop.batch_number > latest.batch_number):
            latest = loop
    if latest is not None:
        return latest
    problem = "no loop over a set-up loader is active"
    if loader is not None:
        problem = "no loop over this loader is active: it has ended, or its last batch was fetched"
    raise UsageError(
        _CALL_TEXT,
        problem=problem,
        expected="the body of a loop over a loader that fabric shards, before the next batch is "
        "fetched",
        suggestion="for batch in fabric.setup_dataloaders(loader): "
        "fabric.gather_for_metrics(model(batch))",
    )


def _check_concurrent_loops(
    latest: ActiveLoop, active_loops: Sequence[ActiveLoop], loader: FabricDataLoader | None
) -> None:
    """Raise a UsageError if the results may be of a batch of another loop than the latest.

    Of nested loops, the inner loop is the latest: the outer loop yields nothing between two batches
    of the inner loop. Loops in a ``zip`` take turns, and the results may be of any of their
    batches.
    """
    for loop in active_loops:
        is_candidate = loop is not latest and (loader is None or loop.spec is loader._spec)
        # The batches of all loops are numbered together. So this loop has yielded a batch between
        # the latest loop's previous batch and its current one.
        takes_turns = loop.batch_number > latest.previous_batch_number
        if is_candidate and takes_turns and not _are_gathered_equally(loop, latest):
            suggestion = "fabric.gather_for_metrics(results, loader=loader)"
            if loader is not None:
                suggestion = "a set-up loader for each loop"
            raise UsageError(
                _CALL_TEXT,
                problem="several loops take turns, as in zip(first, second), and their batches "
                "count different samples: whether the results are of batch "
                f"{loop.position.received_batches} of {_describe(loop)}, or of batch "
                f"{latest.position.received_batches} of {_describe(latest)}, is not known",
                suggestion=suggestion,
            )


def _are_gathered_equally(first: ActiveLoop, second: ActiveLoop) -> bool:
    """Return whether the results of two loops' latest batches would be gathered in the same way.

    Then it does not matter of which of the two batches the results are.
    """
    for loop in (first, second):
        if _find_order_problem(loop.spec) is not None:
            return False
    layout = _layout(first)
    # An uneven layout has no number of rows, so that equal layouts would prove nothing.
    return not layout.is_uneven and layout == _layout(second)


def _describe(loop: ActiveLoop) -> str:
    """Return a text for the loader of a loop: its dataset, and the length of an epoch if known."""
    # The sampler or dataset that makes the order of an epoch.
    length = length_of(loop.spec.order_source)
    name = type(loop.spec.dataset).__name__
    if length is None:
        return f"a loader of a {name}"
    return f"a loader of a {name} with {length} {loop.spec.unit}"


def _check_data_is_sharded(communicator: Communicator, spec: LoaderSpec) -> None:
    """Raise a UsageError if the ranks do not share the data of a loader.

    Without a share of its own, each rank has all of the data, and every sample would be gathered
    once for each rank.
    """
    is_sharded_by_fabric_or_sampler = spec.num_replicas == communicator.size
    # The policies "shortest" and "longest" are for data that the user shards.
    is_sharded_by_user = spec.ends_in_lockstep
    if is_sharded_by_fabric_or_sampler or is_sharded_by_user:
        return
    raise UsageError(
        _CALL_TEXT,
        problem=f"this loader gives each of {communicator.size} processes all of the data, or "
        "what you sharded",
        expected="the body of a loop over a loader that fabric shards",
        suggestion="the values as they are; or fabric.all_gather(x, concat=True)",
    )


def _layout(loop: ActiveLoop) -> _BatchLayout:
    """Return the layout of the batch that the user has received last from a loop."""
    spec = loop.spec
    is_uneven = _is_uneven(spec)
    # Not needed if batches are uneven: each rank then sends the rows that it has, and only a whole
    # batch may be a repetition.
    size = _UNKNOWN_SIZE
    if not is_uneven:
        size = _batch_size(spec, loop.position)
    return _BatchLayout(
        unit=spec.unit,
        size=size,
        is_uneven=is_uneven,
        is_repeat=loop.position.is_repeat,
    )


def _is_uneven(spec: LoaderSpec) -> bool:
    """Return whether some ranks may have shorter batches than others, or no more batches."""
    # Under "longest", the last round of an iterable dataset may be incomplete: then only some ranks
    # have a sample of this round.
    has_equal_batches = spec.has_equal_counts and not spec.is_sharded_in_rounds
    return spec.ends_in_lockstep and not has_equal_batches


def _batch_size(spec: LoaderSpec, position: EpochPosition) -> _BatchSize:
    """Return the size of the batch that the user has received last.

    The result is ``_UNKNOWN_SIZE`` on one rank and for an iterable dataset in complete rounds. No
    sample is repeated then, so that the size is not needed.
    """
    if spec.num_replicas == 1 or spec.is_sharded_in_rounds:
        return _UNKNOWN_SIZE
    order_length = _order_length(spec)
    # ``received_batches`` counts this batch already.
    position_before = replace(position, received_batches=position.received_batches - 1)
    remaining_entries = None
    if order_length is not None:
        # The entries that remained before this batch. The gathered rows are cut to this number. In
        # the last batch this removes the repetitions. Earlier batches have fewer rows.
        remaining_entries = order_length - spec.cursor(position_before)
    samples_of_rank = None
    shard_length = spec.shard_length(position)
    if spec.unit == "samples" and shard_length is not None:
        # This rank's last batch may be short.
        remaining_of_rank = shard_length - position_before.received_batches * spec.entries_per_batch
        samples_of_rank = min(spec.entries_per_batch, remaining_of_rank)
    return _BatchSize(remaining_entries=remaining_entries, samples_of_rank=samples_of_rank)


def _order_length(spec: LoaderSpec) -> int | None:
    """Return the length of the order without repetitions.

    None if the order has no length. Then no entry is repeated: the callers of :func:`_layout` have
    left out or refused loaders that repeat entries of an order without a length.
    """
    order_source: Any = spec.order_source
    is_sharded_by_fabric = spec.shard_count > 1
    if is_sharded_by_fabric:
        return length_of(order_source)
    # A DistributedSampler, whose own length counts one rank's entries with repetitions.
    return length_of(order_source.dataset)


def _find_order_problem(spec: LoaderSpec) -> str | None:
    """Return why it is not known which entries are repeated. None if it is known.

    Entries are repeated so that all ranks get equally many. The result is a verb phrase about the
    sampler, such as "has no length".
    """
    has_no_repetitions = spec.num_replicas == 1 or spec.is_sharded_in_rounds or _is_uneven(spec)
    if has_no_repetitions:
        return None
    is_sharded_by_fabric = spec.shard_count > 1
    if is_sharded_by_fabric:
        sampler = spec.sharded_sampler
        repeats_entries = sampler is not None and sampler.pads
        if repeats_entries and length_of(spec.order_source) is None:
            return "has no length"
        return None
    # The sampler shards by itself. torch's DistributedSampler gives rank r the entries r,
    # r + num_replicas, ..., as fabric does. What another sampler gives each rank is not known.
    iterates_like_torch = (
        getattr(type(spec.order_source), "__iter__", None) is DistributedSampler.__iter__
    )
    if not iterates_like_torch:
        return "shards the data itself"
    return None


def _check_repetitions_are_known(spec: LoaderSpec) -> None:
    """Raise a UsageError if it is not known which samples of a loader are repeated.

    Samples are repeated so that all ranks get equally many. ``gather_for_metrics`` has to drop the
    repetitions.
    """
    problem = _find_order_problem(spec)
    if problem is None:
        return
    raise UsageError(
        _CALL_TEXT,
        problem=f"the {type(spec.order_source).__name__} {problem}: which samples are repetitions "
        "is not known",
        expected="a loader that fabric shards, with a sampler that has a length",
        suggestion="setup_dataloaders(DataLoader(dataset)); or setup_dataloaders(..., "
        'uneven="drop"); or keep the repetitions with fabric.all_gather(x, concat=True)',
    )


def _check_leaf(path: str, leaf: Any, layout: _BatchLayout) -> None:
    """Raise a ConfigurationError for a tensor, number or string that would not be gathered right.

    A tensor needs a row for each sample of the batch, unless the batch is one sample. A number
    belongs to no sample. A string in a list belongs to a sample, but only tensors are gathered.
    Other leaves, such as a single string, are not gathered and pass.

    Args:
        path: the path to the leaf, as in code. Empty if the collection is one leaf.
        leaf: a leaf of the results.
        layout: the layout of the batch.
    """
    samples = layout.size.samples_of_rank
    if isinstance(leaf, Tensor):
        if layout.unit == "single samples":
            return
        # If the number of samples is unknown (None), any number of rows may be right.
        has_rows = leaf.dim() > 0
        if has_rows and (samples is None or len(leaf) == samples):
            return
        description = f"its shape is {tuple(leaf.shape)}"
    elif isinstance(leaf, Number):
        description = f"it is the number {leaf!r}"
    elif isinstance(leaf, str) and _ITEM_OF_LIST.search(path):
        raise _string_error(path, leaf)
    else:
        return
    leaf_name = path or "the tensor"
    rows = samples or "n"
    raise ConfigurationError(
        f"gather_for_metrics(...) of {leaf_name}",
        problem=f"it does not have one entry for each sample: {description}",
        expected=f"tensors of shape ({rows}, ...), one entry for each sample of this batch",
        suggestion="the values before any mean or sum; fabric.all_reduce(x) for a number for the "
        "whole batch",
    )


def _string_error(path: str, text: str) -> ConfigurationError:
    """Return the error for a string in a list of the results, at this path."""
    return ConfigurationError(
        f"gather_for_metrics(...) of {path}",
        problem=f"strings are not gathered: {text!r} is of this process's batch, and the "
        "result would have no strings of the other processes",
        expected="tensors of shape (n, ...), one entry for each sample of this batch",
        suggestion="gather token ids or the indices of the samples, as a tensor, and make the "
        "strings from the result",
    )


def _without_repeat(leaf: Any, layout: _BatchLayout) -> Any:
    """Return a leaf with a row for each sample of this rank, without rows for a repeated batch.

    A rank whose batch is a repeat still takes part in the gathering, which is collective, with
    empty tensors. Leaves that are not tensors are returned as they are.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if layout.unit == "single samples":
        leaf = leaf[None]  # a row for the one sample
    if layout.is_repeat:
        return leaf[:0]
    return leaf


def _concatenate(rank_values: Sequence[Tensor], num_ranks: int | None) -> Tensor:
    """Return the rows of the first ranks, one rank after the other.

    Args:
        rank_values: a tensor for each rank. They may have different lengths.
        num_ranks: the number of ranks, from rank 0 on, whose rows are taken. The other ranks have
            run out, and have repeated an earlier batch. None, or a larger number than there are
            ranks, takes all.
    """
    return torch.cat(list(rank_values[:num_ranks]))


def _interleave(rank_values: Tensor, entries: int | None) -> Tensor:
    """Return the rows of all ranks: the first row of each rank, then the second, and so on.

    Args:
        rank_values: the rows of each rank, with shape (ranks, rows, ...).
        entries: how many rows of the result to keep. The rows after them are repetitions: samples
            that a rank got a second time so that all ranks have equally many. None for all rows.
    """
    rows = rank_values.transpose(0, 1).flatten(0, 1)
    # A copy, so that the result does not keep the memory of the repetitions.
    return rows[:entries].clone()


def _drop_repetitions(rank_values: Tensor, num_kept: int | None) -> Tensor:
    """Return the values of the ranks whose sample is not a repetition. Each rank has one sample.

    Args:
        rank_values: the value of each rank, with shape (ranks, ...).
        num_kept: how many ranks, from rank 0 on, have a sample that is not a repetition. Samples
            are assigned in the order of the ranks, so repetitions are on the last ranks. None for
            all ranks.
    """
    # A copy, so that the result does not keep the memory of the repetitions.
    return rank_values[:num_kept].clone()
