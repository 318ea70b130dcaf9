"""Loops that end on all ranks together, although the ranks have different numbers of batches."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fabric._torch import registered_buffers
from fabric.collectives import broadcast
from fabric.collectives.batch_norm import has_sync_batch_norm
from fabric.communicators.base import CallDescription, Collective, Communicator, Operation
from fabric.communicators.call_site import user_call
from fabric.data.position import EpochPosition
from fabric.errors import UsageError
from fabric.seed import rng_state, set_rng_state

__all__ = ["Lockstep", "RemainingBatches", "without_repeats"]

_END_OF_BATCHES = object()
_UNKNOWN = -1  # a batch count in messages: the rank has another batch, and does not know how many
_MAX_SHOWN_RANKS = 8  # in an error


class RemainingBatches:
    """The batches of an iteration that this rank has left.

    If their number is unknown, one batch is fetched ahead.

    Args:
        batches: the loader's iterator.
        count: how many batches the iterator has. None if unknown.
        position: the position of the iteration.
        read_state: returns the state of the user's loader or dataset, if that object keeps the
            position. It is read before a batch is fetched ahead.

    Attributes:
        count: how many batches are left. None if unknown.
        position: the position of the iteration.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        count: int | None,
        position: EpochPosition,
        read_state: Callable[[EpochPosition], Any],
    ) -> None:
        """Store the arguments, and fetch nothing. Called at the start of an iteration."""
        self.count = count
        self.position = position
        self._batches = batches
        self._read_state = read_state
        # At most one item: the batch that was fetched ahead, or _END_OF_BATCHES.
        self._fetched: list[Any] = []

    def has_next(self) -> bool:
        """Return whether this rank has another batch. Fetches the batch if ``count`` is None."""
        if self.count is None:
            return self.peek() is not _END_OF_BATCHES
        return self.count > 0

    def peek(self) -> Any:
        """Return the next batch without consuming it, or ``_END_OF_BATCHES``.

        The first call fetches the batch. Later calls, and :meth:`take`, return the same batch.
        """
        if not self._fetched:
            # Reset first: while the attribute is set, _read_state() returns it, and it is the state
            # from before an earlier fetch.
            self.position.state_before_fetch = None
            # Without a count, has_next() fetches a batch to know whether there is one.
            is_fetched_ahead = self.count is None
            if is_fetched_ahead:
                # A checkpoint that is saved before take() must not count this batch.
                state = copy.deepcopy(self._read_state(self.position))
                self.position.state_before_fetch = state
            self._fetched.append(next(self._batches, _END_OF_BATCHES))
        return self._fetched[0]

    def take(self) -> Any:
        """Return the next batch. The caller knows from :meth:`has_next` that there is one.

        Raises:
            UsageError: the sampler yields fewer batches than its length says.
        """
        if self.peek() is _END_OF_BATCHES:
            _refuse_length("fewer")
        if self.count is not None:
            self.count -= 1
        return self._fetched.pop()

    def finish(self) -> None:
        """Raise a UsageError if a batch is left, although :meth:`has_next` is false.

        Asks the loader for one more batch, which also ends the loader's workers.
        """
        if self.peek() is not _END_OF_BATCHES:
            _refuse_length("more")

    def take_all(self) -> Iterator[Any]:
        """Yield all batches. ``position.is_final`` is true while the user has the last batch."""
        while self.has_next():
            batch = self.take()
            self.position.is_final = not self.has_next()
            yield batch
        self.finish()


def _refuse_length(comparison: str) -> NoReturn:
    """Raise the error for a sampler with a wrong length. ``comparison`` is "fewer" or "more"."""
    raise UsageError(
        "a loop whose end is known ahead",
        problem=f"its sampler yields {comparison} batches than its length says",
        expected="a sampler with the right length, or none",
    )


