"""Checkpoints: plain state on disk, written atomically and read without running code."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.async_save import PendingSave
from fabric.checkpoint.base import CheckpointIO

if TYPE_CHECKING:
    from fabric.checkpoint.file import FullCheckpoint
    from fabric.checkpoint.sharded import ShardedCheckpoint

__all__ = ["CheckpointIO", "FullCheckpoint", "PendingSave", "ShardedCheckpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported when first used: the sharded format takes a second.
    return getattr(import_module(f"{__name__}.{'file' if name == 'FullCheckpoint' else 'sharded'}"), name)


def __dir__() -> list[str]:
    return __all__
