"""How ranks talk: tensors only, one call a collective."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from fabric.errors import ConfigurationError

__all__ = ["Announcement", "Communicator", "NonMember", "Reduce"]


class Reduce(Enum):
    """What a reduction does to the values of the ranks; the mean is the sum divided by the number of ranks.

    The bitwise ones are for integers and booleans.
    """

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


@dataclass(frozen=True, slots=True)
class Announcement:
    """One operation of the user, which may cost several collectives or none; see :meth:`Communicator.announce`.

    Attributes:
        operation: its name, ``"all_reduce"`` for one.
        describe: a text of everything in which the ranks have to agree: the reduction, the rank of a source or
            destination, the structure of the collection with the shape and dtype of each leaf. Empty where nothing has
            to agree, as on the ranks that only receive.
    """

    operation: str
    describe: Callable[[], str]


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
    in is made a buffer, and what comes out is given its structure back, in :mod:`fabric.collectives`.

    Every method is a collective, but for :meth:`send` and :meth:`recv`, which two ranks call, :meth:`announce` and
    :meth:`close`: every rank of the group must call it, in the same order. Ranks are ranks in the group, from 0 to
    ``size - 1``.

    Attributes:
        rank: rank of this process in the group.
        size: number of processes in the group.
        device: where buffers have to live.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` (any shape) over the ranks, in place, and return it."""

    @abstractmethod
    def all_gather(self, buffer: Tensor) -> Tensor:
        """A new tensor of shape ``(size, *buffer.shape)``: the buffer of every rank, of equal shape, in rank order."""

    @abstractmethod
    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce ``buffer`` of shape ``(size, *s)`` over the ranks; a new tensor of shape ``s``, this rank's row."""

    @abstractmethod
    def all_to_all(self, buffer: Tensor) -> Tensor:
        """Send row i of ``buffer`` of shape ``(size, *s)`` to rank i.

        A new tensor of that shape, whose row j came from rank j.
        """

    @abstractmethod
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with that of rank ``src``, of the same shape and dtype, and return it."""

    @abstractmethod
    def scatter(self, rows: Tensor | None, output: Tensor, src: int) -> Tensor:
        """Write this rank's row of rank ``src``'s ``rows`` into ``output`` and return it.

        ``rows`` has shape ``(size, *output.shape)`` on ``src`` and is None elsewhere.
        """

    @abstractmethod
    def gather(self, buffer: Tensor, dst: int) -> Tensor | None:
        """A new tensor of shape ``(size, *buffer.shape)`` on rank ``dst``, as by :meth:`all_gather`; None elsewhere."""

    @abstractmethod
    def send(self, buffer: Tensor, dst: int) -> None:
        """Send ``buffer`` to another rank, which has to call :meth:`recv`; messages of a pair of ranks keep order."""

    @abstractmethod
    def recv(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with what another rank sends, of the same shape and dtype, and return it."""

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Wait until every rank is here; ``name`` appears in the error when one does not come."""

    @abstractmethod
    def broadcast_object(self, value: Any, src: int) -> Any:
        """Rank ``src``'s value, any object that pickles, on every rank."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, any object that pickles, in rank order, on every rank."""

    @abstractmethod
    def new_group(self, ranks: Sequence[int]) -> "Communicator | None":
        """A communicator of these ranks, in ascending order; None on a rank that is not one.

        Every rank of this group must call it.

        Raises:
            ConfigurationError: these are not different ranks of this group.
            UsageError: this is a part of the job, which torch lets make no groups without the rest.
        """

    def announce(self, call: Announcement) -> None:
        """Be told of the user's operation that begins, before anything moves; called once for each."""

    def over(self, inner: "Communicator", name: str, ranks: Sequence[int]) -> "Communicator":
        """Another group, observed as this one is; not a collective.

        Args:
            inner: what carries the data in that group.
            name: the same on all its members, and of no other group.
            ranks: its members by their rank here.
        """
        return inner

    def check_src(self, src: int, operation: str = "broadcast") -> None:
        """Raise a ConfigurationError unless ``src`` is the rank of a member of this group."""
        if not self._is_rank(src):
            self._refuse_rank(operation, "src", src)

    def check_dst(self, dst: int, operation: str = "gather") -> None:
        """Raise a ConfigurationError unless ``dst`` is the rank of a member of this group."""
        if not self._is_rank(dst):
            self._refuse_rank(operation, "dst", dst)

    def check_peer(self, peer: int, operation: str, argument: str) -> None:
        """Raise a ConfigurationError unless ``peer`` is the rank of another member of this group."""
        if not self._is_rank(peer) or peer == self.rank:
            self._refuse_rank(operation, argument, peer)

    def check_members(self, ranks: Sequence[int]) -> None:
        """Raise a ConfigurationError unless ``ranks`` are different ranks of this group, one at least."""
        if not ranks or len(set(ranks)) != len(ranks) or not all(map(self._is_rank, ranks)):
            raise ConfigurationError(
                f"new_group({list(ranks)})",
                f"ranks are missing, repeated or outside this group of {self.size}",
                f"different ranks between 0 and {self.size - 1}",
                f"new_group({list(range(self.size))}) for all of them",
            )

    def _is_rank(self, rank: object) -> bool:
        return isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < self.size

    def _refuse_rank(self, operation: str, argument: str, rank: object) -> NoReturn:
        itself = rank == self.rank and self._is_rank(rank)
        raise ConfigurationError(
            f"{operation}(..., {argument}={rank!r}) on rank {self.rank}",
            "a rank does not talk to itself" if itself else f"there is no rank {rank!r} in a group of {self.size}",
            f"{argument} from 0 to {self.size - 1}" + (f", but {self.rank}" if itself else ""),
            "the value itself, which is here already" if itself else f"{argument}=0 for the first rank",
        )

    @abstractmethod
    def close(self) -> None:
        """Release what this communicator owns; not a collective, and calling it again does nothing."""
