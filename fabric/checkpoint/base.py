"""What a checkpoint format offers, and the errors that all formats share."""

import difflib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fabric.errors import CheckpointError

__all__ = ["DAMAGE", "CheckpointIO", "damaged", "first_line", "listed", "nearby", "newer"]

DAMAGE = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, AssertionError, OSError,
          MemoryError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)  # fmt: skip
"""What reading bytes that were never written as a checkpoint, or were changed since, has been seen to raise."""

_LISTED = 12  # names given in full before an error only counts the rest


@runtime_checkable
class CheckpointIO(Protocol):
    """A format in which plain state is kept: how a mapping is written to the disk and read back.

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


def damaged(request: str, problem: str) -> CheckpointError:
    """The error for a checkpoint that is not as it was written."""
    return CheckpointError(
        request,
        f"the checkpoint is damaged, or was replaced while it was read: {problem}",
        "what fabric.save or torch.save wrote, complete and with torch's default of writing checksums",
        "the same again, if a save may have been running; or an older checkpoint, or a fresh copy of this one",
    )


def newer(request: str, version: object, known: int) -> CheckpointError:
    """The error for a checkpoint in a format that this release does not know."""
    return CheckpointError(
        request,
        f"its format version is {version!r}: a newer release wrote it",
        f"format versions up to {known}",
        "pip install --upgrade torch-fabric",
    )


def listed(names: Iterable[object]) -> str:
    """The first names, and how many more there are."""
    found = list(names)
    rest = len(found) - _LISTED
    return ", ".join([*map(str, found[:_LISTED]), *([f"and {rest} more"] if rest > 0 else [])]) or "nothing"


def nearby(path: Path, found: Iterable[str], otherwise: str) -> str:
    """Those of the paths ``found`` that resemble a path, else the first, as the last part of an error."""
    paths = sorted(found)
    near = difflib.get_close_matches(str(path), paths, n=5, cutoff=0.4) or paths[:5]
    return ", or ".join(map(repr, near)) or otherwise


def first_line(error: Exception) -> str:
    """An error without the stack of C++ that torch may put below."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
