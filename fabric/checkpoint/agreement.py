"""Agreement of all ranks on whether a step has succeeded.

If a step fails on one rank, all ranks raise before any of them continues. The data that a rank
sends and receives for that does not grow with the number of ranks, except on rank 0, which commits
a save for all ranks.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fabric.checkpoint.encoding import tensor_bytes
from fabric.communicators import Communicator, Reduce
from fabric.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
)

__all__ = ["gather_on_first", "raise_on_any_rank_error"]

T = TypeVar("T")

# The classes of errors that keep their class on the ranks that did not fail.
_ERROR_CLASSES = (CheckpointNotFoundError, DamagedCheckpointError, UnsafeCheckpointError)


def raise_on_any_rank_error(communicator: Communicator, request: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and return its result once it has succeeded on all ranks.

    Collective: every rank must call it. ``action`` must not be a collective itself, since it may
    fail on one rank only. Each rank sends one number. After a failure, one rank broadcasts the text
    of its error.

    Args:
        communicator: the ranks.
        request: what is being done, for the error on the ranks that did not fail.
        action: this rank's share of the step.

    Raises:
        CheckpointError: the action failed on another rank. A rank that failed raises its own error.
    """
    rank = communicator.rank
    size = communicator.size
    result: Any = None
    error: Exception | None = None
    priority = 0  # that of the first rank that failed is the largest
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - raised again below, once every rank knows of it
        error = caught
        priority = size - rank
    priorities = torch.tensor([priority], device=communicator.device)
    failed_rank = size - int(communicator.all_reduce(priorities, Reduce.MAX).item())
    if failed_rank == size:
        return result
    error_class = CheckpointError
    if type(error) in _ERROR_CLASSES:
        error_class = type(error)
    message = (f"{type(error).__name__}: {error}", error_class)
    text, error_class = communicator.broadcast_object(message, failed_rank)
    if error is not None:
        raise error
    problem = f"it failed on rank {failed_rank} of {size}: {text}"
    raise error_class(f"{request} on rank {rank}", problem)


def gather_on_first(communicator: Communicator, value: T) -> list[T]:
    """Return the values of all ranks on rank 0, and an empty list on other ranks. Collective."""
    content = pickle.dumps(value)
    length = torch.tensor([len(content)], device=communicator.device)
    longest = int(communicator.all_reduce(length, Reduce.MAX).item())
    # Padded: unpickling stops at the end of the pickle.
    padded = bytearray(content.ljust(longest, b"\0"))
    buffer = torch.frombuffer(padded, dtype=torch.uint8)
    rows = communicator.gather(buffer.to(communicator.device), 0)
    values: list[T] = []
    if rows is not None:
        for row in rows.cpu():
            values.append(pickle.loads(tensor_bytes(row)))  # noqa: S301 - of this job
    return values
