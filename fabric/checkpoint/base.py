"""What a checkpoint format has to offer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

__all__ = ["CheckpointIO"]


@runtime_checkable
class CheckpointIO(Protocol):
    """A format in which plain state is kept: how a mapping becomes something on disk, and comes back.

    State is plain: tensors, numbers, strings, bytes, ``None`` and nested dicts, lists, tuples and sets of these. An
    implementation knows nothing of processes, modules or optimizers, and any object with these methods is accepted.
    """

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        """Write ``state`` to ``path``, so that a reader sees what was there before, or all of ``state``.

        Raises:
            CheckpointError: it could not be written; what was at ``path`` is untouched.
        """
        ...

    def load(self, path: Path) -> dict[str, Any]:
        """Read what :meth:`save` wrote, with every tensor on the CPU. Never runs code that the file holds.

        Raises:
            CheckpointNotFoundError: there is nothing at ``path``.
            UnsafeCheckpointError: reading it would run code.
            CheckpointError: it is damaged, or in another format.
        """
        ...

    def remove(self, path: Path) -> None:
        """Delete the checkpoint at ``path``.

        Raises:
            CheckpointNotFoundError: there is nothing at ``path``.
        """
        ...

    def wait(self) -> None:
        """Return when every save that was begun is on disk, raising what went wrong in it."""
        ...
