"""Publishing a folder: readers find the old data or the new data in it, never a part of either.

[Note: commit of a directory]
A folder that is not empty cannot be replaced in one step, a file can. So a checkpoint that is a folder holds a
*manifest*, a small file that names the sub-folder with its data. A save fills a sub-folder of a new name, flushes it,
and replaces the manifest: that is the commit. Only then is the older sub-folder removed. While it is filled, its writer
holds a lock on a file in it, which ends with the process, however that ends: a sub-folder that the manifest does not
name and that can be locked is left from a save that died, and the next save removes it.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fabric.checkpoint.commit import atomic_write, locked, sync_folder
from fabric.checkpoint.failures import damaged, nearby, newer
from fabric.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["MANIFEST", "Manifest", "Staging", "holds_checkpoint", "read_manifest", "remove"]

MANIFEST = "manifest.json"

_FORMAT, _VERSION = "torch-fabric sharded checkpoint", 1
_PREFIX, _LOCK = "data-", "lock"
_OURS = re.compile(_PREFIX + "[0-9a-f]{12}")


@dataclass(frozen=True)
class Manifest:
    """What the manifest of a folder says.

    Attributes:
        data: the sub-folder that holds the data.
        checksums: CRC32 of each file in it, by name.
    """

    data: Path
    checksums: dict[str, int]


def holds_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a folder in which a save was committed."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(asked: str, path: Path) -> Manifest:
    """Read the manifest of the folder ``path``.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``, or a folder in which no save was ever committed.
        CheckpointError: ``path`` is a file, the manifest is damaged, or a newer release wrote it.
    """
    path = Path(path)
    if not holds_checkpoint(path):
        raise _absent(asked, path)
    name, version, checksums = "", None, None
    with suppress(ValueError, AttributeError, OSError):
        content = json.loads((path / MANIFEST).read_bytes())
        if content.get("format") == _FORMAT:
            name, version, checksums = str(content.get("data")), content.get("version"), content.get("crc32")
    if isinstance(version, int) and version > _VERSION:
        raise newer(asked, version, _VERSION)
    if not (isinstance(version, int) and isinstance(checksums, dict) and _OURS.fullmatch(name)):
        raise damaged(asked, f"its {MANIFEST} cannot be read, or is not one of fabric's")
    return Manifest(path / name, checksums)


class Staging:
    """A sub-folder that is being filled; for one process of those that fill it, which creates and commits it.

    Args:
        path: the checkpoint. The folder is created if need be, and what saves that died left in it is removed.

    Attributes:
        folder: the sub-folder, absolute.

    Raises:
        CheckpointError: ``path`` is a file.
        OSError: the file system refuses.
    """

    folder: Path

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.realpath(path))
        if self._path.exists() and not self._path.is_dir():
            raise CheckpointError(
                f"save a sharded checkpoint to {str(path)!r}",
                "there is a file of that name",
                "the path of a folder, new or with a sharded checkpoint in it",
                f"{str(path) + '-sharded'!r}, or remove the file",
            )
        self._is_new = not self._path.exists()
        self._path.mkdir(parents=True, exist_ok=True)
        if self._is_new:
            sync_folder(self._path.parent)
        _clear_stale(self._path)
        self._lock = self._create()

    def _create(self) -> int:
        while True:
            self.folder = self._path / f"{_PREFIX}{secrets.token_hex(6)}"
            self.folder.mkdir()
            if (lock := _lock(self.folder, created=True)) is not None:
                return lock

    def commit(self, checksums: Mapping[str, int]) -> None:
        """Make this the data of the checkpoint, and remove the older data.

        Args:
            checksums: CRC32 of each file in the sub-folder that a reader may need, by name.
        """
        sync_folder(self.folder)
        content = {"format": _FORMAT, "version": _VERSION, "data": self.folder.name, "crc32": {**checksums}}
        with atomic_write(self._path / MANIFEST) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")
        # The save is done, and what cannot be removed now is removed by the next one.
        with suppress(OSError):
            _clear_stale(self._path)

    def close(self) -> None:
        """Release the sub-folder, and remove it unless it was committed."""
        os.close(self._lock)
        with suppress(OSError):
            _clear_stale(self._path)
        if self._is_new and not holds_checkpoint(self._path):
            # Somebody may have put something else into it.
            with suppress(OSError):
                self._path.rmdir()


def remove(path: Path) -> None:
    """Delete the checkpoint in the folder ``path``, and the folder unless it holds anything else.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: ``path`` is a file.
    """
    path = Path(path)
    if not holds_checkpoint(path):
        raise _absent(f"remove the checkpoint {str(path)!r}", path)
    # First, so that what remains of an interrupted removal is no checkpoint.
    (path / MANIFEST).unlink()
    _clear_stale(path)
    with suppress(OSError):
        path.rmdir()


def _clear_stale(path: Path) -> None:
    """Remove every sub-folder that the manifest does not name and no living process is filling."""
    current = None
    if holds_checkpoint(path):
        try:
            current = read_manifest("", path).data.name
        except CheckpointError:
            return  # what it named cannot be told from what is stale
    for folder in path.iterdir():
        if _OURS.fullmatch(folder.name) and folder.name != current and (lock := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, created: bool = False) -> int | None:
    """Lock a sub-folder; None when another process has it, or removed it, or it is another user's."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        if os.access(folder, os.W_OK | os.X_OK):
            raise
        return None
    if locked(lock, folder / _LOCK, created):
        return lock
    os.close(lock)
    return None


def _absent(asked: str, path: Path) -> CheckpointError:
    if path.is_file():
        return CheckpointError(
            asked, "it is a file", "a folder that holds a sharded checkpoint", f"fabric.load({str(path)!r}, state)"
        )
    if (path / ".metadata").is_file():
        return CheckpointError(
            asked,
            "torch.distributed.checkpoint wrote it, without fabric",
            f"a folder with a {MANIFEST}, as fabric writes it",
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} {path}.pt, if you trust it",
        )
    if path.is_dir():
        unfinished = any(_OURS.fullmatch(entry.name) for entry in path.iterdir())
        wrong = "no save into it was ever finished" if unfinished else f"it is a folder without a {MANIFEST}"
        return CheckpointNotFoundError(asked, wrong, "a folder that holds a sharded checkpoint", _neighbours(path))
    return CheckpointNotFoundError(asked, "there is no such folder", "a folder that exists", _neighbours(path))


def _neighbours(path: Path) -> str:
    """The checkpoints in a folder or beside it, as the last part of an error."""
    found = [
        str(entry)
        for folder in (path, path.parent)
        if folder.is_dir()
        for entry in sorted(folder.iterdir())[:1000]
        if holds_checkpoint(entry)
    ]
    return nearby(str(path), found, f"the path of a folder; {str(path.parent)!r} has none like it")
