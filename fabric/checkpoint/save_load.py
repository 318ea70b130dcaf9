"""Saving and loading by all ranks of a job: what fails on one of them is an error on every one."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fabric.checkpoint.async_save import AsyncSaver, PendingSave
from fabric.checkpoint.file import CheckpointIO, FullCheckpoint, find, gather_on_first, locate, raise_on_any_rank_error
from fabric.checkpoint.restore import check_fits, destinations, restore
from fabric.checkpoint.sharded import ShardedCheckpoint, StoredCheckpoint
from fabric.checkpoint.state import (
    FORMAT_VERSION,
    METADATA_KEY,
    Access,
    Filter,
    State,
    check_entries,
    collect,
    is_stateful,
    pop_metadata,
)
from fabric.communicators import Communicator
from fabric.data import FabricDataLoader
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.metrics import load_rank_states, rank_states
from fabric.seed import rng_state, set_rng_state

__all__ = ["CheckpointCoordinator", "own_format"]

T = TypeVar("T")
# Metadata; and the other entries and those of modules, each with what fills their tensors.
_Prepared = tuple[dict[str, Any], list[tuple[dict[str, Any], Callable[[], None]]]]


@dataclass
class CheckpointCoordinator:
    """Saves and loads the checkpoints of one running job.

    Args:
        communicator: all ranks of the job.
        saver: its saves that run in the background.
        io: the format to save in. One of fabric's own also reads the other: on load, the path decides.
        access: how modules and optimizers are read and restored.
        scaler: the loss scaler of the job, or None.
        check: raises where this is no time to save.
        commit: around the writing, with the communicator that it uses.
    """

    communicator: Communicator
    saver: AsyncSaver
    io: CheckpointIO
    access: Access
    scaler: Any = None
    check: Callable[[], object] = bool
    commit: Callable[[Communicator], Any] = nullcontext

    def save(
        self, path: Any, state: State, filter: Filter | None, trainable_only: bool, async_: bool
    ) -> PendingSave | None:
        """Write ``state``, the loss scale and the random states of all ranks.

        Collective. Rank 0 writes, or every rank its shards if that is the format; ``async_``, after this has returned.
        """
        self.join_pending()
        request, io = f"fabric.save({str(path)!r}, ...)", self.io
        sharded, is_first = isinstance(io, ShardedCheckpoint), self.communicator.rank == 0
        # The state dict of a module, which others load as it is: nothing is added to one file of it.
        is_bare = not sharded and type(state) in (dict, OrderedDict) and {*map(type, state.values())} == {Tensor}
        state = {"": state} if is_bare else state

        def read() -> tuple[Any, Any, Any]:
            self.check()
            contents = self.access.read(state)
            states = rank_states(state) if _has_metrics(state) else {}
            found = [key for key, each in state.items() if isinstance(each, FabricDataLoader) and each.differs_by_rank]
            positions = {name: copy.deepcopy(contents[name]) for name in found}
            own = {name: each for name, each in (("metrics", states), ("positions", positions)) if each}
            check_entries(own)
            return locate(path), contents, own

        target, contents, own = self._agreed(request, read)
        contents = contents if sharded else self.access.full(contents)
        # The format of shards checks the content itself, once it has taken the DTensors out.
        entries = self._agreed(request, lambda: collect(state, contents, filter, trainable_only, not sharded))
        metadata: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "torch_version": str(torch.__version__),
            "world_size": self.communicator.size,
            "loss_scaler": self.scaler and self.scaler.state_dict(),
        }
        own["rng"] = rng_state()
        if not sharded:
            of_ranks = gather_on_first(self.communicator, own)
            metadata |= {name: [each[name] for each in of_ranks] for name in own}
        content: dict[str, Any] = entries[""] if is_bare else {**entries, METADATA_KEY: metadata}
        content = content if sharded or is_first else {}

        def write(content: State, communicator: Communicator) -> None:
            with self.commit(communicator):
                if isinstance(io, ShardedCheckpoint):
                    io.save(content, target, communicator, own)
                else:
                    raise_on_any_rank_error(communicator, request, lambda: is_first and io.save(content, target))

        if not async_:
            return write(content, self.communicator)
        group = self.saver.group()
        staged = self._agreed(request, lambda: self.saver.buffers.copy(content))
        pending = self.saver.pending = PendingSave(target, lambda: write(staged, group))
        return pending

    def load(
        self, path: Any, state: MutableMapping[str, Any] | None, strict: bool, rng: bool, trusts: bool, is_raw: bool
    ) -> dict[str, Any]:
        """Restore ``state``, the loss scale and this rank's random state. Collective; every rank reads.

        With ``is_raw`` the one object in ``state`` is restored from a file that is its bare state dict; with ``trusts``
        reading the file may run code.

        Returns:
            The entries that ``state`` did not name; of a sharded checkpoint those without tensors.
        """
        request = f"fabric.load{'_raw' if is_raw else ''}({str(path)!r}, ...)"
        self.join_pending()
        io = self.io
        source, is_folder = self._agreed(request, lambda: find(request, path, isinstance(io, ShardedCheckpoint)))
        if isinstance(io, FullCheckpoint | ShardedCheckpoint):
            # As rank 0 sees it. A folder is no bare state dict, as the format of one file says.
            io = own_format(self.communicator.broadcast_object(is_folder and not is_raw, 0))
        if trusts and not isinstance(io, FullCheckpoint):
            problem = f"weights_only=False has no meaning for {type(io).__name__}: what it writes never holds code"
            raise ConfigurationError(request, problem, "one file, as torch.save writes it, whose writer you trust")
        stored = io.open(source, self.communicator) if isinstance(io, ShardedCheckpoint) else None
        targets = {} if state is None else state

        def prepare() -> _Prepared:
            if stored is not None:
                return self._prepare_shards(stored, state, strict)
            loaded = FullCheckpoint().load(source, weights_only=False) if trusts else io.load(source)
            if is_raw:
                if METADATA_KEY in loaded:
                    problem = "the file is a checkpoint with entries, no state dict itself"
                    raise CheckpointError(request, problem, suggestion="fabric.load(path, {'model': model})")
                if not all(map(is_stateful, targets.values())):
                    raise ArgumentTypeError(request, "the object has no state_dict() and load_state_dict()")
                loaded = dict.fromkeys(targets, loaded)
            metadata = pop_metadata(loaded)
            check_fits(loaded, targets, self.access.module_state, strict)
            modules = {name: loaded.pop(name) for name in [*loaded] if isinstance(targets.get(name), nn.Module)}
            return metadata, [(loaded, lambda: None), (modules, lambda: None)]

        metadata, parts = self._agreed(request, prepare)
        sizes = metadata.get("world_size", 0), self.communicator.size

        def read(content: dict[str, Any], fill: Callable[[], None]) -> dict[str, Any]:
            modules = {name: value for name, value in targets.items() if name in content}
            if "metrics" in metadata:
                undo.callback(load_rank_states, modules, [rank_states(modules)], (1, 1), True)
            self.access.back_up(targets, content, undo)
            fill()
            if "positions" in metadata and sizes[0] == sizes[1]:
                own = metadata["positions"][self.communicator.rank]
                content |= {name: own[name] for name in own.keys() & content.keys()}
            others = restore(content, targets, self.access, strict)
            if "metrics" in metadata:
                states = [metadata["metrics"][rank] for rank in self._ranks_of(metadata)]
                load_rank_states(modules, states, sizes, strict)
            return others

        # What fails on any rank from here on, such as an object that refuses its state, is undone on all of them.
        with ExitStack() as undo:
            others, _ = (self._agreed(request, partial(read, *part)) for part in parts)
            if state is not None and self.scaler and metadata.get("loss_scaler"):
                undo.callback(self.scaler.load_state_dict, self.scaler.state_dict())
                self.scaler.load_state_dict(metadata["loss_scaler"])
            # On another number of ranks too: the order of the next epoch is drawn from the streams of rank 0.
            if state is not None and rng and self.communicator.rank < sizes[0] and metadata.get("rng"):
                set_rng_state(metadata["rng"][self.communicator.rank])
            undo.pop_all()
        return others

    def state_dict(self, module: Any) -> dict[str, Any]:
        """``Fabric.get_state_dict``. Collective."""
        state = self._agreed("fabric.get_state_dict(...)", lambda: self.access.module_state(module))
        return self.access.full_copy(state, self.communicator.rank == 0)

    def _agreed(self, request: str, action: Callable[[], T]) -> T:
        return raise_on_any_rank_error(self.communicator, request, action)

    def join_pending(self) -> None:
        """Return when no save is running in the background. Collective; raises what went wrong in one."""
        if (pending := self.saver.pending) is not None:
            self._agreed(f"fabric.save({str(pending.path)!r}, ..., async_=True)", self.saver.join)

    def _ranks_of(self, metadata: Mapping[str, Any]) -> range:
        """The ranks whose own state this one looks at: the same number, or of another number of ranks a part of all."""
        saved = metadata["world_size"]
        return range(self.communicator.rank % saved, saved, self.communicator.size)

    def _prepare_shards(self, stored: StoredCheckpoint, state: State | None, strict: bool) -> _Prepared:
        """Compare a folder of shards with ``state``, and find memory for what is read of it; nothing is changed."""
        modules, others = {}, dict.fromkeys(stored.content)
        metadata = pop_metadata({METADATA_KEY: stored.metadata})
        if stored.per_rank and (metadata["world_size"] == self.communicator.size or _has_metrics(state or {})):
            own = {rank: stored.read_values(rank) for rank in self._ranks_of(metadata)}
            metadata |= {name: {rank: own[rank][name] for rank in own} for name in own[min(own)]}
        elif stored.per_rank and (rank := self.communicator.rank) < metadata["world_size"]:
            metadata["rng"] = {rank: stored.read_values(rank)["rng"]}
        if state is not None:
            check_fits(stored.content, state, self.access.module_state, strict)
            modules, others = destinations(stored.content, state, self.access.module_state)
        return metadata, [stored.prepare(others), stored.prepare(modules)]


def own_format(sharded: bool) -> CheckpointIO:
    """The format of a folder of shards, or that of one file."""
    return ShardedCheckpoint() if sharded else FullCheckpoint()


def _has_metrics(state: State) -> bool:
    """Whether there may be metrics of torchmetrics, with states of their own on each rank."""
    modules = (value for value in state.values() if isinstance(value, nn.Module))
    return any("dist_sync_fn" in vars(each) for value in modules for _, each in nn.Module.named_modules(value))
