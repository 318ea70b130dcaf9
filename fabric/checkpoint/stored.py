"""A sharded checkpoint as it is on the disk: which tensors it holds, and the bytes of these."""

import copy
import json
import mmap
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fabric.checkpoint.atomic import find_data, read_index
from fabric.checkpoint.base import DAMAGE, damaged
from fabric.checkpoint.state import tensor_bytes, unflatten_state
from fabric.errors import CheckpointError

__all__ = ["ShardReader", "StoredCheckpoint", "nothing", "open_stored"]


def open_stored(request: str, path: Path) -> "StoredCheckpoint":
    """What the folder ``path`` holds, without its tensors.

    Raises:
        CheckpointError: as for :meth:`fabric.checkpoint.ShardedCheckpoint.load`.
    """
    save, index = read_index(request, path)
    try:
        reader = ShardReader(request, path, index)
        described: Any = reader.metadata.state_dict_metadata
        tensors = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            for name, tensor in described.items()
        }
        content = {**unflatten_state(index["state"], tensors.__getitem__)}
        metadata = {**unflatten_state(index["metadata"])}
        names = {id(tensor): name for name, tensor in tensors.items()}
        return StoredCheckpoint(request, save, content, metadata, index["per_rank"], names, reader)
    except DAMAGE as error:
        raise damaged(request, f"its index cannot be understood ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose tensors have not been read.

    Attributes:
        request: what is being done, for errors.
        save: the save that the folder holds.
        content: its entries, with a meta tensor for each tensor; one for those that are the same.
        metadata: what fabric itself keeps, but what belongs to single ranks.
        per_rank: the files of what belongs to single ranks, by rank, with their checksums.
        names: of the tensors, by the identity of the meta tensor.
        reader: reads them.
    """

    request: str
    save: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    per_rank: list[tuple[str, int]]
    names: dict[int, str]
    reader: "ShardReader"

    def read_values(self, rank: int | None = None) -> dict[str, list[Any]]:
        """What belongs to one rank or, without a number, to each, as lists by name.

        Raises:
            CheckpointError: it is damaged.
        """
        values: dict[str, list[Any]] = {}
        for name, checksum in self.per_rank if rank is None else self.per_rank[rank : rank + 1]:
            content = json.loads(bytes(tensor_bytes(self.reader.open(name, checksum))))
            for key, value in unflatten_state(content).items():
                values.setdefault(key, []).append(value)
        return values

    def prepare(self, into: Mapping[str, Any]) -> tuple[dict[str, Any], "list[_Target]"]:
        """Find a tensor for each one of the entries that ``into`` names, and check all files that hold these.

        Args:
            into: for each entry to load, something of the structure that was saved. Its tensors, full or sharded, of
                the same shapes, are going to be overwritten; where it has anything else, there will be new ones, but
                none for names that its dicts lack.

        Returns:
            The entries with the tensors, and what is to be read into these.

        Raises:
            CheckpointError: it is damaged; or a tensor of ``into`` has no memory yet. Nothing has been changed.
        """
        found: dict[tuple[str, int], Tensor] = {}
        new: dict[str, Tensor] = {}
        content = {name: self._fit(self.content[name], value, found, new) for name, value in into.items()}
        return content, [self.reader.prepare(name, tensor) for (name, _), tensor in found.items()]

    def read(self, targets: "list[_Target]", progress: Callable[[int], None] = lambda copied: None) -> None:
        """Fill the tensors that :meth:`prepare` has found. Not a collective, sharded tensors included.

        ``progress`` is called after each tensor with the number of bytes of it that this process has read.
        """
        with torch.no_grad():
            for target in targets:
                try:
                    self.reader.read_data(target.plan, target.planner).wait()
                except DAMAGE as error:
                    raise damaged(self.request, f"{target.name!r}: {type(error).__name__}: {error}") from error
                progress(target.nbytes)

    def _fit(self, stored: Any, present: Any, found: dict[tuple[str, int], Tensor], new: dict[str, Tensor]) -> Any:
        if isinstance(stored, Tensor) and stored.is_meta:
            name = self.names[id(stored)]
            if not isinstance(present, Tensor) or present.shape != stored.shape or present.is_meta:
                if hasattr(present, "full_tensor"):
                    problem = f"the parameter for {name} is a sharded meta tensor"
                    raise CheckpointError(self.request, problem, "memory", "module.to_empty(device=...) first")
                present = new.setdefault(name, torch.empty_like(stored, device="cpu"))
            return found.setdefault((name, id(present)), present)
        if isinstance(stored, dict):
            built = copy.copy(stored)  # keeps the type, and what torch attaches to a module's state
            for key, item in stored.items():
                if isinstance(item, Tensor) and isinstance(present, Mapping) and key not in present:
                    del built[key]  # nobody asks for it
                else:
                    inside = present.get(key) if isinstance(present, Mapping) else None
                    built[key] = self._fit(item, inside, found, new)
            return built
        if type(stored) in (list, tuple):
            items = present[: len(stored)] if isinstance(present, list | tuple) else ()
            return type(stored)(self._fit(*pair, found, new) for pair in zip_longest(stored, items))
        return stored


def _unchanged(*args: Any, **kwargs: Any) -> Any:
    """The plan, or plans: each rank knows by itself where its files are."""
    return args[-1]


def nothing(*args: Any, **kwargs: Any) -> Any:
    """An instance is for one save, in a place that is known."""


class _Target(NamedTuple):
    """A tensor that is going to be overwritten, and what has to be read for it."""

    name: str
    nbytes: int
    plan: LoadPlan
    planner: LoadPlanner


class ShardReader(dcp.StorageReader):
    """Reads from the files of one save, once they are compared with their checksums.

    Attributes:
        metadata: of the tensors, with their places.
    """

    prepare_local_plan = prepare_global_plan = _unchanged
    reset = set_up_storage_reader = validate_checkpoint_id = nothing

    def __init__(self, request: str, path: Path, index: Mapping[str, Any]) -> None:
        self._request, self._path, self._index = request, path, index
        self._files: dict[str, Tensor] = {}
        self.metadata = self.read_metadata()

    def open(self, name: str, checksum: int) -> Tensor:
        """The bytes of a file, mapped into memory.

        Raises:
            CheckpointError: it is missing, or is not what was written.
        """
        if name not in self._files:
            try:
                with open(find_data(self._path, name), "rb") as file:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise damaged(self._request, f"{name} cannot be read ({error})") from error
            if zlib.crc32(content) != checksum:
                raise damaged(self._request, f"the checksum of {name} does not match")
            self._files[name] = torch.frombuffer(content, dtype=torch.uint8)
        return self._files[name]

    def prepare(self, name: str, tensor: Tensor) -> _Target:
        """Find what to read for one tensor, full or sharded, and check the files that hold it.

        Raises:
            CheckpointError: parts of it are missing, or damaged.
        """
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner({name: tensor}, self.metadata)
            plan = planner.create_local_plan()
            for item in plan.items:
                file = self.metadata.storage_data[item.storage_index][0]
                self.open(file, self._index["files"][file])
        except CheckpointError:
            raise
        except DAMAGE as error:
            raise damaged(self._request, f"{name!r}: {type(error).__name__}: {error}") from error
        chunks: Any = getattr(tensor, "__create_chunk_list__", None)
        count = sum(prod(chunk.sizes) for chunk in chunks()) if chunks else tensor.numel()
        # DCP would leave what no chunk covers with whatever was in memory.
        if sum(prod(item.lengths) for item in plan.items) != count:
            raise damaged(self._request, f"parts are missing of {name}")
        return _Target(name, count * tensor.dtype.itemsize, plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the index says of the tensors."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        for name, (dtype_name, shape, chunks) in self._index["tensors"].items():
            dtype = unflatten_state({"$dtype": dtype_name})
            boxes = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in chunks]
            tensors[name] = TensorStorageMetadata(dcp.metadata.TensorProperties(dtype), torch.Size(shape), boxes)
            for offsets, sizes, file, start in chunks:
                places[MetadataIndex(name, offsets)] = file, start, sizes, dtype
        return Metadata(tensors, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what a plan asks for from files that have been checked."""
        for item in plan.items:
            file, start, sizes, dtype = self.metadata.storage_data[item.storage_index]
            stored = self._files[file][start : start + prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
