"""Atomic replacement of a file, and conversion of the errors of reading and writing.

[Note: atomic publish]
The bytes go to a *temporary* in the target's own folder (a rename across file systems is a copy,
which is not atomic), are flushed to the disk, and get the target's name in one rename, which is
flushed as well. The writer holds a lock on the temporary, which the kernel releases however the
process dies. So a temporary that can be locked has no writer, and the next save to the same target
removes it. Process IDs would not do: they are reused, and mean nothing in another container.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fabric.checkpoint.storage import Location, RemotePath
from fabric.errors import CheckpointError, DamagedCheckpointError, FabricError

__all__ = ["atomic_write", "clear_temporaries", "read_errors", "sync_folder", "write_errors"]


@contextmanager
def atomic_write(path: Location) -> Iterator[BinaryIO]:
    """Yield a binary file whose content replaces ``path`` when the block ends without an error.

    When the block raises, or the process dies at any point, ``path`` keeps its old content. Missing
    parent folders are created. The new file's mode follows the umask, whatever mode the old one
    had. A symbolic link is followed, as by ``open``: the file that it points to is replaced and the
    link stays. See ``[Note: atomic publish]``.

    Raises:
        CheckpointError: ``path`` is a folder or a device, or the file system refuses (permissions,
            no space left).
    """
    request = f"write {str(path)!r}"
    if isinstance(path, RemotePath):
        with write_errors(request), path.replace() as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    with write_errors(request):
        _check_is_file(request, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_temporaries(target.parent, re.escape(target.name))
        _drop_from_page_cache(target)
        file = _open_temporary(target)
    try:
        yield file
        with write_errors(request):
            file.flush()
            os.fsync(file.fileno())
            # Still open, so that the lock is held until the file carries its final name.
            os.replace(file.name, target)
    finally:
        # Fails if the file has been renamed. After another failure the next save removes it.
        with suppress(OSError):
            os.unlink(file.name)
        # close() retries a flush that failed, and would hide the error of the first try.
        with suppress(OSError):
            file.close()
    with write_errors(request):
        sync_folder(target.parent)


def _check_is_file(request: str, target: Path) -> None:
    """Raise a CheckpointError if ``target`` exists and is not a file."""
    if target.is_file() or not target.exists():
        return
    kind = "device or a pipe"
    if target.is_dir():
        kind = "folder"
    raise CheckpointError(
        request, problem=f"there is a {kind} of that name", expected="the path of a file"
    )


def _drop_from_page_cache(path: Path) -> None:
    """Free the pages of a file in the page cache, if there is a file, so that they can be reused.

    New memory has been seen to double the time of a write.
    """
    # macOS has no such function.
    with suppress(OSError, AttributeError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _open_temporary(target: Path) -> BinaryIO:
    """Create and lock a temporary beside ``target``."""
    while True:
        name = f".{target.name}.{secrets.token_hex(6)}.tmp"
        file = open(target.with_name(name), "x+b")  # noqa: SIM115 - atomic_write() closes it
        # A file system without locks raises an OSError.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        # Another process cleared it between its creation and its lock.
        file.close()


def clear_temporaries(folder: Location, names: str) -> None:
    """Remove the temporaries that killed writers left in a folder.

    Args:
        folder: the folder.
        names: a regular expression that the names of the temporaries' targets match.
    """
    # Exact, so that ``a.pt`` never removes temporaries of ``a.pt.best``.
    pattern = re.compile(rf"\.{names}\.[0-9a-f]{{12}}\.tmp")
    for temporary in folder.iterdir():
        if pattern.fullmatch(temporary.name) and temporary.is_file():
            # Left alone if it is another user's, already gone, or locked by a running writer.
            with suppress(OSError), open(temporary, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(request: str) -> Iterator[None]:
    """Convert errors of torch and the file system in a save, up to its commit.

    Raises:
        CheckpointError: the block has raised an error that is not fabric's own.
    """
    try:
        yield
    except (FabricError, MemoryError):  # lack of memory is no fault of the checkpoint
        raise
    except Exception as error:
        raise CheckpointError(
            request,
            problem="it could not be written, and what was there before is untouched: "
            f"{_summary(error)}",
            expected="plain data, the same tensors on every rank, and a place with room for the "
            "old and the new checkpoint",
            suggestion="free space, another path, other permissions, or a state without what the "
            "line above names",
        ) from error


@contextmanager
def read_errors(request: str) -> Iterator[None]:
    """Convert errors of torch and the file system in reading, where no code of the user's runs.

    Raises:
        DamagedCheckpointError: the block has raised an error that is not fabric's own.
    """
    try:
        yield
    except (FabricError, MemoryError):  # lack of memory is no fault of the checkpoint
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            request,
            problem="the checkpoint is damaged, or was replaced while it was read: "
            + _summary(error),
            expected="what fabric.save or torch.save wrote, complete and with torch's default of "
            "writing checksums",
            suggestion="the same call again, if a save may have been running; or an older "
            "checkpoint, or a fresh copy of this one",
        ) from error


def _summary(error: Exception) -> str:
    """Return the class and the first line of an error. torch may put a C++ stack below it."""
    line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {line}"
