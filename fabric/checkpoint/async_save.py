"""Saves that run in the background of the training loop, one at a time.

[Note: Thread]
A thread writes, not a process. torch releases the GIL while it checksums, writes and flushes a
tensor, so the loop loses little more than the CPU time of the writing. A process would first have
to import torch, hold the copy in shared memory and join a process group of its own. The thread's
collectives run on a group that nothing else uses, so that they cannot be confused with those of the
loop.

[Note: Staging buffers]
The state is copied into memory that does not change while training goes on. Each tensor *storage*
is copied once and whole, as ``torch.save`` writes it: tensors that shared memory share it in the
copy, and the file is the same as without a copy. Newly allocated memory costs several times the
copy itself, so the buffers are kept for the next save.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fabric._torch import dtensor_like, local_tensor
from fabric.communicators import Communicator
from fabric.tree import flatten

__all__ = ["AsyncSaver", "PendingSave", "StagingBuffers"]


class PendingSave:
    """A save that runs in the background. ``fabric.save(..., async_=True)`` returns it.

    If the save fails, the first of these calls raises its error on every process: :meth:`wait`, the
    next ``save``, ``load`` or ``load_raw``, or the end of the job. The previous checkpoint is then
    untouched.

    Attributes:
        path: where the checkpoint is saved to; a ``Path``, or a ``RemotePath`` for a path with a
            scheme.
        is_raised: whether the save has ended and a caller has received its result.
    """

    def __init__(self, path: Any, write: Callable[[], None]) -> None:
        self.path = path
        self.is_raised = False
        # The interpreter waits for this thread at exit.
        self._future = ThreadPoolExecutor(1, "fabric-save").submit(write)

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Not a collective."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Wait for the end, and return the error or None. Not a collective.

        The error is not raised again afterward.
        """
        error = self._future.exception()
        self.is_raised = True
        return error

    def wait(self) -> None:
        """Return when the checkpoint is on the disk. Not a collective.

        Raises:
            CheckpointError: the save failed, here or on another process.
        """
        error = self.exception()
        if error is not None:
            raise error


class _StorageKey(NamedTuple):
    """What tells one tensor storage from another while both are alive."""

    device: torch.device
    address: int
    nbytes: int


class _StorageCopy(NamedTuple):
    """A copied storage.

    Attributes:
        buffer: the copy, as bytes on the CPU.
        source: the copied storage. It is kept alive, since its address is the key.
    """

    buffer: Tensor
    source: Tensor


class _BufferKind(NamedTuple):
    """The properties that a buffer must have for a storage."""

    nbytes: int
    is_pinned: bool


class StagingBuffers:
    """Memory for copies of a state. Each copy overwrites the last one.

    See ``[Note: Staging buffers]``.
    """

    def __init__(self) -> None:
        self._free: defaultdict[_BufferKind, list[Tensor]] = defaultdict(list)
        self._copies: dict[_StorageKey, _StorageCopy] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state`` on the CPU, with the local shards of DTensors.

        Not a collective.
        """
        leaves, _ = flatten(state)
        copies: dict[int, Any] = {}
        with torch.no_grad():
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    copies[id(leaf)] = self._copy_tensor(leaf)
        # The memo has a copy of every tensor, so that deepcopy() copies everything else.
        copied = copy.deepcopy(state, copies)
        self._free.clear()
        for buffer, _ in self._copies.values():
            self._free[_BufferKind(buffer.nbytes, buffer.is_pinned())].append(buffer)
        self._copies.clear()
        return copied

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, or of the local shard of a DTensor, on the CPU."""
        local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        is_dense = local.layout is torch.strided and not local.is_quantized
        if is_dense and local.untyped_storage().nbytes() > 0:
            copied = self._copy_in_buffer(local)
        else:
            copied = local.clone().cpu()
        if local_tensor(tensor) is not tensor:
            return dtensor_like(tensor, copied)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=False)
        vars(copied).update(copy.deepcopy(vars(tensor)))
        return copied.requires_grad_(tensor.requires_grad)

    def _copy_in_buffer(self, local: Tensor) -> Tensor:
        """Return a view of the copy of a dense tensor's storage. Copy the storage if needed."""
        storage = local.untyped_storage()
        key = _StorageKey(storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._copies:
            self._copies[key] = self._copy_storage(local)
        buffer = self._copies[key].buffer
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(
            buffer.untyped_storage(), local.storage_offset(), local.size(), local.stride()
        )

    def _copy_storage(self, local: Tensor) -> _StorageCopy:
        """Copy the storage of a dense tensor to a free buffer, or to a new one."""
        storage = local.untyped_storage()
        kind = _BufferKind(storage.nbytes(), local.is_cuda)
        free = self._free[kind]
        if free:
            buffer = free.pop()
        else:
            buffer = torch.empty(kind.nbytes, dtype=torch.uint8, pin_memory=kind.is_pinned)
        # As 64-bit words where possible: torch takes a third longer to copy bytes.
        word = torch.uint8 if kind.nbytes % 8 else torch.int64
        source = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
        buffer.view(word).copy_(source.view(word))
        return _StorageCopy(buffer, source)


class AsyncSaver:
    """The background saves of one job. See ``[Note: Thread]``.

    Args:
        group: returns all ranks, in a group of their own. Collective when first called.

    Attributes:
        buffers: what background saves are copied into.
        pending: the save that may be running.
        files: closed after the last save.
    """

    def __init__(self, group: Callable[[], Communicator]) -> None:
        self.group = group
        self.buffers = StagingBuffers()
        self.pending: PendingSave | None = None
        self.files = ExitStack()

    def join(self) -> None:
        """Wait until no save is running. Not a collective.

        Raises:
            CheckpointError: the save that was running failed, and nothing has raised its error on
                this rank yet.
        """
        pending = self.pending
        self.pending = None
        if pending is None or pending.is_raised:
            return
        error = pending.exception()
        if error is not None:
            call = f"fabric.save({str(pending.path)!r}, ..., async_=True)"
            error.add_note(f"This was {call}, which began earlier.")
            raise error

    def close(self) -> None:
        """Free the memory, and wait as :meth:`join` does."""
        self.buffers = StagingBuffers()
        with self.files:
            self.join()
