"""Checkpoints: plain state on disk, written atomically and read without running code."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.async_save import PendingSave

if TYPE_CHECKING:
    from fabric.checkpoint.file import CheckpointIO, FullCheckpoint
    from fabric.checkpoint.keeper import Checkpoints
    from fabric.checkpoint.sharded import ShardedCheckpoint

__all__ = ["CheckpointIO", "Checkpoints", "FullCheckpoint", "PendingSave", "ShardedCheckpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported when first used: no program needs them before its first save.
    file = {"ShardedCheckpoint": "sharded", "Checkpoints": "keeper"}.get(name, "file")
    return getattr(import_module(f"{__name__}.{file}"), name)


def __dir__() -> list[str]:
    return __all__
