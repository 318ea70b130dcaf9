"""The saved form of a position, and the checks before a loader continues from it."""

from collections.abc import Mapping
from typing import Any

from fabric.data.position import EpochPosition, State
from fabric.data.spec import LoaderSpec
from fabric.errors import CheckpointError

__all__ = ["check_saved_position", "entries_to_skip", "is_inside_epoch", "saved_position"]

_FORMAT = 1


def saved_position(
    spec: LoaderSpec, position: EpochPosition, *, has_begun: bool, dataset_state: Any
) -> State:
    """Return a position as plain dicts, numbers, strings and tensors.

    Args:
        spec: the loader's spec.
        position: the position in the epoch; that of the next epoch if the last one has ended.
        has_begun: whether an iteration over the epoch has begun, even if it has yielded no batch.
        dataset_state: the dataset's own state, if it has one and is iterated in this process.
    """
    return {
        "format": _FORMAT,
        **spec.summary(),
        "epoch": position.epoch,
        "begun": has_begun,
        "cursor": spec.cursor(position),
        "drawn": dict(position.drawn),
        "generators": [generator.get_state() for generator in spec.generators],
        "dataset": dataset_state,
    }


def check_saved_position(
    saved: Any, spec: LoaderSpec, *, is_in_order: bool, keeps_dataset_state: bool
) -> None:
    """Raise if this loader would yield different samples from a saved position on.

    Args:
        saved: the saved position.
        spec: the loader's spec.
        is_in_order: whether the loader yields batches in the order in which they were requested.
        keeps_dataset_state: whether the position in an iterable dataset is part of the dataset's
            state.

    Raises:
        CheckpointError: ``saved`` is not the state of a loader; a property differs other than the
            number of ranks and (unless the order is of batches) the batch size; or the position
            cannot be restored.
    """
    _check_format(saved, spec)
    _check_same_samples(saved, spec)
    # Called for its error: this number of ranks may be unable to continue from there.
    entries_to_skip(saved, spec)
    if is_inside_epoch(saved, spec):
        has_dataset_state = keeps_dataset_state and saved["dataset"] is not None
        _check_restorable(saved, spec, is_in_order, has_dataset_state)


def is_inside_epoch(saved: Mapping[str, Any], spec: LoaderSpec) -> bool:
    """Return whether a saved position is inside an epoch, and not at the start of an epoch."""
    if spec.sharded_sampler is not None:
        # The sampler has drawn its order once an iteration has begun.
        return saved["begun"]
    return saved["cursor"] > 0


def _check_format(saved: Any, spec: LoaderSpec) -> None:
    needed = {"epoch", "begun", "cursor", "drawn", "generators", "dataset", *spec.summary()}
    if (
        not isinstance(saved, Mapping)
        or saved.get("format") != _FORMAT
        or not needed.issubset(saved)
    ):
        raise CheckpointError(
            f"loader.load_state_dict({type(saved).__name__})",
            problem=f"it is not what state_dict() of a set-up loader returned, in format {_FORMAT}",
        )


def _check_same_samples(saved: Mapping[str, Any], spec: LoaderSpec) -> None:
    saved_summary = {**saved, "generators": len(saved["generators"])}
    summary = {**spec.summary(), "generators": len(spec.generators)}
    may_differ = {"num_replicas"}
    if spec.unit != "batches":
        may_differ.add("batch_size")
    for name, value in summary.items():
        if name not in may_differ and saved_summary[name] != value:
            raise CheckpointError(
                f"loader.load_state_dict() at epoch {saved['epoch']}, {saved['cursor']} "
                f"{saved['unit']} into it",
                problem=f"the saved loader has {name} {saved_summary[name]!r}, this one has "
                f"{value!r}: it would yield other samples",
                suggestion="make the loader as it was when the state was saved, or start it from "
                "the beginning without this state",
            )


def _check_restorable(
    saved: Mapping[str, Any], spec: LoaderSpec, is_in_order: bool, has_dataset_state: bool
) -> None:
    """Raise a CheckpointError if this position inside an epoch cannot be restored."""
    if not is_in_order:
        problem = (
            "workers with in_order=False yield batches as they are ready: which batches were "
            "received is not known"
        )
        suggestion = "DataLoader(..., in_order=True)"
    elif spec.sharded_sampler is None and not has_dataset_state:
        problem = (
            f"the {type(spec.dataset).__name__} is iterable: only the dataset itself knows how to "
            "continue from there"
        )
        suggestion = (
            "a dataset with state_dict() and load_state_dict(state), and a loader with "
            "num_workers=0"
        )
    else:
        return
    raise CheckpointError(
        f"loader.load_state_dict() {saved['cursor']} {saved['unit']} into epoch {saved['epoch']}",
        problem,
        expected="a state saved at the end of an epoch",
        suggestion=suggestion,
    )


def entries_to_skip(saved: Mapping[str, Any], spec: LoaderSpec) -> int:
    """Return :attr:`EpochPosition.skip` of an iteration that continues at the saved position.

    Raises:
        CheckpointError: the sampler shards by itself, the cursor is not a multiple of its number
            of ranks, and the order is not at its end; or ranks shard the data themselves, and
            their number differs.
    """
    cursor = saved["cursor"]
    entries, remainder = divmod(cursor, spec.num_replicas // spec.shards)
    is_known = remainder == 0
    if spec.is_sharded_by_user:
        # Each rank reads a stream of its own, which only as many ranks can continue.
        is_known = cursor == 0 or saved["num_replicas"] == spec.num_replicas
    if is_known:
        return entries
    length = spec.shard_length(EpochPosition(0))
    if length is not None and entries >= length:
        return entries + 1
    expected = "as many ranks"
    if not spec.is_sharded_by_user:
        expected = f"as many ranks, or a number that divides {cursor}"
    raise CheckpointError(
        f"loader.load_state_dict() with {spec.num_replicas} ranks, saved with "
        f"{saved['num_replicas']}",
        problem=f"where each rank of a {type(spec.order).__name__}, which shards itself, was after "
        f"{cursor} {saved['unit']} of all ranks is not known",
        expected=expected,
        suggestion=f"devices={saved['num_replicas']}, or save at the end of an epoch",
    )
