"""A full checkpoint in one file, which plain torch can read."""

import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, get_unsafe_globals_in_checkpoint

from fabric.checkpoint.atomic import atomic_write, holds_shards, write_errors
from fabric.checkpoint.base import DAMAGE, damaged, first_line, nearby
from fabric.errors import CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError

__all__ = ["FullCheckpoint"]

_SAFE_LOAD = "tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of these"


class FullCheckpoint:
    """The default format: one file per checkpoint, written by ``torch.save``.

    Such a file can be read without fabric, by ``torch.load(path, weights_only=True)``. It is replaced atomically: a
    crash at any moment leaves the old file or the new one. It is meant for one process to write and any number to read.
    """

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        """Write ``state`` to the file ``path`` and return when it is on the disk.

        Tensors are written from where they lie; no copy of a CPU tensor is made. Tensors that share storage share it
        in the file too, and a view brings the whole storage that it looks into.

        Raises:
            CheckpointError: ``path`` is a folder or cannot be written; what was there before is untouched.
        """
        request = f"save a checkpoint to {str(path)!r}"
        if not get_crc32_options():
            raise CheckpointError(
                request,
                "torch.serialization.set_crc32_options(False) is in force: damage to the file could not be noticed",
                "torch's default, which writes a checksum for every record",
                "torch.serialization.set_crc32_options(True)",
            )
        with atomic_write(path) as file, write_errors(request):
            torch.save(dict(state), file)

    def load(self, path: Path, *, weights_only: bool = True) -> dict[str, Any]:
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
        _require_file(request, path)
        loaded: Any = None
        try:
            is_archive = _verify(request, path)
            if weights_only:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        except (CheckpointError, MemoryError):  # the latter is no fault of the file
            raise
        except DAMAGE as error:
            raise _diagnosis(request, path, error) from error
        if not weights_only:
            # Its errors are those of somebody else's code, which no list of ours foresees.
            loaded = torch.load(path, map_location="cpu", weights_only=False, mmap=is_archive)
        if not isinstance(loaded, dict):
            raise CheckpointError(
                request,
                f"the file holds a {type(loaded).__name__}",
                "a dict, as fabric.save writes it",
                f"torch.load({str(path)!r}, weights_only={weights_only})",
            )
        return loaded

    def remove(self, path: Path) -> None:
        """Delete the file ``path``.

        Raises:
            CheckpointNotFoundError: there is no such file.
            CheckpointError: it is a folder.
        """
        _require_file(f"remove the checkpoint {str(path)!r}", path)
        os.unlink(path)

    def wait(self) -> None:
        """Return at once: :meth:`save` has already waited for the disk."""


def _require_file(request: str, path: Path) -> None:
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        raise CheckpointError(
            request,
            "it is a folder" + " with a sharded checkpoint" * holds_shards(path),
            f"a file that fabric.save wrote, as {_alternatives(path, path)}",
            f"fabric.load({str(path)!r}, {{'model': model}}) for a sharded checkpoint, with the entries that you want; "
            f"or, in a shell, fabric consolidate {os.fspath(path)}, which makes one file of it",
        )
    folder = Path(path).parent
    problem = "there is no such file" if folder.is_dir() else f"its folder {str(folder)!r} does not exist"
    raise CheckpointNotFoundError(request, problem, "a file that fabric.save wrote", _alternatives(folder, path))


def _alternatives(folder: Path, path: Path) -> str:
    """Files in ``folder`` that resemble ``path``, as the last part of an error."""
    files: list[str] = []
    with suppress(OSError):
        entries = islice(Path(folder).iterdir(), 1000)
        files = [str(entry) for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    return nearby(Path(path), files, "the path of a file that exists")


def _verify(request: str, path: Path) -> bool:
    """Compare the checksums of a zip archive; false for torch's format before 1.6, which has none."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
        with zipfile.ZipFile(file) as archive:
            # torch never compresses.
            packed = (
                one.filename for one in archive.infolist() if one.compress_type or one.file_size != one.compress_size
            )
            changed = next(packed, None) or archive.testzip()
    if changed is not None:
        raise damaged(request, f"the checksum of {changed} does not match")
    return True


def _diagnosis(request: str, path: Path, error: Exception) -> CheckpointError:
    """What is wrong with a file that torch could not load: it would run code, or it is damaged."""
    offenders = _code_in(path, error) if isinstance(error, pickle.UnpicklingError) else []
    if offenders:
        return UnsafeCheckpointError(
            request,
            f"it holds {', '.join(offenders)}: rebuilding that could run any code, so nothing was loaded",
            _SAFE_LOAD,
            "weights_only=False in fabric.load or load_raw, if you trust whoever wrote the file: it runs what the file "
            "names. A class of your own can be allowed with torch.serialization.add_safe_globals([TheClass])",
        )
    return damaged(request, f"or it was not written by torch.save: {first_line(error)}")


def _code_in(path: Path, error: Exception) -> list[str]:
    """The classes and functions that a file's pickle refers to and torch does not allow; found without running it."""
    offenders: list[str] = []
    with suppress(*DAMAGE):
        offenders = sorted(get_unsafe_globals_in_checkpoint(path))
    return offenders or re.findall(r"GLOBAL (\S+)", str(error))[:1] or _names_in(path)


def _names_in(path: Path) -> list[str]:
    """What pickles of protocols from 4 on name, harmless or not: torch reads none of these, and says no more."""
    strings: list[str] = []
    found: set[str] = set()
    with suppress(*DAMAGE), open(path, "rb") as file:
        pickles: Any = file
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(file)
            pickles = archive.open(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        while True:  # the format before torch 1.6 is several in a row; what follows them ends it
            for opcode, argument, _ in pickletools.genops(pickles):
                if opcode.name == "STACK_GLOBAL":
                    found.add(".".join(strings[-2:]))
                elif isinstance(argument, str):
                    strings.append(argument)
    return sorted(found)
