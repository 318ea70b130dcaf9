"""A checkpoint in a folder, which all ranks write at once and any number of ranks can read.

[Note: files of a sharded checkpoint]
Each rank writes its shards to a *safetensors* file, with the metadata of torch's own format in its header, so that
``torch.distributed.checkpoint.HuggingFaceStorageReader`` and the safetensors library read it as well; a second shard of
the same tensor, for which such a file has no place, goes to a second file. A dtype that safetensors cannot name is
written as bytes, one more dimension. What is no tensor is in the index, which is JSON, and what belongs to one rank
alone, such as the states of its random generators, in a JSON file of that rank. Nothing in the folder can name code.

[Note: checksums] The index has a CRC32 over all bytes of each file, summed while they are written, and its own. A file
that is needed is mapped into memory and compared as a whole before anything is copied out of it.
"""

import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fabric.checkpoint import atomic
from fabric.checkpoint.atomic import raise_on_any_rank_error
from fabric.checkpoint.base import listed
from fabric.checkpoint.state import METADATA_KEY, encode, flatten_state, fqn, tensor_bytes
from fabric.checkpoint.stored import StoredCheckpoint, nothing, open_stored
from fabric.communicators import Communicator
from fabric.communicators.local import LocalCommunicator
from fabric.errors import CheckpointError

