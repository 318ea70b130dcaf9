"""Saves that run in the background of the training loop, one at a time."""

import copy
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fabric._torch import dtensor_like, is_dtensor, local_tensor
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
        is_raised: whether the save has ended and a caller has received its error, if any.
    """

    def __init__(self, path: Any, write: Callable[[], None]) -> None:
        """Start a thread that calls ``write``, which saves the checkpoint to ``path``."""
        self.path = path
        self.is_raised = False
        # The executor is not shut down. The interpreter waits for its thread at exit, so a program
        # that ends early does not cut off the save.
        self._future = ThreadPoolExecutor(1, "fabric-save").submit(write)

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Not a collective."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Wait for the end of the save, and return its error or None. Not a collective.

        Since the caller gets the error, the next save or load, and the end of the job, do not raise
        the error again.
        """
        error = self._future.exception()
        self.is_raised = True
        return error

    def wait(self) -> None:
        """Return when the checkpoint is on the disk. Not a collective.

        Raises:
            CheckpointError: the save failed, here or on another process.
        """
        error = self.exception()  # waits for the end of the save
        if error is not None:
            raise error


class _StorageKey(NamedTuple):
    """The properties that no two tensor storages have in common while both are alive."""

    device: torch.device
    address: int
    nbytes: int


class _StorageCopy(NamedTuple):
    """A copied storage.

    Attributes:
        buffer: the copy, as bytes on the CPU.
        source: a tensor that keeps the copied storage alive. Otherwise another storage could get
            the same address, which is part of the key.
    """

    buffer: Tensor
    source: Tensor


class _BufferKind(NamedTuple):
    """The properties that a buffer must have to hold the copy of a storage."""

    nbytes: int
    is_pinned: bool


