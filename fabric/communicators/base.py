"""The collectives of a group of processes on buffers, and the description of one call."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from fabric.communicators.reduce_ops import Reduce
from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = ["CallDescription", "Collective", "Communicator", "NonMember", "Operation"]


class Operation(Enum):
    """The kinds of collectives and messages; each is described at the method of :class:`Communicator` of that name."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"
    BROADCAST_OBJECT = "broadcast_object"
    GATHER_OBJECTS = "gather_objects"
    NEW_GROUP = "new_group"


@dataclass(frozen=True, slots=True)
class CallDescription:
    """What the user called, which may cost several collectives or none.

    Attributes:
        operation: its name, ``"all_reduce"`` for one.
        arguments: returns a text of everything in which the ranks have to agree: the reduction, the rank of a source or
            destination, the structure of the collection with the shape and dtype of each leaf. Empty where nothing has
            to agree, as on the ranks that only receive. Called only where somebody reads the text.
    """

    operation: str
    arguments: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective on this rank.

    Attributes:
        operation: which one.
        buffer: the tensor that is passed, and of broadcast, recv and scatter the one that is written to. Of the
            operations on objects the object, pickled; of new_group the ranks.
        reduce: the reduction of all_reduce and reduce_scatter.
        peer: the source or destination, where there is one.
        rows: of scatter, on the source, what is sent.
        name: of a barrier.
        call: the call of the user that this is a part of, where it is known.
    """

    operation: Operation
    buffer: Any = None
    reduce: Reduce | None = None
    peer: int | None = None
    rows: Tensor | None = None
    name: str = ""
    call: CallDescription | None = None

    @property
    def facts(self) -> dict[str, str]:
        """What has to be the same on all ranks, by name, in the order in which differences are of interest."""
        facts = {"operation": self.operation.value if self.call is None else self.call.operation}
        if self.call is not None and self.call.operation != self.operation.value:
            facts["collective"] = self.operation.value
        if self.reduce is not None:
            facts["op"] = self.reduce.value
        if self.peer is not None:
            facts["dst" if self.operation is Operation.GATHER else "src"] = str(self.peer)
        if self.name:
            facts["name"] = repr(self.name)
        if self.operation is Operation.NEW_GROUP:
            facts["ranks"] = str(self.buffer)
        if isinstance(self.buffer, Tensor):
            facts |= {"dtype": str(self.buffer.dtype).removeprefix("torch."), "shape": str(tuple(self.buffer.shape))}
        return facts

    def message(self, rank: int) -> tuple[int, int] | None:
        """Source and destination, where this is rank ``rank``'s part of a message between two ranks."""
        if self.operation is Operation.SEND:
            return rank, self.peer or 0
        if self.operation is Operation.RECV:
            return self.peer or 0, rank
        return None


