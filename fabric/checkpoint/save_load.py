"""Saving and loading by all ranks of a job: what fails on one of them is an error on every one."""

import copy
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.async_save import AsyncSaver, PendingSave
from fabric.checkpoint.atomic import gather_on_first, raise_on_any_rank_error
from fabric.checkpoint.base import CheckpointIO
from fabric.checkpoint.file import FullCheckpoint
from fabric.checkpoint.state import METADATA_KEY, Access, Filter, collect, is_stateful, read_metadata, with_metadata
from fabric.checkpoint.validate import check_fits, check_fits_raw
from fabric.communicators import Communicator
from fabric.errors import ConfigurationError
from fabric.seed import rng_state, set_rng_state
from fabric.tree import map_tensors

if TYPE_CHECKING:
    from fabric.checkpoint.sharded import ShardedCheckpoint

__all__ = ["CheckpointCoordinator", "own_format", "restore", "restore_one"]

T = TypeVar("T")


class CheckpointCoordinator:
    """Saves and loads the checkpoints of one running job.

    Args:
        communicator: all ranks of the job.
        saver: its saves that run in the background.
        io: the format to save in. One of fabric's own also reads the other: on load, the path decides.
        full: how full states are read and restored; may be collective.
        shards: likewise for states of which this rank holds a part, maybe as DTensors; no collective. Of a module these
            are its own tensors, so that it is loaded by writing into them.
        scaler: the loss scaler of the job, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        saver: AsyncSaver,
        io: CheckpointIO,
        full: Access,
        shards: Access,
        scaler: Any = None,
    ) -> None:
        self._communicator, self._saver, self._io, self._scaler = communicator, saver, io, scaler
        self._full, self._shards = full, shards

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        filter: Filter | None,
        trainable_only: bool = False,
        async_: bool = False,
    ) -> PendingSave | None:
        """Write ``state``, the loss scale and the random states of all ranks.

        Collective. Rank 0 writes, or every rank its shards if that is the format; ``async_``, after this has returned.
        """
        self._join_pending()
        request, io, sharded = f"fabric.save({str(path)!r}, ...)", self._io, _saves_shards(self._io)
        is_first = self._communicator.rank == 0
        access = self._shards if sharded else self._full
        # The format of shards checks the content itself, once it has taken the DTensors out.
        options = {"trainable_only": trainable_only, "checks_content": not sharded}
        entries = self._agreed(request, lambda: collect(state, access, filter=filter, **options))
        metadata: dict[str, Any] = {
            "world_size": self._communicator.size,
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
        }
        own = {"rng": rng_state()}
        if not sharded:
            metadata["rng"] = gather_on_first(self._communicator, own["rng"])
        content = with_metadata(entries, metadata) if sharded or is_first else {}

        def write(content: Mapping[str, Any], communicator: Communicator) -> None:
            if sharded:
                shards: Any = io
                shards.save(content, path, communicator, own)
            else:
                raise_on_any_rank_error(communicator, request, lambda: io.save(content, path) if is_first else None)

        if async_:
            path = Path(os.path.abspath(path))  # the process may go to another folder meanwhile
            return self._saver.begin(self._communicator, request, path, content, write)
        write(content, self._communicator)
        return None

    def load(
        self, path: Path, state: MutableMapping[str, Any] | None, strict: bool, rng: bool, weights_only: bool = True
    ) -> dict[str, Any]:
        """Restore ``state``, the loss scale and this rank's random state. Collective; every rank reads.

        Returns:
            The entries that ``state`` did not name; of a sharded checkpoint those without tensors.
        """
        request = f"fabric.load({str(path)!r}, ...)"
        io: Any = self._format_of(request, path, weights_only)
        if _saves_shards(io):
            metadata, rest = self._load_shards(request, io, path, state, strict)
        else:

            def read() -> dict[str, Any]:
                loaded = _read(io, path, weights_only)
                if state is not None:
                    check_fits(loaded, state, self._shards.module_state, strict)
                return loaded

            loaded = self._agreed(request, read)
            metadata = read_metadata(loaded)
            rest = self._agreed(request, lambda: restore(loaded, state, self._full, strict, is_mapped=True))
        if state is not None:
            self._restore_process(metadata, rng)
        return rest

    def load_raw(self, path: Path, target: Any, strict: bool, weights_only: bool = True) -> None:
        """Restore one object from a file that is its bare state dict. Collective; every rank reads."""
        request = f"fabric.load_raw({str(path)!r}, ...)"
        io = self._format_of(request, path, weights_only)
        # A folder is none, as the other format says.
        io = FullCheckpoint() if _saves_shards(io) else io

        def read() -> dict[str, Any]:
            loaded = _read(io, path, weights_only)
            check_fits_raw(loaded, target, self._shards.module_state, strict)
            return loaded

        loaded = self._agreed(request, read)
        self._agreed(request, lambda: restore_one(target, loaded, self._full, strict, is_mapped=True))

    def _agreed(self, request: str, action: Callable[[], T]) -> T:
        return raise_on_any_rank_error(self._communicator, request, action)

    def _join_pending(self) -> None:
        if self._saver.pending is not None:
            self._saver.join(self._communicator)

    def _format_of(self, request: str, path: Path, weights_only: bool) -> CheckpointIO:
        """The format to read ``path`` in, once no save is running. Collective: rank 0 sees what is there."""
        self._join_pending()
        io = self._io
        if isinstance(io, FullCheckpoint) or _saves_shards(io):
            is_folder = os.path.isdir(path) if os.path.exists(path) else _saves_shards(io)
            io = own_format(self._communicator.broadcast_object(is_folder, 0))
        if not weights_only and not isinstance(io, FullCheckpoint):
            problem = f"weights_only=False has no meaning for {type(io).__name__}: what it writes never holds code"
            raise ConfigurationError(request, problem, "one file, as torch.save writes it, whose writer you trust")
        return io

    def _load_shards(
        self, request: str, io: "ShardedCheckpoint", path: Path, state: MutableMapping[str, Any] | None, strict: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        stored = io.open(path, self._communicator)
        rank, size = self._communicator.rank, self._communicator.size

        def prepare() -> Any:
            metadata = read_metadata({METADATA_KEY: stored.metadata} if stored.metadata else {})
            if metadata.get("world_size") == size and stored.per_rank:
                metadata["rng"] = {rank: stored.read_values(rank)["rng"][0]}
            if state is None:
                return metadata, stored.prepare(dict.fromkeys(stored.content)), ({}, [])
            check_fits(stored.content, state, self._shards.module_state, strict)
            modules: dict[str, Any] = {}
            rest = {name for name, content in stored.content.items() if not _holds_tensors(content)} - state.keys()
            others: dict[str, Any] = dict.fromkeys(rest)
            for name, value in ((name, value) for name, value in state.items() if name in stored.content):
                if isinstance(value, nn.Module):
                    own = self._shards.module_state(value).items()
                    modules[name] = {key: None if is_lazy(item) else item for key, item in own}
                else:
                    others[name] = _targets(value, stored.content[name])
            return metadata, stored.prepare(others), stored.prepare(modules)

        metadata, (others, other_tensors), (modules, module_tensors) = self._agreed(request, prepare)
        # When the first module is restored: an object that refused its state before has left the modules alone.
        fill = cache(lambda: stored.read(module_tensors))

        def load_module(module: nn.Module, content: dict[str, Any], strict: bool) -> None:
            fill()
            self._shards.load_module(module, content, strict)

        def read() -> dict[str, Any]:
            stored.read(other_tensors)
            access = replace(self._shards, load_module=load_module)
            return restore({**others, **modules}, state, access, strict, is_mapped=False)

        return metadata, self._agreed(request, read)

    def _restore_process(self, metadata: Mapping[str, Any], rng: bool) -> None:
        if self._scaler is not None and metadata.get("loss_scaler") is not None:
            self._scaler.load_state_dict(metadata["loss_scaler"])
        states = metadata.get("rng", [])
        # The streams of another number of ranks belong to none of these.
        if rng and metadata.get("world_size") == self._communicator.size and states:
            set_rng_state(states[self._communicator.rank])


def restore(
    loaded: Mapping[str, Any], state: MutableMapping[str, Any] | None, access: Access, strict: bool, is_mapped: bool
) -> dict[str, Any]:
    """Restore the objects in ``state`` from ``loaded``, in place, and return the entries that ``state`` did not name.

    Plain values in ``state`` are replaced by the loaded ones; what was restored shares no memory with ``loaded``.

    Args:
        loaded: the content of a checkpoint that fits, see :func:`fabric.checkpoint.validate.check_fits`.
        state: names and objects to restore, or ``None`` to get everything back as it was loaded.
        access: how modules and optimizers are restored.
        strict: whether a parameter or a buffer that one side lacks is an error.
        is_mapped: whether tensors of ``loaded`` may be mapped from a file, and have to be copied to be kept.
    """
    entries = {name: content for name, content in loaded.items() if name != METADATA_KEY}
    if state is None:
        return entries
    wanted = {name: value for name, value in state.items() if name in entries}
    for name in sorted(wanted, key=lambda name: _order(wanted[name])):
        if is_stateful(wanted[name]):
            restore_one(wanted[name], entries[name], access, strict, is_mapped)
        else:
            state[name] = copy.deepcopy(entries[name])
    return {name: content for name, content in entries.items() if name not in state}


def own_format(sharded: bool) -> CheckpointIO:
    """The format of a folder of shards, or that of one file."""
    if not sharded:
        return FullCheckpoint()
    from fabric.checkpoint.sharded import ShardedCheckpoint  # takes a second to import

    return ShardedCheckpoint()


def _saves_shards(io: CheckpointIO) -> bool:
    """Whether each rank writes its part: the class itself takes a second to import."""
    return getattr(io, "saves_shards", False)


def _holds_tensors(content: Any) -> bool:
    found: list[Tensor] = []
    map_tensors(found.append, content)
    return bool(found)


def _read(io: CheckpointIO, path: Path, weights_only: bool) -> dict[str, Any]:
    return io.load(path, weights_only=weights_only) if isinstance(io, FullCheckpoint) else io.load(path)


def _order(value: Any) -> int:
    """What could not be checked is restored first, so that its failure leaves the rest alone."""
    if isinstance(value, nn.Module):
        return 1
    return 2 if isinstance(value, Optimizer) or not is_stateful(value) else 0


def restore_one(target: Any, content: Any, access: Access, strict: bool, is_mapped: bool) -> None:
    """Restore one object in place; see :func:`restore`."""
    if isinstance(target, nn.Module):
        access.load_module(target, content, strict)
    elif isinstance(target, Optimizer):
        access.load_optimizer(target, content)
        if is_mapped:
            _detach_from_file(target, content)
    else:
        target.load_state_dict(copy.deepcopy(content))


def _detach_from_file(optimizer: Optimizer, content: Any) -> None:
    """Copy, one at a time, the tensors that the optimizer took over as they were, and no others.

    They may be mapped from the file, which somebody could overwrite in place. Those that it copied may be views of
    memory that it goes on to use.
    """
    borrowed: set[int] = set()
    map_tensors(lambda tensor: borrowed.update(_addresses(tensor)), content)
    for slots in optimizer.state.values():
        for name in slots:
            slots[name] = map_tensors(
                lambda tensor: tensor if borrowed.isdisjoint(_addresses(tensor)) else tensor.clone(), slots[name]
            )


def _addresses(tensor: Tensor) -> tuple[int, ...]:
    has_storage = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (tensor.untyped_storage().data_ptr(),) if has_storage and tensor.numel() else ()


def _targets(value: Any, described: Any) -> Any:
    """Where to read an entry that is no module: new tensors, sharded as an optimizer's parameters are."""
    if not isinstance(value, Optimizer):
        return described
    parameters = [parameter.detach() for group in value.param_groups for parameter in group["params"]]
    numbers = [number for group in described["param_groups"] for number in group["params"]]
    state = dict(described["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state:
            state[number] = {
                # What has another shape, such as a number of steps, is not sharded.
                name: torch.empty_like(parameter, dtype=stored.dtype)
                if isinstance(stored, Tensor) and stored.is_meta and stored.shape == parameter.shape
                else stored
                for name, stored in state[number].items()
            }
    return {**described, "state": state}
