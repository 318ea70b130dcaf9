"""Ranks that are threads of this process: no transport, milliseconds to start, for code that only needs the semantics.

[Note: The mailbox] What a rank passes to a collective it puts into a mailbox, under the group, the number of the call
in that group and its rank; then it takes what the others put there. There is no process group, every reduction runs in
the order of ranks, and a rank that has returned is known at once to those that wait for it.
"""

import copy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from fabric._fabric import Fabric
from fabric.communicators import Collective, Communicator, Operation, Reduce
from fabric.errors import CollectiveMismatchError, UsageError
from fabric.runtime import Runtime
from fabric.strategies import Strategy
from fabric.testing.base import Report, check_arguments, check_size, failure, for_rank, name_of, raised
from fabric.world import World

__all__ = ["ThreadCommunicator", "ThreadedStrategy", "ThreadedWorld"]

_EXIT = 0.2  # seconds for threads to notice that the call is over


class ThreadedWorld:
    """A world of threads; see ``[Note: Worlds]``.

    What runs here runs in :class:`fabric.testing.RankPool`, but for modules, which threads do not set up. Arguments are
    copied for each rank, while what the function closes over, and torch's random state, is the same object for all
    ranks. A rank that never returns cannot be ended: its thread stays.

    Args:
        world_size: number of ranks.
        timeout: seconds that a call may take, unless ``run`` is given another.
        **options: of :class:`fabric.Fabric`, for every rank.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        check_size("ThreadedWorld", world_size)
        self.size, self.timeout, self._options = world_size, timeout, options

    def __repr__(self) -> str:
        return f"ThreadedWorld({self.size})"

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank; as :meth:`fabric.testing.RankPool.run`."""
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        limit = self.timeout if timeout is None else timeout
        mailbox, store = _Mailbox(), dist.HashStore()
        results: list[Any] = [None] * self.size
        reports: dict[int, Report] = {}

        def call(rank: int, args: list[Any], kwargs: dict[str, Any]) -> None:
            report = Report(rank=rank)
            try:
                with self._fabric(rank, mailbox, store) as fabric:
                    results[rank] = fn(fabric, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 (whatever it is, the caller of run() gets it)
                report = raised(rank, error)
            reports.setdefault(rank, report)
            mailbox.leave(rank, report.did)

        threads = []
        for rank in range(self.size):
            own = [copy.deepcopy(for_rank(value, rank)) for value in args]
            named = {name: copy.deepcopy(for_rank(value, rank)) for name, value in kwargs.items()}
            # A daemon, so that a rank that hangs does not keep the interpreter.
            threads.append(threading.Thread(target=call, args=(rank, own, named), name=f"rank-{rank}", daemon=True))
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + limit
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for rank, thread in enumerate(threads):
            if thread.is_alive():
                reports.setdefault(rank, _stuck(rank, thread, limit, rank in mailbox.waiting))
        for rank in list(reports):
            mailbox.leave(rank, reports[rank].did)
        for thread in threads:
            thread.join(_EXIT)
        if any(report.failed for report in reports.values()):
            raise failure(name_of(fn), [reports[rank] for rank in range(self.size)])
        return results

    def close(self) -> None:
        """Does nothing: the threads end with each call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fabric(self, rank: int, mailbox: "_Mailbox", store: dist.Store) -> Fabric:
        strategy = ThreadedStrategy(ThreadCommunicator(mailbox, rank, range(self.size)), store)
        options = {"accelerator": "cpu", "devices": self.size, **self._options}
        fabric = Fabric(strategy=strategy, environment="none", launcher="forkserver", **options)
        fabric._enter_rank(World(rank=rank, local_rank=rank, world_size=self.size, local_world_size=self.size))
        return fabric


def _stuck(rank: int, thread: threading.Thread, limit: float, waits: bool) -> Report:
    """The report of a rank that is still running."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = [] if frame is None else traceback.extract_stack(frame)
    own = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    # From where the user's function begins.
    lines = traceback.format_list(frames[own[0] + 1 :] if own else frames)
    text = "".join(["it was here, most recent call last\n", *lines])
    did = f"did not return within {limit:g} s"
    return Report(rank=rank, did=did, failed=True, secondary=int(waits), text=text)


class ThreadedStrategy(Strategy):
    """Collectives over a communicator that is there already; what the ranks of a :class:`ThreadedWorld` run under.

    Args:
        communicator: connects this rank to the others.
        store: where the ranks leave values for each other.
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
        """Refuse: the threads of a process would share the module.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"setup_module({type(module).__name__}) in a ThreadedWorld",
            "its ranks are threads, which synchronize no gradients",
            "collectives and data",
            f"RankPool({self.world_size}), which runs the same function in processes",
        )


class _PeerLost(UsageError, ConnectionError):
    """Another rank will not make this call, which is that rank's failure."""


