"""The collectives of a group of processes on buffers, and the description of one call."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fabric.communicators.call_site import CallSite
from fabric.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    ConfigurationError,
    FabricError,
)

__all__ = [
    "BITWISE",
    "MIN_MAX_PRODUCT",
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


# The first byte of a message with an error in place of a value. No pickle begins with this byte.
_ERROR_PREFIX = b"\0"

ReduceName = Literal["mean", "avg", "sum", "min", "max", "product", "band", "bor", "bxor"]


class Reduce(StrEnum):
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
        """Return the reduction for a name or a torch object. None means the mean.

        ``Reduce(value)`` calls this method if ``value`` is not the value of a member.

        Raises:
            ConfigurationError: there is no such reduction.
        """
        if isinstance(value, str):
            name = value.upper()
        else:
            # A torch.distributed.ReduceOp has an attribute ``op``, a member of torch's own enum.
            # The member has a name, such as "SUM". Other objects have no name of a reduction.
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


# What a user may pass as a reduction, besides a name.
ReduceOp = Reduce | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType
# The bitwise reductions of integers and booleans.
BITWISE = {
    Reduce.BAND: torch.bitwise_and,
    Reduce.BOR: torch.bitwise_or,
    Reduce.BXOR: torch.bitwise_xor,
}
# The other reductions besides sums and means. They have no gradient over ranks, and are not defined
# for complex numbers.
MIN_MAX_PRODUCT = {Reduce.MIN: torch.minimum, Reduce.MAX: torch.maximum, Reduce.PRODUCT: torch.mul}


class Operation(StrEnum):
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
    """Return an empty text: the call has no arguments that must be the same on all ranks."""
    return ""


# See [Note: Signatures] in checked.py.
class CallDescription(NamedTuple):
    """A call of the user, for errors, reports and signatures. It may make several collectives.

    Attributes:
        operation: the name of the operation, for example ``"all_reduce"``.
        arguments: returns the arguments of the call as a text for reports, for example
            ``"mean of loss: 1 float32[]"``. Checked mode also compares this text between the ranks.
            The text is empty if no argument must be the same on all ranks. The function is called
            only when the text is needed.
        signature_text: everything that must be the same on all ranks, as a text. The ranks compare
            its checksum, which is the signature of the call. Empty if this rank could not make its
            call. None, the default, if the call has no signature.
        reads_result: whether this rank reads the result at once, and so waits for the device.
            Default: False.
        call_site: where the user made the call, if another thread makes the collectives. None, the
            default, if the user's call is in the stack of this thread.
    """

    operation: str
    arguments: Callable[[], str] = _no_arguments
    signature_text: str | None = None
    reads_result: bool = False
    call_site: CallSite | None = None


class Message(NamedTuple):
    """The two ranks between which a message travels.

    Attributes:
        source: the rank that sends.
        destination: the rank that receives.
    """

    source: int
    destination: int


class Collective(NamedTuple):
    """One call of a collective, or of send or recv, on this rank.

    It is a tuple, since every call makes one and a tuple is the fastest to make.

    Attributes:
        operation: the kind of collective.
        buffer: the tensor that is passed. Broadcast, recv and scatter write to it. For operations
            on objects, the pickled object, which is None on a rank that only receives. For
            new_group, the sorted ranks. For a barrier, None.
        reduce: the reduction of all_reduce and reduce_scatter. None for other operations.
        peer: the source or destination, if the operation has one, else None.
        rows: for scatter, the tensor whose rows are sent. None on ranks other than the source. For
            all_gather, ``size`` copies of the buffer if the caller has them, else None.
        output: for all_gather, a tensor of shape ``(size, *buffer.shape)`` that the communicator
            may write its result to. None, the default, if the result is a new tensor.
        name: the name of a barrier. Empty for other operations.
        call: the call of the user that makes the collective. None, the default, if unknown.
    """

    operation: Operation
    buffer: Any = None
    reduce: Reduce | None = None
    peer: int | None = None
    rows: Tensor | None = None
    output: Tensor | None = None
    name: str = ""
    call: CallDescription | None = None

    @property
    def user_operation(self) -> str:
        """The name of the user's call, for which fabric may make several operations."""
        if self.call is None:
            return self.operation.value
        return self.call.operation

    @property
    def facts(self) -> dict[str, str]:
        """The properties that must be the same on all ranks, by name, as texts for errors.

        Checked mode reports the first property that differs, so the most important ones come first.
        """
        facts: dict[str, str] = {"operation": self.user_operation}
        # One call of the user may make several kinds of collectives.
        if self.operation.value != self.user_operation:
            facts["collective"] = self.operation.value
        if self.reduce is not None:
            facts["op"] = self.reduce.value
        if self.peer is not None:
            # The name of the argument in the user's call. Checked mode does not compare the peers
            # of send and recv, so these two need no case here.
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

    def source_and_destination(self, rank: int) -> Message:
        """Return the source and the destination of a send or recv.

        Args:
            rank: the rank that makes the call.
        """
        assert self.peer is not None, "a send or recv without a peer"
        if self.operation is Operation.SEND:
            return Message(source=rank, destination=self.peer)
        return Message(source=self.peer, destination=rank)


