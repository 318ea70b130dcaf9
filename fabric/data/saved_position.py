"""The saved form of a position, and the checks before a loader continues from it."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from fabric.data.position import EpochPosition, State
from fabric.data.spec import LoaderSpec
from fabric.errors import CheckpointError

__all__ = [
    "DatasetState",
    "check_saved_position",
    "entries_to_skip",
    "is_inside_epoch",
    "saved_position",
    "warn_of_other_batches",
]

_FORMAT = 1  # increase it when the meaning of a field changes


class DatasetState(NamedTuple):
    """The position in an iterable dataset.

    Attributes:
        state: the dataset's own state. None if the dataset does not keep its position.
        has_ended: whether the dataset has yielded its last sample, which is in the current batch.
            ``state`` may then be the state of the dataset at the start of the next epoch.
    """

    state: Any = None
    has_ended: bool = False


def saved_position(
    spec: LoaderSpec, position: EpochPosition, *, has_begun: bool, dataset_state: DatasetState
) -> State:
    """Return a position as plain dicts, numbers, strings and tensors, for ``state_dict()``.

    Args:
        spec: the loader's spec.
        position: the position in the epoch. After the end of an epoch, the start of the next one.
        has_begun: whether an iteration over the epoch has begun, even if it has yielded no batch.
        dataset_state: the position in the dataset, if the dataset keeps it and is iterated in this
            process.
    """
    return {
        "format": _FORMAT,
        # What has to be the same in the loader that loads the position, such as the batch size.
        **spec.summary(),
        "epoch": position.epoch,
        "begun": has_begun,
        # How many entries of the order all ranks together have received.
        "cursor": spec.cursor(position),
        # The random states from which the order of this epoch was drawn.
        "drawn": dict(position.drawn_states),
        "generators": [generator.get_state() for generator in spec.generators],
        "dataset": dataset_state.state,
        "dataset_has_ended": dataset_state.has_ended,
    }


def check_saved_position(
    saved: Any, spec: LoaderSpec, *, yields_in_order: bool, dataset_keeps_position: bool
) -> None:
    """Raise if a loader cannot continue at a saved position with the samples that are left.

    ``load_state_dict`` calls this function before changing anything.

    Args:
        saved: the saved position.
        spec: the loader's spec.
        yields_in_order: whether the loader yields batches in the order in which it requested them.
        dataset_keeps_position: whether the position in an iterable dataset is part of the dataset's
            state.

    Raises:
        CheckpointError: in one of these cases:

            - ``saved`` is not the state of a loader.
            - The dataset, its length, the sampler or the number of generators differs.
            - The batch size differs, and the sampler yields whole batches.
            - This number of ranks cannot continue at the position.
            - The position is inside an epoch, and it is not known which samples were received.
    """
    _check_format(saved, spec)
    _check_same_samples(saved, spec)
    # Called for its error, for a number of ranks that cannot continue at the saved position.
    entries_to_skip(saved, spec)
    if is_inside_epoch(saved, spec):
        # Whether the dataset keeps its position, and had saved it.
        can_load_dataset = dataset_keeps_position and saved["dataset"] is not None
        _check_restorable(
            saved, spec, yields_in_order=yields_in_order, can_load_dataset=can_load_dataset
        )


def warn_of_other_batches(saved: Mapping[str, Any], spec: LoaderSpec) -> None:
    """Warn if another number of ranks changes how many samples the ranks use in a step together.

    The remaining samples are all used, but in another number of steps. Schedules that count steps
    change, too.

    Args:
        saved: a saved position that has been checked.
        spec: the loader's spec.
    """
    batch_size = spec.batch_size
    saved_batch_size = saved["batch_size"]
    if batch_size is None or saved_batch_size is None or saved["num_replicas"] == spec.num_replicas:
        return
    global_batch_size = batch_size * spec.num_replicas
    saved_global_batch_size = saved_batch_size * saved["num_replicas"]
    if global_batch_size == saved_global_batch_size:
        return
    remedy = f"on {spec.num_replicas} processes no batch size keeps the steps as they were"
    batch_size_to_write, remainder = divmod(saved_global_batch_size, spec.num_replicas)
    if remainder == 0:
        # The text shows a number and not a formula with the world size: in a mesh, processes that
        # split a layer share a batch, so that the world size is not the number of batches.
        remedy = (
            "to keep the steps as they were, write "
            f"DataLoader(..., batch_size={batch_size_to_write})"
        )
    warnings.warn(
        f"the loader continues with {global_batch_size} samples a step, {batch_size} on each of "
        f"{spec.num_replicas} processes; until the checkpoint, a step used "
        f"{saved_global_batch_size}, {saved_batch_size} on each of {saved['num_replicas']}. "
        "This changes the number of steps in an epoch, and the learning rate of a schedule that "
        f"counts steps; {remedy}",
        # The caller of load_state_dict().
        stacklevel=3,
    )


def is_inside_epoch(saved: Mapping[str, Any], spec: LoaderSpec) -> bool:
    """Return whether a saved position is inside an epoch.

    If not, the loader begins the epoch as usual, and nothing is restored but its generators.
    """
    if spec.sharded_sampler is not None:
        # Once an iteration has begun, the sampler has drawn an order, which has to be drawn again.
        return saved["begun"]
    return saved["cursor"] > 0


def _check_format(saved: Any, spec: LoaderSpec) -> None:
    """Raise a CheckpointError unless ``saved`` has the format of :func:`saved_position`."""
    needed = {"epoch", "begun", "cursor", "drawn", "generators", "dataset", *spec.summary()}
    is_saved_position = (
        isinstance(saved, Mapping) and saved.get("format") == _FORMAT and needed.issubset(saved)
    )
    if not is_saved_position:
        raise CheckpointError(
            f"loader.load_state_dict({type(saved).__name__})",
            problem="the state is not what state_dict() of a set-up loader returns, in format "
            f"{_FORMAT}",
        )


def _check_same_samples(saved: Mapping[str, Any], spec: LoaderSpec) -> None:
    """Raise a CheckpointError unless the loader's order has the entries of the saved order.

    The number of ranks may differ: the remaining entries are sharded again. The batch size may
    differ unless the sampler yields whole batches.
    """
    # Of the generators only their number is compared, since their states are loaded.
    saved_properties = {**saved, "generators": len(saved["generators"])}
    properties = {**spec.summary(), "generators": len(spec.generators)}
    may_differ = {"num_replicas"}
    if spec.unit != "batches":
        may_differ.add("batch_size")
    for name, value in properties.items():
        if name not in may_differ and saved_properties[name] != value:
            raise CheckpointError(
                f"loader.load_state_dict() at epoch {saved['epoch']}, {saved['cursor']} "
                f"{saved['unit']} into it",
                problem=f"the saved loader has {name} {saved_properties[name]!r}, this one has "
                f"{value!r}: it would yield other samples",
                suggestion="make the loader as it was when the state was saved, or start it from "
                "the beginning without this state",
            )


def _check_restorable(
    saved: Mapping[str, Any], spec: LoaderSpec, *, yields_in_order: bool, can_load_dataset: bool
) -> None:
    """Raise a CheckpointError if this position inside an epoch cannot be restored.

    Args:
        saved: the saved position.
        spec: the loader's spec.
        yields_in_order: whether the loader yields batches in the order in which it requested them.
        can_load_dataset: whether ``saved`` has a state of the dataset, which the dataset can load.
    """
    # A loader whose position fabric keeps has a sharded sampler unless the dataset is iterable.
    is_iterable = spec.sharded_sampler is None
    problem = ""
    suggestion = ""
    if not yields_in_order:
        problem = (
            "workers with in_order=False yield batches as soon as they are ready: it is not known "
            "which batches were received"
        )
        suggestion = "DataLoader(..., in_order=True)"
    elif is_iterable and not can_load_dataset:
        problem = (
            f"the {type(spec.dataset).__name__} is iterable: only the dataset itself knows how to "
            "continue from there"
        )
        suggestion = (
            "a dataset with state_dict() and load_state_dict(state), and a loader with "
            "num_workers=0"
        )
    if problem:
        raise CheckpointError(
            f"loader.load_state_dict() {saved['cursor']} {saved['unit']} into epoch "
            f"{saved['epoch']}",
            problem,
            expected="a state saved at the end of an epoch",
            suggestion=suggestion,
        )


def entries_to_skip(saved: Mapping[str, Any], spec: LoaderSpec) -> int:
    """Return how many entries an iteration skips that continues at the saved position.

    Entries are samples or, if the user's sampler yields whole batches, batches. The result is
    :attr:`EpochPosition.skipped_entries`: entries of all ranks if fabric shards the order, and
    entries of this rank if the sampler or the dataset shards.

    Raises:
        CheckpointError: the number of entries is not known for this number of ranks:

            - The sampler shards, the cursor is not a multiple of the number of ranks, and the
              order is not at its end.
            - Or the ranks shard the data themselves, and the number of ranks has changed.
    """
    cursor = saved["cursor"]
    # The cursor counts the entries of all ranks. If fabric shards the order, there is a shard for
    # each rank, and nothing is divided. Otherwise shard_count is 1, and the cursor is divided by
    # the number of ranks.
    ranks_per_shard = spec.num_replicas // spec.shard_count
    entries, remainder = divmod(cursor, ranks_per_shard)
    if spec.is_sharded_by_user:
        # Each rank reads data of its own, so only the same number of ranks can continue.
        is_number_known = cursor == 0 or saved["num_replicas"] == spec.num_replicas
    else:
        is_number_known = remainder == 0
    if is_number_known:
        return entries
    length = spec.shard_length(EpochPosition(0))
    is_at_end = length is not None and entries >= length
    if is_at_end:
        # Rounded up, so that every entry of the order counts as received.
        return entries + 1
    expected = "as many ranks"
    if not spec.is_sharded_by_user:
        expected = f"as many ranks, or a number that divides {cursor}"
    raise CheckpointError(
        f"loader.load_state_dict() with {spec.num_replicas} ranks, saved with "
        f"{saved['num_replicas']}",
        problem=f"the data is a {type(spec.order_source).__name__}, which shards itself: "
        f"it is not known where each rank was after {cursor} {saved['unit']} of all ranks",
        expected=expected,
        suggestion=f"devices={saved['num_replicas']}, or save at the end of an epoch",
    )
