"""One outcome for all ranks: what fails on one of them is an error on every one."""

from collections.abc import Callable
from typing import Any, TypeVar

from fabric.checkpoint.failures import refusals
from fabric.communicators import Communicator
from fabric.errors import CheckpointError

__all__ = ["together", "write_together"]

T = TypeVar("T")


def together(communicator: Communicator, asked: str, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and return its result once all of them are known to have succeeded.

    Collective: every rank must call it. ``action`` must not be a collective itself, since it may fail on one rank only.

    Args:
        communicator: the ranks.
        asked: what is being done, for the error of the ranks on which nothing is wrong.
        action: this rank's part.

    Raises:
        CheckpointError: it failed on another rank; a rank on which it failed raises its own error.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - raised again below, once every rank knows of it
        error = caught
    texts = communicator.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(
                f"{asked} on rank {communicator.rank}",
                f"it failed on rank {rank} of {communicator.size}: {text}",
                "a call that succeeds on every rank",
                f"see the error of rank {rank}",
            )
    return result


def write_together(communicator: Communicator, asked: str, action: Callable[[], T]) -> T:
    """As :func:`together` for a part of a save before its commit: see :func:`fabric.checkpoint.failures.refusals`."""

    def writing() -> T:
        with refusals(asked):
            return action()

    return together(communicator, asked, writing)
