"""Atomic saves: over the ranks success on all or an error on all, on the disk the old content or the new.

[Note: agreement]
What can fail on one rank ends on all of them before any of them goes on. What a rank sends and receives for that does
not grow with the number of ranks, but on the first rank, which plans a save for all.

[Note: atomic publish]
The bytes go to a *temporary* in the target's own folder (a rename across file systems is a copy, and can be torn), are
flushed to the disk, and take the target's name in one rename, which is flushed as well. While it is written, its writer
holds a lock on it that the kernel drops when the process dies, however it dies: a temporary that can be locked
belongs to nobody, and the next save of the same target removes it. Process numbers would not do: they are reused, and
mean nothing in another container.

[Note: commit of a folder]
A folder that is not empty cannot be replaced in one step, a file can. So a checkpoint that is a folder has an *index*,
a file that names the save whose data counts, with the checksum of each of its data files. A save fills a sub-folder of
a new name, flushes it, and replaces the index: that is the commit. Only then are the older data files removed, and the
new ones moved up from the sub-folder into the folder, where torch's readers look. Until that is done, fabric finds
them in the sub-folder, so that a process that dies at any point leaves the old checkpoint or the new one. What the next
save finds of a save that the index does not name, and whose temporary index is gone, it removes.
"""

import fcntl
import json
import os
import pickle
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from fabric.checkpoint.base import damaged, first_line, nearby, newer
from fabric.checkpoint.state import tensor_bytes
from fabric.communicators import Communicator, Reduce
from fabric.errors import CheckpointError, CheckpointNotFoundError, FabricError

__all__ = [
    "INDEX", "atomic_write", "data_name", "find_data", "gather_on_first", "holds_shards", "raise_on_any_rank_error",
    "read_index", "remove_folder", "replace_folder", "scatter_from_first", "sync_folder", "write_errors", "write_index",
]  # fmt: skip

T = TypeVar("T")

INDEX = "index.json"
"""The file that makes a folder a sharded checkpoint."""

_WRITE_ERRORS = (RuntimeError, OSError, ValueError, TypeError, AttributeError, AssertionError, pickle.PicklingError)
_VERSION = 2
_HEADER = '{"format": "torch-fabric sharded checkpoint", "version": %s, "save": "%s", "crc32": %s,\n'
_HEADER_PATTERN = re.compile((re.escape(_HEADER) % (r"(\d+)", "([0-9a-f]{12})", r"(\d+)")).encode())
_SAVE_NAME = re.compile("save-([0-9a-f]{12})")
_DATA_NAME = re.compile(r"rank-\d{5,}(?:-\d+)?-([0-9a-f]{12})\.(?:safetensors|json)")


