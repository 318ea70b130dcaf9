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

from fabric.accelerators import device_module, initialized_device_module
from fabric.errors import ConfigurationError

__all__ = [
    "RandomStreams",
    "WorkerSeeding",
    "WorkerStreams",
    "rng_state",
    "sample_generator",
    "seed_everything",
    "seed_rank",
    "set_rng_state",
    "stream_digests",
]

# Seeds are below this number, since numpy's legacy generator takes at most 32 bits.
_SEED_LIMIT = 2**32
# The process-wide streams, in the order in which WorkerStreams has them.
_GLOBAL_STREAMS = ("python", "numpy", "torch")


def seed_everything(seed: int | None = None, *, rank: int = 0, per_rank: bool = False) -> int:
    """Seed python's ``random``, numpy (if it has been imported) and torch on all devices.

    Args:
        seed: the seed, ``0 <= seed < 2**32``. None takes a random one from the operating system.
        rank: the global rank of this process, which matters only with ``per_rank``.
        per_rank: whether each rank gets different streams. The streams are derived from ``seed``
            and ``rank`` by a hash, so that the streams of neighboring seeds and ranks are
            unrelated. Rank 0 uses the seed itself. By default all ranks get the same streams.

    Returns:
        The seed, which is the same on every rank if the argument ``seed`` is.

    Raises:
        ConfigurationError: ``seed`` is out of range.
        TypeError: ``seed`` is not an integer.
    """
    if seed is None:
        seed = secrets.randbelow(_SEED_LIMIT)
    seed = operator.index(seed)  # takes an integer of numpy, too, and refuses a float
    if not 0 <= seed < _SEED_LIMIT:
        raise ConfigurationError(
            f"seed_everything({seed})", expected=f"0 <= seed < {_SEED_LIMIT}, as numpy takes it"
        )
    if not per_rank:
        rank = 0  # every rank gets the streams of rank 0
    _seed_streams(seed, rank)
    return seed


def seed_rank(seed: int, rank: int) -> None:
    """Give a rank the streams of ``seed_everything(seed, rank=rank, per_rank=True)``.

    Rank 0 continues its own streams, so that a job of one process does not change.
    """
    if rank > 0:
        _seed_streams(seed, rank)


