"""Saving and loading by all ranks of a job: what fails on one of them is an error on every one."""

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from fabric.checkpoint.base import CheckpointIO
from fabric.checkpoint.state import apply, apply_raw, collect, read_metadata, with_metadata
from fabric.communicators import Communicator
from fabric.errors import CheckpointError
from fabric.seed import rng_state, set_rng_state

__all__ = ["JobCheckpoint"]

T = TypeVar("T")
ModuleState = Callable[[nn.Module], dict[str, Any]]
LoadModule = Callable[[nn.Module, Mapping[str, Any], bool], None]
OptimizerState = Callable[[Optimizer], Mapping[str, Any]]
LoadOptimizer = Callable[[Optimizer, Mapping[str, Any]], None]


class JobCheckpoint:
    """The checkpoints of one running job.

    Args:
        communicator: all ranks of the job.
        io: the format.
        module_state: names and values of a module as they stand in a checkpoint.
        load_module: puts such a state into a module.
        optimizer_state: the same for an optimizer; for whole parameters, as its own ``state_dict()`` has it.
        load_optimizer: puts such a state into an optimizer.
        scaler: the loss scaler of the job, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        io: CheckpointIO,
        *,
        module_state: ModuleState,
        load_module: LoadModule,
        optimizer_state: OptimizerState,
        load_optimizer: LoadOptimizer,
        scaler: Any = None,
    ) -> None:
        self._communicator, self._io, self._scaler = communicator, io, scaler
        self._module_state, self._optimizer_state = module_state, optimizer_state
        self._loading: dict[str, Any] = {
            "module_state": module_state,
            "load_module": load_module,
            "load_optimizer": load_optimizer,
        }

    def save(self, path: Path, state: Mapping[str, Any], filter: Mapping[str, Any] | None) -> None:
        """Write ``state``, the loss scale and the random states of all ranks. Collective; rank 0 writes."""
        asked = f"fabric.save({str(path)!r}, ...)"

        def gather() -> dict[str, Any]:
            return collect(state, module_state=self._module_state, optimizer_state=self._optimizer_state, filter=filter)

        entries = self._together(asked, gather)
        metadata = {
            "world_size": self._communicator.size,
            "rng": self._communicator.gather_objects(rng_state()),
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

        def write() -> None:
            if self._communicator.rank == 0:
                self._io.save(with_metadata(entries, metadata), path)

        self._together(asked, write)

    def load(self, path: Path, state: MutableMapping[str, Any] | None, strict: bool, rng: bool) -> dict[str, Any]:
        """Restore ``state``, the loss scale and this rank's random state. Collective; every rank reads.

        Returns:
            The entries that ``state`` did not name.
        """
        asked = f"fabric.load({str(path)!r}, ...)"

        def read() -> tuple[dict[str, Any], dict[str, Any]]:
            loaded = self._io.load(path)
            return loaded, read_metadata(loaded)

        loaded, metadata = self._together(asked, read)

        def restore() -> dict[str, Any]:
            return apply(loaded, state, strict=strict, **self._loading)

        rest = self._together(asked, restore)
        if state is not None:
            self._restore_process(metadata, rng)
        return rest

    def load_raw(self, path: Path, target: Any, strict: bool) -> None:
        """Restore one object from a file that is its bare state dict. Collective; every rank reads."""
        asked = f"fabric.load_raw({str(path)!r}, ...)"
        loaded = self._together(asked, lambda: self._io.load(path))
        self._together(asked, lambda: apply_raw(loaded, target, strict=strict, **self._loading))

    def _restore_process(self, metadata: Mapping[str, Any], rng: bool) -> None:
        if self._scaler is not None and metadata.get("loss_scaler") is not None:
            self._scaler.load_state_dict(metadata["loss_scaler"])
        states = metadata.get("rng", [])
        # The streams of another number of ranks belong to none of these.
        if rng and len(states) == self._communicator.size:
            set_rng_state(states[self._communicator.rank])

    def _together(self, asked: str, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; when it raises on one, raise on all of them."""
        error: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - raised again below, once every rank knows of it
            error = caught
        if self._communicator.size > 1:
            texts = self._communicator.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
            failed = {rank: text for rank, text in enumerate(texts) if text is not None}
            if failed and error is None:
                rank, text = next(iter(failed.items()))
                raise CheckpointError(
                    f"{asked} on rank {self._communicator.rank}",
                    f"it failed on rank {rank} of {self._communicator.size}: {text}",
                    "a call that succeeds on every rank",
                    f"see the error of rank {rank}",
                )
        if error is not None:
            raise error
        return result
