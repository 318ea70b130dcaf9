"""Seeds of the random streams of python, numpy and torch, and their state.

numpy is optional: its stream takes part when numpy is in the process (torch imports it where it is installed), and is
never imported for its own sake.
"""

import hashlib
import operator
import random
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fabric.errors import ConfigurationError

__all__ = ["Streams", "WorkerSeeding", "rng_state", "sample_generator", "seed_everything", "set_rng_state"]

_SEEDS = 2**32  # numpy's legacy generator takes no more than 32 bits


def seed_everything(seed: int | None = None, *, rank: int = 0, per_rank: bool = False) -> int:
    """Seed python's ``random``, numpy (when it is in the process) and torch on all devices.

    Args:
        seed: ``0 <= seed < 2**32``; ``None`` takes a fresh one from the operating system.
        rank: global rank of this process; read only with ``per_rank``.
        per_rank: give each rank streams of its own, derived from ``seed`` and ``rank`` by a hash, so that neighboring
            seeds and ranks are unrelated. Rank 0 keeps the plain seed. By default all ranks get the same streams.

    Returns:
        The seed, before the rank was mixed in.

    Raises:
        ConfigurationError: ``seed`` is out of range.
    """
    chosen = secrets.randbelow(_SEEDS) if seed is None else operator.index(seed)
    if not 0 <= chosen < _SEEDS:
        raise ConfigurationError(f"seed_everything({chosen})", expected=f"0 <= seed < {_SEEDS}, as numpy takes it")
    _seed_streams(chosen, rank if per_rank else 0)
    return chosen


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """A generator for one sample, whose stream depends on these numbers alone.

    For ``Dataset.__getitem__``: what it draws is then the same on any number of processes and workers, and in a run
    that was resumed. On the CPU torch uses 32 bits of a seed, so that one pair in four billion shares a stream.

    Args:
        seed: any integer; another one for each augmentation that is to be independent.
        epoch: that of the dataset, which it learns by a method ``set_epoch``.
        index: of the sample.

    Returns:
        A generator on the CPU. Its ``initial_seed()``, of 64 bits, is one for ``numpy.random.default_rng``.
    """
    return torch.Generator().manual_seed(_mixed("sample", *map(operator.index, (seed, epoch, index))))


@dataclass(frozen=True)
class WorkerSeeding:
    """A ``worker_init_fn`` that gives the DataLoader workers of a rank streams of their own, then calls the user's.

    torch seeds each worker from a base seed that the ranks share, so that without this worker 0 of every rank would
    augment with the same random numbers. On rank 0 nothing is reseeded. ``torch.initial_seed()`` in the worker is the
    new seed; ``get_worker_info().seed`` stays torch's. Can be pickled if ``then`` can, as spawned workers need.

    Attributes:
        rank: global rank of the process that owns the workers.
        then: the user's own ``worker_init_fn``, called last; ``None`` when there is none.
    """

    rank: int
    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        """Seed this worker process; called by torch in it."""
        if self.rank > 0:
            _seed_streams(torch.initial_seed(), self.rank)
        if self.then is not None:
            self.then(worker_id)


@dataclass(frozen=True)
class Streams:
    """A selection of random streams of this process that are read and set together.

    Attributes:
        shared: which of the streams that everything in the process shares: ``"python"``, ``"numpy"``, ``"torch"`` (the
            generator of the CPU).
        generators: generators made for a purpose, such as that of a sampler.
    """

    shared: tuple[str, ...] = ()
    generators: tuple[torch.Generator, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shared or self.generators)

    def state(self) -> dict[str, Any]:
        """A snapshot: one entry per shared stream, and ``"generators"``, a list of uint8 tensors in their order."""
        state: dict[str, Any] = {name: _READ[name]() for name in self.shared}
        if self.generators:
            state["generators"] = [generator.get_state() for generator in self.generators]
        return {name: value for name, value in state.items() if value is not None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the streams to a snapshot of the same choice; what the snapshot lacks stays as it is."""
        self.restore_shared(state, {})
        for generator, saved in zip(self.generators, state.get("generators", ()), strict=False):
            generator.set_state(saved)

    def restore_shared(self, state: Mapping[str, Any], unless: Mapping[str, Any]) -> None:
        """Set the shared streams alone, but those whose entry in ``unless`` is the same."""
        for name in self.shared:
            if name in state and not _same(state[name], unless.get(name)):
                _WRITE[name](state[name])


def rng_state() -> dict[str, Any]:
    """The state of python's, numpy's (if imported) and torch's streams, and of CUDA's once CUDA is initialized.

    Returns:
        A dict of tensors, numbers, strings, tuples and lists: ``torch.load(weights_only=True)`` reads it back.
    """
    state = Streams(("python", "numpy", "torch")).state()
    if torch.cuda.is_initialized():
        state["cuda"] = {"current": torch.cuda.current_device(), "states": torch.cuda.get_rng_state_all()}
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the streams back to what :func:`rng_state` returned.

    The state of the CUDA device that was current goes to the one that is current now, since a resumed rank may sit on
    another one; the others go by number. Entries for what this process lacks (numpy, CUDA) are left out:
    nothing here can draw from them.

    Raises:
        KeyError: ``state`` is not what :func:`rng_state` returns; nothing was changed.
    """
    torch.set_rng_state(state["torch"])
    Streams(("python", "numpy")).restore(state)
    if (cuda := state.get("cuda")) and torch.cuda.is_available():
        current = torch.cuda.current_device()
        for device, saved in enumerate(cuda["states"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
        torch.cuda.set_rng_state(cuda["states"][cuda["current"]], current)


def _seed_streams(seed: int, rank: int) -> None:
    """Seed the streams of every library; those of rank 0 by the seed itself."""
    random.seed(_mixed("python", seed, rank) if rank else seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(divmod(_mixed("numpy", seed, rank), _SEEDS) if rank else seed)
    torch.manual_seed(_mixed("torch", seed, rank) if rank else seed)


def _mixed(*parts: str | int) -> int:
    """64 well-mixed bits that depend on every part."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _read_numpy() -> list[Any] | None:
    # numpy loads its random module when it is first named: while nobody has, there is no stream to save.
    if (module := sys.modules.get("numpy.random")) is None:
        return None
    kind, key, *rest = module.get_state()
    return [kind, key.tolist(), *rest]


def _write_numpy(state: list[Any]) -> None:
    if numpy := sys.modules.get("numpy"):
        numpy.random.set_state(tuple(state))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


_READ = {"python": random.getstate, "numpy": _read_numpy, "torch": torch.get_rng_state}
_WRITE = {"python": random.setstate, "numpy": _write_numpy, "torch": torch.set_rng_state}
