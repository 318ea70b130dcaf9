"""Look-ahead in a loop over a loader: whether another batch follows, on this rank and on the others.

[Note: Uneven ranks] Where fabric does not shard the data, ranks may have different numbers of batches. Under
``uneven="shortest"`` all stop when the first rank runs out. Under ``"longest"`` they stop when every rank has run out:
until then a rank without batches gets its last one again, a *repeat*, or another rank's first batch if it never had
one. One batch ahead, all ranks exchange a *flag*, whether they have another batch, in a separate thread and group while
the loop computes. If all ranks know how many batches they have, they exchange the numbers once, and no flags.

A repeat is not part of the epoch. Its loss and weight count as zero in ``fabric.backward``, it does not change the
position, and random streams and module buffers are restored before the next batch.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fabric._torch import registered_buffers
from fabric.collectives import broadcast
from fabric.communicators.base import CallDescription, Collective, Communicator, Operation
from fabric.data.position import ActiveIterator, EpochState, LoaderSpec
from fabric.diagnostics.call_site import user_call
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError, UsageError
from fabric.seed import rng_state, set_rng_state

__all__ = [
    "Agreement",
    "Upcoming",
    "Windows",
    "check_no_window",
    "number_of_batches",
    "without_repeats",
]

_END = object()


def number_of_batches(spec: LoaderSpec, state: EpochState, loader: DataLoader[Any]) -> int | None:
    """The number of batches in an iteration on this rank; None if unknown."""
    entries = spec.shard_length(state)
    full, rest = divmod(entries or 0, spec.entries_per_batch)
    return None if entries is None else full + (rest > 0 and not loader.drop_last)


class Upcoming:
    """The remaining batches of this rank. If their number is unknown, one is fetched ahead.

    Args:
        batches: the loader's iterator.
        left: how many there are; None if unknown.
        state: of the iteration.
        own_state: returns the loader's or dataset's own state, which is saved before a batch is fetched ahead.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        left: int | None,
        state: EpochState,
        own_state: Callable[[EpochState], Any],
    ) -> None:
        self.left = left
        self.state = state
        self._batches = batches
        self._own_state = own_state
        self._fetched: list[Any] = []

    def has_next(self) -> bool:
        """Whether there is another one."""
        return self.peek() is not _END if self.left is None else self.left > 0

    def peek(self) -> Any:
        """The next batch, without consuming it."""
        if not self._fetched:
            self.state.ahead = None
            self.state.ahead = (
                None if self.left is not None else copy.deepcopy(self._own_state(self.state))
            )
            self._fetched.append(next(self._batches, _END))
        return self._fetched[0]

    def take(self, is_end: bool = False) -> Any:
        """The next batch. With ``is_end`` there must be none: asking the loader once more ends its workers."""
        if (self.peek() is _END) is not is_end:
            problem = (
                f"its sampler yields {'more' if is_end else 'fewer'} batches than its length says"
            )
            raise UsageError(
                "a loop whose end is known ahead",
                problem,
                "a sampler with the right length, or none",
            )
        self.left = None if self.left is None else self.left - 1
        return self._fetched.pop()

    def all(self) -> Iterator[Any]:
        """Yield all of them; ``state.is_final`` says whether the current one is the last."""
        while self.has_next():
            batch = self.take()
            self.state.is_final = not self.has_next()
            yield batch
        self.take(is_end=True)


class Agreement:
    """The flags of a job; see ``[Note: Uneven ranks]``.

    Args:
        size: number of ranks.
        connect: returns the CPU communicator of all ranks, in a group for the given name. Collective.
        modules: the modules that are set up.
    """

    def __init__(
        self, size: int = 1, connect: Callable[[str], Any] = str, modules: Iterable[nn.Module] = ()
    ) -> None:
        self.size = size
        self._connect = connect
        self._modules = modules
        self._loops = count(1)
        self._thread = ThreadPoolExecutor(1, "fabric-batches")

    def check_modules(self) -> None:
        """Raise a UsageError if a repeat would enter statistics computed over all ranks."""
        if any(
            isinstance(part, nn.SyncBatchNorm)
            for model in self._modules
            for part in model.modules()
        ):
            problem = "a repeated batch would count in the statistics that SyncBatchNorm takes over all ranks"
            raise UsageError(
                'a loop under uneven="longest"',
                problem,
                'uneven="shortest", or batch norms of each rank',
            )

    def batches(
        self, upcoming: Upcoming, pick: Callable[[Iterable[int]], int], ends: bool
    ) -> Iterator[Any]:
        """Yield equally many batches on all ranks: the least (``pick=min``) or largest (``max``) number of any rank.

        With ``ends``, ``state.is_final`` says whether the current one is the last.
        """
        loop = next(self._loops)
        number = 0
        batch = _END
        numbers = self._ask(
            loop, 0, upcoming.has_next(), -1 if upcoming.left is None else upcoming.left
        ).result()
        has, left = zip(*numbers, strict=True)
        total = None if -1 in left else pick(left)
        goes_on = pick(has)
        if goes_on and not all(has):
            group = self._connect("batches")
            source = has.index(1)
            batch = broadcast(
                group,
                upcoming.peek() if source == group.rank else None,
                source,
                torch.device("cpu"),
            )
        while goes_on:
            is_own = upcoming.has_next()
            number = number + 1
            batch = upcoming.take() if is_own else batch
            flags = self._ask(loop, number, upcoming.has_next(), -1) if total is None else None

            def follows(flags: Any = flags, left: int = (total or 0) - number) -> bool:
                return left > 0 if flags is None else pick(has for has, _ in flags.result()) > 0

            upcoming.state.is_final = ends and not follows()
            with nullcontext() if is_own else self._repeating(upcoming.state):
                yield batch
            goes_on = follows()
        if not upcoming.has_next():
            upcoming.take(is_end=True)

    def close(self) -> None:
        """Wait until the other ranks have answered or exited."""
        self._thread.shutdown()

    def _ask(self, *facts: int) -> Future[list[list[int]]]:
        # Connects in this thread, so that all ranks create their groups in the same order.
        call = CallDescription("the next batch", call_site=user_call(sys._getframe(1)))
        return self._thread.submit(_exchange, self._connect("batches"), facts, call)

    @contextmanager
    def _repeating(self, state: EpochState) -> Iterator[None]:
        """Mark the batch as a repeat within, and restore random streams and buffers afterwards."""
        parts = [part for model in self._modules for part in model.modules()]
        kept = [
            (part, name, each, each.clone())
            for part in parts
            for name, each in part.named_buffers(recurse=False)
        ]
        streams = rng_state()
        state.is_repeat = True
        try:
            yield
        finally:
            state.is_repeat = False
            set_rng_state(streams)
            for part, name, buffer, value in kept:
                registered_buffers(part)[name] = buffer
                buffer.detach().copy_(value)


