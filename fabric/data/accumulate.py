"""Windows of micro-batches whose gradients are accumulated."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Generic

from fabric.data.loader import Batch_co, FabricDataLoader
from fabric.data.position import EpochPosition, MicroBatch
from fabric.data.spec import ActiveLoop
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError, UsageError

__all__ = ["Windows", "check_no_window", "open_micro_batch"]


class Windows(Generic[Batch_co]):
    """A loop over a set-up loader in windows of ``steps`` micro-batches; ``fabric.accumulate``.

    Each ``iter()`` iterates the loader once, and yields pairs ``(batch, last)``. ``last`` is true
    for the last micro-batch of a window, and the same on all processes. The last window of an epoch
    may be shorter. Resuming from a loaded position begins a new window::

        for batch, last in fabric.accumulate(loader, steps=4):
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(loss_sum(model, batch), weight=len(batch))
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

    If the number of batches is known, nothing is fetched earlier than in a loop over the loader.
    Otherwise one batch is fetched ahead, which the loader's ``state_dict`` does not count.
    ``fabric.save`` inside a window raises a :class:`fabric.errors.CheckpointError`, since a
    checkpoint does not contain accumulated gradients.

    Args:
        loader: the loader that ``setup_dataloaders`` returned.
        steps: number of micro-batches in a window, 1 or more.

    Raises:
        ArgumentTypeError: the loader is not set up.
        ConfigurationError: ``steps`` is less than 1, or not an integer.
        UsageError: processes may have different numbers of batches, and ``uneven`` does not say
            how that is handled.
    """

    def __init__(self, loader: FabricDataLoader[Batch_co], steps: int) -> None:
        """Check the arguments. ``fabric.accumulate`` calls it; ``iter()`` begins the loop."""
        call_text = f"fabric.accumulate({type(loader).__name__}, steps={steps!r})"
        if not isinstance(loader, FabricDataLoader):
            raise ArgumentTypeError(
                call_text,
                problem="it is not a loader, or not set up",
                suggestion="loader = fabric.setup_dataloaders(loader), and then "
                "for batch, last in fabric.accumulate(loader, steps=4): ...",
            )
        # isinstance() would accept True, since bool is a subclass of int.
        if type(steps) is not int or steps < 1:
            raise ConfigurationError(call_text, expected="an integer number of steps, 1 or more")
        if loader._may_end_unevenly():
            raise UsageError(
                call_text,
                problem="fabric does not shard this data: processes with more batches would wait "
                "for ever",
                suggestion='fabric.setup_dataloaders(loader, uneven="shortest")',
            )
        self.loader = loader
        self.steps = steps

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch."""
        return len(self.loader)

    @property
    def resumed_at(self) -> int:
        """Number of batches that the latest iteration skipped; see the loader's ``resumed_at``."""
        return self.loader.resumed_at

    def __iter__(self) -> Iterator[tuple[Batch_co, bool]]:
        # Not a generator function: iter() has to begin the iteration, as iter(loader) does. A
        # generator would begin it when the first batch is asked for.
        position, batches = self.loader._begin_iteration(marks_last_batch=True)
        return self._yield_pairs(position, batches)

    def _yield_pairs(self, position: EpochPosition, batches: Any) -> Iterator[tuple[Any, bool]]:
        """Yield each batch, and whether it is the last one of a window.

        Args:
            position: the position of the iteration. The loader sets ``is_final`` before each batch.
                This method sets ``micro_batch``, which :func:`check_no_window` reads.
            batches: the generator of the loader's batches. It is closed if the user breaks the
                loop, so that the loader knows that the iteration has ended.
        """
        with closing(batches):
            for index, batch in enumerate(batches):
                number_in_window = index % self.steps + 1
                is_last = number_in_window == self.steps or position.is_final
                # None at the last micro-batch, since the user steps there and may then save.
                position.micro_batch = None
                if not is_last:
                    position.micro_batch = MicroBatch(number_in_window, window_length=self.steps)
                yield batch, is_last


def open_micro_batch(active_loops: Sequence[ActiveLoop]) -> MicroBatch | None:
    """Return the micro-batch of an active loop inside a window. None if no window is open."""
    for loop in active_loops:
        if loop.position.micro_batch is not None:
            return loop.position.micro_batch
    return None


def check_no_window(active_loops: Sequence[ActiveLoop]) -> None:
    """Raise a CheckpointError if an active loop is inside a window of ``fabric.accumulate``.

    ``fabric.save`` calls this function, since a checkpoint has no accumulated gradients.
    """
    for loop in active_loops:
        position = loop.position
        # None outside of a window.
        micro_batch = position.micro_batch
        if micro_batch is not None:
            raise CheckpointError(
                "fabric.save(...) inside a window of fabric.accumulate",
                problem=f"the loop is at micro-batch {micro_batch.number} of "
                f"{micro_batch.window_length}, batch {position.received_batches} of epoch "
                f"{position.epoch}: a checkpoint would lack the gradients that have been "
                "accumulated",
                suggestion="if last: optimizer.step(); optimizer.zero_grad(); fabric.save(...)",
            )
