"""The iteration over one rank's shard: of a sampler's order, or of an iterable dataset."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from operator import is_not, itemgetter
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from fabric.data.position import EpochPosition, State, length_of
from fabric.seed import RandomStreams

__all__ = ["FromRank0", "InterleavedIterable", "ShardedSampler", "SynchronizedStreams"]

FromRank0 = Callable[[str, bytes], bytes]  # called with a key and this rank's bytes
T = TypeVar("T")

_NO_SAMPLE = object()  # fills an incomplete round of an iterable dataset
# The phases in which an order is drawn: in the sampler's ``__iter__``, or at the first entry.
_BEGIN = "begin"
_DRAW = "draw"


class SynchronizedStreams:
    """Random streams from which all ranks draw the same numbers, although their own states differ.

    All ranks draw from rank 0's states. Rank 0 publishes them under the key
    ``loader/<name>/epoch/<n>``. ``n`` counts the draws of this loader: one in each epoch, or two
    for a sampler that draws in its ``__iter__``.

    Args:
        streams: the streams to draw from.
        from_rank0: called on every rank with a key and bytes, returns rank 0's bytes. None: each
            rank draws from its own states.
        name: name of the loader, distinct among those of a job.
    """

    def __init__(self, streams: RandomStreams, from_rank0: FromRank0 | None, name: str) -> None:
        """Store the arguments. Called when a loader is set up, on all ranks with one name."""
        self.streams = streams
        self._from_rank0 = from_rank0
        self._name = name
        # Not an itertools.count, which Python 3.14 cannot copy: users copy samplers, and with them
        # this object.
        self._num_draws = 0

    def run_with_saved_state(self, action: Callable[[], T], saved: State) -> T:
        """Run ``action`` with the streams in a saved state, and return its result.

        Not a collective, since all ranks have loaded the same saved state. Afterwards, a generator
        continues from where ``action`` left it. The global streams of the process (of torch, numpy
        and Python) have their earlier states again.

        Args:
            action: draws random numbers.
            saved: a state that :meth:`run_synchronized` returned.
        """
        earlier_state = self.streams.state()
        self.streams.restore(saved)
        result = action()
        self.streams.restore_global_streams(earlier_state)
        return result

    def run_synchronized(self, action: Callable[[], T]) -> tuple[State, T]:
        """Run ``action`` with the streams in rank 0's state.

        All ranks call this method in the same sequence. Afterwards, the streams are as follows:

        - A generator continues from where ``action`` left it.
        - A global stream of the process (of torch, numpy or Python) continues from there, too, if
          its state before was equal to rank 0's.
        - A global stream whose state differed from rank 0's has its earlier state again, since
          ranks may differ on purpose.

        Returns:
            The state that ``action`` drew from, for :meth:`run_with_saved_state`, and the result of
            ``action``.
        """
        local_state = self.streams.state()
        # Without streams ``action`` draws nothing random.
        has_streams = bool(self.streams)
        if self._from_rank0 is None or not has_streams:
            # Each rank draws from its own state. Nothing is exchanged, on any rank.
            return local_state, action()
        key = f"loader/{self._name}/epoch/{self._num_draws}"
        self._num_draws += 1
        received = self._from_rank0(key, pickle.dumps(local_state))
        state: State = pickle.loads(received)  # noqa: S301 - from a rank of this job
        self.streams.restore(state)
        result = action()
        # A global stream whose state was equal to rank 0's is not restored: it has drawn.
        self.streams.restore_global_streams(local_state, unless=state)
        return state, result


# See [Note: Data] in position.py.
class ShardedSampler:
    """This rank's shard of a sampler's order; torch's iterator takes its indices from it.

    The *order* is what the user's sampler yields in one epoch. An *entry* is one item of the order:
    a sample or, from a batch sampler, a whole batch.

    A *round* is ``num_replicas`` entries, one for each rank. The random numbers of the order are
    drawn at these times:

    - One replica: at the times at which torch's own loop draws them.
    - Several replicas, and a sampler with a length: at the start of the epoch.
    - Several replicas, and a sampler without a length: round by round, from a private copy of the
      streams.

    Attributes that this object lacks are those of the user's own sampler or batch sampler:
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
        position: the iteration that the next ``iter`` belongs to. The loader sets it.
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
        """Store the arguments. Called on every rank when a loader is set up."""
        self.sampler = sampler
        self.rank = rank
        self.num_replicas = num_replicas
        self.pads = pads
        self.position = EpochPosition(0)  # the loader sets another at the start of each iteration
        self._synchronized_streams = streams
        self._batch_sampler = batch_sampler

    def entry_sampler_at(self, position: EpochPosition) -> "ShardedSampler":
        """Return a copy for the iteration at ``position``, which yields entries and no batches."""
        shard = copy.copy(self)
        shard.position = position
        shard._batch_sampler = None
        return shard

    def __len__(self) -> int:
        if self._batch_sampler is not None:
            return len(self._batches(self.position))
        return self.length(0)

    def length(self, skipped_entries: int) -> int:
        """Return the number of entries of this shard, after ``skipped_entries`` of the order.

        Raises:
            TypeError: the sampler has no length. torch's samplers raise a TypeError, too.
        """
        # Any, since torch declares no length for a sampler.
        sampler: Any = self.sampler
        order_length = len(sampler)
        remaining = max(0, order_length - skipped_entries)
        if self.pads:
            return -(-remaining // self.num_replicas)  # rounded up
        return remaining // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over this rank's entries, or over batches of them.

        torch's iterator calls it once at the start of an epoch. Random numbers are drawn in two
        phases. The numbers that the sampler draws in its own ``__iter__`` are drawn now
        (``_BEGIN``). The others are drawn when the first item is asked for (``_DRAW``). The random
        states before each phase are recorded in the position.
        """
        # The position is read now: before the first item is asked for, another iteration may begin
        # and replace the attribute.
        position = self.position
        has_drawn = _DRAW in position.drawn_states
        if has_drawn:
            # An iteration from this position has begun before. The loader sets a new position for
            # each of its iterations, so this one is by the user, who iterates the object directly.
            # It must not change the loader's position.
            position = EpochPosition(position.epoch)
        if self._batch_sampler is not None:
            # The batch sampler iterates a copy of this object that has no batch sampler. That copy
            # draws the order, by the code below.
            return iter(self._batches(position))
        # A copy, so that later changes of this object do not affect the iterator.
        shard = self.entry_sampler_at(position)
        # Some samplers draw random numbers in __iter__. If __iter__ is a generator function, its
        # code first runs when the first item is asked for. The phase _BEGIN then draws nothing, so
        # no state is recorded.
        sampler_iter = getattr(type(self.sampler), "__iter__", None)
        if inspect.isgeneratorfunction(sampler_iter):
            order = iter(self.sampler)
        else:
            order = shard._draw_and_record(_BEGIN, partial(iter, self.sampler))

        def draw_entries() -> Iterable[Any]:
            return shard._draw_and_record(_DRAW, partial(shard._entries_of_rank, order))

        return _call_at_first_item(draw_entries)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's own batch sampler or sampler.

        Python calls it for a name that this object lacks.
        """
        # copy and pickle look up special methods, which must not be taken from the user's object.
        # They also look up names before this object has ``_batch_sampler``, so that reading it
        # below would recurse.
        is_being_copied = "_batch_sampler" not in vars(self)
        if name.startswith("__") or is_being_copied:
            raise AttributeError(name)
        if self._batch_sampler is None:
            return getattr(self.sampler, name)
        return getattr(self._batch_sampler, name)

    def draw_entries_again(self, position: EpochPosition, count: int) -> list[Any]:
        """Return the first ``count`` entries of this rank in an iteration that has begun.

        The order is drawn again from the random states that the iteration has recorded. The streams
        have their present states again afterwards. Not a collective.
        """
        replay = EpochPosition(
            position.epoch, position.skipped_entries, states_to_replay=position.drawn_states
        )
        streams = self._synchronized_streams.streams
        present_state = streams.state()
        entries = list(islice(self.entry_sampler_at(replay), count))
        streams.restore(present_state)
        return entries

    def _batches(self, position: EpochPosition) -> Any:
        """Return a copy of the user's batch sampler that groups the entries of this shard."""
        # Any, since torch declares no ``sampler`` for a batch sampler.
        batch_sampler: Any = copy.copy(self._batch_sampler)
        batch_sampler.sampler = self.entry_sampler_at(position)
        return batch_sampler

    def _draw_and_record(self, phase: str, action: Callable[[], T]) -> T:
        """Run ``action``, and record in the position the random states that it draws from.

        If the position was loaded, ``action`` draws from the saved states of the phase.

        Args:
            phase: ``_BEGIN`` or ``_DRAW``.
            action: draws the numbers.
        """
        saved = self.position.states_to_replay.get(phase)
        if saved is None:
            state, result = self._synchronized_streams.run_synchronized(action)
        else:
            state = saved
            result = self._synchronized_streams.run_with_saved_state(action, saved)
        self.position.drawn_states[phase] = state
        return result

    def _entries_of_rank(self, order: Iterator[Any]) -> Iterable[Any]:
        """Return this rank's entries of an order, without the entries that were received before.

        An entry is one item of the order: a sample or, from a batch sampler, a whole batch.

        The caller replays or synchronizes the random streams only during this call. So the order is
        drawn before this method returns, even if the sampler would draw it later.
        """
        if self.num_replicas == 1:
            skipped = self.position.skipped_entries
            # At least one entry is read now, since a sampler whose __iter__ is a generator function
            # draws its order only when its first entry is read.
            first_entries = list(islice(order, max(skipped, 1)))
            return chain(first_entries[skipped:], order)
        if length_of(self.sampler) is None:
            return self._entries_of_unsized(order)
        return self._entries_of_sized(order)

    def _entries_of_sized(self, order: Iterator[Any]) -> Iterator[Any]:
        """Return this rank's entries of an order with a length, which is drawn during this call.

        A round is ``num_replicas`` entries of the order, one for each rank. The rounds begin after
        the entries that were received before, so that a job with another number of ranks can
        continue the order.
        """
        # The entries of a SequentialSampler are a range, which takes no memory, unlike a list. The
        # type is compared exactly, since a subclass may yield other entries.
        if type(self.sampler) is SequentialSampler:
            entries = range(len(self.sampler))
        else:
            entries = list(order)
        length = len(entries)
        # Counts the entries of all ranks.
        skipped = self.position.skipped_entries
        # A position that counts repeated entries may be behind the end of the order.
        remaining = max(0, length - skipped)
        # The last round may be incomplete.
        end_of_full_rounds = length - remaining % self.num_replicas
        shard = entries[skipped + self.rank : end_of_full_rounds : self.num_replicas]
        has_incomplete_round = end_of_full_rounds < length
        if has_incomplete_round and self.pads:
            # The last round has the entries that remain. For the other ranks it continues at the
            # start of the order.
            last_entry = entries[(end_of_full_rounds + self.rank) % length]
            return chain(shard, [last_entry])
        return iter(shard)

    def _entries_of_unsized(self, order: Iterator[Any]) -> Iterator[Any]:
        """Return this rank's entries of an order without a length, which may have no end.

        A round is ``num_replicas`` entries of the order, one for each rank. The rounds up to the
        first one of this iteration are drawn during this call, from the process's streams. This
        advances the streams, so that the next epoch draws another order. Later rounds are drawn on
        request, from a private state of the global streams.
        """
        first_round = list(islice(order, self.num_replicas))
        remaining = islice(chain(first_round, order), self.position.skipped_entries, None)
        next_round = list(islice(remaining, self.num_replicas))
        # Without the generators, from which only the sampler draws.
        global_streams = RandomStreams(self._synchronized_streams.streams.global_streams)
        return self._entries_by_round(
            next_round,
            remaining,
            padding=first_round,
            streams=global_streams,
            private_state=global_streams.state(),
        )

    def _entries_by_round(
        self,
        entries: list[Any],
        remaining: Iterator[Any],
        *,
        padding: list[Any],
        streams: RandomStreams,
        private_state: State,
    ) -> Iterator[Any]:
        """Yield this rank's entry of each round.

        Between rounds, other code draws from the same global streams. These draws must not change
        the order. So the sampler draws each round from a private state of the streams, and
        afterwards the streams have their earlier state again.

        Args:
            entries: the entries of the next round, which is incomplete at the end of the order.
            remaining: the entries after the next round. They may have no end.
            padding: the first round of the order, whose entries complete the last round.
            streams: the global streams that later rounds are drawn from.
            private_state: the state of the streams for the next draw.
        """
        while entries:
            is_complete = len(entries) == self.num_replicas
            if is_complete:
                yield entries[self.rank]
            elif self.pads:
                # If the order is shorter than a round, the padding has fewer entries than the
                # round needs, but at least one. Repeated num_replicas times it is long enough.
                padded = entries + padding * self.num_replicas
                yield padded[self.rank]
            # An incomplete round that is not padded is left out. It is the last one.
            # Draw the next round. ``remaining`` runs the user's sampler, which draws from the
            # global streams.
            global_state = streams.state()
            streams.restore(private_state)
            entries = list(islice(remaining, self.num_replicas))
            private_state = streams.state()
            streams.restore(global_state)


def _call_at_first_item(function: Callable[[], Iterable[T]]) -> Iterator[T]:
    """Return an iterator that calls a function when its first item is asked for.

    The iterator yields the items of the function's result. The function is not a generator with
    ``yield from``, which Python would resume for every item.
    """
    # This generator has one item: the function's result. The chain asks the generator for the
    # result when the user asks the chain for its first item.
    results = (call() for call in [function])
    return chain.from_iterable(results)


class InterleavedIterable(IterableDataset[Any]):
    """One rank's samples of an iterable dataset that every rank iterates.

    The samples are taken in rounds of ``num_replicas``, and each rank keeps one sample of a round.
    An incomplete last round is left out, so that all ranks get equally many samples. With
    ``includes_incomplete`` it counts, and some ranks get one sample more. With worker processes,
    each worker shards the samples that the worker iterates, so there is a last round for each
    worker. Every rank has to iterate the same samples in the same order: shuffle by epoch
    (``set_epoch``), or with a generator of the dataset's own.

    Attributes are read from and written to the user's dataset. So a ``worker_init_fn`` may
    configure the copy of the dataset in its worker (``get_worker_info().dataset.start = ...``).

    Args:
        dataset: the user's dataset.
        rank: ``0 <= rank < num_replicas``.
        num_replicas: number of ranks that the samples are sharded over.
        includes_incomplete: whether an incomplete last round counts.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        rank: int,
        num_replicas: int,
        includes_incomplete: bool = False,
    ) -> None:
        # Not ``self._dataset = ...``: __setattr__ of this class writes to the user's dataset.
        vars(self).update(
            _dataset=dataset,
            _rank=rank,
            _num_replicas=num_replicas,
            _includes_incomplete=includes_incomplete,
            # Whether iter() reads the first sample, see set_reads_first_sample().
            _reads_first_sample=False,
        )

    def set_reads_first_sample(self, reads_first_sample: bool) -> None:
        """Set whether ``iter()`` reads the first sample of the dataset.

        At the start of an epoch, the loader calls ``iter()`` with the same random states on all
        ranks. A dataset whose ``__iter__`` is a generator function draws its order when its first
        sample is read. Reading the sample in ``iter()`` makes this order the same on all ranks.
        """
        # Not ``self._reads_first_sample = ...``: __setattr__ writes to the user's dataset.
        vars(self).update(_reads_first_sample=reads_first_sample)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over this rank's sample of each round."""
        # Some datasets draw their order in __iter__. This method is not a generator function, so
        # that they draw it while iter() runs, with the random states that all ranks share.
        samples = iter(self._dataset)
        if self._reads_first_sample:
            # Other datasets draw their order with their first sample.
            first_samples = list(islice(samples, 1))
            samples = chain(first_samples, samples)
        # zip makes a round of one sample from each source. All sources are the same iterator, so a
        # round has num_replicas consecutive samples.
        sources = [samples] * self._num_replicas
        if self._includes_incomplete:
            rounds = zip_longest(*sources, fillvalue=_NO_SAMPLE)
        else:
            rounds = zip(*sources, strict=False)
        samples_of_rank = map(itemgetter(self._rank), rounds)
        # Drops the filler, which an incomplete round has if it lacks a sample for this rank.
        return filter(partial(is_not, _NO_SAMPLE), samples_of_rank)

    def __len__(self) -> int:
        """Return the number of samples of this rank, from the length of the user's dataset."""
        # A round of num_replicas samples counts for this rank if the dataset has the last sample of
        # the round or, if incomplete rounds count, this rank's sample of the round.
        needed_index = self._num_replicas - 1
        if self._includes_incomplete:
            needed_index = self._rank
        # The indices in the dataset of the needed sample of each round.
        needed_samples = range(needed_index, len(self._dataset), self._num_replicas)
        return len(needed_samples)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's dataset. Called for a name that this object lacks."""
        # copy and pickle look up special methods, which must not be taken from the user's dataset.
        # They also look up names before this object has a dataset, so that reading it below would
        # recurse.
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)
