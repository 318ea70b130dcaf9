"""The format of one file, which plain torch can read, and what makes a save atomic: on all ranks, and on the disk.

[Note: agreement]
What can fail on one rank ends on all of them before any of them goes on. What a rank sends and receives for that does
not grow with the number of ranks, but on the first rank, which commits a save for all.

[Note: atomic publish]
The bytes go to a *temporary* in the target's own folder (a rename across file systems is a copy, and can be torn), are
flushed to the disk, and take the target's name in one rename, which is flushed as well. While it is written, its writer
holds a lock on it that the kernel drops when the process dies, however it dies: a temporary that can be locked
belongs to nobody, and the next save of the same target removes it. Process numbers would not do: they are reused, and
mean nothing in another container.
"""

import fcntl
import json
import os
import pickle
import pickletools
import re
import secrets
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.serialization import get_crc32_options

from fabric import errors
from fabric.checkpoint.state import tensor_bytes
from fabric.checkpoint.storage import Location, RemotePath, not_found, remote
from fabric.communicators import Communicator, Reduce
from fabric.errors import CheckpointError, ConfigurationError, FabricError, UnsafeCheckpointError

__all__ = [
    "CheckpointIO", "FullCheckpoint", "Written", "atomic_write", "clear_temporaries", "find", "gather_on_first",
    "local_copy", "locate", "raise_on_any_rank_error", "read_errors", "sync_folder", "write_errors", "write_safetensors"
]  # fmt: skip

T = TypeVar("T")
# The checksum of a file, and its chunks by tensor: where each begins in that, its shape, and its place in the file.
Written = tuple[int, dict[str, tuple[list[int], list[int], int]]]

_KINDS = errors.CheckpointNotFoundError, errors.DamagedCheckpointError, UnsafeCheckpointError
_LONGEST = 255  # bytes of a name, on nearly every file system
_ALIGNMENT = 64  # bytes; enough for every dtype and for the processor's widest loads
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@runtime_checkable
class CheckpointIO(Protocol):
    """A format in which plain state is kept: how a mapping is written to the disk and read back.

    State is plain: tensors, numbers, strings, bytes, ``None`` and nested dicts, lists, tuples and sets of these. An
    implementation knows nothing of processes, modules or optimizers, and any object with these methods is accepted.
    Where a user's path has a scheme, ``path`` is a :class:`fabric.checkpoint.storage.RemotePath`, whose ``str`` it is.
    """

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        """Write ``state`` to ``path``, so that a reader sees what was there before, or all of ``state``.

        Raises:
            CheckpointError: it could not be written; what was at ``path`` is untouched.
        """

    def load(self, path: Path) -> dict[str, Any]:
        """Read what :meth:`save` wrote, with every tensor on the CPU. Never runs code that the file holds.

        Raises:
            CheckpointNotFoundError: there is nothing at ``path``.
            UnsafeCheckpointError: reading it would run code.
            DamagedCheckpointError: it is damaged; ``fabric.checkpoints`` restores an older one then.
            CheckpointError: it is in another format.
        """
        ...

    def remove(self, path: Path) -> None:
        """Delete the checkpoint at ``path``.

        Raises:
            CheckpointNotFoundError: there is nothing at ``path``.
        """

    def wait(self) -> None:
        """Return when every save that was begun is on disk, raising what went wrong in it."""