# [Note: Staging buffers]
# The state is copied into memory that does not change while training goes on. Each tensor *storage*
# is copied once and whole, as `torch.save` writes it: tensors that shared memory share memory in
# the copy, and the file is the same as without a copy. To allocate memory costs several times the
# copy itself, so the buffers of one save are used again for the next save.
class StagingBuffers:
    """Memory on the CPU for the copy of a state. The next copy overwrites the last one."""

    def __init__(self) -> None:
        # The buffers of the last copy that the present copy has not used yet.
        self._unused_buffers: defaultdict[_BufferKind, list[Tensor]] = defaultdict(list)
        # The storages that the present copy has copied. Empty between two copies.
        self._copies: dict[_StorageKey, _StorageCopy] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state`` on the CPU. Not a collective.

        The copy of a DTensor is a DTensor with a copy of the local shard. The result is valid until
        the next call, which overwrites its tensors.
        """
        leaves, _ = flatten(state)
        copied_tensors: dict[int, Any] = {}
        try:
            with torch.no_grad():
                for leaf in leaves:
                    if isinstance(leaf, Tensor):
                        copied_tensors[id(leaf)] = self._copy_tensor(leaf)
            # The second argument is the memo of deepcopy(): the finished copy of an object by its
            # id. So deepcopy() takes these copies of tensors, and copies all other objects itself.
            return copy.deepcopy(state, copied_tensors)
        finally:
            # Also after an error: with the storages of this copy in self._copies, the next copy
            # would return their old values.
            self._release_buffers()

    def _release_buffers(self) -> None:
        """Make the buffers of the present copy available to the next copy, and end the copy.

        Buffers that this copy did not use are freed: the next state usually has the same sizes as
        this state, and would not use these buffers either.
        """
        self._unused_buffers.clear()
        for storage_copy in self._copies.values():
            buffer = storage_copy.buffer
            kind = _BufferKind(buffer.nbytes, buffer.is_pinned())
            self._unused_buffers[kind].append(buffer)
        self._copies.clear()

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the CPU.

        The copy of a DTensor is a DTensor with a copy of the local shard. The copy of any other
        tensor has the same attributes and the same ``requires_grad``.
        """
        # The storage of a conjugate or negative view has other values than the view. These calls
        # compute the values of such a view.
        local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        # Only a dense tensor is a view of one storage. All empty storages have the address 0, which
        # would not tell them apart.
        is_dense = local.layout is torch.strided and not local.is_quantized
        has_storage = is_dense and local.untyped_storage().nbytes() > 0
        if has_storage:
            copied = self._copy_in_buffer(local)
        else:
            # cpu() alone would return a CPU tensor itself, and not a copy.
            copied = local.clone().cpu()
        if is_dtensor(tensor):
            return dtensor_like(tensor, copied)
        if isinstance(tensor, nn.Parameter):
            # requires_grad is True by default, for which nn.Parameter would raise for integers. The
            # last line sets the value of the original.
            copied = nn.Parameter(copied, requires_grad=False)
        # torch.save() writes the attributes that were set on a tensor, too.
        vars(copied).update(copy.deepcopy(vars(tensor)))
        return copied.requires_grad_(tensor.requires_grad)

    def _copy_in_buffer(self, local: Tensor) -> Tensor:
        """Return a copy of a dense tensor, as a view of the copy of its whole storage.

        The first tensor of a storage has the storage copied. Later tensors of the storage share
        this copy.

        Args:
            local: the tensor, on any device. It is no DTensor: of a DTensor, pass the local tensor.
        """
        storage = local.untyped_storage()
        key = _StorageKey(storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._copies:
            self._copies[key] = self._copy_whole_storage(local)
        buffer = self._copies[key].buffer
        view = torch.empty(0, dtype=local.dtype)
        # set_() has the empty tensor share the buffer, with the layout of ``local``.
        return view.set_(
            buffer.untyped_storage(), local.storage_offset(), local.size(), local.stride()
        )

    def _copy_whole_storage(self, local: Tensor) -> _StorageCopy:
        """Copy the storage of a dense tensor to a buffer on the CPU.

        A buffer of the last :meth:`copy` is used again if one of the same size is unused. Otherwise
        a new buffer is allocated. The copy is finished when the method returns. The storage has at
        least one byte.
        """
        storage = local.untyped_storage()
        # A copy from a CUDA device to pinned memory is faster.
        kind = _BufferKind(storage.nbytes(), is_pinned=local.is_cuda)
        unused_buffers = self._unused_buffers[kind]
        if unused_buffers:
            buffer = unused_buffers.pop()
        else:
            buffer = torch.empty(kind.nbytes, dtype=torch.uint8, pin_memory=kind.is_pinned)
        # If the size is a multiple of 8, 64-bit words are copied: single bytes take a third longer.
        word = torch.int64
        if kind.nbytes % 8 != 0:
            word = torch.uint8
        # A view of the whole storage as bytes.
        source = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
        buffer.view(word).copy_(source.view(word))
        # The result refers to the storage. So the storage stays alive until the state is copied,
        # and no other storage gets its address, which is a part of the key in self._copies.
        return _StorageCopy(buffer=buffer, source=source)


# [Note: Thread]
# A thread writes, not a process. torch releases the GIL while it checksums, writes and flushes a
# tensor, so the loop loses little more than the CPU time of the writing. A process would first have
# to import torch, hold the copy in shared memory and join a process group of its own. The thread's
# collectives run on a group that nothing else uses, so that they cannot be confused with the
# collectives of the loop.
class AsyncSaver:
    """The background saves of one job, of which one runs at a time.

    Args:
        background_communicator: returns a communicator of all ranks that only background saves use.
            The first call is collective, because it creates the process group.

    Attributes:
        buffers: the memory into which the state of a background save is copied.
        pending: the save that may be running. None if no save is running.
        files: a stack of open files, such as locks, that is closed after the last save of the job.
    """

    def __init__(self, background_communicator: Callable[[], Communicator]) -> None:
        """Create the state of background saves. Nothing is allocated before the first save.

        ``background_communicator`` returns the communicator that only background saves use.
        """
        self.background_communicator = background_communicator
        self.buffers = StagingBuffers()
        # The save that may be running.
        self.pending: PendingSave | None = None
        # Files that stay open until the last save of the job has ended, such as locks.
        self.files = ExitStack()

    def join(self) -> None:
        """Wait until no save is running. Not a collective.

        Raises:
            CheckpointError: the save that was running failed, and nothing has raised its error on
                this rank yet.
        """
        pending = self.pending
        # Set before the error is raised, so that a second call does not raise it again.
        self.pending = None
        if pending is None or pending.is_raised:
            return
        error = pending.exception()
        if error is not None:
            call = f"fabric.save({str(pending.path)!r}, ..., async_=True)"
            error.add_note(f"This was {call}, which began earlier.")
            raise error

    def close(self) -> None:
        """Free the buffers, wait until no save is running, and close the files.

        Called at the end of the job. Raises the error of the last save, as :meth:`join` does. A
        save that is still running holds references to the buffers that it uses.
        """
        self.buffers = StagingBuffers()
        # The end of the block closes the files, even if join() raises.
        with self.files:
            self.join()
