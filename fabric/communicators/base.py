"""The collectives of a group of processes on buffers, the description of one call, and a group of one process."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fabric.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    ConfigurationError,
    FabricError,
)

__all__ = [
    "BITWISE", "ORDERED", "CallDescription", "Collective", "Communicator", "LocalCommunicator", "NonMember",
    "Operation", "Reduce", "ReduceName", "from_pickle", "mismatch", "sendable", "to_pickle",
]  # fmt: skip


ReduceName = Literal["mean", "avg", "sum", "min", "max", "product", "band", "bor", "bxor"]


class Reduce(Enum):
    """What a reduction does to the values of the ranks; the mean is the sum divided by the number of ranks.

    The bitwise ones are for integers and booleans. ``Reduce(x)`` takes a name in any case, ``"avg"`` too, and a
    :class:`torch.distributed.ReduceOp`; for anything else it raises a :class:`fabric.errors.ConfigurationError`.
    """

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @classmethod
    def _missing_(cls, value: object) -> "Reduce":
        # A ReduceOp of torch holds one that has a name.
        name = str(getattr(getattr(value, "op", value), "name", value)).upper()
        if value is None or name == "AVG":
            return cls.MEAN
        if name in cls.__members__:
            return cls[name]
        raise ConfigurationError(
            f"reduce_op={value!r}",
            "there is no such reduction",
            f"{', '.join(repr(op.value) for op in cls)}, 'avg', or one of these as a torch.distributed.ReduceOp",
            'reduce_op="mean"',
        )


ReduceOp = Reduce | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType
# The bitwise ones, of integers and booleans; and those without a gradient, which are not defined for complex numbers.
BITWISE = {
    Reduce.BAND: torch.bitwise_and,
    Reduce.BOR: torch.bitwise_or,
    Reduce.BXOR: torch.bitwise_xor,
}
ORDERED = {Reduce.MIN: torch.minimum, Reduce.MAX: torch.maximum, Reduce.PRODUCT: torch.mul}


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


class CallDescription(NamedTuple):
    """What the user called, which may cost several collectives or none.

    Attributes:
        operation: its name, ``"all_reduce"`` for one.
        arguments: returns a text of everything in which the ranks have to agree: the reduction, the rank of a source or
            destination, the structure of the collection with the shape and dtype of each leaf. Empty where nothing has
            to agree, as on the ranks that only receive. Called only where somebody reads the text.
        text: all that has to agree, for a signature in the message (see ``[Note: Signatures]``); empty where this rank
            could not make its call, and None where the message carries none.
        reads: whether this rank waits for the values that it gets.
        place: where the user called, of a call that another thread makes.
    """

    operation: str
    arguments: Callable[[], str] = str
    text: str | None = None
    reads: bool = False
    place: object = None


class Collective(NamedTuple):
    """One call of a collective on this rank; a tuple, since one is made for every call.

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
        own = self.operation.value
        buffer = self.buffer
        called = own if self.call is None else self.call.operation
        facts = {
            "operation": called,
            "collective": own if own != called else None,
            "op": self.reduce and self.reduce.value,
            "dst" if self.operation is Operation.GATHER else "src": self.peer,
            "name": repr(self.name) if self.name else None,
            "ranks": buffer if self.operation is Operation.NEW_GROUP else None,
        }
        if isinstance(buffer, Tensor):
            facts |= {
                "dtype": str(buffer.dtype).removeprefix("torch."),
                "shape": tuple(buffer.shape),
            }
        return {name: str(fact) for name, fact in facts.items() if fact is not None}

    def message(self, rank: int) -> tuple[Any, Any]:
        """Source and destination of a message, which rank ``rank`` sends or receives."""
        return (rank, self.peer) if self.operation is Operation.SEND else (self.peer, rank)


@dataclass(frozen=True)
class NonMember:
    """What a process outside of a group has in its place; false, and an error as the ``group`` of any collective.

    Not None, which as a ``group`` means all processes of the job: a process outside would silently call a collective
    of theirs.

    Attributes:
        ranks: the members, as they were asked for.
    """

    ranks: list[int]

    def __bool__(self) -> Literal[False]:
        return False