class FullCheckpoint:
    """The default format: one file per checkpoint, written by ``torch.save``.

    Such a file can be read without fabric, by ``torch.load(path, weights_only=True)``. It is replaced atomically: a
    crash at any moment leaves the old file or the new one. It is meant for one process to write and any number to read.
    """

    def save(self, state: Mapping[str, Any], path: Location) -> None:
        """Write ``state`` to the file ``path`` and return when it is on the disk.

        Tensors are written from where they lie; no copy of a CPU tensor is made. Tensors that share storage share it
        in the file too, and a view brings the whole storage that it looks into.

        Raises:
            CheckpointError: ``path`` is a folder or cannot be written; what was there before is untouched.
        """
        request = f"save a checkpoint to {str(path)!r}"
        if not get_crc32_options():
            problem = "without torch's checksums, damage to the file could not be noticed"
            raise CheckpointError(request, problem, suggestion="torch.serialization.set_crc32_options(True)")
        with atomic_write(path) as file, write_errors(request):
            # That of a module has the versions of its layers beside its entries.
            torch.save(state if type(state) is OrderedDict else dict(state), file)

    def load(self, path: Location, *, weights_only: bool = True) -> dict[str, Any]:
        """Read a file that :meth:`save` or ``torch.save`` wrote, with every tensor on the CPU.

        The checksum of every record is compared first. Tensors are mapped from the file and read when they are used:
        copy them if the file may be overwritten in place (fabric itself never does that) while they live.

        Args:
            path: the file.
            weights_only: nothing that the file holds is run. False rebuilds any object, which runs whatever code the
                file names: only for a file whose writer you trust.

        Raises:
            CheckpointNotFoundError: there is no such file; similar names beside it are listed.
            UnsafeCheckpointError: it holds objects that only running code can rebuild; they are named.
            CheckpointError: it is damaged, was not written by ``torch.save``, or does not hold a dict.

        With ``weights_only=False``, whatever the code in the file raises is not converted.
        """
        request = f"load the checkpoint {str(path)!r}"
        with ExitStack() as stack:
            with read_errors(request):
                _require_file(request, path)
                local = stack.enter_context(local_copy(path))
                is_archive = _verify(local)
            if weights_only:  # else its errors are those of somebody else's code
                stack.enter_context(read_errors(request))
            try:
                loaded: Any = torch.load(local, map_location="cpu", weights_only=weights_only, mmap=is_archive)
            except pickle.UnpicklingError as error:
                names = re.findall(r"GLOBAL (\S+)", str(error))[:1] or _names_in(local)
                if not (weights_only and names):  # somebody else's code, or damage
                    raise
                problem = f"it holds {', '.join(names)}: rebuilding that could run any code, so nothing was loaded"
                suggestion = (
                    "torch.serialization.add_safe_globals([TheClass]) before, for a class of your own; or, for a file "
                    "whose author you trust, weights_only=False in fabric.load or load_raw, which runs what it names"
                )
                raise UnsafeCheckpointError(request, problem, "plain data", suggestion) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(request, f"the file holds a {type(loaded).__name__}", "a dict of entries")
        return loaded

    def remove(self, path: Location) -> None:
        """Delete the file ``path``.

        Raises:
            CheckpointNotFoundError: there is no such file.
            CheckpointError: it is a folder.
        """
        _require_file(f"remove the checkpoint {str(path)!r}", path)
        path.unlink()

    def wait(self) -> None:
        """Return at once: :meth:`save` has already waited for the disk."""


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
        kind = type(error) if type(error) in _KINDS else CheckpointError
        text, kind = communicator.broadcast_object((f"{type(error).__name__}: {error}", kind), failed)
        request = f"{request} on rank {communicator.rank}"
        raise error or kind(request, f"it failed on rank {failed} of {size}: {text}")
    return result


def gather_on_first(communicator: Communicator, value: Any) -> list[Any]:
    """Collective. The values of all ranks on rank 0, nothing on others."""
    content, device = pickle.dumps(value), communicator.device
    longest = int(communicator.all_reduce(torch.tensor([len(content)], device=device), Reduce.MAX).item())
    # What follows the end of a pickle is not read.
    buffer = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = communicator.gather(buffer.to(device), 0)
    return [] if rows is None else [pickle.loads(tensor_bytes(row)) for row in rows.cpu()]  # noqa: S301 - of this job


