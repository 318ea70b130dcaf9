"""What is said when a checkpoint cannot be written or read, in the same words for every format."""

import difflib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fabric.errors import CheckpointError, FabricError

__all__ = ["DAMAGE", "TRUSTED", "damaged", "first_line", "listed", "nearby", "newer", "refusals"]

DAMAGE = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, AssertionError, OSError,
          MemoryError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)  # fmt: skip
"""What reading bytes that were never written as a checkpoint, or were changed since, has been seen to raise."""

TRUSTED = "a checkpoint from a source that you trust, or another copy of this one"
_LISTED = 12  # names given in full before an error only counts the rest
_REFUSALS = (RuntimeError, OSError, ValueError, TypeError, AttributeError, AssertionError, pickle.PicklingError)


@contextmanager
def refusals(asked: str) -> Iterator[None]:
    """Turn what torch and the file system raise into an error that says what it was about.

    For the parts of a save up to its commit: the error says that what was there before is untouched.

    Raises:
        CheckpointError: anything but an error of fabric's own, which is left as it is.
    """
    try:
        yield
    except FabricError:
        raise
    except _REFUSALS as error:
        refuses = "the file system refuses: " if isinstance(error, OSError) else ""
        raise CheckpointError(
            asked,
            f"{refuses}{type(error).__name__}: {first_line(error)}",
            "plain data, the same tensors on every rank, and a place that can be written to, with room for the old and "
            "the new",
            "free space, another path, other permissions, or a state without what the line above names; what was there "
            "before is untouched",
        ) from error


def damaged(asked: str, wrong: str) -> CheckpointError:
    """The error for a checkpoint that is not as it was written."""
    return CheckpointError(
        asked,
        f"the checkpoint is damaged, or was replaced while it was read: {wrong}",
        "what fabric.save or torch.save wrote, complete and with torch's default of writing checksums",
        "the same again, if a save may have been under way; or an older checkpoint, or a fresh copy of this one",
    )


def newer(asked: str, version: object, known: int) -> CheckpointError:
    """The error for a checkpoint in a format that this release does not know."""
    return CheckpointError(
        asked,
        f"its format version is {version!r}: a newer release wrote it",
        f"format versions up to {known}",
        "pip install --upgrade torch-fabric",
    )


def listed(names: Iterable[object]) -> str:
    """The first names, and how many more there are."""
    found = list(names)
    rest = len(found) - _LISTED
    return ", ".join([*map(str, found[:_LISTED]), *([f"and {rest} more"] if rest > 0 else [])]) or "nothing"


def nearby(name: str, found: Iterable[str], otherwise: str) -> str:
    """Those of the paths ``found`` that resemble a name, else the first, as the last part of an error."""
    paths = sorted(found)
    near = difflib.get_close_matches(name, paths, n=5, cutoff=0.4) or paths[:5]
    return ", or ".join(map(repr, near)) or otherwise


def first_line(error: Exception) -> str:
    """An error without the stack of C++ that torch may put below."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