class Communicator(ABC):
    """The collectives of one group of processes, on buffers.

    A *buffer* is a contiguous tensor on ``device`` that belongs to the caller, not part of an autograd graph, of a
    dtype that the backend carries (booleans travel as uint8). Reductions and broadcasts write into it. What users pass
    in is packed into buffers, and the results are given their structure back, in :mod:`fabric.collectives`.

    A communicator implements :meth:`run`, and :meth:`close` if it owns something. The other methods, which no class
    overrides, check ranks, describe the call and make it. Every method is a collective, but for :meth:`send` and
    :meth:`recv`, which two ranks call, and :meth:`close`: every rank of the group must call it, in the same order.
    Ranks are ranks in the group, from 0 to ``size - 1``. ``call`` is what the user called, for diagnostics.

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
        """Make one call, and return what the method of that name returns. Its ranks have been checked.

        Of the operations on objects these are their pickles, and a new group is None on a rank outside.
        """

    def close(self) -> None:
        """Release what this communicator owns; not a collective, and calling it again does nothing."""

    def new_group(self, ranks: Sequence[int]) -> "Communicator | NonMember":
        """A communicator of these ranks, in ascending order; a :class:`NonMember` on a rank that is not one.

        Every rank of this group must call it.

        Raises:
            ConfigurationError: these are not different ranks of this group.
            UsageError: this is a part of the job, which torch lets make no groups without the rest.
        """
        ranks = list(ranks)
        everyone = range(self.size)
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(everyone):
            raise ConfigurationError(
                f"new_group({ranks})",
                f"ranks are missing, repeated or outside this group of {self.size}",
                f"different ranks between 0 and {self.size - 1}",
                f"new_group({list(everyone)}) for all of them",
            )
        return self.run(Collective(Operation.NEW_GROUP, sorted(ranks))) or NonMember(ranks)

    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` (any shape) over the ranks, in place, and return it."""
        return self.run(Collective(Operation.ALL_REDUCE, buffer, op))

    def all_gather(self, buffer: Tensor) -> Tensor:
        """A new tensor of shape ``(size, *buffer.shape)``: the buffer of every rank, of equal shape, in rank order."""
        return self.run(Collective(Operation.ALL_GATHER, buffer))

    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` of shape ``(size, *s)`` over the ranks; a new tensor of shape ``s``, this rank's row."""
        return self.run(Collective(Operation.REDUCE_SCATTER, buffer, op))

    def all_to_all(self, buffer: Tensor) -> Tensor:
        """Send row i of ``buffer`` of shape ``(size, *s)`` to rank i.

        A new tensor of that shape, whose row j is from rank j.
        """
        return self.run(Collective(Operation.ALL_TO_ALL, buffer))

    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with that of rank ``src``, of the same shape and dtype, and return it."""
        return self._run_with_peer(Operation.BROADCAST, buffer, src)

    def scatter(
        self, rows: Tensor | None, output: Tensor, src: int, call: CallDescription | None = None
    ) -> Tensor:
        """Write this rank's row of rank ``src``'s ``rows`` into ``output`` and return it.

        ``rows`` has shape ``(size, *output.shape)`` on ``src`` and is None elsewhere.
        """
        return self._run_with_peer(Operation.SCATTER, output, src, rows=rows, call=call)

    def gather(
        self, buffer: Tensor, dst: int, call: CallDescription | None = None
    ) -> Tensor | None:
        """A new tensor of shape ``(size, *buffer.shape)`` on rank ``dst``, as by :meth:`all_gather`; None elsewhere."""
        return self._run_with_peer(Operation.GATHER, buffer, dst, call=call)

    def send(self, buffer: Tensor, dst: int) -> None:
        """Send ``buffer`` to another rank, which has to call :meth:`recv`; messages of a pair of ranks keep order."""
        self._run_with_peer(Operation.SEND, buffer, dst)

    def recv(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with what another rank sends, of the same shape and dtype, and return it."""
        return self._run_with_peer(Operation.RECV, buffer, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called it; ``name`` appears in the error when one does not."""
        self.run(Collective(Operation.BARRIER, name=name or "unnamed"))

    def broadcast_object(
        self,
        value: Any,
        src: int,
        call: CallDescription | None = None,
        error: FabricError | None = None,
    ) -> Any:
        """Rank ``src``'s value, any object that pickles, on every rank.

        Raises:
            FabricError: the ``error`` of rank ``src``, if it passed one, or an ArgumentTypeError if its value does not
                pickle; every rank raises it.
        """
        self.check_rank(Operation.BROADCAST, src)
        if self.size == 1 and error is None:
            return value
        own = _packed(value, error) if self.rank == src else None
        return from_pickle(
            self.run(Collective(Operation.BROADCAST_OBJECT, own, peer=src, call=call)), src
        )

    def gather_objects(
        self, value: Any, call: CallDescription | None = None, error: FabricError | None = None
    ) -> list[Any]:
        """Every rank's value, any object that pickles, in rank order, on every rank.

        Raises:
            FabricError: the first ``error`` that a rank passed, or an ArgumentTypeError if its value does not pickle;
                every rank raises it.
        """
        if self.size == 1 and error is None:
            return [value]
        values = self.run(Collective(Operation.GATHER_OBJECTS, _packed(value, error), call=call))
        return [from_pickle(one, rank) for rank, one in enumerate(values)]

    def check_rank(self, operation: Operation, rank: int) -> None:
        """Raise a ConfigurationError unless this is the rank of a member, and of another one for a message."""
        is_member = type(rank) is int and 0 <= rank < self.size
        if is_member and (rank != self.rank or operation not in (Operation.SEND, Operation.RECV)):
            return
        argument = "dst" if operation in (Operation.SEND, Operation.GATHER) else "src"
        raise ConfigurationError(
            f"{operation.value}(..., {argument}={rank!r}) on rank {self.rank}",
            "a rank does not send to itself"
            if is_member
            else f"there is no rank {rank!r} in a group of {self.size}",
            f"{argument} from 0 to {self.size - 1}, and of send and recv another rank than {self.rank}",
            f"{argument}=0 for the first rank",
        )

    def _run_with_peer(self, operation: Operation, buffer: Any, peer: int, **details: Any) -> Any:
        self.check_rank(operation, peer)
        return self.run(Collective(operation, buffer, peer=peer, **details))


class LocalCommunicator(Communicator):
    """The collectives of a single process: what they mean over a group of one, without a process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank = 0
        self.size = 1
        self.device = device

    @override
    def run(self, collective: Collective) -> Any:
        buffer = collective.buffer
        match collective.operation:
            case Operation.ALL_GATHER | Operation.GATHER:
                return buffer.clone().unsqueeze(0)
            case Operation.GATHER_OBJECTS:
                return [buffer]
            case Operation.REDUCE_SCATTER:
                return buffer[0].clone()
            case Operation.ALL_TO_ALL:
                return buffer.clone()
            case Operation.NEW_GROUP:
                return LocalCommunicator(self.device)
            case Operation.SCATTER:
                assert collective.rows is not None, "this is rank src"
                return buffer.copy_(collective.rows[0])
            case _:
                return buffer


def to_pickle(value: Any, error: FabricError | None = None) -> bytes:
    """The pickle of a value, or a zero and that of an error in its place; raises an ArgumentTypeError."""
    try:
        return pickle.dumps(value) if error is None else b"\0" + pickle.dumps(error)
    except Exception as caught:
        raise ArgumentTypeError(
            f"sending an object of type {type(value).__name__}",
            f"it does not pickle: {type(caught).__name__}: {caught}",
            "objects that pickle; tensors inside collections travel as tensors",
            "send what the object is made of: its state_dict(), its numbers, its name",
        ) from caught


def from_pickle(message: bytes, src: int) -> Any:
    """The value that :func:`to_pickle` packed on rank ``src``; raises the error in its place.

    Raises an ArgumentTypeError where it cannot be unpickled.
    """
    try:
        value = pickle.loads(message.removeprefix(b"\0"))  # noqa: S301 - from a rank of this job, as torch does itself
    except Exception as error:
        request = "receiving an object of a module that each rank has to import"
        raise ArgumentTypeError(request, f"it cannot be read here: {error!r}") from error
    if not message.startswith(b"\0"):
        return value
    value.add_note(f"raised on rank {src}")
    raise value


def sendable(error: Exception) -> FabricError:
    """The error of a rank that cannot make its message, as all ranks raise it."""
    if isinstance(error, FabricError):
        return error
    return ArgumentTypeError(
        "a collection to be sent", f"to take it apart raises {type(error).__name__}: {error}"
    )


def mismatch(request: str, named: Sequence[int]) -> CollectiveMismatchError:
    """The error of ranks that name different sources or destinations."""
    problem = f"other ranks name others, from {min(named)} to {max(named)}"
    return CollectiveMismatchError(
        request, problem, "one source or destination, the same on all ranks"
    )


def _packed(value: Any, error: FabricError | None) -> bytes:
    """:func:`to_pickle`, with the error in the place of a value that does not pickle."""
    try:
        return to_pickle(value, error)
    except ArgumentTypeError as caught:
        return to_pickle(None, caught)
