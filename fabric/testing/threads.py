"""Ranks as threads of this process, for code that needs only the semantics: no transport, starts in milliseconds.

[Note: The mailbox] For each collective, a rank puts its value into a queue of the mailbox for every member of the
group, then takes the values of the others from its own queues. There is no process group, reductions run in rank order,
and ranks that wait for a rank that has returned raise at once.
"""

import copy
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from fabric._fabric import Fabric
from fabric.communicators import Collective, Communicator, Operation, Reduce, fold
from fabric.errors import CollectiveMismatchError, ConfigurationError, UsageError
from fabric.runtime import Runtime
from fabric.strategies import Strategy
from fabric.testing.base import Report, check_arguments, failure, for_rank, name_of, raised
from fabric.world import World

__all__ = ["ThreadCommunicator", "ThreadedStrategy", "ThreadedWorld"]

_EXIT = 0.2  # seconds for threads to end after the call


class ThreadedWorld:
    """A world of threads; see ``[Note: Worlds]``.

    It runs the same functions as :class:`fabric.testing.RankPool`, except that threads cannot set up modules. Arguments
    are copied for each rank; objects that the function closes over, and torch's random state, are shared by all ranks.
    A rank that never returns cannot be ended: its thread stays.

    Args:
        world_size: number of ranks.
        timeout: seconds that a call may take, unless ``run`` gets another timeout.
        **options: of :class:`fabric.Fabric`, for every rank.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        if world_size < 1:
            raise ConfigurationError(
                f"ThreadedWorld({world_size})", "there has to be one rank at least"
            )
        self.size = world_size
        self.timeout = timeout
        self._options = options

    def __repr__(self) -> str:
        return f"ThreadedWorld({self.size})"

    def run(
        self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank, like :meth:`fabric.testing.RankPool.run`."""
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        limit = self.timeout if timeout is None else timeout
        mailbox = _Mailbox()
        store = dist.HashStore()
        results: list[Any] = [None] * self.size
        reports = [Report(rank=rank) for rank in range(self.size)]

        def call(rank: int) -> None:
            try:
                names = {name: for_rank(value, rank) for name, value in kwargs.items()}
                own, names = copy.deepcopy(([for_rank(value, rank) for value in args], names))
                with self._fabric(rank, mailbox, store) as fabric:
                    results[rank] = fn(fabric, *own, **names)
            except BaseException as error:  # noqa: BLE001 (run() raises it in the caller)
                reports[rank] = raised(rank, error)
            mailbox.leave(rank, reports[rank].did)

        # Daemon threads, so that a hanging rank does not keep the interpreter alive.
        threads = [
            threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + limit
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        final = [
            _late_report(report, thread, limit) if thread.is_alive() else report
            for report, thread in zip(reports, threads, strict=True)
        ]
        for report in final:
            mailbox.leave(report.rank, report.did)
        for thread in threads:
            thread.join(_EXIT)
        if any(report.failed for report in final):
            raise failure(name_of(fn), final)
        return results

    def close(self) -> None:
        """Do nothing: the threads end with each call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Same as :meth:`close`."""

    def _fabric(self, rank: int, mailbox: "_Mailbox", store: dist.Store) -> Fabric:
        strategy = ThreadedStrategy(ThreadCommunicator(mailbox, rank, range(self.size)), store)
        options = {"accelerator": "cpu", "devices": self.size, **self._options}
        fabric = Fabric(strategy=strategy, environment="none", launcher="forkserver", **options)
        fabric._enter_rank(
            World(rank=rank, local_rank=rank, world_size=self.size, local_world_size=self.size)
        )
        return fabric


def _late_report(report: Report, thread: threading.Thread, limit: float) -> Report:
    """The report of a rank that is still running."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    waits = any((frame.filename, frame.name) == (__file__, "take") for frame in stack)
    text = "".join(["it was here, most recent call last\n", *traceback.format_list(stack)])
    return replace(
        report,
        did=f"did not return within {limit:g} s",
        failed=True,
        secondary=int(waits),
        text=text,
    )


class ThreadedStrategy(Strategy):
    """The strategy of the ranks of a :class:`ThreadedWorld`: collectives over a given communicator.

    Args:
        communicator: connects this rank to the others.
        store: the store of the ranks.
    """

    name = "threads"

    def __init__(self, communicator: Communicator, store: dist.Store) -> None:
        super().__init__()
        self._connection = communicator, store

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        assert runtime is not None, "Fabric makes it"
        runtime.start(*self._connection)
        self._runtime = runtime

    @override
    def setup_module(self, module: nn.Module) -> NoReturn:
        """Raise, since the threads of a process would share the module.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"setup_module({type(module).__name__}) in a ThreadedWorld",
            f"threads synchronize no gradients; RankPool({self.world_size}) runs the same function in processes",
        )


