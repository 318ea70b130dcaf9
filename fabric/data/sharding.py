"""Shards a loader over the ranks: the order of its sampler, or the samples of an iterable dataset."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice, zip_longest
from operator import is_not, itemgetter
from typing import Any, Literal, TypeVar

import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from fabric.data.position import EpochState, LoaderSpec, State, length_of
from fabric.errors import ConfigurationError
from fabric.seed import Streams

__all__ = ["AgreedStreams", "InterleavedIterable", "ShardedSampler", "shard"]

Uneven = Literal["pad", "drop", "shortest", "longest"]
Place = tuple[int, int]  # rank and number of replicas
FromRank0 = Callable[[str, bytes], bytes]
_T = TypeVar("_T")
_RANDOM_SAMPLERS = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
_NO_SAMPLE = object()
_DRAW = "draw"  # the phase in which the first entry is drawn


def shard(
    loader: DataLoader[Any],
    place: Place,
    *,
    enabled: bool,
    uneven: Uneven,
    from_rank0: FromRank0 | None,
    name: str,
) -> LoaderSpec:
    """Make a loader, which is a copy of the user's, iterate one rank's shard.

    Args:
        loader: changed in place.
        place: the rank, and the number of shards.
        enabled: False gives every rank the whole data.
        uneven: how an incomplete last round is handled.
        from_rank0: returns what rank 0 passed.
        name: of the loader.

    Raises:
        ConfigurationError: its sampler shards by itself, but for another rank or number of ranks.
    """
    dataset, (rank, replicas) = loader.dataset, place if enabled else (0, 1)
    own = () if loader.generator is None else (loader.generator,)
    indices = None
    base_seed = None
    if isinstance(dataset, IterableDataset):
        order = dataset
        streams = Streams()
        unit = "samples" if loader.batch_size is not None else "single samples"
        if replicas > 1 and not getattr(dataset, "shards_itself", False):
            object.__setattr__(
                loader, "dataset", InterleavedIterable(dataset, rank, replicas, uneven == "longest")
            )
            base_seed = AgreedStreams(
                Streams(generators=own) if own else Streams(("torch",)), from_rank0, name
            )
    else:
        order, unit, batches = _find_order(loader)
        streams = _streams_of(order, own)
        own_place = _place_of(order)
        if enabled and own_place is not None and own_place != place:
            raise ConfigurationError(
                f"setup_dataloaders(loader) with a {type(order).__name__} for rank {own_place[0]} of {own_place[1]}",
                f"this is rank {rank} of {replicas}: some samples would be seen twice, others never",
                "a sampler for this rank, or one that does not shard at all: fabric shards what it yields",
                f"DataLoader(dataset, shuffle=True), or the sampler with num_replicas={replicas}, rank={rank}",
            )
        if enabled and own_place is None and uneven not in ("pad", "drop"):
            request = f"setup_dataloaders(uneven={uneven!r}) for a {type(dataset).__name__}"
            problem = "fabric shards this data itself, so that all ranks get equally many batches"
            suggestion = (
                'uneven="pad" or "drop"; or use_distributed_sampler=False for data that you shard'
            )
            raise ConfigurationError(request, problem, suggestion=suggestion)
        shards = replicas if own_place is None else 1
        # Such a loader saves the states of its sampler and dataset: more than how to draw the order again.
        has_more = hasattr(order, "state_dict") or hasattr(dataset, "state_dict")
        if replicas > 1 or not (has_more and hasattr(type(loader), "state_dict")):
            agreed = AgreedStreams(streams, from_rank0 if shards > 1 else None, name)
            pads = uneven == "pad" and not (batches is not None and loader.drop_last)
            indices = ShardedSampler(order, (rank % shards, shards), pads, agreed, batches)
            object.__setattr__(
                loader, "sampler" if loader.batch_sampler is None else "batch_sampler", indices
            )
            if shards > 1 and batches is not None:
                object.__setattr__(loader, "sampler", indices.samples(EpochState(0)))
    generators = tuple(dict.fromkeys((*streams.generators, *own)))
    is_own = base_seed is None and getattr(dataset, "shards_itself", False)
    if not enabled and uneven not in (
        "pad",
        "drop",
    ):  # these are for data that ranks shard themselves
        replicas = place[1]
        is_own = _place_of(order) is None
    return LoaderSpec(
        dataset,
        loader.batch_size,
        order,
        unit,
        replicas,
        streams,
        generators,
        indices,
        base_seed,
        uneven,
        is_own,
    )


def _find_order(loader: DataLoader[Any]) -> tuple[Any, str, Any]:
    """The sampler that makes the order, the unit that it yields, and the batch sampler around it, if any."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return (
            loader.sampler,
            "batches" if isinstance(loader.sampler, BatchSampler) else "single samples",
            None,
        )
    if loader.batch_size is not None and hasattr(batches, "sampler"):
        return batches.sampler, "samples", batches
    return batches, "batches", None