class NonMember:
    """What a process outside of a group has in its place; false, and an error as the ``group`` of any collective.

    Not None, which as a ``group`` means all processes of the job: a process outside would silently call a collective
    of theirs.

    Attributes:
        ranks: the members, as they were asked for.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"NonMember(ranks={list(self.ranks)})"


class Communicator(ABC):
    """The collectives of one group of processes, on buffers.

    A *buffer* is a contiguous tensor on ``device`` that belongs to the caller, not part of an autograd graph, of a
    dtype that the backend carries (booleans travel as uint8). Reductions and broadcasts write into it. What users pass
    in is packed into buffers, and the results are given their structure back, in :mod:`fabric.collectives`.

    A communicator implements :meth:`run`, :meth:`new_group` and :meth:`close`; the other methods check ranks, describe
    the call and make it. Every method is a collective, but for :meth:`send` and :meth:`recv`, which two ranks call, and
    :meth:`close`: every rank of the group must call it, in the same order. Ranks are ranks in the group, from 0 to
    ``size - 1``. ``call`` is what the user called, for the texts of diagnostics.

    Attributes:
        rank: rank of this process in the group.
        size: number of processes in the group.
        device: where buffers have to live.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def run(self, collective: Collective) -> Any:
        """Make one call, and return what the method of that name returns. Its ranks have been checked."""

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> "Communicator | None":
        """A communicator of these ranks, in ascending order; None on a rank that is not one.

        Every rank of this group must call it.

        Raises:
            ConfigurationError: these are not different ranks of this group.
            UsageError: this is a part of the job, which torch lets make no groups without the rest.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what this communicator owns; not a collective, and calling it again does nothing."""

    @final
    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` (any shape) over the ranks, in place, and return it."""
        return self.run(Collective(Operation.ALL_REDUCE, buffer, op))

    @final
    def all_gather(self, buffer: Tensor) -> Tensor:
        """A new tensor of shape ``(size, *buffer.shape)``: the buffer of every rank, of equal shape, in rank order."""
        return self.run(Collective(Operation.ALL_GATHER, buffer))

    @final
    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` of shape ``(size, *s)`` over the ranks; a new tensor of shape ``s``, this rank's row."""
        return self.run(Collective(Operation.REDUCE_SCATTER, buffer, op))

    @final
    def all_to_all(self, buffer: Tensor) -> Tensor:
        """Send row i of ``buffer`` of shape ``(size, *s)`` to rank i.

        A new tensor of that shape, whose row j is from rank j.
        """
        return self.run(Collective(Operation.ALL_TO_ALL, buffer))

    @final
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with that of rank ``src``, of the same shape and dtype, and return it."""
        self.check_rank(src, "broadcast", "src")
        return self.run(Collective(Operation.BROADCAST, buffer, peer=src))

    @final
    def scatter(self, rows: Tensor | None, output: Tensor, src: int, call: CallDescription | None = None) -> Tensor:
        """Write this rank's row of rank ``src``'s ``rows`` into ``output`` and return it.

        ``rows`` has shape ``(size, *output.shape)`` on ``src`` and is None elsewhere.
        """
        self.check_rank(src, "scatter", "src")
        return self.run(Collective(Operation.SCATTER, output, peer=src, rows=rows, call=call))

    @final
    def gather(self, buffer: Tensor, dst: int, call: CallDescription | None = None) -> Tensor | None:
        """A new tensor of shape ``(size, *buffer.shape)`` on rank ``dst``, as by :meth:`all_gather`; None elsewhere."""
        self.check_rank(dst, "gather", "dst")
        return self.run(Collective(Operation.GATHER, buffer, peer=dst, call=call))

    @final
    def send(self, buffer: Tensor, dst: int) -> None:
        """Send ``buffer`` to another rank, which has to call :meth:`recv`; messages of a pair of ranks keep order."""
        self.check_peer(dst, "send", "dst")
        self.run(Collective(Operation.SEND, buffer, peer=dst))

    @final
    def recv(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with what another rank sends, of the same shape and dtype, and return it."""
        self.check_peer(src, "recv", "src")
        return self.run(Collective(Operation.RECV, buffer, peer=src))

    @final
    def barrier(self, name: str) -> None:
        """Wait until every rank has called it; ``name`` appears in the error when one does not."""
        self.run(Collective(Operation.BARRIER, name=name))

    @final
    def broadcast_object(self, value: Any, src: int, call: CallDescription | None = None) -> Any:
        """Rank ``src``'s value, any object that pickles, on every rank.

        Raises:
            ArgumentTypeError: it does not pickle; every rank raises it.
        """
        self.check_rank(src, "broadcast", "src")
        if self.size == 1:
            return value
        own = _pickled(value) if self.rank == src else None
        return _unpickled(self.run(Collective(Operation.BROADCAST_OBJECT, own, peer=src, call=call)), src)

    @final
    def gather_objects(self, value: Any, call: CallDescription | None = None) -> list[Any]:
        """Every rank's value, any object that pickles, in rank order, on every rank.

        Raises:
            ArgumentTypeError: that of one rank does not pickle; every rank raises it.
        """
        if self.size == 1:
            return [value]
        values = self.run(Collective(Operation.GATHER_OBJECTS, _pickled(value), call=call))
        return [_unpickled(one, rank) for rank, one in enumerate(values)]

    def check_rank(self, rank: int, operation: str, argument: str) -> None:
        """Raise a ConfigurationError unless this is the rank of a member of this group."""
        if not self._is_rank(rank):
            self._refuse_rank(operation, argument, rank)

    def check_peer(self, peer: int, operation: str, argument: str) -> None:
        """Raise a ConfigurationError unless ``peer`` is the rank of another member of this group."""
        if not self._is_rank(peer) or peer == self.rank:
            self._refuse_rank(operation, argument, peer)

    def check_members(self, ranks: Sequence[int]) -> list[int]:
        """The ranks in ascending order; a ConfigurationError unless they are different ranks of this group."""
        if not ranks or len(set(ranks)) != len(ranks) or not all(map(self._is_rank, ranks)):
            raise ConfigurationError(
                f"new_group({list(ranks)})",
                f"ranks are missing, repeated or outside this group of {self.size}",
                f"different ranks between 0 and {self.size - 1}",
                f"new_group({list(range(self.size))}) for all of them",
            )
        return sorted(ranks)

    def _is_rank(self, rank: object) -> bool:
        return isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < self.size

    def _refuse_rank(self, operation: str, argument: str, rank: object) -> NoReturn:
        itself = rank == self.rank and self._is_rank(rank)
        raise ConfigurationError(
            f"{operation}(..., {argument}={rank!r}) on rank {self.rank}",
            "a rank does not send to itself" if itself else f"there is no rank {rank!r} in a group of {self.size}",
            f"{argument} from 0 to {self.size - 1}" + (f", but {self.rank}" if itself else ""),
            "the value itself, which is here already" if itself else f"{argument}=0 for the first rank",
        )


def _pickled(value: Any) -> bytes:
    """The pickle of a value, or a zero and the text of what went wrong: a failure on one rank reaches all of them."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever a user's class raises; the other ranks are waiting
        return f"\0{type(value).__name__} does not pickle: {type(error).__name__}: {error}".encode()


def _unpickled(received: bytes, src: int) -> Any:
    """The value that :func:`_pickled` packed on rank ``src``, or an ArgumentTypeError of what went wrong there."""
    if received[0]:
        return pickle.loads(received)  # noqa: S301 - from a rank of this job, as torch does itself
    raise ArgumentTypeError(
        f"sending an object from rank {src}",
        received[1:].decode(),
        "objects that pickle; tensors inside collections travel as tensors",
        "send what the object is made of: its state_dict(), its numbers, its name",
    )
