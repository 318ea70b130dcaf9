"""A checkpoint in a folder: its index, and reading its tensors into tensors that are sharded in any way.

[Note: checksums] The index has a CRC32 over all bytes of each file, summed while they are written, and its own. A file
that is needed is mapped into memory and compared as a whole before anything is copied out of it.
"""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fabric.checkpoint.file import local_copy, read_errors
from fabric.checkpoint.state import METADATA_KEY, check_version, listed, local_chunks, tensor_bytes, unflatten_state
from fabric.checkpoint.storage import Location, not_found
from fabric.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError

__all__ = ["DATA_NAME", "FORMAT", "INDEX", "StoredCheckpoint", "read_index"]

FORMAT = "torch-fabric sharded checkpoint"
INDEX = "index.json"
DATA_NAME = re.compile(r"rank-\d{5,}(?:-\d+)?-([0-9a-f]{12})\.(?:safetensors|json)(?:\.tmp)?")
"""The data files of a save, whose number is in the name; see ``[Note: commit of a folder]`` for the last suffix."""

_OF_TORCH = (".metadata", ".distcp")  # the ends of the names of torch.distributed.checkpoint's files

_Allocate = Callable[[Tensor], Tensor]
_cpu: _Allocate = partial(torch.empty_like, device="cpu")