def raise_on_any_rank_error(communicator: Communicator, request: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and return its result once all of them are known to have succeeded.

    Collective: every rank must call it. ``action`` must not be a collective itself, since it may fail on one rank only.
    What is sent is one number per rank and, for a failure, one text.

    Args:
        communicator: the ranks.
        request: what is being done, for the error of the ranks on which nothing is wrong.
        action: this rank's part.

    Raises:
        CheckpointError: it failed on another rank; a rank on which it failed raises its own error.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - raised again below, once every rank knows of it
        error = caught
    size = communicator.size
    flag = torch.tensor([0 if error is None else size - communicator.rank], device=communicator.device)
    failed = size - int(communicator.all_reduce(flag, Reduce.MAX).item())
    if failed < size:
        text = communicator.broadcast_object(f"{type(error).__name__}: {error}", failed)
        raise error or CheckpointError(
            f"{request} on rank {communicator.rank}",
            f"it failed on rank {failed} of {size}: {text}",
            "a call that succeeds on every rank",
            f"see the error of rank {failed}",
        )
    return result


def gather_on_first(communicator: Communicator, value: Any) -> list[Any]:
    """Collective. The values of all ranks on rank 0, nothing on others."""
    content = pickle.dumps(value)
    buffer = _padded([content], _longest(communicator, len(content)))
    rows = communicator.gather(buffer.to(communicator.device), 0)
    return [] if rows is None else [pickle.loads(tensor_bytes(row)) for row in rows.cpu()]  # noqa: S301 - of this job


def scatter_from_first(communicator: Communicator, values: Sequence[Any]) -> Any:
    """Collective. Send each rank its own one of rank 0's values."""
    contents = [pickle.dumps(value) for value in values]
    length = _longest(communicator, max(map(len, contents), default=0))
    rows = _padded(contents, length).view(-1, length).to(communicator.device) if contents else None
    output = torch.empty(length, dtype=torch.uint8, device=communicator.device)
    return pickle.loads(tensor_bytes(communicator.scatter(rows, output, 0).cpu()))  # noqa: S301 - of this job


def _longest(communicator: Communicator, length: int) -> int:
    return int(communicator.all_reduce(torch.tensor([length], device=communicator.device), Reduce.MAX).item())


def _padded(contents: Iterable[bytes], length: int) -> Tensor:
    # What follows the end of a pickle is not read.
    return torch.frombuffer(bytearray(b"".join(one.ljust(length, b"\0") for one in contents)), dtype=torch.uint8)


@contextmanager
def write_errors(request: str) -> Iterator[None]:
    """Turn what torch and the file system raise in a save, up to its commit, into an error that says what it was about.

    Raises:
        CheckpointError: anything but an error of fabric's own, which is left as it is.
    """
    try:
        yield
    except FabricError:
        raise
    except _WRITE_ERRORS as error:
        refuses = "the file system refuses: " if isinstance(error, OSError) else ""
        raise CheckpointError(
            request,
            f"{refuses}{type(error).__name__}: {first_line(error)}",
            "plain data, the same tensors on every rank, and a place with room for the old and the new",
            "free space, another path, other permissions, or a state without what the line above names; what was there "
            "before is untouched",
        ) from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a binary file whose content takes the place of ``path`` when the block ends without an error.

    When the block raises, or the process dies at any point, ``path`` keeps its old content. Folders that are missing
    on the way to ``path`` are created. The new file's mode follows the umask, whatever mode the old one had. A symbolic
    link is followed, as ``open`` would: the file that it points to is replaced and the link stays.

    Raises:
        CheckpointError: ``path`` is a folder, or the file system refuses (permissions, no space left).
    """
    request = f"write {os.fspath(path)!r}"
    target = Path(os.path.realpath(path))
    with write_errors(request):
        if target.is_dir():
            raise CheckpointError(
                request, "there is a folder of that name", "the path of a file, new or to be replaced"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_temporaries(target)
        _drop_from_memory(target)
        file = _open_temporary(target)
    try:
        yield file
        with write_errors(request):
            file.flush()
            os.fsync(file.fileno())
            # Still open, so that the lock is held until the file carries its final name.
            os.replace(file.name, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(file.name)
        raise
    finally:
        with suppress(OSError):  # it flushes again what could not be flushed, and would hide that error
            file.close()
    with write_errors(request):
        sync_folder(target.parent)


@contextmanager
def replace_folder(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a sub-folder to fill, and the index to write then; see ``[Note: commit of a folder]``.

    Of several processes that fill it, one calls this. When the block raises, nothing has changed.

    Raises:
        CheckpointError: ``path`` is a file, or the file system refuses.
    """
    target = Path(os.path.realpath(path))
    if target.is_file():
        raise CheckpointError(
            f"save a sharded checkpoint to {str(path)!r}", "there is a file of that name", "the path of a folder"
        )
    is_new = not target.exists()
    try:
        with atomic_write(target / INDEX) as index:
            if is_new:
                sync_folder(target.parent)
            _clean(target)
            save = Path(index.name).name.split(".")[-2]
            folder = target / f"save-{save}"
            folder.mkdir()
            yield folder, index
            sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            _clean(target)
            if is_new:
                target.rmdir()  # unless somebody has put something else into it
        raise
    # The save is done. What cannot be removed or moved now is found where it is, and removed by the next save.
    with suppress(OSError):
        _clean(target)
        if _current_save(target) == save:
            for entry in folder.iterdir():
                os.replace(entry, target / entry.name)
            folder.rmdir()


def holds_shards(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder into which a sharded checkpoint was saved."""
    return os.path.isfile(os.path.join(path, INDEX))


def write_index(index: BinaryIO, folder: Path, content: dict[str, Any]) -> None:
    """Write an index, which is JSON with its own checksum, for the save in a sub-folder."""
    save, body = folder.name.removeprefix("save-"), json.dumps(content, allow_nan=False)[1:].encode()
    index.write((_HEADER % (_VERSION, save, _checksum(save, body))).encode() + body)


def read_index(request: str, path: Path) -> tuple[str, dict[str, Any]]:
    """Read which save the folder ``path`` holds, and what else its index says.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``, or a folder in which no save was ever committed.
        CheckpointError: ``path`` is a file, the index is damaged, or another version wrote it.
    """
    if not holds_shards(path):
        raise _absent(request, Path(path))
    header, _, body = (Path(path) / INDEX).read_bytes().partition(b"\n")
    found = _HEADER_PATTERN.fullmatch(header + b"\n")
    if found is not None and int(found[1]) > _VERSION:
        raise newer(request, int(found[1]), _VERSION)
    if found is None or _checksum(found[2].decode(), body) != int(found[3]):
        raise damaged(request, f"its {INDEX} is not one of fabric's, or its checksum does not match")
    return found[2].decode(), json.loads(b"{" + body)


def data_name(folder: Path, rank: int, suffix: str, part: int = 0) -> str:
    """The name of one rank's data file in a sub-folder, which no other save has.

    Args:
        folder: of :func:`replace_folder`.
        rank: the rank that writes it.
        suffix: ``safetensors`` or ``json``.
        part: which of the rank's files of that kind.
    """
    return f"rank-{rank:05}{f'-{part}' if part else ''}-{folder.name.removeprefix('save-')}.{suffix}"


def find_data(path: Path, name: str) -> Path:
    """Where a data file that the index names is.

    Raises:
        ValueError: it is none of a save.
    """
    found = _DATA_NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not a file of a save")
    staged = Path(path) / f"save-{found[1]}" / name
    return staged if staged.exists() else Path(path) / name


def remove_folder(path: Path) -> None:
    """Delete the checkpoint in the folder ``path``, and the folder unless it holds anything else.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: ``path`` is a file.
    """
    path = Path(path)
    if not holds_shards(path):
        raise _absent(f"remove the checkpoint {str(path)!r}", path)
    # First, so that what remains of an interrupted removal is no checkpoint.
    (path / INDEX).unlink()
    _clean(path)
    with suppress(OSError):
        path.rmdir()


def sync_folder(folder: Path) -> None:
    """Return when the names of the files in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_temporary(target: Path) -> BinaryIO:
    while True:
        file = open(target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp"), "x+b")  # noqa: SIM115
        if _locked(file, created=True):
            return file
        # Another process cleared it between its creation and its lock.
        file.close()


def _locked(file: BinaryIO, created: bool) -> bool:
    """Lock an open file; false when somebody else has it, or removed it meanwhile.

    On a file system without locks only who ``created`` it gets it, so that nobody takes it for a stale one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return created
    return os.path.exists(file.name)


def _clear_temporaries(target: Path) -> None:
    # So that ``a.pt`` never clears what belongs to ``a.pt.best``.
    stale = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{12}\.tmp")
    for temporary in target.parent.iterdir():
        if stale.fullmatch(temporary.name):
            # It may be another user's, be gone by now, or have a living writer: it is left alone.
            with suppress(OSError), open(temporary, "rb") as file:
                if _locked(file, created=False):
                    temporary.unlink()


def _drop_from_memory(target: Path) -> None:
    """Let the system reuse the memory in which it caches the file that is about to be replaced.

    Otherwise the cache grows by the size of the new file first, and memory that is new to the cache has been seen to
    double the time of writing. What a process has mapped stays.
    """
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with suppress(OSError), open(target, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checksum(save: str, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(save.encode()))


def _current_save(path: Path) -> str | None:
    """The save that the index names, empty without an index; None where it cannot be read."""
    if not holds_shards(path):
        return ""
    with open(path / INDEX, "rb") as file:
        found = _HEADER_PATTERN.fullmatch(file.readline())
    return None if found is None else found[2].decode()


def _clean(path: Path) -> None:
    """Remove what belongs to another save than that of the index, but what a living process is writing."""
    ended: list[tuple[Path, str]] = []
    for entry in path.iterdir():
        found = _DATA_NAME.fullmatch(entry.name) or _SAVE_NAME.fullmatch(entry.name)
        if found and not (path / f".{INDEX}.{found[1]}.tmp").exists():
            ended.append((entry, found[1]))
    # Read last: a save that another process has committed meanwhile is the current one by now.
    current = _current_save(path)
    if current is None:
        return  # what it named cannot be distinguished from what is stale
    for entry, save in ended:
        if save != current and _SAVE_NAME.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
        elif save != current:
            entry.unlink(missing_ok=True)


def _absent(request: str, path: Path) -> CheckpointError:
    expected, problem, suggestion = f"a folder with an {INDEX}, as fabric.save writes it", "", ""
    if path.is_file():
        problem, suggestion = "it is a file", f"fabric.load({str(path)!r}, state)"
    elif (path / ".metadata").is_file():
        problem = "torch.distributed.checkpoint wrote it, without fabric"
        suggestion = (
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} {path}.pt, if you trust it"
        )
    elif (path / "manifest.json").is_file():
        problem = "fabric wrote it before its first release, in a format that is not read any more"
        suggestion = "fabric consolidate with the version that wrote it, which makes one file"
    if problem:
        return CheckpointError(request, problem, expected, suggestion)
    problem, found = "there is no such folder", []
    if path.is_dir():
        unfinished = any(_SAVE_NAME.fullmatch(entry.name) for entry in path.iterdir())
        problem = "no save into it was ever finished" if unfinished else f"it is a folder without an {INDEX}"
    for folder in filter(Path.is_dir, (path, path.parent)):
        found += [str(entry) for entry in sorted(folder.iterdir())[:1000] if holds_shards(entry)]
    return CheckpointNotFoundError(request, problem, expected, nearby(path, found, "the path of such a folder"))
