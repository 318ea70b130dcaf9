"""How ranks talk: tensors only, one call a collective."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fabric.errors import ConfigurationError

__all__ = ["Communicator", "Reduce"]


class Reduce(Enum):
    """What a reduction does to the values of the ranks; the mean is the sum divided by the number of ranks."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class Communicator(ABC):
    """The collectives of one group of processes, on buffers.

    A *buffer* is a contiguous tensor on ``device`` that belongs to the caller, not part of an autograd graph, of a
    dtype that the backend carries (booleans travel as uint8). Reductions and broadcasts write into it. What users pass
    in is made a buffer, and what comes out is given its structure back, in :mod:`fabric.collectives`.

    Every method is a collective: every rank of the group must call it, in the same order.

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
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        """Overwrite ``buffer`` with that of rank ``src`` of the group, of the same shape and dtype, and return it."""

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

    def check_src(self, src: int) -> None:
        """Raise a ConfigurationError unless ``src`` is the rank of a member of this group."""
        if not self._is_rank(src):
            raise ConfigurationError(
                f"broadcast(..., src={src}) on rank {self.rank}",
                f"there is no rank {src} in a group of {self.size}",
                f"src from 0 to {self.size - 1}",
                "src=0 to send from the first rank",
            )

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

    @abstractmethod
    def close(self) -> None:
        """Release what this communicator owns; not a collective, and calling it again does nothing."""