class StoredCheckpoint:
    """A checkpoint in a folder, whose tensors have not been read.

    Args:
        request: what is being done, for errors.
        path: the folder.
        index: what its index says, as JSON.

    Attributes:
        content: its entries, with a meta tensor for each tensor; one for those that are the same.
        metadata: what fabric itself keeps, but what belongs to single ranks.
        per_rank: the files of what belongs to single ranks, by rank.

    Raises:
        CheckpointError: as for :meth:`ShardedCheckpoint.load`.
    """

    def __init__(self, request: str, path: Location, index: bytes) -> None:
        self._request, self._path = request, path
        self._files: dict[str, Tensor] = {}
        with read_errors(request):
            self._index = json.loads(index)
            self._chunks: defaultdict[str, list[Any]] = defaultdict(list)
            for file, (_, chunks) in self._index["files"].items():
                for name, chunk in chunks.items():
                    self._chunks[name].append((file, *chunk))
            self._tensors = {
                name: torch.empty(shape, dtype=unflatten_state({"$dtype": dtype}), device="meta")
                for name, (dtype, shape) in self._index["tensors"].items()
            }
            self._entries = {unflatten_state(name): value for name, value in self._index["state"]}
            self.content = {
                name: unflatten_state(value, lambda name, _: self._tensors[name])
                for name, value in self._entries.items()
            }
            self.metadata: dict[str, Any] = {**unflatten_state(self._index["metadata"])}
            self.per_rank = sorted(name for name in self._index["files"] if name.endswith(".json"))

    def read_values(self, rank: int) -> dict[str, Any]:
        """What belongs to one rank.

        Raises:
            CheckpointError: it is damaged.
        """
        with read_errors(self._request):
            return unflatten_state(json.loads(bytes(tensor_bytes(self._open(self.per_rank[rank])))))

    def load(self, names: Iterable[str], allocate: _Allocate = _cpu) -> dict[str, Any]:
        """These entries in full, with what fabric itself keeps, of which that of single ranks is in lists.

        Raises:
            CheckpointError: it is damaged.
        """
        content, fill = self.prepare(dict.fromkeys(names), allocate)
        values = [self.read_values(rank) for rank in range(len(self.per_rank))]
        metadata = self.metadata | {name: [each[name] for each in values] for name in (values[0] if values else ())}
        fill()
        return content | ({METADATA_KEY: metadata} if metadata else {})

    def prepare(self, into: Mapping[str, Any], allocate: _Allocate = _cpu) -> tuple[dict[str, Any], Callable[[], None]]:
        """Find a tensor for each one of the entries that ``into`` names, and check all files that hold these.

        Args:
            into: for each entry to load, something of the structure that was saved. Its tensors, full or sharded, of
                the same shapes, are going to be overwritten; where it has anything else, there will be new ones, but
                none for names that its dicts lack.
            allocate: makes a new tensor like one on the meta device.

        Returns:
            The entries with the tensors, and what fills these. Not a collective, sharded tensors included.

        Raises:
            CheckpointError: it is damaged; or a tensor of ``into`` has no memory yet. Nothing has been changed.
        """
        found: dict[tuple[str, int], Tensor] = {}
        new: dict[str, Tensor] = {}

        def take(name: str, present: Any) -> Tensor:
            stored = self._tensors[name]
            if not isinstance(present, Tensor) or present.shape != stored.shape or present.is_meta:
                if hasattr(present, "full_tensor"):
                    problem = f"the parameter for {name} is a sharded meta tensor"
                    raise CheckpointError(self._request, problem, "memory", "module.to_empty(device=...) first")
                present = new[name] = new[name] if name in new else allocate(stored)
            return found.setdefault((name, id(present)), present)

        with read_errors(self._request):
            content = {name: unflatten_state(self._entries[name], take, value) for name, value in into.items()}
            copies = [copy for (name, _), tensor in found.items() for copy in self._copies(name, tensor)]

        def fill() -> None:
            with torch.no_grad(), read_errors(self._request):
                for target, stored in copies:
                    target.copy_(stored)

        return content, fill

    def _copies(self, name: str, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What is to be copied into the chunks of a tensor that this rank holds."""
        dtype, missing = self._tensors[name].dtype, 0
        for own_offsets, chunk in local_chunks(tensor):
            missing += chunk.numel()
            for file, offsets, sizes, start in self._chunks[name]:
                dims = zip(own_offsets, chunk.shape, offsets, sizes, strict=True)
                spans = [(max(own, other), min(own + n, other + m)) for own, n, other, m in dims]
                if all(low < high for low, high in spans):
                    stored = self._open(file)[start : start + prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
                    source = _box(stored, offsets, spans)
                    missing -= source.numel()
                    yield _box(chunk, own_offsets, spans), source
        if missing:
            raise ValueError(f"parts are missing of {name}")

    def _open(self, name: str) -> Tensor:
        """The bytes of a data file, mapped into memory, once its checksum has been compared."""
        if name not in self._files:
            if not DATA_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a file of a save")
            path = self._path / f"{name}.tmp"
            path = path if path.exists() else self._path / name
            if not path.is_file():
                raise ValueError(f"there is no {name}")
            with local_copy(path) as local:
                content = torch.from_file(str(local), shared=False, size=local.stat().st_size, dtype=torch.uint8)
            if zlib.crc32(tensor_bytes(content)) != self._index["files"][name][0]:
                raise ValueError(f"the checksum of {name} does not match")
            self._files[name] = content
        return self._files[name]


def _box(chunk: Tensor, offsets: list[int], spans: list[tuple[int, int]]) -> Tensor:
    """The part of a chunk, which begins at ``offsets`` of a tensor, between the beginning and the end in each dim."""
    return chunk[tuple(slice(low - at, high - at) for at, (low, high) in zip(offsets, spans, strict=True))]


def read_index(request: str, path: Location) -> tuple[str, bytes]:
    """Which save the folder ``path`` holds, and what else its index says, as JSON.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``, or a folder in which no save was ever committed.
        CheckpointError: ``path`` is a file, the index is damaged or not of fabric, or another version wrote it.
    """
    if not (path / INDEX).is_file():
        raise _absent(request, path)
    with read_errors(request):
        header, _, body = (path / INDEX).read_bytes().partition(b",\n")
        if not header.startswith(f'{{"format": "{FORMAT}"'.encode()):
            problem = f"its {INDEX} is not one that fabric wrote, or is damaged"
            raise DamagedCheckpointError(request, problem, "a folder of its own for each checkpoint")
        fields = json.loads(header + b"}")
        check_version(request, fields["version"])
        if fields["crc32"] != zlib.crc32(fields["save"].encode() + body):
            raise ValueError(f"the checksum of its {INDEX} does not match")
        return fields["save"], b"{" + body


def _absent(request: str, path: Location) -> CheckpointError:
    if not path.exists():
        return not_found(request, path, "folder")
    problem, suggestion = f"it is a folder without an {INDEX}: no save into it has ended", "a save that has ended"
    if path.is_file():
        problem, suggestion = "it is a file", f"fabric.load({str(path)!r}, state)"
    elif isinstance(path, Path) and (found := sorted(path.glob(".metadata")) + sorted(path.glob("*/.metadata"))):
        problem = "torch.distributed.checkpoint wrote it, without fabric"
        tool = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        suggestion = " && ".join(f"{tool} {one.parent} {one.parent}.pt" for one in found)
        # Lightning and Accelerate write what is no tensor into files beside the shards.
        if others := sorted(str(one) for one in path.iterdir() if one.is_file() and not one.name.endswith(_OF_TORCH)):
            suggestion += f"; what else was saved is in {listed(others)}"
        suggestion += "; all of that runs code that the folder may name, so only if you trust it"
    return CheckpointNotFoundError(request, problem, f"a folder with an {INDEX}, as fabric.save writes it", suggestion)
