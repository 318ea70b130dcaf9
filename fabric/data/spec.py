"""What a loader iterates over, and how fabric shards that: decided once, at setup."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
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
from fabric.seed import RandomStreams, WorkerStreams

__all__ = ["ActiveLoop", "LoaderSpec", "ShardRequest", "Uneven", "shard"]

Uneven = Literal["pad", "drop", "shortest", "longest"]

_Unit = Literal["samples", "single samples", "batches"]
# These policies end a loop on all ranks together, for data that fabric does not shard.
_LOCKSTEP_POLICIES = ("shortest", "longest")
_RANDOM_SAMPLERS = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


@dataclass(frozen=True)
class ShardRequest:
    """How the user wants a loader to be sharded.

    Attributes:
        rank: rank of this process, ``0 <= rank < num_replicas``.
        num_replicas: number of ranks.
        should_shard: whether fabric shards, unless the data is sharded already. If not, every rank
            has the whole data.
        uneven: what happens if ranks cannot get equally many samples or batches.
        from_rank0: called on every rank with a key and bytes, returns rank 0's bytes. None: each
            rank draws from its own random states.
        name: name of the loader, the same on all ranks.
    """

    rank: int
    num_replicas: int
    should_shard: bool
    uneven: Uneven
    from_rank0: FromRank0 | None
    name: str

    @property
    def shard_count(self) -> int:
        """Number of shards that fabric makes, unless the data is sharded already."""
        return self.num_replicas if self.should_shard else 1


@dataclass(frozen=True, eq=False)
class LoaderSpec:
    """How the batches of a loader are made; fixed at setup.

    The *order* is what the user's sampler or dataset yields in one epoch, in *entries*: samples, or
    whole batches. This rank gets the entries of its *shard* of the order.

    Attributes:
        dataset: the user's own dataset.
        batch_size: samples in one rank's batch. None without automatic batching.
        drop_last: whether the loader leaves an incomplete last batch out.
        order_source: the user's object that makes the order: a sampler, a batch sampler or an
            iterable dataset.
        unit: what an entry is: one of the samples that the loader groups into batches
            (``"samples"``), a sample of a loader without batching (``"single samples"``) or a whole
            batch (``"batches"``).
        num_replicas: ranks that the order is sharded over, by fabric or by the sampler itself.
        order_streams: the random streams that the order is drawn from.
        generators: the generators of the loader and its sampler.
        uneven: what happens if ranks cannot get equally many samples or batches.
        is_sharded_by_user: whether the ranks shard the data themselves, in a way unknown to fabric.
        sharded_sampler: the sampler that fabric put into the loader. None where fabric does not
            follow the indices: an iterable dataset, or a loader that keeps its own state.
        worker_seed_streams: the streams from which the base seed of the workers is drawn. None
            unless fabric shards an iterable dataset.
    """

    dataset: Any
    batch_size: int | None
    drop_last: bool
    order_source: Any
    unit: _Unit
    num_replicas: int
    order_streams: RandomStreams
    generators: tuple[torch.Generator, ...]
    uneven: Uneven
    is_sharded_by_user: bool
    sharded_sampler: ShardedSampler | None = None
    worker_seed_streams: SynchronizedStreams | None = None

    # See [Note: Uneven ranks] in lockstep.py.
    @property
    def ends_in_lockstep(self) -> bool:
        """Whether a loop ends on all ranks together."""
        return self.uneven in _LOCKSTEP_POLICIES

    @property
    def is_sharded_in_rounds(self) -> bool:
        """Whether fabric shards an iterable dataset: in rounds of one sample for each rank."""
        return self.worker_seed_streams is not None

    @property
    def shard_count(self) -> int:
        """Number of shards that fabric makes of the order: ``num_replicas`` or 1.

        It is 1 if fabric does not shard. The sampler or the dataset may shard by itself then.
        """
        if self.is_sharded_in_rounds:
            return self.num_replicas
        if self.sharded_sampler is not None:
            return self.sharded_sampler.num_replicas
        return 1

    @property
    def divided_length(self) -> int | None:
        """Number of entries that fabric divides over the ranks. None if unknown or not divided."""
        if self.shard_count == 1:
            return None
        return length_of(self.order_source)

    @property
    def has_equal_counts(self) -> bool:
        """Whether all ranks are sure to get equally many batches. Their number may be unknown."""
        # The user's object that makes the order.
        sampler = self.order_source
        if type(sampler) is BatchSampler:
            # The number of its batches depends only on the sampler in it.
            sampler = sampler.sampler
        # DistributedSampler has the same length on all ranks, and so has a subclass that inherits
        # its __len__.
        is_distributed = getattr(type(sampler), "__len__", None) is DistributedSampler.__len__
        # If fabric shards, it repeats or drops samples until all shards are equally long.
        is_sharded_by_fabric = self.shard_count > 1
        return is_sharded_by_fabric or is_distributed

    @property
    def entries_per_batch(self) -> int:
        """Entries of the order in a full batch of this rank."""
        if self.unit == "samples":
            return self.batch_size or 1
        return 1

    def shard_length(self, position: EpochPosition) -> int | None:
        """Return the number of entries that this rank receives in an iteration. None if unknown.

        Entries are samples or, if the user's sampler yields whole batches, batches. The entries
        that were received before the iteration began do not count.
        """
        if self.sharded_sampler is None or length_of(self.order_source) is None:
            return None
        return self.sharded_sampler.length(position.skipped_entries)

    def batch_count(self, position: EpochPosition) -> int | None:
        """Return the number of batches in an iteration on this rank. None if unknown."""
        entries = self.shard_length(position)
        if entries is None:
            return None
        full_batches, remaining_entries = divmod(entries, self.entries_per_batch)
        if remaining_entries > 0 and not self.drop_last:
            return full_batches + 1
        return full_batches

    def samples_of_batches(self, position: EpochPosition, batches: range) -> list[Any] | None:
        """Return the indices of the samples in batches that this rank has received.

        The order is drawn a second time from the same random states. Not a collective.

        Args:
            position: the position of the loop.
            batches: the numbers of the batches in the loop, from 0.

        Returns:
            The indices, or what the user's sampler yields. None if fabric does not know them, as in
            an iterable dataset.
        """
        if self.sharded_sampler is None:
            return None
        # An entry is an index, or what a batch sampler yields: the indices of a batch.
        size = self.entries_per_batch
        entries = self.sharded_sampler.draw_entries_again(position, batches.stop * size)
        received = entries[batches.start * size :]
        if self.unit != "batches":
            return received
        return list(chain.from_iterable(received))

    def repeated_entries(self, position: EpochPosition) -> int:
        """Return how many entries an iteration repeats so that all ranks get equally many.

        Entries are samples or, if the user's sampler yields whole batches, batches.
        """
        order_length = length_of(self.order_source)
        shard_length = self.shard_length(position)
        if self.shard_count == 1 or order_length is None or shard_length is None:
            return 0
        remaining = order_length - position.skipped_entries
        return max(0, shard_length * self.num_replicas - remaining)

    def cursor(self, position: EpochPosition) -> int:
        """Return the number of entries that all ranks together have received in this epoch.

        Entries are samples or, if the user's sampler yields whole batches, batches. A saved
        position holds this number, since it does not depend on the number of ranks. Entries that
        are repeated so that all ranks get equally many count, too, so the number can exceed the
        length of the order.
        """
        received_entries = position.received_batches * self.entries_per_batch
        length = self.shard_length(position)
        if length is not None:
            # The last batch may be short.
            received_entries = min(received_entries, length)
        if self.shard_count == self.num_replicas:
            # Fabric shards the order: skipped_entries counts the entries of all ranks.
            return position.skipped_entries + received_entries * self.num_replicas
        # The sampler or the dataset shards: skipped_entries counts the entries of this rank.
        return (position.skipped_entries + received_entries) * self.num_replicas

    def summary(self) -> State:
        """Return the properties that are compared when a saved position is loaded.

        Each saved position has them under these keys. When it is loaded, ``num_replicas`` may
        differ, and ``batch_size`` may differ unless the entries of the order are whole batches.
        """
        batch_size = self.batch_size
        if self.unit == "batches":
            batch_size = getattr(self.order_source, "batch_size", None)
        dataset_length = None
        if self.sharded_sampler is not None and not self.is_sharded_by_user:
            # None for a dataset without a length, whose sampler does not need the length.
            dataset_length = length_of(self.dataset)
        return {
            "unit": self.unit,
            "num_replicas": self.num_replicas,
            "batch_size": batch_size,
            "dataset_length": dataset_length,
            "sampler": type(self.order_source).__name__,
        }


@dataclass(eq=False)
class ActiveLoop:
    """A loop over a set-up loader that is running.

    The batches of all loops of a job are numbered together, in the order in which the user gets
    them. The start of a loop has a number of the same sequence.

    Attributes:
        spec: the loader's spec.
        position: the position of the loop.
        batch_number: number of the latest batch. Before the first batch, number of the start.
        previous_batch_number: number of the batch before the latest. At the first batch, number of
            the start. Negative before the first batch.
        was_gathered_for_metrics: whether ``fabric.gather_for_metrics`` was called in the loop.
        repeated_batches: number of batches that this rank got again, under ``"longest"``.
        worker_streams: the random streams that the user's ``worker_init_fn`` seeds. None if there
            is none, or if ranks need not have different streams.
    """

    spec: LoaderSpec
    position: EpochPosition
    batch_number: int
    worker_streams: WorkerStreams | None = None
    previous_batch_number: int = -1
    was_gathered_for_metrics: bool = False
    repeated_batches: int = 0


class _Order(NamedTuple):
    """The parts of a loader that make the order.

    Attributes:
        sampler: the user's sampler or batch sampler that makes the order.
        unit: what the sampler yields: samples or whole batches.
        batch_sampler: the batch sampler that groups the samples of ``sampler``, or None.
    """

    sampler: Any
    unit: _Unit
    batch_sampler: Any


class _SamplerShard(NamedTuple):
    """The shard that a sampler takes by itself."""

    rank: int
    num_replicas: int


def shard(loader: DataLoader[Any], request: ShardRequest) -> LoaderSpec:
    """Make a loader iterate one rank's shard, and return how its batches are made.

    Args:
        loader: a copy of the user's loader. It is changed in place.
        request: how the loader is to be sharded.

    Raises:
        ConfigurationError: the sampler shards by itself, but for another rank or number of ranks;
            or ``uneven`` is a policy for data that ranks shard themselves, and fabric shards this
            data.
    """
    if isinstance(loader.dataset, IterableDataset):
        spec = _shard_iterable(loader, loader.dataset, request)
    else:
        spec = _shard_order(loader, request)
    if not request.should_shard and spec.ends_in_lockstep:
        # With "shortest" and "longest" the user says that the data is sharded over all ranks: by
        # the sampler, or else in a way that fabric does not know.
        sampler_shards = _sampler_shard(spec.order_source) is not None
        return replace(
            spec, num_replicas=request.num_replicas, is_sharded_by_user=not sampler_shards
        )
    return spec


def _shard_iterable(
    loader: DataLoader[Any], dataset: IterableDataset[Any], request: ShardRequest
) -> LoaderSpec:
    """Shard the samples of an iterable dataset, unless the dataset shards by itself.

    In each round of ``num_replicas`` samples, every rank keeps one. For this, all ranks must
    iterate the same samples. So the workers need the same base seed on all ranks, which is drawn
    from the ``worker_seed_streams`` of the spec.

    Args:
        loader: the prepared loader. Its dataset is replaced.
        dataset: the loader's dataset.
        request: how the loader is to be sharded.
    """
    # Users set this attribute on a dataset whose data differs between ranks.
    is_sharded_by_user: bool = getattr(dataset, "shards_itself", False)
    generators = _loader_generators(loader)
    worker_seed_streams = None
    if request.shard_count > 1 and not is_sharded_by_user:
        shard_of_rank = InterleavedIterable(
            dataset,
            rank=request.rank,
            num_replicas=request.num_replicas,
            includes_incomplete=request.uneven == "longest",
        )
        _replace_attribute(loader, "dataset", shard_of_rank)
        # torch draws the base seed from the loader's generator, or else from the global stream.
        seed_streams = RandomStreams(("torch",))
        if generators:
            seed_streams = RandomStreams(generators=generators)
        worker_seed_streams = SynchronizedStreams(seed_streams, request.from_rank0, request.name)
    return LoaderSpec(
        dataset=dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        order_source=dataset,
        unit="single samples" if loader.batch_size is None else "samples",
        num_replicas=request.shard_count,
        order_streams=RandomStreams(),
        generators=generators,
        uneven=request.uneven,
        is_sharded_by_user=is_sharded_by_user,
        worker_seed_streams=worker_seed_streams,
    )


def _shard_order(loader: DataLoader[Any], request: ShardRequest) -> LoaderSpec:
    """Shard the order of a map-style dataset, unless the sampler shards by itself.

    The *order* is what the user's sampler yields in one epoch. This function puts a sampler of
    fabric into the loader, which yields this rank's shard of the order. A job of one rank gets this
    sampler, too, so that fabric can save how the order was drawn, and draw the order again after a
    resume. But a loader with a ``state_dict`` of its own may save more, and then keeps its sampler.

    Args:
        loader: the prepared loader. Its sampler or batch sampler is replaced.
        request: how the loader is to be sharded.
    """
    order = _find_order(loader)
    loader_generators = _loader_generators(loader)
    order_streams = _streams_of(order.sampler, loader_generators)
    # If fabric is not to shard, the user may shard in any way, so there is nothing to check.
    if request.should_shard:
        _check_order(loader, order.sampler, request)
    has_several_shards = request.shard_count > 1
    sharded_sampler = None
    if has_several_shards or not _saves_more_than_order(loader, order.sampler):
        sharded_sampler = _build_sampler(loader, order, order_streams, request)
        _install_sampler(loader, order, sharded_sampler)
    # dict.fromkeys drops a generator that both lists have, and keeps the order.
    generators = dict.fromkeys((*order_streams.generators, *loader_generators))
    return LoaderSpec(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        order_source=order.sampler,
        unit=order.unit,
        num_replicas=request.shard_count,
        order_streams=order_streams,
        generators=tuple(generators),
        uneven=request.uneven,
        # Users set this attribute on a dataset whose data differs between ranks.
        is_sharded_by_user=getattr(loader.dataset, "shards_itself", False),
        sharded_sampler=sharded_sampler,
    )


def _find_order(loader: DataLoader[Any]) -> _Order:
    """Return the sampler that makes the order of a loader, and the unit of the order.

    An *entry* is one item of the order:

    - Without automatic batching (``batch_size=None``), the sampler's items are the entries.
    - With a batch sampler that torch made for a ``batch_size``, the samples are the entries.
    - With a batch sampler that the user passed, whole batches are the entries.
    """
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        yields_batches = isinstance(loader.sampler, BatchSampler)
        unit = "batches" if yields_batches else "single samples"
        return _Order(sampler=loader.sampler, unit=unit, batch_sampler=None)
    # torch sets batch_size to None if the user passed a batch sampler. But a subclass of DataLoader
    # may have replaced the batch sampler that torch made by one without a ``sampler``.
    if loader.batch_size is not None and hasattr(batch_sampler, "sampler"):
        return _Order(sampler=batch_sampler.sampler, unit="samples", batch_sampler=batch_sampler)
    return _Order(sampler=batch_sampler, unit="batches", batch_sampler=None)


def _check_order(loader: DataLoader[Any], sampler: Any, request: ShardRequest) -> None:
    """Raise a ConfigurationError if the order cannot be sharded as requested.

    A sampler that shards by itself must do so for this rank and number of ranks. The order of any
    other sampler is sharded by fabric. Then ``uneven`` must be ``"pad"`` or ``"drop"``, and not one
    of ``_LOCKSTEP_POLICIES``, which are for data that fabric does not shard.
    """
    sampler_shard = _sampler_shard(sampler)
    rank = request.rank
    replicas = request.num_replicas
    if sampler_shard is None:
        if request.uneven in _LOCKSTEP_POLICIES:
            raise ConfigurationError(
                f"setup_dataloaders(uneven={request.uneven!r}) for a "
                f"{type(loader.dataset).__name__}",
                problem="fabric shards this data itself, so that all ranks get equally many "
                "batches",
                suggestion='uneven="pad" or "drop"; or use_distributed_sampler=False for data '
                "that you shard",
            )
    elif sampler_shard != (rank, replicas):
        raise ConfigurationError(
            f"setup_dataloaders(loader) with a {type(sampler).__name__} for rank "
            f"{sampler_shard.rank} of {sampler_shard.num_replicas}",
            problem=f"this is rank {rank} of {replicas}: some samples would be seen twice, others "
            "never",
            expected="a sampler for this rank, or one that does not shard at all: fabric shards "
            "what it yields",
            suggestion="DataLoader(dataset, shuffle=True), or the sampler with "
            f"num_replicas={replicas}, rank={rank}",
        )


def _saves_more_than_order(loader: DataLoader[Any], sampler: Any) -> bool:
    """Return whether a stateful loader saves more than fabric could restore.

    Such a loader (torchdata's ``StatefulDataLoader``) saves the states of its sampler and dataset.
    fabric saves only how to draw the order again, and would lose these states. So the caller leaves
    the sampler alone on one rank.
    """
    is_stateful = hasattr(type(loader), "state_dict")
    if not is_stateful:
        return False
    return hasattr(sampler, "state_dict") or hasattr(loader.dataset, "state_dict")


def _build_sampler(
    loader: DataLoader[Any], order: _Order, order_streams: RandomStreams, request: ShardRequest
) -> ShardedSampler:
    """Return the sampler that yields this rank's shard of the order.

    If fabric does not shard the order, the shard is all that the user's sampler yields.
    """
    sampler_shards_itself = _sampler_shard(order.sampler) is not None
    if request.shard_count > 1 and not sampler_shards_itself:
        rank = request.rank
        num_replicas = request.shard_count
        from_rank0 = request.from_rank0
    else:
        rank = 0
        num_replicas = 1
        # Only ranks that divide one order among them have to draw the same order.
        from_rank0 = None
    # With drop_last, the plain loop leaves the samples of an incomplete last batch out. So fabric
    # leaves an incomplete last round out and does not pad it. Entries that the loader does not
    # group into batches are not subject to drop_last.
    drops_last = order.batch_sampler is not None and loader.drop_last
    return ShardedSampler(
        order.sampler,
        rank=rank,
        num_replicas=num_replicas,
        pads=request.uneven == "pad" and not drops_last,
        streams=SynchronizedStreams(order_streams, from_rank0, request.name),
        batch_sampler=order.batch_sampler,
    )


def _install_sampler(
    loader: DataLoader[Any], order: _Order, sharded_sampler: ShardedSampler
) -> None:
    """Replace the sampler or batch sampler of the prepared loader by the sharded one."""
    if loader.batch_sampler is None:  # without automatic batching, torch iterates the sampler
        _replace_attribute(loader, "sampler", sharded_sampler)
        return
    _replace_attribute(loader, "batch_sampler", sharded_sampler)
    are_samples_sharded = sharded_sampler.num_replicas > 1 and order.batch_sampler is not None
    if are_samples_sharded:
        # torch iterates only the batch sampler. ``loader.sampler`` is for users and subclasses that
        # read it: it yields the samples of this rank, as a DistributedSampler does.
        sampler = sharded_sampler.entry_sampler_at(EpochPosition(0))
        _replace_attribute(loader, "sampler", sampler)


def _replace_attribute(loader: DataLoader[Any], name: str, value: Any) -> None:
    # The __setattr__ of DataLoader refuses to replace what its constructor has set.
    object.__setattr__(loader, name, value)


def _loader_generators(loader: DataLoader[Any]) -> tuple[torch.Generator, ...]:
    """Return the generator that the user passed to the loader, or nothing."""
    if loader.generator is None:
        return ()
    return (loader.generator,)


def _sampler_shard(sampler: Any) -> _SamplerShard | None:
    """Return the shard that a sampler takes by itself, as torch's DistributedSampler does.

    None if the sampler does not shard. The sampler within a batch sampler counts, too.
    """
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        rank = getattr(candidate, "rank", None)
        num_replicas = getattr(candidate, "num_replicas", None)
        if isinstance(rank, int) and isinstance(num_replicas, int):
            return _SamplerShard(rank, num_replicas)
    return None


def _streams_of(sampler: Any, loader_generators: tuple[torch.Generator, ...]) -> RandomStreams:
    """Return the random streams that a sampler may draw from.

    The states of these streams are saved, synchronized and replayed to draw the order again.

    Args:
        sampler: the user's sampler. The streams of torch's own samplers are known exactly. Any
            other sampler may draw from all global streams, from the generators that it holds, and
            from the loader's generator.
        loader_generators: the loader's generator, if it has one.
    """
    # A subclass may draw from more streams, so types are compared exactly.
    sampler_type = type(sampler)
    has_fixed_order = sampler_type in (SequentialSampler, list, tuple, range)
    # A sampler that shards by itself has to draw the same order on all ranks without fabric's help.
    # So it draws from no stream of the process: torch's seeds a generator by its seed and epoch.
    shards_itself = _sampler_shard(sampler) is not None
    if has_fixed_order or shards_itself:
        return RandomStreams()
    if sampler_type is BatchSampler:
        return _streams_of(sampler.sampler, loader_generators)
    if sampler_type in _RANDOM_SAMPLERS:
        if sampler.generator is None:
            # torch's samplers then draw from torch's global stream.
            return RandomStreams(global_streams=("torch",))
        return RandomStreams(generators=(sampler.generator,))
    # dict.fromkeys drops a generator that both lists have, and keeps the order.
    generators = dict.fromkeys((*_generators_in(sampler), *loader_generators))
    return RandomStreams(global_streams=("python", "numpy", "torch"), generators=tuple(generators))


def _generators_in(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators in the attributes of a sampler, and of the samplers that it holds."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, Sampler):
            yield from _generators_in(value)