@dataclass(frozen=True)
class NonMember:
    """The result of ``new_group`` on a process that is not a member. ``bool()`` of it is False.

    Passing a ``NonMember`` as the ``group`` of a collective is an error. The result is not None,
    since None as a ``group`` means all processes of the job: a process outside of the group would
    silently join a collective of the whole job.

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

    A subclass implements :meth:`run`, and :meth:`close` if it owns something that must be released.
    It does not override the other methods, which check the ranks and call :meth:`run`.

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
        """Make one call, and return its result. Collective among the ranks that the call names.

        Every method for an operation, such as :meth:`all_reduce`, checks the ranks and then calls
        this one. Its docstring describes the result, which is returned unchanged with three
        exceptions:

        - For broadcast_object, the pickled object of the source, as bytes.
        - For gather_objects, a list of the pickled objects of all ranks, as bytes.
        - For new_group, None on a rank that is not a member of the new group.
        """

    def close(self) -> None:
        """Release what this communicator owns. Not a collective. A second call does nothing."""

    def new_group(self, ranks: Sequence[int]) -> "Communicator | NonMember":
        """Make a group of some ranks of this group.

        Collective: every rank of this group must call it, members or not, with the same ranks.

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
        are_unique = len(set(ranks)) == len(ranks)
        are_in_group = set(ranks) <= set(all_ranks)
        if not ranks or not are_unique or not are_in_group:
            raise ConfigurationError(
                f"new_group({ranks})",
                problem=f"ranks are missing, repeated or outside this group of {self.size}",
                expected=f"different ranks between 0 and {self.size - 1}",
                suggestion=f"new_group({list(all_ranks)}) for all of them",
            )
        communicator = self.run(Collective(Operation.NEW_GROUP, sorted(ranks)))
        if communicator is None:  # this rank is not a member
            return NonMember(ranks)
        return communicator

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
        """Send row i of ``rows`` on rank ``src`` to rank i, which overwrites ``output`` with it.

        Args:
            rows: on rank ``src``, a tensor of shape ``(size, *output.shape)``. None on other ranks.
            output: the tensor that is overwritten and returned.
            src: the rank that has the rows.
            call: the user's call. None, the default, if unknown.
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
        """Wait until every rank has called this method. ``name`` is shown if the barrier fails."""
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
            call: the user's call. None, the default, if unknown.
            error: an error that keeps this rank from passing a value. If rank ``src`` passes an
                error, all ranks raise the error. None, the default, if there is no error.

        Raises:
            FabricError: the ``error`` of rank ``src``, or an ArgumentTypeError if its value does
                not pickle. Every rank raises the error.
        """
        self.check_rank(Operation.BROADCAST, src)
        # A single process gets its own object, not a copy. An error goes the usual way, since
        # from_pickle() raises it.
        if self.size == 1 and error is None:
            return value
        is_source = self.rank == src
        message = _to_pickle_or_error(value, error) if is_source else None
        collective = Collective(Operation.BROADCAST_OBJECT, message, peer=src, call=call)
        return from_pickle(self.run(collective), src)

    def gather_objects(
        self, value: Any, call: CallDescription | None = None, error: FabricError | None = None
    ) -> list[Any]:
        """Return the values of all ranks in rank order, on every rank.

        Args:
            value: any object that pickles.
            call: the user's call. None, the default, if unknown.
            error: an error that keeps this rank from passing a value. All ranks raise the error.
                None, the default, if there is no error.

        Raises:
            FabricError: the error of the lowest rank that has an error: the ``error`` that the rank
                passed, or an ArgumentTypeError if the value of the rank does not pickle. Every rank
                raises the error.
        """
        # A single process gets its own object, not a copy. An error goes the usual way, since
        # from_pickle() raises it.
        if self.size == 1 and error is None:
            return [value]
        message = _to_pickle_or_error(value, error)
        messages = self.run(Collective(Operation.GATHER_OBJECTS, message, call=call))
        # The messages are read in rank order, so from_pickle() raises the error of the lowest rank.
        return [from_pickle(packed, rank) for rank, packed in enumerate(messages)]

    def check_rank(self, operation: Operation, rank: int) -> None:
        """Check the source or destination of an operation before any communication.

        With a wrong rank, the operation would hang or raise an error that does not name the rank.

        Raises:
            ConfigurationError: ``rank`` is not a rank of this group, or this rank would send a
                message to itself.
        """
        # type() and not isinstance(): a bool is an int, but True is not a rank.
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
        suggestion = f"{argument}=0 for the first rank"
        if is_message and self.rank == 0:
            suggestion = f"{argument}=1 for the next rank"
            if self.size == 1:
                suggestion = "Fabric(devices=2), which has another rank"
        raise ConfigurationError(
            f"{operation.value}(..., {argument}={rank!r}) on rank {self.rank}",
            problem=problem,
            expected=expected,
            suggestion=suggestion,
        )

    def _run_with_peer(
        self,
        operation: Operation,
        buffer: Tensor,
        peer: int,
        rows: Tensor | None = None,
        call: CallDescription | None = None,
    ) -> Any:
        """Check the source or destination of an operation, and run the operation.

        Args:
            operation: the operation.
            buffer: the tensor that is passed. Broadcast, scatter and recv write to it.
            peer: the source or destination.
            rows: the rows of a scatter on its source. None, the default, otherwise.
            call: the user's call. None, the default, if unknown.

        Returns:
            The result that the method of the operation describes, such as :meth:`gather`.

        Raises:
            ConfigurationError: ``peer`` is not a rank that this operation may name. See
                :meth:`check_rank`.
        """
        self.check_rank(operation, peer)
        return self.run(Collective(operation, buffer, peer=peer, rows=rows, call=call))