def sample_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return a generator for one sample, whose stream depends only on the arguments.

    Use the generator in ``Dataset.__getitem__``. Its random numbers are the same on any number of
    processes and workers, and in a resumed run. On the CPU torch uses 32 bits of a seed, so one
    pair of samples in four billion shares a stream.

    Args:
        seed: any integer. Use different integers for independent augmentations.
        epoch: the epoch, which a dataset gets through its method ``set_epoch``.
        index: the index of the sample.

    Returns:
        A generator on the CPU. Its 64-bit ``initial_seed()`` can seed ``numpy.random.default_rng``.
    """
    # An integer of numpy or a tensor of one integer has to give the same hash as Python's integer.
    numbers = map(operator.index, (seed, epoch, index))
    sample_seed = _hash_to_64_bits("sample", *numbers)
    return torch.Generator().manual_seed(sample_seed)


class WorkerStreams:
    """The random streams that a user's ``worker_init_fn`` has seeded in the first worker.

    The worker writes digests of them to memory that it shares with the process of the loader.

    Args:
        name: the name of the loader, the same on all ranks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # 0 stands for a stream that worker_init_fn has left alone.
        self._digests = torch.zeros(len(_GLOBAL_STREAMS), dtype=torch.int64).share_memory_()

    def record(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Record which streams have changed. Called in the worker.

        Args:
            before: the :func:`stream_digests` before the call of ``worker_init_fn``.
            after: the digests after the call.
        """
        for index, name in enumerate(_GLOBAL_STREAMS):
            if name in after and after[name] != before.get(name):
                # The first 14 hexadecimal digits are 7 bytes, which fit into an int64.
                self._digests[index] = int(after[name][:14], base=16)

    def digests(self) -> dict[str, int]:
        """Return digests of the recorded streams, by the name of the stream.

        Empty before the first batch, and for a ``worker_init_fn`` that leaves the streams alone.
        """
        digests = dict(zip(_GLOBAL_STREAMS, self._digests.tolist(), strict=True))
        return {name: digest for name, digest in digests.items() if digest != 0}


@dataclass(frozen=True)
class WorkerSeeding:
    """A ``worker_init_fn`` that seeds the DataLoader workers of each rank differently.

    torch seeds each worker from a base seed that the ranks share. Without this class, worker 0 of
    every rank would augment with the same random numbers. The workers of rank 0 keep torch's seeds.
    In the other workers ``torch.initial_seed()`` is the new seed. ``get_worker_info().seed`` is
    torch's seed in all workers. Spawned workers get a pickle of this object.

    Attributes:
        rank: the global rank of the process that owns the workers.
        worker_init_fn: the user's own ``worker_init_fn``, called last, or None.
        streams: gets the streams that ``worker_init_fn`` seeds in the first worker. None, the
            default, does not look at them.
    """

    rank: int
    worker_init_fn: Callable[[int], None] | None = None
    streams: WorkerStreams | None = None

    def __call__(self, worker_id: int) -> None:
        """Seed this worker process. The DataLoader calls the object in each worker."""
        if self.rank > 0:
            # The initial seed is the seed that torch has given to this worker.
            _seed_streams(torch.initial_seed(), self.rank)
        if self.worker_init_fn is None:
            return
        if self.streams is None or worker_id > 0:
            self.worker_init_fn(worker_id)
            return
        # Record which streams the user's function seeds, and to which states. The process of the
        # loader compares the states between ranks. The first worker is enough.
        before = stream_digests()
        self.worker_init_fn(worker_id)
        self.streams.record(before, stream_digests())


@dataclass(frozen=True)
class RandomStreams:
    """Random streams of this process that are read and set together.

    Attributes:
        global_streams: names of process-wide streams: ``"python"``, ``"numpy"`` and ``"torch"``
            (the CPU generator).
        generators: other generators of torch, such as the generator of a sampler.
    """

    global_streams: tuple[str, ...] = ()
    generators: tuple[torch.Generator, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.global_streams or self.generators)

    def state(self) -> dict[str, Any]:
        """Return the states of the streams.

        Returns:
            An entry for each global stream that exists, and ``"generators"``, a list of uint8
            tensors in the order of the generators.
        """
        state: dict[str, Any] = {}
        for name in self.global_streams:
            read_state = _READERS[name]
            stream_state = read_state()
            if stream_state is not None:  # None for numpy's stream if numpy is not used
                state[name] = stream_state
        if self.generators:
            state["generators"] = [generator.get_state() for generator in self.generators]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the streams to the result of :meth:`state` for the same streams.

        A stream without an entry in ``state`` stays as it is.
        """
        self.restore_global_streams(state)
        saved_states = state.get("generators", ())
        # strict=False, since a state without generators is valid.
        for generator, saved_state in zip(self.generators, saved_states, strict=False):
            generator.set_state(saved_state)

    def restore_global_streams(
        self, state: Mapping[str, Any], unless: Mapping[str, Any] = {}
    ) -> None:
        """Set the global streams to a result of :meth:`state`. Generators stay as they are.

        Args:
            state: the states to restore. A stream without an entry stays as it is.
            unless: the states to which the caller has set the streams before it drew numbers. If
                the entry of a stream in ``state`` is the same, the stream is left as it is after
                the draw, as if it had never been set. Empty, the default, sets every stream.
        """
        for name in self.global_streams:
            if name not in state:
                continue
            if _is_equal(state[name], unless.get(name)):
                continue
            write_state = _WRITERS[name]
            write_state(state[name])


def rng_state() -> dict[str, Any]:
    """Return the states of the random streams of python, numpy and torch.

    numpy's stream is included if numpy has been imported. The streams of a GPU or other accelerator
    are included once this process has used it.

    Returns:
        A dict of tensors, numbers, strings, tuples and lists: ``torch.load(weights_only=True)``
        reads it back.
    """
    state = RandomStreams(_GLOBAL_STREAMS).state()
    # None if this process has used no GPU or other accelerator yet.
    hardware = initialized_device_module()
    if hardware is not None:
        state[hardware.name] = {
            "current": torch.accelerator.current_device_index(),
            "states": hardware.module.get_rng_state_all(),
        }
    return state


def stream_digests() -> dict[str, str]:
    """Return a short text for the state of each random stream, by the name of the stream.

    Equal texts mean equal states. Of the streams of a GPU or other accelerator, only the stream of
    the current device counts.
    """
    state = RandomStreams(_GLOBAL_STREAMS).state()
    hardware = initialized_device_module()
    # The state cannot be read while a CUDA graph is captured.
    if hardware is not None and not _is_capturing(hardware.module):
        state[hardware.name] = hardware.module.get_rng_state()
    digests: dict[str, str] = {}
    for name, stream_state in state.items():
        if isinstance(stream_state, torch.Tensor):
            stream_state = stream_state.tolist()  # the repr of a tensor leaves elements out
        digest = hashlib.blake2b(repr(stream_state).encode(), digest_size=8)
        digests[name] = digest.hexdigest()
    return digests


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the streams to the result of :func:`rng_state`.

    A resumed rank may use another GPU. So the current device gets the state of the device that was
    current when the states were read. The other devices are restored by index. Entries for numpy or
    hardware that this process does not have are ignored.

    Raises:
        KeyError: ``state`` is not a result of :func:`rng_state`. Nothing was changed.
    """
    # Every result of rng_state() has this entry. A wrong argument raises here, before any change.
    torch.set_rng_state(state["torch"])
    RandomStreams(("python", "numpy")).restore(state)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type not in state:
        return
    saved = state[device.type]
    device_states = saved["states"]
    set_state = device_module(device.type).set_rng_state
    # The process that saved the states may have seen more or fewer devices than this one.
    for index in range(min(len(device_states), torch.accelerator.device_count())):
        set_state(device_states[index], index)
    # This call comes last, because the loop has restored the current device by its index.
    state_of_current = device_states[saved["current"]]
    set_state(state_of_current, torch.accelerator.current_device_index())


def _is_capturing(module: Any) -> bool:
    """Return whether the current stream of a kind of hardware is captured into a graph.

    Args:
        module: torch's module for the hardware, such as ``torch.cuda``.
    """
    # A module without this function cannot capture graphs.
    is_current_stream_capturing = getattr(module, "is_current_stream_capturing", None)
    return is_current_stream_capturing is not None and is_current_stream_capturing()


def _seed_streams(seed: int, rank: int) -> None:
    """Seed the process-wide streams of python, numpy (if it has been imported) and torch.

    Args:
        seed: a seed that numpy takes if ``rank`` is 0. Otherwise any integer.
        rank: 0 seeds each library with the seed itself. Any other rank seeds each library with a
            hash of the library's name, the seed and the rank, so that ranks get unrelated streams.
    """
    numpy = sys.modules.get("numpy")
    if rank == 0:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        torch.manual_seed(seed)
        return
    random.seed(_hash_to_64_bits("python", seed, rank))
    if numpy is not None:
        # numpy takes a seed of 64 bits only as two numbers of 32 bits, here (high, low).
        numpy.random.seed(divmod(_hash_to_64_bits("numpy", seed, rank), 2**32))
    torch.manual_seed(_hash_to_64_bits("torch", seed, rank))


def _hash_to_64_bits(*values: str | int) -> int:
    """Return a hash of the values that is the same in every process, unlike Python's ``hash``."""
    text = "/".join(map(str, values))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _read_numpy_state() -> list[Any] | None:
    """Return the state of numpy's stream as plain values, or None if there is no stream yet."""
    # numpy.random is not imported here, since its import would create the stream.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    algorithm, key, *position = numpy_random.get_state()
    # A list instead of an array, so that torch.load(weights_only=True) reads the state.
    return [algorithm, key.tolist(), *position]


def _write_numpy_state(state: list[Any]) -> None:
    """Set numpy's stream to a result of ``_read_numpy_state``, if numpy has been imported."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(tuple(state))


def _is_equal(left: Any, right: Any) -> bool:
    """Return whether two states of a stream are equal. None, a missing state, equals no state."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    # Types are compared first: comparing a tensor with another object does not return a bool.
    return type(left) is type(right) and left == right


# The functions that read and write the state of a global stream, by the name of the stream.
_READERS = {"python": random.getstate, "numpy": _read_numpy_state, "torch": torch.get_rng_state}
_WRITERS = {"python": random.setstate, "numpy": _write_numpy_state, "torch": torch.set_rng_state}
