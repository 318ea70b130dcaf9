"""Publishing a file: readers see the old one or the new one, never a part of either.

[Note: atomic publish]
The bytes go to a *temporary* in the target's own folder (a rename across file systems is a copy, and can be torn), are
flushed to the disk, and take the target's name in one rename, which is flushed as well. While it is written, its writer
holds a lock on it that the kernel drops when the process dies, however it dies: a temporary that can be locked
belongs to nobody, and the next save of the same target removes it. Process numbers would not do: they are reused, and
mean nothing in another container.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fabric.checkpoint.failures import refusals
from fabric.errors import CheckpointError

__all__ = ["atomic_write", "locked", "sync_folder"]

_SUFFIX = ".tmp"


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a binary file whose content takes the place of ``path`` when the block ends without an error.

    When the block raises, or the process dies at any point, ``path`` keeps its old content. Folders that are missing
    on the way to ``path`` are created. The new file's mode follows the umask, whatever mode the old one had. A symbolic
    link is followed, as ``open`` would: the file that it points to is replaced and the link stays.

    Raises:
        CheckpointError: ``path`` is a folder, or the file system refuses (permissions, no space left).
    """
    asked = f"write {os.fspath(path)!r}"
    target = Path(os.path.realpath(path))
    with refusals(asked):
        if target.is_dir():
            raise CheckpointError(
                asked,
                "there is a folder of that name",
                "the path of a file, new or to be replaced",
                f"{str(target / 'checkpoint.pt')!r}, or remove the folder",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(target)
        _drop_from_memory(target)
        temporary, file = _open_temporary(target)
    try:
        with file:
            yield file
            with refusals(asked):
                file.flush()
                os.fsync(file.fileno())
                # Still open, so that the lock is held until the file carries its final name.
                os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    with refusals(asked):
        sync_folder(target.parent)


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}{_SUFFIX}")
        file = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w+b")
        if locked(file, temporary, created=True):
            return temporary, file
        # Another process cleared it between its creation and its lock.
        file.close()


def locked(file: BinaryIO | int, path: Path, created: bool) -> bool:
    """Lock the file ``path``, which is open; false when somebody else has it, or removed it meanwhile.

    On a file system without locks only who ``created`` it gets it, so that nobody takes it for a stale one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return created
    return path.exists()


def sync_folder(folder: Path) -> None:
    """Return when the names of the files in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear_stale(target: Path) -> None:
    # So that ``a.pt`` never clears what belongs to ``a.pt.best``.
    stale = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{12}" + re.escape(_SUFFIX))
    for temporary in target.parent.iterdir():
        if stale.fullmatch(temporary.name):
            # It may be another user's, be gone by now, or have a living writer: each leaves it to them.
            with suppress(OSError), open(temporary, "rb") as file:
                if locked(file, temporary, created=False):
                    temporary.unlink()


def _drop_from_memory(target: Path) -> None:
    """Let the system reuse the memory in which it caches the file that is about to be replaced.

    Otherwise the cache grows by the size of the new file first, and memory that is new to the cache has been seen to
    double the time of writing. What a process has mapped stays.
    """
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with suppress(OSError), open(target, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
