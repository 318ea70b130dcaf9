"""Ranks as threads of this process, for code that needs the semantics but no transport."""

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
    check_unchanged,
    error_report,
    function_name,
    rank_failed_error,
    timeout_report,
)
from fabric.testing.stacks import frames_of_traceback, position
from fabric.world import World

__all__ = ["ThreadCommunicator", "ThreadedStrategy", "ThreadedWorld"]

_EXIT_TIMEOUT = 0.2  # seconds for the threads to end after the call


class ThreadedWorld:
    """A world whose ranks are threads of this process.

    It runs the same functions as :class:`fabric.testing.RankPool`, except that threads cannot set
    up modules. Arguments are copied for each rank. Objects that the function closes over, and
    torch's random state, are shared by all ranks. The thread of a rank that never returns stays,
    because a thread cannot be ended.

    Args:
        world_size: number of ranks.
        timeout: seconds that a call may take, unless ``run`` is passed another timeout.
        check_inputs: whether a call fails if a rank has changed its arguments in place.
        **options: options of :class:`fabric.Fabric`, for every rank.

    Raises:
        ConfigurationError: ``world_size`` is less than one.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 30.0,
        check_inputs: bool = False,
        **options: Any,
    ) -> None:
        if world_size < 1:
            raise ConfigurationError(
                f"ThreadedWorld({world_size})", problem="there has to be one rank at least"
            )
        self.size = world_size
        self.timeout = timeout
        self._check_inputs = check_inputs
        self._fabric_options = options

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
            ConfigurationError: a :class:`PerRank` has another number of values than there are
                ranks.
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
            fabric_options=self._fabric_options,
            check_inputs=self._check_inputs,
            results=[None] * self.size,
            reports=[Report(rank=rank) for rank in range(self.size)],
        )
        reports = call.run(timeout)
        if any(report.has_failed for report in reports):
            raise rank_failed_error(function_name(fn), reports)
        return call.results

    def close(self) -> None:
        """Do nothing: the threads end with each call. A RankPool has this method, too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the threads end with each call."""


@dataclass(frozen=True, kw_only=True)
class _ThreadedCall:
    """One call of a function on every rank of a ThreadedWorld.

    Attributes:
        fn: the function.
        args: its arguments after the fabric, the same object for all ranks.
        kwargs: its keyword arguments.
        mailbox: the queues between the ranks.
        store: the store of the ranks.
        fabric_options: options of :class:`fabric.Fabric`.
        check_inputs: whether a rank fails if it has changed its arguments in place.
        results: the result of each rank, which the rank's thread fills in.
        reports: one report per rank, which the rank's thread replaces if the function raises.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    mailbox: "_Mailbox"
    store: dist.Store
    fabric_options: Mapping[str, Any]
    check_inputs: bool
    results: list[Any]
    reports: list[Report]

    def run(self, timeout: float) -> list[Report]:
        """Start a thread for each rank, wait for the threads, and return one report per rank.

        Args:
            timeout: how long to wait at most, in seconds. A rank that still runs then has failed.
        """
        threads: list[threading.Thread] = []
        for rank in range(len(self.reports)):
            # A daemon thread, so that a hanging rank does not keep the interpreter alive.
            thread = threading.Thread(target=self._run_rank, args=(rank,), daemon=True)
            threads.append(thread)
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # The threads are looked at before the reports are copied. Otherwise a thread that ends in
        # between would neither have its report in the copy nor count as timed out.
        has_timed_out = [thread.is_alive() for thread in threads]
        # A rank that ends after the timeout writes to self.reports, but not to the copy.
        reports = list(self.reports)
        for rank, thread in enumerate(threads):
            if has_timed_out[rank]:
                reports[rank] = _report_of_running_thread(rank, thread, timeout)
        # All ranks leave the mailbox, so that a thread that still waits for a rank raises and ends.
        for report in reports:
            self.mailbox.leave(report.rank, report.outcome)
        for thread in threads:
            thread.join(_EXIT_TIMEOUT)
        return reports

    def _run_rank(self, rank: int) -> None:
        """Call the function on one rank, in the thread of the rank, and record the outcome."""
        try:
            # One call copies both, so that an object that is passed twice is copied only once.
            args, kwargs = copy.deepcopy(arguments_of_rank(self.args, self.kwargs, rank))
            with self._fabric_of_rank(rank) as fabric:
                self.results[rank] = self.fn(fabric, *args, **kwargs)
            if self.check_inputs:
                # self.args and self.kwargs are unchanged, since the ranks get copies.
                original_args, original_kwargs = arguments_of_rank(self.args, self.kwargs, rank)
                check_unchanged(
                    self.fn, [*args, *kwargs.values()], [*original_args, *original_kwargs.values()]
                )
        except BaseException as error:  # noqa: BLE001 (ThreadedWorld.run raises it in the caller)
            # torch's error advises to call init_process_group, which does not help a thread.
            if "Default process group has not been initialized" in str(error):
                error.add_note(
                    "The threads of a ThreadedWorld have no process group. Write: "
                    f"RankPool({len(self.reports)}), whose ranks run calls of torch.distributed."
                )
            self.reports[rank] = error_report(rank, error)
        # From here on, ranks that wait for this rank raise. The outcome is "returned" unless the
        # report was replaced above.
        self.mailbox.leave(rank, self.reports[rank].outcome)

    def _fabric_of_rank(self, rank: int) -> Fabric:
        """Return a new fabric whose collectives go through the mailbox of this call."""
        size = len(self.reports)
        communicator = ThreadCommunicator(self.mailbox, rank, world_ranks=range(size))
        strategy = ThreadedStrategy(communicator, self.store)
        # The launcher is never used, since the fabric joins a job below.
        options = {"accelerator": "cpu", "devices": size, **self.fabric_options}
        fabric = Fabric(strategy=strategy, environment="none", launcher="forkserver", **options)
        # The fabric connects as if a launcher had started this thread as a rank.
        world = World(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
        fabric._join_job(world)
        return fabric


def _report_of_running_thread(rank: int, thread: threading.Thread, timeout: float) -> Report:
    """Return the report of a rank whose thread was still running after ``timeout`` seconds."""
    assert thread.ident is not None  # the thread was started
    frame = sys._current_frames().get(thread.ident)
    stack = traceback.StackSummary()
    # There is no frame if the thread has ended since the timeout.
    if frame is not None:
        stack = traceback.extract_stack(frame)
    # A rank that waits for another rank is in _Mailbox.take().
    is_waiting = False
    for summary in stack:
        if summary.filename == __file__ and summary.name == _Mailbox.take.__name__:
            is_waiting = True
    lines = ["it was here, most recent call last\n", *traceback.format_list(stack)]
    return timeout_report(
        rank,
        "".join(lines),
        timeout,
        is_waiting=is_waiting,
        position=position(frames_of_traceback(stack)),
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
        self._thread_communicator = communicator
        self._thread_store = store

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        """Start the runtime with the communicator and the store of the threads.

        Fabric calls this method once on each rank.
        """
        assert runtime is not None, "no runtime was passed: this strategy works only with Fabric"
        runtime.start(self._thread_communicator, self._thread_store)
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


# [Note: The mailbox]
# The ranks of one call share a mailbox. It has a queue for each group, sender and receiver. For
# each collective, a rank puts its value into the queues to all members of the group, and then takes
# the values of all members from the queues to itself. So there is no process group, and reductions
# run in rank order. A rank that waits for a rank that has returned raises at once.
class _Mailbox:
    """The queues between the ranks of one call.

    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        # Guards the fields below. Notified when a value arrives or a rank leaves.
        self._changed = threading.Condition()
        # The key is (name of the queue, sender, receiver).
        self._queues: defaultdict[Hashable, deque[Any]] = defaultdict(deque)
        # For each rank that makes no more calls: how it has ended, to follow "rank 0".
        self._outcomes: dict[int, str] = {}

    def put(self, queue: Hashable, sender: int, receivers: Sequence[int], value: object) -> None:
        """Append a value to the queues from ``sender`` to each receiver, without waiting.

        Args:
            queue: the name of the queues, which are separate for each name.
            sender: the rank that calls this method.
            receivers: ranks of the world.
            value: the value, which is not copied.
        """
        with self._changed:
            for receiver in receivers:
                self._queues[queue, sender, receiver].append(value)
            self._changed.notify_all()

    def take(self, queue: Hashable, sender: int, receiver: int, call_text: str) -> Any:
        """Wait for the next value in the queue from ``sender`` to ``receiver``, and remove it.

        Args:
            queue: the name of the queue.
            sender: a rank of the world.
            receiver: the rank that calls this method.
            call_text: the call of the receiver, for the error.

        Raises:
            ConnectionError: the sender makes no more calls, and the queue is empty.
        """
        with self._changed:
            values = self._queues[queue, sender, receiver]
            self._changed.wait_for(lambda: values or sender in self._outcomes)
            if values:
                return values.popleft()
            # For is_secondary(), a ConnectionError means that another rank has failed. With another
            # type of error, this rank would be blamed.
            outcome_of_sender = self._outcomes[sender]  # such as "returned"
            raise ConnectionError(
                f"{call_text} on rank {receiver}: rank {sender} {outcome_of_sender} and did"
                " not call it; look for a branch on the rank before it"
            )

    def leave(self, rank: int, outcome: str) -> None:
        """Record that a rank makes no more calls, so that ranks that wait for the rank raise.

        Args:
            rank: the rank.
            outcome: how the rank has ended, to follow "rank 0" in a sentence.
        """
        with self._changed:
            self._outcomes[rank] = outcome
            self._changed.notify_all()


class ThreadCommunicator(Communicator):
    """The collectives of a group of threads, through the queues of a mailbox.

    Ranks that call different collectives, or pass different shapes, dtypes, reductions or sources,
    all raise a :class:`fabric.errors.CollectiveMismatchError`.

    Args:
        mailbox: the queues through which the ranks exchange values.
        world_rank: the rank of this thread in the world.
        world_ranks: the members of the group as ranks of the world, ascending.
        name: the name of the group in the mailbox. It is equal on all members, and different from
            the name of any other group.
    """

    def __init__(
        self,
        mailbox: _Mailbox,
        world_rank: int,
        world_ranks: Sequence[int],
        name: Hashable = "world",
    ) -> None:
        """Make the communicator of one member. Not a collective."""
        self._mailbox = mailbox
        self._world_rank = world_rank
        self._world_ranks = list(world_ranks)
        self._name = name
        # The rank of this thread within the group.
        self.rank = self._world_ranks.index(world_rank)
        self.size = len(self._world_ranks)
        self.device = torch.device("cpu")

    @override
    def run(self, collective: Collective) -> Any:
        """Run a collective or a point-to-point operation, and return its result on this rank.

        ``Communicator`` implements all its collectives by this method.
        """
        if collective.operation in (Operation.SEND, Operation.RECV):
            return self._pass_message(collective)
        # call_text has everything that must be equal on all ranks. It is the signature text of the
        # user's call, or else the properties of the collective. _exchange() raises if the texts of
        # the ranks differ.
        if collective.call is not None and collective.call.signature_text:
            call_text = collective.call.signature_text
        else:
            call_text = ", ".join(collective.facts.values())
        values = self._exchange(call_text, _value_to_send(collective))
        if collective.operation is Operation.NEW_GROUP:
            # The buffer has the members of the new group. values[0] is the new name, which the
            # first rank has sent.
            return self._new_group(collective.buffer, name=values[0])
        return self._result(collective, values)

    def _pass_message(self, collective: Collective) -> Any:
        """Send the buffer to one rank, or receive the buffer from one rank.

        Returns:
            None on the sender, and the buffer on the receiver.
        """
        # Source and destination are ranks within the group.
        source, destination = collective.source_and_destination(self.rank)
        sender = self._world_ranks[source]
        receiver = self._world_ranks[destination]
        queue = (self._name, "messages")  # separate from the queue of the collectives
        if self._world_rank == sender:
            # The buffer is copied, since the sender may change it as soon as send() returns.
            self._mailbox.put(queue, sender, [receiver], collective.buffer.clone())
            return None
        call_text = f"recv(src={collective.peer})"
        message = self._mailbox.take(queue, sender, receiver, call_text)
        return collective.buffer.copy_(message)

    def _result(self, collective: Collective, values: list[Any]) -> Any:
        """Return this rank's result of a collective.

        An all-reduce, a broadcast and a scatter of tensors also write the result into
        ``collective.buffer``.

        Args:
            collective: the collective that this rank calls.
            values: what :func:`_value_to_send` has returned on each rank, in rank order. In a
                reduce-scatter and an all-to-all, each value has one row per rank.
        """
        buffer = collective.buffer
        # Operations without a reduction do not use the default.
        reduction = collective.reduce or Reduce.SUM
        value_of_source: Any = None
        if collective.peer is not None:
            value_of_source = values[collective.peer]
        match collective.operation:
            case Operation.ALL_REDUCE:
                return buffer.copy_(fold(reduction, values))
            case Operation.REDUCE_SCATTER:
                return fold(reduction, [rows[self.rank] for rows in values])
            case Operation.ALL_TO_ALL:
                return torch.stack([rows[self.rank] for rows in values])
            case Operation.ALL_GATHER:
                return torch.stack(values)
            case Operation.GATHER:
                is_destination = collective.peer == self.rank
                return torch.stack(values) if is_destination else None
            case Operation.BROADCAST:
                return buffer.copy_(value_of_source)
            case Operation.SCATTER:
                return buffer.copy_(value_of_source[self.rank])
            case Operation.BROADCAST_OBJECT:
                return value_of_source
            case Operation.GATHER_OBJECTS | Operation.BARRIER:
                return values
            case _:
                raise AssertionError(f"run() handles {collective.operation}")

    def _new_group(self, members: Sequence[int], name: Hashable) -> "ThreadCommunicator | None":
        """Return this rank's communicator of a new group, or None if this rank is not a member.

        Args:
            members: the members, as ranks in the group of this communicator, ascending.
            name: the unique name of the new group.
        """
        world_ranks = [self._world_ranks[member] for member in members]
        if self._world_rank not in world_ranks:
            return None
        return ThreadCommunicator(self._mailbox, self._world_rank, world_ranks, name)

    def _exchange(self, call_text: str, value: object) -> list[Any]:
        """Send a value to all members, and return the values of all members, in rank order.

        Collective.

        Args:
            call_text: the call of this rank, which has to be equal on all members.
            value: the value of this rank. It is not copied.

        Raises:
            CollectiveMismatchError: the calls of the members differ. All members raise.
            ConnectionError: a member has returned without this call.
        """
        # Every member gets the calls of all members, so that all members raise if the calls differ.
        self._mailbox.put(self._name, self._world_rank, self._world_ranks, (call_text, value))
        call_texts: dict[int, str] = {}
        values: list[Any] = []
        for sender in self._world_ranks:
            sent = self._mailbox.take(self._name, sender, self._world_rank, call_text)
            sent_call_text, sent_value = sent
            call_texts[sender] = sent_call_text
            values.append(sent_value)
        if len(set(call_texts.values())) > 1:
            calls = [f"rank {rank} calls {text}" for rank, text in call_texts.items()]
            raise CollectiveMismatchError(
                f"{call_text} on rank {self._world_rank}",
                problem="; ".join(calls),
                expected="the same call on all ranks, with equal shapes and dtypes; "
                "look for a branch on the rank before it",
            )
        return values


def _value_to_send(collective: Collective) -> Any:
    """Return what a rank sends to all members in a collective.

    Tensors are copied, since the rank may change its buffer before the other ranks read the value.
    """
    if collective.operation is Operation.NEW_GROUP:
        # The object of the first rank becomes the name of the new group. All threads get the same
        # object, and no other group has it.
        return object()
    value = collective.buffer
    if collective.operation is Operation.SCATTER:
        value = collective.rows  # one row per rank on the source, None on the other ranks
    if isinstance(value, Tensor):
        return value.clone()
    return value
