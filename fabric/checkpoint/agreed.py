"""Saving and loading by all ranks of a job: what fails on one of them is an error on every one."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.background import BackgroundSaves, PendingSave
from fabric.checkpoint.base import CheckpointIO
from fabric.checkpoint.full import FullCheckpoint
from fabric.checkpoint.sharded import Prepared, ShardedCheckpoint
from fabric.checkpoint.state import (
    Access,
    Filter,
    apply,
    apply_raw,
    check,
    collect,
    read_metadata,
    restore,
    with_metadata,
)
from fabric.checkpoint.unison import together
from fabric.communicators import Communicator
from fabric.errors import ConfigurationError
from fabric.seed import rng_state, set_rng_state

__all__ = ["JobCheckpoint"]


class JobCheckpoint:
    """The checkpoints of one running job.

    Args:
        communicator: all ranks of the job.
        background: its saves that are under way.
        io: the format to save in. One of fabric's own also reads the other: on load, the path decides.
        whole: the way to whole states; may be collective.
        shards: the way to states of which this rank holds a part, maybe as DTensors; no collective. Of a module these
            are its own tensors, so that it is loaded by writing into them.
        scaler: the loss scaler of the job, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        background: BackgroundSaves,
        io: CheckpointIO,
        whole: Access,
        shards: Access,
        scaler: Any = None,
    ) -> None:
        self._communicator, self._background, self._io, self._scaler = communicator, background, io, scaler
        self._whole, self._shards = whole, shards

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
        self._background.settle(self._communicator)
        asked, io = f"fabric.save({str(path)!r}, ...)", self._io
        spread = isinstance(io, ShardedCheckpoint)

        def gather() -> dict[str, Any]:
            access = self._shards if spread else self._whole
            # The format of shards looks at what became of objects itself, once it has taken the DTensors out.
            return collect(state, access, filter=filter, trainable_only=trainable_only, checks_content=not spread)

        entries = together(self._communicator, asked, gather)
        metadata = {
            "world_size": self._communicator.size,
            "rng": self._communicator.gather_objects(rng_state()),
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

        def write(state: Mapping[str, Any], communicator: Communicator) -> None:
            if isinstance(io, ShardedCheckpoint):
                io.save(state, path, communicator)
            else:
                together(communicator, asked, lambda: io.save(state, path) if communicator.rank == 0 else None)

        whole = with_metadata(entries, metadata) if spread or self._communicator.rank == 0 else {}
        if async_:
            return self._background.begin(self._communicator, asked, path, whole, write)
        write(whole, self._communicator)
        return None

    def load(
        self,
        path: Path,
        state: MutableMapping[str, Any] | None,
        strict: bool,
        rng: bool,
        weights_only: bool = True,
    ) -> dict[str, Any]:
        """Restore ``state``, the loss scale and this rank's random state. Collective; every rank reads.

        Returns:
            The entries that ``state`` did not name; of a sharded checkpoint those without tensors.
        """
        asked = f"fabric.load({str(path)!r}, ...)"
        io = self._format_of(asked, path, weights_only)
        if isinstance(io, ShardedCheckpoint):
            metadata, rest = self._load_shards(asked, io, path, state, strict)
        else:

            def read() -> tuple[dict[str, Any], dict[str, Any]]:
                loaded = _read(io, path, weights_only)
                return loaded, read_metadata(loaded)

            loaded, metadata = together(self._communicator, asked, read)
            rest = together(self._communicator, asked, lambda: apply(loaded, state, self._loading(), strict))
        if state is not None:
            self._restore_process(metadata, rng)
        return rest

    def load_raw(self, path: Path, target: Any, strict: bool, weights_only: bool = True) -> None:
        """Restore one object from a file that is its bare state dict. Collective; every rank reads."""
        asked = f"fabric.load_raw({str(path)!r}, ...)"
        io = self._format_of(asked, path, weights_only)
        # A folder is none, as the other format says.
        io = FullCheckpoint() if isinstance(io, ShardedCheckpoint) else io
        loaded = together(self._communicator, asked, lambda: _read(io, path, weights_only))
        together(self._communicator, asked, lambda: apply_raw(loaded, target, self._loading(), strict))

    def _loading(self) -> Access:
        # Names and shapes are those of the shards, which takes no collective to know.
        return replace(self._whole, module_state=self._shards.module_state)

    def _format_of(self, asked: str, path: Path, weights_only: bool) -> CheckpointIO:
        """The format to read ``path`` in, when nothing is under way. Collective: rank 0 sees what is there."""
        self._background.settle(self._communicator)
        io = self._io
        if isinstance(io, FullCheckpoint | ShardedCheckpoint):
            present = ShardedCheckpoint if os.path.isdir(path) else FullCheckpoint
            io = self._communicator.broadcast_object(present if os.path.exists(path) else type(io), 0)()
        if not weights_only and not isinstance(io, FullCheckpoint):
            raise ConfigurationError(
                asked,
                f"weights_only=False has no meaning for {type(io).__name__}: what it writes never holds code",
                "weights_only=False for one file, as torch.save writes it, whose writer you trust",
                f"{asked} without weights_only",
            )
        return io

    def _load_shards(
        self, asked: str, io: ShardedCheckpoint, path: Path, state: MutableMapping[str, Any] | None, strict: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        stored = io.open(path, self._communicator)

        def prepare() -> tuple[Prepared, Prepared]:
            described = stored.describe()
            if state is None:
                return stored.prepare(), stored.prepare({})
            check(described, state, self._shards, strict)
            modules, others = {}, dict.fromkeys(described.keys() - state.keys() - stored.entries_with_tensors())
            for name, value in ((name, value) for name, value in state.items() if name in described):
                if isinstance(value, nn.Module):
                    own = self._shards.module_state(value).items()
                    modules[name] = {key: None if is_lazy(item) else item for key, item in own}
                else:
                    others[name] = _targets(value, described[name])
            # What fits was decided above, for all formats in the same words.
            return stored.prepare(others, strict=False), stored.prepare(modules, strict=False)

        others, modules = together(self._communicator, asked, prepare)
        # At the first module's turn: an object that refused its state before has left the modules alone.
        fill = cache(modules.copy)

        def load_module(module: nn.Module, content: dict[str, Any], strict: bool) -> None:
            fill()
            self._shards.load_module(module, content, strict)

        def read() -> dict[str, Any]:
            others.copy()
            access = replace(self._shards, load_module=load_module)
            return restore({**others.content, **modules.content}, state, access, strict, is_mapped=False)

        return read_metadata(others.content), together(self._communicator, asked, read)

    def _restore_process(self, metadata: Mapping[str, Any], rng: bool) -> None:
        if self._scaler is not None and metadata.get("loss_scaler") is not None:
            self._scaler.load_state_dict(metadata["loss_scaler"])
        states = metadata.get("rng", [])
        # The streams of another number of ranks belong to none of these.
        if rng and len(states) == self._communicator.size:
            set_rng_state(states[self._communicator.rank])


def _read(io: CheckpointIO, path: Path, weights_only: bool) -> dict[str, Any]:
    return io.load(path, weights_only=weights_only) if isinstance(io, FullCheckpoint) else io.load(path)


def _targets(value: Any, described: Any) -> Any:
    """Where to read an entry that is no module: new tensors, spread as an optimizer's parameters are."""
    if not isinstance(value, Optimizer):
        return described
    parameters = [parameter.detach() for group in value.param_groups for parameter in group["params"]]
    numbers = [number for group in described["param_groups"] for number in group["params"]]
    state = dict(described["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state:
            state[number] = {
                # What has another shape, such as a number of steps, is not spread.
                name: torch.empty_like(parameter, dtype=stored.dtype)
                if isinstance(stored, Tensor) and stored.is_meta and stored.shape == parameter.shape
                else stored
                for name, stored in state[number].items()
            }
    return {**described, "state": state}
