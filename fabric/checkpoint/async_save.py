"""Saves that run in the background of the training loop, one at a time.

[Note: Thread] A thread writes, not a process. torch releases the GIL while it checksums, writes and flushes a tensor,
so the loop loses little more than the CPU time of the writing. A process would first have to import torch, hold the
copy in shared memory and join a process group of its own. The thread's collectives run on a group that nothing else
uses, so that they cannot be confused with those of the loop.

[Note: Staging buffers] The state is copied into memory that does not change while training goes on. Each tensor
*storage* is copied once and whole, as ``torch.save`` writes it: tensors that shared memory share it in the copy, and
the file is the same as without a copy. Newly allocated memory costs several times the copy itself, so the buffers are
kept for the next save.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fabric._torch import around_local, local_tensor
from fabric.communicators import Communicator
from fabric.tree import flatten

__all__ = ["AsyncSaver", "PendingSave", "StagingBuffers"]


class PendingSave:
    """A save that runs in the background; ``fabric.save(..., async_=True)`` returns it.

    If it fails, the first of these calls raises its error on every process: :meth:`wait`, the next ``save``, ``load``
    or ``load_raw``, or the end of the job. The previous checkpoint is untouched then.

    Attributes:
        path: where it is saved to; a ``Path``, or a ``RemotePath`` for a path with a scheme.
        is_raised: whether it has ended and a caller has received its result.
    """

    def __init__(self, path: Any, write: Callable[[], None]) -> None:
        self.path = path
        self.is_raised = False
        # The interpreter waits for this thread at exit.
        self._future = ThreadPoolExecutor(1, "fabric-save").submit(write)

    def done(self) -> bool:
        """Whether it has ended, successfully or not. Not a collective."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error, or None. Not a collective; the error is not raised again afterward."""
        error = self._future.exception()
        self.is_raised = True
        return error

    def wait(self) -> None:
        """Return when the checkpoint is on the disk. Not a collective.

        Raises:
            CheckpointError: it failed, here or on another process.
        """
        if (error := self.exception()) is not None:
            raise error


class StagingBuffers:
    """Copies of one state at a time: the next copy overwrites it. See ``[Note: Staging buffers]``."""

    def __init__(self) -> None:
        # By size, and whether they are pinned.
        self._free: defaultdict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        self._used: dict[Any, tuple[Tensor, Tensor]] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state`` on the CPU, with the local shards of DTensors. Not a collective."""
        with torch.no_grad():
            copies: Any = {
                id(each): self._copy(each) for each in flatten(state)[0] if isinstance(each, Tensor)
            }
        copied = copy.deepcopy(state, copies)
        self._free.clear()
        for buffer, _ in self._used.values():
            self._free[buffer.nbytes, buffer.is_pinned()].append(buffer)
        self._used.clear()
        return copied

    def _copy(self, tensor: Tensor) -> Tensor:
        local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        is_dense = (
            local.layout is torch.strided
            and not local.is_quantized
            and local.untyped_storage().nbytes() > 0
        )
        copied = self._view(local) if is_dense else local.clone().cpu()
        if local_tensor(tensor) is not tensor:
            return around_local(tensor, copied)
        copied = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
        vars(copied).update(copy.deepcopy(vars(tensor)))
        return copied.requires_grad_(tensor.requires_grad)

    def _view(self, local: Tensor) -> Tensor:
        storage = local.untyped_storage()
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._used:
            size = storage.nbytes()
            pinned = local.is_cuda
            free = self._free[size, pinned]
            buffer = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            # As 64-bit words where possible: torch takes a third longer to copy bytes.
            word = torch.uint8 if size % 8 else torch.int64
            source = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            buffer.view(word).copy_(source.view(word))
            self._used[key] = buffer, source  # kept alive meanwhile, since its address is the key
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(
            self._used[key][0].untyped_storage(),
            local.storage_offset(),
            local.size(),
            local.stride(),
        )


class AsyncSaver:
    """Runs the saves of one job in the background; see ``[Note: Thread]``.

    Args:
        group: all ranks, in a group of their own; collective when first called.

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
            CheckpointError: the save that was running failed, and nothing has raised its error on this rank yet.
        """
        pending = self.pending
        self.pending = None
        if (
            pending is not None
            and not pending.is_raised
            and (error := pending.exception()) is not None
        ):
            error.add_note(
                f"This was fabric.save({str(pending.path)!r}, ..., async_=True), which began earlier."
            )
            raise error

    def close(self) -> None:
        """As :meth:`join`, and free the memory."""
        self.buffers = StagingBuffers()
        with self.files:
            self.join()
