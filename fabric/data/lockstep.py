"""Loops that end on all ranks together, although the ranks have different numbers of batches.

[Note: Uneven ranks] Where fabric does not shard the data, ranks may have different numbers of
batches. Under ``uneven="shortest"`` all ranks stop when the first rank runs out. Under
``"longest"`` they stop when every rank has run out. Until then a rank without batches gets its
last one again, a *repeat*, or another rank's first batch if it never had one. One batch ahead, all
ranks exchange a *flag*, whether they have another batch, in a separate thread and group while the
loop computes. If all ranks know how many batches they have, they exchange the numbers once, and no
flags.

A repeat is not part of the epoch. Its loss and weight count as zero in ``fabric.backward``, it does
not change the position, and random streams and module buffers are restored before the next batch.
"""

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
from fabric.communicators.base import CallDescription, Collective, Communicator, Operation
from fabric.data.position import EpochPosition
from fabric.diagnostics.call_site import user_call
from fabric.errors import UsageError
from fabric.seed import rng_state, set_rng_state

__all__ = ["Lockstep", "RemainingBatches", "without_repeats"]

_END = object()
_GROUP = "batches"  # the name of the group that exchanges flags
_UNKNOWN = -1  # a number of batches, in messages


class RemainingBatches:
    """The batches of an iteration that this rank has left.

    If their number is unknown, one batch is fetched ahead.

    Args:
        batches: the loader's iterator.
        number: how many batches there are. None if unknown.
        position: the position of the iteration.
        own_state: returns the loader's or dataset's own state, which is saved before a batch is
            fetched ahead.

    Attributes:
        number: how many batches are left. None if unknown.
        position: the position of the iteration.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        number: int | None,
        position: EpochPosition,
        own_state: Callable[[EpochPosition], Any],
    ) -> None:
        self.number = number
        self.position = position
        self._batches = batches
        self._own_state = own_state
        self._fetched: list[Any] = []

    def has_next(self) -> bool:
        """Return whether this rank has another batch."""
        if self.number is None:
            return self.peek() is not _END
        return self.number > 0

    def peek(self) -> Any:
        """Return the next batch without consuming it."""
        if not self._fetched:
            # Cleared first: own_state returns it while it is there.
            self.position.state_before_fetch = None
            if self.number is None:
                state = copy.deepcopy(self._own_state(self.position))
                self.position.state_before_fetch = state
            self._fetched.append(next(self._batches, _END))
        return self._fetched[0]

    def take(self) -> Any:
        """Return the next batch, of which there must be one."""
        if self.peek() is _END:
            _refuse_length("fewer")
        if self.number is not None:
            self.number -= 1
        return self._fetched.pop()

    def finish(self) -> None:
        """Check that no batch is left. To ask the loader once more also ends its workers."""
        if self.peek() is not _END:
            _refuse_length("more")

    def take_all(self) -> Iterator[Any]:
        """Yield all batches. ``position.is_final`` is true while the last one is out."""
        while self.has_next():
            batch = self.take()
            self.position.is_final = not self.has_next()
            yield batch
        self.finish()


def _refuse_length(comparison: str) -> NoReturn:
    raise UsageError(
        "a loop whose end is known ahead",
        problem=f"its sampler yields {comparison} batches than its length says",
        expected="a sampler with the right length, or none",
    )


class _Flag(NamedTuple):
    """What one rank says about its next batch."""

    has_next: int
    """1 if the rank has another batch, 0 if not."""
    number: int
    """How many batches the rank has left, or ``_UNKNOWN``."""


class Lockstep:
    """Ends loops on all ranks together; see ``[Note: Uneven ranks]``.

    Args:
        size: number of ranks.
        connect: returns the CPU communicator of all ranks, in a group for the given name.
            Collective. None if there is only one rank.
        modules: the modules that are set up.
    """

    def __init__(
        self,
        size: int = 1,
        connect: Callable[[str], Communicator] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self.size = size
        self._connect = connect
        self._modules = modules
        self._loops = count(1)
        self._thread = ThreadPoolExecutor(1, "fabric-batches")

    def check_modules(self) -> None:
        """Raise a UsageError if a repeat would enter statistics computed over all ranks."""
        for module in self._submodules():
            if isinstance(module, nn.SyncBatchNorm):
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
        finds_final: bool,
    ) -> Iterator[Any]:
        """Yield equally many batches on all ranks.

        Args:
            remaining: the batches of this rank.
            choose: ``min`` ends all ranks with the first one, ``max`` with the last one.
            finds_final: whether ``position.is_final`` is to be true while the last batch is out.
                If not, it is always false.
        """
        loop = next(self._loops)
        number = 0  # of the current batch, from 1
        flags = self._exchange(loop, number, remaining).result()
        total = _total(flags, choose)
        goes_on = _goes_on(flags, choose)
        batch = _END
        if goes_on:
            batch = self._first_repeat(flags, remaining)
        while goes_on:
            is_repeat = not remaining.has_next()
            if not is_repeat:
                batch = remaining.take()
            number += 1
            next_flags = None
            if total is None:
                next_flags = self._exchange(loop, number, remaining)
            if finds_final:
                remaining.position.is_final = not _follows(next_flags, number, total, choose)
            if is_repeat:
                with self._repeating(remaining.position):
                    yield batch
            else:
                yield batch
            goes_on = _follows(next_flags, number, total, choose)
        if not remaining.has_next():
            remaining.finish()

    def close(self) -> None:
        """Wait until the other ranks have answered or exited."""
        self._thread.shutdown()

    def _group(self) -> Communicator:
        assert self._connect is not None, "there are other ranks"
        return self._connect(_GROUP)

    def _exchange(self, loop: int, batch: int, remaining: RemainingBatches) -> Future[list[_Flag]]:
        """Exchange the flags of all ranks in the background.

        Args:
            loop: number of the loop.
            batch: number of the batch before the one that the flags are about.
            remaining: the batches of this rank.
        """
        number = _UNKNOWN if remaining.number is None else remaining.number
        message = torch.tensor([loop, batch, remaining.has_next(), number])
        call = CallDescription("the next batch", call_site=user_call(sys._getframe(1)))
        # Connects in this thread, so that all ranks create their groups in the same order.
        return self._thread.submit(_gather_flags, self._group(), message, call)

    def _first_repeat(self, flags: list[_Flag], remaining: RemainingBatches) -> Any:
        """Return a batch for ranks that never have one: the first of another rank. Collective.

        Nothing is sent if all ranks have a batch.
        """
        ranks_with_batch = [rank for rank, flag in enumerate(flags) if flag.has_next]
        if len(ranks_with_batch) == len(flags):
            return _END
        group = self._group()
        source = ranks_with_batch[0]
        batch = None
        if group.rank == source:
            batch = remaining.peek()
        return broadcast(group, batch, source, torch.device("cpu"))

    def _submodules(self) -> Iterator[nn.Module]:
        for module in self._modules:
            yield from module.modules()

    @contextmanager
    def _repeating(self, position: EpochPosition) -> Iterator[None]:
        """Mark the batch as a repeat, and restore random streams and buffers afterwards."""
        buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module in self._submodules():
            for name, buffer in module.named_buffers(recurse=False):
                buffers.append((module, name, buffer, buffer.clone()))
        streams = rng_state()
        position.is_repeat = True
        try:
            yield
        finally:
            position.is_repeat = False
            set_rng_state(streams)
            for module, name, buffer, values in buffers:
                registered_buffers(module)[name] = buffer
                buffer.detach().copy_(values)


def _total(flags: list[_Flag], choose: Callable[[Iterable[int]], int]) -> int | None:
    """Return the number of batches on all ranks. None unless every rank knows its own number."""
    numbers = [flag.number for flag in flags]
    if _UNKNOWN in numbers:
        return None
    return choose(numbers)


def _goes_on(flags: list[_Flag], choose: Callable[[Iterable[int]], int]) -> bool:
    return choose(flag.has_next for flag in flags) > 0


def _follows(
    next_flags: Future[list[_Flag]] | None,
    number: int,
    total: int | None,
    choose: Callable[[Iterable[int]], int],
) -> bool:
    """Return whether another batch follows on all ranks. Waits for flags that were asked for."""
    if next_flags is not None:
        return _goes_on(next_flags.result(), choose)
    assert total is not None, "without a total, flags are exchanged"
    return number < total


def _gather_flags(group: Communicator, message: Tensor, call: CallDescription) -> list[_Flag]:
    """Return the flags of all ranks. Raise unless they are at the same batch of the same loop."""
    rows = group.run(Collective(Operation.ALL_GATHER, message, call=call)).tolist()
    for row in rows:
        if row[:2] != rows[0][:2]:
            _refuse_progress(rows)
    return [_Flag(*row[2:]) for row in rows]


def _refuse_progress(rows: list[list[int]]) -> NoReturn:
    descriptions: list[str] = []
    for rank, (loop, batch, *_) in enumerate(rows[:8]):
        descriptions.append(f"rank {rank} behind batch {batch} of loop {loop}")
    raise UsageError(
        "a loop that ends on all ranks together",
        problem=f"the ranks are at different places of their loops: {', '.join(descriptions)}",
        expected="breaks at the same batch on all ranks",
    )


def without_repeats(position: EpochPosition, loss: Tensor, weight: Any) -> tuple[Tensor, Any]:
    """Return the loss and weight of a backward pass under ``"longest"``: zero for a repeat.

    Raises:
        UsageError: there is no weight.
    """
    if weight is None:
        raise UsageError(
            'fabric.backward(loss) in a loop under uneven="longest"',
            problem="a mean over the processes would count those that have no batch",
            suggestion="fabric.backward(losses.sum(), weight=len(losses))",
        )
    if not position.is_repeat:
        return loss, weight
    # Zero times infinity would not be a number.
    return torch.where(loss.isfinite(), loss, 0) * 0, weight * 0
