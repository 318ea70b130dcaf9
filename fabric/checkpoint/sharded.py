"""A checkpoint in a folder, which all ranks write at once and any number of ranks can read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabric.checkpoint.dcp import (
    LAYOUT,
    Reading,
    check_files,
    file_checksum,
    plan_reading,
    read_layout,
    write_tensors,
)
from fabric.checkpoint.directory import Staging, read_manifest, remove
from fabric.checkpoint.failures import TRUSTED, damaged, listed
from fabric.checkpoint.full import FullCheckpoint
from fabric.checkpoint.plain import check_plain
from fabric.checkpoint.skeleton import MISSING, Place, find, fit_tensors, name_tensors, take_apart, written
from fabric.checkpoint.state import METADATA_KEY
from fabric.checkpoint.unison import together, write_together
from fabric.communicators import Communicator
from fabric.communicators.local import LocalCommunicator
from fabric.errors import CheckpointError, UnsafeCheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["Prepared", "ShardedCheckpoint", "Stored"]

_SKELETON = "skeleton.pt"


class ShardedCheckpoint:
    """A format of one folder per checkpoint, in which each rank writes the shards that it holds.

    The tensors lie in the layout of torch.distributed.checkpoint, everything else in one small file beside them. The
    folder is replaced as a whole: a crash at any moment leaves the old content or the new one, see ``[Note: commit of a
    directory]``. Any number of ranks can read it, each only what it needs, into tensors sharded in any way or into
    whole ones. With one process this is a :class:`fabric.checkpoint.CheckpointIO` like any other.
    """

    def save(self, state: Mapping[str, Any], path: Path, communicator: Communicator | None = None) -> None:
        """Write ``state`` to the folder ``path`` and return when it is on the disk.

        Collective: every rank of ``communicator`` must call it. Sharded tensors (DTensors) are written shard by shard;
        of whole tensors, and of everything else, rank 0's values count. Tensors that are the same memory are written
        once. Parameters come back as plain tensors.

        Args:
            state: what :func:`fabric.checkpoint.state.collect` gives, or such a state with sharded tensors in it; of
                the same structure on every rank.
            path: the folder, on a file system that all ranks share. Missing folders on the way to it are created.
            communicator: the ranks; None for this process alone.

        Raises:
            CheckpointError: ``path`` is a file or cannot be written, or ranks disagree; on every rank, when it fails on
                one. What was at ``path`` is untouched.
            ArgumentTypeError: something in ``state`` is not plain.
        """
        asked = f"save a sharded checkpoint to {str(path)!r}"
        communicator = communicator or _alone()
        is_first = communicator.rank == 0

        def parts() -> tuple[dict[str, Any], dict[Place, Tensor], dict[Place, str]]:
            skeleton, tensors = take_apart(state)
            for name, content in skeleton.items():
                check_plain(f"state[{name!r}]", content)
            return skeleton, tensors, name_tensors(tensors) if is_first else {}

        skeleton, tensors, names = together(communicator, asked, parts)
        names = communicator.broadcast_object(names, 0)
        together(communicator, asked, lambda: _check_agreement(asked, names, tensors, communicator.rank))
        staging = write_together(communicator, asked, lambda: Staging(path) if is_first else None)
        try:
            folder = communicator.broadcast_object(staging and staging.folder, 0)
            by_name: dict[str, Tensor] = {}
            for place, name in names.items():
                by_name.setdefault(name, tensors[place])
            checksums = write_tensors(asked, by_name, folder, communicator)

            def commit() -> None:
                if staging is not None:
                    FullCheckpoint().save({"skeleton": skeleton, "tensors": names}, folder / _SKELETON)
                    staging.commit({**checksums, _SKELETON: file_checksum(folder / _SKELETON)})

            write_together(communicator, asked, commit)
        finally:
            if staging is not None:
                staging.close()

    def load(
        self,
        path: Path,
        into: Mapping[str, Any] | None = None,
        communicator: Communicator | None = None,
        *,
        strict: bool = True,
        progress: Callable[[int], None] = lambda copied: None,
    ) -> dict[str, Any]:
        """Read what :meth:`save` wrote, on any number of ranks. Never runs code that the folder holds.

        All that is read is checked before anything is changed. With a communicator this is a collective: no rank
        changes anything before all of them have found everything in order. Without one, every rank may call it for
        itself, sharded tensors included.

        Args:
            path: the folder.
            into: entries to load, of the structure that was saved. Its tensors, whole or sharded, are overwritten in
                place; where it has something else for a tensor, or a meta tensor as in :meth:`describe`, a new tensor
                on the CPU is returned. Other values in it are left alone. None loads every entry whole.
            communicator: the ranks that load together.
            strict: whether an entry or a tensor that one side lacks is an error; else what fits is loaded. Shapes have
                to agree either way.
            progress: told after each tensor how many bytes of it this process has read.

        Returns:
            The entries that ``into`` names as they were saved, with the tensors of ``into``, and fabric's metadata.

        Raises:
            CheckpointNotFoundError: there is no such folder, or no save into it was ever finished.
            UnsafeCheckpointError: reading it would run code.
            CheckpointError: ``path`` is a file, it is damaged, or it does not fit ``into``: all reasons in one text.
        """
        communicator = communicator or _alone()
        asked = f"load the sharded checkpoint {str(path)!r}"
        stored = self.open(path, communicator)
        prepared = together(communicator, asked, lambda: stored.prepare(into, strict=strict))
        together(communicator, asked, lambda: prepared.copy(progress))
        return prepared.content

    def open(self, path: Path, communicator: Communicator | None = None) -> "Stored":
        """What the folder ``path`` holds, without its tensors. Collective with a communicator.

        Raises:
            CheckpointError: as for :meth:`load`, but for tensors, which nobody has looked at; or ranks found the data
                of different saves.
        """
        asked = f"load the sharded checkpoint {str(path)!r}"
        communicator = communicator or _alone()
        stored = together(communicator, asked, lambda: _open(asked, path))
        first = communicator.broadcast_object(stored.folder.name, 0)
        together(communicator, asked, lambda: _check_same_save(asked, stored, first, communicator.rank))
        return stored

    def describe(self, path: Path) -> dict[str, Any]:
        """What :meth:`load` would return, with a meta tensor of the right shape and dtype for each tensor.

        Raises:
            CheckpointError: as for :meth:`open`.
        """
        return self.open(path).describe()

    def remove(self, path: Path) -> None:
        """Delete the checkpoint in the folder ``path``; other files in the folder stay.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: ``path`` is a file.
        """
        remove(path)

    def wait(self) -> None:
        """Return at once: :meth:`save` has already waited for the disk."""


@dataclass(frozen=True)
class Prepared:
    """A part of a checkpoint that has been found in order and can be read.

    Attributes:
        content: the entries, with the tensors that are going to be overwritten.
    """

    content: dict[str, Any]
    _readings: list[Reading]

    def copy(self, progress: Callable[[int], None] = lambda copied: None) -> None:
        """Fill the tensors of :attr:`content`. Not a collective, sharded tensors included."""
        with torch.no_grad():
            for reading in self._readings:
                reading.copy(progress)


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors have not been read.

    Attributes:
        folder: the sub-folder with its data, of a name that no other save has.
    """

    folder: Path
    _asked: str
    _checksums: Mapping[str, int]
    _skeleton: dict[str, Any]
    _names: dict[Place, str]
    _layout: "Metadata"
    _intact: set[str] = field(default_factory=set)  # files that have been compared already

    def describe(self) -> dict[str, Any]:
        """The entries and fabric's metadata, with a meta tensor for each tensor; one for those that are the same."""
        by_name = {name: self._empty(name, "meta") for name in self._names.values()}
        tensors = {place: by_name[name] for place, name in self._names.items()}
        return fit_tensors(self._skeleton, self._names, tensors)

    def entries_with_tensors(self) -> set[str]:
        """The names of the entries that hold tensors."""
        return {place[0] for place in self._names}

    def prepare(self, into: Mapping[str, Any] | None = None, *, strict: bool = True) -> Prepared:
        """Find the targets for what ``into`` names, and compare the checksums of all files that hold it.

        Args:
            into: as for :meth:`ShardedCheckpoint.load`.
            strict: likewise.

        Raises:
            CheckpointError: it is damaged, or does not fit ``into``; nothing has been changed.
        """
        tensors = self._targets(into, strict)
        rounds = _rounds(self._names, tensors)
        readings = [plan_reading(self._asked, targets, self.folder, self._layout) for targets in rounds]
        files = {name for reading in readings for name in reading.files} - self._intact
        check_files(self._asked, self.folder, sorted(files), self._checksums)
        self._intact.update(files)
        content = {
            name: fit_tensors(content, self._names, tensors, (name,))
            for name, content in self._skeleton.items()
            if (name,) not in self._names or (name,) in tensors
            if into is None or name in into or name == METADATA_KEY
        }
        return Prepared(content, readings)

    def _targets(self, into: Mapping[str, Any] | None, strict: bool) -> dict[Place, Tensor]:
        """What to read, by place; new tensors where ``into`` has none."""
        fresh: dict[str, Tensor] = {}
        targets: dict[Place, Tensor] = {}
        problems: list[str] = []
        for place, name in self._names.items():
            if into is not None and place[0] not in into:
                continue
            present = None if into is None else find(into, place)
            if present is MISSING:
                problems += [f"only in the checkpoint: {written(place)}"] if strict else []
            elif not isinstance(present, Tensor) or present.is_meta:
                if hasattr(present, "full_tensor"):
                    problems.append(f"{written(place)} is a sharded meta tensor: module.to_empty(device=...) it first")
                if name not in fresh:
                    fresh[name] = self._empty(name, "cpu")
                targets[place] = fresh[name]
            elif present.shape != (shape := self._tensor(name).size):
                problems.append(f"{written(place)} is {tuple(shape)} in the checkpoint and {tuple(present.shape)} here")
            else:
                targets[place] = present
        if into is not None and strict:
            absent = [place for place in _leaves(into) if find(self._skeleton, place) is MISSING]
            problems += [f"not in the checkpoint: {written(place)}" for place in absent]
        if problems:
            raise CheckpointError(
                self._asked,
                "\n  ".join(["nothing was changed, since it does not fit:", *problems]),
                f"a checkpoint of the same structure; its entries: {listed(map(repr, self._skeleton))}",
                "strict=False to load what fits by name (shapes have to agree even then)",
            )
        return targets

    def _tensor(self, name: str) -> Any:
        return self._layout.state_dict_metadata[name]

    def _empty(self, name: str, device: str) -> Tensor:
        stored = self._tensor(name)
        return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def _alone() -> Communicator:
    return LocalCommunicator(torch.device("cpu"))


