"""Which indices this rank asks its dataset for: the user's own sampler, agreed on and dealt to the ranks."""

import copy
import inspect
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.data.base import Pass, State
from fabric.seed import Streams

__all__ = ["Agreement", "Indices", "Share", "dealt_by_hand", "sized", "streams_of"]

Agree = Callable[[str, bytes], bytes]
Uneven = Literal["pad", "drop"]
_T = TypeVar("_T")

_TORCH_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def dealt_by_hand(sampler: Any) -> tuple[int, int] | None:
    """``(rank, num_replicas)`` of a sampler that deals to the ranks itself, as torch's ``DistributedSampler`` does."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        place = getattr(candidate, "rank", None), getattr(candidate, "num_replicas", None)
        if isinstance(place[0], int) and isinstance(place[1], int):
            return place  # pyright: ignore[reportReturnType]  # a tuple is not narrowed by its items
    return None


def sized(sampler: Any) -> int | None:
    """The length of a sampler, ``None`` when it does not say."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def streams_of(sampler: Any, generator: torch.Generator | None) -> Streams:
    """The random streams that a sampler may draw from.

    Args:
        sampler: torch's own samplers are known exactly; any other may draw from every stream the process shares, from
            the generators it holds, and from the loader's.
        generator: the loader's.
    """
    kind = type(sampler)
    if kind in (SequentialSampler, list, tuple, range) or dealt_by_hand(sampler):
        return Streams()
    if kind is BatchSampler:
        return streams_of(sampler.sampler, generator)
    if kind in _TORCH_RANDOM:
        return Streams(shared=("torch",)) if sampler.generator is None else Streams(generators=(sampler.generator,))
    found = dict.fromkeys(_generators_in(sampler))
    if generator is not None:
        found[generator] = None
    return Streams(shared=("python", "numpy", "torch"), generators=tuple(found))


def _generators_in(sampler: Any) -> Iterator[torch.Generator]:
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            yield value
        elif isinstance(value, Sampler):
            yield from _generators_in(value)


