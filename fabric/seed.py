"""Seeds and states of the random streams of python, numpy and torch.

numpy is optional: its stream is included if numpy has been imported (torch imports numpy if it is
installed). This file never imports numpy.
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
    "RandomStreams",
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
        seed: the seed, ``0 <= seed < 2**32``. None takes a random one from the operating system.
        rank: the global rank of this process. It is used only with ``per_rank``.
        per_rank: whether each rank gets different streams. They are derived from ``seed`` and
            ``rank`` by a hash, so that neighboring seeds and ranks are unrelated. Rank 0 uses the
            seed itself. By default all ranks get the same streams.

    Returns:
        The seed, without the rank.

    Raises:
        ConfigurationError: ``seed`` is out of range.
    """
    if seed is None:
        seed = secrets.randbelow(_SEEDS)
    seed = operator.index(seed)
    if not 0 <= seed < _SEEDS:
        raise ConfigurationError(
            f"seed_everything({seed})", expected=f"0 <= seed < {_SEEDS}, as numpy takes it"
        )
    _seed_streams(seed, rank if per_rank else 0)
    return seed


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return a generator for one sample, whose stream depends only on the arguments.

    Use it in ``Dataset.__getitem__``: random numbers are then the same on any number of processes
    and workers, and in a resumed run. On the CPU torch uses 32 bits of a seed, so one pair of
    samples in four billion shares a stream.

    Args:
        seed: any integer. Use different ones for independent augmentations.
        epoch: the epoch, which a dataset gets through its method ``set_epoch``.
        index: the index of the sample.

    Returns:
        A generator on the CPU. Its 64-bit ``initial_seed()`` can seed ``numpy.random.default_rng``.
    """
    numbers = map(operator.index, (seed, epoch, index))
    return torch.Generator().manual_seed(_hash("sample", *numbers))


@dataclass(frozen=True)
class WorkerSeeding:
    """A ``worker_init_fn`` that seeds the DataLoader workers of each rank differently.

    torch seeds each worker from a base seed that the ranks share. Without this class, worker 0 of
    every rank would augment with the same random numbers. Rank 0 is not reseeded.
    ``torch.initial_seed()`` in the worker is the new seed, and ``get_worker_info().seed`` stays
    torch's. The object can be pickled if ``worker_init_fn`` can, as spawned workers need.

    Attributes:
        rank: the global rank of the process that owns the workers.
        worker_init_fn: the user's own ``worker_init_fn``, called last, or None.
    """

    rank: int
    worker_init_fn: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        """Seed this worker process. torch calls the object in the worker."""
        if self.rank > 0:
            _seed_streams(torch.initial_seed(), self.rank)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


@dataclass(frozen=True)
class RandomStreams:
    """Random streams of this process that are read and set together.

    Attributes:
        global_streams: the names of streams of the process: ``"python"``, ``"numpy"``, ``"torch"``
            (the CPU generator).
        generators: separate generators, such as the generator of a sampler.
    """

    global_streams: tuple[str, ...] = ()
    generators: tuple[torch.Generator, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.global_streams or self.generators)

    def state(self) -> dict[str, Any]:
        """Return the states of the streams.

        Returns:
            An entry for each shared stream that exists, and ``"generators"``, a list of uint8
            tensors in the order of the generators.
        """
        state: dict[str, Any] = {}
        for name in self.global_streams:
            value = _READ[name]()
            if value is not None:
                state[name] = value
        if self.generators:
            state["generators"] = [generator.get_state() for generator in self.generators]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the streams to a state of the same streams. Streams without an entry keep theirs."""
        self.restore_global_streams(state, {})
        for generator, saved in zip(self.generators, state.get("generators", ()), strict=False):
            generator.set_state(saved)

    def restore_global_streams(self, state: Mapping[str, Any], unless: Mapping[str, Any]) -> None:
        """Set the shared streams, except the streams that have an equal entry in ``unless``."""
        for name in self.global_streams:
            if name in state and not _is_equal(state[name], unless.get(name)):
                _WRITE[name](state[name])


def rng_state() -> dict[str, Any]:
    """Return the states of the random streams of python, numpy and torch.

    numpy's stream is included if numpy has been imported, and CUDA's streams once CUDA is
    initialized.

    Returns:
        A dict of tensors, numbers, strings, tuples and lists: ``torch.load(weights_only=True)``
        reads it back.
    """
    state = RandomStreams(("python", "numpy", "torch")).state()
    if torch.cuda.is_initialized():
        state["cuda"] = {
            "current": torch.cuda.current_device(),
            "states": torch.cuda.get_rng_state_all(),
        }
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the streams to the result of :func:`rng_state`.

    The current CUDA device gets the state of the device that was current, since a resumed rank may
    use another device. The other devices are restored by index. Entries for numpy or CUDA are
    ignored in a process without them: nothing can draw from these streams.

    Raises:
        KeyError: ``state`` is not a result of :func:`rng_state`. Nothing was changed.
    """
    torch.set_rng_state(state["torch"])
    RandomStreams(("python", "numpy")).restore(state)
    cuda = state.get("cuda")
    if cuda and torch.cuda.is_available():
        current = torch.cuda.current_device()
        for device, saved in enumerate(cuda["states"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
        torch.cuda.set_rng_state(cuda["states"][cuda["current"]], current)


def _seed_streams(seed: int, rank: int) -> None:
    """Seed the streams of every library, on rank 0 with the seed itself."""
    numpy = sys.modules.get("numpy")
    if rank == 0:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        torch.manual_seed(seed)
        return
    random.seed(_hash("python", seed, rank))
    if numpy is not None:
        # numpy takes a list of 32-bit numbers.
        numpy.random.seed(divmod(_hash("numpy", seed, rank), _SEEDS))
    torch.manual_seed(_hash("torch", seed, rank))


def _hash(*values: str | int) -> int:
    """Return a 64-bit hash of the values, the same in every process."""
    text = "/".join(map(str, values))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _read_numpy() -> list[Any] | None:
    # numpy imports its random module on first access: before that, there is no stream to save.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    kind, key, *position = numpy_random.get_state()
    return [kind, key.tolist(), *position]


def _write_numpy(state: list[Any]) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(tuple(state))


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and left == right


_READ = {"python": random.getstate, "numpy": _read_numpy, "torch": torch.get_rng_state}
_WRITE = {"python": random.setstate, "numpy": _write_numpy, "torch": torch.set_rng_state}
