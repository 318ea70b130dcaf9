"""Seeds and states of the random streams of python, numpy and torch.

numpy is optional: its stream is included if numpy has been imported (torch does so if it is installed); fabric never
imports it for this.
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

__all__ = [
    "Streams",
    "WorkerSeeding",
    "rng_state",
    "sample_generator",
    "seed_everything",
    "set_rng_state",
]

_SEEDS = 2**32  # numpy's legacy generator takes at most 32 bits


def seed_everything(seed: int | None = None, *, rank: int = 0, per_rank: bool = False) -> int:
    """Seed python's ``random``, numpy (if it has been imported) and torch on all devices.

    Args:
        seed: ``0 <= seed < 2**32``; ``None`` takes a random one from the operating system.
        rank: global rank of this process; used only with ``per_rank``.
        per_rank: give each rank different streams, derived from ``seed`` and ``rank`` by a hash, so that neighboring
            seeds and ranks are unrelated. Rank 0 uses the seed itself. By default all ranks get the same streams.

    Returns:
        The seed, without the rank.

    Raises:
        ConfigurationError: ``seed`` is out of range.
    """
    chosen = secrets.randbelow(_SEEDS) if seed is None else operator.index(seed)
    if not 0 <= chosen < _SEEDS:
        raise ConfigurationError(
            f"seed_everything({chosen})", expected=f"0 <= seed < {_SEEDS}, as numpy takes it"
        )
    _seed_streams(chosen, rank if per_rank else 0)
    return chosen


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """A generator for one sample, whose stream depends only on these numbers.

    For ``Dataset.__getitem__``: random numbers are then the same on any number of processes and workers, and in a
    resumed run. On the CPU torch uses 32 bits of a seed, so one pair of samples in four billion shares a stream.

    Args:
        seed: any integer; use different ones for independent augmentations.
        epoch: the epoch, which a dataset gets through its method ``set_epoch``.
        index: the index of the sample.

    Returns:
        A generator on the CPU. Its 64-bit ``initial_seed()`` can seed ``numpy.random.default_rng``.
    """
    return torch.Generator().manual_seed(
        _mixed("sample", *map(operator.index, (seed, epoch, index)))
    )


@dataclass(frozen=True)
class WorkerSeeding:
    """A ``worker_init_fn`` that seeds the DataLoader workers of each rank differently, then calls the user's.

    torch seeds each worker from a base seed that the ranks share. Without this class, worker 0 of every rank would
    augment with the same random numbers. Rank 0 is not reseeded. ``torch.initial_seed()`` in the worker is the
    new seed; ``get_worker_info().seed`` stays torch's. Picklable if ``then`` is, as spawned workers need.

    Attributes:
        rank: global rank of the process that owns the workers.
        then: the user's own ``worker_init_fn``, called last, or ``None``.
    """

    rank: int
    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        """Seed this worker process; torch calls it in the worker."""
        if self.rank > 0:
            _seed_streams(torch.initial_seed(), self.rank)
        if self.then is not None:
            self.then(worker_id)


@dataclass(frozen=True)
class Streams:
    """Random streams of this process that are read and set together.

    Attributes:
        shared: which global streams of the process: ``"python"``, ``"numpy"``, ``"torch"`` (the CPU generator).
        generators: separate generators, such as that of a sampler.
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
        """Set the streams to a snapshot of the same streams; those that it lacks are unchanged."""
        self.restore_shared(state, {})
        for generator, saved in zip(self.generators, state.get("generators", ()), strict=False):
            generator.set_state(saved)

    def restore_shared(self, state: Mapping[str, Any], unless: Mapping[str, Any]) -> None:
        """Set only the shared streams, except those whose entry in ``unless`` is the same."""
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
        state["cuda"] = {
            "current": torch.cuda.current_device(),
            "states": torch.cuda.get_rng_state_all(),
        }
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the streams to the result of :func:`rng_state`.

    The current CUDA device gets the state of the device that was current, since a resumed rank may use another device;
    the others are restored by index. Entries for what this process lacks (numpy, CUDA) are ignored: nothing here can
    draw from them.

    Raises:
        KeyError: ``state`` is not a result of :func:`rng_state`; nothing was changed.
    """
    torch.set_rng_state(state["torch"])
    Streams(("python", "numpy")).restore(state)
    if (cuda := state.get("cuda")) and torch.cuda.is_available():
        current = torch.cuda.current_device()
        for device, saved in enumerate(cuda["states"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
        torch.cuda.set_rng_state(cuda["states"][cuda["current"]], current)


def _seed_streams(seed: int, rank: int) -> None:
    """Seed the streams of every library; on rank 0 with the seed itself."""
    random.seed(_mixed("python", seed, rank) if rank else seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(divmod(_mixed("numpy", seed, rank), _SEEDS) if rank else seed)
    torch.manual_seed(_mixed("torch", seed, rank) if rank else seed)


def _mixed(*parts: str | int) -> int:
    """64 well-mixed bits that depend on every part."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _read_numpy() -> list[Any] | None:
    # numpy imports its random module on first access: before that, there is no stream to save.
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
