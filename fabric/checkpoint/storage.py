"""Checkpoints behind paths with a scheme, such as ``s3://bucket/run``, on the file systems of fsspec.

[Note: objects] An object store has no renames and no locks, but an object appears in it at once and whole. So a file is
written to the local folder for temporary files, and sent when it is complete: what fails before leaves nothing there,
while a file that fsspec opens for writing may appear when it is closed after an error. It is read from a copy there,
since checksums are compared, and tensors mapped, before anything is used.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import ConfigurationError, MissingDependencyError

__all__ = ["Location", "RemotePath", "locate"]

_URL = re.compile(r"([A-Za-z][\w+.:-]+):(//?)(.*)", re.DOTALL)
_LONGEST = 255  # bytes of a name, on nearly every file system


@dataclass(frozen=True)
class RemotePath:
    """What :class:`pathlib.Path` has of use here, for a path with a scheme.

    Attributes:
        url: the path, with its scheme.
        files: its file system.
        path: the path in that.
    """

    url: str
    files: Any
    path: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The path without its last part."""
        return RemotePath(self.url.rpartition("/")[0], self.files, self.path.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is an object."""
        return self._type() == "file"

    def is_dir(self) -> bool:
        """Whether there is something below it."""
        return self._type() == "directory"

    def absolute(self) -> "RemotePath":
        """Itself."""
        return self

    def exists(self) -> bool:
        """Whether there is either."""
        return self._type() is not None

    def iterdir(self) -> Iterator["RemotePath"]:
        """What is directly below it."""
        return (self / name.rstrip("/").rpartition("/")[2] for name in self.files.ls(self.path, detail=False))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        with suppress(*[FileNotFoundError] * missing_ok):
            self.files.rm_file(self.path)

    def rmdir(self) -> None:
        """Nothing: what is called a folder in an object store is gone with its last object, or is the bucket."""

    def read_bytes(self) -> bytes:
        """The content of the object."""
        return self.files.cat_file(self.path)

    @contextmanager
    def replace(self) -> Iterator[Any]:
        """Yield a file whose content takes the place of what is here when the block ends without an error."""
        with tempfile.NamedTemporaryFile(prefix="fabric-") as file:
            yield file
            file.flush()
            self.files.put_file(file.name, self.path)

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Yield a local file of the same content, for as long as the block; what is mapped of it stays."""
        with tempfile.NamedTemporaryFile(prefix="fabric-") as file:
            self.files.get_file(self.path, file.name)
            yield Path(file.name)

    def _type(self) -> str | None:
        self.files.invalidate_cache()  # others write here too, and so does `replace`
        try:
            return self.files.info(self.path)["type"]
        except FileNotFoundError:
            return None


Location = Path | RemotePath


def locate(path: str | os.PathLike[str]) -> Any:
    """What a user's path means: a :data:`Location`.

    Raises:
        ConfigurationError: no file can have this name.
        MissingDependencyError: the package for its scheme is not installed.
    """
    text = os.fspath(path)
    found = _URL.fullmatch(text)
    scheme, slashes, rest = found.groups() if found else ("", "", text)
    problem = ""
    if "\0" in text or not rest.strip("/"):
        problem = "it names no file"
    elif max(map(len, os.fsencode(rest).split(b"/"))) > _LONGEST:
        problem = f"a part of it is longer than {_LONGEST} bytes"
    elif slashes == "/" and not os.path.exists(f"{scheme}:"):
        problem = "it has one slash behind its scheme, which is all that pathlib leaves of two"
    if problem:
        raise ConfigurationError(f"a checkpoint at {text!r}", problem, "'folder/name', or 's3://bucket/name' in a str")
    if slashes != "//" or scheme in ("file", "local"):
        return Path(rest if slashes == "//" else text)
    try:
        import fsspec  # of use for such paths only; torch brings it

        return RemotePath(text.rstrip("/"), *fsspec.url_to_fs(text.rstrip("/")))
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(f"a checkpoint at {text!r}", str(error)) from error
