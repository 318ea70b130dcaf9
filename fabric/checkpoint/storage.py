"""Checkpoints behind paths with a scheme, such as ``s3://bucket/run``, on the file systems of fsspec.

[Note: objects] An object store has no renames and no locks, but an upload is atomic. So a file is written to the local
temporary folder and uploaded when it is complete: a failure before that leaves nothing in the store, whereas a file
that fsspec opens for writing may appear when it is closed after an error. To read, the object is downloaded to the
temporary folder, since checksums are verified, and tensors mapped, before anything is used.
"""

import difflib
import os
import secrets
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fabric.errors import CheckpointError, CheckpointNotFoundError, MissingDependencyError

__all__ = ["Location", "RemotePath", "not_found", "remote"]


@dataclass(frozen=True)
class RemotePath:
    """The part of :class:`pathlib.Path`'s interface that is needed here, for a path with a scheme.

    Attributes:
        url: the path, with its scheme.
        files: its file system.
        path: the path in that file system.
    """

    url: str
    files: Any
    path: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The path without its last component."""
        return RemotePath(self.url.rpartition("/")[0], self.files, self.path.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is an object at this path."""
        return self._type() == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below this path."""
        return self._type() == "directory"

    def exists(self) -> bool:
        """Whether there is an object at or below this path."""
        return self._type() is not None

    def iterdir(self) -> Iterator["RemotePath"]:
        """The paths directly below this one."""
        return (
            self / name.rstrip("/").rpartition("/")[2]
            for name in self.files.ls(self.path, detail=False)
        )

    def unlink(self) -> None:
        """Remove the object."""
        self.files.rm_file(self.path)

    def rmdir(self) -> None:
        """Do nothing: a folder in an object store vanishes with its last object, or is the bucket."""

    def read_bytes(self) -> bytes:
        """The content of the object."""
        return self.files.cat_file(self.path)

    @contextmanager
    def replace(self) -> Iterator[Any]:
        """As :func:`fabric.checkpoint.file.atomic_write`."""
        with tempfile.NamedTemporaryFile(
            prefix="fabric-", suffix=f".{secrets.token_hex(6)}.tmp"
        ) as file:
            yield file
            file.flush()
            self.files.put_file(file.name, self.path)

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Yield a local copy, removed after the block; memory mappings of it remain valid."""
        with tempfile.NamedTemporaryFile(prefix="fabric-") as file:
            self.files.get_file(self.path, file.name)
            yield Path(file.name)

    def _type(self) -> str | None:
        self.files.invalidate_cache()  # others write here too, and so does `replace`
        with suppress(FileNotFoundError):
            return self.files.info(self.path)["type"]


Location = Path | RemotePath


def remote(url: str) -> RemotePath:
    """A path with a scheme.

    Raises:
        MissingDependencyError: the package for its scheme is not installed.
    """
    try:
        import fsspec  # only needed for such paths; torch depends on it

        return RemotePath(url, *fsspec.url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(f"a checkpoint at {url!r}", str(error)) from error


def not_found(request: str, path: Location, kind: str) -> CheckpointError:
    """The error for a missing checkpoint, with similar names in the same folder."""
    folder = path.parent
    names = list[str]()
    with suppress(OSError):
        names = [entry.name for entry in islice(folder.iterdir(), 1000)]
    problem = (
        f"there is no such {kind}"
        if folder.is_dir()
        else f"its folder {str(folder)!r} does not exist"
    )
    close = (str(folder / name) for name in difflib.get_close_matches(path.name, names, n=20))
    near = [
        each
        for each in close
        if os.path.isdir(each) or (os.path.isfile(each) and zipfile.is_zipfile(each))
    ]
    suggestion = ", or ".join(near[:5]) or f"the path of a {kind} that exists"
    return CheckpointNotFoundError(request, problem, f"a {kind} that fabric.save wrote", suggestion)