def _pack(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unpack(packed: bytes) -> State:
    return torch.load(io.BytesIO(packed), weights_only=True)


class Agreement:
    """Lets the ranks draw the same random numbers although their streams may have moved apart.

    Rank 0's states are published under ``loader/<name>/epoch/<n>``, where ``n`` counts the drawings of this loader in
    this process: one per epoch, and two for a sampler that draws when it is asked for an iterator.

    Args:
        streams: what is drawn from.
        agree: called with a key and this rank's bytes, returns rank 0's; ``None``: all ranks trust their own.
        name: tells the loaders of a job apart.
    """

    def __init__(self, streams: Streams, agree: Agree | None, name: str) -> None:
        self.streams, self.agree = streams, agree
        self._prefix, self._number = f"loader/{name}/epoch/", count()

    def draw(self, action: Callable[[], _T], again: Callable[[], object] | None = None) -> tuple[State, _T]:
        """Run ``action`` from rank 0's states.

        A shared stream that was in another state is put back, since a rank may want to differ; one that was in the same
        state, and every generator, goes on from where ``action`` left it, as without agreement.

        Args:
            action: what draws.
            again: draws as much once more, if that has no other effect: a stream that was put back has then moved on
                as far as without agreement.

        Returns:
            The states drawn from, and the result of ``action``.
        """
        own = self.streams.state()
        agreed = own
        if self.agree is not None and self.streams:
            agreed = _unpack(self.agree(f"{self._prefix}{next(self._number)}", _pack(own)))
            self.streams.restore(agreed)
        result = action()
        if agreed is not own and self.streams.restore_shared(own, unless=agreed) and again is not None:
            again()
        return agreed, result

    def draw_from(self, state: State, action: Callable[[], _T]) -> _T:
        """Run ``action`` from a saved state. Shared streams are put back, generators go on from there."""
        own = self.streams.state()
        self.streams.restore(state)
        result = action()
        self.streams.restore_shared(own)
        return result


class Share:
    """This rank's share of what a sampler yields, see ``[Note: Data]``.

    With one replica everything is drawn when torch's own loop would draw it. With several, the order of a sampler that
    has a length is drawn at once at the start of the epoch; one without a length is drawn round by round.

    Args:
        sampler: yields samples, or batches of them.
        rank: whose share this is.
        num_replicas: number of shares.
        uneven: ``"pad"`` repeats entries from the start of the order until all shares are equally long, ``"drop"``
            leaves the incomplete last round out.
        agreement: with the other ranks about the random numbers.
    """

    def __init__(
        self, sampler: Iterable[Any], *, rank: int, num_replicas: int, uneven: Uneven, agreement: Agreement
    ) -> None:
        self.sampler, self.rank, self.num_replicas, self.uneven = sampler, rank, num_replicas, uneven
        self._agreement = agreement
        self._pass: Pass | None = None

    def of(self, current: Pass) -> "Share":
        """The same share, for one pass."""
        share = copy.copy(self)
        share._pass = current
        return share

    def __len__(self) -> int:
        length = len(self.sampler)  # pyright: ignore[reportArgumentType]  # raises TypeError as torch's samplers do
        return length // self.num_replicas if self.uneven == "drop" else -(-length // self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        return self.entries(self.begin())

    def __getattr__(self, name: str) -> Any:
        # So that loader.sampler.set_epoch(n) and the like reach the user's own sampler.
        if name.startswith("__") or "sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def begin(self) -> Iterator[Any] | None:
        """Ask the sampler for its iterator, which is when some draw their random numbers.

        Returns:
            The iterator; ``None`` when it is a generator function, which does nothing before its first entry.
        """
        if inspect.isgeneratorfunction(getattr(type(self.sampler), "__iter__", None)):
            return None
        return self._drawn("begin", lambda: iter(self.sampler))

    def entries(self, begun: Iterator[Any] | None) -> Iterator[Any]:
        """The entries of this share, drawn when the first one is asked for."""
        # Chained, since a generator of ours would be resumed for every entry.
        return chain.from_iterable(self._draws(begun))

    def _draws(self, begun: Iterator[Any] | None) -> Iterator[Iterable[Any]]:
        known = self._agreement.streams.shared == ("torch",)
        again = (lambda: deque(self.sampler, maxlen=0)) if known else None
        yield self._drawn("draw", lambda: self._dealt(iter(self.sampler) if begun is None else begun), again)

    def _drawn(self, phase: str, action: Callable[[], _T], again: Callable[[], object] | None = None) -> _T:
        current = self._pass or Pass(epoch=0)
        if (state := current.replay.get(phase)) is not None:
            current.drawn[phase] = state
            return self._agreement.draw_from(state, action)
        if self.num_replicas > 1:
            state, result = self._agreement.draw(action, again)
            current.drawn[phase] = state
            return result
        # Before the action: one that draws lazily is still at work when this returns.
        current.drawn[phase] = self._agreement.streams.state()
        return action()

    def _dealt(self, order: Iterator[Any]) -> Iterable[Any]:
        skip = self._pass.skip if self._pass else 0
        if self.num_replicas == 1:
            if self._pass is None or not self._pass.resumed:
                return order
            # The first entry at least, since it is what makes a lazy sampler draw.
            behind = list(islice(order, max(skip, 1)))
            return chain(behind[skip:], order)
        if sized(self.sampler) is None:
            return self._rounds(order, skip)
        # The indices of a sequential sampler need not be held in memory.
        whole = range(len(self.sampler)) if type(self.sampler) is SequentialSampler else list(order)
        return islice(self._deal(whole), skip, None)

    def _deal(self, order: Sequence[Any]) -> Iterable[Any]:
        total = len(order)
        whole = total // self.num_replicas
        share = order[self.rank : whole * self.num_replicas : self.num_replicas]
        if self.uneven == "drop" or total == whole * self.num_replicas:
            return share
        return chain(share, [order[(whole * self.num_replicas + self.rank) % total]])

    def _rounds(self, order: Iterator[Any], skip: int) -> Iterable[Any]:
        """Deal an order that may have no end: the rounds up to the first wanted one here, the others when needed."""
        known = [list(islice(order, self.num_replicas)) for _ in range(skip + 1)]
        following = self._following(order, Streams(self._agreement.streams.shared).state())
        return islice(self._own_of(known[0], chain(filter(None, known), following)), skip, None)

    def _own_of(self, first: list[Any], rounds: Iterable[list[Any]]) -> Iterator[Any]:
        for entries in rounds:
            if len(entries) == self.num_replicas:
                yield entries[self.rank]
            elif self.uneven == "pad":
                # The order may have ended within its first round: then its entries are gone through again.
                yield [*entries, *first][self.rank] if entries is not first else first[self.rank % len(first)]

    def _following(self, order: Iterator[Any], private: State) -> Iterator[list[Any]]:
        """The rounds after the first, drawn from a private copy of the streams that the first was drawn from."""
        streams = Streams(self._agreement.streams.shared if self._agreement.agree else ())
        while True:
            own = streams.state()
            streams.restore(private)
            entries = list(islice(order, self.num_replicas))
            private = streams.state()
            streams.restore(own)
            if not entries:
                return
            yield entries


class Indices:
    """The index sampler of a prepared loader: what torch's iterator goes through, one item per batch.

    Args:
        share: of single samples, or of whole batches.
        batches: the loader's own batch sampler, with which a share of samples is made into batches; ``None`` when the
            entries of the share are fetched as they are.
    """

    def __init__(self, share: Share, batches: BatchSampler | None) -> None:
        self.share, self._batches = share, batches
        self.current = Pass(epoch=0)

    def __len__(self) -> int:
        return len(self.share if self._batches is None else self._batched(self.share))

    def __iter__(self) -> Iterator[Any]:
        # Bound here and not at the first item: by then another iteration may have begun. Iterating this object without
        # the loader, or twice for one pass, is no business of that pass.
        current = Pass(self.current.epoch) if self.current.opened else self.current
        share = self.share.of(current)
        return chain.from_iterable(self._opens(share, current, share.begin() if self._batches is None else None))

    def __getattr__(self, name: str) -> Any:
        # So that loader.batch_sampler.drop_last and the like are found where they were.
        if name.startswith("__") or "_batches" not in vars(self):
            raise AttributeError(name)
        return getattr(self.share.sampler if self._batches is None else self._batches, name)

    def _opens(self, share: Share, current: Pass, begun: Iterator[Any] | None) -> Iterator[Iterable[Any]]:
        current.opened = True
        yield share.entries(begun) if self._batches is None else self._batched(share)

    def _batched(self, share: Share) -> BatchSampler:
        batches = copy.copy(self._batches)
        assert batches is not None
        batches.sampler = share
        return batches
