"""Saves that go on beside the training loop, one at a time.

[Note: Thread] A thread writes, not a process: torch lets other threads run while it sums, writes and flushes a tensor,
so the loop loses what the writing takes of the processor and little more, while a process would have to import torch,
hold the copy in shared memory and join a process group of its own first. Its collectives run on a group that nothing
else uses, so that they cannot be taken for those of the loop.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from fabric.checkpoint.snapshot import SnapshotBuffers
from fabric.checkpoint.unison import together
from fabric.communicators import Communicator

__all__ = ["BackgroundSaves", "PendingSave"]


class PendingSave:
    """A save that goes on while training does; ``fabric.save(..., async_=True)`` returns it.

    What goes wrong in it is raised, on every process, by whichever comes first: :meth:`wait`, the next ``save``,
    ``load`` or ``load_raw``, or the end of the job. The checkpoint that was there before is untouched then.

    Attributes:
        path: where it is saved to.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._write, self._error, self._is_told = write, None, False
        # Not a daemon: a process that ends waits for it.
        self._thread = Thread(target=self._run, name="fabric-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not. Not a collective."""
        return not self._thread.is_alive()

    def exception(self) -> BaseException | None:
        """What went wrong, or None; waits for the end. Not a collective, and it is not raised again afterwards."""
        self._thread.join()
        self._is_told = True
        return self._error

    def wait(self) -> None:
        """Return when the checkpoint is on the disk. Not a collective.

        Raises:
            CheckpointError: it failed, here or on another process.
        """
        error = self.exception()
        if error is not None:
            raise error

    def settle(self) -> None:
        """As :meth:`wait`, but what the caller has been told is not raised again."""
        self._thread.join()
        if not self._is_told and self._error is not None:
            self._error.add_note(f"This was fabric.save({str(self.path)!r}, ..., async_=True), which began earlier.")
            self.wait()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - raised by wait(), or by the next call
            self._error = error
        # What it holds is not needed any more, and the handle may live on.
        del self._write

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "under way"
        return f"PendingSave({str(self.path)!r}, {state})"


class BackgroundSaves:
    """The saves of one job that go on beside its loop; see ``[Note: Thread]``.

    Args:
        group: all ranks, in a group of their own; collective when first called.
    """

    def __init__(self, group: Callable[[], Communicator]) -> None:
        self._group = group
        self._buffers = SnapshotBuffers()
        self._pending: PendingSave | None = None

    def begin(
        self,
        communicator: Communicator,
        asked: str,
        path: Path,
        state: Mapping[str, Any],
        write: Callable[[dict[str, Any], Communicator], None],
    ) -> PendingSave:
        """Copy ``state`` and return while ``write(copy, group)`` goes on. Collective; nothing may be under way.

        Args:
            communicator: the ranks.
            asked: what is being done, for errors.
            path: where ``write`` writes.
            state: plain state with tensors, whole or sharded.
            write: collective over the group that it is given.

        Raises:
            CheckpointError: the copy failed on another rank, such as for want of memory.
        """
        assert self._pending is None, "settle() comes first"
        group = self._group()
        snapshot = together(communicator, asked, lambda: self._buffers.take(state))
        self._pending = PendingSave(path, lambda: write(snapshot, group))
        return self._pending

    def settle(self, communicator: Communicator) -> None:
        """Return when nothing is under way. Collective after :meth:`begin`.

        Raises:
            CheckpointError: the save that was under way failed, and not every rank was told by its handle.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            together(communicator, f"fabric.save({str(pending.path)!r}, ..., async_=True)", pending.settle)

    def close(self) -> None:
        """Return when nothing is under way, and let go of the memory. Not a collective.

        Raises:
            CheckpointError: the save that was under way failed, and this rank was not told.
        """
        pending, self._pending = self._pending, None
        self._buffers = SnapshotBuffers()
        if pending is not None:
            pending.settle()