@contextmanager
def _errors(kind: type[CheckpointError], problem: str, expected: str, suggestion: str, request: str) -> Iterator[None]:
    try:
        yield
    except (FabricError, MemoryError):  # the latter is no fault of the checkpoint
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]  # torch may put a stack of C++ below
        raise kind(request, f"{problem}: {type(error).__name__}: {text}", expected, suggestion) from error


# With a request: turns what torch and the file system raise in a save, up to its commit, into a CheckpointError.
write_errors = partial(
    _errors,
    CheckpointError,
    "it could not be written, and what was there before is untouched",
    "plain data, the same tensors on every rank, and a place with room for the old and the new",
    "free space, another path, other permissions, or a state without what the line above names",
)

# Likewise for what reading raises, where no code of the user's is run.
read_errors = partial(
    _errors,
    errors.DamagedCheckpointError,
    "the checkpoint is damaged, or was replaced while it was read",
    "what fabric.save or torch.save wrote, complete and with torch's default of writing checksums",
    "the same again, if a save may have been running; or an older checkpoint, or a fresh copy of this one",
)


def locate(path: str | os.PathLike[str]) -> Any:
    """What a user's path means: a :data:`Location`, which stays the same when the process goes to another folder.

    Raises:
        ConfigurationError: no file can have this name.
        MissingDependencyError: the package for its scheme is not installed.
    """
    text = os.fspath(path)
    [(scheme, slashes, rest)] = re.findall(r"(?s)\A(?:([A-Za-z][\w+.:-]+):(//?))?(.*)", text)
    problems = {
        "it names no file": "\0" in text or not rest.strip("/"),
        f"a part of it is longer than {_LONGEST} bytes": max(map(len, os.fsencode(rest).split(b"/"))) > _LONGEST,
        "it has one slash behind its scheme, which is all that pathlib leaves of two": (
            slashes == "/" and not os.path.exists(f"{scheme}:")
        ),
    }
    for problem in filter(problems.get, problems):
        raise ConfigurationError(f"a checkpoint at {text!r}", problem, "'folder/name', or 's3://bucket/name' in a str")
    if slashes != "//" or scheme in ("file", "local"):
        return Path(rest if slashes == "//" else text).absolute()
    return remote(text.rstrip("/"))


def find(request: str, path: str | os.PathLike[str], default: bool) -> tuple[Any, bool]:
    """What a user's path means, and whether that is a folder; ``default`` where there is nothing."""
    found = locate(path)
    with read_errors(request):
        return found, found.is_dir() or (default and not found.exists())