def _exchange(
    group: Communicator, facts: tuple[int, ...], call: CallDescription
) -> list[list[int]]:
    """The flags of all ranks; raises unless all ranks are at the same batch of the same loop."""
    rows = group.run(Collective(Operation.ALL_GATHER, torch.tensor(facts), call=call)).tolist()
    if any(row[:2] != rows[0][:2] for row in rows):
        places = [
            f"rank {rank} behind batch {row[1]} of loop {row[0]}"
            for rank, row in enumerate(rows[:8])
        ]
        problem = f"the ranks are at different places of their loops: {', '.join(places)}"
        raise UsageError(
            "a loop that ends on all ranks together",
            problem,
            "breaks at the same batch on all ranks",
        )
    return [row[2:] for row in rows]


def without_repeats(state: EpochState, loss: Tensor, weight: Any) -> tuple[Tensor, Any]:
    """The loss and weight of a backward pass in a loop under ``"longest"``: zero for a repeat.

    Raises:
        UsageError: there is no weight.
    """
    if weight is None:
        problem = "a mean over the processes would count those that have no batch"
        suggestion = "fabric.backward(losses.sum(), weight=len(losses))"
        raise UsageError(
            'fabric.backward(loss) in a loop under uneven="longest"', problem, suggestion=suggestion
        )
    return (
        (torch.where(loss.isfinite(), loss, 0) * 0, weight * 0)
        if state.is_repeat
        else (loss, weight)
    )


class Windows:
    """A loop over a set-up loader in windows of ``steps`` micro-batches; ``fabric.accumulate`` returns it.

    Each iteration over it iterates the loader once, and yields pairs ``(batch, last)``. ``last`` is true for the last
    micro-batch of a window, and the same on all processes. The last window of an epoch may be shorter; resuming from a
    loaded position begins a new one::

        for batch, last in fabric.accumulate(loader, steps=4):
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(loss_sum(model, batch), weight=len(batch))
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

    If the number of batches is known, nothing is fetched earlier than in a loop over the loader. Otherwise one batch is
    fetched ahead, which the loader's ``state_dict`` does not count. ``fabric.save`` inside a window raises a
    :class:`fabric.errors.CheckpointError`, since a checkpoint does not contain accumulated gradients.

    Args:
        loader: what ``setup_dataloaders`` returned.
        steps: micro-batches in a window, 1 or more.

    Raises:
        ArgumentTypeError: another kind of loader.
        ConfigurationError: ``steps`` is less than 1, or not an integer.
        UsageError: processes may have different numbers of batches, and ``uneven`` does not say how that is handled.
    """

    def __init__(self, loader: Any, steps: int) -> None:
        request = f"fabric.accumulate({type(loader).__name__}, steps={steps!r})"
        spec: Any = getattr(loader, "_spec", None)
        if not isinstance(spec, LoaderSpec):
            raise ArgumentTypeError(
                request, "the loader is not set up", suggestion="fabric.setup_dataloaders(loader)"
            )
        if type(steps) is not int or steps < 1:
            raise ConfigurationError(request, expected="an integer number of steps, 1 or more")
        if loader._agreement.size > 1 and not (spec.is_even or spec.agrees):
            problem = (
                "fabric does not shard this data: processes with more batches would wait for ever"
            )
            raise UsageError(
                request, problem, suggestion='fabric.setup_dataloaders(loader, uneven="shortest")'
            )
        self.loader = loader
        self.steps = steps

    def __len__(self) -> int:
        """The number of micro-batches in an epoch."""
        return len(self.loader)

    @property
    def resumed_at(self) -> int:
        """As ``resumed_at`` of the loader."""
        return self.loader.resumed_at

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        return self._pairs(*self.loader._begin(ends=True))

    def _pairs(self, state: EpochState, batches: Any) -> Iterator[tuple[Any, bool]]:
        with closing(batches):
            for number, batch in enumerate(batches):
                micro_batch = number % self.steps + 1
                last = micro_batch == self.steps or state.is_final
                state.window = None if last else (micro_batch, self.steps)
                yield batch, last


def check_no_window(active: Sequence[ActiveIterator]) -> None:
    """Raise a CheckpointError if a window of one of these iterations is open."""
    for _, state in active:
        if state.window is not None:
            place = "micro-batch {} of {} is out, at batch {} of epoch {}"
            raise CheckpointError(
                "fabric.save(...) inside a window of fabric.accumulate",
                place.format(*state.window, state.received, state.epoch)
                + ": gradients so far are in no checkpoint",
                suggestion="if last: optimizer.step(); optimizer.zero_grad(); fabric.save(...)",
            )
