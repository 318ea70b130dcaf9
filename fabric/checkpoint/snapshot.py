"""A copy of a state that stays as it is while training goes on, in memory that is kept from one copy to the next.

[Note: Snapshot] What is no tensor goes through pickle, which keeps types, attributes and references; it is plain, so
nothing in it runs code of the user's. Of tensors each *storage* is copied once and whole, as ``torch.save`` writes it:
what shared memory shares it in the copy, and the file is the one that a save without a copy would have written. Memory
that the system hands out anew costs several times the copy itself, so it is kept for the next one.
"""

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fabric._torch import around_local, local_tensor

__all__ = ["SnapshotBuffers"]


class SnapshotBuffers:
    """Takes one snapshot at a time: the next overwrites it. See ``[Note: Snapshot]``."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``state``, on the CPU; of a DTensor the part that this rank holds. Not a collective."""
        stream, copying = io.BytesIO(), _Copying(self._kept)
        tensors: dict[int, Tensor] = {}
        _WithoutTensors(stream, tensors).dump(dict(state))
        stream.seek(0)
        with torch.no_grad():
            copies = {key: copying.copy(tensor) for key, tensor in tensors.items()}
        taken: dict[str, Any] = _WithCopies(stream, copies).load()
        self._kept = [*copying.used.values()]
        return taken


class _Copying:
    """Copies tensors, each storage once, into buffers of the right size or new ones."""

    def __init__(self, kept: list[Tensor]) -> None:
        self.used: dict[Any, Tensor] = {}
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        for buffer in kept:
            self._free.setdefault((buffer.nbytes, buffer.is_pinned()), []).append(buffer)

    def copy(self, tensor: Tensor) -> Tensor:
        local = local_tensor(tensor).detach().resolve_conj().resolve_neg()
        is_dense = local.layout is torch.strided and not local.is_quantized and local.untyped_storage().nbytes() > 0
        copied = self._view(local) if is_dense else local.clone().cpu()
        if local_tensor(tensor) is not tensor:
            return around_local(tensor, copied)
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        elif tensor.requires_grad:
            copied.requires_grad_()
        if vars(tensor):
            vars(copied).update(copy.deepcopy(vars(tensor)))
        return copied

    def _view(self, local: Tensor) -> Tensor:
        storage = local.untyped_storage()
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self.used:
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