@contextmanager
def atomic_write(path: Location) -> Iterator[BinaryIO]:
    """Yield a binary file whose content takes the place of ``path`` when the block ends without an error.

    When the block raises, or the process dies at any point, ``path`` keeps its old content. Folders that are missing
    on the way to ``path`` are created. The new file's mode follows the umask, whatever mode the old one had. A symbolic
    link is followed, as ``open`` would: the file that it points to is replaced and the link stays.

    Raises:
        CheckpointError: ``path`` is a folder or a device, or the file system refuses (permissions, no space left).
    """
    request = f"write {str(path)!r}"
    if isinstance(path, RemotePath):
        with write_errors(request), path.replace() as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    with write_errors(request):
        if target.exists() and not target.is_file():
            kind = "folder" if target.is_dir() else "device or a pipe"
            raise CheckpointError(request, f"there is a {kind} of that name", "the path of a file")
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_temporaries(target.parent, re.escape(target.name))
        # What it has in the system's cache of files is reused: new memory has been seen to double the time of writing.
        with suppress(OSError, AttributeError), open(target, "rb") as old:  # macOS has no such function
            os.posix_fadvise(old.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file = _open_temporary(target)
    try:
        yield file
        with write_errors(request):
            file.flush()
            os.fsync(file.fileno())
            # Still open, so that the lock is held until the file carries its final name.
            os.replace(file.name, target)
    finally:
        with suppress(OSError):  # it has its final name; or is left to the next save, and hides no other error
            os.unlink(file.name)
        with suppress(OSError):  # it flushes again what could not be flushed, and would hide that error
            file.close()
    with write_errors(request):
        sync_folder(target.parent)


def write_safetensors(file: BinaryIO, chunks: Mapping[str, tuple[list[int], Tensor]]) -> Written:
    """Write a safetensors file with torch's metadata of shards.

    Args:
        file: where to.
        chunks: by name, where a chunk begins in its tensor, and the chunk.

    Returns:
        What it has.
    """
    # The widest first, so that all of them are aligned.
    chunks = dict(sorted(chunks.items(), key=lambda item: -item[1][1].itemsize))
    header, sharding, ends = {}, {}, [0]
    for name, (offsets, chunk) in chunks.items():
        ends.append(ends[-1] + chunk.nbytes)
        dtype, width = (_DTYPES[chunk.dtype], []) if chunk.dtype in _DTYPES else ("U8", [chunk.itemsize])
        header[name] = {"dtype": dtype, "shape": [*chunk.shape, *width], "data_offsets": ends[-2:]}
        sharding[name] = {"saved_offsets": [*offsets, *[0] * len(width)]}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    # One after the other: of a tensor on another device, one copy at a time is here.
    contents = (tensor_bytes(chunk) for _, chunk in chunks.values())
    checksum = 0
    for content in chain([len(text).to_bytes(8, "little") + text], contents):
        file.write(content)
        checksum = zlib.crc32(content, checksum)
    starts = zip(chunks.items(), ends, strict=False)
    return checksum, {name: (at, [*chunk.shape], 8 + len(text) + start) for (name, (at, chunk)), start in starts}


def sync_folder(folder: Path) -> None:
    """Return when the names of the files in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_copy(path: Location) -> AbstractContextManager[Path]:
    """A context in which the content of ``path`` is in a local file; what is mapped of it stays afterward."""
    return path.local_copy() if isinstance(path, RemotePath) else nullcontext(path)


def _open_temporary(target: Path) -> BinaryIO:
    while True:
        file = open(target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp"), "x+b")  # noqa: SIM115
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        # Another process cleared it between its creation and its lock.
        file.close()


def clear_temporaries(folder: Location, names: str) -> None:
    """Remove what killed writers have left in a folder, of files whose names a regular expression matches."""
    # So that ``a.pt`` never clears what belongs to ``a.pt.best``.
    stale = re.compile(rf"\.{names}\.[0-9a-f]{{12}}\.tmp")
    for temporary in folder.iterdir():
        if stale.fullmatch(temporary.name) and temporary.is_file():
            # It may be another user's, be gone by now, or have a living writer, who has the lock: it is left alone.
            with suppress(OSError), open(temporary, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()


def _require_file(request: str, path: Location) -> None:
    if path.is_dir():
        suggestion = f"fabric.load({str(path)!r}, {{'model': model}}) for shards; in a shell: fabric consolidate {path}"
        raise CheckpointError(request, "it is a folder", "a file that fabric.save wrote", suggestion)
    if not path.is_file():
        raise not_found(request, path, "file")


def _verify(path: Path) -> bool:
    """Compare the checksums of a zip archive; false for torch's format before 1.6, which has none."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
        with zipfile.ZipFile(file) as archive:
            # torch never compresses.
            rows = archive.infolist()
            packed = (row.filename for row in rows if row.compress_type or row.file_size != row.compress_size)
            if changed := next(packed, None) or archive.testzip():
                raise ValueError(f"the checksum of {changed} does not match")
    return True


def _names_in(path: Path) -> list[str]:
    """What a pickle of protocol 4 or later names, harmless or not: torch reads none of these, and says no more."""
    strings: list[str] = []
    found: set[str] = set()
    with suppress(Exception), open(path, "rb") as file:
        pickled: Any = file
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(file)
            pickled = archive.open(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STACK_GLOBAL":
                found.add(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    return sorted(found)
