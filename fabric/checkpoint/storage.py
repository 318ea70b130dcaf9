"""Where checkpoints are: local paths, and paths with a scheme such as ``s3://bucket/run``.

An object store has no renames and no locks, but an upload is atomic. So a file is written to the
local temporary folder, and uploaded when it is complete. A failure before the upload leaves nothing
in the store. (A file that fsspec opens for writing may appear in the store when it is closed after
an error.) To read, an object is downloaded to the local temporary folder, since checksums are
verified, and tensors are mapped into memory, before anything is used.
"""

import difflib
import errno
import os
import re
import secrets
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fabric.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingDependencyError,
)

__all__ = [
    "Location",
    "RemotePath",
    "local_copy",
    "locate",
    "not_found",
    "path_type",
    "require_folder",
]

_MAX_NAME_BYTES = 255  # the longest name of a file or folder, on nearly every file system
_MAX_ENTRIES = 1000  # how many entries of a folder are searched for similar names
_MAX_SUGGESTIONS = 5
# A local path, or a URL such as "s3://bucket/run". "slashes" is "/" for a URL that pathlib has
# shortened, and None for a local path.
_PATH = re.compile(
    r"(?:(?P<scheme>[A-Za-z][\w+.:-]+):(?P<slashes>//?))?(?P<path>.*)", flags=re.DOTALL
)


# Errors of the system that say that nothing is at a path, or behind a link.
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class RemotePath:
    """A path in an object store, with the methods of :class:`pathlib.Path` that checkpoints need.

    Attributes:
        url: the path, with its scheme.
        files: the file system of fsspec for the scheme.
        path: the path in the file system, without the scheme.
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
        parent_url, _, _ = self.url.rpartition("/")
        parent_path, _, _ = self.path.rpartition("/")
        return RemotePath(parent_url, self.files, parent_path)

    def is_file(self) -> bool:
        """Return whether there is an object at this path."""
        return self.type() == "file"

    def is_dir(self) -> bool:
        """Return whether there are objects below this path."""
        return self.type() == "directory"

    def exists(self) -> bool:
        """Return whether there is an object at or below this path."""
        return self.type() is not None

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield the paths directly below this path."""
        for path in self.files.ls(self.path, detail=False):
            # Some file systems of fsspec end the path of a folder with a slash.
            _, _, name = path.rstrip("/").rpartition("/")
            yield self / name

    def unlink(self) -> None:
        """Remove the object."""
        self.files.rm_file(self.path)

    def rmdir(self) -> None:
        """Do nothing: an object store has no folders, only objects with slashes in their names.

        Callers call the same methods for local paths.
        """

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        return self.files.cat_file(self.path)

    @contextmanager
    def replace(self) -> Iterator[Any]:
        """Yield a binary file that is uploaded when the block ends without an error.

        The upload replaces the object at this path. The name of the local file ends in a unique ID
        and ``.tmp``, like the temporary files of :func:`atomic_write`, which calls this method. A
        sharded save calls :func:`atomic_write`, and reads its ID from the name.
        """
        suffix = f".{secrets.token_hex(6)}.tmp"
        with tempfile.NamedTemporaryFile(prefix="fabric-", suffix=suffix) as file:
            yield file
            file.flush()
            self.files.put_file(file.name, self.path)

    def type(self) -> str | None:
        """Return ``"file"``, ``"directory"``, or None if there is nothing at this path."""
        # fsspec caches listings, and does not see what replace() or another process has written.
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):
            return self.files.info(self.path)["type"]
        return None


Location = Path | RemotePath


def locate(path: str | os.PathLike[str]) -> Any:
    """Resolve a user's path to an absolute :data:`Location`.

    A later ``chdir`` does not affect the result. The declared type is Any, since the result is also
    passed to the user's ``CheckpointIO``, which may be declared to take a ``Path``.

    Raises:
        ConfigurationError: the path is not a valid file name.
        MissingDependencyError: the package for its scheme is not installed.
    """
    text = os.fspath(path)
    match = _PATH.fullmatch(text)
    assert match is not None, "the pattern has to match any text"
    _check_path(text, match)
    # A colon alone is a part of a file name, as in "runs/12:30".
    has_scheme = match["slashes"] == "//"
    if not has_scheme:
        return Path(text).absolute()
    # The schemes of fsspec for local files.
    if match["scheme"] in ("file", "local"):
        return Path(match["path"]).absolute()
    # RemotePath.name is what follows the last slash.
    return _remote_path(text.rstrip("/"))