class _Mailbox:
    """Where the ranks of one call leave values for each other; see the note at the top.

    Attributes:
        waiting: the ranks that wait for another just now.
    """

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self._changed = threading.Condition()
        self._values: dict[Hashable, list[Any]] = {}
        self._left: dict[int, str] = {}

    def put(self, key: Hashable, value: Any, readers: int) -> None:
        """Leave a value that so many ranks will take."""
        with self._changed:
            self._values[key] = [value, readers]
            self._changed.notify_all()

    def take(self, key: Hashable, author: int, reader: int, request: str) -> Any:
        """Wait for the value that another rank puts there."""
        with self._changed:
            self.waiting.add(reader)
            self._changed.wait_for(lambda: key in self._values or author in self._left)
            self.waiting.discard(reader)
            if key not in self._values:
                raise _PeerLost(
                    f"{request} on rank {reader}",
                    f"rank {author} {self._left[author]} and did not call it",
                    "the same calls on all ranks, in the same order",
                    "look for a branch on the rank before this call",
                )
            entry = self._values[key]
            entry[1] -= 1
            if entry[1] == 0:
                del self._values[key]
            return entry[0]

    def leave(self, rank: int, did: str) -> None:
        """Note that a rank makes no more calls; those that wait for it raise."""
        with self._changed:
            self._left[rank] = did
            self._changed.notify_all()


class ThreadCommunicator(Communicator):
    """The collectives of a group of threads.

    Ranks that call different collectives, or pass different shapes, dtypes, reductions or sources, all raise a
    :class:`fabric.errors.CollectiveMismatchError`.

    Args:
        mailbox: what they exchange values through.
        rank: rank of this thread in the world.
        ranks: ranks of the members in the world, ascending.
        name: the same on all members, and of no other group.
    """

    def __init__(self, mailbox: _Mailbox, rank: int, ranks: Sequence[int], name: Hashable = "world") -> None:
        self._mailbox, self._own, self._ranks, self._name = mailbox, rank, list(ranks), name
        self.rank, self.size, self.device = self._ranks.index(rank), len(self._ranks), torch.device("cpu")
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = {}

    @override
    def run(self, collective: Collective) -> Any:
        buffer, peer, op = collective.buffer, collective.peer or 0, collective.reduce or Reduce.SUM
        if collective.operation is Operation.SEND or collective.operation is Operation.RECV:
            return self._message(collective.message(self.rank), buffer)
        passed = collective.rows if collective.operation is Operation.SCATTER else buffer
        call = ", ".join(collective.facts.values())
        values = self._exchange(call, passed.clone() if isinstance(passed, Tensor) else passed)
        match collective.operation:
            case Operation.ALL_REDUCE:
                return buffer.copy_(op.fold(values))
            case Operation.ALL_GATHER:
                return torch.stack(values)
            case Operation.REDUCE_SCATTER:
                return op.fold([row[self.rank] for row in values])
            case Operation.ALL_TO_ALL:
                return torch.stack([rows[self.rank] for rows in values])
            case Operation.BROADCAST:
                return buffer.copy_(values[peer])
            case Operation.SCATTER:
                return buffer.copy_(values[peer][self.rank])
            case Operation.GATHER:
                return torch.stack(values) if self.rank == peer else None
            case Operation.BROADCAST_OBJECT:
                return values[peer]
            case Operation.NEW_GROUP if self.rank not in buffer:
                return None
            case Operation.NEW_GROUP:
                ranks = [self._ranks[rank] for rank in buffer]
                return ThreadCommunicator(self._mailbox, self._own, ranks, (self._name, self._calls))
            case _:
                return values

    def _exchange(self, call: str, value: Any) -> list[Any]:
        """What every rank passes to this call, in rank order."""
        self._calls += 1
        key = (self._name, self._calls)
        self._mailbox.put((*key, self._own), (call, value), self.size)
        calls = [self._mailbox.take((*key, rank), rank, self._own, call) for rank in self._ranks]
        if len({other for other, _ in calls}) > 1:
            raise CollectiveMismatchError(
                f"{call} on rank {self._own}",
                "; ".join(f"rank {rank} calls {other}" for rank, (other, _) in zip(self._ranks, calls, strict=True)),
                "the same call on all ranks, with equal shapes and dtypes",
                "look for a branch on the rank before this call",
            )
        return [value for _, value in calls]

    def _message(self, pair: tuple[int, int], buffer: Tensor) -> Tensor:
        number = self._messages[pair] = self._messages.get(pair, 0) + 1
        key = (self._name, "message", *pair, number)
        if self.rank == pair[0]:
            self._mailbox.put(key, buffer.clone(), 1)
            return buffer
        return buffer.copy_(self._mailbox.take(key, self._ranks[pair[0]], self._own, f"recv(src={pair[0]})"))
