"""Saving and loading by all ranks of a job: what fails on one of them is an error on every one."""

import os
from collections.abc import Callable, Mapping, MutableMapping
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
from fabric.errors import CheckpointError, ConfigurationError
from fabric.seed import rng_state, set_rng_state

__all__ = ["JobCheckpoint"]

ModuleState = Callable[[nn.Module], dict[str, Any]]
LoadModule = Callable[[nn.Module, Mapping[str, Any], bool], None]
OptimizerState = Callable[[Optimizer], Mapping[str, Any]]
LoadOptimizer = Callable[[Optimizer, Mapping[str, Any]], None]


class JobCheckpoint:
    """The checkpoints of one running job.

    Args:
        communicator: all ranks of the job.
        background: its saves that are under way.
        io: the format to save in. One of fabric's own also reads the other: on load, the path decides.
        module_state: names and values of a module as they stand in a checkpoint, whole.
        load_module: puts such a state into a module.
        module_shards: the same names with what this rank holds of the values, which may be DTensors; no collective. The
            module's own tensors, so that a module is loaded by writing into them.
        load_module_shards: puts such a state into a module.
        optimizer_state: the state of an optimizer for whole parameters, as its own ``state_dict()`` has it.
        load_optimizer: puts such a state into an optimizer.
        scaler: the loss scaler of the job, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        background: BackgroundSaves,
        io: CheckpointIO,
        *,
        module_state: ModuleState,
        load_module: LoadModule,
        module_shards: ModuleState,
        load_module_shards: LoadModule,
        optimizer_state: OptimizerState,
        load_optimizer: LoadOptimizer,
        scaler: Any = None,
    ) -> None:
        self._communicator, self._background, self._io, self._scaler = communicator, background, io, scaler
        self._module_shards, self._load_module_shards = module_shards, load_module_shards
        self._collecting: dict[str, Any] = {"module_state": module_state, "optimizer_state": optimizer_state}
        self._loading: dict[str, Any] = {
            "module_state": module_shards,  # for names and shapes, which shards have as well
            "load_module": load_module,
            "load_optimizer": load_optimizer,
        }

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        filter: Mapping[str, Any] | None,
        trainable_only: bool = False,
        async_: bool = False,
    ) -> PendingSave | None:
        """Write ``state``, the loss scale and the random states of all ranks.

        Collective. Rank 0 writes, or every rank its shards if that is the format; ``async_``, after this has returned.
        """
        self._background.settle(self._communicator)
        asked = f"fabric.save({str(path)!r}, ...)"
        shards = self._io if isinstance(self._io, ShardedCheckpoint) else None
        collecting = self._collecting
        if shards is not None:
            # It looks itself at what became of objects, once it has taken the DTensors out.
            collecting = {"module_state": self._module_shards, "check_content": lambda place, content: None}

        def gather() -> dict[str, Any]:
            return collect(state, filter=filter, trainable_only=trainable_only, **collecting)

        entries = together(self._communicator, asked, gather)
        metadata = {
            "world_size": self._communicator.size,
            "rng": self._communicator.gather_objects(rng_state()),
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

        def write(state: Mapping[str, Any], communicator: Communicator) -> None:
            if shards is not None:
                shards.save(state, path, communicator)
            else:
                together(communicator, asked, lambda: self._io.save(state, path) if communicator.rank == 0 else None)

        whole = with_metadata(entries, metadata) if shards is not None or self._communicator.rank == 0 else {}
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
        self._background.settle(self._communicator)
        asked = f"fabric.load({str(path)!r}, ...)"
        io = self._format_of(path)
        _check_trust(asked, io, weights_only)
        if isinstance(io, ShardedCheckpoint):
            metadata, rest = self._load_shards(asked, io, path, state, strict)
        else:
            metadata, rest = self._load_whole(asked, io, path, state, strict, weights_only)
        if state is not None:
            self._restore_process(metadata, rng)
        return rest

    def load_raw(self, path: Path, target: Any, strict: bool, weights_only: bool = True) -> None:
        """Restore one object from a file that is its bare state dict. Collective; every rank reads."""
        self._background.settle(self._communicator)
        asked = f"fabric.load_raw({str(path)!r}, ...)"
        io = self._format_of(path)
        _check_trust(asked, io, weights_only)

        def read() -> dict[str, Any]:
            if isinstance(io, ShardedCheckpoint) and os.path.isdir(path):
                raise CheckpointError(
                    asked,
                    "it is a folder",
                    "a file that is the state dict itself; a folder may be a sharded checkpoint, which has entries",
                    f"fabric.load({str(path)!r}, {{'model': model}}), with the entry that you want",
                )
            return _read(FullCheckpoint() if isinstance(io, ShardedCheckpoint) else io, path, weights_only)

        loaded = together(self._communicator, asked, read)
        together(self._communicator, asked, lambda: apply_raw(loaded, target, strict=strict, **self._loading))

    def _format_of(self, path: Path) -> CheckpointIO:
        """The format to read ``path`` in. Collective: rank 0 sees what is there."""
        if not isinstance(self._io, FullCheckpoint | ShardedCheckpoint):
            return self._io
        kind = type(self._io) if not os.path.exists(path) else None
        kind = kind or (ShardedCheckpoint if os.path.isdir(path) else FullCheckpoint)
        return self._communicator.broadcast_object(kind, 0)()

    def _load_whole(
        self,
        asked: str,
        io: CheckpointIO,
        path: Path,
        state: MutableMapping[str, Any] | None,
        strict: bool,
        weights_only: bool,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        def read() -> tuple[dict[str, Any], dict[str, Any]]:
            loaded = _read(io, path, weights_only)
            return loaded, read_metadata(loaded)

        loaded, metadata = together(self._communicator, asked, read)
        rest = together(self._communicator, asked, lambda: apply(loaded, state, strict=strict, **self._loading))
        return metadata, rest

    def _load_shards(
        self, asked: str, io: ShardedCheckpoint, path: Path, state: MutableMapping[str, Any] | None, strict: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        stored = io.open(path, self._communicator)

        def prepare() -> tuple[Prepared, Prepared]:
            described = stored.describe()
            if state is None:
                return stored.prepare(), stored.prepare({})
            check(described, state, module_state=self._module_shards, strict=strict)
            present = {name: value for name, value in state.items() if name in described}
            modules = {n: self._module_targets(value) for n, value in present.items() if isinstance(value, nn.Module)}
            others = {n: _targets(value, described[n]) for n, value in present.items() if n not in modules}
            others |= dict.fromkeys(described.keys() - state.keys() - stored.entries_with_tensors())
            # What fits was decided above, for all formats in the same words.
            return stored.prepare(others, strict=False), stored.prepare(modules, strict=False)

        others, modules = together(self._communicator, asked, prepare)

        def read() -> dict[str, Any]:
            others.copy()
            filled = False

            def load_module(module: nn.Module, content: dict[str, Any], strict: bool) -> None:
                nonlocal filled
                if not filled:
                    # Not before: an object that refuses its state has left the modules alone.
                    modules.copy()
                    filled = True
                self._load_module_shards(module, content, strict)

            return restore(
                {**others.content, **modules.content},
                state,
                load_module=load_module,
                strict=strict,
                is_mapped=False,
            )

        return read_metadata(others.content), together(self._communicator, asked, read)

    def _module_targets(self, module: nn.Module) -> dict[str, Any]:
        return {
            name: None if isinstance(value, Tensor) and is_lazy(value) else value
            for name, value in self._module_shards(module).items()
        }

    def _restore_process(self, metadata: Mapping[str, Any], rng: bool) -> None:
        if self._scaler is not None and metadata.get("loss_scaler") is not None:
            self._scaler.load_state_dict(metadata["loss_scaler"])
        states = metadata.get("rng", [])
        # The streams of another number of ranks belong to none of these.
        if rng and len(states) == self._communicator.size:
            set_rng_state(states[self._communicator.rank])


def _read(io: CheckpointIO, path: Path, weights_only: bool) -> dict[str, Any]:
    if isinstance(io, FullCheckpoint):
        return io.load(path, weights_only=weights_only)
    return io.load(path)


def _check_trust(asked: str, io: CheckpointIO, weights_only: bool) -> None:
    if weights_only or isinstance(io, FullCheckpoint):
        return
    raise ConfigurationError(
        asked,
        f"weights_only=False has no meaning for {type(io).__name__}: what it writes never holds code",
        "weights_only=False for one file, as torch.save writes it, whose writer you trust",
        f"{asked} without weights_only",
    )


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
