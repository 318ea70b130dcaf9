"""The iteration over one rank's shard: of a sampler's order, or of an iterable dataset."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice, zip_longest
from operator import is_not, itemgetter
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from fabric.data.position import EpochPosition, State, length_of
from fabric.seed import RandomStreams

__all__ = ["FromRank0", "InterleavedIterable", "ShardedSampler", "SynchronizedStreams"]

FromRank0 = Callable[[str, bytes], bytes]
T = TypeVar("T")

_NO_SAMPLE = object()
# The phases in which an order is drawn: in the sampler's ``__iter__``, or at the first entry.
_BEGIN = "begin"
_DRAW = "draw"


class SynchronizedStreams:
    """Random streams from which all ranks draw the same numbers, although their own states differ.

    Rank 0's states are published under ``loader/<name>/epoch/<n>``, where ``n`` counts the draws
    of this loader in this process: one per epoch, and two for a sampler that draws in its
    ``__iter__``.

    Args:
        streams: the streams to draw from.
        from_rank0: called on every rank with a key and bytes, returns rank 0's bytes. None: each
            rank draws from its own states.
        name: name of the loader, distinct among those of a job.
    """

    def __init__(self, streams: RandomStreams, from_rank0: FromRank0 | None, name: str) -> None:
        self.streams = streams
        self._from_rank0 = from_rank0
        self._name = name
        self._draws = count()

    def draw(self, action: Callable[[], T], saved: State | None = None) -> tuple[State, T]:
        """Run ``action`` from a saved state, or from rank 0's.

        A shared stream whose state differed from rank 0's is restored, since ranks may differ on
        purpose. A shared stream with the same state, and every generator, continues from where
        ``action`` left it, as without synchronization. After a draw from a saved state all shared
        streams are restored.

        Args:
            action: draws the numbers.
            saved: the state to draw from. None draws from rank 0's state.

        Returns:
            The states drawn from, and the result of ``action``.
        """
        local_state = self.streams.state()
        if saved is not None:
            self.streams.restore(saved)
            result = action()
            self.streams.restore_global_streams(local_state, unless={})
            return saved, result
        if self._from_rank0 is None or not self.streams:
            return local_state, action()
        key = f"loader/{self._name}/epoch/{next(self._draws)}"
        received = self._from_rank0(key, pickle.dumps(local_state))
        state: State = pickle.loads(received)  # noqa: S301 - from a rank of this job
        self.streams.restore(state)
        result = action()
        self.streams.restore_global_streams(local_state, unless=state)
        return state, result


class ShardedSampler:
    """This rank's shard of a sampler's order; torch's iterator takes its indices from it.

    See ``[Note: Data]`` in ``position.py``. With one replica everything is drawn when torch's own
    loop would draw it. With several, the order of a sampler with a length is drawn at once at the
    start of the epoch. An order without a length is drawn round by round, from a private copy of
    the streams. Attributes are those of the loader's own sampler or batch sampler:
    ``loader.sampler.set_epoch(n)`` reaches it.

    Args:
        sampler: yields samples, or batches of samples.
        rank: number of this shard.
        num_replicas: number of shards.
        pads: whether entries from the start of the order are repeated until all shards are equally
            long. If not, the incomplete last round is left out.
        streams: the streams that the sampler draws from.
        batch_sampler: the loader's own batch sampler, which groups samples into batches. None if
            the entries of the shard are fetched as they are.

    Attributes:
        position: the iteration that the next ``iter`` belongs to.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        *,
        rank: int,
        num_replicas: int,
        pads: bool,
        streams: SynchronizedStreams,
        batch_sampler: BatchSampler | None,
    ) -> None:
        self.sampler = sampler
        self.rank = rank
        self.num_replicas = num_replicas
        self.pads = pads
        self.position = EpochPosition(0)
        self._streams = streams
        self._batch_sampler = batch_sampler

    def samples(self, position: EpochPosition) -> "ShardedSampler":
        """Return the same shard for one iteration, without the batch sampler."""
        shard = copy.copy(self)
        shard.position = position
        shard._batch_sampler = None
        return shard

    def __len__(self) -> int:
        if self._batch_sampler is not None:
            return len(self._batches(self.position))
        return self.length(0)

    def length(self, skip: int) -> int:
        """Return the length of this shard of the order from entry ``skip`` on."""
        sampler: Any = self.sampler
        # Raises a TypeError if there is none, as torch's samplers do.
        order_length = len(sampler)
        remaining = max(0, order_length - skip)
        if self.pads:
            return -(-remaining // self.num_replicas)
        return remaining // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        # The position is read now: at the first item, another iteration may have begun.
        position = self.position
        if _DRAW in position.drawn_states:
            # To iterate this object without the loader, or twice, does not change the loader's
            # position.
            position = EpochPosition(position.epoch)
        if self._batch_sampler is not None:
            return iter(self._batches(position))
        shard = self.samples(position)
        # Some samplers draw their random numbers in __iter__; a generator function draws at the
        # first item.
        if inspect.isgeneratorfunction(getattr(type(self.sampler), "__iter__", None)):
            order = iter(self.sampler)
        else:
            order = shard._draw(_BEGIN, partial(iter, self.sampler))
        # A chain, since a generator of ours would be resumed for every item. Its one element is
        # drawn when the first item is asked for.
        draw_entries = partial(shard._draw, _DRAW, partial(shard._entries, order))
        return chain.from_iterable(draw() for draw in [draw_entries])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batch_sampler" not in vars(self):
            raise AttributeError(name)
        if self._batch_sampler is None:
            return getattr(self.sampler, name)
        return getattr(self._batch_sampler, name)

    def _batches(self, position: EpochPosition) -> Any:
        batch_sampler: Any = copy.copy(self._batch_sampler)
        batch_sampler.sampler = self.samples(position)
        return batch_sampler

    def _draw(self, phase: str, action: Callable[[], T]) -> T:
        saved = self.position.states_to_replay.get(phase)
        self.position.drawn_states[phase], result = self._streams.draw(action, saved)
        return result

    def _entries(self, order: Iterator[Any]) -> Iterable[Any]:
        """Return this rank's entries of an order, without those received before."""
        skip = self.position.skipped_entries
        if self.num_replicas == 1:
            # At least one entry is read now: a lazy sampler draws its random numbers at the first
            # entry, and has to draw them before this method returns.
            received = list(islice(order, max(skip, 1)))
            return chain(received[skip:], order)
        if length_of(self.sampler) is None:
            return self._entries_of_unsized(order)
        # The indices of a sequential sampler need not be held in memory.
        if type(self.sampler) is SequentialSampler:
            entries = range(len(self.sampler))
        else:
            entries = list(order)
        length = len(entries)
        remaining = max(0, length - skip)
        end_of_full_rounds = length - remaining % self.num_replicas
        shard = entries[skip + self.rank : end_of_full_rounds : self.num_replicas]
        if end_of_full_rounds < length and self.pads:
            # The last round has the entries that remain, and then entries from the start.
            last_entry = entries[(end_of_full_rounds + self.rank) % length]
            return chain(shard, [last_entry])
        return iter(shard)

    def _entries_of_unsized(self, order: Iterator[Any]) -> Iterator[Any]:
        # The first rounds are drawn from the process's own streams, so that the next epoch draws
        # another order.
        first_round = list(islice(order, self.num_replicas))
        remaining = islice(chain(first_round, order), self.position.skipped_entries, None)
        next_round = list(islice(remaining, self.num_replicas))
        streams = RandomStreams(self._streams.streams.global_streams)
        return self._rounds(next_round, first_round, remaining, streams, streams.state())

    def _rounds(
        self,
        entries: list[Any],
        first_round: list[Any],
        order: Iterator[Any],
        streams: RandomStreams,
        private_state: State,
    ) -> Iterator[Any]:
        """Yield this rank's entry of each round.

        Args:
            entries: the next round.
            first_round: the first round of the order, for padding.
            order: the entries after the next round. It may have no end.
            streams: the streams that later rounds are drawn from.
            private_state: their state for the next draw; other code does not see it.
        """
        while entries:
            if len(entries) == self.num_replicas:
                yield entries[self.rank]
            elif self.pads:
                padded = entries + first_round * self.num_replicas
                yield padded[self.rank]
            shared_state = streams.state()
            streams.restore(private_state)
            entries = list(islice(order, self.num_replicas))
            private_state = streams.state()
            streams.restore(shared_state)


class InterleavedIterable(IterableDataset[Any]):
    """One rank's samples of an iterable dataset that every rank iterates.

    The samples are taken in rounds of ``num_replicas``, and each rank keeps one sample of a round.
    Only complete rounds count, so that all ranks get equally many, unless ``includes_incomplete``:
    to fill the last round would need samples from ahead. With worker processes each worker shards
    what it iterates itself, so up to ``num_replicas - 1`` samples are left out per worker. Every
    rank has to iterate the same samples in the same order: shuffle by epoch (``set_epoch``), or
    with a generator of the dataset's own.

    Attributes are read from and written to the dataset inside, so that a ``worker_init_fn`` that
    configures the copy in its worker (``get_worker_info().dataset.start = ...``) reaches it.

    Args:
        dataset: the user's dataset.
        rank: ``0 <= rank < num_replicas``.
        num_replicas: number of ranks that the samples are sharded over.
        includes_incomplete: whether a last round in which only some ranks have a sample counts too.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        rank: int,
        num_replicas: int,
        includes_incomplete: bool = False,
    ) -> None:
        # Past __setattr__, which writes to the dataset.
        vars(self).update(
            _dataset=dataset,
            _rank=rank,
            _num_replicas=num_replicas,
            _includes_incomplete=includes_incomplete,
        )

    def __iter__(self) -> Iterator[Any]:
        # iter(dataset) is called when torch calls iter: some datasets draw their order there.
        samples = iter(self._dataset)
        # Each round takes its samples from the same iterator, one after the other.
        sources = [samples] * self._num_replicas
        if self._includes_incomplete:
            rounds = zip_longest(*sources, fillvalue=_NO_SAMPLE)
        else:
            rounds = zip(*sources, strict=False)
        samples_of_rank = map(itemgetter(self._rank), rounds)
        return filter(partial(is_not, _NO_SAMPLE), samples_of_rank)

    def __len__(self) -> int:
        # A round counts once it has this sample.
        needed = self._num_replicas - 1
        if self._includes_incomplete:
            needed = self._rank
        return len(range(needed, len(self._dataset), self._num_replicas))

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods: those of this class count. While this
        # object is being unpickled there is no dataset yet.
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)