def _place_of(sampler: Any) -> Place | None:
    """``(rank, num_replicas)`` of a sampler that shards by itself, as torch's ``DistributedSampler`` does."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        rank = getattr(candidate, "rank", None)
        num_replicas = getattr(candidate, "num_replicas", None)
        if isinstance(rank, int) and isinstance(num_replicas, int):
            return rank, num_replicas
    return None


def _streams_of(sampler: Any, own: tuple[torch.Generator, ...]) -> Streams:
    """The random streams that a sampler may draw from.

    Args:
        sampler: the streams of torch's own samplers are known exactly; any other may draw from all streams that the
            process shares, from the generators that it holds, and from the loader's.
        own: the loader's generator, if it has one.
    """
    kind = type(sampler)
    if kind in (SequentialSampler, list, tuple, range) or _place_of(sampler):
        return Streams()
    if kind is BatchSampler:
        return _streams_of(sampler.sampler, own)
    if kind in _RANDOM_SAMPLERS:
        return (
            Streams(shared=("torch",))
            if sampler.generator is None
            else Streams(generators=(sampler.generator,))
        )
    found = dict.fromkeys((*_generators_in(sampler), *own))
    return Streams(shared=("python", "numpy", "torch"), generators=tuple(found))


def _generators_in(sampler: Any) -> Iterator[torch.Generator]:
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, Sampler):
            yield from _generators_in(value)


class AgreedStreams:
    """Random streams from which all ranks draw the same numbers, although their own states may differ.

    Rank 0's states are published under ``loader/<name>/epoch/<n>``, where ``n`` counts the draws of this loader in
    this process: one per epoch, and two for a sampler that draws in its ``__iter__``.

    Args:
        streams: the streams to draw from.
        from_rank0: called with a key and this rank's bytes, returns rank 0's; ``None``: every rank draws from its own.
        name: of the loader, distinct among those of a job.
    """

    def __init__(self, streams: Streams, from_rank0: FromRank0 | None, name: str) -> None:
        self.streams = streams
        self._from_rank0 = from_rank0
        self._keys = map(f"loader/{name}/epoch/{{}}".format, count())

    def draw(self, action: Callable[[], _T], saved: State | None = None) -> tuple[State, _T]:
        """Run ``action`` from a saved state, or from rank 0's.

        A shared stream whose state differed from rank 0's is restored, since ranks may differ on purpose. One with the
        same state, and every generator, continues from where ``action`` left it, as without agreement. After drawing
        from a saved state all shared streams are restored.

        Returns:
            The states drawn from, and the result of ``action``.
        """
        own = state = self.streams.state()
        if saved is not None:
            state = saved
        elif self._from_rank0 is not None and self.streams:
            received = self._from_rank0(next(self._keys), pickle.dumps(own))
            state = pickle.loads(received)  # noqa: S301 - from a rank of this job
        if state is own:
            return own, action()
        self.streams.restore(state)
        result = action()
        self.streams.restore_shared(own, unless=state if saved is None else {})
        return state, result


class ShardedSampler:
    """This rank's shard of a sampler's order, see ``[Note: Data]``; torch's iterator takes its indices from it.

    With one replica everything is drawn when torch's own loop would draw it. With several, the order of a sampler with
    a length is drawn at once at the start of the epoch; without a length it is drawn round by round, from a private
    copy of the streams. Attributes are those of the loader's own sampler or batch sampler:
    ``loader.sampler.set_epoch(n)`` reaches it.

    Args:
        sampler: yields samples, or batches of them.
        place: the rank, and the number of shards.
        pads: whether entries from the start of the order are repeated until all shards are equally long; otherwise the
            incomplete last round is left out.
        streams: the streams that the sampler draws from.
        batches: the loader's own batch sampler, which groups samples into batches; None if the entries of the shard
            are fetched as they are.

    Attributes:
        epoch: the iteration that the next ``iter`` belongs to.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        place: Place,
        pads: bool,
        streams: AgreedStreams,
        batches: BatchSampler | None,
    ) -> None:
        self.sampler, (self.rank, self.num_replicas), self.pads = sampler, place, pads
        self._streams = streams
        self._batches = batches
        self.epoch = EpochState(0)

    def samples(self, epoch: EpochState) -> "ShardedSampler":
        """The same shard for one iteration, and without a batch sampler."""
        shard = copy.copy(self)
        shard.epoch = epoch
        shard._batches = None
        return shard

    def __len__(self) -> int:
        if self._batches is not None:
            return len(self._batched(self.epoch))
        return self.length(0)

    def length(self, skip: int) -> int:
        """The length of the shard of the order from entry ``skip`` on."""
        whole: int = len(self.sampler)  # pyright: ignore[reportArgumentType]  # raises TypeError as torch's samplers do
        length = max(0, whole - skip)
        return -(-length // self.num_replicas) if self.pads else length // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        # Bound here and not at the first item: by then another iteration may have begun. Iterating this object without
        # the loader, or twice, does not change the loader's position.
        epoch = EpochState(self.epoch.epoch) if _DRAW in self.epoch.drawn else self.epoch
        if self._batches is not None:
            return iter(self._batched(epoch))
        shard = self.samples(epoch)
        begin = partial(iter, self.sampler)
        # Some samplers draw their random numbers in __iter__; a generator function draws at the first item.
        is_lazy = inspect.isgeneratorfunction(getattr(type(self.sampler), "__iter__", None))
        order = begin() if is_lazy else shard._draw("begin", begin)
        # Drawn at the first item; chained, since a generator of ours would be resumed for every item.
        return chain.from_iterable(
            shard._draw(_DRAW, partial(shard._entries, order)) for _ in range(1)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in vars(self):
            raise AttributeError(name)
        return getattr(self.sampler if self._batches is None else self._batches, name)

    def _batched(self, epoch: EpochState) -> Any:
        batches: Any = copy.copy(self._batches)
        batches.sampler = self.samples(epoch)
        return batches

    def _draw(self, phase: str, action: Callable[[], _T]) -> _T:
        self.epoch.drawn[phase], result = self._streams.draw(action, self.epoch.replay.get(phase))
        return result

    def _entries(self, order: Iterator[Any]) -> Iterable[Any]:
        skip = self.epoch.skip
        replicas = self.num_replicas
        if replicas == 1:
            # At least the first entry, which makes a lazy sampler draw.
            received = list(islice(order, max(skip, 1)))
            return chain(received[skip:], order)
        if length_of(self.sampler) is None:
            first = list(
                islice(order, replicas)
            )  # not privately, so that the next epoch draws another order
            rest = islice(chain(first, order), skip, None)
            entries = list(islice(rest, replicas))
            private = Streams(self._streams.streams.shared)
            return self._rounds(entries, first, rest, private, private.state())
        # The indices of a sequential sampler need not be held in memory.
        whole = range(len(self.sampler)) if type(self.sampler) is SequentialSampler else list(order)
        complete = len(whole) - max(0, len(whole) - skip) % replicas
        shard = whole[skip + self.rank : complete : replicas]
        if complete < len(whole) and self.pads:
            shard = chain(shard, [whole[(complete + self.rank) % len(whole)]])
        return iter(shard)

    def _rounds(
        self,
        entries: list[Any],
        first: list[Any],
        order: Iterator[Any],
        streams: Streams,
        private: State,
    ) -> Iterator[Any]:
        """This rank's entry of each round, from ``entries`` on; the order begins with ``first`` and may have no end."""
        while entries:
            if len(entries) == self.num_replicas:
                yield entries[self.rank]
            elif self.pads:
                yield (entries + first * self.num_replicas)[self.rank]
            own = streams.state()
            streams.restore(private)
            entries = list(islice(order, self.num_replicas))
            private = streams.state()
            streams.restore(own)


class InterleavedIterable(IterableDataset[Any]):
    """One rank's samples of an iterable dataset that every rank iterates.

    The samples are taken in rounds of ``num_replicas``; this rank keeps its own of each. Only complete rounds count, so
    that all ranks get equally many, unless ``incomplete``: filling the last one would need samples from ahead. With
    worker processes each worker shards what it iterates itself, so up to ``num_replicas - 1`` samples are left out per
    worker. Every rank has to iterate the same samples in the same order: shuffle by epoch (``set_epoch``), or with a
    generator of the dataset's own.

    Attributes are read from and written to the dataset inside, so that a ``worker_init_fn`` that configures the copy
    in its worker (``get_worker_info().dataset.start = ...``) reaches it.

    Args:
        dataset: the user's dataset.
        rank: ``0 <= rank < num_replicas``.
        num_replicas: number of ranks that the samples are sharded over.
        incomplete: whether a last round in which only some ranks have a sample counts too.
    """

    def __init__(
        self, dataset: IterableDataset[Any], rank: int, num_replicas: int, incomplete: bool = False
    ) -> None:
        vars(self).update(
            _dataset=dataset, _rank=rank, _num_replicas=num_replicas, _incomplete=incomplete
        )

    def __iter__(self) -> Iterator[Any]:
        # iter(dataset) is called when torch calls iter: some datasets draw their order there.
        together = partial(zip_longest, fillvalue=_NO_SAMPLE) if self._incomplete else zip
        rounds = together(*[iter(self._dataset)] * self._num_replicas)
        return filter(partial(is_not, _NO_SAMPLE), map(itemgetter(self._rank), rounds))

    def __len__(self) -> int:
        # The last sample of a round that counts is this rank's, or that of the last rank.
        end = self._rank if self._incomplete else self._num_replicas - 1
        return len(range(end, len(self._dataset), self._num_replicas))

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods: ours count. While being unpickled there is no dataset yet.
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)
