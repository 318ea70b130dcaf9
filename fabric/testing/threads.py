"""Ranks as threads of this process, for code that needs the semantics but no transport.

[Note: The mailbox] For each collective, a rank puts its value into a queue of the mailbox for every
member of the group, then takes the values of the members from the queues to itself. There is no
process group, reductions run in rank order, and ranks that wait for a rank that has returned raise
at once.
"""

import copy
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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
from fabric.testing.base import (
    Report,
    arguments_of_rank,
    check_arguments,
    error_report,
    function_name,
    rank_failed_error,
)
from fabric.world import World

__all__ = ["ThreadCommunicator", "ThreadedStrategy", "ThreadedWorld"]

_EXIT = 0.2  # seconds for the threads to end after the call


class ThreadedWorld:
    """A world whose ranks are threads of this process.

    It runs the same functions as :class:`fabric.testing.RankPool`, except that threads cannot set
    up modules. Arguments are copied for each rank. Objects that the function closes over, and
    torch's random state, are shared by all ranks. A rank that never returns cannot be ended: its
    thread stays.

    Args:
        world_size: number of ranks.
        timeout: seconds that a call may take, unless ``run`` is passed another timeout.
        **options: of :class:`fabric.Fabric`, for every rank.

    Raises:
        ConfigurationError: ``world_size`` is less than one.
    """

    def __init__(self, world_size: int, *, timeout: float = 30.0, **options: Any) -> None:
        if world_size < 1:
            request = f"ThreadedWorld({world_size})"
            raise ConfigurationError(request, problem="there has to be one rank at least")
        self.size = world_size
        self.timeout = timeout
        self._options = options

    def __repr__(self) -> str:
        return f"ThreadedWorld({self.size})"

    def run(
        self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(fabric, *args, **kwargs)`` on every rank.

        Args:
            fn: any function.
            *args: its arguments. A :class:`PerRank` has a different value for each rank.
            timeout: seconds that this call may take. None uses the timeout of the world.
            **kwargs: keyword arguments, like ``args``.

        Returns:
            The results in rank order.

        Raises:
            RankFailedError: a rank raised or did not return in time. The text says what each rank
                did. ``__cause__`` is the exception of the rank.
            ConfigurationError: a :class:`PerRank` has another number of values.
        """
        check_arguments(fn, [*args, *kwargs.values()], self.size)
        if timeout is None:
            timeout = self.timeout
        call = _ThreadedCall(
            fn=fn,
            args=args,
            kwargs=kwargs,
            mailbox=_Mailbox(),
            store=dist.HashStore(),
            fabric_options=self._options,
            results=[None] * self.size,
            reports=[Report(rank=rank) for rank in range(self.size)],
        )
        reports = call.run(timeout)
        if any(report.failed for report in reports):
            raise rank_failed_error(function_name(fn), reports)
        return call.results

    def close(self) -> None:
        """Do nothing: the threads end with each call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, as :meth:`close`."""


@dataclass(frozen=True, kw_only=True)
class _ThreadedCall:
    """One call of a function on every rank of a world."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    mailbox: "_Mailbox"
    store: dist.Store
    fabric_options: Mapping[str, Any]
    results: list[Any]
    reports: list[Report]

    def run(self, timeout: float) -> list[Report]:
        """Call the function on all ranks, and return the reports after at most ``timeout``."""
        threads: list[threading.Thread] = []
        for report in self.reports:
            # A daemon thread, so that a hanging rank does not keep the interpreter alive.
            thread = threading.Thread(target=self._run_rank, args=(report.rank,), daemon=True)
            threads.append(thread)
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A new list: a rank that returns too late still writes to the old one.
        reports = list(self.reports)
        for rank, thread in enumerate(threads):
            if thread.is_alive():
                reports[rank] = _timeout_report(rank, thread, timeout)
        # From here on, ranks that wait for a late rank raise.
        for report in reports:
            self.mailbox.leave(report.rank, report.did)
        for thread in threads:
            thread.join(_EXIT)
        return reports

    def _run_rank(self, rank: int) -> None:
        """Call the function on one rank, in the thread of the rank."""
        try:
            # Copied together: an object that is passed twice stays one object.
            args, kwargs = copy.deepcopy(arguments_of_rank(self.args, self.kwargs, rank))
            with self._fabric_of_rank(rank) as fabric:
                self.results[rank] = self.fn(fabric, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (ThreadedWorld.run raises it in the caller)
            self.reports[rank] = error_report(rank, error)
        self.mailbox.leave(rank, self.reports[rank].did)

    def _fabric_of_rank(self, rank: int) -> Fabric:
        size = len(self.reports)
        communicator = ThreadCommunicator(self.mailbox, rank, range(size))
        strategy = ThreadedStrategy(communicator, self.store)
        options = {"accelerator": "cpu", "devices": size, **self.fabric_options}
        fabric = Fabric(strategy=strategy, environment="none", launcher="forkserver", **options)
        fabric._join_job(World(rank=rank, local_rank=rank, world_size=size, local_world_size=size))
        return fabric


def _timeout_report(rank: int, thread: threading.Thread, timeout: float) -> Report:
    """Return the report of a rank that is still running."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.StackSummary()
    if frame is not None:
        stack = traceback.extract_stack(frame)
    secondary = 0
    for summary in stack:
        if summary.filename == __file__ and summary.name == "take":
            secondary = 1  # the rank waits for a message of another rank
    lines = ["it was here, most recent call last\n", *traceback.format_list(stack)]
    return Report(
        rank=rank,
        did=f"did not return within {timeout:g} s",
        failed=True,
        secondary=secondary,
        text="".join(lines),
    )


class ThreadedStrategy(Strategy):
    """The strategy of the ranks of a :class:`ThreadedWorld`: collectives over a communicator.

    Args:
        communicator: connects this rank to the other ranks.
        store: the store of the ranks.
    """

    name = "threads"

    def __init__(self, communicator: Communicator, store: dist.Store) -> None:
        super().__init__()
        self._communicator_of_threads = communicator
        self._store_of_threads = store

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        assert runtime is not None, "Fabric makes it"
        runtime.start(self._communicator_of_threads, self._store_of_threads)
        self._runtime = runtime

    @override
    def setup_module(self, module: nn.Module) -> NoReturn:
        """Raise, since the threads of a process would share the module.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"setup_module({type(module).__name__}) in a ThreadedWorld",
            problem="threads synchronize no gradients; "
            f"RankPool({self.world_size}) runs the same function in processes",
        )


class _Mailbox:
    """The queues between the ranks of one call. See ``[Note: The mailbox]``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: defaultdict[Hashable, deque[Any]] = defaultdict(deque)
        self._outcomes: dict[int, str] = {}  # of the ranks that make no more calls

    def put(self, queue: Hashable, sender: int, receivers: Sequence[int], value: object) -> None:
        """Append a value to the named queue from ``sender`` to each receiver."""
        with self._changed:
            for receiver in receivers:
                self._queues[queue, sender, receiver].append(value)
            self._changed.notify_all()

    def take(self, queue: Hashable, sender: int, receiver: int, request: str) -> Any:
        """Wait for the next value in the named queue from ``sender`` to ``receiver``."""
        with self._changed:
            values = self._queues[queue, sender, receiver]
            self._changed.wait_for(lambda: values or sender in self._outcomes)
            if values:
                return values.popleft()
            # A ConnectionError, so that it is not taken for the root cause.
            raise ConnectionError(
                f"{request} on rank {receiver}: rank {sender} {self._outcomes[sender]} and did not"
                " call it; look for a branch on the rank before it"
            )

    def leave(self, rank: int, did: str) -> None:
        """Record that a rank makes no more calls, so that ranks that wait for it raise."""
        with self._changed:
            self._outcomes[rank] = did
            self._changed.notify_all()


class ThreadCommunicator(Communicator):
    """The collectives of a group of threads.

    Ranks that call different collectives, or pass different shapes, dtypes, reductions or sources,
    all raise a :class:`fabric.errors.CollectiveMismatchError`.

    Args:
        mailbox: the queues through which the ranks exchange values.
        rank: rank of this thread in the world.
        ranks: ranks of the members in the world, ascending.
        name: equal on all members, and different from that of any other group.
    """

    def __init__(
        self, mailbox: _Mailbox, rank: int, ranks: Sequence[int], name: Hashable = "world"
    ) -> None:
        self._mailbox = mailbox
        self._world_rank = rank
        self._ranks = list(ranks)
        self._name = name
        self.rank = self._ranks.index(rank)
        self.size = len(self._ranks)
        self.device = torch.device("cpu")

    @override
    def run(self, collective: Collective) -> Any:
        if collective.operation in (Operation.SEND, Operation.RECV):
            return self._pass_message(collective)
        if collective.call is not None and collective.call.text:
            text = collective.call.text
        else:
            text = ", ".join(collective.facts.values())
        values = self._exchange(text, _value_to_send(collective))
        return self._result(collective, values)

    def _pass_message(self, collective: Collective) -> Any:
        """Send the buffer to one rank, or receive it from one."""
        source, destination = collective.message(self.rank)
        sender = self._ranks[source]
        receiver = self._ranks[destination]
        queue = (self._name, "messages")
        if self._world_rank == sender:
            return self._mailbox.put(queue, sender, [receiver], collective.buffer.clone())
        request = f"recv(src={collective.peer})"
        return collective.buffer.copy_(self._mailbox.take(queue, sender, receiver, request))

    def _result(self, collective: Collective, values: list[Any]) -> Any:
        """Return this rank's result of a collective, from the values of all ranks."""
        buffer = collective.buffer
        reduction = collective.reduce or Reduce.SUM
        peer = collective.peer
        match collective.operation:
            case Operation.ALL_REDUCE:
                return buffer.copy_(fold(reduction, values))
            case Operation.REDUCE_SCATTER:
                return fold(reduction, [rows[self.rank] for rows in values])
            case Operation.ALL_TO_ALL:
                return torch.stack([rows[self.rank] for rows in values])
            case Operation.ALL_GATHER | Operation.GATHER:
                if peer in (None, self.rank):
                    return torch.stack(values)
                return None
            case Operation.NEW_GROUP:
                return self._new_group(buffer, name=values[0])
        if peer is None:
            return values
        match collective.operation:
            case Operation.BROADCAST:
                return buffer.copy_(values[peer])
            case Operation.SCATTER:
                return buffer.copy_(values[peer][self.rank])
            case _:
                return values[peer]

    def _new_group(self, members: Sequence[int], name: Hashable) -> "ThreadCommunicator | None":
        """Return the communicator of a group of some ranks, or None if this is not one of them."""
        ranks = [self._ranks[member] for member in members]
        if self._world_rank not in ranks:
            return None
        return ThreadCommunicator(self._mailbox, self._world_rank, ranks, name)

    def _exchange(self, call: str, value: object) -> list[Any]:
        """Return the values that all ranks pass to this call, in rank order."""
        self._mailbox.put(self._name, self._world_rank, self._ranks, (call, value))
        calls: dict[int, str] = {}
        values: list[Any] = []
        for rank in self._ranks:
            received = self._mailbox.take(self._name, rank, self._world_rank, call)
            calls[rank], received_value = received
            values.append(received_value)
        if len(set(calls.values())) > 1:
            raise CollectiveMismatchError(
                f"{call} on rank {self._world_rank}",
                problem="; ".join(f"rank {rank} calls {text}" for rank, text in calls.items()),
                expected="the same call on all ranks, with equal shapes and dtypes; "
                "look for a branch on the rank before it",
            )
        return values


def _value_to_send(collective: Collective) -> Any:
    """Return a copy of what a rank passes to all ranks in a collective."""
    if collective.operation is Operation.NEW_GROUP:
        # The name of a group is the object of its first rank: equal on all members, and unique.
        return object()
    value = collective.buffer
    if collective.operation is Operation.SCATTER:
        value = collective.rows
    if isinstance(value, Tensor):
        return value.clone()
    return value
