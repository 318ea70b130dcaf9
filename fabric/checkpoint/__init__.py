"""Checkpoints: plain state on disk, written atomically and read without running code."""

from typing import TYPE_CHECKING

from fabric._late import late
from fabric.checkpoint.async_save import PendingSave
from fabric.checkpoint.base import CheckpointIO

if TYPE_CHECKING:
    from fabric.checkpoint.file import FullCheckpoint
    from fabric.checkpoint.sharded import ShardedCheckpoint

__all__ = ["CheckpointIO", "FullCheckpoint", "PendingSave", "ShardedCheckpoint"]

__getattr__, __dir__ = late(__name__, {"FullCheckpoint": "file", "ShardedCheckpoint": "sharded"})
