"""One outcome for all ranks: what fails on one of them is an error on every one."""

from collections.abc import Callable
from typing import Any, TypeVar

from fabric.communicators import Communicator
from fabric.errors import CheckpointError, FabricError

__all__ = ["reported", "together"]

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


def reported(asked: str, action: Callable[[], T]) -> Callable[[], T]:
    """``action``, with what torch and the file system raise in it turned into an error that says what it was about.

    For the parts of a save before its commit: the error says that what was there before is untouched.

    Raises:
        CheckpointError: by the function that is returned.
    """

    def reporting() -> T:
        try:
            return action()
        except FabricError:
            raise
        except (RuntimeError, OSError, ValueError, TypeError, AssertionError) as error:
            raise CheckpointError(
                asked,
                f"{type(error).__name__}: {error}",
                "the same tensors on every rank, and a place that can be written to, with room for the old and the new",
                "free space, another path, or other permissions; what was there before is untouched",
            ) from error

    return reporting
