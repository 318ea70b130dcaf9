"""Agreement of all ranks on whether a step has succeeded, and whether their tensors are equal.

If a step fails on one rank, all ranks raise before any of them continues. The data that a rank
sends and receives for this does not grow with the number of ranks, except on rank 0, which commits
a save for all ranks.
"""

import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import Tensor

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

__all__ = ["find_difference", "gather_on_first", "run_on_all_ranks"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# The classes of errors that keep their class on the ranks that did not fail.
_ERROR_CLASSES = (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MissingEntryError,
    UnreadableCheckpointError,
    UnsafeCheckpointError,
)


def run_on_all_ranks(
    communicator: Communicator, request: str, step: Callable[[*Ts], T], *args: *Ts
) -> T:
    """Return ``step(*args)`` of this rank, or raise on every rank if the step fails on any rank.

    Collective: every rank must call it, each with its own arguments. ``step`` must not be a
    collective itself, since it may fail on one rank only. Each rank sends one number. After a
    failure, one rank broadcasts the text of its error.

    Args:
        communicator: the ranks.
        request: what the user asked for, for the error on the ranks that did not fail.
        step: this rank's share of the work.
        args: the arguments of ``step``.

    Raises:
        CheckpointError: ``step`` failed on another rank. A rank that failed raises its own error.
    """
    rank = communicator.rank
    size = communicator.size
    result: Any = None
    error: Exception | None = None
    # 0 stands for success. Of the ranks that failed, the first one has the largest priority.
    priority = 0
    try:
        result = step(*args)
    except Exception as caught:  # noqa: BLE001 - raised again below, once every rank knows of it
        error = caught
        priority = size - rank
    priorities = torch.tensor([priority], device=communicator.device)
    largest_priority = int(communicator.all_reduce(priorities, Reduce.MAX).item())
    if largest_priority == 0:
        return result
    failed_rank = size - largest_priority
    # The class that the other ranks raise. Callers catch the classes in _ERROR_CLASSES, so these
    # have to be the same on all ranks.
    error_class = CheckpointError
    if type(error) in _ERROR_CLASSES:
        error_class = type(error)
    # broadcast_object() needs an argument on every rank, but sends only that of failed_rank.
    message = (f"{type(error).__name__}: {error}", error_class)
    text, error_class = communicator.broadcast_object(message, failed_rank)
    if error is not None:
        raise error
    problem = f"it failed on rank {failed_rank} of {size}: {text}"
    raise error_class(f"{request} on rank {rank}", problem)


def find_difference(communicator: Communicator, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that differs between ranks, the same on all ranks.

    Collective. The ranks compare the names and shapes, and two sums of each tensor. Differences
    of less than a hundredth are not reported, since kernels of different devices round differently.

    Args:
        communicator: the ranks.
        tensors: the tensors of this rank, by name.

    Returns:
        The name. None if all tensors are equal.
    """
    shapes = [f"{name} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    checksum = zlib.crc32("\n".join(shapes).encode())
    # The maximum of the negative checksums is the negative of the smallest checksum.
    checksums = torch.tensor([checksum, -checksum], device=communicator.device)
    largest, largest_negative = communicator.all_reduce(checksums, Reduce.MAX).tolist()
    if largest != -largest_negative:
        return "the names or shapes of tensors"
    if not tensors:
        return None
    sums = torch.stack(list(map(_sums_of, tensors.values()))).to(communicator.device)
    highest = communicator.all_reduce(sums.clone(), Reduce.MAX)
    lowest = -communicator.all_reduce(-sums, Reduce.MAX)
    # The second sum of each tensor is the sum of the absolute values.
    tolerance = highest[:, 1:] / 100
    differs = (highest - lowest > tolerance).any(dim=1).tolist()
    for name, is_different in zip(tensors, differs, strict=True):
        if is_different:
            return name
    return None


def _sums_of(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor, and the sum of its absolute values, on the CPU."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    values = tensor.detach().float()
    return torch.stack([values.sum(), torch.linalg.vector_norm(values, 1)]).cpu()


def gather_on_first(communicator: Communicator, value: T) -> list[T]:
    """Return the values of all ranks on rank 0, and an empty list on other ranks. Collective.

    Other ranks receive nothing: only rank 0 needs memory for the values of all ranks.
    """
    pickled = pickle.dumps(value)
    length = torch.tensor([len(pickled)], device=communicator.device)
    longest = int(communicator.all_reduce(length, Reduce.MAX).item())
    # gather() needs the same length on all ranks. Unpickling ignores the padding.
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
