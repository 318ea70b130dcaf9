"""The collectives of a group of processes on buffers, and the description of one call."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fabric.diagnostics.call_site import CallSite
from fabric.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    ConfigurationError,
    FabricError,
)

__all__ = [
    "BITWISE",
    "ORDERED",
    "CallDescription",
    "Collective",
    "Communicator",
    "LocalCommunicator",
    "Message",
    "NonMember",
    "Operation",
    "Reduce",
    "ReduceName",
    "as_fabric_error",
    "from_pickle",
    "peer_mismatch_error",
    "to_pickle",
]


# The first byte of a message with an error. A pickle begins with another byte.
_ERROR_PREFIX = b"\0"

ReduceName = Literal["mean", "avg", "sum", "min", "max", "product", "band", "bor", "bxor"]


class Reduce(Enum):
    """The reductions over ranks. The mean is the sum divided by the number of ranks.

    The bitwise reductions are for integers and booleans. ``Reduce(x)`` takes a name in any case,
    including ``"avg"``, and a :class:`torch.distributed.ReduceOp`. Anything else raises a
    :class:`fabric.errors.ConfigurationError`.
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
        # The op of a torch.distributed.ReduceOp is a member of torch's enum, which has a name.
        torch_op = getattr(value, "op", value)
        name = str(getattr(torch_op, "name", value)).upper()
        if value is None or name == "AVG":
            return cls.MEAN
        if name in cls.__members__:
            return cls[name]
        names = ", ".join(repr(op.value) for op in cls)
        raise ConfigurationError(
            f"reduce_op={value!r}",
            problem="there is no such reduction",
            expected=f"{names}, 'avg', or one of these as a torch.distributed.ReduceOp",
            suggestion='reduce_op="mean"',
        )


ReduceOp = Reduce | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType
# The bitwise reductions of integers and booleans.
BITWISE = {
    Reduce.BAND: torch.bitwise_and,
    Reduce.BOR: torch.bitwise_or,
    Reduce.BXOR: torch.bitwise_xor,
}
# The reductions that have no gradient and are not defined for complex numbers.
ORDERED = {Reduce.MIN: torch.minimum, Reduce.MAX: torch.maximum, Reduce.PRODUCT: torch.mul}


class Operation(Enum):
    """The kinds of collectives and messages, each a method of :class:`Communicator`."""

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


def _no_arguments() -> str:
    return ""


class CallDescription(NamedTuple):
    """A call of the user, which may take several collectives or none.

    Attributes:
        operation: the name of the operation, for example ``"all_reduce"``.
        arguments: returns a text of everything in which the ranks have to agree: the reduction, the
            source or destination, the structure of the collection with the shape and dtype of each
            leaf. The text is empty where nothing has to agree, as on ranks that only receive. The
            function is called only when somebody reads the text.
        text: everything that has to agree, for a signature in the message (see ``[Note:
            Signatures]`` in ``checked.py``). Empty if this rank could not make its call. None, the
            default, if the message carries no signature.
        reads_result: whether this rank waits for the values that it receives. Default: False.
        call_site: where the user made the call. Needed only for calls that another thread makes.
    """

    operation: str
    arguments: Callable[[], str] = _no_arguments
    text: str | None = None
    reads_result: bool = False
    call_site: CallSite | None = None


class Message(NamedTuple):
    """The two ranks of a message."""

    source: int
    destination: int