__all__ = ["ALIGNMENT", "ShardWriter", "ShardedCheckpoint", "safetensors_header"]

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes; enough for every dtype and for the processor's widest loads."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ShardedCheckpoint:
    """A format of one folder per checkpoint, in which each rank writes the shards that it holds.

    See ``[Note: files of a sharded checkpoint]``. The folder is replaced as a whole: a crash at any moment leaves the
    old content or the new one, see ``[Note: commit of a folder]``. Any number of ranks can read it, each only what it
    needs, into tensors sharded in any way or into full ones. With one process this is a
    :class:`fabric.checkpoint.CheckpointIO` like any other.
    """

    saves_shards = True

    def save(
        self,
        state: Mapping[str, Any],
        path: Path,
        communicator: Communicator | None = None,
        per_rank: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``state`` to the folder ``path`` and return when it is on the disk.

        Collective: every rank of ``communicator`` must call it. Sharded tensors (DTensors) are written shard by shard;
        of full tensors, and of everything else, rank 0's values count. Tensors that are the same memory are written
        once. Parameters are loaded as plain tensors.

        Args:
            state: what :func:`fabric.checkpoint.state.collect` gives, or such a state with sharded tensors in it; of
                the same structure on every rank.
            path: the folder, on a file system that all ranks share. Missing folders on the way to it are created.
            communicator: the ranks; None for this process alone.
            per_rank: plain values that are kept for each rank; a load has them as lists in fabric's metadata.

        Raises:
            CheckpointError: ``path`` is a file or cannot be written, or ranks disagree; on every rank, when it fails on
                one. What was at ``path`` is untouched.
            ArgumentTypeError: something in ``state`` is not plain, or is of a class that only code can rebuild.
        """
        request = f"save a sharded checkpoint to {str(path)!r}"
        communicator = communicator or LocalCommunicator(torch.device("cpu"))
        is_first = communicator.rank == 0

        def agreed(action: Callable[[], T]) -> T:
            def writing() -> T:
                with atomic.write_errors(request):
                    return action()

            return raise_on_any_rank_error(communicator, request, writing)

        entries = {name: content for name, content in state.items() if name != METADATA_KEY}
        tree, own_names, tensors = agreed(lambda: flatten_state(entries))
        with ExitStack() as stack:
            target: Any = agreed(lambda: stack.enter_context(atomic.replace_folder(path)) if is_first else None)
            folder, names = communicator.broadcast_object((target[0], own_names) if target else None, 0)
            writer = ShardWriter(folder, communicator.rank)
            planner = dcp.DefaultSavePlanner(
                flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
            )

            def plan() -> SavePlan:
                if names.keys() != tensors.keys():
                    here, there = (
                        listed(sorted(map(fqn, places))) for places in (tensors.keys() - names, names.keys() - tensors)
                    )
                    raise CheckpointError(
                        request,
                        f"tensors only on rank {communicator.rank}: {here}; only on rank 0: {there}",
                        "a state of the same structure on every rank, also with what only one rank needs",
                    )
                by_name = {name: tensors[place] for place, name in names.items()}
                planner.set_up_planner(by_name, is_coordinator=is_first)
                return writer.prepare_local_plan(planner.create_local_plan())

            plans = atomic.gather_on_first(communicator, agreed(plan))
            plans, layout = agreed(lambda: planner.create_global_plan(plans) if is_first else ([], None))
            own = atomic.scatter_from_first(communicator, writer.prepare_global_plan(plans))

            def write() -> Any:
                written = writer.write_data(planner.finish_plan(own), planner).wait()
                return written, writer.write_values(per_rank) if per_rank else None

            written = atomic.gather_on_first(communicator, agreed(write))

            def commit() -> None:
                if layout is not None:
                    writer.finish(layout, [results for results, _ in written])
                    values = {"per_rank": [values for _, values in written if values]}
                    metadata = {"metadata": encode(state.get(METADATA_KEY, {})), "state": tree}
                    atomic.write_index(target[1], folder, {**writer.index, **values, **metadata})
                stack.close()

            agreed(commit)

    def load(self, path: Path) -> dict[str, Any]:
        """Read what :meth:`save` wrote, in full, with every tensor on the CPU. Never runs code that the folder holds.

        Raises:
            CheckpointNotFoundError: there is no such folder, or no save into it was ever finished.
            CheckpointError: ``path`` is a file, or it is damaged.
        """
        stored = self.open(path)
        content, targets = stored.prepare(dict.fromkeys(stored.content))
        metadata = stored.metadata | stored.read_values()
        stored.read(targets)
        return {**content, **({METADATA_KEY: metadata} if metadata else {})}

    def open(self, path: Path, communicator: Communicator | None = None) -> StoredCheckpoint:
        """What the folder ``path`` holds, without its tensors. Collective with a communicator.

        Raises:
            CheckpointError: as for :meth:`load`, but for tensors, which nobody has looked at; or ranks found the data
                of different saves.
        """
        request = f"load the sharded checkpoint {str(path)!r}"
        communicator = communicator or LocalCommunicator(torch.device("cpu"))
        stored = raise_on_any_rank_error(communicator, request, lambda: open_stored(request, Path(path)))
        first = communicator.broadcast_object(stored.save, 0)

        def check() -> None:
            if stored.save != first:
                problem = f"rank {communicator.rank} found the data of another save than rank 0: {stored.save}, {first}"
                raise CheckpointError(request, problem, "one folder, into which nobody saves meanwhile", "it again")

        raise_on_any_rank_error(communicator, request, check)
        return stored

    def remove(self, path: Path) -> None:
        """Delete the checkpoint in the folder ``path``; other files in the folder stay.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointError: ``path`` is a file.
        """
        atomic.remove_folder(path)

    def wait(self) -> None:
        """Return at once: :meth:`save` has already waited for the disk."""


def safetensors_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], **metadata: str
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and where the bytes of each tensor go, in that order and without gaps.

    Args:
        tensors: dtypes and shapes by name.
        metadata: texts to keep in it.
    """
    header: dict[str, Any] = {}
    starts, end = {}, 0
    # The widest first, so that all of them are aligned.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        starts[name], end = end, end + prod(shape) * dtype.itemsize
        shape = [*shape] if dtype in _NAMES else [*shape, dtype.itemsize]
        header[name] = {"dtype": _NAMES.get(dtype, "U8"), "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps({"__metadata__": {"format": "pt", **metadata}, **header}).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, {name: len(text) + 8 + start for name, start in starts.items()}


class ShardWriter(dcp.StorageWriter):
    """Writes the part of one rank; see ``[Note: files of a sharded checkpoint]``.

    Attributes:
        index: what :meth:`finish` has to say of the tensors and files.
    """

    reset = set_up_storage_writer = validate_checkpoint_id = nothing

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.index: dict[str, Any] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of this rank."""
        files: dict[int, dict[str, Any]] = {}
        shards: Counter[str] = Counter()
        for item in plan.items:
            files.setdefault(shards[item.index.fqn], {})[item.index.fqn] = item
            shards[item.index.fqn] += 1
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for part in files for result in self._write_file(part, files[part], planner)])
        return future

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: each rank knows by itself where its files are."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are, too."""
        return plans

    def write_values(self, values: Mapping[str, Any]) -> tuple[str, int]:
        """Write what belongs to this rank alone; the name of the file, and its checksum."""
        name = atomic.data_name(self._folder, self._rank, "json")
        return name, self._write(name, [json.dumps(encode(dict(values)), allow_nan=False).encode()])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note where everything is."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        self.index["files"] = {file: checksum for file, _, checksum in places.values()}
        self.index["tensors"] = tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), "nothing else is planned"
            chunks = [
                [[*chunk.offsets], [*chunk.sizes], *places[MetadataIndex(name, chunk.offsets)][:2]]
                for chunk in tensor.chunks
            ]
            tensors[name] = [str(tensor.properties.dtype), [*tensor.size], chunks]

    def _write_file(self, part: int, items: dict[str, Any], planner: SavePlanner) -> Iterator[WriteResult]:
        written = {name: item.tensor_data for name, item in items.items()}
        tensors = {name: (data.properties.dtype, data.chunk.sizes) for name, data in written.items()}
        offsets = {
            name: {"saved_offsets": [*data.chunk.offsets, *[0] * (data.properties.dtype not in _NAMES)]}
            for name, data in written.items()
        }
        header, starts = safetensors_header(tensors, DCP_VERSION="1.0", DCP_SHARDING_INFO=json.dumps(offsets))
        # One after the other: of a tensor on another device, one copy at a time is here.
        contents = (_bytes_of(planner.resolve_data(items[name])) for name in starts)
        file = atomic.data_name(self._folder, self._rank, "safetensors", part)
        checksum = self._write(file, chain([header], contents))
        for name, (dtype, sizes) in tensors.items():
            yield WriteResult(items[name].index, prod(sizes) * dtype.itemsize, (file, starts[name], checksum))

    def _write(self, name: str, contents: Iterable[bytes | memoryview]) -> int:
        checksum = 0
        with open(self._folder / name, "wb") as file:
            for content in contents:
                file.write(content)
                checksum = zlib.crc32(content, checksum)
            file.flush()
            os.fsync(file.fileno())
        atomic.sync_folder(self._folder)
        return checksum


def _bytes_of(tensor: Any) -> memoryview:
    return tensor_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