class LocalCommunicator(Communicator):
    """The collectives of a single process, without a process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank = 0
        self.size = 1
        self.device = device

    def __repr__(self) -> str:
        return f"LocalCommunicator({str(self.device)!r})"

    @override
    def run(self, collective: Collective) -> Any:
        """Return the result of a collective in a group of one rank."""
        buffer = collective.buffer  # a tensor, a pickled object, or None
        # all_reduce, broadcast and scatter write into the buffer and return it. The results of the
        # other operations on tensors are copies, as in a group of several ranks.
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
                assert collective.rows is not None, "rank src of a scatter has no rows"
                return buffer.copy_(collective.rows[0])
            case _:
                # all_reduce, broadcast and broadcast_object over one rank do not change the buffer.
                # The buffer of a barrier is None.
                return buffer


def to_pickle(value: Any, error: FabricError | None = None) -> bytes:
    """Pickle a value, or an error in place of the value, as a message for other ranks.

    :func:`from_pickle` reads the message.

    Args:
        value: the value.
        error: an error of this rank, which :func:`from_pickle` raises on the other ranks. None, the
            default, if there is no error.

    Raises:
        ArgumentTypeError: the value or the error does not pickle.
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
    """Return the value that :func:`to_pickle` packed on rank ``src``, or raise the packed error.

    Raises:
        FabricError: the error that rank ``src`` sent in place of a value. A note says its rank.
        ArgumentTypeError: the message cannot be unpickled.
    """
    is_error = message.startswith(_ERROR_PREFIX)
    try:
        # Unpickling is safe here, since the message comes from a rank of this job. torch's object
        # collectives do the same.
        value = pickle.loads(message.removeprefix(_ERROR_PREFIX))  # noqa: S301
    except Exception as error:
        raise ArgumentTypeError(
            f"receiving an object from rank {src}",
            problem=f"it cannot be read here: {error!r}",
            expected="an object whose class can be imported on each rank",
        ) from error
    if is_error:
        # The value is the error that rank `src` packed.
        value.add_note(f"raised on rank {src}")
        raise value
    return value


def as_fabric_error(error: Exception) -> FabricError:
    """Return an error of this rank in a form that pickles, so that all ranks can raise it.

    Args:
        error: the error that taking a collection apart has raised. A FabricError pickles and is
            returned unchanged. Any other error becomes an ArgumentTypeError with its text.
    """
    if isinstance(error, FabricError):
        return error
    problem = f"taking it apart raises {type(error).__name__}: {error}"
    return ArgumentTypeError("a collection to be sent", problem=problem)


def peer_mismatch_error(request: str, peers: Sequence[int]) -> CollectiveMismatchError:
    """Return the error for ranks that pass different sources or destinations.

    Args:
        request: the call of this rank, as the user wrote it.
        peers: the sources or destinations that the ranks pass. The lowest and the highest one are
            enough.
    """
    return CollectiveMismatchError(
        request,
        problem=f"the ranks pass different values, from {min(peers)} to {max(peers)}",
        expected="one source or destination, the same on all ranks",
    )


def _to_pickle_or_error(value: Any, error: FabricError | None) -> bytes:
    """Pickle a value or an error with :func:`to_pickle`. If that raises, pickle the raised error.

    So this rank always has a message to send, and the other ranks do not wait for it.
    """
    try:
        return to_pickle(value, error)
    except ArgumentTypeError as pickle_error:
        return to_pickle(None, error=pickle_error)
