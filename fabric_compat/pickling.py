"""Checkpoints with objects that need pickle, which ``fabric`` alone refuses to save."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fabric.checkpoint.encoding import KeyPath, to_json
from fabric.checkpoint.save_load import CheckpointCoordinator
from fabric.checkpoint.sharded import ShardedCheckpoint
from fabric.checkpoint.state import check_plain
from fabric.errors import ArgumentTypeError
from fabric_compat.notes import note


def allow_pickle(coordinator: CheckpointCoordinator) -> CheckpointCoordinator:
    """Return a coordinator whose files may have objects that need pickle, as in Lightning.

    A folder of shards has no pickle, and still refuses such objects.
    """
    if isinstance(coordinator.io, ShardedCheckpoint):
        return coordinator
    return replace(coordinator, check_value=_check_value)


def _check_value(name: str, value: Any) -> None:
    """Print once, on the first rank, that a checkpoint needs pickle, if an entry does.

    Raises:
        ArgumentTypeError: The entry has a tensor without its values, such as a shard.
    """

    def check(path: KeyPath, item: Any) -> None:
        """Handle an item that is not a plain collection or scalar."""
        try:
            check_plain(name, item)
        except ArgumentTypeError:
            if isinstance(item, Tensor):
                raise
            note(
                "a checkpoint may have objects that need pickle. Such a file loads with "
                "weights_only=False only, which runs the code that the file names"
            )

    # Called for what check() does: the JSON is not needed.
    to_json(value, check, (name,))
