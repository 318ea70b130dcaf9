"""Windows of micro-batches, whose gradients are accumulated for one step of the optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from fabric.data.loader import FabricDataLoader
from fabric.data.state import ActiveIterator, EpochState
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError, UsageError

__all__ = ["Windows", "check_no_window"]


class Windows:
    """A loop over a set-up loader in windows of ``steps`` micro-batches; ``fabric.accumulate`` returns it.

    Each iteration over it is one over the loader, and yields pairs ``(batch, last)``. ``last`` says that a window ends
    with this micro-batch, and is the same on all processes. The last window of an epoch may be shorter; a position that
    was loaded begins a new one::

        for batch, last in fabric.accumulate(loader, steps=4):
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(loss_sum(model, batch), weight=len(batch))
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

    Nothing is fetched earlier than in a loop over the loader where the number of batches is known. Elsewhere one batch
    is fetched ahead, which the loader's ``state_dict`` does not count. ``fabric.save`` inside a window raises a
    :class:`fabric.errors.CheckpointError`: accumulated gradients are in no checkpoint.

    Args:
        loader: what ``setup_dataloaders`` returned.
        steps: micro-batches in a window, 1 or more.

    Raises:
        ArgumentTypeError: another kind of loader, or ``steps`` is not an integer.
        ConfigurationError: ``steps`` is less than 1.
        UsageError: processes may have different numbers of batches, and nothing says what happens then.
    """

    def __init__(self, loader: FabricDataLoader, steps: int) -> None:
        request = f"fabric.accumulate({type(loader).__name__}, steps={steps!r})"
        if not isinstance(loader, FabricDataLoader):
            raise ArgumentTypeError(request, "the loader is not set up", suggestion="fabric.setup_dataloaders(loader)")
        if type(steps) is not int:
            raise ArgumentTypeError(request, f"steps is a {type(steps).__name__}", "an integer, 1 or more")
        if steps < 1:
            raise ConfigurationError(request, expected="steps=1 or more")
        if loader._num_processes > 1 and not loader._spec.is_even:
            raise UsageError(
                request,
                "processes may have different numbers of batches, since fabric does not shard this data: a process "
                "whose window goes on would wait for the others",
                "a loader whose data fabric shards, or one that agrees on its end",
                'fabric.setup_dataloaders(loader, uneven="shortest")',
            )
        self.loader, self.steps = loader, steps

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        return self._pairs(*self.loader._begin(ends=True))

    def _pairs(self, state: EpochState, batches: Any) -> Iterator[tuple[Any, bool]]:
        with closing(batches):
            for number, batch in enumerate(batches):
                micro_batch = number % self.steps + 1
                last = micro_batch == self.steps or state.is_final
                state.window = None if last else (micro_batch, self.steps)
                yield batch, last


def check_no_window(active: Sequence[ActiveIterator]) -> None:
    """Raise a CheckpointError inside a window of one of these iterations."""
    for _, state in active:
        if state.window is not None:
            raise CheckpointError(
                "fabric.save(...) inside a window of fabric.accumulate",
                "micro-batch {} of {} is out, at batch {} of epoch {}: ".format(
                    *state.window, state.received, state.epoch
                )
                + "the gradients accumulated so far are in no checkpoint",
                "a save after the last micro-batch of a window",
                "if last: optimizer.step(); optimizer.zero_grad(); fabric.save(...)",
            )
