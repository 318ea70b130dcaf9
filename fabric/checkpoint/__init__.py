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
    """Import a public name when it is first used: no program needs it before its first save."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"ShardedCheckpoint": "sharded", "Checkpoints": "keeper"}
    module_name = modules.get(name, "file")
    return getattr(import_module(f"{__name__}.{module_name}"), name)


def __dir__() -> list[str]:
    return __all__
