"""Agreement of all ranks on whether a step has succeeded.

If a step fails on one rank, all ranks raise before any of them continues. The data that a rank
sends and receives for this does not grow with the number of ranks, except on rank 0, which commits
a save for all ranks.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fabric.checkpoint.encoding import tensor_bytes
from fabric.communicators import Communicator, Reduce
from fabric.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MissingEntryError,
    UnreadableCheckpointError,
    UnsafeCheckpointError,
)

__all__ = [
    "BadTensor",
    "gather_on_first",
    "inspect_on_all_ranks",
    "run_on_all_ranks",
]

T = TypeVar("T")

# The classes of errors that keep their class on the ranks that did not fail.
_ERROR_CLASSES = (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MissingEntryError,
    UnreadableCheckpointError,
    UnsafeCheckpointError,
)


class BadTensor(NamedTuple):
    """A tensor in a state to save, with NaN or infinite values that training cannot go on from.

    Attributes:
        name: the tensor, such as ``"model['weight']"``.
        value: the first bad value, such as ``"nan"``.
        rank: the rank that has the tensor, or a shard of it.
    """

    name: str
    value: str
    rank: int

    def __str__(self) -> str:
        """Return a clause for warnings and errors."""
        return f"{self.name} has the value {self.value} on rank {self.rank}"


class _Attempt(NamedTuple, Generic[T]):
    """The result of a step on this rank, or its error."""

    result: T | None
    error: Exception | None


def run_on_all_ranks(communicator: Communicator, request: str, step: Callable[[], T]) -> T:
    """Return ``step()`` of this rank, or raise on every rank if the step fails on any rank.

    Collective: every rank must call it, each with its own step. ``step`` must not be a collective
    itself, since it may fail on one rank only. Each rank sends one number. After a failure, one
    rank broadcasts the text of its error.

    Args:
        communicator: the ranks.
        request: the user's request, a text for the error on the ranks that did not fail.
        step: this rank's share of the work.

    Raises:
        CheckpointError: ``step`` failed on another rank. A rank that failed raises its own error.
    """
    attempt = _attempt(step)
    has_error = attempt.error is not None
    [failed_rank] = _first_ranks_with_true(communicator, [has_error])
    return _result_of(communicator, request, attempt, failed_rank)


def inspect_on_all_ranks(
    communicator: Communicator,
    request: str,
    step: Callable[[], tuple[T, BadTensor | None]],
) -> tuple[T, BadTensor | None]:
    """Run a step as :func:`run_on_all_ranks` does, and agree on the bad tensor that it returns.

    Collective. The errors are those of :func:`run_on_all_ranks`. In one message, the ranks agree on
    the first rank that failed and on the first rank that has a bad tensor. The rank that has the
    bad tensor then broadcasts it.

    Args:
        communicator: the ranks.
        request: the user's request, a text for the error on the ranks that did not fail.
        step: returns a result, and a bad tensor of this rank or None.

    Returns:
        The result of this rank, and the bad tensor of the first rank that has one. The bad tensor
        is the same on all ranks. None if no rank has one.
    """
    attempt = _attempt(step)
    has_error = attempt.error is not None
    bad_tensor = None
    if attempt.result is not None:  # the step has not failed
        _, bad_tensor = attempt.result
    has_bad_tensor = bad_tensor is not None
    failed_rank, bad_rank = _first_ranks_with_true(communicator, [has_error, has_bad_tensor])
    result, _ = _result_of(communicator, request, attempt, failed_rank)
    if bad_rank is None:
        return result, None
    return result, communicator.broadcast_object(bad_tensor, bad_rank)


def _attempt(step: Callable[[], T]) -> _Attempt[T]:
    """Return the result of ``step()``, or its error."""
    try:
        return _Attempt(step(), error=None)
    except Exception as error:  # noqa: BLE001 - raised again, once every rank knows of it
        return _Attempt(None, error)


def _first_ranks_with_true(communicator: Communicator, answers: Sequence[bool]) -> list[int | None]:
    """Return for each question the first rank whose answer is true. Collective.

    All answers travel in one message.

    Args:
        communicator: the ranks.
        answers: this rank's answers to the questions, such as whether a step has failed. The
            questions are the same on all ranks.

    Returns:
        The first ranks, the same on all ranks. None for a question that no rank answers with true.
    """
    size = communicator.size
    # An answer that is true becomes a number that is larger for earlier ranks, and false becomes 0.
    # So the maximum over the ranks tells the first rank whose answer is true.
    priorities = [0] * len(answers)
    for index, answer in enumerate(answers):
        if answer:
            priorities[index] = size - communicator.rank
    message = torch.tensor(priorities, device=communicator.device)
    first_ranks: list[int | None] = []
    for largest_priority in communicator.all_reduce(message, Reduce.MAX).tolist():
        first_rank = None
        if largest_priority > 0:
            first_rank = size - largest_priority
        first_ranks.append(first_rank)
    return first_ranks


def _result_of(
    communicator: Communicator, request: str, attempt: _Attempt[T], failed_rank: int | None
) -> T:
    """Return the result of an attempt, or raise on every rank if the attempt of any rank failed.

    Collective if ``failed_rank`` is not None. ``failed_rank`` is the first rank whose attempt
    failed, the same on all ranks, or None.
    """
    if failed_rank is None:
        # Any: None may be the result of the step, so "is not None" would be wrong here.
        result: Any = attempt.result
        return result
    error = attempt.error
    # Callers catch the classes in _ERROR_CLASSES, so the ranks that did not fail raise them, too.
    class_to_send = CheckpointError
    if type(error) in _ERROR_CLASSES:
        class_to_send = type(error)
    # Only failed_rank sends its message. Other ranks receive it, and their argument is not used.
    message = (f"{type(error).__name__}: {error}", class_to_send)
    text, error_class = communicator.broadcast_object(message, failed_rank)
    if error is not None:
        raise error  # this rank failed, too, and raises its own error
    problem = f"it failed on rank {failed_rank} of {communicator.size}: {text}"
    raise error_class(f"{request} on rank {communicator.rank}", problem)


def gather_on_first(communicator: Communicator, value: T) -> list[T]:
    """Return on rank 0 the values of all ranks, and on other ranks an empty list. Collective.

    Other ranks receive nothing: only rank 0 needs memory for the values of all ranks.
    """
    pickled = pickle.dumps(value)
    length = torch.tensor([len(pickled)], device=communicator.device)
    longest = int(communicator.all_reduce(length, Reduce.MAX).item())
    # gather() needs messages of the same length on all ranks. Unpickling ignores the padding.
    padded = bytearray(pickled.ljust(longest, b"\0"))
    buffer = torch.frombuffer(padded, dtype=torch.uint8)
    # On rank 0 a tensor with one row for each rank, None on other ranks.
    rows = communicator.gather(buffer.to(communicator.device), 0)
    if rows is None:
        return []
    values: list[T] = []
    for row in rows.cpu():
        values.append(pickle.loads(tensor_bytes(row)))  # noqa: S301 - from a rank of this job
    return values
