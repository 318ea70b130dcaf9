"""Seeding, and the state of the random streams: python's, numpy's and torch's.

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

from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = ["Streams", "WorkerSeeding", "rng_state", "seed_everything", "set_rng_state"]

_SEEDS = 2**32  # numpy's legacy generator takes no more than 32 bits


def seed_everything(seed: int | None = None, *, rank: int = 0, per_rank: bool = False) -> int:
    """Seed python's ``random``, numpy (when it is in the process) and torch on all devices.

    Args:
        seed: ``0 <= seed < 2**32``; ``None`` takes a fresh one from the operating system.
        rank: global rank of this process; read only with ``per_rank``.
        per_rank: give each rank streams of its own, derived from ``seed`` and ``rank`` by a hash, so that neighbouring
            seeds and ranks are unrelated. Rank 0 keeps the plain seed. By default all ranks get the same streams.

    Returns:
        The seed, before the rank was mixed in.

    Raises:
        ArgumentTypeError: ``seed`` is not an integer.
        ConfigurationError: ``seed`` is out of range, or ``rank`` is negative.
    """
    chosen = secrets.randbelow(_SEEDS) if seed is None else _checked(seed)
    if rank < 0:
        raise ConfigurationError(
            f"seed_everything(rank={rank})", "a rank cannot be negative", "0, 1, ...", "rank=fabric.global_rank"
        )
    if per_rank and rank > 0:
        _seed_mixed(chosen, rank)
    else:
        random.seed(chosen)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(chosen)
        torch.manual_seed(chosen)
    return chosen


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
            _seed_mixed(torch.initial_seed(), self.rank)
        if self.then is not None:
            self.then(worker_id)


@dataclass(frozen=True)
class Streams:
    """A choice of random streams of this process that are read and set together.

    Attributes:
        shared: which of the streams that everything in the process shares: ``"python"``, ``"numpy"``, ``"torch"`` (the
            generator of the CPU).
        generators: generators that somebody made for a purpose.
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
        self.restore_shared(state)
        for generator, saved in zip(self.generators, state.get("generators", ()), strict=False):
            generator.set_state(saved)

    def restore_shared(self, state: Mapping[str, Any], unless: Mapping[str, Any] | None = None) -> bool:
        """Set the shared streams alone, but those whose entry in ``unless`` is the same.

        Returns:
            Whether any was set.
        """
        names = [name for name in self.shared if name in state and not _same(state[name], (unless or {}).get(name))]
        for name in names:
            _WRITE[name](state[name])
        return bool(names)


def rng_state() -> dict[str, Any]:
    """The state of python's, numpy's (if imported) and torch's streams, and of CUDA's once CUDA is initialised.

    Returns:
        A dict of tensors, numbers, strings, tuples and lists: ``torch.load(weights_only=True)`` reads it back.
    """
    state = Streams(("python", "numpy", "torch")).state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = {"current": torch.cuda.current_device(), "states": torch.cuda.get_rng_state_all()}
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the streams back to what :func:`rng_state` returned.

    The state of the CUDA device that was current goes to the one that is current now, since a resumed rank may sit on
    another one; the others go by number. Entries for what this process lacks (numpy, CUDA) are left out: nothing here
    can draw from them.

    Raises:
        ArgumentTypeError: ``state`` is not what :func:`rng_state` returns.
    """
    if not isinstance(state, Mapping) or "torch" not in state:
        raise ArgumentTypeError(
            f"set_rng_state({type(state).__name__})",
            "that is no state of the random streams: it lacks the entry 'torch'",
            "what rng_state() returned, also after torch.save and torch.load",
            "set_rng_state(rng_state())",
        )
    Streams(("python", "numpy", "torch")).restore(state)
    if (cuda := state.get("cuda")) and torch.cuda.is_available():
        current = torch.cuda.current_device()
        for device, saved in enumerate(cuda["states"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
        torch.cuda.set_rng_state(cuda["states"][cuda["current"]], current)


def _checked(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool):
        raise ArgumentTypeError(
            f"seed_everything({seed!r})", f"{type(seed).__name__} is not an integer", "an int", "seed_everything(42)"
        )
    if not 0 <= number < _SEEDS:
        raise ConfigurationError(
            f"seed_everything({number})",
            "numpy's generator takes seeds of 32 bits only, and all libraries get the same one",
            f"0 <= seed < {_SEEDS}",
            f"seed_everything({number % _SEEDS})",
        )
    return number


def _seed_mixed(*parts: int) -> None:
    random.seed(_mixed("python", *parts))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(divmod(_mixed("numpy", *parts), _SEEDS))
    torch.manual_seed(_mixed("torch", *parts))


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


def _write_python(state: Any) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


_READ = {"python": random.getstate, "numpy": _read_numpy, "torch": torch.get_rng_state}
_WRITE = {"python": _write_python, "numpy": _write_numpy, "torch": torch.set_rng_state}