def _check_agreement(asked: str, names: Mapping[Place, str], tensors: Mapping[Place, Tensor], rank: int) -> None:
    if names.keys() != tensors.keys():
        here, there = (sorted(map(written, found)) for found in (tensors.keys() - names, names.keys() - tensors))
        raise CheckpointError(
            asked,
            f"tensors only on rank {rank}: {listed(here)}; only on rank 0: {listed(there)}",
            "a state of the same structure on every rank",
            "the same entries on every rank, also those that only one rank needs",
        )


def _check_same_save(asked: str, stored: Stored, first: str, rank: int) -> None:
    if stored.folder.name != first:
        raise CheckpointError(
            asked,
            f"rank {rank} found the data of another save than rank 0: {stored.folder.name} and {first}",
            "one folder for all ranks, into which nobody saves meanwhile",
            "the same path on every rank, and the same again if a save may have been under way",
        )


def _open(asked: str, path: Path) -> Stored:
    manifest = read_manifest(asked, path)
    check_files(asked, manifest.data, [_SKELETON], manifest.checksums)
    layout = read_layout(asked, manifest.data, manifest.checksums.get(LAYOUT))
    try:
        content = FullCheckpoint().load(manifest.data / _SKELETON)
    except UnsafeCheckpointError as error:
        # No reason to offer weights_only=False: fabric writes none that needs it.
        raise UnsafeCheckpointError(asked, f"its {_SKELETON}: {error.problem}", error.expected, TRUSTED) from error
    skeleton, names = content.get("skeleton"), content.get("tensors")
    absent = {*names.values()} - layout.state_dict_metadata.keys() if isinstance(names, dict) else set()
    if isinstance(skeleton, dict) and isinstance(names, dict) and not absent:
        return Stored(manifest.data, asked, manifest.checksums, skeleton, names, layout)
    wrong = f"its {_SKELETON} and its {LAYOUT} are not of one save: no tensor there for {listed(map(repr, absent))}"
    raise damaged(asked, wrong)


def _leaves(tree: Mapping[str, Any]) -> Iterator[Place]:
    """The places of the tensors in ``tree``, and of its entries."""
    skeleton, tensors = take_apart(tree)
    yield from tensors
    yield from ((name,) for name in skeleton if (name,) not in tensors)


def _rounds(names: Mapping[Place, str], targets: Mapping[Place, Tensor]) -> list[dict[str, Tensor]]:
    """Targets by name; a second round where one stored tensor goes to two places that are different memory."""
    by_name: dict[str, dict[int, Tensor]] = {}
    for place, target in targets.items():
        by_name.setdefault(names[place], {})[id(target)] = target
    rounds: list[dict[str, Tensor]] = []
    for name, different in by_name.items():
        for index, target in enumerate(different.values()):
            if index == len(rounds):
                rounds.append({})
            rounds[index][name] = target
    return rounds
