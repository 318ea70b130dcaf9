"""Atomic replacement of a file, and conversion of the errors of reading and writing."""

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch

from fabric.checkpoint.storage import Location, RemotePath, require_folder
from fabric.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FabricError,
    UnreadableCheckpointError,
)

__all__ = [
    "atomic_write",
    "check_file_is_replaceable",
    "clear_temporaries",
    "flush_during",
    "read_errors",
    "sync_folder",
    "write_errors",
]

# Failures of a disk, a file server or the system's resources. A checkpoint that causes any other
# error, such as an invalid offset, may be damaged.
_SYSTEM_ERRORS = frozenset(
    {
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.ESTALE,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EBUSY,
        errno.EAGAIN,
        errno.ENODEV,
        errno.ENXIO,
    }
)
# torch raises a plain RuntimeError if the system refuses to open a file to map. The line ends with
# the number of the system's error.
_TORCH_FILE_ERROR = re.compile(r"unable to (?:open file|stat the file) <[^\n]*\((?P<number>\d+)\)")
# What torch's plain RuntimeErrors say if the system refuses memory.
_TORCH_MEMORY_ERRORS = ("unable to mmap", "can't allocate memory")


# [Note: atomic publish]
# The bytes go to a *temporary file* in the folder of the target. (A rename across file systems is a
# copy, which is not atomic.) The temporary file is flushed to the disk and renamed to the target,
# and the rename is flushed as well. The writer holds a lock on the temporary file. The kernel
# releases the lock however the process dies. So a temporary file that can be locked has no writer,
# and the next save to the same target removes the file. Process IDs could not replace the lock:
# they are reused, and mean nothing in another container.
@contextmanager
def atomic_write(path: Location, *, follow_symlinks: bool = True) -> Iterator[BinaryIO]:
    """Yield a binary file whose content replaces ``path`` when the block ends without an error.

    When the block raises, or the process dies at any point, ``path`` keeps its old content. Missing
    parent folders are created. The mode of the new file follows the umask, and not the mode of the
    old file.

    Args:
        path: the file.
        follow_symlinks: what is replaced if ``path`` is a symbolic link. True, the default,
            replaces the file that the link points to, and the link stays. False replaces the link.

    Raises:
        CheckpointError: ``path`` is a folder or a device, or the file system refuses (permissions,
            no space left). Errors of the block are not converted.
    """
    request = f"write {str(path)!r}"
    if isinstance(path, RemotePath):
        # replace() uploads the file at the end of its block.
        with write_errors(request), path.replace() as file:
            yield file
        return
    target = path
    if follow_symlinks:
        target = Path(os.path.realpath(path))
    with write_errors(request):
        check_file_is_replaceable(request, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Removes the temporary files that killed processes left when they wrote the same target.
        clear_temporaries(target.parent, re.escape(target.name))
        # The new content can then use the memory of the old content, which is faster.
        _drop_from_page_cache(target)
        file = _open_temporary(target)
    try:
        yield file
        with write_errors(request):
            file.flush()
            os.fsync(file.fileno())
            # The temporary file is locked while it is open, so it is renamed before it is closed.
            os.replace(file.name, target)
    finally:
        # After an error, unlink() removes the temporary file. After a success, unlink() fails: the
        # temporary file has been renamed.
        with suppress(OSError):
            os.unlink(file.name)
        # After a flush that failed, close() flushes again and fails again. The second error must
        # not hide the first one.
        with suppress(OSError):
            file.close()
    with write_errors(request):
        sync_folder(target.parent)


def flush_during(request: str, file: BinaryIO, action: Callable[[], object] | None) -> None:
    """Call ``action()`` while a thread flushes a file to the disk.

    The thread only waits for the system, without the GIL. If ``action`` is None, this function does
    nothing: :func:`atomic_write` flushes the file later in any case. A save in the background has
    no action. Such a save could not start a thread either, since the interpreter may be ending.

    Args:
        request: the user's request, a text for errors.
        file: the file.
        action: the function to call, or None. Its errors are not converted.

    Raises:
        CheckpointError: the file system refuses.
    """
    if action is None:
        return
    with write_errors(request):
        file.flush()
    with ThreadPoolExecutor(1, "fabric-flush") as executor:
        flushed = executor.submit(os.fsync, file.fileno())
        action()
        with write_errors(request):
            flushed.result()  # raises the error of the thread


def check_file_is_replaceable(request: str, target: Path) -> None:
    """Raise a CheckpointError if a file cannot replace what is at ``target``, or has no folder.

    Only a file or a link can be replaced. ``request`` is the user's request, a text for the error.
    """
    # ``target`` is a link only if atomic_write() does not follow links. The link is then replaced.
    if target.is_file() or target.is_symlink():
        return
    if not target.exists():
        require_folder(request, target.parent)
        return
    kind = "device or a pipe"
    suggestion = "another path"
    if target.is_dir():
        kind = "folder"
        suggestion = f"another path, such as {str(target / 'checkpoint.pt')!r}"
    raise CheckpointError(
        request,
        problem=f"there is a {kind} of that name, and a file is saved",
        expected="the path of a file, or a path where nothing is",
        suggestion=suggestion,
    )


def _drop_from_page_cache(path: Path) -> None:
    """Free the memory in which the kernel caches a file, so that the next write can use the memory.

    Writes that needed new memory have taken twice as long. Does nothing if there is no such file.
    """
    # AttributeError: macOS has no posix_fadvise().
    with suppress(OSError, AttributeError), open(path, "rb") as file:
        # Offset 0 and length 0 stand for the whole file.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _open_temporary(target: Path) -> BinaryIO:
    """Create a temporary file beside ``target``, and lock it for as long as it is open.

    The lock tells :func:`clear_temporaries` in other processes that the file has a writer.
    """
    while True:
        name = f".{target.name}.{secrets.token_hex(6)}.tmp"
        file = open(target.with_name(name), "x+b")  # noqa: SIM115 - atomic_write() closes it
        # flock() raises an OSError on a file system without locks. The save goes on without a lock.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        # Another process has called clear_temporaries() before the file was locked, and removed the
        # file. Try again.
        file.close()


def clear_temporaries(folder: Location, target_pattern: str) -> None:
    """Remove the temporary files that killed writers left in a folder.

    The temporary files of ``a.pt`` have names such as ``.a.pt.0123456789ab.tmp``. A running writer
    holds a lock on its temporary file, which stays.

    Args:
        folder: the folder.
        target_pattern: a regular expression for the names of the files that the writers were
            writing, such as ``re.escape("a.pt")``.
    """
    # Matched against whole names below: a save of ``a.pt`` must not remove the temporary files of
    # ``a.pt.best``.
    pattern = re.compile(rf"\.{target_pattern}\.[0-9a-f]{{12}}\.tmp")
    for temporary in folder.iterdir():
        if not pattern.fullmatch(temporary.name) or not temporary.is_file():
            continue
        # An OSError means that a running writer has locked the file, that the file belongs to
        # another user, or that it is gone.
        with suppress(OSError), open(temporary, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in ``folder`` to the disk.

    ``fsync`` of a file flushes its content, not its name: a new or renamed file may be missing
    after a power failure unless its folder is flushed as well.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_errors(request: str) -> AbstractContextManager[None]:
    """Return a context that converts errors of torch and the file system in a save.

    The error says that nothing was replaced, so the context must end before the save is committed.
    ``request`` is the user's request, a text for errors. Errors of fabric and a ``MemoryError`` are
    not converted.

    Raises:
        CheckpointError: the block has raised any other error.
    """
    return _convert_errors(
        CheckpointError,
        request,
        problem="it could not be written, and what was there before is untouched",
        expected="plain data, the same tensors on every rank, and a place with room for the old "
        "and the new checkpoint",
        suggestion="free space, another path, other permissions, or a state without what the line "
        "above names",
    )


@contextmanager
def read_errors(request: str) -> Iterator[None]:
    """Convert errors of torch and the file system in a load.

    The block must not run code of the user: an error of that code would be reported as damage.
    ``request`` is the user's request, a text for errors. Errors of fabric are not converted.

    Raises:
        UnreadableCheckpointError: the system has failed to read, or lacks memory. The checkpoint
            may be intact.
        DamagedCheckpointError: the block has raised any other error.
    """
    with _convert_errors(
        DamagedCheckpointError,
        request,
        problem="the checkpoint is damaged, or was replaced while it was read",
        expected="what fabric.save or torch.save wrote, complete and with torch's default of "
        "writing checksums",
        suggestion="the same call again, if a save may have been running; or an older checkpoint, "
        "or a fresh copy of this one",
    ):
        try:
            yield
        except Exception as error:
            if not _is_caused_by_system(error):
                raise
            raise UnreadableCheckpointError(
                request,
                problem=f"the system has failed to read it: {_first_line(error)}",
                expected="a disk or store that can be read; the checkpoint itself may be intact",
                suggestion="the same call again, once the line above no longer holds",
            ) from error


def _is_caused_by_system(error: Exception) -> bool:
    """Return whether the system, and not the checkpoint, has caused an error of a load.

    A load may then succeed later, so it is tried again and the checkpoint is not called damaged.
    """
    if isinstance(error, OSError):
        # Libraries for object stores raise these classes without an errno.
        is_connection = isinstance(error, PermissionError | ConnectionError | TimeoutError)
        return is_connection or error.errno in _SYSTEM_ERRORS
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # torch reports errors of the system as a RuntimeError, which only the text tells apart.
    text = str(error)
    if any(words in text for words in _TORCH_MEMORY_ERRORS):
        return True
    file_error = _TORCH_FILE_ERROR.search(text)
    return file_error is not None and int(file_error["number"]) in _SYSTEM_ERRORS


def _first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its text.

    The further lines of an error from torch may be a stack.
    """
    first_line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


@contextmanager
def _convert_errors(
    error_class: type[CheckpointError], request: str, problem: str, expected: str, suggestion: str
) -> Iterator[None]:
    """Convert errors of the block to ``error_class``.

    The arguments are those of the new error. The class and the first line of the original error are
    added to ``problem``. Fabric's own errors, a MemoryError, and warnings that the user's filters
    make errors are no fault of the checkpoint, and stay as they are.
    """
    try:
        yield
    except (FabricError, MemoryError, Warning):
        raise
    except Exception as error:
        full_problem = f"{problem}: {_first_line(error)}"
        raise error_class(
            request, full_problem, expected=expected, suggestion=suggestion
        ) from error