class _Mailbox:
    """The queues between the ranks of one call; see ``[Note: The mailbox]``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: defaultdict[Hashable, deque[Any]] = defaultdict(deque)
        self._left: dict[int, str] = {}

    def put(self, queue: Hashable, author: int, readers: Sequence[int], value: Any) -> None:
        """Append a value to the named queue from ``author`` to each reader."""
        with self._changed:
            for reader in readers:
                self._queues[queue, author, reader].append(value)
            self._changed.notify_all()

    def take(self, queue: Hashable, author: int, reader: int, request: str) -> Any:
        """Wait for the next value in the named queue from ``author`` to ``reader``."""
        with self._changed:
            values = self._queues[queue, author, reader]
            self._changed.wait_for(lambda: values or author in self._left)
            if values:
                return values.popleft()
            # A ConnectionError, so that it is not taken for the root cause.
            missing = f"rank {author} {self._left[author]} and did not call it"
            raise ConnectionError(
                f"{request} on rank {reader}: {missing}; look for a branch on the rank before it"
            )

    def leave(self, rank: int, did: str) -> None:
        """Record that a rank makes no more calls, so that ranks that wait for it raise."""
        with self._changed:
            self._left[rank] = did
            self._changed.notify_all()


class ThreadCommunicator(Communicator):
    """The collectives of a group of threads.

    Ranks that call different collectives, or pass different shapes, dtypes, reductions or sources, all raise a
    :class:`fabric.errors.CollectiveMismatchError`.

    Args:
        mailbox: the queues through which they exchange values.
        rank: rank of this thread in the world.
        ranks: ranks of the members in the world, ascending.
        name: equal on all members, and different from that of any other group.
    """

    def __init__(
        self, mailbox: _Mailbox, rank: int, ranks: Sequence[int], name: Hashable = "world"
    ) -> None:
        self._mailbox = mailbox
        self._own = rank
        self._ranks = list(ranks)
        self._name = name
        self.rank = self._ranks.index(rank)
        self.size = len(self._ranks)
        self.device = torch.device("cpu")

    @override
    def run(self, collective: Collective) -> Any:
        buffer = collective.buffer
        op = collective.reduce or Reduce.SUM
        peer: Any = collective.peer
        if collective.operation in (Operation.SEND, Operation.RECV):
            src, dst = (self._ranks[rank] for rank in collective.message(self.rank))
            if self._own == src:
                return self._mailbox.put((self._name, "messages"), src, [dst], buffer.clone())
            return buffer.copy_(
                self._mailbox.take((self._name, "messages"), src, dst, f"recv(src={peer})")
            )
        # The name of a group is its first rank's object: the same on all members, and unique.
        passed = {Operation.SCATTER: collective.rows, Operation.NEW_GROUP: object()}.get(
            collective.operation, buffer
        )
        call = (collective.call and collective.call.text) or ", ".join(collective.facts.values())
        values = self._exchange(call, passed.clone() if isinstance(passed, Tensor) else passed)
        match collective.operation:
            case Operation.ALL_REDUCE:
                return buffer.copy_(fold(op, values))
            case Operation.REDUCE_SCATTER:
                return fold(op, [rows[self.rank] for rows in values])
            case Operation.ALL_TO_ALL:
                return torch.stack([rows[self.rank] for rows in values])
            case Operation.ALL_GATHER | Operation.GATHER:
                return torch.stack(values) if peer in (None, self.rank) else None
            case Operation.BROADCAST:
                return buffer.copy_(values[peer])
            case Operation.SCATTER:
                return buffer.copy_(values[peer][self.rank])
            case Operation.NEW_GROUP:
                ranks = [self._ranks[rank] for rank in buffer]
                return (
                    ThreadCommunicator(self._mailbox, self._own, ranks, values[0])
                    if self._own in ranks
                    else None
                )
            case _:
                return values if peer is None else values[peer]

    def _exchange(self, call: str, value: Any) -> list[Any]:
        """The values that all ranks pass to this call, in rank order."""
        self._mailbox.put(self._name, self._own, self._ranks, (call, value))
        received = [self._mailbox.take(self._name, rank, self._own, call) for rank in self._ranks]
        calls, values = zip(*received, strict=True)
        if len(set(calls)) > 1:
            raise CollectiveMismatchError(
                f"{call} on rank {self._own}",
                "; ".join(
                    f"rank {rank} calls {other}"
                    for rank, other in zip(self._ranks, calls, strict=True)
                ),
                "the same call on all ranks, with equal shapes and dtypes; look for a branch on the rank before it",
            )
        return list(values)