class Collective(NamedTuple):
    """One call of a collective on this rank. It is a tuple, since every call makes one.

    Attributes:
        operation: the kind of collective.
        buffer: the tensor that is passed. Broadcast, recv and scatter write to it. For operations
            on objects, the pickled object; for new_group, the ranks.
        reduce: the reduction of all_reduce and reduce_scatter.
        peer: the source or destination, if the operation has one.
        rows: what scatter sends, on the source only.
        name: the name of a barrier.
        call: the call of the user that the collective belongs to, if it is known.
    """

    operation: Operation
    buffer: Any = None
    reduce: Reduce | None = None
    peer: int | None = None
    rows: Tensor | None = None
    name: str = ""
    call: CallDescription | None = None

    @property
    def user_operation(self) -> str:
        """The name of the operation, as the user called it."""
        if self.call is None:
            return self.operation.value
        return self.call.operation

    @property
    def facts(self) -> dict[str, str]:
        """The facts that must be the same on all ranks, by name, the most informative one first."""
        facts: dict[str, str] = {"operation": self.user_operation}
        if self.operation.value != self.user_operation:
            facts["collective"] = self.operation.value
        if self.reduce is not None:
            facts["op"] = self.reduce.value
        if self.peer is not None:
            peer_name = "dst" if self.operation is Operation.GATHER else "src"
            facts[peer_name] = str(self.peer)
        if self.name:
            facts["name"] = repr(self.name)
        if self.operation is Operation.NEW_GROUP:
            facts["ranks"] = str(self.buffer)
        if isinstance(self.buffer, Tensor):
            facts["dtype"] = str(self.buffer.dtype).removeprefix("torch.")
            facts["shape"] = str(tuple(self.buffer.shape))
        return facts

    def message(self, rank: int) -> Message:
        """Return the source and the destination of a message that ``rank`` sends or receives."""
        assert self.peer is not None, "a message has a peer"
        if self.operation is Operation.SEND:
            return Message(rank, self.peer)
        return Message(self.peer, rank)


@dataclass(frozen=True)
class NonMember:
    """The result of ``new_group`` on a process that is not a member. It is false.

    Passing it as the ``group`` of a collective is an error. It is not None, since None as a
    ``group`` means all processes of the job: a process outside of the group would silently join
    a collective of the whole job.

    Attributes:
        ranks: the members, in the order in which they were passed.
    """

    ranks: list[int]

    def __bool__(self) -> Literal[False]:
        return False