def _check_path(text: str, match: re.Match[str]) -> None:
    """Raise a ConfigurationError if a path is not a valid file name.

    ``match`` is the match of the pattern ``_PATH`` with ``text``, the user's path.
    """
    path = match["path"]
    component_sizes = [len(name) for name in os.fsencode(path).split(b"/")]
    problem = None
    if "\0" in text or not path.strip("/"):
        problem = "it names no file"
    elif max(component_sizes) > _MAX_NAME_BYTES:
        problem = f"a component of it is longer than {_MAX_NAME_BYTES} bytes"
    elif match["slashes"] == "/" and not os.path.exists(f"{match['scheme']}:"):
        # Path("s3://bucket/run") is the text "s3:/bucket/run". It is a local path only if there is
        # a folder called "s3:".
        problem = "it has one slash behind its scheme, which is all that pathlib leaves of two"
    if problem is not None:
        expected = "'folder/name', or 's3://bucket/name' in a str"
        raise ConfigurationError(f"a checkpoint at {text!r}", problem, expected=expected)


def _remote_path(url: str) -> RemotePath:
    """Return the path for a URL, with the file system for its scheme.

    Raises:
        MissingDependencyError: fsspec does not know the scheme, or the package for the scheme is
            not installed.
    """
    try:
        # torch depends on fsspec. It is imported here because only a path with a scheme needs it.
        import fsspec

        files, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise MissingDependencyError(f"a checkpoint at {url!r}", problem=str(error)) from error
    return RemotePath(url, files, path)


def path_type(path: Location) -> str | None:
    """Return ``"file"``, ``"directory"`` or ``"other"``, or None if there is nothing at a path.

    Use it in place of ``Path.is_file()`` and the like: from Python 3.14 on, these return False if
    the system fails to look. An intact checkpoint would then seem to be missing, and would be
    skipped or removed.

    Args:
        path: the path. A symbolic link is followed.

    Raises:
        OSError: the system has failed to look.
    """
    if isinstance(path, RemotePath):
        return path.type()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise
    if stat.S_ISDIR(mode):
        return "directory"
    return "file" if stat.S_ISREG(mode) else "other"


@contextmanager
def local_copy(path: Location) -> Iterator[Path]:
    """Yield a local file with the content of ``path``: the file itself, or a temporary copy.

    A copy is removed after the block. Memory mappings of the removed file remain valid.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="fabric-") as file:
        path.files.get_file(path.path, file.name)
        yield Path(file.name)


def require_folder(request: str, folder: Location) -> None:
    """Raise a CheckpointError if ``folder`` cannot be created because a file is in its place.

    The file is at the path of the folder or of one of its parents. ``request`` is what the user
    asked for, for the error.
    """
    # In an object store, no object is in the way: it may have the name of a folder.
    if isinstance(folder, RemotePath):
        return
    for path in [folder, *folder.parents]:
        type_of_path = path_type(path)
        if type_of_path == "directory":
            return
        if type_of_path is not None:
            raise CheckpointError(
                request,
                problem=f"{str(path)!r} is a file",
                expected="the path of a folder, or a path where nothing is",
                suggestion="another path, or move the file",
            )


def not_found(request: str, path: Location, kind: str) -> CheckpointError:
    """Return the error for a missing checkpoint, with similar names in the same folder.

    Args:
        request: the user's request, a text for errors.
        path: where the checkpoint was looked for.
        kind: ``"file"`` or ``"folder"``.
    """
    folder = path.parent
    problem = f"there is no such {kind}"
    if not folder.is_dir():
        problem = f"its folder {str(folder)!r} does not exist"
    suggestion = ", or ".join(_similar_paths(path)[:_MAX_SUGGESTIONS])
    if not suggestion:
        suggestion = f"the path of a {kind} that exists"
    return CheckpointNotFoundError(
        request, problem, expected=f"a {kind} that fabric.save wrote", suggestion=suggestion
    )


def _similar_paths(path: Location) -> list[str]:
    """Return paths beside ``path`` with similar names, the most similar first.

    Only local folders and zip archives are returned, since only these can be checkpoints. If the
    folder cannot be read, the list is empty: the caller builds the text of another error.
    """
    names: list[str] = []
    with suppress(OSError):
        names = [entry.name for entry in islice(path.parent.iterdir(), _MAX_ENTRIES)]
    similar = []
    # n is larger than the number of suggestions, because some of the names are not checkpoints.
    for name in difflib.get_close_matches(path.name, names, n=20):
        candidate = str(path.parent / name)
        is_archive = os.path.isfile(candidate) and zipfile.is_zipfile(candidate)
        if is_archive or os.path.isdir(candidate):
            similar.append(candidate)
    return similar
