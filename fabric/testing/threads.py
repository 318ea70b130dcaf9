"""Ranks that are threads of this process: no transport, milliseconds to start, for code that only needs the semantics.

[Note: The board] What a rank passes to a collective it posts on a board, under the group, the number of the call in
that group and its rank; then it takes what the others posted there. The ranks so meet without a process group, every
reduction runs in the order of ranks, and a rank that has left is known at once to those that wait for it.
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
from fabric.testing.base import Report, check_call, check_world, failure, name_of, own_part, raised
from fabric.world import World

__all__ = ["ThreadCommunicator", "ThreadedStrategy", "ThreadedWorld"]

_LEAVE = 0.2  # seconds for threads to notice that the call is over


class ThreadedWorld:
    """A world of threads; see ``[Note: Worlds]``.

    What runs here runs in :class:`fabric.testing.RankPool`, but for modules, which threads do not set up. Arguments are
    copied for each rank, while what the function closes over, and torch's random state, is the same object for all
    ranks. A rank that never returns cannot be ended: its thread stays.

    Args:
        world_size: number of ranks.
        timeout: seconds that a call may take, unless ``run`` is told otherwise.
        **options: of :class:`fabric.Fabric`, for every rank.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        check_world("ThreadedWorld", world_size, timeout)
        self.size, self.timeout, self._options = world_size, timeout, options

    def __repr__(self) -> str:
        return f"ThreadedWorld({self.size})"

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank; as :meth:`fabric.testing.RankPool.run`."""
        check_call(fn, [*args, *kwargs.values()], self.size)
        limit = self.timeout if timeout is None else timeout
        board, store = _Board(), dist.HashStore()
        ranks = [_Rank(rank, self.size, board, store, self._options) for rank in range(self.size)]
        for rank in ranks:
            own = [copy.deepcopy(own_part(value, rank.rank)) for value in args]
            rank.start(fn, own, {k: copy.deepcopy(own_part(value, rank.rank)) for k, value in kwargs.items()})
        deadline = time.monotonic() + limit
        for rank in ranks:
            rank.thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank.stuck(limit) for rank in ranks if rank.thread.is_alive()]
        board.abandon(f"the call did not end within {limit:g} s")
        for rank in ranks:
            rank.thread.join(_LEAVE)
        by_rank = {report.rank: report for report in [*(rank.report for rank in ranks), *late]}
        if any(report.failed for report in by_rank.values()):
            raise failure(name_of(fn), [by_rank[rank] for rank in range(self.size)])
        return [rank.result for rank in ranks]

    def close(self) -> None:
        """Nothing: the threads end with each call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Rank:
    """One thread, and how its call went."""

    def __init__(self, rank: int, size: int, board: "_Board", store: dist.Store, options: dict[str, Any]) -> None:
        self.rank, self.result = rank, None
        self.report = Report(rank=rank)
        self._world = World(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
        self._board, self._options = board, options
        self._strategy = ThreadedStrategy(ThreadCommunicator(board, rank, range(size)), store)

    def start(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        # A daemon, so that a rank that hangs does not keep the interpreter.
        name = f"fabric-rank-{self.rank}"
        self.thread = threading.Thread(target=self._work, args=(fn, args, kwargs), name=name, daemon=True)
        self.thread.start()

    def stuck(self, limit: float) -> Report:
        """The report of a rank that is still running."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        waits = self._board.is_waiting(self.rank)
        text = "" if frame is None else _own_stack(traceback.extract_stack(frame))
        did = f"did not return within {limit:g} s"
        return Report(rank=self.rank, did=did, failed=True, suspicion=int(waits), text=text)

    def _work(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            options = {"accelerator": "cpu", "devices": self._world.world_size, **self._options}
            fabric = Fabric(strategy=self._strategy, environment="none", launcher="forkserver", **options)
            fabric._enter_rank(self._world)
            with fabric:
                self.result = fn(fabric, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (whatever it is, the caller of run() gets it)
            self.report = raised(self.rank, error)
        finally:
            self._board.leave(self.rank, self.report.did)


def _own_stack(frames: traceback.StackSummary) -> str:
    """From where the user's function begins."""
    first = max(index for index, frame in enumerate(frames) if frame.name == _Rank._work.__name__) + 1
    return "".join(["it was here, most recent call last\n", *traceback.format_list(frames[first:])])


class ThreadedStrategy(Strategy):
    """Collectives over a communicator that is there already; what the ranks of a :class:`ThreadedWorld` run under.

    Args:
        communicator: how this rank talks to the others.
        store: where the ranks leave values for each other.
    """

    name = "threads"
    connects_processes = False
    drives_all_devices = False

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
            "its ranks are threads, which synchronise no gradients",
            "collectives and data",
            f"RankPool({self.world_size}), which runs the same function in processes",
        )


class _LeftAlone(UsageError, ConnectionError):
    """Another rank will not come, which is that rank's failure."""


class _Board:
    """Where the ranks of one call leave values for each other; see the note at the top."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._posts: dict[Hashable, list[Any]] = {}
        self._gone: dict[int, str] = {}
        self._waiting: set[int] = set()
        self._over = ""

    def post(self, key: Hashable, value: Any, readers: int) -> None:
        """Leave a value that so many ranks will take."""
        with self._condition:
            self._posts[key] = [value, readers]
            self._condition.notify_all()

    def take(self, key: Hashable, author: int, reader: int, asked: str) -> Any:
        """Wait for the value that another rank posts."""
        with self._condition:
            self._waiting.add(reader)
            self._condition.wait_for(lambda: key in self._posts or author in self._gone or self._over)
            self._waiting.discard(reader)
            if key not in self._posts:
                raise _LeftAlone(
                    f"{asked} on rank {reader}",
                    self._over or f"rank {author} {self._gone[author]} and did not call it",
                    "the same calls on all ranks, in the same order",
                    "look for a branch on the rank before this call",
                )
            post = self._posts[key]
            post[1] -= 1
            if post[1] == 0:
                del self._posts[key]
            return post[0]

    def leave(self, rank: int, did: str) -> None:
        """A rank posts nothing more."""
        with self._condition:
            self._gone[rank] = did
            self._condition.notify_all()

    def abandon(self, reason: str) -> None:
        """Send all away who still wait."""
        with self._condition:
            self._over = reason
            self._condition.notify_all()

    def is_waiting(self, rank: int) -> bool:
        """Whether a rank waits for another just now."""
        with self._condition:
            return rank in self._waiting


class ThreadCommunicator(Communicator):
    """The collectives of a group of threads.

    Ranks that call different collectives, or pass different shapes, dtypes, reductions or sources, all raise a
    :class:`fabric.errors.CollectiveMismatchError`.

    Args:
        board: where they meet.
        rank: rank of this thread in the world.
        ranks: ranks of the members in the world, ascending.
        name: the same on all members, and of no other group.
    """

    def __init__(self, board: _Board, rank: int, ranks: Sequence[int], name: Hashable = "world") -> None:
        self._board, self._own, self._ranks, self._name = board, rank, list(ranks), name
        self.rank, self.size, self.device = self._ranks.index(rank), len(self._ranks), torch.device("cpu")
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = {}

    @override
    def run(self, collective: Collective) -> Any:
        buffer, peer, op = collective.buffer, collective.peer or 0, collective.reduce or Reduce.SUM
        if pair := collective.message(self.rank):
            return self._message(pair, buffer)
        passed = collective.rows if collective.operation is Operation.SCATTER else buffer
        values = self._exchange(_called(collective), passed.clone() if isinstance(passed, Tensor) else passed)
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
            case _:
                return values

    @override
    def new_group(self, ranks: Sequence[int]) -> "ThreadCommunicator | None":
        members = self.check_members(ranks)
        self._exchange(f"new_group({members})", None)
        if self.rank not in members:
            return None
        group = self._name, self._calls
        return ThreadCommunicator(self._board, self._own, [self._ranks[rank] for rank in members], group)

    @override
    def close(self) -> None:
        pass

    def _exchange(self, call: str, value: Any) -> list[Any]:
        """What every rank passes to this call, in rank order."""
        self._calls += 1
        key = (self._name, self._calls)
        self._board.post((*key, self._own), (call, value), self.size)
        posts = [self._board.take((*key, rank), rank, self._own, call) for rank in self._ranks]
        if len({called for called, _ in posts}) > 1:
            raise CollectiveMismatchError(
                f"{call} on rank {self._own}",
                "; ".join(f"rank {rank} calls {called}" for rank, (called, _) in zip(self._ranks, posts, strict=True)),
                "the same call on all ranks, with equal shapes and dtypes",
                "look for a branch on the rank before this call",
            )
        return [value for _, value in posts]

    def _message(self, pair: tuple[int, int], buffer: Tensor) -> Tensor:
        number = self._messages[pair] = self._messages.get(pair, 0) + 1
        key = (self._name, "message", *pair, number)
        if self.rank == pair[0]:
            self._board.post(key, buffer.clone(), 1)
            return buffer
        return buffer.copy_(self._board.take(key, self._ranks[pair[0]], self._own, f"recv(src={pair[0]})"))


def _called(collective: Collective) -> str:
    """What has to be the same on all ranks."""
    buffer, operation = collective.buffer, collective.operation
    arguments = [] if collective.reduce is None else [collective.reduce.value]
    if collective.peer is not None:
        arguments.append(f"{'dst' if operation is Operation.GATHER else 'src'}={collective.peer}")
    call = f"{operation.value}({', '.join(arguments)})" if arguments else operation.value
    if isinstance(buffer, Tensor):
        call += f" of {str(buffer.dtype).removeprefix('torch.')} {tuple(buffer.shape)}"
    return call