# [Note: Uneven ranks]
# Where fabric does not shard the data, ranks may have different numbers of batches. Under
# `uneven="shortest"` all ranks stop when the first rank runs out. Under `"longest"` they stop when
# every rank has run out. Until then a rank without batches gets its last batch again, a *repeat*. A
# rank that never had a batch gets another rank's first batch. One batch ahead, all ranks exchange
# their *batch counts*: how many batches each rank has left. The exchange runs in a separate thread
# and group while the loop computes. If all ranks know their counts, the first exchange is the only
# one. A rank that does not know its count can only say that it has another batch, and the counts
# are exchanged before each batch.
#
# A repeat is not part of the epoch. Its loss and weight count as zero in `fabric.backward`, it does
# not change the position, and random streams and module buffers are restored before the next batch.
class Lockstep:
    """Ends loops on all ranks together.

    Ranks may have different numbers of batches. They exchange their *batch counts*: how many
    batches each rank has left. A loop ends when the first rank runs out, or when every rank has run
    out. Until then a rank without batches gets its last batch again, a *repeat*.

    Args:
        size: number of ranks.
        connect: returns a CPU communicator of all ranks, which only this object uses. The first
            call is collective. None if there is only one rank.
        modules: the modules that are set up.
    """

    def __init__(
        self,
        size: int = 1,
        connect: Callable[[], Communicator] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        """Store the arguments. The session calls it once; the first loop connects the ranks."""
        self.size = size
        self._connect = connect
        self._modules = modules
        # The ranks compare the numbers of their loops, to find that they are in different loops.
        self._loop_numbers = count(1)
        # It has one worker, so that all ranks make their exchanges in the same order.
        self._thread = ThreadPoolExecutor(1, "fabric-batches")

    def check_no_sync_batch_norm(self) -> None:
        """Raise a UsageError if a module has a SyncBatchNorm.

        Called at the start of a loop under ``uneven="longest"``. A repeated batch would count in
        the statistics that SyncBatchNorm computes over all ranks.
        """
        for module in self._modules:
            if has_sync_batch_norm(module):
                raise UsageError(
                    'a loop under uneven="longest"',
                    problem="a repeated batch would count in the statistics that SyncBatchNorm "
                    "takes over all ranks",
                    expected='uneven="shortest", or batch norms of each rank',
                )

    def batches(
        self,
        remaining: RemainingBatches,
        choose: Callable[[Iterable[int]], int],
        *,
        marks_last_batch: bool,
    ) -> Iterator[Any]:
        """Yield equally many batches on all ranks. Collective.

        The ranks exchange their batch counts. The exchange about the next batch starts before the
        current batch is yielded, and is awaited afterwards. If all ranks know their counts, the
        first exchange is the only one. All ranks make the same exchanges, since they decide by the
        same counts.

        Args:
            remaining: the batches of this rank.
            choose: ``min`` ends the loop on all ranks when the first rank runs out of batches.
                ``max`` ends it when all ranks have run out.
            marks_last_batch: whether ``position.is_final`` has to be true while the user has the
                last batch. Then the exchange is awaited before the batch is yielded, so it does not
                overlap with the user's step. If not, ``is_final`` stays false.
        """
        loop_number = next(self._loop_numbers)
        # Number of the current batch, from 1. The first exchange, before any batch, has number 0.
        batch_number = 0
        counts = self._start_exchange(loop_number, batch_number, remaining).result()
        # The number of batches that every rank yields. None unless all ranks know their counts.
        total = None if _UNKNOWN in counts else choose(counts)
        has_batch = _all_continue(counts, choose)
        batch = _END_OF_BATCHES
        if has_batch:
            # The batch to repeat if this rank never has one. Every rank makes this call, since
            # another rank may need this rank's batch.
            batch = self._first_repeat(counts, remaining)
        while has_batch:
            # Only under "longest": this rank has run out, and another rank has not.
            is_repeat = not remaining.has_next()
            # A repeat leaves ``batch`` as it is: the last batch of this rank, if it had one.
            if not is_repeat:
                batch = remaining.take()
            batch_number += 1
            # With a total, the end is known, and the ranks exchange nothing more.
            next_exchange = None
            if total is None:
                next_exchange = self._start_exchange(loop_number, batch_number, remaining)
            if marks_last_batch:
                has_next = _wait_for_next(next_exchange, batch_number, total, choose)
                remaining.position.is_final = not has_next
            if is_repeat:
                with self._repeating(remaining.position):
                    yield batch
            else:
                yield batch
            # Returns at once if marks_last_batch is true: the answer has been awaited above.
            has_batch = _wait_for_next(next_exchange, batch_number, total, choose)
        # Under "shortest", this rank may have batches left, which are not used. A rank without
        # batches checks that its loader has really ended.
        if not remaining.has_next():
            remaining.finish()

    def close(self) -> None:
        """Wait until the other ranks have answered the last exchange, or have exited."""
        self._thread.shutdown()

    def _counts_communicator(self) -> Communicator:
        """Return the communicator that exchanges batch counts. Collective at the first call."""
        assert self._connect is not None, "called with a single rank"
        return self._connect()

    def _start_exchange(
        self, loop: int, batch: int, remaining: RemainingBatches
    ) -> Future[list[int]]:
        """Start to exchange the batch counts of all ranks, in the background thread. Collective.

        Args:
            loop: number of the loop.
            batch: number of the current batch. The counts are of the batches after it.
            remaining: the batches of this rank.

        Returns:
            A future of the counts by rank: how many batches each rank has left, or ``_UNKNOWN``. It
            raises a UsageError if a rank is at another batch.
        """
        remaining_count = remaining.count
        if remaining_count is None:
            remaining_count = _UNKNOWN if remaining.has_next() else 0
        message = torch.tensor([loop, batch, remaining_count])
        # The user's line that asked for the batch, for errors and hang reports.
        call = CallDescription("the next batch", call_site=user_call(sys._getframe(1)))
        # The first call creates a group. It runs in the calling thread, and not in the background
        # thread, so that all ranks create their groups in the same order.
        group = self._counts_communicator()
        return self._thread.submit(_gather_counts, group, message, call)

    def _first_repeat(self, counts: list[int], remaining: RemainingBatches) -> Any:
        """Return a batch for ranks that never have one: the first batch of another rank.

        Collective. Nothing is sent if all ranks have a batch, and ``_END_OF_BATCHES`` is returned.

        Args:
            counts: the batch counts of all ranks at the start of the loop. At least one rank has a
                batch.
            remaining: the batches of this rank, none of which was taken.
        """
        ranks_with_batch = [rank for rank, batch_count in enumerate(counts) if batch_count != 0]
        if len(ranks_with_batch) == len(counts):
            return _END_OF_BATCHES
        group = self._counts_communicator()
        source = ranks_with_batch[0]
        batch = None
        if group.rank == source:
            batch = remaining.peek()
        # The batch stays on the CPU. The loader then moves it to the device as any other batch.
        return broadcast(group, batch, source, torch.device("cpu"))

    def _submodules(self) -> Iterator[nn.Module]:
        for module in self._modules:
            yield from module.modules()

    @contextmanager
    def _repeating(self, position: EpochPosition) -> Iterator[None]:
        """Mark the batch as a repeat while the user has it, which is during the block.

        The random streams and the buffers of the modules, such as running statistics, are restored
        afterwards, so that a repeat does not change the training.
        """
        buffers: list[_SavedBuffer] = []
        for module in self._submodules():
            for name, buffer in module.named_buffers(recurse=False):
                buffers.append(_SavedBuffer(module, name, buffer, values=buffer.clone()))
        streams = rng_state()
        position.is_repeat = True
        try:
            yield
        finally:
            position.is_repeat = False
            set_rng_state(streams)
            for saved in buffers:
                # The forward pass may have replaced the buffer by another tensor, so the tensor
                # itself is put back into the module's dict of buffers, too.
                registered_buffers(saved.module)[saved.name] = saved.buffer
                saved.buffer.detach().copy_(saved.values)


class _SavedBuffer(NamedTuple):
    """A buffer of a module, with a copy of its values."""

    module: nn.Module
    name: str
    buffer: Tensor
    values: Tensor


def _all_continue(counts: list[int], choose: Callable[[Iterable[int]], int]) -> bool:
    """Return whether all ranks go on: all have a batch (``min``), or at least one (``max``)."""
    return choose(batch_count != 0 for batch_count in counts) > 0


def _wait_for_next(
    next_exchange: Future[list[int]] | None,
    batch_number: int,
    total: int | None,
    choose: Callable[[Iterable[int]], int],
) -> bool:
    """Wait for the exchange of counts, and return whether all ranks go on with another batch.

    Args:
        next_exchange: the exchange about the next batch. None if ``total`` is known.
        batch_number: number of the current batch, from 1.
        total: number of batches that each rank yields. None if it is not known ahead.
        choose: ``min`` if the loop ends with the first rank that runs out of batches, ``max`` if it
            ends with the last one.
    """
    if next_exchange is not None:
        return _all_continue(next_exchange.result(), choose)
    assert total is not None, "neither an exchange nor a total"
    return batch_number < total


def _gather_counts(group: Communicator, message: Tensor, call: CallDescription) -> list[int]:
    """Return the batch counts of all ranks. Runs in the background thread. Collective.

    Args:
        group: the communicator for batch counts.
        message: number of the loop, number of the batch, and this rank's batch count.
        call: describes the collective in errors.

    Raises:
        UsageError: the ranks are at different loops or batches.
    """
    # One message per rank.
    rows = group.run(Collective(Operation.ALL_GATHER, message, call=call)).tolist()
    loop_and_batch_of_rank0 = rows[0][:2]
    counts: list[int] = []
    for loop, batch, batch_count in rows:
        if [loop, batch] != loop_and_batch_of_rank0:
            _raise_different_batches(rows)
        counts.append(batch_count)
    return counts


def _raise_different_batches(rows: list[list[int]]) -> NoReturn:
    """Raise the error for ranks that are at different batches.

    Args:
        rows: for each rank, its message. A message begins with the number of the loop, and the
            number of the batch that the rank has just used.
    """
    descriptions: list[str] = []
    for rank, (loop, batch, *_) in enumerate(rows[:_MAX_SHOWN_RANKS]):
        descriptions.append(f"rank {rank} behind batch {batch} of loop {loop}")
    raise UsageError(
        "a loop that ends on all ranks together",
        problem=f"the ranks are at different places of their loops: {', '.join(descriptions)}",
        expected="breaks at the same batch on all ranks",
    )


def without_repeats(
    position: EpochPosition, loss: Tensor, weight: Any, *, is_sum: bool = False
) -> tuple[Tensor, Any]:
    """Return the loss and the weight of a backward pass under ``"longest"``: zeros for a repeat.

    ``fabric.backward`` calls it. A rank with a repeat still makes its backward pass, since the
    other ranks wait for its gradients, which have to be zero.

    Args:
        position: the position of the loop.
        loss: the loss.
        weight: the weight of the loss. None if there is none.
        is_sum: whether the losses of all ranks are summed up. A zero loss then needs no weight.

    Raises:
        UsageError: the loss needs a weight, and there is none.
    """
    if weight is None and not is_sum:
        raise UsageError(
            'fabric.backward(loss) in a loop under uneven="longest"',
            problem="a mean over the processes would count those that have no batch",
            suggestion="fabric.backward(losses.sum(), weight=len(losses)) for the mean, or "
            'fabric.backward(losses.sum(), reduce="sum") for the sum',
        )
    if not position.is_repeat:
        return loss, weight
    # Infinite and NaN losses become 0 first, since their product with 0 is NaN. The product keeps
    # the graph for the backward pass.
    zero_loss = torch.where(loss.isfinite(), loss, 0) * 0
    if weight is None:
        return zero_loss, None
    return zero_loss, weight * 0
