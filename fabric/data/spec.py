"""What a loader iterates over, and how fabric shards that: decided once, at setup."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.utils import data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from fabric.data.position import EpochPosition, State, length_of
from fabric.data.sharding import (
    FromRank0,
    InterleavedIterable,
    ShardedSampler,
    SynchronizedStreams,
)
from fabric.errors import ConfigurationError
from fabric.seed import RandomStreams

__all__ = ["ActiveLoop", "LoaderSpec", "ShardRequest", "Uneven", "shard"]

Uneven = Literal["pad", "drop", "shortest", "longest"]

_Unit = Literal["samples", "single samples", "batches"]
_LOCKSTEP = ("shortest", "longest")  # for data that fabric does not shard
_RANDOM_SAMPLERS = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


@dataclass(frozen=True)
class ShardRequest:
    """How the user wants a loader to be sharded.

    Attributes:
        rank: rank of this process, ``0 <= rank < num_replicas``.
        num_replicas: number of ranks.
        is_enabled: whether fabric shards. If not, every rank has the whole data.
        uneven: what happens if ranks cannot get equally many samples or batches.
        from_rank0: called on every rank with a key and bytes, returns rank 0's bytes. None: each
            rank draws from its own random states.
        name: name of the loader, the same on all ranks.
    """

    rank: int
    num_replicas: int
    is_enabled: bool
    uneven: Uneven
    from_rank0: FromRank0 | None
    name: str

    @property
    def shards(self) -> int:
        """Number of shards that fabric makes, unless the data is sharded already."""
        return self.num_replicas if self.is_enabled else 1


@dataclass(frozen=True, eq=False)
class LoaderSpec:
    """How the batches of a loader are made; fixed at setup.

    Attributes:
        dataset: the user's own dataset.
        batch_size: samples in one rank's batch. None without automatic batching.
        drop_last: whether the loader leaves an incomplete last batch out.
        order: the user's own sampler or batch sampler that makes the order; the dataset if it is
            iterable.
        unit: what the cursor counts; see ``[Note: Data]`` in ``position.py``.
        num_replicas: ranks that the order is sharded over, by fabric or by the sampler itself.
        streams: the random streams that the order is drawn from.
        generators: the generators of the loader and its sampler.
        uneven: what happens if ranks cannot get equally many samples or batches.
        is_sharded_by_user: whether the ranks shard the data themselves, in a way unknown to fabric.
        sharded_sampler: the sampler that fabric put into the loader. None where fabric does not
            follow the indices: an iterable dataset, or a loader that keeps its own state.
        worker_seed: the streams from which the base seed of the workers is drawn, for an iterable
            dataset that fabric shards.
    """

    dataset: Any
    batch_size: int | None
    drop_last: bool
    order: Any
    unit: _Unit
    num_replicas: int
    streams: RandomStreams
    generators: tuple[torch.Generator, ...]
    uneven: Uneven
    is_sharded_by_user: bool
    sharded_sampler: ShardedSampler | None = None
    worker_seed: SynchronizedStreams | None = None

    @property
    def ends_in_lockstep(self) -> bool:
        """Whether a loop ends on all ranks together; see ``[Note: Uneven ranks]``."""
        return self.uneven in _LOCKSTEP

    @property
    def shards(self) -> int:
        """Number of shards that fabric makes of the order: ``num_replicas``, or 1 for no sharding.

        In the second case, the sampler or the dataset may shard.
        """
        if self.worker_seed is not None:
            return self.num_replicas
        if self.sharded_sampler is not None:
            return self.sharded_sampler.num_replicas
        return 1

    @property
    def has_equal_counts(self) -> bool:
        """Whether all ranks get equally many batches, however many there are."""
        sampler = self.order
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        is_torchs = getattr(type(sampler), "__len__", None) is DistributedSampler.__len__
        return self.shards > 1 or is_torchs

    @property
    def entries_per_batch(self) -> int:
        """Entries of the order in a full batch of this rank."""
        if self.unit == "samples":
            return self.batch_size or 1
        return 1

    def shard_length(self, position: EpochPosition) -> int | None:
        """Return the number of entries that this rank receives in an iteration. None if unknown."""
        if self.sharded_sampler is None or length_of(self.order) is None:
            return None
        return self.sharded_sampler.length(position.skipped_entries)

    def batch_count(self, position: EpochPosition) -> int | None:
        """Return the number of batches in an iteration on this rank. None if unknown."""
        entries = self.shard_length(position)
        if entries is None:
            return None
        full_batches, incomplete = divmod(entries, self.entries_per_batch)
        if incomplete and not self.drop_last:
            return full_batches + 1
        return full_batches

    def cursor(self, position: EpochPosition) -> int:
        """Return the number of entries that all ranks together have received in this epoch."""
        received_entries = position.received_batches * self.entries_per_batch
        length = self.shard_length(position)
        if length is not None:
            # The last batch may be short.
            received_entries = min(received_entries, length)
        if self.shards == self.num_replicas:
            # Fabric shards the order, and ``skip`` counts the entries of all ranks. Entries that
            # are repeated to fill the last round count as received.
            return position.skipped_entries + received_entries * self.num_replicas
        # The sampler or the dataset shards, and both numbers count the entries of this rank.
        return (position.skipped_entries + received_entries) * self.num_replicas

    def summary(self) -> State:
        """Return the properties that must match to load a saved position."""
        batch_size = self.batch_size
        if self.unit == "batches":
            batch_size = getattr(self.order, "batch_size", None)
        dataset_length = None
        if self.sharded_sampler is not None and not self.is_sharded_by_user:
            # A dataset need not have a length when its sampler knows one.
            dataset_length = length_of(self.dataset)
        return {
            "unit": self.unit,
            "num_replicas": self.num_replicas,
            "batch_size": batch_size,
            "dataset_length": dataset_length,
            "sampler": type(self.order).__name__,
        }


class ActiveLoop(NamedTuple):
    """A loop over a set-up loader that is running.

    Attributes:
        spec: the loader's spec.
        position: the position of the loop.
    """

    spec: LoaderSpec
    position: EpochPosition


class _Order(NamedTuple):
    sampler: Any
    """Makes the order."""
    unit: _Unit
    """What the sampler yields."""
    batch_sampler: Any
    """The batch sampler around the sampler, or None."""


class _Share(NamedTuple):
    rank: int
    num_replicas: int


def shard(loader: DataLoader[Any], request: ShardRequest) -> LoaderSpec:
    """Make a loader iterate one rank's shard.

    Args:
        loader: a copy of the user's loader. It is changed in place.
        request: how the loader is to be sharded.

    Raises:
        ConfigurationError: the sampler shards by itself, but for another rank or number of ranks;
            or ``uneven`` is a policy for data that ranks shard themselves, and fabric shards this.
    """
    if isinstance(loader.dataset, IterableDataset):
        spec = _shard_iterable(loader, loader.dataset, request)
    else:
        spec = _shard_order(loader, request)
    if not request.is_enabled and spec.ends_in_lockstep:
        return replace(
            spec,
            num_replicas=request.num_replicas,
            is_sharded_by_user=_share_of(spec.order) is None,
        )
    return spec


def _shard_iterable(
    loader: DataLoader[Any], dataset: IterableDataset[Any], request: ShardRequest
) -> LoaderSpec:
    is_sharded_by_user: bool = getattr(dataset, "shards_itself", False)
    generators = _own_generators(loader)
    worker_seed = None
    if request.shards > 1 and not is_sharded_by_user:
        includes_incomplete = request.uneven == "longest"
        shard_of_rank = InterleavedIterable(
            dataset, request.rank, request.num_replicas, includes_incomplete
        )
        _replace_attribute(loader, "dataset", shard_of_rank)
        seed_streams = (
            RandomStreams(generators=generators) if generators else RandomStreams(("torch",))
        )
        worker_seed = SynchronizedStreams(seed_streams, request.from_rank0, request.name)
    return LoaderSpec(
        dataset=dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        order=dataset,
        unit="single samples" if loader.batch_size is None else "samples",
        num_replicas=request.shards,
        streams=RandomStreams(),
        generators=generators,
        uneven=request.uneven,
        is_sharded_by_user=is_sharded_by_user,
        worker_seed=worker_seed,
    )


def _shard_order(loader: DataLoader[Any], request: ShardRequest) -> LoaderSpec:
    order = _find_order(loader)
    generators = _own_generators(loader)
    streams = _streams_of(order.sampler, generators)
    if request.is_enabled:
        _check_order(loader, order.sampler, request)
    sharded_sampler = None
    if request.shards > 1 or not _keeps_more_state(loader, order.sampler):
        sharded_sampler = _build_sampler(loader, order, streams, request)
        _install_sampler(loader, order, sharded_sampler)
    return LoaderSpec(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        order=order.sampler,
        unit=order.unit,
        num_replicas=request.shards,
        streams=streams,
        generators=tuple(dict.fromkeys((*streams.generators, *generators))),
        uneven=request.uneven,
        is_sharded_by_user=getattr(loader.dataset, "shards_itself", False),
        sharded_sampler=sharded_sampler,
    )


def _find_order(loader: DataLoader[Any]) -> _Order:
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        yields_batches = isinstance(loader.sampler, BatchSampler)
        unit = "batches" if yields_batches else "single samples"
        return _Order(loader.sampler, unit, None)
    if loader.batch_size is not None and hasattr(batch_sampler, "sampler"):
        return _Order(batch_sampler.sampler, "samples", batch_sampler)
    return _Order(batch_sampler, "batches", None)


def _check_order(loader: DataLoader[Any], sampler: Any, request: ShardRequest) -> None:
    """Raise a ConfigurationError if the sampler or the policy does not fit sharding by fabric."""
    share = _share_of(sampler)
    rank = request.rank
    replicas = request.num_replicas
    if share is None:
        if request.uneven in _LOCKSTEP:
            raise ConfigurationError(
                f"setup_dataloaders(uneven={request.uneven!r}) for a "
                f"{type(loader.dataset).__name__}",
                problem="fabric shards this data itself, so that all ranks get equally many "
                "batches",
                suggestion='uneven="pad" or "drop"; or use_distributed_sampler=False for data '
                "that you shard",
            )
    elif share != (rank, replicas):
        raise ConfigurationError(
            f"setup_dataloaders(loader) with a {type(sampler).__name__} for rank {share.rank} of "
            f"{share.num_replicas}",
            problem=f"this is rank {rank} of {replicas}: some samples would be seen twice, others "
            "never",
            expected="a sampler for this rank, or one that does not shard at all: fabric shards "
            "what it yields",
            suggestion="DataLoader(dataset, shuffle=True), or the sampler with "
            f"num_replicas={replicas}, rank={rank}",
        )


def _keeps_more_state(loader: DataLoader[Any], sampler: Any) -> bool:
    """Return whether a stateful loader saves more than fabric could restore.

    Such a loader saves the states of its sampler and dataset, and not only how to draw the order
    again. On one rank it keeps its own sampler.
    """
    if not hasattr(type(loader), "state_dict"):
        return False
    return hasattr(sampler, "state_dict") or hasattr(loader.dataset, "state_dict")


def _build_sampler(
    loader: DataLoader[Any], order: _Order, streams: RandomStreams, request: ShardRequest
) -> ShardedSampler:
    shards = request.shards
    if _share_of(order.sampler) is not None:
        shards = 1  # the sampler shards by itself
    # The plain loop of a loader with drop_last leaves the incomplete last batch out, too.
    drops_last = order.batch_sampler is not None and loader.drop_last
    from_rank0 = request.from_rank0 if shards > 1 else None
    return ShardedSampler(
        order.sampler,
        rank=request.rank % shards,
        num_replicas=shards,
        pads=request.uneven == "pad" and not drops_last,
        streams=SynchronizedStreams(streams, from_rank0, request.name),
        batch_sampler=order.batch_sampler,
    )


def _install_sampler(
    loader: DataLoader[Any], order: _Order, sharded_sampler: ShardedSampler
) -> None:
    if loader.batch_sampler is None:
        _replace_attribute(loader, "sampler", sharded_sampler)
        return
    _replace_attribute(loader, "batch_sampler", sharded_sampler)
    if sharded_sampler.num_replicas > 1 and order.batch_sampler is not None:
        _replace_attribute(loader, "sampler", sharded_sampler.without_batches(EpochPosition(0)))


def _replace_attribute(loader: DataLoader[Any], name: str, value: Any) -> None:
    # torch's __setattr__ refuses to replace what the constructor set.
    object.__setattr__(loader, name, value)


def _own_generators(loader: DataLoader[Any]) -> tuple[torch.Generator, ...]:
    if loader.generator is None:
        return ()
    return (loader.generator,)


def _share_of(sampler: Any) -> _Share | None:
    """Return the share of a sampler that shards by itself, as ``DistributedSampler``. Or None."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        rank = getattr(candidate, "rank", None)
        num_replicas = getattr(candidate, "num_replicas", None)
        if isinstance(rank, int) and isinstance(num_replicas, int):
            return _Share(rank, num_replicas)
    return None


def _streams_of(sampler: Any, own_generators: tuple[torch.Generator, ...]) -> RandomStreams:
    """Return the random streams that a sampler may draw from.

    Args:
        sampler: the streams of torch's own samplers are known exactly. Any other sampler may draw
            from all streams that the process shares, from the generators that it holds, and from
            the loader's generator.
        own_generators: the loader's generator, if it has one.
    """
    sampler_type = type(sampler)
    if sampler_type in (SequentialSampler, list, tuple, range) or _share_of(sampler) is not None:
        return RandomStreams()
    if sampler_type is BatchSampler:
        return _streams_of(sampler.sampler, own_generators)
    if sampler_type in _RANDOM_SAMPLERS:
        if sampler.generator is None:
            return RandomStreams(global_streams=("torch",))
        return RandomStreams(generators=(sampler.generator,))
    generators = dict.fromkeys((*_generators_in(sampler), *own_generators))
    return RandomStreams(global_streams=("python", "numpy", "torch"), generators=tuple(generators))


def _generators_in(sampler: Any) -> Iterator[torch.Generator]:
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, Sampler):
            yield from _generators_in(value)