class Communicator(ABC):
    """The collectives of one group of processes, on buffers.

    A *buffer* is a contiguous tensor on ``device`` that belongs to the caller and is not part of an
    autograd graph. Its dtype is one that the backend carries (booleans travel as uint8). Reductions
    and broadcasts write into the buffer. :mod:`fabric.collectives` packs the user's collections
    into buffers, and unpacks the results.

    A communicator implements :meth:`run`, and :meth:`close` if it owns something. No class
    overrides the other methods, which check ranks, describe the call and make it.

    Collective: every rank of the group must call the methods, in the same order. The exceptions are
    :meth:`send` and :meth:`recv`, which two ranks call, and :meth:`close`. Ranks are ranks in the
    group, from 0 to ``size - 1``. The argument ``call`` describes the user's call, for diagnostics.

    Attributes:
        rank: the rank of this process in the group.
        size: the number of processes in the group.
        device: the device of buffers.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def run(self, collective: Collective) -> Any:
        """Make one call, and return what the method of that name returns.

        The ranks in the call have been checked. Operations on objects return the pickled objects.
        A new group is None on a rank that is not a member.
        """

    def close(self) -> None:
        """Release what this communicator owns. Not a collective. A second call does nothing."""

    def new_group(self, ranks: Sequence[int]) -> "Communicator | NonMember":
        """Make a group of some ranks of this group.

        Collective: every rank of this group must call it.

        Args:
            ranks: the members. The new group orders them ascending.

        Returns:
            The communicator of the new group, or a :class:`NonMember` on a rank that is not a
            member.

        Raises:
            ConfigurationError: ``ranks`` are not different ranks of this group.
            UsageError: this group is a part of the job. torch makes groups only with all processes.
        """
        ranks = list(ranks)
        all_ranks = range(self.size)
        is_valid = bool(ranks) and len(set(ranks)) == len(ranks) and set(ranks) <= set(all_ranks)
        if not is_valid:
            raise ConfigurationError(
                f"new_group({ranks})",
                problem=f"ranks are missing, repeated or outside this group of {self.size}",
                expected=f"different ranks between 0 and {self.size - 1}",
                suggestion=f"new_group({list(all_ranks)}) for all of them",
            )
        group = self.run(Collective(Operation.NEW_GROUP, sorted(ranks)))
        return group or NonMember(ranks)

    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` (any shape) over the ranks, in place, and return it."""
        return self.run(Collective(Operation.ALL_REDUCE, buffer, op))

    def all_gather(self, buffer: Tensor) -> Tensor:
        """Return a new tensor of shape ``(size, *buffer.shape)`` with the buffers in rank order.

        The buffers have the same shape on all ranks.
        """
        return self.run(Collective(Operation.ALL_GATHER, buffer))

    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` of shape ``(size, *s)`` over the ranks.

        Returns:
            A new tensor of shape ``s``, this rank's row of the result.
        """
        return self.run(Collective(Operation.REDUCE_SCATTER, buffer, op))

    def all_to_all(self, buffer: Tensor) -> Tensor:
        """Send row i of ``buffer`` of shape ``(size, *s)`` to rank i.

        Returns:
            A new tensor of the same shape. Row j comes from rank j.
        """
        return self.run(Collective(Operation.ALL_TO_ALL, buffer))

    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with the buffer of rank ``src``, and return it.

        The buffers have the same shape and dtype on all ranks.
        """
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
        """Return what :meth:`all_gather` returns on rank ``dst``, and None on the other ranks."""
        return self._run_with_peer(Operation.GATHER, buffer, dst, call=call)

    def send(self, buffer: Tensor, dst: int) -> None:
        """Send ``buffer`` to rank ``dst``, which has to call :meth:`recv`.

        The messages of a pair of ranks keep their order.
        """
        self._run_with_peer(Operation.SEND, buffer, dst)

    def recv(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with the buffer that rank ``src`` sends, and return it.

        The sent buffer has the same shape and dtype.
        """
        return self._run_with_peer(Operation.RECV, buffer, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this. ``name`` appears in the error of a barrier."""
        self.run(Collective(Operation.BARRIER, name=name or "unnamed"))

    def broadcast_object(
        self,
        value: Any,
        src: int,
        call: CallDescription | None = None,
        error: FabricError | None = None,
    ) -> Any:
        """Return the value of rank ``src`` on every rank.

        Args:
            value: any object that pickles. Only the value of rank ``src`` counts.
            src: the rank of the sender.
            call: the user's call.
            error: an error of this rank, to be raised on all ranks in place of sending the value.

        Raises:
            FabricError: the ``error`` of rank ``src``, or an ArgumentTypeError if its value does
                not pickle. Every rank raises the error.
        """
        self.check_rank(Operation.BROADCAST, src)
        if self.size == 1 and error is None:
            return value
        sent = _to_pickle_or_error(value, error) if self.rank == src else None
        collective = Collective(Operation.BROADCAST_OBJECT, sent, peer=src, call=call)
        return from_pickle(self.run(collective), src)

    def gather_objects(
        self, value: Any, call: CallDescription | None = None, error: FabricError | None = None
    ) -> list[Any]:
        """Return the values of all ranks in rank order, on every rank.

        Args:
            value: any object that pickles.
            call: the user's call.
            error: an error of this rank, to be raised on all ranks in place of sending the value.

        Raises:
            FabricError: the ``error`` of the lowest rank that passed one or, if its value does not
                pickle, an ArgumentTypeError. Every rank raises the error.
        """
        if self.size == 1 and error is None:
            return [value]
        sent = _to_pickle_or_error(value, error)
        messages = self.run(Collective(Operation.GATHER_OBJECTS, sent, call=call))
        return [from_pickle(message, rank) for rank, message in enumerate(messages)]

    def check_rank(self, operation: Operation, rank: int) -> None:
        """Check the source or destination of an operation.

        Raises:
            ConfigurationError: ``rank`` is not a rank of this group, or a message of this rank
                would go to this rank.
        """
        # Not isinstance(): a bool is an int, and True is no rank.
        is_member = type(rank) is int and 0 <= rank < self.size
        is_message = operation in (Operation.SEND, Operation.RECV)
        is_message_to_itself = is_message and rank == self.rank
        if is_member and not is_message_to_itself:
            return
        argument = "dst" if operation in (Operation.SEND, Operation.GATHER) else "src"
        problem = f"there is no rank {rank!r} in a group of {self.size}"
        if is_message_to_itself:
            problem = "a rank does not send to itself"
        expected = f"{argument} from 0 to {self.size - 1}"
        if is_message:
            expected = f"{expected}, but not {self.rank}, which is this rank"
        raise ConfigurationError(
            f"{operation.value}(..., {argument}={rank!r}) on rank {self.rank}",
            problem,
            expected=expected,
            suggestion=f"{argument}=0 for the first rank",
        )

    def _run_with_peer(
        self,
        operation: Operation,
        buffer: Tensor,
        peer: int,
        rows: Tensor | None = None,
        call: CallDescription | None = None,
    ) -> Any:
        self.check_rank(operation, peer)
        return self.run(Collective(operation, buffer, peer=peer, rows=rows, call=call))


class LocalCommunicator(Communicator):
    """The collectives of a single process, without a process group."""

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
    """Pickle a value to send.

    Args:
        value: the value.
        error: an error of this rank. It is pickled after a zero byte, in place of the value, and
            :func:`from_pickle` raises it.

    Raises:
        ArgumentTypeError: the value does not pickle.
    """
    try:
        if error is not None:
            return _ERROR_PREFIX + pickle.dumps(error)
        return pickle.dumps(value)
    except Exception as pickle_error:
        raise ArgumentTypeError(
            f"sending an object of type {type(value).__name__}",
            problem=f"it does not pickle: {type(pickle_error).__name__}: {pickle_error}",
            expected="objects that pickle; tensors inside collections travel as tensors",
            suggestion="send what the object is made of: its state_dict(), its numbers, its name",
        ) from pickle_error


def from_pickle(message: bytes, src: int) -> Any:
    """Return the value that :func:`to_pickle` packed on rank ``src``.

    Raises:
        FabricError: the error that rank ``src`` sent in place of the value.
        ArgumentTypeError: the value cannot be unpickled.
    """
    try:
        # The message comes from a rank of this job; torch's object collectives unpickle, too.
        value = pickle.loads(message.removeprefix(_ERROR_PREFIX))  # noqa: S301
    except Exception as error:
        request = "receiving an object of a module that each rank has to import"
        raise ArgumentTypeError(request, problem=f"it cannot be read here: {error!r}") from error
    if not message.startswith(_ERROR_PREFIX):
        return value
    value.add_note(f"raised on rank {src}")
    raise value


def as_fabric_error(error: Exception) -> FabricError:
    """Return the error that all ranks raise if this rank cannot make its message."""
    if isinstance(error, FabricError):
        return error
    problem = f"to take it apart raises {type(error).__name__}: {error}"
    return ArgumentTypeError("a collection to be sent", problem)


def peer_mismatch_error(request: str, peers: Sequence[int]) -> CollectiveMismatchError:
    """Return the error for ranks that pass different sources or destinations.

    Args:
        request: the call of this rank.
        peers: the sources or destinations of the ranks, or only the lowest and the highest one.
    """
    problem = f"other ranks name others, from {min(peers)} to {max(peers)}"
    return CollectiveMismatchError(
        request, problem, expected="one source or destination, the same on all ranks"
    )


def _to_pickle_or_error(value: Any, error: FabricError | None) -> bytes:
    """Pickle a value, or the error that says that the value does not pickle."""
    try:
        return to_pickle(value, error)
    except ArgumentTypeError as pickle_error:
        return to_pickle(None, pickle_error)
