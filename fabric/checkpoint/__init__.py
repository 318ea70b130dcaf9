"""Checkpoints: plain state on disk, written atomically and read without running code."""

from fabric.checkpoint.background import PendingSave
from fabric.checkpoint.base import CheckpointIO
from fabric.checkpoint.full import FullCheckpoint
from fabric.checkpoint.sharded import ShardedCheckpoint

__all__ = ["CheckpointIO", "FullCheckpoint", "PendingSave", "ShardedCheckpoint"]
