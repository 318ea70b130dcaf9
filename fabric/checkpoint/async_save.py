"""Saves that run in the background of the training loop, one at a time.

[Note: Thread] A thread writes, not a process: torch lets other threads run while it sums, writes and flushes a tensor,
so the loop loses what the writing takes of the processor and little more, while a process would have to import torch,
hold the copy in shared memory and join a process group of its own first. Its collectives run on a group that nothing
else uses, so that they cannot be taken for those of the loop.

[Note: Staging buffers] The state is copied into memory that stays as it is while training goes on. What is no tensor
goes through pickle, which keeps types, attributes and references; it is plain, so nothing in it runs code of the
user's. Of tensors each *storage* is copied once and whole, as ``torch.save`` writes it: what shared memory shares it in
the copy, and the file is the one that a save without a copy would have written. Memory that the system hands out anew
costs several times the copy itself, so it is kept for the next save.
"""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fabric._torch import around_local, local_tensor
from fabric.checkpoint.atomic import raise_on_any_rank_error
from fabric.communicators import Communicator

__all__ = ["AsyncSaver", "PendingSave", "StagingBuffers"]


class PendingSave:
    """A save that runs while training does; ``fabric.save(..., async_=True)`` returns it.

    What goes wrong in it is raised, on every process, by the first of these calls: :meth:`wait`, the next ``save``,
    ``load`` or ``load_raw``, or the end of the job. The checkpoint that was there before is untouched then.

    Attributes:
        path: where it is saved to.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._write, self._error, self._is_raised = write, None, False
        # Not a daemon: a process that ends waits for it.
        self._thread = Thread(target=self._run, name="fabric-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not. Not a collective."""
        return not self._thread.is_alive()

    def exception(self) -> BaseException | None:
        """What went wrong, or None; waits for the end. Not a collective, and it is not raised again afterward."""
        self._thread.join()
        self._is_raised = True
        return self._error

    def wait(self) -> None:
        """Return when the checkpoint is on the disk. Not a collective.

        Raises:
            CheckpointError: it failed, here or on another process.
        """
        error = self.exception()
        if error is not None:
            raise error

    def join(self) -> None:
        """As :meth:`wait`, but what was raised before is not raised again."""
        self._thread.join()
        if not self._is_raised and self._error is not None:
            self._error.add_note(f"This was fabric.save({str(self.path)!r}, ..., async_=True), which began earlier.")
            self.wait()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - raised by wait(), or by the next call
            self._error = error
        # What it holds is not needed any more, and the handle may live on.
        del self._write


class AsyncSaver:
    """Runs the saves of one job in the background; see ``[Note: Thread]``.

    Args:
        group: all ranks, in a group of their own; collective when first called.

    Attributes:
        pending: the save that may be running.
    """

    def __init__(self, group: Callable[[], Communicator]) -> None:
        self._group = group
        self._buffers = StagingBuffers()
        self.pending: PendingSave | None = None

    def begin(
        self,
        communicator: Communicator,
        request: str,
        path: Path,
        state: Mapping[str, Any],
        write: Callable[[dict[str, Any], Communicator], None],
    ) -> PendingSave:
        """Copy ``state`` and return while ``write(copy, group)`` runs. Collective; no other save may be running.

        Args:
            communicator: the ranks.
            request: what is being done, for errors.
            path: where it is saved to.
            state: plain, with sharded tensors.
            write: the rest of the save, with collectives of its own.
        """
        group = self._group()
        staged = raise_on_any_rank_error(communicator, request, lambda: self._buffers.copy(state))
        self.pending = PendingSave(path, lambda: write(staged, group))
        return self.pending

    def join(self, communicator: Communicator) -> None:
        """Return when no save is running. Collective after :meth:`begin`.

        Raises:
            CheckpointError: the save that was running failed, and its handle has not raised that on every rank.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            request = f"fabric.save({str(pending.path)!r}, ..., async_=True)"
            raise_on_any_rank_error(communicator, request, pending.join)

    def close(self) -> None:
        """Return when no save is running, and free the memory. Not a collective.

        Raises:
            CheckpointError: the save that was running failed, and nothing has raised that on this rank.
        """
        pending, self.pending = self.pending, None
        self._buffers = StagingBuffers()
        if pending is not None:
            pending.join()


class StagingBuffers:
    """Copies of one state at a time: the next copy overwrites it. See ``[Note: Staging buffers]``."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``state``, on the CPU; of a DTensor the part that this rank holds. Not a collective."""
        stream, copying = io.BytesIO(), _Copying(self._kept)
        tensors: dict[int, Tensor] = {}
        _WithoutTensors(stream, tensors).dump(dict(state))
        stream.seek(0)
        with torch.no_grad():
            copies = {key: copying.copy(tensor) for key, tensor in tensors.items()}
        copied: dict[str, Any] = _WithCopies(stream, copies).load()
        self._kept = [*copying.used.values()]
        return copied


class _Copying:
    """Copies tensors, each storage once, into buffers of the right size or new ones."""

    def __init__(self, kept: list[Tensor]) -> None:
        self.used: dict[Any, Tensor] = {}
        self._sources: list[Tensor] = []  # kept alive, since their addresses are the keys
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        for buffer in kept:
            self._free.setdefault((buffer.nbytes, buffer.is_pinned()), []).append(buffer)

    def copy(self, tensor: Tensor) -> Tensor:
        local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        is_dense = local.layout is torch.strided and not local.is_quantized and local.untyped_storage().nbytes() > 0
        copied = self._view(local) if is_dense else local.clone().cpu()
        if local_tensor(tensor) is not tensor:
            return around_local(tensor, copied)
        copied = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
        vars(copied).update(copy.deepcopy(vars(tensor)))
        return copied.requires_grad_(tensor.requires_grad)

    def _view(self, local: Tensor) -> Tensor:
        storage = local.untyped_storage()
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self.used:
            self._sources.append(local)
            source = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            self.used[key] = buffer = self._buffer(storage.nbytes(), pinned=local.is_cuda)
            # Word by word where that is possible: byte by byte takes torch a third longer.
            word = torch.uint8 if storage.nbytes() % 8 else torch.int64
            buffer.view(word).copy_(source.view(word))
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(self.used[key].untyped_storage(), local.storage_offset(), local.size(), local.stride())

    def _buffer(self, size: int, pinned: bool) -> Tensor:
        free = self._free.get((size, pinned))
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


# Not inside of the function that uses them: a class is a cycle, and would keep whole states until garbage is collected.
class _WithoutTensors(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: dict[int, Tensor]) -> None:
        pickle.Pickler.__init__(self, stream, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    @override
    def persistent_id(self, value: Any, /) -> int | None:
        return id(self._tensors.setdefault(id(value), value)) if isinstance(value, Tensor) else None


class _WithCopies(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, copies: dict[int, Tensor]) -> None:
        pickle.Unpickler.__init__(self, stream)
        self._copies = copies

    @override
    def persistent_load(self, key: Any, /) -> Tensor:
        return self._copies[key]
